/* SPDX-License-Identifier: MIT */
/*
 * ref.c: the CPU kernels in plain C: the table, and its kernels on floats: norms, activation
 * functions, rope, routing, attention, the convolution and the gated delta rule. The definition that
 * all other kernels, CPU and CUDA, are compared with.
 *
 * Owns no state. Called from any thread through the table. Written to be read, not to be fast.
 * Refuses to know quantised types, which are ref-quant.c's, threads, models and files: shapes are
 * checked by the caller, contents are hostile and cannot hurt. Invariant: sums over a row are made
 * in double, so that the truth is never the noisier side.
 */
#include "kernels/cpu/ref.h"

#include "daemon/base.h"

#include <math.h>
#include <string.h>

static double sum_squares(const float *x, size_t n)
{
	double sum = 0;

	for (size_t i = 0; i < n; i++)
		sum += (double)x[i] * (double)x[i];
	return sum;
}

static void rms_norm(const float *x, const float *w, float eps, float *y, size_t n)
{
	float scale = 1.0f / sqrtf((float)(sum_squares(x, n) / (double)n) + eps);

	for (size_t i = 0; i < n; i++)
		y[i] = x[i] * scale * (w ? w[i] : 1.0f);
}

static void l2_norm(const float *x, float eps, float *y, size_t n)
{
	float scale = 1.0f / fmaxf((float)sqrt(sum_squares(x, n)), eps);

	for (size_t i = 0; i < n; i++)
		y[i] = x[i] * scale;
}

static void add_scaled(float *x, const float *y, float scale, size_t n)
{
	for (size_t i = 0; i < n; i++)
		x[i] += y[i] * scale;
}

static float sigmoid(float x)
{
	return 1.0f / (1.0f + expf(-x));
}

static float silu(float x)
{
	return x / (1.0f + expf(-x));
}

static void silu_mul(const float *gate, const float *up, float *y, size_t n)
{
	for (size_t i = 0; i < n; i++)
		y[i] = silu(gate[i]) * up[i];
}

static void sigmoid_mul(float *x, const float *gate, size_t n)
{
	for (size_t i = 0; i < n; i++)
		x[i] *= sigmoid(gate[i]);
}

static void softmax(float *x, size_t n)
{
	float max = -INFINITY, scale;
	double sum = 0;

	for (size_t i = 0; i < n; i++)
		max = x[i] > max ? x[i] : max;
	for (size_t i = 0; i < n; i++) {
		x[i] = expf(x[i] - max);
		sum += (double)x[i];
	}
	scale = (float)(1.0 / sum);
	for (size_t i = 0; i < n; i++)
		x[i] *= scale;
}

static void rope_neox(float *x, const float *cs, size_t n_rot)
{
	for (size_t i = 0; i < n_rot / 2; i++) {
		float a = x[i], b = x[i + n_rot / 2], cosine = cs[2 * i], sine = cs[2 * i + 1];

		x[i] = a * cosine - b * sine;
		x[i + n_rot / 2] = a * sine + b * cosine;
	}
}

static void swiglu_oai(const float *gate, const float *up, float *y, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		float g = gate[i] > 7.0f ? 7.0f : gate[i], u = CLAMP(up[i], -7.0f, 7.0f);

		y[i] = g * sigmoid(1.702f * g) * (u + 1.0f);
	}
}

static void rope_norm(float *x, const float *cs, size_t n_rot)
{
	for (size_t i = 0; i < n_rot / 2; i++) {
		float a = x[2 * i], b = x[2 * i + 1], cosine = cs[2 * i], sine = cs[2 * i + 1];

		x[2 * i] = a * cosine - b * sine;
		x[2 * i + 1] = a * sine + b * cosine;
	}
}

static bool above(float a, float b)
{
	return isnan(b) ? !isnan(a) : a > b;
}

static bool is_one_of(size_t i, const uint32_t *index, size_t n)
{
	for (size_t j = 0; j < n; j++)
		if (index[j] == i)
			return true;
	return false;
}

static void top_k(float *x, size_t n, size_t k, uint32_t *index)
{
	for (size_t i = 0; i < k; i++) {
		size_t best = n;

		/* Strictly above: of equals the lower index wins. */
		for (size_t e = 0; e < n; e++)
			if ((best == n || above(x[e], x[best])) && !is_one_of(e, index, i))
				best = e;
		index[i] = (uint32_t)best;
	}
}

static double score(const struct cpu_attention *a, const float *q, size_t t)
{
	enum quant_type type = a->kv_f16 ? QUANT_F16 : QUANT_F32;
	double sum = 0;

	for (size_t i = 0; i < a->k_dim; i++)
		sum += (double)q[i] * (double)ref_load_elem(type, a->k_pages[t / a->page_tok],
							    t % a->page_tok * a->k_dim + i);
	return sum * (double)a->scale;
}

/* One query: positions [first, end). Scores are made again for every few columns, as there is no place to keep them. */
static void attend(const struct cpu_attention *a, const float *q, const float *sink, size_t first,
		   size_t end, float *out)
{
	enum { COLUMNS = 128 };
	enum quant_type type = a->kv_f16 ? QUANT_F16 : QUANT_F32;
	double max = sink ? (double)*sink : -INFINITY, sum;

	for (size_t t = first; t < end; t++)
		max = fmax(max, score(a, q, t));
	sum = sink ? exp((double)*sink - max) : 0;
	for (size_t t = first; t < end; t++)
		sum += exp(score(a, q, t) - max);
	for (size_t i = 0; i < a->v_dim; i += COLUMNS) {
		double value[COLUMNS] = { 0 };
		size_t n = MIN(a->v_dim - i, (size_t)COLUMNS);

		for (size_t t = first; t < end; t++) {
			double weight = exp(score(a, q, t) - max);

			for (size_t j = 0; j < n; j++)
				value[j] += weight *
					    (double)ref_load_elem(type, a->v_pages[t / a->page_tok],
								  t % a->page_tok * a->v_dim + i + j);
		}
		for (size_t j = 0; j < n; j++)
			out[i + j] = (float)(value[j] / sum);
	}
}

static void attention(const struct cpu_attention *a)
{
	for (size_t i = 0; i < a->n_rows; i++) {
		size_t end = a->pos + i + 1;
		size_t first = a->window > 0 && a->window < end ? end - a->window : 0;

		for (size_t h = 0; h < a->n_q; h++)
			attend(a, a->q + i * a->q_stride + h * a->k_dim, a->sinks ? a->sinks + h : NULL,
			       first, end, a->out + i * a->out_stride + h * a->v_dim);
	}
}

static void f32_to_f16(const float *x, uint16_t *y, size_t n)
{
	for (size_t i = 0; i < n; i++)
		y[i] = float_to_f16(x[i]);
}

static void f16_to_f32(const uint16_t *x, float *y, size_t n)
{
	for (size_t i = 0; i < n; i++)
		y[i] = f16_to_float(x[i]);
}

/* Input number i of a channel, counted from the oldest one in the state: the state, then x. */
static float conv_input(const float *x, const float *state, size_t n_ch, size_t kernel, size_t c,
			size_t i)
{
	return i < kernel - 1 ? state[i * n_ch + c] : x[(i - (kernel - 1)) * n_ch + c];
}

static void conv_silu(const float *x, const float *w, float *state, size_t n_tok, size_t n_ch,
		      size_t kernel, size_t c0, size_t c1, float *y)
{
	for (size_t c = c0; c < c1; c++) {
		for (size_t t = 0; t < n_tok; t++) {
			float sum = 0;

			for (size_t k = 0; k < kernel; k++)
				sum += w[c * kernel + k] * conv_input(x, state, n_ch, kernel, c, t + k);
			y[t * n_ch + c] = silu(sum);
		}
		/* Ascending, so that no entry is overwritten before it has moved. */
		for (size_t k = 0; k + 1 < kernel; k++)
			state[k * n_ch + c] = conv_input(x, state, n_ch, kernel, c, n_tok + k);
	}
}

static void delta_step(float *S, const float *q, const float *k, const float *v, float g,
		       float beta, size_t k_dim, size_t v_dim, float *o)
{
	float decay = expf(g);

	for (size_t j = 0; j < v_dim; j++) {
		double predicted = 0, sum = 0;
		float d;

		for (size_t i = 0; i < k_dim; i++) {
			S[i * v_dim + j] *= decay;
			predicted += (double)S[i * v_dim + j] * (double)k[i];
		}
		d = (v[j] - (float)predicted) * beta;
		for (size_t i = 0; i < k_dim; i++) {
			S[i * v_dim + j] += k[i] * d;
			sum += (double)S[i * v_dim + j] * (double)q[i];
		}
		o[j] = (float)sum;
	}
}

/* The chunked form is a way to compute this faster, so here it is this. */
static void delta_chunk(float *S, const float *q, size_t q_stride, const float *k, size_t k_stride,
			const float *v, size_t v_stride, const float *g, const float *beta,
			size_t gb_stride, size_t n_tok, size_t k_dim, size_t v_dim, float *o,
			size_t o_stride, float *scratch)
{
	(void)scratch;

	for (size_t t = 0; t < n_tok; t++)
		delta_step(S, q + t * q_stride, k + t * k_stride, v + t * v_stride,
			   g[t * gb_stride], beta[t * gb_stride], k_dim, v_dim, o + t * o_stride);
}

const struct cpu_kernels cpu_kernels_ref = {
	.name = "ref",
	.tiles = { .reg_cols = 4, .l1_rows = 16, .l2_cols = 128 },
	.dequant = {
		[QUANT_F32] = ref_dequant_f32,
		[QUANT_F16] = ref_dequant_f16,
		[QUANT_BF16] = ref_dequant_bf16,
		[QUANT_Q8_0] = ref_dequant_q8_0,
		[QUANT_Q4_0] = ref_dequant_q4_0,
		[QUANT_Q4_K] = ref_dequant_q4_k,
		[QUANT_Q5_K] = ref_dequant_q5_k,
		[QUANT_Q6_K] = ref_dequant_q6_k,
		[QUANT_MXFP4] = ref_dequant_mxfp4,
		[QUANT_Q4_1] = ref_dequant_q4_1,
		[QUANT_Q5_0] = ref_dequant_q5_0,
		[QUANT_Q5_1] = ref_dequant_q5_1,
		[QUANT_Q2_K] = ref_dequant_q2_k,
		[QUANT_Q3_K] = ref_dequant_q3_k,
		[QUANT_IQ2_XXS] = ref_dequant_iq2_xxs,
		[QUANT_IQ2_XS] = ref_dequant_iq2_xs,
		[QUANT_IQ3_XXS] = ref_dequant_iq3_xxs,
		[QUANT_IQ4_NL] = ref_dequant_iq4_nl,
		[QUANT_IQ4_XS] = ref_dequant_iq4_xs,
	},
	.quantize = {
		[QUANT_F32] = ref_quantize_f32,
		[QUANT_F16] = ref_quantize_f16,
		[QUANT_BF16] = ref_quantize_bf16,
		[QUANT_Q8_0] = ref_quantize_q8_0,
		[QUANT_Q8_K] = ref_quantize_q8_k,
	},
	.matmul = {
		[QUANT_F32] = ref_matmul_f32,
		[QUANT_F16] = ref_matmul_f16,
		[QUANT_BF16] = ref_matmul_bf16,
		[QUANT_Q8_0] = ref_matmul_q8_0,
		[QUANT_Q4_0] = ref_matmul_q4_0,
		[QUANT_Q4_K] = ref_matmul_q4_k,
		[QUANT_Q5_K] = ref_matmul_q5_k,
		[QUANT_Q6_K] = ref_matmul_q6_k,
		[QUANT_MXFP4] = ref_matmul_mxfp4,
		[QUANT_Q4_1] = ref_matmul_q4_1,
		[QUANT_Q5_0] = ref_matmul_q5_0,
		[QUANT_Q5_1] = ref_matmul_q5_1,
		[QUANT_Q2_K] = ref_matmul_q2_k,
		[QUANT_Q3_K] = ref_matmul_q3_k,
		[QUANT_IQ2_XXS] = ref_matmul_iq2_xxs,
		[QUANT_IQ2_XS] = ref_matmul_iq2_xs,
		[QUANT_IQ3_XXS] = ref_matmul_iq3_xxs,
		[QUANT_IQ4_NL] = ref_matmul_iq4_nl,
		[QUANT_IQ4_XS] = ref_matmul_iq4_xs,
	},
	.rms_norm = rms_norm,
	.l2_norm = l2_norm,
	.add_scaled = add_scaled,
	.silu_mul = silu_mul,
	.swiglu_oai = swiglu_oai,
	.sigmoid_mul = sigmoid_mul,
	.softmax = softmax,
	.rope_neox = rope_neox,
	.rope_norm = rope_norm,
	.top_k = top_k,
	.attention = attention,
	.f32_to_f16 = f32_to_f16,
	.f16_to_f32 = f16_to_f32,
	.conv_silu = conv_silu,
	.delta_step = delta_step,
	.delta_chunk = delta_chunk,
};
