/* SPDX-License-Identifier: MIT */
/*
 * What is kept of a sequence: checkpoints, rewinding, clones, resets, byte counts; with and without
 * recurrent state.
 */
#include "tests/test.h"

#include "daemon/engine/state.h"

#include <sys/mman.h>
#include <sys/resource.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define N_FLOATS 10

static struct model model = { .recurrent_floats = N_FLOATS,
			      .kv = { .n_layer = 1, .n_head = 1, .k_dim = 4, .v_dim = 4 } };
static struct model plain = { .kv = { .n_layer = 1, .n_head = 1, .k_dim = 4, .v_dim = 4 } };

static struct kv_arena *arena_new(void)
{
	struct kv_arena *a;

	assert_int_equal(kv_arena_new(&model.kv, false, (size_t)1 << 20, &a), 0);
	return a;
}

/* What graph_forward() does to a state, with a recurrent value that tells the position. */
static void advance(struct state *s, const struct model *m, struct kv_arena *a, size_t n)
{
	assert_int_equal(state_begin(s, m, a), 0);
	assert_int_equal(kv_table_reserve(a, &s->kv, s->n_tok, s->n_tok + n), 0);
	s->n_tok += n;
	if (m->recurrent_floats > 0)
		s->recurrent[N_FLOATS - 1] = (float)s->n_tok;
}

static void test_begin_is_zero(void **unused)
{
	struct kv_arena *a = arena_new();
	struct state *s;

	(void)unused;
	assert_int_equal(state_new(&s), 0);
	assert_null(s->recurrent);
	assert_int_equal(state_bytes(s, &model, a), 0);
	assert_int_equal(state_begin(s, &model, a), 0);
	for (size_t i = 0; i < N_FLOATS; i++)
		assert_true(s->recurrent[i] == 0);
	assert_int_equal((uintptr_t)s->recurrent % 64, 0);
	assert_null(state_free(s, a));
	assert_null(state_free(NULL, a));
	kv_arena_free(a);
}

static long minor_faults(void)
{
	struct rusage u;

	assert_int_equal(getrusage(RUSAGE_THREAD, &u), 0);
	return u.ru_minflt;
}

/* It is read before it is written, and no page of it has to be mapped for that, let alone twice. */
static void test_begin_is_mapped(void **unused)
{
	struct model large = { .recurrent_floats = (size_t)1 << 20, .kv = model.kv };
	size_t page = (size_t)sysconf(_SC_PAGESIZE) / sizeof(float), n_pages;
	struct kv_arena *a = arena_new();
	volatile float *x;
	struct state *s;
	float sum = 0;
	long before;
	void *probe;

	(void)unused;
	probe = mmap(NULL, page * sizeof(float), PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_true(probe != MAP_FAILED);
	if (madvise(probe, page * sizeof(float), MADV_POPULATE_WRITE) < 0) {
		munmap(probe, page * sizeof(float));
		kv_arena_free(a);
		skip_because("this kernel cannot populate");
	}
	munmap(probe, page * sizeof(float));
	assert_int_equal(state_new(&s), 0);
	assert_int_equal(state_begin(s, &large, a), 0);
	x = s->recurrent;
	n_pages = large.recurrent_floats / page;
	before = minor_faults();
	for (size_t i = 0; i < large.recurrent_floats; i += page)
		sum += x[i];
	for (size_t i = 0; i < large.recurrent_floats; i += page)
		x[i] = 1;
	assert_true(sum == 0);
	/* Some may have been taken away again; all of them were not. */
	assert_true((size_t)(minor_faults() - before) < n_pages / 2);
	state_free(s, a);
	kv_arena_free(a);
}

static void test_rewind_recurrent(void **unused)
{
	struct kv_arena *a = arena_new();
	struct state *s;

	(void)unused;
	assert_int_equal(state_new(&s), 0);
	advance(s, &model, a, 40);
	assert_int_equal(state_checkpoint(s, &model, a), 0);
	advance(s, &model, a, 60);
	assert_int_equal(s->kv.n_pages, 4);
	assert_int_equal(state_bytes(s, &model, a),
			 4 * kv_arena_page_bytes(a) + 2 * N_FLOATS * sizeof(float));
	assert_int_equal(state_rewind(s, &model, a, 100), 100); /* nothing to do */
	assert_int_equal(state_rewind(s, &model, a, 200), 100);
	assert_true(s->recurrent[N_FLOATS - 1] == 100);
	assert_int_equal(state_rewind(s, &model, a, 70), 40); /* the nearest before */
	assert_true(s->recurrent[N_FLOATS - 1] == 40);
	assert_int_equal(s->n_tok, 40);
	assert_int_equal(s->kv.n_pages, 2);
	advance(s, &model, a, 5);
	assert_int_equal(state_rewind(s, &model, a, 40), 40); /* the checkpoint can be used again */
	assert_true(s->recurrent[N_FLOATS - 1] == 40);
	assert_int_equal(state_rewind(s, &model, a, 39), 0); /* nothing before it but the beginning */
	assert_int_equal(s->n_tok, 0);
	assert_null(s->recurrent);
	assert_null(s->checkpoint);
	assert_int_equal(kv_arena_n_free(a), kv_arena_n_pages(a));
	/* A checkpoint of nothing is nothing. */
	assert_int_equal(state_checkpoint(s, &model, a), 0);
	assert_null(s->checkpoint);
	state_free(s, a);
	kv_arena_free(a);
}

static void test_later_checkpoint_replaces(void **unused)
{
	struct kv_arena *a = arena_new();
	struct state *s;

	(void)unused;
	assert_int_equal(state_new(&s), 0);
	advance(s, &model, a, 10);
	assert_int_equal(state_checkpoint(s, &model, a), 0);
	advance(s, &model, a, 10);
	assert_int_equal(state_checkpoint(s, &model, a), 0);
	advance(s, &model, a, 10);
	assert_int_equal(state_rewind(s, &model, a, 25), 20);
	assert_true(s->recurrent[N_FLOATS - 1] == 20);
	state_free(s, a);
	kv_arena_free(a);
}

static void test_rewind_plain(void **unused)
{
	struct kv_arena *a = arena_new();
	struct state *s;

	(void)unused;
	assert_int_equal(state_new(&s), 0);
	advance(s, &plain, a, 100);
	assert_null(s->recurrent);
	assert_int_equal(state_rewind(s, &plain, a, 33), 33); /* keys and values can be cut anywhere */
	assert_int_equal(s->kv.n_pages, 2);
	assert_int_equal(state_rewind(s, &plain, a, 0), 0);
	assert_int_equal(s->kv.n_pages, 0);
	state_free(s, a);
	kv_arena_free(a);
}

static void test_clone(void **unused)
{
	struct kv_arena *a = arena_new();
	struct state *s, *c;
	size_t n_free;

	(void)unused;
	assert_int_equal(state_new(&s), 0);
	advance(s, &model, a, 40);
	assert_int_equal(state_checkpoint(s, &model, a), 0);
	advance(s, &model, a, 1);
	n_free = kv_arena_n_free(a);
	assert_int_equal(state_clone(s, &model, a, &c), 0);
	assert_int_equal(kv_arena_n_free(a), n_free);
	assert_int_equal(c->n_tok, 41);
	assert_ptr_not_equal(c->recurrent, s->recurrent);
	advance(c, &model, a, 1);
	assert_true(s->recurrent[N_FLOATS - 1] == 41);
	assert_int_equal(state_rewind(c, &model, a, 41), 40);
	assert_int_equal(s->n_tok, 41);
	state_free(s, a);
	assert_true(c->recurrent[N_FLOATS - 1] == 40);
	state_free(c, a);
	assert_int_equal(kv_arena_n_free(a), kv_arena_n_pages(a));
	kv_arena_free(a);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_begin_is_zero),
		cmocka_unit_test(test_begin_is_mapped),
		cmocka_unit_test(test_rewind_recurrent),
		cmocka_unit_test(test_later_checkpoint_replaces),
		cmocka_unit_test(test_rewind_plain),
		cmocka_unit_test(test_clone),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
