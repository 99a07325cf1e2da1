/* SPDX-License-Identifier: MIT */
/*
 * disk-uring.c: reads through io_uring, from the engine thread, into memory that is not registered.
 *
 * Owns the ring and one place for each piece in flight; the thread that submits first is the one
 * that may go on. Refuses to know page cache. Invariant: there are never more pieces in flight than
 * places, nor than entries of the ring, so that neither queue of it overflows.
 */
#include "daemon/residency/disk-internal.h"

#include <assert.h>
#include <liburing.h>
#include <sys/syscall.h>

#define READ_MAX ((uint64_t)1 << 30)

struct place {
	struct disk_job *job; /* NULL: free */
	uint32_t piece;
	struct disk_progress progress;
};

struct disk_ring {
	struct io_uring ring;
	bool disabled; /* until the thread that will use it does so */
	unsigned n_used;
	struct disk_job *starting; /* of which not all pieces are in flight yet */
	uint32_t next_piece;
	struct place places[]; /* the disk's depth of them */
};

/*
 * Newest first: completions are posted when we look, by and for one thread; or at least without
 * interrupting it.
 */
static int ring_open(unsigned entries, struct io_uring *ring, bool *ret_disabled)
{
	static const unsigned flags[] = {
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
			IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_R_DISABLED,
#endif
#if defined(IORING_SETUP_COOP_TASKRUN)
		IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
#endif
		0,
	};
	int r = -EINVAL;

	for (size_t i = 0; i < ARRAY_SIZE(flags) && r == -EINVAL; i++) {
		r = io_uring_queue_init(entries, ring, flags[i]);
		*ret_disabled = (flags[i] & IORING_SETUP_R_DISABLED) != 0;
	}
	return r;
}

/*
 * A ring may be made where it may not be entered, and old kernels cannot read this way: seen by
 * reading, in a ring of its own, since the first thread that enters the other is the only one that
 * may.
 */
static int ring_works(const struct disk *d)
{
	_cleanup_(freep) void *p = NULL;
	struct io_uring_cqe *cqe;
	struct io_uring ring;
	int r;

	if (posix_memalign(&p, DISK_PAGE, d->alignment) != 0)
		return -ENOMEM;
	r = io_uring_queue_init(1, &ring, 0);
	if (r < 0)
		return r;
	io_uring_prep_read(io_uring_get_sqe(&ring), d->parts[0].fd, p, d->alignment, 0);
	r = io_uring_submit_and_wait(&ring, 1);
	if (r >= 0)
		r = io_uring_peek_cqe(&ring, &cqe);
	if (r == 0)
		r = cqe->res > 0 ? 0 : -EIO;
	io_uring_queue_exit(&ring);
	return r;
}

int disk_ring_new(struct disk *d)
{
	struct disk_ring *k;
	int r = ring_works(d);

	if (r < 0)
		return r;
	k = calloc(1, sizeof(*k) + d->depth * sizeof(k->places[0]));
	if (!k)
		return -ENOMEM;
	r = ring_open(d->depth, &k->ring, &k->disabled);
	if (r < 0) {
		free(k);
		return r;
	}
	d->ring = k;
	return 0;
}

void disk_ring_free(struct disk *d)
{
	if (!d->ring)
		return;
	assert(d->ring->n_used == 0);
	io_uring_queue_exit(&d->ring->ring);
	free(d->ring);
	d->ring = NULL;
}

static void start_read(struct disk *d, struct place *at)
{
	const struct disk_piece *piece = &at->job->piece[at->piece];
	struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring->ring);
	uint64_t done = at->progress.done, len = MIN(piece->bytes - done, READ_MAX);

	assert(sqe);
	io_uring_prep_read(sqe, d->parts[piece->part].fd, (char *)piece->to + done, (unsigned)len,
			   piece->offset + done);
	io_uring_sqe_set_data(sqe, at);
}

static struct place *free_place(struct disk *d)
{
	for (unsigned i = 0; i < d->depth; i++)
		if (!d->ring->places[i].job)
			return &d->ring->places[i];
	return NULL;
}

static struct disk_job *next_read(struct disk *d)
{
	struct disk_job *job;

	pthread_mutex_lock(&d->lock);
	job = disk_queue_pop(&d->reads[1]);
	if (!job)
		job = disk_queue_pop(&d->reads[0]);
	pthread_mutex_unlock(&d->lock);
	return job;
}

/*
 * Short of memory the kernel takes less than we have: the rest goes along the next time. Anything
 * else was ruled out by the proof.
 */
static void ring_submit(struct disk_ring *k, unsigned wait)
{
	int r;

	if (k->disabled) {
		/* liburing 2.3 declares io_uring_enable_rings(), and does not export it. */
		r = (int)syscall(SYS_io_uring_register, k->ring.ring_fd,
				 IORING_REGISTER_ENABLE_RINGS, NULL, 0);
		assert(r == 0);
		k->disabled = false;
	}
	r = wait ? io_uring_submit_and_wait(&k->ring, wait) : io_uring_submit(&k->ring);
	if (wait && (r == -EAGAIN || r == -EBUSY || r == -ENOMEM))
		nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
	assert(r >= 0 || r == -EINTR || r == -EAGAIN || r == -EBUSY || r == -ENOMEM);
}

void disk_ring_fill(struct disk *d)
{
	struct disk_ring *k = d->ring;

	while (k->n_used < d->depth) {
		struct place *at;

		if (!k->starting) {
			k->starting = next_read(d);
			k->next_piece = 0;
		}
		if (!k->starting)
			break;
		at = free_place(d);
		*at = (struct place){ .job = k->starting, .piece = k->next_piece++ };
		k->n_used++;
		start_read(d, at);
		if (k->next_piece == k->starting->n_pieces)
			k->starting = NULL;
	}
	if (io_uring_sq_ready(&k->ring) > 0)
		ring_submit(k, 0);
}

static void piece_read(struct disk *d, struct place *at, int res)
{
	struct disk_job *job = at->job;
	int r = disk_progress_step(d, &job->piece[at->piece], res, &at->progress);

	if (r == 0) {
		start_read(d, at);
		return;
	}
	job->bytes += at->progress.done;
	if (r < 0 && job->err == 0)
		job->err = r;
	at->job = NULL;
	d->ring->n_used--;
	if (++job->n_ended < job->n_pieces)
		return;
	pthread_mutex_lock(&d->lock);
	disk_job_ended(d, job);
	pthread_mutex_unlock(&d->lock);
}

bool disk_ring_reap(struct disk *d, bool wait)
{
	struct disk_ring *k = d->ring;
	struct io_uring_cqe *cqe;

	if (wait && k->n_used > 0)
		ring_submit(k, 1);
	/*
	 * No system call as long as the kernel has not set the flag that there is something to be
	 * posted.
	 */
	while (k->n_used > 0 && io_uring_peek_cqe(&k->ring, &cqe) == 0) {
		struct place *at = io_uring_cqe_get_data(cqe);
		int res = cqe->res;

		io_uring_cqe_seen(&k->ring, cqe);
		piece_read(d, at, res);
	}
	disk_ring_fill(d);
	return k->n_used > 0;
}
