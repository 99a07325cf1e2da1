/* SPDX-License-Identifier: MIT */
/*
 * ctl-residency-view.c: GetResidency's reply, field by field. See ctl-residency-view.h.
 */
#include "client/ctl-residency-view.h"

#define TEXT_MAX   4096
#define NUMBER_MAX INT64_MAX
#define REAL_MAX   1e15

struct number {
	const char *key;
	size_t offset;
};
#define NUMBER(group, member)                                          \
	{                                                              \
#member, offsetof(struct residency_view, group.member) \
	}

static const struct number budget_numbers[] = {
	NUMBER(budget, max),        NUMBER(budget, configured), NUMBER(budget, floor),
	NUMBER(budget, reserve),    NUMBER(budget, trunk),      NUMBER(budget, trunk_locked),
	NUMBER(budget, fixed),      NUMBER(budget, kv),         NUMBER(budget, blocks),
	NUMBER(budget, blocks_all),
};

static const struct number counters_numbers[] = {
	NUMBER(counters, hits),
	NUMBER(counters, misses),
	NUMBER(counters, prefetch_used),
	NUMBER(counters, prefetch_wasted),
	NUMBER(counters, bypassed),
	NUMBER(counters, evicted),
	NUMBER(counters, steps),
	NUMBER(counters, decode_tokens),
	NUMBER(counters, stall_us),
	NUMBER(counters, bytes_read),
	NUMBER(counters, blocks_read),
	NUMBER(counters, read_us),
	NUMBER(counters, read_errors),
	NUMBER(counters, left_pages),
	NUMBER(counters, compute_major_faults),
	NUMBER(counters, kernel_took),
	NUMBER(counters, doubled),
};

static const struct number vram_numbers[] = {
	NUMBER(vram, budget_bytes), NUMBER(vram, fixed_bytes),   NUMBER(vram, trunk_bytes),
	NUMBER(vram, slot_bytes),   NUMBER(vram, block_bytes),   NUMBER(vram, reserve_bytes),
	NUMBER(vram, free_bytes),   NUMBER(vram, overlap_bytes), NUMBER(vram, n_blocks),
	NUMBER(vram, hits),         NUMBER(vram, promoted),      NUMBER(vram, demoted),
	NUMBER(vram, copied_back),  NUMBER(vram, staged),        NUMBER(vram, on_cpu),
	NUMBER(vram, bytes_copied), NUMBER(vram, copy_us),       NUMBER(vram, chunks_given_back),
	NUMBER(vram, graph_steps),
};

static const struct number pressure_numbers[] = {
	NUMBER(pressure, available),
	NUMBER(pressure, steps_down),
	NUMBER(pressure, steps_up),
};

static uint64_t read_number(struct args *a, const char *key, uint64_t max)
{
	int64_t i = 0;

	args_i64(a, key, true, 0, (int64_t)max, &i);
	return (uint64_t)i;
}

static const char *read_text(struct args *a, const char *key, bool required)
{
	const char *s = NULL;

	args_str(a, key, required, TEXT_MAX, &s, NULL);
	return s;
}

/* Begins in with the object of that name, or refuses its absence. */
static bool enter(struct args *a, const char *key, bool required, struct args *in)
{
	json_t *o = NULL;

	if (!args_object(a, key, required, &o))
		return false;
	args_begin(in, o);
	return true;
}

/* What was wrong inside is wrong outside. */
static void leave(struct args *a, const struct args *in)
{
	if (in->bad)
		args_refuse(a, in->bad, in->why);
}

static void read_numbers(struct args *a, const struct number *numbers, size_t n,
			 struct residency_view *v)
{
	for (const struct number *f = numbers; f < numbers + n; f++)
		*(uint64_t *)(void *)((char *)v + f->offset) = read_number(a, f->key, NUMBER_MAX);
}

static void read_groups(struct args *a, struct residency_view *v)
{
	struct args in;

	if (enter(a, "budget", true, &in)) {
		read_numbers(&in, budget_numbers, ARRAY_SIZE(budget_numbers), v);
		leave(a, &in);
	}
	if (enter(a, "counters", true, &in)) {
		read_numbers(&in, counters_numbers, ARRAY_SIZE(counters_numbers), v);
		args_bool(&in, "prefetching", &v->counters.prefetching);
		leave(a, &in);
	}
	v->has_vram = enter(a, "vram", false, &in);
	if (v->has_vram) {
		read_numbers(&in, vram_numbers, ARRAY_SIZE(vram_numbers), v);
		leave(a, &in);
	}
	if (enter(a, "pressure", true, &in)) {
		read_numbers(&in, pressure_numbers, ARRAY_SIZE(pressure_numbers), v);
		args_f64(&in, "some_avg10", 0, 100, &v->pressure.some_avg10);
		leave(a, &in);
	}
}

static void read_histogram(struct args *a, struct residency_view *v)
{
	json_t *list = NULL, *item;
	size_t i;

	args_array(a, "fault_histogram", true, RESIDENCY_VIEW_BUCKETS_MAX, &list);
	json_array_foreach(list, i, item) {
		if (!json_is_integer(item) || json_integer_value(item) < 0) {
			args_refuse(a, "fault_histogram", "has an item that is not a count");
			return;
		}
		v->histogram[i] = (uint64_t)json_integer_value(item);
	}
	v->n_histogram = json_array_size(list);
}

static int read_heat(struct args *a, json_t *list, struct residency_view_layer *l)
{
	json_t *item;
	size_t i;

	if (json_array_size(list) != l->n_experts) {
		args_refuse(a, "heat", "is not as long as there are experts");
		return 0;
	}
	l->heat = calloc(MAX(l->n_experts, 1u), sizeof(*l->heat));
	if (!l->heat)
		return -ENOMEM;
	json_array_foreach(list, i, item) {
		json_int_t heat = json_integer_value(item);

		if (!json_is_integer(item) || heat < 0 || heat > RESIDENCY_VIEW_HEAT_MAX) {
			args_refuse(a, "heat", "has an item that is out of range");
			return 0;
		}
		l->heat[i] = (uint16_t)heat;
	}
	return 0;
}

static int read_layer(struct args *outer, json_t *item, struct residency_view_layer *l)
{
	json_t *heat = NULL;
	size_t len = 0;
	struct args a;
	int r = 0;

	if (!json_is_object(item)) {
		args_refuse(outer, "layers", "has an item that is not an object");
		return 0;
	}
	args_begin(&a, item);
	l->layer = (uint32_t)read_number(&a, "layer", RESIDENCY_VIEW_LAYERS_MAX);
	l->n_experts = (uint32_t)read_number(&a, "experts", RESIDENCY_VIEW_EXPERTS_MAX);
	l->block_bytes = read_number(&a, "block_bytes", NUMBER_MAX);
	l->n_host = (uint32_t)read_number(&a, "host", l->n_experts);
	l->n_vram = (uint32_t)read_number(&a, "vram", l->n_experts);
	l->vram_hits = read_number(&a, "vram_hits", NUMBER_MAX);
	l->hits = read_number(&a, "hits", NUMBER_MAX);
	l->misses = read_number(&a, "misses", NUMBER_MAX);
	if (args_str(&a, "place", false, RESIDENCY_VIEW_EXPERTS_MAX, &l->place, &len) &&
	    (len != l->n_experts || strspn(l->place, "vhc-") != len))
		args_refuse(&a, "place", "is not one of v, h, c and - for every expert");
	if (args_array(&a, "heat", false, RESIDENCY_VIEW_EXPERTS_MAX, &heat))
		r = read_heat(&a, heat, l);
	leave(outer, &a);
	return r;
}

static int read_layers(struct args *a, struct residency_view *v)
{
	json_t *list = NULL;
	int r = 0;

	if (!args_array(a, "layers", true, RESIDENCY_VIEW_LAYERS_MAX, &list) ||
	    json_array_size(list) == 0)
		return 0;
	v->layers = calloc(json_array_size(list), sizeof(*v->layers));
	if (!v->layers)
		return -ENOMEM;
	v->n_layers = json_array_size(list);
	for (size_t i = 0; i < v->n_layers && r == 0 && !a->bad; i++) {
		r = read_layer(a, json_array_get(list, i), &v->layers[i]);
		/* No sum with another number overflows. */
		v->vram_hits += MIN(v->layers[i].vram_hits, NUMBER_MAX - v->vram_hits);
	}
	return r;
}

int residency_view_read(struct args *a, json_t *reply, struct residency_view *ret)
{
	struct residency_view v = { .reply = json_incref(reply) };
	int r;

	args_begin(a, reply);
	v.model = read_text(a, "model", false);
	v.tier = read_text(a, "tier", true);
	v.tier_reason = read_text(a, "tier_reason", true);
	v.method = read_text(a, "method", false);
	v.policy = read_text(a, "policy", true);
	v.feed = read_text(a, "feed", true);
	v.feed_reason = read_text(a, "feed_reason", false);
	read_groups(a, &v);
	read_histogram(a, &v);
	args_f64(a, "decode_tokens_per_second", 0, REAL_MAX, &v.decode_tokens_per_second);
	args_f64(a, "prefill_tokens_per_second", 0, REAL_MAX, &v.prefill_tokens_per_second);
	v.running = read_number(a, "running", NUMBER_MAX);
	v.queued = read_number(a, "queued", NUMBER_MAX);
	r = read_layers(a, &v);
	if (r == 0 && a->bad)
		r = -EBADMSG;
	if (r < 0) {
		residency_view_done(&v);
		return r;
	}
	*ret = v;
	return 0;
}

void residency_view_done(struct residency_view *v)
{
	for (size_t i = 0; i < v->n_layers; i++)
		free(v->layers[i].heat);
	free(v->layers);
	json_decref(v->reply);
	*v = (struct residency_view){};
}

bool residency_view_managed(const struct residency_view *v)
{
	return !streq(v->tier, "none") && !streq(v->tier, "unmanaged");
}

double residency_view_amplification(const struct residency_view *v)
{
	uint64_t n = v->counters.blocks_read, misses = 0;
	double missed = 0, wanted = -1;
	bool same = v->n_layers > 0;

	for (size_t i = 0; i < v->n_layers; i++) {
		const struct residency_view_layer *l = &v->layers[i];

		same = same && l->block_bytes == v->layers[0].block_bytes;
		missed += (double)l->misses * (double)l->block_bytes;
		misses += l->misses;
	}
	/* Of blocks that differ in size, only the total is known, so each must have been a miss. */
	if (same)
		wanted = (double)n * (double)v->layers[0].block_bytes;
	else if (misses == n)
		wanted = missed;
	return wanted > 0 ? (double)v->counters.bytes_read / wanted : -1;
}
