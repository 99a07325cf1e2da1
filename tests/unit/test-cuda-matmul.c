/* SPDX-License-Identifier: MIT */
/*
 * test-cuda-matmul.c: the CUDA kernels of quantised products against the scalar reference:
 * conversions of activations byte by byte, products of few columns and of tiles, and the two
 * launches of a layer of experts. Runs on what RESIDENTD_CUDA_LIBRARY names, else on the emulator
 * beside this program.
 *
 * Bound: a product is within REL of the sum of the magnitudes of its terms: that is 168 roundings,
 * and the longest chain of additions here has about 100 links. Terms are those of the format, so an
 * offset (dmin) counts by itself. Buffers on the device are as long as their data, and what a
 * kernel is to write begins as not-a-number.
 */
#include "tests/test.h"

#include "kernels/cuda/args.h"
#include "kernels/cuda/driver.h"
#include "tests/emu/library.h"
#include "tests/unit/kernels.h"

#include <float.h>
#include <math.h>

#define REL      1e-5
#define DENORMAL 1e-40 /* what denormal products may lose */

static const struct weight_type {
	enum quant_type type;
	const char *name;
	size_t lengths[4]; /* of rows: one block, three, more than a stage of shared memory */
} types[] = {
	{ QUANT_Q4_K, "q4_k", { 256, 768, 2304 } },  { QUANT_Q5_K, "q5_k", { 256, 768, 2304 } },
	{ QUANT_Q6_K, "q6_k", { 256, 768, 2304 } },  { QUANT_Q8_0, "q8_0", { 32, 96, 2144 } },
	{ QUANT_Q4_0, "q4_0", { 32, 96, 2144 } },    { QUANT_MXFP4, "mxfp4", { 32, 96, 2144 } },
	{ QUANT_F16, "f16", { 1, 100, 256, 2055 } }, { QUANT_BF16, "bf16", { 1, 100, 256, 2055 } },
	{ QUANT_F32, "f32", { 1, 100, 256, 2055 } },
};

/* The device. */

#define BUFFERS_MAX 32

static struct cuda_driver *gpu;
static void *buffers[BUFFERS_MAX];
static size_t n_buffers;

#define GPU_OR_SKIP()                                                                             \
	if (!gpu) {                                                                               \
		skip_because("no emulator was built, and RESIDENTD_CUDA_LIBRARY names no other"); \
		return;                                                                           \
	}

static void assert_done(int r)
{
	if (r < 0)
		fail_msg("%s (%s)", cuda_error(gpu), strerror(-r));
}

/* On the device until buffers_free(): a copy of x, or not-a-numbers. */
static void *put(const void *x, size_t bytes)
{
	void *p;

	assert_true(n_buffers < BUFFERS_MAX);
	assert_done(cuda_alloc(gpu, bytes, &p));
	buffers[n_buffers++] = p;
	if (x)
		assert_done(cuda_upload(gpu, p, x, bytes, NULL));
	else
		assert_done(cuda_fill(gpu, p, 0xff, bytes, NULL));
	return p;
}

/* The caller frees. */
static void *get(const void *p, size_t bytes)
{
	void *x = new_bytes(bytes);

	assert_done(cuda_download(gpu, x, p, bytes, NULL));
	return x;
}

static void buffers_free(void)
{
	while (n_buffers)
		cuda_free(gpu, buffers[--n_buffers]);
}

static void launch(const char *prefix, const char *type, struct cuda_grid grid, const void *args,
		   size_t args_bytes)
{
	struct cuda_function *function;
	char name[64];

	snprintf(name, sizeof(name), "%s%s", prefix, type);
	assert_done(cuda_function(gpu, name, &function));
	assert_done(cuda_launch(gpu, function, grid, NULL, args, args_bytes));
}

static unsigned blocks(size_t n, size_t each)
{
	return (unsigned)((n + each - 1) / each);
}

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
	launch(kernel, "", (struct cuda_grid){ .x = blocks(width, 256), .y = PATTERNS }, &a, sizeof(a));
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
	GPU_OR_SKIP()

	for (size_t i = 0; i < ARRAY_SIZE(widths); i++) {
		check_conversion("cuda_round_f16", QUANT_F16, widths[i]);
		check_conversion("cuda_round_bf16", QUANT_BF16, widths[i]);
		if (widths[i] % QK_0 == 0)
			check_conversion("cuda_quantize_q8_0", QUANT_Q8_0, widths[i]);
		if (widths[i] % QK_K == 0)
			check_conversion("cuda_quantize_q8_k", QUANT_Q8_K, widths[i]);
	}
}

/* Weights: scales as they are in files, or as nobody wants them. */

static uint16_t random_scale(bool hostile)
{
	static const uint16_t scales[] = { 0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff };

	return hostile ? scales[random_u32() % ARRAY_SIZE(scales)]
		       : float_to_f16(random_float() * 0.01f);
}

/* Byte 0 or 255 of a whole field now and then, when hostile. */
static void random_bytes(void *p, size_t n, bool hostile)
{
	uint32_t kind = hostile ? random_u32() % 4 : 3;

	for (size_t i = 0; i < n; i++)
		((uint8_t *)p)[i] = (uint8_t)(kind == 0 ? 0 : kind == 1 ? 255 : random_u32());
}

static void random_block(enum quant_type type, uint8_t *block, bool hostile)
{
	uint16_t d = random_scale(hostile), dmin = random_scale(hostile);
	float f = hostile ? ldexpf(random_float(), (int)(random_u32() % 280) - 200) : random_float();

	random_bytes(block, quant_info(type)->block_bytes, hostile);
	switch (type) {
	case QUANT_Q4_K:
	case QUANT_Q5_K:
		memcpy(block, &d, sizeof(d));
		memcpy(block + sizeof(d), &dmin, sizeof(dmin));
		random_bytes(block + 4, 12, hostile);
		break;
	case QUANT_Q6_K:
		memcpy(block + offsetof(struct block_q6_k, d), &d, sizeof(d));
		random_bytes(block + offsetof(struct block_q6_k, scales), QK_K / 16, hostile);
		break;
	case QUANT_Q8_0:
	case QUANT_Q4_0: memcpy(block, &d, sizeof(d)); break;
	case QUANT_MXFP4:
		block[0] = (uint8_t)(hostile ? random_u32() % (random_u32() % 2 ? 3 : 230)
					     : 115 + random_u32() % 10);
		break;
	case QUANT_F32: memcpy(block, &f, sizeof(f)); break;
	case QUANT_F16:
		d = hostile ? d : float_to_f16(f);
		memcpy(block, &d, sizeof(d));
		break;
	case QUANT_BF16:
		d = float_to_bf16(f);
		memcpy(block, &d, sizeof(d));
		break;
	case QUANT_Q8_K:
	case QUANT_TYPE_MAX: fail_msg("no weights");
	}
}

static uint8_t *new_weights(enum quant_type type, size_t n, size_t n_rows, bool hostile)
{
	size_t each = quant_info(type)->block_bytes, bytes = n_rows * quant_row_bytes(type, n);
	uint8_t *w = new_bytes(bytes);

	for (size_t i = 0; i < bytes; i += each)
		random_block(type, w + i, hostile);
	return w;
}

static uint8_t *new_activations(enum quant_type form, const float *x, size_t n, size_t n_cols)
{
	size_t stride = quant_row_bytes(form, n);
	uint8_t *act = new_bytes(n_cols * stride);

	for (size_t c = 0; c < n_cols; c++)
		cpu_kernels_ref.quantize[form](x + c * n, act + c * stride, n);
	return act;
}

static double activation(enum quant_type form, const uint8_t *act, size_t i)
{
	struct block_q8_k k;
	struct block_q8_0 q;
	uint16_t h;
	float f;

	switch (form) {
	case QUANT_Q8_K:
		memcpy(&k, act + i / QK_K * sizeof(k), sizeof(k));
		return (double)k.d * k.qs[i % QK_K];
	case QUANT_Q8_0:
		memcpy(&q, act + i / QK_0 * sizeof(q), sizeof(q));
		return (double)f16_to_float(q.d) * q.qs[i % QK_0];
	case QUANT_F32: memcpy(&f, act + i * sizeof(f), sizeof(f)); return (double)f;
	default:
		memcpy(&h, act + i * sizeof(h), sizeof(h));
		return (double)(form == QUANT_F16 ? f16_to_float(h) : bf16_to_float(h));
	}
}

/* Sums of the terms' magnitudes, like a product: y[c * n_rows + r]. */
static double *new_magnitudes(enum quant_type type, const uint8_t *w, size_t n, size_t n_rows,
			      const uint8_t *act, size_t n_cols)
{
	enum quant_type form = cpu_act_type(type);
	size_t stride = quant_row_bytes(type, n), act_stride = quant_row_bytes(form, n);
	size_t each = quant_info(type)->block_bytes;
	_cleanup_(freep) float *value = new_floats(n), *scaled = new_floats(n);
	_cleanup_(freep) uint8_t *row = new_bytes(stride);
	double *y = new_bytes(n_rows * n_cols * sizeof(*y));

	for (size_t r = 0; r < n_rows; r++) {
		memcpy(row, w + r * stride, stride);
		cpu_kernels_ref.dequant[type](row, value, n);
		if (type == QUANT_Q4_K || type == QUANT_Q5_K)
			for (size_t i = 0; i < stride; i += each)
				memset(row + i + offsetof(struct block_q4_k, dmin), 0, 2);
		cpu_kernels_ref.dequant[type](row, scaled, n);
		for (size_t c = 0; c < n_cols; c++) {
			double *sum = &y[c * n_rows + r];

			*sum = 0;
			for (size_t i = 0; i < n; i++)
				*sum += (fabs((double)scaled[i]) +
					 fabs((double)scaled[i] - (double)value[i])) *
					fabs(activation(form, act + c * act_stride, i));
		}
	}
	return y;
}

static void assert_near(const char *what, size_t c, size_t r, float got, double want, double bound)
{
	if ((double)got == want || fabs((double)got - want) <= bound + DENORMAL)
		return;
	fail_msg("%s: column %zu, row %zu: %.9g is not within %.3g of %.9g", what, c, r,
		 (double)got, bound, want);
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
					   p->want, n_rows);
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
		launch("cuda_matmul_tiled_", p->type->name,
		       (struct cuda_grid){ .x = blocks(p->n_rows, CUDA_TILE_ROWS),
					   .y = blocks(n_cols, CUDA_TILE_COLS) },
		       &a, sizeof(a));
	else
		launch("cuda_matmul_", p->type->name,
		       (struct cuda_grid){ .x = blocks(p->n_rows, CUDA_ROWS) }, &a, sizeof(a));
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
	GPU_OR_SKIP()

	for (size_t n_cols = 1; n_cols <= CUDA_COLS; n_cols++)
		check_products(n_cols % 3 == 0 ? 17 : 7, n_cols, false, false);
	check_products(1, 1, false, false);
}

static void test_tiled(void **state)
{
	(void)state;
	GPU_OR_SKIP()

	check_products(1, 1, true, false);
	check_products(63, 9, true, false);
	check_products(65, 66, true, false);
}

static void test_hostile_blocks(void **state)
{
	(void)state;
	GPU_OR_SKIP()

	check_products(19, 8, false, true);
	check_products(35, 20, true, true);
}

/* A column's bits do not depend on those beside it, and both forms compute the same product. */
static void test_columns_alone(void **state)
{
	(void)state;
	GPU_OR_SKIP()

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

/* Experts. */

enum { N_EXPERT = 5, N_USED = 3 };

struct layer {
	const struct weight_type *up, *down;
	size_t n_embd, n_ff, n_tok, n_slots;
	uint8_t *gate_up[N_EXPERT], *w_down[N_EXPERT]; /* on the host; gate and up are fused */
	bool absent[N_EXPERT];
	uint8_t *act;
	uint32_t *expert;
	float *weight, *other, *out;
	struct cuda_moe args;
};

static void layer_free(struct layer *l)
{
	buffers_free();
	for (size_t e = 0; e < N_EXPERT; e++) {
		free(l->gate_up[e]);
		free(l->w_down[e]);
	}
	free(l->act);
	free(l->expert);
	free(l->weight);
	free(l->other);
	free(l->out);
}

static void layer_route(struct layer *l)
{
	l->expert = new_bytes(l->n_slots * sizeof(*l->expert));
	l->weight = new_floats(l->n_slots);
	l->other = new_floats(l->n_slots * l->n_embd);
	for (size_t s = 0; s < l->n_slots; s++) {
		l->expert[s] = (random_u32() % N_EXPERT + (uint32_t)(s % N_USED)) % N_EXPERT;
		/* What the CPU has not computed must not be looked at. */
		if (!l->absent[l->expert[s]])
			memset(l->other + s * l->n_embd, 0xff, l->n_embd * sizeof(float));
	}
}

static void layer_put(struct layer *l, uint32_t hidden_rows)
{
	enum quant_type form = cpu_act_type(l->up->type);
	size_t up_stride = quant_row_bytes(l->up->type, l->n_embd);
	size_t down_stride = quant_row_bytes(l->down->type, l->n_ff);
	struct cuda_expert table[N_EXPERT] = { 0 };
	bool all = true;

	for (size_t e = 0; e < N_EXPERT; e++) {
		all &= !l->absent[e];
		if (l->absent[e])
			continue;
		table[e].gate = put(l->gate_up[e], 2 * l->n_ff * up_stride);
		table[e].up = (const uint8_t *)table[e].gate + l->n_ff * up_stride;
		table[e].down = put(l->w_down[e], l->n_embd * down_stride);
	}
	l->args = (struct cuda_moe){
		.experts = put(table, sizeof(table)),
		.expert = put(l->expert, l->n_slots * sizeof(uint32_t)),
		.weight = put(l->weight, l->n_slots * sizeof(float)),
		.act = put(l->act, l->n_tok * quant_row_bytes(form, l->n_embd)),
		.hidden = put(NULL, l->n_slots * l->n_ff * sizeof(float)),
		.other = all ? NULL : put(l->other, l->n_slots * l->n_embd * sizeof(float)),
		.out = put(l->out, l->n_tok * l->n_embd * sizeof(float)),
		.act_stride = quant_row_bytes(form, l->n_embd),
		.up_stride = up_stride,
		.down_stride = down_stride,
		.n_tok = (uint32_t)l->n_tok,
		.n_used = N_USED,
		.n_embd = (uint32_t)l->n_embd,
		.n_ff = (uint32_t)l->n_ff,
		.hidden_act_bytes = (uint32_t)quant_row_bytes(cpu_act_type(l->down->type), l->n_ff),
		.hidden_rows = hidden_rows,
	};
}

/* absent: a bit for each expert. */
static void layer_new(struct layer *l, const struct weight_type *up, const struct weight_type *down,
		      size_t n_tok, unsigned absent, uint32_t hidden_rows)
{
	/* Widths that the blocks of both matrices divide; the float ones are odd. */
	size_t n_embd = quant_info(up->type)->block_elems, n_ff = quant_info(down->type)->block_elems;
	_cleanup_(freep) float *x = NULL;

	*l = (struct layer){ .up = up, .down = down, .n_tok = n_tok, .n_slots = n_tok * N_USED };
	l->n_embd = n_embd == 1 ? 83 : n_embd == 32 ? 96 : 256;
	l->n_ff = n_ff == 1 ? 45 : n_ff == 32 ? 96 : 512;
	x = new_floats(n_tok * l->n_embd);
	l->act = new_activations(cpu_act_type(up->type), x, l->n_embd, n_tok);
	l->out = new_floats(n_tok * l->n_embd);
	for (size_t e = 0; e < N_EXPERT; e++) {
		l->absent[e] = absent >> e & 1;
		l->gate_up[e] = new_weights(up->type, l->n_embd, 2 * l->n_ff, false);
		l->w_down[e] = new_weights(down->type, l->n_ff, l->n_embd, false);
	}
	layer_route(l);
	layer_put(l, hidden_rows);
}

/* hidden as the device made it, against the reference; an absent expert's rows are as they were. */
static void check_hidden(const struct layer *l, size_t slot, const float *hidden)
{
	size_t act_stride = l->args.act_stride, n = 2 * l->n_ff;
	const uint8_t *w = l->gate_up[l->expert[slot]], *act = l->act + slot / N_USED * act_stride;
	_cleanup_(freep) float *y = new_floats(n);
	_cleanup_(freep) double *magnitude = NULL;

	if (l->absent[l->expert[slot]]) {
		for (size_t i = 0; i < l->n_ff; i++)
			assert_true(isnan(hidden[i]));
		return;
	}
	cpu_kernels_ref.matmul[l->up->type](l->n_embd, w, l->args.up_stride, n, act, act_stride, 1,
					    y, n);
	magnitude = new_magnitudes(l->up->type, w, l->n_embd, n, act, 1);
	for (size_t i = 0; i < l->n_ff; i++) {
		double gate = (double)y[i], up = (double)y[l->n_ff + i],
		       silu = gate / (1 + exp(-gate));

		/* The slope of silu is below 1.1; its own roundings are the last term. */
		assert_near("hidden", slot, i, hidden[i], silu * up,
			    REL * (1.1 * fabs(up) * magnitude[i] + fabs(silu) * magnitude[l->n_ff + i]) +
				    16 * U * fabs(silu * up));
	}
}

/*
 * out of one token, from the device's own hidden: an activation that rounds the other way for a
 * difference in the last bit of hidden is not this launch's error.
 */
static void check_out(const struct layer *l, size_t t, const float *hidden, const float *out)
{
	enum quant_type form = cpu_act_type(l->down->type);
	_cleanup_(freep) float *y = new_floats(l->n_embd);
	_cleanup_(freep) double *want = new_bytes(l->n_embd * sizeof(*want)),
				*bound = new_bytes(l->n_embd * sizeof(*bound));

	for (size_t i = 0; i < l->n_embd; i++) {
		want[i] = (double)l->out[t * l->n_embd + i];
		bound[i] = 8 * U * fabs(want[i]);
	}
	for (size_t slot = t * N_USED; slot < (t + 1) * N_USED; slot++) {
		_cleanup_(freep) uint8_t *act = NULL;
		_cleanup_(freep) double *magnitude = NULL;
		const float *part = l->other + slot * l->n_embd;
		double weight = (double)l->weight[slot];

		if (!l->absent[l->expert[slot]]) {
			const uint8_t *w = l->w_down[l->expert[slot]];

			act = new_activations(form, hidden + slot * l->n_ff, l->n_ff, 1);
			cpu_kernels_ref.matmul[l->down->type](l->n_ff, w, l->args.down_stride,
							      l->n_embd, act, 0, 1, y, l->n_embd);
			magnitude = new_magnitudes(l->down->type, w, l->n_ff, l->n_embd, act, 1);
			part = y;
		}
		for (size_t i = 0; i < l->n_embd; i++) {
			want[i] += weight * (double)part[i];
			bound[i] += fabs(weight) *
				    (magnitude ? REL * magnitude[i] : 8 * U * fabs((double)part[i]));
		}
	}
	for (size_t i = 0; i < l->n_embd; i++)
		assert_near(l->down->name, t, i, out[i], want[i], bound[i]);
}

static void check_layer(struct layer *l)
{
	struct cuda_grid up = { .x = blocks(l->n_ff, CUDA_ROWS), .y = (unsigned)l->n_slots };
	struct cuda_grid down = { .x = blocks(l->n_embd, CUDA_ROWS),
				  .y = (unsigned)l->n_tok,
				  .shared_bytes = (l->args.hidden_rows ? l->args.hidden_rows : 1) *
						  l->args.hidden_act_bytes };
	_cleanup_(freep) float *hidden = NULL, *out = NULL;

	launch("cuda_moe_up_", l->up->name, up, &l->args, sizeof(l->args));
	launch("cuda_moe_down_", l->down->name, down, &l->args, sizeof(l->args));
	hidden = get(l->args.hidden, l->n_slots * l->n_ff * sizeof(float));
	out = get(l->args.out, l->n_tok * l->n_embd * sizeof(float));
	for (size_t slot = 0; slot < l->n_slots; slot++)
		check_hidden(l, slot, hidden + slot * l->n_ff);
	for (size_t t = 0; t < l->n_tok; t++)
		check_out(l, t, hidden, out + t * l->n_embd);
	layer_free(l);
}

static void test_experts(void **state)
{
	(void)state;
	GPU_OR_SKIP()

	for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
		struct layer l;

		layer_new(&l, &types[t], &types[t], 1, 0, N_USED);
		check_layer(&l);
		layer_new(&l, &types[t], &types[t], 3, 0x0a, t % (N_USED + 1));
		check_layer(&l);
	}
}

/* Q4_K_M has gate and up in one type and down in another. */
static void test_experts_mixed(void **state)
{
	struct layer l;
	(void)state;
	GPU_OR_SKIP()

	layer_new(&l, &types[0], &types[2], 40, 0x05, 2);
	check_layer(&l);
	layer_new(&l, &types[3], &types[6], 3, 0x12, 0);
	check_layer(&l);
	layer_new(&l, &types[5], &types[3], 40, 0x0c, N_USED);
	check_layer(&l);
}

static void test_experts_all_absent(void **state)
{
	struct layer l;
	(void)state;
	GPU_OR_SKIP()

	layer_new(&l, &types[0], &types[0], 3, 0x1f, N_USED);
	check_layer(&l);
	layer_new(&l, &types[8], &types[8], 40, 0x1f, 0);
	check_layer(&l);
}

static int open_device(void **state)
{
	const char *library = getenv("RESIDENTD_CUDA_LIBRARY") ?: emu_library();
	char *error = NULL;
	(void)state;

	if (library && cuda_open(library, 0, cuda_images, cuda_n_images, &gpu, &error) < 0) {
		print_error("%s: %s\n", library, error);
		free(error);
		return -1;
	}
	return 0;
}

static int close_device(void **state)
{
	(void)state;

	gpu = cuda_close(gpu);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_conversions),   cmocka_unit_test(test_matmul),
		cmocka_unit_test(test_tiled),         cmocka_unit_test(test_hostile_blocks),
		cmocka_unit_test(test_columns_alone), cmocka_unit_test(test_experts),
		cmocka_unit_test(test_experts_mixed), cmocka_unit_test(test_experts_all_absent),
	};

	return cmocka_run_group_tests(tests, open_device, close_device);
}
