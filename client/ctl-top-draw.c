/* SPDX-License-Identifier: MIT */
/*
 * ctl-top-draw.c: a look at the service to a grid of characters. See ctl-top.h.
 */
#include "client/ctl-top.h"

#include "client/ctl.h"
#include "client/utf8.h"

#include <limits.h>

#define LABEL_COLUMNS 10u
#define TEXT_COLUMNS  36u /* behind a bar */
#define BAR_LEAST     8u

/* ---- the grid ---- */

int top_screen_init(struct top_screen *s, unsigned int rows, unsigned int columns)
{
	*s = (struct top_screen){
		.rows = CLAMP(rows, 1u, TOP_SIDE_MAX),
		.columns = CLAMP(columns, 1u, TOP_SIDE_MAX),
	};
	s->cells = calloc((size_t)s->rows * s->columns, sizeof(*s->cells));
	if (!s->cells)
		return -ENOMEM;
	for (size_t i = 0; i < (size_t)s->rows * s->columns; i++)
		s->cells[i].c = L' ';
	return 0;
}

void top_screen_done(struct top_screen *s)
{
	free(s->cells);
	*s = (struct top_screen){};
}

int top_screen_line(const struct top_screen *s, unsigned int row, struct buf *out)
{
	const struct top_cell *cell = &s->cells[(size_t)row * s->columns];
	unsigned int n = s->columns;
	int r = 0;

	while (n > 0 && cell[n - 1].c == L' ')
		n--;
	for (unsigned int i = 0; i < n && r == 0; i++) {
		char bytes[MB_LEN_MAX];
		int len = wctomb(bytes, cell[i].c);

		r = buf_append(out, len > 0 ? bytes : "?", len > 0 ? (size_t)len : 1);
	}
	return r;
}

static void put_cell(struct top_screen *s, unsigned int column, wchar_t c, enum top_style style)
{
	if (s->row < s->rows && column < s->columns)
		s->cells[(size_t)s->row * s->columns + column] = (struct top_cell){ c, style };
}

/* Writes a text from that column on; what is not one column wide becomes '?'. Returns the column behind. */
static unsigned int put_text(struct top_screen *s, unsigned int column, enum top_style style,
			     const char *text)
{
	size_t len = strlen(text), n;
	uint32_t c = 0;

	for (size_t i = 0; i < len && column < s->columns; i += MAX(n, (size_t)1), column++) {
		n = utf8_next(text + i, len - i, &c);
		put_cell(s, column, n > 0 && wcwidth((wchar_t)c) == 1 ? (wchar_t)c : L'?', style);
	}
	return column;
}

_printf_(4, 5) static unsigned int put(struct top_screen *s, unsigned int column,
				       enum top_style style, const char *format, ...)
{
	char *text;
	va_list ap;
	int n;

	va_start(ap, format);
	n = vasprintf(&text, format, ap);
	va_end(ap);
	if (n < 0)
		return column;
	column = put_text(s, column, style, text);
	free(text);
	return column;
}

/* ---- bars ---- */

struct part {
	double share; /* of the whole bar */
	char c;
	enum top_style style;
};

static unsigned int bar_columns(const struct top_screen *s)
{
	unsigned int taken = LABEL_COLUMNS + 2 + 1 + TEXT_COLUMNS;

	return s->columns >= taken + BAR_LEAST ? s->columns - taken : BAR_LEAST;
}

/* "label     [||||    ] ": returns the column where the text goes. */
static unsigned int put_bar(struct top_screen *s, const char *label, const struct part *parts, size_t n)
{
	unsigned int width = bar_columns(s), column = LABEL_COLUMNS, at = 0;
	double sum = 0;

	put_text(s, 0, TOP_LABEL, label);
	put_cell(s, column++, L'[', TOP_PLAIN);
	for (const struct part *p = parts; p < parts + n; p++) {
		sum = CLAMP(sum + p->share, 0.0, 1.0);
		for (; at < (unsigned int)(sum * width + 0.5); at++)
			put_cell(s, column + at, (wchar_t)p->c, p->style);
	}
	put_cell(s, column + width, L']', TOP_PLAIN);
	return column + width + 2;
}

static double share(double part, double whole)
{
	return whole > 0 ? CLAMP(part / whole, 0.0, 1.0) : 0;
}

/* ---- between two looks ---- */

struct page {
	struct top_screen *s;
	const struct top_look *now, *before; /* before: or NULL */
	const struct residency_view *v;      /* now's */
	double seconds;                      /* between them; 0: nothing can be said of that time */
};

/* 0: there is no look before, or it saw another model. */
static double seconds_between(const struct top_look *now, const struct top_look *before)
{
	if (!before || !before->view.tier || now->at_us <= before->at_us ||
	    now->view.counters.steps < before->view.counters.steps ||
	    now->view.counters.decode_tokens < before->view.counters.decode_tokens ||
	    now->view.counters.hits < before->view.counters.hits ||
	    now->view.counters.misses < before->view.counters.misses ||
	    now->view.vram_hits < before->view.vram_hits ||
	    now->view.counters.stall_us < before->view.counters.stall_us ||
	    now->view.counters.bytes_read < before->view.counters.bytes_read)
		return 0;
	return (double)(now->at_us - before->at_us) / 1e6;
}

#define DELTA(p, name) ((p)->v->counters.name - (p)->before->view.counters.name)
#define DELTA_VRAM(p)  ((p)->v->vram_hits - (p)->before->view.vram_hits)

/* ---- rows ---- */

static void draw_tier(const struct page *p)
{
	const struct residency_view *v = p->v;

	put_text(p->s, 0, TOP_LABEL, "tier");
	put(p->s, LABEL_COLUMNS, TOP_PLAIN, "%s%s%s", v->tier, *v->tier_reason ? ": " : "",
	    v->tier_reason);
}

static void draw_speed(const struct page *p)
{
	const struct residency_view *v = p->v;
	unsigned int column;

	put_text(p->s, 0, TOP_LABEL, "speed");
	column = put(p->s, LABEL_COLUMNS, TOP_PLAIN, "%.1f tokens/s answering",
		     v->decode_tokens_per_second);
	if (p->seconds > 0 && residency_view_managed(v))
		column = put(p->s, column, TOP_PLAIN, " (%.1f now)",
			     (double)DELTA(p, decode_tokens) / p->seconds);
	put(p->s, column, TOP_PLAIN, ", %.0f reading", v->prefill_tokens_per_second);
}

static void draw_work(const struct page *p)
{
	put_text(p->s, 0, TOP_LABEL, "work");
	put(p->s, LABEL_COLUMNS, TOP_PLAIN, "%llu running, %llu waiting, %u sessions (%u yours)",
	    (unsigned long long)p->v->running, (unsigned long long)p->v->queued, p->now->sessions,
	    p->now->sessions_own);
}

static const struct part *memory_parts(const struct residency_view *v, struct part parts[4])
{
	double max = (double)v->budget.max;

	parts[0] = (struct part){ share((double)v->budget.trunk, max), '#', TOP_TRUNK };
	parts[1] = (struct part){ share((double)v->budget.fixed, max), '+', TOP_FIXED };
	parts[2] = (struct part){ share((double)v->budget.kv, max), '=', TOP_CONVERSATIONS };
	parts[3] = (struct part){ share((double)v->budget.blocks, max), '|', TOP_BLOCKS };
	return parts;
}

static void draw_memory(const struct page *p)
{
	const struct residency_view *v = p->v;
	struct part parts[4];
	char used[32], max[32];
	unsigned int column;

	column = put_bar(p->s, "memory", memory_parts(v, parts), ARRAY_SIZE(parts));
	put(p->s, column, TOP_PLAIN, "%s of %s",
	    ctl_bytes_text(v->budget.trunk + v->budget.fixed + v->budget.kv + v->budget.blocks, used),
	    ctl_bytes_text(v->budget.max, max));
}

static void draw_legend(const struct page *p)
{
	const struct residency_view *v = p->v;
	const struct {
		const char *name;
		uint64_t bytes;
	} texts[] = { { "trunk", v->budget.trunk },
		      { "fixed", v->budget.fixed },
		      { "sessions", v->budget.kv },
		      { "blocks", v->budget.blocks } };
	struct part parts[ARRAY_SIZE(texts)];
	unsigned int column = LABEL_COLUMNS;
	char bytes[32];

	memory_parts(v, parts);
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
		put_cell(p->s, column, (wchar_t)parts[i].c, parts[i].style);
		column = put(p->s, column + 2, TOP_PLAIN, "%s %s  ", texts[i].name,
			     ctl_bytes_text(texts[i].bytes, bytes));
	}
}

static void draw_blocks(const struct page *p)
{
	const struct residency_view *v = p->v;
	char in[32], all[32];
	struct part part = { share((double)v->budget.blocks, (double)v->budget.blocks_all), '|',
			     TOP_BLOCKS };
	unsigned int column;

	column = put_bar(p->s, "blocks", &part, 1);
	put(p->s, column, TOP_PLAIN, "%.0f %%: %s of %s", part.share * 100,
	    ctl_bytes_text(v->budget.blocks, in), ctl_bytes_text(v->budget.blocks_all, all));
}

static void draw_vram(const struct page *p)
{
	const struct residency_view *v = p->v;
	double budget = (double)v->vram.budget_bytes;
	uint64_t trunk = MIN(v->vram.trunk_bytes, v->vram.fixed_bytes);
	const struct part parts[] = {
		{ share((double)trunk, budget), '#', TOP_TRUNK },
		{ share((double)(v->vram.fixed_bytes - trunk), budget), '+', TOP_FIXED },
		{ share((double)v->vram.block_bytes, budget), '|', TOP_VRAM },
	};
	unsigned int column = put_bar(p->s, "VRAM", parts, ARRAY_SIZE(parts));
	char used[32], max[32], left[32];

	put(p->s, column, TOP_PLAIN, "%s of %s, %s free",
	    ctl_bytes_text(v->vram.fixed_bytes + v->vram.slot_bytes, used),
	    ctl_bytes_text(v->vram.budget_bytes, max), ctl_bytes_text(v->vram.free_bytes, left));
}

static void draw_hits(const struct page *p)
{
	const struct residency_view *v = p->v;
	double percent = residency_view_percent(residency_view_hits(v), v->counters.misses);
	double vram = residency_view_vram_percent(v);
	const struct part parts[] = { { vram / 100, '#', TOP_VRAM },
				      { (percent - vram) / 100, '|', TOP_GOOD } };
	unsigned int column = put_bar(p->s, "hits", parts, ARRAY_SIZE(parts));

	column = put(p->s, column, TOP_PLAIN, "%.1f %%", percent);
	if (p->seconds > 0)
		put(p->s, column, TOP_PLAIN, " (%.1f now, %llu misses)",
		    residency_view_percent(DELTA(p, hits) + DELTA_VRAM(p), DELTA(p, misses)),
		    (unsigned long long)DELTA(p, misses));
}

/* The part of what was wanted that the GPU had. */
static void draw_vram_hits(const struct page *p)
{
	const struct residency_view *v = p->v;
	double percent = residency_view_vram_percent(v);
	const struct part part = { percent / 100, '#', TOP_VRAM };
	unsigned int column = put_bar(p->s, "in VRAM", &part, 1);

	column = put(p->s, column, TOP_PLAIN, "%.1f %% of what was wanted", percent);
	if (p->seconds > 0)
		put(p->s, column, TOP_PLAIN, " (%.1f now)",
		    residency_view_percent(DELTA_VRAM(p), DELTA(p, hits) + DELTA(p, misses)));
}

static void draw_stalls(const struct page *p)
{
	const struct residency_view *v = p->v;
	double tokens = (double)MAX(v->counters.decode_tokens, UINT64_C(1));
	unsigned int column;

	put_text(p->s, 0, TOP_LABEL, "stalls");
	column = put(p->s, LABEL_COLUMNS, TOP_PLAIN, "%.0f us a token",
		     (double)v->counters.stall_us / tokens);
	if (p->seconds > 0)
		column = put(p->s, column, TOP_PLAIN, " (%.0f %% of the time now)",
			     (double)DELTA(p, stall_us) / p->seconds / 1e4);
	if (v->counters.read_errors > 0)
		put(p->s, column, TOP_BAD, ", %llu read errors",
		    (unsigned long long)v->counters.read_errors);
}

static void draw_disk(const struct page *p)
{
	const struct residency_view *v = p->v;
	char bytes[32];
	unsigned int column;

	put_text(p->s, 0, TOP_LABEL, "disk");
	column = put(p->s, LABEL_COLUMNS, TOP_PLAIN, "%s read",
		     ctl_bytes_text(v->counters.bytes_read, bytes));
	if (p->seconds > 0)
		column = put(p->s, column, TOP_PLAIN, " (%s/s now)",
			     ctl_bytes_text((uint64_t)((double)DELTA(p, bytes_read) / p->seconds),
					    bytes));
	put(p->s, column, TOP_PLAIN, ", prefetch %s: %llu used, %llu wasted",
	    v->counters.prefetching ? "on" : "off", (unsigned long long)v->counters.prefetch_used,
	    (unsigned long long)v->counters.prefetch_wasted);
}

static void draw_pressure(const struct page *p)
{
	const struct residency_view *v = p->v;
	struct part part = { v->pressure.some_avg10 / 100, '|', TOP_BAD };
	unsigned int column = put_bar(p->s, "pressure", &part, 1);
	char bytes[32];

	put(p->s, column, TOP_PLAIN, "%.1f %%, %s free, %llu down %llu up", v->pressure.some_avg10,
	    ctl_bytes_text(v->pressure.available, bytes),
	    (unsigned long long)v->pressure.steps_down, (unsigned long long)v->pressure.steps_up);
}

static void draw_faults(const struct page *p)
{
	const struct residency_view *v = p->v;

	put_text(p->s, 0, TOP_LABEL, "faults");
	put(p->s, LABEL_COLUMNS, v->counters.compute_major_faults > 0 ? TOP_BAD : TOP_PLAIN,
	    "%llu of compute threads, %llu blocks taken by the kernel",
	    (unsigned long long)v->counters.compute_major_faults,
	    (unsigned long long)v->counters.kernel_took);
}

static void draw_feed(const struct page *p)
{
	const struct residency_view *v = p->v;

	put_text(p->s, 0, TOP_LABEL, "feed");
	put(p->s, LABEL_COLUMNS, TOP_PLAIN, "%s%s%s", v->feed, v->feed_reason ? ": " : "",
	    v->feed_reason ? v->feed_reason : "");
}

static void draw_policy(const struct page *p)
{
	const struct residency_view *v = p->v;

	put_text(p->s, 0, TOP_LABEL, "policy");
	put(p->s, LABEL_COLUMNS, TOP_PLAIN, "%s%s%s", v->policy,
	    v->method ? ", blocks read by " : "", v->method ? v->method : "");
}

/* ---- histogram ---- */

static const char *span_text(double us, char text[16])
{
	if (us >= 999.5e3)
		snprintf(text, 16, "%.3g s", us / 1e6);
	else if (us >= 999.5)
		snprintf(text, 16, "%.3g ms", us / 1e3);
	else
		snprintf(text, 16, "%.3g us", us);
	return text;
}

/* Fault latencies as far as the rows go: neighbouring buckets share a row when there are too many. */
static void draw_histogram(struct top_screen *s, const struct residency_view *v)
{
	size_t first = 0, end = v->n_histogram, step = 1;
	size_t room = s->rows > s->row + 1 ? s->rows - s->row - 1 : 0;
	double most = 0, sums[RESIDENCY_VIEW_BUCKETS_MAX] = {};

	while (first < end && v->histogram[first] == 0)
		first++;
	while (end > first && v->histogram[end - 1] == 0)
		end--;
	if (first == end || room == 0)
		return;
	while ((end - 1) / step - first / step + 1 > room)
		step *= 2;
	for (size_t i = first; i < end; i++) {
		sums[i / step] += (double)v->histogram[i];
		most = MAX(most, sums[i / step]);
	}
	put_text(s, 0, TOP_TITLE, "major faults by latency, from");
	for (size_t i = first / step; i <= (end - 1) / step; i++) {
		struct part part = { share(sums[i], most), '|', TOP_BLOCKS };
		char label[16], text[16];
		unsigned int column;

		s->row++;
		snprintf(label, sizeof(label), "%8s",
			 span_text((double)(UINT64_C(1) << (i * step)) / 1e3, text));
		column = put_bar(s, label, &part, 1);
		put(s, column, TOP_PLAIN, "%.0f", sums[i]);
	}
	s->row++;
}

/* ---- all of it ---- */

static void draw_title(struct top_screen *s, const struct residency_view *v, const char *alert)
{
	if (!alert) {
		put_text(s, 0, TOP_TITLE, v->model ? v->model : "no model");
		return;
	}
	for (unsigned int i = 0; i < s->columns; i++)
		put_cell(s, i, L' ', TOP_ALERT);
	put_text(s, 0, TOP_ALERT, alert);
}

void top_draw(struct top_screen *s, const struct top_look *now, const struct top_look *before,
	      const char *alert)
{
	const struct residency_view *v = &now->view;
	const struct page page = {
		.s = s, .now = now, .before = before, .v = v, .seconds = seconds_between(now, before)
	};
	bool managed = v->tier && residency_view_managed(v);
	/* Where the screen is lower than rows, the row is left out. */
	const struct {
		void (*draw)(const struct page *p); /* NULL: an empty row */
		unsigned int rows;
		bool wanted;
	} table[] = {
		{ draw_tier, 10, true },      { NULL, 24, true },
		{ draw_speed, 2, true },      { draw_work, 5, true },
		{ draw_memory, 3, v->model }, { draw_legend, 13, v->model },
		{ draw_blocks, 7, managed },  { draw_vram, 8, v->has_vram },
		{ draw_hits, 4, managed },    { draw_vram_hits, 11, v->has_vram },
		{ draw_stalls, 6, managed },  { draw_disk, 12, managed },
		{ draw_pressure, 8, true },   { draw_faults, 9, managed },
		{ draw_policy, 15, managed }, { draw_feed, 14, v->model },
		{ NULL, 24, true },
	};

	s->row = 0;
	draw_title(s, v, alert);
	s->row++;
	for (size_t i = 0; v->tier && i < ARRAY_SIZE(table); i++) {
		if (!table[i].wanted || s->rows < table[i].rows)
			continue;
		if (table[i].draw)
			table[i].draw(&page);
		s->row++;
	}
	draw_histogram(s, v);
}
