/* SPDX-License-Identifier: MIT */
/*
 * neon-unpack.h: blocks of weights as integers in vectors, for 64-bit ARM: the one form that every
 * quantised type takes before anything is computed with it.
 *
 * Owns nothing. Included by neon-quant.c and neon-dot.h. Refuses to know activations and formats in
 * prose: ref-quant.c describes those. `type` is a constant where these functions are called. A type
 * is one of blocks of 32 elements (value = d * q + m) or one of super-blocks of 256 (value = d *
 * scale * q - dmin * min, by sub-blocks of 32 or 16), and comes 32 or 64 elements at a time, which
 * fit into registers. Invariant: no load assumes alignment or reaches beyond the block.
 */
#pragma once

#include "kernels/cpu/codebook.h"
#include "kernels/cpu/neon.h"

INLINE bool is_plain(enum quant_type type)
{
	return type == QUANT_F32 || type == QUANT_F16 || type == QUANT_BF16;
}

/* Blocks of 32 elements, and super-blocks the others. */
INLINE bool is_32(enum quant_type type)
{
	return type == QUANT_Q8_0 || type == QUANT_Q4_0 || type == QUANT_Q4_1 || type == QUANT_Q5_0 ||
	       type == QUANT_Q5_1 || type == QUANT_MXFP4 || type == QUANT_IQ4_NL;
}

INLINE bool has_min(enum quant_type type)
{
	return type == QUANT_Q4_1 || type == QUANT_Q5_1 || type == QUANT_Q2_K ||
	       type == QUANT_Q4_K || type == QUANT_Q5_K;
}

INLINE size_t block_bytes(enum quant_type type)
{
	return type == QUANT_Q8_0      ? sizeof(struct block_q8_0)
	       : type == QUANT_Q4_0    ? sizeof(struct block_q4_0)
	       : type == QUANT_Q4_1    ? sizeof(struct block_q4_1)
	       : type == QUANT_Q5_0    ? sizeof(struct block_q5_0)
	       : type == QUANT_Q5_1    ? sizeof(struct block_q5_1)
	       : type == QUANT_MXFP4   ? sizeof(struct block_mxfp4)
	       : type == QUANT_IQ4_NL  ? sizeof(struct block_iq4_nl)
	       : type == QUANT_Q2_K    ? sizeof(struct block_q2_k)
	       : type == QUANT_Q3_K    ? sizeof(struct block_q3_k)
	       : type == QUANT_Q4_K    ? sizeof(struct block_q4_k)
	       : type == QUANT_Q5_K    ? sizeof(struct block_q5_k)
	       : type == QUANT_Q6_K    ? sizeof(struct block_q6_k)
	       : type == QUANT_IQ2_XXS ? sizeof(struct block_iq2_xxs)
	       : type == QUANT_IQ2_XS  ? sizeof(struct block_iq2_xs)
	       : type == QUANT_IQ3_XXS ? sizeof(struct block_iq3_xxs)
				       : sizeof(struct block_iq4_xs);
}

INLINE uint32_t load_u32(const uint8_t *p)
{
	uint32_t u;

	memcpy(&u, p, sizeof(u));
	return u;
}

/* Sixteen nibbles: the low or the high ones. */
INLINE uint8x16_t nibbles(uint8x16_t bytes, bool high)
{
	return high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
}

/* `value` where the bit is set, else 0. */
INLINE uint8x16_t select_bit(uint8x16_t bytes, size_t bit, uint8_t value)
{
	return vandq_u8(vtstq_u8(bytes, vdupq_n_u8((uint8_t)(1u << bit))), vdupq_n_u8(value));
}

/* Blocks of 32 elements. */

/* Without a minimum m is -0: what it is added to stays what it is, the sign of a zero too. */
struct scale_32 {
	float d, m;
};

INLINE struct scale_32 scale_32(enum quant_type type, const uint8_t *w)
{
	struct scale_32 s = { .m = -0.0f };
	uint32_t e = w[0];

	_Static_assert(offsetof(struct block_q8_0, d) == 0 && offsetof(struct block_q4_0, d) == 0 &&
			       offsetof(struct block_q4_1, d) == 0 &&
			       offsetof(struct block_q5_0, d) == 0 &&
			       offsetof(struct block_q5_1, d) == 0 &&
			       offsetof(struct block_iq4_nl, d) == 0 &&
			       offsetof(struct block_mxfp4, e) == 0,
		       "scales come first");
	_Static_assert(offsetof(struct block_q4_1, m) == offsetof(struct block_q5_1, m), "same place");
	if (type == QUANT_MXFP4) {
		e = e < 2 ? 0x200000u << e : (e - 1) << 23; /* 2^(e - 128); the two smallest are denormal */
		s.d = load_f32(&e);
	} else {
		s.d = load_f16(w);
	}
	if (has_min(type))
		s.m = load_f16(w + offsetof(struct block_q4_1, m));
	return s;
}

/* Sixteen of the 32 bits to bytes: 16 where one is set. */
INLINE uint8x16_t fifth_bits(const uint8_t *qh)
{
	const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
	uint8x16_t bytes = vcombine_u8(vdup_n_u8(qh[0]), vdup_n_u8(qh[1]));

	return vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(16));
}

INLINE void unpack_32(enum quant_type type, const uint8_t *w, int8x16_t q[2])
{
	static const int8_t mxfp4[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
	const size_t qs = type == QUANT_Q8_0     ? offsetof(struct block_q8_0, qs)
			  : type == QUANT_Q4_0   ? offsetof(struct block_q4_0, qs)
			  : type == QUANT_Q4_1   ? offsetof(struct block_q4_1, qs)
			  : type == QUANT_Q5_0   ? offsetof(struct block_q5_0, qs)
			  : type == QUANT_Q5_1   ? offsetof(struct block_q5_1, qs)
			  : type == QUANT_IQ4_NL ? offsetof(struct block_iq4_nl, qs)
						 : offsetof(struct block_mxfp4, qs);
	const uint8_t *qh = w + (type == QUANT_Q5_0 ? offsetof(struct block_q5_0, qh)
						    : offsetof(struct block_q5_1, qh));

	UNROLL
	for (size_t i = 0; i < 2; i++) {
		uint8x16_t n;

		if (type == QUANT_Q8_0) {
			q[i] = vreinterpretq_s8_u8(vld1q_u8(w + qs + 16 * i));
			continue;
		}
		n = nibbles(vld1q_u8(w + qs), i == 1);
		if (type == QUANT_Q5_0 || type == QUANT_Q5_1)
			n = vorrq_u8(n, fifth_bits(qh + 2 * i));
		q[i] = type == QUANT_MXFP4    ? vqtbl1q_s8(vld1q_s8(mxfp4), n)
		       : type == QUANT_IQ4_NL ? vqtbl1q_s8(vld1q_s8(codebook_iq4), n)
					      : vreinterpretq_s8_u8(n);
		if (type == QUANT_Q4_0 || type == QUANT_Q5_0)
			q[i] = vsubq_s8(q[i], vdupq_n_s8(type == QUANT_Q4_0 ? 8 : 16));
	}
}

/* Super-blocks of 256 elements. */

/* Elements that share a scale. */
INLINE size_t sub_block(enum quant_type type)
{
	return type == QUANT_Q2_K || type == QUANT_Q3_K || type == QUANT_Q6_K || type == QUANT_IQ2_XS
		       ? 16
		       : 32;
}

struct super {
	float d, dmin;
	int32_t scale[QK_K / 16]; /* one a sub-block */
	int16x8_t min[2];         /* one for 16 elements; with has_min() */
};

/* Eight scales and eight minimums of 6 bits in 12 bytes. */
INLINE void unpack_k_scales(const uint8_t *s, struct super *b)
{
	uint32_t a = load_u32(s), m = load_u32(s + 4), high = load_u32(s + 8);
	uint64_t scales = a & 0x3f3f3f3f, mins = m & 0x3f3f3f3f;
	uint16x8_t wide;

	scales |= (uint64_t)((high & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
	mins |= (uint64_t)((high >> 4 & 0x0f0f0f0f) | (m >> 2 & 0x30303030)) << 32;
	wide = vmovl_u8(vcreate_u8(scales));
	vst1q_s32(b->scale, vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide))));
	vst1q_s32(b->scale + 4, vreinterpretq_s32_u32(vmovl_high_u16(wide)));
	wide = vmovl_u8(vcreate_u8(mins));
	b->min[0] = vreinterpretq_s16_u16(vzip1q_u16(wide, wide));
	b->min[1] = vreinterpretq_s16_u16(vzip2q_u16(wide, wide));
}

INLINE void store_scales(int32_t *scale, int8x16_t s)
{
	int16x8_t lo = vmovl_s8(vget_low_s8(s)), hi = vmovl_high_s8(s);

	vst1q_s32(scale, vmovl_s16(vget_low_s16(lo)));
	vst1q_s32(scale + 4, vmovl_high_s16(lo));
	vst1q_s32(scale + 8, vmovl_s16(vget_low_s16(hi)));
	vst1q_s32(scale + 12, vmovl_high_s16(hi));
}

INLINE struct super unpack_q2_super(const uint8_t *w)
{
	uint8x16_t s = vld1q_u8(w + offsetof(struct block_q2_k, scales)), mins = nibbles(s, true);
	struct super b;

	b.d = load_f16(w + offsetof(struct block_q2_k, d));
	b.dmin = load_f16(w + offsetof(struct block_q2_k, dmin));
	store_scales(b.scale, vreinterpretq_s8_u8(nibbles(s, false)));
	b.min[0] = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(mins)));
	b.min[1] = vreinterpretq_s16_u16(vmovl_high_u8(mins));
	return b;
}

/*
 * Low nibbles of scales 0-7 and 8-15 in eight bytes, then bit pairs: of scale s in byte s % 4 at 2
 * (s / 4).
 */
INLINE void unpack_q3_scales(const uint8_t *s, int32_t *scale)
{
	const int32_t down[4] = { 0, -2, -4, -6 };
	uint8x8_t low = vld1_u8(s);
	uint8x16_t q = nibbles(vcombine_u8(low, vshr_n_u8(low, 4)), false);
	uint32x4_t pairs = vshlq_u32(vdupq_n_u32(load_u32(s + 8)), vld1q_s32(down));
	uint8x16_t high = vandq_u8(vreinterpretq_u8_u32(pairs), vdupq_n_u8(3));

	q = vorrq_u8(q, vshlq_n_u8(high, 4));
	store_scales(scale, vsubq_s8(vreinterpretq_s8_u8(q), vdupq_n_s8(32)));
}

INLINE void unpack_iq4_scales(const uint8_t *w, int32_t *scale)
{
	uint32_t low = load_u32(w + offsetof(struct block_iq4_xs, scales_l));
	uint16_t high;

	memcpy(&high, w + offsetof(struct block_iq4_xs, scales_h), sizeof(high));
	for (size_t s = 0; s < QK_K / 32; s++)
		scale[s] = (int32_t)((low >> 4 * s & 15) | (high >> 2 * s & 3u) << 4) - 32;
}

INLINE struct super unpack_super(enum quant_type type, const uint8_t *w)
{
	struct super b;

	_Static_assert(offsetof(struct block_q4_k, dmin) == offsetof(struct block_q5_k, dmin) &&
			       offsetof(struct block_q4_k, scales) == offsetof(struct block_q5_k, scales),
		       "same start");
	_Static_assert(offsetof(struct block_q4_k, d) == 0 && offsetof(struct block_iq2_xxs, d) == 0 &&
			       offsetof(struct block_iq2_xs, d) == 0 &&
			       offsetof(struct block_iq3_xxs, d) == 0 &&
			       offsetof(struct block_iq4_xs, d) == 0,
		       "scales come first");
	if (type == QUANT_Q2_K)
		return unpack_q2_super(w);
	b.d = load_f16(w + (type == QUANT_Q3_K   ? offsetof(struct block_q3_k, d)
			    : type == QUANT_Q6_K ? offsetof(struct block_q6_k, d)
						 : 0));
	b.dmin = 0.0f;
	b.min[0] = b.min[1] = vdupq_n_s16(0);
	if (type == QUANT_Q3_K) {
		unpack_q3_scales(w + offsetof(struct block_q3_k, scales), b.scale);
	} else if (type == QUANT_Q4_K || type == QUANT_Q5_K) {
		b.dmin = load_f16(w + offsetof(struct block_q4_k, dmin));
		unpack_k_scales(w + offsetof(struct block_q4_k, scales), &b);
	} else if (type == QUANT_Q6_K) {
		store_scales(b.scale,
			     vreinterpretq_s8_u8(vld1q_u8(w + offsetof(struct block_q6_k, scales))));
	} else if (type == QUANT_IQ4_XS) {
		unpack_iq4_scales(w, b.scale);
	} else if (type == QUANT_IQ2_XS) {
		const uint8_t *s = w + offsetof(struct block_iq2_xs, scales);

		b.d /= 8;
		for (size_t i = 0; i < QK_K / 16; i++)
			b.scale[i] = 2 * (s[i / 2] >> i % 2 * 4 & 15) + 1;
	} else { /* IQ2_XXS, IQ3_XXS: the top four bits of a word for every 32 */
		const uint8_t *s = w + (type == QUANT_IQ2_XXS
						? offsetof(struct block_iq2_xxs, qs) + 4
						: offsetof(struct block_iq3_xxs, qs) + QK_K / 4);

		b.d /= type == QUANT_IQ2_XXS ? 8 : 4;
		for (size_t i = 0; i < QK_K / 32; i++)
			b.scale[i] =
				(int32_t)(load_u32(s + i * (type == QUANT_IQ2_XXS ? 8 : 4)) >> 28) * 2 +
				1;
	}
	return b;
}

/*
 * Vector k of the four that unpack_64() makes, for the types whose bits lie as they do in K-quants.
 */
INLINE int8x16_t unpack_k_16(enum quant_type type, const uint8_t *w, size_t j, size_t k)
{
	const size_t part = 2 * j + k / 2, half = j / 2; /* which 32 elements; which 128 */
	uint8x16_t q;

	if (type == QUANT_Q2_K || type == QUANT_Q3_K) {
		const uint8_t *qs = w + (type == QUANT_Q2_K ? offsetof(struct block_q2_k, qs)
							    : offsetof(struct block_q3_k, qs));

		q = vld1q_u8(qs + 32 * half + k % 2 * 16);
		q = vandq_u8(vshlq_u8(q, vdupq_n_s8((int8_t)(-2 * (int)(part % 4)))), vdupq_n_u8(3));
		if (type == QUANT_Q2_K)
			return vreinterpretq_s8_u8(q);
		q = vorrq_u8(q, select_bit(vld1q_u8(w + offsetof(struct block_q3_k, hmask) + k % 2 * 16),
					   part, 4));
		return vsubq_s8(vreinterpretq_s8_u8(q), vdupq_n_s8(4));
	}
	if (type == QUANT_Q6_K) {
		const uint8_t *ql = w + offsetof(struct block_q6_k, ql) + 64 * half + 16 * k,
			      *qh = w + offsetof(struct block_q6_k, qh) + 32 * half + k % 2 * 16;
		int8x16_t up = vdupq_n_s8((int8_t)(4 - 2 * (int)(part % 4))),
			  down = vdupq_n_s8((int8_t)(-4 * (int)(j % 2)));

		q = vandq_u8(vshlq_u8(vld1q_u8(qh), up), vdupq_n_u8(48));
		q = vorrq_u8(q, vandq_u8(vshlq_u8(vld1q_u8(ql), down), vdupq_n_u8(15)));
		return vsubq_s8(vreinterpretq_s8_u8(q), vdupq_n_s8(32));
	}
	q = nibbles(vld1q_u8(w +
			     (type == QUANT_Q4_K ? offsetof(struct block_q4_k, qs)
						 : offsetof(struct block_q5_k, qs)) +
			     32 * j + k % 2 * 16),
		    k >= 2);
	if (type == QUANT_Q5_K)
		q = vorrq_u8(q, select_bit(vld1q_u8(w + offsetof(struct block_q5_k, qh) + k % 2 * 16),
					   part, 16));
	return vreinterpretq_s8_u8(q);
}

/* Eight elements of a codebook, with the signs of seven bits. */
INLINE int8x8_t signed_8(uint64_t magnitudes, uint32_t signs)
{
	return vmul_s8(vcreate_s8(magnitudes), vcreate_s8(codebook_signs[signs & 127]));
}

/* The same for the types of codebooks. */
INLINE int8x16_t unpack_iq_16(enum quant_type type, const uint8_t *w, size_t j, size_t k)
{
	const size_t part = 2 * j + k / 2, at = k % 2 * 2;
	int8x8_t q[2];

	if (type == QUANT_IQ4_XS) {
		const uint8_t *qs = w + offsetof(struct block_iq4_xs, qs) + 16 * part;

		return vqtbl1q_s8(vld1q_s8(codebook_iq4), nibbles(vld1q_u8(qs), k % 2 == 1));
	}
	UNROLL
	for (size_t i = 0; i < 2; i++) {
		if (type == QUANT_IQ2_XS) {
			uint16_t group;

			memcpy(&group, w + offsetof(struct block_iq2_xs, qs) + 8 * part + 2 * (at + i),
			       sizeof(group));
			q[i] = signed_8(codebook_iq2_xs[group & 511], group >> 9);
		} else if (type == QUANT_IQ2_XXS) {
			const uint8_t *group = w + offsetof(struct block_iq2_xxs, qs) + 8 * part;

			q[i] = signed_8(codebook_iq2_xxs[group[at + i]],
					load_u32(group + 4) >> 7 * (at + i));
		} else {
			const uint8_t *qs = w + offsetof(struct block_iq3_xxs, qs),
				      *group = qs + 8 * part + 2 * (at + i);
			uint64_t low = codebook_iq3_xxs[group[0]], high = codebook_iq3_xxs[group[1]];

			q[i] = signed_8(low | high << 32,
					load_u32(qs + QK_K / 4 + 4 * part) >> 7 * (at + i));
		}
	}
	return vcombine_s8(q[0], q[1]);
}

/* Elements 64 j to 64 j + 63. */
INLINE void unpack_64(enum quant_type type, const uint8_t *w, size_t j, int8x16_t q[4])
{
	UNROLL
	for (size_t k = 0; k < 4; k++)
		q[k] = type == QUANT_IQ2_XXS || type == QUANT_IQ2_XS || type == QUANT_IQ3_XXS ||
				       type == QUANT_IQ4_XS
			       ? unpack_iq_16(type, w, j, k)
			       : unpack_k_16(type, w, j, k);
}
