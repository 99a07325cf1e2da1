/* SPDX-License-Identifier: MIT */
/*
 * gguf.c: the GGUF reader. See gguf.h for who may call it and what it promises.
 *
 * Three steps, each over data that the one before has checked: the directory of a file (keys, then
 * tensors) is read front to back by a bounded reader that looks at every length exactly once; keys
 * and tensors are sorted, which finds duplicates and overlaps and serves lookups (n log n whatever
 * names a hostile file chooses, where a hash table could be made to collide); the parts of a split
 * are compared with each other. Refuses to know what a key means, except general.alignment and
 * split.*, which are part of the format.
 * Invariant: no length is kept in the mapping. Whoever can write the file while it is mapped can
 * change what a string or a weight says, but not where it ends.
 */
#include "daemon/model/gguf.h"

#include "daemon/model/guard.h"

#include <assert.h>
#include <fcntl.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF is read in place: little endian");
_Static_assert(sizeof(size_t) == 8, "GGUF is mapped whole: 64 bits");

/*
 * A sparse file costs nothing and is as large as its author likes, so that checks against the
 * file's size alone bound neither time nor memory. Real models stay ten times below these bounds: a
 * large vocabulary takes 8 MiB, 50 keys are many, and one tensor for every expert makes tens of
 * thousands. All bounds are for the parts of a split together; offsets within a directory fit in 32
 * bits thanks to the first.
 */
#define DIRECTORY_MIB 256U
#define DIRECTORY_MAX ((size_t)DIRECTORY_MIB << 20)
#define KEYS_MAX      ((uint64_t)1 << 16)
#define TENSORS_MAX   ((uint64_t)1 << 20)
/* Every part keeps a descriptor, and a process has 1024 unless told otherwise. */
#define PARTS_MAX     512

#define KEY_BYTES_MAX    65535 /* of the format */
#define NAME_BYTES_MAX   64    /* of the format, tensor names */
/*
 * The least bytes of a record; they turn "how many" into "cannot fit" before anything is allocated.
 */
#define KEY_BYTES_MIN    (8 + 1 + 4 + 1)         /* key, type, value */
#define TENSOR_BYTES_MIN (8 + 1 + 4 + 8 + 4 + 8) /* name, n_dims, one dimension, type, offset */

/* Arrays of arrays are allowed, and nobody writes them: as deep as a tensor is. */
#define ARRAY_DEPTH_MAX 4

/*
 * The format wants multiples of 8. Above the largest page of any Linux machine an alignment has no
 * use, only wraps.
 */
#define ALIGNMENT_DEFAULT 32
#define ALIGNMENT_MIN     8
#define ALIGNMENT_MAX     65536

#define SHOWN_BYTES_MAX 80 /* of a key or name in an error text */

enum value_type {
	VALUE_U8,
	VALUE_I8,
	VALUE_U16,
	VALUE_I16,
	VALUE_U32,
	VALUE_I32,
	VALUE_F32,
	VALUE_BOOL,
	VALUE_STR,
	VALUE_ARRAY,
	VALUE_U64,
	VALUE_I64,
	VALUE_F64,
	VALUE_TYPE_MAX,
};

/* Of a value or element; 0: it says so itself. */
static const uint8_t value_bytes[VALUE_TYPE_MAX] = {
	[VALUE_U8] = 1,  [VALUE_I8] = 1,  [VALUE_U16] = 2,  [VALUE_I16] = 2, [VALUE_U32] = 4,
	[VALUE_I32] = 4, [VALUE_F32] = 4, [VALUE_BOOL] = 1, [VALUE_STR] = 0, [VALUE_ARRAY] = 0,
	[VALUE_U64] = 8, [VALUE_I64] = 8, [VALUE_F64] = 8,
};

struct str {
	const char *s; /* in the mapping, not NUL-terminated */
	size_t len;
};

static struct str str_of(const char *s)
{
	return (struct str){ s, strlen(s) };
}

struct gguf_array {
	enum value_type type;
	size_t n;
	const uint8_t *data; /* the first element, unaligned */
	/* Strings only, owned: n + 1 offsets from data; string i is [at[i] + 8, at[i + 1]). */
	uint32_t *at;
};

struct kv {
	struct str key;
	enum value_type type;
	union {
		uint64_t u; /* integers, sign-extended, and bool */
		double f;
		struct str s;
		struct gguf_array a;
	};
};

struct part {
	struct gguf_part file; /* path, fd and, when mapped, data are owned */
	bool mapped;
	struct guard *guard;   /* over the mapping */
	struct timespec mtime; /* when it was opened */
	struct kv *kv;         /* sorted by key */
	size_t n_kv;
	char (*names)[NAME_BYTES_MAX + 1]; /* of this part's tensors */
};

struct gguf {
	struct part *parts;
	size_t n_parts;
	struct gguf_tensor *tensors;
	size_t n_tensors;
	const struct gguf_tensor **by_name;
	size_t directory_bytes; /* of all parts so far */
};

/*
 * Walks one directory. The first error sticks: everything read after it is zero or empty, and later
 * errors, which may only follow from that, are dropped. So a function may read several fields
 * before it looks at err. object and name say what is being read, for the error text.
 */
struct reader {
	int err;
	const char *path;
	const uint8_t *data;
	size_t pos, end; /* end: of the directory's bound or of the file */
	size_t bytes;    /* of the file */
	const char *object;
	uint64_t number;
	struct str name; /* empty: not known yet, use number */
	char **ret_error;
};

static int append_printable(struct buf *b, struct str s, size_t max)
{
	int r = 0;

	for (size_t i = 0; i < MIN(s.len, max) && r == 0; i++) {
		unsigned char c = (unsigned char)s.s[i];

		if (c >= 0x20 && c < 0x7f)
			r = buf_append(b, &s.s[i], 1);
		else
			r = buf_printf(b, "\\x%02x", c);
	}
	if (r == 0 && s.len > max)
		r = buf_append(b, "...", 3);
	return r;
}

static int append_object(struct buf *b, const struct reader *r)
{
	int k;

	if (!r->object)
		return 0;
	if (r->name.len == 0)
		return buf_printf(b, ": %s number %" PRIu64, r->object, r->number);
	k = buf_printf(b, ": %s \"", r->object);
	if (k == 0)
		k = append_printable(b, r->name, SHOWN_BYTES_MAX);
	return k < 0 ? k : buf_append(b, "\"", 1);
}

/*
 * Unless there was an error before: remembers this one, with the text `PATH: key "NAME": reason`.
 * Returns the first.
 */
_printf_(3, 4) static int refuse(struct reader *r, int err, const char *format, ...)
{
	_cleanup_(freep) char *reason = NULL;
	struct buf b = {};
	va_list ap;
	int k;

	if (r->err)
		return r->err;
	r->err = err;
	if (!r->ret_error)
		return err;
	va_start(ap, format);
	if (vasprintf(&reason, format, ap) < 0)
		reason = NULL;
	va_end(ap);
	k = append_printable(&b, str_of(r->path), SIZE_MAX);
	if (k == 0)
		k = append_object(&b, r);
	if (k == 0)
		k = buf_append(&b, ": ", 2);
	if (k == 0)
		k = reason ? append_printable(&b, str_of(reason), SIZE_MAX) : -ENOMEM;
	if (k < 0)
		buf_done(&b);
	*r->ret_error = b.data;
	return err;
}

#define bad(r, ...) refuse(r, -EBADMSG, __VA_ARGS__)

static size_t left(const struct reader *r)
{
	return r->end - r->pos;
}

static int too_many(struct reader *r, uint64_t n, const char *what)
{
	if (r->end < r->bytes)
		return bad(r, "%" PRIu64 " %s do not fit in a directory of at most %u MiB", n, what,
			   DIRECTORY_MIB);
	return bad(r, "%" PRIu64 " %s do not fit in the %zu bytes left of the file", n, what, left(r));
}

/* NULL after an error. */
static const uint8_t *take(struct reader *r, uint64_t n, const char *what)
{
	const uint8_t *p;

	if (n > left(r))
		too_many(r, n, what);
	if (r->err)
		return NULL;
	p = r->data + r->pos;
	r->pos += n;
	return p;
}

static uint32_t take_u32(struct reader *r)
{
	const uint8_t *p = take(r, sizeof(uint32_t), "bytes");
	uint32_t v = 0;

	if (p)
		memcpy(&v, p, sizeof(v));
	return v;
}

static uint64_t take_u64(struct reader *r)
{
	const uint8_t *p = take(r, sizeof(uint64_t), "bytes");
	uint64_t v = 0;

	if (p)
		memcpy(&v, p, sizeof(v));
	return v;
}

static struct str take_str(struct reader *r)
{
	uint64_t len = take_u64(r);
	const uint8_t *p = take(r, len, "bytes of a string");

	return p ? (struct str){ (const char *)p, len } : (struct str){};
}

static enum value_type take_type(struct reader *r, const char *what)
{
	uint32_t type = take_u32(r);

	if (type < VALUE_TYPE_MAX)
		return (enum value_type)type;
	bad(r, "%s %" PRIu32 " is unknown", what, type);
	return VALUE_U8;
}

/*
 * The index is filled as the strings are checked, so that no length is read twice; until then its
 * size is bounded by half of the bytes that are left. ret_at NULL: only checks.
 */
static int read_strings(struct reader *r, uint64_t n, uint32_t **ret_at)
{
	_cleanup_(freep) uint32_t *at = NULL;
	size_t start = r->pos;

	if (n > left(r) / sizeof(uint64_t))
		return too_many(r, n, "strings");
	if (ret_at) {
		at = reallocarray(NULL, n + 1, sizeof(*at));
		if (!at)
			return refuse(r, -ENOMEM, "no memory for %" PRIu64 " strings", n);
	}
	for (uint64_t i = 0; i < n && r->err == 0; i++) {
		if (at)
			at[i] = (uint32_t)(r->pos - start);
		take_str(r);
	}
	if (at && r->err == 0) {
		at[n] = (uint32_t)(r->pos - start);
		*ret_at = TAKE_PTR(at);
	}
	return r->err;
}

static int read_array(struct reader *r, unsigned depth, struct gguf_array *ret);

static int read_arrays(struct reader *r, uint64_t n, unsigned depth)
{
	if (depth > ARRAY_DEPTH_MAX)
		return bad(r, "arrays are nested more than %d deep", ARRAY_DEPTH_MAX);
	for (uint64_t i = 0; i < n && r->err == 0; i++)
		read_array(r, depth, NULL);
	return r->err;
}

static int read_numbers(struct reader *r, uint64_t n, enum value_type type)
{
	const uint8_t *p;
	size_t bytes;

	if (!mul_ok(n, value_bytes[type], &bytes))
		return too_many(r, n, "elements");
	p = take(r, bytes, "bytes of an array");
	for (uint64_t i = 0; p && type == VALUE_BOOL && i < n; i++)
		if (p[i] > 1)
			return bad(r, "element %" PRIu64 " is neither true nor false", i);
	return r->err;
}

/* ret NULL: an inner array, which is checked and not kept. */
static int read_array(struct reader *r, unsigned depth, struct gguf_array *ret)
{
	enum value_type type = take_type(r, "element type");
	uint64_t n = take_u64(r);
	const uint8_t *data = r->data + r->pos;
	uint32_t *at = NULL;
	int k;

	if (type == VALUE_STR)
		k = read_strings(r, n, ret ? &at : NULL);
	else if (type == VALUE_ARRAY)
		k = read_arrays(r, n, depth + 1);
	else
		k = read_numbers(r, n, type);
	if (k == 0 && ret)
		*ret = (struct gguf_array){ .type = type, .n = n, .data = data, .at = at };
	return k;
}

/* p: value_bytes[type] bytes of an integer or bool. */
static uint64_t load_int(enum value_type type, const void *p)
{
	uint64_t bits = 0;
	unsigned shift = 64 - 8U * value_bytes[type];

	memcpy(&bits, p, value_bytes[type]);
	if (type == VALUE_I8 || type == VALUE_I16 || type == VALUE_I32)
		return (uint64_t)((int64_t)(bits << shift) >> shift);
	return bits;
}

static double load_float(enum value_type type, const void *p)
{
	float f;
	double d;

	if (type == VALUE_F32) {
		memcpy(&f, p, sizeof(f));
		return (double)f;
	}
	memcpy(&d, p, sizeof(d));
	return d;
}

static bool is_float(enum value_type type)
{
	return type == VALUE_F32 || type == VALUE_F64;
}

static bool is_signed(enum value_type type)
{
	return type == VALUE_I8 || type == VALUE_I16 || type == VALUE_I32 || type == VALUE_I64;
}

static bool is_unsigned(enum value_type type)
{
	return type == VALUE_U8 || type == VALUE_U16 || type == VALUE_U32 || type == VALUE_U64;
}

static int read_value(struct reader *r, struct kv *kv)
{
	const uint8_t *raw;

	if (kv->type == VALUE_ARRAY)
		return read_array(r, 1, &kv->a);
	if (kv->type == VALUE_STR) {
		kv->s = take_str(r);
		return r->err;
	}
	raw = take(r, value_bytes[kv->type], "bytes");
	if (!raw)
		return r->err;
	if (is_float(kv->type)) {
		kv->f = load_float(kv->type, raw);
		return 0;
	}
	kv->u = load_int(kv->type, raw);
	if (kv->type == VALUE_BOOL && kv->u > 1)
		return bad(r, "the value is neither true nor false");
	return 0;
}

static int str_cmp(struct str a, struct str b)
{
	int c = memcmp(a.s, b.s, MIN(a.len, b.len));

	return c != 0 ? c : (a.len > b.len) - (a.len < b.len);
}

static int kv_cmp(const void *a, const void *b)
{
	return str_cmp(((const struct kv *)a)->key, ((const struct kv *)b)->key);
}

static const struct kv *kv_find(const struct part *p, const char *key)
{
	struct kv want = { .key = str_of(key) };

	return p->n_kv ? bsearch(&want, p->kv, p->n_kv, sizeof(*p->kv), kv_cmp) : NULL;
}

static int kv_u64(const struct part *p, const char *key, uint64_t *ret)
{
	const struct kv *kv = kv_find(p, key);

	if (!kv)
		return -ENOENT;
	if (!is_unsigned(kv->type) && !(is_signed(kv->type) && (int64_t)kv->u >= 0))
		return -EINVAL;
	*ret = kv->u;
	return 0;
}

static int read_key(struct reader *r, struct kv *kv)
{
	kv->key = take_str(r);
	if (kv->key.len == 0 || kv->key.len > KEY_BYTES_MAX)
		return bad(r, "its name has %zu bytes, not 1 to %d", kv->key.len, KEY_BYTES_MAX);
	r->name = kv->key;
	if (memchr(kv->key.s, 0, kv->key.len))
		return bad(r, "its name has a NUL");
	kv->type = take_type(r, "type");
	return read_value(r, kv);
}

static int read_keys(struct reader *r, uint64_t n, struct part *p)
{
	int k;

	if (n > KEYS_MAX)
		return bad(r, "%" PRIu64 " keys, more than %" PRIu64, n, KEYS_MAX);
	if (n > left(r) / KEY_BYTES_MIN)
		return too_many(r, n, "keys");
	p->kv = calloc(n, sizeof(*p->kv));
	if (!p->kv && n > 0)
		return refuse(r, -ENOMEM, "no memory for %" PRIu64 " keys", n);
	p->n_kv = n;
	r->object = "key";
	for (uint64_t i = 0; i < n; i++) {
		r->number = i;
		r->name = (struct str){};
		k = read_key(r, &p->kv[i]);
		if (k < 0)
			return k;
	}
	if (n > 0)
		qsort(p->kv, n, sizeof(*p->kv), kv_cmp);
	for (uint64_t i = 1; i < n; i++) {
		r->name = p->kv[i].key;
		if (str_cmp(p->kv[i - 1].key, p->kv[i].key) == 0)
			return bad(r, "is there twice");
	}
	r->object = NULL;
	return r->err;
}

static int read_dims(struct reader *r, struct gguf_tensor *t)
{
	t->n_dims = take_u32(r);
	if (t->n_dims < 1 || t->n_dims > GGUF_MAX_DIMS)
		return bad(r, "has %" PRIu32 " dimensions, not 1 to %d", t->n_dims, GGUF_MAX_DIMS);
	for (uint32_t i = 0; i < GGUF_MAX_DIMS; i++) {
		t->ne[i] = i < t->n_dims ? take_u64(r) : 1;
		if (t->ne[i] == 0)
			return bad(r, "dimension %" PRIu32 " is zero", i);
	}
	return 0;
}

static int size_tensor(struct reader *r, struct gguf_tensor *t)
{
	const struct quant_info *info = quant_info(t->type);
	size_t rows, row_bytes, bytes;

	if (!info)
		return bad(r, "type %" PRIu32 " is unknown", t->type);
	if (t->ne[0] % info->block_elems != 0)
		return bad(r, "a row of %" PRIu64 " elements is no multiple of %s's block of %" PRIu32,
			   t->ne[0], info->name, info->block_elems);
	row_bytes = quant_row_bytes(t->type, t->ne[0]);
	if (row_bytes == 0 || !mul_ok(t->ne[1], t->ne[2], &rows) ||
	    !mul_ok(rows, t->ne[3], &rows) || !mul_ok(rows, row_bytes, &bytes))
		return bad(r, "its dimensions overflow");
	t->bytes = bytes;
	return 0;
}

/* Leaves t->offset relative to the data section, whose start is not known yet. */
static int read_tensor(struct reader *r, struct gguf_tensor *t, char *name)
{
	struct str s = take_str(r);

	if (s.len == 0 || s.len > NAME_BYTES_MAX)
		return bad(r, "its name has %zu bytes, not 1 to %d", s.len, NAME_BYTES_MAX);
	r->name = s;
	memcpy(name, s.s, s.len);
	name[s.len] = 0;
	t->name = name;
	if (strlen(name) != s.len)
		return bad(r, "its name has a NUL");
	if (read_dims(r, t) < 0)
		return r->err;
	t->type = take_u32(r);
	t->offset = take_u64(r);
	return r->err ? r->err : size_tensor(r, t);
}

/* 0 after an error. */
static uint64_t read_alignment(struct reader *r, const struct part *p)
{
	static const char key[] = "general.alignment";
	uint64_t a = ALIGNMENT_DEFAULT;
	int k = kv_u64(p, key, &a);

	r->object = "key";
	r->name = str_of(key);
	if (k == -EINVAL)
		bad(r, "is no unsigned integer");
	else if (a < ALIGNMENT_MIN || a > ALIGNMENT_MAX || (a & (a - 1)) != 0)
		bad(r, "%" PRIu64 " is no power of two from %d to %d", a, ALIGNMENT_MIN, ALIGNMENT_MAX);
	r->object = NULL;
	return r->err ? 0 : a;
}

static int place_tensor(struct reader *r, struct gguf_tensor *t, size_t start, uint64_t alignment)
{
	size_t at, end;

	r->name = str_of(t->name);
	if (t->offset % alignment != 0)
		return bad(r, "its offset %" PRIu64 " is no multiple of %" PRIu64, t->offset, alignment);
	if (!add_ok(start, t->offset, &at) || !add_ok(at, t->bytes, &end) || end > r->bytes)
		return bad(r,
			   "its %" PRIu64 " bytes at offset %" PRIu64
			   " of the data end beyond the %zu bytes of the file",
			   t->bytes, t->offset, r->bytes);
	t->offset = at;
	t->data = r->data + at;
	return 0;
}

static int read_tensors(struct reader *r, uint64_t n, struct gguf *g, struct part *p)
{
	struct gguf_tensor *t;
	uint64_t alignment;
	size_t start;
	int k;

	if (n > TENSORS_MAX - g->n_tensors)
		return bad(r, "%" PRIu64 " tensors, more than %" PRIu64, n, TENSORS_MAX);
	if (n > left(r) / TENSOR_BYTES_MIN)
		return too_many(r, n, "tensors");
	alignment = read_alignment(r, p);
	if (alignment == 0)
		return r->err;
	if (n == 0)
		return 0;
	t = reallocarray(g->tensors, g->n_tensors + n, sizeof(*t));
	if (!t)
		return refuse(r, -ENOMEM, "no memory for %" PRIu64 " tensors", n);
	g->tensors = t;
	p->names = calloc(n, sizeof(*p->names));
	if (!p->names)
		return refuse(r, -ENOMEM, "no memory for %" PRIu64 " tensors", n);
	t += g->n_tensors;
	r->object = "tensor";
	for (uint64_t i = 0; i < n; i++) {
		t[i] = (struct gguf_tensor){ .part = (uint32_t)(g->n_parts - 1) };
		r->number = i;
		r->name = (struct str){};
		k = read_tensor(r, &t[i], p->names[i]);
		if (k < 0)
			return k;
	}
	start = ALIGN_UP(r->pos, alignment);
	for (uint64_t i = 0; i < n; i++) {
		k = place_tensor(r, &t[i], start, alignment);
		if (k < 0)
			return k;
	}
	g->n_tensors += n;
	return 0;
}

static int read_version(struct reader *r)
{
	const uint8_t *magic;
	uint32_t version;

	if (r->bytes == 0)
		return bad(r, "is empty");
	magic = take(r, 4, "bytes");
	if (magic && memcmp(magic, "GGUF", 4) != 0)
		return bad(r, "is no GGUF file");
	version = take_u32(r);
	if (version == __builtin_bswap32(2) || version == __builtin_bswap32(3))
		return bad(r, "is a big-endian GGUF file; only little-endian ones are supported");
	if (version != 2 && version != 3)
		return bad(r, "has GGUF version %" PRIu32 "; only 2 and 3 are supported", version);
	return 0;
}

/* Reads the directory of the last part. */
static int read_directory(struct gguf *g, char **ret_error)
{
	struct part *p = &g->parts[g->n_parts - 1];
	struct reader r = {
		.path = p->file.path,
		.data = p->file.data,
		.end = MIN(p->file.bytes, DIRECTORY_MAX - g->directory_bytes),
		.bytes = p->file.bytes,
		.ret_error = ret_error,
	};
	uint64_t n_tensors, n_kv;
	int k;

	k = read_version(&r);
	if (k < 0)
		return k;
	n_tensors = take_u64(&r);
	n_kv = take_u64(&r);
	k = read_keys(&r, n_kv, p);
	if (k < 0)
		return k;
	k = read_tensors(&r, n_tensors, g, p);
	g->directory_bytes += r.pos;
	return k;
}

/* A new last part that owns nothing yet. */
static struct part *add_part(struct gguf *g, const char *path)
{
	struct part *parts, *p;

	parts = reallocarray(g->parts, g->n_parts + 1, sizeof(*parts));
	if (!parts)
		return NULL;
	g->parts = parts;
	p = &parts[g->n_parts];
	*p = (struct part){ .file = { .path = strdup(path), .fd = -1 } };
	if (!p->file.path)
		return NULL;
	g->n_parts++;
	return p;
}

static int map_part(struct part *p, char **ret_error)
{
	struct reader r = { .path = p->file.path, .ret_error = ret_error };
	struct stat st;
	void *data;

	/* Not to wait for the writer of a FIFO, nor to become a terminal's process. */
	p->file.fd = open(p->file.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (p->file.fd < 0)
		return refuse(&r, -errno, "cannot open: %s", strerror(errno));
	if (fstat(p->file.fd, &st) < 0)
		return refuse(&r, -errno, "cannot stat: %s", strerror(errno));
	if (S_ISDIR(st.st_mode))
		return refuse(&r, -EISDIR, "is a directory");
	if (!S_ISREG(st.st_mode))
		return refuse(&r, -EINVAL, "is no regular file");
	if (st.st_size == 0)
		return 0;
	data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, p->file.fd, 0);
	if (data == MAP_FAILED)
		return refuse(&r, -errno, "cannot map: %s", strerror(errno));
	p->mapped = true;
	p->file.bytes = (uint64_t)st.st_size;
	p->file.data = data;
	p->mtime = st.st_mtim;
	if (guard_add(data, p->file.bytes, &p->guard) < 0)
		return refuse(&r, -ENOSPC, "too many model files are open");
	return 0;
}

static int open_part(struct gguf *g, const char *path, char **ret_error)
{
	struct part *p = add_part(g, path);
	int k;

	if (!p)
		return fail(ret_error, -ENOMEM, "no memory");
	k = map_part(p, ret_error);
	if (k < 0)
		return k;
	return read_directory(g, ret_error);
}

/* A reader that only makes error texts, about a key of p. */
static struct reader about_key(const struct part *p, const char *key, char **ret_error)
{
	return (struct reader){
		.path = p->file.path, .object = "key", .name = str_of(key), .ret_error = ret_error
	};
}

/* An absent key leaves *value as it is. */
static int split_key(const struct part *p, const char *key, uint64_t *value, char **ret_error)
{
	struct reader r = about_key(p, key, ret_error);

	if (kv_u64(p, key, value) == -EINVAL)
		return bad(&r, "is no unsigned integer");
	return 0;
}

static int expect_key(const struct part *p, const char *key, uint64_t want, char **ret_error)
{
	struct reader r = about_key(p, key, ret_error);
	uint64_t value;
	int k = kv_u64(p, key, &value);

	if (k == -ENOENT)
		return bad(&r, "is missing");
	if (k < 0)
		return bad(&r, "is no unsigned integer");
	if (value != want)
		return bad(&r, "is %" PRIu64 ", but should be %" PRIu64, value, want);
	return 0;
}

/*
 * The path of part no (from 0) of the split that path, part is (from 0), belongs to. -EINVAL: path
 * is not named that way.
 */
static int split_path(const char *path, uint64_t is, uint64_t no, uint64_t count, char **ret)
{
	char suffix[32];
	size_t len = strlen(path), n;

	n = (size_t)snprintf(suffix, sizeof(suffix), "-%05u-of-%05u.gguf", (unsigned)is + 1,
			     (unsigned)count);
	if (len < n || !streq(path + len - n, suffix))
		return -EINVAL;
	if (asprintf(ret, "%.*s-%05u-of-%05u.gguf", (int)(len - n), path, (unsigned)no + 1,
		     (unsigned)count) < 0)
		return -ENOMEM;
	return 0;
}

/* The first part of count: checks that it is, and that its name says so. */
static int check_first(const struct part *p, uint64_t count, char **ret_error)
{
	struct reader r = { .path = p->file.path, .ret_error = ret_error };
	_cleanup_(freep) char *first = NULL;
	uint64_t no = 0;
	int k;

	k = split_key(p, "split.no", &no, ret_error);
	if (k < 0)
		return k;
	if (count > PARTS_MAX)
		return bad(&r, "is split in %" PRIu64 " parts, more than %d", count, PARTS_MAX);
	if (no >= count)
		return bad(&r, "is part %" PRIu64 " (from 0) of only %" PRIu64, no, count);
	k = split_path(p->file.path, no, 0, count, &first);
	if (k == -ENOMEM)
		return refuse(&r, k, "no memory");
	if (k < 0)
		return bad(&r, "is split, but its name does not end in -%05u-of-%05u.gguf",
			   (unsigned)no + 1, (unsigned)count);
	if (no > 0)
		return bad(&r, "is not the first part of its split; open %s",
			   strrchr(first, '/') ? strrchr(first, '/') + 1 : first);
	return 0;
}

/* Part 0 is read and is the first of count. */
static int open_siblings(struct gguf *g, uint64_t count, char **ret_error)
{
	static const char total[] = "split.tensors.count";
	uint64_t n_tensors = UINT64_MAX; /* absent: no sibling agrees */
	int k;

	k = split_key(&g->parts[0], total, &n_tensors, ret_error);
	for (uint64_t i = 1; k == 0 && i < count; i++) {
		_cleanup_(freep) char *path = NULL;

		k = split_path(g->parts[0].file.path, 0, i, count, &path);
		if (k < 0)
			return fail(ret_error, k, "no memory");
		k = open_part(g, path, ret_error);
		if (k == 0)
			k = expect_key(&g->parts[i], "split.no", i, ret_error);
		if (k == 0)
			k = expect_key(&g->parts[i], "split.count", count, ret_error);
		if (k == 0)
			k = expect_key(&g->parts[i], total, n_tensors, ret_error);
	}
	return k < 0 ? k : expect_key(&g->parts[0], total, g->n_tensors, ret_error);
}

static int by_place(const void *a, const void *b)
{
	const struct gguf_tensor *s = *(const struct gguf_tensor *const *)a;
	const struct gguf_tensor *t = *(const struct gguf_tensor *const *)b;

	if (s->part != t->part)
		return s->part < t->part ? -1 : 1;
	return (s->offset > t->offset) - (s->offset < t->offset);
}

static int by_name(const void *a, const void *b)
{
	const struct gguf_tensor *s = *(const struct gguf_tensor *const *)a;
	const struct gguf_tensor *t = *(const struct gguf_tensor *const *)b;

	return strcmp(s->name, t->name);
}

static int index_tensors(struct gguf *g, char **ret_error)
{
	struct reader r = { .path = g->parts[0].file.path, .object = "tensor", .ret_error = ret_error };
	const struct gguf_tensor **index;

	if (g->n_tensors == 0)
		return 0;
	g->by_name = index = reallocarray(NULL, g->n_tensors, sizeof(*index));
	if (!index)
		return fail(ret_error, -ENOMEM, "no memory");
	for (size_t i = 0; i < g->n_tensors; i++)
		index[i] = &g->tensors[i];
	qsort(index, g->n_tensors, sizeof(*index), by_place);
	for (size_t i = 1; i < g->n_tensors; i++) {
		const struct gguf_tensor *s = index[i - 1], *t = index[i];

		if (s->part != t->part || t->offset - s->offset >= s->bytes)
			continue;
		r.path = g->parts[t->part].file.path;
		r.name = str_of(t->name);
		return bad(&r, "its bytes at %" PRIu64 " overlap another tensor's %" PRIu64 " at %" PRIu64,
			   t->offset, s->bytes, s->offset);
	}
	qsort(index, g->n_tensors, sizeof(*index), by_name);
	for (size_t i = 1; i < g->n_tensors; i++) {
		if (!streq(index[i - 1]->name, index[i]->name))
			continue;
		r.path = g->parts[MAX(index[i - 1]->part, index[i]->part)].file.path;
		r.name = str_of(index[i]->name);
		return bad(&r, "is there twice");
	}
	return 0;
}

/* Zeros were parsed in place of the file: says so instead of what was found wrong with them (k). */
static int refuse_broken(const struct gguf *g, int k, char **ret_error)
{
	struct reader r = { .ret_error = ret_error };

	for (size_t i = 0; i < g->n_parts; i++)
		if (g->parts[i].guard && guard_broken(g->parts[i].guard))
			r.path = g->parts[i].file.path;
	if (k < 0 && ret_error)
		free(*ret_error);
	return refuse(&r, -EIO, "cannot be read: it was truncated meanwhile, or its disk failed");
}

int gguf_open(const char *path, struct gguf **ret, char **ret_error)
{
	_cleanup_(gguf_closep) struct gguf *g = calloc(1, sizeof(*g));
	uint64_t count = 1;
	int k;

	if (!g)
		return fail(ret_error, -ENOMEM, "no memory");
	k = open_part(g, path, ret_error);
	if (k == 0)
		k = split_key(&g->parts[0], "split.count", &count, ret_error);
	if (k == 0 && count > 1) /* merging a split leaves 0 */
		k = check_first(&g->parts[0], count, ret_error);
	if (k == 0 && count > 1)
		k = open_siblings(g, count, ret_error);
	if (k == 0)
		k = index_tensors(g, ret_error);
	if (gguf_broken(g))
		k = refuse_broken(g, k, ret_error);
	if (k < 0)
		return k;
	*ret = TAKE_PTR(g);
	return 0;
}

int gguf_open_memory(const void *data, size_t bytes, const char *label, struct gguf **ret,
		     char **ret_error)
{
	_cleanup_(gguf_closep) struct gguf *g = calloc(1, sizeof(*g));
	uint64_t count = 1;
	struct part *p;
	int k;

	assert((uintptr_t)data % ALIGNMENT_DEFAULT == 0);
	p = g ? add_part(g, label) : NULL;
	if (!p)
		return fail(ret_error, -ENOMEM, "no memory");
	p->file.data = data;
	p->file.bytes = bytes;
	k = read_directory(g, ret_error);
	if (k == 0)
		k = split_key(p, "split.count", &count, ret_error);
	if (k == 0 && count > 1)
		k = expect_key(p, "split.count", 1, ret_error);
	if (k == 0)
		k = index_tensors(g, ret_error);
	if (k < 0)
		return k;
	*ret = TAKE_PTR(g);
	return 0;
}

struct gguf *gguf_close(struct gguf *g)
{
	if (!g)
		return NULL;
	for (size_t i = 0; i < g->n_parts; i++) {
		struct part *p = &g->parts[i];

		for (size_t j = 0; j < p->n_kv; j++)
			if (p->kv[j].type == VALUE_ARRAY)
				free(p->kv[j].a.at);
		free(p->kv);
		free(p->names);
		guard_remove(p->guard);
		if (p->mapped)
			munmap((void *)(uintptr_t)p->file.data, p->file.bytes);
		closep(&p->file.fd);
		free((char *)(uintptr_t)p->file.path);
	}
	free(g->parts);
	free(g->tensors);
	free(g->by_name);
	free(g);
	return NULL;
}

bool gguf_broken(const struct gguf *g)
{
	for (size_t i = 0; i < g->n_parts; i++)
		if (g->parts[i].guard && guard_broken(g->parts[i].guard))
			return true;
	return false;
}

int gguf_check_unchanged(const struct gguf *g)
{
	for (size_t i = 0; i < g->n_parts; i++) {
		const struct part *p = &g->parts[i];
		struct stat st;

		if (!p->mapped)
			continue;
		if (fstat(p->file.fd, &st) < 0)
			return -errno;
		if ((uint64_t)st.st_size != p->file.bytes || st.st_mtim.tv_sec != p->mtime.tv_sec ||
		    st.st_mtim.tv_nsec != p->mtime.tv_nsec)
			return -ESTALE;
	}
	return 0;
}

size_t gguf_n_parts(const struct gguf *g)
{
	return g->n_parts;
}

const struct gguf_part *gguf_part(const struct gguf *g, size_t i)
{
	return i < g->n_parts ? &g->parts[i].file : NULL;
}

size_t gguf_n_tensors(const struct gguf *g)
{
	return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
	return i < g->n_tensors ? &g->tensors[i] : NULL;
}

const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name)
{
	const struct gguf_tensor want = { .name = name }, *key = &want, **t;

	if (g->n_tensors == 0)
		return NULL;
	t = bsearch(&key, g->by_name, g->n_tensors, sizeof(*g->by_name), by_name);
	return t ? *t : NULL;
}

bool gguf_has(const struct gguf *g, const char *key)
{
	return kv_find(&g->parts[0], key) != NULL;
}

int gguf_get_u64(const struct gguf *g, const char *key, uint64_t *ret)
{
	return kv_u64(&g->parts[0], key, ret);
}

int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *ret)
{
	uint64_t v;
	int k = gguf_get_u64(g, key, &v);

	if (k < 0)
		return k;
	if (v > UINT32_MAX)
		return -EINVAL;
	*ret = (uint32_t)v;
	return 0;
}

/* Finite, and as a float too. */
static int narrow(double f, float *ret)
{
	if (!isfinite(f) || fabs(f) > (double)FLT_MAX)
		return -EINVAL;
	*ret = (float)f;
	return 0;
}

int gguf_get_f32(const struct gguf *g, const char *key, float *ret)
{
	const struct kv *kv = kv_find(&g->parts[0], key);

	if (!kv)
		return -ENOENT;
	return is_float(kv->type) ? narrow(kv->f, ret) : -EINVAL;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *ret)
{
	const struct kv *kv = kv_find(&g->parts[0], key);

	if (!kv)
		return -ENOENT;
	if (kv->type != VALUE_BOOL)
		return -EINVAL;
	*ret = kv->u != 0;
	return 0;
}

int gguf_get_str(const struct gguf *g, const char *key, const char **ret, size_t *ret_len)
{
	const struct kv *kv = kv_find(&g->parts[0], key);

	if (!kv)
		return -ENOENT;
	if (kv->type != VALUE_STR)
		return -EINVAL;
	*ret = kv->s.s;
	*ret_len = kv->s.len;
	return 0;
}

const struct gguf_array *gguf_get_array(const struct gguf *g, const char *key)
{
	const struct kv *kv = kv_find(&g->parts[0], key);

	return kv && kv->type == VALUE_ARRAY ? &kv->a : NULL;
}

size_t gguf_array_n(const struct gguf_array *a)
{
	return a->n;
}

bool gguf_array_is_str(const struct gguf_array *a)
{
	return a->type == VALUE_STR;
}

int gguf_array_str(const struct gguf_array *a, size_t i, const char **ret, size_t *ret_len)
{
	if (a->type != VALUE_STR)
		return -EINVAL;
	if (i >= a->n)
		return -ERANGE;
	*ret = (const char *)a->data + a->at[i] + sizeof(uint64_t);
	*ret_len = a->at[i + 1] - a->at[i] - sizeof(uint64_t);
	return 0;
}

int gguf_array_i64(const struct gguf_array *a, size_t i, int64_t *ret)
{
	uint64_t v;

	if (!is_signed(a->type) && !is_unsigned(a->type) && a->type != VALUE_BOOL)
		return -EINVAL;
	if (i >= a->n)
		return -ERANGE;
	v = load_int(a->type, a->data + i * value_bytes[a->type]);
	if (a->type == VALUE_U64 && v > INT64_MAX)
		return -EINVAL;
	*ret = (int64_t)v;
	return 0;
}

int gguf_array_u32(const struct gguf_array *a, size_t i, uint32_t *ret)
{
	int64_t v;
	int k = gguf_array_i64(a, i, &v);

	if (k < 0)
		return k;
	if (a->type == VALUE_BOOL || v < 0 || v > UINT32_MAX)
		return -EINVAL;
	*ret = (uint32_t)v;
	return 0;
}

int gguf_array_f32(const struct gguf_array *a, size_t i, float *ret)
{
	if (!is_float(a->type))
		return -EINVAL;
	if (i >= a->n)
		return -ERANGE;
	return narrow(load_float(a->type, a->data + i * value_bytes[a->type]), ret);
}
