/* SPDX-License-Identifier: MIT */
/*
 * backend-cuda.h: what backend-cuda.c (the operations) and moe-cuda.c (the experts) share. Engine thread only; nobody else includes it.
 */
#pragma once

#include "daemon/engine/backend.h"
#include "daemon/engine/card.h"
#include "daemon/engine/route.h"
#include "daemon/residency/residency.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/args.h"

/* Page-locked memory of the host and its counterpart on the card. */
struct mirror {
	void *host, *card;
	size_t bytes;
};

struct backend_cuda {
	struct backend base;
	struct card *card;
	struct cuda_driver *driver;
	struct cuda_stream *stream;
	struct backend *cpu; /* computes the experts that are not on the card */
	const struct cpu_kernels *cpu_kernels;
	struct residency *residency;
	const struct model *model;
	size_t batch_tok;
	const struct backend_batch *batch; /* at hand */
	uint64_t n_batches;                /* that were computed */
	int error;                         /* < 0: the card is lost; error_text says why */
	char error_text[256];
	uint64_t looked_us; /* at how much of the card is free */

	/* Scratch: what lives for the batch, and above it what lives for one operation. */
	char *arena;
	size_t arena_bytes, used, top;
	struct {
		const float *x; /* NULL: nothing kept */
		size_t n_tok, width;
		enum quant_type type;
		void *act;
	} kept;

	void *pinned; /* all that is page-locked */
	size_t pinned_bytes;
	struct mirror info; /* spans, rows' spans, positions, pages */
	float *rows; /* pinned: batch_tok x n_embd, rows of the embedding up, of experts' input down */
	float *logits;        /* pinned: one row */
	float *out;           /* card: CUDA_COLS rows of logits */
	struct mirror choice; /* of a layer: experts, then weights */
	struct mirror places; /* of a layer: place of each slot, token of each place, tiles */
	struct mirror other;  /* results of the CPU, of a small batch: [slot][n_embd] */
	struct cuda_event *ready;

	/* Where things of the batch are on the card. */
	const struct cuda_span *spans;
	const uint32_t *span_of_row, *positions;
	size_t max_kv;
	float *freq;          /* card: of the rope at hand */
	const float *freq_of; /* whose they are; NULL: nobody's */

	/* The layer's choice between moe_route() and moe(). */
	const struct backend_moe *moe;
	struct route route;
	void *route_mem;
	struct residency_block *wave; /* [experts] */
	uint8_t *on_cpu;              /* [experts] */
	float *result;                /* of the CPU's experts, by place */
	uint32_t *card_experts;       /* [slot] */
	float *card_weights;
	size_t moe_mark;

	/* A step of one row in which every block is on the card, recorded. */
	struct {
		struct cuda_graph_exec *exec; /* NULL: none */
		bool recording, replaying;
		bool off; /* recording failed once: never again with this card */
		size_t n_split, n_layers;
		struct mirror chosen; /* [layer with experts][n_used] */
		uint32_t layers[1024];
		const struct gguf_tensor *embd;
		const void *base; /* of the pages */
	} graph;
};

static inline struct backend_cuda *cuda_of(struct backend *b)
{
	return (struct backend_cuda *)b;
}

/* Passes a call's result on; the first failure is remembered, and ends the use of the card: -ENODEV from then on. */
int backend_cuda_check(struct backend_cuda *c, int r);
/* Of the operation's scratch. NULL: used up. */
void *backend_cuda_take(struct backend_cuda *c, size_t n, size_t size);
void backend_cuda_drop_kept(struct backend_cuda *c);
int backend_cuda_launch(struct backend_cuda *c, struct cuda_function *f, size_t x, size_t y, size_t z,
			unsigned threads, unsigned shared_bytes, const void *args, size_t args_bytes);
#define LAUNCH(c, f, x, y, args) backend_cuda_launch(c, f, x, y, 1, 0, 0, &(args), sizeof(args))
/* x in the form that weights of this type multiply; kept for the next product. *ret_stride: bytes a row. */
int backend_cuda_activations(struct backend_cuda *c, uint32_t weight_type, const float *x,
			     size_t n_tok, size_t width, const void **ret, size_t *ret_stride);
int backend_cuda_quantize(struct backend_cuda *c, enum quant_type type, const float *x,
			  size_t n_rows, size_t width, void *act);

int moe_cuda_route(struct backend *b, const struct backend_moe *p, const float *router_logits,
		   size_t n_tok);
int moe_cuda(struct backend *b, const struct backend_moe *p, const float *x, size_t n_tok, float *out);
bool moe_cuda_wants_guess(struct backend *b);
int moe_cuda_guess(struct backend *b, const struct backend_moe *p, const float *router_logits,
		   size_t n_tok);
int moe_cuda_note_graph(struct backend_cuda *c); /* what a replayed step chose */
/* Bytes of one row set of the mirrors above. */
size_t moe_cuda_places_bytes(size_t n_tok, size_t n_used, size_t n_expert);
