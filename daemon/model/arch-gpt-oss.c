/* SPDX-License-Identifier: MIT */
/*
 * arch-gpt-oss.c: gpt-oss: attention with biases and a sink per head, every other layer over a
 * sliding window only, and routed experts with biases and a unit of their own.
 *
 * Owns nothing beyond m->arch_data. Engine thread. Refuses to know how any of it is computed: that
 * is arch-decoder.c. Invariant: as there.
 */
#include "daemon/model/arch-decoder.h"
#include "daemon/model/model.h"

/* The layers that slide: all of a period but its last one (llama.cpp, src/models/openai-moe.cpp). */
static int load_windows(struct model *m, struct decoder *d, char **ret_error)
{
	uint32_t window = 0, period = 2;
	float base = 10000.0f, window_base;
	int r = arch_get_u32(m, "attention.sliding_window", false, 1, INT32_MAX, &window, ret_error);

	if (r == 0)
		r = arch_get_u32(m, "attention.sliding_window_pattern", true, 1, DECODER_LAYERS_MAX,
				 &period, ret_error);
	if (r == 0)
		r = arch_get_f32(m, "rope.freq_base", true, 1.0f, 1e12f, &base, ret_error);
	window_base = base;
	if (r == 0)
		r = arch_get_f32(m, "rope.freq_base_swa", true, 1.0f, 1e12f, &window_base, ret_error);
	if (r < 0)
		return r;
	if (window_base != base)
		return fail(ret_error, -EOPNOTSUPP,
			    "%s: key 'gpt-oss.rope.freq_base_swa' differs from rope.freq_base",
			    m->path);
	for (uint32_t i = 0; i < m->n_layer; i++)
		if (i % period < period - 1)
			d->layers[i].window = window;
	return 0;
}

static int gpt_oss_load(struct model *m, char **ret_error)
{
	struct decoder *d = decoder_new(m, sizeof(*d), ret_error);
	int r;

	if (!d)
		return -ENOMEM;
	d->post_norm_name = "post_attention_norm.weight";
	d->sinks = d->biases = true;
	d->gating = BACKEND_GATING_CHOSEN;
	d->unit = BACKEND_UNIT_OAI;
	r = decoder_load_sizes(m, d, "attention.sliding_window", ret_error);
	if (r == 0)
		r = load_windows(m, d, ret_error);
	if (r == 0)
		r = decoder_load_experts(m, d, "expert_feed_forward_length", ret_error);
	return r == 0 ? decoder_bind_plain(m, d, ret_error) : r;
}

const struct arch arch_gpt_oss = {
	.name = "gpt-oss",
	.load = gpt_oss_load,
	.unload = decoder_unload,
	.forward = decoder_forward,
};
