/* SPDX-License-Identifier: MIT */
/*
 * ref.h: what ref.c and ref-quant.c share: the entries of the table that ref-quant.c defines.
 *
 * Owns nothing. Included by these two files alone.
 */
#pragma once

#include "kernels/cpu/cpu.h"

/* Element i of an unaligned row of F32, F16 or BF16. */
float ref_load_elem(enum quant_type type, const void *row, size_t i);

extern __typeof__(*cpu_kernels_ref.dequant[0]) ref_dequant_f32, ref_dequant_f16, ref_dequant_bf16,
	ref_dequant_q8_0, ref_dequant_q4_0, ref_dequant_q4_k, ref_dequant_q5_k, ref_dequant_q6_k,
	ref_dequant_mxfp4, ref_dequant_q4_1, ref_dequant_q5_0, ref_dequant_q5_1, ref_dequant_q2_k,
	ref_dequant_q3_k, ref_dequant_iq2_xxs, ref_dequant_iq2_xs, ref_dequant_iq3_xxs,
	ref_dequant_iq4_nl, ref_dequant_iq4_xs;
extern __typeof__(*cpu_kernels_ref.quantize[0]) ref_quantize_f32, ref_quantize_f16,
	ref_quantize_bf16, ref_quantize_q8_0, ref_quantize_q8_k;
extern __typeof__(*cpu_kernels_ref.matmul[0]) ref_matmul_f32, ref_matmul_f16, ref_matmul_bf16,
	ref_matmul_q8_0, ref_matmul_q4_0, ref_matmul_q4_k, ref_matmul_q5_k, ref_matmul_q6_k,
	ref_matmul_mxfp4, ref_matmul_q4_1, ref_matmul_q5_0, ref_matmul_q5_1, ref_matmul_q2_k,
	ref_matmul_q3_k, ref_matmul_iq2_xxs, ref_matmul_iq2_xs, ref_matmul_iq3_xxs,
	ref_matmul_iq4_nl, ref_matmul_iq4_xs;
