/* SPDX-License-Identifier: MIT */
/*
 * fuzz-tokenizer.c: any bytes as text, or as a vocabulary. The first byte chooses: its lowest two
 * bits and bits 3 to 5 the rule (with those a table of pre-tokenizers is filled, and one that
 * is SentencePiece-style), bit 2 special tokens, bit 7 that the rest is a GGUF file with a
 * vocabulary of its own.
 *
 * Checked of text, with a vocabulary that has every byte: its tokens give back the text, invalid
 * UTF-8 repaired and U+2581 as a space where that is the rule; no special token comes out unasked;
 * cutting the output into two pieces does not change what utf8_push() makes of it.
 */
#include "daemon/model/tokenizer.h"
#include "tests/unit/gguf-build.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define N_SPECIAL 3

static const char *const special[N_SPECIAL] = { "<|x|>", "<|x", "aab" };
/* NULL: no pre-tokenizer, a SentencePiece-style vocabulary. */
static const char *const pre_names[] = { "qwen35",         "qwen2",       "gpt-2",  "llama-bpe",
					 "starcoder",      "tekken",      "gpt-4o", "deepseek-llm",
					 "deepseek-coder", "deepseek-v3", NULL };

/* The byte alphabet of byte-level BPE. */
static void letter_of(unsigned byte, char *to)
{
	unsigned c = byte;

	if (byte <= ' ')
		c = 0x100 + byte;
	else if (byte >= 0x7f && byte <= 0xa0)
		c = 0x100 + 33 + (byte - 0x7f);
	else if (byte == 0xad)
		c = 0x100 + 33 + 34;
	if (c < 0x80) {
		to[0] = (char)c;
		to[1] = 0;
	} else {
		to[0] = (char)(0xc0 | c >> 6);
		to[1] = (char)(0x80 | (c & 0x3f));
		to[2] = 0;
	}
}

static void build(struct gguf_build *b, const char *pre)
{
	static const char *const merges[] = { "a a",
					      "aa b",
					      "aa aa",
					      "\xc3\xaf \xc2\xbf",
					      "\xc3\xaf\xc2\xbf \xc2\xbd",
					      "\xc4\xa0 \xc4\xa0",
					      "\xc4\xa0 a",
					      "\xc4\x8a \xc4\x8a",
					      "b c",
					      "a b" };
	static char texts[256][3], joined[ARRAY_SIZE(merges)][32];
	const char *tokens[256 + ARRAY_SIZE(merges) + N_SPECIAL];
	int32_t types[ARRAY_SIZE(tokens)];
	size_t n = 0;

	for (unsigned i = 0; i < 256; i++) {
		letter_of(i, texts[i]);
		tokens[n++] = texts[i];
	}
	for (size_t i = 0; i < ARRAY_SIZE(merges); i++) {
		const char *space = strchr(merges[i], ' ');

		snprintf(joined[i], sizeof(joined[i]), "%.*s%s", (int)(space - merges[i]),
			 merges[i], space + 1);
		if (!streq(joined[i], "aab")) /* a special token, which the merge must not make */
			tokens[n++] = joined[i];
	}
	for (size_t i = 0; i < n; i++)
		types[i] = 1;
	for (size_t i = 0; i < N_SPECIAL; i++) {
		types[n] = i == 0 ? 4 : 3;
		tokens[n++] = special[i];
	}
	gguf_build_str(b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(b, "tokenizer.ggml.pre", pre);
	gguf_build_strs(b, "tokenizer.ggml.tokens", tokens, n);
	gguf_build_i32s(b, "tokenizer.ggml.token_type", types, n);
	gguf_build_strs(b, "tokenizer.ggml.merges", merges, ARRAY_SIZE(merges));
}

static void build_spm(struct gguf_build *b)
{
	static const char *const pieces[] = { "\xe2\x96\x81",
					      "a",
					      "b",
					      "c",
					      "aa",
					      "ab",
					      "bc",
					      "aaa",
					      "\xe2\x96\x81"
					      "a",
					      "\xe2\x96\x81\xe2\x96\x81",
					      "\xc3\xa9"
					      "a",
					      "\xe4\xb8\xad",
					      "a\xe2\x96\x81"
					      "b",
					      "\n\n" };
	static char texts[256][8];
	const char *tokens[1 + 256 + ARRAY_SIZE(pieces) + N_SPECIAL];
	int32_t types[ARRAY_SIZE(tokens)];
	float scores[ARRAY_SIZE(tokens)] = { 0 };
	size_t n = 0;

	types[n] = 2;
	tokens[n++] = "<unk>";
	for (unsigned i = 0; i < 256; i++) {
		snprintf(texts[i], sizeof(texts[i]), "<0x%02X>", i);
		types[n] = 6;
		tokens[n++] = texts[i];
	}
	for (size_t i = 0; i < ARRAY_SIZE(pieces); i++) {
		scores[n] = -(float)(i / 2); /* pairs of equals */
		types[n] = 1;
		tokens[n++] = pieces[i];
	}
	for (size_t i = 0; i < N_SPECIAL; i++) {
		types[n] = i == 0 ? 4 : 3;
		tokens[n++] = special[i];
	}
	gguf_build_str(b, "tokenizer.ggml.model", "llama");
	gguf_build_strs(b, "tokenizer.ggml.tokens", tokens, n);
	gguf_build_i32s(b, "tokenizer.ggml.token_type", types, n);
	gguf_build_f32s(b, "tokenizer.ggml.scores", scores, n);
}

static const struct tokenizer *own_tokenizer(size_t kind)
{
	/* All of it lives as long as the program, and stays reachable for the leak checker. */
	static struct tokenizer *made[ARRAY_SIZE(pre_names)];
	static struct gguf *files[ARRAY_SIZE(pre_names)];
	static void *images[ARRAY_SIZE(pre_names)];
	struct gguf_build b = gguf_build_new();
	size_t bytes;

	if (made[kind])
		return made[kind];
	if (pre_names[kind])
		build(&b, pre_names[kind]);
	else
		build_spm(&b);
	images[kind] = gguf_build_done(&b, &bytes);
	if (gguf_open_memory(images[kind], bytes, "own", &files[kind], NULL) < 0 ||
	    tokenizer_new(files[kind], &made[kind], NULL) < 0)
		abort();
	return made[kind];
}

static void check_stream(const struct buf *bytes)
{
	_cleanup_(buf_done) struct buf whole = { 0 }, cut = { 0 };
	struct utf8_stream a = { 0 }, b = { 0 };
	size_t half = bytes->len / 2;

	if (bytes->len == 0)
		return;
	if (utf8_push(&a, bytes->data, bytes->len, &whole) < 0 || utf8_flush(&a, &whole) < 0 ||
	    utf8_push(&b, bytes->data, half, &cut) < 0 ||
	    utf8_push(&b, bytes->data + half, bytes->len - half, &cut) < 0 || utf8_flush(&b, &cut) < 0)
		abort();
	if (!utf8_valid(whole.data, whole.len) || whole.len != cut.len ||
	    memcmp(whole.data, cut.data, cut.len) != 0)
		abort();
	if (utf8_valid(bytes->data, bytes->len) &&
	    (whole.len != bytes->len || memcmp(whole.data, bytes->data, whole.len) != 0))
		abort();
}

/* What the tokens of valid UTF-8 give back. */
static void expect_text(const char *text, size_t len, bool spm, struct buf *ret)
{
	int r = spm && len > 0 ? buf_append(ret, " ", 1) : 0;

	for (size_t i = 0; i < len && r == 0; i++) {
		bool space = spm && len - i >= 3 && memcmp(text + i, "\xe2\x96\x81", 3) == 0;

		r = buf_append(ret, space ? " " : text + i, 1);
		i += space ? 2 : 0;
	}
	if (r < 0)
		abort();
}

static void check_text(const struct tokenizer *t, bool spm, const char *text, size_t len,
		       enum tokenizer_flags flags)
{
	_cleanup_(tokens_done) struct tokens ids = { 0 };
	_cleanup_(buf_done) struct buf back = { 0 }, want = { 0 };
	size_t n;

	if (tokenizer_encode(t, text, len, flags, NULL, &ids) < 0)
		abort();
	for (size_t i = 0; i < ids.n; i++) {
		const char *piece = tokenizer_piece(t, ids.ids[i], true, &n);

		if (!flags && (uint32_t)ids.ids[i] >= tokenizer_n_vocab(t) - N_SPECIAL)
			abort();
		if (n == 0 || buf_append(&back, piece, n) < 0)
			abort();
	}
	expect_text(text, len, spm, &want);
	/* With special tokens text begins anew, and with a space, after each. */
	if (utf8_valid(text, len) && !(spm && flags) &&
	    (back.len != want.len || (len > 0 && memcmp(back.data, want.data, want.len) != 0)))
		abort();
	check_stream(&back);
	back.len = 0;
	if (buf_append(&back, text, len) < 0)
		abort();
	check_stream(&back);
}

static void check_vocabulary(const uint8_t *data, size_t size)
{
	static const char text[] = "<|x|>aaab bc  a'S 12\n\xff\xe4\xb8\xad<|endoftext|>";
	_cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(tokens_done) struct tokens ids = { 0 };
	_cleanup_(freep) char *error = NULL;
	_cleanup_(freep) void *image = NULL;
	size_t n;

	if (posix_memalign(&image, 64, MAX(size, (size_t)1)) != 0)
		abort();
	memcpy(image, data, size);
	if (gguf_open_memory(image, size, "input", &g, NULL) < 0)
		return;
	if (tokenizer_new(g, &t, &error) < 0) {
		if (!error)
			abort();
		return;
	}
	if (tokenizer_encode(t, text, sizeof(text) - 1, 0, NULL, &ids) < 0 ||
	    tokenizer_encode(t, text, sizeof(text) - 1, TOKENIZER_SPECIAL, NULL, &ids) < 0)
		abort();
	for (size_t i = 0; i < ids.n; i++) {
		if ((uint32_t)ids.ids[i] >= tokenizer_n_vocab(t))
			abort();
		tokenizer_piece(t, ids.ids[i], true, &n);
	}
	if (tokenizer_eos(t) >= 0 && !tokenizer_is_eog(t, tokenizer_eos(t)))
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	size_t kind;

	if (size == 0)
		return 0;
	kind = ((data[0] & 3u) + (data[0] >> 3 & 7u) * 4) % ARRAY_SIZE(pre_names);
	if (data[0] & 0x80)
		check_vocabulary(data + 1, size - 1);
	else
		check_text(own_tokenizer(kind), !pre_names[kind], (const char *)data + 1, size - 1,
			   data[0] & 4 ? TOKENIZER_SPECIAL : 0);
	return 0;
}
