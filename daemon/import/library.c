/* SPDX-License-Identifier: MIT */
/*
 * library.c: the models directory. See library.h.
 *
 * A model is NAME-HASH.gguf, or NAME-HASH-00001-of-0000N.gguf and so on, and NAME-HASH.json with
 * what was recorded of it. Files that somebody copied here by hand are models too, without a hash
 * and a record. Hidden files are ours (staging.h).
 */
#include "daemon/import/library.h"

#include "daemon/file.h"
#include "daemon/import/describe.h"
#include "daemon/import/staging.h"
#include "daemon/varlink.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#define HASH_DIGITS      12
#define RECORD_BYTES_MAX (64u << 10)

char *library_part_name(const char *stem, unsigned no, unsigned n_parts)
{
	char *name;
	int n = n_parts == 1 ? asprintf(&name, "%s.gguf", stem)
			     : asprintf(&name, "%s-%05u-of-%05u.gguf", stem, no + 1, n_parts);

	return n < 0 ? NULL : name;
}

struct library *library_close(struct library *c)
{
	if (!c)
		return NULL;
	for (size_t i = 0; i < c->n; i++) {
		free(c->entries[i].file);
		free(c->entries[i].stem);
	}
	free(c->entries);
	closep(&c->fd);
	free(c->path);
	free(c);
	return NULL;
}

/* ---- what is there ---- */

bool library_has_default(int fd)
{
	return faccessat(fd, CATALOG_DEFAULT_LINK, F_OK, 0) == 0;
}

bool library_is_default(int fd, const char *file)
{
	char target[NAME_MAX + 1] = "";

	return readlinkat(fd, CATALOG_DEFAULT_LINK, target, sizeof(target) - 1) > 0 &&
	       streq(target, file);
}

static bool has_suffix(const char *s, const char *suffix)
{
	size_t n = strlen(s), k = strlen(suffix);

	return n > k && streq(s + n - k, suffix);
}

static int is_model(const struct dirent *e)
{
	size_t len;
	unsigned no, count;

	if (e->d_name[0] == '.' || streq(e->d_name, CATALOG_DEFAULT_LINK) ||
	    !has_suffix(e->d_name, ".gguf"))
		return 0;
	return !describe_split_name(e->d_name, &len, &no, &count) || no == 1;
}

static int add_entry(struct library *c, const char *file)
{
	struct library_entry e = { .n_parts = 1, .is_default = library_is_default(c->fd, file) };
	size_t len = strlen(file) - strlen(".gguf");
	unsigned no, count;
	struct stat st;

	if (fstatat(c->fd, file, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode))
		return 0;
	if (describe_split_name(file, &len, &no, &count) && count > 0)
		e.n_parts = count;
	e.mtime_s = (uint64_t)MAX(st.st_mtime, (time_t)0);
	e.file = strdup(file);
	e.stem = strndup(file, len);
	c->entries[c->n++] = e; /* the library frees it, half-built or not */
	if (!e.file || !e.stem)
		return -ENOMEM;
	for (unsigned i = 0; i < e.n_parts; i++) {
		_cleanup_(freep) char *part = library_part_name(e.stem, i, e.n_parts);

		if (!part)
			return -ENOMEM;
		if (fstatat(c->fd, e.n_parts > 1 ? part : file, &st, AT_SYMLINK_NOFOLLOW) == 0)
			c->entries[c->n - 1].bytes += (uint64_t)st.st_size;
	}
	return 0;
}

static int read_directory(struct library *c)
{
	struct dirent **list = NULL;
	int n = scandirat(c->fd, ".", &list, is_model, alphasort), r = 0;

	if (n < 0)
		return -errno;
	c->entries = calloc((size_t)n + 1, sizeof(*c->entries));
	if (!c->entries)
		r = -ENOMEM;
	for (int i = 0; i < n; i++) {
		if (r == 0)
			r = add_entry(c, list[i]->d_name);
		free(list[i]);
	}
	free(list);
	return r;
}

int library_open(const char *path, struct library **ret, char **ret_error)
{
	_cleanup_(library_closep) struct library *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return fail(ret_error, -ENOMEM, "no memory");
	c->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (c->fd < 0)
		return fail(ret_error, -errno, "%s: %m", path);
	c->path = strdup(path);
	r = c->path ? read_directory(c) : -ENOMEM;
	if (r < 0)
		return fail(ret_error, r, "%s: %s", path, strerror(-r));
	*ret = TAKE_PTR(c);
	return 0;
}

/* ---- which is meant ---- */

/* "NAME-0123456789ab": where the hash begins; NULL: a name without one. */
static const char *hash_of(const char *stem)
{
	size_t len = strlen(stem);
	const char *s;

	if (len < HASH_DIGITS + 2)
		return NULL;
	s = stem + len - HASH_DIGITS;
	if (s[-1] != '-' || strspn(s, "0123456789abcdef") != HASH_DIGITS)
		return NULL;
	return s;
}

static bool matches(const struct library_entry *e, const char *name)
{
	const char *hash = hash_of(e->stem);

	if (!hash)
		return false;
	return streq(hash, name) || (strlen(name) == (size_t)(hash - 1 - e->stem) &&
				     strncmp(e->stem, name, strlen(name)) == 0);
}

static int not_unique(const struct library *c, const char *name, char **ret_error)
{
	struct buf b = {};
	int r = 0;

	for (size_t i = 0; i < c->n && r == 0; i++)
		if (matches(&c->entries[i], name))
			r = buf_printf(&b, "%s%s", b.len > 0 ? ", " : "", c->entries[i].stem);
	r = fail(ret_error, -ENOTUNIQ, "%s can be any of %s", name, b.data ? b.data : "several");
	buf_done(&b);
	return r;
}

int library_find(const struct library *c, const char *name, const struct library_entry **ret,
		 char **ret_error)
{
	const struct library_entry *found = NULL;

	for (size_t i = 0; i < c->n; i++) {
		const struct library_entry *e = &c->entries[i];

		if (streq(e->file, name) || streq(e->stem, name)) {
			*ret = e;
			return 0;
		}
	}
	for (size_t i = 0; i < c->n; i++) {
		if (!matches(&c->entries[i], name))
			continue;
		if (found)
			return not_unique(c, name, ret_error);
		found = &c->entries[i];
	}
	if (!found)
		return fail(ret_error, -ENOENT, "there is no model %s in %s", name, c->path);
	*ret = found;
	return 0;
}

const struct library_entry *library_find_content(const struct library *c, const char *hash12,
						 uint64_t bytes)
{
	for (size_t i = 0; i < c->n; i++) {
		const char *hash = hash_of(c->entries[i].stem);

		if (hash && streq(hash, hash12) && c->entries[i].bytes == bytes)
			return &c->entries[i];
	}
	return NULL;
}

json_t *library_info(const struct library *c, const struct library_entry *e)
{
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(freep) char *path = NULL;
	struct buf b = {};
	json_t *o = NULL;

	if (asprintf(&path, "%s/%s.json", c->path, e->stem) < 0) {
		path = NULL;
		return NULL;
	}
	if (file_read(path, RECORD_BYTES_MAX, &b) < 0 || varlink_parse(b.data, b.len, &o, NULL) < 0)
		o = NULL;
	buf_done(&b);
	if (o)
		return o;
	free(path);
	if (asprintf(&path, "%s/%s", c->path, e->file) < 0) {
		path = NULL;
		return NULL;
	}
	return gguf_open(path, &g, NULL) < 0 ? NULL : describe_model(g);
}

/* ---- changes ---- */

int library_check_default(int fd, const char *path, char **ret_error)
{
	struct stat st;

	if (fstatat(fd, CATALOG_DEFAULT_LINK, &st, AT_SYMLINK_NOFOLLOW) < 0 || S_ISLNK(st.st_mode))
		return 0;
	return fail(ret_error, -EEXIST, "%s/" CATALOG_DEFAULT_LINK " is not a link: left as it is",
		    path);
}

int library_set_default(int fd, const char *path, const char *file, char **ret_error)
{
	_cleanup_(staging_freep) struct staging *s = NULL;
	int r = library_check_default(fd, path, ret_error);

	if (r == 0)
		r = staging_new(fd, path, &s, ret_error);
	if (r < 0)
		return r;
	if (symlinkat(file, s->fd, "link") < 0 ||
	    renameat(s->fd, "link", fd, CATALOG_DEFAULT_LINK) < 0 || fsync(fd) < 0)
		return fail(ret_error, -errno, "%s/" CATALOG_DEFAULT_LINK ": %m", path);
	return 0;
}

int library_remove(const struct library *c, const struct library_entry *e, bool force, char **ret_error)
{
	_cleanup_(freep) char *record = NULL;

	if (e->is_default && !force)
		return fail(ret_error, -EBUSY, "%s is the default model; --force removes it anyway",
			    e->stem);
	if (e->is_default && unlinkat(c->fd, CATALOG_DEFAULT_LINK, 0) < 0 && errno != ENOENT)
		return fail(ret_error, -errno, "%s/" CATALOG_DEFAULT_LINK ": %m", c->path);
	/* The first part first: without it nobody finds the others. */
	if (unlinkat(c->fd, e->file, 0) < 0)
		return fail(ret_error, -errno, "%s/%s: %m", c->path, e->file);
	for (unsigned i = 1; i < e->n_parts; i++) {
		_cleanup_(freep) char *part = library_part_name(e->stem, i, e->n_parts);

		if (!part || (unlinkat(c->fd, part, 0) < 0 && errno != ENOENT))
			return fail(ret_error, part ? -errno : -ENOMEM, "%s/%s: %m", c->path,
				    part ? part : e->stem);
	}
	if (asprintf(&record, "%s.json", e->stem) < 0)
		record = NULL;
	if (!record || (unlinkat(c->fd, record, 0) < 0 && errno != ENOENT) || fsync(c->fd) < 0)
		return fail(ret_error, record ? -errno : -ENOMEM, "%s/%s.json: %m", c->path, e->stem);
	return 0;
}
