/* SPDX-License-Identifier: MIT */
/*
 * spm.c: see spm.h.
 *
 * The rule is llama.cpp's: the text is cut into characters by their first bytes alone; of all
 * neighbours whose texts together are a token those are joined whose token has the highest score,
 * the leftmost of equals; what is no token in the end is written as bytes. So it is byte-pair
 * merging, with a merge for each cut of each token into two that are tokens or characters, and
 * bpe.c does it. Characters that are no tokens get ids above the vocabulary's.
 *
 * Three intended differences: no merge makes a special token or one that stands for a byte; nor one
 * of more than MAX_TOKEN bytes, since trying its cuts takes quadratic time; a character without
 * tokens for its bytes, which llama.cpp does not survive, is the unknown token if there is one.
 */
#include "daemon/model/spm.h"

#include "daemon/model/aborted.h"

#define MAX_TOKEN   512 /* SentencePiece makes tokens of up to 16 characters */
#define ABORT_EVERY 65536
#define SPACE_BYTES 3

struct spm {
	const struct vocab *vocab;
	struct bpe *bpe;
	uint32_t *ends; /* of the texts of tokens, of characters, and of the unknown one, for bpe.c */
	uint32_t *chars; /* characters that are part of tokens, but no tokens: their bytes, sorted */
	uint32_t n_chars, unknown; /* BPE_NO_TOKEN: none */
	uint32_t ascii[128], bytes[256];
	bool add_space;
	bool words; /* no token has a space within: a piece is a word and the spaces before it */
};

static size_t char_len(const char *s, size_t len)
{
	unsigned char c = (unsigned char)s[0];
	size_t n = c < 0xc0 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;

	return MIN(n, len);
}

static bool is_cut_off(const char *s, size_t len)
{
	return char_len(s, 4) > len;
}

static bool is_space(const char *s, size_t len)
{
	return len >= SPACE_BYTES && memcmp(s, VOCAB_SPACE, SPACE_BYTES) == 0;
}

/* Whether merges may make it. */
static bool is_usable(const struct vocab *v, uint32_t id, size_t len)
{
	return len > 0 && len <= MAX_TOKEN && !vocab_is_special(v, id) &&
	       v->tokens[id].kind != VOCAB_BYTE;
}

static uint32_t find_token(const struct spm *s, const char *text, size_t len)
{
	uint32_t id = vocab_find_text(s->vocab, text, len, "", 0);

	return id != VOCAB_NONE && is_usable(s->vocab, id, len) ? id : BPE_NO_TOKEN;
}

static uint32_t pack(const char *s, size_t len)
{
	uint32_t c = 0;

	memcpy(&c, s, len);
	return c;
}

static int compare_chars(const void *a, const void *b)
{
	const uint32_t *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

/* The symbol of a character, BPE_NO_TOKEN when it is part of no token. */
static uint32_t look_up_char(const struct spm *s, const char *text, size_t len)
{
	uint32_t id = find_token(s, text, len), c;
	const uint32_t *hit;

	if (id != BPE_NO_TOKEN || s->n_chars == 0 || is_cut_off(text, len))
		return id;

	c = pack(text, len);
	hit = bsearch(&c, s->chars, s->n_chars, sizeof(c), compare_chars);
	return hit ? s->vocab->n + (uint32_t)(hit - s->chars) : BPE_NO_TOKEN;
}

static uint32_t find_char(const struct spm *s, const char *text, size_t len)
{
	unsigned char c = (unsigned char)text[0];

	return c < 0x80 ? s->ascii[c] : look_up_char(s, text, len);
}

static uint32_t find_symbol(const struct spm *s, const char *text, size_t len)
{
	return char_len(text, len) == len ? find_char(s, text, len) : find_token(s, text, len);
}

/* Characters of tokens that are no tokens, and whether words end at spaces. */
static int load_chars(struct spm *s)
{
	struct tokens found = { 0 };
	size_t len, n = 0;
	int r = 0;

	s->words = true;
	for (uint32_t id = 0; id < s->vocab->n && r == 0; id++) {
		const char *text = vocab_text(s->vocab, id, &len);
		bool in_word = false;
		size_t step;

		if (!is_usable(s->vocab, id, len))
			continue;

		for (size_t i = 0; i < len && r == 0; i += step) {
			bool space = is_space(text + i, len - i);

			step = char_len(text + i, len - i);
			s->words &= !(space && in_word);
			in_word |= !space;
			if (step < len && !is_cut_off(text + i, step) &&
			    find_token(s, text + i, step) == BPE_NO_TOKEN)
				r = tokens_append(&found,
						  &(int32_t){ (int32_t)pack(text + i, step) }, 1);
		}
	}

	if (r == 0 && found.n > 0) {
		s->chars = (uint32_t *)TAKE_PTR(found.ids);
		qsort(s->chars, found.n, sizeof(*s->chars), compare_chars);
		for (size_t i = 0; i < found.n; i++) {
			if (n == 0 || s->chars[n - 1] != s->chars[i])
				s->chars[n++] = s->chars[i];
		}
	}

	if (n > UINT32_MAX / 4)
		r = -ENOMEM;

	s->n_chars = (uint32_t)n;
	tokens_done(&found);
	return r;
}

static int load_ends(struct spm *s)
{
	const struct vocab *v = s->vocab;
	size_t n = (size_t)v->n + s->n_chars + 1, len;
	uint32_t end = 0;

	s->ends = calloc(n, sizeof(*s->ends));
	if (!s->ends)
		return -ENOMEM;

	for (uint32_t id = 0; id < v->n; id++) {
		vocab_text(v, id, &len);
		end += v->tokens[id].kind == VOCAB_BYTE || len == 0 ? 1 : (uint32_t)len;
		s->ends[id] = end;
	}

	for (uint32_t i = 0; i < s->n_chars; i++) {
		len = char_len((const char *)&s->chars[i], sizeof(*s->chars));
		end += (uint32_t)len;
		s->ends[v->n + i] = end;
	}

	s->ends[n - 1] = end + 1;
	return 0;
}

/* Higher scores first. */
static uint32_t rank_of(float score)
{
	uint32_t bits;

	score += 0.0f; /* -0 is 0 */
	memcpy(&bits, &score, sizeof(bits));
	return bits & 0x80000000 ? bits : 0x7fffffff - bits;
}

static int load_score(const struct gguf_array *a, uint32_t id, uint32_t *ret_rank)
{
	int64_t whole;
	float score = 0;

	if (a && gguf_array_f32(a, id, &score) < 0) {
		if (gguf_array_i64(a, id, &whole) < 0)
			return -EBADMSG;

		score = (float)whole;
	}

	*ret_rank = rank_of(score);
	return 0;
}

/* Adds the merges that make a token; without a bpe, only counts them. */
static size_t add_merges(struct spm *s, uint32_t id, uint32_t rank)
{
	size_t len, n = 0, i;
	const char *text = vocab_text(s->vocab, id, &len);

	if (!is_usable(s->vocab, id, len))
		return 0;

	for (i = char_len(text, len); i < len; i += char_len(text + i, len - i)) {
		uint32_t left = find_symbol(s, text, i), right;

		if (left == BPE_NO_TOKEN)
			continue;

		right = find_symbol(s, text + i, len - i);
		if (right == BPE_NO_TOKEN)
			continue;

		n++;
		if (s->bpe)
			bpe_add(s->bpe, left, right, rank, id);
	}

	return n;
}

static int load_merges(struct spm *s, const struct gguf *g, char **ret_error)
{
	const struct gguf_array *scores = gguf_get_array(g, "tokenizer.ggml.scores");
	uint32_t rank = 0;
	size_t n = 0;
	int r;

	if (!scores && gguf_has(g, "tokenizer.ggml.scores"))
		return fail(ret_error, -EBADMSG, "tokenizer.ggml.scores is not an array of numbers");

	if (scores && gguf_array_n(scores) < s->vocab->n)
		return fail(ret_error, -EBADMSG, "tokenizer.ggml.scores has %zu elements for %u tokens",
			    gguf_array_n(scores), s->vocab->n);

	for (uint32_t id = 0; id < s->vocab->n; id++)
		n += add_merges(s, id, 0);

	r = bpe_new(n, s->ends, s->bytes, s->vocab->seed, &s->bpe);
	if (r < 0)
		return r;

	for (uint32_t id = 0; id < s->vocab->n; id++) {
		if (load_score(scores, id, &rank) < 0)
			return fail(ret_error, -EBADMSG,
				    "tokenizer.ggml.scores: the score of token %u is no finite number",
				    id);

		add_merges(s, id, rank);
	}

	return 0;
}

static void load_bytes(struct spm *s)
{
	const struct vocab *v = s->vocab;
	char hex[8];

	for (unsigned b = 0; b < 256; b++) {
		uint32_t id;

		snprintf(hex, sizeof(hex), "<0x%02X>", b);
		id = vocab_find_text(v, hex, 6, "", 0);
		s->bytes[b] = id != VOCAB_NONE && v->tokens[id].kind == VOCAB_BYTE ? id : BPE_NO_TOKEN;
		if (b < 0x80)
			s->ascii[b] = look_up_char(s, (char[]){ (char)b }, 1);
	}
}

static int load(struct spm *s, const struct gguf *g, char **ret_error)
{
	int32_t unknown;
	int r;

	r = vocab_load_id(s->vocab, g, "tokenizer.ggml.unknown_token_id", &unknown, ret_error);
	if (r < 0)
		return r;

	s->unknown = unknown < 0 ? BPE_NO_TOKEN : (uint32_t)unknown;
	s->add_space = true;
	r = gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &s->add_space);
	if (r < 0 && r != -ENOENT)
		return fail(ret_error, -EBADMSG, "tokenizer.ggml.add_space_prefix is not a boolean");

	r = load_chars(s);
	if (r < 0)
		return r;

	load_bytes(s);
	r = load_ends(s);
	if (r < 0)
		return r;

	return load_merges(s, g, ret_error);
}

int spm_new(const struct vocab *v, const struct gguf *g, struct spm **ret, char **ret_error)
{
	_cleanup_(spm_freep) struct spm *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return -ENOMEM;

	s->vocab = v;
	r = load(s, g, ret_error);
	if (r < 0)
		return r;

	*ret = TAKE_PTR(s);
	return 0;
}

struct spm *spm_free(struct spm *s)
{
	if (s) {
		bpe_free(s->bpe);
		free(s->ends);
		free(s->chars);
	}

	free(s);
	return NULL;
}

int spm_begin(struct spm_text *t, const struct spm *s, const char *text, size_t len,
	      const atomic_bool *abort)
{
	const char *end = text + len, *space;
	size_t n = 0, piece;
	int r;

	t->s = s;
	t->at = t->own.len = 0;
	for (const char *p = text; p < end; p++)
		n += *p == ' ';

	r = buf_reserve(&t->own, len + (n + s->add_space) * SPACE_BYTES);
	if (r == 0 && s->add_space)
		r = buf_append(&t->own, VOCAB_SPACE, SPACE_BYTES);

	for (n = 0; r == 0 && text < end; text += piece) {
		space = memchr(text, ' ', (size_t)(end - text));
		piece = (size_t)((space ? space : end) - text);
		r = buf_append(&t->own, text, piece);
		if (r == 0 && space) {
			r = buf_append(&t->own, VOCAB_SPACE, SPACE_BYTES);
			piece++;
		}

		if (r == 0 && ++n % ABORT_EVERY == 0 && aborted(abort))
			r = -ECANCELED;
	}

	return r;
}

int spm_next(struct spm_text *t, const char **ret, size_t *ret_len)
{
	const char *s = t->own.data + t->at;
	size_t len = t->own.len - t->at, n = len;

	if (len == 0)
		return 0;

	if (t->s->words) {
		for (n = 0; is_space(s + n, len - n); n += SPACE_BYTES)
			;

		while (n < len && !is_space(s + n, len - n))
			n += char_len(s + n, len - n);
	}

	*ret = s;
	*ret_len = n;
	t->at += n;
	return 1;
}

void spm_done(struct spm_text *t)
{
	buf_done(&t->own);
	*t = (struct spm_text){ 0 };
}

static bool has_bytes(const struct spm *s, const char *text, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		if (s->bytes[(unsigned char)text[i]] == BPE_NO_TOKEN)
			return false;
	}

	return true;
}

/* A character that is part of no token. */
static int put_bytes(const struct spm *s, struct bpe_work *w, const char *text, size_t len)
{
	bool known = has_bytes(s, text, len);
	uint32_t id;
	int r = 0;

	for (size_t i = 0; i < len && r == 0; i++) {
		id = known ? s->bytes[(unsigned char)text[i]] : BPE_NO_TOKEN;
		if (!known && i == 0 && s->unknown != BPE_NO_TOKEN)
			id = s->vocab->n + s->n_chars;

		r = bpe_put(s->bpe, w, id, 1);
	}

	return r;
}

/* One that is part of a token, but did not become one. */
static int append_char(const struct spm *s, uint32_t i, struct tokens *out)
{
	int32_t ids[4] = { (int32_t)s->unknown };
	const char *text = (const char *)&s->chars[i];
	size_t n = char_len(text, sizeof(s->chars[i]));

	if (!has_bytes(s, text, n))
		return s->unknown == BPE_NO_TOKEN ? 0 : tokens_append(out, ids, 1);

	for (size_t k = 0; k < n; k++)
		ids[k] = (int32_t)s->bytes[(unsigned char)text[k]];

	return tokens_append(out, ids, n);
}

/* Puts tokens for ids that are above the vocabulary. */
static int replace_symbols(const struct spm *s, struct tokens *out, size_t from)
{
	_cleanup_(tokens_done) struct tokens rest = { 0 };
	uint32_t n = s->vocab->n;
	int r;

	while (from < out->n && (uint32_t)out->ids[from] < n)
		from++;

	if (from == out->n)
		return 0;

	r = tokens_append(&rest, out->ids + from, out->n - from);
	out->n = from;
	for (size_t i = 0; i < rest.n && r == 0; i++) {
		uint32_t id = (uint32_t)rest.ids[i];

		if (id < n)
			r = tokens_append(out, &rest.ids[i], 1);
		else if (id < n + s->n_chars)
			r = append_char(s, id - n, out);
		else
			r = tokens_append(out, &(int32_t){ (int32_t)s->unknown }, 1);
	}

	return r;
}

int spm_encode(const struct spm *s, struct bpe_work *w, const char *piece, size_t len,
	       const atomic_bool *abort, struct tokens *out)
{
	size_t n_before = out->n, step, check = ABORT_EVERY;
	uint32_t id;
	int r;

	r = bpe_start(w, len, false);
	for (size_t i = 0; i < len && r == 0; i += step) {
		if (i >= check) {
			if (aborted(abort))
				return -ECANCELED;

			check = i + ABORT_EVERY;
		}

		step = char_len(piece + i, len - i);
		id = find_char(s, piece + i, step);
		r = id == BPE_NO_TOKEN ? put_bytes(s, w, piece + i, step)
				       : bpe_put(s->bpe, w, id, step);
	}

	if (r == 0)
		r = bpe_finish(s->bpe, w, abort, out);

	return r < 0 ? r : replace_symbols(s, out, n_before);
}
