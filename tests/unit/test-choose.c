/* SPDX-License-Identifier: MIT */
/* test-choose.c: which form the host tier takes, with the sentence that says why; and that measuring leaves nothing behind. */
#include "tests/test.h"

#include "daemon/residency/choose.h"
#include "tests/unit/expert-file.h"

#define GB UINT64_C(1000000000)

static void test_every_sentence(void **state)
{
	static const struct {
		struct choose_facts facts;
		enum residency_tier tier;
		const char *reason;
	} cases[] = {
		{ { RESIDENCY_AUTO, 20 * GB, 12340000000, 30 * GB, 0, 0 },
		  RESIDENCY_UNMANAGED,
		  "all of the model fits: it needs 12.34 GB, the budget is 20.00 GB" },
		{ { RESIDENCY_AUTO, 20 * GB, 20 * GB, 30 * GB, 0, 0 },
		  RESIDENCY_UNMANAGED,
		  "all of the model fits: it needs 20.00 GB, the budget is 20.00 GB" },
		/* An eighth of the free memory, in a budget that is smaller still. */
		{ { RESIDENCY_AUTO, GB / 10, GB, 8 * GB, 3 * GB, 9 * GB },
		  RESIDENCY_UNMANAGED,
		  "the model is small: it needs 1.00 GB, 8.00 GB are free" },
		{ { RESIDENCY_AUTO, GB / 10, GB + 1, 8 * GB, 3 * GB, 2 * GB },
		  RESIDENCY_MAPPED,
		  "reading into the page cache is as good here: 3.00 GB/s, against 2.00 GB/s into memory of its own" },
		{ { RESIDENCY_AUTO, 10 * GB, 20 * GB, 12 * GB, GB, 0 },
		  RESIDENCY_MAPPED,
		  "memory of its own could not be filled from the disk: page cache" },
		{ { RESIDENCY_AUTO, 10 * GB, 20 * GB, 12 * GB, 0, 0 },
		  RESIDENCY_MAPPED,
		  "memory of its own could not be filled from the disk: page cache" },
		/* 20 % are not more than 20 %. */
		{ { RESIDENCY_AUTO, 10 * GB, 20 * GB, 12 * GB, GB, 1200000000 },
		  RESIDENCY_MAPPED,
		  "reading into the page cache is as good here: 1.00 GB/s, against 1.20 GB/s into memory of its own" },
		{ { RESIDENCY_AUTO, 10 * GB, 20 * GB, 12 * GB, GB, 1200000001 },
		  RESIDENCY_ARENA,
		  "reading into memory of its own is faster here: 1.20 GB/s, against 1.00 GB/s into the page cache" },
		{ { RESIDENCY_AUTO, 10 * GB, 20 * GB, 12 * GB, 0, 500000000 },
		  RESIDENCY_ARENA,
		  "reading into memory of its own is faster here: 0.50 GB/s, against 0.00 GB/s into the page cache" },
		/* What the administrator wants, whether it is wise or not. */
		{ { RESIDENCY_MAPPED, 20 * GB, GB, 30 * GB, 0, 0 }, RESIDENCY_MAPPED, "HostTier=mapped" },
		{ { RESIDENCY_ARENA, 20 * GB, GB, 30 * GB, 9 * GB, 0 }, RESIDENCY_ARENA, "HostTier=arena" },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		char *reason = NULL;

		assert_int_equal(choose_tier(&cases[i].facts, &reason), cases[i].tier);
		assert_non_null(reason);
		assert_string_equal(reason, cases[i].reason);
		free(reason);
	}
}

static void test_measure(void **state)
{
	const struct disk_config disk = {};
	uint64_t mapped, arena, cached = 0;
	struct expert_file file;

	(void)state;
	file_open(&file, NULL);
	choose_measure(file.c, &disk, &mapped, &arena);
	assert_true(mapped > 1000000 && mapped < UINT64_C(1000) * GB);
	assert_true(arena > 1000000 && arena < UINT64_C(1000) * GB);
	for (uint32_t b = 0; file.has_page_cache && b < file.c->n_blocks; b++) {
		struct catalog_block block;

		catalog_block(file.c, b, &block);
		for (uint32_t i = 0; i < block.n_ranges; i++) {
			uint64_t from = ALIGN_UP(block.range[i].offset, (uint64_t)FILE_PAGE);
			uint64_t to = (block.range[i].offset + block.range[i].bytes) / FILE_PAGE *
				      FILE_PAGE;

			cached += to > from ? file_cached(&file, from, to - from) : 0;
		}
	}
	assert_int_equal(cached, 0);
	file_close(&file);
}

/* A form that cannot read is no choice. */
static void test_measure_cut_file(void **state)
{
	const struct disk_config disk = {};
	uint64_t mapped = 1, arena = 1;
	struct expert_file file;

	(void)state;
	file_open(&file, NULL);
	assert_int_equal(ftruncate(file.fd, (off_t)file.c->layers[6].matrix[0]->offset), 0);
	choose_measure(file.c, &disk, &mapped, &arena);
	assert_int_equal(mapped, 0);
	assert_int_equal(arena, 0);
	file_close(&file);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_every_sentence),
		cmocka_unit_test(test_measure),
		cmocka_unit_test(test_measure_cut_file),
	};

	return cmocka_run_group_tests_name("choose", tests, NULL, NULL);
}
