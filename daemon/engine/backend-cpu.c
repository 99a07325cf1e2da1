/* SPDX-License-Identifier: MIT */
/*
 * backend-cpu.c: the operations of backend.h on the CPU: cuts them into pieces, feeds the pool,
 * keeps activations in the form that the weights want.
 *
 * Owns the pool, the scratch arena and small buffers that grow with the context; engine thread only
 * (the pool's threads run inside a call). Refuses to know arithmetic: that is kernels/cpu.
 * Invariant: how work is cut depends on shapes only, never on the number of threads, and no two
 * pieces add to the same place, so results are the same bits for any number of threads.
 */
#include "daemon/engine/backend.h"

#include "daemon/residency/residency.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/pool.h"

#include <assert.h>
#include <math.h>
#include <sys/mman.h>

/*
 * A piece of a product reads about this much of the weights: long enough to hide the hand-out,
 * small enough to balance.
 */
#define PIECE_WEIGHT_BYTES 65536
/* Columns of one piece: their activations stay in the second-level cache while the rows pass. */
#define PIECE_COLS         128
/* Elementwise work below this many floats is not worth a second thread. */
#define PIECE_FLOATS       16384
#define PIECE_CHANNELS     256
#define LINE_BYTES         ((size_t)64)

/* Memory of the backend's own that grows when an operation needs more; contents do not survive. */
struct grow {
	void *mem;
	size_t bytes;
};

/*
 * What the router of a layer chose. A slot is one (token, chosen expert) pair; slot t * n_used + k
 * is the k-th choice of token t. Places are the slots sorted by expert: expert e has places
 * [first[e], first[e + 1]), in token order.
 */
struct route {
	const struct backend_moe *p; /* NULL: none */
	size_t n_tok, mark;          /* mark: where the arena was before */
	uint32_t *chosen;            /* expert of each slot */
	uint32_t *place;             /* of each slot */
	float *weight;               /* of each slot */
	size_t *first;               /* n_expert + 1 */
	uint32_t *active;            /* experts that have places, ascending */
	uint32_t *n_rows;            /* and how many */
	size_t n_active;
	float *probs; /* [t][n_expert] */
};

/*
 * The arena, from the bottom: what the caller took (scratch()) and the route of the layer at hand,
 * then the converted input of the last products, kept because q, k and v, or the experts and the
 * shared expert, all multiply the same x; then temporaries of the running operation.
 */
struct backend_cpu {
	struct backend base;
	const struct cpu_kernels *k;
	struct pool *pool;
	struct residency *residency; /* NULL: all weights are where the mapping says */
	struct route route;
	const struct backend_batch *batch; /* at hand */
	char *arena;
	size_t arena_bytes, used, top;
	struct {
		const float *x; /* NULL: nothing kept */
		size_t n_tok, width;
		enum quant_type type;
		const char *act;
	} kept;
	struct grow pages;  /* attention: lists of page addresses */
	struct grow thread; /* one part a thread: attention scores, delta scratch */
};

static struct backend_cpu *cpu_of(struct backend *b)
{
	return (struct backend_cpu *)b;
}

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

	if (!add_ok(n_floats, LINE_BYTES / sizeof(float), &stride))
		return NULL;
	stride &= ~(LINE_BYTES / sizeof(float) - 1);
	if (!mul_ok(stride, pool_n_threads(c->pool) * sizeof(float), &total))
		return NULL;
	*ret_stride = stride;
	return grow_need(&c->thread, total);
}

static void *arena_take(struct backend_cpu *c, size_t n, size_t size)
{
	size_t bytes;
	void *p = c->arena + c->top;

	if (!mul_ok(n, size, &bytes) || bytes > SIZE_MAX - LINE_BYTES)
		return NULL;
	bytes = ALIGN_UP(bytes, LINE_BYTES);
	if (bytes > c->arena_bytes - c->top)
		return NULL;
	c->top += bytes;
	return p;
}

/* Every operation that writes where a later product may read from starts with this. */
static void drop_kept(struct backend_cpu *c)
{
	c->kept.x = NULL;
	c->top = c->used;
}

static float *cpu_scratch(struct backend *b, size_t n_floats)
{
	struct backend_cpu *c = cpu_of(b);
	float *p;

	drop_kept(c);
	p = arena_take(c, n_floats, sizeof(float));
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
	c->route.p = NULL;
	c->batch = NULL;
	drop_kept(c);
	return r;
}

static void run(struct backend_cpu *c, size_t n, void (*fn)(void *arg, size_t i, unsigned thread),
		void *arg)
{
	if (n == 1)
		fn(arg, 0, 0);
	else if (n > 1)
		pool_run(c->pool, n, fn, arg);
}

static size_t n_pieces(size_t n, size_t piece)
{
	return n / piece + (n % piece > 0);
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

static void convert(struct backend_cpu *c, enum quant_type type, const float *x, size_t n,
		    size_t width, char *act)
{
	struct convert_job j = { .quantize = c->k->quantize[type],
				 .x = x,
				 .act = act,
				 .width = width,
				 .stride = quant_row_bytes(type, width),
				 .n = n,
				 .piece = piece_rows(width) };

	run(c, n_pieces(n, j.piece), convert_piece, &j);
}

/*
 * x in the form that weights of this type multiply; kept for the next product. NULL: out of
 * scratch.
 */
static const char *activations(struct backend_cpu *c, uint32_t weight_type, const float *x,
			       size_t n_tok, size_t width)
{
	enum quant_type type = cpu_act_type((enum quant_type)weight_type);
	char *act;

	if (type == QUANT_F32)
		return (const char *)x;
	if (c->kept.x == x && c->kept.n_tok == n_tok && c->kept.width == width && c->kept.type == type)
		return c->kept.act;
	drop_kept(c);
	act = arena_take(c, n_tok, quant_row_bytes(type, width));
	if (!act)
		return NULL;
	convert(c, type, x, n_tok, width, act);
	c->kept.x = x;
	c->kept.n_tok = n_tok;
	c->kept.width = width;
	c->kept.type = type;
	c->kept.act = act;
	return act;
}

static size_t act_bytes(uint32_t weight_type, size_t width)
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
	size_t r0 = i / j->col_pieces * j->rows, c0 = i % j->col_pieces * PIECE_COLS;
	size_t rows = MIN(j->rows, n_rows - r0), cols = MIN((size_t)PIECE_COLS, j->n_cols - c0);

	(void)thread;
	j->c->k->matmul[j->w->type](j->w->ne[0], (const char *)j->w->data + r0 * j->w_stride,
				    j->w_stride, rows, j->act + c0 * j->act_stride, j->act_stride,
				    cols, j->y + c0 * n_rows + r0, n_rows);
}

/* Rows of a piece, a multiple of 8 so that kernels can take several at once. */
static size_t matmul_rows(size_t w_stride)
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
				.act_stride = act_bytes(w->type, w->ne[0]) };

	if (n_tok == 0)
		return 0;
	j.act = activations(c, w->type, x, n_tok, w->ne[0]);
	if (!j.act)
		return -ENOMEM;
	j.rows = matmul_rows(j.w_stride);
	j.row_pieces = n_pieces(w->ne[1], j.rows);
	j.col_pieces = n_pieces(n_tok, PIECE_COLS);
	run(c, j.row_pieces * j.col_pieces, matmul_piece, &j);
	/* y may be where the kept input came from. */
	if (c->kept.x && y < c->kept.x + c->kept.n_tok * c->kept.width &&
	    c->kept.x < y + n_tok * w->ne[1])
		drop_kept(c);
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

	drop_kept(c);
	for (size_t i = 0; i < batch->n_rows; i++)
		assert(j.ids[i] >= 0 && (uint64_t)j.ids[i] < w->ne[1]);
	run(c, batch->n_rows, embed_piece, &j);
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
	drop_kept(c);
	j->c = c;
	j->piece = piece_rows(j->width);
	run(c, n_pieces(j->n, j->piece), fn, j);
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
	drop_kept(c);
	j->c = c;
	run(c, n_pieces(j->n, PIECE_FLOATS), fn, j);
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

	drop_kept(c);
	for (size_t t = 0; t < n_tok; t++) {
		float *row = x + t * x_width, s;

		c->k->matmul[QUANT_F32](width, w->data, width * sizeof(float), 1, in + t * width,
					width * sizeof(float), 1, &s, 1);
		s = sigmoid(s);
		for (size_t i = 0; i < x_width; i++)
			row[i] *= s;
	}
	return 0;
}

/* Rope. */

struct rope_job {
	const struct backend_cpu *c;
	const struct backend_span *span;
	float *x;
	const float *freq;
	float *cs; /* n_rot a row */
	size_t stride, n_head, dim, n_rot;
};

static void rope_piece(void *arg, size_t i, unsigned thread)
{
	const struct rope_job *j = arg;
	float *x = j->x + (j->span->row + i) * j->stride, *cs = j->cs + i * j->n_rot;

	(void)thread;
	for (size_t k = 0; k < j->n_rot / 2; k++) {
		/*
		 * The angle in float, as the models were trained with; its sine and cosine exactly.
		 */
		double angle = (double)((float)(j->span->pos + i) * j->freq[k]);

		cs[2 * k] = (float)cos(angle);
		cs[2 * k + 1] = (float)sin(angle);
	}
	for (size_t h = 0; h < j->n_head; h++)
		j->c->k->rope_neox(x + h * j->dim, cs, j->n_rot);
}

static int cpu_rope(struct backend *b, float *x, size_t stride, size_t n_head, size_t dim,
		    size_t n_rot, float freq_base)
{
	struct backend_cpu *c = cpu_of(b);
	const struct backend_span *spans = c->batch->spans;
	float *freq;

	drop_kept(c);
	freq = arena_take(c, n_rot / 2, sizeof(float));
	if (!freq)
		return -ENOMEM;
	for (size_t k = 0; k < n_rot / 2; k++)
		freq[k] = (float)pow((double)freq_base, -2.0 * (double)k / (double)n_rot);
	for (size_t s = 0; s < c->batch->n_spans; s++) {
		struct rope_job j = { .c = c,
				      .span = &spans[s],
				      .x = x,
				      .freq = freq,
				      .stride = stride,
				      .n_head = n_head,
				      .dim = dim,
				      .n_rot = n_rot };
		size_t top = c->top;

		j.cs = arena_take(c, spans[s].n_tok, n_rot * sizeof(float));
		if (!j.cs)
			return -ENOMEM;
		run(c, spans[s].n_tok, rope_piece, &j);
		c->top = top;
	}
	drop_kept(c);
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
	float *out, *scores;
	size_t score_stride;
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
	size_t row = i / j->p->n_head, head = i % j->p->n_head;
	const struct attn_span *s = &j->spans[j->span_of_row[row]];
	size_t n_kv = s->span->pos + (row - s->span->row) + 1;
	const void **k_pages = head_pages(s, head / (j->p->n_head / j->p->n_head_kv));

	j->c->k->attention(j->q + i * j->p->k_dim, k_pages, k_pages + s->n_pages, KV_PAGE_TOK, n_kv,
			   j->p->k_dim, j->p->v_dim, j->f16, j->p->scale,
			   j->scores + thread * j->score_stride, j->out + i * j->p->v_dim);
}

/* Fills the address lists; everything lives in one grown block: spans, rows' spans, addresses. */
static int attn_prepare(struct backend_cpu *c, struct attn_job *j, const struct backend_span *spans,
			size_t n_spans, size_t n_rows)
{
	size_t n_addr = 0, max_kv = 0, row = 0, *span_of_row;
	struct attn_span *as;
	const void **addr;

	for (size_t s = 0; s < n_spans; s++) {
		n_addr += n_pieces(spans[s].pos + spans[s].n_tok, KV_PAGE_TOK) * 2 * j->p->n_head_kv;
		max_kv = MAX(max_kv, spans[s].pos + spans[s].n_tok);
	}
	as = grow_need(&c->pages,
		       n_spans * sizeof(*as) + n_rows * sizeof(size_t) + n_addr * sizeof(void *));
	j->scores = thread_need(c, max_kv, &j->score_stride);
	if (!as || !j->scores)
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

	drop_kept(c);
	r = attn_prepare(c, &j, batch->spans, batch->n_spans, n_rows);
	if (r < 0)
		return r;
	/*
	 * All rows are stored before any is read: a token sees what a later batch will see, in the
	 * arena's precision.
	 */
	run(c, n_rows, store_piece, &j);
	run(c, n_rows * p->n_head, attend_piece, &j);
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

	drop_kept(c);
	j.ch_pieces = n_pieces(j.n_ch, PIECE_CHANNELS);
	j.mixed = arena_take(c, j.n_rows * j.n_ch, sizeof(float));
	j.g = arena_take(c, j.n_rows * p->n_head_v, sizeof(float));
	j.beta = arena_take(c, j.n_rows * p->n_head_v, sizeof(float));
	j.scratch = thread_need(c, cpu_delta_scratch(p->k_dim, p->v_dim), &j.scratch_stride);
	if (!j.mixed || !j.g || !j.beta || !j.scratch) {
		drop_kept(c);
		return -ENOMEM;
	}
	run(c, n_spans * j.ch_pieces, conv_piece, &j);
	run(c, j.n_rows, gates_piece, &j);
	run(c, n_spans * p->n_head_v, delta_piece, &j);
	drop_kept(c);
	return 0;
}

/* Mixture of experts. */

size_t backend_moe_temp_floats(size_t n_embd, size_t n_ff, size_t n_expert, size_t n_used)
{
	/*
	 * input in two forms, probs; chosen, place, weight; gathered, gate_up, hidden, result.
	 * Converted rows are no wider than floats.
	 */
	return 2 * n_embd + n_expert + n_used * (3 + n_embd + 2 * n_ff + n_ff + n_embd);
}

struct route_job {
	const struct backend_cpu *c;
	const struct route *r;
	const float *router;
};

static void route_piece(void *arg, size_t t, unsigned thread)
{
	const struct route_job *j = arg;
	const struct route *r = j->r;
	size_t n = r->p->n_expert;
	float *probs = r->probs + t * n, sum = 0;

	(void)thread;
	memcpy(probs, j->router + t * n, n * sizeof(float));
	j->c->k->softmax(probs, n);
	for (size_t k = 0; k < r->p->n_used; k++) {
		size_t best = 0, slot = t * r->p->n_used + k;

		/*
		 * Strictly greater: of equals the lower index wins. Not-a-number never does, so
		 * best is always valid.
		 */
		for (size_t e = 1; e < n; e++)
			if (probs[e] > probs[best])
				best = e;
		r->chosen[slot] = (uint32_t)best;
		r->weight[slot] = probs[best];
		sum += probs[best];
		probs[best] = -1.0f;
	}
	for (size_t k = 0; k < r->p->n_used; k++)
		r->weight[t * r->p->n_used + k] /= sum;
}

/* Counting sort of the slots by expert; stable, so places of an expert are in token order. */
static void sort_slots(struct route *r)
{
	size_t n_slots = r->n_tok * r->p->n_used;

	memset(r->first, 0, (r->p->n_expert + 1) * sizeof(*r->first));
	for (size_t s = 0; s < n_slots; s++)
		r->first[r->chosen[s] + 1]++;
	for (uint32_t e = 0; e < r->p->n_expert; e++) {
		if (r->first[e + 1] > 0) {
			r->n_rows[r->n_active] = (uint32_t)r->first[e + 1];
			r->active[r->n_active++] = e;
		}
		r->first[e + 1] += r->first[e];
	}
	/* first[e] walks through e's places and ends where e + 1 began: shift back afterwards. */
	for (size_t s = 0; s < n_slots; s++)
		r->place[s] = (uint32_t)r->first[r->chosen[s]]++;
	memmove(r->first + 1, r->first, r->p->n_expert * sizeof(*r->first));
	r->first[0] = 0;
}

static bool route_alloc(struct backend_cpu *c, struct route *r)
{
	size_t n_slots = r->n_tok * r->p->n_used, n = r->p->n_expert;

	r->chosen = arena_take(c, n_slots, sizeof(*r->chosen));
	r->place = arena_take(c, n_slots, sizeof(*r->place));
	r->weight = arena_take(c, n_slots, sizeof(*r->weight));
	r->first = arena_take(c, n + 1, sizeof(*r->first));
	r->active = arena_take(c, n, sizeof(*r->active));
	r->n_rows = arena_take(c, n, sizeof(*r->n_rows));
	r->probs = arena_take(c, r->n_tok * n, sizeof(float));
	return r->chosen && r->place && r->weight && r->first && r->active && r->n_rows && r->probs;
}

/* Chooses; *r lies in the arena from where it was on. */
static int route(struct backend_cpu *c, const struct backend_moe *p, const float *router_logits,
		 size_t n_tok, struct route *r)
{
	struct route_job j = { .c = c, .r = r, .router = router_logits };

	*r = (struct route){ .p = p, .n_tok = n_tok, .mark = c->used };
	if (!route_alloc(c, r))
		return -ENOMEM;
	run(c, n_tok, route_piece, &j);
	sort_slots(r);
	return 0;
}

static void drop_route(struct backend_cpu *c)
{
	if (!c->route.p)
		return;
	c->used = c->route.mark;
	c->route.p = NULL;
	drop_kept(c);
}

static int cpu_moe_route(struct backend *b, const struct backend_moe *p, const float *router_logits,
			 size_t n_tok)
{
	struct backend_cpu *c = cpu_of(b);
	int r;

	drop_route(c); /* of a layer that failed */
	drop_kept(c);
	r = route(c, p, router_logits, n_tok, &c->route);
	if (r < 0) {
		c->route.p = NULL;
		drop_kept(c);
		return r;
	}
	c->used = c->top; /* stays until moe() */
	if (c->residency)
		residency_layer_begin(c->residency, p->layer, c->route.active, c->route.n_rows,
				      c->route.n_active);
	return 0;
}

static bool cpu_moe_wants_guess(struct backend *b)
{
	struct backend_cpu *c = cpu_of(b);

	return c->residency && residency_wants_guess(c->residency);
}

static int cpu_moe_guess(struct backend *b, const struct backend_moe *p, const float *router_logits,
			 size_t n_tok)
{
	struct backend_cpu *c = cpu_of(b);
	struct route r;
	int err;

	drop_kept(c);
	err = route(c, p, router_logits, n_tok, &r);
	if (err == 0)
		residency_guess(c->residency, p->layer, r.active, r.n_active);
	drop_kept(c);
	return err;
}

struct moe_job {
	struct backend_cpu *c;
	const struct backend_moe *p;
	const struct route *r;
	const char *act, *up_act; /* input in the form that gate and up multiply: often the same */
	size_t n_embd, n_ff, act_stride, up_stride, hidden_stride;
	char *gathered, *up_gathered; /* input of each place */
	float *gate_up; /* [place][2 * n_ff]: gate, then up; the product replaces gate */
	char *hidden;   /* the product in the form that down multiplies */
	float *result;  /* [place][n_embd] */
	float *out;
	struct residency_block *wave; /* experts whose weights are in memory now */
	size_t n_wave;
	/* one of the three weights at a time */
	const struct gguf_tensor *w;
	unsigned matrix; /* which */
	const char *w_act;
	float *y;
	size_t w_act_stride, y_stride, w_stride, w_rows, rows, row_pieces;
};

static void gather_piece(void *arg, size_t t, unsigned thread)
{
	const struct moe_job *j = arg;
	size_t n_used = j->p->n_used;

	(void)thread;
	for (size_t k = 0; k < n_used; k++) {
		size_t place = j->r->place[t * n_used + k];

		memcpy(j->gathered + place * j->act_stride, j->act + t * j->act_stride, j->act_stride);
		if (j->up_gathered != j->gathered)
			memcpy(j->up_gathered + place * j->up_stride, j->up_act + t * j->up_stride,
			       j->up_stride);
	}
}

static void expert_piece(void *arg, size_t i, unsigned thread)
{
	const struct moe_job *j = arg;
	const struct residency_block *b = &j->wave[i / j->row_pieces];
	size_t r0 = i % j->row_pieces * j->rows, place = j->r->first[b->expert];

	(void)thread;
	j->c->k->matmul[j->w->type](
		j->w->ne[0], (const char *)b->matrix[j->matrix] + r0 * j->w_stride, j->w_stride,
		MIN(j->rows, j->w_rows - r0), j->w_act + place * j->w_act_stride, j->w_act_stride,
		j->r->first[b->expert + 1] - place, j->y + place * j->y_stride + r0, j->y_stride);
}

/* One weight of every expert of the wave over its places. */
static void run_experts(struct moe_job *j, const struct gguf_tensor *w, unsigned matrix,
			const char *act, size_t act_stride, float *y, size_t y_stride)
{
	j->w = w;
	j->matrix = matrix;
	j->w_act = act;
	j->w_act_stride = act_stride;
	j->y = y;
	j->y_stride = y_stride;
	j->w_stride = quant_row_bytes(w->type, w->ne[0]);
	j->w_rows = w->ne[1];
	j->rows = matmul_rows(j->w_stride);
	j->row_pieces = n_pieces(j->w_rows, j->rows);
	run(j->c, j->n_wave * j->row_pieces, expert_piece, j);
}

/* A piece is an expert: all its places. */
static void hidden_piece(void *arg, size_t i, unsigned thread)
{
	const struct moe_job *j = arg;
	enum quant_type type = cpu_act_type((enum quant_type)j->p->down->type);
	uint32_t e = j->wave[i].expert;

	(void)thread;
	for (size_t place = j->r->first[e]; place < j->r->first[e + 1]; place++) {
		float *gate = j->gate_up + place * 2 * j->n_ff;
		char *hidden = j->hidden + place * j->hidden_stride;

		j->c->k->silu_mul(gate, gate + j->n_ff, type == QUANT_F32 ? (float *)hidden : gate,
				  j->n_ff);
		if (type != QUANT_F32)
			j->c->k->quantize[type](gate, hidden, j->n_ff);
	}
}

static void sum_piece(void *arg, size_t t, unsigned thread)
{
	const struct moe_job *j = arg;

	(void)thread;
	for (size_t k = 0; k < j->p->n_used; k++) {
		size_t slot = t * j->p->n_used + k;

		j->c->k->add_scaled(j->out + t * j->n_embd, j->result + j->r->place[slot] * j->n_embd,
				    j->r->weight[slot], j->n_embd);
	}
}

static int moe_alloc(struct moe_job *j)
{
	struct backend_cpu *c = j->c;
	size_t n_slots = j->r->n_tok * j->p->n_used;

	j->gathered = j->up_gathered = arena_take(c, n_slots, j->act_stride);
	if (j->up_act != j->act)
		j->up_gathered = arena_take(c, n_slots, j->up_stride);
	j->gate_up = arena_take(c, n_slots, 2 * j->n_ff * sizeof(float));
	j->hidden = arena_take(c, n_slots, j->hidden_stride);
	j->result = arena_take(c, n_slots, j->n_embd * sizeof(float));
	j->wave = arena_take(c, j->p->n_expert, sizeof(*j->wave));
	return j->gathered && j->up_gathered && j->gate_up && j->hidden && j->result && j->wave
		       ? 0
		       : -ENOMEM;
}

/*
 * x as the experts' first weights want it; files exist whose gate and up have types of different
 * activation forms.
 */
static int moe_convert(struct moe_job *j, const struct gguf_tensor *in,
		       const struct gguf_tensor *up, const float *x)
{
	enum quant_type type = cpu_act_type((enum quant_type)in->type);
	enum quant_type up_type = up ? cpu_act_type((enum quant_type)up->type) : type;
	char *other;

	j->act_stride = j->up_stride = act_bytes(in->type, in->ne[0]);
	j->act = j->up_act = activations(j->c, in->type, x, j->r->n_tok, in->ne[0]);
	if (!j->act)
		return -ENOMEM;
	if (up_type == type)
		return 0;
	j->up_stride = act_bytes(up->type, up->ne[0]);
	j->up_act = (const char *)x;
	if (up_type == QUANT_F32)
		return 0;
	j->up_act = other = arena_take(j->c, j->r->n_tok, j->up_stride);
	if (!other)
		return -ENOMEM;
	convert(j->c, up_type, x, j->r->n_tok, up->ne[0], other);
	return 0;
}

/* Without residency: every expert at once, in the mapping. */
static size_t whole_wave(struct moe_job *j)
{
	const struct gguf_tensor *const w[] = {
		[0] = j->p->gate_up ? j->p->gate_up : j->p->gate,
		[1] = j->p->gate_up ? NULL : j->p->up,
		[2] = j->p->down,
	};

	for (size_t i = 0; i < j->r->n_active; i++) {
		j->wave[i].expert = j->r->active[i];
		for (unsigned k = 0; k < ARRAY_SIZE(w); k++)
			if (w[k])
				j->wave[i].matrix[k] = (const char *)w[k]->data +
						       j->r->active[i] * w[k]->ne[1] *
							       quant_row_bytes(w[k]->type, w[k]->ne[0]);
	}
	return j->r->n_active;
}

static void run_wave(struct moe_job *j)
{
	const struct gguf_tensor *in = j->p->gate_up ? j->p->gate_up : j->p->gate;

	run_experts(j, in, 0, j->gathered, j->act_stride, j->gate_up, 2 * j->n_ff);
	if (!j->p->gate_up)
		run_experts(j, j->p->up, 1, j->up_gathered, j->up_stride, j->gate_up + j->n_ff,
			    2 * j->n_ff);
	run(j->c, j->n_wave, hidden_piece, j);
	run_experts(j, j->p->down, 2, j->hidden, j->hidden_stride, j->result, j->n_embd);
}

static int run_waves(struct moe_job *j)
{
	struct residency *residency = j->c->residency;
	ssize_t n;

	if (!residency) {
		j->n_wave = whole_wave(j);
		run_wave(j);
		return 0;
	}
	while ((n = residency_layer_next(residency, j->wave, j->p->n_expert)) > 0) {
		j->n_wave = (size_t)n;
		run_wave(j);
	}
	return (int)n;
}

static int cpu_moe(struct backend *b, const struct backend_moe *p, const float *x, size_t n_tok,
		   float *out)
{
	struct backend_cpu *c = cpu_of(b);
	const struct gguf_tensor *in = p->gate_up ? p->gate_up : p->gate;
	struct moe_job j = { .c = c,
			     .p = p,
			     .r = &c->route,
			     .n_embd = p->down->ne[1],
			     .n_ff = p->down->ne[0],
			     .out = out,
			     .hidden_stride = act_bytes(p->down->type, p->down->ne[0]) };
	int r;

	assert(c->route.p == p && c->route.n_tok == n_tok);
	r = moe_convert(&j, in, p->gate_up ? NULL : p->up, x);
	if (r == 0)
		r = moe_alloc(&j);
	if (r == 0) {
		run(c, n_tok, gather_piece, &j);
		r = run_waves(&j);
	}
	if (r == 0)
		run(c, n_tok, sum_piece, &j);
	drop_route(c);
	return r;
}

static void cpu_set_residency(struct backend *b, struct residency *r)
{
	cpu_of(b)->residency = r;
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
	.silu_mul = cpu_silu_mul,
	.sigmoid_mul = cpu_sigmoid_mul,
	.scalar_gate = cpu_scalar_gate,
	.rope = cpu_rope,
	.attention = cpu_attention,
	.delta = cpu_delta,
	.moe_route = cpu_moe_route,
	.moe = cpu_moe,
	.moe_wants_guess = cpu_moe_wants_guess,
	.moe_guess = cpu_moe_guess,
	.set_residency = cpu_set_residency,
};

int backend_cpu_new(unsigned n_threads, size_t scratch_bytes, struct backend **ret)
{
	struct backend_cpu *c = calloc(1, sizeof(*c));
	void *mem;

	if (!c)
		return -ENOMEM;
	c->base.ops = &cpu_ops;
	c->k = cpu_kernels_choose(NULL);
	c->pool = pool_new(n_threads);
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
