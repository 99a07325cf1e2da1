/* SPDX-License-Identifier: MIT */
/*
 * disk-internal.h: what disk.c, disk-threads.c, disk-uring.c and disk-pages.c share; tests look in
 * too, host.c uses the page functions.
 *
 * disk.c owns struct disk, its queues and the order of jobs; disk-threads.c the I/O threads and
 * what they do; disk-uring.c the ring, which only the engine thread touches; disk-pages.c asks and
 * tells the kernel about page cache and keeps nothing. Invariant: queues, chains and what is
 * `shared` below are touched with the lock held; no job is read by two threads without it.
 */
#pragma once

#include "daemon/residency/disk.h"

#include <pthread.h>
#include <stdatomic.h>

#define DISK_TRIES       3
#define DISK_PAGE        4096U
#define DISK_BUCKETS     256U
#define DISK_THREADS_MAX 16U
#define DISK_DEPTH_MAX   256U

/* How one can know which pages of a file are in the page cache. */
enum pages_sight {
	PAGES_BLIND,
	PAGES_MINCORE,   /* needs the mapping; honest to owners of the file only */
	PAGES_CACHESTAT, /* Linux 6.5 */
};

struct disk_part {
	int fd;         /* of our own: O_DIRECT, or for buffered reads without readahead */
	int file_fd;    /* of struct gguf */
	uint64_t bytes; /* as the catalog knows it */
	size_t chunk;   /* at most this much a WILLNEED: more is silently dropped */
	enum pages_sight sight;
};

struct disk_queue {
	struct disk_job *first, *last;
};

struct disk_ring;

struct disk {
	struct disk_part *parts;
	size_t n_parts;
	uint32_t alignment;
	bool direct;
	unsigned depth;
	unsigned n_in_flight;   /* engine thread: submitted and not taken */
	struct disk_ring *ring; /* NULL: the threads read */

	pthread_t threads[DISK_THREADS_MAX];
	unsigned n_threads;
	pthread_mutex_t lock;
	pthread_cond_t work, ended;
	/* shared; [1]: urgent */
	struct disk_queue ready[2];   /* for a thread */
	struct disk_queue advised[2]; /* populate jobs whose pages are being read by now */
	unsigned n_advised;           /* pieces of these, and of those that a thread waits for */
	struct disk_queue reads[2];   /* for the ring */
	struct disk_queue done;
	/*
	 * Jobs that have not ended, by a hash of the block, in order of submission: of those of one
	 * block only the first runs.
	 */
	struct disk_queue bucket[DISK_BUCKETS];
	bool stop;
	atomic_bool held; /* the last eviction left pages: whoever has them does not let go of them soon */
};

/* How far the reading of a piece has come. */
struct disk_progress {
	uint64_t done;
	unsigned tries; /* in a row without getting on */
};

void disk_queue_push(struct disk_queue *q, struct disk_job *job);
struct disk_job *disk_queue_pop(struct disk_queue *q); /* NULL: empty */
/* Lock held: the job goes to disk_take(), the next of its block may start. */
void disk_job_ended(struct disk *d, struct disk_job *job);
/* What of the piece is in the file. */
uint64_t disk_piece_bytes(const struct disk *d, const struct disk_piece *piece);
/*
 * After a read from g->done on gave res (bytes or -errno): 1: all is there, 0: read on from
 * g->done, or -EIO, -ENODATA.
 */
int disk_progress_step(const struct disk *d, const struct disk_piece *piece, ssize_t res,
		       struct disk_progress *g);

/* -errno; threads that were started before the error stay, disk_threads_stop() ends them. */
int disk_threads_start(struct disk *d, unsigned n);
void disk_threads_stop(struct disk *d);

/*
 * Reads the first bytes of the first part for a proof. -EPERM, -ENOSYS, -ENOMEM...: no io_uring
 * here.
 */
int disk_ring_new(struct disk *d);
void disk_ring_free(struct disk *d);
/* Starts reads as far as the depth allows. */
void disk_ring_fill(struct disk *d);
/*
 * Ends what has been read, starts what waits for a place; wait: for at least one, if any is in
 * flight. False: none was in flight.
 */
bool disk_ring_reap(struct disk *d, bool wait);

enum pages_sight pages_sight(int fd, const void *data);
size_t pages_read_ahead(int fd);
/*
 * Pages of the range in the page cache. offset, bytes: page-aligned; data: its place in the
 * mapping. -ENODATA: cannot be known.
 */
int pages_cached(enum pages_sight sight, int fd, const void *data, uint64_t offset, uint64_t bytes,
		 uint64_t *ret);
/* Begins to read the range, without waiting. */
void pages_advise(const void *data, uint64_t bytes, size_t chunk);
/* Waits until the range is resident and mapped. -EIO. */
int pages_populate(const void *data, uint64_t bytes);
/*
 * Drops the range from the page cache, exactly; returns the pages that stay whatever one does. Who has hold of one may have lost his core,
 * and comes back after some slices of others': patient waits for him, up to 31 ms, else 2.
 */
uint64_t pages_evict(enum pages_sight sight, int fd, const void *data, uint64_t offset,
		     uint64_t bytes, bool patient);
