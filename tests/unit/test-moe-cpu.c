/* SPDX-License-Identifier: MIT */
/*
 * test-moe-cpu.c: experts on the CPU: against plain arithmetic; in waves for another backend, where
 * no bit may differ from the operation; and that the scratch which is promised is enough.
 */
#include "tests/unit/kernels.h"

#include "daemon/engine/backend.h"
#include "daemon/engine/route.h"
#include "daemon/residency/residency.h"

#include <math.h>

#define N_EMBD   256
#define N_FF     512
#define N_EXPERT 7
#define N_USED   3
#define N_TOK    33 /* the most */
#define N_PLACES (N_TOK * N_USED)
/* Arrays an expert, and rounding: what temporaries take beside what a row takes. */
#define FIXED    8192

struct layer {
	struct gguf_tensor w[CATALOG_MATRICES], bias[CATALOG_MATRICES];
	struct backend_moe p;
};

struct types {
	enum quant_type gate, up, down;
	bool fused, biases;
	enum backend_gating gating;
	enum backend_unit unit;
};

static const struct types all_types[] = {
	{ QUANT_F32, QUANT_F32, QUANT_F32, .fused = false },
	{ QUANT_Q8_0, QUANT_Q8_0, QUANT_Q8_0, .fused = false },
	{ QUANT_Q4_K, QUANT_Q4_K, QUANT_F16, .fused = true },
	{ QUANT_Q4_K, QUANT_Q4_K, QUANT_Q4_K, .fused = false },
	/* Gate and up want different forms of their input. */
	{ QUANT_F32, QUANT_Q8_0, QUANT_F32, .fused = false },
	{ QUANT_Q4_K, QUANT_F32, QUANT_Q8_0, .fused = false },
	{ QUANT_F16, QUANT_Q8_0, QUANT_F32, .fused = false },
	{ QUANT_Q8_0, QUANT_Q8_0, QUANT_Q8_0, .biases = true, .gating = BACKEND_GATING_CHOSEN,
	  .unit = BACKEND_UNIT_OAI },
	{ QUANT_F32, QUANT_Q4_K, QUANT_Q4_K, .biases = true, .gating = BACKEND_GATING_SOFTMAX,
	  .unit = BACKEND_UNIT_OAI },
};

static const size_t all_n_tok[] = { 1, 2, N_TOK };

static void fill_row(enum quant_type type, char *row, size_t n)
{
	_cleanup_(freep) float *x = new_floats(n);
	struct block_q4_k *blocks = (struct block_q4_k *)row;

	for (size_t i = 0; i < n; i++)
		x[i] *= 0.25f;
	if (type != QUANT_Q4_K) {
		cpu_kernels_ref.quantize[type](x, row, n);
		return;
	}
	for (size_t i = 0; i < quant_row_bytes(type, n); i++)
		row[i] = (char)random_u32();
	for (size_t i = 0; i < n / QK_K; i++) {
		blocks[i].d = float_to_f16(0.0005f);
		blocks[i].dmin = float_to_f16(0.002f);
	}
}

static void new_tensor(struct gguf_tensor *w, enum quant_type type, size_t n, size_t n_rows)
{
	size_t row_bytes = quant_row_bytes(type, n), bytes = row_bytes * n_rows * N_EXPERT;
	char *data = new_bytes(bytes);

	for (size_t i = 0; i < n_rows * N_EXPERT; i++)
		fill_row(type, data + i * row_bytes, n);
	*w = (struct gguf_tensor){
		.type = type, .n_dims = 3, .ne = { n, n_rows, N_EXPERT, 1 }, .bytes = bytes, .data = data
	};
}

static void new_bias(struct gguf_tensor *w, size_t n)
{
	*w = (struct gguf_tensor){ .type = QUANT_F32,
				   .n_dims = 2,
				   .ne = { n, N_EXPERT, 1, 1 },
				   .bytes = n * N_EXPERT * sizeof(float),
				   .data = new_floats(n * N_EXPERT) };
}

static struct layer *new_layer(struct types t)
{
	struct layer *l = new_bytes(sizeof(*l));

	*l = (struct layer){ .p = { .down = &l->w[2],
				    .n_expert = N_EXPERT,
				    .n_used = N_USED,
				    .gating = t.gating,
				    .unit = t.unit } };
	if (t.biases) {
		new_bias(&l->bias[0], N_FF);
		new_bias(&l->bias[1], N_FF);
		new_bias(&l->bias[2], N_EMBD);
		l->p.gate_bias = &l->bias[0];
		l->p.up_bias = &l->bias[1];
		l->p.down_bias = &l->bias[2];
	}
	new_tensor(&l->w[0], t.gate, N_EMBD, t.fused ? 2 * N_FF : N_FF);
	new_tensor(&l->w[2], t.down, N_FF, N_EMBD);
	if (t.fused) {
		l->p.gate_up = &l->w[0];
		return l;
	}
	new_tensor(&l->w[1], t.up, N_EMBD, N_FF);
	l->p.gate = &l->w[0];
	l->p.up = &l->w[1];
	return l;
}

static struct layer *layer_free(struct layer *l)
{
	for (size_t i = 0; i < CATALOG_MATRICES; i++) {
		free((void *)l->w[i].data);
		free((void *)l->bias[i].data);
	}
	free(l);
	return NULL;
}
DEFINE_CLEANUP(struct layer *, layer_free)

static struct backend *new_backend(unsigned n_threads, size_t scratch_bytes)
{
	struct backend *b;

	assert_int_equal(backend_cpu_new(n_threads, scratch_bytes, NULL, &b), 0);
	return b;
}

static struct backend *backend_free(struct backend *b)
{
	return b->ops->free(b);
}
DEFINE_CLEANUP(struct backend *, backend_free)

static size_t operation_bytes(size_t n_tok)
{
	return n_tok * backend_moe_temp_floats(N_EMBD, N_FF, N_EXPERT, N_USED) * sizeof(float) + FIXED;
}

/* All of the layer, by the two operations of the table. */
static void operation(struct backend *b, const struct layer *l, const float *router, const float *x,
		      size_t n_tok, float *out)
{
	assert_int_equal(b->ops->moe_route(b, &l->p, router, n_tok), 0);
	assert_int_equal(b->ops->moe(b, &l->p, x, n_tok, out), 0);
	assert_int_equal(b->ops->end(b, 0), 0);
}

/* The route that the operation makes of these logits; the caller frees ret->chosen. */
static void make_route(struct route *ret, enum backend_gating gating, const float *router, size_t n_tok)
{
	void *mem = aligned_alloc(64, route_bytes(n_tok, N_USED, N_EXPERT));

	assert_non_null(mem);
	route_init(ret, mem, n_tok, N_USED, N_EXPERT);
	for (size_t t = 0; t < n_tok; t++) {
		float probs[N_EXPERT], sum = 0;

		memcpy(probs, router + t * N_EXPERT, sizeof(probs));
		if (gating == BACKEND_GATING_SOFTMAX)
			cpu_kernels_choose(NULL)->softmax(probs, N_EXPERT);
		for (size_t k = 0; k < N_USED; k++) {
			uint32_t best = 0;

			for (uint32_t e = 1; e < N_EXPERT; e++)
				if (probs[e] > probs[best])
					best = e;
			ret->chosen[t * N_USED + k] = best;
			ret->weight[t * N_USED + k] = probs[best];
			sum += probs[best];
			probs[best] = -INFINITY;
		}
		if (gating == BACKEND_GATING_CHOSEN)
			cpu_kernels_choose(NULL)->softmax(ret->weight + t * N_USED, N_USED);
		for (size_t k = 0; k < N_USED && gating == BACKEND_GATING_SOFTMAX; k++)
			ret->weight[t * N_USED + k] /= sum;
	}
	assert_int_equal(route_sort(ret), 0);
}

static void add_up(const struct route *r, const float *result, float *out)
{
	for (size_t s = 0; s < r->n_tok * N_USED; s++)
		cpu_kernels_choose(NULL)->add_scaled(out + s / N_USED * N_EMBD,
						     result + r->place[s] * N_EMBD, r->weight[s],
						     N_EMBD);
}

static struct residency_block block_of(const struct layer *l, uint32_t e)
{
	struct residency_block b = { .expert = e };

	for (size_t i = 0; i < CATALOG_MATRICES; i++)
		if (l->w[i].data)
			b.matrix[i] = (const char *)l->w[i].data + e * (l->w[i].bytes / N_EXPERT);
	return b;
}

/* Every other active expert, from the last to the first. */
static size_t half_wave(const struct layer *l, const struct route *r, size_t from,
			struct residency_block *ret)
{
	size_t n = 0;

	for (size_t i = r->n_active; i-- > 0;)
		if (i % 2 == from)
			ret[n++] = block_of(l, r->active[i]);
	return n;
}

/* The bits of what no computation here gives. */
#define UNTOUCHED 12345.0f

static void check_places(const struct route *r, const float *result, bool even, bool odd)
{
	for (size_t i = 0; i < r->n_active; i++)
		for (size_t p = r->first[r->active[i]]; p < r->first[r->active[i] + 1]; p++)
			for (size_t d = 0; d < N_EMBD; d++)
				assert_int_equal(result[p * N_EMBD + d] != UNTOUCHED,
						 i % 2 ? odd : even);
}

/* In two waves, each half of the experts. */
static void in_waves(struct backend *b, const struct layer *l, const struct route *r,
		     const float *x, float *out)
{
	_cleanup_(freep) float *result = new_floats(r->n_tok * N_USED * N_EMBD);
	struct residency_block wave[N_EXPERT];

	for (size_t i = 0; i < r->n_tok * N_USED * N_EMBD; i++)
		result[i] = UNTOUCHED;
	assert_int_equal(backend_cpu_moe_begin(b, &l->p, r, x), 0);
	backend_cpu_moe_run(b, wave, half_wave(l, r, 1, wave), result);
	check_places(r, result, false, true);
	backend_cpu_moe_run(b, wave, half_wave(l, r, 0, wave), result);
	check_places(r, result, true, true);
	backend_cpu_moe_run(b, NULL, 0, result);
	backend_cpu_moe_end(b);
	add_up(r, result, out);
}

static void check_waves(const struct layer *l, size_t n_tok, unsigned n_threads)
{
	_cleanup_(backend_freep) struct backend *whole = new_backend(1, operation_bytes(n_tok));
	_cleanup_(backend_freep) struct backend *parts =
		new_backend(n_threads, backend_cpu_moe_bytes(&l->p, n_tok));
	_cleanup_(freep) float *x = new_floats(n_tok * N_EMBD), *want = new_floats(n_tok * N_EMBD),
			       *got = new_floats(n_tok * N_EMBD);

	/* Again at the same address with other contents: nothing may be kept of the first. */
	for (int round = 0; round < 2; round++) {
		_cleanup_(freep) float *router = new_floats(n_tok * N_EXPERT);
		struct route r;

		for (size_t i = 0; i < n_tok * N_EMBD; i++)
			x[i] = random_float();
		memcpy(got, want, n_tok * N_EMBD * sizeof(float));
		make_route(&r, l->p.gating, router, n_tok);
		operation(whole, l, router, x, n_tok, want);
		in_waves(parts, l, &r, x, got);
		assert_memory_equal(want, got, n_tok * N_EMBD * sizeof(float));
		free(r.chosen);
	}
}

static void test_waves_give_the_same_bits(void **state)
{
	(void)state;
	seed = 1;
	for (size_t i = 0; i < ARRAY_SIZE(all_types); i++) {
		_cleanup_(layer_freep) struct layer *l = new_layer(all_types[i]);

		for (size_t k = 0; k < ARRAY_SIZE(all_n_tok); k++)
			for (unsigned threads = 1; threads <= 2; threads++)
				check_waves(l, all_n_tok[k], threads);
	}
}

static double bias_of(const struct gguf_tensor *bias, uint32_t e, size_t i)
{
	return bias ? (double)((const float *)bias->data)[e * bias->ne[0] + i] : 0;
}

static double unit(const struct backend_moe *p, double g, double u)
{
	if (p->unit == BACKEND_UNIT_SILU)
		return g / (1 + exp(-g)) * u;
	g = fmin(g, 7);
	u = fmax(fmin(u, 7), -7);
	return g / (1 + exp(-1.702 * g)) * (u + 1);
}

/* out[d] += what expert e makes of x, all in double. */
static void plain_expert(const struct layer *l, uint32_t e, const float *x, double weight, double *out)
{
	const float *gate = (const float *)l->w[0].data + e * l->w[0].ne[1] * N_EMBD;
	const float *up = l->p.gate_up ? gate + N_FF * N_EMBD
				       : (const float *)l->w[1].data + e * (size_t)N_FF * N_EMBD;
	const float *down = (const float *)l->w[2].data + e * (size_t)N_EMBD * N_FF;
	double hidden[N_FF];

	for (size_t f = 0; f < N_FF; f++) {
		double g = bias_of(l->p.gate_bias, e, f), u = bias_of(l->p.up_bias, e, f);

		for (size_t d = 0; d < N_EMBD; d++) {
			g += (double)gate[f * N_EMBD + d] * (double)x[d];
			u += (double)up[f * N_EMBD + d] * (double)x[d];
		}
		hidden[f] = unit(&l->p, g, u);
	}
	for (size_t d = 0; d < N_EMBD; d++) {
		double sum = bias_of(l->p.down_bias, e, d);

		for (size_t f = 0; f < N_FF; f++)
			sum += (double)down[d * N_FF + f] * hidden[f];
		out[d] += weight * sum;
	}
}

static void check_plain(const struct layer *l, size_t n_tok)
{
	_cleanup_(backend_freep) struct backend *b = new_backend(2, operation_bytes(n_tok));
	_cleanup_(freep) float *router = new_floats(n_tok * N_EXPERT),
			       *x = new_floats(n_tok * N_EMBD), *out = new_floats(n_tok * N_EMBD),
			       *before = new_floats(n_tok * N_EMBD);
	struct route r;

	memcpy(before, out, n_tok * N_EMBD * sizeof(float));
	make_route(&r, l->p.gating, router, n_tok);
	operation(b, l, router, x, n_tok, out);
	for (size_t t = 0; t < n_tok; t++) {
		double want[N_EMBD], largest = 0;

		for (size_t d = 0; d < N_EMBD; d++)
			want[d] = (double)before[t * N_EMBD + d];
		for (size_t s = t * N_USED; s < (t + 1) * N_USED; s++)
			plain_expert(l, r.chosen[s], x + t * N_EMBD, (double)r.weight[s], want);
		for (size_t d = 0; d < N_EMBD; d++) {
			largest = fmax(largest, fabs(want[d]));
			assert_true(fabs(want[d] - (double)out[t * N_EMBD + d]) < 1e-4);
		}
		assert_true(largest > 1);
	}
	free(r.chosen);
}

static void test_against_plain_arithmetic(void **state)
{
	static const struct types types[] = {
		{ QUANT_F32, QUANT_F32, QUANT_F32, .fused = false },
		{ QUANT_F32, QUANT_F32, QUANT_F32, .fused = true },
		{ QUANT_F32, QUANT_F32, QUANT_F32, .biases = true, .gating = BACKEND_GATING_CHOSEN,
		  .unit = BACKEND_UNIT_OAI },
		{ QUANT_F32, QUANT_F32, QUANT_F32, .fused = true, .gating = BACKEND_GATING_CHOSEN,
		  .unit = BACKEND_UNIT_OAI }
	};

	(void)state;
	seed = 2;
	for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
		_cleanup_(layer_freep) struct layer *l = new_layer(types[i]);

		check_plain(l, 1);
		check_plain(l, 5);
	}
}

/* A product keeps the converted form of its input; that of another backend changes where this one does not see it. */
static void test_input_that_was_seen_before(void **state)
{
	const size_t n_tok = 4;
	_cleanup_(layer_freep) struct layer *l = NULL;
	_cleanup_(backend_freep) struct backend *whole = new_backend(1, operation_bytes(n_tok));
	_cleanup_(backend_freep) struct backend *parts = new_backend(1, operation_bytes(n_tok));
	_cleanup_(freep) float *x = new_floats(n_tok * N_EMBD), *y = new_floats(n_tok * N_FF),
			       *router = new_floats(n_tok * N_EXPERT),
			       *want = new_bytes(n_tok * N_EMBD * sizeof(float)),
			       *got = new_bytes(n_tok * N_EMBD * sizeof(float));
	struct route r;

	(void)state;
	seed = 5;
	l = new_layer(all_types[1]);
	memset(want, 0, n_tok * N_EMBD * sizeof(float));
	memset(got, 0, n_tok * N_EMBD * sizeof(float));
	make_route(&r, l->p.gating, router, n_tok);
	assert_int_equal(parts->ops->matmul(parts, l->p.gate, x, n_tok, y), 0);
	for (size_t i = 0; i < n_tok * N_EMBD; i++)
		x[i] = random_float();
	operation(whole, l, router, x, n_tok, want);
	in_waves(parts, l, &r, x, got);
	assert_memory_equal(want, got, n_tok * N_EMBD * sizeof(float));
	free(r.chosen);
}

static void test_scratch(void **state)
{
	_cleanup_(freep) float *router = new_floats(N_TOK * N_EXPERT),
			       *x = new_floats(N_TOK * N_EMBD), *out = new_floats(N_TOK * N_EMBD);
	struct route r, one;

	(void)state;
	seed = 3;
	make_route(&r, BACKEND_GATING_SOFTMAX, router, N_TOK);
	make_route(&one, BACKEND_GATING_SOFTMAX, router, 1);
	for (size_t i = 0; i < ARRAY_SIZE(all_types); i++) {
		_cleanup_(layer_freep) struct layer *l = new_layer(all_types[i]);
		size_t bytes = backend_cpu_moe_bytes(&l->p, N_TOK);
		_cleanup_(backend_freep) struct backend *b = new_backend(1, bytes - 64);

		/* Not a byte too many is asked for, and what does not fit leaves nothing behind. */
		assert_int_equal(backend_cpu_moe_begin(b, &l->p, &r, x), -ENOMEM);
		in_waves(b, l, &one, x, out);
		assert_int_equal(b->ops->moe_route(b, &l->p, router, N_TOK), 0);
		assert_int_equal(b->ops->moe(b, &l->p, x, N_TOK, out), -ENOMEM);
		assert_int_equal(b->ops->end(b, -ENOMEM), -ENOMEM);
		in_waves(b, l, &one, x, out);
		assert_int_equal(backend_cpu_moe_bytes(&l->p, SIZE_MAX), SIZE_MAX);
		assert_int_equal(backend_cpu_moe_bytes(&l->p, SIZE_MAX / 4096), SIZE_MAX);
	}
	free(r.chosen);
	free(one.chosen);
}

/* A router that has lost its mind chooses different experts all the same, and says so in the result. */
static void check_not_a_number(struct types t)
{
	static const float mad[] = { NAN, INFINITY, -INFINITY };
	_cleanup_(layer_freep) struct layer *l = NULL;
	_cleanup_(backend_freep) struct backend *b = new_backend(1, operation_bytes(2));

	seed = 4;
	l = new_layer(t);
	for (size_t i = 0; i < ARRAY_SIZE(mad); i++) {
		_cleanup_(freep) float *x = new_floats(2 * N_EMBD), *out = new_floats(2 * N_EMBD),
				       *router = new_floats(2 * N_EXPERT);

		for (size_t e = 0; e < N_EXPERT; e++)
			router[e] = mad[i];
		operation(b, l, router, x, 2, out);
		assert_true(isnan(out[0]));
		for (size_t d = 0; d < N_EMBD; d++)
			assert_true(isfinite(out[N_EMBD + d]));
	}
}

static void test_not_a_number(void **state)
{
	(void)state;
	check_not_a_number(all_types[1]);
	check_not_a_number((struct types){ QUANT_Q8_0, QUANT_Q8_0, QUANT_Q8_0, .biases = true,
					   .gating = BACKEND_GATING_CHOSEN, .unit = BACKEND_UNIT_OAI });
}

/* Of equals the first is chosen, and what is chosen weighs what it should, also far from zero. */
static void test_gating(void **state)
{
	static const float router[2][N_EXPERT] = { { 1, 3, -2, 3, 2, 2, 0 },
						   { 91, -90, 89, 90, -95, 0, 88 } };
	static const uint32_t want[2][N_USED] = { { 1, 3, 4 }, { 0, 3, 2 } };
	_cleanup_(layer_freep) struct layer *l = NULL;

	(void)state;
	seed = 6;
	l = new_layer(all_types[0]);
	for (unsigned g = 0; g < 2; g++) {
		_cleanup_(backend_freep) struct backend *b = new_backend(1, operation_bytes(2));
		_cleanup_(freep) float *x = new_floats(2 * N_EMBD),
				       *out = new_bytes(2 * N_EMBD * sizeof(float));

		l->p.gating = g ? BACKEND_GATING_CHOSEN : BACKEND_GATING_SOFTMAX;
		memset(out, 0, 2 * N_EMBD * sizeof(float));
		operation(b, l, router[0], x, 2, out);
		for (size_t t = 0; t < 2; t++) {
			double sum = 0, expected[N_EMBD] = { 0 };

			for (size_t k = 0; k < N_USED; k++)
				sum += exp((double)(router[t][want[t][k]] - router[t][want[t][0]]));
			for (size_t k = 0; k < N_USED; k++)
				plain_expert(
					l, want[t][k], x + t * N_EMBD,
					exp((double)(router[t][want[t][k]] - router[t][want[t][0]])) / sum,
					expected);
			for (size_t d = 0; d < N_EMBD; d++)
				assert_true(fabs(expected[d] - (double)out[t * N_EMBD + d]) < 1e-4);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_waves_give_the_same_bits),
		cmocka_unit_test(test_against_plain_arithmetic),
		cmocka_unit_test(test_input_that_was_seen_before),
		cmocka_unit_test(test_scratch),
		cmocka_unit_test(test_not_a_number),
		cmocka_unit_test(test_gating),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
