/* SPDX-License-Identifier: MIT */
/*
 * terminal.h: what may be written where: model text escaped for terminals, and one line of progress
 * that goes away again.
 *
 * One struct terminal per stream; main thread. Knows nothing of requests. Invariant: unless `raw`
 * was asked for, no byte that came from a model, the service or a file reaches a terminal as a
 * control sequence; and what is not a terminal gets every byte as it is.
 */
#pragma once

#include "daemon/base.h"

struct terminal {
	int fd;
	bool tty;
	bool fancy; /* colours and cursor movement: a terminal, not TERM=dumb, no NO_COLOR */
	bool raw;
	bool at_start;        /* of a line */
	bool progress;        /* a progress line stands there */
	uint64_t progress_us; /* when it was drawn */
	int error;            /* of the first write that failed; not -EINTR */
};

/* Before anything else is opened: a standard descriptor that is closed would become a socket or a
 * pipe of the program, and take what is printed. What fills it fails on writing, as before. -errno. */
int terminal_fill_standard(void);
void terminal_init(struct terminal *t, int fd, bool raw);

/* Appends text with C0 (but newline and tab), DEL, C1, bidi controls and bytes that are no UTF-8 as
 * \x1b, \u202e. In JSON from jansson there are none that become \x, so it stays JSON. -ENOMEM. */
int terminal_escape(struct buf *out, const char *text, size_t len);

/* Writes all of it, escaped where t is a terminal; a progress line is erased first. Waits where t
 * does not block. -errno of write(2): -EINTR when a signal handler ran. */
int terminal_write(struct terminal *t, const char *text, size_t len);
_printf_(2, 3) int terminal_printf(struct terminal *t, const char *format, ...);
/* Ends an unfinished line. */
int terminal_end_line(struct terminal *t);
/* Faint text on or off, where t can. */
int terminal_dim(struct terminal *t, bool on);

/* Shows text (escaped, cut to the width) in place of the last progress line; on a terminal that is
 * not fancy, a line of its own at most every 5 s; elsewhere nothing. */
void terminal_progress(struct terminal *t, const char *text);
void terminal_progress_erase(struct terminal *t);
