/* SPDX-License-Identifier: MIT */
/*
 * cmocka.h: as much of cmocka as the tests of the CPU kernels use, so that they are built for
 * another architecture with nothing but a compiler and a C library: distributions have cmocka for
 * their own architecture alone.
 *
 * Owns the jump out of the running test. One test program, one thread. What is printed is what
 * tests/run reads.
 */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct CMUnitTest {
	const char *name;
	void (*run)(void **state);
};

enum { SHIM_FAILED = 1, SHIM_SKIPPED };

static jmp_buf shim_leave;

__attribute__((noreturn)) static inline void _fail(const char *file, int line)
{
	fprintf(stderr, "%s:%d: error: Failure!\n", file, line);
	longjmp(shim_leave, SHIM_FAILED);
}

#define print_message(...)     printf(__VA_ARGS__)
#define print_error(...)       fprintf(stderr, __VA_ARGS__)
#define skip()                 longjmp(shim_leave, SHIM_SKIPPED)
#define cmocka_unit_test(test) ((struct CMUnitTest){ .name = #test, .run = (test) })

#define shim_assert(ok, what)                              \
	do {                                               \
		if (!(ok)) {                               \
			print_error("not so: %s\n", what); \
			_fail(__FILE__, __LINE__);         \
		}                                          \
	} while (0)
#define assert_true(x)               shim_assert(x, #x)
#define assert_null(p)               shim_assert(!(p), #p " is NULL")
#define assert_non_null(p)           shim_assert(p, #p " is not NULL")
#define assert_ptr_equal(a, b)       shim_assert((a) == (b), #a " is " #b)
#define assert_int_equal(a, b)       shim_assert((intmax_t)(a) == (intmax_t)(b), #a " is " #b)
#define assert_memory_equal(a, b, n) shim_assert(memcmp(a, b, n) == 0, #a " has the bytes of " #b)

/* 0, or how the test was left. */
static inline int shim_run(const struct CMUnitTest *test)
{
	void *state = NULL;
	int end = setjmp(shim_leave);

	if (end == 0)
		test->run(&state);
	return end;
}

static inline int shim_run_group(const char *name, const struct CMUnitTest *tests, size_t n)
{
	int n_failed = 0;

	printf("[==========] %s: Running %zu test(s).\n", name, n);
	for (size_t i = 0; i < n; i++) {
		int end = shim_run(&tests[i]);

		n_failed += end == SHIM_FAILED;
		printf("[ %s ] %s\n",
		       end == SHIM_FAILED    ? " FAILED "
		       : end == SHIM_SKIPPED ? " SKIPPED"
					     : "      OK",
		       tests[i].name);
		fflush(stdout);
	}
	return n_failed;
}

#define cmocka_run_group_tests_name(name, tests, setup, teardown) \
	shim_run_group(name, tests, sizeof(tests) / sizeof((tests)[0]))
