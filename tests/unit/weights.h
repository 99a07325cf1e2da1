/* SPDX-License-Identifier: MIT */
/*
 * weights.h: what test-cuda-matmul.c and test-cuda-moe.c share: random weights of every type that
 * the card computes with, and how far a product of them may be from the reference.
 *
 * Bound: a product is within REL of the sum of the magnitudes of its terms: that is 168 roundings,
 * and the longest chain of additions in those tests has about 100 links. Terms are those of the
 * format, so an offset (dmin) counts by itself.
 */
#pragma once

#include "tests/unit/kernels.h"

#include <math.h>

#define REL      1e-5
#define DENORMAL 1e-40 /* what denormal products may lose */

static const struct weight_type {
	enum quant_type type;
	const char *name;
	size_t lengths[4]; /* of rows: one block, three, more than a stage of shared memory */
} types[] = {
	{ QUANT_Q4_K, "q4_k", { 256, 768, 2304 } },  { QUANT_Q5_K, "q5_k", { 256, 768, 2304 } },
	{ QUANT_Q6_K, "q6_k", { 256, 768, 2304 } },  { QUANT_Q8_0, "q8_0", { 32, 96, 2144 } },
	{ QUANT_Q4_0, "q4_0", { 32, 96, 2144 } },    { QUANT_MXFP4, "mxfp4", { 32, 96, 2144 } },
	{ QUANT_F16, "f16", { 1, 100, 256, 2055 } }, { QUANT_BF16, "bf16", { 1, 100, 256, 2055 } },
	{ QUANT_F32, "f32", { 1, 100, 256, 2055 } },
};

/* Scales as they are in files, or as nobody wants them. */
static inline uint16_t random_scale(bool hostile)
{
	static const uint16_t scales[] = { 0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff };

	return hostile ? scales[random_u32() % ARRAY_SIZE(scales)]
		       : float_to_f16(random_float() * 0.01f);
}

/* Byte 0 or 255 of a whole field now and then, when hostile. */
static inline void random_bytes(void *p, size_t n, bool hostile)
{
	uint32_t kind = hostile ? random_u32() % 4 : 3;

	for (size_t i = 0; i < n; i++)
		((uint8_t *)p)[i] = (uint8_t)(kind == 0 ? 0 : kind == 1 ? 255 : random_u32());
}

static inline void random_block(enum quant_type type, uint8_t *block, bool hostile)
{
	uint16_t d = random_scale(hostile), dmin = random_scale(hostile);
	float f = hostile ? ldexpf(random_float(), (int)(random_u32() % 280) - 200) : random_float();

	random_bytes(block, quant_info(type)->block_bytes, hostile);
	if (quant_info(type)->block_elems > 1 && type != QUANT_MXFP4) {
		memcpy(block + scale_at(type), &d, sizeof(d));
		if (min_at(type))
			memcpy(block + min_at(type), &dmin, sizeof(dmin));
	}
	switch (type) {
	case QUANT_Q4_K:
	case QUANT_Q5_K: random_bytes(block + 4, 12, hostile); break;
	case QUANT_Q6_K:
		random_bytes(block + offsetof(struct block_q6_k, scales), QK_K / 16, hostile);
		break;
	case QUANT_MXFP4:
		block[0] = (uint8_t)(hostile ? random_u32() % (random_u32() % 2 ? 3 : 230)
					     : 115 + random_u32() % 10);
		break;
	case QUANT_F32: memcpy(block, &f, sizeof(f)); break;
	case QUANT_F16:
		d = hostile ? d : float_to_f16(f);
		memcpy(block, &d, sizeof(d));
		break;
	case QUANT_BF16:
		d = float_to_bf16(f);
		memcpy(block, &d, sizeof(d));
		break;
	default: break;
	}
}

static inline uint8_t *new_weights(enum quant_type type, size_t n, size_t n_rows, bool hostile)
{
	size_t each = quant_info(type)->block_bytes, bytes = n_rows * quant_row_bytes(type, n);
	uint8_t *w = new_bytes(bytes);

	for (size_t i = 0; i < bytes; i += each)
		random_block(type, w + i, hostile);
	return w;
}

static inline uint8_t *new_activations(enum quant_type form, const float *x, size_t n, size_t n_cols)
{
	size_t stride = quant_row_bytes(form, n);
	uint8_t *act = new_bytes(n_cols * stride);

	for (size_t c = 0; c < n_cols; c++)
		cpu_kernels_ref.quantize[form](x + c * n, act + c * stride, n);
	return act;
}

static inline double activation(enum quant_type form, const uint8_t *act, size_t i)
{
	struct block_q8_k k;
	struct block_q8_0 q;
	uint16_t h;
	float f;

	switch (form) {
	case QUANT_Q8_K:
		memcpy(&k, act + i / QK_K * sizeof(k), sizeof(k));
		return (double)k.d * k.qs[i % QK_K];
	case QUANT_Q8_0:
		memcpy(&q, act + i / QK_0 * sizeof(q), sizeof(q));
		return (double)f16_to_float(q.d) * q.qs[i % QK_0];
	case QUANT_F32: memcpy(&f, act + i * sizeof(f), sizeof(f)); return (double)f;
	default:
		memcpy(&h, act + i * sizeof(h), sizeof(h));
		return (double)(form == QUANT_F16 ? f16_to_float(h) : bf16_to_float(h));
	}
}

/* Sums of the terms' magnitudes, like a product: y[c * n_rows + r]. */
static inline double *new_magnitudes(enum quant_type type, const uint8_t *w, size_t n,
				     size_t n_rows, const uint8_t *act, size_t n_cols)
{
	enum quant_type form = cpu_act_type(type);
	size_t stride = quant_row_bytes(type, n), act_stride = quant_row_bytes(form, n);
	size_t each = quant_info(type)->block_bytes;
	_cleanup_(freep) float *value = new_floats(n), *scaled = new_floats(n);
	_cleanup_(freep) uint8_t *row = new_bytes(stride);
	double *y = new_bytes(n_rows * n_cols * sizeof(*y));

	for (size_t r = 0; r < n_rows; r++) {
		memcpy(row, w + r * stride, stride);
		cpu_kernels_ref.dequant[type](row, value, n);
		if (min_at(type))
			for (size_t i = 0; i < stride; i += each)
				memset(row + i + min_at(type), 0, 2);
		cpu_kernels_ref.dequant[type](row, scaled, n);
		for (size_t c = 0; c < n_cols; c++) {
			double *sum = &y[c * n_rows + r];

			*sum = 0;
			for (size_t i = 0; i < n; i++)
				*sum += (fabs((double)scaled[i]) +
					 fabs((double)scaled[i] - (double)value[i])) *
					fabs(activation(form, act + c * act_stride, i));
		}
	}
	return y;
}

static inline void assert_near(const char *what, size_t c, size_t r, float got, double want, double bound)
{
	if ((double)got == want || fabs((double)got - want) <= bound + DENORMAL)
		return;
	fail_msg("%s: column %zu, row %zu: %.9g is not within %.3g of %.9g", what, c, r,
		 (double)got, bound, want);
}
