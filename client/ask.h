/* SPDX-License-Identifier: MIT */
/*
 * ask.h: one request on the screen: shows its progress, prints its text as it comes, and lets
 * Ctrl-C end it.
 *
 * Main thread. Owns the SIGINT handler and the text of the request; refuses to know what was asked
 * and where it is kept. Invariant: standard output gets the answer's text and nothing else.
 */
#pragma once

#include "client/report.h"
#include "client/resident.h"
#include "client/terminal.h"

enum ask_phase { ASK_WAITING, ASK_QUEUED, ASK_PREFILL, ASK_THINKING, ASK_ANSWERING };

struct ask {
	/* set by the caller */
	struct terminal *out, *err;
	bool silent;        /* the answer is collected, not printed */
	bool show_thinking; /* on err */

	/* what came of it */
	struct buf answer, thought;
	char stop_reason[32];
	struct resident_usage usage;
	uint64_t context_used;
	char notice[256];
	bool interrupted; /* by SIGINT */
	int output_error; /* of writing to out: -EPIPE... */
	int code;         /* 0, or why the request failed; then also: */
	uint32_t retry_after_ms;
	char *message; /* NULL: memory was short */

	/* private */
	enum ask_phase phase;
	uint64_t start_us, position, done, total;
};

/* SIGINT interrupts from now on what runs and waits, instead of ending the program; a second one,
 * when nobody has asked about the first, does end it. -errno. */
int ask_catch_interrupts(void);
/* At a prompt it is for the line, however often it comes. */
void ask_at_prompt(bool yes);
/* Waits until fd can be read: 0; or for SIGINT, which may have come before: -EINTR; -errno. */
int ask_wait_input(int fd);
/* Did SIGINT come since the last call? */
bool ask_take_interrupt(void);

/* The callback for resident_chat() and the like; userdata is the struct ask. */
int ask_event(struct resident *r, const struct resident_event *event, void *userdata);
/* Runs the request that was started with it to its end. 0: see stop_reason and interrupted; the
 * code of its failure; -EINTR: interrupted twice, -EPIPE and others: out failed (output_error);
 * then the request still runs, and the connection is to be closed. */
int ask_run(struct ask *a, struct resident *r);
/* Says on err how it ended, unless well, and keeps why in a, as the connection may be closed next;
 * code is ask_run()'s. */
enum exit_code ask_report(struct ask *a, const struct resident *r, int code);
void ask_done(struct ask *a);
