/* SPDX-License-Identifier: MIT */
/*
 * test-attn-cpu.c: rope and attention of the CPU backend against the formulas in double: several
 * sequences of a batch, across pages and blocks of rows, with windows and sinks.
 */
#include "tests/unit/kernels.h"

#include "daemon/engine/backend.h"

#include <math.h>

#define SCRATCH ((size_t)1 << 20)
#define N_SEQ   3
#define ROWS    64 /* of a batch at most */
#define CONTEXT 128

static struct backend *backend_free(struct backend *b)
{
	return b->ops->free(b);
}
DEFINE_CLEANUP(struct backend *, backend_free)

static struct backend *new_backend(unsigned n_threads)
{
	struct backend *b;

	assert_int_equal(backend_cpu_new(n_threads, SCRATCH, NULL, &b), 0);
	return b;
}

/* Where the sequences of a batch begin, and how many rows they have: less than a page, a page and more, one. */
static const size_t all_pos[N_SEQ] = { 0, 29, 70 }, all_n_tok[N_SEQ] = { 21, 42, 1 };

struct shape {
	struct backend_attn p;
	bool f16, sinks;
};

/* All that was ever asked and is seen, and what came of it. */
struct sequence {
	struct kv_table kv;
	float *q, *k, *v, *out; /* [position][head][dim] */
};

static void new_sequence(struct kv_arena *a, const struct backend_attn *p, struct sequence *s)
{
	*s = (struct sequence){ .q = new_floats(CONTEXT * p->n_head * p->k_dim),
				.k = new_floats(CONTEXT * p->n_head_kv * p->k_dim),
				.v = new_floats(CONTEXT * p->n_head_kv * p->v_dim),
				.out = new_floats(CONTEXT * p->n_head * p->v_dim) };
	assert_int_equal(kv_table_reserve(a, &s->kv, 0, CONTEXT), 0);
}

static void sequence_done(struct kv_arena *a, struct sequence *s)
{
	kv_table_done(a, &s->kv);
	free(s->q);
	free(s->k);
	free(s->v);
	free(s->out);
}

/* Rows of x or of y, `width` floats each: from the sequences into a batch, or back. */
static void move_rows(const struct backend_span *spans, float *const *of_sequence, float *batch,
		      size_t width, bool back)
{
	for (size_t i = 0; i < N_SEQ; i++) {
		float *mine = of_sequence[i] + spans[i].pos * width, *its = batch + spans[i].row * width;

		memcpy(back ? mine : its, back ? its : mine, spans[i].n_tok * width * sizeof(float));
	}
}

static void run_batch(struct backend *b, const struct kv_arena *a, const struct backend_attn *p,
		      struct sequence *seqs, const size_t *pos, const size_t *n_tok)
{
	size_t n_q = p->n_head * p->k_dim, n_k = p->n_head_kv * p->k_dim,
	       n_v = p->n_head_kv * p->v_dim, n_o = p->n_head * p->v_dim;
	_cleanup_(freep) float *q = new_floats(ROWS * n_q), *k = new_floats(ROWS * n_k),
			       *v = new_floats(ROWS * n_v), *out = new_floats(ROWS * n_o);
	struct backend_span spans[N_SEQ];
	struct backend_batch batch = { .arena = a, .spans = spans, .n_spans = N_SEQ };

	for (size_t i = 0; i < N_SEQ; i++) {
		spans[i] = (struct backend_span){
			.row = batch.n_rows, .n_tok = n_tok[i], .pos = pos[i], .kv = &seqs[i].kv
		};
		batch.n_rows += n_tok[i];
	}
	move_rows(spans, (float *[]){ seqs[0].q, seqs[1].q, seqs[2].q }, q, n_q, false);
	move_rows(spans, (float *[]){ seqs[0].k, seqs[1].k, seqs[2].k }, k, n_k, false);
	move_rows(spans, (float *[]){ seqs[0].v, seqs[1].v, seqs[2].v }, v, n_v, false);
	assert_int_equal(b->ops->begin(b, &batch), 0);
	assert_int_equal(b->ops->attention(b, p, q, k, v, out), 0);
	assert_int_equal(b->ops->end(b, 0), 0);
	move_rows(spans, (float *[]){ seqs[0].out, seqs[1].out, seqs[2].out }, out, n_o, true);
}

static double kept(const struct shape *s, float x)
{
	return (double)(s->f16 ? f16_to_float(float_to_f16(x)) : x);
}

static double score(const struct shape *s, const struct sequence *seq, size_t pos, size_t head, size_t at)
{
	const struct backend_attn *p = &s->p;
	const float *q = seq->q + (pos * p->n_head + head) * p->k_dim;
	const float *k = seq->k + (at * p->n_head_kv + head / (p->n_head / p->n_head_kv)) * p->k_dim;
	double sum = 0;

	for (size_t i = 0; i < p->k_dim; i++)
		sum += (double)q[i] * kept(s, k[i]);
	return sum * (double)p->scale;
}

static void check_head(const struct shape *s, const struct sequence *seq, size_t pos, size_t head)
{
	const struct backend_attn *p = &s->p;
	const float *out = seq->out + (pos * p->n_head + head) * p->v_dim;
	const float *v = seq->v + head / (p->n_head / p->n_head_kv) * p->v_dim;
	size_t first = p->window > 0 && pos + 1 > p->window ? pos + 1 - p->window : 0;
	double weight[CONTEXT], sum = s->sinks ? exp((double)((const float *)p->sinks->data)[head]) : 0;

	for (size_t at = first; at <= pos; at++)
		sum += weight[at] = exp(score(s, seq, pos, head, at));
	for (size_t i = 0; i < p->v_dim; i++) {
		double want = 0;

		for (size_t at = first; at <= pos; at++)
			want += weight[at] / sum * kept(s, v[at * p->n_head_kv * p->v_dim + i]);
		if (fabs(want - (double)out[i]) > 1e-5)
			fail_msg("position %zu, head %zu, value %zu: %g, not %g", pos, head, i,
				 (double)out[i], want);
	}
}

/* By this many threads; the caller frees what the three sequences got. */
static void attend(const struct shape *s, unsigned n_threads, float **ret_out, bool check)
{
	_cleanup_(backend_freep) struct backend *b = new_backend(n_threads);
	const struct kv_layout layout = {
		.n_layer = 2, .n_head = s->p.n_head_kv, .k_dim = s->p.k_dim, .v_dim = s->p.v_dim
	};
	struct sequence seqs[N_SEQ];
	struct kv_arena *a;

	seed = 1;
	assert_int_equal(kv_arena_new(&layout, s->f16, (size_t)8 << 20, &a), 0);
	for (size_t i = 0; i < N_SEQ; i++)
		new_sequence(a, &s->p, &seqs[i]);
	/* What is there before the batch came in a batch, too. */
	run_batch(b, a, &s->p, seqs, (size_t[N_SEQ]){ 0 }, (size_t[N_SEQ]){ 0, 29, 30 });
	run_batch(b, a, &s->p, seqs, (size_t[N_SEQ]){ 0, 29, 30 }, (size_t[N_SEQ]){ 0, 0, 40 });
	run_batch(b, a, &s->p, seqs, all_pos, all_n_tok);
	for (size_t i = 0; i < N_SEQ; i++) {
		size_t end = all_pos[i] + all_n_tok[i];

		for (size_t pos = 0; pos < end && check; pos++)
			for (size_t h = 0; h < s->p.n_head; h++)
				check_head(s, &seqs[i], pos, h);
		ret_out[i] = TAKE_PTR(seqs[i].out);
		sequence_done(a, &seqs[i]);
	}
	kv_arena_free(a);
}

static void check_shape(const struct shape *s)
{
	float *one[N_SEQ], *several[N_SEQ];

	attend(s, 1, one, true);
	attend(s, 3, several, false);
	for (size_t i = 0; i < N_SEQ; i++) {
		assert_memory_equal(one[i], several[i],
				    (all_pos[i] + all_n_tok[i]) * s->p.n_head * s->p.v_dim *
					    sizeof(float));
		free(one[i]);
		free(several[i]);
	}
}

static void test_attention(void **state)
{
	/* Few heads share keys and many do: blocks of sixteen rows, and smaller ones. */
	static const struct backend_attn heads[] = {
		{ .kv_layer = 1, .n_head = 6, .n_head_kv = 2, .k_dim = 32, .v_dim = 24, .scale = 0.2f },
		{ .kv_layer = 0, .n_head = 36, .n_head_kv = 1, .k_dim = 16, .v_dim = 16, .scale = 0.25f },
	};
	static const uint32_t windows[] = { 0, 1, 7, 40 };
	_cleanup_(freep) float *logits = NULL;
	struct gguf_tensor sinks;

	(void)state;
	seed = 2;
	logits = new_floats(36);
	sinks = (struct gguf_tensor){ .type = QUANT_F32, .n_dims = 1, .ne = { 36, 1, 1, 1 }, .data = logits };
	for (size_t i = 0; i < ARRAY_SIZE(heads); i++)
		for (size_t w = 0; w < ARRAY_SIZE(windows); w++)
			for (unsigned form = 0; form < 4; form++) {
				struct shape s = { heads[i], .f16 = form & 1, .sinks = form & 2 };

				s.p.window = windows[w];
				s.p.sinks = s.sinks ? &sinks : NULL;
				check_shape(&s);
			}
}

#define N_HEAD 3
#define DIM    20
#define STRIDE 70

static void check_turned(const struct backend_rope *p, size_t pos, const float *before, const float *after)
{
	for (size_t h = 0; h < N_HEAD; h++)
		for (size_t i = 0; i < DIM; i++) {
			size_t half = p->n_rot / 2, pair = p->pairs ? i / 2 : i % half;
			size_t a = h * DIM + (p->pairs ? 2 * pair : pair),
			       b = a + (p->pairs ? 1 : half);
			double x = (double)before[a], y = (double)before[b], want;
			double angle = (double)((float)pos * p->freq[i < p->n_rot ? pair : 0]);

			if (i >= p->n_rot)
				want = (double)before[h * DIM + i];
			else if (h * DIM + i == a)
				want = (double)p->mscale * (x * cos(angle) - y * sin(angle));
			else
				want = (double)p->mscale * (x * sin(angle) + y * cos(angle));
			assert_true(fabs(want - (double)after[h * DIM + i]) < 1e-6);
		}
}

static void test_rope(void **state)
{
	static const float fast[] = { 1, 0.5f, 0.1f, 0.02f, 0.003f }, slow[] = { 0.1f, 0.01f, 0.001f };
	/* The second asks for the angles of the first; the others have their own. */
	static const struct backend_rope all[] = {
		{ .n_rot = 10, .freq = fast, .mscale = 1 },
		{ .n_rot = 10, .freq = fast, .mscale = 1, .pairs = true },
		{ .n_rot = 6, .freq = fast, .mscale = 1 },
		{ .n_rot = 6, .freq = slow, .mscale = 1.25f },
		{ .n_rot = 6, .freq = slow, .mscale = 1 },
	};
	_cleanup_(backend_freep) struct backend *b = new_backend(2);
	struct backend_span spans[N_SEQ] = { 0 };
	struct backend_batch batch = { .spans = spans, .n_spans = N_SEQ };
	_cleanup_(freep) float *x = NULL, *y = NULL;

	(void)state;
	seed = 3;
	x = new_floats(ROWS * STRIDE);
	y = new_bytes(ROWS * STRIDE * sizeof(float));
	/* A later batch has other positions. */
	for (size_t round = 0; round < 2; round++) {
		batch.n_rows = 0;
		for (size_t i = 0; i < N_SEQ; i++) {
			spans[i] = (struct backend_span){ .row = batch.n_rows,
							  .n_tok = all_n_tok[i],
							  .pos = all_pos[i] + 1000 * round };
			batch.n_rows += all_n_tok[i];
		}
		assert_int_equal(b->ops->begin(b, &batch), 0);
		for (size_t k = 0; k < ARRAY_SIZE(all); k++) {
			memcpy(y, x, ROWS * STRIDE * sizeof(float));
			assert_int_equal(b->ops->rope(b, &all[k], y, STRIDE, N_HEAD, DIM), 0);
			for (size_t i = 0; i < N_SEQ; i++)
				for (size_t t = 0; t < spans[i].n_tok; t++) {
					size_t at = (spans[i].row + t) * STRIDE;

					check_turned(&all[k], spans[i].pos + t, x + at, y + at);
				}
		}
		assert_int_equal(b->ops->end(b, 0), 0);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_attention),
		cmocka_unit_test(test_rope),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
