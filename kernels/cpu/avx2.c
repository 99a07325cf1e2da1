/* SPDX-License-Identifier: MIT */
/*
 * avx2.c: the CPU kernels for x86 with AVX2, FMA and F16C.
 *
 * Owns no state. Called through its table only, from any thread, and only after dispatch.c has seen
 * that the CPU has the three. Refuses to know formats in prose: ref.c describes them, and test-
 * kernels.c holds both tables together. Invariants: integer sums are exact for every content of a
 * block, hostile ones included (each maddubs says why its 16 bits suffice); no load assumes
 * alignment; nothing is read or written beyond the lengths given.
 *
 * Families of functions are written once, as always-inlined functions of a type or tile size that
 * is a constant where they are called; arrays of vectors indexed by unrolled loops live in
 * registers.
 */
#if defined(__x86_64__)

#include "kernels/cpu/cpu.h"

#include "daemon/base.h"

#include <immintrin.h>
#include <math.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16") /* gcc -O2 keeps arrays of vectors in memory without it */
#endif

#define LANES 8 /* floats of a vector */

INLINE __m256 load_ps(const float *p)
{
	return _mm256_loadu_ps(p);
}

INLINE void store_ps(float *p, __m256 v)
{
	_mm256_storeu_ps(p, v);
}

INLINE __m256 splat(float f)
{
	return _mm256_set1_ps(f);
}

INLINE __m256i load_256(const void *p)
{
	return _mm256_loadu_si256(p);
}

INLINE __m128i load_128(const void *p)
{
	return _mm_loadu_si128(p);
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

INLINE float load_f32(const void *p)
{
	float f;

	memcpy(&f, p, sizeof(f));
	return f;
}

INLINE void zero(__m256 *v, size_t n)
{
	UNROLL
	for (size_t i = 0; i < n; i++)
		v[i] = _mm256_setzero_ps();
}

INLINE float hsum(__m256 v)
{
	__m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

	s = _mm_add_ps(s, _mm_movehl_ps(s, s));
	return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE float hmax(__m256 v)
{
	__m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));

	s = _mm_max_ps(s, _mm_movehl_ps(s, s));
	return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

INLINE double hsum_pd(__m256d v)
{
	__m128d s = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));

	return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}

/* Eight elements of F32, F16 or BF16, and one, from unaligned memory. */
INLINE __m256 load_8(enum quant_type type, const void *p)
{
	if (type == QUANT_F32)
		return _mm256_loadu_ps(p);
	if (type == QUANT_F16)
		return _mm256_cvtph_ps(load_128(p));
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}

INLINE float load_1(enum quant_type type, const void *p)
{
	uint16_t h;

	if (type == QUANT_F32)
		return load_f32(p);
	memcpy(&h, p, sizeof(h));
	return type == QUANT_F16 ? _cvtsh_ss(h) : bf16_to_float(h);
}

/* The address of element i. */
INLINE const uint8_t *elem(enum quant_type type, const void *p, size_t i)
{
	return (const uint8_t *)p + i * (type == QUANT_F32 ? sizeof(float) : sizeof(uint16_t));
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

static void quantize_q8_0(const float *x, void *act, size_t n)
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

static void quantize_q8_k(const float *x, void *act, size_t n)
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

static void quantize_f32(const float *x, void *act, size_t n)
{
	memcpy(act, x, n * sizeof(*x));
}

static void quantize_f16(const float *x, void *act, size_t n)
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

static void quantize_bf16(const float *x, void *act, size_t n)
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
#define DEFINE_TYPE(suffix, type, family)                                                        \
	static void dequant_##suffix(const void *row, float *y, size_t n)                        \
	{                                                                                        \
		dequant_##family(type, row, y, n);                                               \
	}                                                                                        \
	static void matmul_##suffix(size_t n, const void *w, size_t w_stride, size_t n_rows,     \
				    const void *act, size_t act_stride, size_t n_cols, float *y, \
				    size_t y_stride)                                             \
	{                                                                                        \
		matmul(type, n, w, w_stride, n_rows, act, act_stride, n_cols, y, y_stride);      \
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

/* Float kernels. */

/*
 * e^x = 2^n * e^r, |r| <= ln(2)/2. The Taylor polynomial of degree 7 is off by less than 0.346^8/8!
 * = 5e-9; the whole by about 1 ulp. 2^n is multiplied in two steps, so that results down to the
 * smallest denormal are right. NaN passes through the clamps (minps and maxps return their second
 * operand).
 */
INLINE __m256 exp_8(__m256 x)
{
	static const float taylor[] = { 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
					1.0f / 6,    0.5f,       1.0f,       1.0f };
	__m256 n, r, p = splat(taylor[0]);
	__m256i i, half, bias = _mm256_set1_epi32(127);

	x = _mm256_max_ps(splat(-104.0f), _mm256_min_ps(splat(89.0f), x));
	n = _mm256_round_ps(_mm256_mul_ps(x, splat(0x1.715476p+0f)),
			    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
	r = _mm256_fnmadd_ps(n, splat(0x1.62e430p-1f), x); /* ln 2 in two parts */
	r = _mm256_fnmadd_ps(n, splat(-0x1.05c610p-29f), r);
	UNROLL
	for (size_t k = 1; k < ARRAY_SIZE(taylor); k++)
		p = _mm256_fmadd_ps(p, r, splat(taylor[k]));
	i = _mm256_cvtps_epi32(n);
	half = _mm256_srai_epi32(i, 1);
	i = _mm256_sub_epi32(i, half);
	p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
	return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, bias), 23)));
}

/* 1 + e^-x: what both sigmoid and SiLU divide by. */
INLINE __m256 one_plus_exp_neg(__m256 x)
{
	return _mm256_add_ps(splat(1.0f), exp_8(_mm256_sub_ps(_mm256_setzero_ps(), x)));
}

INLINE __m256 silu_8(__m256 x)
{
	return _mm256_div_ps(x, one_plus_exp_neg(x));
}

static void silu_mul(const float *gate, const float *up, float *y, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		store_ps(y + i, _mm256_mul_ps(silu_8(load_ps(gate + i)), load_ps(up + i)));
	for (; i < n; i++)
		y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void sigmoid_mul(float *x, const float *gate, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		store_ps(x + i, _mm256_div_ps(load_ps(x + i), one_plus_exp_neg(load_ps(gate + i))));
	for (; i < n; i++)
		x[i] /= 1.0f + expf(-gate[i]);
}

static void scale_row(float *y, const float *x, float scale, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		store_ps(y + i, _mm256_mul_ps(load_ps(x + i), splat(scale)));
	for (; i < n; i++)
		y[i] = x[i] * scale;
}

static void softmax(float *x, size_t n)
{
	__m256 m = splat(-INFINITY), s = _mm256_setzero_ps();
	float max, sum;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		m = _mm256_max_ps(load_ps(x + i), m);
	max = hmax(m);
	for (; i < n; i++)
		max = x[i] > max ? x[i] : max;

	for (i = 0; i + LANES <= n; i += LANES) {
		__m256 e = exp_8(_mm256_sub_ps(load_ps(x + i), splat(max)));

		store_ps(x + i, e);
		s = _mm256_add_ps(s, e);
	}
	sum = hsum(s);
	for (; i < n; i++) {
		x[i] = expf(x[i] - max);
		sum += x[i];
	}
	scale_row(x, x, 1.0f / sum, n);
}

/*
 * In double, as ref.c: squares of large values must not overflow, and this is not where the time
 * goes.
 */
static double sum_squares(const float *x, size_t n)
{
	__m256d s0 = _mm256_setzero_pd(), s1 = _mm256_setzero_pd();
	double sum;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		__m256d lo = _mm256_cvtps_pd(_mm_loadu_ps(x + i)),
			hi = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4));

		s0 = _mm256_fmadd_pd(lo, lo, s0);
		s1 = _mm256_fmadd_pd(hi, hi, s1);
	}
	sum = hsum_pd(_mm256_add_pd(s0, s1));
	for (; i < n; i++)
		sum += (double)x[i] * (double)x[i];
	return sum;
}

static void rms_norm(const float *x, const float *w, float eps, float *y, size_t n)
{
	float scale = 1.0f / sqrtf((float)(sum_squares(x, n) / (double)n) + eps);
	size_t i = 0;

	if (!w) {
		scale_row(y, x, scale, n);
		return;
	}
	for (; i + LANES <= n; i += LANES)
		store_ps(y + i,
			 _mm256_mul_ps(_mm256_mul_ps(load_ps(x + i), splat(scale)), load_ps(w + i)));
	for (; i < n; i++)
		y[i] = x[i] * scale * w[i];
}

static void l2_norm(const float *x, float eps, float *y, size_t n)
{
	scale_row(y, x, 1.0f / fmaxf((float)sqrt(sum_squares(x, n)), eps), n);
}

static void add_scaled(float *x, const float *y, float scale, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		store_ps(x + i, _mm256_fmadd_ps(load_ps(y + i), splat(scale), load_ps(x + i)));
	for (; i < n; i++)
		x[i] += y[i] * scale;
}

static void rope_neox(float *x, const float *cs, size_t n_rot)
{
	size_t half = n_rot / 2, i = 0;
	float *x2 = x + half;

	for (; i + LANES <= half; i += LANES) {
		__m256 c0 = load_ps(cs + 2 * i), c1 = load_ps(cs + 2 * i + LANES);
		__m256 lo = _mm256_permute2f128_ps(c0, c1, 0x20),
		       hi = _mm256_permute2f128_ps(c0, c1, 0x31);
		__m256 cosine = _mm256_shuffle_ps(lo, hi, 0x88), sine = _mm256_shuffle_ps(lo, hi, 0xdd);
		__m256 a = load_ps(x + i), b = load_ps(x2 + i);

		store_ps(x + i, _mm256_fmsub_ps(a, cosine, _mm256_mul_ps(b, sine)));
		store_ps(x2 + i, _mm256_fmadd_ps(a, sine, _mm256_mul_ps(b, cosine)));
	}
	for (; i < half; i++) {
		float a = x[i], b = x2[i], cosine = cs[2 * i], sine = cs[2 * i + 1];

		x[i] = a * cosine - b * sine;
		x2[i] = a * sine + b * cosine;
	}
}

static void f32_to_f16(const float *x, uint16_t *y, size_t n)
{
	quantize_f16(x, y, n);
}

static void f16_to_f32(const uint16_t *x, float *y, size_t n)
{
	dequant_f16(x, y, n);
}

/*
 * Attention: scores of all positions, softmax, then values a few vectors at a time, so that their
 * sums stay in registers.
 */

INLINE float dot_kv(enum quant_type type, const float *q, const uint8_t *k, size_t dim)
{
	__m256 acc[4];
	size_t i = 0;
	float sum;

	zero(acc, 4);
	for (; i + 4 * LANES <= dim; i += 4 * LANES) {
		UNROLL
		for (size_t a = 0; a < 4; a++)
			acc[a] = _mm256_fmadd_ps(load_ps(q + i + a * LANES),
						 load_8(type, elem(type, k, i + a * LANES)), acc[a]);
	}
	sum = hsum(_mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3])));
	for (; i < dim; i++)
		sum += q[i] * load_1(type, elem(type, k, i));
	return sum;
}

/* out[0 .. 8 * nv) for values that start `first` elements into each position. */
INLINE void sum_values(enum quant_type type, const float *p, const void *const *pages,
		       size_t page_tok, size_t n_kv, size_t dim, size_t first, size_t nv, float *out)
{
	__m256 acc[8];

	zero(acc, nv);
	for (size_t t0 = 0; t0 < n_kv; t0 += page_tok) {
		const uint8_t *v = elem(type, pages[t0 / page_tok], first);

		for (size_t t = t0; t < MIN(t0 + page_tok, n_kv); t++, v = elem(type, v, dim)) {
			__m256 weight = splat(p[t]);

			UNROLL
			for (size_t a = 0; a < nv; a++)
				acc[a] = _mm256_fmadd_ps(
					weight, load_8(type, elem(type, v, a * LANES)), acc[a]);
		}
	}
	UNROLL
	for (size_t a = 0; a < nv; a++)
		store_ps(out + a * LANES, acc[a]);
}

INLINE float sum_value(enum quant_type type, const float *p, const void *const *pages,
		       size_t page_tok, size_t n_kv, size_t dim, size_t i)
{
	float sum = 0;

	for (size_t t = 0; t < n_kv; t++)
		sum += p[t] * load_1(type, elem(type, pages[t / page_tok], t % page_tok * dim + i));
	return sum;
}

INLINE void attend(enum quant_type type, const float *q, const void *const *k_pages,
		   const void *const *v_pages, size_t page_tok, size_t n_kv, size_t k_dim,
		   size_t v_dim, float scale, float *scores, float *out)
{
	size_t i = 0;

	for (size_t t0 = 0; t0 < n_kv; t0 += page_tok) {
		const uint8_t *k = k_pages[t0 / page_tok];

		for (size_t t = t0; t < MIN(t0 + page_tok, n_kv); t++, k = elem(type, k, k_dim))
			scores[t] = dot_kv(type, q, k, k_dim) * scale;
	}

	softmax(scores, n_kv);

	for (; i + 8 * LANES <= v_dim; i += 8 * LANES)
		sum_values(type, scores, v_pages, page_tok, n_kv, v_dim, i, 8, out + i);
	for (; i + LANES <= v_dim; i += LANES)
		sum_values(type, scores, v_pages, page_tok, n_kv, v_dim, i, 1, out + i);
	for (; i < v_dim; i++)
		out[i] = sum_value(type, scores, v_pages, page_tok, n_kv, v_dim, i);
}

static void attention(const float *q, const void *const *k_pages, const void *const *v_pages,
		      size_t page_tok, size_t n_kv, size_t k_dim, size_t v_dim, bool kv_f16,
		      float scale, float *scores, float *out)
{
	if (kv_f16)
		attend(QUANT_F16, q, k_pages, v_pages, page_tok, n_kv, k_dim, v_dim, scale, scores, out);
	else
		attend(QUANT_F32, q, k_pages, v_pages, page_tok, n_kv, k_dim, v_dim, scale, scores, out);
}

/* The four taps of eight channels: w[c * 4 + k] to taps[k]. */
INLINE void load_taps(const float *w, __m256 taps[4])
{
	__m256 r[4], t[4];

	UNROLL
	for (size_t i = 0; i < 4; i++)
		r[i] = _mm256_set_m128(_mm_loadu_ps(w + 4 * (i + 4)), _mm_loadu_ps(w + 4 * i));
	t[0] = _mm256_unpacklo_ps(r[0], r[2]);
	t[1] = _mm256_unpackhi_ps(r[0], r[2]);
	t[2] = _mm256_unpacklo_ps(r[1], r[3]);
	t[3] = _mm256_unpackhi_ps(r[1], r[3]);
	taps[0] = _mm256_unpacklo_ps(t[0], t[2]);
	taps[1] = _mm256_unpackhi_ps(t[0], t[2]);
	taps[2] = _mm256_unpacklo_ps(t[1], t[3]);
	taps[3] = _mm256_unpackhi_ps(t[1], t[3]);
}

/*
 * Kernels of four taps, the only ones in use; ref.c does others, and channels beyond a multiple of
 * eight.
 */
static void conv_silu(const float *x, const float *w, float *state, size_t n_tok, size_t n_ch,
		      size_t kernel, size_t c0, size_t c1, float *y)
{
	size_t c = c0;

	for (; kernel == 4 && c + LANES <= c1; c += LANES) {
		__m256 taps[4], in[4];

		load_taps(w + 4 * c, taps);
		UNROLL
		for (size_t k = 0; k < 3; k++)
			in[k] = load_ps(state + k * n_ch + c);
		for (size_t t = 0; t < n_tok; t++) {
			__m256 sum;

			in[3] = load_ps(x + t * n_ch + c);
			sum = _mm256_mul_ps(taps[0], in[0]);
			UNROLL
			for (size_t k = 1; k < 4; k++)
				sum = _mm256_fmadd_ps(taps[k], in[k], sum);
			store_ps(y + t * n_ch + c, silu_8(sum));
			UNROLL
			for (size_t k = 0; k < 3; k++)
				in[k] = in[k + 1];
		}
		UNROLL
		for (size_t k = 0; k < 3; k++)
			store_ps(state + k * n_ch + c, in[k]);
	}
	if (c < c1)
		cpu_kernels_ref.conv_silu(x, w, state, n_tok, n_ch, kernel, c, c1, y);
}

/*
 * Columns [0, 8 * nv) of the state through one token: one pass to predict, one to update and to
 * read out.
 */
INLINE void step_columns(float *S, const float *q, const float *k, const float *v, float decay,
			 float beta, size_t k_dim, size_t v_dim, size_t nv, float *o)
{
	__m256 d[8], sum[8], dec = splat(decay);

	zero(d, nv);
	zero(sum, nv);
	for (size_t i = 0; i < k_dim; i++) {
		UNROLL
		for (size_t a = 0; a < nv; a++)
			d[a] = _mm256_fmadd_ps(splat(k[i]), load_ps(S + i * v_dim + a * LANES), d[a]);
	}
	UNROLL
	for (size_t a = 0; a < nv; a++) {
		d[a] = _mm256_fnmadd_ps(dec, d[a], load_ps(v + a * LANES));
		d[a] = _mm256_mul_ps(d[a], splat(beta));
	}
	for (size_t i = 0; i < k_dim; i++) {
		UNROLL
		for (size_t a = 0; a < nv; a++) {
			float *p = S + i * v_dim + a * LANES;
			__m256 s = _mm256_mul_ps(dec, load_ps(p));

			s = _mm256_fmadd_ps(splat(k[i]), d[a], s);
			store_ps(p, s);
			sum[a] = _mm256_fmadd_ps(splat(q[i]), s, sum[a]);
		}
	}
	UNROLL
	for (size_t a = 0; a < nv; a++)
		store_ps(o + a * LANES, sum[a]);
}

static void step_column(float *S, const float *q, const float *k, float v, float decay, float beta,
			size_t k_dim, size_t v_dim, float *ret_o)
{
	float d = 0, sum = 0;

	for (size_t i = 0; i < k_dim; i++)
		d += S[i * v_dim] * k[i];
	d = (v - decay * d) * beta;
	for (size_t i = 0; i < k_dim; i++) {
		S[i * v_dim] = decay * S[i * v_dim] + k[i] * d;
		sum += S[i * v_dim] * q[i];
	}
	*ret_o = sum;
}

static void delta_step(float *S, const float *q, const float *k, const float *v, float g,
		       float beta, size_t k_dim, size_t v_dim, float *o)
{
	float decay = expf(g);
	size_t j = 0;

	for (; j + 4 * LANES <= v_dim; j += 4 * LANES)
		step_columns(S + j, q, k, v + j, decay, beta, k_dim, v_dim, 4, o + j);
	for (; j + LANES <= v_dim; j += LANES)
		step_columns(S + j, q, k, v + j, decay, beta, k_dim, v_dim, 1, o + j);
	for (; j < v_dim; j++)
		step_column(S + j, q, k, v[j], decay, beta, k_dim, v_dim, o + j);
}

/*
 * C[m][8 * nv] += A[m][k] B[k][8 * nv]; A has two strides, so that it can be a transposed matrix.
 */
INLINE void gemm_tile(float *C, size_t c_row, const float *A, size_t a_row, size_t a_col,
		      const float *B, size_t b_row, size_t k, size_t m, size_t nv)
{
	__m256 acc[8];

	UNROLL
	for (size_t i = 0; i < m * nv; i++)
		acc[i] = load_ps(C + i / nv * c_row + i % nv * LANES);
	for (size_t j = 0; j < k; j++) {
		UNROLL
		for (size_t i = 0; i < m * nv; i++)
			acc[i] = _mm256_fmadd_ps(splat(A[i / nv * a_row + j * a_col]),
						 load_ps(B + j * b_row + i % nv * LANES), acc[i]);
	}
	UNROLL
	for (size_t i = 0; i < m * nv; i++)
		store_ps(C + i / nv * c_row + i % nv * LANES, acc[i]);
}

/* C[m][n] += A[m][k] B[k][n] */
static void gemm_add(float *C, size_t c_row, const float *A, size_t a_row, size_t a_col,
		     const float *B, size_t b_row, size_t m, size_t n, size_t k)
{
	size_t i = 0;

	for (; i < m; i += m - i >= 4 ? 4 : 1) {
		const float *a = A + i * a_row;
		float *c = C + i * c_row;
		size_t j = 0;

		for (; j + 2 * LANES <= n; j += 2 * LANES) {
			if (m - i >= 4)
				gemm_tile(c + j, c_row, a, a_row, a_col, B + j, b_row, k, 4, 2);
			else
				gemm_tile(c + j, c_row, a, a_row, a_col, B + j, b_row, k, 1, 2);
		}
		for (; j < n; j++)
			for (size_t r = 0; r < (m - i >= 4 ? 4 : 1); r++)
				for (size_t l = 0; l < k; l++)
					c[r * c_row + j] += a[r * a_row + l * a_col] * B[l * b_row + j];
	}
}

/*
 * P[i][j] = sign * <a_i, k_j> * exp(G_i - G_j) for j < i (j <= i with the diagonal), 0 above. Rows
 * are filled in groups of four up to the end of the group, which is all that the products below
 * read.
 */
static void decayed_products(float *P, const float *a, size_t a_stride, const float *k, size_t k_stride,
			     const double *G, float sign, bool diagonal, size_t n_tok, size_t k_dim)
{
	for (size_t i0 = 0; i0 < n_tok; i0 += 4) {
		size_t i1 = MIN(i0 + 4, n_tok);

		matmul_f32(k_dim, k, k_stride * sizeof(float), i1, a + i0 * a_stride,
			   a_stride * sizeof(float), i1 - i0, P + i0 * CPU_DELTA_CHUNK,
			   CPU_DELTA_CHUNK);
		for (size_t i = i0; i < i1; i++) {
			float *row = P + i * CPU_DELTA_CHUNK, decay[CPU_DELTA_CHUNK] = { 0 };
			size_t used = i + diagonal;

			for (size_t j = 0; j < used; j++)
				decay[j] = (float)(G[i] - G[j]);
			for (size_t j = 0; j < used; j += LANES)
				store_ps(decay + j, exp_8(load_ps(decay + j)));
			for (size_t j = 0; j < i1; j++)
				row[j] = j < used ? row[j] * decay[j] * sign : 0.0f;
		}
	}
}

/*
 * The recurrence over n_tok tokens at once. With G_t = g_0 + ... + g_t, the state before token t is
 * made of the state S0 before the chunk and of the updates d_j of earlier tokens, both decayed
 * since, so the updates solve
 *
 *   d_i = beta_i * (v_i - exp(G_i) S0^T k_i - sum over j < i of exp(G_i - G_j) <k_i, k_j> d_j),
 *
 * a unit lower triangular system, here by forward substitution in groups of four rows. Then, in the
 * same way,
 *
 *   o_i = exp(G_i) S0^T q_i + sum over j <= i of exp(G_i - G_j) <q_i, k_j> d_j,
 *   S   = exp(G_T) S0 + sum over j of exp(G_T - G_j) k_j (x) d_j.
 *
 * Every exponent is <= 0 as g is; differences of G are made in double, as G may be large and the
 * difference small.
 */
static void delta_chunk(float *S, const float *q, size_t q_stride, const float *k, size_t k_stride,
			const float *v, size_t v_stride, const float *g, const float *beta,
			size_t gb_stride, size_t n_tok, size_t k_dim, size_t v_dim, float *o,
			size_t o_stride, float *scratch)
{
	float *kk = scratch, *qk = kk + CPU_DELTA_CHUNK * CPU_DELTA_CHUNK,
	      *d = qk + CPU_DELTA_CHUNK * CPU_DELTA_CHUNK;
	double G[CPU_DELTA_CHUNK] = { 0 }, sum = 0;

	for (size_t t = 0; t < n_tok; t++) {
		float step = g[t * gb_stride];

		/* exp(-1e4) is 0 as well, and differences of infinities are not. */
		sum += (double)(step < -1e4f ? -1e4f : step);
		G[t] = sum;
		memset(d + t * v_dim, 0, v_dim * sizeof(*d));
		memset(o + t * o_stride, 0, v_dim * sizeof(*o));
	}
	decayed_products(kk, k, k_stride, k, k_stride, G, -1.0f, false, n_tok, k_dim);
	decayed_products(qk, q, q_stride, k, k_stride, G, 1.0f, true, n_tok, k_dim);

	/* What the old state contributes. */
	gemm_add(d, v_dim, k, k_stride, 1, S, v_dim, n_tok, v_dim, k_dim);
	gemm_add(o, o_stride, q, q_stride, 1, S, v_dim, n_tok, v_dim, k_dim);
	for (size_t t = 0; t < n_tok; t++) {
		float decay = expf((float)G[t]);

		scale_row(o + t * o_stride, o + t * o_stride, decay, v_dim);
		scale_row(d + t * v_dim, d + t * v_dim, -decay, v_dim);
		add_scaled(d + t * v_dim, v + t * v_stride, 1.0f, v_dim);
	}

	for (size_t i0 = 0; i0 < n_tok; i0 += 4) {
		size_t i1 = MIN(i0 + 4, n_tok);

		gemm_add(d + i0 * v_dim, v_dim, kk + i0 * CPU_DELTA_CHUNK, CPU_DELTA_CHUNK, 1, d,
			 v_dim, i1 - i0, v_dim, i0);
		for (size_t i = i0; i < i1; i++) {
			for (size_t j = i0; j < i; j++)
				add_scaled(d + i * v_dim, d + j * v_dim,
					   kk[i * CPU_DELTA_CHUNK + j], v_dim);
			scale_row(d + i * v_dim, d + i * v_dim, beta[i * gb_stride], v_dim);
		}
		gemm_add(o + i0 * o_stride, o_stride, qk + i0 * CPU_DELTA_CHUNK, CPU_DELTA_CHUNK, 1,
			 d, v_dim, i1 - i0, v_dim, i1);
	}

	scale_row(S, S, expf((float)sum), k_dim * v_dim);
	for (size_t t = 0; t < n_tok; t++)
		scale_row(d + t * v_dim, d + t * v_dim, expf((float)(sum - G[t])), v_dim);
	gemm_add(S, v_dim, k, 1, k_stride, d, v_dim, k_dim, v_dim, n_tok);
}

const struct cpu_kernels cpu_kernels_avx2 = {
	.name = "avx2",
	.dequant = {
		[QUANT_F32] = dequant_f32,
		[QUANT_F16] = dequant_f16,
		[QUANT_BF16] = dequant_bf16,
		[QUANT_Q8_0] = dequant_q8_0,
		[QUANT_Q4_0] = dequant_q4_0,
		[QUANT_Q4_K] = dequant_q4_k,
		[QUANT_Q5_K] = dequant_q5_k,
		[QUANT_Q6_K] = dequant_q6_k,
		[QUANT_MXFP4] = dequant_mxfp4,
	},
	.quantize = {
		[QUANT_F32] = quantize_f32,
		[QUANT_F16] = quantize_f16,
		[QUANT_BF16] = quantize_bf16,
		[QUANT_Q8_0] = quantize_q8_0,
		[QUANT_Q8_K] = quantize_q8_k,
	},
	.matmul = {
		[QUANT_F32] = matmul_f32,
		[QUANT_F16] = matmul_f16,
		[QUANT_BF16] = matmul_bf16,
		[QUANT_Q8_0] = matmul_q8_0,
		[QUANT_Q4_0] = matmul_q4_0,
		[QUANT_Q4_K] = matmul_q4_k,
		[QUANT_Q5_K] = matmul_q5_k,
		[QUANT_Q6_K] = matmul_q6_k,
		[QUANT_MXFP4] = matmul_mxfp4,
	},
	.rms_norm = rms_norm,
	.l2_norm = l2_norm,
	.add_scaled = add_scaled,
	.silu_mul = silu_mul,
	.sigmoid_mul = sigmoid_mul,
	.softmax = softmax,
	.rope_neox = rope_neox,
	.attention = attention,
	.f32_to_f16 = f32_to_f16,
	.f16_to_f32 = f16_to_f32,
	.conv_silu = conv_silu,
	.delta_step = delta_step,
	.delta_chunk = delta_chunk,
};

#endif
