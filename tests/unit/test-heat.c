/* SPDX-License-Identifier: MIT */
/* test-heat.c: the file of heat: byte for byte, damaged in every byte, and replaced or not at all. */
#include "tests/test.h"

#include "daemon/residency/heat.h"

#include <dirent.h>
#include <sys/stat.h>

#define IDENTITY 0x0123456789abcdefULL

static char dir[] = "/tmp/test-heat-XXXXXX";
static const uint16_t heat[3] = { 0, 0x1234, 65535 };
static const uint8_t file_bytes[] = {
	'R',  'D',  'H',  'E',  'A',  'T',  '\n', 0,    /* magic */
	1,    0,    0,    0,    3,    0,    0,    0,    /* version, blocks */
	0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 1,    /* identity */
	0,    0,    0x34, 0x12, 0xff, 0xff,             /* heat */
	0x75, 0x82, 0xe9, 0x0e, 0x8c, 0x23, 0x69, 0xcc, /* FNV-1a */
};

static char *path_of(const char *name)
{
	char *path = NULL;

	assert_true(asprintf(&path, "%s/%s", dir, name) > 0);
	return path;
}

static void put(const char *path, const void *data, size_t len)
{
	FILE *f = fopen(path, "we");

	assert_non_null(f);
	assert_int_equal(fwrite(data, 1, len, f), len);
	assert_int_equal(fclose(f), 0);
}

/* Loads; what was in the caller's hands stays there when that fails. */
static int load(const char *path, uint64_t identity, uint32_t n_blocks)
{
	uint16_t got[8] = { 7, 7, 7, 7, 7, 7, 7, 7 };
	int r = heat_load(path, identity, n_blocks, got);

	if (r == 0)
		assert_memory_equal(got, heat, sizeof(heat));
	for (size_t i = r == 0 ? n_blocks : 0; i < ARRAY_SIZE(got); i++)
		assert_int_equal(got[i], 7);
	return r;
}

static void test_path(void **state)
{
	_cleanup_(freep) char *path = heat_path("/var/lib/residentd", 0xabc);

	(void)state;
	assert_string_equal(path, "/var/lib/residentd/heat-0000000000000abc");
}

static void test_format(void **state)
{
	_cleanup_(freep) char *path = path_of("format");
	uint8_t got[sizeof(file_bytes) + 1];
	struct stat st;
	FILE *f;

	(void)state;
	assert_int_equal(load(path, IDENTITY, 3), -ENOENT);
	assert_int_equal(heat_save(path, IDENTITY, 3, heat), 0);
	f = fopen(path, "re");
	assert_non_null(f);
	assert_int_equal(fread(got, 1, sizeof(got), f), sizeof(file_bytes));
	fclose(f);
	assert_memory_equal(got, file_bytes, sizeof(file_bytes));
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	assert_int_equal(load(path, IDENTITY, 3), 0);
}

static void test_foreign(void **state)
{
	_cleanup_(freep) char *path = path_of("foreign");

	(void)state;
	put(path, file_bytes, sizeof(file_bytes));
	assert_int_equal(load(path, IDENTITY, 3), 0);
	assert_int_equal(load(path, IDENTITY + 1, 3), -EBADMSG);
	assert_int_equal(load(path, IDENTITY, 2), -EBADMSG);
	assert_int_equal(load(path, IDENTITY, 4), -EBADMSG);
	assert_int_equal(load(dir, IDENTITY, 3), -EISDIR);
}

static void test_damaged(void **state)
{
	_cleanup_(freep) char *path = path_of("damaged");
	uint8_t bytes[sizeof(file_bytes)];

	(void)state;
	for (size_t i = 0; i < sizeof(file_bytes); i++)
		for (int bit = 0; bit < 8; bit++) {
			memcpy(bytes, file_bytes, sizeof(file_bytes));
			bytes[i] ^= (uint8_t)(1 << bit);
			put(path, bytes, sizeof(file_bytes));
			assert_int_equal(load(path, IDENTITY, 3), -EBADMSG);
		}
}

static void test_short_and_long(void **state)
{
	_cleanup_(freep) char *path = path_of("length");
	uint8_t bytes[sizeof(file_bytes) + 40000] = {};

	(void)state;
	memcpy(bytes, file_bytes, sizeof(file_bytes));
	for (size_t len = 0; len < sizeof(file_bytes); len++) {
		put(path, bytes, len);
		assert_int_equal(load(path, IDENTITY, 3), -EBADMSG);
	}
	put(path, bytes, sizeof(file_bytes) + 1);
	assert_int_equal(load(path, IDENTITY, 3), -EBADMSG);
	put(path, bytes, sizeof(bytes));
	assert_int_equal(load(path, IDENTITY, 3), -EBADMSG);
}

static void test_no_blocks(void **state)
{
	_cleanup_(freep) char *path = path_of("none");

	(void)state;
	assert_int_equal(heat_save(path, 1, 0, NULL), 0);
	assert_int_equal(heat_load(path, 1, 0, NULL), 0);
	assert_int_equal(heat_load(path, 2, 0, NULL), -EBADMSG);
}

static void test_replaced_whole(void **state)
{
	static const uint16_t other[3] = { 1, 2, 3 };
	_cleanup_(freep) char *path = path_of("whole"), *new = path_of(".whole.new");
	uint16_t got[3];

	(void)state;
	assert_int_equal(heat_save(path, IDENTITY, 3, heat), 0);
	assert_int_equal(heat_save(path, IDENTITY, 3, other), 0);
	assert_int_equal(heat_load(path, IDENTITY, 3, got), 0);
	assert_memory_equal(got, other, sizeof(other));
	/* The place of the temporary file is taken: the old file stays. */
	assert_int_equal(mkdir(new, 0700), 0);
	assert_int_equal(heat_save(path, IDENTITY, 3, heat), -EISDIR);
	assert_int_equal(heat_load(path, IDENTITY, 3, got), 0);
	assert_memory_equal(got, other, sizeof(other));
	assert_int_equal(rmdir(new), 0);
	assert_int_equal(heat_save("/nowhere/at/all", IDENTITY, 3, heat), -ENOENT);
}

/* As large as the largest model has blocks. */
static void test_many(void **state)
{
	enum { MANY = 100000 };
	_cleanup_(freep) char *path = path_of("many");
	_cleanup_(freep) uint16_t *a = malloc(MANY * sizeof(*a)), *b = calloc(MANY, sizeof(*b));

	(void)state;
	assert_non_null(a);
	assert_non_null(b);
	for (uint32_t i = 0; i < MANY; i++)
		a[i] = (uint16_t)(i * 40503);
	assert_int_equal(heat_save(path, 5, MANY, a), 0);
	assert_int_equal(heat_load(path, 5, MANY, b), 0);
	assert_memory_equal(a, b, MANY * sizeof(*a));
}

/* A FIFO in the place of the new file was waited for, for ever. */
static void test_fifo_in_the_way(void **state)
{
	const uint16_t values[2] = { 1, 2 };
	_cleanup_(freep) char *path = heat_path(dir, 0xf1f0), *new = NULL;
	uint16_t back[2];

	(void)state;
	assert_non_null(path);
	assert_true(asprintf(&new, "%s/.%s.new", dir, strrchr(path, '/') + 1) > 0);
	assert_int_equal(mkfifo(new, 0600), 0);
	assert_int_equal(heat_save(path, 0xf1f0, 2, values), 0);
	assert_int_equal(heat_load(path, 0xf1f0, 2, back), 0);
	assert_int_equal(back[1], 2);
	assert_int_equal(access(new, F_OK), -1);
}

static int make_directory(void **state)
{
	(void)state;
	return mkdtemp(dir) ? 0 : -1;
}

/* Nothing half written may be left. */
static int remove_directory(void **state)
{
	DIR *d = opendir(dir);
	const struct dirent *entry;
	int r = d ? 0 : -1;

	(void)state;
	while (d && (entry = readdir(d))) {
		_cleanup_(freep) char *path = path_of(entry->d_name);

		if (streq(entry->d_name, ".") || streq(entry->d_name, ".."))
			continue;
		if (entry->d_name[0] == '.')
			r = -1;
		unlink(path);
	}
	if (d)
		closedir(d);
	rmdir(dir);
	return r;
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_path),
		cmocka_unit_test(test_format),
		cmocka_unit_test(test_foreign),
		cmocka_unit_test(test_damaged),
		cmocka_unit_test(test_short_and_long),
		cmocka_unit_test(test_no_blocks),
		cmocka_unit_test(test_replaced_whole),
		cmocka_unit_test(test_many),
		cmocka_unit_test(test_fifo_in_the_way),
	};

	return cmocka_run_group_tests_name("heat", tests, make_directory, remove_directory);
}
