/* SPDX-License-Identifier: MIT */
/*
 * copy.cu: brings blocks of weights together inside the card: several equal copies in one launch.
 *
 * Owns no state. Launched as args.h says. Refuses to know what the bytes are. Invariant: no byte
 * outside the ranges is written, and none read but before one that lies in the same 16-byte word,
 * whatever their alignment to 4 bytes; all but a few at the ends move 16 at a time.
 */
#include "kernels/cuda/device.cuh"

/* Word 0 to 3 of a is where the result begins; the rest comes from b. */
DEVICE uint4 join_words(uint4 a, uint4 b, unsigned word)
{
	switch (word) {
	case 1: return make_uint4(a.y, a.z, a.w, b.x);
	case 2: return make_uint4(a.z, a.w, b.x, b.y);
	case 3: return make_uint4(a.w, b.x, b.y, b.z);
	}
	return a;
}

KERNEL(cuda_copy_block, struct cuda_copy_block, a)
{
	const uint32_t *from = (const uint32_t *)a.from[blockIdx.y];
	uint32_t *to = (uint32_t *)a.to[blockIdx.y];
	uint64_t n = a.bytes / 4, id = (uint64_t)blockIdx.x * CUDA_THREADS + threadIdx.x;
	uint64_t n_threads = (uint64_t)gridDim.x * CUDA_THREADS, n_wide;
	uint64_t head; /* words up to the first 16-byte word of `to` */
	unsigned word; /* of a 16-byte word of `from`, where that one's source begins */

	head = min((uint64_t)(-((uintptr_t)to / 4) & 3), n);
	word = (unsigned)(((uintptr_t)from / 4 + head) & 3);
	/* The last one's source ends inside the range, and so does the 16-byte word that it ends in. */
	n_wide = (n - head) / 4;
	if (word && n_wide)
		n_wide -= (n - head) % 4 < 4 - word;

	for (uint64_t i = id; i < n_wide; i += n_threads) {
		const uint4 *src = (const uint4 *)(from + head - word) + i;

		((uint4 *)(to + head))[i] = word ? join_words(src[0], src[1], word) : src[0];
	}
	for (uint64_t i = id; i < head; i += n_threads)
		to[i] = from[i];
	for (uint64_t i = head + 4 * n_wide + id; i < n; i += n_threads)
		to[i] = from[i];
}
