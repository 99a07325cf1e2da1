/* SPDX-License-Identifier: MIT */
/*
 * test-plan.c: plans against a second replay written here, which moves every block and every wait
 * one by one; the built-in model against a file of its tensors; made-up routing against recorded.
 */
#include "tests/test.h"

#include "daemon/residency/plan.h"
#include "tests/unit/gguf-build.h"

#include <math.h>

#define GIB ((uint64_t)1 << 30)

static uint64_t seed;

static uint32_t random_below(uint32_t n)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (uint32_t)((seed >> 33) % n);
}

static struct plan_machine usual_machine(void)
{
	return (struct plan_machine){
		.vram_bytes = 8 * GIB,
		.ram_bytes = 23 * GIB / 2,
		.vram_bps = 400e9,
		.pcie_bps = 12.6e9,
		.mem_bps = 40e9,
		.disk_bps = 3e9,
		.context = 32768,
	};
}

static struct plan_shape real_shape(void)
{
	struct plan_shape s;

	assert_int_equal(plan_shape_builtin("qwen35moe-35b-a3b-q4_k_m", &s), 0);
	return s;
}

/* 12 layers of two sizes, one with fewer experts than the others: 100 MB of blocks. */
static struct plan_shape small_shape(void)
{
	struct plan_shape s = { .n_layers = 12,
				.n_all_layers = 13,
				.n_used = 4,
				.n_expert_max = 64,
				.trunk_bytes = 20000000,
				.trunk_token_bytes = 20000100,
				.table_bytes = 5000000,
				.scratch_bytes = 1000000,
				.kv_known = true,
				.kv_token_bytes = 1000,
				.recurrent_bytes = 300000,
				.context_trained = 100000,
				.token_flops = 1e8 };

	s.layers = calloc(s.n_layers, sizeof(*s.layers));
	assert_non_null(s.layers);
	for (uint32_t l = 0; l < s.n_layers; l++) {
		s.layers[l] = (struct plan_layer){ l == 5 ? 40 : 64, l % 3 == 0 ? 150000 : 120000 };
		s.block_bytes += s.layers[l].n_expert * s.layers[l].block_bytes;
		s.block_bytes_max = MAX(s.block_bytes_max, s.layers[l].block_bytes);
	}
	return s;
}

static struct trace make_trace(const struct plan_shape *s, size_t n_steps)
{
	struct trace t;

	assert_int_equal(plan_make_trace(s, n_steps, &t, NULL), 0);
	return t;
}

static struct plan predict(const struct plan_shape *s, const struct plan_machine *m,
			   const struct trace *t)
{
	_cleanup_(freep) char *error = NULL;
	struct plan p;

	if (plan_predict(s, m, t, &p, &error) < 0)
		fail_msg("%s", error);
	return p;
}

/* ---- shapes ---- */

struct file {
	struct gguf_build b;
	uint64_t at; /* the next tensor's offset */
	char path[300];
	struct gguf *g;
	struct catalog *c;
};

static uint64_t row_bytes(uint32_t type, uint64_t n)
{
	return type == QUANT_F32 ? 4 * n : type == QUANT_Q4_K ? n / 256 * 144 : n / 256 * 210;
}

/* layer < 0: of none. ne1, ne2 0: fewer dimensions. */
static void tensor(struct file *f, int layer, const char *name, uint32_t type, uint64_t ne0,
		   uint64_t ne1, uint64_t ne2)
{
	const uint64_t ne[] = { ne0, ne1, ne2 };
	char full[64];

	snprintf(full, sizeof(full), layer < 0 ? "%s" : "blk.%2$d.%1$s", name, layer);
	gguf_build_info(&f->b, full, type, ne2 ? 3 : ne1 ? 2 : 1, ne, f->at);
	f->at += row_bytes(type, ne0) * MAX(ne1, UINT64_C(1)) * MAX(ne2, UINT64_C(1));
	f->at = ALIGN_UP(f->at, (uint64_t)32);
}

static void open_file(struct file *f)
{
	_cleanup_(freep) char *error = NULL;
	_cleanup_(freep) void *head = NULL;
	_cleanup_(fclosep) FILE *out = NULL;
	const char *tmp = getenv("TMPDIR");
	size_t bytes;
	int fd;

	/* One byte, for the header to be aligned; the rest is a hole. */
	gguf_put(&f->b.data, "", 1);
	head = gguf_build_done(&f->b, &bytes);
	snprintf(f->path, sizeof(f->path), "%s/test-plan-XXXXXX", tmp ? tmp : P_tmpdir);
	fd = mkstemp(f->path);
	assert_true(fd >= 0);
	out = fdopen(fd, "w");
	assert_true(out && fwrite(head, 1, bytes, out) == bytes && fflush(out) == 0);
	assert_int_equal(ftruncate(fd, (off_t)(bytes - 1 + f->at)), 0);
	if (gguf_open(f->path, &f->g, &error) < 0 || catalog_new(f->g, 0, &f->c, &error) < 0)
		fail_msg("%s", error);
}

static void close_file(struct file *f)
{
	catalog_free(f->c);
	gguf_close(f->g);
	unlink(f->path);
}

/* Q6_K goes to these. */
static uint32_t more(int l)
{
	return l < 5 || l >= 35 || (l - 5) % 3 == 2 ? QUANT_Q6_K : QUANT_Q4_K;
}

static void delta_layer(struct file *f, int l)
{
	tensor(f, l, "attn_qkv.weight", more(l), 2048, 8192, 0);
	tensor(f, l, "attn_gate.weight", QUANT_Q4_K, 2048, 4096, 0);
	tensor(f, l, "ssm_conv1d.weight", QUANT_F32, 4, 8192, 0);
	tensor(f, l, "ssm_dt.bias", QUANT_F32, 32, 0, 0);
	tensor(f, l, "ssm_a", QUANT_F32, 32, 0, 0);
	tensor(f, l, "ssm_beta.weight", QUANT_Q4_K, 2048, 32, 0);
	tensor(f, l, "ssm_alpha.weight", QUANT_Q4_K, 2048, 32, 0);
	tensor(f, l, "ssm_norm.weight", QUANT_F32, 128, 0, 0);
	tensor(f, l, "ssm_out.weight", QUANT_Q4_K, 4096, 2048, 0);
}

static void attention_layer(struct file *f, int l)
{
	tensor(f, l, "attn_q.weight", QUANT_Q4_K, 2048, 8192, 0);
	tensor(f, l, "attn_k.weight", QUANT_Q4_K, 2048, 512, 0);
	tensor(f, l, "attn_v.weight", more(l), 2048, 512, 0);
	tensor(f, l, "attn_output.weight", QUANT_Q4_K, 4096, 2048, 0);
	tensor(f, l, "attn_q_norm.weight", QUANT_F32, 256, 0, 0);
	tensor(f, l, "attn_k_norm.weight", QUANT_F32, 256, 0, 0);
}

static void expert_layer(struct file *f, int l)
{
	tensor(f, l, "post_attention_norm.weight", QUANT_F32, 2048, 0, 0);
	tensor(f, l, "ffn_gate_inp.weight", QUANT_F32, 2048, 256, 0);
	tensor(f, l, "ffn_gate_exps.weight", QUANT_Q4_K, 2048, 512, 256);
	tensor(f, l, "ffn_up_exps.weight", QUANT_Q4_K, 2048, 512, 256);
	tensor(f, l, "ffn_down_exps.weight", more(l), 512, 2048, 256);
	tensor(f, l, "ffn_gate_inp_shexp.weight", QUANT_F32, 2048, 0, 0);
	tensor(f, l, "ffn_gate_shexp.weight", QUANT_Q4_K, 2048, 512, 0);
	tensor(f, l, "ffn_up_shexp.weight", QUANT_Q4_K, 2048, 512, 0);
	tensor(f, l, "ffn_down_shexp.weight", more(l), 512, 2048, 0);
}

static void keys(struct file *f)
{
	static const struct {
		const char *key;
		uint32_t value;
	} numbers[] = {
		{ "qwen35moe.block_count", 40 },
		{ "qwen35moe.context_length", 262144 },
		{ "qwen35moe.embedding_length", 2048 },
		{ "qwen35moe.expert_used_count", 8 },
		{ "qwen35moe.attention.head_count", 16 },
		{ "qwen35moe.attention.head_count_kv", 2 },
		{ "qwen35moe.attention.key_length", 256 },
		{ "qwen35moe.attention.value_length", 256 },
		{ "qwen35moe.ssm.conv_kernel", 4 },
		{ "qwen35moe.ssm.state_size", 128 },
		{ "qwen35moe.ssm.group_count", 16 },
		{ "qwen35moe.ssm.time_step_rank", 32 },
		{ "qwen35moe.ssm.inner_size", 4096 },
	};

	gguf_build_str(&f->b, "general.architecture", "qwen35moe");
	for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
		gguf_build_u32(&f->b, numbers[i].key, numbers[i].value);
}

static void test_builtin_is_the_file(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = real_shape(), got = {};
	struct file f = { .b = gguf_build_new() };
	_cleanup_(freep) char *error = NULL;

	(void)state;
	keys(&f);
	tensor(&f, -1, "token_embd.weight", QUANT_Q4_K, 2048, 248320, 0);
	tensor(&f, -1, "output_norm.weight", QUANT_F32, 2048, 0, 0);
	tensor(&f, -1, "output.weight", QUANT_Q6_K, 2048, 248320, 0);
	for (int l = 0; l < 40; l++) {
		tensor(&f, l, "attn_norm.weight", QUANT_F32, 2048, 0, 0);
		if (l % 4 == 3)
			attention_layer(&f, l);
		else
			delta_layer(&f, l);
		expert_layer(&f, l);
	}
	open_file(&f);
	assert_int_equal(plan_shape_of_catalog(f.c, &got, &error), 0);
	assert_int_equal(got.trunk_bytes, s.trunk_bytes);
	assert_int_equal(got.trunk_token_bytes, s.trunk_token_bytes);
	assert_int_equal(got.table_bytes, s.table_bytes);
	assert_int_equal(got.block_bytes, s.block_bytes);
	assert_int_equal(got.block_bytes_max, s.block_bytes_max);
	assert_int_equal(got.kv_token_bytes, s.kv_token_bytes);
	assert_int_equal(got.recurrent_bytes, s.recurrent_bytes);
	assert_int_equal(got.scratch_bytes, s.scratch_bytes);
	assert_int_equal(got.context_trained, s.context_trained);
	assert_true(got.token_flops == s.token_flops);
	assert_true(got.kv_known && got.n_used == s.n_used && got.n_expert_max == s.n_expert_max);
	assert_int_equal(got.n_all_layers, s.n_all_layers);
	assert_int_equal(got.n_layers, s.n_layers);
	assert_memory_equal(got.layers, s.layers, s.n_layers * sizeof(*s.layers));
	/* As made for comparing with llama.cpp, and 3.0 billion weights a token. */
	assert_int_equal(s.trunk_bytes + s.table_bytes + s.block_bytes, UINT64_C(21155768832));
	assert_true(s.token_flops > 5.5e9 && s.token_flops < 6.5e9);
	close_file(&f);
}

static void expect_shape_error(struct file *f, const char *text)
{
	_cleanup_(freep) char *error = NULL;
	struct plan_shape s;

	open_file(f);
	assert_int_not_equal(plan_shape_of_catalog(f->c, &s, &error), 0);
	assert_non_null(strstr(error, text));
	close_file(f);
}

static void test_files_without_a_plan(void **state)
{
	struct file none = { .b = gguf_build_new() }, unsaid = none, nameless = none, huge = none;

	(void)state;
	keys(&none);
	tensor(&none, -1, "output.weight", QUANT_Q4_K, 256, 8, 0);
	expect_shape_error(&none, "no experts");
	gguf_build_str(&unsaid.b, "general.architecture", "other");
	tensor(&unsaid, 0, "ffn_up_exps.weight", QUANT_Q4_K, 256, 8, 16);
	tensor(&unsaid, 0, "ffn_down_exps.weight", QUANT_Q4_K, 256, 8, 16);
	expect_shape_error(&unsaid, "how many experts");
	tensor(&nameless, 0, "ffn_up_exps.weight", QUANT_Q4_K, 256, 8, 16);
	expect_shape_error(&(struct file){ .b = (tensor(&nameless, 0, "ffn_down_exps.weight",
							QUANT_Q4_K, 256, 8, 16),
						 nameless.b),
					   .at = nameless.at },
			   "architecture");
	gguf_build_str(&huge.b, "general.architecture", "other");
	gguf_build_u32(&huge.b, "other.expert_used_count", 2);
	gguf_build_u32(&huge.b, "other.attention.head_count_kv", UINT32_MAX);
	gguf_build_u32(&huge.b, "other.attention.key_length", UINT32_MAX);
	tensor(&huge, 0, "attn_k.weight", QUANT_Q4_K, 256, 8, 0);
	tensor(&huge, 0, "ffn_up_exps.weight", QUANT_Q4_K, 256, 8, 16);
	tensor(&huge, 0, "ffn_down_exps.weight", QUANT_Q4_K, 256, 8, 16);
	expect_shape_error(&huge, "conversation");
}

/* A family that nobody knows, whose heads differ by layer; one layer without experts, the table is the output. */
static void test_other_families(void **state)
{
	static const int32_t heads[] = { 4, 0, 2 };
	struct file f = { .b = gguf_build_new() };
	_cleanup_(plan_shape_done) struct plan_shape s = {};

	(void)state;
	gguf_build_str(&f.b, "general.architecture", "other");
	gguf_build_u32(&f.b, "other.expert_used_count", 2);
	gguf_build_u32(&f.b, "other.embedding_length", 256);
	gguf_build_u32(&f.b, "other.attention.head_count", 8);
	gguf_build_i32s(&f.b, "other.attention.head_count_kv", heads, 3);
	tensor(&f, -1, "token_embd.weight", QUANT_Q4_K, 256, 1000, 0);
	for (int l = 0; l < 3; l++) {
		if (l != 1)
			tensor(&f, l, "attn_k.weight", QUANT_Q4_K, 256, 128, 0);
		if (l == 1)
			continue;
		tensor(&f, l, "ffn_up_exps.weight", QUANT_Q4_K, 256, 512, 16);
		tensor(&f, l, "ffn_down_exps.weight", QUANT_Q4_K, 512, 256, 16);
	}
	open_file(&f);
	assert_int_equal(plan_shape_of_catalog(f.c, &s, NULL), 0);
	assert_int_equal(s.n_layers, 2);
	assert_int_equal(s.n_all_layers, 3);
	assert_int_equal(s.table_bytes, 0);
	assert_int_equal(s.trunk_token_bytes, 1000 * 144 + 2 * 128 * 144);
	assert_int_equal(s.kv_token_bytes, (4 + 2) * (32 + 32) * 2);
	assert_int_equal(s.recurrent_bytes, 0);
	assert_true(s.token_flops == 2 * (256000 + 2 * 32768 + 2 * 2 * 2 * 131072.0));
	close_file(&f);
}

/* ---- made-up routing ---- */

static void test_trace_is_routing(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = small_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 200), again = make_trace(&s, 200);
	size_t at = 0;

	(void)state;
	assert_int_equal(t.n_steps, 200);
	assert_int_equal(t.n_wanted, 200 * 12 * 4);
	for (size_t step = 0; step < 200; step++)
		for (uint32_t l = 0; l < 12; l++)
			for (uint32_t i = 0; i < 4; i++, at++) {
				assert_int_equal(t.wanted[at] / 64, l);
				assert_true(t.wanted[at] % 64 < s.layers[l].n_expert);
				assert_true(i == 0 || t.wanted[at] > t.wanted[at - 1]);
			}
	assert_int_equal(t.first[200], at);
	assert_memory_equal(t.wanted, again.wanted, at * sizeof(*t.wanted));
}

/* All experts of a layer, one of one, and more than can be. */
static void test_trace_edges(void **state)
{
	struct plan_layer layers[] = { { 3, 100 }, { 1, 100 }, { 2, 100 } };
	struct plan_shape s = { .layers = layers, .n_layers = 3, .n_used = 3, .n_expert_max = 3 };
	_cleanup_(freep) char *error = NULL;
	_cleanup_(trace_done) struct trace t = make_trace(&s, 50);
	static const uint32_t all[] = { 0, 1, 2, 3, 6, 7 };

	(void)state;
	for (size_t step = 0; step < 50; step++)
		assert_memory_equal(t.wanted + step * 6, all, sizeof(all));
	s.n_used = s.n_expert_max = layers[0].n_expert = 1 << 21;
	assert_int_equal(plan_make_trace(&s, 100, &t, &error), -E2BIG);
	assert_non_null(strstr(error, "too many"));
}

static double hit_percent(const struct trace *t, int policy, double fraction, size_t skip)
{
	uint32_t n_blocks = t->n_layers * t->n_experts,
		 capacity = (uint32_t)lround(fraction * n_blocks);
	_cleanup_(evict_freep) struct evict *e = NULL;
	size_t hits = 0, from = t->first[skip];

	if (policy < 0) {
		assert_int_equal(evict_belady(t->wanted, t->n_wanted, n_blocks, capacity, from, &hits),
				 0);
		return 100 * (double)hits / (double)(t->n_wanted - from);
	}
	assert_int_equal(evict_new((enum evict_policy)policy, n_blocks, NULL, &e), 0);
	for (size_t step = 0; step < t->n_steps; step++) {
		evict_step(e);
		for (size_t i = t->first[step]; i < t->first[step + 1]; i++) {
			evict_touch(e, t->wanted[i], 1);
			if (evict_is_resident(e, t->wanted[i])) {
				hits += i >= from;
				continue;
			}
			if (evict_n_resident(e) == capacity)
				evict_remove(e, evict_victim(e, EVICT_ANY_CLASS, NULL));
			evict_insert(e, t->wanted[i]);
		}
	}
	return 100 * (double)hits / (double)(t->n_wanted - from);
}

static const int ranks[] = { EVICT_LRU, EVICT_LFU, EVICT_CLOCK_LFU, -1 };
static const double fractions[] = { 0.10, 0.25, 0.50, 0.75 };

/* As `residentctl simulate --skip 100` counts them in the recording of Kimi-Linear. */
static void test_trace_is_like_recorded(void **state)
{
	static const double recorded[4][4] = { { 53.98, 73.58, 89.89, 96.88 },
					       { 55.62, 74.64, 91.07, 96.88 },
					       { 54.85, 73.82, 90.90, 96.88 },
					       { 72.31, 87.38, 95.88, 96.90 } };
	_cleanup_(plan_shape_done) struct plan_shape s = real_shape();
	_cleanup_(trace_done) struct trace t = {};
	double square = 0;

	(void)state;
	s.n_layers = 26;
	t = make_trace(&s, 300);
	for (size_t r = 0; r < ARRAY_SIZE(ranks); r++) {
		print_message("# %-10s",
			      ranks[r] < 0 ? "belady"
					   : evict_policy_to_string((enum evict_policy)ranks[r]));
		for (size_t f = 0; f < ARRAY_SIZE(fractions); f++) {
			double got = hit_percent(&t, ranks[r], fractions[f], 100),
			       d = got - recorded[r][f];

			print_message("  %.1f/%.1f", recorded[r][f], got);
			assert_true(fabs(d) < 3.5);
			square += d * d / 16;
		}
		print_message("\n");
	}
	print_message("# rms %.2f points\n", sqrt(square));
	assert_true(sqrt(square) < 1.6);
}

static bool read_kimi(struct trace *ret)
{
	const char *shared = getenv("RESIDENTD_SHARED");
	_cleanup_(freep) char *path = NULL, *error = NULL;
	_cleanup_(fclosep) FILE *f = NULL;

	assert_true(asprintf(&path, "%s/traces/trace_kimi_300.jsonl", shared ? shared : "../shared") > 0);
	f = fopen(path, "re");
	if (!f)
		return false;
	assert_int_equal(trace_read(f, path, 0, ret, &error), 0);
	return true;
}

/* ---- a second opinion ---- */

enum { IN_VRAM, IN_RAM, ON_DISK };

/* Moves each block by itself: two clocks, in microseconds, and where everything is. */
struct world {
	const struct plan_shape *s;
	const struct plan_machine *m;
	const struct plan *p; /* only sizes of tiers and where the trunk is */
	uint8_t *place, *busy;
	uint32_t *uses;
	struct evict *rank[2];
	int64_t room[2];
	double now, bus;
	double found[3], us; /* counted */
	size_t n;
};

static double us_of(uint64_t bytes, double bps)
{
	return (double)bytes / bps * 1e6;
}

static uint64_t size_of(const struct world *w, uint32_t block)
{
	return w->s->layers[block / w->s->n_expert_max].block_bytes;
}

static void put(struct world *w, uint32_t block, uint8_t place)
{
	if (w->place[block] < ON_DISK) {
		evict_remove(w->rank[w->place[block]], block);
		w->room[w->place[block]] += (int64_t)size_of(w, block);
	}
	w->place[block] = place;
	if (place < ON_DISK) {
		evict_insert(w->rank[place], block);
		w->room[place] -= (int64_t)size_of(w, block);
		assert_true(w->room[place] >= 0);
	}
}

static void bring_to_ram(struct world *w, uint32_t block)
{
	while (w->room[IN_RAM] < (int64_t)size_of(w, block)) {
		uint32_t victim = evict_victim(w->rank[IN_RAM], EVICT_ANY_CLASS, w->busy);

		if (victim == EVICT_NONE)
			return put(w, block, ON_DISK);
		put(w, victim, ON_DISK);
	}
	put(w, block, IN_RAM);
}

static bool bring_to_vram(struct world *w, uint32_t block)
{
	double move = us_of(size_of(w, block), w->m->pcie_bps);
	double vram = us_of(size_of(w, block), w->m->vram_bps * PLAN_EFFICIENCY);
	double cpu = us_of(size_of(w, block), w->m->mem_bps * PLAN_EFFICIENCY);
	struct evict_price price = { move, fmin(cpu, move + vram) - vram };
	bool full = w->room[IN_VRAM] < (int64_t)size_of(w, block);
	uint32_t victim = full ? evict_victim(w->rank[IN_VRAM], EVICT_ANY_CLASS, w->busy) : EVICT_NONE;

	if (!w->p->gpu || w->bus - w->now > PLAN_BUS_BEHIND_US ||
	    size_of(w, block) > w->p->vram_block_bytes || (full && victim == EVICT_NONE) ||
	    !evict_pays(w->rank[IN_VRAM], block, victim, &price))
		return false;
	put(w, block, ON_DISK);
	while (w->room[IN_VRAM] < (int64_t)size_of(w, block)) {
		victim = evict_victim(w->rank[IN_VRAM], EVICT_ANY_CLASS, w->busy);
		if (victim == EVICT_NONE) {
			bring_to_ram(w, block);
			return true;
		}
		bring_to_ram(w, victim);
	}
	put(w, block, IN_VRAM);
	return true;
}

/* When a layer's work ends, and the bus's. */
struct ends {
	double work, bus;
	bool copied[64];
};

/* share: each block in RAM goes where it is done first, one after the other; else all of them stay on the side of the trunk. Those from the
 * disk are computed by the CPU as they come. */
static struct ends schedule(const struct world *w, uint64_t bytes, const uint32_t *blocks, size_t n,
			    bool share)
{
	double cpu_us = us_of(bytes, w->m->mem_bps * PLAN_EFFICIENCY),
	       gpu_us = us_of(bytes, w->m->vram_bps * PLAN_EFFICIENCY);
	double copy_us = us_of(bytes, w->m->pcie_bps), read_us = us_of(bytes, w->m->disk_bps);
	double cpu = w->now, gpu = w->now, arrived = w->now;
	struct ends e = { .bus = fmax(w->bus, w->now) };
	bool by_cpu = false, by_gpu = false;

	for (size_t i = 0; i < n; i++) {
		if (w->place[blocks[i]] != IN_VRAM)
			continue;
		gpu += gpu_us;
		by_gpu = true;
	}
	for (size_t i = 0; i < n; i++) {
		bool first = fmax(gpu, e.bus + copy_us) + gpu_us < cpu + cpu_us;

		if (w->place[blocks[i]] != IN_RAM)
			continue;
		if (w->p->gpu && (share ? first : w->p->trunk_in_vram)) {
			e.bus += copy_us;
			gpu = fmax(gpu, e.bus) + gpu_us;
			e.copied[i] = by_gpu = true;
		} else {
			cpu += cpu_us;
			by_cpu = true;
		}
	}
	for (size_t i = 0; i < n; i++) {
		if (w->place[blocks[i]] != ON_DISK)
			continue;
		arrived += read_us;
		cpu = fmax(cpu, arrived) + cpu_us;
		by_cpu = true;
	}
	e.work = fmax(cpu, gpu);
	if (w->p->gpu && (w->p->trunk_in_vram ? by_cpu : by_gpu))
		e.work += PLAN_GPU_SPLIT_US;
	return e;
}

static void run_layer(struct world *w, uint32_t layer, const uint32_t *blocks, size_t n, bool count)
{
	uint64_t bytes = w->s->layers[layer].block_bytes;
	struct ends one = schedule(w, bytes, blocks, n, false), e = schedule(w, bytes, blocks, n, true);

	if (one.work < e.work)
		e = one;
	w->bus = e.bus;
	for (size_t i = 0; i < n && count; i++)
		w->found[w->place[blocks[i]]]++;
	for (size_t i = 0; i < n; i++)
		if (w->place[blocks[i]] == ON_DISK)
			bring_to_ram(w, blocks[i]);
	for (size_t i = 0; i < n; i++)
		if (w->place[blocks[i]] == IN_RAM && bring_to_vram(w, blocks[i]) && !e.copied[i])
			w->bus += us_of(bytes, w->m->pcie_bps);
	w->now = e.work;
}

static void run_step(struct world *w, const struct trace *t, size_t step, size_t begin, size_t count)
{
	uint32_t trunk_layers = w->s->n_all_layers, blocks[64];
	double bps = (w->p->trunk_in_vram ? w->m->vram_bps : w->m->mem_bps) * PLAN_EFFICIENCY,
	       start = w->now;
	double each = us_of(w->s->trunk_token_bytes + 2 * w->s->recurrent_bytes, bps) / trunk_layers +
		      (w->p->trunk_in_vram ? PLAN_GPU_LAYER_US : PLAN_CPU_LAYER_US);

	evict_step(w->rank[0]);
	evict_step(w->rank[1]);
	w->now += each * (trunk_layers - w->s->n_layers);
	for (uint32_t l = 0; l < w->s->n_layers; l++) {
		size_t n = 0;

		w->now += each;
		for (size_t i = t->first[step]; i < t->first[step + 1]; i++)
			if (t->wanted[i] / t->n_experts == l % t->n_layers)
				blocks[n++] = l * w->s->n_expert_max + t->wanted[i] % t->n_experts;
		for (size_t i = 0; i < n; i++) {
			w->uses[blocks[i]]++;
			w->busy[blocks[i]] = 1;
			evict_touch(w->rank[0], blocks[i], 1);
			evict_touch(w->rank[1], blocks[i], 1);
		}
		if (step >= begin)
			run_layer(w, l, blocks, n, step >= count);
		for (size_t i = 0; i < n; i++)
			w->busy[blocks[i]] = 0;
	}
	if (step >= count) {
		w->us += w->now - start;
		w->n++;
	}
}

static void fill_world(struct world *w, uint32_t n_blocks)
{
	for (uint32_t most = UINT32_MAX, next; most > 0; most = next) {
		next = 0;
		for (uint32_t b = 0; b < n_blocks; b++) {
			if (w->uses[b] < most)
				next = MAX(next, w->uses[b]);
			if (w->uses[b] != most)
				continue;
			for (uint8_t place = IN_VRAM; place < ON_DISK && w->place[b] == ON_DISK; place++)
				if (w->room[place] >= (int64_t)size_of(w, b))
					put(w, b, place);
		}
	}
	for (uint32_t i = 0; i < n_blocks; i++) {
		uint32_t b = (uint32_t)((uint64_t)i * 7919 % n_blocks);

		for (uint8_t place = IN_VRAM; place < ON_DISK && w->place[b] == ON_DISK; place++)
			if (b % w->s->n_expert_max < w->s->layers[b / w->s->n_expert_max].n_expert &&
			    w->room[place] >= (int64_t)size_of(w, b))
				put(w, b, place);
	}
}

/* A third to learn what is hot, a third to settle, a third to count. */
static void run_world(struct world *w, const struct trace *t)
{
	uint32_t n_blocks = w->s->n_layers * w->s->n_expert_max;

	w->place = malloc(n_blocks);
	w->busy = calloc(n_blocks, 1);
	w->uses = calloc(n_blocks, sizeof(*w->uses));
	assert_true(w->place && w->busy && w->uses);
	memset(w->place, ON_DISK, n_blocks);
	w->room[IN_VRAM] = (int64_t)w->p->vram_block_bytes;
	w->room[IN_RAM] = (int64_t)w->p->ram_block_bytes;
	assert_int_equal(evict_new(EVICT_CLOCK_LFU, n_blocks, NULL, &w->rank[IN_VRAM]), 0);
	assert_int_equal(evict_new(EVICT_LFU, n_blocks, NULL, &w->rank[IN_RAM]), 0);
	for (size_t step = 0; step < t->n_steps; step++) {
		if (step == t->n_steps / 3)
			fill_world(w, n_blocks);
		run_step(w, t, step, t->n_steps / 3, t->n_steps - t->n_steps / 3);
	}
	w->rank[0] = evict_free(w->rank[0]);
	w->rank[1] = evict_free(w->rank[1]);
	free(w->place);
	free(w->busy);
	free(w->uses);
}

static void compare(const struct plan_shape *s, const struct plan_machine *m, const struct trace *t)
{
	struct plan p = predict(s, m, t);
	struct world w = { .s = s, .m = m, .p = &p };
	double wanted, us;

	run_world(&w, t);
	wanted = w.found[IN_VRAM] + w.found[IN_RAM] + w.found[ON_DISK];
	us = w.us / (double)w.n;
	print_message("# hits %.1f %.1f %.2f %%, %.2f tokens/s; block by block %.1f %.1f %.2f %%, %.2f tokens/s\n",
		      100 * p.vram_hits, 100 * p.ram_hits, 100 * p.misses, 1e6 / p.token_us,
		      100 * w.found[IN_VRAM] / wanted, 100 * w.found[IN_RAM] / wanted,
		      100 * w.found[ON_DISK] / wanted, 1e6 / us);
	assert_int_equal(p.n_steps, w.n);
	assert_true(fabs(p.vram_hits - w.found[IN_VRAM] / wanted) < 0.03);
	assert_true(fabs(p.misses - w.found[ON_DISK] / wanted) < 0.025);
	assert_true(fabs(p.token_us / us - 1) < 0.03);
}

static void test_against_a_second_replay(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = small_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 300);
	struct plan_machine m = usual_machine();
	uint64_t vram = PLAN_VRAM_RESERVE + PLAN_VRAM_DRIVER, fixed = s.table_bytes + PLAN_STAGING;

	(void)state;
	seed = 29;
	m.context = 1000;
	for (int round = 0; round < 60; round++) {
		m.vram_bytes = round % 4 == 0 ? 0 : vram + 2000000 + random_below(120) * 1000000;
		m.ram_bytes = fixed + 27000000 + random_below(100) * 1000000;
		m.pcie_bps = (1 + random_below(60)) * 1e9;
		m.mem_bps = (5 + random_below(60)) * 1e9;
		m.disk_bps = (1 + random_below(100)) * 1e8;
		m.vram_bps = (100 + random_below(900)) * 1e9;
		compare(&s, &m, &t);
	}
}

static void test_the_real_shape(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = real_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 240), kimi = {};
	struct plan_machine m = usual_machine();

	(void)state;
	compare(&s, &m, &t);
	m.ram_bytes = 3 * GIB;
	compare(&s, &m, &t);
	m.vram_bytes = 0;
	m.ram_bytes = 12 * GIB;
	compare(&s, &m, &t);
	if (!read_kimi(&kimi))
		skip_because("the recorded routing is not there");
	m = usual_machine();
	compare(&s, &m, &kimi);
}

/* ---- what must hold ---- */

/* More of anything is never slower; within a percent, since rankings are no better than they are. */
static void test_more_is_faster(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = small_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 300);
	struct plan_machine least = usual_machine();

	(void)state;
	least.context = 1000;
	least.vram_bytes = PLAN_VRAM_RESERVE + PLAN_VRAM_DRIVER + 30000000;
	least.ram_bytes = PLAN_STAGING + 35000000;
	for (int what = 0; what < 6; what++) {
		struct plan before = predict(&s, &least, &t);
		struct plan_machine m = least;

		for (int i = 1; i < 12; i++) {
			double *const rates[] = { &m.vram_bps, &m.pcie_bps, &m.mem_bps, &m.disk_bps };
			struct plan p;

			if (what < 4)
				*rates[what] *= 1.4;
			else
				*(what == 4 ? &m.vram_bytes : &m.ram_bytes) += 12000000;
			p = predict(&s, &m, &t);
			assert_true(p.token_us <= before.token_us * 1.01);
			assert_true(p.cold_prefill_us <= before.cold_prefill_us);
			assert_true(p.warm_prefill_us <= before.warm_prefill_us);
			assert_true(p.context_max >= before.context_max);
			before = p;
		}
	}
}

static void test_tiers_add_up(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = real_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 60);
	struct plan_machine m = usual_machine();
	struct plan p = predict(&s, &m, &t);

	(void)state;
	assert_true(p.gpu && p.trunk_in_vram);
	assert_int_equal(p.conversation_bytes, 32768 * 20480 + 2 * 65863680);
	assert_int_equal(p.vram_block_bytes, 8 * GIB - PLAN_VRAM_RESERVE - PLAN_VRAM_DRIVER -
						     1366190592 - 112797696 - p.conversation_bytes);
	assert_int_equal(p.ram_block_bytes, 23 * GIB / 2 - PLAN_STAGING - 286064640);
	assert_int_equal(p.vram_block_bytes + p.ram_block_bytes + p.disk_block_bytes, s.block_bytes);
	assert_true(fabs(p.vram_hits + p.ram_hits + p.misses - 1) < 1e-9);
	assert_true(p.vram_hits > 0.5 && p.misses > 0 && p.misses < 0.1);
	/* 512 tokens wait for all blocks from the disk. */
	assert_true(fabs(p.cold_prefill_us - (double)s.block_bytes / 3e9 * 1e6) < 1);
	/* A longer one fits, and takes room from the experts. */
	assert_int_equal(p.context_max, 262144);
	m.context = 131072;
	assert_true(predict(&s, &m, &t).vram_block_bytes ==
		    p.vram_block_bytes - 98304 * UINT64_C(20480));
}

static void test_no_gpu(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = small_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 90);
	struct plan_machine m = usual_machine();
	struct plan none, small;

	(void)state;
	m.vram_bytes = 0;
	none = predict(&s, &m, &t);
	assert_true(!none.gpu && !none.trunk_in_vram);
	assert_int_equal(none.vram_block_bytes, 0);
	assert_true(none.ram_hits == 1 && none.misses == 0 && none.disk_wait_us == 0);
	assert_int_equal(none.disk_block_bytes, 0);
	/* A card of which others have everything is none. */
	m.vram_bytes = PLAN_VRAM_RESERVE + PLAN_VRAM_DRIVER + 4 * s.block_bytes_max - 1;
	small = predict(&s, &m, &t);
	assert_memory_equal(&small, &none, sizeof(none));
	/* One for experts alone: the trunk stays. */
	m.vram_bytes++;
	small = predict(&s, &m, &t);
	assert_true(small.gpu && !small.trunk_in_vram && small.vram_hits > 0);
}

static void test_everything_fits(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = small_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 90);
	struct plan_machine m = usual_machine();
	struct plan p = predict(&s, &m, &t);
	double us = 0;

	(void)state;
	assert_true(p.vram_hits == 1 && p.ram_block_bytes == 0 && p.disk_block_bytes == 0);
	assert_true(p.moved_token_bytes == 0 && p.disk_wait_us == 0 && p.bus_wait_us == 0);
	/* By hand: every byte of a token once. */
	for (uint32_t l = 0; l < 12; l++)
		us += 4 * (double)s.layers[l].block_bytes / 400e3 / PLAN_EFFICIENCY;
	us += 20600100 / 400e3 / PLAN_EFFICIENCY + 13 * PLAN_GPU_LAYER_US;
	assert_true(fabs(p.token_us - us) < 0.01);
	/* Nothing but products is left of a later chunk. */
	assert_true(fabs(p.warm_prefill_us - 1e8 * 512 / plan_default_flops(true) * 1e6) < 0.01);
}

static void test_below_the_floor(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = small_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&s, 90);
	struct plan_machine m = usual_machine();
	_cleanup_(freep) char *error = NULL;
	struct plan p;

	(void)state;
	m.vram_bytes = 0;
	m.context = 1000;
	m.ram_bytes = 27600000 + 8 * 150000;
	assert_int_equal(plan_predict(&s, &m, &t, &p, NULL), 0);
	assert_int_equal(p.floor_bytes, m.ram_bytes - 0);
	m.ram_bytes--;
	assert_int_equal(plan_predict(&s, &m, &t, &p, &error), -ENOSPC);
	assert_non_null(strstr(error, "cannot run"));
	/* A context of any length is a number like others. */
	m.context = UINT32_MAX;
	s.kv_token_bytes = UINT64_C(1) << 62;
	assert_int_equal(plan_predict(&s, &m, &t, &p, NULL), -ENOSPC);
}

static void test_foreign_routing(void **state)
{
	_cleanup_(plan_shape_done) struct plan_shape s = small_shape(), other = real_shape();
	_cleanup_(trace_done) struct trace t = make_trace(&other, 30);
	struct plan_machine m = usual_machine();
	_cleanup_(freep) char *error = NULL;
	size_t first[] = { 0, 2, 2 };
	uint32_t wanted[] = { 0, 1 };
	struct trace idle = { 1, 64, 2, wanted, first, 2 };
	struct plan p;

	(void)state;
	assert_int_equal(plan_predict(&s, &m, &t, &p, &error), -EINVAL);
	assert_non_null(strstr(error, "another model"));
	freep(&error);
	error = NULL;
	assert_int_equal(plan_predict(&s, &m, &idle, &p, &error), -EINVAL);
	assert_non_null(strstr(error, "wants no experts"));
}

/* The best of all ways to share, and no worker is done after that. */
static void test_layer(void **state)
{
	struct plan_machine m = { .vram_bps = 1e6 / PLAN_EFFICIENCY,
				  .mem_bps = 1e5 / PLAN_EFFICIENCY,
				  .pcie_bps = 5e4,
				  .disk_bps = 1e4 };
	const struct plan cpu = {}, gpu = { .gpu = true, .trunk_in_vram = true };
	uint32_t copied;

	(void)state;
	/* 1000 bytes: 1 ms on the card, 10 on the CPU, 20 over the bus, 100 from the disk. */
	assert_true(fabs(plan_layer_us(&m, &cpu, 1000, 0, 3, 0, 0, &copied) - 30000) < 1);
	assert_int_equal(copied, 0);
	assert_true(fabs(plan_layer_us(&m, &cpu, 1000, 0, 3, 2, 0, &copied) - 210000) < 1);
	assert_true(fabs(plan_layer_us(&m, &gpu, 1000, 5, 0, 0, 0, &copied) - 5000) < 1);
	assert_true(fabs(plan_layer_us(&m, &gpu, 1000, 5, 1, 0, 0, &copied) - 10030) < 1);
	/* Two on the CPU in the time that one is copied and computed. */
	assert_true(fabs(plan_layer_us(&m, &gpu, 1000, 5, 3, 0, 0, &copied) - 21030) < 1);
	assert_int_equal(copied, 1);
	assert_true(fabs(plan_layer_us(&m, &gpu, 1000, 5, 3, 1, 0, &copied) - 110030) < 1);
	assert_true(plan_layer_us(&m, &gpu, 1000, 0, 0, 0, 0, &copied) == 0);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_builtin_is_the_file),
		cmocka_unit_test(test_files_without_a_plan),
		cmocka_unit_test(test_other_families),
		cmocka_unit_test(test_trace_is_routing),
		cmocka_unit_test(test_trace_edges),
		cmocka_unit_test(test_trace_is_like_recorded),
		cmocka_unit_test(test_layer),
		cmocka_unit_test(test_against_a_second_replay),
		cmocka_unit_test(test_the_real_shape),
		cmocka_unit_test(test_more_is_faster),
		cmocka_unit_test(test_tiers_add_up),
		cmocka_unit_test(test_no_gpu),
		cmocka_unit_test(test_everything_fits),
		cmocka_unit_test(test_below_the_floor),
		cmocka_unit_test(test_foreign_routing),
	};

	return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
