/* SPDX-License-Identifier: MIT */
/*
 * matmul.cu: products of matrices: a few columns at once, where the bytes of the weights are what
 * is waited for, and tiles of many, where the arithmetic is.
 *
 * Owns no state. Launched as args.h says. Refuses to know what is multiplied. Integers are summed
 * exactly and brought to the scale of their blocks as the CPU does it, by both forms. Invariant: a
 * column's result is the same bits however many columns are computed with it, in either form; the
 * two forms differ in the order of float sums.
 */
#include "kernels/cuda/tiled.cuh"

/* few columns: a warp computes a row */

DEVICE void store_row(const struct cuda_matmul *a, uint32_t row, const float acc[CUDA_COLS])
{
	UNROLL
	for (uint32_t c = 0; c < CUDA_COLS; c++) {
		float sum;

		if (c >= a->n_cols)
			break;
		sum = warp_sum(acc[c]);
		if (LANE == 0)
			a->y[c * a->y_stride + row] = sum;
	}
}

#define DEFINE_MATMUL(type, act_type)                                                           \
	KERNEL(cuda_matmul_##type, struct cuda_matmul, a)                                       \
	{                                                                                       \
		SHARED(uint32_t, staged, STAGE_WORDS(act_type) * CUDA_COLS);                    \
		uint32_t row = warp_row(a.n_rows);                                              \
		float acc[CUDA_COLS] = {};                                                      \
                                                                                                \
		for (uint32_t k = 0; k < a.n; k += STAGE) {                                     \
			uint32_t n = min(a.n - k, (uint32_t)STAGE);                             \
                                                                                                \
			__syncthreads();                                                        \
			for (uint32_t c = 0; c < a.n_cols; c++)                                 \
				stage_row(staged + c * STAGE_WORDS(act_type),                   \
					  row_at(a.act, c, a.act_stride) + act_type##_bytes(k), \
					  act_type##_bytes(n));                                 \
			__syncthreads();                                                        \
			type##_lane_dot(row_at(a.w, row, a.w_stride) + type##_bytes(k), staged, \
					act_type##_bytes(STAGE), a.n_cols, n, acc);             \
		}                                                                               \
		store_row(&a, row, acc);                                                        \
	}

DEFINE_MATMUL(q4_k, q8_k)
DEFINE_MATMUL(q5_k, q8_k)
DEFINE_MATMUL(q6_k, q8_k)
DEFINE_MATMUL(q8_0, q8_0)
DEFINE_MATMUL(q4_0, q8_0)
DEFINE_MATMUL(mxfp4, q8_0)

#define DEFINE_FLOAT_MATMUL(type)                                                                       \
	KERNEL(cuda_matmul_##type, struct cuda_matmul, a)                                               \
	{                                                                                               \
		uint32_t row = warp_row(a.n_rows);                                                      \
		float acc[CUDA_COLS] = {};                                                              \
                                                                                                        \
		type##_lane_dot(row_at(a.w, row, a.w_stride), a.act, a.act_stride, a.n_cols, a.n, acc); \
		store_row(&a, row, acc);                                                                \
	}

DEFINE_FLOAT_MATMUL(f16)
DEFINE_FLOAT_MATMUL(bf16)
DEFINE_FLOAT_MATMUL(f32)

/* tiles: what is left of the product where the block's columns begin */

DEVICE struct cuda_matmul columns_here(const struct cuda_matmul *a)
{
	uint32_t first = blockIdx.y * CUDA_TILE_COLS;
	struct cuda_matmul here = *a;

	here.act = row_at(a->act, first, a->act_stride);
	here.y = a->y + first * a->y_stride;
	here.n_cols = min(a->n_cols - first, (uint32_t)CUDA_TILE_COLS);
	return here;
}

#define DEFINE_TILED(type)                                      \
	KERNEL(cuda_matmul_tiled_##type, struct cuda_matmul, a) \
	{                                                       \
		struct cuda_matmul here = columns_here(&a);     \
                                                                \
		type##_tiled(&here, false);                     \
	}

DEFINE_TILED(q4_k)
DEFINE_TILED(q5_k)
DEFINE_TILED(q6_k)
DEFINE_TILED(q8_0)
DEFINE_TILED(q4_0)
DEFINE_TILED(mxfp4)
DEFINE_TILED(f16)
DEFINE_TILED(bf16)
DEFINE_TILED(f32)
