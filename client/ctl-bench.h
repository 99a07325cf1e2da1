/* SPDX-License-Identifier: MIT */
/*
 * ctl-bench.h: what `residentctl bench` measured, and what is made of it: a table, CSV, JSON, a picture.
 *
 * ctl-bench.c asks the service and fills a struct bench; ctl-bench-view.c is pure. Main thread. Refuses to know
 * what a second run would say: every measurement is kept as it was. Invariant: a speed is of tokens that were
 * computed while this request was the engine's, waiting not among it.
 */
#pragma once

#include "daemon/base.h"

#include <jansson.h>

#define BENCH_POINTS_MAX 20 /* 512 doubled as often is beyond any context */
#define BENCH_RUNS_MAX   100
#define BENCH_FIRST_TOK  512
#define BENCH_WORDS      48

struct bench_run {
	uint64_t context;               /* tokens in the conversation when the answer began */
	uint64_t prompt_tok, prompt_us; /* computed of the prompt */
	uint64_t answer_tok, answer_steps, answer_us; /* steps: tokens that had to be computed for them */
	uint64_t queue_us;
	bool others; /* had requests meanwhile */
};

struct bench_point {
	uint64_t context; /* as was asked for */
	size_t n_runs;
	struct bench_run runs[BENCH_RUNS_MAX];
};

struct bench {
	const char *model, *backend;
	uint32_t threads;
	size_t n_points;
	struct bench_point points[BENCH_POINTS_MAX];
};

struct bench_speed {
	double min, median, max; /* tokens a second */
};

/* 512, 1024 ... as far as they are below `last`, and `last` itself. Returns how many; ret has room for BENCH_POINTS_MAX. */
size_t bench_contexts(uint64_t last, uint64_t *ret);
const char *bench_word(size_t i); /* i < BENCH_WORDS; with the space before it */
/* Appends words that are n_tok tokens in all, given those of each word; fewer where no word is short enough. -ENOMEM. */
int bench_text(struct buf *out, uint64_t n_tok, const uint32_t cost[static BENCH_WORDS], uint64_t *seed);

/* false: there is nothing that took time. */
bool bench_prompt_speed(const struct bench_point *p, struct bench_speed *ret);
bool bench_answer_speed(const struct bench_point *p, struct bench_speed *ret);

/* All append, and return 0 or -ENOMEM. */
int bench_put_table(struct buf *out, const struct bench *b);
int bench_put_csv(struct buf *out, const struct bench *b); /* a line a measurement */
int bench_put_svg(struct buf *out, const struct bench *b);
json_t *bench_json(const struct bench *b); /* NULL: memory, or a name that is no UTF-8 */
