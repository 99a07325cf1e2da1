/* SPDX-License-Identifier: MIT */
/*
 * ctl-svg.c: the heat map of `residentctl residency --svg`: a cell a block, layers down, experts across.
 *
 * Pure; main thread. Owns the looks: hue says where a block is (hues that all kinds of colour vision
 * tell apart), shade how hot it is (heat has a long tail, so a shade is its logarithm). Refuses to
 * know files. Invariant: what comes out is well-formed XML whatever the strings in the view are,
 * without scripts, links or fonts of its own; it paints its own ground, so that any page will do.
 */
#include "client/ctl-residency-view.h"

#include "client/ctl.h"
#include "client/utf8.h"

#define MARGIN      16u
#define AXIS_LEFT   56u /* room for layer numbers */
#define TOP         84u /* title, a line below it, expert numbers */
#define LEGEND_ROW  22u
#define SHADES      8u
#define WIDTH_LEAST 640u /* the lines of text have room */

struct colour {
	unsigned char r, g, b;
};

static const struct tier {
	char place;
	const char *name;
	struct colour cold, hot;
} tiers[] = {
	{ 'v', "VRAM", { 0xfd, 0xe9, 0xc6 }, { 0xb4, 0x4a, 0x00 } },
	{ 'h', "memory", { 0xd6, 0xe7, 0xf7 }, { 0x00, 0x3f, 0x7f } },
	{ 'c', "on its way", { 0xf6, 0xd8, 0xec }, { 0x99, 0x20, 0x6d } },
	{ '-', "disk", { 0xec, 0xec, 0xec }, { 0x40, 0x40, 0x40 } },
};

static const struct tier *tier_of(char place)
{
	for (size_t i = 0; i + 1 < ARRAY_SIZE(tiers); i++)
		if (tiers[i].place == place)
			return &tiers[i];
	return &tiers[ARRAY_SIZE(tiers) - 1];
}

static unsigned int bits(uint32_t x)
{
	return x == 0 ? 0 : 32u - (unsigned int)__builtin_clz(x);
}

static unsigned int mix(unsigned int cold, unsigned int hot, unsigned int shade)
{
	return (cold * (SHADES - 1 - shade) + hot * shade) / (SHADES - 1);
}

struct map {
	struct buf *out;
	int error; /* of the first append that failed; the others do nothing then */
	const struct residency_view *v;
	unsigned int cell_w, cell_h, width, height, experts, hottest;
	struct {
		uint64_t blocks, bytes;
	} in[ARRAY_SIZE(tiers)];
};

#define PUT(m, ...)                                                     \
	do {                                                            \
		if ((m)->error == 0)                                    \
			(m)->error = buf_printf((m)->out, __VA_ARGS__); \
	} while (0)

static void put_fill(struct map *m, const struct tier *t, unsigned int shade)
{
	PUT(m, " fill=\"#%02x%02x%02x\"", mix(t->cold.r, t->hot.r, shade),
	    mix(t->cold.g, t->hot.g, shade), mix(t->cold.b, t->hot.b, shade));
}

int ctl_svg_put_text(struct buf *out, const char *text)
{
	struct buf plain = {};
	uint32_t c = 0;
	int r = terminal_escape(&plain, text, strlen(text));

	for (size_t i = 0, n; r == 0 && i < plain.len; i += n) {
		const char *s = plain.data + i;

		n = utf8_next(s, plain.len - i, &c);
		if ((c & 0xfffe) == 0xfffe)
			r = buf_printf(out, "?");
		else if (c < 0x80 && strchr("<>&\"", (int)c))
			r = buf_printf(out, "&#%u;", c);
		else
			r = buf_append(out, s, n);
	}
	buf_done(&plain);
	return r;
}

static void put_text(struct map *m, const char *text)
{
	if (m->error == 0)
		m->error = ctl_svg_put_text(m->out, text);
}

/* Counts what the legend and the page's size need. */
static int measure(struct map *m)
{
	unsigned int layers = (unsigned int)m->v->n_layers, told = 0;

	for (size_t i = 0; i < m->v->n_layers; i++) {
		const struct residency_view_layer *l = &m->v->layers[i];

		if (!l->heat || !l->place || l->n_experts == 0)
			continue;
		told++;
		m->experts = MAX(m->experts, l->n_experts);
		for (uint32_t e = 0; e < l->n_experts; e++) {
			size_t t = (size_t)(tier_of(l->place[e]) - tiers);

			m->hottest = MAX(m->hottest, (unsigned int)l->heat[e]);
			m->in[t].blocks++;
			m->in[t].bytes += l->block_bytes;
		}
	}
	if (told == 0)
		return -ENODATA;
	m->cell_w = CLAMP(1280 / m->experts, 4u, 48u);
	m->cell_h = CLAMP(640 / layers, 8u, 32u);
	m->width = MAX(2 * MARGIN + AXIS_LEFT + m->experts * m->cell_w, WIDTH_LEAST);
	m->height = TOP + layers * m->cell_h + LEGEND_ROW * (unsigned int)(ARRAY_SIZE(tiers) + 1) +
		    MARGIN;
	return 0;
}

static void put_head(struct map *m)
{
	const struct residency_view *v = m->v;
	const char *name = v->model ? v->model : "the model";

	PUT(m,
	    "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
	    "<svg xmlns=\"http://www.w3.org/2000/svg\" version=\"1.1\" width=\"%u\" height=\"%u\" "
	    "viewBox=\"0 0 %u %u\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333333\">\n"
	    "<title>",
	    m->width, m->height, m->width, m->height);
	put_text(m, name);
	PUT(m,
	    ": where its experts are</title>\n<rect x=\"0.5\" y=\"0.5\" width=\"%u\" height=\"%u\" rx=\"6\" "
	    "fill=\"#ffffff\" stroke=\"#999999\"/>\n"
	    "<text x=\"%u\" y=\"28\" font-size=\"16\" font-weight=\"bold\">",
	    m->width - 1, m->height - 1, MARGIN);
	put_text(m, name);
	PUT(m, ": where its experts are</text>\n<text x=\"%u\" y=\"48\">tier ", MARGIN);
	put_text(m, v->tier);
	PUT(m, ", policy ");
	put_text(m, v->policy);
	PUT(m, ", %.1f %% hits", residency_view_percent(residency_view_hits(v), v->counters.misses));
	if (v->has_vram)
		PUT(m, ", %.1f %% in VRAM", residency_view_vram_percent(v));
	PUT(m, "; a row is a layer, a column an expert</text>\n");
}

/* Every how many cells there is room for a number. */
static unsigned int label_step(unsigned int cell, unsigned int room)
{
	unsigned int step = 1;

	while (step * cell < room)
		step *= 2;
	return step;
}

static void put_axes(struct map *m)
{
	unsigned int across = label_step(m->cell_w, 32), down = label_step(m->cell_h, 12);
	unsigned int x0 = MARGIN + AXIS_LEFT;

	PUT(m, "<g font-size=\"10\" text-anchor=\"middle\">\n");
	for (unsigned int e = 0; e < m->experts; e += across)
		PUT(m, "<text x=\"%u\" y=\"%u\">%u</text>\n", x0 + e * m->cell_w + m->cell_w / 2,
		    TOP - 6, e);
	PUT(m, "</g>\n<g font-size=\"10\" text-anchor=\"end\">\n");
	for (unsigned int i = 0; i < m->v->n_layers; i += down)
		PUT(m, "<text x=\"%u\" y=\"%u\">%s%u</text>\n", x0 - 6,
		    TOP + i * m->cell_h + m->cell_h / 2 + 4, i == 0 ? "layer " : "",
		    m->v->layers[i].layer);
	PUT(m, "</g>\n");
}

static void put_layer(struct map *m, const struct residency_view_layer *l, unsigned int y)
{
	if (!l->heat || !l->place)
		return;
	PUT(m, "<g transform=\"translate(%u,%u)\">\n", MARGIN + AXIS_LEFT, y);
	for (uint32_t e = 0; e < l->n_experts; e++) {
		const struct tier *t = tier_of(l->place[e]);

		/* A pixel of ground is left between cells. */
		PUT(m, "<rect x=\"%u\" width=\"%u\" height=\"%u\"", e * m->cell_w, m->cell_w - 1,
		    m->cell_h - 1);
		put_fill(m, t, bits(l->heat[e]) * (SHADES - 1) / MAX(bits(m->hottest), 1u));
		PUT(m, "><title>layer %u, expert %u: %s, heat %u</title></rect>\n", l->layer, e,
		    t->name, l->heat[e]);
	}
	PUT(m, "</g>\n");
}

static void put_legend(struct map *m, unsigned int y)
{
	unsigned int x = MARGIN + SHADES * 17;
	char bytes[32];

	PUT(m,
	    "<text x=\"%u\" y=\"%u\">cold</text>\n<text x=\"%u\" y=\"%u\" text-anchor=\"end\">hot</text>\n"
	    "<text x=\"%u\" y=\"%u\">heat 0 to %u, by its logarithm</text>\n",
	    MARGIN, y, x, y, x + 12, y, m->hottest);
	for (size_t t = 0; t < ARRAY_SIZE(tiers); t++, y += LEGEND_ROW) {
		for (unsigned int s = 0; s < SHADES; s++) {
			PUT(m, "<rect x=\"%u\" y=\"%u\" width=\"16\" height=\"14\"",
			    MARGIN + s * 17, y + 8);
			put_fill(m, &tiers[t], s);
			PUT(m, "/>\n");
		}
		PUT(m, "<text x=\"%u\" y=\"%u\">%s: %llu blocks, %s</text>\n", x + 12, y + 19,
		    tiers[t].name, (unsigned long long)m->in[t].blocks,
		    ctl_bytes_text(m->in[t].bytes, bytes));
	}
}

int ctl_svg_heat_map(struct buf *out, const struct residency_view *v)
{
	struct map m = { .out = out, .v = v };
	int r = measure(&m);

	if (r < 0)
		return r;
	put_head(&m);
	put_axes(&m);
	for (size_t i = 0; i < v->n_layers; i++)
		put_layer(&m, &v->layers[i], TOP + (unsigned int)i * m.cell_h);
	put_legend(&m, TOP + (unsigned int)v->n_layers * m.cell_h + LEGEND_ROW);
	PUT(&m, "</svg>\n");
	return m.error;
}
