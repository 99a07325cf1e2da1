/* SPDX-License-Identifier: MIT */
/* test-pressure.c: what systemd wants written, from base64; the next budget. */
#include "tests/test.h"

#include "daemon/pressure.h"

static void test_decode(void **state)
{
	unsigned char out[64];

	(void)state;
	assert_int_equal(pressure_decode("c29tZSAyMDAwMDAgMjAwMDAwMAA=", out, sizeof(out)), 20);
	assert_memory_equal(out, "some 200000 2000000", 20);
	assert_int_equal(pressure_decode("", out, sizeof(out)), 0);
	assert_int_equal(pressure_decode("YQ==", out, sizeof(out)), 1);
	assert_int_equal(out[0], 'a');
}

static void test_bad(void **state)
{
	unsigned char out[2];

	(void)state;
	assert_int_equal(pressure_decode("a b", out, sizeof(out)), -EINVAL);
	assert_int_equal(pressure_decode("\xff\xff", out, sizeof(out)), -EINVAL);
	/* Longer than there is room for. */
	assert_int_equal(pressure_decode("YWFhYWFh", out, sizeof(out)), -EINVAL);
}

static void test_next_budget(void **state)
{
	static const struct {
		uint64_t now, want, floor, configured, grow;
		bool calm;
		uint64_t next;
	} cases[] = {
		/* Down at once, calm or not. */
		{ 1000, 600, 100, 1000, 50, false, 600 },
		{ 1000, 600, 100, 1000, 50, true, 600 },
		{ 1000, 999, 100, 1000, 0, false, 999 },
		/* Never below the floor, also when there is nothing. */
		{ 1000, 60, 100, 1000, 50, false, 100 },
		{ 1000, 0, 100, 1000, 50, true, 100 },
		{ 50, 40, 100, 1000, 50, false, 100 },
		/* Up slowly, and only when it has been calm. */
		{ 600, 900, 100, 1000, 50, false, 600 },
		{ 600, 900, 100, 1000, 50, true, 650 },
		{ 600, 620, 100, 1000, 50, true, 620 },
		{ 600, 900, 100, 1000, 0, true, 600 },
		{ 980, 2000, 100, 1000, 50, true, 1000 },
		{ 1000, 2000, 100, 1000, 50, true, 1000 },
		/* What is above the configured one comes down. */
		{ 1200, 2000, 100, 1000, 50, false, 1000 },
		{ 1200, 1100, 100, 1000, 50, true, 1000 },
		/* As it is. */
		{ 700, 700, 100, 1000, 50, true, 700 },
		{ 700, 700, 100, 1000, 50, false, 700 },
		/* A floor above what is configured is still the least. */
		{ 500, 500, 800, 600, 50, true, 800 },
		/* No limit in sight, and nothing overflows. */
		{ UINT64_MAX - 10, UINT64_MAX, 100, UINT64_MAX, 50, true, UINT64_MAX },
		{ 100, UINT64_MAX, 100, UINT64_MAX, UINT64_MAX, true, UINT64_MAX },
		{ UINT64_MAX, UINT64_MAX, 100, UINT64_MAX, 1, true, UINT64_MAX },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		uint64_t next = pressure_next_budget(cases[i].now, cases[i].want, cases[i].floor,
						     cases[i].configured, cases[i].grow, cases[i].calm);

		if (next != cases[i].next)
			fail_msg("case %zu: %llu instead of %llu", i, (unsigned long long)next,
				 (unsigned long long)cases[i].next);
	}
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_decode),
		cmocka_unit_test(test_bad),
		cmocka_unit_test(test_next_budget),
	};

	return cmocka_run_group_tests_name("pressure", tests, NULL, NULL);
}
