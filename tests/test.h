/* SPDX-License-Identifier: MIT */
/* test.h: what every cmocka test includes: the headers in the order cmocka wants, and a skip that says why. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* base.h has a function fail(), so cmocka's macro goes, and fail_msg() does without it. */
#undef fail
#undef fail_msg
#define fail_msg(...)                      \
	do {                               \
		print_error(__VA_ARGS__);  \
		print_error("\n");         \
		_fail(__FILE__, __LINE__); \
	} while (0)

/* Skips the running test; the reason is printed on a line of its own, which tests/run shows above the totals. */
#define skip_because(...)                         \
	do {                                      \
		printf("# skip: %s: ", __func__); \
		printf(__VA_ARGS__);              \
		printf("\n");                     \
		fflush(stdout);                   \
		skip();                           \
	} while (0)
