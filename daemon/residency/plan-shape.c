/* SPDX-License-Identifier: MIT */
/*
 * plan-shape.c: what a plan has to know of a model: from a file, or of one that is built in. See plan.h.
 *
 * Pure, any thread; reads the directory of a file, never its weights. Refuses to know families: names of tensors and keys that all of
 * them have say which layers attend, which keep a state, and how wide things are. A file is hostile: sums are checked, and loops are
 * bounded by the catalog and the number of tensors.
 */
#include "daemon/residency/plan.h"

#include <inttypes.h>

/* More bytes than this of one thing of one conversation are a mistake in the file. */
#define BELIEVABLE 1e15
#define F16_BYTES  2
#define F32_BYTES  4

enum { ATTENDS = 1, KEEPS_STATE = 2, JOINT = 4 };

struct reader {
	const struct catalog *c;
	const char *arch;
	size_t arch_len;
	uint8_t *kind;   /* [n_layers] of the above */
	uint64_t *width; /* [n_layers]: rows of all matrices of the trunk */
	double weights;  /* that a token meets, experts but for the router left out */
};

static uint32_t key(const struct reader *r, const char *name)
{
	uint32_t value = 0;
	char full[128];

	snprintf(full, sizeof(full), "%.*s.%s", (int)r->arch_len, r->arch, name);
	gguf_get_u32(r->c->gguf, full, &value);
	return value;
}

/* Of the layer at hand, or of all together where the file has a number for each. */
static double sum_of_key(const struct reader *r, const char *name, uint32_t n_layers)
{
	const struct gguf_array *list;
	char full[128];
	double sum = 0;
	int64_t value;

	snprintf(full, sizeof(full), "%.*s.%s", (int)r->arch_len, r->arch, name);
	list = gguf_get_array(r->c->gguf, full);
	if (!list)
		return (double)key(r, name) * n_layers;
	for (size_t i = 0; i < MIN(gguf_array_n(list), (size_t)r->c->n_layers); i++)
		if (gguf_array_i64(list, i, &value) == 0 && value > 0)
			sum += (double)value;
	return sum;
}

/* ---- tensors ---- */

/* "blk.7.attn_k.weight": 7, and what follows; UINT32_MAX: of no layer. */
static uint32_t layer_of_name(const char *name, const char **ret_rest)
{
	unsigned long layer;
	char *end;

	*ret_rest = name;
	if (!startswith(name, "blk.") || name[4] < '0' || name[4] > '9')
		return UINT32_MAX;
	layer = strtoul(name + 4, &end, 10);
	if (*end != '.' || layer >= UINT32_MAX)
		return UINT32_MAX;
	*ret_rest = end + 1;
	return (uint32_t)layer;
}

static uint8_t kind_of_name(const char *rest)
{
	static const struct {
		const char *name;
		uint8_t kind;
	} names[] = {
		{ "attn_k.weight", ATTENDS }, { "attn_kv_a_mqa.weight", ATTENDS },
		{ "attn_qkv.weight", JOINT }, { "ssm_conv1d.weight", KEEPS_STATE },
		{ "ssm_a", KEEPS_STATE },     { "ssm_out.weight", KEEPS_STATE },
	};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (streq(rest, names[i].name))
			return names[i].kind;
	return 0;
}

static void look_at_tensor(struct reader *r, const struct gguf_tensor *t, bool is_table)
{
	double weights = (double)t->ne[0] * (double)t->ne[1] * (double)t->ne[2] * (double)t->ne[3];
	const char *rest;
	uint32_t layer = layer_of_name(t->name, &rest);

	if (is_table || (layer != UINT32_MAX && layer >= r->c->n_layers) || strstr(rest, "_exps."))
		return;
	r->weights += weights;
	if (layer == UINT32_MAX)
		return;
	r->kind[layer] |= kind_of_name(rest);
	if (t->n_dims >= 2)
		r->width[layer] += MIN(t->ne[1], UINT64_C(1) << 32);
}

static void look_at_tensors(struct reader *r, const struct gguf_tensor *table)
{
	for (size_t i = 0; i < gguf_n_tensors(r->c->gguf); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(r->c->gguf, i);

		look_at_tensor(r, t, t == table);
	}
}

/* ---- what follows from them ---- */

/* Keys and values of a token, and the state: heads' lengths as llama.cpp's keys have them; a compressed key (MLA) takes its rank and what
 * is rotated. */
static void size_conversation(const struct reader *r, struct plan_shape *s, double *ret_kv,
			      double *ret_state)
{
	uint32_t n_attention = 0, n_recurrent = 0, n_embd = key(r, "embedding_length");
	uint32_t n_head = MAX(key(r, "attention.head_count"), 1u),
		 rank = key(r, "attention.kv_lora_rank");
	double k = key(r, "attention.key_length"), v = key(r, "attention.value_length");
	double inner = key(r, "ssm.inner_size"), state = key(r, "ssm.state_size");
	double channels = inner + 2.0 * key(r, "ssm.group_count") * state, heads;

	for (uint32_t l = 0; l < r->c->n_layers; l++) {
		bool recurrent = r->kind[l] & KEEPS_STATE;

		n_recurrent += recurrent;
		n_attention += (r->kind[l] & ATTENDS) || (!recurrent && (r->kind[l] & JOINT));
	}
	heads = sum_of_key(r, "attention.head_count_kv", n_attention);
	k = k > 0 ? k : n_embd / n_head;
	v = v > 0 ? v : n_embd / n_head;
	*ret_kv = rank > 0 ? F16_BYTES * (double)n_attention *
				     ((double)rank + key(r, "rope.dimension_count"))
			   : F16_BYTES * heads * (k + v);
	*ret_state = F32_BYTES * n_recurrent * (MAX(key(r, "ssm.conv_kernel"), 1u) - 1.0) * channels +
		     F32_BYTES * n_recurrent * inner * state;
	s->kv_known = (n_attention == 0 || *ret_kv > 0) && (n_recurrent == 0 || *ret_state > 0);
}

/* A chunk's rows of everything that the widest layer computes, and logits of one. */
static double size_scratch(const struct reader *r, const struct gguf_tensor *output)
{
	double widest = 0, n_embd = key(r, "embedding_length");

	for (uint32_t l = 0; l < r->c->n_layers; l++) {
		const struct catalog_layer *layer = &r->c->layers[l];
		double width = (double)r->width[l] + 2 * n_embd;

		for (size_t i = 0; i < CATALOG_MATRICES; i++)
			if (layer->matrix[i])
				width += (double)MIN(key(r, "expert_used_count"), layer->n_expert) *
					 (double)layer->matrix[i]->ne[1];
		widest = MAX(widest, width);
	}
	return F32_BYTES * (PLAN_CHUNK_TOK * widest + (output ? (double)output->ne[1] : 0));
}

static int copy_layers(const struct reader *r, struct plan_shape *s, double *ret_weights)
{
	const struct catalog *c = r->c;

	s->layers = calloc(c->n_expert_layers, sizeof(*s->layers));
	if (!s->layers)
		return -ENOMEM;
	s->n_layers = c->n_expert_layers;
	s->n_all_layers = c->n_layers;
	s->block_bytes = c->block_bytes;
	s->block_bytes_max = c->block_bytes_max;
	for (uint32_t i = 0; i < c->n_expert_layers; i++) {
		const struct catalog_layer *l = &c->layers[c->expert_layers[i]];

		s->layers[i] = (struct plan_layer){ l->n_expert, l->block_bytes };
		s->n_expert_max = MAX(s->n_expert_max, l->n_expert);
		for (size_t k = 0; k < CATALOG_MATRICES; k++)
			if (l->matrix[k])
				*ret_weights += (double)MIN(s->n_used, l->n_expert) *
						(double)l->matrix[k]->ne[0] *
						(double)l->matrix[k]->ne[1];
	}
	return 0;
}

static int make_shape(struct reader *r, struct plan_shape *s, char **ret_error)
{
	const struct catalog *c = r->c;
	const struct gguf_tensor *table = gguf_tensor(c->gguf, "token_embd.weight"),
				 *output = gguf_tensor(c->gguf, "output.weight");
	double kv, state, scratch, weights = 0;

	/* The table is the output too: all of it is read. */
	if (!output) {
		output = table;
		table = NULL;
	}
	look_at_tensors(r, table);
	s->n_used = MIN(key(r, "expert_used_count"), c->n_blocks);
	s->context_trained = key(r, "context_length");
	s->table_bytes = table ? table->bytes : 0;
	s->trunk_bytes = c->trunk_bytes - s->table_bytes;
	s->trunk_token_bytes =
		s->trunk_bytes + (table ? quant_row_bytes(table->type, table->ne[0]) : 0);
	if (copy_layers(r, s, &weights) < 0)
		return fail(ret_error, -ENOMEM, "no memory for %" PRIu32 " layers", c->n_expert_layers);
	size_conversation(r, s, &kv, &state);
	scratch = size_scratch(r, output);
	if ((double)c->trunk_bytes + (double)c->block_bytes >= BELIEVABLE)
		return fail(ret_error, -EBADMSG, "%s: a model of %g bytes", gguf_part(c->gguf, 0)->path,
			    (double)c->trunk_bytes + (double)c->block_bytes);
	if (!(kv < BELIEVABLE) || !(state < BELIEVABLE) || !(scratch < BELIEVABLE))
		return fail(ret_error, -EBADMSG,
			    "%s: a token of a conversation takes %g bytes, its state %g, work on it %g",
			    gguf_part(c->gguf, 0)->path, kv, state, scratch);
	s->kv_token_bytes = (uint64_t)kv;
	s->recurrent_bytes = (uint64_t)state;
	s->scratch_bytes = (uint64_t)scratch;
	s->token_flops = 2 * (r->weights + weights);
	return 0;
}

int plan_shape_of_catalog(const struct catalog *c, struct plan_shape *ret, char **ret_error)
{
	struct reader r = { .c = c };
	_cleanup_(freep) uint64_t *width = calloc(MAX(c->n_layers, 1u), sizeof(*width));
	_cleanup_(freep) uint8_t *kind = calloc(MAX(c->n_layers, 1u), sizeof(*kind));
	_cleanup_(plan_shape_done) struct plan_shape s = {};
	const char *path = gguf_part(c->gguf, 0)->path;
	int err;

	if (!width || !kind)
		return fail(ret_error, -ENOMEM, "no memory for %" PRIu32 " layers", c->n_layers);
	r.width = width;
	r.kind = kind;
	if (gguf_get_str(c->gguf, "general.architecture", &r.arch, &r.arch_len) < 0 || r.arch_len > 64)
		return fail(ret_error, -EINVAL, "%s: does not say its architecture", path);
	if (c->n_blocks == 0)
		return fail(ret_error, -EINVAL, "%s: has no experts, so there is nothing to plan", path);
	if (key(&r, "expert_used_count") == 0)
		return fail(ret_error, -EINVAL, "%s: does not say how many experts a token uses", path);
	err = make_shape(&r, &s, ret_error);
	if (err < 0)
		return err;
	*ret = s;
	s = (struct plan_shape){};
	return 0;
}

void plan_shape_done(struct plan_shape *s)
{
	free(s->layers);
	*s = (struct plan_shape){};
}

/* ---- built in ---- */

#define QWEN35MOE "qwen35moe-35b-a3b-q4_k_m"

const char *plan_shape_list(void)
{
	return QWEN35MOE;
}

/*
 * Qwen3.5-35B-A3B as llama-quantize makes Q4_K_M of it, without the layer that predicts further tokens: 21.16 GB. The numbers are
 * those that plan_shape_of_catalog() finds in such a file (test-plan.c makes one). The ffn_down of the first and the last eighth of the
 * layers, and of every third between, is Q6_K, all else Q4_K.
 */
static int make_qwen35moe(struct plan_shape *s)
{
	enum { LAYERS = 40, EXPERTS = 256, Q4_BYTES = 1769472, Q6_BYTES = 2039808 };

	*s = (struct plan_shape){
		.n_layers = LAYERS,
		.n_all_layers = LAYERS,
		.n_used = 8,
		.n_expert_max = EXPERTS,
		.block_bytes_max = Q6_BYTES,
		.trunk_bytes = 1366190592,
		.trunk_token_bytes = 1366190592 + 1152,
		.table_bytes = 286064640,
		.scratch_bytes = 112797696,
		.kv_known = true,
		.kv_token_bytes = 10 * 2 * (256 + 256) * F16_BYTES,
		.recurrent_bytes = 30 * (3 * 8192 + 4096 * 128) * F32_BYTES,
		.context_trained = 262144,
		.token_flops = 5892859136.0,
	};
	s->layers = calloc(LAYERS, sizeof(*s->layers));
	if (!s->layers)
		return -ENOMEM;
	for (uint32_t l = 0; l < LAYERS; l++) {
		bool more = l < LAYERS / 8 || l >= LAYERS - LAYERS / 8 || (l - LAYERS / 8) % 3 == 2;

		s->layers[l] = (struct plan_layer){ EXPERTS, more ? Q6_BYTES : Q4_BYTES };
		s->block_bytes += EXPERTS * s->layers[l].block_bytes;
	}
	return 0;
}

int plan_shape_builtin(const char *name, struct plan_shape *ret)
{
	return streq(name, QWEN35MOE) ? make_qwen35moe(ret) : -ENOENT;
}
