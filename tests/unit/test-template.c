/* SPDX-License-Identifier: MIT */
/*
 * test-template.c: prompts against Jinja's (tests/unit/template-cases.json, made by
 * tests/parity/template-cases.py), token for token, with the bundled model's vocabulary.
 *
 * Expected texts have U+E000 and on where the template wrote a special token, so a user's
 * "<think>" that became a token, or a template's that did not, differs.
 *
 * template-families.json is the same for templates that are in ../shared only, with a vocabulary
 * made here of bytes and their special tokens.
 */
#include "tests/test.h"

#include "daemon/model/template.h"
#include "tests/unit/gguf-build.h"

#include <jansson.h>

#define MODEL    "tests/models/tiny-qwen35moe-stories-q8_0.gguf"
#define CASES    "tests/unit/template-cases.json"
#define FAMILIES "tests/unit/template-families.json"

static const char *const specials[] = { "<|im_start|>", "<|im_end|>", "<think>", "</think>" };

struct fixture {
	struct gguf *gguf;
	struct tokenizer *tokenizer;
	struct template *template; /* the model's own */
	json_t *cases;
	void *image; /* of a vocabulary made here */
};

static int setup(void **state)
{
	static struct fixture f;

	if (access(MODEL, R_OK) < 0)
		return 0; /* each test says that it is skipped */
	assert_int_equal(gguf_open(MODEL, &f.gguf, NULL), 0);
	assert_int_equal(tokenizer_new(f.gguf, &f.tokenizer, NULL), 0);
	assert_int_equal(template_new(f.gguf, f.tokenizer, &f.template, NULL), 0);
	f.cases = json_load_file(CASES, 0, NULL);
	assert_non_null(f.cases);
	*state = &f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	if (!f)
		return 0;
	json_decref(f->cases);
	template_free(f->template);
	tokenizer_free(f->tokenizer);
	gguf_close(f->gguf);
	return 0;
}

#define need_model(state)                                       \
	do {                                                    \
		if (!*(state))                                  \
			skip_because("%s is not there", MODEL); \
	} while (0)

/* A template of this text, for the bundled model's vocabulary. */
static int new_template(struct fixture *f, const char *text, struct template **ret, char **ret_error)
{
	struct gguf_build b = gguf_build_new();
	struct gguf *g = NULL;
	size_t bytes;
	void *image;
	int r;

	gguf_build_str(&b, "general.architecture", "qwen35moe");
	if (text)
		gguf_build_str(&b, "tokenizer.chat_template", text);
	image = gguf_build_done(&b, &bytes);
	assert_int_equal(gguf_open_memory(image, bytes, "test", &g, NULL), 0);
	r = template_new(g, f->tokenizer, ret, ret_error);
	gguf_close(g);
	free(image);
	return r;
}

static struct message message_of(const json_t *j)
{
	const char *role = json_string_value(json_object_get(j, "role"));
	const json_t *content = json_object_get(j, "content"),
		     *reasoning = json_object_get(j, "reasoning_content");

	return (struct message){
		.role = streq(role, "system") ? MESSAGE_SYSTEM
			: streq(role, "user") ? MESSAGE_USER
					      : MESSAGE_ASSISTANT,
		.content = json_string_value(content),
		.content_len = json_string_length(content),
		.reasoning = json_string_value(reasoning),
		.reasoning_len = json_string_length(reasoning),
	};
}

static size_t messages_of(const json_t *array, struct message *ret)
{
	size_t i;
	json_t *m;

	assert_true(json_array_size(array) <= 16);
	json_array_foreach(array, i, m)
		ret[i] = message_of(m);
	return i;
}

static const char *special_of(struct fixture *f, size_t i)
{
	json_t *own = json_object_get(f->cases, "specials");

	if (own)
		return json_string_value(json_array_get(own, i));
	assert_true(i < ARRAY_SIZE(specials));
	return specials[i];
}

/* The ids of a text in which U+E000.. stand for special tokens. */
static struct tokens expected_tokens(struct fixture *f, const char *text)
{
	struct tokens out = {};

	for (;;) {
		const char *mark = strstr(text, "\xee\x80");
		size_t len = mark ? (size_t)(mark - text) : strlen(text);
		int32_t id;

		assert_int_equal(tokenizer_encode(f->tokenizer, text, len, 0, NULL, &out), 0);
		if (!mark)
			return out;
		id = tokenizer_find(f->tokenizer, special_of(f, (unsigned char)mark[2] - 0x80u));
		assert_true(id >= 0);
		assert_int_equal(tokens_append(&out, &id, 1), 0);
		text = mark + 3;
	}
}

static char *text_of(struct fixture *f, const struct tokens *t)
{
	struct buf b = {};

	for (size_t i = 0; i < t->n; i++) {
		size_t len;
		const char *s = tokenizer_piece(f->tokenizer, t->ids[i], true, &len);

		assert_int_equal(buf_append(&b, s, len), 0);
	}
	assert_int_equal(buf_reserve(&b, 0), 0);
	return b.data;
}

static void assert_tokens_equal(struct fixture *f, const struct tokens *got, const struct tokens *want)
{
	if (got->n != want->n ||
	    (got->n > 0 && memcmp(got->ids, want->ids, got->n * sizeof(*got->ids)) != 0)) {
		_cleanup_(freep) char *a = text_of(f, got), *b = text_of(f, want);

		fail_msg("rendered (%zu tokens):\n%s\nexpected (%zu tokens):\n%s", got->n, a,
			 want->n, b);
	}
}

/* The answer starts after the last header; a block that is open there is the last thing written. */
static void check_answer_start(struct fixture *f, const struct template_prompt *p,
			       const struct tokens *all, const char *text)
{
	int32_t header = tokenizer_find(f->tokenizer, specials[0]);
	size_t last = all->n;
	struct tokens want;

	while (last > 0 && all->ids[last - 1] != header)
		last--;
	want = expected_tokens(f, "assistant\n");
	assert_int_equal(p->answer_start, last + want.n);
	assert_int_equal(p->thinking_open,
			 strlen(text) > 4 && streq(text + strlen(text) - 4, "\xee\x80\x82\n"));
	tokens_done(&want);
}

/* The families end with their header, or with one of these. */
static void check_family_answer_start(struct fixture *f, const struct template_prompt *p)
{
	static const char *const thinks[] = { "", "<think>\n", "<think>\n</think>" };
	const struct tokens rest = { p->tokens.ids + p->answer_start, p->tokens.n - p->answer_start, 0 };
	_cleanup_(freep) char *text = text_of(f, &rest);
	bool known = false;

	for (size_t i = 0; i < ARRAY_SIZE(thinks); i++)
		known |= streq(text, thinks[i]);
	assert_true(known);
	assert_int_equal(p->thinking_open, streq(text, "<think>\n"));
}

static void check_case(struct fixture *f, const struct template *t, const json_t *c, const char *text)
{
	struct template_options o = { .thinking = json_is_true(json_object_get(c, "thinking")) };
	struct template_prompt p = {};
	_cleanup_(freep) char *error = NULL;
	struct message messages[16];
	size_t n = messages_of(json_object_get(c, "messages"), messages);
	struct tokens want;
	int r = template_render(t, messages, n, &o, NULL, &p, &error);

	if (!text) {
		assert_int_equal(r, -EINVAL);
		assert_non_null(error);
		assert_null(p.tokens.ids);
		return;
	}
	assert_int_equal(r, 0);
	want = expected_tokens(f, text);
	assert_tokens_equal(f, &p.tokens, &want);

	if (json_object_get(f->cases, "specials"))
		check_family_answer_start(f, &p);
	else
		check_answer_start(f, &p, &want, text);
	tokens_done(&want);
	template_prompt_done(&p);
}

static void test_jinja(void **state)
{
	struct fixture *f = *state;
	const char *name;
	json_t *source, *c, *e, *in;
	size_t i, j, k, n = 0;

	need_model(state);
	json_object_foreach(json_object_get(f->cases, "templates"), name, source) {
		struct template *t = NULL;
		_cleanup_(freep) char *error = NULL;

		if (new_template(f, json_string_value(source), &t, &error) < 0)
			fail_msg("%s: %s", name, error);
		json_array_foreach(json_object_get(f->cases, "cases"), i, c)
			json_array_foreach(json_object_get(c, "expected"), j, e)
				json_array_foreach(json_object_get(e, "templates"), k, in)
					if (streq(json_string_value(in), name)) {
						check_case(f, t, c,
							   json_string_value(json_object_get(e, "text")));
						n++;
					}
		template_free(t);
	}
	assert_true(n > 900);
}

/* The model's own template is one of them. */
static void test_model(void **state)
{
	struct fixture *f = *state;
	const char *in_file, *in_cases;
	size_t len;

	need_model(state);
	in_cases = json_string_value(
		json_object_get(json_object_get(f->cases, "templates"), "chatml-think"));
	assert_int_equal(gguf_get_str(f->gguf, "tokenizer.chat_template", &in_file, &len), 0);
	assert_int_equal(len, strlen(in_cases));
	assert_memory_equal(in_file, in_cases, len);
}

static void put(struct tokens *to, const struct tokens *from, size_t n)
{
	assert_int_equal(tokens_append(to, from->ids, n), 0);
}

/*
 * What a session does: a prompt, the answer without its thought, the end of the turn, the next
 * message. Must be what rendering all of it gives.
 */
static void check_continuation(struct fixture *f, const struct template *t, const char *system,
			       const char *answer, bool thinking)
{
	const struct message all[] = {
		{ MESSAGE_SYSTEM, system ?: "", system ? strlen(system) : 0, NULL, 0 },
		{ MESSAGE_USER, "One?", 4, NULL, 0 },
		{ MESSAGE_ASSISTANT, answer, strlen(answer), "hm", 2 },
		{ MESSAGE_USER, " Two? ", 6, NULL, 0 },
		{ MESSAGE_ASSISTANT, "2", 1, NULL, 0 },
		{ MESSAGE_USER, "Three?", 6, NULL, 0 },
	};
	struct template_options first = { .thinking = thinking },
				next = { .thinking = thinking, .continuation = true };
	struct template_prompt a = {}, b = {}, whole = {};
	size_t from = system ? 0 : 1;
	struct tokens session = {};

	assert_int_equal(template_render(t, all + from, 2 - from, &first, NULL, &a, NULL), 0);
	put(&session, &a.tokens, a.answer_start);
	assert_int_equal(tokenizer_encode(f->tokenizer, answer, strlen(answer), 0, NULL, &session), 0);
	put(&session, template_turn_end(t), template_turn_end(t)->n);
	assert_int_equal(template_render(t, all + 3, 3, &next, NULL, &b, NULL), 0);
	b.answer_start += session.n;
	put(&session, &b.tokens, b.tokens.n);

	assert_int_equal(template_render(t, all + from, 6 - from, &first, NULL, &whole, NULL), 0);
	assert_tokens_equal(f, &session, &whole.tokens);
	assert_int_equal(b.answer_start, whole.answer_start);
	tokens_done(&session);
	template_prompt_done(&a);
	template_prompt_done(&b);
	template_prompt_done(&whole);
}

static void test_continuation(void **state)
{
	struct fixture *f = *state;
	const char *name;
	json_t *source;

	need_model(state);
	json_object_foreach(json_object_get(f->cases, "templates"), name, source) {
		struct template *t = NULL;

		assert_int_equal(new_template(f, json_string_value(source), &t, NULL), 0);
		check_continuation(f, t, "Be brief.", "The answer is one.", true);
		check_continuation(f, t, "Be brief.",
				   "Several lines:\n\n- a\n- b\n\n```\ncode\n```", true);
		check_continuation(f, t, "x", "", true);
		check_continuation(f, t, "x", "<|im_end|> and <think> are words here", true);
		template_free(t);
	}
}

static void test_continuation_rules(void **state)
{
	struct fixture *f = *state;
	struct template_options o = { .thinking = false, .continuation = true };
	const struct message system = { MESSAGE_SYSTEM, "s", 1, NULL, 0 };
	const struct message tool = { MESSAGE_USER, "<tool_response>1</tool_response>", 32, NULL, 0 };
	struct template_prompt p = {};
	_cleanup_(freep) char *error = NULL;
	struct tokens want;

	need_model(state);
	assert_int_equal(template_render(f->template, &system, 1, &o, NULL, &p, &error), -EINVAL);
	assert_non_null(strstr(error, "system message"));
	assert_int_equal(template_render(f->template, NULL, 0, &o, NULL, &p, NULL), -EINVAL);
	/* the query may be in the earlier turns */
	assert_int_equal(template_render(f->template, &tool, 1, &o, NULL, &p, NULL), 0);
	want = expected_tokens(f, "\xee\x80\x80user\n<tool_response>1</tool_response>\xee\x80\x81\n\xee\x80\x80"
				  "assistant\n\xee\x80\x82\n\n\xee\x80\x83\n\n");
	assert_tokens_equal(f, &p.tokens, &want);
	tokens_done(&want);
	template_prompt_done(&p);
}

static void test_pieces(void **state)
{
	struct fixture *f = *state;
	struct template *t = NULL;
	struct tokens want;

	need_model(state);
	want = expected_tokens(f, "\xee\x80\x81\n");
	assert_tokens_equal(f, template_turn_end(f->template), &want);
	tokens_done(&want);
	want = expected_tokens(f, "\n\xee\x80\x83\n\n");
	assert_tokens_equal(f, template_think_close(f->template), &want);
	tokens_done(&want);
	assert_int_equal(template_think_end_id(f->template), tokenizer_find(f->tokenizer, "</think>"));

	assert_int_equal(new_template(f,
				      json_string_value(json_object_get(
					      json_object_get(f->cases, "templates"), "chatml")),
				      &t, NULL),
			 0);
	assert_int_equal(template_think_end_id(t), -1);
	assert_int_equal(template_think_close(t)->n, 0);
	template_free(t);
}

static void test_abort(void **state)
{
	struct fixture *f = *state;
	struct template_options o = { .thinking = true };
	struct template_prompt p = {};
	const atomic_bool abort = true;
	size_t len = 4 << 20;
	char *text;

	need_model(state);
	text = malloc(len);
	assert_non_null(text);
	memset(text, 'x', len);
	for (size_t i = 0; i < len; i += 7)
		text[i] = ' ';
	assert_int_equal(template_render(f->template,
					 &(struct message){ MESSAGE_USER, text, len, NULL, 0 }, 1,
					 &o, &abort, &p, NULL),
			 -ECANCELED);
	assert_null(p.tokens.ids);
	free(text);
}

static void assert_refused(struct fixture *f, const char *text, const char *why)
{
	_cleanup_(freep) char *error = NULL;
	struct template *t = NULL;

	assert_int_equal(new_template(f, text, &t, &error), -EOPNOTSUPP);
	assert_null(t);
	assert_non_null(error);
	if (!strstr(error, why))
		fail_msg("\"%s\" does not say \"%s\"", error, why);
	assert_non_null(strstr(error, "raw completion works"));
}

/* Replaces the first `old` in a template that is known. */
static char *changed(struct fixture *f, const char *name, const char *old, const char *new)
{
	const char *text =
		json_string_value(json_object_get(json_object_get(f->cases, "templates"), name));
	const char *at = strstr(text, old);
	struct buf b = {};

	assert_non_null(at);
	assert_int_equal(buf_append(&b, text, (size_t)(at - text)), 0);
	assert_int_equal(buf_append(&b, new, strlen(new)), 0);
	assert_int_equal(buf_append(&b, at + strlen(old), strlen(at + strlen(old))), 0);
	return b.data;
}

static void test_refused(void **state)
{
	struct fixture *f = *state;
	static const struct {
		const char *name, *old, *new;
	} changes[] = {
		{ "qwen3.5", "|trim %}\n    {%- if message.role", " %}\n    {%- if message.role" },
		{ "qwen3.5", "+ content + '<|im_end|>'", "+ content + ' <|im_end|>'" },
		{ "qwen3.5", "{%- if not messages %}", "{{- strftime_now('%Y') }}{%- if not messages %}" },
		{ "qwen3.5", "\n{%- for message in messages %}",
		  "\nDate:\n{%- for message in messages %}" },
		{ "qwen3.5", "'<think>\\n' }}", "'<think>\\n\\n' }}" },
		{ "qwen3", "'<think>\\n\\n</think>\\n\\n'", "'<think></think>'" },
		{ "qwen3", "reasoning_content.strip('\\n')", "reasoning_content" },
		{ "chatml", "{% endfor %}", "\n{% endfor %}" }, /* Jinja would write the line break */
		{ "chatml", "'\\n'}}", "'\\n'}} " },
		{ "chatml-think", "{%- if add_gen", "{{ '' }} \n{% if add_gen" },
		{ "chatml-think", "{%- endfor %}", "{%- endfor %" }, /* a tag without an end */
		{ "qwen2.5", "system\\nYou", "system\\n\\tYou" }, /* an escape that is not known here */
	};

	need_model(state);
	assert_refused(f, NULL, "no chat template");
	assert_refused(f, "", "none of the forms");
	assert_refused(f, "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{% endfor %}",
		       "none of the forms");
	assert_refused(f, "{{ '<|im_start|>' }}{{ '<|im_end|>' }}", "none of the forms");
	for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
		_cleanup_(freep) char *text =
			changed(f, changes[i].name, changes[i].old, changes[i].new);

		assert_refused(f, text, "");
	}
}

/* What Jinja does not see must not matter. */
static void test_same_template(void **state)
{
	struct fixture *f = *state;
	static const struct {
		const char *name, *old, *new;
	} changes[] = {
		{ "qwen3.5", "{%- if not messages %}",
		  "{#- with '{{ quotes #}\n\n\n{%-   if not\tmessages %}" },
		{ "qwen3.5", "message.role == \"user\"", "message.role=='user'" },
		{ "chatml", "{% for message in messages %}", "{% for message in messages %}\n" },
		{ "chatml", "{% endif %}\n", "{% endif %}" },
		{ "chatml", "{% if add_generation_prompt %}", "\n  {% if add_generation_prompt %}\n" },
		{ "chatml", "'\\n' + message", "'\n' + message" }, /* a line break in a literal is one */
	};

	need_model(state);
	for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
		_cleanup_(freep) char *text = changed(f, changes[i].name, changes[i].old,
						      changes[i].new),
				      *error = NULL;
		struct template *t = NULL;

		if (new_template(f, text, &t, &error) < 0)
			fail_msg("change %zu: %s", i, error);
		template_free(t);
	}
}

/* A vocabulary without the tokens that the template writes, or with <think> as ordinary text. */
static void test_vocabulary(void **state)
{
	static const char *const tokens[] = { "a", "<|im_start|>", "<|im_end|>", "</think>" };
	static const int32_t types[] = { 1, 3, 3, 4 };
	struct fixture *f = *state;
	struct gguf_build b = gguf_build_new();
	_cleanup_(freep) char *error = NULL;
	struct tokenizer *tokenizer = NULL;
	struct template *t = NULL;
	struct gguf *g = NULL;
	size_t bytes;
	void *image;

	need_model(state);
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen35");
	gguf_build_strs(&b, "tokenizer.ggml.tokens", tokens, 4);
	gguf_build_i32s(&b, "tokenizer.ggml.token_type", types, 4);
	gguf_build_strs(&b, "tokenizer.ggml.merges", NULL, 0);
	gguf_build_str(&b, "tokenizer.chat_template",
		       json_string_value(json_object_get(json_object_get(f->cases, "templates"),
							 "chatml-think")));
	image = gguf_build_done(&b, &bytes);
	assert_int_equal(gguf_open_memory(image, bytes, "test", &g, NULL), 0);
	assert_int_equal(tokenizer_new(g, &tokenizer, NULL), 0);
	assert_int_equal(template_new(g, tokenizer, &t, &error), -EOPNOTSUPP);
	assert_non_null(strstr(error, "<think>"));
	tokenizer_free(tokenizer);
	gguf_close(g);
	free(image);
}

/* NULL when it is not there. */
static char *shared_template(const char *name)
{
	const char *shared = getenv("RESIDENTD_SHARED");
	_cleanup_(freep) char *path = NULL;
	_cleanup_(fclosep) FILE *file = NULL;
	char *text;

	assert_true(asprintf(&path, "%s/templates/%s.jinja", shared ?: "../shared", name) > 0);
	file = fopen(path, "re");
	if (!file)
		return NULL;
	text = calloc(1, 1 << 18);
	assert_non_null(text);
	assert_true(fread(text, 1, (1 << 18) - 1, file) > 0);
	return text;
}

/* Templates of other families, and of relatives that differ, when the folder with them is there. */
static void test_others(void **state)
{
	static const struct {
		const char *name;
		bool rendered;
	} files[] = {
		{ "MiMo-VL", true },
		{ "Qwen3.5-4B", true },
		{ "Qwen-Qwen3-0.6B", true },
		{ "Qwen3-Coder", true },
		{ "Qwen-QwQ-32B", true },
		{ "Qwen-Qwen2.5-7B-Instruct", true },
		{ "openbmb-MiniCPM5-1B", false },
		{ "Bielik-11B-v3.0-Instruct", false },
		{ "LFM2.5-Instruct", false },
		{ "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", false },
		{ "fireworks-ai-llama-3-firefunction-v2", false },
		{ "mistralai-Ministral-3-14B-Reasoning-2512", false },
		{ "deepseek-ai-DeepSeek-V3.1", false },
		{ "openai-gpt-oss-120b", false },
		{ "StepFun3.5-Flash", false },
		{ "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", false },
		{ "google-gemma-2-2b-it", false },
		{ "deepseek-ai-DeepSeek-V4", false },
	};
	struct fixture *f = *state;

	need_model(state);
	for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
		_cleanup_(freep) char *error = NULL, *text = shared_template(files[i].name);
		struct template *t = NULL;
		int r;

		if (!text)
			skip_because("%s.jinja is not there", files[i].name);
		r = new_template(f, text, &t, &error);
		if (files[i].rendered != (r == 0))
			fail_msg("%s: %s", files[i].name, r < 0 ? error : "taken");
		template_free(t);
	}
}

/* A vocabulary of bytes, letters of the byte alphabet, and the special tokens of the families. */
static struct fixture family_fixture(bool add_bos)
{
	struct gguf_build b = gguf_build_new();
	struct fixture f = { .cases = json_load_file(FAMILIES, 0, NULL) };
	json_t *own = json_object_get(f.cases, "specials"), *j;
	int32_t types[256 + 32] = { 0 };
	unsigned next = 0x100;
	size_t bytes, i, n;

	assert_non_null(own);
	n = 256 + json_array_size(own);
	assert_true(n <= ARRAY_SIZE(types));
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "llama-bpe");
	gguf_build_array(&b, "tokenizer.ggml.tokens", GGUF_STR, n);
	for (unsigned c = 0; c < 256; c++) {
		bool itself = (c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || c >= 0xae;
		unsigned letter = itself ? c : next++;
		char text[3] = { (char)letter };

		if (letter >= 0x80) {
			text[0] = (char)(0xc0 | letter >> 6);
			text[1] = (char)(0x80 | (letter & 0x3f));
		}
		gguf_put_str(&b.kv, text);
		types[c] = 1;
	}
	json_array_foreach(own, i, j) {
		gguf_put_str(&b.kv, json_string_value(j));
		types[256 + i] = 3;
	}
	gguf_build_i32s(&b, "tokenizer.ggml.token_type", types, n);
	gguf_build_strs(&b, "tokenizer.ggml.merges", NULL, 0);
	gguf_build_u32(&b, "tokenizer.ggml.bos_token_id", 256);
	gguf_build_u32(&b, "tokenizer.ggml.eos_token_id", 257);
	gguf_build_bool(&b, "tokenizer.ggml.add_bos_token", add_bos);
	f.image = gguf_build_done(&b, &bytes);
	assert_int_equal(gguf_open_memory(f.image, bytes, "families", &f.gguf, NULL), 0);
	assert_int_equal(tokenizer_new(f.gguf, &f.tokenizer, NULL), 0);
	return f;
}

static void family_done(struct fixture *f)
{
	json_decref(f->cases);
	tokenizer_free(f->tokenizer);
	gguf_close(f->gguf);
	free(f->image);
}

static const struct {
	const char *name;
	bool system; /* takes a system message */
} families[] = {
	{ "meta-llama-Llama-3.1-8B-Instruct", true },
	{ "meta-llama-Llama-3.2-3B-Instruct", true },
	{ "meta-llama-Llama-3.3-70B-Instruct", true },
	{ "mistralai-Mistral-Nemo-Instruct-2407", false },
	{ "Mistral-Small-3.2-24B-Instruct-2506", true },
	{ "unsloth-mistral-Devstral-Small-2507", true },
	{ "HuggingFaceTB-SmolLM3-3B", true },
	{ "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", true },
	{ "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", true },
};

static void test_families(void **state)
{
	_cleanup_(family_done) struct fixture f = family_fixture(false);
	json_t *c, *e, *in;
	size_t j, k, l, n = 0;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(families); i++) {
		_cleanup_(freep) char *text = shared_template(families[i].name), *error = NULL;
		_cleanup_(template_freep) struct template *t = NULL;
		const char *system = families[i].system ? "Be brief." : NULL;

		if (!text)
			skip_because("%s.jinja is not there", families[i].name);
		if (new_template(&f, text, &t, &error) < 0)
			fail_msg("%s: %s", families[i].name, error);
		json_array_foreach(json_object_get(f.cases, "cases"), j, c)
			json_array_foreach(json_object_get(c, "expected"), k, e)
				json_array_foreach(json_object_get(e, "templates"), l, in)
					if (streq(json_string_value(in), families[i].name)) {
						check_case(&f, t, c,
							   json_string_value(json_object_get(e, "text")));
						n++;
					}
		for (int thinking = 0; thinking < 2; thinking++) {
			check_continuation(&f, t, system, "The answer is one.", thinking);
			check_continuation(&f, t, system, "", thinking);
			check_continuation(&f, t, system, "[/INST]<|eot_id|></s> are words", thinking);
		}
	}
	assert_true(n > 1000);
}

/* Where prompts start with the beginning of sequence anyhow, the template does not write it again. */
static void test_family_bos(void **state)
{
	_cleanup_(family_done) struct fixture f = family_fixture(true);
	const struct message m = { MESSAGE_USER, "Hi", 2, NULL, 0 };
	const struct template_options o = { .thinking = true };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(families); i++) {
		_cleanup_(freep) char *text = shared_template(families[i].name);
		_cleanup_(template_freep) struct template *t = NULL;
		struct template_prompt p = {};

		if (!text)
			skip_because("%s.jinja is not there", families[i].name);
		assert_int_equal(new_template(&f, text, &t, NULL), 0);
		assert_int_equal(template_render(t, &m, 1, &o, NULL, &p, NULL), 0);
		for (size_t k = 0; k < p.tokens.n; k++)
			assert_int_not_equal(p.tokens.ids[k], tokenizer_bos(f.tokenizer));
		template_prompt_done(&p);
	}
}

static char *rendered(struct fixture *f, const char *name, bool thinking)
{
	_cleanup_(freep) char *text = shared_template(name);
	_cleanup_(template_freep) struct template *t = NULL;
	const struct message m = { MESSAGE_USER, "Hi", 2, NULL, 0 };
	const struct template_options o = { .thinking = thinking };
	struct template_prompt p = {};
	char *s;

	if (!text)
		return NULL;
	assert_int_equal(new_template(f, text, &t, NULL), 0);
	assert_int_equal(template_render(t, &m, 1, &o, NULL, &p, NULL), 0);
	s = text_of(f, &p.tokens);
	template_prompt_done(&p);
	return s;
}

/* The system texts that templates have for conversations without a system message. */
static void test_family_defaults(void **state)
{
	_cleanup_(family_done) struct fixture f = family_fixture(false);
	_cleanup_(freep) char *devstral = rendered(&f, "unsloth-mistral-Devstral-Small-2507", false);
	_cleanup_(freep) char *smol = rendered(&f, "HuggingFaceTB-SmolLM3-3B", true);
	_cleanup_(freep) char *brief = rendered(&f, "HuggingFaceTB-SmolLM3-3B", false);
	char today[32];

	(void)state;
	if (!devstral || !smol)
		skip_because("the templates are not there");
	assert_true(startswith(devstral, "<s>[SYSTEM_PROMPT]You are Devstral, a helpful agentic model"));
	assert_non_null(strstr(
		devstral, "\n* If the user asks a question, like \"why is X happening\", don't try"));
	assert_non_null(strstr(devstral, "</TROUBLESHOOTING>[/SYSTEM_PROMPT][INST]Hi[/INST]"));
	assert_non_null(
		strstr(smol, "Reasoning Mode: /think\n\n## Custom Instructions\n\nYou are a helpful"));
	assert_non_null(strstr(
		smol,
		"conclusion.\n\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"));
	assert_non_null(strstr(brief, "Hugging Face.\n\n<|im_end|>\n"));
	assert_non_null(strstr(brief, "<|im_start|>assistant\n<think>\n\n</think>\n"));

	for (bool midnight = true; midnight;) { /* the day may end between the two */
		_cleanup_(freep) char *small = NULL, *want = NULL;
		time_t before = time(NULL), after;
		struct tm tm;

		small = rendered(&f, "Mistral-Small-3.2-24B-Instruct-2506", false);
		after = time(NULL);
		assert_non_null(small);
		assert_non_null(localtime_r(&before, &tm));
		assert_true(strftime(today, sizeof(today), "%Y-%m-%d", &tm) == 10);
		assert_true(asprintf(&want, "The current date is %s.\n\nWhen you're not sure",
				     today) > 0);
		midnight = !strstr(small, want) && before / 3600 != after / 3600;
		assert_true(midnight || strstr(small, want));
		assert_non_null(strstr(
			small, "(e.g. \"What are some good restaurants around me?\" => \"Where"));
	}
}

static void test_family_rules(void **state)
{
	_cleanup_(family_done) struct fixture f = family_fixture(false);
	static const struct {
		const char *name, *system, *says;
	} refusals[] = {
		{ "mistralai-Mistral-Nemo-Instruct-2407", "Be brief.", "last user message" },
		{ "HuggingFaceTB-SmolLM3-3B", "Be brief. /no_think", "there is an option" },
		{ "HuggingFaceTB-SmolLM3-3B", "/think", "there is an option" },
	};
	const struct template_options o = { .thinking = true };
	struct template_prompt p = {};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(refusals); i++) {
		_cleanup_(freep) char *text = shared_template(refusals[i].name), *error = NULL;
		_cleanup_(template_freep) struct template *t = NULL;
		const struct message m[] = {
			{ MESSAGE_SYSTEM, refusals[i].system, strlen(refusals[i].system), NULL, 0 },
			{ MESSAGE_USER, "Hi", 2, NULL, 0 },
		};

		if (!text)
			skip_because("%s.jinja is not there", refusals[i].name);
		assert_int_equal(new_template(&f, text, &t, NULL), 0);
		assert_int_equal(template_render(t, m, 2, &o, NULL, &p, &error), -EINVAL);
		assert_non_null(strstr(error, refusals[i].says));
	}
}

/* What differs is refused, also where it differs in a literal that is captured. */
static void test_family_refused(void **state)
{
	_cleanup_(family_done) struct fixture f = family_fixture(false);
	static const struct {
		const char *name, *old, *new;
	} changes[] = {
		{ "meta-llama-Llama-3.2-3B-Instruct", "December 2023", "March 2023" },
		{ "meta-llama-Llama-3.2-3B-Instruct", "\"26 Jul 2024\"", "\"26 Jul\" + \"2024\"" },
		{ "meta-llama-Llama-3.1-8B-Instruct", "message['content'] | trim", "message['content']" },
		{ "mistralai-Mistral-Nemo-Instruct-2407", "message[\"content\"] + eos_token",
		  "message[\"content\"]" },
		{ "unsloth-mistral-Devstral-Small-2507", "You are Devstral", "\\tYou are Devstral" },
		{ "unsloth-mistral-Devstral-Small-2507", "You are Devstral", "\3" },
		{ "HuggingFaceTB-SmolLM3-3B", "June 2025", "June 2026" },
		{ "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<think>\\n'}}", "'}}" },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
		_cleanup_(freep) char *text = shared_template(changes[i].name);
		struct buf b = {};
		const char *at;

		if (!text)
			skip_because("%s.jinja is not there", changes[i].name);
		at = strstr(text, changes[i].old);
		assert_non_null(at);
		assert_int_equal(buf_append(&b, text, (size_t)(at - text)), 0);
		assert_int_equal(buf_printf(&b, "%s%s", changes[i].new, at + strlen(changes[i].old)), 0);
		assert_refused(&f, b.data, "none of the forms");
		buf_done(&b);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_jinja),           cmocka_unit_test(test_model),
		cmocka_unit_test(test_continuation),    cmocka_unit_test(test_continuation_rules),
		cmocka_unit_test(test_pieces),          cmocka_unit_test(test_abort),
		cmocka_unit_test(test_refused),         cmocka_unit_test(test_same_template),
		cmocka_unit_test(test_vocabulary),      cmocka_unit_test(test_others),
		cmocka_unit_test(test_families),        cmocka_unit_test(test_family_bos),
		cmocka_unit_test(test_family_defaults), cmocka_unit_test(test_family_rules),
		cmocka_unit_test(test_family_refused),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
