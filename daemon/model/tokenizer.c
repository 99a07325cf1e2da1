/* SPDX-License-Identifier: MIT */
/*
 * tokenizer.c: see tokenizer.h. Puts the parts together: vocab.c knows the tokens, pretok.c cuts
 * text into pieces, bpe.c merges each piece into tokens, spm.c does both for its vocabularies. Here
 * text is cut at special tokens first, and words that come again are not merged again.
 *
 * Ids are llama.cpp's for every text it accepts (pretok.c says what becomes of invalid UTF-8), with
 * one intended difference: it recognises user-defined tokens in any text; here they are special
 * like control tokens, since <think> or <tool_call> in a user's text must stay text (vocab.c says
 * which are no markers). For the same reason no merge and no whole piece gives a special token. A
 * byte that no token stands for vanishes, as it does there.
 */
#include "daemon/model/tokenizer.h"

#include "daemon/model/aborted.h"
#include "daemon/model/bpe.h"
#include "daemon/model/pretok.h"
#include "daemon/model/spm.h"
#include "daemon/model/vocab.h"

#define MAX_MERGES (1u << 24)
#define MAX_TEXT   (512u << 20) /* invalid bytes triple, and a piece stays below BPE_MAX_PIECE */

#define ABORT_EVERY 65536
#define N_SEEN      4096
#define SEEN_PIECE  32   /* bytes, so ids too */
#define SEEN_TEXT   4096 /* bytes, from which on memory for N_SEEN pays */

struct tokenizer {
	struct vocab vocab;
	struct bpe *bpe;
	struct pretok *pretok;
	struct spm *spm; /* instead of the two before */
	int32_t bos, eos;
	bool add_bos;
};

/* A merge that names a text which is no token, or that would make a special one, never happens. */
static void load_merge(struct tokenizer *t, const char *merge, size_t len, uint32_t rank)
{
	const struct vocab *v = &t->vocab;
	const char *space = len > 1 ? memchr(merge + 1, ' ', len - 1) : NULL;
	uint32_t left, right, result;
	size_t left_len, right_len;

	if (!space)
		return;

	left_len = (size_t)(space - merge);
	right_len = len - left_len - 1;
	left = vocab_find_text(v, merge, left_len, "", 0);
	right = vocab_find_text(v, space + 1, right_len, "", 0);
	result = vocab_find_text(v, merge, left_len, space + 1, right_len);
	if (left == VOCAB_NONE || right == VOCAB_NONE || result == VOCAB_NONE)
		return;

	/*
	 * Only symbols made of bytes take part, so that the length of a merge is the sum of its
	 * parts'.
	 */
	if (v->tokens[left].bytes_only && v->tokens[right].bytes_only && v->tokens[result].bytes_only)
		bpe_add(t->bpe, left, right, rank, result);
}

static int load_merges(struct tokenizer *t, const struct gguf *g, char **ret_error)
{
	const struct gguf_array *a = gguf_get_array(g, "tokenizer.ggml.merges");
	uint32_t byte_ids[256];
	const char *merge;
	size_t n, len;
	int r;

	if (!a || !gguf_array_is_str(a))
		return fail(ret_error, -EBADMSG,
			    "tokenizer.ggml.merges is missing or not an array of strings");

	n = gguf_array_n(a);
	if (n > MAX_MERGES)
		return fail(ret_error, -EBADMSG,
			    "tokenizer.ggml.merges has %zu elements; at most %u are supported", n,
			    MAX_MERGES);

	for (size_t b = 0; b < 256; b++) {
		uint32_t id = vocab_find_bytes(&t->vocab, (char[]){ (char)b }, 1);

		byte_ids[b] = id == VOCAB_NONE ? BPE_NO_TOKEN : id;
	}

	r = bpe_new(n, t->vocab.ends, byte_ids, t->vocab.seed, &t->bpe);
	if (r < 0)
		return r;

	for (size_t i = 0; i < n; i++) {
		if (gguf_array_str(a, i, &merge, &len) == 0)
			load_merge(t, merge, len, (uint32_t)i);
	}

	return 0;
}

/* Tokenizers by their names in GGUF; the form of the vocabulary says which it is. */
static int load_form(const struct gguf *g, enum vocab_form *ret, char **ret_error)
{
	static const char *const names[] = {
		[VOCAB_BYTE_LEVEL] = "gpt2",
		[VOCAB_SENTENCEPIECE] = "llama",
	};
	char printable[32] = "";
	const char *name;
	size_t len;

	if (gguf_get_str(g, "tokenizer.ggml.model", &name, &len) < 0)
		return fail(ret_error, -EBADMSG, "tokenizer.ggml.model is missing or not a string");

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (strlen(names[i]) == len && memcmp(names[i], name, len) == 0) {
			*ret = (enum vocab_form)i;
			return 0;
		}
	}

	for (size_t i = 0; i < MIN(len, sizeof(printable) - 1); i++)
		printable[i] = name[i] > ' ' && name[i] <= '~' ? name[i] : '?';

	return fail(ret_error, -EOPNOTSUPP,
		    "tokenizer '%s' is not supported; those that are: gpt2, llama", printable);
}

static int load_pretok(struct tokenizer *t, const struct gguf *g, char **ret_error)
{
	const char *name;
	size_t len;

	if (gguf_get_str(g, "tokenizer.ggml.pre", &name, &len) < 0)
		return fail(ret_error, -EBADMSG, "tokenizer.ggml.pre is missing or not a string");

	return pretok_new(name, len, &t->pretok, ret_error);
}

static int load(struct tokenizer *t, const struct gguf *g, char **ret_error)
{
	enum vocab_form form = VOCAB_BYTE_LEVEL;
	bool add_bos;
	int r;

	r = load_form(g, &form, ret_error);
	if (r == 0 && form == VOCAB_BYTE_LEVEL)
		r = load_pretok(t, g, ret_error);

	if (r == 0)
		r = vocab_load(&t->vocab, g, form, ret_error);

	if (r == 0)
		r = t->pretok ? load_merges(t, g, ret_error)
			      : spm_new(&t->vocab, g, &t->spm, ret_error);

	if (r == 0)
		r = vocab_load_id(&t->vocab, g, "tokenizer.ggml.bos_token_id", &t->bos, ret_error);

	if (r == 0)
		r = vocab_load_id(&t->vocab, g, "tokenizer.ggml.eos_token_id", &t->eos, ret_error);

	if (r < 0)
		return r;

	add_bos = !t->pretok || pretok_add_bos(t->pretok);
	r = gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &add_bos);
	if (r < 0 && r != -ENOENT)
		return fail(ret_error, -EBADMSG, "tokenizer.ggml.add_bos_token is not a boolean");

	t->add_bos = add_bos && t->bos >= 0;
	return 0;
}

int tokenizer_new(const struct gguf *g, struct tokenizer **ret, char **ret_error)
{
	_cleanup_(tokenizer_freep) struct tokenizer *t = calloc(1, sizeof(*t));
	int r;

	if (!t)
		return -ENOMEM;

	r = load(t, g, ret_error);
	if (r < 0)
		return r;

	*ret = TAKE_PTR(t);
	return 0;
}

struct tokenizer *tokenizer_free(struct tokenizer *t)
{
	if (t) {
		vocab_done(&t->vocab);
		bpe_free(t->bpe);
		pretok_free(t->pretok);
		spm_free(t->spm);
	}

	free(t);
	return NULL;
}

/* A stretch of the text: a special token, or (VOCAB_NONE) what lies between two. */
struct span {
	const char *text;
	size_t len;
	uint32_t id;
};

struct spans {
	struct span *v;
	size_t n, alloc;
};

static void spans_done(struct spans *s)
{
	free(s->v);
	*s = (struct spans){ 0 };
}

static int spans_append(struct spans *s, const char *text, size_t len, uint32_t id)
{
	struct span *v;
	size_t n, bytes;

	if (len == 0)
		return 0;

	if (s->n == s->alloc) {
		if (!mul_ok(MAX(s->alloc, (size_t)8), 2, &n) || !mul_ok(n, sizeof(*v), &bytes))
			return -ENOMEM;

		v = realloc(s->v, bytes);
		if (!v)
			return -ENOMEM;

		s->v = v;
		s->alloc = n;
	}

	s->v[s->n++] = (struct span){ .text = text, .len = len, .id = id };
	return 0;
}

/* Cuts the text of `from` at each token of this id, left to right. */
static int cut_at_token(const struct vocab *v, uint32_t id, const struct spans *from, struct spans *to)
{
	const char *at, *end, *hit, *token;
	size_t len;
	int r;

	token = vocab_bytes(v, id, &len);

	to->n = 0;
	for (size_t i = 0; i < from->n; i++) {
		at = from->v[i].text;
		end = at + from->v[i].len;
		while (from->v[i].id == VOCAB_NONE &&
		       (hit = memmem(at, (size_t)(end - at), token, len))) {
			r = spans_append(to, at, (size_t)(hit - at), VOCAB_NONE);
			if (r < 0)
				return r;

			r = spans_append(to, hit, len, id);
			if (r < 0)
				return r;

			at = hit + len;
			while (v->tokens[id].strips && at < end && memchr(" \t\n\v\f\r", *at, 6))
				at++;
		}

		r = spans_append(to, at, (size_t)(end - at), from->v[i].id);
		if (r < 0)
			return r;
	}

	return 0;
}

/*
 * One token after the other, the longest first: where tokens overlap, the longer one wins even
 * if it starts later.
 */
static int cut_special(const struct tokenizer *t, const char *text, size_t len,
		       enum tokenizer_flags flags, const atomic_bool *abort, struct spans *ret)
{
	const struct vocab *v = &t->vocab;
	_cleanup_(spans_done) struct spans a = { 0 }, b = { 0 };
	int r = spans_append(&a, text, len, VOCAB_NONE);

	for (size_t i = 0; i < v->n_special && r == 0; i++) {
		uint32_t id = v->special[i];
		const char *token;
		size_t token_len;

		if (!(flags & TOKENIZER_SPECIAL) && !v->tokens[id].in_text)
			continue;

		if (aborted(abort))
			return -ECANCELED;

		token = vocab_bytes(v, id, &token_len);
		if (!memmem(text, len, token, token_len))
			continue;

		r = cut_at_token(v, id, &a, &b);
		if (r == 0) {
			struct spans other = a;

			a = b;
			b = other;
		}
	}

	if (r < 0)
		return r;

	*ret = a;
	a = (struct spans){ 0 };
	return 0;
}

/* Where a short piece stood before in the same text, and what became of it: words come again. */
struct seen {
	const char *piece;
	uint32_t len, n_ids;
	size_t first_id; /* in the output */
};

struct encoder {
	struct pretok_text text;
	struct spm_text spm_text;
	struct bpe_work work;
	struct seen *seen; /* by hash; NULL: the text is too short to be worth it */
};

static void encoder_done(struct encoder *e)
{
	pretok_done(&e->text);
	spm_done(&e->spm_text);
	bpe_work_done(&e->work);
	free(e->seen);
}

static int encode_piece(const struct tokenizer *t, struct encoder *e, const char *piece, size_t len,
			const atomic_bool *abort, struct tokens *out)
{
	uint32_t id;

	if (t->spm)
		return spm_encode(t->spm, &e->work, piece, len, abort, out);

	id = pretok_takes_whole(t->pretok) ? vocab_find_bytes(&t->vocab, piece, len) : VOCAB_NONE;
	if (id != VOCAB_NONE)
		return tokens_append(out, &(int32_t){ (int32_t)id }, 1);

	return bpe_encode(t->bpe, &e->work, piece, len, abort, out);
}

static int encode_piece_again(const struct tokenizer *t, struct encoder *e, const char *piece,
			      size_t len, const atomic_bool *abort, struct tokens *out)
{
	int32_t ids[SEEN_PIECE];
	size_t n_before = out->n;
	struct seen *s;
	int r;

	if (!e->seen || len > SEEN_PIECE)
		return encode_piece(t, e, piece, len, abort, out);

	s = &e->seen[vocab_hash_end(vocab_hash(t->vocab.seed, piece, len)) % N_SEEN];
	if (s->len == len && memcmp(s->piece, piece, len) == 0) {
		memcpy(ids, out->ids + s->first_id, s->n_ids * sizeof(*ids)); /* out->ids may move */
		return tokens_append(out, ids, s->n_ids);
	}

	r = encode_piece(t, e, piece, len, abort, out);
	if (r == 0 && out->n > n_before)
		*s = (struct seen){
			.piece = piece,
			.len = (uint32_t)len,
			.n_ids = (uint32_t)(out->n - n_before),
			.first_id = n_before,
		};

	return r;
}

static int begin(const struct tokenizer *t, struct encoder *e, const char *text, size_t len,
		 const atomic_bool *abort)
{
	return t->spm ? spm_begin(&e->spm_text, t->spm, text, len, abort)
		      : pretok_begin(&e->text, t->pretok, text, len, abort);
}

static int next_piece(const struct tokenizer *t, struct encoder *e, const char **ret, size_t *ret_len)
{
	return t->spm ? spm_next(&e->spm_text, ret, ret_len) : pretok_next(&e->text, ret, ret_len);
}

static int encode_plain(const struct tokenizer *t, struct encoder *e, const char *text, size_t len,
			const atomic_bool *abort, struct tokens *out)
{
	size_t since_check = 0, n;
	const char *piece;
	int r;

	r = begin(t, e, text, len, abort);
	if (r < 0)
		return r;

	free(e->seen); /* what it points to belongs to the text before */
	e->seen = len >= SEEN_TEXT ? calloc(N_SEEN, sizeof(*e->seen)) : NULL;
	while ((r = next_piece(t, e, &piece, &n)) > 0) {
		r = encode_piece_again(t, e, piece, n, abort, out);
		if (r < 0)
			return r;

		since_check += n;
		if (since_check >= ABORT_EVERY) {
			if (aborted(abort))
				return -ECANCELED;

			since_check = 0;
		}
	}

	return r;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len,
		     enum tokenizer_flags flags, const atomic_bool *abort, struct tokens *out)
{
	_cleanup_(encoder_done) struct encoder e = { 0 };
	_cleanup_(spans_done) struct spans spans = { 0 };
	size_t n_before = out->n;
	int r;

	if (len > MAX_TEXT)
		return -E2BIG;

	if ((flags & TOKENIZER_SPECIAL) || t->vocab.n_in_text > 0)
		r = cut_special(t, text, len, flags, abort, &spans);
	else
		r = spans_append(&spans, text, len, VOCAB_NONE);

	for (size_t i = 0; i < spans.n && r == 0; i++) {
		if (spans.v[i].id == VOCAB_NONE)
			r = encode_plain(t, &e, spans.v[i].text, spans.v[i].len, abort, out);
		else
			r = tokens_append(out, &(int32_t){ (int32_t)spans.v[i].id }, 1);
	}

	if (r < 0)
		out->n = n_before;

	return r;
}

uint32_t tokenizer_n_vocab(const struct tokenizer *t)
{
	return t->vocab.n;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text)
{
	uint32_t id = vocab_find_text(&t->vocab, text, strlen(text), "", 0);

	return id == VOCAB_NONE ? -1 : (int32_t)id;
}

static bool known(const struct tokenizer *t, int32_t id)
{
	return id >= 0 && (uint32_t)id < t->vocab.n;
}

const char *tokenizer_piece(const struct tokenizer *t, int32_t id, bool special, size_t *ret_len)
{
	uint8_t kind = known(t, id) ? t->vocab.tokens[id].kind : VOCAB_UNUSED;

	if (!known(t, id) ||
	    (!special && kind != VOCAB_NORMAL && kind != VOCAB_USER_DEFINED && kind != VOCAB_BYTE)) {
		*ret_len = 0;
		return "";
	}

	return vocab_bytes(&t->vocab, (uint32_t)id, ret_len);
}

bool tokenizer_is_control(const struct tokenizer *t, int32_t id)
{
	return known(t, id) && t->vocab.tokens[id].kind == VOCAB_CONTROL;
}

bool tokenizer_is_eog(const struct tokenizer *t, int32_t id)
{
	return known(t, id) && t->vocab.tokens[id].eog;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
	return t->eos;
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
	return t->bos;
}

bool tokenizer_add_bos(const struct tokenizer *t)
{
	return t->add_bos;
}
