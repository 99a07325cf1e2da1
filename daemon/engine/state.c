/* SPDX-License-Identifier: MIT */
/*
 * state.c: keeps, copies and restores what the model remembers of a sequence. See state.h.
 *
 * Owns the recurrent buffers; the pages belong to the arena. Engine thread only. Refuses to know
 * tokens and layers: recurrent state is a block of floats. Invariant: recurrent is NULL exactly at
 * n_tok == 0 (or when the model has none), and a checkpoint lies on the sequence's own past
 * (checkpoint_tok <= n_tok).
 */
#include "daemon/engine/state.h"

int state_new(struct state **ret)
{
	struct state *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	*ret = s;
	return 0;
}

static void checkpoint_drop(struct state *s)
{
	free(s->checkpoint);
	s->checkpoint = NULL;
	s->checkpoint_tok = 0;
}

void state_reset(struct state *s, struct kv_arena *a)
{
	kv_table_done(a, &s->kv);
	free(s->recurrent);
	s->recurrent = NULL;
	s->n_tok = 0;
	checkpoint_drop(s);
}

struct state *state_free(struct state *s, struct kv_arena *a)
{
	if (!s)
		return NULL;
	state_reset(s, a);
	free(s);
	return NULL;
}

/* Cache-line aligned, because the delta kernels stream through it at every token. Not zeroed. */
static float *recurrent_alloc(const struct model *m)
{
	size_t bytes;

	if (!mul_ok(m->recurrent_floats, sizeof(float), &bytes) || bytes > SIZE_MAX - 64)
		return NULL;
	return aligned_alloc(64, ALIGN_UP(bytes, (size_t)64));
}

int state_begin(struct state *s, const struct model *m)
{
	if (m->recurrent_floats == 0 || s->recurrent)
		return 0;
	s->recurrent = recurrent_alloc(m);
	if (!s->recurrent)
		return -ENOMEM;
	memset(s->recurrent, 0, m->recurrent_floats * sizeof(float));
	return 0;
}

static int recurrent_copy(const float *from, const struct model *m, float **ret)
{
	float *copy;

	if (!from) {
		*ret = NULL;
		return 0;
	}
	copy = recurrent_alloc(m);
	if (!copy)
		return -ENOMEM;
	memcpy(copy, from, m->recurrent_floats * sizeof(float));
	*ret = copy;
	return 0;
}

int state_checkpoint(struct state *s, const struct model *m)
{
	if (s->n_tok == 0) { /* nothing to keep: position 0 can always be restored */
		checkpoint_drop(s);
		return 0;
	}
	if (s->recurrent && !s->checkpoint) {
		int r = recurrent_copy(s->recurrent, m, &s->checkpoint);

		if (r < 0)
			return r;
	} else if (s->recurrent) {
		memcpy(s->checkpoint, s->recurrent, m->recurrent_floats * sizeof(float));
	}
	s->checkpoint_tok = s->n_tok;
	return 0;
}

size_t state_rewind(struct state *s, const struct model *m, struct kv_arena *a, size_t n_tok)
{
	if (n_tok >= s->n_tok)
		return s->n_tok;
	if (m->recurrent_floats > 0) {
		if (!s->checkpoint || s->checkpoint_tok > n_tok) {
			state_reset(s, a);
			return 0;
		}
		n_tok = s->checkpoint_tok;
		memcpy(s->recurrent, s->checkpoint, m->recurrent_floats * sizeof(float));
	} else if (s->checkpoint_tok > n_tok) {
		checkpoint_drop(s);
	}
	kv_table_truncate(a, &s->kv, n_tok);
	s->n_tok = n_tok;
	return n_tok;
}

int state_clone(const struct state *s, const struct model *m, struct kv_arena *a, struct state **ret)
{
	struct state *c;
	int r = state_new(&c);

	if (r < 0)
		return r;
	r = recurrent_copy(s->recurrent, m, &c->recurrent);
	if (r == 0)
		r = recurrent_copy(s->checkpoint, m, &c->checkpoint);
	if (r == 0)
		r = kv_table_clone(a, &s->kv, &c->kv);
	if (r < 0) {
		state_free(c, a);
		return r;
	}
	c->n_tok = s->n_tok;
	c->checkpoint_tok = s->checkpoint_tok;
	*ret = c;
	return 0;
}

size_t state_bytes(const struct state *s, const struct model *m, const struct kv_arena *a)
{
	size_t copies = (size_t)(s->recurrent != NULL) + (size_t)(s->checkpoint != NULL);

	return s->kv.n_pages * kv_arena_page_bytes(a) + copies * m->recurrent_floats * sizeof(float);
}
