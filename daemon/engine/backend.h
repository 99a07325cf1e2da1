/* SPDX-License-Identifier: MIT */
/*
 * backend.h: where operations run. A table of functions over float activations in the backend's own memory; weights are named
 * by their GGUF tensor. backend-cpu.c (with attn-cpu.c, delta-cpu.c, moe-cpu.c) is the first, CUDA the second.
 *
 * Owned by the engine; engine thread only. All calls return 0 or -errno; what they computed is there for the calls that follow, and for the
 * caller after end(). -ENODEV from any of them: the device is lost, this backend computes nothing any more. Refuses to know layers,
 * sessions and families. Shapes: activations are [n_tok][width] floats, row-major, without padding, in the backend's own memory.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/engine/kv.h"
#include "daemon/model/gguf.h"

struct backend;
struct residency;
struct residency_block;
struct route;

/* One sequence's rows in a batch: [row, row + n_tok), positions from pos. */
struct backend_span {
	size_t row, n_tok, pos;
	const struct kv_table *kv; /* reserved up to pos + n_tok */
	float *recurrent;          /* of the sequence, all layers; NULL: the model has none */
};

/* What is computed at once: the spans' rows one behind the other. Until end() all of it stays the caller's as it is. */
struct backend_batch {
	const struct kv_arena *arena;
	const struct backend_span *spans;
	size_t n_spans, n_rows;
	const int32_t *ids; /* of the rows */
	size_t n_out;       /* rows of logits */
	float *logits;      /* the caller's memory, n_out x vocabulary */
};

struct backend_moe {
	const struct gguf_tensor *gate, *up,
		*down; /* [n_embd, n_ff, n_expert] x2, [n_ff, n_embd, n_expert] */
	const struct gguf_tensor *gate_up; /* fused form instead of gate and up: first n_ff rows gate; else NULL */
	uint32_t layer;                    /* of the model: whose blocks these are */
	size_t n_expert, n_used;
	/* F32 [n_ff or n_embd, n_expert], added to what the expert's rows give; NULL: none. Not of gate_up: no family has one. */
	const struct gguf_tensor *gate_bias, *up_bias, *down_bias;
	enum backend_gating {
		BACKEND_GATING_SOFTMAX, /* over all experts, the chosen ones' renormalised to 1 */
		BACKEND_GATING_CHOSEN, /* over the logits of the chosen alone: the same numbers but for rounding */
	} gating;
	enum backend_unit {
		BACKEND_UNIT_SILU, /* silu(gate) * up */
		BACKEND_UNIT_OAI,  /* swiglu_oai of kernels/cpu/cpu.h */
	} unit;
};

/* Angle of pair k at position p: p * freq[k]; cosine and sine times mscale. Arrays are the family's, as long as the model. */
struct backend_rope {
	uint32_t n_rot;    /* values that turn, even */
	const float *freq; /* [n_rot / 2] */
	float mscale;
	bool pairs; /* (2 i, 2 i + 1) instead of (i, i + n_rot / 2) */
};

struct backend_attn {
	uint32_t kv_layer; /* index among the attention layers */
	uint32_t n_head, n_head_kv, k_dim, v_dim;
	float scale;
	uint32_t window; /* how many positions a row sees, itself among them; 0: all */
	const struct gguf_tensor *sinks; /* F32 [n_head]; NULL: none */
};

struct backend_delta {
	uint32_t n_head_k, n_head_v, k_dim, v_dim, conv_kernel;
	const struct gguf_tensor *conv; /* [kernel, channels] */
	const struct gguf_tensor *a;    /* [n_head_v], -exp(A_log) */
	const struct gguf_tensor *dt;   /* [n_head_v] */
	size_t state_offset; /* floats: the layer's part of a sequence's recurrent state */
	float l2_eps;
};

struct backend_ops {
	const char *name; /* "cpu" */
	struct backend *(*free)(struct backend *b);
	/* Where pages and recurrent states lie that this backend computes with. Valid as long as the backend. */
	const struct kv_memory *(*memory)(struct backend *b);
	/* Scratch for one batch, 64-byte aligned, valid until end(). NULL when the budget is used up. Operations take their temporaries from
	 * the same budget and return -ENOMEM when it is used up. */
	float *(*scratch)(struct backend *b, size_t n_floats);
	/* 0: the operations of the batch follow. 1: the backend knows this shape of batch by heart, end() runs all of it. */
	int (*begin)(struct backend *b, const struct backend_batch *batch);
	/* Ends a batch, also one that failed (r < 0) or was never begun. r == 0: the logits are in the caller's memory on return. -EAGAIN: nothing
	 * was computed, and the same batch is to be begun and run once more. */
	int (*end)(struct backend *b, int r);
	/* y[t] = row ids[t] of w, of the whole batch. */
	int (*embed)(struct backend *b, const struct gguf_tensor *w, float *y);
	/* y[t][r] = <w row r, x[t]> for the w->ne[1] rows. */
	int (*matmul)(struct backend *b, const struct gguf_tensor *w, const float *x, size_t n_tok,
		      float *y);
	/* The same of n weights at once, y[i] being what w[i] makes of x: no more than a saving of time. No y may overlap x. */
	int (*matmul_many)(struct backend *b, const struct gguf_tensor *const *w, size_t n,
			   const float *x, size_t n_tok, float *const *y);
	/* The same of n_out rows, into the batch's logits. */
	int (*matmul_out)(struct backend *b, const struct gguf_tensor *w, const float *x);
	/* y[t][0..width) = x[t][0..width), rows of x being x_stride floats apart: takes projections apart, picks rows. */
	int (*copy_rows)(struct backend *b, const float *x, size_t x_stride, size_t n_rows,
			 size_t width, float *y);
	/* y[t] = rms_norm(x[t]) * w, groups of `width` values: n_rows rows. y may be x. */
	int (*rms_norm)(struct backend *b, const struct gguf_tensor *w, float eps, const float *x,
			size_t n_rows, size_t width, float *y);
	int (*add)(struct backend *b, float *x, const float *y, size_t n); /* x += y */
	/* x[t] += w (F32 [width]) for n_rows rows: biases. */
	int (*add_bias)(struct backend *b, const struct gguf_tensor *w, float *x, size_t n_rows,
			size_t width);
	int (*silu_mul)(struct backend *b, const float *gate, const float *up, size_t n, float *y);
	int (*sigmoid_mul)(struct backend *b, float *x, const float *gate, size_t n);
	/* x[t] *= sigmoid(<w, in[t]>): the shared expert's gate, one scalar a token. */
	int (*scalar_gate)(struct backend *b, const struct gguf_tensor *w, const float *in,
			   size_t n_tok, size_t width, float *x, size_t x_width);
	/* Rope on the first n_rot of each of n_head heads of `dim` values; row stride in floats. */
	int (*rope)(struct backend *b, const struct backend_rope *p, float *x, size_t stride,
		    size_t n_head, size_t dim);
	/* Writes K and V rows into the pages, then attends causally: out[t][head][v_dim]. q: [t][head][k_dim]. */
	int (*attention)(struct backend *b, const struct backend_attn *p, const float *q,
			 const float *k, const float *v, float *out);
	/* conv + silu + l2 norm + gated delta rule. qkv: [t][2*kd+vd], alpha, beta: [t][n_head_v] (raw projections). Recurrent state
	 * of the layer: conv (kernel-1)*channels floats, then n_head_v*k_dim*v_dim. out: [t][n_head_v][v_dim], before its norm. */
	int (*delta)(struct backend *b, const struct backend_delta *p, const float *qkv,
		     const float *alpha, const float *beta, float *out);
	/* The n_used best by their logits, weighted as p->gating says; what is missing of the chosen experts begins to be read.
	 * router_logits: [t][n_expert]. Must be followed by moe() of the same layer and batch; other operations may be in between. */
	int (*moe_route)(struct backend *b, const struct backend_moe *p, const float *router_logits,
			 size_t n_tok);
	/* Each expert that moe_route() chose once for all its tokens, those in memory first; out[t] += weighted sum, always in the order of
	 * the choice. -EIO, -ENODATA: a block cannot be read. */
	int (*moe)(struct backend *b, const struct backend_moe *p, const float *x, size_t n_tok,
		   float *out);
	/* Is a guess of the next layer's choice worth its computation now? Then its router's logits, of n_tok rows. */
	bool (*moe_wants_guess)(struct backend *b);
	int (*moe_guess)(struct backend *b, const struct backend_moe *p, const float *router_logits,
			 size_t n_tok);
	/* Where experts are; NULL: all in the mapping. Kept by the caller until another is set. */
	void (*set_residency)(struct backend *b, struct residency *r);
};

struct backend {
	const struct backend_ops *ops;
};

/* Temporaries of the large operations, in floats a row, whatever the backend; a matrix product needs at most its input's width. */
size_t backend_moe_temp_floats(size_t n_embd, size_t n_ff, size_t n_expert, size_t n_used);
size_t backend_delta_temp_floats(size_t n_channels, size_t n_head_v);

/*
 * n_threads >= 1 counts the calling thread; the others keep to physical cores of one NUMA node, where those suffice. scratch_bytes bounds the
 * bump arena (virtual; touched as used). tiles: NULL, or reg_cols 0: those of the kernels.
 */
struct cpu_tiles;
int backend_cpu_new(unsigned n_threads, size_t scratch_bytes, const struct cpu_tiles *tiles,
		    struct backend **ret);
const char *backend_cpu_isa(const struct backend *b); /* name of the kernel table */
uint64_t backend_cpu_major_faults(const struct backend *b); /* of the calling thread and the compute threads, ever */

/*
 * A layer's experts on the CPU, for another backend that leaves some of them to it; also outside begin() and end(). From moe_begin to moe_end
 * nothing else is asked of b. x: [n_tok][n_embd] floats in host memory; r: sorted. Both, and p, stay the caller's as they are until moe_end.
 * -ENOMEM: scratch, and there is nothing to end.
 */
int backend_cpu_moe_begin(struct backend *b, const struct backend_moe *p, const struct route *r,
			  const float *x);
/* Computes these blocks of the layer, in host memory, of experts that were chosen. result: [place][n_embd], of which the places of these
 * experts are written: the caller's memory, e.g. page-locked. How blocks are spread over calls changes no bit. */
void backend_cpu_moe_run(struct backend *b, const struct residency_block *blocks, size_t n,
			 float *result);
void backend_cpu_moe_end(struct backend *b);
/* What a moe_begin takes of the scratch, the route and the result not among it. SIZE_MAX: more than there can be. */
size_t backend_cpu_moe_bytes(const struct backend_moe *p, size_t n_tok);

/*
 * On a card that holds m's trunk (card_load()). card and cpu, which computes the experts that are in host memory, must outlive it. Batches of at
 * most batch_tok rows, sequences of at most `context` positions. -ENOMEM, -ENODEV with a text.
 */
struct card;
int backend_cuda_new(struct card *card, const struct model *m, struct backend *cpu,
		     size_t batch_tok, size_t context, struct backend **ret, char **ret_error);
/* What of the card's memory it works in: card_sizes.scratch_bytes. SIZE_MAX on overflow. */
size_t backend_cuda_scratch_bytes(const struct model *m, size_t batch_tok, size_t context);
/* How much of the card is free? Slots are given back or taken accordingly (residency_look_at_card()). -ENODEV: it is lost. */
int backend_cuda_look(struct backend *b);
uint64_t backend_cuda_host_bytes(const struct backend *b); /* page-locked memory that goes with it */
const char *backend_cuda_error(const struct backend *b);   /* what made it say -ENODEV; "" */
