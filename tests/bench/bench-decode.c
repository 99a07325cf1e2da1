/* SPDX-License-Identifier: MIT */
/*
 * bench-decode: prompt and decode speed of the engine's graph, with the experts where it is told, as one JSON object.
 *
 * The engine without sessions, sampling and sockets: random tokens, so that nothing depends on what a model without training would say.
 * One thread does everything, as the daemon's engine does (with --feed also the loop's part of it). Used by `make bench`, `make profile` and `make bench-residency` (cpu.py, profile.py, residency.py; the last
 * runs it inside a memory control group).
 */
#include "daemon/engine/graph.h"
#include "daemon/model/model.h"
#include "daemon/residency/memory.h"
#include "daemon/residency/residency.h"
#include "kernels/cpu/tune.h"

#include <getopt.h>
#include <inttypes.h>

struct options {
	const char *model, *feed;
	enum residency_tier tier;
	enum evict_policy policy;
	uint64_t budget;
	size_t prefill, batch, warm, decode, pairs;
	unsigned threads;
	int prefetch;
	bool latency, fill, rehearse, tune;
};

static int usage(void)
{
	fprintf(stderr,
		"usage: bench-decode -m MODEL [--tier auto|mapped|arena] [--budget BYTES] [--policy P] [--prefill N] [--batch N] [--warm N]\n"
		"       [--decode N] [--threads N] [--prefetch auto|off|on] [--feed SOCKET] [--latency] [--fill] [--pairs N]\n"
		"       [--rehearse] [--tune]\n"
		"--fill: all blocks that have room come in first. --rehearse: everything is done twice, and the second time counts.\n"
		"--tune: the tiles of products are measured, as the service does when it starts for the first time. --pairs: the tokens are decoded in N pairs of runs, one of each\n"
		"pair without the tracer of --feed; tracer_ratios are without / with.\n");
	return 2;
}

static uint32_t next_random(uint64_t *s)
{
	*s = *s * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t)(*s >> 33);
}

/* After the tracer came or went. */
#define SETTLE_TOK 4
#define MAX_PAIRS  1000

struct bench {
	struct options o;
	struct model *m;
	struct residency *r;
	struct backend *b;
	struct kv_arena *a;
	struct state *s;
	struct feed *feed;
	struct residency_shared shared;
	float *logits;
	uint64_t seed;
	/* Every block that decoding wanted, in order. */
	uint32_t *trace;
	size_t n_trace, trace_max;
	/* Of each pair of runs: time with the tracer / without. */
	double *ratios;
};

static void note_trace(struct bench *x)
{
	const uint32_t *counts, *experts;
	uint32_t n_layers, n_seen = 0;
	struct residency_layer_info l;

	if (!residency_recorded(x->r, &n_layers, &counts, &experts))
		return;
	for (uint32_t i = 0; i < n_layers; i++) {
		residency_get_layer(x->r, i, &l);
		for (uint32_t k = 0; k < counts[i] && x->n_trace < x->trace_max; k++)
			x->trace[x->n_trace++] =
				x->m->catalog->layers[l.layer].first_block + experts[n_seen + k];
		n_seen += counts[i];
	}
}

static int step(struct bench *x, size_t n, bool want)
{
	int32_t ids[4096];
	struct graph_seq q = { .state = x->s,
			       .tokens = ids,
			       .n_tok = n,
			       .want = want ? GRAPH_WANT_LAST : GRAPH_WANT_NONE };
	int r;

	for (size_t i = 0; i < n; i++)
		ids[i] = (int32_t)(next_random(&x->seed) % x->m->n_vocab);
	residency_record(x->r, n == 1);
	residency_step_begin(x->r, n, NULL);
	r = graph_forward(x->m, x->b, x->a, &q, 1, NULL, x->logits);
	residency_step_end(x->r);
	if (r == 0 && n == 1)
		note_trace(x);
	return r;
}

/* Bytes of the blocks that were missed. */
static uint64_t missed_bytes(const struct bench *x)
{
	struct residency_layer_info l;
	uint64_t sum = 0;

	for (uint32_t i = 0; i < residency_n_layers(x->r); i++) {
		residency_get_layer(x->r, i, &l);
		sum += l.misses * l.block_bytes;
	}
	return sum;
}

/* What the kernel has fetched for this process, whoever asked for it: 0 where it does not say. */
static uint64_t disk_bytes(void)
{
	_cleanup_(fclosep) FILE *f = fopen("/proc/self/io", "re");
	char line[128];
	uint64_t bytes = 0;

	while (f && fgets(line, sizeof(line), f))
		(void)sscanf(line, "read_bytes: %" SCNu64, &bytes);
	return bytes;
}

/* The most that any layer's reads of a chunk were, per block that the chunk wanted. */
static double prefill(struct bench *x, double *ret_reads_max)
{
	struct residency_stats before, after;
	uint64_t begun = now_us();

	*ret_reads_max = 0;
	for (size_t done = 0; done < x->o.prefill;) {
		size_t n = MIN(x->o.batch, x->o.prefill - done);
		uint64_t wanted;

		residency_get_stats(x->r, &before);
		if (step(x, n, done + n == x->o.prefill) < 0)
			return 0;
		residency_get_stats(x->r, &after);
		wanted = after.hits + after.misses - before.hits - before.misses;
		if (wanted > 0)
			*ret_reads_max = MAX(*ret_reads_max,
					     (double)(after.io.blocks_read - before.io.blocks_read) /
						     (double)wanted);
		done += n;
	}
	return x->o.prefill > 0 ? (double)x->o.prefill * 1e6 / (double)(now_us() - begun) : 0;
}

/* As if every block had been used once before. */
static int fill(struct bench *x)
{
	uint32_t n = x->m->catalog->n_blocks;
	_cleanup_(freep) uint16_t *heat = malloc((n + 1) * sizeof(*heat));

	if (!residency_managed(x->r))
		return host_load_all(x->m->catalog, NULL);
	if (!heat)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++)
		heat[i] = 1;
	residency_warm(x->r, heat);
	while (residency_pump(x->r, true))
		;
	return 0;
}

static int decode(struct bench *x, size_t n, uint64_t *ret_us)
{
	uint64_t begun = now_us();

	for (size_t i = 0; i < n; i++)
		if (step(x, 1, true) < 0)
			return -EIO;
	*ret_us = MAX(now_us() - begun, UINT64_C(1));
	return 0;
}

static int attach(struct bench *x)
{
	int r = feed_new(NULL, x->o.feed, x->m->catalog, NULL, NULL, &x->feed);

	if (r < 0)
		return r;
	residency_set_feed(x->r, x->feed);
	if (x->o.latency)
		(void)feed_measure_latency(x->feed, true);
	return 0;
}

static void detach(struct bench *x)
{
	residency_set_feed(x->r, NULL);
	x->feed = feed_free(x->feed);
}

/* One process and one state of everything but the tracer; which of a pair comes first alternates. */
static int decode_pairs(struct bench *x)
{
	size_t n = MAX(x->o.decode / (2 * x->o.pairs), (size_t)1);
	int r = 0;

	x->ratios = calloc(x->o.pairs, sizeof(*x->ratios));
	if (!x->ratios)
		return -ENOMEM;

	for (size_t i = 0; r == 0 && i < x->o.pairs; i++) {
		uint64_t us[2], settled;

		for (size_t k = 0; r == 0 && k < 2; k++) {
			bool with = (i + k) % 2 == 0;

			detach(x);
			if (with)
				r = attach(x);
			/* Seeding is not decoding. */
			if (r == 0)
				r = decode(x, SETTLE_TOK, &settled);
			if (r == 0)
				r = decode(x, n, &us[with]);
		}
		if (r == 0)
			x->ratios[i] = (double)us[true] / (double)us[false];
	}
	if (r < 0)
		return r;
	/* For the report: is it the tracer that was compared? */
	detach(x);
	return attach(x);
}

/* What is done for the first time waits for pages of the model, and of scratch. */
static int rehearse(struct bench *x)
{
	uint64_t us;
	double reads_max;
	int r;

	(void)prefill(x, &reads_max);
	r = decode(x, x->o.warm + x->o.decode, &us);
	state_reset(x->s, x->a);
	x->n_trace = 0;
	return r;
}

static double percent(uint64_t hits, uint64_t all)
{
	return all > 0 ? 100 * (double)hits / (double)all : 0;
}

static int run(struct bench *x)
{
	struct residency_stats s0, s1;
	size_t from, belady = 0;
	uint64_t us, missed0, faults0, disk0, disk1, n_all;
	uint32_t capacity;
	uint64_t window[4]; /* when prefill and decoding began and ended */
	double prefill_speed, reads_max;
	int r = x->o.fill ? fill(x) : 0;

	if (r == 0 && x->o.rehearse)
		r = rehearse(x);
	if (r < 0)
		return r;
	window[0] = now_us();
	prefill_speed = prefill(x, &reads_max);
	window[1] = now_us();
	r = decode(x, x->o.warm, &us);
	if (r < 0)
		return r;
	residency_get_stats(x->r, &s0);
	from = x->n_trace;
	missed0 = missed_bytes(x);
	faults0 = backend_cpu_major_faults(x->b);
	disk0 = disk_bytes();
	window[2] = now_us();
	r = x->o.pairs > 0 ? decode_pairs(x) : decode(x, x->o.decode, &us);
	window[3] = now_us();
	if (r < 0)
		return r;
	residency_get_stats(x->r, &s1);
	disk1 = disk_bytes();
	n_all = s1.hits + s1.misses - s0.hits - s0.misses;
	capacity = s1.n_host;
	if (x->n_trace > 0 && capacity > 0)
		(void)evict_belady(x->trace, x->n_trace, x->m->catalog->n_blocks, capacity, from,
				   &belady);
	printf("{\"tier\": \"%s\", \"method\": \"%s\", \"isa\": \"%s\", \"decode_tok_s\": %.3f, \"prefill_tok_s\": %.3f, "
	       "\"prefill_reads_max\": %.4f, \"hit_percent\": %.3f, \"belady_percent\": %.3f, \"n_host\": %u, \"n_blocks\": %u, "
	       "\"bytes_read\": %" PRIu64 ", \"missed_bytes\": %" PRIu64 ", \"blocks_read\": %" PRIu64
	       ", \"stall_us_per_token\": %.1f, \"compute_faults_per_token\": %.3f, \"left_pages\": %" PRIu64
	       ", \"bypassed\": %" PRIu64 ", \"kernel_took\": %" PRIu64 ", \"doubled\": %" PRIu64
	       ", \"prefetch_used\": %" PRIu64 ", \"prefetch_wasted\": %" PRIu64
	       ", \"budget\": %" PRIu64 ", \"fixed\": %" PRIu64 ", \"trunk\": %" PRIu64
	       ", \"block_bytes\": %" PRIu64 ", \"disk_bytes\": %" PRIu64
	       ", \"feed\": \"%s\", \"prefill_window_us\": [%" PRIu64 ", %" PRIu64
	       "], \"decode_window_us\": [%" PRIu64 ", %" PRIu64 "], \"tracer_ratios\": [",
	       residency_tier_to_string(s1.tier), s1.method ? s1.method : "none", backend_cpu_isa(x->b),
	       x->o.pairs > 0 ? 0 : (double)x->o.decode * 1e6 / (double)us, prefill_speed,
	       reads_max, percent(s1.hits - s0.hits, n_all), percent(belady, x->n_trace - from),
	       s1.n_host, s1.n_blocks, s1.io.bytes_read - s0.io.bytes_read,
	       missed_bytes(x) - missed0, s1.io.blocks_read - s0.io.blocks_read,
	       (double)(s1.stall_us - s0.stall_us) / (double)MAX(x->o.decode, (size_t)1),
	       (double)(backend_cpu_major_faults(x->b) - faults0) / (double)MAX(x->o.decode, (size_t)1),
	       s1.io.left_pages, s1.bypassed - s0.bypassed, s1.kernel_took - s0.kernel_took,
	       s1.doubled, s1.prefetch_used - s0.prefetch_used, s1.prefetch_wasted - s0.prefetch_wasted,
	       s1.budget_bytes, s1.fixed_bytes, s1.trunk_bytes, s1.block_bytes, disk1 - disk0,
	       x->feed ? feed_source_to_string(feed_source(x->feed)) : "none", window[0], window[1],
	       window[2], window[3]);
	for (size_t i = 0; i < x->o.pairs; i++)
		printf("%s%.4f", i > 0 ? ", " : "", x->ratios[i]);
	puts("]}");
	return 0;
}

static int setup(struct bench *x, char **ret_reason, char **ret_error)
{
	struct residency_config c = { .tier = x->o.tier,
				      .policy = x->o.policy,
				      .budget_bytes = x->o.budget,
				      .prefetch = x->o.prefetch };
	uint64_t tok, kv, held = 0;
	_cleanup_(memory_closep) struct memory *memory = NULL;
	struct cpu_tiles tiles = {};
	size_t scratch;
	int r = model_load(x->o.model, &x->m, ret_error);

	if (r < 0)
		return r;
	scratch = graph_scratch_bytes(x->m, x->o.batch);
	tok = (uint64_t)x->m->kv.n_layer * x->m->kv.n_head * (x->m->kv.k_dim + x->m->kv.v_dim) * 2;
	kv = (x->o.prefill + x->o.warm + x->o.decode + 2 * x->o.pairs * (SETTLE_TOK + 1) + 64) * tok +
	     (1 << 20);
	x->logits = malloc(x->m->n_vocab * sizeof(float));
	x->trace_max = (x->o.warm + x->o.decode + 2 * x->o.pairs * (SETTLE_TOK + 1)) *
		       x->m->n_layer * MAX(x->m->n_expert_used, 1u);
	x->trace = malloc((x->trace_max + 1) * sizeof(*x->trace));
	if (!x->logits || !x->trace)
		return -ENOMEM;
	/* What the process holds already, the vocabulary above all. */
	if (memory_open("", &memory) == 0)
		held = memory_anonymous(memory);
	r = residency_new(x->m, &c, held + scratch + x->m->n_vocab * sizeof(float),
			  kv + x->m->recurrent_floats * sizeof(float), &x->shared, NULL, &x->r,
			  ret_reason, ret_error);
	if (r == 0 && x->o.tune)
		r = tune_tiles(cpu_kernels_choose(NULL), NULL, NULL, &tiles);
	if (r == 0)
		r = backend_cpu_new(x->o.threads, scratch, &tiles, &x->b);
	if (r == 0)
		r = kv_arena_new(&x->m->kv, true, kv, &x->a);
	if (r == 0)
		r = state_new(&x->s);
	if (r == 0)
		r = residency_charge(x->r, kv + x->m->recurrent_floats * sizeof(float));
	if (r == 0 && x->o.feed)
		r = attach(x);
	if (r == 0)
		x->b->ops->set_residency(x->b, x->r);
	return r;
}

static int parse(int argc, char **argv, struct options *o)
{
	static const struct option options[] = {
		{ "tier", required_argument, NULL, 't' },
		{ "budget", required_argument, NULL, 'B' },
		{ "policy", required_argument, NULL, 'P' },
		{ "prefill", required_argument, NULL, 'p' },
		{ "batch", required_argument, NULL, 'b' },
		{ "warm", required_argument, NULL, 'w' },
		{ "decode", required_argument, NULL, 'd' },
		{ "threads", required_argument, NULL, 'n' },
		{ "prefetch", required_argument, NULL, 'f' },
		{ "feed", required_argument, NULL, 'F' },
		{ "latency", no_argument, NULL, 'L' },
		{ "fill", no_argument, NULL, 'l' },
		{ "pairs", required_argument, NULL, 'A' },
		{ "rehearse", no_argument, NULL, 'R' },
		{ "tune", no_argument, NULL, 'T' },
		{},
	};
	int c;

	while ((c = getopt_long(argc, argv, "m:", options, NULL)) >= 0) {
		switch (c) {
		case 'm': o->model = optarg; break;
		case 't':
			o->tier = streq(optarg, "mapped")  ? RESIDENCY_MAPPED
				  : streq(optarg, "arena") ? RESIDENCY_ARENA
							   : RESIDENCY_AUTO;
			break;
		case 'B': o->budget = strtoull(optarg, NULL, 10); break;
		case 'P':
			if (evict_policy_from_string(optarg, &o->policy) < 0)
				return usage();
			break;
		case 'p': o->prefill = strtoul(optarg, NULL, 10); break;
		case 'b': o->batch = CLAMP(strtoul(optarg, NULL, 10), 1ul, 4096ul); break;
		case 'w': o->warm = strtoul(optarg, NULL, 10); break;
		case 'd': o->decode = strtoul(optarg, NULL, 10); break;
		case 'n':
			o->threads = (unsigned)CLAMP(strtoul(optarg, NULL, 10), 1ul, 256ul);
			break;
		case 'f': o->prefetch = streq(optarg, "auto") ? -1 : streq(optarg, "on"); break;
		case 'F': o->feed = optarg; break;
		case 'L': o->latency = true; break;
		case 'l': o->fill = true; break;
		case 'R': o->rehearse = true; break;
		case 'T': o->tune = true; break;
		case 'A': o->pairs = strtoul(optarg, NULL, 10); break;
		default: return usage();
		}
	}
	return o->model && optind == argc && (o->pairs == 0 || o->feed) && o->pairs <= MAX_PAIRS
		       ? 0
		       : usage();
}

int main(int argc, char **argv)
{
	struct bench x = { .o = { .batch = 512,
				  .warm = 32,
				  .decode = 64,
				  .threads = 2,
				  .policy = EVICT_LFU,
				  .prefetch = -1 },
			   .seed = 7 };
	_cleanup_(freep) char *reason = NULL, *error = NULL;
	int r = parse(argc, argv, &x.o);

	if (r != 0)
		return r;
	r = setup(&x, &reason, &error);
	if (reason)
		fprintf(stderr, "bench-decode: %s\n", reason);
	if (r == 0)
		r = run(&x);
	if (r < 0)
		fprintf(stderr, "bench-decode: %s\n", error ? error : strerror(-r));
	x.s = state_free(x.s, x.a);
	kv_arena_free(x.a);
	if (x.b)
		x.b->ops->free(x.b);
	residency_free(x.r);
	feed_free(x.feed);
	free(x.trace);
	free(x.ratios);
	free(x.logits);
	model_unref(x.m);
	return r < 0 ? 1 : 0;
}
