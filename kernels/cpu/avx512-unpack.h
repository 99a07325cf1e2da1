/* SPDX-License-Identifier: MIT */
/*
 * avx512-unpack.h: what a type of weights is to the products of AVX-512: an unpacker to unsigned
 * bytes, a fixed offset above their value, with scales (and mins).
 *
 * Owns nothing. Included, within their guard, by the two files that multiply; a new type is added
 * here, and everything after unpacking is written once for its family: plain elements, blocks of 32
 * with float scales, super-blocks of 256 with integer ones. Refuses to know formats in prose:
 * ref-quant.c describes them. Every function is inlined with a type that is a constant; nothing is
 * read beyond the blocks given.
 */
#pragma once

#include "kernels/cpu/avx512.h"
#include "kernels/cpu/codebook.h"

#include "daemon/base.h"

INLINE __m512i load_512(const void *p)
{
	return _mm512_loadu_si512(p);
}

INLINE uint64_t load_u64(const void *p)
{
	uint64_t u;

	memcpy(&u, p, sizeof(u));
	return u;
}

/*
 * Most of this works on four things at once, each in a 128-bit lane: four rows, or four blocks of a
 * row.
 */

INLINE __m512i four_vectors(const __m128i v[4])
{
	__m512i r = _mm512_inserti32x4(_mm512_castsi128_si512(v[0]), v[1], 1);

	return _mm512_inserti32x4(_mm512_inserti32x4(r, v[2], 2), v[3], 3);
}

/* Sixteen bytes of each. */
INLINE __m512i four_lanes(const uint8_t *const p[4], size_t at)
{
	const __m128i v[4] = { load_128(p[0] + at), load_128(p[1] + at), load_128(p[2] + at),
			       load_128(p[3] + at) };

	return four_vectors(v);
}

/* A number in half precision of each, in all of its lane. */
INLINE __m512 four_halves(const uint8_t *const p[4], size_t at)
{
	const __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
	uint16_t h[4];
	__m128i v;

	UNROLL
	for (size_t i = 0; i < 4; i++)
		memcpy(&h[i], p[i] + at, sizeof(h[i]));
	v = _mm_cvtsi64_si128((int64_t)(h[0] | (uint64_t)h[1] << 16 | (uint64_t)h[2] << 32 |
					(uint64_t)h[3] << 48));
	return _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_cvtph_ps(v)));
}

/* The first n of sixteen. */
INLINE __mmask16 first_lanes(size_t n)
{
	return (__mmask16)(n < 16 ? (1u << n) - 1 : 0xffffu);
}

/* What unpacking needs to know of a type; all of it constant where it is used. */

INLINE size_t block_bytes(enum quant_type type)
{
	switch (type) {
	case QUANT_Q8_0: return sizeof(struct block_q8_0);
	case QUANT_Q4_0: return sizeof(struct block_q4_0);
	case QUANT_Q4_1: return sizeof(struct block_q4_1);
	case QUANT_Q5_0: return sizeof(struct block_q5_0);
	case QUANT_Q5_1: return sizeof(struct block_q5_1);
	case QUANT_IQ4_NL: return sizeof(struct block_iq4_nl);
	case QUANT_MXFP4: return sizeof(struct block_mxfp4);
	case QUANT_Q2_K: return sizeof(struct block_q2_k);
	case QUANT_Q3_K: return sizeof(struct block_q3_k);
	case QUANT_Q4_K: return sizeof(struct block_q4_k);
	case QUANT_Q5_K: return sizeof(struct block_q5_k);
	case QUANT_Q6_K: return sizeof(struct block_q6_k);
	case QUANT_IQ2_XXS: return sizeof(struct block_iq2_xxs);
	case QUANT_IQ2_XS: return sizeof(struct block_iq2_xs);
	case QUANT_IQ3_XXS: return sizeof(struct block_iq3_xxs);
	case QUANT_IQ4_XS: return sizeof(struct block_iq4_xs);
	default: return 0;
	}
}

/* How far above its value an unpacked byte is. */
INLINE int offset_of(enum quant_type type)
{
	switch (type) {
	case QUANT_Q8_0:
	case QUANT_IQ4_NL:
	case QUANT_IQ4_XS: return 128;
	case QUANT_IQ2_XXS:
	case QUANT_IQ2_XS:
	case QUANT_IQ3_XXS: return 64; /* magnitudes are at most 62 */
	case QUANT_Q6_K: return 32;
	case QUANT_Q5_0:
	case QUANT_MXFP4: return 16;
	case QUANT_Q4_0: return 8;
	case QUANT_Q3_K: return 4;
	default: return 0;
	}
}

/* Super-blocks: how many scales. */
INLINE size_t n_scales(enum quant_type type)
{
	switch (type) {
	case QUANT_Q2_K:
	case QUANT_Q3_K:
	case QUANT_Q6_K:
	case QUANT_IQ2_XS: return 16;
	default: return 8;
	}
}

/* One for every scale. */
INLINE bool has_mins(enum quant_type type)
{
	switch (type) {
	case QUANT_Q4_1:
	case QUANT_Q5_1:
	case QUANT_Q2_K:
	case QUANT_Q4_K:
	case QUANT_Q5_K: return true;
	default: return false;
	}
}

/*
 * Super-blocks: 256 elements, of which a vector has twice 32. Where they start in a super-block is
 * what costs least to unpack; activations are loaded likewise.
 */

INLINE bool in_order(enum quant_type type)
{
	return type != QUANT_Q4_K && type != QUANT_Q5_K;
}

INLINE size_t first_half(enum quant_type type, size_t j)
{
	return in_order(type) ? 64 * j : 128 * (j / 2) + 32 * (j % 2);
}

INLINE size_t second_half(enum quant_type type, size_t j)
{
	return first_half(type, j) + (in_order(type) ? 32 : 64);
}

/* Bytes of one number in the first half of a vector, of another one in the second half. */
INLINE __m512i two_bytes(uint8_t a, uint8_t b)
{
	return _mm512_inserti64x4(_mm512_set1_epi8((char)a), _mm256_set1_epi8((char)b), 1);
}

/* The values of codebook_iq4, 128 above themselves. */
INLINE __m512i look_up_iq4(__m512i index)
{
	__m128i table = _mm_xor_si128(load_128(codebook_iq4), _mm_set1_epi8(-128));

	return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index);
}

/* Half i of sixteen bytes. */
INLINE __mmask64 half_mask(__m128i v, size_t i)
{
	return (__mmask64)_mm_cvtsi128_si64(i == 0 ? v : _mm_unpackhi_epi64(v, v));
}

/* Q4_K, Q5_K and Q6_K. */
INLINE void quants_q456(enum quant_type type, const uint8_t *w, size_t pair, __m512i q[2])
{
	const __m512i m4 = _mm512_set1_epi8(15), m2 = _mm512_set1_epi8(48);
	const size_t qs = type == QUANT_Q4_K   ? offsetof(struct block_q4_k, qs)
			  : type == QUANT_Q5_K ? offsetof(struct block_q5_k, qs)
					       : offsetof(struct block_q6_k, ql);
	__m512i both = load_512(w + qs + 64 * pair), h;

	q[0] = _mm512_and_si512(both, m4);
	q[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), m4);
	if (type == QUANT_Q5_K) {
		h = _mm512_broadcast_i64x4(load_256(w + offsetof(struct block_q5_k, qh)));
		UNROLL
		for (size_t i = 0; i < 2; i++) {
			/* Sub-block 4 pair + i, and two more in the upper half. */
			const __m512i bits = two_bytes((uint8_t)(1 << (4 * pair + i)),
						       (uint8_t)(4 << (4 * pair + i)));

			q[i] = _mm512_mask_add_epi8(q[i], _mm512_test_epi8_mask(h, bits), q[i],
						    _mm512_set1_epi8(16));
		}
	}
	if (type == QUANT_Q6_K) {
		const __m512i left = _mm512_mask_set1_epi16(_mm512_set1_epi16(4), 0xffff0000, 2);
		const __m512i right = _mm512_maskz_set1_epi16(0xffff0000, 2);

		h = _mm512_broadcast_i64x4(load_256(w + offsetof(struct block_q6_k, qh) + 32 * pair));
		q[0] = _mm512_or_si512(q[0], _mm512_and_si512(_mm512_sllv_epi16(h, left), m2));
		q[1] = _mm512_or_si512(q[1], _mm512_and_si512(_mm512_srlv_epi16(h, right), m2));
	}
}

/* Q2_K and Q3_K. */
INLINE void quants_q23(enum quant_type type, const uint8_t *w, size_t pair, __m512i q[2])
{
	const size_t qs = type == QUANT_Q2_K ? offsetof(struct block_q2_k, qs)
					     : offsetof(struct block_q3_k, qs);
	const __m512i all = _mm512_broadcast_i64x4(load_256(w + qs + 32 * pair));
	const __m512i three = _mm512_set1_epi8(3);
	__m512i high;

	UNROLL
	for (short i = 0; i < 2; i++) {
		short right = (short)(4 * i);
		const __m512i rights = _mm512_mask_set1_epi16(_mm512_set1_epi16(right), 0xffff0000,
							      (short)(right + 2));

		q[i] = _mm512_and_si512(_mm512_srlv_epi16(all, rights), three);
	}
	if (type == QUANT_Q2_K)
		return;
	high = _mm512_broadcast_i64x4(load_256(w + offsetof(struct block_q3_k, hmask)));
	UNROLL
	for (size_t i = 0; i < 2; i++) {
		/* Sub-block 4 pair + 2 i, and the next one in the upper half. */
		const __m512i bits = two_bytes((uint8_t)(1 << (4 * pair + 2 * i)),
					       (uint8_t)(2 << (4 * pair + 2 * i)));

		q[i] = _mm512_mask_add_epi8(q[i], _mm512_test_epi8_mask(high, bits), q[i],
					    _mm512_set1_epi8(4));
	}
}

INLINE __m512i quants_iq4_xs(const uint8_t *w, size_t j)
{
	const __m512i twice = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
	const __m512i rights = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
	__m512i v = _mm512_castsi256_si512(load_256(w + offsetof(struct block_iq4_xs, qs) + 32 * j));

	/* What comes in from the next byte is masked. */
	v = _mm512_srlv_epi64(_mm512_permutexvar_epi64(twice, v), rights);
	return look_up_iq4(_mm512_and_si512(v, _mm512_set1_epi8(15)));
}

/* IQ2_XXS, IQ2_XS, IQ3_XXS: signs of 128 elements as 16 numbers of codebook_signs. */
INLINE __m128i sign_numbers(enum quant_type type, const uint8_t *w, size_t pair)
{
	const uint8_t *qs = w + offsetof(struct block_iq2_xxs, qs);
	__m128i v;

	if (type == QUANT_IQ2_XS)
		return _mm256_cvtepi16_epi8(_mm256_srli_epi16(load_256(qs + 32 * pair), 9));
	if (type == QUANT_IQ2_XXS)
		v = _mm256_cvtepi64_epi32(_mm256_srli_epi64(load_256(qs + 32 * pair), 32));
	else
		v = load_128(qs + QK_K / 4 + 16 * pair);
	/* Four times seven bits of 32 become bytes. */
	v = _mm_or_si128(_mm_and_si128(v, _mm_set1_epi32(0x3fff)),
			 _mm_slli_epi32(_mm_and_si128(v, _mm_set1_epi32(0x0fffc000)), 2));
	return _mm_or_si128(_mm_and_si128(v, _mm_set1_epi16(0x7f)),
			    _mm_slli_epi16(_mm_and_si128(v, _mm_set1_epi16(0x3f80)), 1));
}

/*
 * What codebook_signs holds for each number, in bits: its own seven, then one that makes the
 * minuses even.
 */
INLINE __m128i minuses(__m128i numbers)
{
	__m128i odd = _mm_xor_si128(numbers, _mm_srli_epi16(numbers, 4));

	odd = _mm_xor_si128(odd, _mm_srli_epi16(odd, 2));
	odd = _mm_xor_si128(odd, _mm_srli_epi16(odd, 1));
	odd = _mm_and_si128(_mm_slli_epi16(odd, 7), _mm_set1_epi8(-128));
	return _mm_or_si128(numbers, odd);
}

/*
 * Entries of a codebook, whose loads one by one take less time than a gather: sixteen of four
 * bytes, by the bytes of two numbers.
 */
INLINE __m512i sixteen_entries(const uint32_t *book, uint64_t low, uint64_t high)
{
	__m128i v[4];

	UNROLL
	for (unsigned i = 0; i < 4; i++) {
		uint64_t at = (i < 2 ? low : high) >> (i % 2 * 32);

		v[i] = _mm_cvtsi32_si128((int)book[at & 255]);
		v[i] = _mm_insert_epi32(v[i], (int)book[at >> 8 & 255], 1);
		v[i] = _mm_insert_epi32(v[i], (int)book[at >> 16 & 255], 2);
		v[i] = _mm_insert_epi32(v[i], (int)book[at >> 24 & 255], 3);
	}
	return four_vectors(v);
}

/* Eight of eight bytes, by the lowest four numbers of `bits` bits, masked, in each of two. */
INLINE __m512i eight_entries(const uint64_t *book, uint64_t low, uint64_t high, unsigned bits,
			     uint64_t mask)
{
	__m128i v[4];

	UNROLL
	for (unsigned i = 0; i < 4; i++) {
		uint64_t from = i < 2 ? low : high;
		unsigned at = i % 2 * 2 * bits;

		v[i] = _mm_loadl_epi64((const __m128i *)&book[from >> at & mask]);
		v[i] = _mm_castps_si128(_mm_loadh_pi(
			_mm_castsi128_ps(v[i]), (const __m64 *)&book[from >> (at + bits) & mask]));
	}
	return four_vectors(v);
}

/* IQ2_XXS, IQ2_XS and IQ3_XXS. */
INLINE void quants_codebook(enum quant_type type, const uint8_t *w, size_t pair, __m512i q[2])
{
	const __m512i offset = _mm512_set1_epi8((char)offset_of(type));
	const uint8_t *index = w + offsetof(struct block_iq2_xxs, qs) + 32 * pair;
	__m128i signs = minuses(sign_numbers(type, w, pair));

	_Static_assert(offsetof(struct block_iq2_xs, qs) == offsetof(struct block_iq2_xxs, qs) &&
			       offsetof(struct block_iq3_xxs, qs) == offsetof(struct block_iq2_xxs, qs),
		       "same start");
	UNROLL
	for (size_t i = 0; i < 2; i++) {
		uint64_t low = load_u64(index + 16 * i), high = load_u64(index + 16 * i + 8);
		__m512i mag =
			type == QUANT_IQ2_XXS  ? eight_entries(codebook_iq2_xxs, low, high, 8, 255)
			: type == QUANT_IQ2_XS ? eight_entries(codebook_iq2_xs, low, high, 16, 511)
					       : sixteen_entries(codebook_iq3_xxs, low, high);

		q[i] = _mm512_mask_sub_epi8(_mm512_add_epi8(offset, mag), half_mask(signs, i),
					    offset, mag);
	}
}

/* 64 unpacked weights each: vectors 2 pair and 2 pair + 1 of a super-block. */
INLINE void quants_super(enum quant_type type, const uint8_t *w, size_t pair, __m512i q[2])
{
	if (type == QUANT_Q4_K || type == QUANT_Q5_K || type == QUANT_Q6_K) {
		quants_q456(type, w, pair, q);
	} else if (type == QUANT_Q2_K || type == QUANT_Q3_K) {
		quants_q23(type, w, pair, q);
	} else if (type == QUANT_IQ4_XS) {
		q[0] = quants_iq4_xs(w, 2 * pair);
		q[1] = quants_iq4_xs(w, 2 * pair + 1);
	} else {
		quants_codebook(type, w, pair, q);
	}
}

/*
 * What stands beside the quants of four rows. Scales and mins are words: eight of row i in lane i,
 * or sixteen of row i in half i % 2 of vector i / 2.
 */
struct supers {
	__m512i scales[2], mins[2];
	__m512 d, dmin; /* of row i in lane i */
};

/* d and dmin, then 8 scales and 8 mins of 6 bits; ref-quant.c has the layout. */
INLINE void unpack_heads_q45(const uint8_t *const w[4], size_t at, struct supers *s)
{
	const __m512i low =
		_mm512_broadcast_i32x4(_mm_set_epi32(0x30303030, 0x3f3f3f3f, 0x30303030, 0x3f3f3f3f));
	const __m512i high = _mm512_broadcast_i32x4(_mm_set_epi32(0x0f0f0f0f, 0, 0x0f0f0f0f, 0));
	const __m512i right_a = _mm512_broadcast_i32x4(_mm_set_epi32(2, 0, 2, 0));
	const __m512i right_b = _mm512_broadcast_i32x4(_mm_set_epi32(4, 0, 0, 0));
	/* Word 0 of every lane, then word 1. */
	const __m512i word = _mm512_set_epi64(0x0019001900190019, 0x0011001100110011,
					      0x0009000900090009, 0x0001000100010001, 0x0018001800180018,
					      0x0010001000100010, 0x0008000800080008, 0);
	__m512i head = four_lanes(w, at), a, b;

	_Static_assert(offsetof(struct block_q4_k, d) == 0 && offsetof(struct block_q4_k, dmin) == 2 &&
			       offsetof(struct block_q4_k, scales) == 4 &&
			       offsetof(struct block_q5_k, d) == 0 &&
			       offsetof(struct block_q5_k, dmin) == 2 &&
			       offsetof(struct block_q5_k, scales) == 4,
		       "the head is sixteen bytes");
	a = _mm512_srlv_epi32(_mm512_shuffle_epi32(head, 0xa5), right_a);
	b = _mm512_srlv_epi32(_mm512_shuffle_epi32(head, 0xff), right_b);
	a = _mm512_or_si512(_mm512_and_si512(a, low), _mm512_and_si512(b, high));
	s->scales[0] = _mm512_unpacklo_epi8(a, _mm512_setzero_si512());
	s->mins[0] = _mm512_unpackhi_epi8(a, _mm512_setzero_si512());
	head = _mm512_permutexvar_epi16(word, head);
	s->d = _mm512_cvtph_ps(_mm512_castsi512_si256(head));
	s->dmin = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(head, 1));
}

INLINE void unpack_heads_q6_k(const uint8_t *const w[4], size_t at, struct supers *s)
{
	size_t scales = at + offsetof(struct block_q6_k, scales);

	UNROLL
	for (size_t i = 0; i < 4; i += 2)
		s->scales[i / 2] = _mm512_cvtepi8_epi16(
			_mm256_set_m128i(load_128(w[i + 1] + scales), load_128(w[i] + scales)));
	s->d = four_halves(w, at + offsetof(struct block_q6_k, d));
}

INLINE void unpack_heads_q2_k(const uint8_t *const w[4], size_t at, struct supers *s)
{
	const __m512i m4 = _mm512_set1_epi16(15);
	size_t scales = at + offsetof(struct block_q2_k, scales);

	UNROLL
	for (size_t i = 0; i < 4; i += 2) {
		__m512i both = _mm512_cvtepu8_epi16(
			_mm256_set_m128i(load_128(w[i + 1] + scales), load_128(w[i] + scales)));

		s->scales[i / 2] = _mm512_and_si512(both, m4);
		s->mins[i / 2] = _mm512_srli_epi16(both, 4);
	}
	s->d = four_halves(w, at + offsetof(struct block_q2_k, d));
	s->dmin = four_halves(w, at + offsetof(struct block_q2_k, dmin));
}

/* Word `at` of every lane, as a number in half precision, in all of its lane. */
INLINE __m512 half_of_lanes(__m512i v, short at)
{
	const __m512i lanes = _mm512_setr_epi64(0, 0x0008000800080008, 0x0010001000100010,
						0x0018001800180018, 0, 0, 0, 0);
	const __m512i index = _mm512_add_epi16(lanes, _mm512_set1_epi16(at));

	return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(index, v)));
}

INLINE void unpack_heads_q3_k(const uint8_t *const w[4], size_t at, struct supers *s)
{
	const __m512i low_at =
		_mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9));
	const __m512i high_at = _mm512_broadcast_i32x4(_mm_set1_epi32(0x0d0c0b0a));
	const __m512i low_right = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 4, 4));
	const __m512i high_right = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 2, 4, 6));
	/* The end of the block: two bytes of others, scales, d. */
	__m512i end = four_lanes(w, at + sizeof(struct block_q3_k) - 16);
	__m512i low = _mm512_srlv_epi32(_mm512_shuffle_epi8(end, low_at), low_right);
	__m512i high = _mm512_srlv_epi32(_mm512_shuffle_epi8(end, high_at), high_right);

	_Static_assert(offsetof(struct block_q3_k, scales) == sizeof(struct block_q3_k) - 14 &&
			       offsetof(struct block_q3_k, d) == sizeof(struct block_q3_k) - 2,
		       "scales and d come last");
	low = _mm512_and_si512(low, _mm512_set1_epi8(15));
	high = _mm512_slli_epi16(_mm512_and_si512(high, _mm512_set1_epi8(3)), 4);
	low = _mm512_sub_epi8(_mm512_or_si512(low, high), _mm512_set1_epi8(32));
	s->scales[0] = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(low));
	s->scales[1] = _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(low, 1));
	s->d = half_of_lanes(end, 7);
}

INLINE void unpack_heads_iq4_xs(const uint8_t *const w[4], size_t at, struct supers *s)
{
	const __m512i low_at = _mm512_broadcast_i32x4(
		_mm_setr_epi8(4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1));
	const __m512i high_at = _mm512_broadcast_i32x4(_mm_set1_epi16(0x0302));
	const __m512i low_right = _mm512_set1_epi32(4 << 16);
	const __m512i high_right = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14));
	__m512i head = four_lanes(w, at);
	__m512i low = _mm512_srlv_epi16(_mm512_shuffle_epi8(head, low_at), low_right);
	__m512i high = _mm512_srlv_epi16(_mm512_shuffle_epi8(head, high_at), high_right);

	_Static_assert(offsetof(struct block_iq4_xs, d) == 0 &&
			       offsetof(struct block_iq4_xs, scales_h) == 2 &&
			       offsetof(struct block_iq4_xs, scales_l) == 4,
		       "the head is eight bytes");
	low = _mm512_and_si512(low, _mm512_set1_epi16(15));
	high = _mm512_slli_epi16(_mm512_and_si512(high, _mm512_set1_epi16(3)), 4);
	s->scales[0] = _mm512_sub_epi16(_mm512_or_si512(low, high), _mm512_set1_epi16(32));
	s->d = half_of_lanes(head, 0);
}

/* Four bits for each scale: of 16 or 8 in a vector of words. */
INLINE __m256i codebook_scales(enum quant_type type, const uint8_t *w)
{
	__m128i v;

	if (type == QUANT_IQ2_XS) {
		v = _mm_cvtepu8_epi16(_mm_loadl_epi64(
			(const __m128i *)(w + offsetof(struct block_iq2_xs, scales))));
		v = _mm_or_si128(v, _mm_slli_epi16(v, 4));
		return _mm256_cvtepu8_epi16(_mm_and_si128(v, _mm_set1_epi8(15)));
	}
	if (type == QUANT_IQ2_XXS) {
		w += offsetof(struct block_iq2_xxs, qs);
		v = _mm512_cvtepi64_epi16(_mm512_srli_epi64(load_512(w), 60));
	} else {
		w += offsetof(struct block_iq3_xxs, qs) + QK_K / 4;
		v = _mm256_cvtepi32_epi16(_mm256_srli_epi32(load_256(w), 28));
	}
	return _mm256_castsi128_si256(v);
}

INLINE void unpack_heads_codebook(enum quant_type type, const uint8_t *const w[4], size_t at,
				  struct supers *s)
{
	const __m512i ones = _mm512_set1_epi16(1);
	const __m512 part = _mm512_set1_ps(type == QUANT_IQ3_XXS ? 0.25f : 0.125f);
	__m256i v[4];

	_Static_assert(offsetof(struct block_iq2_xxs, d) == 0 && offsetof(struct block_iq2_xs, d) == 0 &&
			       offsetof(struct block_iq3_xxs, d) == 0,
		       "d comes first");
	UNROLL
	for (size_t i = 0; i < 4; i++)
		v[i] = codebook_scales(type, w[i] + at);
	if (n_scales(type) == 8) {
		v[0] = _mm256_inserti128_si256(v[0], _mm256_castsi256_si128(v[1]), 1);
		v[1] = _mm256_inserti128_si256(v[2], _mm256_castsi256_si128(v[3]), 1);
	}
	UNROLL
	for (size_t i = 0; i < n_scales(type) / 8; i++) {
		__m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(v[2 * i]), v[2 * i + 1], 1);

		s->scales[i] = _mm512_or_si512(_mm512_slli_epi16(both, 1), ones);
	}
	s->d = _mm512_mul_ps(four_halves(w, at), part);
}

/* Of the super-blocks `at` bytes into four rows. */
INLINE struct supers unpack_heads(enum quant_type type, const uint8_t *const w[4], size_t at)
{
	struct supers s;

	if (type == QUANT_Q2_K)
		unpack_heads_q2_k(w, at, &s);
	else if (type == QUANT_Q3_K)
		unpack_heads_q3_k(w, at, &s);
	else if (type == QUANT_Q6_K)
		unpack_heads_q6_k(w, at, &s);
	else if (type == QUANT_IQ4_XS)
		unpack_heads_iq4_xs(w, at, &s);
	else if (type == QUANT_Q4_K || type == QUANT_Q5_K)
		unpack_heads_q45(w, at, &s);
	else
		unpack_heads_codebook(type, w, at, &s);
	return s;
}

/* Q5_0 and Q5_1: the fifth bits of the first sixteen elements of each block, then of the others. */
INLINE __m128i fifth_bits(enum quant_type type, const uint8_t *const w[4])
{
	const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
	const size_t qh = type == QUANT_Q5_0 ? offsetof(struct block_q5_0, qh)
					     : offsetof(struct block_q5_1, qh);

	return _mm_shuffle_epi8(_mm_setr_epi32((int)load_u32(w[0] + qh), (int)load_u32(w[1] + qh),
					       (int)load_u32(w[2] + qh), (int)load_u32(w[3] + qh)),
				order);
}

/*
 * Blocks of 32 elements, four of a row: the first sixteen elements of each in one vector, the
 * others in a second one.
 */
INLINE void quants_blocks(enum quant_type type, const uint8_t *const w[4], __m512i q[2])
{
	/* Sixteen above the value. */
	const __m128i mxfp4 =
		_mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4);
	const __m512i m4 = _mm512_set1_epi8(15);
	__m128i high = _mm_setzero_si128();
	__m512i both;

	if (type == QUANT_Q8_0) {
		UNROLL
		for (size_t i = 0; i < 2; i++)
			q[i] = _mm512_xor_si512(four_lanes(w, offsetof(struct block_q8_0, qs) + 16 * i),
						_mm512_set1_epi8(-128));
		return;
	}
	both = four_lanes(w, block_bytes(type) - QK_0 / 2); /* the last field of all the others */
	q[0] = _mm512_and_si512(both, m4);
	q[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), m4);
	if (type == QUANT_Q5_0 || type == QUANT_Q5_1)
		high = fifth_bits(type, w);
	UNROLL
	for (size_t i = 0; i < 2; i++) {
		if (type == QUANT_MXFP4)
			q[i] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(mxfp4), q[i]);
		if (type == QUANT_IQ4_NL)
			q[i] = look_up_iq4(q[i]);
		if (type == QUANT_Q5_0 || type == QUANT_Q5_1)
			q[i] = _mm512_mask_add_epi8(q[i], half_mask(high, i), q[i],
						    _mm512_set1_epi8(16));
	}
}

/* Blocks i to i + n - 1 of a row, at most four; the last one again for those that are not there. */
struct four_blocks {
	const uint8_t *p[4];
};

INLINE struct four_blocks four_blocks(enum quant_type type, const uint8_t *row, size_t i, size_t n)
{
	struct four_blocks f;

	UNROLL
	for (size_t j = 0; j < 4; j++)
		f.p[j] = row + (i + (j < n ? j : n - 1)) * block_bytes(type);
	return f;
}

/* Where word `at` of block b is among the words of two vectors, four times. */
INLINE int64_t word_index(enum quant_type type, size_t b, size_t at, size_t second)
{
	size_t byte = b * block_bytes(type) + at;

	return (int64_t)(byte < 64 ? byte / 2 : 32 + (byte - second) / 2) * 0x0001000100010001;
}

/* A number in half precision of each, in all of its lane. All four at once, if they are there. */
INLINE __m512 halves_of_blocks(enum quant_type type, const struct four_blocks *w, size_t at, size_t n)
{
	const size_t all = 4 * block_bytes(type), second = MIN(all - 64, (size_t)64);
	const __m512i index = _mm512_set_epi64(0, 0, 0, 0, word_index(type, 3, at, second),
					       word_index(type, 2, at, second),
					       word_index(type, 1, at, second),
					       word_index(type, 0, at, second));
	__m512i v;

	if (n < 4)
		return four_halves(w->p, at);
	v = load_512(w->p[0]);
	if (3 * block_bytes(type) + at < 64)
		v = _mm512_permutexvar_epi16(index, v);
	else
		v = _mm512_permutex2var_epi16(v, index, load_512(w->p[0] + second));
	return _mm512_cvtph_ps(_mm512_castsi512_si256(v));
}

/* 2^(e - 128) of each, in all of its lane: byte 17 i is in lane i. */
INLINE __m512 e8m0_of_blocks(const struct four_blocks *w, size_t n)
{
	const __m512i index =
		_mm512_setr_epi32((int)0x80808000, (int)0x80808000, (int)0x80808000, (int)0x80808000,
				  (int)0x80808001, (int)0x80808001, (int)0x80808001, (int)0x80808001,
				  (int)0x80808002, (int)0x80808002, (int)0x80808002, (int)0x80808002,
				  (int)0x80808003, (int)0x80808003, (int)0x80808003, (int)0x80808003);
	const __mmask64 there = n < 4 ? ((__mmask64)1 << (n * sizeof(struct block_mxfp4))) - 1
				      : ~(__mmask64)0;
	__m512i v = _mm512_shuffle_epi8(_mm512_maskz_loadu_epi8(there, w->p[0]), index);

	_Static_assert(sizeof(struct block_mxfp4) == 17, "a lane and a byte");
	return _mm512_scalef_ps(_mm512_set1_ps(1.0f),
				_mm512_sub_ps(_mm512_cvtepi32_ps(v), _mm512_set1_ps(128.0f)));
}

/* The scale of each, in all of its lane. */
INLINE __m512 scales_blocks(enum quant_type type, const struct four_blocks *w, size_t n)
{
	_Static_assert(offsetof(struct block_q8_0, d) == 0 && offsetof(struct block_q4_0, d) == 0 &&
			       offsetof(struct block_q4_1, d) == 0 &&
			       offsetof(struct block_q5_0, d) == 0 &&
			       offsetof(struct block_q5_1, d) == 0 &&
			       offsetof(struct block_iq4_nl, d) == 0 &&
			       offsetof(struct block_mxfp4, e) == 0,
		       "scales come first");
	return type == QUANT_MXFP4 ? e8m0_of_blocks(w, n) : halves_of_blocks(type, w, 0, n);
}

/* The minimum of each, in all of its lane. */
INLINE __m512 mins_blocks(enum quant_type type, const struct four_blocks *w, size_t n)
{
	_Static_assert(offsetof(struct block_q4_1, m) == offsetof(struct block_q5_1, m), "same start");
	return halves_of_blocks(type, w, offsetof(struct block_q4_1, m), n);
}
