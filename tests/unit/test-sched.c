/* SPDX-License-Identifier: MIT */
/* test-sched.c: time shared by weight between users, order of class and arrival within one. */
#include "tests/test.h"

#include "daemon/sched.h"

static void test_empty(void **state)
{
	struct sched s = {};

	(void)state;
	assert_null(sched_pick(&s, false));
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
		struct sched_entry *p = sched_pick(&s, false);

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
	sched_pick(&s, false)->running = true;
	sched_add(&s, &old);
	assert_ptr_equal(sched_pick(&s, false), &young);
	assert_ptr_equal(sched_pick(&s, true), &young);
	sched_remove(&s, &young);
	assert_null(sched_pick(&s, true));
	assert_ptr_equal(sched_pick(&s, false), &old);
}

/* Two users who always have work share the time by their weights, within one step's charge. */
static void test_shares_by_weight(void **state)
{
	struct sched s = {};
	struct sched_entry e[3] = {
		{ .seq = 1, .user = 1000, .weight = 100 },
		{ .seq = 2, .user = 1000, .weight = 100 },
		{ .seq = 3, .user = 1001, .weight = 300 },
	};
	uint64_t had[2] = {};
	uint32_t seed = 7;

	(void)state;
	for (size_t i = 0; i < 3; i++)
		sched_add(&s, &e[i]);
	for (size_t step = 0; step < 100000; step++) {
		struct sched_entry *p = sched_pick(&s, false);
		uint64_t us;

		seed = seed * 1664525 + 1013904223;
		us = 100 + seed % 5000;
		had[p->user - 1000] += us;
		sched_charge(&s, p, us);
		/* One step is at most 5099 us; a third of it for the heavier user. */
		assert_true(had[1] <= 3 * had[0] + 3 * 5100 && 3 * had[0] <= had[1] + 3 * 5100);
	}
	/* Two requests of one user get him no more than one. */
	assert_true(had[0] > 0 && had[1] / had[0] >= 2);
}

/* Asking one short thing after the other, never two at once, is no way around a weight. */
static void test_leaving_forgives_nothing(void **state)
{
	struct sched s = {};
	struct sched_entry heavy = { .seq = 1, .user = 1, .weight = 10000 };
	uint64_t had[2] = {};

	(void)state;
	sched_add(&s, &heavy);
	for (uint64_t seq = 2; seq < 20000; seq++) {
		struct sched_entry light = { .seq = seq, .user = 2, .weight = 100 };

		sched_add(&s, &light);
		while (sched_pick(&s, false) == &heavy) {
			had[0] += 1000;
			sched_charge(&s, &heavy, 1000);
		}
		had[1] += 1000;
		sched_charge(&s, &light, 1000);
		sched_remove(&s, &light);
	}
	assert_true(had[0] >= 95 * had[1] && had[0] <= 105 * had[1]);
}

/* Who comes late begins where the others are: he has earned nothing by staying away, and owes nothing. */
static void test_newcomer_begins_at_the_floor(void **state)
{
	struct sched s = {};
	struct sched_entry old = { .seq = 1, .user = 1, .weight = 100 };
	struct sched_entry late = { .seq = 2, .user = 2, .weight = 100 };

	(void)state;
	sched_add(&s, &old);
	for (size_t i = 0; i < 1000; i++)
		sched_charge(&s, &old, 1000);
	sched_add(&s, &late);
	assert_int_equal(late.vtime, old.vtime);
	sched_charge(&s, &late, 1);
	assert_ptr_equal(sched_pick(&s, false), &old);
	/* Also when everybody was away in between. */
	sched_remove(&s, &old);
	sched_remove(&s, &late);
	old.vtime = late.vtime = 0;
	sched_add(&s, &late);
	assert_true(late.vtime > 0);
}

static void test_class_within_a_user(void **state)
{
	struct sched s = {};
	struct sched_entry idle = { .seq = 1, .user = 1, .weight = 100, .class = 0 };
	struct sched_entry interactive = { .seq = 2, .user = 1, .weight = 100, .class = 2 };
	struct sched_entry other = { .seq = 3, .user = 2, .weight = 100, .class = 0 };

	(void)state;
	sched_add(&s, &idle);
	sched_pick(&s, false)->running = true;
	sched_add(&s, &interactive);
	assert_ptr_equal(sched_pick(&s, false), &interactive);
	sched_add(&s, &other);
	sched_charge(&s, &interactive, 1000);
	/* A class is no share: the other user's idle request is next now. */
	assert_ptr_equal(sched_pick(&s, false), &other);
	sched_charge(&s, &other, 5000);
	assert_ptr_equal(sched_pick(&s, false), &interactive);
}

/* Random adds and removes of one user against a sorted array. */
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
			e[i] = (struct sched_entry){ .seq = i + 1, .weight = 100 };
			sched_add(&s, &e[i]);
		}
		in[i] = !in[i];
		for (size_t k = 64; k-- > 0;)
			if (in[k]) {
				n++;
				lowest = k;
			}
		assert_int_equal(s.n, n);
		if (n == 0) {
			assert_null(sched_pick(&s, false));
			continue;
		}
		assert_ptr_equal(sched_pick(&s, false), &e[lowest]);
		sched_charge(&s, &e[lowest], seed % 100);
	}
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_empty),
		cmocka_unit_test(test_order_of_arrival),
		cmocka_unit_test(test_running_stays),
		cmocka_unit_test(test_shares_by_weight),
		cmocka_unit_test(test_leaving_forgives_nothing),
		cmocka_unit_test(test_newcomer_begins_at_the_floor),
		cmocka_unit_test(test_class_within_a_user),
		cmocka_unit_test(test_property),
	};

	return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
