/* SPDX-License-Identifier: MIT */
/*
 * bpe.h: byte-pair merging of one piece of text.
 *
 * Owns the table of merges and the order in which they happen: the pair of lowest rank first, the
 * leftmost of equals. Used by tokenizer.c only; immutable once filled, a struct bpe_work belongs to
 * one call. Refuses to know token texts: symbols are token ids with a length in bytes. Invariant:
 * O(n log n) for a piece of n bytes, whatever it holds.
 */
#pragma once

#include "daemon/base.h"

#define BPE_NO_TOKEN UINT32_C(0x7fffffff) /* the symbol of a byte that no token stands for */

struct bpe;

struct bpe_keys {
	uint64_t *k;
	size_t n, alloc;
};

/* Memory of bpe_encode(), kept from piece to piece. Zero-initialised is ready. */
struct bpe_work {
	uint32_t *sym;
	size_t alloc;
	struct bpe_keys heap, bucket[33];
	size_t run_at, len, last; /* of the piece, and the start of its last symbol, so far */
	uint32_t floor;
};

/*
 * ends[id] is where the bytes of token id end in a table of all of them, so their number is
 * ends[id] - ends[id - 1]; kept by the caller. byte_ids: the token of each byte, or
 * BPE_NO_TOKEN.
 */
int bpe_new(size_t n_merges, const uint32_t *ends, const uint32_t byte_ids[256], uint64_t seed,
	    struct bpe **ret);
struct bpe *bpe_free(struct bpe *b);
DEFINE_CLEANUP(struct bpe *, bpe_free)
/*
 * Of two merges of one pair the first counts. At most n_merges calls, with ranks below
 * UINT32_MAX. Where pairs share a rank, bpe_start() must be told.
 */
void bpe_add(struct bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t result);

/* Appends the ids of piece[0..len), len at most BPE_MAX_PIECE. -ENOMEM, -ECANCELED. */
#define BPE_MAX_PIECE (UINT32_C(1) << 31)
int bpe_encode(const struct bpe *b, struct bpe_work *w, const char *piece, size_t len,
	       const atomic_bool *abort, struct tokens *out);
/*
 * The same for symbols that the caller chooses: bpe_start(), bpe_put() for each, from left to
 * right, and bpe_finish(). len is as long as id says.
 */
int bpe_start(struct bpe_work *w, size_t len, bool one_rank_per_pair);
int bpe_put(const struct bpe *b, struct bpe_work *w, uint32_t id, size_t len);
int bpe_finish(const struct bpe *b, struct bpe_work *w, const atomic_bool *abort, struct tokens *out);
void bpe_work_done(struct bpe_work *w);
