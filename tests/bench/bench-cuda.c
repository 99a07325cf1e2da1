/* SPDX-License-Identifier: MIT */
/*
 * bench-cuda.c: speed of the kernels on a card, as a table and as JSON: copies, decode products, prefill, a layer of experts, attention over
 * a long context, the delta rule, and copies beside computing.
 *
 * Owns nothing of the product, and checks no result but that it is written and finite: that is the unit tests'. The shapes are those of
 * Qwen3.5-35B-A3B. Kernels are timed by events around a recorded graph of many launches, each on other bytes, so that neither the way
 * through the driver nor the card's cache is what is measured; the best of several runs counts. All weights, keys and states are one pool of
 * bytes below 0x40: as any type that is here they are finite numbers, and what is read from them stays so.
 * On the emulator everything runs, at tiny sizes, and no figure means anything.
 */
#include "kernels/cuda/args.h"
#include "kernels/cuda/driver.h"

#include "kernels/cpu/cpu.h"

#include <getopt.h>
#include <jansson.h>
#include <math.h>

#define GOAL         0.8
#define LAUNCHES_MAX 512
#define ROWS_MAX     96
#define STAGING      ((size_t)32 << 20)
#define SKIPPED      77

/* What the bytes of weights a second are compared with. */
#define DEFINITION                                                                               \
	"the card's memory: bytes read plus bytes written a second by the faster of the copies " \
	"inside the card; share: bytes a kernel must read (and write, for a state) a second / that"

static const struct weight_type {
	enum quant_type type;
	const char *name;
} types[] = {
	{ QUANT_Q4_K, "q4_k" }, { QUANT_Q5_K, "q5_k" }, { QUANT_Q6_K, "q6_k" },
	{ QUANT_Q8_0, "q8_0" }, { QUANT_Q4_0, "q4_0" }, { QUANT_MXFP4, "mxfp4" },
	{ QUANT_F16, "f16" },   { QUANT_BF16, "bf16" }, { QUANT_F32, "f32" },
};

/* How much of everything. */
struct sizes {
	size_t pool, work, host;
	unsigned n_runs;
	struct shape {
		const char *what;
		uint32_t n, n_rows;
	} shapes[4]; /* the last is large enough for the gap between two launches not to matter */
	uint32_t prefill_cols, n_embd, n_ff, n_expert, n_used, n_kv;
	uint32_t n_head, n_head_kv, head_dim, n_state, delta_heads_k, delta_heads_v, delta_dim;
	uint32_t n_blocks; /* copied beside computing */
};

static const struct sizes real_sizes = {
	.pool = (size_t)640 << 20,
	.work = (size_t)64 << 20,
	.host = (size_t)256 << 20,
	.n_runs = 12,
	.shapes = { { "shared expert's up", 2048, 512 },
		    { "attn_qkv", 2048, 8192 },
		    { "ssm_out", 4096, 2048 },
		    { "output", 2048, 248320 } },
	.prefill_cols = 512,
	.n_embd = 2048,
	.n_ff = 512,
	.n_expert = 256,
	.n_used = 8,
	.n_kv = 32768,
	.n_head = 16,
	.n_head_kv = 2,
	.head_dim = 256,
	.n_state = 64,
	.delta_heads_k = 16,
	.delta_heads_v = 32,
	.delta_dim = 128,
	.n_blocks = 64,
};
static const struct sizes quick_sizes = {
	.pool = (size_t)2 << 20,
	.work = (size_t)4 << 20,
	.host = (size_t)1 << 20,
	.n_runs = 1,
	.shapes = { { "shared expert's up", 256, 8 },
		    { "attn_qkv", 256, 24 },
		    { "ssm_out", 512, 8 },
		    { "output", 256, 40 } },
	.prefill_cols = 65,
	.n_embd = 256,
	.n_ff = 256,
	.n_expert = 8,
	.n_used = 2,
	.n_kv = 512,
	.n_head = 4,
	.n_head_kv = 2,
	.head_dim = 64,
	.n_state = 2,
	.delta_heads_k = 1,
	.delta_heads_v = 2,
	.delta_dim = 32,
	.n_blocks = 2,
};

struct row {
	const char *group;
	char what[80];
	double us, bytes, flops;
	double share; /* of the card's memory; 0: is not measured by that */
};

struct bench {
	struct cuda_driver *gpu;
	struct sizes s;
	bool quick;
	struct cuda_stream *stream, *copies;
	struct cuda_event *begin, *end, *started, *copied;
	uint8_t *pool, *work, *host; /* work: what is not only read; host: page-locked */
	size_t used;                 /* of work */
	double memory;               /* bytes/us, see DEFINITION */
	struct row rows[ROWS_MAX];
	size_t n_rows;
	json_t *facts;
};

static void stop(const char *what, const char *why)
{
	fprintf(stderr, "bench-cuda: %s: %s\n", what, why);
	exit(1);
}

static void must(struct bench *b, int r)
{
	if (r < 0)
		stop(strerror(-r), cuda_error(b->gpu));
}

/* ---- the card ---- */

static void *take(struct bench *b, size_t bytes)
{
	void *p = b->work + b->used;

	b->used += ALIGN_UP(bytes, (size_t)256);
	if (b->used > b->s.work)
		stop("scratch", "too small");
	return p;
}

static void *put(struct bench *b, const void *x, size_t bytes)
{
	void *p = take(b, bytes);

	must(b, cuda_upload(b->gpu, p, x, bytes, NULL));
	return p;
}

/* Not-a-numbers until a kernel writes them. */
static float *result(struct bench *b, size_t n)
{
	float *p = take(b, n * sizeof(*p));

	must(b, cuda_fill(b->gpu, p, 0xff, n * sizeof(*p), NULL));
	return p;
}

static void check_written(struct bench *b, const char *what, const float *p, size_t n)
{
	_cleanup_(freep) float *x = malloc(n * sizeof(*x));

	if (!x)
		stop(what, strerror(ENOMEM));
	must(b, cuda_download(b->gpu, x, p, n * sizeof(*x), NULL));
	for (size_t i = 0; i < n; i++)
		if (!isfinite(x[i]))
			stop(what, "a result was not written, or is no number");
}

static void launch(struct bench *b, const char *name, struct cuda_grid grid, const void *args,
		   size_t bytes)
{
	struct cuda_function *function;

	must(b, cuda_function(b->gpu, name, &function));
	must(b, cuda_launch(b->gpu, function, grid, b->stream, args, bytes));
}

static unsigned blocks(size_t n, size_t each)
{
	return (unsigned)((n + each - 1) / each);
}

struct work {
	void (*submit)(struct bench *b, const void *arg);
	const void *arg;
	bool driver; /* through the driver each time, as copies between host and card must go */
};

static struct cuda_graph_exec *record(struct bench *b, const struct work *w)
{
	struct cuda_graph_exec *graph = NULL;

	if (w->driver || !cuda_has_graphs(b->gpu))
		return NULL;
	must(b, cuda_graph_begin(b->gpu, b->stream));
	w->submit(b, w->arg);
	must(b, cuda_graph_end(b->gpu, b->stream, &graph));
	return graph;
}

/* Microseconds of the fastest run; the first one is not counted. */
static double best_us(struct bench *b, const struct work *w)
{
	struct cuda_graph_exec *graph = record(b, w);
	uint64_t us, best = UINT64_MAX;

	for (unsigned i = 0; i <= b->s.n_runs; i++) {
		must(b, cuda_event_record(b->gpu, b->begin, b->stream));
		if (graph)
			must(b, cuda_graph_launch(b->gpu, graph, b->stream));
		else
			w->submit(b, w->arg);
		must(b, cuda_event_record(b->gpu, b->end, b->stream));
		must(b, cuda_event_synchronize(b->gpu, b->end));
		must(b, cuda_event_elapsed(b->gpu, b->begin, b->end, &us));
		if (i > 0)
			best = MIN(best, MAX(us, UINT64_C(1)));
	}
	if (graph)
		cuda_graph_free(b->gpu, graph);
	return (double)best;
}

static struct row *add_row(struct bench *b, const char *group, double us, double bytes, double flops)
{
	struct row *row = &b->rows[b->n_rows++];

	if (b->n_rows > ROWS_MAX)
		stop("table", "too small");
	*row = (struct row){ .group = group, .us = us, .bytes = bytes, .flops = flops };
	return row;
}

#define NAME(row, ...) snprintf((row)->what, sizeof((row)->what), __VA_ARGS__)

/* ---- copies ---- */

struct copy_work {
	enum { INSIDE, INSIDE_BLOCKS, TO_CARD, TO_HOST } kind;
	size_t bytes;
};

/* Half of the pool to the other half. */
static void submit_copy(struct bench *b, const void *arg)
{
	const struct copy_work *c = arg;
	struct cuda_copy_block a = { .bytes = c->bytes / CUDA_COPY_MAX, .n_copies = CUDA_COPY_MAX };
	uint8_t *to = b->pool + c->bytes;

	switch (c->kind) {
	case INSIDE: must(b, cuda_copy(b->gpu, to, b->pool, c->bytes, b->stream)); return;
	case TO_CARD: must(b, cuda_upload(b->gpu, b->pool, b->host, c->bytes, b->stream)); return;
	case TO_HOST: must(b, cuda_download(b->gpu, b->host, b->pool, c->bytes, b->stream)); return;
	case INSIDE_BLOCKS: break;
	}
	for (unsigned i = 0; i < CUDA_COPY_MAX; i++) {
		a.from[i] = b->pool + i * a.bytes;
		a.to[i] = to + i * a.bytes;
	}
	launch(b, "cuda_copy_block",
	       (struct cuda_grid){ .x = blocks(a.bytes, CUDA_THREADS * 16), .y = CUDA_COPY_MAX },
	       &a, sizeof(a));
}

static double bench_copy(struct bench *b, const char *what, struct copy_work c)
{
	bool inside = c.kind == INSIDE || c.kind == INSIDE_BLOCKS;
	double us = best_us(b, &(struct work){ submit_copy, &c, !inside });
	double bytes = (double)c.bytes * (inside ? 2 : 1);

	NAME(add_row(b, "copy", us, bytes, 0), "%s", what);
	return bytes / us;
}

static void bench_copies(struct bench *b)
{
	size_t half = b->s.pool / 2;

	b->memory = bench_copy(b, "inside, by the driver: read + written",
			       (struct copy_work){ INSIDE, half });
	b->memory = MAX(b->memory, bench_copy(b, "inside, cuda_copy_block: read + written",
					      (struct copy_work){ INSIDE_BLOCKS, half }));
	bench_copy(b, "host to card, page-locked", (struct copy_work){ TO_CARD, b->s.host });
	bench_copy(b, "card to host, page-locked", (struct copy_work){ TO_HOST, b->s.host });
}

/* ---- the way through the driver ---- */

static void submit_nothing(struct bench *b, const void *arg)
{
	const struct cuda_flat *a = arg;

	for (unsigned i = 0; i < LAUNCHES_MAX; i++)
		launch(b, "cuda_add", (struct cuda_grid){ .x = 1 }, a, sizeof(*a));
}

/* What short kernels cost beside their bytes. */
static void bench_launches(struct bench *b)
{
	float *x = take(b, sizeof(*x));
	struct cuda_flat a = { .a = x, .y = x, .n = 1 };
	double us;

	us = best_us(b, &(struct work){ submit_nothing, &a, true });
	NAME(add_row(b, "launch", us / LAUNCHES_MAX, 0, 0), "a kernel of one number, each by a call");
	us = best_us(b, &(struct work){ submit_nothing, &a, false });
	NAME(add_row(b, "launch", us / LAUNCHES_MAX, 0, 0), "the same in a graph");
}

/* ---- products ---- */

struct product_work {
	const char *kernel;
	struct cuda_grid grid;
	struct cuda_matmul args;
	size_t bytes, n_launches;
};

static const void *weights(const struct bench *b, size_t i, size_t bytes)
{
	bytes = ALIGN_UP(bytes, (size_t)256);
	return b->pool + i % MAX(b->s.pool / bytes, (size_t)1) * bytes;
}

static void submit_product(struct bench *b, const void *arg)
{
	const struct product_work *p = arg;

	for (size_t i = 0; i < p->n_launches; i++) {
		struct cuda_matmul a = p->args;

		a.w = weights(b, i, p->bytes);
		launch(b, p->kernel, p->grid, &a, sizeof(a));
	}
}

/* Microseconds of one. */
static double bench_product(struct bench *b, const struct weight_type *t, const struct shape *s,
			    uint32_t n_cols, size_t *ret_bytes, uint32_t *ret_rows)
{
	enum quant_type form = cpu_act_type(t->type);
	size_t stride = quant_row_bytes(t->type, s->n),
	       n_rows = MIN((size_t)s->n_rows, b->s.pool / stride);
	bool tiled = n_cols > CUDA_COLS;
	struct product_work p = { .bytes = n_rows * stride };
	double us;
	char name[64];

	b->used = 0;
	snprintf(name, sizeof(name), "cuda_matmul_%s%s", tiled ? "tiled_" : "", t->name);
	p.kernel = name;
	p.grid = tiled ? (struct cuda_grid){ .x = blocks(n_rows, CUDA_TILE_ROWS),
					     .y = blocks(n_cols, CUDA_TILE_COLS) }
		       : (struct cuda_grid){ .x = blocks(n_rows, CUDA_ROWS) };
	p.args = (struct cuda_matmul){ .act = b->pool,
				       .y = result(b, n_rows * n_cols),
				       .w_stride = stride,
				       .act_stride = quant_row_bytes(form, s->n),
				       .y_stride = n_rows,
				       .n = s->n,
				       .n_rows = (uint32_t)n_rows,
				       .n_cols = n_cols };
	p.n_launches = CLAMP(b->s.pool / p.bytes, (size_t)4, (size_t)(tiled ? 16 : LAUNCHES_MAX));
	if (b->quick)
		p.n_launches = 1;
	us = best_us(b, &(struct work){ submit_product, &p, false });
	check_written(b, name, p.args.y, n_rows * n_cols);
	*ret_bytes = p.bytes;
	*ret_rows = (uint32_t)n_rows;
	return us / (double)p.n_launches;
}

static void bench_products(struct bench *b)
{
	double least = INFINITY;
	uint32_t n_rows;
	size_t bytes;

	for (size_t i = 0; i < ARRAY_SIZE(types); i++)
		for (size_t k = 0; k < ARRAY_SIZE(b->s.shapes); k++) {
			const struct shape *s = &b->s.shapes[k];
			double us = bench_product(b, &types[i], s, 1, &bytes, &n_rows);
			struct row *row = add_row(b, "decode", us, (double)bytes, 0);

			NAME(row, "%-5s %u -> %u, %s", types[i].name, s->n, n_rows, s->what);
			row->share = row->bytes / us / b->memory;
			if (k + 1 == ARRAY_SIZE(b->s.shapes))
				least = MIN(least, row->share);
		}
	json_object_set_new(b->facts, "decode_share_least", json_real(least));

	for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
		const struct shape *s = &b->s.shapes[1];
		double us = bench_product(b, &types[i], s, b->s.prefill_cols, &bytes, &n_rows);

		NAME(add_row(b, "prefill", us, 0, 2.0 * s->n * n_rows * b->s.prefill_cols),
		     "%-5s %u -> %u, %u columns", types[i].name, s->n, n_rows, b->s.prefill_cols);
	}
}

/* ---- a layer of experts ---- */

/* Layers that take turns, each with a choice of its own. */
#define LAYERS 32

struct moe_work {
	char up[32], down[32];
	struct cuda_grid up_grid, down_grid;
	struct cuda_moe args;
};

static void submit_moe(struct bench *b, const void *arg)
{
	const struct moe_work *m = arg;

	for (uint32_t i = 0; i < LAYERS; i++) {
		struct cuda_moe a = m->args;

		a.expert += i * a.n_used;
		launch(b, m->up, m->up_grid, &a, sizeof(a));
		launch(b, m->down, m->down_grid, &a, sizeof(a));
	}
}

/* Different experts in each choice. */
static uint32_t *choices(struct bench *b, uint32_t *choice)
{
	uint64_t seed = 1;

	for (uint32_t i = 0; i < LAYERS * b->s.n_used; i++) {
		uint32_t from = i - i % b->s.n_used, k;

		do {
			seed = seed * 6364136223846793005u + 1442695040888963407u;
			choice[i] = (uint32_t)(seed >> 33) % b->s.n_expert;
			for (k = from; k < i && choice[k] != choice[i]; k++)
				;
		} while (k < i);
	}
	return put(b, choice, LAYERS * b->s.n_used * sizeof(*choice));
}

static size_t block_bytes(const struct sizes *s, enum quant_type up, enum quant_type down)
{
	return ALIGN_UP(2 * s->n_ff * quant_row_bytes(up, s->n_embd) +
				s->n_embd * quant_row_bytes(down, s->n_ff),
			(size_t)256);
}

static void bench_moe(struct bench *b, const struct weight_type *up, const struct weight_type *down)
{
	const struct sizes *s = &b->s;
	size_t gate = s->n_ff * quant_row_bytes(up->type, s->n_embd),
	       block = block_bytes(s, up->type, down->type);
	size_t act_bytes = quant_row_bytes(cpu_act_type(down->type), s->n_ff);
	struct cuda_expert experts[256];
	uint32_t choice[LAYERS * 8];
	float weight[8];
	struct moe_work m = { .up_grid = { .x = blocks(s->n_ff, CUDA_ROWS), .y = s->n_used },
			      .down_grid = { .x = blocks(s->n_embd, CUDA_ROWS),
					     .y = 1,
					     .shared_bytes = (unsigned)(s->n_used * act_bytes) } };
	struct row *row;
	double us;

	b->used = 0;
	for (uint32_t i = 0; i < s->n_expert; i++) {
		const uint8_t *p = weights(b, i, block);

		experts[i] = (struct cuda_expert){ p, p + gate, p + 2 * gate };
	}
	for (uint32_t i = 0; i < s->n_used; i++)
		weight[i] = 1.0f / (float)s->n_used;
	snprintf(m.up, sizeof(m.up), "cuda_moe_up_%s", up->name);
	snprintf(m.down, sizeof(m.down), "cuda_moe_down_%s", down->name);
	m.args = (struct cuda_moe){
		.experts = put(b, experts, s->n_expert * sizeof(*experts)),
		.expert = choices(b, choice),
		.weight = put(b, weight, s->n_used * sizeof(*weight)),
		.act = b->pool,
		.hidden = result(b, s->n_used * s->n_ff),
		.out = take(b, s->n_embd * sizeof(float)),
		.act_stride = quant_row_bytes(cpu_act_type(up->type), s->n_embd),
		.up_stride = quant_row_bytes(up->type, s->n_embd),
		.down_stride = quant_row_bytes(down->type, s->n_ff),
		.n_tok = 1,
		.n_used = s->n_used,
		.n_embd = s->n_embd,
		.n_ff = s->n_ff,
		.hidden_act_bytes = (uint32_t)act_bytes,
		.hidden_rows = s->n_used,
	};
	must(b, cuda_fill(b->gpu, m.args.out, 0, s->n_embd * sizeof(float), NULL));
	us = best_us(b, &(struct work){ submit_moe, &m, false }) / LAYERS;
	check_written(b, m.up, m.args.hidden, s->n_used * s->n_ff);
	check_written(b, m.down, m.args.out, s->n_embd);
	row = add_row(b, "experts", us, (double)(s->n_used * block), 0);
	row->share = row->bytes / us / b->memory;
	NAME(row, "%u of %u, up %s, down %s: 2 launches", s->n_used, s->n_expert, up->name, down->name);
}

/* ---- attention and the delta rule ---- */

#define PAGE_TOK 32

struct attention_work {
	struct cuda_attention args;
	uint32_t n_layer;
};

static void submit_attention(struct bench *b, const void *arg)
{
	const struct attention_work *w = arg;

	for (uint32_t i = 0; i < w->n_layer; i++) {
		struct cuda_attention a = w->args;

		a.layer_offset = i * a.page_bytes / w->n_layer;
		launch(b, "cuda_attention_rows",
		       (struct cuda_grid){ .x = a.n_head_kv, .y = 1, .z = a.n_split }, &a, sizeof(a));
		launch(b, "cuda_attention_join", (struct cuda_grid){ .x = a.n_head, .y = 1 }, &a,
		       sizeof(a));
	}
}

static void bench_attention(struct bench *b)
{
	const struct sizes *s = &b->s;
	uint32_t n_pages = s->n_kv / PAGE_TOK, zero = 0;
	uint64_t head = (uint64_t)PAGE_TOK * s->head_dim * sizeof(uint16_t),
		 layer = 2 * head * s->n_head_kv;
	_cleanup_(freep) uint32_t *pages = malloc(n_pages * sizeof(*pages));
	struct cuda_span span = { .n_tok = 1, .pos = s->n_kv - 1, .n_pages = n_pages };
	struct attention_work w = { .n_layer = (uint32_t)CLAMP(s->pool / (layer * n_pages),
							       UINT64_C(1), UINT64_C(4)) };
	struct row *row;
	double us;

	if (!pages)
		stop("attention", strerror(ENOMEM));
	b->used = 0;
	if (layer * n_pages > s->pool)
		return;
	for (uint32_t i = 0; i < n_pages; i++)
		pages[i] = i;
	span.pages = put(b, pages, n_pages * sizeof(*pages));
	w.args = (struct cuda_attention){
		.base = b->pool,
		.spans = put(b, &span, sizeof(span)),
		.span_of_row = put(b, &zero, sizeof(zero)),
		.q = (const float *)(const void *)b->pool,
		.out = result(b, s->n_head * s->head_dim),
		.page_bytes = layer * w.n_layer,
		.k_bytes = head,
		.v_bytes = head,
		.page_tok = PAGE_TOK,
		.n_head = s->n_head,
		.n_head_kv = s->n_head_kv,
		.k_dim = s->head_dim,
		.v_dim = s->head_dim,
		.n_rows = 1,
		.f16 = 1,
		.scale = 0.0625f,
		.n_split = 32,
	};
	w.args.partial = result(b, (size_t)s->n_head * w.args.n_split * (s->head_dim + 2));
	us = best_us(b, &(struct work){ submit_attention, &w, false }) / w.n_layer;
	check_written(b, "attention", w.args.out, s->n_head * s->head_dim);
	row = add_row(b, "attention", us, (double)(layer * n_pages), 0);
	row->share = row->bytes / us / b->memory;
	NAME(row, "decode at %u tokens, f16, %u heads on %u of %u", s->n_kv, s->n_head,
	     s->n_head_kv, s->head_dim);
}

struct delta_work {
	struct cuda_delta_rule args;
	uint32_t n_launches;
};

static void submit_delta(struct bench *b, const void *arg)
{
	const struct delta_work *w = arg;
	unsigned threads = ALIGN_UP(w->args.v_dim, (uint32_t)CUDA_WARP);

	for (uint32_t i = 0; i < w->n_launches; i++) {
		struct cuda_delta_rule a = w->args;

		a.spans += i;
		launch(b, "cuda_delta_rule",
		       (struct cuda_grid){ .x = a.n_head_v,
					   .y = 1,
					   .z = blocks(a.v_dim * 4, threads),
					   .threads = threads },
		       &a, sizeof(a));
	}
}

/* All zeros, so that the states, of which the pool is made, stay as they are. */
static void bench_delta(struct bench *b, uint32_t n_tok, uint32_t n_launches)
{
	const struct sizes *s = &b->s;
	uint32_t n_ch = (2 * s->delta_heads_k + s->delta_heads_v) * s->delta_dim,
		 n_out = s->delta_heads_v * s->delta_dim;
	size_t state = (size_t)s->delta_heads_v * s->delta_dim * s->delta_dim * sizeof(float);
	size_t gates = n_tok * s->delta_heads_v * sizeof(float), rows = n_tok * n_ch * sizeof(float);
	struct delta_work w = { .n_launches = n_launches };
	struct cuda_span spans[64];
	void *zeros;
	struct row *row;
	double us;

	b->used = 0;
	for (uint32_t i = 0; i < n_launches; i++)
		spans[i] = (struct cuda_span){ .n_tok = n_tok,
					       .recurrent = (float *)(uintptr_t)weights(b, i, state) };
	zeros = take(b, rows);
	must(b, cuda_fill(b->gpu, zeros, 0, rows, NULL));
	w.args = (struct cuda_delta_rule){
		.mixed = zeros,
		.g = zeros,
		.beta = (float *)((uint8_t *)zeros + gates),
		.out = result(b, n_tok * n_out),
		.spans = put(b, spans, n_launches * sizeof(*spans)),
		.n_ch = n_ch,
		.n_head_k = s->delta_heads_k,
		.n_head_v = s->delta_heads_v,
		.k_dim = s->delta_dim,
		.v_dim = s->delta_dim,
		.n_spans = 1,
	};
	us = best_us(b, &(struct work){ submit_delta, &w, false }) / n_launches;
	check_written(b, "delta rule", w.args.out, n_tok * n_out);
	row = add_row(b, "delta rule", us, n_tok == 1 ? 2 * (double)state : 0, 0);
	row->share = row->bytes / us / b->memory;
	NAME(row, "%u token%s, %u heads of %u", n_tok, n_tok == 1 ? "" : "s", s->delta_heads_v,
	     s->delta_dim);
}

/* ---- copies beside computing ---- */

struct overlap_work {
	const struct product_work *products;
	struct cuda_graph_exec *graph; /* of them */
	uint32_t n_products;           /* times all of them */
	uint32_t n_copies;
	size_t bytes; /* of each */
};

static void submit_overlap(struct bench *b, const void *arg)
{
	const struct overlap_work *w = arg;
	size_t ring = MIN(b->s.host, STAGING) / w->bytes;

	if (w->n_copies) {
		must(b, cuda_event_record(b->gpu, b->started, b->stream));
		must(b, cuda_stream_wait(b->gpu, b->copies, b->started));
		for (uint32_t i = 0; i < w->n_copies; i++)
			must(b, cuda_upload(b->gpu, (void *)(uintptr_t)weights(b, i, w->bytes),
					    b->host + i % ring * w->bytes, w->bytes, b->copies));
		must(b, cuda_event_record(b->gpu, b->copied, b->copies));
	}
	for (uint32_t i = 0; i < w->n_products; i++)
		if (w->graph)
			must(b, cuda_graph_launch(b->gpu, w->graph, b->stream));
		else
			submit_product(b, w->products);
	if (w->n_copies)
		must(b, cuda_stream_wait(b->gpu, b->stream, b->copied));
}

static double overlap_us(struct bench *b, struct overlap_work w, uint32_t n_products, uint32_t n_copies)
{
	w.n_products = n_products;
	w.n_copies = n_copies;
	return best_us(b, &(struct work){ submit_overlap, &w, true });
}

static void overlap(struct bench *b, const struct overlap_work *w, const char *key,
		    const char *what, uint32_t n_products)
{
	double copy = overlap_us(b, *w, 0, b->s.n_blocks), compute = overlap_us(b, *w, n_products, 0);
	double both = overlap_us(b, *w, n_products, b->s.n_blocks);
	double longer = MAX(copy, compute), hidden = (copy + compute - both) / MIN(copy, compute);

	NAME(add_row(b, "overlap", copy, (double)w->bytes * b->s.n_blocks, 0),
	     "%s: %u copies alone", what, b->s.n_blocks);
	NAME(add_row(b, "overlap", compute,
		     (double)n_products * (double)(w->products->bytes * w->products->n_launches), 0),
	     "%s: products alone", what);
	NAME(add_row(b, "overlap", both, 0, 0), "%s: both, %.2f of the longer", what, both / longer);
	json_object_set_new(b->facts, key,
			    json_pack("{s:f,s:f,s:f,s:f,s:f}", "copies_us", copy, "products_us",
				      compute, "both_us", both, "both_of_longer", both / longer,
				      "hidden_of_shorter", CLAMP(hidden, 0.0, 1.0)));
}

/*
 * A layer reads about 35 MB of Q4_K with all its experts: four products of attn_qkv. With 90 % of 8 experts found, a block is copied for every
 * 1.25 layers: 5 products.
 */
static void bench_overlap(struct bench *b)
{
	const struct shape *s = &b->s.shapes[1];
	size_t stride = quant_row_bytes(QUANT_Q4_K, s->n);
	struct product_work p = { .kernel = "cuda_matmul_q4_k",
				  .grid = { .x = blocks(s->n_rows, CUDA_ROWS) },
				  .bytes = s->n_rows * stride,
				  .n_launches = 5 };
	struct overlap_work w = { .products = &p, .bytes = block_bytes(&b->s, QUANT_Q4_K, QUANT_Q4_K) };
	double copy, compute;

	b->used = 0;
	p.args = (struct cuda_matmul){ .act = b->pool,
				       .y = result(b, s->n_rows),
				       .w_stride = stride,
				       .act_stride = quant_row_bytes(QUANT_Q8_K, s->n),
				       .y_stride = s->n_rows,
				       .n = s->n,
				       .n_rows = s->n_rows,
				       .n_cols = 1 };
	w.graph = record(b, &(struct work){ submit_product, &p, false });
	copy = overlap_us(b, w, 0, b->s.n_blocks);
	compute = overlap_us(b, w, b->s.n_blocks, 0) / b->s.n_blocks;
	overlap(b, &w, "overlap_even", "equally long",
		b->quick ? 1 : (uint32_t)CLAMP(copy / compute, 1.0, 10000.0));
	overlap(b, &w, "overlap_hit_90", "90 % hits", b->s.n_blocks);
	check_written(b, "overlap", p.args.y, s->n_rows);
	if (w.graph)
		cuda_graph_free(b->gpu, w.graph);
}

/* ---- all of it ---- */

/* Bytes below 0x40; the host's memory holds the first of them. */
static void fill_pool(struct bench *b)
{
	uint32_t seed = 1;

	for (size_t i = 0; i < b->s.host; i++) {
		seed = seed * 1664525u + 1013904223u;
		b->host[i] = (uint8_t)(seed >> 26);
	}
	for (size_t at = 0; at < b->s.pool; at += b->s.host)
		must(b, cuda_upload(b->gpu, b->pool + at, b->host, MIN(b->s.host, b->s.pool - at), NULL));
}

static void prepare(struct bench *b)
{
	uint64_t available, total;
	void *pool, *work, *host;

	b->s = b->quick ? quick_sizes : real_sizes;
	must(b, cuda_memory_info(b->gpu, &available, &total));
	if (available < b->s.pool + b->s.work)
		stop("memory", "less than 704 MiB of the card are free");
	must(b, cuda_alloc(b->gpu, b->s.pool, &pool));
	must(b, cuda_alloc(b->gpu, b->s.work, &work));
	must(b, cuda_host_alloc(b->gpu, b->s.host, &host));
	b->pool = pool;
	b->work = work;
	b->host = host;
	must(b, cuda_stream_new(b->gpu, &b->stream));
	must(b, cuda_stream_new(b->gpu, &b->copies));
	must(b, cuda_event_new(b->gpu, true, &b->begin));
	must(b, cuda_event_new(b->gpu, true, &b->end));
	must(b, cuda_event_new(b->gpu, false, &b->started));
	must(b, cuda_event_new(b->gpu, false, &b->copied));
	fill_pool(b);
}

static void bench_all(struct bench *b)
{
	bench_copies(b);
	bench_launches(b);
	bench_products(b);
	bench_moe(b, &types[0], &types[2]);
	bench_moe(b, &types[0], &types[0]);
	bench_attention(b);
	bench_delta(b, 1, b->s.n_state);
	bench_delta(b, b->s.prefill_cols, 1);
	bench_overlap(b);
}

#define NOTHING "EMULATED: no figure here means anything, only that everything ran"

static void print_number(int width, int digits, double x)
{
	if (x > 0)
		printf(" %*.*f", width, digits, x);
	else
		printf(" %*s", width, "-");
}

static void print_table(const struct bench *b)
{
	const struct cuda_info *info = cuda_info(b->gpu);

	printf("%s, compute capability %u.%u, %u multiprocessors, %.1f GiB, CUDA %d.%d, code: %s\n",
	       info->name, info->capability / 10, info->capability % 10, info->n_multiprocessors,
	       (double)info->total_bytes / (1 << 30), info->driver / 1000, info->driver % 1000 / 10,
	       cuda_code_path(b->gpu));
	if (info->emulator)
		puts(NOTHING);
	printf("%s\n%-11s %-58s %10s %9s %6s %8s\n", DEFINITION, "", "", "us", "GB/s", "share",
	       "TFLOP/s");
	for (size_t i = 0; i < b->n_rows; i++) {
		const struct row *r = &b->rows[i];

		printf("%-11s %-58s", r->group, r->what);
		print_number(10, 2, r->us);
		print_number(9, 1, r->bytes / r->us * 1e-3);
		print_number(6, 2, r->share);
		print_number(8, 2, r->flops / r->us * 1e-6);
		putchar('\n');
	}
	if (info->emulator)
		puts(NOTHING);
	else
		printf("least share of a decode product of many rows: %.2f (goal %.1f)\n",
		       json_real_value(json_object_get(b->facts, "decode_share_least")), GOAL);
}

static json_t *rows_json(const struct bench *b)
{
	json_t *rows = json_array();

	for (size_t i = 0; i < b->n_rows; i++) {
		const struct row *r = &b->rows[i];

		json_array_append_new(rows, json_pack("{s:s,s:s,s:f,s:f,s:f,s:f}", "group",
						      r->group, "what", r->what, "us", r->us,
						      "gb_s", r->bytes / r->us * 1e-3, "share",
						      r->share, "tflop_s", r->flops / r->us * 1e-6));
	}
	return rows;
}

static void write_json(struct bench *b, const char *path)
{
	const struct cuda_info *info = cuda_info(b->gpu);
	json_t *all = json_pack("{s:s,s:b,s:b,s:i,s:i,s:i,s:I,s:s,s:s,s:f,s:f,s:o,s:O}", "card",
				info->name, "emulator", info->emulator, "quick", b->quick,
				"capability", (int)info->capability, "multiprocessors",
				(int)info->n_multiprocessors, "driver", info->driver, "total_bytes",
				(json_int_t)info->total_bytes, "code", cuda_code_path(b->gpu),
				"definition", DEFINITION, "memory_gb_s", b->memory * 1e-3, "goal",
				GOAL, "rows", rows_json(b), "facts", b->facts);

	if (!all || json_dump_file(all, path, JSON_INDENT(1)) < 0)
		stop(path, "cannot be written");
	json_decref(all);
}

static int usage(void)
{
	fprintf(stderr,
		"usage: bench-cuda [--quick] [--json FILE]\n"
		"RESIDENTD_CUDA_LIBRARY names another library than libcuda.so.1. On the emulator --quick is implied.\n");
	return 2;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "quick", no_argument, NULL, 'q' },
		{ "json", required_argument, NULL, 'j' },
		{},
	};
	struct bench b = { .facts = json_object() };
	_cleanup_(freep) char *error = NULL;
	const char *json = NULL;
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0)
		switch (c) {
		case 'q': b.quick = true; break;
		case 'j': json = optarg; break;
		default: return usage();
		}
	if (optind != argc)
		return usage();
	if (cuda_open(NULL, 0, cuda_images, cuda_n_images, &b.gpu, &error) < 0) {
		fprintf(stderr, "bench-cuda: %s\n", error);
		return SKIPPED;
	}
	b.quick = b.quick || cuda_info(b.gpu)->emulator;
	prepare(&b);
	bench_all(&b);
	print_table(&b);
	if (json)
		write_json(&b, json);
	json_decref(b.facts);
	cuda_close(b.gpu);
	return 0;
}
