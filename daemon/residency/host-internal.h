/* SPDX-License-Identifier: MIT */
/*
 * host-internal.h: what host.c and its two forms share. Engine thread only.
 *
 * host.c owns states, counts, classes and jobs; host-mapped.c and host-arena.c say what a block
 * costs, where it is and how it leaves, and keep h->bytes. Invariants: a block that is not ABSENT
 * owns a job, so that giving one up needs no memory; a job on its way to evict a block belongs to
 * nobody but the disk.
 */
#pragma once

#include "daemon/residency/host.h"

#define HOST_CLASSES_MAX 16U
#define HOST_PAGE        4096U
#define HOST_HUGE        ((uint64_t)2 << 20)

struct host_block {
	struct disk_job *job; /* that fetches it, and then one kept for its eviction */
	uint32_t pins;
	uint32_t place; /* arena: index in its class */
	uint8_t class;
	uint8_t state; /* enum host_state */
	bool leaving;  /* mapped: still counted, though ABSENT */
};

struct host_class {
	uint64_t bytes; /* of a block of it */
	uint32_t n_blocks;
	/* arena; see there */
	char *map, *mem;
	size_t map_bytes;
	uint32_t *block_at; /* n_blocks places: who lies there, CATALOG_NONE: nobody */
	uint32_t n_places;  /* from the first on that were ever used since the last trim */
	uint32_t n_free;    /* of these */
	uint32_t lowest;    /* no place before it is free */
};

struct host_ops {
	uint64_t (*cost)(const struct catalog_block *b);
	/* Once classes are known. -errno with a text. */
	int (*start)(struct host *h, char **ret_error);
	void (*stop)(struct host *h);
	/* What fetching the block adds to h->bytes. */
	uint64_t (*growth)(const struct host *h, uint32_t block);
	/* Charges it and fills in kind and pieces. */
	void (*fetch)(struct host *h, uint32_t block, struct disk_job *job);
	/* Charges it; NULL: only the file's own pages can be a block. */
	void (*adopt)(struct host *h, uint32_t block);
	/* The block is ABSENT by now, its job still there: gives up what it has. */
	void (*give_up)(struct host *h, uint32_t block);
	/* A DISK_EVICT job ended. */
	void (*left)(struct host *h, struct disk_job *job);
	uint64_t (*trim)(struct host *h);
	/* range: of the block, in matrix order. */
	const void *(*address)(const struct host *h, uint32_t block, const struct catalog_block *b,
			       uint32_t range);
};

struct host {
	const struct host_ops *ops;
	const struct catalog *catalog;
	struct disk *disk;
	struct host_block *blocks;
	struct host_class classes[HOST_CLASSES_MAX]; /* largest first */
	uint32_t n_classes;
	uint64_t bytes, leaving_bytes;
	uint32_t n_here, n_coming;
	uint64_t busy_until_us; /* reads up to here are counted in counters.read_us */
	struct disk_job *arrived, **arrived_end; /* fetches that ended and were not taken */
	struct host_counters counters;
};

extern const struct host_ops host_mapped_ops, host_arena_ops;

struct disk_job *host_job_new(uint32_t block, bool urgent);
/* All blocks of a layer, matrix by matrix, as pieces of an eviction; false: it has none. */
bool host_layer_pieces(const struct host *h, uint32_t layer, struct disk_job *job);
/* The smallest pages around, or the largest pages within. */
void host_piece_around(const struct catalog_range *r, uint64_t alignment, struct disk_piece *ret);
void host_piece_within(const struct catalog_range *r, struct disk_piece *ret);
/* Drops the page cache of all blocks, and waits for it. Before anything is fetched. */
int host_drop_all(struct host *h);
