/* SPDX-License-Identifier: MIT */
/*
 * delta-cpu.c: the gated delta net on the CPU: convolution, norms and gates of all rows, then the
 * recurrence head by head.
 *
 * Owns nothing but temporaries of the arena. Called through the backend's table; engine thread only.
 * Refuses to know arithmetic, which is kernels/cpu, and where recurrent states lie. Invariant: a
 * channel of the convolution, and a head's state, belong to one piece, which takes a sequence's rows
 * in order.
 */
#include "daemon/engine/delta-cpu.h"

#include "daemon/engine/backend-cpu.h"

#include <math.h>

struct delta_job {
	const struct backend_cpu *c;
	const struct backend_delta *p;
	const struct backend_span *spans;
	const float *qkv, *alpha, *beta_raw;
	float *mixed; /* [t][channels]: after conv, SiLU and norms */
	float *g, *beta, *out, *scratch;
	size_t n_ch, scratch_stride;
};

static size_t n_channels(const struct backend_delta *p)
{
	return 2 * (size_t)p->n_head_k * p->k_dim + (size_t)p->n_head_v * p->v_dim;
}

size_t backend_delta_temp_floats(size_t n_channels_all, size_t n_head_v)
{
	return n_channels_all + 2 * n_head_v;
}

static void convolve(const struct delta_job *j, const struct backend_span *s, size_t c0, size_t n)
{
	j->c->k->conv_silu(j->qkv + s->row * j->n_ch, j->p->conv->data,
			   s->recurrent + j->p->state_offset, s->n_tok, j->n_ch, j->p->conv_kernel,
			   c0, c0 + n, j->mixed + s->row * j->n_ch);
}

/* A query or key head of all rows of a span. */
static void norm_head(const struct delta_job *j, const struct backend_span *s, size_t head, float scale)
{
	size_t dim = j->p->k_dim;

	for (size_t t = s->row; t < s->row + s->n_tok; t++) {
		float *x = j->mixed + t * j->n_ch + head * dim;

		j->c->k->l2_norm(x, j->p->l2_eps, x, dim);
		for (size_t i = 0; i < dim && scale != 1.0f; i++)
			x[i] *= scale;
	}
}

/* Decays and write strengths of a value head. */
static void gates(const struct delta_job *j, const struct backend_span *s, size_t head)
{
	size_t stride = j->p->n_head_v;
	float dt = ((const float *)j->p->dt->data)[head], a = ((const float *)j->p->a->data)[head];

	for (size_t at = s->row * stride + head; at < (s->row + s->n_tok) * stride; at += stride) {
		float x = j->alpha[at] + dt;

		/* softplus; above 20 it is x to float precision */
		j->g[at] = (x > 20.0f ? x : log1pf(expf(x))) * a;
		j->beta[at] = 1.0f / (1.0f + expf(-j->beta_raw[at]));
	}
}

/* A piece is a key head with its query, and the value heads that share them. */
static void prepare_piece(void *arg, size_t i, unsigned thread)
{
	const struct delta_job *j = arg;
	const struct backend_delta *p = j->p;
	const struct backend_span *s = &j->spans[i / p->n_head_k];
	size_t head = i % p->n_head_k, n_k = (size_t)p->n_head_k * p->k_dim;

	(void)thread;
	convolve(j, s, head * p->k_dim, p->k_dim);
	convolve(j, s, n_k + head * p->k_dim, p->k_dim);
	norm_head(j, s, head, 1.0f / sqrtf((float)p->k_dim));
	norm_head(j, s, p->n_head_k + head, 1.0f);
	for (size_t h = head; h < p->n_head_v; h += p->n_head_k) {
		convolve(j, s, 2 * n_k + h * p->v_dim, p->v_dim);
		gates(j, s, h);
	}
}

/* A piece is a value head. */
static void rule_piece(void *arg, size_t i, unsigned thread)
{
	const struct delta_job *j = arg;
	const struct backend_delta *p = j->p;
	const struct backend_span *s = &j->spans[i / p->n_head_v];
	size_t head = i % p->n_head_v, n_k = (size_t)p->n_head_k * p->k_dim,
	       out_stride = (size_t)p->n_head_v * p->v_dim;
	float *S = s->recurrent + p->state_offset + (p->conv_kernel - 1) * j->n_ch +
		   head * p->k_dim * p->v_dim;

	for (size_t t = 0; t < s->n_tok; t += CPU_DELTA_CHUNK) {
		size_t row = s->row + t, n = MIN((size_t)CPU_DELTA_CHUNK, s->n_tok - t);
		const float *q = j->mixed + row * j->n_ch + head % p->n_head_k * p->k_dim, *k = q + n_k;
		const float *v = j->mixed + row * j->n_ch + 2 * n_k + head * p->v_dim;
		const float *g = j->g + row * p->n_head_v + head,
			    *beta = j->beta + row * p->n_head_v + head;
		float *o = j->out + row * out_stride + head * p->v_dim;

		if (n == 1)
			j->c->k->delta_step(S, q, k, v, *g, *beta, p->k_dim, p->v_dim, o);
		else
			j->c->k->delta_chunk(S, q, j->n_ch, k, j->n_ch, v, j->n_ch, g, beta,
					     p->n_head_v, n, p->k_dim, p->v_dim, o, out_stride,
					     j->scratch + thread * j->scratch_stride);
	}
}

int delta_cpu_compute(struct backend *b, const struct backend_delta *p, const float *qkv,
		      const float *alpha, const float *beta, float *out)
{
	struct backend_cpu *c = cpu_of(b);
	const struct backend_batch *batch = c->batch;
	struct delta_job j = { .c = c,
			       .p = p,
			       .spans = batch->spans,
			       .qkv = qkv,
			       .alpha = alpha,
			       .beta_raw = beta,
			       .out = out,
			       .n_ch = n_channels(p) };

	cpu_drop(c);
	j.mixed = cpu_take(c, batch->n_rows * j.n_ch, sizeof(float));
	j.g = cpu_take(c, batch->n_rows * p->n_head_v, sizeof(float));
	j.beta = cpu_take(c, batch->n_rows * p->n_head_v, sizeof(float));
	j.scratch = cpu_thread_scratch(c, cpu_delta_scratch(p->k_dim, p->v_dim), &j.scratch_stride);
	if (!j.mixed || !j.g || !j.beta || !j.scratch) {
		cpu_drop(c);
		return -ENOMEM;
	}
	cpu_run(c, batch->n_spans * p->n_head_k, prepare_piece, &j);
	cpu_run(c, batch->n_spans * p->n_head_v, rule_piece, &j);
	cpu_drop(c);
	return 0;
}
