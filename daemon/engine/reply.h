/* SPDX-License-Identifier: MIT */
/*
 * reply.h: from sampled tokens to what the client sees: channels, budgets, stop strings, a decent end.
 *
 * One per request, engine thread. Pure: knows tokens and text, no model, no session, no clock. It decides when the answer
 * ends and which tokens are forced; the engine feeds forced tokens to the model as if they had been sampled.
 * Invariant: text handed out is never taken back (a possible beginning of a stop string is held until it is decided).
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/template.h"
#include "daemon/model/tokenizer.h"

#define REPLY_GRACE_TOK      64
#define REPLY_STOP_MAX       16  /* stop strings */
#define REPLY_STOP_BYTES_MAX 256 /* of one */

enum reply_channel { REPLY_ANSWER, REPLY_THOUGHT };

enum reply_stop {
	REPLY_RUNNING,
	REPLY_STOP_EOS,     /* the model ended its turn */
	REPLY_STOP_STRING,  /* a stop string; it is not part of the text */
	REPLY_STOP_LENGTH,  /* the answer's budget is used up (after grace) */
	REPLY_STOP_CONTEXT, /* the context is full */
	REPLY_STOP_CANCELLED,
};
const char *reply_stop_to_string(enum reply_stop s); /* "eos" "stop" "length" "context" "cancelled" */

struct reply_options {
	bool chat; /* channels and think block; false: raw completion, all text is answer */
	bool thinking_open; /* the prompt ended inside a think block */
	bool special;       /* show control tokens as text (raw completion that asked for it) */
	int64_t max_tokens; /* visible answer, in tokens; -1: until the context is full */
	int64_t max_thinking_tokens; /* thought, in tokens; -1: no limit; 0 with thinking_open: closed at once */
	const char *const *stop; /* not owned; each 1..REPLY_STOP_BYTES_MAX bytes of valid UTF-8, matched in the answer */
	size_t n_stop;
};

struct reply;

int reply_new(const struct tokenizer *t, const struct template *tmpl /* NULL for raw */,
	      const struct reply_options *o, struct reply **ret);
struct reply *reply_free(struct reply *r);
DEFINE_CLEANUP(struct reply *, reply_free)

/* Takes the next token (sampled or forced). Text that became final is appended to text[channel], whole UTF-8 characters only.
 * Returns the stop reason or REPLY_RUNNING; -ENOMEM. The end-of-turn token itself yields no text. */
int reply_push(struct reply *r, int32_t token, struct buf text[2]);
/* The token that must come next instead of a sampled one (think close), or -1. Consumes it: the engine then evaluates it and
 * hands it to reply_push(). */
int32_t reply_forced(struct reply *r);
/* Ends the stream for whatever reason (also cancel, context): releases held text, U+FFFD for a partial character, and closes an
 * open code fence in the answer ("\n```\n"). Call once. */
int reply_finish(struct reply *r, struct buf text[2]);

uint64_t reply_n_answer(const struct reply *r);  /* tokens of the answer so far */
uint64_t reply_n_thought(const struct reply *r); /* tokens of the thought */
bool reply_is_thinking(const struct reply *r);
/* Index (in tokens pushed) of the first token of the answer proper: after the think block and its blank lines. */
uint64_t reply_answer_start(const struct reply *r);
