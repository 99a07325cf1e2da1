/* SPDX-License-Identifier: MIT */
/*
 * trace.h: recorded routing: which experts each token wanted, layer by layer. One JSON object a line:
 * {"tok": n, "layers": [[expert ids, ascending], ...]}, one list per layer with experts, decode steps in order.
 *
 * Any thread; owns nothing but what it returns. A file is hostile: a line that is not that is an error with its number.
 */
#pragma once

#include "daemon/base.h"

struct trace {
	uint32_t n_layers, n_experts; /* n_experts: the largest id + 1, or what the caller says */
	size_t n_steps;
	/* Wanted blocks, layer * n_experts + expert, in order; step s has [first[s], first[s + 1]). */
	uint32_t *wanted;
	size_t *first;
	size_t n_wanted;
};

/* n_experts: 0: from the file. -EBADMSG and the like with an error text naming the line. At most 2^28 wanted blocks. */
int trace_read(FILE *f, const char *name, uint32_t n_experts, struct trace *ret, char **ret_error);
void trace_done(struct trace *t);
/* Appends one line (with its newline) to b: counts[l] experts of layer l, lists one after the other. -ENOMEM. */
int trace_write_step(struct buf *b, uint64_t tok, uint32_t n_layers, const uint32_t *counts,
		     const uint32_t *experts);
