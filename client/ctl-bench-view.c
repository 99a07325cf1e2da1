/* SPDX-License-Identifier: MIT */
/*
 * ctl-bench-view.c: the contexts and the text of a benchmark, and what it measured as a table, CSV, JSON and
 * a picture. See ctl-bench.h.
 *
 * Pure; main thread. Owns the looks. Invariant: a point without a number is left out or said to have none, never
 * drawn as 0; the picture is well-formed XML whatever the model's name is, without scripts, links or fonts.
 */
#include "client/ctl-bench.h"

#include "client/ctl.h"

#include <math.h>

/* ---- what is asked ---- */

/* Common words of several lengths: a vocabulary of whatever language has them in few tokens. */
static const char *const words[] = {
	" time", " year", " people", " way",     " day",    " man",   " thing",   " world",
	" life", " hand", " part",   " child",   " eye",    " woman", " place",   " work",
	" week", " case", " point",  " company", " number", " group", " problem", " fact",
	" be",   " have", " do",     " say",     " get",    " make",  " go",      " know",
	" take", " see",  " come",   " think",   " look",   " want",  " give",    " use",
	" find", " tell", " ask",    " seem",    " feel",   " try",   " leave",   " call",
};
_Static_assert(ARRAY_SIZE(words) == BENCH_WORDS, "BENCH_WORDS");

const char *bench_word(size_t i)
{
	return words[i];
}

size_t bench_contexts(uint64_t last, uint64_t *ret)
{
	size_t n = 0;

	for (uint64_t c = BENCH_FIRST_TOK; c < last && n + 1 < BENCH_POINTS_MAX; c *= 2)
		ret[n++] = c;
	ret[n++] = last;
	return n;
}

static size_t next_word(uint64_t *seed)
{
	*seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (size_t)(*seed >> 33) % BENCH_WORDS;
}

int bench_text(struct buf *out, uint64_t n_tok, const uint32_t cost[static BENCH_WORDS], uint64_t *seed)
{
	while (n_tok > 0) {
		size_t i = next_word(seed), tried = 0;
		int r;

		while (cost[i] > n_tok && tried++ < BENCH_WORDS)
			i = (i + 1) % BENCH_WORDS;
		if (cost[i] > n_tok)
			return 0;
		r = buf_append(out, words[i], strlen(words[i]));
		if (r < 0)
			return r;
		n_tok -= MAX(cost[i], 1u);
	}
	return 0;
}

/* ---- speeds ---- */

static double prompt_speed(const struct bench_run *r)
{
	return r->prompt_us > 0 ? (double)r->prompt_tok * 1e6 / (double)r->prompt_us : 0;
}

static double answer_speed(const struct bench_run *r)
{
	return r->answer_us > 0 ? (double)r->answer_steps * 1e6 / (double)r->answer_us : 0;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static bool speed_of(const struct bench_point *p, double (*speed)(const struct bench_run *r),
		     struct bench_speed *ret)
{
	double x[BENCH_RUNS_MAX];
	size_t n = 0;

	for (size_t i = 0; i < p->n_runs; i++) {
		x[n] = speed(&p->runs[i]);
		n += x[n] > 0;
	}
	if (n == 0)
		return false;
	qsort(x, n, sizeof(*x), compare);
	*ret = (struct bench_speed){ .min = x[0],
				     .median = (x[(n - 1) / 2] + x[n / 2]) / 2,
				     .max = x[n - 1] };
	return true;
}

bool bench_prompt_speed(const struct bench_point *p, struct bench_speed *ret)
{
	return speed_of(p, prompt_speed, ret);
}

bool bench_answer_speed(const struct bench_point *p, struct bench_speed *ret)
{
	return speed_of(p, answer_speed, ret);
}

static bool had_others(const struct bench_point *p)
{
	for (size_t i = 0; i < p->n_runs; i++)
		if (p->runs[i].others)
			return true;
	return false;
}

static size_t most_runs(const struct bench *b)
{
	size_t most = 0;

	for (size_t i = 0; i < b->n_points; i++)
		most = MAX(most, b->points[i].n_runs);
	return most;
}

/* ---- table, CSV, JSON ---- */

/* The first append that failed stops all that follow. */
#define PUT(out, error, ...)                                    \
	do {                                                    \
		if ((error) == 0)                               \
			(error) = buf_printf(out, __VA_ARGS__); \
	} while (0)

static void cell(char text[64], bool there, const struct bench_speed *s, bool spread)
{
	if (!there)
		snprintf(text, 64, "-");
	else if (spread)
		snprintf(text, 64, "%.1f (%.1f to %.1f)", s->median, s->min, s->max);
	else
		snprintf(text, 64, "%.1f", s->median);
}

int bench_put_table(struct buf *out, const struct bench *b)
{
	bool spread = most_runs(b) > 1, others = false;
	int width = spread ? 28 : 10, e = 0;

	PUT(out, e, "%s; %s, %u threads\n\n%8s  %*s  %*s   tokens/s%s\n", b->model, b->backend,
	    b->threads, "context", width, "prompt", width, "answer",
	    spread ? ": median (least to most)" : "");
	for (size_t i = 0; i < b->n_points; i++) {
		const struct bench_point *p = &b->points[i];
		struct bench_speed prompt, answer;
		char text[2][64];

		if (p->n_runs == 0)
			continue;
		cell(text[0], bench_prompt_speed(p, &prompt), &prompt, spread);
		cell(text[1], bench_answer_speed(p, &answer), &answer, spread);
		PUT(out, e, "%8llu  %*s  %*s%s\n", (unsigned long long)p->context, width, text[0],
		    width, text[1], had_others(p) ? " *" : "");
		others = others || had_others(p);
	}
	if (others)
		PUT(out, e,
		    "\n* others had requests meanwhile, with which this one shared the machine\n");
	return e;
}

int bench_put_csv(struct buf *out, const struct bench *b)
{
	int e = 0;

	PUT(out, e,
	    "point,run,context,prompt_tokens,prompt_us,prompt_tokens_per_second,answer_tokens,answer_us,"
	    "answer_tokens_per_second,queue_us,others\n");
	for (size_t i = 0; i < b->n_points; i++) {
		const struct bench_point *p = &b->points[i];

		for (size_t k = 0; k < p->n_runs; k++) {
			const struct bench_run *r = &p->runs[k];

			PUT(out, e, "%llu,%zu,%llu,%llu,%llu,%.3f,%llu,%llu,",
			    (unsigned long long)p->context, k + 1, (unsigned long long)r->context,
			    (unsigned long long)r->prompt_tok, (unsigned long long)r->prompt_us,
			    prompt_speed(r), (unsigned long long)r->answer_tok,
			    (unsigned long long)r->answer_us);
			/* One token, or none, is no speed. */
			if (answer_speed(r) > 0)
				PUT(out, e, "%.3f", answer_speed(r));
			PUT(out, e, ",%llu,%d\n", (unsigned long long)r->queue_us, r->others);
		}
	}
	return e;
}

static json_t *run_json(const struct bench_run *r)
{
	double answer = answer_speed(r);

	return json_pack("{s:I, s:I, s:I, s:f, s:I, s:I, s:o, s:I, s:b}", "context",
			 (json_int_t)r->context, "prompt_tokens", (json_int_t)r->prompt_tok,
			 "prompt_us", (json_int_t)r->prompt_us, "prompt_tokens_per_second",
			 prompt_speed(r), "answer_tokens", (json_int_t)r->answer_tok, "answer_us",
			 (json_int_t)r->answer_us, "answer_tokens_per_second",
			 answer > 0 ? json_real(answer) : json_null(), "queue_us",
			 (json_int_t)r->queue_us, "others", r->others);
}

json_t *bench_json(const struct bench *b)
{
	json_auto_t *points = json_array();

	for (size_t i = 0; i < b->n_points; i++) {
		const struct bench_point *p = &b->points[i];
		json_auto_t *runs = json_array();

		for (size_t k = 0; k < p->n_runs; k++)
			if (json_array_append_new(runs, run_json(&p->runs[k])) < 0)
				return NULL;
		if (p->n_runs > 0 &&
		    json_array_append_new(points, json_pack("{s:I, s:O}", "context",
							    (json_int_t)p->context, "runs", runs)) < 0)
			return NULL;
	}
	return json_pack("{s:s, s:s, s:I, s:O}", "model", b->model, "backend", b->backend,
			 "threads", (json_int_t)b->threads, "points", points);
}

/* ---- the picture ---- */

#define MARGIN    16.0
#define AXIS_LEFT 52.0  /* room for speeds */
#define TOP       104.0 /* the titles */
#define PLOT_W    360.0
#define PLOT_H    240.0
#define PANEL_W   (AXIS_LEFT + PLOT_W + 28.0)
#define BOTTOM    64.0 /* contexts, and what they are */
#define WIDTH     (2 * MARGIN + 2 * PANEL_W)
#define HEIGHT    (TOP + PLOT_H + BOTTOM)

struct panel {
	const char *title, *colour;
	bool (*speed)(const struct bench_point *p, struct bench_speed *ret);
	double left, top_speed; /* top_speed: of the axis */
};

struct drawing {
	struct buf *out;
	int error;
	const struct bench *b;
	double first, last; /* contexts, as logarithms */
};

#define DRAW(d, ...) PUT((d)->out, (d)->error, __VA_ARGS__)

static void put_text(struct drawing *d, const char *text)
{
	if (d->error == 0)
		d->error = ctl_svg_put_text(d->out, text);
}

/* 1, 2 or 5 times a power of ten: at most six of them are `most`. */
static double tick_step(double most)
{
	double step = pow(10, floor(log10(most / 6)));

	if (step * 6 >= most)
		return step;
	if (step * 2 * 6 >= most)
		return step * 2;
	return step * 5 * 6 >= most ? step * 5 : step * 10;
}

static const char *context_text(uint64_t n, char text[24])
{
	if (n >= 1024 && n % 1024 == 0)
		snprintf(text, 24, "%lluk", (unsigned long long)(n / 1024));
	else
		snprintf(text, 24, "%llu", (unsigned long long)n);
	return text;
}

static double x_of(const struct drawing *d, const struct panel *p, uint64_t context)
{
	double span = d->last - d->first;

	return p->left + (span > 0 ? (log2((double)context) - d->first) / span : 0.5) * PLOT_W;
}

static double y_of(const struct panel *p, double speed)
{
	return TOP + PLOT_H * (1 - speed / p->top_speed);
}

static void put_head(struct drawing *d)
{
	size_t runs = most_runs(d->b);

	DRAW(d,
	     "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
	     "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\"%.0f\" height=\"%.0f\" "
	     "viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333333\">\n"
	     "<title>",
	     WIDTH, HEIGHT, WIDTH, HEIGHT);
	put_text(d, d->b->model);
	DRAW(d,
	     ": speed over context</title>\n<rect x=\"0.5\" y=\"0.5\" width=\"%.0f\" height=\"%.0f\" "
	     "rx=\"6\" fill=\"#ffffff\" stroke=\"#999999\"/>\n"
	     "<text x=\"%.0f\" y=\"28\" font-size=\"16\" font-weight=\"bold\">",
	     WIDTH - 1, HEIGHT - 1, MARGIN);
	put_text(d, d->b->model);
	DRAW(d, ": speed over context</text>\n<text x=\"%.0f\" y=\"48\">", MARGIN);
	put_text(d, d->b->backend);
	DRAW(d, ", %u threads", d->b->threads);
	if (runs > 1)
		DRAW(d, "; medians of %zu runs, with the least and the most", runs);
	DRAW(d, "</text>\n");
}

static void put_axes(struct drawing *d, const struct panel *p, double step)
{
	double right = p->left + PLOT_W, last = -PLOT_W;
	char text[24];

	DRAW(d, "<text x=\"%.1f\" y=\"%.1f\" font-size=\"13\" font-weight=\"bold\">%s</text>\n",
	     p->left, TOP - 14, p->title);
	DRAW(d, "<g font-size=\"10\" text-anchor=\"end\">\n");
	for (double v = 0; v <= p->top_speed * 1.0001; v += step) {
		DRAW(d,
		     "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n"
		     "<text x=\"%.1f\" y=\"%.1f\">%.4g</text>\n",
		     p->left, y_of(p, v), right, y_of(p, v), v > 0 ? "#e4e4e4" : "#666666",
		     p->left - 6, y_of(p, v) + 3.5, v);
	}
	DRAW(d, "</g>\n<g font-size=\"10\" text-anchor=\"middle\">\n");
	for (size_t i = 0; i < d->b->n_points; i++) {
		double x = x_of(d, p, d->b->points[i].context);

		/* The last one is no power of two, as a rule, and may be near the one before it. */
		if (d->b->points[i].n_runs == 0 || x - last < 26)
			continue;
		last = x;
		DRAW(d,
		     "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#666666\"/>\n"
		     "<text x=\"%.1f\" y=\"%.1f\">%s</text>\n",
		     x, TOP + PLOT_H, x, TOP + PLOT_H + 4, x, TOP + PLOT_H + 17,
		     context_text(d->b->points[i].context, text));
	}
	DRAW(d, "</g>\n<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">tokens in the conversation</text>\n",
	     p->left + PLOT_W / 2, TOP + PLOT_H + 38);
}

static void put_curve(struct drawing *d, const struct panel *p)
{
	struct bench_speed s;

	DRAW(d, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" stroke-linejoin=\"round\" points=\"",
	     p->colour);
	for (size_t i = 0; i < d->b->n_points; i++)
		if (p->speed(&d->b->points[i], &s))
			DRAW(d, "%.1f,%.1f ", x_of(d, p, d->b->points[i].context), y_of(p, s.median));
	DRAW(d, "\"/>\n<g stroke=\"%s\" fill=\"%s\">\n", p->colour, p->colour);
	for (size_t i = 0; i < d->b->n_points; i++) {
		const struct bench_point *point = &d->b->points[i];
		double x = x_of(d, p, point->context);

		if (!p->speed(point, &s))
			continue;
		if (s.max > s.min)
			DRAW(d, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", x,
			     y_of(p, s.min), x, y_of(p, s.max));
		/* Hollow where others had a part in it. */
		DRAW(d, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\"%s><title>%llu tokens: %.1f tokens/s%s</title></circle>\n",
		     x, y_of(p, s.median), had_others(point) ? " fill=\"#ffffff\"" : "",
		     (unsigned long long)point->context, s.median,
		     had_others(point) ? ", while others had requests" : "");
	}
	DRAW(d, "</g>\n");
}

static void put_panel(struct drawing *d, struct panel *p)
{
	struct bench_speed s;
	double most = 0, step;

	for (size_t i = 0; i < d->b->n_points; i++)
		if (p->speed(&d->b->points[i], &s))
			most = MAX(most, s.max);
	step = tick_step(most > 0 ? most : 1);
	p->top_speed = step * MAX(ceil(most / step), 1.0);
	put_axes(d, p, step);
	put_curve(d, p);
}

int bench_put_svg(struct buf *out, const struct bench *b)
{
	struct drawing d = { .out = out, .b = b, .first = INFINITY };
	struct panel prompt = { .title = "prompt, tokens/s",
				.colour = "#003f7f",
				.speed = bench_prompt_speed,
				.left = MARGIN + AXIS_LEFT },
		     answer = { .title = "answer, tokens/s",
				.colour = "#b44a00",
				.speed = bench_answer_speed,
				.left = MARGIN + PANEL_W + AXIS_LEFT };
	bool others = false;

	for (size_t i = 0; i < b->n_points; i++) {
		double x = log2((double)MAX(b->points[i].context, UINT64_C(1)));

		if (b->points[i].n_runs == 0)
			continue;
		d.first = MIN(d.first, x);
		d.last = MAX(d.last, x);
		others = others || had_others(&b->points[i]);
	}
	put_head(&d);
	if (others)
		DRAW(&d, "<text x=\"%.0f\" y=\"66\">Hollow points: others had requests meanwhile.</text>\n",
		     MARGIN);
	put_panel(&d, &prompt);
	put_panel(&d, &answer);
	DRAW(&d, "</svg>\n");
	return d.error;
}
