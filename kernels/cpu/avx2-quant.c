/* SPDX-License-Identifier: MIT */
/*
 * avx2-quant.c: weights and activations for x86 with AVX2, FMA and F16C: rows to floats, floats to
 * the activation forms, and products of the two, for every type.
 *
 * Owns no state. Called through the table of avx2.c (and by its float kernels), from any thread,
 * and only after dispatch.c has seen that the CPU has the three. Refuses to know formats in prose:
 * ref.c describes them, and test-kernels.c holds both tables together. Invariants: integer sums are
 * exact for every content of a block, hostile ones included (each maddubs says why its 16 bits
 * suffice); no load assumes alignment; nothing is read or written beyond the lengths given.
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx2.h"

#include "daemon/base.h"

INLINE __m256i load_256(const void *p)
{
	return _mm256_loadu_si256(p);
}

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

/* Weights: blocks to integers. */

/* The nibbles of 16 bytes: low ones first. */
INLINE __m256i nibbles(__m128i bytes)
{
	__m256i both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);

	return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

INLINE size_t bytes_32(enum quant_type type)
{
	return type == QUANT_Q8_0   ? sizeof(struct block_q8_0)
	       : type == QUANT_Q4_0 ? sizeof(struct block_q4_0)
				    : sizeof(struct block_mxfp4);
}

/* A block of 32 elements with one scale, as signed bytes. */
INLINE __m256i unpack_32(enum quant_type type, const uint8_t *w)
{
	const __m128i mxfp4 = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);

	if (type == QUANT_Q8_0)
		return load_256(w + offsetof(struct block_q8_0, qs));
	if (type == QUANT_Q4_0)
		return _mm256_sub_epi8(nibbles(load_128(w + offsetof(struct block_q4_0, qs))),
				       _mm256_set1_epi8(8));
	return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(mxfp4),
				   nibbles(load_128(w + offsetof(struct block_mxfp4, qs))));
}

/* Its scale. */
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

/*
 * The scales of four blocks: half precision is converted four at a time, which is much of the work
 * of a short block.
 */
INLINE __m128 scales_32(enum quant_type type, const uint8_t *w)
{
	const size_t next = bytes_32(type);
	__m128i e, normal, denormal;
	uint16_t h[4];

	if (type != QUANT_MXFP4) {
		UNROLL
		for (size_t i = 0; i < 4; i++)
			memcpy(&h[i], w + i * next, sizeof(h[i]));
		return _mm_cvtph_ps(
			_mm_cvtsi64_si128((int64_t)(h[0] | (uint64_t)h[1] << 16 |
						    (uint64_t)h[2] << 32 | (uint64_t)h[3] << 48)));
	}
	e = _mm_setr_epi32(w[0], w[next], w[2 * next], w[3 * next]);
	normal = _mm_slli_epi32(_mm_sub_epi32(e, _mm_set1_epi32(1)), 23);
	denormal = _mm_sllv_epi32(_mm_set1_epi32(0x200000), e);
	return _mm_castsi128_ps(
		_mm_blendv_epi8(normal, denormal, _mm_cmplt_epi32(e, _mm_set1_epi32(2))));
}

INLINE size_t bytes_q45(enum quant_type type)
{
	return type == QUANT_Q4_K ? sizeof(struct block_q4_k) : sizeof(struct block_q5_k);
}

/* A super-block of Q4_K or Q5_K on its way: the next 64 elements are two sub-blocks of 32. */
struct q45 {
	const uint8_t *qs;
	__m256i qh; /* Q5_K: the fifth bits of the next two sub-blocks are bits 0 and 1 */
	float d, dmin;
	__m128i scales, mins; /* 8 each, 16 bits */
};

INLINE struct q45 unpack_q45(enum quant_type type, const uint8_t *w)
{
	uint32_t s[3], hi;
	struct q45 b;

	_Static_assert(offsetof(struct block_q4_k, scales) == offsetof(struct block_q5_k, scales),
		       "same start");
	b.d = load_f16(w + offsetof(struct block_q4_k, d));
	b.dmin = load_f16(w + offsetof(struct block_q4_k, dmin));
	memcpy(s, w + offsetof(struct block_q4_k, scales), sizeof(s));
	hi = (s[2] & 0x0f0f0f0f) | (s[0] >> 2 & 0x30303030);
	b.scales = _mm_cvtepu8_epi16(_mm_set_epi32(0, 0, (int)hi, (int)(s[0] & 0x3f3f3f3f)));
	hi = (s[2] >> 4 & 0x0f0f0f0f) | (s[1] >> 2 & 0x30303030);
	b.mins = _mm_cvtepu8_epi16(_mm_set_epi32(0, 0, (int)hi, (int)(s[1] & 0x3f3f3f3f)));
	if (type == QUANT_Q5_K) {
		b.qh = load_256(w + offsetof(struct block_q5_k, qh));
		b.qs = w + offsetof(struct block_q5_k, qs);
	} else {
		b.qh = _mm256_setzero_si256();
		b.qs = w + offsetof(struct block_q4_k, qs);
	}
	return b;
}

/* The next two sub-blocks as unsigned bytes. */
INLINE void next_q45(enum quant_type type, struct q45 *b, __m256i *ret_lo, __m256i *ret_hi)
{
	const __m256i m4 = _mm256_set1_epi8(15);
	__m256i bytes = load_256(b->qs);

	*ret_lo = _mm256_and_si256(bytes, m4);
	*ret_hi = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), m4);
	b->qs += 32;
	if (type == QUANT_Q5_K) {
		__m256i bit0 = _mm256_and_si256(b->qh, _mm256_set1_epi8(1));
		__m256i bit1 = _mm256_and_si256(b->qh, _mm256_set1_epi8(2));

		*ret_lo = _mm256_or_si256(*ret_lo, _mm256_slli_epi16(bit0, 4));
		*ret_hi = _mm256_or_si256(*ret_hi, _mm256_slli_epi16(bit1, 3));
		b->qh = _mm256_srli_epi16(b->qh, 2);
	}
}

/* Half a super-block (128 elements) of Q6_K as unsigned bytes, 32 below their value. */
INLINE void unpack_q6(const uint8_t *w, size_t half, __m256i q[4])
{
	const __m256i m4 = _mm256_set1_epi8(15), m2 = _mm256_set1_epi8(48);
	__m256i l0 = load_256(w + offsetof(struct block_q6_k, ql) + 64 * half);
	__m256i l1 = load_256(w + offsetof(struct block_q6_k, ql) + 64 * half + 32);
	__m256i h = load_256(w + offsetof(struct block_q6_k, qh) + 32 * half);

	q[0] = _mm256_or_si256(_mm256_and_si256(l0, m4), _mm256_and_si256(_mm256_slli_epi16(h, 4), m2));
	q[1] = _mm256_or_si256(_mm256_and_si256(l1, m4), _mm256_and_si256(_mm256_slli_epi16(h, 2), m2));
	q[2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), m4), _mm256_and_si256(h, m2));
	q[3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), m4),
			       _mm256_and_si256(_mm256_srli_epi16(h, 2), m2));
}

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

/* 32 signed bytes: the first 16 times mul[0] plus add, the others times mul[1] plus add. */
INLINE void store_32(float *y, __m256i q, const float mul[2], float add)
{
	int8_t bytes[32];

	_mm256_storeu_si256((__m256i *)bytes, q);
	UNROLL
	for (size_t i = 0; i < 32; i += LANES) {
		__m256 v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(bytes + i)));

		store_ps(y + i, _mm256_fmadd_ps(v, splat(mul[i / 16]), splat(add)));
	}
}

INLINE void dequant_32(enum quant_type type, const void *row, float *y, size_t n)
{
	const uint8_t *w = row;

	for (size_t i = 0; i < n; i += QK_0, w += bytes_32(type)) {
		float d = scale_32(type, w);

		store_32(y + i, unpack_32(type, w), (float[]){ d, d }, 0.0f);
	}
}

INLINE void dequant_q45(enum quant_type type, const void *row, float *y, size_t n)
{
	const uint8_t *w = row;

	for (size_t i = 0; i < n; i += QK_K, w += bytes_q45(type)) {
		struct q45 b = unpack_q45(type, w);
		uint16_t scales[8], mins[8];

		_mm_storeu_si128((__m128i *)scales, b.scales);
		_mm_storeu_si128((__m128i *)mins, b.mins);
		for (size_t s = 0; s < 8; s += 2) {
			float lo = b.d * scales[s], hi = b.d * scales[s + 1];
			__m256i q0, q1;

			next_q45(type, &b, &q0, &q1);
			store_32(y + i + 32 * s, q0, (float[]){ lo, lo }, -b.dmin * mins[s]);
			store_32(y + i + 32 * s + 32, q1, (float[]){ hi, hi }, -b.dmin * mins[s + 1]);
		}
	}
}

INLINE void dequant_q6(enum quant_type type, const void *row, float *y, size_t n)
{
	const uint8_t *w = row;

	(void)type;

	for (size_t i = 0; i < n; i += QK_K, w += sizeof(struct block_q6_k)) {
		float d = load_f16(w + offsetof(struct block_q6_k, d));

		for (size_t half = 0; half < 2; half++) {
			const int8_t *s =
				(const int8_t *)w + offsetof(struct block_q6_k, scales) + 8 * half;
			__m256i q[4];

			unpack_q6(w, half, q);
			for (size_t j = 0; j < 4; j++)
				store_32(y + i + 128 * half + 32 * j,
					 _mm256_sub_epi8(q[j], _mm256_set1_epi8(32)),
					 (float[]){ d * s[2 * j], d * s[2 * j + 1] }, 0.0f);
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
 * ref.c.
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

struct cols {
	const uint8_t *act; /* column c starts at act + c * stride */
	size_t stride, n;
	float *y; /* its result goes to y[c * y_stride] */
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
	const size_t chains = cols->n == 1 ? 4 : 2; /* enough to hide the latency of FMA */
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
 * One block of 32. maddubs multiplies unsigned by signed and adds pairs, saturating at 16 bits:
 * magnitudes of weights are at most 128, activations (with the sign of the weight) within -127..127
 * by construction, so a pair is at most 2 * 128 * 127 = 32512 < 32767.
 */
INLINE void dot_block_32(enum quant_type type, const uint8_t *w, const uint8_t *act,
			 const struct cols *cols, const float scale[MAX_COLS][4],
			 size_t scale_index, __m256 *acc)
{
	__m256i q = unpack_32(type, w), mag = _mm256_abs_epi8(q);

	UNROLL
	for (size_t c = 0; c < cols->n; c++) {
		__m256i x = load_256(act + c * cols->stride + offsetof(struct block_q8_0, qs));
		__m256i pairs = _mm256_maddubs_epi16(mag, _mm256_sign_epi8(x, q));
		__m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));

		acc[c] = _mm256_fmadd_ps(splat(scale[c][scale_index]), _mm256_cvtepi32_ps(sum), acc[c]);
	}
}

INLINE void dot_32(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	const size_t w_next = bytes_32(type), x_next = sizeof(struct block_q8_0);
	const size_t chains = MAX_COLS / cols->n;
	const uint8_t *x = cols->act;
	float scale[MAX_COLS][4];
	__m256 acc[MAX_COLS];
	size_t i = 0;

	zero(acc, MAX_COLS);
	for (; i + 4 <= n / QK_0; i += 4, w += 4 * w_next, x += 4 * x_next) {
		__m128 dw = scales_32(type, w);

		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			__m128 dx = scales_32(QUANT_Q8_0, x + c * cols->stride);

			_mm_storeu_ps(scale[c], _mm_mul_ps(dw, dx));
		}
		UNROLL
		for (size_t j = 0; j < 4; j++)
			dot_block_32(type, w + j * w_next, x + j * x_next, cols, scale, j,
				     acc + j % chains * cols->n);
	}
	for (; i < n / QK_0; i++, w += w_next, x += x_next) {
		UNROLL
		for (size_t c = 0; c < cols->n; c++)
			scale[c][0] = scale_32(type, w) * load_f16(x + c * cols->stride);
		dot_block_32(type, w, x, cols, scale, 0, acc);
	}
	store_sums(cols, acc, chains);
}

/* Scale s of the eight in both halves of `scales`, to all lanes. */
INLINE __m256i splat_scale(__m256i scales, int s)
{
	return _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short)(0x0100 + 0x0202 * s)));
}

/* sum += scale * weight * activation; see the callers for the 16 bits of maddubs. */
INLINE void add_scaled_products(__m256i *sum, __m256i q, __m256i scale, const uint8_t *x)
{
	__m256i pairs = _mm256_maddubs_epi16(q, load_256(x));

	*sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, scale));
}

/* maddubs: a pair is at most 2 * 31 * 127 = 7874; the sum of 256, with scales, is below 2^27. */
INLINE void dot_q45(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	const uint8_t *x = cols->act;
	__m256 acc[MAX_COLS];

	zero(acc, cols->n);
	for (size_t i = 0; i < n; i += QK_K, w += bytes_q45(type), x += sizeof(struct block_q8_k)) {
		struct q45 b = unpack_q45(type, w);
		__m256i scales = _mm256_broadcastsi128_si256(b.scales), sum[MAX_COLS] = { 0 };
		/* Each min twice: bsums are of 16 elements, mins are for 32. */
		__m256i mins = _mm256_set_m128i(_mm_unpackhi_epi16(b.mins, b.mins),
						_mm_unpacklo_epi16(b.mins, b.mins));

		UNROLL
		for (int j = 0; j < 4; j++) {
			__m256i lo, hi;

			next_q45(type, &b, &lo, &hi);
			UNROLL
			for (size_t c = 0; c < cols->n; c++) {
				const uint8_t *qx = x + c * cols->stride +
						    offsetof(struct block_q8_k, qs) + 64 * j;

				add_scaled_products(&sum[c], lo, splat_scale(scales, 2 * j), qx);
				add_scaled_products(&sum[c], hi, splat_scale(scales, 2 * j + 1),
						    qx + 32);
			}
		}
		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			const uint8_t *xc = x + c * cols->stride;
			float dx = load_f32(xc + offsetof(struct block_q8_k, d));
			__m256i bsums = load_256(xc + offsetof(struct block_q8_k, bsums));
			__m256 m = _mm256_cvtepi32_ps(_mm256_madd_epi16(mins, bsums));
			__m256 s = _mm256_cvtepi32_ps(sum[c]);

			acc[c] = _mm256_fmadd_ps(splat(b.d * dx), s, acc[c]);
			acc[c] = _mm256_fnmadd_ps(splat(b.dmin * dx), m, acc[c]);
		}
	}
	store_sums(cols, acc, 1);
}

/*
 * Elements are used without their offset of 32, which is then taken off through the sums of the
 * activations. maddubs: a pair is at most 2 * 63 * 127 = 16002; the sum of 256, with scales of 8
 * bits, is below 2^30.
 */
INLINE void dot_q6(size_t n, const uint8_t *w, const struct cols *cols)
{
	const uint8_t *x = cols->act;
	__m256 acc[MAX_COLS];

	zero(acc, cols->n);
	for (size_t i = 0; i < n;
	     i += QK_K, w += sizeof(struct block_q6_k), x += sizeof(struct block_q8_k)) {
		const uint8_t *s = w + offsetof(struct block_q6_k, scales);
		__m256i all_scales = _mm256_cvtepi8_epi16(load_128(s)), sum[MAX_COLS];
		float d = load_f16(w + offsetof(struct block_q6_k, d));

		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			__m256i bsums =
				load_256(x + c * cols->stride + offsetof(struct block_q8_k, bsums));
			__m256i off = _mm256_slli_epi32(_mm256_madd_epi16(all_scales, bsums), 5);

			sum[c] = _mm256_sub_epi32(_mm256_setzero_si256(), off);
		}
		UNROLL
		for (size_t half = 0; half < 2; half++) {
			__m128i half_scales = _mm_cvtepi8_epi16(load_64(s + 8 * half));
			__m256i scales = _mm256_broadcastsi128_si256(half_scales), q[4];

			unpack_q6(w, half, q);
			UNROLL
			for (int j = 0; j < 4; j++) {
				/*
				 * Sixteen elements each: scale 2j for the lower lanes, 2j + 1
				 * above.
				 */
				const short lo = (short)(0x0100 + 0x0404 * j);
				const __m256i pick = _mm256_set_m128i(
					_mm_set1_epi16((short)(lo + 0x0202)), _mm_set1_epi16(lo));
				__m256i scale = _mm256_shuffle_epi8(scales, pick);

				UNROLL
				for (size_t c = 0; c < cols->n; c++)
					add_scaled_products(&sum[c], q[j], scale,
							    x + c * cols->stride +
								    offsetof(struct block_q8_k, qs) +
								    128 * half + 32 * (size_t)j);
			}
		}
		UNROLL
		for (size_t c = 0; c < cols->n; c++) {
			float dx = load_f32(x + c * cols->stride + offsetof(struct block_q8_k, d));

			acc[c] = _mm256_fmadd_ps(splat(d * dx), _mm256_cvtepi32_ps(sum[c]), acc[c]);
		}
	}
	store_sums(cols, acc, 1);
}

INLINE void dot(enum quant_type type, size_t n, const uint8_t *w, const struct cols *cols)
{
	if (type == QUANT_F32 || type == QUANT_F16 || type == QUANT_BF16)
		dot_elems(type, n, w, cols);
	else if (type == QUANT_Q4_K || type == QUANT_Q5_K)
		dot_q45(type, n, w, cols);
	else if (type == QUANT_Q6_K)
		dot_q6(n, w, cols);
	else
		dot_32(type, n, w, cols);
}

/*
 * A few rows stay in the first cache while all columns pass by, in groups that share the unpacking.
 * With one column this is one pass over the weights in order.
 */
#define ROW_BLOCK 16

INLINE void matmul(enum quant_type type, size_t n, const void *weights, size_t w_stride, size_t n_rows,
		   const void *act, size_t act_stride, size_t n_cols, float *y, size_t y_stride)
{
	for (size_t r0 = 0; r0 < n_rows; r0 += ROW_BLOCK) {
		size_t r1 = MIN(r0 + ROW_BLOCK, n_rows), group;

		for (size_t c = 0; c < n_cols; c += group) {
			const uint8_t *x = (const uint8_t *)act + c * act_stride;
			const uint8_t *w = (const uint8_t *)weights + r0 * w_stride;
			float *out = y + c * y_stride + r0, *end = out + (r1 - r0);

			group = n_cols - c >= MAX_COLS ? MAX_COLS : n_cols - c >= 2 ? 2 : 1;
			if (group == MAX_COLS)
				for (; out < end; out++, w += w_stride)
					dot(type, n, w,
					    &(struct cols){ x, act_stride, MAX_COLS, out, y_stride });
			else if (group == 2)
				for (; out < end; out++, w += w_stride)
					dot(type, n, w,
					    &(struct cols){ x, act_stride, 2, out, y_stride });
			else
				for (; out < end; out++, w += w_stride)
					dot(type, n, w,
					    &(struct cols){ x, act_stride, 1, out, y_stride });
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
		(void)tiles;                                                                   \
		matmul(type, n, w, w_stride, n_rows, act, act_stride, n_cols, y, y_stride);    \
	}

DEFINE_TYPE(f32, QUANT_F32, elems)
DEFINE_TYPE(f16, QUANT_F16, elems)
DEFINE_TYPE(bf16, QUANT_BF16, elems)
DEFINE_TYPE(q8_0, QUANT_Q8_0, 32)
DEFINE_TYPE(q4_0, QUANT_Q4_0, 32)
DEFINE_TYPE(mxfp4, QUANT_MXFP4, 32)
DEFINE_TYPE(q4_k, QUANT_Q4_K, q45)
DEFINE_TYPE(q5_k, QUANT_Q5_K, q45)
DEFINE_TYPE(q6_k, QUANT_Q6_K, q6)

#endif
