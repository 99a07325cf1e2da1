/* SPDX-License-Identifier: MIT */
/* test-trace.c: recorded routing read from literal text, what is refused and on which line, and what is written. */
#include "tests/test.h"

#include "daemon/residency/trace.h"

static int read_bytes(const char *text, size_t len, uint32_t n_experts, struct trace *ret,
		      char **ret_error)
{
	_cleanup_(fclosep) FILE *f = tmpfile();

	assert_non_null(f);
	assert_int_equal(fwrite(text, 1, len, f), len);
	rewind(f);
	return trace_read(f, "t", n_experts, ret, ret_error);
}

static void test_reads(void **state)
{
	static const char text[] = "{\"tok\": 0, \"layers\": [[0, 3], [1]]}\n"
				   "{\"layers\":[[],[2,4]],\"tok\":7,\"more\":{\"a\":[]}}\r\n"
				   "  {\"tok\": 8, \"layers\": [[1], []]}";
	static const uint32_t wanted[] = { 0, 3, 6, 7, 9, 1 };
	static const size_t first[] = { 0, 3, 5, 6 };
	struct trace t;

	(void)state;
	assert_int_equal(read_bytes(text, strlen(text), 0, &t, NULL), 0);
	assert_int_equal(t.n_layers, 2);
	assert_int_equal(t.n_experts, 5);
	assert_int_equal(t.n_steps, 3);
	assert_int_equal(t.n_wanted, 6);
	assert_memory_equal(t.wanted, wanted, sizeof(wanted));
	assert_memory_equal(t.first, first, sizeof(first));
	trace_done(&t);
	assert_null(t.wanted);
	trace_done(&t);
}

static void test_number_of_experts(void **state)
{
	static const char text[] = "{\"tok\": 0, \"layers\": [[0], [1]]}\n";
	char *error = NULL;
	struct trace t;

	(void)state;
	assert_int_equal(read_bytes(text, strlen(text), 64, &t, NULL), 0);
	assert_int_equal(t.n_experts, 64);
	assert_int_equal(t.wanted[1], 65);
	trace_done(&t);
	assert_int_equal(read_bytes(text, strlen(text), 1, &t, &error), -EBADMSG);
	assert_string_equal(error, "t:1: layer 1 has an item that is not an expert below 1");
	free(error);
	assert_int_equal(read_bytes(text, strlen(text), 65537, &t, NULL), -EINVAL);
}

static void test_refuses(void **state)
{
	static const struct {
		const char *text, *error;
	} cases[] = {
		{ "", "t:1: there are no steps" },
		{ "\n", "t:1: not a JSON object" },
		{ "{\"tok\":0,\"layers\":[[1]]}\n\n{\"tok\":1,\"layers\":[[1]]}\n",
		  "t:2: not a JSON object" },
		{ "[]\n", "t:1: not a JSON object" },
		{ "{\"tok\":0,\"layers\":[[1]]} x\n", "t:1: not a JSON object" },
		{ "{\"tok\":0,\"tok\":0,\"layers\":[[1]]}\n", "t:1: not a JSON object" },
		{ "{\"tok\":0,\"layers\":[[1]\n]}\n", "t:1: not a JSON object" },
		{ "{\"layers\":[[1]]}\n", "t:1: no number \"tok\"" },
		{ "{\"tok\":\"0\",\"layers\":[[1]]}\n", "t:1: no number \"tok\"" },
		{ "{\"tok\":-1,\"layers\":[[1]]}\n", "t:1: no number \"tok\"" },
		{ "{\"tok\":0}\n", "t:1: no list \"layers\"" },
		{ "{\"tok\":0,\"layers\":{}}\n", "t:1: no list \"layers\"" },
		{ "{\"tok\":0,\"layers\":[]}\n", "t:1: 0 layers; 1 to 4096 can be" },
		{ "{\"tok\":0,\"layers\":[1]}\n", "t:1: layer 0 is not a list" },
		{ "{\"tok\":0,\"layers\":[[1],[\"1\"]]}\n",
		  "t:1: layer 1 has an item that is not an expert below 65536" },
		{ "{\"tok\":0,\"layers\":[[1.0]]}\n",
		  "t:1: layer 0 has an item that is not an expert below 65536" },
		{ "{\"tok\":0,\"layers\":[[-1]]}\n",
		  "t:1: layer 0 has an item that is not an expert below 65536" },
		{ "{\"tok\":0,\"layers\":[[4294967297]]}\n",
		  "t:1: layer 0 has an item that is not an expert below 65536" },
		{ "{\"tok\":0,\"layers\":[[2,1]]}\n", "t:1: the experts of layer 0 do not ascend" },
		{ "{\"tok\":0,\"layers\":[[2,2]]}\n", "t:1: the experts of layer 0 do not ascend" },
		{ "{\"tok\":0,\"layers\":[[1]]}\n{\"tok\":1,\"layers\":[[1],[2]]}\n",
		  "t:2: 2 layers, and 1 in the lines before" },
	};
	struct trace t = { .n_steps = 77 };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		char *error = NULL;

		assert_int_equal(read_bytes(cases[i].text, strlen(cases[i].text), 0, &t, &error),
				 -EBADMSG);
		assert_string_equal(error, cases[i].error);
		free(error);
		assert_int_equal(read_bytes(cases[i].text, strlen(cases[i].text), 0, &t, NULL),
				 -EBADMSG);
	}
	assert_int_equal(t.n_steps, 77);
}

static void test_nul_byte(void **state)
{
	static const char text[] = "{\"tok\":0,\"layers\":[[1]]}\0\n";
	struct trace t;

	(void)state;
	assert_int_equal(read_bytes(text, sizeof(text) - 1, 0, &t, NULL), -EBADMSG);
}

/* A line without an end takes no more memory than a line may have. */
static void test_long_line(void **state)
{
	_cleanup_(fclosep) FILE *f = fopen("/dev/zero", "re");
	char *error = NULL;
	struct trace t;

	(void)state;
	if (!f)
		skip_because("/dev/zero cannot be opened");
	assert_int_equal(trace_read(f, "t", 0, &t, &error), -EBADMSG);
	assert_string_equal(error, "t:1: longer than 1048576 bytes");
	free(error);
}

static void test_too_many_layers(void **state)
{
	_cleanup_(buf_done) struct buf b = {};
	char *error = NULL;
	struct trace t;

	(void)state;
	assert_int_equal(buf_printf(&b, "{\"tok\":0,\"layers\":[[]"), 0);
	for (int i = 0; i < 4096; i++)
		assert_int_equal(buf_printf(&b, ",[]"), 0);
	assert_int_equal(buf_printf(&b, "]}\n"), 0);
	assert_int_equal(read_bytes(b.data, b.len, 0, &t, &error), -EBADMSG);
	assert_string_equal(error, "t:1: 4097 layers; 1 to 4096 can be");
	free(error);
}

static void test_unreadable(void **state)
{
	_cleanup_(fclosep) FILE *f = fopen("/", "re");
	char *error = NULL;
	struct trace t;

	(void)state;
	assert_non_null(f);
	assert_int_equal(trace_read(f, "/", 0, &t, &error), -EIO);
	assert_string_equal(error, "/: cannot be read");
	free(error);
}

static void test_writes(void **state)
{
	static const uint32_t counts[] = { 2, 0, 3 }, experts[] = { 5, 9, 0, 1, 255 };
	static const uint32_t wanted[] = { 5, 9, 512, 513, 767 };
	_cleanup_(buf_done) struct buf b = {};
	struct trace t;

	(void)state;
	assert_int_equal(trace_write_step(&b, 3, 3, counts, experts), 0);
	assert_string_equal(b.data, "{\"tok\": 3, \"layers\": [[5, 9], [], [0, 1, 255]]}\n");
	assert_int_equal(trace_write_step(&b, INT64_MAX, 3, counts, experts), 0);
	assert_int_equal(read_bytes(b.data, b.len, 0, &t, NULL), 0);
	assert_int_equal(t.n_steps, 2);
	assert_int_equal(t.n_experts, 256);
	assert_memory_equal(t.wanted + 5, wanted, sizeof(wanted));
	trace_done(&t);
}

static void test_recorded(void **state)
{
	static const struct {
		const char *file;
		uint32_t n_layers, n_experts;
		size_t n_steps;
	} files[] = { { "trace_kimi_300.jsonl", 26, 256, 300 },
		      { "trace_olmoe_299.jsonl", 16, 64, 299 } };
	const char *shared = getenv("RESIDENTD_SHARED");

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
		_cleanup_(freep) char *path = NULL, *error = NULL;
		_cleanup_(trace_done) struct trace t = {};
		_cleanup_(fclosep) FILE *f = NULL;

		assert_true(asprintf(&path, "%s/traces/%s", shared ? shared : "../shared",
				     files[i].file) > 0);
		f = fopen(path, "re");
		if (!f)
			skip_because("%s is not there", path);
		assert_int_equal(trace_read(f, path, 0, &t, &error), 0);
		assert_int_equal(t.n_layers, files[i].n_layers);
		assert_int_equal(t.n_experts, files[i].n_experts);
		assert_int_equal(t.n_steps, files[i].n_steps);
		/* Eight experts a layer. */
		assert_int_equal(t.n_wanted, files[i].n_steps * files[i].n_layers * 8);
	}
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_reads),      cmocka_unit_test(test_number_of_experts),
		cmocka_unit_test(test_refuses),    cmocka_unit_test(test_nul_byte),
		cmocka_unit_test(test_long_line),  cmocka_unit_test(test_too_many_layers),
		cmocka_unit_test(test_unreadable), cmocka_unit_test(test_writes),
		cmocka_unit_test(test_recorded),
	};

	return cmocka_run_group_tests_name("trace", tests, NULL, NULL);
}
