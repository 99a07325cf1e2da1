/* SPDX-License-Identifier: MIT */
/*
 * avx512.c: the CPU kernels for x86 with AVX-512 (F, BW, DQ, VL, VNNI): the table, and its kernels on
 * floats, which are those of simd-*.h in vectors of sixteen.
 *
 * Owns no state. Called through its table only, from any thread, and only after dispatch.c has seen
 * that the CPU has all of them. Refuses to know quantised types, which are avx512-quant.c's.
 * Invariants: no load assumes alignment; nothing is read or written beyond the lengths given.
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/simd-table.h"

const struct cpu_kernels cpu_kernels_avx512 = {
	.name = "avx512",
	.tiles = { .reg_cols = 4, .l1_rows = 16, .l2_cols = 128 },
	AVX2_DEQUANT,
	.quantize = {
		[QUANT_F32] = avx2_quantize_f32,
		[QUANT_F16] = avx2_quantize_f16,
		[QUANT_BF16] = avx512_quantize_bf16,
		[QUANT_Q8_0] = avx2_quantize_q8_0,
		[QUANT_Q8_K] = avx512_quantize_q8_k,
	},
	.matmul = {
		[QUANT_F32] = avx512_matmul_f32,
		[QUANT_F16] = avx512_matmul_f16,
		[QUANT_BF16] = avx512_matmul_bf16,
		[QUANT_Q8_0] = avx512_matmul_q8_0,
		[QUANT_Q4_0] = avx512_matmul_q4_0,
		[QUANT_Q4_K] = avx512_matmul_q4_k,
		[QUANT_Q5_K] = avx512_matmul_q5_k,
		[QUANT_Q6_K] = avx512_matmul_q6_k,
		[QUANT_MXFP4] = avx512_matmul_mxfp4,
		[QUANT_Q4_1] = avx512_matmul_q4_1,
		[QUANT_Q5_0] = avx512_matmul_q5_0,
		[QUANT_Q5_1] = avx512_matmul_q5_1,
		[QUANT_Q2_K] = avx512_matmul_q2_k,
		[QUANT_Q3_K] = avx512_matmul_q3_k,
		[QUANT_IQ2_XXS] = avx512_matmul_iq2_xxs,
		[QUANT_IQ2_XS] = avx512_matmul_iq2_xs,
		[QUANT_IQ3_XXS] = avx512_matmul_iq3_xxs,
		[QUANT_IQ4_NL] = avx512_matmul_iq4_nl,
		[QUANT_IQ4_XS] = avx512_matmul_iq4_xs,
	},
	SIMD_FLOATS,
};

#endif
