/* SPDX-License-Identifier: MIT */
/*
 * arch-llama.c: Llama and what has its shape (Mistral, SmolLM, Mixtral...): plain attention, then a
 * feed-forward network, or routed experts where the file has some.
 *
 * Owns nothing beyond m->arch_data. Engine thread. Refuses to know how any of it is computed: that
 * is arch-decoder.c. Invariant: as there. The files' queries and keys lie in an order for which
 * rope turns adjacent values (llama.cpp's converter puts them so).
 */
#include "daemon/model/arch-decoder.h"

static int llama_load(struct model *m, char **ret_error)
{
	struct decoder *d = decoder_new(m, sizeof(*d), ret_error);
	uint32_t n_expert = 0;
	int r;

	if (!d)
		return -ENOMEM;
	d->post_norm_name = "ffn_norm.weight";
	d->rope_pairs = true;
	r = decoder_load_sizes(m, d, NULL, ret_error);
	if (r == 0)
		r = arch_get_u32(m, "expert_count", true, 0, UINT32_MAX, &n_expert, ret_error);
	/* Here it is the length of an expert too. */
	if (r == 0)
		r = n_expert > 0 ? decoder_load_experts(m, d, "feed_forward_length", ret_error)
				 : decoder_load_ffn(m, d, ret_error);
	return r == 0 ? decoder_bind_plain(m, d, ret_error) : r;
}

const struct arch arch_llama = {
	.name = "llama",
	.load = llama_load,
	.unload = decoder_unload,
	.forward = decoder_forward,
};
