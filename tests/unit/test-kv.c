/* SPDX-License-Identifier: MIT */
/*
 * Pages of keys and values: counts, sharing, exhaustion; a property test over several tables with a
 * seeded generator.
 */
#include "tests/test.h"

#include "daemon/engine/kv.h"

static const struct kv_layout layout = { .n_layer = 2, .n_head = 3, .k_dim = 8, .v_dim = 4 };

static uint64_t seed;

static uint64_t rnd(uint64_t n)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (seed >> 11) % n;
}

static struct kv_arena *arena_of(size_t n_pages, bool f16)
{
	struct kv_arena *probe, *a;
	size_t bytes;

	assert_int_equal(kv_arena_new(&layout, f16, (size_t)1 << 20, &probe), 0);
	bytes = kv_arena_page_bytes(probe);
	kv_arena_free(probe);
	assert_int_equal(kv_arena_new(&layout, f16, n_pages * bytes + bytes - 1, &a), 0);
	assert_int_equal(kv_arena_n_pages(a), n_pages);
	assert_int_equal(kv_arena_n_free(a), n_pages);
	return a;
}

static void test_layout(void **unused)
{
	struct kv_arena *a = arena_of(4, false);
	struct kv_table t = {};
	char *base, *last;

	(void)unused;
	assert_int_equal(kv_table_reserve(a, &t, 0, 33), 0);
	assert_int_equal(t.n_pages, 2);
	base = kv_k(a, t.pages[0], 0, 0);
	/* [layer][K then V][head][position][dim] */
	assert_ptr_equal(kv_k(a, t.pages[0], 0, 1), base + KV_PAGE_TOK * 8 * 4);
	assert_ptr_equal(kv_v(a, t.pages[0], 0, 0), base + 3 * KV_PAGE_TOK * 8 * 4);
	assert_ptr_equal(kv_v(a, t.pages[0], 0, 2), base + KV_PAGE_TOK * (3 * 8 + 2 * 4) * 4);
	assert_ptr_equal(kv_k(a, t.pages[0], 1, 0), base + KV_PAGE_TOK * 3 * (8 + 4) * 4);
	last = (char *)kv_v(a, t.pages[0], 1, 2) + KV_PAGE_TOK * 4 * 4;
	assert_true(last <= base + kv_arena_page_bytes(a));
	kv_table_done(a, &t);
	assert_int_equal(kv_arena_n_free(a), 4);
	kv_arena_free(a);

	a = arena_of(1, true);
	assert_true(kv_arena_f16(a));
	assert_int_equal(kv_table_reserve(a, &t, 0, 1), 0);
	base = kv_k(a, t.pages[0], 0, 0);
	assert_ptr_equal(kv_k(a, t.pages[0], 0, 1), base + KV_PAGE_TOK * 8 * 2);
	kv_table_done(a, &t);
	kv_arena_free(a);
}

static void test_too_small(void **unused)
{
	struct kv_layout huge = {
		.n_layer = UINT32_MAX, .n_head = UINT32_MAX, .k_dim = UINT32_MAX, .v_dim = 1
	};
	struct kv_arena *a = NULL;

	(void)unused;
	assert_int_equal(kv_arena_new(&layout, false, 100, &a), -E2BIG);
	assert_int_equal(kv_arena_new(&layout, false, 0, &a), -E2BIG);
	assert_int_equal(kv_arena_new(&huge, false, SIZE_MAX, &a), -E2BIG);
	assert_null(a);
	assert_null(kv_arena_free(NULL));
}

static void test_exhaustion(void **unused)
{
	struct kv_arena *a = arena_of(3, false);
	struct kv_table t = {}, u = {};

	(void)unused;
	assert_int_equal(kv_table_reserve(a, &t, 0, 64), 0);
	assert_int_equal(kv_table_reserve(a, &t, 64, 129), -ENOSPC);
	assert_int_equal(t.n_pages, 2);
	assert_int_equal(kv_arena_n_free(a), 1);
	/* A clone that writes into the shared tail and grows needs two pages, one is free. */
	assert_int_equal(kv_table_clone(a, &t, &u), 0);
	assert_int_equal(kv_arena_n_free(a), 1);
	assert_int_equal(kv_page_refs(a, t.pages[1]), 2);
	assert_int_equal(kv_table_reserve(a, &u, 40, 65), -ENOSPC);
	assert_int_equal(u.pages[1], t.pages[1]);
	assert_int_equal(kv_arena_n_free(a), 1);
	assert_int_equal(kv_table_reserve(a, &u, 40, 64), 0);
	assert_int_not_equal(u.pages[1], t.pages[1]);
	assert_int_equal(u.pages[0], t.pages[0]);
	assert_int_equal(kv_arena_n_free(a), 0);
	kv_table_done(a, &t);
	assert_int_equal(kv_arena_n_free(a), 1);
	kv_table_done(a, &u);
	assert_int_equal(kv_arena_n_free(a), 3);
	kv_arena_free(a);
}

static void test_pages_come_back_empty(void **unused)
{
	struct kv_arena *a = arena_of(1, false);
	struct kv_table t = {};
	const float *v;

	(void)unused;
	assert_int_equal(kv_table_reserve(a, &t, 0, 32), 0);
	for (uint32_t h = 0; h < 3; h++)
		memset(kv_v(a, t.pages[0], 1, h), 0x55, KV_PAGE_TOK * 4 * 4);
	kv_table_truncate(a, &t, 0);
	assert_int_equal(kv_table_reserve(a, &t, 0, 1), 0);
	v = kv_v(a, t.pages[0], 1, 2);
	for (size_t i = 0; i < KV_PAGE_TOK * 4; i++)
		assert_true(v[i] == 0);
	kv_table_done(a, &t);
	kv_arena_free(a);
}

/* Property: tables against a model that remembers what each position holds. */

#define N_TABLES 6
#define MAX_TOK  (KV_PAGE_TOK * 7)
#define N_PAGES  20

struct shadow {
	struct kv_table t;
	size_t n_tok;
	float value[MAX_TOK];
};

static float *cell(struct kv_arena *a, const struct kv_table *t, size_t pos)
{
	return (float *)kv_k(a, t->pages[pos / KV_PAGE_TOK], 1, 2) + pos % KV_PAGE_TOK * 8;
}

static void check(struct kv_arena *a, const struct shadow *all)
{
	unsigned refs[N_PAGES] = {};
	size_t used = 0;

	for (size_t i = 0; i < N_TABLES; i++) {
		assert_int_equal(all[i].t.n_pages, (all[i].n_tok + KV_PAGE_TOK - 1) / KV_PAGE_TOK);
		for (size_t p = 0; p < all[i].t.n_pages; p++)
			refs[all[i].t.pages[p]]++;
		for (size_t pos = 0; pos < all[i].n_tok; pos++)
			assert_true(*cell(a, &all[i].t, pos) == all[i].value[pos]);
	}
	for (uint32_t p = 0; p < N_PAGES; p++) {
		assert_int_equal(kv_page_refs(a, p), refs[p]);
		used += refs[p] > 0;
	}
	assert_int_equal(kv_arena_n_free(a), N_PAGES - used);
}

static void grow(struct kv_arena *a, struct shadow *s, unsigned *n_full)
{
	size_t to = MIN(s->n_tok + 1 + rnd(70), (size_t)MAX_TOK), n_pages = s->t.n_pages;
	uint32_t before[MAX_TOK / KV_PAGE_TOK];
	int r;

	if (n_pages > 0)
		memcpy(before, s->t.pages, n_pages * sizeof(*before));
	r = kv_table_reserve(a, &s->t, s->n_tok, to);
	if (r < 0) {
		assert_int_equal(r, -ENOSPC);
		assert_int_equal(s->t.n_pages, n_pages);
		if (n_pages > 0)
			assert_memory_equal(before, s->t.pages, n_pages * sizeof(*before));
		++*n_full;
		return;
	}
	for (size_t pos = s->n_tok; pos < to; pos++) {
		assert_int_equal(kv_page_refs(a, s->t.pages[pos / KV_PAGE_TOK]), 1);
		*cell(a, &s->t, pos) = s->value[pos] = (float)rnd(1 << 20);
	}
	s->n_tok = to;
}

static void test_property(void **unused)
{
	struct kv_arena *a = arena_of(N_PAGES, false);
	static struct shadow all[N_TABLES];
	unsigned n_full = 0, n_cloned = 0;

	(void)unused;
	seed = 20240607;
	for (size_t step = 0; step < 6000; step++) {
		struct shadow *s = &all[rnd(N_TABLES)], *from = &all[rnd(N_TABLES)];

		switch (rnd(8)) {
		case 0:
			s->n_tok = rnd(s->n_tok + 1);
			kv_table_truncate(a, &s->t, s->n_tok);
			break;
		case 1:
			if (s == from)
				break;
			kv_table_done(a, &s->t);
			assert_int_equal(kv_table_clone(a, &from->t, &s->t), 0);
			s->n_tok = from->n_tok;
			memcpy(s->value, from->value, sizeof(s->value));
			n_cloned += from->n_tok > 0;
			break;
		case 2:
			if (rnd(4) > 0)
				break;
			kv_table_done(a, &s->t);
			s->n_tok = 0;
			break;
		default: grow(a, s, &n_full);
		}
		check(a, all);
	}
	assert_true(n_full > 50);
	assert_true(n_cloned > 100);
	for (size_t i = 0; i < N_TABLES; i++)
		kv_table_done(a, &all[i].t);
	assert_int_equal(kv_arena_n_free(a), N_PAGES);
	kv_arena_free(a);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_layout),     cmocka_unit_test(test_too_small),
		cmocka_unit_test(test_exhaustion), cmocka_unit_test(test_pages_come_back_empty),
		cmocka_unit_test(test_property),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
