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

static void drop(const struct state *s, struct kv_arena *a, float **p)
{
	const struct kv_memory *memory = kv_arena_memory(a);

	if (*p)
		memory->free(memory->userdata, *p, s->recurrent_bytes);
	*p = NULL;
}

static void checkpoint_drop(struct state *s, struct kv_arena *a)
{
	if (s->checkpoint)
		drop(s, a, &s->checkpoint);
	s->checkpoint_tok = 0;
}

void state_reset(struct state *s, struct kv_arena *a)
{
	kv_table_done(a, &s->kv);
	if (s->recurrent)
		drop(s, a, &s->recurrent);
	s->n_tok = 0;
	checkpoint_drop(s, a);
}

struct state *state_free(struct state *s, struct kv_arena *a)
{
	if (!s)
		return NULL;
	state_reset(s, a);
	free(s);
	return NULL;
}

/* Zeros, page-aligned on the host: the delta kernels stream through it at every token. */
static int recurrent_alloc(struct state *s, const struct model *m, struct kv_arena *a, float **ret)
{
	const struct kv_memory *memory = kv_arena_memory(a);
	size_t bytes;
	float *p;

	if (!mul_ok(m->recurrent_floats, sizeof(float), &bytes))
		return -ENOMEM;
	p = memory->alloc(memory->userdata, bytes, true);
	if (!p)
		return -ENOSPC;
	s->recurrent_bytes = bytes;
	*ret = p;
	return 0;
}

int state_begin(struct state *s, const struct model *m, struct kv_arena *a)
{
	if (m->recurrent_floats == 0 || s->recurrent)
		return 0;
	return recurrent_alloc(s, m, a, &s->recurrent);
}

static void recurrent_copy(const struct state *s, struct kv_arena *a, float *to, const float *from)
{
	const struct kv_memory *memory = kv_arena_memory(a);

	memory->copy(memory->userdata, to, from, s->recurrent_bytes);
}

/* A copy of `from`, of the same size, for s; none of nothing. */
static int recurrent_clone(struct state *s, const float *from, const struct model *m,
			   struct kv_arena *a, float **ret)
{
	int r;

	if (!from)
		return 0;
	r = recurrent_alloc(s, m, a, ret);
	if (r == 0)
		recurrent_copy(s, a, *ret, from);
	return r;
}

int state_checkpoint(struct state *s, const struct model *m, struct kv_arena *a)
{
	int r = 0;

	if (s->n_tok == 0) { /* nothing to keep: position 0 can always be restored */
		checkpoint_drop(s, a);
		return 0;
	}
	if (s->recurrent && !s->checkpoint)
		r = recurrent_clone(s, s->recurrent, m, a, &s->checkpoint);
	else if (s->recurrent)
		recurrent_copy(s, a, s->checkpoint, s->recurrent);
	if (r == 0)
		s->checkpoint_tok = s->n_tok;
	return r;
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
		recurrent_copy(s, a, s->recurrent, s->checkpoint);
	} else if (s->checkpoint_tok > n_tok) {
		checkpoint_drop(s, a);
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
	r = recurrent_clone(c, s->recurrent, m, a, &c->recurrent);
	if (r == 0)
		r = recurrent_clone(c, s->checkpoint, m, a, &c->checkpoint);
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
