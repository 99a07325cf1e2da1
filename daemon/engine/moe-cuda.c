/* SPDX-License-Identifier: MIT */
/*
 * moe-cuda.c: the experts of a layer between card and CPU. See backend-cuda.h.
 *
 * Owns nothing of its own. Engine thread only. The router's choice comes to the host, residency says where each expert is, and what is on the
 * card is computed there while the CPU computes what lies in host memory. A few rows take two launches, whatever mix of slots and copies the
 * table names; many rows go expert by expert through tiles, wave by wave as blocks come. Refuses to know which block should be where.
 * Invariant: a token's sum takes every choice once and in the order of the choice, wherever it was computed.
 */
#include "daemon/engine/backend-cuda.h"

#include "daemon/residency/residency.h"
#include "daemon/residency/vram.h"

#include <assert.h>

/* Dynamic shared memory of a block. */
#define SHARED_BYTES (48U << 10)
#define GRID_MAX     65535U

static size_t ceil_div(size_t n, size_t d)
{
	return n / d + (n % d > 0);
}

static const struct gguf_tensor *in_of(const struct backend_moe *p)
{
	return p->gate_up ? p->gate_up : p->gate;
}

static size_t n_ff_of(const struct backend_moe *p)
{
	return p->down->ne[0];
}

static bool is_small(size_t n_tok)
{
	return n_tok <= RESIDENCY_ONCE_ROWS;
}

/* Place of each slot, token of each place, tiles: an expert's last tile may be a part. */
size_t moe_cuda_places_bytes(size_t n_tok, size_t n_used, size_t n_expert)
{
	size_t n_slots = n_tok * n_used;

	return 2 * n_slots * sizeof(uint32_t) +
	       (n_slots / CUDA_TILE_COLS + MIN(n_slots, n_expert) + 1) * sizeof(struct cuda_moe_tile);
}

/* ---- the choice ---- */

static int launch_route(struct backend_cuda *c, const struct backend_moe *p, const float *logits,
			size_t n_tok, uint32_t *experts, float *weights)
{
	const struct cuda_route a = { .logits = logits,
				      .expert = experts,
				      .weight = weights,
				      .n_tok = (uint32_t)n_tok,
				      .n_expert = (uint32_t)p->n_expert,
				      .n_used = (uint32_t)p->n_used };

	return LAUNCH(c, card_function(c->card, CARD_ROUTE), n_tok, 1, a);
}

/* Chooses on the card, and waits until the host knows what. */
static int choose(struct backend_cuda *c, const struct backend_moe *p, const float *logits, size_t n_tok)
{
	size_t n_slots = n_tok * p->n_used, bytes = n_slots * (sizeof(uint32_t) + sizeof(float));
	const uint32_t *experts = c->choice.host;
	int r;

	c->card_experts = c->choice.card;
	c->card_weights = (float *)(c->card_experts + n_slots);
	r = launch_route(c, p, logits, n_tok, c->card_experts, c->card_weights);
	if (r == 0)
		r = backend_cuda_check(c, cuda_download(c->driver, c->choice.host, c->choice.card,
							bytes, c->stream));
	if (r == 0)
		r = backend_cuda_check(c, cuda_event_record(c->driver, c->ready, c->stream));
	if (r == 0)
		r = backend_cuda_check(c, cuda_event_synchronize(c->driver, c->ready));
	if (r < 0)
		return r;
	route_init(&c->route, c->route_mem, n_tok, p->n_used, p->n_expert);
	memcpy(c->route.chosen, experts, n_slots * sizeof(*experts));
	memcpy(c->route.weight, experts + n_slots, n_slots * sizeof(float));
	/* What a card that is not well says is not an index. */
	if (route_sort(&c->route) < 0) {
		snprintf(c->error_text, sizeof(c->error_text),
			 "the router's choice from the card makes no sense");
		c->error = -ENODEV;
		return -ENODEV;
	}
	return 0;
}

static int route_recorded(struct backend_cuda *c, const struct backend_moe *p, const float *logits)
{
	size_t i = c->graph.n_layers++;

	c->graph.layers[i] = p->layer;
	c->card_experts = (uint32_t *)c->graph.chosen.card + i * p->n_used;
	c->card_weights = c->choice.card;
	return launch_route(c, p, logits, 1, c->card_experts, c->card_weights);
}

int moe_cuda_route(struct backend *b, const struct backend_moe *p, const float *router_logits,
		   size_t n_tok)
{
	struct backend_cuda *c = cuda_of(b);
	int r;

	/* card_load() refuses other models. */
	assert(p->gating == BACKEND_GATING_SOFTMAX && p->unit == BACKEND_UNIT_SILU);
	assert(!p->gate_bias && !p->up_bias && !p->down_bias);
	backend_cuda_drop_kept(c);
	c->moe = p;
	if (c->graph.recording)
		return route_recorded(c, p, router_logits);
	r = choose(c, p, router_logits, n_tok);
	if (r < 0)
		return r;
	residency_layer_begin(c->residency, p->layer, c->route.active, c->route.n_rows,
			      c->route.n_active);
	return 0;
}

bool moe_cuda_wants_guess(struct backend *b)
{
	struct backend_cuda *c = cuda_of(b);

	return !c->graph.recording && residency_wants_guess(c->residency);
}

/* Beside the layer's own choice, which moe() still needs. */
int moe_cuda_guess(struct backend *b, const struct backend_moe *p, const float *router_logits,
		   size_t n_tok)
{
	struct backend_cuda *c = cuda_of(b);
	size_t n_slots = n_tok * p->n_used;
	uint32_t *experts;
	_cleanup_(freep) uint32_t *chosen = malloc(n_slots * sizeof(*chosen));
	_cleanup_(freep) void *mem = NULL;
	struct route route;
	float *weights;
	int r;

	backend_cuda_drop_kept(c);
	experts = backend_cuda_take(c, n_slots, sizeof(*experts));
	weights = backend_cuda_take(c, n_slots, sizeof(*weights));
	if (!experts || !weights || !chosen ||
	    posix_memalign(&mem, 64, route_bytes(n_tok, p->n_used, p->n_expert)) != 0) {
		backend_cuda_drop_kept(c);
		return -ENOMEM;
	}
	r = launch_route(c, p, router_logits, n_tok, experts, weights);
	if (r == 0)
		r = backend_cuda_check(c, cuda_download(c->driver, chosen, experts,
							n_slots * sizeof(*chosen), c->stream));
	if (r == 0)
		r = backend_cuda_check(c, cuda_stream_synchronize(c->driver, c->stream));
	backend_cuda_drop_kept(c);
	if (r < 0)
		return r;
	route_init(&route, mem, n_tok, p->n_used, p->n_expert);
	memcpy(route.chosen, chosen, n_slots * sizeof(*chosen));
	if (route_sort(&route) == 0)
		residency_guess(c->residency, p->layer, route.active, route.n_active);
	return 0;
}

/* ---- the CPU's part ---- */

/* x in host memory, and the CPU's scratch made ready; once a layer. */
static int begin_cpu(struct backend_cuda *c, const struct backend_moe *p, bool *begun)
{
	int r;

	if (*begun)
		return 0;
	r = backend_cuda_check(c, cuda_event_synchronize(c->driver, c->ready));
	if (r == 0)
		r = backend_cpu_moe_begin(c->cpu, p, &c->route, c->rows);
	*begun = r == 0;
	return r;
}

/* Begun early, so that it is there when the first block is the CPU's. */
static int download_x(struct backend_cuda *c, const float *x, size_t n_tok, size_t n_embd)
{
	int r = backend_cuda_check(c, cuda_download(c->driver, c->rows, x,
						    n_tok * n_embd * sizeof(float), c->stream));

	return r < 0 ? r : backend_cuda_check(c, cuda_event_record(c->driver, c->ready, c->stream));
}

/* ---- a few rows: two launches ---- */

static struct cuda_moe moe_args(struct backend_cuda *c, const struct backend_moe *p, size_t n_tok)
{
	enum quant_type act = cpu_act_type((enum quant_type)p->down->type);
	size_t hidden_act = quant_row_bytes(act, n_ff_of(p));

	return (struct cuda_moe){
		.experts = vram_table(card_vram(c->card), p->layer),
		.expert = c->card_experts,
		.weight = c->card_weights,
		.up_stride = quant_row_bytes(in_of(p)->type, in_of(p)->ne[0]),
		.down_stride = quant_row_bytes(p->down->type, p->down->ne[0]),
		.n_tok = (uint32_t)n_tok,
		.n_used = (uint32_t)p->n_used,
		.n_embd = (uint32_t)p->down->ne[1],
		.n_ff = (uint32_t)n_ff_of(p),
		.hidden_act_bytes = (uint32_t)hidden_act,
		.hidden_rows = (uint32_t)CLAMP(SHARED_BYTES / hidden_act, (size_t)1, p->n_used),
	};
}

/* The CPU's results, in the order of slots, to the card. */
static int send_other(struct backend_cuda *c, size_t n_embd)
{
	const struct route *route = &c->route;
	size_t n_slots = route->n_tok * route->n_used, row = n_embd * sizeof(float);

	for (size_t s = 0; s < n_slots; s++)
		if (c->on_cpu[route->chosen[s]])
			memcpy((char *)c->other.host + s * row,
			       (const char *)c->result + route->place[s] * row, row);
	return backend_cuda_check(c, cuda_upload(c->driver, c->other.card, c->other.host,
						 n_slots * row, c->stream));
}

static int launch_up(struct backend_cuda *c, const struct backend_moe *p, const struct cuda_moe *a)
{
	return LAUNCH(c, card_kernel(c->card, CARD_MOE_UP, in_of(p)->type),
		      ceil_div(a->n_ff, CUDA_ROWS), a->n_tok * a->n_used, *a);
}

static int launch_down(struct backend_cuda *c, const struct backend_moe *p, const struct cuda_moe *a)
{
	return backend_cuda_launch(c, card_kernel(c->card, CARD_MOE_DOWN, p->down->type),
				   ceil_div(a->n_embd, CUDA_ROWS), a->n_tok, 1, 0,
				   a->hidden_rows * a->hidden_act_bytes, a, sizeof(*a));
}

/* Waves of host memory, after `up` was launched for what is on the card. *ret_result: NULL when there were none. */
static int run_small_waves(struct backend_cuda *c, const struct backend_moe *p,
			   const struct cuda_moe *up, bool *ret_any)
{
	struct residency_block *wave = c->wave;
	bool begun = false, launched = false, on_card = false;
	ssize_t n;
	int r = 0;

	while (r == 0 && (n = residency_layer_next(c->residency, wave, p->n_expert, &on_card)) != 0) {
		if (n < 0)
			r = (int)n;
		if (r < 0 || on_card)
			continue;
		if (!launched)
			r = launch_up(c, p, up);
		launched = true;
		if (r == 0)
			r = begin_cpu(c, p, &begun);
		if (r < 0)
			break;
		for (ssize_t i = 0; i < n; i++)
			c->on_cpu[wave[i].expert] = 1;
		backend_cpu_moe_run(c->cpu, wave, (size_t)n, c->result);
	}
	if (r == 0 && !launched)
		r = launch_up(c, p, up);
	if (begun)
		backend_cpu_moe_end(c->cpu);
	*ret_any = begun;
	return r;
}

static int moe_small(struct backend_cuda *c, const struct backend_moe *p, const float *x,
		     size_t n_tok, float *out)
{
	struct cuda_moe a = moe_args(c, p, n_tok);
	size_t n_slots = n_tok * p->n_used, stride;
	bool any = false;
	int r;

	r = backend_cuda_activations(c, in_of(p)->type, x, n_tok, a.n_embd, &a.act, &stride);
	a.act_stride = stride;
	a.out = out;
	a.hidden = r == 0 ? backend_cuda_take(c, n_slots * a.n_ff, sizeof(float)) : NULL;
	if (!a.hidden)
		return r < 0 ? r : -ENOMEM;
	if (c->graph.recording) {
		r = launch_up(c, p, &a);
		return r < 0 ? r : launch_down(c, p, &a);
	}
	memset(c->on_cpu, 0, p->n_expert);
	r = download_x(c, x, n_tok, a.n_embd);
	if (r == 0)
		r = run_small_waves(c, p, &a, &any);
	if (r == 0 && any) {
		r = send_other(c, a.n_embd);
		a.other = c->other.card;
	}
	return r < 0 ? r : launch_down(c, p, &a);
}

/* ---- many rows: tiles ---- */

struct large {
	struct backend_cuda *c;
	const struct backend_moe *p;
	size_t n_tok, n_slots, n_embd, n_ff;
	enum quant_type in_act, down_act;
	size_t in_stride, down_stride;
	uint32_t *place, *token;     /* host: of slots, of places */
	struct cuda_moe_tile *tiles; /* host, for all waves of the layer one behind the other */
	size_t n_tiles;
	/* Card, by place. */
	void *gathered, *hidden;
	float *gate, *up, *result;
	bool cpu_begun;
};

static const void *card_at(const struct large *l, const void *host)
{
	return (const char *)l->c->places.card + ((const char *)host - (const char *)l->c->places.host);
}

static int take_large(struct large *l)
{
	struct backend_cuda *c = l->c;

	l->gathered = backend_cuda_take(c, l->n_slots, l->in_stride);
	l->gate = backend_cuda_take(c, l->n_slots * l->n_ff, sizeof(float));
	l->up = backend_cuda_take(c, l->n_slots * l->n_ff, sizeof(float));
	l->hidden = l->down_act == QUANT_F32 ? l->gate
					     : backend_cuda_take(c, l->n_slots, l->down_stride);
	l->result = backend_cuda_take(c, l->n_slots * l->n_embd, sizeof(float));
	return l->gathered && l->gate && l->up && l->hidden && l->result ? 0 : -ENOMEM;
}

/* Inputs in the order of places. */
static int gather(struct large *l, const float *x)
{
	struct backend_cuda *c = l->c;
	const struct route *route = &c->route;
	size_t stride;
	const void *act;
	int r;

	l->place = c->places.host;
	l->token = l->place + l->n_slots;
	l->tiles = (struct cuda_moe_tile *)(l->token + l->n_slots);
	memcpy(l->place, route->place, l->n_slots * sizeof(uint32_t));
	memcpy(l->token, route->token, l->n_slots * sizeof(uint32_t));
	r = backend_cuda_check(c, cuda_upload(c->driver, c->places.card, c->places.host,
					      2 * l->n_slots * sizeof(uint32_t), c->stream));
	if (r == 0)
		r = backend_cuda_activations(c, in_of(l->p)->type, x, l->n_tok, l->n_embd, &act,
					     &stride);
	if (r == 0)
		r = take_large(l);
	if (r < 0)
		return r;
	const struct cuda_gather_rows a = { .from = act,
					    .to = l->gathered,
					    .index = card_at(l, l->token),
					    .from_stride = stride,
					    .to_stride = stride,
					    .n_rows = (uint32_t)l->n_slots,
					    .bytes = (uint32_t)stride };

	return LAUNCH(c, card_function(c->card, CARD_GATHER_ROWS),
		      ceil_div(ceil_div(stride, sizeof(uint32_t)), CUDA_THREADS),
		      MIN(l->n_slots, (size_t)GRID_MAX), a);
}

static int launch_tiles(struct large *l, const struct gguf_tensor *w, unsigned matrix, const void *act,
			size_t act_stride, size_t n_rows, float *y, size_t first_tile, size_t n_tiles)
{
	const struct cuda_moe_tiled a = { .experts = vram_table(card_vram(l->c->card), l->p->layer),
					  .tiles = (const struct cuda_moe_tile *)card_at(l, l->tiles) +
						   first_tile,
					  .act = act,
					  .y = y,
					  .w_stride = quant_row_bytes(w->type, w->ne[0]),
					  .act_stride = act_stride,
					  .y_stride = n_rows,
					  .n = (uint32_t)w->ne[0],
					  .n_rows = (uint32_t)n_rows,
					  .n_tiles = (uint32_t)n_tiles,
					  .matrix = matrix };

	return LAUNCH(l->c, card_kernel(l->c->card, CARD_MOE_TILED, w->type),
		      ceil_div(n_rows, CUDA_TILE_ROWS), MIN(n_tiles, (size_t)GRID_MAX), a);
}

/* The product of gate and up, in the form that down multiplies, of places [first, first + n). */
static int hidden(struct large *l, size_t first, size_t n)
{
	struct backend_cuda *c = l->c;
	float *gate = l->gate + first * l->n_ff;
	const struct cuda_flat a = { .a = gate, .b = l->up + first * l->n_ff, .y = gate, .n = n * l->n_ff };
	int r = LAUNCH(c, card_function(c->card, CARD_SILU_MUL), ceil_div(a.n, CUDA_THREADS), 1, a);

	if (r < 0 || l->down_act == QUANT_F32)
		return r;
	return backend_cuda_quantize(c, l->down_act, gate, n, l->n_ff,
				     (char *)l->hidden + first * l->down_stride);
}

/* Of neighbours among the wave's experts at once. */
static int hidden_of_wave(struct large *l, const struct residency_block *wave, size_t n)
{
	const size_t *first = l->c->route.first;
	int r = 0;

	for (size_t i = 0; i < n && r == 0;) {
		size_t from = first[wave[i].expert], to = first[wave[i].expert + 1];

		for (i++; i < n && first[wave[i].expert] == to; i++)
			to = first[wave[i].expert + 1];
		r = hidden(l, from, to - from);
	}
	return r;
}

static int card_wave(struct large *l, const struct residency_block *wave, size_t n)
{
	struct backend_cuda *c = l->c;
	size_t first_tile = l->n_tiles, n_tiles;
	const struct gguf_tensor *in = in_of(l->p);
	int r;

	for (size_t i = 0; i < n; i++) {
		uint32_t e = wave[i].expert;

		for (size_t at = c->route.first[e]; at < c->route.first[e + 1]; at += CUDA_TILE_COLS)
			l->tiles[l->n_tiles++] = (struct cuda_moe_tile){
				.expert = e,
				.first = (uint32_t)at,
				.n = (uint32_t)MIN(c->route.first[e + 1] - at, (size_t)CUDA_TILE_COLS)
			};
	}
	n_tiles = l->n_tiles - first_tile;
	r = backend_cuda_check(
		c, cuda_upload(c->driver, (void *)(uintptr_t)card_at(l, l->tiles + first_tile),
			       l->tiles + first_tile, n_tiles * sizeof(*l->tiles), c->stream));
	if (r == 0)
		r = launch_tiles(l, in, 0, l->gathered, l->in_stride, l->n_ff, l->gate, first_tile,
				 n_tiles);
	if (r == 0)
		r = launch_tiles(l, in, 1, l->gathered, l->in_stride, l->n_ff, l->up, first_tile,
				 n_tiles);
	if (r == 0)
		r = hidden_of_wave(l, wave, n);
	if (r == 0)
		r = launch_tiles(l, l->p->down, 2, l->hidden, l->down_stride, l->n_embd, l->result,
				 first_tile, n_tiles);
	return r;
}

static int cpu_wave(struct large *l, const struct residency_block *wave, size_t n)
{
	struct backend_cuda *c = l->c;
	int r = begin_cpu(c, l->p, &l->cpu_begun);

	if (r < 0)
		return r;
	backend_cpu_moe_run(c->cpu, wave, n, c->result);
	for (size_t i = 0; i < n && r == 0; i++) {
		size_t from = c->route.first[wave[i].expert], to = c->route.first[wave[i].expert + 1];

		r = backend_cuda_check(c, cuda_upload(c->driver, l->result + from * l->n_embd,
						      c->result + from * l->n_embd,
						      (to - from) * l->n_embd * sizeof(float),
						      c->stream));
	}
	return r;
}

static int sum(struct large *l, float *out)
{
	const struct cuda_moe_sum a = { .result = l->result,
					.place = card_at(l, l->place),
					.weight = l->c->card_weights,
					.out = out,
					.n_tok = (uint32_t)l->n_tok,
					.n_used = (uint32_t)l->p->n_used,
					.n_embd = (uint32_t)l->n_embd };

	return LAUNCH(l->c, card_function(l->c->card, CARD_MOE_SUM),
		      ceil_div(l->n_embd, CUDA_THREADS), l->n_tok, a);
}

static int moe_large(struct backend_cuda *c, const struct backend_moe *p, const float *x,
		     size_t n_tok, float *out)
{
	struct large l = { .c = c,
			   .p = p,
			   .n_tok = n_tok,
			   .n_slots = n_tok * p->n_used,
			   .n_embd = p->down->ne[1],
			   .n_ff = n_ff_of(p),
			   .in_act = cpu_act_type((enum quant_type)in_of(p)->type),
			   .down_act = cpu_act_type((enum quant_type)p->down->type) };
	struct residency_block *wave = c->wave;
	bool on_card = false;
	ssize_t n;
	int r;

	l.in_stride = quant_row_bytes(l.in_act, in_of(p)->ne[0]);
	l.down_stride = quant_row_bytes(l.down_act, l.n_ff);
	r = gather(&l, x);
	if (r == 0)
		r = download_x(c, x, n_tok, l.n_embd);
	while (r == 0 && (n = residency_layer_next(c->residency, wave, p->n_expert, &on_card)) != 0) {
		if (n < 0)
			r = (int)n;
		else
			r = on_card ? card_wave(&l, wave, (size_t)n) : cpu_wave(&l, wave, (size_t)n);
	}
	if (l.cpu_begun)
		backend_cpu_moe_end(c->cpu);
	return r < 0 ? r : sum(&l, out);
}

int moe_cuda(struct backend *b, const struct backend_moe *p, const float *x, size_t n_tok, float *out)
{
	struct backend_cuda *c = cuda_of(b);
	int r;

	assert(c->moe == p);
	r = is_small(n_tok) ? moe_small(c, p, x, n_tok, out) : moe_large(c, p, x, n_tok, out);
	c->moe = NULL;
	backend_cuda_drop_kept(c);
	return r;
}

/* ---- recorded steps ---- */

int moe_cuda_note_graph(struct backend_cuda *c)
{
	size_t n_used = c->model->n_expert_used;
	const uint32_t *chosen = c->graph.chosen.host;

	for (size_t i = 0; i < c->graph.n_layers; i++) {
		const struct catalog_layer *l = &c->model->catalog->layers[c->graph.layers[i]];
		struct route route;

		route_init(&route, c->route_mem, 1, n_used, l->n_expert);
		memcpy(route.chosen, chosen + i * n_used, n_used * sizeof(*chosen));
		if (route_sort(&route) < 0)
			return -ENODEV;
		residency_note_layer(c->residency, c->graph.layers[i], route.active, route.n_rows,
				     route.n_active);
	}
	residency_note_graph(c->residency);
	return 0;
}
