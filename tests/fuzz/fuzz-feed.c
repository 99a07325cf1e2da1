/* SPDX-License-Identifier: MIT */
/*
 * fuzz-feed.c: what the tracer may send to the daemon: an answer, what the kernel says about a descriptor, and a ring.
 *
 * The first byte chooses. Beyond not crashing: what was accepted is what feed-maps.h promises, and a ring is
 * left in at most as many steps as it has room for records.
 */
#include "daemon/residency/feed-maps.h"

#include <assert.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define RING 4096U

static void read_reply(const uint8_t *data, size_t size)
{
	struct residency_reply r = {};

	memcpy(&r, data, MIN(size, sizeof(r)));
	if (feed_check_reply(&r, size) < 0)
		return;
	assert(size == sizeof(r) && r.error <= 0);
	assert(strnlen(r.text, sizeof(r.text)) < sizeof(r.text));
	for (const char *s = r.text; *s; s++)
		assert(*s >= ' ' && *s <= '~');
}

static void read_info(const uint8_t *data, size_t size)
{
	const struct feed_shape shape = { 2, 8, 640 };
	_cleanup_(freep) char *text = malloc(size + 1);

	if (!text)
		return;
	memcpy(text, data, size);
	text[size] = 0;
	if (feed_shape_matches(text, &shape))
		assert(strstr(text, "map_type:") && strstr(text, "value_size:") &&
		       strstr(text, "max_entries:"));
}

/* Two positions, then what lies in the ring; taken from while there is something, and the producer goes on now and then. */
static void read_ring(const uint8_t *data, size_t size)
{
	uint64_t position[2] = {};
	struct feed_ring r = { &position[0], &position[1], NULL, RING };
	_cleanup_(freep) unsigned char *ring = calloc(2, RING);
	struct residency_fault fault;
	size_t n;

	if (!ring || size < sizeof(position))
		return;
	memcpy(position, data, sizeof(position));
	data += sizeof(position);
	n = MIN(size - sizeof(position), (size_t)RING);
	memcpy(ring, data, n);
	memcpy(ring + RING, data, n);
	r.data = ring;
	for (unsigned again = 0; again < 4; again++) {
		unsigned taken = 0;

		while (feed_ring_take(&r, &fault, sizeof(fault)))
			assert(++taken <= RING / (sizeof(fault) + 8));
		assert(position[1] - position[0] <= RING);
		position[1] += n & 0xff8;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size == 0)
		return 0;
	switch (data[0] % 3) {
	case 0: read_reply(data + 1, size - 1); break;
	case 1: read_info(data + 1, size - 1); break;
	case 2: read_ring(data + 1, size - 1); break;
	}
	return 0;
}
