/* SPDX-License-Identifier: MIT */
/*
 * feed-maps.c: checks and maps what the tracer sends. See feed-maps.h.
 *
 * Without libbpf: the ring's format is part of the kernel's interface, and the kernel tells a map's type and sizes in
 * /proc/self/fdinfo. Invariant: a size that is used was either agreed on before or found in a range that was checked.
 */
#include "daemon/residency/feed-maps.h"

#include <assert.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <sys/mman.h>

bool feed_ring_take(struct feed_ring *r, void *ret, size_t size)
{
	uint64_t producer = __atomic_load_n(r->producer, __ATOMIC_ACQUIRE), consumer = *r->consumer;
	bool taken = false;

	while (!taken && consumer != producer) {
		const unsigned char *p = r->data + (consumer & (r->bytes - 1));
		uint32_t head, len;
		uint64_t all;

		if (producer - consumer > r->bytes || consumer % 8 != 0) {
			consumer = producer; /* not a ring that anybody keeps */
			break;
		}
		head = __atomic_load_n((const uint32_t *)p, __ATOMIC_ACQUIRE);
		if (head & BPF_RINGBUF_BUSY_BIT)
			break;
		len = head & ~(BPF_RINGBUF_BUSY_BIT | BPF_RINGBUF_DISCARD_BIT);
		all = ALIGN_UP((uint64_t)len + BPF_RINGBUF_HDR_SZ, (uint64_t)8);
		if (all > producer - consumer) {
			consumer = producer;
			break;
		}
		taken = !(head & BPF_RINGBUF_DISCARD_BIT) && len == size;
		if (taken)
			memcpy(ret, p + BPF_RINGBUF_HDR_SZ, size);
		consumer += all;
	}
	__atomic_store_n(r->consumer, consumer, __ATOMIC_RELEASE);
	return taken;
}

/* "name:\tnumber" on a line of its own. */
static bool info_field(const char *text, const char *name, uint64_t *ret)
{
	size_t len = strlen(name);

	for (const char *s = text; s; s = strchr(s, '\n')) {
		s += *s == '\n';
		if (strncmp(s, name, len) == 0 && s[len] == ':') {
			char *end;
			uint64_t v = strtoull(s + len + 1, &end, 0);

			if (end == s + len + 1 || (*end && *end != '\n'))
				return false;
			*ret = v;
			return true;
		}
	}
	return false;
}

bool feed_shape_matches(const char *info, const struct feed_shape *want)
{
	uint64_t type, value_bytes, entries;

	return info_field(info, "map_type", &type) && type == want->type &&
	       info_field(info, "value_size", &value_bytes) && value_bytes == want->value_bytes &&
	       info_field(info, "max_entries", &entries) && entries == want->entries;
}

static struct feed_shape shape_of(enum residency_map m, uint64_t n_words, uint32_t n_blocks)
{
	struct feed_shape s = { BPF_MAP_TYPE_ARRAY, sizeof(uint64_t), n_words };

	switch (m) {
	case RESIDENCY_PRESENT:
	case RESIDENCY_TOUCHED: break;
	case RESIDENCY_COUNTERS:
		s.value_bytes = sizeof(struct residency_counters);
		s.entries = (uint64_t)n_blocks + 1;
		break;
	case RESIDENCY_HISTOGRAM: s.entries = RESIDENCY_BUCKETS; break;
	case RESIDENCY_FAULTS:
		s = (struct feed_shape){ BPF_MAP_TYPE_RINGBUF, 0, RESIDENCY_RING };
		break;
	case RESIDENCY_MAPS: assert(false);
	}
	return s;
}

/* Of a file the kernel tells nothing like that; a file could shrink under us. */
static bool is_map(int fd, const struct feed_shape *want)
{
	_cleanup_(closep) int info_fd = -1;
	char path[48], info[1024];
	ssize_t n;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	info_fd = open(path, O_RDONLY | O_CLOEXEC);
	n = info_fd < 0 ? -1 : read(info_fd, info, sizeof(info) - 1);
	if (n < 0)
		return false;
	info[n] = 0;
	return feed_shape_matches(info, want);
}

static size_t page_bytes(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

static int map_ring(struct feed_ring *r, int fd)
{
	size_t bytes = page_bytes() + 2 * (size_t)RESIDENCY_RING;
	void *p = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		return -errno;
	r->consumer = p;
	p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, (off_t)page_bytes());
	if (p == MAP_FAILED)
		return -errno;
	r->producer = p;
	r->data = (const unsigned char *)p + page_bytes();
	r->bytes = RESIDENCY_RING;
	return 0;
}

static int map_array(struct feed_maps *maps, enum residency_map m, int fd, size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		return -errno;
	maps->map[m] = p;
	maps->bytes[m] = bytes;
	return 0;
}

int feed_maps_map(const int *fds, size_t n_fds, uint64_t n_words, uint32_t n_blocks,
		  struct feed_maps *ret)
{
	struct feed_maps maps = {};
	int r = n_fds == RESIDENCY_MAPS ? 0 : -EBADMSG;

	for (unsigned i = 0; i < RESIDENCY_MAPS && r >= 0; i++) {
		struct feed_shape s = shape_of(i, n_words, n_blocks);

		if (!is_map(fds[i], &s))
			r = -EBADMSG;
		else if (s.type == BPF_MAP_TYPE_RINGBUF)
			r = map_ring(&maps.ring, fds[i]);
		else
			r = map_array(&maps, i, fds[i], s.entries * s.value_bytes);
	}
	if (r < 0)
		feed_maps_unmap(&maps);
	else
		*ret = maps;
	return r;
}

void feed_maps_unmap(struct feed_maps *m)
{
	for (unsigned i = 0; i < RESIDENCY_MAPS; i++)
		if (m->map[i])
			munmap((void *)m->map[i], m->bytes[i]);
	if (m->ring.consumer)
		munmap(m->ring.consumer, page_bytes());
	if (m->ring.producer)
		munmap((void *)m->ring.producer, page_bytes() + 2 * (size_t)RESIDENCY_RING);
	*m = (struct feed_maps){};
}

int feed_check_reply(struct residency_reply *reply, size_t len)
{
	if (len != sizeof(*reply) || reply->header.magic != RESIDENCY_MAGIC || reply->error > 0)
		return -EBADMSG;
	if (reply->header.version != RESIDENCY_VERSION)
		return -EPROTONOSUPPORT;
	reply->text[sizeof(reply->text) - 1] = 0;
	for (char *s = reply->text; *s; s++)
		if (*s < ' ' || *s > '~')
			*s = '?';
	return 0;
}
