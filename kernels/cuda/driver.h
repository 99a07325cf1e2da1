/* SPDX-License-Identifier: MIT */
/*
 * driver.h: a GPU, through the CUDA driver library loaded at run time: memory, copies, streams, events, kernels by name.
 *
 * struct cuda_driver owns the context and with it all that was made in it; one thread at a time, the one that opened it or
 * called cuda_attach(). Refuses to know what is computed, and logs nothing. Every call returns 0 or -errno:
 *	-ENOMEM		the card's memory is used up: as before, everything else goes on
 *	-ENODEV		the device is lost or not there: nothing of this context is usable; cuda_close(), and cuda_open() later
 *	-EAGAIN		not ready yet (cuda_event_query() only)
 *	-ENOSYS		the driver, or this build, has no such thing
 *	-ELIBACC	there is no driver on this machine (cuda_open() only)
 *	-EINVAL, -ENOENT, -ENOEXEC, -EIO	a wrong argument; an unknown kernel; code that the driver does not take; all else
 * and cuda_error() then says which function failed and what the driver calls it. Invariant: nothing here spins; what waits,
 * sleeps.
 */
#pragma once

#include "daemon/base.h"
#include "kernels/cuda/libcuda.h"

struct cuda_driver;

/* The kernels of one .cu file. */
struct cuda_image {
	const void *fatbin; /* machine code for the architectures that the build knew */
	const char *ptx; /* for all others, and for drivers that do not take this toolkit's machine code */
};

/* All of them, embedded by the build; none when it had no nvcc: then the emulator alone can run. */
extern const struct cuda_image cuda_images[];
extern const size_t cuda_n_images;

struct cuda_info {
	char name[96];
	int driver; /* 1000 * major + 10 * minor of the CUDA version that the driver offers */
	unsigned capability; /* 75 is 7.5 */
	unsigned n_multiprocessors;
	uint64_t total_bytes;
	char pci[16]; /* "0000:01:00.0" */
	bool emulator;
};

/* library: NULL: $RESIDENTD_CUDA_LIBRARY, else libcuda.so.1. */
int cuda_open(const char *library, int device, const struct cuda_image *images, size_t n_images,
	      struct cuda_driver **ret, char **ret_error);
/* The context goes, and every allocation, stream, event, function and graph in it. */
struct cuda_driver *cuda_close(struct cuda_driver *d);
DEFINE_CLEANUP(struct cuda_driver *, cuda_close)
/* The calling thread works with d from now on. */
int cuda_attach(struct cuda_driver *d);

const struct cuda_info *cuda_info(const struct cuda_driver *d);
/* What the kernels come from: "binary", "ptx"; "emulator" (with ", ptx" where it was made to refuse binaries). */
const char *cuda_code_path(const struct cuda_driver *d);
/* "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)": of the last call that failed; "" when none did. Valid until the next call. */
const char *cuda_error(const struct cuda_driver *d);

/* Device memory is aligned to 256 bytes. Freeing waits for what runs. */
int cuda_memory_info(struct cuda_driver *d, uint64_t *ret_free, uint64_t *ret_total);
int cuda_alloc(struct cuda_driver *d, size_t bytes, void **ret);
void cuda_free(struct cuda_driver *d, void *p);
/* Page-locked memory of the host: copies from and to it go on while the caller does. */
int cuda_host_alloc(struct cuda_driver *d, size_t bytes, void **ret);
void cuda_host_free(struct cuda_driver *d, void *p);

/* In the order of their stream; stream NULL: complete on return. */
int cuda_upload(struct cuda_driver *d, void *dst, const void *src, size_t bytes,
		struct cuda_stream *stream);
int cuda_download(struct cuda_driver *d, void *dst, const void *src, size_t bytes,
		  struct cuda_stream *stream);
int cuda_copy(struct cuda_driver *d, void *dst, const void *src, size_t bytes,
	      struct cuda_stream *stream);
int cuda_fill(struct cuda_driver *d, void *dst, uint8_t value, size_t bytes, struct cuda_stream *stream);

/* Streams are independent of each other and of NULL: only events order them. */
int cuda_stream_new(struct cuda_driver *d, struct cuda_stream **ret);
void cuda_stream_free(struct cuda_driver *d, struct cuda_stream *stream);
int cuda_stream_wait(struct cuda_driver *d, struct cuda_stream *stream, struct cuda_event *event);
int cuda_stream_synchronize(struct cuda_driver *d, struct cuda_stream *stream);

/* An event that was never recorded has happened. */
int cuda_event_new(struct cuda_driver *d, bool timed, struct cuda_event **ret);
void cuda_event_free(struct cuda_driver *d, struct cuda_event *event);
int cuda_event_record(struct cuda_driver *d, struct cuda_event *event, struct cuda_stream *stream);
int cuda_event_query(struct cuda_driver *d, struct cuda_event *event); /* 0: it has happened; -EAGAIN: not yet */
int cuda_event_synchronize(struct cuda_driver *d, struct cuda_event *event);
/* Between two timed events that have happened. */
int cuda_event_elapsed(struct cuda_driver *d, struct cuda_event *start, struct cuda_event *end,
		       uint64_t *ret_us);

/* Owned by d. */
int cuda_function(struct cuda_driver *d, const char *name, struct cuda_function **ret);

struct cuda_grid {
	unsigned x, y, z;      /* blocks; 0 in y or z means 1 */
	unsigned threads;      /* of each; 0: CUDA_THREADS */
	unsigned shared_bytes; /* dynamic */
};
/* args: the kernel's one struct, copied before the call returns. */
int cuda_launch(struct cuda_driver *d, struct cuda_function *function, struct cuda_grid grid,
		struct cuda_stream *stream, const void *args, size_t args_bytes);

/* What is submitted to a stream between begin and end is not run but kept, arguments and all. One stream; the calls that are allowed
 * in between are launches, copies and fills. After a failure in between, end fails too and must be called. */
bool cuda_has_graphs(const struct cuda_driver *d);
int cuda_graph_begin(struct cuda_driver *d, struct cuda_stream *stream);
int cuda_graph_end(struct cuda_driver *d, struct cuda_stream *stream, struct cuda_graph_exec **ret);
int cuda_graph_launch(struct cuda_driver *d, struct cuda_graph_exec *graph, struct cuda_stream *stream);
void cuda_graph_free(struct cuda_driver *d, struct cuda_graph_exec *graph);
