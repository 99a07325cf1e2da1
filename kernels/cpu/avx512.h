/* SPDX-License-Identifier: MIT */
/*
 * avx512.h: what the files of the AVX-512 table share: the entries for weights and activations,
 * each of the type that the table gives it, and how avx512-quant.c hands many columns to
 * avx512-wide.c.
 *
 * Owns nothing. Included, within their guard, by the files that are compiled for AVX-512 (F, BW,
 * DQ, VL, VNNI); brings the names of avx2.h along, because the table falls back on them.
 */
#pragma once

#include "kernels/cpu/avx2.h"

extern __typeof__(*cpu_kernels_ref.quantize[0]) avx512_quantize_bf16, avx512_quantize_q8_k;
extern __typeof__(*cpu_kernels_ref.matmul[0]) avx512_matmul_f32, avx512_matmul_f16, avx512_matmul_bf16,
	avx512_matmul_q8_0, avx512_matmul_q4_0, avx512_matmul_mxfp4, avx512_matmul_q4_k,
	avx512_matmul_q5_k, avx512_matmul_q6_k, avx512_matmul_q4_1, avx512_matmul_q5_0,
	avx512_matmul_q5_1, avx512_matmul_iq4_nl, avx512_matmul_q2_k, avx512_matmul_q3_k,
	avx512_matmul_iq2_xxs, avx512_matmul_iq2_xs, avx512_matmul_iq3_xxs, avx512_matmul_iq4_xs;

#define AVX512_WIDE 16 /* columns of a group: lanes of a vector */

/* The arguments of a product. */
struct avx512_product {
	size_t n;
	const uint8_t *w;
	size_t w_stride, n_rows;
	const uint8_t *act;
	size_t act_stride, n_cols;
	float *y;
	size_t y_stride;
};

/* All columns; a last group of fewer than sixteen takes as long as sixteen. */
void avx512_wide_q8_0(const struct avx512_product *p);
void avx512_wide_q4_0(const struct avx512_product *p);
void avx512_wide_mxfp4(const struct avx512_product *p);
void avx512_wide_q4_k(const struct avx512_product *p);
void avx512_wide_q5_k(const struct avx512_product *p);
void avx512_wide_q6_k(const struct avx512_product *p);
void avx512_wide_q4_1(const struct avx512_product *p);
void avx512_wide_q5_0(const struct avx512_product *p);
void avx512_wide_q5_1(const struct avx512_product *p);
void avx512_wide_iq4_nl(const struct avx512_product *p);
void avx512_wide_q2_k(const struct avx512_product *p);
void avx512_wide_q3_k(const struct avx512_product *p);
void avx512_wide_iq2_xxs(const struct avx512_product *p);
void avx512_wide_iq2_xs(const struct avx512_product *p);
void avx512_wide_iq3_xxs(const struct avx512_product *p);
void avx512_wide_iq4_xs(const struct avx512_product *p);
