/* SPDX-License-Identifier: MIT */
/*
 * graph.c: makes a batch out of sequences, runs it through the model's family, and keeps the states
 * whole. See graph.h.
 *
 * Owns one struct graph for the time of a call. Engine thread only. Refuses to know families
 * (arch->forward() calls back into the building blocks below) and where operations run (backend.h).
 * Invariant: nothing is computed before all memory of the batch is there, and from the first
 * operation on a failure resets every state of the batch.
 */
#include "daemon/engine/graph.h"

#include <assert.h>

/* Beyond the rows: per-expert counters, rounding of every temporary to cache lines. */
#define SCRATCH_FIXED_BYTES ((size_t)1 << 20)
/* graph_take() hands out whole cache lines. */
#define LINE_FLOATS         16

size_t graph_width_floats(size_t width)
{
	/* A batch of one row rounds up the most. */
	return ALIGN_UP(width, (size_t)LINE_FLOATS);
}

size_t graph_scratch_bytes(const struct model *m, size_t n_rows)
{
	size_t floats, bytes;

	if (!add_ok(m->row_floats, m->op_floats, &floats) || !mul_ok(floats, n_rows, &floats) ||
	    !mul_ok(floats, sizeof(float), &bytes) || !add_ok(bytes, SCRATCH_FIXED_BYTES, &bytes))
		return SIZE_MAX;
	return bytes;
}

float *graph_take(struct graph *g, size_t width)
{
	size_t floats = ALIGN_UP(g->n_rows * width, (size_t)LINE_FLOATS);
	float *p = g->work + g->work_used;

	assert(floats <= g->work_floats - g->work_used);
	g->work_used += floats;
	return p;
}

size_t graph_mark(const struct graph *g)
{
	return g->work_used;
}

void graph_release(struct graph *g, size_t mark)
{
	assert(mark <= g->work_used);
	g->work_used = mark;
}

int graph_continue(const struct graph *g)
{
	return g->abort && atomic_load_explicit(g->abort, memory_order_relaxed) ? -ECANCELED : 0;
}

int graph_embed(struct graph *g, const struct gguf_tensor *w, float *y)
{
	return g->backend->ops->embed(g->backend, w, y);
}

int graph_matmul(struct graph *g, const struct gguf_tensor *w, const float *x, float *y)
{
	return g->backend->ops->matmul(g->backend, w, x, g->n_rows, y);
}

int graph_matmul_many(struct graph *g, const struct gguf_tensor *const *w, size_t n, const float *x,
		      float *const *y)
{
	return g->backend->ops->matmul_many(g->backend, w, n, x, g->n_rows, y);
}

int graph_rms_norm(struct graph *g, const struct gguf_tensor *w, float eps, const float *x,
		   size_t n_groups, size_t width, float *y)
{
	return g->backend->ops->rms_norm(g->backend, w, eps, x, g->n_rows * n_groups, width, y);
}

int graph_add(struct graph *g, float *x, const float *y, size_t width)
{
	return g->backend->ops->add(g->backend, x, y, g->n_rows * width);
}

/* How many of a sequence's rows are wanted: always its last ones. */
static size_t n_wanted(const struct graph_seq *s)
{
	switch (s->want) {
	case GRAPH_WANT_NONE: return 0;
	case GRAPH_WANT_LAST: return 1;
	case GRAPH_WANT_ALL: return s->n_tok;
	}
	return 0;
}

int graph_output(struct graph *g, const float *x, const struct gguf_tensor *norm, float eps,
		 const struct gguf_tensor *head)
{
	const struct backend_ops *ops = g->backend->ops;
	size_t width = g->model->n_embd, mark = graph_mark(g), n = 0;
	float *rows;
	int r = 0;

	if (g->n_out == 0)
		return 0;
	rows = graph_take(g, width);
	for (size_t i = 0; i < g->n_seqs && r == 0; i++) {
		size_t k = n_wanted(&g->seqs[i]), first = g->spans[i].row + g->spans[i].n_tok - k;

		if (k > 0)
			r = ops->copy_rows(g->backend, x + first * width, width, k, width,
					   rows + n * width);
		n += k;
	}
	if (r == 0)
		r = ops->rms_norm(g->backend, norm, eps, rows, n, width, rows);
	if (r == 0)
		r = ops->matmul_out(g->backend, head, rows);
	graph_release(g, mark);
	return r;
}

static int check_seqs(struct graph *g)
{
	const struct model *m = g->model;

	for (size_t i = 0; i < g->n_seqs; i++) {
		const struct graph_seq *s = &g->seqs[i];
		size_t end;

		for (size_t k = 0; k < i; k++)
			assert(g->seqs[k].state != s->state);
		if (s->n_tok == 0 || !add_ok(s->state->n_tok, s->n_tok, &end) ||
		    !add_ok(g->n_rows, s->n_tok, &g->n_rows))
			return -EINVAL;
		for (size_t k = 0; k < s->n_tok; k++)
			if (s->tokens[k] < 0 || (uint32_t)s->tokens[k] >= m->n_vocab)
				return -EINVAL;
		g->n_out += n_wanted(s);
	}
	return g->n_rows > 0 ? 0 : -EINVAL;
}

static int alloc_batch(struct graph *g)
{
	size_t bytes, row = 0;

	if (!mul_ok(g->n_rows, sizeof(*g->ids), &bytes))
		return -ENOMEM;
	g->ids = malloc(bytes);
	g->spans = calloc(g->n_seqs, sizeof(*g->spans));
	if (!g->ids || !g->spans)
		return -ENOMEM;
	for (size_t i = 0; i < g->n_seqs; i++) {
		const struct graph_seq *s = &g->seqs[i];

		g->spans[i] = (struct backend_span){
			.row = row, .n_tok = s->n_tok, .pos = s->state->n_tok, .kv = &s->state->kv
		};
		memcpy(g->ids + row, s->tokens, s->n_tok * sizeof(*g->ids));
		row += s->n_tok;
	}
	if (!mul_ok(g->n_rows, g->model->row_floats, &g->work_floats))
		return -ENOMEM;
	g->work = g->backend->ops->scratch(g->backend, g->work_floats);
	return g->work ? 0 : -ENOMEM;
}

/*
 * Pages and recurrent memory of every sequence, or of none. A shared page that was copied before a
 * later sequence found the arena full stays copied: same contents, one page less free.
 */
static int reserve_states(struct graph *g)
{
	size_t done = 0;
	int r = 0;

	for (; done < g->n_seqs && r == 0; done++) {
		struct state *s = g->seqs[done].state;

		r = state_begin(s, g->model, g->arena);
		if (r == 0 && g->model->kv.n_layer > 0)
			r = kv_table_reserve(g->arena, &s->kv, s->n_tok, s->n_tok + g->seqs[done].n_tok);
	}
	if (r == 0)
		return 0;
	for (size_t i = 0; i < done; i++) {
		struct state *s = g->seqs[i].state;

		if (s->n_tok == 0)
			state_reset(s, g->arena);
		else
			kv_table_truncate(g->arena, &s->kv, s->n_tok);
	}
	return r;
}

static int run(struct graph *g)
{
	const struct backend_ops *ops = g->backend->ops;
	const struct backend_batch batch = {
		.arena = g->arena,
		.spans = g->spans,
		.n_spans = g->n_seqs,
		.n_rows = g->n_rows,
		.ids = g->ids,
		.n_out = g->n_out,
		.logits = g->logits,
	};
	int r;

	do {
		r = ops->begin(g->backend, &batch);
		if (r == 0)
			r = g->model->arch->forward(g);
		r = ops->end(g->backend, MIN(r, 0));
	} while (r == -EAGAIN);
	return r;
}

int graph_forward(struct model *m, struct backend *b, struct kv_arena *a,
		  const struct graph_seq *seqs, size_t n_seqs, const atomic_bool *abort, float *logits)
{
	struct graph g = { .model = m,
			   .backend = b,
			   .arena = a,
			   .abort = abort,
			   .seqs = seqs,
			   .n_seqs = n_seqs,
			   .logits = logits };
	int r = check_seqs(&g);

	if (r == 0)
		r = alloc_batch(&g);
	if (r == 0)
		r = reserve_states(&g);
	if (r == 0) {
		for (size_t i = 0; i < n_seqs; i++)
			g.spans[i].recurrent = seqs[i].state->recurrent;
		r = run(&g);
		for (size_t i = 0; i < n_seqs; i++)
			if (r == 0)
				seqs[i].state->n_tok += seqs[i].n_tok;
			else
				state_reset(seqs[i].state, a);
	} else {
		(void)b->ops->end(b, r);
	}
	free(g.ids);
	free(g.spans);
	return r;
}
