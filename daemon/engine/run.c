/* SPDX-License-Identifier: MIT */
/*
 * run.c: what one request does, step by step: take up the session, evaluate the prompt in pieces, then token by token until the reply
 * ends; then leave the session as the conversation is.
 *
 * Engine thread, called by engine.c only. Refuses to know queueing and memory of others. Invariants: a request that ends before its first
 * token leaves the session's tokens as they were; after its first token the messages and what was answered are part of them.
 * session->n_valid never claims more than the state has evaluated.
 */
#include "daemon/engine/engine-private.h"

#include "daemon/residency/trace.h"

/* The heat is written at the end of a request when this has passed: a crash loses no more. */
#define HEAT_SAVE_US 300000000

struct run {
	struct engine_request *req;
	struct engine_session *ses;
	bool own_session;  /* made for this request, dropped with it */
	struct tokens seq; /* conversation and prompt, then the generated tokens */
	size_t n_prompt;   /* of seq: what was there before the first generated token */
	size_t cut; /* where the next turn of a thinking model returns to; n_prompt when there is no such place */
	size_t n_cached;
	struct sampler *sampler;
	struct reply *reply;
	bool prompt_done;
	uint64_t start_us, prompt_done_us;
};

static struct run *run_free(struct engine *e, struct run *run)
{
	if (run->own_session && run->ses)
		engine_session_drop(e, run->ses);
	tokens_done(&run->seq);
	run->sampler = sampler_free(run->sampler);
	run->reply = reply_free(run->reply);
	free(run);
	return NULL;
}

static int refuse(struct engine_request *req, enum error_code code, int err)
{
	if (req->error == ERROR_NONE)
		req->error = code;
	return err;
}

/* Tokens that a session of this request may hold: policy may allow fewer than the model's. */
static uint32_t context_of(const struct engine *e, const struct engine_request *req)
{
	return req->context_max > 0 ? MIN(req->context_max, e->context) : e->context;
}

/* seq = what the session holds, the end of its last turn, the prompt. */
static int build_sequence(struct engine *e, struct run *run)
{
	struct engine_request *req = run->req;
	const struct tokens *old = &run->ses->tokens, *end;
	int32_t bos = tokenizer_bos(e->model->tokenizer);
	size_t before;
	int r;

	r = tokens_append(&run->seq, old->ids, old->n);
	if (r >= 0 && old->n == 0 && tokenizer_add_bos(e->model->tokenizer) && bos >= 0)
		r = tokens_append(&run->seq, &bos, 1);
	if (r >= 0 && req->chat && run->ses->open_turn) {
		end = template_turn_end(e->model->template);
		r = tokens_append(&run->seq, end->ids, end->n);
	}
	before = run->seq.n;
	if (r >= 0)
		r = tokens_append(&run->seq, req->prompt.ids, req->prompt.n);
	if (r < 0)
		return refuse(req, ERROR_NO_MEMORY, r);
	run->n_prompt = run->seq.n;
	run->cut = req->chat ? before + req->answer_start : run->n_prompt;
	if (run->n_prompt == 0) {
		req->error_text = strdup("the prompt is empty");
		return refuse(req, ERROR_INVALID_REQUEST, -EINVAL);
	}
	/* Room for at least one generated token. */
	if (run->n_prompt >= context_of(e, req)) {
		req->error_text = NULL;
		(void)fail(&req->error_text, 0,
			   "the conversation needs %zu tokens, the context holds %u",
			   run->n_prompt + 1, e->context);
		return refuse(req, ERROR_CONTEXT_FULL, -ENOSPC);
	}
	return 0;
}

/* Brings the state to the longest usable beginning of seq. The last token is always evaluated anew: its logits are needed. */
static void take_up_state(struct engine *e, struct run *run)
{
	struct engine_session *s = run->ses;
	size_t want = MIN(s->n_valid, run->n_prompt - 1);

	if (s->state->n_tok > want)
		(void)state_rewind(s->state, e->model, e->arena, want);
	s->n_valid = s->state->n_tok;
	run->n_cached = s->state->n_tok;
}

/* What the conversation used before comes back while its prompt is read. */
static void take_up_heat(struct engine *e, struct engine_session *s)
{
	size_t n = e->model->catalog->n_blocks;

	if (!residency_managed(e->residency))
		return;
	residency_warm(e->residency, s->heat);
	if (!s->heat)
		s->heat = calloc(n, sizeof(*s->heat)); /* without memory: without */
}

/* Older turns count less. */
static void leave_heat(const struct engine *e, struct engine_session *s)
{
	for (size_t i = 0; s->heat && i < e->model->catalog->n_blocks; i++)
		s->heat[i] /= 2;
}

static int make_helpers(struct engine *e, struct run *run)
{
	struct engine_request *req = run->req;
	struct reply_options o = {
		.chat = req->chat,
		.thinking_open = req->thinking_open,
		.special = req->special,
		.max_tokens = req->max_tok,
		.max_thinking_tokens = req->max_thinking_tok,
		.stop = req->stop,
		.n_stop = req->n_stop,
	};
	size_t from = run->n_prompt > SAMPLE_WINDOW_MAX ? run->n_prompt - SAMPLE_WINDOW_MAX : 0;
	int r;

	r = sampler_new(&req->sample, e->model->n_vocab, &run->sampler);
	if (r >= 0)
		r = reply_new(e->model->tokenizer, req->chat ? e->model->template : NULL, &o,
			      &run->reply);
	if (r < 0)
		return refuse(req, ERROR_NO_MEMORY, r);
	for (size_t i = from; i < run->n_prompt; i++)
		sampler_accept(run->sampler, run->seq.ids[i]);
	return 0;
}

/* What was computed with pages that are not the file's any more is worthless, now and later. */
static bool is_broken(struct engine *e)
{
	if (!e->model_broken &&
	    (gguf_broken(e->model->gguf) || gguf_check_unchanged(e->model->gguf) < 0))
		e->model_broken = true;
	return e->model_broken;
}

static int run_begin(struct engine *e, struct engine_request *req)
{
	struct run *run;
	int r;

	req->sched.running = true;
	run = req->run = calloc(1, sizeof(*run));
	if (!run)
		return refuse(req, ERROR_NO_MEMORY, -ENOMEM);
	run->req = req;
	run->start_us = run->prompt_done_us = now_us();
	req->usage.queue_us = run->start_us - req->accepted_us;
	if (!e->model || e->model != req->model)
		return refuse(req, e->model ? ERROR_LOADING : ERROR_NO_MODEL, -ENXIO);
	if (is_broken(e)) {
		req->error_text = strdup("the model's file was changed or became unreadable");
		return refuse(req, ERROR_MODEL_BROKEN, -ESTALE);
	}
	run->ses = req->session;
	if (!run->ses) {
		run->ses = engine_session_new(req->sched.user);
		if (!run->ses)
			return refuse(req, ERROR_NO_MEMORY, -ENOMEM);
		run->own_session = true;
	}
	run->ses->running = true;
	r = engine_session_begin(e, run->ses);
	if (r < 0)
		return refuse(req, ERROR_NO_MEMORY, r);
	r = build_sequence(e, run);
	if (r < 0)
		return r;
	take_up_state(e, run);
	take_up_heat(e, run->ses);
	return make_helpers(e, run);
}

static void post_trace(struct engine *e)
{
	const uint32_t *counts, *experts;
	struct engine_trace *t;
	uint32_t n_layers;

	if (!residency_recorded(e->residency, &n_layers, &counts, &experts))
		return;
	t = calloc(1, sizeof(*t));
	if (t && trace_write_step(&t->line, e->n_traced, n_layers, counts, experts) < 0) {
		engine_trace_free(t);
		return;
	}
	if (!t)
		return;
	e->n_traced++;
	t->mail.kind = EVENT_TRACE;
	mailbox_post(e->out, &t->mail);
}

static int forward(struct engine *e, struct run *run, const struct graph_seq *seq)
{
	/* Not a prompt's last token in a batch of its own, nor what comes in again. */
	bool record = run->prompt_done && seq->n_tok == 1 && seq->want != GRAPH_WANT_NONE &&
		      atomic_load(&e->record);
	int r;

	residency_record(e->residency, record);
	residency_step_begin(e->residency, seq->n_tok, run->ses->heat);
	r = graph_forward(e->model, e->backend, e->arena, seq, 1, &run->req->gone, e->logits);
	residency_step_end(e->residency);
	if (r == 0 && record)
		post_trace(e);
	return r;
}

/* One batch of the run's sequence; ret_n of its tokens from the state's position. -EAGAIN: the card was lost, and the state with it; what it had
 * evaluated is evaluated once more, on the CPU. */
static int evaluate(struct engine *e, struct run *run, size_t n, bool want_logits)
{
	struct state *state = run->ses->state;
	struct graph_seq seq = {
		.state = state,
		.tokens = run->seq.ids + state->n_tok,
		.n_tok = n,
		.want = want_logits ? GRAPH_WANT_LAST : GRAPH_WANT_NONE,
	};
	int r;

	do {
		r = engine_charge(e, run->ses, n, run->req->kv_bytes_max);
		if (r == 0)
			r = forward(e, run, &seq);
	} while (r == -ENOSPC && engine_make_room(e, run->ses));
	if (r == -ENODEV && engine_card_lost(e))
		return -EAGAIN;
	if (r != -ECANCELED && is_broken(e))
		r = -ESTALE;
	switch (r) {
	case 0:
	case -ECANCELED: return r;
	case -EDQUOT:
		run->req->error_text =
			strdup("the user's sessions may hold no more memory (KvBytesMax)");
		return refuse(run->req, ERROR_NO_MEMORY, r);
	case -ENOSPC:
	case -ENOMEM: return refuse(run->req, ERROR_NO_MEMORY, r);
	case -ESTALE:
	case -ENODATA:
		run->req->error_text = strdup("the model's file was changed or became unreadable");
		return refuse(run->req, ERROR_MODEL_BROKEN, r);
	case -EIO:
		run->req->error_text = strdup("a part of the model cannot be read from the disk");
		return refuse(run->req, ERROR_MODEL_BROKEN, r);
	default: return refuse(run->req, ERROR_INTERNAL, r);
	}
}

static struct engine_event *event_new(struct run *run, uint64_t busy_us)
{
	struct engine_event *ev = calloc(1, sizeof(*ev));

	if (!ev) {
		(void)refuse(run->req, ERROR_NO_MEMORY, -ENOMEM);
		return NULL;
	}
	ev->mail.kind = EVENT_PROGRESS;
	ev->req = run->req;
	ev->busy_us = busy_us;
	return ev;
}

/* The next token, from the logits of the batch just evaluated or forced; shown, and appended to seq unless memory fails. */
static int choose_token(struct engine *e, struct run *run, uint64_t begun)
{
	struct engine_request *req = run->req;
	struct engine_event *ev = event_new(run, 0);
	int32_t token;
	int r;

	if (!ev)
		return -ENOMEM;
	token = reply_forced(run->reply);
	if (token < 0) {
		r = sampler_pick(run->sampler, e->logits, &token, &ev->chosen, ev->top, &ev->n_top);
		if (r < 0) {
			req->error_text = strdup("the model computed no finite number");
			engine_event_free(ev);
			return refuse(req, ERROR_MODEL_BROKEN, r);
		}
		ev->has_logprob = req->sample.top_logprobs > 0;
	}
	sampler_accept(run->sampler, token);
	r = tokens_append(&run->seq, &token, 1);
	if (r >= 0) {
		r = reply_push(run->reply, token, ev->text);
		if (r > 0)
			req->stop_reason = (enum reply_stop)r;
	}
	if (r < 0)
		(void)refuse(req, ERROR_NO_MEMORY, r);
	else if (r == REPLY_RUNNING && run->seq.n >= context_of(e, req))
		req->stop_reason = REPLY_STOP_CONTEXT;
	ev->n_decode_tok = 1;
	ev->busy_us = now_us() - begun;
	mailbox_post(e->out, &ev->mail);
	return MIN(r, 0);
}

/* The next batch of the tokens before `end`; the logits of the last one are wanted, or nobody's. */
static int evaluate_piece(struct engine *e, struct run *run, size_t end, bool want_logits, size_t *ret_n)
{
	size_t pos = run->ses->state->n_tok, n = MIN((size_t)e->batch_tok, end - pos);
	int r;

	/* End a batch at the cut: that is where the checkpoint is taken. */
	if (pos < run->cut && pos + n > run->cut)
		n = run->cut - pos;
	r = evaluate(e, run, n, want_logits && pos + n == end);
	if (r < 0)
		return r;
	/* Without memory for it the next turn evaluates more again, no worse. */
	if (pos + n == run->cut && run->cut < run->n_prompt)
		(void)state_checkpoint(run->ses->state, e->model, e->arena);
	*ret_n = n;
	return 0;
}

static int prefill_step(struct engine *e, struct run *run)
{
	uint64_t begun = now_us();
	struct engine_event *ev;
	size_t n = 0, pos;
	int r;

	r = evaluate_piece(e, run, run->n_prompt, true, &n);
	if (r < 0)
		return r;
	pos = run->ses->state->n_tok;
	run->prompt_done = pos == run->n_prompt;
	ev = event_new(run, now_us() - begun);
	if (!ev)
		return -ENOMEM;
	ev->prefill_done = pos - MIN(pos, run->n_cached);
	ev->prefill_total = run->n_prompt - run->n_cached;
	ev->n_prefill_tok = (uint32_t)n;
	mailbox_post(e->out, &ev->mail);
	if (!run->prompt_done)
		return 0;
	run->prompt_done_us = now_us();
	/* At once: another request's batch would overwrite the logits. */
	return choose_token(e, run, run->prompt_done_us);
}

static int decode_step(struct engine *e, struct run *run)
{
	uint64_t begun = now_us();
	size_t n;
	int r;

	/* The state was lost on the way: what was said comes in again, piece by piece. */
	if (run->ses->state->n_tok + 1 < run->seq.n)
		return evaluate_piece(e, run, run->seq.n - 1, false, &n);
	r = evaluate(e, run, 1, true);
	return r < 0 ? r : choose_token(e, run, begun);
}

/* The text that the reply still held back, as a last event. */
static void flush_reply(struct engine *e, struct run *run)
{
	struct engine_event *ev;

	if (!run->reply || !(ev = event_new(run, 0)))
		return;
	if (reply_finish(run->reply, ev->text) < 0)
		(void)refuse(run->req, ERROR_NO_MEMORY, -ENOMEM);
	mailbox_post(e->out, &ev->mail);
}

/* The conversation after the answer: up to the cut, then the answer without its thought and without the end-of-turn token. */
static int commit_tokens(struct engine *e, struct run *run)
{
	struct engine_session *s = run->ses;
	size_t end = run->seq.n, from = run->n_prompt;
	struct tokens now = {};
	int r;

	if (end > run->n_prompt && tokenizer_is_eog(e->model->tokenizer, run->seq.ids[end - 1]))
		end--;
	if (run->req->chat)
		from = MIN(end, run->n_prompt + (size_t)reply_answer_start(run->reply));
	r = tokens_append(&now, run->seq.ids, run->cut);
	if (r >= 0)
		r = tokens_append(&now, run->seq.ids + from, end - from);
	if (r < 0) {
		tokens_done(&now);
		return r;
	}
	tokens_done(&s->tokens);
	s->tokens = now;
	s->open_turn = run->req->chat;
	return 0;
}

/* How much of the session's tokens the state has evaluated: the common beginning of both. */
static void update_valid(struct run *run)
{
	struct engine_session *s = run->ses;
	size_t n = s->state ? MIN(s->state->n_tok, s->tokens.n) : 0, i = 0;

	n = MIN(n, run->seq.n);
	while (i < n && s->tokens.ids[i] == run->seq.ids[i])
		i++;
	s->n_valid = i;
}

/* Only of a run that had begun (it has a reply): before that, seq and state need not belong together. */
static void leave_session(struct engine *e, struct run *run)
{
	struct engine_request *req = run->req;
	bool answered = run->seq.n > run->n_prompt;

	if (answered)
		flush_reply(e, run);
	req->usage.answer_tok = reply_n_answer(run->reply);
	req->usage.thought_tok = reply_n_thought(run->reply);
	if (answered && !run->own_session && commit_tokens(e, run) < 0)
		(void)refuse(req, ERROR_NO_MEMORY, -ENOMEM);
	update_valid(run);
	leave_heat(e, run->ses);
	if (now_us() - e->heat_saved_us > HEAT_SAVE_US) {
		e->heat_saved_us = now_us();
		(void)residency_save_heat(e->residency);
	}
}

static void run_end(struct engine *e, struct engine_request *req)
{
	struct run *run = req->run;
	uint64_t end_us = now_us();

	if (run) {
		if (run->ses)
			run->ses->running = false;
		/* What was looked at, not what was sent: a prompt that is refused or given up costs what was done for it. */
		req->usage.prompt_tok = run->prompt_done ? run->n_prompt
					: run->reply && run->ses->state
						? MIN(run->n_prompt, run->ses->state->n_tok)
						: 0;
		req->usage.cached_tok = MIN((uint64_t)run->n_cached, req->usage.prompt_tok);
		req->usage.prefill_us = (run->prompt_done ? run->prompt_done_us : end_us) - run->start_us;
		req->usage.decode_us = run->prompt_done ? end_us - run->prompt_done_us : 0;
		if (run->reply)
			leave_session(e, run);
		req->context_used = run->seq.n;
		req->run = run_free(e, run);
	}
	if (req->session)
		req->context_used = req->session->tokens.n;
	engine_return(e, req);
}

void run_cancel(struct engine *e, struct engine_request *req)
{
	req->stop_reason = REPLY_STOP_CANCELLED;
	if (e->quit && req->error == ERROR_NONE)
		req->error = ERROR_STOPPING;
	run_end(e, req);
}

void run_step(struct engine *e, struct engine_request *req)
{
	uint64_t begun = now_us();
	int r = 0;

	if (!req->sched.running)
		r = run_begin(e, req);
	if (r == 0 && !req->run->ses->state)
		r = engine_session_begin(e, req->run->ses);
	if (r == 0)
		r = req->run->prompt_done ? decode_step(e, req->run) : prefill_step(e, req->run);
	if (r == -EAGAIN)
		r = 0;
	sched_charge(&e->sched, &req->sched, now_us() - begun);
	if (r == -ECANCELED)
		run_cancel(e, req);
	else if (r < 0 || req->error != ERROR_NONE || req->stop_reason != REPLY_RUNNING)
		run_end(e, req);
}
