/* SPDX-License-Identifier: MIT */
/*
 * worker.h: the mailbox between the loop thread and the engine thread, and the threads that prepare prompts.
 *
 * A mailbox is a queue of messages owned by whoever holds them: posting hands a message over, taking it hands it on. That is the
 * only thing threads share. Messages are embedded in larger objects (mail first), so posting never allocates and never fails.
 * Workers run one job at a time in order of submission and post each finished job to a mailbox; they take no decisions.
 */
#pragma once

#include "daemon/base.h"

#include <pthread.h>
#include <stdatomic.h>

struct mail {
	struct mail *next;
	int kind; /* the receiver's enum */
};

struct mailbox {
	pthread_mutex_t lock;
	pthread_cond_t filled;
	struct mail *head, **tail;
	int event_fd; /* readable while mail waits; -1 without */
};

int mailbox_init(struct mailbox *b, bool with_fd); /* -errno */
void mailbox_done(struct mailbox *b);              /* must be empty */
void mailbox_post(struct mailbox *b, struct mail *m);
/* The whole content in order of posting (a list by next), NULL when empty. wait: blocks until there is some. */
struct mail *mailbox_take_all(struct mailbox *b, bool wait);

struct job {
	struct mail mail;             /* as which it comes back */
	void (*run)(struct job *job); /* on a worker thread */
};

struct workers;

/* Finished jobs go to done_box. -errno. */
int workers_new(unsigned n_threads, struct mailbox *done_box, struct workers **ret);
/* Runs what was submitted, joins. Accepts NULL; returns NULL. */
struct workers *workers_free(struct workers *w);
void workers_submit(struct workers *w, struct job *job);
