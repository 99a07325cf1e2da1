/* SPDX-License-Identifier: MIT */
/*
 * libcuda.h: the part of the CUDA driver's binary interface that is used here, so that nothing of the toolkit is needed to build.
 *
 * Declarations only: driver.c makes its table of functions from the two lists, the emulator (tests/emu) its entry points. Refuses to
 * know what is done with them. Invariant: name, arguments and numbers are those of libcuda.so.1; handles are pointers to what
 * nobody looks into, device memory is a 64-bit number.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct cuda_context;
struct cuda_module;
struct cuda_function;
struct cuda_stream;
struct cuda_event;
struct cuda_graph;      /* as captured */
struct cuda_graph_exec; /* as launched */

/* X(name, symbol, arguments): every one returns an enum cuda_result as int. */
/* clang-format off */
#define CUDA_FUNCTIONS(X) \
	X(cuInit, cuInit, (unsigned flags)) \
	X(cuDriverGetVersion, cuDriverGetVersion, (int *version)) \
	X(cuGetErrorName, cuGetErrorName, (int error, const char **name)) \
	X(cuGetErrorString, cuGetErrorString, (int error, const char **text)) \
	X(cuDeviceGetCount, cuDeviceGetCount, (int *count)) \
	X(cuDeviceGet, cuDeviceGet, (int *device, int ordinal)) \
	X(cuDeviceGetName, cuDeviceGetName, (char *name, int len, int device)) \
	X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *value, int attribute, int device)) \
	X(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t *bytes, int device)) \
	X(cuCtxCreate, cuCtxCreate_v2, (struct cuda_context **context, unsigned flags, int device)) \
	X(cuCtxDestroy, cuCtxDestroy_v2, (struct cuda_context *context)) \
	X(cuCtxSetCurrent, cuCtxSetCurrent, (struct cuda_context *context)) \
	X(cuModuleLoadDataEx, cuModuleLoadDataEx, \
	  (struct cuda_module **module, const void *image, unsigned n_options, int *options, void **values)) \
	X(cuModuleGetFunction, cuModuleGetFunction, \
	  (struct cuda_function **function, struct cuda_module *module, const char *name)) \
	X(cuLaunchKernel, cuLaunchKernel, \
	  (struct cuda_function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, \
	   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, \
	   struct cuda_stream *stream, void **params, void **extra)) \
	X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *available, size_t *total)) \
	X(cuMemAlloc, cuMemAlloc_v2, (uint64_t *address, size_t bytes)) \
	X(cuMemFree, cuMemFree_v2, (uint64_t address)) \
	X(cuMemHostAlloc, cuMemHostAlloc, (void **p, size_t bytes, unsigned flags)) \
	X(cuMemFreeHost, cuMemFreeHost, (void *p)) \
	X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, \
	  (uint64_t dst, const void *src, size_t bytes, struct cuda_stream *stream)) \
	X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, \
	  (void *dst, uint64_t src, size_t bytes, struct cuda_stream *stream)) \
	X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, \
	  (uint64_t dst, uint64_t src, size_t bytes, struct cuda_stream *stream)) \
	X(cuMemsetD8Async, cuMemsetD8Async, \
	  (uint64_t dst, unsigned char value, size_t bytes, struct cuda_stream *stream)) \
	X(cuStreamCreate, cuStreamCreate, (struct cuda_stream **stream, unsigned flags)) \
	X(cuStreamDestroy, cuStreamDestroy_v2, (struct cuda_stream *stream)) \
	X(cuStreamSynchronize, cuStreamSynchronize, (struct cuda_stream *stream)) \
	X(cuStreamWaitEvent, cuStreamWaitEvent, \
	  (struct cuda_stream *stream, struct cuda_event *event, unsigned flags)) \
	X(cuEventCreate, cuEventCreate, (struct cuda_event **event, unsigned flags)) \
	X(cuEventDestroy, cuEventDestroy_v2, (struct cuda_event *event)) \
	X(cuEventRecord, cuEventRecord, (struct cuda_event *event, struct cuda_stream *stream)) \
	X(cuEventQuery, cuEventQuery, (struct cuda_event *event)) \
	X(cuEventSynchronize, cuEventSynchronize, (struct cuda_event *event)) \
	X(cuEventElapsedTime, cuEventElapsedTime, \
	  (float *ms, struct cuda_event *start, struct cuda_event *end))

/* All there, or none is used. */
#define CUDA_GRAPH_FUNCTIONS(X) \
	X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (struct cuda_stream *stream, int mode)) \
	X(cuStreamEndCapture, cuStreamEndCapture, \
	  (struct cuda_stream *stream, struct cuda_graph **graph)) \
	X(cuGraphInstantiate, cuGraphInstantiateWithFlags, \
	  (struct cuda_graph_exec **exec, struct cuda_graph *graph, uint64_t flags)) \
	X(cuGraphDestroy, cuGraphDestroy, (struct cuda_graph *graph)) \
	X(cuGraphLaunch, cuGraphLaunch, (struct cuda_graph_exec *exec, struct cuda_stream *stream)) \
	X(cuGraphExecDestroy, cuGraphExecDestroy, (struct cuda_graph_exec *exec))
/* clang-format on */

/* Only the emulator has this symbol. */
#define CUDA_EMULATOR_SYMBOL "residentd_emulator"

enum cuda_result {
	CUDA_SUCCESS = 0,
	CUDA_INVALID_VALUE = 1,
	CUDA_OUT_OF_MEMORY = 2,
	CUDA_NOT_INITIALIZED = 3,
	CUDA_STUB_LIBRARY = 34,
	CUDA_NEWER_DRIVER_NEEDED = 36,
	CUDA_DEVICE_UNAVAILABLE = 46,
	CUDA_NO_DEVICE = 100,
	CUDA_INVALID_DEVICE = 101,
	CUDA_DEVICE_NOT_LICENSED = 102,
	CUDA_INVALID_IMAGE = 200,
	CUDA_INVALID_CONTEXT = 201,
	CUDA_NO_BINARY_FOR_GPU = 209,
	CUDA_ECC_UNCORRECTABLE = 214,
	CUDA_INVALID_PTX = 218,
	CUDA_NVLINK_UNCORRECTABLE = 220,
	CUDA_JIT_COMPILER_NOT_FOUND = 221,
	CUDA_UNSUPPORTED_PTX_VERSION = 222,
	CUDA_JIT_COMPILATION_DISABLED = 223,
	CUDA_CONTAINED = 226,
	CUDA_INVALID_SOURCE = 300,
	CUDA_OPERATING_SYSTEM = 304,
	CUDA_INVALID_HANDLE = 400,
	CUDA_NOT_FOUND = 500,
	CUDA_NOT_READY = 600,
	CUDA_ILLEGAL_ADDRESS = 700,
	CUDA_LAUNCH_TIMEOUT = 702,
	CUDA_CONTEXT_IS_DESTROYED = 709,
	CUDA_ASSERT = 710,
	CUDA_HARDWARE_STACK = 714,
	CUDA_ILLEGAL_INSTRUCTION = 715,
	CUDA_MISALIGNED_ADDRESS = 716,
	CUDA_INVALID_ADDRESS_SPACE = 717,
	CUDA_INVALID_PC = 718,
	CUDA_LAUNCH_FAILED = 719,
	CUDA_NOT_SUPPORTED = 801,
	CUDA_SYSTEM_NOT_READY = 802,
	CUDA_DRIVER_MISMATCH = 803,
	CUDA_CAPTURE_UNSUPPORTED = 900,
	CUDA_EXTERNAL_DEVICE = 911,
	CUDA_UNKNOWN = 999,
};

enum {
	CUDA_CONTEXT_BLOCKING_SYNC = 0x04,
	CUDA_STREAM_NON_BLOCKING = 0x01,
	CUDA_EVENT_BLOCKING_SYNC = 0x01,
	CUDA_EVENT_DISABLE_TIMING = 0x02,
	CUDA_CAPTURE_THREAD_LOCAL = 1,
	CUDA_JIT_ERROR_LOG = 5,
	CUDA_JIT_ERROR_LOG_BYTES = 6,
	CUDA_ATTRIBUTE_MULTIPROCESSORS = 16,
	CUDA_ATTRIBUTE_PCI_BUS = 33,
	CUDA_ATTRIBUTE_PCI_DEVICE = 34,
	CUDA_ATTRIBUTE_PCI_DOMAIN = 50,
	CUDA_ATTRIBUTE_CAPABILITY_MAJOR = 75,
	CUDA_ATTRIBUTE_CAPABILITY_MINOR = 76,
};

/* Of cuLaunchKernel()'s last argument: pairs, then CUDA_PARAM_END. */
#define CUDA_PARAM_END    ((void *)0)
#define CUDA_PARAM_BUFFER ((void *)1)
#define CUDA_PARAM_BYTES  ((void *)2)
