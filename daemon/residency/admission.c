/* SPDX-License-Identifier: MIT */
/*
 * admission.c: two shadow caches, one of which lets everything in. See admission.h.
 *
 * Owns both. Engine thread. Invariant: a shadow never holds more than the capacity of the step; the verdict changes only by a clear
 * difference, so that noise does not swing it.
 */
#include "daemon/residency/admission.h"

/* Misses of old windows count half as much with every further one. */
#define WINDOW_STEPS 32
/* What the other way has to win to be taken, in percent of the misses. */
#define GAIN_PERCENT 3

struct shadow {
	struct evict *evict;
	/* Queue of blocks that were not worth their place; a block is in it at most once. */
	uint32_t *queue;
	uint8_t *queued;
	uint32_t first, n;
	uint64_t misses; /* aged */
};

struct admission {
	struct shadow open, selective;
	uint32_t n_blocks, capacity, n_steps;
	bool is_selective;
};

static void shadow_done(struct shadow *s)
{
	s->evict = evict_free(s->evict);
	free(s->queue);
	free(s->queued);
}

struct admission *admission_free(struct admission *a)
{
	if (!a)
		return NULL;
	shadow_done(&a->open);
	shadow_done(&a->selective);
	free(a);
	return NULL;
}

static int shadow_init(struct shadow *s, enum evict_policy policy, uint32_t n_blocks)
{
	s->queue = calloc(n_blocks, sizeof(*s->queue));
	s->queued = calloc(n_blocks, 1);
	if (!s->queue || !s->queued)
		return -ENOMEM;
	return evict_new(policy, n_blocks, NULL, &s->evict);
}

int admission_new(enum evict_policy policy, uint32_t n_blocks, struct admission **ret)
{
	struct admission *a = calloc(1, sizeof(*a));
	int r;

	if (!a)
		return -ENOMEM;
	a->n_blocks = n_blocks;
	a->capacity = 1;
	r = shadow_init(&a->open, policy, n_blocks);
	if (r == 0)
		r = shadow_init(&a->selective, policy, n_blocks);
	if (r < 0) {
		admission_free(a);
		return r;
	}
	*ret = a;
	return 0;
}

static uint32_t take_queued(struct shadow *s, uint32_t n_blocks)
{
	while (s->n > 0) {
		uint32_t block = s->queue[s->first];
		bool valid = s->queued[block] == 1;

		s->first = (s->first + 1) % n_blocks;
		s->n--;
		s->queued[block] = 0;
		if (valid && evict_is_resident(s->evict, block))
			return block;
	}
	return EVICT_NONE;
}

static void give_up_one(struct admission *a, struct shadow *s)
{
	uint32_t victim = take_queued(s, a->n_blocks);

	evict_remove(s->evict,
		     victim != EVICT_NONE ? victim : evict_victim(s->evict, EVICT_ANY_CLASS, NULL));
}

/* queued: 1: in the queue; 2: in it, but it has been hit since. */
static void want(struct admission *a, struct shadow *s, uint32_t block)
{
	const struct evict_price price = { .move_us = 0, .saved_us = 1 };
	uint32_t victim;

	evict_touch(s->evict, block, 1);
	if (evict_is_resident(s->evict, block)) {
		if (s->queued[block])
			s->queued[block] = 2;
		return;
	}
	s->misses++;
	if (evict_n_resident(s->evict) >= a->capacity)
		give_up_one(a, s);
	evict_insert(s->evict, block);
	if (s == &a->open || evict_n_resident(s->evict) < a->capacity)
		return;
	victim = evict_victim(s->evict, EVICT_ANY_CLASS, NULL);
	if (victim == block || evict_pays(s->evict, block, victim, &price))
		return;
	if (s->queued[block] == 0) {
		s->queue[(s->first + s->n) % a->n_blocks] = block;
		s->n++;
	}
	s->queued[block] = 1;
}

static void judge(struct admission *a)
{
	const struct shadow *now = a->is_selective ? &a->selective : &a->open;
	const struct shadow *other = a->is_selective ? &a->open : &a->selective;

	if (other->misses * 100 < now->misses * (100 - GAIN_PERCENT))
		a->is_selective = !a->is_selective;
	a->open.misses /= 2;
	a->selective.misses /= 2;
}

void admission_step(struct admission *a, uint32_t capacity)
{
	a->capacity = MAX(capacity, 1u);
	while (evict_n_resident(a->open.evict) > a->capacity)
		give_up_one(a, &a->open);
	while (evict_n_resident(a->selective.evict) > a->capacity)
		give_up_one(a, &a->selective);
	evict_step(a->open.evict);
	evict_step(a->selective.evict);
	if (++a->n_steps % WINDOW_STEPS == 0)
		judge(a);
}

void admission_touch(struct admission *a, uint32_t block)
{
	want(a, &a->open, block);
	want(a, &a->selective, block);
}

bool admission_is_selective(const struct admission *a)
{
	return a->is_selective;
}
