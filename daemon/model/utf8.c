/* SPDX-License-Identifier: MIT */
/*
 * utf8.c: the utf8_ functions of tokenizer.h: bytes of tokens into whole characters.
 *
 * Owns nothing but the up to three bytes of a sequence that may still become a character. Any
 * thread, one per stream. Follows the Unicode Standard's recommendation (section 3.9): each maximal
 * part of a sequence that could have been valid becomes one U+FFFD. Invariant: what comes out is
 * valid UTF-8, and as soon as it is known.
 */
#include "daemon/model/tokenizer.h"

enum state { SEQUENCE_INVALID, SEQUENCE_PARTIAL, SEQUENCE_WHOLE };

/*
 * Judges s[0..n), whose first n - 1 bytes were SEQUENCE_PARTIAL. The ranges of the second byte
 * exclude overlong forms, surrogates and what lies above U+10FFFF.
 */
static enum state judge(const unsigned char *s, size_t n)
{
	unsigned char low = 0x80, high = 0xbf;
	size_t want;

	/* A NUL is valid UTF-8, but JSON on our wire has none: it cannot be sent, nor come back as history. */
	if (s[0] < 0x80)
		return s[0] ? SEQUENCE_WHOLE : SEQUENCE_INVALID;

	if (s[0] < 0xc2 || s[0] > 0xf4)
		return SEQUENCE_INVALID;

	want = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
	if (n == 1)
		return SEQUENCE_PARTIAL;

	if (n == 2) {
		low = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
		high = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
	}

	if (s[n - 1] < low || s[n - 1] > high)
		return SEQUENCE_INVALID;

	return n == want ? SEQUENCE_WHOLE : SEQUENCE_PARTIAL;
}

static int append_replacement(struct buf *out)
{
	return buf_append(out, "\xef\xbf\xbd", 3);
}

static int push_byte(struct utf8_stream *s, unsigned char byte, struct buf *out)
{
	unsigned char next[4];
	int r;

	memcpy(next, s->held, s->n_held);
	next[s->n_held] = byte;
	switch (judge(next, s->n_held + 1)) {
	case SEQUENCE_PARTIAL: s->held[s->n_held++] = byte; return 0;
	case SEQUENCE_WHOLE:
		r = buf_append(out, next, s->n_held + 1);
		s->n_held = 0;
		return r;
	case SEQUENCE_INVALID: break;
	}

	r = append_replacement(out);
	if (r < 0 || s->n_held == 0)
		return r;

	s->n_held = 0; /* the byte that did not fit may begin a sequence of its own */
	return push_byte(s, byte, out);
}

int utf8_push(struct utf8_stream *s, const char *bytes, size_t len, struct buf *out)
{
	int r;

	for (size_t i = 0; i < len; i++) {
		r = push_byte(s, (unsigned char)bytes[i], out);
		if (r < 0)
			return r;
	}

	return 0;
}

int utf8_flush(struct utf8_stream *s, struct buf *out)
{
	int r;

	if (s->n_held == 0)
		return 0;

	r = append_replacement(out);
	if (r == 0)
		s->n_held = 0;

	return r;
}

bool utf8_valid(const char *bytes, size_t len)
{
	const unsigned char *s = (const unsigned char *)bytes;
	enum state state = SEQUENCE_WHOLE;
	size_t start = 0;

	for (size_t i = 0; i < len; i++) {
		if (state == SEQUENCE_WHOLE)
			start = i;

		state = judge(s + start, i - start + 1);
		if (state == SEQUENCE_INVALID)
			return false;
	}

	return state == SEQUENCE_WHOLE;
}
