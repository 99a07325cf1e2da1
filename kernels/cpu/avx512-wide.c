/* SPDX-License-Identifier: MIT */
/*
 * avx512-wide.c: products of many columns for x86 with AVX-512 (F, BW, DQ, VL, VNNI).
 *
 * Owns no state. Called by avx512-quant.c, which decides what is many. A lane of a vector is a
 * column, so that nothing is summed across lanes: activations are turned on their side once for all
 * rows, a row is unpacked once for all columns, and four weights at a time meet four activations of
 * sixteen columns. Refuses to know how blocks are unpacked, which is avx512-unpack.h's. Invariants:
 * integer sums are exact; the operations of a column and their order depend on n alone; nothing is
 * read or written beyond the lengths given.
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx512-unpack.h"

#define WIDE      AVX512_WIDE
#define VECS      4   /* groups whose activations lie in the first cache together */
#define TILE_ROWS 8   /* rows of weights that are unpacked together, a multiple of four */
#define PASS_ROWS 128 /* rows whose sums wait for the next chunk of activations */

/* A chunk is one super-block or eight blocks of every row and column. */
#define CHUNK QK_K
#define QUADS (CHUNK / 4) /* a lane multiplies four at a time */

/* The chunk of a row of weights, in the first cache. */
struct wide_row {
	uint8_t q[CHUNK];
	int32_t scale[16]; /* super-blocks */
	int16_t min[16] __attribute__((aligned(32)));
	float d[8], dmin; /* one of a super-block, or one of every block */
	float m[8];       /* blocks */
} __attribute__((aligned(64)));

/* The chunk of up to VECS groups of columns: the lanes of a vector belong to sixteen columns. */
struct wide_cols {
	__m512i q[VECS][QUADS];
	__m512i start[VECS][16]; /* what the offset of the quants adds to a sub-block's sum, negative */
	__m512i bsums[VECS][8]; /* pairs of 16 bits, for the mins */
	__m512 d[VECS][8];
	__m512 dsum[VECS][8]; /* blocks: d times the sum of the quants, for the mins */
};

/* One group of columns, where it comes from. */
struct wide_source {
	const uint8_t *col[WIDE];
};

/* Rows become columns. */
INLINE void transpose(__m512i m[16])
{
	__m512i t[16];

	UNROLL
	for (size_t i = 0; i < 16; i += 2) {
		t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
		t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
	}
	UNROLL
	for (size_t i = 0; i < 16; i += 4) {
		m[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
		m[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
		m[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
		m[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
	}
	/* Now m[4 i + j], lane k: elements 4 k + j of rows 4 i to 4 i + 3. */
	UNROLL
	for (size_t j = 0; j < 4; j++) {
		__m512i a = _mm512_shuffle_i32x4(m[j], m[4 + j], 0x88);
		__m512i b = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0x88);
		__m512i c = _mm512_shuffle_i32x4(m[j], m[4 + j], 0xdd);
		__m512i d = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0xdd);

		t[j] = _mm512_shuffle_i32x4(a, b, 0x88);
		t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
		t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
		t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
	}
	UNROLL
	for (size_t i = 0; i < 16; i++)
		m[i] = t[i];
}

/* The sums of `quads` fours, times a byte. */
INLINE __m512i quants_sum(int times, const __m512i *q, size_t quads)
{
	__m512i sum = _mm512_setzero_si512();

	for (size_t k = 0; k < quads; k++)
		sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char)times), q[k]);
	return sum;
}

INLINE __m512i offset_start(enum quant_type type, const __m512i *q, size_t quads)
{
	return _mm512_sub_epi32(_mm512_setzero_si512(), quants_sum(offset_of(type), q, quads));
}

INLINE void gather_supers(enum quant_type type, const struct wide_source *from, size_t elem0,
			  size_t n, struct wide_cols *x, size_t v)
{
	const size_t at = elem0 / QK_K * sizeof(struct block_q8_k), subs = n_scales(type);
	__m512i m[16];
	float d[WIDE];

	(void)n;

	for (size_t j = 0; j < 4; j++) {
		UNROLL
		for (size_t c = 0; c < WIDE; c++)
			m[c] = load_512(from->col[c] + at + offsetof(struct block_q8_k, qs) + 64 * j);
		transpose(m);
		memcpy(x->q[v] + 16 * j, m, sizeof(m));
	}
	for (size_t c = 0; c < WIDE; c++)
		d[c] = load_f32(from->col[c] + at + offsetof(struct block_q8_k, d));
	x->d[v][0] = _mm512_loadu_ps(d);
	if (offset_of(type) != 0)
		for (size_t s = 0; s < subs; s++)
			x->start[v][s] = offset_start(type, x->q[v] + s * (QUADS / subs), QUADS / subs);
	if (!has_mins(type))
		return;
	UNROLL
	for (size_t c = 0; c < WIDE; c++)
		m[c] = _mm512_castsi256_si512(
			load_256(from->col[c] + at + offsetof(struct block_q8_k, bsums)));
	transpose(m);
	for (size_t s = 0; s < 8; s += 16 / subs) {
		/* Sums of 32 elements, for mins of 32, are still below 2^15. */
		const __m512i ones = _mm512_set1_epi16(1);

		x->bsums[v][s * subs / 16] =
			subs == 16
				? m[s]
				: _mm512_mask_blend_epi16(
					  0xaaaaaaaa, _mm512_madd_epi16(m[s], ones),
					  _mm512_slli_epi32(_mm512_madd_epi16(m[s + 1], ones), 16));
	}
}

INLINE void unpack_supers(enum quant_type type, const uint8_t *const rows[4], size_t elem0,
			  size_t n, struct wide_row to[4])
{
	const size_t at = elem0 / QK_K * block_bytes(type), words = n_scales(type);
	struct supers s = unpack_heads(type, rows, at);
	int16_t scales[4 * 16], mins[4 * 16];
	float d[16], dmin[16];

	(void)n;

	memcpy(scales, s.scales, 4 * words * sizeof(*scales));
	_mm512_storeu_ps(d, s.d);
	if (has_mins(type)) {
		memcpy(mins, s.mins, 4 * words * sizeof(*mins));
		_mm512_storeu_ps(dmin, s.dmin);
	}
	UNROLL
	for (size_t r = 0; r < 4; r++) {
		fetch(rows[r] + at + block_bytes(type), block_bytes(type));
		UNROLL
		for (size_t pair = 0; pair < 2; pair++) {
			__m512i q[2];

			quants_super(type, rows[r] + at, pair, q);
			UNROLL
			for (size_t i = 0; i < 2; i++) {
				uint8_t *a = to[r].q + first_half(type, 2 * pair + i);
				uint8_t *b = to[r].q + second_half(type, 2 * pair + i);

				_mm256_store_si256((__m256i *)a, _mm512_castsi512_si256(q[i]));
				_mm256_store_si256((__m256i *)b, _mm512_extracti64x4_epi64(q[i], 1));
			}
		}
		for (size_t i = 0; i < words; i += 8)
			_mm256_store_si256((__m256i *)(to[r].scale + i),
					   _mm256_cvtepi16_epi32(load_128(scales + words * r + i)));
		to[r].d[0] = d[4 * r];
		if (!has_mins(type))
			continue;
		memcpy(to[r].min, mins + words * r, words * sizeof(*mins));
		to[r].dmin = dmin[4 * r];
	}
}

/* sums: row r, vector c at sums[r * VECS + c]. */
INLINE void tile_supers(enum quant_type type, size_t rows, size_t vecs, const struct wide_row *w,
			const struct wide_cols *x, size_t v, size_t n, __m512 *sums)
{
	const size_t subs = n_scales(type), quads = QUADS / subs;
	__m512i sum[TILE_ROWS] = { 0 };

	(void)n;

	for (size_t s = 0; s < subs; s++) {
		__m512i part[TILE_ROWS];

		UNROLL
		for (size_t i = 0; i < rows * vecs; i++)
			part[i] = offset_of(type) != 0 ? x->start[v + i % vecs][s]
						       : _mm512_setzero_si512();
		UNROLL
		for (size_t k = 0; k < quads; k++) {
			UNROLL
			for (size_t i = 0; i < rows * vecs; i++) {
				uint32_t four = load_u32(w[i / vecs].q + 4 * (s * quads + k));

				part[i] = _mm512_dpbusd_epi32(part[i], _mm512_set1_epi32((int)four),
							      x->q[v + i % vecs][s * quads + k]);
			}
		}
		UNROLL
		for (size_t i = 0; i < rows * vecs; i++)
			sum[i] = _mm512_add_epi32(
				sum[i],
				_mm512_mullo_epi32(part[i], _mm512_set1_epi32(w[i / vecs].scale[s])));
	}
	UNROLL
	for (size_t i = 0; i < rows * vecs; i++) {
		const struct wide_row *wi = w + i / vecs;
		__m512 dx = x->d[v + i % vecs][0], *to = sums + i / vecs * VECS + i % vecs;
		__m512i min = _mm512_setzero_si512();

		*to = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i]),
				      _mm512_mul_ps(_mm512_set1_ps(wi->d[0]), dx), *to);
		if (!has_mins(type))
			continue;
		UNROLL
		for (size_t s = 0; s < subs / 2; s++)
			min = _mm512_dpwssd_epi32(min,
						  _mm512_set1_epi32((int)load_u32(wi->min + 2 * s)),
						  x->bsums[v + i % vecs][s]);
		*to = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(min),
				       _mm512_mul_ps(_mm512_set1_ps(wi->dmin), dx), *to);
	}
}

INLINE void gather_blocks(enum quant_type type, const struct wide_source *from, size_t elem0,
			  size_t n, struct wide_cols *x, size_t v)
{
	const size_t next = sizeof(struct block_q8_0), at = elem0 / QK_0 * next;
	__m512i m[16];

	for (size_t b = 0; b < n / QK_0; b += 2) {
		size_t second = b + 1 < n / QK_0;

		UNROLL
		for (size_t c = 0; c < WIDE; c++) {
			const uint8_t *p =
				from->col[c] + at + b * next + offsetof(struct block_q8_0, qs);

			m[c] = _mm512_inserti64x4(_mm512_castsi256_si512(load_256(p)),
						  load_256(p + second * next), 1);
		}
		transpose(m);
		memcpy(x->q[v] + 8 * b, m, sizeof(m));
	}
	for (size_t b = 0; b < n / QK_0; b++) {
		uint16_t d[WIDE];

		for (size_t c = 0; c < WIDE; c++)
			memcpy(&d[c], from->col[c] + at + b * next + offsetof(struct block_q8_0, d),
			       sizeof(d[c]));
		x->d[v][b] = _mm512_cvtph_ps(load_256(d));
		if (has_mins(type))
			x->dsum[v][b] = _mm512_mul_ps(
				x->d[v][b], _mm512_cvtepi32_ps(quants_sum(1, x->q[v] + 8 * b, 8)));
		else
			x->start[v][b] = offset_start(type, x->q[v] + 8 * b, 8);
	}
}

/* The first number of each lane. */
INLINE void store_lanes(float to[4], __m512 v)
{
	const __m512i first = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));

	_mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, v)));
}

INLINE void unpack_blocks(enum quant_type type, const uint8_t *const rows[4], size_t elem0,
			  size_t n, struct wide_row to[4])
{
	/* The first halves of two blocks and the second ones become two blocks. */
	const __m512i blocks_01 = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
	const __m512i blocks_23 = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);

	UNROLL
	for (size_t r = 0; r < 4; r++) {
		fetch(rows[r] + (elem0 + CHUNK) / QK_0 * block_bytes(type),
		      CHUNK / QK_0 * block_bytes(type));
		for (size_t b = 0; b < n / QK_0; b += 4) {
			size_t left = MIN(n / QK_0 - b, (size_t)4);
			struct four_blocks w = four_blocks(type, rows[r], elem0 / QK_0 + b, left);
			__m512i q[2];

			quants_blocks(type, w.p, q);
			_mm512_store_si512(to[r].q + QK_0 * b,
					   _mm512_permutex2var_epi64(q[0], blocks_01, q[1]));
			_mm512_store_si512(to[r].q + QK_0 * (b + 2),
					   _mm512_permutex2var_epi64(q[0], blocks_23, q[1]));
			store_lanes(to[r].d + b, scales_blocks(type, &w, left));
			if (has_mins(type))
				store_lanes(to[r].m + b, mins_blocks(type, &w, left));
		}
	}
}

INLINE void tile_blocks(enum quant_type type, size_t rows, size_t vecs, const struct wide_row *w,
			const struct wide_cols *x, size_t v, size_t n, __m512 *sums)
{
	__m512 sum[TILE_ROWS];

	UNROLL
	for (size_t i = 0; i < rows * vecs; i++)
		sum[i] = sums[i / vecs * VECS + i % vecs];
	for (size_t b = 0; b < n / QK_0; b++) {
		__m512i part[TILE_ROWS];

		UNROLL
		for (size_t i = 0; i < rows * vecs; i++)
			part[i] = has_mins(type) ? _mm512_setzero_si512() : x->start[v + i % vecs][b];
		UNROLL
		for (size_t k = 0; k < 8; k++) {
			UNROLL
			for (size_t i = 0; i < rows * vecs; i++) {
				uint32_t four = load_u32(w[i / vecs].q + 4 * (8 * b + k));

				part[i] = _mm512_dpbusd_epi32(part[i], _mm512_set1_epi32((int)four),
							      x->q[v + i % vecs][8 * b + k]);
			}
		}
		UNROLL
		for (size_t i = 0; i < rows * vecs; i++)
			/* The row's scale last: it comes from memory with the addition. */
			sum[i] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(part[i]),
							       x->d[v + i % vecs][b]),
						 _mm512_set1_ps(w[i / vecs].d[b]), sum[i]);
		if (!has_mins(type))
			continue;
		UNROLL
		for (size_t i = 0; i < rows * vecs; i++)
			sum[i] = _mm512_fmadd_ps(_mm512_set1_ps(w[i / vecs].m[b]),
						 x->dsum[v + i % vecs][b], sum[i]);
	}
	UNROLL
	for (size_t i = 0; i < rows * vecs; i++)
		sums[i / vecs * VECS + i % vecs] = sum[i];
}

/* The kernels of a type, for the loops around them. */
struct kernels {
	void (*gather)(const struct wide_source *from, size_t elem0, size_t n, struct wide_cols *x,
		       size_t v);
	void (*unpack)(const uint8_t *const rows[4], size_t elem0, size_t n, struct wide_row to[4]);
	void (*tile_1)(const struct wide_row *w, const struct wide_cols *x, size_t v, size_t n,
		       __m512 *sums); /* TILE_ROWS rows, one vector */
	void (*tile_2)(const struct wide_row *w, const struct wide_cols *x, size_t v, size_t n,
		       __m512 *sums); /* half the rows, two vectors */
};

/* Sums of rows and columns to y. */
static void wide_store(const struct avx512_product *p, const __m512 *sums, size_t r0, size_t n_rows,
		       size_t c0, size_t n_cols)
{
	for (size_t r = 0; r < n_rows; r += 16) {
		__mmask16 mask = first_lanes(n_rows - r);

		for (size_t v = 0; v * WIDE < n_cols; v++) {
			float *y = p->y + (c0 + v * WIDE) * p->y_stride + r0 + r;
			__m512i m[16];

			UNROLL
			for (size_t i = 0; i < 16; i++)
				m[i] = _mm512_castps_si512(sums[(r + i) * VECS + v]);
			transpose(m);
			for (size_t c = 0; c < MIN(n_cols - v * WIDE, (size_t)WIDE); c++)
				_mm512_mask_storeu_ps(y + c * p->y_stride, mask,
						      _mm512_castsi512_ps(m[c]));
		}
	}
}

/* Rows from r on; beyond the last one that one again. */
static void four_rows(const struct avx512_product *p, size_t r, const uint8_t *rows[4])
{
	for (size_t i = 0; i < 4; i++)
		rows[i] = p->w + (r + i < p->n_rows ? r + i : p->n_rows - 1) * p->w_stride;
}

/* TILE_ROWS rows and all groups of a chunk. */
static void wide_tile(const struct kernels *k, const struct avx512_product *p, size_t r,
		      size_t elem0, size_t n, const struct wide_cols *x, size_t n_vecs, __m512 *sums)
{
	struct wide_row rows[TILE_ROWS];

	for (size_t i = 0; i < TILE_ROWS; i += 4) {
		const uint8_t *from[4];

		four_rows(p, r + i, from);
		k->unpack(from, elem0, n, rows + i);
	}
	for (size_t v = 0; v < n_vecs; v += 2) {
		if (v + 1 == n_vecs) {
			k->tile_1(rows, x, v, n, sums + v);
			break;
		}
		k->tile_2(rows, x, v, n, sums + v);
		k->tile_2(rows + TILE_ROWS / 2, x, v, n, sums + TILE_ROWS / 2 * VECS + v);
	}
}

/* At most PASS_ROWS rows and VECS groups. */
static void wide_pass(const struct kernels *k, const struct avx512_product *p, size_t r0,
		      size_t n_rows, size_t c0, size_t n_cols)
{
	const size_t n_vecs = (n_cols + WIDE - 1) / WIDE;
	__m512 sums[PASS_ROWS * VECS];
	struct wide_source from[VECS];
	struct wide_cols x;

	memset(sums, 0, ALIGN_UP(n_rows, (size_t)16) * VECS * sizeof(*sums));
	for (size_t c = 0; c < n_vecs * WIDE; c++) /* lanes beyond the last column repeat it */
		from[c / WIDE].col[c % WIDE] = p->act + (c0 + MIN(c, n_cols - 1)) * p->act_stride;
	for (size_t i = 0; i < p->n; i += CHUNK) {
		size_t n = MIN(p->n - i, (size_t)CHUNK);

		for (size_t v = 0; v < n_vecs; v++)
			k->gather(&from[v], i, n, &x, v);
		for (size_t r = 0; r < n_rows; r += TILE_ROWS)
			wide_tile(k, p, r0 + r, i, n, &x, n_vecs, sums + r * VECS);
	}
	wide_store(p, sums, r0, n_rows, c0, n_cols);
}

static void wide(const struct kernels *k, const struct avx512_product *p)
{
	for (size_t c = 0; c < p->n_cols; c += VECS * WIDE)
		for (size_t r = 0; r < p->n_rows; r += PASS_ROWS)
			wide_pass(k, p, r, MIN(p->n_rows - r, (size_t)PASS_ROWS), c,
				  MIN(p->n_cols - c, (size_t)(VECS * WIDE)));
}

/* Of the families above, the functions of one type. */
#define DEFINE_TYPE(suffix, type, family)                                                          \
	static void gather_##suffix(const struct wide_source *from, size_t elem0, size_t n,        \
				    struct wide_cols *x, size_t v)                                 \
	{                                                                                          \
		gather_##family(type, from, elem0, n, x, v);                                       \
	}                                                                                          \
	static void unpack_##suffix(const uint8_t *const rows[4], size_t elem0, size_t n,          \
				    struct wide_row to[4])                                         \
	{                                                                                          \
		unpack_##family(type, rows, elem0, n, to);                                         \
	}                                                                                          \
	static void tile_1_##suffix(const struct wide_row *w, const struct wide_cols *x, size_t v, \
				    size_t n, __m512 *sums)                                        \
	{                                                                                          \
		tile_##family(type, TILE_ROWS, 1, w, x, v, n, sums);                               \
	}                                                                                          \
	static void tile_2_##suffix(const struct wide_row *w, const struct wide_cols *x, size_t v, \
				    size_t n, __m512 *sums)                                        \
	{                                                                                          \
		tile_##family(type, TILE_ROWS / 2, 2, w, x, v, n, sums);                           \
	}                                                                                          \
	void avx512_wide_##suffix(const struct avx512_product *p)                                  \
	{                                                                                          \
		static const struct kernels k = { gather_##suffix, unpack_##suffix,                \
						  tile_1_##suffix, tile_2_##suffix };              \
                                                                                                   \
		wide(&k, p);                                                                       \
	}

DEFINE_TYPE(q8_0, QUANT_Q8_0, blocks)
DEFINE_TYPE(q4_0, QUANT_Q4_0, blocks)
DEFINE_TYPE(mxfp4, QUANT_MXFP4, blocks)
DEFINE_TYPE(q4_k, QUANT_Q4_K, supers)
DEFINE_TYPE(q5_k, QUANT_Q5_K, supers)
DEFINE_TYPE(q6_k, QUANT_Q6_K, supers)
DEFINE_TYPE(q4_1, QUANT_Q4_1, blocks)
DEFINE_TYPE(q5_0, QUANT_Q5_0, blocks)
DEFINE_TYPE(q5_1, QUANT_Q5_1, blocks)
DEFINE_TYPE(iq4_nl, QUANT_IQ4_NL, blocks)
DEFINE_TYPE(q2_k, QUANT_Q2_K, supers)
DEFINE_TYPE(q3_k, QUANT_Q3_K, supers)
DEFINE_TYPE(iq2_xxs, QUANT_IQ2_XXS, supers)
DEFINE_TYPE(iq2_xs, QUANT_IQ2_XS, supers)
DEFINE_TYPE(iq3_xxs, QUANT_IQ3_XXS, supers)
DEFINE_TYPE(iq4_xs, QUANT_IQ4_XS, supers)

#endif
