/* SPDX-License-Identifier: MIT */
/*
 * feed-maps.h: what the tracer sends, before it is believed: its answers, the descriptors of its maps, and the records of its ring.
 *
 * feed.c's alone, loop thread; the mappings are read by others. Pure but for the mappings. The tracer may be any program: a map counts as
 * what the kernel says it is, and whatever its memory holds, nothing outside of it is touched.
 */
#pragma once

#include "bpf/residency.h"
#include "daemon/base.h"

/* A BPF ring buffer. */
struct feed_ring {
	uint64_t *consumer; /* a page of its own, the only one that is writable */
	const uint64_t *producer;
	const unsigned char *data; /* mapped twice, one after the other, so that no record is cut */
	size_t bytes;              /* a power of two */
};

struct feed_maps {
	const void *map[RESIDENCY_MAPS]; /* read-only; the ring's is NULL */
	size_t bytes[RESIDENCY_MAPS];
	struct feed_ring ring;
};

/* The descriptors stay the caller's. -EBADMSG: not the maps of a model with so many words of pages, and blocks; -errno. */
int feed_maps_map(const int *fds, size_t n_fds, uint64_t n_words, uint32_t n_blocks,
		  struct feed_maps *ret);
void feed_maps_unmap(struct feed_maps *m); /* m is empty then */

/* The next record of exactly this size; others are passed over. False: none. */
bool feed_ring_take(struct feed_ring *r, void *ret, size_t size);

/* len: as received. -EBADMSG, -EPROTONOSUPPORT; 0: the text is terminated, and made printable. */
int feed_check_reply(struct residency_reply *reply, size_t len);

/* What /proc/self/fdinfo tells of a map. */
struct feed_shape {
	uint32_t type, value_bytes;
	uint64_t entries;
};

bool feed_shape_matches(const char *info, const struct feed_shape *want);
