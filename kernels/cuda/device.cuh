/* SPDX-License-Identifier: MIT */
/*
 * device.cuh: the few words in which kernels are written, so that one .cu file is compiled by nvcc for the card and by the
 * host's C++ compiler for the emulator (tests/emu/device-host.h gives it the same words). First include of every .cu file.
 *
 * Owns no kernel. Refuses templates and the toolkit's headers: what is here is inline PTX or a built-in. Warp functions are
 * for whole warps: all 32 lanes take part. Invariant: a function that exists in both forms gives the same bits in both, but
 * for NaN payloads and for the order of sums inside mma_bf16_m16n8k16().
 *
 * A kernel:	KERNEL(cuda_add, cuda_flat, a)
 *		{
 *			SHARED(float, sums, CUDA_WARP);
 *			DYNAMIC_SHARED(uint8_t, row);
 *			...
 *		}
 * SHARED and DYNAMIC_SHARED stand at the top of a function's body. A table of constants: `static DEVICE_TABLE(int8_t, name, 16) = {...};`
 */
#pragma once

/* quant.h is C. */
#define _Static_assert static_assert

#include "kernels/cpu/quant.h"
#include "kernels/cuda/args.h"

#define restrict __restrict__

#ifdef __CUDACC__

#define KERNEL(name, type, arg)                                    \
	extern "C" __global__ void __launch_bounds__(CUDA_THREADS) \
		name(const __grid_constant__ type arg)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define DYNAMIC_SHARED(type, name)                                      \
	extern __shared__ __align__(16) unsigned char device_dynamic[]; \
	type *const name = (type *)device_dynamic
#define DEVICE_TABLE(type, name, count) __constant__ const type name[count]
/* Of a device function: always inlined. */
#define DEVICE                          static __device__ __forceinline__
#define UNROLL                          _Pragma("unroll")

/* Are the tensor cores there, or does the function below do without? */
#define DEVICE_MMA_BF16 (__CUDA_ARCH__ >= 800)

DEVICE float f16_to_f32(uint16_t h)
{
	float f;

	asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
	return f;
}

DEVICE uint16_t f32_to_f16(float f)
{
	uint16_t h;

	asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
	return h;
}

/*
 * D += A B, row by column, of one warp. A lane holds, with g = lane / 4 and t = lane % 4:
 * A: a[0] row g, a[1] row g + 8, columns 4t..4t+3; a[2], a[3] the same rows, columns 16 + 4t..; bytes from the lowest up.
 * B: b[0] rows 4t..4t+3 of column g, b[1] rows 16 + 4t.. of it. D: d[0], d[1] row g, columns 2t, 2t+1; d[2], d[3] row g + 8.
 */
DEVICE void mma_s8_m16n8k32(int d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
	asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
	/* Turing has the 8x8x16 piece: four of them, whose lanes hold the same. */
	UNROLL
	for (int i = 0; i < 4; i++)
		asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
			     : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1])
			     : "r"(a[i]), "r"(b[i / 2]));
#endif
}

/*
 * D += A B of bf16 pairs (the lower half is the lower column), sums in float. With g and t as above:
 * A: a[0] row g, a[1] row g + 8, columns 2t, 2t+1; a[2], a[3] the same rows, columns 8 + 2t, 8 + 2t + 1.
 * B: b[0] rows 2t, 2t+1 of column g, b[1] rows 8 + 2t.. of it. D as above.
 */
DEVICE void mma_bf16_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if __CUDA_ARCH__ >= 800
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
	/* Turing's tensor cores have no bf16: each lane asks the others for its two rows and two columns. */
	int lane = (int)(threadIdx.x % CUDA_WARP), row = lane / 4 * 4, col = lane % 4 * 8;

	for (int half = 0; half < 2; half++) {
		for (int s = 0; s < 4; s++) {
			uint32_t r0 = __shfl_sync(0xffffffff, a[half * 2], row + s);
			uint32_t r1 = __shfl_sync(0xffffffff, a[half * 2 + 1], row + s);
			uint32_t c0 = __shfl_sync(0xffffffff, b[half], col + s);
			uint32_t c1 = __shfl_sync(0xffffffff, b[half], col + 4 + s);

			UNROLL
			for (int i = 0; i < 2; i++) {
				float x0 = __uint_as_float(i ? r0 & 0xffff0000 : r0 << 16);
				float x1 = __uint_as_float(i ? r1 & 0xffff0000 : r1 << 16);
				float y0 = __uint_as_float(i ? c0 & 0xffff0000 : c0 << 16);
				float y1 = __uint_as_float(i ? c1 & 0xffff0000 : c1 << 16);

				d[0] = fmaf(x0, y0, d[0]);
				d[1] = fmaf(x0, y1, d[1]);
				d[2] = fmaf(x1, y0, d[2]);
				d[3] = fmaf(x1, y1, d[3]);
			}
		}
	}
#endif
}

#else
#include "tests/emu/device-host.h"
#endif

DEVICE float bf16_to_f32(uint16_t h)
{
	return __uint_as_float((uint32_t)h << 16);
}

/* To nearest, ties to even; NaN stays NaN. */
DEVICE uint16_t f32_to_bf16(float f)
{
	uint32_t u = __float_as_uint(f);

	if ((u & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(u >> 16 | 0x40);
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Sum, and largest, of a value of each lane: every lane has it, all of them the same bits. */
DEVICE float warp_sum(float x)
{
	UNROLL
	for (int step = CUDA_WARP / 2; step; step /= 2)
		x += __shfl_xor_sync(0xffffffff, x, step);
	return x;
}

DEVICE float warp_max(float x)
{
	UNROLL
	for (int step = CUDA_WARP / 2; step; step /= 2)
		x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
	return x;
}
