/* SPDX-License-Identifier: MIT */
/*
 * inspect.c: where the model's memory is. See inspect.h. Loop thread.
 *
 * Owns daemon.feed and the recording of routing. Invariants: the feed is of daemon.model, and the engine never holds one that is
 * freed: it drops its own with the model it belongs to. Routing is recorded only while a connection reads it.
 */
#include "daemon/inspect.h"

#include "daemon/pressure.h"
#include "daemon/residency/feed.h"

/* Latency is measured while somebody looks, and this long after. */
#define LATENCY_US 10000000

/* What experts a text uses says something about it. */
static bool may_inspect(const struct conn *c)
{
	return c->uid == 0 || c->uid == geteuid();
}

static void ask_engine(struct conn *c, bool blocks, bool settle)
{
	struct engine_inspect *i = calloc(1, sizeof(*i));

	if (!i) {
		conn_error(c, ERROR_NO_MEMORY, NULL, 0);
		return;
	}
	i->want_blocks = blocks;
	i->settle = settle;
	i->mail.kind = ENGINE_INSPECT;
	c->inspect = i;
	engine_post(c->daemon->engine, &i->mail);
}

static int on_latency_over(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;

	(void)source;
	(void)usec;
	d->latency_timer = sd_event_source_disable_unref(d->latency_timer);
	if (d->feed)
		(void)feed_measure_latency(d->feed, false);
	return 0;
}

static void log_faults(struct daemon *d)
{
	struct feed_fault faults[64];
	size_t n = feed_take_faults(d->feed, faults, ARRAY_SIZE(faults));

	for (size_t i = 0; i < n; i++)
		log_debug("thread %u waited for a page of the model (block %d)", faults[i].tid,
			  faults[i].block == CATALOG_NONE ? -1 : (int)faults[i].block);
}

static void measure_latency(struct daemon *d)
{
	if (!d->feed)
		return;
	log_faults(d);
	(void)feed_measure_latency(d->feed, true);
	d->latency_timer = sd_event_source_disable_unref(d->latency_timer);
	(void)sd_event_add_time_relative(d->event, &d->latency_timer, CLOCK_MONOTONIC, LATENCY_US,
					 0, on_latency_over, d);
}

void inspect_residency(struct conn *c, bool blocks)
{
	if (blocks && !may_inspect(c)) {
		conn_error(c, ERROR_NOT_AUTHORIZED,
			   "the experts one by one are shown to root and to the service's own user", 0);
		return;
	}
	if (may_inspect(c))
		measure_latency(c->daemon);
	ask_engine(c, blocks, false);
}

void inspect_last_resort(struct conn *c)
{
	pressure_last_resort(c->daemon);
	ask_engine(c, false, true);
}

/* As CUDA's versions are written. */
static const char *version_text(unsigned major, unsigned minor, char text[32])
{
	snprintf(text, 32, "%u.%u", major, minor);
	return text;
}

const char *inspect_gpu_state(enum engine_card_state s)
{
	switch (s) {
	case ENGINE_CARD_NONE: return "none";
	case ENGINE_CARD_ACTIVE: return "active";
	case ENGINE_CARD_DEGRADED: return "degraded";
	}
	return "none";
}

json_t *inspect_gpu(const struct daemon *d)
{
	const struct engine_card *card = &d->stats.card;
	uint64_t since = MAX(d->card_since_us, d->started_us);
	char driver[32], capability[32];
	bool seen = card->name[0];

	return json_pack(
		"{ss sI ss* ss* ss* ss* ss* sb sI sI}", "state", inspect_gpu_state(card->state),
		"state_s", (json_int_t)((now_us() - since) / 1000000), "why",
		card->why[0] ? card->why : NULL, "name", seen ? card->name : NULL, "code",
		card->code[0] ? card->code : NULL, "driver",
		seen ? version_text((unsigned)card->driver / 1000,
				    (unsigned)card->driver % 1000 / 10, driver)
		     : NULL,
		"capability",
		seen ? version_text(card->capability / 10, card->capability % 10, capability) : NULL,
		"emulator", card->emulator, "total_bytes", (json_int_t)card->total_bytes, "lost",
		(json_int_t)card->n_lost);
}

static json_t *budget_json(const struct residency_stats *s)
{
	return json_pack("{sI sI sI sI sI sI sI sI sI sI}", "max", (json_int_t)s->budget_bytes,
			 "configured", (json_int_t)s->budget_at_load_bytes, "floor",
			 (json_int_t)s->floor_bytes, "reserve", (json_int_t)s->reserve_bytes,
			 "trunk", (json_int_t)s->trunk_bytes, "trunk_locked",
			 (json_int_t)s->trunk_locked_bytes, "fixed", (json_int_t)s->fixed_bytes,
			 "kv", (json_int_t)s->kv_bytes, "blocks", (json_int_t)s->block_bytes,
			 "blocks_all", (json_int_t)s->block_bytes_all);
}

static json_t *counters_json(const struct engine_inspect *i)
{
	const struct residency_stats *s = &i->stats;

	return json_pack("{sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI sb}", "hits",
			 (json_int_t)s->hits, "misses", (json_int_t)s->misses, "prefetch_used",
			 (json_int_t)s->prefetch_used, "prefetch_wasted",
			 (json_int_t)s->prefetch_wasted, "bypassed", (json_int_t)s->bypassed,
			 "evicted", (json_int_t)s->io.blocks_evicted, "steps", (json_int_t)s->steps,
			 "decode_tokens", (json_int_t)s->decode_tok, "stall_us",
			 (json_int_t)s->stall_us, "bytes_read", (json_int_t)s->io.bytes_read,
			 "blocks_read", (json_int_t)s->io.blocks_read, "read_us",
			 (json_int_t)s->io.read_us, "read_errors", (json_int_t)s->io.read_errors,
			 "left_pages", (json_int_t)s->io.left_pages, "compute_major_faults",
			 (json_int_t)i->compute_major_faults, "kernel_took", (json_int_t)s->kernel_took,
			 "doubled", (json_int_t)s->doubled, "prefetching", s->prefetching);
}

/* NULL: no GPU holds experts. */
static json_t *vram_json(const struct residency_vram *v)
{
	if (!v->present)
		return NULL;
	return json_pack("{sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI sI}", "budget_bytes",
			 (json_int_t)v->budget_bytes, "fixed_bytes", (json_int_t)v->fixed_bytes,
			 "trunk_bytes", (json_int_t)v->trunk_bytes, "slot_bytes",
			 (json_int_t)v->slot_bytes, "block_bytes", (json_int_t)v->block_bytes,
			 "reserve_bytes", (json_int_t)v->reserve_bytes, "free_bytes",
			 (json_int_t)v->free_bytes, "overlap_bytes", (json_int_t)v->overlap_bytes,
			 "n_blocks", (json_int_t)v->n_blocks, "hits", (json_int_t)v->hits,
			 "promoted", (json_int_t)v->promoted, "demoted", (json_int_t)v->demoted,
			 "copied_back", (json_int_t)v->copied_back, "staged", (json_int_t)v->staged,
			 "on_cpu", (json_int_t)v->on_cpu, "bytes_copied", (json_int_t)v->bytes_copied,
			 "copy_us", (json_int_t)v->copy_us, "chunks_given_back",
			 (json_int_t)v->chunks_given_back, "graph_steps", (json_int_t)v->graph_steps);
}

static json_t *layers_json(const struct engine_inspect *i)
{
	const uint16_t *heat = i->heat;
	const char *place = i->place;
	json_t *layers = json_array();

	for (uint32_t k = 0; k < i->n_layers; k++) {
		const struct residency_layer_info *l = &i->layers[k];
		json_t *o = json_pack("{sI sI sI sI sI sI sI sI}", "layer", (json_int_t)l->layer,
				      "experts", (json_int_t)l->n_experts, "block_bytes",
				      (json_int_t)l->block_bytes, "host", (json_int_t)l->n_host, "vram",
				      (json_int_t)l->n_vram, "vram_hits", (json_int_t)l->vram_hits,
				      "hits", (json_int_t)l->hits, "misses", (json_int_t)l->misses);

		if (o && heat && place) {
			json_t *heats = json_array();

			for (uint32_t e = 0; e < l->n_experts; e++)
				(void)json_array_append_new(heats, json_integer(heat[e]));
			(void)json_object_set_new(o, "heat", heats);
			(void)json_object_set_new(o, "place", json_stringn(place, l->n_experts));
			heat += l->n_experts;
			place += l->n_experts;
		}
		if (json_array_append_new(layers, o) < 0) {
			json_decref(layers);
			return NULL;
		}
	}
	return layers;
}

static size_t count_requests(const struct daemon *d, size_t *ret_running)
{
	*ret_running = d->n_requests > 0;
	return d->n_requests - *ret_running;
}

static json_t *histogram_json(const struct daemon *d)
{
	uint64_t count[FEED_HISTOGRAM];
	json_t *list = json_array();

	if (d->feed && feed_histogram(d->feed, count) == 0)
		for (size_t i = 0; i < FEED_HISTOGRAM; i++)
			(void)json_array_append_new(list, json_integer((json_int_t)count[i]));
	return list;
}

static json_t *residency_json(const struct daemon *d, const struct engine_inspect *i)
{
	enum feed_source source = d->feed ? feed_source(d->feed) : FEED_NONE;
	const char *reason = d->feed ? feed_reason(d->feed) : NULL;
	size_t running, waiting = count_requests(d, &running);

	return json_pack(
		"{ss* ss ss ss* ss ss ss* so so so* s{sf sI sI sI} so sf sf sI sI so}", "model",
		d->model ? d->model->name : NULL, "tier",
		i->loaded ? residency_tier_to_string(i->stats.tier) : "none", "tier_reason",
		i->loaded && d->tier_reason ? d->tier_reason : "no model is loaded", "method",
		i->stats.method, "policy", i->stats.policy ? i->stats.policy : "none", "feed",
		feed_source_to_string(source), "feed_reason", reason, "budget",
		budget_json(&i->stats), "counters", counters_json(i), "vram",
		vram_json(&i->stats.vram), "pressure", "some_avg10", pressure_some_avg10(),
		"available", (json_int_t)d->memory_available, "steps_down",
		(json_int_t)d->budget_steps_down, "steps_up", (json_int_t)d->budget_steps_up,
		"fault_histogram", histogram_json(d), "decode_tokens_per_second",
		(double)rate_per_second_milli(&d->decode_rate) / 1000, "prefill_tokens_per_second",
		(double)rate_per_second_milli(&d->prefill_rate) / 1000, "running",
		(json_int_t)running, "queued", (json_int_t)waiting, "layers", layers_json(i));
}

void inspect_done(struct daemon *d, struct engine_inspect *i)
{
	struct conn *c = d->conns;

	while (c && c->inspect != i)
		c = c->next;
	if (c) {
		c->inspect = NULL;
		conn_reply(c, c->oomd ? json_object() : residency_json(d, i), false);
	}
	engine_inspect_free(i);
}

/* Routing. */

void inspect_trace(struct conn *c, int64_t tokens)
{
	if (!may_inspect(c)) {
		conn_error(c, ERROR_NOT_AUTHORIZED,
			   "routing is shown to root and to the service's own user", 0);
		return;
	}
	if (!c->current->call.more) {
		conn_error(c, ERROR_INVALID_REQUEST, "TraceRouting is a stream: it needs `more`", 0);
		return;
	}
	if (c->daemon->model && c->daemon->model->n_expert_used == 0) {
		conn_error(c, ERROR_NOT_SUPPORTED, "the model has no experts: nothing is routed", 0);
		return;
	}
	c->tracing = tokens;
	c->daemon->n_tracing++;
	engine_record(c->daemon->engine, true);
}

static void stop_tracing(struct conn *c)
{
	c->tracing = 0;
	if (--c->daemon->n_tracing == 0)
		engine_record(c->daemon->engine, false);
}

void inspect_hang_up(struct conn *c)
{
	if (c->tracing != 0)
		stop_tracing(c);
}

void inspect_traced(struct daemon *d, struct engine_trace *t)
{
	struct conn *next;

	for (struct conn *c = d->conns; c; c = next) {
		json_t *line;

		next = c->next;
		if (c->tracing == 0)
			continue;
		/* Without its newline. */
		line = json_pack("{ss%}", "line", t->line.data, t->line.len - 1);
		if (!line || c->tracing == 1) {
			stop_tracing(c);
			conn_reply(c, line, false);
		} else {
			c->tracing -= c->tracing > 0;
			conn_reply(c, line, true);
		}
	}
	engine_trace_free(t);
}

/* The feed. */

static void on_feed_change(void *arg)
{
	struct daemon *d = arg;
	const char *reason = feed_reason(d->feed);

	log_info("pages of the model are watched by %s%s%s",
		 feed_source_to_string(feed_source(d->feed)), reason ? ": " : "", reason ? reason : "");
}

static void give_feed(struct daemon *d)
{
	struct engine_feed *f = calloc(1, sizeof(*f));

	if (!f)
		return;
	f->mail.kind = ENGINE_FEED;
	f->feed = d->feed;
	f->model = d->model;
	engine_post(d->engine, &f->mail);
}

void inspect_follow_model(struct daemon *d, const struct model *old)
{
	int r;

	if (old != d->model)
		d->feed = feed_free(d->feed);
	/* What the kernel manages need not be watched. */
	if (!d->model || d->feed || !atomic_load(&engine_shared(d->engine)->managed))
		return;
	r = feed_new(d->event, NULL, d->model->catalog, on_feed_change, d, &d->feed);
	if (r < 0) {
		log_warning("the model's pages cannot be watched: %s", strerror(-r));
		return;
	}
	on_feed_change(d);
	give_feed(d);
}

void inspect_stop(struct daemon *d)
{
	d->latency_timer = sd_event_source_disable_unref(d->latency_timer);
	d->feed = feed_free(d->feed);
}
