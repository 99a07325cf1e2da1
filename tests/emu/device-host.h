/* SPDX-License-Identifier: MIT */
/*
 * device-host.h: what kernels/cuda/device.cuh promises, for the host's C++ compiler. Included by it alone.
 *
 * Owns the meaning of the words in plain loops; who runs a block's threads, and when, is block.c's business. A thread is a
 * fiber: every function here that names a warp or a block may switch to another one. threadIdx and the like are those of the
 * running fiber. Stricter than a card where a card only misbehaves: shared memory and the lanes' results begin as 0xff, a
 * warp whose lanes meet in different functions, a read from a lane that is not there, and a barrier that some never reach
 * end the process with a message.
 */
#pragma once

#include <cmath>
#include <cstring>

#include "tests/emu/block.h"

#define KERNEL(name, type, arg)                                                             \
	static void name(const type &arg);                                                  \
	static void name##_run(const void *args)                                            \
	{                                                                                   \
		name(*static_cast<const type *>(args));                                     \
	}                                                                                   \
	static const struct emu_kernel name##_entry EMU_KERNEL_ENTRY = { #name, name##_run, \
									 sizeof(type) };    \
	static void name(const type &arg)

/* One array for all blocks, since they run one after the other; each finds it full of 0xff. */
#define SHARED(type, name, count)            \
	alignas(16) static type name[count]; \
	static unsigned long name##_used;    \
	emu_shared(name, sizeof(name), &name##_used)
#define DYNAMIC_SHARED(type, name)      type *const name = static_cast<type *>(emu_dynamic_shared())
#define DEVICE_TABLE(type, name, count) const type name[count]
#define DEVICE                          static inline __attribute__((always_inline, unused))
#define UNROLL
#define DEVICE_MMA_BF16 1

#define __device__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__    __attribute__((noinline))

/* ---- threads ---- */

DEVICE void __syncthreads(void)
{
	emu_block_wait();
}

DEVICE void __syncwarp(unsigned mask = 0xffffffff)
{
	emu_warp_meet(EMU_SYNC, mask, nullptr, 0);
}

/* Each lane leaves a word, waits for the others, and reads one of theirs. */
DEVICE uint32_t emu_word_of(enum emu_meeting what, unsigned mask, uint32_t word, int lane)
{
	return *static_cast<const uint32_t *>(
		emu_warp_lane(emu_warp_meet(what, mask, &word, sizeof(word)), lane));
}

/* The lane of this one's group of `width` that a shuffle reads; out of the group: itself. */
DEVICE int emu_source(int lane, int width)
{
	int self = emu_lane();

	return lane / width == self / width && lane >= 0 ? lane : self;
}

DEVICE uint32_t emu_bits(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof(u));
	return u;
}

DEVICE float emu_float(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof(f));
	return f;
}

#define EMU_SHUFFLE(suffix, what, param, source)                                                    \
	DEVICE uint32_t suffix(unsigned mask, uint32_t x, int param, int width = CUDA_WARP)         \
	{                                                                                           \
		return emu_word_of(what, mask, x, source);                                          \
	}                                                                                           \
	DEVICE int suffix(unsigned mask, int x, int param, int width = CUDA_WARP)                   \
	{                                                                                           \
		return static_cast<int>(emu_word_of(what, mask, static_cast<uint32_t>(x), source)); \
	}                                                                                           \
	DEVICE float suffix(unsigned mask, float x, int param, int width = CUDA_WARP)               \
	{                                                                                           \
		return emu_float(emu_word_of(what, mask, emu_bits(x), source));                     \
	}

EMU_SHUFFLE(__shfl_sync, EMU_SHFL, lane,
	    emu_lane() / width * width +
		    static_cast<int>(static_cast<unsigned>(lane) % static_cast<unsigned>(width)))
EMU_SHUFFLE(__shfl_xor_sync, EMU_SHFL_XOR, bits, emu_source(emu_lane() ^ bits, width))
EMU_SHUFFLE(__shfl_down_sync, EMU_SHFL_DOWN, delta, emu_source(emu_lane() + delta, width))
EMU_SHUFFLE(__shfl_up_sync, EMU_SHFL_UP, delta, emu_source(emu_lane() - delta, width))

DEVICE unsigned __ballot_sync(unsigned mask, int predicate)
{
	const void *meeting;
	unsigned bits = 0;
	int word = !!predicate;

	meeting = emu_warp_meet(EMU_BALLOT, mask, &word, sizeof(word));
	for (int i = 0; i < CUDA_WARP; i++)
		if (emu_warp_has(meeting, i) && *static_cast<const int *>(emu_warp_lane(meeting, i)))
			bits |= 1u << i;
	return bits;
}

DEVICE int __any_sync(unsigned mask, int predicate)
{
	return __ballot_sync(mask, predicate) != 0;
}

DEVICE int __all_sync(unsigned mask, int predicate)
{
	return __ballot_sync(mask, !predicate) == 0;
}

/* Between fibers of one thread nothing is ever half done. */
DEVICE float atomicAdd(float *p, float x)
{
	float old = *p;

	*p = old + x;
	return old;
}

DEVICE uint32_t atomicAdd(uint32_t *p, uint32_t x)
{
	uint32_t old = *p;

	*p = old + x;
	return old;
}

DEVICE int atomicAdd(int *p, int x)
{
	int old = *p;

	*p = old + x;
	return old;
}

/* ---- one thread's arithmetic ---- */

struct uint2 {
	uint32_t x, y;
};
struct alignas(16) uint4 {
	uint32_t x, y, z, w;
};
struct int2 {
	int x, y;
};
struct alignas(16) int4 {
	int x, y, z, w;
};
struct alignas(8) float2 {
	float x, y;
};
struct alignas(16) float4 {
	float x, y, z, w;
};

DEVICE float2 make_float2(float x, float y)
{
	return { x, y };
}

DEVICE float4 make_float4(float x, float y, float z, float w)
{
	return { x, y, z, w };
}

DEVICE uint2 make_uint2(uint32_t x, uint32_t y)
{
	return { x, y };
}

DEVICE uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
	return { x, y, z, w };
}

DEVICE uint32_t __float_as_uint(float f)
{
	return emu_bits(f);
}

DEVICE int __float_as_int(float f)
{
	return static_cast<int>(emu_bits(f));
}

DEVICE float __uint_as_float(uint32_t u)
{
	return emu_float(u);
}

DEVICE float __int_as_float(int i)
{
	return emu_float(static_cast<uint32_t>(i));
}

DEVICE float rsqrtf(float x)
{
	return 1.0f / sqrtf(x);
}

/* No overload of other mixes: nvcc has them, but a kernel that needs one has a sign bug. */
DEVICE int min(int a, int b)
{
	return a < b ? a : b;
}

DEVICE int max(int a, int b)
{
	return a > b ? a : b;
}

DEVICE uint32_t min(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

DEVICE uint32_t max(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

DEVICE uint64_t min(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

DEVICE uint64_t max(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

DEVICE int __popc(unsigned x)
{
	return __builtin_popcount(x);
}

/* Byte i of the result: byte (selector >> 4i & 7) of b:a. The sign mode is not here. */
DEVICE uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
	uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
	uint32_t r = 0;

	for (int i = 0; i < 4; i++)
		r |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
	return r;
}

/* Four products of signed bytes and their sum, added to c: wraps as the card does. */
DEVICE int __dp4a(int a, int b, int c)
{
	uint32_t sum = static_cast<uint32_t>(c);

	for (int i = 0; i < 4; i++)
		sum += static_cast<uint32_t>(static_cast<int8_t>(a >> 8 * i) *
					     static_cast<int8_t>(b >> 8 * i));
	return static_cast<int>(sum);
}

DEVICE float f16_to_f32(uint16_t h)
{
	uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, man = h & 0x3ff;
	uint32_t exp = h >> 10 & 31;
	float denormal;

	if (exp == 31)
		return emu_float(sign | 0x7f800000 | man << 13 | (man ? 0x400000 : 0));
	if (exp)
		return emu_float(sign | (exp + 112) << 23 | man << 13);
	denormal = static_cast<float>(man) * 0x1p-24f;
	return sign ? -denormal : denormal;
}

DEVICE uint16_t f32_to_f16(float f)
{
	uint32_t u = emu_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;

	if (a > 0x7f800000)
		return static_cast<uint16_t>(sign | 0x7e00 | (a >> 13 & 0x3ff));
	if (a >= 0x477ff000)
		return static_cast<uint16_t>(sign | 0x7c00);
	if (a < 0x38800000) /* below 2^-14: a multiple of 2^-24 */
		return static_cast<uint16_t>(sign |
					     static_cast<uint32_t>(lrintf(emu_float(a) * 0x1p24f)));
	a += 0xfff + (a >> 13 & 1);
	return static_cast<uint16_t>(sign | (a - (112u << 23)) >> 13);
}

/* ---- tensor cores: the lanes' fragments put together, as device.cuh describes them ---- */

struct emu_fragments {
	uint32_t a[4], b[2];
};

DEVICE const uint32_t *emu_a(const void *meeting, int lane)
{
	return static_cast<const emu_fragments *>(emu_warp_lane(meeting, lane))->a;
}

DEVICE const uint32_t *emu_b(const void *meeting, int lane)
{
	return static_cast<const emu_fragments *>(emu_warp_lane(meeting, lane))->b;
}

DEVICE const void *emu_mma_meet(enum emu_meeting what, const uint32_t a[4], const uint32_t b[2])
{
	emu_fragments mine = { { a[0], a[1], a[2], a[3] }, { b[0], b[1] } };

	return emu_warp_meet(what, 0xffffffff, &mine, sizeof(mine));
}

DEVICE void mma_s8_m16n8k32(int d[4], const uint32_t a[4], const uint32_t b[2])
{
	const void *meeting = emu_mma_meet(EMU_MMA_S8, a, b);
	int lane = emu_lane();

	for (int i = 0; i < 4; i++) {
		int row = lane / 4 * 4, col = (lane % 4 * 2 + i % 2) * 4;

		for (int k = 0; k < 8; k++) /* of 4 bytes: half k / 4 of the columns */
			d[i] = __dp4a(static_cast<int>(emu_a(meeting, row + k % 4)[k / 4 * 2 + i / 2]),
				      static_cast<int>(emu_b(meeting, col + k % 4)[k / 4]), d[i]);
	}
}

DEVICE void mma_bf16_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
	const void *meeting = emu_mma_meet(EMU_MMA_BF16, a, b);
	int lane = emu_lane();

	for (int i = 0; i < 4; i++) {
		int row = lane / 4 * 4, col = (lane % 4 * 2 + i % 2) * 4;

		for (int k = 0; k < 8; k++) { /* of 2 values */
			uint32_t x = emu_a(meeting, row + k % 4)[k / 4 * 2 + i / 2];
			uint32_t y = emu_b(meeting, col + k % 4)[k / 4];

			d[i] += emu_float(x << 16) * emu_float(y << 16) +
				emu_float(x & 0xffff0000) * emu_float(y & 0xffff0000);
		}
	}
}
