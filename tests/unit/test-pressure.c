/* SPDX-License-Identifier: MIT */
/* test-pressure.c: what systemd wants written, from base64. */
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

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_decode),
		cmocka_unit_test(test_bad),
	};

	return cmocka_run_group_tests_name("pressure", tests, NULL, NULL);
}
