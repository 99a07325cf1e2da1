/* SPDX-License-Identifier: MIT */
/*
 * test-pool.c: every piece of every loop is done once and is done when pool_run() returns, with any
 * number of threads, for loops that follow each other closely and for workers that had gone to
 * sleep. Meant to be run under the thread sanitizer too: the counters below are plain memory on
 * purpose, so that a missing barrier is a report.
 */
#include "tests/test.h"

#include "daemon/base.h"
#include "kernels/cpu/pool.h"

#include <pthread.h>
#include <stdatomic.h>

struct loop {
	struct pool *pool;
	unsigned *hits; /* one per piece */
	size_t n;
	unsigned value;
	atomic_uint threads_seen; /* a bit per thread */
	atomic_uint bad; /* pieces or threads out of range: cmocka fails in its own thread only */
	bool wait;
};

static void piece(void *arg, size_t i, unsigned thread)
{
	struct loop *l = arg;

	if (i >= l->n || thread >= pool_n_threads(l->pool)) {
		atomic_fetch_add(&l->bad, 1);
		return;
	}
	if (l->wait) /* before the work is done; longer away from the caller, so that it has to wait */
		usleep(thread ? 2000 : 200);
	l->hits[i] += l->value;
	atomic_fetch_or(&l->threads_seen, 1u << thread);
}

static void test_sizes(void **state)
{
	static const size_t sizes[] = { 0, 1, 2, 3, 7, 64, 1000 };
	(void)state;

	for (unsigned n_threads = 1; n_threads <= 5; n_threads++) {
		struct pool *pool = pool_new(n_threads, NULL);

		assert_non_null(pool);
		assert_int_equal(pool_n_threads(pool), n_threads);
		for (size_t s = 0; s < ARRAY_SIZE(sizes); s++) {
			unsigned hits[1000] = { 0 };
			struct loop l = { .pool = pool, .hits = hits, .n = sizes[s], .value = 1 };

			pool_run(pool, l.n, piece, &l);
			assert_int_equal(l.bad, 0);
			for (size_t i = 0; i < ARRAY_SIZE(hits); i++)
				assert_int_equal(hits[i], i < l.n);
		}
		pool = pool_free(pool);
		assert_null(pool);
	}
	assert_null(pool_free(NULL));
}

/* A single piece, or a single thread, stays on the calling thread. */
static void note_self(void *arg, size_t i, unsigned thread)
{
	(void)i;

	if (thread == 0)
		*(pthread_t *)arg = pthread_self();
}

static void test_inline(void **state)
{
	struct pool *one = pool_new(1, NULL), *two = pool_new(2, NULL);
	pthread_t self = 0;
	(void)state;

	pool_run(one, 3, note_self, &self);
	assert_true(pthread_equal(self, pthread_self()));
	self = 0;
	pool_run(two, 1, note_self, &self);
	assert_true(pthread_equal(self, pthread_self()));
	pool_free(one);
	pool_free(two);
}

/* Loops one after the other without a pause: late workers of one loop meet the next. */
static void test_stress(void **state)
{
	enum { LOOPS = 20000, MAX = 9 };
	struct pool *pool = pool_new(4, NULL);
	unsigned hits[MAX] = { 0 }, want[MAX] = { 0 };
	(void)state;

	for (unsigned round = 0; round < LOOPS; round++) {
		struct loop l = { .pool = pool, .hits = hits, .n = 2 + round % (MAX - 1), .value = round };

		pool_run(pool, l.n, piece, &l);
		assert_int_equal(l.bad, 0);
		for (size_t i = 0; i < l.n; i++)
			want[i] += round;
		assert_memory_equal(hits, want, sizeof(hits));
	}
	pool_free(pool);
}

/*
 * Workers that sleep are woken, and all of them work; a caller that has nothing left to do sleeps
 * until they are done.
 */
static void test_parked(void **state)
{
	struct pool *pool = pool_new(3, NULL);
	unsigned hits[60] = { 0 };
	struct loop l = { .pool = pool, .hits = hits, .n = ARRAY_SIZE(hits), .value = 1, .wait = true };
	(void)state;

	pool_set_patience(pool, 0, 0);
	/* Five rounds; more only where the machine is so busy that a worker never got a core. */
	for (unsigned round = 1; round <= 5 || (l.threads_seen != 7 && round < 200); round++) {
		usleep(2000);
		pool_run(pool, l.n, piece, &l);
		for (size_t i = 0; i < l.n; i++)
			assert_int_equal(hits[i], round);
	}
	assert_int_equal(l.threads_seen, 7);
	pool_free(pool);
}

struct late {
	struct pool *pool;
	atomic_bool taken; /* the worker has a piece */
	atomic_uint worker_pieces;
	bool patient;
};

/* The worker keeps its piece until the caller has had enough of it. */
static void late_piece(void *arg, size_t i, unsigned thread)
{
	struct late *l = arg;

	(void)i;
	if (thread > 0) {
		atomic_store(&l->taken, true);
		atomic_fetch_add(&l->worker_pieces, 1);
		while (!l->patient && pool_n_away(l->pool) == 0)
			usleep(100);
	} else {
		for (unsigned k = 0; k < 100000 && !atomic_load(&l->taken); k++)
			usleep(100);
	}
}

/* Who has lost its core is left out until its time is over; the loops go on, and are whole. */
static void test_late(void **state)
{
	struct pool *pool = pool_new(2, NULL);
	struct late l = { .pool = pool };
	(void)state;

	pool_set_patience(pool, 1, UINT64_C(3600) * 1000000);
	pool_run(pool, 2, late_piece, &l);
	assert_int_equal(l.worker_pieces, 1);
	assert_int_equal(pool_n_away(pool), 1);

	for (unsigned round = 0; round < 100; round++) {
		unsigned hits[5] = { 0 };
		struct loop loop = { .pool = pool, .hits = hits, .n = ARRAY_SIZE(hits), .value = 1 };

		pool_run(pool, loop.n, piece, &loop);
		for (size_t i = 0; i < loop.n; i++)
			assert_int_equal(hits[i], 1);
		assert_int_equal(loop.threads_seen, 1);
	}
	assert_int_equal(pool_n_away(pool), 1);
	pool_free(pool); /* while it is away */
}

static void test_back(void **state)
{
	struct pool *pool = pool_new(2, NULL);
	struct late l = { .pool = pool };
	(void)state;

	pool_set_patience(pool, 1, 1);
	pool_run(pool, 2, late_piece, &l);
	assert_int_equal(pool_n_away(pool), 1);
	/* Called back by the next loop; the caller of this one waits for it without end. */
	pool_set_patience(pool, 0, 0);
	usleep(1000);
	atomic_store(&l.taken, false);
	l.patient = true;
	pool_run(pool, 2, late_piece, &l);
	assert_int_equal(pool_n_away(pool), 0);
	assert_true(l.worker_pieces >= 2); /* it may have been the quicker one for both of the second loop */
	pool_free(pool);
}

enum { SHARE_PIECES = 16 };

struct shares {
	atomic_bool taken; /* the worker has a piece */
	atomic_uint n_done, n_worker;
	size_t order[SHARE_PIECES], n_order; /* the caller's */
	size_t workers;                      /* the last one that the worker had */
};

/* Nobody goes on before the worker has its first piece, and the worker not before all others are done. */
static void share_piece(void *arg, size_t i, unsigned thread)
{
	struct shares *s = arg;

	if (thread > 0) {
		s->workers = i;
		atomic_fetch_add(&s->n_worker, 1);
		atomic_store(&s->taken, true);
		for (unsigned k = 0; k < 100000 && atomic_load(&s->n_done) < SHARE_PIECES - 1; k++)
			usleep(100);
	} else {
		for (unsigned k = 0; k < 100000 && !atomic_load(&s->taken); k++)
			usleep(100);
		s->order[s->n_order++] = i;
	}
	atomic_fetch_add(&s->n_done, 1);
}

/* Each begins with its own share, in order; who has nothing left takes the last of another's. */
static void test_shares(void **state)
{
	struct pool *pool = pool_new(2, NULL);
	struct shares s = { 0 };
	size_t n = 0;
	(void)state;

	pool_set_patience(pool, 0, 0);
	pool_run(pool, SHARE_PIECES, share_piece, &s);
	assert_int_equal(s.n_worker, 1);
	assert_int_equal(s.n_order, SHARE_PIECES - 1);
	/* Its own first one, or the caller's last when it looked before it had a share. */
	assert_true(s.workers == SHARE_PIECES / 2 || s.workers == SHARE_PIECES / 2 - 1);
	for (size_t i = 0; i < SHARE_PIECES / 2; i++)
		if (i != s.workers)
			assert_int_equal(s.order[n++], i);
	for (size_t i = SHARE_PIECES; i-- > SHARE_PIECES / 2;)
		if (i != s.workers)
			assert_int_equal(s.order[n++], i);
	pool_free(pool);
}

struct bound {
	cpu_set_t want;
	atomic_uint n_workers, n_wrong;
};

static void bound_piece(void *arg, size_t i, unsigned thread)
{
	struct bound *b = arg;
	cpu_set_t got;

	(void)i;
	if (thread > 0) {
		atomic_fetch_add(&b->n_workers, 1);
		if (sched_getaffinity(0, sizeof(got), &got) < 0 || !CPU_EQUAL(&got, &b->want))
			atomic_fetch_add(&b->n_wrong, 1);
	} else {
		for (unsigned k = 0; k < 100000 && atomic_load(&b->n_workers) == 0; k++)
			usleep(100);
	}
}

/* Workers keep to the CPUs that they are given. */
static void test_bound(void **state)
{
	struct pool *pool;
	struct bound b = { 0 };
	cpu_set_t mine, got;
	(void)state;

	assert_int_equal(sched_getaffinity(0, sizeof(mine), &mine), 0);
	CPU_ZERO(&b.want);
	for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&b.want) == 0; cpu++)
		if (CPU_ISSET(cpu, &mine))
			CPU_SET(cpu, &b.want);
	pool = pool_new(3, &b.want);
	assert_non_null(pool);
	assert_int_equal(pool_n_threads(pool), 3);
	pool_run(pool, 3, bound_piece, &b);
	assert_true(b.n_workers > 0);
	assert_int_equal(b.n_wrong, 0);
	assert_int_equal(sched_getaffinity(0, sizeof(got), &got), 0);
	assert_true(CPU_EQUAL(&got, &mine));
	pool_free(pool);
}

/* An idle pool uses no CPU. */
static void test_idle(void **state)
{
	struct pool *pool = pool_new(4, NULL);
	struct timespec before, after;
	int64_t used_us;
	(void)state;

	usleep(20000);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
	usleep(200000);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
	used_us = (after.tv_sec - before.tv_sec) * 1000000 + (after.tv_nsec - before.tv_nsec) / 1000;
	assert_true(used_us < 20000); /* one spinning thread would use 200000 */
	pool_free(pool);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sizes),  cmocka_unit_test(test_inline),
		cmocka_unit_test(test_stress), cmocka_unit_test(test_parked),
		cmocka_unit_test(test_late),   cmocka_unit_test(test_back),
		cmocka_unit_test(test_shares), cmocka_unit_test(test_bound),
		cmocka_unit_test(test_idle),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
