/* SPDX-License-Identifier: MIT */
/*
 * simd.h: vectors of floats as wide as the including file is compiled for, 16 with AVX-512 and 8 with
 * AVX2, and the few operations on them that the kernels on floats are made of.
 *
 * Owns nothing. Included by simd-*.h only, which avx2.c and avx512.c each compile once: a kernel is
 * written once and differs between the two tables in the width alone. What operators of the compiler
 * do (+ - * / on vectors) has no name here. Invariants: no load assumes alignment; the forms that end
 * in _n touch the first n elements only, or a whole vector if n is more, and read the others as 0.
 */
#pragma once

#include "kernels/cpu/avx2.h"

#if defined(__AVX512F__)
#define VEC_LANES 16
typedef __m512 vec;
typedef __m512d vec_pd;
#else
#define VEC_LANES 8
typedef __m256 vec;
typedef __m256d vec_pd;
#endif
typedef int32_t vec_i32 __attribute__((vector_size(VEC_LANES * sizeof(int32_t))));
typedef uint32_t vec_u32 __attribute__((vector_size(VEC_LANES * sizeof(uint32_t))));

/* 0 to VEC_LANES - 1, twice: from element n on, the lanes of a rotation by n. */
static const int32_t vec_lanes[2 * VEC_LANES] = {
	0, 1, 2,  3,  4,  5,  6,  7,
#if VEC_LANES == 16
	8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
#else
	0, 1, 2, 3, 4, 5, 6, 7,
#endif
};

#if VEC_LANES == 16

INLINE __mmask16 vec_first(size_t n)
{
	return (__mmask16)((1u << n) - 1);
}

INLINE vec vec_splat(float f)
{
	return _mm512_set1_ps(f);
}

INLINE vec vec_load_n(const float *p, size_t n)
{
	return n < VEC_LANES ? _mm512_maskz_loadu_ps(vec_first(n), p) : _mm512_loadu_ps(p);
}

INLINE void vec_store_n(float *p, vec v, size_t n)
{
	if (n < VEC_LANES)
		_mm512_mask_storeu_ps(p, vec_first(n), v);
	else
		_mm512_storeu_ps(p, v);
}

INLINE vec vec_load_f16_n(const uint16_t *p, size_t n)
{
	return _mm512_cvtph_ps(n < VEC_LANES ? _mm256_maskz_loadu_epi16(vec_first(n), p)
					     : _mm256_loadu_si256((const void *)p));
}

/* a * b + c */
INLINE vec vec_fma(vec a, vec b, vec c)
{
	return _mm512_fmadd_ps(a, b, c);
}

/* c - a * b */
INLINE vec vec_fnma(vec a, vec b, vec c)
{
	return _mm512_fnmadd_ps(a, b, c);
}

/* Of the larger or smaller, as of what is not a number, these return b if in doubt. */
INLINE vec vec_max(vec a, vec b)
{
	return _mm512_max_ps(a, b);
}

INLINE vec vec_min(vec a, vec b)
{
	return _mm512_min_ps(a, b);
}

INLINE vec vec_round(vec a)
{
	return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* a * 2^n for whole n, rounded once where that is denormal. */
INLINE vec vec_scale2(vec a, vec n)
{
	return _mm512_scalef_ps(a, n);
}

INLINE vec_pd vec_low_pd(vec a)
{
	return _mm512_cvtps_pd(_mm512_castps512_ps256(a));
}

INLINE vec_pd vec_high_pd(vec a)
{
	return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
}

/* Lane i of the result is lane i + n of v, beyond the end from the start; n < VEC_LANES. */
INLINE vec vec_rotate(vec v, size_t n)
{
	return _mm512_permutexvar_ps(_mm512_loadu_si512(vec_lanes + n), v);
}

INLINE vec_u32 vec_max_u32(vec_u32 a, vec_u32 b)
{
	return (vec_u32)_mm512_max_epu32((__m512i)a, (__m512i)b);
}

/* A bit for every lane in which a is b. */
INLINE unsigned vec_equal_u32(vec_u32 a, vec_u32 b)
{
	return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b);
}

/* x where at least lo and below hi is what at says of the lane, else other. */
INLINE vec vec_between(vec at, vec lo, vec hi, vec x, vec other)
{
	__mmask16 m = _mm512_cmp_ps_mask(at, lo, _CMP_GE_OQ);

	return _mm512_mask_blend_ps(_mm512_mask_cmp_ps_mask(m, at, hi, _CMP_LT_OQ), other, x);
}

/* Of a and then b, every second element. */
INLINE vec vec_even(vec a, vec b)
{
	const __m512i lanes =
		_mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);

	return _mm512_permutex2var_ps(a, lanes, b);
}

INLINE vec vec_odd(vec a, vec b)
{
	const __m512i lanes =
		_mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);

	return _mm512_permutex2var_ps(a, lanes, b);
}

/* Pairs of x turned by pairs of cosine and sine. */
INLINE vec vec_turn_pairs(vec x, vec cs)
{
	return _mm512_fmaddsub_ps(x, _mm512_moveldup_ps(cs),
				  _mm512_permute_ps(x, 0xb1) * _mm512_movehdup_ps(cs));
}

/* Lane i of the result is the sum of v[i]. */
INLINE vec vec_sum_each(const vec v[VEC_LANES])
{
	vec four[4], a, b;

	UNROLL
	for (size_t i = 0; i < 4; i++) {
		const vec *w = v + 4 * i;
		vec x = _mm512_unpacklo_ps(w[0], w[1]) + _mm512_unpackhi_ps(w[0], w[1]);
		vec y = _mm512_unpacklo_ps(w[2], w[3]) + _mm512_unpackhi_ps(w[2], w[3]);

		four[i] = _mm512_shuffle_ps(x, y, 0x44) + _mm512_shuffle_ps(x, y, 0xee);
	}
	a = _mm512_shuffle_f32x4(four[0], four[1], 0x88) + _mm512_shuffle_f32x4(four[0], four[1], 0xdd);
	b = _mm512_shuffle_f32x4(four[2], four[3], 0x88) + _mm512_shuffle_f32x4(four[2], four[3], 0xdd);
	return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}

#else

INLINE __m256i vec_first(size_t n)
{
	static const int32_t first[2 * VEC_LANES] = { -1, -1, -1, -1, -1, -1, -1, -1 };

	return _mm256_loadu_si256((const void *)(first + VEC_LANES - n));
}

INLINE vec vec_splat(float f)
{
	return _mm256_set1_ps(f);
}

INLINE vec vec_load_n(const float *p, size_t n)
{
	return n < VEC_LANES ? _mm256_maskload_ps(p, vec_first(n)) : _mm256_loadu_ps(p);
}

INLINE void vec_store_n(float *p, vec v, size_t n)
{
	if (n < VEC_LANES)
		_mm256_maskstore_ps(p, vec_first(n), v);
	else
		_mm256_storeu_ps(p, v);
}

INLINE vec vec_load_f16_n(const uint16_t *p, size_t n)
{
	uint16_t part[VEC_LANES] = { 0 };

	if (n >= VEC_LANES)
		return _mm256_cvtph_ps(load_128(p));
	memcpy(part, p, n * sizeof(*p));
	return _mm256_cvtph_ps(load_128(part));
}

INLINE vec vec_fma(vec a, vec b, vec c)
{
	return _mm256_fmadd_ps(a, b, c);
}

INLINE vec vec_fnma(vec a, vec b, vec c)
{
	return _mm256_fnmadd_ps(a, b, c);
}

INLINE vec vec_max(vec a, vec b)
{
	return _mm256_max_ps(a, b);
}

INLINE vec vec_min(vec a, vec b)
{
	return _mm256_min_ps(a, b);
}

INLINE vec vec_round(vec a)
{
	return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* In two steps, as neither 2^-149 nor 2^128 times 1 / 2 is a product with one normal number. */
INLINE vec vec_scale2(vec a, vec n)
{
	const __m256i bias = _mm256_set1_epi32(127);
	__m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1),
		rest = _mm256_sub_epi32(i, half);

	a *= _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
	return a * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
}

INLINE vec_pd vec_low_pd(vec a)
{
	return _mm256_cvtps_pd(_mm256_castps256_ps128(a));
}

INLINE vec_pd vec_high_pd(vec a)
{
	return _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
}

INLINE vec vec_rotate(vec v, size_t n)
{
	return _mm256_permutevar8x32_ps(v, _mm256_loadu_si256((const void *)(vec_lanes + n)));
}

INLINE vec_u32 vec_max_u32(vec_u32 a, vec_u32 b)
{
	return (vec_u32)_mm256_max_epu32((__m256i)a, (__m256i)b);
}

INLINE unsigned vec_equal_u32(vec_u32 a, vec_u32 b)
{
	return (unsigned)_mm256_movemask_ps((vec)(a == b));
}

INLINE vec vec_between(vec at, vec lo, vec hi, vec x, vec other)
{
	vec in = _mm256_and_ps(_mm256_cmp_ps(at, lo, _CMP_GE_OQ), _mm256_cmp_ps(at, hi, _CMP_LT_OQ));

	return _mm256_blendv_ps(other, x, in);
}

/* The halves of a vector do not mix in a shuffle: the middle pairs of floats change places after it. */
INLINE vec vec_swap_middle(vec v)
{
	return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
}

INLINE vec vec_even(vec a, vec b)
{
	return vec_swap_middle(_mm256_shuffle_ps(a, b, 0x88));
}

INLINE vec vec_odd(vec a, vec b)
{
	return vec_swap_middle(_mm256_shuffle_ps(a, b, 0xdd));
}

INLINE vec vec_turn_pairs(vec x, vec cs)
{
	return _mm256_fmaddsub_ps(x, _mm256_moveldup_ps(cs),
				  _mm256_permute_ps(x, 0xb1) * _mm256_movehdup_ps(cs));
}

INLINE vec vec_sum_each(const vec v[VEC_LANES])
{
	vec four[2];

	UNROLL
	for (size_t i = 0; i < 2; i++)
		four[i] = _mm256_hadd_ps(_mm256_hadd_ps(v[4 * i], v[4 * i + 1]),
					 _mm256_hadd_ps(v[4 * i + 2], v[4 * i + 3]));
	return _mm256_permute2f128_ps(four[0], four[1], 0x20) +
	       _mm256_permute2f128_ps(four[0], four[1], 0x31);
}

#endif

INLINE vec vec_load(const float *p)
{
	return vec_load_n(p, VEC_LANES);
}

INLINE void vec_store(float *p, vec v)
{
	vec_store_n(p, v, VEC_LANES);
}

INLINE float vec_sum(vec v)
{
	UNROLL
	for (size_t n = VEC_LANES / 2; n > 0; n /= 2)
		v += vec_rotate(v, n);
	return v[0];
}

INLINE float vec_hmax(vec v)
{
	UNROLL
	for (size_t n = VEC_LANES / 2; n > 0; n /= 2)
		v = vec_max(v, vec_rotate(v, n));
	return v[0];
}

/*
 * e^x = 2^n * e^r, |r| <= ln(2)/2. The Taylor polynomial of degree 7 is off by less than 0.346^8/8!
 * = 5e-9; the whole by about 1 ulp, and right down to the smallest denormal. What is not a number
 * passes through the clamps.
 */
INLINE vec vec_exp(vec x)
{
	static const float taylor[] = { 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
					1.0f / 6,    0.5f,       1.0f,       1.0f };
	vec n, r, p = vec_splat(taylor[0]);

	x = vec_max(vec_splat(-104.0f), vec_min(vec_splat(89.0f), x));
	n = vec_round(x * vec_splat(0x1.715476p+0f));
	r = vec_fnma(n, vec_splat(0x1.62e430p-1f), x); /* ln 2 in two parts */
	r = vec_fnma(n, vec_splat(-0x1.05c610p-29f), r);
	UNROLL
	for (size_t k = 1; k < sizeof(taylor) / sizeof(taylor[0]); k++)
		p = vec_fma(p, r, vec_splat(taylor[k]));
	return vec_scale2(p, n);
}

/* y = x * scale; y may be x. */
INLINE void vec_scale_row(float *y, const float *x, float scale, size_t n)
{
	for (size_t i = 0; i < n; i += VEC_LANES)
		vec_store_n(y + i, vec_load_n(x + i, n - i) * vec_splat(scale), n - i);
}

/* Rows whose inner products are made together: as many as fill a vector with their results. */
#define DOTS_LEFT (VEC_LANES / 2)

/* Elements [i, i + n) of the products below. */
INLINE void dots_add(vec acc[VEC_LANES], const float *const a[], const void *const b[], size_t i,
		     size_t n, bool f16, size_t n_a)
{
	UNROLL
	for (size_t r = 0; r < VEC_LANES / n_a; r++) {
		vec x = f16 ? vec_load_f16_n((const uint16_t *)b[r] + i, n)
			    : vec_load_n((const float *)b[r] + i, n);

		UNROLL
		for (size_t l = 0; l < n_a; l++)
			acc[r * n_a + l] = vec_fma(vec_load_n(a[l] + i, n), x, acc[r * n_a + l]);
	}
}

/*
 * Lane r * n_a + l of the result is <a[l], b[r]>, for l < n_a and r < VEC_LANES / n_a; n_a is a
 * power of two, up to DOTS_LEFT. b is f16 if f16, else f32.
 */
INLINE vec dots(const float *const a[], const void *const b[], size_t dim, bool f16, size_t n_a)
{
	vec acc[VEC_LANES];
	size_t i = 0;

	UNROLL
	for (size_t l = 0; l < VEC_LANES; l++)
		acc[l] = vec_splat(0.0f);
	for (; i + VEC_LANES <= dim; i += VEC_LANES)
		dots_add(acc, a, b, i, VEC_LANES, f16, n_a);
	if (i < dim)
		dots_add(acc, a, b, i, dim - i, f16, n_a);
	return vec_sum_each(acc);
}
