/* SPDX-License-Identifier: MIT */
/*
 * model.c: loads a model file into the one object that everything else reads. See model.h.
 *
 * Owns file, vocabulary, template and the family's data, and frees them with the last reference.
 * Any thread may take and drop references; loading happens on one thread. Refuses to know families
 * (arch.c) and keys beyond the architecture's name. Invariant: a model that model_load() returned
 * is complete and never changes again.
 */
#include "daemon/model/model.h"

#include <inttypes.h>

#define NAME_MAX_BYTES 200

struct model *model_ref(struct model *m)
{
	atomic_fetch_add_explicit(&m->n_ref, 1, memory_order_relaxed);
	return m;
}

struct model *model_unref(struct model *m)
{
	if (!m || atomic_fetch_sub_explicit(&m->n_ref, 1, memory_order_acq_rel) > 1)
		return NULL;
	if (m->arch)
		m->arch->unload(m);
	catalog_free(m->catalog);
	template_free(m->template);
	tokenizer_free(m->tokenizer);
	gguf_close(m->gguf);
	free(m->bound);
	free(m->template_error);
	free(m->name);
	free(m->path);
	free(m);
	return NULL;
}

/*
 * Text from a file, fit for logs and terminals: control characters (C1 too) become spaces, anything
 * not UTF-8 is refused.
 */
static char *printable_copy(const char *s, size_t len)
{
	char *copy;

	if (len > NAME_MAX_BYTES) {
		len = NAME_MAX_BYTES;
		while (len > 0 && ((unsigned char)s[len] & 0xc0) == 0x80)
			len--;
	}
	if (len == 0 || !utf8_valid(s, len))
		return NULL;
	copy = strndup(s, len);
	if (!copy || strlen(copy) != len) { /* a NUL inside */
		free(copy);
		return NULL;
	}
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)copy[i];

		if (c < 0x20 || c == 0x7f)
			copy[i] = ' ';
		else if (c == 0xc2 && (unsigned char)copy[i + 1] < 0xa0)
			copy[i] = copy[i + 1] = ' ';
	}
	return copy;
}

static int set_name(struct model *m)
{
	const char *s, *slash = strrchr(m->path, '/');
	size_t len;

	if (gguf_get_str(m->gguf, "general.name", &s, &len) == 0)
		m->name = printable_copy(s, len);
	if (!m->name) {
		s = slash ? slash + 1 : m->path;
		m->name = printable_copy(s, strlen(s));
	}
	if (!m->name)
		m->name = strdup("model");
	return m->name ? 0 : -ENOMEM;
}

static int find_arch(struct model *m, char **ret_error)
{
	_cleanup_(freep) char *shown = NULL;
	const char *name;
	size_t len;

	if (gguf_get_str(m->gguf, "general.architecture", &name, &len) < 0)
		return fail(ret_error, -EBADMSG,
			    "%s: key 'general.architecture' is missing or no string", m->path);
	m->arch = arch_find(name, len);
	if (m->arch)
		return 0;
	shown = printable_copy(name, len);
	return fail(ret_error, -EOPNOTSUPP, "%s: architecture '%s' is not supported (have: %s)",
		    m->path, shown ? shown : "?", arch_list());
}

static int by_address(const void *a, const void *b)
{
	const struct gguf_tensor *s = *(const struct gguf_tensor *const *)a;
	const struct gguf_tensor *t = *(const struct gguf_tensor *const *)b;

	return (s > t) - (s < t);
}

/* Whether the name is one of a layer that the file has and that does not run. */
static bool is_idle(const struct model *m, const char *name)
{
	unsigned long layer;
	char prefix[32];

	if (sscanf(name, "blk.%lu.", &layer) != 1 || layer < m->n_layer || layer >= m->n_block)
		return false;
	/* sscanf() takes signs, spaces and zeros too. */
	snprintf(prefix, sizeof(prefix), "blk.%lu.", layer);
	return startswith(name, prefix);
}

/*
 * A tensor that the family did not ask for is a bias, a scale, a layer or another part of a model
 * like it, but not it: without it the logits would be wrong.
 */
static int check_bound(const struct model *m, char **ret_error)
{
	qsort(m->bound, m->n_bound, sizeof(*m->bound), by_address);
	for (size_t i = 0; i < gguf_n_tensors(m->gguf); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(m->gguf, i);
		_cleanup_(freep) char *shown = NULL;

		if (bsearch(&t, m->bound, m->n_bound, sizeof(*m->bound), by_address) ||
		    is_idle(m, t->name))
			continue;
		shown = printable_copy(t->name, strlen(t->name));
		return fail(ret_error, -EOPNOTSUPP,
			    "%s: tensor '%s': no model of architecture '%s' that is supported has it",
			    m->path, shown ? shown : "?", m->arch->name);
	}
	return 0;
}

static int load_arch(struct model *m, char **ret_error)
{
	int r;

	m->bound = calloc(gguf_n_tensors(m->gguf) + 1, sizeof(*m->bound));
	if (!m->bound)
		return fail(ret_error, -ENOMEM, "%s: no memory", m->path);
	r = m->arch->load(m, ret_error);
	if (r == 0)
		r = check_bound(m, ret_error);
	free(m->bound);
	m->bound = NULL;
	return r;
}

static int count_weights(struct model *m, char **ret_error)
{
	m->weights_f32 = true;
	for (size_t i = 0; i < gguf_n_tensors(m->gguf); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(m->gguf, i);
		uint64_t n = 1;

		for (size_t d = 0; d < GGUF_MAX_DIMS; d++)
			if (__builtin_mul_overflow(n, t->ne[d], &n))
				return fail(ret_error, -EBADMSG, "%s: tensor '%s' is too large",
					    m->path, t->name);
		/*
		 * Tensors may lie over each other in a hostile file: their sum is not bounded by
		 * its size.
		 */
		if (__builtin_add_overflow(m->n_params, n, &m->n_params) ||
		    __builtin_add_overflow(m->weight_bytes, t->bytes, &m->weight_bytes))
			return fail(ret_error, -EBADMSG, "%s: tensor '%s' is too large", m->path,
				    t->name);
		if (t->n_dims >= 2 && t->type != QUANT_F32)
			m->weights_f32 = false;
	}
	return 0;
}

static int load_vocabulary(struct model *m, char **ret_error)
{
	_cleanup_(freep) char *error = NULL;
	int r = tokenizer_new(m->gguf, &m->tokenizer, &error);

	if (r < 0)
		return fail(ret_error, r, "%s: %s", m->path,
			    error ? error : "the tokenizer could not be loaded");
	if (tokenizer_n_vocab(m->tokenizer) > m->n_vocab)
		return fail(ret_error, -EBADMSG,
			    "%s: %" PRIu32 " tokens, but embeddings for only %" PRIu32, m->path,
			    tokenizer_n_vocab(m->tokenizer), m->n_vocab);
	/* Without a template that we render the model still completes raw prompts. */
	if (template_new(m->gguf, m->tokenizer, &m->template, &m->template_error) < 0 && !m->template_error)
		m->template_error = strdup("the chat template could not be loaded");
	return 0;
}

int model_load(const char *path, struct model **ret, char **ret_error)
{
	_cleanup_(model_unrefp) struct model *m = calloc(1, sizeof(*m));
	int r;

	if (!m)
		return fail(ret_error, -ENOMEM, "%s: no memory", path);
	atomic_init(&m->n_ref, 1);
	m->path = strdup(path);
	if (!m->path)
		return fail(ret_error, -ENOMEM, "%s: no memory", path);
	r = gguf_open(path, &m->gguf, ret_error);
	if (r == 0)
		r = find_arch(m, ret_error);
	if (r == 0)
		r = load_arch(m, ret_error);
	if (r == 0)
		r = catalog_new(m->gguf, m->n_layer, &m->catalog, ret_error);
	if (r == 0)
		r = count_weights(m, ret_error);
	if (r == 0)
		r = load_vocabulary(m, ret_error);
	if (r < 0)
		return r;
	r = set_name(m);
	if (r < 0)
		return fail(ret_error, r, "%s: no memory", path);
	*ret = TAKE_PTR(m);
	return 0;
}
