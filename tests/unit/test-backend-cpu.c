/* SPDX-License-Identifier: MIT */
/*
 * test-backend-cpu.c: operations of the CPU backend that cut work in ways of their own: products of
 * several weights, biases and gates of many rows, and the delta net of several sequences. Each is
 * compared with the reference's arithmetic, and no number of threads may change a bit.
 */
#include "tests/unit/kernels.h"

#include "daemon/engine/backend.h"

#include <math.h>

#define SCRATCH ((size_t)4 << 20)

static struct backend *backend_free(struct backend *b)
{
	return b->ops->free(b);
}
DEFINE_CLEANUP(struct backend *, backend_free)

static struct backend *new_backend(unsigned n_threads)
{
	struct backend *b;

	assert_int_equal(backend_cpu_new(n_threads, SCRATCH, NULL, &b), 0);
	return b;
}

static const unsigned all_threads[] = { 1, 2, 5 };

/* A matrix of this type; what it holds is in range. The caller frees data. */
static struct gguf_tensor new_matrix(enum quant_type type, size_t n, size_t n_rows)
{
	size_t stride = quant_row_bytes(type, n), bytes = n_rows * stride;
	char *data = new_bytes(bytes);

	for (size_t r = 0; r < n_rows; r++) {
		_cleanup_(freep) float *x = new_floats(n);
		struct block_q4_k *blocks = (struct block_q4_k *)(data + r * stride);

		if (type != QUANT_Q4_K) {
			cpu_kernels_ref.quantize[type](x, blocks, n);
			continue;
		}
		for (size_t i = 0; i < n / QK_K; i++) {
			for (size_t k = 0; k < sizeof(*blocks); k++)
				((uint8_t *)&blocks[i])[k] = (uint8_t)random_u32();
			blocks[i].d = float_to_f16(0.002f);
			blocks[i].dmin = float_to_f16(0.01f);
		}
	}
	return (struct gguf_tensor){
		.type = type, .n_dims = 2, .ne = { n, n_rows, 1, 1 }, .bytes = bytes, .data = data
	};
}

#define WIDTH 512

static const struct {
	enum quant_type type;
	size_t n_rows;
} weights[] = {
	{ QUANT_Q4_K, 700 }, { QUANT_Q4_K, 33 }, { QUANT_F32, 40 },  { QUANT_Q8_0, 9 },
	{ QUANT_F32, 1 },    { QUANT_F16, 65 },  { QUANT_Q4_K, 8 },  { QUANT_Q4_K, 7 },
	{ QUANT_Q4_K, 16 },  { QUANT_Q4_K, 3 },  { QUANT_Q4_K, 5 },  { QUANT_Q4_K, 6 },
	{ QUANT_F32, 2 },    { QUANT_Q4_K, 4 },  { QUANT_Q4_K, 12 },
};
#define N_WEIGHTS ARRAY_SIZE(weights)

/* Of one weight after the other, and of all at once, by several threads. */
static void check_products(const struct gguf_tensor *w, size_t n_tok)
{
	_cleanup_(freep) float *x = new_floats(n_tok * WIDTH);
	const struct gguf_tensor *pointers[N_WEIGHTS];
	float *alone[N_WEIGHTS], *together[N_WEIGHTS];

	for (size_t i = 0; i < N_WEIGHTS; i++) {
		_cleanup_(backend_freep) struct backend *b = new_backend(1);

		pointers[i] = &w[i];
		alone[i] = new_floats(n_tok * w[i].ne[1]);
		together[i] = new_bytes(n_tok * w[i].ne[1] * sizeof(float));
		assert_int_equal(b->ops->matmul(b, &w[i], x, n_tok, alone[i]), 0);
	}
	for (size_t k = 0; k < ARRAY_SIZE(all_threads); k++) {
		_cleanup_(backend_freep) struct backend *b = new_backend(all_threads[k]);

		/* Twice, as what was kept of x is there the second time. */
		for (int round = 0; round < 2; round++) {
			for (size_t i = 0; i < N_WEIGHTS; i++)
				memset(together[i], 0xff, n_tok * w[i].ne[1] * sizeof(float));
			assert_int_equal(
				b->ops->matmul_many(b, pointers, N_WEIGHTS, x, n_tok, together), 0);
			for (size_t i = 0; i < N_WEIGHTS; i++)
				assert_memory_equal(alone[i], together[i],
						    n_tok * w[i].ne[1] * sizeof(float));
		}
		assert_int_equal(b->ops->matmul_many(b, pointers, 0, x, n_tok, together), 0);
	}
	for (size_t i = 0; i < N_WEIGHTS; i++) {
		free(alone[i]);
		free(together[i]);
	}
}

static void test_products(void **state)
{
	struct gguf_tensor w[N_WEIGHTS];

	(void)state;
	seed = 1;
	for (size_t i = 0; i < N_WEIGHTS; i++)
		w[i] = new_matrix(weights[i].type, WIDTH, weights[i].n_rows);
	check_products(w, 1);
	check_products(w, 17);
	check_products(w, 150);
	for (size_t i = 0; i < N_WEIGHTS; i++)
		free((void *)w[i].data);
}

static void test_products_without_scratch(void **state)
{
	struct gguf_tensor w = { 0 };
	const struct gguf_tensor *pointer = &w;
	_cleanup_(freep) float *x = NULL, *y = NULL;
	struct backend *b;

	(void)state;
	seed = 2;
	w = new_matrix(QUANT_Q8_0, WIDTH, 8);
	x = new_floats(16 * WIDTH);
	y = new_floats(16 * 8);
	assert_int_equal(backend_cpu_new(1, 4096, NULL, &b), 0);
	assert_int_equal(b->ops->matmul_many(b, &pointer, 1, x, 16, &y), -ENOMEM);
	assert_int_equal(b->ops->matmul_many(b, &pointer, 1, x, 1, &y), 0);
	b->ops->free(b);
	free((void *)w.data);
}

/* Enough rows for several pieces. */
#define MANY_ROWS 90

static void check_rows(unsigned n_threads, const struct gguf_tensor *w, const float *x)
{
	_cleanup_(backend_freep) struct backend *b = new_backend(n_threads);
	_cleanup_(freep) float *biased = new_bytes(MANY_ROWS * WIDTH * sizeof(float)),
			       *gated = new_bytes(MANY_ROWS * WIDTH * sizeof(float));
	const float *values = w->data;

	memcpy(biased, x, MANY_ROWS * WIDTH * sizeof(float));
	memcpy(gated, x, MANY_ROWS * WIDTH * sizeof(float));
	assert_int_equal(b->ops->add_bias(b, w, biased, MANY_ROWS, WIDTH), 0);
	assert_int_equal(b->ops->scalar_gate(b, w, x, MANY_ROWS, WIDTH, gated, WIDTH), 0);
	for (size_t t = 0; t < MANY_ROWS; t++) {
		double dot = 0;

		for (size_t i = 0; i < WIDTH; i++)
			dot += (double)values[i] * (double)x[t * WIDTH + i];
		for (size_t i = 0; i < WIDTH; i++) {
			double was = (double)x[t * WIDTH + i];

			assert_true(fabs(was + (double)values[i] - (double)biased[t * WIDTH + i]) < 1e-6);
			assert_true(fabs(was / (1 + exp(-dot)) - (double)gated[t * WIDTH + i]) < 1e-5);
		}
	}
}

static void test_rows(void **state)
{
	_cleanup_(freep) float *x = NULL;
	struct gguf_tensor w;

	(void)state;
	seed = 3;
	w = new_matrix(QUANT_F32, WIDTH, 1);
	x = new_floats(MANY_ROWS * WIDTH);
	for (size_t k = 0; k < ARRAY_SIZE(all_threads); k++)
		check_rows(all_threads[k], &w, x);
	free((void *)w.data);
}

/* Two value heads to a key head, as h and h + N_K. */
#define N_K      3
#define N_V      6
#define K_DIM    16
#define V_DIM    24
#define KERNEL   4
#define N_CH     (2 * N_K * K_DIM + N_V * V_DIM)
#define N_STATE  ((KERNEL - 1) * N_CH + N_V * K_DIM * V_DIM)
#define OFFSET   11
#define N_SPANS  3
#define ALL_ROWS 77
#define L2_EPS   1e-6f

static const size_t span_tok[N_SPANS] = { 1, 71, 5 };

struct delta_input {
	float *qkv, *alpha, *beta, *states; /* [N_SPANS][OFFSET + N_STATE] */
	const float *conv, *a, *dt;
};

static double silu(double x)
{
	return x / (1 + exp(-x));
}

static double unit_scale(const double *x)
{
	double sum = 0;

	for (size_t i = 0; i < K_DIM; i++)
		sum += x[i] * x[i];
	return 1 / fmax(sqrt(sum), (double)L2_EPS);
}

/* A sequence in double: conv is the last inputs, S the heads' states. */
struct plain {
	double conv[KERNEL - 1][N_CH], S[N_V][K_DIM][V_DIM];
};

static void plain_head(struct plain *p, const struct delta_input *in, size_t row, size_t head,
		       const double *mixed, double *out)
{
	const double *q = mixed + head % N_K * K_DIM, *k = q + N_K * K_DIM,
		     *v = mixed + 2 * N_K * K_DIM + head * V_DIM;
	double q_scale = unit_scale(q) / sqrt(K_DIM), k_scale = unit_scale(k);
	double g = log1p(exp((double)(in->alpha[row * N_V + head] + in->dt[head]))) *
		   (double)in->a[head];
	double beta = 1 / (1 + exp(-(double)in->beta[row * N_V + head]));

	for (size_t d = 0; d < V_DIM; d++) {
		double predicted = 0, update;

		out[d] = 0;
		for (size_t i = 0; i < K_DIM; i++) {
			p->S[head][i][d] *= exp(g);
			predicted += p->S[head][i][d] * k[i] * k_scale;
		}
		update = (v[d] - predicted) * beta;
		for (size_t i = 0; i < K_DIM; i++) {
			p->S[head][i][d] += k[i] * k_scale * update;
			out[d] += p->S[head][i][d] * q[i] * q_scale;
		}
	}
}

static void plain_row(struct plain *p, const struct delta_input *in, size_t row, double *out)
{
	double mixed[N_CH];

	for (size_t ch = 0; ch < N_CH; ch++) {
		double x = (double)in->qkv[row * N_CH + ch],
		       sum = (double)in->conv[ch * KERNEL + KERNEL - 1] * x;

		for (size_t i = 0; i < KERNEL - 1; i++)
			sum += (double)in->conv[ch * KERNEL + i] * p->conv[i][ch];
		for (size_t i = 0; i + 1 < KERNEL - 1; i++)
			p->conv[i][ch] = p->conv[i + 1][ch];
		p->conv[KERNEL - 2][ch] = x;
		mixed[ch] = silu(sum);
	}
	for (size_t h = 0; h < N_V; h++)
		plain_head(p, in, row, h, mixed, out + h * V_DIM);
}

static void plain_span(const struct delta_input *in, size_t span, size_t row, const float *out)
{
	const float *state = in->states + span * (OFFSET + N_STATE) + OFFSET;
	struct plain p;

	for (size_t i = 0; i < (KERNEL - 1) * N_CH; i++)
		p.conv[i / N_CH][i % N_CH] = (double)state[i];
	state += (KERNEL - 1) * N_CH;
	for (size_t i = 0; i < N_V * K_DIM * V_DIM; i++)
		p.S[i / (K_DIM * V_DIM)][i / V_DIM % K_DIM][i % V_DIM] = (double)state[i];
	for (size_t t = row; t < row + span_tok[span]; t++) {
		double want[N_V * V_DIM];

		plain_row(&p, in, t, want);
		for (size_t i = 0; i < N_V * V_DIM; i++)
			assert_true(fabs(want[i] - (double)out[t * N_V * V_DIM + i]) < 1e-5);
	}
}

static struct gguf_tensor vector(const float *data, size_t n)
{
	return (struct gguf_tensor){ .type = QUANT_F32,
				     .n_dims = 1,
				     .ne = { n, 1, 1, 1 },
				     .bytes = n * sizeof(float),
				     .data = data };
}

/* states are updated. */
static void run_delta(const struct delta_input *in, unsigned n_threads, float *states, float *out)
{
	_cleanup_(backend_freep) struct backend *b = new_backend(n_threads);
	const struct gguf_tensor conv = vector(in->conv, N_CH * KERNEL), a = vector(in->a, N_V),
				 dt = vector(in->dt, N_V);
	const struct backend_delta p = { .n_head_k = N_K,
					 .n_head_v = N_V,
					 .k_dim = K_DIM,
					 .v_dim = V_DIM,
					 .conv_kernel = KERNEL,
					 .conv = &conv,
					 .a = &a,
					 .dt = &dt,
					 .state_offset = OFFSET,
					 .l2_eps = L2_EPS };
	struct backend_span spans[N_SPANS];
	struct backend_batch batch = { .spans = spans, .n_spans = N_SPANS };

	for (size_t s = 0; s < N_SPANS; s++) {
		spans[s] = (struct backend_span){ .row = batch.n_rows,
						  .n_tok = span_tok[s],
						  .recurrent = states + s * (OFFSET + N_STATE) };
		batch.n_rows += span_tok[s];
	}
	assert_int_equal(b->ops->begin(b, &batch), 0);
	assert_int_equal(b->ops->delta(b, &p, in->qkv, in->alpha, in->beta, out), 0);
	assert_int_equal(b->ops->end(b, 0), 0);
}

static void check_delta(const struct delta_input *in)
{
	const size_t n_states = N_SPANS * (OFFSET + N_STATE), n_out = ALL_ROWS * N_V * V_DIM;
	_cleanup_(freep) float *out = new_floats(n_out), *again = new_floats(n_out);
	_cleanup_(freep) float *after = new_bytes(n_states * sizeof(float)),
			       *states = new_bytes(n_states * sizeof(float));
	size_t row = 0;

	for (size_t k = 0; k < ARRAY_SIZE(all_threads); k++) {
		memcpy(states, in->states, n_states * sizeof(float));
		run_delta(in, all_threads[k], states, k == 0 ? out : again);
		if (k == 0) {
			memcpy(after, states, n_states * sizeof(float));
			continue;
		}
		assert_memory_equal(out, again, n_out * sizeof(float));
		assert_memory_equal(after, states, n_states * sizeof(float));
	}
	for (size_t s = 0; s < N_SPANS; s++) {
		plain_span(in, s, row, out);
		row += span_tok[s];
	}
}

static void test_delta(void **state)
{
	_cleanup_(freep) float *qkv = NULL, *alpha = NULL, *beta = NULL, *states = NULL,
			       *conv = NULL, *a = NULL, *dt = NULL;

	(void)state;
	seed = 4;
	qkv = new_floats(ALL_ROWS * N_CH);
	alpha = new_floats(ALL_ROWS * N_V);
	beta = new_floats(ALL_ROWS * N_V);
	states = new_floats(N_SPANS * (OFFSET + N_STATE));
	conv = new_floats(N_CH * KERNEL);
	a = new_floats(N_V);
	dt = new_floats(N_V);
	for (size_t i = 0; i < N_V; i++)
		a[i] = -fabsf(a[i]);
	check_delta(&(struct delta_input){
		.qkv = qkv, .alpha = alpha, .beta = beta, .states = states, .conv = conv, .a = a, .dt = dt });
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_products),
		cmocka_unit_test(test_products_without_scratch),
		cmocka_unit_test(test_rows),
		cmocka_unit_test(test_delta),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
