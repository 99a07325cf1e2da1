/* SPDX-License-Identifier: MIT */
/*
 * chat.h: a conversation with the service: the connection, the kept session and the transcript,
 * kept in step.
 *
 * Main thread. Owns the connection and the transcript; refuses to know where the questions come
 * from. Invariant: what the service is taken to know is what the transcript says. Whenever that is
 * not certain (the session is gone, or holds another number of tokens than after our last turn), a
 * new session gets the whole transcript.
 */
#pragma once

#include "client/ask.h"
#include "client/transcript.h"

struct chat {
	/* set by the caller */
	struct resident_options options;
	struct terminal out, err;
	bool json; /* answers are not printed as they come */
	bool show_thinking;
	bool save; /* transcript to disk */

	struct resident *r; /* NULL: not connected */
	struct transcript transcript;
	bool attached; /* transcript.session is open on this connection */
};

/* Connects unless a live connection is there. On failure says why and returns the exit code. */
enum exit_code chat_connect(struct chat *c);
/* Asks in a kept session and adds the turn to the transcript, in memory only. Says what goes wrong.
 * a is filled for the caller, who frees it. */
enum exit_code chat_say(struct chat *c, const char *text, struct ask *a);
/* Asks without a session; the transcript is replaced by this one turn. */
enum exit_code chat_once(struct chat *c, const char *system, const char *text, struct ask *a);
/* Raw completion; no transcript. */
enum exit_code chat_complete(struct chat *c, const char *prompt, struct ask *a);
/* Ends the kept session at the service, if there is one and it can be reached. The transcript
 * stays. */
void chat_close_session(struct chat *c);
/* Writes the transcript, with_session or with its text alone (while the session is in use here, no
 * other program should take it up). A failure is only a warning. */
void chat_save(struct chat *c, bool with_session);
void chat_done(struct chat *c);
