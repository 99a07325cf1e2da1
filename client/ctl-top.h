/* SPDX-License-Identifier: MIT */
/*
 * ctl-top.h: what `residentctl top` shows: a look at the service, and a grid of characters that it is
 * drawn on.
 *
 * ctl-top-draw.c is pure and knows no terminal: the same grid goes to ncurses (ctl-top.c) and, as
 * lines of text, to a pipe. Main thread. Invariant: a cell holds a character that takes exactly one
 * column in the current locale, whatever the service sends: no control character gets further than
 * here, and nothing is drawn outside of the grid.
 */
#pragma once

#include "client/ctl-residency-view.h"

#include <wchar.h>

struct top_look {
	struct residency_view view; /* owned; tier NULL: there has been no look yet */
	uint64_t at_us;             /* when */
	uint32_t sessions, sessions_own;
};

enum top_style {
	TOP_PLAIN,
	TOP_TITLE,
	TOP_LABEL,
	TOP_ALERT,
	TOP_TRUNK,
	TOP_FIXED,
	TOP_CONVERSATIONS,
	TOP_BLOCKS,
	TOP_VRAM,
	TOP_GOOD,
	TOP_BAD,
	TOP_STYLE_MAX,
};

struct top_cell {
	wchar_t c;
	enum top_style style;
};

struct top_screen {
	unsigned int rows, columns, row; /* row: the one that is drawn next */
	struct top_cell *cells;          /* rows * columns, owned */
};

#define TOP_SIDE_MAX 1000u

/* Blank; sides are brought between 1 and TOP_SIDE_MAX. -ENOMEM. */
int top_screen_init(struct top_screen *s, unsigned int rows, unsigned int columns);
void top_screen_done(struct top_screen *s);
/* A row as text in the current locale, without the blanks at its end. -ENOMEM. */
int top_screen_line(const struct top_screen *s, unsigned int row, struct buf *out);

/* Draws now from row 0 on; before is the look before it, or NULL; alert is shown in the title's
 * place, or NULL. What has no room is left out, from the least important on. */
void top_draw(struct top_screen *s, const struct top_look *now, const struct top_look *before,
	      const char *alert);
