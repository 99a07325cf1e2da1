/* SPDX-License-Identifier: MIT */
/*
 * driver.c: the table of libcuda.so.1's functions, and one context of one device.
 *
 * Owns the library's handle (never closed: the driver leaves threads and exit handlers behind), context and modules. Callers and
 * threads: driver.h. Invariant: no result of the driver is dropped, but those of giving things back, which have nobody to
 * tell: a lost device refuses them too, and closing the context frees everything anyway.
 */
#include "kernels/cuda/driver.h"

#include <dlfcn.h>

#include "kernels/cuda/args.h"

/* PTX of version 6.5, the first with integer tensor cores, came with CUDA 10.2. */
#define DRIVER_MIN     10020
#define CAPABILITY_MIN 75

#define TABLE_ENTRY(name, symbol, arguments) int(*name) arguments;
struct driver_table {
	CUDA_FUNCTIONS(TABLE_ENTRY)
	CUDA_GRAPH_FUNCTIONS(TABLE_ENTRY)
};

struct driver_symbol {
	const char *name;
	size_t offset;
};
#define SYMBOL_ENTRY(name, symbol, arguments) { #symbol, offsetof(struct driver_table, name) },
static const struct driver_symbol needed[] = { CUDA_FUNCTIONS(SYMBOL_ENTRY) };
static const struct driver_symbol graph_symbols[] = { CUDA_GRAPH_FUNCTIONS(SYMBOL_ENTRY) };

struct cuda_driver {
	struct driver_table api;
	struct cuda_info info;
	struct cuda_context *context;
	struct cuda_module **modules; /* one an image */
	size_t n_modules;
	const char *code_path;
	bool has_graphs;
	char error[256];
};

static int errno_of(int result)
{
	switch ((enum cuda_result)result) {
	case CUDA_SUCCESS: return 0;
	case CUDA_OUT_OF_MEMORY: return -ENOMEM;
	case CUDA_NOT_READY: return -EAGAIN;
	case CUDA_NOT_FOUND: return -ENOENT;
	case CUDA_INVALID_VALUE:
	case CUDA_INVALID_HANDLE:
	case CUDA_INVALID_CONTEXT:
	case CUDA_CAPTURE_UNSUPPORTED: return -EINVAL;
	case CUDA_NOT_SUPPORTED:
	case CUDA_STUB_LIBRARY:
	case CUDA_NEWER_DRIVER_NEEDED: return -ENOSYS;
	case CUDA_INVALID_IMAGE:
	case CUDA_NO_BINARY_FOR_GPU:
	case CUDA_INVALID_PTX:
	case CUDA_JIT_COMPILER_NOT_FOUND:
	case CUDA_UNSUPPORTED_PTX_VERSION:
	case CUDA_JIT_COMPILATION_DISABLED:
	case CUDA_INVALID_SOURCE: return -ENOEXEC;
	case CUDA_NOT_INITIALIZED:
	case CUDA_DEVICE_UNAVAILABLE:
	case CUDA_NO_DEVICE:
	case CUDA_INVALID_DEVICE:
	case CUDA_DEVICE_NOT_LICENSED:
	case CUDA_ECC_UNCORRECTABLE:
	case CUDA_NVLINK_UNCORRECTABLE:
	case CUDA_CONTAINED:
	case CUDA_ILLEGAL_ADDRESS:
	case CUDA_LAUNCH_TIMEOUT:
	case CUDA_CONTEXT_IS_DESTROYED:
	case CUDA_ASSERT:
	case CUDA_HARDWARE_STACK:
	case CUDA_ILLEGAL_INSTRUCTION:
	case CUDA_MISALIGNED_ADDRESS:
	case CUDA_INVALID_ADDRESS_SPACE:
	case CUDA_INVALID_PC:
	case CUDA_LAUNCH_FAILED:
	case CUDA_SYSTEM_NOT_READY:
	case CUDA_DRIVER_MISMATCH:
	case CUDA_EXTERNAL_DEVICE:
	case CUDA_UNKNOWN:
		return -ENODEV; /* the last is what a context says after a suspend that it did not survive */
	case CUDA_OPERATING_SYSTEM: return -EIO;
	}
	return -EIO;
}

static int check(struct cuda_driver *d, const char *call, int result)
{
	const char *name = NULL, *text = NULL;

	if (result == CUDA_SUCCESS)
		return 0;
	d->api.cuGetErrorName(result, &name);
	d->api.cuGetErrorString(result, &text);
	snprintf(d->error, sizeof(d->error), "%s: %s (%s)", call, name ? name : "error",
		 text ? text : "unknown to this driver");
	return errno_of(result);
}

#define CALL(d, name, ...) check(d, #name, (d)->api.name(__VA_ARGS__))

/* ---- opening ---- */

/* Name of the first that the library does not have, or NULL. */
static const char *load_symbols(struct cuda_driver *d, void *library,
				const struct driver_symbol *symbols, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		void *f = dlsym(library, symbols[i].name);

		if (!f)
			return symbols[i].name;
		memcpy((char *)&d->api + symbols[i].offset, &f, sizeof(f));
	}
	return NULL;
}

static int open_library(struct cuda_driver *d, const char *name, char **ret_error)
{
	const char *missing;
	void *library;

	if (!name)
		name = secure_getenv("RESIDENTD_CUDA_LIBRARY");
	if (!name || !*name)
		name = "libcuda.so.1";
	library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return fail(ret_error, -ELIBACC, "no CUDA driver: %s", dlerror());
	missing = load_symbols(d, library, needed, ARRAY_SIZE(needed));
	if (missing) {
		dlclose(library);
		return fail(ret_error, -ENOSYS, "%s is too old or no CUDA driver: it has no %s",
			    name, missing);
	}
	d->has_graphs = !load_symbols(d, library, graph_symbols, ARRAY_SIZE(graph_symbols));
	d->info.emulator = dlsym(library, CUDA_EMULATOR_SYMBOL);
	return 0;
}

static int read_attribute(struct cuda_driver *d, int device, int attribute, unsigned *ret)
{
	int value = 0, r;

	r = CALL(d, cuDeviceGetAttribute, &value, attribute, device);
	if (r == 0)
		*ret = (unsigned)value;
	return r;
}

static int read_info(struct cuda_driver *d, int device)
{
	struct cuda_info *info = &d->info;
	unsigned major = 0, minor = 0, bus = 0, slot = 0, domain = 0;
	size_t total = 0;
	int r;

	if ((r = CALL(d, cuDeviceGetName, info->name, (int)sizeof(info->name) - 1, device)) < 0 ||
	    (r = CALL(d, cuDeviceTotalMem, &total, device)) < 0 ||
	    (r = read_attribute(d, device, CUDA_ATTRIBUTE_CAPABILITY_MAJOR, &major)) < 0 ||
	    (r = read_attribute(d, device, CUDA_ATTRIBUTE_CAPABILITY_MINOR, &minor)) < 0 ||
	    (r = read_attribute(d, device, CUDA_ATTRIBUTE_MULTIPROCESSORS, &info->n_multiprocessors)) < 0 ||
	    (r = read_attribute(d, device, CUDA_ATTRIBUTE_PCI_BUS, &bus)) < 0 ||
	    (r = read_attribute(d, device, CUDA_ATTRIBUTE_PCI_DEVICE, &slot)) < 0 ||
	    (r = read_attribute(d, device, CUDA_ATTRIBUTE_PCI_DOMAIN, &domain)) < 0)
		return r;
	info->capability = major * 10 + minor;
	info->total_bytes = total;
	snprintf(info->pci, sizeof(info->pci), "%04x:%02x:%02x.0", domain & 0xffff, bus & 0xff,
		 slot & 0xff);
	return 0;
}

/* The device's number in the driver, once it is known to be good enough. */
static int open_device(struct cuda_driver *d, int ordinal, int *ret_device, char **ret_error)
{
	int device = 0, count = 0, r;

	if ((r = CALL(d, cuInit, 0)) < 0 || (r = CALL(d, cuDriverGetVersion, &d->info.driver)) < 0 ||
	    (r = CALL(d, cuDeviceGetCount, &count)) < 0)
		return fail(ret_error, r, "%s", d->error);
	if (d->info.driver < DRIVER_MIN)
		return fail(ret_error, -ENOSYS, "the driver offers CUDA %d.%d, %d.%d is needed",
			    d->info.driver / 1000, d->info.driver % 1000 / 10, DRIVER_MIN / 1000,
			    DRIVER_MIN % 1000 / 10);
	if (ordinal < 0 || ordinal >= count)
		return fail(ret_error, -ENODEV, "no GPU with number %d: the driver has %d", ordinal,
			    count);
	if ((r = CALL(d, cuDeviceGet, &device, ordinal)) < 0 || (r = read_info(d, device)) < 0)
		return fail(ret_error, r, "%s", d->error);
	if (d->info.capability < CAPABILITY_MIN)
		return fail(ret_error, -ENODEV, "%s: compute capability %u.%u, %d.%d is needed",
			    d->info.name, d->info.capability / 10, d->info.capability % 10,
			    CAPABILITY_MIN / 10, CAPABILITY_MIN % 10);
	*ret_device = device;
	return 0;
}

/* What the compiler inside the driver says follows in the error text, as far as it fits. */
static int load_ptx(struct cuda_driver *d, const char *ptx, struct cuda_module **ret)
{
	char log[160] = "";
	int options[] = { CUDA_JIT_ERROR_LOG, CUDA_JIT_ERROR_LOG_BYTES };
	void *values[] = { log, (void *)(uintptr_t)(sizeof(log) - 1) };
	size_t len;
	int r;

	r = CALL(d, cuModuleLoadDataEx, ret, ptx, ARRAY_SIZE(options), options, values);
	len = strlen(d->error);
	if (r < 0 && *log)
		snprintf(d->error + len, sizeof(d->error) - len, ": %s", log);
	return r;
}

static int load_images(struct cuda_driver *d, const struct cuda_image *images, size_t n, bool ptx)
{
	for (size_t i = 0; i < n; i++) {
		int r = ptx ? load_ptx(d, images[i].ptx, &d->modules[i])
			    : CALL(d, cuModuleLoadDataEx, &d->modules[i], images[i].fatbin, 0, NULL,
				   NULL);

		if (r < 0)
			return r;
		d->n_modules = i + 1;
	}
	return 0;
}

static int open_context(struct cuda_driver *d, int device)
{
	return CALL(d, cuCtxCreate, &d->context, CUDA_CONTEXT_BLOCKING_SYNC, device);
}

/*
 * Machine code first; where the driver does not take it, a new context (what was loaded goes with the old one) and the PTX. The
 * error that is told is then that of the PTX, the last chance. The emulator has its kernels inside, and looks at no image.
 */
static int load_code(struct cuda_driver *d, int device, const struct cuda_image *images, size_t n,
		     char **ret_error)
{
	static const struct cuda_image emulated = { .fatbin = "", .ptx = "" };
	bool emulator = d->info.emulator;
	int r;

	if (emulator) {
		images = &emulated;
		n = 1;
	}
	if (n == 0)
		return fail(ret_error, -ENOSYS, "built without the CUDA toolkit: no kernels for %s",
			    d->info.name);
	d->modules = calloc(n, sizeof(struct cuda_module *));
	if (!d->modules)
		return fail(ret_error, -ENOMEM, "no memory");
	d->code_path = emulator ? "emulator" : "binary";
	r = load_images(d, images, n, false);
	if (r < 0 && r != -ENOMEM && r != -ENODEV) { /* older drivers say it in several ways */
		d->api.cuCtxDestroy(TAKE_PTR(d->context));
		d->code_path = emulator ? "emulator, ptx" : "ptx";
		d->n_modules = 0;
		r = open_context(d, device);
		if (r == 0)
			r = load_images(d, images, n, true);
	}
	return r < 0 ? fail(ret_error, r, "%s: %s", d->info.name, d->error) : 0;
}

int cuda_open(const char *library, int device, const struct cuda_image *images, size_t n_images,
	      struct cuda_driver **ret, char **ret_error)
{
	_cleanup_(cuda_closep) struct cuda_driver *d = calloc(1, sizeof(*d));
	int number = 0, r;

	if (!d)
		return fail(ret_error, -ENOMEM, "no memory");
	if ((r = open_library(d, library, ret_error)) < 0 ||
	    (r = open_device(d, device, &number, ret_error)) < 0)
		return r;
	r = open_context(d, number);
	if (r < 0)
		return fail(ret_error, r, "%s: %s", d->info.name, d->error);
	r = load_code(d, number, images, n_images, ret_error);
	if (r < 0)
		return r;
	d->error[0] = '\0';
	*ret = TAKE_PTR(d);
	return 0;
}

struct cuda_driver *cuda_close(struct cuda_driver *d)
{
	if (!d)
		return NULL;
	if (d->context)
		d->api.cuCtxDestroy(d->context);
	free(d->modules);
	free(d);
	return NULL;
}

int cuda_attach(struct cuda_driver *d)
{
	return CALL(d, cuCtxSetCurrent, d->context);
}

const struct cuda_info *cuda_info(const struct cuda_driver *d)
{
	return &d->info;
}

const char *cuda_code_path(const struct cuda_driver *d)
{
	return d->code_path;
}

const char *cuda_error(const struct cuda_driver *d)
{
	return d->error;
}

/* ---- memory ---- */

static uint64_t address_of(const void *p)
{
	return (uint64_t)(uintptr_t)p;
}

int cuda_memory_info(struct cuda_driver *d, uint64_t *ret_free, uint64_t *ret_total)
{
	size_t available = 0, total = 0;
	int r;

	r = CALL(d, cuMemGetInfo, &available, &total);
	if (r < 0)
		return r;
	*ret_free = available;
	*ret_total = total;
	return 0;
}

int cuda_alloc(struct cuda_driver *d, size_t bytes, void **ret)
{
	uint64_t address = 0;
	int r;

	r = CALL(d, cuMemAlloc, &address, bytes);
	if (r == 0)
		*ret = (void *)(uintptr_t)address;
	return r;
}

void cuda_free(struct cuda_driver *d, void *p)
{
	if (p)
		d->api.cuMemFree(address_of(p));
}

int cuda_host_alloc(struct cuda_driver *d, size_t bytes, void **ret)
{
	void *p = NULL;
	int r;

	r = CALL(d, cuMemHostAlloc, &p, bytes, 0);
	if (r == 0)
		*ret = p;
	return r;
}

void cuda_host_free(struct cuda_driver *d, void *p)
{
	if (p)
		d->api.cuMemFreeHost(p);
}

/* Our streams do not wait for the NULL stream: what goes there for a caller who wants it complete is waited for at once. */
static int complete(struct cuda_driver *d, int r, struct cuda_stream *stream)
{
	return r < 0 || stream ? r : CALL(d, cuStreamSynchronize, NULL);
}

int cuda_upload(struct cuda_driver *d, void *dst, const void *src, size_t bytes,
		struct cuda_stream *stream)
{
	return complete(d, CALL(d, cuMemcpyHtoDAsync, address_of(dst), src, bytes, stream), stream);
}

int cuda_download(struct cuda_driver *d, void *dst, const void *src, size_t bytes,
		  struct cuda_stream *stream)
{
	return complete(d, CALL(d, cuMemcpyDtoHAsync, dst, address_of(src), bytes, stream), stream);
}

int cuda_copy(struct cuda_driver *d, void *dst, const void *src, size_t bytes, struct cuda_stream *stream)
{
	return complete(d, CALL(d, cuMemcpyDtoDAsync, address_of(dst), address_of(src), bytes, stream),
			stream);
}

int cuda_fill(struct cuda_driver *d, void *dst, uint8_t value, size_t bytes, struct cuda_stream *stream)
{
	return complete(d, CALL(d, cuMemsetD8Async, address_of(dst), value, bytes, stream), stream);
}

/* ---- streams and events ---- */

int cuda_stream_new(struct cuda_driver *d, struct cuda_stream **ret)
{
	return CALL(d, cuStreamCreate, ret, CUDA_STREAM_NON_BLOCKING);
}

void cuda_stream_free(struct cuda_driver *d, struct cuda_stream *stream)
{
	if (stream)
		d->api.cuStreamDestroy(stream);
}

int cuda_stream_wait(struct cuda_driver *d, struct cuda_stream *stream, struct cuda_event *event)
{
	return CALL(d, cuStreamWaitEvent, stream, event, 0);
}

int cuda_stream_synchronize(struct cuda_driver *d, struct cuda_stream *stream)
{
	return CALL(d, cuStreamSynchronize, stream);
}

int cuda_event_new(struct cuda_driver *d, bool timed, struct cuda_event **ret)
{
	return CALL(d, cuEventCreate, ret,
		    CUDA_EVENT_BLOCKING_SYNC | (timed ? 0 : CUDA_EVENT_DISABLE_TIMING));
}

void cuda_event_free(struct cuda_driver *d, struct cuda_event *event)
{
	if (event)
		d->api.cuEventDestroy(event);
}

int cuda_event_record(struct cuda_driver *d, struct cuda_event *event, struct cuda_stream *stream)
{
	return CALL(d, cuEventRecord, event, stream);
}

int cuda_event_query(struct cuda_driver *d, struct cuda_event *event)
{
	int result = d->api.cuEventQuery(event);

	/* Not an error, and asked often: no text. */
	return result == CUDA_NOT_READY ? -EAGAIN : check(d, "cuEventQuery", result);
}

int cuda_event_synchronize(struct cuda_driver *d, struct cuda_event *event)
{
	return CALL(d, cuEventSynchronize, event);
}

int cuda_event_elapsed(struct cuda_driver *d, struct cuda_event *start, struct cuda_event *end,
		       uint64_t *ret_us)
{
	float ms = 0;
	int r;

	r = CALL(d, cuEventElapsedTime, &ms, start, end);
	if (r == 0)
		*ret_us = ms > 0 ? (uint64_t)((double)ms * 1000) : 0;
	return r;
}

/* ---- kernels ---- */

int cuda_function(struct cuda_driver *d, const char *name, struct cuda_function **ret)
{
	struct cuda_function *f;
	int r = -ENOENT;

	for (size_t i = 0; i < d->n_modules && r == -ENOENT; i++)
		r = CALL(d, cuModuleGetFunction, &f, d->modules[i], name);
	if (r == -ENOENT)
		snprintf(d->error, sizeof(d->error), "no kernel %s", name);
	if (r == 0) {
		d->error[0] = '\0';
		*ret = f;
	}
	return r;
}

int cuda_launch(struct cuda_driver *d, struct cuda_function *function, struct cuda_grid grid,
		struct cuda_stream *stream, const void *args, size_t args_bytes)
{
	/* The driver takes no pointer to const, and only reads. */
	void *extra[] = { CUDA_PARAM_BUFFER, (void *)(uintptr_t)args, CUDA_PARAM_BYTES, &args_bytes,
			  CUDA_PARAM_END };

	return CALL(d, cuLaunchKernel, function, grid.x, grid.y ? grid.y : 1, grid.z ? grid.z : 1,
		    grid.threads ? grid.threads : CUDA_THREADS, 1, 1, grid.shared_bytes, stream,
		    NULL, extra);
}

/* ---- graphs ---- */

bool cuda_has_graphs(const struct cuda_driver *d)
{
	return d->has_graphs;
}

static int no_graphs(struct cuda_driver *d)
{
	snprintf(d->error, sizeof(d->error), "this driver has no graphs");
	return -ENOSYS;
}

int cuda_graph_begin(struct cuda_driver *d, struct cuda_stream *stream)
{
	if (!d->has_graphs)
		return no_graphs(d);
	return CALL(d, cuStreamBeginCapture, stream, CUDA_CAPTURE_THREAD_LOCAL);
}

int cuda_graph_end(struct cuda_driver *d, struct cuda_stream *stream, struct cuda_graph_exec **ret)
{
	struct cuda_graph *graph = NULL;
	struct cuda_graph_exec *exec = NULL;
	int r;

	if (!d->has_graphs)
		return no_graphs(d);
	r = CALL(d, cuStreamEndCapture, stream, &graph);
	if (r < 0)
		return r;
	r = CALL(d, cuGraphInstantiate, &exec, graph, 0);
	d->api.cuGraphDestroy(graph);
	if (r == 0)
		*ret = exec;
	return r;
}

int cuda_graph_launch(struct cuda_driver *d, struct cuda_graph_exec *graph, struct cuda_stream *stream)
{
	return d->has_graphs ? CALL(d, cuGraphLaunch, graph, stream) : no_graphs(d);
}

void cuda_graph_free(struct cuda_driver *d, struct cuda_graph_exec *graph)
{
	if (graph)
		d->api.cuGraphExecDestroy(graph);
}
