/* SPDX-License-Identifier: MIT */
/*
 * test-kernels-float.c: the kernels on floats: norms, activation functions, softmax, rope,
 * attention, the convolution and the gated delta rule, of both tables, against naive double
 * arithmetic. Bounds: see kernels.h.
 */
#include "tests/test.h"

#include "tests/unit/kernels.h"

#include <math.h>

static float *copy_floats(const float *x, size_t n)
{
	return memcpy(new_bytes(n * sizeof(*x)), x, n * sizeof(*x));
}

#define assert_close(got, want, bound)                                                         \
	do {                                                                                   \
		double got_ = (double)(got), want_ = (double)(want), bound_ = (double)(bound); \
		if (!(fabs(got_ - want_) <= bound_))                                           \
			fail_msg("%s:%d: %.9g is not within %.3g of %.9g", __func__, __LINE__, \
				 got_, bound_, want_);                                         \
	} while (0)

static double naive_sigmoid(double x)
{
	return 1.0 / (1.0 + exp(-x));
}

static void check_norms(const struct cpu_kernels *k, size_t n)
{
	_cleanup_(freep) float *x = new_floats(n), *w = new_floats(n), *y = new_floats(n),
			       *z = copy_floats(x, n);
	double sum = 0, rms, l2;

	for (size_t i = 0; i < n; i++)
		sum += (double)x[i] * (double)x[i];
	rms = 1 / sqrt(sum / (double)n + 1e-6);
	l2 = 1 / fmax(sqrt(sum), 1e-6);

	/*
	 * The sum is made in double; a few roundings remain: of the scale, of its root and
	 * quotient, of two products.
	 */
	k->rms_norm(x, w, 1e-6f, y, n);
	for (size_t i = 0; i < n; i++)
		assert_close(y[i], (double)x[i] * rms * (double)w[i],
			     6 * U * fabs((double)x[i] * rms * (double)w[i]));
	k->rms_norm(z, NULL, 1e-6f, z, n);
	for (size_t i = 0; i < n; i++)
		assert_close(z[i], (double)x[i] * rms, 6 * U * fabs((double)x[i] * rms));
	k->l2_norm(x, 1e-6f, y, n);
	for (size_t i = 0; i < n; i++)
		assert_close(y[i], (double)x[i] * l2, 6 * U * fabs((double)x[i] * l2));
	k->add_scaled(y, x, 0.3f, n);
	for (size_t i = 0; i < n; i++)
		assert_close(y[i], (double)x[i] * (l2 + (double)0.3f), 8 * U * (fabs(l2) + 1));
}

static void check_activations(const struct cpu_kernels *k, size_t n)
{
	_cleanup_(freep) float *gate = new_floats(n), *up = new_floats(n), *y = new_floats(n),
			       *x = copy_floats(up, n);

	for (size_t i = 0; i < n; i++)
		gate[i] *= 20;
	k->silu_mul(gate, up, y, n);
	k->sigmoid_mul(x, gate, n);
	for (size_t i = 0; i < n; i++) {
		double s = (double)up[i] * naive_sigmoid((double)gate[i]);

		/* exp is off by 2 * U at most, then a sum, a quotient and a product. */
		assert_close(x[i], s, 6 * U * fabs(s));
		assert_close(y[i], s * (double)gate[i], 6 * U * fabs(s * (double)gate[i]));
	}
	memcpy(x, gate, n * sizeof(*x));
	k->silu_mul(x, up, x, n); /* in place */
	assert_memory_equal(x, y, n * sizeof(*x));
}

static void check_softmax(const struct cpu_kernels *k, size_t n)
{
	_cleanup_(freep) float *x = new_floats(n), *y = NULL;
	double max = -INFINITY, sum = 0;

	for (size_t i = 0; i < n; i++) {
		x[i] = x[i] * 20 + (n % 2 ? 500 : -500); /* neither end survives without the maximum */
		max = fmax(max, (double)x[i]);
	}
	for (size_t i = 0; i < n; i++)
		sum += exp((double)x[i] - max);
	y = copy_floats(x, n);
	k->softmax(y, n);
	for (size_t i = 0; i < n; i++) {
		double want = exp((double)x[i] - max) / sum;

		/*
		 * The difference x - max is exact or rounded by up to 40 * U, and the exponential
		 * makes that a relative error; the sum is a chain of n / 8.
		 */
		assert_close(y[i], want, (50 + (double)n / 8) * U * want);
	}
}

static void check_float_kernels(const struct cpu_kernels *k)
{
	seed = 6;
	for (size_t n = 1; n < 70; n++) {
		check_norms(k, n);
		check_activations(k, n);
		check_softmax(k, n);
	}
	check_norms(k, 2048);
	check_activations(k, 2051);
	check_softmax(k, 2051);
	k->softmax(NULL, 0);
}

static void test_float_ref(void **state)
{
	(void)state;

	check_float_kernels(&cpu_kernels_ref);
}

static void test_float_simd(void **state)
{
	(void)state;
	FAST_OR_SKIP(k)

	check_float_kernels(k);
}

/*
 * The exponential over its whole range, seen through the sigmoid: its denormals, its overflow, and
 * beyond.
 */
static void test_exp_range(void **state)
{
	enum { N = 8000 };
	_cleanup_(freep) float *gate = new_bytes(N * sizeof(*gate)), *x = new_bytes(N * sizeof(*x));
	float special[8] = { INFINITY, -INFINITY, NAN, 1e30f, -1e30f, 0.0f, -104.0f, 88.9f }, ones[8];
	(void)state;
	FAST_OR_SKIP(k)

	for (size_t i = 0; i < N; i++) {
		gate[i] = (float)i * (220.0f / N) - 110.0f;
		x[i] = 1.0f;
	}
	k->sigmoid_mul(x, gate, N);
	for (size_t i = 0; i < N; i++) {
		double want = naive_sigmoid((double)gate[i]);

		/* Below -88.7 the exponential of -x overflows, as it does in the reference. */
		if (gate[i] < -88.7f)
			assert_true(x[i] <= 0x1p-126f);
		else /* 2.5 * U was the most in a finer sweep; the last results are denormal */
			assert_close(x[i], want, 3 * U * want + 0x1p-149);
	}

	for (size_t i = 0; i < 8; i++)
		ones[i] = 1.0f;
	k->sigmoid_mul(ones, special, 8);
	assert_true(ones[0] == 1.0f && ones[1] == 0.0f && isnan(ones[2]) && ones[3] == 1.0f &&
		    ones[4] == 0.0f);
	assert_true(ones[5] == 0.5f && ones[6] == 0.0f && ones[7] == 1.0f);

	/*
	 * Softmax shows the results far below: e^-90 is denormal after no division, e^-200 is zero.
	 */
	for (size_t i = 0; i < 8; i++)
		ones[i] = (float)i * -15.0f;
	k->softmax(ones, 8);
	for (size_t i = 0; i < 8; i++)
		assert_close(ones[i], exp((double)i * -15) / (1 + exp(-15)),
			     8 * U * exp((double)i * -15) + 0x1p-149);
}

static void check_rope(const struct cpu_kernels *k)
{
	for (size_t n_rot = 2; n_rot <= 128; n_rot += 2) {
		_cleanup_(freep) float *x = new_floats(n_rot + 1), *cs = new_floats(n_rot),
				       *y = copy_floats(x, n_rot + 1);

		k->rope_neox(y, cs, n_rot);
		for (size_t i = 0; i < n_rot / 2; i++) {
			double a = (double)x[i], b = (double)x[i + n_rot / 2];
			double c = (double)cs[2 * i], s = (double)cs[2 * i + 1];

			assert_close(y[i], a * c - b * s, 2 * U * (fabs(a * c) + fabs(b * s)));
			assert_close(y[i + n_rot / 2], a * s + b * c,
				     2 * U * (fabs(a * s) + fabs(b * c)));
		}
		assert_true(y[n_rot] == x[n_rot]);
	}
}

static void test_rope(void **state)
{
	const struct cpu_kernels *k = fast_table();
	(void)state;

	seed = 7;
	check_rope(&cpu_kernels_ref);
	if (k)
		check_rope(k);
}

/* Attention */

#define PAGE_TOK 16

struct kv {
	void *pages[8];
	bool f16;
};

static void kv_make(struct kv *kv, size_t n_kv, size_t dim)
{
	for (size_t p = 0; p * PAGE_TOK < n_kv; p++) {
		/* The last page ends where its positions end. */
		size_t n = MIN((size_t)PAGE_TOK, n_kv - p * PAGE_TOK) * dim;
		_cleanup_(freep) float *x = new_floats(n);

		kv->pages[p] = new_bytes(n * (kv->f16 ? 2 : 4));
		cpu_kernels_ref.quantize[kv->f16 ? QUANT_F16 : QUANT_F32](x, kv->pages[p], n);
	}
}

static double kv_at(const struct kv *kv, size_t t, size_t dim, size_t i)
{
	size_t at = t % PAGE_TOK * dim + i;

	return kv->f16 ? (double)f16_to_float(((uint16_t *)kv->pages[t / PAGE_TOK])[at])
		       : (double)((float *)kv->pages[t / PAGE_TOK])[at];
}

static void check_attention(const struct cpu_kernels *k, size_t n_kv, size_t k_dim, size_t v_dim,
			    bool f16)
{
	struct kv keys = { .f16 = f16 }, values = { .f16 = f16 };
	_cleanup_(freep) float *q = new_floats(k_dim), *out = new_floats(v_dim),
			       *scratch = new_floats(cpu_attention_scratch(1, 1, v_dim));
	double weight[128], max = -INFINITY, total = 0;

	kv_make(&keys, n_kv, k_dim);
	kv_make(&values, n_kv, v_dim);
	k->attention(&(struct cpu_attention){ .q = q,
					      .out = out,
					      .n_rows = 1,
					      .n_q = 1,
					      .k_pages = (const void *const *)keys.pages,
					      .v_pages = (const void *const *)values.pages,
					      .page_tok = PAGE_TOK,
					      .k_dim = k_dim,
					      .v_dim = v_dim,
					      .pos = n_kv - 1,
					      .kv_f16 = f16,
					      .scale = 0.5f,
					      .scratch = scratch });

	for (size_t t = 0; t < n_kv; t++) {
		weight[t] = 0;
		for (size_t i = 0; i < k_dim; i++)
			weight[t] += 0.5 * (double)q[i] * kv_at(&keys, t, k_dim, i);
		max = fmax(max, weight[t]);
	}
	for (size_t t = 0; t < n_kv; t++)
		total += weight[t] = exp(weight[t] - max);
	for (size_t i = 0; i < v_dim; i++) {
		double sum = 0;

		for (size_t t = 0; t < n_kv; t++)
			sum += weight[t] / total * kv_at(&values, t, v_dim, i);
		/*
		 * |values| < 1, so this is the relative error of the weights: a score of 256
		 * products is off by about 256 / 8 * U * 8 = 2e-5 at worst and by 1e-6 as errors
		 * go; a wrong index or page gives 1e-2 and more.
		 */
		assert_close(out[i], sum, 1e-5);
	}
	for (size_t p = 0; p < ARRAY_SIZE(keys.pages); p++) {
		free(p * PAGE_TOK < n_kv ? keys.pages[p] : NULL);
		free(p * PAGE_TOK < n_kv ? values.pages[p] : NULL);
	}
}

static void test_attention(void **state)
{
	static const size_t n_kv[] = { 1, 15, 16, 17, 50, 128 },
			    dims[][2] = { { 256, 256 }, { 64, 80 }, { 20, 13 }, { 8, 136 }, { 3, 72 } };
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };
	(void)state;

	seed = 8;
	for (size_t t = 0; t < ARRAY_SIZE(tables) && tables[t]; t++)
		for (size_t i = 0; i < ARRAY_SIZE(n_kv); i++)
			for (size_t d = 0; d < ARRAY_SIZE(dims); d++)
				for (int f16 = 0; f16 < 2; f16++)
					check_attention(tables[t], n_kv[i], dims[d][0], dims[d][1], f16);
}

/* Convolution */

static void check_conv(const struct cpu_kernels *k, size_t kernel, size_t n_tok, size_t n_ch)
{
	_cleanup_(freep) float *w = new_floats(n_ch * kernel), *x = new_floats(n_tok * n_ch);
	_cleanup_(freep) float *first = new_floats((kernel - 1) * n_ch),
			       *state = copy_floats(first, (kernel - 1) * n_ch);
	_cleanup_(freep) float *whole = copy_floats(first, (kernel - 1) * n_ch),
			       *y = new_floats(n_tok * n_ch);
	_cleanup_(freep) float *z = new_floats(n_tok * n_ch);
	size_t cut = n_tok / 3, c = n_ch / 3;

	/*
	 * Two calls, of which one has fewer tokens than the state, each split into two ranges of
	 * channels.
	 */
	k->conv_silu(x, w, state, cut, n_ch, kernel, 0, c, y);
	k->conv_silu(x, w, state, cut, n_ch, kernel, c, n_ch, y);
	k->conv_silu(x + cut * n_ch, w, state, n_tok - cut, n_ch, kernel, 0, c, y + cut * n_ch);
	k->conv_silu(x + cut * n_ch, w, state, n_tok - cut, n_ch, kernel, c, n_ch, y + cut * n_ch);
	k->conv_silu(x, w, whole, n_tok, n_ch, kernel, 0, n_ch, z);

	for (size_t ch = 0; ch < n_ch; ch++) {
		for (size_t t = 0; t < n_tok; t++) {
			double sum = 0, magnitude = 0, want;

			for (size_t j = 0; j < kernel; j++) {
				size_t at = t + j; /* in the sequence of the first state, then x */
				double in = at < kernel - 1
						    ? (double)first[at * n_ch + ch]
						    : (double)x[(at - (kernel - 1)) * n_ch + ch];

				sum += in * (double)w[ch * kernel + j];
				magnitude += fabs(in * (double)w[ch * kernel + j]);
			}
			want = sum * naive_sigmoid(sum);
			assert_close(y[t * n_ch + ch], want, ((double)kernel + 6) * U * magnitude);
			assert_close(z[t * n_ch + ch], want, ((double)kernel + 6) * U * magnitude);
		}
		for (size_t j = 0; j + 1 < kernel; j++) {
			size_t at = n_tok + j;
			float want = at < kernel - 1 ? first[at * n_ch + ch]
						     : x[(at - (kernel - 1)) * n_ch + ch];

			assert_true(state[j * n_ch + ch] == want);
			assert_true(whole[j * n_ch + ch] == want);
		}
	}
}

static void test_conv(void **state)
{
	static const size_t tokens[] = { 1, 2, 3, 4, 7, 20 };
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };
	(void)state;

	seed = 9;
	for (size_t t = 0; t < ARRAY_SIZE(tables) && tables[t]; t++)
		for (size_t kernel = 1; kernel <= 5; kernel++)
			for (size_t i = 0; i < ARRAY_SIZE(tokens); i++) {
				check_conv(tables[t], kernel, tokens[i], 64);
				check_conv(tables[t], kernel, tokens[i], 29);
			}
}

/* Gated delta rule */

struct delta {
	size_t n_tok, k_dim, v_dim;
	float *S, *q, *k, *v, *g, *beta, *o;
};

static void delta_make(struct delta *d, float max_decay)
{
	d->S = new_floats(d->k_dim * d->v_dim);
	d->q = new_floats(d->n_tok * d->k_dim);
	d->k = new_floats(d->n_tok * d->k_dim);
	d->v = new_floats(d->n_tok * d->v_dim);
	d->g = new_floats(d->n_tok);
	d->beta = new_floats(d->n_tok);
	d->o = new_floats(d->n_tok * d->v_dim);
	for (size_t t = 0; t < d->n_tok; t++) {
		cpu_kernels_ref.l2_norm(d->k + t * d->k_dim, 1e-6f, d->k + t * d->k_dim, d->k_dim);
		cpu_kernels_ref.l2_norm(d->q + t * d->k_dim, 1e-6f, d->q + t * d->k_dim, d->k_dim);
		/*
		 * Mostly mild, now and then the state is wiped out: the differences of large sums
		 * must stay right.
		 */
		d->g[t] = (d->g[t] - 1) * 0.5f * (random_u32() % 8 ? max_decay : 1000 * max_decay);
		if (random_u32() % 32 == 0)
			d->g[t] = -INFINITY;
		d->beta[t] = (d->beta[t] + 1) * 0.5f;
	}
}

static void delta_done(struct delta *d)
{
	float *all[] = { d->S, d->q, d->k, d->v, d->g, d->beta, d->o };

	for (size_t i = 0; i < ARRAY_SIZE(all); i++)
		free(all[i]);
}

/* The recurrence in double, on a copy of S that is returned. */
static double *delta_naive(const struct delta *d, double *o)
{
	double *S = new_bytes(d->k_dim * d->v_dim * sizeof(*S));

	for (size_t i = 0; i < d->k_dim * d->v_dim; i++)
		S[i] = (double)d->S[i];
	for (size_t t = 0; t < d->n_tok; t++) {
		const float *q = d->q + t * d->k_dim, *k = d->k + t * d->k_dim;

		for (size_t j = 0; j < d->v_dim; j++) {
			double u = 0, out = 0;

			for (size_t i = 0; i < d->k_dim; i++) {
				S[i * d->v_dim + j] *= exp((double)d->g[t]);
				u += S[i * d->v_dim + j] * (double)k[i];
			}
			u = ((double)d->v[t * d->v_dim + j] - u) * (double)d->beta[t];
			for (size_t i = 0; i < d->k_dim; i++) {
				S[i * d->v_dim + j] += (double)k[i] * u;
				out += S[i * d->v_dim + j] * (double)q[i];
			}
			o[t * d->v_dim + j] = out;
		}
	}
	return S;
}

/*
 * k and q are of length 1, v and S of magnitude 1: so are all results, and errors of 1e-5 are 1e-5
 * of them.
 */
#define DELTA_BOUND 1e-5

static void check_delta(const struct cpu_kernels *k, size_t n_tok, size_t k_dim, size_t v_dim,
			float max_decay, bool chunk)
{
	struct delta d = { .n_tok = n_tok, .k_dim = k_dim, .v_dim = v_dim };
	_cleanup_(freep) double *o = new_bytes(n_tok * v_dim * sizeof(*o)), *S = NULL;
	_cleanup_(freep) float *scratch = new_floats(cpu_delta_scratch(k_dim, v_dim));

	delta_make(&d, max_decay);
	S = delta_naive(&d, o);
	if (chunk)
		k->delta_chunk(d.S, d.q, k_dim, d.k, k_dim, d.v, v_dim, d.g, d.beta, 1, n_tok,
			       k_dim, v_dim, d.o, v_dim, scratch);
	else
		for (size_t t = 0; t < n_tok; t++)
			k->delta_step(d.S, d.q + t * k_dim, d.k + t * k_dim, d.v + t * v_dim,
				      d.g[t], d.beta[t], k_dim, v_dim, d.o + t * v_dim);
	for (size_t i = 0; i < n_tok * v_dim; i++)
		assert_close(d.o[i], o[i], DELTA_BOUND);
	for (size_t i = 0; i < k_dim * v_dim; i++)
		assert_close(d.S[i], S[i], DELTA_BOUND);
	delta_done(&d);
}

static void check_deltas(const struct cpu_kernels *k)
{
	static const size_t dims[][2] = { { 128, 128 }, { 32, 48 }, { 20, 12 },
					  { 5, 7 },     { 1, 1 },   { 8, 136 } };

	for (size_t i = 0; i < ARRAY_SIZE(dims); i++)
		for (int chunk = 0; chunk < 2; chunk++) {
			check_delta(k, 1, dims[i][0], dims[i][1], 0.1f, chunk);
			check_delta(k, 6, dims[i][0], dims[i][1], 3.0f, chunk);
			check_delta(k, CPU_DELTA_CHUNK, dims[i][0], dims[i][1], 0.01f, chunk);
		}
}

static void test_delta_ref(void **state)
{
	(void)state;

	seed = 10;
	check_deltas(&cpu_kernels_ref);
}

static void test_delta_simd(void **state)
{
	(void)state;
	FAST_OR_SKIP(k)

	seed = 11;
	check_deltas(k);
	for (size_t n_tok = 1; n_tok <= CPU_DELTA_CHUNK; n_tok++)
		check_delta(k, n_tok, 32, 24, 0.1f, true);
}

/*
 * Tokens interleaved with those of other heads, as the graph has them: strides larger than the
 * rows.
 */
static void test_delta_strides(void **state)
{
	enum { T = 9, K = 16, V = 24, STRIDE = 100 };
	struct delta d = { .n_tok = T, .k_dim = K, .v_dim = V };
	_cleanup_(freep) float *wide = new_floats(T * STRIDE), *wide_o = new_floats(T * STRIDE),
			       *scratch = NULL;
	_cleanup_(freep) float *gb = new_floats(T * 6), *S = NULL;
	(void)state;
	FAST_OR_SKIP(kernels)

	seed = 12;
	delta_make(&d, 0.1f);
	S = copy_floats(d.S, K * V);
	scratch = new_floats(cpu_delta_scratch(K, V));
	for (size_t t = 0; t < T; t++) {
		memcpy(wide + t * STRIDE, d.q + t * K, K * sizeof(float));
		memcpy(wide + t * STRIDE + K, d.k + t * K, K * sizeof(float));
		memcpy(wide + t * STRIDE + 2 * K, d.v + t * V, V * sizeof(float));
		gb[t * 6] = d.g[t];
		gb[t * 6 + 1] = d.beta[t];
		wide_o[t * STRIDE + V] = 77;
	}
	kernels->delta_chunk(d.S, d.q, K, d.k, K, d.v, V, d.g, d.beta, 1, T, K, V, d.o, V, scratch);
	kernels->delta_chunk(S, wide, STRIDE, wide + K, STRIDE, wide + 2 * K, STRIDE, gb, gb + 1, 6,
			     T, K, V, wide_o, STRIDE, scratch);
	assert_memory_equal(S, d.S, K * V * sizeof(float));
	for (size_t t = 0; t < T; t++) {
		assert_memory_equal(wide_o + t * STRIDE, d.o + t * V, V * sizeof(float));
		assert_true(wide_o[t * STRIDE + V] == 77);
	}
	delta_done(&d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_float_ref),     cmocka_unit_test(test_float_simd),
		cmocka_unit_test(test_exp_range),     cmocka_unit_test(test_rope),
		cmocka_unit_test(test_attention),     cmocka_unit_test(test_conv),
		cmocka_unit_test(test_delta_ref),     cmocka_unit_test(test_delta_simd),
		cmocka_unit_test(test_delta_strides),
	};

	return RUN_WITH_EVERY_TABLE(tests);
}
