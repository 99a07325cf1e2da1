/* SPDX-License-Identifier: MIT */
/*
 * spm.h: SentencePiece-style vocabularies (tokenizer.ggml.model = llama): text to tokens by the
 * scores of the tokens that merges would make.
 *
 * Owns the merges, which the tokens' texts and scores imply, and the text as SentencePiece sees it:
 * with U+2581 for spaces. Used by tokenizer.c only; a struct spm is immutable, a struct spm_text
 * belongs to one call. Refuses to know about special tokens. Invariant: the bytes of the tokens
 * are the text, but for the space that may be put before it; O(n log n), whatever the text holds.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/bpe.h"
#include "daemon/model/gguf.h"
#include "daemon/model/vocab.h"

struct spm;
struct spm_text {
	const struct spm *s;
	struct buf own;
	size_t at;
};

/* v must outlive it. -EBADMSG, -ENOMEM. */
int spm_new(const struct vocab *v, const struct gguf *g, struct spm **ret, char **ret_error);
struct spm *spm_free(struct spm *s);
DEFINE_CLEANUP(struct spm *, spm_free)

/* Starts on text[0..len), which has no special token before it in what is encoded, or follows on
 * one; t is zero or was used before. -ENOMEM, -ECANCELED. */
int spm_begin(struct spm_text *t, const struct spm *s, const char *text, size_t len,
	      const atomic_bool *abort);
/* 1 and the next piece, which no token crosses the ends of (never empty); 0 at the end. */
int spm_next(struct spm_text *t, const char **ret, size_t *ret_len);
void spm_done(struct spm_text *t);

/* Appends the ids of a piece, at most BPE_MAX_PIECE bytes. -ENOMEM, -ECANCELED. */
int spm_encode(const struct spm *s, struct bpe_work *w, const char *piece, size_t len,
	       const atomic_bool *abort, struct tokens *out);
