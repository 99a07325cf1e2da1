/* SPDX-License-Identifier: MIT */
/*
 * fuzz-catalog.c: any bytes as a GGUF file, and what opens as a catalog. Every block and the whole
 * trunk must lie in the file, and no two of them in the same place.
 */
#include "daemon/residency/catalog.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink; /* so that no read is optimised away */

static int by_offset(const void *a, const void *b)
{
	const struct catalog_range *x = a, *y = b;

	return (x->offset > y->offset) - (x->offset < y->offset);
}

static void check_disjoint(struct catalog_range *all, size_t n, size_t size)
{
	uint64_t end = 0;

	if (n > 0)
		qsort(all, n, sizeof(*all), by_offset);
	for (size_t i = 0; i < n; i++) {
		const uint8_t *p = all[i].data;

		if (all[i].part != 0 || all[i].bytes == 0 || all[i].offset < end ||
		    all[i].bytes > size || all[i].offset > size - all[i].bytes)
			abort();
		end = all[i].offset + all[i].bytes;
		sink += (uint64_t)p[0] + p[all[i].bytes - 1];
	}
}

static void check(const struct catalog *c, size_t size)
{
	size_t n = 0, max = c->n_trunk + (size_t)c->n_blocks * CATALOG_MATRICES;
	struct catalog_range *all = calloc(max + 1, sizeof(*all));
	uint64_t blocks = 0, trunk = 0;

	if (!all)
		return;
	for (uint32_t i = 0; i < c->n_blocks; i++) {
		struct catalog_block b;

		catalog_block(c, i, &b);
		if (b.layer >= c->n_layers || c->layers[b.layer].first_block + b.expert != i ||
		    b.n_ranges == 0 || b.n_ranges > CATALOG_MATRICES || b.bytes > c->block_bytes_max)
			abort();
		for (uint32_t k = 0; k < b.n_ranges; k++) {
			all[n++] = b.range[k];
			blocks += b.range[k].bytes;
		}
	}
	for (size_t i = 0; i < c->n_trunk; i++) {
		all[n++] = c->trunk[i];
		trunk += c->trunk[i].bytes;
	}
	if (blocks != c->block_bytes || trunk != c->trunk_bytes || blocks + trunk + c->unused_bytes > size)
		abort();
	check_disjoint(all, n, size);
	free(all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint32_t n_layers[] = { 0, 1, 40 };
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(freep) void *copy = NULL;

	if (posix_memalign(&copy, 64, MAX(size, (size_t)1)) != 0)
		return 0;
	if (size > 0)
		memcpy(copy, data, size);
	if (gguf_open_memory(copy, size, "image", &g, NULL) < 0)
		return 0;
	for (size_t i = 0; i < ARRAY_SIZE(n_layers); i++) {
		_cleanup_(catalog_freep) struct catalog *c = NULL;
		_cleanup_(freep) char *error = NULL;

		if (catalog_new(g, n_layers[i], &c, &error) == 0)
			check(c, size);
		else if (!error || !startswith(error, "image: "))
			abort();
	}
	return 0;
}
