/* SPDX-License-Identifier: MIT */
/*
 * avx2.c: the CPU kernels for x86 with AVX2, FMA and F16C: the table, and its kernels on floats:
 * norms, activation functions, rope, attention, the convolution and the gated delta rule.
 *
 * Owns no state. Called through its table only, from any thread, and only after dispatch.c has seen
 * that the CPU has the three. Refuses to know quantised types, which are avx2-quant.c's, and
 * formulas in prose: ref.c describes them, and test-kernels-float.c holds both tables together.
 * Invariants: no load assumes alignment; nothing is read or written beyond the lengths given.
 */
#if defined(__x86_64__)

#include "kernels/cpu/avx2.h"

#include "daemon/base.h"

#include <math.h>

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

void avx2_silu_mul(const float *gate, const float *up, float *y, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		store_ps(y + i, _mm256_mul_ps(silu_8(load_ps(gate + i)), load_ps(up + i)));
	for (; i < n; i++)
		y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

void avx2_sigmoid_mul(float *x, const float *gate, size_t n)
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

void avx2_softmax(float *x, size_t n)
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

void avx2_rms_norm(const float *x, const float *w, float eps, float *y, size_t n)
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

void avx2_l2_norm(const float *x, float eps, float *y, size_t n)
{
	scale_row(y, x, 1.0f / fmaxf((float)sqrt(sum_squares(x, n)), eps), n);
}

void avx2_add_scaled(float *x, const float *y, float scale, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		store_ps(x + i, _mm256_fmadd_ps(load_ps(y + i), splat(scale), load_ps(x + i)));
	for (; i < n; i++)
		x[i] += y[i] * scale;
}

void avx2_rope_neox(float *x, const float *cs, size_t n_rot)
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

void avx2_f32_to_f16(const float *x, uint16_t *y, size_t n)
{
	avx2_quantize_f16(x, y, n);
}

void avx2_f16_to_f32(const uint16_t *x, float *y, size_t n)
{
	avx2_dequant_f16(x, y, n);
}

void avx2_swiglu_oai(const float *gate, const float *up, float *y, size_t n)
{
	cpu_kernels_ref.swiglu_oai(gate, up, y, n);
}

void avx2_rope_norm(float *x, const float *cs, size_t n_rot)
{
	cpu_kernels_ref.rope_norm(x, cs, n_rot);
}

void avx2_top_k(float *x, size_t n, size_t k, uint32_t *index)
{
	cpu_kernels_ref.top_k(x, n, k, index);
}

void avx2_attention(const struct cpu_attention *a)
{
	cpu_kernels_ref.attention(a);
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
void avx2_conv_silu(const float *x, const float *w, float *state, size_t n_tok, size_t n_ch,
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

void avx2_delta_step(float *S, const float *q, const float *k, const float *v, float g, float beta,
		     size_t k_dim, size_t v_dim, float *o)
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

		avx2_matmul_f32(k_dim, k, k_stride * sizeof(float), i1, a + i0 * a_stride,
				a_stride * sizeof(float), i1 - i0, P + i0 * CPU_DELTA_CHUNK,
				CPU_DELTA_CHUNK, NULL);
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
void avx2_delta_chunk(float *S, const float *q, size_t q_stride, const float *k, size_t k_stride,
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
		avx2_add_scaled(d + t * v_dim, v + t * v_stride, 1.0f, v_dim);
	}

	for (size_t i0 = 0; i0 < n_tok; i0 += 4) {
		size_t i1 = MIN(i0 + 4, n_tok);

		gemm_add(d + i0 * v_dim, v_dim, kk + i0 * CPU_DELTA_CHUNK, CPU_DELTA_CHUNK, 1, d,
			 v_dim, i1 - i0, v_dim, i0);
		for (size_t i = i0; i < i1; i++) {
			for (size_t j = i0; j < i; j++)
				avx2_add_scaled(d + i * v_dim, d + j * v_dim,
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
	.tiles = { .reg_cols = 4, .l1_rows = 16, .l2_cols = 128 },
	.dequant = {
		[QUANT_F32] = avx2_dequant_f32,
		[QUANT_F16] = avx2_dequant_f16,
		[QUANT_BF16] = avx2_dequant_bf16,
		[QUANT_Q8_0] = avx2_dequant_q8_0,
		[QUANT_Q4_0] = avx2_dequant_q4_0,
		[QUANT_Q4_K] = avx2_dequant_q4_k,
		[QUANT_Q5_K] = avx2_dequant_q5_k,
		[QUANT_Q6_K] = avx2_dequant_q6_k,
		[QUANT_MXFP4] = avx2_dequant_mxfp4,
	},
	.quantize = {
		[QUANT_F32] = avx2_quantize_f32,
		[QUANT_F16] = avx2_quantize_f16,
		[QUANT_BF16] = avx2_quantize_bf16,
		[QUANT_Q8_0] = avx2_quantize_q8_0,
		[QUANT_Q8_K] = avx2_quantize_q8_k,
	},
	.matmul = {
		[QUANT_F32] = avx2_matmul_f32,
		[QUANT_F16] = avx2_matmul_f16,
		[QUANT_BF16] = avx2_matmul_bf16,
		[QUANT_Q8_0] = avx2_matmul_q8_0,
		[QUANT_Q4_0] = avx2_matmul_q4_0,
		[QUANT_Q4_K] = avx2_matmul_q4_k,
		[QUANT_Q5_K] = avx2_matmul_q5_k,
		[QUANT_Q6_K] = avx2_matmul_q6_k,
		[QUANT_MXFP4] = avx2_matmul_mxfp4,
	},
	.rms_norm = avx2_rms_norm,
	.l2_norm = avx2_l2_norm,
	.add_scaled = avx2_add_scaled,
	.silu_mul = avx2_silu_mul,
	.swiglu_oai = avx2_swiglu_oai,
	.sigmoid_mul = avx2_sigmoid_mul,
	.softmax = avx2_softmax,
	.rope_neox = avx2_rope_neox,
	.rope_norm = avx2_rope_norm,
	.top_k = avx2_top_k,
	.attention = avx2_attention,
	.f32_to_f16 = avx2_f32_to_f16,
	.f16_to_f32 = avx2_f16_to_f32,
	.conv_silu = avx2_conv_silu,
	.delta_step = avx2_delta_step,
	.delta_chunk = avx2_delta_chunk,
};

#endif
