/* SPDX-License-Identifier: MIT */
/*
 * choose.h: which form the host tier takes, and why, in one line for people.
 *
 * Called once at load by residency.c. choose_tier() is pure; choose_measure() reads a few blocks both ways and leaves nothing behind.
 */
#pragma once

#include "daemon/residency/catalog.h"
#include "daemon/residency/residency.h"

/* A model that takes less than this share of the free memory is left to the page cache, whatever else. */
#define CHOOSE_SMALL_SHARE 8

struct choose_facts {
	enum residency_tier wanted;     /* HostTier= */
	uint64_t budget_bytes;          /* of everything */
	uint64_t needed_bytes;          /* trunk, all blocks, scratch, one conversation */
	uint64_t available_bytes;       /* of the machine, before the reserve */
	uint64_t mapped_bps, arena_bps; /* measured, bytes/s of block reads; 0: could not be measured */
};

/* Never RESIDENCY_AUTO. *ret_reason: malloc'd, NULL when memory is short. */
enum residency_tier choose_tier(const struct choose_facts *f, char **ret_reason);
/* Reads a sample of blocks from the disk in both forms. 0 for a form that failed. */
void choose_measure(const struct catalog *c, const struct disk_config *disk,
		    uint64_t *ret_mapped_bps, uint64_t *ret_arena_bps);
