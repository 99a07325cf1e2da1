/* SPDX-License-Identifier: MIT */
/*
 * residency-private.h: what the files of residency.h share: residency.c (layers and steps), residency-card.c (which blocks are worth a
 * slot of the card), residency-start.c (beginning and end), residency-look.c (what is seen from outside). Engine thread only.
 */
#pragma once

#include "daemon/residency/admission.h"
#include "daemon/residency/prefetch.h"
#include "daemon/residency/residency.h"
#include "daemon/residency/split.h"
#include "daemon/residency/vram.h"

#include <pthread.h>

struct wanted {
	uint32_t block, expert, n_tok;
	enum { WANT_PENDING, WANT_COMING, WANT_READY, WANT_GIVEN, WANT_DONE } state;
	bool missed;
	bool on_card; /* READY or GIVEN: computed there */
	bool decided; /* READY in host memory: the CPU computes it */
};

/* The VRAM tier. */
struct residency_card {
	struct vram *vram;
	struct evict *evict; /* ranks the blocks that stay on it */
	struct residency_card_config config;
	int error; /* < 0: the card is of no use any more */
	struct split split;
	struct split_prices prices;
	uint8_t *stays;   /* per block: 1 on its way or there to stay, and not only for one use */
	uint8_t *queued;  /* in candidates */
	uint8_t *gone;    /* bits, for vram_set_limit() */
	uint32_t *staged; /* blocks on the card for one use: they leave with the layer */
	uint32_t *confirmed;  /* blocks that are there for good now, whose host copies are to go */
	uint32_t *candidates; /* blocks that were used from host memory */
	size_t n_staged, n_confirmed, n_candidates;
	bool once;      /* the layer is computed in one launch: what comes later is the CPU's */
	bool closed;    /* and that launch may have been made */
	bool cpus_turn; /* the last wave was the card's */
	uint64_t limit, free_bytes, yielded;
	unsigned calm;                /* looks since slots had to be given back */
	uint64_t bytes_seen, us_seen; /* of vram's counters */
	/* The host's wave at hand. */
	uint64_t wave_begun, wave_bytes, wave_rows, wave_blocks;
	struct residency_vram stats;
};

struct residency {
	const struct model *model;
	const struct catalog *catalog;
	const struct feed *feed;
	struct residency_shared *shared;
	struct residency_config config;
	enum residency_tier tier;
	struct host *host;           /* NULL: unmanaged */
	struct residency_card *card; /* NULL: there is no card, or not any more */
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
	uint64_t trunk_away; /* of the trunk's bytes: on the card instead */
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
	size_t n_rows;
	uint16_t *session_heat;
	uint64_t step_begun, step_stall;

	/* Per layer with experts. */
	uint32_t *layers, n_layers;
	struct {
		uint64_t hits, misses, vram_hits;
	} * of_layer;
	uint32_t *ordinal; /* of a layer of the model among those with experts */

	bool record, recorded;
	uint32_t *record_counts, *record_experts;
	size_t n_record;

	struct residency_stats stats; /* the counters of it */
};

uint64_t residency_block_limit(const struct residency *r); /* bytes that places of blocks may take */
uint64_t residency_taken(const struct residency *r); /* and what they take, as it counts against the limit */
void residency_enforce(struct residency *r); /* down to the limit; what is wanted now stays, the next call gets it */
bool residency_make_room(struct residency *r, uint32_t block);
int residency_request(struct residency *r, uint32_t block, bool urgent); /* begins to read it; there is room */
void residency_drop(struct residency *r, uint32_t block); /* HERE, and wanted by nobody */
void residency_end_layer(struct residency *r);
int residency_become_mapped(struct residency *r);
/* One use of a block in this step, whoever computes it. */
void residency_count_use(struct residency *r, uint32_t block, uint32_t n_tok);
void residency_note_choice(struct residency *r, uint32_t layer, const uint32_t *experts, size_t n);

/* The card's part. All but card_has() are to be called only while there is one. */
bool residency_card_has(const struct residency *r, uint32_t block); /* what is launched from now on finds it */
void residency_card_step(struct residency *r);
void residency_card_layer(struct residency *r, size_t n_rows); /* what was there for one use leaves */
/* READY in host memory: is it brought over now to be computed there? LATER: when blocks that came for one use have left. */
enum card_way { CARD_NO, CARD_YES, CARD_LATER };
enum card_way residency_card_fetch(struct residency *r, const struct wanted *w);
void residency_card_given(struct residency *r, const struct wanted *w); /* to the CPU, in the wave at hand */
void residency_card_wave_done(struct residency *r);
void residency_card_offer(struct residency *r, uint32_t block); /* it is in host memory: is it worth a slot? */
/* Between layers: promotes what was offered, and gives up host copies of what has arrived (wait: for all that is on its way). background:
 * nothing is being computed. True: there is more to be done. */
bool residency_card_settle(struct residency *r, bool background, bool wait);
void residency_card_release(struct residency *r); /* idle for long: all slots go */
struct residency_card *residency_card_free(struct residency_card *c); /* the ranking, not the slots; accepts NULL, returns NULL */
void residency_card_get_stats(const struct residency *r, struct residency_vram *ret);
