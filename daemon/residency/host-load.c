/* SPDX-License-Identifier: MIT */
/*
 * host-load.c: brings in what stays: the trunk, or all of a model that fits.
 *
 * Owns nothing; called by whoever loads, on whatever thread that may wait for the disk. Refuses to
 * know blocks, but that loading the trunk must not bring any along. Invariant: no huge page is
 * asked for where a page of 2 MiB of the file would hold anything else.
 */
#include "daemon/residency/disk-internal.h"
#include "daemon/residency/host-internal.h"

#include <fcntl.h>
#include <sys/mman.h>

#define STEP_BYTES \
	((uint64_t)32 << 20) /* between two looks at stop: well below a second on any disk */

static bool is_stopped(const atomic_bool *stop)
{
	return stop && atomic_load_explicit(stop, memory_order_relaxed);
}

/* data, bytes: whole pages. chunk 0: does not read ahead of the faults. */
static int populate(const char *data, uint64_t bytes, size_t chunk, const atomic_bool *stop)
{
	for (uint64_t at = 0; at < bytes; at += STEP_BYTES) {
		uint64_t len = MIN(bytes - at, STEP_BYTES);
		int r;

		if (is_stopped(stop))
			return -ECANCELED;
		if (chunk > 0)
			pages_advise(data + at, len, chunk);
		r = pages_populate(data + at, len);
		if (r < 0)
			return r;
	}
	return 0;
}

static void advise(const char *data, uint64_t bytes, int advice)
{
	if (bytes > 0)
		(void)madvise((void *)(uintptr_t)data, bytes, advice);
}

/*
 * RANDOM everywhere, or the kernel reads on into the blocks behind; where it is joined with
 * HUGEPAGE, a fault brings exactly its 2 MiB of the file in one piece.
 */
static int load_range(const struct catalog *c, const struct catalog_range *r, bool huge,
		      const atomic_bool *stop)
{
	size_t chunk = pages_read_ahead(gguf_part(c->gguf, r->part)->fd);
	uint64_t from, to, end;
	struct disk_piece p;
	const char *data;
	int k;

	host_piece_around(r, HOST_PAGE, &p);
	data = p.data;
	end = p.offset + p.bytes;
	from = MIN(ALIGN_UP(r->offset, HOST_HUGE), end);
	to = (r->offset + r->bytes) / HOST_HUGE * HOST_HUGE;
	if (!huge || to <= from)
		from = to = end;
	advise(data, p.bytes, MADV_RANDOM);
	advise(data + (from - p.offset), to - from, MADV_HUGEPAGE);
	k = populate(data, from - p.offset, chunk, stop);
	if (k == 0)
		k = populate(data + (from - p.offset), to - from, 0, stop);
	if (k == 0)
		k = populate(data + (to - p.offset), end - to, chunk, stop);
	return k;
}

/*
 * What of the range can be locked: in ever smaller steps up to the limit, which root does not have.
 */
static uint64_t lock_range(const struct catalog_range *r)
{
	uint64_t at = 0, step = STEP_BYTES;
	struct disk_piece p;

	host_piece_around(r, HOST_PAGE, &p);
	while (at < p.bytes && step >= HOST_PAGE) {
		uint64_t len = MIN(p.bytes - at, step);

		if (mlock((const char *)p.data + at, len) == 0)
			at += len;
		else
			step /= 2;
	}
	return at;
}

int host_load_trunk(const struct catalog *c, bool huge, const atomic_bool *stop,
		    uint64_t *ret_locked_bytes)
{
	uint64_t locked = 0;
	int r = 0;

	for (size_t i = 0; i < c->n_trunk && r == 0; i++)
		r = load_range(c, &c->trunk[i], huge, stop);
	if (r < 0)
		return r;
	for (size_t i = 0; i < c->n_trunk; i++) {
		uint64_t n = lock_range(&c->trunk[i]);

		locked += n;
		if (n < c->trunk[i].bytes)
			break;
	}
	*ret_locked_bytes = locked;
	return 0;
}

static void drop(const struct catalog *c, const struct catalog_range *r, uint64_t from, uint64_t to)
{
	uint64_t first = ALIGN_UP(from, (uint64_t)HOST_PAGE), end = to / HOST_PAGE * HOST_PAGE;
	char *data = (char *)(uintptr_t)r->data + (first - r->offset);

	if (first >= end || !r->data)
		return;
	(void)munlock(data, end - first);
	(void)madvise(data, end - first, MADV_DONTNEED);
	(void)posix_fadvise(gguf_part(c->gguf, r->part)->fd, (off_t)first, (off_t)(end - first),
			    POSIX_FADV_DONTNEED);
}

void host_drop_trunk(const struct catalog *c, const struct gguf_tensor *keep)
{
	for (size_t i = 0; i < c->n_trunk; i++) {
		const struct catalog_range *r = &c->trunk[i];
		uint64_t end = r->offset + r->bytes, from = end, to = end;

		if (keep->part == r->part && keep->offset >= r->offset && keep->offset < end) {
			from = keep->offset;
			to = keep->offset + keep->bytes;
		}
		drop(c, r, r->offset, from);
		drop(c, r, to, end);
	}
}

int host_load_all(const struct catalog *c, const atomic_bool *stop)
{
	int r = 0;

	for (size_t i = 0; i < gguf_n_parts(c->gguf) && r == 0; i++) {
		const struct gguf_part *part = gguf_part(c->gguf, i);
		uint64_t bytes = ALIGN_UP(part->bytes, (uint64_t)HOST_PAGE);

		/* A host tier that was tried before may have said otherwise. */
		advise(part->data, bytes, MADV_NORMAL);
		advise(part->data, bytes, MADV_HUGEPAGE);
		r = populate(part->data, bytes, 0, stop);
	}
	return r;
}
