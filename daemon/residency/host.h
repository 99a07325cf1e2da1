/* SPDX-License-Identifier: MIT */
/*
 * host.h: the host tier: where blocks lie in RAM. Two forms behind one interface.
 *
 * mapped: page cache under the read-only mapping of the model. arena: anonymous memory of 2 MiB pages, filled by O_DIRECT, no page cache
 * behind it. (Unmanaged, everything fits, needs no host tier: see residency.h.) Owned by residency.c, engine thread only. Refuses
 * to know which block is worth what (evict.h) and how much memory there may be: it says what things cost and does as told.
 * Invariants: a block is ABSENT, COMING or HERE; only HERE has an address, valid until host_evict() or host_trim() of an unpinned one.
 * host_bytes() less host_leaving_bytes() never goes above the limit that was given, but by what was pinned or in flight when the limit fell.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/residency/catalog.h"
#include "daemon/residency/disk.h"

struct host;

enum host_form { HOST_MAPPED, HOST_ARENA };
enum host_state { HOST_ABSENT, HOST_COMING, HOST_HERE };

struct host_counters {
	uint64_t bytes_read; /* from the file for blocks, widening included */
	uint64_t blocks_read, blocks_evicted;
	uint64_t read_us; /* with at least one block on its way */
	uint64_t read_errors;
	uint64_t left_pages; /* pages of evicted blocks that stayed in the page cache, beyond those shared with a neighbour: of the last
				     try of each eviction, summed */
	uint64_t moved_bytes; /* arena: copied to close holes */
};

/* c and g must outlive it. MADV_RANDOM over the blocks in mapped form; in both forms page cache of blocks that is there already
 * is dropped (arena) or counted as HERE where whole (mapped). -ENOMEM, -errno with a text. */
int host_new(enum host_form form, const struct catalog *c, const struct disk_config *disk,
	     struct host **ret, char **ret_error);
struct host *host_free(struct host *h); /* waits for what is in flight; accepts NULL, returns NULL */
const char *host_method(const struct host *h); /* how blocks are read: static */

/* Blocks of one class are interchangeable: they take places of the same size. */
uint32_t host_n_classes(const struct host *h);
uint8_t host_class(const struct host *h, uint32_t block);
uint64_t host_class_bytes(const struct host *h, uint8_t class); /* what a block of it costs here */

enum host_state host_state(const struct host *h, uint32_t block);
uint64_t host_bytes(const struct host *h); /* taken now: places of blocks HERE, COMING and (mapped) still leaving, and holes not yet trimmed */
/* Of host_bytes(), what goes without being told again (mapped): to be left out by who decides how much to evict. */
uint64_t host_leaving_bytes(const struct host *h);
/* Waits until nothing is leaving any more (below a millisecond a block). */
void host_settle(struct host *h);
uint32_t host_n_here(const struct host *h);
/* Would fetching the block keep host_bytes() within limit_bytes, once what is leaving is gone? (The fetch comes after that.) */
bool host_has_room(const struct host *h, uint32_t block, uint64_t limit_bytes);

/* ABSENT -> COMING. The caller has seen to room. urgent: somebody waits. -ENOMEM: the block stays ABSENT. */
int host_fetch(struct host *h, uint32_t block, bool urgent);
/* ABSENT -> HERE without reading (arena): the caller has seen to room, and writes each matrix to its address (catalog order, NULL where the
 * layer has none) before it calls anything else here but host_evict() of the block. -EOPNOTSUPP: mapped; -ENOMEM: the block stays ABSENT. */
int host_adopt(struct host *h, uint32_t block, void *ret_matrix[CATALOG_MATRICES]);
bool host_can_adopt(const struct host *h);
/* COMING: from now on somebody waits for it. */
void host_hurry(struct host *h, uint32_t block);
/* A fetch that ended: 1 and *ret_block (HERE, or ABSENT again and *ret_err < 0), or 0: none (wait: none on its way). */
int host_take(struct host *h, bool wait, uint32_t *ret_block, int *ret_err);
unsigned host_n_coming(const struct host *h);

/* HERE and not pinned -> ABSENT. Mapped: the pages go on an I/O thread, in order before any later fetch of the same block. */
void host_evict(struct host *h, uint32_t block);
/* Gives the memory of free places back to the kernel, moving unpinned blocks (their addresses change) to close holes. All classes.
 * Returns the bytes given back. */
uint64_t host_trim(struct host *h);
/* Pinned blocks are neither evicted (asserted) nor moved. Counted. */
void host_pin(struct host *h, uint32_t block);
void host_unpin(struct host *h, uint32_t block);

/* Base of matrix i (catalog order: gate, up, down; NULL where the layer has none) of a block HERE. */
const void *host_matrix(const struct host *h, uint32_t block, unsigned i);
void host_get_counters(const struct host *h, struct host_counters *ret);

/* The trunk, the same in both forms and unmanaged. huge: MADV_HUGEPAGE (before the first touch; only whole 2 MiB inside the trunk, so that
 * no block comes along). Populates on the calling thread, cut into pieces; stop (may be NULL) is looked at between them: -ECANCELED.
 * Locks as much as RLIMIT_MEMLOCK allows. -EIO. */
int host_load_trunk(const struct catalog *c, bool huge, const atomic_bool *stop,
		    uint64_t *ret_locked_bytes);
/* The trunk is on a card: its whole pages leave the host's memory, but for those of `keep`. What stays mapped comes back when it is touched. */
void host_drop_trunk(const struct catalog *c, const struct gguf_tensor *keep);
/* Everything fits: MADV_HUGEPAGE over all of the file before the first touch, then populated likewise. */
int host_load_all(const struct catalog *c, const atomic_bool *stop);
