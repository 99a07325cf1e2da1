/* SPDX-License-Identifier: MIT */
/*
 * emu.c: the entry points of a CUDA driver library without a card: what kernels/cuda/driver.c calls, and no more.
 *
 * Owns contexts and memory; queue.c does the work. Any thread may call, as with the real library. Refuses to be faster than right:
 * one lock, lists that are walked. Device memory is the host's, an allocation each, so that AddressSanitizer sees a kernel that
 * leaves it; a copy that does is refused here. Numbers (names, limits, results) are those of the real library.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emu/queue.h"

#define EXPORT __attribute__((visibility("default")))

#define PROTOTYPE(name, symbol, arguments) EXPORT int symbol arguments;
CUDA_FUNCTIONS(PROTOTYPE)
CUDA_GRAPH_FUNCTIONS(PROTOTYPE)

EXPORT extern const char residentd_emulator[];
const char residentd_emulator[] = "residentd emulator";

/* New device memory is full of 0xff as far as that is cheap: nobody may count on zeros. */
#define FILL_MAX            ((size_t)16 << 20)
/* What the card hands out is a multiple of this. */
#define GRAIN               ((size_t)512)
#define CAPTURE_INVALIDATED 901 /* only what ends a capture says so */

struct allocation {
	struct object object;
	char *p;
	size_t bytes;
	bool host;
};

struct cuda_graph_exec {
	struct object object;
	struct op_list ops;
};

/* Between these two, the linker puts every KERNEL. */
extern const struct emu_kernel __start_emu_kernels[], __stop_emu_kernels[];

static _Thread_local struct cuda_context *current;
static unsigned n_contexts;
static size_t used_bytes;
static bool initialized;

/* ---- contexts and what they own ---- */

/* Every call that needs a context begins here and ends in end(). */
static int begin(enum emu_event what)
{
	pthread_mutex_lock(&emu_lock);
	if (!current)
		return CUDA_INVALID_CONTEXT;
	if (inject_fails(EMU_CALL))
		context_lose(current);
	if (current->lost)
		return CUDA_LAUNCH_FAILED;
	if (what == EMU_CALL || !inject_fails(what))
		return CUDA_SUCCESS;
	switch (what) {
	case EMU_ALLOC:
	case EMU_HOST: return CUDA_OUT_OF_MEMORY;
	case EMU_IMAGE: return CUDA_NO_BINARY_FOR_GPU;
	default: return CUDA_OPERATING_SYSTEM;
	}
}

static int end(int result)
{
	pthread_mutex_unlock(&emu_lock);
	return result;
}

/* After a wait: did the device get lost meanwhile? */
static int end_wait(void)
{
	return end(current->lost ? CUDA_LAUNCH_FAILED : CUDA_SUCCESS);
}

static void own(struct object *object, void (*free_object)(struct object *))
{
	object->free = free_object;
	object->next = current->objects;
	current->objects = object;
}

/* Gives an object back, if it is one of this context. */
static int disown(struct object *object)
{
	for (struct object **p = &current->objects; *p; p = &(*p)->next)
		if (*p == object) {
			*p = object->next;
			object->free(object);
			return CUDA_SUCCESS;
		}
	return CUDA_INVALID_HANDLE;
}

static size_t granted(size_t bytes)
{
	return (bytes + GRAIN - 1) / GRAIN * GRAIN;
}

static void free_memory(struct object *object)
{
	struct allocation *a = (struct allocation *)object;

	if (!a->host)
		used_bytes -= granted(a->bytes);
	free(a->p);
	free(a);
}

static void free_graph(struct cuda_graph *graph)
{
	if (graph)
		op_list_clear(&graph->ops);
	free(graph);
}

static void free_stream(struct object *object)
{
	struct cuda_stream *s = (struct cuda_stream *)object;

	stream_remove(s);
	free_graph(s->capture);
	free(s);
}

static void free_event(struct object *object)
{
	event_unref((struct cuda_event *)object);
}

static void free_exec(struct object *object)
{
	struct cuda_graph_exec *exec = (struct cuda_graph_exec *)object;

	op_list_clear(&exec->ops);
	free(exec);
}

static struct cuda_stream *stream_of(struct cuda_stream *stream)
{
	return stream ? stream : &current->null_stream;
}

int cuInit(unsigned flags)
{
	pthread_mutex_lock(&emu_lock);
	inject_read();
	initialized = true;
	return end(flags ? CUDA_INVALID_VALUE : CUDA_SUCCESS);
}

int cuCtxCreate_v2(struct cuda_context **context, unsigned flags, int device)
{
	struct cuda_context *c;
	int r;

	(void)flags;
	pthread_mutex_lock(&emu_lock);
	if (!initialized)
		return end(CUDA_NOT_INITIALIZED);
	if (device != 0)
		return end(CUDA_INVALID_DEVICE);
	if (inject_fails(EMU_OPEN))
		return end(CUDA_DEVICE_UNAVAILABLE);
	c = calloc(1, sizeof(*c));
	if (!c)
		return end(CUDA_OUT_OF_MEMORY);
	r = n_contexts ? CUDA_SUCCESS : queue_start();
	if (r != CUDA_SUCCESS) {
		free(c);
		return end(r);
	}
	n_contexts++;
	stream_add(&c->null_stream, c);
	current = *context = c;
	return end(CUDA_SUCCESS);
}

int cuCtxDestroy_v2(struct cuda_context *context)
{
	struct cuda_context *before = current;

	pthread_mutex_lock(&emu_lock);
	current = context;
	context_lose(context);
	stream_remove(&context->null_stream);
	context_wait_idle(context);
	while (context->objects)
		disown(context->objects);
	free(context);
	current = before == context ? NULL : before;
	if (--n_contexts == 0)
		queue_stop();
	return end(CUDA_SUCCESS);
}

int cuCtxSetCurrent(struct cuda_context *context)
{
	current = context;
	return CUDA_SUCCESS;
}

/* ---- the device ---- */

int cuDriverGetVersion(int *version)
{
	*version = 12020;
	return CUDA_SUCCESS;
}

int cuDeviceGetCount(int *count)
{
	*count = 1;
	return CUDA_SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
	*device = ordinal;
	return ordinal == 0 ? CUDA_SUCCESS : CUDA_INVALID_DEVICE;
}

int cuDeviceGetName(char *name, int len, int device)
{
	(void)device;
	snprintf(name, (size_t)len, "%s", residentd_emulator);
	return CUDA_SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	(void)device;
	switch (attribute) {
	case CUDA_ATTRIBUTE_CAPABILITY_MAJOR: *value = 7; return CUDA_SUCCESS;
	case CUDA_ATTRIBUTE_CAPABILITY_MINOR: *value = 5; return CUDA_SUCCESS;
	case CUDA_ATTRIBUTE_MULTIPROCESSORS: *value = 1; return CUDA_SUCCESS;
	case CUDA_ATTRIBUTE_PCI_BUS:
	case CUDA_ATTRIBUTE_PCI_DEVICE:
	case CUDA_ATTRIBUTE_PCI_DOMAIN: *value = 0; return CUDA_SUCCESS;
	}
	return CUDA_INVALID_VALUE;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	(void)device;
	pthread_mutex_lock(&emu_lock);
	*bytes = inject_memory();
	return end(CUDA_SUCCESS);
}

static const struct {
	int result;
	const char *name, *text;
} results[] = {
	{ CUDA_SUCCESS, "CUDA_SUCCESS", "no error" },
	{ CUDA_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
	{ CUDA_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
	{ CUDA_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
	{ CUDA_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "device is busy or unavailable" },
	{ CUDA_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal" },
	{ CUDA_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "no context in this thread" },
	{ CUDA_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for this device" },
	{ CUDA_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "injected failure" },
	{ CUDA_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle" },
	{ CUDA_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found" },
	{ CUDA_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready" },
	{ CUDA_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "the device is lost" },
	{ CUDA_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
	  "not permitted while a stream is capturing" },
	{ CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
	  "something failed while the stream was capturing" },
};

int cuGetErrorName(int error, const char **name)
{
	for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++)
		if (results[i].result == error) {
			*name = results[i].name;
			return CUDA_SUCCESS;
		}
	return CUDA_INVALID_VALUE;
}

int cuGetErrorString(int error, const char **text)
{
	for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++)
		if (results[i].result == error) {
			*text = results[i].text;
			return CUDA_SUCCESS;
		}
	return CUDA_INVALID_VALUE;
}

/* ---- memory ---- */

/* The allocation that holds all of [p, p + bytes), or NULL. */
static struct allocation *find_memory(const void *p, size_t bytes, bool host)
{
	uintptr_t at = (uintptr_t)p;

	for (struct object *o = current->objects; o; o = o->next) {
		struct allocation *a = (struct allocation *)o;

		if (o->free == free_memory && a->host == host && at >= (uintptr_t)a->p &&
		    at - (uintptr_t)a->p <= a->bytes && bytes <= a->bytes - (at - (uintptr_t)a->p))
			return a;
	}
	return NULL;
}

static size_t free_bytes(void)
{
	size_t taken = used_bytes + inject_others(), limit = inject_memory();

	return taken < limit ? limit - taken : 0;
}

/* Whole words, and no more, for AddressSanitizer's sake: a kernel may read the word that holds its data's last byte. */
static int allocate(size_t bytes, bool host, void **ret)
{
	size_t words = (bytes + 3) / 4 * 4;
	struct allocation *a;

	if (current->n_capturing)
		return CUDA_CAPTURE_UNSUPPORTED;
	if (bytes == 0)
		return CUDA_INVALID_VALUE;
	if (bytes > SIZE_MAX - GRAIN || (!host && granted(bytes) > free_bytes()))
		return CUDA_OUT_OF_MEMORY;
	a = calloc(1, sizeof(*a));
	if (!a || posix_memalign((void **)&a->p, host ? 4096 : 256, words) != 0) {
		free(a);
		return CUDA_OUT_OF_MEMORY;
	}
	a->bytes = bytes;
	a->host = host;
	if (!host)
		used_bytes += granted(bytes);
	if (words <= FILL_MAX)
		memset(a->p, 0xff, words);
	own(&a->object, free_memory);
	*ret = a->p;
	return CUDA_SUCCESS;
}

/* As the real one in effect: what runs may still use it. */
static int release(const void *p, bool host)
{
	struct allocation *a = find_memory(p, 0, host);

	if (current->n_capturing)
		return CUDA_CAPTURE_UNSUPPORTED;
	if (!a || a->p != p)
		return CUDA_INVALID_VALUE;
	context_wait_idle(current);
	return disown(&a->object);
}

int cuMemGetInfo_v2(size_t *available, size_t *total)
{
	int r = begin(EMU_CALL);

	if (r == CUDA_SUCCESS) {
		*available = free_bytes();
		*total = inject_memory();
	}
	return end(r);
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
	int r = begin(EMU_ALLOC);
	void *p = NULL;

	if (r == CUDA_SUCCESS)
		r = allocate(bytes, false, &p);
	if (r == CUDA_SUCCESS)
		*address = (uintptr_t)p;
	return end(r);
}

int cuMemFree_v2(uint64_t address)
{
	int r = begin(EMU_CALL);

	return end(r == CUDA_SUCCESS ? release((const void *)(uintptr_t)address, false) : r);
}

int cuMemHostAlloc(void **p, size_t bytes, unsigned flags)
{
	int r = begin(EMU_HOST);

	(void)flags;
	return end(r == CUDA_SUCCESS ? allocate(bytes, true, p) : r);
}

int cuMemFreeHost(void *p)
{
	int r = begin(EMU_CALL);

	return end(r == CUDA_SUCCESS ? release(p, true) : r);
}

/* ---- copies ---- */

static int submit_copy(struct cuda_stream *stream, void *dst, const void *src, size_t bytes,
		       size_t snapshot)
{
	struct op *op = op_new(OP_COPY, src, snapshot);

	if (!op)
		return CUDA_OUT_OF_MEMORY;
	op->dst = dst;
	op->src = snapshot ? NULL : src;
	op->bytes = bytes;
	stream_submit(stream, op);
	return CUDA_SUCCESS;
}

/* Memory that is not page-locked is read before the call returns, unless it is captured. */
int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t bytes, struct cuda_stream *stream)
{
	int r = begin(EMU_COPY);
	bool now;

	if (r != CUDA_SUCCESS || !bytes)
		return end(r);
	stream = stream_of(stream);
	if (!find_memory((void *)(uintptr_t)dst, bytes, false))
		return end(CUDA_INVALID_VALUE);
	now = !stream->capture && !find_memory(src, bytes, true);
	return end(submit_copy(stream, (void *)(uintptr_t)dst, src, bytes, now ? bytes : 0));
}

/* And written before it returns. */
int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t bytes, struct cuda_stream *stream)
{
	int r = begin(EMU_COPY);

	if (r != CUDA_SUCCESS || !bytes)
		return end(r);
	stream = stream_of(stream);
	if (!find_memory((void *)(uintptr_t)src, bytes, false))
		return end(CUDA_INVALID_VALUE);
	r = submit_copy(stream, dst, (void *)(uintptr_t)src, bytes, 0);
	if (r != CUDA_SUCCESS || stream->capture || find_memory(dst, bytes, true))
		return end(r);
	stream_wait_idle(stream);
	return end_wait();
}

int cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t bytes, struct cuda_stream *stream)
{
	int r = begin(EMU_COPY);
	uint64_t apart = dst > src ? dst - src : src - dst;

	if (r != CUDA_SUCCESS || !bytes)
		return end(r);
	if (!find_memory((void *)(uintptr_t)dst, bytes, false) ||
	    !find_memory((void *)(uintptr_t)src, bytes, false) || apart < bytes)
		return end(CUDA_INVALID_VALUE);
	return end(submit_copy(stream_of(stream), (void *)(uintptr_t)dst, (void *)(uintptr_t)src,
			       bytes, 0));
}

int cuMemsetD8Async(uint64_t dst, unsigned char value, size_t bytes, struct cuda_stream *stream)
{
	int r = begin(EMU_CALL);
	struct op *op;

	if (r != CUDA_SUCCESS || !bytes)
		return end(r);
	if (!find_memory((void *)(uintptr_t)dst, bytes, false))
		return end(CUDA_INVALID_VALUE);
	op = op_new(OP_FILL, NULL, 0);
	if (!op)
		return end(CUDA_OUT_OF_MEMORY);
	op->dst = (void *)(uintptr_t)dst;
	op->bytes = bytes;
	op->value = value;
	stream_submit(stream_of(stream), op);
	return end(CUDA_SUCCESS);
}

/* ---- streams ---- */

int cuStreamCreate(struct cuda_stream **stream, unsigned flags)
{
	int r = begin(EMU_CALL);
	struct cuda_stream *s;

	(void)flags;
	if (r != CUDA_SUCCESS)
		return end(r);
	s = calloc(1, sizeof(*s));
	if (!s)
		return end(CUDA_OUT_OF_MEMORY);
	stream_add(s, current);
	own(&s->object, free_stream);
	*stream = s;
	return end(CUDA_SUCCESS);
}

/* What was submitted is still run. */
int cuStreamDestroy_v2(struct cuda_stream *stream)
{
	int r = begin(EMU_CALL);

	if (r != CUDA_SUCCESS)
		return end(r);
	stream_wait_idle(stream);
	return end(disown(&stream->object));
}

/* What a capture cannot take makes it useless, and the call fails. */
static int refuse_capture(struct cuda_stream *stream)
{
	if (!stream->capture)
		return CUDA_SUCCESS;
	stream->capture->invalid = true;
	return CUDA_CAPTURE_UNSUPPORTED;
}

int cuStreamSynchronize(struct cuda_stream *stream)
{
	int r = begin(EMU_CALL);

	if (r == CUDA_SUCCESS)
		r = refuse_capture(stream_of(stream));
	if (r != CUDA_SUCCESS)
		return end(r);
	stream_wait_idle(stream_of(stream));
	return end_wait();
}

/* ---- events ---- */

static int submit_event(enum op_kind kind, struct cuda_stream *stream, struct cuda_event *event)
{
	struct op *op;
	int r;

	r = refuse_capture(stream);
	if (r != CUDA_SUCCESS)
		return r;
	op = op_new(kind, NULL, 0);
	if (!op)
		return CUDA_OUT_OF_MEMORY;
	event->refs++;
	event->recorded += kind == OP_RECORD;
	op->event = event;
	op->serial = event->recorded;
	stream_submit(stream, op);
	return CUDA_SUCCESS;
}

int cuStreamWaitEvent(struct cuda_stream *stream, struct cuda_event *event, unsigned flags)
{
	int r = begin(EMU_CALL);

	(void)flags;
	return end(r == CUDA_SUCCESS ? submit_event(OP_WAIT, stream_of(stream), event) : r);
}

int cuEventCreate(struct cuda_event **event, unsigned flags)
{
	int r = begin(EMU_CALL);
	struct cuda_event *e;

	if (r != CUDA_SUCCESS)
		return end(r);
	e = calloc(1, sizeof(*e));
	if (!e)
		return end(CUDA_OUT_OF_MEMORY);
	e->refs = 1;
	e->timed = !(flags & CUDA_EVENT_DISABLE_TIMING);
	own(&e->object, free_event);
	*event = e;
	return end(CUDA_SUCCESS);
}

int cuEventDestroy_v2(struct cuda_event *event)
{
	int r = begin(EMU_CALL);

	return end(r == CUDA_SUCCESS ? disown(&event->object) : r);
}

int cuEventRecord(struct cuda_event *event, struct cuda_stream *stream)
{
	int r = begin(EMU_CALL);

	return end(r == CUDA_SUCCESS ? submit_event(OP_RECORD, stream_of(stream), event) : r);
}

int cuEventQuery(struct cuda_event *event)
{
	int r = begin(EMU_CALL);

	if (r == CUDA_SUCCESS && event->happened < event->recorded)
		r = CUDA_NOT_READY;
	return end(r);
}

int cuEventSynchronize(struct cuda_event *event)
{
	int r = begin(EMU_CALL);

	if (r != CUDA_SUCCESS)
		return end(r);
	event_wait(event, current);
	return end_wait();
}

int cuEventElapsedTime(float *ms, struct cuda_event *start, struct cuda_event *last)
{
	int r = begin(EMU_CALL);

	if (r != CUDA_SUCCESS)
		return end(r);
	if (!start->timed || !last->timed || !start->recorded || !last->recorded)
		return end(CUDA_INVALID_HANDLE);
	if (start->happened < start->recorded || last->happened < last->recorded)
		return end(CUDA_NOT_READY);
	*ms = (float)((double)last->time_us - (double)start->time_us) / 1000.0f;
	return end(CUDA_SUCCESS);
}

/* ---- kernels: a module is the whole library ---- */

int cuModuleLoadDataEx(struct cuda_module **module, const void *image, unsigned n_options,
		       int *options, void **values)
{
	int r = begin(EMU_IMAGE);

	(void)image, (void)n_options, (void)options, (void)values;
	if (r == CUDA_SUCCESS)
		*module = (struct cuda_module *)(uintptr_t)__start_emu_kernels;
	return end(r);
}

int cuModuleGetFunction(struct cuda_function **function, struct cuda_module *module, const char *name)
{
	int r = begin(EMU_CALL);

	(void)module;
	if (r != CUDA_SUCCESS)
		return end(r);
	for (const struct emu_kernel *k = __start_emu_kernels; k < __stop_emu_kernels; k++)
		if (strcmp(k->name, name) == 0) {
			*function = (struct cuda_function *)(uintptr_t)k;
			return end(CUDA_SUCCESS);
		}
	return end(CUDA_NOT_FOUND);
}

/* The pairs of cuLaunchKernel()'s last argument. */
static bool parse_extra(void **extra, const void **ret_args, size_t *ret_bytes)
{
	*ret_args = NULL;
	for (; extra && extra[0] != CUDA_PARAM_END; extra += 2) {
		if (extra[0] == CUDA_PARAM_BUFFER)
			*ret_args = extra[1];
		else if (extra[0] == CUDA_PARAM_BYTES)
			*ret_bytes = *(const size_t *)extra[1];
		else
			return false;
	}
	return *ret_args;
}

static bool launch_ok(struct emu_index grid, struct emu_index threads, unsigned shared_bytes)
{
	return grid.x && grid.y && grid.z && threads.x && threads.y && threads.z &&
	       grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535 &&
	       (uint64_t)threads.x * threads.y * threads.z <= 1024 && shared_bytes <= 48u << 10;
}

int cuLaunchKernel(struct cuda_function *function, unsigned grid_x, unsigned grid_y,
		   unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
		   unsigned shared_bytes, struct cuda_stream *stream, void **params, void **extra)
{
	const struct emu_kernel *kernel = (const struct emu_kernel *)(uintptr_t)function;
	struct emu_index grid = { grid_x, grid_y, grid_z }, threads = { block_x, block_y, block_z };
	int r = begin(EMU_LAUNCH);
	size_t bytes = 0;
	const void *args;
	struct op *op;

	if (r != CUDA_SUCCESS)
		return end(r);
	if (params || !parse_extra(extra, &args, &bytes) || bytes != kernel->args_bytes ||
	    !launch_ok(grid, threads, shared_bytes))
		return end(CUDA_INVALID_VALUE);
	op = op_new(OP_LAUNCH, args, bytes);
	if (!op)
		return end(CUDA_OUT_OF_MEMORY);
	op->kernel = kernel;
	op->grid = grid;
	op->threads = threads;
	op->shared_bytes = shared_bytes;
	stream_submit(stream_of(stream), op);
	return end(CUDA_SUCCESS);
}

/* ---- graphs: the work of one stream, in its order ---- */

int cuStreamBeginCapture_v2(struct cuda_stream *stream, int mode)
{
	int r = begin(EMU_CALL);

	(void)mode;
	if (r != CUDA_SUCCESS)
		return end(r);
	if (!stream || stream->capture)
		return end(CUDA_CAPTURE_UNSUPPORTED);
	stream->capture = calloc(1, sizeof(*stream->capture));
	if (!stream->capture)
		return end(CUDA_OUT_OF_MEMORY);
	op_list_init(&stream->capture->ops);
	current->n_capturing++;
	return end(CUDA_SUCCESS);
}

int cuStreamEndCapture(struct cuda_stream *stream, struct cuda_graph **graph)
{
	int r = begin(EMU_CALL);
	struct cuda_graph *g;

	if (r != CUDA_SUCCESS)
		return end(r);
	g = stream->capture;
	if (!g)
		return end(CUDA_INVALID_VALUE);
	stream->capture = NULL;
	current->n_capturing--;
	if (g->invalid) {
		free_graph(g);
		return end(CAPTURE_INVALIDATED);
	}
	*graph = g;
	return end(CUDA_SUCCESS);
}

int cuGraphInstantiateWithFlags(struct cuda_graph_exec **exec, struct cuda_graph *graph, uint64_t flags)
{
	int r = begin(EMU_CALL);
	struct cuda_graph_exec *e;

	(void)flags;
	if (r != CUDA_SUCCESS)
		return end(r);
	e = calloc(1, sizeof(*e));
	if (!e || op_list_copy(&graph->ops, &e->ops) != CUDA_SUCCESS) {
		free(e);
		return end(CUDA_OUT_OF_MEMORY);
	}
	own(&e->object, free_exec);
	*exec = e;
	return end(CUDA_SUCCESS);
}

/* Nobody else owns it: given back whatever became of the device. */
int cuGraphDestroy(struct cuda_graph *graph)
{
	pthread_mutex_lock(&emu_lock);
	free_graph(graph);
	return end(CUDA_SUCCESS);
}

int cuGraphLaunch(struct cuda_graph_exec *exec, struct cuda_stream *stream)
{
	int r = begin(EMU_LAUNCH);
	struct op_list ops;

	if (r == CUDA_SUCCESS)
		r = refuse_capture(stream_of(stream));
	if (r == CUDA_SUCCESS)
		r = op_list_copy(&exec->ops, &ops);
	if (r != CUDA_SUCCESS)
		return end(r);
	for (struct op *op = ops.first, *next; op; op = next) {
		next = op->next;
		stream_submit(stream_of(stream), op);
	}
	return end(CUDA_SUCCESS);
}

int cuGraphExecDestroy(struct cuda_graph_exec *exec)
{
	int r = begin(EMU_CALL);

	return end(r == CUDA_SUCCESS ? disown(&exec->object) : r);
}
