/* SPDX-License-Identifier: MIT */
/*
 * cuda.h: what the tests of CUDA kernels share: the device, and what is on it. Runs on what
 * RESIDENTD_CUDA_LIBRARY names, else on the emulator beside the test.
 *
 * Buffers on the device are as long as their data, so that the address sanitizer sees every overrun
 * in the emulator, and what a kernel is to write begins as not-a-number.
 */
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/driver.h"
#include "tests/emu/library.h"
#include "tests/unit/kernels.h"

#define BUFFERS_MAX 32

static struct cuda_driver *gpu;
static void *buffers[BUFFERS_MAX];
static size_t n_buffers;

#define GPU_OR_SKIP()                                                                                     \
	do {                                                                                              \
		if (!gpu) {                                                                               \
			skip_because("no emulator was built, and RESIDENTD_CUDA_LIBRARY names no other"); \
			return;                                                                           \
		}                                                                                         \
	} while (0)

static inline void assert_done(int r)
{
	if (r < 0)
		fail_msg("%s (%s)", cuda_error(gpu), strerror(-r));
}

/* On the device until buffers_free(): a copy of x, or not-a-numbers. */
static inline void *put(const void *x, size_t bytes)
{
	void *p;

	assert_true(n_buffers < BUFFERS_MAX);
	assert_done(cuda_alloc(gpu, bytes ? bytes : 1, &p));
	buffers[n_buffers++] = p;
	if (x && bytes)
		assert_done(cuda_upload(gpu, p, x, bytes, NULL));
	else if (bytes)
		assert_done(cuda_fill(gpu, p, 0xff, bytes, NULL));
	return p;
}

static inline float *put_floats(const float *x, size_t n)
{
	return put(x, n * sizeof(*x));
}

/* The caller frees. */
static inline void *get(const void *p, size_t bytes)
{
	void *x = new_bytes(bytes);

	assert_done(cuda_download(gpu, x, p, bytes, NULL));
	return x;
}

static inline float *get_floats(const float *p, size_t n)
{
	return get(p, n * sizeof(*p));
}

static inline void buffers_free(void)
{
	while (n_buffers)
		cuda_free(gpu, buffers[--n_buffers]);
}

static inline void launch(const char *prefix, const char *type, struct cuda_grid grid,
			  const void *args, size_t args_bytes)
{
	struct cuda_function *function;
	char name[64];

	snprintf(name, sizeof(name), "%s%s", prefix, type);
	assert_done(cuda_function(gpu, name, &function));
	assert_done(cuda_launch(gpu, function, grid, NULL, args, args_bytes));
}

/* Behind args: the grid. */
#define LAUNCH_TYPE(prefix, type, args, ...) \
	launch(prefix, type, (struct cuda_grid){ .x = __VA_ARGS__ }, &(args), sizeof(args))
#define LAUNCH(name, args, ...) LAUNCH_TYPE(name, "", args, __VA_ARGS__)

static inline unsigned blocks(size_t n, size_t each)
{
	return (unsigned)((n + each - 1) / each);
}

static inline int open_device(void **state)
{
	const char *library = getenv("RESIDENTD_CUDA_LIBRARY") ?: emu_library();
	char *error = NULL;
	(void)state;

	if (library && cuda_open(library, 0, cuda_images, cuda_n_images, &gpu, &error) < 0) {
		print_error("%s: %s\n", library, error);
		free(error);
		return -1;
	}
	return 0;
}

static inline int close_device(void **state)
{
	(void)state;

	gpu = cuda_close(gpu);
	return 0;
}
