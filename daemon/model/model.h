/* SPDX-License-Identifier: MIT */
/*
 * model.h: a loaded model: file, vocabulary, template, family. Reference-counted (requests in preparation hold it while the
 * engine may already be switching). Immutable after model_load(), so any thread may read.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/arch.h"
#include "daemon/model/gguf.h"
#include "daemon/model/template.h"
#include "daemon/model/tokenizer.h"
#include "daemon/residency/catalog.h"

/* What one token of context costs in KV, and how it lies in a page (see kv.h). */
struct kv_layout {
	uint32_t n_layer; /* attention layers only */
	uint32_t n_head;  /* KV heads */
	uint32_t k_dim, v_dim;
};

struct model {
	atomic_uint n_ref;
	char *path;
	char *name; /* general.name, or the file's base name; printable UTF-8 */
	struct gguf *gguf;
	struct catalog *catalog; /* blocks and trunk */
	struct tokenizer *tokenizer;
	struct template *template; /* NULL: raw completion only, see template_error */
	char *template_error;
	const struct arch *arch;
	void *arch_data; /* owned by arch */
	uint32_t n_vocab, n_embd, n_layer, n_ctx_train;
	uint32_t n_block;       /* layers of the file; those from n_layer on do not run */
	uint32_t n_expert_used; /* of a layer, by a token; 0: no experts */
	uint64_t n_params, weight_bytes;
	bool weights_f32; /* every matrix is F32: KV is then kept in F32 too */
	const struct gguf_tensor *embd; /* is looked up row by row; every other tensor of the trunk is read whole */
	bool embd_tied;                 /* it is the output head too */
	uint32_t head_dim_max; /* of attention and recurrent layers */
	const char *cpu_only; /* what of this model no GPU kernel does ("attention sinks"), static; NULL: nothing */
	struct kv_layout kv;
	size_t recurrent_floats; /* recurrent state of one session, all layers; 0: none */
	size_t row_floats; /* scratch of one row of a batch: what arch->forward() takes of the graph at most */
	size_t op_floats; /* and what the backend's largest operation takes on top */
	const struct gguf_tensor **bound; /* while arch->load() runs: what arch_bind() gave out; then NULL */
	size_t n_bound;
};

/* Errors as gguf_open(), tokenizer_new(), arch->load(). -EOPNOTSUPP for an architecture that is not in the table (named, with
 * the list of those that are). A template that we do not render is no error: template stays NULL. */
int model_load(const char *path, struct model **ret, char **ret_error);
struct model *model_ref(struct model *m);
struct model *model_unref(struct model *m); /* accepts NULL, returns NULL */
DEFINE_CLEANUP(struct model *, model_unref)
