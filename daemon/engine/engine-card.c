/* SPDX-License-Identifier: MIT */
/*
 * engine-card.c: the engine's GPU: taken up after a model was loaded, given up when it fails or the machine sleeps, tried again. See
 * engine.h.
 *
 * Engine thread. Owns card, CUDA backend and the arena on it (fields of struct engine). The CPU's backend and arena stay beside them, so that
 * giving the card up cannot fail: sessions forget their states, keep their tokens, and are evaluated again where the engine computes then.
 * Invariants: e->backend and e->arena belong together; no state lies in an arena that is gone.
 */
#include "daemon/engine/engine-private.h"

#include "daemon/engine/card.h"

#include <stdarg.h>

/* Between two tries; doubled each time that one fails. */
#define RETRY_US     UINT64_C(5000000)
#define RETRY_US_MAX UINT64_C(320000000)
/* For a card that was never seen: while a machine boots, the driver is there before its devices are. */
#define TRIES_UNSEEN 5

static void post(struct engine *e)
{
	struct engine_card_event *ev = calloc(1, sizeof(*ev));

	if (!ev) /* the next answer carries the same */
		return;
	ev->mail.kind = EVENT_CARD;
	engine_stats_fill(e, &ev->stats);
	mailbox_post(e->out, &ev->mail);
}

/* printable: of the driver's making. */
_printf_(3, 4) static void set_state(struct engine *e, enum engine_card_state state,
				     const char *format, ...)
{
	va_list ap;

	e->card_state.state = state;
	va_start(ap, format);
	(void)vsnprintf(e->card_state.why, sizeof(e->card_state.why), format, ap);
	va_end(ap);
	for (char *s = e->card_state.why; *s; s++)
		if (*s < ' ' || *s > '~')
			*s = '?';
}

static void note_info(struct engine *e, const struct card *card)
{
	const struct cuda_info *info = card_info(card);
	struct engine_card *s = &e->card_state;

	snprintf(s->name, sizeof(s->name), "%s", info->name);
	for (char *p = s->name; *p; p++)
		if (*p < ' ' || *p > '~')
			*p = '?';
	snprintf(s->code, sizeof(s->code), "%s", card_code(card));
	s->driver = info->driver;
	s->capability = info->capability;
	s->emulator = info->emulator;
	s->total_bytes = info->total_bytes;
}

/* Where the engine computes from now on. */
static void use(struct engine *e, struct backend *b, struct kv_arena *arena, uint64_t kv_bytes_max,
		uint32_t max_runs, uint32_t batch_tok)
{
	engine_forget_all(e);
	e->backend = b;
	e->arena = arena;
	e->kv_bytes_max = kv_bytes_max;
	e->max_runs = max_runs;
	e->batch_tok = batch_tok;
	if (e->residency)
		(void)residency_charge(e->residency, engine_host_bytes(e));
}

static void use_cpu(struct engine *e)
{
	use(e, e->cpu, e->cpu_arena, e->cpu_kv_bytes_max, UINT32_MAX, e->cpu_batch_tok);
}

/* Everything of a card, made before anything is given up for it. */
struct taken {
	struct card *card;
	struct backend *gpu;
	struct kv_arena *arena;
};

static void taken_done(struct taken *t)
{
	t->arena = kv_arena_free(t->arena);
	if (t->gpu)
		t->gpu = t->gpu->ops->free(t->gpu);
	t->card = card_close(t->card);
}

static int take(struct engine *e, struct taken *t, char **why)
{
	uint64_t state = e->model->recurrent_floats * sizeof(float);
	const struct card_sizes sizes = {
		.budget_bytes = e->card_config.budget_bytes,
		.reserve_bytes = e->card_config.reserve_bytes,
		.scratch_bytes = backend_cuda_scratch_bytes(e->model, e->scratch_batch_tok, e->context),
		.pages_bytes = e->cpu_kv_bytes_max,
		.pages_least_bytes = e->kv_least_bytes - MIN(e->kv_least_bytes, 2 * state),
	};
	int r;

	r = card_load(t->card, e->model, &sizes, &e->no_loads, why);
	if (r == 0)
		r = backend_cuda_new(t->card, e->model, e->cpu, e->scratch_batch_tok, e->context,
				     &t->gpu, why);
	if (r == 0) {
		r = kv_arena_new_in(card_memory(t->card), &e->model->kv, e->kv_f16,
				    card_pages_bytes(t->card), &t->arena);
		if (r < 0)
			(void)fail(why, r, "no memory for keys and values");
	}
	return r;
}

static int give_slots(struct engine *e, const struct card *card, const struct backend *gpu, char **why)
{
	const struct residency_card_config c = {
		.slots_bytes = card_slots_max(card),
		.fixed_bytes = card_fixed_bytes(card),
		.trunk_bytes = card_trunk_bytes(card),
		.reserve_bytes = e->card_config.reserve_bytes,
		.host_bytes = backend_cuda_host_bytes(gpu),
	};
	uint64_t free_bytes = 0;
	int r;

	if (!card_vram(card))
		return 0;
	r = residency_set_card(e->residency, card_vram(card), &c);
	if (r < 0)
		return fail(why, r, "no memory for the table of slots: %s", strerror(-r));
	r = card_free_bytes(card, &free_bytes);
	if (r == 0)
		r = residency_look_at_card(e->residency, free_bytes);
	if (r < 0) {
		(void)residency_set_card(e->residency, NULL, NULL);
		return fail(why, r, "%s", cuda_error(card_driver(card)));
	}
	return 0;
}

/* 0: the card computes from now on. */
static int take_up(struct engine *e, char **why)
{
	struct taken t = {};
	int r = card_open(&t.card, why);

	if (r < 0)
		return r;
	note_info(e, t.card);
	r = take(e, &t, why);
	if (r == 0)
		r = give_slots(e, t.card, t.gpu, why);
	if (r < 0) {
		taken_done(&t);
		return r;
	}
	e->card = t.card;
	e->gpu = t.gpu;
	e->card_arena = t.arena;
	e->gpu->ops->set_residency(e->gpu, e->residency);
	use(e, e->gpu, e->card_arena, card_kv_bytes(e->card), card_max_runs(e->card),
	    e->scratch_batch_tok);
	return 0;
}

/* Later again, unless it would say the same for ever. */
static bool is_final(int r)
{
	return r == -EOPNOTSUPP || r == -ENOSYS || r == -ENOEXEC || r == -ELIBACC || r == -E2BIG;
}

static void try_again_later(struct engine *e)
{
	e->retry_delay_us = MIN(MAX(2 * e->retry_delay_us, RETRY_US), RETRY_US_MAX);
	e->retry_us = now_us() + e->retry_delay_us;
}

void engine_card_start(struct engine *e)
{
	_cleanup_(freep) char *why = NULL;
	bool before = e->card_state.state == ENGINE_CARD_DEGRADED, final;
	int r;

	if (e->card)
		return;
	if (!e->model) {
		set_state(e, ENGINE_CARD_NONE, "no model is loaded");
		return;
	}
	if (e->card_config.off) {
		set_state(e, ENGINE_CARD_NONE, "VramBudget=off");
		return;
	}
	if (e->asleep) {
		set_state(e, ENGINE_CARD_DEGRADED, "the machine goes to sleep");
		return;
	}
	r = take_up(e, &why);
	if (r == 0) {
		e->retry_delay_us = 0;
		e->card_tries = 0;
		set_state(e, ENGINE_CARD_ACTIVE, "%s", "");
		if (before)
			post(e);
		return;
	}
	e->card_tries++;
	final = is_final(r) || (!*e->card_state.name && e->card_tries > TRIES_UNSEEN);
	set_state(e, final ? ENGINE_CARD_NONE : ENGINE_CARD_DEGRADED, "%s", why ? why : strerror(-r));
	try_again_later(e);
	if (final && before)
		post(e);
}

void engine_card_stop(struct engine *e)
{
	if (!e->card)
		return;
	use_cpu(e);
	/* A trunk that cannot be read is found out when it is needed. */
	if (e->residency)
		(void)residency_set_card(e->residency, NULL, NULL);
	e->card_arena = kv_arena_free(e->card_arena);
	e->gpu = e->gpu->ops->free(e->gpu);
	e->card = card_close(e->card);
	if (e->residency)
		(void)residency_charge(e->residency, engine_host_bytes(e));
}

bool engine_card_lost(struct engine *e)
{
	char why[sizeof(e->card_state.why)];

	if (!e->card)
		return false;
	snprintf(why, sizeof(why), "%s", backend_cuda_error(e->gpu));
	engine_card_stop(e);
	e->card_state.n_lost++;
	set_state(e, ENGINE_CARD_DEGRADED, "%s", *why ? why : "the card is lost");
	try_again_later(e);
	post(e);
	return true;
}

void engine_card_look(struct engine *e)
{
	if (e->card) {
		if (backend_cuda_look(e->gpu) < 0)
			(void)engine_card_lost(e);
		return;
	}
	if (e->card_state.state != ENGINE_CARD_DEGRADED || e->asleep || now_us() < e->retry_us)
		return;
	/* What runs would have to be evaluated once more. */
	for (const struct sched_entry *s = e->sched.first; s; s = s->next)
		if (s->running)
			return;
	engine_card_start(e);
}

void engine_card_suspend(struct engine *e)
{
	struct mail *done = calloc(1, sizeof(*done));

	e->asleep = true;
	if (e->card) {
		engine_card_stop(e);
		set_state(e, ENGINE_CARD_DEGRADED, "the machine goes to sleep");
		post(e);
	}
	if (!done) /* the machine sleeps all the same, a few seconds later */
		return;
	done->kind = EVENT_SUSPENDED;
	mailbox_post(e->out, done);
}

void engine_card_resume(struct engine *e)
{
	e->asleep = false;
	e->retry_us = e->retry_delay_us = 0;
	engine_card_look(e);
}
