/* SPDX-License-Identifier: MIT */
/* test-route.c: sorting what a router chose: stable, complete, and deaf to what no router can choose. */
#include "tests/unit/kernels.h"

#include "daemon/engine/route.h"

#define N_EXPERT 5
#define N_USED   2

/* The caller frees ret->chosen, which is where the memory begins. Bytes that nobody wrote are not zeros. */
static void new_route(struct route *ret, size_t n_tok, size_t n_used, size_t n_expert)
{
	size_t bytes = route_bytes(n_tok, n_used, n_expert);
	void *mem = aligned_alloc(64, bytes);

	assert_non_null(mem);
	memset(mem, 0xa5, bytes);
	route_init(ret, mem, n_tok, n_used, n_expert);
	assert_ptr_equal(ret->chosen, mem);
}

static int sort(struct route *r, const uint32_t *chosen)
{
	memcpy(r->chosen, chosen, r->n_tok * r->n_used * sizeof(*chosen));
	return route_sort(r);
}

static void test_sorts_by_expert_then_token(void **state)
{
	static const uint32_t chosen[] = { 4, 1, 1, 0, 4, 0, 1, 4 };
	static const uint32_t place[] = { 5, 2, 3, 0, 6, 1, 4, 7 };
	static const uint32_t token[] = { 1, 2, 0, 1, 3, 0, 2, 3 };
	static const size_t first[] = { 0, 2, 5, 5, 5, 8 };
	static const uint32_t active[] = { 0, 1, 4 }, n_rows[] = { 2, 3, 3 };
	struct route r;

	(void)state;
	new_route(&r, 4, N_USED, N_EXPERT);
	/* Sorting again, after something else, leaves nothing of it. */
	for (int i = 0; i < 2; i++) {
		assert_int_equal(sort(&r, chosen), 0);
		assert_memory_equal(r.chosen, chosen, sizeof(chosen));
		assert_memory_equal(r.place, place, sizeof(place));
		assert_memory_equal(r.token, token, sizeof(token));
		assert_memory_equal(r.first, first, sizeof(first));
		assert_int_equal(r.n_active, 3);
		assert_memory_equal(r.active, active, sizeof(active));
		assert_memory_equal(r.n_rows, n_rows, sizeof(n_rows));
		assert_int_equal(sort(&r, (const uint32_t[]){ 2, 3, 3, 2, 2, 0, 1, 2 }), 0);
		assert_int_equal(r.n_active, 4);
	}
	free(r.chosen);
}

static void test_one_expert_and_none(void **state)
{
	static const uint32_t zeros[3];
	struct route r;

	(void)state;
	new_route(&r, 3, 1, 1);
	assert_int_equal(sort(&r, zeros), 0);
	assert_int_equal(r.n_active, 1);
	assert_int_equal(r.n_rows[0], 3);
	for (uint32_t t = 0; t < 3; t++)
		assert_int_equal(r.place[t], t);
	free(r.chosen);
	new_route(&r, 0, N_USED, N_EXPERT);
	assert_int_equal(route_sort(&r), 0);
	assert_int_equal(r.n_active, 0);
	assert_int_equal(r.first[N_EXPERT], 0);
	free(r.chosen);
}

static void test_hostile_choices(void **state)
{
	static const uint32_t good[] = { 0, 1, 4, 3, 1, 0 };
	static const struct {
		size_t slot;
		uint32_t expert;
	} bad[] = { { 0, N_EXPERT }, { 5, N_EXPERT },  { 2, UINT32_MAX }, { 3, UINT32_MAX - 1 },
		    { 1, 0 },        { 3, 4 },         { 4, 0 },          { 5, 1 },
		    { 2, 1u << 31 }, { 0, 0x80000001 } };
	struct route r;

	(void)state;
	new_route(&r, 3, N_USED, N_EXPERT);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		uint32_t chosen[ARRAY_SIZE(good)];

		memcpy(chosen, good, sizeof(good));
		chosen[bad[i].slot] = bad[i].expert;
		assert_int_equal(sort(&r, chosen), -EIO);
		assert_int_equal(r.n_active, 0);
		assert_int_equal(sort(&r, good), 0);
		assert_int_equal(r.n_active, 4);
	}
	free(r.chosen);
	/* More choices than there are experts: some of them must be the same. */
	new_route(&r, 1, 3, 2);
	assert_int_equal(sort(&r, (const uint32_t[]){ 0, 1, 0 }), -EIO);
	free(r.chosen);
}

/* Random choices: places are a permutation, in order of expert and then of token. */
static void test_every_slot_has_its_place(void **state)
{
	static const size_t shapes[][3] = { { 1, 8, 256 }, { 100, 8, 256 }, { 33, 4, 4 }, { 64, 1, 3 } };

	(void)state;
	seed = 1;
	for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
		size_t n_slots = shapes[i][0] * shapes[i][1], n_active = 0;
		struct route r;

		new_route(&r, shapes[i][0], shapes[i][1], shapes[i][2]);
		for (size_t t = 0; t < r.n_tok; t++) {
			uint32_t from = random_u32() >> 8;

			/* Steps of a prime that divides no number of experts here: all different. */
			for (size_t k = 0; k < r.n_used; k++)
				r.chosen[t * r.n_used + k] = (uint32_t)((from + 7 * k) % r.n_expert);
		}
		assert_int_equal(route_sort(&r), 0);
		for (size_t s = 0; s < n_slots; s++) {
			assert_in_range(r.place[s], r.first[r.chosen[s]], r.first[r.chosen[s] + 1] - 1);
			assert_int_equal(r.token[r.place[s]], s / r.n_used);
		}
		for (uint32_t e = 0; e < r.n_expert; e++) {
			size_t n = r.first[e + 1] - r.first[e];

			for (size_t p = r.first[e] + 1; p < r.first[e + 1]; p++)
				assert_true(r.token[p] > r.token[p - 1]);
			if (n == 0)
				continue;
			assert_int_equal(r.active[n_active], e);
			assert_int_equal(r.n_rows[n_active++], n);
		}
		assert_int_equal(r.n_active, n_active);
		assert_int_equal(r.first[r.n_expert], n_slots);
		free(r.chosen);
	}
}

static void test_layout(void **state)
{
	struct route r;

	(void)state;
	new_route(&r, 3, N_USED, N_EXPERT);
	for (size_t i = 0; i < 7; i++) {
		const void *const arrays[] = { r.chosen, r.weight, r.place, r.token,
					       r.first,  r.active, r.n_rows };

		assert_int_equal((uintptr_t)arrays[i] % 64, 0);
		assert_true(i == 0 || arrays[i] > arrays[i - 1]);
	}
	assert_int_equal((char *)r.n_rows + 64 - (char *)r.chosen, route_bytes(3, N_USED, N_EXPERT));
	free(r.chosen);
	assert_int_equal(route_bytes(SIZE_MAX, 2, 8), SIZE_MAX);
	assert_int_equal(route_bytes(SIZE_MAX / 8, 8, 8), SIZE_MAX);
	assert_int_equal(route_bytes((size_t)1 << 31, 2, 8), SIZE_MAX);
	assert_int_equal(route_bytes(1, 1, SIZE_MAX), SIZE_MAX);
	assert_int_equal(route_bytes(1, 1, UINT32_MAX), SIZE_MAX);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sorts_by_expert_then_token),
		cmocka_unit_test(test_one_expert_and_none),
		cmocka_unit_test(test_hostile_choices),
		cmocka_unit_test(test_every_slot_has_its_place),
		cmocka_unit_test(test_layout),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
