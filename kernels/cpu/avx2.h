/* SPDX-License-Identifier: MIT */
/*
 * avx2.h: what avx2.c and avx2-quant.c share: vectors of eight floats, elements of the plain types,
 * and the entries of the table that avx2-quant.c defines.
 *
 * Owns nothing. Included, within their guard, by the files that are compiled for AVX2, FMA and F16C or more; the table of AVX-512 takes from
 * here what it has nothing better for. What only one file uses stays there.
 *
 * Families of functions are written once, as always-inlined functions of a type or tile size that
 * is a constant where they are called; arrays of vectors indexed by unrolled loops live in
 * registers.
 */
#pragma once

#include "kernels/cpu/cpu.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16") /* gcc -O2 keeps arrays of vectors in memory without it */
#endif

#define LANES 8 /* floats of a vector */

INLINE __m256 load_ps(const float *p)
{
	return _mm256_loadu_ps(p);
}

INLINE void store_ps(float *p, __m256 v)
{
	_mm256_storeu_ps(p, v);
}

INLINE __m256 splat(float f)
{
	return _mm256_set1_ps(f);
}

INLINE __m128i load_128(const void *p)
{
	return _mm_loadu_si128(p);
}

INLINE __m256i load_256(const void *p)
{
	return _mm256_loadu_si256(p);
}

INLINE uint32_t load_u32(const void *p)
{
	uint32_t u;

	memcpy(&u, p, sizeof(u));
	return u;
}

INLINE float load_f32(const void *p)
{
	float f;

	memcpy(&f, p, sizeof(f));
	return f;
}

INLINE void zero(__m256 *v, size_t n)
{
	UNROLL
	for (size_t i = 0; i < n; i++)
		v[i] = _mm256_setzero_ps();
}

INLINE float hsum(__m256 v)
{
	__m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

	s = _mm_add_ps(s, _mm_movehl_ps(s, s));
	return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* Eight elements of F32, F16 or BF16, and one, from unaligned memory. */
INLINE __m256 load_8(enum quant_type type, const void *p)
{
	if (type == QUANT_F32)
		return _mm256_loadu_ps(p);
	if (type == QUANT_F16)
		return _mm256_cvtph_ps(load_128(p));
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}

INLINE float load_1(enum quant_type type, const void *p)
{
	uint16_t h;

	if (type == QUANT_F32)
		return load_f32(p);
	memcpy(&h, p, sizeof(h));
	return type == QUANT_F16 ? _cvtsh_ss(h) : bf16_to_float(h);
}

/* Asks for bytes that are used later; whether they exist does not matter. */
INLINE void fetch(const uint8_t *p, size_t bytes)
{
	UNROLL
	for (size_t i = 0; i < bytes; i += 64)
		__builtin_prefetch(p + i);
}

/* The address of element i. */
INLINE const uint8_t *elem(enum quant_type type, const void *p, size_t i)
{
	return (const uint8_t *)p + i * (type == QUANT_F32 ? sizeof(float) : sizeof(uint16_t));
}

/* Entries of the table for weights and activations, each of the type that the table gives it. */
extern __typeof__(*cpu_kernels_ref.dequant[0]) avx2_dequant_f32, avx2_dequant_f16, avx2_dequant_bf16,
	avx2_dequant_q8_0, avx2_dequant_q4_0, avx2_dequant_q4_k, avx2_dequant_q5_k,
	avx2_dequant_q6_k, avx2_dequant_mxfp4, avx2_dequant_q4_1, avx2_dequant_q5_0,
	avx2_dequant_q5_1, avx2_dequant_q2_k, avx2_dequant_q3_k, avx2_dequant_iq2_xxs,
	avx2_dequant_iq2_xs, avx2_dequant_iq3_xxs, avx2_dequant_iq4_nl, avx2_dequant_iq4_xs;
extern __typeof__(*cpu_kernels_ref.quantize[0]) avx2_quantize_f32, avx2_quantize_f16,
	avx2_quantize_bf16, avx2_quantize_q8_0, avx2_quantize_q8_k;
extern __typeof__(*cpu_kernels_ref.matmul[0]) avx2_matmul_f32, avx2_matmul_f16, avx2_matmul_bf16,
	avx2_matmul_q8_0, avx2_matmul_q4_0, avx2_matmul_q4_k, avx2_matmul_q5_k, avx2_matmul_q6_k,
	avx2_matmul_mxfp4, avx2_matmul_q4_1, avx2_matmul_q5_0, avx2_matmul_q5_1, avx2_matmul_q2_k,
	avx2_matmul_q3_k, avx2_matmul_iq2_xxs, avx2_matmul_iq2_xs, avx2_matmul_iq3_xxs,
	avx2_matmul_iq4_nl, avx2_matmul_iq4_xs;

/* What both tables have for .dequant. */
#define AVX2_DEQUANT                                                                          \
	.dequant = {                                                                          \
		[QUANT_F32] = avx2_dequant_f32,         [QUANT_F16] = avx2_dequant_f16,       \
		[QUANT_BF16] = avx2_dequant_bf16,       [QUANT_Q8_0] = avx2_dequant_q8_0,     \
		[QUANT_Q4_0] = avx2_dequant_q4_0,       [QUANT_Q4_K] = avx2_dequant_q4_k,     \
		[QUANT_Q5_K] = avx2_dequant_q5_k,       [QUANT_Q6_K] = avx2_dequant_q6_k,     \
		[QUANT_MXFP4] = avx2_dequant_mxfp4,     [QUANT_Q4_1] = avx2_dequant_q4_1,     \
		[QUANT_Q5_0] = avx2_dequant_q5_0,       [QUANT_Q5_1] = avx2_dequant_q5_1,     \
		[QUANT_Q2_K] = avx2_dequant_q2_k,       [QUANT_Q3_K] = avx2_dequant_q3_k,     \
		[QUANT_IQ2_XXS] = avx2_dequant_iq2_xxs, [QUANT_IQ2_XS] = avx2_dequant_iq2_xs, \
		[QUANT_IQ3_XXS] = avx2_dequant_iq3_xxs, [QUANT_IQ4_NL] = avx2_dequant_iq4_nl, \
		[QUANT_IQ4_XS] = avx2_dequant_iq4_xs,                                         \
	}
