/* SPDX-License-Identifier: MIT */
/*
 * queue.h: the emulated card at work: streams, events, and one thread that runs what was submitted.
 *
 * Owns the emulator's lock: functions say whether they want it held. In a stream things happen in order; between streams in any
 * order that the events allow, chosen at random. Refuses to know allocations: addresses were checked before.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/libcuda.h"
#include "tests/emu/block.h"
#include "tests/emu/inject.h"

enum op_kind { OP_COPY, OP_FILL, OP_LAUNCH, OP_RECORD, OP_WAIT };

/* One piece of work. */
struct op {
	struct op *next;
	enum op_kind kind;
	void *dst;       /* copy, fill */
	const void *src; /* copy; NULL: the payload */
	size_t bytes;
	unsigned char value;
	const struct emu_kernel *kernel;
	struct emu_index grid, threads;
	size_t shared_bytes;
	struct cuda_event *event; /* record, wait: a reference */
	uint64_t serial;          /* the recording that is meant */
	size_t payload_bytes;
	_Alignas(16) unsigned char payload[]; /* arguments, or the source of a copy as it was */
};

struct op_list {
	struct op *first, **end;
};

struct cuda_graph {
	struct op_list ops;
	bool invalid; /* something was not allowed while it was captured */
};

/* What a context owns and takes with it; emu.c keeps the lists. First member of its kinds. */
struct object {
	struct object *next;
	void (*free)(struct object *object);
};

struct cuda_stream {
	struct object object;
	struct cuda_stream *next; /* of all streams */
	struct cuda_context *context;
	struct op_list ops;
	bool busy;
	uint64_t due_us;            /* the first is not run before */
	struct cuda_graph *capture; /* where work goes instead */
};

struct cuda_event {
	struct object object;
	unsigned refs; /* its owner's, and of work that names it */
	bool timed;
	uint64_t recorded, happened; /* number of the last recording: submitted, run */
	uint64_t time_us;
};

struct cuda_context {
	struct object *objects;
	bool lost;
	unsigned n_capturing;
	struct cuda_stream null_stream;
};

extern pthread_mutex_t emu_lock;

/* Everything below: with the lock held. */
struct op *op_new(enum op_kind kind, const void *payload, size_t bytes);
struct op *op_free(struct op *op);
void op_list_init(struct op_list *list);
void op_list_clear(struct op_list *list);
int op_list_copy(const struct op_list *from, struct op_list *to); /* 0, or 2: no memory */

void stream_add(struct cuda_stream *s, struct cuda_context *context);
/* Drops what waits, waits for what runs. */
void stream_remove(struct cuda_stream *s);
/* Takes op: to run, or into the graph that is being captured. */
void stream_submit(struct cuda_stream *s, struct op *op);
void stream_wait_idle(struct cuda_stream *s);
void context_wait_idle(struct cuda_context *context);
/* Nothing of it runs any more; who waits, returns. */
void context_lose(struct cuda_context *context);

void event_unref(struct cuda_event *event);
void event_wait(struct cuda_event *event, const struct cuda_context *context);

/* The worker: while there is a context. */
int queue_start(void);
void queue_stop(void);
