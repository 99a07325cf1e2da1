/* SPDX-License-Identifier: MIT */
/*
 * norm_rope.cu: the small operations between matrix products: norms, sums, gates, rows and rope.
 *
 * Owns no state. Launched as args.h says. Refuses to know layers and models. Invariant: every element
 * is computed by one thread and every sum is made in one fixed order, so that results do not depend
 * on who ran first; formulas and their order are those of kernels/cpu/ref.c.
 */
#include "kernels/cuda/device.cuh"

/*
 * Sum over the block: of a warp's lanes, then of the warps in order. Once in a kernel: nobody waits
 * before `warps` is used anew.
 */
DEVICE float block_sum(float x)
{
	SHARED(float, warps, CUDA_ROWS);
	float sum = 0;

	x = warp_sum(x);
	if (threadIdx.x % CUDA_WARP == 0)
		warps[threadIdx.x / CUDA_WARP] = x;
	__syncthreads();
	UNROLL
	for (int i = 0; i < CUDA_ROWS; i++)
		sum += warps[i];
	return sum;
}

DEVICE float sigmoid(float x)
{
	return 1.0f / (1.0f + expf(-x));
}

/* Of a flat operation. */
DEVICE uint64_t element(void)
{
	return (uint64_t)blockIdx.x * CUDA_THREADS + threadIdx.x;
}

KERNEL(cuda_rms_norm, struct cuda_norm, a)
{
	const float *x = a.x + (uint64_t)blockIdx.x * a.width;
	float *y = a.y + (uint64_t)blockIdx.x * a.width;
	float sum = 0, scale;

	for (uint32_t i = threadIdx.x; i < a.width; i += CUDA_THREADS)
		sum = fmaf(x[i], x[i], sum);
	scale = 1.0f / sqrtf(block_sum(sum) / (float)a.width + a.eps);
	for (uint32_t i = threadIdx.x; i < a.width; i += CUDA_THREADS)
		y[i] = x[i] * scale * (a.w ? a.w[i] : 1.0f);
}

KERNEL(cuda_add, struct cuda_flat, a)
{
	uint64_t i = element();

	if (i < a.n)
		a.y[i] += a.a[i];
}

KERNEL(cuda_silu_mul, struct cuda_flat, a)
{
	uint64_t i = element();

	if (i < a.n)
		a.y[i] = a.a[i] / (1.0f + expf(-a.a[i])) * a.b[i];
}

KERNEL(cuda_sigmoid_mul, struct cuda_flat, a)
{
	uint64_t i = element();

	if (i < a.n)
		a.y[i] *= sigmoid(a.a[i]);
}

/* Rows go round the grid: heads times tokens can be more than the 65535 that its y takes. */
KERNEL(cuda_copy_rows, struct cuda_copy_rows, a)
{
	uint32_t i = blockIdx.x * CUDA_THREADS + threadIdx.x;

	if (i >= a.width)
		return;
	for (uint32_t row = blockIdx.y; row < a.n_rows; row += gridDim.y)
		a.y[(uint64_t)row * a.width + i] = a.x[row * a.x_stride + i];
}

KERNEL(cuda_scalar_gate, struct cuda_scalar_gate, a)
{
	const float *in = a.in + (uint64_t)blockIdx.x * a.width;
	float *x = a.x + (uint64_t)blockIdx.x * a.x_width;
	float sum = 0, gate;

	for (uint32_t i = threadIdx.x; i < a.width; i += CUDA_THREADS)
		sum = fmaf(a.w[i], in[i], sum);
	gate = sigmoid(block_sum(sum));
	for (uint32_t i = threadIdx.x; i < a.x_width; i += CUDA_THREADS)
		x[i] *= gate;
}

/*
 * Sine and cosine to float precision whatever the angle's size: only the reduction to [-pi/4, pi/4]
 * needs doubles, in which cards made for displays are 64 times slower. pi / 2 as a double is exact
 * enough for any 32-bit position.
 */
DEVICE void sine_cosine(float angle, float *ret_sine, float *ret_cosine)
{
	double quarters = rint((double)angle * 0.63661977236758134308);
	float rest = (float)fma(quarters, -1.57079632679489661923, (double)angle);
	unsigned quadrant = (unsigned)(int64_t)quarters & 3;
	float s = sinf(rest), c = cosf(rest);
	float sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;

	*ret_sine = quadrant & 2 ? -sine : sine;
	*ret_cosine = quadrant == 1 || quadrant == 2 ? -cosine : cosine;
}

KERNEL(cuda_rope, struct cuda_rope, a)
{
	uint32_t half = a.n_rot / 2;
	float *x = a.x + blockIdx.y * a.stride + (uint64_t)blockIdx.x * a.dim;
	float pos = (float)a.positions[blockIdx.y];

	for (uint32_t i = threadIdx.x; i < half; i += blockDim.x) {
		float lo = x[i], hi = x[i + half], sine, cosine;

		sine_cosine(pos * a.freq[i], &sine, &cosine);
		x[i] = lo * cosine - hi * sine;
		x[i + half] = lo * sine + hi * cosine;
	}
}
