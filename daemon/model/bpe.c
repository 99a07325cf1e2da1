/* SPDX-License-Identifier: MIT */
/*
 * bpe.c: see bpe.h.
 *
 * The symbols of a piece lie in one word per byte, as blocks do in an allocator with boundary tags:
 * a symbol's first word is its id, which gives its length; the last word of a symbol of two or more
 * bytes is its length with TAG set, so that the symbol before can be found; words between are DEAD.
 * A candidate pair is a queue key, rank << 32 | position. A key is stale when its position is no
 * longer the start of a symbol or the pair there has another rank; since symbols only grow, a pair
 * never comes back, so the rank alone identifies it. Where pairs share a rank, a stale key may pass
 * for that of the pair which is there now: its own key says the same, so the order does not change.
 */
#include "daemon/model/bpe.h"

#include "daemon/model/aborted.h"

#define TAG            UINT32_C(0x80000000)
#define DEAD           UINT32_MAX
#define ABORT_EVERY    16384
#define HEAP_MAX_PIECE 1024  /* where the two queues are equally fast (measured, qwen2's merges) */
#define KEEP_KEYS      32768 /* larger buckets are given back when empty */

struct bpe_merge {
	uint64_t pair;
	uint32_t rank; /* NO_RANK: a free place */
	uint32_t result;
};

#define NO_RANK UINT32_MAX

struct bpe {
	const uint32_t *ends;
	uint32_t byte_ids[256];
	uint64_t seed;
	size_t mask;
	struct bpe_merge *table;
};

int bpe_new(size_t n_merges, const uint32_t *ends, const uint32_t byte_ids[256], uint64_t seed,
	    struct bpe **ret)
{
	_cleanup_(bpe_freep) struct bpe *b = calloc(1, sizeof(*b));
	size_t n = 16, bytes;

	if (!b)
		return -ENOMEM;

	while (n / 2 < n_merges) {
		if (!mul_ok(n, 2, &n))
			return -ENOMEM;
	}

	if (!mul_ok(n, sizeof(*b->table), &bytes))
		return -ENOMEM;

	b->table = malloc(bytes);
	if (!b->table)
		return -ENOMEM;

	for (size_t i = 0; i < n; i++)
		b->table[i].rank = NO_RANK;

	for (size_t i = 0; i < 256; i++)
		b->byte_ids[i] = byte_ids[i];

	b->ends = ends;
	b->seed = seed;
	b->mask = n - 1;
	*ret = TAKE_PTR(b);
	return 0;
}

struct bpe *bpe_free(struct bpe *b)
{
	if (b)
		free(b->table);

	free(b);
	return NULL;
}

/* The place of the pair, or the free place where it would be. */
static struct bpe_merge *place_of(const struct bpe *b, uint32_t left, uint32_t right)
{
	uint64_t pair = (uint64_t)left << 32 | right;
	uint64_t h = (pair ^ b->seed) * UINT64_C(0x9e3779b97f4a7c15);
	size_t i = (size_t)(h ^ h >> 32) & b->mask;

	while (b->table[i].rank != NO_RANK && b->table[i].pair != pair)
		i = (i + 1) & b->mask;

	return &b->table[i];
}

void bpe_add(struct bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t result)
{
	struct bpe_merge *m = place_of(b, left, right);

	if (m->rank != NO_RANK)
		return;

	*m = (struct bpe_merge){
		.pair = (uint64_t)left << 32 | right,
		.rank = rank,
		.result = result,
	};
}

static int keys_append(struct bpe_keys *q, uint64_t key)
{
	size_t n, bytes;
	uint64_t *k;

	if (q->n == q->alloc) {
		if (!mul_ok(MAX(q->alloc, (size_t)32), 2, &n) || !mul_ok(n, sizeof(*k), &bytes))
			return -ENOMEM;

		k = realloc(q->k, bytes);
		if (!k)
			return -ENOMEM;

		q->k = k;
		q->alloc = n;
	}

	q->k[q->n++] = key;
	return 0;
}

static int heap_push(struct bpe_keys *q, uint64_t key)
{
	int r = keys_append(q, key);
	size_t i;

	if (r < 0)
		return r;

	for (i = q->n - 1; i > 0 && q->k[(i - 1) / 2] > key; i = (i - 1) / 2)
		q->k[i] = q->k[(i - 1) / 2];

	q->k[i] = key;
	return 0;
}

static uint64_t heap_pop(struct bpe_keys *q)
{
	uint64_t top = q->k[0], last = q->k[--q->n];
	size_t i = 0, child;

	while ((child = 2 * i + 1) < q->n) {
		if (child + 1 < q->n && q->k[child + 1] < q->k[child])
			child++;

		if (q->k[child] >= last)
			break;

		q->k[i] = q->k[child];
		i = child;
	}

	q->k[i] = last;
	return top;
}

/*
 * The queue of a long piece is a radix heap on the rank: bucket[0] is the run of keys whose rank is
 * the floor; bucket[i] holds the ranks that differ from the floor first in bit i - 1. Merges mostly
 * make pairs of higher rank than their own, so keys move through memory in sequence, where one big
 * binary heap would miss the cache at every level. Keys below the floor, which a vocabulary may ask
 * for, go to the binary heap. With the floor at its highest all do: so it is for short pieces.
 *
 * A run is in the order of arrival, not of position. That is enough: the order within a rank counts
 * only where pairs overlap, that is in a stretch of one symbol repeated; each of its symbols was
 * made by the same merges in the same order, so that the stretch grew from left to right.
 */
static int queue_push(struct bpe_work *w, uint32_t rank, size_t at)
{
	uint64_t key = (uint64_t)rank << 32 | at;

	if (rank <= w->floor)
		return heap_push(&w->heap, key);

	return keys_append(&w->bucket[32 - __builtin_clz(rank ^ w->floor)], key);
}

static void keys_clear(struct bpe_keys *q)
{
	q->n = 0;
	if (q->alloc > KEEP_KEYS) {
		free(q->k);
		*q = (struct bpe_keys){ 0 };
	}
}

/*
 * Makes the lowest rank of the lowest bucket the new floor and its keys the run. 0: there are
 * none; 1; -ENOMEM.
 */
static int queue_refill(struct bpe_work *w)
{
	struct bpe_keys *run = &w->bucket[0], *from = NULL;
	uint64_t lowest = UINT64_MAX, highest = 0;
	int r;

	keys_clear(run);
	w->run_at = 0;
	for (size_t i = 1; i < ARRAY_SIZE(w->bucket) && !from; i++) {
		if (w->bucket[i].n > 0)
			from = &w->bucket[i];
	}

	if (!from)
		return 0;

	for (size_t i = 0; i < from->n; i++) {
		lowest = MIN(lowest, from->k[i] >> 32);
		highest = MAX(highest, from->k[i] >> 32);
	}

	w->floor = (uint32_t)lowest;
	if (lowest == highest) {
		struct bpe_keys empty = *run;

		*run = *from;
		*from = empty;
	} else {
		for (size_t i = 0; i < from->n; i++) {
			uint32_t diff = (uint32_t)(from->k[i] >> 32) ^ w->floor;

			r = keys_append(&w->bucket[diff ? 32 - __builtin_clz(diff) : 0], from->k[i]);
			if (r < 0)
				return r;
		}

		keys_clear(from);
	}

	return 1;
}

/* 1 and the lowest key, 0 when there is none, -ENOMEM. */
static int queue_pop(struct bpe_work *w, uint64_t *ret)
{
	struct bpe_keys *run = &w->bucket[0];
	int r;

	while (w->run_at == run->n && w->heap.n == 0) {
		r = queue_refill(w);
		if (r <= 0)
			return r;
	}

	if (w->heap.n > 0 && (w->run_at == run->n || w->heap.k[0] < run->k[w->run_at]))
		*ret = heap_pop(&w->heap);
	else
		*ret = run->k[w->run_at++];

	return 1;
}

static size_t symbol_len(const struct bpe *b, uint32_t id)
{
	if (id == BPE_NO_TOKEN)
		return 1;

	return b->ends[id] - (id > 0 ? b->ends[id - 1] : 0);
}

static int push_pair(const struct bpe *b, struct bpe_work *w, size_t left, size_t right)
{
	const struct bpe_merge *m = place_of(b, w->sym[left], w->sym[right]);

	return m->rank == NO_RANK ? 0 : queue_push(w, m->rank, left);
}

/* Merges the pair at `at` unless its key is stale, and queues the two pairs that come of it. */
static int merge_pair(const struct bpe *b, struct bpe_work *w, uint32_t rank, size_t at)
{
	const struct bpe_merge *m;
	size_t right, end;
	int r;

	if (w->sym[at] & TAG)
		return 0;

	right = at + symbol_len(b, w->sym[at]);
	if (right == w->len)
		return 0;

	m = place_of(b, w->sym[at], w->sym[right]);
	if (m->rank != rank)
		return 0;

	end = right + symbol_len(b, w->sym[right]);
	if (right - 1 > at)
		w->sym[right - 1] = DEAD;

	w->sym[right] = DEAD;
	w->sym[end - 1] = TAG | (uint32_t)(end - at);
	w->sym[at] = m->result;

	if (at > 0) {
		uint32_t before = w->sym[at - 1];

		r = push_pair(b, w, before & TAG ? at - (before & ~TAG) : at - 1, at);
		if (r < 0)
			return r;
	}

	return end < w->len ? push_pair(b, w, at, end) : 0;
}

int bpe_start(struct bpe_work *w, size_t len, bool one_rank_per_pair)
{
	size_t n = MAX(len, (size_t)256), bytes;
	uint32_t *sym;

	w->heap.n = 0;
	for (size_t i = 0; i < ARRAY_SIZE(w->bucket); i++)
		w->bucket[i].n = 0;

	w->run_at = w->len = w->last = 0;
	w->floor = one_rank_per_pair && len > HEAP_MAX_PIECE ? 0 : NO_RANK;
	if (len <= w->alloc)
		return 0;

	if (!mul_ok(n, sizeof(*sym), &bytes))
		return -ENOMEM;

	sym = realloc(w->sym, bytes);
	if (!sym)
		return -ENOMEM;

	w->sym = sym;
	w->alloc = n;
	return 0;
}

static int append_symbols(const struct bpe *b, const struct bpe_work *w, struct tokens *out)
{
	int32_t ids[256];
	size_t n = 0;
	int r;

	for (size_t i = 0; i < w->len; i += symbol_len(b, w->sym[i])) {
		if (w->sym[i] == BPE_NO_TOKEN)
			continue;

		ids[n++] = (int32_t)w->sym[i];
		if (n == ARRAY_SIZE(ids)) {
			r = tokens_append(out, ids, n);
			if (r < 0)
				return r;

			n = 0;
		}
	}

	return n > 0 ? tokens_append(out, ids, n) : 0;
}

int bpe_put(const struct bpe *b, struct bpe_work *w, uint32_t id, size_t len)
{
	size_t before = w->last, at = w->len;

	w->sym[at] = id;
	for (size_t i = 1; i < len; i++)
		w->sym[at + i] = DEAD;

	if (len > 1)
		w->sym[at + len - 1] = TAG | (uint32_t)len;

	w->last = at;
	w->len = at + len;
	return at > 0 ? push_pair(b, w, before, at) : 0;
}

int bpe_finish(const struct bpe *b, struct bpe_work *w, const atomic_bool *abort, struct tokens *out)
{
	uint64_t key;
	int r;

	for (size_t n = 1; (r = queue_pop(w, &key)) > 0; n++) {
		if (n % ABORT_EVERY == 0 && aborted(abort))
			return -ECANCELED;

		r = merge_pair(b, w, (uint32_t)(key >> 32), (uint32_t)key);
		if (r < 0)
			return r;
	}

	return r < 0 ? r : append_symbols(b, w, out);
}

int bpe_encode(const struct bpe *b, struct bpe_work *w, const char *piece, size_t len,
	       const atomic_bool *abort, struct tokens *out)
{
	int r = bpe_start(w, len, true);

	if (r < 0)
		return r;

	for (size_t i = 0; i < len; i++)
		w->sym[i] = b->byte_ids[(unsigned char)piece[i]];

	w->len = len;
	for (size_t i = 0; i + 1 < len; i++) {
		if (i % ABORT_EVERY == ABORT_EVERY - 1 && aborted(abort))
			return -ECANCELED;

		r = push_pair(b, w, i, i + 1);
		if (r < 0)
			return r;
	}

	return bpe_finish(b, w, abort, out);
}

void bpe_work_done(struct bpe_work *w)
{
	free(w->sym);
	free(w->heap.k);
	for (size_t i = 0; i < ARRAY_SIZE(w->bucket); i++)
		free(w->bucket[i].k);

	*w = (struct bpe_work){ 0 };
}
