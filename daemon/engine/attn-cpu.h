/* SPDX-License-Identifier: MIT */
/*
 * attn-cpu.h: rope and attention of the CPU backend, as backend-cpu.c puts them into its table.
 *
 * Part of the CPU backend, engine thread only. Refuses to know the other operations.
 */
#pragma once

#include "daemon/engine/backend.h"

int attn_cpu_rope(struct backend *b, const struct backend_rope *p, float *x, size_t stride,
		  size_t n_head, size_t dim);
int attn_cpu_compute(struct backend *b, const struct backend_attn *p, const float *q,
		     const float *k, const float *v, float *out);
