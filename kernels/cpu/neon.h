/* SPDX-License-Identifier: MIT */
/*
 * neon.h: what the files for 64-bit ARM share: vectors of four floats, elements of the plain types,
 * and the entries of the two tables that more than one file needs.
 *
 * Owns nothing. Included, within their guard, by the files that are compiled for ARM. Families of
 * functions are written once, as always-inlined functions of a type or tile size that is a constant
 * where they are called; arrays of vectors indexed by unrolled loops live in registers.
 */
#pragma once

#include "kernels/cpu/cpu.h"

#include <arm_neon.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16") /* gcc -O2 keeps arrays of vectors in memory without it */
#endif

#define LANES 4 /* floats of a vector */

INLINE void zero(float32x4_t *v, size_t n)
{
	UNROLL
	for (size_t i = 0; i < n; i++)
		v[i] = vdupq_n_f32(0.0f);
}

INLINE float load_f32(const void *p)
{
	float f;

	memcpy(&f, p, sizeof(f));
	return f;
}

/* __fp16 is only how it is stored: the conversion is an instruction of every ARM. */
INLINE float load_f16(const void *p)
{
	__fp16 h;

	memcpy(&h, p, sizeof(h));
	return (float)h;
}

/* Four elements of F32, F16 or BF16, and one, from unaligned memory. */
INLINE float32x4_t load_4(enum quant_type type, const uint8_t *p)
{
	if (type == QUANT_F32)
		return vreinterpretq_f32_u8(vld1q_u8(p));
	if (type == QUANT_F16)
		return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
	return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

INLINE float load_1(enum quant_type type, const uint8_t *p)
{
	uint16_t h;

	if (type == QUANT_F32)
		return load_f32(p);
	if (type == QUANT_F16)
		return load_f16(p);
	memcpy(&h, p, sizeof(h));
	return bf16_to_float(h);
}

/* The address of element i. */
INLINE const uint8_t *elem(enum quant_type type, const void *p, size_t i)
{
	return (const uint8_t *)p + i * (type == QUANT_F32 ? sizeof(float) : sizeof(uint16_t));
}

/*
 * Entries of neon-quant.c, each of the type that the table gives it; the products, for baseline
 * NEON, are its own too.
 */
extern __typeof__(*cpu_kernels_ref.dequant[0]) neon_dequant_f32, neon_dequant_f16, neon_dequant_bf16,
	neon_dequant_q8_0, neon_dequant_q4_0, neon_dequant_q4_1, neon_dequant_q5_0,
	neon_dequant_q5_1, neon_dequant_mxfp4, neon_dequant_iq4_nl, neon_dequant_q2_k,
	neon_dequant_q3_k, neon_dequant_q4_k, neon_dequant_q5_k, neon_dequant_q6_k,
	neon_dequant_iq2_xxs, neon_dequant_iq2_xs, neon_dequant_iq3_xxs, neon_dequant_iq4_xs;
extern __typeof__(*cpu_kernels_ref.quantize[0]) neon_quantize_f32, neon_quantize_f16,
	neon_quantize_bf16, neon_quantize_q8_0, neon_quantize_q8_k;
extern __typeof__(*cpu_kernels_ref.matmul[0]) neon_matmul_f32, neon_matmul_f16, neon_matmul_bf16,
	neon_matmul_q8_0, neon_matmul_q4_0, neon_matmul_q4_1, neon_matmul_q5_0, neon_matmul_q5_1,
	neon_matmul_mxfp4, neon_matmul_iq4_nl, neon_matmul_q2_k, neon_matmul_q3_k, neon_matmul_q4_k,
	neon_matmul_q5_k, neon_matmul_q6_k, neon_matmul_iq2_xxs, neon_matmul_iq2_xs,
	neon_matmul_iq3_xxs, neon_matmul_iq4_xs;

/* Kernels on floats, of neon.c. */
extern __typeof__(*cpu_kernels_ref.rms_norm) neon_rms_norm;
extern __typeof__(*cpu_kernels_ref.l2_norm) neon_l2_norm;
extern __typeof__(*cpu_kernels_ref.add_scaled) neon_add_scaled;
extern __typeof__(*cpu_kernels_ref.silu_mul) neon_silu_mul;
extern __typeof__(*cpu_kernels_ref.swiglu_oai) neon_swiglu_oai;
extern __typeof__(*cpu_kernels_ref.sigmoid_mul) neon_sigmoid_mul;
extern __typeof__(*cpu_kernels_ref.softmax) neon_softmax;
extern __typeof__(*cpu_kernels_ref.rope_neox) neon_rope_neox;
extern __typeof__(*cpu_kernels_ref.rope_norm) neon_rope_norm;
extern __typeof__(*cpu_kernels_ref.top_k) neon_top_k;
extern __typeof__(*cpu_kernels_ref.attention) neon_attention;
extern __typeof__(*cpu_kernels_ref.f32_to_f16) neon_f32_to_f16;
extern __typeof__(*cpu_kernels_ref.f16_to_f32) neon_f16_to_f32;
extern __typeof__(*cpu_kernels_ref.conv_silu) neon_conv_silu;
extern __typeof__(*cpu_kernels_ref.delta_step) neon_delta_step;
extern __typeof__(*cpu_kernels_ref.delta_chunk) neon_delta_chunk;

/* What both tables have but for the products. */
#define NEON_CONVERSIONS \
	.dequant = { \
		[QUANT_F32] = neon_dequant_f32, \
		[QUANT_F16] = neon_dequant_f16, \
		[QUANT_BF16] = neon_dequant_bf16, \
		[QUANT_Q8_0] = neon_dequant_q8_0, \
		[QUANT_Q4_0] = neon_dequant_q4_0, \
		[QUANT_Q4_1] = neon_dequant_q4_1, \
		[QUANT_Q5_0] = neon_dequant_q5_0, \
		[QUANT_Q5_1] = neon_dequant_q5_1, \
		[QUANT_MXFP4] = neon_dequant_mxfp4, \
		[QUANT_IQ4_NL] = neon_dequant_iq4_nl, \
		[QUANT_Q2_K] = neon_dequant_q2_k, \
		[QUANT_Q3_K] = neon_dequant_q3_k, \
		[QUANT_Q4_K] = neon_dequant_q4_k, \
		[QUANT_Q5_K] = neon_dequant_q5_k, \
		[QUANT_Q6_K] = neon_dequant_q6_k, \
		[QUANT_IQ2_XXS] = neon_dequant_iq2_xxs, \
		[QUANT_IQ2_XS] = neon_dequant_iq2_xs, \
		[QUANT_IQ3_XXS] = neon_dequant_iq3_xxs, \
		[QUANT_IQ4_XS] = neon_dequant_iq4_xs, \
	}, \
	.quantize = { \
		[QUANT_F32] = neon_quantize_f32, \
		[QUANT_F16] = neon_quantize_f16, \
		[QUANT_BF16] = neon_quantize_bf16, \
		[QUANT_Q8_0] = neon_quantize_q8_0, \
		[QUANT_Q8_K] = neon_quantize_q8_k, \
	}
#define NEON_FLOATS                                                                                \
	.rms_norm = neon_rms_norm, .l2_norm = neon_l2_norm, .add_scaled = neon_add_scaled,         \
	.silu_mul = neon_silu_mul, .swiglu_oai = neon_swiglu_oai, .sigmoid_mul = neon_sigmoid_mul, \
	.softmax = neon_softmax, .rope_neox = neon_rope_neox, .rope_norm = neon_rope_norm,         \
	.top_k = neon_top_k, .attention = neon_attention, .f32_to_f16 = neon_f32_to_f16,           \
	.f16_to_f32 = neon_f16_to_f32, .conv_silu = neon_conv_silu, .delta_step = neon_delta_step, \
	.delta_chunk = neon_delta_chunk
