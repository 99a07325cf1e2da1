/* SPDX-License-Identifier: MIT */
/*
 * arch-decoder.c: loads and runs what the families have in common. See arch-decoder.h.
 *
 * Owns no state: struct decoder is the model's, activations are the graph's. load() and forward()
 * of a family call it, on the engine thread. Refuses to know families: what differs is in the
 * switches of struct decoder. Invariant: what forward takes of the graph is what decoder_finish()
 * has summed up.
 */
#include "daemon/model/arch-decoder.h"

#include "daemon/engine/graph.h"
#include "daemon/model/model.h"

#include <inttypes.h>
#include <math.h>

#define EXPERTS_MAX 4096

void *decoder_new(struct model *m, size_t size, char **ret_error)
{
	m->arch_data = calloc(1, size);
	if (!m->arch_data)
		(void)fail(ret_error, -ENOMEM, "%s: no memory", m->path);
	return m->arch_data;
}

void decoder_unload(struct model *m)
{
	struct decoder *d = m->arch_data;

	if (!d)
		return;
	free(d->freq);
	free(d->layers);
	free(d);
	m->arch_data = NULL;
}

/* Loading: numbers. */

/* Numbers that constrain each other; the rest is in the table of decoder_load_sizes(). */
static int check_attention(const struct model *m, const struct decoder *d, uint32_t value_dim,
			   char **ret_error)
{
	if (value_dim != d->head_dim)
		return fail(ret_error, -EBADMSG,
			    "%s: attention.value_length %" PRIu32 " differs from key_length %" PRIu32,
			    m->path, value_dim, d->head_dim);
	if (d->n_head % d->n_head_kv != 0)
		return fail(ret_error, -EBADMSG,
			    "%s: %" PRIu32 " heads cannot share %" PRIu32 " key/value heads",
			    m->path, d->n_head, d->n_head_kv);
	if (d->rope.n_rot % 2 != 0 || d->rope.n_rot > d->head_dim)
		return fail(ret_error, -EBADMSG,
			    "%s: rope.dimension_count %" PRIu32 " is odd or above key_length %" PRIu32,
			    m->path, d->rope.n_rot, d->head_dim);
	return 0;
}

/* What is not there follows from the rest. */
static int load_attention(const struct model *m, struct decoder *d, char **ret_error)
{
	uint32_t value_dim = 0;
	const struct arch_number numbers[] = {
		{ "attention.head_count_kv", &d->n_head_kv, 1, DECODER_HEADS_MAX, true },
		{ "attention.key_length", &d->head_dim, 1, DECODER_HEAD_DIM_MAX, true },
		{ "attention.value_length", &value_dim, 1, DECODER_HEAD_DIM_MAX, true },
		{ "rope.dimension_count", &d->rope.n_rot, 2, DECODER_HEAD_DIM_MAX, true },
	};
	int r = arch_get_u32(m, "attention.head_count", false, 1, DECODER_HEADS_MAX, &d->n_head,
			     ret_error);

	if (r < 0)
		return r;
	d->n_head_kv = d->n_head;
	r = arch_get_numbers(m, numbers, ARRAY_SIZE(numbers), ret_error);
	if (r < 0)
		return r;
	if (d->head_dim == 0)
		d->head_dim = m->n_embd / d->n_head;
	if (d->head_dim == 0 || d->head_dim > DECODER_HEAD_DIM_MAX)
		return fail(ret_error, -EBADMSG,
			    "%s: embedding_length %" PRIu32 " does not fit %" PRIu32 " heads",
			    m->path, m->n_embd, d->n_head);
	if (d->rope.n_rot == 0)
		d->rope.n_rot = d->head_dim;
	return check_attention(m, d, value_dim > 0 ? value_dim : d->head_dim, ret_error);
}

int decoder_load_sizes(struct model *m, struct decoder *d, const char *known, char **ret_error)
{
	const struct arch_number numbers[] = {
		{ "block_count", &m->n_block, 1, DECODER_LAYERS_MAX, false },
		{ "context_length", &m->n_ctx_train, 1, INT32_MAX, false },
		{ "embedding_length", &m->n_embd, 1, DECODER_DIM_MAX, false },
	};
	int r = arch_get_numbers(m, numbers, ARRAY_SIZE(numbers), ret_error);

	if (r == 0)
		r = load_attention(m, d, ret_error);
	if (r == 0)
		r = arch_get_f32(m, "attention.layer_norm_rms_epsilon", false, 1e-12f, 1e-2f,
				 &d->eps, ret_error);
	if (r == 0)
		r = arch_refuse_unknown(m, known, ret_error);
	if (r == 0)
		r = arch_get_rope(m, d->rope.n_rot, &d->freq, &d->rope.mscale, ret_error);
	if (r < 0)
		return r;
	if (d->n_nextn >= m->n_block)
		return fail(ret_error, -EBADMSG,
			    "%s: nextn_predict_layers %" PRIu32 " leaves no layer of %" PRIu32,
			    m->path, d->n_nextn, m->n_block);
	d->scale = 1.0f / sqrtf((float)d->head_dim);
	d->rope.freq = d->freq;
	d->rope.pairs = d->rope_pairs;
	m->n_layer = m->n_block - d->n_nextn;
	d->layers = calloc(m->n_layer, sizeof(*d->layers));
	if (!d->layers)
		return fail(ret_error, -ENOMEM, "%s: no memory for %" PRIu32 " layers", m->path,
			    m->n_layer);
	return 0;
}

int decoder_load_ffn(struct model *m, struct decoder *d, char **ret_error)
{
	return arch_get_u32(m, "feed_forward_length", false, 1, DECODER_DIM_MAX, &d->n_ff, ret_error);
}

int decoder_load_experts(struct model *m, struct decoder *d, const char *ff_key, char **ret_error)
{
	/* llama.cpp's numbers: 1 softmax over all, 3 over the chosen */
	uint32_t gating = d->gating == BACKEND_GATING_CHOSEN ? 3 : 1;
	const struct arch_number numbers[] = {
		{ "expert_count", &d->n_expert, 1, EXPERTS_MAX, false },
		{ "expert_used_count", &d->n_used, 1, EXPERTS_MAX, false },
		{ "expert_gating_func", &gating, gating, gating, true },
		{ ff_key, &d->n_ff_expert, 1, DECODER_DIM_MAX, false },
	};
	int r = arch_get_numbers(m, numbers, ARRAY_SIZE(numbers), ret_error);

	if (r < 0)
		return r;
	if (d->n_used > d->n_expert)
		return fail(ret_error, -EBADMSG,
			    "%s: expert_used_count %" PRIu32 " is above expert_count %" PRIu32,
			    m->path, d->n_used, d->n_expert);
	m->n_expert_used = d->n_used;
	return 0;
}

/* Loading: tensors. */

int decoder_bind_model(struct model *m, struct decoder *d, char **ret_error)
{
	const struct gguf_tensor *embd = gguf_tensor(m->gguf, "token_embd.weight");
	uint64_t n_vocab = embd ? embd->ne[1] : 1, n_embd = m->n_embd;
	const struct arch_tensor list[] = {
		{ "token_embd.weight", &d->embd, .ne = { n_embd, n_vocab } },
		{ "output_norm.weight", &d->out_norm, .vector = true, .ne = { n_embd } },
		{ "output.weight", &d->out, .optional = true, .ne = { n_embd, n_vocab } },
	};
	int r;

	if (n_vocab == 0 || n_vocab > INT32_MAX)
		return fail(ret_error, -EBADMSG,
			    "%s: tensor 'token_embd.weight' has %" PRIu64 " rows", m->path, n_vocab);
	r = arch_bind(m, -1, list, ARRAY_SIZE(list), ret_error);
	if (r < 0)
		return r;
	m->embd = d->embd;
	m->embd_tied = !d->out;
	if (m->embd_tied)
		d->out = d->embd;
	m->n_vocab = (uint32_t)n_vocab;
	return 0;
}

int decoder_bind_attention(struct model *m, struct decoder *d, uint32_t i, char **ret_error)
{
	struct decoder_layer *l = &d->layers[i];
	uint64_t n_q = (uint64_t)d->n_head * d->head_dim, n_kv = (uint64_t)d->n_head_kv * d->head_dim;
	uint64_t n_q_rows = d->gated ? 2 * n_q : n_q;
	bool optional = !d->biases;
	const struct arch_tensor list[] = {
		{ "attn_q.weight", &l->q, .ne = { m->n_embd, n_q_rows } },
		{ "attn_k.weight", &l->k, .ne = { m->n_embd, n_kv } },
		{ "attn_v.weight", &l->v, .ne = { m->n_embd, n_kv } },
		{ "attn_q.bias", &l->q_bias, .vector = true, .optional = optional, .ne = { n_q_rows } },
		{ "attn_k.bias", &l->k_bias, .vector = true, .optional = optional, .ne = { n_kv } },
		{ "attn_v.bias", &l->v_bias, .vector = true, .optional = optional, .ne = { n_kv } },
		{ "attn_output.weight", &l->attn_out, .ne = { n_q, m->n_embd } },
		{ "attn_output.bias", &l->attn_out_bias, .vector = true, .optional = optional,
		  .ne = { m->n_embd } },
	};
	const struct arch_tensor norms[] = {
		{ "attn_q_norm.weight", &l->q_norm, .vector = true, .ne = { d->head_dim } },
		{ "attn_k_norm.weight", &l->k_norm, .vector = true, .ne = { d->head_dim } },
	};
	const struct arch_tensor sinks = { "attn_sinks.weight", &l->sinks, .vector = true,
					   .ne = { d->n_head } };
	int r = arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);

	if (r == 0 && d->qk_norm)
		r = arch_bind(m, i, norms, ARRAY_SIZE(norms), ret_error);
	if (r == 0 && d->sinks)
		r = arch_bind(m, i, &sinks, 1, ret_error);
	l->kv_layer = m->kv.n_layer++;
	return r;
}

static int bind_ffn(struct model *m, struct decoder *d, uint32_t i, char **ret_error)
{
	struct decoder_layer *l = &d->layers[i];
	uint64_t n_embd = m->n_embd, n_ff = d->n_ff;
	const struct arch_tensor list[] = {
		{ "ffn_gate.weight", &l->gate, .ne = { n_embd, n_ff } },
		{ "ffn_up.weight", &l->up, .ne = { n_embd, n_ff } },
		{ "ffn_down.weight", &l->down, .ne = { n_ff, n_embd } },
		{ "ffn_gate.bias", &l->gate_bias, .vector = true, .optional = true, .ne = { n_ff } },
		{ "ffn_up.bias", &l->up_bias, .vector = true, .optional = true, .ne = { n_ff } },
		{ "ffn_down.bias", &l->down_bias, .vector = true, .optional = true, .ne = { n_embd } },
	};

	return arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);
}

static int bind_moe_biases(struct model *m, struct decoder *d, uint32_t i, char **ret_error)
{
	struct decoder_layer *l = &d->layers[i];
	uint64_t n_embd = m->n_embd, n_ff = d->n_ff_expert, n_expert = d->n_expert;
	const struct arch_tensor list[] = {
		{ "ffn_gate_inp.bias", &l->router_bias, .vector = true, .ne = { n_expert } },
		{ "ffn_gate_exps.bias", &l->moe.gate_bias, .vector = true, .ne = { n_ff, n_expert } },
		{ "ffn_up_exps.bias", &l->moe.up_bias, .vector = true, .ne = { n_ff, n_expert } },
		{ "ffn_down_exps.bias", &l->moe.down_bias, .vector = true, .ne = { n_embd, n_expert } },
	};

	return arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);
}

static int bind_experts(struct model *m, struct decoder *d, uint32_t i, char **ret_error)
{
	struct decoder_layer *l = &d->layers[i];
	uint64_t n_embd = m->n_embd, n_ff = d->n_ff_expert, n_expert = d->n_expert;
	const struct arch_tensor list[] = {
		{ "ffn_gate_inp.weight", &l->router, .ne = { n_embd, n_expert } },
		{ "ffn_down_exps.weight", &l->moe.down, .ne = { n_ff, n_embd, n_expert } },
	};
	const struct arch_tensor fused = { "ffn_gate_up_exps.weight", &l->moe.gate_up,
					   .optional = true, .ne = { n_embd, 2 * n_ff, n_expert } };
	const struct arch_tensor split[] = {
		{ "ffn_gate_exps.weight", &l->moe.gate, .ne = { n_embd, n_ff, n_expert } },
		{ "ffn_up_exps.weight", &l->moe.up, .ne = { n_embd, n_ff, n_expert } },
	};
	const struct arch_tensor shared[] = {
		{ "ffn_gate_inp_shexp.weight", &l->shared_router, .vector = true, .ne = { n_embd } },
		{ "ffn_gate_shexp.weight", &l->shared_gate, .ne = { n_embd, d->n_ff_shared } },
		{ "ffn_up_shexp.weight", &l->shared_up, .ne = { n_embd, d->n_ff_shared } },
		{ "ffn_down_shexp.weight", &l->shared_down, .ne = { d->n_ff_shared, n_embd } },
	};
	int r = arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);

	/* Biases are those of gate and up, each for itself. */
	if (r == 0 && !d->biases)
		r = arch_bind(m, i, &fused, 1, ret_error);
	if (r == 0 && !l->moe.gate_up)
		r = arch_bind(m, i, split, ARRAY_SIZE(split), ret_error);
	if (r == 0 && d->n_ff_shared > 0)
		r = arch_bind(m, i, shared, ARRAY_SIZE(shared), ret_error);
	if (r == 0 && d->biases)
		r = bind_moe_biases(m, d, i, ret_error);
	l->moe.layer = i;
	l->moe.n_expert = d->n_expert;
	l->moe.n_used = d->n_used;
	l->moe.gating = d->gating;
	l->moe.unit = d->unit;
	return r;
}

int decoder_bind_layer(struct model *m, struct decoder *d, uint32_t i, char **ret_error)
{
	struct decoder_layer *l = &d->layers[i];
	const struct arch_tensor list[] = {
		{ "attn_norm.weight", &l->norm, .vector = true, .ne = { m->n_embd } },
		{ d->post_norm_name, &l->post_norm, .vector = true, .ne = { m->n_embd } },
	};
	int r = arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);

	if (r == 0)
		r = d->n_expert > 0 ? bind_experts(m, d, i, ret_error) : bind_ffn(m, d, i, ret_error);
	return r;
}

static const char *cpu_only(const struct model *m, const struct decoder *d)
{
	if (d->rope_pairs)
		return "rope on adjacent pairs";
	if (d->rope.mscale != 1.0f)
		return "scaled rope";
	for (uint32_t i = 0; i < m->n_layer; i++) {
		const struct decoder_layer *l = &d->layers[i];

		if (l->sinks)
			return "attention sinks";
		if (l->window > 0)
			return "sliding windows";
		if (l->q_bias || l->k_bias || l->v_bias || l->attn_out_bias || l->gate_bias ||
		    l->up_bias || l->down_bias || l->router_bias)
			return "biases";
	}
	return NULL;
}

/* The sums of what the functions below take, and of what the backend says its operations need. */
void decoder_finish(struct model *m, const struct decoder *d, size_t mixer_floats, size_t mixer_op_floats)
{
	size_t n_q = (size_t)d->n_head * d->head_dim, n_kv = (size_t)d->n_head_kv * d->head_dim;
	size_t embd = graph_width_floats(m->n_embd), n_q_taken = d->gated ? 5 : 2;
	size_t attention = n_q_taken * graph_width_floats(n_q) + 2 * graph_width_floats(n_kv) + embd;
	size_t ffn = 2 * graph_width_floats(d->n_ff) + embd;
	size_t moe = graph_width_floats(d->n_expert) + 2 * graph_width_floats(d->n_ff_shared) + embd;
	size_t op = MAX(MAX(n_q, (size_t)m->n_embd), (size_t)MAX(d->n_ff, d->n_ff_shared));

	if (d->n_expert > 0)
		op = MAX(op, backend_moe_temp_floats(m->n_embd, d->n_ff_expert, d->n_expert, d->n_used));
	m->row_floats = 2 * embd + MAX(MAX(attention, mixer_floats), MAX(ffn, moe));
	m->op_floats = MAX(op, mixer_op_floats);
	m->kv.n_head = d->n_head_kv;
	m->kv.k_dim = m->kv.v_dim = d->head_dim;
	m->head_dim_max = MAX(m->head_dim_max, d->head_dim);
	m->cpu_only = cpu_only(m, d);
}

int decoder_bind_plain(struct model *m, struct decoder *d, char **ret_error)
{
	int r = decoder_bind_model(m, d, ret_error);

	for (uint32_t i = 0; i < m->n_layer && r == 0; i++) {
		r = decoder_bind_layer(m, d, i, ret_error);
		if (r == 0)
			r = decoder_bind_attention(m, d, i, ret_error);
	}
	if (r == 0)
		decoder_finish(m, d, 0, 0);
	return r;
}

/* Running. */

/* Nothing where there is none. */
static int add_bias(struct graph *g, const struct gguf_tensor *bias, float *x, size_t width)
{
	return bias ? g->backend->ops->add_bias(g->backend, bias, x, g->n_rows, width) : 0;
}

static int project(struct graph *g, const struct decoder *d, const struct decoder_layer *l,
		   const float *h, float *q, float *k, float *v)
{
	size_t n_q = (size_t)d->n_head * d->head_dim, n_kv = (size_t)d->n_head_kv * d->head_dim;
	int r = graph_matmul_many(g, (const struct gguf_tensor *const[]){ l->q, l->k, l->v }, 3, h,
				  (float *const[]){ q, k, v });

	if (r == 0)
		r = add_bias(g, l->q_bias, q, d->gated ? 2 * n_q : n_q);
	if (r == 0)
		r = add_bias(g, l->k_bias, k, n_kv);
	if (r == 0)
		r = add_bias(g, l->v_bias, v, n_kv);
	return r;
}

static int attend(struct graph *g, const struct decoder *d, const struct decoder_layer *l,
		  float *query, float *k, const float *v, float *o)
{
	const struct backend_ops *ops = g->backend->ops;
	size_t dim = d->head_dim, n_q = d->n_head * dim, n_kv = d->n_head_kv * dim;
	const struct backend_attn p = { .kv_layer = l->kv_layer,
					.n_head = d->n_head,
					.n_head_kv = d->n_head_kv,
					.k_dim = d->head_dim,
					.v_dim = d->head_dim,
					.scale = d->scale,
					.window = l->window,
					.sinks = l->sinks };
	int r = 0;

	if (l->q_norm)
		r = graph_rms_norm(g, l->q_norm, d->eps, query, d->n_head, dim, query);
	if (r == 0 && l->k_norm)
		r = graph_rms_norm(g, l->k_norm, d->eps, k, d->n_head_kv, dim, k);
	if (r == 0)
		r = ops->rope(g->backend, &d->rope, query, n_q, d->n_head, dim);
	if (r == 0)
		r = ops->rope(g->backend, &d->rope, k, n_kv, d->n_head_kv, dim);
	if (r == 0)
		r = ops->attention(g->backend, &p, query, k, v, o);
	return r;
}

int decoder_attention(struct graph *g, uint32_t i, const float *h, float *x)
{
	const struct decoder *d = g->model->arch_data;
	const struct decoder_layer *l = &d->layers[i];
	const struct backend_ops *ops = g->backend->ops;
	size_t dim = d->head_dim, n_q = d->n_head * dim, n_kv = d->n_head_kv * dim;
	size_t n_heads = g->n_rows * d->n_head;
	float *q = graph_take(g, d->gated ? 2 * n_q : n_q);
	float *query = d->gated ? graph_take(g, n_q) : q;
	float *gate = d->gated ? graph_take(g, n_q) : NULL;
	float *k = graph_take(g, n_kv), *v = graph_take(g, n_kv), *o = graph_take(g, n_q);
	float *y = graph_take(g, g->model->n_embd);
	int r = project(g, d, l, h, q, k, v);

	if (r == 0 && d->gated)
		r = ops->copy_rows(g->backend, q, 2 * dim, n_heads, dim, query);
	if (r == 0 && d->gated)
		r = ops->copy_rows(g->backend, q + dim, 2 * dim, n_heads, dim, gate);
	if (r == 0)
		r = attend(g, d, l, query, k, v, o);
	if (r == 0 && d->gated)
		r = ops->sigmoid_mul(g->backend, o, gate, g->n_rows * n_q);
	if (r == 0)
		r = graph_matmul(g, l->attn_out, o, y);
	if (r == 0)
		r = add_bias(g, l->attn_out_bias, y, g->model->n_embd);
	if (r == 0)
		r = graph_add(g, x, y, g->model->n_embd);
	return r;
}

static int forward_ffn(struct graph *g, const struct decoder *d, const struct decoder_layer *l,
		       const float *h, float *x)
{
	float *gate = graph_take(g, d->n_ff), *up = graph_take(g, d->n_ff);
	float *y = graph_take(g, g->model->n_embd);
	int r = graph_matmul_many(g, (const struct gguf_tensor *const[]){ l->gate, l->up }, 2, h,
				  (float *const[]){ gate, up });

	if (r == 0)
		r = add_bias(g, l->gate_bias, gate, d->n_ff);
	if (r == 0)
		r = add_bias(g, l->up_bias, up, d->n_ff);
	if (r == 0)
		r = g->backend->ops->silu_mul(g->backend, gate, up, g->n_rows * d->n_ff, gate);
	if (r == 0)
		r = graph_matmul(g, l->down, gate, y);
	if (r == 0)
		r = add_bias(g, l->down_bias, y, g->model->n_embd);
	if (r == 0)
		r = graph_add(g, x, y, g->model->n_embd);
	return r;
}

/*
 * The next layer's choice, guessed from this layer's state, so that its blocks can be read ahead: x changes little from one layer to the
 * next. norm and router are scratch of one row set.
 */
static int guess_next(struct graph *g, const struct decoder *d, const struct decoder_layer *l,
		      const float *x, float *norm, float *router)
{
	const struct decoder_layer *next = l + 1;
	int r;

	if (l == &d->layers[g->model->n_layer - 1] || !g->backend->ops->moe_wants_guess(g->backend))
		return 0;
	r = graph_rms_norm(g, next->post_norm, d->eps, x, 1, g->model->n_embd, norm);
	if (r == 0)
		r = graph_matmul(g, next->router, norm, router);
	if (r == 0)
		r = add_bias(g, next->router_bias, router, d->n_expert);
	if (r == 0)
		r = g->backend->ops->moe_guess(g->backend, &next->moe, router, g->n_rows);
	return r;
}

static int forward_experts(struct graph *g, const struct decoder *d, const struct decoder_layer *l,
			   const float *h, float *x)
{
	const struct backend_ops *ops = g->backend->ops;
	struct backend *b = g->backend;
	size_t n = g->n_rows, n_embd = g->model->n_embd, n_shared = d->n_ff_shared;
	float *router = graph_take(g, d->n_expert), *y = graph_take(g, n_embd);
	float *gate = graph_take(g, n_shared), *up = graph_take(g, n_shared);
	int r = graph_matmul(g, l->router, h, router);

	if (r == 0)
		r = add_bias(g, l->router_bias, router, d->n_expert);
	/* The shared expert is computed while what is missing is read. */
	if (r == 0)
		r = ops->moe_route(b, &l->moe, router, n);
	if (r == 0)
		r = guess_next(g, d, l, x, y, router);
	if (r == 0 && n_shared > 0)
		r = graph_matmul_many(
			g, (const struct gguf_tensor *const[]){ l->shared_gate, l->shared_up }, 2,
			h, (float *const[]){ gate, up });
	if (r == 0)
		r = ops->moe(b, &l->moe, h, n, x);
	if (r < 0 || n_shared == 0)
		return r;
	r = ops->silu_mul(b, gate, up, n * n_shared, gate);
	if (r == 0)
		r = graph_matmul(g, l->shared_down, gate, y);
	if (r == 0)
		r = ops->scalar_gate(b, l->shared_router, h, n, n_embd, y, n_embd);
	if (r == 0)
		r = graph_add(g, x, y, n_embd);
	return r;
}

int decoder_forward(struct graph *g)
{
	const struct decoder *d = g->model->arch_data;
	size_t n_embd = g->model->n_embd;
	float *x = graph_take(g, n_embd), *h = graph_take(g, n_embd);
	int r = graph_embed(g, d->embd, x);

	for (uint32_t i = 0; i < g->model->n_layer && r == 0; i++) {
		const struct decoder_layer *l = &d->layers[i];
		size_t mark = graph_mark(g);

		r = graph_continue(g);
		if (r == 0)
			r = graph_rms_norm(g, l->norm, d->eps, x, 1, n_embd, h);
		if (r == 0)
			r = d->mixer ? d->mixer(g, i, h, x) : decoder_attention(g, i, h, x);
		graph_release(g, mark);
		if (r == 0)
			r = graph_rms_norm(g, l->post_norm, d->eps, x, 1, n_embd, h);
		if (r == 0)
			r = d->n_expert > 0 ? forward_experts(g, d, l, h, x)
					    : forward_ffn(g, d, l, h, x);
		graph_release(g, mark);
	}
	if (r == 0)
		r = graph_output(g, x, d->out_norm, d->eps, d->out);
	return r;
}
