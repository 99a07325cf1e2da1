/* SPDX-License-Identifier: MIT */
/*
 * backend-cpu.c: the operations of backend.h on the CPU: cuts them into pieces, feeds the pool,
 * keeps activations in the form that the weights want. Rope and attention are in attn-cpu.c, the
 * delta net in delta-cpu.c, routing and experts in moe-cpu.c.
 *
 * Owns the pool, the scratch arena and small buffers that grow with the context; engine thread only
 * (the pool's threads run inside a call). Refuses to know arithmetic: that is kernels/cpu.
 * Invariant: results are the same bits for any number of threads. Products are cut between rows of
 * weights as it suits the threads, which changes no bit of them (cpu.h); columns and everything else
 * are cut by shapes only, and no two pieces add to the same place.
 */
#include "daemon/engine/backend-cpu.h"

#include "daemon/engine/attn-cpu.h"
#include "daemon/engine/delta-cpu.h"
#include "kernels/cpu/topology.h"

#include <assert.h>
#include <math.h>
#include <sys/mman.h>

/*
 * A piece of a product reads about this much of the weights: at its beginning memory has to be waited for, so long pieces stream
 * better, and one of them is still short beside the time that a thread may lose its core for. With many columns a piece takes long
 * anyway.
 */
#define PIECE_BYTES          4194304
#define PIECE_BYTES_MANY     262144
#define MANY_COLS            16
/* Smaller pieces when a loop has few, for the balance of its end, ... */
#define PIECES_A_THREAD      4
#define PIECES_A_THREAD_MANY 16
/* ... but not below what a hand-out is worth. */
#define PIECE_BYTES_MIN      65536
#define PIECE_BYTES_MIN_MANY 16384
/* Elementwise work below this many floats is not worth a second thread. */
#define PIECE_FLOATS         16384
/* Weights that one loop multiplies. */
#define PRODUCTS_MAX         8

const char *backend_cpu_isa(const struct backend *b)
{
	return ((const struct backend_cpu *)b)->k->name;
}

uint64_t backend_cpu_major_faults(const struct backend *b)
{
	return pool_major_faults(((const struct backend_cpu *)b)->pool);
}

static void grow_done(struct grow *g)
{
	if (g->mem)
		munmap(g->mem, g->bytes);
}

void *cpu_grow(struct grow *g, size_t bytes)
{
	void *mem;

	if (bytes <= g->bytes)
		return g->mem;
	if (!add_ok(bytes, bytes / 2 + 4096, &bytes))
		return NULL;
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		return NULL;
	grow_done(g);
	*g = (struct grow){ mem, bytes };
	return mem;
}

float *cpu_thread_scratch(struct backend_cpu *c, size_t n_floats, size_t *ret_stride)
{
	size_t stride, total;

	if (!add_ok(n_floats, CPU_LINE_BYTES / sizeof(float), &stride))
		return NULL;
	stride &= ~(CPU_LINE_BYTES / sizeof(float) - 1);
	if (!mul_ok(stride, pool_n_threads(c->pool) * sizeof(float), &total))
		return NULL;
	*ret_stride = stride;
	return cpu_grow(&c->thread, total);
}

void *cpu_take(struct backend_cpu *c, size_t n, size_t size)
{
	size_t bytes;
	void *p = c->arena + c->top;

	if (!mul_ok(n, size, &bytes) || bytes > SIZE_MAX - CPU_LINE_BYTES)
		return NULL;
	bytes = ALIGN_UP(bytes, CPU_LINE_BYTES);
	if (bytes > c->arena_bytes - c->top)
		return NULL;
	c->top += bytes;
	return p;
}

void cpu_drop(struct backend_cpu *c)
{
	c->kept.x = NULL;
	c->top = c->used;
}

static float *cpu_scratch(struct backend *b, size_t n_floats)
{
	struct backend_cpu *c = cpu_of(b);
	float *p;

	cpu_drop(c);
	p = cpu_take(c, n_floats, sizeof(float));
	c->used = c->top;
	return p;
}

static const struct kv_memory *cpu_memory(struct backend *b)
{
	(void)b;
	return &kv_memory_host;
}

static int cpu_begin(struct backend *b, const struct backend_batch *batch)
{
	struct backend_cpu *c = cpu_of(b);
	size_t n = 0;

	for (size_t s = 0; s < batch->n_spans; s++) {
		assert(batch->spans[s].row == n);
		n += batch->spans[s].n_tok;
	}
	assert(batch->n_rows == n);
	c->batch = batch;
	c->attn.freq = NULL;
	return 0;
}

static int cpu_end(struct backend *b, int r)
{
	struct backend_cpu *c = cpu_of(b);

	c->used = 0;
	c->moe.routed = NULL;
	c->batch = NULL;
	cpu_drop(c);
	return r;
}

void cpu_run(struct backend_cpu *c, size_t n, void (*fn)(void *arg, size_t i, unsigned thread), void *arg)
{
	if (n == 1)
		fn(arg, 0, 0);
	else if (n > 1)
		pool_run(c->pool, n, fn, arg);
}

size_t cpu_piece_rows(size_t width)
{
	return MAX(PIECE_FLOATS / MAX(width, (size_t)1), (size_t)1);
}

/* Products. */

struct convert_job {
	void (*quantize)(const float *x, void *act, size_t n);
	const float *x;
	char *act;
	size_t width, stride, n, piece;
};

static void convert_piece(void *arg, size_t i, unsigned thread)
{
	const struct convert_job *j = arg;

	(void)thread;
	for (size_t t = i * j->piece; t < MIN((i + 1) * j->piece, j->n); t++)
		j->quantize(j->x + t * j->width, j->act + t * j->stride, j->width);
}

void cpu_convert(struct backend_cpu *c, enum quant_type type, const float *x, size_t n,
		 size_t width, char *act)
{
	struct convert_job j = { .quantize = c->k->quantize[type],
				 .x = x,
				 .act = act,
				 .width = width,
				 .stride = quant_row_bytes(type, width),
				 .n = n,
				 .piece = cpu_piece_rows(width) };

	cpu_run(c, n_pieces(n, j.piece), convert_piece, &j);
}

const char *cpu_activations(struct backend_cpu *c, uint32_t weight_type, const float *x,
			    size_t n_tok, size_t width)
{
	enum quant_type type = cpu_act_type((enum quant_type)weight_type);
	char *act;

	if (type == QUANT_F32)
		return (const char *)x;
	if (c->kept.x == x && c->kept.n_tok == n_tok && c->kept.width == width && c->kept.type == type)
		return c->kept.act;
	cpu_drop(c);
	act = cpu_take(c, n_tok, quant_row_bytes(type, width));
	if (!act)
		return NULL;
	cpu_convert(c, type, x, n_tok, width, act);
	c->kept.x = x;
	c->kept.n_tok = n_tok;
	c->kept.width = width;
	c->kept.type = type;
	c->kept.act = act;
	return act;
}

size_t cpu_act_bytes(uint32_t weight_type, size_t width)
{
	return quant_row_bytes(cpu_act_type((enum quant_type)weight_type), width);
}

size_t cpu_matmul_rows(const struct backend_cpu *c, size_t w_stride, size_t loop_bytes, size_t n_cols)
{
	bool many = n_cols >= MANY_COLS;
	size_t n_pieces_least =
		(many ? PIECES_A_THREAD_MANY : PIECES_A_THREAD) * (size_t)pool_n_threads(c->pool);
	size_t bytes = CLAMP(loop_bytes / n_pieces_least,
			     (size_t)(many ? PIECE_BYTES_MIN_MANY : PIECE_BYTES_MIN),
			     (size_t)(many ? PIECE_BYTES_MANY : PIECE_BYTES));

	/* A multiple of 8, so that kernels can take several at once. */
	return ALIGN_UP(MAX(bytes / w_stride, (size_t)8), (size_t)8);
}

struct product {
	const struct gguf_tensor *w;
	const char *act;
	float *y;
	size_t w_stride, act_stride, rows, end; /* end: the pieces before the next product */
};

/* Products of the same number of columns, one after the other. */
struct matmul_job {
	const struct backend_cpu *c;
	size_t n_cols, col_pieces, n;
	struct product products[PRODUCTS_MAX];
};

static void matmul_piece(void *arg, size_t i, unsigned thread)
{
	const struct matmul_job *j = arg;
	const struct product *p = j->products;
	size_t c0 = i % j->col_pieces * j->c->tiles.l2_cols, first = 0, r0, n_rows;

	(void)thread;
	for (; i >= p->end; p++)
		first = p->end;
	r0 = (i - first) / j->col_pieces * p->rows;
	n_rows = p->w->ne[1];
	j->c->k->matmul[p->w->type](p->w->ne[0], (const char *)p->w->data + r0 * p->w_stride,
				    p->w_stride, MIN(p->rows, n_rows - r0), p->act + c0 * p->act_stride,
				    p->act_stride, MIN((size_t)j->c->tiles.l2_cols, j->n_cols - c0),
				    p->y + c0 * n_rows + r0, n_rows, &j->c->tiles);
}

/* As many of the n weights as one loop takes: those that multiply the same form of x, or floats. */
static size_t n_of_a_form(const struct gguf_tensor *const *w, size_t n)
{
	enum quant_type form = QUANT_F32;
	size_t i = 0;

	for (; i < MIN(n, (size_t)PRODUCTS_MAX); i++) {
		enum quant_type type = cpu_act_type((enum quant_type)w[i]->type);

		if (type == QUANT_F32)
			continue;
		if (form != QUANT_F32 && type != form)
			break;
		form = type;
	}
	return i;
}

static int run_products(struct backend_cpu *c, const struct gguf_tensor *const *w, size_t n,
			const float *x, size_t n_tok, float *const *y)
{
	struct matmul_job j = {
		.c = c, .n_cols = n_tok, .col_pieces = n_pieces(n_tok, c->tiles.l2_cols), .n = n
	};
	size_t bytes = 0, end = 0;

	for (size_t i = 0; i < n; i++)
		bytes += w[i]->ne[1] * quant_row_bytes(w[i]->type, w[i]->ne[0]) * j.col_pieces;
	for (size_t i = 0; i < n; i++) {
		struct product *p = &j.products[i];

		*p = (struct product){ .w = w[i],
				       .act = cpu_activations(c, w[i]->type, x, n_tok, w[i]->ne[0]),
				       .y = y[i],
				       .w_stride = quant_row_bytes(w[i]->type, w[i]->ne[0]),
				       .act_stride = cpu_act_bytes(w[i]->type, w[i]->ne[0]) };
		if (!p->act)
			return -ENOMEM;
		p->rows = cpu_matmul_rows(c, p->w_stride, bytes, MIN(n_tok, (size_t)c->tiles.l2_cols));
		p->end = end += n_pieces(w[i]->ne[1], p->rows) * j.col_pieces;
	}
	cpu_run(c, end, matmul_piece, &j);
	/* A result may be where the kept input came from. */
	for (size_t i = 0; i < n; i++)
		if (c->kept.x && y[i] < c->kept.x + c->kept.n_tok * c->kept.width &&
		    c->kept.x < y[i] + n_tok * w[i]->ne[1])
			cpu_drop(c);
	return 0;
}

static int cpu_matmul_many(struct backend *b, const struct gguf_tensor *const *w, size_t n,
			   const float *x, size_t n_tok, float *const *y)
{
	int r = 0;

	for (size_t i = 0, k; i < n && n_tok > 0 && r == 0; i += k) {
		k = n_of_a_form(w + i, n - i);
		r = run_products(cpu_of(b), w + i, k, x, n_tok, y + i);
	}
	return r;
}

static int cpu_matmul(struct backend *b, const struct gguf_tensor *w, const float *x, size_t n_tok,
		      float *y)
{
	return cpu_matmul_many(b, &w, 1, x, n_tok, &y);
}

static int cpu_matmul_out(struct backend *b, const struct gguf_tensor *w, const float *x)
{
	const struct backend_batch *batch = cpu_of(b)->batch;

	return cpu_matmul(b, w, x, batch->n_out, batch->logits);
}

struct embed_job {
	const struct backend_cpu *c;
	const struct gguf_tensor *w;
	float *y;
	size_t piece;
};

static void embed_piece(void *arg, size_t i, unsigned thread)
{
	const struct embed_job *j = arg;
	const struct backend_batch *batch = j->c->batch;
	size_t width = j->w->ne[0], bytes = quant_row_bytes(j->w->type, width);

	(void)thread;
	for (size_t t = i * j->piece; t < MIN((i + 1) * j->piece, batch->n_rows); t++)
		j->c->k->dequant[j->w->type]((const char *)j->w->data + (size_t)batch->ids[t] * bytes,
					     j->y + t * width, width);
}

static int cpu_embed(struct backend *b, const struct gguf_tensor *w, float *y)
{
	struct backend_cpu *c = cpu_of(b);
	const struct backend_batch *batch = c->batch;
	struct embed_job j = { .c = c, .w = w, .y = y, .piece = cpu_piece_rows(w->ne[0]) };

	cpu_drop(c);
	for (size_t i = 0; i < batch->n_rows; i++)
		assert(batch->ids[i] >= 0 && (uint64_t)batch->ids[i] < w->ne[1]);
	cpu_run(c, n_pieces(batch->n_rows, j.piece), embed_piece, &j);
	return 0;
}

/* Row by row. */

/* One job for all operations that treat rows of `width` floats alone. */
struct rows_job {
	const struct backend_cpu *c;
	const float *a, *b;
	float *y;
	size_t n, width, a_stride, piece;
	float eps;
};

static void run_rows(struct backend_cpu *c, struct rows_job *j,
		     void (*fn)(void *arg, size_t i, unsigned thread))
{
	cpu_drop(c);
	j->c = c;
	j->piece = cpu_piece_rows(j->width);
	cpu_run(c, n_pieces(j->n, j->piece), fn, j);
}

static void copy_piece(void *arg, size_t i, unsigned thread)
{
	const struct rows_job *j = arg;

	(void)thread;
	for (size_t t = i * j->piece; t < MIN((i + 1) * j->piece, j->n); t++)
		memcpy(j->y + t * j->width, j->a + t * j->a_stride, j->width * sizeof(float));
}

static int cpu_copy_rows(struct backend *b, const float *x, size_t x_stride, size_t n_rows,
			 size_t width, float *y)
{
	struct rows_job j = { .a = x, .y = y, .n = n_rows, .width = width, .a_stride = x_stride };

	run_rows(cpu_of(b), &j, copy_piece);
	return 0;
}

static void bias_piece(void *arg, size_t i, unsigned thread)
{
	const struct rows_job *j = arg;

	(void)thread;
	for (size_t t = i * j->piece; t < MIN((i + 1) * j->piece, j->n); t++)
		j->c->k->add_scaled(j->y + t * j->width, j->b, 1.0f, j->width);
}

static int cpu_add_bias(struct backend *b, const struct gguf_tensor *w, float *x, size_t n_rows,
			size_t width)
{
	struct rows_job j = { .b = w->data, .y = x, .n = n_rows, .width = width };

	run_rows(cpu_of(b), &j, bias_piece);
	return 0;
}

static void rms_norm_piece(void *arg, size_t i, unsigned thread)
{
	const struct rows_job *j = arg;

	(void)thread;
	for (size_t t = i * j->piece; t < MIN((i + 1) * j->piece, j->n); t++)
		j->c->k->rms_norm(j->a + t * j->width, j->b, j->eps, j->y + t * j->width, j->width);
}

static int cpu_rms_norm(struct backend *b, const struct gguf_tensor *w, float eps, const float *x,
			size_t n_rows, size_t width, float *y)
{
	struct rows_job j = {
		.a = x, .b = w ? w->data : NULL, .y = y, .n = n_rows, .width = width, .eps = eps
	};

	run_rows(cpu_of(b), &j, rms_norm_piece);
	return 0;
}

/* The rest treats single values: a "row" is as long as a piece. */
static void run_flat(struct backend_cpu *c, struct rows_job *j,
		     void (*fn)(void *arg, size_t i, unsigned thread))
{
	cpu_drop(c);
	j->c = c;
	cpu_run(c, n_pieces(j->n, PIECE_FLOATS), fn, j);
}

static size_t flat_len(const struct rows_job *j, size_t i)
{
	return MIN((size_t)PIECE_FLOATS, j->n - i * PIECE_FLOATS);
}

static void add_piece(void *arg, size_t i, unsigned thread)
{
	const struct rows_job *j = arg;

	(void)thread;
	j->c->k->add_scaled(j->y + i * PIECE_FLOATS, j->a + i * PIECE_FLOATS, 1.0f, flat_len(j, i));
}

static int cpu_add(struct backend *b, float *x, const float *y, size_t n)
{
	struct rows_job j = { .a = y, .y = x, .n = n };

	run_flat(cpu_of(b), &j, add_piece);
	return 0;
}

static void silu_mul_piece(void *arg, size_t i, unsigned thread)
{
	const struct rows_job *j = arg;
	size_t at = i * PIECE_FLOATS;

	(void)thread;
	j->c->k->silu_mul(j->a + at, j->b + at, j->y + at, flat_len(j, i));
}

static int cpu_silu_mul(struct backend *b, const float *gate, const float *up, size_t n, float *y)
{
	struct rows_job j = { .a = gate, .b = up, .y = y, .n = n };

	run_flat(cpu_of(b), &j, silu_mul_piece);
	return 0;
}

static void sigmoid_mul_piece(void *arg, size_t i, unsigned thread)
{
	const struct rows_job *j = arg;

	(void)thread;
	j->c->k->sigmoid_mul(j->y + i * PIECE_FLOATS, j->a + i * PIECE_FLOATS, flat_len(j, i));
}

static int cpu_sigmoid_mul(struct backend *b, float *x, const float *gate, size_t n)
{
	struct rows_job j = { .a = gate, .y = x, .n = n };

	run_flat(cpu_of(b), &j, sigmoid_mul_piece);
	return 0;
}

static void scalar_gate_piece(void *arg, size_t i, unsigned thread)
{
	const struct rows_job *j = arg;

	(void)thread;
	for (size_t t = i * j->piece; t < MIN((i + 1) * j->piece, j->n); t++) {
		float *y = j->y + t * j->width, s;

		j->c->k->matmul[QUANT_F32](j->a_stride, j->b, j->a_stride * sizeof(float), 1,
					   j->a + t * j->a_stride, j->a_stride * sizeof(float), 1,
					   &s, 1, &j->c->tiles);
		s = 1.0f / (1.0f + expf(-s));
		for (size_t k = 0; k < j->width; k++)
			y[k] *= s;
	}
}

static int cpu_scalar_gate(struct backend *b, const struct gguf_tensor *w, const float *in,
			   size_t n_tok, size_t width, float *x, size_t x_width)
{
	struct rows_job j = {
		.a = in, .b = w->data, .y = x, .n = n_tok, .width = x_width, .a_stride = width
	};

	run_rows(cpu_of(b), &j, scalar_gate_piece);
	return 0;
}

/* Life. */

static struct backend *cpu_free(struct backend *b)
{
	struct backend_cpu *c;

	if (!b)
		return NULL;
	c = cpu_of(b);
	pool_free(c->pool);
	if (c->arena)
		munmap(c->arena, c->arena_bytes);
	grow_done(&c->thread);
	grow_done(&c->attn.pages);
	grow_done(&c->attn.angles);
	free(c);
	return NULL;
}

static const struct backend_ops cpu_ops = {
	.name = "cpu",
	.free = cpu_free,
	.memory = cpu_memory,
	.scratch = cpu_scratch,
	.begin = cpu_begin,
	.end = cpu_end,
	.embed = cpu_embed,
	.matmul = cpu_matmul,
	.matmul_many = cpu_matmul_many,
	.matmul_out = cpu_matmul_out,
	.copy_rows = cpu_copy_rows,
	.rms_norm = cpu_rms_norm,
	.add = cpu_add,
	.add_bias = cpu_add_bias,
	.silu_mul = cpu_silu_mul,
	.sigmoid_mul = cpu_sigmoid_mul,
	.scalar_gate = cpu_scalar_gate,
	.rope = attn_cpu_rope,
	.attention = attn_cpu_compute,
	.delta = delta_cpu_compute,
	.moe_route = moe_cpu_route,
	.moe = moe_cpu_compute,
	.moe_wants_guess = moe_cpu_wants_guess,
	.moe_guess = moe_cpu_guess,
	.set_residency = moe_cpu_set_residency,
};

/* Where the compute threads shall run; false: anywhere. */
static bool choose_cpus(unsigned n_threads, cpu_set_t *ret)
{
	cpu_set_t allowed;

	return sched_getaffinity(0, sizeof(allowed), &allowed) == 0 &&
	       topology_choose("/sys/devices/system", &allowed, n_threads, ret) == n_threads &&
	       n_threads < (unsigned)CPU_COUNT(&allowed);
}

int backend_cpu_new(unsigned n_threads, size_t scratch_bytes, const struct cpu_tiles *tiles,
		    struct backend **ret)
{
	struct backend_cpu *c = calloc(1, sizeof(*c));
	cpu_set_t cpus;
	void *mem;

	if (!c)
		return -ENOMEM;
	c->base.ops = &cpu_ops;
	c->k = cpu_kernels_choose(NULL);
	c->tiles = tiles && tiles->reg_cols > 0 ? *tiles : c->k->tiles;
	c->pool = pool_new(n_threads, choose_cpus(n_threads, &cpus) ? &cpus : NULL);
	if (!c->pool || scratch_bytes == 0) {
		cpu_free(&c->base);
		return -ENOMEM;
	}
	mem = mmap(NULL, scratch_bytes, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mem == MAP_FAILED) {
		cpu_free(&c->base);
		return -ENOMEM;
	}
	c->arena = mem;
	c->arena_bytes = scratch_bytes;
	*ret = &c->base;
	return 0;
}
