/* SPDX-License-Identifier: MIT */
/*
 * moe.cu: the experts of a layer over few tokens, in two launches: gate, up and SwiGLU of every
 * chosen expert, then down and the weighted sum.
 *
 * Owns no state. Launched as args.h says. Which experts are on the device is in a table that the
 * host changes between launches; refuses to know how they came there. Invariant: a token's sum
 * takes every choice once and in order, wherever it was computed, so that moving experts between
 * tiers changes an answer by rounding at most.
 */
#include "kernels/cuda/quant.cuh"

DEVICE float silu(float x)
{
	return x / (1.0f + expf(-x));
}

/* From the lanes' parts of one row of gate and of up. */
DEVICE void store_hidden(const struct cuda_moe *a, uint32_t row, float gate, float up)
{
	gate = warp_sum(gate);
	up = warp_sum(up);
	if (LANE == 0)
		a->hidden[(uint64_t)blockIdx.y * a->n_ff + row] = silu(gate) * up;
}

#define DEFINE_UP(type, act_type)                                                                 \
	KERNEL(cuda_moe_up_##type, struct cuda_moe, a)                                            \
	{                                                                                         \
		SHARED(uint32_t, staged, STAGE_WORDS(act_type));                                  \
		const struct cuda_expert e = a.experts[a.expert[blockIdx.y]];                     \
		const uint8_t *act = row_at(a.act, blockIdx.y / a.n_used, a.act_stride);          \
		uint32_t row = warp_row(a.n_ff);                                                  \
		float gate = 0, up = 0;                                                           \
                                                                                                  \
		if (!e.gate)                                                                      \
			return;                                                                   \
		for (uint32_t k = 0; k < a.n_embd; k += STAGE) {                                  \
			uint32_t n = min(a.n_embd - k, (uint32_t)STAGE);                          \
                                                                                                  \
			__syncthreads();                                                          \
			stage_row(staged, act + act_type##_bytes(k), act_type##_bytes(n));        \
			__syncthreads();                                                          \
			type##_lane_dot(row_at(e.gate, row, a.up_stride) + type##_bytes(k),       \
					staged, 0, 1, n, &gate);                                  \
			type##_lane_dot(row_at(e.up, row, a.up_stride) + type##_bytes(k), staged, \
					0, 1, n, &up);                                            \
		}                                                                                 \
		store_hidden(&a, row, gate, up);                                                  \
	}

DEFINE_UP(q4_k, q8_k)
DEFINE_UP(q5_k, q8_k)
DEFINE_UP(q6_k, q8_k)
DEFINE_UP(q8_0, q8_0)
DEFINE_UP(q4_0, q8_0)
DEFINE_UP(mxfp4, q8_0)

/* Rows of floating point are read where they lie, in steps of 16 bytes. */
#define DEFINE_FLOAT_UP(type)                                                                  \
	KERNEL(cuda_moe_up_##type, struct cuda_moe, a)                                         \
	{                                                                                      \
		const struct cuda_expert e = a.experts[a.expert[blockIdx.y]];                  \
		const uint8_t *act = row_at(a.act, blockIdx.y / a.n_used, a.act_stride);       \
		uint32_t row = warp_row(a.n_ff);                                               \
		float gate = 0, up = 0;                                                        \
                                                                                               \
		if (!e.gate)                                                                   \
			return;                                                                \
		type##_lane_dot(row_at(e.gate, row, a.up_stride), act, 0, 1, a.n_embd, &gate); \
		type##_lane_dot(row_at(e.up, row, a.up_stride), act, 0, 1, a.n_embd, &up);     \
		store_hidden(&a, row, gate, up);                                               \
	}

DEFINE_FLOAT_UP(f16)
DEFINE_FLOAT_UP(bf16)
DEFINE_FLOAT_UP(f32)

/* What the CPU computed, as lane 0's part. */
DEVICE float other_result(const struct cuda_moe *a, uint32_t k, uint32_t row)
{
	uint64_t slot = (uint64_t)blockIdx.y * a->n_used + k;

	return LANE == 0 ? a->other[slot * a->n_embd + row] : 0.0f;
}

DEVICE void add_result(const struct cuda_moe *a, uint32_t row, float part)
{
	float sum = warp_sum(part);

	if (LANE == 0 && blockIdx.x * CUDA_ROWS + WARP < a->n_embd)
		a->out[(uint64_t)blockIdx.y * a->n_embd + row] += sum;
}

/*
 * Every block brings the hidden rows to the form of the activations by itself: that reads a few KB
 * from the cache, which a third launch and the way through memory would not be faster than. As many
 * rows at once as the shared memory holds, because a barrier for each would leave the memory idle:
 * an expert's share of a row is short. Lanes add up over the experts, and are added to each other
 * once, at the end.
 */
#define DEFINE_DOWN(type, act_type)                                                               \
	KERNEL(cuda_moe_down_##type, struct cuda_moe, a)                                          \
	{                                                                                         \
		DYNAMIC_SHARED(uint8_t, act);                                                     \
		const uint32_t *expert = a.expert + (uint64_t)blockIdx.y * a.n_used;              \
		const float *weight = a.weight + (uint64_t)blockIdx.y * a.n_used;                 \
		const float *hidden = a.hidden + (uint64_t)blockIdx.y * a.n_used * a.n_ff;        \
		uint32_t row = warp_row(a.n_embd), at_once = max(a.hidden_rows, 1u);              \
		float total = 0;                                                                  \
                                                                                                  \
		for (uint32_t from = 0; from < a.n_used; from += at_once) {                       \
			uint32_t n = min(a.n_used - from, at_once);                               \
                                                                                                  \
			__syncthreads();                                                          \
			for (uint32_t k = from; k < from + n; k++)                                \
				if (a.experts[expert[k]].gate)                                    \
					act_type##_form(hidden + (uint64_t)k * a.n_ff,            \
							act + (k - from) * a.hidden_act_bytes,    \
							a.n_ff, k);                               \
			__syncthreads();                                                          \
			for (uint32_t k = from; k < from + n; k++) {                              \
				const struct cuda_expert *e = &a.experts[expert[k]];              \
				float part = 0;                                                   \
                                                                                                  \
				if (e->gate)                                                      \
					type##_lane_dot(row_at(e->down, row, a.down_stride),      \
							act + (k - from) * a.hidden_act_bytes, 0, \
							1, a.n_ff, &part);                        \
				else                                                              \
					part = other_result(&a, k, row);                          \
				total += weight[k] * part;                                        \
			}                                                                         \
		}                                                                                 \
		add_result(&a, row, total);                                                       \
	}

DEFINE_DOWN(q4_k, q8_k)
DEFINE_DOWN(q5_k, q8_k)
DEFINE_DOWN(q6_k, q8_k)
DEFINE_DOWN(q8_0, q8_0)
DEFINE_DOWN(q4_0, q8_0)
DEFINE_DOWN(mxfp4, q8_0)
DEFINE_DOWN(f16, f16)
DEFINE_DOWN(bf16, bf16)
DEFINE_DOWN(f32, f32)
