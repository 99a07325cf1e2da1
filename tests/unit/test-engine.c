/* SPDX-License-Identifier: MIT */
/*
 * test-engine.c: the engine thread through its mailbox, on the bundled model: answers, sessions, memory, cancel, stop; experts in every tier,
 * broken model files.
 */
#include "tests/test.h"

#include "daemon/engine/engine-private.h"
#include "tests/emu/library.h"

#include "daemon/residency/heat.h"
#include "daemon/residency/trace.h"

#include <fcntl.h>
#include <sys/stat.h>

#define MODEL "tests/models/tiny-qwen35moe-stories-q8_0.gguf"

/* One engine and what came back last. */
struct fixture {
	struct mailbox mail;
	struct engine *engine;
	struct model *model;
	struct buf text[2];
	size_t n_events;
	int load_err;
	char *load_error;
	struct engine_stats stats;
	struct residency_config residency; /* of the next load */
};

static void clear_text(struct fixture *f)
{
	buf_done(&f->text[0]);
	buf_done(&f->text[1]);
	f->n_events = 0;
}

/* Waits for mail of this kind; progress is collected on the way. */
static struct mail *wait_for(struct fixture *f, int kind)
{
	static struct mail *rest;

	for (;;) {
		struct mail *m = rest ? rest : mailbox_take_all(&f->mail, true);

		rest = m->next;
		if (m->kind == EVENT_PROGRESS) {
			struct engine_event *e = (struct engine_event *)m;

			for (size_t i = 0; i < 2; i++)
				if (e->text[i].len > 0)
					assert_int_equal(buf_append(&f->text[i], e->text[i].data,
								    e->text[i].len),
							 0);
			f->n_events++;
			engine_event_free(e);
			continue;
		}
		assert_int_equal(m->kind, kind);
		return m;
	}
}

static void load(struct fixture *f, const char *path, uint64_t kv_bytes, uint32_t context)
{
	struct engine_load *l = calloc(1, sizeof(*l));

	assert_non_null(l);
	l->path = strdup(path);
	l->config = (struct engine_config){
		.threads = 2,
		.context = context,
		.batch_tok = 16,
		.kv_bytes_max = kv_bytes,
		.kv_f16 = -1,
		.residency = f->residency,
	};
	l->mail.kind = ENGINE_LOAD;
	engine_post(f->engine, &l->mail);
	l = (struct engine_load *)wait_for(f, EVENT_LOADED);
	f->load_err = l->err;
	free(f->load_error);
	f->load_error = l->error;
	if (l->err == 0) {
		model_unref(f->model);
		f->model = l->model;
	}
	f->stats = l->stats;
	free(l->path);
	free(l->tier_reason);
	free(l);
}

static void start(struct fixture *f)
{
	*f = (struct fixture){};
	assert_int_equal(mailbox_init(&f->mail, false), 0);
	assert_int_equal(engine_new(&f->mail, &f->engine), 0);
}

static void stop(struct fixture *f)
{
	f->engine = engine_free(f->engine);
	assert_null(mailbox_take_all(&f->mail, false));
	mailbox_done(&f->mail);
	model_unref(f->model);
	free(f->load_error);
	clear_text(f);
}

static struct engine_request *request_new(struct fixture *f, struct engine_session *s,
					  const struct message *messages, size_t n, bool thinking,
					  bool continuation)
{
	struct engine_request *r = calloc(1, sizeof(*r));
	struct template_options o = { .thinking = thinking, .continuation = continuation };
	struct template_prompt prompt = {};
	char *error = NULL;

	assert_non_null(r);
	assert_int_equal(template_render(f->model->template, messages, n, &o, NULL, &prompt, &error), 0);
	r->prompt = prompt.tokens;
	r->answer_start = prompt.answer_start;
	r->thinking_open = prompt.thinking_open;
	r->session = s;
	r->model = f->model;
	r->chat = true;
	r->kv_bytes_max = UINT64_MAX;
	r->max_tok = 100;
	r->max_thinking_tok = thinking ? 100 : 0;
	sample_params_default(&r->sample);
	r->sample.temperature = 0;
	r->accepted_us = now_us();
	r->mail.kind = ENGINE_REQUEST;
	return r;
}

static void request_free(struct engine_request *r)
{
	tokens_done(&r->prompt);
	free(r->error_text);
	free(r);
}

static const struct message *user(const char *text)
{
	static struct message m;

	m = (struct message){ .role = MESSAGE_USER, .content = text, .content_len = strlen(text) };
	return &m;
}

/* Asks and expects the answer; returns how many prompt tokens were cached. */
static uint64_t ask(struct fixture *f, struct engine_session *s, const char *question,
		    bool thinking, bool continuation, const char *answer)
{
	struct engine_request *r = request_new(f, s, user(question), 1, thinking, continuation);
	uint64_t cached;

	clear_text(f);
	engine_post(f->engine, &r->mail);
	assert_ptr_equal(wait_for(f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_NONE);
	assert_int_equal(r->stop_reason, REPLY_STOP_EOS);
	assert_string_equal(f->text[REPLY_ANSWER].data, answer);
	assert_true(thinking == (f->text[REPLY_THOUGHT].len > 0));
	cached = r->usage.cached_tok;
	f->stats = r->stats;
	request_free(r);
	return cached;
}

static void test_answer(void **state)
{
	struct fixture f;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	assert_int_equal(f.load_err, 0);
	assert_int_equal(ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391."), 0);
	assert_int_equal(ask(&f, NULL, "What is 17 x 23?", true, false, "17 x 23 = 391."), 0);
	/* A conversation of one request leaves nothing behind. */
	assert_int_equal(f.stats.kv_bytes_used, 0);
	stop(&f);
}

/* The second turn evaluates the first answer without its thought, and reuses what was before it. */
static void test_session_drops_thought(void **state)
{
	struct fixture f;
	struct engine_session *s = engine_session_new(0);
	struct message turns[3] = {
		{ .role = MESSAGE_USER, .content = "What is the capital of France?" },
		{ .role = MESSAGE_ASSISTANT, .content = "The capital of France is Paris." },
		{ .role = MESSAGE_USER, .content = "What is 2 + 2?" },
	};
	struct template_options o = { .thinking = true };
	struct template_prompt whole = {};
	struct engine_request *r;
	char *error = NULL;
	size_t n_prompt;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	assert_int_equal(ask(&f, s, "What is the capital of France?", true, false,
			     "The capital of France is Paris."),
			 0);
	for (size_t i = 0; i < 3; i++)
		turns[i].content_len = strlen(turns[i].content);
	assert_int_equal(template_render(f.model->template, turns, 3, &o, NULL, &whole, &error), 0);
	r = request_new(&f, s, user("What is 2 + 2?"), 1, true, true);
	engine_post(f.engine, &r->mail);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_NONE);
	n_prompt = r->usage.prompt_tok;
	/* Same tokens as the whole conversation rendered anew; all of the first prompt up to the thought was kept. */
	assert_int_equal(n_prompt, whole.tokens.n);
	assert_true(r->usage.cached_tok >= 10);
	request_free(r);
	template_prompt_done(&whole);
	engine_session_free(f.engine, s);
	stop(&f);
}

static void test_clone(void **state)
{
	struct fixture f;
	struct engine_session *a = engine_session_new(0), *b = engine_session_new(0);
	struct engine_clone clone = {
		.mail.kind = ENGINE_CLONE, .from = a, .to = b, .kv_bytes_max = UINT64_MAX
	};
	struct buf first = {};
	struct engine_request *r;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	(void)ask(&f, a, "What do bees make?", false, false, "Bees make honey.");
	engine_post(f.engine, &clone.mail);
	assert_ptr_equal(wait_for(&f, EVENT_CLONED), &clone);
	assert_int_equal(clone.err, 0);
	for (size_t i = 0; i < 2; i++) {
		r = request_new(&f, i ? b : a, user("What is 7 x 8?"), 1, false, true);
		clear_text(&f);
		engine_post(f.engine, &r->mail);
		assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
		assert_int_equal(r->error, ERROR_NONE);
		assert_true(r->usage.cached_tok > 0);
		if (i == 0)
			assert_int_equal(buf_append(&first, f.text[REPLY_ANSWER].data,
						    f.text[REPLY_ANSWER].len),
					 0);
		else
			assert_string_equal(f.text[REPLY_ANSWER].data, first.data);
		request_free(r);
	}
	buf_done(&first);
	engine_session_free(f.engine, a);
	engine_session_free(f.engine, b);
	stop(&f);
}

/* Memory for about one session: the others forget their state, not their conversation. */
static void test_memory_is_bounded(void **state)
{
	struct fixture f;
	struct engine_session *s[4];
	uint64_t least = 0;

	(void)state;
	start(&f);
	load(&f, MODEL, 4096, 256);
	assert_int_equal(f.load_err, -E2BIG);
	/* The refusal names the number that is enough. */
	assert_int_equal(sscanf(strstr(f.load_error, "at least "), "at least %lu", &least), 1);
	load(&f, MODEL, least, 256);
	assert_int_equal(f.load_err, 0);
	for (size_t i = 0; i < 4; i++) {
		s[i] = engine_session_new(0);
		(void)ask(&f, s[i], "What do bees make?", false, false, "Bees make honey.");
		assert_true(f.stats.kv_bytes_used <= least);
	}
	for (size_t i = 0; i < 4; i++) {
		struct engine_request *r =
			request_new(&f, s[i], user("What is 7 x 8?"), 1, false, true);

		engine_post(f.engine, &r->mail);
		assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
		assert_int_equal(r->error, ERROR_NONE);
		assert_true(r->usage.prompt_tok > 25);
		assert_true(r->stats.kv_bytes_used <= least);
		request_free(r);
		engine_session_free(f.engine, s[i]);
	}
	stop(&f);
}

/* Clones of clones want memory while a request runs: its own state is not what they get. */
static void test_clone_spares_what_runs(void **state)
{
	struct fixture f;
	struct engine_session *s[6];
	struct engine_clone clone[4] = {};
	struct engine_request *r;
	uint64_t least = 0;

	(void)state;
	start(&f);
	load(&f, MODEL, 4096, 512);
	assert_int_equal(sscanf(strstr(f.load_error, "at least "), "at least %lu", &least), 1);
	load(&f, MODEL, least, 512);
	for (size_t i = 0; i < ARRAY_SIZE(s); i++)
		s[i] = engine_session_new(0);
	(void)ask(&f, s[1], "What do bees make?", false, false, "Bees make honey.");
	clear_text(&f);
	r = request_new(&f, s[0], user("Tell me a story."), 1, false, false);
	r->max_tok = 200;
	r->sample.bias = &(struct logit_bias){ tokenizer_eos(f.model->tokenizer), -1000 };
	r->sample.n_bias = 1;
	engine_post(f.engine, &r->mail);
	while (f.n_events < 20) {
		struct mail *m = mailbox_take_all(&f.mail, true), *next;

		for (; m; m = next) {
			next = m->next;
			assert_int_equal(m->kind, EVENT_PROGRESS);
			engine_event_free((struct engine_event *)m);
			f.n_events++;
		}
	}
	for (size_t i = 0; i < ARRAY_SIZE(clone); i++) {
		clone[i] = (struct engine_clone){ .mail.kind = ENGINE_CLONE,
						  .from = s[i + 1],
						  .to = s[i + 2],
						  .kv_bytes_max = UINT64_MAX };
		engine_post(f.engine, &clone[i].mail);
	}
	for (size_t i = 0; i < ARRAY_SIZE(clone); i++)
		assert_ptr_equal(wait_for(&f, EVENT_CLONED), &clone[i]);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_NONE);
	assert_true(r->usage.answer_tok >= 20);
	request_free(r);
	for (size_t i = 0; i < ARRAY_SIZE(s); i++)
		engine_session_free(f.engine, s[i]);
	stop(&f);
}

/* A request refused before it began says nothing about what the state holds: the thought of the turn before is still in it. */
static void test_refusal_keeps_valid_count(void **state)
{
	struct fixture f;
	struct engine_session *s = engine_session_new(0);
	struct engine_request *r;
	char text[2000];
	size_t valid;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 128);
	(void)ask(&f, s, "What do bees make?", true, false, "Bees make honey.");
	/* Nothing runs: the engine waits for mail. */
	valid = s->n_valid;
	assert_true(valid > 0 && valid < s->tokens.n);
	memset(text, 'a', sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	r = request_new(&f, s, user(text), 1, true, true);
	engine_post(f.engine, &r->mail);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_CONTEXT_FULL);
	assert_int_equal(s->n_valid, valid);
	request_free(r);
	engine_session_free(f.engine, s);
	stop(&f);
}

/* Two users' answers grow side by side, and each says what it says alone. */
static void test_two_users_in_turns(void **state)
{
	struct fixture f;
	struct engine_request *r[2];
	struct buf alone = {};
	size_t n_tok[2] = {}, switches = 0, n_done = 0;
	const struct engine_request *last = NULL;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	for (size_t i = 0; i < 3; i++) {
		struct engine_request *one =
			request_new(&f, NULL, user("Tell me a story."), 1, false, false);

		one->max_tok = 40;
		one->sched.seq = i;
		if (i == 0) {
			clear_text(&f);
			engine_post(f.engine, &one->mail);
			assert_ptr_equal(wait_for(&f, EVENT_DONE), one);
			assert_int_equal(buf_append(&alone, f.text[REPLY_ANSWER].data,
						    f.text[REPLY_ANSWER].len),
					 0);
			request_free(one);
			continue;
		}
		one->sched.user = (uint32_t)i;
		one->sched.weight = 100;
		r[i - 1] = one;
	}
	engine_post(f.engine, &r[0]->mail);
	engine_post(f.engine, &r[1]->mail);
	while (n_done < 2) {
		for (struct mail *m = mailbox_take_all(&f.mail, true), *next; m; m = next) {
			struct engine_event *e = (struct engine_event *)m;

			next = m->next;
			if (m->kind == EVENT_DONE) {
				n_done++;
				continue;
			}
			n_tok[e->req == r[1]] += e->n_decode_tok;
			switches += last && last != e->req;
			last = e->req;
			if (e->req == r[1] && e->text[REPLY_ANSWER].len > 0)
				assert_int_equal(buf_append(&f.text[REPLY_THOUGHT],
							    e->text[REPLY_ANSWER].data,
							    e->text[REPLY_ANSWER].len),
						 0);
			engine_event_free(e);
		}
	}
	assert_true(switches >= 10);
	assert_int_equal(n_tok[0], n_tok[1]);
	assert_string_equal(f.text[REPLY_THOUGHT].data, alone.data);
	request_free(r[0]);
	request_free(r[1]);
	buf_done(&alone);
	stop(&f);
}

/* What policy lets one user hold: his own older conversation gives way, another user's does not. */
static void test_memory_of_one_user(void **state)
{
	struct fixture f;
	struct engine_session *s[3] = { engine_session_new(1), engine_session_new(1),
					engine_session_new(2) };
	struct engine_request *r;
	uint64_t one;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	(void)ask(&f, s[2], "What do bees make?", false, false, "Bees make honey.");
	one = f.stats.kv_bytes_used;
	(void)ask(&f, s[0], "What do bees make?", false, false, "Bees make honey.");
	assert_int_equal(f.stats.n_evicted, 0);
	r = request_new(&f, s[1], user("What do bees make?"), 1, false, false);
	r->kv_bytes_max = 2 * one;
	engine_post(f.engine, &r->mail);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_NONE);
	assert_int_equal(r->stats.n_evicted, 1);
	assert_int_equal(s[0]->n_valid, 0);
	assert_true(s[2]->n_valid > 0);
	request_free(r);
	/* Less than one conversation needs is refused, and says whose limit it is. */
	r = request_new(&f, s[0], user("What is 7 x 8?"), 1, false, true);
	r->kv_bytes_max = one / 4;
	engine_post(f.engine, &r->mail);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_NO_MEMORY);
	assert_non_null(strstr(r->error_text, "KvBytesMax"));
	request_free(r);
	for (size_t i = 0; i < 3; i++)
		engine_session_free(f.engine, s[i]);
	stop(&f);
}

static void test_unload(void **state)
{
	struct fixture f;
	struct engine_load l = { .mail.kind = ENGINE_LOAD };

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	engine_post(f.engine, &l.mail);
	assert_ptr_equal(wait_for(&f, EVENT_LOADED), &l);
	assert_int_equal(l.err, 0);
	assert_null(l.model);
	assert_int_equal(l.stats.kv_bytes_max, 0);
	load(&f, MODEL, 0, 512);
	(void)ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391.");
	stop(&f);
}

static void test_context_full(void **state)
{
	struct fixture f;
	struct engine_session *s = engine_session_new(0);
	char text[2000];
	struct engine_request *r;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 64);
	(void)ask(&f, s, "What do bees make?", false, false, "Bees make honey.");
	memset(text, 'a', sizeof(text) - 1);
	text[sizeof(text) - 1] = 0;
	r = request_new(&f, s, user(text), 1, false, true);
	engine_post(f.engine, &r->mail);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_CONTEXT_FULL);
	assert_non_null(r->error_text);
	assert_true(r->context_used > 10);
	request_free(r);
	/* The conversation is as it was. */
	(void)ask(&f, s, "What is 7 x 8?", false, true, "7 x 8 = 56.");
	/* An answer that meets the end of the context stops there. */
	r = request_new(&f, NULL, user("Tell me a story."), 1, false, false);
	r->max_tok = -1;
	engine_post(f.engine, &r->mail);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_NONE);
	assert_int_equal(r->stop_reason, REPLY_STOP_CONTEXT);
	assert_true(r->context_used <= 64);
	request_free(r);
	engine_session_free(f.engine, s);
	stop(&f);
}

/* Cancelled while waiting, at once or while running: comes back, and the session goes on. */
static void test_cancel(void **state)
{
	struct fixture f;
	struct engine_session *s = engine_session_new(0);
	struct engine_request *r[3];

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 2048);
	(void)ask(&f, s, "What do bees make?", false, false, "Bees make honey.");
	r[0] = request_new(&f, NULL, user("Tell me a story."), 1, false, false);
	r[0]->max_tok = -1;
	r[0]->sample.bias = &(struct logit_bias){ tokenizer_eos(f.model->tokenizer), -1000 };
	r[0]->sample.n_bias = 1;
	r[1] = request_new(&f, s, user("What is 7 x 8?"), 1, false, true);
	r[2] = request_new(&f, NULL, user("What is 7 x 8?"), 1, false, false);
	for (size_t i = 0; i < 3; i++) {
		r[i]->sched.seq = i;
		engine_post(f.engine, &r[i]->mail);
	}
	atomic_store(&r[1]->cancel, true);
	engine_wake(f.engine);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r[1]);
	assert_int_equal(r[1]->stop_reason, REPLY_STOP_CANCELLED);
	assert_int_equal(r[1]->error, ERROR_NONE);
	atomic_store(&r[0]->gone, true);
	engine_wake(f.engine);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r[0]);
	assert_int_equal(r[0]->stop_reason, REPLY_STOP_CANCELLED);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r[2]);
	assert_int_equal(r[2]->stop_reason, REPLY_STOP_EOS);
	for (size_t i = 0; i < 3; i++)
		request_free(r[i]);
	assert_true(ask(&f, s, "What is 7 x 8?", false, true, "7 x 8 = 56.") > 0);
	engine_session_free(f.engine, s);
	stop(&f);
}

static void test_stop_returns_everything(void **state)
{
	struct fixture f;
	struct engine_request *r[3];

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 2048);
	for (size_t i = 0; i < 3; i++) {
		r[i] = request_new(&f, NULL, user("Tell me a story."), 1, false, false);
		r[i]->sched.seq = i;
		engine_post(f.engine, &r[i]->mail);
	}
	engine_quit(f.engine);
	for (size_t i = 0; i < 3; i++) {
		struct engine_request *back = (struct engine_request *)wait_for(&f, EVENT_DONE);

		assert_int_equal(back->error, ERROR_STOPPING);
		request_free(back);
	}
	stop(&f);
}

static void test_load_failures(void **state)
{
	struct fixture f;
	struct engine_request *r;
	struct model *old;

	(void)state;
	start(&f);
	load(&f, "tests/models/none.gguf", 0, 512);
	assert_int_equal(f.load_err, -ENOENT);
	load(&f, MODEL, 0, 512);
	assert_int_equal(f.load_err, 0);
	old = f.model;
	load(&f, "tests/models/README.md", 0, 512);
	assert_int_equal(f.load_err, -EBADMSG);
	assert_non_null(strstr(f.load_error, "tests/models/README.md"));
	assert_ptr_equal(f.model, old);
	/* What was loaded before still answers. */
	(void)ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391.");
	/* A prompt made with another model's vocabulary is refused. */
	r = request_new(&f, NULL, user("Hello"), 1, false, false);
	r->model = NULL;
	engine_post(f.engine, &r->mail);
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_LOADING);
	request_free(r);
	stop(&f);
}

/* Seeded sampling is repeatable; another seed says something else. */
static void test_seed(void **state)
{
	struct fixture f;
	struct buf said[3] = {};

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	for (size_t i = 0; i < 3; i++) {
		struct engine_request *r =
			request_new(&f, NULL, user("Tell me a story."), 1, false, false);

		r->sample.temperature = 1.5f;
		r->sample.seed = i == 2 ? 43 : 42;
		r->max_tok = 40;
		clear_text(&f);
		engine_post(f.engine, &r->mail);
		assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
		assert_int_equal(r->error, ERROR_NONE);
		assert_int_equal(
			buf_append(&said[i], f.text[REPLY_ANSWER].data, f.text[REPLY_ANSWER].len), 0);
		request_free(r);
	}
	assert_string_equal(said[0].data, said[1].data);
	assert_string_not_equal(said[0].data, said[2].data);
	for (size_t i = 0; i < 3; i++)
		buf_done(&said[i]);
	stop(&f);
}

/* Where experts are. */

static struct engine_inspect *look(struct fixture *f, bool blocks)
{
	struct engine_inspect *i = calloc(1, sizeof(*i));

	assert_non_null(i);
	i->want_blocks = blocks;
	i->mail.kind = ENGINE_INSPECT;
	engine_post(f->engine, &i->mail);
	assert_ptr_equal(wait_for(f, EVENT_INSPECTED), i);
	return i;
}

static uint32_t n_host(struct fixture *f)
{
	struct engine_inspect *i = look(f, false);
	uint32_t n = i->stats.n_host;

	engine_inspect_free(i);
	return n;
}

static void check_blocks(const struct engine_inspect *i)
{
	size_t n_here = 0, n_hot = 0;

	assert_true(i->loaded);
	assert_int_equal(i->n_layers, 8);
	assert_true(i->heat && i->place);
	for (size_t b = 0; b < 8 * 32; b++) {
		n_here += i->place[b] == 'h';
		n_hot += i->heat[b] > 0;
	}
	assert_int_equal(n_here, i->stats.n_host);
	assert_true(n_hot > 8);
	for (uint32_t k = 0; k < 8; k++) {
		assert_int_equal(i->layers[k].layer, k);
		assert_int_equal(i->layers[k].n_experts, 32);
		assert_true(i->layers[k].hits + i->layers[k].misses > 0);
	}
}

/* The same answer from every tier, also after all experts have left it, and with the least memory that will do. */
static void test_tiers(void **state)
{
	static const enum residency_tier tiers[] = { RESIDENCY_MAPPED, RESIDENCY_ARENA };

	(void)state;
	for (size_t t = 0; t < ARRAY_SIZE(tiers); t++) {
		struct engine_inspect *i;
		struct fixture f;

		start(&f);
		i = look(&f, true);
		assert_false(i->loaded);
		engine_inspect_free(i);
		f.residency.tier = tiers[t];
		f.residency.policy = EVICT_CLOCK_LFU;
		f.residency.prefetch = 1;
		f.residency.reserve_bytes = 1 << 20;
		load(&f, MODEL, 0, 512);
		assert_int_equal(f.load_err, 0);
		(void)ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391.");
		i = look(&f, true);
		check_blocks(i);
		assert_int_equal(i->stats.tier, tiers[t]);
		assert_true(i->stats.hits > 0 && i->stats.decode_tok > 5);
		engine_inspect_free(i);
		engine_release(f.engine);
		assert_int_equal(n_host(&f), 0);
		(void)ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391.");
		atomic_store(&engine_shared(f.engine)->target_bytes, 1);
		engine_wake(f.engine);
		(void)ask(&f, NULL, "What is 17 x 23?", true, false, "17 x 23 = 391.");
		i = look(&f, false);
		assert_int_equal(i->stats.budget_bytes, i->stats.floor_bytes);
		assert_true(i->stats.io.blocks_evicted > 100 && i->stats.misses > 100);
		engine_inspect_free(i);
		stop(&f);
	}
}

/* A reload brings the hot ones back, and what cannot be loaded takes nothing from what is. */
static void test_load_beside_managed(void **state)
{
	struct fixture f;
	uint32_t n;

	(void)state;
	start(&f);
	f.residency.tier = RESIDENCY_ARENA;
	f.residency.policy = EVICT_CLOCK_LFU;
	load(&f, MODEL, 0, 512);
	(void)ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391.");
	n = n_host(&f);
	assert_true(n > 0);
	load(&f, "tests/models/README.md", 0, 512);
	assert_int_equal(f.load_err, -EBADMSG);
	for (unsigned i = 0; i < 1000 && n_host(&f) < n; i++)
		nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
	assert_true(n_host(&f) >= n);
	assert_true(atomic_load(&engine_shared(f.engine)->managed));
	f.residency.budget_bytes = 1000000;
	load(&f, MODEL, 0, 512);
	assert_int_equal(f.load_err, -ENOSPC);
	assert_non_null(strstr(f.load_error, "needs at least"));
	(void)ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391.");
	f.residency.budget_bytes = 0;
	f.residency.tier = RESIDENCY_AUTO;
	load(&f, MODEL, 0, 512);
	assert_int_equal(f.load_err, 0);
	assert_false(atomic_load(&engine_shared(f.engine)->managed));
	(void)ask(&f, NULL, "What is 17 x 23?", false, false, "17 x 23 = 391.");
	stop(&f);
}

/* A conversation remembers which experts it used; so does its clone, and not a model that was not loaded then. */
static void test_session_heat(void **state)
{
	struct engine_session *a = engine_session_new(0), *b = engine_session_new(0);
	struct engine_clone clone = {
		.mail.kind = ENGINE_CLONE, .from = a, .to = b, .kv_bytes_max = UINT64_MAX
	};
	struct fixture f;
	size_t n_hot = 0;

	(void)state;
	start(&f);
	f.residency.tier = RESIDENCY_ARENA;
	load(&f, MODEL, 0, 512);
	(void)ask(&f, a, "What do bees make?", false, false, "Bees make honey.");
	engine_post(f.engine, &clone.mail);
	assert_ptr_equal(wait_for(&f, EVENT_CLONED), &clone);
	/* The engine waits for mail. */
	assert_non_null(a->heat);
	for (size_t i = 0; i < 256; i++)
		n_hot += a->heat[i] > 0;
	assert_true(n_hot >= 8 * 4);
	assert_memory_equal(a->heat, b->heat, 256 * sizeof(*a->heat));
	load(&f, MODEL, 0, 512);
	assert_null(a->heat);
	engine_session_free(f.engine, a);
	engine_session_free(f.engine, b);
	stop(&f);
}

static void test_heat_file(void **state)
{
	char dir[] = "/tmp/test-engine-XXXXXX";
	_cleanup_(freep) char *path = NULL;
	uint16_t heat[256];
	size_t n_hot = 0;
	struct fixture f;

	(void)state;
	assert_non_null(mkdtemp(dir));
	start(&f);
	f.residency.tier = RESIDENCY_ARENA;
	f.residency.state_dir = dir;
	load(&f, MODEL, 0, 512);
	(void)ask(&f, NULL, "What do bees make?", false, false, "Bees make honey.");
	path = heat_path(dir, f.model->catalog->identity);
	assert_int_equal(access(path, F_OK), -1);
	/* Written when the experts leave, at the latest. */
	engine_release(f.engine);
	assert_int_equal(n_host(&f), 0);
	assert_int_equal(heat_load(path, f.model->catalog->identity, 256, heat), 0);
	for (size_t i = 0; i < 256; i++)
		n_hot += heat[i] > 0;
	assert_true(n_hot >= 8 * 4);
	assert_int_equal(unlink(path), 0);
	(void)ask(&f, NULL, "What is 7 x 8?", false, false, "7 x 8 = 56.");
	load(&f, MODEL, 0, 512); /* the old one's is written */
	assert_int_equal(access(path, F_OK), 0);
	for (unsigned i = 0; i < 1000 && n_host(&f) < n_hot; i++)
		nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
	assert_true(n_host(&f) >= n_hot);
	stop(&f);
	/* Where it cannot be written, the numbers say so and all goes on. */
	start(&f);
	f.residency.tier = RESIDENCY_ARENA;
	f.residency.state_dir = "/nonexistent";
	load(&f, MODEL, 0, 512);
	(void)ask(&f, NULL, "What do bees make?", false, false, "Bees make honey.");
	assert_int_equal(f.stats.heat_error, 0);
	engine_release(f.engine);
	(void)ask(&f, NULL, "What do bees make?", false, false, "Bees make honey.");
	assert_int_equal(f.stats.heat_error, -ENOENT);
	stop(&f);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(rmdir(dir), 0);
}

/* A line for each token that was computed alone, with the experts of all layers. */
static void test_trace(void **state)
{
	struct fixture f;
	struct engine_request *r;
	struct buf lines = {};
	struct trace trace;
	size_t n = 0, n_tok = 0;
	FILE *file;

	(void)state;
	start(&f);
	load(&f, MODEL, 0, 512);
	engine_record(f.engine, true);
	r = request_new(&f, NULL, user("Tell me a story."), 1, false, false);
	r->max_tok = 12;
	/* Batches are of 16 tokens: one is left over. */
	r->chat = false;
	while (r->prompt.n % 16 != 1)
		assert_int_equal(tokens_append(&r->prompt, &(int32_t){ 11 }, 1), 0);
	engine_post(f.engine, &r->mail);
	for (bool done = false; !done;) {
		for (struct mail *m = mailbox_take_all(&f.mail, true), *next; m; m = next) {
			next = m->next;
			if (m->kind == EVENT_TRACE) {
				struct engine_trace *t = (struct engine_trace *)m;

				assert_int_equal(buf_append(&lines, t->line.data, t->line.len), 0);
				engine_trace_free(t);
				n++;
			} else if (m->kind == EVENT_PROGRESS) {
				n_tok += ((struct engine_event *)m)->n_decode_tok;
				engine_event_free((struct engine_event *)m);
			} else {
				assert_int_equal(m->kind, EVENT_DONE);
				done = true;
			}
		}
	}
	assert_int_equal(r->error, ERROR_NONE);
	request_free(r);
	/* The first token comes from the prompt's last batch, which is no token of the answer however short it is. */
	assert_true(n_tok >= 12);
	assert_int_equal(n, n_tok - 1);
	file = fmemopen(lines.data, lines.len, "r");
	assert_non_null(file);
	assert_int_equal(trace_read(file, "trace", 32, &trace, NULL), 0);
	assert_int_equal(trace.n_layers, 8);
	assert_int_equal(trace.n_steps, n);
	assert_int_equal(trace.n_wanted, n * 8 * 4);
	trace_done(&trace);
	fclose(file);
	buf_done(&lines);
	/* Off: no more mail than before. */
	engine_record(f.engine, false);
	(void)ask(&f, NULL, "What do bees make?", false, false, "Bees make honey.");
	stop(&f);
}

/* Model files that change under the engine. */

static int copy_model(const char *path, const struct timespec *mtime)
{
	_cleanup_(closep) int from = open(MODEL, O_RDONLY | O_CLOEXEC);
	int to = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	const struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, *mtime };
	static char chunk[1 << 20];
	off_t at = 0;
	ssize_t n;

	assert_true(from >= 0 && to >= 0);
	while ((n = read(from, chunk, sizeof(chunk))) > 0) {
		assert_int_equal(pwrite(to, chunk, (size_t)n, at), n);
		at += n;
	}
	assert_int_equal(n, 0);
	assert_int_equal(fsync(to), 0);
	assert_int_equal(futimens(to, times), 0);
	return to;
}

static void refused(struct fixture *f)
{
	struct engine_request *r = request_new(f, NULL, user("What is 7 x 8?"), 1, false, false);

	engine_post(f->engine, &r->mail);
	assert_ptr_equal(wait_for(f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_MODEL_BROKEN);
	assert_non_null(strstr(r->error_text, "changed"));
	assert_true(r->stats.model_broken);
	request_free(r);
}

enum damage { TRUNCATED, REWRITTEN, TOUCHED };

/* What runs ends with the error, what comes after is refused, until the file is loaded anew. */
static void break_file(enum residency_tier tier, enum damage damage)
{
	const struct timespec times[3] = { { 1000000, 1 }, { 1000000, 2 }, { 1000001, 1 } };
	char path[] = "/tmp/test-engine-XXXXXX";
	struct engine_session *s = engine_session_new(0);
	struct engine_request *r;
	struct fixture f;
	int fd = mkstemp(path);

	assert_true(fd >= 0);
	close(fd);
	fd = copy_model(path, &times[0]);
	start(&f);
	f.residency.tier = tier;
	load(&f, path, 0, 2048);
	assert_int_equal(f.load_err, 0);
	assert_false(f.stats.model_broken);
	(void)ask(&f, s, "What do bees make?", false, false, "Bees make honey.");
	r = request_new(&f, NULL, user("Tell me a story."), 1, false, false);
	r->max_tok = -1;
	r->sample.bias = &(struct logit_bias){ tokenizer_eos(f.model->tokenizer), -1000 };
	r->sample.n_bias = 1;
	clear_text(&f);
	engine_post(f.engine, &r->mail);
	for (unsigned n = 0; n < 10;) {
		for (struct mail *m = mailbox_take_all(&f.mail, true), *next; m; m = next) {
			next = m->next;
			assert_int_equal(m->kind, EVENT_PROGRESS);
			engine_event_free((struct engine_event *)m);
			n++;
		}
	}
	switch (damage) {
	case TRUNCATED: assert_int_equal(ftruncate(fd, 8192), 0); break;
	case REWRITTEN: /* with what it held */
	case TOUCHED: close(copy_model(path, &times[damage == TOUCHED ? 1 : 2])); break;
	}
	assert_ptr_equal(wait_for(&f, EVENT_DONE), r);
	assert_int_equal(r->error, ERROR_MODEL_BROKEN);
	assert_true(r->stats.model_broken);
	request_free(r);
	refused(&f);
	refused(&f);
	if (damage == TRUNCATED) {
		load(&f, path, 0, 512);
		assert_true(f.load_err < 0);
		assert_true(f.stats.model_broken);
		refused(&f);
		close(copy_model(path, &times[0]));
		refused(&f);
	}
	load(&f, path, 0, 2048);
	assert_int_equal(f.load_err, 0);
	assert_false(f.stats.model_broken);
	(void)ask(&f, s, "What do bees make?", false, false, "Bees make honey.");
	engine_session_free(f.engine, s);
	stop(&f);
	close(fd);
	assert_int_equal(unlink(path), 0);
}

static void test_broken_model(void **state)
{
	(void)state;
	break_file(RESIDENCY_AUTO, TRUNCATED);
	break_file(RESIDENCY_MAPPED, TRUNCATED);
	break_file(RESIDENCY_ARENA, TRUNCATED);
	break_file(RESIDENCY_ARENA, REWRITTEN);
	break_file(RESIDENCY_AUTO, TOUCHED);
}

/* A request in the middle of its prompt loses its state with the card, and is given up before its next step. */
static void test_cancelled_when_the_card_goes(void **state)
{
	struct engine_request *r;
	struct fixture f;
	char text[4000] = "";
	struct mail *m, *next;

	(void)state;
	if (!emu_library()) {
		skip_because("the emulator was not built");
		return;
	}
	setenv("RESIDENTD_CUDA_LIBRARY", emu_library(), 1);
	start(&f);
	load(&f, MODEL, 0, 2048);
	assert_int_equal(f.stats.card.state, ENGINE_CARD_ACTIVE);
	for (unsigned i = 0; i < 60; i++)
		strcat(text, "What is 17 x 23? ");
	r = request_new(&f, NULL, user(text), 1, false, false);
	engine_post(f.engine, &r->mail);
	m = mailbox_take_all(&f.mail, true);
	for (; m; m = next) {
		next = m->next;
		assert_int_equal(m->kind, EVENT_PROGRESS);
		engine_event_free((struct engine_event *)m);
	}
	engine_suspend(f.engine);
	atomic_store(&r->cancel, true);
	engine_wake(f.engine);
	for (bool suspended = false, done = false; !suspended || !done;) {
		m = mailbox_take_all(&f.mail, true);
		for (; m; m = next) {
			next = m->next;
			suspended |= m->kind == EVENT_SUSPENDED;
			done |= m->kind == EVENT_DONE;
			if (m->kind == EVENT_PROGRESS)
				engine_event_free((struct engine_event *)m);
			else if (m->kind != EVENT_DONE)
				free(m);
		}
	}
	request_free(r);
	stop(&f);
	unsetenv("RESIDENTD_CUDA_LIBRARY");
}

static void test_no_card_without_a_model(void **state)
{
	struct engine_load *l = calloc(1, sizeof(*l));
	struct fixture f;

	(void)state;
	assert_non_null(l);
	if (!emu_library()) {
		free(l);
		skip_because("the emulator was not built");
		return;
	}
	setenv("RESIDENTD_CUDA_LIBRARY", emu_library(), 1);
	start(&f);
	load(&f, MODEL, 0, 2048);
	assert_int_equal(f.stats.card.state, ENGINE_CARD_ACTIVE);
	l->mail.kind = ENGINE_LOAD;
	engine_post(f.engine, &l->mail);
	l = (struct engine_load *)wait_for(&f, EVENT_LOADED);
	assert_int_equal(l->stats.card.state, ENGINE_CARD_NONE);
	free(l);
	stop(&f);
	unsetenv("RESIDENTD_CUDA_LIBRARY");
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_answer),
		cmocka_unit_test(test_cancelled_when_the_card_goes),
		cmocka_unit_test(test_no_card_without_a_model),
		cmocka_unit_test(test_session_drops_thought),
		cmocka_unit_test(test_clone),
		cmocka_unit_test(test_memory_is_bounded),
		cmocka_unit_test(test_clone_spares_what_runs),
		cmocka_unit_test(test_refusal_keeps_valid_count),
		cmocka_unit_test(test_two_users_in_turns),
		cmocka_unit_test(test_memory_of_one_user),
		cmocka_unit_test(test_unload),
		cmocka_unit_test(test_context_full),
		cmocka_unit_test(test_cancel),
		cmocka_unit_test(test_stop_returns_everything),
		cmocka_unit_test(test_load_failures),
		cmocka_unit_test(test_seed),
		cmocka_unit_test(test_tiers),
		cmocka_unit_test(test_load_beside_managed),
		cmocka_unit_test(test_session_heat),
		cmocka_unit_test(test_heat_file),
		cmocka_unit_test(test_trace),
		cmocka_unit_test(test_broken_model),
	};

	return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
