/* SPDX-License-Identifier: MIT */
/*
 * fuzz-template.c: bytes as a template's text ("T" and the text), or as a conversation: a digit
 * for the dialect, a digit for options (1: thinking, 2: continuation), then messages that each
 * start with U+001E and their role (s, u, a) and may have a thought after U+001F.
 *
 * Whatever a message says, special tokens are exactly those of the turns: a text never ends its
 * own turn or opens another. Includes the source, for a template of each dialect without its
 * Jinja text.
 */
#include "daemon/model/template.c"

#include "tests/unit/gguf-build.h"

#include <assert.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MESSAGES_MAX 32

static struct gguf *gguf;
static struct tokenizer *tokenizer;
static struct template *templates[ARRAY_SIZE(dialects)];

/* The byte alphabet of byte-level BPE: printable bytes stand for themselves, the others for
 * U+0100 and on. */
static void add_byte_tokens(struct gguf_build *b)
{
	unsigned next = 0x100;

	for (unsigned i = 0; i < 256; i++) {
		bool itself = (i >= 0x21 && i <= 0x7e) || (i >= 0xa1 && i <= 0xac) || i >= 0xae;
		unsigned c = itself ? i : next++;
		char s[3] = { (char)c };

		if (c >= 0x80) {
			s[0] = (char)(0xc0 | c >> 6);
			s[1] = (char)(0x80 | (c & 0x3f));
		}
		gguf_put_str(&b->kv, s);
	}
}

static void start(void)
{
	static void *image;
	struct gguf_build b = gguf_build_new();
	int32_t types[256 + SPECIAL_N];
	size_t bytes;

	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen35");
	gguf_build_array(&b, "tokenizer.ggml.tokens", GGUF_STR, 256 + SPECIAL_N);
	add_byte_tokens(&b);
	for (int i = 0; i < SPECIAL_N; i++)
		gguf_put_str(&b.kv, special_text[i]);
	for (size_t i = 0; i < ARRAY_SIZE(types); i++)
		types[i] = i < 256 ? 1 : i < 256 + SPECIAL_THINK ? 3 : 4;
	gguf_build_i32s(&b, "tokenizer.ggml.token_type", types, ARRAY_SIZE(types));
	gguf_build_strs(&b, "tokenizer.ggml.merges", NULL, 0);
	image = gguf_build_done(&b, &bytes);
	if (gguf_open_memory(image, bytes, "fuzz", &gguf, NULL) < 0 ||
	    tokenizer_new(gguf, &tokenizer, NULL) < 0)
		abort();
	for (size_t i = 0; i < ARRAY_SIZE(dialects); i++) {
		templates[i] = calloc(1, sizeof(struct template));
		if (!templates[i])
			abort();
		templates[i]->tokenizer = tokenizer;
		templates[i]->dialect = &dialects[i];
		if (load(templates[i], NULL) < 0)
			abort();
	}
}

static size_t parse(const uint8_t *data, size_t size, struct message *ret)
{
	size_t n = 0;

	while (size > 0 && n < MESSAGES_MAX) {
		const char *s = (const char *)data + 1, *end, *thought;
		size_t len = size - 1;

		if (len == 0 || data[0] != 0x1e)
			break;
		end = memchr(s, 0x1e, len);
		len = end ? (size_t)(end - s) : len;
		if (len == 0)
			break;
		ret[n] = (struct message){
			.role = *s == 's'   ? MESSAGE_SYSTEM
				: *s == 'u' ? MESSAGE_USER
					    : MESSAGE_ASSISTANT,
			.content = s + 1,
			.content_len = len - 1,
		};
		thought = memchr(s + 1, 0x1f, len - 1);
		if (thought) {
			ret[n].content_len = (size_t)(thought - s) - 1;
			ret[n].reasoning = thought + 1;
			ret[n].reasoning_len = len - (size_t)(thought + 1 - s);
		}
		n++;
		data += len + 1;
		size -= len + 1;
	}
	return n;
}

/* START [THINK THINK_END] END for each turn, then START [THINK [THINK_END]]. */
static void check_specials(const struct template *t, const struct template_prompt *p, size_t n_turns)
{
	size_t n_start = 0;
	int last = SPECIAL_END;

	for (size_t i = 0; i < p->tokens.n; i++) {
		int now = p->tokens.ids[i] - 256;

		if (now < 0)
			continue;
		switch ((enum special)now) {
		case SPECIAL_START:
			assert(last == SPECIAL_END);
			assert(n_start < n_turns || i < p->answer_start);
			n_start++;
			break;
		case SPECIAL_THINK: assert(last == SPECIAL_START); break;
		case SPECIAL_THINK_END: assert(last == SPECIAL_THINK); break;
		case SPECIAL_END: assert(last == SPECIAL_START || last == SPECIAL_THINK_END); break;
		case SPECIAL_N: abort();
		}
		last = now;
	}
	assert(n_start == n_turns + 1);
	assert(last == (p->thinking_open        ? SPECIAL_THINK
			: last == SPECIAL_START ? SPECIAL_START
						: SPECIAL_THINK_END));
	assert(t->special[SPECIAL_THINK] >= 0 || last == SPECIAL_START);
}

static void run_conversation(const uint8_t *data, size_t size)
{
	struct template_options o = { .thinking = data[1] & 1, .continuation = data[1] & 2 };
	const struct template *t = templates[data[0] % ARRAY_SIZE(dialects)];
	struct message messages[MESSAGES_MAX] = {};
	struct template_prompt p = {};
	_cleanup_(freep) char *error = NULL;
	size_t n = parse(data + 2, size - 2, messages), n_turns = n;
	int r = template_render(t, messages, n, &o, NULL, &p, &error);

	if (r < 0) {
		assert(r == -EINVAL && error && !p.tokens.ids);
		return;
	}
	for (size_t i = 0; i < n; i++)
		n_turns -= messages[i].role == MESSAGE_SYSTEM && t->dialect->skip_empty_system &&
			   message_content(t, &messages[i]).len == 0;
	check_specials(t, &p, n_turns);
	assert(p.answer_start <= p.tokens.n);
	template_prompt_done(&p);
}

static void run_template(const uint8_t *data, size_t size)
{
	_cleanup_(template_freep) struct template *t = calloc(1, sizeof(*t));
	_cleanup_(freep) char *error = NULL;
	int r;

	if (!t)
		abort();
	t->tokenizer = tokenizer;
	r = find_dialect(t, (const char *)data, size, &error);
	assert(r == 0 || (r == -EOPNOTSUPP && error));
	assert(r < 0 || load(t, NULL) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (!tokenizer)
		start();
	if (size > 0 && data[0] == 'T')
		run_template(data + 1, size - 1);
	else if (size >= 2)
		run_conversation(data, size);
	return 0;
}
