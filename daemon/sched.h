/* SPDX-License-Identifier: MIT */
/*
 * sched.h: who is next. Requests wait in order of arrival; one runs until it is done.
 *
 * Pure: no clock, no allocation, no engine. The engine thread owns the queue and asks sched_pick() between steps. Entries are embedded in
 * the caller's objects. Invariant: the pick never changes while its entry stays in the queue and nothing older arrives.
 */
#pragma once

#include "daemon/base.h"

struct sched_entry {
	struct sched_entry *prev, *next;
	uint64_t seq; /* arrival, given by the loop thread: preparing prompts may hand them over in another order */
	bool running; /* set by the engine once the request has begun */
};

struct sched {
	struct sched_entry *first, *last;
	size_t n;
};

void sched_add(struct sched *s, struct sched_entry *e);
void sched_remove(struct sched *s, struct sched_entry *e);
/* The running one, else the oldest; NULL when nobody waits. */
struct sched_entry *sched_pick(const struct sched *s);
