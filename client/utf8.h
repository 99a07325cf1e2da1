/* SPDX-License-Identifier: MIT */
/*
 * utf8.h: cuts UTF-8 into characters, for the library (is this text fit for JSON?) and the programs
 * (what may go to a terminal?).
 *
 * Pure, any thread; a header, so that the library needs nothing else of client/. Accepts what JSON
 * parsers accept: shortest form only, no surrogates, nothing above U+10FFFF.
 */
#pragma once

#include "daemon/base.h"

/* The length of the character at s (n > 0 bytes are there): 1 to 4 with *ret_c set, or 0 when no
 * valid, complete one starts there. */
static inline size_t utf8_next(const char *s, size_t n, uint32_t *ret_c)
{
	static const uint32_t least[5] = { 0, 0, 0x80, 0x800, 0x10000 };
	const unsigned char *p = (const unsigned char *)s;
	size_t len;
	uint32_t c;

	if (p[0] < 0x80) {
		*ret_c = p[0];
		return 1;
	}
	if (p[0] >= 0xc2 && p[0] < 0xe0)
		len = 2;
	else if (p[0] >= 0xe0 && p[0] < 0xf0)
		len = 3;
	else if (p[0] >= 0xf0 && p[0] < 0xf5)
		len = 4;
	else
		return 0;
	if (n < len)
		return 0;
	c = p[0] & (0x7fu >> len);
	for (size_t i = 1; i < len; i++) {
		if ((p[i] & 0xc0) != 0x80)
			return 0;
		c = c << 6 | (p[i] & 0x3fu);
	}
	if (c < least[len] || (c >= 0xd800 && c < 0xe000) || c > 0x10ffff)
		return 0;
	*ret_c = c;
	return len;
}

/* Is all of it characters? NUL is one. */
static inline bool utf8_decodable(const char *s, size_t n)
{
	uint32_t c;

	for (size_t i = 0, len; i < n; i += len) {
		len = utf8_next(s + i, n - i, &c);
		if (len == 0)
			return false;
	}
	return true;
}
