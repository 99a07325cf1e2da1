/* SPDX-License-Identifier: MIT */
/*
 * state.h: what the model remembers of one sequence: KV page table, recurrent state, and one checkpoint.
 *
 * Owned by an engine session (engine.c); engine thread only. n_tok positions have been evaluated. KV can be cut at any
 * position, the recurrent state only at a checkpoint: state_rewind() goes to the nearest position at or before the wanted one
 * that can be restored (0 at worst) and says which, the caller evaluates the rest again.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/engine/kv.h"

struct state {
	struct kv_table kv;
	float *recurrent; /* model->recurrent_floats values, zero at position 0; NULL while nothing was evaluated */
	size_t n_tok;
	float *checkpoint; /* recurrent state at checkpoint_tok; NULL: none */
	size_t checkpoint_tok;
	size_t recurrent_bytes; /* of each of the two */
};

struct state *state_free(struct state *s, struct kv_arena *a); /* accepts NULL; returns NULL */
int state_new(struct state **ret);
/* Allocates the zeroed recurrent state of position 0 when the model has one and it is not there yet; by graph_forward(). -ENOSPC: no memory left for it. */
int state_begin(struct state *s, const struct model *m, struct kv_arena *a);
int state_checkpoint(struct state *s, const struct model *m, struct kv_arena *a); /* -ENOSPC: the old one stays */
size_t state_rewind(struct state *s, const struct model *m, struct kv_arena *a, size_t n_tok);
void state_reset(struct state *s, struct kv_arena *a); /* forgets everything; also after an aborted batch */
int state_clone(const struct state *s, const struct model *m, struct kv_arena *a, struct state **ret);
/* Bytes held by the sequence: its pages (shared ones counted whole) and its recurrent copies. */
size_t state_bytes(const struct state *s, const struct model *m, const struct kv_arena *a);
