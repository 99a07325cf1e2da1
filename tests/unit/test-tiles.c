/* SPDX-License-Identifier: MIT */
/* test-tiles.c: the search for tiles on made-up costs, the file that keeps them, and that tiles change no bit is test-kernels.c's. */
#include "tests/test.h"

#include "daemon/file.h"
#include "daemon/tiles.h"
#include "kernels/cpu/tune.h"

#include <sys/stat.h>

struct cost {
	struct cpu_tiles best;
	unsigned n_runs;
	bool flat;
};

static uint64_t away(unsigned a, unsigned b)
{
	return a > b ? a - b : b - a;
}

/* Cheapest at best; flat: what differs is noise. */
static uint64_t cost(void *arg, const struct tune_run *run)
{
	struct cost *c = arg;

	assert_true(run->n_cols > 0);
	c->n_runs++;
	if (c->flat)
		return 10000 + c->n_runs % 3 * 50;
	return (10 + away(run->tiles->reg_cols, c->best.reg_cols)) *
	       (10 + away(run->tiles->l1_rows, c->best.l1_rows)) *
	       (10 + away(run->tiles->l2_cols, c->best.l2_cols));
}

static void test_search(void **state)
{
	static const struct cpu_tiles best[] = { { 4, 8, 32 },   { 4, 16, 64 }, { 3, 32, 128 },
						 { 2, 64, 256 }, { 2, 8, 256 }, { 3, 64, 32 } };
	struct cpu_tiles got;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(best); i++) {
		struct cost c = { .best = best[i] };

		assert_int_equal(tune_tiles(&cpu_kernels_ref, cost, &c, &got), 0);
		assert_memory_equal(&got, &best[i], sizeof(got));
		assert_true(c.n_runs <= 14);
	}
}

/* Noise does not make the choice wander. */
static void test_search_flat(void **state)
{
	struct cost c = { .flat = true };
	struct cpu_tiles got;
	(void)state;

	assert_int_equal(tune_tiles(&cpu_kernels_ref, cost, &c, &got), 0);
	assert_memory_equal(&got, &cpu_kernels_ref.tiles, sizeof(got));
}

static void test_parse(void **state)
{
	static const struct {
		const char *text;
		bool ok;
	} cases[] = {
		{ "residentd-tiles 1\nA CPU\navx2\n4 16 128\n", true },
		{ "residentd-tiles 1\nA CPU\navx2\n4 16 128", true },
		{ "residentd-tiles 2\nA CPU\navx2\n4 16 128\n", false },
		{ "residentd-tiles 1\nA CPU X\navx2\n4 16 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx512\n4 16 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n5 16 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n8 16 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n0 16 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n4 0 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n4 65 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n4 16 0\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n4 16 100\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n4 16 4096\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n-4 16 128\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n4 16\n", false },
		{ "residentd-tiles 1\nA CPU\navx2\n4 16 128 9\n", false },
		{ "residentd-tiles 1\nA CPU\n", false },
		{ "", false },
	};
	const struct cpu_tiles want = { 4, 16, 128 };
	char large[2000];
	struct cpu_tiles got;
	(void)state;

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		got = (struct cpu_tiles){ 7, 7, 7 };
		if (tiles_parse(cases[i].text, strlen(cases[i].text), "A CPU", "avx2", &got) !=
		    cases[i].ok)
			fail_msg("%s", cases[i].text);
		if (cases[i].ok)
			assert_memory_equal(&got, &want, sizeof(got));
		else
			assert_int_equal(got.reg_cols, 7);
	}
	assert_false(tiles_parse("residentd-tiles 1\nA CPU\navx2\n4 16 128\0", 41, "A CPU", "avx2",
				 &got));
	memset(large, ' ', sizeof(large));
	assert_false(tiles_parse(large, sizeof(large), "A CPU", "avx2", &got));
}

/* Seconds for nothing: the reference has no tiles. */
static void test_reference(void **state)
{
	struct cpu_tiles got;
	(void)state;

	assert_int_equal(tune_tiles(&cpu_kernels_ref, NULL, NULL, &got), 0);
	assert_memory_equal(&got, &cpu_kernels_ref.tiles, sizeof(got));
}

static void test_kept(void **state)
{
	char dir[] = "/tmp/test-tiles-XXXXXX", path[64];
	_cleanup_(buf_done) struct buf first = { 0 }, second = { 0 };
	const struct cpu_kernels *k = cpu_kernels_choose(NULL);
	struct cpu_tiles a, b;
	(void)state;

	assert_non_null(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/tiles", dir);
	/* Measured, then read. */
	assert_int_equal(tiles_get(dir, k, &a), 1);
	assert_int_equal(tiles_get(dir, k, &b), 0);
	assert_memory_equal(&a, &b, sizeof(a));
	assert_int_equal(file_read(path, 1024, &first), 0);
	/* What is damaged is measured over. */
	assert_int_equal(file_replace(path, "residentd-tiles 1\n\xff", 19, 0644), 0);
	assert_int_equal(tiles_get(dir, k, &b), 1);
	assert_int_equal(file_read(path, 1024, &second), 0);
	assert_memory_equal(first.data, second.data, 18);
	/* No place to keep them: the table's own, at once; one that is gone: measured, and said. */
	assert_int_equal(tiles_get(NULL, k, &b), 0);
	assert_memory_equal(&b, &k->tiles, sizeof(b));
	assert_int_equal(unlink(path), 0);
	assert_int_equal(rmdir(dir), 0);
	assert_int_equal(tiles_get(dir, k, &b), -ENOENT);
	assert_true(b.reg_cols >= 2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_search), cmocka_unit_test(test_search_flat),
		cmocka_unit_test(test_parse),  cmocka_unit_test(test_reference),
		cmocka_unit_test(test_kept),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
