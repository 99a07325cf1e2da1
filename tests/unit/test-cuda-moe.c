/* SPDX-License-Identifier: MIT */
/*
 * test-cuda-moe.c: the CUDA kernels of a layer of experts against the scalar reference: two launches
 * over few tokens, and tiles by expert over many, with what brings tokens to experts and back.
 * Bounds are those of weights.h.
 */
#include "tests/test.h"

#include "tests/unit/cuda.h"
#include "tests/unit/weights.h"

#include <math.h>

/* Layers. */

enum { N_EXPERT = 5, N_USED = 3 };

struct layer {
	const struct weight_type *up, *down;
	size_t n_embd, n_ff, n_tok, n_slots;
	uint8_t *gate_up[N_EXPERT], *w_down[N_EXPERT]; /* on the host; gate and up are fused */
	bool absent[N_EXPERT];
	uint8_t *act;
	uint32_t *expert;
	float *weight, *other, *out;
	struct cuda_moe args;
};

static void layer_free(struct layer *l)
{
	buffers_free();
	for (size_t e = 0; e < N_EXPERT; e++) {
		free(l->gate_up[e]);
		free(l->w_down[e]);
	}
	free(l->act);
	free(l->expert);
	free(l->weight);
	free(l->other);
	free(l->out);
}

static void layer_route(struct layer *l)
{
	l->expert = new_bytes(l->n_slots * sizeof(*l->expert));
	l->weight = new_floats(l->n_slots);
	l->other = new_floats(l->n_slots * l->n_embd);
	for (size_t s = 0; s < l->n_slots; s++) {
		l->expert[s] = (random_u32() % N_EXPERT + (uint32_t)(s % N_USED)) % N_EXPERT;
		/* What the CPU has not computed must not be looked at. */
		if (!l->absent[l->expert[s]])
			memset(l->other + s * l->n_embd, 0xff, l->n_embd * sizeof(float));
	}
}

static void layer_put(struct layer *l, uint32_t hidden_rows)
{
	enum quant_type form = cpu_act_type(l->up->type);
	size_t up_stride = quant_row_bytes(l->up->type, l->n_embd);
	size_t down_stride = quant_row_bytes(l->down->type, l->n_ff);
	struct cuda_expert table[N_EXPERT] = { 0 };
	bool all = true;

	for (size_t e = 0; e < N_EXPERT; e++) {
		all &= !l->absent[e];
		if (l->absent[e])
			continue;
		table[e].gate = put(l->gate_up[e], 2 * l->n_ff * up_stride);
		table[e].up = (const uint8_t *)table[e].gate + l->n_ff * up_stride;
		table[e].down = put(l->w_down[e], l->n_embd * down_stride);
	}
	l->args = (struct cuda_moe){
		.experts = put(table, sizeof(table)),
		.expert = put(l->expert, l->n_slots * sizeof(uint32_t)),
		.weight = put(l->weight, l->n_slots * sizeof(float)),
		.act = put(l->act, l->n_tok * quant_row_bytes(form, l->n_embd)),
		.hidden = put(NULL, l->n_slots * l->n_ff * sizeof(float)),
		.other = all ? NULL : put(l->other, l->n_slots * l->n_embd * sizeof(float)),
		.out = put(l->out, l->n_tok * l->n_embd * sizeof(float)),
		.act_stride = quant_row_bytes(form, l->n_embd),
		.up_stride = up_stride,
		.down_stride = down_stride,
		.n_tok = (uint32_t)l->n_tok,
		.n_used = N_USED,
		.n_embd = (uint32_t)l->n_embd,
		.n_ff = (uint32_t)l->n_ff,
		.hidden_act_bytes = (uint32_t)quant_row_bytes(cpu_act_type(l->down->type), l->n_ff),
		.hidden_rows = hidden_rows,
	};
}

/* absent: a bit for each expert. */
static void layer_new(struct layer *l, const struct weight_type *up, const struct weight_type *down,
		      size_t n_tok, unsigned absent, uint32_t hidden_rows)
{
	/* Widths that the blocks of both matrices divide; the float ones are odd. */
	size_t n_embd = quant_info(up->type)->block_elems, n_ff = quant_info(down->type)->block_elems;
	_cleanup_(freep) float *x = NULL;

	*l = (struct layer){ .up = up, .down = down, .n_tok = n_tok, .n_slots = n_tok * N_USED };
	l->n_embd = n_embd == 1 ? 83 : n_embd == 32 ? 96 : 256;
	l->n_ff = n_ff == 1 ? 45 : n_ff == 32 ? 96 : 512;
	x = new_floats(n_tok * l->n_embd);
	l->act = new_activations(cpu_act_type(up->type), x, l->n_embd, n_tok);
	l->out = new_floats(n_tok * l->n_embd);
	for (size_t e = 0; e < N_EXPERT; e++) {
		l->absent[e] = absent >> e & 1;
		l->gate_up[e] = new_weights(up->type, l->n_embd, 2 * l->n_ff, false);
		l->w_down[e] = new_weights(down->type, l->n_ff, l->n_embd, false);
	}
	layer_route(l);
	layer_put(l, hidden_rows);
}

/* hidden as the device made it, against the reference; an absent expert's rows are as they were. */
static void check_hidden(const struct layer *l, size_t slot, const float *hidden)
{
	size_t act_stride = l->args.act_stride, n = 2 * l->n_ff;
	const uint8_t *w = l->gate_up[l->expert[slot]], *act = l->act + slot / N_USED * act_stride;
	_cleanup_(freep) float *y = new_floats(n);
	_cleanup_(freep) double *magnitude = NULL;

	if (l->absent[l->expert[slot]]) {
		for (size_t i = 0; i < l->n_ff; i++)
			assert_true(isnan(hidden[i]));
		return;
	}
	cpu_kernels_ref.matmul[l->up->type](l->n_embd, w, l->args.up_stride, n, act, act_stride, 1,
					    y, n, NULL);
	magnitude = new_magnitudes(l->up->type, w, l->n_embd, n, act, 1);
	for (size_t i = 0; i < l->n_ff; i++) {
		double gate = (double)y[i], up = (double)y[l->n_ff + i],
		       silu = gate / (1 + exp(-gate));

		/* The slope of silu is below 1.1; its own roundings are the last term. */
		assert_near("hidden", slot, i, hidden[i], silu * up,
			    REL * (1.1 * fabs(up) * magnitude[i] + fabs(silu) * magnitude[l->n_ff + i]) +
				    16 * U * fabs(silu * up));
	}
}

/*
 * out of one token, from the device's own hidden: an activation that rounds the other way for a
 * difference in the last bit of hidden is not this launch's error.
 */
static void check_out(const struct layer *l, size_t t, const float *hidden, const float *out)
{
	enum quant_type form = cpu_act_type(l->down->type);
	_cleanup_(freep) float *y = new_floats(l->n_embd);
	_cleanup_(freep) double *want = new_bytes(l->n_embd * sizeof(*want)),
				*bound = new_bytes(l->n_embd * sizeof(*bound));

	for (size_t i = 0; i < l->n_embd; i++) {
		want[i] = (double)l->out[t * l->n_embd + i];
		bound[i] = 8 * U * fabs(want[i]);
	}
	for (size_t slot = t * N_USED; slot < (t + 1) * N_USED; slot++) {
		_cleanup_(freep) uint8_t *act = NULL;
		_cleanup_(freep) double *magnitude = NULL;
		const float *part = l->other + slot * l->n_embd;
		double weight = (double)l->weight[slot];

		if (!l->absent[l->expert[slot]]) {
			const uint8_t *w = l->w_down[l->expert[slot]];

			act = new_activations(form, hidden + slot * l->n_ff, l->n_ff, 1);
			cpu_kernels_ref.matmul[l->down->type](l->n_ff, w, l->args.down_stride,
							      l->n_embd, act, 0, 1, y, l->n_embd, NULL);
			magnitude = new_magnitudes(l->down->type, w, l->n_ff, l->n_embd, act, 1);
			part = y;
		}
		for (size_t i = 0; i < l->n_embd; i++) {
			want[i] += weight * (double)part[i];
			bound[i] += fabs(weight) *
				    (magnitude ? REL * magnitude[i] : 8 * U * fabs((double)part[i]));
		}
	}
	for (size_t i = 0; i < l->n_embd; i++)
		assert_near(l->down->name, t, i, out[i], want[i], bound[i]);
}

static void check_layer(struct layer *l, const float *hidden, const float *out)
{
	for (size_t slot = 0; slot < l->n_slots; slot++)
		check_hidden(l, slot, hidden + slot * l->n_ff);
	for (size_t t = 0; t < l->n_tok; t++)
		check_out(l, t, hidden, out + t * l->n_embd);
	layer_free(l);
}

/* Few tokens. */

static void check_few(struct layer *l)
{
	uint32_t hidden_rows = l->args.hidden_rows ? l->args.hidden_rows : 1;
	_cleanup_(freep) float *hidden = NULL, *out = NULL;

	LAUNCH_TYPE("cuda_moe_up_", l->up->name, l->args, blocks(l->n_ff, CUDA_ROWS),
		    (unsigned)l->n_slots);
	LAUNCH_TYPE("cuda_moe_down_", l->down->name, l->args, blocks(l->n_embd, CUDA_ROWS),
		    (unsigned)l->n_tok, .shared_bytes = hidden_rows * l->args.hidden_act_bytes);
	hidden = get_floats(l->args.hidden, l->n_slots * l->n_ff);
	out = get_floats(l->args.out, l->n_tok * l->n_embd);
	check_layer(l, hidden, out);
}

static void test_experts(void **state)
{
	(void)state;
	GPU_OR_SKIP();

	for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
		struct layer l;

		layer_new(&l, &types[t], &types[t], 1, 0, N_USED);
		check_few(&l);
		layer_new(&l, &types[t], &types[t], 3, 0x0a, t % (N_USED + 1));
		check_few(&l);
	}
}

/* Q4_K_M has gate and up in one type and down in another. */
static void test_experts_mixed(void **state)
{
	struct layer l;
	(void)state;
	GPU_OR_SKIP();

	layer_new(&l, &types[0], &types[2], 40, 0x05, 2);
	check_few(&l);
	layer_new(&l, &types[3], &types[6], 3, 0x12, 0);
	check_few(&l);
	layer_new(&l, &types[5], &types[3], 40, 0x0c, N_USED);
	check_few(&l);
}

static void test_experts_all_absent(void **state)
{
	struct layer l;
	(void)state;
	GPU_OR_SKIP();

	layer_new(&l, &types[0], &types[0], 3, 0x1f, N_USED);
	check_few(&l);
	layer_new(&l, &types[8], &types[8], 40, 0x1f, 0);
	check_few(&l);
}

/* Many tokens: tiles by expert. */

#define TILES_MAX 16

/* Cuts the places of an expert, n from `first` on. */
static void cut_tiles(struct cuda_moe_tile *tiles, uint32_t *n_tiles, uint32_t expert,
		      uint32_t first, uint32_t n)
{
	for (uint32_t end = first + n; first < end; first += CUDA_TILE_COLS) {
		assert_true(*n_tiles < TILES_MAX);
		tiles[(*n_tiles)++] =
			(struct cuda_moe_tile){ .expert = expert,
						.first = first,
						.n = MIN(end - first, (uint32_t)CUDA_TILE_COLS) };
	}
}

/* Places of each expert: tiles that are full, that end at every kind of place, and none. */
static const uint32_t places[] = { 70, 20, 0, 1, 64, 8, 41 };
enum { ABSENT = 1 };

struct tiled {
	const struct weight_type *type;
	size_t n, n_rows, n_places, y_bytes;
	uint8_t *w[ARRAY_SIZE(places)], *act; /* three matrices of each expert */
	struct cuda_expert experts[ARRAY_SIZE(places)];
	struct cuda_moe_tiled args;
};

static void tiled_free(struct tiled *t)
{
	buffers_free();
	for (size_t e = 0; e < ARRAY_SIZE(places); e++)
		free(t->w[e]);
	free(t->act);
}

static void tiled_new(struct tiled *t, const struct weight_type *type, size_t n, size_t n_rows,
		      uint32_t matrix)
{
	enum quant_type form = cpu_act_type(type->type);
	size_t stride = quant_row_bytes(type->type, n), act_stride = quant_row_bytes(form, n);
	struct cuda_moe_tile tiles[TILES_MAX];
	_cleanup_(freep) float *x = NULL;
	uint32_t n_tiles = 0;

	*t = (struct tiled){ .type = type, .n = n, .n_rows = n_rows };
	for (uint32_t e = 0; e < ARRAY_SIZE(places); t->n_places += places[e++]) {
		const uint8_t *w;

		cut_tiles(tiles, &n_tiles, e, (uint32_t)t->n_places, places[e]);
		t->w[e] = new_weights(type->type, n, 3 * n_rows, false);
		if (e == ABSENT)
			continue;
		w = put(t->w[e], 3 * n_rows * stride);
		t->experts[e] = (struct cuda_expert){ w, w + n_rows * stride, w + 2 * n_rows * stride };
	}
	x = new_floats(n * t->n_places);
	t->act = new_activations(form, x, n, t->n_places);
	t->args = (struct cuda_moe_tiled){ .experts = put(t->experts, sizeof(t->experts)),
					   .tiles = put(tiles, n_tiles * sizeof(*tiles)),
					   .act = put(t->act, t->n_places * act_stride),
					   .w_stride = stride,
					   .act_stride = act_stride,
					   .y_stride = n_rows + 3,
					   .n = (uint32_t)n,
					   .n_rows = (uint32_t)n_rows,
					   .n_tiles = n_tiles,
					   .matrix = matrix };
	t->y_bytes = t->n_places * t->args.y_stride * sizeof(float);
}

/* The caller frees. */
static float *tiled_run(const struct tiled *t, uint32_t grid_y)
{
	struct cuda_moe_tiled a = t->args;

	a.y = put(NULL, t->y_bytes);
	LAUNCH_TYPE("cuda_moe_tiled_", t->type->name, a, blocks(t->n_rows, CUDA_TILE_ROWS), grid_y);
	return get(a.y, t->y_bytes);
}

/* The same expert by expert, each a product of its own. */
static float *tiled_apart(const struct tiled *t)
{
	float *y = put(NULL, t->y_bytes);
	size_t first = 0;

	for (size_t e = 0; e < ARRAY_SIZE(places); first += places[e++]) {
		struct cuda_matmul a = { .act = (const uint8_t *)t->args.act + first * t->args.act_stride,
					 .y = y + first * t->args.y_stride,
					 .w_stride = t->args.w_stride,
					 .act_stride = t->args.act_stride,
					 .y_stride = t->args.y_stride,
					 .n = t->args.n,
					 .n_rows = t->args.n_rows,
					 .n_cols = places[e] };

		a.w = t->args.matrix == 0   ? t->experts[e].gate
		      : t->args.matrix == 1 ? t->experts[e].up
					    : t->experts[e].down;
		if (a.w && a.n_cols)
			LAUNCH_TYPE("cuda_matmul_tiled_", t->type->name, a,
				    blocks(t->n_rows, CUDA_TILE_ROWS),
				    blocks(a.n_cols, CUDA_TILE_COLS));
	}
	return get(y, t->y_bytes);
}

static void check_tiled_reference(const struct tiled *t, const float *y)
{
	size_t first = 0, n = t->n_rows;

	for (size_t e = 0; e < ARRAY_SIZE(places); first += places[e++]) {
		const uint8_t *w = t->w[e] + t->args.matrix * n * t->args.w_stride;
		const uint8_t *act = t->act + first * t->args.act_stride;
		_cleanup_(freep) float *want = new_floats(n * places[e]);
		_cleanup_(freep) double *magnitude = NULL;

		if (e == ABSENT)
			continue;
		cpu_kernels_ref.matmul[t->type->type](t->n, w, t->args.w_stride, n, act,
						      t->args.act_stride, places[e], want, n, NULL);
		magnitude = new_magnitudes(t->type->type, w, t->n, n, act, places[e]);
		for (size_t c = 0; c < places[e]; c++)
			for (size_t r = 0; r < n; r++)
				assert_near(t->type->name, first + c, r,
					    y[(first + c) * t->args.y_stride + r],
					    (double)want[c * n + r], REL * magnitude[c * n + r]);
	}
}

/* To the byte what tiles of one matrix give, and nothing is written elsewhere. */
static void test_tiled(void **state)
{
	static const size_t n_rows[] = { 65, 64, 30, 1 }; /* of each length */
	(void)state;

	GPU_OR_SKIP();
	seed = 20;
	for (size_t i = 0; i < ARRAY_SIZE(types); i++)
		for (size_t k = 0; k < ARRAY_SIZE(types[i].lengths) && types[i].lengths[k]; k++) {
			_cleanup_(freep) float *y = NULL, *want = NULL, *round = NULL;
			struct tiled t;

			tiled_new(&t, &types[i], types[i].lengths[k], n_rows[k],
				  (uint32_t)((i + k) % 3));
			y = tiled_run(&t, t.args.n_tiles);
			want = tiled_apart(&t);
			assert_memory_equal(y, want, t.y_bytes);
			check_tiled_reference(&t, y);
			if (k == 0) { /* more tiles than the grid has */
				round = tiled_run(&t, 3);
				assert_memory_equal(round, want, t.y_bytes);
			}
			tiled_free(&t);
		}
}

/* More tiles than any grid has; all but the last two are of an expert that is not there. */
static void test_tiled_round(void **state)
{
	enum { N = 65535 + 2 };
	static struct cuda_moe_tile tiles[N];
	const float w = 3, act[] = { 5, 7 };
	struct cuda_expert table[2] = { 0 };
	struct cuda_moe_tiled a = { .w_stride = sizeof(w),
				    .act_stride = sizeof(*act),
				    .y_stride = 1,
				    .n = 1,
				    .n_rows = 1,
				    .n_tiles = N };
	_cleanup_(freep) float *y = NULL;
	(void)state;

	GPU_OR_SKIP();
	for (uint32_t i = 0; i < N; i++)
		tiles[i] = (struct cuda_moe_tile){ .expert = i >= N - 2, .first = i == N - 1, .n = 1 };
	table[1].gate = put(&w, sizeof(w));
	a.experts = put(table, sizeof(table));
	a.tiles = put(tiles, sizeof(tiles));
	a.act = put(act, sizeof(act));
	a.y = put(NULL, sizeof(act));
	LAUNCH("cuda_moe_tiled_f32", a, 1, 65535);
	y = get_floats(a.y, 2);
	assert_true(y[0] == 15 && y[1] == 21);
	buffers_free();
}

static void check_gather(uint32_t n_rows, uint32_t bytes, uint64_t padding, uint32_t skew, unsigned grid_y)
{
	enum { N_FROM = 7 };
	size_t from_stride = bytes + 2 * padding, to_stride = bytes + padding;
	size_t from_bytes = skew + N_FROM * from_stride, to_bytes = skew + n_rows * to_stride;
	_cleanup_(freep) uint8_t *from = new_bytes(from_bytes), *want = new_bytes(to_bytes), *got = NULL;
	_cleanup_(freep) uint32_t *index = new_bytes(n_rows * sizeof(*index));
	struct cuda_gather_rows a = {
		.from_stride = from_stride, .to_stride = to_stride, .n_rows = n_rows, .bytes = bytes
	};
	uint8_t *to;

	random_bytes(from, from_bytes, false);
	memset(want, 0xff, to_bytes);
	for (size_t i = 0; i < n_rows; i++) {
		index[i] = random_u32() % N_FROM;
		memcpy(want + skew + i * to_stride, from + skew + index[i] * from_stride, bytes);
	}
	a.from = (uint8_t *)put(from, from_bytes) + skew;
	a.index = put(index, n_rows * sizeof(*index));
	to = put(NULL, to_bytes);
	a.to = to + skew;
	LAUNCH("cuda_gather_rows", a, blocks(bytes, 4 * CUDA_THREADS), grid_y);
	got = get(to, to_bytes);
	assert_memory_equal(got, want, to_bytes);
	buffers_free();
}

static void test_gather(void **state)
{
	static const uint32_t bytes[] = { 2, 4, 6, 34, 102, 292, 1022, 1024, 1026, 2336 };
	(void)state;

	GPU_OR_SKIP();
	seed = 21;
	for (size_t i = 0; i < ARRAY_SIZE(bytes); i++) {
		check_gather(11, bytes[i], 0, 0, 11);
		check_gather(11, bytes[i], 2, 0, 4);
		check_gather(1, bytes[i], 4, 2, 1);
	}
	check_gather(65535 + 3, 6, 0, 0, 65535);
}

static void check_sum(uint32_t n_tok, uint32_t n_used, uint32_t n_embd, unsigned grid_y)
{
	uint32_t n_places = n_tok * n_used;
	_cleanup_(freep) float *result = new_floats((size_t)n_places * n_embd),
			       *weight = new_floats(n_places),
			       *out = new_floats((size_t)n_tok * n_embd), *got = NULL;
	_cleanup_(freep) uint32_t *place = new_bytes(n_places * sizeof(*place));
	struct cuda_moe_sum a = { .n_tok = n_tok, .n_used = n_used, .n_embd = n_embd };

	for (uint32_t i = 0; i < n_places; i++) {
		uint32_t at = random_u32() % (i + 1);

		place[i] = place[at];
		place[at] = i;
	}
	a.result = put_floats(result, (size_t)n_places * n_embd);
	a.place = put(place, n_places * sizeof(*place));
	a.weight = put_floats(weight, n_places);
	a.out = put_floats(out, (size_t)n_tok * n_embd);
	LAUNCH("cuda_moe_sum", a, blocks(n_embd, CUDA_THREADS), grid_y);
	got = get_floats(a.out, (size_t)n_tok * n_embd);
	for (size_t i = 0; i < (size_t)n_tok * n_embd; i++) {
		float sum = 0;

		for (size_t slot = i / n_embd * n_used; slot < (i / n_embd + 1) * n_used; slot++)
			sum = fmaf(weight[slot], result[place[slot] * (size_t)n_embd + i % n_embd], sum);
		/* Exact: the order is the choices'. */
		assert_near("sum", i / n_embd, i % n_embd, got[i], (double)(out[i] + sum), 0);
	}
	buffers_free();
}

static void test_sum(void **state)
{
	(void)state;

	GPU_OR_SKIP();
	seed = 22;
	check_sum(1, 1, 1, 1);
	check_sum(33, 8, 300, 33);
	check_sum(33, 3, 256, 4);
	check_sum(65535 + 3, 2, 1, 65535);
}

/* Sorts the layer's slots by expert: *ret_place of a slot, *ret_token of a place; the caller frees. */
static void layer_sort(const struct layer *l, struct cuda_moe_tile *tiles, uint32_t *ret_n_tiles,
		       uint32_t **ret_place, uint32_t **ret_token)
{
	uint32_t *place = new_bytes(l->n_slots * sizeof(*place));
	uint32_t *token = new_bytes(l->n_slots * sizeof(*token));
	uint32_t n = 0, n_tiles = 0;

	for (uint32_t e = 0; e < N_EXPERT; e++) {
		uint32_t first = n;

		for (size_t slot = 0; slot < l->n_slots; slot++)
			if (l->expert[slot] == e) {
				place[slot] = n;
				token[n++] = (uint32_t)(slot / N_USED);
			}
		cut_tiles(tiles, &n_tiles, e, first, n - first);
	}
	*ret_n_tiles = n_tiles;
	*ret_place = place;
	*ret_token = token;
}

/* Rows of floats in the form that weights of this type multiply. */
static const void *to_form(enum quant_type type, const float *x, size_t n_rows, size_t width)
{
	static const char *const names[QUANT_TYPE_MAX] = {
		[QUANT_Q8_K] = "cuda_quantize_q8_k",
		[QUANT_Q8_0] = "cuda_quantize_q8_0",
		[QUANT_F16] = "cuda_round_f16",
		[QUANT_BF16] = "cuda_round_bf16",
	};
	enum quant_type form = cpu_act_type(type);
	struct cuda_quantize a = { .x = x,
				   .n_rows = (uint32_t)n_rows,
				   .width = (uint32_t)width,
				   .act_stride = quant_row_bytes(form, width) };

	if (form == QUANT_F32)
		return x;
	a.act = put(NULL, n_rows * a.act_stride);
	LAUNCH(names[form], a, blocks(width, 256), (unsigned)n_rows);
	return a.act;
}

static float *layer_product(const struct layer *l, const struct weight_type *type,
			    const struct cuda_moe_tiled *tiled, uint32_t matrix, float *y)
{
	struct cuda_moe_tiled a = *tiled;

	a.matrix = matrix;
	a.n = (uint32_t)(matrix == 2 ? l->n_ff : l->n_embd);
	a.n_rows = (uint32_t)(matrix == 2 ? l->n_embd : l->n_ff);
	a.w_stride = quant_row_bytes(type->type, a.n);
	a.act_stride = quant_row_bytes(cpu_act_type(type->type), a.n);
	a.y_stride = a.n_rows;
	a.y = y ?: put(NULL, l->n_slots * a.n_rows * sizeof(float));
	LAUNCH_TYPE("cuda_moe_tiled_", type->name, a, blocks(a.n_rows, CUDA_TILE_ROWS), a.n_tiles);
	return a.y;
}

/* What the CPU computed, by place. */
static float *put_others(const struct layer *l, const uint32_t *place)
{
	size_t width = l->n_embd * sizeof(float);
	_cleanup_(freep) uint8_t *result = new_bytes(l->n_slots * width);

	for (size_t slot = 0; slot < l->n_slots; slot++)
		memcpy(result + place[slot] * width, l->other + slot * l->n_embd, width);
	return put(result, l->n_slots * width);
}

/* The whole way of a batch, against the same bounds as the two launches. */
static void check_many(struct layer *l)
{
	struct cuda_moe_tile tiles[TILES_MAX];
	_cleanup_(freep) uint32_t *place = NULL, *token = NULL;
	_cleanup_(freep) float *by_place = NULL, *hidden = new_floats(l->n_slots * l->n_ff), *out = NULL;
	struct cuda_gather_rows gather = { .from = l->args.act,
					   .from_stride = l->args.act_stride,
					   .to_stride = l->args.act_stride,
					   .n_rows = (uint32_t)l->n_slots,
					   .bytes = (uint32_t)l->args.act_stride };
	struct cuda_moe_tiled tiled = { .experts = l->args.experts };
	struct cuda_flat flat = { .n = l->n_slots * l->n_ff };
	struct cuda_moe_sum sum = { .weight = l->args.weight,
				    .out = l->args.out,
				    .n_tok = l->args.n_tok,
				    .n_used = N_USED,
				    .n_embd = l->args.n_embd };

	layer_sort(l, tiles, &tiled.n_tiles, &place, &token);
	tiled.tiles = put(tiles, tiled.n_tiles * sizeof(*tiles));
	gather.index = put(token, l->n_slots * sizeof(*token));
	gather.to = put(NULL, l->n_slots * gather.to_stride);
	LAUNCH("cuda_gather_rows", gather, blocks(gather.bytes, 4 * CUDA_THREADS), gather.n_rows);
	tiled.act = gather.to;
	flat.a = layer_product(l, l->up, &tiled, 0, NULL);
	flat.b = flat.y = layer_product(l, l->up, &tiled, 1, NULL);
	LAUNCH("cuda_silu_mul", flat, blocks(flat.n, CUDA_THREADS));
	tiled.act = to_form(l->down->type, flat.y, l->n_slots, l->n_ff);
	sum.place = put(place, l->n_slots * sizeof(*place));
	sum.result = layer_product(l, l->down, &tiled, 2, put_others(l, place));
	LAUNCH("cuda_moe_sum", sum, blocks(l->n_embd, CUDA_THREADS), sum.n_tok);

	by_place = get_floats(flat.y, flat.n);
	for (size_t slot = 0; slot < l->n_slots; slot++)
		memcpy(hidden + slot * l->n_ff, by_place + place[slot] * l->n_ff,
		       l->n_ff * sizeof(*hidden));
	out = get_floats(sum.out, l->n_tok * l->n_embd);
	check_layer(l, hidden, out);
}

static void test_many(void **state)
{
	struct layer l;
	(void)state;

	GPU_OR_SKIP();
	seed = 23;
	for (size_t t = 0; t < ARRAY_SIZE(types); t++) {
		layer_new(&l, &types[t], &types[t], 20, 0x0a, N_USED);
		check_many(&l);
	}
	/* More than a tile for each expert; gate and up in one type, down in another. */
	layer_new(&l, &types[0], &types[2], 110, 0, N_USED);
	check_many(&l);
	layer_new(&l, &types[5], &types[3], 110, 0x11, N_USED);
	check_many(&l);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_experts),
		cmocka_unit_test(test_experts_mixed),
		cmocka_unit_test(test_experts_all_absent),
		cmocka_unit_test(test_tiled),
		cmocka_unit_test(test_tiled_round),
		cmocka_unit_test(test_gather),
		cmocka_unit_test(test_sum),
		cmocka_unit_test(test_many),
	};

	return cmocka_run_group_tests(tests, open_device, close_device);
}
