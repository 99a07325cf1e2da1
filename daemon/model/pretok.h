/* SPDX-License-Identifier: MIT */
/*
 * pretok.h: cuts text into the pieces (pre-tokens) that BPE merges never cross.
 *
 * Owns the table of pre-tokenizers, their compiled patterns and what becomes of bytes that are not
 * UTF-8. Used by tokenizer.c only. A struct pretok is immutable, a struct pretok_text belongs to
 * one call. Refuses to know about vocabularies. Invariant: the pieces, in order, are the whole text
 * (after the repair of invalid bytes).
 */
#pragma once

#include "daemon/base.h"

#define PRETOK_MAX_STAGES 6

struct pretok;
struct pretok_text {
	const struct pretok *p;
	const char *bytes; /* what is tokenized: the caller's text unless it had to be repaired */
	const char *shape; /* as long; what the pattern sees in its place */
	struct {
		size_t at, end; /* what is left of the piece that the stage cuts */
	} stage[PRETOK_MAX_STAGES];
	struct buf own_bytes, own_shape;
	void *match;
	size_t *found; /* where its result is */
};

/* -EOPNOTSUPP names the pre-tokenizer and those that are supported. */
int pretok_new(const char *name, size_t len, struct pretok **ret, char **ret_error);
struct pretok *pretok_free(struct pretok *p);
DEFINE_CLEANUP(struct pretok *, pretok_free)
/* A piece that is itself a token is that token, whatever merging its bytes gives. */
bool pretok_takes_whole(const struct pretok *p);
bool pretok_add_bos(const struct pretok *p);

/* Starts on text[0..len); t is zero or was used before. -ENOMEM, -ECANCELED. */
int pretok_begin(struct pretok_text *t, const struct pretok *p, const char *text, size_t len,
		 const atomic_bool *abort);
/* 1 and the next piece (never empty), 0 at the end, -ENOMEM, -EIO (a limit of PCRE2: a bug). */
int pretok_next(struct pretok_text *t, const char **ret, size_t *ret_len);
void pretok_done(struct pretok_text *t);
