/* SPDX-License-Identifier: MIT */
/*
 * resident.c: the shell verb: arguments are the instruction, standard input the text it is about,
 * standard output the answer.
 *
 * Owns argv, standard input and the exit code; what happens between is chat.c's, and repl.c's
 * without arguments on a terminal. Invariant: what is sent is valid UTF-8 without NUL; input that
 * is not is refused, or repaired with a warning, never passed on.
 */
#include "client/chat.h"
#include "client/repl.h"
#include "client/utf8.h"

#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <poll.h>

/* The largest message that a service can be configured to take. Its usual limit is lower, and its
 * answer then says so. */
#define INPUT_MAX (64u << 20)
#define STOP_MAX  16

struct job {
	struct chat chat;
	const char *system;
	bool proceed, complete; /* --continue, --complete */
	const char *stop[STOP_MAX + 1];
	size_t n_stop;
	struct buf text; /* what is asked */
};

static const char usage_text[] =
	"usage: resident [options] [instruction...]        standard input, if any, follows the instruction\n"
	"       resident [options]                         on a terminal: a conversation\n"
	"       resident forget                            remove what --continue would continue\n"
	"\n"
	"  -c, --continue           go on with the last conversation\n"
	"  -s, --system TEXT        who the model shall be\n"
	"  -n, --no-save            leave no transcript for --continue\n"
	"      --think N|off        at most N tokens of thought, from 0 (off)\n"
	"      --show-thinking      print the thought on standard error\n"
	"      --max-tokens N       at most N tokens of answer, from 1\n"
	"  -t, --temperature X      0 to 100; 0: always the likeliest token\n"
	"      --top-k N            from 0 (off)\n"
	"      --top-p X            above 0, to 1 (off)\n"
	"      --min-p X            0 (off) to 1\n"
	"      --seed N             from 0; the same seed gives the same answer\n"
	"      --stop TEXT          end the answer before TEXT, of 1 to 256 bytes; up to 16 times\n"
	"      --want USE           chat, code, small or best: only from a model that is for that\n"
	"      --complete           continue the text itself, without chat template\n"
	"      --json               one JSON object instead of text\n"
	"      --raw                control characters reach the terminal\n"
	"  -h, --help, -V, --version\n"
	"\n"
	"Exit status: 0 answered, 1 error, 2 usage, 3 no service, 4 no model, 5 busy, 6 context full, 130 interrupted.\n";

enum {
	OPT_THINK = 256,
	OPT_SHOW_THINKING,
	OPT_MAX_TOKENS,
	OPT_TOP_K,
	OPT_TOP_P,
	OPT_MIN_P,
	OPT_SEED,
	OPT_STOP,
	OPT_WANT,
	OPT_COMPLETE,
	OPT_JSON,
	OPT_RAW,
};

static const struct option long_options[] = {
	{ "continue", no_argument, NULL, 'c' },
	{ "system", required_argument, NULL, 's' },
	{ "no-save", no_argument, NULL, 'n' },
	{ "think", required_argument, NULL, OPT_THINK },
	{ "show-thinking", no_argument, NULL, OPT_SHOW_THINKING },
	{ "max-tokens", required_argument, NULL, OPT_MAX_TOKENS },
	{ "temperature", required_argument, NULL, 't' },
	{ "top-k", required_argument, NULL, OPT_TOP_K },
	{ "top-p", required_argument, NULL, OPT_TOP_P },
	{ "min-p", required_argument, NULL, OPT_MIN_P },
	{ "seed", required_argument, NULL, OPT_SEED },
	{ "stop", required_argument, NULL, OPT_STOP },
	{ "want", required_argument, NULL, OPT_WANT },
	{ "complete", no_argument, NULL, OPT_COMPLETE },
	{ "json", no_argument, NULL, OPT_JSON },
	{ "raw", no_argument, NULL, OPT_RAW },
	{ "help", no_argument, NULL, 'h' },
	{ "version", no_argument, NULL, 'V' },
	{},
};

_printf_(2, 3) static enum exit_code usage_error(struct job *j, const char *format, ...)
{
	_cleanup_(freep) char *s = NULL;
	va_list ap;

	va_start(ap, format);
	if (vasprintf(&s, format, ap) < 0)
		s = NULL;
	va_end(ap);
	terminal_printf(&j->chat.err, "resident: %s\nresident: see `resident --help`\n",
			s ? s : "usage");
	return EXIT_USAGE;
}

/* ---- options ---- */

static bool parse_int(const char *s, int64_t *ret)
{
	char *end;
	long long n;

	errno = 0;
	n = strtoll(s, &end, 10);
	if (errno || end == s || *end)
		return false;
	*ret = n;
	return true;
}

static bool parse_real(const char *s, double *ret)
{
	char *end;
	double x = strtod(s, &end);

	if (end == s || *end || !isfinite(x))
		return false;
	*ret = x;
	return true;
}

/* Numbers of struct resident_options; ranges are the service's to check. */
static bool set_number(struct resident_options *o, int option, const char *s)
{
	switch (option) {
	case 't': o->set |= RESIDENT_TEMPERATURE; return parse_real(s, &o->temperature);
	case OPT_TOP_P: o->set |= RESIDENT_TOP_P; return parse_real(s, &o->top_p);
	case OPT_MIN_P: o->set |= RESIDENT_MIN_P; return parse_real(s, &o->min_p);
	case OPT_TOP_K: o->set |= RESIDENT_TOP_K; return parse_int(s, &o->top_k);
	case OPT_SEED: o->set |= RESIDENT_SEED; return parse_int(s, &o->seed);
	case OPT_MAX_TOKENS: o->set |= RESIDENT_MAX_TOKENS; return parse_int(s, &o->max_tokens);
	case OPT_THINK:
		o->set |= RESIDENT_MAX_THINKING_TOKENS;
		return streq(s, "off") || parse_int(s, &o->max_thinking_tokens);
	}
	return false;
}

static enum exit_code parse_option(struct job *j, int option)
{
	switch (option) {
	case 'c': j->proceed = true; break;
	case 's': j->system = optarg; break;
	case 'n': j->chat.save = false; break;
	case OPT_SHOW_THINKING: j->chat.show_thinking = true; break;
	case OPT_COMPLETE: j->complete = true; break;
	case OPT_JSON: j->chat.json = true; break;
	case OPT_RAW: j->chat.out.raw = true; break;
	case OPT_WANT: j->chat.options.want = optarg; break;
	case OPT_STOP:
		if (j->n_stop == STOP_MAX)
			return usage_error(j, "--stop can be given %d times", STOP_MAX);
		j->stop[j->n_stop++] = optarg;
		j->chat.options.stop = j->stop;
		break;
	default:
		if (!set_number(&j->chat.options, option, optarg))
			return usage_error(j, "'%s' is not a number%s", optarg,
					   option == OPT_THINK ? " or off" : "");
	}
	return EXIT_OK;
}

/* EXIT_OK with *ret_end: the program has done what was asked for. */
static enum exit_code parse_options(struct job *j, int argc, char **argv, bool *ret_end)
{
	enum exit_code e = EXIT_OK;
	int option;

	while (e == EXIT_OK && (option = getopt_long(argc, argv, "cs:nt:hV", long_options, NULL)) >= 0) {
		switch (option) {
		case 'h':
			terminal_write(&j->chat.out, usage_text, strlen(usage_text));
			*ret_end = true;
			return EXIT_OK;
		case 'V':
			terminal_printf(&j->chat.out, "resident %s\n", RESIDENTD_VERSION);
			*ret_end = true;
			return EXIT_OK;
		case '?': return EXIT_USAGE; /* getopt_long() has said why */
		default: e = parse_option(j, option);
		}
	}
	if (e == EXIT_OK && j->complete && (j->proceed || j->system))
		return usage_error(j, "--complete goes with neither --continue nor --system");
	return e;
}

/* ---- input ---- */

/* Appends text, with U+FFFD for every byte that is no UTF-8. Returns whether there were any;
 * -ENOMEM. */
static int append_repaired(struct buf *out, const char *text, size_t len)
{
	size_t plain = 0, i = 0;
	bool repaired = false;
	uint32_t c;

	while (i < len) {
		size_t n = utf8_next(text + i, len - i, &c);

		if (n > 0) {
			i += n;
			continue;
		}
		if (buf_append(out, text + plain, i - plain) < 0 ||
		    buf_append(out, "\xef\xbf\xbd", 3) < 0)
			return -ENOMEM;
		plain = ++i;
		repaired = true;
	}
	return buf_append(out, text + plain, len - plain) < 0 ? -ENOMEM : repaired;
}

static enum exit_code add_text(struct job *j, const char *what, const char *text, size_t len)
{
	int r = append_repaired(&j->text, text, len);

	if (r < 0) {
		terminal_printf(&j->chat.err, "resident: out of memory\n");
		return EXIT_ERROR;
	}
	if (r > 0)
		terminal_printf(&j->chat.err,
				"resident: %s is not all UTF-8; the rest is sent as U+FFFD\n", what);
	return EXIT_OK;
}

static enum exit_code read_stdin(struct job *j, struct buf *data)
{
	ssize_t n;

	for (;;) {
		if (buf_reserve(data, 64u << 10) < 0) {
			terminal_printf(&j->chat.err, "resident: out of memory\n");
			return EXIT_ERROR;
		}
		n = read(STDIN_FILENO, data->data + data->len, 64u << 10);
		if (n == 0)
			return EXIT_OK;
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return usage_error(j, "cannot read standard input: %s",
					   resident_strerror(-errno));
		if (memchr(data->data + data->len, 0, (size_t)n))
			return usage_error(j, "standard input holds NUL bytes: it is not text");
		data->len += (size_t)n;
		if (data->len > INPUT_MAX)
			return usage_error(j, "standard input is larger than %u MiB", INPUT_MAX >> 20);
	}
}

/* The instruction, a blank line, standard input; or one of them alone. */
static enum exit_code compose(struct job *j, char **arguments)
{
	enum exit_code e = EXIT_OK;
	struct buf data = {};

	for (char **a = arguments; *a && e == EXIT_OK; a++) {
		if (a > arguments)
			e = add_text(j, "", " ", 1);
		if (e == EXIT_OK)
			e = add_text(j, "the instruction", *a, strlen(*a));
	}
	if (e == EXIT_OK && !isatty(STDIN_FILENO))
		e = read_stdin(j, &data);
	if (e == EXIT_OK && data.len > 0) {
		if (j->text.len > 0)
			e = add_text(j, "", "\n\n", 2);
		data.data[data.len] = 0;
		if (e == EXIT_OK)
			e = add_text(j, "standard input", data.data, data.len);
	}
	buf_done(&data);
	if (e == EXIT_OK && j->text.len == 0)
		return usage_error(
			j, "there is nothing to ask: no instruction, and standard input is empty");
	return e;
}

/* ---- output ---- */

static json_t *usage_json(const struct resident_usage *u)
{
	return json_pack("{s:I, s:I, s:I, s:I}", "prompt_tokens", (json_int_t)u->prompt_tokens,
			 "cached_tokens", (json_int_t)u->cached_tokens, "answer_tokens",
			 (json_int_t)u->answer_tokens, "thought_tokens", (json_int_t)u->thought_tokens);
}

static json_t *timings_json(const struct resident_usage *u)
{
	return json_pack("{s:I, s:I, s:I}", "queue_us", (json_int_t)u->queue_us, "prefill_us",
			 (json_int_t)u->prefill_us, "decode_us", (json_int_t)u->decode_us);
}

/* The name of the model, when it can be had. */
static const char *model_name(struct chat *c)
{
	const struct resident_availability *v;

	if (!c->r || resident_get_availability(c->r, &v) < 0 || !v->model)
		return NULL;
	return v->model->name;
}

/* One object on one line, also when there was an error: then text is what had come, and error says
 * why there is no more. */
static enum exit_code print_json(struct job *j, const struct ask *a, enum exit_code e)
{
	const char *message = a->message ? a->message : resident_strerror(a->code);
	json_auto_t *failure = a->code == 0 ? json_null()
					    : json_pack("{s:i, s:s, s:I}", "code", -a->code,
							"message", message, "retry_after_ms",
							(json_int_t)a->retry_after_ms);
	json_auto_t *o = json_pack("{s:s, s:s, s:[], s:s?, s:o*, s:o*, s:O}", "text",
				   a->answer.data ? a->answer.data : "", "thought",
				   a->thought.data ? a->thought.data : "", "tool_calls",
				   "stop_reason", a->stop_reason[0] ? a->stop_reason : NULL,
				   "usage", usage_json(&a->usage), "timings",
				   timings_json(&a->usage), "error", failure);
	_cleanup_(freep) char *s = NULL;
	const char *name = model_name(&j->chat);

	if (o && json_object_set_new(o, "model", name ? json_string(name) : json_null()) == 0)
		s = json_dumps(o, JSON_COMPACT);
	if (!s || terminal_printf(&j->chat.out, "%s\n", s) < 0) {
		terminal_printf(&j->chat.err, "resident: the result cannot be written\n");
		return e == EXIT_OK ? EXIT_ERROR : e;
	}
	return e;
}

/* ---- what to do ---- */

/* Takes up the last conversation, or begins one. */
static enum exit_code load_transcript(struct job *j)
{
	struct transcript *t = &j->chat.transcript;
	int r = transcript_load(t);

	if (r == -EBADMSG)
		return usage_error(
			j, "the saved conversation cannot be read; `resident forget` removes it");
	if (r < 0 && r != -ENOENT)
		return usage_error(j, "the saved conversation cannot be read: %s",
				   resident_strerror(r));
	if (t->n > 0 && j->system)
		return usage_error(
			j, "--system belongs to the beginning of a conversation, not to --continue");
	return EXIT_OK;
}

static enum exit_code forget(struct job *j)
{
	struct transcript *t = &j->chat.transcript;
	int r;

	/* The file goes in any case; a session whose id cannot be read ends by itself. */
	if (transcript_load(t) == 0 && t->session[0] && resident_connect(NULL, &j->chat.r) == 0)
		chat_close_session(&j->chat);
	r = transcript_forget();
	if (r < 0 && r != -ENOENT)
		return usage_error(j, "the saved conversation cannot be removed: %s",
				   resident_strerror(r));
	return EXIT_OK;
}

static enum exit_code ask_once(struct job *j)
{
	struct chat *c = &j->chat;
	enum exit_code e;
	struct ask a;

	if (j->complete) {
		e = chat_complete(c, j->text.data, &a);
	} else if (!j->proceed) {
		e = chat_once(c, j->system, j->text.data, &a);
	} else {
		e = load_transcript(j);
		if (e != EXIT_OK)
			return e;
		if (j->system && transcript_add(&c->transcript, "system", j->system) < 0) {
			terminal_printf(&c->err, "resident: out of memory\n");
			return EXIT_ERROR;
		}
		e = chat_say(c, j->text.data, &a);
		if (c->r && c->transcript.n > 1)
			chat_save(c, true);
		else
			chat_close_session(c);
	}
	if (c->json && e != EXIT_NO_SERVICE)
		e = print_json(j, &a, e);
	ask_done(&a);
	return e;
}

static enum exit_code run(struct job *j, int argc, char **argv)
{
	bool end = false, ask_nothing;
	enum exit_code e;

	if (argc == 2 && streq(argv[1], "forget"))
		return forget(j);
	e = parse_options(j, argc, argv, &end);
	if (e != EXIT_OK || end)
		return e;
	if (j->system && !utf8_decodable(j->system, strlen(j->system)))
		return usage_error(j, "the system text is not valid UTF-8");
	ask_nothing = optind == argc && isatty(STDIN_FILENO);
	if (ask_nothing && (j->complete || j->chat.json || !j->chat.out.tty))
		return usage_error(j, "there is nothing to ask");
	if (ask_nothing) {
		e = j->proceed ? load_transcript(j) : EXIT_OK;
		return e == EXIT_OK ? repl_run(&j->chat, j->system) : e;
	}
	e = compose(j, argv + optind);
	if (e == EXIT_OK && ask_catch_interrupts() < 0)
		terminal_printf(&j->chat.err, "resident: Ctrl-C will end the program at once\n");
	return e == EXIT_OK ? ask_once(j) : e;
}

int main(int argc, char **argv)
{
	struct job j = { .chat = { .options = { .size = sizeof(struct resident_options) },
				   .save = true } };
	enum exit_code e;

	if (terminal_fill_standard() < 0)
		return EXIT_ERROR;
	terminal_init(&j.chat.out, STDOUT_FILENO, false);
	terminal_init(&j.chat.err, STDERR_FILENO, false);
	e = run(&j, argc, argv);
	e = report_output(&j.chat.err, "resident", &j.chat.out, e);
	chat_done(&j.chat);
	buf_done(&j.text);
	return (int)e;
}
