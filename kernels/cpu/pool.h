/* SPDX-License-Identifier: MIT */
/*
 * pool.h: the worker threads of the CPU backend: one parallel loop at a time, work taken in small pieces.
 *
 * Owned by backend-cpu; pool_run() is called by the engine thread only, one call at a time. The calling thread works
 * too. Every thread takes the pieces of its share one by one, in order, and then what is left of others', so a thread that lost its core
 * delays nobody beyond one piece; and when it does that, it is left out for a while: its core is wanted by somebody else, who gets it,
 * and the loops go on without waiting for it.
 * Threads spin briefly and then park on a futex: an idle daemon uses no CPU.
 */
#pragma once

#include <sched.h>
#include <stddef.h>
#include <stdint.h>

struct pool;

/*
 * n_threads >= 1 counts the caller. cpus: where the workers may run (topology.h); NULL: wherever the caller may. The caller itself is not
 * bound: threads that it makes would be too. Returns NULL when threads cannot be made (errno is set).
 */
struct pool *pool_new(unsigned n_threads, const cpu_set_t *cpus);
struct pool *pool_free(struct pool *p); /* joins; accepts NULL; returns NULL */
unsigned pool_n_threads(const struct pool *p);
unsigned pool_n_away(const struct pool *p); /* how many of them are left out at the moment */
/* A worker is left out whose piece ends late_us or more, and four times the mean of the caller's own pieces, after the caller's last: away_us the
 * first time, up to 16 times as long when it happens again at once. late_us 0: never. */
void pool_set_patience(struct pool *p, uint64_t late_us, uint64_t away_us);
/* Calls fn(arg, i, thread) for every i in [0, n), n < 2^32, thread < pool_n_threads(); returns when all are done. Nesting is a bug. */
void pool_run(struct pool *p, size_t n, void (*fn)(void *arg, size_t i, unsigned thread), void *arg);
/* Major page faults that the calling thread and the workers have ever taken: each one was a wait for the disk in the middle of arithmetic. */
uint64_t pool_major_faults(const struct pool *p);
