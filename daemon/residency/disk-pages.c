/* SPDX-License-Identifier: MIT */
/*
 * disk-pages.c: page cache of a range of a file, asked for, brought in and dropped.
 *
 * Owns nothing; any thread. Refuses to know blocks. What forced the sequences below was measured:
 * the calls say 0 while doing nothing, so that only counting afterwards proves anything. Invariant:
 * pages outside of the range that was given neither come nor go, as long as the mapping is
 * MADV_RANDOM there.
 */
#include "daemon/residency/disk-internal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>

#ifndef SYS_cachestat /* the same number everywhere */
#define SYS_cachestat 451
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

#define READ_AHEAD_KB_DEFAULT 128U
#define EVICT_TRIES           4U
#define EVICT_TRIES_PATIENT   7U
/* What is being read or written just now cannot be dropped; patience doubles it each time. */
#define PAUSE_US              1000L
#define MINCORE_PAGES         4096U

static int cachestat(int fd, uint64_t offset, uint64_t bytes, uint64_t *ret)
{
	struct {
		uint64_t offset, bytes;
	} range = { offset, bytes };
	struct {
		uint64_t cached, dirty, writeback, evicted, recently_evicted;
	} stat;

	if (syscall(SYS_cachestat, fd, &range, &stat, 0) < 0)
		return -errno;
	*ret = stat.cached;
	return 0;
}

/* mincore() says "resident" of everything to those who may not know. */
static bool mincore_is_honest(int fd)
{
	char path[32];
	struct stat st;

	if (fstat(fd, &st) < 0)
		return false;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return st.st_uid == geteuid() || faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) == 0;
}

enum pages_sight pages_sight(int fd, const void *data)
{
	uint64_t n;

	if (cachestat(fd, 0, DISK_PAGE, &n) == 0)
		return PAGES_CACHESTAT;
	return data && mincore_is_honest(fd) ? PAGES_MINCORE : PAGES_BLIND;
}

static int mincore_count(const void *data, uint64_t bytes, uint64_t *ret)
{
	unsigned char vec[MINCORE_PAGES];
	uint64_t n = 0;

	for (uint64_t at = 0; at < bytes; at += (uint64_t)MINCORE_PAGES * DISK_PAGE) {
		uint64_t len = MIN(bytes - at, (uint64_t)MINCORE_PAGES * DISK_PAGE);

		if (mincore((char *)(uintptr_t)data + at, len, vec) < 0)
			return -errno;
		for (uint64_t i = 0; i < len / DISK_PAGE; i++)
			n += vec[i] & 1;
	}
	*ret = n;
	return 0;
}

int pages_cached(enum pages_sight sight, int fd, const void *data, uint64_t offset, uint64_t bytes,
		 uint64_t *ret)
{
	if (bytes == 0) { /* which cachestat() takes for "to the end" */
		*ret = 0;
		return 0;
	}
	switch (sight) {
	case PAGES_CACHESTAT: return cachestat(fd, offset, bytes, ret) < 0 ? -ENODATA : 0;
	case PAGES_MINCORE: return mincore_count(data, bytes, ret) < 0 ? -ENODATA : 0;
	case PAGES_BLIND: break;
	}
	return -ENODATA;
}

/* 0: it does not say. */
static unsigned read_kb(const char *path)
{
	_cleanup_(fclosep) FILE *f = fopen(path, "re");
	unsigned kb = 0;

	return f && fscanf(f, "%u", &kb) == 1 ? kb : 0;
}

size_t pages_read_ahead(int fd)
{
	/* A disk, a partition, and what has no disk of its own. */
	static const char *const places[] = {
		"/sys/dev/block/%u:%u/queue/read_ahead_kb",
		"/sys/dev/block/%u:%u/../queue/read_ahead_kb",
		"/sys/class/bdi/%u:%u/read_ahead_kb",
	};
	unsigned kb = 0;
	struct stat st;
	char path[64];

	if (fstat(fd, &st) == 0)
		for (size_t i = 0; i < ARRAY_SIZE(places) && kb == 0; i++) {
			snprintf(path, sizeof(path), places[i], major(st.st_dev), minor(st.st_dev));
			kb = read_kb(path);
		}
	if (kb == 0)
		kb = READ_AHEAD_KB_DEFAULT;
	return MAX((size_t)kb * 1024 / DISK_PAGE * DISK_PAGE, (size_t)DISK_PAGE);
}

static int advise(const void *data, uint64_t bytes, int advice)
{
	return madvise((void *)(uintptr_t)data, bytes, advice) < 0 ? -errno : 0;
}

void pages_advise(const void *data, uint64_t bytes, size_t chunk)
{
	for (uint64_t at = 0; at < bytes; at += chunk)
		(void)advise((const char *)data + at, MIN(bytes - at, (uint64_t)chunk), MADV_WILLNEED);
}

static void touch(const void *data, uint64_t bytes)
{
	const volatile char *p = data;

	for (uint64_t at = 0; at < bytes; at += DISK_PAGE)
		(void)p[at];
}

int pages_populate(const void *data, uint64_t bytes)
{
	for (unsigned i = 0; i < DISK_TRIES; i++) {
		int r = advise(data, bytes, MADV_POPULATE_READ);

		if (r == 0)
			return 0;
		if (r == -EINVAL) { /* before Linux 5.14 */
			touch(data, bytes);
			return 0;
		}
	}
	return -EIO;
}

/*
 * What is resident and mapped nowhere cannot be split, and so not be dropped where it is larger
 * than the range. Halves the range until a part is wholly resident: nothing must be read for this.
 */
static void map_resident(enum pages_sight sight, int fd, const void *data, uint64_t offset, uint64_t bytes)
{
	uint64_t n, half = ALIGN_UP(bytes / 2, (uint64_t)DISK_PAGE);

	if (pages_cached(sight, fd, data, offset, bytes, &n) < 0 || n == 0)
		return;
	if (n >= bytes / DISK_PAGE) {
		(void)advise(data, bytes, MADV_POPULATE_READ);
		return;
	}
	map_resident(sight, fd, data, offset, half);
	map_resident(sight, fd, (const char *)data + half, offset + half, bytes - half);
}

/*
 * Pages that came by pages_advise() are small, and unmapping is enough before the last call does
 * something. What is left is large and reaches beyond the range: COLD splits it, if it is mapped.
 * What is left then is being read, or somebody else's.
 */
uint64_t pages_evict(enum pages_sight sight, int fd, const void *data, uint64_t offset,
		     uint64_t bytes, bool patient)
{
	const unsigned tries = patient ? EVICT_TRIES_PATIENT : EVICT_TRIES;
	long pause_us = PAUSE_US;
	uint64_t left = 0;

	for (unsigned i = 0; i < tries && bytes > 0; i++) {
		if (i > 1) {
			nanosleep(&(struct timespec){ .tv_nsec = pause_us * 1000 }, NULL);
			pause_us *= patient ? 2 : 1;
		}
		if (i > 0)
			map_resident(sight, fd, data, offset, bytes);
		/* Where nobody can tell what is left, both at once. */
		if (i > 0 || sight == PAGES_BLIND)
			(void)advise(data, bytes, MADV_COLD);
		(void)advise(data, bytes, MADV_DONTNEED);
		(void)posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
		if (pages_cached(sight, fd, data, offset, bytes, &left) < 0 || left == 0)
			break;
	}
	return left;
}
