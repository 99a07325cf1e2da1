/* SPDX-License-Identifier: MIT */
/*
 * import.c: the steps of an import. See import.h.
 *
 * The user's file is checked where it lies when we may open it, so that a model that is of no use
 * is refused before it is copied; then copied into a staging directory, where the copy is checked
 * again (the user can still write to the original) and renamed to its final name. Names carry
 * SHA-256: publishers state it, `sha256sum` checks it.
 */
#include "daemon/import/import.h"

#include "daemon/file.h"
#include "daemon/import/describe.h"
#include "daemon/import/library.h"
#include "daemon/import/staging.h"
#include "daemon/model/model.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <nettle/sha2.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define HASH_DIGITS   12
#define CHUNK_BYTES   ((uint64_t)16 << 20) /* between two looks at whether somebody still waits */
#define BUFFER_BYTES  ((size_t)1 << 20)
#define FREE_MIN      ((uint64_t)1 << 30) /* kept free, or 5 %, whichever is less */
#define NAME_BYTES    200
#define RECORD_FORMAT 1

struct import {
	const struct import_job *job;
	bool shared; /* blocks, with the original */
	int dir;
	struct staging *staging;
	struct model *model; /* of the copy */
	struct sha256_ctx hash;
	uint64_t sizes[IMPORT_PARTS_MAX];
	uint64_t done, total;
	char *buffer;
	char hash_text[65];
	char *stem;
};

void import_result_done(struct import_result *r)
{
	free(r->file);
	*r = (struct import_result){};
}

static void tell(const struct import *i, struct import_event e)
{
	if (i->job->event)
		i->job->event(i->job->userdata, &e);
}

static bool cancelled(const struct import *i)
{
	return i->job->cancelled && i->job->cancelled(i->job->userdata);
}

/* ---- what was given ---- */

static bool usable_name(const char *name)
{
	size_t len = strlen(name);

	if (len == 0 || len > NAME_BYTES || name[0] == '.' || strchr(name, '/'))
		return false;
	for (size_t i = 0; i < len; i++)
		if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
			return false;
	return true;
}

static int check_parts(struct import *i, char **ret_error)
{
	const struct import_job *j = i->job;
	struct stat st;

	if (j->n_parts == 0 || j->n_parts > IMPORT_PARTS_MAX)
		return fail(ret_error, -E2BIG,
			    "a model has 1 to %d parts here, this one %zu: merge them into one file first",
			    IMPORT_PARTS_MAX, j->n_parts);
	for (size_t k = 0; k < j->n_parts; k++) {
		const struct import_part *p = &j->parts[k];

		if (!usable_name(p->name))
			return fail(ret_error, -EINVAL,
				    "part %zu: no name for a model file (rename it)", k + 1);
		if (fstat(p->fd, &st) < 0)
			return fail(ret_error, -errno, "%s: %m", p->name);
		if (!S_ISREG(st.st_mode))
			return fail(ret_error, S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL,
				    "%s is not a regular file", p->name);
		i->sizes[k] = (uint64_t)st.st_size;
		if (!add_ok(i->total, i->sizes[k], &i->total))
			return fail(ret_error, -EFBIG, "%s: too large", p->name);
	}
	return 0;
}

/* Errors name the file as the user knows it, without the directory of ours that it lies in. */
static void hide_directory(const struct import *i, char *text)
{
	size_t len = strlen(i->staging->path) + 1;
	char *at = text;

	while ((at = strstr(at, i->staging->path)))
		if (at[len - 1] == '/')
			memmove(at, at + len, strlen(at + len) + 1);
		else
			at++;
}

/* Opens what stands in the staging directory under the parts' names. */
static int load(const struct import *i, struct model **ret, char **ret_error)
{
	_cleanup_(freep) char *path = NULL;
	char *error = NULL;
	int r;

	if (asprintf(&path, "%s/%s", i->staging->path, i->job->parts[0].name) < 0) {
		path = NULL;
		return fail(ret_error, -ENOMEM, "no memory");
	}
	r = model_load(path, ret, &error);
	if (r == 0 && gguf_n_parts((*ret)->gguf) != i->job->n_parts) {
		*ret = model_unref(*ret);
		r = fail(&error, -EBADMSG, "%s: %zu files were given, the model is one",
			 i->job->parts[0].name, i->job->n_parts);
	}
	if (error)
		hide_directory(i, error);
	if (r < 0 && error && !strstr(error, i->job->parts[0].name))
		fail(ret_error, r, "%s: %s", i->job->parts[0].name, error);
	else if (r < 0 && ret_error)
		*ret_error = TAKE_PTR(error);
	free(error);
	return r;
}

/*
 * The file is opened again, under links: the parts of a model are found by name. Another user's
 * file that only its owner may open is not looked at before it is copied.
 */
static int check_source(const struct import *i, char **ret_error)
{
	_cleanup_(model_unrefp) struct model *m = NULL;
	const struct import_job *j = i->job;
	char *error = NULL;
	char target[64];
	int r = 0;

	tell(i, (struct import_event){ .kind = IMPORT_CHECK });
	for (size_t k = 0; k < j->n_parts && r == 0; k++) {
		snprintf(target, sizeof(target), "/proc/self/fd/%d", j->parts[k].fd);
		if (symlinkat(target, i->staging->fd, j->parts[k].name) < 0)
			r = fail(&error, -errno, "%s: %m", j->parts[k].name);
	}
	if (r == 0)
		r = load(i, &m, &error);
	for (size_t k = 0; k < j->n_parts; k++)
		unlinkat(i->staging->fd, j->parts[k].name, 0);
	if (r == -EACCES || r == -EPERM)
		r = 0;
	if (r < 0 && ret_error)
		*ret_error = TAKE_PTR(error);
	free(error);
	return r;
}

/* ---- the copy ---- */

static int check_space(const struct import *i, char **ret_error)
{
	uint64_t available, keep, needed = i->shared ? 0 : i->total;
	struct statvfs fs;

	if (fstatvfs(i->dir, &fs) < 0)
		return fail(ret_error, -errno, "%s: %m", i->job->directory);
	available = (uint64_t)fs.f_bavail * fs.f_frsize;
	keep = MIN((uint64_t)fs.f_blocks * fs.f_frsize / 20, FREE_MIN);
	available -= MIN(available, keep);
	tell(i, (struct import_event){ .kind = IMPORT_SPACE, .needed = needed, .available = available });
	if (needed <= available)
		return 0;
	return fail(ret_error, -ENOSPC,
		    "%s needs %llu MB; %s has %llu MB for it, and %llu MB that are kept free",
		    i->job->parts[0].name, (unsigned long long)(needed / 1000000), i->job->directory,
		    (unsigned long long)(available / 1000000), (unsigned long long)(keep / 1000000));
}

/*
 * What copy_file_range() cannot do on all file systems. Bytes, 0 at the end of the file, or -errno.
 */
static ssize_t copy_by_hand(struct import *i, int from, int to, off_t at, size_t bytes)
{
	ssize_t n = pread(from, i->buffer, MIN(bytes, BUFFER_BYTES), at), done = 0;

	if (n < 0)
		return -errno;
	while (done < n) {
		ssize_t k = pwrite(to, i->buffer + done, (size_t)(n - done), at + done);

		if (k < 0 && errno != EINTR)
			return -errno;
		done += MAX(k, (ssize_t)0);
	}
	return n;
}

static int copy_chunk(struct import *i, int from, int to, uint64_t at, uint64_t bytes, bool *by_hand)
{
	for (uint64_t done = 0; done < bytes;) {
		off_t in = (off_t)(at + done), out = in;
		ssize_t n;

		if (*by_hand) {
			n = copy_by_hand(i, from, to, in, bytes - done);
		} else {
			n = copy_file_range(from, &in, to, &out, bytes - done, 0);
			n = n < 0 ? -errno : n;
		}
		if (n == -EINTR && cancelled(i))
			return -ECANCELED;
		if (n == -EINTR)
			continue;
		if (n <= 0 && !*by_hand && n != -ENOSPC && n != -EIO) {
			*by_hand = true; /* EXDEV, EINVAL, or 0 from a file system that lies */
			continue;
		}
		if (n <= 0)
			return n < 0 ? (int)n : -ENODATA;
		done += (uint64_t)n;
	}
	/* Begun now, so that the wait for the disk at the end is short. */
	(void)sync_file_range(to, (off_t)at, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
	return 0;
}

/* Of what stands in the copy, not of what was read for it. */
static int hash_chunk(struct import *i, int fd, uint64_t at, uint64_t bytes)
{
	while (bytes > 0) {
		ssize_t n = pread(fd, i->buffer, MIN(bytes, (uint64_t)BUFFER_BYTES), (off_t)at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -ENODATA;
		sha256_update(&i->hash, (size_t)n, (const uint8_t *)i->buffer);
		at += (uint64_t)n;
		bytes -= (uint64_t)n;
	}
	return 0;
}

static int fill(struct import *i, int from, int to, uint64_t bytes, bool shared)
{
	bool by_hand = false;
	int r = 0;

	for (uint64_t at = 0; at < bytes && r == 0;) {
		uint64_t n = MIN(bytes - at, CHUNK_BYTES);

		if (cancelled(i))
			return -ECANCELED;
		if (!shared)
			r = copy_chunk(i, from, to, at, n, &by_hand);
		if (r == 0)
			r = hash_chunk(i, to, at, n);
		at += n;
		i->done += n;
		tell(i, (struct import_event){ .kind = shared ? IMPORT_HASH : IMPORT_COPY,
					       .done = i->done,
					       .total = i->total });
	}
	return r;
}

static int bring_part(struct import *i, size_t k, uid_t owner, char **ret_error)
{
	const struct import_part *p = &i->job->parts[k];
	_cleanup_(closep) int fd = openat(i->staging->fd, p->name,
					  O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	bool shared;
	int r = 0;

	if (fd < 0)
		return fail(ret_error, -errno, "%s: %m", p->name);
	shared = ioctl(fd, FICLONE, p->fd) == 0;
	if (k == 0) {
		i->shared = shared;
		r = check_space(i, ret_error);
		if (r < 0)
			return r;
	}
	r = fill(i, p->fd, fd, i->sizes[k], shared);
	if (r == -ENODATA)
		return fail(ret_error, -EIO, "%s changed while it was copied", p->name);
	if (r == -ECANCELED)
		return fail(ret_error, r, "cancelled");
	if (r < 0)
		return fail(ret_error, r, "cannot copy %s: %s", p->name, strerror(-r));
	if (k + 1 == i->job->n_parts)
		tell(i, (struct import_event){ .kind = IMPORT_SYNC });
	/*
	 * The kernel says what of a file is in memory to its owner only: to the service, whoever
	 * imports.
	 */
	if ((geteuid() == 0 && fchown(fd, owner, (gid_t)-1) < 0) || fchmod(fd, 0644) < 0 ||
	    ftruncate(fd, (off_t)i->sizes[k]) < 0 || fsync(fd) < 0)
		return fail(ret_error, -errno, "%s: %m", p->name);
	return 0;
}

static int bring_parts(struct import *i, char **ret_error)
{
	uint8_t digest[SHA256_DIGEST_SIZE];
	struct stat st;

	i->buffer = malloc(BUFFER_BYTES);
	if (!i->buffer)
		return fail(ret_error, -ENOMEM, "no memory");
	if (fstat(i->dir, &st) < 0)
		return fail(ret_error, -errno, "%s: %m", i->job->directory);
	sha256_init(&i->hash);
	for (size_t k = 0; k < i->job->n_parts; k++) {
		int r = bring_part(i, k, st.st_uid, ret_error);

		if (r < 0)
			return r;
	}
	sha256_digest(&i->hash, sizeof(digest), digest);
	for (size_t k = 0; k < sizeof(digest); k++)
		snprintf(i->hash_text + 2 * k, 3, "%02x", digest[k]);
	return 0;
}

/* ---- what is worth knowing of it ---- */

static void warn_of_types(const struct import *i)
{
	size_t n[QUANT_TYPE_MAX] = {};
	char text[200];

	for (size_t k = 0; k < gguf_n_tensors(i->model->gguf); k++) {
		uint32_t type = gguf_tensor_at(i->model->gguf, k)->type;

		if (type < QUANT_TYPE_MAX && !quant_has_kernel(type))
			n[type]++;
	}
	for (uint32_t type = 0; type < QUANT_TYPE_MAX; type++) {
		if (n[type] == 0)
			continue;
		snprintf(text, sizeof(text),
			 "%zu tensors are of type %s, for which there is no kernel here; the service does without them",
			 n[type], quant_info(type)->name);
		tell(i, (struct import_event){ .kind = IMPORT_WARNING, .text = text });
	}
}

static void warn(const struct import *i)
{
	_cleanup_(freep) char *text = NULL;
	const char *why = i->model->template_error;

	warn_of_types(i);
	if (i->model->template)
		return;
	if (asprintf(&text, "it has no chat template that can be used (%s): it completes text, but holds no conversation",
		     why ? why : "none in the file") < 0) {
		text = NULL;
		return;
	}
	hide_directory(i, text);
	tell(i, (struct import_event){ .kind = IMPORT_WARNING, .text = text });
}

static int write_record(const struct import *i, const char *record, char **ret_error)
{
	_cleanup_(freep) char *path = NULL, *json = NULL, *text = NULL;
	json_auto_t *o = describe_model(i->model->gguf);
	char date[32];
	time_t now = time(NULL);
	struct tm tm;
	int r;

	strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
	if (!o || json_object_set_new(o, "format", json_integer(RECORD_FORMAT)) < 0 ||
	    json_object_set_new(o, "sha256", json_string(i->hash_text)) < 0 ||
	    json_object_set_new(o, "bytes", json_integer((json_int_t)i->total)) < 0 ||
	    json_object_set_new(o, "parts", json_integer((json_int_t)i->job->n_parts)) < 0 ||
	    json_object_set_new(o, "imported", json_string(date)) < 0)
		return fail(ret_error, -ENOMEM, "no memory");
	/* A file's name may be any bytes; those that are no text are not recorded. */
	(void)json_object_set_new(o, "imported_from", json_string(i->job->parts[0].name));
	json = json_dumps(o, JSON_INDENT(2) | JSON_SORT_KEYS);
	if (!json || asprintf(&text, "%s\n", json) < 0)
		text = NULL;
	if (!text || asprintf(&path, "%s/%s", i->staging->path, record) < 0)
		path = NULL;
	if (!path)
		return fail(ret_error, -ENOMEM, "no memory");
	r = file_replace(path, text, strlen(text), 0644);
	return r < 0 ? fail(ret_error, r, "%s: %s", record, strerror(-r)) : 0;
}

/* ---- its place ---- */

/*
 * Over what is there, if anything: something of the same content that is not whole, since it was
 * not found before (files that were removed by hand, or left by an import that was killed between
 * two names).
 */
static int place(const struct import *i, const char *from, const char *to, char **ret_error)
{
	if (renameat(i->staging->fd, from, i->dir, to) < 0)
		return fail(ret_error, -errno, "%s/%s: %m", i->job->directory, to);
	return 0;
}

/*
 * The first part goes last: it is the one that a loader opens. What does not get so far is taken
 * back.
 */
static int place_all(const struct import *i, char **ret_error)
{
	_cleanup_(freep) char *record = NULL;
	size_t n = i->job->n_parts, k = n;
	int r;

	if (asprintf(&record, "%s.json", i->stem) < 0) {
		record = NULL;
		return fail(ret_error, -ENOMEM, "no memory");
	}
	r = write_record(i, record, ret_error);
	if (r < 0)
		return r;
	r = place(i, record, record, ret_error);
	while (r == 0 && k > 0) {
		_cleanup_(freep) char *to = library_part_name(i->stem, (unsigned)k - 1, (unsigned)n);

		r = to ? place(i, i->job->parts[k - 1].name, to, ret_error)
		       : fail(ret_error, -ENOMEM, "no memory");
		if (r == 0)
			k--;
	}
	if (r == 0 && fsync(i->dir) < 0)
		r = fail(ret_error, -errno, "%s: %m", i->job->directory);
	if (r == 0)
		return 0;
	for (; k < n; k++) {
		_cleanup_(freep) char *to = library_part_name(i->stem, (unsigned)k, (unsigned)n);

		if (to)
			unlinkat(i->dir, to, 0);
	}
	unlinkat(i->dir, record, 0);
	return r;
}

static int settle(struct import *i, struct import_result *ret, char **ret_error)
{
	_cleanup_(library_closep) struct library *c = NULL;
	_cleanup_(freep) char *file = NULL;
	const struct library_entry *same;
	char name[DESCRIBE_NAME_MAX + 1], hash12[HASH_DIGITS + 1];
	bool is_default;
	int r;

	snprintf(hash12, sizeof(hash12), "%.*s", HASH_DIGITS, i->hash_text);
	r = library_open(i->job->directory, &c, ret_error);
	if (r < 0)
		return r;
	same = library_find_content(c, hash12, i->total);
	describe_name(i->model->gguf, i->job->name, i->job->parts[0].name, name);
	if (asprintf(&i->stem, "%s-%s", name, hash12) < 0)
		i->stem = NULL;
	if (i->stem)
		file = same ? strdup(same->file)
			    : library_part_name(i->stem, 0, (unsigned)i->job->n_parts);
	if (!file)
		return fail(ret_error, -ENOMEM, "no memory");
	if (!same)
		r = place_all(i, ret_error);
	if (r < 0)
		return r;
	is_default = library_is_default(i->dir, file);
	if (!is_default && (i->job->make_default || !library_has_default(i->dir))) {
		r = library_set_default(i->dir, i->job->directory, file, ret_error);
		if (r < 0)
			return r;
		is_default = true;
	}
	*ret = (struct import_result){ .file = TAKE_PTR(file),
				       .bytes = i->total,
				       .is_default = is_default,
				       .existed = same != NULL };
	memcpy(ret->sha256, i->hash_text, sizeof(ret->sha256));
	return 0;
}

static int run(struct import *i, struct import_result *ret, char **ret_error)
{
	int r = check_parts(i, ret_error);

	if (r < 0)
		return r;
	/* The service runs as another user: modes must not depend on this one's umask. */
	if (mkdir(i->job->directory, 0755) == 0 ? chmod(i->job->directory, 0755) < 0 : errno != EEXIST)
		return fail(ret_error, -errno, "%s: %m", i->job->directory);
	i->dir = open(i->job->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (i->dir < 0)
		return fail(ret_error, -errno, "%s: %m", i->job->directory);
	if (i->job->make_default)
		r = library_check_default(i->dir, i->job->directory, ret_error);
	if (r == 0)
		r = staging_new(i->dir, i->job->directory, &i->staging, ret_error);
	if (r == 0)
		r = check_source(i, ret_error);
	if (r == 0)
		r = bring_parts(i, ret_error);
	if (r == 0)
		r = load(i, &i->model, ret_error);
	if (r < 0)
		return r;
	warn(i);
	return settle(i, ret, ret_error);
}

int import_add(const struct import_job *j, struct import_result *ret, char **ret_error)
{
	struct import i = { .job = j, .dir = -1 };
	int r = run(&i, ret, ret_error);

	model_unref(i.model);
	staging_free(i.staging);
	closep(&i.dir);
	free(i.buffer);
	free(i.stem);
	return r;
}

static int result_of(const struct library_entry *e, bool is_default, struct import_result *ret,
		     char **ret_error)
{
	char *file = strdup(e->file);

	if (!file)
		return fail(ret_error, -ENOMEM, "no memory");
	*ret = (struct import_result){ .file = file, .bytes = e->bytes, .is_default = is_default };
	return 0;
}

int import_remove(const char *directory, const char *name, bool force, struct import_result *ret,
		  char **ret_error)
{
	_cleanup_(library_closep) struct library *c = NULL;
	const struct library_entry *e;
	int r = library_open(directory, &c, ret_error);

	if (r == 0)
		r = library_find(c, name, &e, ret_error);
	if (r == 0)
		r = library_remove(c, e, force, ret_error);
	return r < 0 ? r : result_of(e, e->is_default, ret, ret_error);
}

int import_set_default(const char *directory, const char *name, struct import_result *ret,
		       char **ret_error)
{
	_cleanup_(library_closep) struct library *c = NULL;
	const struct library_entry *e;
	int r = library_open(directory, &c, ret_error);

	if (r == 0)
		r = library_find(c, name, &e, ret_error);
	if (r == 0)
		r = library_set_default(c->fd, c->path, e->file, ret_error);
	return r < 0 ? r : result_of(e, true, ret, ret_error);
}
