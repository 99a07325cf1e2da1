/* SPDX-License-Identifier: MIT */
/*
 * test-terminal.c: what reaches a terminal, and what reaches a pipe. The terminal is a pty; its
 * other end is read back.
 */
#include "tests/test.h"

#include "client/terminal.c"

#include <poll.h>
#include <pthread.h>
#include <pty.h>

/* An open terminal of 40 columns with output processing off, so that bytes come back as they were
 * written. */
static void open_terminal(int *master, int *slave)
{
	struct winsize size = { .ws_col = 40, .ws_row = 10 };
	struct termios raw;

	assert_int_equal(openpty(master, slave, NULL, NULL, &size), 0);
	assert_int_equal(tcgetattr(*slave, &raw), 0);
	cfmakeraw(&raw);
	assert_int_equal(tcsetattr(*slave, TCSANOW, &raw), 0);
	assert_int_equal(fcntl(*master, F_SETFL, O_NONBLOCK), 0);
}

/* What there is, and no more. A terminal's other end gets what was written a moment later: a busy machine makes it two pieces. */
static void assert_read(int fd, const char *expected)
{
	size_t len = strlen(expected), n = 0;
	char got[4096];

	do {
		struct pollfd p = { .fd = fd, .events = POLLIN };
		ssize_t r;

		if (n < len)
			(void)poll(&p, 1, 10000);
		r = read(fd, got + n, sizeof(got) - 1 - n);
		if (r <= 0)
			break;
		n += (size_t)r;
	} while (n < sizeof(got) - 1);
	got[n] = 0;
	assert_string_equal(got, expected);
}

static void escape(void **state)
{
	static const struct {
		const char *in, *out;
	} cases[] = {
		{ "", "" },
		{ "plain\ttext\n", "plain\ttext\n" },
		{ "\033]0;title\a", "\\x1b]0;title\\x07" },
		{ "\033[2J", "\\x1b[2J" },
		{ "a\rb\bc", "a\\x0db\\x08c" },
		{ "\x7f", "\\u007f" }, /* jansson lets it pass: what comes out has to be JSON still */
		{ "\xc2\x9b"
		  "31m",
		  "\\u009b31m" },                          /* C1: CSI as one character */
		{ "\xc2\x80\xc2\xa0", "\\u0080\xc2\xa0" }, /* the first of C1; no-break space is none */
		{ "\x9b", "\\x9b" },                       /* the same as a byte that is no UTF-8 */
		{ "\xe2\x80\xae"
		  "evil\xe2\x80\xac",
		  "\\u202eevil\\u202c" },
		{ "\xe2\x81\xa6\xe2\x81\xa9", "\\u2066\\u2069" },
		{ "\xe2\x80\xa9\xe2\x80\xaf", "\xe2\x80\xa9\xe2\x80\xaf" }, /* their neighbours */
		{ "\xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80" },
		{ "\xc0\x9b\xed\xa0\x80\xf4\x90\x80\x80",
		  "\\xc0\\x9b\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80" },
		{ "\xe2\x82", "\\xe2\\x82" }, /* cut */
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct buf b = {};

		assert_int_equal(terminal_escape(&b, cases[i].in, strlen(cases[i].in)), 0);
		assert_string_equal(b.data, cases[i].out);
		buf_done(&b);
	}
}

/* Whatever 100000 random bytes are, no control character but newline and tab comes out. */
static void escape_anything(void **state)
{
	char in[100000];
	struct buf b = {};
	uint32_t x = 1, c = 0;

	(void)state;
	for (size_t i = 0; i < sizeof(in); i++) {
		x = x * 1664525 + 1013904223;
		/* Half of it from the bytes that make C1 and bidi controls. */
		in[i] = (x >> 31) ? (char)(x >> 16) : "\xc2\x9b\xe2\x80\xae\x81\xa6\x1b"[x >> 16 & 7];
	}
	assert_int_equal(terminal_escape(&b, in, sizeof(in)), 0);
	for (size_t i = 0, n; i < b.len; i += n) {
		n = utf8_next(b.data + i, b.len - i, &c);
		assert_true(n > 0);
		assert_true(!is_control(c));
	}
	buf_done(&b);
}

static void kinds(void **state)
{
	struct terminal t;
	int master, slave, fds[2];

	(void)state;
	open_terminal(&master, &slave);
	setenv("TERM", "xterm", 1);
	unsetenv("NO_COLOR");
	terminal_init(&t, slave, false);
	assert_true(t.tty && t.fancy);
	setenv("NO_COLOR", "1", 1);
	terminal_init(&t, slave, false);
	assert_true(t.tty && !t.fancy);
	setenv("NO_COLOR", "", 1); /* empty is as good as unset, says its definition */
	setenv("TERM", "dumb", 1);
	terminal_init(&t, slave, false);
	assert_true(t.tty && !t.fancy);
	setenv("TERM", "xterm", 1);
	assert_int_equal(pipe(fds), 0);
	terminal_init(&t, fds[1], false);
	assert_true(!t.tty && !t.fancy);
	close(fds[0]);
	close(fds[1]);
	close(master);
	close(slave);
}

static void write_to(void **state)
{
	struct terminal t;
	int master, slave, fds[2];

	(void)state;
	open_terminal(&master, &slave);
	terminal_init(&t, slave, false);
	assert_int_equal(terminal_write(&t, "a\033[1mb", 6), 0);
	assert_false(t.at_start);
	assert_int_equal(terminal_end_line(&t), 0);
	assert_int_equal(terminal_end_line(&t), 0);
	assert_read(master, "a\\x1b[1mb\n");
	assert_int_equal(terminal_printf(&t, "%d%s", 1, "\a"), 0);
	assert_read(master, "1\\x07");
	terminal_init(&t, slave, true);
	assert_int_equal(terminal_write(&t, "\033[1m", 4), 0);
	assert_read(master, "\033[1m");

	assert_int_equal(pipe2(fds, O_NONBLOCK), 0);
	terminal_init(&t, fds[1], false);
	assert_int_equal(terminal_write(&t, "a\033[1mb", 6), 0);
	assert_int_equal(terminal_dim(&t, true), 0);
	terminal_progress(&t, "progress");
	assert_read(fds[0], "a\033[1mb"); /* bytes as they are, and nothing else */
	close(fds[0]);
	close(fds[1]);
	close(master);
	close(slave);
	assert_int_equal(terminal_write(&t, "a", 1), -EBADF);
}

static void *read_slowly(void *userdata)
{
	int fd = *(int *)userdata;
	uintptr_t total = 0;
	char got[65536];
	ssize_t n;

	usleep(50000);
	while ((n = read(fd, got, sizeof(got))) > 0)
		total += (uintptr_t)n;
	return (void *)total; /* of bytes */
}

/* A pipe that does not block, and is full most of the time, gets every byte. */
static void write_without_blocking(void **state)
{
	size_t len = 1 << 20;
	_cleanup_(freep) char *text = calloc(1, len);
	struct terminal t;
	pthread_t reader;
	void *total;
	int fds[2];

	(void)state;
	assert_int_equal(pipe(fds), 0);
	assert_int_equal(fcntl(fds[1], F_SETFL, O_NONBLOCK), 0);
	terminal_init(&t, fds[1], false);
	assert_int_equal(pthread_create(&reader, NULL, read_slowly, &fds[0]), 0);
	assert_int_equal(terminal_write(&t, text, len), 0);
	assert_int_equal(t.error, 0);
	close(fds[1]);
	pthread_join(reader, &total);
	assert_int_equal((uintptr_t)total, len);
	close(fds[0]);
}

static void first_error_is_kept(void **state)
{
	struct terminal t;
	int fd = open("/dev/full", O_WRONLY | O_CLOEXEC);

	(void)state;
	assert_true(fd >= 0);
	terminal_init(&t, fd, false);
	assert_int_equal(terminal_write(&t, "a", 1), -ENOSPC);
	close(fd);
	assert_int_equal(terminal_write(&t, "a", 1), -EBADF);
	assert_int_equal(t.error, -ENOSPC);
}

static void progress(void **state)
{
	struct terminal t;
	int master, slave;

	(void)state;
	open_terminal(&master, &slave);
	setenv("TERM", "xterm", 1);
	unsetenv("NO_COLOR");
	terminal_init(&t, slave, false);
	terminal_progress(&t, "one\033");
	assert_read(master, "\r\033[Kone\\x1b");
	terminal_progress(&t, "a line that is longer than the forty columns of this terminal");
	assert_read(master, "\r\033[Ka line that is longer than the forty co");
	terminal_write(&t, "text", 4);
	assert_read(master, "\r\033[Ktext"); /* erased before the text comes */
	terminal_progress(&t, "two");        /* there is text on the line */
	terminal_progress_erase(&t);
	assert_read(master, "");
	close(master);
	close(slave);
}

static void progress_plain(void **state)
{
	struct terminal t;
	int master, slave;

	(void)state;
	open_terminal(&master, &slave);
	setenv("TERM", "dumb", 1);
	terminal_init(&t, slave, false);
	terminal_progress(&t, "one");
	terminal_progress(&t, "two"); /* too soon for another line */
	terminal_progress_erase(&t);
	assert_int_equal(terminal_dim(&t, true), 0);
	assert_read(master, "one\n");
	t.progress_us -= PLAIN_EVERY_US;
	terminal_progress(&t, "three");
	assert_read(master, "three\n");
	close(master);
	close(slave);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(escape),
		cmocka_unit_test(escape_anything),
		cmocka_unit_test(kinds),
		cmocka_unit_test(write_to),
		cmocka_unit_test(write_without_blocking),
		cmocka_unit_test(first_error_is_kept),
		cmocka_unit_test(progress),
		cmocka_unit_test(progress_plain),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
