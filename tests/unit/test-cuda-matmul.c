/* SPDX-License-Identifier: MIT */
/*
 * test-cuda-matmul.c: the CUDA kernels of quantised products against the scalar reference:
 * conversions of activations byte by byte, products of few columns and of tiles. Bounds are those
 * of weights.h.
 */
#include "tests/test.h"

#include "tests/unit/cuda.h"
#include "tests/unit/weights.h"

#include <float.h>

/* Conversions of activations. */

enum { PATTERNS = 10 };

static void fill_pattern(float *x, size_t n, size_t pattern)
{
	for (size_t i = 0; i < n; i++) {
		float r = random_float();

		switch (pattern) {
		case 1: r = 0.0f; break;
		case 2: r = -0.0f; break;
		case 3: r *= 1e-42f; break; /* denormal: the reciprocal overflows */
		case 4: r *= 1e-36f; break;
		case 5: r *= FLT_MAX; break;
		case 6:
			r = i % 7 == 3 ? -2.5f : i % 5 == 4 ? 2.5f : r;
			break; /* which is first decides */
		case 7: r = i == n - 1 ? -3.0f : i == n / 2 ? 3.0f : 0.0f; break;
		case 8: r = i % 100 == 17 ? INFINITY : r; break;
		case 9: r = (float)(int)(r * 254.0f) / 2.0f; break; /* ties */
		default: break;
		}
		x[i] = r;
	}
}

static void check_conversion(const char *kernel, enum quant_type form, size_t width)
{
	size_t bytes = quant_row_bytes(form, width), stride = (bytes + 19) / 4 * 4;
	_cleanup_(freep) float *x = new_floats(PATTERNS * width);
	_cleanup_(freep) uint8_t *got = NULL, *want = new_bytes(PATTERNS * stride);
	struct cuda_quantize a = { .n_rows = PATTERNS, .width = (uint32_t)width, .act_stride = stride };

	memset(want, 0xff, PATTERNS * stride);
	for (size_t r = 0; r < PATTERNS; r++) {
		fill_pattern(x + r * width, width, r);
		cpu_kernels_ref.quantize[form](x + r * width, want + r * stride, width);
	}
	a.x = put(x, PATTERNS * width * sizeof(*x));
	a.act = put(NULL, PATTERNS * stride);
	LAUNCH(kernel, a, blocks(width, 256), PATTERNS);
	got = get(a.act, PATTERNS * stride);
	for (size_t i = 0; i < PATTERNS * stride; i++)
		if (got[i] != want[i])
			fail_msg("%s: width %zu, pattern %zu: byte %zu is %#x, not %#x", kernel,
				 width, i / stride, i % stride, got[i], want[i]);
	buffers_free();
}

static void test_conversions(void **state)
{
	static const size_t widths[] = { 1, 32, 96, 100, 256, 288, 300, 2304 };
	(void)state;
	GPU_OR_SKIP();

	for (size_t i = 0; i < ARRAY_SIZE(widths); i++) {
		check_conversion("cuda_round_f16", QUANT_F16, widths[i]);
		check_conversion("cuda_round_bf16", QUANT_BF16, widths[i]);
		if (widths[i] % QK_0 == 0)
			check_conversion("cuda_quantize_q8_0", QUANT_Q8_0, widths[i]);
		if (widths[i] % QK_K == 0)
			check_conversion("cuda_quantize_q8_k", QUANT_Q8_K, widths[i]);
	}
}

/* Products. */

struct product {
	const struct weight_type *type;
	size_t n, n_rows, n_cols;
	uint8_t *w, *act;
	float *want;
	double *magnitude;
	struct cuda_matmul args;
};

static void product_free(struct product *p)
{
	buffers_free();
	free(p->w);
	free(p->act);
	free(p->want);
	free(p->magnitude);
}

static void product_new(struct product *p, const struct weight_type *type, size_t n, size_t n_rows,
			size_t n_cols, bool hostile)
{
	enum quant_type form = cpu_act_type(type->type);
	size_t stride = quant_row_bytes(type->type, n), act_stride = quant_row_bytes(form, n);
	_cleanup_(freep) float *x = new_floats(n * n_cols);

	if (hostile)
		for (size_t c = 0; c < n_cols; c++)
			fill_pattern(x + c * n, n, c % 8 == 5 ? 0 : c % 8);
	*p = (struct product){ .type = type, .n = n, .n_rows = n_rows, .n_cols = n_cols };
	p->w = new_weights(type->type, n, n_rows, hostile);
	p->act = new_activations(form, x, n, n_cols);
	p->want = new_floats(n_rows * n_cols);
	cpu_kernels_ref.matmul[type->type](n, p->w, stride, n_rows, p->act, act_stride, n_cols,
					   p->want, n_rows, NULL);
	p->magnitude = new_magnitudes(type->type, p->w, n, n_rows, p->act, n_cols);
	p->args = (struct cuda_matmul){ .w = put(p->w, n_rows * stride),
					.act = put(p->act, n_cols * act_stride),
					.w_stride = stride,
					.act_stride = act_stride,
					.y_stride = n_rows + 3,
					.n = (uint32_t)n,
					.n_rows = (uint32_t)n_rows,
					.n_cols = (uint32_t)n_cols };
}

/* n_cols columns from the first one on; the caller frees. Between columns nothing is written. */
static float *product_run(struct product *p, bool tiled, size_t first, size_t n_cols)
{
	size_t bytes = n_cols * p->args.y_stride * sizeof(float);
	struct cuda_matmul a = p->args;
	float *y;

	a.act = (const uint8_t *)a.act + first * a.act_stride;
	a.n_cols = (uint32_t)n_cols;
	a.y = put(NULL, bytes);
	if (tiled)
		LAUNCH_TYPE("cuda_matmul_tiled_", p->type->name, a,
			    blocks(p->n_rows, CUDA_TILE_ROWS), blocks(n_cols, CUDA_TILE_COLS));
	else
		LAUNCH_TYPE("cuda_matmul_", p->type->name, a, blocks(p->n_rows, CUDA_ROWS));
	y = get(a.y, bytes);
	for (size_t c = 0; c < n_cols; c++)
		for (size_t r = p->n_rows; r < a.y_stride; r++)
			assert_true(isnan(y[c * a.y_stride + r]));
	cuda_free(gpu, buffers[--n_buffers]);
	return y;
}

static void product_check(struct product *p, bool tiled)
{
	_cleanup_(freep) float *y = product_run(p, tiled, 0, p->n_cols);
	char what[64];

	snprintf(what, sizeof(what), "%s%s of %zu x %zu", tiled ? "tiled " : "", p->type->name,
		 p->n, p->n_rows);
	for (size_t c = 0; c < p->n_cols; c++)
		for (size_t r = 0; r < p->n_rows; r++)
			assert_near(what, c, r, y[c * p->args.y_stride + r],
				    (double)p->want[c * p->n_rows + r],
				    REL * p->magnitude[c * p->n_rows + r]);
}

static void check_products(size_t n_rows, size_t n_cols, bool tiled, bool hostile)
{
	for (size_t t = 0; t < ARRAY_SIZE(types); t++)
		for (size_t i = 0; i < ARRAY_SIZE(types[t].lengths) && types[t].lengths[i]; i++) {
			struct product p;

			product_new(&p, &types[t], types[t].lengths[i], n_rows, n_cols, hostile);
			product_check(&p, tiled);
			product_free(&p);
		}
}

static void test_matmul(void **state)
{
	(void)state;
	GPU_OR_SKIP();

	for (size_t n_cols = 1; n_cols <= CUDA_COLS; n_cols++)
		check_products(n_cols % 3 == 0 ? 17 : 7, n_cols, false, false);
	check_products(1, 1, false, false);
}

static void test_tiled(void **state)
{
	(void)state;
	GPU_OR_SKIP();

	check_products(1, 1, true, false);
	check_products(63, 9, true, false);
	check_products(65, 66, true, false);
}

static void test_hostile_blocks(void **state)
{
	(void)state;
	GPU_OR_SKIP();

	check_products(19, 8, false, true);
	check_products(35, 20, true, true);
}

/* A column's bits do not depend on those beside it, and both forms compute the same product. */
static void test_columns_alone(void **state)
{
	(void)state;
	GPU_OR_SKIP();

	for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
		_cleanup_(freep) float *few = NULL, *many = NULL;
		size_t n = types[t].lengths[2], n_rows = 21, bytes = n_rows * sizeof(float);
		struct product p;

		product_new(&p, &types[t], n, n_rows, CUDA_COLS, false);
		few = product_run(&p, false, 0, CUDA_COLS);
		many = product_run(&p, true, 0, CUDA_COLS);
		for (size_t c = 0; c < CUDA_COLS; c += 3) {
			_cleanup_(freep) float *one = product_run(&p, false, c, 1),
					       *one_tiled = product_run(&p, true, c, 1);

			assert_memory_equal(one, few + c * p.args.y_stride, bytes);
			assert_memory_equal(one_tiled, many + c * p.args.y_stride, bytes);
			for (size_t r = 0; r < n_rows; r++)
				assert_near(types[t].name, c, r, one_tiled[r], (double)one[r],
					    REL * p.magnitude[c * n_rows + r]);
		}
		product_free(&p);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_conversions),   cmocka_unit_test(test_matmul),
		cmocka_unit_test(test_tiled),         cmocka_unit_test(test_hostile_blocks),
		cmocka_unit_test(test_columns_alone),
	};

	return cmocka_run_group_tests(tests, open_device, close_device);
}
