/* SPDX-License-Identifier: MIT */
/*
 * arch.c: the table of model families, and what they all need at load time: checked metadata and
 * checked tensors.
 *
 * No state; any thread. Refuses to know any family beyond its table entry. Invariant: arch_get_*()
 * returns only values inside the caller's bounds, and a tensor that arch_bind() gives out has
 * exactly the shape asked for and a type that a kernel exists for, so that no later step has to
 * check again.
 */
#include "daemon/model/arch.h"

#include "daemon/model/model.h"

#include <inttypes.h>
#include <math.h>

static const struct arch *const table[] = {
	&arch_qwen35moe,
};

const struct arch *arch_find(const char *name, size_t len)
{
	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		if (strlen(table[i]->name) == len && memcmp(table[i]->name, name, len) == 0)
			return table[i];
	return NULL;
}

const char *arch_list(void)
{
	/*
	 * One entry so far; a second one goes into this string too (tests/unit/test-model.c
	 * compares them).
	 */
	return "qwen35moe";
}

int arch_get_u32(const struct model *m, const char *key, bool optional, uint32_t lo, uint32_t hi,
		 uint32_t *value, char **ret_error)
{
	char full[128];
	uint32_t v;
	int r;

	snprintf(full, sizeof(full), "%s.%s", m->arch->name, key);
	r = gguf_get_u32(m->gguf, full, &v);
	if (r == -ENOENT && optional)
		return 0;
	if (r == -ENOENT)
		return fail(ret_error, -EBADMSG, "%s: key '%s' is missing", m->path, full);
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

int arch_get_rope(const struct model *m, uint32_t n_rot, float **ret_freq, float *ret_mscale,
		  char **ret_error)
{
	float base, *freq;
	int r = arch_get_f32(m, "rope.freq_base", false, 1.0f, 1e12f, &base, ret_error);

	if (r < 0)
		return r;
	freq = calloc(n_rot / 2, sizeof(*freq));
	if (!freq)
		return fail(ret_error, -ENOMEM, "%s: no memory", m->path);
	for (size_t k = 0; k < n_rot / 2; k++)
		freq[k] = (float)pow((double)base, -2.0 * (double)k / (double)n_rot);
	*ret_freq = freq;
	*ret_mscale = 1.0f;
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
	static const enum quant_type order[] = { QUANT_F32,  QUANT_F16,  QUANT_BF16,
						 QUANT_Q8_0, QUANT_Q4_0, QUANT_Q4_K,
						 QUANT_Q5_K, QUANT_Q6_K, QUANT_MXFP4 };
	const struct quant_info *info = quant_info(t->type);
	const char *type = info ? info->name : "unknown";
	char have[128] = "";
	size_t used = 0;

	if (vector ? t->type == QUANT_F32 : quant_has_kernel(t->type))
		return 0;
	if (vector)
		return fail(ret_error, -EOPNOTSUPP,
			    "%s: tensor '%s': type %s, only F32 is supported here", m->path, name,
			    type);
	for (size_t i = 0; i < ARRAY_SIZE(order) && used < sizeof(have); i++)
		if (quant_has_kernel(order[i]))
			used += (size_t)snprintf(have + used, sizeof(have) - used, "%s%s",
						 used > 0 ? ", " : "", quant_info(order[i])->name);
	return fail(ret_error, -EOPNOTSUPP, "%s: tensor '%s': type %s has no kernel here (have: %s)",
		    m->path, name, type, have);
}

int arch_bind(const struct model *m, int64_t layer, const struct arch_tensor *list, size_t n,
	      char **ret_error)
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
		}
		*want->to = t;
	}
	return 0;
}
