/* SPDX-License-Identifier: MIT */
/*
 * test-kernels.cu: small kernels that use each word of device.cuh once, for tests/unit/test-cuda-driver.c, which has the plain loops.
 *
 * Part of the emulator's library, not of the daemon; nvcc takes it too.
 */
#include "kernels/cuda/device.cuh"
#include "tests/emu/test-kernels.h"

/* y[i] += a[i], floats. */
KERNEL(test_add, test_args, p)
{
	const float *a = (const float *)p.a;
	float *y = (float *)p.y;
	uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;

	if (i < p.n)
		y[i] += a[i];
}

/* y = a with each block of 256 words turned round, through static shared memory there and dynamic back. grid: n / 256, twice. */
KERNEL(test_turn, test_args, p)
{
	SHARED(uint32_t, there, CUDA_THREADS);
	DYNAMIC_SHARED(uint32_t, back);
	uint32_t i = threadIdx.x, at = (blockIdx.y * gridDim.x + blockIdx.x) * CUDA_THREADS + i;

	there[i] = ((const uint32_t *)p.a)[at];
	__syncthreads();
	back[i] = there[i ^ 1];
	__syncthreads();
	((uint32_t *)p.y)[at] = back[(CUDA_THREADS - 1 - i) ^ 1];
}

/* y: 1 where a block finds its shared memory without a trace of the one before, which only the emulator promises. */
KERNEL(test_fresh, test_args, p)
{
	SHARED(uint32_t, words, 32);
	DYNAMIC_SHARED(uint32_t, more);

	if (threadIdx.x < 32) {
		((uint32_t *)p.y)[blockIdx.x * 32 + threadIdx.x] =
			words[threadIdx.x] == 0xffffffff && more[threadIdx.x] == 0xffffffff;
		words[threadIdx.x] = more[threadIdx.x] = 0;
	}
}

/* y[thread][TEST_WARP_WORDS] of a[thread]. */
KERNEL(test_warp, test_args, p)
{
	uint32_t thread = threadIdx.x, word = ((const uint32_t *)p.a)[thread];
	uint32_t *y = (uint32_t *)p.y + thread * TEST_WARP_WORDS;

	y[TEST_XOR] = __shfl_xor_sync(0xffffffff, word, 5);
	y[TEST_DOWN] = __shfl_down_sync(0xffffffff, word, 3);
	y[TEST_UP] = __shfl_up_sync(0xffffffff, word, 3);
	y[TEST_BROADCAST] = __shfl_sync(0xffffffff, word, 7);
	y[TEST_HALF_XOR] = __shfl_xor_sync(0xffffffff, word, 9, 16);
	y[TEST_BALLOT] = __ballot_sync(0xffffffff, word & 1);
	y[TEST_ANY] = (uint32_t)__any_sync(0xffffffff, word == 40) << 1 |
		      (uint32_t)__all_sync(0xffffffff, word < 1000);
	y[TEST_SUM] = __float_as_uint(warp_sum((float)word));
}

/* y[i] = a[i] . b[i] + i, of four signed bytes. */
KERNEL(test_dp4a, test_args, p)
{
	uint32_t i = threadIdx.x;

	if (i < p.n)
		((int *)p.y)[i] = __dp4a(((const int *)p.a)[i], ((const int *)p.b)[i], (int)i);
}

/* y[16][8] = a[16][32] b[8][32] (b by columns), signed bytes. One warp. */
KERNEL(test_mma_s8, test_args, p)
{
	const uint32_t *a = (const uint32_t *)p.a, *b = (const uint32_t *)p.b;
	uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4;
	uint32_t x[4] = { a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + 4 + t], a[(g + 8) * 8 + 4 + t] };
	uint32_t w[2] = { b[g * 8 + t], b[g * 8 + 4 + t] };
	int d[4] = { 0, 0, 0, 0 };
	int *y = (int *)p.y;

	mma_s8_m16n8k32(d, x, w);
	mma_s8_m16n8k32(d, x, w); /* adds */
	for (uint32_t i = 0; i < 4; i++)
		y[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
}

/* y[16][8] = a[16][16] b[8][16], bf16. One warp. */
KERNEL(test_mma_bf16, test_args, p)
{
	const uint32_t *a = (const uint32_t *)p.a, *b = (const uint32_t *)p.b;
	uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4;
	uint32_t x[4] = { a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + 4 + t], a[(g + 8) * 8 + 4 + t] };
	uint32_t w[2] = { b[g * 8 + t], b[g * 8 + 4 + t] };
	float d[4] = { 0, 0, 0, 0 };
	float *y = (float *)p.y;

	mma_bf16_m16n8k16(d, x, w);
	for (uint32_t i = 0; i < 4; i++)
		y[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
}

/* y[i] = f16 below, bf16 above, of float a[i]; n floats of b receive those two, back as floats. */
KERNEL(test_half, test_args, p)
{
	uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
	float x, *back = (float *)p.b;
	uint16_t h, b;

	if (i >= p.n)
		return;
	x = ((const float *)p.a)[i];
	h = f32_to_f16(x);
	b = f32_to_bf16(x);
	((uint32_t *)p.y)[i] = (uint32_t)b << 16 | h;
	back[2 * i] = f16_to_f32(h);
	back[2 * i + 1] = bf16_to_f32(b);
}

/* Threads that end early are not waited for: y[0] = the sum of 1 over the threads below n. */
KERNEL(test_leave, test_args, p)
{
	if (threadIdx.x >= p.n)
		return;
	__syncthreads();
	atomicAdd((float *)p.y, 1.0f);
}

/* Wrong, each in its way: n says which. */
KERNEL(test_wrong, test_args, p)
{
	SHARED(float, sums, CUDA_THREADS);
	uint32_t i = threadIdx.x;

	sums[i] = 0;
	if (p.n == 0) { /* some wait for the warp, some for the block */
		if (i == 0)
			__syncwarp();
		else
			__syncthreads();
	} else if (p.n == 1) { /* a lane is asked that has left */
		if (i == 3)
			return;
		sums[i] = __shfl_sync(0xffffffff, sums[i], 3);
	} else if (p.n == 2) { /* half of the warp sums, half votes */
		if (i % 32 < 16)
			sums[i] = warp_sum(1.0f);
		else
			sums[i] = (float)__any_sync(0xffffffff, i == 0);
	} else { /* half of the warp is left out */
		if (i % 32 < 16)
			sums[i] = __shfl_xor_sync(0xffff, sums[i], 1);
	}
	((float *)p.y)[i] = sums[i];
}
