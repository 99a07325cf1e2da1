/* SPDX-License-Identifier: MIT */
/*
 * avx2-quant.c: weights and activations for x86 with AVX2, FMA and F16C: rows to floats, floats to
 * the activation forms, and products of the two, for every type.
 *
 * Owns no state. Called through the table of avx2.c (and by its float kernels), from any thread,
 * and only after dispatch.c has seen that the CPU has the three. Refuses to know formats: blocks
 * come out of avx2-weights.h, and test-kernels.c holds this table and the reference together.
 * Invariants: integer sums are exact for every content of a block, hostile ones included
 * (products() says why 16 bits suffice); no load assumes alignment; nothing is read or written
 * beyond the lengths given; how a sum is made does not depend on tiles (see cpu.h).
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx2-weights.h"

#include "daemon/base.h"

/*
 * Rows to floats. The products of scales are exact in a float, so these agree with ref.c to the
 * last bit.
 */

INLINE void dequant_elems(enum quant_type type, const void *row, float *y, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		store_ps(y + i, load_8(type, elem(type, row, i)));
	for (; i < n; i++)
		y[i] = load_1(type, elem(type, row, i));
}

/* 32 signed bytes: the first 16 times mul[0] plus add[0], the others times mul[1] plus add[1]. */
INLINE void store_32(float *y, __m256i q, const float mul[2], const float add[2])
{
	int8_t bytes[32];

	_mm256_storeu_si256((__m256i *)bytes, q);
	UNROLL
	for (size_t i = 0; i < 32; i += LANES) {
		__m256 v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(bytes + i)));

		store_ps(y + i, _mm256_fmadd_ps(v, splat(mul[i / 16]), splat(add[i / 16])));
	}
}

INLINE void dequant_32(enum quant_type type, const void *row, float *y, size_t n)
{
	const uint8_t *w = row;

	for (size_t i = 0; i < n; i += QK_0, w += bytes_32(type)) {
		float d = scale_32(type, w);
		float m = has_mins(type) ? load_f16(w + offsetof(struct block_q4_1, m)) : -0.0f;

		store_32(y + i, to_signed(type, quants_32(type, w)), (float[]){ d, d },
			 (float[]){ m, m });
	}
}

INLINE void dequant_256(enum quant_type type, const void *row, float *y, size_t n)
{
	const uint8_t *w = row;

	for (size_t i = 0; i < n; i += QK_K, w += bytes_256(type)) {
		struct super b = open_256(type, w);

		UNROLL
		for (int j = 0; j < 8; j++) {
			__m256i scale = scale_256(type, &b, j);
			int16_t mins[16];

			_mm256_storeu_si256((__m256i *)mins, b.mins);
			store_32(y + i + 32 * j, to_signed(type, quants_256(type, w, j)),
				 (float[]){ b.d * (int16_t)_mm256_extract_epi16(scale, 0),
					    b.d * (int16_t)_mm256_extract_epi16(scale, 8) },
				 (float[]){ has_mins(type) ? -b.dmin * mins[2 * j] : -0.0f,
					    has_mins(type) ? -b.dmin * mins[2 * j + 1] : -0.0f });
		}
	}
}

/* Activations. */

INLINE __m256i magnitude_bits(__m256 v)
{
	return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}

/*
 * The largest magnitude of n (a multiple of 32) floats, compared as integers: see largest() of
 * ref-quant.c.
 */
INLINE int32_t max_magnitude_bits(const float *x, size_t n)
{
	__m256i m = _mm256_setzero_si256();
	__m128i s;

	for (size_t i = 0; i < n; i += LANES)
		m = _mm256_max_epi32(m, magnitude_bits(load_ps(x + i)));
	s = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
	s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
	s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1));
	return _mm_cvtsi128_si32(s);
}

/*
 * 32 products, rounded to nearest even and held in -127..127; NaN gives -127 (maxps returns its
 * second operand).
 */
INLINE __m256i round_q8(const float *x, float inv)
{
	const __m256 mul = splat(inv), lo = splat(-127.0f), hi = splat(127.0f);
	__m256i v[4];

	UNROLL
	for (size_t i = 0; i < 4; i++) {
		__m256 p = _mm256_mul_ps(load_ps(x + i * LANES), mul);

		v[i] = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(p, lo), hi));
	}
	v[0] = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
	/* The packs work within halves: put groups of four back in order. */
	return _mm256_permutevar8x32_epi32(v[0], _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

void avx2_quantize_q8_0(const float *x, void *act, size_t n)
{
	uint8_t *out = act;

	for (size_t i = 0; i < n; i += QK_0, out += sizeof(struct block_q8_0)) {
		int32_t bits = max_magnitude_bits(x + i, QK_0);
		float amax = load_f32(&bits);
		uint16_t d = (uint16_t)_cvtss_sh(amax / 127.0f, _MM_FROUND_TO_NEAREST_INT);
		__m256i q = round_q8(x + i, amax != 0.0f ? 127.0f / amax : 0.0f);

		memcpy(out + offsetof(struct block_q8_0, d), &d, sizeof(d));
		_mm256_storeu_si256((__m256i *)(out + offsetof(struct block_q8_0, qs)), q);
	}
}

/* The first of n floats whose magnitude has these bits. */
INLINE float find_magnitude(const float *x, int32_t bits, size_t n)
{
	for (size_t i = 0; i < n; i += LANES) {
		__m256i eq =
			_mm256_cmpeq_epi32(magnitude_bits(load_ps(x + i)), _mm256_set1_epi32(bits));
		int mask = _mm256_movemask_ps(_mm256_castsi256_ps(eq));

		if (mask)
			return x[i + (size_t)__builtin_ctz((unsigned)mask)];
	}
	return 0.0f;
}

void avx2_quantize_q8_k(const float *x, void *act, size_t n)
{
	const __m256i ones8 = _mm256_set1_epi8(1), ones16 = _mm256_set1_epi16(1);
	uint8_t *out = act;

	for (size_t i = 0; i < n; i += QK_K, out += sizeof(struct block_q8_k)) {
		float m = find_magnitude(x + i, max_magnitude_bits(x + i, QK_K), QK_K);
		float inv = -127.0f / m;
		struct block_q8_k b;

		if (m == 0.0f) {
			memset(out, 0, sizeof(b));
			continue;
		}
		b.d = 1.0f / inv;
		for (size_t j = 0; j < QK_K; j += 32) {
			__m256i q = round_q8(x + i + j, inv);
			__m256i s = _mm256_madd_epi16(_mm256_maddubs_epi16(ones8, q), ones16);

			_mm256_storeu_si256((__m256i *)(b.qs + j), q);
			s = _mm256_hadd_epi32(s, s);
			s = _mm256_hadd_epi32(s, s); /* each half: its sum of 16, four times */
			b.bsums[j / 16] = (int16_t)_mm256_extract_epi32(s, 0);
			b.bsums[j / 16 + 1] = (int16_t)_mm256_extract_epi32(s, 4);
		}
		memcpy(out, &b, sizeof(b));
	}
}

void avx2_quantize_f32(const float *x, void *act, size_t n)
{
	memcpy(act, x, n * sizeof(*x));
}

void avx2_quantize_f16(const float *x, void *act, size_t n)
{
	uint8_t *out = act;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		_mm_storeu_si128((__m128i *)(out + 2 * i),
				 _mm256_cvtps_ph(load_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
	for (; i < n; i++) {
		uint16_t h = float_to_f16(x[i]);

		memcpy(out + 2 * i, &h, sizeof(h));
	}
}

void avx2_quantize_bf16(const float *x, void *act, size_t n)
{
	/* Plain: a row is converted once for thousands of rows of weights. */
	for (size_t i = 0; i < n; i++) {
		uint16_t h = float_to_bf16(x[i]);

		memcpy((uint8_t *)act + 2 * i, &h, sizeof(h));
	}
}

/*
 * Dot products of one weight row with a few activation columns: weights are unpacked once for all
 * of them. Their number is a constant of at most MAX_COLS, for which sums and temporaries fit into
 * 16 registers.
 */
#define MAX_COLS 4

/*
 * Bytes of weights on their way from memory while others are used. Floats, which take hardly any
 * computing, stream as fast without.
 */
#define FETCH_AHEAD 6144

struct cols {
	const uint8_t *act; /* column c starts at act + c * stride */
	size_t stride, n;
	/*
	 * One column, which has its group of sixteen for itself: nothing else hides the latency of
	 * additions, so it is summed in more chains. In other columns their number is the same
	 * whatever n is, or the bits of a result would depend on tiles.
	 */
	bool alone;
	bool cold; /* the weights are read for the first time */
	float *y;  /* its result goes to y[c * y_stride] */
	size_t y_stride;
};

/* `chains` partial sums of each column are acc[c], acc[n + c], ... */
INLINE void store_sums(const struct cols *cols, const __m256 *acc, size_t chains)
{
	UNROLL
	for (size_t c = 0; c < cols->n; c++) {
		__m256 sum = acc[c];

		UNROLL
		for (size_t j = 1; j < chains; j++)
			sum = _mm256_add_ps(sum, acc[j * cols->n + c]);
		cols->y[c * cols->y_stride] = hsum(sum);
	}
}

INLINE void dot_elems(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	const size_t chains = cols->alone ? 4 : 2;
	__m256 acc[MAX_COLS * 2];
	size_t i = 0;

	zero(acc, cols->n * chains);
	for (; i + chains * LANES <= n; i += chains * LANES) {
		UNROLL
		for (size_t a = 0; a < cols->n * chains; a++) {
			const uint8_t *x = cols->act + a % cols->n * cols->stride;
			size_t at = i + a / cols->n * LANES;

			acc[a] = _mm256_fmadd_ps(load_8(type, elem(type, w, at)),
						 load_8(type, elem(type, x, at)), acc[a]);
		}
	}
	store_sums(cols, acc, chains);
	for (; i < n; i++)
		for (size_t c = 0; c < cols->n; c++)
			cols->y[c * cols->y_stride] +=
				load_1(type, elem(type, w, i)) *
				load_1(type, elem(type, cols->act + c * cols->stride, i));
}

/*
 * Sums of two products. maddubs multiplies unsigned by signed and adds pairs, saturating at 16
 * bits: magnitudes of weights are at most 128, activations (with the sign of the weight) within
 * -127..127 by construction, so a pair is at most 2 * 128 * 127 = 32512 < 32767.
 */
INLINE __m256i products(enum quant_type type, struct quants q, __m256i x)
{
	return _mm256_maddubs_epi16(q.mag, has_signs(type) ? _mm256_sign_epi8(x, q.sign) : x);
}

/* Scale and minimum of four blocks of weights times the scale of activations. */
struct factors {
	float scale[MAX_COLS][4], min[MAX_COLS][4];
};

/* One block of 32. */
INLINE void dot_block_32(enum quant_type type, const uint8_t *w, const uint8_t *act,
			 const struct cols *cols, const struct factors *f, size_t index, __m256 *acc)
{
	const __m256i ones = _mm256_set1_epi16(1);
	struct quants q = quants_32(type, w);

	UNROLL
	for (size_t c = 0; c < cols->n; c++) {
		__m256i x = load_256(act + c * cols->stride + offsetof(struct block_q8_0, qs));
		__m256i sum = _mm256_madd_epi16(products(type, q, x), ones);

		acc[c] = _mm256_fmadd_ps(splat(f->scale[c][index]), _mm256_cvtepi32_ps(sum), acc[c]);
		if (!has_mins(type))
			continue;
		sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), x), ones);
		acc[c] = _mm256_fmadd_ps(splat(f->min[c][index]), _mm256_cvtepi32_ps(sum), acc[c]);
	}
}

INLINE void dot_32(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	const size_t w_next = bytes_32(type), x_next = sizeof(struct block_q8_0);
	const size_t m = offsetof(struct block_q4_1, m);
	const size_t chains = cols->alone ? 4 : 1;
	const uint8_t *x = cols->act;
	__m256 acc[MAX_COLS];
	struct factors f;
	size_t i = 0;

	_Static_assert(offsetof(struct block_q4_1, m) == offsetof(struct block_q5_1, m), "same start");
	zero(acc, cols->n * chains);
	for (; i + 4 <= n / QK_0; i += 4, w += 4 * w_next, x += 4 * x_next) {
		__m128 dw = scales_32(type, w);

		if (cols->cold)
			fetch(w + FETCH_AHEAD, 4 * w_next);
		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			__m128 dx = scales_32(QUANT_Q8_0, x + c * cols->stride);

			_mm_storeu_ps(f.scale[c], _mm_mul_ps(dw, dx));
			if (has_mins(type))
				_mm_storeu_ps(f.min[c], _mm_mul_ps(load_4_f16(w + m, w_next), dx));
		}
		UNROLL
		for (size_t j = 0; j < 4; j++)
			dot_block_32(type, w + j * w_next, x + j * x_next, cols, &f, j,
				     acc + j % chains * cols->n);
	}
	for (; i < n / QK_0; i++, w += w_next, x += x_next) {
		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			float dx = load_f16(x + c * cols->stride);

			f.scale[c][0] = scale_32(type, w) * dx;
			if (has_mins(type))
				f.min[c][0] = load_f16(w + m) * dx;
		}
		dot_block_32(type, w, x, cols, &f, 0, acc);
	}
	store_sums(cols, acc, chains);
}

/* Minimums, or the scales of types with an offset, times the sums of activations. */
INLINE __m256i mins_sum(const struct super *b, const uint8_t *x)
{
	return _mm256_madd_epi16(b->mins, load_256(x + offsetof(struct block_q8_k, bsums)));
}

/*
 * Sums of a super-block are exact integers: with scales (of 8 bits for Q6_K) their magnitude is
 * below 2^30. What an offset adds to them is taken off through the sums of the activations.
 */
INLINE void dot_256(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	const uint8_t *x = cols->act;
	__m256 acc[MAX_COLS];

	zero(acc, cols->n);
	for (size_t i = 0; i < n; i += QK_K, w += bytes_256(type), x += sizeof(struct block_q8_k)) {
		struct super b = open_256(type, w);
		__m256i sum[MAX_COLS] = { 0 };

		if (cols->cold)
			fetch(w + FETCH_AHEAD, bytes_256(type));
		if (offset_shift(type)) {
			UNROLL
			for (size_t c = 0; c < cols->n; c++) {
				__m256i off = mins_sum(&b, x + c * cols->stride);

				off = _mm256_slli_epi32(off, offset_shift(type));
				sum[c] = _mm256_sub_epi32(sum[c], off);
			}
		}
		UNROLL
		for (int j = 0; j < 8; j++) {
			const size_t at = offsetof(struct block_q8_k, qs) + 32 * (size_t)j;
			struct quants q = quants_256(type, w, j);
			__m256i scale = scale_256(type, &b, j);

			UNROLL
			for (size_t c = 0; c < cols->n; c++) {
				__m256i pairs = products(type, q, load_256(x + c * cols->stride + at));

				sum[c] = _mm256_add_epi32(sum[c], _mm256_madd_epi16(pairs, scale));
			}
		}
		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			const uint8_t *xc = x + c * cols->stride;
			float dx = load_f32(xc + offsetof(struct block_q8_k, d));

			acc[c] = _mm256_fmadd_ps(splat(b.d * dx), _mm256_cvtepi32_ps(sum[c]), acc[c]);
			if (has_mins(type))
				acc[c] = _mm256_fnmadd_ps(splat(b.dmin * dx),
							  _mm256_cvtepi32_ps(mins_sum(&b, xc)), acc[c]);
		}
	}
	store_sums(cols, acc, 1);
}

typedef void dot_function(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols);

/* n_cols and alone are constants, and so are the copies of them that `dot` sees. */
INLINE void dot_rows(dot_function *dot, enum quant_type type, size_t n, const uint8_t *w,
		     size_t w_stride, size_t n_rows, struct cols cols, size_t n_cols, bool alone)
{
	cols.n = n_cols;
	cols.alone = alone;
	for (size_t r = 0; r < n_rows; r++, w += w_stride, cols.y++)
		dot(type, n, w, &cols);
}

/* Columns whose number may decide how a result is computed: see cpu.h. */
#define GROUP_COLS 16

/*
 * A few rows stay in the first cache while all columns pass by, in tiles that share the unpacking.
 * With one column this is one pass over the weights in order.
 */
INLINE void matmul(dot_function *dot, enum quant_type type, size_t n, const void *weights,
		   size_t w_stride, size_t n_rows, const void *act, size_t act_stride,
		   size_t n_cols, float *y, size_t y_stride, const struct cpu_tiles *tiles)
{
	const size_t rows = tiles->l1_rows, most = MIN((size_t)tiles->reg_cols, (size_t)MAX_COLS);

	for (size_t r0 = 0; r0 < n_rows; r0 += rows) {
		const uint8_t *w = (const uint8_t *)weights + r0 * w_stride;
		size_t n_r = MIN(rows, n_rows - r0), tile;

		for (size_t c = 0; c < n_cols; c += tile) {
			size_t first = c - c % GROUP_COLS,
			       group = MIN(n_cols - first, (size_t)GROUP_COLS);
			struct cols cols = {
				.act = (const uint8_t *)act + c * act_stride,
				.stride = act_stride,
				.cold = c == 0,
				.y = y + c * y_stride + r0,
				.y_stride = y_stride,
			};

			tile = MIN(most, first + group - c);
			if (group == 1)
				dot_rows(dot, type, n, w, w_stride, n_r, cols, 1, true);
			else if (tile == 1)
				dot_rows(dot, type, n, w, w_stride, n_r, cols, 1, false);
			else if (tile == 2)
				dot_rows(dot, type, n, w, w_stride, n_r, cols, 2, false);
			else if (tile == 3)
				dot_rows(dot, type, n, w, w_stride, n_r, cols, 3, false);
			else
				dot_rows(dot, type, n, w, w_stride, n_r, cols, 4, false);
		}
	}
}

/* The table wants functions of one type: here they are, of the families above. */
#define DEFINE_TYPE(suffix, type, family)                                                      \
	void avx2_dequant_##suffix(const void *row, float *y, size_t n)                        \
	{                                                                                      \
		dequant_##family(type, row, y, n);                                             \
	}                                                                                      \
	void avx2_matmul_##suffix(size_t n, const void *w, size_t w_stride, size_t n_rows,     \
				  const void *act, size_t act_stride, size_t n_cols, float *y, \
				  size_t y_stride, const struct cpu_tiles *tiles)              \
	{                                                                                      \
		matmul(dot_##family, type, n, w, w_stride, n_rows, act, act_stride, n_cols, y, \
		       y_stride, tiles ? tiles : &cpu_kernels_avx2.tiles);                     \
	}

DEFINE_TYPE(f32, QUANT_F32, elems)
DEFINE_TYPE(f16, QUANT_F16, elems)
DEFINE_TYPE(bf16, QUANT_BF16, elems)
DEFINE_TYPE(q8_0, QUANT_Q8_0, 32)
DEFINE_TYPE(q4_0, QUANT_Q4_0, 32)
DEFINE_TYPE(q4_1, QUANT_Q4_1, 32)
DEFINE_TYPE(q5_0, QUANT_Q5_0, 32)
DEFINE_TYPE(q5_1, QUANT_Q5_1, 32)
DEFINE_TYPE(mxfp4, QUANT_MXFP4, 32)
DEFINE_TYPE(iq4_nl, QUANT_IQ4_NL, 32)
DEFINE_TYPE(q2_k, QUANT_Q2_K, 256)
DEFINE_TYPE(q3_k, QUANT_Q3_K, 256)
DEFINE_TYPE(q4_k, QUANT_Q4_K, 256)
DEFINE_TYPE(q5_k, QUANT_Q5_K, 256)
DEFINE_TYPE(q6_k, QUANT_Q6_K, 256)
DEFINE_TYPE(iq2_xxs, QUANT_IQ2_XXS, 256)
DEFINE_TYPE(iq2_xs, QUANT_IQ2_XS, 256)
DEFINE_TYPE(iq3_xxs, QUANT_IQ3_XXS, 256)
DEFINE_TYPE(iq4_xs, QUANT_IQ4_XS, 256)

#endif
