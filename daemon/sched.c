/* SPDX-License-Identifier: MIT */
/*
 * sched.c: shares of time between users, order within one. See sched.h. Pure; engine thread.
 */
#include "daemon/sched.h"

static void raise_floor(struct sched *s)
{
	uint64_t least = UINT64_MAX;

	for (const struct sched_entry *e = s->first; e; e = e->next)
		least = MIN(least, e->vtime);
	if (least != UINT64_MAX)
		s->floor = MAX(s->floor, least);
}

/* Where a user begins who has nothing in the queue. */
static uint64_t take_debt(struct sched *s, uint32_t user)
{
	for (size_t i = 0; i < SCHED_DEBTS; i++)
		if (s->debts[i].user == user && s->debts[i].vtime > s->floor)
			return s->debts[i].vtime;
	return s->floor;
}

static void keep_debt(struct sched *s, uint32_t user, uint64_t vtime)
{
	size_t at = 0;

	for (size_t i = 0; i < SCHED_DEBTS; i++) {
		if (s->debts[i].user == user) {
			at = i;
			break;
		}
		if (s->debts[i].vtime < s->debts[at].vtime)
			at = i;
	}
	if (s->debts[at].user == user || s->debts[at].vtime < vtime) {
		s->debts[at].user = user;
		s->debts[at].vtime = vtime;
	}
}

void sched_add(struct sched *s, struct sched_entry *e)
{
	struct sched_entry *after = s->last;

	raise_floor(s);
	e->vtime = take_debt(s, e->user);
	for (const struct sched_entry *other = s->first; other; other = other->next)
		if (other->user == e->user)
			e->vtime = other->vtime;
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
	for (const struct sched_entry *other = s->first; other; other = other->next)
		if (other->user == e->user)
			return;
	/* With nobody left there is nobody whom he could owe. */
	if (s->n == 0)
		s->floor = MAX(s->floor, e->vtime);
	else if (e->vtime > s->floor)
		keep_debt(s, e->user, e->vtime);
}

/* a before b, both of one user. One that has begun goes on before another of its class begins. */
static bool goes_first(const struct sched_entry *a, const struct sched_entry *b)
{
	if (a->class != b->class)
		return a->class > b->class;
	if (a->running != b->running)
		return a->running;
	return a->seq < b->seq;
}

struct sched_entry *sched_pick(const struct sched *s, bool only_running)
{
	struct sched_entry *best = NULL;

	for (struct sched_entry *e = s->first; e; e = e->next) {
		if (only_running && !e->running)
			continue;
		if (!best || (e->user == best->user ? goes_first(e, best) : e->vtime < best->vtime))
			best = e;
	}
	return best;
}

void sched_charge(struct sched *s, const struct sched_entry *e, uint64_t busy_us)
{
	/* In 1/100 of a microsecond, so that a large weight does not round a short step to nothing. */
	uint64_t add = MAX(busy_us * 10000 / MAX(e->weight, 1u), UINT64_C(1));
	uint32_t user = e->user;

	for (struct sched_entry *other = s->first; other; other = other->next)
		if (other->user == user)
			other->vtime += add;
	raise_floor(s);
}
