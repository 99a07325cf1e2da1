/* SPDX-License-Identifier: MIT */
/*
 * choose.c: HostTier=auto. See choose.h.
 *
 * Owns nothing. Engine thread, at load. The arena is the faster form but memory that the kernel cannot take back: it has to be worth that.
 * The budget leaves the reserve free in either form.
 */
#include "daemon/residency/choose.h"

#include <inttypes.h>

/* What the arena has to win over the page cache, in percent. */
#define ARENA_GAIN_PERCENT 20
/* Blocks of a measurement: some 25 MB, 10 to 50 ms on disks from 0.5 to 3 GB/s. */
#define SAMPLE_BLOCKS      12

static double gb(uint64_t bytes)
{
	return (double)bytes / 1e9;
}

enum residency_tier choose_tier(const struct choose_facts *f, char **ret_reason)
{
	/* A toy is not worth a refusal or a tier, however short memory is. */
	bool small = f->needed_bytes <= f->available_bytes / CHOOSE_SMALL_SHARE;

	switch (f->wanted) {
	case RESIDENCY_UNMANAGED: /* is not offered to users */
	case RESIDENCY_AUTO: break;
	case RESIDENCY_MAPPED:
	case RESIDENCY_ARENA:
		(void)fail(ret_reason, 0, "HostTier=%s", residency_tier_to_string(f->wanted));
		return f->wanted;
	}
	if (f->needed_bytes <= f->budget_bytes) {
		(void)fail(ret_reason, 0,
			   "all of the model fits: it needs %.2f GB, the budget is %.2f GB",
			   gb(f->needed_bytes), gb(f->budget_bytes));
		return RESIDENCY_UNMANAGED;
	}
	if (small) {
		(void)fail(ret_reason, 0, "the model is small: it needs %.2f GB, %.2f GB are free",
			   gb(f->needed_bytes), gb(f->available_bytes));
		return RESIDENCY_UNMANAGED;
	}
	if (f->arena_bps == 0) {
		(void)fail(ret_reason, 0,
			   "memory of its own could not be filled from the disk: page cache");
		return RESIDENCY_MAPPED;
	}
	if (f->arena_bps * 100 <= f->mapped_bps * (100 + ARENA_GAIN_PERCENT)) {
		(void)fail(ret_reason, 0,
			   "reading into the page cache is as good here: %.2f GB/s, against %.2f GB/s into memory of its own",
			   gb(f->mapped_bps), gb(f->arena_bps));
		return RESIDENCY_MAPPED;
	}
	(void)fail(ret_reason, 0,
		   "reading into memory of its own is faster here: %.2f GB/s, against %.2f GB/s into the page cache",
		   gb(f->arena_bps), gb(f->mapped_bps));
	return RESIDENCY_ARENA;
}

static uint32_t sample_block(const struct catalog *c, uint32_t i, uint32_t n)
{
	return (uint32_t)((uint64_t)c->n_blocks * i / n);
}

static uint64_t measure(enum host_form form, const struct catalog *c, const struct disk_config *disk)
{
	struct host *h;
	uint64_t bytes = 0, begun, us;
	uint32_t n = MIN(c->n_blocks, (uint32_t)SAMPLE_BLOCKS), block;
	int err, failed = 0;

	if (host_new(form, c, disk, &h, NULL) < 0)
		return 0;
	for (uint32_t i = 0; i < n; i++)
		if (host_state(h, sample_block(c, i, n)) == HOST_HERE)
			host_evict(h, sample_block(c, i, n));
	begun = now_us();
	for (uint32_t i = 0; i < n; i++)
		failed |= host_fetch(h, sample_block(c, i, n), true) < 0;
	while (host_take(h, true, &block, &err) > 0) {
		failed |= err < 0;
		bytes += catalog_block_bytes(c, block);
	}
	us = MAX(now_us() - begun, UINT64_C(1));
	for (uint32_t i = 0; i < n; i++)
		if (host_state(h, sample_block(c, i, n)) == HOST_HERE)
			host_evict(h, sample_block(c, i, n));
	host_free(h);
	return failed ? 0 : bytes * 1000000 / us;
}

/* The better of two: what a neighbour does to the disk in one moment shall not decide for weeks. */
void choose_measure(const struct catalog *c, const struct disk_config *disk,
		    uint64_t *ret_mapped_bps, uint64_t *ret_arena_bps)
{
	uint64_t mapped = 0, arena = 0;

	for (unsigned i = 0; i < 2; i++) {
		mapped = MAX(mapped, measure(HOST_MAPPED, c, disk));
		arena = MAX(arena, measure(HOST_ARENA, c, disk));
	}
	*ret_mapped_bps = mapped;
	*ret_arena_bps = arena;
}
