/* SPDX-License-Identifier: MIT */
/*
 * test-cuda-delta.c: the gated delta rule by chunks of rows, against the scalar reference, row by
 * row, and together with the recurrent kernel. Runs on what RESIDENTD_CUDA_LIBRARY names, else on
 * the emulator beside this program.
 *
 * Bound: values and outputs are at most a few units large, so BOUND is 67 roundings of 1; decays'
 * exponents are exact to a rounding however far apart the rows' sums are. Before, between and
 * behind the sequences there are rows of not-a-numbers: nobody's, and as such read or written by
 * nobody.
 */
#include "tests/test.h"

#include "kernels/cuda/args.h"
#include "tests/unit/cuda.h"
#include "tests/unit/kernels.h"

#include <math.h>

#define BOUND   4e-6
#define N_SPANS 3
#define OFFSET  5 /* of the convolution's state, which is not touched */

static void assert_all_close(const float *got, const float *want, size_t n, double bound)
{
	for (size_t i = 0; i < n; i++)
		if (!(fabs((double)got[i] - (double)want[i]) <= bound))
			fail_msg("%zu: %.9g is not within %.3g of %.9g", i, (double)got[i], bound,
				 (double)want[i]);
}

/* Sequences in a batch. */

struct shape {
	size_t n_head_k, n_head_v, k_dim, v_dim, n_tok[N_SPANS];
};

struct batch {
	struct shape shape;
	size_t row[N_SPANS], n_rows, n_ch, n_state;
	float *mixed, *g, *beta, *states[N_SPANS];
};

/* On the device: a batch, what its states have become and its outputs. */
struct run {
	struct cuda_delta_rule args;
	float *states[N_SPANS];
};

static void fill_nan(float *x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		x[i] = NAN;
}

/* alike: how much of a sequence's keys is the same in all rows, so that the system to solve is a full one. */
static void batch_row(struct batch *b, size_t row, const float *same, float alike)
{
	const struct shape *sh = &b->shape;
	float *x = b->mixed + row * b->n_ch;

	for (size_t i = 0; i < b->n_ch; i++)
		x[i] = random_float() + (i < 2 * sh->n_head_k * sh->k_dim ? alike * same[i] : 0);
	for (size_t h = 0; h < 2 * sh->n_head_k; h++)
		cpu_kernels_ref.l2_norm(x + h * sh->k_dim, 1e-6f, x + h * sh->k_dim, sh->k_dim);
	for (size_t h = 0; h < sh->n_head_v; h++) {
		b->g[row * sh->n_head_v + h] = (random_float() - 1) * (random_u32() % 8 ? 0.05f : 5);
		b->beta[row * sh->n_head_v + h] = (random_float() + 1) * 0.5f;
	}
}

static void batch_make(struct batch *b, const struct shape *sh, float alike)
{
	_cleanup_(freep) float *same = NULL;

	*b = (struct batch){ .shape = *sh, .n_rows = 1 };
	b->n_ch = 2 * sh->n_head_k * sh->k_dim + sh->n_head_v * sh->v_dim;
	b->n_state = OFFSET + sh->n_head_v * sh->k_dim * sh->v_dim;
	for (size_t s = 0; s < N_SPANS; s++) {
		b->row[s] = b->n_rows;
		b->n_rows += sh->n_tok[s] + 1;
		b->states[s] = new_floats(b->n_state);
	}
	b->mixed = new_floats(b->n_rows * b->n_ch);
	b->g = new_floats(b->n_rows * sh->n_head_v);
	b->beta = new_floats(b->n_rows * sh->n_head_v);
	fill_nan(b->mixed, b->n_rows * b->n_ch);
	fill_nan(b->g, b->n_rows * sh->n_head_v);
	fill_nan(b->beta, b->n_rows * sh->n_head_v);
	same = new_floats(b->n_ch);
	for (size_t s = 0; s < N_SPANS; s++)
		for (size_t t = 0; t < sh->n_tok[s]; t++)
			batch_row(b, b->row[s] + t, same, alike);
}

static void batch_done(struct batch *b)
{
	free(b->mixed);
	free(b->g);
	free(b->beta);
	for (size_t s = 0; s < N_SPANS; s++)
		free(b->states[s]);
	buffers_free();
}

static size_t n_out(const struct batch *b)
{
	return b->n_rows * b->shape.n_head_v * b->shape.v_dim;
}

/* Outputs, not-a-number in rows that nobody has; the states become those after the last rows. */
static float *batch_want(struct batch *b)
{
	const struct shape *sh = &b->shape;
	size_t n_k = sh->n_head_k * sh->k_dim;
	float *out = new_floats(n_out(b));

	fill_nan(out, n_out(b));
	for (size_t s = 0; s < N_SPANS; s++)
		for (size_t row = b->row[s]; row < b->row[s] + sh->n_tok[s]; row++)
			for (size_t h = 0; h < sh->n_head_v; h++) {
				const float *x = b->mixed + row * b->n_ch;
				const float *q = x + h % sh->n_head_k * sh->k_dim;
				size_t at = row * sh->n_head_v + h;

				cpu_kernels_ref.delta_step(
					b->states[s] + OFFSET + h * sh->k_dim * sh->v_dim, q,
					q + n_k, x + 2 * n_k + h * sh->v_dim, b->g[at], b->beta[at],
					sh->k_dim, sh->v_dim, out + at * sh->v_dim);
			}
	return out;
}

static void run_begin(struct run *r, const struct batch *b)
{
	const struct shape *sh = &b->shape;
	size_t n_gates = b->n_rows * sh->n_head_v * sizeof(float);

	r->args = (struct cuda_delta_rule){
		.mixed = put(b->mixed, b->n_rows * b->n_ch * sizeof(float)),
		.g = put(b->g, n_gates),
		.beta = put(b->beta, n_gates),
		.out = put(NULL, n_out(b) * sizeof(float)),
		.state_offset = OFFSET,
		.n_ch = (uint32_t)b->n_ch,
		.n_head_k = (uint32_t)sh->n_head_k,
		.n_head_v = (uint32_t)sh->n_head_v,
		.k_dim = (uint32_t)sh->k_dim,
		.v_dim = (uint32_t)sh->v_dim,
	};
	for (size_t s = 0; s < N_SPANS; s++)
		r->states[s] = put(b->states[s], b->n_state * sizeof(float));
}

/* Rows [from, to) of each sequence, as far as it has them. */
static void run_rows(const struct run *r, const struct batch *b, const char *kernel, size_t from,
		     size_t to)
{
	struct cuda_delta_rule a = r->args;
	struct cuda_function *function;
	struct cuda_span spans[N_SPANS];
	struct cuda_grid grid = { .x = a.n_head_v };
	void *on_device;

	for (size_t s = 0; s < N_SPANS; s++)
		if (from < b->shape.n_tok[s])
			spans[a.n_spans++] = (struct cuda_span){
				.row = (uint32_t)(b->row[s] + from),
				.n_tok = (uint32_t)(MIN(to, b->shape.n_tok[s]) - from),
				.recurrent = r->states[s],
			};
	if (a.n_spans == 0)
		return;
	assert_done(cuda_alloc(gpu, sizeof(spans), &on_device));
	assert_done(cuda_upload(gpu, on_device, spans, a.n_spans * sizeof(*spans), NULL));
	a.spans = on_device;
	grid.y = a.n_spans;
	if (strcmp(kernel, "cuda_delta_chunk") == 0) {
		grid.z = (a.v_dim + CUDA_DELTA_COLUMNS - 1) / CUDA_DELTA_COLUMNS;
		grid.shared_bytes = CUDA_DELTA_CHUNK_SHARED(a.k_dim);
	} else {
		grid.threads = (a.v_dim + CUDA_WARP - 1) / CUDA_WARP * CUDA_WARP;
	}
	assert_done(cuda_function(gpu, kernel, &function));
	assert_done(cuda_launch(gpu, function, grid, NULL, &a, sizeof(a)));
	cuda_free(gpu, on_device); /* waits */
}

/* Outputs and states, compared with those of the reference. */
static void run_check(const struct run *r, const struct batch *b, const float *want)
{
	_cleanup_(freep) float *out = get_floats(r->args.out, n_out(b));
	size_t n = b->shape.n_head_v * b->shape.v_dim;

	for (size_t row = 0, s = 0; row < b->n_rows; row++) {
		if (s < N_SPANS && row == b->row[s] + b->shape.n_tok[s])
			s++;
		if (s < N_SPANS && row >= b->row[s])
			assert_all_close(out + row * n, want + row * n, n, BOUND);
		else
			for (size_t i = 0; i < n; i++)
				assert_true(isnan(out[row * n + i]));
	}
	for (size_t s = 0; s < N_SPANS; s++) {
		_cleanup_(freep) float *after = get_floats(r->states[s], b->n_state);

		assert_memory_equal(after, b->states[s], OFFSET * sizeof(*after));
		assert_all_close(after, b->states[s], b->n_state, BOUND);
	}
}

static void assert_same(const struct run *r, const struct run *other, const struct batch *b)
{
	_cleanup_(freep) float *out = get_floats(r->args.out, n_out(b)),
			       *other_out = get_floats(other->args.out, n_out(b));

	assert_memory_equal(out, other_out, n_out(b) * sizeof(*out));
	for (size_t s = 0; s < N_SPANS; s++) {
		_cleanup_(freep) float *x = get_floats(r->states[s], b->n_state),
				       *y = get_floats(other->states[s], b->n_state);

		assert_memory_equal(x, y, b->n_state * sizeof(*x));
	}
}

static void test_chunk(void **state)
{
	static const struct shape shapes[] = {
		{ 1, 2, 128, 128, { 100, 32, 1 } }, { 2, 4, 128, 64, { 33, 64, 31 } },
		{ 1, 1, 256, 256, { 70, 2, 5 } },   { 1, 3, 40, 20, { 17, 65, 96 } },
		{ 1, 1, 13, 7, { 32, 100, 63 } },   { 1, 1, 1, 1, { 40, 3, 33 } },
		{ 3, 6, 129, 33, { 34, 8, 37 } },   { 1, 1, 64, 32, { 300, 0, 257 } },
		{ 16, 32, 128, 128, { 9, 2, 1 } },
	};
	(void)state;

	GPU_OR_SKIP();
	seed = 1;
	for (size_t i = 0; i < ARRAY_SIZE(shapes) * 2; i++) {
		_cleanup_(freep) float *want = NULL;
		struct batch b;
		struct run r;

		batch_make(&b, &shapes[i / 2], i % 2 ? 1.5f : 0);
		run_begin(&r, &b);
		run_rows(&r, &b, "cuda_delta_chunk", 0, SIZE_MAX);
		want = batch_want(&b);
		run_check(&r, &b, want);
		batch_done(&b);
	}
}

/*
 * The state is wiped out in one row or decays by nothing, the sums run to where a float has no
 * fractions, and still it is the difference of two rows that counts.
 */
static void test_decay(void **state)
{
	static const float decays[][5] = {
		{ 0, 0, 0, 0, 0 },
		{ -0.01f, -0.01f, -0.01f, -0.01f, -0.01f },
		{ -100, -100, -100, -100, -100 },
		{ -INFINITY, -0.01f, -0.02f, 0, -0.5f },
		{ -9999, -0.01f, -0.02f, -0.03f, -0.01f },
		{ -0.01f, -3e38f, -0.02f, -1e-30f, -80 },
		{ -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY },
		{ -1e-3f, -88, -1e-3f, -1e-3f, -104 },
	};
	static const struct shape shape = { 1, 1, 32, 16, { 70, 32, 5 } };
	(void)state;

	GPU_OR_SKIP();
	seed = 2;
	for (size_t i = 0; i < ARRAY_SIZE(decays) * 2; i++) {
		_cleanup_(freep) float *want = NULL;
		struct batch b;
		struct run r;

		batch_make(&b, &shape, 1);
		/* Over and over; or once in the first rows, and little from then on. */
		for (size_t s = 0; s < N_SPANS; s++)
			for (size_t t = 0; t < shape.n_tok[s]; t++)
				b.g[b.row[s] + t] = i % 2 == 0 || t < 5 ? decays[i / 2][t % 5] : -1e-3f;
		run_begin(&r, &b);
		run_rows(&r, &b, "cuda_delta_chunk", 0, SIZE_MAX);
		want = batch_want(&b);
		run_check(&r, &b, want);
		batch_done(&b);
	}
}

static void test_handover(void **state)
{
	static const struct shape shapes[] = {
		{ 1, 2, 128, 64, { 150, 70, 33 } },
		{ 1, 1, 40, 33, { 171, 64, 7 } },
	};
	(void)state;

	GPU_OR_SKIP();
	seed = 3;
	for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
		_cleanup_(freep) float *want = NULL;
		struct run whole, cut, mixed;
		struct batch b;

		batch_make(&b, &shapes[i], 0.5f);
		run_begin(&whole, &b);
		run_begin(&cut, &b);
		run_begin(&mixed, &b);
		run_rows(&whole, &b, "cuda_delta_chunk", 0, SIZE_MAX);
		run_rows(&cut, &b, "cuda_delta_chunk", 0, 1 * CUDA_DELTA_CHUNK);
		run_rows(&cut, &b, "cuda_delta_chunk", 1 * CUDA_DELTA_CHUNK, 3 * CUDA_DELTA_CHUNK);
		run_rows(&cut, &b, "cuda_delta_chunk", 3 * CUDA_DELTA_CHUNK, SIZE_MAX);
		assert_same(&cut, &whole, &b);

		run_rows(&mixed, &b, "cuda_delta_rule", 0, 3);
		run_rows(&mixed, &b, "cuda_delta_chunk", 3, 68);
		run_rows(&mixed, &b, "cuda_delta_rule", 68, 69);
		run_rows(&mixed, &b, "cuda_delta_chunk", 69, 100);
		run_rows(&mixed, &b, "cuda_delta_chunk", 100, 140);
		run_rows(&mixed, &b, "cuda_delta_rule", 140, SIZE_MAX);
		want = batch_want(&b);
		run_check(&whole, &b, want);
		run_check(&mixed, &b, want);
		batch_done(&b);
	}
}

/* Rows of one chunk are computed at once, and still not one bit of a row is a later row's. */
static void test_causal(void **state)
{
	enum { ROWS = 60 };
	static const struct shape shape = { 1, 1, 40, 20, { ROWS, 0, 0 } };
	static const size_t rows[] = { 1, 2, 15, 16, 21, 31, 32, 47, 59 };
	_cleanup_(freep) float *want = NULL;
	struct batch b;
	struct run r;
	(void)state;

	GPU_OR_SKIP();
	seed = 4;
	batch_make(&b, &shape, 1);
	run_begin(&r, &b);
	run_rows(&r, &b, "cuda_delta_chunk", 0, SIZE_MAX);
	want = get_floats(r.args.out, n_out(&b));
	buffers_free();
	for (size_t i = ARRAY_SIZE(rows); i-- > 0;) {
		_cleanup_(freep) float *out = NULL;
		size_t row = b.row[0] + rows[i];

		fill_nan(b.mixed + row * b.n_ch, b.n_ch);
		b.g[row] = b.beta[row] = NAN;
		run_begin(&r, &b);
		run_rows(&r, &b, "cuda_delta_chunk", 0, SIZE_MAX);
		out = get_floats(r.args.out, n_out(&b));
		assert_memory_equal(out, want, row * shape.v_dim * sizeof(*out));
		for (size_t c = 0; c < shape.v_dim; c++)
			assert_true(isnan(out[row * shape.v_dim + c]));
		buffers_free();
	}
	batch_done(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_chunk),
		cmocka_unit_test(test_decay),
		cmocka_unit_test(test_handover),
		cmocka_unit_test(test_causal),
	};

	return cmocka_run_group_tests(tests, open_device, close_device);
}
