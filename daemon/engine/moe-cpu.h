/* SPDX-License-Identifier: MIT */
/*
 * moe-cpu.h: routing and experts of the CPU backend, as backend-cpu.c puts them into its table. What another backend may call of
 * them is in backend.h.
 *
 * Part of the CPU backend, engine thread only. Refuses to know the other operations.
 */
#pragma once

#include "daemon/engine/backend.h"
#include "daemon/engine/route.h"

/* What lasts longer than a call; in struct backend_cpu. */
struct moe_cpu {
	struct residency *residency;      /* NULL: all weights are where the mapping says */
	const struct backend_moe *routed; /* whose route is kept; NULL: none */
	struct route route;
	size_t mark;         /* where the arena was before it */
	struct moe_job *job; /* in the arena, from begin to end; NULL: none */
};

int moe_cpu_route(struct backend *b, const struct backend_moe *p, const float *router_logits,
		  size_t n_tok);
int moe_cpu_compute(struct backend *b, const struct backend_moe *p, const float *x, size_t n_tok,
		    float *out);
bool moe_cpu_wants_guess(struct backend *b);
int moe_cpu_guess(struct backend *b, const struct backend_moe *p, const float *router_logits,
		  size_t n_tok);
void moe_cpu_set_residency(struct backend *b, struct residency *r);
