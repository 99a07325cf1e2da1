/* SPDX-License-Identifier: MIT */
/*
 * neon-dotprod.c: the table for 64-bit ARM whose CPU has the dot product instructions: the products
 * of quantised types, and all else as neon.c has it.
 *
 * Owns no state. Called through its table only, from any thread, and only after dispatch.c has seen
 * that the CPU has them. The one file for ARM that is compiled for more than the baseline.
 */
#if defined(__aarch64__)

#include "kernels/cpu/neon-dot.h"

DEFINE_PRODUCTS(static, matmul)

const struct cpu_kernels cpu_kernels_dotprod = {
	.name = "dotprod",
	.tiles = { .reg_cols = 4, .l1_rows = 16, .l2_cols = 128 },
	NEON_CONVERSIONS,
	.matmul = {
		[QUANT_F32] = neon_matmul_f32,
		[QUANT_F16] = neon_matmul_f16,
		[QUANT_BF16] = neon_matmul_bf16,
		[QUANT_Q8_0] = matmul_q8_0,
		[QUANT_Q4_0] = matmul_q4_0,
		[QUANT_Q4_1] = matmul_q4_1,
		[QUANT_Q5_0] = matmul_q5_0,
		[QUANT_Q5_1] = matmul_q5_1,
		[QUANT_MXFP4] = matmul_mxfp4,
		[QUANT_IQ4_NL] = matmul_iq4_nl,
		[QUANT_Q2_K] = matmul_q2_k,
		[QUANT_Q3_K] = matmul_q3_k,
		[QUANT_Q4_K] = matmul_q4_k,
		[QUANT_Q5_K] = matmul_q5_k,
		[QUANT_Q6_K] = matmul_q6_k,
		[QUANT_IQ2_XXS] = matmul_iq2_xxs,
		[QUANT_IQ2_XS] = matmul_iq2_xs,
		[QUANT_IQ3_XXS] = matmul_iq3_xxs,
		[QUANT_IQ4_XS] = matmul_iq4_xs,
	},
	NEON_FLOATS,
};

#endif
