/* SPDX-License-Identifier: MIT */
/*
 * sched.h: who is next. Users share the engine's time by weight; a user's own requests go by class, then by arrival.
 *
 * Pure: no clock, no allocation, no engine. The engine thread owns the queue, asks sched_pick() before every step and charges what the step
 * took. Entries are embedded in the caller's objects. Virtual time per user is measured microseconds x 100 / weight; the user with the least
 * is next (VTC, arXiv 2401.00588, on measured time instead of tokens). Who was idle begins at the least of those who are not, so idling
 * earns no credit; and who leaves ahead of the others comes back no earlier, so that asking one short thing after the other is no way
 * around a weight. Invariant: all entries of one user carry the same vtime; of two users who always have work, neither's vtime is ahead of
 * the other's by more than one step's charge.
 */
#pragma once

#include "daemon/base.h"

struct sched_entry {
	struct sched_entry *prev, *next;
	uint64_t seq; /* arrival, given by the loop thread: preparing prompts may hand them over in another order */
	uint32_t user;
	uint32_t weight; /* 1..10000; 100 is the usual */
	int class;       /* higher goes first among the requests of one user */
	bool running;    /* set by the engine once the request has begun */
	uint64_t vtime;
};

#define SCHED_DEBTS 64

struct sched {
	struct sched_entry *first, *last; /* by arrival */
	size_t n;
	uint64_t floor; /* no vtime in the queue is below it; where newcomers begin */
	/* Users who left ahead of the floor. The smallest gives way when there are more. */
	struct {
		uint32_t user;
		uint64_t vtime; /* at or below the floor: free */
	} debts[SCHED_DEBTS];
};

void sched_add(struct sched *s, struct sched_entry *e);
void sched_remove(struct sched *s, struct sched_entry *e);
/* NULL when nobody waits. only_running: of those that have begun. */
struct sched_entry *sched_pick(const struct sched *s, bool only_running);
/* e, still in the queue, has had the engine for this long. */
void sched_charge(struct sched *s, const struct sched_entry *e, uint64_t busy_us);
