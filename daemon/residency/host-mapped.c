/* SPDX-License-Identifier: MIT */
/*
 * host-mapped.c: the host tier as page cache under the mapping of the model.
 *
 * Owns nothing but the account: the kernel owns the pages, and may take them. Engine thread only;
 * pages come and go on the I/O threads. Refuses to know whether the kernel took pages of a block
 * that is HERE: that is the feed's business. Invariant: pages that a block shares with a neighbour
 * come with either and are dropped by neither.
 */
#include "daemon/residency/disk-internal.h"
#include "daemon/residency/host-internal.h"

static uint64_t mapped_cost(const struct catalog_block *b)
{
	return ALIGN_UP(b->bytes, (uint64_t)HOST_PAGE);
}

static uint64_t cost_of(const struct host *h, uint32_t block)
{
	return h->classes[h->blocks[block].class].bytes;
}

static uint64_t mapped_growth(const struct host *h, uint32_t block)
{
	return cost_of(h, block); /* also of one that is leaving: that does not count as taken */
}

static void mapped_fetch(struct host *h, uint32_t block, struct disk_job *job)
{
	struct host_block *b = &h->blocks[block];
	struct catalog_block ranges;

	if (b->leaving)
		h->leaving_bytes -= cost_of(h, block);
	else
		h->bytes += cost_of(h, block);
	b->leaving = false;
	catalog_block(h->catalog, block, &ranges);
	job->kind = DISK_POPULATE;
	job->n_pieces = ranges.n_ranges;
	for (uint32_t i = 0; i < ranges.n_ranges; i++)
		host_piece_around(&ranges.range[i], HOST_PAGE, &job->piece[i]);
}

static void mapped_left(struct host *h, struct disk_job *job)
{
	struct host_block *b = &h->blocks[job->block];

	h->counters.left_pages += job->left_pages;
	/* Not if it was fetched again meanwhile. */
	if (b->leaving) {
		b->leaving = false;
		h->leaving_bytes -= cost_of(h, job->block);
		h->bytes -= cost_of(h, job->block);
	}
	free(job);
}

static void mapped_give_up(struct host *h, uint32_t block)
{
	struct host_block *b = &h->blocks[block];
	struct disk_job *job = TAKE_PTR(b->job);
	struct catalog_block ranges;

	*job = (struct disk_job){ .kind = DISK_EVICT, .block = block, .urgent = true };
	catalog_block(h->catalog, block, &ranges);
	for (uint32_t i = 0; i < ranges.n_ranges; i++) {
		host_piece_within(&ranges.range[i], &job->piece[job->n_pieces]);
		if (job->piece[job->n_pieces].bytes > 0)
			job->n_pieces++;
	}
	b->leaving = true;
	h->leaving_bytes += cost_of(h, block);
	if (job->n_pieces > 0)
		disk_submit(h->disk, job);
	else /* smaller than a page: there is nothing that is its own */
		mapped_left(h, job);
}

static uint64_t mapped_trim(struct host *h)
{
	(void)h;
	return 0;
}

static const void *mapped_address(const struct host *h, uint32_t block,
				  const struct catalog_block *b, uint32_t range)
{
	(void)h;
	(void)block;
	return b->range[range].data;
}

/* False: it cannot be known. */
static bool count_pages(const struct host *h, const struct disk_piece *p, uint64_t *n)
{
	const struct disk_part *part = &h->disk->parts[p->part];
	uint64_t here;

	if (pages_cached(part->sight, part->file_fd, p->data, p->offset, p->bytes, &here) < 0)
		return false;
	*n += here;
	return true;
}

/* What the page cache has of a block: everything: it is HERE; a part: that goes. */
static int adopt_block(struct host *h, uint32_t block)
{
	struct host_block *b = &h->blocks[block];
	uint64_t around = 0, within = 0, all = 0;
	struct catalog_block ranges;

	catalog_block(h->catalog, block, &ranges);
	for (uint32_t i = 0; i < ranges.n_ranges; i++) {
		struct disk_piece p;

		host_piece_within(&ranges.range[i], &p);
		if (!count_pages(h, &p, &within))
			return -ENODATA;
		host_piece_around(&ranges.range[i], HOST_PAGE, &p);
		if (!count_pages(h, &p, &around))
			return -ENODATA;
		all += p.bytes / HOST_PAGE;
	}
	if (within == 0 && around < all)
		return 0;
	b->job = host_job_new(block, false);
	if (!b->job)
		return -ENOMEM;
	h->bytes += cost_of(h, block);
	if (around < all) {
		mapped_give_up(h, block);
		return 0;
	}
	b->state = HOST_HERE;
	h->n_here++;
	return 0;
}

/* -ENODATA: it cannot be known what is there. */
static int adopt_layer(struct host *h, uint32_t layer)
{
	const struct catalog_layer *l = &h->catalog->layers[layer];
	struct disk_job job = {};
	uint64_t n = 0;
	int r = 0;

	/* Mostly there is nothing at all, and that is one call for all blocks. */
	if (host_layer_pieces(h, layer, &job)) {
		for (uint32_t i = 0; i < job.n_pieces; i++)
			if (!count_pages(h, &job.piece[i], &n))
				return -ENODATA;
		if (n == 0)
			return 0;
	}
	for (uint32_t i = 0; l->first_block != CATALOG_NONE && i < l->n_expert && r == 0; i++)
		r = adopt_block(h, l->first_block + i);
	return r;
}

static int mapped_start(struct host *h, char **ret_error)
{
	int r = 0;

	for (uint32_t l = 0; l < h->catalog->n_layers && r == 0; l++)
		r = adopt_layer(h, l);
	/* Unseen it must not be kept, or more would be there than is counted. */
	if (r == -ENODATA)
		r = host_drop_all(h);
	if (r < 0)
		return fail(ret_error, r, "no memory for the blocks in the page cache");
	host_settle(h);
	return 0;
}

static void mapped_stop(struct host *h)
{
	(void)h;
}

const struct host_ops host_mapped_ops = {
	.cost = mapped_cost,
	.start = mapped_start,
	.stop = mapped_stop,
	.growth = mapped_growth,
	.fetch = mapped_fetch,
	.give_up = mapped_give_up,
	.left = mapped_left,
	.trim = mapped_trim,
	.address = mapped_address,
};
