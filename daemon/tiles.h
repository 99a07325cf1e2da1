/* SPDX-License-Identifier: MIT */
/*
 * tiles.h: the tiles of this machine's products (kernels/cpu/tune.h), measured once and kept in the state directory.
 *
 * Loop thread, before the engine has work. Never logs. Invariant: what is returned is in the ranges of cpu.h, whatever the file says.
 */
#pragma once

#include "daemon/base.h"
#include "kernels/cpu/cpu.h"

/*
 * The tiles kept for this processor and these kernels, else measured (a quarter of a second) and kept. state_dir NULL: there is no place for
 * them, and the table's own are good enough. 1: measured anew; 0; -errno: they could not be kept (*ret is set all the same).
 */
int tiles_get(const char *state_dir, const struct cpu_kernels *k, struct cpu_tiles *ret);
/* The file's text: "residentd-tiles 1", the processor, the kernels, three numbers, a line each. false: of another processor, or damaged. */
bool tiles_parse(const char *text, size_t len, const char *processor, const char *kernels,
		 struct cpu_tiles *ret);
