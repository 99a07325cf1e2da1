/* SPDX-License-Identifier: MIT */
/*
 * simd-table.h: the kernels on floats, of simd-*.h, for the file of a table: they are static there, in
 * vectors of its width.
 *
 * Owns nothing. Included by avx2.c and avx512.c alone.
 */
#pragma once

#include "kernels/cpu/simd-attention.h"
#include "kernels/cpu/simd-delta.h"
#include "kernels/cpu/simd-float.h"

#define SIMD_FLOATS                                                                               \
	.rms_norm = rms_norm, .l2_norm = l2_norm, .add_scaled = add_scaled, .silu_mul = silu_mul, \
	.swiglu_oai = swiglu_oai, .sigmoid_mul = sigmoid_mul, .softmax = softmax,                 \
	.rope_neox = rope_neox, .rope_norm = rope_norm, .top_k = top_k, .attention = attention,   \
	.f32_to_f16 = f32_to_f16, .f16_to_f32 = f16_to_f32, .conv_silu = conv_silu,               \
	.delta_step = delta_step, .delta_chunk = delta_chunk
