/* SPDX-License-Identifier: MIT */
/*
 * arch-decoder.h: what the families have in common: a stack of layers, each of them attention and then a feed-forward network or
 * routed experts, both behind an RMS norm and added to the stream. A family says what it has of this in struct decoder
 * and binds its layers in load(); one with another mixer than attention in some layers brings that itself.
 *
 * For arch-*.c only. Owned by the model (m->arch_data, the first member of a family's own struct), immutable after load. Refuses to
 * know names of families. Invariant as in arch.h: every number used as a size or divisor was bounded, every tensor has the shape
 * that the numbers imply.
 */
#pragma once

#include "daemon/engine/backend.h"
#include "daemon/model/arch.h"

#define DECODER_LAYERS_MAX   1024
#define DECODER_HEADS_MAX    1024
#define DECODER_DIM_MAX      (1u << 20)
#define DECODER_HEAD_DIM_MAX 4096

struct decoder_layer {
	const struct gguf_tensor *norm, *post_norm;
	uint32_t kv_layer; /* index among the attention layers */
	uint32_t window;   /* 0: sees everything before it */
	const struct gguf_tensor *q, *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *sinks;
	const struct gguf_tensor *attn_out, *attn_out_bias;
	const struct gguf_tensor *gate, *up, *down, *gate_bias, *up_bias, *down_bias; /* no experts */
	const struct gguf_tensor *router, *router_bias;                               /* experts */
	const struct gguf_tensor *shared_router, *shared_gate, *shared_up, *shared_down;
	struct backend_moe moe;
};

struct decoder {
	/* The family's, before anything else. */
	const char *post_norm_name;
	bool qk_norm; /* RMS norms of each head's query and key */
	bool gated;  /* attn_q rows are, per head, the query and then a gate of the head's output */
	bool sinks;  /* a logit per head that takes its share of the attention and gives nothing */
	bool biases; /* of attention, router and experts: all of them are there */
	bool rope_pairs;
	enum backend_gating gating;
	enum backend_unit unit;
	uint32_t n_nextn; /* layers at the end of the file for multi-token prediction: they do not run */
	int (*mixer)(struct graph *g, uint32_t i, const float *h, float *x); /* x += it; NULL: attention */

	/* decoder_load_sizes() */
	uint32_t n_head, n_head_kv, head_dim;
	float scale, eps;
	struct backend_rope rope;
	float *freq;                                         /* of rope */
	uint32_t n_ff;                                       /* 0: experts */
	uint32_t n_expert, n_used, n_ff_expert, n_ff_shared; /* 0: none */
	const struct gguf_tensor *embd, *out_norm, *out;
	struct decoder_layer *layers;
};

/* m->arch_data, size bytes of zeros that begin with a struct decoder. NULL: no memory. */
void *decoder_new(struct model *m, size_t size, char **ret_error);
void decoder_unload(struct model *m); /* arch->unload() of a family whose struct owns nothing else */

/*
 * In this order, 0 or the errors of arch->load(). Sizes of model and attention; m->n_layer, n_block and the layers' memory. known: see
 * arch_refuse_unknown().
 */
int decoder_load_sizes(struct model *m, struct decoder *d, const char *known, char **ret_error);
/* One of both. */
int decoder_load_ffn(struct model *m, struct decoder *d, char **ret_error);
int decoder_load_experts(struct model *m, struct decoder *d, const char *ff_key, char **ret_error);
/* Embeddings, last norm, output head. */
int decoder_bind_model(struct model *m, struct decoder *d, char **ret_error);
/* A layer's norms and feed-forward part; its attention, counted in m->kv. */
int decoder_bind_layer(struct model *m, struct decoder *d, uint32_t i, char **ret_error);
int decoder_bind_attention(struct model *m, struct decoder *d, uint32_t i, char **ret_error);
/* Sums up scratch, and says what no GPU does. Of the family's own mixer: floats a row, widest input. 0: none. */
void decoder_finish(struct model *m, const struct decoder *d, size_t mixer_floats,
		    size_t mixer_op_floats);
/* All of these, in a family whose layers all have attention. */
int decoder_bind_plain(struct model *m, struct decoder *d, char **ret_error);

/* x += attention of layer i, of h. */
int decoder_attention(struct graph *g, uint32_t i, const float *h, float *x);
int decoder_forward(struct graph *g); /* arch->forward() */
