/* SPDX-License-Identifier: MIT */
/*
 * inspect.h: where the model's memory is: for who asks (GetResidency), for a trace file (TraceRouting), and from the tracer (the feed).
 *
 * Loop thread. The engine fills the numbers between two steps; this file asks it by mail and makes them readable. Refuses to know what
 * they mean for the budget (pressure.c).
 */
#pragma once

#include "daemon/conn.h"

/* These answer c's current call, at once or when the engine has. */
void inspect_residency(struct conn *c, bool blocks);
void inspect_trace(struct conn *c, int64_t tokens); /* -1: until it hangs up */
void inspect_last_resort(struct conn *c); /* systemd-oomd: when the memory is given back */
void inspect_hang_up(struct conn *c);

/* The Gpu of GetStatus. NULL: no memory. */
json_t *inspect_gpu(const struct daemon *d);
const char *inspect_gpu_state(enum engine_card_state s);

void inspect_done(struct daemon *d, struct engine_inspect *i); /* EVENT_INSPECTED */
void inspect_traced(struct daemon *d, struct engine_trace *t); /* EVENT_TRACE */
/* The model, or how its experts are managed, may have changed: the feed follows. Called after the engine has let go of the old one. */
void inspect_follow_model(struct daemon *d, const struct model *old);
void inspect_stop(struct daemon *d);
