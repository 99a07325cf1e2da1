/* SPDX-License-Identifier: MIT */
/*
 * install.c: copies a model into the models directory. See install.h.
 *
 * Knows nothing of the service: a running one sees the file when it is told to reload. Invariant:
 * under its final name stands a whole file or none, and the link default.gguf never points nowhere
 * on its account. A copy that was interrupted is `.NAME.part`; the next one of that name starts
 * over.
 */
#include "client/install.h"

#include "daemon/model/gguf.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define MODELS_DIRECTORY "/var/lib/residentd/models"
#define DEFAULT_LINK     "default.gguf"
#define COPY_CHUNK       (16u << 20) /* between two looks at the progress line */

const char *install_directory(void)
{
	const char *path = getenv("RESIDENTD_MODELS");

	return path && *path ? path : MODELS_DIRECTORY;
}

/* The name that a file gets in the directory: its own, ending in .gguf. */
static int final_name(const char *path, char **ret, char **ret_error)
{
	const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
	size_t len = strlen(base);
	bool has_suffix = len > 5 && streq(base + len - 5, ".gguf");
	char *name;

	if (streq(base, DEFAULT_LINK) || streq(base, "default"))
		return fail(ret_error, -EINVAL,
			    "%s: this name is taken by the link to the default model", path);
	if (base[0] == '.' || len == 0)
		return fail(ret_error, -EINVAL, "%s: a model's name does not begin with a dot", path);
	if (asprintf(&name, "%s%s", base, has_suffix ? "" : ".gguf") < 0)
		return fail(ret_error, -ENOMEM, "out of memory");
	*ret = name;
	return 0;
}

/* ---- one file ---- */

/* What copy_file_range() cannot do on all file systems and kernels. 0 at the end of the file. */
static ssize_t copy_by_hand(int from, int to)
{
	static char chunk[1 << 20];
	ssize_t n = read(from, chunk, sizeof(chunk)), done = 0;

	while (n > 0 && done < n) {
		ssize_t w = write(to, chunk + done, (size_t)(n - done));

		if (w < 0)
			return w;
		done += w;
	}
	return n;
}

static int copy_bytes(int from, int to, uint64_t bytes, const char *name, struct terminal *err)
{
	uint64_t done = 0;
	bool by_hand = false;
	char line[128];

	if (lseek(from, 0, SEEK_SET) < 0)
		return -errno;
	while (done < bytes) {
		ssize_t n = by_hand ? copy_by_hand(from, to)
				    : copy_file_range(from, NULL, to, NULL, COPY_CHUNK, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && !by_hand && done == 0) {
			by_hand = true; /* EXDEV, EINVAL, EOPNOTSUPP, ENOSYS... */
			continue;
		}
		if (n < 0)
			return -errno;
		if (n == 0)
			return -ENODATA;
		done += (uint64_t)n;
		snprintf(line, sizeof(line), "copying %.64s: %llu of %llu MB", name,
			 (unsigned long long)(done / 1000000), (unsigned long long)(bytes / 1000000));
		terminal_progress(err, line);
	}
	terminal_progress_erase(err);
	return done == bytes ? 0 : -ENODATA;
}

/* Space is asked for only when the blocks cannot be shared. */
static int fill_file(int dir, int from, int to, uint64_t bytes, const char *name,
		     struct terminal *err, char **ret_error)
{
	struct statvfs fs;
	int r;

	if (ioctl(to, FICLONE, from) == 0)
		return 0;
	if (fstatvfs(dir, &fs) == 0 && (uint64_t)fs.f_bavail < bytes / fs.f_frsize)
		return fail(ret_error, -ENOSPC, "%s needs %llu MB, there are %llu MB free in %s",
			    name, (unsigned long long)(bytes / 1000000),
			    (unsigned long long)fs.f_bavail * fs.f_frsize / 1000000,
			    install_directory());
	r = copy_bytes(from, to, bytes, name, err);
	if (r == -ENODATA)
		return fail(ret_error, -EIO, "%s changed while it was copied", name);
	if (r < 0)
		return fail(ret_error, r, "cannot copy %s: %s", name, strerror(-r));
	return 0;
}

static int copy_part(int dir, const struct gguf_part *part, const char *name, bool replace,
		     struct terminal *err, char **ret_error)
{
	_cleanup_(freep) char *temporary = NULL;
	_cleanup_(closep) int fd = -1;
	int r;

	if (asprintf(&temporary, ".%s.part", name) < 0) {
		temporary = NULL;
		return fail(ret_error, -ENOMEM, "out of memory");
	}
	if (!replace && faccessat(dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
		return fail(ret_error, -EEXIST, "%s/%s is there already (--replace?)",
			    install_directory(), name);
	unlinkat(dir, temporary, 0);
	fd = openat(dir, temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
	if (fd < 0)
		return fail(ret_error, -errno, "%s/%s: %m", install_directory(), temporary);
	r = fill_file(dir, part->fd, fd, part->bytes, name, err, ret_error);
	if (r == 0 && (fchmod(fd, 0644) < 0 || fsync(fd) < 0 ||
		       renameat2(dir, temporary, dir, name, replace ? 0 : RENAME_NOREPLACE) < 0))
		r = fail(ret_error, -errno, "%s/%s: %m", install_directory(), name);
	if (r < 0)
		unlinkat(dir, temporary, 0);
	return r;
}

/* ---- the whole model ---- */

static int copy_parts(int dir, const struct gguf *g, struct install *i, struct terminal *err,
		      char **ret_error)
{
	/* The first part goes last: it is the one that a loader opens. */
	for (size_t n = gguf_n_parts(g); n-- > 0;) {
		const struct gguf_part *part = gguf_part(g, n);
		_cleanup_(freep) char *name = NULL;
		int r;

		r = final_name(part->path, &name, ret_error);
		if (r == 0)
			r = copy_part(dir, part, name, i->replace, err, ret_error);
		if (r < 0)
			return r;
		i->bytes += part->bytes;
		free(i->name);
		i->name = TAKE_PTR(name);
	}
	return 0;
}

/* The link is replaced as a whole; something else of its name is left alone. */
static int set_default(int dir, struct install *i, char **ret_error)
{
	static const char temporary[] = "." DEFAULT_LINK ".new";
	char target[NAME_MAX + 1] = "";
	struct stat st;
	bool there = fstatat(dir, DEFAULT_LINK, &st, AT_SYMLINK_NOFOLLOW) == 0;

	if (readlinkat(dir, DEFAULT_LINK, target, sizeof(target) - 1) > 0 && streq(target, i->name)) {
		i->is_default = true;
		return 0;
	}
	if (there && !i->make_default)
		return 0;
	if (there && !S_ISLNK(st.st_mode))
		return fail(ret_error, -EEXIST, "%s/" DEFAULT_LINK " is not a link: left as it is",
			    install_directory());
	unlinkat(dir, temporary, 0);
	if (symlinkat(i->name, dir, temporary) < 0 || renameat(dir, temporary, dir, DEFAULT_LINK) < 0)
		return fail(ret_error, -errno, "%s/" DEFAULT_LINK ": %m", install_directory());
	i->is_default = true;
	return 0;
}

int install_model(const char *path, struct install *i, struct terminal *err, char **ret_error)
{
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(closep) int dir = -1;
	int r;

	r = gguf_open(path, &g, ret_error);
	if (r < 0)
		return r;
	/* The service runs as another user: modes must not depend on this one's umask. */
	if (mkdir(install_directory(), 0755) == 0 ? chmod(install_directory(), 0755) < 0 : errno != EEXIST)
		return fail(ret_error, -errno, "%s: %m", install_directory());
	dir = open(install_directory(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		return fail(ret_error, -errno, "%s: %m", install_directory());
	r = copy_parts(dir, g, i, err, ret_error);
	if (r == 0)
		r = set_default(dir, i, ret_error);
	if (r == 0 && fsync(dir) < 0)
		r = fail(ret_error, -errno, "%s: %m", install_directory());
	return r;
}
