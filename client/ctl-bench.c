/* SPDX-License-Identifier: MIT */
/*
 * ctl-bench.c: `residentctl bench`: how fast the service reads and answers, at growing context.
 *
 * Main thread. Owns the requests and the files that are written. A run is one conversation that grows: at each
 * point words are added until it is as long as wanted (their tokens a second are the prompt's speed) and some tokens
 * are answered. Times are the service's own, so neither the socket nor the queue is in them; but others' requests take
 * turns with this one, so it is noted when there were any. Refuses to know where the service is and what it runs on.
 * Invariant: what was measured before an error or Ctrl-C is printed and written all the same, and nothing that was
 * cut short is.
 */
#include "client/ctl-bench.h"

#include "client/ctl.h"
#include "daemon/config.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>

#define ANSWER_TOK     64
#define ANSWER_TOK_MAX 4096
/* An answer of random words may end early; then another is asked for. */
#define ANSWERS_MAX    16
/* Beside prompt and answer: what begins a conversation, the first request, and words that more answers need. */
#define ROOM_TOK       64
#define CONTEXT_LEAST  16

struct benching {
	struct ctl *c;
	struct bench *b;
	uint64_t context_last; /* --context; 0: as far as it goes */
	uint64_t n_answer, n_runs;
	uint32_t cost[BENCH_WORDS];
	uint64_t seed;
	char session[64];
	uint64_t context; /* tokens of the session */
	char what[64];    /* for the progress */
	/* of the request that runs */
	struct resident_usage usage;
	bool was_queued, ended_itself, cancelled;
};

/* Readable once Ctrl-C was pressed. */
static int interrupt_fd = -1;
static volatile sig_atomic_t n_interrupts;

/* Connecting and opening a session wait for the service, not for this: the second one ends the program. */
static void on_interrupt(int signo)
{
	int e = errno;

	(void)signo;
	if (n_interrupts++ > 0)
		_exit(EXIT_INTERRUPTED);
	eventfd_write(interrupt_fd, 1);
	errno = e;
}

static enum exit_code failed(struct benching *s)
{
	terminal_progress_erase(&s->c->err);
	return report_error(&s->c->err, PROGRAM, resident_last_error(s->c->r));
}

/* ---- one request ---- */

static int on_event(struct resident *r, const struct resident_event *e, void *userdata)
{
	struct benching *s = userdata;
	char text[128];

	(void)r;
	switch (e->type) {
	case RESIDENT_EVENT_QUEUED:
		s->was_queued = s->was_queued || e->position > 0;
		if (e->position > 0) {
			snprintf(text, sizeof(text), "%s: waiting, %llu before this", s->what,
				 (unsigned long long)e->position);
			terminal_progress(&s->c->err, text);
		}
		break;
	case RESIDENT_EVENT_PREFILL:
		snprintf(text, sizeof(text), "%s: reading, %llu of %llu tokens", s->what,
			 (unsigned long long)e->done, (unsigned long long)e->total);
		terminal_progress(&s->c->err, text);
		break;
	case RESIDENT_EVENT_DONE:
		s->usage = *e->usage;
		s->context = e->context_used;
		s->ended_itself = streq(e->stop_reason, "eos");
		s->cancelled = streq(e->stop_reason, "cancelled");
		break;
	case RESIDENT_EVENT_THOUGHT:
	case RESIDENT_EVENT_ANSWER:
	case RESIDENT_EVENT_FAILED: break;
	}
	return 0;
}

/* Until the last event; the first Ctrl-C asks for it. */
static int wait_for_end(struct benching *s)
{
	for (;;) {
		struct pollfd p[] = {
			{ .fd = resident_fd(s->c->r), .events = (short)resident_events(s->c->r) },
			{ .fd = n_interrupts > 0 ? -1 : interrupt_fd, .events = POLLIN },
		};
		int n;

		if (poll(p, ARRAY_SIZE(p), -1) < 0 && errno != EINTR)
			return -errno;
		if (n_interrupts > 0)
			resident_cancel(s->c->r);
		n = resident_process(s->c->r);
		if (n <= 0)
			return n;
	}
}

static enum exit_code complete(struct benching *s, const char *prompt, uint64_t n_answer)
{
	struct resident_options o = {
		.size = sizeof(o),
		.set = RESIDENT_MAX_TOKENS | RESIDENT_TEMPERATURE | RESIDENT_SEED,
		.max_tokens = (int64_t)n_answer,
		.temperature = 1,
		.seed = (int64_t)(s->seed & INT32_MAX),
	};

	s->cancelled = false;
	if (n_interrupts > 0)
		return EXIT_INTERRUPTED;
	if (resident_complete(s->c->r, s->session, prompt, false, &o, on_event, s) < 0 ||
	    wait_for_end(s) < 0)
		return n_interrupts > 0 ? EXIT_INTERRUPTED : failed(s);
	if (!s->cancelled)
		return EXIT_OK;
	terminal_progress_erase(&s->c->err);
	if (n_interrupts > 0)
		return EXIT_INTERRUPTED;
	terminal_printf(&s->c->err, PROGRAM ": the request was cancelled by somebody else\n");
	return EXIT_ERROR;
}

/* ---- one measurement ---- */

/* *ret_total: requests ever. *ret_busy: somebody has one now. */
static enum exit_code look_at_others(struct benching *s, uint64_t *ret_total, bool *ret_busy)
{
	const struct resident_status *status;

	if (resident_get_status(s->c->r, &status) < 0)
		return failed(s);
	*ret_total = status->requests_total;
	*ret_busy = status->running + status->queued > 0;
	return EXIT_OK;
}

/* Appends answers until there are as many tokens as are to be measured. */
static enum exit_code answer(struct benching *s, const char *prompt, struct bench_run *run,
			     uint64_t *ret_requests)
{
	enum exit_code e = EXIT_OK;
	uint64_t n = 0;

	for (; e == EXIT_OK && run->answer_tok < s->n_answer && n < ANSWERS_MAX; n++) {
		uint64_t answered;

		e = complete(s, n == 0 ? prompt : bench_word((size_t)n), s->n_answer - run->answer_tok);
		if (e != EXIT_OK)
			break;
		if (n == 0) {
			run->context = s->usage.prompt_tokens;
			run->prompt_tok = s->usage.prompt_tokens -
					  MIN(s->usage.cached_tokens, s->usage.prompt_tokens);
			run->prompt_us = s->usage.prefill_us;
			run->queue_us = s->usage.queue_us;
		}
		answered = s->usage.answer_tokens + s->usage.thought_tokens;
		run->answer_tok += answered;
		/* The first comes with the prompt; a token that ended the answer is not among them, but was computed. */
		run->answer_steps += answered + s->ended_itself - (answered + s->ended_itself > 0);
		run->answer_us += s->usage.decode_us;
	}
	*ret_requests = n;
	return e;
}

static enum exit_code measure(struct benching *s, struct bench_point *p)
{
	_cleanup_(buf_done) struct buf text = {};
	struct bench_run run = {};
	uint64_t before = 0, after = 0, n_requests = 0;
	bool busy_before = false, busy_after = false;
	enum exit_code e;

	snprintf(s->what, sizeof(s->what), "context %llu, run %zu of %llu",
		 (unsigned long long)p->context, p->n_runs + 1, (unsigned long long)s->n_runs);
	terminal_progress(&s->c->err, s->what);
	if (p->context <= s->context) {
		terminal_printf(&s->c->err,
				PROGRAM
				": the answers have passed %llu tokens: that length is left out\n",
				(unsigned long long)p->context);
		return EXIT_OK;
	}
	if (bench_text(&text, p->context - s->context, s->cost, &s->seed) < 0)
		return ctl_usage_error(s->c, "out of memory");
	if (text.len == 0)
		return EXIT_OK;
	s->was_queued = false;
	e = look_at_others(s, &before, &busy_before);
	if (e == EXIT_OK)
		e = answer(s, text.data, &run, &n_requests);
	if (e == EXIT_OK)
		e = look_at_others(s, &after, &busy_after);
	if (e != EXIT_OK)
		return e;
	run.others = s->was_queued || busy_before || busy_after || after - before > n_requests;
	p->runs[p->n_runs++] = run;
	return EXIT_OK;
}

/* ---- runs ---- */

/* How many tokens each word is behind another, which is where it will stand. */
static enum exit_code learn_words(struct benching *s)
{
	const int32_t *ids;
	size_t alone, n;
	char text[64];

	if (resident_tokenize(s->c->r, bench_word(0), false, &ids, &alone) < 0)
		return failed(s);
	for (size_t i = 0; i < BENCH_WORDS; i++) {
		snprintf(text, sizeof(text), "%s%s", bench_word(0), bench_word(i));
		if (resident_tokenize(s->c->r, text, false, &ids, &n) < 0)
			return failed(s);
		s->cost[i] = n > alone ? (uint32_t)MIN(n - alone, (size_t)UINT32_MAX) : 1;
	}
	return EXIT_OK;
}

/* What the service and its policy allow is known with the first session. */
static enum exit_code choose_contexts(struct benching *s, uint64_t context_max)
{
	uint64_t contexts[BENCH_POINTS_MAX], most;

	if (context_max < s->n_answer + 2 * ROOM_TOK) {
		terminal_printf(&s->c->err,
				PROGRAM ": a conversation has room for %llu tokens: too few\n",
				(unsigned long long)context_max);
		return EXIT_CONTEXT;
	}
	if (s->context_last > context_max) {
		terminal_printf(&s->c->err,
				PROGRAM ": --context %llu: a conversation has room for %llu tokens\n",
				(unsigned long long)s->context_last, (unsigned long long)context_max);
		return EXIT_CONTEXT;
	}
	most = context_max - s->n_answer - ROOM_TOK;
	if (s->context_last > most)
		terminal_printf(&s->c->err, PROGRAM ": up to %llu tokens: the rest is for answers\n",
				(unsigned long long)most);
	s->b->n_points =
		bench_contexts(s->context_last > 0 ? MIN(s->context_last, most) : most, contexts);
	for (size_t i = 0; i < s->b->n_points; i++)
		s->b->points[i].context = contexts[i];
	return EXIT_OK;
}

static enum exit_code run_once(struct benching *s)
{
	struct resident_session session = { .size = sizeof(session) };
	enum exit_code e = EXIT_OK;

	if (n_interrupts > 0)
		return EXIT_INTERRUPTED;
	if (resident_open_session(s->c->r, false, NULL, &session) < 0)
		return failed(s);
	snprintf(s->session, sizeof(s->session), "%s", session.id);
	s->context = session.context_used;
	if (s->b->n_points == 0)
		e = choose_contexts(s, session.context_max);
	/* Not measured: what only the first of many requests waits for. */
	snprintf(s->what, sizeof(s->what), "begins");
	if (e == EXIT_OK)
		e = complete(s, bench_word(0), 1);
	for (size_t i = 0; e == EXIT_OK && i < s->b->n_points; i++)
		e = measure(s, &s->b->points[i]);
	/* Otherwise it ends with the connection. */
	if (e == EXIT_OK && resident_close_session(s->c->r, s->session) < 0)
		e = failed(s);
	return e;
}

/* Names that outlive the reply. */
static enum exit_code learn_names(struct benching *s, char **ret_model, char **ret_backend)
{
	const struct resident_status *status;

	if (resident_get_status(s->c->r, &status) < 0)
		return failed(s);
	*ret_model = strdup(status->model ? status->model->name : "the model");
	*ret_backend = strdup(status->backend);
	if (!*ret_model || !*ret_backend)
		return ctl_usage_error(s->c, "out of memory");
	s->b->model = *ret_model;
	s->b->backend = *ret_backend;
	s->b->threads = status->threads;
	return EXIT_OK;
}

/* ---- what came out ---- */

static bool wants_file(const char *path)
{
	return path && !streq(path, "-");
}

/* A path that cannot be written is better known now than in an hour. Leaves the file as it was. */
static enum exit_code try_file(struct ctl *c, const char *path)
{
	_cleanup_(closep) int fd = -1;
	bool created;

	if (!wants_file(path))
		return EXIT_OK;
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	created = fd >= 0;
	if (fd < 0 && errno == EEXIST)
		fd = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		terminal_printf(&c->err, PROGRAM ": %s: %m\n", path);
		return EXIT_ERROR;
	}
	if (created)
		(void)unlink(path);
	return EXIT_OK;
}

static enum exit_code put(struct benching *s, const char *path,
			  int (*put_it)(struct buf *out, const struct bench *b))
{
	_cleanup_(buf_done) struct buf out = {};

	if (put_it(&out, s->b) < 0)
		return ctl_usage_error(s->c, "out of memory");
	return ctl_write_file(s->c, path, &out);
}

/* The first failure counts, but nothing is left out for it. */
static enum exit_code print(struct benching *s)
{
	struct ctl *c = s->c;
	bool taken = (c->csv && !wants_file(c->csv)) || (c->svg && !wants_file(c->svg));
	enum exit_code e = EXIT_OK, csv = EXIT_OK, svg = EXIT_OK;

	if (c->json)
		e = ctl_print_json(c, bench_json(s->b));
	else if (!taken)
		e = put(s, NULL, bench_put_table);
	if (c->csv)
		csv = put(s, c->csv, bench_put_csv);
	if (c->svg)
		svg = put(s, c->svg, bench_put_svg);
	return e != EXIT_OK ? e : csv != EXIT_OK ? csv : svg;
}

/* ---- the command ---- */

static const char *parse_options(struct benching *s)
{
	const struct ctl *c = s->c;

	if (c->context_text &&
	    parse_u64(c->context_text, CONTEXT_LEAST, UINT32_MAX, &s->context_last) < 0)
		return "--context is a number of tokens, at least 16";
	if (c->tokens && parse_u64(c->tokens, 2, ANSWER_TOK_MAX, &s->n_answer) < 0)
		return "--tokens is a number from 2 to 4096";
	if (c->repeat && parse_u64(c->repeat, 1, BENCH_RUNS_MAX, &s->n_runs) < 0)
		return "--repeat is a number from 1 to 100";
	if ((c->json + (c->csv && !wants_file(c->csv)) + (c->svg && !wants_file(c->svg))) > 1)
		return "only one of --json, --csv - and --svg - can have standard output";
	if (wants_file(c->csv) && wants_file(c->svg) && streq(c->csv, c->svg))
		return "--csv and --svg name the same file";
	return NULL;
}

static enum exit_code run_all(struct benching *s)
{
	enum exit_code e = learn_words(s);

	for (uint64_t i = 0; e == EXIT_OK && i < s->n_runs; i++)
		e = run_once(s);
	terminal_progress_erase(&s->c->err);
	return e;
}

enum exit_code ctl_bench(struct ctl *c)
{
	_cleanup_(freep) struct bench *b = calloc(1, sizeof(*b));
	_cleanup_(freep) char *model = NULL, *backend = NULL;
	struct benching s = { .c = c, .b = b, .n_answer = ANSWER_TOK, .n_runs = 1, .seed = 1 };
	struct sigaction on = { .sa_handler = on_interrupt }, before, before_term;
	const char *wrong = parse_options(&s);
	enum exit_code e, printed = EXIT_OK;

	if (!b || wrong)
		return ctl_usage_error(c, wrong ? wrong : "out of memory");
	e = try_file(c, c->csv);
	if (e == EXIT_OK)
		e = try_file(c, c->svg);
	if (e == EXIT_OK)
		e = learn_names(&s, &model, &backend);
	if (e != EXIT_OK)
		return e;
	interrupt_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (interrupt_fd < 0) {
		terminal_printf(&c->err, PROGRAM ": eventfd: %m\n");
		return EXIT_ERROR;
	}
	sigaction(SIGINT, &on, &before);
	sigaction(SIGTERM, &on, &before_term);
	e = run_all(&s);
	if (b->n_points > 0 && b->points[0].n_runs > 0)
		printed = print(&s);
	sigaction(SIGTERM, &before_term, NULL);
	sigaction(SIGINT, &before, NULL);
	close(TAKE_FD(interrupt_fd));
	return e != EXIT_OK ? e : printed;
}
