/* SPDX-License-Identifier: MIT */
/*
 * template-match.c: the text of a Jinja template against the patterns of dialects. See
 * template-internal.h.
 *
 * Owns what of Jinja's text means nothing: whitespace in tags and what trim_blocks, lstrip_blocks
 * and dashes take, the kind of quotes, comments. Pure, any thread. Refuses to know any dialect.
 * Invariant: two templates with the same normalised text render the same.
 */
#include "daemon/model/template-internal.h"

static bool is_blank(char c)
{
	return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Copies one {{ }}, {% %} or {# #} tag from s to out: whitespace outside of literals goes, quotes
 * become ', a line break in a literal becomes \n and a ' becomes \', a comment vanishes. Returns the bytes read, 0
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
		} else if (quote == '"' && s[i] == '\'') {
			from = "\\'";
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

int template_normalise(const char *s, size_t len, struct buf *out)
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

/* Up to the quote that ends a literal. */
static size_t literal_len(const char *s)
{
	size_t n = 0;

	while (s[n] && s[n] != '\'')
		n += s[n] == '\\' && s[n + 1] ? 2 : 1;
	return n;
}

static void capture(struct span captures[TEMPLATE_CAPTURES_MAX], const char *s, size_t len)
{
	size_t i = 0;

	while (i < TEMPLATE_CAPTURES_MAX - 1 && captures[i].s)
		i++;
	captures[i] = (struct span){ s, len };
}

/* Matches the pattern up to its next gap or end against text: both move on. */
static bool match_segment(const char **pattern, const char **text, struct span *captures)
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
		} else if (*p == '@' || *p == LITERAL[0]) {
			size_t len = *p == '@' ? strcspn(t, "'<{}") : literal_len(t);

			capture(captures, t, len);
			t += len;
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
bool template_match(const char *pattern, const char *text, struct span captures[TEMPLATE_CAPTURES_MAX])
{
	struct span before[TEMPLATE_CAPTURES_MAX];

	memset(captures, 0, sizeof(before));
	if (!match_segment(&pattern, &text, captures))
		return false;
	while (*pattern == '*') {
		const char *start = ++pattern;

		memcpy(before, captures, sizeof(before));
		for (;; text++) {
			const char *t = text;

			pattern = start;
			if (match_segment(&pattern, &t, captures) && (*pattern || !*t)) {
				text = t;
				break;
			}
			memcpy(captures, before, sizeof(before));
			if (!*text)
				return false;
		}
	}
	return !*text;
}

int template_unescape(struct span s, struct buf *out)
{
	for (size_t i = 0; i < s.len; i++) {
		char c = s.s[i];
		int r;

		if (c >= *PUT_BOS && c <= *PUT_DATE)
			return -EOPNOTSUPP;
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
