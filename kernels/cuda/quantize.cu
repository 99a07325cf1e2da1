/* SPDX-License-Identifier: MIT */
/*
 * quantize.cu: rows of floats brought to the form that a product takes its activations in.
 *
 * Owns no state. Launched as args.h says. Refuses to know what the rows are. Invariant: the bytes
 * are those that the CPU's conversions give, but for not-a-number, so that a model computes the
 * same wherever a layer runs.
 */
#include "kernels/cuda/quant.cuh"

/*
 * A warp a block; there are eight times as many warps in the grid as blocks of 256, and those
 * beyond a row have nothing to do.
 */
KERNEL(cuda_quantize_q8_k, struct cuda_quantize, a)
{
	uint32_t i = blockIdx.x * CUDA_ROWS + WARP;

	if (i < a.width / QK_K)
		q8_k_block(a.x + (uint64_t)blockIdx.y * a.width + i * QK_K,
			   (struct block_q8_k *)((uint8_t *)a.act + blockIdx.y * a.act_stride) + i);
}

KERNEL(cuda_quantize_q8_0, struct cuda_quantize, a)
{
	uint32_t i = blockIdx.x * CUDA_ROWS + WARP;

	if (i < a.width / QK_0)
		q8_0_block(a.x + (uint64_t)blockIdx.y * a.width + i * QK_0,
			   (struct block_q8_0 *)((uint8_t *)a.act + blockIdx.y * a.act_stride) + i);
}

#define DEFINE_ROUND(type)                                                                  \
	KERNEL(cuda_round_##type, struct cuda_quantize, a)                                  \
	{                                                                                   \
		uint16_t *act = (uint16_t *)((uint8_t *)a.act + blockIdx.y * a.act_stride); \
		uint32_t i = blockIdx.x * CUDA_THREADS + threadIdx.x;                       \
                                                                                            \
		if (i < a.width)                                                            \
			act[i] = f32_to_##type(a.x[(uint64_t)blockIdx.y * a.width + i]);    \
	}

DEFINE_ROUND(f16)
DEFINE_ROUND(bf16)
