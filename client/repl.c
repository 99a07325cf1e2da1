/* SPDX-License-Identifier: MIT */
/*
 * repl.c: the conversation at a prompt. See repl.h.
 *
 * Owns the line editor, its history file (the user's alone) and the slash commands; refuses to know
 * how a question is answered. Ctrl-C at the prompt drops the line, during an answer the answer;
 * Ctrl-D ends.
 */
#include "client/repl.h"

#include "client/utf8.h"

#include <fcntl.h>
#include <histedit.h>
#include <locale.h>
#include <sys/stat.h>
#include <wchar.h>

#define HISTORY_LINES 1000

struct repl {
	struct chat *c;
	EditLine *el;
	History *history;
	char *history_path; /* NULL: not kept */
	const char *prompt;
	char *system; /* owned; NULL: none */
	bool quit;
};

static char *show_prompt(EditLine *el)
{
	struct repl *p = NULL;

	el_get(el, EL_CLIENTDATA, &p);
	return (char *)p->prompt;
}

/* For the editor, whose own way misses a Ctrl-C that comes between two keys: it would wait for the next. */
static int read_key(EditLine *el, wchar_t *ret)
{
	mbstate_t state = {};
	char byte;
	ssize_t n;

	(void)el;
	for (;;) {
		if (ask_wait_input(STDIN_FILENO) < 0)
			return -1;
		n = read(STDIN_FILENO, &byte, 1);
		if (n <= 0)
			return (int)n;
		switch (mbrtowc(ret, &byte, 1, &state)) {
		case (size_t)-2: continue;
		case (size_t)-1: *ret = 0xfffd; return 1;
		default: return 1;
		}
	}
}

/* One line without its newline into *line. 0; -EINTR: Ctrl-C; -ENODATA: Ctrl-D. */
static int read_line(struct repl *p, const char *prompt, struct buf *line)
{
	const char *s;
	int n = 0;

	p->prompt = prompt;
	line->len = 0;
	ask_at_prompt(true);
	s = el_gets(p->el, &n);
	if (ask_take_interrupt()) { /* the prompt comes again */
		el_reset(p->el);
		terminal_write(&p->c->out, "\n", 1);
		return -EINTR;
	}
	ask_at_prompt(false);
	if (!s || n <= 0) {
		terminal_write(&p->c->out, "\n", 1);
		return -ENODATA;
	}
	return buf_append(line, s, strcspn(s, "\n"));
}

/* Lines as long as they end in a backslash; Ctrl-D ends the message, too, when there is one. */
static int read_input(struct repl *p, struct buf *text)
{
	struct buf line = {};
	const char *prompt = "> ";
	bool more;
	int r;

	text->len = 0;
	do {
		r = read_line(p, prompt, &line);
		if (r == -ENODATA && text->len > 0) {
			r = 0;
			break;
		}
		if (r < 0)
			break;
		more = line.len > 0 && line.data[line.len - 1] == '\\';
		if (more)
			line.data[line.len - 1] = '\n';
		r = buf_append(text, line.data, line.len);
		prompt = ". ";
	} while (r == 0 && more);
	buf_done(&line);
	return r;
}

/* Lines up to one that is a single full stop, or Ctrl-D. */
static int read_paste(struct repl *p, struct buf *text)
{
	struct buf line = {};
	int r;

	text->len = 0;
	for (;;) {
		r = read_line(p, ". ", &line);
		if (r == -ENODATA || (r == 0 && line.len == 1 && line.data[0] == '.')) {
			r = 0;
			break;
		}
		if (r == 0)
			r = buf_append(text, line.data, line.len);
		if (r == 0)
			r = buf_append(text, "\n", 1);
		if (r < 0)
			break;
	}
	buf_done(&line);
	return r;
}

/* ---- talking ---- */

static void say(struct repl *p, const char *text)
{
	struct chat *c = p->c;
	struct ask a;

	if (!utf8_decodable(text, strlen(text))) {
		terminal_printf(&c->err, "resident: that line is not valid UTF-8\n");
		return;
	}
	if (c->transcript.n == 0 && p->system &&
	    transcript_add(&c->transcript, "system", p->system) < 0) {
		terminal_printf(&c->err, "resident: out of memory\n");
		return;
	}
	/* What went wrong has been said, and the next try may do better. */
	if (chat_say(c, text, &a) != EXIT_NO_SERVICE && c->transcript.n > 1)
		chat_save(c, false);
	ask_done(&a);
}

static void begin_new(struct repl *p)
{
	chat_close_session(p->c);
	transcript_done(&p->c->transcript);
}

/* ---- commands ---- */

static void command_new(struct repl *p, const char *argument)
{
	(void)argument;
	begin_new(p);
	terminal_printf(&p->c->err, "a new conversation\n");
}

static void command_system(struct repl *p, const char *argument)
{
	free(p->system);
	p->system = *argument ? strdup(argument) : NULL;
	begin_new(p);
	terminal_printf(&p->c->err, "a new conversation, %s\n",
			p->system ? "with this system text" : "without a system text");
}

static void command_think(struct repl *p, const char *argument)
{
	struct resident_options *o = &p->c->options;
	char *end;
	long n;

	if (streq(argument, "show") || streq(argument, "hide")) {
		p->c->show_thinking = streq(argument, "show");
		return;
	}
	n = streq(argument, "off") ? 0 : strtol(argument, &end, 10);
	if (streq(argument, "default")) {
		o->set &= ~RESIDENT_MAX_THINKING_TOKENS;
		o->max_thinking_tokens = 0;
	} else if (!streq(argument, "off") && (end == argument || *end || n < 0)) {
		terminal_printf(&p->c->err,
				"/think TOKENS, /think off, /think default, /think show, /think hide\n");
	} else {
		o->set |= RESIDENT_MAX_THINKING_TOKENS;
		o->max_thinking_tokens = n;
	}
}

/* The conversation as text that people read; never over a file that is there. */
static void command_save(struct repl *p, const char *argument)
{
	const struct transcript *t = &p->c->transcript;
	_cleanup_(closep) int fd = -1;
	struct buf text = {};
	ssize_t n = -1;

	if (!*argument) {
		terminal_printf(&p->c->err, "/save FILE\n");
		return;
	}
	for (size_t i = 0; i < t->n; i++)
		if (buf_printf(&text, "## %s\n\n%s\n\n", t->turns[i].role, t->turns[i].content) < 0)
			break;
	fd = open(argument, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd >= 0)
		n = write(fd, text.data ? text.data : "", text.len);
	if (n < 0)
		terminal_printf(&p->c->err, "%s: %s\n", argument, resident_strerror(-errno));
	else if ((size_t)n < text.len)
		terminal_printf(&p->c->err, "%s: not written whole\n", argument);
	buf_done(&text);
}

static void command_paste(struct repl *p, const char *argument)
{
	struct buf text = {};

	(void)argument;
	terminal_printf(&p->c->err, "paste; a line with a single full stop, or Ctrl-D, ends it\n");
	if (read_paste(p, &text) == 0 && text.len > 0)
		say(p, text.data);
	buf_done(&text);
}

static void command_quit(struct repl *p, const char *argument)
{
	(void)argument;
	p->quit = true;
}

static void command_help(struct repl *p, const char *argument);

static const struct command {
	const char *name, *argument, *help;
	void (*run)(struct repl *p, const char *argument);
} commands[] = {
	{ "/help", "", "this", command_help },
	{ "/new", "", "begin a new conversation", command_new },
	{ "/system", " TEXT", "begin a new conversation with TEXT as its system text", command_system },
	{ "/think", " N|off|default", "limit the thought, in tokens", command_think },
	{ "/think", " show|hide", "print the thought, or not", command_think },
	{ "/save", " FILE", "write the conversation to a new file", command_save },
	{ "/paste", "", "several lines as one message", command_paste },
	{ "/quit", "", "end; so does Ctrl-D", command_quit },
};

static void command_help(struct repl *p, const char *argument)
{
	(void)argument;
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
		int width = 24 - (int)strlen(commands[i].name);

		terminal_printf(&p->c->err, "%s%-*s%s\n", commands[i].name, width,
				commands[i].argument, commands[i].help);
	}
	terminal_printf(&p->c->err,
			"A backslash at the end of a line continues it. Ctrl-C stops an answer. // sends a line that\n"
			"begins with a slash.\n");
}

static void run_command(struct repl *p, const char *line)
{
	size_t n = strcspn(line, " \t\n");
	const char *argument = line + n + strspn(line + n, " \t\n");

	for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
		if (strlen(commands[i].name) == n && strncmp(commands[i].name, line, n) == 0) {
			commands[i].run(p, argument);
			return;
		}
	terminal_printf(&p->c->err, "no such command; /help lists them\n");
}

/* ---- the loop ---- */

static void open_history(struct repl *p)
{
	_cleanup_(freep) char *directory = NULL;
	HistEvent e;

	p->history = history_init();
	if (!p->history)
		return;
	history(p->history, &e, H_SETSIZE, HISTORY_LINES);
	history(p->history, &e, H_SETUNIQUE, 1);
	el_set(p->el, EL_HIST, history, p->history);
	if (!p->c->save || transcript_directory(&directory) < 0)
		return;
	if (asprintf(&p->history_path, "%s/history", directory) < 0)
		p->history_path = NULL;
	else
		history(p->history, &e, H_LOAD, p->history_path);
}

static void close_history(struct repl *p)
{
	HistEvent e;
	mode_t mask = umask(077); /* the file is written by libedit */

	if (p->history_path && history(p->history, &e, H_SAVE, p->history_path) < 0)
		terminal_printf(&p->c->err, "resident: the history is not saved to %s\n",
				p->history_path);
	umask(mask);
	if (p->history)
		history_end(p->history);
	free(p->history_path);
}

/* Says which model it is, or why there is none. */
static enum exit_code greet(struct repl *p)
{
	const struct resident_availability *v;
	struct chat *c = p->c;
	enum exit_code e = chat_connect(c);

	if (e != EXIT_OK)
		return e;
	if (resident_get_availability(c->r, &v) < 0)
		return report_error(&c->err, "resident", resident_last_error(c->r));
	if (streq(v->state, "unavailable")) {
		terminal_printf(&c->err, "resident: %s\n", v->reason ? v->reason : "there is no model");
		return EXIT_UNAVAILABLE;
	}
	terminal_printf(&c->err, "%s. /help lists the commands, Ctrl-D ends.\n",
			v->model    ? v->model->name
			: v->reason ? v->reason
				    : v->state);
	return EXIT_OK;
}

static void loop(struct repl *p)
{
	struct buf text = {};
	HistEvent e;
	int r;

	while (!p->quit) {
		r = read_input(p, &text);
		if (r == -EINTR)
			continue;
		if (r < 0)
			break;
		if (!text.data || text.data[strspn(text.data, " \t\n")] == 0)
			continue;
		if (p->history)
			history(p->history, &e, H_ENTER, text.data);
		if (text.data[0] != '/')
			say(p, text.data);
		else if (text.data[1] == '/')
			say(p, text.data + 1);
		else
			run_command(p, text.data);
	}
	buf_done(&text);
}

enum exit_code repl_run(struct chat *c, const char *system)
{
	struct repl p = { .c = c, .system = system ? strdup(system) : NULL };
	enum exit_code e;

	/* In a locale of one byte a character the editor drops letters that have more. */
	if (!setlocale(LC_CTYPE, "") || MB_CUR_MAX == 1)
		setlocale(LC_CTYPE, "C.UTF-8");
	e = greet(&p);
	if (e == EXIT_OK) {
		p.el = el_init("resident", stdin, stdout, stderr);
		if (!p.el || ask_catch_interrupts() < 0) {
			terminal_printf(&c->err, "resident: the terminal cannot be used\n");
			e = EXIT_ERROR;
		}
	}
	if (e == EXIT_OK) {
		el_set(p.el, EL_CLIENTDATA, &p);
		el_set(p.el, EL_PROMPT, show_prompt);
		el_set(p.el, EL_EDITOR, "emacs");
		el_set(p.el, EL_GETCFN, read_key);
		open_history(&p);
		loop(&p);
		if (c->transcript.n > 1)
			chat_save(c, true);
		else
			chat_close_session(c);
		close_history(&p);
	}
	if (p.el)
		el_end(p.el);
	free(p.system);
	return e;
}
