/* SPDX-License-Identifier: MIT */
/*
 * heat.c: the file that remembers which blocks of a model are hot. See heat.h.
 *
 * No state; any thread, one writer a path. Refuses to know what heat means: numbers in, numbers
 * out. Little-endian on every machine:
 *
 *   0  "RDHEAT\n\0"   8  version, 32 bits   12  blocks, 32 bits   16  identity of the model, 64 bits
 *  24  heat of each block, 16 bits     and behind them FNV-1a over all that, 64 bits
 *
 * The checksum finds damage, not malice: who can write the file can write any heat, which is worth
 * a slow start.
 * Invariant: a file is accepted only as a whole, byte for byte as heat_save() would write it.
 */
#include "daemon/residency/heat.h"

#include "daemon/file.h"

static const char magic[8] = "RDHEAT\n";

#define VERSION      1
#define HEADER_BYTES 24
#define SUM_BYTES    8

static void put_le(char *to, uint64_t value, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = (char)(value >> (8 * i) & 0xff);
}

static uint64_t get_le(const char *from, size_t bytes)
{
	uint64_t value = 0;

	for (size_t i = 0; i < bytes; i++)
		value |= (uint64_t)(uint8_t)from[i] << (8 * i);
	return value;
}

static uint64_t fnv1a(const char *data, size_t len)
{
	uint64_t h = 0xcbf29ce484222325;

	for (size_t i = 0; i < len; i++)
		h = (h ^ (uint8_t)data[i]) * 0x100000001b3;
	return h;
}

static bool file_bytes(uint32_t n_blocks, size_t *ret)
{
	size_t n;

	return mul_ok(n_blocks, sizeof(uint16_t), &n) && add_ok(n, HEADER_BYTES + SUM_BYTES, ret);
}

static void put_header(char to[HEADER_BYTES], uint64_t identity, uint32_t n_blocks)
{
	memcpy(to, magic, sizeof(magic));
	put_le(to + 8, VERSION, 4);
	put_le(to + 12, n_blocks, 4);
	put_le(to + 16, identity, 8);
}

char *heat_path(const char *directory, uint64_t identity)
{
	char *path;

	if (asprintf(&path, "%s/heat-%016llx", directory, (unsigned long long)identity) < 0)
		return NULL;
	return path;
}

int heat_load(const char *path, uint64_t identity, uint32_t n_blocks, uint16_t *heat)
{
	_cleanup_(buf_done) struct buf b = {};
	char header[HEADER_BYTES];
	size_t bytes, body;
	int r;

	if (!file_bytes(n_blocks, &bytes))
		return -ENOMEM;
	r = file_read(path, bytes, &b);
	if (r < 0)
		return r == -EFBIG ? -EBADMSG : r;
	put_header(header, identity, n_blocks);
	if (b.len != bytes || memcmp(b.data, header, HEADER_BYTES) != 0)
		return -EBADMSG;
	body = bytes - SUM_BYTES;
	if (get_le(b.data + body, SUM_BYTES) != fnv1a(b.data, body))
		return -EBADMSG;
	for (uint32_t i = 0; i < n_blocks; i++)
		heat[i] = (uint16_t)get_le(b.data + HEADER_BYTES + 2 * (size_t)i, 2);
	return 0;
}

int heat_save(const char *path, uint64_t identity, uint32_t n_blocks, const uint16_t *heat)
{
	_cleanup_(freep) char *data = NULL;
	size_t bytes, body;

	if (!file_bytes(n_blocks, &bytes))
		return -ENOMEM;
	data = malloc(bytes);
	if (!data)
		return -ENOMEM;
	body = bytes - SUM_BYTES;
	put_header(data, identity, n_blocks);
	for (uint32_t i = 0; i < n_blocks; i++)
		put_le(data + HEADER_BYTES + 2 * (size_t)i, heat[i], 2);
	put_le(data + body, fnv1a(data, body), SUM_BYTES);
	return file_replace(path, data, bytes, 0600);
}
