/* SPDX-License-Identifier: MIT */
/*
 * arch-qwen35.c: Qwen3.5/3.6, with experts (qwen35moe) and dense (qwen35): gated delta-net layers
 * with a gated full-attention layer every few; then routed experts plus one shared expert behind a
 * sigmoid gate, or a feed-forward network.
 *
 * Owns its hyperparameters and tensor bindings (m->arch_data), immutable after load. load() on the
 * engine thread, forward() too. Refuses to know sequences: rows come from the graph. The rows of a
 * multi-token-prediction block at the end of the file are ignored. Invariant: every number used as
 * a size or divisor was bounded here or in arch-decoder.c, and every tensor has the shape those
 * numbers imply.
 */
#include "daemon/engine/graph.h"
#include "daemon/model/arch-decoder.h"
#include "daemon/model/model.h"

#include <inttypes.h>

#define CONV_MAX            64
#define RECURRENT_BYTES_MAX ((size_t)4 << 30)

/* What a layer has instead of attention; nothing where it has attention. */
struct delta {
	bool here;
	size_t recurrent_offset; /* floats into the sequence's recurrent state */
	const struct gguf_tensor *qkv, *z, *conv, *dt, *a, *alpha, *beta, *norm, *out;
};

struct qwen35 {
	struct decoder d;
	uint32_t n_head_k, n_head_v, k_dim, v_dim, conv_kernel;
	struct delta *deltas; /* of each layer */
};

static uint32_t n_channels(const struct qwen35 *q)
{
	return 2 * q->n_head_k * q->k_dim + q->n_head_v * q->v_dim;
}

static size_t layer_recurrent_floats(const struct qwen35 *q)
{
	return (size_t)(q->conv_kernel - 1) * n_channels(q) + (size_t)q->n_head_v * q->k_dim * q->v_dim;
}

static int load_delta(struct model *m, struct qwen35 *q, char **ret_error)
{
	uint32_t inner = 0;
	const struct arch_number numbers[] = {
		{ "ssm.group_count", &q->n_head_k, 1, DECODER_HEADS_MAX, false },
		{ "ssm.time_step_rank", &q->n_head_v, 1, DECODER_HEADS_MAX, false },
		{ "ssm.state_size", &q->k_dim, 1, DECODER_HEAD_DIM_MAX, false },
		{ "ssm.inner_size", &inner, 1, DECODER_DIM_MAX, false },
		{ "ssm.conv_kernel", &q->conv_kernel, 2, CONV_MAX, false },
	};
	int r = arch_get_numbers(m, numbers, ARRAY_SIZE(numbers), ret_error);

	if (r < 0)
		return r;
	if (q->n_head_v % q->n_head_k != 0)
		return fail(ret_error, -EBADMSG,
			    "%s: ssm.time_step_rank %" PRIu32
			    " is no multiple of ssm.group_count %" PRIu32,
			    m->path, q->n_head_v, q->n_head_k);
	if (inner % q->n_head_v != 0 || inner / q->n_head_v > DECODER_HEAD_DIM_MAX)
		return fail(ret_error, -EBADMSG,
			    "%s: ssm.inner_size %" PRIu32 " does not fit %" PRIu32 " heads",
			    m->path, inner, q->n_head_v);
	q->v_dim = inner / q->n_head_v;
	return 0;
}

/*
 * Which layers are delta nets: an array in newer files, else every full_attention_interval-th one
 * is attention.
 */
static int load_layer_kinds(struct model *m, struct qwen35 *q, char **ret_error)
{
	const struct gguf_array *kinds;
	uint32_t interval = 4;
	char key[64];
	int r;

	snprintf(key, sizeof(key), "%s.attention.recurrent_layers", m->arch->name);
	kinds = gguf_get_array(m->gguf, key);
	if (!kinds && gguf_has(m->gguf, key))
		return fail(ret_error, -EBADMSG, "%s: key '%s' is no array of booleans", m->path, key);
	if (kinds && gguf_array_n(kinds) != m->n_layer && gguf_array_n(kinds) != m->n_block)
		return fail(ret_error, -EBADMSG,
			    "%s: attention.recurrent_layers has %zu entries for %" PRIu32 " layers",
			    m->path, gguf_array_n(kinds), m->n_layer);
	r = arch_get_u32(m, "full_attention_interval", true, 1, DECODER_LAYERS_MAX, &interval,
			 ret_error);
	if (r < 0)
		return r;
	q->deltas = calloc(m->n_layer, sizeof(*q->deltas));
	if (!q->deltas)
		return fail(ret_error, -ENOMEM, "%s: no memory for %" PRIu32 " layers", m->path,
			    m->n_layer);
	for (uint32_t i = 0; i < m->n_layer; i++) {
		struct delta *l = &q->deltas[i];
		int64_t kind = (i + 1) % interval != 0;

		if (kinds && gguf_array_i64(kinds, i, &kind) < 0)
			return fail(ret_error, -EBADMSG,
				    "%s: attention.recurrent_layers is no array of booleans", m->path);
		l->here = kind != 0;
		if (!l->here)
			continue;
		l->recurrent_offset = m->recurrent_floats;
		/* At most 2^10 layers of at most 2^26 + 2^34 floats. */
		m->recurrent_floats += layer_recurrent_floats(q);
	}
	if (m->recurrent_floats > RECURRENT_BYTES_MAX / sizeof(float))
		return fail(ret_error, -EBADMSG, "%s: a recurrent state of %zu numbers is too large",
			    m->path, m->recurrent_floats);
	return 0;
}

static int bind_delta(struct model *m, const struct qwen35 *q, uint32_t i, char **ret_error)
{
	struct delta *l = &q->deltas[i];
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
		{ "ssm_norm.weight", &l->norm, .vector = true, .ne = { q->v_dim } },
		{ "ssm_out.weight", &l->out, .ne = { n_v, m->n_embd } },
	};

	return arch_bind(m, i, list, ARRAY_SIZE(list), ret_error);
}

static int forward_delta(struct graph *g, const struct qwen35 *q, const struct delta *l,
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
					 .l2_eps = q->d.eps };
	float *qkv = graph_take(g, n_channels(q)), *z = graph_take(g, n_v);
	float *alpha = graph_take(g, q->n_head_v), *beta = graph_take(g, q->n_head_v);
	float *o = graph_take(g, n_v), *y = graph_take(g, g->model->n_embd);
	int r = graph_matmul_many(g, (const struct gguf_tensor *const[]){ l->qkv, l->z, l->alpha, l->beta },
				  4, h, (float *const[]){ qkv, z, alpha, beta });

	if (r == 0)
		r = ops->delta(g->backend, &p, qkv, alpha, beta, o);
	if (r == 0)
		r = graph_rms_norm(g, l->norm, q->d.eps, o, q->n_head_v, q->v_dim, o);
	if (r == 0)
		r = ops->silu_mul(g->backend, z, o, g->n_rows * n_v, o);
	if (r == 0)
		r = graph_matmul(g, l->out, o, y);
	if (r == 0)
		r = graph_add(g, x, y, g->model->n_embd);
	return r;
}

static int mix(struct graph *g, uint32_t i, const float *h, float *x)
{
	const struct qwen35 *q = g->model->arch_data;

	return q->deltas[i].here ? forward_delta(g, q, &q->deltas[i], h, x)
				 : decoder_attention(g, i, h, x);
}

/* What forward_delta() takes. */
static void finish(struct model *m, const struct qwen35 *q)
{
	size_t n_v = (size_t)q->n_head_v * q->v_dim;
	size_t delta = graph_width_floats(n_channels(q)) + 2 * graph_width_floats(q->n_head_v) +
		       2 * graph_width_floats(n_v) + graph_width_floats(m->n_embd);

	m->head_dim_max = MAX(q->k_dim, q->v_dim);
	decoder_finish(m, &q->d, delta, MAX(backend_delta_temp_floats(n_channels(q), q->n_head_v), n_v));
}

/*
 * attn_q has the gate of attention's output too. The three MRoPE axes are equal for text, so that
 * their interleaving does not matter: it is plain rope.
 */
static int load(struct model *m, bool experts, char **ret_error)
{
	struct qwen35 *q = decoder_new(m, sizeof(*q), ret_error);
	int r;

	if (!q)
		return -ENOMEM;
	q->d.post_norm_name = "post_attention_norm.weight";
	q->d.qk_norm = q->d.gated = true;
	q->d.mixer = mix;
	r = arch_get_u32(m, "nextn_predict_layers", true, 0, DECODER_LAYERS_MAX, &q->d.n_nextn,
			 ret_error);
	if (r == 0)
		r = decoder_load_sizes(m, &q->d, "nextn_predict_layers", ret_error);
	if (r == 0)
		r = load_delta(m, q, ret_error);
	if (r == 0 && experts)
		r = decoder_load_experts(m, &q->d, "expert_feed_forward_length", ret_error);
	if (r == 0)
		r = experts ? arch_get_u32(m, "expert_shared_feed_forward_length", false, 1,
					   DECODER_DIM_MAX, &q->d.n_ff_shared, ret_error)
			    : decoder_load_ffn(m, &q->d, ret_error);
	if (r == 0)
		r = load_layer_kinds(m, q, ret_error);
	if (r == 0)
		r = decoder_bind_model(m, &q->d, ret_error);
	for (uint32_t i = 0; i < m->n_layer && r == 0; i++) {
		r = decoder_bind_layer(m, &q->d, i, ret_error);
		if (r == 0)
			r = q->deltas[i].here ? bind_delta(m, q, i, ret_error)
					      : decoder_bind_attention(m, &q->d, i, ret_error);
	}
	if (r < 0)
		return r;
	finish(m, q);
	return 0;
}

static int qwen35moe_load(struct model *m, char **ret_error)
{
	return load(m, true, ret_error);
}

static int qwen35_load(struct model *m, char **ret_error)
{
	return load(m, false, ret_error);
}

static void qwen35_unload(struct model *m)
{
	struct qwen35 *q = m->arch_data;

	if (q)
		free(q->deltas);
	decoder_unload(m);
}

const struct arch arch_qwen35moe = {
	.name = "qwen35moe",
	.load = qwen35moe_load,
	.unload = qwen35_unload,
	.forward = decoder_forward,
};

const struct arch arch_qwen35 = {
	.name = "qwen35",
	.load = qwen35_load,
	.unload = qwen35_unload,
	.forward = decoder_forward,
};
