/* SPDX-License-Identifier: MIT */
/*
 * test-kernels-float.c: the kernels on floats: norms, activation functions, softmax, rope, routing,
 * attention, the convolution and the gated delta rule, of every table, against naive double
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

static void check_swiglu(const struct cpu_kernels *k, size_t n)
{
	_cleanup_(freep) float *gate = new_floats(n), *up = new_floats(n), *y = new_floats(n);

	for (size_t i = 0; i < n; i++) {
		gate[i] *= 20;
		up[i] *= 10;
	}
	k->swiglu_oai(gate, up, y, n);
	for (size_t i = 0; i < n; i++) {
		double g = fmin((double)gate[i], 7), u = fmax(fmin((double)up[i], 7), -7);
		double x = (double)1.702f * g, want = g * naive_sigmoid(x) * (u + 1);

		/* As above and another sum and product; that x is rounded is relative to the exponential. */
		assert_close(y[i], want, (8 + fabs(x)) * U * fabs(want));
	}
	k->swiglu_oai(gate, up, gate, n); /* in place */
	assert_memory_equal(gate, y, n * sizeof(*y));
}

static void check_swiglu_limits(const struct cpu_kernels *k)
{
	const float gate[8] = { 7, 1e30f, INFINITY, 7, 7, NAN, -INFINITY, -1e30f },
		    up[8] = { 7, 1e30f, INFINITY, -7, -INFINITY, 1, 1, 1 };
	double top = 7 * naive_sigmoid(7 * (double)1.702f);
	float y[8];

	k->swiglu_oai(gate, up, y, 8);
	assert_close(y[0], top * 8, 20 * U * top * 8);
	assert_true(y[1] == y[0] && y[2] == y[0]);
	assert_close(y[3], top * -6, 20 * U * top * 6);
	assert_true(y[4] == y[3]);
	assert_true(isnan(y[5]) && isnan(y[6]) && y[7] == 0);
	/* One that is no number is the lower limit wherever in a vector it stands. */
	for (size_t i = 0; i < 21; i++) {
		float ones[21], odd[21], all[21];

		for (size_t j = 0; j < ARRAY_SIZE(ones); j++) {
			ones[j] = 1;
			odd[j] = j == i ? NAN : -9;
		}
		k->swiglu_oai(ones, odd, all, ARRAY_SIZE(ones));
		assert_close(all[i], -6 * naive_sigmoid((double)1.702f), 40 * U);
	}
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
		check_swiglu(k, n);
		check_softmax(k, n);
	}
	check_norms(k, 2048);
	check_activations(k, 2051);
	check_swiglu(k, 2051);
	check_swiglu_limits(k);
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

		memcpy(y, x, n_rot * sizeof(*y));
		k->rope_norm(y, cs, n_rot);
		for (size_t i = 0; i < n_rot; i += 2) {
			double a = (double)x[i], b = (double)x[i + 1];
			double c = (double)cs[i], s = (double)cs[i + 1];

			assert_close(y[i], a * c - b * s, 2 * U * (fabs(a * c) + fabs(b * s)));
			assert_close(y[i + 1], a * s + b * c, 2 * U * (fabs(a * s) + fabs(b * c)));
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

/* Routing */

static bool goes_before(const float *x, size_t a, size_t b)
{
	if (isnan(x[a]) || isnan(x[b]))
		return isnan(x[a]) == isnan(x[b]) ? a < b : isnan(x[b]);
	return x[a] == x[b] ? a < b : x[a] > x[b];
}

static void check_top_k(const struct cpu_kernels *k, const float *x, size_t n, size_t n_top)
{
	_cleanup_(freep) float *y = copy_floats(x, n);
	_cleanup_(freep) uint32_t *index = new_bytes(n_top * sizeof(*index));

	k->top_k(y, n, n_top, index);
	for (size_t i = 0; i < n; i++) {
		size_t rank = 0;

		for (size_t j = 0; j < n; j++)
			rank += goes_before(x, j, i);
		if (rank < n_top && index[rank] != i)
			fail_msg("%s of %zu, number %zu is %u, not %zu", k->name, n, rank,
				 (unsigned)index[rank], i);
	}
}

static void check_top_ks(const struct cpu_kernels *k, size_t n)
{
	static const float special[] = { 0.0f,      -0.0f,      INFINITY, -INFINITY, NAN,  -NAN,
					 0x1p-149f, -0x1p-149f, 1e38f,    -1e38f,    1.0f, -1.0f };
	_cleanup_(freep) float *x = new_floats(n), *few = new_floats(n), *equal = new_floats(n),
			       *odd = new_floats(n);
	const float *all[] = { x, few, equal, odd };
	const size_t n_top[] = { 1, MIN(n, (size_t)8), n };

	for (size_t i = 0; i < n; i++) {
		few[i] = (float)(random_u32() % 5) - 2;
		equal[i] = n % 2 ? -INFINITY : NAN;
		odd[i] = special[random_u32() % ARRAY_SIZE(special)];
	}
	for (size_t i = 0; i < ARRAY_SIZE(all); i++)
		for (size_t j = 0; j < ARRAY_SIZE(n_top); j++)
			check_top_k(k, all[i], n, n_top[j]);
}

static void test_top_k(void **state)
{
	static const size_t large[] = { 64, 100, 128, 256, 257 };
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };
	(void)state;

	seed = 15;
	for (size_t t = 0; t < ARRAY_SIZE(tables) && tables[t]; t++) {
		for (size_t n = 1; n < 40; n++)
			check_top_ks(tables[t], n);
		for (size_t i = 0; i < ARRAY_SIZE(large); i++)
			check_top_ks(tables[t], large[i]);
	}
}

/* Attention */

#define PAGE_TOK 16
#define MAX_KV   (14 * PAGE_TOK)

struct kv {
	void *pages[MAX_KV / PAGE_TOK];
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

static void kv_set(const struct kv *kv, size_t t, size_t dim, size_t i, float value)
{
	size_t at = t % PAGE_TOK * dim + i;

	if (kv->f16)
		((uint16_t *)kv->pages[t / PAGE_TOK])[at] = float_to_f16(value);
	else
		((float *)kv->pages[t / PAGE_TOK])[at] = value;
}

static void kv_done(struct kv *kv)
{
	for (size_t p = 0; p < ARRAY_SIZE(kv->pages); p++)
		free(kv->pages[p]);
}

/* All elements, position by position. */
static double *kv_doubles(const struct kv *kv, size_t n_kv, size_t dim)
{
	double *x = new_bytes(n_kv * dim * sizeof(*x));

	for (size_t i = 0; i < n_kv * dim; i++)
		x[i] = kv_at(kv, i / dim, dim, i % dim);
	return x;
}

/*
 * |values| < 1, so the bound is the relative error of the weights: a score of 256 products is off by
 * about 256 / 8 * U * 8 = 2e-5 at worst and by 1e-6 as errors go; a wrong index or page gives 1e-2 and
 * more. What is infinite or not a number must be the same.
 */
static void assert_attended(float got, double want)
{
	if (isfinite(want))
		assert_close(got, want, 1e-5);
	else
		assert_true(isnan(want) ? isnan(got) : (double)got == want);
}

/* One query by the definition; sink: NULL for none. */
static void check_query(const struct cpu_attention *a, const double *keys, const double *values,
			const float *q, const float *sink, size_t first, size_t end, const float *out)
{
	double weight[MAX_KV], max = sink ? (double)*sink : -INFINITY, total;

	for (size_t t = first; t < end; t++) {
		weight[t] = 0;
		for (size_t i = 0; i < a->k_dim; i++)
			weight[t] += (double)q[i] * keys[t * a->k_dim + i];
		weight[t] *= (double)a->scale;
		max = fmax(max, weight[t]);
	}
	total = sink ? exp((double)*sink - max) : 0;
	for (size_t t = first; t < end; t++)
		total += weight[t] = exp(weight[t] - max);
	for (size_t i = 0; i < a->v_dim; i++) {
		double sum = 0;

		for (size_t t = first; t < end; t++)
			sum += weight[t] / total * values[t * a->v_dim + i];
		assert_attended(out[i], sum);
	}
}

enum hostile {
	TAME,
	KEYS,   /* some scores are infinite */
	VALUES, /* some values are */
	START, /* all scores of the first positions are: nothing to subtract until a finite one comes */
};

static void make_hostile(enum hostile hostile, const struct cpu_attention *a, const struct kv *keys,
			 const struct kv *values, size_t n_kv)
{
	static const size_t at[] = { 0, 2, 11, 70, 90 };

	for (size_t t = 0; hostile == START && t < MIN(n_kv - 1, (size_t)70); t++)
		kv_set(keys, t, a->k_dim, 0, -INFINITY);
	if (hostile == START)
		return;
	for (size_t i = 0; hostile != TAME && i < ARRAY_SIZE(at); i++) {
		float inf = i % 2 ? INFINITY : -INFINITY;

		/* Of the last rows some see the last position only. */
		for (size_t t = at[i]; t < n_kv; t = t < n_kv - 1 ? n_kv - 1 : n_kv) {
			if (hostile == KEYS)
				kv_set(keys, t, a->k_dim, 0, inf);
			else
				kv_set(values, t, a->v_dim, i % a->v_dim, inf);
		}
	}
}

static void check_attention(const struct cpu_kernels *k, size_t pos, size_t n_rows, size_t n_q,
			    const size_t dims[2], size_t window, bool f16, bool with_sinks,
			    enum hostile hostile)
{
	size_t n_kv = pos + n_rows, q_stride = n_q * dims[0] + 5, out_stride = n_q * dims[1] + 3;
	struct kv keys = { .f16 = f16 }, values = { .f16 = f16 };
	_cleanup_(freep) float *q = new_floats((n_rows - 1) * q_stride + n_q * dims[0]);
	_cleanup_(freep) float *out = new_floats((n_rows - 1) * out_stride + n_q * dims[1]);
	_cleanup_(freep) float *scratch = new_floats(cpu_attention_scratch(n_rows, n_q, dims[1])),
			       *sinks = new_floats(n_q);
	_cleanup_(freep) double *key = NULL, *value = NULL;
	struct cpu_attention a = { .q = q,
				   .out = out,
				   .q_stride = q_stride,
				   .out_stride = out_stride,
				   .n_rows = n_rows,
				   .n_q = n_q,
				   .page_tok = PAGE_TOK,
				   .k_dim = dims[0],
				   .v_dim = dims[1],
				   .pos = pos,
				   .window = window,
				   .kv_f16 = f16,
				   .scale = 0.5f,
				   .sinks = with_sinks ? sinks : NULL,
				   .scratch = scratch };

	kv_make(&keys, n_kv, dims[0]);
	kv_make(&values, n_kv, dims[1]);
	make_hostile(hostile, &a, &keys, &values, n_kv);
	a.k_pages = (const void *const *)keys.pages;
	a.v_pages = (const void *const *)values.pages;
	for (size_t i = 0; i + 1 < n_rows; i++)
		out[i * out_stride + n_q * dims[1]] = 77;
	k->attention(&a);

	key = kv_doubles(&keys, n_kv, dims[0]);
	value = kv_doubles(&values, n_kv, dims[1]);
	for (size_t i = 0; i < n_rows; i++) {
		size_t end = pos + i + 1, first = window > 0 && end > window ? end - window : 0;

		for (size_t h = 0; h < n_q; h++)
			check_query(&a, key, value, q + i * q_stride + h * dims[0],
				    with_sinks ? sinks + h : NULL, first, end,
				    out + i * out_stride + h * dims[1]);
		assert_true(i + 1 == n_rows || out[i * out_stride + n_q * dims[1]] == 77);
	}
	kv_done(&keys);
	kv_done(&values);
}

/* Many positions and dimensions, one query. */
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
					check_attention(tables[t], n_kv[i] - 1, 1, 1, dims[d], 0,
							f16, false, TAME);
}

/* Every number of queries and rows with every window, before and beyond a tile of positions. */
static void check_attentions(const struct cpu_kernels *k, const size_t dims[2])
{
	static const size_t pos[] = { 0, 5, 48, 200 }, n_q[] = { 1, 3, 8 }, n_rows[] = { 1, 2, 16 },
			    window[] = { 0, 1, 7, 128 };

	for (size_t i = 0; i < 4 * 3 * 3 * 4; i++)
		for (unsigned how = 0; how < 4; how++)
			check_attention(k, pos[i % 4], n_rows[i / 4 % 3], n_q[i / 12 % 3], dims,
					window[i / 36], how & 1, how & 2, TAME);
}

static void test_attention_shared(void **state)
{
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };
	(void)state;

	seed = 13;
	for (size_t t = 0; t < ARRAY_SIZE(tables) && tables[t]; t++) {
		check_attentions(tables[t], (const size_t[]){ 20, 13 });
		check_attentions(tables[t], (const size_t[]){ 64, 80 });
		check_attention(tables[t], 200, 2, 8, (const size_t[]){ 256, 256 }, 0, true, true, TAME);
		check_attention(tables[t], 90, 1, 4, (const size_t[]){ 128, 128 }, 0, true, true, TAME);
		check_attention(tables[t], 90, 1, 2, (const size_t[]){ 128, 128 }, 0, false, false,
				TAME);
		check_attention(tables[t], 30, 3, 11, (const size_t[]){ 31, 65 }, 9, true, true, TAME);
	}
}

/* Infinities change what may see them in the way that the definition says, and nothing else. */
static void test_attention_infinite(void **state)
{
	static const size_t pos[] = { 0, 1, 9, 77 }, window[] = { 0, 1, 7 };
	const struct cpu_kernels *tables[] = { &cpu_kernels_ref, fast_table() };
	(void)state;

	seed = 14;
	for (size_t t = 0; t < ARRAY_SIZE(tables) && tables[t]; t++)
		for (size_t i = 0; i < 4 * 3; i++)
			for (unsigned how = 0; how < 12; how++) {
				enum hostile hostile = how < 4 ? KEYS : how < 8 ? VALUES : START;
				size_t p = pos[i % 4], w = window[i / 4];

				check_attention(tables[t], p, 16, 1, (const size_t[]){ 20, 13 }, w,
						how & 1, how & 2, hostile);
				check_attention(tables[t], p, 5, 8, (const size_t[]){ 16, 40 }, w,
						how & 1, how & 2, hostile);
			}
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
		cmocka_unit_test(test_float_ref),
		cmocka_unit_test(test_float_simd),
		cmocka_unit_test(test_exp_range),
		cmocka_unit_test(test_rope),
		cmocka_unit_test(test_top_k),
		cmocka_unit_test(test_attention),
		cmocka_unit_test(test_attention_shared),
		cmocka_unit_test(test_attention_infinite),
		cmocka_unit_test(test_conv),
		cmocka_unit_test(test_delta_ref),
		cmocka_unit_test(test_delta_simd),
		cmocka_unit_test(test_delta_strides),
	};

	return RUN_WITH_EVERY_TABLE(tests);
}
