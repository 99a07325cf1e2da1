/* SPDX-License-Identifier: MIT */
/*
 * residency-look.c: what is seen of the residency from outside: numbers, places, the recorded choices. See residency.h.
 *
 * Owns nothing. Engine thread only. Changes nothing but whether choices are recorded.
 */
#include "daemon/residency/residency-private.h"

const char *residency_tier_to_string(enum residency_tier t)
{
	switch (t) {
	case RESIDENCY_AUTO: return "auto";
	case RESIDENCY_UNMANAGED: return "unmanaged";
	case RESIDENCY_MAPPED: return "mapped";
	case RESIDENCY_ARENA: return "arena";
	}
	return "auto";
}

void residency_record(struct residency *r, bool record)
{
	r->record = record;
	r->recorded = false;
}

bool residency_recorded(const struct residency *r, uint32_t *ret_n_layers,
			const uint32_t **ret_counts, const uint32_t **ret_experts)
{
	if (!r->recorded)
		return false;
	*ret_n_layers = r->n_layers;
	*ret_counts = r->record_counts;
	*ret_experts = r->record_experts;
	return true;
}

/* Of blocks, not of the places that they take. */
static uint64_t bytes_here(const struct residency *r)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < r->n_layers; i++) {
		const struct catalog_layer *l = &r->catalog->layers[r->layers[i]];

		for (uint32_t e = 0; e < l->n_expert; e++)
			if (host_state(r->host, l->first_block + e) == HOST_HERE)
				sum += l->block_bytes;
	}
	return sum;
}

void residency_get_stats(const struct residency *r, struct residency_stats *ret)
{
	*ret = r->stats;
	ret->tier = r->tier;
	ret->policy = r->host ? evict_policy_to_string(r->config.policy) : "none";
	ret->budget_bytes = r->budget;
	ret->budget_at_load_bytes = r->at_load;
	ret->floor_bytes = r->floor;
	ret->reserve_bytes = r->reserve;
	ret->trunk_bytes = r->catalog->trunk_bytes;
	ret->trunk_locked_bytes = r->trunk_locked;
	ret->fixed_bytes = r->fixed + (r->card ? r->card->config.host_bytes : 0);
	ret->kv_bytes = r->kv;
	ret->block_bytes_all = r->catalog->block_bytes;
	ret->n_blocks = r->catalog->n_blocks;
	ret->heat_error = r->heat_error;
	ret->budget_note = r->budget_note;
	ret->prefetching = r->host && prefetch_read(&r->prefetch);
	ret->n_host = r->catalog->n_blocks;
	ret->block_bytes = ret->place_bytes = r->catalog->block_bytes;
	if (r->card)
		residency_card_get_stats(r, &ret->vram);
	if (!r->host)
		return;
	ret->method = host_method(r->host);
	ret->n_host = host_n_here(r->host);
	ret->block_bytes = bytes_here(r);
	ret->place_bytes = residency_taken(r);
	host_get_counters(r->host, &ret->io);
}

uint32_t residency_n_layers(const struct residency *r)
{
	return r->n_layers;
}

void residency_get_layer(const struct residency *r, uint32_t i, struct residency_layer_info *ret)
{
	const struct catalog_layer *l = &r->catalog->layers[r->layers[i]];

	*ret = (struct residency_layer_info){
		.layer = r->layers[i],
		.n_experts = l->n_expert,
		.n_host = r->host ? 0 : l->n_expert,
		.block_bytes = l->block_bytes,
		.hits = r->of_layer[i].hits,
		.vram_hits = r->of_layer[i].vram_hits,
		.misses = r->of_layer[i].misses,
	};
	for (uint32_t e = 0; r->host && e < l->n_expert; e++) {
		ret->n_host += host_state(r->host, l->first_block + e) == HOST_HERE;
		ret->n_vram += residency_card_has(r, l->first_block + e);
	}
}

void residency_get_blocks(const struct residency *r, uint32_t i, uint16_t *ret_heat, char *ret_place)
{
	static const char places[] = { [HOST_ABSENT] = '-', [HOST_COMING] = 'c', [HOST_HERE] = 'h' };
	const struct catalog_layer *l = &r->catalog->layers[r->layers[i]];

	for (uint32_t e = 0; e < l->n_expert; e++) {
		uint32_t block = l->first_block + e;

		ret_heat[e] = r->evict ? evict_heat(r->evict, block) : 0;
		ret_place[e] = residency_card_has(r, block) ? 'v'
			       : r->host                    ? places[host_state(r->host, block)]
							    : 'h';
	}
}
