/* SPDX-License-Identifier: MIT */
/* test-gpu.c: what leases want of the card, added up; what is said about it. */
#include "tests/test.h"

#include "daemon/gpu.h"
#include "daemon/lease.h"

static void test_yield(void **state)
{
	static const struct {
		uint64_t bytes[3]; /* of yield-gpu leases; 1: a hold that asks for as much */
		size_t n;
		uint64_t sum;
	} cases[] = {
		{ {}, 0, 0 },
		{ { 5 << 20 }, 1, 5 << 20 },
		{ { 5 << 20, 1, 3 << 20 }, 3, 8 << 20 },
		{ { 1, 1 }, 2, 0 },
		/* All of it, whatever the others ask for. */
		{ { 0 }, 1, UINT64_MAX },
		{ { 7, 0, 7 }, 3, UINT64_MAX },
		/* More than there are numbers for. */
		{ { UINT64_MAX - 1, 7 }, 2, UINT64_MAX },
		{ { UINT64_MAX / 2, UINT64_MAX / 2, 7 }, 3, UINT64_MAX },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct lease leases[3] = {};

		for (size_t k = 0; k < cases[i].n; k++) {
			leases[k].kind = cases[i].bytes[k] == 1 ? LEASE_HOLD : LEASE_YIELD_GPU;
			leases[k].bytes = cases[i].bytes[k];
			leases[k].next = k + 1 < cases[i].n ? &leases[k + 1] : NULL;
		}
		assert_true(gpu_yield_bytes(cases[i].n > 0 ? leases : NULL) == cases[i].sum);
	}
}

#define NONE     ENGINE_CARD_NONE
#define ACTIVE   ENGINE_CARD_ACTIVE
#define DEGRADED ENGINE_CARD_DEGRADED

static void test_lines(void **state)
{
	static const struct {
		struct engine_card card;
		bool loaded;
		enum engine_card_state before;
		const char *line; /* NULL: none */
	} cases[] = {
		/* With a model. */
		{ { ACTIVE, .name = "NVIDIA X", .code = "binary" }, true, NONE, "GPU: NVIDIA X, machine code" },
		{ { ACTIVE, .name = "NVIDIA X", .code = "ptx" },
		  true,
		  ACTIVE,
		  "GPU: NVIDIA X, code compiled by the driver (PTX)" },
		{ { ACTIVE, .name = "fake", .code = "emulator", .emulator = true },
		  true,
		  NONE,
		  "GPU: fake (an emulator for tests)" },
		{ { NONE, .why = "there is no driver" },
		  true,
		  NONE,
		  "GPU: not used: there is no driver; the CPU computes" },
		{ { NONE, .name = "NVIDIA X", .why = "Gpu=off" },
		  true,
		  NONE,
		  "GPU: NVIDIA X, not used: Gpu=off; the CPU computes" },
		{ { DEGRADED, .name = "fake", .why = "it is full", .emulator = true },
		  true,
		  ACTIVE,
		  "GPU: fake (an emulator for tests), not used: it is full; the CPU computes, it is tried again" },
		{ { NONE, .why = "" }, true, NONE, NULL },
		/* Meanwhile. */
		{ { ACTIVE, .name = "NVIDIA X", .code = "binary" }, false, ACTIVE, NULL },
		{ { DEGRADED, .name = "NVIDIA X", .why = "lost" }, false, DEGRADED, NULL },
		{ { NONE, .why = "lost" }, false, NONE, NULL },
		{ { DEGRADED, .name = "NVIDIA X", .why = "it was lost" },
		  false,
		  ACTIVE,
		  "GPU: not used any more: it was lost; the CPU computes, it is tried again" },
		{ { NONE, .name = "NVIDIA X", .why = "it failed too often" },
		  false,
		  ACTIVE,
		  "GPU: not used any more: it failed too often; the CPU computes" },
		{ { ACTIVE, .name = "NVIDIA X", .code = "binary" }, false, DEGRADED, "GPU: used again" },
		{ { ACTIVE, .name = "NVIDIA X", .code = "binary" }, false, NONE, "GPU: NVIDIA X, machine code" },
		{ { NONE, .name = "NVIDIA X", .why = "it failed too often" },
		  false,
		  DEGRADED,
		  "GPU: NVIDIA X, not used: it failed too often; the CPU computes" },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		_cleanup_(freep) char *line =
			gpu_describe(&cases[i].card, cases[i].loaded, cases[i].before);

		if (cases[i].line)
			assert_string_equal(line, cases[i].line);
		else
			assert_null(line);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_yield),
		cmocka_unit_test(test_lines),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
