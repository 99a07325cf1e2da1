/* SPDX-License-Identifier: MIT */
/* test-worker.c: mail keeps its order and is never lost; every job comes back once. */
#include "tests/test.h"

#include "daemon/worker.h"

#include <poll.h>

static bool readable(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, 0) == 1;
}

static void test_mailbox(void **state)
{
	struct mailbox b;
	struct mail m[3] = { { .kind = 1 }, { .kind = 2 }, { .kind = 3 } };
	struct mail *list;

	(void)state;
	assert_int_equal(mailbox_init(&b, true), 0);
	assert_null(mailbox_take_all(&b, false));
	assert_false(readable(b.event_fd));
	for (size_t i = 0; i < 3; i++)
		mailbox_post(&b, &m[i]);
	assert_true(readable(b.event_fd));
	list = mailbox_take_all(&b, true);
	assert_ptr_equal(list, &m[0]);
	assert_ptr_equal(list->next, &m[1]);
	assert_ptr_equal(list->next->next, &m[2]);
	assert_null(m[2].next);
	assert_false(readable(b.event_fd));
	mailbox_done(&b);
}

struct numbered {
	struct mail mail;
	size_t from, n;
};

#define SENDERS    4
#define PER_SENDER 20000

struct sender {
	struct mailbox *box;
	size_t id;
	struct numbered *mails;
};

static void *send_all(void *arg)
{
	struct sender *s = arg;

	for (size_t i = 0; i < PER_SENDER; i++) {
		s->mails[i] = (struct numbered){ .from = s->id, .n = i };
		mailbox_post(s->box, &s->mails[i].mail);
	}
	return NULL;
}

static void test_many_senders(void **state)
{
	struct mailbox b;
	struct sender senders[SENDERS];
	pthread_t threads[SENDERS];
	size_t next[SENDERS] = {}, got = 0;

	(void)state;
	assert_int_equal(mailbox_init(&b, true), 0);
	for (size_t i = 0; i < SENDERS; i++) {
		senders[i] = (struct sender){ &b, i, calloc(PER_SENDER, sizeof(struct numbered)) };
		assert_non_null(senders[i].mails);
		assert_int_equal(pthread_create(&threads[i], NULL, send_all, &senders[i]), 0);
	}
	while (got < SENDERS * PER_SENDER) {
		for (struct mail *m = mailbox_take_all(&b, true); m; m = m->next) {
			struct numbered *n = (struct numbered *)m;

			assert_int_equal(n->n, next[n->from]++);
			got++;
		}
	}
	for (size_t i = 0; i < SENDERS; i++) {
		pthread_join(threads[i], NULL);
		free(senders[i].mails);
	}
	assert_null(mailbox_take_all(&b, false));
	mailbox_done(&b);
}

struct count_job {
	struct job job;
	atomic_int *ran;
};

static void run_count(struct job *job)
{
	atomic_fetch_add(((struct count_job *)job)->ran, 1);
}

/* Also what was still queued when the workers are told to end. */
static void test_jobs(void **state)
{
	struct mailbox b;
	struct workers *w = NULL;
	static struct count_job jobs[1000];
	atomic_int ran = 0;
	size_t back = 0;

	(void)state;
	assert_int_equal(mailbox_init(&b, false), 0);
	assert_int_equal(workers_new(3, &b, &w), 0);
	for (size_t i = 0; i < ARRAY_SIZE(jobs); i++) {
		jobs[i] = (struct count_job){ { .mail.kind = 5, .run = run_count }, &ran };
		workers_submit(w, &jobs[i].job);
	}
	w = workers_free(w);
	assert_null(w);
	for (struct mail *m = mailbox_take_all(&b, false); m; m = m->next) {
		assert_int_equal(m->kind, 5);
		back++;
	}
	assert_int_equal(back, ARRAY_SIZE(jobs));
	assert_int_equal(ran, ARRAY_SIZE(jobs));
	mailbox_done(&b);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_mailbox),
		cmocka_unit_test(test_many_senders),
		cmocka_unit_test(test_jobs),
	};

	return cmocka_run_group_tests_name("worker", tests, NULL, NULL);
}
