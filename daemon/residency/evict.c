/* SPDX-License-Identifier: MIT */
/*
 * evict.c: the rankings behind evict.h, the aged heat of all blocks, and Belady's bound.
 *
 * Owns its tables and nothing else. One thread at a time (the engine's, or that of `residentctl
 * simulate`). Refuses to know bytes, tiers, files and the time. Whole numbers only, so that every
 * machine gives the same answers; only the price of evict_pays() is not whole.
 * Invariants: a resident block is in a queue of its class, or in its heap, and an absent one is in
 * neither; heat of all blocks is in the same unit, so that comparing two needs no clock.
 *
 * Every class has its own rankings, and each leads to one candidate. A victim of any class is the
 * coldest of the candidates; the others cost nothing more next time, because a hand rests at its
 * candidate.
 */
#include "daemon/residency/evict.h"

#include <assert.h>
#include <limits.h>

/*
 * Where the numbers come from: hits in % counted after the beginning, of R: random routing, skewed,
 * each step drawn anew (8 layers, 8 of 256 experts, the best quarter has 78 % of it), 31 %
 * resident; D: the same with an eighth of the experts changing places every 50 steps; K and O: the
 * recorded Kimi and OLMoE traces, 26.9 % resident.
 *
 * Ageing: what a use weighs grows by 1/2^HEAT_SHIFT each step, which is how all earlier ones decay.
 * Half-life, in steps:
 *    44  R 80.1  D 74.6  K 76.5  O 62.3
 *    89    81.2    73.7    76.6    62.2
 *   177    81.7    72.0    76.5    61.9
 *   355    81.9    70.4    76.4    61.9
 *   710    82.0    69.3    76.4    61.8
 * Recorded routing hardly minds, and heat should outlive a question.
 */
#define HEAT_SHIFT 9

/*
 * LFU gives up nothing that was used in this step or the RECENT_STEPS before as long as there is
 * something else: what has just come in has no frequency yet, and real routing repeats itself at
 * once. R, K and O as above:
 *   without   82.7 74.0 55.3
 *   0 steps   82.4 75.0 57.0
 *   1 step    82.2 76.1 60.9
 *   2 steps   81.9 76.4 61.9
 *   4 steps   81.4 76.9 61.9
 */
#define RECENT_STEPS 2

/*
 * Clock-LFU's counters. R, K and O as above:
 *   1 bit  74.8 75.2 61.3   2 bits 77.0 75.5 62.4
 *   3 bits 77.5 75.8 62.6   4 bits 77.5 75.8 62.4
 * Blocks that begin at 1 instead of 0 lose 2.3 0.4 0.1. The hand is the ageing: halving all
 * counters every 100 steps besides loses 2.1 1.0 0.5.
 */
#define CLOCK_COUNTER_MAX 7

/* S3-FIFO as published: 2 bits, a tenth on trial, as many ghosts as the main queue has blocks. */
#define S3_COUNTER_MAX 3
#define S3_SMALL_SHARE 10

#define INCREMENT_START ((uint64_t)1 << 20)
#define INCREMENT_LIMIT ((uint64_t)1 << 40)
#define INCREMENT_SHIFT 20
/* Uses that heat may have: 2^14 * INCREMENT_LIMIT * EVICT_HEAT_ONE stays within 64 bits. */
#define HEAT_USES_MAX   ((uint64_t)1 << 14)
#define RECENT          ((uint64_t)1 << 63) /* in a key, above all heat */

enum where { ABSENT, HEAPED, QUEUED, SMALL };

struct block {
	uint64_t heat;  /* uses in units of evict.increment, each counted at its time's increment */
	uint64_t stamp; /* LRU: of its last use; S3-FIFO: of its end in the small queue, 0: none */
	uint32_t prev, next; /* in a queue; next is towards the tail */
	uint32_t step;       /* of its last use, or when it was inserted; wraps */
	uint8_t class, counter;
	uint8_t where; /* enum where; LFU: QUEUED while it is recent, in the heap as well */
};

/* New ones at the head, the oldest at the tail. */
struct queue {
	uint32_t head, tail, n;
};

/* The smallest key first. Several heaps may share key and place, where they share no block. */
struct heap {
	uint32_t *at;
	uint32_t n;
	uint64_t *key;   /* by block */
	uint32_t *place; /* by block: index in at; only valid for what is in a heap */
};

struct ranking {
	struct queue queue, small; /* small: S3-FIFO's blocks on trial */
	struct heap heap;          /* LFU */
	uint32_t n_resident;
	uint64_t n_ghosts; /* stamps given out */
	uint64_t removed;  /* aged number of removals, in units of evict.increment */
};

struct evict {
	enum evict_policy policy;
	uint32_t n_blocks, n_resident, n_classes, step;
	uint64_t increment, n_touches;
	struct block *blocks;
	struct ranking *classes; /* n_classes */
	uint64_t *key;           /* of the heaps */
	uint32_t *place, *at;
};

static const char *const policy_names[] = {
	[EVICT_LRU] = "lru",
	[EVICT_LFU] = "lfu",
	[EVICT_CLOCK_LFU] = "clock-lfu",
	[EVICT_S3_FIFO] = "s3-fifo",
};

const char *evict_policy_to_string(enum evict_policy p)
{
	return policy_names[p];
}

int evict_policy_from_string(const char *s, enum evict_policy *ret)
{
	for (size_t i = 0; i < ARRAY_SIZE(policy_names); i++)
		if (streq(s, policy_names[i])) {
			*ret = (enum evict_policy)i;
			return 0;
		}
	return -EINVAL;
}

/* ---- heap ---- */

static void heap_set(struct heap *h, uint32_t i, uint32_t block)
{
	h->at[i] = block;
	h->place[block] = i;
}

/* The key of the block at i has changed, or it is new there. */
static void heap_fix(struct heap *h, uint32_t i)
{
	uint32_t block = h->at[i], child;
	uint64_t key = h->key[block];

	for (; i > 0 && h->key[h->at[(i - 1) / 2]] > key; i = (i - 1) / 2)
		heap_set(h, i, h->at[(i - 1) / 2]);
	for (; (child = 2 * i + 1) < h->n; i = child) {
		if (child + 1 < h->n && h->key[h->at[child + 1]] < h->key[h->at[child]])
			child++;
		if (h->key[h->at[child]] >= key)
			break;
		heap_set(h, i, h->at[child]);
	}
	heap_set(h, i, block);
}

static void heap_put(struct heap *h, uint32_t block)
{
	h->at[h->n++] = block;
	heap_fix(h, h->n - 1);
}

static void heap_drop(struct heap *h, uint32_t block)
{
	uint32_t i = h->place[block], last = h->at[--h->n];

	if (i == h->n)
		return;
	h->at[i] = last;
	heap_fix(h, i);
}

/* The smallest from i down that is not kept and smaller than *best. Goes no further than what is
 * kept and its children. */
static void heap_search(const struct heap *h, uint32_t i, const uint8_t *keep, uint32_t *best)
{
	for (; i < h->n; i = 2 * i + 2) {
		uint32_t block = h->at[i];

		if (*best != EVICT_NONE && h->key[block] >= h->key[*best])
			return;
		if (!keep || !keep[block]) {
			*best = block;
			return;
		}
		heap_search(h, 2 * i + 1, keep, best);
	}
}

/* ---- queues ---- */

static void queue_push(struct evict *e, struct queue *q, uint32_t block)
{
	struct block *b = &e->blocks[block];

	b->prev = EVICT_NONE;
	b->next = q->head;
	if (q->head != EVICT_NONE)
		e->blocks[q->head].prev = block;
	else
		q->tail = block;
	q->head = block;
	q->n++;
}

static void queue_drop(struct evict *e, struct queue *q, uint32_t block)
{
	const struct block *b = &e->blocks[block];

	if (b->prev != EVICT_NONE)
		e->blocks[b->prev].next = b->next;
	else
		q->head = b->next;
	if (b->next != EVICT_NONE)
		e->blocks[b->next].prev = b->prev;
	else
		q->tail = b->prev;
	q->n--;
}

static void queue_renew(struct evict *e, struct queue *q, uint32_t block)
{
	queue_drop(e, q, block);
	queue_push(e, q, block);
}

/* ---- life ---- */

static void classes_init(struct evict *e)
{
	uint32_t *at = e->at;

	for (uint32_t i = 0; i < e->n_classes; i++) {
		struct ranking *c = &e->classes[i];

		c->queue = c->small = (struct queue){ EVICT_NONE, EVICT_NONE, 0 };
		c->heap = (struct heap){ .at = at, .key = e->key, .place = e->place };
		for (uint32_t b = 0; b < e->n_blocks; b++)
			at += e->blocks[b].class == i;
	}
}

int evict_new(enum evict_policy policy, uint32_t n_blocks, const uint8_t *class_of, struct evict **ret)
{
	_cleanup_(evict_freep) struct evict *e = NULL;

	if (n_blocks == 0 || n_blocks >= EVICT_NONE)
		return -EINVAL;
	e = calloc(1, sizeof(*e));
	if (!e)
		return -ENOMEM;
	e->policy = policy;
	e->n_blocks = n_blocks;
	e->increment = INCREMENT_START;
	e->n_classes = 1;
	for (uint32_t b = 0; class_of && b < n_blocks; b++)
		e->n_classes = MAX(e->n_classes, (uint32_t)class_of[b] + 1);
	e->blocks = calloc(n_blocks, sizeof(*e->blocks));
	e->classes = calloc(e->n_classes, sizeof(*e->classes));
	e->key = calloc(n_blocks, sizeof(*e->key));
	e->place = calloc(n_blocks, sizeof(*e->place));
	e->at = calloc(n_blocks, sizeof(*e->at));
	if (!e->blocks || !e->classes || !e->key || !e->place || !e->at)
		return -ENOMEM;
	for (uint32_t b = 0; class_of && b < n_blocks; b++)
		e->blocks[b].class = class_of[b];
	classes_init(e);
	*ret = TAKE_PTR(e);
	return 0;
}

struct evict *evict_free(struct evict *e)
{
	if (!e)
		return NULL;
	free(e->blocks);
	free(e->classes);
	free(e->key);
	free(e->place);
	free(e->at);
	free(e);
	return NULL;
}

/* ---- what happens to blocks ---- */

static struct block *block_of(const struct evict *e, uint32_t block)
{
	assert(block < e->n_blocks);
	return &e->blocks[block];
}

static void lfu_rank(struct evict *e, uint32_t block)
{
	struct block *b = &e->blocks[block];
	struct heap *h = &e->classes[b->class].heap;

	e->key[block] = b->heat | (b->where == QUEUED ? RECENT : 0);
	heap_fix(h, h->place[block]);
}

/* Before numbers outgrow their 64 bits: a smaller unit for all. Order stays, so heaps stay heaps. */
static void rescale(struct evict *e)
{
	e->increment >>= INCREMENT_SHIFT;
	for (uint32_t i = 0; i < e->n_classes; i++)
		e->classes[i].removed >>= INCREMENT_SHIFT;
	for (uint32_t b = 0; b < e->n_blocks; b++) {
		e->blocks[b].heat >>= INCREMENT_SHIFT;
		e->key[b] = e->blocks[b].heat | (e->key[b] & RECENT);
	}
}

void evict_step(struct evict *e)
{
	e->step++;
	e->increment += e->increment >> HEAT_SHIFT;
	if (e->increment >= INCREMENT_LIMIT)
		rescale(e);
	if (e->policy != EVICT_LFU)
		return;
	for (uint32_t i = 0; i < e->n_classes; i++) {
		struct queue *q = &e->classes[i].queue;
		uint32_t old;

		while ((old = q->tail) != EVICT_NONE && e->step - e->blocks[old].step > RECENT_STEPS) {
			queue_drop(e, q, old);
			e->blocks[old].where = HEAPED;
			lfu_rank(e, old);
		}
	}
}

/* Recent in LFU's sense. */
static void lfu_renew(struct evict *e, uint32_t block)
{
	struct block *b = &e->blocks[block];
	struct queue *q = &e->classes[b->class].queue;

	if (b->where == QUEUED)
		queue_drop(e, q, block);
	b->where = QUEUED;
	b->step = e->step;
	queue_push(e, q, block);
	lfu_rank(e, block);
}

static void count(struct block *b, uint8_t max)
{
	if (b->counter < max)
		b->counter++;
}

void evict_touch(struct evict *e, uint32_t block, uint32_t n_tok)
{
	struct block *b = block_of(e, block);
	uint64_t weight;

	if (n_tok == 0)
		return;
	/* 1 + log2: a chunk of a prompt is one step of hundreds of tokens. A block that all of them
	 * want is not worth hundreds of steps of answering, or a long prompt would wash away what
	 * was learnt before it. */
	weight = (uint64_t)(sizeof(n_tok) * CHAR_BIT) - (uint64_t)__builtin_clz(n_tok);
	b->heat = MIN(b->heat + weight * e->increment, HEAT_USES_MAX * e->increment);
	e->n_touches++;
	if (b->where == ABSENT)
		return;
	switch (e->policy) {
	case EVICT_LRU:
		b->stamp = e->n_touches;
		queue_renew(e, &e->classes[b->class].queue, block);
		break;
	case EVICT_LFU: lfu_renew(e, block); break;
	case EVICT_CLOCK_LFU: count(b, CLOCK_COUNTER_MAX); break;
	case EVICT_S3_FIFO: count(b, S3_COUNTER_MAX); break;
	}
}

/* Given up on trial not longer ago than the main queue is long. */
static bool s3_is_ghost(const struct ranking *c, const struct block *b)
{
	return b->stamp > 0 && c->n_ghosts - b->stamp < c->n_resident - c->n_resident / S3_SMALL_SHARE;
}

void evict_insert(struct evict *e, uint32_t block)
{
	struct block *b = block_of(e, block);
	struct ranking *c = &e->classes[b->class];

	if (b->where != ABSENT)
		return;
	b->counter = 0;
	b->where = QUEUED;
	switch (e->policy) {
	case EVICT_LRU: b->stamp = ++e->n_touches; break;
	case EVICT_LFU:
		b->where = HEAPED;
		heap_put(&c->heap, block);
		lfu_renew(e, block);
		break;
	case EVICT_CLOCK_LFU: break;
	case EVICT_S3_FIFO:
		if (!s3_is_ghost(c, b))
			b->where = SMALL;
		break;
	}
	if (e->policy != EVICT_LFU)
		queue_push(e, b->where == SMALL ? &c->small : &c->queue, block);
	c->n_resident++;
	e->n_resident++;
}

void evict_remove(struct evict *e, uint32_t block)
{
	struct block *b = block_of(e, block);
	struct ranking *c = &e->classes[b->class];

	if (b->where == ABSENT)
		return;
	if (b->where == QUEUED)
		queue_drop(e, &c->queue, block);
	if (b->where == SMALL)
		queue_drop(e, &c->small, block);
	if (e->policy == EVICT_LFU)
		heap_drop(&c->heap, block);
	if (e->policy == EVICT_S3_FIFO)
		b->stamp = b->where == SMALL ? ++c->n_ghosts : 0;
	b->where = ABSENT;
	c->removed += e->increment;
	c->n_resident--;
	e->n_resident--;
}

bool evict_is_resident(const struct evict *e, uint32_t block)
{
	return block_of(e, block)->where != ABSENT;
}

uint32_t evict_n_resident(const struct evict *e)
{
	return e->n_resident;
}

/* ---- victims ---- */

static bool is_kept(const uint8_t *keep, uint32_t block)
{
	return keep && keep[block];
}

static uint32_t lru_candidate(const struct evict *e, const struct queue *q, const uint8_t *keep)
{
	uint32_t b = q->tail;

	while (b != EVICT_NONE && is_kept(keep, b))
		b = e->blocks[b].prev;
	return b;
}

/* A clock: what was used since the hand last came by gives one of its uses and is passed. What is
 * kept is passed too, and stays under the hand. At most as many rounds as a counter has values. */
static uint32_t clock_candidate(struct evict *e, struct queue *q, const uint8_t *keep)
{
	bool again;

	do {
		uint32_t b = q->tail, before;

		again = false;
		for (uint32_t n = q->n; n > 0; n--, b = before) {
			before = e->blocks[b].prev;
			if (is_kept(keep, b))
				continue;
			if (e->blocks[b].counter == 0)
				return b;
			e->blocks[b].counter--;
			queue_renew(e, q, b);
			again = true;
		}
	} while (again);
	return EVICT_NONE;
}

/* Blocks on trial, oldest first: who was used meanwhile is taken over into the main queue. */
static uint32_t s3_trial(struct evict *e, struct ranking *c, const uint8_t *keep)
{
	uint32_t b = c->small.tail, before;

	for (; b != EVICT_NONE; b = before) {
		before = e->blocks[b].prev;
		if (is_kept(keep, b))
			continue;
		if (e->blocks[b].counter == 0)
			return b;
		e->blocks[b].counter = 0;
		e->blocks[b].where = QUEUED;
		queue_drop(e, &c->small, b);
		queue_push(e, &c->queue, b);
	}
	return EVICT_NONE;
}

static uint32_t s3_candidate(struct evict *e, struct ranking *c, const uint8_t *keep)
{
	uint32_t b = EVICT_NONE;

	if (c->small.n >= c->n_resident / S3_SMALL_SHARE)
		b = s3_trial(e, c, keep);
	if (b == EVICT_NONE)
		b = clock_candidate(e, &c->queue, keep);
	/* All of the main queue is kept. */
	if (b == EVICT_NONE)
		b = s3_trial(e, c, keep);
	if (b == EVICT_NONE)
		b = clock_candidate(e, &c->queue, keep);
	return b;
}

static uint32_t candidate(struct evict *e, struct ranking *c, const uint8_t *keep)
{
	uint32_t b = EVICT_NONE;

	switch (e->policy) {
	case EVICT_LRU: return lru_candidate(e, &c->queue, keep);
	case EVICT_LFU: heap_search(&c->heap, 0, keep, &b); return b;
	case EVICT_CLOCK_LFU: return clock_candidate(e, &c->queue, keep);
	case EVICT_S3_FIFO: return s3_candidate(e, c, keep);
	}
	return b;
}

/* What tells candidates of different classes apart: the least goes. */
static uint64_t worth(const struct evict *e, uint32_t block)
{
	switch (e->policy) {
	case EVICT_LRU: return e->blocks[block].stamp;
	case EVICT_LFU: return e->key[block];
	case EVICT_CLOCK_LFU:
	case EVICT_S3_FIFO: break;
	}
	return e->blocks[block].heat;
}

uint32_t evict_victim(struct evict *e, uint32_t class, const uint8_t *keep)
{
	uint32_t best = EVICT_NONE;

	if (class != EVICT_ANY_CLASS)
		return class < e->n_classes ? candidate(e, &e->classes[class], keep) : EVICT_NONE;
	for (uint32_t i = 0; i < e->n_classes; i++) {
		uint32_t b = candidate(e, &e->classes[i], keep);

		if (b != EVICT_NONE && (best == EVICT_NONE || worth(e, b) < worth(e, best)))
			best = b;
	}
	return best;
}

/* ---- heat ---- */

uint16_t evict_heat(const struct evict *e, uint32_t block)
{
	/* Rounded up, so that 0 stays "never" for as long as heat can be told from nothing. */
	uint64_t heat = (block_of(e, block)->heat * EVICT_HEAT_ONE + e->increment - 1) / e->increment;

	return (uint16_t)MIN(heat, (uint64_t)EVICT_HEAT_MAX);
}

void evict_get_heat(const struct evict *e, uint16_t *ret_heat)
{
	for (uint32_t b = 0; b < e->n_blocks; b++)
		ret_heat[b] = evict_heat(e, b);
}

void evict_set_heat(struct evict *e, const uint16_t *heat)
{
	for (uint32_t b = 0; b < e->n_blocks; b++) {
		uint64_t h = heat[b] * e->increment / EVICT_HEAT_ONE;

		if (h <= e->blocks[b].heat)
			continue;
		e->blocks[b].heat = h;
		if (e->policy == EVICT_LFU && e->blocks[b].where != ABSENT)
			lfu_rank(e, b);
	}
}

/* Hotter, or as hot and before it. */
static bool hotter(const struct evict *e, uint32_t a, uint32_t b)
{
	uint64_t x = e->blocks[a].heat, y = e->blocks[b].heat;

	return x != y ? x > y : a < b;
}

/* blocks is a heap, the coldest first, but for a hole at i that block fills: there, or further up. */
static void swim(const struct evict *e, uint32_t *blocks, size_t i, uint32_t block)
{
	for (; i > 0 && hotter(e, blocks[(i - 1) / 2], block); i = (i - 1) / 2)
		blocks[i] = blocks[(i - 1) / 2];
	blocks[i] = block;
}

/* The same: there, or further down. */
static void sink(const struct evict *e, uint32_t *blocks, size_t n, size_t i, uint32_t block)
{
	for (size_t child; (child = 2 * i + 1) < n; i = child) {
		if (child + 1 < n && hotter(e, blocks[child], blocks[child + 1]))
			child++;
		if (!hotter(e, block, blocks[child]))
			break;
		blocks[i] = blocks[child];
	}
	blocks[i] = block;
}

size_t evict_hottest_absent(const struct evict *e, uint32_t *ret_blocks, size_t max)
{
	size_t n = 0;

	for (uint32_t b = 0; b < e->n_blocks && max > 0; b++) {
		if (e->blocks[b].where != ABSENT || e->blocks[b].heat == 0)
			continue;
		if (n < max)
			swim(e, ret_blocks, n++, b);
		else if (hotter(e, b, ret_blocks[0]))
			sink(e, ret_blocks, n, 0, b);
	}
	/* The coldest of what is left goes behind it, again and again. */
	for (size_t left = n; left > 1; left--) {
		uint32_t last = ret_blocks[left - 1];

		ret_blocks[left - 1] = ret_blocks[0];
		sink(e, ret_blocks, left - 1, 0, last);
	}
	return n;
}

/* ---- admission ---- */

/*
 * Heat is the uses of the last 2^HEAT_SHIFT steps, as ageing counts them, and the best guess of
 * those of the next as many. A block stays for as long as its class takes to turn over: by Little's
 * law, as many steps as the class has blocks resident for each that it gives up in a step. So of
 * the uses to come, the part stay / 2^HEAT_SHIFT falls into the stay, at most all, since nothing is
 * known beyond:
 *
 *   (uses(block) - uses(victim)) * min(1, resident / removed) * saved_us > move_us
 *
 * where `removed` is aged like uses are.
 */
bool evict_pays(const struct evict *e, uint32_t block, uint32_t victim, const struct evict_price *price)
{
	const struct block *b = block_of(e, block);
	const struct ranking *c = &e->classes[b->class];
	double unit = (double)e->increment;
	double uses = (double)b->heat / unit, removed = (double)c->removed / unit, stay = 1;

	if (victim != EVICT_NONE)
		uses -= (double)block_of(e, victim)->heat / unit;
	if (removed > c->n_resident)
		stay = c->n_resident / removed;
	return uses * stay * price->saved_us > price->move_us;
}

/* ---- Belady ---- */

int evict_belady(const uint32_t *trace, size_t n, uint32_t n_blocks, uint32_t capacity, size_t from,
		 size_t *ret_hits)
{
	/* next[i]: when trace[i] is wanted again; seen: where it was last seen, walking backwards, and
	 * after that which are resident */
	_cleanup_(freep) uint32_t *next = calloc(n, sizeof(*next));
	_cleanup_(freep) uint32_t *seen = malloc(n_blocks * sizeof(*seen));
	_cleanup_(freep) uint32_t *at = calloc(n_blocks, sizeof(*at));
	_cleanup_(freep) uint32_t *place = calloc(n_blocks, sizeof(*place));
	_cleanup_(freep) uint64_t *key = calloc(n_blocks, sizeof(*key));
	struct heap h = { .at = at, .key = key, .place = place };
	size_t hits = 0;

	if ((n > 0 && (!next || !seen || !at || !place || !key)) || n >= EVICT_NONE)
		return -ENOMEM;
	for (uint32_t b = 0; b < n_blocks; b++)
		seen[b] = EVICT_NONE;
	for (size_t i = n; i-- > 0;) {
		assert(trace[i] < n_blocks);
		next[i] = seen[trace[i]];
		seen[trace[i]] = (uint32_t)i;
	}
	memset(seen, 0, n_blocks * sizeof(*seen));
	for (size_t i = 0; capacity > 0 && i < n; i++) {
		uint32_t b = trace[i];

		/* First in the heap: wanted latest. */
		key[b] = EVICT_NONE - next[i];
		if (seen[b]) {
			hits += i >= from;
			heap_fix(&h, place[b]);
			continue;
		}
		if (h.n == capacity) {
			seen[h.at[0]] = 0;
			heap_drop(&h, h.at[0]);
		}
		seen[b] = 1;
		heap_put(&h, b);
	}
	*ret_hits = hits;
	return 0;
}
