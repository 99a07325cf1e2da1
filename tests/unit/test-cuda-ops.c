/* SPDX-License-Identifier: MIT */
/*
 * test-cuda-ops.c: the CUDA kernels that are no matrix products, against the scalar reference:
 * norms, gates, rope, attention by pages, the delta net, choices, copies.
 *
 * Bounds: U is one rounding (kernels.h); a block's sum of n products is a chain of n / 256 and 13
 * additions more, and an exponential is off by 4 * U at most on a card.
 */
#include "tests/test.h"

#include "tests/unit/cuda.h"
#include "tests/unit/kernels.h"

#include <math.h>

/* Both not-a-number is as good as equal; equal covers infinities. */
#define assert_close(got, want, bound)                                                         \
	do {                                                                                   \
		double got_ = (double)(got), want_ = (double)(want), bound_ = (double)(bound); \
		if (got_ == want_ || (isnan(got_) && isnan(want_)))                            \
			break;                                                                 \
		if (!(fabs(got_ - want_) <= bound_))                                           \
			fail_msg("%s:%d: %.9g is not within %.3g of %.9g", __func__, __LINE__, \
				 got_, bound_, want_);                                         \
	} while (0)

static double magnitude(float x)
{
	return fabs((double)x);
}

/* Norms, sums, gates. */

static void check_rms_norm(size_t n_rows, size_t width, bool weights, bool in_place)
{
	_cleanup_(freep) float *x = new_floats(n_rows * width), *w = new_floats(width), *y = NULL,
			       *want = new_floats(width);
	struct cuda_norm a = { .x = put_floats(x, n_rows * width),
			       .w = weights ? put_floats(w, width) : NULL,
			       .n_rows = (uint32_t)n_rows,
			       .width = (uint32_t)width,
			       .eps = 1e-6f };

	a.y = in_place ? (float *)a.x : put_floats(NULL, n_rows * width);
	LAUNCH("cuda_rms_norm", a, (unsigned)n_rows);
	y = get_floats(a.y, n_rows * width);
	for (size_t r = 0; r < n_rows; r++) {
		cpu_kernels_ref.rms_norm(x + r * width, weights ? w : NULL, 1e-6f, want, width);
		for (size_t i = 0; i < width; i++)
			assert_close(y[r * width + i], want[i], 24 * U * magnitude(want[i]));
	}
	buffers_free();
}

static void test_rms_norm(void **state)
{
	static const size_t widths[] = { 1, 5, 32, 64, 128, 255, 256, 257, 2048 };
	(void)state;

	GPU_OR_SKIP();
	seed = 1;
	for (size_t i = 0; i < ARRAY_SIZE(widths); i++)
		for (unsigned how = 0; how < 4; how++)
			check_rms_norm(i % 2 ? 1 : 33, widths[i], how & 1, how & 2);
}

static const float extremes[] = { 0,    -0.0f, 1e-30f, -1e-30f, 88,       -88,       104,
				  -104, 1e30f, -1e30f, NAN,     INFINITY, -INFINITY, 0.5f };

static void check_flat(size_t n)
{
	_cleanup_(freep) float *a = new_floats(n), *b = new_floats(n), *want = new_floats(n),
			       *y = NULL, *z = NULL, *sum = NULL, *gated = NULL;
	struct cuda_flat f = { .n = n };
	unsigned grid = blocks(n, CUDA_THREADS);

	for (size_t i = 0; i < n; i++)
		a[i] = i < ARRAY_SIZE(extremes) && n > 1 ? extremes[i] : a[i] * 20;
	f.a = put_floats(a, n);
	f.b = put_floats(b, n);
	f.y = put_floats(NULL, n);
	LAUNCH("cuda_silu_mul", f, grid);
	y = get_floats(f.y, n);
	f.y = put_floats(a, n); /* in place */
	f.a = f.y;
	LAUNCH("cuda_silu_mul", f, grid);
	z = get_floats(f.y, n);
	cpu_kernels_ref.silu_mul(a, b, want, n);
	for (size_t i = 0; i < n; i++) {
		assert_close(y[i], want[i], 12 * U * magnitude(want[i]) + 0x1p-126);
		assert_close(z[i], y[i], 0);
	}

	f = (struct cuda_flat){ .a = put_floats(a, n), .y = put_floats(b, n), .n = n };
	LAUNCH("cuda_add", f, grid);
	sum = get_floats(f.y, n);
	f.y = put_floats(b, n);
	LAUNCH("cuda_sigmoid_mul", f, grid);
	gated = get_floats(f.y, n);
	memcpy(want, b, n * sizeof(*b));
	cpu_kernels_ref.sigmoid_mul(want, a, n);
	for (size_t i = 0; i < n; i++) {
		assert_close(sum[i], b[i] + a[i], 0);
		assert_close(gated[i], want[i], 12 * U * magnitude(want[i]) + 0x1p-126);
	}
	buffers_free();
}

static void test_flat(void **state)
{
	static const size_t n[] = { 1, 255, 256, 257, 5000 };
	(void)state;

	GPU_OR_SKIP();
	seed = 2;
	for (size_t i = 0; i < ARRAY_SIZE(n); i++)
		check_flat(n[i]);
}

static void check_copy_rows(size_t n_rows, size_t width, size_t stride, unsigned grid_y)
{
	_cleanup_(freep) float *x = new_floats((n_rows - 1) * stride + width), *y = NULL;
	struct cuda_copy_rows a = { .x = put_floats(x, (n_rows - 1) * stride + width),
				    .y = put_floats(NULL, n_rows * width),
				    .x_stride = stride,
				    .n_rows = (uint32_t)n_rows,
				    .width = (uint32_t)width };

	LAUNCH("cuda_copy_rows", a, blocks(width, CUDA_THREADS), grid_y);
	y = get_floats(a.y, n_rows * width);
	for (size_t r = 0; r < n_rows; r++)
		assert_memory_equal(y + r * width, x + r * stride, width * sizeof(*x));
	buffers_free();
}

static void test_copy_rows(void **state)
{
	(void)state;

	GPU_OR_SKIP();
	seed = 3;
	check_copy_rows(1, 1, 1, 1);
	check_copy_rows(33, 300, 700, 33);
	check_copy_rows(33, 256, 512, 4); /* more rows than the grid has */
	check_copy_rows(5, 7, 7, 5);
}

static void check_scalar_gate(size_t n_tok, size_t width, size_t x_width)
{
	_cleanup_(freep) float *w = new_floats(width), *in = new_floats(n_tok * width),
			       *x = new_floats(n_tok * x_width), *y = NULL;
	struct cuda_scalar_gate a = { .w = put_floats(w, width),
				      .in = put_floats(in, n_tok * width),
				      .x = put_floats(x, n_tok * x_width),
				      .n_tok = (uint32_t)n_tok,
				      .width = (uint32_t)width,
				      .x_width = (uint32_t)x_width };

	LAUNCH("cuda_scalar_gate", a, (unsigned)n_tok);
	y = get_floats(a.x, n_tok * x_width);
	for (size_t t = 0; t < n_tok; t++) {
		double dot = 0, sum = 0, gate;

		for (size_t i = 0; i < width; i++) {
			dot += (double)w[i] * (double)in[t * width + i];
			sum += fabs((double)w[i] * (double)in[t * width + i]);
		}
		gate = 1 / (1 + exp(-dot));
		for (size_t i = 0; i < x_width; i++) {
			double want = (double)x[t * x_width + i] * gate;

			/* The gate's relative error is at most its argument's error. */
			assert_close(y[t * x_width + i], want,
				     fabs(want) * U * (12 + sum * (14 + (double)width / 256)));
		}
	}
	buffers_free();
}

static void test_scalar_gate(void **state)
{
	(void)state;

	GPU_OR_SKIP();
	seed = 4;
	check_scalar_gate(1, 2048, 2048);
	check_scalar_gate(33, 64, 64);
	check_scalar_gate(3, 7, 300);
}

/* Rope. */

static void check_rope(size_t n_head, size_t dim, size_t n_rot, double base)
{
	static const uint32_t positions[] = { 0, 1, 31, 32, 33, 1000, 4097, 262143 };
	size_t n_rows = ARRAY_SIZE(positions), stride = n_head * dim + 3, n = n_rows * stride;
	_cleanup_(freep) float *x = new_floats(n), *freq = new_floats(n_rot / 2),
			       *cs = new_floats(n_rot), *y = NULL;
	struct cuda_rope a = { .stride = stride,
			       .n_head = (uint32_t)n_head,
			       .dim = (uint32_t)dim,
			       .n_rot = (uint32_t)n_rot,
			       .n_rows = (uint32_t)n_rows };

	for (size_t k = 0; k < n_rot / 2; k++)
		freq[k] = (float)pow(base, -2.0 * (double)k / (double)n_rot);
	a.x = put_floats(x, n);
	a.positions = put(positions, sizeof(positions));
	a.freq = put_floats(freq, n_rot / 2);
	LAUNCH("cuda_rope", a, (unsigned)n_head, (unsigned)n_rows);
	y = get_floats(a.x, n);
	for (size_t r = 0; r < n_rows; r++) {
		float *row = x + r * stride;

		for (size_t k = 0; k < n_rot / 2; k++) {
			double angle = (double)((float)positions[r] * freq[k]);

			cs[2 * k] = (float)cos(angle);
			cs[2 * k + 1] = (float)sin(angle);
		}
		for (size_t h = 0; h < n_head; h++)
			cpu_kernels_ref.rope_neox(row + h * dim, cs, n_rot);
		for (size_t i = 0; i < stride; i++) {
			bool turned = i < n_head * dim && i % dim < n_rot;

			/* |x| < 1; two products with a sine that is off by 2 * U */
			assert_close(y[r * stride + i], row[i], turned ? 8 * U : 0);
		}
	}
	buffers_free();
}

static void test_rope(void **state)
{
	(void)state;

	GPU_OR_SKIP();
	seed = 5;
	check_rope(16, 256, 64, 1e7);
	check_rope(2, 256, 64, 1e4);
	check_rope(4, 64, 16, 1e4);
	check_rope(2, 128, 128, 5e5);
	check_rope(3, 10, 6, 1e4);
	check_rope(1, 2, 2, 1e4);
}

/* Attention. */

#define PAGE_TOK 32
#define SPANS    5

struct kv_shape {
	uint32_t n_head, n_head_kv, k_dim, v_dim;
	float scale;
	struct {
		uint32_t n_tok, pos;
	} spans[SPANS];
};

/* An arena of two layers, of which the second is used, and what the kernels are told about it. */
struct kv_test {
	const struct kv_shape *shape;
	struct cuda_attention a;
	struct cuda_span spans[SPANS];
	uint32_t *pages[SPANS], *span_of_row; /* in host memory */
	unsigned char *arena;
	size_t n_spans, n_rows, n_pages, elem;
};

static unsigned char *kv_at(const struct kv_test *t, size_t span, size_t pos, uint32_t head, bool value)
{
	const struct cuda_attention *a = &t->a;
	size_t dim = value ? a->v_dim : a->k_dim;

	return t->arena + t->pages[span][pos / PAGE_TOK] * a->page_bytes + a->layer_offset +
	       (value ? a->n_head_kv * a->k_bytes + head * a->v_bytes : head * a->k_bytes) +
	       pos % PAGE_TOK * dim * t->elem;
}

static void kv_write(const struct kv_test *t, unsigned char *at, const float *x, size_t dim)
{
	cpu_kernels_ref.quantize[t->a.f16 ? QUANT_F16 : QUANT_F32](x, at, dim);
}

/* Each sequence's pages are some of the arena's in random order, none of them shared. */
static void kv_tables(struct kv_test *t)
{
	size_t n_free = 1, taken = 0;
	_cleanup_(freep) uint32_t *order = NULL;

	for (t->n_spans = 0; t->n_spans < SPANS && t->shape->spans[t->n_spans].n_tok; t->n_spans++)
		n_free += blocks(t->shape->spans[t->n_spans].pos + t->shape->spans[t->n_spans].n_tok,
				 PAGE_TOK);
	t->n_pages = n_free;
	order = new_bytes(n_free * sizeof(*order));
	for (uint32_t i = 0; i < n_free; i++) {
		size_t at = random_u32() % (i + 1);

		order[i] = order[at];
		order[at] = i;
	}
	for (size_t s = 0; s < t->n_spans; s++) {
		uint32_t pos = t->shape->spans[s].pos, n_tok = t->shape->spans[s].n_tok;
		uint32_t n = blocks(pos + n_tok, PAGE_TOK);

		t->spans[s] = (struct cuda_span){
			.row = (uint32_t)t->n_rows, .n_tok = n_tok, .pos = pos, .n_pages = n
		};
		t->pages[s] = memcpy(new_bytes(n * sizeof(*order)), order + taken, n * sizeof(*order));
		t->spans[s].pages = put(t->pages[s], n * sizeof(*order));
		taken += n;
		t->n_rows += n_tok;
	}
	t->span_of_row = new_bytes(t->n_rows * sizeof(uint32_t));
	for (size_t s = 0; s < t->n_spans; s++)
		for (size_t i = 0; i < t->spans[s].n_tok; i++)
			t->span_of_row[t->spans[s].row + i] = (uint32_t)s;
}

static void kv_make(struct kv_test *t, const struct kv_shape *shape, bool f16)
{
	struct cuda_attention *a = &t->a;
	_cleanup_(freep) float *x = NULL;

	*t = (struct kv_test){ .shape = shape, .elem = f16 ? 2 : 4 };
	*a = (struct cuda_attention){ .page_tok = PAGE_TOK,
				      .n_head = shape->n_head,
				      .n_head_kv = shape->n_head_kv,
				      .k_dim = shape->k_dim,
				      .v_dim = shape->v_dim,
				      .k_bytes = PAGE_TOK * shape->k_dim * t->elem,
				      .v_bytes = PAGE_TOK * shape->v_dim * t->elem,
				      .f16 = f16,
				      .n_split = 1,
				      .scale = shape->scale };
	a->layer_offset = shape->n_head_kv * (a->k_bytes + a->v_bytes);
	a->page_bytes = 2 * a->layer_offset;
	kv_tables(t);
	a->n_rows = (uint32_t)t->n_rows;
	t->arena = new_bytes(t->n_pages * a->page_bytes);
	memset(t->arena, 0xff, t->n_pages * a->page_bytes); /* not-a-number in both types */
	for (size_t s = 0; s < t->n_spans; s++)
		for (size_t pos = 0; pos < t->spans[s].pos; pos++)
			for (uint32_t h = 0; h < a->n_head_kv; h++)
				for (int value = 0; value < 2; value++) {
					size_t dim = value ? a->v_dim : a->k_dim;

					x = new_floats(dim);
					kv_write(t, kv_at(t, s, pos, h, value), x, dim);
					free(x);
					x = NULL;
				}
}

static void kv_done(struct kv_test *t)
{
	for (size_t s = 0; s < t->n_spans; s++)
		free(t->pages[s]);
	free(t->span_of_row);
	free(t->arena);
	buffers_free();
}

/* Stores the rows here and on the device: all bytes of the arena must be the same, those not written too. */
static void check_store(struct kv_test *t)
{
	struct cuda_attention *a = &t->a;
	size_t n_k = t->n_rows * a->n_head_kv * a->k_dim, n_v = t->n_rows * a->n_head_kv * a->v_dim;
	_cleanup_(freep) float *k = new_floats(n_k), *v = new_floats(n_v);
	_cleanup_(freep) unsigned char *stored = NULL;

	a->k = put_floats(k, n_k);
	a->v = put_floats(v, n_v);
	a->spans = put(t->spans, t->n_spans * sizeof(*t->spans));
	a->span_of_row = put(t->span_of_row, t->n_rows * sizeof(*t->span_of_row));
	a->base = put(t->arena, t->n_pages * a->page_bytes);
	LAUNCH("cuda_kv_store", *a, a->n_head_kv, a->n_rows);
	for (size_t row = 0; row < t->n_rows; row++) {
		size_t s = t->span_of_row[row], pos = t->spans[s].pos + row - t->spans[s].row;

		for (uint32_t h = 0; h < a->n_head_kv; h++) {
			size_t at = row * a->n_head_kv + h;

			kv_write(t, kv_at(t, s, pos, h, false), k + at * a->k_dim, a->k_dim);
			kv_write(t, kv_at(t, s, pos, h, true), v + at * a->v_dim, a->v_dim);
		}
	}
	stored = get(a->base, t->n_pages * a->page_bytes);
	assert_memory_equal(stored, t->arena, t->n_pages * a->page_bytes);
}

/* One query by the reference. */
static void attend_ref(const float *q, const void *const *k, const void *const *v, size_t page_tok,
		       size_t n_kv, size_t k_dim, size_t v_dim, bool f16, float scale, float *out)
{
	cpu_kernels_ref.attention(&(struct cpu_attention){ .q = q,
							   .out = out,
							   .n_rows = 1,
							   .n_q = 1,
							   .k_pages = k,
							   .v_pages = v,
							   .page_tok = page_tok,
							   .k_dim = k_dim,
							   .v_dim = v_dim,
							   .pos = n_kv - 1,
							   .kv_f16 = f16,
							   .scale = scale });
}

/* |values| < 1, so the bound is 1e-5 of their range. */
static void check_rows(const struct kv_test *t, const float *q, const float *out)
{
	const struct cuda_attention *a = &t->a;

	for (size_t row = 0; row < t->n_rows; row++) {
		size_t s = t->span_of_row[row], n_kv = t->spans[s].pos + row - t->spans[s].row + 1;
		size_t n = blocks(n_kv, PAGE_TOK);
		_cleanup_(freep) const void **k = new_bytes(n * sizeof(*k)),
					    **v = new_bytes(n * sizeof(*v));
		_cleanup_(freep) float *want = new_floats(a->v_dim);

		for (uint32_t h = 0; h < a->n_head; h++) {
			for (size_t p = 0; p < n; p++) {
				k[p] = kv_at(t, s, p * PAGE_TOK, h / (a->n_head / a->n_head_kv), false);
				v[p] = kv_at(t, s, p * PAGE_TOK, h / (a->n_head / a->n_head_kv), true);
			}
			attend_ref(q + (row * a->n_head + h) * a->k_dim, k, v, PAGE_TOK, n_kv,
				   a->k_dim, a->v_dim, a->f16, a->scale, want);
			for (size_t i = 0; i < a->v_dim; i++)
				assert_close(out[(row * a->n_head + h) * a->v_dim + i], want[i], 2e-5);
		}
	}
}

static void check_attention(const struct kv_shape *shape, bool f16, uint32_t n_split)
{
	struct kv_test t;
	struct cuda_attention *a = &t.a;
	_cleanup_(freep) float *q = NULL, *out = NULL, *again = NULL;
	size_t n_out;

	kv_make(&t, shape, f16);
	check_store(&t);
	n_out = t.n_rows * a->n_head * a->v_dim;
	q = new_floats(t.n_rows * a->n_head * a->k_dim);
	a->q = put_floats(q, t.n_rows * a->n_head * a->k_dim);
	a->n_split = n_split;
	if (n_split > 1)
		a->partial = put_floats(NULL, t.n_rows * a->n_head * n_split * (a->v_dim + 2));
	a->out = put_floats(NULL, n_out);
	LAUNCH("cuda_attention_rows", *a, a->n_head_kv, a->n_rows, n_split);
	if (n_split > 1)
		LAUNCH("cuda_attention_join", *a, a->n_head, a->n_rows);
	out = get_floats(a->out, n_out);
	check_rows(&t, q, out);

	a->out = put_floats(NULL, n_out);
	LAUNCH("cuda_attention_rows", *a, a->n_head_kv, a->n_rows, n_split);
	if (n_split > 1)
		LAUNCH("cuda_attention_join", *a, a->n_head, a->n_rows);
	again = get_floats(a->out, n_out);
	assert_memory_equal(again, out, n_out * sizeof(*out));
	kv_done(&t);
}

static void test_attention(void **state)
{
	static const struct kv_shape shapes[] = {
		{ 16, 2, 256, 256, 0.0625f, { { 33, 0 }, { 2, 31 }, { 1, 100 } } },
		{ 4, 2, 64, 64, 0.5f, { { 1, 0 }, { 31, 1 }, { 32, 31 }, { 33, 40 }, { 100, 32 } } },
		{ 32, 4, 128, 128, 0.5f, { { 3, 62 }, { 1, 0 } } },
		{ 3, 3, 16, 16, 4, { { 33, 0 }, { 1, 64 } } },
		{ 5, 1, 80, 96, 1, { { 2, 30 }, { 1, 31 } } },
		{ 16, 1, 20, 13, 2, { { 2, 31 }, { 1, 32 } } }, /* two times eight heads */
		{ 17, 1, 130, 255, 1, { { 1, 33 }, { 2, 63 } } }, /* and one more; a panel of two dimensions */
		{ 1, 1, 1, 1, 1, { { 1, 0 }, { 2, 31 } } },
	};
	(void)state;

	GPU_OR_SKIP();
	seed = 6;
	for (size_t i = 0; i < ARRAY_SIZE(shapes); i++)
		for (int f16 = 0; f16 < 2; f16++) {
			check_attention(&shapes[i], f16, 1);
			/* More splits than the short ones have tiles: some are empty. */
			check_attention(&shapes[i], f16, 3);
		}
}

/*
 * The longest sequence: its table names few pages many times, as nothing forbids. Other pages come
 * later, so that the maximum moves.
 */
static void test_attention_long(void **state)
{
	enum { DIM = 16, N_KV = 262144, PAGES = 37, HEADS = 2 };
	static uint32_t pages[N_KV / PAGE_TOK];
	static const void *k[ARRAY_SIZE(pages)], *v[ARRAY_SIZE(pages)];
	const uint32_t row_span = 0;
	struct cuda_attention a = { .page_tok = PAGE_TOK,
				    .n_head = HEADS,
				    .n_head_kv = 1,
				    .k_dim = DIM,
				    .v_dim = DIM,
				    .n_rows = 1,
				    .k_bytes = PAGE_TOK * DIM * 4,
				    .v_bytes = PAGE_TOK * DIM * 4,
				    .page_bytes = PAGE_TOK * DIM * 8,
				    .scale = 2 };
	_cleanup_(freep) float *arena = NULL, *q = NULL;
	struct cuda_span span = { .n_tok = 1, .pos = N_KV - 1, .n_pages = ARRAY_SIZE(pages) };
	(void)state;

	GPU_OR_SKIP();
	seed = 7;
	arena = new_floats(PAGES * PAGE_TOK * DIM * 2);
	q = new_floats(HEADS * DIM);
	for (size_t p = 0; p < ARRAY_SIZE(pages); p++) {
		pages[p] = random_u32() % (uint32_t)(1 + p * (PAGES - 1) / ARRAY_SIZE(pages));
		k[p] = arena + pages[p] * PAGE_TOK * DIM * 2;
		v[p] = (const float *)k[p] + PAGE_TOK * DIM;
	}
	a.base = put_floats(arena, PAGES * PAGE_TOK * DIM * 2);
	span.pages = put(pages, sizeof(pages));
	a.spans = put(&span, sizeof(span));
	a.span_of_row = put(&row_span, sizeof(row_span));
	a.q = put_floats(q, HEADS * DIM);
	a.partial = put_floats(NULL, HEADS * 16 * (DIM + 2));
	for (uint32_t n_split = 1; n_split <= 16; n_split *= 16) {
		_cleanup_(freep) float *out = NULL, *want = new_floats(DIM);
		struct cuda_attention b = a;

		b.n_split = n_split;
		b.out = put_floats(NULL, HEADS * DIM);
		if (n_split == 1)
			b.partial = NULL;
		LAUNCH("cuda_attention_rows", b, 1, 1, n_split);
		if (n_split > 1)
			LAUNCH("cuda_attention_join", b, HEADS, 1);
		out = get_floats(b.out, HEADS * DIM);
		for (size_t h = 0; h < HEADS; h++) {
			attend_ref(q + h * DIM, k, v, PAGE_TOK, N_KV, DIM, DIM, false, 2, want);
			for (size_t i = 0; i < DIM; i++)
				assert_close(out[h * DIM + i], want[i], 2e-5);
		}
	}
	buffers_free();
}

/*
 * Infinite scores: a first tile of nothing but -infinity counts for nothing; nothing but -infinity
 * at all is not-a-number, and so is a +infinity.
 */
static void test_attention_infinite(void **state)
{
	enum { N_KV = 40 };
	const uint32_t pages[] = { 1, 0 }, row_span = 0;
	struct cuda_attention a = { .page_tok = PAGE_TOK,
				    .n_head = 1,
				    .n_head_kv = 1,
				    .k_dim = 1,
				    .v_dim = 1,
				    .n_rows = 1,
				    .k_bytes = PAGE_TOK * 4,
				    .v_bytes = PAGE_TOK * 4,
				    .page_bytes = PAGE_TOK * 8,
				    .n_split = 1,
				    .scale = 1 };
	static const struct {
		float first, then, at_5;
	} cases[] = {
		{ -INFINITY, 1, -INFINITY }, { -INFINITY, -INFINITY, -INFINITY },
		{ 1, 1, INFINITY },          { 1, 1, NAN },
		{ 1, -INFINITY, 1 },
	};
	struct cuda_span span = { .n_tok = 1, .pos = N_KV - 1, .n_pages = 2 };
	(void)state;

	GPU_OR_SKIP();
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		float arena[2][2][PAGE_TOK], q = 1, want;
		const void *k[] = { arena[1][0], arena[0][0] }, *v[] = { arena[1][1], arena[0][1] };

		for (size_t t = 0; t < PAGE_TOK; t++) {
			arena[1][0][t] = t == 5 ? cases[i].at_5 : cases[i].first;
			arena[0][0][t] = cases[i].then;
			arena[1][1][t] = 1;
			arena[0][1][t] = (float)t;
		}
		attend_ref(&q, k, v, PAGE_TOK, N_KV, 1, 1, false, 1, &want);
		a.base = put(arena, sizeof(arena));
		span.pages = put(pages, sizeof(pages));
		a.spans = put(&span, sizeof(span));
		a.span_of_row = put(&row_span, sizeof(row_span));
		a.q = put(&q, sizeof(q));
		for (uint32_t n_split = 1; n_split <= 2; n_split++) {
			_cleanup_(freep) float *out = NULL;

			a.n_split = n_split;
			a.partial = n_split > 1 ? put_floats(NULL, 2 * 3) : NULL;
			a.out = put_floats(NULL, 1);
			LAUNCH("cuda_attention_rows", a, 1, 1, n_split);
			if (n_split > 1)
				LAUNCH("cuda_attention_join", a, 1, 1);
			out = get_floats(a.out, 1);
			assert_close(*out, want, 1e-5);
		}
		buffers_free();
	}
}

/* Delta net. */

static void check_conv(size_t kernel, size_t n_ch, const size_t n_tok[3])
{
	enum { OFFSET = 3 }; /* of what belongs to other layers, which is not touched */
	size_t n_rows = n_tok[0] + n_tok[1] + n_tok[2], row = 0;
	size_t n_state = OFFSET + (kernel - 1) * n_ch + 1;
	_cleanup_(freep) float *w = new_floats(n_ch * kernel), *x = new_floats(n_rows * n_ch),
			       *y = NULL, *want = new_floats(n_rows * n_ch);
	struct cuda_span spans[3] = { 0 };
	struct cuda_conv a = { .w = put_floats(w, n_ch * kernel),
			       .x = put_floats(x, n_rows * n_ch),
			       .y = put_floats(NULL, n_rows * n_ch),
			       .state_offset = OFFSET,
			       .n_ch = (uint32_t)n_ch,
			       .kernel = (uint32_t)kernel,
			       .n_spans = 3 };
	float *states[3];

	for (size_t s = 0; s < 3; row += n_tok[s++]) {
		states[s] = new_floats(n_state);
		spans[s] = (struct cuda_span){ .row = (uint32_t)row,
					       .n_tok = (uint32_t)n_tok[s],
					       .recurrent = put_floats(states[s], n_state) };
		cpu_kernels_ref.conv_silu(x + row * n_ch, w, states[s] + OFFSET, n_tok[s], n_ch,
					  kernel, 0, n_ch, want + row * n_ch);
	}
	a.spans = put(spans, sizeof(spans));
	LAUNCH("cuda_conv_silu", a, blocks(n_ch, CUDA_THREADS), 3);
	y = get_floats(a.y, n_rows * n_ch);
	/* Each product is below 1; the sum's order is the reference's. */
	for (size_t i = 0; i < n_rows * n_ch; i++)
		assert_close(y[i], want[i], (2 * (double)kernel + 12) * U * (double)kernel);
	for (size_t s = 0; s < 3; s++) {
		_cleanup_(freep) float *after = get_floats(spans[s].recurrent, n_state);

		assert_memory_equal(after, states[s], n_state * sizeof(float));
		free(states[s]);
	}
	buffers_free();
}

static void test_conv(void **state)
{
	static const size_t tokens[][3] = { { 1, 2, 3 }, { 4, 7, 8 }, { 9, 33, 1 } };
	(void)state;

	GPU_OR_SKIP();
	seed = 8;
	for (size_t i = 0; i < ARRAY_SIZE(tokens); i++)
		for (size_t kernel = 2; kernel <= 5; kernel++) {
			check_conv(kernel, 29, tokens[i]);
			check_conv(kernel, 300, tokens[i]);
		}
	check_conv(4, 8192, tokens[0]);
}

static void check_gates(size_t n_rows, size_t n_head_k, size_t n_head_v, size_t k_dim, size_t v_dim)
{
	size_t n_ch = 2 * n_head_k * k_dim + n_head_v * v_dim, n_v = n_rows * n_head_v;
	_cleanup_(freep) float *mixed = new_floats(n_rows * n_ch), *alpha = new_floats(n_v),
			       *raw = new_floats(n_v), *A = new_floats(n_head_v),
			       *dt = new_floats(n_head_v), *got = NULL, *g = NULL, *beta = NULL;
	float scale = 1.0f / sqrtf((float)k_dim);
	struct cuda_delta_gates a = { .n_rows = (uint32_t)n_rows,
				      .n_ch = (uint32_t)n_ch,
				      .n_head_k = (uint32_t)n_head_k,
				      .n_head_v = (uint32_t)n_head_v,
				      .k_dim = (uint32_t)k_dim,
				      .l2_eps = 1e-6f };

	memset(mixed, 0, k_dim * sizeof(*mixed)); /* its norm is 0 */
	for (size_t i = 0; i < n_v; i++)
		alpha[i] = i < ARRAY_SIZE(extremes) && n_rows > 1 ? extremes[i] : alpha[i] * 30;
	a.mixed = put_floats(mixed, n_rows * n_ch);
	a.alpha = put_floats(alpha, n_v);
	a.beta_raw = put_floats(raw, n_v);
	a.a = put_floats(A, n_head_v);
	a.dt = put_floats(dt, n_head_v);
	a.g = put_floats(NULL, n_v);
	a.beta = put_floats(NULL, n_v);
	LAUNCH("cuda_delta_gates", a, (unsigned)n_rows);
	got = get_floats(a.mixed, n_rows * n_ch);
	g = get_floats(a.g, n_v);
	beta = get_floats(a.beta, n_v);
	for (size_t t = 0; t < n_rows; t++) {
		float *want = mixed + t * n_ch;

		for (size_t h = 0; h < 2 * n_head_k; h++)
			cpu_kernels_ref.l2_norm(want + h * k_dim, 1e-6f, want + h * k_dim, k_dim);
		for (size_t i = 0; i < n_head_k * k_dim; i++)
			want[i] *= scale;
		for (size_t i = 0; i < n_ch; i++)
			assert_close(got[t * n_ch + i], want[i],
				     i < 2 * n_head_k * k_dim ? 24 * U * magnitude(want[i]) : 0);
	}
	for (size_t i = 0; i < n_v; i++) {
		float x = alpha[i] + dt[i % n_head_v], soft = x > 20 ? x : log1pf(expf(x));

		assert_close(g[i], soft * A[i % n_head_v],
			     12 * U * magnitude(soft * A[i % n_head_v]) + 0x1p-126);
		assert_close(beta[i], 1 / (1 + exp(-(double)raw[i])), 8 * U);
	}
	buffers_free();
}

static void test_gates(void **state)
{
	(void)state;

	GPU_OR_SKIP();
	seed = 9;
	check_gates(3, 16, 32, 128, 128);
	check_gates(33, 2, 4, 32, 32);
	check_gates(2, 1, 300, 5, 1);
	check_gates(1, 3, 3, 256, 16);
}

struct delta_test {
	size_t n_head_k, n_head_v, k_dim, v_dim, n_tok[2]; /* of two sequences */
};

/* Runs rows [from, to) of both sequences, as far as they have them; out and the states go on. */
static void delta_run(const struct delta_test *d, const struct cuda_delta_rule *args,
		      float *const states[2], size_t from, size_t to, bool widest)
{
	struct cuda_delta_rule a = *args;
	struct cuda_span spans[2];
	uint32_t n = 0;
	unsigned threads = blocks(d->v_dim, CUDA_WARP) * CUDA_WARP;

	for (size_t s = 0; s < 2; s++)
		if (from < d->n_tok[s])
			spans[n++] =
				(struct cuda_span){ .row = (uint32_t)((s ? d->n_tok[0] : 0) + from),
						    .n_tok = (uint32_t)(MIN(to, d->n_tok[s]) - from),
						    .recurrent = states[s] };
	a.n_spans = n;
	a.spans = put(spans, n * sizeof(*spans));
	LAUNCH("cuda_delta_rule", a, (unsigned)d->n_head_v, n,
	       widest ? blocks(d->v_dim * (d->k_dim > 128 ? 8 : 4), threads) : 1, threads);
}

/* Mixed rows, their decays and strengths; now and then a state is wiped out. */
static void delta_inputs(const struct delta_test *d, float *mixed, float *g, float *beta)
{
	size_t n_rows = d->n_tok[0] + d->n_tok[1],
	       n_ch = 2 * d->n_head_k * d->k_dim + d->n_head_v * d->v_dim;

	for (size_t t = 0; t < n_rows; t++)
		for (size_t h = 0; h < 2 * d->n_head_k; h++) {
			float *x = mixed + t * n_ch + h * d->k_dim;

			cpu_kernels_ref.l2_norm(x, 1e-6f, x, d->k_dim);
		}
	for (size_t i = 0; i < n_rows * d->n_head_v; i++) {
		g[i] = (g[i] - 1) * (random_u32() % 8 ? 0.05f : 5);
		if (random_u32() % 64 == 0)
			g[i] = -INFINITY;
		beta[i] = (beta[i] + 1) * 0.5f;
	}
}

static void delta_want(const struct delta_test *d, const float *mixed, const float *g,
		       const float *beta, float *const states[2], size_t offset, float *out)
{
	size_t n_k = d->n_head_k * d->k_dim, n_ch = 2 * n_k + d->n_head_v * d->v_dim, row = 0;

	for (size_t s = 0; s < 2; s++)
		for (size_t t = 0; t < d->n_tok[s]; t++, row++)
			for (size_t h = 0; h < d->n_head_v; h++) {
				const float *q = mixed + row * n_ch + h % d->n_head_k * d->k_dim;

				cpu_kernels_ref.delta_step(
					states[s] + offset + h * d->k_dim * d->v_dim, q, q + n_k,
					mixed + row * n_ch + 2 * n_k + h * d->v_dim,
					g[row * d->n_head_v + h], beta[row * d->n_head_v + h],
					d->k_dim, d->v_dim, out + (row * d->n_head_v + h) * d->v_dim);
			}
}

static void check_delta(const struct delta_test *d)
{
	enum { OFFSET = 5 }; /* of the convolution's state, which is not touched */
	size_t n_rows = d->n_tok[0] + d->n_tok[1],
	       n_ch = 2 * d->n_head_k * d->k_dim + d->n_head_v * d->v_dim;
	size_t n_state = OFFSET + d->n_head_v * d->k_dim * d->v_dim,
	       n_out = n_rows * d->n_head_v * d->v_dim;
	_cleanup_(freep) float *mixed = new_floats(n_rows * n_ch),
			       *g = new_floats(n_rows * d->n_head_v),
			       *beta = new_floats(n_rows * d->n_head_v), *want = new_floats(n_out),
			       *out = NULL, *cut_out = NULL;
	float *states[2] = { new_floats(n_state), new_floats(n_state) }, *whole[2], *cut[2];
	struct cuda_delta_rule a = { .state_offset = OFFSET,
				     .n_ch = (uint32_t)n_ch,
				     .n_head_k = (uint32_t)d->n_head_k,
				     .n_head_v = (uint32_t)d->n_head_v,
				     .k_dim = (uint32_t)d->k_dim,
				     .v_dim = (uint32_t)d->v_dim };

	delta_inputs(d, mixed, g, beta);
	a.mixed = put_floats(mixed, n_rows * n_ch);
	a.g = put_floats(g, n_rows * d->n_head_v);
	a.beta = put_floats(beta, n_rows * d->n_head_v);
	for (size_t s = 0; s < 2; s++) {
		whole[s] = put_floats(states[s], n_state);
		cut[s] = put_floats(states[s], n_state);
	}
	a.out = put_floats(NULL, n_out);
	delta_run(d, &a, whole, 0, SIZE_MAX, true);
	out = get_floats(a.out, n_out);
	/* Where a prompt is cut, and over how many blocks a state is spread, makes no difference at all. */
	a.out = put_floats(NULL, n_out);
	delta_run(d, &a, cut, 0, 1, false);
	delta_run(d, &a, cut, 1, SIZE_MAX, false);
	cut_out = get_floats(a.out, n_out);
	assert_memory_equal(cut_out, out, n_out * sizeof(*out));

	delta_want(d, mixed, g, beta, states, OFFSET, want);
	for (size_t i = 0; i < n_out; i++)
		assert_close(out[i], want[i], 1e-5);
	for (size_t s = 0; s < 2; s++) {
		_cleanup_(freep) float *after = get_floats(whole[s], n_state),
				       *after_cut = get_floats(cut[s], n_state);

		for (size_t i = 0; i < n_state; i++)
			assert_close(after[i], states[s][i], i < OFFSET ? 0 : 1e-5);
		assert_memory_equal(after, after_cut, n_state * sizeof(*after));
		free(states[s]);
	}
	buffers_free();
}

static void test_delta(void **state)
{
	static const struct delta_test tests[] = {
		{ 16, 32, 128, 128, { 2, 1 } }, { 1, 2, 128, 128, { 200, 9 } },
		{ 2, 4, 32, 32, { 200, 33 } },  { 2, 2, 256, 256, { 8, 3 } },
		{ 1, 3, 40, 20, { 17, 31 } },   { 1, 1, 13, 7, { 32, 100 } },
		{ 1, 1, 1, 1, { 2, 1 } },       { 3, 6, 129, 33, { 10, 2 } },
	};
	(void)state;

	GPU_OR_SKIP();
	seed = 10;
	for (size_t i = 0; i < ARRAY_SIZE(tests); i++)
		check_delta(&tests[i]);
}

/* Choices. */

/* As backend-cpu.c chooses. */
static void route_want(float *probs, size_t n_expert, size_t n_used, uint32_t *expert, float *weight)
{
	float sum = 0;

	cpu_kernels_ref.softmax(probs, n_expert);
	/* Not-a-number is nobody's choice, and different experts are chosen all the same. */
	for (size_t e = 0; e < n_expert; e++)
		if (!(probs[e] >= 0))
			probs[e] = 0;
	for (size_t k = 0; k < n_used; k++) {
		size_t best = 0;

		for (size_t e = 1; e < n_expert; e++)
			if (probs[e] > probs[best])
				best = e;
		expert[k] = (uint32_t)best;
		weight[k] = probs[best];
		sum += probs[best];
		probs[best] = -1;
	}
	for (size_t k = 0; k < n_used; k++)
		weight[k] /= sum;
}

static void check_route(float *logits, size_t n_tok, size_t n_expert, size_t n_used)
{
	_cleanup_(freep) uint32_t *expert = NULL, *want = new_bytes(n_used * sizeof(*want));
	_cleanup_(freep) float *weight = NULL, *want_weight = new_floats(n_used);
	struct cuda_route a = { .logits = put_floats(logits, n_tok * n_expert),
				.expert = put(NULL, n_tok * n_used * sizeof(uint32_t)),
				.weight = put_floats(NULL, n_tok * n_used),
				.n_tok = (uint32_t)n_tok,
				.n_expert = (uint32_t)n_expert,
				.n_used = (uint32_t)n_used };

	LAUNCH("cuda_route", a, (unsigned)n_tok);
	expert = get(a.expert, n_tok * n_used * sizeof(uint32_t));
	weight = get_floats(a.weight, n_tok * n_used);
	for (size_t t = 0; t < n_tok; t++) {
		route_want(logits + t * n_expert, n_expert, n_used, want, want_weight);
		for (size_t k = 0; k < n_used; k++) {
			assert_int_equal(expert[t * n_used + k], want[k]);
			/* exp(x - max) for |x - max| up to 40 is off by as many U. */
			assert_close(weight[t * n_used + k], want_weight[k],
				     80 * U * magnitude(want_weight[k]));
		}
	}
	buffers_free();
}

static void test_route(void **state)
{
	static const size_t shapes[][2] = { { 256, 8 },  { 1, 1 },    { 4, 4 },  { 33, 33 },
					    { 300, 10 }, { 4096, 2 }, { 64, 40 } };
	(void)state;

	GPU_OR_SKIP();
	seed = 11;
	for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
		_cleanup_(freep) float *logits = new_floats(5 * shapes[i][0]);

		for (size_t e = 0; e < 5 * shapes[i][0]; e++)
			logits[e] *= 20;
		check_route(logits, 5, shapes[i][0], shapes[i][1]);
	}
}

/* Of equals the first; hostile numbers choose valid experts. */
static void test_route_hostile(void **state)
{
	enum { N = 40, USED = 3 };
	static const struct {
		float all, at_7, at_33;
	} rows[] = {
		{ 0, 0, 0 },
		{ 1, 2, 2 },
		{ -300, 0, 0 },
		{ 0, NAN, 1 },
		{ 0, INFINITY, 1 },
		{ NAN, NAN, NAN },
		{ -INFINITY, -INFINITY, -INFINITY },
		{ -INFINITY, 1, 3 },
		{ INFINITY, 0, 0 },
		{ -INFINITY, NAN, 0 },
	};
	float logits[ARRAY_SIZE(rows) * N];
	(void)state;

	GPU_OR_SKIP();
	for (size_t t = 0; t < ARRAY_SIZE(rows); t++)
		for (size_t e = 0; e < N; e++)
			logits[t * N + e] = e == 7    ? rows[t].at_7
					    : e == 33 ? rows[t].at_33
						      : rows[t].all;
	check_route(logits, ARRAY_SIZE(rows), N, USED);
}

static uint32_t argmax_of(const float *x, size_t n_rows, size_t width, size_t row)
{
	_cleanup_(freep) uint32_t *index = NULL;
	struct cuda_argmax a = { .x = put_floats(x, n_rows * width),
				 .index = put(NULL, n_rows * sizeof(uint32_t)),
				 .n_rows = (uint32_t)n_rows,
				 .width = (uint32_t)width };

	LAUNCH("cuda_argmax", a, (unsigned)n_rows);
	index = get(a.index, n_rows * sizeof(uint32_t));
	buffers_free();
	return index[row];
}

static void test_argmax(void **state)
{
	static const size_t widths[] = { 1, 31, 256, 257, 151936 };
	const float none[] = { NAN, -INFINITY, NAN, -INFINITY },
		    some[] = { NAN, -3, NAN, -2, -2, -INFINITY };
	(void)state;

	GPU_OR_SKIP();
	seed = 12;
	for (size_t i = 0; i < ARRAY_SIZE(widths); i++) {
		_cleanup_(freep) float *x = new_floats(2 * widths[i]);
		size_t at = random_u32() % widths[i];

		x[widths[i] + at] = 1;
		x[widths[i] + widths[i] - 1] = 1;
		assert_int_equal(argmax_of(x, 2, widths[i], 1), at);
	}
	assert_int_equal(argmax_of(none, 1, ARRAY_SIZE(none), 0), 0);
	assert_int_equal(argmax_of(some, 1, ARRAY_SIZE(some), 0), 3);
}

/* Copies. */

static void check_copy(size_t from_word, size_t to_word, size_t n_words, unsigned grid)
{
	enum { COPIES = 3 };
	size_t space = n_words + 8;
	_cleanup_(freep) uint32_t *from = new_bytes(COPIES * space * 4),
				  *want = new_bytes(COPIES * space * 4), *got = NULL;
	struct cuda_copy_block a = { .bytes = n_words * 4, .n_copies = COPIES };
	uint32_t *src, *dst;

	for (size_t i = 0; i < COPIES * space; i++)
		from[i] = random_u32();
	memset(want, 0xff, COPIES * space * 4);
	src = put(from, COPIES * space * 4);
	dst = put(NULL, COPIES * space * 4);
	for (size_t i = 0; i < COPIES; i++) {
		size_t s = (COPIES - 1 - i) * space + from_word, d = i * space + to_word;

		a.from[i] = src + s;
		a.to[i] = dst + d;
		memcpy(want + d, from + s, n_words * 4);
	}
	LAUNCH("cuda_copy_block", a, grid, COPIES);
	got = get(dst, COPIES * space * 4);
	assert_memory_equal(got, want, COPIES * space * 4);
	buffers_free();
}

static void test_copy(void **state)
{
	static const size_t n_words[] = { 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 100, 5003 };
	(void)state;

	GPU_OR_SKIP();
	seed = 13;
	for (size_t i = 0; i < ARRAY_SIZE(n_words); i++)
		for (size_t from = 0; from < 4; from++)
			for (size_t to = 0; to < 4; to++)
				check_copy(from, to, n_words[i], n_words[i] > 5000 ? 3 : 1);
}

/* Reads end where the source does: the address sanitizer sees to it in the emulator. */
static void test_copy_exact(void **state)
{
	(void)state;

	GPU_OR_SKIP();
	seed = 14;
	for (size_t n = 1; n < 24; n++)
		for (size_t to = 0; to < 4; to++) {
			_cleanup_(freep) uint32_t *x = new_bytes(n * 4), *y = NULL;
			struct cuda_copy_block a = { .bytes = n * 4, .n_copies = 1 };
			uint32_t *dst = put(NULL, (n + to) * 4);

			for (size_t i = 0; i < n; i++)
				x[i] = random_u32();
			a.from[0] = put(x, n * 4);
			a.to[0] = dst + to;
			LAUNCH("cuda_copy_block", a, 1, 1);
			y = get(dst + to, n * 4);
			assert_memory_equal(y, x, n * 4);
			buffers_free();
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_rms_norm),       cmocka_unit_test(test_flat),
		cmocka_unit_test(test_copy_rows),      cmocka_unit_test(test_scalar_gate),
		cmocka_unit_test(test_rope),           cmocka_unit_test(test_attention),
		cmocka_unit_test(test_attention_long), cmocka_unit_test(test_attention_infinite),
		cmocka_unit_test(test_conv),           cmocka_unit_test(test_gates),
		cmocka_unit_test(test_delta),          cmocka_unit_test(test_route),
		cmocka_unit_test(test_route_hostile),  cmocka_unit_test(test_argmax),
		cmocka_unit_test(test_copy),           cmocka_unit_test(test_copy_exact),
	};

	return cmocka_run_group_tests(tests, open_device, close_device);
}
