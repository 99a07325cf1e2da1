/* SPDX-License-Identifier: MIT */
/*
 * backend-cuda.c: the operations of backend.h on a card.
 *
 * Owns the division of the card's scratch and the page-locked memory through which batches go over; the card itself is card.c's. Engine
 * thread only. Everything is launched on one stream and nothing is waited for but a layer's choice of experts (moe-cuda.c) and the end
 * of the batch. Refuses to know arithmetic: that is kernels/cuda. Invariants: page-locked memory is written by the host only after what
 * read it has ended, because each batch ends with a wait; after the first failed call of the driver every operation says -ENODEV.
 * A step of one row with all blocks on the card is recorded once and then launched as a whole, from the same memory each time.
 */
#include "daemon/engine/backend-cuda.h"

#include "daemon/engine/graph.h"
#include "daemon/residency/residency.h"
#include "daemon/residency/vram.h"

#include <assert.h>
#include <math.h>

#define ALIGN_CARD    ((size_t)256)
#define GRID_MAX      65535U
/* Positions of one part of a long sequence, and parts at most: few rows alone leave most of a card idle. */
#define SPLIT_TOK     256U
#define SPLITS_MAX    32U
#define SPLIT_ROWS    CUDA_COLS
/* Others' use of the card is looked at so often at least while something is computed. */
#define LOOK_US       500000U
/* Page numbers of one batch beyond those of one full sequence. */
#define SPARE_PAGES   1024U
/* Beside graph_scratch_bytes(): roundings, parts of attention. */
#define SCRATCH_SPARE ((size_t)8 << 20)

int backend_cuda_check(struct backend_cuda *c, int r)
{
	if (r >= 0)
		return r;
	if (c->error == 0) {
		c->error = r;
		snprintf(c->error_text, sizeof(c->error_text), "%s", cuda_error(c->driver));
	}
	return -ENODEV;
}

const char *backend_cuda_error(const struct backend *b)
{
	return ((const struct backend_cuda *)b)->error_text;
}

static size_t ceil_div(size_t n, size_t d)
{
	return n / d + (n % d > 0);
}

int backend_cuda_launch(struct backend_cuda *c, struct cuda_function *f, size_t x, size_t y, size_t z,
			unsigned threads, unsigned shared_bytes, const void *args, size_t args_bytes)
{
	const struct cuda_grid grid = { .x = (unsigned)x,
					.y = (unsigned)y,
					.z = (unsigned)z,
					.threads = threads,
					.shared_bytes = shared_bytes };

	if (c->error < 0)
		return -ENODEV;
	if (x == 0 || y == 0)
		return 0;
	return backend_cuda_check(c, cuda_launch(c->driver, f, grid, c->stream, args, args_bytes));
}

/* ---- scratch ---- */

void *backend_cuda_take(struct backend_cuda *c, size_t n, size_t size)
{
	size_t bytes;
	void *p = c->arena + c->top;

	if (!mul_ok(n, size, &bytes) || bytes > SIZE_MAX - ALIGN_CARD)
		return NULL;
	bytes = ALIGN_UP(bytes, ALIGN_CARD);
	if (bytes > c->arena_bytes - c->top)
		return NULL;
	c->top += bytes;
	return p;
}

void backend_cuda_drop_kept(struct backend_cuda *c)
{
	c->kept.x = NULL;
	c->top = c->used;
}

static float *cuda_scratch(struct backend *b, size_t n_floats)
{
	struct backend_cuda *c = cuda_of(b);
	float *p;

	backend_cuda_drop_kept(c);
	p = backend_cuda_take(c, n_floats, sizeof(float));
	c->used = c->top;
	return p;
}

static const struct kv_memory *cuda_memory(struct backend *b)
{
	return card_memory(cuda_of(b)->card);
}

/* ---- a batch ---- */

/* Spans, then the rows' spans, positions, and pages: a batch of one row has all but the last at the same place each time. */
static int fill_info(struct backend_cuda *c, const struct backend_batch *batch, size_t *ret_bytes)
{
	size_t n = batch->n_rows,
	       at_spans = ALIGN_UP(batch->n_spans * sizeof(struct cuda_span), ALIGN_CARD);
	size_t at_pages = at_spans + ALIGN_UP(2 * n * sizeof(uint32_t), ALIGN_CARD), n_pages = 0;
	struct cuda_span *spans = c->info.host;
	uint32_t *span_of_row = (uint32_t *)((char *)c->info.host + at_spans);
	uint32_t *positions = span_of_row + n, *pages = (uint32_t *)((char *)c->info.host + at_pages);
	const uint32_t *card_pages = (const uint32_t *)((char *)c->info.card + at_pages);
	size_t room = at_pages < c->info.bytes ? (c->info.bytes - at_pages) / sizeof(uint32_t) : 0;

	c->max_kv = 0;
	for (size_t s = 0; s < batch->n_spans; s++) {
		const struct backend_span *span = &batch->spans[s];
		size_t end = span->pos + span->n_tok, used = ceil_div(end, KV_PAGE_TOK);

		if (c->model->kv.n_layer == 0)
			used = 0;
		if (used > room - n_pages || room == 0)
			return -ENOMEM;
		assert(used <= span->kv->n_pages);
		spans[s] = (struct cuda_span){ .row = (uint32_t)span->row,
					       .n_tok = (uint32_t)span->n_tok,
					       .pos = (uint32_t)span->pos,
					       .n_pages = (uint32_t)used,
					       .pages = card_pages + n_pages,
					       .recurrent = span->recurrent };
		if (used > 0)
			memcpy(pages + n_pages, span->kv->pages, used * sizeof(*pages));
		n_pages += used;
		for (size_t t = 0; t < span->n_tok; t++) {
			span_of_row[span->row + t] = (uint32_t)s;
			positions[span->row + t] = (uint32_t)(span->pos + t);
		}
		c->max_kv = MAX(c->max_kv, end);
	}
	c->spans = c->info.card;
	c->span_of_row = (const uint32_t *)((char *)c->info.card + at_spans);
	c->positions = c->span_of_row + n;
	*ret_bytes = at_pages + n_pages * sizeof(uint32_t);
	return 0;
}

static void look(struct backend_cuda *c)
{
	uint64_t now = now_us(), free_bytes;
	int r;

	if (!c->residency || now - c->looked_us < LOOK_US || !card_vram(c->card))
		return;
	c->looked_us = now;
	r = backend_cuda_check(c, card_free_bytes(c->card, &free_bytes));
	if (r == 0 && residency_look_at_card(c->residency, free_bytes) < 0 && c->error == 0) {
		c->error = -ENODEV;
		snprintf(c->error_text, sizeof(c->error_text), "%s", cuda_error(c->driver));
	}
}

int backend_cuda_look(struct backend *b)
{
	cuda_of(b)->looked_us = 0;
	look(cuda_of(b));
	return cuda_of(b)->error < 0 ? -ENODEV : 0;
}

static unsigned splits(const struct backend_cuda *c, size_t n_rows)
{
	unsigned n = 1;

	while (n_rows <= SPLIT_ROWS && n < SPLITS_MAX && (size_t)n * SPLIT_TOK < c->max_kv)
		n *= 2;
	return n;
}

static bool may_be_recorded(const struct backend_cuda *c, const struct backend_batch *batch)
{
	return c->n_batches > 0 && batch->n_rows == 1 && batch->n_out == 1 && !c->graph.off &&
	       cuda_has_graphs(c->driver) && c->residency && residency_on_card(c->residency);
}

/* Of the pages; NULL: the model has none. */
static const void *pages_base(const struct backend_cuda *c, const struct backend_batch *batch)
{
	return c->model->kv.n_layer > 0 ? kv_k(batch->arena, 0, 0, 0) : NULL;
}

static void forget_graph(struct backend_cuda *c)
{
	if (c->graph.exec)
		cuda_graph_free(c->driver, c->graph.exec);
	c->graph.exec = NULL;
}

static void fill_rows(struct backend_cuda *c, const struct gguf_tensor *w)
{
	const struct backend_batch *batch = c->batch;
	size_t width = w->ne[0], bytes = quant_row_bytes(w->type, width);

	for (size_t i = 0; i < batch->n_rows; i++) {
		assert(batch->ids[i] >= 0 && (uint64_t)batch->ids[i] < w->ne[1]);
		c->cpu_kernels->dequant[w->type]((const char *)w->data + (size_t)batch->ids[i] * bytes,
						 c->rows + i * width, width);
	}
}

static int cuda_begin(struct backend *b, const struct backend_batch *batch)
{
	struct backend_cuda *c = cuda_of(b);
	size_t bytes = 0;
	bool recorded;
	int r;

	c->batch = batch;
	c->moe = NULL;
	c->graph.recording = c->graph.replaying = false;
	if (c->error < 0)
		return -ENODEV;
	if (batch->n_rows > c->batch_tok)
		return -ENOMEM;
	look(c);
	r = fill_info(c, batch, &bytes);
	if (r < 0)
		return r;
	recorded = may_be_recorded(c, batch);
	if (recorded && c->graph.exec && c->graph.n_split == splits(c, 1) &&
	    c->graph.base == pages_base(c, batch)) {
		fill_rows(c, c->graph.embd);
		c->graph.replaying = true;
		return 1;
	}
	if (recorded) {
		forget_graph(c);
		c->graph.n_split = splits(c, 1);
		c->graph.base = pages_base(c, batch);
		c->graph.n_layers = 0;
		c->graph.recording = cuda_graph_begin(c->driver, c->stream) == 0;
		c->graph.off = !c->graph.recording;
		bytes = c->graph.recording ? c->info.bytes : bytes;
	}
	return backend_cuda_check(c, cuda_upload(c->driver, (void *)(uintptr_t)c->info.card,
						 c->info.host, bytes, c->stream));
}

/* What was recorded is run for the first time. */
static int end_recording(struct backend_cuda *c, int r)
{
	int ended;

	if (r == 0)
		r = backend_cuda_check(c, cuda_download(c->driver, c->graph.chosen.host,
							c->graph.chosen.card, c->graph.chosen.bytes,
							c->stream));
	ended = cuda_graph_end(c->driver, c->stream, &c->graph.exec);
	c->graph.recording = false;
	if (ended < 0)
		c->graph.exec = NULL;
	if (ended == -ENODEV)
		return backend_cuda_check(c, ended);
	if (r < 0 || ended < 0) {
		forget_graph(c);
		c->graph.off = r != -ECANCELED;
		/* Nothing was computed. What failed while it was only written down may work when it is done. */
		c->error = c->error == -ENODEV ? c->error : 0;
		return r == -ECANCELED || c->error < 0 ? r : -EAGAIN;
	}
	c->graph.replaying = true;
	return 0;
}

static int cuda_end(struct backend *b, int r)
{
	struct backend_cuda *c = cuda_of(b);
	const struct backend_batch *batch = c->batch;
	int waited;

	if (c->graph.recording)
		r = end_recording(c, r);
	if (r == 0 && c->graph.replaying)
		r = backend_cuda_check(c, cuda_graph_launch(c->driver, c->graph.exec, c->stream));
	/* Also of a batch that failed: what is on its way reads memory that the next one writes. */
	waited = c->error == 0 ? backend_cuda_check(c, cuda_stream_synchronize(c->driver, c->stream))
			       : -ENODEV;
	if (r == 0)
		r = waited;
	if (r == 0 && c->graph.replaying)
		r = moe_cuda_note_graph(c);
	c->n_batches += r == 0;
	if (r == 0 && batch->n_out == 1)
		memcpy(batch->logits, c->logits, c->model->n_vocab * sizeof(float));
	c->graph.replaying = false;
	if (r == -EAGAIN) /* once more with the same scratch */
		return r;
	c->used = 0;
	c->batch = NULL;
	c->moe = NULL;
	backend_cuda_drop_kept(c);
	return r;
}

/* ---- products ---- */

int backend_cuda_quantize(struct backend_cuda *c, enum quant_type type, const float *x,
			  size_t n_rows, size_t width, void *act)
{
	size_t stride = quant_row_bytes(type, width);
	int r = 0;

	for (size_t at = 0; at < n_rows && r == 0; at += GRID_MAX) {
		size_t n = MIN(n_rows - at, (size_t)GRID_MAX);
		const struct cuda_quantize q = { .x = x + at * width,
						 .act = (char *)act + at * stride,
						 .n_rows = (uint32_t)n,
						 .width = (uint32_t)width,
						 .act_stride = stride };

		r = LAUNCH(c, card_kernel(c->card, CARD_QUANTIZE, type), ceil_div(width, 256), n, q);
	}
	return r;
}

int backend_cuda_activations(struct backend_cuda *c, uint32_t weight_type, const float *x,
			     size_t n_tok, size_t width, const void **ret, size_t *ret_stride)
{
	enum quant_type type = cpu_act_type((enum quant_type)weight_type);
	void *act;
	int r;

	*ret_stride = quant_row_bytes(type, width);
	*ret = x;
	if (type == QUANT_F32)
		return 0;
	if (c->kept.x == x && c->kept.n_tok == n_tok && c->kept.width == width && c->kept.type == type) {
		*ret = c->kept.act;
		return 0;
	}
	backend_cuda_drop_kept(c);
	act = backend_cuda_take(c, n_tok, *ret_stride);
	if (!act)
		return -ENOMEM;
	r = backend_cuda_quantize(c, type, x, n_tok, width, act);
	if (r < 0)
		return r;
	c->kept.x = x;
	c->kept.n_tok = n_tok;
	c->kept.width = width;
	c->kept.type = type;
	*ret = c->kept.act = act;
	return 0;
}

static int product(struct backend_cuda *c, const struct gguf_tensor *w, const void *act,
		   size_t act_stride, size_t n_cols, float *y)
{
	const struct cuda_matmul m = { .w = card_weight(c->card, w),
				       .act = act,
				       .y = y,
				       .w_stride = quant_row_bytes(w->type, w->ne[0]),
				       .act_stride = act_stride,
				       .y_stride = w->ne[1],
				       .n = (uint32_t)w->ne[0],
				       .n_rows = (uint32_t)w->ne[1],
				       .n_cols = (uint32_t)n_cols };

	if (n_cols <= CUDA_COLS)
		return LAUNCH(c, card_kernel(c->card, CARD_MATMUL, w->type),
			      ceil_div(w->ne[1], CUDA_ROWS), 1, m);
	return LAUNCH(c, card_kernel(c->card, CARD_MATMUL_TILED, w->type),
		      ceil_div(w->ne[1], CUDA_TILE_ROWS), ceil_div(n_cols, CUDA_TILE_COLS), m);
}

static int cuda_matmul(struct backend *b, const struct gguf_tensor *w, const float *x, size_t n_tok,
		       float *y)
{
	struct backend_cuda *c = cuda_of(b);
	size_t stride;
	const void *act;
	int r;

	if (n_tok == 0)
		return 0;
	r = backend_cuda_activations(c, w->type, x, n_tok, w->ne[0], &act, &stride);
	if (r == 0)
		r = product(c, w, act, stride, n_tok, y);
	/* y may be where the kept input came from. */
	if (c->kept.x && y < c->kept.x + c->kept.n_tok * c->kept.width &&
	    c->kept.x < y + n_tok * w->ne[1])
		backend_cuda_drop_kept(c);
	return r;
}

/* Launches follow each other on a card without anybody waking up. */
static int cuda_matmul_many(struct backend *b, const struct gguf_tensor *const *w, size_t n,
			    const float *x, size_t n_tok, float *const *y)
{
	int r = 0;

	for (size_t i = 0; i < n && r == 0; i++)
		r = cuda_matmul(b, w[i], x, n_tok, y[i]);
	return r;
}

/* One row through page-locked memory, while other things may follow; several are waited for, a few at a time. */
static int cuda_matmul_out(struct backend *b, const struct gguf_tensor *w, const float *x)
{
	struct backend_cuda *c = cuda_of(b);
	const struct backend_batch *batch = c->batch;
	size_t n = batch->n_out, n_vocab = w->ne[1], stride;
	const void *act;
	int r;

	r = backend_cuda_activations(c, w->type, x, n, w->ne[0], &act, &stride);
	for (size_t i = 0; i < n && r == 0; i += CUDA_COLS) {
		size_t cols = MIN(n - i, (size_t)CUDA_COLS);
		float *to = n == 1 ? c->logits : batch->logits + i * n_vocab;

		r = product(c, w, (const char *)act + i * stride, stride, cols, c->out);
		if (r == 0)
			r = backend_cuda_check(c, cuda_download(c->driver, to, c->out,
								cols * n_vocab * sizeof(float),
								c->stream));
		if (r == 0 && n > 1)
			r = backend_cuda_check(c, cuda_stream_synchronize(c->driver, c->stream));
	}
	return r;
}

static int cuda_embed(struct backend *b, const struct gguf_tensor *w, float *y)
{
	struct backend_cuda *c = cuda_of(b);

	backend_cuda_drop_kept(c);
	fill_rows(c, w);
	c->graph.embd = w;
	return backend_cuda_check(c, cuda_upload(c->driver, y, c->rows,
						 c->batch->n_rows * w->ne[0] * sizeof(float),
						 c->stream));
}

/* ---- row by row ---- */

static int cuda_copy_rows(struct backend *b, const float *x, size_t x_stride, size_t n_rows,
			  size_t width, float *y)
{
	struct backend_cuda *c = cuda_of(b);
	const struct cuda_copy_rows a = {
		.x = x, .y = y, .x_stride = x_stride, .n_rows = (uint32_t)n_rows, .width = (uint32_t)width
	};

	backend_cuda_drop_kept(c);
	return LAUNCH(c, card_function(c->card, CARD_COPY_ROWS), ceil_div(width, CUDA_THREADS),
		      MIN(n_rows, (size_t)GRID_MAX), a);
}

static int cuda_rms_norm(struct backend *b, const struct gguf_tensor *w, float eps, const float *x,
			 size_t n_rows, size_t width, float *y)
{
	struct backend_cuda *c = cuda_of(b);
	const struct cuda_norm a = { .x = x,
				     .w = w ? card_weight(c->card, w) : NULL,
				     .y = y,
				     .n_rows = (uint32_t)n_rows,
				     .width = (uint32_t)width,
				     .eps = eps };

	backend_cuda_drop_kept(c);
	return LAUNCH(c, card_function(c->card, CARD_RMS_NORM), n_rows, 1, a);
}

static int flat(struct backend *b, enum card_function f, const float *x, const float *z, float *y,
		size_t n)
{
	struct backend_cuda *c = cuda_of(b);
	const struct cuda_flat a = { .a = x, .b = z, .y = y, .n = n };

	backend_cuda_drop_kept(c);
	return LAUNCH(c, card_function(c->card, f), ceil_div(n, CUDA_THREADS), 1, a);
}

static int cuda_add(struct backend *b, float *x, const float *y, size_t n)
{
	return flat(b, CARD_ADD, y, NULL, x, n);
}

/* Row by row: no family that a card takes has many of them. */
static int cuda_add_bias(struct backend *b, const struct gguf_tensor *w, float *x, size_t n_rows,
			 size_t width)
{
	const float *bias = card_weight(cuda_of(b)->card, w);
	int r = 0;

	for (size_t t = 0; t < n_rows && r == 0; t++)
		r = flat(b, CARD_ADD, bias, NULL, x + t * width, width);
	return r;
}

static int cuda_silu_mul(struct backend *b, const float *gate, const float *up, size_t n, float *y)
{
	return flat(b, CARD_SILU_MUL, gate, up, y, n);
}

static int cuda_sigmoid_mul(struct backend *b, float *x, const float *gate, size_t n)
{
	return flat(b, CARD_SIGMOID_MUL, gate, NULL, x, n);
}

static int cuda_scalar_gate(struct backend *b, const struct gguf_tensor *w, const float *in,
			    size_t n_tok, size_t width, float *x, size_t x_width)
{
	struct backend_cuda *c = cuda_of(b);
	const struct cuda_scalar_gate a = { .w = card_weight(c->card, w),
					    .in = in,
					    .x = x,
					    .n_tok = (uint32_t)n_tok,
					    .width = (uint32_t)width,
					    .x_width = (uint32_t)x_width };

	backend_cuda_drop_kept(c);
	return LAUNCH(c, card_function(c->card, CARD_SCALAR_GATE), n_tok, 1, a);
}

/* Frequencies of the rope: one table, sent anew when there is another. */
static int need_freq(struct backend_cuda *c, const struct backend_rope *p)
{
	int r;

	if (c->freq_of == p->freq)
		return 0;
	assert(p->n_rot <= CUDA_HEAD_MAX);
	/* Not a thing to be recorded: it is complete on return. */
	if (c->graph.recording)
		return -EAGAIN;
	r = backend_cuda_check(c, cuda_upload(c->driver, c->freq, p->freq,
					      p->n_rot / 2 * sizeof(float), NULL));
	if (r < 0)
		return r;
	c->freq_of = p->freq;
	return 0;
}

static int cuda_rope(struct backend *b, const struct backend_rope *p, float *x, size_t stride,
		     size_t n_head, size_t dim)
{
	struct backend_cuda *c = cuda_of(b);
	const struct cuda_rope a = { .x = x,
				     .positions = c->positions,
				     .freq = c->freq,
				     .stride = stride,
				     .n_head = (uint32_t)n_head,
				     .dim = (uint32_t)dim,
				     .n_rot = p->n_rot,
				     .n_rows = (uint32_t)c->batch->n_rows };
	int r;

	backend_cuda_drop_kept(c);
	assert(!p->pairs && p->mscale == 1.0f); /* card_load() refuses such models */
	r = need_freq(c, p);
	if (r < 0)
		return r;
	return LAUNCH(c, card_function(c->card, CARD_ROPE), n_head, c->batch->n_rows, a);
}

/* ---- attention ---- */

static int cuda_attention(struct backend *b, const struct backend_attn *p, const float *q,
			  const float *k, const float *v, float *out)
{
	struct backend_cuda *c = cuda_of(b);
	const struct kv_arena *arena = c->batch->arena;
	size_t n_rows = c->batch->n_rows;
	char *base = kv_k(arena, 0, 0, 0);
	struct cuda_attention a = {
		.base = base,
		.spans = c->spans,
		.span_of_row = c->span_of_row,
		.q = q,
		.k = k,
		.v = v,
		.out = out,
		.page_bytes = kv_arena_page_bytes(arena),
		.layer_offset = (uint64_t)((char *)kv_k(arena, 0, p->kv_layer, 0) - base),
		.page_tok = KV_PAGE_TOK,
		.n_head = p->n_head,
		.n_head_kv = p->n_head_kv,
		.k_dim = p->k_dim,
		.v_dim = p->v_dim,
		.n_rows = (uint32_t)n_rows,
		.f16 = kv_arena_f16(arena),
		.scale = p->scale,
		.n_split = splits(c, n_rows),
	};
	size_t element = a.f16 ? sizeof(uint16_t) : sizeof(float);
	int r;

	assert(p->window == 0 && !p->sinks); /* card_load() refuses such models */

	backend_cuda_drop_kept(c);
	a.k_bytes = KV_PAGE_TOK * p->k_dim * element;
	a.v_bytes = KV_PAGE_TOK * p->v_dim * element;
	while (a.n_split > 1 &&
	       !(a.partial = backend_cuda_take(c, n_rows * p->n_head * a.n_split * (p->v_dim + 2),
					       sizeof(float))))
		a.n_split /= 2;
	r = LAUNCH(c, card_function(c->card, CARD_KV_STORE), p->n_head_kv, n_rows, a);
	if (r == 0)
		r = backend_cuda_launch(c, card_function(c->card, CARD_ATTENTION_ROWS),
					p->n_head_kv, n_rows, a.n_split, 0, 0, &a, sizeof(a));
	if (r == 0 && a.partial)
		r = LAUNCH(c, card_function(c->card, CARD_ATTENTION_JOIN), p->n_head, n_rows, a);
	backend_cuda_drop_kept(c);
	return r;
}

/* ---- the gated delta net ---- */

static int delta_rule(struct backend_cuda *c, const struct backend_delta *p, struct cuda_delta_rule *d)
{
	bool chunks = true;
	unsigned threads = (unsigned)ALIGN_UP(p->v_dim, (uint32_t)CUDA_WARP), z;

	for (size_t s = 0; s < c->batch->n_spans; s++)
		chunks = chunks && c->batch->spans[s].n_tok >= CUDA_DELTA_CHUNK_MIN;
	if (chunks)
		return backend_cuda_launch(c, card_function(c->card, CARD_DELTA_CHUNK), p->n_head_v,
					   c->batch->n_spans, ceil_div(p->v_dim, CUDA_DELTA_COLUMNS),
					   0, CUDA_DELTA_CHUNK_SHARED(p->k_dim), d, sizeof(*d));
	z = (unsigned)ceil_div((size_t)p->v_dim * 4 * (p->k_dim > 128 ? 2 : 1), threads);
	return backend_cuda_launch(c, card_function(c->card, CARD_DELTA_RULE), p->n_head_v,
				   c->batch->n_spans, z, threads, 0, d, sizeof(*d));
}

static int cuda_delta(struct backend *b, const struct backend_delta *p, const float *qkv,
		      const float *alpha, const float *beta, float *out)
{
	struct backend_cuda *c = cuda_of(b);
	size_t n = c->batch->n_rows, n_spans = c->batch->n_spans;
	size_t n_ch = 2 * (size_t)p->n_head_k * p->k_dim + (size_t)p->n_head_v * p->v_dim;
	float *mixed, *g, *strength;
	int r;

	backend_cuda_drop_kept(c);
	mixed = backend_cuda_take(c, n * n_ch, sizeof(float));
	g = backend_cuda_take(c, n * p->n_head_v, sizeof(float));
	strength = backend_cuda_take(c, n * p->n_head_v, sizeof(float));
	if (!mixed || !g || !strength) {
		backend_cuda_drop_kept(c);
		return -ENOMEM;
	}
	const struct cuda_conv conv = { .x = qkv,
					.w = card_weight(c->card, p->conv),
					.y = mixed,
					.spans = c->spans,
					.state_offset = p->state_offset,
					.n_ch = (uint32_t)n_ch,
					.kernel = p->conv_kernel,
					.n_spans = (uint32_t)n_spans };
	const struct cuda_delta_gates gates = { .mixed = mixed,
						.alpha = alpha,
						.beta_raw = beta,
						.a = card_weight(c->card, p->a),
						.dt = card_weight(c->card, p->dt),
						.g = g,
						.beta = strength,
						.n_rows = (uint32_t)n,
						.n_ch = (uint32_t)n_ch,
						.n_head_k = p->n_head_k,
						.n_head_v = p->n_head_v,
						.k_dim = p->k_dim,
						.l2_eps = p->l2_eps };
	struct cuda_delta_rule rule = { .mixed = mixed,
					.g = g,
					.beta = strength,
					.out = out,
					.spans = c->spans,
					.state_offset = p->state_offset + (p->conv_kernel - 1) * n_ch,
					.n_ch = (uint32_t)n_ch,
					.n_head_k = p->n_head_k,
					.n_head_v = p->n_head_v,
					.k_dim = p->k_dim,
					.v_dim = p->v_dim,
					.n_spans = (uint32_t)n_spans };

	r = LAUNCH(c, card_function(c->card, CARD_CONV_SILU), ceil_div(n_ch, CUDA_THREADS), n_spans,
		   conv);
	if (r == 0)
		r = LAUNCH(c, card_function(c->card, CARD_DELTA_GATES), n, 1, gates);
	if (r == 0)
		r = delta_rule(c, p, &rule);
	backend_cuda_drop_kept(c);
	return r;
}

/* ---- beginning and end ---- */

static int cuda_moe_route(struct backend *b, const struct backend_moe *p,
			  const float *router_logits, size_t n_tok)
{
	/* Between layers nothing on the card is promised to anybody. */
	if (!cuda_of(b)->graph.recording)
		look(cuda_of(b));
	return moe_cuda_route(b, p, router_logits, n_tok);
}

static void cuda_set_residency(struct backend *b, struct residency *r)
{
	cuda_of(b)->residency = r;
}

static struct backend *cuda_free_backend(struct backend *b)
{
	struct backend_cuda *c;

	if (!b)
		return NULL;
	c = cuda_of(b);
	if (c->pinned)
		cuda_host_free(c->driver, c->pinned);
	cuda_event_free(c->driver, c->ready);
	forget_graph(c);
	free(c->route_mem);
	free(c->wave);
	free(c->on_cpu);
	free(c->result);
	free(c);
	return NULL;
}

static const struct backend_ops cuda_ops = {
	.name = "cuda",
	.free = cuda_free_backend,
	.memory = cuda_memory,
	.scratch = cuda_scratch,
	.begin = cuda_begin,
	.end = cuda_end,
	.embed = cuda_embed,
	.matmul = cuda_matmul,
	.matmul_many = cuda_matmul_many,
	.matmul_out = cuda_matmul_out,
	.copy_rows = cuda_copy_rows,
	.rms_norm = cuda_rms_norm,
	.add = cuda_add,
	.add_bias = cuda_add_bias,
	.silu_mul = cuda_silu_mul,
	.sigmoid_mul = cuda_sigmoid_mul,
	.scalar_gate = cuda_scalar_gate,
	.rope = cuda_rope,
	.attention = cuda_attention,
	.delta = cuda_delta,
	.moe_route = cuda_moe_route,
	.moe = moe_cuda,
	.moe_wants_guess = moe_cuda_wants_guess,
	.moe_guess = moe_cuda_guess,
	.set_residency = cuda_set_residency,
};

/* Bytes of each mirror, in the order of struct backend_cuda. */
struct plan {
	size_t info, rows, logits, out, choice, places, other, chosen, freq;
};

static size_t widest_choice(const struct model *m, size_t *ret_n_expert)
{
	*ret_n_expert = 0;
	for (uint32_t i = 0; i < m->catalog->n_expert_layers; i++)
		*ret_n_expert = MAX(*ret_n_expert,
				    (size_t)m->catalog->layers[m->catalog->expert_layers[i]].n_expert);
	return m->n_expert_used;
}

static void make_plan(const struct model *m, size_t batch_tok, size_t context, struct plan *ret)
{
	size_t n_expert, n_used = widest_choice(m, &n_expert);
	size_t pages = context / KV_PAGE_TOK + SPARE_PAGES;

	*ret = (struct plan){
		.info = ALIGN_UP(batch_tok * (sizeof(struct cuda_span) + 2 * sizeof(uint32_t)) +
					 pages * sizeof(uint32_t) + 4 * ALIGN_CARD,
				 ALIGN_CARD),
		.rows = ALIGN_UP(batch_tok * m->n_embd * sizeof(float), ALIGN_CARD),
		.logits = ALIGN_UP(m->n_vocab * sizeof(float), ALIGN_CARD),
		.out = ALIGN_UP(CUDA_COLS * m->n_vocab * sizeof(float), ALIGN_CARD),
		.choice = ALIGN_UP(batch_tok * n_used * (sizeof(uint32_t) + sizeof(float)), ALIGN_CARD),
		.places = ALIGN_UP(moe_cuda_places_bytes(batch_tok, n_used, n_expert), ALIGN_CARD),
		.other = ALIGN_UP(RESIDENCY_ONCE_ROWS * n_used * m->n_embd * sizeof(float), ALIGN_CARD),
		.chosen = ALIGN_UP(m->catalog->n_expert_layers * n_used * sizeof(uint32_t), ALIGN_CARD),
		.freq = ALIGN_UP(CUDA_HEAD_MAX / 2 * sizeof(float), ALIGN_CARD),
	};
}

static size_t fixed_bytes(const struct plan *p)
{
	return p->info + p->out + p->choice + p->places + p->other + p->chosen + p->freq;
}

size_t backend_cuda_scratch_bytes(const struct model *m, size_t batch_tok, size_t context)
{
	size_t work = graph_scratch_bytes(m, batch_tok), bytes;
	struct plan p;

	make_plan(m, batch_tok, context, &p);
	if (!add_ok(work, work / 4 + SCRATCH_SPARE + fixed_bytes(&p), &bytes))
		return SIZE_MAX;
	return bytes;
}

static void *cut(char **at, size_t bytes)
{
	void *p = *at;

	*at += bytes;
	return p;
}

static void cut_mirror(struct mirror *m, char **host, char **card, size_t bytes)
{
	*m = (struct mirror){ cut(host, bytes), cut(card, bytes), bytes };
}

static int allocate(struct backend_cuda *c, size_t context)
{
	size_t n_expert, n_used = widest_choice(c->model, &n_expert);
	uint64_t scratch_bytes;
	char *host, *card = card_scratch(c->card, &scratch_bytes);
	struct plan p;
	int r;

	make_plan(c->model, c->batch_tok, context, &p);
	assert(scratch_bytes > fixed_bytes(&p));
	c->pinned_bytes = p.info + p.rows + p.logits + p.choice + p.places + p.other + p.chosen;
	r = cuda_host_alloc(c->driver, c->pinned_bytes, &c->pinned);
	if (r == 0)
		r = cuda_event_new(c->driver, false, &c->ready);
	if (r < 0)
		return r;
	host = c->pinned;
	c->arena = card + fixed_bytes(&p);
	c->arena_bytes = scratch_bytes - fixed_bytes(&p);
	cut_mirror(&c->info, &host, &card, p.info);
	cut_mirror(&c->choice, &host, &card, p.choice);
	cut_mirror(&c->places, &host, &card, p.places);
	cut_mirror(&c->other, &host, &card, p.other);
	cut_mirror(&c->graph.chosen, &host, &card, p.chosen);
	c->rows = cut(&host, p.rows);
	c->logits = cut(&host, p.logits);
	c->out = cut(&card, p.out);
	c->freq = cut(&card, p.freq);
	if (n_expert == 0)
		return 0;
	/* Touched as it is used. */
	c->result = calloc(c->batch_tok * n_used, c->model->n_embd * sizeof(float));
	c->wave = calloc(n_expert, sizeof(*c->wave));
	c->on_cpu = malloc(n_expert);
	return c->result && c->wave && c->on_cpu &&
			       posix_memalign(&c->route_mem, 64,
					      route_bytes(c->batch_tok, n_used, n_expert)) == 0
		       ? 0
		       : -ENOMEM;
}

uint64_t backend_cuda_host_bytes(const struct backend *b)
{
	return ((const struct backend_cuda *)b)->pinned_bytes + VRAM_STAGING_BYTES;
}

int backend_cuda_new(struct card *card, const struct model *m, struct backend *cpu,
		     size_t batch_tok, size_t context, struct backend **ret, char **ret_error)
{
	struct backend_cuda *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return fail(ret_error, -ENOMEM, "no memory");
	c->base.ops = &cuda_ops;
	c->card = card;
	c->driver = card_driver(card);
	c->stream = card_stream(card);
	c->cpu = cpu;
	c->cpu_kernels = cpu_kernels_choose(NULL);
	c->model = m;
	c->batch_tok = batch_tok;
	c->looked_us = now_us();
	c->graph.off = m->catalog->n_expert_layers > ARRAY_SIZE(c->graph.layers);
	r = allocate(c, context);
	if (r < 0) {
		(void)fail(ret_error, r, "%s", cuda_error(c->driver));
		cuda_free_backend(&c->base);
		return r;
	}
	*ret = &c->base;
	return 0;
}
