/* SPDX-License-Identifier: MIT */
/*
 * quant.cuh: blocks of quantised numbers on the device: how they are read, multiplied and made. For
 * matmul.cu, moe.cu and quantize.cu.
 *
 * Owns no kernel and no memory. Refuses to know which matrix a row belongs to. Weights lie as in
 * the file and activations as the CPU's kernels have them (kernels/cpu/quant.h); what the numbers
 * mean is said at the top of kernels/cpu/ref.c. Alignment: matrices and rows of floats to be
 * quantised begin at a multiple of 16; rows of activations at a multiple of 4, or of 2 where they
 * are Q8_0, and of their element where they are floating point. Invariant: sums of integers are
 * exact, and which lane adds what in which order follows from the length of a row alone, so that a
 * product is the same bits whatever else is computed by the same launch.
 */
#pragma once

#include "kernels/cuda/device.cuh"

#define LANE       (threadIdx.x % CUDA_WARP)
#define WARP       (threadIdx.x / CUDA_WARP)
#define SHARE      32 /* weights that a lane takes at once */
#define HALF_GROUP 8  /* the same of floating point */

/*
 * One lane's share of a block: 32 weights as signed bytes, four to a word, in two runs of 16 with a
 * scale and a minimum each. at: where in a block of activations each run begins. Two runs, because
 * 16 bytes of nibbles are 16 low and 16 high ones, and those are apart by a distance that depends
 * on the type.
 */
struct share {
	int q[8];
	uint32_t at[2];
	int scale[2], min[2];
	float d, dmin;
};

/*
 * The `skew` bytes at `tail`, as the low ones of a word. Nothing behind them is read: it may be the
 * end of the memory.
 */
DEVICE uint32_t load_tail(const uint8_t *tail, uint32_t skew)
{
	uint32_t w = skew & 2 ? *(const uint16_t *)tail : 0;

	return skew & 1 ? w | (uint32_t)tail[skew & 2] << 8 * (skew & 2) : w;
}

/*
 * n words from any address, in aligned loads that are shifted together: the sizes of most blocks
 * are odd multiples of 2, or odd. May read up to three bytes in front of them, which a matrix that
 * begins aligned always has.
 */
DEVICE void load_words(const void *from, int n, uint32_t *w)
{
	uint32_t skew = (uint32_t)((uintptr_t)from & 3);
	const uint32_t *word = (const uint32_t *)((const uint8_t *)from - skew);
	uint32_t low = word[0];

	UNROLL
	for (int i = 0; i < n; i++) {
		uint32_t high = i + 1 < n ? word[i + 1] : load_tail((const uint8_t *)(word + n), skew);

		w[i] = (uint32_t)(((uint64_t)high << 32 | low) >> 8 * skew);
		low = high;
	}
}

/*
 * Of four unsigned bytes below 128: each less the byte of `less`, signed. The top bit keeps a byte
 * from borrowing of the next.
 */
DEVICE int less_bytes(uint32_t bytes, uint32_t less)
{
	return (int)(((bytes | 0x80808080) - less) ^ 0x80808080);
}

/* Bytes of n elements of a row. */
#define BYTES_OF(n, elems, type) ((n) / (elems) * (uint32_t)sizeof(struct type))
#define q4_k_bytes(n)            BYTES_OF(n, QK_K, block_q4_k)
#define q5_k_bytes(n)            BYTES_OF(n, QK_K, block_q5_k)
#define q6_k_bytes(n)            BYTES_OF(n, QK_K, block_q6_k)
#define q8_k_bytes(n)            BYTES_OF(n, QK_K, block_q8_k)
#define q8_0_bytes(n)            BYTES_OF(n, QK_0, block_q8_0)
#define q4_0_bytes(n)            BYTES_OF(n, QK_0, block_q4_0)
#define mxfp4_bytes(n)           BYTES_OF(n, QK_0, block_mxfp4)

/*
 * weights: share i of a row, that is of its weights 32 i .. 32 i + 31, though in another order for
 * K-quants
 */

/*
 * Two scales and two mins out of the twelve bytes that hold eight of each, for sub-blocks 2 pair
 * and 2 pair + 1. Both forms are computed and one is taken, so that lanes do not diverge. head: the
 * block's first 16 bytes.
 */
DEVICE void k_scales(uint4 head, uint32_t pair, struct share *s)
{
	uint32_t shift = pair % 2 * 16;
	uint32_t low = head.y >> shift, high = head.z >> shift, mixed = head.w >> shift;
	uint32_t scale = pair < 2 ? low & 0x3f3f : (mixed & 0x0f0f) | (low >> 2 & 0x3030);
	uint32_t min = pair < 2 ? high & 0x3f3f : (mixed >> 4 & 0x0f0f) | (high >> 2 & 0x3030);

	s->d = f16_to_f32((uint16_t)head.x);
	s->dmin = f16_to_f32((uint16_t)(head.x >> 16));
	s->scale[0] = (int)(scale & 0xff);
	s->scale[1] = (int)(scale >> 8 & 0xff);
	s->min[0] = (int)(min & 0xff);
	s->min[1] = (int)(min >> 8 & 0xff);
}

/*
 * A block of 144 bytes keeps the alignment of 16: eight lanes read its nibbles in one load each,
 * and share the head.
 */
DEVICE void q4_k_read(const void *row, uint32_t i, struct share *s)
{
	const uint4 *block = (const uint4 *)((const struct block_q4_k *)row + i / 8);
	uint32_t j = i % 8;
	uint4 qs = block[1 + j];
	uint32_t w[4] = { qs.x, qs.y, qs.z, qs.w };

	k_scales(block[0], j / 2, s);
	s->at[0] = j / 2 * 64 + j % 2 * 16;
	s->at[1] = s->at[0] + 32;
	UNROLL
	for (int e = 0; e < 4; e++) {
		s->q[e] = (int)(w[e] & 0x0f0f0f0f);
		s->q[4 + e] = (int)(w[e] >> 4 & 0x0f0f0f0f);
	}
}

/* 176 bytes: head, fifth bits, nibbles. */
DEVICE void q5_k_read(const void *row, uint32_t i, struct share *s)
{
	const uint4 *block = (const uint4 *)((const struct block_q5_k *)row + i / 8);
	uint32_t j = i % 8, pair = j / 2;
	uint4 qs = block[3 + j], qh = block[1 + j % 2];
	uint32_t w[4] = { qs.x, qs.y, qs.z, qs.w }, h[4] = { qh.x, qh.y, qh.z, qh.w };

	k_scales(block[0], pair, s);
	s->at[0] = pair * 64 + j % 2 * 16;
	s->at[1] = s->at[0] + 32;
	UNROLL
	for (int e = 0; e < 4; e++) {
		uint32_t bits = h[e] >> 2 * pair;

		s->q[e] = (int)((w[e] & 0x0f0f0f0f) | (bits & 0x01010101) << 4);
		s->q[4 + e] = (int)((w[e] >> 4 & 0x0f0f0f0f) | (bits >> 1 & 0x01010101) << 4);
	}
}

DEVICE void q6_k_read(const void *row, uint32_t i, struct share *s)
{
	const struct block_q6_k *block = (const struct block_q6_k *)row + i / 8;
	uint32_t half = i % 8 / 4, j = i % 4, w[4], h[4];

	load_words(block->ql + half * 64 + j * 16, 4, w);
	load_words(block->qh + half * 32 + j % 2 * 16, 4, h);
	s->at[0] = half * 128 + j * 16;
	s->at[1] = s->at[0] + 64;
	s->d = f16_to_f32(block->d);
	s->dmin = 0.0f;
	UNROLL
	for (int run = 0; run < 2; run++) {
		s->scale[run] = block->scales[s->at[run] / 16];
		s->min[run] = 0;
	}
	UNROLL
	for (int e = 0; e < 4; e++) {
		uint32_t bits = h[e] >> j / 2 * 2;

		s->q[e] = less_bytes((w[e] & 0x0f0f0f0f) | (bits & 0x03030303) << 4, 0x20202020);
		s->q[4 + e] = less_bytes((w[e] >> 4 & 0x0f0f0f0f) | (bits >> 4 & 0x03030303) << 4,
					 0x20202020);
	}
}

/* Blocks of 32: one scale, and the runs are the halves. */
DEVICE void whole_block(struct share *s, float d)
{
	s->at[0] = 0;
	s->at[1] = 16;
	s->d = d;
}

DEVICE void q8_0_read(const void *row, uint32_t i, struct share *s)
{
	const struct block_q8_0 *block = (const struct block_q8_0 *)row + i;
	uint32_t w[8];

	load_words(block->qs, 8, w);
	whole_block(s, f16_to_f32(block->d));
	UNROLL
	for (int e = 0; e < 8; e++)
		s->q[e] = (int)w[e];
}

DEVICE void q4_0_read(const void *row, uint32_t i, struct share *s)
{
	const struct block_q4_0 *block = (const struct block_q4_0 *)row + i;
	uint32_t w[4];

	load_words(block->qs, 4, w);
	whole_block(s, f16_to_f32(block->d));
	UNROLL
	for (int e = 0; e < 4; e++) {
		s->q[e] = less_bytes(w[e] & 0x0f0f0f0f, 0x08080808);
		s->q[4 + e] = less_bytes(w[e] >> 4 & 0x0f0f0f0f, 0x08080808);
	}
}

/* 2^(e - 128), of which the first two are denormal. */
DEVICE float e8m0_half(uint32_t e)
{
	return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

/*
 * Four nibbles of MXFP4 in the lower half of `nibbles` become four bytes of doubled magnitudes, by
 * the card's own table look-up of eight bytes: 0 1 2 3 4 6 8 12. Its selector takes the nibbles as
 * they lie; their top bit is the sign.
 */
DEVICE uint32_t mxfp4_magnitudes(uint32_t nibbles)
{
	return __byte_perm(0x03020100, 0x0c080604, nibbles & 0x7777);
}

/* signs: 1 in each byte to be negated. */
DEVICE int mxfp4_values(uint32_t magnitudes, uint32_t signs)
{
	return less_bytes(magnitudes, (magnitudes & signs * 0xff) << 1);
}

DEVICE void mxfp4_read(const void *row, uint32_t i, struct share *s)
{
	const struct block_mxfp4 *block = (const struct block_mxfp4 *)row + i;
	uint32_t w[4];

	load_words(block->qs, 4, w);
	whole_block(s, e8m0_half(block->e));
	UNROLL
	for (int e = 0; e < 4; e++) {
		/* Low and high nibbles in turn, as they lie; then apart. */
		uint32_t first = mxfp4_magnitudes(w[e]), second = mxfp4_magnitudes(w[e] >> 16);

		s->q[e] = mxfp4_values(__byte_perm(first, second, 0x6420), w[e] >> 3 & 0x01010101);
		s->q[4 + e] = mxfp4_values(__byte_perm(first, second, 0x7531), w[e] >> 7 & 0x01010101);
	}
}

/* Elements i .. i + 7 of a row of n, zeros behind its end. One load where the address allows it. */
DEVICE uint4 load_halves(const void *row, uint32_t i, uint32_t n)
{
	const uint16_t *p = (const uint16_t *)row + i;
	uint32_t w[4];

	if (i + HALF_GROUP <= n && (uintptr_t)p % sizeof(uint4) == 0)
		return *(const uint4 *)p;
	UNROLL
	for (uint32_t e = 0; e < 4; e++) {
		uint32_t low = i + 2 * e < n ? p[2 * e] : 0;
		uint32_t high = i + 2 * e + 1 < n ? p[2 * e + 1] : 0;

		w[e] = low | high << 16;
	}
	return make_uint4(w[0], w[1], w[2], w[3]);
}

#define DEFINE_HALF_READ(type)                                                     \
	DEVICE void type##_read(const void *row, uint32_t i, uint32_t n, float *v) \
	{                                                                          \
		uint4 h = load_halves(row, i, n);                                  \
		uint32_t w[4] = { h.x, h.y, h.z, h.w };                            \
                                                                                   \
		UNROLL                                                             \
		for (int e = 0; e < 4; e++) {                                      \
			v[2 * e] = type##_to_f32((uint16_t)w[e]);                  \
			v[2 * e + 1] = type##_to_f32((uint16_t)(w[e] >> 16));      \
		}                                                                  \
	}

DEFINE_HALF_READ(f16)
DEFINE_HALF_READ(bf16)

DEVICE void f32_read(const void *row, uint32_t i, uint32_t n, float *v)
{
	const float *p = (const float *)row + i;

	if (i + HALF_GROUP <= n && (uintptr_t)p % sizeof(float4) == 0) {
		float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];

		v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
		v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
		return;
	}
	UNROLL
	for (uint32_t e = 0; e < HALF_GROUP; e++)
		v[e] = i + e < n ? p[e] : 0.0f;
}

/* products */

DEVICE int dot_run(const int *q, const uint32_t *x)
{
	int sum = 0;

	UNROLL
	for (int e = 0; e < 4; e++)
		sum = __dp4a(q[e], (int)x[e], sum);
	return sum;
}

/*
 * act: a row of activations, in any memory; share i of it. Sums of 16 are there already, for the
 * mins.
 */
DEVICE float q8_k_dot(const struct share *s, const void *act, uint32_t i)
{
	const struct block_q8_k *x = (const struct block_q8_k *)act + i / (QK_K / SHARE);
	int scaled = 0, mins = 0;

	UNROLL
	for (int run = 0; run < 2; run++) {
		scaled += s->scale[run] *
			  dot_run(s->q + 4 * run, (const uint32_t *)(x->qs + s->at[run]));
		mins += s->min[run] * x->bsums[s->at[run] / 16];
	}
	return x->d * (s->d * (float)scaled - s->dmin * (float)mins);
}

DEVICE float q8_0_dot(const struct share *s, const void *act, uint32_t i)
{
	const struct block_q8_0 *x = (const struct block_q8_0 *)act + i;
	uint32_t w[8];

	load_words(x->qs, 8, w);
	return f16_to_f32(x->d) * s->d * (float)(dot_run(s->q, w) + dot_run(s->q + 4, w + 4));
}

/*
 * type_lane_dot(): this lane's part of the products of one row of weights with n_cols rows of
 * activations that lie `pitch` bytes apart, n elements each: acc[c] += . Lanes take shares in turn,
 * so that neighbours read neighbouring bytes, and each share of weights is read and unpacked once
 * for all columns. Two shares at a time, the second without a branch, so that both are on their way
 * from memory before the first is used; a lane that has no second one reads its first again.
 */
#define DEFINE_LANE_DOT(type, act_type)                                                \
	DEVICE void type##_lane_dot(const void *row, const void *act, uint64_t pitch,  \
				    uint32_t n_cols, uint32_t n, float *acc)           \
	{                                                                              \
		for (uint32_t i = LANE; i < n / SHARE; i += 2 * CUDA_WARP) {           \
			uint32_t next = i + CUDA_WARP < n / SHARE ? i + CUDA_WARP : i; \
			struct share first, second;                                    \
                                                                                       \
			type##_read(row, i, &first);                                   \
			type##_read(row, next, &second);                               \
			UNROLL                                                         \
			for (uint32_t c = 0; c < CUDA_COLS; c++) {                     \
				const uint8_t *x = (const uint8_t *)act + c * pitch;   \
                                                                                       \
				if (c >= n_cols)                                       \
					break;                                         \
				acc[c] += act_type##_dot(&first, x, i);                \
				if (next != i)                                         \
					acc[c] += act_type##_dot(&second, x, next);    \
			}                                                              \
		}                                                                      \
	}

DEFINE_LANE_DOT(q4_k, q8_k)
DEFINE_LANE_DOT(q5_k, q8_k)
DEFINE_LANE_DOT(q6_k, q8_k)
DEFINE_LANE_DOT(q8_0, q8_0)
DEFINE_LANE_DOT(q4_0, q8_0)
DEFINE_LANE_DOT(mxfp4, q8_0)

#define DEFINE_FLOAT_LANE_DOT(type)                                                        \
	DEVICE void type##_lane_dot(const void *row, const void *act, uint64_t pitch,      \
				    uint32_t n_cols, uint32_t n, float *acc)               \
	{                                                                                  \
		for (uint32_t i = LANE * HALF_GROUP; i < n; i += CUDA_WARP * HALF_GROUP) { \
			float w[HALF_GROUP], x[HALF_GROUP];                                \
                                                                                           \
			type##_read(row, i, n, w);                                         \
			UNROLL                                                             \
			for (uint32_t c = 0; c < CUDA_COLS; c++) {                         \
				if (c >= n_cols)                                           \
					break;                                             \
				type##_read((const uint8_t *)act + c * pitch, i, n, x);    \
				UNROLL                                                     \
				for (int e = 0; e < HALF_GROUP; e++)                       \
					acc[c] = fmaf(w[e], x[e], acc[c]);                 \
			}                                                                  \
		}                                                                          \
	}

DEFINE_FLOAT_LANE_DOT(f16)
DEFINE_FLOAT_LANE_DOT(bf16)
DEFINE_FLOAT_LANE_DOT(f32)

/*
 * Activations of a decode product are copied to shared memory piece by piece: the eight rows of a
 * block share them, and lanes read them in steps of 16 bytes, which shared memory serves four times
 * as fast as the cache does. A piece of this many elements keeps that for CUDA_COLS columns below
 * 19 KB, so that it does not limit the blocks at work at once.
 */
#define STAGE             2048
#define STAGE_WORDS(form) (form##_bytes(STAGE) / (uint32_t)sizeof(uint32_t))

/* By all threads of a block. */
DEVICE void stage_row(void *to, const void *from, uint32_t bytes)
{
	if (((uintptr_t)from | bytes) % sizeof(uint32_t) == 0) {
		for (uint32_t i = threadIdx.x; i < bytes / sizeof(uint32_t); i += CUDA_THREADS)
			((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
	} else {
		for (uint32_t i = threadIdx.x; i < bytes / sizeof(uint16_t); i += CUDA_THREADS)
			((uint16_t *)to)[i] = ((const uint16_t *)from)[i];
	}
}

/*
 * The warp's row of a matrix with n_rows of them. Warps beyond the last compute it once more, and
 * may store the same once more: all have to reach the barriers.
 */
DEVICE uint32_t warp_row(uint32_t n_rows)
{
	return min(blockIdx.x * CUDA_ROWS + WARP, n_rows - 1);
}

DEVICE const uint8_t *row_at(const void *matrix, uint32_t row, uint64_t stride)
{
	return (const uint8_t *)matrix + row * stride;
}

/* activations: as kernels/cpu/ref.c makes them, bit for bit */

DEVICE uint32_t magnitude(float x)
{
	return __float_as_uint(x) & 0x7fffffff;
}

DEVICE int round_q8(float v)
{
	v = v > -127.0f ? v : -127.0f;
	v = v < 127.0f ? v : 127.0f;
	return (int)rintf(v);
}

/*
 * Of every lane's x, that of the largest magnitude; of equals that of the lowest lane, whose sign
 * decides. Ascending steps keep the groups that meet contiguous, so the lower lanes' value is the
 * partner's when the step's bit is set here.
 */
DEVICE float warp_largest(float x)
{
	UNROLL
	for (uint32_t step = 1; step < CUDA_WARP; step *= 2) {
		float other = __shfl_xor_sync(0xffffffff, x, (int)step);

		if (magnitude(other) > magnitude(x) || (magnitude(other) == magnitude(x) && LANE & step))
			x = other;
	}
	return x;
}

/* One block by one warp: lane l makes elements 8 l .. 8 l + 7. */
DEVICE void q8_k_block(const float *x, struct block_q8_k *b)
{
	float4 low = ((const float4 *)x)[2 * LANE], high = ((const float4 *)x)[2 * LANE + 1];
	float v[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
	float largest = v[0], inv;
	uint32_t w[2] = { 0, 0 };
	int sum = 0;

	UNROLL
	for (int e = 1; e < 8; e++)
		if (magnitude(v[e]) > magnitude(largest))
			largest = v[e];
	largest = warp_largest(largest);
	inv = -127.0f / largest;
	UNROLL
	for (int e = 0; e < 8; e++) {
		int q = largest != 0.0f ? round_q8(v[e] * inv) : 0;

		sum += q;
		w[e / 4] |= ((uint32_t)q & 0xff) << e % 4 * 8;
	}
	((uint32_t *)b->qs)[2 * LANE] = w[0];
	((uint32_t *)b->qs)[2 * LANE + 1] = w[1];
	sum += __shfl_xor_sync(0xffffffff, sum, 1);
	if (LANE % 2 == 0)
		b->bsums[LANE / 2] = (int16_t)sum;
	if (LANE == 0)
		b->d = largest != 0.0f ? 1.0f / inv : 0.0f;
}

/* The same: lane l makes element l. */
DEVICE void q8_0_block(const float *x, struct block_q8_0 *b)
{
	float v = x[LANE], amax = fabsf(warp_largest(v));
	float inv = amax != 0.0f ? 127.0f / amax : 0.0f;

	b->qs[LANE] = (int8_t)round_q8(v * inv);
	if (LANE == 0)
		b->d = f32_to_f16(amax / 127.0f);
}

/*
 * type_form(): row number k of n floats in that form, by a block of threads; who reads it waits for
 * them first. A row begins with the warp behind the one at which the row before ended: it may have
 * fewer blocks than there are warps.
 */
DEVICE void q8_k_form(const float *x, void *act, uint32_t n, uint32_t k)
{
	for (uint32_t i = (WARP - k * (n / QK_K)) % CUDA_ROWS; i < n / QK_K; i += CUDA_ROWS)
		q8_k_block(x + i * QK_K, (struct block_q8_k *)act + i);
}

DEVICE void q8_0_form(const float *x, void *act, uint32_t n, uint32_t k)
{
	for (uint32_t i = (WARP - k * (n / QK_0)) % CUDA_ROWS; i < n / QK_0; i += CUDA_ROWS)
		q8_0_block(x + i * QK_0, (struct block_q8_0 *)act + i);
}

#define DEFINE_FORM(type, element, convert)                                        \
	DEVICE void type##_form(const float *x, void *act, uint32_t n, uint32_t k) \
	{                                                                          \
		(void)k;                                                           \
		for (uint32_t i = threadIdx.x; i < n; i += CUDA_THREADS)           \
			((element *)act)[i] = convert(x[i]);                       \
	}

DEFINE_FORM(f16, uint16_t, f32_to_f16)
DEFINE_FORM(bf16, uint16_t, f32_to_bf16)
DEFINE_FORM(f32, float, )
