/* SPDX-License-Identifier: MIT */
/*
 * residency-private.h: what the files of residency.h share: residency.c (layers and steps), residency-start.c (beginning and end),
 * residency-look.c (what is seen from outside). Engine thread only.
 */
#pragma once

#include "daemon/residency/admission.h"
#include "daemon/residency/prefetch.h"
#include "daemon/residency/residency.h"

#include <pthread.h>

struct wanted {
	uint32_t block, expert;
	enum { WANT_PENDING, WANT_COMING, WANT_READY, WANT_GIVEN, WANT_DONE } state;
	bool missed;
};

struct residency {
	const struct model *model;
	const struct catalog *catalog;
	const struct feed *feed;
	struct residency_shared *shared;
	struct residency_config config;
	enum residency_tier tier;
	struct host *host; /* NULL: unmanaged */
	struct evict *evict;
	struct admission *admission;
	struct prefetch prefetch;
	char *heat_file;
	uint64_t heat_saved_steps;
	int heat_error;

	uint64_t budget, at_load, floor, reserve;
	uint64_t configured; /* the most that the budget may become */
	bool small;          /* so small that managing it would be a joke */
	uint64_t trunk_locked, fixed, kv;
	const char *budget_note;
	uint64_t refaults_seen, taken_seen;

	/* The populating thread of the unmanaged form. */
	pthread_t loader;
	bool loader_runs;
	atomic_bool loader_stop;

	/* The layer at hand. */
	uint32_t layer;
	struct wanted *wanted;
	uint32_t *index_of;                           /* of a block in wanted, + 1 */
	size_t n_wanted, n_pending, n_coming, n_left; /* left: not yet given */
	size_t n_held; /* missed ones that have a place and are not done with */
	int error;

	uint8_t *keep, *transient, *guessed, *ahead; /* per block */
	uint32_t *transients; /* queue of blocks that are worth less than any victim */
	size_t first_transient, n_transients;
	uint32_t *checked; /* step at which the page cache was asked last */
	uint32_t scan;

	uint32_t *warm; /* blocks to bring in, coldest first */
	size_t n_warm;

	/* The step at hand. */
	bool decode, one_row;
	uint16_t *session_heat;
	uint64_t step_begun, step_stall;

	/* Per layer with experts. */
	uint32_t *layers, n_layers;
	struct {
		uint64_t hits, misses;
	} * of_layer;
	uint32_t *ordinal; /* of a layer of the model among those with experts */

	bool record, recorded;
	uint32_t *record_counts, *record_experts;
	size_t n_record;

	struct residency_stats stats; /* the counters of it */
};

uint64_t residency_block_limit(const struct residency *r); /* bytes that places of blocks may take */
uint64_t residency_taken(const struct residency *r);       /* and what they take, as it counts against the limit */
void residency_enforce(struct residency *r); /* down to the limit; what is wanted now stays, the next call gets it */
bool residency_make_room(struct residency *r, uint32_t block);
int residency_request(struct residency *r, uint32_t block, bool urgent); /* begins to read it; there is room */
void residency_drop(struct residency *r, uint32_t block);                /* HERE, and wanted by nobody */
void residency_end_layer(struct residency *r);
int residency_become_mapped(struct residency *r);
