/* SPDX-License-Identifier: MIT */
/*
 * The model graph against reference logits of another implementation (reference.json, see
 * tests/models/README.md), and against itself: batches, sequences together, threads, clones,
 * rewinding, failures; hostile metadata.
 *
 * The F32 model is in ../shared (or $RESIDENTD_SHARED); tests that need it skip without. The Q8_0
 * one is in tests/models.
 */
#include "tests/test.h"

#include "daemon/engine/graph.h"
#include "daemon/model/model.h"

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define F32_FILE      "tiny-qwen35moe-stories-f32.gguf"
#define Q8_0_FILE     "tiny-qwen35moe-stories-q8_0.gguf"
#define N_VOCAB       2048
#define N_PROMPT      300
/*
 * Batches of F32 weights differ by the order of sums only; the reference is another implementation.
 */
#define F32_TOLERANCE 1e-3f
/*
 * With 8-bit activations the last bit of a sum can move an activation by a whole step, and a near
 * tie in the router then picks another expert. llama.cpp differs from itself by 0.05 rms over all
 * positions (its batch of 1 against 512), a flipped position by up to 20 times that. A best token
 * that leads by more than this must stay the best.
 */
#define QUANT_MARGIN  1.0f

struct rig {
	struct model *m;
	struct backend *b;
	struct kv_arena *a;
};

static struct model *f32_model, *q8_model;
static json_t *prompts;
static int32_t long_prompt[N_PROMPT];
static float *logits_a, *logits_b; /* N_PROMPT positions each */

static const char *find_file(const char *name, char *path, size_t size)
{
	const char *shared = getenv("RESIDENTD_SHARED");

	snprintf(path, size, "%s/models/%s", shared ? shared : "../shared", name);
	if (access(path, R_OK) < 0)
		snprintf(path, size, "tests/models/%s", name);
	return access(path, R_OK) < 0 ? NULL : path;
}

static struct model *load(const char *name)
{
	char path[4096], *error = NULL;
	struct model *m = NULL;

	if (!find_file(name, path, sizeof(path)))
		return NULL;
	if (model_load(path, &m, &error) < 0)
		fail_msg("%s", error ? error : "no error text");
	return m;
}

static int setup(void **unused)
{
	char path[4096];
	json_t *root, *prompt;
	size_t i, n = 0;

	(void)unused;
	if (!find_file("reference.json", path, sizeof(path)))
		return -1;
	root = json_load_file(path, 0, NULL);
	prompts = json_incref(json_object_get(root, "prompts"));
	json_decref(root);
	if (json_array_size(prompts) != 8)
		return -1;
	while (n < N_PROMPT)
		json_array_foreach(prompts, i, prompt) {
			json_t *ids = json_object_get(prompt, "ids"),
			       *greedy = json_object_get(prompt, "greedy");

			for (size_t k = 0; k < json_array_size(ids) && n < N_PROMPT; k++)
				long_prompt[n++] = (int32_t)json_integer_value(json_array_get(ids, k));
			for (size_t k = 0; k < json_array_size(greedy) && n < N_PROMPT; k++)
				long_prompt[n++] =
					(int32_t)json_integer_value(json_array_get(greedy, k));
		}
	logits_a = malloc(N_PROMPT * N_VOCAB * sizeof(float));
	logits_b = malloc(N_PROMPT * N_VOCAB * sizeof(float));
	f32_model = load(F32_FILE);
	q8_model = load(Q8_0_FILE);
	return logits_a && logits_b && q8_model ? 0 : -1;
}

static int teardown(void **unused)
{
	(void)unused;
	model_unref(f32_model);
	model_unref(q8_model);
	json_decref(prompts);
	free(logits_a);
	free(logits_b);
	return 0;
}

static struct rig rig_new(struct model *m, unsigned threads, bool f16, size_t n_pages)
{
	struct rig r = { .m = m };
	size_t page;

	assert_int_equal(kv_arena_new(&m->kv, f16, (size_t)1 << 24, &r.a), 0);
	page = kv_arena_page_bytes(r.a);
	kv_arena_free(r.a);
	assert_int_equal(kv_arena_new(&m->kv, f16, n_pages * page, &r.a), 0);
	assert_int_equal(backend_cpu_new(threads, graph_scratch_bytes(m, N_PROMPT + 16), NULL, &r.b), 0);
	return r;
}

static void rig_done(struct rig *r)
{
	assert_int_equal(kv_arena_n_free(r->a), kv_arena_n_pages(r->a));
	r->b->ops->free(r->b);
	kv_arena_free(r->a);
}

static struct state *new_state(void)
{
	struct state *s;

	assert_int_equal(state_new(&s), 0);
	return s;
}

/* Evaluates ids in batches of `batch` and writes the logits of every position. */
static void eval(struct rig *r, struct state *s, const int32_t *ids, size_t n, size_t batch, float *logits)
{
	for (size_t at = 0; at < n; at += batch) {
		struct graph_seq q = { .state = s,
				       .tokens = ids + at,
				       .n_tok = MIN(batch, n - at),
				       .want = logits ? GRAPH_WANT_ALL : GRAPH_WANT_NONE };
		size_t before = s->n_tok;

		assert_int_equal(graph_forward(r->m, r->b, r->a, &q, 1, NULL,
					       logits ? logits + at * N_VOCAB : NULL),
				 0);
		assert_int_equal(s->n_tok, before + q.n_tok);
	}
}

static float max_diff(const float *a, const float *b, size_t n_pos)
{
	float max = 0;

	for (size_t i = 0; i < n_pos * N_VOCAB; i++)
		max = fmaxf(max, isfinite(a[i] - b[i]) ? fabsf(a[i] - b[i]) : INFINITY);
	return max;
}

static int32_t best_of(const float *logits, float *ret_margin)
{
	int32_t best = 0;
	float second = -INFINITY;

	for (int32_t i = 1; i < N_VOCAB; i++)
		if (logits[i] > logits[best])
			best = i;
	for (int32_t i = 0; i < N_VOCAB; i++)
		if (i != best)
			second = fmaxf(second, logits[i]);
	if (ret_margin)
		*ret_margin = logits[best] - second;
	return best;
}

/* Same best token wherever it leads clearly; most positions must be such. */
static void assert_same_best(const float *a, const float *b, size_t n_pos)
{
	size_t n_clear = 0;

	for (size_t i = 0; i < n_pos; i++) {
		float margin;
		int32_t best = best_of(a + i * N_VOCAB, &margin);

		if (margin < QUANT_MARGIN)
			continue;
		n_clear++;
		assert_int_equal(best_of(b + i * N_VOCAB, NULL), best);
	}
	assert_true(n_clear > n_pos / 2);
}

#define need_f32()                                                         \
	do {                                                               \
		if (!f32_model)                                            \
			skip_because("%s is in ../shared only", F32_FILE); \
	} while (0)

/* The reference. */

static void check_top8(const json_t *step, const float *logits)
{
	size_t k;
	json_t *pair;

	assert_int_equal(json_array_size(step), 8);
	json_array_foreach(step, k, pair) {
		size_t id = (size_t)json_integer_value(json_array_get(pair, 0));
		float want = (float)json_number_value(json_array_get(pair, 1));

		assert_true(fabsf(logits[id] - want) <= F32_TOLERANCE);
	}
}

static void test_reference_f32(void **unused)
{
	struct rig r;
	json_t *prompt;
	size_t p;

	(void)unused;
	need_f32();
	r = rig_new(f32_model, 2, false, 16);
	json_array_foreach(prompts, p, prompt) {
		json_t *ids = json_object_get(prompt, "ids"),
		       *greedy = json_object_get(prompt, "f32_greedy");
		struct state *s = new_state();
		int32_t in[64];
		size_t n = json_array_size(ids);

		assert_in_range(n, 1, ARRAY_SIZE(in));
		assert_int_equal(json_array_size(greedy), 32);
		for (size_t i = 0; i < n; i++)
			in[i] = (int32_t)json_integer_value(json_array_get(ids, i));
		for (size_t step = 0; step < 32; step++) {
			struct graph_seq q = { s, in, n, GRAPH_WANT_LAST };

			assert_int_equal(graph_forward(r.m, r.b, r.a, &q, 1, NULL, logits_a), 0);
			check_top8(json_array_get(json_object_get(prompt, "f32_top8"), step), logits_a);
			in[0] = best_of(logits_a, NULL);
			n = 1;
			assert_int_equal(in[0], json_integer_value(json_array_get(greedy, step)));
		}
		state_free(s, r.a);
	}
	rig_done(&r);
}

static void test_reference_q8_0(void **unused)
{
	struct rig r = rig_new(q8_model, 2, true, 16);
	size_t p, n_same = 0, n_all = 0;
	json_t *prompt;

	(void)unused;
	json_array_foreach(prompts, p, prompt) {
		json_t *ids = json_object_get(prompt, "ids"),
		       *greedy = json_object_get(prompt, "greedy");
		size_t n = json_array_size(ids);
		struct state *s = new_state();
		int32_t in[96];

		assert_in_range(n, 1, 64);
		for (size_t i = 0; i < n; i++)
			in[i] = (int32_t)json_integer_value(json_array_get(ids, i));
		for (size_t i = 0; i < 31; i++)
			in[n + i] = (int32_t)json_integer_value(json_array_get(greedy, i));
		eval(&r, s, in, n + 31, n, logits_a);
		for (size_t i = 0; i < 32; i++, n_all++)
			n_same += best_of(logits_a + (n - 1 + i) * N_VOCAB, NULL) ==
				  json_integer_value(json_array_get(greedy, i));
		state_free(s, r.a);
	}
	assert_int_equal(n_all, 256);
	assert_true(n_same * 100 >= n_all * 98);
	rig_done(&r);
}

/* The graph against itself. */

static void test_batches_f32(void **unused)
{
	static const size_t batches[] = { 1, 7, 63, 64, 65, 128 };
	struct rig r;
	struct state *s = new_state();

	(void)unused;
	need_f32();
	r = rig_new(f32_model, 2, false, 16);
	eval(&r, s, long_prompt, N_PROMPT, N_PROMPT, logits_a);
	state_reset(s, r.a);
	for (size_t i = 0; i < ARRAY_SIZE(batches); i++) {
		memset(logits_b, 0xff, N_PROMPT * N_VOCAB * sizeof(float));
		eval(&r, s, long_prompt, N_PROMPT, batches[i], logits_b);
		assert_true(max_diff(logits_a, logits_b, N_PROMPT) <= F32_TOLERANCE);
		state_reset(s, r.a);
	}
	state_free(s, r.a);
	rig_done(&r);
}

static void test_batches_q8_0(void **unused)
{
	static const size_t batches[] = { 1, 65 };
	struct rig r = rig_new(q8_model, 2, true, 16);
	struct state *s = new_state();

	(void)unused;
	eval(&r, s, long_prompt, N_PROMPT, N_PROMPT, logits_a);
	state_reset(s, r.a);
	for (size_t i = 0; i < ARRAY_SIZE(batches); i++) {
		eval(&r, s, long_prompt, N_PROMPT, batches[i], logits_b);
		assert_same_best(logits_a, logits_b, N_PROMPT);
		state_reset(s, r.a);
	}
	state_free(s, r.a);
	rig_done(&r);
}

/*
 * Three sequences, at different positions, one of them only one token, in one batch; who wants what
 * differs too.
 */
static void test_sequences_together(void **unused)
{
	struct model *m = f32_model ? f32_model : q8_model;
	struct rig r = rig_new(m, 2, false, 16);
	struct state *s[3] = { new_state(), new_state(), new_state() };
	float *alone = logits_a, *both = logits_b;
	const struct graph_seq seqs[] = {
		{ s[0], long_prompt + 40, 70, GRAPH_WANT_ALL },
		{ s[1], long_prompt + 10, 1, GRAPH_WANT_LAST },
		{ s[2], long_prompt + 5, 30, GRAPH_WANT_LAST },
	};

	(void)unused;
	for (int together = 0; together < 2; together++) {
		eval(&r, s[0], long_prompt, 40, 40, NULL);
		eval(&r, s[1], long_prompt, 10, 10, NULL);
		eval(&r, s[2], long_prompt, 5, 5, NULL);
		if (together) {
			assert_int_equal(graph_forward(r.m, r.b, r.a, seqs, 3, NULL, both), 0);
		} else {
			assert_int_equal(graph_forward(r.m, r.b, r.a, &seqs[0], 1, NULL, alone), 0);
			assert_int_equal(graph_forward(r.m, r.b, r.a, &seqs[1], 1, NULL,
						       alone + 70 * N_VOCAB),
					 0);
			assert_int_equal(graph_forward(r.m, r.b, r.a, &seqs[2], 1, NULL,
						       alone + 71 * N_VOCAB),
					 0);
		}
		assert_int_equal(s[0]->n_tok, 110);
		assert_int_equal(s[1]->n_tok, 11);
		assert_int_equal(s[2]->n_tok, 35);
		for (size_t i = 0; i < 3; i++)
			state_reset(s[i], r.a);
	}
	if (f32_model)
		assert_true(max_diff(alone, both, 72) <= F32_TOLERANCE);
	else
		assert_same_best(alone, both, 72);
	for (size_t i = 0; i < 3; i++)
		state_free(s[i], r.a);
	rig_done(&r);
}

static void test_threads_make_no_difference(void **unused)
{
	float *out[] = { logits_a, logits_b };

	(void)unused;
	for (unsigned threads = 1; threads <= 2; threads++) {
		struct rig r = rig_new(q8_model, threads, true, 16);
		struct state *s = new_state();

		eval(&r, s, long_prompt, 200, 200, out[threads - 1]);
		eval(&r, s, long_prompt + 200, 20, 1, out[threads - 1] + 200 * N_VOCAB);
		state_free(s, r.a);
		rig_done(&r);
	}
	assert_memory_equal(logits_a, logits_b, 220 * N_VOCAB * sizeof(float));
}

static void test_kernels_agree(void **unused)
{
	struct model *models[] = { f32_model, q8_model };

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(models); i++) {
		struct rig fast, ref;
		struct state *s = new_state();

		if (!models[i])
			continue;
		setenv("RESIDENTD_CPU", "ref", 1);
		ref = rig_new(models[i], 2, false, 8);
		unsetenv("RESIDENTD_CPU");
		assert_string_equal(backend_cpu_isa(ref.b), "ref");
		eval(&ref, s, long_prompt, 100, 70, logits_a);
		state_reset(s, ref.a);
		fast = rig_new(models[i], 2, false, 8);
		eval(&fast, s, long_prompt, 100, 70, logits_b);
		state_free(s, fast.a);
		if (models[i] == f32_model)
			assert_true(max_diff(logits_a, logits_b, 100) <= F32_TOLERANCE);
		else
			assert_same_best(logits_a, logits_b, 100);
		rig_done(&fast);
		rig_done(&ref);
	}
}

static void test_clone_and_rewind(void **unused)
{
	struct rig r = rig_new(q8_model, 2, true, 16);
	struct state *s = new_state(), *c;

	(void)unused;
	eval(&r, s, long_prompt, 50, 50, NULL);
	assert_int_equal(state_checkpoint(s, r.m, r.a), 0);
	eval(&r, s, long_prompt + 50, 20, 1, NULL);
	assert_int_equal(state_clone(s, r.m, r.a, &c), 0);
	/* The clone goes another way first: nothing of that may show. */
	eval(&r, c, long_prompt + 100, 30, 30, logits_b);
	eval(&r, s, long_prompt + 70, 30, 1, logits_a);
	assert_int_equal(state_rewind(c, r.m, r.a, 60), 50);
	eval(&r, c, long_prompt + 50, 20, 1, NULL);
	eval(&r, c, long_prompt + 70, 30, 1, logits_b);
	assert_memory_equal(logits_a, logits_b, 30 * N_VOCAB * sizeof(float));
	state_free(c, r.a);
	assert_int_equal(state_rewind(s, r.m, r.a, 49), 0);
	assert_int_equal(s->n_tok, 0);
	state_free(s, r.a);
	rig_done(&r);
}

/* Failures. */

static void test_abort_resets(void **unused)
{
	struct rig r = rig_new(q8_model, 2, true, 16);
	struct state *s = new_state(), *other = new_state();
	atomic_bool abort = true;
	struct graph_seq q = { s, long_prompt, 40, GRAPH_WANT_LAST },
			 p = { other, long_prompt, 40, GRAPH_WANT_LAST };

	(void)unused;
	eval(&r, s, long_prompt, 10, 10, NULL);
	assert_int_equal(graph_forward(r.m, r.b, r.a, &p, 1, NULL, logits_a), 0);
	assert_int_equal(graph_forward(r.m, r.b, r.a, &q, 1, &abort, logits_b), -ECANCELED);
	assert_int_equal(s->n_tok, 0);
	assert_null(s->recurrent);
	assert_int_equal(s->kv.n_pages, 0);
	assert_int_equal(other->n_tok, 40);
	atomic_store(&abort, false);
	assert_int_equal(graph_forward(r.m, r.b, r.a, &q, 1, &abort, logits_b), 0);
	assert_memory_equal(logits_a, logits_b, N_VOCAB * sizeof(float));
	state_free(s, r.a);
	state_free(other, r.a);
	rig_done(&r);
}

static void test_full_arena_changes_nothing(void **unused)
{
	struct rig r = rig_new(q8_model, 2, true, 5);
	struct state *s = new_state(), *fresh = new_state();
	const struct graph_seq seqs[] = {
		{ s, long_prompt + 100, 40, GRAPH_WANT_LAST }, /* takes the last page */
		{ fresh, long_prompt, 33, GRAPH_WANT_LAST },
	};
	struct graph_seq one = { s, long_prompt + 100, 61, GRAPH_WANT_LAST };

	(void)unused;
	eval(&r, fresh, long_prompt, 100, 100, NULL);
	eval(&r, fresh, long_prompt + 100, 10, 1, logits_a);
	state_reset(fresh, r.a);
	eval(&r, s, long_prompt, 100, 100, NULL);
	assert_int_equal(kv_arena_n_free(r.a), 1);
	assert_int_equal(graph_forward(r.m, r.b, r.a, &one, 1, NULL, logits_b), -ENOSPC);
	assert_int_equal(graph_forward(r.m, r.b, r.a, seqs, 2, NULL, logits_b), -ENOSPC);
	assert_int_equal(kv_arena_n_free(r.a), 1);
	assert_int_equal(s->n_tok, 100);
	assert_int_equal(s->kv.n_pages, 4);
	assert_int_equal(fresh->n_tok, 0);
	assert_null(fresh->recurrent);
	eval(&r, s, long_prompt + 100, 10, 1, logits_b);
	assert_memory_equal(logits_a, logits_b, 10 * N_VOCAB * sizeof(float));
	state_free(s, r.a);
	state_free(fresh, r.a);
	rig_done(&r);
}

static void test_bad_arguments(void **unused)
{
	static const int32_t bad[][2] = { { 1, -1 }, { 1, N_VOCAB }, { INT32_MIN, 1 } };
	struct rig r = rig_new(q8_model, 1, true, 16);
	struct backend *tiny;
	struct state *s = new_state();
	struct graph_seq q = { s, long_prompt, N_PROMPT, GRAPH_WANT_NONE };

	(void)unused;
	assert_int_equal(graph_forward(r.m, r.b, r.a, &q, 0, NULL, NULL), -EINVAL);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		struct graph_seq b = { s, bad[i], 2, GRAPH_WANT_LAST };

		assert_int_equal(graph_forward(r.m, r.b, r.a, &b, 1, NULL, logits_a), -EINVAL);
		assert_int_equal(s->n_tok, 0);
	}
	/* Scratch for one row does not hold 300: a clean error, and one row still works. */
	assert_int_equal(backend_cpu_new(1, graph_scratch_bytes(r.m, 1), NULL, &tiny), 0);
	assert_int_equal(graph_forward(r.m, tiny, r.a, &q, 1, NULL, NULL), -ENOMEM);
	assert_int_equal(s->n_tok, 0);
	q.n_tok = 1;
	assert_int_equal(graph_forward(r.m, tiny, r.a, &q, 1, NULL, NULL), 0);
	tiny->ops->free(tiny);
	state_free(s, r.a);
	rig_done(&r);
}

/*
 * What graph_scratch_bytes() says is enough, even without most of its constant part, which would
 * hide a wrong sum.
 */
static void test_scratch_is_enough(void **unused)
{
	static const size_t rows[] = { 1, 3, 17, 33, 100, N_PROMPT - 1 };
	struct model *models[] = { f32_model, q8_model };

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(models); i++) {
		struct rig r;
		struct state *s;

		if (!models[i])
			continue;
		r = rig_new(models[i], 2, true, 16);
		s = new_state();
		for (size_t k = 0; k < ARRAY_SIZE(rows); k++) {
			struct graph_seq q = { s, long_prompt, rows[k], GRAPH_WANT_ALL };
			size_t bytes = graph_scratch_bytes(r.m, rows[k]) -
				       graph_scratch_bytes(r.m, 0) + 65536;
			struct backend *b;

			assert_int_equal(backend_cpu_new(2, bytes, NULL, &b), 0);
			assert_int_equal(graph_forward(r.m, b, r.a, &q, 1, NULL, logits_a), 0);
			state_reset(s, r.a);
			b->ops->free(b);
		}
		state_free(s, r.a);
		rig_done(&r);
	}
}

/* Loading. */

static void test_what_is_loaded(void **unused)
{
	struct model *m = model_ref(q8_model);

	(void)unused;
	assert_int_equal(m->n_vocab, N_VOCAB);
	assert_int_equal(m->n_embd, 128);
	assert_int_equal(m->n_layer, 8);
	assert_int_equal(m->n_ctx_train, 2048);
	assert_int_equal(m->n_params, 7716464);
	assert_false(m->weights_f32);
	assert_int_equal(m->kv.n_layer, 2);
	assert_int_equal(m->kv.n_head, 2);
	assert_int_equal(m->kv.k_dim, 64);
	/* 6 layers: 3 columns of 256 channels, and 4 heads of 32 x 32 */
	assert_int_equal(m->recurrent_floats, 6 * (3 * 256 + 4 * 32 * 32));
	assert_true(strlen(m->name) > 0);
	assert_non_null(m->template);
	assert_null(model_unref(m));
	assert_null(model_unref(NULL));
	if (f32_model)
		assert_true(f32_model->weights_f32);
}

static void test_arch_table(void **unused)
{
	(void)unused;
	assert_ptr_equal(arch_find("qwen35moe", 9), &arch_qwen35moe);
	assert_null(arch_find("qwen35moex", 10));
	assert_null(arch_find("qwen35mo", 8));
	assert_null(arch_find("", 0));
	assert_non_null(strstr(arch_list(), arch_qwen35moe.name));
}

/* A copy of the Q8_0 file with one change in its header. */
struct broken {
	const char *at; /* the change is made behind this text */
	size_t skip;    /* bytes behind it */
	const void *bytes;
	size_t n;
	int error;
	const char *says;
};

#define U32(v) (const uint32_t[]){ v }, 4
#define U64(v) (const uint64_t[]){ v }, 8
#define F32(v) (const float[]){ v }, 4

static void check_broken(int fd, const char *path, const char *head, size_t n_head,
			 const struct broken *c)
{
	const char *found = memmem(head, n_head, c->at, strlen(c->at));
	struct model *m = NULL;
	char *error = NULL;
	size_t at;
	int r;

	assert_non_null(found);
	at = (size_t)(found - head) + strlen(c->at) + c->skip;
	assert_int_equal(pwrite(fd, c->bytes, c->n, (off_t)at), (ssize_t)c->n);
	r = model_load(path, &m, &error);
	if (r != c->error || !error || !startswith(error, path) || !strstr(error, c->says) ||
	    strchr(error, '\n'))
		fail_msg("%s: %d, '%s'", c->at, r, error ? error : "");
	assert_null(m);
	free(error);
	assert_int_equal(pwrite(fd, head + at, c->n, (off_t)at), (ssize_t)c->n);
}

static void test_hostile_metadata(void **unused)
{
	/*
	 * A key is followed by its type (4 bytes) and value; a tensor's name by n_dims (4), ne (8
	 * each), type (4).
	 */
	const struct broken cases[] = {
		{ "general.architecture", 12, "qwen35mox", 9, -EOPNOTSUPP,
		  "'qwen35mox' is not supported (have: qwen35moe" },
		{ "general.architecture", 12, "\e[31m\xff\0\n", 9, -EOPNOTSUPP, "architecture '?'" },
		{ "qwen35moe.block_count", 4, U32(0), -EBADMSG, "block_count" },
		{ "qwen35moe.block_count", 4, U32(9), -EBADMSG, "blk.8." },
		{ "qwen35moe.block_count", 4, U32(7), -EOPNOTSUPP, "'blk.7." }, /* cut short */
		{ "qwen35moe.block_count", 4, U32(UINT32_MAX), -EBADMSG, "block_count" },
		{ "qwen35moe.embedding_length", 4, U32(0), -EBADMSG, "embedding_length" },
		{ "qwen35moe.embedding_length", 4, U32(127), -EBADMSG, "token_embd.weight" },
		{ "qwen35moe.attention.head_count", 4, U32(0), -EBADMSG, "head_count" },
		{ "qwen35moe.attention.head_count", 4, U32(3), -EBADMSG, "heads" },
		{ "qwen35moe.attention.head_count", 4, U32(8), -EBADMSG, "attn_q.weight" },
		{ "qwen35moe.attention.head_count_kv", 4, U32(0), -EBADMSG, "head_count_kv" },
		{ "qwen35moe.attention.key_length", 4, U32(32), -EBADMSG, "value_length" },
		{ "qwen35moe.rope.dimension_count", 4, U32(17), -EBADMSG, "dimension_count" },
		{ "qwen35moe.rope.dimension_count", 4, U32(66), -EBADMSG, "dimension_count" },
		{ "qwen35moe.rope.freq_base", 4, F32(NAN), -EBADMSG, "freq_base" },
		{ "qwen35moe.rope.freq_base", 4, F32(0), -EBADMSG, "freq_base" },
		{ "qwen35moe.attention.layer_norm_rms_epsilon", 4, F32(-1), -EBADMSG, "epsilon" },
		{ "qwen35moe.attention.layer_norm_rms_epsilon", 0, U32(4), -EBADMSG, "epsilon" },
		{ "qwen35moe.ssm.conv_kernel", 4, U32(1), -EBADMSG, "conv_kernel" },
		{ "qwen35moe.ssm.conv_kernel", 4, U32(5), -EBADMSG, "ssm_conv1d" },
		{ "qwen35moe.ssm.group_count", 4, U32(0), -EBADMSG, "group_count" },
		{ "qwen35moe.ssm.group_count", 4, U32(3), -EBADMSG, "group_count" },
		{ "qwen35moe.ssm.time_step_rank", 4, U32(0), -EBADMSG, "time_step_rank" },
		{ "qwen35moe.ssm.time_step_rank", 4, U32(6), -EBADMSG, "inner_size" },
		{ "qwen35moe.ssm.state_size", 4, U32(4096), -EBADMSG, "attn_qkv" },
		{ "qwen35moe.ssm.inner_size", 4, U32(0), -EBADMSG, "inner_size" },
		{ "qwen35moe.expert_count", 4, U32(0), -EBADMSG, "expert_count" },
		{ "qwen35moe.expert_count", 4, U32(31), -EBADMSG, "ffn_gate_inp" },
		{ "qwen35moe.expert_used_count", 4, U32(33), -EBADMSG, "expert_used_count" },
		{ "qwen35moe.expert_used_count", 4, U32(0), -EBADMSG, "expert_used_count" },
		{ "qwen35moe.expert_feed_forward_length", 4, U32(65), -EBADMSG, "ffn_" },
		{ "qwen35moe.full_attention_interval", 4, U32(0), -EBADMSG, "full_attention_interval" },
		{ "qwen35moe.full_attention_interval", 4, U32(3), -EBADMSG, "blk.2." },
		{ "qwen35moe.context_lengt", 0, "x", 1, -EBADMSG,
		  "'qwen35moe.context_length' is missing" },
		{ "tokenizer.ggml.model", 12, "gpt3", 4, -EOPNOTSUPP,
		  ": tokenizer 'gpt3' is not supported" },
		{ "blk.0.ssm_", 0, "b", 1, -EBADMSG, "missing" },
		{ "blk.0.attn_norm.weight", 4, U64(64), -EBADMSG,
		  "'blk.0.attn_norm.weight' has shape [64]" },
		{ "blk.0.attn_norm.weight", 12, U32(QUANT_F16), -EOPNOTSUPP, "type F16, only F32" },
		{ "blk.0.attn_qkv.weight", 20, U32(40), -EOPNOTSUPP,
		  "'blk.0.attn_qkv.weight': type NVFP4 has no kernel" },
	};
	char from[4096], path[64];
	const size_t n_head = 1 << 18;
	struct stat st;
	char *data;
	int in, fd;

	(void)unused;
	assert_non_null(find_file(Q8_0_FILE, from, sizeof(from)));
	in = open(from, O_RDONLY | O_CLOEXEC);
	fd = memfd_create("broken", MFD_CLOEXEC);
	assert_true(in >= 0 && fd >= 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	assert_int_equal(fstat(in, &st), 0);
	assert_true(st.st_size > (off_t)n_head);
	data = malloc((size_t)st.st_size);
	assert_non_null(data);
	assert_int_equal(read(in, data, (size_t)st.st_size), st.st_size);
	assert_int_equal(write(fd, data, (size_t)st.st_size), st.st_size);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		check_broken(fd, path, data, n_head, &cases[i]);
	close(fd);
	close(in);
	free(data);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_arch_table),
		cmocka_unit_test(test_what_is_loaded),
		cmocka_unit_test(test_reference_f32),
		cmocka_unit_test(test_reference_q8_0),
		cmocka_unit_test(test_batches_f32),
		cmocka_unit_test(test_batches_q8_0),
		cmocka_unit_test(test_sequences_together),
		cmocka_unit_test(test_threads_make_no_difference),
		cmocka_unit_test(test_kernels_agree),
		cmocka_unit_test(test_clone_and_rewind),
		cmocka_unit_test(test_abort_resets),
		cmocka_unit_test(test_full_arena_changes_nothing),
		cmocka_unit_test(test_bad_arguments),
		cmocka_unit_test(test_scratch_is_enough),
		cmocka_unit_test(test_hostile_metadata),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
