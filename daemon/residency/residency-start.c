/* SPDX-License-Identifier: MIT */
/*
 * residency-start.c: the beginning and the end of a model's residency: which form, how much memory, what comes in first. See
 * residency.h.
 *
 * Engine thread, and the thread that populates a mapping that nobody manages. Refuses to know layers and steps (residency.c).
 * Invariant: nothing is read for blocks before the budget is known to reach the floor.
 */
#include "daemon/residency/residency-private.h"

#include "daemon/residency/choose.h"
#include "daemon/residency/heat.h"
#include "daemon/residency/memory.h"

#include <inttypes.h>

static void *populate(void *arg)
{
	struct residency *r = arg;

	(void)pthread_setname_np(pthread_self(), "residentd-load");
	(void)host_load_all(r->catalog, &r->loader_stop);
	return NULL;
}

static void stop_loader(struct residency *r)
{
	if (!r->loader_runs)
		return;
	atomic_store(&r->loader_stop, true);
	pthread_join(r->loader, NULL);
	r->loader_runs = false;
}

/* Blocks of the form's host tier, and who ranks them. */
static int make_host(struct residency *r, enum host_form form, char **ret_error)
{
	const struct disk_config disk = { .queue_depth = r->config.queue_depth };
	_cleanup_(freep) uint8_t *class_of = malloc(r->catalog->n_blocks);
	struct host *h;
	int err;

	if (!class_of)
		return -ENOMEM;
	err = host_new(form, r->catalog, &disk, &h, ret_error);
	if (err < 0)
		return err;
	for (uint32_t i = 0; i < r->catalog->n_blocks; i++)
		class_of[i] = host_class(h, i);
	err = evict_new(r->config.policy, r->catalog->n_blocks, class_of, &r->evict);
	if (err == 0)
		err = admission_new(r->config.policy, r->catalog->n_blocks, &r->admission);
	if (err < 0) {
		host_free(h);
		r->evict = evict_free(r->evict);
		return err;
	}
	for (uint32_t i = 0; i < r->catalog->n_blocks; i++)
		if (host_state(h, i) == HOST_HERE)
			evict_insert(r->evict, i);
	r->host = h;
	r->tier = form == HOST_ARENA ? RESIDENCY_ARENA : RESIDENCY_MAPPED;
	return 0;
}

static void begin_warm(struct residency *r)
{
	_cleanup_(freep) uint16_t *heat = NULL;

	r->heat_file = r->config.state_dir ? heat_path(r->config.state_dir, r->catalog->identity) : NULL;
	heat = r->heat_file ? malloc(r->catalog->n_blocks * sizeof(*heat)) : NULL;
	if (heat && heat_load(r->heat_file, r->catalog->identity, r->catalog->n_blocks, heat) == 0)
		residency_warm(r, heat);
}

/* What fitted once does not any more: the page cache that is there becomes the mapped form. */
int residency_become_mapped(struct residency *r)
{
	int err;

	if (r->n_left > 0) /* in the middle of a layer: its addresses are given out */
		return -EAGAIN;
	stop_loader(r);
	err = make_host(r, HOST_MAPPED, NULL);
	if (err < 0)
		return err;
	begin_warm(r);
	residency_publish(r);
	return 0;
}

static int allocate(struct residency *r)
{
	const struct catalog *c = r->catalog;
	uint32_t n = MAX(c->n_blocks, 1u), widest = 1;

	r->layers = calloc(c->n_layers + 1, sizeof(*r->layers));
	r->ordinal = calloc(c->n_layers + 1, sizeof(*r->ordinal));
	r->of_layer = calloc(c->n_layers + 1, sizeof(*r->of_layer));
	if (!r->layers || !r->ordinal || !r->of_layer)
		return -ENOMEM;
	for (uint32_t i = 0; i < c->n_layers; i++) {
		if (c->layers[i].first_block == CATALOG_NONE)
			continue;
		widest = MAX(widest, c->layers[i].n_expert);
		r->ordinal[i] = r->n_layers;
		r->layers[r->n_layers++] = i;
	}
	r->wanted = calloc(widest, sizeof(*r->wanted));
	r->index_of = calloc(n, sizeof(*r->index_of));
	r->keep = calloc(n, 1);
	r->transient = calloc(n, 1);
	r->guessed = calloc(n, 1);
	r->ahead = calloc(n, 1);
	r->transients = calloc(n, sizeof(*r->transients));
	r->checked = calloc(n, sizeof(*r->checked));
	r->warm = calloc(n, sizeof(*r->warm));
	r->record_counts = calloc(c->n_layers + 1, sizeof(*r->record_counts));
	r->record_experts = calloc(n, sizeof(*r->record_experts));
	return r->wanted && r->index_of && r->keep && r->transient && r->guessed && r->ahead &&
			       r->transients && r->checked && r->warm && r->record_counts &&
			       r->record_experts
		       ? 0
		       : -ENOMEM;
}

static int set_budget(struct residency *r, struct choose_facts *facts, uint64_t kv_min, char **ret_error)
{
	const struct residency_config *c = &r->config;
	uint64_t most, least;
	_cleanup_(memory_closep) struct memory *memory = NULL;
	struct memory_state state = { .total = UINT64_MAX,
				      .available = UINT64_MAX,
				      .group_limit = UINT64_MAX,
				      .group_available = UINT64_MAX };
	int err = memory_open("", &memory);

	if (err == 0)
		err = memory_read(memory, &state);
	if (err < 0)
		return fail(ret_error, err, "cannot see how much memory there is: %s", strerror(-err));
	r->reserve = c->reserve_bytes > 0 ? c->reserve_bytes
					  : memory_default_reserve(state.machine_total);
	/* All of it is ours, or the model's that this one takes the place of. */
	most = memory_budget(&state, memory_anonymous(memory) + atomic_load(&r->shared->locked_bytes),
			     r->reserve);
	r->configured = c->budget_bytes;
	r->budget = c->budget_bytes > 0 ? MIN(c->budget_bytes, most) : most;
	least = r->catalog->trunk_bytes + r->fixed + kv_min;
	r->floor = least + 2 * (uint64_t)r->model->n_expert_used * r->catalog->block_bytes_max;
	*facts = (struct choose_facts){
		.wanted = c->tier,
		.budget_bytes = r->budget,
		.needed_bytes = least + r->catalog->block_bytes,
		.available_bytes = state.available,
	};
	r->floor = MIN(r->floor, facts->needed_bytes);
	/* What becomes free later is taken too, unless somebody has set a limit. */
	if (r->configured == 0)
		r->configured = MAX(facts->needed_bytes, r->budget);
	r->at_load = r->budget;
	return 0;
}

static uint64_t megabytes(uint64_t bytes)
{
	return bytes / 1000000 + (bytes % 1000000 > 0);
}

static int refuse_budget(const struct residency *r, const char *path, char **ret_error)
{
	bool experts = r->catalog->n_blocks > 0;

	return fail(ret_error, -ENOSPC,
		    "%s: needs at least %" PRIu64 " MB of memory, %" PRIu64
		    " MB of them for the trunk and %" PRIu64
		    " MB for work%s one conversation (Context= makes it smaller)%s, but the budget is %" PRIu64
		    " MB (HostBudget=, or what is available less MemoryReserve=)",
		    path, megabytes(r->floor), megabytes(r->catalog->trunk_bytes),
		    megabytes(r->floor - r->catalog->trunk_bytes), experts ? "," : " and",
		    experts ? " and some experts" : "", r->budget / 1000000);
}

static int start(struct residency *r, enum residency_tier tier, const atomic_bool *stop, char **ret_error)
{
	int err;

	r->tier = tier;
	if (tier == RESIDENCY_UNMANAGED) {
		/* The first request need not wait for it. */
		r->loader_runs = pthread_create(&r->loader, NULL, populate, r) == 0;
		return 0;
	}
	err = make_host(r, tier == RESIDENCY_ARENA ? HOST_ARENA : HOST_MAPPED, ret_error);
	if (err == 0) {
		err = host_load_trunk(r->catalog, true, stop, &r->trunk_locked);
		if (err < 0 && err != -ECANCELED)
			return fail(ret_error, err, "%s: cannot be read: %s", r->model->path,
				    strerror(-err));
	}
	if (err < 0)
		return err;
	residency_enforce(r);
	begin_warm(r);
	return 0;
}

int residency_new(const struct model *m, const struct residency_config *c, uint64_t fixed_bytes,
		  uint64_t kv_min_bytes, struct residency_shared *shared, const atomic_bool *stop,
		  struct residency **ret, char **ret_reason, char **ret_error)
{
	const struct disk_config disk = { .queue_depth = c->queue_depth };
	struct residency *r = calloc(1, sizeof(*r));
	struct choose_facts facts;
	enum residency_tier tier;
	int err;

	if (!r)
		return -ENOMEM;
	r->model = m;
	r->catalog = m->catalog;
	r->config = *c;
	r->shared = shared;
	r->fixed = fixed_bytes;
	r->kv = 0;
	prefetch_init(&r->prefetch, c->prefetch);
	err = allocate(r);
	if (err == 0)
		err = set_budget(r, &facts, kv_min_bytes, ret_error);
	if (err < 0) {
		residency_free(r);
		return err;
	}
	if (r->catalog->n_blocks == 0)
		facts.wanted = RESIDENCY_UNMANAGED;
	if (c->tier == RESIDENCY_AUTO && r->catalog->n_blocks > 0 &&
	    facts.needed_bytes > facts.budget_bytes)
		choose_measure(r->catalog, &disk, &facts.mapped_bps, &facts.arena_bps);
	r->small = facts.needed_bytes <= facts.available_bytes / CHOOSE_SMALL_SHARE;
	tier = choose_tier(&facts, ret_reason);
	if (tier == RESIDENCY_UNMANAGED) /* also a toy when memory is short */
		r->budget = r->at_load = r->configured = MAX(r->budget, facts.needed_bytes);
	err = r->budget < r->floor ? refuse_budget(r, m->path, ret_error)
				   : start(r, tier, stop, ret_error);
	if (err < 0) {
		residency_free(r);
		return err;
	}
	atomic_store(&shared->target_bytes, 0);
	residency_publish(r);
	*ret = r;
	return 0;
}

struct residency *residency_free(struct residency *r)
{
	if (!r)
		return NULL;
	stop_loader(r);
	residency_end_layer(r);
	(void)residency_save_heat(r);
	residency_card_free(r->card);
	host_free(r->host);
	evict_free(r->evict);
	admission_free(r->admission);
	free(r->heat_file);
	free(r->wanted);
	free(r->index_of);
	free(r->keep);
	free(r->transient);
	free(r->guessed);
	free(r->ahead);
	free(r->transients);
	free(r->checked);
	free(r->warm);
	free(r->layers);
	free(r->of_layer);
	free(r->ordinal);
	free(r->record_counts);
	free(r->record_experts);
	free(r);
	return NULL;
}
