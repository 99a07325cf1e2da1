/* SPDX-License-Identifier: MIT */
/*
 * template.c: chat templates that are known, rendered natively. See template.h.
 *
 * Owns the few token ids that a template writes, and how a dialect of the tables becomes a prompt.
 * Any thread: nothing changes after template_new(). Refuses to guess: template-match.c takes a
 * dialect only for a template that renders the same.
 * Invariant: message text is encoded without special tokens; their ids come from the template's
 * own text alone.
 */
#include "daemon/model/template.h"

#include "daemon/model/template-internal.h"

#include <time.h>

#define TEMPLATE_BYTES_MAX (1 << 20)
#define SPECIALS_MAX       10 /* a dialect's, the beginning of sequence, and two for thoughts */

struct special {
	const char *text; /* as the dialect writes it */
	int32_t id;
};

struct template
{
	const struct tokenizer *tokenizer;
	const struct dialect *dialect;
	struct special special[SPECIALS_MAX];
	size_t n_special;
	int32_t think_end; /* -1: none */
	struct buf capture[TEMPLATE_CAPTURES_MAX];
	struct tokens turn_end, think_close;
};

static const struct dialect *dialect_at(size_t i)
{
	size_t n = 0;

	while (template_chatml(n))
		n++;
	return i < n ? template_chatml(i) : template_family(i - n);
}

static int find_dialect(struct template *t, const char *text, size_t len, char **ret_error)
{
	struct span captures[TEMPLATE_CAPTURES_MAX] = {};
	struct buf normal = {};
	const struct dialect *d;
	int r;

	if (len > TEMPLATE_BYTES_MAX || memchr(text, 0, len))
		return fail(ret_error, -EOPNOTSUPP,
			    "chat template is too long or holds a NUL byte; raw completion works");
	r = buf_reserve(&normal, 0);
	if (r == 0)
		r = template_normalise(text, len, &normal);
	for (size_t i = 0; r == 0 && !t->dialect && (d = dialect_at(i)); i++) {
		if (template_match(d->pattern, normal.data, captures))
			t->dialect = d;
	}
	for (size_t i = 0; r == 0 && t->dialect && i < TEMPLATE_CAPTURES_MAX; i++) {
		if (captures[i].s)
			r = template_unescape(captures[i], &t->capture[i]);
	}
	buf_done(&normal);
	if (r == -ENOMEM || (r == 0 && t->dialect))
		return r;
	return fail(ret_error, -EOPNOTSUPP,
		    "chat template is none of the forms that residentd renders exactly; raw "
		    "completion works");
}

/* A special token never comes out of text, so its id is not what the text is encoded to. */
static int check_special(const struct tokenizer *t, int32_t id, const char *text, size_t len)
{
	struct tokens tokens = {};
	int r = id < 0 ? -EOPNOTSUPP : tokenizer_encode(t, text, len, 0, NULL, &tokens);

	for (size_t i = 0; i < tokens.n; i++)
		if (tokens.ids[i] == id)
			r = -EOPNOTSUPP;
	tokens_done(&tokens);
	return r;
}

static int add_special(struct template *t, const char *text, char **ret_error)
{
	const char *printed = text;
	size_t len = strlen(text);
	int32_t id;
	int r;

	if (streq(text, PUT_BOS) || streq(text, PUT_EOS)) {
		id = *text == *PUT_BOS ? tokenizer_bos(t->tokenizer) : tokenizer_eos(t->tokenizer);
		printed = tokenizer_piece(t->tokenizer, id, true, &len);
	} else {
		id = tokenizer_find(t->tokenizer, text);
	}
	r = check_special(t->tokenizer, id, printed, len);
	if (r == -EOPNOTSUPP)
		return fail(ret_error, r,
			    "chat template writes %s, which is no special token of the model; raw "
			    "completion works",
			    *text == *PUT_BOS   ? "a beginning of sequence"
			    : *text == *PUT_EOS ? "an end of sequence"
						: text);
	if (r < 0)
		return r;
	t->special[t->n_special++] = (struct special){ .text = text, .id = id };
	return 0;
}

static int find_specials(struct template *t, char **ret_error)
{
	const struct dialect *d = t->dialect;
	int r = 0;

	t->think_end = -1;
	for (size_t i = 0; i < ARRAY_SIZE(d->specials) && d->specials[i] && r == 0; i++)
		r = add_special(t, d->specials[i], ret_error);
	/* Where prompts start with it anyhow, it is not the template's to write. */
	if (r == 0 && d->bos && !tokenizer_add_bos(t->tokenizer))
		r = add_special(t, PUT_BOS, ret_error);
	if (r < 0 || (!*d->think_on && !*d->think_off))
		return r;
	r = add_special(t, "<think>", ret_error);
	if (r == 0)
		r = add_special(t, "</think>", ret_error);
	if (r == 0)
		t->think_end = t->special[t->n_special - 1].id;
	return r;
}

/* A prompt in the making. The first error stays in r, and everything after it does nothing. */
struct output {
	const struct template *t;
	const atomic_bool *abort;
	bool thinking;
	struct tokens tokens;
	struct buf text; /* since the last special token: encoded in one go */
	int r;
};

static void put_text(struct output *o, struct span s)
{
	if (o->r == 0)
		o->r = buf_append(&o->text, s.s, s.len);
}

static void flush_text(struct output *o)
{
	if (o->r == 0 && o->text.len > 0)
		o->r = tokenizer_encode(o->t->tokenizer, o->text.data, o->text.len, 0, o->abort,
					&o->tokens);
	o->text.len = 0;
}

static void put_date(struct output *o)
{
	time_t now = time(NULL);
	struct tm tm;
	char s[32];

	if (localtime_r(&now, &tm))
		put_text(o, (struct span){ s, strftime(s, sizeof(s), "%Y-%m-%d", &tm) });
}

/* The template's own text: its special tokens become ids. */
static void put_template(struct output *o, const char *s)
{
	const struct template *t = o->t;

	while (*s) {
		size_t i = 0;

		while (i < t->n_special && !startswith(s, t->special[i].text))
			i++;
		if (i < t->n_special) {
			flush_text(o);
			if (o->r == 0)
				o->r = tokens_append(&o->tokens, &t->special[i].id, 1);
			s += strlen(t->special[i].text);
			continue;
		}
		if (*s == *PUT_FIRST || *s == *PUT_SECOND) {
			const struct buf *b = &t->capture[*s == *PUT_SECOND];

			put_template(o, b->data ? b->data : "");
		} else if (*s == *PUT_DATE) {
			put_date(o);
		} else {
			put_text(o, (struct span){ s, 1 });
		}
		s++;
	}
}

static void output_done(struct output *o)
{
	tokens_done(&o->tokens);
	buf_done(&o->text);
}

static int encode_template(const struct template *t, const char *text, struct tokens *ret)
{
	struct output o = { .t = t };

	put_template(&o, text);
	flush_text(&o);
	if (o.r == 0) {
		*ret = o.tokens;
		o.tokens = (struct tokens){};
	}
	output_done(&o);
	return o.r;
}

/* Everything that follows from the dialect. */
static int load(struct template *t, char **ret_error)
{
	int r = find_specials(t, ret_error);

	if (r < 0)
		return r;
	r = encode_template(t, t->dialect->assistant.after, &t->turn_end);
	if (r == 0 && t->think_end >= 0)
		r = encode_template(t, "\n</think>\n\n", &t->think_close);
	return r;
}

int template_new(const struct gguf *g, const struct tokenizer *tokenizer, struct template **ret,
		 char **ret_error)
{
	_cleanup_(template_freep) struct template *t = NULL;
	const char *text;
	size_t len;
	int r;

	r = gguf_get_str(g, "tokenizer.chat_template", &text, &len);
	if (r < 0)
		return fail(ret_error, -EOPNOTSUPP,
			    "the model has no chat template; raw completion works");
	t = calloc(1, sizeof(*t));
	if (!t)
		return -ENOMEM;
	t->tokenizer = tokenizer;
	r = find_dialect(t, text, len, ret_error);
	if (r < 0)
		return r;
	r = load(t, ret_error);
	if (r < 0)
		return r;
	*ret = TAKE_PTR(t);
	return 0;
}

struct template *template_free(struct template *t)
{
	if (!t)
		return NULL;
	for (size_t i = 0; i < TEMPLATE_CAPTURES_MAX; i++)
		buf_done(&t->capture[i]);
	tokens_done(&t->turn_end);
	tokens_done(&t->think_close);
	free(t);
	return NULL;
}

/* Length of the whitespace character (as Python's str.strip() has it) that s starts with; 0:
 * none. */
static size_t space_at(const char *s, size_t len)
{
	const unsigned char *u = (const unsigned char *)s;

	if (len >= 1 &&
	    (u[0] == ' ' || (u[0] >= 0x09 && u[0] <= 0x0d) || (u[0] >= 0x1c && u[0] <= 0x1f)))
		return 1;
	if (len >= 2 && u[0] == 0xc2 && (u[1] == 0x85 || u[1] == 0xa0))
		return 2;
	if (len >= 3 && u[0] == 0xe2 && u[1] == 0x80)
		return (u[2] >= 0x80 && u[2] <= 0x8a) || u[2] == 0xa8 || u[2] == 0xa9 || u[2] == 0xaf
			       ? 3
			       : 0;
	if (len >= 3 && (memcmp(s, "\u1680", 3) == 0 || memcmp(s, "\u205f", 3) == 0 ||
			 memcmp(s, "\u3000", 3) == 0))
		return 3;
	return 0;
}

static struct span trim_right(struct span s)
{
	size_t n;

	while (s.len > 0) {
		for (n = MIN(s.len, (size_t)3); n > 0; n--)
			if (space_at(s.s + s.len - n, n) == n)
				break;
		if (n == 0)
			break;
		s.len -= n;
	}
	return s;
}

static struct span trim(struct span s)
{
	size_t n;

	while ((n = space_at(s.s, s.len)) > 0) {
		s.s += n;
		s.len -= n;
	}
	return trim_right(s);
}

static struct span trim_newlines(struct span s, bool left, bool right)
{
	while (left && s.len > 0 && s.s[0] == '\n') {
		s.s++;
		s.len--;
	}
	while (right && s.len > 0 && s.s[s.len - 1] == '\n')
		s.len--;
	return s;
}

static bool contains(struct span s, const char *what, size_t *ret_at)
{
	const char *p = s.len > 0 ? memmem(s.s, s.len, what, strlen(what)) : NULL;

	if (p)
		*ret_at = (size_t)(p - s.s);
	return p;
}

/* What follows the last `what`, or all of s. */
static struct span after_last(struct span s, const char *what)
{
	size_t at;

	while (contains(s, what, &at)) {
		s.s += at + strlen(what);
		s.len -= at + strlen(what);
	}
	return s;
}

static struct span message_content(const struct template *t, const struct message *m)
{
	struct span s = { m->content, m->content_len };

	return t->dialect->trim ? trim(s) : s;
}

/* A user turn that is wholly a tool's response continues the answer to the query before it. */
static bool is_query(const struct template *t, const struct message *m)
{
	static const char open[] = "<tool_response>", end[] = "</tool_response>";
	struct span s;

	if (m->role != MESSAGE_USER)
		return false;
	s = message_content(t, m);
	return s.len < strlen(open) + strlen(end) || memcmp(s.s, open, strlen(open)) != 0 ||
	       memcmp(s.s + s.len - strlen(end), end, strlen(end)) != 0;
}

/* Splits content at </think> unless the thought is given apart. */
static struct span split_thought(const struct message *m, struct span *content)
{
	struct span thought = {};
	size_t at;

	if (m->reasoning)
		return (struct span){ m->reasoning, m->reasoning_len };
	if (!contains(*content, "</think>", &at))
		return thought;
	thought = trim_newlines((struct span){ content->s, at }, false, true);
	thought = trim_newlines(after_last(thought, "<think>"), true, false);
	*content = trim_newlines(after_last(*content, "</think>"), true, false);
	return thought;
}

static void put_assistant(struct output *o, const struct message *m, bool after_query, bool last)
{
	struct span content = message_content(o->t, m), thought = {};
	bool block = false;
	size_t at;

	switch (o->t->dialect->history) {
	case HISTORY_PLAIN: break;
	case HISTORY_STRIP:
		if (contains(content, "</think>", &at))
			content = trim_newlines(after_last(content, "</think>"), true, false);
		break;
	case HISTORY_STRIP_OLD:
		if (!last)
			content = trim_newlines(after_last(content, "</think>"), true, false);
		break;
	case HISTORY_AFTER: content = after_last(content, "</think>"); break;
	case HISTORY_SMOLLM3: content = trim_newlines(content, true, false); break;
	case HISTORY_QWEN3:
		thought = split_thought(m, &content);
		block = after_query && (last || thought.len > 0);
		thought = trim_newlines(thought, true, true);
		if (block)
			content = trim_newlines(content, true, false);
		break;
	case HISTORY_QWEN35:
		thought = trim(split_thought(m, &content));
		block = after_query;
		break;
	}
	put_template(o, o->t->dialect->assistant.before);
	if (o->t->dialect->keeps_think_off && !o->thinking)
		put_template(o, o->t->dialect->think_off);
	if (block) {
		put_template(o, "<think>\n");
		put_text(o, thought);
		put_template(o, "\n</think>\n\n");
	}
	put_text(o, content);
	put_template(o, o->t->dialect->assistant.after);
}

/* The system turn says whether to think, and its text is one of the template's if none is given. */
static void put_smollm3_system(struct output *o, struct span content)
{
	content = trim_right(content);
	put_template(o, o->t->dialect->system.before);
	put_template(o, "## Metadata\n\nKnowledge Cutoff Date: June 2025\nReasoning Mode: ");
	put_template(o, o->thinking ? "/think" : "/no_think");
	put_template(o, "\n\n## Custom Instructions\n\n");
	put_text(o, content);
	put_template(o, content.len > 0 ? "\n\n" : o->thinking ? PUT_FIRST : PUT_SECOND);
	put_template(o, o->t->dialect->system.after);
}

/* m: NULL when there is no system message. */
static void put_system(struct output *o, const struct message *m)
{
	const struct dialect *d = o->t->dialect;
	struct span content = m ? message_content(o->t, m) : (struct span){};

	switch (d->system_rule) {
	case SYSTEM_SMOLLM3: put_smollm3_system(o, content); return;
	case SYSTEM_SKIP_EMPTY:
		if (content.len == 0)
			return;
		break;
	case SYSTEM_GIVEN:
	case SYSTEM_REFUSED:
		if (!m && !d->default_system)
			return;
		break;
	case SYSTEM_ALWAYS: break;
	}
	put_template(o, d->system.before);
	if (m)
		put_text(o, content);
	else if (d->default_system)
		put_template(o, d->default_system);
	put_template(o, d->system.after);
}

static void put_message(struct output *o, const struct message *m, bool after_query, bool last)
{
	const struct dialect *d = o->t->dialect;

	switch (m->role) {
	case MESSAGE_SYSTEM: return; /* put_system() wrote it */
	case MESSAGE_USER:
		put_template(o, d->user.before);
		put_text(o, message_content(o->t, m));
		put_template(o, d->user.after);
		return;
	case MESSAGE_ASSISTANT: put_assistant(o, m, after_query, last); return;
	}
}

/* What only some dialects ask for. */
static int check_dialect(const struct dialect *d, const struct message *messages, size_t n,
			 char **ret_error)
{
	size_t first = n > 0 && messages[0].role == MESSAGE_SYSTEM;
	struct span system = { messages[0].content, first ? messages[0].content_len : 0 };
	size_t at;

	if (first && d->system_rule == SYSTEM_REFUSED)
		return fail(ret_error, -EINVAL,
			    "this model takes a system message only with the last user message; say it there");
	if (d->system_rule == SYSTEM_SMOLLM3 &&
	    (contains(system, "/think", &at) || contains(system, "/no_think", &at)))
		return fail(ret_error, -EINVAL,
			    "a system message with /think or /no_think is a switch to this model; "
			    "there is an option for it");
	for (size_t i = first; d->alternate && i < n; i++) {
		if ((messages[i].role == MESSAGE_USER) != ((i - first) % 2 == 0))
			return fail(ret_error, -EINVAL,
				    "message %zu: user and assistant must take turns", i);
	}
	return 0;
}

/* The same rules for every dialect, also where a template would let them pass. ret_query: index of
 * the last query; -1 when it is before these messages. */
static int check_messages(const struct template *t, const struct message *messages, size_t n,
			  bool continuation, ssize_t *ret_query, char **ret_error)
{
	ssize_t query = -1;

	if (n == 0)
		return fail(ret_error, -EINVAL, "the conversation has no messages");
	for (size_t i = 0; i < n; i++) {
		if (messages[i].role == MESSAGE_SYSTEM && continuation)
			return fail(ret_error, -EINVAL,
				    "a system message must be the first of the whole conversation");
		if (messages[i].role == MESSAGE_SYSTEM && i > 0)
			return fail(ret_error, -EINVAL,
				    "message %zu: a system message must be the first", i);
		if (is_query(t, &messages[i]))
			query = (ssize_t)i;
	}
	if (query < 0 && !continuation)
		return fail(ret_error, -EINVAL, "the conversation has no user message");
	*ret_query = query;
	return check_dialect(t->dialect, messages, n, ret_error);
}

int template_render(const struct template *t, const struct message *messages, size_t n_messages,
		    const struct template_options *options, const atomic_bool *abort,
		    struct template_prompt *ret, char **ret_error)
{
	struct output o = { .t = t, .abort = abort, .thinking = options->thinking };
	const struct dialect *d = t->dialect;
	const char *think = options->thinking ? d->think_on : d->think_off;
	struct template_prompt prompt = {};
	ssize_t query = -1;
	int r;

	r = check_messages(t, messages, n_messages, options->continuation, &query, ret_error);
	if (r < 0)
		return r;
	if (!options->continuation) {
		if (d->bos && !tokenizer_add_bos(t->tokenizer))
			put_template(&o, PUT_BOS);
		put_system(&o, messages[0].role == MESSAGE_SYSTEM ? &messages[0] : NULL);
	}
	for (size_t i = 0; i < n_messages; i++)
		put_message(&o, &messages[i], (ssize_t)i > query, i + 1 == n_messages);
	put_template(&o, d->assistant.before);
	if (d->keeps_think_off && !options->thinking) {
		put_template(&o, think);
		think = "";
	}
	flush_text(&o);
	prompt.answer_start = o.tokens.n;
	put_template(&o, think);
	flush_text(&o);
	prompt.thinking_open = strstr(think, "<think>") && !strstr(think, "</think>");
	if (o.r == 0) {
		prompt.tokens = o.tokens;
		o.tokens = (struct tokens){};
		*ret = prompt;
	}
	output_done(&o);
	return o.r;
}

void template_prompt_done(struct template_prompt *p)
{
	tokens_done(&p->tokens);
	*p = (struct template_prompt){};
}

const struct tokens *template_turn_end(const struct template *t)
{
	return &t->turn_end;
}

const struct tokens *template_think_close(const struct template *t)
{
	return &t->think_close;
}

int32_t template_think_end_id(const struct template *t)
{
	return t->think_end;
}
