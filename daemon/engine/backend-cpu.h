/* SPDX-License-Identifier: MIT */
/*
 * backend-cpu.h: what backend-cpu.c, attn-cpu.c, delta-cpu.c and moe-cpu.c share: the backend, its arena, and the steps of a product.
 *
 * backend-cpu.c owns the pool, the arena and everything else here but the members attn and moe, which are attn-cpu.c's and moe-cpu.c's.
 * Engine thread only. Refuses to be known outside these files. Invariant: what an operation took of the arena above `used` is gone when
 * another one begins.
 */
#pragma once

#include "daemon/engine/backend.h"
#include "daemon/engine/moe-cpu.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/pool.h"

#define CPU_LINE_BYTES ((size_t)64)

/* Memory of the backend's own that grows when an operation needs more; contents do not survive. */
struct grow {
	void *mem;
	size_t bytes;
};

/*
 * The arena, from the bottom: what the caller took (scratch()) and the route of the layer at hand,
 * then the converted input of the last products, kept because q, k and v, or the experts and the
 * shared expert, all multiply the same x; then temporaries of the running operation.
 */
struct backend_cpu {
	struct backend base;
	const struct cpu_kernels *k;
	struct cpu_tiles tiles;
	struct pool *pool;
	const struct backend_batch *batch; /* at hand */
	char *arena;
	size_t arena_bytes, used, top;
	struct {
		const float *x; /* NULL: nothing kept */
		size_t n_tok, width;
		enum quant_type type;
		const char *act;
	} kept;
	struct grow thread; /* one part a thread: what kernels call scratch */
	struct {
		struct grow pages;  /* rows and page addresses of an operation */
		struct grow angles; /* cosines and sines of the batch's rows for the three below */
		const float *freq;  /* NULL: of nothing */
		size_t n_rot;
		float mscale;
	} attn;
	struct moe_cpu moe;
};

static inline struct backend_cpu *cpu_of(struct backend *b)
{
	return (struct backend_cpu *)b;
}

static inline size_t n_pieces(size_t n, size_t piece)
{
	return n / piece + (n % piece > 0);
}

/* bytes at least, or NULL. */
void *cpu_grow(struct grow *g, size_t bytes);
/* n_floats for each thread, *ret_stride apart; NULL: no memory. Valid until the next call. */
float *cpu_thread_scratch(struct backend_cpu *c, size_t n_floats, size_t *ret_stride);
/* Above everything taken so far, until cpu_drop(); NULL: out of scratch. */
void *cpu_take(struct backend_cpu *c, size_t n, size_t size);
/* Every operation that writes where a later product may read from starts with this. */
void cpu_drop(struct backend_cpu *c);
/* fn(arg, i, thread) for every i in [0, n), on the pool when there is more than one. */
void cpu_run(struct backend_cpu *c, size_t n, void (*fn)(void *arg, size_t i, unsigned thread),
	     void *arg);

/* How many rows of `width` floats make an elementwise piece: less is not worth a second thread. */
size_t cpu_piece_rows(size_t width);

/* x in the form that weights of this type multiply; kept for the next product. NULL: out of scratch. */
const char *cpu_activations(struct backend_cpu *c, uint32_t weight_type, const float *x,
			    size_t n_tok, size_t width);
/* n rows of x to act, in that form of activations. */
void cpu_convert(struct backend_cpu *c, enum quant_type type, const float *x, size_t n,
		 size_t width, char *act);
size_t cpu_act_bytes(uint32_t weight_type, size_t width); /* of one row */
/* How many rows of w_stride bytes make a piece of a loop that reads loop_bytes of weights in all, for n_cols columns a piece. */
size_t cpu_matmul_rows(const struct backend_cpu *c, size_t w_stride, size_t loop_bytes, size_t n_cols);
