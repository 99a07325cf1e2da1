/* SPDX-License-Identifier: MIT */
/*
 * arch-qwen3.c: Qwen3, dense and with experts: attention with norms of each head's query and key,
 * then a feed-forward network or routed experts.
 *
 * Owns nothing beyond m->arch_data. Engine thread. Refuses to know how any of it is computed: that
 * is arch-decoder.c. Invariant: as there.
 */
#include "daemon/model/arch-decoder.h"

static int load(struct model *m, bool experts, char **ret_error)
{
	struct decoder *d = decoder_new(m, sizeof(*d), ret_error);
	int r;

	if (!d)
		return -ENOMEM;
	d->post_norm_name = "ffn_norm.weight";
	d->qk_norm = true;
	r = decoder_load_sizes(m, d, NULL, ret_error);
	if (r == 0)
		r = experts ? decoder_load_experts(m, d, "expert_feed_forward_length", ret_error)
			    : decoder_load_ffn(m, d, ret_error);
	return r == 0 ? decoder_bind_plain(m, d, ret_error) : r;
}

static int qwen3_load(struct model *m, char **ret_error)
{
	return load(m, false, ret_error);
}

static int qwen3moe_load(struct model *m, char **ret_error)
{
	return load(m, true, ret_error);
}

const struct arch arch_qwen3 = {
	.name = "qwen3",
	.load = qwen3_load,
	.unload = decoder_unload,
	.forward = decoder_forward,
};

const struct arch arch_qwen3moe = {
	.name = "qwen3moe",
	.load = qwen3moe_load,
	.unload = decoder_unload,
	.forward = decoder_forward,
};
