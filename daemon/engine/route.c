/* SPDX-License-Identifier: MIT */
/*
 * route.c: the layout of a route in memory, and its counting sort.
 *
 * Owns nothing, any thread. Refuses to know who chose, and so believes nothing of it: what a card
 * wrote is checked before it becomes an index. Invariant: after -EIO no expert is active.
 */
#include "daemon/engine/route.h"

#define LINE_BYTES ((size_t)64)

/* In this order; up to TOKEN an element a slot, then an element an expert. */
enum { CHOSEN, WEIGHT, PLACE, TOKEN, FIRST, ACTIVE, N_ROWS, N_ARRAYS };

static const size_t elem_bytes[N_ARRAYS] = {
	[CHOSEN] = sizeof(uint32_t), [WEIGHT] = sizeof(float), [PLACE] = sizeof(uint32_t),
	[TOKEN] = sizeof(uint32_t),  [FIRST] = sizeof(size_t), [ACTIVE] = sizeof(uint32_t),
	[N_ROWS] = sizeof(uint32_t),
};

/* Where the arrays begin; returns what they take together. */
static size_t layout(size_t n_tok, size_t n_used, size_t n_expert, size_t ret_at[N_ARRAYS])
{
	size_t n_slots, bytes, total = 0;

	/* Places and experts are counted in 32 bits. */
	if (!mul_ok(n_tok, n_used, &n_slots) || n_slots > UINT32_MAX || n_expert >= UINT32_MAX)
		return SIZE_MAX;
	for (size_t i = 0; i < N_ARRAYS; i++) {
		size_t n = i <= TOKEN ? n_slots : n_expert + (i == FIRST);

		ret_at[i] = total;
		if (!mul_ok(n, elem_bytes[i], &bytes) || !add_ok(bytes, LINE_BYTES - 1, &bytes) ||
		    !add_ok(total, bytes & ~(LINE_BYTES - 1), &total))
			return SIZE_MAX;
	}
	return total;
}

size_t route_bytes(size_t n_tok, size_t n_used, size_t n_expert)
{
	size_t at[N_ARRAYS];

	return layout(n_tok, n_used, n_expert, at);
}

void route_init(struct route *r, void *mem, size_t n_tok, size_t n_used, size_t n_expert)
{
	char *base = mem;
	size_t at[N_ARRAYS] = { 0 };

	(void)layout(n_tok, n_used, n_expert, at);
	*r = (struct route){
		.n_tok = n_tok,
		.n_used = n_used,
		.n_expert = n_expert,
		.chosen = (uint32_t *)(base + at[CHOSEN]),
		.weight = (float *)(base + at[WEIGHT]),
		.place = (uint32_t *)(base + at[PLACE]),
		.token = (uint32_t *)(base + at[TOKEN]),
		.first = (size_t *)(base + at[FIRST]),
		.active = (uint32_t *)(base + at[ACTIVE]),
		.n_rows = (uint32_t *)(base + at[N_ROWS]),
	};
}

/* first[e + 1]: how many places expert e has. */
static int count(struct route *r)
{
	uint32_t *seen = r->n_rows; /* by expert: one more than the last token that chose it */

	memset(r->first, 0, (r->n_expert + 1) * sizeof(*r->first));
	memset(seen, 0, r->n_expert * sizeof(*seen));
	for (size_t s = 0; s < r->n_tok * r->n_used; s++) {
		uint32_t e = r->chosen[s], mark = (uint32_t)(s / r->n_used) + 1;

		if (e >= r->n_expert || seen[e] == mark)
			return -EIO;
		seen[e] = mark;
		r->first[e + 1]++;
	}
	return 0;
}

int route_sort(struct route *r)
{
	int err;

	r->n_active = 0;
	err = count(r);
	if (err < 0)
		return err;
	for (uint32_t e = 0; e < r->n_expert; e++) {
		if (r->first[e + 1] > 0) {
			r->n_rows[r->n_active] = (uint32_t)r->first[e + 1];
			r->active[r->n_active++] = e;
		}
		r->first[e + 1] += r->first[e];
	}
	/* first[e] walks through e's places and ends where e + 1 began: shift back afterwards. */
	for (size_t s = 0; s < r->n_tok * r->n_used; s++) {
		size_t place = r->first[r->chosen[s]]++;

		r->place[s] = (uint32_t)place;
		r->token[place] = (uint32_t)(s / r->n_used);
	}
	memmove(r->first + 1, r->first, r->n_expert * sizeof(*r->first));
	r->first[0] = 0;
	return 0;
}
