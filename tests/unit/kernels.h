/* SPDX-License-Identifier: MIT */
/*
 * kernels.h: what test-kernels.c and test-kernels-float.c share: seeded random data, and the table
 * of kernels beside the reference.
 *
 * Bounds: one float operation is off by at most U = 2^-24 of its result, so a sum of products made
 * in a chain of L additions is off by at most about L * U * (sum of the magnitudes of the
 * products). Where that is the bound, L is counted from the kernel; integers and conversions are
 * compared exactly. Buffers are as long as the data and not a byte longer, so that the address
 * sanitizer sees every overrun.
 */
#pragma once

#include "tests/test.h"

#include "daemon/base.h"
#include "kernels/cpu/cpu.h"

#define U 0x1p-24

static uint64_t seed;

static inline uint32_t random_u32(void)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(seed >> 32);
}

/* Uniform in [-1, 1). */
static inline float random_float(void)
{
	return (float)(random_u32() >> 8) * 0x1p-23f - 1.0f;
}

static inline void *new_bytes(size_t n)
{
	void *p = malloc(n ? n : 1);

	assert_non_null(p);
	return p;
}

static inline float *new_floats(size_t n)
{
	float *x = new_bytes(n * sizeof(*x));

	for (size_t i = 0; i < n; i++)
		x[i] = random_float();
	return x;
}

/* Where a block has its scale of half precision, and its minimum; 0: it has no minimum. */
static inline size_t scale_at(enum quant_type type)
{
	return type == QUANT_Q2_K   ? offsetof(struct block_q2_k, d)
	       : type == QUANT_Q3_K ? offsetof(struct block_q3_k, d)
	       : type == QUANT_Q6_K ? offsetof(struct block_q6_k, d)
				    : 0;
}

static inline size_t min_at(enum quant_type type)
{
	return type == QUANT_Q2_K                         ? offsetof(struct block_q2_k, dmin)
	       : type == QUANT_Q4_K || type == QUANT_Q5_K ? offsetof(struct block_q4_k, dmin)
	       : type == QUANT_Q4_1 || type == QUANT_Q5_1 ? offsetof(struct block_q4_1, m)
							  : 0;
}

/* The table beside the reference at hand, or NULL where this machine has none. */
static const struct cpu_kernels *table_under_test;

static inline const struct cpu_kernels *fast_table(void)
{
	return table_under_test;
}

#define FAST_OR_SKIP(k)                                                    \
	const struct cpu_kernels *k = fast_table();                        \
	if (!k) {                                                          \
		skip_because("this CPU has none but the reference table"); \
		return;                                                    \
	}

/* The group once for every table beside the reference. */
#define RUN_WITH_EVERY_TABLE(tests)                                                               \
	({                                                                                        \
		int failed_ = 0;                                                                  \
		unsetenv("RESIDENTD_CPU");                                                        \
		for (size_t i_ = 1; i_ == 1 || cpu_kernels_at(i_); i_++) {                        \
			table_under_test = cpu_kernels_at(i_);                                    \
			print_message("# table: %s\n",                                            \
				      table_under_test ? table_under_test->name : "reference");   \
			failed_ += cmocka_run_group_tests_name(                                   \
				table_under_test ? table_under_test->name : "reference", (tests), \
				NULL, NULL);                                                      \
		}                                                                                 \
		failed_;                                                                          \
	})
