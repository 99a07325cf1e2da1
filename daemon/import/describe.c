/* SPDX-License-Identifier: MIT */
/*
 * describe.c: metadata keys to JSON, titles to file names. See describe.h.
 *
 * Invariant: nothing that a model file says becomes a path, a hidden file, an option or more than
 * 100 bytes of a name.
 */
#include "daemon/import/describe.h"

#include "daemon/model/tokenizer.h"

#include <strings.h>

#define TEXT_MAX 1000 /* bytes of one field: a licence's name or an address, no licence text */

/* Later keys fill what earlier ones left open. */
static const struct {
	const char *field, *key;
} fields[] = {
	{ "title", "general.name" },
	{ "architecture", "general.architecture" },
	{ "basename", "general.basename" },
	{ "size_label", "general.size_label" },
	{ "version", "general.version" },
	{ "finetune", "general.finetune" },
	{ "description", "general.description" },
	{ "author", "general.author" },
	{ "organization", "general.organization" },
	{ "quantized_by", "general.quantized_by" },
	{ "license", "general.license" },
	{ "license", "general.license.name" },
	{ "license_name", "general.license.name" },
	{ "license_link", "general.license.link" },
	{ "source", "general.source.url" },
	{ "source", "general.source.repo_url" },
	{ "source", "general.source.huggingface.repository" },
	{ "source", "general.url" },
	{ "source", "general.repo_url" },
	{ "base_model", "general.base_model.0.repo_url" },
	{ "base_model", "general.base_model.0.name" },
	{ "doi", "general.doi" },
};

static int put(json_t *o, const char *key, json_t *value)
{
	return json_object_set_new(o, key, value) < 0 ? -ENOMEM : 0;
}

static int put_text(json_t *o, const struct gguf *g, const char *field, const char *key)
{
	const char *s;
	size_t len;

	if (json_object_get(o, field) || gguf_get_str(g, key, &s, &len) < 0)
		return 0;
	if (len == 0 || len > TEXT_MAX || !utf8_valid(s, len))
		return 0;
	return put(o, field, json_stringn(s, len));
}

struct weights {
	uint64_t n_params, bytes;
	uint64_t of_type[QUANT_TYPE_MAX]; /* bytes */
};

/* Tensors may lie over each other, so that their sum is not bounded by the file: it saturates. */
static void weigh(const struct gguf *g, struct weights *w)
{
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		uint64_t n = 1;

		for (size_t d = 0; d < GGUF_MAX_DIMS; d++)
			if (__builtin_mul_overflow(n, t->ne[d], &n))
				n = UINT64_MAX;
		if (__builtin_add_overflow(w->n_params, n, &w->n_params))
			w->n_params = UINT64_MAX;
		if (__builtin_add_overflow(w->bytes, t->bytes, &w->bytes))
			w->bytes = UINT64_MAX;
		if (t->type < QUANT_TYPE_MAX)
			w->of_type[t->type] += t->bytes;
	}
}

/* The type of most bytes. */
static const char *main_type(const struct weights *w)
{
	uint32_t best = QUANT_F32;

	for (uint32_t i = 0; i < QUANT_TYPE_MAX; i++)
		if (w->of_type[i] > w->of_type[best])
			best = i;
	return quant_info(best)->name;
}

static json_t *number(uint64_t n)
{
	return json_integer((json_int_t)MIN(n, (uint64_t)INT64_MAX));
}

static int put_numbers(json_t *o, const struct gguf *g)
{
	const char *arch = json_string_value(json_object_get(o, "architecture"));
	struct weights w = {};
	char key[128];
	uint64_t n;
	int r;

	weigh(g, &w);
	r = put(o, "quantization", json_string(main_type(&w)));
	if (r == 0)
		r = put(o, "parameters", number(w.n_params));
	if (r == 0)
		r = put(o, "weight_bytes", number(w.bytes));
	if (r < 0 || !arch)
		return r;
	snprintf(key, sizeof(key), "%.100s.context_length", arch);
	return gguf_get_u64(g, key, &n) < 0 ? 0 : put(o, "context_trained", number(n));
}

json_t *describe_model(const struct gguf *g)
{
	json_t *o = json_object();
	int r = o ? 0 : -ENOMEM;

	for (size_t i = 0; i < ARRAY_SIZE(fields) && r == 0; i++)
		r = put_text(o, g, fields[i].field, fields[i].key);
	if (r == 0)
		r = put_numbers(o, g);
	if (r < 0) {
		json_decref(o);
		return NULL;
	}
	return o;
}

/* ---- names ---- */

static bool may_stay(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
	       c == '.' || c == '_' || c == '+';
}

void describe_clean_name(const char *s, size_t len, char ret[DESCRIBE_NAME_MAX + 1])
{
	bool gap = false;
	size_t n = 0;

	for (size_t i = 0; i < len && n < DESCRIBE_NAME_MAX; i++) {
		if (!may_stay(s[i])) {
			gap = true;
			continue;
		}
		if (n == 0 && s[i] == '.')
			continue;
		if (gap && n > 0)
			ret[n++] = '-';
		gap = false;
		if (n < DESCRIBE_NAME_MAX)
			ret[n++] = s[i];
	}
	while (n > 0 && (ret[n - 1] == '-' || ret[n - 1] == '.'))
		n--;
	ret[n] = 0;
}

static bool all_digits(const char *s, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (s[i] < '0' || s[i] > '9')
			return false;
	return true;
}

bool describe_split_name(const char *file, size_t *ret_len, unsigned *ret_no, unsigned *ret_count)
{
	static const char shape[] = "-00000-of-00000.gguf";
	size_t len = strlen(file), tail = sizeof(shape) - 1;
	const char *s;

	if (len <= tail)
		return false;
	s = file + len - tail;
	if (s[0] != '-' || memcmp(s + 6, "-of-", 4) != 0 || !streq(s + 15, ".gguf"))
		return false;
	if (!all_digits(s + 1, 5) || !all_digits(s + 10, 5))
		return false;
	*ret_len = len - tail;
	*ret_no = (unsigned)strtoul(s + 1, NULL, 10);
	*ret_count = (unsigned)strtoul(s + 10, NULL, 10);
	return true;
}

/* The file's name without what only says that it is one. */
static size_t bare_length(const char *file)
{
	size_t len = strlen(file);
	unsigned no, count;

	if (describe_split_name(file, &len, &no, &count))
		return len;
	return len > 5 && streq(file + len - 5, ".gguf") ? len - 5 : len;
}

void describe_name(const struct gguf *g, const char *wanted, const char *file,
		   char ret[DESCRIBE_NAME_MAX + 1])
{
	struct weights w = {};
	const char *title, *type;
	size_t len;

	if (wanted)
		describe_clean_name(wanted, strlen(wanted), ret);
	if (wanted && ret[0])
		return;
	ret[0] = 0;
	if (gguf_get_str(g, "general.name", &title, &len) == 0)
		describe_clean_name(title, len, ret);
	if (!ret[0])
		describe_clean_name(file, bare_length(file), ret);
	if (!ret[0])
		strcpy(ret, "model");
	weigh(g, &w);
	type = main_type(&w);
	len = strlen(ret);
	if (!strcasestr(ret, type) && len + 1 + strlen(type) <= DESCRIBE_NAME_MAX)
		snprintf(ret + len, DESCRIBE_NAME_MAX + 1 - len, "-%s", type);
}
