/* SPDX-License-Identifier: MIT */
/*
 * avx512-quant.c: activations, and their products with weights, for x86 with AVX-512 (F, BW, DQ,
 * VL, VNNI).
 *
 * Owns no state. Called through the table of avx512.c, from any thread, and only after dispatch.c
 * has seen that the CPU has all of them. Refuses to know how blocks are unpacked, which is
 * avx512-unpack.h's. There are two ways of computing a product:
 *   narrow  here, for few columns: lanes lie along a row; the memory of the weights is what limits;
 *   wide    avx512-wide.c, for groups of sixteen columns: a lane is a column.
 * Invariants: integer sums are exact; which way a column goes depends on the size of its group of
 * sixteen alone, and within a way its operations and their order only on n; no load assumes
 * alignment; nothing is read or written beyond the lengths given.
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx512-unpack.h"

#define NARROW_COLS 4 /* columns that share unpacked rows in registers, at most */

/* From so many columns of a group on, sixteen at once take less time than a few at a time. */
#define SUPERS_WIDE_FROM   10
#define BLOCKS_WIDE_FROM   9
#define Q2_K_WIDE_FROM     13
#define IQ4_XS_WIDE_FROM   8
#define CODEBOOK_WIDE_FROM 6

/*
 * Bytes of each of four streams on their way from memory while others are used. Much less comes too late, much more pushes out of
 * the first cache what has not been used yet.
 */
#define FETCH_AHEAD 2048

/* Activations. */

INLINE __m512i magnitude_bits(const float *x)
{
	return _mm512_and_si512(load_512(x), _mm512_set1_epi32(0x7fffffff));
}

/* The largest magnitude of 256 floats, compared as integers: see largest() of ref-quant.c. */
INLINE int32_t max_magnitude_bits(const float *x)
{
	__m512i max = _mm512_setzero_si512();

	UNROLL
	for (size_t i = 0; i < QK_K; i += 16)
		max = _mm512_max_epi32(max, magnitude_bits(x + i));
	return _mm512_reduce_max_epi32(max);
}

/*
 * Sixteen products, rounded to nearest even and held in -127..127; NaN gives -127 (maxps returns
 * its second operand).
 */
INLINE __m128i round_q8(const float *x, float inv)
{
	__m512 v = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inv));

	v = _mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(-127.0f)), _mm512_set1_ps(127.0f));
	return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
}

/* The first of 256 floats whose magnitude has these bits. */
INLINE float find_magnitude(const float *x, int32_t bits)
{
	for (size_t i = 0; i < QK_K; i += 16) {
		__mmask16 equal =
			_mm512_cmpeq_epi32_mask(magnitude_bits(x + i), _mm512_set1_epi32(bits));

		if (equal)
			return x[i + (size_t)__builtin_ctz(equal)];
	}
	return 0.0f;
}

/* Sums of sixteen quants each. */
INLINE __m256i sums_of_16(const int8_t qs[QK_K])
{
	const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
	__m512i t[4], a, b;

	UNROLL
	for (size_t j = 0; j < 4; j++)
		t[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1),
					   load_512(qs + 64 * j));
	a = _mm512_add_epi32(_mm512_unpacklo_epi32(t[0], t[1]), _mm512_unpackhi_epi32(t[0], t[1]));
	b = _mm512_add_epi32(_mm512_unpacklo_epi32(t[2], t[3]), _mm512_unpackhi_epi32(t[2], t[3]));
	a = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
	/* Lane l, element j: lane l of t[j]. */
	return _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, a));
}

void avx512_quantize_q8_k(const float *x, void *act, size_t n)
{
	uint8_t *out = act;

	for (size_t i = 0; i < n; i += QK_K, out += sizeof(struct block_q8_k)) {
		float m = find_magnitude(x + i, max_magnitude_bits(x + i));
		float inv = -127.0f / m;
		struct block_q8_k b;

		if (m == 0.0f) {
			memset(out, 0, sizeof(b));
			continue;
		}
		b.d = 1.0f / inv;
		for (size_t j = 0; j < QK_K; j += 16)
			_mm_storeu_si128((__m128i *)(b.qs + j), round_q8(x + i + j, inv));
		_mm256_storeu_si256((__m256i *)b.bsums, sums_of_16(b.qs));
		memcpy(out, &b, sizeof(b));
	}
}

/* To nearest even; NaN stays one and becomes quiet. */
void avx512_quantize_bf16(const float *x, void *act, size_t n)
{
	for (size_t i = 0; i < n; i += 16) {
		__mmask16 mask = first_lanes(n - i);
		__m512i u = _mm512_maskz_loadu_epi32(mask, x + i), top = _mm512_srli_epi32(u, 16);
		__mmask16 nan =
			_mm512_cmpgt_epi32_mask(_mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)),
						_mm512_set1_epi32(0x7f800000));
		__m512i even = _mm512_and_si512(top, _mm512_set1_epi32(1));

		u = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even);
		u = _mm512_mask_or_epi32(_mm512_srli_epi32(u, 16), nan, top, _mm512_set1_epi32(0x40));
		_mm256_mask_storeu_epi16((uint8_t *)act + 2 * i, mask, _mm512_cvtepi32_epi16(u));
	}
}

/*
 * Narrow: products of four rows and a few columns, whose number is a constant, so that arrays are
 * registers. Sums of row i end in lane i.
 */

struct narrow {
	const uint8_t *w[4];
	size_t ahead;       /* how far beyond these rows bytes are fetched as they pass */
	const uint8_t *act; /* column c at act + c * act_stride */
	size_t act_stride, n;
	float *y; /* row i at y[c * y_stride + i * y_apart] */
	size_t y_stride, y_apart;
	size_t n_rows; /* of the four are wanted */
};

INLINE void narrow_store(const struct narrow *a, size_t c, __m512 v)
{
	const __m512i first = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
	float sums[4];

	v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
	v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
	_mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, v)));
	for (size_t i = 0; i < a->n_rows; i++)
		a->y[c * a->y_stride + i * a->y_apart] = sums[i];
}

/* Asks for `bytes` of each row from `at` on, `ahead` early. */
INLINE void fetch_rows(const struct narrow *a, size_t at, size_t bytes)
{
	UNROLL
	for (size_t r = 0; r < 4; r++)
		fetch(a->w[r] + at + a->ahead, bytes);
}

/* Four vectors to one whose lane i adds up to what vector i does. */
INLINE __m512i add_lanes(const __m512i v[4])
{
	__m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x44),
				     _mm512_shuffle_i32x4(v[0], v[1], 0xee));
	__m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2], v[3], 0x44),
				     _mm512_shuffle_i32x4(v[2], v[3], 0xee));

	return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

INLINE __m512 add_lanes_ps(const __m512 v[4])
{
	__m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44),
				 _mm512_shuffle_f32x4(v[0], v[1], 0xee));
	__m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44),
				 _mm512_shuffle_f32x4(v[2], v[3], 0xee));

	return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Where in scales[] the scale is of element 32 j + 16 l of row r, four times: see scales_of_fours(). */
INLINE int64_t scale_index(enum quant_type type, size_t row, size_t j, size_t l)
{
	size_t at = (l < 2 ? first_half(type, j) : second_half(type, j)) + l % 2 * 16;

	if (n_scales(type) == 16)
		return (int64_t)(at / 16 + row % 2 * 16) * 0x0001000100010001;
	return (int64_t)(at / 32 + row * 8) * 0x0001000100010001;
}

/* Scales for fours of elements of vectors a and b, packed to words as their sums would be. */
INLINE __m512i scales_of_fours(enum quant_type type, const struct supers *s, size_t row, size_t a,
			       size_t b)
{
	const __m512i index =
		_mm512_set_epi64(scale_index(type, row, b, 3), scale_index(type, row, a, 3),
				 scale_index(type, row, b, 2), scale_index(type, row, a, 2),
				 scale_index(type, row, b, 1), scale_index(type, row, a, 1),
				 scale_index(type, row, b, 0), scale_index(type, row, a, 0));

	return _mm512_permutexvar_epi16(index, s->scales[n_scales(type) == 16 ? row / 2 : 0]);
}

/* Whether sums of four products fit into 16 bits: see add_products(). */
INLINE bool packs(enum quant_type type)
{
	return offset_of(type) <= 32;
}

/* As add_products() wants them. */
INLINE void pair_scales(enum quant_type type, const struct supers *s, size_t row, size_t pair,
			__m512i scale[2])
{
	const size_t a = 2 * pair, b = a + 1;

	if (packs(type)) {
		scale[0] = scales_of_fours(type, s, row, a, b);
		return;
	}
	scale[0] = _mm512_srai_epi32(scales_of_fours(type, s, row, a, a), 16);
	scale[1] = _mm512_srai_epi32(scales_of_fours(type, s, row, b, b), 16);
}

/* Sums of activations in the order of scales and mins, for each of four rows. */
INLINE __m512i sums_of_column(enum quant_type type, const uint8_t *x)
{
	__m256i v = load_256(x + offsetof(struct block_q8_k, bsums));

	if (n_scales(type) == 16)
		return _mm512_broadcast_i64x4(v);
	/* Sums of 32 are still within 16 bits. */
	return _mm512_broadcast_i32x4(_mm256_cvtepi32_epi16(_mm256_madd_epi16(v, _mm256_set1_epi16(1))));
}

/* Products of scales or mins with those sums: lane i adds up to that of row i. */
INLINE __m512i dot_sums(enum quant_type type, const __m512i s[2], __m512i x)
{
	__m512i a = _mm512_madd_epi16(s[0], x), b;

	if (n_scales(type) == 8)
		return a;
	b = _mm512_madd_epi16(s[1], x);
	return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

INLINE __m512i activations_super(enum quant_type type, const uint8_t *x, size_t j)
{
	const uint8_t *qs = x + offsetof(struct block_q8_k, qs);

	if (second_half(type, j) == first_half(type, j) + 32)
		return load_512(qs + first_half(type, j));
	return _mm512_inserti64x4(_mm512_castsi256_si512(load_256(qs + first_half(type, j))),
				  load_256(qs + second_half(type, j)), 1);
}

/*
 * Adds the products of two vectors and their scales. Sums of four are packed to 16 bits where
 * quants are at most 63: activations are within -127..127 by construction, 4 * 63 * 127 = 32004.
 */
INLINE __m512i add_products(enum quant_type type, __m512i sum, const __m512i q[2],
			    const __m512i x[2], const __m512i scale[2])
{
	__m512i lo = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q[0], x[0]);
	__m512i hi = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q[1], x[1]);

	if (packs(type))
		return _mm512_dpwssd_epi32(sum, _mm512_packs_epi32(lo, hi), scale[0]);
	sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(lo, scale[0]));
	return _mm512_add_epi32(sum, _mm512_mullo_epi32(hi, scale[1]));
}

/* Sums of 256 are below 2^30: quants of 6 bits by scales of 8, or of 8 bits by scales of 6. */
INLINE void narrow_supers(enum quant_type type, size_t cols, const struct narrow *a)
{
	__m512 acc[NARROW_COLS] = { 0 };

	for (size_t i = 0; i < a->n / QK_K; i++) {
		const size_t at = i * block_bytes(type);
		const uint8_t *x = a->act + i * sizeof(struct block_q8_k);
		struct supers s = unpack_heads(type, a->w, at);
		__m512i sum[NARROW_COLS][4] = { 0 };

		fetch_rows(a, at, block_bytes(type));
		UNROLL
		for (size_t pair = 0; pair < 2; pair++) {
			__m512i v[NARROW_COLS][2];

			UNROLL
			for (size_t c = 0; c < cols; c++) {
				v[c][0] = activations_super(type, x + c * a->act_stride, 2 * pair);
				v[c][1] = activations_super(type, x + c * a->act_stride, 2 * pair + 1);
			}
			UNROLL
			for (size_t r = 0; r < 4; r++) {
				__m512i scale[2], q[2];

				pair_scales(type, &s, r, pair, scale);
				quants_super(type, a->w[r] + at, pair, q);
				UNROLL
				for (size_t c = 0; c < cols; c++)
					sum[c][r] = add_products(type, sum[c][r], q, v[c], scale);
			}
		}
		UNROLL
		for (size_t c = 0; c < cols; c++) {
			const uint8_t *xc = x + c * a->act_stride;
			__m512 dx = _mm512_set1_ps(load_f32(xc + offsetof(struct block_q8_k, d)));
			__m512i bsums = sums_of_column(type, xc), all = add_lanes(sum[c]);

			if (offset_of(type) != 0)
				all = _mm512_sub_epi32(
					all, _mm512_mullo_epi32(dot_sums(type, s.scales, bsums),
								_mm512_set1_epi32(offset_of(type))));
			acc[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_mul_ps(s.d, dx),
						 acc[c]);
			if (has_mins(type))
				acc[c] = _mm512_fnmadd_ps(
					_mm512_cvtepi32_ps(dot_sums(type, s.mins, bsums)),
					_mm512_mul_ps(s.dmin, dx), acc[c]);
		}
	}
	UNROLL
	for (size_t c = 0; c < cols; c++)
		narrow_store(a, c, acc[c]);
}

/* Up to four blocks from block i on; lanes beyond have no weight. */
INLINE void narrow_four_blocks(enum quant_type type, size_t cols, const struct narrow *a, size_t i,
			       size_t n, __m512 acc[NARROW_COLS][4])
{
	const __m512i times = _mm512_set1_epi8((char)(has_mins(type) ? 1 : offset_of(type)));
	const __mmask16 lanes = first_lanes(4 * n);
	__m512i v[NARROW_COLS][2], start[NARROW_COLS];
	__m512 dx[NARROW_COLS], dsum[NARROW_COLS];

	UNROLL
	for (size_t c = 0; c < cols; c++) {
		struct four_blocks x = four_blocks(QUANT_Q8_0, a->act + c * a->act_stride, i, n);

		v[c][0] = four_lanes(x.p, offsetof(struct block_q8_0, qs));
		v[c][1] = four_lanes(x.p, offsetof(struct block_q8_0, qs) + 16);
		start[c] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), times, v[c][0]);
		start[c] = _mm512_dpbusd_epi32(start[c], times, v[c][1]);
		dx[c] = _mm512_maskz_mov_ps(lanes, scales_blocks(QUANT_Q8_0, &x, n));
		dsum[c] = _mm512_mul_ps(_mm512_cvtepi32_ps(start[c]), dx[c]);
		start[c] = has_mins(type) ? _mm512_setzero_si512()
					  : _mm512_sub_epi32(_mm512_setzero_si512(), start[c]);
	}
	UNROLL
	for (size_t r = 0; r < 4; r++) {
		struct four_blocks w = four_blocks(type, a->w[r], i, n);
		__m512 d = _mm512_maskz_mov_ps(lanes, scales_blocks(type, &w, n));
		__m512 m = _mm512_setzero_ps();
		__m512i q[2];

		if (has_mins(type))
			m = _mm512_maskz_mov_ps(lanes, mins_blocks(type, &w, n));
		quants_blocks(type, w.p, q);
		UNROLL
		for (size_t c = 0; c < cols; c++) {
			__m512i sum = _mm512_dpbusd_epi32(start[c], q[0], v[c][0]);

			sum = _mm512_dpbusd_epi32(sum, q[1], v[c][1]);
			acc[c][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum),
						    _mm512_mul_ps(d, dx[c]), acc[c][r]);
			if (has_mins(type))
				acc[c][r] = _mm512_fmadd_ps(m, dsum[c], acc[c][r]);
		}
	}
}

INLINE void narrow_blocks(enum quant_type type, size_t cols, const struct narrow *a)
{
	__m512 acc[NARROW_COLS][4] = { 0 };
	size_t i = 0;

	for (; i + 4 <= a->n / QK_0; i += 4) {
		fetch_rows(a, i * block_bytes(type), 4 * block_bytes(type));
		narrow_four_blocks(type, cols, a, i, 4, acc);
	}
	if (i < a->n / QK_0)
		narrow_four_blocks(type, cols, a, i, a->n / QK_0 - i, acc);
	UNROLL
	for (size_t c = 0; c < cols; c++)
		narrow_store(a, c, add_lanes_ps(acc[c]));
}

/* Sixteen elements of F32, F16 or BF16 or fewer, zeros beyond. */
INLINE __m512 load_elems(enum quant_type type, const void *p, size_t n)
{
	__mmask16 mask = first_lanes(n);
	__m256i h;

	if (type == QUANT_F32)
		return _mm512_maskz_loadu_ps(mask, p);
	h = _mm256_maskz_loadu_epi16(mask, p);
	if (type == QUANT_F16)
		return _mm512_cvtph_ps(h);
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* Up to sixteen elements from element i on. */
INLINE void narrow_16_elems(enum quant_type type, size_t cols, const struct narrow *a, size_t i,
			    size_t n, __m512 acc[NARROW_COLS][4])
{
	__m512 x[NARROW_COLS];

	UNROLL
	for (size_t c = 0; c < cols; c++)
		x[c] = load_elems(type, elem(type, a->act + c * a->act_stride, i), n);
	UNROLL
	for (size_t r = 0; r < 4; r++) {
		__m512 w = load_elems(type, elem(type, a->w[r], i), n);

		UNROLL
		for (size_t c = 0; c < cols; c++)
			acc[c][r] = _mm512_fmadd_ps(w, x[c], acc[c][r]);
	}
}

INLINE void narrow_elems(enum quant_type type, size_t cols, const struct narrow *a)
{
	const size_t bytes = type == QUANT_F32 ? sizeof(float) : sizeof(uint16_t);
	__m512 acc[NARROW_COLS][4] = { 0 };
	size_t i = 0;

	for (; i + 16 <= a->n; i += 16) {
		fetch_rows(a, i * bytes, 16 * bytes);
		narrow_16_elems(type, cols, a, i, 16, acc);
	}
	if (i < a->n)
		narrow_16_elems(type, cols, a, i, a->n - i, acc);
	UNROLL
	for (size_t c = 0; c < cols; c++)
		narrow_store(a, c, add_lanes_ps(acc[c]));
}

/* The kernels of a type, for the loops around them. */
struct kernels {
	void (*narrow[NARROW_COLS])(const struct narrow *a); /* one column, two, ... */
	void (*wide)(const struct avx512_product *p);        /* NULL: narrow is as good */
	size_t wide_from;
};

/* The four rows r, apart from each other; fewer where there are none, and then the first stands for them. */
INLINE void set_rows(struct narrow *a, const struct avx512_product *p, size_t r, size_t apart)
{
	a->n_rows = 0;
	for (; a->n_rows < 4 && r + a->n_rows * apart < p->n_rows; a->n_rows++)
		a->w[a->n_rows] = p->w + (r + a->n_rows * apart) * p->w_stride;
	for (size_t i = a->n_rows; i < 4; i++)
		a->w[i] = a->w[0];
}

/*
 * Columns from c0 on. Of the rows four quarters pass by side by side: memory delivers four long streams
 * faster than one, and faster than four that jump over each other's rows every few hundred bytes, as
 * neighbours would. A few rows of each stay in the first cache while all columns pass by. At the end of a
 * quarter what follows it has been read already, or is another's: there the rows behind all four are
 * asked for, which are likely to be next.
 */
static void narrow(const struct kernels *k, const struct avx512_product *p, size_t c0,
		   const struct cpu_tiles *tiles)
{
	const size_t cols = MIN((size_t)tiles->reg_cols, (size_t)NARROW_COLS);
	const size_t n_rows = MAX(tiles->l1_rows / 4u, 1u), apart = (p->n_rows + 3) / 4;
	const size_t near = MIN((size_t)FETCH_AHEAD, apart * p->w_stride);
	struct narrow a = {
		.act_stride = p->act_stride, .n = p->n, .y_stride = p->y_stride, .y_apart = apart
	};

	set_rows(&a, p, 0, apart);
	for (size_t i = 0; i < near; i += 64)
		fetch_rows(&a, i, 64);
	for (size_t r0 = 0; r0 < apart; r0 += n_rows) {
		size_t r1 = MIN(r0 + n_rows, apart), group;

		for (size_t c = c0; c < p->n_cols; c += group) {
			group = MIN(cols, p->n_cols - c);
			a.act = p->act + c * p->act_stride;
			for (size_t r = r0; r < r1; r++) {
				a.y = p->y + c * p->y_stride + r;
				a.ahead = c == c0 ? near : 0;
				if (a.ahead > 0 && (apart - r) * p->w_stride <= near + p->w_stride / 2)
					a.ahead += (p->n_rows - apart) * p->w_stride;
				set_rows(&a, p, r, apart);
				k->narrow[group - 1](&a);
			}
		}
	}
}

static void matmul(const struct kernels *k, const struct avx512_product *p, const struct cpu_tiles *tiles)
{
	size_t rest = p->n_cols % AVX512_WIDE, wide = 0;

	if (k->wide)
		wide = p->n_cols - (rest < k->wide_from ? rest : 0);
	if (wide > 0) {
		struct avx512_product first = *p;

		first.n_cols = wide;
		k->wide(&first);
	}
	if (wide < p->n_cols)
		narrow(k, p, wide, tiles ? tiles : &cpu_kernels_avx512.tiles);
}

/* Of the families above, the functions of one type. */
#define DEFINE_NARROW(suffix, type, family, cols)                    \
	static void narrow_##cols##_##suffix(const struct narrow *a) \
	{                                                            \
		narrow_##family(type, cols, a);                      \
	}
#define DEFINE_TYPE(suffix, type, family, wide_or_null, from)                                         \
	DEFINE_NARROW(suffix, type, family, 1)                                                        \
	DEFINE_NARROW(suffix, type, family, 2)                                                        \
	DEFINE_NARROW(suffix, type, family, 3)                                                        \
	DEFINE_NARROW(suffix, type, family, 4)                                                        \
	void avx512_matmul_##suffix(size_t n, const void *w, size_t w_stride, size_t n_rows,          \
				    const void *act, size_t act_stride, size_t n_cols, float *y,      \
				    size_t y_stride, const struct cpu_tiles *tiles)                   \
	{                                                                                             \
		static const struct kernels k = { .narrow = { narrow_1_##suffix, narrow_2_##suffix,   \
							      narrow_3_##suffix, narrow_4_##suffix }, \
						  .wide = (wide_or_null),                             \
						  .wide_from = (from) };                              \
		const struct avx512_product p = { n,          w,      w_stride, n_rows,  act,         \
						  act_stride, n_cols, y,        y_stride };           \
                                                                                                      \
		matmul(&k, &p, tiles);                                                                \
	}

DEFINE_TYPE(f32, QUANT_F32, elems, NULL, 0)
DEFINE_TYPE(f16, QUANT_F16, elems, NULL, 0)
DEFINE_TYPE(bf16, QUANT_BF16, elems, NULL, 0)
DEFINE_TYPE(q8_0, QUANT_Q8_0, blocks, avx512_wide_q8_0, BLOCKS_WIDE_FROM)
DEFINE_TYPE(q4_0, QUANT_Q4_0, blocks, avx512_wide_q4_0, BLOCKS_WIDE_FROM)
DEFINE_TYPE(mxfp4, QUANT_MXFP4, blocks, avx512_wide_mxfp4, BLOCKS_WIDE_FROM)
DEFINE_TYPE(q4_k, QUANT_Q4_K, supers, avx512_wide_q4_k, SUPERS_WIDE_FROM)
DEFINE_TYPE(q5_k, QUANT_Q5_K, supers, avx512_wide_q5_k, SUPERS_WIDE_FROM)
DEFINE_TYPE(q6_k, QUANT_Q6_K, supers, avx512_wide_q6_k, SUPERS_WIDE_FROM)
DEFINE_TYPE(q4_1, QUANT_Q4_1, blocks, avx512_wide_q4_1, BLOCKS_WIDE_FROM)
DEFINE_TYPE(q5_0, QUANT_Q5_0, blocks, avx512_wide_q5_0, BLOCKS_WIDE_FROM)
DEFINE_TYPE(q5_1, QUANT_Q5_1, blocks, avx512_wide_q5_1, BLOCKS_WIDE_FROM)
DEFINE_TYPE(iq4_nl, QUANT_IQ4_NL, blocks, avx512_wide_iq4_nl, BLOCKS_WIDE_FROM)
DEFINE_TYPE(q2_k, QUANT_Q2_K, supers, avx512_wide_q2_k, Q2_K_WIDE_FROM)
DEFINE_TYPE(q3_k, QUANT_Q3_K, supers, avx512_wide_q3_k, SUPERS_WIDE_FROM)
DEFINE_TYPE(iq2_xxs, QUANT_IQ2_XXS, supers, avx512_wide_iq2_xxs, CODEBOOK_WIDE_FROM)
DEFINE_TYPE(iq2_xs, QUANT_IQ2_XS, supers, avx512_wide_iq2_xs, CODEBOOK_WIDE_FROM)
DEFINE_TYPE(iq3_xxs, QUANT_IQ3_XXS, supers, avx512_wide_iq3_xxs, CODEBOOK_WIDE_FROM)
DEFINE_TYPE(iq4_xs, QUANT_IQ4_XS, supers, avx512_wide_iq4_xs, IQ4_XS_WIDE_FROM)

#endif
