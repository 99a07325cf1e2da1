/* SPDX-License-Identifier: MIT */
/*
 * ctl-residency-view.h: a reply to GetResidency as numbers and strings that can be relied on, and the
 * heat map that is drawn from it (ctl-svg.c).
 *
 * Pure; main thread. The service is not trusted: a field that is missing, of another type or out of
 * range refuses the whole reply, and a list is as long as its count says. Refuses to know how a reply
 * is asked for and where text goes: strings are as they came, control characters and all. Invariant:
 * strings point into the reply, which the view holds until residency_view_done().
 */
#pragma once

#include "daemon/varlink.h"

#define RESIDENCY_VIEW_LAYERS_MAX  4096
#define RESIDENCY_VIEW_EXPERTS_MAX 65536
#define RESIDENCY_VIEW_HEAT_MAX    65535
#define RESIDENCY_VIEW_BUCKETS_MAX 64

struct residency_view_layer {
	uint32_t layer, n_experts, n_host, n_vram;
	uint64_t block_bytes, vram_hits, hits, misses; /* hits: in the host's memory */
	uint16_t *heat;                                /* n_experts; NULL: not told */
	const char *place; /* n_experts letters of "vhc-"; NULL: not told */
};

struct residency_view {
	json_t *reply;     /* owned */
	const char *model; /* NULL: none */
	const char *tier, *tier_reason, *policy, *feed;
	const char *method, *feed_reason; /* or NULL */
	struct {
		uint64_t max, configured, floor, reserve, trunk, trunk_locked, fixed, kv, blocks,
			blocks_all;
	} budget; /* bytes */
	struct {
		uint64_t hits, misses, prefetch_used, prefetch_wasted, bypassed, evicted, steps,
			decode_tokens, stall_us, bytes_read, blocks_read, read_us, read_errors,
			left_pages, compute_major_faults, kernel_took, doubled;
		bool prefetching;
	} counters;
	uint64_t vram_hits; /* of all layers */
	bool has_vram;      /* a GPU holds experts; else all of vram is 0 */
	struct {
		uint64_t budget_bytes, fixed_bytes, trunk_bytes, slot_bytes, block_bytes,
			reserve_bytes, free_bytes, overlap_bytes, n_blocks, hits, promoted, demoted,
			copied_back, staged, on_cpu, bytes_copied, copy_us, chunks_given_back,
			graph_steps;
	} vram;
	struct {
		double some_avg10; /* percent */
		uint64_t available, steps_down, steps_up;
	} pressure;
	uint64_t histogram[RESIDENCY_VIEW_BUCKETS_MAX]; /* bucket i: faults of [2^i, 2^(i+1)) ns */
	size_t n_histogram;
	double decode_tokens_per_second, prefill_tokens_per_second;
	uint64_t running, queued;
	struct residency_view_layer *layers; /* owned, with their heat */
	size_t n_layers;
};

/* Begins a. -EBADMSG: a->bad and a->why say what is wrong; -ENOMEM. */
int residency_view_read(struct args *a, json_t *reply, struct residency_view *ret);
void residency_view_done(struct residency_view *v);

/* Blocks are moved by the service: there are hits, misses and a table to show. */
bool residency_view_managed(const struct residency_view *v);
/* Bytes read for each byte of the blocks that were read for; negative: it cannot be told. */
double residency_view_amplification(const struct residency_view *v);
/* Of hits and misses, as a percentage; 0 of nothing. */
static inline double residency_view_percent(uint64_t hits, uint64_t misses)
{
	double all = (double)hits + (double)misses;

	return all > 0 ? 100 * (double)hits / all : 0;
}

/* What was wanted and found, in the GPU's memory or the host's. */
static inline uint64_t residency_view_hits(const struct residency_view *v)
{
	return v->counters.hits + v->vram_hits;
}

/* Of what was wanted, what was found in the GPU's memory, as a percentage. */
static inline double residency_view_vram_percent(const struct residency_view *v)
{
	return residency_view_percent(v->vram_hits, v->counters.hits + v->counters.misses);
}

/* ctl-svg.c: appends an SVG 1.1 document: layers by experts, where every block is and how hot. -ENODATA:
 * the reply does not tell the blocks; -ENOMEM. */
int ctl_svg_heat_map(struct buf *out, const struct residency_view *v);
