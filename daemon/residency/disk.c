/* SPDX-License-Identifier: MIT */
/*
 * disk.c: the queues between the engine thread and the disk. See disk.h for who may call what.
 *
 * Owns the descriptors that are read, the order of jobs, and their way: reads go to the ring where
 * there is one, all else to the I/O threads. Refuses to know what a block is: it is a number that
 * keeps jobs in order. Invariant: a job is in its block's chain from submission to end, and in one
 * queue at most; `held` as long as another job of the block is before it in the chain.
 */
#include "daemon/residency/disk-internal.h"

#include <assert.h>
#include <fcntl.h>
#include <sys/stat.h>

#ifndef STATX_DIOALIGN /* Linux 6.1 */
#define STATX_DIOALIGN 0x00002000U
#endif
/* glibc 2.36 has only spare words where the kernel answers. */
#define STATX_DIO_AT 0x98
_Static_assert(sizeof(struct statx) == 0x100, "the kernel's struct statx");

#define THREADS_DEFAULT 2U
#define DEPTH_DEFAULT   8U
#define ALIGNMENT_MIN   512U

void disk_queue_push(struct disk_queue *q, struct disk_job *job)
{
	job->next = NULL;
	if (q->last)
		q->last->next = job;
	else
		q->first = job;
	q->last = job;
}

struct disk_job *disk_queue_pop(struct disk_queue *q)
{
	struct disk_job *job = q->first;

	if (!job)
		return NULL;
	q->first = job->next;
	if (!q->first)
		q->last = NULL;
	job->next = NULL;
	return job;
}

static bool queue_remove(struct disk_queue *q, struct disk_job *job)
{
	struct disk_job *before = NULL;

	for (struct disk_job *j = q->first; j; before = j, j = j->next) {
		if (j != job)
			continue;
		if (before)
			before->next = job->next;
		else
			q->first = job->next;
		if (q->last == job)
			q->last = before;
		job->next = NULL;
		return true;
	}
	return false;
}

static struct disk_queue *bucket_of(struct disk *d, uint32_t block)
{
	return &d->bucket[block % DISK_BUCKETS];
}

/* True: a job of the same block is before it. */
static bool chain_append(struct disk *d, struct disk_job *job)
{
	struct disk_queue *b = bucket_of(d, job->block);
	bool before = false;

	for (struct disk_job *j = b->first; j && !before; j = j->chain)
		before = j->block == job->block;
	job->chain = NULL;
	if (b->last)
		b->last->chain = job;
	else
		b->first = job;
	b->last = job;
	return before;
}

/* Returns the next job of the block, or NULL. */
static struct disk_job *chain_remove(struct disk *d, struct disk_job *job)
{
	struct disk_queue *b = bucket_of(d, job->block);
	struct disk_job **p = &b->first, *before = NULL, *next = job->chain;

	while (*p != job) {
		before = *p;
		p = &before->chain;
	}
	*p = job->chain;
	if (b->last == job)
		b->last = before;
	while (next && next->block != job->block)
		next = next->chain;
	return next;
}

/* Lock held. */
static void make_ready(struct disk *d, struct disk_job *job)
{
	job->held = false;
	if (d->ring && job->kind == DISK_READ) {
		disk_queue_push(&d->reads[job->urgent], job);
		return;
	}
	disk_queue_push(&d->ready[job->urgent], job);
	pthread_cond_signal(&d->work);
}

void disk_job_ended(struct disk *d, struct disk_job *job)
{
	struct disk_job *next = chain_remove(d, job);

	job->us = now_us() - job->begun_us;
	if (next)
		make_ready(d, next);
	disk_queue_push(&d->done, job);
	pthread_cond_signal(&d->ended);
}

uint64_t disk_piece_bytes(const struct disk *d, const struct disk_piece *piece)
{
	uint64_t all = d->parts[piece->part].bytes;

	return piece->offset < all ? MIN(piece->bytes, all - piece->offset) : 0;
}

int disk_progress_step(const struct disk *d, const struct disk_piece *piece, ssize_t res,
		       struct disk_progress *g)
{
	const struct disk_part *p = &d->parts[piece->part];
	uint64_t want = disk_piece_bytes(d, piece), got;
	struct stat st;

	if (res > 0) {
		/* A part of a sector cannot be skipped: it is read again. */
		got = g->done + (uint64_t)res;
		if (got < want)
			got -= got % d->alignment;
		if (got > g->done) {
			g->done = MIN(got, want);
			g->tries = 0;
			return g->done == want;
		}
	}
	if (res >= 0 && fstat(p->fd, &st) == 0 && (uint64_t)st.st_size < piece->offset + want)
		return -ENODATA;
	return ++g->tries < DISK_TRIES ? 0 : -EIO;
}

void disk_submit(struct disk *d, struct disk_job *job)
{
	assert(job->n_pieces >= 1 && job->n_pieces <= CATALOG_MATRICES);
	for (uint32_t i = 0; i < job->n_pieces; i++) {
		assert(job->piece[i].part < d->n_parts);
		assert(job->kind == DISK_READ || (uintptr_t)job->piece[i].data % DISK_PAGE == 0);
	}
	job->err = 0;
	job->bytes = job->left_pages = 0;
	job->n_ended = 0;
	job->advised = false;
	job->begun_us = now_us();
	d->n_in_flight++;
	pthread_mutex_lock(&d->lock);
	job->held = chain_append(d, job);
	if (!job->held)
		make_ready(d, job);
	pthread_mutex_unlock(&d->lock);
	if (d->ring)
		disk_ring_fill(d);
}

void disk_hurry(struct disk *d, struct disk_job *job)
{
	pthread_mutex_lock(&d->lock);
	if (!job->urgent) {
		job->urgent = true;
		if (queue_remove(&d->ready[0], job))
			disk_queue_push(&d->ready[1], job);
		else if (queue_remove(&d->advised[0], job))
			disk_queue_push(&d->advised[1], job);
		else if (queue_remove(&d->reads[0], job))
			disk_queue_push(&d->reads[1], job);
	}
	pthread_mutex_unlock(&d->lock);
}

/*
 * A read that waits for a thread's job of the same block is not in the ring yet: then the thread is
 * waited for.
 */
static struct disk_job *wait_for_thread(struct disk *d)
{
	struct disk_job *job;

	pthread_mutex_lock(&d->lock);
	while (!(job = disk_queue_pop(&d->done)))
		pthread_cond_wait(&d->ended, &d->lock);
	pthread_mutex_unlock(&d->lock);
	return job;
}

struct disk_job *disk_take(struct disk *d, bool wait)
{
	struct disk_job *job = NULL;

	while (d->n_in_flight > 0 && !job) {
		bool reading = d->ring && disk_ring_reap(d, false);

		pthread_mutex_lock(&d->lock);
		job = disk_queue_pop(&d->done);
		pthread_mutex_unlock(&d->lock);
		if (job || !wait)
			break;
		if (reading)
			disk_ring_reap(d, true);
		else
			job = wait_for_thread(d);
	}
	if (job)
		d->n_in_flight--;
	return job;
}

unsigned disk_in_flight(const struct disk *d)
{
	return d->n_in_flight;
}

/* A descriptor of our own, so that its flags do not change how others read. */
static int reopen(int fd, int flags)
{
	char path[32];
	int r;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	r = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | flags);
	return r < 0 ? -errno : r;
}

/* 0: the file cannot be read with O_DIRECT, or not with pages of memory. */
static uint32_t direct_alignment(int fd)
{
	struct statx st;
	uint32_t dio[2]; /* of memory, of offsets */
	uint32_t a = DISK_PAGE;

	if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && st.stx_mask & STATX_DIOALIGN) {
		memcpy(dio, (char *)&st + STATX_DIO_AT, sizeof(dio));
		a = MAX(dio[0], dio[1]);
		if (a == 0 || a > DISK_PAGE || (a & (a - 1)) != 0)
			return 0;
	}
	return MAX(a, ALIGNMENT_MIN);
}

/* Some file systems open with O_DIRECT and refuse the read. */
static bool direct_works(int fd, uint32_t alignment)
{
	_cleanup_(freep) void *p = NULL;

	return posix_memalign(&p, DISK_PAGE, alignment) == 0 && pread(fd, p, alignment, 0) > 0;
}

/* All parts with O_DIRECT, or none. */
static bool open_direct(struct disk *d)
{
	d->alignment = ALIGNMENT_MIN;
	for (size_t i = 0; i < d->n_parts; i++) {
		struct disk_part *p = &d->parts[i];
		uint32_t a = direct_alignment(p->file_fd);

		p->fd = a > 0 ? reopen(p->file_fd, O_DIRECT) : -1;
		if (p->fd < 0 || !direct_works(p->fd, a))
			return false;
		d->alignment = MAX(d->alignment, a);
	}
	return true;
}

static int open_buffered(struct disk *d)
{
	d->alignment = ALIGNMENT_MIN;
	for (size_t i = 0; i < d->n_parts; i++) {
		struct disk_part *p = &d->parts[i];

		closep(&p->fd);
		p->fd = reopen(p->file_fd, 0);
		if (p->fd < 0) /* the file is not ours to open any more */
			p->fd = fcntl(p->file_fd, F_DUPFD_CLOEXEC, 0);
		if (p->fd < 0)
			return -errno;
		(void)posix_fadvise(p->fd, 0, 0, POSIX_FADV_RANDOM);
	}
	return 0;
}

static int open_parts(struct disk *d, const struct gguf *g)
{
	d->n_parts = gguf_n_parts(g);
	d->parts = calloc(d->n_parts, sizeof(*d->parts));
	if (!d->parts)
		return -ENOMEM;
	for (size_t i = 0; i < d->n_parts; i++) {
		const struct gguf_part *file = gguf_part(g, i);

		d->parts[i] = (struct disk_part){ .fd = -1, .file_fd = file->fd, .bytes = file->bytes };
	}
	for (size_t i = 0; i < d->n_parts; i++) {
		struct disk_part *p = &d->parts[i];

		if (p->file_fd < 0)
			return -EBADF;
		p->chunk = pages_read_ahead(p->file_fd);
		p->sight = pages_sight(p->file_fd, gguf_part(g, i)->data);
	}
	d->direct = open_direct(d);
	return d->direct ? 0 : open_buffered(d);
}

int disk_new(const struct gguf *g, const struct disk_config *c, struct disk **ret)
{
	const char *no_uring = getenv("RESIDENTD_NO_URING");
	struct disk *d = calloc(1, sizeof(*d));
	int r;

	if (!d)
		return -ENOMEM;
	pthread_mutex_init(&d->lock, NULL);
	pthread_cond_init(&d->work, NULL);
	pthread_cond_init(&d->ended, NULL);
	d->depth = MIN(c->queue_depth ? c->queue_depth : DEPTH_DEFAULT, DISK_DEPTH_MAX);
	r = open_parts(d, g);
	if (r == 0 && d->direct && !c->no_uring && !(no_uring && streq(no_uring, "1")))
		(void)disk_ring_new(d);
	if (r == 0)
		r = disk_threads_start(d, MIN(c->n_threads ? c->n_threads : THREADS_DEFAULT,
					      DISK_THREADS_MAX));
	if (r < 0) {
		disk_free(d);
		return r;
	}
	*ret = d;
	return 0;
}

struct disk *disk_free(struct disk *d)
{
	if (!d)
		return NULL;
	while (disk_take(d, true))
		;
	disk_threads_stop(d);
	disk_ring_free(d);
	for (size_t i = 0; i < d->n_parts && d->parts; i++)
		closep(&d->parts[i].fd);
	free(d->parts);
	pthread_cond_destroy(&d->ended);
	pthread_cond_destroy(&d->work);
	pthread_mutex_destroy(&d->lock);
	free(d);
	return NULL;
}

const char *disk_method(const struct disk *d)
{
	if (!d->direct)
		return "pread buffered";
	return d->ring ? "io_uring O_DIRECT" : "pread O_DIRECT";
}

uint32_t disk_alignment(const struct disk *d)
{
	return d->alignment;
}
