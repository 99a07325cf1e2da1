/* SPDX-License-Identifier: MIT */
/*
 * queue.c: streams and the thread that works them off. queue.h has the contract.
 *
 * The lock is given up only while a piece of work runs and while somebody waits. Invariant: work whose stream is not busy lies in its
 * stream's list; an event that is waited for was recorded before the wait was submitted, so something can always run.
 */
#include "tests/emu/queue.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

pthread_mutex_t emu_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_cond_t changed;
static struct cuda_stream *streams;
static pthread_t worker;
static bool stopping;

static uint64_t now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ---- work ---- */

struct op *op_new(enum op_kind kind, const void *payload, size_t bytes)
{
	struct op *op = malloc(sizeof(*op) + bytes);

	if (!op)
		return NULL;
	*op = (struct op){ .kind = kind, .payload_bytes = bytes };
	if (bytes)
		memcpy(op->payload, payload, bytes);
	return op;
}

struct op *op_free(struct op *op)
{
	if (op && op->event)
		event_unref(op->event);
	free(op);
	return NULL;
}

void op_list_init(struct op_list *list)
{
	list->first = NULL;
	list->end = &list->first;
}

static void op_list_append(struct op_list *list, struct op *op)
{
	op->next = NULL;
	*list->end = op;
	list->end = &op->next;
}

static struct op *op_list_take(struct op_list *list)
{
	struct op *op = list->first;

	list->first = op->next;
	if (!list->first)
		list->end = &list->first;
	return op;
}

void op_list_clear(struct op_list *list)
{
	while (list->first)
		op_free(op_list_take(list));
}

int op_list_copy(const struct op_list *from, struct op_list *to)
{
	op_list_init(to);
	for (const struct op *op = from->first; op; op = op->next) {
		struct op *copy = malloc(sizeof(*copy) + op->payload_bytes);

		if (!copy) {
			op_list_clear(to);
			return CUDA_OUT_OF_MEMORY;
		}
		memcpy(copy, op, sizeof(*copy) + op->payload_bytes);
		op_list_append(to, copy);
	}
	return CUDA_SUCCESS;
}

static void op_run(const struct op *op)
{
	switch (op->kind) {
	case OP_COPY: memcpy(op->dst, op->src ? op->src : op->payload, op->bytes); break;
	case OP_FILL: memset(op->dst, op->value, op->bytes); break;
	case OP_LAUNCH:
		emu_run_grid(op->kernel, op->grid, op->threads, op->shared_bytes, op->payload);
		break;
	case OP_RECORD:
	case OP_WAIT: break;
	}
}

static uint64_t op_due_us(const struct op *op)
{
	switch (op->kind) {
	case OP_COPY: return now_us() + inject_delay_us(EMU_COPY);
	case OP_FILL: return now_us() + inject_delay_us(EMU_FILL);
	case OP_LAUNCH: return now_us() + inject_delay_us(EMU_LAUNCH);
	case OP_RECORD:
	case OP_WAIT: break;
	}
	return now_us() + inject_delay_us(EMU_OTHER);
}

/* ---- streams and events ---- */

static void wait_for_change(void)
{
	pthread_cond_wait(&changed, &emu_lock);
}

void stream_add(struct cuda_stream *s, struct cuda_context *context)
{
	s->next = streams;
	s->context = context;
	op_list_init(&s->ops);
	streams = s;
}

void stream_remove(struct cuda_stream *s)
{
	struct cuda_stream **p = &streams;

	op_list_clear(&s->ops);
	while (s->busy)
		wait_for_change();
	while (*p != s)
		p = &(*p)->next;
	*p = s->next;
}

void stream_submit(struct cuda_stream *s, struct op *op)
{
	if (s->capture) {
		op_list_append(&s->capture->ops, op);
		return;
	}
	if (!s->ops.first && !s->busy)
		s->due_us = op_due_us(op);
	op_list_append(&s->ops, op);
	pthread_cond_broadcast(&changed);
}

void stream_wait_idle(struct cuda_stream *s)
{
	while (s->ops.first || s->busy)
		wait_for_change();
}

void context_wait_idle(struct cuda_context *context)
{
	struct cuda_stream *s = streams;

	while (s) {
		if (s->context == context && (s->ops.first || s->busy)) {
			wait_for_change();
			s = streams;
		} else {
			s = s->next;
		}
	}
}

void context_lose(struct cuda_context *context)
{
	context->lost = true;
	for (struct cuda_stream *s = streams; s; s = s->next)
		if (s->context == context)
			op_list_clear(&s->ops);
	pthread_cond_broadcast(&changed);
}

void event_unref(struct cuda_event *event)
{
	if (--event->refs == 0)
		free(event);
}

void event_wait(struct cuda_event *event, const struct cuda_context *context)
{
	uint64_t serial = event->recorded;

	event->refs++;
	while (event->happened < serial && !context->lost)
		wait_for_change();
	event_unref(event);
}

/* ---- the worker ---- */

static bool stream_can_run(const struct cuda_stream *s)
{
	const struct op *op = s->ops.first;

	return op && (op->kind != OP_WAIT || op->event->happened >= op->serial);
}

/* One of those that can run now, at random; or none, and when there will be one, if that is known. */
static struct cuda_stream *pick(uint64_t *ret_due_us)
{
	struct cuda_stream *picked = NULL;
	uint64_t now = now_us();
	unsigned n = 0;

	*ret_due_us = UINT64_MAX;
	for (struct cuda_stream *s = streams; s; s = s->next) {
		if (!stream_can_run(s))
			continue;
		if (s->due_us > now)
			*ret_due_us = s->due_us < *ret_due_us ? s->due_us : *ret_due_us;
		else if (inject_random(++n) == 0)
			picked = s;
	}
	return picked;
}

static void run_first(struct cuda_stream *s)
{
	struct op *op = op_list_take(&s->ops);

	s->busy = true;
	pthread_mutex_unlock(&emu_lock);
	op_run(op);
	pthread_mutex_lock(&emu_lock);
	s->busy = false;
	if (op->kind == OP_RECORD && op->serial > op->event->happened) {
		op->event->happened = op->serial;
		op->event->time_us = now_us();
	}
	op_free(op);
	if (inject_fails(EMU_STEP))
		context_lose(s->context);
	if (s->ops.first)
		s->due_us = op_due_us(s->ops.first);
	pthread_cond_broadcast(&changed);
}

static void *work(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&emu_lock);
	while (!stopping) {
		uint64_t due_us;
		struct cuda_stream *s = pick(&due_us);

		if (s) {
			run_first(s);
		} else if (due_us == UINT64_MAX) {
			wait_for_change();
		} else {
			struct timespec until = { .tv_sec = (time_t)(due_us / 1000000),
						  .tv_nsec = (long)(due_us % 1000000) * 1000 };

			pthread_cond_timedwait(&changed, &emu_lock, &until);
		}
	}
	pthread_mutex_unlock(&emu_lock);
	emu_run_done();
	return NULL;
}

int queue_start(void)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&changed, &attr);
	pthread_condattr_destroy(&attr);
	stopping = false;
	return pthread_create(&worker, NULL, work, NULL) == 0 ? CUDA_SUCCESS : CUDA_OPERATING_SYSTEM;
}

void queue_stop(void)
{
	stopping = true;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&emu_lock);
	pthread_join(worker, NULL);
	pthread_mutex_lock(&emu_lock);
	pthread_cond_destroy(&changed);
}
