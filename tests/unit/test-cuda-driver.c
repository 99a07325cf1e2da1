/* SPDX-License-Identifier: MIT */
/*
 * test-cuda-driver.c: the driver's table and the emulator, each by the other: memory, copies, the order of streams, failures, graphs, and
 * the words of device.cuh against plain loops.
 */
#include "tests/test.h"

#include <math.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/args.h"
#include "kernels/cuda/driver.h"
#include "tests/emu/library.h"
#include "tests/emu/test-kernels.h"

/* Long against what the machine's other work delays us by; held back are copies only. */
#define SLOW_COPIES "copy:60000"

static void environment(const char *name, const char *value)
{
	if (value)
		setenv(name, value, 1);
	else
		unsetenv(name);
}

/* The emulator with these failures and delays, or a skip. */
static struct cuda_driver *open_with(const char *failures, const char *delays)
{
	struct cuda_driver *d = NULL;
	char *error = NULL;

	if (!emu_library())
		skip_because("the emulator was not built");
	environment("RESIDENTD_EMU_FAIL", failures);
	environment("RESIDENTD_EMU_DELAY_US", delays);
	if (cuda_open(emu_library(), 0, NULL, 0, &d, &error) < 0)
		fail_msg("%s", error);
	return d;
}

static void *alloc(struct cuda_driver *d, size_t bytes)
{
	void *p = NULL;

	assert_int_equal(cuda_alloc(d, bytes, &p), 0);
	return p;
}

static void *host_alloc(struct cuda_driver *d, size_t bytes)
{
	void *p = NULL;

	assert_int_equal(cuda_host_alloc(d, bytes, &p), 0);
	return p;
}

static void *upload(struct cuda_driver *d, const void *data, size_t bytes)
{
	void *p = alloc(d, bytes);

	assert_int_equal(cuda_upload(d, p, data, bytes, NULL), 0);
	return p;
}

static struct cuda_function *function(struct cuda_driver *d, const char *name)
{
	struct cuda_function *f = NULL;

	assert_int_equal(cuda_function(d, name, &f), 0);
	return f;
}

/* Runs a kernel to its end, and gives back what y holds then. */
static void run(struct cuda_driver *d, const char *name, struct cuda_grid grid,
		struct test_args *args, void *y, size_t y_bytes)
{
	args->y = alloc(d, y_bytes);
	assert_int_equal(cuda_fill(d, args->y, 0, y_bytes, NULL), 0);
	assert_int_equal(cuda_launch(d, function(d, name), grid, NULL, args, sizeof(*args)), 0);
	assert_int_equal(cuda_stream_synchronize(d, NULL), 0);
	assert_int_equal(cuda_download(d, y, args->y, y_bytes, NULL), 0);
}

/* ---- opening ---- */

static void test_no_library(void **state)
{
	_cleanup_(freep) char *error = NULL;
	struct cuda_driver *d = NULL;

	(void)state;
	assert_int_equal(cuda_open("libcuda-nowhere.so.1", 0, NULL, 0, &d, &error), -ELIBACC);
	assert_non_null(strstr(error, "no CUDA driver"));
	assert_non_null(strstr(error, "libcuda-nowhere.so.1"));
	assert_null(d);
}

static void test_other_library(void **state)
{
	_cleanup_(freep) char *error = NULL;
	struct cuda_driver *d = NULL;

	(void)state;
	assert_int_equal(cuda_open("libc.so.6", 0, NULL, 0, &d, &error), -ENOSYS);
	assert_non_null(strstr(error, "cuInit"));
	assert_null(d);
}

static void test_library_by_environment(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = NULL;
	_cleanup_(freep) char *error = NULL;

	(void)state;
	environment("RESIDENTD_CUDA_LIBRARY", "libcuda-elsewhere.so");
	assert_int_equal(cuda_open(NULL, 0, NULL, 0, &d, &error), -ELIBACC);
	assert_non_null(strstr(error, "libcuda-elsewhere.so"));
	environment("RESIDENTD_CUDA_LIBRARY", emu_library());
	if (!emu_library())
		skip_because("the emulator was not built");
	assert_int_equal(cuda_open(NULL, 0, NULL, 0, &d, NULL), 0);
	environment("RESIDENTD_CUDA_LIBRARY", NULL);
}

static void test_info(void **state)
{
	_cleanup_(freep) char *error = NULL;
	struct cuda_driver *d, *other = NULL;

	(void)state;
	environment("RESIDENTD_EMU_MEMORY", "64M");
	d = open_with(NULL, NULL);
	assert_string_equal(cuda_info(d)->name, "residentd emulator");
	assert_true(cuda_info(d)->emulator);
	assert_int_equal(cuda_info(d)->total_bytes, 64 << 20);
	assert_int_equal(cuda_info(d)->capability, 75);
	assert_string_equal(cuda_info(d)->pci, "0000:00:00.0");
	assert_string_equal(cuda_code_path(d), "emulator");
	assert_string_equal(cuda_error(d), "");
	assert_true(cuda_has_graphs(d));
	cuda_close(d);
	assert_int_equal(cuda_open(emu_library(), 3, NULL, 0, &other, &error), -ENODEV);
	assert_non_null(strstr(error, "number 3"));
	environment("RESIDENTD_EMU_MEMORY", NULL);
}

static void test_binary_refused(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with("image:1", NULL);
	_cleanup_(freep) char *error = NULL;
	struct cuda_driver *other = NULL;
	struct cuda_function *f;

	(void)state;
	assert_string_equal(cuda_code_path(d), "emulator, ptx");
	assert_int_equal(cuda_function(d, "test_add", &f), 0);

	environment("RESIDENTD_EMU_FAIL", "image:1+");
	assert_int_equal(cuda_open(emu_library(), 0, NULL, 0, &other, &error), -ENOEXEC);
	assert_non_null(strstr(error, "cuModuleLoadDataEx: CUDA_ERROR_NO_BINARY_FOR_GPU"));
	assert_null(other);
}

static void test_open_fails_for_a_while(void **state)
{
	struct cuda_driver *d = open_with(NULL, NULL);
	_cleanup_(freep) char *error = NULL;

	(void)state;
	d = cuda_close(d);
	environment("RESIDENTD_EMU_FAIL", "open:1,open:2");
	assert_int_equal(cuda_open(emu_library(), 0, NULL, 0, &d, &error), -ENODEV);
	assert_non_null(strstr(error, "cuCtxCreate: CUDA_ERROR_DEVICE_UNAVAILABLE"));
	assert_int_equal(cuda_open(emu_library(), 0, NULL, 0, &d, NULL), -ENODEV);
	assert_null(d);
	assert_int_equal(cuda_open(emu_library(), 0, NULL, 0, &d, NULL), 0);
	cuda_close(d);
}

/* ---- memory and copies ---- */

static void test_memory_limit(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = NULL;
	uint64_t available = 0, total = 0;
	void *a, *b = NULL;

	(void)state;
	environment("RESIDENTD_EMU_MEMORY", "1M");
	d = open_with(NULL, NULL);
	a = alloc(d, 600 << 10);
	assert_int_equal((uintptr_t)a % 256, 0);
	assert_int_equal(cuda_alloc(d, 600 << 10, &b), -ENOMEM);
	assert_null(b);
	assert_string_equal(cuda_error(d), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
	assert_int_equal(cuda_memory_info(d, &available, &total), 0);
	assert_int_equal(available, 424 << 10);
	assert_int_equal(total, 1 << 20);
	cuda_free(d, a);
	b = alloc(d, 1 << 20);
	assert_int_equal(cuda_alloc(d, 1, &a), -ENOMEM);
	cuda_free(d, b);
	assert_int_equal(cuda_alloc(d, 0, &a), -EINVAL);
	assert_int_equal(cuda_alloc(d, SIZE_MAX, &a), -ENOMEM);
	environment("RESIDENTD_EMU_MEMORY", NULL);
}

/* What the last context held does not outlive it. */
static void test_close_frees(void **state)
{
	environment("RESIDENTD_EMU_MEMORY", "1M");
	(void)state;
	for (int i = 0; i < 3; i++) {
		_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
		struct cuda_stream *stream;
		struct cuda_event *event;

		alloc(d, 1 << 20);
		host_alloc(d, 4096);
		assert_int_equal(cuda_stream_new(d, &stream), 0);
		assert_int_equal(cuda_event_new(d, false, &event), 0);
		assert_int_equal(cuda_event_record(d, event, stream), 0);
		assert_int_equal(cuda_stream_wait(d, stream, event), 0);
	}
	environment("RESIDENTD_EMU_MEMORY", NULL);
}

static void test_others(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = NULL;
	char path[] = "/tmp/residentd-test-XXXXXX";
	uint64_t available = 0, total = 0;
	int fd = mkstemp(path);
	void *p = NULL;

	(void)state;
	assert_true(fd >= 0);
	environment("RESIDENTD_EMU_MEMORY", "1M");
	environment("RESIDENTD_EMU_OTHERS", path);
	d = open_with(NULL, NULL);
	assert_int_equal(cuda_memory_info(d, &available, &total), 0);
	assert_int_equal(available, 1 << 20);
	assert_int_equal(pwrite(fd, "1000000\n", 8, 0), 8);
	assert_int_equal(cuda_memory_info(d, &available, &total), 0);
	assert_int_equal(available, (1 << 20) - 1000000);
	assert_int_equal(cuda_alloc(d, 100000, &p), -ENOMEM);
	assert_int_equal(pwrite(fd, "9999999\n", 8, 0), 8);
	assert_int_equal(cuda_memory_info(d, &available, &total), 0);
	assert_int_equal(available, 0);
	environment("RESIDENTD_EMU_OTHERS", NULL);
	environment("RESIDENTD_EMU_MEMORY", NULL);
	close(fd);
	unlink(path);
}

static void test_copies(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	char text[16] = "0123456789abcde", back[16] = "";
	char *a = upload(d, text, sizeof(text)), *b = alloc(d, sizeof(text));

	(void)state;
	assert_int_equal(cuda_copy(d, b, a, sizeof(text), NULL), 0);
	assert_int_equal(cuda_fill(d, b + 2, 'x', 3, NULL), 0);
	assert_int_equal(cuda_download(d, back, b, sizeof(back), NULL), 0);
	assert_string_equal(back, "01xxx56789abcde");

	/* One byte too far, before, in what was freed, in the other kind of memory. */
	assert_int_equal(cuda_upload(d, a + 1, text, sizeof(text), NULL), -EINVAL);
	assert_non_null(strstr(cuda_error(d), "cuMemcpyHtoDAsync: CUDA_ERROR_INVALID_VALUE"));
	assert_int_equal(cuda_upload(d, a - 1, text, 1, NULL), -EINVAL);
	assert_int_equal(cuda_download(d, back, a + 1, sizeof(text), NULL), -EINVAL);
	assert_int_equal(cuda_copy(d, a, b + 1, sizeof(text), NULL), -EINVAL);
	assert_int_equal(cuda_copy(d, a + 1, a, 4, NULL), -EINVAL); /* onto itself */
	assert_int_equal(cuda_fill(d, a + 15, 0, 2, NULL), -EINVAL);
	assert_int_equal(cuda_fill(d, text, 0, 2, NULL), -EINVAL);
	cuda_free(d, b);
	assert_int_equal(cuda_copy(d, b, a, 1, NULL), -EINVAL);
}

/* Page-locked memory is read when the copy runs, other memory when it is asked for. */
static void test_pinned_source(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, SLOW_COPIES);
	char text[8] = "early", *pinned = host_alloc(d, 8), back[8];
	void *a = alloc(d, 8), *b = alloc(d, 8);
	struct cuda_stream *stream = NULL;

	(void)state;
	assert_int_equal(cuda_stream_new(d, &stream), 0);
	strcpy(pinned, "early");
	assert_int_equal(cuda_upload(d, a, pinned, 8, stream), 0);
	assert_int_equal(cuda_upload(d, b, text, 8, stream), 0);
	strcpy(pinned, "late");
	strcpy(text, "late");
	assert_int_equal(cuda_stream_synchronize(d, stream), 0);
	assert_int_equal(cuda_download(d, back, a, 8, NULL), 0);
	assert_string_equal(back, "late");
	assert_int_equal(cuda_download(d, back, b, 8, NULL), 0);
	assert_string_equal(back, "early");
}

/* ---- streams ---- */

struct streams {
	struct cuda_stream *copy, *compute;
	struct cuda_event *copied;
	float *from, *to; /* page-locked */
	void *a;
	struct test_args args;
};

/* args: y += a; y is 1, a is 0 and shall become 41. */
static struct streams streams_new(struct cuda_driver *d)
{
	struct streams s = { .from = host_alloc(d, sizeof(float)), .to = host_alloc(d, sizeof(float)) };
	float zero = 0, one = 1;

	assert_int_equal(cuda_stream_new(d, &s.copy), 0);
	assert_int_equal(cuda_stream_new(d, &s.compute), 0);
	assert_int_equal(cuda_event_new(d, true, &s.copied), 0);
	s.a = upload(d, &zero, sizeof(zero));
	s.args = (struct test_args){ .a = s.a, .y = upload(d, &one, sizeof(one)), .n = 1 };
	*s.from = 41;
	*s.to = -1;
	return s;
}

static void add(struct cuda_driver *d, struct streams *s)
{
	assert_int_equal(cuda_launch(d, function(d, "test_add"), (struct cuda_grid){ .x = 1 },
				     s->compute, &s->args, sizeof(s->args)),
			 0);
}

static void test_streams_are_independent(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, SLOW_COPIES);
	struct streams s = streams_new(d);

	(void)state;
	/* Nobody waits: the kernel is done before the copy is. */
	assert_int_equal(cuda_upload(d, s.a, s.from, sizeof(float), s.copy), 0);
	add(d, &s);
	assert_int_equal(cuda_stream_synchronize(d, s.compute), 0);
	assert_int_equal(cuda_download(d, s.to, s.args.y, sizeof(float), s.compute), 0);
	assert_true(*s.to == -1); /* asked for, not there */
	assert_int_equal(cuda_stream_synchronize(d, s.compute), 0);
	assert_true(*s.to == 1);
}

static void test_event_orders(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, SLOW_COPIES);
	struct streams s = streams_new(d);
	struct cuda_event *start = NULL;
	uint64_t us = 0;

	(void)state;
	assert_int_equal(cuda_event_new(d, true, &start), 0);
	assert_int_equal(cuda_event_query(d, s.copied), 0); /* never recorded */
	assert_int_equal(cuda_event_record(d, start, s.copy), 0);
	assert_int_equal(cuda_upload(d, s.a, s.from, sizeof(float), s.copy), 0);
	assert_int_equal(cuda_event_record(d, s.copied, s.copy), 0);
	assert_int_equal(cuda_stream_wait(d, s.compute, s.copied), 0);
	add(d, &s);
	assert_int_equal(cuda_event_query(d, s.copied), -EAGAIN);
	assert_string_equal(cuda_error(d), "");
	assert_int_equal(cuda_event_elapsed(d, start, s.copied, &us), -EAGAIN);
	cuda_stream_free(d, s.copy); /* what it has to do is still done */
	assert_int_equal(cuda_event_synchronize(d, s.copied), 0);
	assert_int_equal(cuda_event_query(d, s.copied), 0);
	assert_int_equal(cuda_event_elapsed(d, start, s.copied, &us), 0);
	assert_in_range(us, 30000, 10000000);
	cuda_event_free(d, s.copied);
	assert_int_equal(cuda_stream_synchronize(d, s.compute), 0);
	assert_int_equal(cuda_download(d, s.to, s.args.y, sizeof(float), NULL), 0);
	assert_true(*s.to == 42);
}

static void test_order_within_a_stream(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, "300");
	struct streams s = streams_new(d);

	(void)state;
	for (int i = 0; i < 10; i++) { /* y = 2 y, ten times */
		assert_int_equal(cuda_copy(d, s.a, s.args.y, sizeof(float), s.compute), 0);
		add(d, &s);
	}
	assert_int_equal(cuda_download(d, s.to, s.args.y, sizeof(float), s.compute), 0);
	assert_int_equal(cuda_stream_synchronize(d, s.compute), 0);
	assert_true(*s.to == 1024);
}

static void test_graph(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	struct streams s = streams_new(d);
	struct cuda_graph_exec *graph = NULL, *none = NULL;
	void *p = NULL;

	(void)state;
	assert_int_equal(cuda_graph_begin(d, s.compute), 0);
	assert_int_equal(cuda_copy(d, s.a, s.args.y, sizeof(float), s.compute), 0);
	add(d, &s);
	assert_int_equal(cuda_alloc(d, 4, &p), -EINVAL);
	assert_int_equal(cuda_graph_end(d, s.compute, &graph), 0);
	s.args.n = 0; /* too late for the graph */
	assert_int_equal(cuda_download(d, s.to, s.args.y, sizeof(float), NULL), 0);
	assert_true(*s.to == 1); /* nothing has run */
	for (int i = 0; i < 3; i++)
		assert_int_equal(cuda_graph_launch(d, graph, s.compute), 0);
	assert_int_equal(cuda_stream_synchronize(d, s.compute), 0);
	assert_int_equal(cuda_download(d, s.to, s.args.y, sizeof(float), NULL), 0);
	assert_true(*s.to == 8);
	cuda_graph_free(d, graph);

	assert_int_equal(cuda_graph_begin(d, s.compute), 0);
	assert_int_equal(cuda_event_record(d, s.copied, s.compute), -EINVAL);
	assert_true(cuda_graph_end(d, s.compute, &none) < 0);
	assert_null(none);
	assert_int_equal(cuda_graph_begin(d, s.compute), 0); /* left to cuda_close() */
	add(d, &s);
}

/* ---- failures ---- */

static void test_copy_fails(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with("copy:2", NULL);
	float x = 3, y = 0;
	void *p = upload(d, &x, sizeof(x));

	(void)state;
	assert_int_equal(cuda_download(d, &y, p, sizeof(y), NULL), -EIO);
	assert_string_equal(cuda_error(d),
			    "cuMemcpyDtoHAsync: CUDA_ERROR_OPERATING_SYSTEM (injected failure)");
	assert_true(y == 0);
	assert_int_equal(cuda_download(d, &y, p, sizeof(y), NULL), 0);
	assert_true(y == 3);
}

static void test_alloc_fails(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with("alloc:2,alloc:4+,host:1", NULL);
	static const int expected[] = { 0, -ENOMEM, 0, -ENOMEM, -ENOMEM };
	void *p = NULL;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(expected); i++)
		assert_int_equal(cuda_alloc(d, 4, &p), expected[i]);
	assert_int_equal(cuda_host_alloc(d, 4, &p), -ENOMEM);
	assert_int_equal(cuda_host_alloc(d, 4, &p), 0);
}

static void test_launch_fails(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with("launch:2", NULL);
	struct streams s = streams_new(d);
	struct cuda_function *f = function(d, "test_add");
	struct cuda_grid grid = { .x = 1 };

	(void)state;
	add(d, &s);
	assert_int_equal(cuda_launch(d, f, grid, s.compute, &s.args, sizeof(s.args)), -EIO);
	assert_int_equal(cuda_launch(d, f, grid, s.compute, &s.args, sizeof(s.args) - 4), -EINVAL);
	assert_int_equal(cuda_launch(d, f, (struct cuda_grid){ .x = 0 }, s.compute, &s.args,
				     sizeof(s.args)),
			 -EINVAL);
	assert_int_equal(cuda_launch(d, f, (struct cuda_grid){ .x = 1, .y = 65536 }, s.compute,
				     &s.args, sizeof(s.args)),
			 -EINVAL);
	assert_int_equal(cuda_launch(d, f, (struct cuda_grid){ .x = 1, .shared_bytes = 49153 },
				     s.compute, &s.args, sizeof(s.args)),
			 -EINVAL);
	assert_int_equal(cuda_function(d, "test_nothing", &f), -ENOENT);
	assert_string_equal(cuda_error(d), "no kernel test_nothing");
}

/* At whatever call the device is lost: that one and all after it say so, and a new context is whole. */
static void test_lost_at_any_call(void **state)
{
	char failures[32];
	bool lost = true;

	(void)state;
	for (unsigned at = 3; lost; at++) { /* 1 and 2: the module, in cuda_open(), and the function */
		struct cuda_driver *d;
		struct cuda_stream *stream = NULL;
		struct cuda_event *event = NULL;
		float *p = NULL, x = 1;
		void *a = NULL;
		int r[12];

		snprintf(failures, sizeof(failures), "lost:%u", at);
		d = open_with(failures, "20");
		function(d, "test_add");
		r[0] = cuda_alloc(d, 4, &a);
		r[1] = cuda_host_alloc(d, 4, (void **)&p);
		r[2] = cuda_stream_new(d, &stream);
		r[3] = cuda_event_new(d, false, &event);
		for (size_t i = 4; i < 12; i++)
			r[i] = -ENODEV;
		if (r[3] == 0) {
			r[4] = cuda_upload(d, a, &x, 4, NULL);
			r[5] = cuda_upload(d, a, p, 4, stream);
			r[6] = cuda_event_record(d, event, stream);
			r[7] = cuda_stream_wait(d, stream, event);
			r[8] = cuda_fill(d, a, 0, 4, stream);
			r[9] = cuda_download(d, &x, a, 4, stream);
			r[10] = cuda_event_synchronize(d, event);
			r[11] = cuda_stream_synchronize(d, stream);
		}
		lost = r[11] != 0;
		for (size_t i = 1, failed = r[0] != 0; i < ARRAY_SIZE(r); i++) {
			assert_int_equal(r[i], failed || r[i] ? -ENODEV : 0);
			failed |= r[i] != 0;
		}
		if (lost && r[0])
			assert_non_null(strstr(cuda_error(d), "CUDA_ERROR_LAUNCH_FAILED"));
		d = cuda_close(d);
		if (lost) { /* once, by the same text */
			assert_int_equal(cuda_open(emu_library(), 0, NULL, 0, &d, NULL), 0);
			assert_int_equal(cuda_alloc(d, 4, &a), 0);
			cuda_close(d);
		}
		assert_in_range(at, 3, 40);
	}
}

/* A fault of what runs is told by whatever is called next. */
static void test_fault(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with("fault:3", NULL);
	struct streams s = streams_new(d); /* two pieces of work */

	(void)state;
	add(d, &s);
	assert_int_equal(cuda_stream_synchronize(d, s.compute), -ENODEV);
	assert_int_equal(cuda_fill(d, s.a, 0, 4, s.copy), -ENODEV);
}

/* ---- what kernels are written in ---- */

static void test_shared_memory(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	struct cuda_grid grid = { .x = 3, .y = 2, .shared_bytes = CUDA_THREADS * 4 };
	uint32_t a[6 * CUDA_THREADS], y[6 * CUDA_THREADS], fresh[4 * 32];
	struct test_args args = { 0 };

	(void)state;
	for (uint32_t i = 0; i < ARRAY_SIZE(a); i++)
		a[i] = i * 2654435761u;
	args.a = upload(d, a, sizeof(a));
	run(d, "test_turn", grid, &args, y, sizeof(y));
	for (uint32_t i = 0; i < ARRAY_SIZE(a); i++)
		assert_int_equal(
			y[i], a[i / CUDA_THREADS * CUDA_THREADS + CUDA_THREADS - 1 - i % CUDA_THREADS]);
	grid = (struct cuda_grid){ .x = 4, .threads = 64, .shared_bytes = 128 };
	run(d, "test_fresh", grid, &args, fresh, sizeof(fresh));
	for (size_t i = 0; i < ARRAY_SIZE(fresh); i++)
		assert_int_equal(fresh[i], 1);
}

static void test_warp(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	uint32_t a[96], y[96][TEST_WARP_WORDS];
	struct test_args args = { 0 };

	(void)state;
	for (uint32_t i = 0; i < 96; i++)
		a[i] = i * i % 101;
	a[40] = 1000; /* in the second warp not all are small */
	a[70] = 40;
	args.a = upload(d, a, sizeof(a));
	run(d, "test_warp", (struct cuda_grid){ .x = 1, .threads = 96 }, &args, y, sizeof(y));
	for (uint32_t i = 0; i < 96; i++) {
		uint32_t first = i / 32 * 32, lane = i % 32, ballot = 0, any = 0, all = 1;
		float sum = 0, got;

		for (uint32_t k = 0; k < 32; k++) {
			ballot |= (a[first + k] & 1) << k;
			any |= a[first + k] == 40;
			all &= a[first + k] < 1000;
			sum += (float)a[first + k]; /* small whole numbers: exact */
		}
		memcpy(&got, &y[i][TEST_SUM], sizeof(got));
		assert_int_equal(y[i][TEST_XOR], a[first + (lane ^ 5)]);
		assert_int_equal(y[i][TEST_DOWN], a[lane + 3 < 32 ? i + 3 : i]);
		assert_int_equal(y[i][TEST_UP], a[lane >= 3 ? i - 3 : i]);
		assert_int_equal(y[i][TEST_BROADCAST], a[first + 7]);
		assert_int_equal(y[i][TEST_HALF_XOR], a[i / 16 * 16 + (i % 16 ^ 9)]);
		assert_int_equal(y[i][TEST_BALLOT], ballot);
		assert_int_equal(y[i][TEST_ANY], any << 1 | all);
		assert_true(got == sum);
	}
}

static void test_early_leavers(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	struct test_args args = { .n = 77 };
	float y;

	(void)state;
	run(d, "test_leave", (struct cuda_grid){ .x = 2 }, &args, &y, sizeof(y));
	assert_true(y == 2 * 77);
}

/* Every sign and size, from a generator whose numbers are always the same. */
static void fill_bytes(int8_t *bytes, size_t n)
{
	uint32_t x = 12345;

	for (size_t i = 0; i < n; i++) {
		x = x * 1664525 + 1013904223;
		bytes[i] = (int8_t)(x >> 24);
	}
	bytes[0] = -128;
}

static void test_dp4a(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	struct test_args args = { .n = 100 };
	int8_t bytes[800];
	int y[100];

	(void)state;
	fill_bytes(bytes, sizeof(bytes));
	args.a = upload(d, bytes, 400);
	args.b = upload(d, bytes + 400, 400);
	run(d, "test_dp4a", (struct cuda_grid){ .x = 1 }, &args, y, sizeof(y));
	for (int i = 0; i < 100; i++) {
		int sum = i;

		for (int k = 0; k < 4; k++)
			sum += bytes[4 * i + k] * bytes[400 + 4 * i + k];
		assert_int_equal(y[i], sum);
	}
}

static void test_mma_s8(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	struct test_args args = { 0 };
	int8_t a[16][32], b[8][32];
	int y[16][8];

	(void)state;
	fill_bytes(a[0], sizeof(a));
	fill_bytes(b[0], sizeof(b));
	args.a = upload(d, a, sizeof(a));
	args.b = upload(d, b, sizeof(b));
	run(d, "test_mma_s8", (struct cuda_grid){ .x = 1, .threads = 32 }, &args, y, sizeof(y));
	for (int r = 0; r < 16; r++)
		for (int c = 0; c < 8; c++) {
			int sum = 0;

			for (int k = 0; k < 32; k++)
				sum += 2 * a[r][k] * b[c][k];
			assert_int_equal(y[r][c], sum);
		}
}

/* Values whose products and sums are exact in float, so that no order of summing is another's. */
static void test_mma_bf16(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	struct test_args args = { 0 };
	uint16_t a[16][16], b[8][16];
	int8_t bytes[384];
	float y[16][8];

	(void)state;
	fill_bytes(bytes, sizeof(bytes));
	for (int i = 0; i < 256; i++)
		a[i / 16][i % 16] = float_to_bf16((float)bytes[i] / 64);
	for (int i = 0; i < 128; i++)
		b[i / 16][i % 16] = float_to_bf16((float)bytes[256 + i] * 4);
	args.a = upload(d, a, sizeof(a));
	args.b = upload(d, b, sizeof(b));
	run(d, "test_mma_bf16", (struct cuda_grid){ .x = 1, .threads = 32 }, &args, y, sizeof(y));
	for (int r = 0; r < 16; r++)
		for (int c = 0; c < 8; c++) {
			float sum = 0;

			for (int k = 0; k < 16; k++)
				sum += bf16_to_float(a[r][k]) * bf16_to_float(b[c][k]);
			assert_true(y[r][c] == sum);
		}
}

static void test_half(void **state)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = open_with(NULL, NULL);
	enum { N = 20000 };
	_cleanup_(freep) float *x = calloc(N, sizeof(*x)), *back = calloc(N, 2 * sizeof(*back));
	_cleanup_(freep) uint32_t *y = calloc(N, sizeof(*y));
	struct test_args args = { .n = N };

	(void)state;
	assert_true(x && back && y);
	for (uint32_t i = 0, u = 1; i < N; i++, u = u * 1664525 + 1013904223) {
		/* Every other one in the range of halves, their denormals and their ties. */
		uint32_t bits = i % 2 ? (u & 0x80001fff) | (0x33000000 + u % 0x15000000) : u;

		if (i % 4 == 1)
			bits = (bits & ~0x1fffu) | 0x1000;
		memcpy(&x[i], &bits, sizeof(bits));
		if (isnan(x[i]))
			x[i] = INFINITY;
	}
	x[0] = 65520.0f;
	x[1] = 65519.996f;
	args.a = upload(d, x, N * sizeof(*x));
	args.b = alloc(d, N * 2 * sizeof(*back));
	run(d, "test_half", (struct cuda_grid){ .x = N / CUDA_THREADS + 1 }, &args, y, N * sizeof(*y));
	assert_int_equal(cuda_download(d, back, args.b, N * 2 * sizeof(*back), NULL), 0);
	for (int i = 0; i < N; i++) {
		assert_int_equal(y[i] & 0xffff, float_to_f16(x[i]));
		assert_int_equal(y[i] >> 16, float_to_bf16(x[i]));
		assert_true(back[2 * i] == f16_to_float((uint16_t)y[i]));
		assert_true(back[2 * i + 1] == bf16_to_float((uint16_t)(y[i] >> 16)));
	}
}

/* What a card would hang on or answer with rubbish ends the process with a word. */
static void check_wrong(uint32_t which, const char *message)
{
	char text[512] = "";
	int fds[2], status;
	ssize_t n;
	pid_t pid;

	assert_int_equal(pipe(fds), 0);
	fflush(NULL);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		struct rlimit none = { 0, 0 };
		struct test_args args = { .n = which };
		struct cuda_driver *d = NULL;
		struct cuda_function *f;

		setrlimit(RLIMIT_CORE, &none);
		dup2(fds[1], STDERR_FILENO);
		if (cuda_open(emu_library(), 0, NULL, 0, &d, NULL) < 0 ||
		    cuda_alloc(d, CUDA_THREADS * 4, &args.y) < 0 ||
		    cuda_function(d, "test_wrong", &f) < 0)
			_exit(1);
		signal(SIGABRT, SIG_DFL); /* cmocka's handler would go on with the tests */
		cuda_launch(d, f, (struct cuda_grid){ .x = 1 }, NULL, &args, sizeof(args));
		cuda_stream_synchronize(d, NULL);
		_exit(0);
	}
	close(fds[1]);
	for (size_t at = 0; at < sizeof(text) - 1; at += (size_t)n) {
		n = read(fds[0], text + at, sizeof(text) - 1 - at);
		if (n <= 0)
			break;
	}
	close(fds[0]);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
	if (!strstr(text, message))
		fail_msg("\"%s\" is not in \"%s\"", message, text);
	assert_non_null(strstr(text, "test_wrong, block (0, 0, 0)"));
}

static void test_wrong_kernels(void **state)
{
	(void)state;
	if (!emu_library())
		skip_because("the emulator was not built");
	environment("RESIDENTD_EMU_FAIL", NULL);
	environment("RESIDENTD_EMU_DELAY_US", NULL);
	check_wrong(0, "deadlock");
	check_wrong(1, "lane 3 is asked");
	check_wrong(2, "meet in different functions");
	check_wrong(3, "mask 0xffff");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_no_library),
		cmocka_unit_test(test_other_library),
		cmocka_unit_test(test_library_by_environment),
		cmocka_unit_test(test_info),
		cmocka_unit_test(test_binary_refused),
		cmocka_unit_test(test_open_fails_for_a_while),
		cmocka_unit_test(test_memory_limit),
		cmocka_unit_test(test_close_frees),
		cmocka_unit_test(test_others),
		cmocka_unit_test(test_copies),
		cmocka_unit_test(test_pinned_source),
		cmocka_unit_test(test_streams_are_independent),
		cmocka_unit_test(test_event_orders),
		cmocka_unit_test(test_order_within_a_stream),
		cmocka_unit_test(test_graph),
		cmocka_unit_test(test_copy_fails),
		cmocka_unit_test(test_alloc_fails),
		cmocka_unit_test(test_launch_fails),
		cmocka_unit_test(test_lost_at_any_call),
		cmocka_unit_test(test_fault),
		cmocka_unit_test(test_shared_memory),
		cmocka_unit_test(test_warp),
		cmocka_unit_test(test_early_leavers),
		cmocka_unit_test(test_dp4a),
		cmocka_unit_test(test_mma_s8),
		cmocka_unit_test(test_mma_bf16),
		cmocka_unit_test(test_half),
		cmocka_unit_test(test_wrong_kernels),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
