/* SPDX-License-Identifier: MIT */
/*
 * engine.c: the engine thread. See engine.h.
 *
 * One step is one batch: a piece of a prompt, or one token. Between steps the thread takes its mail, so a cancel or a new request
 * waits for at most one batch. run.c holds what one request does in a step; this file holds what lives longer: model, memory, sessions.
 * Invariant: memory of sessions (pages and recurrent states) stays within kv_bytes_max; what is idle longest forgets its state first, and
 * keeps its tokens, so that it costs time later but nothing is lost.
 */
#include "daemon/engine/engine-private.h"

#include "daemon/residency/memory.h"

#include <malloc.h>

void engine_event_free(struct engine_event *e)
{
	if (!e)
		return;
	buf_done(&e->text[REPLY_ANSWER]);
	buf_done(&e->text[REPLY_THOUGHT]);
	free(e);
}

struct engine_session *engine_session_new(uint32_t user)
{
	struct engine_session *s = calloc(1, sizeof(*s));

	if (s)
		s->user = user;
	return s;
}

void engine_session_free(struct engine *e, struct engine_session *s)
{
	s->mail.kind = ENGINE_FREE;
	engine_post(e, &s->mail);
}

static void session_link(struct engine *e, struct engine_session *s)
{
	if (s->linked)
		return;
	s->prev = NULL;
	s->next = e->sessions;
	if (s->next)
		s->next->prev = s;
	e->sessions = s;
	s->linked = true;
}

void engine_session_drop(struct engine *e, struct engine_session *s)
{
	if (s->linked) {
		*(s->prev ? &s->prev->next : &e->sessions) = s->next;
		if (s->next)
			s->next->prev = s->prev;
	}
	s->state = state_free(s->state, e->arena);
	tokens_done(&s->tokens);
	free(s->heat);
	free(s);
}

/* The session's state is gone; its tokens will be evaluated again when needed. */
static void session_forget(struct engine *e, struct engine_session *s)
{
	s->state = state_free(s->state, e->arena);
	s->n_valid = 0;
}

int engine_session_begin(struct engine *e, struct engine_session *s)
{
	session_link(e, s);
	s->last_used = ++e->clock;
	if (s->state)
		return 0;
	s->n_valid = 0;
	return state_new(&s->state);
}

void engine_inspect_free(struct engine_inspect *i)
{
	if (!i)
		return;
	free(i->layers);
	free(i->heat);
	free(i->place);
	free(i);
}

void engine_trace_free(struct engine_trace *t)
{
	if (!t)
		return;
	buf_done(&t->line);
	free(t);
}

void engine_forget_all(struct engine *e)
{
	for (struct engine_session *s = e->sessions; s; s = s->next)
		session_forget(e, s);
}

uint64_t engine_host_bytes(const struct engine *e)
{
	return e->card ? 0 : engine_kv_bytes(e);
}

uint64_t engine_kv_bytes(const struct engine *e)
{
	uint64_t sum;

	if (!e->arena)
		return 0;
	sum = (uint64_t)(kv_arena_n_pages(e->arena) - kv_arena_n_free(e->arena)) *
	      kv_arena_page_bytes(e->arena);
	for (const struct engine_session *s = e->sessions; s; s = s->next) {
		if (s->state && s->state->recurrent)
			sum += e->model->recurrent_floats * sizeof(float);
		if (s->state && s->state->checkpoint)
			sum += e->model->recurrent_floats * sizeof(float);
	}
	return sum;
}

/* The one that is idle longest forgets, of one user or of all. false: there is none. */
static bool make_room(struct engine *e, const struct engine_session *keep, const uint32_t *user)
{
	struct engine_session *oldest = NULL;

	for (struct engine_session *s = e->sessions; s; s = s->next)
		if (s != keep && !s->running && s->state && s->state->n_tok > 0 &&
		    (!user || s->user == *user) && (!oldest || s->last_used < oldest->last_used))
			oldest = s;
	if (!oldest)
		return false;
	session_forget(e, oldest);
	e->n_evicted++;
	return true;
}

bool engine_make_room(struct engine *e, const struct engine_session *keep)
{
	return make_room(e, keep, NULL);
}

static uint64_t bytes_of_user(const struct engine *e, uint32_t user)
{
	uint64_t sum = 0;

	for (const struct engine_session *s = e->sessions; s; s = s->next)
		if (s->user == user && s->state)
			sum += state_bytes(s->state, e->model, e->arena);
	return sum;
}

int engine_charge(struct engine *e, const struct engine_session *s, size_t n_new_tok,
		  uint64_t user_bytes_max)
{
	uint64_t page = kv_arena_page_bytes(e->arena);
	uint64_t recurrent = e->model->recurrent_floats * sizeof(float);
	/* One page more than the tokens fill: the first write may have to copy a shared one. */
	uint64_t need = e->model->kv.n_layer > 0 ? (n_new_tok / KV_PAGE_TOK + 2) * page : 0;

	need += (s->state->recurrent ? 0 : recurrent) + (s->state->checkpoint ? 0 : recurrent);
	while (user_bytes_max != UINT64_MAX && bytes_of_user(e, s->user) + need > user_bytes_max)
		if (!make_room(e, s, &s->user))
			return -EDQUOT;
	while (engine_kv_bytes(e) + need > e->kv_bytes_max ||
	       residency_charge(e->residency, engine_host_bytes(e) + (e->card ? 0 : need)) < 0)
		if (!engine_make_room(e, s))
			return -ENOSPC;
	return 0;
}

void engine_stats_fill(const struct engine *e, struct engine_stats *ret)
{
	struct residency_stats r = {};

	if (e->residency)
		residency_get_stats(e->residency, &r);
	*ret = (struct engine_stats){
		.kv_bytes_used = engine_kv_bytes(e),
		.kv_bytes_max = e->kv_bytes_max,
		.n_evicted = e->n_evicted,
		.context = e->context,
		.threads = e->threads,
		.backend = e->card  ? "cuda"
			   : e->cpu ? backend_cpu_isa(e->cpu)
				    : "none",
		.model_broken = e->model_broken,
		.heat_error = r.heat_error,
		.budget_note = r.budget_note,
		.tier = r.tier,
		.card = e->card_state,
	};
}

static uint64_t mem_available(void)
{
	_cleanup_(fclosep) FILE *f = fopen("/proc/meminfo", "re");
	unsigned long long kib;
	char line[128];

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
			return (uint64_t)kib * 1024;
	return UINT64_MAX;
}

/* Memory for sessions: what was asked for, or by default four full contexts and eight recurrent states, within a quarter of what is
 * available now. Less than one full session, *ret_least, is refused with the number. */
static int size_memory(const struct model *m, const struct engine_config *c, bool f16,
		       uint32_t context, uint64_t *ret, uint64_t *ret_least, char **ret_error)
{
	uint64_t tok =
		(uint64_t)m->kv.n_layer * m->kv.n_head * (m->kv.k_dim + m->kv.v_dim) * (f16 ? 2 : 4);
	/* As the arena rounds it. */
	uint64_t page = ALIGN_UP(MAX(KV_PAGE_TOK * tok, UINT64_C(1)), (uint64_t)sysconf(_SC_PAGESIZE));
	uint64_t states = 2 * (uint64_t)m->recurrent_floats * sizeof(float); /* the state and its checkpoint */
	uint64_t full = (m->kv.n_layer > 0 ? (uint64_t)context / KV_PAGE_TOK + 4 : 1) * page;
	uint64_t least = full + states;
	uint64_t bytes = c->kv_bytes_max;

	if (bytes == 0)
		bytes = MAX(MIN(4 * full + 8 * states, mem_available() / 4), least);
	if (bytes < least)
		return fail(ret_error, -E2BIG,
			    "KvBytesMax=%" PRIu64
			    " is too little for one session of %u tokens: at least %" PRIu64,
			    bytes, context, least);
	*ret = bytes;
	*ret_least = least;
	return 0;
}

/* Everything that a loaded model needs, made before the old one is given up. */
struct loaded {
	struct model *model;
	struct residency *residency;
	struct backend *backend;
	struct kv_arena *arena;
	float *logits;
	uint64_t kv_bytes_max;
	uint64_t kv_least_bytes;
	uint64_t heap_bytes; /* the process before any model, and what the model's vocabulary and the like took */
	uint32_t context, batch_tok, scratch_batch_tok;
	bool kv_f16;
};

static void loaded_done(struct loaded *l)
{
	l->arena = kv_arena_free(l->arena);
	if (l->backend)
		l->backend = l->backend->ops->free(l->backend);
	l->residency = residency_free(l->residency);
	l->model = model_unref(l->model);
	free(l->logits);
	l->logits = NULL;
}

static uint64_t anonymous_bytes(const struct engine *e)
{
	return e->memory ? memory_anonymous(e->memory) : 0;
}

/* The floor of the budget, and with it the tier, come before memory is taken for anything. */
static int load_residency(struct engine *e, const struct engine_load *load, uint64_t kv_least,
			  struct loaded *l, char **ret_reason, char **ret_error)
{
	const struct engine_config *c = &load->config;
	size_t logits, scratch;
	int r;

	l->batch_tok = c->batch_tok > 0 ? c->batch_tok : ENGINE_BATCH_TOK_MANAGED;
	l->scratch_batch_tok = l->batch_tok;
	scratch = graph_scratch_bytes(l->model, l->batch_tok);
	if (!mul_ok(l->model->n_vocab, sizeof(float), &logits) || !(l->logits = malloc(logits)))
		return fail(ret_error, -ENOMEM, "%s: no memory for the logits", load->path);
	r = residency_new(l->model, &c->residency, l->heap_bytes + scratch + logits, kv_least,
			  &e->shared, &e->no_loads, &l->residency, ret_reason, ret_error);
	if (r < 0)
		return r;
	if (c->batch_tok == 0 && !residency_managed(l->residency))
		l->batch_tok = ENGINE_BATCH_TOK;
	if (residency_managed(l->residency))
		l->kv_bytes_max = CLAMP(residency_kv_room(l->residency), kv_least, l->kv_bytes_max);
	r = backend_cpu_new(c->threads, scratch, &c->tiles, &l->backend);
	if (r < 0)
		return fail(ret_error, r, "cannot start %u compute threads: %s", c->threads,
			    strerror(-r));
	l->backend->ops->set_residency(l->backend, l->residency);
	return 0;
}

static int load_all(struct engine *e, const struct engine_load *load, struct loaded *l,
		    char **ret_reason, char **ret_error)
{
	const struct engine_config *c = &load->config;
	uint64_t kv_least = 0, before = anonymous_bytes(e), after;
	bool f16;
	int r;

	r = model_load(load->path, &l->model, ret_error);
	if (r < 0)
		return r;
	after = anonymous_bytes(e);
	l->heap_bytes = e->base_bytes + (after > before ? after - before : 0);
	l->context = c->context > 0 ? c->context : MIN(l->model->n_ctx_train, 32768u);
	f16 = c->kv_f16 >= 0 ? c->kv_f16 > 0 : !l->model->weights_f32;
	l->kv_f16 = f16;
	r = size_memory(l->model, c, f16, l->context, &l->kv_bytes_max, &kv_least, ret_error);
	l->kv_least_bytes = kv_least;
	if (r == 0)
		r = load_residency(e, load, kv_least, l, ret_reason, ret_error);
	if (r < 0)
		return r;
	r = kv_arena_new_in(l->backend->ops->memory(l->backend), &l->model->kv, f16,
			    l->kv_bytes_max, &l->arena);
	if (r < 0)
		return fail(ret_error, r, "%s: no memory for %" PRIu64 " bytes of keys and values",
			    load->path, l->kv_bytes_max);
	return 0;
}

static struct loaded what_is_loaded(const struct engine *e)
{
	return (struct loaded){ .model = e->model,
				.residency = e->residency,
				.backend = e->cpu,
				.arena = e->cpu_arena,
				.logits = e->logits };
}

/* What was loaded gives way; token ids of its vocabulary mean nothing to the next, nor does the heat of its blocks. */
static void install(struct engine *e, struct loaded *l, const struct engine_config *c)
{
	struct loaded old = what_is_loaded(e);

	e->backend = NULL;
	for (struct engine_session *s = e->sessions; s; s = s->next) {
		session_forget(e, s);
		s->tokens.n = 0;
		s->open_turn = false;
		free(s->heat);
		s->heat = NULL;
	}
	loaded_done(&old);
	e->model = l->model;
	e->residency = l->residency;
	e->backend = e->cpu = l->backend;
	e->arena = e->cpu_arena = l->arena;
	e->kv_f16 = l->kv_f16;
	e->logits = l->logits;
	e->kv_bytes_max = e->cpu_kv_bytes_max = l->kv_bytes_max;
	e->kv_least_bytes = l->kv_least_bytes;
	e->context = l->context;
	e->threads = c->threads;
	e->batch_tok = e->cpu_batch_tok = l->batch_tok;
	e->scratch_batch_tok = l->scratch_batch_tok;
	e->max_runs = UINT32_MAX;
	e->card_config = c->card;
	e->model_broken = false;
	e->faults_at_load = l->backend ? backend_cpu_major_faults(l->backend) : 0;
	e->heat_saved_us = now_us();
	if (!l->residency)
		atomic_store(&e->shared.managed, false);
}

/* Two models' experts at a time are more than anybody planned for: those of the old one go first, its heat brings them back. */
static int load_beside_old(struct engine *e, struct engine_load *load, struct loaded *l)
{
	int r;

	engine_card_stop(e);
	if (e->residency) {
		residency_release(e->residency);
		(void)residency_save_heat(e->residency); /* the same model's new configuration begins with it */
	}
	r = load_all(e, load, l, &load->tier_reason, &load->error);
	if (r < 0 && e->residency) {
		residency_publish(e->residency);
		residency_warm(e->residency, NULL);
	}
	return r;
}

static void load_model(struct engine *e, struct engine_load *load)
{
	struct loaded l = {};

	if (e->quit || atomic_load(&e->no_loads))
		load->err = -ECANCELED;
	else if (load->path)
		load->err = load_beside_old(e, load, &l);
	if (load->err < 0) {
		loaded_done(&l);
	} else {
		engine_card_stop(e);
		install(e, &l, &load->config);
		if (e->model)
			load->model = model_ref(e->model);
	}
	engine_card_start(e);
	engine_stats_fill(e, &load->stats);
	load->mail.kind = EVENT_LOADED;
	mailbox_post(e->out, &load->mail);
}

static void inspect(struct engine *e, struct engine_inspect *i)
{
	struct residency *r = e->residency;
	size_t n_experts = 0;

	if (!r)
		return;
	if (i->settle)
		residency_settle(r);
	residency_get_stats(r, &i->stats);
	i->compute_major_faults = backend_cpu_major_faults(e->cpu) - e->faults_at_load;
	i->layers = calloc(residency_n_layers(r) + 1, sizeof(*i->layers));
	if (!i->layers)
		return;
	i->n_layers = residency_n_layers(r);
	for (uint32_t k = 0; k < i->n_layers; k++) {
		residency_get_layer(r, k, &i->layers[k]);
		n_experts += i->layers[k].n_experts;
	}
	i->loaded = true;
	if (!i->want_blocks)
		return;
	i->heat = calloc(n_experts + 1, sizeof(*i->heat));
	i->place = calloc(n_experts + 1, 1);
	n_experts = 0;
	for (uint32_t k = 0; k < i->n_layers && i->heat && i->place; k++) {
		residency_get_blocks(r, k, i->heat + n_experts, i->place + n_experts);
		n_experts += i->layers[k].n_experts;
	}
}

static int clone_session(struct engine *e, const struct engine_session *from,
			 struct engine_session *to, uint64_t user_bytes_max)
{
	int r = tokens_append(&to->tokens, from->tokens.ids, from->tokens.n);

	if (r < 0)
		return r;
	if (from->heat && (to->heat = malloc(e->model->catalog->n_blocks * sizeof(*to->heat))))
		memcpy(to->heat, from->heat, e->model->catalog->n_blocks * sizeof(*to->heat));
	to->open_turn = from->open_turn;
	to->n_valid = 0;
	session_link(e, to);
	to->last_used = ++e->clock;
	/* Without memory for a copy of the state the clone still has its tokens. */
	if (from->state && from->n_valid > 0 &&
	    state_clone(from->state, e->model, e->arena, &to->state) == 0)
		to->n_valid = from->n_valid;
	while (user_bytes_max != UINT64_MAX && bytes_of_user(e, to->user) > user_bytes_max &&
	       make_room(e, to, &to->user))
		;
	while (engine_kv_bytes(e) > e->kv_bytes_max && engine_make_room(e, to))
		;
	if (engine_kv_bytes(e) > e->kv_bytes_max || bytes_of_user(e, to->user) > user_bytes_max ||
	    residency_charge(e->residency, engine_host_bytes(e)) < 0)
		session_forget(e, to);
	return 0;
}

/* What sessions gave back, experts may have. */
static void recharge(struct engine *e)
{
	if (e->residency)
		(void)residency_charge(e->residency, engine_host_bytes(e));
}

static void take_mail(struct engine *e, struct mail *m)
{
	switch ((enum engine_mail)m->kind) {
	case ENGINE_LOAD: e->load = (struct engine_load *)m; break;
	case ENGINE_REQUEST: sched_add(&e->sched, &((struct engine_request *)m)->sched); break;
	case ENGINE_FREE:
		engine_session_drop(e, (struct engine_session *)m);
		recharge(e);
		break;
	case ENGINE_CLONE: {
		struct engine_clone *c = (struct engine_clone *)m;

		c->err = e->model ? clone_session(e, c->from, c->to, c->kv_bytes_max) : -ENXIO;
		engine_stats_fill(e, &c->stats);
		m->kind = EVENT_CLONED;
		mailbox_post(e->out, m);
		break;
	}
	case ENGINE_WAKE: atomic_store(&e->wake_posted, false); break;
	case ENGINE_SHRINK:
		atomic_store(&e->shrink_posted, false);
		while (e->model && engine_make_room(e, NULL))
			;
		recharge(e);
		(void)malloc_trim(0);
		break;
	case ENGINE_RELEASE:
		atomic_store(&e->release_posted, false);
		if (e->residency && e->sched.n == 0) {
			residency_release(e->residency);
			(void)residency_save_heat(e->residency);
		}
		break;
	case ENGINE_INSPECT:
		inspect(e, (struct engine_inspect *)m);
		m->kind = EVENT_INSPECTED;
		mailbox_post(e->out, m);
		break;
	case ENGINE_FEED: {
		struct engine_feed *f = (struct engine_feed *)m;

		if (e->residency && f->model == e->model)
			residency_set_feed(e->residency, f->feed);
		free(f);
		break;
	}
	case ENGINE_LOOK:
		atomic_store(&e->look_posted, false);
		engine_card_look(e);
		break;
	case ENGINE_SUSPEND:
		atomic_store(&e->suspend_posted, false);
		engine_card_suspend(e);
		break;
	case ENGINE_RESUME:
		atomic_store(&e->resume_posted, false);
		engine_card_resume(e);
		break;
	case ENGINE_QUIT: e->quit = true; break;
	}
}

void engine_return(struct engine *e, struct engine_request *req)
{
	sched_remove(&e->sched, &req->sched);
	engine_stats_fill(e, &req->stats);
	req->mail.kind = EVENT_DONE;
	mailbox_post(e->out, &req->mail);
}

static struct engine_request *request_of(struct sched_entry *s)
{
	return (struct engine_request *)((char *)s - offsetof(struct engine_request, sched));
}

/* Requests that are wanted no more leave at once, whatever else is at work. */
static void drop_cancelled(struct engine *e)
{
	struct sched_entry *next;

	for (struct sched_entry *s = e->sched.first; s; s = next) {
		struct engine_request *req = request_of(s);

		next = s->next;
		if (!e->quit && !atomic_load(&req->cancel) && !atomic_load(&req->gone))
			continue;
		if (!s->running)
			req->usage.queue_us = now_us() - req->accepted_us;
		run_cancel(e, req);
	}
}

/* What a request may come to need: pages for all it may read and write, its state and the checkpoint. */
static uint64_t bytes_needed(const struct engine *e, const struct engine_request *req)
{
	uint64_t page = kv_arena_page_bytes(e->arena), tok = req->prompt.n + REPLY_GRACE_TOK;
	uint64_t context = req->context_max > 0 ? MIN(req->context_max, e->context) : e->context;

	tok += req->session ? req->session->tokens.n : 0;
	tok += req->max_tok >= 0 ? (uint64_t)req->max_tok : context;
	if (req->thinking_open)
		tok += req->max_thinking_tok >= 0 ? (uint64_t)req->max_thinking_tok : context;
	tok = MIN(tok, context);
	return (e->model->kv.n_layer > 0 ? (tok / KV_PAGE_TOK + 3) * page : 0) +
	       2 * e->model->recurrent_floats * sizeof(float);
}

/* Who is next. Nobody begins whose memory might have to come from those who have begun: they would lose an answer half said. */
static struct engine_request *next_request(struct engine *e)
{
	struct engine_request *req = request_of(sched_pick(&e->sched, false));
	uint64_t sum, pages, states;
	uint32_t n_running = 0;

	if (req->sched.running || !e->arena)
		return req;
	req->reserved_bytes = sum = bytes_needed(e, req);
	states = e->model ? 2 * e->model->recurrent_floats * sizeof(float) : 0;
	pages = kv_arena_n_pages(e->arena) * (uint64_t)kv_arena_page_bytes(e->arena);
	for (struct sched_entry *s = e->sched.first; s; s = s->next)
		if (s->running) {
			sum += request_of(s)->reserved_bytes;
			n_running++;
		}
	/* On a card the states have memory of their own, which pages cannot have. */
	if (sum > e->kv_bytes_max || sum - (n_running + 1) * states > pages || n_running >= e->max_runs) {
		struct sched_entry *begun = sched_pick(&e->sched, true);

		if (begun)
			return request_of(begun);
	}
	return req;
}

static void *engine_main(void *arg)
{
	struct engine *e = arg;

	(void)pthread_setname_np(pthread_self(), "residentd-engine");
	for (;;) {
		bool idle = e->sched.n == 0 && !e->load && !e->quit;
		bool reading = idle && e->residency && residency_pump(e->residency, true);
		struct mail *next;

		for (struct mail *m = mailbox_take_all(&e->inbox, idle && !reading); m; m = next) {
			next = m->next;
			take_mail(e, m);
		}
		drop_cancelled(e);
		if (e->sched.n > 0) {
			run_step(e, next_request(e));
		} else if (e->load) {
			load_model(e, TAKE_PTR(e->load));
		} else if (e->quit) {
			/* Here, because reads may be in flight that only this thread can take back. */
			if (e->cpu)
				e->cpu->ops->set_residency(e->cpu, NULL);
			e->residency = residency_free(e->residency);
			engine_card_stop(e);
			return NULL;
		}
	}
}

int engine_new(struct mailbox *to_loop, struct engine **ret)
{
	struct engine *e = calloc(1, sizeof(*e));
	int r;

	if (!e)
		return -ENOMEM;
	e->out = to_loop;
	e->wake.kind = ENGINE_WAKE;
	e->shrink.kind = ENGINE_SHRINK;
	e->release.kind = ENGINE_RELEASE;
	e->look.kind = ENGINE_LOOK;
	e->suspend.kind = ENGINE_SUSPEND;
	e->resume.kind = ENGINE_RESUME;
	e->quit_mail.kind = ENGINE_QUIT;
	r = mailbox_init(&e->inbox, false);
	if (r < 0) {
		free(e);
		return r;
	}
	(void)memory_open("", &e->memory);
	e->base_bytes = anonymous_bytes(e);
	r = pthread_create(&e->thread, NULL, engine_main, e);
	if (r > 0) {
		memory_close(e->memory);
		mailbox_done(&e->inbox);
		free(e);
		return -r;
	}
	*ret = e;
	return 0;
}

void engine_post(struct engine *e, struct mail *m)
{
	mailbox_post(&e->inbox, m);
}

void engine_wake(struct engine *e)
{
	if (!atomic_exchange(&e->wake_posted, true))
		mailbox_post(&e->inbox, &e->wake);
}

void engine_shrink(struct engine *e)
{
	if (!atomic_exchange(&e->shrink_posted, true))
		mailbox_post(&e->inbox, &e->shrink);
}

void engine_release(struct engine *e)
{
	if (!atomic_exchange(&e->release_posted, true))
		mailbox_post(&e->inbox, &e->release);
}

void engine_look(struct engine *e)
{
	if (!atomic_exchange(&e->look_posted, true))
		mailbox_post(&e->inbox, &e->look);
}

void engine_suspend(struct engine *e)
{
	if (!atomic_exchange(&e->suspend_posted, true))
		mailbox_post(&e->inbox, &e->suspend);
}

void engine_resume(struct engine *e)
{
	if (!atomic_exchange(&e->resume_posted, true))
		mailbox_post(&e->inbox, &e->resume);
}

struct residency_shared *engine_shared(struct engine *e)
{
	return &e->shared;
}

void engine_record(struct engine *e, bool record)
{
	atomic_store(&e->record, record);
}

void engine_refuse_loads(struct engine *e)
{
	atomic_store(&e->no_loads, true);
}

void engine_quit(struct engine *e)
{
	if (!e->quit_posted) {
		e->quit_posted = true;
		mailbox_post(&e->inbox, &e->quit_mail);
	}
}

void engine_join(struct engine *e)
{
	if (e->joined)
		return;
	engine_quit(e);
	pthread_join(e->thread, NULL);
	e->joined = true;
}

struct engine *engine_free(struct engine *e)
{
	struct loaded loaded;
	struct mail *next;

	if (!e)
		return NULL;
	engine_join(e);
	/* Sessions handed over after the thread had ended. */
	for (struct mail *m = mailbox_take_all(&e->inbox, false); m; m = next) {
		next = m->next;
		if (m->kind == ENGINE_FREE)
			engine_session_drop(e, (struct engine_session *)m);
		else if (m->kind == ENGINE_FEED)
			free(m);
		else if (m->kind == ENGINE_INSPECT)
			engine_inspect_free((struct engine_inspect *)m);
	}
	while (e->sessions)
		engine_session_drop(e, e->sessions);
	loaded = what_is_loaded(e);
	loaded_done(&loaded);
	mailbox_done(&e->inbox);
	memory_close(e->memory);
	free(e);
	return NULL;
}
