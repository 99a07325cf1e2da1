/* SPDX-License-Identifier: MIT */
/*
 * chat.c: connection, session and transcript. See chat.h.
 */
#include "client/chat.h"

enum exit_code chat_connect(struct chat *c)
{
	int n;

	if (c->r && resident_process(c->r) >= 0)
		return EXIT_OK;
	c->r = resident_close(c->r);
	c->attached = false;
	n = resident_connect(NULL, &c->r);
	return n < 0 ? report_no_service(&c->err, "resident", n) : EXIT_OK;
}

void chat_close_session(struct chat *c)
{
	/* Fails when the service has forgotten it already, which is as good. */
	if (c->r && c->transcript.session[0])
		resident_close_session(c->r, c->transcript.session);
	c->transcript.session[0] = 0;
	c->transcript.context_used = 0;
	c->attached = false;
}

void chat_save(struct chat *c, bool with_session)
{
	struct transcript t = c->transcript; /* a view: nothing of it is freed */
	int r;

	if (!c->save)
		return;
	if (!with_session)
		t.session[0] = 0;
	r = transcript_save(&t);
	if (r < 0)
		terminal_printf(&c->err, "resident: the conversation is not saved for --continue: %s\n",
				resident_strerror(r));
}

void chat_done(struct chat *c)
{
	if (!c->save)
		chat_close_session(c); /* nobody will take it up again */
	c->r = resident_close(c->r);
	transcript_done(&c->transcript);
}

static struct ask prepare(struct chat *c)
{
	return (struct ask){
		.out = &c->out,
		.err = &c->err,
		.silent = c->json,
		.show_thinking = c->show_thinking,
	};
}

/* Says how the request ended. A connection that failed, or on which a request may still run, is
 * given up. */
static enum exit_code conclude(struct chat *c, int code, struct ask *a)
{
	enum exit_code e = ask_report(a, c->r, code);
	bool not_sent = code == -EILSEQ || code == -EINVAL || code == -E2BIG || code == -EBUSY;

	if (code < 0 && code > -RESIDENT_E_NO_MODEL && !not_sent) {
		c->r = resident_close(c->r);
		c->attached = false;
	}
	return e;
}

/* Did the request bring something that belongs into the transcript? */
static bool is_turn(int code, const struct ask *a)
{
	return code == 0 && (a->answer.len > 0 || !a->interrupted);
}

static const char *answer_of(const struct ask *a)
{
	return a->answer.data ? a->answer.data : "";
}

/* ---- in a kept session ---- */

/* Makes transcript.session one that this connection may use. *ret_from: the first turn that it does
 * not hold yet. */
static int attach(struct chat *c, size_t *ret_from)
{
	struct resident_session s = { .size = sizeof(s) };
	struct transcript *t = &c->transcript;
	int n;

	if (!c->attached && t->session[0]) {
		n = resident_open_session(c->r, true, t->session, &s);
		if (n < 0 && n != -RESIDENT_E_NO_SUCH_SESSION)
			return n;
		if (n == 0 && s.context_used == t->context_used)
			c->attached = true;
		else
			chat_close_session(c);
	}
	if (c->attached) {
		*ret_from = t->n - 1;
		return 0;
	}
	n = resident_open_session(c->r, true, NULL, &s);
	if (n < 0)
		return n;
	snprintf(t->session, sizeof(t->session), "%s", s.id);
	c->attached = true;
	*ret_from = 0;
	return 0;
}

static int send_turns(struct chat *c, size_t from, struct ask *a)
{
	const struct transcript *t = &c->transcript;
	_cleanup_(freep) struct resident_message *messages = calloc(t->n - from, sizeof(*messages));
	int n;

	if (!messages)
		return -ENOMEM;
	for (size_t i = from; i < t->n; i++) {
		messages[i - from].role = t->turns[i].role;
		messages[i - from].content = t->turns[i].content;
	}
	n = resident_send(c->r, t->session, messages, t->n - from, &c->options, ask_event, a);
	return n < 0 ? n : ask_run(a, c->r);
}

enum exit_code chat_say(struct chat *c, const char *text, struct ask *a)
{
	struct transcript *t = &c->transcript;
	size_t before = t->n, from;
	enum exit_code e;
	int code;

	*a = prepare(c);
	e = chat_connect(c);
	if (e != EXIT_OK)
		return e;
	if (transcript_add(t, "user", text) < 0) {
		terminal_printf(&c->err, "resident: out of memory\n");
		return EXIT_ERROR;
	}
	for (int attempt = 0; attempt < 2; attempt++) {
		code = attach(c, &from);
		if (code == 0)
			code = send_turns(c, from, a);
		if (code != -RESIDENT_E_NO_SUCH_SESSION)
			break;
		chat_close_session(c); /* it ended while we were attached: once more, with everything */
	}
	e = conclude(c, code, a);
	if (is_turn(code, a) && transcript_add(t, "assistant", answer_of(a)) == 0) {
		t->context_used = a->context_used;
	} else {
		/* What the session holds now is not known: the next turn compares. */
		transcript_cut(t, before);
		c->attached = false;
	}
	return e;
}

/* ---- without a session ---- */

/* The turn takes the place of the last conversation, whose kept session nobody can take up any
 * more. */
static void replace_transcript(struct chat *c, const char *system, const char *text, const char *answer)
{
	struct transcript *t = &c->transcript;

	if (!c->save)
		return;
	if (transcript_load(t) == 0)
		chat_close_session(c);
	transcript_done(t);
	if ((system && transcript_add(t, "system", system) < 0) ||
	    transcript_add(t, "user", text) < 0 || transcript_add(t, "assistant", answer) < 0) {
		terminal_printf(&c->err, "resident: the conversation is not saved: out of memory\n");
		return;
	}
	chat_save(c, false);
}

enum exit_code chat_once(struct chat *c, const char *system, const char *text, struct ask *a)
{
	struct resident_message messages[] = {
		{ .role = "system", .content = system },
		{ .role = "user", .content = text },
	};
	size_t skip = system ? 0 : 1;
	enum exit_code e;
	int code;

	*a = prepare(c);
	e = chat_connect(c);
	if (e != EXIT_OK)
		return e;
	code = resident_chat(c->r, messages + skip, 2 - skip, &c->options, ask_event, a);
	if (code == 0)
		code = ask_run(a, c->r);
	e = conclude(c, code, a);
	if (is_turn(code, a))
		replace_transcript(c, system, text, answer_of(a));
	return e;
}

enum exit_code chat_complete(struct chat *c, const char *prompt, struct ask *a)
{
	enum exit_code e;
	int code;

	*a = prepare(c);
	e = chat_connect(c);
	if (e != EXIT_OK)
		return e;
	code = resident_complete(c->r, NULL, prompt, false, &c->options, ask_event, a);
	if (code == 0)
		code = ask_run(a, c->r);
	return conclude(c, code, a);
}
