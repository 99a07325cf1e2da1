/* SPDX-License-Identifier: MIT */
/* test-prefetch.c: when the next layer's experts are read ahead: windows of steps as the engine would report them. */
#include "tests/test.h"

#include "daemon/residency/prefetch.h"

#define WINDOW  64
#define VERDICT 2048

/* n steps of us, of them stall_us waiting. Returns how often reading ahead was switched. */
static unsigned steps(struct prefetch *p, unsigned n, uint64_t us, uint64_t stall_us)
{
	unsigned switched = 0;

	for (unsigned i = 0; i < n; i++) {
		bool was = prefetch_read(p), told = prefetch_step(p, us, stall_us);

		assert_true(told == (was != prefetch_read(p)));
		switched += told;
	}
	return switched;
}

/* The disk is the bottleneck, and of 100 guesses 96 were right: a trial begins. */
static struct prefetch in_trial(void)
{
	struct prefetch p;

	prefetch_init(&p, -1);
	prefetch_judge(&p, 100, 96);
	assert_int_equal(steps(&p, WINDOW - 1, 1000, 200), 0);
	assert_int_equal(p.phase, PREFETCH_OFF);
	assert_int_equal(steps(&p, 1, 1000, 200), 0);
	assert_int_equal(p.phase, PREFETCH_TRIAL_OFF);
	assert_false(prefetch_read(&p));
	return p;
}

static void test_forced(void **state)
{
	struct prefetch p;

	(void)state;
	prefetch_init(&p, 0);
	prefetch_judge(&p, 1000, 1000);
	for (unsigned i = 0; i < 4 * VERDICT; i++) {
		assert_false(prefetch_guess(&p));
		assert_false(prefetch_read(&p));
		assert_false(prefetch_step(&p, 1000, 900));
	}
	prefetch_init(&p, 1);
	prefetch_judge(&p, 1000, 0);
	for (unsigned i = 0; i < 4 * VERDICT; i++) {
		assert_true(prefetch_guess(&p));
		assert_true(prefetch_read(&p));
		assert_false(prefetch_step(&p, 1000, 0));
	}
}

/* Off it guesses in one step of 32, only to count. */
static void test_samples(void **state)
{
	struct prefetch p;
	unsigned n = 0;

	(void)state;
	prefetch_init(&p, -1);
	for (unsigned i = 0; i < 320; i++) {
		n += prefetch_guess(&p);
		assert_false(prefetch_read(&p));
		assert_false(prefetch_step(&p, 1000, 0));
	}
	assert_int_equal(n, 10);
}

static void test_trial_is_won(void **state)
{
	struct prefetch p = in_trial();

	(void)state;
	assert_int_equal(steps(&p, WINDOW - 1, 1000, 200), 0);
	assert_int_equal(steps(&p, 1, 1000, 200), 1);
	assert_int_equal(p.phase, PREFETCH_TRIAL_ON);
	assert_true(prefetch_guess(&p) && prefetch_read(&p));
	/* 4 % faster. */
	assert_int_equal(steps(&p, WINDOW, 960, 100), 0);
	assert_int_equal(p.phase, PREFETCH_ON);
	assert_int_equal(steps(&p, VERDICT - 1, 960, 100), 0);
	assert_true(prefetch_read(&p));
	/* The verdict is old: off for a window, and compared anew. */
	assert_int_equal(steps(&p, 1, 960, 100), 1);
	assert_int_equal(p.phase, PREFETCH_TRIAL_OFF);
	assert_int_equal(steps(&p, WINDOW, 900, 100), 1);
	assert_int_equal(steps(&p, WINDOW, 960, 100), 1);
	assert_int_equal(p.phase, PREFETCH_OFF);
}

/* 3 % are noise. */
static void test_trial_is_lost(void **state)
{
	struct prefetch p = in_trial();

	(void)state;
	assert_int_equal(steps(&p, WINDOW, 1000, 200), 1);
	assert_int_equal(steps(&p, WINDOW - 1, 970, 200), 0);
	assert_int_equal(steps(&p, 1, 970, 200), 1);
	assert_int_equal(p.phase, PREFETCH_OFF);
	/* Not again before new guesses have been made: the old ones are forgotten. */
	assert_int_equal(steps(&p, 10 * WINDOW, 1000, 200), 0);
	assert_int_equal(p.phase, PREFETCH_OFF);
	prefetch_judge(&p, 64, 62);
	assert_int_equal(steps(&p, WINDOW, 1000, 200), 0);
	assert_int_equal(p.phase, PREFETCH_TRIAL_OFF);
}

static void test_not_worth_a_trial(void **state)
{
	static const struct {
		uint64_t stall_us;
		uint32_t guessed, right;
		bool trial;
	} cases[] = {
		{ 100, 100, 100, false }, /* no more than 10 % of the time is waiting */
		{ 101, 100, 100, true },
		{ 900, 100, 94, false }, /* too many would be read for nothing */
		{ 900, 100, 95, true },
		{ 900, 63, 63, false }, /* too few to tell */
		{ 900, 64, 64, true },
		{ 900, 0, 0, false },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct prefetch p;

		prefetch_init(&p, -1);
		if (cases[i].guessed > 0)
			prefetch_judge(&p, cases[i].guessed, cases[i].right);
		assert_int_equal(steps(&p, WINDOW, 1000, cases[i].stall_us), 0);
		assert_int_equal(p.phase, cases[i].trial ? PREFETCH_TRIAL_OFF : PREFETCH_OFF);
	}
}

/* Each window stands for itself: waiting that is long over starts nothing. */
static void test_windows_are_apart(void **state)
{
	struct prefetch p;

	(void)state;
	prefetch_init(&p, -1);
	assert_int_equal(steps(&p, WINDOW, 1000, 900), 0);
	prefetch_judge(&p, 100, 100);
	assert_int_equal(steps(&p, WINDOW, 1000, 0), 0);
	assert_int_equal(p.phase, PREFETCH_OFF);
}

/* What was right when it was tried may be wrong in another conversation: it stops in the next window, not at the next verdict. */
static void test_wrong_while_on(void **state)
{
	struct prefetch p = in_trial();

	(void)state;
	assert_int_equal(steps(&p, WINDOW, 1000, 200), 1);
	assert_int_equal(steps(&p, WINDOW, 900, 100), 0);
	assert_int_equal(p.phase, PREFETCH_ON);
	assert_int_equal(steps(&p, WINDOW, 900, 100), 0);
	prefetch_judge(&p, 100, 50);
	assert_int_equal(steps(&p, WINDOW - 1, 900, 100), 0);
	assert_int_equal(steps(&p, 1, 900, 100), 1);
	assert_int_equal(p.phase, PREFETCH_OFF);
}

/* Guesses of long ago count less: 2000 right ones do not outweigh what goes wrong by now. */
static void test_guesses_age(void **state)
{
	struct prefetch p;

	(void)state;
	prefetch_init(&p, -1);
	for (unsigned i = 0; i < 100; i++)
		prefetch_judge(&p, 20, 20);
	assert_true(p.guessed < 1100 && p.right == p.guessed);
	for (unsigned i = 0; i < 80; i++)
		prefetch_judge(&p, 20, 0);
	assert_true(p.right * 2 < p.guessed);
	assert_int_equal(steps(&p, WINDOW, 1000, 900), 0);
	assert_int_equal(p.phase, PREFETCH_OFF);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_forced),
		cmocka_unit_test(test_samples),
		cmocka_unit_test(test_trial_is_won),
		cmocka_unit_test(test_trial_is_lost),
		cmocka_unit_test(test_not_worth_a_trial),
		cmocka_unit_test(test_windows_are_apart),
		cmocka_unit_test(test_wrong_while_on),
		cmocka_unit_test(test_guesses_age),
	};

	return cmocka_run_group_tests_name("prefetch", tests, NULL, NULL);
}
