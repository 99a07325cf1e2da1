/* SPDX-License-Identifier: MIT */
/*
 * graph.h: one batch through one model on one backend.
 *
 * Owns nothing beyond the call: the engine owns model, backend, arena and states. Engine thread only. A batch holds rows of one or
 * several sequences; each sequence's rows are consecutive positions. Invariant: after success every state has n_tok advanced by its
 * rows; after any failure (also -ECANCELED) the states of the batch are reset, because recurrent state cannot be half advanced.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/engine/backend.h"
#include "daemon/engine/state.h"
#include "daemon/model/model.h"

struct graph_seq {
	struct state *state;
	const int32_t *tokens;
	size_t n_tok;
	enum graph_want {
		GRAPH_WANT_NONE,
		GRAPH_WANT_LAST,
		GRAPH_WANT_ALL
	} want; /* whose logits */
};

/*
 * Evaluates seqs in one batch. logits: room for (number of wanted rows) x n_vocab floats, in order of sequences and positions.
 * abort (may be NULL) is looked at between layers. -ENOSPC: the KV arena is full (nothing was changed); -ECANCELED; -EINVAL: a token id
 * out of range or no rows at all; -ENOMEM: scratch (the backend's budget bounds the rows of a batch, see graph_scratch_bytes()). A
 * state may appear only once in a batch.
 */
int graph_forward(struct model *m, struct backend *b, struct kv_arena *a, const struct graph_seq *seqs,
		  size_t n_seqs, const atomic_bool *abort, float *logits);
/* Scratch bytes that a batch of n_rows needs (n_out rows of logits not included); SIZE_MAX when that overflows. */
size_t graph_scratch_bytes(const struct model *m, size_t n_rows);

/*
 * What arch->forward() works with. Activations are n_rows rows; they come from graph_take() and are given back in stack
 * order by graph_release(). All blocks return 0 or -errno as the backend does.
 */
struct graph {
	struct model *model;
	struct backend *backend;
	struct kv_arena *arena;
	const atomic_bool *abort;
	const struct graph_seq *seqs;
	struct backend_span *spans; /* one per sequence, in row order */
	size_t n_seqs, n_rows, n_out;
	int32_t *ids; /* of all rows */
	float *logits;
	float *work; /* n_rows x model->row_floats, handed out by graph_take() */
	size_t work_used, work_floats;
};

/* n_rows x width floats. Never NULL: arch->load() has promised in model->row_floats what forward() takes (asserted). */
float *graph_take(struct graph *g, size_t width);
size_t graph_mark(const struct graph *g);
void graph_release(struct graph *g, size_t mark); /* everything taken since the mark */
/* What graph_take() of one row of this width counts for in model->row_floats. */
size_t graph_width_floats(size_t width);
/* To be asked between layers: 0 or -ECANCELED. */
int graph_continue(const struct graph *g);
int graph_embed(struct graph *g, const struct gguf_tensor *w, float *y);
int graph_matmul(struct graph *g, const struct gguf_tensor *w, const float *x, float *y);
/* y[i] = what w[i] makes of x, n weights at once. */
int graph_matmul_many(struct graph *g, const struct gguf_tensor *const *w, size_t n, const float *x,
		      float *const *y);
/* RMS norm of groups of `width` values, n_groups in a row. y may be x. */
int graph_rms_norm(struct graph *g, const struct gguf_tensor *w, float eps, const float *x,
		   size_t n_groups, size_t width, float *y);
/* x += y, rows of `width`. */
int graph_add(struct graph *g, float *x, const float *y, size_t width);
/* The wanted rows of x through the last norm and the output head, into the caller's logits. */
int graph_output(struct graph *g, const float *x, const struct gguf_tensor *norm, float eps,
		 const struct gguf_tensor *head);
