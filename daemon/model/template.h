/* SPDX-License-Identifier: MIT */
/*
 * template.h: a conversation to token ids, as the model's chat template says.
 *
 * Rendered natively for the ChatML/Qwen family, Llama 3, Mistral, SmolLM3 and DeepSeek-R1's distillates, found out from the
 * text of tokenizer.chat_template; any other template is refused by template_new() (-EOPNOTSUPP) and the model then only completes raw prompts. An interpreter for any
 * template replaces the inside of this module later; the interface is the rendered *segments*, where only what the
 * template itself writes may become a special token. Immutable after template_new(); any thread.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/tokenizer.h"

struct template;

enum message_role { MESSAGE_SYSTEM, MESSAGE_USER, MESSAGE_ASSISTANT };

/* One turn. Text is UTF-8, not owned, lengths in bytes. reasoning may be NULL (an assistant's thought kept apart). */
struct message {
	enum message_role role;
	const char *content;
	size_t content_len;
	const char *reasoning;
	size_t reasoning_len;
};

struct template_options {
	bool continuation; /* the conversation has earlier turns (in the session's tokens) before these messages */
	bool thinking; /* open a think block for the answer (false: an empty, closed one, where the model has them) */
};

/* Where the rendered prompt may be cut: the session returns to `answer_start` when the next user turn drops the thought. */
struct template_prompt {
	struct tokens tokens;
	size_t answer_start; /* index of the first token after the assistant's header, before any think block */
	bool thinking_open; /* the prompt ends inside a think block */
};

int template_new(const struct gguf *g, const struct tokenizer *t, struct template **ret,
		 char **ret_error);
struct template *template_free(struct template *t);
DEFINE_CLEANUP(struct template *, template_free)

/* Renders messages plus the generation prompt. 0; -EINVAL with an error text fit for the client (no user message, a system
 * message that is not first, ...); -ENOMEM; -ECANCELED. ret is filled only on success; free with template_prompt_done(). */
int template_render(const struct template *t, const struct message *messages, size_t n_messages,
		    const struct template_options *options, const atomic_bool *abort,
		    struct template_prompt *ret, char **ret_error);
void template_prompt_done(struct template_prompt *p);

/* The tokens that end an assistant's turn in the history ("<|im_end|>\n"): appended before the next turn. Owned by t. */
const struct tokens *template_turn_end(const struct template *t);
/* The tokens that close a think block early ("\n</think>\n\n"), and the id of </think> (-1: the model has no think block). */
const struct tokens *template_think_close(const struct template *t);
int32_t template_think_end_id(const struct template *t);
