/* SPDX-License-Identifier: MIT */
/*
 * vocab.c: see vocab.h.
 *
 * Texts stay in the file and are found through a hash index; the bytes that they stand for are
 * decoded once. Byte-level BPE writes each byte as a visible character: those that are printable in
 * Latin-1 stand for themselves, the other 68, in order, for U+0100 and following.
 *
 * User-defined tokens are special, since most are markers. Those of a single character or of white
 * space alone are no markers but text that merges do not reach (deepseek-llm has letters, gemma
 * runs of line breaks), and are found in any text.
 */
#include "daemon/model/vocab.h"

#include <sys/random.h>

#define MAX_VOCAB (1u << 22)

struct vocab_slot {
	uint32_t id; /* VOCAB_NONE: free */
	uint32_t tag;
};

/*
 * Tokens of these names end a generation and are control tokens, whatever the file says of them,
 * and the tokens that the keys name end one too: as in llama.cpp, on which models rely (qwen2
 * has "</s>" as a normal token).
 */
static const char *const eog_names[] = {
	"<|eot_id|>",
	"<|im_end|>",
	"<|end|>",
	"<|return|>",
	"<|call|>",
	"<|flush|>",
	"<|calls|>",
	"<end_of_turn>",
	"<|endoftext|>",
	"</s>",
	"<|eom_id|>",
	"<EOT>",
	"_<EOT>",
	"[EOT]",
	"[EOS]",
	"<|end_of_text|>",
	"<end_of_utterance>",
	"<eos>",
	"<turn|>",
	"<|tool_response>",
	"<|fim_pad|>",
	"<fim-pad>",
	"<fim_pad>",
	"<PAD>",
	"[PAD]",
	"<|fim_repo|>",
	"<|repo_name|>",
	"<fim-repo>",
	"<REPO>",
	"<reponame>",
	"<|file_sep|>",
	"<｜end▁of▁sentence｜>",
	"[e~[",
};

/* What a model of these says between its markers is worth nothing without them. */
static const char *const shown_names[] = { "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>" };

static const char *const eog_keys[] = {
	"tokenizer.ggml.eos_token_id",     "tokenizer.ggml.eot_token_id",
	"tokenizer.ggml.eom_token_id",     "tokenizer.ggml.fim_pad_token_id",
	"tokenizer.ggml.fim_rep_token_id", "tokenizer.ggml.fim_sep_token_id"
};

bool vocab_is_special(const struct vocab *v, uint32_t id)
{
	uint8_t kind = v->tokens[id].kind;

	return kind == VOCAB_UNKNOWN || kind == VOCAB_CONTROL || kind == VOCAB_USER_DEFINED;
}

const char *vocab_text(const struct vocab *v, uint32_t id, size_t *ret_len)
{
	const char *text = "";

	*ret_len = 0;
	(void)gguf_array_str(v->texts, id, &text, ret_len); /* id is below the array's length */
	return text;
}

const char *vocab_bytes(const struct vocab *v, uint32_t id, size_t *ret_len)
{
	uint32_t start = id > 0 ? v->ends[id - 1] : 0;

	*ret_len = v->ends[id] - start;
	return v->pieces + start;
}

uint64_t vocab_hash(uint64_t h, const char *s, size_t len)
{
	for (size_t i = 0; i < len; i++)
		h = (h ^ (unsigned char)s[i]) * UINT64_C(0x100000001b3);

	return h;
}

uint64_t vocab_hash_end(uint64_t h)
{
	h = (h ^ h >> 32) * UINT64_C(0x9e3779b97f4a7c15);
	return h ^ h >> 29;
}

uint32_t vocab_find_text(const struct vocab *v, const char *a, size_t a_len, const char *b, size_t b_len)
{
	uint64_t h = vocab_hash_end(vocab_hash(vocab_hash(v->seed, a, a_len), b, b_len));
	const struct vocab_slot *s;
	const char *text;
	size_t len;

	for (size_t i = (size_t)h & v->index_mask;; i = (i + 1) & v->index_mask) {
		s = &v->index[i];
		if (s->id == VOCAB_NONE)
			return VOCAB_NONE;

		if (s->tag != (uint32_t)(h >> 32))
			continue;

		text = vocab_text(v, s->id, &len);
		if (len == a_len + b_len && memcmp(text, a, a_len) == 0 &&
		    memcmp(text + a_len, b, b_len) == 0)
			return s->id;
	}
}

uint32_t vocab_find_bytes(const struct vocab *v, const char *s, size_t len)
{
	const struct vocab_slot *slot;
	uint64_t h = v->seed;
	const char *bytes;
	size_t n;

	for (size_t i = 0; i < len; i++) {
		const char *letter = v->alphabet[(unsigned char)s[i]];

		h = vocab_hash(h, letter, strlen(letter));
	}

	h = vocab_hash_end(h);
	for (size_t i = (size_t)h & v->index_mask;; i = (i + 1) & v->index_mask) {
		slot = &v->index[i];
		if (slot->id == VOCAB_NONE)
			return VOCAB_NONE;

		if (slot->tag != (uint32_t)(h >> 32) || !v->tokens[slot->id].bytes_only ||
		    vocab_is_special(v, slot->id))
			continue;

		bytes = vocab_bytes(v, slot->id, &n);
		if (n == len && memcmp(bytes, s, n) == 0)
			return slot->id;
	}
}

static void fill_alphabet(struct vocab *v)
{
	unsigned next = 0x100;

	for (size_t c = 0; c < VOCAB_ALPHABET; c++)
		v->byte_of[c] = -1;

	for (unsigned b = 0; b < 256; b++) {
		bool visible = (b > ' ' && b < 0x7f) || (b > 0xa0 && b != 0xad);
		unsigned c = visible ? b : next++;

		v->byte_of[c] = (int16_t)b;
		if (c < 0x80)
			v->alphabet[b][0] = (char)c;
		else
			memcpy(v->alphabet[b],
			       (char[]){ (char)(0xc0 | c >> 6), (char)(0x80 | (c & 0x3f)) }, 2);
	}
}

/* Writes the bytes that a token's text stands for to `to` (room for len), returns their number. */
static size_t decode_text(const struct vocab *v, const char *text, size_t len, char *to,
			  bool *ret_bytes_only)
{
	const unsigned char *s = (const unsigned char *)text;
	bool bytes_only = true;
	size_t n = 0, step;

	for (size_t i = 0; i < len; i += step) {
		unsigned c = s[i];

		step = 1;
		if ((c & 0xe0) == 0xc0 && i + 1 < len && (s[i + 1] & 0xc0) == 0x80) {
			c = (c & 0x1f) << 6 | (s[i + 1] & 0x3f);
			step = c >= 0x80 ? 2 : 1;
		} else if (c >= 0x80) {
			c = VOCAB_ALPHABET;
		}

		if (c < VOCAB_ALPHABET && v->byte_of[c] >= 0) {
			to[n++] = (char)v->byte_of[c];
			continue;
		}

		bytes_only = false; /* a character of another alphabet stands for itself */
		memcpy(to + n, text + i, step);
		n += step;
	}

	*ret_bytes_only = bytes_only;
	return n;
}

/* <0x0A> is the one byte, any other text of a byte token is nothing. */
static size_t decode_byte(const char *text, size_t len, char *to)
{
	static const char digits[] = "0123456789ABCDEF";
	const char *high, *low;

	if (len != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>')
		return 0;

	high = memchr(digits, text[3], 16);
	low = memchr(digits, text[4], 16);
	if (!high || !low)
		return 0;

	*to = (char)((high - digits) << 4 | (low - digits));
	return 1;
}

/* Writes the text with spaces for U+2581. */
static size_t decode_spaces(const char *text, size_t len, char *to)
{
	size_t n = 0, step;

	for (size_t i = 0; i < len; i += step) {
		bool space = len - i >= 3 && memcmp(text + i, VOCAB_SPACE, 3) == 0;

		step = space ? 3 : 1;
		to[n++] = space ? ' ' : text[i];
	}

	return n;
}

/* Some files have the bytes' tokens as normal ones: llama.cpp finds them by their texts. */
static bool is_byte(const struct vocab *v, uint32_t id, int64_t kind)
{
	size_t len;
	const char *text = vocab_text(v, id, &len);
	char byte;

	return v->form == VOCAB_SENTENCEPIECE &&
	       (kind == VOCAB_BYTE || (kind == VOCAB_NORMAL && decode_byte(text, len, &byte) > 0));
}

static uint8_t kind_of(const struct vocab *v, uint32_t id, int64_t kind)
{
	if (is_byte(v, id, kind))
		return VOCAB_BYTE;

	return kind >= VOCAB_NORMAL && kind <= VOCAB_USER_DEFINED ? (uint8_t)kind : VOCAB_UNUSED;
}

static int load_kinds(struct vocab *v, const struct gguf *g, char **ret_error)
{
	const struct gguf_array *a = gguf_get_array(g, "tokenizer.ggml.token_type");
	int64_t kind = VOCAB_NORMAL;

	if (!a && gguf_has(g, "tokenizer.ggml.token_type"))
		return fail(ret_error, -EBADMSG, "tokenizer.ggml.token_type is not an array");

	if (a && gguf_array_n(a) != v->n)
		return fail(ret_error, -EBADMSG,
			    "tokenizer.ggml.token_type has %zu elements for %u tokens",
			    gguf_array_n(a), v->n);

	for (uint32_t i = 0; i < v->n; i++) {
		if (a && gguf_array_i64(a, i, &kind) < 0)
			return fail(ret_error, -EBADMSG,
				    "tokenizer.ggml.token_type is not an array of integers");

		v->tokens[i].kind = kind_of(v, i, kind);
	}

	return 0;
}

static int load_index(struct vocab *v, char **ret_error)
{
	size_t n = 16, total = 0, len;
	const char *text;

	while (n < 2 * (size_t)v->n)
		n *= 2;

	v->index = malloc(n * sizeof(*v->index));
	if (!v->index)
		return -ENOMEM;

	memset(v->index, 0xff, n * sizeof(*v->index));
	v->index_mask = n - 1;
	for (uint32_t id = 0; id < v->n; id++) {
		uint32_t other;
		uint64_t h;
		size_t i;

		text = vocab_text(v, id, &len);
		if (!add_ok(total, len, &total) || total > UINT32_MAX)
			return fail(ret_error, -EBADMSG,
				    "tokenizer.ggml.tokens holds more than 4 GiB of text");

		if (len == 0)
			continue; /* never found in a text */

		other = vocab_find_text(v, text, len, "", 0);
		if (other != VOCAB_NONE)
			return fail(ret_error, -EBADMSG,
				    "tokenizer.ggml.tokens: tokens %u and %u are the same text",
				    other, id);

		h = vocab_hash_end(vocab_hash(v->seed, text, len));
		for (i = (size_t)h & v->index_mask; v->index[i].id != VOCAB_NONE;
		     i = (i + 1) & v->index_mask)
			;

		v->index[i] = (struct vocab_slot){ .id = id, .tag = (uint32_t)(h >> 32) };
	}

	v->pieces = malloc(MAX(total, (size_t)1));
	return v->pieces ? 0 : -ENOMEM;
}

static size_t load_piece(struct vocab *v, uint32_t id, char *to)
{
	struct vocab_token *t = &v->tokens[id];
	size_t len;
	const char *text = vocab_text(v, id, &len);

	if (vocab_is_special(v, id)) {
		memcpy(to, text, len);
		return len;
	}

	if (t->kind == VOCAB_BYTE)
		return decode_byte(text, len, to);

	if (v->form == VOCAB_SENTENCEPIECE)
		return decode_spaces(text, len, to);

	return decode_text(v, text, len, to, &t->bytes_only);
}

static void load_pieces(struct vocab *v)
{
	uint32_t end = 0;

	for (uint32_t id = 0; id < v->n; id++) {
		end += (uint32_t)load_piece(v, id, v->pieces + end);
		v->ends[id] = end;
	}
}

static int32_t id_without_key(const struct vocab *v, const char *key)
{
	static const char *const keys[] = { "tokenizer.ggml.unknown_token_id",
					    "tokenizer.ggml.bos_token_id",
					    "tokenizer.ggml.eos_token_id" };

	for (uint32_t i = 0; v->form == VOCAB_SENTENCEPIECE && i < MIN(v->n, 3u); i++) {
		if (streq(keys[i], key))
			return (int32_t)i;
	}

	return -1;
}

int vocab_load_id(const struct vocab *v, const struct gguf *g, const char *key, int32_t *ret,
		  char **ret_error)
{
	uint64_t id;
	int r = gguf_get_u64(g, key, &id);

	if (r == -ENOENT) {
		*ret = id_without_key(v, key);
		return 0;
	}

	if (r < 0)
		return fail(ret_error, -EBADMSG, "%s is not a token id", key);

	if (id >= v->n)
		return fail(ret_error, -EBADMSG, "%s is %llu, but there are %u tokens", key,
			    (unsigned long long)id, v->n);

	*ret = (int32_t)id;
	return 0;
}

static uint32_t find(const struct vocab *v, const char *text)
{
	return vocab_find_text(v, text, strlen(text), "", 0);
}

/* Where these tokens end a generation, <|end|> ends a message only. */
static void mend_end(struct vocab *v)
{
	bool calls = find(v, "<|call|>") != VOCAB_NONE, ends;
	uint32_t end = find(v, "<|end|>");

	ends = (calls && find(v, "<|return|>") != VOCAB_NONE) ||
	       ((calls || find(v, "<|calls|>") != VOCAB_NONE) && find(v, "<|flush|>") != VOCAB_NONE);
	if (ends && end != VOCAB_NONE) {
		v->tokens[end].eog = false;
		v->tokens[end].kind = VOCAB_USER_DEFINED;
	}
}

static int load_eog(struct vocab *v, const struct gguf *g, char **ret_error)
{
	int32_t id;
	int r;

	for (size_t i = 0; i < ARRAY_SIZE(eog_names); i++) {
		uint32_t named = find(v, eog_names[i]);

		if (named != VOCAB_NONE) {
			v->tokens[named].eog = true;
			v->tokens[named].kind = VOCAB_CONTROL;
		}
	}

	for (size_t i = 0; i < ARRAY_SIZE(shown_names); i++) {
		uint32_t named = find(v, shown_names[i]);

		if (named != VOCAB_NONE)
			v->tokens[named].kind = VOCAB_USER_DEFINED;
	}

	for (size_t i = 0; i < ARRAY_SIZE(eog_keys); i++) {
		r = vocab_load_id(v, g, eog_keys[i], &id, ret_error);
		if (r < 0)
			return r;

		if (id >= 0)
			v->tokens[id].eog = true;
	}

	mend_end(v);
	return 0;
}

static bool is_plain(const char *text, size_t len)
{
	size_t n = 1;

	while (n < len && (text[n] & 0xc0) == 0x80)
		n++;

	if (n == len)
		return true;

	for (size_t i = 0; i < len; i += n) {
		n = len - i >= 3 && memcmp(text + i, VOCAB_SPACE, 3) == 0 ? 3 : 1;
		if (n == 1 && !memchr(" \t\r\n", text[i], 4))
			return false;
	}

	return true;
}

/* Phi-3 was trained so; no key of the file says it. */
static bool has_stripping_tokens(const struct gguf *g)
{
	const char *name;
	size_t len;

	if (gguf_get_str(g, "general.name", &name, &len) < 0)
		return false;

	for (size_t i = 0; i + 4 <= len; i++) {
		if (strncasecmp(name + i, "phi3", 4) == 0 ||
		    (i + 5 <= len && strncasecmp(name + i, "phi-3", 5) == 0))
			return true;
	}

	return false;
}

static int compare_special(const void *a, const void *b, void *data)
{
	const uint32_t *x = a, *y = b;
	size_t x_len, y_len;

	vocab_bytes(data, *x, &x_len);
	vocab_bytes(data, *y, &y_len);
	return x_len != y_len ? (x_len < y_len) - (x_len > y_len) : (*x > *y) - (*x < *y);
}

static int load_special(struct vocab *v, const struct gguf *g)
{
	static const char *const plain[] = { "<unk>", "<s>", "<|endoftext|>" };
	bool strip = has_stripping_tokens(g);
	size_t n = 0, len;

	for (uint32_t id = 0; id < v->n; id++)
		n += vocab_is_special(v, id);

	v->special = calloc(MAX(n, (size_t)1), sizeof(*v->special));
	if (!v->special)
		return -ENOMEM;

	for (uint32_t id = 0; id < v->n; id++) {
		const char *text = vocab_text(v, id, &len);

		if (!vocab_is_special(v, id) || len == 0)
			continue;

		v->special[v->n_special++] = id;
		v->tokens[id].strips = strip;
		v->tokens[id].in_text = v->tokens[id].kind == VOCAB_USER_DEFINED && is_plain(text, len);
		v->n_in_text += v->tokens[id].in_text;
	}

	for (size_t i = 0; i < ARRAY_SIZE(plain); i++) {
		uint32_t id = find(v, plain[i]);

		if (id != VOCAB_NONE)
			v->tokens[id].strips = false;
	}

	qsort_r(v->special, v->n_special, sizeof(*v->special), compare_special, v);
	return 0;
}

int vocab_load(struct vocab *v, const struct gguf *g, enum vocab_form form, char **ret_error)
{
	size_t n;
	int r;

	v->form = form;
	v->texts = gguf_get_array(g, "tokenizer.ggml.tokens");
	if (!v->texts || !gguf_array_is_str(v->texts))
		return fail(ret_error, -EBADMSG,
			    "tokenizer.ggml.tokens is missing or not an array of strings");

	n = gguf_array_n(v->texts);
	if (n == 0 || n > MAX_VOCAB)
		return fail(ret_error, -EBADMSG,
			    "tokenizer.ggml.tokens has %zu elements; supported are 1 to %u", n,
			    MAX_VOCAB);

	if (getrandom(&v->seed, sizeof(v->seed), 0) != sizeof(v->seed))
		return -EAGAIN;

	v->n = (uint32_t)n;
	v->tokens = calloc(n, sizeof(*v->tokens));
	v->ends = calloc(n, sizeof(*v->ends));
	if (!v->tokens || !v->ends)
		return -ENOMEM;

	fill_alphabet(v);
	r = load_kinds(v, g, ret_error);
	if (r < 0)
		return r;

	r = load_index(v, ret_error);
	if (r < 0)
		return r;

	r = load_eog(v, g, ret_error);
	if (r < 0)
		return r;

	load_pieces(v);
	return load_special(v, g);
}

void vocab_done(struct vocab *v)
{
	free(v->tokens);
	free(v->pieces);
	free(v->ends);
	free(v->index);
	free(v->special);
	*v = (struct vocab){ 0 };
}
