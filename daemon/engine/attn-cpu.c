/* SPDX-License-Identifier: MIT */
/*
 * attn-cpu.c: rope and attention on the CPU: the batch's angles, the pages that its sequences have,
 * and the blocks of rows that share keys and values.
 *
 * Owns the member attn of struct backend_cpu. Called through the backend's table; engine thread
 * only. Refuses to know arithmetic, which is kernels/cpu, and who shares a page, which is kv.c's.
 * Invariant: how rows and heads are cut into pieces depends on shapes only.
 */
#include "daemon/engine/attn-cpu.h"

#include "daemon/engine/backend-cpu.h"

#include <assert.h>
#include <math.h>

/* Rows times heads of a piece at most: what is kept of them beside a tile of keys stays in the second cache. */
#define PIECE_QUERIES 128

/* Rope. */

struct angles_job {
	const struct backend_rope *p;
	const struct backend_span *span;
	float *cs; /* of the span's rows: n_rot each */
};

static void angles_piece(void *arg, size_t i, unsigned thread)
{
	const struct angles_job *j = arg;
	float *cs = j->cs + i * j->p->n_rot;

	(void)thread;
	for (size_t k = 0; k < j->p->n_rot / 2; k++) {
		/*
		 * The angle in float, as the models were trained with; its sine and cosine exactly.
		 */
		double angle = (double)((float)(j->span->pos + i) * j->p->freq[k]);

		cs[2 * k] = (float)cos(angle) * j->p->mscale;
		cs[2 * k + 1] = (float)sin(angle) * j->p->mscale;
	}
}

/* Of all rows of the batch, for every layer that asks with the same frequencies. NULL: no memory. */
static const float *need_angles(struct backend_cpu *c, const struct backend_rope *p)
{
	const struct backend_batch *batch = c->batch;
	size_t floats, bytes;
	float *cs;

	if (c->attn.freq == p->freq && c->attn.n_rot == p->n_rot && c->attn.mscale == p->mscale)
		return c->attn.angles.mem;
	c->attn.freq = NULL;
	if (!mul_ok(batch->n_rows, p->n_rot, &floats) || !mul_ok(floats, sizeof(float), &bytes))
		return NULL;
	cs = cpu_grow(&c->attn.angles, bytes);
	if (!cs)
		return NULL;
	for (size_t s = 0; s < batch->n_spans; s++) {
		struct angles_job j = { .p = p,
					.span = &batch->spans[s],
					.cs = cs + batch->spans[s].row * p->n_rot };

		cpu_run(c, j.span->n_tok, angles_piece, &j);
	}
	c->attn.freq = p->freq;
	c->attn.n_rot = p->n_rot;
	c->attn.mscale = p->mscale;
	return cs;
}

struct rope_job {
	void (*rope)(float *x, const float *cs, size_t n_rot);
	float *x;
	const float *cs;
	size_t stride, n_head, dim, n_rot, n_rows, piece;
};

static void rope_piece(void *arg, size_t i, unsigned thread)
{
	const struct rope_job *j = arg;

	(void)thread;
	for (size_t t = i * j->piece; t < MIN((i + 1) * j->piece, j->n_rows); t++)
		for (size_t h = 0; h < j->n_head; h++)
			j->rope(j->x + t * j->stride + h * j->dim, j->cs + t * j->n_rot, j->n_rot);
}

int attn_cpu_rope(struct backend *b, const struct backend_rope *p, float *x, size_t stride,
		  size_t n_head, size_t dim)
{
	struct backend_cpu *c = cpu_of(b);
	struct rope_job j = { .rope = p->pairs ? c->k->rope_norm : c->k->rope_neox,
			      .x = x,
			      .stride = stride,
			      .n_head = n_head,
			      .dim = dim,
			      .n_rot = p->n_rot,
			      .n_rows = c->batch->n_rows,
			      .piece = cpu_piece_rows(n_head * p->n_rot) };

	cpu_drop(c);
	j.cs = need_angles(c, p);
	if (!j.cs)
		return -ENOMEM;
	cpu_run(c, n_pieces(j.n_rows, j.piece), rope_piece, &j);
	return 0;
}

/* Attention. */

/* Page addresses of every key/value head of one span: k then v, n_pages each, head by head. */
struct attn_span {
	const struct backend_span *span;
	const void **pages;
	size_t n_pages;
};

/* Consecutive rows of one span. */
struct block {
	const struct attn_span *s;
	size_t first, n; /* in the span */
};

struct attn_job {
	const struct backend_cpu *c;
	const struct backend_attn *p;
	const struct kv_arena *arena;
	const struct block *blocks;
	size_t n_blocks, block_rows;
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

static void store_piece(void *arg, size_t i, unsigned thread)
{
	const struct attn_job *j = arg;
	const struct backend_attn *p = j->p;
	const struct block *b = &j->blocks[i];
	const struct backend_span *span = b->s->span;

	(void)thread;
	for (size_t t = b->first; t < b->first + b->n; t++) {
		size_t pos = span->pos + t;

		for (uint32_t h = 0; h < p->n_head_kv; h++) {
			const void **pages = head_pages(b->s, h) + pos / KV_PAGE_TOK;
			size_t at = (span->row + t) * p->n_head_kv + h;

			store_row(j, pages[0], pos % KV_PAGE_TOK, p->k_dim, j->k + at * p->k_dim);
			store_row(j, pages[b->s->n_pages], pos % KV_PAGE_TOK, p->v_dim,
				  j->v + at * p->v_dim);
		}
	}
}

static void attend_piece(void *arg, size_t i, unsigned thread)
{
	const struct attn_job *j = arg;
	const struct backend_attn *p = j->p;
	/* From the last block: its rows see the most, and what is left for the end is small. */
	const struct block *b = &j->blocks[j->n_blocks - 1 - i / p->n_head_kv];
	size_t kv_head = i % p->n_head_kv, n_q = p->n_head / p->n_head_kv;
	size_t head = (b->s->span->row + b->first) * p->n_head + kv_head * n_q;
	const void **k_pages = head_pages(b->s, kv_head);
	const float *sinks = p->sinks ? p->sinks->data : NULL;

	j->c->k->attention(&(struct cpu_attention){ .q = j->q + head * p->k_dim,
						    .out = j->out + head * p->v_dim,
						    .q_stride = (size_t)p->n_head * p->k_dim,
						    .out_stride = (size_t)p->n_head * p->v_dim,
						    .n_rows = b->n,
						    .n_q = n_q,
						    .k_pages = k_pages,
						    .v_pages = k_pages + b->s->n_pages,
						    .page_tok = KV_PAGE_TOK,
						    .k_dim = p->k_dim,
						    .v_dim = p->v_dim,
						    .pos = b->s->span->pos + b->first,
						    .window = p->window,
						    .kv_f16 = j->f16,
						    .scale = p->scale,
						    .sinks = sinks ? sinks + kv_head * n_q : NULL,
						    .scratch = j->scratch + thread * j->scratch_stride });
}

static void fill_pages(const struct attn_job *j, struct attn_span *s)
{
	assert(s->n_pages <= s->span->kv->n_pages);
	for (uint32_t h = 0; h < j->p->n_head_kv; h++)
		for (size_t i = 0; i < s->n_pages; i++) {
			uint32_t page = s->span->kv->pages[i];

			head_pages(s, h)[i] = kv_k(j->arena, page, j->p->kv_layer, h);
			head_pages(s, h)[s->n_pages + i] = kv_v(j->arena, page, j->p->kv_layer, h);
		}
}

static size_t span_pages(const struct backend_span *s)
{
	return n_pieces(s->pos + s->n_tok, KV_PAGE_TOK);
}

/* Spans, blocks and page addresses, one behind the other in memory that grows with the context. */
static int prepare(struct backend_cpu *c, struct attn_job *j)
{
	const struct backend_batch *batch = c->batch;
	size_t n_addr = 0, n_blocks = 0, per_page = 2 * (size_t)j->p->n_head_kv;
	struct attn_span *as;
	struct block *block;
	const void **addr;

	for (size_t s = 0; s < batch->n_spans; s++) {
		n_addr += span_pages(&batch->spans[s]) * per_page;
		n_blocks += n_pieces(batch->spans[s].n_tok, j->block_rows);
	}
	as = cpu_grow(&c->attn.pages, batch->n_spans * sizeof(*as) + n_blocks * sizeof(*block) +
					      n_addr * sizeof(*addr));
	j->scratch = cpu_thread_scratch(
		c, cpu_attention_scratch(j->block_rows, j->p->n_head / j->p->n_head_kv, j->p->v_dim),
		&j->scratch_stride);
	if (!as || !j->scratch)
		return -ENOMEM;
	block = (struct block *)(as + batch->n_spans);
	addr = (const void **)(block + n_blocks);
	j->blocks = block;
	j->n_blocks = n_blocks;
	for (size_t s = 0; s < batch->n_spans; s++) {
		const struct backend_span *span = &batch->spans[s];

		as[s] = (struct attn_span){ span, addr, span_pages(span) };
		fill_pages(j, &as[s]);
		addr += as[s].n_pages * per_page;
		for (size_t t = 0; t < span->n_tok; t += j->block_rows)
			*block++ = (struct block){ &as[s], t, MIN(j->block_rows, span->n_tok - t) };
	}
	return 0;
}

int attn_cpu_compute(struct backend *b, const struct backend_attn *p, const float *q,
		     const float *k, const float *v, float *out)
{
	struct backend_cpu *c = cpu_of(b);
	struct attn_job j = { .c = c,
			      .p = p,
			      .arena = c->batch->arena,
			      .block_rows = CLAMP(PIECE_QUERIES / (p->n_head / p->n_head_kv), 1u,
						  (unsigned)CPU_ATTENTION_ROWS),
			      .q = q,
			      .k = k,
			      .v = v,
			      .out = out,
			      .f16 = kv_arena_f16(c->batch->arena) };
	int r;

	cpu_drop(c);
	r = prepare(c, &j);
	if (r < 0)
		return r;
	/*
	 * All rows are stored before any is read: a token sees what a later batch will see, in the
	 * arena's precision.
	 */
	cpu_run(c, j.n_blocks, store_piece, &j);
	cpu_run(c, j.n_blocks * p->n_head_kv, attend_piece, &j);
	return 0;
}
