/* SPDX-License-Identifier: MIT */
/*
 * avx2.c: the CPU kernels for x86 with AVX2, FMA and F16C: the table, and its kernels on floats, which
 * are those of simd-*.h in vectors of eight.
 *
 * Owns no state. Called through its table only, from any thread, and only after dispatch.c has seen
 * that the CPU has the three. Refuses to know quantised types, which are avx2-quant.c's. Invariants: no
 * load assumes alignment; nothing is read or written beyond the lengths given.
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx2.h"
#include "kernels/cpu/simd-table.h"

const struct cpu_kernels cpu_kernels_avx2 = {
	.name = "avx2",
	.tiles = { .reg_cols = 4, .l1_rows = 16, .l2_cols = 128 },
	AVX2_DEQUANT,
	.quantize = {
		[QUANT_F32] = avx2_quantize_f32,
		[QUANT_F16] = avx2_quantize_f16,
		[QUANT_BF16] = avx2_quantize_bf16,
		[QUANT_Q8_0] = avx2_quantize_q8_0,
		[QUANT_Q8_K] = avx2_quantize_q8_k,
	},
	.matmul = {
		[QUANT_F32] = avx2_matmul_f32,
		[QUANT_F16] = avx2_matmul_f16,
		[QUANT_BF16] = avx2_matmul_bf16,
		[QUANT_Q8_0] = avx2_matmul_q8_0,
		[QUANT_Q4_0] = avx2_matmul_q4_0,
		[QUANT_Q4_K] = avx2_matmul_q4_k,
		[QUANT_Q5_K] = avx2_matmul_q5_k,
		[QUANT_Q6_K] = avx2_matmul_q6_k,
		[QUANT_MXFP4] = avx2_matmul_mxfp4,
		[QUANT_Q4_1] = avx2_matmul_q4_1,
		[QUANT_Q5_0] = avx2_matmul_q5_0,
		[QUANT_Q5_1] = avx2_matmul_q5_1,
		[QUANT_Q2_K] = avx2_matmul_q2_k,
		[QUANT_Q3_K] = avx2_matmul_q3_k,
		[QUANT_IQ2_XXS] = avx2_matmul_iq2_xxs,
		[QUANT_IQ2_XS] = avx2_matmul_iq2_xs,
		[QUANT_IQ3_XXS] = avx2_matmul_iq3_xxs,
		[QUANT_IQ4_NL] = avx2_matmul_iq4_nl,
		[QUANT_IQ4_XS] = avx2_matmul_iq4_xs,
	},
	SIMD_FLOATS,
};

#endif
