/* SPDX-License-Identifier: MIT */
/*
 * delta-cpu.h: the gated delta net of the CPU backend, as backend-cpu.c puts it into its table.
 *
 * Part of the CPU backend, engine thread only. Refuses to know the other operations.
 */
#pragma once

#include "daemon/engine/backend.h"

int delta_cpu_compute(struct backend *b, const struct backend_delta *p, const float *qkv,
		      const float *alpha, const float *beta, float *out);
