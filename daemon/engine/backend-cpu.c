/* SPDX-License-Identifier: MIT */
/*
 * backend-cpu.c: the operations of backend.h on the CPU: cuts them into pieces, feeds the pool,
 * keeps activations in the form that the weights want. Routing and experts are in moe-cpu.c.
 *
 * Owns the pool, the scratch arena and small buffers that grow with the context; engine thread only
 * (the pool's threads run inside a call). Refuses to know arithmetic: that is kernels/cpu.
 * Invariant: how work is cut depends on shapes only, never on the number of threads, and no two
 * pieces add to the same place, so results are the same bits for any number of threads.
 */
#include "daemon/engine/backend-cpu.h"

#include "kernels/cpu/topology.h"

#include <assert.h>
#include <math.h>
#include <sys/mman.h>

/*
 * A piece of a product reads about this much of the weights: long enough to hide the hand-out,
 * small enough to balance.
 */
#define PIECE_WEIGHT_BYTES 65536
/* Elementwise work below this many floats is not worth a second thread. */
#define PIECE_FLOATS       16384
#define PIECE_CHANNELS     256

const char *backend_cpu_isa(const struct backend *b)
{
	return ((const struct backend_cpu *)b)->k->name;
}

uint64_t backend_cpu_major_faults(const struct backend *b)
{
	return pool_major_faults(((const struct backend_cpu *)b)->pool);
}

static void *grow_need(struct grow *g, size_t bytes)
{
	void *mem;

	if (bytes <= g->bytes)
		return g->mem;
	if (!add_ok(bytes, bytes / 2 + 4096, &bytes))
		return NULL;
	mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		return NULL;
	if (g->mem)
		munmap(g->mem, g->bytes);
	*g = (struct grow){ mem, bytes };
	return mem;
}

static float *thread_need(struct backend_cpu *c, size_t n_floats, size_t *ret_stride)
{
	size_t stride, total;

	if (!add_ok(n_floats, CPU_LINE_BYTES / sizeof(float), &stride))
		return NULL;
	stride &= ~(CPU_LINE_BYTES / sizeof(float) - 1);
	if (!mul_ok(stride, pool_n_threads(c->pool) * sizeof(float), &total))
		return NULL;
	*ret_stride = stride;
	return grow_need(&c->thread, total);
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
	cpu_of(b)->batch = batch;
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

/* How many rows of `width` floats make an elementwise piece. */
static size_t piece_rows(size_t width)
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
				 .piece = piece_rows(width) };

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

struct matmul_job {
	const struct backend_cpu *c;
	const struct gguf_tensor *w;
	const char *act;
	float *y;
	size_t w_stride, act_stride, n_cols, rows, row_pieces, col_pieces;
};

static void matmul_piece(void *arg, size_t i, unsigned thread)
{
	const struct matmul_job *j = arg;
	size_t n_rows = j->w->ne[1];
	size_t piece = j->c->tiles.l2_cols, c0 = i % j->col_pieces * piece;
	size_t r0 = i / j->col_pieces * j->rows;
	size_t rows = MIN(j->rows, n_rows - r0), cols = MIN(piece, j->n_cols - c0);

	(void)thread;
	j->c->k->matmul[j->w->type](j->w->ne[0], (const char *)j->w->data + r0 * j->w_stride,
				    j->w_stride, rows, j->act + c0 * j->act_stride, j->act_stride,
				    cols, j->y + c0 * n_rows + r0, n_rows, &j->c->tiles);
}

/* Rows of a piece, a multiple of 8 so that kernels can take several at once. */
size_t cpu_matmul_rows(size_t w_stride)
{
	return ALIGN_UP(CLAMP(PIECE_WEIGHT_BYTES / w_stride, (size_t)8, (size_t)256), (size_t)8);
}

static int cpu_matmul(struct backend *b, const struct gguf_tensor *w, const float *x, size_t n_tok,
		      float *y)
{
	struct backend_cpu *c = cpu_of(b);
	struct matmul_job j = { .c = c,
				.w = w,
				.y = y,
				.n_cols = n_tok,
				.w_stride = quant_row_bytes(w->type, w->ne[0]),
				.act_stride = cpu_act_bytes(w->type, w->ne[0]) };

	if (n_tok == 0)
		return 0;
	j.act = cpu_activations(c, w->type, x, n_tok, w->ne[0]);
	if (!j.act)
		return -ENOMEM;
	j.rows = cpu_matmul_rows(j.w_stride);
	j.row_pieces = n_pieces(w->ne[1], j.rows);
	j.col_pieces = n_pieces(n_tok, c->tiles.l2_cols);
	cpu_run(c, j.row_pieces * j.col_pieces, matmul_piece, &j);
	/* y may be where the kept input came from. */
	if (c->kept.x && y < c->kept.x + c->kept.n_tok * c->kept.width &&
	    c->kept.x < y + n_tok * w->ne[1])
		cpu_drop(c);
	return 0;
}

static int cpu_matmul_out(struct backend *b, const struct gguf_tensor *w, const float *x)
{
	const struct backend_batch *batch = cpu_of(b)->batch;

	return cpu_matmul(b, w, x, batch->n_out, batch->logits);
}

struct embed_job {
	const struct backend_cpu *c;
	const struct gguf_tensor *w;
	const int32_t *ids;
	float *y;
};

static void embed_piece(void *arg, size_t i, unsigned thread)
{
	const struct embed_job *j = arg;
	size_t width = j->w->ne[0];

	(void)thread;
	j->c->k->dequant[j->w->type]((const char *)j->w->data +
					     (size_t)j->ids[i] * quant_row_bytes(j->w->type, width),
				     j->y + i * width, width);
}

static int cpu_embed(struct backend *b, const struct gguf_tensor *w, float *y)
{
	struct backend_cpu *c = cpu_of(b);
	const struct backend_batch *batch = c->batch;
	struct embed_job j = { .c = c, .w = w, .ids = batch->ids, .y = y };

	cpu_drop(c);
	for (size_t i = 0; i < batch->n_rows; i++)
		assert(j.ids[i] >= 0 && (uint64_t)j.ids[i] < w->ne[1]);
	cpu_run(c, batch->n_rows, embed_piece, &j);
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
	j->piece = piece_rows(j->width);
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

static float sigmoid(float x)
{
	return 1.0f / (1.0f + expf(-x));
}

static int cpu_scalar_gate(struct backend *b, const struct gguf_tensor *w, const float *in,
			   size_t n_tok, size_t width, float *x, size_t x_width)
{
	struct backend_cpu *c = cpu_of(b);

	cpu_drop(c);
	for (size_t t = 0; t < n_tok; t++) {
		float *row = x + t * x_width, s;

		c->k->matmul[QUANT_F32](width, w->data, width * sizeof(float), 1, in + t * width,
					width * sizeof(float), 1, &s, 1, &c->tiles);
		s = sigmoid(s);
		for (size_t i = 0; i < x_width; i++)
			row[i] *= s;
	}
	return 0;
}

/* Rope. */

struct rope_job {
	const struct backend_cpu *c;
	const struct backend_rope *p;
	const struct backend_span *span;
	float *x;
	float *cs; /* n_rot a row */
	size_t stride, n_head, dim;
};

static void rope_piece(void *arg, size_t i, unsigned thread)
{
	const struct rope_job *j = arg;
	const struct backend_rope *p = j->p;
	float *x = j->x + (j->span->row + i) * j->stride, *cs = j->cs + i * p->n_rot;

	(void)thread;
	for (size_t k = 0; k < p->n_rot / 2; k++) {
		/*
		 * The angle in float, as the models were trained with; its sine and cosine exactly.
		 */
		double angle = (double)((float)(j->span->pos + i) * p->freq[k]);

		cs[2 * k] = (float)cos(angle) * p->mscale;
		cs[2 * k + 1] = (float)sin(angle) * p->mscale;
	}
	for (size_t h = 0; h < j->n_head; h++)
		(p->pairs ? j->c->k->rope_norm : j->c->k->rope_neox)(x + h * j->dim, cs, p->n_rot);
}

static int cpu_rope(struct backend *b, const struct backend_rope *p, float *x, size_t stride,
		    size_t n_head, size_t dim)
{
	struct backend_cpu *c = cpu_of(b);
	const struct backend_span *spans = c->batch->spans;

	cpu_drop(c);
	for (size_t s = 0; s < c->batch->n_spans; s++) {
		struct rope_job j = {
			.c = c, .p = p, .span = &spans[s], .x = x, .stride = stride, .n_head = n_head, .dim = dim
		};
		size_t top = c->top;

		j.cs = cpu_take(c, spans[s].n_tok, p->n_rot * sizeof(float));
		if (!j.cs)
			return -ENOMEM;
		cpu_run(c, spans[s].n_tok, rope_piece, &j);
		c->top = top;
	}
	cpu_drop(c);
	return 0;
}

/* Attention. */

/* Page addresses of every key/value head of one span: k then v, n_pages each, head by head. */
struct attn_span {
	const struct backend_span *span;
	const void **pages;
	size_t n_pages;
};

struct attn_job {
	const struct backend_cpu *c;
	const struct backend_attn *p;
	const struct kv_arena *arena;
	const struct attn_span *spans;
	const size_t *span_of_row;
	const float *q, *k, *v;
	float *out, *scratch;
	size_t scratch_stride;
	bool f16;
};

static const void **head_pages(const struct attn_span *s, size_t head)
{
	return s->pages + head * 2 * s->n_pages;
}

static void store_row(const struct attn_job *j, const void *page, size_t tok, size_t dim, const float *x)
{
	if (j->f16)
		j->c->k->f32_to_f16(x, (uint16_t *)page + tok * dim, dim);
	else
		memcpy((float *)page + tok * dim, x, dim * sizeof(float));
}

static void store_piece(void *arg, size_t row, unsigned thread)
{
	const struct attn_job *j = arg;
	const struct attn_span *s = &j->spans[j->span_of_row[row]];
	size_t pos = s->span->pos + (row - s->span->row);
	uint32_t page = s->span->kv->pages[pos / KV_PAGE_TOK];

	(void)thread;
	for (uint32_t h = 0; h < j->p->n_head_kv; h++) {
		size_t at = row * j->p->n_head_kv + h;

		store_row(j, kv_k(j->arena, page, j->p->kv_layer, h), pos % KV_PAGE_TOK,
			  j->p->k_dim, j->k + at * j->p->k_dim);
		store_row(j, kv_v(j->arena, page, j->p->kv_layer, h), pos % KV_PAGE_TOK,
			  j->p->v_dim, j->v + at * j->p->v_dim);
	}
}

static void attend_piece(void *arg, size_t i, unsigned thread)
{
	const struct attn_job *j = arg;
	const struct backend_attn *p = j->p;
	size_t row = i / p->n_head_kv, kv_head = i % p->n_head_kv, n_q = p->n_head / p->n_head_kv;
	const struct attn_span *s = &j->spans[j->span_of_row[row]];
	const void **k_pages = head_pages(s, kv_head);
	const float *sinks = p->sinks ? p->sinks->data : NULL;

	j->c->k->attention(
		&(struct cpu_attention){ .q = j->q + (row * p->n_head + kv_head * n_q) * p->k_dim,
					 .out = j->out + (row * p->n_head + kv_head * n_q) * p->v_dim,
					 .n_rows = 1,
					 .n_q = n_q,
					 .k_pages = k_pages,
					 .v_pages = k_pages + s->n_pages,
					 .page_tok = KV_PAGE_TOK,
					 .k_dim = p->k_dim,
					 .v_dim = p->v_dim,
					 .pos = s->span->pos + (row - s->span->row),
					 .window = p->window,
					 .kv_f16 = j->f16,
					 .scale = p->scale,
					 .sinks = sinks ? sinks + kv_head * n_q : NULL,
					 .scratch = j->scratch + thread * j->scratch_stride });
}

/* Fills the address lists; everything lives in one grown block: spans, rows' spans, addresses. */
static int attn_prepare(struct backend_cpu *c, struct attn_job *j, const struct backend_span *spans,
			size_t n_spans, size_t n_rows)
{
	size_t n_addr = 0, row = 0, *span_of_row;
	struct attn_span *as;
	const void **addr;

	for (size_t s = 0; s < n_spans; s++)
		n_addr += n_pieces(spans[s].pos + spans[s].n_tok, KV_PAGE_TOK) * 2 * j->p->n_head_kv;
	as = grow_need(&c->pages,
		       n_spans * sizeof(*as) + n_rows * sizeof(size_t) + n_addr * sizeof(void *));
	j->scratch = thread_need(c,
				 cpu_attention_scratch(CPU_ATTENTION_ROWS,
						       j->p->n_head / j->p->n_head_kv, j->p->v_dim),
				 &j->scratch_stride);
	if (!as || !j->scratch)
		return -ENOMEM;
	span_of_row = (size_t *)(as + n_spans);
	addr = (const void **)(span_of_row + n_rows);
	for (size_t s = 0; s < n_spans; s++) {
		as[s] = (struct attn_span){ &spans[s], addr,
					    n_pieces(spans[s].pos + spans[s].n_tok, KV_PAGE_TOK) };
		assert(as[s].n_pages <= spans[s].kv->n_pages);
		for (uint32_t h = 0; h < j->p->n_head_kv; h++)
			for (size_t p = 0; p < as[s].n_pages; p++) {
				uint32_t page = spans[s].kv->pages[p];

				head_pages(&as[s], h)[p] = kv_k(j->arena, page, j->p->kv_layer, h);
				head_pages(&as[s], h)[as[s].n_pages + p] =
					kv_v(j->arena, page, j->p->kv_layer, h);
			}
		addr += as[s].n_pages * 2 * j->p->n_head_kv;
		for (size_t t = 0; t < spans[s].n_tok; t++)
			span_of_row[row++] = s;
	}
	j->spans = as;
	j->span_of_row = span_of_row;
	return 0;
}

/* Rows of all spans; they lie one after the other from row 0 (graph.h). */
static size_t rows_of(const struct backend_span *spans, size_t n_spans)
{
	size_t n = 0;

	for (size_t s = 0; s < n_spans; s++) {
		assert(spans[s].row == n);
		n += spans[s].n_tok;
	}
	return n;
}

static int cpu_attention(struct backend *b, const struct backend_attn *p, const float *q,
			 const float *k, const float *v, float *out)
{
	struct backend_cpu *c = cpu_of(b);
	const struct backend_batch *batch = c->batch;
	struct attn_job j = { .c = c,
			      .p = p,
			      .arena = batch->arena,
			      .q = q,
			      .k = k,
			      .v = v,
			      .out = out,
			      .f16 = kv_arena_f16(batch->arena) };
	size_t n_rows = rows_of(batch->spans, batch->n_spans);
	int r;

	cpu_drop(c);
	r = attn_prepare(c, &j, batch->spans, batch->n_spans, n_rows);
	if (r < 0)
		return r;
	/*
	 * All rows are stored before any is read: a token sees what a later batch will see, in the
	 * arena's precision.
	 */
	cpu_run(c, n_rows, store_piece, &j);
	cpu_run(c, n_rows * p->n_head_kv, attend_piece, &j);
	return 0;
}

/* Gated delta net. */

struct delta_job {
	const struct backend_cpu *c;
	const struct backend_delta *p;
	const struct backend_span *spans;
	const float *qkv, *alpha, *beta_raw;
	float *mixed; /* [t][channels]: after conv, SiLU and norms */
	float *g, *beta, *out, *scratch;
	size_t n_ch, n_rows, scratch_stride, ch_pieces;
};

static size_t delta_channels(const struct backend_delta *p)
{
	return 2 * (size_t)p->n_head_k * p->k_dim + (size_t)p->n_head_v * p->v_dim;
}

size_t backend_delta_temp_floats(size_t n_channels, size_t n_head_v)
{
	return n_channels + 2 * n_head_v;
}

static void conv_piece(void *arg, size_t i, unsigned thread)
{
	const struct delta_job *j = arg;
	const struct backend_span *s = &j->spans[i / j->ch_pieces];
	size_t c0 = i % j->ch_pieces * PIECE_CHANNELS, c1 = MIN(c0 + PIECE_CHANNELS, j->n_ch);

	(void)thread;
	j->c->k->conv_silu(j->qkv + s->row * j->n_ch, j->p->conv->data,
			   s->recurrent + j->p->state_offset, s->n_tok, j->n_ch, j->p->conv_kernel,
			   c0, c1, j->mixed + s->row * j->n_ch);
}

/* Norms of one token's q and k heads, and its decays and write strengths. */
static void gates_piece(void *arg, size_t t, unsigned thread)
{
	const struct delta_job *j = arg;
	const struct backend_delta *p = j->p;
	const float *dt = p->dt->data, *a = p->a->data;
	float scale = 1.0f / sqrtf((float)p->k_dim);

	(void)thread;
	for (size_t h = 0; h < 2 * (size_t)p->n_head_k; h++) {
		float *x = j->mixed + t * j->n_ch + h * p->k_dim;

		j->c->k->l2_norm(x, p->l2_eps, x, p->k_dim);
		if (h >= p->n_head_k)
			continue;
		for (size_t i = 0; i < p->k_dim; i++)
			x[i] *= scale;
	}
	for (size_t h = 0; h < p->n_head_v; h++) {
		size_t at = t * p->n_head_v + h;
		float x = j->alpha[at] + dt[h];

		/* softplus; above 20 it is x to float precision */
		j->g[at] = (x > 20.0f ? x : log1pf(expf(x))) * a[h];
		j->beta[at] = sigmoid(j->beta_raw[at]);
	}
}

static void delta_piece(void *arg, size_t i, unsigned thread)
{
	const struct delta_job *j = arg;
	const struct backend_delta *p = j->p;
	const struct backend_span *s = &j->spans[i / p->n_head_v];
	size_t head = i % p->n_head_v, n_k = (size_t)p->n_head_k * p->k_dim,
	       out_stride = (size_t)p->n_head_v * p->v_dim;
	float *S = s->recurrent + p->state_offset + (p->conv_kernel - 1) * j->n_ch +
		   head * p->k_dim * p->v_dim;

	for (size_t t = 0; t < s->n_tok; t += CPU_DELTA_CHUNK) {
		size_t row = s->row + t, n = MIN((size_t)CPU_DELTA_CHUNK, s->n_tok - t);
		const float *q = j->mixed + row * j->n_ch + head % p->n_head_k * p->k_dim, *k = q + n_k;
		const float *v = j->mixed + row * j->n_ch + 2 * n_k + head * p->v_dim;
		const float *g = j->g + row * p->n_head_v + head,
			    *beta = j->beta + row * p->n_head_v + head;
		float *o = j->out + row * out_stride + head * p->v_dim;

		if (n == 1)
			j->c->k->delta_step(S, q, k, v, *g, *beta, p->k_dim, p->v_dim, o);
		else
			j->c->k->delta_chunk(S, q, j->n_ch, k, j->n_ch, v, j->n_ch, g, beta,
					     p->n_head_v, n, p->k_dim, p->v_dim, o, out_stride,
					     j->scratch + thread * j->scratch_stride);
	}
}

static int cpu_delta(struct backend *b, const struct backend_delta *p, const float *qkv,
		     const float *alpha, const float *beta, float *out)
{
	struct backend_cpu *c = cpu_of(b);
	const struct backend_span *spans = c->batch->spans;
	size_t n_spans = c->batch->n_spans;
	struct delta_job j = { .c = c,
			       .p = p,
			       .spans = spans,
			       .qkv = qkv,
			       .alpha = alpha,
			       .beta_raw = beta,
			       .out = out,
			       .n_ch = delta_channels(p),
			       .n_rows = rows_of(spans, n_spans) };

	cpu_drop(c);
	j.ch_pieces = n_pieces(j.n_ch, PIECE_CHANNELS);
	j.mixed = cpu_take(c, j.n_rows * j.n_ch, sizeof(float));
	j.g = cpu_take(c, j.n_rows * p->n_head_v, sizeof(float));
	j.beta = cpu_take(c, j.n_rows * p->n_head_v, sizeof(float));
	j.scratch = thread_need(c, cpu_delta_scratch(p->k_dim, p->v_dim), &j.scratch_stride);
	if (!j.mixed || !j.g || !j.beta || !j.scratch) {
		cpu_drop(c);
		return -ENOMEM;
	}
	cpu_run(c, n_spans * j.ch_pieces, conv_piece, &j);
	cpu_run(c, j.n_rows, gates_piece, &j);
	cpu_run(c, n_spans * p->n_head_v, delta_piece, &j);
	cpu_drop(c);
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
	if (c->pages.mem)
		munmap(c->pages.mem, c->pages.bytes);
	if (c->thread.mem)
		munmap(c->thread.mem, c->thread.bytes);
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
	.matmul_out = cpu_matmul_out,
	.copy_rows = cpu_copy_rows,
	.rms_norm = cpu_rms_norm,
	.add = cpu_add,
	.add_bias = cpu_add_bias,
	.silu_mul = cpu_silu_mul,
	.sigmoid_mul = cpu_sigmoid_mul,
	.scalar_gate = cpu_scalar_gate,
	.rope = cpu_rope,
	.attention = cpu_attention,
	.delta = cpu_delta,
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
