/* SPDX-License-Identifier: MIT */
/*
 * template-internal.h: what the parts of template.c share.
 *
 * A dialect is a template's text, as a pattern, and what it renders. template-match.c knows Jinja's
 * text, template-chatml.c and template-families.c are tables of dialects, template.c renders. Used
 * by these only. Invariant: a dialect's pattern fits only templates that render what the dialect
 * says, for conversations without tools and images.
 */
#pragma once

#include "daemon/base.h"

/* A piece of text, not owned. */
struct span {
	const char *s;
	size_t len;
};

/*
 * Patterns: normalised template text (see template_normalise()), in which "*" is a gap, EITHER()
 * two literal alternatives that mean the same to us, and "@" (without quotes or tags in it) and
 * LITERAL (up to the quote that ends it) are texts that the dialect writes.
 */
#define EITHER(a, b)          "\1" a "\2" b "\3"
#define LITERAL               "\4"
#define TEMPLATE_CAPTURES_MAX 2

/* In what a dialect writes: tokens by their roles, the captured texts, and today's date. */
#define PUT_BOS    "\1"
#define PUT_EOS    "\2"
#define PUT_FIRST  "\3"
#define PUT_SECOND "\4"
#define PUT_DATE   "\5" /* 2024-07-26 */

/* What becomes of the thought of an assistant's turn in the history. */
enum history {
	HISTORY_PLAIN,     /* content as it is */
	HISTORY_STRIP,     /* content after the last </think> and line breaks */
	HISTORY_STRIP_OLD, /* the same, but the last message stays as it is (QwQ) */
	HISTORY_AFTER,     /* content after the last </think> */
	HISTORY_QWEN3,  /* think block after the last query if there is a thought, or in the last */
	HISTORY_QWEN35, /* think block after the last query, always */
	HISTORY_SMOLLM3, /* content without line breaks before it; an empty think block when off */
};

enum system_rule {
	SYSTEM_GIVEN,      /* a turn if there is a message or a default text */
	SYSTEM_SKIP_EMPTY, /* the same, but a turn without text is left out */
	SYSTEM_ALWAYS,     /* a turn in any case */
	SYSTEM_SMOLLM3,    /* a turn that says whether to think */
	SYSTEM_REFUSED,    /* moves to the last user turn, so a session cannot have it */
};

struct turn {
	const char *before, *after;
};

struct dialect {
	const char *name, *pattern;
	const char *specials[7]; /* tokens that it writes, besides <think> and </think> */
	struct turn system, user, assistant; /* assistant.before is the generation prompt too */
	enum system_rule system_rule;
	const char *default_system; /* NULL: none */
	enum history history;
	bool trim;            /* contents are stripped of Unicode whitespace */
	bool bos;             /* the beginning-of-sequence token comes first */
	bool alternate;       /* user and assistant must take turns */
	const char *think_on; /* what the generation prompt has after the assistant's header */
	const char *think_off;
	bool keeps_think_off; /* in the history too */
};

/* The tables; NULL behind the last. */
const struct dialect *template_chatml(size_t i);
const struct dialect *template_family(size_t i);

/* The template's text in the form of the patterns. -EBADMSG when a tag has no end; -ENOMEM. */
int template_normalise(const char *s, size_t len, struct buf *out);
/* captures[].s is NULL where the pattern has none. */
bool template_match(const char *pattern, const char *text, struct span captures[TEMPLATE_CAPTURES_MAX]);
/* A captured text without escapes. -EOPNOTSUPP for an escape that no known template uses, or what PUT_BOS and so on are. */
int template_unescape(struct span s, struct buf *out);
