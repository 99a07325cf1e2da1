/* SPDX-License-Identifier: MIT */
/*
 * test-kernels.c: the kernels of weights and activations: conversions, dequantisation, quantisation
 * and matrix products; and that the table which is chosen has them all. The reference is held
 * against literal values and naive double arithmetic, and every other table against the reference.
 * Bounds: see kernels.h.
 */
#include "tests/test.h"

#include "kernels/cpu/codebook.h"
#include "tests/unit/kernels.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

static const enum quant_type weight_types[] = {
	QUANT_F32,     QUANT_F16,    QUANT_BF16,   QUANT_Q8_0,    QUANT_Q4_0,
	QUANT_Q4_1,    QUANT_Q5_0,   QUANT_Q5_1,   QUANT_Q2_K,    QUANT_Q3_K,
	QUANT_Q4_K,    QUANT_Q5_K,   QUANT_Q6_K,   QUANT_IQ2_XXS, QUANT_IQ2_XS,
	QUANT_IQ3_XXS, QUANT_IQ4_NL, QUANT_IQ4_XS, QUANT_MXFP4,
};

static uint32_t float_bits(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof(u));
	return u;
}

static float bits_float(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof(f));
	return f;
}

/* Conversions */

static void test_half_literals(void **state)
{
	static const struct {
		uint32_t f32;
		uint16_t f16;
	} cases[] = {
		{ 0x00000000, 0x0000 }, { 0x80000000, 0x8000 },
		{ 0x3f800000, 0x3c00 }, { 0xc0000000, 0xc000 },
		{ 0x477fe000, 0x7bff },                         /* 65504, the largest */
		{ 0x477fefff, 0x7bff }, { 0x477ff000, 0x7c00 }, /* 65520 is a tie with infinity */
		{ 0x7f800000, 0x7c00 }, { 0xff800000, 0xfc00 },
		{ 0x7f7fffff, 0x7c00 }, { 0x38800000, 0x0400 },
		{ 0x387fc000, 0x03ff }, /* 2^-14 and the largest denormal */
		{ 0x33800000, 0x0001 }, { 0x33000000, 0x0000 },
		{ 0x33000001, 0x0001 }, /* 2^-24; half of it is a tie to 0 */
		{ 0x33c00000, 0x0002 }, /* 1.5 * 2^-24 is a tie to 2 */
		{ 0x3f801000, 0x3c00 }, { 0x3f803000, 0x3c02 },
		{ 0x3f801001, 0x3c01 }, /* ties to even at 1 */
		{ 0x00000001, 0x0000 }, { 0x7fc00000, 0x7e00 },
		{ 0xffc02000, 0xfe01 }, { 0x7f802000, 0x7e01 }, /* a signalling NaN becomes quiet */
	};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		assert_int_equal(float_to_f16(bits_float(cases[i].f32)), cases[i].f16);

	assert_int_equal(float_to_bf16(1.0f), 0x3f80);
	assert_int_equal(float_to_bf16(bits_float(0x3f808000)), 0x3f80); /* ties to even */
	assert_int_equal(float_to_bf16(bits_float(0x3f818000)), 0x3f82);
	assert_int_equal(float_to_bf16(bits_float(0x3f808001)), 0x3f81);
	assert_int_equal(float_to_bf16(FLT_MAX), 0x7f80);
	assert_int_equal(float_to_bf16(bits_float(0x7f800001)), 0x7fc0); /* NaN stays NaN */
	assert_int_equal(float_bits(bf16_to_float(0xc2a8)), 0xc2a80000);
}

static void test_half_exhaustive(void **state)
{
	(void)state;

	for (unsigned h = 0; h < 65536; h++) {
		unsigned exp = h >> 10 & 31, man = h & 0x3ff;
		float f = f16_to_float((uint16_t)h);
		double want;

		if (exp == 31 && man) {
			assert_true(isnan(f));
			continue;
		}
		want = exp == 31 ? (double)INFINITY
		       : exp     ? ldexp(1024 + man, (int)exp - 25)
				 : ldexp(man, -24);
		assert_true((double)f == (h & 0x8000 ? -want : want));
		assert_int_equal(signbit(f) != 0, h >> 15);
		assert_int_equal(float_to_f16(f), h);
	}
}

static void test_half_simd(void **state)
{
	_cleanup_(freep) uint16_t *h = new_bytes(65536 * sizeof(*h)),
				  *back = new_bytes(65536 * sizeof(*back));
	_cleanup_(freep) float *f = new_bytes(65536 * sizeof(*f));
	(void)state;
	FAST_OR_SKIP(k)

	for (size_t i = 0; i < 65536; i++)
		h[i] = (uint16_t)i;
	k->f16_to_f32(h, f, 65536);
	for (size_t i = 0; i < 65536; i++)
		assert_int_equal(float_bits(f[i]), float_bits(f16_to_float((uint16_t)i)));

	/*
	 * Every upper half of a float, with lower bits around the ties of both formats and at
	 * random.
	 */
	for (unsigned low = 0; low < 8; low++) {
		static const uint16_t lows[] = { 0, 1, 0x0fff, 0x1000, 0x1001, 0x3000, 0x8000 };

		for (size_t i = 0; i < 65536; i++)
			f[i] = bits_float((uint32_t)i << 16 |
					  (low < 7 ? lows[low] : random_u32() & 0xffff));
		k->f32_to_f16(f, back, 65535);
		for (size_t i = 0; i < 65535; i++)
			assert_int_equal(back[i], float_to_f16(f[i]));
		k->quantize[QUANT_BF16](f, back, 65535);
		for (size_t i = 0; i < 65535; i++)
			assert_int_equal(back[i], float_to_bf16(f[i]));
	}
}

/* Dequantisation: blocks written by hand */

static void check_row(enum quant_type type, const void *row, const float *want, size_t n)
{
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };

	for (size_t t = 0; t < ARRAY_SIZE(tables); t++) {
		_cleanup_(freep) float *y = new_floats(n);

		if (!tables[t])
			continue;
		tables[t]->dequant[type](row, y, n);
		for (size_t i = 0; i < n; i++)
			if (y[i] != want[i])
				fail_msg("%s %s[%zu]: %.9g, not %.9g", tables[t]->name,
					 quant_info(type)->name, i, (double)y[i], (double)want[i]);
	}
}

static void test_dequant_32(void **state)
{
	struct block_q8_0 q8 = { .d = 0xb800 /* -0.5 */, .qs = { -128, 127, 1, [31] = -3 } };
	struct block_q4_0 q4 = { .d = 0x4000 /* 2 */, .qs = { 0x90, 0x0f, [15] = 0xf8 } };
	struct block_mxfp4 mx[3] = {
		{ .e = 127 /* 1/2 */, .qs = { 0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe } },
		{ .e = 0, .qs = { 0x07 } },
		{ .e = 255, .qs = { 0x91 } },
	};
	float want[96] = { 64, -63.5f, -0.5f, [31] = 1.5f };
	(void)state;

	check_row(QUANT_Q8_0, &q8, want, 32);

	/* A zero nibble is -8. */
	for (size_t i = 0; i < 32; i++)
		want[i] = -16;
	want[0] = -16, want[16] = 2; /* 0, 9 */
	want[1] = 14, want[17] = -16;
	want[15] = 0, want[31] = 14;
	check_row(QUANT_Q4_0, &q4, want, 32);

	memset(want, 0, sizeof(want));
	memcpy(want, (const float[]){ 0, 1, 2, 4, -0.0f, -1, -2, -4 }, 32);
	memcpy(want + 16, (const float[]){ 0.5f, 1.5f, 3, 6, -0.5f, -1.5f, -3, -6 }, 32);
	want[32] = 0x1.8p-125f; /* 12 * 2^-128 */
	want[64] = 0x1p127f;    /* 1 * 2^127 */
	want[80] = -0x1p127f;
	check_row(QUANT_MXFP4, mx, want, 96);
}

static void test_dequant_32_more(void **state)
{
	struct block_q4_1 q41 = { .d = 0x4000 /* 2 */, .m = 0xbc00 /* -1 */, .qs = { 0x70, [15] = 0xf3 } };
	struct block_q5_0 q50 = { .d = 0x4000,
				  .qh = { 0x01, 0x80, 0x01, 0x80 },
				  .qs = { 0x70, 0x0f, [15] = 0xf3 } };
	struct block_q5_1 q51 = {
		.d = 0x4000, .m = 0xbc00, .qh = { 0x01, 0x80, 0x02, 0x80 }, .qs = { 0x70, [15] = 0xf3 }
	};
	struct block_iq4_nl nl = { .d = 0x3800 /* 0.5 */ };
	float want[32];
	(void)state;

	for (size_t i = 0; i < 32; i++)
		want[i] = -1;
	want[16] = 13, want[15] = 5, want[31] = 29;
	check_row(QUANT_Q4_1, &q41, want, 32);

	/* Fifth bits of elements 0 and 15, 16 (17 below) and 31. */
	want[0] = 31, want[16] = 13, want[15] = 37, want[17] = 31, want[31] = 61;
	check_row(QUANT_Q5_1, &q51, want, 32);

	for (size_t i = 0; i < 32; i++)
		want[i] = -32;
	want[0] = 0, want[16] = 14, want[1] = -2, want[15] = 6, want[31] = 30;
	check_row(QUANT_Q5_0, &q50, want, 32);

	for (size_t i = 0; i < 16; i++)
		nl.qs[i] = (uint8_t)(i | (15 - i) << 4);
	memcpy(want,
	       (const float[]){ -63.5f, -52, -41.5f, -32.5f, -24.5f, -17.5f, -11, -5, 0.5f, 6.5f,
				12.5f, 19, 26.5f, 34.5f, 44.5f, 56.5f },
	       64);
	for (size_t i = 0; i < 16; i++)
		want[31 - i] = want[i];
	check_row(QUANT_IQ4_NL, &nl, want, 32);
}

/*
 * Scales and mins used below: scale 0 = 1, scale 1 = 63, scale 4 = 0x25 (low nibble 5 in byte 8,
 * top bits 2 in byte 0), scale 7 = 0x3f; min 0 = 2, min 3 = 0x3f, min 4 = 0x1a (low nibble 10 in
 * byte 8, top bits 1 in byte 4), min 7 = 0x30.
 */
static const uint8_t k_scales[12] = { 0x81, 0x3f, 0, 0xc0, 0x42, 0, 0, 0xff, 0xa5, 0, 0, 0x0f };

static void test_dequant_k(void **state)
{
	struct block_q4_k q4 = { .d = 0x3c00 /* 1 */, .dmin = 0x3800 /* 0.5 */ };
	struct block_q5_k q5 = { .d = 0x3c00, .dmin = 0x3800 };
	struct block_q6_k q6 = { .d = 0x3800, .scales = { 1, -2, [8] = -128, [15] = 127 } };
	float want[256], mins[8] = { -1, 0, 0, -31.5f, -13, 0, 0, -24 }; /* -dmin * min */
	(void)state;

	memcpy(q4.scales, k_scales, sizeof(k_scales));
	memcpy(q5.scales, k_scales, sizeof(k_scales));
	for (size_t i = 0; i < 256; i++)
		want[i] = mins[i / 32];

	q4.qs[0] = 0x73, want[0] = 3 - 1, want[32] = 7 * 63;
	q4.qs[31] = 0xf0, want[63] = 15 * 63;
	q4.qs[64 + 2] = 0x0f, want[128 + 2] = 15 * 37 - 13;
	q4.qs[96 + 31] = 0x10, want[255] = 63 - 24;
	check_row(QUANT_Q4_K, &q4, want, 256);

	memcpy(q5.qs, q4.qs, sizeof(q5.qs));
	q5.qh[0] = 0x03, want[0] = 19 - 1, want[32] = 23 * 63; /* elements 0 of sub-blocks 0 and 1 */
	q5.qh[31] = 0x80, want[255] = 17 * 63 - 24;
	q5.qh[5] = 0x10, want[128 + 5] = 16 * 37 - 13;
	check_row(QUANT_Q5_K, &q5, want, 256);

	for (size_t i = 0; i < 256; i++) /* q = 0 is -32 */
		want[i] = i < 16    ? -16
			  : i < 32  ? 32
			  : i < 128 ? 0
			  : i < 144 ? 2048
			  : i < 240 ? 0
				    : -16 * 127;
	q6.ql[0] = 0x0f, q6.qh[0] = 0x03, want[0] = 31 * 0.5f;    /* 0x3f */
	q6.ql[16] = 0x01, q6.qh[16] = 0x02, want[16] = -1 * 1.0f; /* 0x21, scale -2 */
	q6.ql[64 + 1] = 0x05, q6.qh[32 + 1] = 0x01, want[129] = (21 - 32) * -64;
	q6.ql[96 + 31] = 0xe0, q6.qh[63] = 0xc0,
		   want[255] = (62 - 32) * 63.5f; /* 0x3e in the last quarter */
	check_row(QUANT_Q6_K, &q6, want, 256);
}

static void test_dequant_low_k(void **state)
{
	struct block_q2_k q2 = { .d = 0x3c00 /* 1 */,
				 .dmin = 0x3800 /* 0.5 */,
				 .scales = { 0x21, 0x0f, [8] = 0xf2, [15] = 0x03 } };
	/* Scales 0, 1, 9, 15 are 1, -32, 5 and 31: 33, 0, 37 and 63. The others are 0: 32. */
	struct block_q3_k q3 = { .d = 0x3800,
				 .scales = { 0x01, 0x50, [7] = 0xf0, [8] = 0xaa, 0xa8, 0xaa, 0xea } };
	struct block_iq4_xs xs = { .d = 0x3800, .scales_h = 0x0003, .scales_l = { 0x0f, 0, 0, 0xf0 } };
	float want[256];
	(void)state;

	for (size_t i = 0; i < 256; i++)
		want[i] = i < 16 ? -1 : i / 16 == 8 ? -7.5f : 0;
	q2.qs[0] = 0xe4, want[0] = -1; /* 0, 1, 2, 3 of elements 0, 32, 64, 96, with scales 1, 0, 0, 0 */
	q2.qs[1] = 0x03, want[1] = 3 - 1;
	q2.qs[16] = 0x02, want[16] = 2 * 15;
	q2.qs[32] = 0x01, want[128] = 2 - 7.5f;
	q2.qs[63] = 0xc0, want[255] = 3 * 3;
	check_row(QUANT_Q2_K, &q2, want, 256);

	for (size_t i = 0; i < 256; i++) /* q = 0 is -4 */
		want[i] = i < 16 ? -2 : i < 32 ? 64 : i / 16 == 9 ? -10 : i >= 240 ? -62 : 0;
	q3.qs[0] = 0x03, want[0] = -0.5f;
	q3.qs[1] = 0x02, q3.hmask[1] = 0x01, want[1] = 1;
	q3.hmask[16] = 0xff, want[16] = 0, want[144] = 0, want[240] = 0;
	q3.qs[32 + 17] = 0x01, want[145] = -3 * 2.5f;
	q3.qs[63] = 0xc0, q3.hmask[31] = 0x80, want[255] = 3 * 15.5f;
	check_row(QUANT_Q3_K, &q3, want, 256);

	/* Scales 31, -32 and, of the last sub-block, -17. */
	for (size_t i = 0; i < 256; i++)
		want[i] = -63.5f * (i < 32 ? 31 : i < 224 ? -32 : -17);
	xs.qs[0] = 0x8f, want[0] = 56.5f * 31, want[16] = 0.5f * 31;
	xs.qs[16] = 0x09, want[32] = 6.5f * -32;
	xs.qs[127] = 0xe0, want[255] = 44.5f * -17;
	check_row(QUANT_IQ4_XS, &xs, want, 256);
}

static void test_dequant_codebook(void **state)
{
	/*
	 * Of 32 elements the indices 1, 100, 0 and 255, the scale 15; signs 0x01 of the first
	 * group, with which its last element is negative too, and 0x7f of the last one. Everything
	 * else is 0: magnitudes of 8, or 4.
	 */
	struct block_iq2_xxs xxs = { .d = 0x4000 /* 2 */,
				     .qs = { [4] = 0x6401, 0xff00, 0x0001, 0xffe0 } };
	/* The indices 1, 300 and 511 with signs 0x01, 0x03 and 0x7f. */
	struct block_iq2_xs xs = { .d = 0x4000,
				   .scales = { 0xf0, [7] = 0x10 },
				   .qs = { 0x0201, [2] = 0x072c, [31] = 0xffff } };
	/* The indices 1, 255 and 200, the scale 1, signs 0x11 of the first group of 8 and 0x40 of the last. */
	struct block_iq3_xxs q3 = { .d = 0x4000,
				    .qs = { [16] = 1, 255, [23] = 200, [72] = 0x11, 0, 0, 0x18 } };
	static const int xxs_mags[] = { -43, 8, 8,  8,   8,  8,  8,   -8,  8,   25, 8,
					8,   8, 43, 25,  8,  8,  8,   8,   8,   8,  8,
					8,   8, -8, -25, -8, -8, -25, -43, -43, -43 };
	static const int xs_mags[] = { -8, -25, 25, 8, 8, 25, 8, 25, 8, 8, 8, 8, 8, 8, 8, 8 };
	static const int q3_mags[] = { -20, 4, 4, 4, -4, 28, 52, 62, 4, 4, 4, 4, 4, 4,  4,  4,
				       4,   4, 4, 4, 4,  4,  4,  4,  4, 4, 4, 4, 4, 62, -4, -44 };
	float want[256];
	(void)state;

	for (size_t i = 0; i < 256; i++)
		want[i] = i / 32 == 1 ? (float)xxs_mags[i % 32] * 31 * 0.25f : 2;
	check_row(QUANT_IQ2_XXS, &xxs, want, 256);

	for (size_t i = 0; i < 256; i++)
		want[i] = i / 16 == 1 ? (float)xs_mags[i % 16] * 31 * 0.25f
			  : i >= 248  ? -43 * 0.75f
			  : i >= 240  ? 6
				      : 2;
	want[0] = -43 * 0.25f, want[7] = -2;
	check_row(QUANT_IQ2_XS, &xs, want, 256);

	for (size_t i = 0; i < 256; i++)
		want[i] = i / 32 == 2 ? (float)q3_mags[i % 32] * 1.5f : 2;
	check_row(QUANT_IQ3_XXS, &q3, want, 256);
}

static uint64_t hash(const void *p, size_t n)
{
	const uint8_t *bytes = p;
	uint64_t h = UINT64_C(0xcbf29ce484222325); /* FNV-1a */

	for (size_t i = 0; i < n; i++)
		h = (h ^ bytes[i]) * UINT64_C(0x100000001b3);
	return h;
}

/* The hashes are of what ggml's dequantisation makes of blocks that hold one index, entry by entry. */
static void test_codebook(void **state)
{
	(void)state;

	assert_int_equal(hash(codebook_iq2_xxs, sizeof(codebook_iq2_xxs)), UINT64_C(0xbb4ee025b5ac6e8e));
	assert_int_equal(hash(codebook_iq2_xs, sizeof(codebook_iq2_xs)), UINT64_C(0xc9b1ee61e79909bd));
	assert_int_equal(hash(codebook_iq3_xxs, sizeof(codebook_iq3_xxs)), UINT64_C(0xdfa5dc83d6a155d5));
	for (unsigned i = 0; i < 128; i++)
		for (unsigned k = 0; k < 8; k++) {
			bool negative = (k < 7 ? i >> k : (unsigned)__builtin_parity(i)) & 1;

			assert_int_equal((int8_t)(codebook_signs[i] >> 8 * k), negative ? -1 : 1);
		}
}

/* Activations */

static size_t act_bytes(enum quant_type type, size_t n)
{
	return type == QUANT_Q8_K ? n / QK_K * sizeof(struct block_q8_k) : quant_row_bytes(type, n);
}

static void test_quantize_literals(void **state)
{
	float x[256] = { 127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -126.5f, 126.51f, [31] = -127 };
	struct block_q8_0 q8;
	struct block_q8_k qk;
	(void)state;

	/* The scale is 1: ties go to even. */
	cpu_kernels_ref.quantize[QUANT_Q8_0](x, &q8, 32);
	assert_int_equal(q8.d, 0x3c00);
	assert_memory_equal(q8.qs,
			    ((const int8_t[32]){ 127, 0, 2, 2, 0, -2, -126, 127, [31] = -127 }), 32);

	/* Times 127 / 143 this is 63.5 and goes to 64; divided by the rounded 143 / 127 it is less. */
	memcpy(x, (const float[]){ 143, 71.5f }, 2 * sizeof(*x));
	cpu_kernels_ref.quantize[QUANT_Q8_0](x, &q8, 32);
	assert_int_equal(q8.qs[1], 64);
	memcpy(x, (const float[]){ 127, 0.5f }, 2 * sizeof(*x));

	/* The first of the largest magnitudes becomes -127 and turns the sign of the scale. */
	cpu_kernels_ref.quantize[QUANT_Q8_K](x, &qk, 256);
	assert_true(qk.d == -1.0f);
	assert_memory_equal(
		qk.qs, ((const int8_t[256]){ -127, 0, -2, -2, 0, 2, 126, -127, [31] = 127 }), 256);
	assert_memory_equal(qk.bsums, ((const int16_t[16]){ -130, 127 }), sizeof(qk.bsums));

	x[0] = -127;
	cpu_kernels_ref.quantize[QUANT_Q8_K](x, &qk, 256);
	assert_true(qk.d == 1.0f);
	assert_int_equal(qk.qs[0], -127);

	memset(x, 0, sizeof(x));
	cpu_kernels_ref.quantize[QUANT_Q8_0](x, &q8, 32);
	cpu_kernels_ref.quantize[QUANT_Q8_K](x, &qk, 256);
	assert_memory_equal(&q8, &(struct block_q8_0){ 0 }, sizeof(q8));
	assert_memory_equal(&qk, &(struct block_q8_k){ 0 }, sizeof(qk));
}

/* One block that stresses an edge, by number; false when there are no more. */
static bool fill_edge(unsigned number, float x[256])
{
	static const float edges[] = { 0x1p-149f, 0x1p-130f, FLT_MIN,  FLT_MAX,
				       1e-30f,    1e30f,     INFINITY, NAN,
				       -FLT_MAX,  -INFINITY, -NAN,     65504 * 127.0f };

	for (size_t i = 0; i < 256; i++)
		x[i] = random_float();
	if (number < 20) /* any values */
		return true;
	if (number < 30) { /* many ties: multiples of half a step */
		for (size_t i = 0; i < 256; i++)
			x[i] = (float)((int)(random_u32() % 509) - 254) * 0.5f;
		return true;
	}
	if (number < 40) { /* the largest magnitude everywhere, with either sign */
		for (size_t i = 0; i < 256; i++)
			x[i] = random_u32() & 0x100 ? 1.0f : -1.0f;
		return true;
	}
	number -= 40;
	if (number < 3 * ARRAY_SIZE(edges)) { /* one, or a block full of it, or among zeros */
		for (size_t i = 0; i < 256; i++)
			if (number % 3)
				x[i] = number % 3 == 1 ? edges[number / 3] : 0.0f;
		x[random_u32() % 256] = edges[number / 3];
		return true;
	}
	return false;
}

static void test_quantize_simd(void **state)
{
	static const enum quant_type types[] = { QUANT_F32, QUANT_F16, QUANT_BF16, QUANT_Q8_0,
						 QUANT_Q8_K };
	float x[256];
	(void)state;
	FAST_OR_SKIP(k)

	seed = 1;
	for (unsigned number = 0; fill_edge(number, x); number++) {
		for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
			size_t bytes = act_bytes(types[t], 256);
			_cleanup_(freep) uint8_t *want = new_bytes(bytes), *got = new_bytes(bytes + 1);

			cpu_kernels_ref.quantize[types[t]](x, want, 256);
			k->quantize[types[t]](x, got + 1, 256);
			if (memcmp(want, got + 1, bytes) != 0)
				fail_msg("block %u: activation type %d differs", number, types[t]);
		}
	}
}

/* Activations never hold -128, whatever goes in: the SIMD kernels rely on it. */
static void test_quantize_range(void **state)
{
	float x[256];
	(void)state;

	seed = 2;
	for (unsigned number = 0; fill_edge(number, x); number++) {
		struct block_q8_0 q8[8];
		struct block_q8_k qk;

		cpu_kernels_ref.quantize[QUANT_Q8_0](x, q8, 256);
		cpu_kernels_ref.quantize[QUANT_Q8_K](x, &qk, 256);
		for (size_t i = 0; i < 256; i++) {
			assert_true(q8[i / 32].qs[i % 32] >= -127);
			assert_true(qk.qs[i] >= -127);
		}
	}
}

/* Matrix products */

enum fill {
	FILL_RANDOM,
	FILL_ZERO_SCALE,
	FILL_DENORMAL_SCALE,
	FILL_LARGEST_SCALE,
	FILL_ALL_ONES, /* the largest of every unsigned field, -1 of the signed ones */
	FILL_LOWEST,   /* 0x80 everywhere: -128 of Q8_0 and of the scales of Q6_K */
	FILL_HIGHEST,  /* 0x7f */
	FILL_MAX,
};

static void set_scale(uint8_t *block, size_t offset, enum fill fill)
{
	/* Between 1/64 and 1/32, either sign. */
	uint16_t d = fill == FILL_ZERO_SCALE       ? 0
		     : fill == FILL_DENORMAL_SCALE ? (uint16_t)(1 + random_u32() % 1023)
		     : fill == FILL_LARGEST_SCALE  ? (uint16_t)(0x7bff | (random_u32() & 0x8000))
						   : (uint16_t)(0x2400 | (random_u32() & 0x83ff));

	memcpy(block + offset, &d, sizeof(d));
}

static void fill_row(enum quant_type type, enum fill fill, uint8_t *row, size_t n)
{
	const struct quant_info *info = quant_info(type);

	if (info->block_elems == 1) {
		for (size_t i = 0; i < n; i++) {
			float f = fill == FILL_ZERO_SCALE
					  ? 0.0f
					  : random_float() * (fill == FILL_DENORMAL_SCALE ? 1e-40f : 1);

			cpu_kernels_ref.quantize[type](&f, row + i * info->block_bytes, 1);
		}
		return;
	}
	for (size_t i = 0; i < n / info->block_elems; i++) {
		uint8_t *b = row + i * info->block_bytes;

		for (size_t j = 0; j < info->block_bytes; j++)
			b[j] = fill == FILL_ALL_ONES  ? 0xff
			       : fill == FILL_LOWEST  ? 0x80
			       : fill == FILL_HIGHEST ? 0x7f
						      : (uint8_t)random_u32();
		if (type == QUANT_MXFP4)
			b[0] = fill == FILL_ZERO_SCALE       ? 0
			       : fill == FILL_DENORMAL_SCALE ? 1
			       : fill == FILL_LARGEST_SCALE  ? 235
							     : (uint8_t)(120 + random_u32() % 8);
		else
			set_scale(b, scale_at(type), fill);
		if (min_at(type))
			set_scale(b, min_at(type), fill);
	}
}

static void dequant_act(enum quant_type type, const uint8_t *act, float *x, size_t n)
{
	struct block_q8_k b;

	if (type != QUANT_Q8_K) {
		cpu_kernels_ref.dequant[type](act, x, n);
		return;
	}
	for (size_t i = 0; i < n; i++) {
		memcpy(&b, act + i / QK_K * sizeof(b), sizeof(b));
		x[i] = b.d * (float)b.qs[i % QK_K];
	}
}

/*
 * A row whose elements are the sums of the magnitudes that make up those of `row`: d * q and dmin *
 * min (or m) add up.
 */
static void magnitudes(enum quant_type type, const uint8_t *row, float *w, size_t n)
{
	size_t bytes = quant_row_bytes(type, n);
	_cleanup_(freep) uint8_t *copy = memcpy(new_bytes(bytes), row, bytes);

	if (min_at(type))
		for (size_t i = 0; i < bytes; i += quant_info(type)->block_bytes) {
			uint8_t *m = &copy[i + min_at(type) + 1];

			copy[i + scale_at(type) + 1] &= 0x7f;
			*m = (uint8_t)(quant_info(type)->block_elems == QK_K ? *m | 0x80 : *m & 0x7f);
		}
	cpu_kernels_ref.dequant[type](copy, w, n);
}

struct product {
	enum quant_type type;
	size_t n, n_rows, n_cols, w_stride, act_stride, y_stride;
	uint8_t *w, *act; /* one byte off any alignment */
	uint8_t *w_alloc, *act_alloc;
};

static void product_make(struct product *p, enum fill fill)
{
	enum quant_type act_type = cpu_act_type(p->type);
	size_t w_bytes = quant_row_bytes(p->type, p->n), x_bytes = act_bytes(act_type, p->n);
	_cleanup_(freep) float *x = new_bytes(p->n * sizeof(*x));

	p->w_stride = w_bytes + 6;
	p->act_stride = x_bytes + 4;
	p->y_stride = p->n_rows + 3;
	p->w_alloc = new_bytes(1 + (p->n_rows - 1) * p->w_stride + w_bytes);
	p->act_alloc = new_bytes(1 + (p->n_cols - 1) * p->act_stride + x_bytes);
	p->w = p->w_alloc + 1;
	p->act = p->act_alloc + 1;
	for (size_t r = 0; r < p->n_rows; r++)
		fill_row(p->type, fill, p->w + r * p->w_stride, p->n);
	for (size_t c = 0; c < p->n_cols; c++) {
		/*
		 * With an extreme fill every activation is extreme too: all integers reach their
		 * largest sums.
		 */
		for (size_t i = 0; i < p->n; i++)
			x[i] = fill >= FILL_ALL_ONES ? (c % 2 ? -1.0f : 1.0f) : random_float();
		cpu_kernels_ref.quantize[act_type](x, p->act + c * p->act_stride, p->n);
	}
}

static void product_done(struct product *p)
{
	free(p->w_alloc);
	free(p->act_alloc);
}

/* The product in double, and the sum of the magnitudes in it. */
static double product_naive(const struct product *p, size_t r, size_t c, double *ret_magnitude)
{
	_cleanup_(freep) float *w = new_bytes(p->n * sizeof(*w)),
			       *mag = new_bytes(p->n * sizeof(*mag));
	_cleanup_(freep) float *x = new_bytes(p->n * sizeof(*x));
	double sum = 0, magnitude = 0;

	cpu_kernels_ref.dequant[p->type](p->w + r * p->w_stride, w, p->n);
	magnitudes(p->type, p->w + r * p->w_stride, mag, p->n);
	dequant_act(cpu_act_type(p->type), p->act + c * p->act_stride, x, p->n);
	for (size_t i = 0; i < p->n; i++) {
		sum += (double)w[i] * (double)x[i];
		magnitude += fabs((double)mag[i] * (double)x[i]);
	}
	*ret_magnitude = magnitude;
	return sum;
}

/*
 * Additions and roundings one after the other on the longest path of the SIMD kernels, generously:
 * a vector of 8 sums per 16 elements and a tail of 31 of the plain types; two terms for 256 of the
 * K-quants; one for 32 of the others, or two with a minimum; then the sums of a vector.
 */
static double chain_length(enum quant_type type, size_t n)
{
	uint32_t elems = quant_info(type)->block_elems;

	return elems == 1      ? (double)n / 16 + 40
	       : elems == QK_K ? 2.0 * (double)n / QK_K + 10
			       : (min_at(type) ? 2.0 : 1.0) * (double)n / QK_0 + 10;
}

static void check_product(const struct cpu_kernels *k, const struct product *p)
{
	size_t n_y = (p->n_cols - 1) * p->y_stride + p->n_rows;
	_cleanup_(freep) float *y = new_bytes(n_y * sizeof(*y));
	/*
	 * The reference sums in double: what remains is the rounding of the result and of the
	 * dequantised values.
	 */
	double chain = k == &cpu_kernels_ref ? 4 : chain_length(p->type, p->n);
	double floor = (double)p->n * 0x1p-149; /* products among the denormals, each rounded there */

	for (size_t i = 0; i < n_y; i++)
		y[i] = 12345;
	k->matmul[p->type](p->n, p->w, p->w_stride, p->n_rows, p->act, p->act_stride, p->n_cols, y,
			   p->y_stride, NULL);
	for (size_t i = 0; i < n_y; i++) {
		size_t c = i / p->y_stride, r = i % p->y_stride;
		double magnitude, want;

		if (r >= p->n_rows) { /* between two columns */
			assert_true(y[i] == 12345);
			continue;
		}
		want = product_naive(p, r, c, &magnitude);
		if (!(fabs((double)y[i] - want) <= chain * U * magnitude + floor))
			fail_msg("%s %s n=%zu row %zu of %zu, column %zu of %zu: %.9g, not %.9g (magnitude %.3g)",
				 k->name, quant_info(p->type)->name, p->n, r, p->n_rows, c,
				 p->n_cols, (double)y[i], want, magnitude);
	}
}

static void check_products(const struct cpu_kernels *k)
{
	static const size_t rows[] = { 1, 2, 5, 17 }, lengths[] = { 1, 2, 5, 9, 20 };

	seed = 3;
	for (size_t t = 0; t < ARRAY_SIZE(weight_types); t++) {
		struct product p = { .type = weight_types[t] };
		uint32_t elems = quant_info(p.type)->block_elems;

		for (enum fill fill = 0; fill < FILL_MAX; fill++) {
			for (p.n_cols = 1; p.n_cols <= 9; p.n_cols++) {
				/* In elements of plain types: tails of every length come up. */
				p.n = lengths[p.n_cols % ARRAY_SIZE(lengths)] * elems +
				      (elems == 1 ? p.n_cols * 13 : 0);
				p.n_rows = rows[random_u32() % ARRAY_SIZE(rows)];
				product_make(&p, fill);
				check_product(k, &p);
				product_done(&p);
			}
		}
		p.n = 2048, p.n_rows = 3, p.n_cols = 4;
		product_make(&p, FILL_RANDOM);
		check_product(k, &p);
		product_done(&p);
		/* Enough columns for kernels that take many at once, and a rest of every kind. */
		for (enum fill fill = 0; fill < FILL_MAX; fill++) {
			p.n = elems == 1 ? 77 : (1 + fill) * elems;
			p.n_rows = 19 + fill;
			p.n_cols = 9 + 13 * (size_t)fill;
			product_make(&p, fill);
			check_product(k, &p);
			product_done(&p);
		}
	}
}

static void test_matmul_ref(void **state)
{
	(void)state;

	check_products(&cpu_kernels_ref);
}

static void test_matmul_simd(void **state)
{
	(void)state;
	FAST_OR_SKIP(k)

	check_products(k);
}

/* The product in pieces, which are the whole to the last bit: only shapes decide how a number comes about. */
static void check_pieces(const struct cpu_kernels *k, const struct product *p, const float *want,
			 size_t rows, size_t cols, const struct cpu_tiles *tiles)
{
	_cleanup_(freep) float *y = new_bytes(p->n_cols * p->n_rows * sizeof(*y));

	for (size_t c = 0; c < p->n_cols; c += cols)
		for (size_t r = 0; r < p->n_rows; r += rows)
			k->matmul[p->type](p->n, p->w + r * p->w_stride, p->w_stride,
					   MIN(rows, p->n_rows - r), p->act + c * p->act_stride,
					   p->act_stride, MIN(cols, p->n_cols - c),
					   y + c * p->n_rows + r, p->n_rows, tiles);
	if (memcmp(y, want, p->n_cols * p->n_rows * sizeof(*y)) != 0)
		fail_msg("%s %s: %zu columns in pieces of %zu rows and %zu columns, tiles %u %u %u",
			 k->name, quant_info(p->type)->name, p->n_cols, rows, cols, tiles->reg_cols,
			 tiles->l1_rows, tiles->l2_cols);
}

/*
 * Results that end where memory ends: a masked store of a quarter of a vector was compiled to one
 * that faults beyond.
 */
static void test_matmul_end(void **state)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *mem = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	(void)state;
	FAST_OR_SKIP(k)

	assert_true(mem != MAP_FAILED);
	assert_int_equal(mprotect(mem + page, page, PROT_NONE), 0);
	for (size_t t = 0; t < ARRAY_SIZE(weight_types); t++)
		for (size_t n_rows = 1; n_rows <= 7; n_rows++)
			for (size_t n_cols = 1; n_cols <= 18; n_cols++) {
				struct product p = { .type = weight_types[t],
						     .n = 256,
						     .n_rows = n_rows,
						     .n_cols = n_cols };

				product_make(&p, FILL_RANDOM);
				k->matmul[p.type](p.n, p.w, p.w_stride, n_rows, p.act, p.act_stride,
						  n_cols,
						  (float *)(void *)(mem + page) - n_rows * n_cols,
						  n_rows, NULL);
				product_done(&p);
			}
	assert_int_equal(munmap(mem, 2 * page), 0);
}

static void test_matmul_pieces(void **state)
{
	static const struct cpu_tiles tiles[] = {
		{ 4, 64, 512 }, { 4, 4, 16 }, { 3, 7, 32 }, { 2, 16, 128 }
	};
	static const size_t cols[] = { 1, 3, 7, 8, 9, 12, 15, 16, 17, 38, 91 };
	(void)state;
	FAST_OR_SKIP(k)

	seed = 6;
	for (size_t t = 0; t < ARRAY_SIZE(weight_types) * ARRAY_SIZE(cols); t++) {
		struct product p = { .type = weight_types[t / ARRAY_SIZE(cols)], .n = 512 };
		_cleanup_(freep) float *want = NULL;

		p.n_rows = t % 3 ? 35 : 150;
		p.n_cols = cols[t % ARRAY_SIZE(cols)];
		product_make(&p, FILL_RANDOM);
		want = new_bytes(p.n_cols * p.n_rows * sizeof(*want));
		k->matmul[p.type](p.n, p.w, p.w_stride, p.n_rows, p.act, p.act_stride, p.n_cols,
				  want, p.n_rows, NULL);
		for (size_t i = 0; i < ARRAY_SIZE(tiles); i++) {
			check_pieces(k, &p, want, p.n_rows, p.n_cols, &tiles[i]);
			check_pieces(k, &p, want, 1 + 7 * i, 16 * (1 + i), &tiles[i]);
		}
		product_done(&p);
	}
}

/*
 * Any bytes as weights: infinite, NaN, negative and denormal scales. Of products nothing is asked
 * but not to crash; elements are the same bits in every table, but for those of a NaN.
 */
static void test_matmul_hostile(void **state)
{
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };
	(void)state;

	seed = 4;
	for (size_t t = 0; t < ARRAY_SIZE(weight_types) * 50; t++) {
		struct product p = { .type = weight_types[t / 50], .n = 512, .n_rows = 2, .n_cols = 5 };
		float y[5 * 5], w[2][512] = { 0 };
		size_t k;

		product_make(&p, FILL_RANDOM);
		for (size_t i = 0; i < p.w_stride + quant_row_bytes(p.type, p.n); i++)
			p.w[i] = (uint8_t)random_u32();
		for (k = 0; k < ARRAY_SIZE(tables) && tables[k]; k++) {
			tables[k]->matmul[p.type](p.n, p.w, p.w_stride, 2, p.act, p.act_stride, 5,
						  y, 5, NULL);
			tables[k]->dequant[p.type](p.w, w[k], p.n);
		}
		for (size_t i = 0; i < p.n && k == 2; i++)
			assert_true(float_bits(w[0][i]) == float_bits(w[1][i]) ||
				    (isnan(w[0][i]) && isnan(w[1][i])));
		product_done(&p);
	}
}

static void test_dequant_simd(void **state)
{
	(void)state;
	FAST_OR_SKIP(k)

	seed = 5;
	for (size_t t = 0; t < ARRAY_SIZE(weight_types); t++) {
		for (enum fill fill = 0; fill < FILL_MAX; fill++) {
			uint32_t elems = quant_info(weight_types[t])->block_elems;
			size_t n = elems == 1 ? 77 : 3 * elems,
			       bytes = quant_row_bytes(weight_types[t], n);
			_cleanup_(freep) uint8_t *row = new_bytes(bytes + 1);
			_cleanup_(freep) float *want = new_floats(n), *got = new_floats(n);

			fill_row(weight_types[t], fill, row + 1, n);
			cpu_kernels_ref.dequant[weight_types[t]](row + 1, want, n);
			k->dequant[weight_types[t]](row + 1, got, n);
			assert_memory_equal(got, want, n * sizeof(*want));
		}
	}
}

/* Random blocks, and what ggml's dequantisation makes of them: a hash of the bits of all floats. */
static void test_dequant_ggml(void **state)
{
	static const struct {
		enum quant_type type;
		uint64_t hash;
	} cases[] = {
		{ QUANT_Q4_0, UINT64_C(0x0a1143e87e91f8f8) },
		{ QUANT_Q4_1, UINT64_C(0xf7e0516134048aeb) },
		{ QUANT_Q5_0, UINT64_C(0xc4322b5349dc8ac6) },
		{ QUANT_Q5_1, UINT64_C(0x4d14e6632925b03a) },
		{ QUANT_Q8_0, UINT64_C(0x7bd332c5b7871037) },
		{ QUANT_Q2_K, UINT64_C(0xe0b1f03cd96f8a29) },
		{ QUANT_Q3_K, UINT64_C(0x3233b10f4615baee) },
		{ QUANT_Q4_K, UINT64_C(0x99d284bdf35104ec) },
		{ QUANT_Q5_K, UINT64_C(0xda77e5db3916de34) },
		{ QUANT_Q6_K, UINT64_C(0x54c219b01aaa6c2a) },
		{ QUANT_IQ2_XXS, UINT64_C(0xe267b9d5113fc024) },
		{ QUANT_IQ2_XS, UINT64_C(0xe1c0f55981ecb1c2) },
		{ QUANT_IQ3_XXS, UINT64_C(0xcb4e8ac1f16e995d) },
		{ QUANT_IQ4_NL, UINT64_C(0x6a37a558d53ecc03) },
		{ QUANT_IQ4_XS, UINT64_C(0x5e07cdf77433339a) },
		{ QUANT_MXFP4, UINT64_C(0x0b6aa5e0bdbdcfc1) },
	};
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		enum quant_type type = cases[i].type;
		size_t n = 64 * quant_info(type)->block_elems;
		_cleanup_(freep) uint8_t *row = new_bytes(quant_row_bytes(type, n));
		_cleanup_(freep) float *y = new_floats(n);

		seed = 7;
		fill_row(type, FILL_RANDOM, row, n);
		cpu_kernels_ref.dequant[type](row, y, n);
		if (hash(y, n * sizeof(*y)) != cases[i].hash)
			fail_msg("%s: 0x%016" PRIx64, quant_info(type)->name, hash(y, n * sizeof(*y)));
	}
}

/* The table */

static void test_choose(void **state)
{
	const struct cpu_kernels *best;
	const char *note = "x";
	(void)state;

	unsetenv("RESIDENTD_CPU");
	best = cpu_kernels_choose(&note);
	assert_null(note);

	setenv("RESIDENTD_CPU", "ref", 1);
	assert_ptr_equal(cpu_kernels_choose(&note), &cpu_kernels_ref);
	assert_null(note);

	setenv("RESIDENTD_CPU", "mmx", 1);
	assert_ptr_equal(cpu_kernels_choose(&note), best);
	assert_non_null(note);
	assert_ptr_equal(cpu_kernels_choose(NULL), best);

	for (size_t i = 0; cpu_kernels_at(i); i++) {
		setenv("RESIDENTD_CPU", cpu_kernels_at(i)->name, 1);
		assert_ptr_equal(cpu_kernels_choose(&note), cpu_kernels_at(i));
		assert_null(note);
	}
	/* No machine has both. */
	setenv("RESIDENTD_CPU", startswith(best->name, "avx") ? "neon" : "avx512", 1);
	assert_ptr_equal(cpu_kernels_choose(&note), best);
	assert_non_null(note);
	unsetenv("RESIDENTD_CPU");
}

static void test_table_complete(void **state)
{
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };
	size_t n = 0;
	(void)state;

	for (uint32_t type = 0; type < QUANT_TYPE_MAX; type++)
		n += quant_has_kernel(type);
	assert_int_equal(n, ARRAY_SIZE(weight_types));
	for (size_t t = 0; t < ARRAY_SIZE(tables) && tables[t]; t++)
		for (size_t i = 0; i < ARRAY_SIZE(weight_types); i++) {
			assert_true(quant_has_kernel(weight_types[i]));
			assert_non_null(tables[t]->dequant[weight_types[i]]);
			assert_non_null(tables[t]->matmul[weight_types[i]]);
			assert_non_null(tables[t]->quantize[cpu_act_type(weight_types[i])]);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_half_literals),   cmocka_unit_test(test_half_exhaustive),
		cmocka_unit_test(test_half_simd),       cmocka_unit_test(test_dequant_32),
		cmocka_unit_test(test_dequant_32_more), cmocka_unit_test(test_dequant_k),
		cmocka_unit_test(test_dequant_low_k),   cmocka_unit_test(test_dequant_codebook),
		cmocka_unit_test(test_codebook),        cmocka_unit_test(test_dequant_ggml),
		cmocka_unit_test(test_dequant_simd),    cmocka_unit_test(test_quantize_literals),
		cmocka_unit_test(test_quantize_simd),   cmocka_unit_test(test_quantize_range),
		cmocka_unit_test(test_matmul_ref),      cmocka_unit_test(test_matmul_simd),
		cmocka_unit_test(test_matmul_pieces),   cmocka_unit_test(test_matmul_end),
		cmocka_unit_test(test_matmul_hostile),  cmocka_unit_test(test_choose),
		cmocka_unit_test(test_table_complete),
	};

	return RUN_WITH_EVERY_TABLE(tests);
}
