/* SPDX-License-Identifier: MIT */
/*
 * residency.h: where the blocks of the loaded model are, and how the engine gets at them: catalog, host tier, eviction, heat and budget
 * together.
 *
 * Owned by the engine, engine thread only, but for residency_set_budget(). A layer asks for the experts that the router chose and takes
 * them as they come: first those that are here, then those that were on their way. Refuses to know arithmetic and sessions.
 * Invariants: what a wave hands out stays where it is until the next call of the same layer; memory of blocks stays
 * within what the budget leaves, and is given back before anything else takes memory (residency_charge()).
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/model.h"
#include "daemon/residency/catalog.h"
#include "daemon/residency/evict.h"
#include "daemon/residency/feed.h"
#include "daemon/residency/host.h"

struct residency;
struct vram;

enum residency_tier { RESIDENCY_AUTO, RESIDENCY_UNMANAGED, RESIDENCY_MAPPED, RESIDENCY_ARENA };

/*
 * The few numbers that the loop thread may set or read at any time, without mail: a prompt's chunk can take seconds, memory pressure does not
 * wait for it. Lives in struct engine.
 */
struct residency_shared {
	_Atomic uint64_t target_bytes; /* what the loop allows now, of everything; 0: it has not said anything */
	_Atomic uint64_t locked_bytes;     /* of the mapping: nobody can reclaim them */
	_Atomic uint64_t budget_bytes;     /* in force */
	_Atomic uint64_t configured_bytes; /* the most that it may become */
	_Atomic uint64_t at_load_bytes, floor_bytes;
	_Atomic uint64_t yield_bytes; /* of the card: what leases want left free beyond the reserve; UINT64_MAX: all that can be */
	atomic_bool managed; /* the budget can move */
};

struct residency_config {
	enum residency_tier tier; /* HostTier= */
	enum evict_policy policy;
	uint64_t budget_bytes; /* of everything: trunk, blocks, KV, scratch; 0: from what is available less the reserve */
	uint64_t reserve_bytes; /* 0: the default */
	int prefetch;           /* -1: as measured, 0: off, 1: on */
	unsigned queue_depth;   /* 0: the default */
	const char *state_dir;  /* heat files; NULL: none */
};

/* One expert of a wave. */
struct residency_block {
	uint32_t expert;
	const void *matrix[CATALOG_MATRICES]; /* gate (or gate and up), up, down; NULL: absent */
};

/* The VRAM tier. Bytes of the card. */
struct residency_vram {
	bool present;
	uint64_t budget_bytes;  /* of everything of ours, now: fixed and slots */
	uint64_t fixed_bytes;   /* trunk, KV, scratch: taken before any slot */
	uint64_t trunk_bytes;   /* of those: they are not in the host's memory */
	uint64_t slot_bytes;    /* of chunks that are there */
	uint64_t block_bytes;   /* of the blocks in them */
	uint64_t reserve_bytes; /* to be left free */
	uint64_t free_bytes;    /* of the whole card, when it was looked at last */
	uint64_t overlap_bytes; /* of blocks that are in host memory too, but for those on their way: 0 is the aim */
	uint32_t n_blocks;
	/* Since the card was taken up. hits: (step, layer, expert) found in a slot. */
	uint64_t hits, promoted, demoted, copied_back; /* copied_back: of the demoted, into host memory */
	uint64_t staged;                /* blocks that were copied for one use and did not stay */
	uint64_t on_cpu;                /* (step, layer, expert) that the CPU computed */
	uint64_t bytes_copied, copy_us; /* host to card */
	uint64_t chunks_given_back;
	uint64_t graph_steps; /* steps that ran as one recorded graph */
};

struct residency_stats {
	enum residency_tier tier; /* never AUTO */
	const char *method;       /* how blocks are read; static; NULL: unmanaged */
	const char *policy;
	uint64_t budget_bytes; /* now */
	uint64_t budget_at_load_bytes, floor_bytes, reserve_bytes;
	uint64_t trunk_bytes, trunk_locked_bytes, fixed_bytes, kv_bytes;
	uint64_t block_bytes; /* of the blocks that are in the host tier */
	uint64_t place_bytes; /* memory that their places take, with what is on its way and rounding */
	uint64_t block_bytes_all; /* of the model */
	uint32_t n_blocks, n_host;
	/* Since the load. hits and misses count (step, layer, expert). */
	uint64_t hits, misses, prefetch_used, prefetch_wasted, bypassed;
	uint64_t steps, decode_tok;
	uint64_t stall_us;    /* the engine waited for the disk, in steps of one row */
	uint64_t kernel_took; /* blocks that the kernel took back (mapped) */
	uint64_t doubled;     /* times that a block was found in the page cache beside the arena */
	uint64_t trunk_refaults; /* pages; from the tracer */
	struct host_counters io;
	bool prefetching;
	int heat_error;          /* -errno of the last try to save the heat */
	const char *budget_note; /* why the feed moved the budget last; static; NULL: it has not */
	struct residency_vram vram;
};

struct residency_layer_info {
	uint32_t layer, n_experts, n_host, n_vram;
	uint64_t block_bytes, hits, misses,
		vram_hits; /* vram_hits: on top of hits, which are of host memory */
};

/*
 * For m, which must outlive it. shared: of the engine. fixed_bytes: scratch, vocabulary and the like, taken whatever happens; kv_min_bytes: one full
 * conversation, a part of the floor. Decides the tier (*ret_reason: malloc'd, one line for people, also on success), loads the trunk (stop
 * is looked at: -ECANCELED). -ENOSPC with an error text that has the numbers: less than the floor; -EIO, -ENOMEM.
 */
int residency_new(const struct model *m, const struct residency_config *c, uint64_t fixed_bytes,
		  uint64_t kv_min_bytes, struct residency_shared *shared, const atomic_bool *stop,
		  struct residency **ret, char **ret_reason, char **ret_error);
/* Saves the heat; waits for reads in flight. Accepts NULL, returns NULL. */
struct residency *residency_free(struct residency *r);
void residency_publish(struct residency *r); /* its numbers in shared again, after another one was tried beside it */
bool residency_managed(const struct residency *r); /* false: all weights are where the mapping says */
uint64_t residency_kv_room(const struct residency *r); /* most that KV may come to take, the floor of blocks left */
/* KV pages and recurrent states take so much from now on: blocks give way first. 0; -ENOSPC: not even then, nothing changed. */
int residency_charge(struct residency *r, uint64_t kv_bytes);
void residency_set_feed(struct residency *r, const struct feed *f); /* NULL: none (any more) */

/* One batch of n_rows. session_heat: n_blocks numbers of the conversation that it is for, to be counted up; NULL: none. */
void residency_step_begin(struct residency *r, size_t n_rows, uint16_t *session_heat);
void residency_step_end(struct residency *r);
/* The router's choice for one layer: experts ascending, each wanted by n_tok[i] rows. Reads of what is missing begin at once. */
void residency_layer_begin(struct residency *r, uint32_t layer, const uint32_t *experts,
			   const uint32_t *n_tok, size_t n);
/* The next experts that are in memory, at most max; those of the call before are done with. 0: all were given. Waits for the disk only
 * when nothing else can be computed. *ret_on_card: they are where vram_table() of the layer says, for what is launched on the computing
 * stream from now on; ret has no addresses then. In a batch of at most RESIDENCY_ONCE_ROWS rows all that the card computes comes before the
 * rest, and is there until the next layer; in larger ones both take turns, and launches for a wave must be made before the next call.
 * -EIO, -ENODATA: a block cannot be read; -ENODEV: the card is lost; the layer is over then. */
#define RESIDENCY_ONCE_ROWS 8
ssize_t residency_layer_next(struct residency *r, struct residency_block *ret, size_t max,
			     bool *ret_on_card);
/* Is a guess of the next layer's choice worth computing in this step? Then what the guess is. */
bool residency_wants_guess(const struct residency *r);
void residency_guess(struct residency *r, uint32_t layer, const uint32_t *experts, size_t n);

/* The card's slots are a tier from now on; NULL: no more, what was in them is nowhere. v must outlive that. What the trunk has on the card leaves
 * the host's memory, and comes back when the card goes. -ENOMEM, -EIO. */
struct residency_card_config {
	uint64_t slots_bytes;   /* that slots may take at most */
	uint64_t fixed_bytes;   /* what we have of the card besides */
	uint64_t trunk_bytes;   /* of those: the trunk's, all but m->embd */
	uint64_t reserve_bytes; /* left free */
	uint64_t host_bytes;    /* page-locked memory that goes with it: of the host's budget */
};
int residency_set_card(struct residency *r, struct vram *v, const struct residency_card_config *c);
/* free_bytes: of the card, now. Below the reserve and what leases ask for slots are given back at once, coldest first; what is free beyond is
 * taken again chunk by chunk. Not in the middle of a layer. -ENODEV. */
int residency_look_at_card(struct residency *r, uint64_t free_bytes);
bool residency_on_card(const struct residency *r); /* every block of the model is in a slot */
/* The choice of a layer of which every block was on the card, told afterwards. */
void residency_note_layer(struct residency *r, uint32_t layer, const uint32_t *experts,
			  const uint32_t *n_tok, size_t n);
void residency_note_graph(struct residency *r); /* the step ran as one recorded graph */

/* Blocks that this heat (of a session; NULL: the model's own) calls for come in behind everything else. */
void residency_warm(struct residency *r, const uint16_t *heat);
/* Moves background reads on and obeys the target; wait: until one has ended. False: there are none. */
bool residency_pump(struct residency *r, bool wait);
void residency_settle(struct residency *r); /* obeys the target, and waits until what leaves has left */
void residency_release(struct residency *r); /* idle for long: all blocks go, the heat stays */
int residency_save_heat(struct residency *r);

/* With record set, the choices of a step of one row are kept until the next step begins: counts per layer with experts, ids in order. */
void residency_record(struct residency *r, bool record);
bool residency_recorded(const struct residency *r, uint32_t *ret_n_layers,
			const uint32_t **ret_counts, const uint32_t **ret_experts);

void residency_get_stats(const struct residency *r, struct residency_stats *ret);
uint32_t residency_n_layers(const struct residency *r); /* with experts */
void residency_get_layer(const struct residency *r, uint32_t i, struct residency_layer_info *ret);
/* Heat and place ('v' card, 'h' host, 'c' coming, '-' disk) of each expert of that layer. */
void residency_get_blocks(const struct residency *r, uint32_t i, uint16_t *ret_heat, char *ret_place);
const char *residency_tier_to_string(enum residency_tier t); /* "auto", "unmanaged", "mapped", "arena" */
