/* SPDX-License-Identifier: MIT */
/*
 * evict.h: which block to give up, and whether one is worth bringing in. Pure: no clock, no input or output, no threads of its own;
 * the same calls give the same answers, in the daemon and in `residentctl simulate`.
 *
 * Owned by residency.c (engine thread). Refuses to know bytes, tiers and files: a block is a number, all of a class cost the same.
 * Time is counted in steps (one token of decoding, or one chunk of a prompt).
 * Invariants: a victim is always a resident block that is not kept; evict_victim() finds one whenever there is one.
 */
#pragma once

#include "daemon/base.h"

enum evict_policy { EVICT_LRU, EVICT_LFU, EVICT_CLOCK_LFU, EVICT_S3_FIFO };

#define EVICT_NONE      UINT32_MAX
#define EVICT_ANY_CLASS UINT32_MAX
#define EVICT_HEAT_ONE \
	32 /* evict_heat() of one use just now; one a step for ever are 513 of them */
#define EVICT_HEAT_MAX UINT16_MAX

struct evict;

/* class_of: n_blocks small numbers, copied; NULL: all are of class 0. -ENOMEM, -EINVAL (no blocks). */
int evict_new(enum evict_policy policy, uint32_t n_blocks, const uint8_t *class_of, struct evict **ret);
struct evict *evict_free(struct evict *e); /* accepts NULL, returns NULL */
DEFINE_CLEANUP(struct evict *, evict_free)

const char *evict_policy_to_string(enum evict_policy p); /* "lru", "lfu", "clock-lfu", "s3-fifo" */
int evict_policy_from_string(const char *s, enum evict_policy *ret); /* -EINVAL */

void evict_step(struct evict *e); /* the next step begins: ageing */
/* n_tok tokens of this step want the block, whether it is resident or not: once a step, before it is inserted. Counts as 1 + log2. */
void evict_touch(struct evict *e, uint32_t block, uint32_t n_tok);
void evict_insert(struct evict *e, uint32_t block); /* it became resident */
void evict_remove(struct evict *e, uint32_t block); /* it is resident no more */
bool evict_is_resident(const struct evict *e, uint32_t block);
uint32_t evict_n_resident(const struct evict *e);

/* The block to give up next, of one class or of any; EVICT_NONE: there is none. keep[b] != 0: not b (NULL: any).
 * The block stays resident until evict_remove(); a clock's hand moves. */
uint32_t evict_victim(struct evict *e, uint32_t class, const uint8_t *keep);

/* Aged frequency of use, comparable among blocks, whatever the policy: 0 is never. Kept for absent blocks as well. */
uint16_t evict_heat(const struct evict *e, uint32_t block);
/* All of them, n_blocks numbers; set: as a file or a session remembered them, merged by maximum. */
void evict_get_heat(const struct evict *e, uint16_t *ret_heat);
void evict_set_heat(struct evict *e, const uint16_t *heat);
/* The hottest blocks that are not resident, hottest first, at most max, none that was never used; returns how many. */
size_t evict_hottest_absent(const struct evict *e, uint32_t *ret_blocks, size_t max);

/* Price of moving a block into a faster tier, and what each use saves there, both in microseconds, as measured. */
struct evict_price {
	double move_us, saved_us;
};
/* Admission by pay-back: are the uses to be expected of `block` before it would be given up again, less those that `victim` (EVICT_NONE:
 * there is free room) would have had, worth the move? Expected uses come from the aged frequencies. */
bool evict_pays(const struct evict *e, uint32_t block, uint32_t victim, const struct evict_price *price);

/*
 * Belady's bound on a trace: hits of `capacity` equal blocks when the future is known (demand only, what is wanted is brought in).
 * trace: n wanted blocks < n_blocks, in order; counted from index `from` on. -ENOMEM.
 */
int evict_belady(const uint32_t *trace, size_t n, uint32_t n_blocks, uint32_t capacity, size_t from,
		 size_t *ret_hits);
