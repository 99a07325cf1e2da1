/* SPDX-License-Identifier: MIT */
/*
 * sched.c: a queue in order of arrival. See sched.h. Pure; engine thread.
 */
#include "daemon/sched.h"

void sched_add(struct sched *s, struct sched_entry *e)
{
	struct sched_entry *after = s->last;

	/* Nearly always at the end: only a prompt that took longer to prepare goes before younger ones. */
	while (after && after->seq > e->seq)
		after = after->prev;
	e->prev = after;
	e->next = after ? after->next : s->first;
	*(e->prev ? &e->prev->next : &s->first) = e;
	*(e->next ? &e->next->prev : &s->last) = e;
	e->running = false;
	s->n++;
}

void sched_remove(struct sched *s, struct sched_entry *e)
{
	*(e->prev ? &e->prev->next : &s->first) = e->next;
	*(e->next ? &e->next->prev : &s->last) = e->prev;
	e->prev = e->next = NULL;
	s->n--;
}

struct sched_entry *sched_pick(const struct sched *s)
{
	for (struct sched_entry *e = s->first; e; e = e->next)
		if (e->running)
			return e;
	return s->first;
}
