/* SPDX-License-Identifier: MIT */
/*
 * How much memory there is: literal trees of /proc and control groups under a directory of the
 * test's own, and one real group where this machine lets us make one.
 */
#include "tests/test.h"

#include "daemon/residency/memory.h"

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

static const char meminfo[] = "MemTotal:       16777216 kB\n"
			      "MemFree:         1048576 kB\n"
			      "MemAvailable:    8388608 kB\n"
			      "Buffers:           10000 kB\n";

/* ---- a tree ---- */

static int tree_setup(void **state)
{
	char *root;

	if (asprintf(&root, "%s/test-memory-XXXXXX", getenv("TMPDIR") ?: P_tmpdir) < 0)
		return -1;
	*state = root;
	return mkdtemp(root) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static int tree_teardown(void **state)
{
	nftw(*state, remove_one, 16, FTW_DEPTH | FTW_PHYS);
	free(*state);
	return 0;
}

/* Makes root/path with its directories. */
static void put(const char *root, const char *path, const char *text)
{
	char full[1024];
	FILE *f;

	snprintf(full, sizeof(full), "%s/%s", root, path);
	for (char *s = full + strlen(root) + 1; (s = strchr(s, '/')); *s++ = '/') {
		*s = 0;
		if (mkdir(full, 0700) < 0)
			assert_int_equal(errno, EEXIST);
	}
	f = fopen(full, "we");
	assert_non_null(f);
	assert_true(fputs(text, f) >= 0);
	assert_int_equal(fclose(f), 0);
}

static void put_v1(const char *root, const char *group, const char *limit, const char *usage,
		   const char *stat)
{
	char path[512];

	snprintf(path, sizeof(path), "sys/fs/cgroup/memory%s/memory.limit_in_bytes", group);
	put(root, path, limit);
	snprintf(path, sizeof(path), "sys/fs/cgroup/memory%s/memory.usage_in_bytes", group);
	put(root, path, usage);
	snprintf(path, sizeof(path), "sys/fs/cgroup/memory%s/memory.stat", group);
	put(root, path, stat);
}

static void put_v2(const char *root, const char *group, const char *max, const char *high,
		   const char *current, const char *stat)
{
	char path[512];

	snprintf(path, sizeof(path), "sys/fs/cgroup%s/memory.max", group);
	put(root, path, max);
	snprintf(path, sizeof(path), "sys/fs/cgroup%s/memory.high", group);
	put(root, path, high);
	snprintf(path, sizeof(path), "sys/fs/cgroup%s/memory.current", group);
	put(root, path, current);
	snprintf(path, sizeof(path), "sys/fs/cgroup%s/memory.stat", group);
	put(root, path, stat);
}

#define V1_MOUNTS                                                                              \
	"22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"                                      \
	"31 22 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"                  \
	"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n" \
	"35 31 0:32 / /sys/fs/cgroup/memory rw shared:10 master:2 - cgroup cgroup rw,memory\n"
#define V2_MOUNTS                                         \
	"22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n" \
	"30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
#define V1_NONE "9223372036854771712\n"

static struct memory_state must_read(const char *root)
{
	_cleanup_(memory_closep) struct memory *m = NULL;
	struct memory_state s;

	assert_int_equal(memory_open(root, &m), 0);
	assert_int_equal(memory_read(m, &s), 0);
	assert_int_equal(s.machine_total, 16 * GIB);
	assert_int_equal(s.machine_available, 8 * GIB);
	return s;
}

static void check_unlimited(const char *root)
{
	struct memory_state s = must_read(root);

	assert_int_equal(s.total, 16 * GIB);
	assert_int_equal(s.available, 8 * GIB);
	assert_true(s.group_limit == UINT64_MAX);
	assert_true(s.group_available == UINT64_MAX);
}

static void check_limited(const char *root, uint64_t limit, uint64_t available)
{
	struct memory_state s = must_read(root);

	assert_int_equal(s.group_limit, limit);
	assert_int_equal(s.group_available, available);
	assert_int_equal(s.total, MIN(limit, 16 * GIB));
	assert_int_equal(s.available, MIN(available, 8 * GIB));
}

/* ---- tests ---- */

static void test_no_groups(void **state)
{
	put(*state, "proc/meminfo", meminfo);
	check_unlimited(*state);
	/* A kernel without control groups has the file and nothing in it; one with v2 alone has a root. */
	put(*state, "proc/self/cgroup", "");
	check_unlimited(*state);
	put(*state, "proc/self/cgroup", "0::/\n");
	put(*state, "proc/self/mountinfo", V2_MOUNTS);
	check_unlimited(*state);
}

static void test_no_meminfo(void **state)
{
	struct memory *m = NULL;

	assert_int_equal(memory_open(*state, &m), -ENOENT);
	put(*state, "proc/meminfo", "");
	assert_int_equal(memory_open(*state, &m), -EBADMSG);
	put(*state, "proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n");
	assert_int_equal(memory_open(*state, &m), -EBADMSG);
	put(*state, "proc/meminfo", "MemTotal: 99999999999999999999 kB\nMemAvailable: 1 kB\n");
	assert_int_equal(memory_open(*state, &m), -EBADMSG);
	put(*state, "proc/meminfo", "MemTotal: 18014398509481984 kB\nMemAvailable: 1 kB\n");
	assert_int_equal(memory_open(*state, &m), -EBADMSG);
	assert_null(m);
	assert_null(memory_close(NULL));
}

static void test_v1(void **state)
{
	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/mountinfo", V1_MOUNTS);
	put(*state, "proc/self/cgroup", "9:name=systemd:/\n4:memory:/a\n2:cpu,cpuacct:/x\n");
	put_v1(*state, "", V1_NONE, "5000000000\n", "cache 1\n");
	put_v1(*state, "/a", V1_NONE, "1000\n", "total_active_file 5\n");
	check_unlimited(*state);
	/* 2 GiB, 1.5 GiB used, of which 768 MiB are page cache of this group and those below. */
	put_v1(*state, "/a", "2147483648\n", "1610612736\n",
	       "cache 4096\nactive_file 1\ninactive_file 1\nhierarchical_memory_limit 2147483648\n"
	       "total_mapped_file 536870912\ntotal_inactive_file 536870912\n"
	       "total_active_file 268435456\ntotal_unevictable 0\n");
	check_limited(*state, 2 * GIB, 1280 * MIB);
	/* A limit above what the machine has left does not help. */
	put_v1(*state, "/a", "34359738368\n", "0\n", "");
	check_limited(*state, 32 * GIB, 32 * GIB);
	/* Lowered below what is used. */
	put_v1(*state, "/a", "1048576\n", "2097152\n", "");
	check_limited(*state, MIB, 0);
	/* More page cache than usage: the counters are not of the same instant. */
	put_v1(*state, "/a", "1048576\n", "4096\n", "total_active_file 8192\n");
	check_limited(*state, MIB, MIB);
}

static void test_v2(void **state)
{
	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/mountinfo", V2_MOUNTS);
	put(*state, "proc/self/cgroup", "0::/system.slice/r.service\n");
	put_v2(*state, "/system.slice/r.service", "max\n", "max\n", "1073741824\n", "anon 1\n");
	check_unlimited(*state);
	put_v2(*state, "/system.slice/r.service", "4294967296\n", "max\n", "3221225472\n",
	       "anon 1\nfile 9\nfile_mapped 8\ninactive_file 1073741824\nactive_file 536870912\n");
	check_limited(*state, 4 * GIB, 2560 * MIB);
	put_v2(*state, "/system.slice/r.service", "4294967296\n", "3221225472\n", "3221225472\n",
	       "inactive_file 1073741824\nactive_file 536870912\n");
	check_limited(*state, 3 * GIB, 1536 * MIB);
	put_v2(*state, "/system.slice/r.service", "max\n", "0\n", "3221225472\n", "");
	check_limited(*state, 0, 0);
}

/* The tightest decides, for the limit and for what is left of it, which may be two of them. */
static void test_ancestors(void **state)
{
	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/mountinfo", V2_MOUNTS);
	put(*state, "proc/self/cgroup", "0::/a/b/c\n");
	put_v2(*state, "/a/b/c", "max\n", "max\n", "0\n", "");
	put_v2(*state, "/a/b", "2147483648\n", "max\n", "0\n", "");
	put_v2(*state, "/a", "4294967296\n", "max\n", "3221225472\n", "");
	check_limited(*state, 2 * GIB, GIB);

	put(*state, "proc/self/mountinfo", V1_MOUNTS);
	put(*state, "proc/self/cgroup", "4:memory:/a/b/c\n");
	put_v1(*state, "/a/b/c", V1_NONE, "4096\n", "");
	put_v1(*state, "", "1073741824\n", "536870912\n", "total_active_file 268435456\n");
	check_limited(*state, GIB, 768 * MIB);
}

/* As a container sees it: the mount shows a part of the tree, the group may be named as the host does. */
static void test_mount_of_a_subtree(void **state)
{
	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/cgroup", "4:memory:/docker/1f\n0::/\n");
	put(*state, "proc/self/mountinfo",
	    "35 31 0:32 /docker/1f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
	put_v1(*state, "", "2147483648\n", "0\n", "");
	check_limited(*state, 2 * GIB, 2 * GIB);
	/* /docker/1 is not its parent. */
	put(*state, "proc/self/mountinfo",
	    "34 31 0:32 /docker/1 /sys/fs/cgroup/wrong ro - cgroup cgroup rw,memory\n"
	    "35 31 0:32 /docker /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
	put(*state, "sys/fs/cgroup/wrong/memory.limit_in_bytes", "1\n");
	put(*state, "sys/fs/cgroup/wrong/memory.usage_in_bytes", "1\n");
	put_v1(*state, "/1f", "1073741824\n", "0\n", "");
	check_limited(*state, GIB, GIB);
	/* The limit of a group above the mount, which v1 tells. */
	put_v1(*state, "/1f", V1_NONE, "1048576\n", "hierarchical_memory_limit 268435456\n");
	put_v1(*state, "", V1_NONE, "0\n", "");
	check_limited(*state, 256 * MIB, 255 * MIB);

	/* A group that the mount does not show: what is above it counts. Blanks in paths are \040. */
	put(*state, "proc/self/cgroup", "0::/../../other\n");
	put(*state, "proc/self/mountinfo",
	    "30 22 0:26 / /sys/fs/my\\040groups rw - cgroup2 cgroup2 rw\n");
	put(*state, "sys/fs/my groups/memory.max", "536870912\n");
	put(*state, "sys/fs/my groups/memory.current", "0\n");
	put(*state, "sys/fs/other/memory.max", "1\n");
	put(*state, "sys/fs/other/memory.current", "0\n");
	check_limited(*state, 512 * MIB, 512 * MIB);
	put(*state, "proc/self/cgroup", "0::/gone\n");
	check_limited(*state, 512 * MIB, 512 * MIB);
}

/* v1 for memory, v2 mounted beside it without controllers, as systemd's hybrid mode has it. */
static void test_hybrid(void **state)
{
	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/cgroup",
	    "9:name=systemd:/\n5:devices:/\n4:memory:/m/d04a\n3:cpuset:/\n0::/\n");
	put(*state, "proc/self/mountinfo",
	    V1_MOUNTS "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
		      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
	put_v1(*state, "/m/d04a", "1073741824\n", "0\n", "");
	put(*state, "sys/fs/cgroup/unified/memory.pressure", "some avg10=0.00\n");
	put(*state, "sys/fs/cgroup/memory.max", "1\n");
	put(*state, "sys/fs/cgroup/memory.current", "1\n");
	check_limited(*state, GIB, GIB);
}

static void test_garbage(void **state)
{
	static const char *const numbers[] = { "",
					       "\n",
					       "-1\n",
					       "18446744073709551616\n",
					       "12x\n",
					       "max\n",
					       "4611686018427387904\n",
					       " 5\n" };
	static const char *const cgroups[] = {
		"", "\n", ":", "::", "0:", "0::", "0::x\n", "4:memory\n", "4:memory:\n", "4:memoryx:/a\n", "4:xmemory:/a\n"
	};
	static const char *const mounts[] = { "",
					      "-\n",
					      "1 2 3 / /sys/fs/cgroup/memory\n",
					      "1 2 3 / /sys/fs/cgroup/memory rw - cgroup\n",
					      "1 2 3 / /sys/fs/cgroup/memory rw - cgroup x\n",
					      "1 2 3 / /sys/fs/cgroup/memory rw cgroup x rw,memory\n",
					      "1 2 3 / /sys/fs/cgroup/memory rw - cgroup x rw,memory2\n",
					      "1 2 3 / \\0 rw - cgroup x rw,memory\n" };

	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/mountinfo", V1_MOUNTS);
	put(*state, "proc/self/cgroup", "4:memory:/a\n");
	for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
		put_v1(*state, "/a", numbers[i], "1\n", "");
		check_unlimited(*state);
	}
	put_v1(*state, "/a", "1073741824\n", "what?\n", "");
	check_unlimited(*state);
	put_v1(*state, "/a", "1073741824\n", "0\n", "total_active_file\ntotal_inactive_file x\n\n\n");
	check_limited(*state, GIB, GIB);
	for (size_t i = 0; i < ARRAY_SIZE(cgroups); i++) {
		put(*state, "proc/self/cgroup", cgroups[i]);
		check_unlimited(*state);
	}
	put(*state, "proc/self/cgroup", "4:memory:/a\n");
	for (size_t i = 0; i < ARRAY_SIZE(mounts); i++) {
		put(*state, "proc/self/mountinfo", mounts[i]);
		check_unlimited(*state);
	}
}

/* Deeper than anybody nests: the innermost groups count. */
static void test_deep(void **state)
{
	char path[128] = "", line[256];

	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/mountinfo", V2_MOUNTS);
	for (int i = 1; i <= 40; i++) {
		strcat(path, "/d");
		put_v2(*state, path,
		       i == 20  ? "1073741824\n"
		       : i == 5 ? "1\n"
				: "max\n",
		       "max\n", "0\n", "");
	}
	snprintf(line, sizeof(line), "0::%s\n", path);
	put(*state, "proc/self/cgroup", line);
	check_limited(*state, GIB, GIB);
}

/* The files stay open: what they say later is seen, and a group that vanishes limits nothing. */
static void test_changes(void **state)
{
	_cleanup_(memory_closep) struct memory *m = NULL;
	struct memory_state s, untouched = { .total = 42 };

	put(*state, "proc/meminfo", meminfo);
	put(*state, "proc/self/mountinfo", V2_MOUNTS);
	put(*state, "proc/self/cgroup", "0::/a\n");
	put_v2(*state, "/a", "max\n", "max\n", "0\n", "");
	assert_int_equal(memory_open(*state, &m), 0);
	assert_int_equal(memory_read(m, &s), 0);
	assert_true(s.group_limit == UINT64_MAX);
	put_v2(*state, "/a", "1073741824\n", "max\n", "536870912\n", "");
	put(*state, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 262144 kB\n");
	assert_int_equal(memory_read(m, &s), 0);
	assert_int_equal(s.total, GIB);
	assert_int_equal(s.group_available, 512 * MIB);
	assert_int_equal(s.available, 256 * MIB);
	put_v2(*state, "/a", "", "", "", "");
	assert_int_equal(memory_read(m, &s), 0);
	assert_true(s.group_limit == UINT64_MAX);
	put(*state, "proc/meminfo", "");
	assert_int_equal(memory_read(m, &untouched), -EBADMSG);
	assert_int_equal(untouched.total, 42);
}

static void test_budget(void **unused)
{
	struct memory_state s = { .machine_available = 8 * GIB,
				  .group_limit = UINT64_MAX,
				  .group_available = UINT64_MAX };

	(void)unused;
	assert_int_equal(memory_default_reserve(4 * GIB), GIB);
	assert_int_equal(memory_default_reserve(40 * GIB), 4 * GIB);
	assert_int_equal(memory_group_slack(GIB), 48 * MIB);
	assert_int_equal(memory_group_slack(100 * GIB), 4 * GIB);

	assert_int_equal(memory_budget(&s, 0, GIB), 7 * GIB);
	assert_int_equal(memory_budget(&s, 3 * GIB, GIB), 10 * GIB);
	assert_int_equal(memory_budget(&s, 0, 9 * GIB), 0);
	s.group_limit = 2 * GIB;
	s.group_available = GIB;
	/* 4 % of 2 GiB is more than 48 MiB. */
	assert_int_equal(memory_budget(&s, 0, GIB), GIB - 2 * GIB / 25);
	assert_int_equal(memory_budget(&s, GIB, GIB), 2 * GIB - 2 * GIB / 25);
	assert_int_equal(memory_budget(&s, 0, 8 * GIB - MIB), MIB);
	s.group_available = MIB;
	assert_int_equal(memory_budget(&s, 0, GIB), 0);
	assert_int_equal(memory_budget(&s, UINT64_MAX, 0), UINT64_MAX - 2 * GIB / 25);
}

static void test_this_machine(void **unused)
{
	_cleanup_(memory_closep) struct memory *m = NULL;
	struct memory_state s;

	(void)unused;
	assert_int_equal(memory_open("", &m), 0);
	assert_int_equal(memory_read(m, &s), 0);
	assert_in_range(s.total, 64 * MIB, (uint64_t)1 << 60);
	assert_in_range(s.machine_available, MIB, (uint64_t)1 << 60);
	assert_true(s.available <= s.machine_available);
	assert_true(s.available <= s.total);
}

/* ---- a real group ---- */

#define GROUP_LIMIT (256 * MIB)
#define GROUP_TOUCH (64 * MIB)

/* In a child that is in the group. 0: all well; else the line, which is below 1000. */
static int inside(void)
{
	_cleanup_(memory_closep) struct memory *m = NULL;
	struct memory_state before, after;
	char *p = malloc(GROUP_TOUCH);
	uint64_t taken;

	if (!p || memory_open("", &m) < 0 || memory_read(m, &before) < 0)
		return __LINE__;
	if (before.group_limit != GROUP_LIMIT || before.total != GROUP_LIMIT)
		return __LINE__;
	if (before.group_available > GROUP_LIMIT || before.group_available < GROUP_LIMIT / 2)
		return __LINE__;
	for (size_t i = 0; i < GROUP_TOUCH; i += 4096)
		((volatile char *)p)[i] = 1;
	if (memory_read(m, &after) < 0)
		return __LINE__;
	taken = before.group_available - after.group_available;
	free(p);
	return taken > GROUP_TOUCH - 2 * MIB && taken < GROUP_TOUCH + 8 * MIB ? 0 : __LINE__;
}

static int write_file(const char *directory, const char *name, const char *text)
{
	char path[512];
	_cleanup_(closep) int fd = -1;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : -1;
}

static void test_real_group(void **unused)
{
	/* The second is where v2 lets a group with the controller be made: below the root. */
	static const struct {
		const char *mount, *limit;
	} kinds[] = { { "/sys/fs/cgroup/memory", "memory.limit_in_bytes" },
		      { "/sys/fs/cgroup", "memory.max" } };
	char path[256];
	int status = 0;
	pid_t child;

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
		snprintf(path, sizeof(path), "%s/test-memory-%d", kinds[i].mount, getpid());
		if (mkdir(path, 0700) < 0)
			continue;
		if (write_file(path, kinds[i].limit, "268435456") == 0)
			break;
		rmdir(path);
		path[0] = 0;
	}
	if (access(path, F_OK) < 0)
		skip_because("no memory control group can be made here (not root, or read-only)");
	child = fork();
	assert_true(child >= 0);
	if (child == 0)
		_exit(write_file(path, "cgroup.procs", "0") < 0 ? 255 : inside() / 4);
	assert_int_equal(waitpid(child, &status, 0), child);
	rmdir(path);
	assert_true(WIFEXITED(status));
	if (WEXITSTATUS(status) == 255)
		skip_because("no process may be moved into a control group here");
	assert_int_equal(WEXITSTATUS(status), 0);
}

#define in_a_tree(f) cmocka_unit_test_setup_teardown(f, tree_setup, tree_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		in_a_tree(test_no_groups),
		in_a_tree(test_no_meminfo),
		in_a_tree(test_v1),
		in_a_tree(test_v2),
		in_a_tree(test_ancestors),
		in_a_tree(test_mount_of_a_subtree),
		in_a_tree(test_hybrid),
		in_a_tree(test_garbage),
		in_a_tree(test_deep),
		in_a_tree(test_changes),
		cmocka_unit_test(test_budget),
		cmocka_unit_test(test_this_machine),
		cmocka_unit_test(test_real_group),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
