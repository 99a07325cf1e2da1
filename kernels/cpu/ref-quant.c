/* SPDX-License-Identifier: MIT */
/*
 * ref-quant.c: what the types of weights and activations mean, in plain C: unpacking, converting,
 * products. The definition that all other kernels, CPU and CUDA, are compared with.
 *
 * Owns no state. Called from any thread through the table in ref.c. Written to be read, not to be
 * fast: quantised blocks are copied (weights have no alignment), unpacked to one integer per
 * element and then used. Refuses to know about threads, models and files: shapes are checked by the
 * caller, contents are hostile and cannot hurt. Invariant: integers stay exact, and sums over a row
 * are made in double, so that the truth is never the noisier side.
 *
 * The formats in one place (d, m, dmin: f16; element i of a block; sub-block s):
 *   Q8_0     32   d * q[i]                             q signed 8 bits
 *   Q4_0     32   d * (q[i] - 8)                       low nibbles are elements 0-15, high ones 16-31
 *   Q4_1     32   d * q[i] + m                         the same
 *   Q5_0     32   d * (q[i] - 16)                      the same, q of 5 bits: bit i of qh is the fifth
 *   Q5_1     32   d * q[i] + m                         the same
 *   MXFP4    32   2^(e - 128) * mxfp4[q[i]]            nibbles as Q4_0; the table holds doubled values
 *   IQ4_NL   32   d * iq4[q[i]]                        the same
 *   Q2_K    256   d * scale[s] * q[i] - dmin * min[s]  s = i/16; per 128 elements: 32 bytes of bit pairs, low ones first
 *   Q3_K    256   d * scale[s] * (q[i] - 4)            the same; bit i/32 of hmask[i % 32] is the third bit; scales less 32
 *   Q4_K    256   d * scale[s] * q[i] - dmin * min[s]  s = i/32; per 64 elements: 32 low nibbles, then 32 high ones
 *   Q5_K    256   the same, q of 5 bits                bit s of qh[i % 32] is the fifth bit
 *   Q6_K    256   d * scale[s] * (q[i] - 32)           s = i/16; per 128 elements: 64 bytes of nibbles, 32 of bit pairs
 *   IQ4_XS  256   d * scale[s] * iq4[q[i]]             s = i/32, 32 nibbles each as Q4_0; scales of 6 bits, less 32
 *   IQ2_XXS 256   d/8 * (2 scale[s] + 1) * g           s = i/32: 4 indices of 8 bits for g, 4 of 7 for signs, scale of 4
 *   IQ2_XS  256   the same, s = i/16                   per 8 elements 9 bits for g, 7 for its signs; scales are nibbles
 *   IQ3_XXS 256   d/4 * (2 scale[s] + 1) * g           as IQ2_XXS, 8 indices for g; first those of all s, then the rest
 * g: 8 (IQ3_XXS: 4) magnitudes of a codebook.
 */
#include "kernels/cpu/ref.h"

#include "daemon/base.h"
#include "kernels/cpu/codebook.h"

#include <math.h>
#include <string.h>

static uint32_t bits_of(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof(u));
	return u;
}

static float from_bits(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof(f));
	return f;
}

/*
 * All four agree bit for bit with the F16C instructions, NaN included (a signalling NaN becomes
 * quiet).
 */
float f16_to_float(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 0x3ff;
	float denormal;

	if (exp == 31)
		return from_bits(sign | 0x7f800000 | man << 13 | (man ? 0x400000 : 0));
	if (exp)
		return from_bits(sign | (exp + 112) << 23 | man << 13);
	denormal = (float)man * 0x1p-24f;
	return sign ? -denormal : denormal;
}

uint16_t float_to_f16(float f)
{
	uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;

	if (a > 0x7f800000)
		return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
	if (a >= 0x477ff000) /* 65520 is halfway to the next, infinity is even */
		return (uint16_t)(sign | 0x7c00);
	if (a < 0x38800000) /* below 2^-14: a multiple of 2^-24 */
		return (uint16_t)(sign | (uint32_t)lrintf(from_bits(a) * 0x1p24f));
	a += 0xfff + (a >> 13 & 1);
	return (uint16_t)(sign | (a - (112u << 23)) >> 13);
}

float bf16_to_float(uint16_t h)
{
	return from_bits((uint32_t)h << 16);
}

uint16_t float_to_bf16(float f)
{
	uint32_t u = bits_of(f);

	if ((u & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(u >> 16 | 0x40);
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Element i of an unaligned row of F32, F16 or BF16. */
float ref_load_elem(enum quant_type type, const void *row, size_t i)
{
	uint16_t h;
	float f;

	if (type == QUANT_F32) {
		memcpy(&f, (const uint8_t *)row + i * sizeof(f), sizeof(f));
		return f;
	}
	memcpy(&h, (const uint8_t *)row + i * sizeof(h), sizeof(h));
	return type == QUANT_F16 ? f16_to_float(h) : bf16_to_float(h);
}

/* weights: blocks to integers */

/*
 * What the file calls a scale of E8M0: a bare exponent. Half of it, because mxfp4_values are
 * doubled.
 */
static float e8m0_half(uint8_t e)
{
	return ldexpf(1.0f, e - 128);
}

static const int8_t mxfp4_values[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

/*
 * A block of 32 as value = d * q + m. Without a minimum m is -0: adding it changes no number, not
 * even a zero's sign.
 */
struct block {
	float d, m;
	int8_t q[QK_0];
};

/* Nibbles: through `values`, or less `offset`. Fifth bits are those of `high`. */
static void unpack_nibbles(const uint8_t qs[QK_0 / 2], uint32_t high, const int8_t *values,
			   int offset, int8_t q[QK_0])
{
	for (size_t i = 0; i < QK_0; i++) {
		int nibble = i < QK_0 / 2 ? qs[i] & 15 : qs[i - QK_0 / 2] >> 4;

		if (values)
			q[i] = values[nibble];
		else
			q[i] = (int8_t)((nibble | (int)(high >> i & 1) << 4) - offset);
	}
}

static uint32_t load_u32(const void *p)
{
	uint32_t u;

	memcpy(&u, p, sizeof(u));
	return u;
}

static void unpack_block(enum quant_type type, const void *row, size_t block, struct block *b)
{
	union {
		struct block_q8_0 q8_0;
		struct block_q4_0 q4_0;
		struct block_q4_1 q4_1;
		struct block_q5_0 q5_0;
		struct block_q5_1 q5_1;
		struct block_mxfp4 mxfp4;
		struct block_iq4_nl iq4_nl;
	} w;
	size_t bytes = quant_info(type)->block_bytes;

	memcpy(&w, (const uint8_t *)row + block * bytes, bytes);
	b->d = f16_to_float(w.q8_0.d); /* of all but one the first field */
	b->m = -0.0f;
	if (type == QUANT_Q8_0) {
		memcpy(b->q, w.q8_0.qs, QK_0);
	} else if (type == QUANT_Q4_0) {
		unpack_nibbles(w.q4_0.qs, 0, NULL, 8, b->q);
	} else if (type == QUANT_Q4_1) {
		b->m = f16_to_float(w.q4_1.m);
		unpack_nibbles(w.q4_1.qs, 0, NULL, 0, b->q);
	} else if (type == QUANT_Q5_0) {
		unpack_nibbles(w.q5_0.qs, load_u32(w.q5_0.qh), NULL, 16, b->q);
	} else if (type == QUANT_Q5_1) {
		b->m = f16_to_float(w.q5_1.m);
		unpack_nibbles(w.q5_1.qs, load_u32(w.q5_1.qh), NULL, 0, b->q);
	} else if (type == QUANT_IQ4_NL) {
		unpack_nibbles(w.iq4_nl.qs, 0, codebook_iq4, 0, b->q);
	} else {
		b->d = e8m0_half(w.mxfp4.e);
		unpack_nibbles(w.mxfp4.qs, 0, mxfp4_values, 0, b->q);
	}
}

/*
 * A super-block of 256 as value = d * scale * q - dmin * min, by sub-blocks of 16 elements. Types
 * without minimums leave the zeros that unpack_super() puts there.
 */
struct super {
	float d, dmin;
	int8_t q[QK_K];
	int8_t scale[QK_K / 16];
	uint8_t min[QK_K / 16];
};

/*
 * 8 scales and 8 mins of 6 bits in 12 bytes: bytes 0-3 hold scales 0-3, bytes 4-7 mins 0-3, in
 * their low 6 bits; byte 8 + i holds the low nibbles of scale 4 + i (low) and min 4 + i (high),
 * whose upper two bits are the top bits of bytes i and 4 + i. Each is used for two sub-blocks of
 * 16.
 */
static void unpack_k_scales(const uint8_t s[12], struct super *b)
{
	for (size_t i = 0; i < 4; i++) {
		b->scale[2 * i] = b->scale[2 * i + 1] = s[i] & 63;
		b->min[2 * i] = b->min[2 * i + 1] = s[4 + i] & 63;
		b->scale[8 + 2 * i] = b->scale[9 + 2 * i] = (int8_t)((s[8 + i] & 15) | s[i] >> 6 << 4);
		b->min[8 + 2 * i] = b->min[9 + 2 * i] = (uint8_t)(s[8 + i] >> 4 | s[4 + i] >> 6 << 4);
	}
}

static int8_t nibble_k(const uint8_t *qs, size_t i)
{
	uint8_t byte = qs[i / 64 * 32 + i % 32];

	return (int8_t)(i % 64 < 32 ? byte & 15 : byte >> 4);
}

static void unpack_q4_k(const void *row, size_t block, struct super *b)
{
	struct block_q4_k w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d);
	b->dmin = f16_to_float(w.dmin);
	unpack_k_scales(w.scales, b);
	for (size_t i = 0; i < QK_K; i++)
		b->q[i] = nibble_k(w.qs, i);
}

static void unpack_q5_k(const void *row, size_t block, struct super *b)
{
	struct block_q5_k w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d);
	b->dmin = f16_to_float(w.dmin);
	unpack_k_scales(w.scales, b);
	for (size_t i = 0; i < QK_K; i++)
		b->q[i] = (int8_t)(nibble_k(w.qs, i) | (w.qh[i % 32] >> (i / 32) & 1) << 4);
}

static void unpack_q6_k(const void *row, size_t block, struct super *b)
{
	struct block_q6_k w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d);
	memcpy(b->scale, w.scales, sizeof(b->scale));
	for (size_t i = 0; i < QK_K; i++) {
		size_t half = i / 128, quarter = i % 128 / 32, l = i % 32;
		uint8_t byte = w.ql[half * 64 + quarter % 2 * 32 + l];
		int low = quarter < 2 ? byte & 15 : byte >> 4,
		    high = w.qh[half * 32 + l] >> (2 * quarter) & 3;

		b->q[i] = (int8_t)((low | high << 4) - 32);
	}
}

static int pair_k(const uint8_t *qs, size_t i)
{
	return qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

static void unpack_q2_k(const void *row, size_t block, struct super *b)
{
	struct block_q2_k w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d);
	b->dmin = f16_to_float(w.dmin);
	for (size_t s = 0; s < QK_K / 16; s++) {
		b->scale[s] = (int8_t)(w.scales[s] & 15);
		b->min[s] = w.scales[s] >> 4;
	}
	for (size_t i = 0; i < QK_K; i++)
		b->q[i] = (int8_t)pair_k(w.qs, i);
}

/*
 * Bytes 0-7 hold the low nibbles of scales 0-7 (low) and 8-15 (high); bit pair s / 4 of byte
 * 8 + s % 4 is the rest of scale s.
 */
static void unpack_q3_k(const void *row, size_t block, struct super *b)
{
	struct block_q3_k w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d);
	for (size_t s = 0; s < QK_K / 16; s++) {
		int low = w.scales[s % 8] >> (s / 8 * 4) & 15,
		    high = w.scales[8 + s % 4] >> (s / 4 * 2) & 3;

		b->scale[s] = (int8_t)((low | high << 4) - 32);
	}
	for (size_t i = 0; i < QK_K; i++)
		b->q[i] = (int8_t)((pair_k(w.qs, i) | (w.hmask[i % 32] >> (i / 32) & 1) << 2) - 4);
}

static void unpack_iq4_xs(const void *row, size_t block, struct super *b)
{
	struct block_iq4_xs w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d);
	for (size_t s = 0; s < QK_K / 32; s++) {
		int low = w.scales_l[s / 2] >> (s % 2 * 4) & 15, high = w.scales_h >> (2 * s) & 3;

		b->scale[2 * s] = b->scale[2 * s + 1] = (int8_t)((low | high << 4) - 32);
		unpack_nibbles(w.qs + 16 * s, 0, codebook_iq4, 0, b->q + 32 * s);
	}
}

/* Elements of a codebook, with signs by the seven lowest bits of `signs`. */
static void unpack_group(const void *magnitudes, uint32_t signs, size_t n, size_t first, int8_t *q)
{
	const int8_t *m = magnitudes, *sign = (const int8_t *)&codebook_signs[signs & 127];

	for (size_t k = 0; k < n; k++)
		q[k] = (int8_t)(m[k] * sign[first + k]);
}

static void unpack_iq2_xxs(const void *row, size_t block, struct super *b)
{
	struct block_iq2_xxs w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d) / 8;
	for (size_t s = 0; s < QK_K / 32; s++) {
		const uint8_t *index = (const uint8_t *)&w.qs[4 * s];
		uint32_t rest = load_u32(&w.qs[4 * s + 2]);

		b->scale[2 * s] = b->scale[2 * s + 1] = (int8_t)(2 * (rest >> 28) + 1);
		for (size_t k = 0; k < 4; k++)
			unpack_group(&codebook_iq2_xxs[index[k]], rest >> 7 * k, 8, 0,
				     b->q + 32 * s + 8 * k);
	}
}

static void unpack_iq2_xs(const void *row, size_t block, struct super *b)
{
	struct block_iq2_xs w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d) / 8;
	for (size_t s = 0; s < QK_K / 16; s++)
		b->scale[s] = (int8_t)(2 * (w.scales[s / 2] >> (s % 2 * 4) & 15) + 1);
	for (size_t k = 0; k < QK_K / 8; k++)
		unpack_group(&codebook_iq2_xs[w.qs[k] & 511], w.qs[k] >> 9, 8, 0, b->q + 8 * k);
}

static void unpack_iq3_xxs(const void *row, size_t block, struct super *b)
{
	struct block_iq3_xxs w;

	memcpy(&w, (const uint8_t *)row + block * sizeof(w), sizeof(w));
	b->d = f16_to_float(w.d) / 4;
	for (size_t s = 0; s < QK_K / 32; s++) {
		uint32_t rest = load_u32(w.qs + QK_K / 4 + 4 * s);

		b->scale[2 * s] = b->scale[2 * s + 1] = (int8_t)(2 * (rest >> 28) + 1);
		for (size_t k = 0; k < 8; k++)
			unpack_group(&codebook_iq3_xxs[w.qs[8 * s + k]], rest >> k / 2 * 7, 4,
				     k % 2 * 4, b->q + 32 * s + 4 * k);
	}
}

static void unpack_super(enum quant_type type, const void *row, size_t block, struct super *b)
{
	static void (*const unpack[QUANT_TYPE_MAX])(const void *row, size_t block, struct super *b) = {
		[QUANT_Q2_K] = unpack_q2_k,     [QUANT_Q3_K] = unpack_q3_k,
		[QUANT_Q4_K] = unpack_q4_k,     [QUANT_Q5_K] = unpack_q5_k,
		[QUANT_Q6_K] = unpack_q6_k,     [QUANT_IQ2_XXS] = unpack_iq2_xxs,
		[QUANT_IQ2_XS] = unpack_iq2_xs, [QUANT_IQ3_XXS] = unpack_iq3_xxs,
		[QUANT_IQ4_XS] = unpack_iq4_xs,
	};

	b->dmin = 0.0f;
	memset(b->min, 0, sizeof(b->min));
	unpack[type](row, block, b);
}

/* rows to floats */

static void dequant_elems(enum quant_type type, const void *row, float *y, size_t n)
{
	for (size_t i = 0; i < n; i++)
		y[i] = ref_load_elem(type, row, i);
}

static void dequant_block(enum quant_type type, const void *row, float *y, size_t n)
{
	for (size_t i = 0; i < n; i += QK_0) {
		struct block b;

		unpack_block(type, row, i / QK_0, &b);
		for (size_t j = 0; j < QK_0; j++)
			y[i + j] = b.d * (float)b.q[j] + b.m;
	}
}

static void dequant_super(enum quant_type type, const void *row, float *y, size_t n)
{
	for (size_t i = 0; i < n; i += QK_K) {
		struct super b;

		unpack_super(type, row, i / QK_K, &b);
		for (size_t j = 0; j < QK_K; j++)
			y[i + j] = b.d * (float)b.scale[j / 16] * (float)b.q[j] -
				   b.dmin * (float)b.min[j / 16];
	}
}

/* activations */

void ref_quantize_f32(const float *x, void *act, size_t n)
{
	memcpy(act, x, n * sizeof(*x));
}

void ref_quantize_f16(const float *x, void *act, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		uint16_t h = float_to_f16(x[i]);

		memcpy((uint8_t *)act + i * sizeof(h), &h, sizeof(h));
	}
}

void ref_quantize_bf16(const float *x, void *act, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		uint16_t h = float_to_bf16(x[i]);

		memcpy((uint8_t *)act + i * sizeof(h), &h, sizeof(h));
	}
}

/*
 * Index of the first element of the largest magnitude. Magnitudes are compared as integers, in
 * which NaN is larger than infinity: a block with a NaN gets a NaN scale whatever the order of
 * evaluation.
 */
static size_t largest(const float *x, size_t n)
{
	size_t best = 0;

	for (size_t i = 1; i < n; i++)
		if ((bits_of(x[i]) & 0x7fffffff) > (bits_of(x[best]) & 0x7fffffff))
			best = i;
	return best;
}

/*
 * Nearest integer, ties to even, in -127..127: -128 would break the sign trick of the SIMD kernels.
 * NaN gives -127.
 */
static int8_t round_q8(float v)
{
	v = v > -127.0f ? v : -127.0f;
	v = v < 127.0f ? v : 127.0f;
	return (int8_t)lrintf(v);
}

/*
 * The quotient of the reciprocal is 127/amax, not 1/d, and ties go to even: as llama.cpp's x86
 * kernels round.
 */
void ref_quantize_q8_0(const float *x, void *act, size_t n)
{
	for (size_t i = 0; i < n; i += QK_0) {
		float amax = fabsf(x[i + largest(x + i, QK_0)]);
		float inv = amax != 0.0f ? 127.0f / amax : 0.0f;
		struct block_q8_0 b;

		b.d = float_to_f16(amax / 127.0f);
		for (size_t j = 0; j < QK_0; j++)
			b.qs[j] = round_q8(x[i + j] * inv);
		memcpy((uint8_t *)act + i / QK_0 * sizeof(b), &b, sizeof(b));
	}
}

/*
 * The element of largest magnitude becomes -127, whatever its sign: the scale takes the opposite
 * sign.
 */
void ref_quantize_q8_k(const float *x, void *act, size_t n)
{
	for (size_t i = 0; i < n; i += QK_K) {
		float m = x[i + largest(x + i, QK_K)];
		float inv = -127.0f / m;
		struct block_q8_k b = { 0 };

		if (m != 0.0f) {
			b.d = 1.0f / inv;
			for (size_t j = 0; j < QK_K; j++) {
				b.qs[j] = round_q8(x[i + j] * inv);
				b.bsums[j / 16] = (int16_t)(b.bsums[j / 16] + b.qs[j]);
			}
		}
		memcpy((uint8_t *)act + i / QK_K * sizeof(b), &b, sizeof(b));
	}
}

/* dot products of one weight row and one activation row */

static double dot_elems(enum quant_type type, size_t n, const void *w, const void *act)
{
	double sum = 0;

	for (size_t i = 0; i < n; i++)
		sum += (double)ref_load_elem(type, w, i) * (double)ref_load_elem(type, act, i);
	return sum;
}

/* d_w * d_x * sum(q_w * q_x) + m * d_x * sum(q_x), with exact sums. */
static double dot_block(enum quant_type type, size_t n, const void *w, const void *act)
{
	double sum = 0;

	for (size_t i = 0; i < n / QK_0; i++) {
		struct block b;
		struct block_q8_0 x;
		int isum = 0, xsum = 0;

		unpack_block(type, w, i, &b);
		memcpy(&x, (const uint8_t *)act + i * sizeof(x), sizeof(x));
		for (size_t j = 0; j < QK_0; j++) {
			isum += b.q[j] * x.qs[j];
			xsum += x.qs[j];
		}
		sum += (double)f16_to_float(x.d) * ((double)b.d * isum + (double)b.m * xsum);
	}
	return sum;
}

/*
 * d_w * d_x * sum(scale * isum) - dmin * d_x * sum(min * bsum); both sums are exact integers of
 * less than 2^31.
 */
static double dot_super(enum quant_type type, size_t n, const void *w, const void *act)
{
	double sum = 0;

	for (size_t i = 0; i < n / QK_K; i++) {
		struct super b;
		struct block_q8_k x;
		int scaled = 0, mins = 0;

		unpack_super(type, w, i, &b);
		memcpy(&x, (const uint8_t *)act + i * sizeof(x), sizeof(x));
		for (size_t j = 0; j < QK_K; j++)
			scaled += b.scale[j / 16] * b.q[j] * x.qs[j];
		for (size_t s = 0; s < QK_K / 16; s++)
			mins += b.min[s] * x.bsums[s];
		sum += (double)b.d * (double)x.d * scaled - (double)b.dmin * (double)x.d * mins;
	}
	return sum;
}

static void matmul(double (*dot)(enum quant_type type, size_t n, const void *w, const void *act),
		   enum quant_type type, size_t n, const void *w, size_t w_stride, size_t n_rows,
		   const void *act, size_t act_stride, size_t n_cols, float *y, size_t y_stride)
{
	for (size_t c = 0; c < n_cols; c++)
		for (size_t r = 0; r < n_rows; r++)
			y[c * y_stride + r] = (float)dot(type, n, (const uint8_t *)w + r * w_stride,
							 (const uint8_t *)act + c * act_stride);
}

/*
 * The table wants one function per type; this makes the two of a type out of the functions of its
 * family.
 */
#define DEFINE_TYPE(suffix, type, family)                                                      \
	void ref_dequant_##suffix(const void *row, float *y, size_t n)                         \
	{                                                                                      \
		dequant_##family(type, row, y, n);                                             \
	}                                                                                      \
	void ref_matmul_##suffix(size_t n, const void *w, size_t w_stride, size_t n_rows,      \
				 const void *act, size_t act_stride, size_t n_cols, float *y,  \
				 size_t y_stride, const struct cpu_tiles *tiles)               \
	{                                                                                      \
		(void)tiles;                                                                   \
		matmul(dot_##family, type, n, w, w_stride, n_rows, act, act_stride, n_cols, y, \
		       y_stride);                                                              \
	}

DEFINE_TYPE(f32, QUANT_F32, elems)
DEFINE_TYPE(f16, QUANT_F16, elems)
DEFINE_TYPE(bf16, QUANT_BF16, elems)
DEFINE_TYPE(q8_0, QUANT_Q8_0, block)
DEFINE_TYPE(q4_0, QUANT_Q4_0, block)
DEFINE_TYPE(q4_1, QUANT_Q4_1, block)
DEFINE_TYPE(q5_0, QUANT_Q5_0, block)
DEFINE_TYPE(q5_1, QUANT_Q5_1, block)
DEFINE_TYPE(mxfp4, QUANT_MXFP4, block)
DEFINE_TYPE(iq4_nl, QUANT_IQ4_NL, block)
DEFINE_TYPE(q2_k, QUANT_Q2_K, super)
DEFINE_TYPE(q3_k, QUANT_Q3_K, super)
DEFINE_TYPE(q4_k, QUANT_Q4_K, super)
DEFINE_TYPE(q5_k, QUANT_Q5_K, super)
DEFINE_TYPE(q6_k, QUANT_Q6_K, super)
DEFINE_TYPE(iq2_xxs, QUANT_IQ2_XXS, super)
DEFINE_TYPE(iq2_xs, QUANT_IQ2_XS, super)
DEFINE_TYPE(iq3_xxs, QUANT_IQ3_XXS, super)
DEFINE_TYPE(iq4_xs, QUANT_IQ4_XS, super)
