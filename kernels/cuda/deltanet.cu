/* SPDX-License-Identifier: MIT */
/*
 * deltanet.cu: the gated delta net: short convolution, norms and gates, and the recurrence over
 * each sequence's rows.
 *
 * Owns no state: a sequence's lies at its span. Launched as args.h says. Refuses to know where a
 * prompt was cut into batches: after any number of rows the state is that of the recurrence, row by
 * row, to the bit. Invariant: a column of the state belongs to a few lanes of one warp from the
 * first row to the last, so there is nothing to wait for but the inputs.
 */
#include "kernels/cuda/device.cuh"

#define CONV_STEP 8 /* rows that a thread has on their way at a time */

/* Input number i of a channel, counted from the oldest one in the state: the state, then x. */
DEVICE float conv_input(const float *restrict x, const float *state, uint32_t n_ch, uint32_t kernel,
			uint32_t i)
{
	return i < kernel - 1 ? state[(uint64_t)i * n_ch] : x[(uint64_t)(i - (kernel - 1)) * n_ch];
}

KERNEL(cuda_conv_silu, struct cuda_conv, a)
{
	const struct cuda_span *s = &a.spans[blockIdx.y];
	uint32_t c = blockIdx.x * CUDA_THREADS + threadIdx.x;
	const float *restrict x = a.x + (uint64_t)s->row * a.n_ch + c;
	const float *restrict w = a.w + (uint64_t)c * a.kernel;
	float *restrict y = a.y + (uint64_t)s->row * a.n_ch + c;
	float *state = s->recurrent + a.state_offset + c;

	if (c >= a.n_ch)
		return;
	for (uint32_t t0 = 0; t0 < s->n_tok; t0 += CONV_STEP) {
		uint32_t n = min(s->n_tok - t0, (uint32_t)CONV_STEP);
		float sum[CONV_STEP] = { 0 };

		for (uint32_t k = 0; k < a.kernel; k++) {
			UNROLL
			for (uint32_t t = 0; t < CONV_STEP; t++)
				if (t < n)
					sum[t] = fmaf(w[k],
						      conv_input(x, state, a.n_ch, a.kernel, t0 + t + k),
						      sum[t]);
		}
		UNROLL
		for (uint32_t t = 0; t < CONV_STEP; t++)
			if (t < n)
				y[(uint64_t)(t0 + t) * a.n_ch] = sum[t] / (1.0f + expf(-sum[t]));
	}
	/* Ascending, so that no entry is overwritten before it has moved. */
	for (uint32_t k = 0; k + 1 < a.kernel; k++)
		state[(uint64_t)k * a.n_ch] = conv_input(x, state, a.n_ch, a.kernel, s->n_tok + k);
}

/* A warp takes a head. */
KERNEL(cuda_delta_gates, struct cuda_delta_gates, a)
{
	float *mixed = a.mixed + (uint64_t)blockIdx.x * a.n_ch, q_scale = 1.0f / sqrtf((float)a.k_dim);
	uint32_t lane = threadIdx.x % CUDA_WARP;

	for (uint32_t h = threadIdx.x / CUDA_WARP; h < 2 * a.n_head_k; h += CUDA_ROWS) {
		float *x = mixed + (uint64_t)h * a.k_dim, sum = 0, scale;

		for (uint32_t i = lane; i < a.k_dim; i += CUDA_WARP)
			sum = fmaf(x[i], x[i], sum);
		scale = 1.0f / fmaxf(sqrtf(warp_sum(sum)), a.l2_eps);
		for (uint32_t i = lane; i < a.k_dim; i += CUDA_WARP)
			x[i] = x[i] * scale * (h < a.n_head_k ? q_scale : 1.0f);
	}
	for (uint32_t h = threadIdx.x; h < a.n_head_v; h += CUDA_THREADS) {
		uint64_t at = (uint64_t)blockIdx.x * a.n_head_v + h;
		float x = a.alpha[at] + a.dt[h];

		/* softplus; above 20 it is x to float precision */
		a.g[at] = (x > 20.0f ? x : log1pf(expf(x))) * a.a[h];
		a.beta[at] = 1.0f / (1.0f + expf(-a.beta_raw[at]));
	}
}

/*
 * The recurrence is a chain over the rows, so the way to be fast is to keep the state in registers
 * and to have it spread over as many warps as can be: columns do not know of each other, and 4 or 8
 * lanes share one: a lane has at most 32 values, and what it adds up is short. Rows' inputs come
 * STEP at a time into shared memory, where all columns of the block read them. Columns that do not
 * fit the block go over gridDim.z blocks, or through the same one again.
 */
#define LANES_MIN 4
#define LANES_MAX 8 /* for more than 128 dimensions */
#define QUADS_MAX (CUDA_HEAD_MAX / 4 / LANES_MAX)
#define STEP      8

struct delta_shared {
	float4 q[STEP][CUDA_HEAD_MAX / 4], k[STEP][CUDA_HEAD_MAX / 4];
	float v[STEP][CUDA_THREADS / LANES_MIN];
	float decay[STEP], beta[STEP];
};

/* One block's work: columns from `first` on of the state of one head of one sequence. */
struct delta_job {
	const struct cuda_delta_rule *a;
	const struct cuda_span *span;
	uint32_t head, first, n_columns;
};

/* Inputs of n rows from row t0 of the span on, q and k as k_padded floats, the last ones zeros. */
DEVICE void load_inputs(const struct delta_job *j, struct delta_shared *s, uint32_t t0, uint32_t n,
			uint32_t k_padded)
{
	const struct cuda_delta_rule *a = j->a;
	uint32_t n_k = a->n_head_k * a->k_dim;
	uint64_t row = (uint64_t)j->span->row + t0;
	const float *q = a->mixed + row * a->n_ch + j->head % a->n_head_k * a->k_dim;
	const float *v = a->mixed + row * a->n_ch + 2 * n_k + j->head * a->v_dim + j->first;

	for (uint32_t i = threadIdx.x; i < n * k_padded; i += blockDim.x) {
		uint32_t t = i / k_padded, d = i % k_padded;
		const float *from = q + (uint64_t)t * a->n_ch + d;

		((float *)s->q[t])[d] = d < a->k_dim ? from[0] : 0;
		((float *)s->k[t])[d] = d < a->k_dim ? from[n_k] : 0;
	}
	for (uint32_t i = threadIdx.x; i < n * j->n_columns; i += blockDim.x) {
		uint32_t t = i / j->n_columns, c = i % j->n_columns;

		s->v[t][c] = j->first + c < a->v_dim ? v[(uint64_t)t * a->n_ch + c] : 0;
	}
	if (threadIdx.x < n) {
		uint64_t at = (row + threadIdx.x) * a->n_head_v + j->head;

		s->decay[threadIdx.x] = expf(a->g[at]);
		s->beta[threadIdx.x] = a->beta[at];
	}
}

/* Over the lanes that share a column. */
DEVICE float column_sum(float4 x, uint32_t n_lanes)
{
	float sum = (x.x + x.y) + (x.z + x.w);

	UNROLL
	for (uint32_t step = 1; step < n_lanes; step *= 2)
		sum += __shfl_xor_sync(0xffffffff, sum, (int)step);
	return sum;
}

/* One row: the column's state goes on, its output is returned. */
DEVICE float delta_step(float *state, const float4 *q, const float4 *k, float v, float decay,
			float beta, uint32_t n_lanes, uint32_t n_quads)
{
	uint32_t lane = threadIdx.x % n_lanes;
	float4 sum = make_float4(0, 0, 0, 0);
	float d;

	UNROLL
	for (uint32_t i = 0; i < n_quads; i++) {
		float4 key = k[i * n_lanes + lane];
		float *x = &state[4 * i];

		sum.x = fmaf(x[0] *= decay, key.x, sum.x);
		sum.y = fmaf(x[1] *= decay, key.y, sum.y);
		sum.z = fmaf(x[2] *= decay, key.z, sum.z);
		sum.w = fmaf(x[3] *= decay, key.w, sum.w);
	}
	d = (v - column_sum(sum, n_lanes)) * beta;
	sum = make_float4(0, 0, 0, 0);
	UNROLL
	for (uint32_t i = 0; i < n_quads; i++) {
		float4 key = k[i * n_lanes + lane], query = q[i * n_lanes + lane];
		float *x = &state[4 * i];

		sum.x = fmaf(x[0] = fmaf(key.x, d, x[0]), query.x, sum.x);
		sum.y = fmaf(x[1] = fmaf(key.y, d, x[1]), query.y, sum.y);
		sum.z = fmaf(x[2] = fmaf(key.z, d, x[2]), query.z, sum.z);
		sum.w = fmaf(x[3] = fmaf(key.w, d, x[3]), query.w, sum.w);
	}
	return column_sum(sum, n_lanes);
}

/*
 * n_lanes share a column, and each has n_quads times four rows of it: quads i * n_lanes + its
 * number. Both are constants wherever this is called, and it is always inlined, so that the state
 * stays in registers.
 */
DEVICE void delta_columns(const struct delta_job *j, struct delta_shared *s, uint32_t n_lanes,
			  uint32_t n_quads)
{
	const struct cuda_delta_rule *a = j->a;
	uint32_t lane = threadIdx.x % n_lanes, c = threadIdx.x / n_lanes;
	uint32_t column = j->first + c, n_tok = j->span->n_tok, n_out = a->n_head_v * a->v_dim;
	float *S = j->span->recurrent + a->state_offset + (uint64_t)j->head * a->k_dim * a->v_dim;
	float *out = a->out + (uint64_t)j->span->row * n_out + j->head * a->v_dim + column;
	float state[QUADS_MAX * 4];
	bool there = column < a->v_dim;

	UNROLL
	for (uint32_t i = 0; i < n_quads * 4; i++) {
		uint32_t d = (i / 4 * n_lanes + lane) * 4 + i % 4;

		state[i] = there && d < a->k_dim ? S[(uint64_t)d * a->v_dim + column] : 0;
	}
	for (uint32_t t0 = 0; t0 < n_tok; t0 += STEP) {
		uint32_t n = min(n_tok - t0, (uint32_t)STEP);

		__syncthreads();
		load_inputs(j, s, t0, n, n_lanes * n_quads * 4);
		__syncthreads();
		for (uint32_t t = 0; t < n; t++) {
			float o = delta_step(state, s->q[t], s->k[t], s->v[t][c], s->decay[t],
					     s->beta[t], n_lanes, n_quads);

			if (there && lane == 0)
				out[(uint64_t)(t0 + t) * n_out] = o;
		}
	}
	UNROLL
	for (uint32_t i = 0; i < n_quads * 4; i++) {
		uint32_t d = (i / 4 * n_lanes + lane) * 4 + i % 4;

		if (there && d < a->k_dim)
			S[(uint64_t)d * a->v_dim + column] = state[i];
	}
}

KERNEL(cuda_delta_rule, struct cuda_delta_rule, a)
{
	SHARED(struct delta_shared, shared, 1);
	struct delta_job j;

	j.a = &a;
	j.span = &a.spans[blockIdx.y];
	j.head = blockIdx.x;
	j.n_columns = blockDim.x / (a.k_dim > 128 ? LANES_MAX : LANES_MIN);
	for (j.first = blockIdx.z * j.n_columns; j.first < a.v_dim; j.first += gridDim.z * j.n_columns) {
		if (a.k_dim <= 32)
			delta_columns(&j, shared, LANES_MIN, 2);
		else if (a.k_dim <= 128)
			delta_columns(&j, shared, LANES_MIN, QUADS_MAX);
		else
			delta_columns(&j, shared, LANES_MAX, QUADS_MAX);
	}
}
