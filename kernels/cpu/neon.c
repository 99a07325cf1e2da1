/* SPDX-License-Identifier: MIT */
/*
 * neon.c: the CPU kernels for 64-bit ARM with the vectors that all of them have: the table, and its
 * kernels on floats: norms, activation functions, rope, routing, attention, the convolution and the
 * gated delta rule.
 *
 * Owns no state. Called through its table and that of neon-dotprod.c, from any thread. Refuses to
 * know quantised types, which are neon-quant.c's, and formulas in prose: ref.c describes them, and
 * test-kernels-float.c holds the tables together. Invariants: no load of weights, keys or values
 * assumes alignment; nothing is read or written beyond the lengths given.
 */
#if defined(__aarch64__)

#include "kernels/cpu/neon.h"

#include "daemon/base.h"

#include <math.h>

/*
 * e^x = 2^n * e^r, |r| <= ln(2)/2. The Taylor polynomial of degree 7 is off by less than 0.346^8/8!
 * = 5e-9; the whole by about 1 ulp. 2^n is multiplied in two steps, so that results down to the
 * smallest denormal are right. NaN passes through the clamps.
 */
INLINE float32x4_t exp_4(float32x4_t x)
{
	static const float taylor[] = { 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
					1.0f / 6,    0.5f,       1.0f,       1.0f };
	float32x4_t n, r, p = vdupq_n_f32(taylor[0]);
	int32x4_t i, half, bias = vdupq_n_s32(127);

	x = vmaxq_f32(vminq_f32(x, vdupq_n_f32(89.0f)), vdupq_n_f32(-104.0f));
	n = vrndnq_f32(vmulq_n_f32(x, 0x1.715476p+0f));
	r = vfmsq_f32(x, n, vdupq_n_f32(0x1.62e430p-1f)); /* ln 2 in two parts */
	r = vfmsq_f32(r, n, vdupq_n_f32(-0x1.05c610p-29f));
	UNROLL
	for (size_t k = 1; k < ARRAY_SIZE(taylor); k++)
		p = vfmaq_f32(vdupq_n_f32(taylor[k]), p, r);
	i = vcvtq_s32_f32(n);
	half = vshrq_n_s32(i, 1);
	i = vsubq_s32(i, half);
	p = vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)));
	return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(i, bias), 23)));
}

/* 1 + e^-x: what both sigmoid and SiLU divide by. */
INLINE float32x4_t one_plus_exp_neg(float32x4_t x)
{
	return vaddq_f32(vdupq_n_f32(1.0f), exp_4(vnegq_f32(x)));
}

INLINE float32x4_t silu_4(float32x4_t x)
{
	return vdivq_f32(x, one_plus_exp_neg(x));
}

void neon_silu_mul(const float *gate, const float *up, float *y, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vst1q_f32(y + i, vmulq_f32(silu_4(vld1q_f32(gate + i)), vld1q_f32(up + i)));
	for (; i < n; i++)
		y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

void neon_swiglu_oai(const float *gate, const float *up, float *y, size_t n)
{
	const float32x4_t limit = vdupq_n_f32(7.0f), one = vdupq_n_f32(1.0f);
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		float32x4_t g = vminq_f32(vld1q_f32(gate + i), limit);
		float32x4_t u = vminq_f32(vmaxnmq_f32(vld1q_f32(up + i), vnegq_f32(limit)), limit);

		g = vdivq_f32(g, one_plus_exp_neg(vmulq_n_f32(g, 1.702f)));
		vst1q_f32(y + i, vmulq_f32(g, vaddq_f32(u, one)));
	}
	cpu_kernels_ref.swiglu_oai(gate + i, up + i, y + i, n - i);
}

void neon_sigmoid_mul(float *x, const float *gate, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vst1q_f32(x + i, vdivq_f32(vld1q_f32(x + i), one_plus_exp_neg(vld1q_f32(gate + i))));
	for (; i < n; i++)
		x[i] /= 1.0f + expf(-gate[i]);
}

static void scale_row(float *y, const float *x, float scale, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vst1q_f32(y + i, vmulq_n_f32(vld1q_f32(x + i), scale));
	for (; i < n; i++)
		y[i] = x[i] * scale;
}

void neon_softmax(float *x, size_t n)
{
	float32x4_t m = vdupq_n_f32(-INFINITY), s = vdupq_n_f32(0.0f);
	float max, sum;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		m = vmaxq_f32(m, vld1q_f32(x + i));
	max = vmaxvq_f32(m);
	for (; i < n; i++)
		max = x[i] > max ? x[i] : max;

	for (i = 0; i + LANES <= n; i += LANES) {
		float32x4_t e = exp_4(vsubq_f32(vld1q_f32(x + i), vdupq_n_f32(max)));

		vst1q_f32(x + i, e);
		s = vaddq_f32(s, e);
	}
	sum = vaddvq_f32(s);
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
	float64x2_t s0 = vdupq_n_f64(0.0), s1 = vdupq_n_f64(0.0);
	double sum;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		float32x4_t v = vld1q_f32(x + i);
		float64x2_t lo = vcvt_f64_f32(vget_low_f32(v)), hi = vcvt_high_f64_f32(v);

		s0 = vfmaq_f64(s0, lo, lo);
		s1 = vfmaq_f64(s1, hi, hi);
	}
	sum = vaddvq_f64(vaddq_f64(s0, s1));
	for (; i < n; i++)
		sum += (double)x[i] * (double)x[i];
	return sum;
}

void neon_rms_norm(const float *x, const float *w, float eps, float *y, size_t n)
{
	float scale = 1.0f / sqrtf((float)(sum_squares(x, n) / (double)n) + eps);
	size_t i = 0;

	if (!w) {
		scale_row(y, x, scale, n);
		return;
	}
	for (; i + LANES <= n; i += LANES)
		vst1q_f32(y + i, vmulq_f32(vmulq_n_f32(vld1q_f32(x + i), scale), vld1q_f32(w + i)));
	for (; i < n; i++)
		y[i] = x[i] * scale * w[i];
}

void neon_l2_norm(const float *x, float eps, float *y, size_t n)
{
	scale_row(y, x, 1.0f / fmaxf((float)sqrt(sum_squares(x, n)), eps), n);
}

void neon_add_scaled(float *x, const float *y, float scale, size_t n)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		vst1q_f32(x + i, vfmaq_n_f32(vld1q_f32(x + i), vld1q_f32(y + i), scale));
	for (; i < n; i++)
		x[i] += y[i] * scale;
}

/* Pairs (a, b) by angles cs = (cosine, sine). */
INLINE float32x4x2_t rotate(float32x4_t a, float32x4_t b, float32x4x2_t cs)
{
	float32x4x2_t r;

	r.val[0] = vfmsq_f32(vmulq_f32(a, cs.val[0]), b, cs.val[1]);
	r.val[1] = vfmaq_f32(vmulq_f32(a, cs.val[1]), b, cs.val[0]);
	return r;
}

static void rotate_pair(float *a, float *b, const float *cs)
{
	float x = *a, y = *b;

	*a = x * cs[0] - y * cs[1];
	*b = x * cs[1] + y * cs[0];
}

void neon_rope_neox(float *x, const float *cs, size_t n_rot)
{
	size_t half = n_rot / 2, i = 0;

	for (; i + LANES <= half; i += LANES) {
		float32x4x2_t r =
			rotate(vld1q_f32(x + i), vld1q_f32(x + half + i), vld2q_f32(cs + 2 * i));

		vst1q_f32(x + i, r.val[0]);
		vst1q_f32(x + half + i, r.val[1]);
	}
	for (; i < half; i++)
		rotate_pair(x + i, x + half + i, cs + 2 * i);
}

void neon_rope_norm(float *x, const float *cs, size_t n_rot)
{
	size_t i = 0;

	for (; i + 2 * LANES <= n_rot; i += 2 * LANES) {
		float32x4x2_t pairs = vld2q_f32(x + i);

		vst2q_f32(x + i, rotate(pairs.val[0], pairs.val[1], vld2q_f32(cs + i)));
	}
	for (; i + 2 <= n_rot; i += 2)
		rotate_pair(x + i, x + i + 1, cs + i);
}

/* As ref.c: what was taken becomes NaN, which the maximum of numbers passes over. */
/*
 * Floats as integers of the same order, NaN below all of them; 0 is nobody's: what was taken becomes
 * that.
 */
static uint32_t rank(float x)
{
	uint32_t bits;

	x += 0.0f; /* both zeros are equal */
	memcpy(&bits, &x, sizeof(bits));
	if (x != x)
		return 1;
	return bits ^ (bits >> 31 ? UINT32_MAX : UINT32_C(1) << 31);
}

void neon_top_k(float *x, size_t n, size_t k, uint32_t *index)
{
	for (size_t i = 0; i < n; i++) {
		uint32_t r = rank(x[i]);

		memcpy(x + i, &r, sizeof(r));
	}
	for (size_t i = 0; i < k; i++) {
		uint32x4_t m = vdupq_n_u32(0);
		uint32_t max, r = 0;
		size_t e = 0;

		for (; e + LANES <= n; e += LANES)
			m = vmaxq_u32(m, vreinterpretq_u32_f32(vld1q_f32(x + e)));
		max = vmaxvq_u32(m);
		for (; e < n; e++) {
			memcpy(&r, x + e, sizeof(r));
			max = r > max ? r : max;
		}
		for (e = 0; memcpy(&r, x + e, sizeof(r)), r != max;)
			e++;
		index[i] = (uint32_t)e;
		x[e] = 0.0f;
	}
}

void neon_f32_to_f16(const float *x, uint16_t *y, size_t n)
{
	neon_quantize_f16(x, y, n);
}

void neon_f16_to_f32(const uint16_t *x, float *y, size_t n)
{
	neon_dequant_f16(x, y, n);
}

/*
 * Attention. Positions come in tiles of at most 64 that begin at multiples of 64 within a page, and
 * queries, which are the heads of one row after those of another, in groups of four, whose scores
 * share vectors. A tile's keys and values come from memory once and stay in the cache for all
 * groups. What is computed for a query depends on its own positions alone: lanes do not mix, and
 * the weights of a position that only a neighbour sees are left out, not zero, for its value may be
 * anything.
 */
#define GROUP 4
#define TILE  64

struct tile {
	const uint8_t *k, *v; /* of its first position */
	size_t first, n;
};

INLINE float32x4_t scores(enum quant_type type, const float *const q[GROUP], size_t nq,
			  const uint8_t *key, size_t k_dim, float scale)
{
	float32x4_t acc[2 * GROUP], sum;
	size_t i = 0;

	zero(acc, 2 * GROUP);
	for (; i + 2 * LANES <= k_dim; i += 2 * LANES) {
		float32x4_t k0 = load_4(type, elem(type, key, i)),
			    k1 = load_4(type, elem(type, key, i + LANES));

		UNROLL
		for (size_t c = 0; c < nq; c++) {
			acc[2 * c] = vfmaq_f32(acc[2 * c], vld1q_f32(q[c] + i), k0);
			acc[2 * c + 1] = vfmaq_f32(acc[2 * c + 1], vld1q_f32(q[c] + i + LANES), k1);
		}
	}
	UNROLL
	for (size_t c = 0; c < GROUP; c++)
		acc[c] = vaddq_f32(acc[2 * c], acc[2 * c + 1]);
	sum = vpaddq_f32(vpaddq_f32(acc[0], acc[1]), vpaddq_f32(acc[2], acc[3]));
	for (; i < k_dim; i++) {
		float x[GROUP] = { 0 };

		UNROLL
		for (size_t c = 0; c < nq; c++)
			x[c] = q[c][i];
		sum = vfmaq_n_f32(sum, vld1q_f32(x), load_1(type, elem(type, key, i)));
	}
	return vmulq_n_f32(sum, scale);
}

/* out[c] += the values of positions [begin, end) of the tile, times their weights. */
INLINE void add_values(enum quant_type type, const struct tile *tile, const float (*weight)[GROUP],
		       size_t begin, size_t end, size_t v_dim, float *const *out, size_t lane, size_t nq)
{
	size_t i = 0;

	for (; i + 2 * LANES <= v_dim; i += 2 * LANES) {
		float32x4_t acc[2 * GROUP];

		UNROLL
		for (size_t c = 0; c < nq; c++) {
			acc[2 * c] = vld1q_f32(out[lane + c] + i);
			acc[2 * c + 1] = vld1q_f32(out[lane + c] + i + LANES);
		}
		for (size_t t = begin; t < end; t++) {
			const uint8_t *v = elem(type, tile->v, t * v_dim + i);
			float32x4_t v0 = load_4(type, v), v1 = load_4(type, elem(type, v, LANES));

			UNROLL
			for (size_t c = 0; c < nq; c++) {
				float w = weight[t][lane + c];

				acc[2 * c] = vfmaq_n_f32(acc[2 * c], v0, w);
				acc[2 * c + 1] = vfmaq_n_f32(acc[2 * c + 1], v1, w);
			}
		}
		UNROLL
		for (size_t c = 0; c < nq; c++) {
			vst1q_f32(out[lane + c] + i, acc[2 * c]);
			vst1q_f32(out[lane + c] + i + LANES, acc[2 * c + 1]);
		}
	}
	for (; i < v_dim; i++)
		for (size_t t = begin; t < end; t++)
			for (size_t c = lane; c < lane + nq; c++)
				out[c][i] = fmaf(weight[t][c],
						 load_1(type, elem(type, tile->v, t * v_dim + i)),
						 out[c][i]);
}

/* What a row sees of a tile: positions [*ret_begin, *ret_end) of it. */
static void see(const struct cpu_attention *a, size_t row, const struct tile *tile,
		uint32_t *ret_begin, uint32_t *ret_end)
{
	size_t end = a->pos + row + 1, begin = a->window > 0 && a->window < end ? end - a->window : 0;

	begin = MAX(begin, tile->first) - tile->first;
	end = MAX(end, tile->first) - tile->first;
	*ret_begin = (uint32_t)MIN(begin, tile->n);
	*ret_end = (uint32_t)MIN(end, tile->n);
}

/*
 * Queries [first, first + nq) and one tile. max and sum: of these queries, over the tiles before.
 */
INLINE void attend_group(enum quant_type type, const struct cpu_attention *a,
			 const struct tile *tile, size_t first, size_t nq, float *max, float *sum)
{
	uint32_t begin[GROUP] = { 0 }, end[GROUP] = { 0 }, all_begin = TILE, all_end = 0,
		 common_begin = 0, common_end = TILE;
	float32x4_t top = vld1q_f32(max), base, decay, total = vdupq_n_f32(0.0f);
	float weight[TILE][GROUP], decays[GROUP];
	const float *q[GROUP] = { 0 };
	float *out[GROUP] = { 0 };

	UNROLL
	for (size_t c = 0; c < nq; c++) {
		size_t row = (first + c) / a->n_q, head = (first + c) % a->n_q;

		q[c] = a->q + row * a->q_stride + head * a->k_dim;
		out[c] = a->out + row * a->out_stride + head * a->v_dim;
		see(a, row, tile, &begin[c], &end[c]);
		all_begin = MIN(all_begin, begin[c]);
		all_end = MAX(all_end, end[c]);
		common_begin = MAX(common_begin, begin[c]);
		common_end = MIN(common_end, end[c]);
	}
	common_end = MAX(common_begin, common_end);

	for (uint32_t t = all_begin; t < all_end; t++) {
		uint32x4_t now = vdupq_n_u32(t);
		uint32x4_t seen =
			vandq_u32(vcgeq_u32(now, vld1q_u32(begin)), vcltq_u32(now, vld1q_u32(end)));
		const uint8_t *key = elem(type, tile->k, t * a->k_dim);
		float32x4_t s = scores(type, q, nq, key, a->k_dim, a->scale);

		s = vbslq_f32(seen, s, vdupq_n_f32(-INFINITY));
		vst1q_f32(weight[t], s);
		top = vmaxq_f32(top, s);
	}
	/*
	 * A query that has seen nothing, or nothing but -inf, so far: differences of infinities are
	 * no weights.
	 */
	base = vbslq_f32(vceqq_f32(top, vdupq_n_f32(-INFINITY)), vdupq_n_f32(0.0f), top);
	decay = exp_4(vsubq_f32(vld1q_f32(max), base));
	for (uint32_t t = all_begin; t < all_end; t++) {
		float32x4_t w = exp_4(vsubq_f32(vld1q_f32(weight[t]), base));

		vst1q_f32(weight[t], w);
		total = vaddq_f32(total, w);
	}
	vst1q_f32(sum, vfmaq_f32(total, vld1q_f32(sum), decay));
	vst1q_f32(max, top);
	vst1q_f32(decays, decay);

	for (size_t c = 0; c < nq; c++) {
		scale_row(out[c], out[c], decays[c], a->v_dim);
		add_values(type, tile, weight, begin[c], MIN(end[c], common_begin), a->v_dim, out, c, 1);
	}
	add_values(type, tile, weight, common_begin, common_end, a->v_dim, out, 0, nq);
	for (size_t c = 0; c < nq; c++)
		add_values(type, tile, weight, MAX(begin[c], common_end), end[c], a->v_dim, out, c, 1);
}

INLINE void attend_tile(enum quant_type type, const struct cpu_attention *a,
			const struct tile *tile, size_t n_queries, float *max, float *sum)
{
	size_t i = 0;

	for (; i + GROUP <= n_queries; i += GROUP)
		attend_group(type, a, tile, i, GROUP, max + i, sum + i);
	if (n_queries - i == 3)
		attend_group(type, a, tile, i, 3, max + i, sum + i);
	else if (n_queries - i == 2)
		attend_group(type, a, tile, i, 2, max + i, sum + i);
	else if (n_queries - i == 1)
		attend_group(type, a, tile, i, 1, max + i, sum + i);
}

void neon_attention(const struct cpu_attention *a)
{
	const size_t n = a->n_rows * a->n_q, padded = ALIGN_UP(n, (size_t)GROUP),
		     end = a->pos + a->n_rows;
	float *max = a->scratch, *sum = max + padded;
	struct tile tile;

	for (size_t i = 0; i < padded; i++) {
		bool sink = a->sinks && i < n;

		max[i] = sink ? a->sinks[i % a->n_q] : -INFINITY;
		sum[i] = sink ? 1.0f : 0.0f;
	}
	for (size_t i = 0; i < n; i++)
		memset(a->out + i / a->n_q * a->out_stride + i % a->n_q * a->v_dim, 0,
		       a->v_dim * sizeof(*a->out));

	tile.first = a->window > 0 && a->window <= a->pos ? a->pos + 1 - a->window : 0;
	for (; tile.first < end; tile.first += tile.n) {
		size_t page = tile.first / a->page_tok, at = tile.first % a->page_tok;
		size_t size = a->kv_f16 ? sizeof(uint16_t) : sizeof(float);

		tile.n = MIN(MIN(TILE - at % TILE, a->page_tok - at), end - tile.first);
		tile.k = (const uint8_t *)a->k_pages[page] + at * a->k_dim * size;
		tile.v = (const uint8_t *)a->v_pages[page] + at * a->v_dim * size;
		if (a->kv_f16)
			attend_tile(QUANT_F16, a, &tile, n, max, sum);
		else
			attend_tile(QUANT_F32, a, &tile, n, max, sum);
	}
	for (size_t i = 0; i < n; i++) {
		float *out = a->out + i / a->n_q * a->out_stride + i % a->n_q * a->v_dim;

		scale_row(out, out, 1.0f / sum[i], a->v_dim);
	}
}

/*
 * Kernels of four taps, the only ones in use; ref.c does others, and channels beyond a multiple of
 * four.
 */
void neon_conv_silu(const float *x, const float *w, float *state, size_t n_tok, size_t n_ch,
		    size_t kernel, size_t c0, size_t c1, float *y)
{
	size_t c = c0;

	for (; kernel == 4 && c + LANES <= c1; c += LANES) {
		const float32x4x4_t taps = vld4q_f32(w + 4 * c);
		float32x4_t in[4];

		UNROLL
		for (size_t k = 0; k < 3; k++)
			in[k] = vld1q_f32(state + k * n_ch + c);
		for (size_t t = 0; t < n_tok; t++) {
			float32x4_t sum;

			in[3] = vld1q_f32(x + t * n_ch + c);
			sum = vmulq_f32(taps.val[0], in[0]);
			UNROLL
			for (size_t k = 1; k < 4; k++)
				sum = vfmaq_f32(sum, taps.val[k], in[k]);
			vst1q_f32(y + t * n_ch + c, silu_4(sum));
			UNROLL
			for (size_t k = 0; k < 3; k++)
				in[k] = in[k + 1];
		}
		UNROLL
		for (size_t k = 0; k < 3; k++)
			vst1q_f32(state + k * n_ch + c, in[k]);
	}
	if (c < c1)
		cpu_kernels_ref.conv_silu(x, w, state, n_tok, n_ch, kernel, c, c1, y);
}

/*
 * Columns [0, 4 * nv) of the state through one token: one pass to predict, one to update and to
 * read out.
 */
INLINE void step_columns(float *S, const float *q, const float *k, const float *v, float decay,
			 float beta, size_t k_dim, size_t v_dim, size_t nv, float *o)
{
	float32x4_t d[8], sum[8];

	zero(d, nv);
	zero(sum, nv);
	for (size_t i = 0; i < k_dim; i++) {
		UNROLL
		for (size_t a = 0; a < nv; a++)
			d[a] = vfmaq_n_f32(d[a], vld1q_f32(S + i * v_dim + a * LANES), k[i]);
	}
	UNROLL
	for (size_t a = 0; a < nv; a++) {
		d[a] = vfmsq_f32(vld1q_f32(v + a * LANES), d[a], vdupq_n_f32(decay));
		d[a] = vmulq_n_f32(d[a], beta);
	}
	for (size_t i = 0; i < k_dim; i++) {
		UNROLL
		for (size_t a = 0; a < nv; a++) {
			float *p = S + i * v_dim + a * LANES;
			float32x4_t s = vfmaq_n_f32(vmulq_n_f32(vld1q_f32(p), decay), d[a], k[i]);

			vst1q_f32(p, s);
			sum[a] = vfmaq_n_f32(sum[a], s, q[i]);
		}
	}
	UNROLL
	for (size_t a = 0; a < nv; a++)
		vst1q_f32(o + a * LANES, sum[a]);
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

void neon_delta_step(float *S, const float *q, const float *k, const float *v, float g, float beta,
		     size_t k_dim, size_t v_dim, float *o)
{
	float decay = expf(g);
	size_t j = 0;

	for (; j + 8 * LANES <= v_dim; j += 8 * LANES)
		step_columns(S + j, q, k, v + j, decay, beta, k_dim, v_dim, 8, o + j);
	for (; j + LANES <= v_dim; j += LANES)
		step_columns(S + j, q, k, v + j, decay, beta, k_dim, v_dim, 1, o + j);
	for (; j < v_dim; j++)
		step_column(S + j, q, k, v[j], decay, beta, k_dim, v_dim, o + j);
}

/* Token by token: the state of a head, 64 KB at most, stays in the second cache. */
void neon_delta_chunk(float *S, const float *q, size_t q_stride, const float *k, size_t k_stride,
		      const float *v, size_t v_stride, const float *g, const float *beta,
		      size_t gb_stride, size_t n_tok, size_t k_dim, size_t v_dim, float *o,
		      size_t o_stride, float *scratch)
{
	(void)scratch;

	for (size_t t = 0; t < n_tok; t++)
		neon_delta_step(S, q + t * q_stride, k + t * k_stride, v + t * v_stride,
				g[t * gb_stride], beta[t * gb_stride], k_dim, v_dim, o + t * o_stride);
}

const struct cpu_kernels cpu_kernels_neon = {
	.name = "neon",
	.tiles = { .reg_cols = 4, .l1_rows = 16, .l2_cols = 128 },
	NEON_CONVERSIONS,
	.matmul = {
		[QUANT_F32] = neon_matmul_f32,
		[QUANT_F16] = neon_matmul_f16,
		[QUANT_BF16] = neon_matmul_bf16,
		[QUANT_Q8_0] = neon_matmul_q8_0,
		[QUANT_Q4_0] = neon_matmul_q4_0,
		[QUANT_Q4_1] = neon_matmul_q4_1,
		[QUANT_Q5_0] = neon_matmul_q5_0,
		[QUANT_Q5_1] = neon_matmul_q5_1,
		[QUANT_MXFP4] = neon_matmul_mxfp4,
		[QUANT_IQ4_NL] = neon_matmul_iq4_nl,
		[QUANT_Q2_K] = neon_matmul_q2_k,
		[QUANT_Q3_K] = neon_matmul_q3_k,
		[QUANT_Q4_K] = neon_matmul_q4_k,
		[QUANT_Q5_K] = neon_matmul_q5_k,
		[QUANT_Q6_K] = neon_matmul_q6_k,
		[QUANT_IQ2_XXS] = neon_matmul_iq2_xxs,
		[QUANT_IQ2_XS] = neon_matmul_iq2_xs,
		[QUANT_IQ3_XXS] = neon_matmul_iq3_xxs,
		[QUANT_IQ4_XS] = neon_matmul_iq4_xs,
	},
	NEON_FLOATS,
};

#endif
