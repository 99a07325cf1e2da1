/* SPDX-License-Identifier: MIT */
/*
 * arch.c: the table of model families, and what they all need at load time: checked metadata and
 * checked tensors.
 *
 * No state; any thread. Refuses to know any family beyond its table entry. Invariant: arch_get_*()
 * returns only values inside the caller's bounds, and a tensor that arch_bind() gives out has
 * exactly the shape asked for and a type that a kernel exists for, so that no later step has to
 * check again; what a file has and nobody here computes is refused, not left out.
 */
#include "daemon/model/arch.h"

#include "daemon/model/model.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>

static const struct arch *const table[] = {
	&arch_qwen35moe, &arch_qwen35, &arch_qwen3moe, &arch_qwen3, &arch_llama, &arch_gpt_oss,
};

static char list_text[128];

const struct arch *arch_find(const char *name, size_t len)
{
	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		if (strlen(table[i]->name) == len && memcmp(table[i]->name, name, len) == 0)
			return table[i];
	return NULL;
}

static void make_list(void)
{
	size_t used = 0;

	for (size_t i = 0; i < ARRAY_SIZE(table) && used < sizeof(list_text); i++)
		used += (size_t)snprintf(list_text + used, sizeof(list_text) - used, "%s%s",
					 i > 0 ? ", " : "", table[i]->name);
}

const char *arch_list(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, make_list);
	return list_text;
}

/* The number that an array has for every layer, -EOPNOTSUPP when they differ. */
static int get_same(const struct gguf_array *a, uint32_t *ret)
{
	uint32_t first = 0, v = 0;
	int r = gguf_array_u32(a, 0, &first);

	for (size_t i = 1; i < gguf_array_n(a) && r == 0; i++) {
		r = gguf_array_u32(a, i, &v);
		if (r == 0 && v != first)
			r = -EOPNOTSUPP;
	}
	if (r == 0)
		*ret = first;
	return r;
}

int arch_get_u32(const struct model *m, const char *key, bool optional, uint32_t lo, uint32_t hi,
		 uint32_t *value, char **ret_error)
{
	const struct gguf_array *by_layer;
	char full[128];
	uint32_t v;
	int r;

	snprintf(full, sizeof(full), "%s.%s", m->arch->name, key);
	by_layer = gguf_get_array(m->gguf, full);
	r = by_layer ? get_same(by_layer, &v) : gguf_get_u32(m->gguf, full, &v);
	if (r == -ENOENT && optional)
		return 0;
	if (r == -ENOENT)
		return fail(ret_error, -EBADMSG, "%s: key '%s' is missing", m->path, full);
	if (r == -EOPNOTSUPP)
		return fail(ret_error, r, "%s: key '%s' differs by layer, which is not supported",
			    m->path, full);
	if (r < 0)
		return fail(ret_error, -EBADMSG, "%s: key '%s' is no 32-bit unsigned number",
			    m->path, full);
	if (v < lo || v > hi)
		return fail(ret_error, -EBADMSG,
			    "%s: key '%s' is %" PRIu32 ", not between %" PRIu32 " and %" PRIu32,
			    m->path, full, v, lo, hi);
	*value = v;
	return 0;
}

int arch_get_f32(const struct model *m, const char *key, bool optional, float lo, float hi,
		 float *value, char **ret_error)
{
	char full[128];
	float v;
	int r;

	snprintf(full, sizeof(full), "%s.%s", m->arch->name, key);
	r = gguf_get_f32(m->gguf, full, &v);
	if (r == -ENOENT && optional)
		return 0;
	if (r == -ENOENT)
		return fail(ret_error, -EBADMSG, "%s: key '%s' is missing", m->path, full);
	if (r < 0)
		return fail(ret_error, -EBADMSG, "%s: key '%s' is no finite number", m->path, full);
	if (!(v >= lo && v <= hi))
		return fail(ret_error, -EBADMSG, "%s: key '%s' is %g, not between %g and %g",
			    m->path, full, (double)v, (double)lo, (double)hi);
	*value = v;
	return 0;
}

int arch_get_numbers(const struct model *m, const struct arch_number *list, size_t n, char **ret_error)
{
	for (size_t i = 0; i < n; i++) {
		int r = arch_get_u32(m, list[i].key, list[i].optional, list[i].lo, list[i].hi,
				     list[i].to, ret_error);

		if (r < 0)
			return r;
	}
	return 0;
}

/* The paper's; llama.cpp takes no others from the files of these families. */
#define YARN_TURNS_FAST 32
#define YARN_TURNS_SLOW 1

/* Names of the metadata: llama.cpp's src/llama-arch.cpp. */
static const struct {
	const char *key;
	float neutral[2];
} changing[] = {
	{ "attention.clamp_kqv", { 0, 0 } },
	{ "attention.max_alibi_bias", { 0, 0 } },
	{ "attention.causal", { 1, 1 } },
	{ "attention.sliding_window", { 0, 0 } },
	{ "attention.output_scale", { 0, 1 } },
	{ "attention.scale", { 0, 0 } },
	{ "attention.temperature_length", { 0, 0 } },
	{ "attention.temperature_scale", { 0, 0 } },
	{ "attn_logit_softcapping", { 0, 0 } },
	{ "router_logit_softcapping", { 0, 0 } },
	{ "final_logit_softcapping", { 0, 0 } },
	{ "logit_scale", { 0, 1 } },
	{ "residual_scale", { 0, 1 } },
	{ "embedding_scale", { 0, 1 } },
	{ "use_parallel_residual", { 0, 0 } },
	{ "expert_weights_scale", { 0, 1 } },
	{ "expert_weights_norm", { 1, 1 } },
	{ "expert_group_count", { 0, 1 } },
	{ "expert_group_used_count", { 0, 1 } },
	{ "leading_dense_block_count", { 0, 0 } },
	{ "nextn_predict_layers", { 0, 0 } },
	{ "rope.scaling.alpha", { 0, 0 } },
	{ "rope.scaling.yarn_ext_factor", { 1, 1 } },
	{ "rope.scaling.yarn_attn_factor", { 1, 1 } },
	{ "rope.scaling.yarn_beta_fast", { YARN_TURNS_FAST, YARN_TURNS_FAST } },
	{ "rope.scaling.yarn_beta_slow", { YARN_TURNS_SLOW, YARN_TURNS_SLOW } },
	{ "rope.scaling.yarn_log_multiplier", { 0, 0 } },
};

/* Is there a key, with a value other than these two? */
static bool has_other_value(const struct gguf *g, const char *key, const float *neutral)
{
	uint64_t u = 0;
	bool b = false;
	float f = 0;
	int r = gguf_get_f32(g, key, &f);

	if (r == -EINVAL) {
		r = gguf_get_u64(g, key, &u);
		f = (float)u;
	}
	if (r == -EINVAL) {
		r = gguf_get_bool(g, key, &b);
		f = (float)b;
	}
	if (r == -ENOENT)
		return false;
	return r < 0 || (f != neutral[0] && f != neutral[1]);
}

int arch_refuse_unknown(const struct model *m, const char *known, char **ret_error)
{
	for (size_t i = 0; i < ARRAY_SIZE(changing); i++) {
		char full[128];

		if (known && streq(known, changing[i].key))
			continue;
		snprintf(full, sizeof(full), "%s.%s", m->arch->name, changing[i].key);
		if (has_other_value(m->gguf, full, changing[i].neutral))
			return fail(ret_error, -EOPNOTSUPP,
				    "%s: key '%s' asks for what is not supported", m->path, full);
	}
	return 0;
}

enum scaling { SCALING_NONE, SCALING_LINEAR, SCALING_YARN };

struct scaling_params {
	enum scaling kind;
	float factor, attn_factor;
	uint32_t n_ctx; /* that the model was trained with before */
};

static int get_scaling_kind(const struct model *m, enum scaling *ret, char **ret_error)
{
	static const char *const names[] = {
		[SCALING_NONE] = "none", [SCALING_LINEAR] = "linear", [SCALING_YARN] = "yarn"
	};
	const char *kind = names[SCALING_LINEAR];
	size_t len = strlen(kind);
	char full[128];
	int r;

	snprintf(full, sizeof(full), "%s.rope.scaling.type", m->arch->name);
	r = gguf_get_str(m->gguf, full, &kind, &len);
	if (r < 0 && r != -ENOENT)
		return fail(ret_error, -EBADMSG, "%s: key '%s' is no string", m->path, full);
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (len == strlen(names[i]) && memcmp(kind, names[i], len) == 0) {
			*ret = (enum scaling)i;
			return 0;
		}
	return fail(ret_error, -EOPNOTSUPP,
		    "%s: key '%s' is none of 'none', 'linear' and 'yarn', which are supported",
		    m->path, full);
}

static int get_scaling(const struct model *m, struct scaling_params *s, char **ret_error)
{
	int r = get_scaling_kind(m, &s->kind, ret_error);

	/* The older name first. 0 means none. */
	if (r == 0)
		r = arch_get_f32(m, "rope.scale_linear", true, 0, 1e6f, &s->factor, ret_error);
	if (r == 0)
		r = arch_get_f32(m, "rope.scaling.factor", true, 0, 1e6f, &s->factor, ret_error);
	if (r == 0)
		r = arch_get_f32(m, "rope.scaling.attn_factor", true, 1e-3f, 1e3f, &s->attn_factor,
				 ret_error);
	if (r == 0)
		r = arch_get_u32(m, "rope.scaling.original_context_length", true, 1, INT32_MAX,
				 &s->n_ctx, ret_error);
	if (r < 0)
		return r;
	if (s->kind == SCALING_NONE || s->factor == 0)
		s->factor = 1;
	return s->factor >= 1e-3f ? 0
				  : fail(ret_error, -EBADMSG, "%s: a rope.scaling.factor of %g",
					 m->path, (double)s->factor);
}

/* The pair that makes `turns` turns in the original context. */
static double yarn_pair(const struct scaling_params *s, double base, uint32_t n_rot, double turns)
{
	return n_rot * log(s->n_ctx / (turns * 2 * M_PI)) / (2 * log(base));
}

/*
 * Pairs that turn often keep their speed, those that do not turn even once are slowed down by the
 * factor, and between them it goes over evenly.
 */
static void stretch_yarn(const struct scaling_params *s, double base, uint32_t n_rot, float *freq)
{
	double first = MAX(floor(yarn_pair(s, base, n_rot, YARN_TURNS_FAST)), 0.0);
	double last = MIN(ceil(yarn_pair(s, base, n_rot, YARN_TURNS_SLOW)), n_rot - 1.0);

	for (uint32_t k = 0; k < n_rot / 2; k++) {
		double slow = CLAMP((k - first) / MAX(last - first, 0.001), 0.0, 1.0);

		freq[k] = (float)(freq[k] * (slow / s->factor + 1 - slow));
	}
}

/* Llama 3 has its stretching in the file, pair by pair. */
static int apply_factors(struct model *m, uint32_t n_rot, float *freq, char **ret_error)
{
	const struct gguf_tensor *factors;
	const struct arch_tensor want = { "rope_freqs.weight", &factors, .vector = true,
					  .optional = true, .ne = { n_rot / 2 } };
	int r = arch_bind(m, -1, &want, 1, ret_error);

	if (r < 0 || !factors)
		return r;
	for (uint32_t k = 0; k < n_rot / 2; k++) {
		float f = ((const float *)factors->data)[k];

		if (!(f > 0) || !isfinite(f))
			return fail(ret_error, -EBADMSG, "%s: tensor '%s' has a %g", m->path,
				    factors->name, (double)f);
		freq[k] /= f;
	}
	return 0;
}

int arch_get_rope(struct model *m, uint32_t n_rot, float **ret_freq, float *ret_mscale, char **ret_error)
{
	struct scaling_params s = { .factor = 1, .attn_factor = 1, .n_ctx = m->n_ctx_train };
	_cleanup_(freep) float *freq = calloc(n_rot / 2, sizeof(*freq));
	float base = 10000.0f;
	int r;

	if (!freq)
		return fail(ret_error, -ENOMEM, "%s: no memory", m->path);
	r = arch_get_f32(m, "rope.freq_base", true, 1.0f, 1e12f, &base, ret_error);
	if (r == 0)
		r = get_scaling(m, &s, ret_error);
	if (r < 0)
		return r;
	if (s.kind == SCALING_YARN && base < 1.001f)
		return fail(ret_error, -EBADMSG, "%s: a rope.freq_base of %g cannot be scaled",
			    m->path, (double)base);
	for (size_t k = 0; k < n_rot / 2; k++)
		freq[k] = (float)pow((double)base, -2.0 * (double)k / (double)n_rot);
	r = apply_factors(m, n_rot, freq, ret_error);
	if (r < 0)
		return r;
	if (s.kind == SCALING_YARN)
		stretch_yarn(&s, (double)base, n_rot, freq);
	else
		for (size_t k = 0; k < n_rot / 2; k++)
			freq[k] /= s.factor;
	*ret_freq = TAKE_PTR(freq);
	*ret_mscale = s.attn_factor;
	if (s.kind == SCALING_YARN && s.factor > 1)
		*ret_mscale *= 1 + 0.1f * logf(s.factor);
	return 0;
}

/* "[4096, 512]" */
static void shape_to_string(const uint64_t *ne, size_t n, char *out, size_t size)
{
	size_t used = 0;

	for (size_t i = 0; i < n && used < size; i++) {
		int k = snprintf(out + used, size - used, "%s%" PRIu64, i == 0 ? "[" : ", ", ne[i]);

		used += k > 0 ? (size_t)k : 0;
	}
	if (used < size)
		snprintf(out + used, size - used, "]");
}

static int check_shape(const struct model *m, const char *name, const struct arch_tensor *want,
		       const struct gguf_tensor *t, char **ret_error)
{
	char have_text[128], want_text[128];
	size_t n_want = 0;
	bool same = true;

	while (n_want < ARRAY_SIZE(want->ne) && want->ne[n_want] > 0)
		n_want++;
	for (size_t i = 0; i < GGUF_MAX_DIMS; i++)
		same = same && t->ne[i] == (i < n_want ? want->ne[i] : 1);
	if (same)
		return 0;
	shape_to_string(t->ne, CLAMP(t->n_dims, 1u, (uint32_t)GGUF_MAX_DIMS), have_text,
			sizeof(have_text));
	shape_to_string(want->ne, n_want, want_text, sizeof(want_text));
	return fail(ret_error, -EBADMSG, "%s: tensor '%s' has shape %s, the metadata says %s",
		    m->path, name, have_text, want_text);
}

static int check_type(const struct model *m, const char *name, bool vector,
		      const struct gguf_tensor *t, char **ret_error)
{
	const struct quant_info *info = quant_info(t->type);
	const char *type = info ? info->name : "unknown";
	char have[256] = "";
	size_t used = 0;

	if (vector ? t->type == QUANT_F32 : quant_has_kernel(t->type))
		return 0;
	if (vector)
		return fail(ret_error, -EOPNOTSUPP,
			    "%s: tensor '%s': type %s, only F32 is supported here", m->path, name,
			    type);
	for (uint32_t i = 0; i < QUANT_TYPE_MAX && used < sizeof(have); i++)
		if (quant_has_kernel(i))
			used += (size_t)snprintf(have + used, sizeof(have) - used, "%s%s",
						 used > 0 ? ", " : "", quant_info(i)->name);
	return fail(ret_error, -EOPNOTSUPP, "%s: tensor '%s': type %s has no kernel here (have: %s)",
		    m->path, name, type, have);
}

int arch_bind(struct model *m, int64_t layer, const struct arch_tensor *list, size_t n, char **ret_error)
{
	for (size_t i = 0; i < n; i++) {
		const struct arch_tensor *want = &list[i];
		const struct gguf_tensor *t;
		char name[128];
		int r;

		if (layer < 0)
			snprintf(name, sizeof(name), "%s", want->name);
		else
			snprintf(name, sizeof(name), "blk.%" PRId64 ".%s", layer, want->name);
		t = gguf_tensor(m->gguf, name);
		if (!t && !want->optional)
			return fail(ret_error, -EBADMSG, "%s: tensor '%s' is missing", m->path, name);
		if (t) {
			r = check_shape(m, name, want, t, ret_error);
			if (r == 0)
				r = check_type(m, name, want->vector, t, ret_error);
			if (r < 0)
				return r;
			assert(m->n_bound < gguf_n_tensors(m->gguf)); /* each once */
			m->bound[m->n_bound++] = t;
		}
		*want->to = t;
	}
	return 0;
}
