/* SPDX-License-Identifier: MIT */
/*
 * catalog.h: which bytes of the model belong to which block, and which to the trunk.
 *
 * Built once from the parsed file, immutable, so any thread may read. Refuses to know where a block lies at the moment (host.h)
 * and which family the model is of: expert matrices are known by their tensor names, blk.N.ffn_{gate,up,gate_up,down}_exps.weight.
 * Invariant: the byte ranges of all blocks and of the trunk are disjoint and inside the file; blocks are numbered
 * 0..n_blocks-1, layer by layer, expert by expert.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/gguf.h"

#define CATALOG_MATRICES 3 /* gate (or gate and up fused), up (absent when fused), down */
#define CATALOG_NONE     UINT32_MAX

struct catalog_range {
	uint32_t part; /* of a split model */
	uint64_t offset, bytes;
	const void *data; /* in the mapping of the part; NULL where the file is not mapped */
};

/* A layer of the model. */
struct catalog_layer {
	uint32_t first_block; /* CATALOG_NONE: no routed experts here */
	uint32_t n_expert;
	uint64_t block_bytes;                               /* of each block of this layer */
	const struct gguf_tensor *matrix[CATALOG_MATRICES]; /* [.., .., n_expert]; NULL: absent */
	uint64_t expert_bytes[CATALOG_MATRICES];            /* what one expert has of each */
};

struct catalog {
	const struct gguf *gguf; /* must outlive the catalog */
	struct catalog_layer *layers;
	uint32_t n_layers;       /* of the model, also those without experts */
	uint32_t *expert_layers; /* those with experts, ascending */
	uint32_t n_expert_layers;
	uint32_t n_blocks;
	uint64_t block_bytes;     /* of all blocks */
	uint64_t block_bytes_max; /* of the largest */
	uint64_t unused_bytes;    /* tensors of layers >= n_layers: read by nobody */
	/* All other tensors, merged where they touch (padding between two of them included), in file order. */
	struct catalog_range *trunk;
	size_t n_trunk;
	uint64_t trunk_bytes;
	uint64_t identity; /* hash of names, types, shapes and places of all tensors, and of the files' sizes: whose heat a file is */
};

struct catalog_block {
	uint32_t layer, expert;
	uint32_t n_ranges; /* 1 to CATALOG_MATRICES, those that are there, in matrix order */
	struct catalog_range range[CATALOG_MATRICES];
	uint64_t bytes;
};

/* n_layers: layers that run (a file may have more: multi-token prediction); 0: as many as the file's tensors name.
 * A model without experts has no blocks and is all trunk. -ENOMEM; -EBADMSG with an error text when expert tensors disagree
 * about the number of experts, lie over other tensors, or a layer has gate but no down. */
int catalog_new(const struct gguf *g, uint32_t n_layers, struct catalog **ret, char **ret_error);
struct catalog *catalog_free(struct catalog *c); /* accepts NULL, returns NULL */
DEFINE_CLEANUP(struct catalog *, catalog_free)

/* block < n_blocks. */
void catalog_block(const struct catalog *c, uint32_t block, struct catalog_block *ret);
uint32_t catalog_layer_of(const struct catalog *c, uint32_t block); /* O(log layers) */
uint64_t catalog_block_bytes(const struct catalog *c, uint32_t block);
/* Of the model's file: neither a block's matrix nor of a layer that does not run. */
bool catalog_in_trunk(const struct catalog *c, const struct gguf_tensor *t);
