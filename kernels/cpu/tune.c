/* SPDX-License-Identifier: MIT */
/*
 * tune.c: see tune.h.
 *
 * One coordinate after the other, from the table's own choice on: the three hardly depend on each
 * other, and what is found is kept only where it is faster by more than what repeats differ by.
 */
#include "kernels/cpu/tune.h"

#include "daemon/base.h"

#include <string.h>
#include <time.h>

#define ROW      2048
#define N_ROWS   64
#define N_COLS   512
#define REPEAT   3
/* A few columns, where the registers' share is decided; many, where the caches' is. */
#define FEW_COLS 7

struct bench {
	char *w, *act;
	float *y;
};

static void bench_done(struct bench *b)
{
	free(b->w);
	free(b->act);
	free(b->y);
}

static int bench_make(struct bench *b, const struct cpu_kernels *k)
{
	size_t w_bytes = N_ROWS * quant_row_bytes(QUANT_Q4_K, ROW);
	size_t act_stride = quant_row_bytes(QUANT_Q8_K, ROW);
	float x[ROW];

	b->w = malloc(w_bytes);
	b->act = malloc(N_COLS * act_stride);
	b->y = malloc(N_COLS * N_ROWS * sizeof(float));
	if (!b->w || !b->act || !b->y)
		return -ENOMEM;
	memset(b->w, 0x35, w_bytes); /* ordinary numbers, the scales too */
	for (size_t c = 0; c < N_COLS; c++) {
		for (size_t i = 0; i < ROW; i++)
			x[i] = (float)((i * 7 + c) % 31) - 15.0f;
		k->quantize[QUANT_Q8_K](x, b->act + c * act_stride, ROW);
	}
	return 0;
}

static uint64_t thread_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* The shortest of a few runs, as the backend would cut them. */
static uint64_t measure(void *arg, const struct tune_run *run)
{
	size_t w_stride = quant_row_bytes(QUANT_Q4_K, ROW),
	       act_stride = quant_row_bytes(QUANT_Q8_K, ROW);
	const struct bench *b = arg;
	uint64_t best = UINT64_MAX;

	for (unsigned i = 0; i < REPEAT; i++) {
		uint64_t start = thread_ns();

		for (size_t c = 0; c < run->n_cols; c += run->tiles->l2_cols)
			run->k->matmul[QUANT_Q4_K](ROW, b->w, w_stride, N_ROWS,
						   b->act + c * act_stride, act_stride,
						   MIN((size_t)run->tiles->l2_cols, run->n_cols - c),
						   b->y + c * N_ROWS, N_ROWS, run->tiles);
		best = MIN(best, thread_ns() - start);
	}
	return best;
}

struct search {
	const struct cpu_kernels *k;
	uint64_t (*cost)(void *arg, const struct tune_run *run);
	void *arg;
	struct cpu_tiles best;
};

/* `which` of s->best becomes the cheapest of these; 3 % of a gain is noise. */
static void search_one(struct search *s, unsigned *which, const unsigned *values, size_t n, size_t n_cols)
{
	const struct tune_run run = { s->k, &s->best, n_cols };
	unsigned before = *which, best = before;
	uint64_t least = s->cost(s->arg, &run);

	for (size_t i = 0; i < n; i++) {
		uint64_t cost;

		if (values[i] == before)
			continue;
		*which = values[i];
		cost = s->cost(s->arg, &run);
		if (cost < least - least / 32) {
			least = cost;
			best = values[i];
		}
	}
	*which = best;
}

int tune_tiles(const struct cpu_kernels *k, uint64_t (*cost)(void *arg, const struct tune_run *run),
	       void *arg, struct cpu_tiles *ret)
{
	static const unsigned reg_cols[] = { 4, 3, 2 }, l1_rows[] = { 8, 16, 32, 64 },
			      l2_cols[] = { 32, 64, 128, 256 };
	_cleanup_(bench_done) struct bench bench = { 0 };
	struct search s = { k, cost, arg, k->tiles };
	int r;

	/* Tiles are nothing to the reference, and measuring with it takes seconds. */
	if (!cost && k == &cpu_kernels_ref) {
		*ret = k->tiles;
		return 0;
	}
	if (!cost) {
		r = bench_make(&bench, k);
		if (r < 0)
			return r;
		s.cost = measure;
		s.arg = &bench;
	}
	search_one(&s, &s.best.reg_cols, reg_cols, ARRAY_SIZE(reg_cols), FEW_COLS);
	search_one(&s, &s.best.l1_rows, l1_rows, ARRAY_SIZE(l1_rows), N_COLS);
	search_one(&s, &s.best.l2_cols, l2_cols, ARRAY_SIZE(l2_cols), N_COLS);
	*ret = s.best;
	return 0;
}
