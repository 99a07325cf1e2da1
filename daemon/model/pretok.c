/* SPDX-License-Identifier: MIT */
/*
 * pretok.c: see pretok.h.
 *
 * The rule is llama.cpp's, on every input that it accepts. It decodes leniently and writes the text
 * anew: a surrogate stays, an overlong form is shortened, each byte that fits no sequence becomes
 * U+FFFD. Code points above U+10FFFF abort llama.cpp; here each of their bytes becomes U+FFFD too.
 * So text that is not UTF-8 comes back repaired, not as it was.
 *
 * PCRE2 sees not the text but its shape, where characters that PCRE2 refuses (surrogates) or may
 * classify in another way than llama.cpp (the tables come from different Unicode versions) are
 * replaced by old ones of the right class with as many bytes. Patterns run in the interpreter,
 * since the daemon may not write code, under limits that no text reaches: only \s*[\r\n]+
 * backtracks in proportion to its input, and longer runs of white space are cut by hand.
 */
#include "daemon/model/pretok.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define ABORT_EVERY      65536
#define LONG_SPACE_CHARS 1024  /* white space characters, from which a run is cut by hand */
#define MATCH_LIMIT      16384 /* steps of one attempt; LONG_SPACE_CHARS and a few are needed */
#define DEPTH_LIMIT      64
#define HEAP_LIMIT_KIB   1024

#define REPLACEMENT          0xfffd
#define CONTRACTION_ANY_CASE "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
#define SPACE_WITH_NEWLINES  "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/*
 * Each pattern leaves a run of white space by the rule in long_space_end(); one that does not
 * needs a rule of its own there.
 */
struct pretok_kind {
	const char *name, *pattern;
	bool newlines; /* a run of white space ends after its last line break, if it has one */
	bool takes_whole, add_bos;
};

static const struct pretok_kind kinds[] = {
	{
		.name = "qwen35",
		.pattern = CONTRACTION_ANY_CASE
		"|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
		"| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" SPACE_WITH_NEWLINES,
		.newlines = true,
	},
	{
		.name = "qwen2",
		.pattern = CONTRACTION_ANY_CASE "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
						"| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACE_WITH_NEWLINES,
		.newlines = true,
	},
	{
		.name = "gpt-2",
		.pattern = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)",
	},
	{
		.name = "llama-bpe",
		.pattern = CONTRACTION_ANY_CASE "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
						"| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACE_WITH_NEWLINES,
		.newlines = true,
		.takes_whole = true,
		.add_bos = true,
	},
};

enum char_class { CLASS_LETTER, CLASS_NUMBER, CLASS_MARK, CLASS_OTHER };

/*
 * The class that llama.cpp (Unicode 15.1) gives to these, where PCRE2 10.42 (Unicode 14) has
 * another; found by comparing the two over all code points. U+180E is white space to PCRE2,
 * surrogates it does not take, the others it does not know. With a PCRE2 newer than 15.1 characters
 * that are newer still would differ.
 */
static const struct class_range {
	uint32_t first, last;
	enum char_class class;
} class_ranges[] = {
	{ 0x0cf3, 0x0cf3, CLASS_MARK },     { 0x0ece, 0x0ece, CLASS_MARK },
	{ 0x180e, 0x180e, CLASS_OTHER },    { 0xd800, 0xdfff, CLASS_OTHER },
	{ 0x10efd, 0x10eff, CLASS_MARK },   { 0x1123f, 0x11240, CLASS_LETTER },
	{ 0x11241, 0x11241, CLASS_MARK },   { 0x11f00, 0x11f01, CLASS_MARK },
	{ 0x11f02, 0x11f02, CLASS_LETTER }, { 0x11f03, 0x11f03, CLASS_MARK },
	{ 0x11f04, 0x11f10, CLASS_LETTER }, { 0x11f12, 0x11f33, CLASS_LETTER },
	{ 0x11f34, 0x11f3a, CLASS_MARK },   { 0x11f3e, 0x11f42, CLASS_MARK },
	{ 0x11f50, 0x11f59, CLASS_NUMBER }, { 0x1342f, 0x1342f, CLASS_LETTER },
	{ 0x13440, 0x13440, CLASS_MARK },   { 0x13441, 0x13446, CLASS_LETTER },
	{ 0x13447, 0x13455, CLASS_MARK },   { 0x1b132, 0x1b132, CLASS_LETTER },
	{ 0x1b155, 0x1b155, CLASS_LETTER }, { 0x1d2c0, 0x1d2d3, CLASS_NUMBER },
	{ 0x1df25, 0x1df2a, CLASS_LETTER }, { 0x1e030, 0x1e06d, CLASS_LETTER },
	{ 0x1e08f, 0x1e08f, CLASS_MARK },   { 0x1e4d0, 0x1e4eb, CLASS_LETTER },
	{ 0x1e4ec, 0x1e4ef, CLASS_MARK },   { 0x1e4f0, 0x1e4f9, CLASS_NUMBER },
	{ 0x2b739, 0x2b739, CLASS_LETTER }, { 0x2ebf0, 0x2ee5d, CLASS_LETTER },
	{ 0x31350, 0x323af, CLASS_LETTER },
};

struct pretok {
	const struct pretok_kind *kind;
	pcre2_code *code;
	pcre2_match_context *context;
	bool page_has_range[0x1100]; /* whether class_ranges has some of the 256 code points */
};

static int unsupported(const char *name, size_t len, char **ret_error)
{
	_cleanup_(buf_done) struct buf list = { 0 };
	char printable[64];
	size_t n = MIN(len, sizeof(printable));

	for (size_t i = 0; i < n; i++)
		printable[i] = name[i] > ' ' && name[i] <= '~' ? name[i] : '?';

	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
		if (buf_printf(&list, "%s%s", i ? ", " : "", kinds[i].name) < 0)
			return -ENOMEM;
	}

	return fail(ret_error, -EOPNOTSUPP, "pre-tokenizer '%.*s' is not supported; those that are: %s",
		    (int)n, printable, list.data);
}

int pretok_new(const char *name, size_t len, struct pretok **ret, char **ret_error)
{
	_cleanup_(pretok_freep) struct pretok *p = calloc(1, sizeof(*p));
	PCRE2_SIZE where;
	int error;

	if (!p)
		return -ENOMEM;

	for (size_t i = 0; i < ARRAY_SIZE(kinds) && !p->kind; i++) {
		if (strlen(kinds[i].name) == len && memcmp(kinds[i].name, name, len) == 0)
			p->kind = &kinds[i];
	}

	if (!p->kind)
		return unsupported(name, len, ret_error);

	p->code = pcre2_compile((PCRE2_SPTR)p->kind->pattern, PCRE2_ZERO_TERMINATED,
				PCRE2_UTF | PCRE2_UCP, &error, &where, NULL);
	p->context = pcre2_match_context_create(NULL);
	if (!p->code || !p->context)
		return -ENOMEM; /* the patterns are constants that compile */

	pcre2_set_match_limit(p->context, MATCH_LIMIT);
	pcre2_set_depth_limit(p->context, DEPTH_LIMIT);
	pcre2_set_heap_limit(p->context, HEAP_LIMIT_KIB);
	for (size_t i = 0; i < ARRAY_SIZE(class_ranges); i++) {
		for (uint32_t page = class_ranges[i].first >> 8; page <= class_ranges[i].last >> 8;
		     page++)
			p->page_has_range[page] = true;
	}

	*ret = TAKE_PTR(p);
	return 0;
}

struct pretok *pretok_free(struct pretok *p)
{
	if (p) {
		pcre2_code_free(p->code);
		pcre2_match_context_free(p->context);
	}

	free(p);
	return NULL;
}

bool pretok_takes_whole(const struct pretok *p)
{
	return p->kind->takes_whole;
}

bool pretok_add_bos(const struct pretok *p)
{
	return p->kind->add_bos;
}

/*
 * The code point of the sequence that s starts with, leniently: length and continuation bytes
 * are checked, no more.
 */
static size_t decode(const unsigned char *s, size_t len, uint32_t *ret)
{
	static const unsigned char first_bits[] = { 0, 0x7f, 0x1f, 0x0f, 0x07 };
	size_t n = s[0] < 0x80   ? 1
		   : s[0] < 0xc0 ? 0
		   : s[0] < 0xe0 ? 2
		   : s[0] < 0xf0 ? 3
		   : s[0] < 0xf8 ? 4
				 : 0;
	uint32_t c;

	if (n == 0 || n > len)
		return 0;

	c = s[0] & first_bits[n];
	for (size_t i = 1; i < n; i++) {
		if ((s[i] & 0xc0) != 0x80)
			return 0;

		c = c << 6 | (s[i] & 0x3f);
	}

	if (c > 0x10ffff)
		return 0;

	*ret = c;
	return n;
}

static size_t encoded_len(uint32_t c)
{
	return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
}

static size_t encode(uint32_t c, char s[4])
{
	size_t n = encoded_len(c);

	if (n == 1) {
		s[0] = (char)c;
		return 1;
	}

	for (size_t i = n - 1; i > 0; i--, c >>= 6)
		s[i] = (char)(0x80 | (c & 0x3f));

	s[0] = (char)((0xf00u >> n & 0xf0) | c);
	return n;
}

/*
 * What stands for c in the shape: c itself, or a character of its class that is as long and that
 * every PCRE2 knows.
 */
static uint32_t shape_of(const struct pretok *p, uint32_t c)
{
	static const uint32_t of_class[][5] = {
		[CLASS_LETTER] = { 0, 0, 0xe0, 0x4e00, 0x20000 },
		[CLASS_NUMBER] = { 0, 0, 0xb2, 0x2160, 0x10107 },
		[CLASS_MARK] = { 0, 0, 0x300, 0x20d0, 0x1d167 },
		[CLASS_OTHER] = { 0, 0, 0xa7, 0x2020, 0x1f600 },
	};
	size_t lo = 0, hi = ARRAY_SIZE(class_ranges);

	if (!p->page_has_range[c >> 8])
		return c;

	while (lo < hi) {
		size_t mid = (lo + hi) / 2;

		if (c > class_ranges[mid].last)
			lo = mid + 1;
		else if (c < class_ranges[mid].first)
			hi = mid;
		else
			return of_class[class_ranges[mid].class][encoded_len(c)];
	}

	return c;
}

static bool aborted(const atomic_bool *abort)
{
	return abort && atomic_load_explicit(abort, memory_order_relaxed);
}

/* 1: text is valid UTF-8 and its own shape; 0: not; -ECANCELED. */
static int text_is_clean(const struct pretok *p, const char *text, size_t len, const atomic_bool *abort)
{
	const unsigned char *s = (const unsigned char *)text;
	size_t check = 0, n;
	uint32_t c;

	for (size_t i = 0; i < len; i += n) {
		if (i >= check) {
			if (aborted(abort))
				return -ECANCELED;

			check = i + ABORT_EVERY;
		}

		n = 1;
		if (s[i] < 0x80)
			continue;

		n = decode(s + i, len - i, &c);
		if (n == 0 || n != encoded_len(c) || shape_of(p, c) != c)
			return 0;
	}

	return 1;
}

static int repair(struct pretok_text *t, const char *text, size_t len, const atomic_bool *abort)
{
	const unsigned char *s = (const unsigned char *)text;
	size_t check = 0, n;
	char bytes[4];
	uint32_t c;
	int r;

	t->own_bytes.len = t->own_shape.len = 0;
	for (size_t i = 0; i < len; i += MAX(n, (size_t)1)) {
		if (i >= check) {
			if (aborted(abort))
				return -ECANCELED;

			check = i + ABORT_EVERY;
		}

		n = decode(s + i, len - i, &c);
		if (n == 0)
			c = REPLACEMENT;

		r = buf_append(&t->own_bytes, bytes, encode(c, bytes));
		if (r < 0)
			return r;

		r = buf_append(&t->own_shape, bytes, encode(shape_of(t->p, c), bytes));
		if (r < 0)
			return r;
	}

	t->bytes = t->own_bytes.data;
	t->shape = t->own_shape.data;
	t->len = t->own_bytes.len;
	return 0;
}

int pretok_begin(struct pretok_text *t, const struct pretok *p, const char *text, size_t len,
		 const atomic_bool *abort)
{
	int r;

	t->p = p;
	t->bytes = t->shape = text;
	t->len = len;
	t->at = 0;
	if (!t->match)
		t->match = pcre2_match_data_create(1, NULL);

	if (!t->match)
		return -ENOMEM;

	r = text_is_clean(p, text, len, abort);
	return r != 0 ? MIN(r, 0) : repair(t, text, len, abort);
}

/*
 * The length of the white space character at s, 0 when there is another one. The Unicode
 * property, as llama.cpp has it.
 */
static size_t space_len(const char *s, size_t len)
{
	unsigned char a = (unsigned char)s[0];
	uint32_t c;
	size_t n;

	if (a < 0x80)
		return a == ' ' || (a >= '\t' && a <= '\r');

	n = decode((const unsigned char *)s, len, &c);
	if (c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
	    c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000)
		return n;

	return 0;
}

/*
 * Where the piece ends that starts a run of at least LONG_SPACE_CHARS white space characters; 0
 * when none starts here.
 */
static size_t long_space_end(const struct pretok_text *t)
{
	size_t n_chars = 0, last = t->at, after_newline = 0, end = t->at, n;

	while (end < t->len && (n = space_len(t->shape + end, t->len - end)) > 0) {
		last = end;
		end += n;
		n_chars++;
		if (t->shape[last] == '\r' || t->shape[last] == '\n')
			after_newline = end;
	}

	if (n_chars < LONG_SPACE_CHARS)
		return 0;

	if (t->p->kind->newlines && after_newline > 0)
		return after_newline;

	return end == t->len ? end : last; /* the last one belongs to what follows */
}

int pretok_next(struct pretok_text *t, const char **ret, size_t *ret_len)
{
	size_t end, *found;
	int r;

	if (t->at == t->len)
		return 0;

	end = long_space_end(t);
	if (end == 0) {
		r = pcre2_match(t->p->code, (PCRE2_SPTR)t->shape, t->len, t->at,
				PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, t->match, t->p->context);
		if (r < 0 && r != PCRE2_ERROR_NOMATCH)
			return r == PCRE2_ERROR_NOMEMORY ? -ENOMEM : -EIO;

		/* What the pattern passes over is a piece too. */
		found = pcre2_get_ovector_pointer(t->match);
		end = r < 0 ? t->len : found[0] > t->at ? found[0] : found[1];
	}

	*ret = t->bytes + t->at;
	*ret_len = end - t->at;
	t->at = end;
	return 1;
}

void pretok_done(struct pretok_text *t)
{
	pcre2_match_data_free(t->match);
	buf_done(&t->own_bytes);
	buf_done(&t->own_shape);
	*t = (struct pretok_text){ 0 };
}
