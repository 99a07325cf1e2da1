/* SPDX-License-Identifier: MIT */
/*
 * template.c: the ChatML/Qwen family of chat templates, rendered natively. See template.h.
 *
 * Owns the table of dialects and the few token ids that a template writes. Any thread: nothing
 * changes after template_new(). Refuses to guess: a dialect is taken only when the whole text of
 * the model's template, without the whitespace that Jinja drops, fits its pattern; gaps stand
 * only where the text is not reached without tools or images. So what is rendered is what Jinja
 * would render.
 * Invariant: message text is encoded without special tokens; their ids come from the template's
 * own text alone.
 */
#include "daemon/model/template.h"

#define TEMPLATE_BYTES_MAX (1 << 20)

/* What becomes of the thought of an assistant's turn in the history. */
enum history {
	HISTORY_PLAIN,     /* content as it is */
	HISTORY_STRIP,     /* content after the last </think> */
	HISTORY_STRIP_OLD, /* the same, but the last message stays as it is (QwQ) */
	HISTORY_QWEN3,  /* think block after the last query if there is a thought, or in the last */
	HISTORY_QWEN35, /* think block after the last query, always */
};

struct dialect {
	const char *name;
	const char *pattern;
	enum history history;
	bool trim;              /* contents are stripped of Unicode whitespace */
	bool skip_empty_system; /* a system turn without text is left out */
	const char *think_on;   /* what the generation prompt has after the assistant's header */
	const char *think_off;
};

/*
 * Patterns: normalised template text (see normalise()), in which "*" is a gap, "@" the text of the
 * default system turn, and EITHER() two literal alternatives that mean the same to us.
 */
/* clang-format off */
#define EITHER(a, b)   "\1" a "\2" b "\3"
#define LAST_QUERY     "{%-setns=namespace(multi_step_tool=true,last_query_index=messages|length-1)%}" \
		       "{%-formessageinmessages[::-1]%}{%-setindex=(messages|length-1)-loop.index0%}"
#define IS_QUERY(c)    "not(" c ".startswith('<tool_response>')and" c ".endswith('</tool_response>'))%}" \
		       "{%-setns.multi_step_tool=false%}{%-setns.last_query_index=index%}{%-endif%}"
#define TURN(c)	       "{{-'<|im_start|>'+message.role+'\\n'+" c "+'<|im_end|>'+'\\n'}}"
#define HEADER_CONTENT "{{-'<|im_start|>'+message.role+'\\n'+content}}"
#define SYSTEM_TURN(c) "{{-'<|im_start|>system\\n'+" c "+'<|im_end|>\\n'}}"
#define GENERATE       "{%-ifadd_generation_prompt%}{{-'<|im_start|>assistant\\n'}}"
#define THINK_OFF      "{{-'<think>\\n\\n</think>\\n\\n'}}"
#define THINK_OFF_ON   "{%-ifenable_thinkingisdefinedandenable_thinkingisfalse%}" THINK_OFF \
		       "{%-else%}{{-'<think>\\n'}}{%-endif%}"
#define TOOL_TURNS     "{%-elifmessage.role=='tool'%}*{%-endfor%}"

#define Q35_START   "{%-setimage_count=namespace(value=0)%}{%-setvideo_count=namespace(value=0)%}" \
		    "{%-macrorender_content(content,do_vision_count,is_system_content=false)%}" \
		    "{%-ifcontentisstring%}{{-content}}{%-elif*{%-endmacro%}" \
		    "{%-ifnotmessages%}{{-raise_exception('No messages provided.')}}{%-endif%}"
#define Q35_TOOLS   "{%-iftoolsandtoolsisiterableandtoolsisnotmapping%}*{{-'<|im_end|>\\n'}}{%-else%}"
#define Q35_QUERY   LAST_QUERY "{%-ifns.multi_step_toolandmessage.role=='user'%}" \
		    "{%-setcontent=render_content(message.content,false)|trim%}{%-if" IS_QUERY("content") "{%-endif%}{%-endfor%}"
#define Q35_CONTENT "{%-setcontent=render_content(message.content,true)|trim%}"
#define Q35_TURNS   "message.role=='user'%}" TURN("content") "{%-elifmessage.role=='assistant'%}{%-setreasoning_content=''%}" \
		    "{%-ifmessage.reasoning_contentisstring%}{%-setreasoning_content=message.reasoning_content%}{%-else%}" \
		    "{%-if'</think>'incontent%}{%-setreasoning_content=content.split('</think>')[0].rstrip('\\n')" \
		    ".split('<think>')[-1].lstrip('\\n')%}{%-setcontent=content.split('</think>')[-1].lstrip('\\n')%}" \
		    "{%-endif%}{%-endif%}{%-setreasoning_content=reasoning_content|trim%}" \
		    "{%-if" EITHER("loop.index0>ns.last_query_index%}", \
				   "(preserve_thinkingisdefinedandpreserve_thinkingistrue)or" \
				   "(loop.index0>ns.last_query_index)%}") \
		    "{{-'<|im_start|>'+message.role+'\\n<think>\\n'+reasoning_content+'\\n</think>\\n\\n'+content}}{%-else%}" \
		    HEADER_CONTENT "{%-endif%}" \
		    "{%-ifmessage.tool_callsandmessage.tool_callsisiterableandmessage.tool_callsisnotmapping%}*" \
		    "{%-endif%}{{-'<|im_end|>\\n'}}" TOOL_TURNS
/* The small sizes do not think unless asked, the large ones do: the same to us, who always say. */
#define Q35_GENERATE GENERATE EITHER(THINK_OFF_ON, \
				     "{%-ifenable_thinkingisdefinedandenable_thinkingistrue%}{{-'<think>\\n'}}{%-else%}" \
				     THINK_OFF "{%-endif%}") "{%-endif%}"

static const struct dialect dialects[] = {
	{
		.name = "qwen3.5", /* also Qwen3.6, which adds preserve_thinking (never set by us) */
		.pattern = Q35_START Q35_TOOLS
			"{%-ifmessages[0].role=='system'%}{%-setcontent=render_content(messages[0].content,false,true)|trim%}"
			SYSTEM_TURN("content") "{%-endif%}{%-endif%}" Q35_QUERY
			"{%-ifns.multi_step_tool%}{{-raise_exception('No user query found in messages.')}}{%-endif%}"
			"{%-formessageinmessages%}" Q35_CONTENT "{%-ifmessage.role=='system'%}{%-ifnotloop.first%}"
			"{{-raise_exception('System message must be at the beginning.')}}{%-endif%}{%-elif" Q35_TURNS Q35_GENERATE,
		.history = HISTORY_QWEN35, .trim = true,
		.think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "qwen3.5-merged", /* a common repair: system messages are merged and may be empty */
		.pattern = Q35_START
			"{%-setnum_sys=0%}{%-setmerged_system=''%}{%-ifmessages[0].role=='system'ormessages[0].role=='developer'%}"
			"{%-setfirst=render_content(messages[0].content,false,true)|trim%}*"
			"{%-else%}{%-setmerged_system=first%}{%-setnum_sys=1%}{%-endif%}{%-endif%}" Q35_TOOLS
			"{%-ifmerged_system%}" SYSTEM_TURN("merged_system") "{%-endif%}{%-endif%}" Q35_QUERY
			"{%-formessageinmessages%}"
			"{%-ifloop.index0>=num_sysandmessage.role!='system'andmessage.role!='developer'%}" Q35_CONTENT
			"{%-if" Q35_TURNS Q35_GENERATE,
		.history = HISTORY_QWEN35, .trim = true, .skip_empty_system = true,
		.think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "qwen3", /* the model opens its think block itself */
		.pattern = "{%-iftools%}*<|im_end|>\\n'}}{%-else%}{%-ifmessages[0].role=='system'%}"
			SYSTEM_TURN("messages[0].content") "{%-endif%}{%-endif%}" LAST_QUERY
			"{%-ifns.multi_step_toolandmessage.role=='user'and" IS_QUERY("message.content") "{%-endfor%}"
			"{%-formessageinmessages%}{%-if(message.role=='user')or(message.role=='system'andnotloop.first)%}"
			TURN("message.content") "{%-elifmessage.role=='assistant'%}{%-setcontent=message.content%}"
			"{%-setreasoning_content=''%}"
			"{%-ifmessage.reasoning_contentisdefinedandmessage.reasoning_contentisnotnone%}"
			"{%-setreasoning_content=message.reasoning_content%}{%-else%}{%-if'</think>'inmessage.content%}"
			"{%-setcontent=message.content.split('</think>')[-1].lstrip('\\n')%}"
			"{%-setreasoning_content=message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')%}"
			"{%-endif%}{%-endif%}{%-ifloop.index0>ns.last_query_index%}"
			"{%-ifloop.lastor(notloop.lastandreasoning_content)%}{{-'<|im_start|>'+message.role+'\\n<think>\\n'"
			"+reasoning_content.strip('\\n')+'\\n</think>\\n\\n'+content.lstrip('\\n')}}{%-else%}" HEADER_CONTENT
			"{%-endif%}{%-else%}" HEADER_CONTENT "{%-endif%}{%-ifmessage.tool_calls%}*{%-endif%}{{-'<|im_end|>\\n'}}"
			TOOL_TURNS GENERATE
			"{%-ifenable_thinkingisdefinedandenable_thinkingisfalse%}" THINK_OFF "{%-endif%}{%-endif%}",
		.history = HISTORY_QWEN3, .think_on = "", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "qwen2.5", /* and others that differ in the default system turn only */
		.pattern = "{%-iftools%}*<|im_end|>\\n'}}{%-else%}{%-ifmessages[0]['role']=='system'%}"
			SYSTEM_TURN("messages[0]['content']") "{%-else%}{{-'<|im_start|>system\\n@<|im_end|>\\n'}}{%-endif%}{%-endif%}"
			"{%-formessageinmessages%}{%-if(message.role=='user')or(message.role=='system'andnotloop.first)"
			"or(message.role=='assistant'andnotmessage.tool_calls)%}" TURN("message.content")
			"{%-elifmessage.role=='assistant'%}*" TOOL_TURNS GENERATE "{%-endif%}",
		.history = HISTORY_PLAIN, .think_on = "", .think_off = "",
	},
	{
		.name = "qwq",
		.pattern = "{%-iftools%}*<|im_end|>\\n'}}{%-else%}{%-ifmessages[0]['role']=='system'%}"
			SYSTEM_TURN("messages[0]['content']") "{%-endif%}{%-endif%}"
			"{%-formessageinmessages%}{%-if(message.role=='user')or(message.role=='system'andnotloop.first)%}"
			TURN("message.content") "{%-elifmessage.role=='assistant'andnotmessage.tool_calls%}"
			"{%-setcontent=message.content%}{%-ifnotloop.last%}"
			"{%-setcontent=message.content.split('</think>')[-1].lstrip('\\n')%}{%-endif%}" TURN("content")
			"{%-elifmessage.role=='assistant'%}*" TOOL_TURNS
			"{%-ifadd_generation_prompt%}{{-'<|im_start|>assistant\\n<think>\\n'}}{%-ifnotenable_thinking-%}"
			"{{-'</think>'-}}{%-endif-%}{%-endif%}",
		.history = HISTORY_STRIP_OLD, .think_on = "<think>\n", .think_off = "<think>\n</think>",
	},
	{
		.name = "qwen3-coder",
		.pattern = "{%macrorender_extra_keys(json_dict,handled_keys)%}*{%endmacro%}{%-ifmessages[0]['role']=='system'%}"
			"{%-setsystem_message=messages[0]['content']%}{%-setloop_messages=messages[1:]%}{%-else%}"
			"{%-setloop_messages=messages%}{%-endif%}{%-ifnottoolsisdefined%}{%-settools=[]%}{%-endif%}"
			"{%-ifsystem_messageisdefined%}{{-'<|im_start|>system\\n'+system_message}}{%-else%}"
			"{%-iftoolsisiterableandtools|length>0%}*{%-ifsystem_messageisdefined%}{{-'<|im_end|>\\n'}}{%-else%}"
			"{%-iftoolsisiterableandtools|length>0%}{{-'<|im_end|>\\n'}}{%-endif%}{%-endif%}"
			"{%-formessageinloop_messages%}{%-ifmessage.role=='assistant'andmessage.tool_callsisdefinedand*"
			"{%-elifmessage.role=='user'ormessage.role=='system'ormessage.role=='assistant'%}" TURN("message.content")
			TOOL_TURNS GENERATE "{%-endif%}",
		.history = HISTORY_PLAIN, .think_on = "", .think_off = "",
	},
	{
		.name = "chatml-think", /* a loop over turns that drops old thoughts */
		.pattern = "{%-forminmessages%}{{-'<|im_start|>'+m.role+'\\n'}}{%-settext=m.contentifm.contentisstringelse*%}"
			"{%-ifm.role=='assistant'and'</think>'intext%}{%settext=text.split('</think>')[-1].lstrip('\\n')%}{%endif%}"
			"{{-text+'<|im_end|>\\n'}}{%-endfor%}" GENERATE THINK_OFF_ON "{%-endif%}",
		.history = HISTORY_STRIP, .think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		/* Always opens a think block. Closing it at once is what a budget of 0 does as
		 * well, so "off" may do it. */
		.name = "chatml-always-think",
		.pattern = "{%-forminmessages%}{{-'<|im_start|>'+m.role+'\\n'+m.content+'<|im_end|>\\n'}}{%-endfor%}"
			"{%-ifadd_generation_prompt%}{{-'<|im_start|>assistant\\n<think>\\n'}}{%-endif%}",
		.history = HISTORY_PLAIN, .think_on = "<think>\n", .think_off = "<think>\n\n</think>\n\n",
	},
	{
		.name = "chatml",
		.pattern = "{%formessageinmessages%}{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>'+'\\n'}}"
			"{%endfor%}{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}",
		.history = HISTORY_PLAIN, .think_on = "", .think_off = "",
	},
};
/* clang-format on */

/* The special tokens that templates of the family write. */
enum special { SPECIAL_START, SPECIAL_END, SPECIAL_THINK, SPECIAL_THINK_END, SPECIAL_N };
static const char *const special_text[SPECIAL_N] = { "<|im_start|>", "<|im_end|>", "<think>",
						     "</think>" };

struct template
{
	const struct tokenizer *tokenizer;
	const struct dialect *dialect;
	int32_t special[SPECIAL_N]; /* -1: not written by this dialect */
	struct buf default_system;  /* data NULL: none */
	struct tokens turn_end, think_close;
};

/* A piece of a message's text. */
struct span {
	const char *s;
	size_t len;
};

static bool is_blank(char c)
{
	return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Copies one {{ }}, {% %} or {# #} tag from s to out: whitespace outside of literals goes, quotes
 * become ', a line break in a literal becomes \n, a comment vanishes. Returns the bytes read, 0
 * when the tag has no end. */
static size_t normalise_tag(const char *s, size_t len, struct buf *out, int *r)
{
	char close = s[1] == '{' ? '}' : s[1], quote = 0;
	bool comment = s[1] == '#';
	size_t i;

	for (i = 0; i < len && *r == 0; i++) {
		const char *from = s + i;
		size_t n = 1;

		if (i >= 2 && !quote && s[i] == close && i + 1 < len && s[i + 1] == '}') {
			if (!comment)
				*r = buf_append(out, from, 2);
			return i + 2;
		}
		if (comment)
			continue;
		if (quote && s[i] == '\\' && i + 1 < len) {
			n = 2;
			i++;
		} else if (quote && s[i] == '\n') {
			from = "\\n";
			n = 2;
		} else if (s[i] == quote) {
			quote = 0;
			from = "'";
		} else if (!quote && (s[i] == '\'' || s[i] == '"')) {
			quote = s[i];
			from = "'";
		} else if (!quote && is_blank(s[i])) {
			continue;
		}
		*r = buf_append(out, from, n);
	}
	return 0;
}

/*
 * Text outside of tags, s[0..len), between a tag that ends in before[0..1] (NULL: start) and one
 * that starts at after (NULL: end), as Jinja with trim_blocks and lstrip_blocks leaves it.
 */
static int normalise_text(const char *s, size_t len, const char *before, const char *after,
			  struct buf *out)
{
	bool line_start = !before;
	size_t end = len;

	if ((before && before[-1] == '-') || (after && after[2] == '-')) {
		/* A dash takes whitespace; other text is in no dialect, so how it is cut is all
		 * one. */
		for (size_t i = 0; i < len; i++)
			if (!is_blank(s[i]))
				return buf_append(out, s, len);
		return 0;
	}
	if (before && before[0] != '}' && len > 0 && s[0] == '\n') {
		s++;
		end--;
		line_start = true;
	}
	if (!after && end > 0 && s[end - 1] == '\n')
		end--;
	if (after && after[1] != '{') {
		size_t cut = end;

		while (cut > 0 && (s[cut - 1] == ' ' || s[cut - 1] == '\t'))
			cut--;
		if (cut > 0 ? s[cut - 1] == '\n' : line_start)
			end = cut;
	}
	return buf_append(out, s, end);
}

/* The template's text in the form of the patterns. -EBADMSG when a tag has no end. */
static int normalise(const char *s, size_t len, struct buf *out)
{
	const char *before = NULL;
	size_t at = 0, text = 0;
	int r = 0;

	while (at < len) {
		size_t n;

		if (s[at] != '{' || at + 2 >= len || !strchr("{%#", s[at + 1])) {
			at++;
			continue;
		}
		r = normalise_text(s + text, at - text, before, s + at, out);
		if (r < 0)
			return r;
		n = normalise_tag(s + at, len - at, out, &r);
		if (r < 0)
			return r;
		if (n == 0)
			return -EBADMSG;
		at += n;
		text = at;
		before = s + at - 2;
	}
	return normalise_text(s + text, len - text, before, NULL, out);
}

/* Matches the pattern up to its next gap or end against text: both move on. */
static bool match_segment(const char **pattern, const char **text, struct span *capture)
{
	const char *p = *pattern, *t = *text;

	while (*p && *p != '*') {
		if (*p == '\1') {
			size_t first = strcspn(p + 1, "\2"), second = strcspn(p + 1 + first + 1, "\3");
			const char *a = p + 1, *b = a + first + 1;

			if (strncmp(t, a, first) == 0)
				t += first;
			else if (strncmp(t, b, second) == 0)
				t += second;
			else
				return false;
			p = b + second + 1;
		} else if (*p == '@') {
			*capture = (struct span){ t, strcspn(t, "'<{}") };
			t += capture->len;
			p++;
		} else if (*p++ != *t++) {
			return false;
		}
	}
	*pattern = p;
	*text = t;
	return true;
}

/* For each gap the first place where the next segment fits is taken: at most pattern times text. */
static bool match_pattern(const char *pattern, const char *text, struct span *capture)
{
	if (!match_segment(&pattern, &text, capture))
		return false;
	while (*pattern == '*') {
		const char *start = ++pattern;

		for (;; text++) {
			const char *t = text;

			pattern = start;
			if (match_segment(&pattern, &t, capture) && (*pattern || !*t)) {
				text = t;
				break;
			}
			if (!*text)
				return false;
		}
	}
	return !*text;
}

/* Unescapes a Jinja literal. -EOPNOTSUPP for an escape that no known template uses. */
static int unescape(struct span s, struct buf *out)
{
	for (size_t i = 0; i < s.len; i++) {
		char c = s.s[i];
		int r;

		if (c == '\\') {
			if (++i == s.len || !strchr("n\\'\"", s.s[i]))
				return -EOPNOTSUPP;
			c = s.s[i] == 'n' ? '\n' : s.s[i];
		}
		r = buf_append(out, &c, 1);
		if (r < 0)
			return r;
	}
	return buf_reserve(out, 0);
}

static int find_dialect(struct template *t, const char *text, size_t len, char **ret_error)
{
	struct buf normal = {};
	int r;

	if (len > TEMPLATE_BYTES_MAX || memchr(text, 0, len))
		return fail(ret_error, -EOPNOTSUPP,
			    "chat template is too long or holds a NUL byte; raw completion works");
	if (!memmem(text, len, "<|im_start|>", 12) || !memmem(text, len, "<|im_end|>", 10))
		return fail(ret_error, -EOPNOTSUPP,
			    "chat template is not of the ChatML family that residentd renders; raw completion works");
	r = buf_reserve(&normal, 0);
	if (r == 0)
		r = normalise(text, len, &normal);
	if (r == -ENOMEM)
		goto out;
	for (size_t i = 0; r == 0 && !t->dialect && i < ARRAY_SIZE(dialects); i++) {
		struct span system = {};

		if (!match_pattern(dialects[i].pattern, normal.data, &system))
			continue;
		t->dialect = &dialects[i];
		if (system.s)
			r = unescape(system, &t->default_system);
	}
	if (r == -EBADMSG || r == -EOPNOTSUPP || !t->dialect)
		r = fail(ret_error, -EOPNOTSUPP,
			 "chat template is ChatML, but none of the forms that residentd renders "
			 "exactly; raw completion works");
out:
	buf_done(&normal);
	return r;
}

/* A special token never comes out of text, so its id is not what the text is encoded to. */
static int check_special(const struct tokenizer *t, int32_t id, const char *text)
{
	struct tokens tokens = {};
	int r = id < 0 ? -EOPNOTSUPP : tokenizer_encode(t, text, strlen(text), 0, NULL, &tokens);

	for (size_t i = 0; i < tokens.n; i++)
		if (tokens.ids[i] == id)
			r = -EOPNOTSUPP;
	tokens_done(&tokens);
	return r;
}

static int find_specials(struct template *t, char **ret_error)
{
	const struct dialect *d = t->dialect;
	bool thinks = *d->think_on || *d->think_off;
	int r;

	for (int i = 0; i < SPECIAL_N; i++) {
		t->special[i] = -1;
		if (i >= SPECIAL_THINK && !thinks)
			continue;
		t->special[i] = tokenizer_find(t->tokenizer, special_text[i]);
		r = check_special(t->tokenizer, t->special[i], special_text[i]);
		if (r == -EOPNOTSUPP)
			return fail(ret_error, r,
				    "chat template writes %s, which is no special token of the model; "
				    "raw completion works",
				    special_text[i]);
		if (r < 0)
			return r;
	}
	return 0;
}

/* A prompt in the making. The first error stays in r, and everything after it does nothing. */
struct output {
	const struct template *t;
	const atomic_bool *abort;
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

/* The template's own text: its special tokens become ids. */
static void put_template(struct output *o, const char *s)
{
	while (*s) {
		size_t n = 1;
		int i;

		for (i = 0; i < SPECIAL_N; i++)
			if (o->t->special[i] >= 0 && startswith(s, special_text[i]))
				break;
		if (i < SPECIAL_N) {
			n = strlen(special_text[i]);
			flush_text(o);
			if (o->r == 0)
				o->r = tokens_append(&o->tokens, &o->t->special[i], 1);
		} else {
			put_text(o, (struct span){ s, 1 });
		}
		s += n;
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
	r = encode_template(t, "<|im_end|>\n", &t->turn_end);
	if (r == 0 && t->special[SPECIAL_THINK_END] >= 0)
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
	buf_done(&t->default_system);
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

static struct span trim(struct span s)
{
	size_t n;

	while ((n = space_at(s.s, s.len)) > 0) {
		s.s += n;
		s.len -= n;
	}
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
	put_template(o, "<|im_start|>assistant\n");
	if (block) {
		put_template(o, "<think>\n");
		put_text(o, thought);
		put_template(o, "\n</think>\n\n");
	}
	put_text(o, content);
	put_template(o, "<|im_end|>\n");
}

static void put_turn(struct output *o, const char *header, struct span content)
{
	put_template(o, header);
	put_text(o, content);
	put_template(o, "<|im_end|>\n");
}

static void put_message(struct output *o, const struct message *m, bool after_query, bool last)
{
	struct span content = message_content(o->t, m);

	switch (m->role) {
	case MESSAGE_SYSTEM:
		if (content.len > 0 || !o->t->dialect->skip_empty_system)
			put_turn(o, "<|im_start|>system\n", content);
		return;
	case MESSAGE_USER: put_turn(o, "<|im_start|>user\n", content); return;
	case MESSAGE_ASSISTANT: put_assistant(o, m, after_query, last); return;
	}
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
	return 0;
}

int template_render(const struct template *t, const struct message *messages, size_t n_messages,
		    const struct template_options *options, const atomic_bool *abort,
		    struct template_prompt *ret, char **ret_error)
{
	struct output o = { .t = t, .abort = abort };
	const char *think = options->thinking ? t->dialect->think_on : t->dialect->think_off;
	struct template_prompt prompt = {};
	ssize_t query = -1;
	int r;

	r = check_messages(t, messages, n_messages, options->continuation, &query, ret_error);
	if (r < 0)
		return r;
	if (!options->continuation && messages[0].role != MESSAGE_SYSTEM && t->default_system.data)
		put_turn(&o, "<|im_start|>system\n",
			 (struct span){ t->default_system.data, t->default_system.len });
	for (size_t i = 0; i < n_messages; i++)
		put_message(&o, &messages[i], (ssize_t)i > query, i + 1 == n_messages);
	put_template(&o, "<|im_start|>assistant\n");
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
	return t->special[SPECIAL_THINK_END];
}
