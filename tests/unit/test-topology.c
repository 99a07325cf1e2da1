/* SPDX-License-Identifier: MIT */
/* test-topology.c: which CPUs are chosen, on machines that are folders of the test. */
#include "tests/test.h"

#include "daemon/base.h"
#include "kernels/cpu/topology.h"

#include <sys/stat.h>

static char root[] = "/tmp/test-topology-XXXXXX";

static void put(const char *name, const char *text)
{
	char path[512], *slash;
	FILE *f;

	snprintf(path, sizeof(path), "%s/%s", root, name);
	for (slash = strchr(path + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		(void)mkdir(path, 0700);
		*slash = '/';
	}
	f = fopen(path, "we");
	assert_non_null(f);
	assert_true(fputs(text, f) >= 0);
	assert_int_equal(fclose(f), 0);
}

static void clear(void)
{
	char command[600];

	snprintf(command, sizeof(command), "rm -rf %s/cpu %s/node", root, root);
	assert_int_equal(system(command), 0);
}

static void siblings(unsigned cpu, const char *list)
{
	char name[96];

	snprintf(name, sizeof(name), "cpu/cpu%u/topology/thread_siblings_list", cpu);
	put(name, list);
}

static cpu_set_t set_of(const char *bits)
{
	cpu_set_t s;

	CPU_ZERO(&s);
	for (size_t i = 0; bits[i]; i++)
		if (bits[i] == '1')
			CPU_SET(i, &s);
	return s;
}

static void check(const char *allowed, unsigned n, const char *want)
{
	cpu_set_t a = set_of(allowed), w = set_of(want), got;

	assert_int_equal(topology_choose(root, &a, n, &got), CPU_COUNT(&w));
	if (!CPU_EQUAL(&got, &w))
		fail_msg("%u of %s: not %s", n, allowed, want);
}

/* Two nodes of two cores of two threads, numbered as most machines do. */
static void make_two_nodes(void)
{
	clear();
	for (unsigned i = 0; i < 4; i++) {
		char list[32];

		snprintf(list, sizeof(list), "%u,%u\n", i, i + 4);
		siblings(i, list);
		siblings(i + 4, list);
	}
	put("node/node0/cpulist", "0-1,4-5\n");
	put("node/node1/cpulist", "2-3,6-7\n");
}

static void test_cores_before_threads(void **state)
{
	(void)state;

	make_two_nodes();
	check("11111111", 1, "1");
	check("11111111", 2, "11");
	check("11111111", 3, "111"); /* another node's core rather than a core's second thread */
	check("11111111", 4, "1111");
	check("11111111", 5, "11111");
	check("11111111", 8, "11111111");
	check("11111111", 100, "11111111");
}

static void test_allowed_alone(void **state)
{
	cpu_set_t a = set_of("01110011"), one = set_of("00000001");
	(void)state;

	make_two_nodes();
	/* Node 1 has two cores, node 0 one. Of CPUs 3 and 7, 2 and 6 the first is the core's. */
	check("01110011", 2, "0011");
	check("01110011", 3, "0111");
	assert_int_equal(topology_cores(root, &a), 2);
	assert_int_equal(topology_cores(root, &one), 1); /* a second thread alone is a core */
	check("00000001", 3, "00000001");
}

static void test_siblings_in_a_row(void **state)
{
	cpu_set_t a = set_of("1111");
	(void)state;

	clear();
	siblings(0, "0-1\n");
	siblings(1, "0-1\n");
	siblings(2, "2-3\n");
	siblings(3, "2-3\n");
	assert_int_equal(topology_cores(root, &a), 2);
	check("1111", 2, "101");
	check("1111", 3, "111");
}

/* A container may show nothing, or nonsense. */
static void test_unknown(void **state)
{
	cpu_set_t a = set_of("111"), none = set_of("");
	(void)state;

	clear();
	assert_int_equal(topology_cores(root, &a), 3);
	check("111", 2, "11");
	siblings(0, "");
	siblings(1, "nonsense\n");
	siblings(2, "7-3,99999999999999999999\n");
	put("node/node0/cpulist", "5-1\n");
	put("node/node1/cpulist", "4294967295,0-4294967295\n");
	assert_int_equal(topology_cores(root, &a), 3);
	check("111", 2, "11");
	assert_int_equal(topology_cores(root, &none), 1);
	check("", 2, "");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_cores_before_threads),
		cmocka_unit_test(test_allowed_alone),
		cmocka_unit_test(test_siblings_in_a_row),
		cmocka_unit_test(test_unknown),
	};
	int r;

	if (!mkdtemp(root))
		return 1;
	r = cmocka_run_group_tests(tests, NULL, NULL);
	clear();
	(void)rmdir(root);
	return r;
}
