/* SPDX-License-Identifier: MIT */
/*
 * avx512.c: the CPU kernels for x86 with AVX-512 (F, BW, DQ, VL, VNNI): the table, and its kernels on
 * floats. What wider registers do not make faster is that of AVX2.
 *
 * Owns no state. Called through its table only, from any thread, and only after dispatch.c has seen
 * that the CPU has all of them. Refuses to know quantised types, which are avx512-quant.c's, and
 * formulas in prose: ref.c describes them. Invariants: no load assumes alignment; nothing is read or
 * written beyond the lengths given.
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx2.h"

const struct cpu_kernels cpu_kernels_avx512 = {
	.name = "avx512",
	.tiles = { .reg_cols = 4, .l1_rows = 16, .l2_cols = 128 },
	.dequant = {
		[QUANT_F32] = avx2_dequant_f32,
		[QUANT_F16] = avx2_dequant_f16,
		[QUANT_BF16] = avx2_dequant_bf16,
		[QUANT_Q8_0] = avx2_dequant_q8_0,
		[QUANT_Q4_0] = avx2_dequant_q4_0,
		[QUANT_Q4_K] = avx2_dequant_q4_k,
		[QUANT_Q5_K] = avx2_dequant_q5_k,
		[QUANT_Q6_K] = avx2_dequant_q6_k,
		[QUANT_MXFP4] = avx2_dequant_mxfp4,
	},
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
	},
	.rms_norm = avx2_rms_norm,
	.l2_norm = avx2_l2_norm,
	.add_scaled = avx2_add_scaled,
	.silu_mul = avx2_silu_mul,
	.swiglu_oai = avx2_swiglu_oai,
	.sigmoid_mul = avx2_sigmoid_mul,
	.softmax = avx2_softmax,
	.rope_neox = avx2_rope_neox,
	.rope_norm = avx2_rope_norm,
	.top_k = avx2_top_k,
	.attention = avx2_attention,
	.f32_to_f16 = avx2_f32_to_f16,
	.f16_to_f32 = avx2_f16_to_f32,
	.conv_silu = avx2_conv_silu,
	.delta_step = avx2_delta_step,
	.delta_chunk = avx2_delta_chunk,
};

#endif
