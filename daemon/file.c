/* SPDX-License-Identifier: MIT */
/*
 * file.c: reads small files with a bound and replaces them atomically. See file.h.
 *
 * Refuses to know what is in them. Invariant: a path is only ever replaced by a file that is complete
 * and on the disk; what is half written stands beside it as .NAME.new, and goes or is overwritten.
 */
#include "daemon/file.h"

#include <fcntl.h>
#include <sys/stat.h>

int file_read(const char *path, size_t bytes_max, struct buf *b)
{
	/* O_NONBLOCK: a FIFO must not hang the daemon */
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	size_t start = b->len;
	ssize_t n;
	int r;

	if (fd < 0)
		return -errno;
	do {
		r = buf_reserve(b, 16384);
		if (r < 0)
			return r;
		n = read(fd, b->data + b->len, 16384);
		if (n < 0)
			return -errno;
		b->len += (size_t)n;
		b->data[b->len] = 0;
		if (b->len - start > bytes_max)
			return -EFBIG;
	} while (n > 0);
	return 0;
}

static int write_whole(int fd, const char *data, size_t len)
{
	while (len > 0) {
		ssize_t n = write(fd, data, len);

		if (n < 0)
			return -errno;
		data += n;
		len -= (size_t)n;
	}
	return fsync(fd) < 0 ? -errno : 0;
}

static int write_new(const char *path, const void *data, size_t len, mode_t mode)
{
	_cleanup_(closep) int fd = -1;

	/* What was left of a crash, or put there: never opened, since a FIFO would be waited for. */
	if (unlink(path) < 0 && errno != ENOENT)
		return -errno;
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY, mode);
	if (fd < 0)
		return -errno;
	if (fchmod(fd, mode) < 0) /* whatever the umask is */
		return -errno;
	return write_whole(fd, data, len);
}

/* The new name is on the disk only when its directory is. Too late to fail: whoever opens the path has the new file. */
static void sync_directory(const char *path)
{
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd >= 0)
		fsync(fd);
}

int file_replace(const char *path, const void *data, size_t len, mode_t mode)
{
	const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
	_cleanup_(freep) char *dir = slash ? strndup(path, (size_t)(name - path)) : strdup("./");
	_cleanup_(freep) char *new = NULL;
	int r;

	if (!dir)
		return -ENOMEM;
	if (asprintf(&new, "%s.%s.new", dir, name) < 0) {
		new = NULL;
		return -ENOMEM;
	}
	r = write_new(new, data, len, mode);
	if (r == 0 && rename(new, path) < 0)
		r = -errno;
	if (r < 0) {
		unlink(new);
		return r;
	}
	sync_directory(dir);
	return 0;
}
