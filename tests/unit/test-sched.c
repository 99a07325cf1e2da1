/* SPDX-License-Identifier: MIT */
/* test-sched.c: order of arrival, whatever the order of hand-over; the running one first. */
#include "tests/test.h"

#include "daemon/sched.h"

static void test_empty(void **state)
{
	struct sched s = {};

	(void)state;
	assert_null(sched_pick(&s));
}

static void test_order_of_arrival(void **state)
{
	struct sched s = {};
	struct sched_entry e[4] = { { .seq = 7 }, { .seq = 3 }, { .seq = 9 }, { .seq = 5 } };
	static const uint64_t expected[4] = { 3, 5, 7, 9 };

	(void)state;
	for (size_t i = 0; i < 4; i++)
		sched_add(&s, &e[i]);
	assert_int_equal(s.n, 4);
	for (size_t i = 0; i < 4; i++) {
		struct sched_entry *p = sched_pick(&s);

		assert_int_equal(p->seq, expected[i]);
		sched_remove(&s, p);
	}
	assert_int_equal(s.n, 0);
	assert_null(s.first);
	assert_null(s.last);
}

/* One that arrived earlier but took longer to prepare does not interrupt what runs. */
static void test_running_stays(void **state)
{
	struct sched s = {};
	struct sched_entry young = { .seq = 2 }, old = { .seq = 1 };

	(void)state;
	sched_add(&s, &young);
	sched_pick(&s)->running = true;
	sched_add(&s, &old);
	assert_ptr_equal(sched_pick(&s), &young);
	sched_remove(&s, &young);
	assert_ptr_equal(sched_pick(&s), &old);
}

/* Random adds and removes against a sorted array. */
static void test_property(void **state)
{
	struct sched s = {};
	struct sched_entry e[64] = {};
	bool in[64] = {};
	uint32_t seed = 1;

	(void)state;
	for (size_t step = 0; step < 20000; step++) {
		size_t i, n = 0, lowest = 64;

		seed = seed * 1664525 + 1013904223;
		i = seed >> 26;
		if (in[i]) {
			sched_remove(&s, &e[i]);
		} else {
			e[i].seq = i + 1;
			sched_add(&s, &e[i]);
		}
		in[i] = !in[i];
		for (size_t k = 64; k-- > 0;)
			if (in[k]) {
				n++;
				lowest = k;
			}
		assert_int_equal(s.n, n);
		if (n > 0)
			assert_ptr_equal(sched_pick(&s), &e[lowest]);
		else
			assert_null(sched_pick(&s));
	}
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_empty),
		cmocka_unit_test(test_order_of_arrival),
		cmocka_unit_test(test_running_stays),
		cmocka_unit_test(test_property),
	};

	return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
