/* SPDX-License-Identifier: MIT */
/*
 * plan.h: what a model would do on a machine, from sizes, prices and routing alone: which bytes lie where, how often they are found
 * there, tokens per second. For `residentctl plan`; residentctl.1 has the model in words and formulas.
 *
 * Pure, any thread: nothing is run, read or measured. Residency comes from replaying routing through evict.c, time from adding up bytes and
 * prices. Refuses to know where a price is from. Invariants: a block is in one tier at most, tiers stay within their bytes; the same input
 * gives the same plan.
 */
#pragma once

#include "daemon/residency/catalog.h"
#include "daemon/residency/evict.h"
#include "daemon/residency/trace.h"

/* What is assumed of the engine and of every machine. Layers' microseconds are estimates: nobody has measured them. */
#define PLAN_HOST_POLICY   EVICT_LFU
#define PLAN_VRAM_POLICY   EVICT_CLOCK_LFU
/* Products of quantised weights, of the memory's streaming rate: 0.81 to 0.86 were measured on a processor. */
#define PLAN_EFFICIENCY    0.8
#define PLAN_CHUNK_TOK     512                   /* of a prompt, that read each block once */
#define PLAN_VRAM_RESERVE  ((uint64_t)512 << 20) /* VramReserve= by default */
#define PLAN_VRAM_DRIVER   ((uint64_t)300 << 20) /* its context and code */
#define PLAN_STAGING       ((uint64_t)32 << 20)  /* pinned memory to copy through */
#define PLAN_CPU_LAYER_US  30.0                  /* barriers and small operations */
#define PLAN_GPU_LAYER_US  100.0                 /* 25 launches */
/* Nothing more moves into VRAM while the bus has this much to do. */
#define PLAN_BUS_BEHIND_US 2000.0
#define PLAN_GPU_SPLIT_US  30.0 /* more, where CPU and GPU share a layer: there and back */

struct plan_layer { /* with experts */
	uint32_t n_expert;
	uint64_t block_bytes;
};

struct plan_shape {
	struct plan_layer *layers;
	uint32_t n_layers; /* with experts */
	uint32_t n_all_layers;
	uint32_t n_used; /* experts of a layer, by a token */
	uint32_t n_expert_max;
	uint64_t block_bytes, block_bytes_max; /* of all; of the largest */
	uint64_t trunk_bytes;                  /* but the table */
	uint64_t trunk_token_bytes;            /* of it and the table, read by a token */
	uint64_t table_bytes; /* embeddings of which a token takes a row: always in RAM */
	uint64_t scratch_bytes;
	bool kv_known;
	uint64_t kv_token_bytes, recurrent_bytes; /* of one conversation, in F16 and F32 */
	uint32_t context_trained;                 /* 0: not said */
	double token_flops;                       /* twice the weights that a token meets */
};

/* From a file's tensors and the keys that all families have. -EINVAL: no experts, or not said how many a token uses; -EBADMSG: numbers
 * beyond belief; -ENOMEM. */
int plan_shape_of_catalog(const struct catalog *c, struct plan_shape *ret, char **ret_error);
/* A model that is not at hand, by name; -ENOENT, -ENOMEM. The names, for texts: plan_shape_list(). */
int plan_shape_builtin(const char *name, struct plan_shape *ret);
const char *plan_shape_list(void);
void plan_shape_done(struct plan_shape *s);

struct plan_machine {
	uint64_t vram_bytes;                          /* of the card; 0: there is none */
	uint64_t ram_bytes;                           /* for the model, all of it */
	double vram_bps, pcie_bps, mem_bps, disk_bps; /* bytes/s, all above 0 */
	double flops; /* of a prompt's products, on the side that computes them; 0: plan_default_flops() */
	uint32_t context;
};

double plan_default_flops(bool gpu);

struct plan {
	bool gpu;           /* the card has room for the experts of a layer */
	bool trunk_in_vram; /* with keys, values and scratch; else all that is in RAM */
	uint64_t conversation_bytes;
	uint64_t vram_block_bytes, ram_block_bytes,
		disk_block_bytes;              /* blocks in each tier, once they are full */
	uint64_t ram_fixed_bytes, floor_bytes; /* RAM: before blocks; with the fewest blocks */
	uint64_t context_max; /* most that fits without the trunk moving; UINT64_MAX: any */
	/* Of the wanted blocks, once warm. */
	double vram_hits, ram_hits, misses;
	double moved_token_bytes, copied_token_bytes,
		disk_token_bytes; /* into VRAM to stay; for one use; from the disk */
	/* A token, in microseconds: what it takes, and what it waits for; token_us is the sum. */
	double trunk_us, layers_us, experts_us, disk_wait_us, bus_wait_us, token_us;
	double context_us;                       /* more, at the end of a full conversation */
	double cold_prefill_us, warm_prefill_us; /* a chunk of PLAN_CHUNK_TOK tokens */
	size_t n_steps;                          /* counted */
};

/* What the experts of a layer take, of which so many lie there. Of p only where the trunk is and whether there is a card; bus_us: until the
 * bus is free. *ret_copied: of those in RAM, to be copied and computed on the card. */
double plan_layer_us(const struct plan_machine *m, const struct plan *p, uint64_t block_bytes,
		     uint32_t n_vram, uint32_t n_ram, uint32_t n_disk, double bus_us,
		     uint32_t *ret_copied);
/* The routing's layers are used in turn when the model has more. -ENOSPC: cannot run, with the numbers in *ret_error; -EINVAL: the routing
 * is not of such a model; -ENOMEM. */
int plan_predict(const struct plan_shape *s, const struct plan_machine *m, const struct trace *t,
		 struct plan *ret, char **ret_error);

/*
 * Routing that nobody recorded, for a model of which there is no recording: always the same for the same shape. Three parts: what was
 * just used is used again; a skewed popularity; now and then two experts change places in it. Fitted to a recorded one, see plan-trace.c.
 * -E2BIG: too many blocks a token; -ENOMEM.
 */
int plan_make_trace(const struct plan_shape *s, size_t n_steps, struct trace *ret, char **ret_error);
#define PLAN_TRACE_STEPS 1200
