/* SPDX-License-Identifier: MIT */
/*
 * simd-delta.h: the gated delta rule for the vectors of simd.h.
 *
 * Owns no state. Included once by every file that defines a table for such vectors, which is the only
 * user; any thread. Both forms go through the state in panels of columns, which do not depend on each
 * other.
 *
 * What there is to win by chunks: a step makes four operations for every element of the state (two to
 * read out, two to update), a chunk of n tokens three for each token, and for inner products of tokens
 * 2 n / v_dim more. So chunks are as short as a vector: that keeps those few, and is enough for the
 * state to pass through the caches seldom.
 */
#pragma once

#include "kernels/cpu/simd.h"

#include "daemon/base.h"

#include <math.h>

INLINE float dot(const float *a, const float *b, size_t n)
{
	vec sum = vec_splat(0.0f);

	for (size_t i = 0; i < n; i += VEC_LANES)
		sum = vec_fma(vec_load_n(a + i, n - i), vec_load_n(b + i, n - i), sum);
	return vec_sum(sum);
}

/*
 * Whole rows of the usual state with vectors of sixteen: where one token comes at a time, the state comes
 * from memory, and memory is read fastest in its own order.
 */
#define DELTA_STEP_COLUMNS (8 * VEC_LANES)

/* A token, as a panel of columns needs it. */
struct delta_token {
	const float *q, *k;
	float decay, beta, kq;
};

/*
 * nv vectors of columns, n elements of each, through one token. The output is read from the old state
 * along with the prediction: (decay S + k d)^T q = decay S^T q + <k, q> d.
 */
INLINE void delta_step_panel(float *S, const struct delta_token *t, const float *v, size_t k_dim,
			     size_t v_dim, size_t n, size_t nv, float *o)
{
	const vec decay = vec_splat(t->decay);
	vec d[8], sum[8];

	UNROLL
	for (size_t a = 0; a < nv; a++)
		d[a] = sum[a] = vec_splat(0.0f);
	for (size_t i = 0; i < k_dim; i++) {
		UNROLL
		for (size_t a = 0; a < nv; a++) {
			vec s = vec_load_n(S + i * v_dim + a * VEC_LANES, n);

			d[a] = vec_fma(vec_splat(t->k[i]), s, d[a]);
			sum[a] = vec_fma(vec_splat(t->q[i]), s, sum[a]);
		}
	}
	UNROLL
	for (size_t a = 0; a < nv; a++) {
		d[a] = vec_fnma(decay, d[a], vec_load_n(v + a * VEC_LANES, n)) * vec_splat(t->beta);
		vec_store_n(o + a * VEC_LANES, vec_fma(vec_splat(t->kq), d[a], decay * sum[a]), n);
	}
	for (size_t i = 0; i < k_dim; i++) {
		UNROLL
		for (size_t a = 0; a < nv; a++) {
			float *s = S + i * v_dim + a * VEC_LANES;

			vec_store_n(s, vec_fma(vec_splat(t->k[i]), d[a], decay * vec_load_n(s, n)), n);
		}
	}
}

static void delta_step(float *S, const float *q, const float *k, const float *v, float g,
		       float beta, size_t k_dim, size_t v_dim, float *o)
{
	const struct delta_token t = { q, k, expf(g), beta, dot(k, q, k_dim) };
	size_t j = 0;

	for (; j + DELTA_STEP_COLUMNS <= v_dim; j += DELTA_STEP_COLUMNS)
		delta_step_panel(S + j, &t, v + j, k_dim, v_dim, VEC_LANES, 8, o + j);
	for (; j < v_dim; j += VEC_LANES)
		delta_step_panel(S + j, &t, v + j, k_dim, v_dim, v_dim - j, 1, o + j);
}

#define DELTA_TOK   VEC_LANES       /* tokens of a chunk */
#define DELTA_PANEL (2 * VEC_LANES) /* columns that stay in the first cache */
#define DELTA_ROWS  (VEC_LANES / 2) /* rows of a product that stay in registers */

/*
 * C = scale C + A B (without `add`, A B), for m rows and nv vectors, n elements of each; k is what is
 * summed over. A has two strides, so that it can be a transposed matrix.
 */
INLINE void gemm_tile(float *C, size_t c_row, bool add, float scale, const float *A, size_t a_row,
		      size_t a_col, const float *B, size_t b_row, size_t k, size_t m, size_t n,
		      size_t nv)
{
	vec acc[VEC_LANES];

	UNROLL
	for (size_t i = 0; i < m * nv; i++) {
		acc[i] = vec_splat(0.0f);
		if (add)
			acc[i] = vec_load_n(C + i / nv * c_row + i % nv * VEC_LANES, n) *
				 vec_splat(scale);
	}
	for (size_t j = 0; j < k; j++) {
		UNROLL
		for (size_t i = 0; i < m * nv; i++)
			acc[i] = vec_fma(vec_splat(A[i / nv * a_row + j * a_col]),
					 vec_load_n(B + j * b_row + i % nv * VEC_LANES, n), acc[i]);
	}
	UNROLL
	for (size_t i = 0; i < m * nv; i++)
		vec_store_n(C + i / nv * c_row + i % nv * VEC_LANES, acc[i], n);
}

/* The same for any number of rows. */
INLINE void gemm_panel(float *C, size_t c_row, bool add, float scale, const float *A, size_t a_row,
		       size_t a_col, const float *B, size_t b_row, size_t k, size_t m, size_t n,
		       size_t nv)
{
	size_t i = 0;

	for (; i + DELTA_ROWS <= m; i += DELTA_ROWS)
		gemm_tile(C + i * c_row, c_row, add, scale, A + i * a_row, a_row, a_col, B, b_row,
			  k, DELTA_ROWS, n, nv);
	for (; i < m; i++)
		gemm_tile(C + i * c_row, c_row, add, scale, A + i * a_row, a_row, a_col, B, b_row,
			  k, 1, n, nv);
}

/* DELTA_TOK tokens, as a panel of columns needs them. With G_t = g_0 + ... + g_t: */
struct delta_tokens {
	const float *kq;        /* the k of all tokens, then the q: [2 * DELTA_TOK][k_dim] */
	float decay[DELTA_TOK]; /* exp(G_t) */
	float left[DELTA_TOK];  /* of an update, when the last token is done: exp(G_last - G_t) */
	float beta[DELTA_TOK];
	float kk[DELTA_TOK * DELTA_TOK]; /* beta_i exp(G_i - G_j) <k_i, k_j> for j < i, else 0 */
	float qk[DELTA_TOK * DELTA_TOK]; /* exp(G_i - G_j) <q_i, k_j> for j <= i, else 0 */
};

/* P[i][j] = <a_i, k_j>, at least for j <= i. */
static void delta_products(float *P, const float *a, const float *k, size_t k_dim)
{
	for (size_t j = 0; j < DELTA_TOK; j += DOTS_LEFT) {
		const float *left[DOTS_LEFT];

		for (size_t l = 0; l < DOTS_LEFT; l++)
			left[l] = k + (j + l) * k_dim;
		for (size_t i = j; i < DELTA_TOK; i += 2) {
			const void *right[2] = { a + i * k_dim, a + (i + 1) * k_dim };
			float two[VEC_LANES];

			vec_store(two, dots(left, right, k_dim, false, DOTS_LEFT));
			memcpy(P + i * DELTA_TOK + j, two, sizeof(two) / 2);
			memcpy(P + (i + 1) * DELTA_TOK + j, two + DOTS_LEFT, sizeof(two) / 2);
		}
	}
}

/*
 * Every exponent that is used is <= 0 as g is; differences of G are made in double, as G may be large
 * and the difference small.
 */
static void delta_prepare(struct delta_tokens *d, const float *kq, const float *g,
			  const float *beta, size_t gb_stride, size_t k_dim)
{
	double G[DELTA_TOK], sum = 0;
	float lane[DELTA_TOK];

	d->kq = kq;
	for (size_t t = 0; t < DELTA_TOK; t++) {
		float step = g[t * gb_stride];

		/* exp(-1e4) is 0 as well, and differences of infinities are not. */
		sum += (double)(step < -1e4f ? -1e4f : step);
		G[t] = sum;
		d->beta[t] = beta[t * gb_stride];
		d->decay[t] = (float)sum;
		lane[t] = (float)t;
	}
	for (size_t t = 0; t < DELTA_TOK; t++)
		d->left[t] = (float)(sum - G[t]);
	vec_store(d->decay, vec_exp(vec_load(d->decay)));
	vec_store(d->left, vec_exp(vec_load(d->left)));

	memset(d->kk, 0, sizeof(d->kk));
	memset(d->qk, 0, sizeof(d->qk));
	delta_products(d->kk, kq, kq, k_dim);
	delta_products(d->qk, kq + DELTA_TOK * k_dim, kq, k_dim);
	for (size_t i = 0; i < DELTA_TOK; i++) {
		const vec zero = vec_splat(0.0f), j = vec_load(lane);
		float since[DELTA_TOK], *kk = d->kk + i * DELTA_TOK, *qk = d->qk + i * DELTA_TOK;
		vec decay;

		for (size_t t = 0; t < DELTA_TOK; t++)
			since[t] = (float)(G[i] - G[t]);
		decay = vec_exp(vec_load(since));
		vec_store(kk, vec_between(j, zero, vec_splat(lane[i]),
					  vec_load(kk) * decay * vec_splat(d->beta[i]), zero));
		vec_store(qk, vec_between(j, zero, vec_splat(lane[i] + 1), vec_load(qk) * decay, zero));
	}
}

/*
 * One vector of columns, n elements of it. old: S0^T k of all tokens, then S0^T q, rows of DELTA_PANEL,
 * of the state S0 before the chunk. What each token adds to the state, decayed to the end, goes to `left`.
 */
INLINE void delta_solve(const struct delta_tokens *t, const float *old, const float *v,
			size_t v_stride, float *o, size_t o_stride, size_t n, float *left)
{
	vec d[DELTA_TOK];

	UNROLL
	for (size_t i = 0; i < DELTA_TOK; i++)
		d[i] = vec_fnma(vec_splat(t->decay[i]), vec_load(old + i * DELTA_PANEL),
				vec_load_n(v + i * v_stride, n)) *
		       vec_splat(t->beta[i]);
	UNROLL
	for (size_t j = 0; j < DELTA_TOK; j++) {
		UNROLL
		for (size_t i = 0; i < DELTA_TOK; i++)
			if (i > j)
				d[i] = vec_fnma(vec_splat(t->kk[i * DELTA_TOK + j]), d[j], d[i]);
	}
	UNROLL
	for (size_t i = 0; i < DELTA_TOK; i++) {
		vec sum = vec_load(old + (DELTA_TOK + i) * DELTA_PANEL) * vec_splat(t->decay[i]);

		UNROLL
		for (size_t j = 0; j < DELTA_TOK; j++)
			if (j <= i)
				sum = vec_fma(vec_splat(t->qk[i * DELTA_TOK + j]), d[j], sum);
		vec_store_n(o + i * o_stride, sum, n);
		vec_store(left + i * DELTA_PANEL, d[i] * vec_splat(t->left[i]));
	}
}

/* nv vectors of columns, n elements of each. */
INLINE void delta_panel(float *S, const struct delta_tokens *t, const float *v, size_t v_stride,
			float *o, size_t o_stride, size_t k_dim, size_t v_dim, size_t n, size_t nv)
{
	float old[2 * DELTA_TOK * DELTA_PANEL], left[DELTA_TOK * DELTA_PANEL];

	gemm_panel(old, DELTA_PANEL, false, 0.0f, t->kq, k_dim, 1, S, v_dim, k_dim, 2 * DELTA_TOK,
		   n, nv);
	for (size_t a = 0; a < nv; a++)
		delta_solve(t, old + a * VEC_LANES, v + a * VEC_LANES, v_stride, o + a * VEC_LANES,
			    o_stride, n, left + a * VEC_LANES);
	gemm_panel(S, v_dim, true, t->decay[DELTA_TOK - 1], t->kq, 1, k_dim, left, DELTA_PANEL,
		   DELTA_TOK, k_dim, n, nv);
}

/*
 * The recurrence over DELTA_TOK tokens at once. The state before token i is made of the state S0
 * before the chunk and of the updates d_j of earlier tokens, both decayed since, so the updates solve
 *
 *   d_i = beta_i * (v_i - exp(G_i) S0^T k_i - sum over j < i of exp(G_i - G_j) <k_i, k_j> d_j),
 *
 * a unit lower triangular system, here by forward substitution. Then, in the same way,
 *
 *   o_i = exp(G_i) S0^T q_i + sum over j <= i of exp(G_i - G_j) <q_i, k_j> d_j,
 *   S   = exp(G_last) S0 + sum over j of exp(G_last - G_j) k_j (x) d_j.
 *
 * Tokens that are no whole chunk go in steps.
 */
static void delta_chunk(float *S, const float *q, size_t q_stride, const float *k, size_t k_stride,
			const float *v, size_t v_stride, const float *g, const float *beta,
			size_t gb_stride, size_t n_tok, size_t k_dim, size_t v_dim, float *o,
			size_t o_stride, float *scratch)
{
	size_t t = 0, j;

	for (; t + DELTA_TOK <= n_tok; t += DELTA_TOK) {
		struct delta_tokens d;

		/* Side by side: rows that are a power of two apart would share a few lines of the cache. */
		for (size_t i = 0; i < DELTA_TOK; i++) {
			memcpy(scratch + i * k_dim, k + (t + i) * k_stride, k_dim * sizeof(*k));
			memcpy(scratch + (DELTA_TOK + i) * k_dim, q + (t + i) * q_stride,
			       k_dim * sizeof(*q));
		}
		delta_prepare(&d, scratch, g + t * gb_stride, beta + t * gb_stride, gb_stride, k_dim);
		for (j = 0; j + DELTA_PANEL <= v_dim; j += DELTA_PANEL)
			delta_panel(S + j, &d, v + t * v_stride + j, v_stride, o + t * o_stride + j,
				    o_stride, k_dim, v_dim, VEC_LANES, 2);
		for (; j < v_dim; j += VEC_LANES)
			delta_panel(S + j, &d, v + t * v_stride + j, v_stride, o + t * o_stride + j,
				    o_stride, k_dim, v_dim, v_dim - j, 1);
	}
	for (; t < n_tok; t++)
		delta_step(S, q + t * q_stride, k + t * k_stride, v + t * v_stride,
			   g[t * gb_stride], beta[t * gb_stride], k_dim, v_dim, o + t * o_stride);
}
