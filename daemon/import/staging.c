/* SPDX-License-Identifier: MIT */
/*
 * staging.c: see staging.h. A directory and not O_TMPFILE: the parts of a split model are found by
 * their names, and not every file system has unnamed files.
 */
#include "daemon/import/staging.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#define PREFIX ".import-"

/* Flat: nothing in here makes directories in it. */
static void empty(int fd)
{
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	DIR *d = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *e;

	if (!d) {
		closep(&copy);
		return;
	}
	rewinddir(d);
	while ((e = readdir(d)))
		if (!streq(e->d_name, ".") && !streq(e->d_name, ".."))
			unlinkat(fd, e->d_name, 0);
	closedir(d);
}

static void sweep_one(int models, const char *name)
{
	_cleanup_(closep) int fd =
		openat(models, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

	if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
		return;
	empty(fd);
	unlinkat(models, name, AT_REMOVEDIR);
}

void staging_sweep(int models)
{
	int copy = openat(models, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *d = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *e;

	if (!d) {
		closep(&copy);
		return;
	}
	while ((e = readdir(d)))
		if (startswith(e->d_name, PREFIX))
			sweep_one(models, e->d_name);
	closedir(d);
}

/* 0: somebody's sweep was faster than the lock. */
static int make_locked(struct staging *s, const char *path)
{
	struct stat st;

	free(s->path);
	if (asprintf(&s->path, "%s/" PREFIX "XXXXXX", path) < 0) {
		s->path = NULL;
		return -ENOMEM;
	}
	if (!mkdtemp(s->path)) {
		int r = -errno;

		free(TAKE_PTR(s->path));
		return r;
	}
	closep(&s->fd);
	s->fd = open(s->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (s->fd < 0)
		return errno == ENOENT ? 0 : -errno;
	if (flock(s->fd, LOCK_EX) < 0 || fstat(s->fd, &st) < 0)
		return -errno;
	return st.st_nlink > 0;
}

int staging_new(int models, const char *path, struct staging **ret, char **ret_error)
{
	_cleanup_(staging_freep) struct staging *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return fail(ret_error, -ENOMEM, "no memory");
	s->models = models;
	s->fd = -1;
	staging_sweep(models);
	do
		r = make_locked(s, path);
	while (r == 0);
	if (r < 0)
		return fail(ret_error, r, "cannot make a directory in %s: %s", path, strerror(-r));
	*ret = TAKE_PTR(s);
	return 0;
}

struct staging *staging_free(struct staging *s)
{
	if (!s)
		return NULL;
	if (s->fd >= 0)
		empty(s->fd);
	if (s->path)
		rmdir(s->path);
	closep(&s->fd);
	free(s->path);
	free(s);
	return NULL;
}
