/* SPDX-License-Identifier: MIT */
/*
 * vocab.c: see vocab.h.
 *
 * Texts stay in the file and are found through a hash index; the bytes that they stand for are
 * decoded once. Byte-level BPE writes each byte as a visible character: those that are printable in
 * Latin-1 stand for themselves, the other 68, in order, for U+0100 and following.
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
};

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

static void token_text(const struct vocab *v, uint32_t id, const char **ret, size_t *ret_len)
{
	*ret = "";
	*ret_len = 0;
	(void)gguf_array_str(v->texts, id, ret, ret_len); /* id is below the array's length */
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

		token_text(v, s->id, &text, &len);
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

static int load_kinds(struct vocab *v, const struct gguf *g, char **ret_error)
{
	const struct gguf_array *a = gguf_get_array(g, "tokenizer.ggml.token_type");
	int64_t kind;

	if (!a) {
		for (uint32_t i = 0; i < v->n; i++)
			v->tokens[i].kind = VOCAB_NORMAL;

		return 0;
	}

	if (gguf_array_n(a) != v->n)
		return fail(ret_error, -EBADMSG,
			    "tokenizer.ggml.token_type has %zu elements for %u tokens",
			    gguf_array_n(a), v->n);

	for (uint32_t i = 0; i < v->n; i++) {
		if (gguf_array_i64(a, i, &kind) < 0)
			return fail(ret_error, -EBADMSG,
				    "tokenizer.ggml.token_type is not an array of integers");

		v->tokens[i].kind = kind >= VOCAB_NORMAL && kind <= VOCAB_USER_DEFINED ? (uint8_t)kind
										       : VOCAB_UNUSED;
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

		token_text(v, id, &text, &len);
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

static void load_pieces(struct vocab *v)
{
	uint32_t end = 0;
	const char *text;
	size_t len;

	for (uint32_t id = 0; id < v->n; id++) {
		token_text(v, id, &text, &len);
		if (vocab_is_special(v, id)) {
			memcpy(v->pieces + end, text, len);
			end += (uint32_t)len;
		} else {
			end += (uint32_t)decode_text(v, text, len, v->pieces + end,
						     &v->tokens[id].bytes_only);
		}

		v->ends[id] = end;
	}
}

int vocab_load_id(const struct vocab *v, const struct gguf *g, const char *key, int32_t *ret,
		  char **ret_error)
{
	uint64_t id;
	int r = gguf_get_u64(g, key, &id);

	if (r == -ENOENT) {
		*ret = -1;
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

static int load_eog(struct vocab *v, const struct gguf *g, char **ret_error)
{
	int32_t id;
	int r;

	for (size_t i = 0; i < ARRAY_SIZE(eog_names); i++) {
		uint32_t named = vocab_find_text(v, eog_names[i], strlen(eog_names[i]), "", 0);

		if (named != VOCAB_NONE) {
			v->tokens[named].eog = true;
			v->tokens[named].kind = VOCAB_CONTROL;
		}
	}

	for (size_t i = 0; i < ARRAY_SIZE(eog_keys); i++) {
		r = vocab_load_id(v, g, eog_keys[i], &id, ret_error);
		if (r < 0)
			return r;

		if (id >= 0)
			v->tokens[id].eog = true;
	}

	return 0;
}

static int compare_special(const void *a, const void *b, void *data)
{
	const uint32_t *x = a, *y = b;
	size_t x_len, y_len;

	vocab_bytes(data, *x, &x_len);
	vocab_bytes(data, *y, &y_len);
	return x_len != y_len ? (x_len < y_len) - (x_len > y_len) : (*x > *y) - (*x < *y);
}

static int load_special(struct vocab *v)
{
	size_t n = 0, len;

	for (uint32_t id = 0; id < v->n; id++)
		n += vocab_is_special(v, id);

	v->special = calloc(MAX(n, (size_t)1), sizeof(*v->special));
	if (!v->special)
		return -ENOMEM;

	for (uint32_t id = 0; id < v->n; id++) {
		vocab_bytes(v, id, &len);
		if (vocab_is_special(v, id) && len > 0)
			v->special[v->n_special++] = id;
	}

	qsort_r(v->special, v->n_special, sizeof(*v->special), compare_special, v);
	return 0;
}

int vocab_load(struct vocab *v, const struct gguf *g, char **ret_error)
{
	size_t n;
	int r;

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
	return load_special(v);
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
