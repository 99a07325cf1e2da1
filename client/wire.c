/* SPDX-License-Identifier: MIT */
/*
 * wire.c: the structures of resident.h to JSON and back. See wire.h.
 */
#include "client/wire.h"

#include "client/utf8.h"

#include <math.h>

struct field {
	const char *key; /* also the name of the member */
	enum { FIELD_STR, FIELD_U32, FIELD_U64, FIELD_REAL, FIELD_BOOL } type;
	bool required;
	size_t offset;
};
#define FIELD(struct_, member, type_, required_)                                    \
	{                                                                           \
#member, FIELD_##type_, required_, offsetof(struct struct_, member) \
	}

static void read_fields(struct args *a, const struct field *fields, size_t n, void *base)
{
	for (const struct field *f = fields; f < fields + n; f++) {
		void *p = (char *)base + f->offset;
		int64_t i = 0;

		switch (f->type) {
		case FIELD_STR: args_str(a, f->key, f->required, FRAME_MAX, p, NULL); break;
		case FIELD_REAL: args_f64(a, f->key, -1e300, 1e300, p); break;
		case FIELD_BOOL: args_bool(a, f->key, p); break;
		case FIELD_U32:
			if (args_i64(a, f->key, f->required, 0, UINT32_MAX, &i))
				*(uint32_t *)p = (uint32_t)i;
			break;
		case FIELD_U64:
			if (args_i64(a, f->key, f->required, 0, INT64_MAX, &i))
				*(uint64_t *)p = (uint64_t)i;
			break;
		}
	}
}

static const struct field model_fields[] = {
	FIELD(resident_model, name, STR, true),
	FIELD(resident_model, architecture, STR, true),
	FIELD(resident_model, parameters, U64, true),
	FIELD(resident_model, weight_bytes, U64, true),
	FIELD(resident_model, context_max, U32, true),
	FIELD(resident_model, context_trained, U32, true),
	FIELD(resident_model, chat, BOOL, true),
	FIELD(resident_model, thinking, BOOL, true),
};

static const struct field availability_fields[] = {
	FIELD(resident_availability, state, STR, true),
	FIELD(resident_availability, reason, STR, false),
	FIELD(resident_availability, sessions, U32, true),
	FIELD(resident_availability, queued, U32, true),
	FIELD(resident_availability, retry_after_ms, U32, false),
};

static const struct field status_fields[] = {
	FIELD(resident_status, version, STR, true),
	FIELD(resident_status, state, STR, true),
	FIELD(resident_status, reason, STR, false),
	FIELD(resident_status, backend, STR, true),
	FIELD(resident_status, pid, U32, true),
	FIELD(resident_status, threads, U32, true),
	FIELD(resident_status, sessions, U32, true),
	FIELD(resident_status, sessions_own, U32, true),
	FIELD(resident_status, queued, U32, true),
	FIELD(resident_status, running, U32, true),
	FIELD(resident_status, uptime_s, U64, true),
	FIELD(resident_status, requests_total, U64, true),
	FIELD(resident_status, prompt_tokens_total, U64, true),
	FIELD(resident_status, generated_tokens_total, U64, true),
	FIELD(resident_status, prefill_tokens_per_second, REAL, true),
	FIELD(resident_status, decode_tokens_per_second, REAL, true),
	FIELD(resident_status, rss_bytes, U64, true),
	FIELD(resident_status, rss_anon_bytes, U64, true),
	FIELD(resident_status, rss_file_bytes, U64, true),
	FIELD(resident_status, kv_bytes_used, U64, true),
	FIELD(resident_status, kv_bytes_max, U64, true),
	FIELD(resident_status, experts, STR, false),
	FIELD(resident_status, budget_bytes, U64, false),
};

static const struct field gpu_fields[] = {
	FIELD(resident_gpu, state, STR, true),       FIELD(resident_gpu, why, STR, false),
	FIELD(resident_gpu, name, STR, false),       FIELD(resident_gpu, driver, STR, false),
	FIELD(resident_gpu, capability, STR, false), FIELD(resident_gpu, code, STR, false),
	FIELD(resident_gpu, emulator, BOOL, true),   FIELD(resident_gpu, total_bytes, U64, true),
	FIELD(resident_gpu, lost, U64, true),        FIELD(resident_gpu, state_s, U64, true),
};

static const struct field usage_fields[] = {
	FIELD(resident_usage, prompt_tokens, U64, true),
	FIELD(resident_usage, cached_tokens, U64, true),
	FIELD(resident_usage, answer_tokens, U64, true),
	FIELD(resident_usage, thought_tokens, U64, true),
	FIELD(resident_usage, queue_us, U64, true),
	FIELD(resident_usage, prefill_us, U64, true),
	FIELD(resident_usage, decode_us, U64, true),
};

void wire_read_usage(struct args *a, struct resident_usage *ret)
{
	read_fields(a, usage_fields, ARRAY_SIZE(usage_fields), ret);
}

/* The model of a reply, or NULL. */
static const struct resident_model *read_model(struct args *a, struct resident_model *ret)
{
	json_t *object = NULL;
	struct args m;

	if (!args_object(a, "model", false, &object))
		return NULL;
	*ret = (struct resident_model){};
	args_begin(&m, object);
	read_fields(&m, model_fields, ARRAY_SIZE(model_fields), ret);
	if (m.bad)
		args_refuse(a, m.bad, m.why);
	return ret;
}

void wire_read_availability(struct args *a, struct resident_availability *ret,
			    struct resident_model *model)
{
	*ret = (struct resident_availability){ .model = read_model(a, model) };
	read_fields(a, availability_fields, ARRAY_SIZE(availability_fields), ret);
}

static const struct resident_gpu *read_gpu(struct args *a, struct resident_gpu *ret)
{
	json_t *object = NULL;
	struct args g;

	if (!args_object(a, "gpu", false, &object))
		return NULL;
	*ret = (struct resident_gpu){};
	args_begin(&g, object);
	read_fields(&g, gpu_fields, ARRAY_SIZE(gpu_fields), ret);
	if (g.bad)
		args_refuse(a, g.bad, g.why);
	return ret;
}

void wire_read_status(struct args *a, struct resident_status *ret, struct resident_model *model,
		      struct resident_gpu *gpu)
{
	*ret = (struct resident_status){ .model = read_model(a, model), .gpu = read_gpu(a, gpu) };
	read_fields(a, status_fields, ARRAY_SIZE(status_fields), ret);
}

static void read_logprob(struct args *outer, json_t *item, struct resident_logprob *lp, json_t **ret_top)
{
	struct args a;
	int64_t token = 0;

	if (!json_is_object(item)) {
		args_refuse(outer, "logprobs", "has an item that is not an object");
		return;
	}
	*lp = (struct resident_logprob){ .text = "" };
	args_begin(&a, item);
	args_i64(&a, "token", true, 0, INT32_MAX, &token);
	args_str(&a, "text", true, FRAME_MAX, &lp->text, NULL);
	args_f64(&a, "logprob", -1e300, 1e300, &lp->logprob);
	args_array(&a, "top", false, SIZE_MAX, ret_top);
	lp->token = (int32_t)token;
	if (a.bad)
		args_refuse(outer, a.bad, a.why);
}

int wire_read_logprobs(struct args *a, json_t *list, struct resident_logprob **ret, size_t *ret_n)
{
	_cleanup_(freep) struct resident_logprob *all = NULL;
	size_t n = json_array_size(list), total = n, used = n;

	for (size_t i = 0; i < n; i++)
		total += json_array_size(json_object_get(json_array_get(list, i), "top"));
	all = calloc(MAX(total, (size_t)1), sizeof(*all)); /* bounded by VARLINK_VALUES_MAX */
	if (!all)
		return -ENOMEM;
	for (size_t i = 0; i < n && !a->bad; i++) {
		json_t *top = NULL, *none = NULL;

		read_logprob(a, json_array_get(list, i), &all[i], &top);
		all[i].top = all + used;
		all[i].n_top = json_array_size(top);
		for (size_t k = 0; k < json_array_size(top) && !a->bad; k++)
			read_logprob(a, json_array_get(top, k), &all[used++], &none);
	}
	*ret = TAKE_PTR(all);
	*ret_n = n;
	return 0;
}

int wire_put(json_t *obj, const char *key, json_t *value)
{
	return json_object_set_new(obj, key, value) < 0 ? -ENOMEM : 0;
}

int wire_put_text(json_t *obj, const char *key, const char *text)
{
	if (!text)
		return -EINVAL;
	if (!utf8_decodable(text, strlen(text)))
		return -EILSEQ;
	return wire_put(obj, key, json_string_nocheck(text));
}

static const struct {
	uint64_t bit;
	const char *name;
	size_t offset;
	bool real;
} options_table[] = {
#define OPTION(bit, name, real)                                           \
	{                                                                 \
		bit, #name, offsetof(struct resident_options, name), real \
	}
	OPTION(RESIDENT_MAX_TOKENS, max_tokens, false),
	OPTION(RESIDENT_MAX_THINKING_TOKENS, max_thinking_tokens, false),
	OPTION(RESIDENT_TEMPERATURE, temperature, true),
	OPTION(RESIDENT_TOP_K, top_k, false),
	OPTION(RESIDENT_TOP_P, top_p, true),
	OPTION(RESIDENT_MIN_P, min_p, true),
	OPTION(RESIDENT_TYPICAL_P, typical_p, true),
	OPTION(RESIDENT_REPEAT_PENALTY, repeat_penalty, true),
	OPTION(RESIDENT_PRESENCE_PENALTY, presence_penalty, true),
	OPTION(RESIDENT_FREQUENCY_PENALTY, frequency_penalty, true),
	OPTION(RESIDENT_PENALTY_LAST_TOKENS, penalty_last_tokens, false),
	OPTION(RESIDENT_SEED, seed, false),
	OPTION(RESIDENT_TOP_LOGPROBS, top_logprobs, false),
#undef OPTION
};

/* The options as this version of the library knows them. */
static int options_copy(const struct resident_options *o, struct resident_options *ret)
{
	struct resident_options copy = {};

	if (o->size < offsetof(struct resident_options, max_tokens))
		return -EINVAL;
	for (size_t i = sizeof(copy); i < o->size; i++)
		if (((const char *)o)[i] != 0)
			return -E2BIG;
	if (o->set >= RESIDENT_TOP_LOGPROBS << 1)
		return -E2BIG;
	memcpy(&copy, o, MIN(o->size, sizeof(copy)));
	*ret = copy;
	return 0;
}

static int put_numbers(json_t *obj, const struct resident_options *o)
{
	for (size_t i = 0; i < ARRAY_SIZE(options_table); i++) {
		const void *p = (const char *)o + options_table[i].offset;
		double real = options_table[i].real ? *(const double *)p : 0;
		int64_t integer = options_table[i].real ? 0 : *(const int64_t *)p;
		int n;

		if (!(o->set & options_table[i].bit)) {
			if (integer != 0 || !(real >= 0 && real <= 0))
				return -EINVAL;
			continue;
		}
		if (!isfinite(real))
			return -EINVAL;
		n = wire_put(obj, options_table[i].name,
			     options_table[i].real ? json_real(real) : json_integer(integer));
		if (n < 0)
			return n;
	}
	return 0;
}

static int put_stop(json_t *obj, const char *const *stop)
{
	json_t *list = json_array();
	int n = wire_put(obj, "stop", list);

	for (; n == 0 && *stop; stop++) {
		if (!utf8_decodable(*stop, strlen(*stop)))
			return -EILSEQ;
		n = json_array_append_new(list, json_string_nocheck(*stop)) < 0 ? -ENOMEM : 0;
	}
	return n;
}

static int put_logit_bias(json_t *obj, const struct resident_logit_bias *bias, size_t n_bias)
{
	json_t *map = json_object();
	int n = wire_put(obj, "logit_bias", map);

	for (size_t i = 0; n == 0 && i < n_bias; i++) {
		char key[16];

		if (!isfinite(bias[i].bias))
			return -EINVAL;
		snprintf(key, sizeof(key), "%d", bias[i].token);
		n = wire_put(map, key, json_real(bias[i].bias));
	}
	return n;
}

int wire_put_options(json_t *parameters, const struct resident_options *options)
{
	struct resident_options o;
	json_t *obj;
	int n;

	if (!options)
		return 0;
	n = options_copy(options, &o);
	if (n < 0)
		return n;
	obj = json_object();
	n = wire_put(parameters, "options", obj);
	if (n == 0)
		n = put_numbers(obj, &o);
	if (n == 0 && o.stop)
		n = put_stop(obj, o.stop);
	if (n == 0 && o.n_logit_bias > 0)
		n = o.logit_bias ? put_logit_bias(obj, o.logit_bias, o.n_logit_bias) : -EINVAL;
	if (n == 0 && o.want)
		n = wire_put_text(obj, "want", o.want);
	return n;
}

int wire_put_messages(json_t *parameters, const struct resident_message *messages, size_t n_messages)
{
	json_t *list = json_array();
	int n = wire_put(parameters, "messages", list);

	if (n == 0 && !messages && n_messages > 0)
		return -EINVAL;
	for (const struct resident_message *m = messages; n == 0 && m < messages + n_messages; m++) {
		json_t *obj = json_object();

		if (json_array_append_new(list, obj) < 0)
			return -ENOMEM;
		for (size_t i = 0; i < ARRAY_SIZE(m->reserved); i++)
			if (m->reserved[i])
				return -E2BIG;
		n = wire_put_text(obj, "role", m->role);
		if (n == 0)
			n = wire_put_text(obj, "content", m->content);
		if (n == 0 && m->reasoning)
			n = wire_put_text(obj, "reasoning", m->reasoning);
	}
	return n;
}
