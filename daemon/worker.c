/* SPDX-License-Identifier: MIT */
/*
 * worker.c: mailboxes and the threads that prepare prompts. See worker.h.
 *
 * Knows nothing of requests or models. Any thread may post; one thread takes. Invariant: a message is in one list at a time.
 */
#include "daemon/worker.h"

#include <sys/eventfd.h>

int mailbox_init(struct mailbox *b, bool with_fd)
{
	*b = (struct mailbox){ .event_fd = -1 };
	b->tail = &b->head;
	if (with_fd) {
		b->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (b->event_fd < 0)
			return -errno;
	}
	pthread_mutex_init(&b->lock, NULL);
	pthread_cond_init(&b->filled, NULL);
	return 0;
}

void mailbox_done(struct mailbox *b)
{
	closep(&b->event_fd);
	b->event_fd = -1;
	pthread_cond_destroy(&b->filled);
	pthread_mutex_destroy(&b->lock);
}

void mailbox_post(struct mailbox *b, struct mail *m)
{
	bool was_empty;

	m->next = NULL;
	pthread_mutex_lock(&b->lock);
	was_empty = !b->head;
	*b->tail = m;
	b->tail = &m->next;
	pthread_cond_signal(&b->filled);
	pthread_mutex_unlock(&b->lock);
	/* The counter cannot overflow: it is written once per emptying. */
	if (was_empty && b->event_fd >= 0)
		(void)eventfd_write(b->event_fd, 1);
}

struct mail *mailbox_take_all(struct mailbox *b, bool wait)
{
	struct mail *list;
	eventfd_t n;

	/* Before the list is taken: mail posted after this read makes the descriptor readable again. */
	if (b->event_fd >= 0)
		(void)eventfd_read(b->event_fd, &n);
	pthread_mutex_lock(&b->lock);
	while (wait && !b->head)
		pthread_cond_wait(&b->filled, &b->lock);
	list = b->head;
	b->head = NULL;
	b->tail = &b->head;
	pthread_mutex_unlock(&b->lock);
	return list;
}

struct workers {
	struct mailbox box; /* jobs; a job without run() ends one thread */
	struct mailbox *done_box;
	pthread_mutex_t take_lock; /* several threads take from one box: one at a time */
	struct mail *taken;
	unsigned n_threads;
	pthread_t *threads;
	struct job *quit; /* one per thread */
};

static struct job *next_job(struct workers *w)
{
	struct mail *m;

	pthread_mutex_lock(&w->take_lock);
	if (!w->taken)
		w->taken = mailbox_take_all(&w->box, true);
	m = w->taken;
	w->taken = m->next;
	pthread_mutex_unlock(&w->take_lock);
	return (struct job *)m;
}

static void *worker_main(void *arg)
{
	struct workers *w = arg;
	struct job *job;

	(void)pthread_setname_np(pthread_self(), "residentd-prep");
	while ((job = next_job(w))->run) {
		job->run(job);
		mailbox_post(w->done_box, &job->mail);
	}
	return NULL;
}

int workers_new(unsigned n_threads, struct mailbox *done_box, struct workers **ret)
{
	struct workers *w = calloc(1, sizeof(*w));
	int r;

	if (!w)
		return -ENOMEM;
	w->done_box = done_box;
	pthread_mutex_init(&w->take_lock, NULL);
	r = mailbox_init(&w->box, false);
	if (r < 0) {
		pthread_mutex_destroy(&w->take_lock);
		free(w);
		return r;
	}
	w->threads = calloc(n_threads, sizeof(*w->threads));
	w->quit = calloc(n_threads, sizeof(*w->quit));
	if (!w->threads || !w->quit) {
		workers_free(w);
		return -ENOMEM;
	}
	for (; w->n_threads < n_threads; w->n_threads++) {
		r = pthread_create(&w->threads[w->n_threads], NULL, worker_main, w);
		if (r > 0) {
			workers_free(w);
			return -r;
		}
	}
	*ret = w;
	return 0;
}

struct workers *workers_free(struct workers *w)
{
	if (!w)
		return NULL;
	for (unsigned i = 0; i < w->n_threads; i++)
		mailbox_post(&w->box, &w->quit[i].mail);
	for (unsigned i = 0; i < w->n_threads; i++)
		pthread_join(w->threads[i], NULL);
	mailbox_done(&w->box);
	pthread_mutex_destroy(&w->take_lock);
	free(w->threads);
	free(w->quit);
	free(w);
	return NULL;
}

void workers_submit(struct workers *w, struct job *job)
{
	mailbox_post(&w->box, &job->mail);
}
