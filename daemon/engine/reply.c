/* SPDX-License-Identifier: MIT */
/*
 * reply.c: from sampled tokens to what the client sees. See reply.h.
 *
 * Owns one answer's place in the turn (thought, blank lines after it, answer), its budgets, the
 * text that is not decided yet and the state of the last line. Engine thread. Refuses to know the
 * model and the session: it says which token is forced and when to stop, the engine does both.
 * Invariant: what is visible depends on the decoded text only, not on how tokens cut it (budgets
 * count tokens, of course); text is decided before it is handed out.
 */
#include "daemon/engine/reply.h"

enum place {
	PLACE_START,   /* nothing yet, and a <think> would open a thought */
	PLACE_THOUGHT, /* until </think> */
	PLACE_BLANK,   /* after </think>: line breaks are not part of the answer */
	PLACE_ANSWER,
};

/* How far the line at hand can still be the fence of a code block (as CommonMark has it). */
enum line {
	LINE_INDENT, /* up to three spaces */
	LINE_RUN,    /* in the run of ` or ~ */
	LINE_TRAIL,  /* blanks after the run */
	LINE_INFO,   /* text after a run of three or more: opens, never closes */
	LINE_OTHER,
};

enum sentence { SENTENCE_OPEN, SENTENCE_ENDED, SENTENCE_SPACE /* ended, and blanks after it */ };

/* What a text ends in. Fed with whole characters; a copy is fed with held text to look ahead. */
struct ending {
	enum line line;
	unsigned indent;
	char run_char, open_char;
	size_t run_len, open_len; /* open_len 0: not in a code block */
	enum sentence sentence;
	char last;
};

struct reply {
	const struct tokenizer *tokenizer;
	const struct template *template;
	struct reply_options options;
	size_t stop_len[REPLY_STOP_MAX];
	int32_t think_start, think_end; /* -1: none */

	enum place place;
	enum reply_stop stopped;
	struct utf8_stream utf8;
	struct buf held; /* decoded, not decided: blanks of a thought, or what may begin a stop string */
	struct ending ending; /* of the answer as handed out */
	bool thought_begun, answer_begun;

	bool closing;      /* the thought's budget is used up */
	size_t next_close; /* index in the tokens that close it */
	size_t n_forced;   /* handed out by reply_forced(), not yet pushed */

	uint64_t n_pushed, n_answer, n_thought, n_blank, answer_start;
};

const char *reply_stop_to_string(enum reply_stop s)
{
	switch (s) {
	case REPLY_RUNNING: return "running";
	case REPLY_STOP_EOS: return "eos";
	case REPLY_STOP_STRING: return "stop";
	case REPLY_STOP_LENGTH: return "length";
	case REPLY_STOP_CONTEXT: return "context";
	case REPLY_STOP_CANCELLED: return "cancelled";
	}
	return NULL;
}

static bool is_blank(char c)
{
	return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static void ending_end_line(struct ending *e)
{
	bool fence = e->line >= LINE_RUN && e->line <= LINE_INFO && e->run_len >= 3;

	if (fence && e->open_len == 0) {
		e->open_char = e->run_char;
		e->open_len = e->run_len;
	} else if (fence && e->line != LINE_INFO && e->run_char == e->open_char &&
		   e->run_len >= e->open_len) {
		e->open_len = 0;
		e->sentence = SENTENCE_ENDED; /* a closed block is as good an end */
	}
	e->line = LINE_INDENT;
	e->indent = 0;
	e->run_len = 0;
}

static void ending_feed_line(struct ending *e, char c)
{
	bool blank = is_blank(c);

	if (c == '\n') {
		ending_end_line(e);
		return;
	}
	switch (e->line) {
	case LINE_INDENT:
		if (c == ' ' && e->indent < 3) {
			e->indent++;
		} else if (c == '`' || c == '~') {
			e->line = LINE_RUN;
			e->run_char = c;
			e->run_len = 1;
		} else {
			e->line = LINE_OTHER;
		}
		return;
	case LINE_RUN:
		if (c == e->run_char)
			e->run_len++;
		else if (blank)
			e->line = LINE_TRAIL;
		else
			e->line = e->run_len >= 3 ? LINE_INFO : LINE_OTHER;
		return;
	case LINE_TRAIL:
		if (!blank)
			e->line = e->run_len >= 3 && (c != '`' || e->run_char != '`') ? LINE_INFO
										      : LINE_OTHER;
		return;
	case LINE_INFO:
		if (c == '`' && e->run_char == '`') /* ```like this``` is code within a line */
			e->line = LINE_OTHER;
		return;
	case LINE_OTHER: return;
	}
}

static bool is_one_of(const char *c, size_t len, const char *const *set, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (strlen(set[i]) == len && memcmp(c, set[i], len) == 0)
			return true;
	return false;
}

/* c is one UTF-8 character. */
static void ending_feed_sentence(struct ending *e, const char *c, size_t len)
{
	static const char *const ends[] = { ".", "!", "?", ":", "…", "。", "！", "？" };
	static const char *const closes[] = { "\"", "'", ")",  "]",  "}",  "”",  "“", "’",
					      "»",  "›", "」", "』", "）", "】", "》" };

	if (is_one_of(c, len, ends, ARRAY_SIZE(ends)))
		e->sentence = SENTENCE_ENDED;
	else if (is_blank(c[0]))
		e->sentence = e->sentence == SENTENCE_OPEN ? SENTENCE_OPEN : SENTENCE_SPACE;
	else if (e->sentence != SENTENCE_ENDED || !is_one_of(c, len, closes, ARRAY_SIZE(closes)))
		e->sentence = SENTENCE_OPEN;
}

static void ending_feed(struct ending *e, const char *s, size_t len)
{
	for (size_t i = 0, n; i < len; i += n) {
		for (n = 1; i + n < len && ((unsigned char)s[i + n] & 0xc0) == 0x80; n++)
			;
		ending_feed_sentence(e, s + i, n);
		ending_feed_line(e, s[i]);
		e->last = s[i];
	}
}

int reply_new(const struct tokenizer *t, const struct template *tmpl, const struct reply_options *o,
	      struct reply **ret)
{
	_cleanup_(reply_freep) struct reply *r = NULL;

	if ((o->chat && !tmpl) || o->n_stop > REPLY_STOP_MAX)
		return -EINVAL;
	r = calloc(1, sizeof(*r));
	if (!r)
		return -ENOMEM;
	r->tokenizer = t;
	r->template = tmpl;
	r->options = *o;
	for (size_t i = 0; i < o->n_stop; i++) {
		size_t len = strlen(o->stop[i]);

		if (len == 0 || len > REPLY_STOP_BYTES_MAX || !utf8_valid(o->stop[i], len))
			return -EINVAL;
		r->stop_len[i] = len;
	}
	r->think_start = r->think_end = -1;
	r->place = PLACE_ANSWER;
	if (o->chat && template_think_end_id(tmpl) >= 0) {
		r->think_end = template_think_end_id(tmpl);
		r->think_start = tokenizer_find(t, "<think>");
		r->place = o->thinking_open ? PLACE_THOUGHT : PLACE_START;
	}
	*ret = TAKE_PTR(r);
	return 0;
}

struct reply *reply_free(struct reply *r)
{
	if (!r)
		return NULL;
	buf_done(&r->held);
	free(r);
	return NULL;
}

/* Hands out the thought that is held but for the blanks around it. */
static int release_thought(struct reply *r, struct buf *out)
{
	size_t from = 0, to = r->held.len;
	int res;

	while (to > 0 && is_blank(r->held.data[to - 1]))
		to--;
	if (to == 0) {
		if (!r->thought_begun)
			buf_consume(&r->held, r->held.len);
		return 0;
	}
	while (!r->thought_begun && is_blank(r->held.data[from]))
		from++;
	r->thought_begun = true;
	res = buf_append(out, r->held.data + from, to - from);
	if (res == 0)
		buf_consume(&r->held, to);
	return res;
}

static int end_thought(struct reply *r, struct buf *out)
{
	int res = utf8_flush(&r->utf8, &r->held);

	if (res == 0)
		res = release_thought(r, out);
	buf_consume(&r->held, r->held.len);
	return res;
}

static int push_thought(struct reply *r, const char *piece, size_t len, struct buf *out)
{
	int res = utf8_push(&r->utf8, piece, len, &r->held);

	return res < 0 ? res : release_thought(r, out);
}

static int release_answer(struct reply *r, size_t len, struct buf *out)
{
	int res = buf_append(out, r->held.data, len);

	if (res < 0)
		return res;
	ending_feed(&r->ending, r->held.data, len);
	buf_consume(&r->held, len);
	return 0;
}

/* Finds the stop string that is complete first in held text, of those that end there the longest.
 * Text up to `seen` was searched before. */
static bool find_stop(const struct reply *r, size_t seen, size_t *ret_start)
{
	for (size_t end = seen + 1; end <= r->held.len; end++) {
		size_t longest = 0;

		for (size_t i = 0; i < r->options.n_stop; i++) {
			size_t len = r->stop_len[i];

			if (len > longest && len <= end &&
			    memcmp(r->held.data + end - len, r->options.stop[i], len) == 0)
				longest = len;
		}
		if (longest > 0) {
			*ret_start = end - longest;
			return true;
		}
	}
	return false;
}

/* How many bytes at the end of held text may be the beginning of a stop string. */
static size_t stop_prefix(const struct reply *r)
{
	size_t longest = 0;

	for (size_t i = 0; i < r->options.n_stop; i++) {
		size_t n = MIN(r->stop_len[i] - 1, r->held.len);

		while (n > longest && memcmp(r->held.data + r->held.len - n, r->options.stop[i], n) != 0)
			n--;
		longest = MAX(longest, n);
	}
	return longest;
}

/* The text, with what is held, ends a sentence; in a code block, a line. */
static bool ends_decently(const struct reply *r)
{
	struct ending e = r->ending;

	if (r->utf8.n_held > 0)
		return false;
	ending_feed(&e, r->held.data, r->held.len);
	if (e.last != '\n')
		ending_end_line(&e);
	return e.open_len > 0 ? e.last == '\n' : e.sentence != SENTENCE_OPEN;
}

static bool budget_used(const struct reply *r)
{
	uint64_t budget = (uint64_t)r->options.max_tokens;

	if (r->options.max_tokens < 0 || r->n_answer < budget)
		return false;
	return !r->options.chat || budget == 0 || r->n_answer - budget >= REPLY_GRACE_TOK ||
	       ends_decently(r);
}

static int push_answer(struct reply *r, uint64_t index, const char *piece, size_t len, struct buf *out)
{
	size_t seen = r->held.len, start;
	int res;

	while (r->place == PLACE_BLANK && len > 0 && (piece[0] == '\n' || piece[0] == '\r')) {
		piece++;
		len--;
	}
	/* A model that writes nothing but blank lines is not waited for without end. */
	if (r->place == PLACE_BLANK && len == 0 && r->n_blank++ < REPLY_GRACE_TOK)
		return REPLY_RUNNING;
	r->place = PLACE_ANSWER;
	if (!r->answer_begun) {
		r->answer_begun = true;
		r->answer_start = index;
	}
	if (r->options.max_tokens == 0)
		return REPLY_STOP_LENGTH;
	r->n_answer++;
	res = utf8_push(&r->utf8, piece, len, &r->held);
	if (res < 0)
		return res;
	if (find_stop(r, seen, &start)) {
		res = release_answer(r, start, out);
		buf_consume(&r->held, r->held.len);
		r->utf8 = (struct utf8_stream){};
		return res < 0 ? res : REPLY_STOP_STRING;
	}
	res = release_answer(r, r->held.len - stop_prefix(r), out);
	if (res < 0)
		return res;
	return budget_used(r) ? REPLY_STOP_LENGTH : REPLY_RUNNING;
}

int reply_push(struct reply *r, int32_t token, struct buf text[2])
{
	bool forced = r->n_forced > 0;
	uint64_t index = r->n_pushed;
	const char *piece;
	size_t len;
	int res;

	if (r->stopped != REPLY_RUNNING)
		return (int)r->stopped;
	r->n_pushed++;
	if (forced)
		r->n_forced--;
	if (tokenizer_is_eog(r->tokenizer, token)) {
		if (!r->answer_begun) {
			r->answer_begun = true;
			r->answer_start = index;
		}
		r->stopped = REPLY_STOP_EOS;
		return (int)r->stopped;
	}
	piece = tokenizer_piece(r->tokenizer, token, !r->options.chat && r->options.special, &len);
	if (r->place == PLACE_START && token == r->think_start) {
		r->place = PLACE_THOUGHT;
		return REPLY_RUNNING;
	}
	if (r->place == PLACE_THOUGHT && token == r->think_end) {
		r->place = PLACE_BLANK;
		res = end_thought(r, &text[REPLY_THOUGHT]);
		if (res == 0 && r->options.max_tokens == 0)
			res = REPLY_STOP_LENGTH;
	} else if (r->place == PLACE_THOUGHT) {
		r->n_thought += !forced;
		/* Some checkpoints open the block once more after the prompt did. */
		if (token == r->think_start && !r->thought_begun)
			return REPLY_RUNNING;
		res = push_thought(r, piece, len, &text[REPLY_THOUGHT]);
	} else {
		res = push_answer(r, index, piece, len, &text[REPLY_ANSWER]);
	}
	if (res > 0)
		r->stopped = (enum reply_stop)res;
	return res;
}

int32_t reply_forced(struct reply *r)
{
	const struct tokens *close;

	if (r->stopped != REPLY_RUNNING)
		return -1;
	if (!r->closing) {
		if (r->place != PLACE_THOUGHT || r->options.max_thinking_tokens < 0 ||
		    r->n_thought < (uint64_t)r->options.max_thinking_tokens)
			return -1;
		r->closing = true;
	}
	close = template_think_close(r->template);
	if (r->next_close >= close->n)
		return -1;
	r->n_forced++;
	return close->ids[r->next_close++];
}

static int close_fence(struct reply *r, struct buf *out)
{
	int res = 0;

	if (r->ending.last != '\n') {
		ending_end_line(&r->ending);
		if (r->ending.open_len > 0)
			res = buf_append(out, "\n", 1);
	}
	if (r->ending.open_len == 0)
		return res;
	for (size_t i = 0; res == 0 && i < r->ending.open_len; i++)
		res = buf_append(out, &r->ending.open_char, 1);
	return res < 0 ? res : buf_append(out, "\n", 1);
}

int reply_finish(struct reply *r, struct buf text[2])
{
	int res;

	if (r->place == PLACE_THOUGHT)
		return end_thought(r, &text[REPLY_THOUGHT]);
	res = utf8_flush(&r->utf8, &r->held);
	if (res == 0)
		res = release_answer(r, r->held.len, &text[REPLY_ANSWER]);
	if (res == 0 && r->options.chat)
		res = close_fence(r, &text[REPLY_ANSWER]);
	return res;
}

uint64_t reply_n_answer(const struct reply *r)
{
	return r->n_answer;
}

uint64_t reply_n_thought(const struct reply *r)
{
	return r->n_thought;
}

bool reply_is_thinking(const struct reply *r)
{
	return r->place == PLACE_THOUGHT;
}

uint64_t reply_answer_start(const struct reply *r)
{
	return r->answer_begun ? r->answer_start : r->n_pushed;
}
