/* SPDX-License-Identifier: MIT */
/*
 * bench-kernels.c: speed of the CPU kernels on one thread, as a table: for every weight type and
 * kernel table, GB/s of weights with one column (decode; the weights are larger than the caches)
 * and Gflop/s with 64 columns (prefill), beside what a plain loop reads from memory; then the
 * kernels of the recurrent layers and of attention.
 *
 * Owns nothing of the product. Numbers of a busy machine mean nothing: the best of several passes
 * is printed.
 */
#include "kernels/cpu/cpu.h"

#include "daemon/base.h"

#define ROW          2048
#define DECODE_BYTES (96u << 20)
#define PREFILL_ROWS 256
#define PREFILL_COLS 64
#define PASSES       15

static uint64_t seed = 1;

/*
 * Time of this thread only: what else runs here takes its share of the caches and of memory, but
 * not of the clock.
 */
static uint64_t cpu_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static uint32_t random_u32(void)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 32);
}

static float *random_floats(size_t n)
{
	float *x = malloc(n * sizeof(*x));

	if (!x)
		abort();
	for (size_t i = 0; i < n; i++)
		x[i] = (float)random_u32() * 0x1p-31f - 1.0f;
	return x;
}

/* Rows of some type with ordinary values: bytes are random, scales are not. */
static void *random_weights(enum quant_type type, size_t bytes)
{
	const struct quant_info *info = quant_info(type);
	const uint16_t scale = 0x2400, bf16 = 0x3c80; /* both 1/64 */
	uint8_t *w = malloc(bytes);

	if (!w)
		abort();
	for (size_t i = 0; i + 4 <= bytes; i += 4) {
		uint32_t r = random_u32();

		memcpy(w + i, &r, sizeof(r));
	}
	for (size_t i = 0; i + info->block_bytes <= bytes; i += info->block_bytes) {
		float f = 0x1p-6f;

		if (type == QUANT_F32)
			memcpy(w + i, &f, sizeof(f));
		else if (type == QUANT_BF16)
			memcpy(w + i, &bf16, sizeof(bf16));
		else if (type == QUANT_MXFP4)
			w[i] = 122;
		else if (type == QUANT_Q6_K)
			memcpy(w + i + offsetof(struct block_q6_k, d), &scale, sizeof(scale));
		else
			memcpy(w + i, &scale, sizeof(scale));
		if (type == QUANT_Q4_K || type == QUANT_Q5_K)
			memcpy(w + i + offsetof(struct block_q4_k, dmin), &scale, sizeof(scale));
	}
	return w;
}

/* Seconds of the fastest of PASSES calls. */
static double best_pass(const struct cpu_kernels *k, enum quant_type type, const void *w,
			size_t n_rows, const void *act, size_t n_cols, float *y)
{
	size_t stride = quant_row_bytes(type, ROW),
	       act_stride = cpu_act_type(type) == QUANT_Q8_K
				    ? ROW / QK_K * sizeof(struct block_q8_k)
				    : quant_row_bytes(cpu_act_type(type), ROW);
	double best = 1e9;

	for (int pass = 0; pass < PASSES; pass++) {
		uint64_t t0 = cpu_us(), t1;

		k->matmul[type](ROW, w, stride, n_rows, act, act_stride, n_cols, y, n_rows, NULL);
		t1 = cpu_us();
		best = MIN(best, (double)MAX(t1 - t0, (uint64_t)1) * 1e-6);
	}
	return best;
}

static void bench_type(const struct cpu_kernels *k, enum quant_type type, const void *w)
{
	size_t stride = quant_row_bytes(type, ROW), act_bytes = ROW * sizeof(float) * PREFILL_COLS;
	/* The reference is slow and does not depend on memory: a small part of the rows will do. */
	size_t n_rows = DECODE_BYTES / stride, part = k == &cpu_kernels_ref ? 64 : 1;
	_cleanup_(freep) float *x = random_floats(ROW * PREFILL_COLS);
	_cleanup_(freep) float *y =
		malloc(MAX(n_rows, (size_t)PREFILL_ROWS * PREFILL_COLS) * sizeof(*y));
	_cleanup_(freep) void *act = malloc(act_bytes);
	double decode, prefill;

	if (!y || !act)
		abort();
	k->quantize[cpu_act_type(type)](x, act, ROW * PREFILL_COLS); /* rows of whole blocks follow each other */
	decode = best_pass(k, type, w, n_rows / part, act, 1, y);
	prefill = best_pass(k, type, w, PREFILL_ROWS / MIN(part, (size_t)8), act, PREFILL_COLS, y);
	printf("%-6s %-5s %8.2f GB/s %8.1f Gflop/s\n", quant_info(type)->name, k->name,
	       (double)(n_rows / part * stride) / decode * 1e-9,
	       2.0 * ROW * PREFILL_COLS * (double)(PREFILL_ROWS / MIN(part, (size_t)8)) / prefill * 1e-9);
	fflush(stdout);
}

static void bench_memory(const void *p)
{
	double best = 1e9;
	uint64_t sum = 0;

	for (int pass = 0; pass < PASSES; pass++) {
		const uint64_t *v = p;
		uint64_t t0 = cpu_us(), a = 0, b = 0, c = 0, d = 0;

		for (size_t i = 0; i < DECODE_BYTES / sizeof(*v); i += 4) {
			a ^= v[i];
			b ^= v[i + 1];
			c ^= v[i + 2];
			d ^= v[i + 3];
		}
		sum += a ^ b ^ c ^ d;
		best = MIN(best, (double)(cpu_us() - t0) * 1e-6);
	}
	printf("memory, one thread reading: %.2f GB/s (%x)\n", DECODE_BYTES / best * 1e-9,
	       (unsigned)(sum & 15));
}

/*
 * The layer shapes of Qwen3.5-35B-A3B: heads of 128 with a state of 128 x 128, attention heads of
 * 256.
 */
static void bench_layers(const struct cpu_kernels *k)
{
	enum { DIM = 128, HEAD = 256, N_KV = 4096, REPEAT = 20 };
	_cleanup_(freep) float *x = random_floats(CPU_DELTA_CHUNK * DIM), *S = random_floats(DIM * DIM);
	_cleanup_(freep) float *kv = random_floats(N_KV * HEAD);
	_cleanup_(freep) float *scratch = random_floats(cpu_delta_scratch(DIM, DIM)),
			       *o = random_floats(CPU_DELTA_CHUNK * DIM),
			       *tile = random_floats(cpu_attention_scratch(1, 1, HEAD));
	_cleanup_(freep) uint16_t *half = malloc(N_KV * HEAD * sizeof(*half));
	float g[CPU_DELTA_CHUNK], beta[CPU_DELTA_CHUNK], out[HEAD];
	const void *page = half;
	const struct cpu_attention a = { .q = kv,
					 .out = out,
					 .n_rows = 1,
					 .n_q = 1,
					 .k_pages = &page,
					 .v_pages = &page,
					 .page_tok = N_KV,
					 .k_dim = HEAD,
					 .v_dim = HEAD,
					 .pos = N_KV - 1,
					 .kv_f16 = true,
					 .scale = 0.0625f,
					 .scratch = tile };
	uint64_t t0, t1, t2, t3;

	if (!half)
		abort();
	for (size_t t = 0; t < CPU_DELTA_CHUNK; t++) {
		k->l2_norm(x + t * DIM, 1e-6f, x + t * DIM, DIM);
		g[t] = -0.1f;
		beta[t] = 0.5f;
	}
	k->f32_to_f16(kv, half, N_KV * HEAD);

	t0 = cpu_us();
	for (int i = 0; i < REPEAT; i++)
		for (size_t t = 0; t < CPU_DELTA_CHUNK; t++)
			k->delta_step(S, x + t * DIM, x + t * DIM, x + t * DIM, g[t], beta[t], DIM,
				      DIM, o);
	t1 = cpu_us();
	for (int i = 0; i < REPEAT; i++)
		k->delta_chunk(S, x, DIM, x, DIM, x, DIM, g, beta, 1, CPU_DELTA_CHUNK, DIM, DIM, o,
			       DIM, scratch);
	t2 = cpu_us();
	for (int i = 0; i < REPEAT; i++)
		k->attention(&a);
	t3 = cpu_us();
	printf("%-5s delta rule, head of 128: %.2f us per token in steps, %.2f in chunks; attention, head of 256 over %d f16 "
	       "positions: %.0f us\n",
	       k->name, (double)(t1 - t0) / (REPEAT * CPU_DELTA_CHUNK),
	       (double)(t2 - t1) / (REPEAT * CPU_DELTA_CHUNK), N_KV, (double)(t3 - t2) / REPEAT);
}

int main(void)
{
	static const enum quant_type types[] = { QUANT_F32,  QUANT_F16,  QUANT_BF16,
						 QUANT_Q8_0, QUANT_Q4_0, QUANT_Q4_K,
						 QUANT_Q5_K, QUANT_Q6_K, QUANT_MXFP4 };
	const struct cpu_kernels *best = cpu_kernels_choose(NULL);

	for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
		_cleanup_(freep) void *w = random_weights(types[i], DECODE_BYTES);

		if (i == 0)
			bench_memory(w);
		bench_type(&cpu_kernels_ref, types[i], w);
		if (best != &cpu_kernels_ref)
			bench_type(best, types[i], w);
	}
	bench_layers(&cpu_kernels_ref);
	if (best != &cpu_kernels_ref)
		bench_layers(best);
	return 0;
}
