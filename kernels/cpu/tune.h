/* SPDX-License-Identifier: MIT */
/*
 * tune.h: which tiles are the fastest on this machine, by trying.
 *
 * Owns nothing that lasts; any thread, nothing else should run meanwhile. Refuses to know files: the caller keeps the result
 * (daemon/tiles.h). Tiles change no bit of a result, so a bad choice costs time and nothing else.
 */
#pragma once

#include "kernels/cpu/cpu.h"

/*
 * Tries columns of {4, 3, 2} for registers (eight and more are laid out for vectors of columns, by the kernels themselves), then rows for the first cache, then columns for the second, on products of
 * Q4_K rows of 2048: each the shortest of a few runs of about a millisecond. cost: what a run takes, in any unit; NULL: measured. -ENOMEM.
 */
struct tune_run {
	const struct cpu_kernels *k;
	const struct cpu_tiles *tiles;
	size_t n_cols;
};
int tune_tiles(const struct cpu_kernels *k, uint64_t (*cost)(void *arg, const struct tune_run *run),
	       void *arg, struct cpu_tiles *ret);
