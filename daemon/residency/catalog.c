/* SPDX-License-Identifier: MIT */
/*
 * catalog.c: sorts the bytes of a model into blocks, trunk and what nobody reads. See catalog.h.
 *
 * gguf_open() has refused tensors that overlap or leave their file, so what is left to check is
 * what names and shapes of expert tensors claim about each other. Tensors are walked in the order
 * of their places, which is all that merging the trunk takes. Pure; any thread.
 * Invariant: a tensor is in exactly one of the three, whole; sums cannot overflow, since all parts
 * are mapped side by side.
 */
#include "daemon/residency/catalog.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>

/* The file chooses these numbers, memory is ours. The largest models have hundreds and 2^15. */
#define LAYERS_MAX 65536
#define BLOCKS_MAX ((uint32_t)1 << 20)

/* Less than this between two tensors is padding: the largest alignment that a GGUF may ask for. */
#define PADDING_MAX 65536

enum matrix { MATRIX_GATE, MATRIX_UP, MATRIX_DOWN };

static const struct {
	const char *name; /* without "blk.N." */
	enum matrix matrix;
	bool fused;
} expert_names[] = {
	{ "ffn_gate_exps.weight", MATRIX_GATE, false },
	{ "ffn_gate_up_exps.weight", MATRIX_GATE, true },
	{ "ffn_up_exps.weight", MATRIX_UP, false },
	{ "ffn_down_exps.weight", MATRIX_DOWN, false },
};

/* What a tensor's name says. */
struct role {
	bool in_layer, expert, fused;
	uint32_t layer; /* UINT32_MAX: that or more */
	enum matrix matrix;
};

static struct role role_of(const char *name)
{
	struct role role = {};
	uint64_t layer = 0;
	const char *s;

	if (!startswith(name, "blk."))
		return role;
	s = name + strlen("blk.");
	if (*s < '0' || *s > '9' || (*s == '0' && s[1] != '.'))
		return role;
	for (; *s >= '0' && *s <= '9'; s++)
		layer = MIN(layer * 10 + (uint64_t)(*s - '0'), (uint64_t)UINT32_MAX);
	if (*s != '.')
		return role;
	role.in_layer = true;
	role.layer = (uint32_t)layer;
	for (size_t i = 0; i < ARRAY_SIZE(expert_names); i++) {
		if (!streq(s + 1, expert_names[i].name))
			continue;
		role.expert = true;
		role.fused = expert_names[i].fused;
		role.matrix = expert_names[i].matrix;
	}
	return role;
}

_printf_(4, 5) static int refuse(const struct catalog *c, const struct gguf_tensor *t,
				 char **ret_error, const char *format, ...)
{
	_cleanup_(freep) char *reason = NULL;
	va_list ap;
	int r;

	va_start(ap, format);
	r = vasprintf(&reason, format, ap);
	va_end(ap);
	if (r < 0)
		reason = NULL;
	return fail(ret_error, -EBADMSG, "%s: tensor \"%s\": %s", gguf_part(c->gguf, t->part)->path,
		    t->name, reason ? reason : "no memory to say why");
}

static int by_place(const void *a, const void *b)
{
	const struct gguf_tensor *s = *(const struct gguf_tensor *const *)a;
	const struct gguf_tensor *t = *(const struct gguf_tensor *const *)b;

	if (s->part != t->part)
		return s->part < t->part ? -1 : 1;
	return (s->offset > t->offset) - (s->offset < t->offset);
}

/* All tensors in file order. NULL: none, or no memory. */
static const struct gguf_tensor **sorted(const struct gguf *g)
{
	size_t n = gguf_n_tensors(g);
	const struct gguf_tensor **list = n > 0 ? reallocarray(NULL, n, sizeof(*list)) : NULL;

	if (!list)
		return NULL;
	for (size_t i = 0; i < n; i++)
		list[i] = gguf_tensor_at(g, i);
	qsort(list, n, sizeof(*list), by_place);
	return list;
}

static int make_layers(struct catalog *c, uint32_t n_layers, char **ret_error)
{
	for (size_t i = 0; n_layers == 0 && i < gguf_n_tensors(c->gguf); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(c->gguf, i);
		struct role role = role_of(t->name);

		if (!role.in_layer)
			continue;
		if (role.layer >= LAYERS_MAX)
			return refuse(c, t, ret_error, "its layer is above %d", LAYERS_MAX - 1);
		c->n_layers = MAX(c->n_layers, role.layer + 1);
	}
	if (n_layers > LAYERS_MAX)
		return fail(ret_error, -EBADMSG, "%s: %" PRIu32 " layers, more than %d",
			    gguf_part(c->gguf, 0)->path, n_layers, LAYERS_MAX);
	if (n_layers > 0)
		c->n_layers = n_layers;
	if (c->n_layers == 0)
		return 0;
	c->layers = calloc(c->n_layers, sizeof(*c->layers));
	c->expert_layers = calloc(c->n_layers, sizeof(*c->expert_layers));
	if (!c->layers || !c->expert_layers)
		return fail(ret_error, -ENOMEM, "no memory for %" PRIu32 " layers", c->n_layers);
	for (uint32_t l = 0; l < c->n_layers; l++)
		c->layers[l].first_block = CATALOG_NONE;
	return 0;
}

/* An expert tensor of a layer that runs. */
static int bind_experts(struct catalog *c, const struct gguf_tensor *t, const struct role *role,
			char **ret_error)
{
	struct catalog_layer *l = &c->layers[role->layer];

	if (l->matrix[role->matrix])
		return refuse(c, t, ret_error, "the layer has \"%s\" too",
			      l->matrix[role->matrix]->name);
	if (t->ne[3] != 1)
		return refuse(c, t, ret_error, "has 4 dimensions");
	if (t->ne[2] > BLOCKS_MAX)
		return refuse(c, t, ret_error, "%" PRIu64 " experts, more than %" PRIu32, t->ne[2],
			      BLOCKS_MAX);
	if (l->n_expert > 0 && t->ne[2] != l->n_expert)
		return refuse(c, t, ret_error,
			      "has %" PRIu64 " experts, another tensor of the layer has %" PRIu32,
			      t->ne[2], l->n_expert);
	l->n_expert = (uint32_t)t->ne[2];
	l->matrix[role->matrix] = t;
	l->expert_bytes[role->matrix] = t->bytes / t->ne[2];
	l->block_bytes += l->expert_bytes[role->matrix];
	return 0;
}

/* All expert tensors are bound. */
static int number_blocks(struct catalog *c, char **ret_error)
{
	for (uint32_t i = 0; i < c->n_layers; i++) {
		struct catalog_layer *l = &c->layers[i];
		const struct gguf_tensor *in = l->matrix[MATRIX_GATE] ? l->matrix[MATRIX_GATE]
								      : l->matrix[MATRIX_UP];

		if (!in && !l->matrix[MATRIX_DOWN])
			continue;
		if (!in)
			return refuse(c, l->matrix[MATRIX_DOWN], ret_error,
				      "the layer has neither gate nor up");
		if (!l->matrix[MATRIX_DOWN])
			return refuse(c, in, ret_error, "the layer has no ffn_down_exps.weight");
		if (role_of(in->name).fused && l->matrix[MATRIX_UP])
			return refuse(c, l->matrix[MATRIX_UP], ret_error,
				      "the layer has \"%s\" too", in->name);
		if (l->n_expert > BLOCKS_MAX - c->n_blocks)
			return refuse(c, in, ret_error,
				      "with its %" PRIu32 " experts the model has more than %" PRIu32,
				      l->n_expert, BLOCKS_MAX);
		l->first_block = c->n_blocks;
		c->n_blocks += l->n_expert;
		c->block_bytes += l->n_expert * l->block_bytes;
		c->block_bytes_max = MAX(c->block_bytes_max, l->block_bytes);
		c->expert_layers[c->n_expert_layers++] = i;
	}
	return 0;
}

/* t: the next in file order. extend: nothing else lies between it and the last range. */
static void add_trunk(struct catalog *c, const struct gguf_tensor *t, bool extend)
{
	struct catalog_range *last = c->n_trunk > 0 ? &c->trunk[c->n_trunk - 1] : NULL;
	uint64_t end = last ? last->offset + last->bytes : 0;

	assert(!last || last->part < t->part || (last->part == t->part && end <= t->offset));
	if (extend && last->part == t->part && t->offset - end < PADDING_MAX) {
		last->bytes += t->offset - end + t->bytes;
		c->trunk_bytes += t->offset - end + t->bytes;
		return;
	}
	c->trunk[c->n_trunk++] = (struct catalog_range){
		.part = t->part, .offset = t->offset, .bytes = t->bytes, .data = t->data
	};
	c->trunk_bytes += t->bytes;
}

static int sort_out(struct catalog *c, const struct gguf_tensor *const *list, char **ret_error)
{
	bool after_trunk = false;
	int r;

	for (size_t i = 0; i < gguf_n_tensors(c->gguf); i++) {
		struct role role = role_of(list[i]->name);
		bool unused = role.in_layer && role.layer >= c->n_layers;

		if (unused) {
			c->unused_bytes += list[i]->bytes;
		} else if (role.expert) {
			r = bind_experts(c, list[i], &role, ret_error);
			if (r < 0)
				return r;
		} else {
			add_trunk(c, list[i], after_trunk);
		}
		after_trunk = !unused && !role.expert;
	}
	return number_blocks(c, ret_error);
}

/* FNV-1a: a mark to tell models apart, not a proof. */
static uint64_t hash(uint64_t h, const void *data, size_t bytes)
{
	const uint8_t *p = data;

	for (size_t i = 0; i < bytes; i++)
		h = (h ^ p[i]) * 0x100000001b3;
	return h;
}

static uint64_t identity(const struct gguf *g)
{
	uint64_t h = 0xcbf29ce484222325;

	for (size_t i = 0; i < gguf_n_parts(g); i++)
		h = hash(h, &gguf_part(g, i)->bytes, sizeof(uint64_t));
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);

		h = hash(h, t->name, strlen(t->name) + 1);
		h = hash(h, &t->type, sizeof(t->type));
		h = hash(h, t->ne, sizeof(t->ne));
		h = hash(h, &t->part, sizeof(t->part));
		h = hash(h, &t->offset, sizeof(t->offset));
	}
	return h;
}

int catalog_new(const struct gguf *g, uint32_t n_layers, struct catalog **ret, char **ret_error)
{
	_cleanup_(catalog_freep) struct catalog *c = calloc(1, sizeof(*c));
	_cleanup_(freep) const struct gguf_tensor **list = sorted(g);
	size_t n = gguf_n_tensors(g);
	int r;

	if (c && n > 0)
		c->trunk = reallocarray(NULL, n, sizeof(*c->trunk));
	if (!c || (n > 0 && (!list || !c->trunk)))
		return fail(ret_error, -ENOMEM, "no memory for %zu tensors", n);
	c->gguf = g;
	c->identity = identity(g);
	r = make_layers(c, n_layers, ret_error);
	if (r == 0)
		r = sort_out(c, list, ret_error);
	if (r < 0)
		return r;
	*ret = TAKE_PTR(c);
	return 0;
}

struct catalog *catalog_free(struct catalog *c)
{
	if (!c)
		return NULL;
	free(c->layers);
	free(c->expert_layers);
	free(c->trunk);
	free(c);
	return NULL;
}

uint32_t catalog_layer_of(const struct catalog *c, uint32_t block)
{
	uint32_t lo = 0, hi = c->n_expert_layers;

	assert(block < c->n_blocks);
	/* The answer is in [lo, hi). */
	while (hi - lo > 1) {
		uint32_t mid = lo + (hi - lo) / 2;

		if (c->layers[c->expert_layers[mid]].first_block <= block)
			lo = mid;
		else
			hi = mid;
	}
	return c->expert_layers[lo];
}

uint64_t catalog_block_bytes(const struct catalog *c, uint32_t block)
{
	return c->layers[catalog_layer_of(c, block)].block_bytes;
}

bool catalog_in_trunk(const struct catalog *c, const struct gguf_tensor *t)
{
	struct role role = role_of(t->name);

	return !role.expert && !(role.in_layer && role.layer >= c->n_layers);
}

void catalog_block(const struct catalog *c, uint32_t block, struct catalog_block *ret)
{
	uint32_t layer = catalog_layer_of(c, block);
	const struct catalog_layer *l = &c->layers[layer];
	struct catalog_block b = { .layer = layer,
				   .expert = block - l->first_block,
				   .bytes = l->block_bytes };

	for (size_t i = 0; i < CATALOG_MATRICES; i++) {
		const struct gguf_tensor *t = l->matrix[i];
		uint64_t at = b.expert * l->expert_bytes[i];

		if (!t)
			continue;
		b.range[b.n_ranges++] = (struct catalog_range){
			.part = t->part,
			.offset = t->offset + at,
			.bytes = l->expert_bytes[i],
			.data = t->data ? (const char *)t->data + at : NULL,
		};
	}
	*ret = b;
}
