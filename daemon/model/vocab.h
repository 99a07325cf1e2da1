/* SPDX-License-Identifier: MIT */
/*
 * vocab.h: the tokens of a vocabulary: their texts, their bytes, which of them are special.
 *
 * Part of tokenizer.c and used by nothing else; immutable after vocab_load(). Refuses to know about
 * merges and splitting. Invariant: no two tokens have the same text, and every id that it returns
 * is below n.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/gguf.h"

#define VOCAB_NONE     UINT32_MAX
#define VOCAB_ALPHABET 0x144 /* the byte alphabet lies below this code point */

/* As in tokenizer.ggml.token_type; VOCAB_UNUSED is also whatever else a file says. */
enum vocab_kind {
	VOCAB_NORMAL = 1,
	VOCAB_UNKNOWN = 2,
	VOCAB_CONTROL = 3,
	VOCAB_USER_DEFINED = 4,
	VOCAB_UNUSED = 5,
	VOCAB_BYTE = 6, /* with VOCAB_SENTENCEPIECE only; by the type, or by the text of a normal one */
};

/* How texts of tokens write bytes. */
enum vocab_form {
	VOCAB_BYTE_LEVEL,    /* each byte as a character of its own */
	VOCAB_SENTENCEPIECE, /* as they are, but U+2581 for a space and <0x0A> for a single byte */
};

#define VOCAB_SPACE "\xe2\x96\x81" /* U+2581 */

struct vocab_token {
	uint8_t kind;
	bool eog;
	bool bytes_only; /* byte level: not special, and its text is wholly in the byte alphabet */
	bool in_text;    /* user-defined, but no marker: found in any text */
	bool strips;     /* as a special token takes the white space with it that follows */
};

struct vocab {
	enum vocab_form form;
	const struct gguf_array *texts;
	uint32_t n;
	struct vocab_token *tokens;
	char *pieces;   /* the bytes of all tokens, in order of id */
	uint32_t *ends; /* where those of each token end */
	struct vocab_slot *index;
	size_t index_mask;
	uint64_t seed; /* of vocab_hash(): random, so that no file holds texts that collide */
	char alphabet[256][3];
	int16_t byte_of[VOCAB_ALPHABET]; /* -1: none */
	uint32_t *special;               /* longest text first */
	size_t n_special, n_in_text;     /* of these, that are found in any text */
};

/* v is zero; on error the caller still calls vocab_done(). -EBADMSG, -ENOMEM. */
int vocab_load(struct vocab *v, const struct gguf *g, enum vocab_form form, char **ret_error);
void vocab_done(struct vocab *v);

bool vocab_is_special(const struct vocab *v, uint32_t id); /* unknown, control or user-defined */
/* The bytes that a token stands for; of a special one, its text. */
const char *vocab_bytes(const struct vocab *v, uint32_t id, size_t *ret_len);
const char *vocab_text(const struct vocab *v, uint32_t id, size_t *ret_len);
/* The token whose text is a followed by b, or VOCAB_NONE. */
uint32_t vocab_find_text(const struct vocab *v, const char *a, size_t a_len, const char *b,
			 size_t b_len);
/* Byte level: the token, not special, that stands for these bytes, or VOCAB_NONE. */
uint32_t vocab_find_bytes(const struct vocab *v, const char *s, size_t len);
/* The token that a metadata key names; when the file does not have the key the one that it stands
 * for in the vocabulary's form, else -1. -EBADMSG. */
int vocab_load_id(const struct vocab *v, const struct gguf *g, const char *key, int32_t *ret,
		  char **ret_error);

/* vocab_hash() goes on from h; vocab_hash_end() spreads the result over all bits. */
uint64_t vocab_hash(uint64_t h, const char *s, size_t len);
uint64_t vocab_hash_end(uint64_t h);
