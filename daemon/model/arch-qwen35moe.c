/* SPDX-License-Identifier: MIT */
/*
 * arch-qwen35moe.c: Qwen3.5/3.6 MoE: gated delta-net layers with a gated full-attention layer every
 * few, and in each layer routed experts plus one shared expert behind a sigmoid gate.
 *
 * Owns its hyperparameters and tensor bindings (m->arch_data), immutable after load. load() on the
 * engine thread, forward() too. Refuses to know sequences: rows come from the graph. The rows of a
 * multi-token-prediction block at the end of the file are ignored. Invariant: every number used as
 * a size or divisor was bounded here, and every tensor has the shape those numbers imply.
 */
#include "daemon/engine/graph.h"
#include "daemon/model/arch.h"
#include "daemon/model/model.h"

#include <inttypes.h>
#include <math.h>

#define LAYERS_MAX          1024
#define HEADS_MAX           1024
#define EXPERTS_MAX         4096
#define DIM_MAX             (1u << 20)
#define HEAD_DIM_MAX        4096
#define CONV_MAX            64
#define RECURRENT_BYTES_MAX ((size_t)4 << 30)

struct layer {
	bool recurrent;
	uint32_t kv_layer;       /* attention: index among the attention layers */
	size_t recurrent_offset; /* delta net: floats into the sequence's recurrent state */
	const struct gguf_tensor *norm, *post_norm;
	const struct gguf_tensor *q, *k, *v, *q_norm, *k_norm, *attn_out;
	const struct gguf_tensor *qkv, *z, *conv, *dt, *a, *alpha, *beta, *delta_norm, *delta_out;
	const struct gguf_tensor *router, *shared_router, *shared_gate, *shared_up, *shared_down;
	struct backend_moe moe;
};

struct qwen35moe {
	uint32_t n_head, n_head_kv, head_dim, n_rot;
	struct backend_rope rope;
	float *freq;                                            /* of rope */
	uint32_t n_head_k, n_head_v, k_dim, v_dim, conv_kernel; /* delta net */
	uint32_t n_expert, n_used, n_ff, n_ff_shared;
	float eps;
	const struct gguf_tensor *embd, *out_norm, *out;
	struct layer *layers;
};

static uint32_t n_channels(const struct qwen35moe *q)
{
	return 2 * q->n_head_k * q->k_dim + q->n_head_v * q->v_dim;
}

static size_t layer_recurrent_floats(const struct qwen35moe *q)
{
	return (size_t)(q->conv_kernel - 1) * n_channels(q) + (size_t)q->n_head_v * q->k_dim * q->v_dim;
}

struct number {
	const char *key;
	uint32_t *to, lo, hi;
	bool optional;
};

static int load_numbers(const struct model *m, const struct number *list, size_t n, char **ret_error)
{
	for (size_t i = 0; i < n; i++) {
		int r = arch_get_u32(m, list[i].key, list[i].optional, list[i].lo, list[i].hi,
				     list[i].to, ret_error);

		if (r < 0)
			return r;
	}
	return 0;
}

/* Numbers that constrain each other; the rest is in the table of load_hparams(). */
static int check_hparams(const struct model *m, const struct qwen35moe *q, uint32_t value_dim,
			 uint32_t inner, char **ret_error)
{
	if (value_dim != q->head_dim)
		return fail(ret_error, -EBADMSG,
			    "%s: attention.value_length %" PRIu32 " differs from key_length %" PRIu32,
			    m->path, value_dim, q->head_dim);
	if (q->n_head % q->n_head_kv != 0)
		return fail(ret_error, -EBADMSG,
			    "%s: %" PRIu32 " heads cannot share %" PRIu32 " key/value heads",
			    m->path, q->n_head, q->n_head_kv);
	if (q->n_rot % 2 != 0 || q->n_rot > q->head_dim)
		return fail(ret_error, -EBADMSG,
			    "%s: rope.dimension_count %" PRIu32 " is odd or above key_length %" PRIu32,
			    m->path, q->n_rot, q->head_dim);
	if (q->n_head_v % q->n_head_k != 0)
		return fail(ret_error, -EBADMSG,
			    "%s: ssm.time_step_rank %" PRIu32
			    " is no multiple of ssm.group_count %" PRIu32,
			    m->path, q->n_head_v, q->n_head_k);
	if (inner % q->n_head_v != 0 || inner / q->n_head_v > HEAD_DIM_MAX)
		return fail(ret_error, -EBADMSG,
			    "%s: ssm.inner_size %" PRIu32 " does not fit %" PRIu32 " heads",
			    m->path, inner, q->n_head_v);
	if (q->n_used > q->n_expert)
		return fail(ret_error, -EBADMSG,
			    "%s: expert_used_count %" PRIu32 " is above expert_count %" PRIu32,
			    m->path, q->n_used, q->n_expert);
	return 0;
}

static int load_hparams(struct model *m, struct qwen35moe *q, uint32_t *ret_n_block, char **ret_error)
{
	uint32_t value_dim = 0, inner = 0, n_block = 0, n_nextn = 0;
	const struct number numbers[] = {
		{ "block_count", &n_block, 1, LAYERS_MAX, false },
		{ "nextn_predict_layers", &n_nextn, 0, LAYERS_MAX, true },
		{ "context_length", &m->n_ctx_train, 1, INT32_MAX, false },
		{ "embedding_length", &m->n_embd, 1, DIM_MAX, false },
		{ "attention.head_count", &q->n_head, 1, HEADS_MAX, false },
		{ "attention.head_count_kv", &q->n_head_kv, 1, HEADS_MAX, false },
		{ "attention.key_length", &q->head_dim, 1, HEAD_DIM_MAX, false },
		{ "attention.value_length", &value_dim, 1, HEAD_DIM_MAX, false },
		{ "rope.dimension_count", &q->n_rot, 2, HEAD_DIM_MAX, false },
		{ "ssm.group_count", &q->n_head_k, 1, HEADS_MAX, false },
		{ "ssm.time_step_rank", &q->n_head_v, 1, HEADS_MAX, false },
		{ "ssm.state_size", &q->k_dim, 1, HEAD_DIM_MAX, false },
		{ "ssm.inner_size", &inner, 1, DIM_MAX, false },
		{ "ssm.conv_kernel", &q->conv_kernel, 2, CONV_MAX, false },
		{ "expert_count", &q->n_expert, 1, EXPERTS_MAX, false },
		{ "expert_used_count", &q->n_used, 1, EXPERTS_MAX, false },
		{ "expert_feed_forward_length", &q->n_ff, 1, DIM_MAX, false },
		{ "expert_shared_feed_forward_length", &q->n_ff_shared, 1, DIM_MAX, false },
	};
	int r = load_numbers(m, numbers, ARRAY_SIZE(numbers), ret_error);

	if (r == 0)
		r = arch_get_f32(m, "attention.layer_norm_rms_epsilon", false, 1e-12f, 1e-2f,
				 &q->eps, ret_error);
	if (r == 0)
		r = check_hparams(m, q, value_dim, inner, ret_error);
	if (r == 0)
		r = arch_get_rope(m, q->n_rot, &q->freq, &q->rope.mscale, ret_error);
	if (r < 0)
		return r;
	if (n_nextn >= n_block)
		return fail(ret_error, -EBADMSG,
			    "%s: nextn_predict_layers %" PRIu32 " leaves no layer of %" PRIu32,
			    m->path, n_nextn, n_block);
	q->rope.n_rot = q->n_rot;
	q->rope.freq = q->freq;
	q->v_dim = inner / q->n_head_v;
	m->n_layer = n_block - n_nextn;
	m->n_expert_used = q->n_used;
	*ret_n_block = n_block;
	return 0;
}

/*
 * Which layers are delta nets: an array in newer files, else every full_attention_interval-th one
 * is attention.
 */
static int load_layer_kinds(struct model *m, struct qwen35moe *q, uint32_t n_block, char **ret_error)
{
	const struct gguf_array *kinds =
		gguf_get_array(m->gguf, "qwen35moe.attention.recurrent_layers");
	uint32_t interval = 4;
	int r;

	if (kinds && gguf_array_n(kinds) != m->n_layer && gguf_array_n(kinds) != n_block)
		return fail(ret_error, -EBADMSG,
			    "%s: attention.recurrent_layers has %zu entries for %" PRIu32 " layers",
			    m->path, gguf_array_n(kinds), m->n_layer);
	r = arch_get_u32(m, "full_attention_interval", true, 1, LAYERS_MAX, &interval, ret_error);
	if (r < 0)
		return r;
	q->layers = calloc(m->n_layer, sizeof(*q->layers));
	if (!q->layers)
		return fail(ret_error, -ENOMEM, "%s: no memory for %" PRIu32 " layers", m->path,
			    m->n_layer);
	for (uint32_t i = 0; i < m->n_layer; i++) {
		struct layer *l = &q->layers[i];
		int64_t kind = (i + 1) % interval != 0;

		if (kinds && gguf_array_i64(kinds, i, &kind) < 0)
			return fail(ret_error, -EBADMSG,
				    "%s: attention.recurrent_layers is no array of booleans", m->path);
		l->recurrent = kind != 0;
		if (l->recurrent) {
			l->recurrent_offset = m->recurrent_floats;
			/* At most 2^10 layers of at most 2^26 + 2^34 floats. */
			m->recurrent_floats += layer_recurrent_floats(q);
		} else {
			l->kv_layer = m->kv.n_layer++;
		}
	}
	if (m->recurrent_floats > RECURRENT_BYTES_MAX / sizeof(float))
		return fail(ret_error, -EBADMSG, "%s: a recurrent state of %zu numbers is too large",
			    m->path, m->recurrent_floats);
	return 0;
}

static int bind_model(struct model *m, struct qwen35moe *q, char **ret_error)
{
	const struct gguf_tensor *embd = gguf_tensor(m->gguf, "token_embd.weight");
	uint64_t n_vocab = embd ? embd->ne[1] : 1, n_embd = m->n_embd;
	const struct arch_tensor list[] = {
		{ "token_embd.weight", &q->embd, .ne = { n_embd, n_vocab } },
		{ "output_norm.weight", &q->out_norm, .vector = true, .ne = { n_embd } },
		{ "output.weight", &q->out, .optional = true, .ne = { n_embd, n_vocab } },
	};
	int r;

	if (n_vocab == 0 || n_vocab > INT32_MAX)
		return fail(ret_error, -EBADMSG,
			    "%s: tensor 'token_embd.weight' has %" PRIu64 " rows", m->path, n_vocab);
	r = arch_bind(m, -1, list, ARRAY_SIZE(list), ret_error);
	if (r < 0)
		return r;
	m->embd = q->embd;
	m->embd_tied = !q->out;
	if (m->embd_tied)
		q->out = q->embd;
	m->n_vocab = (uint32_t)n_vocab;
	return 0;
}

static int bind_attention(const struct model *m, const struct qwen35moe *q, uint32_t i, char **ret_error)
{
	struct layer *l = &q->layers[i];
	uint64_t n_q = (uint64_t)q->n_head * q->head_dim, n_kv = (uint64_t)q->n_head_kv * q->head_dim;
	const struct arch_tensor list[] = {
		{ "attn_q.weight", &l->q, .ne = { m->n_embd, 2 * n_q } },
		{ "attn_k.weight", &l->k, .ne = { m->n_embd, n_kv } },
		{ "attn_v.weight", &l->v, .ne = { m->n_embd, n_kv } },
		{ "attn_q_norm.weight", &l->q_norm, .vector = true, .ne = { q->head_dim } },
		{ "attn_k_norm.weight", &l->k_norm, .vector = true, .ne = { q->head_dim } },
		{ "attn_output.weight", &l->attn_out, .ne = { n_q, m->n_embd } },
	};

	return arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);
}

static int bind_delta(const struct model *m, const struct qwen35moe *q, uint32_t i, char **ret_error)
{
	struct layer *l = &q->layers[i];
	uint64_t n_v = (uint64_t)q->n_head_v * q->v_dim;
	const struct arch_tensor list[] = {
		{ "attn_qkv.weight", &l->qkv, .ne = { m->n_embd, n_channels(q) } },
		{ "attn_gate.weight", &l->z, .ne = { m->n_embd, n_v } },
		{ "ssm_conv1d.weight", &l->conv, .vector = true,
		  .ne = { q->conv_kernel, n_channels(q) } },
		{ "ssm_dt.bias", &l->dt, .vector = true, .ne = { q->n_head_v } },
		{ "ssm_a", &l->a, .vector = true, .ne = { q->n_head_v } },
		{ "ssm_alpha.weight", &l->alpha, .ne = { m->n_embd, q->n_head_v } },
		{ "ssm_beta.weight", &l->beta, .ne = { m->n_embd, q->n_head_v } },
		{ "ssm_norm.weight", &l->delta_norm, .vector = true, .ne = { q->v_dim } },
		{ "ssm_out.weight", &l->delta_out, .ne = { n_v, m->n_embd } },
	};

	return arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);
}

static int bind_layer(const struct model *m, const struct qwen35moe *q, uint32_t i, char **ret_error)
{
	struct layer *l = &q->layers[i];
	uint64_t n_embd = m->n_embd, n_ff = q->n_ff, n_expert = q->n_expert;
	const struct arch_tensor fused = { "ffn_gate_up_exps.weight", &l->moe.gate_up,
					   .optional = true, .ne = { n_embd, 2 * n_ff, n_expert } };
	const struct arch_tensor split[] = {
		{ "ffn_gate_exps.weight", &l->moe.gate, .ne = { n_embd, n_ff, n_expert } },
		{ "ffn_up_exps.weight", &l->moe.up, .ne = { n_embd, n_ff, n_expert } },
	};
	const struct arch_tensor list[] = {
		{ "attn_norm.weight", &l->norm, .vector = true, .ne = { n_embd } },
		{ "post_attention_norm.weight", &l->post_norm, .vector = true, .ne = { n_embd } },
		{ "ffn_gate_inp.weight", &l->router, .ne = { n_embd, n_expert } },
		{ "ffn_down_exps.weight", &l->moe.down, .ne = { n_ff, n_embd, n_expert } },
		{ "ffn_gate_inp_shexp.weight", &l->shared_router, .vector = true, .ne = { n_embd } },
		{ "ffn_gate_shexp.weight", &l->shared_gate, .ne = { n_embd, q->n_ff_shared } },
		{ "ffn_up_shexp.weight", &l->shared_up, .ne = { n_embd, q->n_ff_shared } },
		{ "ffn_down_shexp.weight", &l->shared_down, .ne = { q->n_ff_shared, n_embd } },
	};
	int r = arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);

	if (r == 0)
		r = arch_bind(m, i, &fused, 1, ret_error);
	if (r == 0 && !l->moe.gate_up)
		r = arch_bind(m, i, split, ARRAY_SIZE(split), ret_error);
	if (r == 0)
		r = l->recurrent ? bind_delta(m, q, i, ret_error) : bind_attention(m, q, i, ret_error);
	l->moe.layer = i;
	l->moe.n_expert = q->n_expert;
	l->moe.n_used = q->n_used;
	return r;
}

/* The sums of what forward_*() below take, and of what the backend says its operations need. */
static void plan_scratch(struct model *m, const struct qwen35moe *q)
{
	size_t n_q = (size_t)q->n_head * q->head_dim, n_kv = (size_t)q->n_head_kv * q->head_dim;
	size_t n_v = (size_t)q->n_head_v * q->v_dim, embd = graph_width_floats(m->n_embd);
	size_t attention = 5 * graph_width_floats(n_q) + 2 * graph_width_floats(n_kv) + embd;
	size_t delta = graph_width_floats(n_channels(q)) + 2 * graph_width_floats(q->n_head_v) +
		       2 * graph_width_floats(n_v) + embd;
	size_t moe = graph_width_floats(q->n_expert) + 2 * graph_width_floats(q->n_ff_shared) + embd;
	size_t op = MAX(backend_moe_temp_floats(m->n_embd, q->n_ff, q->n_expert, q->n_used),
			backend_delta_temp_floats(n_channels(q), q->n_head_v));

	m->row_floats = 2 * embd + MAX(MAX(attention, delta), moe);
	m->op_floats = MAX(op, MAX(n_q, MAX(n_v, (size_t)q->n_ff_shared)));
}

static int qwen35moe_load(struct model *m, char **ret_error)
{
	struct qwen35moe *q = calloc(1, sizeof(*q));
	uint32_t n_block = 0;
	int r;

	if (!q)
		return fail(ret_error, -ENOMEM, "%s: no memory", m->path);
	m->arch_data = q;
	r = load_hparams(m, q, &n_block, ret_error);
	if (r == 0)
		r = load_layer_kinds(m, q, n_block, ret_error);
	if (r == 0)
		r = bind_model(m, q, ret_error);
	for (uint32_t i = 0; i < m->n_layer && r == 0; i++)
		r = bind_layer(m, q, i, ret_error);
	if (r < 0)
		return r;
	m->kv.n_head = q->n_head_kv;
	m->kv.k_dim = m->kv.v_dim = q->head_dim;
	m->head_dim_max = MAX(q->head_dim, MAX(q->k_dim, q->v_dim));
	plan_scratch(m, q);
	return 0;
}

static void qwen35moe_unload(struct model *m)
{
	struct qwen35moe *q = m->arch_data;

	if (!q)
		return;
	free(q->freq);
	free(q->layers);
	free(q);
	m->arch_data = NULL;
}

static int forward_attention(struct graph *g, const struct qwen35moe *q, const struct layer *l,
			     const float *h, float *x)
{
	const struct backend_ops *ops = g->backend->ops;
	struct backend *b = g->backend;
	size_t dim = q->head_dim, n_q = q->n_head * dim, n_kv = q->n_head_kv * dim, n = g->n_rows;
	const struct backend_attn p = { .kv_layer = l->kv_layer,
					.n_head = q->n_head,
					.n_head_kv = q->n_head_kv,
					.k_dim = q->head_dim,
					.v_dim = q->head_dim,
					.scale = 1.0f / sqrtf((float)q->head_dim) };
	float *both = graph_take(g, 2 * n_q), *query = graph_take(g, n_q), *gate = graph_take(g, n_q);
	float *k = graph_take(g, n_kv), *v = graph_take(g, n_kv), *o = graph_take(g, n_q);
	float *y = graph_take(g, g->model->n_embd);
	int r = graph_matmul(g, l->q, h, both);

	if (r == 0)
		r = graph_matmul(g, l->k, h, k);
	if (r == 0)
		r = graph_matmul(g, l->v, h, v);
	/* attn_q rows are, per head, first the query and then its output gate. */
	if (r == 0)
		r = ops->copy_rows(b, both, 2 * dim, n * q->n_head, dim, query);
	if (r == 0)
		r = ops->copy_rows(b, both + dim, 2 * dim, n * q->n_head, dim, gate);
	if (r == 0)
		r = graph_rms_norm(g, l->q_norm, q->eps, query, q->n_head, dim, query);
	if (r == 0)
		r = graph_rms_norm(g, l->k_norm, q->eps, k, q->n_head_kv, dim, k);
	/* The three MRoPE axes are equal for text, so their interleaving does not matter. */
	if (r == 0)
		r = ops->rope(b, &q->rope, query, n_q, q->n_head, dim);
	if (r == 0)
		r = ops->rope(b, &q->rope, k, n_kv, q->n_head_kv, dim);
	if (r == 0)
		r = ops->attention(b, &p, query, k, v, o);
	if (r == 0)
		r = ops->sigmoid_mul(b, o, gate, n * n_q);
	if (r == 0)
		r = graph_matmul(g, l->attn_out, o, y);
	if (r == 0)
		r = graph_add(g, x, y, g->model->n_embd);
	return r;
}

static int forward_delta(struct graph *g, const struct qwen35moe *q, const struct layer *l,
			 const float *h, float *x)
{
	const struct backend_ops *ops = g->backend->ops;
	size_t n_v = (size_t)q->n_head_v * q->v_dim;
	/* The l2 norm takes the RMS norm's epsilon. */
	const struct backend_delta p = { .n_head_k = q->n_head_k,
					 .n_head_v = q->n_head_v,
					 .k_dim = q->k_dim,
					 .v_dim = q->v_dim,
					 .conv_kernel = q->conv_kernel,
					 .conv = l->conv,
					 .a = l->a,
					 .dt = l->dt,
					 .state_offset = l->recurrent_offset,
					 .l2_eps = q->eps };
	float *qkv = graph_take(g, n_channels(q)), *z = graph_take(g, n_v);
	float *alpha = graph_take(g, q->n_head_v), *beta = graph_take(g, q->n_head_v);
	float *o = graph_take(g, n_v), *y = graph_take(g, g->model->n_embd);
	int r = graph_matmul(g, l->qkv, h, qkv);

	if (r == 0)
		r = graph_matmul(g, l->z, h, z);
	if (r == 0)
		r = graph_matmul(g, l->alpha, h, alpha);
	if (r == 0)
		r = graph_matmul(g, l->beta, h, beta);
	if (r == 0)
		r = ops->delta(g->backend, &p, qkv, alpha, beta, o);
	if (r == 0)
		r = graph_rms_norm(g, l->delta_norm, q->eps, o, q->n_head_v, q->v_dim, o);
	if (r == 0)
		r = ops->silu_mul(g->backend, z, o, g->n_rows * n_v, o);
	if (r == 0)
		r = graph_matmul(g, l->delta_out, o, y);
	if (r == 0)
		r = graph_add(g, x, y, g->model->n_embd);
	return r;
}

/*
 * The next layer's choice, guessed from this layer's state, so that its blocks can be read ahead: x changes little from one layer to the
 * next. norm and router are scratch of one row set.
 */
static int guess_next(struct graph *g, const struct qwen35moe *q, const struct layer *l,
		      const float *x, float *norm, float *router)
{
	const struct layer *next = l + 1;
	int r;

	if (l == &q->layers[g->model->n_layer - 1] || !g->backend->ops->moe_wants_guess(g->backend))
		return 0;
	r = graph_rms_norm(g, next->post_norm, q->eps, x, 1, g->model->n_embd, norm);
	if (r == 0)
		r = graph_matmul(g, next->router, norm, router);
	if (r == 0)
		r = g->backend->ops->moe_guess(g->backend, &next->moe, router, g->n_rows);
	return r;
}

static int forward_experts(struct graph *g, const struct qwen35moe *q, const struct layer *l,
			   const float *h, float *x)
{
	const struct backend_ops *ops = g->backend->ops;
	struct backend *b = g->backend;
	size_t n = g->n_rows, n_embd = g->model->n_embd;
	float *router = graph_take(g, q->n_expert), *gate = graph_take(g, q->n_ff_shared);
	float *up = graph_take(g, q->n_ff_shared), *y = graph_take(g, n_embd);
	int r = graph_matmul(g, l->router, h, router);

	/* The shared expert is computed while what is missing is read. */
	if (r == 0)
		r = ops->moe_route(b, &l->moe, router, n);
	if (r == 0)
		r = guess_next(g, q, l, x, y, router);
	if (r == 0)
		r = graph_matmul(g, l->shared_gate, h, gate);
	if (r == 0)
		r = graph_matmul(g, l->shared_up, h, up);
	if (r == 0)
		r = ops->moe(b, &l->moe, h, n, x);
	if (r == 0)
		r = ops->silu_mul(b, gate, up, n * q->n_ff_shared, gate);
	if (r == 0)
		r = graph_matmul(g, l->shared_down, gate, y);
	if (r == 0)
		r = ops->scalar_gate(b, l->shared_router, h, n, n_embd, y, n_embd);
	if (r == 0)
		r = graph_add(g, x, y, n_embd);
	return r;
}

static int qwen35moe_forward(struct graph *g)
{
	const struct qwen35moe *q = g->model->arch_data;
	size_t n_embd = g->model->n_embd;
	float *x = graph_take(g, n_embd), *h = graph_take(g, n_embd);
	int r = graph_embed(g, q->embd, x);

	for (uint32_t i = 0; i < g->model->n_layer && r == 0; i++) {
		const struct layer *l = &q->layers[i];
		size_t mark = graph_mark(g);

		r = graph_continue(g);
		if (r == 0)
			r = graph_rms_norm(g, l->norm, q->eps, x, 1, n_embd, h);
		if (r == 0)
			r = l->recurrent ? forward_delta(g, q, l, h, x)
					 : forward_attention(g, q, l, h, x);
		graph_release(g, mark);
		if (r == 0)
			r = graph_rms_norm(g, l->post_norm, q->eps, x, 1, n_embd, h);
		if (r == 0)
			r = forward_experts(g, q, l, h, x);
		graph_release(g, mark);
	}
	if (r == 0)
		r = graph_output(g, x, q->out_norm, q->eps, q->out);
	return r;
}

const struct arch arch_qwen35moe = {
	.name = "qwen35moe",
	.load = qwen35moe_load,
	.unload = qwen35moe_unload,
	.forward = qwen35moe_forward,
};
