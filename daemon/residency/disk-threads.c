/* SPDX-License-Identifier: MIT */
/*
 * disk-threads.c: the I/O threads: page-cache work, and reads where there is no io_uring.
 *
 * Owns the threads; they take jobs from disk.c's queues and know nothing else. Refuses to know the
 * engine: nothing is called back. Invariant: a job belongs to one thread from pick() to its end,
 * but for a populate job between its two steps: its pages are asked for first, and waited for when
 * those of others, up to the depth, have been asked for too, so that the disk has a queue.
 */
#include "daemon/residency/disk-internal.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

/* The kernel reads less than 2 GiB at once. */
#define READ_MAX ((uint64_t)1 << 30)

static int read_piece(struct disk *d, const struct disk_piece *piece, uint64_t *bytes)
{
	const struct disk_part *p = &d->parts[piece->part];
	struct disk_progress g = {};
	int r = 0;

	while (r == 0) {
		size_t len = MIN(piece->bytes - g.done, READ_MAX);
		ssize_t n = pread(p->fd, (char *)piece->to + g.done, len,
				  (off_t)(piece->offset + g.done));

		r = disk_progress_step(d, piece, n < 0 ? -errno : n, &g);
	}
	*bytes += g.done;
	if (!d->direct) {
		uint64_t from = piece->offset / DISK_PAGE * DISK_PAGE;
		uint64_t to = ALIGN_UP(piece->offset + piece->bytes, (uint64_t)DISK_PAGE);

		(void)posix_fadvise(p->fd, (off_t)from, (off_t)(to - from), POSIX_FADV_DONTNEED);
	}
	return r < 0 ? r : 0;
}

static bool is_truncated(const struct disk *d, const struct disk_piece *piece)
{
	struct stat st;

	return fstat(d->parts[piece->part].fd, &st) == 0 &&
	       (uint64_t)st.st_size < piece->offset + disk_piece_bytes(d, piece);
}

static int populate_piece(struct disk *d, const struct disk_piece *piece, uint64_t *bytes)
{
	/*
	 * Asked first too: where the kernel cannot populate, pages are touched, and there are none
	 * beyond the end.
	 */
	int r = is_truncated(d, piece) ? -ENODATA : pages_populate(piece->data, piece->bytes);

	if (r == 0)
		*bytes += piece->bytes;
	return r < 0 && is_truncated(d, piece) ? -ENODATA : r;
}

static void run(struct disk *d, struct disk_job *job)
{
	for (uint32_t i = 0; i < job->n_pieces; i++) {
		const struct disk_piece *piece = &job->piece[i];
		const struct disk_part *p = &d->parts[piece->part];
		uint64_t left;
		int r = 0;

		switch (job->kind) {
		case DISK_READ: r = read_piece(d, piece, &job->bytes); break;
		case DISK_POPULATE: r = populate_piece(d, piece, &job->bytes); break;
		case DISK_EVICT:
			left = pages_evict(p->sight, p->file_fd, piece->data, piece->offset,
					   piece->bytes, !atomic_load(&d->held));
			atomic_store(&d->held, left > 0);
			job->left_pages += left;
			break;
		}
		if (r < 0) {
			job->err = r;
			break;
		}
	}
}

/* Lock held. */
static struct disk_job *pick(struct disk *d)
{
	for (int urgent = 1; urgent >= 0; urgent--) {
		struct disk_job *job = d->ready[urgent].first;

		if (job && (job->kind != DISK_POPULATE || d->n_advised < d->depth))
			return disk_queue_pop(&d->ready[urgent]);
		job = disk_queue_pop(&d->advised[urgent]);
		if (job)
			return job;
	}
	return NULL;
}

/* Lock held, and let go of meanwhile. */
static void ask_for_pages(struct disk *d, struct disk_job *job)
{
	d->n_advised += job->n_pieces;
	pthread_mutex_unlock(&d->lock);
	for (uint32_t i = 0; i < job->n_pieces; i++)
		pages_advise(job->piece[i].data, job->piece[i].bytes,
			     d->parts[job->piece[i].part].chunk);
	pthread_mutex_lock(&d->lock);
	job->advised = true;
	disk_queue_push(&d->advised[job->urgent], job);
	pthread_cond_signal(&d->work);
}

static void *thread_main(void *arg)
{
	struct disk *d = arg;

	(void)pthread_setname_np(pthread_self(), "residentd-io");
	pthread_mutex_lock(&d->lock);
	for (;;) {
		struct disk_job *job = pick(d);

		if (!job && d->stop)
			break;
		if (!job) {
			pthread_cond_wait(&d->work, &d->lock);
			continue;
		}
		if (job->kind == DISK_POPULATE && !job->advised) {
			ask_for_pages(d, job);
			continue;
		}
		pthread_mutex_unlock(&d->lock);
		run(d, job);
		pthread_mutex_lock(&d->lock);
		if (job->kind == DISK_POPULATE)
			d->n_advised -= job->n_pieces;
		disk_job_ended(d, job);
	}
	pthread_mutex_unlock(&d->lock);
	return NULL;
}

int disk_threads_start(struct disk *d, unsigned n)
{
	sigset_t all, old;
	int r = 0;

	/* SIGBUS belongs to the thread whose access failed: blocked, it ends the process. */
	sigfillset(&all);
	sigdelset(&all, SIGBUS);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (d->n_threads < n && r == 0) {
		r = pthread_create(&d->threads[d->n_threads], NULL, thread_main, d);
		if (r == 0)
			d->n_threads++;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return -r;
}

void disk_threads_stop(struct disk *d)
{
	pthread_mutex_lock(&d->lock);
	d->stop = true;
	pthread_cond_broadcast(&d->work);
	pthread_mutex_unlock(&d->lock);
	while (d->n_threads > 0)
		pthread_join(d->threads[--d->n_threads], NULL);
}
