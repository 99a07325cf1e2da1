/* SPDX-License-Identifier: MIT */
/*
 * neon-dot.h: products of weights and activations for 64-bit ARM, written once for two instruction
 * sets: the file that includes this makes the functions of its table with DEFINE_PRODUCTS, and how
 * it is compiled decides whether they use the dot product instructions.
 *
 * Owns nothing. Included by neon-quant.c and neon-dotprod.c. Refuses to know how a type is packed:
 * neon-unpack.h does. Invariants: integer sums are exact for every content of a block, hostile ones
 * included; what is computed for a column depends on n alone, whatever columns and rows are beside
 * it.
 */
#pragma once

#include "daemon/base.h"
#include "kernels/cpu/neon-unpack.h"

/*
 * Columns that share what is unpacked of a weight: their sums and its 64 elements fit into 32
 * registers.
 */
#define MAX_COLS 4

struct cols {
	const uint8_t *act; /* column c starts at act + c * stride */
	size_t stride, n;
	float *y; /* its result goes to y[c * y_stride] */
	size_t y_stride;
};

/* `chains` partial sums of each column are acc[c], acc[n + c], ... */
INLINE void store_sums(const struct cols *cols, const float32x4_t *acc, size_t chains)
{
	UNROLL
	for (size_t c = 0; c < cols->n; c++) {
		float32x4_t sum = acc[c];

		UNROLL
		for (size_t j = 1; j < chains; j++)
			sum = vaddq_f32(sum, acc[j * cols->n + c]);
		cols->y[c * cols->y_stride] = vaddvq_f32(sum);
	}
}

#define PLAIN_CHAINS 4 /* enough to hide the latency of FMA */

INLINE void dot_plain(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	float32x4_t acc[MAX_COLS * PLAIN_CHAINS];
	size_t i = 0;

	zero(acc, cols->n * PLAIN_CHAINS);
	for (; i + PLAIN_CHAINS * LANES <= n; i += PLAIN_CHAINS * LANES) {
		UNROLL
		for (size_t j = 0; j < PLAIN_CHAINS; j++) {
			float32x4_t weight = load_4(type, elem(type, w, i + j * LANES));

			UNROLL
			for (size_t c = 0; c < cols->n; c++) {
				const uint8_t *x =
					elem(type, cols->act + c * cols->stride, i + j * LANES);
				size_t a = j * cols->n + c;

				acc[a] = vfmaq_f32(acc[a], weight, load_4(type, x));
			}
		}
	}
	store_sums(cols, acc, PLAIN_CHAINS);
	for (; i < n; i++)
		for (size_t c = 0; c < cols->n; c++)
			cols->y[c * cols->y_stride] +=
				load_1(type, elem(type, w, i)) *
				load_1(type, elem(type, cols->act + c * cols->stride, i));
}

/*
 * Sixteen products more in four sums. Without the instruction two products are added in 16 bits:
 * activations are within -127..127 by construction and weights at least -128, so that is at most 2
 * * 128 * 127 = 32512 < 32767.
 */
INLINE int32x4_t dot_16(int32x4_t sum, int8x16_t q, int8x16_t x)
{
#if defined(__ARM_FEATURE_DOTPROD)
	return vdotq_s32(sum, q, x);
#else
	int16x8_t pairs = vmull_s8(vget_low_s8(q), vget_low_s8(x));

	return vpadalq_s16(sum, vmlal_high_s8(pairs, q, x));
#endif
}

/* One block of 32 elements: acc[c] += d * dx * <q, qx> + m * dx * sum of qx. */
INLINE void dot_block_32(enum quant_type type, const uint8_t *w, const uint8_t *act,
			 const struct cols *cols, float32x4_t *acc)
{
	struct scale_32 s = scale_32(type, w);
	int8x16_t q[2];

	unpack_32(type, w, q);
	UNROLL
	for (size_t c = 0; c < cols->n; c++) {
		const uint8_t *x = act + c * cols->stride, *qs = x + offsetof(struct block_q8_0, qs);
		int8x16_t x0 = vreinterpretq_s8_u8(vld1q_u8(qs)),
			  x1 = vreinterpretq_s8_u8(vld1q_u8(qs + 16));
		float dx = load_f16(x + offsetof(struct block_q8_0, d));
		int32x4_t sum = dot_16(dot_16(vdupq_n_s32(0), q[0], x0), q[1], x1);

		acc[c] = vfmaq_n_f32(acc[c], vcvtq_f32_s32(sum), s.d * dx);
		if (has_min(type)) {
			const int8x16_t one = vdupq_n_s8(1);

			sum = dot_16(dot_16(vdupq_n_s32(0), one, x0), one, x1);
			acc[c] = vfmaq_n_f32(acc[c], vcvtq_f32_s32(sum), s.m * dx);
		}
	}
}

/* Two chains of sums, for blocks of even and of odd number. */
INLINE void dot_32(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	const size_t w_next = block_bytes(type), x_next = sizeof(struct block_q8_0);
	const uint8_t *x = cols->act;
	float32x4_t acc[2 * MAX_COLS];
	size_t i = 0;

	zero(acc, 2 * cols->n);
	for (; i + 2 <= n / QK_0; i += 2, w += 2 * w_next, x += 2 * x_next) {
		dot_block_32(type, w, x, cols, acc);
		dot_block_32(type, w + w_next, x + x_next, cols, acc + cols->n);
	}
	if (i < n / QK_0)
		dot_block_32(type, w, x, cols, acc);
	store_sums(cols, acc, 2);
}

/*
 * Four sub-blocks of 16 or two of 32: sum[c] += scale * <q, qx>. The sum of 256 products of 8 bits,
 * times a scale of 8 bits, is at most 256 * 127 * 2^14 < 2^29.
 */
INLINE void dot_64(enum quant_type type, const int8x16_t q[4], const int32_t *scale,
		   const uint8_t *act, const struct cols *cols, int32x4_t *sum)
{
	const size_t step = sub_block(type) / 16;

	UNROLL
	for (size_t c = 0; c < cols->n; c++) {
		UNROLL
		for (size_t k = 0; k < 4; k += step) {
			int32x4_t part = vdupq_n_s32(0);

			UNROLL
			for (size_t l = k; l < k + step; l++)
				part = dot_16(part, q[l],
					      vreinterpretq_s8_u8(
						      vld1q_u8(act + c * cols->stride + 16 * l)));
			sum[c] = vmlaq_n_s32(sum[c], part, scale[k / step]);
		}
	}
}

/* The sum of min * bsum over a super-block, in four parts; at most 16 * 63 * 16 * 127 < 2^22. */
INLINE int32x4_t dot_mins(const struct super *b, const uint8_t *bsums)
{
	int16x8_t s0 = vreinterpretq_s16_u8(vld1q_u8(bsums)),
		  s1 = vreinterpretq_s16_u8(vld1q_u8(bsums + 16));
	int32x4_t sum = vmull_s16(vget_low_s16(b->min[0]), vget_low_s16(s0));

	sum = vmlal_high_s16(sum, b->min[0], s0);
	sum = vmlal_s16(sum, vget_low_s16(b->min[1]), vget_low_s16(s1));
	return vmlal_high_s16(sum, b->min[1], s1);
}

INLINE void dot_super(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	const uint8_t *x = cols->act;
	float32x4_t acc[MAX_COLS];

	zero(acc, cols->n);
	for (size_t i = 0; i < n; i += QK_K, w += block_bytes(type), x += sizeof(struct block_q8_k)) {
		struct super b = unpack_super(type, w);
		int32x4_t sum[MAX_COLS];

		UNROLL
		for (size_t c = 0; c < cols->n; c++)
			sum[c] = vdupq_n_s32(0);
		for (size_t j = 0; j < 4; j++) {
			int8x16_t q[4];

			unpack_64(type, w, j, q);
			dot_64(type, q, b.scale + 64 / sub_block(type) * j,
			       x + offsetof(struct block_q8_k, qs) + 64 * j, cols, sum);
		}
		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			const uint8_t *xc = x + c * cols->stride;
			float dx = load_f32(xc + offsetof(struct block_q8_k, d));

			acc[c] = vfmaq_n_f32(acc[c], vcvtq_f32_s32(sum[c]), b.d * dx);
			if (has_min(type)) {
				int32x4_t mins = dot_mins(&b, xc + offsetof(struct block_q8_k, bsums));

				acc[c] = vfmaq_n_f32(acc[c], vcvtq_f32_s32(mins), -b.dmin * dx);
			}
		}
	}
	store_sums(cols, acc, 1);
}

/* A few rows with a few columns. */
INLINE void dot_rows(enum quant_type type, size_t n, const uint8_t *w, size_t w_stride, size_t n_rows,
		     const uint8_t *act, size_t act_stride, size_t n_cols, float *y, size_t y_stride)
{
	for (size_t r = 0; r < n_rows; r++, w += w_stride) {
		const struct cols cols = { act, act_stride, n_cols, y + r, y_stride };

		if (is_plain(type))
			dot_plain(type, n, w, &cols);
		else if (is_32(type))
			dot_32(type, n, w, &cols);
		else
			dot_super(type, n, w, &cols);
	}
}

/*
 * A few rows stay in the first cache while all columns pass by, in groups that share the unpacking.
 * With one column this is one pass over the weights in order.
 */
INLINE void matmul(enum quant_type type, size_t n, const uint8_t *w, size_t w_stride, size_t n_rows,
		   const uint8_t *act, size_t act_stride, size_t n_cols, float *y, size_t y_stride,
		   const struct cpu_tiles *tiles)
{
	size_t l1_rows, reg_cols, group;

	tiles = tiles ? tiles : &cpu_kernels_neon.tiles;
	l1_rows = tiles->l1_rows;
	reg_cols = MIN((size_t)tiles->reg_cols, (size_t)MAX_COLS);
	for (size_t r = 0; r < n_rows; r += l1_rows, w += l1_rows * w_stride) {
		size_t rows = MIN(l1_rows, n_rows - r);

		for (size_t c = 0; c < n_cols; c += group) {
			const uint8_t *x = act + c * act_stride;
			float *out = y + c * y_stride + r;

			group = MIN(reg_cols, n_cols - c);
			if (group == 4)
				dot_rows(type, n, w, w_stride, rows, x, act_stride, 4, out, y_stride);
			else if (group == 3)
				dot_rows(type, n, w, w_stride, rows, x, act_stride, 3, out, y_stride);
			else if (group == 2)
				dot_rows(type, n, w, w_stride, rows, x, act_stride, 2, out, y_stride);
			else
				dot_rows(type, n, w, w_stride, rows, x, act_stride, 1, out, y_stride);
		}
	}
}

/* The table wants functions of one type. */
#define DEFINE_PRODUCT(storage, name, type)                                                        \
	storage void name(size_t n, const void *w, size_t w_stride, size_t n_rows,                 \
			  const void *act, size_t act_stride, size_t n_cols, float *y,             \
			  size_t y_stride, const struct cpu_tiles *tiles)                          \
	{                                                                                          \
		matmul(type, n, w, w_stride, n_rows, act, act_stride, n_cols, y, y_stride, tiles); \
	}

/* Those that the instructions matter for. */
#define DEFINE_PRODUCTS(storage, prefix)                         \
	DEFINE_PRODUCT(storage, prefix##_q8_0, QUANT_Q8_0)       \
	DEFINE_PRODUCT(storage, prefix##_q4_0, QUANT_Q4_0)       \
	DEFINE_PRODUCT(storage, prefix##_q4_1, QUANT_Q4_1)       \
	DEFINE_PRODUCT(storage, prefix##_q5_0, QUANT_Q5_0)       \
	DEFINE_PRODUCT(storage, prefix##_q5_1, QUANT_Q5_1)       \
	DEFINE_PRODUCT(storage, prefix##_mxfp4, QUANT_MXFP4)     \
	DEFINE_PRODUCT(storage, prefix##_iq4_nl, QUANT_IQ4_NL)   \
	DEFINE_PRODUCT(storage, prefix##_q2_k, QUANT_Q2_K)       \
	DEFINE_PRODUCT(storage, prefix##_q3_k, QUANT_Q3_K)       \
	DEFINE_PRODUCT(storage, prefix##_q4_k, QUANT_Q4_K)       \
	DEFINE_PRODUCT(storage, prefix##_q5_k, QUANT_Q5_K)       \
	DEFINE_PRODUCT(storage, prefix##_q6_k, QUANT_Q6_K)       \
	DEFINE_PRODUCT(storage, prefix##_iq2_xxs, QUANT_IQ2_XXS) \
	DEFINE_PRODUCT(storage, prefix##_iq2_xs, QUANT_IQ2_XS)   \
	DEFINE_PRODUCT(storage, prefix##_iq3_xxs, QUANT_IQ3_XXS) \
	DEFINE_PRODUCT(storage, prefix##_iq4_xs, QUANT_IQ4_XS)
