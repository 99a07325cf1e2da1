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
 *
 * Some rules cut in several stages, each of which sees the pieces of the one before as texts of
 * their own. llama.cpp leaves what a pattern passes over as a piece; the patterns here match that
 * too, since searching would try each of its characters as a start.
 */
#include "daemon/model/pretok.h"

#include "daemon/model/aborted.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define ABORT_EVERY      65536
#define LONG_SPACE_CHARS 1024  /* white space characters, from which a run is cut by hand */
#define MATCH_LIMIT      16384 /* steps of one attempt; LONG_SPACE_CHARS and a few are needed */
#define CASED_LIMIT      (UINT32_C(1) << 30) /* a step for three bytes of text at most */
#define DEPTH_LIMIT      64
#define HEAP_LIMIT_KIB   1024

#define REPLACEMENT          0xfffd
#define CONTRACTION_ANY_CASE "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
#define SPACE_WITH_NEWLINES  "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* Of a class x and its complement y: runs of either, the first with a white space before it. */
#define RUNS(x, y)        x "++|" y "++"
#define SPACED_RUNS(x, y) "\\s?" x "++|" y "++(?:\\z|(?<!\\s))|" y "+(?=\\s)"

#define GPT2 "'(?:[stmd]|re|ve|ll)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"
#define LLAMA3(digits)                                                \
	CONTRACTION_ANY_CASE "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
			     "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACE_WITH_NEWLINES

/*
 * Upper case, then lower case, and letters that are not ASCII count as both: so the first part
 * gives back what follows its last such letter when no lower case comes. The same without giving
 * back: up to a lower case, else up to the last letter of the other kind, else all.
 */
#define CASED_WORD \
	"[^\\r\\n\\p{L}\\p{N}]?(?:[^\\P{L}a-z]*+[a-z][^\\P{L}A-Z]*+|(?:[A-Z]*+[^\\P{L}A-Za-z]++)++|[A-Z]++)"
#define CASED_REST(digits) "|" digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACE_WITH_NEWLINES

#define DEEPSEEK_LETTERS                                                                 \
	"A-Za-z\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}"   \
	"\\x{1c4}-\\x{293}\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}-\\x{377}"           \
	"\\x{37b}-\\x{37d}\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}"    \
	"\\x{3a3}-\\x{3f5}\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}"           \
	"\\x{10a0}-\\x{10c5}\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}"   \
	"\\x{1cbd}-\\x{1cbf}\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}"   \
	"\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}"   \
	"\\x{1f50}-\\x{1f57}\\x{1f59}\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}"              \
	"\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}\\x{1fc2}-\\x{1fc4}"             \
	"\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}"   \
	"\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}\\x{210a}-\\x{2113}"    \
	"\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}\\x{212a}-\\x{212d}"     \
	"\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}\\x{214e}"    \
	"\\x{2183}-\\x{2184}\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}"   \
	"\\x{2cf2}-\\x{2cf3}\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}"   \
	"\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}"   \
	"\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}" \
	"\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}"                \
	"\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}"
/* Without the white space among them. */
#define DEEPSEEK_PUNCTUATION \
	"!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3001}-\\x{3002}"
#define DEEPSEEK_EAST                                                                 \
	"\\x{800}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}" \
	"\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{9fa5}\\x{ac00}-\\x{d7ff}"
#define DEEPSEEK3_EAST "\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{30ff}"
#define DEEPSEEK3_REST                                                                     \
	"[\\p{N}\\p{Cf}\\p{Cn}\\p{Co}\\x00-\\x08\\x0e-\\x1f\\x7f-\\x{84}\\x{86}-\\x{9f}]+" \
	"(?![\\p{L}\\p{M}])"

/* How a stage cuts a run of white space: see long_space_end(). */
enum pretok_spaces {
	SPACES_ANYWHERE, /* at no cost that grows with the run */
	SPACES_LAST,     /* its last character belongs to what follows */
	SPACES_NEWLINES, /* the same, but it ends after its last line break, if it has one */
	SPACES_AT_END,   /* there is no pattern: the run that ends the text is a piece */
};

struct pretok_stage {
	const char *pattern;
	enum pretok_spaces spaces;
};

struct pretok_kind {
	const char *const *names;
	struct pretok_stage stages[PRETOK_MAX_STAGES];
	bool takes_whole, add_bos;
	bool cased; /* a pattern takes a step each time when letters change from ASCII to others */
};

#define NAMES(...) ((const char *const[]){ __VA_ARGS__, NULL })

static const struct pretok_kind kinds[] = {
	{
		.names = NAMES("qwen35"),
		.stages = { { CONTRACTION_ANY_CASE "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
						   "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" SPACE_WITH_NEWLINES,
			      SPACES_NEWLINES } },
	},
	{
		.names = NAMES("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2",
			       "hunyuan", "solar-open", "grok-2"),
		.stages = { { LLAMA3("\\p{N}"), SPACES_NEWLINES } },
	},
	{
		.names = NAMES("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4",
			       "gigachat", "mellum", "a.x-4.0", "granite-docling"),
		.stages = { { GPT2, SPACES_LAST } },
	},
	{
		.names = NAMES("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral",
			       "midm-2.0", "lfm2"),
		.stages = { { LLAMA3("\\p{N}{1,3}"), SPACES_NEWLINES } },
		.takes_whole = true,
		.add_bos = true,
	},
	{
		.names = NAMES("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
		.stages = { { LLAMA3("\\p{N}{1,3}"), SPACES_NEWLINES } },
	},
	{
		.names = NAMES("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone",
			       "minerva-7b", "mellum2"),
		.stages = { { "\\p{N}|\\P{N}++", SPACES_ANYWHERE }, { GPT2, SPACES_LAST } },
	},
	{
		.names = NAMES("tekken"),
		.stages = { { CASED_WORD CASED_REST("\\p{N}"), SPACES_NEWLINES } },
		.cased = true,
		.takes_whole = true,
		.add_bos = true,
	},
	{
		.names = NAMES("gpt-4o", "llama4", "kanana2", "minimax-m2"),
		.stages = { { CASED_WORD "(?:" CONTRACTION_ANY_CASE ")?" CASED_REST("\\p{N}{1,3}"),
			      SPACES_NEWLINES } },
		.cased = true,
	},
	{
		.names = NAMES("deepseek-llm"),
		.stages = { { "[\\r\\n]|[^\\r\\n]++", SPACES_ANYWHERE },
			    { SPACED_RUNS("[" DEEPSEEK_LETTERS "]", "[^" DEEPSEEK_LETTERS "]"),
			      SPACES_ANYWHERE },
			    { SPACED_RUNS("[" DEEPSEEK_PUNCTUATION "]", "[^" DEEPSEEK_PUNCTUATION "]"),
			      SPACES_ANYWHERE },
			    { NULL, SPACES_AT_END },
			    { RUNS("[" DEEPSEEK_EAST "]", "[^" DEEPSEEK_EAST "]"), SPACES_ANYWHERE },
			    { RUNS("\\p{N}", "\\P{N}"), SPACES_ANYWHERE } },
	},
	{
		.names = NAMES("deepseek-coder"),
		.stages = { { "[\\r\\n]|[^\\r\\n]++", SPACES_ANYWHERE },
			    { SPACED_RUNS("\\p{L}", "\\P{L}"), SPACES_ANYWHERE },
			    { SPACED_RUNS("\\p{P}", "\\P{P}"), SPACES_ANYWHERE },
			    { RUNS("[" DEEPSEEK_EAST "]", "[^" DEEPSEEK_EAST "]"), SPACES_ANYWHERE },
			    { "\\p{N}|\\P{N}++", SPACES_ANYWHERE } },
	},
	{
		.names = NAMES("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
		.stages = { { "\\p{N}{1,3}|\\P{N}++", SPACES_ANYWHERE },
			    { RUNS("[" DEEPSEEK3_EAST "]", "[^" DEEPSEEK3_EAST "]"), SPACES_ANYWHERE },
			    { "[!-/:-@\\[-`{-~][A-Za-z]+"
			      "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
			      "| ?[\\p{P}\\p{S}]+[\\r\\n]*|" SPACE_WITH_NEWLINES "|" DEEPSEEK3_REST,
			      SPACES_NEWLINES } },
	},
};

enum char_class {
	CLASS_LETTER,
	CLASS_NUMBER,
	CLASS_MARK,
	CLASS_PUNCTUATION,
	CLASS_SYMBOL,
	CLASS_FORMAT,
	CLASS_SURROGATE
};

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
	{ 0x180e, 0x180e, CLASS_FORMAT },   { 0x2ffc, 0x2fff, CLASS_SYMBOL },
	{ 0x31ef, 0x31ef, CLASS_SYMBOL },   { 0xd800, 0xdfff, CLASS_SURROGATE },
	{ 0x10efd, 0x10eff, CLASS_MARK },   { 0x1123f, 0x11240, CLASS_LETTER },
	{ 0x11241, 0x11241, CLASS_MARK },   { 0x11b00, 0x11b09, CLASS_PUNCTUATION },
	{ 0x11f00, 0x11f01, CLASS_MARK },   { 0x11f02, 0x11f02, CLASS_LETTER },
	{ 0x11f03, 0x11f03, CLASS_MARK },   { 0x11f04, 0x11f10, CLASS_LETTER },
	{ 0x11f12, 0x11f33, CLASS_LETTER }, { 0x11f34, 0x11f3a, CLASS_MARK },
	{ 0x11f3e, 0x11f42, CLASS_MARK },   { 0x11f43, 0x11f4f, CLASS_PUNCTUATION },
	{ 0x11f50, 0x11f59, CLASS_NUMBER }, { 0x1342f, 0x1342f, CLASS_LETTER },
	{ 0x13440, 0x13440, CLASS_MARK },   { 0x13441, 0x13446, CLASS_LETTER },
	{ 0x13447, 0x13455, CLASS_MARK },   { 0x1b132, 0x1b132, CLASS_LETTER },
	{ 0x1b155, 0x1b155, CLASS_LETTER }, { 0x1d2c0, 0x1d2d3, CLASS_NUMBER },
	{ 0x1df25, 0x1df2a, CLASS_LETTER }, { 0x1e030, 0x1e06d, CLASS_LETTER },
	{ 0x1e08f, 0x1e08f, CLASS_MARK },   { 0x1e4d0, 0x1e4eb, CLASS_LETTER },
	{ 0x1e4ec, 0x1e4ef, CLASS_MARK },   { 0x1e4f0, 0x1e4f9, CLASS_NUMBER },
	{ 0x1f6dc, 0x1f6dc, CLASS_SYMBOL }, { 0x1f774, 0x1f776, CLASS_SYMBOL },
	{ 0x1f77b, 0x1f77f, CLASS_SYMBOL }, { 0x1f7d9, 0x1f7d9, CLASS_SYMBOL },
	{ 0x1fa75, 0x1fa77, CLASS_SYMBOL }, { 0x1fa87, 0x1fa88, CLASS_SYMBOL },
	{ 0x1faad, 0x1faaf, CLASS_SYMBOL }, { 0x1fabb, 0x1fabd, CLASS_SYMBOL },
	{ 0x1fabf, 0x1fabf, CLASS_SYMBOL }, { 0x1face, 0x1facf, CLASS_SYMBOL },
	{ 0x1fada, 0x1fadb, CLASS_SYMBOL }, { 0x1fae8, 0x1fae8, CLASS_SYMBOL },
	{ 0x1faf7, 0x1faf8, CLASS_SYMBOL }, { 0x2b739, 0x2b739, CLASS_LETTER },
	{ 0x2ebf0, 0x2ee5d, CLASS_LETTER }, { 0x31350, 0x323af, CLASS_LETTER },
};

struct stage {
	pcre2_code *code; /* NULL: without a pattern */
	enum pretok_spaces spaces;
};

struct pretok {
	const struct pretok_kind *kind;
	struct stage stages[PRETOK_MAX_STAGES];
	size_t n_stages;
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
		for (const char *const *k = kinds[i].names; *k; k++) {
			if (buf_printf(&list, "%s%s", list.len ? ", " : "", *k) < 0)
				return -ENOMEM;
		}
	}

	return fail(ret_error, -EOPNOTSUPP, "pre-tokenizer '%.*s' is not supported; those that are: %s",
		    (int)n, printable, list.data);
}

static const struct pretok_kind *find_kind(const char *name, size_t len)
{
	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
		for (const char *const *k = kinds[i].names; *k; k++) {
			if (strlen(*k) == len && memcmp(*k, name, len) == 0)
				return &kinds[i];
		}
	}

	return NULL;
}

static int compile(struct pretok *p)
{
	PCRE2_SIZE where;
	int error;

	p->context = pcre2_match_context_create(NULL);
	if (!p->context)
		return -ENOMEM;

	for (size_t i = 0; i < PRETOK_MAX_STAGES; i++) {
		const struct pretok_stage *s = &p->kind->stages[i];

		if (s->pattern) {
			p->stages[i].code =
				pcre2_compile((PCRE2_SPTR)s->pattern, PCRE2_ZERO_TERMINATED,
					      PCRE2_UTF | PCRE2_UCP, &error, &where, NULL);
			if (!p->stages[i].code)
				return -ENOMEM; /* the patterns are constants that compile */
		}

		if (s->pattern || s->spaces == SPACES_AT_END)
			p->n_stages = i + 1;

		p->stages[i].spaces = s->spaces;
	}

	pcre2_set_match_limit(p->context, p->kind->cased ? CASED_LIMIT : MATCH_LIMIT);
	pcre2_set_depth_limit(p->context, DEPTH_LIMIT);
	pcre2_set_heap_limit(p->context, HEAP_LIMIT_KIB);
	return 0;
}

int pretok_new(const char *name, size_t len, struct pretok **ret, char **ret_error)
{
	_cleanup_(pretok_freep) struct pretok *p = calloc(1, sizeof(*p));
	int r;

	if (!p)
		return -ENOMEM;

	p->kind = find_kind(name, len);
	if (!p->kind)
		return unsupported(name, len, ret_error);

	r = compile(p);
	if (r < 0)
		return r;

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
		for (size_t i = 0; i < PRETOK_MAX_STAGES; i++)
			pcre2_code_free(p->stages[i].code);

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
 * every PCRE2 knows. Those of three bytes lie in DEEPSEEK_EAST, like those that they stand for, but
 * the surrogates' does not.
 */
static uint32_t shape_of(const struct pretok *p, uint32_t c)
{
	static const uint32_t of_class[][5] = {
		[CLASS_LETTER] = { 0, 0, 0xe0, 0x4e00, 0x20000 },
		[CLASS_NUMBER] = { 0, 0, 0xb2, 0x2160, 0x10107 },
		[CLASS_MARK] = { 0, 0, 0x300, 0x20d0, 0x1d167 },
		[CLASS_PUNCTUATION] = { 0, 0, 0xa7, 0x2020, 0x10100 },
		[CLASS_SYMBOL] = { 0, 0, 0xa9, 0x2600, 0x1f600 },
		[CLASS_FORMAT] = { 0, 0, 0xad, 0x2061, 0xe0001 },
		[CLASS_SURROGATE] = { 0, 0, 0, 0xe000, 0 },
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
	return 0;
}

int pretok_begin(struct pretok_text *t, const struct pretok *p, const char *text, size_t len,
		 const atomic_bool *abort)
{
	int r;

	t->p = p;
	t->bytes = t->shape = text;
	if (!t->match)
		t->match = pcre2_match_data_create(1, NULL);

	if (!t->match)
		return -ENOMEM;

	t->found = pcre2_get_ovector_pointer(t->match);
	r = text_is_clean(p, text, len, abort);
	if (r < 0)
		return r;

	if (r == 0) {
		r = repair(t, text, len, abort);
		if (r < 0)
			return r;

		len = t->own_bytes.len;
	}

	memset(t->stage, 0, sizeof(t->stage));
	t->stage[0].end = len;
	return 0;
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
static size_t long_space_end(const struct pretok_text *t, enum pretok_spaces spaces, size_t at,
			     size_t stop)
{
	size_t n_chars = 0, last = at, after_newline = 0, end = at, n;

	if (spaces == SPACES_ANYWHERE)
		return 0;

	while (end < stop && (n = space_len(t->shape + end, stop - end)) > 0) {
		last = end;
		end += n;
		n_chars++;
		if (t->shape[last] == '\r' || t->shape[last] == '\n')
			after_newline = end;
	}

	if (n_chars < LONG_SPACE_CHARS)
		return 0;

	if (spaces == SPACES_NEWLINES && after_newline > 0)
		return after_newline;

	return end == stop ? end : last; /* the last one belongs to what follows */
}

/* Where the white space starts that ends shape[at..stop); stop when there is none. */
static size_t trailing_space(const struct pretok_text *t, size_t at, size_t stop)
{
	size_t start = stop;

	while (start > at) {
		size_t prev = start - 1;

		while (prev > at && (t->shape[prev] & 0xc0) == 0x80)
			prev--;

		if (space_len(t->shape + prev, start - prev) == 0)
			break;

		start = prev;
	}

	return start;
}

/* The end of the stage's next piece, which starts at `at` in a text that ends at `stop`. */
static int cut(const struct pretok_text *t, const struct stage *s, size_t at, size_t stop, size_t *ret_end)
{
	size_t end;
	int r;

	if (s->spaces == SPACES_AT_END) {
		end = trailing_space(t, at, stop);
		*ret_end = end > at ? end : stop;
		return 0;
	}

	end = long_space_end(t, s->spaces, at, stop);
	if (end == 0) {
		r = pcre2_match(s->code, (PCRE2_SPTR)t->shape + at, stop - at, 0,
				PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, t->match, t->p->context);
		if (r < 0 && r != PCRE2_ERROR_NOMATCH)
			return r == PCRE2_ERROR_NOMEMORY ? -ENOMEM : -EIO;

		/* What the pattern passes over is a piece too. */
		end = r < 0 ? stop : at + (t->found[0] > 0 ? t->found[0] : t->found[1]);
	}

	*ret_end = end;
	return 0;
}

int pretok_next(struct pretok_text *t, const char **ret, size_t *ret_len)
{
	size_t i = t->p->n_stages - 1, at, end;
	int r;

	for (; t->stage[i].at == t->stage[i].end; i--) {
		if (i == 0)
			return 0;
	}

	for (;; i++) {
		at = t->stage[i].at;
		r = cut(t, &t->p->stages[i], at, t->stage[i].end, &end);
		if (r < 0)
			return r;

		t->stage[i].at = end;
		if (i + 1 == t->p->n_stages)
			break;

		t->stage[i + 1].at = at;
		t->stage[i + 1].end = end;
	}

	*ret = t->bytes + at;
	*ret_len = end - at;
	return 1;
}

void pretok_done(struct pretok_text *t)
{
	pcre2_match_data_free(t->match);
	buf_done(&t->own_bytes);
	buf_done(&t->own_shape);
	*t = (struct pretok_text){ 0 };
}
