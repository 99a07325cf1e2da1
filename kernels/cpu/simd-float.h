/* SPDX-License-Identifier: MIT */
/*
 * simd-float.h: norms, activation functions, rope, routing and the convolution, for the vectors of
 * simd.h.
 *
 * Owns no state. Included once by every file that defines a table for such vectors, which is the only
 * user; any thread. Refuses to know formulas in prose: ref.c describes them, and
 * test-kernels-float.c holds all tables together.
 */
#pragma once

#include "kernels/cpu/simd.h"

#include "daemon/base.h"

#include <math.h>

/*
 * In double, as ref.c: squares of large values must not overflow, and this is not where the time
 * goes.
 */
static double sum_squares(const float *x, size_t n)
{
	vec_pd low = { 0 }, high = { 0 };
	double sum = 0;

	for (size_t i = 0; i < n; i += VEC_LANES) {
		vec v = vec_load_n(x + i, n - i);

		low += vec_low_pd(v) * vec_low_pd(v);
		high += vec_high_pd(v) * vec_high_pd(v);
	}
	low += high;
	for (size_t i = 0; i < VEC_LANES / 2; i++)
		sum += low[i];
	return sum;
}

static void rms_norm(const float *x, const float *w, float eps, float *y, size_t n)
{
	float scale = 1.0f / sqrtf((float)(sum_squares(x, n) / (double)n) + eps);

	if (!w) {
		vec_scale_row(y, x, scale, n);
		return;
	}
	for (size_t i = 0; i < n; i += VEC_LANES)
		vec_store_n(y + i,
			    vec_load_n(x + i, n - i) * vec_splat(scale) * vec_load_n(w + i, n - i),
			    n - i);
}

static void l2_norm(const float *x, float eps, float *y, size_t n)
{
	vec_scale_row(y, x, 1.0f / fmaxf((float)sqrt(sum_squares(x, n)), eps), n);
}

static void add_scaled(float *x, const float *y, float scale, size_t n)
{
	for (size_t i = 0; i < n; i += VEC_LANES)
		vec_store_n(x + i,
			    vec_fma(vec_load_n(y + i, n - i), vec_splat(scale), vec_load_n(x + i, n - i)),
			    n - i);
}

/* x * sigmoid(of): SiLU where both are the same. */
INLINE vec times_sigmoid(vec x, vec of)
{
	return x / (vec_splat(1.0f) + vec_exp(vec_splat(0.0f) - of));
}

static void silu_mul(const float *gate, const float *up, float *y, size_t n)
{
	for (size_t i = 0; i < n; i += VEC_LANES) {
		vec g = vec_load_n(gate + i, n - i);

		vec_store_n(y + i, times_sigmoid(g, g) * vec_load_n(up + i, n - i), n - i);
	}
}

static void sigmoid_mul(float *x, const float *gate, size_t n)
{
	for (size_t i = 0; i < n; i += VEC_LANES)
		vec_store_n(x + i, times_sigmoid(vec_load_n(x + i, n - i), vec_load_n(gate + i, n - i)),
			    n - i);
}

static void swiglu_oai(const float *gate, const float *up, float *y, size_t n)
{
	const vec seven = vec_splat(7.0f);

	for (size_t i = 0; i < n; i += VEC_LANES) {
		vec g = vec_min(seven, vec_load_n(gate + i, n - i));
		vec u = vec_min(seven, vec_max(vec_load_n(up + i, n - i), vec_splat(-7.0f)));

		vec_store_n(y + i, times_sigmoid(g, vec_splat(1.702f) * g) * (u + vec_splat(1.0f)),
			    n - i);
	}
}

static void softmax(float *x, size_t n)
{
	vec max = vec_splat(-INFINITY), sum = vec_splat(0.0f);
	size_t whole = n / VEC_LANES * VEC_LANES, rest = n - whole;

	for (size_t i = 0; i < whole; i += VEC_LANES)
		max = vec_max(vec_load(x + i), max);
	for (size_t i = whole; i < n; i++)
		max = vec_max(vec_splat(x[i]), max);
	max = vec_splat(vec_hmax(max));

	for (size_t i = 0; i < whole; i += VEC_LANES) {
		vec e = vec_exp(vec_load(x + i) - max);

		vec_store(x + i, e);
		sum += e;
	}
	if (rest > 0) {
		vec_store_n(x + whole, vec_exp(vec_load_n(x + whole, rest) - max), rest);
		sum += vec_load_n(x + whole, rest); /* without what is beyond the end */
	}
	vec_scale_row(x, x, 1.0f / vec_sum(sum), n);
}

static void rope_neox(float *x, const float *cs, size_t n_rot)
{
	size_t half = n_rot / 2;

	for (size_t i = 0; i < half; i += VEC_LANES) {
		size_t n = half - i;
		vec c0 = vec_load_n(cs + 2 * i, 2 * n), c1 = vec_splat(0.0f);
		vec a = vec_load_n(x + i, n), b = vec_load_n(x + half + i, n), cosine, sine;

		if (2 * n > VEC_LANES)
			c1 = vec_load_n(cs + 2 * i + VEC_LANES, 2 * n - VEC_LANES);
		cosine = vec_even(c0, c1);
		sine = vec_odd(c0, c1);
		vec_store_n(x + i, a * cosine - b * sine, n);
		vec_store_n(x + half + i, a * sine + b * cosine, n);
	}
}

static void rope_norm(float *x, const float *cs, size_t n_rot)
{
	for (size_t i = 0; i < n_rot; i += VEC_LANES)
		vec_store_n(x + i,
			    vec_turn_pairs(vec_load_n(x + i, n_rot - i), vec_load_n(cs + i, n_rot - i)),
			    n_rot - i);
}

/* These are exact, and wider vectors gain nothing. */
static void f32_to_f16(const float *x, uint16_t *y, size_t n)
{
	avx2_quantize_f16(x, y, n);
}

static void f16_to_f32(const uint16_t *x, float *y, size_t n)
{
	avx2_dequant_f16(x, y, n);
}

/* Whole numbers in the order of x, the two zeros being the same: 1 if it is not a number, never 0. */
INLINE vec_u32 rank(vec x)
{
	vec_u32 bits = (vec_u32)(x + vec_splat(0.0f)), nan = (vec_u32)(x != x);
	vec_u32 order = bits ^ ((vec_u32)((vec_i32)bits >> 31) | 0x80000000u);

	return (order & ~nan) | (1 & nan);
}

INLINE vec_u32 load_ranks(const float *x, size_t n)
{
	return (vec_u32)vec_load_n(x, n);
}

/* x becomes ranks first, of which 0 are those that were taken, and, in a vector, those beyond the end. */
static void top_k(float *x, size_t n, size_t k, uint32_t *index)
{
	for (size_t i = 0; i < n; i += VEC_LANES)
		vec_store_n(x + i, (vec)rank(vec_load_n(x + i, n - i)), n - i);
	for (size_t j = 0; j < k; j++) {
		vec_u32 max = { 0 };
		unsigned equal;
		size_t at = 0;

		for (size_t i = 0; i < n; i += VEC_LANES)
			max = vec_max_u32(max, load_ranks(x + i, n - i));
		UNROLL
		for (size_t r = VEC_LANES / 2; r > 0; r /= 2)
			max = vec_max_u32(max, (vec_u32)vec_rotate((vec)max, r));
		while (!(equal = vec_equal_u32(load_ranks(x + at, n - at), max)))
			at += VEC_LANES;
		at += (size_t)__builtin_ctz(equal);
		index[j] = (uint32_t)at;
		x[at] = 0.0f;
	}
}

/* The four taps of a vector of channels: w[c * 4 + k] to taps[k]. */
INLINE void load_taps(const float *w, vec taps[4])
{
	vec even[2], odd[2];

	UNROLL
	for (size_t i = 0; i < 2; i++) {
		vec a = vec_load(w + 2 * i * VEC_LANES), b = vec_load(w + (2 * i + 1) * VEC_LANES);

		even[i] = vec_even(a, b);
		odd[i] = vec_odd(a, b);
	}
	taps[0] = vec_even(even[0], even[1]);
	taps[1] = vec_even(odd[0], odd[1]);
	taps[2] = vec_odd(even[0], even[1]);
	taps[3] = vec_odd(odd[0], odd[1]);
}

/*
 * Kernels of four taps, the only ones in use; ref.c does others, and channels beyond a multiple of
 * the vector.
 */
static void conv_silu(const float *x, const float *w, float *state, size_t n_tok, size_t n_ch,
		      size_t kernel, size_t c0, size_t c1, float *y)
{
	size_t c = c0;

	for (; kernel == 4 && c + VEC_LANES <= c1; c += VEC_LANES) {
		vec taps[4], in[4];

		load_taps(w + 4 * c, taps);
		UNROLL
		for (size_t k = 0; k < 3; k++)
			in[k] = vec_load(state + k * n_ch + c);
		for (size_t t = 0; t < n_tok; t++) {
			vec sum;

			in[3] = vec_load(x + t * n_ch + c);
			sum = taps[0] * in[0];
			UNROLL
			for (size_t k = 1; k < 4; k++)
				sum = vec_fma(taps[k], in[k], sum);
			vec_store(y + t * n_ch + c, times_sigmoid(sum, sum));
			UNROLL
			for (size_t k = 0; k < 3; k++)
				in[k] = in[k + 1];
		}
		UNROLL
		for (size_t k = 0; k < 3; k++)
			vec_store(state + k * n_ch + c, in[k]);
	}
	if (c < c1)
		cpu_kernels_ref.conv_silu(x, w, state, n_tok, n_ch, kernel, c, c1, y);
}
