/* SPDX-License-Identifier: MIT */
/*
 * request.h: one request from its parameters to its last frame.
 *
 * Loop thread, but for the preparation (template, tokenizer), which runs as a job on a worker and reads only what no one else touches
 * meanwhile. A request that was accepted is freed exactly once, when it came back from worker or engine; a connection that goes away
 * leaves it behind with conn NULL and a flag raised.
 */
#pragma once

#include "daemon/conn.h"
#include "daemon/session.h"

enum request_kind { REQUEST_SEND, REQUEST_CHAT, REQUEST_COMPLETE, REQUEST_TOKENIZE };

struct request {
	struct engine_request engine; /* first: mail of EVENT_DONE is the request */
	struct job job;               /* mail of EVENT_PREPARED */
	struct request *prev, *next;  /* daemon's list, by arrival */
	struct daemon *daemon;
	struct conn *conn; /* NULL: hung up */
	struct session *session;
	enum request_kind kind;
	uint64_t id;
	uid_t uid;
	bool more;

	json_t *parameters; /* what the strings below point into */
	struct message *messages;
	size_t n_messages;
	const char *text; /* Complete, Tokenize */
	size_t text_len;
	int want;                /* enum use; -1: whatever is loaded */
	uint64_t tokens_per_day; /* of the user, when it was accepted */
	bool continuation, thinking;
	struct logit_bias *bias;
	const char *stop[REPLY_STOP_MAX];

	int prepare_err;
	char *prepare_error;
	struct buf tokenized; /* the reply, as bytes */

	size_t position; /* last one told */
	bool first_sent;
	struct buf text_all[2]; /* by channel, when the caller wants one reply */
	json_t *logprobs_all;
};

enum request_event { EVENT_PREPARED = 200 };

/* Reads parameters and starts the request of c->current; answers with an error where it cannot. */
void request_start(struct conn *c, enum request_kind kind);
void request_prepared(struct request *r);      /* back from the worker */
void request_progress(struct engine_event *e); /* frees e */
void request_done(struct request *r);          /* back from the engine; frees r */
/* hang_up: nobody listens any more. */
void request_cancel(struct request *r, bool hang_up);
struct request *request_find(struct daemon *d, uid_t uid, uint64_t id);
