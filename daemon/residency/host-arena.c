/* SPDX-License-Identifier: MIT */
/*
 * host-arena.c: the host tier as anonymous memory of huge pages.
 *
 * Owns one reservation of addresses per class, for as many places as the class has blocks, one
 * behind the other without gaps; only what is used has memory behind it, from the first place on.
 * Engine thread only; the kernel writes into places of blocks that are COMING. Refuses to know page
 * cache, but that none of a block may be left. Invariants: h->bytes is the sum over classes of the
 * used prefix in whole huge pages; block_at[i] == b exactly when b is not ABSENT and b.place == i.
 */
#include "daemon/residency/host-internal.h"

#include <assert.h>
#include <sys/mman.h>

/*
 * A place: the matrices' pages in the file one behind the other, so that each lies at the same
 * distance from a page's start as there.
 */
static uint64_t arena_cost(const struct catalog_block *b)
{
	uint64_t bytes = 0;
	struct disk_piece p;

	for (uint32_t i = 0; i < b->n_ranges; i++) {
		host_piece_around(&b->range[i], HOST_PAGE, &p);
		bytes += p.bytes;
	}
	return bytes;
}

/* Memory behind the first n places. */
static uint64_t prefix_bytes(const struct host_class *k, uint32_t n)
{
	return ALIGN_UP(n * k->bytes, HOST_HUGE);
}

static char *place_of(const struct host *h, uint32_t block)
{
	const struct host_block *b = &h->blocks[block];
	const struct host_class *k = &h->classes[b->class];

	assert(b->place < k->n_places && k->block_at[b->place] == block);
	return k->mem + b->place * k->bytes;
}

static uint64_t arena_growth(const struct host *h, uint32_t block)
{
	const struct host_class *k = &h->classes[h->blocks[block].class];

	return k->n_free > 0 ? 0 : prefix_bytes(k, k->n_places + 1) - prefix_bytes(k, k->n_places);
}

static uint32_t lowest_free(struct host_class *k)
{
	while (k->block_at[k->lowest] != CATALOG_NONE)
		k->lowest++;
	return k->lowest;
}

static void take_place(struct host *h, uint32_t block)
{
	struct host_class *k = &h->classes[h->blocks[block].class];
	uint32_t i;

	h->bytes += arena_growth(h, block);
	if (k->n_free > 0) {
		i = lowest_free(k);
		k->n_free--;
	} else {
		i = k->n_places++;
		assert(i < k->n_blocks);
	}
	k->block_at[i] = block;
	h->blocks[block].place = i;
}

static void arena_fetch(struct host *h, uint32_t block, struct disk_job *job)
{
	uint32_t alignment = disk_alignment(h->disk);
	struct catalog_block ranges;
	struct disk_piece page;
	char *to;

	take_place(h, block);
	to = place_of(h, block);
	catalog_block(h->catalog, block, &ranges);
	job->kind = DISK_READ;
	job->n_pieces = ranges.n_ranges;
	for (uint32_t i = 0; i < ranges.n_ranges; i++) {
		host_piece_around(&ranges.range[i], HOST_PAGE, &page);
		host_piece_around(&ranges.range[i], alignment, &job->piece[i]);
		job->piece[i].to = to + (job->piece[i].offset - page.offset);
		to += page.bytes;
	}
}

static void arena_give_up(struct host *h, uint32_t block)
{
	struct host_block *b = &h->blocks[block];
	struct host_class *k = &h->classes[b->class];

	assert(k->block_at[b->place] == block);
	k->block_at[b->place] = CATALOG_NONE;
	k->n_free++;
	k->lowest = MIN(k->lowest, b->place);
	free(TAKE_PTR(b->job));
}

static void arena_left(struct host *h, struct disk_job *job)
{
	(void)h;
	free(job);
}

static void move_block(struct host *h, struct host_class *k, uint32_t from, uint32_t to)
{
	uint32_t block = k->block_at[from];

	memcpy(k->mem + to * k->bytes, k->mem + from * k->bytes, k->bytes);
	k->block_at[to] = block;
	k->block_at[from] = CATALOG_NONE;
	h->blocks[block].place = to;
	h->counters.moved_bytes += k->bytes;
}

static uint64_t trim_class(struct host *h, struct host_class *k)
{
	uint64_t before = prefix_bytes(k, k->n_places), after;

	/* Copying for less than a huge page gives nothing back. */
	if (prefix_bytes(k, k->n_places - k->n_free) == before)
		return 0;
	while (k->n_free > 0) {
		uint32_t last = k->n_places - 1;
		uint32_t block = k->block_at[last];

		if (block != CATALOG_NONE) {
			/* COMING: the disk writes there. */
			if (h->blocks[block].pins > 0 || h->blocks[block].state != HOST_HERE)
				break;
			move_block(h, k, last, lowest_free(k));
		}
		k->n_places--;
		k->n_free--;
	}
	k->lowest = MIN(k->lowest, k->n_places);
	after = prefix_bytes(k, k->n_places);
	if (after < before)
		(void)madvise(k->mem + after, before - after, MADV_DONTNEED);
	h->bytes -= before - after;
	return before - after;
}

static uint64_t arena_trim(struct host *h)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < h->n_classes; i++)
		bytes += trim_class(h, &h->classes[i]);
	return bytes;
}

static const void *arena_address(const struct host *h, uint32_t block,
				 const struct catalog_block *b, uint32_t range)
{
	const char *at = place_of(h, block);
	struct disk_piece page;

	for (uint32_t i = 0; i < range; i++) {
		host_piece_around(&b->range[i], HOST_PAGE, &page);
		at += page.bytes;
	}
	return at + b->range[range].offset % HOST_PAGE;
}

static int reserve(struct host_class *k)
{
	size_t bytes;
	void *map;

	if (!mul_ok(k->n_blocks, k->bytes, &bytes) || !add_ok(bytes, 2 * HOST_HUGE, &bytes))
		return -ENOMEM;
	k->block_at = malloc(k->n_blocks * sizeof(*k->block_at));
	if (!k->block_at)
		return -ENOMEM;
	memset(k->block_at, 0xff, k->n_blocks * sizeof(*k->block_at)); /* CATALOG_NONE */
	map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
		   -1, 0);
	if (map == MAP_FAILED)
		return -errno;
	k->map = map;
	k->map_bytes = bytes;
	k->mem = k->map + (ALIGN_UP((uintptr_t)map, HOST_HUGE) - (uintptr_t)map);
	/* -EINVAL: a kernel without huge pages, where small ones do. */
	(void)madvise(k->map, bytes, MADV_HUGEPAGE);
	return 0;
}

static int arena_start(struct host *h, char **ret_error)
{
	int r = 0;

	for (uint32_t i = 0; i < h->n_classes && r == 0; i++)
		r = reserve(&h->classes[i]);
	if (r < 0)
		return fail(ret_error, r, "cannot reserve addresses for the blocks: %s", strerror(-r));
	r = host_drop_all(h);
	return r < 0 ? fail(ret_error, r, "no memory to drop page cache of the blocks") : 0;
}

static void arena_stop(struct host *h)
{
	for (uint32_t i = 0; i < h->n_classes; i++) {
		if (h->classes[i].map)
			munmap(h->classes[i].map, h->classes[i].map_bytes);
		free(h->classes[i].block_at);
	}
}

const struct host_ops host_arena_ops = {
	.cost = arena_cost,
	.start = arena_start,
	.stop = arena_stop,
	.growth = arena_growth,
	.fetch = arena_fetch,
	.adopt = take_place,
	.give_up = arena_give_up,
	.left = arena_left,
	.trim = arena_trim,
	.address = arena_address,
};
