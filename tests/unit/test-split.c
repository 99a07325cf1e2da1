/* SPDX-License-Identifier: MIT */
/*
 * Which way blocks go: against every way there is, for a few blocks; without prices; and prices that are measured, among them
 * some that are wrong.
 */
#include "tests/test.h"

#include "daemon/residency/split.h"

#include <math.h>

#define N_MAX 10U
#define MB    (UINT64_C(1) << 20)

#define assert_near(got, want, part) assert_true(fabs((got) - (want)) <= (part) * (want))

static uint64_t seed = 0x243f6a8885a308d3;

static uint64_t rnd(uint64_t n)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (seed >> 11) % n;
}

struct block {
	uint64_t bytes;
	uint32_t n_rows;
};

static double cpu_us(const struct split_prices *p, const struct block *b)
{
	return (double)b->bytes * (p->cpu_us_per_byte + (b->n_rows - 1) * p->cpu_us_per_byte_row);
}

/* When everything is done, if the blocks with a bit in `copied` are copied one after the other. */
static double done_us(const struct split_prices *p, const struct block *b, unsigned n, unsigned copied)
{
	double cpu = 0, bus = 0, card = 0;

	for (unsigned i = 0; i < n; i++) {
		if (!(copied >> i & 1)) {
			cpu += cpu_us(p, &b[i]);
			continue;
		}
		bus += p->copy_us_each + (double)b[i].bytes * p->copy_us_per_byte;
		card = fmax(card, bus) + (double)b[i].bytes * p->gpu_us_per_byte;
	}
	return fmax(cpu, card);
}

static double best_us(const struct split_prices *p, const struct block *b, unsigned n)
{
	double best = INFINITY;

	for (unsigned copied = 0; copied < 1U << n; copied++)
		best = fmin(best, done_us(p, b, n, copied));
	return best;
}

/* What split.c makes of it. */
static unsigned split(const struct split_prices *p, const struct block *b, unsigned n)
{
	struct split s = {};
	unsigned copied = 0;

	split_begin(&s);
	for (unsigned i = 0; i < n; i++)
		if (split_next(&s, p, b[i].bytes, b[i].n_rows) == SPLIT_COPY)
			copied |= 1U << i;
	assert_near(fmax(s.copy_us, s.cpu_us), done_us(p, b, n, copied), 1e-9);
	return copied;
}

static struct split_prices random_prices(void)
{
	return (struct split_prices){
		.copy_us_per_byte = 1e-6 * (double)(1 + rnd(300)),
		.copy_us_each = rnd(2) ? (double)rnd(200) : 0,
		.cpu_us_per_byte = 1e-6 * (double)(1 + rnd(300)),
		.cpu_us_per_byte_row = 1e-7 * (double)rnd(300),
		.gpu_us_per_byte = rnd(2) ? 1e-6 * (double)rnd(200) : 0,
	};
}

static double longest_us(const struct split_prices *p, const struct block *b)
{
	return fmax(cpu_us(p, b),
		    p->copy_us_each + (double)b->bytes * (p->copy_us_per_byte + p->gpu_us_per_byte));
}

static void test_equal_blocks(void **unused)
{
	unsigned both = 0;

	(void)unused;
	for (unsigned i = 0; i < 3000; i++) {
		struct split_prices p = random_prices();
		struct block b[N_MAX],
			one = { .bytes = 1 + rnd(8 * MB), .n_rows = 1 + (uint32_t)rnd(9) };
		unsigned n = 1 + (unsigned)rnd(N_MAX), copied;
		double best, got;

		for (unsigned k = 0; k < n; k++)
			b[k] = one;
		copied = split(&p, b, n);
		got = done_us(&p, b, n, copied);
		best = best_us(&p, b, n);
		assert_true(got <= best + longest_us(&p, &one));
		/* Even more: of equal blocks it is a best way. */
		assert_true(got <= best * (1 + 1e-9));
		both += copied != 0 && copied != (1U << n) - 1;
	}
	assert_true(both > 1000);
}

/* Never worse than one path alone; and, where nothing is done but copying, at most twice what is best. */
static void test_unequal_blocks(void **unused)
{
	(void)unused;
	for (unsigned i = 0; i < 2000; i++) {
		struct split_prices p = random_prices();
		unsigned n = 1 + (unsigned)rnd(N_MAX);
		struct block b[N_MAX];
		double got;

		for (unsigned k = 0; k < n; k++)
			b[k] = (struct block){ .bytes = 1 + rnd(8 * MB),
					       .n_rows = 1 + (uint32_t)rnd(64) };
		got = done_us(&p, b, n, split(&p, b, n));
		assert_true(got <= done_us(&p, b, n, 0) * (1 + 1e-9));
		assert_true(got <= done_us(&p, b, n, (1U << n) - 1) * (1 + 1e-9));
		p.gpu_us_per_byte = 0;
		got = done_us(&p, b, n, split(&p, b, n));
		assert_true(got <= 2 * best_us(&p, b, n) * (1 + 1e-9));
	}
}

static void test_literal(void **unused)
{
	const struct split_prices p = { .copy_us_per_byte = 2e-4,
					.copy_us_each = 10,
					.cpu_us_per_byte = 1e-4,
					.cpu_us_per_byte_row = 1e-5,
					.gpu_us_per_byte = 1e-5 };
	static const enum split_path want[] = { SPLIT_CPU, SPLIT_CPU, SPLIT_COPY, SPLIT_CPU };
	struct split s = {};

	(void)unused;
	split_begin(&s);
	for (size_t i = 0; i < ARRAY_SIZE(want); i++)
		assert_int_equal(split_next(&s, &p, 1000000, 1), want[i]);
	assert_near(s.cpu_us, 300, 1e-9);
	assert_near(s.copy_us, 220, 1e-9);
	/* Twenty-one rows take thrice as long on the CPU; the bus is free before the card is. */
	assert_int_equal(split_next(&s, &p, 1000000, 21), SPLIT_COPY);
	assert_near(s.copy_us, 430, 1e-9);
	split_begin(&s);
	assert_true(s.copy_us + s.cpu_us == 0);
	assert_int_equal(split_next(&s, &p, 1000000, 12), SPLIT_CPU);
	assert_int_equal(split_next(&s, &p, 1000000, 13), SPLIT_COPY);

	/* When both are done at the same time: the CPU. Nothing to do, and no rows: likewise. */
	split_begin(&s);
	assert_int_equal(
		split_next(&s, &(struct split_prices){ .copy_us_per_byte = 1, .cpu_us_per_byte = 1 },
			   5, 1),
		SPLIT_CPU);
	assert_int_equal(split_next(&s, &p, 0, 0), SPLIT_CPU);
	split_begin(&s);
	assert_int_equal(split_next(&s, &p, 1000000, 0), SPLIT_CPU);
}

/* Copies among the next n blocks. */
static unsigned count_copies(struct split *s, const struct split_prices *p, unsigned n)
{
	unsigned copies = 0;

	for (unsigned i = 0; i < n; i++) {
		if (i % 8 == 0)
			split_begin(s);
		copies += split_next(s, p, MB, 1) == SPLIT_COPY;
	}
	return copies;
}

static void test_probes(void **unused)
{
	struct split_prices p = {};
	struct split s = {};

	(void)unused;
	/* Nothing known, and then only what the CPU costs: seldom, across layers. */
	assert_int_equal(count_copies(&s, &p, SPLIT_PROBE_UNKNOWN), 0);
	assert_int_equal(split_next(&s, &p, MB, 1), SPLIT_COPY);
	p.cpu_us_per_byte = 1e-4;
	assert_int_equal(count_copies(&s, &p, 10 * (SPLIT_PROBE_UNKNOWN + 1)), 10);

	/* Only what a copy costs: it is the CPU's, so that that is known soon. */
	p = (struct split_prices){ .copy_us_per_byte = 1e-4 };
	assert_int_equal(count_copies(&s, &p, SPLIT_PROBE_UNKNOWN * 10), 0);

	/* Both, and one way does not pay: very seldom. */
	p.cpu_us_per_byte = 1e-6;
	s = (struct split){};
	assert_int_equal(count_copies(&s, &p, SPLIT_PROBE_KNOWN), 0);
	assert_int_equal(split_next(&s, &p, MB, 1), SPLIT_COPY);
	assert_int_equal(count_copies(&s, &p, SPLIT_PROBE_KNOWN), 0);
	p = (struct split_prices){ .copy_us_per_byte = 1e-6, .cpu_us_per_byte = 1e-4 };
	s = (struct split){};
	assert_int_equal(count_copies(&s, &p, SPLIT_PROBE_KNOWN), SPLIT_PROBE_KNOWN);
	split_begin(&s);
	assert_int_equal(split_next(&s, &p, MB, 1), SPLIT_CPU);
}

/* ---- prices ---- */

/* Around 1e-4 a byte, within 10 %. */
static void measure_copies(struct split_prices *p, unsigned n, double times)
{
	for (unsigned i = 0; i < n; i++) {
		uint64_t bytes = MB + rnd(4 * MB);

		split_measure_copy(
			p, bytes,
			(uint64_t)((double)bytes * times * (0.9e-4 + 1e-7 * (double)rnd(200))));
	}
}

static void test_outliers(void **unused)
{
	(void)unused;
	/* Of two the faster. */
	for (unsigned at = 0; at < 2; at++) {
		struct split_prices p = {};

		measure_copies(&p, 1, at == 0 ? 100 : 1);
		measure_copies(&p, 1, at == 1 ? 100 : 1);
		assert_near(p.copy_us_per_byte, 1e-4, 0.12);
	}
	/* Wherever it is, the first included. */
	for (unsigned at = 0; at < 40; at++)
		for (unsigned slow = 0; slow < 2; slow++) {
			struct split_prices p = {};

			measure_copies(&p, at, 1);
			measure_copies(&p, 1, slow ? 100 : 0.01);
			if (at >= 2)
				assert_near(p.copy_us_per_byte, 1e-4, 0.12);
			measure_copies(&p, 2, 1);
			assert_near(p.copy_us_per_byte, 1e-4, 0.12);
			measure_copies(&p, 40, 1);
			assert_near(p.copy_us_per_byte, 1e-4, 0.08);
		}
}

static void test_change(void **unused)
{
	struct split_prices p = {};

	(void)unused;
	measure_copies(&p, 20, 1);
	measure_copies(&p, 40, 3);
	assert_near(p.copy_us_per_byte, 3e-4, 0.1);
	measure_copies(&p, 60, 0.1);
	assert_near(p.copy_us_per_byte, 1e-5, 0.15);
	/* Two that are wrong in a row are believed a little. */
	measure_copies(&p, 2, 10);
	assert_true(p.copy_us_per_byte < 2e-5);
}

static void test_nothing_measured(void **unused)
{
	struct split_prices p = {}, zero = {};

	(void)unused;
	split_measure_copy(&p, 0, 100);
	split_measure_copy(&p, 100, 0);
	split_measure_cpu(&p, 0, 1, 100);
	split_measure_cpu(&p, 0, 7, 100);
	split_measure_cpu(&p, 100, 1, 0);
	split_measure_cpu(&p, 100, 7, 0);
	assert_memory_equal(&p, &zero, sizeof(p));
	/* As odd as it gets. */
	split_measure_copy(&p, 1, UINT64_MAX);
	split_measure_copy(&p, UINT64_MAX, 1);
	split_measure_cpu(&p, 1, NAN, UINT64_MAX);
	split_measure_cpu(&p, UINT64_MAX, 0, 1);
	split_measure_cpu(&p, UINT64_MAX, 1e300, 1);
	assert_true(p.copy_us_per_byte > 0 && p.cpu_us_per_byte > 0 && p.cpu_us_per_byte_row > 0);
	assert_true(isfinite(p.copy_us_per_byte) && isfinite(p.cpu_us_per_byte));
}

/* What a copy costs whatever its size is not counted twice. */
static void test_each(void **unused)
{
	struct split_prices p = { .copy_us_each = 50 };

	(void)unused;
	split_measure_copy(&p, 1000000, 150);
	assert_near(p.copy_us_per_byte, 1e-4, 1e-6);
	for (unsigned i = 0; i < 100; i++)
		split_measure_copy(&p, 1000000, 40);
	assert_near(p.copy_us_per_byte, 2e-5, 0.01);
}

static void measure_cpu(struct split_prices *p, double n_rows, double us_per_byte)
{
	split_measure_cpu(p, 10 * MB, n_rows, (uint64_t)(10 * MB * us_per_byte));
}

static void test_rows(void **unused)
{
	struct split_prices p = {};
	double single, more;

	(void)unused;
	/* A prompt comes first: all is put down to further rows. */
	for (unsigned i = 0; i < 10; i++)
		measure_cpu(&p, 101, 5e-4 + 100 * 2e-5);
	assert_true(p.cpu_us_per_byte == 0);
	assert_near(p.cpu_us_per_byte_row, 2.5e-5, 0.001);
	more = p.cpu_us_per_byte_row;

	/* Single rows, or almost, leave that alone; and the other way round. */
	for (unsigned i = 0; i < 10; i++)
		measure_cpu(&p, i % 2 ? 1 : 1.2, 5e-4);
	assert_near(p.cpu_us_per_byte, 5e-4, 0.001);
	assert_true(p.cpu_us_per_byte_row == more);
	single = p.cpu_us_per_byte;
	for (unsigned i = 0; i < 60; i++)
		measure_cpu(&p, 101, 5e-4 + 100 * 2e-5);
	assert_true(p.cpu_us_per_byte == single);
	assert_near(p.cpu_us_per_byte_row, 2e-5, 0.01);

	/* Two rows that are off by a tenth of the first would be off by more than all: they count little. */
	measure_cpu(&p, 2, 5.5e-4 + 2e-5);
	measure_cpu(&p, 2, 5.5e-4 + 2e-5);
	measure_cpu(&p, 101, 5e-4 + 100 * 2e-5);
	assert_near(p.cpu_us_per_byte_row, 2e-5, 0.1);
	/* Nor is it ever nothing, from which there would be no way back. */
	for (unsigned i = 0; i < 200; i++)
		measure_cpu(&p, 20, 4e-4);
	assert_true(p.cpu_us_per_byte_row > 0);
	for (unsigned i = 0; i < 100; i++)
		measure_cpu(&p, 101, 5e-4 + 100 * 2e-5);
	assert_near(p.cpu_us_per_byte_row, 2e-5, 0.1);
}

/* Measured as it goes: both ways are learned, and then a layer is split so that both are done together. */
static void test_learns(void **unused)
{
	const struct split_prices truth = { .copy_us_per_byte = 1e-4, .cpu_us_per_byte = 5e-5 };
	struct split_prices p = {};
	struct split s = {};
	unsigned copies = 0;

	(void)unused;
	for (unsigned layer = 0; layer < 200; layer++) {
		copies = 0;
		split_begin(&s);
		for (unsigned i = 0; i < 6; i++)
			if (split_next(&s, &p, 4 * MB, 1) == SPLIT_COPY)
				copies++;
		split_measure_copy(&p, copies * 4 * MB,
				   (uint64_t)(copies * 4 * MB * truth.copy_us_per_byte));
		split_measure_cpu(&p, (6 - copies) * 4 * MB, 1,
				  (uint64_t)((6 - copies) * 4 * MB * truth.cpu_us_per_byte));
	}
	assert_int_equal(copies, 2);
	assert_near(p.copy_us_per_byte, 1e-4, 0.01);
	assert_near(p.cpu_us_per_byte, 5e-5, 0.01);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_literal),
		cmocka_unit_test(test_equal_blocks),
		cmocka_unit_test(test_unequal_blocks),
		cmocka_unit_test(test_probes),
		cmocka_unit_test(test_outliers),
		cmocka_unit_test(test_change),
		cmocka_unit_test(test_nothing_measured),
		cmocka_unit_test(test_each),
		cmocka_unit_test(test_rows),
		cmocka_unit_test(test_learns),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
