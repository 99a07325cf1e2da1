/* SPDX-License-Identifier: MIT */
/*
 * bench-kernels.c: speed of the CPU kernels, as a table or as JSON: for every weight type and kernel table, GB/s of weights
 * with one column on one thread and on two (decode; the weights are larger than the caches), beside what the
 * same memory streams in the same run, and Gflop/s with 64 columns (prefill); then the kernels of the recurrent layers
 * and of attention.
 *
 * Owns nothing of the product, and checks no result: that is the unit tests'. Types and tables are whatever this build and this
 * processor have. Numbers of a busy machine mean nothing: the best of several passes is printed, by the wall clock.
 */
#include "kernels/cpu/cpu.h"

#include "daemon/base.h"

#include <getopt.h>
#include <jansson.h>
#include <pthread.h>
#include <sys/mman.h>

#define ROW          2048
#define HUGE_PAGE    ((size_t)2 << 20)
#define BYTES_LEAST  ((size_t)128 << 20)
#define BYTES_MOST   ((size_t)1 << 30)
#define PREFILL_ROWS 256u
#define PREFILL_COLS 64u
#define PASSES       25 /* at most, while there is time */
#define PASSES_LEAST 3
#define PASSES_NS    50000000
#define THREADS_MAX  2

struct bench {
	uint8_t *weights; /* in huge pages, as the streaming is measured on */
	size_t bytes;
	float *x, *y;
	void *act;
	bool json, memory_only;
	unsigned n_threads;                /* at most */
	double streaming[THREADS_MAX + 1]; /* GB/s, by threads */
};

static uint64_t seed = 1;

static void no_memory(void)
{
	fprintf(stderr, "bench-kernels: out of memory\n");
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
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
		no_memory();
	for (size_t i = 0; i < n; i++)
		x[i] = (float)random_u32() * 0x1p-31f - 1.0f;
	return x;
}

/* ---- threads ---- */

/* The same work on one thread or more; a pass is as long as its slowest. */
struct team {
	void (*work)(void *arg, unsigned thread, unsigned n_threads);
	void *arg;
	unsigned n_threads;
	bool ends; /* written between two barriers by the first thread */
	pthread_barrier_t barrier;
};

struct member {
	struct team *team;
	unsigned thread;
};

static void *member_main(void *arg)
{
	struct member *m = arg;

	for (;;) {
		pthread_barrier_wait(&m->team->barrier);
		if (m->team->ends)
			return NULL;
		m->team->work(m->team->arg, m->thread, m->team->n_threads);
		pthread_barrier_wait(&m->team->barrier);
	}
}

/* Seconds of the fastest pass. */
static double best_pass(unsigned n_threads,
			void (*work)(void *arg, unsigned thread, unsigned n_threads), void *arg)
{
	struct team team = { .work = work, .arg = arg, .n_threads = n_threads };
	struct member members[THREADS_MAX];
	pthread_t threads[THREADS_MAX];
	uint64_t best = UINT64_MAX, first = now_ns();

	if (pthread_barrier_init(&team.barrier, NULL, n_threads) != 0)
		no_memory();
	for (unsigned i = 1; i < n_threads; i++) {
		members[i] = (struct member){ .team = &team, .thread = i };
		if (pthread_create(&threads[i], NULL, member_main, &members[i]) != 0)
			no_memory();
	}
	for (int pass = 0; !team.ends; pass++) {
		uint64_t begun;

		pthread_barrier_wait(&team.barrier);
		begun = now_ns();
		work(arg, 0, n_threads);
		pthread_barrier_wait(&team.barrier);
		best = MIN(best, MAX(now_ns() - begun, UINT64_C(1)));
		team.ends = pass + 1 >= PASSES ||
			    (pass + 1 >= PASSES_LEAST && now_ns() - first > PASSES_NS);
	}
	pthread_barrier_wait(&team.barrier);
	for (unsigned i = 1; i < n_threads; i++)
		pthread_join(threads[i], NULL);
	pthread_barrier_destroy(&team.barrier);
	return (double)best * 1e-9;
}

/* ---- memory ---- */

typedef uint64_t vector __attribute__((vector_size(64)));

/* Four loads in flight of a vector each, and the lines that follow asked for; the widest loads there are. */
#define STREAM(p, n)                                                   \
	do {                                                           \
		vector a = {}, b = {}, c = {}, d = {};                 \
                                                                       \
		for (size_t i = 0; i + 4 <= (n); i += 4) {             \
			a += (p)[i];                                   \
			b += (p)[i + 1];                               \
			c += (p)[i + 2];                               \
			d += (p)[i + 3];                               \
			__builtin_prefetch((p) + i + 32);              \
			__builtin_prefetch((p) + i + 33);              \
			__builtin_prefetch((p) + i + 34);              \
			__builtin_prefetch((p) + i + 35);              \
		}                                                      \
		a += b + c + d;                                        \
		return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6]; \
	} while (0)

static uint64_t stream_plain(const vector *p, size_t n)
{
	STREAM(p, n);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static uint64_t stream_avx2(const vector *p, size_t n)
{
	STREAM(p, n);
}

__attribute__((target("avx512f"))) static uint64_t stream_avx512(const vector *p, size_t n)
{
	STREAM(p, n);
}
#endif

static uint64_t stream(const vector *p, size_t n)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("avx512f"))
		return stream_avx512(p, n);
	if (__builtin_cpu_supports("avx2"))
		return stream_avx2(p, n);
#endif
	return stream_plain(p, n);
}

static atomic_ullong sink; /* so that nothing is left out */

static void stream_part(void *arg, unsigned thread, unsigned n_threads)
{
	const struct bench *b = arg;
	size_t part = b->bytes / n_threads;

	atomic_fetch_add(&sink,
			 stream((const vector *)(b->weights + thread * part), part / sizeof(vector)));
}

static void bench_memory(struct bench *b)
{
	for (unsigned t = 1; t <= b->n_threads; t++) {
		b->streaming[t] =
			MAX(b->streaming[t], (double)b->bytes / best_pass(t, stream_part, b) * 1e-9);
		if (!b->json)
			printf("memory, %u thread%s reading: %.2f GB/s\n", t, t > 1 ? "s" : "",
			       b->streaming[t]);
	}
}

static json_t *memory_json(const struct bench *b)
{
	json_t *o = json_array();

	for (unsigned t = 1; t <= b->n_threads; t++)
		json_array_append_new(o, json_pack("{s:i, s:f}", "threads", (int)t, "gb_s",
						   b->streaming[t]));
	return o;
}

/* ---- products ---- */

/* Where the f16 scales of a block are; a type that is not here has one at its beginning. */
static const struct scales {
	enum quant_type type;
	size_t d, dmin; /* dmin: SIZE_MAX: none */
} scales[] = {
	{ QUANT_Q4_1, offsetof(struct block_q4_1, d), offsetof(struct block_q4_1, m) },
	{ QUANT_Q5_1, offsetof(struct block_q5_1, d), offsetof(struct block_q5_1, m) },
	{ QUANT_Q2_K, offsetof(struct block_q2_k, d), offsetof(struct block_q2_k, dmin) },
	{ QUANT_Q3_K, offsetof(struct block_q3_k, d), SIZE_MAX },
	{ QUANT_Q4_K, offsetof(struct block_q4_k, d), offsetof(struct block_q4_k, dmin) },
	{ QUANT_Q5_K, offsetof(struct block_q5_k, d), offsetof(struct block_q5_k, dmin) },
	{ QUANT_Q6_K, offsetof(struct block_q6_k, d), SIZE_MAX },
};

/* Ordinary values: bytes are random, scales are 1/64. */
static void set_scale(enum quant_type type, uint8_t *block)
{
	const uint16_t f16 = 0x2400, bf16 = 0x3c80;
	const float f32 = 0x1p-6f;
	struct scales s = { .type = type, .dmin = SIZE_MAX };

	for (size_t i = 0; i < ARRAY_SIZE(scales); i++)
		if (scales[i].type == type)
			s = scales[i];
	if (type == QUANT_F32)
		memcpy(block, &f32, sizeof(f32));
	else if (type == QUANT_BF16)
		memcpy(block, &bf16, sizeof(bf16));
	else if (type == QUANT_MXFP4)
		block[offsetof(struct block_mxfp4, e)] = 121;
	else
		memcpy(block + s.d, &f16, sizeof(f16));
	if (s.dmin != SIZE_MAX)
		memcpy(block + s.dmin, &f16, sizeof(f16));
}

/* Some random rows, again and again: the memory counts, not what is in it. */
static void random_weights(struct bench *b, enum quant_type type)
{
	size_t block = quant_info(type)->block_bytes, some = 512 * quant_row_bytes(type, ROW);

	for (size_t i = 0; i < some; i++)
		b->weights[i] = (uint8_t)random_u32();
	for (size_t i = 0; i < some; i += block)
		set_scale(type, b->weights + i);
	for (size_t i = some; i < b->bytes; i += some)
		memcpy(b->weights + i, b->weights, MIN(some, b->bytes - i));
}

struct product {
	const struct bench *b;
	const struct cpu_kernels *k;
	enum quant_type type;
	size_t n_rows, n_cols;
};

static size_t act_stride(enum quant_type type)
{
	enum quant_type act = cpu_act_type(type);

	return act == QUANT_Q8_K ? ROW / QK_K * sizeof(struct block_q8_k) : quant_row_bytes(act, ROW);
}

static void product_part(void *arg, unsigned thread, unsigned n_threads)
{
	const struct product *p = arg;
	size_t stride = quant_row_bytes(p->type, ROW), from = p->n_rows * thread / n_threads,
	       to = p->n_rows * (thread + 1) / n_threads;

	p->k->matmul[p->type](ROW, p->b->weights + from * stride, stride, to - from, p->b->act,
			      act_stride(p->type), p->n_cols, p->b->y + from, p->n_rows, NULL);
}

static json_t *bench_type(const struct bench *b, const struct cpu_kernels *k, enum quant_type type)
{
	size_t stride = quant_row_bytes(type, ROW);
	/* The reference is slow and does not depend on memory: a small part of the rows will do. */
	bool ref = k == &cpu_kernels_ref;
	struct product p = { .b = b,
			     .k = k,
			     .type = type,
			     .n_rows = b->bytes / stride / (ref ? 64 : 1),
			     .n_cols = 1 },
		       prefill = { .b = b,
				   .k = k,
				   .type = type,
				   .n_rows = PREFILL_ROWS / (ref ? 8 : 1),
				   .n_cols = PREFILL_COLS };
	json_t *o = json_pack("{s:s, s:s}", "type", quant_info(type)->name, "table", k->name),
	       *decode = json_array();
	double flops;

	k->quantize[cpu_act_type(type)](b->x, b->act, ROW * PREFILL_COLS); /* rows of whole blocks follow each other */
	if (!b->json)
		printf("%-8s %-7s", quant_info(type)->name, k->name);
	for (unsigned t = 1; t <= b->n_threads; t++) {
		double gb_s = (double)(p.n_rows * stride) / best_pass(t, product_part, &p) * 1e-9;
		double share = gb_s / b->streaming[t];

		json_array_append_new(decode, json_pack("{s:i, s:f, s:f}", "threads", (int)t,
							"gb_s", gb_s, "share", share));
		if (!b->json)
			printf(" %8.2f GB/s %5.1f %%", gb_s, 100 * share);
	}
	flops = 2.0 * ROW * PREFILL_COLS * (double)prefill.n_rows /
		best_pass(1, product_part, &prefill) * 1e-9;
	if (!b->json)
		printf(" %9.1f Gflop/s\n", flops);
	fflush(stdout);
	json_object_set_new(o, "one_column", decode);
	json_object_set_new(o, "gflops_64_columns", json_real(flops));
	return o;
}

static json_t *bench_products(struct bench *b)
{
	json_t *rows = json_array();

	if (!b->json)
		printf("%-8s %-7s %23s%s %17s\n", "type", "table", "1 column, 1 thread",
		       b->n_threads > 1 ? "               2 threads" : "", "64 columns");
	for (enum quant_type type = 0; type < QUANT_TYPE_MAX; type++) {
		if (!quant_has_kernel(type))
			continue;
		random_weights(b, type);
		for (size_t i = 0; cpu_kernels_at(i); i++)
			if (cpu_kernels_at(i)->matmul[type])
				json_array_append_new(rows, bench_type(b, cpu_kernels_at(i), type));
	}
	return rows;
}

/* ---- layers ---- */

#define DIM   128 /* heads of the delta rule, with a state of 128 x 128 */
#define HEAD  256 /* of attention */
#define N_KV  4096
#define GROUP 8 /* query heads that share keys and values */

/* Layer shapes of Qwen3.5-35B-A3B. */
struct layer {
	const struct cpu_kernels *k;
	float *x, *state, *scratch, *out;
	float g[CPU_DELTA_CHUNK], beta[CPU_DELTA_CHUNK];
	struct cpu_attention attention;
};

static void steps_part(void *arg, unsigned thread, unsigned n_threads)
{
	struct layer *l = arg;

	(void)thread;
	(void)n_threads;
	for (size_t t = 0; t < CPU_DELTA_CHUNK; t++)
		l->k->delta_step(l->state, l->x + t * DIM, l->x + t * DIM, l->x + t * DIM, l->g[t],
				 l->beta[t], DIM, DIM, l->out);
}

static void chunk_part(void *arg, unsigned thread, unsigned n_threads)
{
	struct layer *l = arg;

	(void)thread;
	(void)n_threads;
	l->k->delta_chunk(l->state, l->x, DIM, l->x, DIM, l->x, DIM, l->g, l->beta, 1,
			  CPU_DELTA_CHUNK, DIM, DIM, l->out, DIM, l->scratch);
}

static void attention_part(void *arg, unsigned thread, unsigned n_threads)
{
	struct layer *l = arg;

	(void)thread;
	(void)n_threads;
	l->k->attention(&l->attention);
}

static json_t *bench_layers(const struct bench *b, const struct cpu_kernels *k)
{
	_cleanup_(freep) float *x = random_floats(CPU_DELTA_CHUNK * DIM),
			       *state = random_floats(DIM * DIM), *kv = random_floats(N_KV * HEAD),
			       *scratch = random_floats(cpu_delta_scratch(DIM, DIM)),
			       *out = random_floats(
				       MAX((size_t)CPU_DELTA_CHUNK * DIM, (size_t)GROUP * HEAD)),
			       *tile = random_floats(cpu_attention_scratch(1, GROUP, HEAD));
	_cleanup_(freep) uint16_t *half = malloc(N_KV * HEAD * sizeof(*half));
	const void *page = half;
	struct layer l = { .k = k,
			   .x = x,
			   .state = state,
			   .scratch = scratch,
			   .out = out,
			   .attention = { .q = kv,
					  .out = out,
					  .n_rows = 1,
					  .n_q = GROUP,
					  .k_pages = &page,
					  .v_pages = &page,
					  .page_tok = N_KV,
					  .k_dim = HEAD,
					  .v_dim = HEAD,
					  .pos = N_KV - 1,
					  .kv_f16 = true,
					  .scale = 0.0625f,
					  .scratch = tile } };
	double step, chunk, attention;

	if (!half)
		no_memory();
	for (size_t t = 0; t < CPU_DELTA_CHUNK; t++) {
		k->l2_norm(x + t * DIM, 1e-6f, x + t * DIM, DIM);
		l.g[t] = -0.1f;
		l.beta[t] = 0.5f;
	}
	k->f32_to_f16(kv, half, N_KV * HEAD);

	step = best_pass(1, steps_part, &l) * 1e6 / CPU_DELTA_CHUNK;
	chunk = best_pass(1, chunk_part, &l) * 1e6 / CPU_DELTA_CHUNK;
	attention = best_pass(1, attention_part, &l) * 1e6;
	if (!b->json)
		printf("%-7s delta rule, head of 128: %.2f us a token in steps, %.2f in chunks; attention, %u heads of 256 "
		       "over %u f16 positions: %.0f us\n",
		       k->name, step, chunk, GROUP, N_KV, attention);
	return json_pack("{s:s, s:f, s:f, s:f}", "table", k->name, "delta_step_us", step,
			 "delta_chunk_us_per_token", chunk, "attention_4096_us", attention);
}

static json_t *bench_all_layers(const struct bench *b)
{
	json_t *rows = json_array();

	/* The reference computes attention to be read, not to be waited for. */
	for (size_t i = 1; cpu_kernels_at(i); i++)
		json_array_append_new(rows, bench_layers(b, cpu_kernels_at(i)));
	return rows;
}

/* ---- the program ---- */

/* More than what any cache of the machine holds, in pages that the kernel makes huge where it can. */
static void take_memory(struct bench *b)
{
	long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
	uint8_t *p;

	b->bytes = ALIGN_UP(CLAMP((size_t)MAX(l3, 0L) * 4, BYTES_LEAST, BYTES_MOST), 2 * HUGE_PAGE);
	p = mmap(NULL, b->bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		no_memory();
	b->weights = (uint8_t *)ALIGN_UP((uintptr_t)p, (uintptr_t)HUGE_PAGE);
	(void)madvise(b->weights, b->bytes, MADV_HUGEPAGE);
	memset(b->weights, 1, b->bytes);
	b->x = random_floats(ROW * PREFILL_COLS);
	/* Rows of the smallest type there is, two bits an element. */
	b->y = malloc(MAX(b->bytes / (ROW / 4), (size_t)PREFILL_ROWS * PREFILL_COLS) * sizeof(*b->y));
	b->act = malloc(ROW * sizeof(float) * PREFILL_COLS);
	if (!b->y || !b->act)
		no_memory();
}

static int parse(int argc, char **argv, struct bench *b)
{
	static const struct option options[] = {
		{ "json", no_argument, NULL, 'j' },
		{ "memory", no_argument, NULL, 'm' },
		{},
	};
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
		switch (c) {
		case 'j': b->json = true; break;
		case 'm': b->memory_only = true; break;
		default: return -EINVAL;
		}
	}
	return optind == argc ? 0 : -EINVAL;
}

int main(int argc, char **argv)
{
	struct bench b = {};
	json_auto_t *o = json_object();

	if (parse(argc, argv, &b) < 0) {
		fprintf(stderr,
			"usage: bench-kernels [--json] [--memory]\n--memory: only what memory streams\n");
		return 2;
	}
	b.n_threads = sysconf(_SC_NPROCESSORS_ONLN) > 1 ? 2 : 1;
	take_memory(&b);
	bench_memory(&b);
	if (!b.memory_only) {
		json_object_set_new(o, "products", bench_products(&b));
		json_object_set_new(o, "layers", bench_all_layers(&b));
	}
	json_object_set_new(o, "streaming", memory_json(&b));
	if (b.json && json_dumpf(o, stdout, JSON_REAL_PRECISION(5)) < 0)
		no_memory();
	if (b.json)
		putchar('\n');
	return 0;
}
