/* SPDX-License-Identifier: MIT */
/*
 * disk.h: brings bytes of the model in, and lets page cache go, behind the back of the compute threads.
 *
 * Owned by host.c, engine thread only; its own I/O threads never call back. Two ways: reads with O_DIRECT into memory of the caller's
 * (io_uring from the engine thread, or I/O threads with pread where there is no io_uring; buffered reads whose page cache is dropped
 * at once where a file system refuses O_DIRECT), and page-cache work (populate, exact eviction), always on the I/O threads.
 * Invariants: jobs that name the same block are done in the order of their submission; every submitted job is returned exactly once.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/residency/catalog.h"

struct disk;

enum disk_kind {
	DISK_READ, /* piece->to = bytes of the file, widened to the alignment */
	DISK_POPULATE, /* WILLNEED in pieces of read_ahead_kb, then POPULATE_READ: resident and mapped */
	DISK_EVICT, /* COLD + DONTNEED + fadvise of the whole pages, verified, tried again */
};

/* Page-aligned. DISK_READ: offset, bytes and to are multiples of the alignment; the last piece of a file may end beyond it. */
struct disk_piece {
	uint32_t part;
	uint64_t offset, bytes;
	void *to;         /* DISK_READ */
	const void *data; /* DISK_POPULATE, DISK_EVICT: the place in the mapping */
};

struct disk_job {
	enum disk_kind kind;
	uint32_t block;
	uint32_t n_pieces;
	struct disk_piece piece[CATALOG_MATRICES];
	bool urgent; /* before those that are not: somebody waits for it */
	/* result */
	int err;        /* 0, -EIO after three tries, -ENODATA: the file has become too short */
	uint64_t bytes; /* read from the file, or populated */
	uint64_t left_pages;   /* DISK_EVICT: still in the page cache after the last try */
	uint64_t begun_us, us; /* now_us() of the submission, and from there to the end */
	/* disk.c's, while the job is in flight */
	struct disk_job *next, *chain;
	uint32_t n_ended;
	bool held, advised;
};

struct disk_config {
	unsigned n_threads;   /* 0: 2 */
	unsigned queue_depth; /* reads in flight, in pieces; 0: 8 */
	bool no_uring;        /* tests; the environment RESIDENTD_NO_URING=1 too */
};

/* -ENOMEM, -errno. The parts' descriptors are opened again for O_DIRECT through /proc/self/fd (the daemon may not see the path any more). */
int disk_new(const struct gguf *g, const struct disk_config *c, struct disk **ret);
struct disk *disk_free(struct disk *d); /* waits for what is in flight; accepts NULL */
const char *disk_method(const struct disk *d); /* "io_uring O_DIRECT", "pread O_DIRECT", "pread buffered"; static */
uint32_t disk_alignment(const struct disk *d); /* of offset, length and memory: 512 to 4096 */
/* The job stays the caller's memory; must not be touched until disk_take() has returned it. */
void disk_submit(struct disk *d, struct disk_job *job);
/* A job in flight becomes urgent: somebody waits for it by now. */
void disk_hurry(struct disk *d, struct disk_job *job);
/* A finished job, or NULL: none yet (wait: none in flight). */
struct disk_job *disk_take(struct disk *d, bool wait);
unsigned disk_in_flight(const struct disk *d);
