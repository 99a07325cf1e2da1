/* SPDX-License-Identifier: MIT */
/*
 * fuzz-trace.c: bytes as recorded routing.
 *
 * What is accepted keeps its promises, and reads the same again when it is written; what is refused is
 * refused with an error that names the file and touches nothing.
 */
#include "daemon/residency/trace.h"

#include <assert.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int read_bytes(const void *data, size_t size, uint32_t n_experts, struct trace *ret,
		      char **ret_error)
{
	/* fmemopen() knows no empty file. */
	_cleanup_(fclosep) FILE *f = size > 0 ? fmemopen((void *)data, size, "r")
					      : fopen("/dev/null", "re");

	assert(f);
	return trace_read(f, "name", n_experts, ret, ret_error);
}

static void check(const struct trace *t)
{
	assert(t->n_steps > 0 && t->n_layers > 0 && t->n_experts > 0);
	assert(t->first[0] == 0 && t->first[t->n_steps] == t->n_wanted);
	for (size_t s = 0; s < t->n_steps; s++) {
		assert(t->first[s] <= t->first[s + 1]);
		for (size_t i = t->first[s]; i < t->first[s + 1]; i++) {
			assert(t->wanted[i] < t->n_layers * t->n_experts);
			assert(i == t->first[s] || t->wanted[i] > t->wanted[i - 1]);
		}
	}
}

static void write_trace(const struct trace *t, struct buf *b)
{
	_cleanup_(freep) uint32_t *counts = calloc(t->n_layers, sizeof(*counts));
	_cleanup_(freep) uint32_t *experts = calloc(t->n_wanted + 1, sizeof(*experts));

	assert(counts && experts);
	for (size_t s = 0; s < t->n_steps; s++) {
		memset(counts, 0, t->n_layers * sizeof(*counts));
		for (size_t i = t->first[s]; i < t->first[s + 1]; i++) {
			counts[t->wanted[i] / t->n_experts]++;
			experts[i - t->first[s]] = t->wanted[i] % t->n_experts;
		}
		assert(trace_write_step(b, s, t->n_layers, counts, experts) == 0);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	_cleanup_(buf_done) struct buf b = {};
	_cleanup_(freep) char *error = NULL;
	struct trace t = { .n_steps = 77 }, again;

	if (read_bytes(data, size, 0, &t, &error) < 0) {
		assert(t.n_steps == 77 && !t.wanted && startswith(error, "name:"));
		return 0;
	}
	assert(!error);
	check(&t);
	write_trace(&t, &b);
	assert(read_bytes(b.data, b.len, t.n_experts, &again, NULL) == 0);
	assert(again.n_steps == t.n_steps && again.n_layers == t.n_layers &&
	       again.n_wanted == t.n_wanted);
	assert(t.n_wanted == 0 || memcmp(again.wanted, t.wanted, t.n_wanted * sizeof(*t.wanted)) == 0);
	assert(memcmp(again.first, t.first, (t.n_steps + 1) * sizeof(*t.first)) == 0);
	trace_done(&again);
	trace_done(&t);
	return 0;
}
