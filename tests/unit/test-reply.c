/* SPDX-License-Identifier: MIT */
/*
 * test-reply.c: what the client sees of a stream of tokens: thought and answer, budgets, stop
 * strings, code fences, characters cut by tokens.
 *
 * With the bundled model's vocabulary. Scripts are text in which "{T" is the token <think>, "{/"
 * is </think>, "{E" the end of the turn, and "|" cuts: what is between cuts is encoded on its
 * own, so a test says where tokens end. Visible text is compared as "thought # answer".
 */
#include "tests/test.h"

#include "daemon/engine/reply.h"

#define MODEL "tests/models/tiny-qwen35moe-stories-q8_0.gguf"

struct fixture {
	struct gguf *gguf;
	struct tokenizer *tokenizer;
	struct template *template;
	int32_t think, think_end, eog;
};

static int setup(void **state)
{
	static struct fixture f;

	if (access(MODEL, R_OK) < 0)
		return 0; /* each test says that it is skipped */
	assert_int_equal(gguf_open(MODEL, &f.gguf, NULL), 0);
	assert_int_equal(tokenizer_new(f.gguf, &f.tokenizer, NULL), 0);
	assert_int_equal(template_new(f.gguf, f.tokenizer, &f.template, NULL), 0);
	f.think = tokenizer_find(f.tokenizer, "<think>");
	f.think_end = tokenizer_find(f.tokenizer, "</think>");
	f.eog = tokenizer_find(f.tokenizer, "<|im_end|>");
	assert_true(f.think >= 0 && f.think_end >= 0 && tokenizer_is_eog(f.tokenizer, f.eog));
	*state = &f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	if (!f)
		return 0;
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

/* One run of a reply. */
struct run {
	struct fixture *f;
	struct reply *reply;
	struct buf text[2];
	int stop;
	size_t n_pushed; /* until the stop, that included */
};

static struct run run_new(struct fixture *f, const struct reply_options *o)
{
	struct run r = { .f = f };

	assert_int_equal(reply_new(f->tokenizer, o->chat ? f->template : NULL, o, &r.reply), 0);
	return r;
}

static void run_done(struct run *r)
{
	reply_free(r->reply);
	buf_done(&r->text[0]);
	buf_done(&r->text[1]);
}

static void push(struct run *r, int32_t id)
{
	if (r->stop != REPLY_RUNNING)
		return;
	r->stop = reply_push(r->reply, id, r->text);
	assert_true(r->stop >= 0);
	r->n_pushed++;
}

static void push_text(struct run *r, const char *s, size_t len)
{
	struct tokens t = {};

	assert_int_equal(tokenizer_encode(r->f->tokenizer, s, len, 0, NULL, &t), 0);
	for (size_t i = 0; i < t.n; i++)
		push(r, t.ids[i]);
	tokens_done(&t);
}

/* One token for each byte, as the byte alphabet has it. */
static void push_bytes(struct run *r, const char *s, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		struct tokens t = {};

		assert_int_equal(tokenizer_encode(r->f->tokenizer, s + i, 1, 0, NULL, &t), 0);
		if ((unsigned char)s[i] < 0x80) {
			assert_int_equal(t.n, 1);
			push(r, t.ids[0]);
		} else {
			/* a single byte of a longer character: found through the vocabulary */
			for (int32_t id = 0; id < (int32_t)tokenizer_n_vocab(r->f->tokenizer); id++) {
				size_t n;
				const char *piece = tokenizer_piece(r->f->tokenizer, id, false, &n);

				if (n == 1 && piece[0] == s[i]) {
					push(r, id);
					break;
				}
			}
		}
		tokens_done(&t);
	}
}

static void script(struct run *r, const char *s)
{
	while (*s) {
		size_t n = strcspn(s, "{|");

		push_text(r, s, n);
		s += n;
		if (*s == '|') {
			s++;
		} else if (*s == '{') {
			assert_non_null(strchr("T/E", s[1]));
			push(r, s[1] == 'T'   ? r->f->think
				: s[1] == '/' ? r->f->think_end
					      : r->f->eog);
			s += 2;
		}
	}
}

static void assert_text(const struct run *r, const char *want)
{
	_cleanup_(freep) char *got = NULL;

	assert_true(asprintf(&got, "%s # %s", r->text[REPLY_THOUGHT].data ?: "",
			     r->text[REPLY_ANSWER].data ?: "") > 0);
	assert_string_equal(got, want);
}

/* A whole reply: script, finish, compare. Returns the stop reason. */
static int whole(struct fixture *f, const struct reply_options *o, const char *s, const char *want)
{
	_cleanup_(run_done) struct run r = run_new(f, o);

	script(&r, s);
	assert_int_equal(reply_finish(r.reply, r.text), 0);
	assert_text(&r, want);
	return r.stop;
}

static struct reply_options chat(void)
{
	return (struct reply_options){
		.chat = true, .thinking_open = true, .max_tokens = -1, .max_thinking_tokens = -1
	};
}

static void test_channels(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = chat();

	need_model(state);
	assert_int_equal(whole(f, &o, "I see.\n{/\n\nHello.{E", "I see. # Hello."), REPLY_STOP_EOS);
	assert_int_equal(whole(f, &o, "\n\n{/\n\nHello.{E", " # Hello."), REPLY_STOP_EOS);
	assert_int_equal(whole(f, &o, "{/Hello.{E", " # Hello."), REPLY_STOP_EOS);
	whole(f, &o, "a\n\n|b |\n|{/|\n|\n|c\n|\nd\n{E", "a\n\nb # c\n\nd\n");
	whole(f, &o, "a{/\n\n  indented", "a #   indented");
	/* a second <think> right at the start is dropped, a later one is the thought's own text
	 * or nothing */
	whole(f, &o, "{Ta{/b", "a # b");
	whole(f, &o, "\n{T\na{/b", "a # b");
	/* typed, not the token */
	whole(f, &o, "a</think>b{/c", "a</think>b # c");
	/* no answer: the context is full */
	assert_int_equal(whole(f, &o, "only thought \n", "only thought # "), REPLY_RUNNING);
	assert_int_equal(whole(f, &o, "only thought\n{E", "only thought # "), REPLY_STOP_EOS);

	o.thinking_open = false;
	whole(f, &o, "Hello.{E", " # Hello.");
	whole(f, &o, "\n\nHello.{E", " # \n\nHello.");
	whole(f, &o, "{T\nhm\n{/\n\nHello.{E", "hm # Hello.");
	whole(f, &o, "a {/", " # a </think>"); /* not in a thought: text */

	o.chat = false;
	whole(f, &o, "Hello.\n|```c\n{E", " # Hello.\n```c\n");
}

static void test_raw_special(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = { .max_tokens = -1, .max_thinking_tokens = -1 };
	int32_t start;

	need_model(state);
	start = tokenizer_find(f->tokenizer, "<|im_start|>");
	for (int special = 0; special < 2; special++) {
		_cleanup_(run_done) struct run r = { 0 };

		o.special = special;
		r = run_new(f, &o);
		push(&r, start);
		script(&r, "user{E");
		assert_int_equal(r.stop, REPLY_STOP_EOS);
		assert_int_equal(reply_finish(r.reply, r.text), 0);
		assert_text(&r, special ? " # <|im_start|>user" : " # user");
		assert_int_equal(reply_answer_start(r.reply), 0);
	}
}

static void test_counts(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = chat();
	_cleanup_(run_done) struct run r = { 0 };

	need_model(state);
	r = run_new(f, &o);
	assert_true(reply_is_thinking(r.reply));
	assert_int_equal(reply_answer_start(r.reply), 0);
	script(&r, "a|b|c|\n"); /* 4 tokens */
	assert_int_equal(reply_n_thought(r.reply), 4);
	assert_int_equal(reply_answer_start(r.reply), 4);
	script(&r, "{/"); /* 5 */
	assert_false(reply_is_thinking(r.reply));
	assert_int_equal(reply_n_thought(r.reply), 4);
	script(&r, "\n\n"); /* 6 or 7: one token or two */
	assert_int_equal(reply_answer_start(r.reply), r.n_pushed);
	assert_int_equal(reply_n_answer(r.reply), 0);
	{
		size_t before = r.n_pushed;

		script(&r, "x|y|z");
		assert_int_equal(reply_answer_start(r.reply), before);
		assert_int_equal(reply_n_answer(r.reply), 3);
		script(&r, "{E");
		assert_int_equal(reply_answer_start(r.reply), before);
		assert_int_equal(reply_n_answer(r.reply), 3);
	}
	/* after the end nothing changes */
	assert_int_equal(reply_push(r.reply, f->think, r.text), REPLY_STOP_EOS);
	assert_int_equal(reply_forced(r.reply), -1);
	assert_int_equal(reply_finish(r.reply, r.text), 0);
	assert_text(&r, "abc # xyz");
}

static void test_empty_answer(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = chat();
	_cleanup_(run_done) struct run r = { 0 };

	need_model(state);
	r = run_new(f, &o);
	script(&r, "a{/{E");
	assert_int_equal(reply_answer_start(r.reply), 2); /* the end of the turn stands where the answer would */
	assert_int_equal(reply_n_answer(r.reply), 0);
}

/* Feeds what is forced, as the engine does, and counts it. */
static size_t push_forced(struct run *r)
{
	size_t n = 0;
	int32_t id;

	while ((id = reply_forced(r->reply)) >= 0) {
		push(r, id);
		n++;
	}
	return n;
}

static void test_thinking_budget(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = chat();
	size_t n_close;

	need_model(state);
	n_close = template_think_close(f->template)->n;
	assert_true(n_close >= 3);
	o.max_thinking_tokens = 3;
	{
		_cleanup_(run_done) struct run r = run_new(f, &o);

		script(&r, "a|b");
		assert_int_equal(push_forced(&r), 0);
		script(&r, "c");
		assert_int_equal(push_forced(&r), n_close);
		assert_int_equal(push_forced(&r), 0);
		assert_false(reply_is_thinking(r.reply));
		assert_int_equal(reply_n_thought(r.reply), 3);
		assert_int_equal(reply_n_answer(r.reply), 0);
		assert_int_equal(reply_answer_start(r.reply), 3 + n_close);
		script(&r, "\n|d{E");
		assert_int_equal(reply_finish(r.reply, r.text), 0);
		assert_text(&r, "abc # d");
	}
	{
		/* the model closes it itself with the last token of the budget */
		_cleanup_(run_done) struct run r = run_new(f, &o);

		script(&r, "a|b|{/");
		assert_int_equal(push_forced(&r), 0);
		script(&r, "c{E");
		assert_text(&r, "ab # c");
	}
	o.max_thinking_tokens = 0;
	{
		_cleanup_(run_done) struct run r = run_new(f, &o);

		assert_int_equal(push_forced(&r), n_close);
		script(&r, "Hi.{E");
		assert_text(&r, " # Hi.");
		assert_int_equal(reply_n_thought(r.reply), 0);
	}
	o.thinking_open = false; /* a thought that the model opens has the same budget */
	{
		_cleanup_(run_done) struct run r = run_new(f, &o);

		assert_int_equal(push_forced(&r), 0);
		script(&r, "{T");
		assert_int_equal(push_forced(&r), n_close);
		script(&r, "Hi.{E");
		assert_text(&r, " # Hi.");
	}
}

/* The budget's tokens are "x", so that grace lasts until the script ends a sentence. */
static int budget(struct fixture *f, int64_t max_tokens, const char *s, const char *want,
		  size_t want_pushed)
{
	struct reply_options o = chat();
	_cleanup_(run_done) struct run r = { 0 };

	o.thinking_open = false;
	o.max_tokens = max_tokens;
	r = run_new(f, &o);
	script(&r, s);
	assert_int_equal(reply_finish(r.reply, r.text), 0);
	assert_text(&r, want);
	assert_int_equal(r.n_pushed, want_pushed);
	return r.stop;
}

static void test_budget(void **state)
{
	struct fixture *f = *state;

	need_model(state);
	assert_int_equal(budget(f, 0, "x|y", " # ", 1), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 0, "{E", " # ", 1), REPLY_STOP_EOS);
	assert_int_equal(budget(f, 2, "x|.|y", " # x.", 2), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 2, "x|x|x|.|y", " # xxx.", 4), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 2, "x|x|{E|y", " # xx", 3), REPLY_STOP_EOS);
	assert_int_equal(budget(f, 2, "x|x|x", " # xxx", 3), REPLY_RUNNING);
	assert_int_equal(budget(f, 1, ".| ", " # .", 1), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 3, ".| | |x", " # .  ", 3), REPLY_STOP_LENGTH); /* blanks after the end */
	assert_int_equal(budget(f, 3, "x|.|\"|y", " # x.\"", 3), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 4, "x|!|)|\"|y", " # x!)\"", 4), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 3, "x|x|\"|.", " # xx\".", 4), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 4, ".| |\"|x|?", " # . \"x?", 5), REPLY_STOP_LENGTH); /* an opening quote */
	assert_int_equal(budget(f, 1, "x|:|y", " # x:", 2), REPLY_STOP_LENGTH);
}

static void test_budget_unicode(void **state)
{
	static const char *const ends[] = { "…", "。", "！", "？", "。」", "！”", "?»" };
	struct fixture *f = *state;
	struct reply_options o = chat();

	need_model(state);
	o.thinking_open = false;
	o.max_tokens = 1;
	for (size_t i = 0; i < ARRAY_SIZE(ends); i++) {
		_cleanup_(run_done) struct run r = run_new(f, &o);

		push_bytes(&r, "x", 1);
		assert_int_equal(r.stop, REPLY_RUNNING);
		push_bytes(&r, ends[i], strlen(ends[i]) - 1);
		/* all but the last byte: the last character is not whole, so it is no end yet
		 * (the one before may be) */
		if (i < 4)
			assert_int_equal(r.stop, REPLY_RUNNING);
		push_bytes(&r, ends[i] + strlen(ends[i]) - 1, 1);
		assert_int_equal(r.stop, REPLY_STOP_LENGTH);
	}
}

/* What is held still counts: half a character is no end, a full stop that may begin a stop string
 * is. */
static void test_budget_held(void **state)
{
	static const char *const stop[] = { ".NET" };
	struct fixture *f = *state;
	struct reply_options o = chat();

	need_model(state);
	o.thinking_open = false;
	o.max_tokens = 2;
	{
		_cleanup_(run_done) struct run r = run_new(f, &o);

		push_bytes(&r, ".\xc3", 2);
		assert_int_equal(r.stop, REPLY_RUNNING);
		push_bytes(&r, "\xa9", 1);
		assert_int_equal(r.stop, REPLY_RUNNING);
	}
	o.stop = stop;
	o.n_stop = 1;
	assert_int_equal(whole(f, &o, "x|.|y", " # x."), REPLY_STOP_LENGTH);
}

static void test_grace_exhausted(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = chat();
	_cleanup_(run_done) struct run r = { 0 };

	need_model(state);
	o.max_tokens = 5;
	r = run_new(f, &o);
	script(&r, "t.|{/|\n\n");
	for (size_t i = 0; i < 5 + REPLY_GRACE_TOK - 1; i++) {
		push_text(&r, "x", 1);
		assert_int_equal(r.stop, REPLY_RUNNING);
	}
	push_text(&r, "x", 1);
	assert_int_equal(r.stop, REPLY_STOP_LENGTH);
	assert_int_equal(reply_n_answer(r.reply), 5 + REPLY_GRACE_TOK);
}

/* A raw completion gets exactly what was asked for; so does a budget near the end of the
 * numbers. */
static void test_budget_raw(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = { .max_tokens = 3, .max_thinking_tokens = -1 };

	need_model(state);
	assert_int_equal(whole(f, &o, "x|x|x|x", " # xxx"), REPLY_STOP_LENGTH);
	o.max_tokens = 0;
	assert_int_equal(whole(f, &o, "x|x", " # "), REPLY_STOP_LENGTH);
	o.chat = true;
	o.max_tokens = INT64_MAX;
	assert_int_equal(whole(f, &o, "x|x", " # xx"), REPLY_RUNNING);
}

static void test_budget_thought(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = chat();

	need_model(state);
	o.max_tokens = 2; /* neither the thought nor the blank lines count */
	assert_int_equal(whole(f, &o, "a|b|c|d|e\n|{/|\n|\n|x|.|y", "abcde # x."), REPLY_STOP_LENGTH);
	o.max_tokens = 0;
	assert_int_equal(whole(f, &o, "a|b|{/|x", "ab # "), REPLY_STOP_LENGTH);
	/* blank lines without end do count at last */
	o.max_tokens = 1;
	{
		_cleanup_(run_done) struct run r = run_new(f, &o);

		script(&r, "{/");
		for (int i = 0; i < 4 * REPLY_GRACE_TOK; i++)
			push_text(&r, "\n", 1);
		assert_int_equal(r.stop, REPLY_STOP_LENGTH);
	}
}

static int stops(struct fixture *f, const char *const *stop, size_t n, const char *s, const char *want)
{
	struct reply_options o = chat();

	o.stop = stop;
	o.n_stop = n;
	return whole(f, &o, s, want);
}

static void test_stop_strings(void **state)
{
	static const char *const one[] = { "END" }, *const several[] = { "abcd", "bc", "xyz" };
	static const char *const nested[] = { "aab", "ab" }, *const repeated[] = { "\n\n\n" };
	static const char *const text[] = { "é!" };
	struct fixture *f = *state;

	need_model(state);
	assert_int_equal(stops(f, one, 1, "{/one END two", " # one "), REPLY_STOP_STRING);
	assert_int_equal(stops(f, one, 1, "{/one E|N|D two", " # one "), REPLY_STOP_STRING);
	assert_int_equal(stops(f, one, 1, "{/one E|N|X", " # one ENX"), REPLY_RUNNING);
	assert_int_equal(stops(f, one, 1, "{/E|E|N|D", " # E"), REPLY_STOP_STRING);
	assert_int_equal(stops(f, one, 1, "{/one E|N{E", " # one EN"), REPLY_STOP_EOS);
	assert_int_equal(stops(f, one, 1, "END{/x", "END # x"), REPLY_RUNNING); /* not in the thought */
	/* the one that is complete first, whatever began before it */
	assert_int_equal(stops(f, several, 3, "{/a|b|c|d", " # a"), REPLY_STOP_STRING);
	assert_int_equal(stops(f, several, 3, "{/abcd", " # a"), REPLY_STOP_STRING);
	assert_int_equal(stops(f, several, 3, "{/x|y|b|c", " # xy"), REPLY_STOP_STRING);
	/* of two that end together the longer */
	assert_int_equal(stops(f, nested, 2, "{/a|a|a|b", " # a"), REPLY_STOP_STRING);
	assert_int_equal(stops(f, nested, 2, "{/aaab", " # a"), REPLY_STOP_STRING);
	assert_int_equal(stops(f, repeated, 1, "{/\n\n\n\na\n|\n|b\n\n|\n", " # a\n\nb"),
			 REPLY_STOP_STRING);
	assert_int_equal(stops(f, text, 1, "{/caf|é|?é|!", " # café?"), REPLY_STOP_STRING);
	{
		/* in the middle of a character: its bytes and what follows the stop string are
		 * gone */
		struct reply_options o = chat();
		_cleanup_(run_done) struct run r = { 0 };

		o.stop = text;
		o.n_stop = 1;
		o.thinking_open = false;
		r = run_new(f, &o);
		push_bytes(&r, "x\xc3", 2);
		assert_string_equal(r.text[REPLY_ANSWER].data, "x");
		push_bytes(&r, "\xa9", 1);
		assert_string_equal(r.text[REPLY_ANSWER].data, "x");
		push_bytes(&r, "!", 1);
		assert_int_equal(r.stop, REPLY_STOP_STRING);
		assert_int_equal(reply_finish(r.reply, r.text), 0);
		assert_text(&r, " # x");
	}
}

static void test_stop_options(void **state)
{
	static char big[REPLY_STOP_BYTES_MAX + 2];
	const char *stop[REPLY_STOP_MAX + 1] = { "a", "b", "c", "d", "e", "f", "g", "h", "i",
						 "j", "k", "l", "m", "n", "o", "p", "q" };
	struct fixture *f = *state;
	struct reply_options o = chat();
	struct reply *r = NULL;

	need_model(state);
	memset(big, 'x', REPLY_STOP_BYTES_MAX + 1);
	o.stop = stop;
	o.n_stop = REPLY_STOP_MAX + 1;
	assert_int_equal(reply_new(f->tokenizer, f->template, &o, &r), -EINVAL);
	o.n_stop = 1;
	stop[0] = "";
	assert_int_equal(reply_new(f->tokenizer, f->template, &o, &r), -EINVAL);
	stop[0] = "\xc3";
	assert_int_equal(reply_new(f->tokenizer, f->template, &o, &r), -EINVAL);
	stop[0] = big;
	assert_int_equal(reply_new(f->tokenizer, f->template, &o, &r), -EINVAL);
	o.n_stop = 0;
	assert_int_equal(reply_new(f->tokenizer, NULL, &o, &r), -EINVAL); /* chat without a template */
	assert_null(r);
	o.n_stop = 1;
	stop[0] = big + 1;
	assert_int_equal(reply_new(f->tokenizer, f->template, &o, &r), 0);
	reply_free(r);
}

static void test_utf8(void **state)
{
	struct fixture *f = *state;
	struct reply_options o = chat();

	need_model(state);
	{
		_cleanup_(run_done) struct run r = run_new(f, &o);

		push_bytes(&r, "t\xf0\x9f\xa6", 4);
		assert_string_equal(r.text[REPLY_THOUGHT].data, "t");
		push_bytes(&r, "\x89", 1);
		assert_string_equal(r.text[REPLY_THOUGHT].data, "t🦉");
		push_bytes(&r, "\xe6\x97", 2); /* cut by the end of the thought */
		script(&r, "{/");
		assert_string_equal(r.text[REPLY_THOUGHT].data, "t🦉\xef\xbf\xbd");
		push_bytes(&r, "\n\xe6\x97\xa5\xff.\xe6", 7);
		assert_int_equal(reply_n_answer(r.reply), 6);
		assert_int_equal(reply_finish(r.reply, r.text), 0);
		assert_text(&r, "t🦉\xef\xbf\xbd # 日\xef\xbf\xbd.\xef\xbf\xbd");
	}
	{
		/* cut by the end of the thought that never came */
		_cleanup_(run_done) struct run r = run_new(f, &o);

		push_bytes(&r, "a\n\xe6\x97", 4);
		assert_int_equal(reply_finish(r.reply, r.text), 0);
		assert_text(&r, "a\n\xef\xbf\xbd # ");
	}
}

static void test_fences(void **state)
{
	static const struct {
		const char *text, *closing;
	} cases[] = {
		{ "```\n", "```\n" },
		{ "```c\nint x;", "\n```\n" },
		{ "```c\nint x;\n", "```\n" },
		{ "```c", "\n```\n" },
		{ "```c\nint x;\n```", "" },
		{ "```c\nint x;\n```\nand", "" },
		{ "```c\nint x;\n``` \t", "" },
		{ "```c\nint x;\n```c", "\n```\n" }, /* a closing fence has no text */
		{ "````\n```\n", "````\n" },         /* shorter than the opening one */
		{ "```\n`````\n", "" },
		{ "~~~\n```\n", "~~~\n" },
		{ "~~~~ x`y\n", "~~~~\n" },
		{ "   ```\n", "```\n" },
		{ "    ```\n", "" }, /* an indented line of code */
		{ "\t```\n", "" },
		{ "x ```\n", "" },
		{ "``\n", "" },
		{ "```code``` in a line\n", "" },
		{ "```\na\n```\n\n~~~\nb\n~~~\n```\n", "```\n" },
		{ "```\n    ```\n", "```\n" },
		{ "```\r\nx\r\n```\r\n", "" },
		{ "``` c\n``", "\n```\n" },
		{ "", "" },
	};
	struct fixture *f = *state;
	struct reply_options o = chat();

	need_model(state);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		for (int bytes = 0; bytes < 2; bytes++) {
			_cleanup_(run_done) struct run r = run_new(f, &o);
			_cleanup_(freep) char *want = NULL;

			script(&r, "```\nnot closed in a thought{/\n\n");
			if (bytes)
				push_bytes(&r, cases[i].text, strlen(cases[i].text));
			else
				push_text(&r, cases[i].text, strlen(cases[i].text));
			assert_int_equal(reply_finish(r.reply, r.text), 0);
			assert_true(asprintf(&want, "```\nnot closed in a thought # %s%s",
					     cases[i].text, cases[i].closing) > 0);
			assert_text(&r, want);
		}
}

static void test_fence_grace(void **state)
{
	struct fixture *f = *state;

	need_model(state);
	/* in a block a line's end is the end, a full stop is not; the block is closed */
	assert_int_equal(budget(f, 1, "`|`|`|\n|x", " # ```\n```\n", 4), REPLY_STOP_LENGTH);
	assert_int_equal(budget(f, 5, "`|`|`|\n|x|.|\n|y", " # ```\nx.\n```\n", 7), REPLY_STOP_LENGTH);
	/* and one that is closed is an end as well */
	assert_int_equal(budget(f, 7, "`|`|`|\n|x|\n|`|`|`|y", " # ```\nx\n```", 9), REPLY_STOP_LENGTH);
}

static void test_stop_in_fence(void **state)
{
	static const char *const stop[] = { "return" };
	struct fixture *f = *state;

	need_model(state);
	assert_int_equal(stops(f, stop, 1, "{/```c\nint f;\nreturn 1;\n```\n", " # ```c\nint f;\n```\n"),
			 REPLY_STOP_STRING);
	/* a fence that is held as the beginning of a stop string */
	{
		static const char *const ticks[] = { "```END" };

		stops(f, ticks, 1, "{/x\n```", " # x\n```\n```\n");
		stops(f, ticks, 1, "{/x\n```END", " # x\n");
	}
}

/* However tokens cut it, the same text is visible. */
static void test_any_split(void **state)
{
	static const char *const stop[] = { "STOP", "TOP!", "\n---\n" };
	static const char *const texts[] = {
		"\n Thinking…\n\n- a\n- b 🦉\n \n\x01\n\n\nAnswer: déjà vu.\n\n```c\nint x = 1;\n\tx++;\n",
		"日本語。\x01\r\n\n~~~~\n日本語 STO STOP and more",
		"\x01plain ST\n---\nrest",
		"a \xff b \xe6\x97\x01 \xf0\x9f\xa6 c \xed\xa0\x80 STTOP!",
	};
	struct fixture *f = *state;
	struct reply_options o = chat();
	uint64_t rng = 12345;

	need_model(state);
	o.stop = stop;
	o.n_stop = ARRAY_SIZE(stop);
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
		_cleanup_(freep) char *first = NULL;
		int first_stop = -1;

		for (int round = 0; round < 200; round++) {
			_cleanup_(run_done) struct run r = run_new(f, &o);
			_cleanup_(freep) char *got = NULL;
			const char *s = texts[i];
			size_t left = strlen(s);

			while (left > 0) {
				size_t n;

				rng = rng * 6364136223846793005 + 1442695040888963407;
				n = MIN(left, round == 0 ? 1
							 : 1 + (size_t)(rng >> 40) %
									   (size_t)(1 + round % 40));
				if (*s == 1) {
					push(&r, f->think_end);
					n = 1;
				} else {
					const char *end = memchr(s, 1, n);

					n = end ? (size_t)(end - s) : n;
					if (utf8_valid(s, n))
						push_text(&r, s, n);
					else
						push_bytes(&r, s, n);
				}
				s += n;
				left -= n;
			}
			assert_int_equal(reply_finish(r.reply, r.text), 0);
			assert_true(asprintf(&got, "%s # %s", r.text[REPLY_THOUGHT].data ?: "",
					     r.text[REPLY_ANSWER].data ?: "") > 0);
			assert_true(utf8_valid(got, strlen(got)));
			if (!first) {
				first = strdup(got);
				first_stop = r.stop;
			}
			assert_string_equal(got, first);
			assert_int_equal(r.stop, first_stop);
		}
	}
}

static void test_names(void **state)
{
	(void)state;
	assert_string_equal(reply_stop_to_string(REPLY_STOP_EOS), "eos");
	assert_string_equal(reply_stop_to_string(REPLY_STOP_STRING), "stop");
	assert_string_equal(reply_stop_to_string(REPLY_STOP_LENGTH), "length");
	assert_string_equal(reply_stop_to_string(REPLY_STOP_CONTEXT), "context");
	assert_string_equal(reply_stop_to_string(REPLY_STOP_CANCELLED), "cancelled");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_channels),        cmocka_unit_test(test_raw_special),
		cmocka_unit_test(test_counts),          cmocka_unit_test(test_empty_answer),
		cmocka_unit_test(test_thinking_budget), cmocka_unit_test(test_budget),
		cmocka_unit_test(test_budget_unicode),  cmocka_unit_test(test_budget_held),
		cmocka_unit_test(test_grace_exhausted), cmocka_unit_test(test_budget_raw),
		cmocka_unit_test(test_budget_thought),  cmocka_unit_test(test_stop_strings),
		cmocka_unit_test(test_stop_options),    cmocka_unit_test(test_utf8),
		cmocka_unit_test(test_fences),          cmocka_unit_test(test_fence_grace),
		cmocka_unit_test(test_stop_in_fence),   cmocka_unit_test(test_any_split),
		cmocka_unit_test(test_names),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
