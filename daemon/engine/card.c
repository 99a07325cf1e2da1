/* SPDX-License-Identifier: MIT */
/*
 * card.c: takes a GPU up for a model. See card.h.
 *
 * Owns the context, one allocation for the trunk, one for sequences (pages first, then places for recurrent states, all of one
 * size), one for scratch, and the slots (vram.c). Invariant: what memory() hands out was filled with zeros on the computing
 * stream, so whatever is launched there later finds zeros.
 */
#include "daemon/engine/card.h"

#include "daemon/residency/vram.h"
#include "kernels/cpu/cpu.h"

#include <assert.h>
#include <inttypes.h>

/* What kernels may count on. */
#define CARD_ALIGN    UINT64_C(256)
/* Between two looks at stop. */
#define UPLOAD_BYTES  (UINT64_C(16) << 20)
/* Of what the trunk leaves: what pages and recurrent states may take beyond the least. */
#define PAGES_SHARE   8
#define STATES_SHARE  16
#define STATES_MAX    64
/* Chunks that all blocks of a model would take at least. */
#define CHUNKS        32
/* One sequence has a state and a checkpoint. */
#define STATES_OF_ONE 2
/* Of a block without asking the card for more: Turing has no more. */
#define SHARED_BYTES  (48U << 10)

struct weight {
	const struct gguf_tensor *tensor;
	uint64_t at; /* in the trunk's memory */
};

struct card {
	struct cuda_driver *driver;
	struct cuda_stream *stream;
	struct vram *vram;
	struct cuda_function *by_type[CARD_BY_TYPE][QUANT_TYPE_MAX];
	struct cuda_function *functions[CARD_FUNCTIONS];
	struct weight *weights; /* by address of the tensor */
	size_t n_weights;
	void *trunk, *scratch;
	uint64_t trunk_bytes, scratch_bytes, slots_max;
	struct {
		char *base;
		uint64_t bytes, pages_bytes, state_bytes;
		uint32_t n_states;
		bool pages_taken, state_taken[STATES_MAX];
	} sequences;
	struct kv_memory memory;
};

/* ---- opening ---- */

static const struct {
	enum quant_type type;
	const char *name;
} types[] = {
	{ QUANT_F32, "f32" },   { QUANT_F16, "f16" },   { QUANT_BF16, "bf16" },
	{ QUANT_Q4_0, "q4_0" }, { QUANT_Q8_0, "q8_0" }, { QUANT_Q4_K, "q4_k" },
	{ QUANT_Q5_K, "q5_k" }, { QUANT_Q6_K, "q6_k" }, { QUANT_MXFP4, "mxfp4" },
};

static const char *const prefixes[] = {
	[CARD_MATMUL] = "cuda_matmul",       [CARD_MATMUL_TILED] = "cuda_matmul_tiled",
	[CARD_MOE_UP] = "cuda_moe_up",       [CARD_MOE_DOWN] = "cuda_moe_down",
	[CARD_MOE_TILED] = "cuda_moe_tiled",
};

static const struct {
	enum quant_type type;
	const char *name;
} quantizers[] = {
	{ QUANT_Q8_K, "cuda_quantize_q8_k" },
	{ QUANT_Q8_0, "cuda_quantize_q8_0" },
	{ QUANT_F16, "cuda_round_f16" },
	{ QUANT_BF16, "cuda_round_bf16" },
};

static const char *const names[CARD_FUNCTIONS] = {
	[CARD_RMS_NORM] = "cuda_rms_norm",
	[CARD_ADD] = "cuda_add",
	[CARD_SILU_MUL] = "cuda_silu_mul",
	[CARD_SIGMOID_MUL] = "cuda_sigmoid_mul",
	[CARD_COPY_ROWS] = "cuda_copy_rows",
	[CARD_SCALAR_GATE] = "cuda_scalar_gate",
	[CARD_ROPE] = "cuda_rope",
	[CARD_KV_STORE] = "cuda_kv_store",
	[CARD_ATTENTION_ROWS] = "cuda_attention_rows",
	[CARD_ATTENTION_JOIN] = "cuda_attention_join",
	[CARD_CONV_SILU] = "cuda_conv_silu",
	[CARD_DELTA_GATES] = "cuda_delta_gates",
	[CARD_DELTA_RULE] = "cuda_delta_rule",
	[CARD_DELTA_CHUNK] = "cuda_delta_chunk",
	[CARD_ROUTE] = "cuda_route",
	[CARD_GATHER_ROWS] = "cuda_gather_rows",
	[CARD_MOE_SUM] = "cuda_moe_sum",
};

static int find_functions(struct card *c)
{
	char name[64];
	int r = 0;

	for (size_t i = 0; i < ARRAY_SIZE(prefixes); i++)
		for (size_t t = 0; t < ARRAY_SIZE(types) && r == 0; t++) {
			snprintf(name, sizeof(name), "%s_%s", prefixes[i], types[t].name);
			r = cuda_function(c->driver, name, &c->by_type[i][types[t].type]);
		}
	for (size_t i = 0; i < ARRAY_SIZE(quantizers) && r == 0; i++)
		r = cuda_function(c->driver, quantizers[i].name,
				  &c->by_type[CARD_QUANTIZE][quantizers[i].type]);
	for (size_t i = 0; i < ARRAY_SIZE(names) && r == 0; i++)
		r = cuda_function(c->driver, names[i], &c->functions[i]);
	return r;
}

int card_open(struct card **ret, char **ret_error)
{
	struct card *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return fail(ret_error, -ENOMEM, "no memory");
	r = cuda_open(NULL, 0, cuda_images, cuda_n_images, &c->driver, ret_error);
	if (r < 0) {
		free(c);
		return r;
	}
	r = cuda_stream_new(c->driver, &c->stream);
	if (r == 0)
		r = find_functions(c);
	if (r < 0) {
		(void)fail(ret_error, r, "%s", cuda_error(c->driver));
		card_close(c);
		return r;
	}
	*ret = c;
	return 0;
}

struct card *card_close(struct card *c)
{
	if (!c)
		return NULL;
	vram_free(c->vram);
	cuda_close(c->driver); /* and with it all its memory */
	free(c->weights);
	free(c);
	return NULL;
}

/* ---- memory of sequences ---- */

/* The arena is one, and comes page by page; the rest are states. */
static void *sequence_alloc(void *userdata, size_t bytes, bool state)
{
	struct card *c = userdata;
	char *p = NULL;

	if (state) {
		for (uint32_t i = 0;
		     bytes <= c->sequences.state_bytes && i < c->sequences.n_states && !p; i++)
			if (!c->sequences.state_taken[i]) {
				c->sequences.state_taken[i] = true;
				p = c->sequences.base + c->sequences.pages_bytes +
				    i * c->sequences.state_bytes;
			}
	} else if (!c->sequences.pages_taken && bytes <= c->sequences.pages_bytes) {
		c->sequences.pages_taken = true;
		p = c->sequences.base;
	}
	/* Of a card that is lost nothing is read any more. */
	if (p)
		(void)cuda_fill(c->driver, p, 0, bytes, c->stream);
	return p;
}

static void sequence_free(void *userdata, void *p, size_t bytes)
{
	struct card *c = userdata;
	uint64_t at = (uint64_t)((char *)p - c->sequences.base);

	(void)bytes;
	if (at < c->sequences.pages_bytes)
		c->sequences.pages_taken = false;
	else
		c->sequences.state_taken[(at - c->sequences.pages_bytes) / c->sequences.state_bytes] =
			false;
}

static void sequence_copy(void *userdata, void *to, const void *from, size_t bytes)
{
	struct card *c = userdata;

	(void)cuda_copy(c->driver, to, from, bytes, c->stream);
}

static void sequence_zero(void *userdata, void *p, size_t bytes)
{
	struct card *c = userdata;

	(void)cuda_fill(c->driver, p, 0, bytes, c->stream);
}

/* ---- loading ---- */

static int cmp_weights(const void *a, const void *b)
{
	const struct weight *x = a, *y = b;

	return (x->tensor > y->tensor) - (x->tensor < y->tensor);
}

/* Which tensors come over, and where each will lie. */
static int list_weights(struct card *c, const struct model *m)
{
	size_t n = gguf_n_tensors(m->gguf);

	c->weights = calloc(n + 1, sizeof(*c->weights));
	if (!c->weights)
		return -ENOMEM;
	for (size_t i = 0; i < n; i++) {
		const struct gguf_tensor *t = gguf_tensor_at(m->gguf, i);

		if (!catalog_in_trunk(m->catalog, t) || (t == m->embd && !m->embd_tied))
			continue;
		c->weights[c->n_weights++] = (struct weight){ t, c->trunk_bytes };
		c->trunk_bytes += ALIGN_UP(t->bytes, CARD_ALIGN);
	}
	qsort(c->weights, c->n_weights, sizeof(*c->weights), cmp_weights);
	return 0;
}

static bool has_kernels(uint32_t type)
{
	for (size_t i = 0; i < ARRAY_SIZE(types); i++)
		if (types[i].type == type)
			return true;
	return false;
}

static int check_model(const struct model *m, char **ret_error)
{
	if (m->head_dim_max > CUDA_HEAD_MAX)
		return fail(ret_error, -EOPNOTSUPP, "heads of %" PRIu32 " values, the kernels take %d",
			    m->head_dim_max, CUDA_HEAD_MAX);
	if (m->cpu_only)
		return fail(ret_error, -EOPNOTSUPP, "the model has %s, which no GPU kernel does",
			    m->cpu_only);
	for (size_t i = 0; i < gguf_n_tensors(m->gguf); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(m->gguf, i);

		/* The CPU looks up rows of the embedding; as the head too it is a matrix like others. */
		if (!has_kernels(t->type) && (t != m->embd || m->embd_tied))
			return fail(ret_error, -EOPNOTSUPP,
				    "tensor %s has type %s, which no GPU kernel does", t->name,
				    quant_info(t->type)->name);
	}
	for (uint32_t i = 0; i < m->catalog->n_expert_layers; i++) {
		const struct catalog_layer *l = &m->catalog->layers[m->catalog->expert_layers[i]];
		const struct gguf_tensor *gate = l->matrix[0], *up = l->matrix[1],
					 *down = l->matrix[2];

		if (up && up->type != gate->type)
			return fail(ret_error, -EOPNOTSUPP,
				    "%s is %s and %s is %s: the kernels take one type for both",
				    gate->name, quant_info(gate->type)->name, up->name,
				    quant_info(up->type)->name);
		if (quant_row_bytes(cpu_act_type((enum quant_type)down->type), down->ne[0]) > SHARED_BYTES)
			return fail(ret_error, -EOPNOTSUPP,
				    "experts of %" PRIu64 " rows are too wide for the kernels",
				    down->ne[0]);
	}
	return 0;
}

static uint64_t megabytes(uint64_t bytes)
{
	return bytes / 1000000 + (bytes % 1000000 > 0);
}

/* Pages and states out of what trunk and scratch leave of `budget`; the rest is for slots. */
static int divide(struct card *c, const struct model *m, const struct card_sizes *s,
		  uint64_t budget, char **ret_error)
{
	uint64_t state = ALIGN_UP(m->recurrent_floats * sizeof(float), CARD_ALIGN);
	uint64_t pages = ALIGN_UP(s->pages_least_bytes, CARD_ALIGN), rest, needed;

	needed = c->trunk_bytes + s->scratch_bytes + pages + STATES_OF_ONE * state;
	if (needed > budget)
		return fail(ret_error,
			    s->budget_bytes > 0 && needed > s->budget_bytes ? -E2BIG : -ENOSPC,
			    "needs at least %" PRIu64 " MB of its memory: %" PRIu64
			    " MB for the trunk, %" PRIu64
			    " MB for one conversation (Context= makes it smaller) and %" PRIu64
			    " MB for work; the budget is %" PRIu64
			    " MB (VramBudget= or --vram, or what is free less VramReserve=)",
			    megabytes(c->trunk_bytes) + megabytes(pages + STATES_OF_ONE * state) +
				    megabytes(s->scratch_bytes),
			    megabytes(c->trunk_bytes), megabytes(pages + STATES_OF_ONE * state),
			    megabytes(s->scratch_bytes), budget / 1000000);
	rest = budget - c->trunk_bytes - s->scratch_bytes;
	pages = MAX(pages, MIN(s->pages_bytes, rest / PAGES_SHARE) / CARD_ALIGN * CARD_ALIGN);
	c->sequences.pages_bytes = pages;
	c->sequences.state_bytes = state;
	if (state > 0) {
		uint64_t n = CLAMP(rest / STATES_SHARE / state, (uint64_t)STATES_OF_ONE,
				   (uint64_t)STATES_MAX);

		c->sequences.n_states = (uint32_t)MIN(n, (rest - pages) / state);
	}
	c->sequences.bytes = pages + c->sequences.n_states * state;
	c->slots_max = rest - c->sequences.bytes;
	return 0;
}

static int allocate(struct card *c, const struct card_sizes *s)
{
	void *base;
	int r = cuda_alloc(c->driver, MAX(c->trunk_bytes, UINT64_C(1)), &c->trunk);

	if (r == 0)
		r = cuda_alloc(c->driver, s->scratch_bytes, &c->scratch);
	c->scratch_bytes = s->scratch_bytes;
	if (r == 0)
		r = cuda_alloc(c->driver, c->sequences.bytes, &base);
	if (r == 0)
		c->sequences.base = base;
	return r;
}

static int upload(struct card *c, const atomic_bool *stop)
{
	int r = 0;

	for (size_t i = 0; i < c->n_weights; i++) {
		const struct weight *w = &c->weights[i];

		for (uint64_t at = 0; at < w->tensor->bytes && r == 0; at += UPLOAD_BYTES) {
			if (stop && atomic_load_explicit(stop, memory_order_relaxed))
				return -ECANCELED;
			r = cuda_upload(c->driver, (char *)c->trunk + w->at + at,
					(const char *)w->tensor->data + at,
					MIN(w->tensor->bytes - at, UPLOAD_BYTES), NULL);
		}
	}
	return r;
}

/* Of a small model too there are pieces that can be given back. */
static uint64_t chunk_bytes(const struct catalog *c)
{
	return MIN(MAX(c->block_bytes / CHUNKS, c->block_bytes_max), VRAM_CHUNK_BYTES);
}

int card_load(struct card *c, const struct model *m, const struct card_sizes *sizes,
	      const atomic_bool *stop, char **ret_error)
{
	uint64_t free_bytes = 0, budget;
	int r = check_model(m, ret_error);

	if (r < 0)
		return r;
	r = card_free_bytes(c, &free_bytes);
	if (r < 0)
		return fail(ret_error, r, "%s", cuda_error(c->driver));
	budget = free_bytes - MIN(free_bytes, sizes->reserve_bytes);
	if (sizes->budget_bytes > 0)
		budget = MIN(budget, sizes->budget_bytes);
	r = list_weights(c, m);
	if (r < 0)
		return fail(ret_error, r, "no memory");
	r = divide(c, m, sizes, budget, ret_error);
	if (r < 0)
		return r;
	r = allocate(c, sizes);
	if (r == 0)
		r = upload(c, stop);
	if (r == 0 && m->catalog->n_blocks > 0)
		r = vram_new(c->driver, c->stream, m->catalog, chunk_bytes(m->catalog), 0, &c->vram);
	if (r < 0)
		return fail(ret_error, r, "%s", r == -ECANCELED ? "stopped" : cuda_error(c->driver));
	c->memory = (struct kv_memory){
		.userdata = c,
		.alloc = sequence_alloc,
		.free = sequence_free,
		.copy = sequence_copy,
		.zero = sequence_zero,
	};
	return 0;
}

/* ---- what is where ---- */

const struct cuda_info *card_info(const struct card *c)
{
	return cuda_info(c->driver);
}

const char *card_code(const struct card *c)
{
	return cuda_code_path(c->driver);
}

struct cuda_driver *card_driver(const struct card *c)
{
	return c->driver;
}

struct cuda_stream *card_stream(const struct card *c)
{
	return c->stream;
}

struct vram *card_vram(const struct card *c)
{
	return c->vram;
}

struct cuda_function *card_kernel(const struct card *c, enum card_kernel k, uint32_t type)
{
	return c->by_type[k][type];
}

struct cuda_function *card_function(const struct card *c, enum card_function f)
{
	return c->functions[f];
}

const void *card_weight(const struct card *c, const struct gguf_tensor *w)
{
	const struct weight key = { .tensor = w };
	const struct weight *found =
		bsearch(&key, c->weights, c->n_weights, sizeof(*c->weights), cmp_weights);

	assert(found);
	return (const char *)c->trunk + found->at;
}

const struct kv_memory *card_memory(const struct card *c)
{
	return &c->memory;
}

void *card_scratch(const struct card *c, uint64_t *ret_bytes)
{
	*ret_bytes = c->scratch_bytes;
	return c->scratch;
}

uint64_t card_trunk_bytes(const struct card *c)
{
	return c->trunk_bytes;
}

uint64_t card_fixed_bytes(const struct card *c)
{
	return c->trunk_bytes + c->scratch_bytes + c->sequences.bytes;
}

uint64_t card_pages_bytes(const struct card *c)
{
	return c->sequences.pages_bytes;
}

uint64_t card_kv_bytes(const struct card *c)
{
	return c->sequences.bytes;
}

uint32_t card_max_runs(const struct card *c)
{
	return c->sequences.state_bytes > 0 ? c->sequences.n_states / STATES_OF_ONE : UINT32_MAX;
}

uint64_t card_slots_max(const struct card *c)
{
	return c->slots_max;
}

int card_free_bytes(const struct card *c, uint64_t *ret)
{
	uint64_t total;

	return cuda_memory_info(c->driver, ret, &total);
}
