/* SPDX-License-Identifier: MIT */
/*
 * guard.c: the SIGBUS handler over mapped files. See guard.h.
 *
 * A fixed table, because the handler may neither allocate nor lock: it reads atomics and calls
 * mmap(), sigaction() and raise(), which are one system call each. Refuses to know what lies in a
 * mapping.
 * Invariants: broken is set before the first zero page can be read; a page before the fault is
 * never touched; whatever is not ours goes to whoever had the signal before.
 */
#include "daemon/model/guard.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

struct guard {
	atomic_bool taken; /* the slot; by whom is in base */
	atomic_bool broken;
	atomic_uintptr_t base; /* 0: guards nothing */
	atomic_size_t bytes;   /* whole pages */
};

static struct guard table[GUARD_MAX];
/* Written before the handler is there to read it. */
static struct sigaction previous;
static size_t page_bytes;

static struct guard *find(uintptr_t addr)
{
	for (size_t i = 0; i < GUARD_MAX; i++) {
		uintptr_t base = table[i].base;
		size_t bytes = table[i].bytes;

		/* Looked at again, lest the slot changed hands between base and bytes. */
		if (base != 0 && addr - base < bytes && table[i].base == base)
			return &table[i];
	}
	return NULL;
}

static bool put_zeros(struct guard *g, uintptr_t addr)
{
	uintptr_t page = addr & ~(page_bytes - 1);
	void *p;

	g->broken = true;
	p = mmap((void *)page, g->base + g->bytes - page, PROT_READ,
		 MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return p != MAP_FAILED;
}

static void on_sigbus(int sig, siginfo_t *info, void *context)
{
	int saved = errno, code = info->si_code;
	/* By kill(), or by bad memory that nobody has asked for yet: not to be repeated by returning. */
	bool sent = code <= 0 || code == BUS_MCEERR_AO;
	bool unreadable = code == BUS_ADRERR || code == BUS_OBJERR || code == BUS_MCEERR_AR;
	struct guard *g = unreadable ? find((uintptr_t)info->si_addr) : NULL;

	(void)context;
	if (!g || !put_zeros(g, (uintptr_t)info->si_addr)) {
		sigaction(sig, &previous, NULL);
		if (sent)
			raise(sig);
	}
	errno = saved;
}

/* Not once for all: a test runner, or a library, may have taken the signal for itself meanwhile. */
static void install(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	struct sigaction now, ours = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK };

	pthread_mutex_lock(&lock);
	page_bytes = (size_t)sysconf(_SC_PAGESIZE);
	sigaction(SIGBUS, NULL, &now);
	if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_sigbus) {
		previous = now;
		sigaction(SIGBUS, &ours, NULL);
	}
	pthread_mutex_unlock(&lock);
}

int guard_add(const void *p, size_t bytes, struct guard **ret)
{
	install();
	assert(bytes > 0 && (uintptr_t)p % page_bytes == 0);
	for (size_t i = 0; i < GUARD_MAX; i++) {
		struct guard *g = &table[i];

		if (atomic_exchange(&g->taken, true))
			continue;
		g->broken = false;
		g->bytes = ALIGN_UP(bytes, page_bytes);
		g->base = (uintptr_t)p; /* last: from here on the handler sees it */
		*ret = g;
		return 0;
	}
	return -ENOSPC;
}

struct guard *guard_remove(struct guard *g)
{
	if (!g)
		return NULL;
	g->base = 0;
	g->taken = false;
	return NULL;
}

bool guard_broken(const struct guard *g)
{
	return g->broken;
}
