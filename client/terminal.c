/* SPDX-License-Identifier: MIT */
/*
 * terminal.c: escaping and progress. See terminal.h.
 *
 * Writes with write(2), unbuffered: tokens are to be seen when they come, and a signal handler must
 * be able to interrupt a write to a reader that does not read.
 */
#include "client/terminal.h"

#include "client/utf8.h"

#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/ioctl.h>

#define ERASE_LINE     "\r\033[K"
#define PLAIN_EVERY_US 5000000

int terminal_fill_standard(void)
{
	/* Not close-on-exec: a command that is run inherits these, too. */
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) < 0)
			return -errno;
	return 0;
}

void terminal_init(struct terminal *t, int fd, bool raw)
{
	const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");

	*t = (struct terminal){ .fd = fd, .tty = isatty(fd), .raw = raw, .at_start = true };
	t->fancy = t->tty && term && *term && !streq(term, "dumb") && !(no_color && *no_color);
}

static bool is_control(uint32_t c)
{
	if (c == '\n' || c == '\t')
		return false;
	return c < 0x20 || (c >= 0x7f && c < 0xa0) || (c >= 0x202a && c <= 0x202e) ||
	       (c >= 0x2066 && c <= 0x2069);
}

int terminal_escape(struct buf *out, const char *text, size_t len)
{
	size_t plain = 0, i = 0;
	int r = 0;

	while (i < len && r == 0) {
		uint32_t c = (unsigned char)text[i];
		size_t n = utf8_next(text + i, len - i, &c);

		if (n > 0 && !is_control(c)) {
			i += n;
			continue;
		}
		r = buf_append(out, text + plain, i - plain);
		if (r == 0)
			r = c < 0x7f || n == 0 ? buf_printf(out, "\\x%02x", c)
					       : buf_printf(out, "\\u%04x", c);
		i += MAX(n, (size_t)1);
		plain = i;
	}
	return r == 0 ? buf_append(out, text + plain, len - plain) : r;
}

static int write_all(int fd, const char *data, size_t len)
{
	while (len > 0) {
		struct pollfd p = { .fd = fd, .events = POLLOUT };
		ssize_t n = write(fd, data, len);

		if (n < 0 && errno == EAGAIN)
			n = poll(&p, 1, -1) < 0 ? -1 : 0;
		if (n < 0)
			return -errno;
		data += n;
		len -= (size_t)n;
	}
	return 0;
}

static int put(struct terminal *t, const char *data, size_t len)
{
	int r = write_all(t->fd, data, len);

	if (r < 0 && r != -EINTR && t->error == 0)
		t->error = r;
	return r;
}

int terminal_write(struct terminal *t, const char *text, size_t len)
{
	struct buf escaped = {};
	int r;

	if (len == 0)
		return 0;
	terminal_progress_erase(t);
	t->at_start = text[len - 1] == '\n';
	if (!t->tty || t->raw)
		return put(t, text, len);
	r = terminal_escape(&escaped, text, len);
	if (r == 0)
		r = put(t, escaped.data, escaped.len);
	buf_done(&escaped);
	return r;
}

int terminal_printf(struct terminal *t, const char *format, ...)
{
	_cleanup_(freep) char *s = NULL;
	va_list ap;
	int n;

	va_start(ap, format);
	n = vasprintf(&s, format, ap);
	va_end(ap);
	if (n < 0) {
		s = NULL;
		return -ENOMEM;
	}
	return terminal_write(t, s, (size_t)n);
}

int terminal_end_line(struct terminal *t)
{
	return t->at_start ? 0 : terminal_write(t, "\n", 1);
}

int terminal_dim(struct terminal *t, bool on)
{
	terminal_progress_erase(t);
	return t->fancy ? put(t, on ? "\033[2m" : "\033[0m", 4) : 0;
}

/* The first columns of text. Characters count as one column: a wide one in a model's name wraps the
 * line, no more. */
static size_t fit(const char *text, size_t len, size_t columns)
{
	size_t i = 0;
	uint32_t c;

	for (; i < len && columns > 0; columns--)
		i += MAX(utf8_next(text + i, len - i, &c), (size_t)1);
	return MIN(i, len);
}

void terminal_progress(struct terminal *t, const char *text)
{
	struct winsize size = {};
	struct buf line = {};
	uint64_t now = now_us();

	if (!t->tty || !t->at_start)
		return;
	if (!t->fancy && t->progress_us != 0 && now - t->progress_us < PLAIN_EVERY_US)
		return;
	if (ioctl(t->fd, TIOCGWINSZ, &size) < 0 || size.ws_col == 0)
		size.ws_col = 80;
	t->progress_us = now;
	if (t->fancy)
		buf_append(&line, ERASE_LINE, strlen(ERASE_LINE));
	if (terminal_escape(&line, text, fit(text, strlen(text), size.ws_col - 1u)) == 0 &&
	    (t->fancy || buf_append(&line, "\n", 1) == 0) && put(t, line.data, line.len) == 0)
		t->progress = t->fancy;
	buf_done(&line);
}

void terminal_progress_erase(struct terminal *t)
{
	if (!t->progress)
		return;
	t->progress = false;
	put(t, ERASE_LINE, strlen(ERASE_LINE));
}
