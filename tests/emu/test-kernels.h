/* SPDX-License-Identifier: MIT */
/* test-kernels.h: what the kernels of test-kernels.cu take: C and C++. */
#pragma once

#ifdef __cplusplus
#include <cstdint>
#else
#include <stdint.h>
#endif

/* Each kernel says what a, b and y are. */
struct test_args {
	const void *a, *b;
	void *y;
	uint32_t n;
};

/* Words that test_warp leaves of each lane. */
enum {
	TEST_XOR,
	TEST_DOWN,
	TEST_UP,
	TEST_BROADCAST,
	TEST_HALF_XOR, /* within 16 lanes */
	TEST_BALLOT,
	TEST_ANY,
	TEST_SUM, /* float */
	TEST_WARP_WORDS,
};
