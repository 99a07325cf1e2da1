/* SPDX-License-Identifier: MIT */
/*
 * ctl-model-show.c: `residentctl model show`. See ctl-model-show.h.
 *
 * Only the directory of the file is read, never its weights. Refuses to know any family: how many
 * layers there are and how many experts a token uses are keys that all of them have, and which
 * layers keep a recurrent state shows in their tensors. Invariant: what comes from the file and is
 * printed goes through terminal_printf(); loops over layers are bounded by the catalog.
 */
#include "client/ctl-model-show.h"

#include "daemon/import/describe.h"
#include "daemon/model/arch.h"
#include "daemon/residency/catalog.h"
#include "daemon/residency/memory.h"

#include <inttypes.h>

/* Kinds of layers that get a line each. Mixed quantisations make two or three. */
#define KINDS_MAX 16

/* What the model needs, and what this machine has. */
struct needs {
	struct catalog *catalog;
	bool known; /* the engine knows the family */
	uint32_t n_attention, n_recurrent;
	uint32_t n_used; /* experts a token; 0: not said, so that the three below are unknown */
	uint64_t token_bytes;
	uint64_t floor_bytes; /* without scratch and conversations */
	uint64_t all_bytes;
	bool memory_known;
	struct memory_state memory;
	uint64_t budget_bytes;
};

/* ---- what the file says ---- */

/* A key of the file's own family. 0: absent, or no such number. */
static uint32_t family_key(const struct gguf *g, const char *key)
{
	const char *arch;
	uint32_t value = 0;
	char full[128];
	size_t len;

	if (gguf_get_str(g, "general.architecture", &arch, &len) < 0 || len > 64)
		return 0;
	snprintf(full, sizeof(full), "%.*s.%s", (int)len, arch, key);
	gguf_get_u32(g, full, &value);
	return value;
}

static bool family_known(const struct gguf *g)
{
	const char *arch;
	size_t len;

	return gguf_get_str(g, "general.architecture", &arch, &len) == 0 && arch_find(arch, len);
}

static bool layer_has(const struct gguf *g, uint32_t layer, const char *const *names, size_t n)
{
	char full[64];

	for (size_t i = 0; i < n; i++) {
		snprintf(full, sizeof(full), "blk.%" PRIu32 ".%s", layer, names[i]);
		if (gguf_tensor(g, full))
			return true;
	}
	return false;
}

static void count_layers(struct needs *n, const struct gguf *g)
{
	static const char *const recurrent[] = { "ssm_conv1d.weight", "ssm_a", "ssm_out.weight" };
	/* Keys, whichever way they are made; a recurrent layer may have a joint projection too. */
	static const char *const keys[] = { "attn_k.weight", "attn_kv_a_mqa.weight" };
	static const char *const joint[] = { "attn_qkv.weight" };

	for (uint32_t i = 0; i < n->catalog->n_layers; i++) {
		bool r = layer_has(g, i, recurrent, ARRAY_SIZE(recurrent));

		n->n_recurrent += r;
		n->n_attention += layer_has(g, i, keys, ARRAY_SIZE(keys)) ||
				  (!r && layer_has(g, i, joint, ARRAY_SIZE(joint)));
	}
}

/* Of the trunk, all but the embeddings, of which a token takes one row, unless they serve as output too. */
static uint64_t trunk_per_token(const struct catalog *c)
{
	const struct gguf_tensor *table = gguf_tensor(c->gguf, "token_embd.weight");

	if (!table || !gguf_tensor(c->gguf, "output.weight"))
		return c->trunk_bytes;
	return c->trunk_bytes - table->bytes + quant_row_bytes(table->type, table->ne[0]);
}

static void add_up(struct needs *n)
{
	const struct catalog *c = n->catalog;
	uint64_t used_max = 0;

	n->all_bytes = c->trunk_bytes + c->block_bytes;
	n->token_bytes = trunk_per_token(c);
	for (uint32_t i = 0; i < c->n_expert_layers; i++) {
		const struct catalog_layer *l = &c->layers[c->expert_layers[i]];
		uint64_t used = MIN(n->n_used, l->n_expert) * l->block_bytes;

		n->token_bytes += used;
		used_max = MAX(used_max, used);
	}
	/* A layer computes while the blocks of the next come in. */
	n->floor_bytes = c->trunk_bytes + MIN(2 * used_max, c->block_bytes);
}

static void look_at_machine(struct needs *n)
{
	_cleanup_(memory_closep) struct memory *m = NULL;

	n->memory_known = memory_open("", &m) == 0 && memory_read(m, &n->memory) == 0;
	if (n->memory_known)
		n->budget_bytes = memory_budget(&n->memory, 0,
						memory_default_reserve(n->memory.machine_total));
}

static void needs_done(struct needs *n)
{
	n->catalog = catalog_free(n->catalog);
}

static int needs_init(struct needs *n, const struct gguf *g, char **ret_error)
{
	uint32_t n_layers = family_key(g, "block_count"),
		 n_more = family_key(g, "nextn_predict_layers");
	int r;

	/* Layers that predict further tokens stand behind the others and do not run. */
	r = catalog_new(g, n_more < n_layers ? n_layers - n_more : n_layers, &n->catalog, ret_error);
	if (r < 0)
		return r;
	n->known = family_known(g);
	n->n_used = family_key(g, "expert_used_count");
	count_layers(n, g);
	add_up(n);
	look_at_machine(n);
	return 0;
}

/* Whether what a token uses of the blocks can be said. */
static bool use_known(const struct needs *n)
{
	return n->catalog->n_blocks == 0 || n->n_used > 0;
}

/* ---- as an object ---- */

static json_t *number(uint64_t n)
{
	return json_integer((json_int_t)MIN(n, (uint64_t)INT64_MAX));
}

static json_t *files_object(const struct gguf *g)
{
	json_auto_t *list = json_array();

	for (size_t i = 0; i < gguf_n_parts(g); i++) {
		const struct gguf_part *p = gguf_part(g, i);

		if (json_array_append_new(list, json_pack("{s:s, s:o}", "path", p->path, "bytes",
							  number(p->bytes))) < 0)
			return NULL;
	}
	return TAKE_PTR(list);
}

static json_t *layers_object(const struct catalog *c)
{
	json_auto_t *list = json_array();

	for (uint32_t i = 0; i < c->n_expert_layers; i++) {
		const struct catalog_layer *l = &c->layers[c->expert_layers[i]];
		json_t *types = json_array();

		for (size_t k = 0; k < CATALOG_MATRICES; k++)
			if (l->matrix[k])
				json_array_append_new(
					types, json_string(quant_info(l->matrix[k]->type)->name));
		if (json_array_append_new(list, json_pack("{s:I, s:I, s:o, s:o}", "layer",
							  (json_int_t)c->expert_layers[i], "experts",
							  (json_int_t)l->n_expert, "block_bytes",
							  number(l->block_bytes), "types", types)) < 0)
			return NULL;
	}
	return TAKE_PTR(list);
}

/* NULL: no memory, or a path that is not UTF-8. */
static json_t *needs_object(const struct needs *n)
{
	const struct catalog *c = n->catalog;
	json_auto_t *o =
		json_pack("{s:b, s:I, s:I, s:I, s:o, s:I, s:o, s:o, s:o, s:o, s:o}", "supported",
			  n->known, "layers", (json_int_t)c->n_layers, "attention_layers",
			  (json_int_t)n->n_attention, "recurrent_layers", (json_int_t)n->n_recurrent,
			  "trunk_bytes", number(c->trunk_bytes), "blocks", (json_int_t)c->n_blocks,
			  "block_bytes", number(c->block_bytes), "unused_bytes",
			  number(c->unused_bytes), "comfortable_bytes", number(n->all_bytes),
			  "expert_layers", layers_object(c), "files", files_object(c->gguf));

	if (o && use_known(n) &&
	    (json_object_set_new(o, "experts_used", json_integer((json_int_t)n->n_used)) < 0 ||
	     json_object_set_new(o, "token_bytes", number(n->token_bytes)) < 0 ||
	     json_object_set_new(o, "floor_bytes", number(n->floor_bytes)) < 0))
		return NULL;
	if (o && n->memory_known &&
	    json_object_set_new(o, "memory",
				json_pack("{s:o, s:o, s:o}", "total", number(n->memory.total),
					  "available", number(n->memory.available), "budget",
					  number(n->budget_bytes))) < 0)
		return NULL;
	return TAKE_PTR(o);
}

/* ---- as text ---- */

static bool same_kind(const struct catalog_layer *a, const struct catalog_layer *b)
{
	if (a->n_expert != b->n_expert || a->block_bytes != b->block_bytes)
		return false;
	for (size_t i = 0; i < CATALOG_MATRICES; i++)
		if (!a->matrix[i] != !b->matrix[i] ||
		    (a->matrix[i] && a->matrix[i]->type != b->matrix[i]->type))
			return false;
	return true;
}

/* "0-4, 7": the layers of the kind of `first`, which are then done. */
static void list_kind(const struct catalog *c, uint32_t first, bool *done, struct buf *b)
{
	for (uint32_t i = first; i < c->n_layers; i++) {
		uint32_t from = i;

		if (done[i] || !same_kind(&c->layers[first], &c->layers[i]))
			continue;
		for (; i < c->n_layers && !done[i] && same_kind(&c->layers[first], &c->layers[i]); i++)
			done[i] = true;
		buf_printf(b, b->len > 0 ? ", %" PRIu32 : "%" PRIu32, from);
		if (i - 1 > from)
			buf_printf(b, "-%" PRIu32, i - 1);
	}
}

static void print_kind(struct ctl *c, const struct catalog_layer *l, const char *layers)
{
	struct buf types = {};
	char bytes[32];

	for (size_t i = 0; i < CATALOG_MATRICES; i++)
		if (l->matrix[i])
			buf_printf(&types, " %s", quant_info(l->matrix[i]->type)->name);
	if (l->n_expert == 0)
		terminal_printf(&c->out, "%13s  layers %s: no experts\n", "", layers);
	else
		terminal_printf(&c->out, "%13s  layers %s: %" PRIu32 " experts of %s,%s\n", "",
				layers, l->n_expert, ctl_bytes_text(l->block_bytes, bytes),
				types.data ? types.data : "");
	buf_done(&types);
}

static void print_kinds(struct ctl *ctl, const struct catalog *c)
{
	_cleanup_(freep) bool *done = calloc(c->n_layers, sizeof(*done));
	unsigned n_kinds = 0;

	for (uint32_t i = 0; done && i < c->n_layers; i++) {
		struct buf layers = {};

		if (done[i])
			continue;
		if (n_kinds++ == KINDS_MAX) {
			terminal_printf(&ctl->out, "%13s  and layers of further kinds\n", "");
			return;
		}
		list_kind(c, i, done, &layers);
		if (layers.data)
			print_kind(ctl, &c->layers[i], layers.data);
		buf_done(&layers);
	}
}

static void print_layers(const struct needs *n, struct ctl *c)
{
	terminal_printf(&c->out, "%13s  %" PRIu32, "layers", n->catalog->n_layers);
	if (n->n_attention > 0)
		terminal_printf(&c->out, ", %" PRIu32 " with attention", n->n_attention);
	if (n->n_recurrent > 0)
		terminal_printf(&c->out, ", %" PRIu32 " with a recurrent state", n->n_recurrent);
	terminal_printf(&c->out, "\n");
}

static void print_blocks(const struct needs *n, struct ctl *c)
{
	const struct catalog *k = n->catalog;
	char a[32];

	terminal_printf(&c->out, "%13s  %s that every token uses\n", "trunk",
			ctl_bytes_text(k->trunk_bytes, a));
	if (k->n_blocks == 0) {
		terminal_printf(&c->out, "%13s  none: no experts\n", "blocks");
	} else {
		terminal_printf(&c->out, "%13s  %" PRIu32 ", together %s\n", "blocks", k->n_blocks,
				ctl_bytes_text(k->block_bytes, a));
		print_kinds(c, k);
	}
	if (k->unused_bytes > 0)
		terminal_printf(&c->out, "%13s  %s, of layers that do not run\n", "unused",
				ctl_bytes_text(k->unused_bytes, a));
}

static void print_use(const struct needs *n, struct ctl *c)
{
	char a[32], b[32];

	if (!use_known(n)) {
		terminal_printf(&c->out, "%13s  how many experts a token uses is not stated\n",
				"a token");
		terminal_printf(&c->out, "%13s  %s for everything\n", "needs",
				ctl_bytes_text(n->all_bytes, a));
		return;
	}
	if (n->catalog->n_blocks > 0)
		terminal_printf(&c->out, "%13s  uses %" PRIu32 " experts a layer, reads %s\n",
				"a token", n->n_used, ctl_bytes_text(n->token_bytes, a));
	else
		terminal_printf(&c->out, "%13s  reads %s\n", "a token",
				ctl_bytes_text(n->token_bytes, a));
	terminal_printf(&c->out,
			"%13s  %s at least, %s for everything; scratch and a conversation come on top\n",
			"needs", ctl_bytes_text(n->floor_bytes, a), ctl_bytes_text(n->all_bytes, b));
}

static void print_machine(const struct needs *n, struct ctl *c)
{
	char a[32], b[32], verdict[64];

	if (!n->memory_known)
		return;
	if (n->budget_bytes >= n->all_bytes)
		snprintf(verdict, sizeof(verdict), "everything fits");
	else if (!use_known(n))
		snprintf(verdict, sizeof(verdict), "not everything fits");
	else if (n->budget_bytes < n->floor_bytes)
		snprintf(verdict, sizeof(verdict), "too little");
	else
		snprintf(verdict, sizeof(verdict), "%d %% of the blocks fit",
			 (int)(100 * (double)(n->budget_bytes - n->catalog->trunk_bytes) /
			       (double)n->catalog->block_bytes));
	terminal_printf(&c->out, "%13s  %s, of which a model may take %s now: %s\n", "this machine",
			ctl_bytes_text(n->memory.total, a), ctl_bytes_text(n->budget_bytes, b),
			verdict);
}

static void print_needs(const struct needs *n, struct ctl *c)
{
	const struct gguf *g = n->catalog->gguf;
	char bytes[32];

	if (!n->known)
		terminal_printf(&c->out, "%13s  does not know this architecture, only %s\n",
				"the engine", arch_list());
	for (size_t i = 0; gguf_n_parts(g) > 1 && i < gguf_n_parts(g); i++)
		terminal_printf(&c->out, "%13s  %s, %s\n", i == 0 ? "files" : "",
				gguf_part(g, i)->path, ctl_bytes_text(gguf_part(g, i)->bytes, bytes));
	print_layers(n, c);
	print_blocks(n, c);
	print_use(n, c);
	print_machine(n, c);
}

/* ---- the command ---- */

static const char *string(json_t *o, const char *key)
{
	return json_string_value(json_object_get(o, key));
}

static void print_number(struct ctl *c, json_t *o, const char *key, const char *label, const char *unit)
{
	json_t *n = json_object_get(o, key);

	if (n)
		terminal_printf(&c->out, "%13s  %lld%s\n", label, (long long)json_integer_value(n),
				unit);
}

/* What is on record, or what the file says of itself. */
static void print_details(struct ctl *c, json_t *o)
{
	static const char *const texts[] = { "file",         "title",        "description",
					     "architecture", "quantization", "license",
					     "license_name", "license_link", "source",
					     "base_model",   "author",       "organization",
					     "quantized_by", "sha256",       "imported" };
	static const char *const marks[] = { "default", "loaded" };
	json_int_t size = json_integer_value(json_object_get(o, "bytes"));
	char bytes[32];

	for (size_t k = 0; k < ARRAY_SIZE(texts); k++)
		if (string(o, texts[k]))
			terminal_printf(&c->out, "%13s  %s\n", texts[k], string(o, texts[k]));
	terminal_printf(&c->out, "%13s  %s\n", "size", ctl_bytes_text((uint64_t)size, bytes));
	if (json_integer_value(json_object_get(o, "parts")) > 1)
		print_number(c, o, "parts", "parts", "");
	print_number(c, o, "parameters", "parameters", "");
	print_number(c, o, "context_trained", "context", " tokens");
	for (size_t k = 0; k < ARRAY_SIZE(marks); k++)
		if (json_object_get(o, marks[k]))
			terminal_printf(&c->out, "%13s  %s\n", marks[k],
					json_is_true(json_object_get(o, marks[k])) ? "yes" : "no");
}

/* NULL: no memory, or a path that is not UTF-8. */
static json_t *file_object(const struct gguf *g)
{
	json_auto_t *o = describe_model(g);
	uint64_t bytes = 0;

	for (size_t i = 0; i < gguf_n_parts(g); i++)
		bytes += gguf_part(g, i)->bytes;
	if (!o || json_object_set_new(o, "file", json_string(gguf_part(g, 0)->path)) < 0 ||
	    json_object_set_new(o, "bytes", number(bytes)) < 0 ||
	    json_object_set_new(o, "parts", number(gguf_n_parts(g))) < 0)
		return NULL;
	return TAKE_PTR(o);
}

bool ctl_model_is_path(const char *name)
{
	size_t len = strlen(name), end = strlen(".gguf");

	return strchr(name, '/') ||
	       (len > end && streq(name + len - end, ".gguf") && access(name, F_OK) == 0);
}

enum exit_code ctl_model_show(struct ctl *c, const char *path, json_t *known)
{
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(needs_done) struct needs n = {};
	_cleanup_(freep) char *error = NULL;
	json_auto_t *o = known;
	enum exit_code e = EXIT_OK;
	int r = gguf_open(path, &g, &error);

	if (r == 0)
		r = needs_init(&n, g, &error);
	if (!o && g)
		o = file_object(g);
	if (c->json && r == 0 && json_object_set_new(o, "needs", needs_object(&n)) < 0)
		return ctl_print_json(c, NULL);
	if (o && c->json)
		e = ctl_print_json(c, json_incref(o));
	else if (o)
		print_details(c, o);
	else if (r == 0)
		return ctl_print_json(c, NULL);
	if (r == 0 && !c->json)
		print_needs(&n, c);
	if (r == 0)
		return e;
	terminal_printf(&c->err, PROGRAM ": %s\n", error ? error : strerror(-r));
	return EXIT_ERROR;
}
