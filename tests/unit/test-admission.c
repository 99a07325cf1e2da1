/* SPDX-License-Identifier: MIT */
/* test-admission.c: keep everything, or only what is hotter: literal traces that want one way or the other. */
#include "tests/test.h"

#include "daemon/residency/admission.h"

#define N_BLOCKS 256
#define N_USED   8

static uint64_t seed;

static uint32_t rnd(uint32_t n)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (uint32_t)((seed >> 11) % n);
}

static struct admission *admission_of(enum evict_policy policy)
{
	struct admission *a;

	seed = 0x243f6a8885a308d3;
	assert_int_equal(admission_new(policy, N_BLOCKS, &a), 0);
	assert_false(admission_is_selective(a));
	return a;
}

/* Each step draws anew; three of four draws are among the hottest quarter: what was not hot before will not be wanted soon. */
static void skewed_step(struct admission *a, uint32_t capacity)
{
	bool taken[N_BLOCKS] = {};

	admission_step(a, capacity);
	for (unsigned n = 0; n < N_USED;) {
		uint32_t block = rnd(4) > 0 ? rnd(N_BLOCKS / 4) : rnd(N_BLOCKS);

		if (taken[block])
			continue;
		taken[block] = true;
		admission_touch(a, block);
		n++;
	}
}

/* A text's own experts, used over and over for 40 steps, then others: what is new is what is wanted next. */
static void repeating_step(struct admission *a, uint32_t capacity, unsigned step)
{
	admission_step(a, capacity);
	for (uint32_t i = 0; i < N_USED; i++)
		admission_touch(a, (step / 40 * 24 + i * 3 + step % 3) % N_BLOCKS);
}

static void test_skewed_is_selective(void **state)
{
	static const enum evict_policy policies[] = { EVICT_LRU, EVICT_CLOCK_LFU };

	(void)state;
	for (size_t p = 0; p < ARRAY_SIZE(policies); p++) {
		struct admission *a = admission_of(policies[p]);
		unsigned n = 0;

		for (unsigned i = 0; i < 3000; i++) {
			skewed_step(a, 64);
			n += i >= 1000 && admission_is_selective(a);
		}
		/* Nearly always. */
		assert_true(n > 1900);
		admission_free(a);
	}
}

static void test_repeating_stays_open(void **state)
{
	static const enum evict_policy policies[] = { EVICT_LRU, EVICT_CLOCK_LFU };

	(void)state;
	for (size_t p = 0; p < ARRAY_SIZE(policies); p++) {
		struct admission *a = admission_of(policies[p]);

		for (unsigned i = 0; i < 3000; i++) {
			repeating_step(a, 32, i);
			assert_false(admission_is_selective(a));
		}
		admission_free(a);
	}
}

/* The verdict follows the routing, there and back. */
static void test_changes_its_mind(void **state)
{
	struct admission *a = admission_of(EVICT_CLOCK_LFU);

	(void)state;
	for (unsigned i = 0; i < 1500; i++)
		skewed_step(a, 64);
	assert_true(admission_is_selective(a));
	for (unsigned i = 0; i < 1500; i++)
		repeating_step(a, 32, i);
	assert_false(admission_is_selective(a));
	for (unsigned i = 0; i < 1500; i++)
		skewed_step(a, 64);
	assert_true(admission_is_selective(a));
	admission_free(a);
}

/* Room for all: both ways are one. */
static void test_everything_fits(void **state)
{
	struct admission *a = admission_of(EVICT_CLOCK_LFU);

	(void)state;
	for (unsigned i = 0; i < 1000; i++) {
		skewed_step(a, N_BLOCKS);
		assert_false(admission_is_selective(a));
	}
	admission_free(a);
}

/* The tier shrinks and grows at random, also to nothing; every policy. */
static void test_capacity_moves(void **state)
{
	(void)state;
	for (int p = EVICT_LRU; p <= EVICT_S3_FIFO; p++) {
		struct admission *a = admission_of((enum evict_policy)p);

		for (unsigned i = 0; i < 3000; i++) {
			uint32_t capacity = rnd(4) > 0 ? rnd(N_BLOCKS + 1) : rnd(3);

			if (i % 64 < 32)
				skewed_step(a, capacity);
			else
				repeating_step(a, capacity, i);
		}
		admission_free(a);
	}
	assert_null(admission_free(NULL));
}

/* The same trace gives the same verdicts. */
static void test_repeatable(void **state)
{
	bool verdict[500];

	(void)state;
	for (unsigned round = 0; round < 2; round++) {
		struct admission *a = admission_of(EVICT_LFU);

		for (unsigned i = 0; i < ARRAY_SIZE(verdict); i++) {
			skewed_step(a, 40);
			if (round == 0)
				verdict[i] = admission_is_selective(a);
			else
				assert_true(verdict[i] == admission_is_selective(a));
		}
		admission_free(a);
	}
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_skewed_is_selective),
		cmocka_unit_test(test_repeating_stays_open),
		cmocka_unit_test(test_changes_its_mind),
		cmocka_unit_test(test_everything_fits),
		cmocka_unit_test(test_capacity_moves),
		cmocka_unit_test(test_repeatable),
	};

	return cmocka_run_group_tests_name("admission", tests, NULL, NULL);
}
