/* SPDX-License-Identifier: MIT */
/*
 * fuzz-heat.c: bytes as a file of heat, for as many blocks and the identity that its own header names.
 *
 * A file is accepted only when it has exactly the bytes that saving its heat again would give, and what is
 * refused leaves the caller's numbers alone.
 */
#include "daemon/residency/heat.h"

#include <assert.h>
#include <sys/mman.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BLOCKS_MAX 65536

static uint64_t little_endian(const uint8_t *data, size_t bytes)
{
	uint64_t value = 0;

	while (bytes-- > 0)
		value = value << 8 | data[bytes];
	return value;
}

static void write_file(int fd, const uint8_t *data, size_t size)
{
	assert(ftruncate(fd, 0) == 0);
	assert(pwrite(fd, data, size, 0) == (ssize_t)size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	_cleanup_(closep) int fd = memfd_create("heat", MFD_CLOEXEC);
	static uint16_t heat[BLOCKS_MAX];
	uint64_t identity = 0;
	uint32_t n_blocks = 3;
	char path[64];
	int r;

	assert(fd >= 0);
	write_file(fd, data, size);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (size >= 24) {
		n_blocks = (uint32_t)little_endian(data + 12, 4) % BLOCKS_MAX;
		identity = little_endian(data + 16, 8);
	}
	memset(heat, 0x5a, sizeof(heat));
	r = heat_load(path, identity, n_blocks, heat);
	assert(r == 0 || r == -EBADMSG);
	for (size_t i = 0; i < n_blocks; i++)
		assert(heat[i] == (r == 0 ? little_endian(data + 24 + 2 * i, 2) : 0x5a5a));
	if (r < 0)
		return 0;
	assert(size == 24 + 2 * (size_t)n_blocks + 8 && memcmp(data, "RDHEAT\n\0\1\0\0", 12) == 0);
	assert(heat_load(path, identity + 1, n_blocks, heat) == -EBADMSG);
	write_file(fd, data, size - 1);
	assert(heat_load(path, identity, n_blocks, heat) == -EBADMSG);
	return 0;
}
