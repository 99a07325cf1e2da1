/* SPDX-License-Identifier: MIT */
/*
 * card.h: a GPU taken up for one model: its context, the trunk's weights in its memory, memory for sequences and scratch.
 *
 * Owned by engine.c, engine thread only. Refuses to know operations (backend-cuda.c), which blocks are worth a slot (residency.h), and how
 * to go on without it. Everything here is taken before any slot for a block, so that what remains of the budget is known. Invariant: no
 * allocation of the card is made after card_load() but by vram.h. Errors are those of driver.h; after -ENODEV only card_close() is of use.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/engine/kv.h"
#include "daemon/model/model.h"
#include "kernels/cpu/quant.h"
#include "kernels/cuda/driver.h"

struct card;
struct vram;

/* Kernels by the type of weights. */
enum card_kernel {
	CARD_MATMUL,
	CARD_MATMUL_TILED,
	CARD_MOE_UP,
	CARD_MOE_DOWN,
	CARD_MOE_TILED,
	CARD_QUANTIZE, /* by the type of activations */
	CARD_BY_TYPE,
};

enum card_function {
	CARD_RMS_NORM,
	CARD_ADD,
	CARD_SILU_MUL,
	CARD_SIGMOID_MUL,
	CARD_COPY_ROWS,
	CARD_SCALAR_GATE,
	CARD_ROPE,
	CARD_KV_STORE,
	CARD_ATTENTION_ROWS,
	CARD_ATTENTION_JOIN,
	CARD_CONV_SILU,
	CARD_DELTA_GATES,
	CARD_DELTA_RULE,
	CARD_DELTA_CHUNK,
	CARD_ROUTE,
	CARD_GATHER_ROWS,
	CARD_MOE_SUM,
	CARD_FUNCTIONS,
};

struct card_sizes {
	uint64_t budget_bytes;  /* of everything of ours; 0: what is free, less the reserve */
	uint64_t reserve_bytes; /* left free */
	uint64_t scratch_bytes;
	uint64_t pages_bytes;       /* of keys and values, if there is room for so much */
	uint64_t pages_least_bytes; /* one full conversation */
};

/* Context and kernels, nothing of the model yet. *ret_error: one line for people. */
int card_open(struct card **ret, char **ret_error);
struct card *card_close(struct card *c); /* vram that lies on it must be gone; accepts NULL, returns NULL */
const struct cuda_info *card_info(const struct card *c);
const char *card_code(const struct card *c);

/* Brings the trunk over and takes the memory for sequences, scratch and the table of experts. The host's copy of the trunk may go then, but for
 * m->embd. stop is looked at between pieces: -ECANCELED. -ENOSPC: the card does not hold trunk and one conversation, with the numbers; -E2BIG:
 * it would, but the budget never does; -EOPNOTSUPP: the model has a type or a shape that no kernel takes. */
int card_load(struct card *c, const struct model *m, const struct card_sizes *sizes,
	      const atomic_bool *stop, char **ret_error);

struct cuda_driver *card_driver(const struct card *c);
struct cuda_stream *card_stream(const struct card *c); /* what computes */
struct vram *card_vram(const struct card *c);          /* NULL: the model has no experts */
struct cuda_function *card_kernel(const struct card *c, enum card_kernel k, uint32_t type);
struct cuda_function *card_function(const struct card *c, enum card_function f);
const void *card_weight(const struct card *c, const struct gguf_tensor *w);
const struct kv_memory *card_memory(const struct card *c);
void *card_scratch(const struct card *c, uint64_t *ret_bytes);

uint64_t card_trunk_bytes(const struct card *c);
uint64_t card_fixed_bytes(const struct card *c); /* trunk, sequences, scratch */
uint64_t card_pages_bytes(const struct card *c); /* what the arena of keys and values may have */
uint64_t card_kv_bytes(const struct card *c);    /* that and all recurrent states */
uint32_t card_max_runs(const struct card *c); /* sequences at work at a time whose states have room */
uint64_t card_slots_max(const struct card *c); /* bytes that slots may take at most: the budget's rest */
/* What others and we have left free. */
int card_free_bytes(const struct card *c, uint64_t *ret);
