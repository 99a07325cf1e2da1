/* SPDX-License-Identifier: MIT */
/*
 * neon-quant.c: weights and activations for 64-bit ARM with the vectors that all of them have: rows
 * to floats, floats to the activation forms, and products of the two, for every type.
 *
 * Owns no state. Called through the tables of neon.c and neon-dotprod.c, from any thread. Refuses
 * to know how a type is packed, which is neon-unpack.h's, and formats in prose: ref-quant.c
 * describes them, and test-kernels.c holds the tables together. Invariants: no load assumes
 * alignment; nothing is read or written beyond the lengths given.
 */
#if defined(__aarch64__)

#include "kernels/cpu/neon-dot.h"

/*
 * Rows to floats. The products of scales are exact in a float, so these agree with ref-quant.c to
 * the last bit.
 */

INLINE void dequant_plain(enum quant_type type, const void *row, float *y, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vst1q_f32(y + i, load_4(type, elem(type, row, i)));
	for (; i < n; i++)
		y[i] = load_1(type, elem(type, row, i));
}

/* y = q * mul + add */
INLINE void store_16(float *y, int8x16_t q, float mul, float add)
{
	int16x8_t half[2] = { vmovl_s8(vget_low_s8(q)), vmovl_high_s8(q) };

	UNROLL
	for (size_t i = 0; i < 2; i++) {
		float32x4_t lo = vcvtq_f32_s32(vmovl_s16(vget_low_s16(half[i]))),
			    hi = vcvtq_f32_s32(vmovl_high_s16(half[i]));

		vst1q_f32(y + 8 * i, vfmaq_n_f32(vdupq_n_f32(add), lo, mul));
		vst1q_f32(y + 8 * i + 4, vfmaq_n_f32(vdupq_n_f32(add), hi, mul));
	}
}

INLINE void dequant_32(enum quant_type type, const void *row, float *y, size_t n)
{
	const uint8_t *w = row;

	for (size_t i = 0; i < n; i += QK_0, w += block_bytes(type)) {
		struct scale_32 s = scale_32(type, w);
		int8x16_t q[2];

		unpack_32(type, w, q);
		store_16(y + i, q[0], s.d, s.m);
		store_16(y + i + 16, q[1], s.d, s.m);
	}
}

INLINE void dequant_super(enum quant_type type, const void *row, float *y, size_t n)
{
	const size_t span = sub_block(type);
	const uint8_t *w = row;

	for (size_t i = 0; i < n; i += QK_K, w += block_bytes(type)) {
		struct super b = unpack_super(type, w);
		int16_t min[QK_K / 16];

		vst1q_s16(min, b.min[0]);
		vst1q_s16(min + 8, b.min[1]);
		for (size_t j = 0; j < 4; j++) {
			int8x16_t q[4];

			unpack_64(type, w, j, q);
			UNROLL
			for (size_t k = 0; k < 4; k++)
				store_16(y + i + 64 * j + 16 * k, q[k],
					 b.d * (float)b.scale[(64 * j + 16 * k) / span],
					 -b.dmin * (float)min[4 * j + k]);
		}
	}
}

/* Activations. */

INLINE uint32x4_t magnitude_bits(float32x4_t v)
{
	return vandq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0x7fffffff));
}

/*
 * The largest magnitude of n (a multiple of 32) floats, compared as integers: see largest() of
 * ref-quant.c.
 */
INLINE uint32_t max_magnitude_bits(const float *x, size_t n)
{
	uint32x4_t m = vdupq_n_u32(0);

	for (size_t i = 0; i < n; i += LANES)
		m = vmaxq_u32(m, magnitude_bits(vld1q_f32(x + i)));
	return vmaxvq_u32(m);
}

/* The first of n floats whose magnitude has these bits. */
INLINE float find_magnitude(const float *x, uint32_t bits, size_t n)
{
	const uint32_t lanes[LANES] = { 0, 1, 2, 3 };
	uint32x4_t index = vld1q_u32(lanes), first = vdupq_n_u32(UINT32_MAX);

	for (size_t i = 0; i < n; i += LANES) {
		uint32x4_t other =
			vmvnq_u32(vceqq_u32(magnitude_bits(vld1q_f32(x + i)), vdupq_n_u32(bits)));

		first = vminq_u32(first, vorrq_u32(index, other));
		index = vaddq_u32(index, vdupq_n_u32(LANES));
	}
	return x[vminvq_u32(first)];
}

/*
 * Sixteen products, rounded to nearest even and held in -127..127; NaN gives -127: maxnm takes the
 * number.
 */
INLINE int8x16_t round_q8(const float *x, float inv)
{
	int16x4_t v[4];

	UNROLL
	for (size_t i = 0; i < 4; i++) {
		float32x4_t p = vmulq_n_f32(vld1q_f32(x + i * LANES), inv);

		p = vminnmq_f32(vmaxnmq_f32(p, vdupq_n_f32(-127.0f)), vdupq_n_f32(127.0f));
		v[i] = vmovn_s32(vcvtnq_s32_f32(p));
	}
	return vmovn_high_s16(vmovn_s16(vcombine_s16(v[0], v[1])), vcombine_s16(v[2], v[3]));
}

void neon_quantize_q8_0(const float *x, void *act, size_t n)
{
	uint8_t *out = act;

	for (size_t i = 0; i < n; i += QK_0, out += sizeof(struct block_q8_0)) {
		uint32_t bits = max_magnitude_bits(x + i, QK_0);
		float amax = load_f32(&bits), inv = amax != 0.0f ? 127.0f / amax : 0.0f;
		struct block_q8_0 b = { .d = float_to_f16(amax / 127.0f) };

		vst1q_s8(b.qs, round_q8(x + i, inv));
		vst1q_s8(b.qs + 16, round_q8(x + i + 16, inv));
		memcpy(out, &b, sizeof(b));
	}
}

void neon_quantize_q8_k(const float *x, void *act, size_t n)
{
	uint8_t *out = act;

	for (size_t i = 0; i < n; i += QK_K, out += sizeof(struct block_q8_k)) {
		float m = find_magnitude(x + i, max_magnitude_bits(x + i, QK_K), QK_K);
		float inv = -127.0f / m;
		struct block_q8_k b = { 0 };

		if (m != 0.0f) {
			b.d = 1.0f / inv;
			for (size_t j = 0; j < QK_K; j += 16) {
				int8x16_t q = round_q8(x + i + j, inv);

				vst1q_s8(b.qs + j, q);
				b.bsums[j / 16] = vaddlvq_s8(q);
			}
		}
		memcpy(out, &b, sizeof(b));
	}
}

void neon_quantize_f32(const float *x, void *act, size_t n)
{
	memcpy(act, x, n * sizeof(*x));
}

void neon_quantize_f16(const float *x, void *act, size_t n)
{
	uint8_t *out = act;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vst1_u8(out + 2 * i, vreinterpret_u8_f16(vcvt_f16_f32(vld1q_f32(x + i))));
	for (; i < n; i++) {
		uint16_t h = float_to_f16(x[i]);

		memcpy(out + 2 * i, &h, sizeof(h));
	}
}

void neon_quantize_bf16(const float *x, void *act, size_t n)
{
	uint8_t *out = act;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		float32x4_t v = vld1q_f32(x + i);
		uint32x4_t u = vreinterpretq_u32_f32(v);
		uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
		uint32x4_t even = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
		uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));

		u = vbslq_u32(vceqq_f32(v, v), even, quiet);
		vst1_u8(out + 2 * i, vreinterpret_u8_u16(vshrn_n_u32(u, 16)));
	}
	for (; i < n; i++) {
		uint16_t h = float_to_bf16(x[i]);

		memcpy(out + 2 * i, &h, sizeof(h));
	}
}

/* The table wants functions of one type. */
#define DEFINE_DEQUANT(suffix, type, family)                            \
	void neon_dequant_##suffix(const void *row, float *y, size_t n) \
	{                                                               \
		dequant_##family(type, row, y, n);                      \
	}

DEFINE_DEQUANT(f32, QUANT_F32, plain)
DEFINE_DEQUANT(f16, QUANT_F16, plain)
DEFINE_DEQUANT(bf16, QUANT_BF16, plain)
DEFINE_DEQUANT(q8_0, QUANT_Q8_0, 32)
DEFINE_DEQUANT(q4_0, QUANT_Q4_0, 32)
DEFINE_DEQUANT(q4_1, QUANT_Q4_1, 32)
DEFINE_DEQUANT(q5_0, QUANT_Q5_0, 32)
DEFINE_DEQUANT(q5_1, QUANT_Q5_1, 32)
DEFINE_DEQUANT(mxfp4, QUANT_MXFP4, 32)
DEFINE_DEQUANT(iq4_nl, QUANT_IQ4_NL, 32)
DEFINE_DEQUANT(q2_k, QUANT_Q2_K, super)
DEFINE_DEQUANT(q3_k, QUANT_Q3_K, super)
DEFINE_DEQUANT(q4_k, QUANT_Q4_K, super)
DEFINE_DEQUANT(q5_k, QUANT_Q5_K, super)
DEFINE_DEQUANT(q6_k, QUANT_Q6_K, super)
DEFINE_DEQUANT(iq2_xxs, QUANT_IQ2_XXS, super)
DEFINE_DEQUANT(iq2_xs, QUANT_IQ2_XS, super)
DEFINE_DEQUANT(iq3_xxs, QUANT_IQ3_XXS, super)
DEFINE_DEQUANT(iq4_xs, QUANT_IQ4_XS, super)

DEFINE_PRODUCT(, neon_matmul_f32, QUANT_F32)
DEFINE_PRODUCT(, neon_matmul_f16, QUANT_F16)
DEFINE_PRODUCT(, neon_matmul_bf16, QUANT_BF16)
DEFINE_PRODUCTS(, neon_matmul)

#endif
