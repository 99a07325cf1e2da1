/* SPDX-License-Identifier: MIT */
/*
 * fuzz-template.c: bytes as a template's text ("T" and the text), or as a conversation: '0' and on
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
#define N_SPECIAL    ARRAY_SIZE(special_text)
#define THINK        0
#define THINK_END    1

static const char *const special_text[] = { "<think>",
					    "</think>",
					    "<|im_start|>",
					    "<|im_end|>",
					    "<|start_header_id|>",
					    "<|end_header_id|>",
					    "<|eot_id|>",
					    "[INST]",
					    "[/INST]",
					    "[SYSTEM_PROMPT]",
					    "[/SYSTEM_PROMPT]",
					    "<｜User｜>",
					    "<｜Assistant｜>",
					    "<｜end▁of▁sentence｜>",
					    "<s>",
					    "</s>" };

static struct gguf *gguf;
static struct tokenizer *tokenizer;
static struct template *templates[32];
static size_t n_templates;

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
	int32_t types[256 + N_SPECIAL];
	size_t bytes;

	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen35");
	gguf_build_array(&b, "tokenizer.ggml.tokens", GGUF_STR, 256 + N_SPECIAL);
	add_byte_tokens(&b);
	for (size_t i = 0; i < N_SPECIAL; i++)
		gguf_put_str(&b.kv, special_text[i]);
	for (size_t i = 0; i < ARRAY_SIZE(types); i++)
		types[i] = i < 256 ? 1 : i <= 256 + THINK_END ? 4 : 3;
	gguf_build_i32s(&b, "tokenizer.ggml.token_type", types, ARRAY_SIZE(types));
	gguf_build_strs(&b, "tokenizer.ggml.merges", NULL, 0);
	gguf_build_u32(&b, "tokenizer.ggml.bos_token_id", 256 + N_SPECIAL - 2);
	gguf_build_u32(&b, "tokenizer.ggml.eos_token_id", 256 + N_SPECIAL - 1);
	image = gguf_build_done(&b, &bytes);
	if (gguf_open_memory(image, bytes, "fuzz", &gguf, NULL) < 0 ||
	    tokenizer_new(gguf, &tokenizer, NULL) < 0)
		abort();
	for (; dialect_at(n_templates); n_templates++) {
		struct template *t = calloc(1, sizeof(*t));

		if (!t || n_templates == ARRAY_SIZE(templates))
			abort();
		t->tokenizer = tokenizer;
		t->dialect = dialect_at(n_templates);
		if (load(t, NULL) < 0)
			abort();
		templates[n_templates] = t;
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

static void expect(struct tokens *want, const struct template *t, const char *text)
{
	_cleanup_(tokens_done) struct tokens all = {};

	if (encode_template(t, text, &all) < 0)
		abort();
	for (size_t i = 0; i < all.n; i++)
		if (all.ids[i] > 256 + THINK_END && tokens_append(want, &all.ids[i], 1) < 0)
			abort();
}

static void expect_turns(struct tokens *want, const struct template *t, const struct message *m,
			 size_t n, bool continuation)
{
	const struct dialect *d = t->dialect;
	bool system = n > 0 && m[0].role == MESSAGE_SYSTEM;
	bool left_out = d->system_rule == SYSTEM_SKIP_EMPTY &&
			(!system || message_content(t, &m[0]).len == 0);
	bool always = d->system_rule == SYSTEM_ALWAYS || d->system_rule == SYSTEM_SMOLLM3 ||
		      d->default_system;

	if (!continuation) {
		expect(want, t, d->bos ? PUT_BOS : "");
		if ((system || always) && !left_out) {
			expect(want, t, d->system.before);
			expect(want, t, d->system.after);
		}
	}
	for (size_t i = system; i < n; i++) {
		const struct turn *turn = m[i].role == MESSAGE_USER ? &d->user : &d->assistant;

		expect(want, t, turn->before);
		expect(want, t, turn->after);
	}
	expect(want, t, d->assistant.before);
}

/* Those of the turns, and think blocks, which are never within one another. */
static void check_specials(const struct template *t, const struct template_prompt *p,
			   const struct tokens *want)
{
	bool open = false;
	size_t n = 0;

	for (size_t i = 0; i < p->tokens.n; i++) {
		int now = p->tokens.ids[i] - 256;

		if (now == THINK || now == THINK_END) {
			assert(t->think_end >= 0 && open == (now == THINK_END));
			open = !open;
		} else if (now >= 0) {
			assert(!open && n < want->n && want->ids[n] == p->tokens.ids[i]);
			n++;
		}
	}
	assert(n == want->n);
	assert(open == p->thinking_open);
}

static void run_conversation(const uint8_t *data, size_t size)
{
	struct template_options o = { .thinking = data[1] & 1, .continuation = data[1] & 2 };
	const struct template *t = templates[data[0] % n_templates];
	_cleanup_(tokens_done) struct tokens want = {};
	struct message messages[MESSAGES_MAX] = {};
	struct template_prompt p = {};
	_cleanup_(freep) char *error = NULL;
	size_t n = parse(data + 2, size - 2, messages);
	int r = template_render(t, messages, n, &o, NULL, &p, &error);

	if (r < 0) {
		assert(r == -EINVAL && error && !p.tokens.ids);
		return;
	}
	expect_turns(&want, t, messages, n, o.continuation);
	check_specials(t, &p, &want);
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
