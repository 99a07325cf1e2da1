/* SPDX-License-Identifier: MIT */
/*
 * The table of families: each of them from a file made here, of a few thousand random weights.
 * What is loaded, what a batch computes in pieces and whole, what rope is made of the metadata, and
 * what is refused: hostile numbers, and parts of models that nobody here computes.
 *
 * That the numbers are those of another implementation is for tests/parity/run-parity.py.
 */
#include "tests/test.h"

#include "daemon/engine/graph.h"
#include "daemon/model/arch-decoder.h"
#include "daemon/model/model.h"
#include "tests/unit/gguf-build.h"

#include <fcntl.h>
#include <math.h>
#include <sys/mman.h>

#define N_VOCAB 24
#define N_EMBD  32
#define N_HEAD  4
#define N_KV    2
#define DIM     16 /* of a head: more than N_EMBD / N_HEAD */
#define N_FF    48
#define N_EXP   4
#define N_LAYER 2
#define N_CTX   64
#define WINDOW  4
#define N_IDS   40

/* Of qwen35's delta nets. */
#define N_HEAD_K 2
#define N_HEAD_V 4
#define STATE    8
#define CHANNELS (2 * N_HEAD_K * STATE + N_HEAD_V * STATE)

struct key {
	const char *name; /* without the family's name */
	uint32_t type;
	uint32_t u;
	float f;
	const char *s;
	uint64_t a[3]; /* an array's numbers, as far as they are not 0; u is their type */
};

struct tensor {
	char name[48];
	uint32_t type;
	uint64_t ne[3];
	float mean, deviation;
};

struct file {
	const char *family;
	struct key keys[40];
	struct tensor tensors[80];
	size_t n_keys, n_tensors;
};

/* A file's change. A name that begins with '.' is a key's. */
struct change {
	const char *name;
	enum {
		CHANGE_NONE,
		DROP,
		SET_U32,
		SET_F32,
		SET_BOOL,
		SET_STR,
		SET_ARRAY,
		SHAPE,
		ADD,
		VALUE
	} what;
	uint32_t u;
	float f;
	const char *s;
	uint64_t ne[3];
};

#define U(v)      .what = SET_U32, .u = (v)
#define F(v)      .what = SET_F32, .f = (v)
#define B(v)      .what = SET_BOOL, .u = (v)
#define S(v)      .what = SET_STR, .s = (v)
#define A(t, ...) .what = SET_ARRAY, .u = (t), .ne = { __VA_ARGS__ }
#define NE(...)   .what = SHAPE, .ne = { __VA_ARGS__ }
#define NEW(...)  .what = ADD, .ne = { __VA_ARGS__ }
#define TO(v)     .what = VALUE, .f = (v)
#define GONE      .what = DROP

static void put_u32(struct file *f, const char *name, uint32_t v)
{
	f->keys[f->n_keys++] = (struct key){ name, GGUF_U32, .u = v };
}

static void put_f32(struct file *f, const char *name, float v)
{
	f->keys[f->n_keys++] = (struct key){ name, GGUF_F32, .f = v };
}

static void put(struct file *f, int layer, const char *name, uint64_t a, uint64_t b, uint64_t c,
		float mean, float deviation)
{
	struct tensor *t = &f->tensors[f->n_tensors++];

	assert_in_range(f->n_tensors, 1, ARRAY_SIZE(f->tensors));
	*t = (struct tensor){ .ne = { a, b, c }, .mean = mean, .deviation = deviation };
	if (layer < 0)
		snprintf(t->name, sizeof(t->name), "%s", name);
	else
		snprintf(t->name, sizeof(t->name), "blk.%d.%s", layer, name);
}

static void put_matrix(struct file *f, int layer, const char *name, uint64_t in, uint64_t out)
{
	put(f, layer, name, in, out, 0, 0, 1.0f / sqrtf((float)in));
}

static void put_experts(struct file *f, int layer, const char *name, uint64_t in, uint64_t out)
{
	put(f, layer, name, in, out, N_EXP, 0, 1.0f / sqrtf((float)in));
}

static void put_norm(struct file *f, int layer, const char *name, uint64_t n)
{
	put(f, layer, name, n, 0, 0, 1, 0.1f);
}

static void put_bias(struct file *f, int layer, const char *name, uint64_t a, uint64_t b)
{
	put(f, layer, name, a, b, 0, 0, 0.3f);
}

/* The families' switches. */
struct family {
	const char *name;
	bool moe, qk_norm, gated, delta, oss;
};

static const struct family families[] = {
	{ "qwen35moe", .moe = true, .qk_norm = true, .gated = true, .delta = true },
	{ "qwen35", .qk_norm = true, .gated = true, .delta = true },
	{ "qwen3moe", .moe = true, .qk_norm = true },
	{ "qwen3", .qk_norm = true },
	{ .name = "llama" },
	{ "gpt-oss", .moe = true, .oss = true },
};

static void put_keys(struct file *f, const struct family *y)
{
	put_u32(f, ".block_count", N_LAYER);
	put_u32(f, ".context_length", N_CTX);
	put_u32(f, ".embedding_length", N_EMBD);
	put_u32(f, ".attention.head_count", N_HEAD);
	put_u32(f, ".attention.head_count_kv", N_KV);
	put_u32(f, ".attention.key_length", DIM);
	put_u32(f, ".attention.value_length", DIM);
	put_u32(f, ".rope.dimension_count", 8);
	put_f32(f, ".rope.freq_base", 10000);
	put_f32(f, ".attention.layer_norm_rms_epsilon", 1e-6f);
	if (y->moe) {
		put_u32(f, ".expert_count", N_EXP);
		put_u32(f, ".expert_used_count", 2);
		put_u32(f, ".expert_feed_forward_length", N_FF);
	} else {
		put_u32(f, ".feed_forward_length", N_FF);
	}
	if (y->oss)
		put_u32(f, ".attention.sliding_window", WINDOW);
	if (!y->delta)
		return;
	if (y->moe)
		put_u32(f, ".expert_shared_feed_forward_length", N_FF);
	put_u32(f, ".full_attention_interval", 2);
	put_u32(f, ".ssm.group_count", N_HEAD_K);
	put_u32(f, ".ssm.time_step_rank", N_HEAD_V);
	put_u32(f, ".ssm.state_size", STATE);
	put_u32(f, ".ssm.inner_size", N_HEAD_V * STATE);
	put_u32(f, ".ssm.conv_kernel", 4);
}

static void put_delta(struct file *f, int i)
{
	put_matrix(f, i, "attn_qkv.weight", N_EMBD, CHANNELS);
	put_matrix(f, i, "attn_gate.weight", N_EMBD, N_HEAD_V * STATE);
	put_matrix(f, i, "ssm_conv1d.weight", 4, CHANNELS);
	put(f, i, "ssm_dt.bias", N_HEAD_V, 0, 0, -2, 0.1f);
	put(f, i, "ssm_a", N_HEAD_V, 0, 0, -1, 0.1f);
	put_matrix(f, i, "ssm_alpha.weight", N_EMBD, N_HEAD_V);
	put_matrix(f, i, "ssm_beta.weight", N_EMBD, N_HEAD_V);
	put_norm(f, i, "ssm_norm.weight", STATE);
	put_matrix(f, i, "ssm_out.weight", N_HEAD_V * STATE, N_EMBD);
}

static void put_attention(struct file *f, const struct family *y, int i)
{
	put_matrix(f, i, "attn_q.weight", N_EMBD, N_HEAD * DIM * (y->gated ? 2 : 1));
	put_matrix(f, i, "attn_k.weight", N_EMBD, N_KV * DIM);
	put_matrix(f, i, "attn_v.weight", N_EMBD, N_KV * DIM);
	put_matrix(f, i, "attn_output.weight", N_HEAD * DIM, N_EMBD);
	if (y->qk_norm) {
		put_norm(f, i, "attn_q_norm.weight", DIM);
		put_norm(f, i, "attn_k_norm.weight", DIM);
	}
	if (!y->oss)
		return;
	put_bias(f, i, "attn_q.bias", N_HEAD * DIM, 0);
	put_bias(f, i, "attn_k.bias", N_KV * DIM, 0);
	put_bias(f, i, "attn_v.bias", N_KV * DIM, 0);
	put_bias(f, i, "attn_output.bias", N_EMBD, 0);
	put_bias(f, i, "attn_sinks.weight", N_HEAD, 0);
}

static void put_ffn(struct file *f, const struct family *y, int i)
{
	if (!y->moe) {
		put_matrix(f, i, "ffn_gate.weight", N_EMBD, N_FF);
		put_matrix(f, i, "ffn_up.weight", N_EMBD, N_FF);
		put_matrix(f, i, "ffn_down.weight", N_FF, N_EMBD);
		return;
	}
	put_matrix(f, i, "ffn_gate_inp.weight", N_EMBD, N_EXP);
	put_experts(f, i, "ffn_gate_exps.weight", N_EMBD, N_FF);
	put_experts(f, i, "ffn_up_exps.weight", N_EMBD, N_FF);
	put_experts(f, i, "ffn_down_exps.weight", N_FF, N_EMBD);
	if (y->delta) {
		put_bias(f, i, "ffn_gate_inp_shexp.weight", N_EMBD, 0);
		put_matrix(f, i, "ffn_gate_shexp.weight", N_EMBD, N_FF);
		put_matrix(f, i, "ffn_up_shexp.weight", N_EMBD, N_FF);
		put_matrix(f, i, "ffn_down_shexp.weight", N_FF, N_EMBD);
	}
	if (y->oss) {
		put_bias(f, i, "ffn_gate_inp.bias", N_EXP, 0);
		put_bias(f, i, "ffn_gate_exps.bias", N_FF, N_EXP);
		put_bias(f, i, "ffn_up_exps.bias", N_FF, N_EXP);
		put_bias(f, i, "ffn_down_exps.bias", N_EMBD, N_EXP);
	}
}

static struct file file_of(const char *family)
{
	struct file f = { .family = family };
	const struct family *y = families;

	while (!streq(y->name, family))
		assert_true(++y < families + ARRAY_SIZE(families));
	put_keys(&f, y);
	put(&f, -1, "token_embd.weight", N_EMBD, N_VOCAB, 0, 0, 1);
	put_norm(&f, -1, "output_norm.weight", N_EMBD);
	put_matrix(&f, -1, "output.weight", N_EMBD, N_VOCAB);
	for (int i = 0; i < N_LAYER; i++) {
		put_norm(&f, i, "attn_norm.weight", N_EMBD);
		if (y->delta && i % 2 == 0)
			put_delta(&f, i);
		else
			put_attention(&f, y, i);
		put_norm(&f, i, y->delta || y->oss ? "post_attention_norm.weight" : "ffn_norm.weight",
			 N_EMBD);
		put_ffn(&f, y, i);
	}
	return f;
}

static void change_key(struct file *f, const struct change *c)
{
	size_t i = 0;

	while (i < f->n_keys && !streq(f->keys[i].name, c->name))
		i++;
	if (c->what == DROP) {
		assert_true(i < f->n_keys);
		f->keys[i] = f->keys[--f->n_keys];
		return;
	}
	assert_true(i < ARRAY_SIZE(f->keys));
	f->n_keys = MAX(f->n_keys, i + 1);
	f->keys[i] = (struct key){ .name = c->name, .u = c->u, .f = c->f, .s = c->s };
	memcpy(f->keys[i].a, c->ne, sizeof(c->ne));
	f->keys[i].type = c->what == SET_U32     ? GGUF_U32
			  : c->what == SET_F32   ? GGUF_F32
			  : c->what == SET_BOOL  ? GGUF_BOOL
			  : c->what == SET_ARRAY ? GGUF_ARRAY
						 : GGUF_STR;
}

static void change_tensor(struct file *f, const struct change *c)
{
	size_t i = 0;

	if (c->what == ADD) {
		put(f, -1, c->name, c->ne[0], c->ne[1], c->ne[2], c->f, 0);
		return;
	}
	while (i < f->n_tensors && !streq(f->tensors[i].name, c->name))
		i++;
	if (i == f->n_tensors)
		fail_msg("no tensor '%s'", c->name);
	if (c->what == DROP)
		f->tensors[i] = f->tensors[--f->n_tensors];
	else if (c->what == VALUE)
		f->tensors[i].mean = c->f, f->tensors[i].deviation = 0;
	else if (c->what == SET_U32)
		f->tensors[i].type = c->u;
	else
		memcpy(f->tensors[i].ne, c->ne, sizeof(c->ne));
}

static void change(struct file *f, const struct change *c)
{
	if (c->name && *c->name == '.')
		change_key(f, c);
	else if (c->name)
		change_tensor(f, c);
}

static void build_array(struct gguf_build *b, const char *name, const struct key *k)
{
	size_t n = 0;

	while (n < ARRAY_SIZE(k->a) && k->a[n] > 0)
		n++;
	gguf_build_array(b, name, k->u, n);
	for (size_t i = 0; i < n; i++)
		gguf_put(&b->kv, &k->a[i], k->u == GGUF_BOOL ? 1 : k->u == GGUF_I64 ? 8 : 4);
}

static void build_keys(struct gguf_build *b, const struct file *f)
{
	static const char *const tokens[] = { "a", "b", "ab", "<|end|>" };
	static const int32_t types[] = { 1, 1, 1, 3 };

	gguf_build_str(b, "general.architecture", f->family);
	for (size_t i = 0; i < f->n_keys; i++) {
		const struct key *k = &f->keys[i];
		char name[128];

		snprintf(name, sizeof(name), "%s%s", f->family, k->name);
		if (k->type == GGUF_U32)
			gguf_build_u32(b, name, k->u);
		else if (k->type == GGUF_F32)
			gguf_build_f32(b, name, k->f);
		else if (k->type == GGUF_BOOL)
			gguf_build_bool(b, name, k->u != 0);
		else if (k->type == GGUF_ARRAY)
			build_array(b, name, k);
		else
			gguf_build_str(b, name, k->s);
	}
	gguf_build_str(b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(b, "tokenizer.ggml.pre", "qwen2");
	gguf_build_strs(b, "tokenizer.ggml.tokens", tokens, ARRAY_SIZE(tokens));
	gguf_build_i32s(b, "tokenizer.ggml.token_type", types, ARRAY_SIZE(types));
	gguf_build_strs(b, "tokenizer.ggml.merges", (const char *const[]){ "a b" }, 1);
}

/* Uniform, of the deviation asked for; the same in every run. */
static void fill(const struct tensor *t, float *x, size_t n)
{
	uint64_t s = 0x9e3779b97f4a7c15;

	for (const char *c = t->name; *c; c++)
		s = (s ^ (uint64_t)*c) * 0x100000001b3;
	for (size_t i = 0; i < n; i++) {
		s = s * 6364136223846793005u + 1442695040888963407u;
		x[i] = t->mean + t->deviation * sqrtf(3) * ((float)(s >> 40) / (float)(1 << 23) - 1.0f);
	}
}

static void build_tensors(struct gguf_build *b, const struct file *f)
{
	for (size_t i = 0; i < f->n_tensors; i++) {
		const struct tensor *t = &f->tensors[i];
		_cleanup_(freep) float *x = NULL;
		size_t n = 1;
		uint32_t n_dims = 0;

		for (; n_dims < 3 && t->ne[n_dims] > 0; n_dims++)
			n *= t->ne[n_dims];
		x = calloc(n, sizeof(*x));
		assert_non_null(x);
		fill(t, x, n);
		gguf_build_tensor(b, t->name, t->type, n_dims, t->ne, x,
				  t->type == QUANT_F16 ? 2 * n : 4 * n);
	}
}

static int load(const struct file *f, struct model **ret, char **ret_error)
{
	struct gguf_build b = gguf_build_new();
	int fd = memfd_create("model", MFD_CLOEXEC), r;
	char path[64];

	assert_true(fd >= 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	build_keys(&b, f);
	build_tensors(&b, f);
	gguf_build_write(&b, path);
	r = model_load(path, ret, ret_error);
	close(fd);
	return r;
}

static struct model *load_changed(const char *family, const struct change *changes, size_t n)
{
	struct file f = file_of(family);
	struct model *m = NULL;
	char *error = NULL;

	for (size_t i = 0; i < n; i++)
		change(&f, &changes[i]);
	if (load(&f, &m, &error) < 0)
		fail_msg("%s: %s", family, error ? error : "no error text");
	return m;
}

#define MODEL(family, ...)                                                               \
	load_changed((family), (const struct change[]){ { NULL, .u = 0 }, __VA_ARGS__ }, \
		     ARRAY_SIZE(((const struct change[]){ { NULL, .u = 0 }, __VA_ARGS__ })))

/* Running. */

/* Logits of all positions, in batches. */
static void eval(struct model *m, unsigned threads, const int32_t *ids, size_t batch, float *logits)
{
	/* No more scratch than it says, but for some of the constant part. */
	size_t bytes = graph_scratch_bytes(m, batch) - graph_scratch_bytes(m, 0) + 65536;
	struct backend *b;
	struct kv_arena *a;
	struct state *s;

	assert_int_equal(kv_arena_new(&m->kv, false, (size_t)1 << 20, &a), 0);
	assert_int_equal(backend_cpu_new(threads, bytes, NULL, &b), 0);
	assert_int_equal(state_new(&s), 0);
	for (size_t at = 0; at < N_IDS; at += batch) {
		struct graph_seq q = { s, ids + at, MIN(batch, N_IDS - at), GRAPH_WANT_ALL };

		assert_int_equal(graph_forward(m, b, a, &q, 1, NULL, logits + at * N_VOCAB), 0);
	}
	state_free(s, a);
	b->ops->free(b);
	kv_arena_free(a);
}

static float max_diff(const float *a, const float *b, size_t n)
{
	float max = 0;

	for (size_t i = 0; i < n; i++)
		max = fmaxf(max, isfinite(a[i] - b[i]) ? fabsf(a[i] - b[i]) : INFINITY);
	return max;
}

static void make_ids(int32_t *ids)
{
	for (int32_t i = 0; i < N_IDS; i++)
		ids[i] = i * 7 % N_VOCAB;
}

static void test_batches(void **unused)
{
	static const size_t batches[] = { 1, 3, 16, 33 };
	static float whole[N_IDS * N_VOCAB], parts[N_IDS * N_VOCAB];
	int32_t ids[N_IDS];

	(void)unused;
	make_ids(ids);
	for (size_t i = 0; i < ARRAY_SIZE(families); i++) {
		struct model *m = MODEL(families[i].name);

		eval(m, 1, ids, N_IDS, whole);
		eval(m, 2, ids, N_IDS, parts);
		assert_memory_equal(whole, parts, sizeof(whole));
		for (size_t k = 0; k < ARRAY_SIZE(batches); k++) {
			memset(parts, 0xff, sizeof(parts));
			eval(m, 2, ids, batches[k], parts);
			if (max_diff(whole, parts, N_IDS * N_VOCAB) > 1e-4f)
				fail_msg("%s in batches of %zu: %g", families[i].name, batches[k],
					 (double)max_diff(whole, parts, N_IDS * N_VOCAB));
		}
		/* And they say something. */
		assert_true(max_diff(whole, whole + N_VOCAB, N_VOCAB) > 0.1f);
		model_unref(m);
	}
}

/* What a change of the file does to the logits of the same ids. */
static float effect(const char *family, const struct change *before, const struct change *after)
{
	static float a[N_IDS * N_VOCAB], b[N_IDS * N_VOCAB];
	struct model *m = load_changed(family, before, before ? 1 : 0);
	int32_t ids[N_IDS];

	make_ids(ids);
	eval(m, 2, ids, N_IDS, a);
	model_unref(m);
	m = load_changed(family, after, 1);
	eval(m, 2, ids, N_IDS, b);
	model_unref(m);
	return max_diff(a, b, N_IDS * N_VOCAB);
}

static void test_optional_parts_count(void **unused)
{
	static const struct {
		const char *family;
		struct change none, some;
	} cases[] = {
		{ "llama",
		  { "blk.0.attn_q.bias", NEW(N_HEAD * DIM) },
		  { "blk.0.attn_q.bias", NEW(N_HEAD * DIM), .f = 1 } },
		{ "llama",
		  { "blk.0.attn_k.bias", NEW(N_KV * DIM) },
		  { "blk.0.attn_k.bias", NEW(N_KV * DIM), .f = 1 } },
		{ "llama",
		  { "blk.1.attn_v.bias", NEW(N_KV * DIM) },
		  { "blk.1.attn_v.bias", NEW(N_KV * DIM), .f = 1 } },
		{ "llama",
		  { "blk.1.attn_output.bias", NEW(N_EMBD) },
		  { "blk.1.attn_output.bias", NEW(N_EMBD), .f = 1 } },
		{ "llama",
		  { "blk.0.ffn_gate.bias", NEW(N_FF) },
		  { "blk.0.ffn_gate.bias", NEW(N_FF), .f = 1 } },
		{ "llama", { "blk.0.ffn_up.bias", NEW(N_FF) }, { "blk.0.ffn_up.bias", NEW(N_FF), .f = 1 } },
		{ "llama",
		  { "blk.0.ffn_down.bias", NEW(N_EMBD) },
		  { "blk.0.ffn_down.bias", NEW(N_EMBD), .f = 1 } },
		{ "llama",
		  { "rope_freqs.weight", NEW(4), .f = 1 },
		  { "rope_freqs.weight", NEW(4), .f = 3 } },
		{ "qwen3",
		  { "blk.0.attn_q.bias", NEW(N_HEAD * DIM) },
		  { "blk.0.attn_q.bias", NEW(N_HEAD * DIM), .f = 1 } },
		{ "qwen35",
		  { "blk.1.attn_q.bias", NEW(2 * N_HEAD * DIM) },
		  { "blk.1.attn_q.bias", NEW(2 * N_HEAD * DIM), .f = 1 } },
		{ "gpt-oss", { "blk.0.attn_sinks.weight", TO(-30) }, { "blk.0.attn_sinks.weight", TO(3) } },
		{ "gpt-oss",
		  { ".attention.sliding_window", U(WINDOW) },
		  { ".attention.sliding_window", U(WINDOW + 1) } },
		{ "gpt-oss",
		  { ".attention.sliding_window_pattern", U(2) },
		  { ".attention.sliding_window_pattern", U(1) } },
	};

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		/* With zeros (or what they stand for) it is as without. */
		if (cases[i].none.what == ADD)
			assert_true(effect(cases[i].family, NULL, &cases[i].none) == 0.0f);
		if (!(effect(cases[i].family, &cases[i].none, &cases[i].some) > 1e-3f))
			fail_msg("%s: %s makes no difference", cases[i].family, cases[i].some.name);
	}
}

/* Two layers that see WINDOW positions each: the first id is out of sight of all but 2 * WINDOW - 1. */
static void test_window_hides(void **unused)
{
	static float a[N_IDS * N_VOCAB], b[N_IDS * N_VOCAB];
	/* Of a period only the last layer sees everything, and there are two. */
	struct model *m = MODEL("gpt-oss", { ".attention.sliding_window_pattern", U(3) });
	const size_t last = 2 * (WINDOW - 1);
	int32_t ids[N_IDS];

	(void)unused;
	make_ids(ids);
	eval(m, 2, ids, N_IDS, a);
	ids[0] = 5;
	eval(m, 2, ids, N_IDS, b);
	model_unref(m);
	assert_true(max_diff(a + last * N_VOCAB, b + last * N_VOCAB, N_VOCAB) > 1e-3f);
	/* Sums of the rest go another way where another expert was chosen for the first. */
	assert_true(max_diff(a + (last + 1) * N_VOCAB, b + (last + 1) * N_VOCAB,
			     (N_IDS - last - 1) * N_VOCAB) < 1e-5f);
}

/* Loading. */

static void test_table(void **unused)
{
	_cleanup_(freep) char *list = strdup(arch_list());
	size_t n = 0;

	(void)unused;
	for (char *rest = list, *name; (name = strsep(&rest, ",")); n++) {
		const struct arch *found;

		name += *name == ' ';
		found = arch_find(name, strlen(name));
		assert_non_null(found);
		assert_string_equal(found->name, name);
		assert_string_equal(families[n].name, name);
	}
	assert_int_equal(n, ARRAY_SIZE(families));
	assert_null(arch_find("llam", 4));
	assert_null(arch_find("llama4", 6));
	assert_null(arch_find("", 0));
}

static void test_what_is_loaded(void **unused)
{
	static const struct {
		const char *family, *cpu_only;
		uint32_t n_used, n_kv_layer;
		size_t recurrent;
	} want[] = {
		{ "qwen35moe", NULL, 2, 1, 3 * CHANNELS + N_HEAD_V * STATE * STATE },
		{ "qwen35", NULL, 0, 1, 3 * CHANNELS + N_HEAD_V * STATE * STATE },
		{ "qwen3moe", NULL, 2, 2, 0 },
		{ "qwen3", NULL, 0, 2, 0 },
		{ "llama", "rope on adjacent pairs", 0, 2, 0 },
		{ "gpt-oss", "attention sinks", 2, 2, 0 },
	};

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(want); i++) {
		struct model *m = MODEL(want[i].family);

		assert_int_equal(m->n_layer, N_LAYER);
		assert_int_equal(m->n_vocab, N_VOCAB);
		assert_int_equal(m->n_ctx_train, N_CTX);
		assert_int_equal(m->n_expert_used, want[i].n_used);
		assert_int_equal(m->catalog->n_blocks, want[i].n_used > 0 ? N_LAYER * N_EXP : 0);
		assert_int_equal(m->kv.n_layer, want[i].n_kv_layer);
		assert_int_equal(m->kv.n_head, N_KV);
		assert_int_equal(m->kv.k_dim, DIM);
		assert_int_equal(m->recurrent_floats, want[i].recurrent);
		assert_false(m->embd_tied);
		assert_null(m->bound);
		if (want[i].cpu_only)
			assert_string_equal(m->cpu_only, want[i].cpu_only);
		else
			assert_null(m->cpu_only);
		model_unref(m);
	}
}

static void test_defaults(void **unused)
{
	struct model *m = MODEL("llama", { ".attention.head_count_kv", GONE },
				{ "blk.0.attn_k.weight", NE(N_EMBD, N_HEAD * DIM) },
				{ "blk.0.attn_v.weight", NE(N_EMBD, N_HEAD * DIM) },
				{ "blk.1.attn_k.weight", NE(N_EMBD, N_HEAD * DIM) },
				{ "blk.1.attn_v.weight", NE(N_EMBD, N_HEAD * DIM) },
				{ ".rope.dimension_count", GONE }, { ".rope.freq_base", GONE },
				{ "output.weight", GONE });
	const struct decoder *d = m->arch_data;

	(void)unused;
	assert_int_equal(m->kv.n_head, N_HEAD);
	assert_int_equal(d->rope.n_rot, DIM);
	assert_true(fabsf(d->rope.freq[1] - powf(10000, -1.0f / 8)) < 1e-6f);
	assert_true(m->embd_tied);
	assert_ptr_equal(d->out, m->embd);
	model_unref(m);
	/* A head's size from the width. */
	m = MODEL("llama", { ".attention.key_length", GONE }, { ".attention.value_length", GONE },
		  { ".attention.head_count", U(2) }, { ".attention.head_count_kv", U(2) },
		  { "blk.0.attn_q.weight", NE(N_EMBD, N_EMBD) },
		  { "blk.0.attn_output.weight", NE(N_EMBD, N_EMBD) },
		  { "blk.1.attn_q.weight", NE(N_EMBD, N_EMBD) },
		  { "blk.1.attn_output.weight", NE(N_EMBD, N_EMBD) });
	assert_int_equal(m->kv.k_dim, N_EMBD / 2);
	model_unref(m);
}

static void test_llama_with_experts(void **unused)
{
	static float a[N_IDS * N_VOCAB], b[N_IDS * N_VOCAB];
	struct file f = file_of("qwen3moe");
	struct model *m = NULL;
	char *error = NULL;
	int32_t ids[N_IDS];

	(void)unused;
	f.family = "llama";
	for (int i = 0; i < N_LAYER; i++) {
		char name[2][48];

		snprintf(name[0], sizeof(name[0]), "blk.%d.attn_q_norm.weight", i);
		snprintf(name[1], sizeof(name[1]), "blk.%d.attn_k_norm.weight", i);
		change(&f, &(struct change){ name[0], GONE });
		change(&f, &(struct change){ name[1], GONE });
	}
	change(&f, &(struct change){ ".feed_forward_length", U(N_FF) });
	if (load(&f, &m, &error) < 0)
		fail_msg("%s", error);
	assert_int_equal(m->n_expert_used, 2);
	make_ids(ids);
	eval(m, 1, ids, N_IDS, a);
	eval(m, 2, ids, 3, b);
	assert_true(max_diff(a, b, N_IDS * N_VOCAB) < 1e-4f);
	model_unref(m);
}

/* Four pairs at 1, 0.1, 0.01, 0.001, and what the metadata make of them. */
static void check_rope(const char *family, const struct change *changes, size_t n, float mscale,
		       const float *want)
{
	struct model *m = load_changed(family, changes, n);
	const struct decoder *d = m->arch_data;

	assert_int_equal(d->rope.n_rot, 8);
	for (size_t k = 0; k < 4; k++)
		if (!(fabsf(d->rope.freq[k] - want[k]) <= 1e-6f * want[k]))
			fail_msg("pair %zu: %g instead of %g", k, (double)d->rope.freq[k],
				 (double)want[k]);
	assert_true(fabsf(d->rope.mscale - mscale) < 1e-6f);
	model_unref(m);
}

#define ROPE(family, mscale, a, b, c, d, ...)                                              \
	check_rope(family, (const struct change[]){ { NULL, .u = 0 }, __VA_ARGS__ },       \
		   ARRAY_SIZE(((const struct change[]){ { NULL, .u = 0 }, __VA_ARGS__ })), \
		   (mscale), (const float[]){ (a), (b), (c), (d) })

static void test_rope(void **unused)
{
	(void)unused;
	ROPE("llama", 1, 1, 0.1f, 0.01f, 0.001f);
	ROPE("llama", 1, 1, 0.1f, 0.01f, 0.001f, { ".rope.scaling.type", S("none") },
	     { ".rope.scaling.factor", F(4) });
	ROPE("llama", 1, 0.25f, 0.025f, 0.0025f, 0.00025f, { ".rope.scaling.factor", F(4) });
	ROPE("llama", 1, 0.5f, 0.05f, 0.005f, 0.0005f, { ".rope.scale_linear", F(2) });
	ROPE("llama", 1, 0.25f, 0.025f, 0.0025f, 0.00025f, { ".rope.scale_linear", F(2) },
	     { ".rope.scaling.factor", F(4) });
	ROPE("llama", 1, 1, 0.1f, 0.01f, 0.001f, { ".rope.scaling.factor", F(0) });
	ROPE("llama", 1.5f, 1, 0.1f, 0.01f, 0.001f, { ".rope.scaling.attn_factor", F(1.5f) });
	ROPE("llama", 1, 0.5f, 0.05f, 0.005f, 0.0005f, { "rope_freqs.weight", NEW(4), .f = 2 });
	/* 64 positions: 32 turns are before the first pair, 1 turn is at pair 1.008. 1 + ln 8 / 10. */
	ROPE("llama", 1.2079442f, 1, 0.05625f, 0.00125f, 0.000125f, { ".rope.scaling.type", S("yarn") },
	     { ".rope.scaling.factor", F(8) }, { ".rope.scaling.original_context_length", U(64) });
	/* The context that it was trained with, where nothing else is said. */
	ROPE("gpt-oss", 1.2079442f, 1, 0.05625f, 0.00125f, 0.000125f,
	     { ".rope.scaling.type", S("yarn") }, { ".rope.scaling.factor", F(8) });
	/* 8 ln(640 / 2 pi) / (2 ln 10000) = 2.008: the ramp ends at pair 3. */
	ROPE("llama", 1.2079442f, 1, 0.1f * 17 / 24, 0.01f * 10 / 24, 0.000125f,
	     { ".rope.scaling.type", S("yarn") }, { ".rope.scaling.factor", F(8) },
	     { ".rope.scaling.original_context_length", U(640) });
	ROPE("llama", 1, 1, 0.1f, 0.01f, 0.001f, { ".rope.scaling.type", S("yarn") });
}

static void test_scaled_rope_stays_on_the_cpu(void **unused)
{
	struct model *m = MODEL("qwen3", { ".rope.scaling.attn_factor", F(1.5f) });

	(void)unused;
	assert_string_equal(m->cpu_only, "scaled rope");
	model_unref(m);
	m = MODEL("qwen3", { "blk.1.attn_v.bias", NEW(N_KV * DIM) });
	assert_string_equal(m->cpu_only, "biases");
	model_unref(m);
}

/* What every family refuses, and what one does. */
static const struct refused {
	const char *family; /* NULL: all */
	struct change change;
	int error;
	const char *says;
} refused[] = {
	{ NULL, { ".block_count", GONE }, -EBADMSG, "block_count" },
	{ NULL, { ".block_count", U(0) }, -EBADMSG, "block_count" },
	{ NULL, { ".block_count", U(3) }, -EBADMSG, "blk.2." },
	{ NULL, { ".block_count", U(UINT32_MAX) }, -EBADMSG, "block_count" },
	{ NULL, { ".block_count", U(1) }, -EOPNOTSUPP, "'blk.1." },
	{ NULL, { ".block_count", A(GGUF_U32, 0) }, -EBADMSG, "block_count' is no 32-bit" },
	{ NULL, { ".nextn_predict_layers", U(0) }, 0, NULL },
	{ "qwen35", { ".nextn_predict_layers", U(1) }, 0, NULL },
	{ "qwen35moe", { ".nextn_predict_layers", U(1) }, 0, NULL },
	{ "qwen35", { ".nextn_predict_layers", U(2) }, -EBADMSG, "nextn_predict_layers" },
	{ "qwen35moe", { ".nextn_predict_layers", U(2) }, -EBADMSG, "nextn_predict_layers" },
	{ "qwen3moe", { ".nextn_predict_layers", U(1) }, -EOPNOTSUPP, "nextn_predict_layers" },
	{ "qwen3", { ".nextn_predict_layers", U(1) }, -EOPNOTSUPP, "nextn_predict_layers" },
	{ "llama", { ".nextn_predict_layers", U(1) }, -EOPNOTSUPP, "nextn_predict_layers" },
	{ "gpt-oss", { ".nextn_predict_layers", U(1) }, -EOPNOTSUPP, "nextn_predict_layers" },
	{ NULL, { ".context_length", GONE }, -EBADMSG, "context_length" },
	{ NULL, { ".context_length", U(0) }, -EBADMSG, "context_length" },
	{ NULL, { ".embedding_length", GONE }, -EBADMSG, "embedding_length" },
	{ NULL, { ".embedding_length", U(0) }, -EBADMSG, "embedding_length" },
	{ NULL, { ".embedding_length", U(31) }, -EBADMSG, "token_embd.weight" },
	{ NULL, { ".embedding_length", U(UINT32_MAX) }, -EBADMSG, "embedding_length" },
	{ NULL, { ".attention.head_count", GONE }, -EBADMSG, "head_count" },
	{ NULL, { ".attention.head_count", U(0) }, -EBADMSG, "head_count" },
	{ NULL, { ".attention.head_count", U(3) }, -EBADMSG, "heads" },
	{ NULL, { ".attention.head_count", U(8) }, -EBADMSG, "attn_q.weight" },
	{ NULL, { ".attention.head_count", S("4") }, -EBADMSG, "head_count" },
	{ NULL, { ".attention.head_count_kv", U(0) }, -EBADMSG, "head_count_kv" },
	{ NULL, { ".attention.head_count_kv", U(4) }, -EBADMSG, "attn_k.weight" },
	{ NULL, { ".attention.head_count_kv", A(GGUF_I32, N_KV, N_KV) }, 0, NULL },
	{ NULL, { ".attention.head_count_kv", A(GGUF_U32, 4, 4) }, -EBADMSG, "attn_k.weight" },
	{ NULL,
	  { ".attention.head_count_kv", A(GGUF_U32, N_KV, N_KV, 4) },
	  -EOPNOTSUPP,
	  "head_count_kv' differs by layer, which is not supported" },
	{ NULL,
	  { ".attention.head_count_kv", A(GGUF_I32, 0xffffffff, 0xffffffff) },
	  -EBADMSG,
	  "head_count_kv' is no 32-bit" },
	{ NULL,
	  { ".attention.head_count_kv", A(GGUF_I64, N_KV, 1ull << 32) },
	  -EBADMSG,
	  "head_count_kv' is no 32-bit" },
	{ NULL, { ".attention.head_count_kv", A(GGUF_BOOL, 1, 1) }, -EBADMSG, "head_count_kv' is no 32-bit" },
	{ NULL, { ".attention.head_count_kv", A(GGUF_F32, 0x40000000) }, -EBADMSG, "head_count_kv' is no 32-bit" },
	{ NULL, { ".attention.key_length", U(0) }, -EBADMSG, "key_length" },
	{ NULL, { ".attention.key_length", U(8) }, -EBADMSG, "value_length" },
	{ NULL, { ".attention.key_length", U(UINT32_MAX) }, -EBADMSG, "key_length" },
	{ NULL, { ".attention.value_length", U(8) }, -EBADMSG, "value_length" },
	{ NULL, { ".attention.layer_norm_rms_epsilon", GONE }, -EBADMSG, "epsilon" },
	{ NULL, { ".attention.layer_norm_rms_epsilon", F(-1) }, -EBADMSG, "epsilon" },
	{ NULL, { ".attention.layer_norm_rms_epsilon", F(NAN) }, -EBADMSG, "epsilon" },
	{ NULL, { ".attention.scale", F(0.5f) }, -EOPNOTSUPP, "attention.scale" },
	{ NULL, { ".attention.scale", F(0) }, 0, NULL },
	{ NULL, { ".rope.dimension_count", U(0) }, -EBADMSG, "dimension_count" },
	{ NULL, { ".rope.dimension_count", U(7) }, -EBADMSG, "dimension_count" },
	{ NULL, { ".rope.dimension_count", U(18) }, -EBADMSG, "dimension_count" },
	{ NULL, { ".rope.freq_base", F(0) }, -EBADMSG, "freq_base" },
	{ NULL, { ".rope.freq_base", F(INFINITY) }, -EBADMSG, "freq_base" },
	{ NULL, { ".rope.scaling.type", S("longrope") }, -EOPNOTSUPP, "rope.scaling.type" },
	{ NULL, { ".rope.scaling.type", S("") }, -EOPNOTSUPP, "rope.scaling.type" },
	{ NULL, { ".rope.scaling.type", U(1) }, -EBADMSG, "rope.scaling.type" },
	{ NULL, { ".rope.scaling.factor", F(-2) }, -EBADMSG, "rope.scaling.factor" },
	{ NULL, { ".rope.scaling.factor", F(1e-9f) }, -EBADMSG, "rope.scaling.factor" },
	{ NULL, { ".rope.scaling.factor", F(NAN) }, -EBADMSG, "rope.scaling.factor" },
	{ NULL, { ".rope.scaling.original_context_length", U(0) }, -EBADMSG, "original_context_length" },
	{ NULL, { ".rope.scaling.yarn_beta_fast", F(16) }, -EOPNOTSUPP, "yarn_beta_fast" },
	{ NULL, { ".rope.scaling.yarn_beta_fast", F(32) }, 0, NULL },
	{ NULL, { ".rope.scaling.yarn_beta_slow", F(2) }, -EOPNOTSUPP, "yarn_beta_slow" },
	{ NULL, { ".rope.scaling.yarn_beta_slow", F(1) }, 0, NULL },
	{ NULL, { ".rope.scaling.attn_factor", F(0) }, -EBADMSG, "attn_factor" },
	{ NULL, { "rope_freqs.weight", NEW(4) }, -EBADMSG, "rope_freqs.weight" },
	{ NULL, { "rope_freqs.weight", NEW(4), .f = NAN }, -EBADMSG, "rope_freqs.weight" },
	{ NULL, { "rope_freqs.weight", NEW(8), .f = 1 }, -EBADMSG, "rope_freqs.weight" },
	/* parts that nobody computes */
	{ NULL, { ".attention.clamp_kqv", F(8) }, -EOPNOTSUPP, "attention.clamp_kqv" },
	{ NULL, { ".attention.clamp_kqv", F(0) }, 0, NULL },
	{ NULL, { ".attention.max_alibi_bias", F(8) }, -EOPNOTSUPP, "max_alibi_bias" },
	{ NULL, { ".attention.causal", B(true) }, 0, NULL },
	{ NULL, { ".attention.causal", B(false) }, -EOPNOTSUPP, "attention.causal" },
	{ NULL, { ".expert_weights_norm", B(false) }, -EOPNOTSUPP, "expert_weights_norm" },
	{ NULL, { ".expert_weights_norm", B(true) }, 0, NULL },
	{ NULL, { ".attention.clamp_kqv", S("no") }, -EOPNOTSUPP, "attention.clamp_kqv" },
	{ NULL, { ".residual_scale", F(0.2f) }, -EOPNOTSUPP, "residual_scale" },
	{ NULL, { ".embedding_scale", F(12) }, -EOPNOTSUPP, "embedding_scale" },
	{ NULL, { ".logit_scale", F(0.1f) }, -EOPNOTSUPP, "logit_scale" },
	{ NULL, { ".logit_scale", F(1) }, 0, NULL },
	{ NULL, { ".attn_logit_softcapping", F(30) }, -EOPNOTSUPP, "attn_logit_softcapping" },
	{ NULL, { ".expert_weights_scale", F(2.5f) }, -EOPNOTSUPP, "expert_weights_scale" },
	{ NULL, { ".rope.scaling.yarn_log_multiplier", F(0.1f) }, -EOPNOTSUPP, "yarn_log_multiplier" },
	{ NULL, { ".leading_dense_block_count", U(1) }, -EOPNOTSUPP, "leading_dense_block_count" },
	{ NULL, { "output.bias", NEW(N_VOCAB) }, -EOPNOTSUPP, "'output.bias'" },
	{ NULL, { "blk.0.attn_norm.bias", NEW(N_EMBD) }, -EOPNOTSUPP, "'blk.0.attn_norm.bias'" },
	{ NULL, { "blk.1.e\033vil\n", NEW(1) }, -EOPNOTSUPP, "'blk.1.e vil '" },
	{ NULL, { "blk.2.attn_norm.bias", NEW(N_EMBD) }, -EOPNOTSUPP, "'blk.2.attn_norm.bias'" },
	{ "llama", { ".attention.sliding_window", U(128) }, -EOPNOTSUPP, "sliding_window" },
	{ "qwen3", { ".attention.sliding_window", U(128) }, -EOPNOTSUPP, "sliding_window" },
	{ "llama", { "blk.0.attn_sinks.weight", NEW(N_HEAD) }, -EOPNOTSUPP, "attn_sinks" },
	{ "llama", { "blk.0.attn_q_norm.weight", NEW(DIM) }, -EOPNOTSUPP, "attn_q_norm" },
	{ "llama", { "blk.0.ffn_gate_exps.weight", NEW(N_EMBD, N_FF, 4) }, -EOPNOTSUPP, "ffn_gate_exps" },
	/* tensors */
	{ NULL, { "token_embd.weight", GONE }, -EBADMSG, "token_embd.weight" },
	{ NULL, { "token_embd.weight", NE(N_EMBD, 3) }, -EBADMSG, "output.weight" },
	{ NULL, { "output_norm.weight", GONE }, -EBADMSG, "output_norm.weight" },
	{ NULL, { "blk.1.attn_norm.weight", GONE }, -EBADMSG, "'blk.1.attn_norm.weight' is missing" },
	{ NULL, { "blk.1.attn_norm.weight", NE(16) }, -EBADMSG, "has shape [16]" },
	{ NULL, { "blk.1.attn_norm.weight", U(QUANT_F16) }, -EOPNOTSUPP, "type F16, only F32" },
	{ NULL, { "blk.1.attn_k.weight", GONE }, -EBADMSG, "attn_k.weight" },
	{ NULL, { "blk.1.attn_k.weight", NE(N_EMBD, N_KV *DIM + 1) }, -EBADMSG, "attn_k.weight" },
	{ "qwen3", { "blk.0.attn_q_norm.weight", GONE }, -EBADMSG, "attn_q_norm" },
	{ "qwen3", { "blk.0.attn_q_norm.weight", NE(8) }, -EBADMSG, "attn_q_norm" },
	{ "llama", { "blk.0.attn_q.bias", NEW(8) }, -EBADMSG, "attn_q.bias" },
	/* dense */
	{ "llama", { ".feed_forward_length", GONE }, -EBADMSG, "feed_forward_length" },
	{ "qwen3", { ".feed_forward_length", U(0) }, -EBADMSG, "feed_forward_length" },
	{ "qwen35", { ".feed_forward_length", U(49) }, -EBADMSG, "ffn_gate.weight" },
	{ "qwen35", { ".feed_forward_length", U(UINT32_MAX) }, -EBADMSG, "feed_forward_length" },
	{ "llama", { "blk.0.ffn_down.weight", NE(N_EMBD, N_FF) }, -EBADMSG, "ffn_down.weight" },
	{ "llama", { "blk.0.ffn_up.weight", GONE }, -EBADMSG, "ffn_up.weight" },
	{ "llama", { ".expert_count", U(4) }, -EBADMSG, "expert_used_count" },
	{ "llama", { ".expert_count", U(UINT32_MAX) }, -EBADMSG, "expert_count" },
	/* experts */
	{ "qwen3moe", { ".expert_count", GONE }, -EBADMSG, "expert_count" },
	{ "qwen3moe", { ".expert_count", U(0) }, -EBADMSG, "expert_count" },
	{ "qwen3moe", { ".expert_count", U(5) }, -EBADMSG, "ffn_gate_inp" },
	{ "qwen3moe", { ".expert_used_count", U(5) }, -EBADMSG, "expert_used_count" },
	{ "qwen3moe", { ".expert_used_count", U(0) }, -EBADMSG, "expert_used_count" },
	{ "qwen3moe", { ".expert_feed_forward_length", GONE }, -EBADMSG, "expert_feed_forward_length" },
	{ "qwen3moe", { ".expert_feed_forward_length", U(47) }, -EBADMSG, "ffn_" },
	{ "qwen3moe", { ".expert_gating_func", U(2) }, -EBADMSG, "expert_gating_func" },
	{ "qwen3moe", { ".expert_gating_func", U(1) }, 0, NULL },
	{ "qwen3moe", { "blk.1.ffn_down_exps.weight", GONE }, -EBADMSG, "ffn_down_exps" },
	{ "qwen3moe", { "blk.1.ffn_up_exps.weight", NE(N_EMBD, N_FF, 3) }, -EBADMSG, "ffn_up_exps" },
	{ "qwen3moe", { "blk.1.ffn_gate_exps.bias", NEW(N_FF, N_EXP) }, -EOPNOTSUPP, "ffn_gate_exps.bias" },
	{ "gpt-oss", { ".expert_count", U(0) }, -EBADMSG, "expert_count" },
	{ "gpt-oss", { ".expert_used_count", U(5) }, -EBADMSG, "expert_used_count" },
	{ "gpt-oss", { ".expert_gating_func", U(1) }, -EBADMSG, "expert_gating_func" },
	{ "gpt-oss", { ".expert_gating_func", U(3) }, 0, NULL },
	{ "gpt-oss", { ".attention.sliding_window", GONE }, -EBADMSG, "sliding_window" },
	{ "gpt-oss", { ".attention.sliding_window", U(0) }, -EBADMSG, "sliding_window" },
	{ "gpt-oss", { ".attention.sliding_window", U(UINT32_MAX) }, -EBADMSG, "sliding_window" },
	{ "gpt-oss", { ".attention.sliding_window_pattern", U(0) }, -EBADMSG, "sliding_window_pattern" },
	{ "gpt-oss", { ".rope.freq_base_swa", F(500) }, -EOPNOTSUPP, "freq_base_swa" },
	{ "gpt-oss", { "blk.0.attn_q.bias", GONE }, -EBADMSG, "'blk.0.attn_q.bias' is missing" },
	{ "gpt-oss", { "blk.0.attn_k.bias", GONE }, -EBADMSG, "'blk.0.attn_k.bias' is missing" },
	{ "gpt-oss", { "blk.1.attn_v.bias", GONE }, -EBADMSG, "'blk.1.attn_v.bias' is missing" },
	{ "gpt-oss", { "blk.1.attn_output.bias", GONE }, -EBADMSG, "attn_output.bias' is missing" },
	{ "gpt-oss", { "blk.0.attn_sinks.weight", GONE }, -EBADMSG, "attn_sinks" },
	{ "gpt-oss", { "blk.0.attn_sinks.weight", NE(N_HEAD - 1) }, -EBADMSG, "attn_sinks" },
	{ "gpt-oss", { "blk.0.ffn_gate_inp.bias", GONE }, -EBADMSG, "ffn_gate_inp.bias" },
	{ "gpt-oss", { "blk.0.ffn_up_exps.bias", GONE }, -EBADMSG, "ffn_up_exps.bias" },
	{ "gpt-oss", { "blk.0.ffn_down_exps.bias", NE(N_FF, N_EXP) }, -EBADMSG, "ffn_down_exps.bias" },
	{ "gpt-oss", { "blk.0.ffn_down_exps.bias", NE(N_EMBD) }, -EBADMSG, "ffn_down_exps.bias" },
	/* delta nets */
	{ "qwen35", { ".ssm.group_count", U(0) }, -EBADMSG, "group_count" },
	{ "qwen35", { ".ssm.group_count", U(3) }, -EBADMSG, "group_count" },
	{ "qwen35", { ".ssm.time_step_rank", U(6) }, -EBADMSG, "inner_size" },
	{ "qwen35", { ".ssm.state_size", GONE }, -EBADMSG, "state_size" },
	{ "qwen35", { ".ssm.state_size", U(4096) }, -EBADMSG, "attn_qkv" },
	{ "qwen35", { ".ssm.inner_size", U(0) }, -EBADMSG, "inner_size" },
	{ "qwen35", { ".ssm.conv_kernel", U(1) }, -EBADMSG, "conv_kernel" },
	{ "qwen35", { ".full_attention_interval", U(0) }, -EBADMSG, "full_attention_interval" },
	{ "qwen35", { ".full_attention_interval", U(1) }, -EBADMSG, "blk.0." },
	{ "qwen35", { ".attention.recurrent_layers", B(true) }, -EBADMSG, "recurrent_layers' is no array" },
	{ "qwen35", { ".attention.recurrent_layers", A(GGUF_BOOL, 1, 1, 1) }, -EBADMSG, "recurrent_layers" },
	{ "qwen35", { ".attention.recurrent_layers", A(GGUF_F32, 1, 1) }, -EBADMSG, "recurrent_layers" },
	{ "qwen35", { "blk.0.ssm_a", GONE }, -EBADMSG, "ssm_a" },
	{ "qwen35", { "blk.1.attn_q.weight", NE(N_EMBD, N_HEAD *DIM) }, -EBADMSG, "attn_q.weight" },
	{ "qwen35moe", { ".expert_shared_feed_forward_length", GONE }, -EBADMSG, "expert_shared" },
	{ "qwen35moe", { "blk.0.ffn_up_shexp.weight", GONE }, -EBADMSG, "ffn_up_shexp" },
};

static void check_refused(const char *family, const struct refused *c)
{
	struct file f = file_of(family);
	struct model *m = NULL;
	char *error = NULL;
	int r;

	change(&f, &c->change);
	r = load(&f, &m, &error);
	if (r != c->error || (r < 0 && (!error || !strstr(error, c->says) || strchr(error, '\n'))))
		fail_msg("%s, %s: %d, '%s'", family, c->change.name, r, error ? error : "");
	assert_true((r == 0) == (m != NULL));
	model_unref(m);
	free(error);
}

static void test_refused(void **unused)
{
	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(refused); i++)
		for (size_t k = 0; k < ARRAY_SIZE(families); k++)
			if (!refused[i].family || streq(refused[i].family, families[k].name))
				check_refused(families[k].name, &refused[i]);
}

/* Layers for multi-token prediction may have what they like, and no other name passes for theirs. */
static void test_layers_that_do_not_run(void **unused)
{
	static const struct {
		const char *name;
		int error;
	} cases[] = {
		{ "blk.1.nextn.eh_proj.weight", 0 },
		{ "blk.0.nextn.eh_proj.weight", -EOPNOTSUPP },
		{ "blk.2.attn_norm.bias", -EOPNOTSUPP },
		{ "blk.-1.attn_norm.bias", -EOPNOTSUPP },
		{ "blk.+1.attn_norm.bias", -EOPNOTSUPP },
		{ "blk. 1.attn_norm.bias", -EOPNOTSUPP },
		{ "blk.01.attn_norm.bias", -EOPNOTSUPP },
		{ "blk.18446744073709551617.attn_norm", -EOPNOTSUPP },
		{ "blk.1", -EOPNOTSUPP },
		{ "blk.1_attn_norm.bias", -EOPNOTSUPP },
	};

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct file f = file_of("qwen35");
		struct model *m = NULL;
		char *error = NULL;
		int r;

		change(&f, &(struct change){ ".nextn_predict_layers", U(1) });
		change(&f, &(struct change){ cases[i].name, NEW(N_EMBD) });
		r = load(&f, &m, &error);
		if (r != cases[i].error || (r < 0 && (!error || !strstr(error, cases[i].name))))
			fail_msg("%s: %d, '%s'", cases[i].name, r, error ? error : "");
		assert_true((r == 0) == (m != NULL));
		if (m) {
			assert_int_equal(m->n_layer, N_LAYER - 1);
			assert_int_equal(m->n_block, N_LAYER);
		}
		model_unref(m);
		free(error);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_table),
		cmocka_unit_test(test_what_is_loaded),
		cmocka_unit_test(test_defaults),
		cmocka_unit_test(test_llama_with_experts),
		cmocka_unit_test(test_rope),
		cmocka_unit_test(test_scaled_rope_stays_on_the_cpu),
		cmocka_unit_test(test_batches),
		cmocka_unit_test(test_optional_parts_count),
		cmocka_unit_test(test_window_hides),
		cmocka_unit_test(test_refused),
		cmocka_unit_test(test_layers_that_do_not_run),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
