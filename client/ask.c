/* SPDX-License-Identifier: MIT */
/*
 * ask.c: the loop of one request. See ask.h.
 *
 * The handler of SIGINT writes into a pipe that the loop polls, so an interrupt is never lost
 * between a check and a wait; it is installed without SA_RESTART, so that a write to a reader that
 * has stopped reading returns too. A second one that finds the first still waiting ends the program.
 */
#include "client/ask.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>

#define TICK_MS  100
#define QUIET_US 300000 /* no progress before: short waits should not flicker */

static int interrupt_pipe[2] = { -1, -1 };
static atomic_bool interrupt_pending; /* SIGINT has come, and nobody has asked yet */
static atomic_bool at_prompt;

static void on_interrupt(int sig)
{
	int saved = errno;

	(void)sig;
	/* In a call that waits for the service, nobody asks. */
	if (atomic_exchange(&interrupt_pending, true) && !atomic_load(&at_prompt))
		_exit(EXIT_INTERRUPTED);
	(void)!write(interrupt_pipe[1], "", 1); /* a full pipe says the same */
	errno = saved;
}

int ask_catch_interrupts(void)
{
	struct sigaction sa = { .sa_handler = on_interrupt };

	if (interrupt_pipe[0] < 0 && pipe2(interrupt_pipe, O_CLOEXEC | O_NONBLOCK) < 0)
		return -errno;
	return sigaction(SIGINT, &sa, NULL) < 0 ? -errno : 0;
}

void ask_at_prompt(bool yes)
{
	atomic_store(&at_prompt, yes);
}

int ask_wait_input(int fd)
{
	struct pollfd p[2] = {
		{ .fd = fd, .events = POLLIN },
		{ .fd = interrupt_pipe[0], .events = POLLIN },
	};

	while (poll(p, 2, -1) < 0)
		if (errno != EINTR) /* the handler has written into the pipe */
			return -errno;
	return p[1].revents ? -EINTR : 0;
}

bool ask_take_interrupt(void)
{
	char bytes[64];

	/* First the pipe: a signal in between is told now, and wakes the next poll for nothing. */
	while (read(interrupt_pipe[0], bytes, sizeof(bytes)) > 0)
		;
	return atomic_exchange(&interrupt_pending, false);
}

static void show_prefill(const struct ask *a, char *line, size_t size)
{
	char bar[21] = "....................";
	uint64_t done = MIN(a->done, a->total);

	if (a->total > 0)
		memset(bar, '#', (size_t)((double)done / (double)a->total * 20));
	snprintf(line, size, "reading the prompt [%s] %llu of %llu tokens", bar,
		 (unsigned long long)done, (unsigned long long)a->total);
}

static void show_progress(const struct ask *a)
{
	uint64_t elapsed = now_us() - a->start_us;
	char spinner = "|/-\\"[elapsed / (TICK_MS * 1000) % 4];
	char line[128];

	if (elapsed < QUIET_US)
		return;
	switch (a->phase) {
	case ASK_QUEUED:
		if (a->position > 0) {
			snprintf(line, sizeof(line), "%c waiting: %llu before this", spinner,
				 (unsigned long long)a->position);
			break;
		}
		__attribute__((fallthrough));
	case ASK_WAITING: snprintf(line, sizeof(line), "%c waiting", spinner); break;
	case ASK_PREFILL: show_prefill(a, line, sizeof(line)); break;
	case ASK_THINKING:
		snprintf(line, sizeof(line), "%c thinking %llu s", spinner,
			 (unsigned long long)(elapsed / 1000000));
		break;
	case ASK_ANSWERING: return;
	}
	terminal_progress(a->err, line);
}

static int on_thought(struct ask *a, const struct resident_event *e)
{
	if (buf_append(&a->thought, e->text, e->text_len) < 0)
		return -ENOMEM;
	if (!a->show_thinking || a->interrupted)
		return 0;
	/* A thought that cannot be shown is no reason to lose the answer. */
	terminal_dim(a->err, true);
	terminal_write(a->err, e->text, e->text_len);
	terminal_dim(a->err, false);
	return 0;
}

static int on_answer(struct ask *a, const struct resident_event *e)
{
	if (buf_append(&a->answer, e->text, e->text_len) < 0)
		return -ENOMEM;
	if (a->interrupted)
		return 0;
	terminal_progress_erase(a->err);
	if (a->phase == ASK_THINKING && a->show_thinking) {
		terminal_end_line(a->err);
		terminal_write(a->err, "\n", 1);
	}
	if (a->silent || a->output_error < 0)
		return 0;
	/* Also -EINTR: the rest of the text is not wanted any more. */
	a->output_error = terminal_write(a->out, e->text, e->text_len);
	return a->output_error;
}

/* Once text stands on the screen there is no room for progress. */
static void set_phase(struct ask *a, enum ask_phase phase)
{
	if (a->phase != ASK_ANSWERING)
		a->phase = phase;
}

int ask_event(struct resident *r, const struct resident_event *e, void *userdata)
{
	struct ask *a = userdata;
	int n;

	(void)r;
	switch (e->type) {
	case RESIDENT_EVENT_QUEUED:
		set_phase(a, ASK_QUEUED);
		a->position = e->position;
		return 0;
	case RESIDENT_EVENT_PREFILL:
		set_phase(a, ASK_PREFILL);
		a->done = e->done;
		a->total = e->total;
		return 0;
	case RESIDENT_EVENT_THOUGHT: set_phase(a, ASK_THINKING); return on_thought(a, e);
	case RESIDENT_EVENT_ANSWER:
		n = on_answer(a, e);
		a->phase = ASK_ANSWERING;
		return n;
	case RESIDENT_EVENT_DONE:
		snprintf(a->stop_reason, sizeof(a->stop_reason), "%s", e->stop_reason);
		a->usage = *e->usage;
		a->context_used = e->context_used;
		snprintf(a->notice, sizeof(a->notice), "%s", e->notice ? e->notice : "");
		return 0;
	case RESIDENT_EVENT_FAILED: return 0;
	}
	return 0;
}

/* 0, or a reason to stop at once. */
static int interrupt(struct ask *a, struct resident *r)
{
	if (!ask_take_interrupt())
		return 0;
	if (a->interrupted)
		return -EINTR;
	a->interrupted = true;
	terminal_progress_erase(a->err);
	resident_cancel(r);
	return 0;
}

int ask_run(struct ask *a, struct resident *r)
{
	bool progress = a->err->tty;
	int n;

	a->start_us = now_us();
	for (;;) {
		/* No events asked for on out: POLLERR comes by itself when the reader of a pipe
		 * goes away. */
		struct pollfd p[] = {
			{ .fd = resident_fd(r), .events = (short)resident_events(r) },
			{ .fd = interrupt_pipe[0], .events = POLLIN },
			{ .fd = a->silent ? -1 : a->out->fd },
		};

		if (poll(p, ARRAY_SIZE(p), progress && a->phase != ASK_ANSWERING ? TICK_MS : -1) < 0 &&
		    errno != EINTR) {
			n = -errno;
			break;
		}
		n = interrupt(a, r);
		if (n < 0)
			break;
		if (p[2].revents & POLLERR)
			a->output_error = -EPIPE;
		n = resident_process(r);
		if (a->output_error < 0 && a->output_error != -EINTR)
			n = a->output_error;
		if (n <= 0)
			break;
		if (progress && !a->interrupted)
			show_progress(a);
	}
	terminal_progress_erase(a->err);
	if (!a->silent && a->out->tty)
		terminal_end_line(a->out);
	if (a->show_thinking && a->phase == ASK_THINKING)
		terminal_end_line(a->err);
	return n;
}

enum exit_code ask_report(struct ask *a, const struct resident *r, int code)
{
	const struct resident_error own = { .code = code, .message = resident_strerror(code) };
	const struct resident_error *e = resident_last_error(r);

	if (e->code != code) /* not always of the connection */
		e = &own;
	if (code < 0) {
		a->code = code;
		a->retry_after_ms = e->retry_after_ms;
		a->message = strdup(e->message);
	}
	if (a->output_error == -EPIPE)
		return EXIT_PIPE;
	if (a->output_error < 0 && a->output_error != -EINTR) {
		terminal_printf(a->err, "resident: cannot write the answer: %s\n",
				resident_strerror(a->output_error));
		return EXIT_ERROR;
	}
	if (a->interrupted)
		return EXIT_INTERRUPTED;
	if (code == -RESIDENT_E_NO_SUCH_MODEL) { /* --want: there is one, for something else */
		report_error(a->err, "resident", e);
		return EXIT_UNAVAILABLE;
	}
	if (code < 0)
		return report_error(a->err, "resident", e);
	if (streq(a->stop_reason, "cancelled")) {
		terminal_printf(a->err, "resident: another client cancelled the request\n");
		return EXIT_ERROR;
	}
	if (streq(a->stop_reason, "context")) {
		terminal_printf(a->err, "resident: the context is full, the answer ends here\n");
		return EXIT_CONTEXT;
	}
	if (streq(a->stop_reason, "length") && a->err->tty)
		terminal_printf(a->err,
				"resident: the answer was cut at its limit of tokens (--max-tokens)\n");
	if (a->notice[0])
		terminal_printf(a->err, "resident: %s\n", a->notice);
	return EXIT_OK;
}

void ask_done(struct ask *a)
{
	buf_done(&a->answer);
	buf_done(&a->thought);
	free(a->message);
}
