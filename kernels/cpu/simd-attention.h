/* SPDX-License-Identifier: MIT */
/*
 * simd-attention.h: causal attention for the vectors of simd.h.
 *
 * Owns no state. Included once by every file that defines a table for such vectors, which is the only
 * user; any thread. Refuses to know where pages come from. In flash form: tiles of positions pass one
 * after the other, blocks of queries (heads and rows alike) pass over each while it is in the first
 * cache, and the sum of values so far, in `out`, is scaled down whenever the largest score grows. The
 * scores of a block are vectors over its queries, so that nothing of the softmax crosses lanes.
 * Invariant: a position that a query does not see leaves no trace in it, whatever is stored there.
 */
#pragma once

#include "kernels/cpu/simd.h"

#include "daemon/base.h"

#include <float.h>
#include <math.h>

#define ATTENTION_TILE 64

/* Positions [pos, pos + n). Where both arrays end before a whole vector does, the last row repeats. */
struct attention_tile {
	size_t pos, n;
	const void *k[ATTENTION_TILE], *v[ATTENTION_TILE];
};

/*
 * Queries that pass over a tile together. If there are not enough the last one repeats, all of whose
 * copies come to the same results and write them to the same place.
 */
struct attention_block {
	size_t n;
	const float *q[DOTS_LEFT];
	float *out[DOTS_LEFT];
	size_t first[DOTS_LEFT], end[DOTS_LEFT]; /* what each sees, counted from the start of the tile */
};

/* The first position that a row sees; it sees the next pos + row + 1 - that. */
static size_t attention_first(const struct cpu_attention *a, size_t row)
{
	size_t end = a->pos + row + 1;

	return a->window > 0 && a->window < end ? end - a->window : 0;
}

static void attention_find_tile(const struct cpu_attention *a, size_t pos, size_t n,
				struct attention_tile *t)
{
	size_t elem = a->kv_f16 ? sizeof(uint16_t) : sizeof(float);

	t->pos = pos;
	t->n = n;
	for (size_t i = 0; i < MIN(ALIGN_UP(n, (size_t)VEC_LANES), (size_t)ATTENTION_TILE); i++) {
		size_t at = pos + MIN(i, n - 1), page = at / a->page_tok, in_page = at % a->page_tok;

		t->k[i] = (const uint8_t *)a->k_pages[page] + in_page * a->k_dim * elem;
		t->v[i] = (const uint8_t *)a->v_pages[page] + in_page * a->v_dim * elem;
	}
}

static void attention_find_block(const struct cpu_attention *a, const struct attention_tile *t,
				 size_t query, size_t n, struct attention_block *b)
{
	size_t last = a->n_rows * a->n_q - 1, row, head;

	b->n = MIN(n, last + 1 - query);
	row = query / a->n_q;
	head = query % a->n_q;
	for (size_t i = 0; i < n; i++) {
		size_t first = attention_first(a, row), end = a->pos + row + 1;

		b->q[i] = a->q + row * a->q_stride + head * a->k_dim;
		b->out[i] = a->out + row * a->out_stride + head * a->v_dim;
		b->first[i] = MIN(first - MIN(first, t->pos), t->n);
		b->end[i] = MIN(end - MIN(end, t->pos), t->n);
		if (query + i >= last)
			continue;
		if (++head == a->n_q) {
			head = 0;
			row++;
		}
	}
}

static void attention_prefetch(const void *row, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 64)
		__builtin_prefetch((const uint8_t *)row + i);
}

/*
 * What is needed next, while n positions of a tile from i on are at work: their values, which come in
 * columns, an order that no processor expects, and the keys of the next tile.
 */
static void attention_look_ahead(const struct cpu_attention *a, const struct attention_tile *t,
				 const struct attention_tile *next, size_t i, size_t n)
{
	size_t elem = a->kv_f16 ? sizeof(uint16_t) : sizeof(float);

	for (size_t j = i; j < i + n; j++) {
		if (j < t->n)
			attention_prefetch(t->v[j], a->v_dim * elem);
		if (j < next->n)
			attention_prefetch(next->k[j], a->k_dim * elem);
	}
}

/*
 * Scores, and from them weights, of a tile: p[position * nq + query]. state: of every lane the largest
 * score so far, the same for all lanes of a query, and the sum of weights that the lane saw.
 * next: a tile that no block has asked for yet, or NULL.
 * Returns what earlier sums must be scaled with.
 */
INLINE vec attention_weights(const struct cpu_attention *a, const struct attention_tile *t,
			     const struct attention_tile *next, const struct attention_block *b,
			     float *state, float *p, bool f16, size_t nq)
{
	vec old = vec_load(state), sum = vec_load(state + VEC_LANES), max = old, base, scale;
	vec at = { 0 }, first = { 0 }, end = { 0 };

	for (size_t l = 0; l < VEC_LANES; l++) {
		at[l] = (float)(l / nq);
		first[l] = (float)b->first[l % nq];
		end[l] = (float)b->end[l % nq];
	}
	for (size_t i = 0; i < t->n; i += VEC_LANES / nq) {
		vec s;

		if (next)
			attention_look_ahead(a, t, next, i, VEC_LANES / nq);
		s = dots(b->q, t->k + i, a->k_dim, f16, nq) * vec_splat(a->scale);

		s = vec_between(at + vec_splat((float)i), first, end, s, vec_splat(-INFINITY));
		vec_store(p + i * nq, s);
		max = vec_max(s, max);
	}
	UNROLL
	for (size_t n = nq; n < VEC_LANES; n *= 2)
		max = vec_max(vec_rotate(max, n), max);

	/* Where all was -infinity so far, nothing may be subtracted from it. */
	base = vec_max(vec_splat(-FLT_MAX), max);
	scale = vec_exp(old - base);
	sum *= scale;
	for (size_t i = 0; i < t->n; i += VEC_LANES / nq) {
		vec w = vec_exp(vec_load(p + i * nq) - base);

		vec_store(p + i * nq, w);
		sum += w;
	}
	vec_store(state, max);
	vec_store(state + VEC_LANES, sum);
	return scale;
}

/* Columns [i, i + n) of the sums below, n of the last of nv vectors. */
INLINE void attention_add_columns(float *const out[], const float *p, size_t p_stride,
				  const void *const v[], size_t n_pos, size_t i, size_t n, bool f16,
				  size_t nq, size_t nv)
{
	vec acc[VEC_LANES];

	UNROLL
	for (size_t j = 0; j < nq * nv; j++)
		acc[j] = vec_load_n(out[j / nv] + i + j % nv * VEC_LANES, n);
	for (size_t t = 0; t < n_pos; t++) {
		vec x[4];

		UNROLL
		for (size_t j = 0; j < nv; j++)
			x[j] = f16 ? vec_load_f16_n((const uint16_t *)v[t] + i + j * VEC_LANES, n)
				   : vec_load_n((const float *)v[t] + i + j * VEC_LANES, n);
		UNROLL
		for (size_t j = 0; j < nq * nv; j++)
			acc[j] = vec_fma(vec_splat(p[t * p_stride + j / nv]), x[j % nv], acc[j]);
	}
	UNROLL
	for (size_t j = 0; j < nq * nv; j++)
		vec_store_n(out[j / nv] + i + j % nv * VEC_LANES, acc[j], n);
}

/* out[q] += sum over t < n_pos of p[t * p_stride + q] * v[t] */
INLINE void attention_add_values(float *const out[], const float *p, size_t p_stride,
				 const void *const v[], size_t n_pos, size_t dim, bool f16, size_t nq)
{
	const size_t nv = nq == DOTS_LEFT ? 2 : 4;
	size_t i = 0;

	for (; i + nv * VEC_LANES <= dim; i += nv * VEC_LANES)
		attention_add_columns(out, p, p_stride, v, n_pos, i, VEC_LANES, f16, nq, nv);
	for (; i < dim; i += VEC_LANES)
		attention_add_columns(out, p, p_stride, v, n_pos, i, dim - i, f16, nq, 1);
}

INLINE void attention_pass(const struct cpu_attention *a, const struct attention_tile *t,
			   const struct attention_tile *next, const struct attention_block *b,
			   float *state, bool f16, size_t nq)
{
	float p[ATTENTION_TILE * DOTS_LEFT], scale[VEC_LANES];
	size_t first = 0, end = t->n;

	vec_store(scale, attention_weights(a, t, next, b, state, p, f16, nq));
	for (size_t i = 0; i < b->n; i++) {
		if (scale[i] != 1.0f)
			vec_scale_row(b->out[i], b->out[i], scale[i], a->v_dim);
		first = MAX(first, b->first[i]);
		end = MIN(end, b->end[i]);
	}

	/* What all see at once, then what only some do: no weight is small enough for an infinite value. */
	if (first >= end)
		first = end = 0;
	attention_add_values(b->out, p + first * nq, nq, t->v + first, end - first, a->v_dim, f16, nq);
	for (size_t i = 0; i < b->n; i++) {
		size_t f = b->first[i], e = MAX(end, f);

		if (f < first)
			attention_add_values(&b->out[i], p + f * nq + i, nq, t->v + f, first - f,
					     a->v_dim, f16, 1);
		if (e < b->end[i])
			attention_add_values(&b->out[i], p + e * nq + i, nq, t->v + e,
					     b->end[i] - e, a->v_dim, f16, 1);
	}
}

/* Floats of scratch for a block. */
#define ATTENTION_STATE (2 * VEC_LANES)

static void attention_start(const struct cpu_attention *a, size_t nq)
{
	size_t n = a->n_rows * a->n_q;

	for (size_t i = 0; i < a->n_rows; i++)
		memset(a->out + i * a->out_stride, 0, a->n_q * a->v_dim * sizeof(*a->out));
	for (size_t i = 0; i < n; i += nq) {
		float *max = a->scratch + i / nq * ATTENTION_STATE, *sum = max + VEC_LANES;

		for (size_t l = 0; l < VEC_LANES; l++) {
			max[l] = a->sinks ? a->sinks[MIN(i + l % nq, n - 1) % a->n_q] : -INFINITY;
			sum[l] = a->sinks && l < nq ? 1.0f : 0.0f;
		}
	}
}

static void attention_finish(const struct cpu_attention *a, size_t nq)
{
	for (size_t i = 0; i < a->n_rows * a->n_q; i++) {
		const float *sums = a->scratch + i / nq * ATTENTION_STATE + VEC_LANES;
		float *out = a->out + i / a->n_q * a->out_stride + i % a->n_q * a->v_dim, sum = 0;

		for (size_t l = i % nq; l < VEC_LANES; l += nq)
			sum += sums[l];
		vec_scale_row(out, out, 1.0f / sum, a->v_dim);
	}
}

INLINE void attend(const struct cpu_attention *a, bool f16, size_t nq)
{
	size_t pos = attention_first(a, 0), end = a->pos + a->n_rows;
	struct attention_tile tiles[2], *tile = tiles, *next = tiles + 1;

	attention_start(a, nq);
	attention_find_tile(a, pos, MIN((size_t)ATTENTION_TILE, end - pos), tile);
	while (tile->n > 0) {
		pos += tile->n;
		attention_find_tile(a, pos, MIN((size_t)ATTENTION_TILE, end - pos), next);
		for (size_t i = 0; i < a->n_rows * a->n_q; i += nq) {
			struct attention_block block;

			attention_find_block(a, tile, i, nq, &block);
			attention_pass(a, tile, i == 0 ? next : NULL, &block,
				       a->scratch + i / nq * ATTENTION_STATE, f16, nq);
		}
		tile = next;
		next = tile == tiles ? tiles + 1 : tiles;
	}
	attention_finish(a, nq);
}

static void attention(const struct cpu_attention *a)
{
	size_t n = a->n_rows * a->n_q;

	if (n == 1 && a->kv_f16)
		attend(a, true, 1);
	else if (n == 1)
		attend(a, false, 1);
#if VEC_LANES == 16
	else if (n <= 4 && a->kv_f16)
		attend(a, true, 4);
	else if (n <= 4)
		attend(a, false, 4);
#endif
	else if (a->kv_f16)
		attend(a, true, DOTS_LEFT);
	else
		attend(a, false, DOTS_LEFT);
}
