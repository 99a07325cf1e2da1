/* SPDX-License-Identifier: MIT */
/*
 * The whole graph on a card, emulated, beside the CPU: logits of the bundled model in batches of several sizes, with no expert, some and all
 * of them in slots; steps that were recorded; several sequences; a card that fails, at any call.
 *
 * Bounds, as a part of the spread of a row's logits. Activations are quantised in the same way on both sides, so logits differ by the order of float
 * sums only, but for a value that lies at the edge of two quantised ones now and then: the CPU's scalar and AVX2 kernels differ by 0.039 on
 * these tokens, the emulated card from AVX2 by 0.038. With weights of F32 there are no such edges.
 */
#include "tests/test.h"

#include "daemon/engine/card.h"
#include "daemon/engine/graph.h"
#include "daemon/residency/residency.h"
#include "daemon/residency/vram.h"
#include "tests/emu/library.h"

#include <fcntl.h>
#include <math.h>

#define TOY     "tests/models/tiny-qwen35moe-stories-q8_0.gguf"
#define N_TOK   48
#define ROWS    64
#define CONTEXT 256
#define TOP     0.06f
#define TOP_F32 1e-4f

struct rig {
	struct model *m;
	struct backend *cpu;
	struct kv_arena *a;
	float *want, *got;
	float top;
	char dir[64], path[128];
};

static struct rig rig;

/* A card with the model on it. */
struct gpu {
	struct card *card;
	struct backend *b;
	struct kv_arena *a;
	struct residency_shared shared;
	struct residency *r;
};

static const struct card_sizes *sizes(void)
{
	static struct card_sizes s;

	s = (struct card_sizes){ .scratch_bytes = backend_cuda_scratch_bytes(rig.m, ROWS, CONTEXT),
				 .pages_bytes = (uint64_t)4 << 20,
				 .pages_least_bytes = (uint64_t)4 << 20 };
	return &s;
}

static struct residency *open_residency(struct residency_shared *shared)
{
	const struct residency_config c = { .tier = RESIDENCY_ARENA,
					    .policy = EVICT_LFU,
					    .reserve_bytes = 1 << 20 };
	_cleanup_(freep) char *reason = NULL, *error = NULL;
	struct residency *r = NULL;

	if (residency_new(rig.m, &c, 0, 0, shared, NULL, &r, &reason, &error) < 0)
		fail_msg("%s", error);
	return r;
}

static int gpu_try(struct gpu *g, double share, char **ret_error)
{
	const struct catalog *catalog = rig.m->catalog;
	struct residency_card_config c;
	int r;

	*g = (struct gpu){ .r = open_residency(&g->shared) };
	r = card_open(&g->card, ret_error);
	if (r == 0)
		r = card_load(g->card, rig.m, sizes(), NULL, ret_error);
	if (r == 0)
		r = backend_cuda_new(g->card, rig.m, rig.cpu, ROWS, CONTEXT, &g->b, ret_error);
	if (r == 0)
		r = kv_arena_new_in(card_memory(g->card), &rig.m->kv, false,
				    card_pages_bytes(g->card), &g->a);
	if (r < 0)
		return r;
	c = (struct residency_card_config){ .fixed_bytes = card_fixed_bytes(g->card),
					    .trunk_bytes = card_trunk_bytes(g->card) };
	/* Chunks are whole pages of the card. */
	c.slots_bytes = (uint64_t)((double)catalog->block_bytes * share);
	if (share >= 1)
		c.slots_bytes *= 2;
	r = residency_set_card(g->r, card_vram(g->card), &c);
	g->b->ops->set_residency(g->b, g->r);
	return r;
}

static void gpu_done(struct gpu *g)
{
	if (g->b)
		g->b->ops->set_residency(g->b, NULL);
	residency_free(g->r);
	kv_arena_free(g->a);
	if (g->b)
		g->b->ops->free(g->b);
	card_close(g->card);
}

static void gpu_open(struct gpu *g, double share)
{
	_cleanup_(freep) char *error = NULL;

	if (gpu_try(g, share, &error) < 0)
		fail_msg("%s", error ? error : "no error text");
}

#define CARD_OR_SKIP()                                                              \
	do {                                                                        \
		if (!getenv("RESIDENTD_CUDA_LIBRARY")) {                            \
			skip_because("no card: the emulator was not built either"); \
			return;                                                     \
		}                                                                   \
	} while (0)

static int32_t token(size_t i)
{
	return (int32_t)(i * 37 % 2000);
}

/* Logits of positions [from, to) of a state, `rows` at a time. */
static int eval(struct backend *b, struct kv_arena *a, struct residency *r, struct state *s,
		size_t from, size_t to, size_t rows, float *logits)
{
	int err = 0;

	for (size_t at = from; at < to && err == 0; at += rows) {
		int32_t ids[ROWS];
		struct graph_seq q = {
			.state = s, .tokens = ids, .n_tok = MIN(rows, to - at), .want = GRAPH_WANT_ALL
		};

		for (size_t i = 0; i < q.n_tok; i++)
			ids[i] = token(at + i);
		if (r)
			residency_step_begin(r, q.n_tok, NULL);
		err = graph_forward(rig.m, b, a, &q, 1, NULL, logits + at * rig.m->n_vocab);
		if (r)
			residency_step_end(r);
	}
	return err;
}

static int eval_gpu(struct gpu *g, size_t rows, float *logits)
{
	struct state *s;
	int r;

	assert_int_equal(state_new(&s), 0);
	r = eval(g->b, g->a, g->r, s, 0, N_TOK, rows, logits);
	state_free(s, g->a);
	return r;
}

static void check_logits(const char *what, const float *want, const float *got, size_t n_rows)
{
	for (size_t t = 0; t < n_rows; t++) {
		const float *w = want + t * rig.m->n_vocab, *g = got + t * rig.m->n_vocab;
		float lo = w[0], hi = w[0], worst = 0;

		for (uint32_t i = 0; i < rig.m->n_vocab; i++) {
			lo = fminf(lo, w[i]);
			hi = fmaxf(hi, w[i]);
			worst = fmaxf(worst, fabsf(w[i] - g[i]));
			assert_true(isfinite(g[i]));
		}
		if (!(worst <= rig.top * (hi - lo)))
			fail_msg("%s: row %zu is off by %g of %g", what, t, (double)worst,
				 (double)(hi - lo));
	}
}

static struct residency_vram vram_of(const struct gpu *g)
{
	struct residency_stats s;

	residency_get_stats(g->r, &s);
	return s.vram;
}

static void test_logits(void **state)
{
	static const double shares[] = { 0, 0.1, 0.5, 1 };
	static const size_t rows[] = { 1, 5, 64 };

	(void)state;
	CARD_OR_SKIP();
	for (size_t i = 0; i < ARRAY_SIZE(shares); i++) {
		struct gpu g;

		gpu_open(&g, shares[i]);
		for (size_t k = 0; k < ARRAY_SIZE(rows); k++) {
			char what[64];

			snprintf(what, sizeof(what), "%g of the slots, batches of %zu", shares[i],
				 rows[k]);
			memset(rig.got, 0xff, N_TOK * rig.m->n_vocab * sizeof(float));
			if (eval_gpu(&g, rows[k], rig.got) < 0)
				fail_msg("%s: %s", what, backend_cuda_error(g.b));
			check_logits(what, rig.want, rig.got, N_TOK);
		}
		while (residency_pump(g.r, true))
			;
		residency_pump(g.r, false);
		if (shares[i] > 0)
			assert_true(vram_of(&g).hits > 0 && vram_of(&g).n_blocks > 0);
		if (shares[i] < 1)
			assert_true(vram_of(&g).on_cpu > 0);
		assert_int_equal(vram_of(&g).overlap_bytes, 0);
		gpu_done(&g);
	}
}

/* All there: steps of one row run as one piece from the second on, and say the same, also while the sequence grows into more parts. */
static void test_recorded(void **state)
{
	_cleanup_(freep) uint16_t *heat = NULL;
	struct residency_vram v;
	struct gpu g;

	(void)state;
	CARD_OR_SKIP();
	gpu_open(&g, 1);
	heat = malloc(rig.m->catalog->n_blocks * sizeof(*heat));
	assert_non_null(heat);
	for (uint32_t i = 0; i < rig.m->catalog->n_blocks; i++)
		heat[i] = EVICT_HEAT_ONE;
	residency_warm(g.r, heat);
	while (residency_pump(g.r, true))
		;
	assert_true(residency_on_card(g.r));
	v = vram_of(&g);
	memset(rig.got, 0xff, N_TOK * rig.m->n_vocab * sizeof(float));
	assert_int_equal(eval_gpu(&g, 1, rig.got), 0);
	check_logits("recorded", rig.want, rig.got, N_TOK);
	/* The first step of all is never recorded. */
	assert_int_equal(vram_of(&g).graph_steps, N_TOK - 1);
	assert_int_equal(vram_of(&g).on_cpu, v.on_cpu);
	assert_true(vram_of(&g).hits > v.hits);
	gpu_done(&g);
}

static void test_two_sequences(void **state)
{
	struct graph_seq q[2];
	int32_t ids[2][20];
	struct state *s[2];
	struct gpu g;

	(void)state;
	CARD_OR_SKIP();
	gpu_open(&g, 0.5);
	for (unsigned k = 0; k < 2; k++) {
		assert_int_equal(state_new(&s[k]), 0);
		for (size_t i = 0; i < 20; i++)
			ids[k][i] = token(i);
		q[k] = (struct graph_seq){
			.state = s[k], .tokens = ids[k], .n_tok = k ? 20 : 7, .want = GRAPH_WANT_ALL
		};
	}
	residency_step_begin(g.r, 27, NULL);
	assert_int_equal(graph_forward(rig.m, g.b, g.a, q, 2, NULL, rig.got), 0);
	residency_step_end(g.r);
	check_logits("the first", rig.want, rig.got, 7);
	check_logits("the second", rig.want, rig.got + 7 * rig.m->n_vocab, 20);
	state_free(s[0], g.a);
	state_free(s[1], g.a);
	gpu_done(&g);
}

/* Whatever fails, at whichever call: an error and no more, and the CPU goes on as if nothing had been. */
static void failing(const char *what, unsigned from, unsigned to, unsigned step)
{
	unsigned n_failed = 0;

	for (unsigned n = from; n < to; n += step) {
		_cleanup_(freep) char *error = NULL;
		char fail[64];
		struct gpu g;
		int r;

		snprintf(fail, sizeof(fail), "%s:%u", what, n);
		setenv("RESIDENTD_EMU_FAIL", fail, 1);
		r = gpu_try(&g, 0.5, &error);
		if (r < 0)
			assert_non_null(error);
		else
			r = eval_gpu(&g, 24, rig.got);
		if (r < 0 && g.b && r != -ENODEV && !error)
			fail_msg("%s: %s", fail, strerror(-r));
		n_failed += r < 0;
		if (r == 0)
			check_logits(fail, rig.want, rig.got, N_TOK);
		residency_set_card(g.r, NULL, NULL);
		gpu_done(&g);
	}
	unsetenv("RESIDENTD_EMU_FAIL");
	assert_true(n_failed > 0);
}

static bool is_emulated(void)
{
	struct card *card;
	bool emulated;

	assert_int_equal(card_open(&card, NULL), 0);
	emulated = card_info(card)->emulator;
	card_close(card);
	return emulated;
}

static void test_failures(void **state)
{
	(void)state;
	CARD_OR_SKIP();
	if (!is_emulated()) {
		skip_because("a real card fails when it wants");
		return;
	}
	failing("alloc", 1, 8, 1);
	failing("host", 1, 5, 1);
	failing("copy", 1, 400, 57);
	failing("launch", 1, 900, 173);
	failing("lost", 1, 3000, 391);
	failing("fault", 1, 1200, 233);
	failing("open", 1, 2, 1);
}

static void test_cycles(void **state)
{
	uint64_t before = 0;

	(void)state;
	CARD_OR_SKIP();
	for (unsigned i = 0; i < 50; i++) {
		uint64_t now;
		struct gpu g;

		g = (struct gpu){};
		assert_int_equal(card_open(&g.card, NULL), 0);
		assert_int_equal(card_free_bytes(g.card, &now), 0);
		if (i == 0)
			before = now;
		assert_int_equal(now, before);
		assert_int_equal(card_load(g.card, rig.m, sizes(), NULL, NULL), 0);
		card_close(g.card);
	}
}

static void test_too_small(void **state)
{
	struct card_sizes s = *sizes();
	char *error = NULL;
	struct card *card;

	(void)state;
	CARD_OR_SKIP();
	s.budget_bytes = 1 << 20;
	assert_int_equal(card_open(&card, NULL), 0);
	assert_int_equal(card_load(card, rig.m, &s, NULL, &error), -E2BIG);
	assert_non_null(strstr(error, "needs at least"));
	free(error);
	card_close(card);
}

/* What the CPU computes with, and no kernel of the card: in the trunk, or of experts. */
static void test_type_without_kernels(void **state)
{
	static const char *const names[] = { "blk.0.attn_qkv.weight", "blk.0.ffn_gate_exps.weight" };
	struct card *card;

	(void)state;
	CARD_OR_SKIP();
	assert_int_equal(card_open(&card, NULL), 0);
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		/* As a file would have it: the model is ours, and nothing reads it before the check. */
		struct gguf_tensor *t = (struct gguf_tensor *)gguf_tensor(rig.m->gguf, names[i]);
		_cleanup_(freep) char *error = NULL, *want = NULL;
		uint32_t type;

		assert_non_null(t);
		type = t->type;
		t->type = QUANT_Q4_1;
		assert_int_equal(card_load(card, rig.m, sizes(), NULL, &error), -EOPNOTSUPP);
		t->type = type;
		assert_true(asprintf(&want, "tensor %s has type Q4_1, which no GPU kernel does",
				     names[i]) > 0);
		assert_string_equal(error, want);
	}
	card_close(card);
}

/* Pages of a file that another process has mapped too do not go. */
static void copy_toy(void)
{
	_cleanup_(closep) int from = open(TOY, O_RDONLY | O_CLOEXEC), to = -1;
	char chunk[65536];
	ssize_t n;

	strcpy(rig.dir, "/tmp/test-backend-cuda.XXXXXX");
	assert_non_null(mkdtemp(rig.dir));
	snprintf(rig.path, sizeof(rig.path), "%s/toy.gguf", rig.dir);
	to = open(rig.path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	assert_true(from >= 0 && to >= 0);
	while ((n = read(from, chunk, sizeof(chunk))) > 0)
		assert_int_equal(write(to, chunk, (size_t)n), n);
	assert_int_equal(n, 0);
	assert_int_equal(fsync(to), 0);
}

static void rig_open(const char *path, float top)
{
	struct state *s;

	rig.top = top;
	assert_int_equal(model_load(path, &rig.m, NULL), 0);
	assert_int_equal(kv_arena_new(&rig.m->kv, false, (size_t)1 << 24, &rig.a), 0);
	assert_int_equal(backend_cpu_new(2, graph_scratch_bytes(rig.m, ROWS), NULL, &rig.cpu), 0);
	rig.want = malloc(N_TOK * rig.m->n_vocab * sizeof(float));
	rig.got = malloc(N_TOK * rig.m->n_vocab * sizeof(float));
	assert_true(rig.want && rig.got);
	assert_int_equal(state_new(&s), 0);
	assert_int_equal(eval(rig.cpu, rig.a, NULL, s, 0, N_TOK, 1, rig.want), 0);
	state_free(s, rig.a);
}

static void rig_close(void)
{
	free(rig.want);
	free(rig.got);
	rig.cpu->ops->free(rig.cpu);
	kv_arena_free(rig.a);
	model_unref(rig.m);
}

/* Without quantised activations there is nothing that could hide an error. */
static void test_logits_f32(void **state)
{
	const char *shared = getenv("RESIDENTD_SHARED");
	static const size_t rows[] = { 1, 48 };
	char path[4096];

	(void)state;
	CARD_OR_SKIP();
	snprintf(path, sizeof(path), "%s/models/tiny-qwen35moe-stories-f32.gguf",
		 shared ? shared : "../shared");
	if (access(path, R_OK) < 0) {
		skip_because("no %s", path);
		return;
	}
	rig_close();
	rig_open(path, TOP_F32);
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		struct gpu g;

		gpu_open(&g, 0.5);
		for (unsigned k = 0; k < 2; k++) {
			assert_int_equal(eval_gpu(&g, rows[i], rig.got), 0);
			check_logits("F32", rig.want, rig.got, N_TOK);
		}
		assert_true(vram_of(&g).hits > 0 && vram_of(&g).on_cpu > 0);
		gpu_done(&g);
	}
	rig_close();
	rig_open(rig.path, TOP);
}

static int setup(void **state)
{
	(void)state;
	copy_toy();
	if (emu_library())
		setenv("RESIDENTD_CUDA_LIBRARY", emu_library(), 0);
	rig_open(rig.path, TOP);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	rig_close();
	unlink(rig.path);
	rmdir(rig.dir);
	return 0;
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_logits),    cmocka_unit_test(test_logits_f32),
		cmocka_unit_test(test_recorded),  cmocka_unit_test(test_two_sequences),
		cmocka_unit_test(test_failures),  cmocka_unit_test(test_cycles),
		cmocka_unit_test(test_too_small), cmocka_unit_test(test_type_without_kernels),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
