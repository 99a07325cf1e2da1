/* SPDX-License-Identifier: MIT */
/*
 * trace.c: reads and writes recorded routing, a JSON object a line. See trace.h.
 *
 * No state; any thread. Refuses to know which policy it is for. A line is parsed alone and has at
 * most LINE_BYTES_MAX, so that memory is bounded by what is kept of the file: at most WANTED_MAX
 * numbers. Members of the object that are not named in trace.h are passed over.
 * Invariant: what trace_read() returns has ascending ids < n_experts in every layer of every step,
 * and as many layers in each.
 */
#include "daemon/residency/trace.h"

#include <jansson.h>
#include <stdarg.h>

#define LINE_BYTES_MAX (1 << 20)
#define LAYERS_MAX     4096
#define EXPERTS_MAX    65536
#define WANTED_MAX     ((size_t)1 << 28)
#define ID_BITS        16 /* while n_experts is not known: layer << ID_BITS | id */

struct reader {
	const char *name;
	size_t line;
	uint32_t n_experts; /* ids are below; as the caller says, or EXPERTS_MAX */
	uint32_t largest;   /* id */
	struct trace t;
	size_t alloc_wanted, alloc_first; /* elements */
	char **ret_error;
};

#define bad(r, ...) bad_line((r), -EBADMSG, __VA_ARGS__)

_printf_(3, 4) static int bad_line(struct reader *r, int err, const char *format, ...)
{
	char what[160];
	va_list ap;

	va_start(ap, format);
	vsnprintf(what, sizeof(what), format, ap);
	va_end(ap);
	return fail(r->ret_error, err, "%s:%zu: %s", r->name, r->line, what);
}

/* Room for n elements of `size` bytes at *p. */
static int grow(void *p, size_t *alloc, size_t n, size_t size)
{
	size_t more = MAX(n + n / 2, (size_t)1024), bytes;
	void *new;

	if (n <= *alloc)
		return 0;
	if (!mul_ok(more, size, &bytes))
		return -ENOMEM;
	new = realloc(*(void **)p, bytes);
	if (!new)
		return -ENOMEM;
	*(void **)p = new;
	*alloc = more;
	return 0;
}

static int no_memory(struct reader *r)
{
	return fail(r->ret_error, -ENOMEM, "%s: %s", r->name, strerror(ENOMEM));
}

static int read_layer(struct reader *r, uint32_t layer, const json_t *ids)
{
	json_int_t before = -1;
	const json_t *item;
	size_t i;

	if (!json_is_array(ids))
		return bad(r, "layer %u is not a list", layer);
	if (r->t.n_wanted + json_array_size(ids) > WANTED_MAX)
		return bad_line(r, -E2BIG, "more than %zu experts in all", WANTED_MAX);
	if (grow(&r->t.wanted, &r->alloc_wanted, r->t.n_wanted + json_array_size(ids),
		 sizeof(*r->t.wanted)) < 0)
		return no_memory(r);
	json_array_foreach(ids, i, item) {
		json_int_t id = json_integer_value(item);

		if (!json_is_integer(item) || id < 0 || id >= r->n_experts)
			return bad(r, "layer %u has an item that is not an expert below %u", layer,
				   r->n_experts);
		if (id <= before)
			return bad(r, "the experts of layer %u do not ascend", layer);
		before = id;
		r->largest = MAX(r->largest, (uint32_t)id);
		r->t.wanted[r->t.n_wanted++] = layer << ID_BITS | (uint32_t)id;
	}
	return 0;
}

static int read_step(struct reader *r, const json_t *o)
{
	const json_t *tok = json_object_get(o, "tok"), *layers = json_object_get(o, "layers");
	size_t n = json_array_size(layers);

	if (!json_is_integer(tok) || json_integer_value(tok) < 0)
		return bad(r, "no number \"tok\"");
	if (!json_is_array(layers))
		return bad(r, "no list \"layers\"");
	if (n == 0 || n > LAYERS_MAX)
		return bad(r, "%zu layers; 1 to %d can be", n, LAYERS_MAX);
	if (r->t.n_steps == 0)
		r->t.n_layers = (uint32_t)n;
	if (n != r->t.n_layers)
		return bad(r, "%zu layers, and %u in the lines before", n, r->t.n_layers);
	for (uint32_t i = 0; i < r->t.n_layers; i++) {
		int err = read_layer(r, i, json_array_get(layers, i));

		if (err < 0)
			return err;
	}
	/* One more than steps: the end of the last. */
	if (grow(&r->t.first, &r->alloc_first, r->t.n_steps + 2, sizeof(*r->t.first)) < 0)
		return no_memory(r);
	r->t.first[0] = 0;
	r->t.first[++r->t.n_steps] = r->t.n_wanted;
	return 0;
}

/* The next line without its newline; false in *ret_more: there is none. */
static int read_line(struct reader *r, FILE *f, struct buf *b, bool *ret_more)
{
	int ch;

	b->len = 0;
	r->line++;
	while ((ch = getc_unlocked(f)) != EOF && ch != '\n') {
		if (b->len >= LINE_BYTES_MAX)
			return bad(r, "longer than %d bytes", LINE_BYTES_MAX);
		if (buf_reserve(b, 1) < 0)
			return no_memory(r);
		b->data[b->len++] = (char)ch;
	}
	if (ferror(f))
		return fail(r->ret_error, -EIO, "%s: cannot be read", r->name);
	*ret_more = ch != EOF || b->len > 0;
	return 0;
}

static int read_all(struct reader *r, FILE *f)
{
	_cleanup_(buf_done) struct buf b = {};

	for (;;) {
		json_auto_t *o = NULL;
		json_error_t e;
		bool more = false;
		int err = read_line(r, f, &b, &more);

		if (err < 0)
			return err;
		if (!more)
			break;
		o = json_loadb(b.data ? b.data : "", b.len, JSON_REJECT_DUPLICATES, &e);
		if (!json_is_object(o))
			return bad(r, "not a JSON object");
		err = read_step(r, o);
		if (err < 0)
			return err;
	}
	return r->t.n_steps > 0 ? 0 : bad(r, "there are no steps");
}

int trace_read(FILE *f, const char *name, uint32_t n_experts, struct trace *ret, char **ret_error)
{
	struct reader r = { .name = name, .ret_error = ret_error };
	int err;

	if (n_experts > EXPERTS_MAX)
		return fail(ret_error, -EINVAL, "%u experts are more than %d", n_experts, EXPERTS_MAX);
	r.n_experts = n_experts ? n_experts : EXPERTS_MAX;
	err = read_all(&r, f);
	if (err < 0) {
		trace_done(&r.t);
		return err;
	}
	r.t.n_experts = n_experts ? n_experts : r.largest + 1;
	for (size_t i = 0; i < r.t.n_wanted; i++)
		r.t.wanted[i] = (r.t.wanted[i] >> ID_BITS) * r.t.n_experts +
				(r.t.wanted[i] & (EXPERTS_MAX - 1));
	*ret = r.t;
	return 0;
}

void trace_done(struct trace *t)
{
	free(t->wanted);
	free(t->first);
	*t = (struct trace){};
}

static int write_layers(struct buf *b, uint32_t n_layers, const uint32_t *counts, const uint32_t *experts)
{
	int r = 0;

	for (uint32_t l = 0; l < n_layers && r >= 0; l++) {
		r = buf_printf(b, l > 0 ? ", [" : "[");
		for (uint32_t i = 0; i < counts[l] && r >= 0; i++)
			r = buf_printf(b, i > 0 ? ", %u" : "%u", *experts++);
		if (r >= 0)
			r = buf_append(b, "]", 1);
	}
	return r;
}

int trace_write_step(struct buf *b, uint64_t tok, uint32_t n_layers, const uint32_t *counts,
		     const uint32_t *experts)
{
	size_t start = b->len;
	int r = buf_printf(b, "{\"tok\": %llu, \"layers\": [", (unsigned long long)tok);

	if (r >= 0)
		r = write_layers(b, n_layers, counts, experts);
	if (r >= 0)
		r = buf_append(b, "]}\n", 3);
	if (r >= 0)
		return 0;
	/* Half a line would spoil the file. */
	b->len = start;
	if (b->data)
		b->data[start] = 0;
	return r;
}
