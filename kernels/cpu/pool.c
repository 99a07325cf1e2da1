/* SPDX-License-Identifier: MIT */
/*
 * pool.c: worker threads that share out the pieces of one loop.
 *
 * Owned by backend-cpu; pool_run() is called by the engine thread only. Refuses to know what a
 * piece is; pieces must not wait for each other.
 *
 * A loop is published by giving every thread its share of the pieces, a range in one word: the thread takes the first of its own, in
 * order, so that it streams through memory, and then, when nothing is left, the last of others'. Whoever takes a piece off a range owns
 * it, and until it is counted off in `unfinished` the loop cannot end: only then are fn and arg read by a worker or written by
 * pool_run(). So nobody waits for a worker that has taken nothing, and a late one that takes a piece simply works for the loop of the
 * day. `epoch` only wakes: it moves with every loop.
 *
 * A worker whose core somebody else wants is descheduled for milliseconds with a piece in its hands, again and again, and all wait for
 * it: then one thread fewer is faster. Who is found late is sent away, sleeps on its own word and is called back by the caller.
 */
#include "kernels/cpu/pool.h"

#include "daemon/base.h"

#include <assert.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/syscall.h>

/*
 * Before a thread parks. The gap between two loops of a step is shorter than that, and a wake through the kernel costs the sleeper more
 * than it costs the waker.
 */
#define SPIN_US     30
#define SPIN_PAUSES 32 /* between looks at the clock: a pause takes 10 to 40 ns */

/*
 * A descheduled thread is back after one slice of another's, 3 ms and more; no loop is that uneven. Short absences at first: most that
 * take a core once do not stay.
 */
#define LATE_US     1000
#define AWAY_US     10000
#define AWAY_FACTOR 16

/* The caller is the first one, and never away. */
struct member {
	struct pool *pool;
	unsigned index;
	pthread_t thread;
	atomic_int tid;   /* 0: has not run yet */
	atomic_bool busy; /* has a piece in its hands */
	atomic_uint away; /* futex of this worker: 1 while it is left out */
	/* the caller's: when it may come back, when it last did, and how long it was away */
	uint64_t until_us, back_us, away_us;
	/* Pieces that nobody has taken: see range(). */
	atomic_uint_least64_t pieces __attribute__((aligned(64)));
} __attribute__((aligned(64)));

struct pool {
	atomic_size_t unfinished;
	atomic_uint epoch;        /* futex of the workers */
	atomic_uint n_parked;     /* workers that sleep on epoch, or are about to */
	atomic_uint caller_waits; /* futex of the caller: 1 while it sleeps or is about to */
	atomic_bool quit;

	void (*fn)(void *arg, size_t i, unsigned thread); /* these two: see the head of the file */
	void *arg;

	atomic_uint n_away; /* written by the caller */
	uint64_t late_us, first_away_us;
	unsigned n_threads; /* that members has room for */
	unsigned n_workers; /* that were made: the caller's */
	struct member members[];
};

/* Pieces from..to-1 as one word. */
static uint64_t range(size_t from, size_t to)
{
	return (uint64_t)from << 32 | to;
}

static uint32_t range_from(uint64_t r)
{
	return (uint32_t)(r >> 32);
}

static uint32_t range_to(uint64_t r)
{
	return (uint32_t)r;
}

static void cpu_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("isb");
#endif
}

/* timeout_us: 0: none. */
static void futex_wait(atomic_uint *word, unsigned value, uint64_t timeout_us)
{
	struct timespec t = { .tv_sec = (time_t)(timeout_us / 1000000),
			      .tv_nsec = (long)(timeout_us % 1000000 * 1000) };

	/* Any return is good: callers check their condition again. */
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, timeout_us > 0 ? &t : NULL, NULL, 0);
}

static void futex_wake(atomic_uint *word, int n)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/*
 * The next piece of its own, or the last one of another's. Acquire pairs with the store of deal(), of which every later value of a
 * range is a part.
 */
static bool take(struct pool *p, unsigned thread, size_t *ret)
{
	for (unsigned k = 0; k < p->n_threads; k++) {
		struct member *m = &p->members[(thread + k) % p->n_threads];
		uint64_t r = atomic_load_explicit(&m->pieces, memory_order_relaxed);

		while (range_from(r) < range_to(r)) {
			uint64_t rest = k == 0 ? range(range_from(r) + (size_t)1, range_to(r))
					       : range(range_from(r), range_to(r) - (size_t)1);

			if (!atomic_compare_exchange_weak_explicit(
				    &m->pieces, &r, rest, memory_order_acquire, memory_order_relaxed))
				continue;
			*ret = k == 0 ? range_from(r) : range_to(rest);
			return true;
		}
	}
	return false;
}

/* Returns how many pieces it did. */
static size_t work(struct pool *p, unsigned thread)
{
	struct member *m = &p->members[thread];
	size_t i, n = 0;

	while (!atomic_load_explicit(&m->away, memory_order_relaxed) && take(p, thread, &i)) {
		atomic_store_explicit(&m->busy, true, memory_order_relaxed);
		p->fn(p->arg, i, thread);
		atomic_store_explicit(&m->busy, false, memory_order_relaxed);
		n++;
		if (atomic_fetch_sub(&p->unfinished, 1) == 1 && atomic_exchange(&p->caller_waits, 0))
			futex_wake(&p->caller_waits, 1);
	}
	return n;
}

static void wait_for_epoch(struct pool *p, unsigned seen)
{
	uint64_t end_us = now_us() + SPIN_US;

	for (unsigned i = 1; i % SPIN_PAUSES != 0 || now_us() < end_us; i++) {
		if (atomic_load_explicit(&p->epoch, memory_order_relaxed) != seen)
			return;
		cpu_relax();
	}

	/* Either pool_run() sees the count, or the kernel sees the new epoch. */
	atomic_fetch_add(&p->n_parked, 1);
	while (atomic_load(&p->epoch) == seen)
		futex_wait(&p->epoch, seen, 0);
	atomic_fetch_sub(&p->n_parked, 1);
}

static void *worker_main(void *arg)
{
	struct member *w = arg;
	struct pool *p = w->pool;

	atomic_store(&w->tid, (int)syscall(SYS_gettid));
	for (;;) {
		unsigned seen = atomic_load(&p->epoch);

		if (atomic_load(&p->quit))
			return NULL;
		if (atomic_load(&w->away)) {
			futex_wait(&w->away, 1, 0);
			continue;
		}
		work(p, w->index);
		wait_for_epoch(p, seen);
	}
}

static void next_epoch(struct pool *p, size_t wanted)
{
	atomic_fetch_add(&p->epoch, 1);
	if (atomic_load(&p->n_parked) > 0)
		futex_wake(&p->epoch, (int)MIN(wanted, (size_t)p->n_threads - 1));
}

static void call_back(struct pool *p, struct member *w)
{
	atomic_store(&w->away, 0);
	futex_wake(&w->away, 1);
	atomic_fetch_sub(&p->n_away, 1);
}

static void call_back_due(struct pool *p, uint64_t now)
{
	for (unsigned i = 1;
	     i < p->n_threads && atomic_load_explicit(&p->n_away, memory_order_relaxed) > 0; i++) {
		struct member *w = &p->members[i];

		if (!atomic_load(&w->away) || now < w->until_us)
			continue;
		w->back_us = now;
		call_back(p, w);
	}
}

/* Those that still work have lost their core, or wait for a page of the model from the disk: then there is nothing to compute for long anyway. */
static void send_late_away(struct pool *p)
{
	uint64_t now = now_us();

	for (unsigned i = 1; i < p->n_threads; i++) {
		struct member *w = &p->members[i];
		bool again = w->back_us > 0 && now - w->back_us < AWAY_FACTOR * p->first_away_us;

		if (!atomic_load_explicit(&w->busy, memory_order_relaxed) || atomic_load(&w->away))
			continue;
		w->away_us = again ? MIN(4 * w->away_us, AWAY_FACTOR * p->first_away_us)
				   : p->first_away_us;
		w->until_us = now + w->away_us;
		atomic_store(&w->away, 1);
		atomic_fetch_add(&p->n_away, 1);
	}
}

/* late_us: how long is too long. */
static void wait_for_end(struct pool *p, uint64_t late_us)
{
	uint64_t start = now_us(), end_us = start + SPIN_US;

	for (unsigned i = 1; i % SPIN_PAUSES != 0 || now_us() < end_us; i++) {
		if (atomic_load(&p->unfinished) == 0)
			return;
		cpu_relax();
	}

	/* Either we see the last piece counted off, or its thread sees that we wait. */
	for (;;) {
		atomic_store(&p->caller_waits, 1);
		if (atomic_load(&p->unfinished) == 0)
			break;
		futex_wait(&p->caller_waits, 1, late_us);
		if (late_us > 0 && now_us() - start >= late_us && atomic_load(&p->unfinished) > 0) {
			send_late_away(p);
			late_us = 0;
		}
	}
	atomic_store(&p->caller_waits, 0);
}

struct pool *pool_new(unsigned n_threads, const cpu_set_t *cpus)
{
	size_t bytes;
	struct pool *p;
	sigset_t all, old;
	int r = 0;

	assert(n_threads >= 1);

	if (!mul_ok(n_threads, sizeof(struct member), &bytes) || !add_ok(bytes, sizeof(*p), &bytes)) {
		errno = ENOMEM;
		return NULL;
	}
	/* For the alignment of the members, which keeps their words out of each other's lines. */
	p = aligned_alloc(_Alignof(struct pool), ALIGN_UP(bytes, _Alignof(struct pool)));
	if (!p)
		return NULL;
	memset(p, 0, bytes);
	p->n_threads = n_threads;
	pool_set_patience(p, LATE_US, AWAY_US);

	/* Signals are the loop thread's business. */
	sigfillset(&all);
	/* But for a page of the model that cannot be read: the handler of daemon/model/guard.c runs on the thread that touched it. */
	sigdelset(&all, SIGBUS);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	for (unsigned i = 1; i < n_threads && r == 0; i++) {
		struct member *w = &p->members[i];

		w->pool = p;
		w->index = i;
		r = pthread_create(&w->thread, NULL, worker_main, w);
		if (r == 0) {
			p->n_workers++;
			pthread_setname_np(w->thread, "residentd-cpu");
			/* Where the machine's CPUs have changed meanwhile it runs wherever it may. */
			if (cpus)
				(void)pthread_setaffinity_np(w->thread, sizeof(*cpus), cpus);
		}
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);

	if (r != 0) {
		p = pool_free(p);
		errno = r;
	}
	return p;
}

struct pool *pool_free(struct pool *p)
{
	if (!p)
		return NULL;

	atomic_store(&p->quit, true);
	for (unsigned i = 1; i <= p->n_workers; i++)
		if (atomic_load(&p->members[i].away))
			call_back(p, &p->members[i]);
	next_epoch(p, p->n_workers);
	for (unsigned i = 1; i <= p->n_workers; i++)
		pthread_join(p->members[i].thread, NULL);
	free(p);
	return NULL;
}

unsigned pool_n_threads(const struct pool *p)
{
	return p->n_threads;
}

unsigned pool_n_away(const struct pool *p)
{
	return atomic_load(&p->n_away);
}

void pool_set_patience(struct pool *p, uint64_t late_us, uint64_t away_us)
{
	p->late_us = late_us;
	p->first_away_us = away_us;
}

static uint64_t major_faults_of(int tid)
{
	_cleanup_(fclosep) FILE *f = NULL;
	unsigned long long faults;
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
	f = fopen(path, "re");
	/* The name in brackets is ours: without spaces. */
	return f && fscanf(f, "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %llu", &faults) == 1 ? faults
												: 0;
}

uint64_t pool_major_faults(const struct pool *p)
{
	struct rusage usage;
	uint64_t sum = 0;

	if (getrusage(RUSAGE_THREAD, &usage) == 0)
		sum = (uint64_t)usage.ru_majflt;
	for (unsigned i = 1; i < p->n_threads; i++) {
		int tid = atomic_load(&p->members[i].tid);

		sum += tid > 0 ? major_faults_of(tid) : 0;
	}
	return sum;
}

/* The first piece of a share, of n that are cut for n_shares: of share n_shares it is n. The first shares, the caller's before all, are the larger ones. */
static size_t first_piece(size_t n, unsigned share, unsigned n_shares)
{
	return (size_t)(((uint64_t)n * share + n_shares - 1) / n_shares);
}

/* Who is away has no share. */
static void deal(struct pool *p, size_t n)
{
	unsigned n_shares = p->n_threads - atomic_load_explicit(&p->n_away, memory_order_relaxed),
		 k = 0;

	for (unsigned i = 0; i < p->n_threads; i++) {
		struct member *m = &p->members[i];

		if (atomic_load_explicit(&m->away, memory_order_relaxed))
			continue;
		atomic_store_explicit(&m->pieces,
				      range(first_piece(n, k, n_shares), first_piece(n, k + 1, n_shares)),
				      memory_order_release);
		k++;
	}
}

void pool_run(struct pool *p, size_t n, void (*fn)(void *arg, size_t i, unsigned thread), void *arg)
{
	uint64_t start;
	size_t n_own;

	if (n <= 1 || p->n_threads == 1) {
		for (size_t i = 0; i < n; i++)
			fn(arg, i, 0);
		return;
	}

	assert(n <= UINT32_MAX);
	assert(atomic_load(&p->unfinished) == 0); /* else nested, or called from two threads */

	start = now_us();
	if (atomic_load_explicit(&p->n_away, memory_order_relaxed) > 0)
		call_back_due(p, start);

	p->fn = fn;
	p->arg = arg;
	atomic_store(&p->unfinished, n);
	deal(p, n);
	next_epoch(p, n - 1);

	n_own = work(p, 0);
	if (atomic_load(&p->unfinished) > 0) {
		uint64_t own_us = now_us() - start;

		/* Pieces may be long themselves; without one of our own we cannot tell. */
		wait_for_end(p, n_own > 0 ? MAX(p->late_us, 4 * own_us / n_own) : 0);
	}
}
