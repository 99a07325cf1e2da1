/* SPDX-License-Identifier: MIT */
/*
 * moe_tiled.cu: the experts of a layer over many tokens: each expert's weights are read once for all
 * tokens that chose it. What a token's choices bring is put side by side by expert, multiplied in
 * tiles, and summed for the token.
 *
 * Owns no state. Launched as args.h says. The host sorts the choices and cuts the tiles; an expert
 * that is not on the device is left out, and the host brings its results. Refuses to know how
 * experts came to the device. Invariant: a result is the same bits whatever tile it is computed in,
 * and a token's sum takes every choice once and in order.
 */
#include "kernels/cuda/tiled.cuh"

/* Its columns are the tile's places. w is NULL: its expert is not on the device. */
DEVICE struct cuda_matmul tile_product(const struct cuda_moe_tiled *a, uint32_t number)
{
	const struct cuda_moe_tile tile = a->tiles[number];
	const struct cuda_expert e = a->experts[tile.expert];
	const void *w = a->matrix == 0 ? e.gate : a->matrix == 1 ? e.up : e.down;

	return (struct cuda_matmul){
		.w = e.gate ? w : NULL,
		.act = row_at(a->act, tile.first, a->act_stride),
		.y = a->y + tile.first * a->y_stride,
		.w_stride = a->w_stride,
		.act_stride = a->act_stride,
		.y_stride = a->y_stride,
		.n = a->n,
		.n_rows = a->n_rows,
		.n_cols = tile.n,
	};
}

/* There are more experts than tokens fill tiles of: most are narrow. */
#define DEFINE_MOE_TILED(type)                                                  \
	KERNEL(cuda_moe_tiled_##type, struct cuda_moe_tiled, a)                 \
	{                                                                       \
		for (uint32_t i = blockIdx.y; i < a.n_tiles; i += gridDim.y) {  \
			const struct cuda_matmul product = tile_product(&a, i); \
                                                                                \
			if (product.w)                                          \
				type##_tiled(&product, true);                   \
		}                                                               \
	}

DEFINE_MOE_TILED(q4_k)
DEFINE_MOE_TILED(q5_k)
DEFINE_MOE_TILED(q6_k)
DEFINE_MOE_TILED(q8_0)
DEFINE_MOE_TILED(q4_0)
DEFINE_MOE_TILED(mxfp4)
DEFINE_MOE_TILED(f16)
DEFINE_MOE_TILED(bf16)
DEFINE_MOE_TILED(f32)

/* Rows of Q8_0 and of halves can begin and end in the middle of a word. */
KERNEL(cuda_gather_rows, struct cuda_gather_rows, a)
{
	uint32_t at = (blockIdx.x * CUDA_THREADS + threadIdx.x) * (uint32_t)sizeof(uint32_t);

	if (at >= a.bytes)
		return;
	for (uint32_t row = blockIdx.y; row < a.n_rows; row += gridDim.y) {
		const uint8_t *from = row_at(a.from, a.index[row], a.from_stride) + at;
		uint8_t *to = (uint8_t *)a.to + row * a.to_stride + at;

		if (a.bytes - at >= sizeof(uint32_t) &&
		    ((uintptr_t)from | (uintptr_t)to) % sizeof(uint32_t) == 0) {
			*(uint32_t *)to = *(const uint32_t *)from;
			continue;
		}
		*(uint16_t *)to = *(const uint16_t *)from;
		if (a.bytes - at >= sizeof(uint32_t))
			((uint16_t *)to)[1] = ((const uint16_t *)from)[1];
	}
}

KERNEL(cuda_moe_sum, struct cuda_moe_sum, a)
{
	uint32_t i = blockIdx.x * CUDA_THREADS + threadIdx.x;

	if (i >= a.n_embd)
		return;
	for (uint32_t t = blockIdx.y; t < a.n_tok; t += gridDim.y) {
		const uint32_t *place = a.place + (uint64_t)t * a.n_used;
		const float *weight = a.weight + (uint64_t)t * a.n_used;
		float sum = 0;

		for (uint32_t k = 0; k < a.n_used; k++)
			sum = fmaf(weight[k], a.result[(uint64_t)place[k] * a.n_embd + i], sum);
		a.out[(uint64_t)t * a.n_embd + i] += sum;
	}
}
