/* SPDX-License-Identifier: MIT */
/*
 * ctl-top.c: `residentctl top`: a look at the service every second, on a terminal of its own.
 *
 * Main thread. Owns the terminal between newterm() and endwin(), the signals meanwhile (they arrive on
 * a descriptor, so nothing runs inside ncurses), and the connection, which is made again when the
 * service restarts. Refuses to know what is drawn where: ctl-top-draw.c. Invariant: every way out
 * of watch() but SIGKILL gives the terminal back.
 */
#include "client/ctl-top.h"

#include "client/ctl.h"

#include <locale.h>
#include <ncurses.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>

#define INTERVAL_LEAST_S 0.1
#define INTERVAL_MOST_S  3600.0
#define TIMEOUT_MS       2000 /* a key waits as long */
#define PLAIN_COLUMNS    100u
#define PLAIN_ROWS       60u
#define CONTROL(key)     ((key)&0x1f)

struct top {
	struct ctl *c;
	struct top_look now, before;
	char alert[256]; /* "": none */
	uint64_t interval_us;
	int signals; /* signalfd */
};

static const struct {
	attr_t attributes;
	short colour; /* -1: the terminal's own */
} styles[TOP_STYLE_MAX] = {
	[TOP_PLAIN] = { A_NORMAL, -1 },
	[TOP_TITLE] = { A_BOLD, -1 },
	[TOP_LABEL] = { A_BOLD, COLOR_CYAN },
	[TOP_ALERT] = { A_REVERSE, COLOR_RED },
	[TOP_TRUNK] = { A_NORMAL, COLOR_BLUE },
	[TOP_FIXED] = { A_NORMAL, COLOR_MAGENTA },
	[TOP_CONVERSATIONS] = { A_NORMAL, COLOR_YELLOW },
	[TOP_BLOCKS] = { A_NORMAL, COLOR_GREEN },
	[TOP_VRAM] = { A_NORMAL, COLOR_CYAN },
	[TOP_GOOD] = { A_NORMAL, COLOR_GREEN },
	[TOP_BAD] = { A_NORMAL, COLOR_RED },
};

/* ---- the service ---- */

/* 0, or a code of libresident; -EBADMSG with a->bad set when the reply breaks the contract. */
static int look(struct ctl *c, struct args *a, struct top_look *ret)
{
	_cleanup_(freep) char *text = NULL;
	const struct resident_status *status;
	struct top_look l = {};
	json_auto_t *reply = NULL;
	int r;

	a->bad = NULL;
	r = resident_call(c->r, "GetResidency", NULL, &text);
	if (r == 0)
		r = resident_get_status(c->r, &status);
	if (r < 0)
		return r;
	reply = json_loads(text, 0, NULL);
	r = reply ? residency_view_read(a, reply, &l.view) : -ENOMEM;
	if (r < 0)
		return r;
	l.at_us = now_us();
	l.sessions = status->sessions;
	l.sessions_own = status->sessions_own;
	*ret = l;
	return 0;
}

/* Looks again, over a new connection when there is none. What goes wrong becomes the alert, and what
 * was seen last stays. */
static void look_again(struct top *t)
{
	struct ctl *c = t->c;
	struct top_look l;
	struct args a = {};
	int r = 0;

	if (!c->r)
		r = resident_connect(NULL, &c->r);
	if (r == 0) {
		resident_set_timeout(c->r, TIMEOUT_MS);
		r = look(c, &a, &l);
	}
	t->alert[0] = 0;
	if (r == 0) {
		residency_view_done(&t->before.view);
		t->before = t->now;
		t->now = l;
		return;
	}
	if (a.bad)
		snprintf(t->alert, sizeof(t->alert),
			 "the service does not speak the protocol: '%s' %s", a.bad, a.why);
	else if (r <= -RESIDENT_E_NO_MODEL)
		snprintf(t->alert, sizeof(t->alert), "%s", resident_last_error(c->r)->message);
	else
		snprintf(t->alert, sizeof(t->alert), "service away, trying again (%s)",
			 resident_strerror(r));
	if (r > -RESIDENT_E_NO_MODEL && !a.bad)
		c->r = resident_close(c->r);
}

/* ---- the terminal ---- */

static SCREEN *open_terminal(const struct ctl *c)
{
	const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
	SCREEN *screen;

	if (!c->out.tty || !term || streq(term, "dumb"))
		return NULL;
	screen = newterm(NULL, stdout, stdin);
	if (!screen)
		return NULL;
	cbreak();
	noecho();
	nodelay(stdscr, TRUE);
	curs_set(0);
	if ((no_color && *no_color) || !has_colors() || start_color() == ERR)
		return screen;
	use_default_colors();
	for (short i = 1; i < TOP_STYLE_MAX; i++)
		init_pair(i, styles[i].colour, -1);
	return screen;
}

static void draw(const struct top *t)
{
	struct top_screen s;

	if (top_screen_init(&s, (unsigned int)LINES, (unsigned int)COLS) < 0)
		return;
	top_draw(&s, &t->now, &t->before, *t->alert ? t->alert : NULL);
	erase();
	for (unsigned int i = 0; i < s.rows * s.columns; i++) {
		wchar_t text[] = { s.cells[i].c, 0 };
		cchar_t c;

		if (setcchar(&c, text, styles[s.cells[i].style].attributes, (short)s.cells[i].style,
			     NULL) == OK)
			mvadd_wch((int)(i / s.columns), (int)(i % s.columns), &c);
	}
	refresh();
	top_screen_done(&s);
}

static void fit_terminal(void)
{
	struct winsize size;

	if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 0)
		resizeterm(size.ws_row, size.ws_col);
}

/* The signal that ends it, or 0. */
static int take_signal(const struct top *t)
{
	struct signalfd_siginfo si;

	if (read(t->signals, &si, sizeof(si)) != sizeof(si))
		return 0;
	if (si.ssi_signo != SIGWINCH)
		return (int)si.ssi_signo;
	fit_terminal();
	return 0;
}

static bool key_quits(void)
{
	int key;

	while ((key = getch()) != ERR) {
		if (key == 'q' || key == 'Q')
			return true;
		if (key == CONTROL('L'))
			clearok(curscr, TRUE);
	}
	return false;
}

/* Until a key or a signal ends it. Returns the signal, or 0. */
static int watch(struct top *t)
{
	struct pollfd fds[] = { { .fd = t->signals, .events = POLLIN },
				{ .fd = isatty(STDIN_FILENO) ? STDIN_FILENO : -1, .events = POLLIN } };
	uint64_t next = now_us() + t->interval_us;

	for (;;) {
		uint64_t now = now_us();
		int n, signo;

		if (now >= next) {
			look_again(t);
			now = now_us();
			next = MAX(next + t->interval_us, now);
		}
		draw(t);
		n = poll(fds, ARRAY_SIZE(fds), (int)((next - now + 999) / 1000));
		if (n < 0 && errno != EINTR)
			return SIGHUP;
		if (n <= 0)
			continue;
		signo = fds[0].revents ? take_signal(t) : 0;
		if (signo != 0)
			return signo;
		if (fds[1].revents & (POLLHUP | POLLERR | POLLNVAL))
			return SIGHUP;
		if (fds[1].revents && key_quits())
			return 0;
	}
}

static enum exit_code watch_on(struct top *t, SCREEN *screen)
{
	int signo = watch(t);

	endwin();
	delscreen(screen);
	/* Ctrl-C is the way out as much as q is. */
	return signo == 0 || signo == SIGINT ? EXIT_OK : (enum exit_code)(128 + signo);
}

/* ---- once, as text ---- */

static enum exit_code print_once(struct top *t)
{
	_cleanup_(buf_done) struct buf text = {};
	struct terminal *out = &t->c->out;
	struct winsize size = {};
	struct top_screen s;
	size_t end = 0;
	int r;

	if (out->tty)
		ioctl(out->fd, TIOCGWINSZ, &size);
	r = top_screen_init(&s, PLAIN_ROWS, size.ws_col > 0 ? size.ws_col : PLAIN_COLUMNS);
	if (r == 0)
		top_draw(&s, &t->now, NULL, NULL);
	for (unsigned int row = 0; r == 0 && row < s.rows; row++) {
		size_t before = text.len;

		r = top_screen_line(&s, row, &text);
		if (text.len > before)
			end = text.len + 1;
		if (r == 0)
			r = buf_append(&text, "\n", 1);
	}
	top_screen_done(&s);
	if (r < 0)
		return ctl_usage_error(t->c, "out of memory");
	terminal_write(out, text.data, end);
	return EXIT_OK;
}

/* ---- all of it ---- */

static bool read_interval(const char *text, uint64_t *ret)
{
	char *end;
	double s;

	s = strtod(text, &end);
	if (end == text || *end || !(s >= INTERVAL_LEAST_S && s <= INTERVAL_MOST_S))
		return false;
	*ret = (uint64_t)(s * 1e6);
	return true;
}

static enum exit_code first_look(struct top *t)
{
	struct args a;
	int r = look(t->c, &a, &t->now);

	if (r == 0)
		return EXIT_OK;
	if (a.bad)
		return ctl_bad_reply(t->c, &a);
	return r == -ENOMEM ? ctl_usage_error(t->c, "out of memory")
			    : report_error(&t->c->err, PROGRAM, resident_last_error(t->c->r));
}

/* Signals are on their descriptor before the terminal is touched, so that none finds it half open. */
static enum exit_code run(struct top *t)
{
	static const int numbers[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH };
	SCREEN *screen;
	sigset_t set;

	sigemptyset(&set);
	for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
		sigaddset(&set, numbers[i]);
	t->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (t->signals < 0 || sigprocmask(SIG_BLOCK, &set, NULL) < 0) {
		terminal_printf(&t->c->err, PROGRAM ": signalfd: %m\n");
		return EXIT_ERROR;
	}
	screen = open_terminal(t->c);
	if (screen)
		return watch_on(t, screen);
	sigprocmask(SIG_UNBLOCK, &set, NULL);
	terminal_printf(&t->c->err, PROGRAM ": standard output is no terminal that can be drawn on, so this "
					    "is one look (--once)\n");
	return print_once(t);
}

enum exit_code ctl_top(struct ctl *c)
{
	struct top t = { .c = c, .interval_us = 1000000, .signals = -1 };
	enum exit_code e;

	if (c->json)
		return ctl_usage_error(c, "top has no --json; see `residentctl --json residency`");
	if (c->interval && !read_interval(c->interval, &t.interval_us))
		return ctl_usage_error(c, "--interval is a number of seconds, 0.1 to 3600");
	setlocale(LC_CTYPE, ""); /* not LC_NUMERIC: numbers look the same everywhere */
	e = first_look(&t);
	if (e == EXIT_OK)
		e = c->once ? print_once(&t) : run(&t);
	closep(&t.signals);
	residency_view_done(&t.now.view);
	residency_view_done(&t.before.view);
	return e;
}
