/* SPDX-License-Identifier: MIT */
/*
 * tokenizer.h: text to token ids and back, for byte-level BPE and SentencePiece-style vocabularies (tokenizer.ggml.model =
 * gpt2, llama).
 *
 * Owns vocabulary, merges and the compiled splitting pattern; immutable after tokenizer_new(), so any thread may encode
 * at the same time. Refuses to know about chat. Invariant: special tokens come out of text only when the caller passes
 * TOKENIZER_SPECIAL; a user's text never yields one.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/gguf.h"

struct tokenizer;

enum tokenizer_flags {
	TOKENIZER_SPECIAL = 1 << 0, /* recognise control and user-defined tokens in the text */
};

/* g must outlive the tokenizer. -EOPNOTSUPP: a model or pre-tokenizer that is not supported (the error names it and those
 * that are); -EBADMSG: a vocabulary that contradicts itself; -ENOMEM. */
int tokenizer_new(const struct gguf *g, struct tokenizer **ret, char **ret_error);
struct tokenizer *tokenizer_free(struct tokenizer *t);
DEFINE_CLEANUP(struct tokenizer *, tokenizer_free)

/* Appends the ids of text[0..len) (any bytes, NUL and invalid UTF-8 included) to out. No BOS/EOS is added; a SentencePiece-style
 * vocabulary puts a space before text that starts or follows on a special token, unless the file says otherwise. -ENOMEM;
 * -ECANCELED when abort (may be NULL) becomes true; -E2BIG above 512 MiB. On error out keeps what it had before. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len,
		     enum tokenizer_flags flags, const atomic_bool *abort, struct tokens *out);

uint32_t tokenizer_n_vocab(const struct tokenizer *t);
/* The id of exactly this token text, e.g. "<think>"; -1 when there is none. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text);
/* Raw bytes of a token (decoded from the byte alphabet, with spaces for U+2581), owned by t; "" and 0 for unknown, unused and control tokens
 * unless special is true (then their text). */
const char *tokenizer_piece(const struct tokenizer *t, int32_t id, bool special, size_t *ret_len);
bool tokenizer_is_control(const struct tokenizer *t, int32_t id);
/* End of generation: eos, eot, <|im_end|>, <|endoftext|> as the file declares them. */
bool tokenizer_is_eog(const struct tokenizer *t, int32_t id);
int32_t tokenizer_eos(const struct tokenizer *t); /* -1: none */
int32_t tokenizer_bos(const struct tokenizer *t); /* -1: none; add_bos says whether prompts start with it */
bool tokenizer_add_bos(const struct tokenizer *t);

/* Streaming UTF-8: bytes go in, whole characters come out. Zero-initialised is ready. */
struct utf8_stream {
	unsigned char held[4];
	unsigned n_held;
};

/* Appends to out the text that is complete after `bytes`; a partial sequence is held back, an invalid byte becomes U+FFFD as
 * soon as it cannot become valid. utf8_flush() turns what is held into U+FFFD. -ENOMEM. */
int utf8_push(struct utf8_stream *s, const char *bytes, size_t len, struct buf *out);
int utf8_flush(struct utf8_stream *s, struct buf *out);
/* true when bytes are valid UTF-8 without a NUL (no surrogates, no overlong forms, at most U+10FFFF). */
bool utf8_valid(const char *bytes, size_t len);
