/* SPDX-License-Identifier: MIT */
/*
 * vram.h: the VRAM tier: slots for blocks in memory of the card, filled by copies that go on while it computes.
 *
 * Owned by the engine's CUDA backend, engine thread only. Says what is where and does as told, like host.h: which block is worth a slot is
 * evict.h's and residency.h's to say. Refuses to know arithmetic. Memory is taken in chunks of VRAM_CHUNK_BYTES, so that it can be given
 * back chunk by chunk; slots of one class have one size (classes as in host.h: sizes within 10 % share the larger).
 * Invariants: a block is ABSENT, COMING or HERE; HERE: what is launched on `compute` from now on finds it, whole, though its copy may not have
 * ended yet (then it is not confirmed); a slot that a kernel may still read is not written before that kernel has ended; bytes of chunks never
 * go above the limit, but by what could not be given back yet.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/residency/catalog.h"
#include "kernels/cuda/args.h"
#include "kernels/cuda/driver.h"

struct vram;

#define VRAM_CHUNK_BYTES   (UINT64_C(64) << 20)
#define VRAM_STAGING_BYTES (UINT64_C(32) << 20)

enum vram_state { VRAM_ABSENT, VRAM_COMING, VRAM_HERE };

struct vram_counters {
	/* Host to card, once the end was seen; of blocks that have left before, too. */
	uint64_t blocks_copied, bytes_copied, copy_us;
	uint64_t blocks_evicted, blocks_moved; /* moved: inside the card, to close a chunk */
	uint64_t chunks_given_back;
};

/* chunk_bytes 0: VRAM_CHUNK_BYTES; staging_bytes 0: VRAM_STAGING_BYTES, page-locked (half of it at a time). compute: the stream whose kernels read
 * the slots. d and c must outlive it. Nothing is taken of the card but the table of experts; see vram_set_limit(). -EINVAL: no blocks, or some
 * without a gate; -ENOMEM, -ENODEV, cuda_error() has the text. Once a call here returned -ENODEV, all do. */
int vram_new(struct cuda_driver *d, struct cuda_stream *compute, const struct catalog *c,
	     uint64_t chunk_bytes, uint64_t staging_bytes, struct vram **ret);
struct vram *vram_free(struct vram *v); /* waits for copies; also after the device was lost; accepts NULL, returns NULL */

uint32_t vram_n_classes(const struct vram *v);
uint8_t vram_class(const struct vram *v, uint32_t block);
uint64_t vram_class_bytes(const struct vram *v, uint8_t class); /* of a slot */
uint32_t vram_n_blocks(const struct vram *v, uint8_t class);    /* of the model */
uint32_t vram_n_slots(const struct vram *v, uint8_t class);     /* in chunks that are there */
uint32_t vram_n_used(const struct vram *v, uint8_t class);
/* Slots that are free or can come to be within the limit. (The chunks of all classes share that.) */
uint32_t vram_n_room(const struct vram *v, uint8_t class);
uint64_t vram_chunk_bytes(const struct vram *v);

/* How much of the card may be chunks. Less than now: the chunks with the fewest blocks are emptied (their blocks move to free slots of other
 * chunks, inside the card, or must go: `gone` (n_blocks bits, lowest first, may be NULL) says which did) and given back before it returns,
 * those first that lose nobody. Waits for the copies (a block COMING stays so, or goes) and for `compute`, when there is something to give back.
 * -EIO: more than the limit may be left, `gone` is right; -ENODEV. */
int vram_set_limit(struct vram *v, uint64_t limit_bytes, uint8_t *gone);
uint64_t vram_bytes(const struct vram *v); /* of chunks */
uint32_t vram_n_here(const struct vram *v);
enum vram_state vram_state(const struct vram *v, uint32_t block);
bool vram_confirmed(const struct vram *v, uint32_t block); /* HERE, and vram_take() has said so */
/* Is there a free slot, or room under the limit for another chunk? */
bool vram_has_room(const struct vram *v, uint32_t block);

/* ABSENT -> COMING: copies the block's matrices (host addresses, catalog order, NULL where the layer has none) through the staging area. The host
 * memory may be reused when it returns; it may wait for a half of the staging area. Takes the free slot that was left first. -ENOSPC: no room;
 * -ENOMEM: the card has no chunk left, the limit falls to what there is; -ENODEV: lost; -EIO. The block is ABSENT after any of them. */
int vram_fetch(struct vram *v, uint32_t block, const void *const matrix[CATALOG_MATRICES]);
/* COMING -> HERE, not confirmed: the card waits for the copy, before everything that is launched on `compute` from now on; the caller waits at
 * most for earlier changes of the table. -EIO: it is COMING still; -ENODEV. */
int vram_expect(struct vram *v, uint32_t block);
/* A copy that has ended: 1 and *ret_block (HERE, as by vram_expect(), and confirmed: only now may the caller give up its own copy), 0: none
 * (wait: none on its way of a block that has not left); -EIO: the block is as it was, the next call tries again; -ENODEV. */
int vram_take(struct vram *v, bool wait, uint32_t *ret_block);
unsigned vram_n_coming(const struct vram *v);
/* HERE, confirmed or not (then vram_take() does not return it any more) -> ABSENT: the table says NULL for what is launched from now on; the
 * slot is reused only behind what was launched before. -EIO: it is HERE still; -ENODEV. */
int vram_evict(struct vram *v, uint32_t block);
/* HERE: copies it back into host memory, each matrix to its address (catalog order, NULL where the layer has none); waits. Stays HERE.
 * -EIO, -ENODEV: what is there is not the block. */
int vram_download(struct vram *v, uint32_t block, void *const matrix[CATALOG_MATRICES]);

/* Table of one layer in the card: struct cuda_expert [n_expert]; NULL gates where a block is not HERE. */
const struct cuda_expert *vram_table(const struct vram *v, uint32_t layer);
void vram_get_counters(const struct vram *v, struct vram_counters *ret);
