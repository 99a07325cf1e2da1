/* SPDX-License-Identifier: MIT */
/*
 * fuzz-residency-view.c: a hostile service's reply to GetResidency. What is accepted keeps its promises, and
 * can be drawn: the rows of top as one column a character, the picture without a byte that could end
 * a text early.
 */
#include "client/ctl-residency-view.h"
#include "client/ctl-top.h"

#include <assert.h>
#include <locale.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define INPUT_MAX (64u << 10)

static void check_view(const struct residency_view *v)
{
	assert(v->tier && v->tier_reason && v->policy && v->feed);
	assert(v->n_histogram <= RESIDENCY_VIEW_BUCKETS_MAX);
	for (size_t i = 0; i < v->n_layers; i++) {
		const struct residency_view_layer *l = &v->layers[i];

		assert(l->n_host <= l->n_experts && l->n_vram <= l->n_experts);
		if (l->place)
			assert(strlen(l->place) == l->n_experts);
	}
	assert(!(residency_view_amplification(v) > 1e30));
}

static void check_picture(const struct residency_view *v)
{
	struct buf svg = {};
	int r = ctl_svg_heat_map(&svg, v);

	assert(r == 0 || r == -ENODATA);
	for (size_t i = 0; i < svg.len; i++)
		assert((unsigned char)svg.data[i] >= 0x20 || svg.data[i] == '\n' || svg.data[i] == '\t');
	if (r == 0)
		assert(strstr(svg.data, "</svg>\n") == svg.data + svg.len - 7);
	buf_done(&svg);
}

static void check_rows(const struct residency_view *v, unsigned int rows, unsigned int columns)
{
	struct top_look now = { .view = *v, .at_us = 2 }, before = { .view = *v, .at_us = 1 };
	struct top_screen s;
	struct buf line = {};

	assert(top_screen_init(&s, rows, columns) == 0);
	top_draw(&s, &now, &before, NULL);
	for (size_t i = 0; i < (size_t)s.rows * s.columns; i++)
		assert(wcwidth(s.cells[i].c) == 1 && s.cells[i].style < TOP_STYLE_MAX);
	for (unsigned int row = 0; row < s.rows; row++)
		assert(top_screen_line(&s, row, &line) == 0);
	top_screen_done(&s);
	buf_done(&line);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct residency_view v;
	json_t *reply;
	struct args a;

	setlocale(LC_CTYPE, "C.UTF-8");
	if (size > INPUT_MAX || varlink_parse((const char *)data, size, &reply, NULL) < 0)
		return 0;
	if (residency_view_read(&a, reply, &v) == 0) {
		assert(!a.bad);
		check_view(&v);
		check_picture(&v);
		check_rows(&v, 24, 80);
		check_rows(&v, 1 + (unsigned int)size % 30, 1 + (unsigned int)size % 97);
		residency_view_done(&v);
	} else {
		assert(a.bad && a.why);
	}
	json_decref(reply);
	return 0;
}
