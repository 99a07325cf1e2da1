/* SPDX-License-Identifier: MIT */
/*
 * route.cu: choices: the experts of a token, and the largest of a row of logits.
 *
 * Owns no state. Launched as args.h says. Refuses to know what is chosen. Invariant: an index that
 * is written is below the number of things to choose from, whatever the logits hold: not-a-number
 * never wins, of equals the lower index does. Where nothing wins, the k-th choice is k: a token has no
 * expert twice, as on the CPU.
 */
#include "kernels/cuda/device.cuh"

struct choice {
	float value;
	uint32_t index;
};

DEVICE bool beats(struct choice a, struct choice b)
{
	return a.value > b.value || (a.value == b.value && a.index < b.index);
}

DEVICE struct choice warp_best(struct choice c)
{
	UNROLL
	for (int step = CUDA_WARP / 2; step; step /= 2) {
		struct choice other = { __shfl_xor_sync(0xffffffff, c.value, step),
					__shfl_xor_sync(0xffffffff, c.index, step) };

		if (beats(other, c))
			c = other;
	}
	return c;
}

/*
 * One warp does it all: a round of the block's barriers takes longer than a few exponentials. What
 * has been chosen is not marked anywhere: the next best is the best of those that the last choice
 * beats. Probabilities are computed anew each time, and compared rather than logits, because equals
 * among them are decided by index on the CPU too.
 */
KERNEL(cuda_route, struct cuda_route, a)
{
	const float *logits = a.logits + (uint64_t)blockIdx.x * a.n_expert;
	uint32_t *expert = a.expert + (uint64_t)blockIdx.x * a.n_used;
	float *weight = a.weight + (uint64_t)blockIdx.x * a.n_used;
	float max = -INFINITY, sum = 0, chosen_sum = 0, scale;
	struct choice last = { INFINITY, 0 };

	if (threadIdx.x >= CUDA_WARP)
		return;
	for (uint32_t e = threadIdx.x; e < a.n_expert; e += CUDA_WARP)
		max = fmaxf(max, logits[e]);
	max = warp_max(max);
	for (uint32_t e = threadIdx.x; e < a.n_expert; e += CUDA_WARP)
		sum += expf(logits[e] - max);
	scale = 1.0f / warp_sum(sum);

	for (uint32_t k = 0; k < a.n_used; k++) {
		struct choice best = { -1.0f, k };

		for (uint32_t e = threadIdx.x; e < a.n_expert; e += CUDA_WARP) {
			struct choice c = { expf(logits[e] - max) * scale, e };

			if (beats(last, c) && beats(c, best))
				best = c;
		}
		last = warp_best(best);
		if (threadIdx.x == k % CUDA_WARP) {
			expert[k] = last.index;
			weight[k] = last.value;
		}
		chosen_sum += last.value;
	}
	/* One not-a-number, or an infinity, makes all of them that: the CPU's answer to it. */
	if (!(chosen_sum > 0))
		chosen_sum = NAN;
	for (uint32_t k = threadIdx.x; k < a.n_used; k += CUDA_WARP)
		weight[k] /= chosen_sum;
}

KERNEL(cuda_argmax, struct cuda_argmax, a)
{
	SHARED(struct choice, warps, CUDA_ROWS);
	const float *x = a.x + (uint64_t)blockIdx.x * a.width;
	struct choice best = { -INFINITY, 0 };

	for (uint32_t i = threadIdx.x; i < a.width; i += CUDA_THREADS)
		if (x[i] > best.value)
			best = { x[i], i };
	best = warp_best(best);
	if (threadIdx.x % CUDA_WARP == 0)
		warps[threadIdx.x / CUDA_WARP] = best;
	__syncthreads();
	if (threadIdx.x != 0)
		return;
	for (int i = 1; i < CUDA_ROWS; i++)
		if (beats(warps[i], best))
			best = warps[i];
	a.index[blockIdx.x] = best.index;
}
