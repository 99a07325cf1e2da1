/* SPDX-License-Identifier: MIT */
/*
 * request.c: one request from its parameters to its last frame. See request.h.
 *
 * Loop thread but for prepare(). Text of prompts and answers passes through here and goes nowhere else: not into a log, not into an error.
 */
#include "daemon/request.h"

#include "daemon/messages.h"
#include "daemon/pressure.h"

#include <inttypes.h>
#include <math.h>
#include <sys/random.h>

#define CONTENT_MAX  (64U << 20) /* the message cap is what bounds it */
#define TOKENIZE_MAX 262144      /* bytes: the reply is some 30 times as large while it is made */
#define MESSAGES_MAX 2000
#define BIAS_MAX     1024

static void request_free(struct request *r)
{
	if (!r)
		return;
	json_decref(r->parameters);
	json_decref(r->logprobs_all);
	free(r->messages);
	free(r->bias);
	free(r->prepare_error);
	free(r->engine.error_text);
	tokens_done(&r->engine.prompt);
	buf_done(&r->tokenized);
	buf_done(&r->text_all[0]);
	buf_done(&r->text_all[1]);
	r->engine.model = model_unref(r->engine.model);
	free(r);
}

static bool parse_bias(struct request *r, struct args *a, json_t *obj)
{
	uint32_t n_vocab = r->engine.model->n_vocab;
	const char *key;
	json_t *value;
	size_t n = 0;

	if (json_object_size(obj) > BIAS_MAX) {
		args_refuse(a, "logit_bias", "too many entries");
		return false;
	}
	r->bias = calloc(json_object_size(obj) + 1, sizeof(*r->bias));
	if (!r->bias)
		return false;
	json_object_foreach(obj, key, value) {
		double bias = json_is_number(value) ? json_number_value(value) : NAN;
		uint64_t id;

		if (parse_u64(key, 0, n_vocab - 1, &id) < 0 || !(fabs(bias) <= 1000)) {
			args_refuse(a, "logit_bias",
				    "keys are token ids, values numbers from -1000 to 1000");
			return false;
		}
		r->bias[n++] = (struct logit_bias){ (int32_t)id, (float)bias };
	}
	r->engine.sample.bias = r->bias;
	r->engine.sample.n_bias = n;
	return true;
}

static void parse_stop(struct request *r, struct args *a, json_t *array)
{
	for (size_t i = 0; i < json_array_size(array); i++) {
		json_t *s = json_array_get(array, i);

		if (!json_is_string(s) || json_string_length(s) == 0 ||
		    json_string_length(s) > REPLY_STOP_BYTES_MAX) {
			args_refuse(a, "stop", "stop strings have 1 to 256 bytes");
			return;
		}
		r->stop[i] = json_string_value(s);
	}
	r->engine.stop = r->stop;
	r->engine.n_stop = json_array_size(array);
}

static uint64_t random_seed(void)
{
	uint64_t seed = 0;

	if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
		seed = now_us();
	return seed;
}

static void read_float(struct args *a, const char *key, double min, double max, float *ret)
{
	double x;

	if (args_f64(a, key, min, max, &x))
		*ret = (float)x;
}

/* Within the bounds of sample_params_check(), but naming the field for the client. */
static void parse_sampling(struct request *r, struct args *a)
{
	struct sample_params *p = &r->engine.sample;
	int64_t i;

	read_float(a, "temperature", 0, 100, &p->temperature);
	if (args_i64(a, "top_k", false, 0, INT32_MAX, &i))
		p->top_k = (uint32_t)i;
	read_float(a, "top_p", 1e-6, 1, &p->top_p);
	read_float(a, "min_p", 0, 1, &p->min_p);
	read_float(a, "typical_p", 1e-6, 1, &p->typical_p);
	read_float(a, "repeat_penalty", 0.01, 10, &p->repeat_penalty);
	read_float(a, "presence_penalty", -2, 2, &p->presence_penalty);
	read_float(a, "frequency_penalty", -2, 2, &p->frequency_penalty);
	if (args_i64(a, "penalty_last_tokens", false, 0, SAMPLE_WINDOW_MAX, &i))
		p->penalty_last_tok = (uint32_t)i;
	p->seed = args_i64(a, "seed", false, 0, INT64_MAX, &i) ? (uint64_t)i : random_seed();
	if (args_i64(a, "top_logprobs", false, 0, SAMPLE_LOGPROBS_MAX, &i))
		p->top_logprobs = (uint32_t)i;
}

static void parse_want(struct request *r, struct args *a)
{
	const char *use;
	size_t len;

	r->want = -1;
	if (!args_str(a, "want", false, 16, &use, &len))
		return;
	r->want = use_from_string(use);
	if (r->want < 0)
		args_refuse(a, "want", "is chat, code, small or best");
}

/* options: 0, or -EINVAL with the field's name in *ret_bad. */
static int parse_options(struct request *r, json_t *obj, char **ret_bad, const char **ret_why)
{
	const struct config *c = &r->daemon->config;
	struct args a;
	json_t *sub;

	sample_params_default(&r->engine.sample);
	r->engine.sample.seed = 0;
	r->engine.max_tok = c->max_tokens;
	r->engine.max_thinking_tok = c->max_thinking_tokens;
	args_begin(&a, obj);
	(void)args_i64(&a, "max_tokens", false, 1, INT32_MAX, &r->engine.max_tok);
	(void)args_i64(&a, "max_thinking_tokens", false, 0, INT32_MAX, &r->engine.max_thinking_tok);
	parse_sampling(r, &a);
	parse_want(r, &a);
	if (args_array(&a, "stop", false, REPLY_STOP_MAX, &sub))
		parse_stop(r, &a, sub);
	if (args_object(&a, "logit_bias", false, &sub) && !parse_bias(r, &a, sub) && !a.bad)
		return -ENOMEM;
	r->thinking = r->engine.max_thinking_tok != 0;
	if (args_end(&a) < 0) {
		(void)fail(ret_bad, 0, "options.%s", a.bad);
		*ret_why = a.why;
		return -EINVAL;
	}
	return 0;
}

static const char *parse_message(json_t *obj, struct message *ret)
{
	const char *role = NULL, *content = NULL, *reasoning = NULL;
	size_t role_len, len = 0, reasoning_len = 0;
	struct args a;

	if (!json_is_object(obj))
		return "messages are objects with role and content";
	args_begin(&a, obj);
	(void)args_str(&a, "role", true, 32, &role, &role_len);
	(void)args_str(&a, "content", true, CONTENT_MAX, &content, &len);
	(void)args_str(&a, "reasoning", false, CONTENT_MAX, &reasoning, &reasoning_len);
	if (args_end(&a) < 0)
		return "a message has role, content and perhaps reasoning, all strings";
	*ret = (struct message){
		.content = content,
		.content_len = len,
		.reasoning = reasoning,
		.reasoning_len = reasoning_len,
	};
	if (streq(role, "system"))
		ret->role = MESSAGE_SYSTEM;
	else if (streq(role, "user"))
		ret->role = MESSAGE_USER;
	else if (streq(role, "assistant"))
		ret->role = MESSAGE_ASSISTANT;
	else
		return "role is system, user or assistant";
	return NULL;
}

static int parse_messages(struct request *r, json_t *array, const char **ret_why)
{
	r->n_messages = json_array_size(array);
	if (r->n_messages == 0) {
		*ret_why = "at least one message is needed";
		return -EINVAL;
	}
	r->messages = calloc(r->n_messages, sizeof(*r->messages));
	if (!r->messages)
		return -ENOMEM;
	for (size_t i = 0; i < r->n_messages; i++) {
		*ret_why = parse_message(json_array_get(array, i), &r->messages[i]);
		if (*ret_why)
			return -EINVAL;
	}
	return 0;
}

/* Reads the parameters of any kind. On -EINVAL *ret_bad names the field. */
static int parse(struct request *r, json_t *params, const char **ret_session, char **ret_bad,
		 const char **ret_why)
{
	json_t *options = NULL, *messages = NULL;
	struct args a;
	size_t len;
	int e = 0;

	args_begin(&a, params);
	switch (r->kind) {
	case REQUEST_SEND:
		(void)args_str(&a, "session", true, 256, ret_session, &len);
		(void)args_array(&a, "messages", true, MESSAGES_MAX, &messages);
		break;
	case REQUEST_CHAT: (void)args_array(&a, "messages", true, MESSAGES_MAX, &messages); break;
	case REQUEST_COMPLETE:
		(void)args_str(&a, "session", false, 256, ret_session, &len);
		(void)args_str(&a, "prompt", true, CONTENT_MAX, &r->text, &r->text_len);
		(void)args_bool(&a, "special", &r->engine.special);
		break;
	case REQUEST_TOKENIZE:
		(void)args_str(&a, "text", true, TOKENIZE_MAX, &r->text, &r->text_len);
		(void)args_bool(&a, "special", &r->engine.special);
		break;
	}
	if (r->kind != REQUEST_TOKENIZE)
		(void)args_object(&a, "options", false, &options);
	if (args_end(&a) < 0) {
		(void)fail(ret_bad, 0, "%s", a.bad);
		*ret_why = a.why;
		return -EINVAL;
	}
	if (messages) {
		e = parse_messages(r, messages, ret_why);
		if (e < 0) {
			(void)fail(ret_bad, 0, "messages");
			return e;
		}
	}
	if (r->kind == REQUEST_TOKENIZE)
		return 0;
	options = options ? json_incref(options) : json_object();
	if (!options)
		return -ENOMEM;
	e = parse_options(r, options, ret_bad, ret_why);
	json_decref(options);
	return e;
}

/* A token's text; one that is part of a character is shown as U+FFFD. */
static json_t *piece_json(const struct model *m, int32_t token)
{
	struct utf8_stream stream = {};
	struct buf text = {};
	json_t *s = NULL;
	size_t len;
	const char *piece = tokenizer_piece(m->tokenizer, token, true, &len);

	if (utf8_push(&stream, piece, len, &text) == 0 && utf8_flush(&stream, &text) == 0)
		s = json_stringn(text.data ? text.data : "", text.len);
	buf_done(&text);
	return s;
}

/* The whole reply is made here: its many small pieces would hold up the loop. */
static int tokenize(struct request *r, enum tokenizer_flags flags)
{
	struct model *m = r->engine.model;
	json_t *ids = json_array(), *pieces = json_array(), *reply;
	struct tokens tokens = {};
	int e;

	e = tokenizer_encode(m->tokenizer, r->text, r->text_len, flags, &r->engine.cancel, &tokens);
	for (size_t i = 0; i < tokens.n && e == 0; i++)
		if (json_array_append_new(ids, json_integer(tokens.ids[i])) < 0 ||
		    json_array_append_new(pieces, piece_json(m, tokens.ids[i])) < 0)
			e = -ENOMEM;
	tokens_done(&tokens);
	reply = json_pack("{so so}", "tokens", ids, "pieces", pieces);
	if (e == 0)
		e = reply ? varlink_put_reply(&r->tokenized, reply, false) : -ENOMEM;
	json_decref(reply);
	return e;
}

/* On a worker. */
static void prepare(struct job *job)
{
	struct request *r = (struct request *)((char *)job - offsetof(struct request, job));
	struct model *m = r->engine.model;
	struct template_options o = { .continuation = r->continuation, .thinking = r->thinking };
	struct template_prompt prompt = {};
	enum tokenizer_flags flags = r->engine.special ? TOKENIZER_SPECIAL : 0;

	switch (r->kind) {
	case REQUEST_SEND:
	case REQUEST_CHAT:
		r->prepare_err = template_render(m->template, r->messages, r->n_messages, &o,
						 &r->engine.cancel, &prompt, &r->prepare_error);
		if (r->prepare_err < 0)
			return;
		r->engine.prompt = prompt.tokens;
		r->engine.answer_start = prompt.answer_start;
		r->engine.thinking_open = prompt.thinking_open;
		return;
	case REQUEST_COMPLETE:
		r->prepare_err = tokenizer_encode(m->tokenizer, r->text, r->text_len, flags,
						  &r->engine.cancel, &r->engine.prompt);
		return;
	case REQUEST_TOKENIZE: r->prepare_err = tokenize(r, flags); return;
	}
}

static void link_request(struct daemon *d, struct request *r)
{
	r->id = r->engine.sched.seq = ++d->next_request;
	r->prev = d->last_request;
	*(r->prev ? &r->prev->next : &d->requests) = r;
	d->last_request = r;
	d->n_requests++;
	pressure_used(d);
}

static void unlink_request(struct daemon *d, struct request *r)
{
	*(r->prev ? &r->prev->next : &d->requests) = r->next;
	*(r->next ? &r->next->prev : &d->last_request) = r->prev;
	d->n_requests--;
	pressure_used(d);
}

static json_t *id_json(const struct request *r)
{
	char id[24];

	snprintf(id, sizeof(id), "%" PRIu64, r->id);
	return json_string(id);
}

/* A frame of a stream; obj is stolen. The first one carries the request's name. */
static void send_frame(struct request *r, json_t *obj)
{
	if (!r->conn || !r->more) {
		json_decref(obj);
		return;
	}
	if (obj && !r->first_sent) {
		(void)json_object_set_new(obj, "request", id_json(r));
		r->first_sent = true;
	}
	if (!obj) {
		request_cancel(r, false);
		return;
	}
	conn_reply(r->conn, obj, true);
}

/* Tells everyone who waits how many are before him; the number only falls. */
static void tell_positions(struct daemon *d)
{
	size_t before = 0;

	for (struct request *r = d->requests; r; r = r->next) {
		if (r->kind == REQUEST_TOKENIZE)
			continue;
		if (before < r->position) {
			r->position = before;
			send_frame(r, json_pack("{s{ss sI}}", "progress", "stage", "queued",
						"position", (json_int_t)before));
		}
		before++;
	}
}

static struct request *request_new(struct conn *c, enum request_kind kind)
{
	struct request *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	r->daemon = c->daemon;
	r->conn = c;
	r->uid = c->uid;
	r->kind = kind;
	r->more = c->current->call.more;
	r->parameters = json_incref(c->current->call.parameters);
	r->engine.model = model_ref(c->daemon->model);
	r->engine.chat = kind == REQUEST_SEND || kind == REQUEST_CHAT;
	r->engine.accepted_us = now_us();
	r->position = SIZE_MAX;
	r->job.run = prepare;
	r->job.mail.kind = EVENT_PREPARED;
	return r;
}

/* Once a day and user: a client that tries again and again does not fill the journal. */
static void tell_quota(struct daemon *d, const struct conn *c)
{
	struct uid_usage *u = usage_of(d, c->uid);
	char uid[32];
	const char *const fields[] = { MESSAGE_ID_QUOTA_EXCEEDED, uid, NULL };
	uint64_t day = (uint64_t)time(NULL) + quota_seconds_left(time(NULL));

	/* The midnight to come names the day; it may move by a second while we look. */
	if (!u || day <= u->quota_told + 60)
		return;
	u->quota_told = day;
	snprintf(uid, sizeof(uid), "UID=%u", c->uid);
	log_fields(LOG_NOTICE, fields, "uid %u has used up today's tokens (%" PRIu64 ")", c->uid,
		   c->limits.tokens_per_day);
}

/* What a request may still use: its prompt, as soon as that is known, and its answer. */
static uint64_t tokens_reserved(const struct request *r)
{
	const struct engine_request *e = &r->engine;

	return e->prompt.n + (uint64_t)MAX(e->max_tok, INT64_C(0)) + REPLY_GRACE_TOK +
	       (r->thinking ? (uint64_t)MAX(e->max_thinking_tok, INT64_C(0)) : 0);
}

/* Of today's tokens, what is neither used nor set aside for the user's other requests (not for `except`). */
static uint64_t tokens_left(struct daemon *d, uid_t uid, uint64_t per_day, const struct request *except)
{
	uint64_t taken;

	if (per_day == UINT64_MAX)
		return UINT64_MAX;
	taken = quota_used(d->quota, uid, time(NULL));
	for (const struct request *r = d->requests; r && taken < per_day; r = r->next)
		if (r->uid == uid && r != except && r->kind != REQUEST_TOKENIZE)
			taken += tokens_reserved(r);
	return taken < per_day ? per_day - taken : 0;
}

/* Service, model, queue: may a request start at all? Answers itself when not. */
static bool admit(struct conn *c, enum request_kind kind)
{
	struct daemon *d = c->daemon;
	const char *text;
	enum error_code code = service_check_client(c, &text);
	time_t now = time(NULL);
	size_t own = 0;

	if (code == ERROR_LOADING) {
		conn_defer(c);
		return false;
	}
	if (code != ERROR_NONE) {
		conn_error(c, code, text, 0);
		return false;
	}
	/* Before it takes a place in the queue: this may last for hours. */
	if (c->limits.pause_idle && c->limits.class == POLICY_IDLE && kind != REQUEST_TOKENIZE) {
		conn_defer(c);
		return false;
	}
	if ((kind == REQUEST_SEND || kind == REQUEST_CHAT) && !d->model->template) {
		conn_error(c, ERROR_NOT_SUPPORTED, d->model->template_error, 0);
		return false;
	}
	/* One user leaves a quarter of the queue to the others. */
	for (const struct request *r = d->requests; r; r = r->next)
		own += r->uid == c->uid;
	if (d->n_requests >= d->config.queue_max || own >= c->limits.queue_max ||
	    own >= d->config.queue_max - d->config.queue_max / 4) {
		conn_error(c, ERROR_QUEUE_FULL, NULL, 0);
		return false;
	}
	if (kind != REQUEST_TOKENIZE && tokens_left(d, c->uid, c->limits.tokens_per_day, NULL) == 0) {
		/* What runs may use less than was set aside for it. */
		if (quota_used(d->quota, c->uid, now) < c->limits.tokens_per_day) {
			conn_error(c, ERROR_QUOTA_EXCEEDED,
				   "the rest of today's tokens is set aside for requests that run",
				   1000);
			return false;
		}
		tell_quota(d, c);
		conn_error(c, ERROR_QUOTA_EXCEEDED, NULL,
			   (uint32_t)MIN(quota_seconds_left(now) * 1000, (uint64_t)UINT32_MAX));
		return false;
	}
	return true;
}

/* Thought and answer together get no more than is left of today. -EDQUOT: the prompt alone is too much. */
static int cut_to_quota(struct request *r)
{
	struct engine_request *e = &r->engine;
	uint64_t left = tokens_left(r->daemon, r->uid, r->tokens_per_day, r);
	int64_t answer;

	if (left == UINT64_MAX)
		return 0;
	if (left <= e->prompt.n)
		return -EDQUOT;
	left = MIN(left - e->prompt.n, (uint64_t)INT64_MAX);
	if (r->thinking && (e->max_thinking_tok < 0 || (uint64_t)e->max_thinking_tok > left / 2))
		e->max_thinking_tok = MAX((int64_t)(left / 2), INT64_C(1));
	answer = (int64_t)left - (r->thinking ? e->max_thinking_tok : 0);
	if (e->max_tok < 0 || e->max_tok > answer)
		e->max_tok = MAX(answer, INT64_C(1));
	return 0;
}

/* What policy allows, where the client asked for more. */
static void apply_limits(struct request *r, const struct policy_limits *l)
{
	struct engine_request *e = &r->engine;

	e->sched.user = r->uid;
	e->sched.weight = l->weight;
	e->sched.class = (int)l->class;
	e->context_max = l->context_max == UINT32_MAX ? 0 : l->context_max;
	e->kv_bytes_max = l->kv_bytes_max;
	if (l->max_thinking_tokens >= 0 &&
	    (e->max_thinking_tok < 0 || e->max_thinking_tok > l->max_thinking_tokens)) {
		e->max_thinking_tok = l->max_thinking_tokens;
		r->thinking = e->max_thinking_tok != 0;
	}
	r->tokens_per_day = l->tokens_per_day;
	cut_to_quota(r);
}

void request_start(struct conn *c, enum request_kind kind)
{
	_cleanup_(freep) char *bad = NULL;
	const char *session = NULL, *why = NULL;
	struct daemon *d = c->daemon;
	struct request *r;
	int e;

	if (!admit(c, kind))
		return;
	r = request_new(c, kind);
	e = r ? parse(r, r->parameters, &session, &bad, &why) : -ENOMEM;
	if (e < 0) {
		if (e == -EINVAL)
			conn_invalid(c, bad, why);
		else
			conn_error(c, ERROR_NO_MEMORY, NULL, 0);
		request_free(r);
		return;
	}
	if (kind != REQUEST_TOKENIZE && r->want >= 0 &&
	    !uses_match(&d->uses, (enum use)r->want, d->model->name)) {
		conn_error(c, ERROR_NO_SUCH_MODEL,
			   "the model that is loaded does not serve what is wanted (models.d)", 0);
		request_free(r);
		return;
	}
	if (session) {
		struct session *s = session_find(d, c->uid, session);

		if (!s || s->busy) {
			conn_error(c, s ? ERROR_SESSION_BUSY : ERROR_NO_SUCH_SESSION, NULL, 0);
			request_free(r);
			return;
		}
		s->busy = true;
		r->session = s;
		r->engine.session = s->engine;
		r->continuation = s->context_used > 0;
	}
	apply_limits(r, &c->limits);
	c->request = r;
	link_request(d, r);
	d->n_requests_total += kind != REQUEST_TOKENIZE;
	tell_positions(d);
	workers_submit(d->workers, &r->job);
}

/* The request is over and answered: gone from every list. */
static void finish(struct request *r)
{
	struct daemon *d = r->daemon;

	unlink_request(d, r);
	if (r->conn)
		r->conn->request = NULL;
	if (r->session)
		session_release(d, r->session);
	request_free(r);
	tell_positions(d);
	service_touch(d);
	service_check_stop(d);
}

static void fail_request(struct request *r, enum error_code code, const char *text)
{
	if (r->conn)
		conn_error(r->conn, code, text, 0);
	finish(r);
}

void request_prepared(struct request *r)
{
	struct daemon *d = r->daemon;

	if (r->prepare_err >= 0 && d->engine_quit) {
		fail_request(r, ERROR_STOPPING, NULL);
	} else if (r->prepare_err == -ECANCELED && r->kind != REQUEST_TOKENIZE) {
		r->engine.stop_reason = REPLY_STOP_CANCELLED;
		r->engine.context_used = r->session ? r->session->context_used : 0;
		r->engine.stats = d->stats;
		request_done(r);
	} else if (r->prepare_err == -EINVAL) {
		fail_request(r, ERROR_INVALID_REQUEST, r->prepare_error);
	} else if (r->prepare_err == -EOPNOTSUPP) {
		fail_request(r, ERROR_NOT_SUPPORTED, r->prepare_error);
	} else if (r->prepare_err < 0) {
		fail_request(r, error_from_errno(r->prepare_err), NULL);
	} else if (r->kind == REQUEST_TOKENIZE) {
		if (r->conn)
			conn_reply_bytes(r->conn, &r->tokenized);
		finish(r);
	} else if (cut_to_quota(r) < 0) {
		fail_request(r, ERROR_QUOTA_EXCEEDED,
			     "the prompt is longer than what is left of today's tokens");
	} else {
		r->engine.mail.kind = ENGINE_REQUEST;
		engine_post(d->engine, &r->engine.mail);
	}
}

static json_t *logprob_json(const struct model *m, const struct logprob *p)
{
	/* JSON has no infinity: what is impossible gets the least finite float. */
	return json_pack("{si so sf}", "token", p->token, "text", piece_json(m, p->token),
			 "logprob", isfinite(p->logprob) ? (double)p->logprob : -3.4e38);
}

static json_t *logprobs_json(const struct request *r, const struct engine_event *e)
{
	json_t *obj = logprob_json(r->engine.model, &e->chosen), *top = json_array();

	for (size_t i = 0; i < e->n_top; i++)
		(void)json_array_append_new(top, logprob_json(r->engine.model, &e->top[i]));
	if (obj)
		(void)json_object_set_new(obj, "top", top);
	else
		json_decref(top);
	return obj;
}

static void rate_add(struct rate *rate, uint64_t tok, uint64_t busy_us)
{
	uint64_t now = now_us() / 1000000;
	size_t i = now % RATE_BUCKETS;

	if (rate->second[i] != now) {
		rate->second[i] = now;
		rate->tok[i] = rate->busy_us[i] = 0;
	}
	rate->tok[i] += tok;
	rate->busy_us[i] += busy_us;
}

static void send_text(struct request *r, const struct engine_event *e, enum reply_channel channel,
		      json_t *logprobs)
{
	const struct buf *text = &e->text[channel];
	json_t *obj;

	if (!r->more) {
		if (text->len > 0 && buf_append(&r->text_all[channel], text->data, text->len) < 0)
			request_cancel(r, false);
		if (logprobs && !r->logprobs_all)
			r->logprobs_all = json_array();
		if (logprobs)
			(void)json_array_append(r->logprobs_all, logprobs);
		return;
	}
	if (text->len == 0 && !logprobs)
		return;
	obj = json_pack("{ss% ss}", "text", text->data ? text->data : "", text->len, "channel",
			channel == REPLY_THOUGHT ? "thought" : "answer");
	if (obj && logprobs)
		(void)json_object_set_new(obj, "logprobs", json_pack("[O]", logprobs));
	send_frame(r, obj);
}

void request_progress(struct engine_event *e)
{
	struct request *r = (struct request *)e->req;
	bool thought = e->text[REPLY_THOUGHT].len > 0;

	rate_add(&r->daemon->prefill_rate, e->n_prefill_tok, e->n_prefill_tok ? e->busy_us : 0);
	rate_add(&r->daemon->decode_rate, e->n_decode_tok, e->n_decode_tok ? e->busy_us : 0);
	if (r->conn && e->prefill_total > 0)
		send_frame(r, json_pack("{s{ss sI sI}}", "progress", "stage", "prefill", "done",
					(json_int_t)e->prefill_done, "total",
					(json_int_t)e->prefill_total));
	else if (r->conn) {
		json_t *logprobs = e->has_logprob ? logprobs_json(r, e) : NULL;

		/* One token may end the thought and begin the answer; its probabilities go with the first of the two. */
		if (thought)
			send_text(r, e, REPLY_THOUGHT, logprobs);
		if (e->text[REPLY_ANSWER].len > 0 || (!thought && logprobs))
			send_text(r, e, REPLY_ANSWER, thought ? NULL : logprobs);
		json_decref(logprobs);
	}
	engine_event_free(e);
}

static json_t *usage_json(const struct engine_usage *u)
{
	return json_pack("{sI sI sI sI sI sI sI}", "prompt_tokens", (json_int_t)u->prompt_tok,
			 "cached_tokens", (json_int_t)u->cached_tok, "answer_tokens",
			 (json_int_t)u->answer_tok, "thought_tokens", (json_int_t)u->thought_tok,
			 "queue_us", (json_int_t)u->queue_us, "prefill_us",
			 (json_int_t)u->prefill_us, "decode_us", (json_int_t)u->decode_us);
}

static json_t *final_frame(struct request *r)
{
	json_t *obj = json_pack("{ss so sI}", "stop_reason",
				reply_stop_to_string(r->engine.stop_reason), "usage",
				usage_json(&r->engine.usage), "context_used",
				(json_int_t)r->engine.context_used);

	if (obj && models_notice(r->daemon))
		(void)json_object_set_new(obj, "notice", json_string(models_notice(r->daemon)));
	if (!obj || r->more)
		return obj;
	(void)json_object_set_new(obj, "request", id_json(r));
	(void)json_object_set_new(
		obj, "text",
		json_stringn(r->text_all[REPLY_ANSWER].data ? r->text_all[REPLY_ANSWER].data : "",
			     r->text_all[REPLY_ANSWER].len));
	if (r->text_all[REPLY_THOUGHT].len > 0)
		(void)json_object_set_new(obj, "thought",
					  json_stringn(r->text_all[REPLY_THOUGHT].data,
						       r->text_all[REPLY_THOUGHT].len));
	if (r->logprobs_all)
		(void)json_object_set(obj, "logprobs", r->logprobs_all);
	return obj;
}

static void account(struct daemon *d, const struct request *r)
{
	const struct engine_usage *u = &r->engine.usage;
	struct uid_usage *sum = usage_of(d, r->uid);

	quota_add(d->quota, r->uid, u->prompt_tok - u->cached_tok + u->answer_tok + u->thought_tok,
		  time(NULL));
	service_save_quota(d);
	d->n_prompt_tok += u->prompt_tok;
	d->n_generated_tok += u->answer_tok + u->thought_tok;
	if (!sum)
		return;
	sum->requests++;
	sum->engine_us += u->prefill_us + u->decode_us;
	sum->sum.prompt_tok += u->prompt_tok;
	sum->sum.cached_tok += u->cached_tok;
	sum->sum.answer_tok += u->answer_tok;
	sum->sum.thought_tok += u->thought_tok;
}

/* One line a request, with what it cost and nothing of what it said. */
static void log_request(const struct request *r)
{
	const struct engine_usage *u = &r->engine.usage;
	char session[64] = "SESSION=", uid[32], id[32], model[300];
	const char *const fields[] = { uid, id, model, r->session ? session : NULL, NULL };

	snprintf(uid, sizeof(uid), "UID=%u", r->uid);
	snprintf(id, sizeof(id), "REQUEST=%" PRIu64, r->id);
	snprintf(model, sizeof(model), "MODEL=%s", r->engine.model->name);
	if (r->session)
		snprintf(session, sizeof(session), "SESSION=%s", r->session->id);
	log_fields(LOG_INFO, fields,
		   "request %" PRIu64 " of uid %u: %s, %" PRIu64 " prompt tokens (%" PRIu64
		   " cached), %" PRIu64 " generated, %" PRIu64 " ms",
		   r->id, r->uid,
		   r->engine.error != ERROR_NONE ? error_by_code(r->engine.error)->varlink
						 : reply_stop_to_string(r->engine.stop_reason),
		   u->prompt_tok, u->cached_tok, u->answer_tok + u->thought_tok,
		   (u->queue_us + u->prefill_us + u->decode_us) / 1000);
}

void request_done(struct request *r)
{
	struct daemon *d = r->daemon;

	service_set_stats(d, &r->engine.stats);
	account(d, r);
	log_request(r);
	if (r->session)
		r->session->context_used = r->engine.context_used;
	if (r->engine.error != ERROR_NONE) {
		if (r->engine.error == ERROR_INTERNAL || r->engine.error == ERROR_MODEL_BROKEN)
			log_error("request %" PRIu64 " of uid %u failed: %s", r->id, r->uid,
				  r->engine.error_text ? r->engine.error_text
						       : error_by_code(r->engine.error)->text);
		fail_request(r, r->engine.error, r->engine.error_text);
		return;
	}
	if (r->conn)
		conn_reply(r->conn, final_frame(r), false);
	finish(r);
}

void request_cancel(struct request *r, bool hang_up)
{
	if (hang_up && r->conn) {
		r->conn->request = NULL;
		r->conn = NULL;
	}
	/* A kept session survives its listener: its state is worth waiting for the end of the batch. */
	if (hang_up && !(r->session && r->session->keep))
		atomic_store(&r->engine.gone, true);
	atomic_store(&r->engine.cancel, true);
	engine_wake(r->daemon->engine);
}

struct request *request_find(struct daemon *d, uid_t uid, uint64_t id)
{
	for (struct request *r = d->requests; r; r = r->next)
		if (r->id == id && r->uid == uid)
			return r;
	return NULL;
}
