/* SPDX-License-Identifier: MIT */
/*
 * arch.h: the table of model families. One arch-*.c per family fills one struct arch; nothing else in the code asks which
 * family a model belongs to.
 *
 * load() runs once on the engine thread, binds tensors and checks every shape against the metadata (a file is hostile:
 * shapes that disagree are -EBADMSG, a tensor type without kernel is -EOPNOTSUPP, both name the tensor). forward() computes
 * one batch by calling graph.h building blocks and the backend; it owns nothing.
 */
#pragma once

#include "daemon/base.h"

struct model;
struct graph;

struct arch {
	const char *name; /* general.architecture */
	/* Fills m->n_vocab, n_embd, n_layer, n_block, n_ctx_train, kv layout, recurrent and scratch sizes and m->arch_data. */
	int (*load)(struct model *m, char **ret_error);
	void (*unload)(struct model *m); /* frees m->arch_data; accepts a half-loaded one */
	/* Rows of graph->batch through all layers; ends with graph_output(). 0, -ECANCELED, -errno. */
	int (*forward)(struct graph *g);
};

const struct arch *arch_find(const char *name, size_t len); /* NULL: not supported */
/* "qwen35moe, ..." for error texts; static. */
const char *arch_list(void);

/* Metadata "<architecture>.<key>", checked to be in [lo, hi]. -EBADMSG with an error text that names key and reason. *value keeps what
 * it had when the key is absent and `optional` is set. A u32 may be an array with the same number for each layer, as llama.cpp
 * writes some; -EOPNOTSUPP where they differ. */
int arch_get_u32(const struct model *m, const char *key, bool optional, uint32_t lo, uint32_t hi,
		 uint32_t *value, char **ret_error);
int arch_get_f32(const struct model *m, const char *key, bool optional, float lo, float hi,
		 float *value, char **ret_error);

/* A list of them; nothing beyond the first that fails. */
struct arch_number {
	const char *key;
	uint32_t *to, lo, hi;
	bool optional;
};

int arch_get_numbers(const struct model *m, const struct arch_number *list, size_t n, char **ret_error);

/*
 * Metadata that would change what a model computes and that no family here computes (clamps, soft caps, other scales...): -EOPNOTSUPP and
 * the key's name where one is there with another value than the neutral one. `known`: a key of the list that the caller does compute, or NULL.
 */
int arch_refuse_unknown(const struct model *m, const char *known, char **ret_error);

/* One tensor of a layer and the shape that the metadata implies (unused dimensions 0). A matrix may have any type with a
 * kernel; a vector is used as it is by float kernels, so it must be F32. */
struct arch_tensor {
	const char *name; /* without "blk.N." */
	const struct gguf_tensor **to;
	bool vector, optional;
	uint64_t ne[3];
};

/* Binds a list; layer < 0: names without "blk.N.". *to is NULL for an absent optional one. Errors as arch->load(). */
int arch_bind(struct model *m, int64_t layer, const struct arch_tensor *list, size_t n,
	      char **ret_error);

/*
 * Angles of rope for the metadata rope.{freq_base, scaling.type, scaling.factor, scaling.original_context_length, ...} and the tensor
 * rope_freqs.weight, where they are there: what backend.h wants, *freq allocated ([n_rot / 2], the caller's). -EBADMSG, -EOPNOTSUPP for an
 * unknown kind of scaling, -ENOMEM. Source of YaRN: arXiv 2309.00071; of its amplitude and of rounding its ramp's ends: llama.cpp.
 */
int arch_get_rope(struct model *m, uint32_t n_rot, float **ret_freq, float *ret_mscale,
		  char **ret_error);

extern const struct arch arch_qwen35moe, arch_qwen35, arch_qwen3moe, arch_qwen3, arch_llama,
	arch_gpt_oss;
