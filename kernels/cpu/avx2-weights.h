/* SPDX-License-Identifier: MIT */
/*
 * avx2-weights.h: blocks of quantised weights in registers of AVX2: 32 elements at a time, as a
 * product wants them.
 *
 * Owns no state. Included, within their guard, by files that are compiled for AVX2, FMA and F16C or
 * more. Refuses to know formats in prose: ref-quant.c describes them. Two families: blocks of 32
 * elements with one scale, and super-blocks of 256 whose sub-blocks of 16 or 32 have integer
 * scales. `type` and `j` are constants where these functions are inlined, so nothing is kept
 * between two calls: what they have in common, the compiler finds. Invariants: no magnitude is
 * above 128; no load assumes alignment, or reads beyond the block.
 */
#pragma once

#include "kernels/cpu/avx2.h"
#include "kernels/cpu/codebook.h"

INLINE __m128i load_64(const void *p)
{
	return _mm_loadl_epi64(p);
}

INLINE float load_f16(const void *p)
{
	uint16_t h;

	memcpy(&h, p, sizeof(h));
	return _cvtsh_ss(h);
}

/* 32 elements: magnitudes, and bytes of their signs, which are undefined where has_signs() says no. */
struct quants {
	__m256i mag, sign;
};

INLINE bool has_signs(enum quant_type type)
{
	switch (type) {
	case QUANT_Q4_1:
	case QUANT_Q5_1:
	case QUANT_Q2_K:
	case QUANT_Q3_K:
	case QUANT_Q4_K:
	case QUANT_Q5_K:
	case QUANT_Q6_K: return false;
	default: return true;
	}
}

/* Magnitudes of these are 1 << shift above the element; 0: they are not. */
INLINE int offset_shift(enum quant_type type)
{
	return type == QUANT_Q3_K ? 2 : type == QUANT_Q6_K ? 5 : 0;
}

INLINE bool has_mins(enum quant_type type)
{
	return !has_signs(type) && !offset_shift(type);
}

INLINE struct quants from_signed(__m256i q)
{
	return (struct quants){ _mm256_abs_epi8(q), q };
}

INLINE struct quants from_unsigned(__m256i q)
{
	return (struct quants){ q, q };
}

/* The elements themselves. */
INLINE __m256i to_signed(enum quant_type type, struct quants q)
{
	if (has_signs(type))
		return _mm256_sign_epi8(q.mag, q.sign);
	if (offset_shift(type))
		return _mm256_sub_epi8(q.mag, _mm256_set1_epi8((char)(1 << offset_shift(type))));
	return q.mag;
}

/* The nibbles of 16 bytes: low ones first. */
INLINE __m256i nibbles(__m128i bytes)
{
	__m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);

	return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

INLINE __m256i look_up(__m128i table, __m256i index)
{
	return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index);
}

/* 32 bits to bytes of all ones or zeros. */
INLINE __m256i spread_bits(uint32_t bits)
{
	const __m256i byte =
		_mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
	const __m256i bit = _mm256_set1_epi64x((long long)UINT64_C(0x8040201008040201));
	__m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte);

	return _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
}

/* Blocks of 32. */

INLINE size_t bytes_32(enum quant_type type)
{
	switch (type) {
	case QUANT_Q8_0: return sizeof(struct block_q8_0);
	case QUANT_Q4_1: return sizeof(struct block_q4_1);
	case QUANT_Q5_0: return sizeof(struct block_q5_0);
	case QUANT_Q5_1: return sizeof(struct block_q5_1);
	case QUANT_MXFP4: return sizeof(struct block_mxfp4);
	default: return sizeof(struct block_q4_0); /* and of IQ4_NL */
	}
}

INLINE struct quants quants_32(enum quant_type type, const uint8_t *w)
{
	const __m128i mxfp4 = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
	__m256i q, high;

	if (type == QUANT_Q8_0)
		return from_signed(load_256(w + offsetof(struct block_q8_0, qs)));
	q = nibbles(load_128(w + bytes_32(type) - QK_0 / 2)); /* the last field of all the others */
	if (type == QUANT_Q4_1)
		return from_unsigned(q);
	if (type == QUANT_Q4_0)
		return from_signed(_mm256_sub_epi8(q, _mm256_set1_epi8(8)));
	if (type == QUANT_MXFP4)
		return from_signed(look_up(mxfp4, q));
	if (type == QUANT_IQ4_NL)
		return from_signed(look_up(load_128(codebook_iq4), q));
	if (type == QUANT_Q5_1) {
		high = spread_bits(load_u32(w + offsetof(struct block_q5_1, qh)));
		return from_unsigned(_mm256_or_si256(q, _mm256_and_si256(high, _mm256_set1_epi8(16))));
	}
	/* Without the fifth bit an element is 16 less than its nibble. */
	high = spread_bits(load_u32(w + offsetof(struct block_q5_0, qh)));
	return from_signed(_mm256_or_si256(q, _mm256_andnot_si256(high, _mm256_set1_epi8(-16))));
}

/* The scale. */
INLINE float scale_32(enum quant_type type, const uint8_t *w)
{
	uint32_t e = w[0];

	_Static_assert(offsetof(struct block_q8_0, d) == 0 && offsetof(struct block_q4_0, d) == 0 &&
			       offsetof(struct block_mxfp4, e) == 0,
		       "scales come first");
	if (type != QUANT_MXFP4)
		return load_f16(w);
	e = e < 2 ? 0x200000u << e : (e - 1) << 23; /* 2^(e - 128); the two smallest are denormal */
	return load_f32(&e);
}

/* Four numbers of half precision: converted together, which is much of the work of a short block. */
INLINE __m128 load_4_f16(const uint8_t *p, size_t next)
{
	uint16_t h[4];

	UNROLL
	for (size_t i = 0; i < 4; i++)
		memcpy(&h[i], p + i * next, sizeof(h[i]));
	return _mm_cvtph_ps(_mm_cvtsi64_si128(
		(int64_t)(h[0] | (uint64_t)h[1] << 16 | (uint64_t)h[2] << 32 | (uint64_t)h[3] << 48)));
}

/* The scales of four blocks. */
INLINE __m128 scales_32(enum quant_type type, const uint8_t *w)
{
	const size_t next = bytes_32(type);
	__m128i e, normal, denormal;

	if (type != QUANT_MXFP4)
		return load_4_f16(w, next);
	e = _mm_setr_epi32(w[0], w[next], w[2 * next], w[3 * next]);
	normal = _mm_slli_epi32(_mm_sub_epi32(e, _mm_set1_epi32(1)), 23);
	denormal = _mm_sllv_epi32(_mm_set1_epi32(0x200000), e);
	return _mm_castsi128_ps(
		_mm_blendv_epi8(normal, denormal, _mm_cmplt_epi32(e, _mm_set1_epi32(2))));
}

/* Super-blocks. */

INLINE size_t bytes_256(enum quant_type type)
{
	switch (type) {
	case QUANT_Q2_K: return sizeof(struct block_q2_k);
	case QUANT_Q3_K: return sizeof(struct block_q3_k);
	case QUANT_Q4_K: return sizeof(struct block_q4_k);
	case QUANT_Q5_K: return sizeof(struct block_q5_k);
	case QUANT_Q6_K: return sizeof(struct block_q6_k);
	case QUANT_IQ2_XXS: return sizeof(struct block_iq2_xxs);
	case QUANT_IQ2_XS: return sizeof(struct block_iq2_xs);
	case QUANT_IQ3_XXS: return sizeof(struct block_iq3_xxs);
	default: return sizeof(struct block_iq4_xs);
	}
}

/* What holds for all of a super-block. */
struct super {
	float d, dmin;
	/*
	 * 16 bits each, the same eight in both halves: of the sub-blocks of 32; or of those of 16
	 * in the first 128 elements, and in the others.
	 */
	__m256i scales[2];
	/* 16 bits for each sub-block of 16: minimums, or the scales of types with an offset. */
	__m256i mins;
};

INLINE bool scales_of_16(enum quant_type type)
{
	return type == QUANT_Q2_K || type == QUANT_Q3_K || type == QUANT_Q6_K || type == QUANT_IQ2_XS;
}

INLINE void set_scales_8(struct super *b, __m128i scales)
{
	b->scales[0] = b->scales[1] = _mm256_broadcastsi128_si256(scales);
}

INLINE void set_scales_16(struct super *b, __m256i scales)
{
	b->scales[0] = _mm256_permute4x64_epi64(scales, 0x44);
	b->scales[1] = _mm256_permute4x64_epi64(scales, 0xee);
	b->mins = scales;
}

INLINE void open_q45(const uint8_t *w, struct super *b)
{
	const uint8_t *s = w + offsetof(struct block_q4_k, scales);
	const uint32_t lo = load_u32(s), mid = load_u32(s + 4), hi = load_u32(s + 8);
	__m128i scales, mins;

	_Static_assert(offsetof(struct block_q4_k, scales) == offsetof(struct block_q5_k, scales),
		       "same start");
	b->d = load_f16(w + offsetof(struct block_q4_k, d));
	b->dmin = load_f16(w + offsetof(struct block_q4_k, dmin));
	scales = _mm_set_epi32(0, 0, (int)((hi & 0x0f0f0f0f) | (lo >> 2 & 0x30303030)),
			       (int)(lo & 0x3f3f3f3f));
	mins = _mm_set_epi32(0, 0, (int)((hi >> 4 & 0x0f0f0f0f) | (mid >> 2 & 0x30303030)),
			     (int)(mid & 0x3f3f3f3f));
	set_scales_8(b, _mm_cvtepu8_epi16(scales));
	mins = _mm_cvtepu8_epi16(mins);
	b->mins = _mm256_set_m128i(_mm_unpackhi_epi16(mins, mins), _mm_unpacklo_epi16(mins, mins));
}

INLINE void open_q2(const uint8_t *w, struct super *b)
{
	__m128i both = load_128(w + offsetof(struct block_q2_k, scales)), m4 = _mm_set1_epi8(15);

	b->d = load_f16(w + offsetof(struct block_q2_k, d));
	b->dmin = load_f16(w + offsetof(struct block_q2_k, dmin));
	set_scales_16(b, _mm256_cvtepu8_epi16(_mm_and_si128(both, m4)));
	b->mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(both, 4), m4));
}

INLINE void open_q3(const uint8_t *w, struct super *b)
{
	const uint8_t *s = w + offsetof(struct block_q3_k, scales);
	__m128i low = load_64(s), high = _mm_set1_epi32((int)load_u32(s + 8));

	b->d = load_f16(w + offsetof(struct block_q3_k, d));
	low = _mm_unpacklo_epi64(low, _mm_srli_epi16(low, 4));
	high = _mm_slli_epi16(_mm_srlv_epi32(high, _mm_setr_epi32(0, 2, 4, 6)), 4);
	low = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)),
			   _mm_and_si128(high, _mm_set1_epi8(48)));
	set_scales_16(b, _mm256_cvtepi8_epi16(_mm_sub_epi8(low, _mm_set1_epi8(32))));
}

INLINE void open_q6(const uint8_t *w, struct super *b)
{
	b->d = load_f16(w + offsetof(struct block_q6_k, d));
	set_scales_16(b, _mm256_cvtepi8_epi16(load_128(w + offsetof(struct block_q6_k, scales))));
}

INLINE void open_iq4_xs(const uint8_t *w, struct super *b)
{
	uint32_t l = load_u32(w + offsetof(struct block_iq4_xs, scales_l));
	__m128i low = _mm_unpacklo_epi8(_mm_cvtsi32_si128((int)(l & 0x0f0f0f0f)),
					_mm_cvtsi32_si128((int)(l >> 4 & 0x0f0f0f0f)));
	uint16_t h;
	__m128i high;

	memcpy(&h, w + offsetof(struct block_iq4_xs, scales_h), sizeof(h));
	/* To the top of 16 bits, where the first pair comes from the bottom. */
	high = _mm_mullo_epi16(_mm_set1_epi16((short)h),
			       _mm_setr_epi16(1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4,
					      1 << 2, 1));
	high = _mm_and_si128(_mm_srli_epi16(high, 10), _mm_set1_epi16(48));
	b->d = load_f16(w + offsetof(struct block_iq4_xs, d));
	set_scales_8(b, _mm_sub_epi16(_mm_or_si128(_mm_cvtepu8_epi16(low), high), _mm_set1_epi16(32)));
}

/* 2 s + 1 of the upper four bits of each number. */
INLINE __m256i odd_scales(__m256i rest)
{
	return _mm256_or_si256(_mm256_srli_epi32(rest, 27), _mm256_set1_epi32(1));
}

INLINE void open_iq2_xxs(const uint8_t *w, struct super *b)
{
	const uint8_t *qs = w + offsetof(struct block_iq2_xxs, qs);
	__m256 lo = _mm256_castsi256_ps(load_256(qs)), hi = _mm256_castsi256_ps(load_256(qs + 32));
	__m256i s = odd_scales(_mm256_castps_si256(_mm256_shuffle_ps(lo, hi, 0xdd)));

	b->d = load_f16(w + offsetof(struct block_iq2_xxs, d)) * 0.125f;
	/* In pairs now: 0 and 2 in the lower half, 1 and 3 in the upper one. */
	b->scales[0] = b->scales[1] = _mm256_permutevar8x32_epi32(
		_mm256_packs_epi32(s, s), _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
}

INLINE void open_iq2_xs(const uint8_t *w, struct super *b)
{
	const __m128i m = _mm_set1_epi8(0x1e);
	__m128i s = load_64(w + offsetof(struct block_iq2_xs, scales));

	b->d = load_f16(w + offsetof(struct block_iq2_xs, d)) * 0.125f;
	s = _mm_unpacklo_epi8(_mm_and_si128(_mm_slli_epi16(s, 1), m),
			      _mm_and_si128(_mm_srli_epi16(s, 3), m));
	set_scales_16(b, _mm256_cvtepu8_epi16(_mm_or_si128(s, _mm_set1_epi8(1))));
}

INLINE void open_iq3_xxs(const uint8_t *w, struct super *b)
{
	__m256i s = odd_scales(load_256(w + offsetof(struct block_iq3_xxs, qs) + QK_K / 4));

	b->d = load_f16(w + offsetof(struct block_iq3_xxs, d)) * 0.25f;
	b->scales[0] = b->scales[1] = _mm256_permute4x64_epi64(_mm256_packs_epi32(s, s), 0x88);
}

INLINE struct super open_256(enum quant_type type, const uint8_t *w)
{
	struct super b = { .mins = _mm256_setzero_si256() };

	if (type == QUANT_Q4_K || type == QUANT_Q5_K)
		open_q45(w, &b);
	else if (type == QUANT_Q6_K)
		open_q6(w, &b);
	else if (type == QUANT_Q2_K)
		open_q2(w, &b);
	else if (type == QUANT_Q3_K)
		open_q3(w, &b);
	else if (type == QUANT_IQ2_XXS)
		open_iq2_xxs(w, &b);
	else if (type == QUANT_IQ2_XS)
		open_iq2_xs(w, &b);
	else if (type == QUANT_IQ3_XXS)
		open_iq3_xxs(w, &b);
	else
		open_iq4_xs(w, &b);
	return b;
}

/* The scale of each of the elements 32 j to 32 j + 31, two elements in 16 bits. */
INLINE __m256i scale_256(enum quant_type type, const struct super *b, int j)
{
	const short of_8 = (short)(0x0100 + 0x0202 * j), of_16 = (short)(0x0100 + 0x0404 * (j % 4));
	__m256i pick = _mm256_set1_epi16(of_8);

	if (scales_of_16(type))
		pick = _mm256_set_m128i(_mm_set1_epi16((short)(of_16 + 0x0202)), _mm_set1_epi16(of_16));
	return _mm256_shuffle_epi8(b->scales[scales_of_16(type) ? j / 4 : 0], pick);
}

/* Bit `from` of every byte, a constant as is `to`, as bit `to`; and nothing else but `mask`. */
INLINE __m256i move_bits(__m256i bytes, int from, int to, char mask)
{
	if (from < to)
		bytes = _mm256_slli_epi16(bytes, to - from);
	else if (from > to)
		bytes = _mm256_srli_epi16(bytes, from - to);
	return _mm256_and_si256(bytes, _mm256_set1_epi8(mask));
}

/* Groups by their codebook: magnitudes from 8 or 4 bytes of index, signs from four times seven bits. */

INLINE __m256i signs_4(uint32_t s)
{
	const uint64_t *signs = codebook_signs;

	return _mm256_setr_epi64x((long long)signs[s & 127], (long long)signs[s >> 7 & 127],
				  (long long)signs[s >> 14 & 127], (long long)signs[s >> 21 & 127]);
}

INLINE struct quants quants_iq2_xxs(const uint8_t *group)
{
	const uint64_t *grid = codebook_iq2_xxs;
	uint32_t i = load_u32(group);

	return (struct quants){
		_mm256_setr_epi64x((long long)grid[i & 255], (long long)grid[i >> 8 & 255],
				   (long long)grid[i >> 16 & 255], (long long)grid[i >> 24]),
		signs_4(load_u32(group + 4)),
	};
}

INLINE struct quants quants_iq2_xs(const uint8_t *group)
{
	const uint64_t *grid = codebook_iq2_xs, *signs = codebook_signs;
	uint16_t i[4];

	memcpy(i, group, sizeof(i));
	return (struct quants){
		_mm256_setr_epi64x((long long)grid[i[0] & 511], (long long)grid[i[1] & 511],
				   (long long)grid[i[2] & 511], (long long)grid[i[3] & 511]),
		_mm256_setr_epi64x((long long)signs[i[0] >> 9], (long long)signs[i[1] >> 9],
				   (long long)signs[i[2] >> 9], (long long)signs[i[3] >> 9]),
	};
}

INLINE struct quants quants_iq3_xxs(const uint8_t *i, const uint8_t *rest)
{
	const uint32_t *grid = codebook_iq3_xxs;

	return (struct quants){
		_mm256_setr_epi32((int)grid[i[0]], (int)grid[i[1]], (int)grid[i[2]], (int)grid[i[3]],
				  (int)grid[i[4]], (int)grid[i[5]], (int)grid[i[6]], (int)grid[i[7]]),
		signs_4(load_u32(rest)),
	};
}

INLINE __m256i quants_q6(const uint8_t *w, int j)
{
	const size_t half = (size_t)j / 4, l = 64 * half + 32 * ((size_t)j % 2);
	__m256i low = load_256(w + offsetof(struct block_q6_k, ql) + l);
	__m256i high = load_256(w + offsetof(struct block_q6_k, qh) + 32 * half);

	return _mm256_or_si256(move_bits(low, j % 4 < 2 ? 0 : 4, 0, 15),
			       move_bits(high, j % 4 * 2, 4, 48));
}

/* Elements 32 j to 32 j + 31. */
INLINE struct quants quants_256(enum quant_type type, const uint8_t *w, int j)
{
	const size_t i = (size_t)j;
	__m256i q, high;

	switch (type) {
	case QUANT_Q2_K:
		return from_unsigned(move_bits(
			load_256(w + offsetof(struct block_q2_k, qs) + i / 4 * 32), j % 4 * 2, 0, 3));
	case QUANT_Q3_K:
		q = load_256(w + offsetof(struct block_q3_k, qs) + i / 4 * 32);
		high = load_256(w + offsetof(struct block_q3_k, hmask));
		return from_unsigned(
			_mm256_or_si256(move_bits(q, j % 4 * 2, 0, 3), move_bits(high, j, 2, 4)));
	case QUANT_Q4_K:
		q = load_256(w + offsetof(struct block_q4_k, qs) + i / 2 * 32);
		return from_unsigned(move_bits(q, j % 2 * 4, 0, 15));
	case QUANT_Q5_K:
		q = load_256(w + offsetof(struct block_q5_k, qs) + i / 2 * 32);
		high = load_256(w + offsetof(struct block_q5_k, qh));
		return from_unsigned(
			_mm256_or_si256(move_bits(q, j % 2 * 4, 0, 15), move_bits(high, j, 4, 16)));
	case QUANT_Q6_K: return from_unsigned(quants_q6(w, j));
	case QUANT_IQ2_XXS: return quants_iq2_xxs(w + offsetof(struct block_iq2_xxs, qs) + 8 * i);
	case QUANT_IQ2_XS: return quants_iq2_xs(w + offsetof(struct block_iq2_xs, qs) + 8 * i);
	case QUANT_IQ3_XXS:
		w += offsetof(struct block_iq3_xxs, qs);
		return quants_iq3_xxs(w + 8 * i, w + QK_K / 4 + 4 * i);
	default:
		q = nibbles(load_128(w + offsetof(struct block_iq4_xs, qs) + 16 * i));
		return from_signed(look_up(load_128(codebook_iq4), q));
	}
}
