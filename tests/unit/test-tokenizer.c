/* SPDX-License-Identifier: MIT */
/*
 * test-tokenizer.c: ids against llama.cpp's (tokenizer-lines.txt and the files beside it, written
 * by tests/parity/tokenizer-lines.sh), small vocabularies made here, hostile ones, long texts,
 * UTF-8.
 *
 * The bundled model's vocabulary is always there; the larger ones are in ../shared.
 */
#include "tests/test.h"

#include "daemon/model/bpe.h"
#include "daemon/model/pretok.h"
#include "daemon/model/tokenizer.h"
#include "tests/unit/gguf-build.h"

#include <math.h>
#include <pthread.h>

#define BUNDLED "tests/models/tiny-qwen35moe-stories-q8_0.gguf"

struct loaded {
	struct gguf *g;
	struct tokenizer *t;
};

static void unload(struct loaded *l)
{
	tokenizer_free(l->t);
	gguf_close(l->g);
}

static struct loaded load(const char *path)
{
	struct loaded l = { 0 };

	assert_int_equal(gguf_open(path, &l.g, NULL), 0);
	assert_int_equal(tokenizer_new(l.g, &l.t, NULL), 0);
	return l;
}

static struct tokens encode(const struct tokenizer *t, const char *text, size_t len,
			    enum tokenizer_flags flags)
{
	struct tokens out = { 0 };

	assert_int_equal(tokenizer_encode(t, text, len, flags, NULL, &out), 0);
	return out;
}

/* The bytes of all tokens, special ones included. */
static struct buf decode(const struct tokenizer *t, const struct tokens *ids)
{
	struct buf b = { 0 };
	size_t len;

	for (size_t i = 0; i < ids->n; i++) {
		const char *piece = tokenizer_piece(t, ids->ids[i], true, &len);

		assert_int_equal(buf_append(&b, piece, len), 0);
	}
	return b;
}

static void check_ids(const struct tokenizer *t, const char *text, size_t len,
		      enum tokenizer_flags flags, const char *want, const char *where)
{
	_cleanup_(tokens_done) struct tokens ids = encode(t, text, len, flags);
	_cleanup_(buf_done) struct buf got = { 0 };

	for (size_t i = 0; i < ids.n; i++)
		buf_printf(&got, "%s%d", i ? " " : "", ids.ids[i]);
	if (!streq(got.data ? got.data : "", want))
		fail_msg("%s: '%.*s' gives %s instead of %s", where, (int)len, text, got.data, want);
}

static void check(const struct tokenizer *t, const char *text, enum tokenizer_flags flags,
		  const char *want)
{
	check_ids(t, text, strlen(text), flags, want, "literal");
}

/* The escapes of tokenizer-lines.txt, in place. */
static size_t unescape(char *s)
{
	char *to = s, *start = s;

	for (; *s; s++) {
		if (*s != '\\') {
			*to++ = *s;
			continue;
		}
		s++;
		assert_true(*s && strchr("ntrx\\", *s));
		if (*s == 'x') {
			char hex[3] = { s[1], s[2], 0 };

			*to++ = (char)strtol(hex, NULL, 16);
			s += 2;
		} else {
			*to++ = *s == 'n' ? '\n' : *s == 't' ? '\t' : *s == 'r' ? '\r' : '\\';
		}
	}
	return (size_t)(to - start);
}

static bool read_line(FILE *f, char **line, size_t *alloc)
{
	ssize_t n = getline(line, alloc, f);

	if (n > 0 && (*line)[n - 1] == '\n')
		(*line)[n - 1] = 0;
	return n >= 0;
}

/* All lines of tokenizer-lines.txt, or those with a '<' when special tokens are parsed. */
static size_t check_lines(const struct tokenizer *t, const char *ids_name, enum tokenizer_flags flags)
{
	_cleanup_(fclosep) FILE *lines = fopen("tests/unit/tokenizer-lines.txt", "re");
	_cleanup_(fclosep) FILE *ids = fopen(ids_name, "re");
	_cleanup_(freep) char *line = NULL, *want = NULL;
	size_t line_alloc = 0, want_alloc = 0, n = 0;
	char where[256];

	assert_non_null(lines);
	assert_non_null(ids);
	for (size_t no = 1; read_line(lines, &line, &line_alloc); no++) {
		if ((flags & TOKENIZER_SPECIAL) && !strchr(line, '<'))
			continue;
		assert_true(read_line(ids, &want, &want_alloc));
		snprintf(where, sizeof(where), "%s line %zu", ids_name, no);
		check_ids(t, line, unescape(line), flags, want, where);
		n++;
	}
	assert_false(read_line(ids, &want, &want_alloc));
	return n;
}

static void check_vocabulary(const struct tokenizer *t, const char *name)
{
	char ids[256];

	snprintf(ids, sizeof(ids), "tests/unit/tokenizer-ids-%s.txt", name);
	assert_true(check_lines(t, ids, 0) >= 480);
	snprintf(ids, sizeof(ids), "tests/unit/tokenizer-special-%s.txt", name);
	assert_true(check_lines(t, ids, TOKENIZER_SPECIAL) >= 20);
}

static void test_lines_bundled(void **state)
{
	_cleanup_(unload) struct loaded l = load(BUNDLED);

	(void)state;
	check_vocabulary(l.t, "tiny");
}

static struct buf slurp_bytes(const char *path)
{
	_cleanup_(fclosep) FILE *f = fopen(path, "re");
	struct buf b = { 0 };
	char chunk[4096];
	size_t n;

	assert_non_null(f);
	while ((n = fread(chunk, 1, sizeof(chunk), f)) > 0)
		assert_int_equal(buf_append(&b, chunk, n), 0);
	return b;
}

static char *slurp(const char *path)
{
	return slurp_bytes(path).data;
}

/*
 * The test strings that come with a vocabulary: NAME.gguf.inp, separated by a line, and .out, a
 * line of ids each.
 */
static size_t check_vocabulary_own(const char *path)
{
	static const char separator[] = "\n__ggml_vocab_test__\n";
	_cleanup_(unload) struct loaded l = load(path);
	_cleanup_(freep) char *inp = NULL, *out = NULL;
	char name[4096], *text, *next, *ids, *end, *save = NULL;
	size_t n = 0;

	assert_true(snprintf(name, sizeof(name), "%s.inp", path) < (int)sizeof(name));
	inp = slurp(name);
	assert_true(snprintf(name, sizeof(name), "%s.out", path) < (int)sizeof(name));
	out = slurp(name);
	ids = out;
	for (text = inp; text; text = next) {
		next = strstr(text, separator);
		if (next) {
			*next = 0;
			next += sizeof(separator) - 1;
		} else if (*text == 0) {
			break; /* a separator ends the file */
		}
		end = strchrnul(ids, '\n');
		save = *end ? end + 1 : end;
		while (end > ids && end[-1] == ' ')
			end--;
		*end = 0;
		while (*ids == ' ')
			ids++;
		check_ids(l.t, text, strlen(text), 0, ids, path);
		ids = save;
		n++;
	}
	assert_int_equal(*ids, 0);
	return n;
}

/* A rule for splitting, and the vocabulary that is tested with it. */
struct shared_case {
	const char *name, *base;
};

static bool shared_path(char *path, size_t size, const char *base)
{
	const char *shared = getenv("RESIDENTD_SHARED");

	snprintf(path, size, "%s/vocab/ggml-vocab-%s.gguf", shared ? shared : "../shared", base);
	return access(path, R_OK) == 0;
}

static void test_lines_shared(void **state)
{
	const struct shared_case *c = *state;
	_cleanup_(unload) struct loaded l = { 0 };
	char path[4096];

	if (!shared_path(path, sizeof(path), c->base))
		skip_because("%s is not there", path);
	l = load(path);
	check_vocabulary(l.t, c->name);
	assert_true(check_vocabulary_own(path) >= 46);
}

static void test_special_bundled(void **state)
{
	_cleanup_(unload) struct loaded l = load(BUNDLED);
	static const int32_t control[] = { 2043, 2044, 2045 };
	_cleanup_(tokens_done) struct tokens plain = { 0 };
	size_t len;

	(void)state;
	check(l.t, "<|im_start|><think></think><|im_end|><|endoftext|>", TOKENIZER_SPECIAL,
	      "2044 2046 2047 2045 2043");
	check(l.t, "<|im_<|im_end|>end|>", TOKENIZER_SPECIAL, "27 91 305 62 2045 429 91 29");
	plain = encode(l.t, "<|im_start|><think></think><|im_end|><|endoftext|>", 50, 0);
	for (size_t i = 0; i < plain.n; i++)
		assert_true(plain.ids[i] < 2043);
	assert_int_equal(tokenizer_n_vocab(l.t), 2048);
	assert_int_equal(tokenizer_find(l.t, "<think>"), 2046);
	assert_int_equal(tokenizer_find(l.t, "<thin"), -1);
	assert_int_equal(tokenizer_find(l.t, ""), -1);
	assert_int_equal(tokenizer_eos(l.t), 2045);
	assert_int_equal(tokenizer_bos(l.t), 2043);
	assert_false(tokenizer_add_bos(l.t));
	for (size_t i = 0; i < ARRAY_SIZE(control); i++) {
		assert_true(tokenizer_is_control(l.t, control[i]));
		assert_string_equal(tokenizer_piece(l.t, control[i], false, &len), "");
		assert_int_equal(len, 0);
	}
	assert_memory_equal(tokenizer_piece(l.t, 2045, true, &len), "<|im_end|>", 10);
	assert_int_equal(len, 10);
	assert_memory_equal(tokenizer_piece(l.t, 2046, false, &len), "<think>", 7);
	assert_int_equal(len, 7);
	assert_true(tokenizer_is_eog(l.t, 2043) && tokenizer_is_eog(l.t, 2045));
	assert_false(tokenizer_is_eog(l.t, 2044) || tokenizer_is_eog(l.t, 2046) ||
		     tokenizer_is_eog(l.t, 0));
	assert_false(tokenizer_is_eog(l.t, -1) || tokenizer_is_eog(l.t, 2048) ||
		     tokenizer_is_control(l.t, INT32_MAX));
	tokenizer_piece(l.t, 2048, true, &len);
	assert_int_equal(len, 0);
	tokenizer_piece(l.t, INT32_MIN, true, &len);
	assert_int_equal(len, 0);
}

static void test_round_trip(void **state)
{
	static const struct {
		const char *in, *out;
		size_t len;
	} cases[] = {
		{ "", "", 0 },
		{ "a\0b", "a\0b", 3 },
		{ "\xc3\xa9\xf0\x9f\x98\x80\xe4\xb8\xad", "\xc3\xa9\xf0\x9f\x98\x80\xe4\xb8\xad", 9 },
		{ "\xed\xa0\x80z", "\xed\xa0\x80z", 4 }, /* a surrogate stays */
		{ "\xc1\xa1", "a", 1 },                  /* overlong */
		{ "a\xff\xfe", "a\xef\xbf\xbd\xef\xbf\xbd", 7 },
		{ "\xe4\xb8", "\xef\xbf\xbd\xef\xbf\xbd", 6 },
		{ "\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 12 }, /* above U+10FFFF */
	};
	_cleanup_(unload) struct loaded l = load(BUNDLED);

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		size_t in_len = i == 1 ? 3 : strlen(cases[i].in);
		_cleanup_(tokens_done) struct tokens ids = encode(l.t, cases[i].in, in_len, 0);
		_cleanup_(buf_done) struct buf b = decode(l.t, &ids);

		assert_int_equal(b.len, cases[i].len);
		if (b.len > 0)
			assert_memory_equal(b.data, cases[i].out, b.len);
	}
}

static void test_encode_appends(void **state)
{
	_cleanup_(unload) struct loaded l = load(BUNDLED);
	_cleanup_(tokens_done) struct tokens out = { 0 };
	atomic_bool abort = false;

	(void)state;
	assert_int_equal(tokens_append(&out, (int32_t[]){ 7, 8 }, 2), 0);
	assert_int_equal(tokenizer_encode(l.t, "!\"", 2, 0, &abort, &out), 0);
	assert_true(out.n >= 3);
	assert_int_equal(out.ids[0], 7);
	out.n = 2;
	abort = true;
	assert_int_equal(tokenizer_encode(l.t, "hello", 5, 0, &abort, &out), -ECANCELED);
	assert_int_equal(tokenizer_encode(l.t, "hello", 5, TOKENIZER_SPECIAL, &abort, &out), -ECANCELED);
	assert_int_equal(tokenizer_encode(l.t, "", (size_t)1 << 40, 0, NULL, &out), -E2BIG);
	assert_int_equal(out.n, 2);
	assert_int_equal(out.ids[1], 8);
}

/*
 * A vocabulary made here: the letters a to h and the space's letter are bytes, then what a test
 * adds.
 */
struct vocabulary {
	const char *model, *pre;
	const char *tokens[64];
	int32_t types[64];
	size_t n, n_types;
	const char *merges[64];
	size_t n_merges;
	int64_t eos;
	float scores[64];
	size_t n_scores;
	const char *name;
	bool no_prefix;
};

static struct vocabulary letters(const char *pre)
{
	struct vocabulary v = { .model = "gpt2", .pre = pre, .eos = -1 };
	static const char *const bytes[] = { "a", "b", "c", "d", "e", "f", "g", "h", "\xc4\xa0" };

	for (size_t i = 0; i < ARRAY_SIZE(bytes); i++) {
		v.tokens[v.n] = bytes[i];
		v.types[v.n++] = 1;
	}
	v.n_types = v.n;
	return v;
}

static void add_token(struct vocabulary *v, const char *text, int32_t type)
{
	v->tokens[v->n] = text;
	v->types[v->n++] = type;
	v->n_types = v->n;
}

static void add_merge(struct vocabulary *v, const char *merge, const char *result)
{
	v->merges[v->n_merges++] = merge;
	if (result)
		add_token(v, result, 1);
}

static void build_keys(struct gguf_build *b, const struct vocabulary *v)
{
	gguf_build_str(b, "tokenizer.ggml.model", v->model);
	if (v->name)
		gguf_build_str(b, "general.name", v->name);
	if (v->pre)
		gguf_build_str(b, "tokenizer.ggml.pre", v->pre);
	if (v->n_scores > 0)
		gguf_build_f32s(b, "tokenizer.ggml.scores", v->scores, v->n_scores);
	if (v->no_prefix)
		gguf_build_bool(b, "tokenizer.ggml.add_space_prefix", false);
	gguf_build_strs(b, "tokenizer.ggml.tokens", v->tokens, v->n);
	if (v->n_types > 0)
		gguf_build_i32s(b, "tokenizer.ggml.token_type", v->types, v->n_types);
	if (v->pre)
		gguf_build_strs(b, "tokenizer.ggml.merges", v->merges, v->n_merges);
	if (v->eos >= 0)
		gguf_build_u32(b, "tokenizer.ggml.eos_token_id", (uint32_t)v->eos);
}

struct made {
	void *image;
	struct gguf *g;
	struct tokenizer *t;
};

static void unmake(struct made *m)
{
	tokenizer_free(m->t);
	gguf_close(m->g);
	free(m->image);
}

static int try_make(struct gguf_build *b, struct made *m, char **ret_error)
{
	size_t bytes;

	m->image = gguf_build_done(b, &bytes);
	assert_int_equal(gguf_open_memory(m->image, bytes, "test", &m->g, NULL), 0);
	return tokenizer_new(m->g, &m->t, ret_error);
}

static struct made make(const struct vocabulary *v)
{
	struct gguf_build b = gguf_build_new();
	_cleanup_(freep) char *error = NULL;
	struct made m = { 0 };

	build_keys(&b, v);
	if (try_make(&b, &m, &error) < 0)
		fail_msg("%s", error);
	return m;
}

/* Rules that no vocabulary here has: its file says another rule's name. */
static void test_lines_changed(void **state)
{
	static const char key[] = "tokenizer.ggml.pre\10\0\0";
	const struct shared_case *c = *state;
	_cleanup_(unmake) struct made m = { 0 };
	_cleanup_(buf_done) struct buf file = { 0 };
	uint64_t old_len, new_len = strlen(c->name);
	char path[4096], *old;
	size_t at, bytes;

	if (!shared_path(path, sizeof(path), c->base))
		skip_because("%s is not there", path);
	file = slurp_bytes(path);
	old = memmem(file.data, file.len, key, sizeof(key));
	assert_non_null(old);
	at = (size_t)(old - file.data) + sizeof(key);
	memcpy(&old_len, file.data + at, sizeof(old_len));
	bytes = file.len - old_len + new_len;
	assert_int_equal(posix_memalign(&m.image, 64, bytes), 0);
	memcpy(m.image, file.data, at);
	memcpy((char *)m.image + at, &new_len, sizeof(new_len));
	memcpy((char *)m.image + at + sizeof(new_len), c->name, new_len);
	memcpy((char *)m.image + at + sizeof(new_len) + new_len,
	       file.data + at + sizeof(old_len) + old_len, file.len - at - sizeof(old_len) - old_len);
	assert_int_equal(gguf_open_memory(m.image, bytes, c->name, &m.g, NULL), 0);
	assert_int_equal(tokenizer_new(m.g, &m.t, NULL), 0);
	check_vocabulary(m.t, c->name);
}

static void test_merges(void **state)
{
	struct vocabulary v = letters("gpt-2");

	(void)state;
	add_merge(&v, "a a", "aa");     /* 9 */
	add_merge(&v, "aa aa", "aaaa"); /* 10 */
	add_merge(&v, "b c", "bc");     /* 11 */
	add_merge(&v, "a b", "ab");     /* 12 */
	add_merge(&v, "\xc4\xa0 a",
		  "\xc4\xa0"
		  "a");               /* 13 */
	add_merge(&v, "de f", "def"); /* 14: of lower rank than the merge that makes its part */
	add_merge(&v, "d e", "de");   /* 15 */
	add_merge(&v, "a d", NULL);   /* no such token */
	add_merge(&v, "x y", NULL);
	add_merge(&v, "nospace", NULL);
	add_merge(&v, " ", NULL);
	add_merge(&v, "", NULL);
	add_merge(&v, "f g", "fg");     /* 16 */
	add_merge(&v, "d def", "ddef"); /* 17 */
	add_merge(&v, "g h", "gh");     /* 18 */
	add_merge(&v, "h a", "ha");     /* 19 */
	add_merge(&v, "g h", NULL);     /* again: the first counts */

	_cleanup_(unmake) struct made m = make(&v);

	check(m.t, "", 0, "");
	check(m.t, "a", 0, "0");
	check(m.t, "aaa", 0, "9 0"); /* the leftmost of equals */
	check(m.t, "aaaaa", 0, "10 0");
	check(m.t, "abc", 0, "0 11"); /* the lowest rank, not the leftmost pair */
	check(m.t, "ab", 0, "12");
	check(m.t, "ad", 0, "0 3");
	check(m.t, " a", 0, "13");
	check(m.t, " aa", 0, "8 9");
	check(m.t, "def", 0, "14");
	check(m.t, "defg", 0, "14 6"); /* a new pair goes before those that wait */
	check(m.t, "ddefd", 0, "17 3");
	check(m.t, "gha", 0, "18 0");
	check(m.t, "axb\xff", 0, "0 1"); /* bytes without a token vanish */
}

static void test_special_order(void **state)
{
	struct vocabulary v = letters("gpt-2");
	size_t len;

	(void)state;
	add_token(&v, "ab", 3);   /* 9 */
	add_token(&v, "bcde", 3); /* 10 */
	add_token(&v, "gg", 4);   /* 11 */
	add_token(&v, "ce", 2);   /* 12: unknown */
	add_token(&v, "fff", 5);  /* 13: unused */
	add_merge(&v, "a b", NULL);
	add_merge(&v, "g g", NULL);

	_cleanup_(unmake) struct made m = make(&v);

	check(m.t, "abcde", TOKENIZER_SPECIAL, "0 10"); /* the longer one first, though it starts later */
	check(m.t, "abab", TOKENIZER_SPECIAL, "9 9");
	check(m.t, "ggg", TOKENIZER_SPECIAL, "11 6");
	check(m.t, "aceb", TOKENIZER_SPECIAL, "0 12 1");
	check(m.t, "abcde", 0, "0 1 2 3 4"); /* no merge makes a special token */
	check(m.t, "gg", 0, "6 6");
	assert_true(tokenizer_is_control(m.t, 9));
	assert_false(tokenizer_is_control(m.t, 11) || tokenizer_is_control(m.t, 12));
	tokenizer_piece(m.t, 13, false, &len);
	assert_int_equal(len, 0);
	tokenizer_piece(m.t, 12, false, &len);
	assert_int_equal(len, 0);
	assert_memory_equal(tokenizer_piece(m.t, 13, true, &len), "fff", 3);
}

static void test_whole_pieces(void **state)
{
	struct vocabulary v = letters("llama-bpe");

	(void)state;
	add_token(&v, "abcd", 1); /* 9: no merges lead there */
	add_token(&v,
		  "\xc4\xa0"
		  "dd",
		  1);               /* 10 */
	add_token(&v, "efg", 3);    /* 11: control */
	add_merge(&v, "a b", "ab"); /* 12 */

	_cleanup_(unmake) struct made llama = make(&v);

	check(llama.t, "abcd", 0, "9");
	check(llama.t, "abcda", 0, "12 2 3 0");
	check(llama.t, "a dd", 0, "0 10");
	check(llama.t, "efg", 0, "4 5 6");
	v.pre = "qwen2";
	_cleanup_(unmake) struct made qwen = make(&v);

	check(qwen.t, "abcd", 0, "12 2 3");
	check(qwen.t, "a dd", 0, "0 8 3 3");
}

static void test_end_of_generation(void **state)
{
	struct vocabulary v = letters("qwen35");

	(void)state;
	add_token(&v, "<|im_end|>", 3);
	add_token(&v, "<|eot_id|>", 4); /* 10: a control token all the same */
	add_token(&v, "<|im_start|>", 3);
	add_token(&v, "[stop]", 3);
	v.eos = 12;

	_cleanup_(unmake) struct made m = make(&v);

	assert_true(tokenizer_is_eog(m.t, 9) && tokenizer_is_eog(m.t, 10) && tokenizer_is_eog(m.t, 12));
	assert_false(tokenizer_is_eog(m.t, 11) || tokenizer_is_eog(m.t, 0));
	assert_true(tokenizer_is_control(m.t, 10));
	assert_int_equal(tokenizer_eos(m.t), 12);
	assert_int_equal(tokenizer_bos(m.t), -1);
	assert_false(tokenizer_add_bos(m.t));
}

/* With <|return|> and <|call|> a message that ends is no end of the generation. */
static void test_end_of_message(void **state)
{
	struct vocabulary v = letters("gpt-4o");
	size_t len;

	(void)state;
	add_token(&v, "<|end|>", 3);     /* 9 */
	add_token(&v, "<|channel|>", 3); /* 10 */
	add_token(&v, "<|call|>", 3);    /* 11 */
	_cleanup_(unmake) struct made without = make(&v);

	assert_true(tokenizer_is_eog(without.t, 9) && tokenizer_is_eog(without.t, 11));
	add_token(&v, "<|return|>", 3); /* 12 */
	_cleanup_(unmake) struct made m = make(&v);

	assert_false(tokenizer_is_eog(m.t, 9) || tokenizer_is_control(m.t, 9));
	assert_true(tokenizer_is_eog(m.t, 11) && tokenizer_is_eog(m.t, 12));
	assert_memory_equal(tokenizer_piece(m.t, 10, false, &len), "<|channel|>", 11);
	assert_int_equal(len, 11);
	check(m.t, "<|channel|>", TOKENIZER_SPECIAL, "10");
	check(m.t, "a<|end|>b", 0, "0 4 3 1"); /* "n" has no token here */
}

/* User-defined letters and white space are text, whatever else is user-defined is not. */
static void test_user_defined_text(void **state)
{
	struct vocabulary v = letters("gpt-2");

	(void)state;
	add_token(&v, "\xc3\xbc", 4); /* 9: u umlaut, which in the byte alphabet is 0xfc */
	add_token(&v, "  ", 4);       /* 10 */
	add_token(&v, "<b>", 4);      /* 11 */
	add_token(&v,
		  "\xc4\xa0"
		  "a",
		  1); /* 12 */
	add_merge(&v, "\xc4\xa0 a", NULL);

	_cleanup_(unmake) struct made m = make(&v);

	check(m.t,
	      "a\xc3\xbc"
	      "b",
	      0, "0 9 1");
	check(m.t, "a   a", 0, "0 10 12");
	check(m.t, "a<b>a", 0, "0 1 0");
	check(m.t, "a<b>a", TOKENIZER_SPECIAL, "0 11 0");
}

/*
 * A SentencePiece-style vocabulary: unknown and two control tokens, the byte 0x0a and those of
 * U+4E2D and the space, and letters; what a test adds gets a score.
 */
static struct vocabulary sentencepieces(void)
{
	struct vocabulary v = { .model = "llama", .eos = -1 };
	static const char *const bytes[] = { "<0x0A>", "<0xE4>", "<0xB8>", "<0xAD>" }, *const chars[] = {
		"\xe2\x96\x81", "a", "b", "c", "d"
	};

	add_token(&v, "<unk>", 2);
	add_token(&v, "<s>", 3);
	add_token(&v, "</s>", 3);
	for (size_t i = 0; i < ARRAY_SIZE(bytes); i++)
		add_token(&v, bytes[i], 6); /* 3 to 6 */
	for (size_t i = 0; i < ARRAY_SIZE(chars); i++)
		add_token(&v, chars[i], 1); /* 7 to 11 */
	v.n_scores = v.n;
	return v;
}

static void add_scored(struct vocabulary *v, const char *text, float score)
{
	add_token(v, text, 1);
	v->scores[v->n - 1] = score;
	v->n_scores = v->n;
}

static void test_spm_merges(void **state)
{
	struct vocabulary v = sentencepieces();

	(void)state;
	add_scored(&v, "ab", -1);    /* 12 */
	add_scored(&v, "bc", -0.5f); /* 13 */
	add_scored(&v, "aa", -2);    /* 14 */
	add_scored(&v, "aaa", -2);   /* 15 */
	add_scored(&v,
		   "\xe2\x96\x81"
		   "a",
		   -3);                /* 16 */
	add_scored(&v, "abcd", 0.25f); /* 17: made of "a" and "bcd", which is none */
	add_scored(&v,
		   "\xc3\xa9"
		   "a",
		   -4); /* 18: its first letter is no token */
	add_scored(&v,
		   "\xe4\xb8\xad"
		   "a",
		   -5); /* 19: the same, with tokens for its bytes */
	add_scored(&v, "\xe2\x96\x81\xe2\x96\x81", -6); /* 20 */
	add_scored(&v, "<s", 9);                        /* 21 */
	add_scored(&v, "s>", 9);                        /* 22 */
	add_scored(&v, "<0", 9);                        /* 23 */
	add_scored(&v, "x0", 9);                        /* 24 */
	add_scored(&v, "<0x0", 9);                      /* 25 */
	add_scored(&v, "A>", 9);                        /* 26 */
	_cleanup_(unmake) struct made m = make(&v);

	check(m.t, "", 0, "");
	check(m.t, "b", 0, "7 9"); /* a space comes first */
	check(m.t, "a", 0, "16");
	check(m.t, " a", 0, "7 16");
	check(m.t, "  b", 0, "20 7 9");
	check(m.t, "babc", 0, "7 9 8 13"); /* the higher score, not the leftmost */
	check(m.t, "dab", 0, "7 11 12");
	check(m.t, "daaaaa", 0, "7 11 15 14");  /* of equals the leftmost */
	check(m.t, "dabcd", 0, "7 11 8 13 11"); /* no merge of two tokens leads there */
	check(m.t,
	      "d\xc3\xa9"
	      "a",
	      0, "7 11 18");
	check(m.t, "d\xc3\xa9", 0, "7 11 0"); /* unknown: no tokens for its bytes either */
	check(m.t, "d\xc3\xb1", 0, "7 11 0");
	check(m.t, "d\xe4\xb8\xad", 0, "7 11 4 5 6");
	check(m.t,
	      "d\xe4\xb8\xad"
	      "a",
	      0, "7 11 19");
	check(m.t, "d\n", 0, "7 11 3");
	check(m.t, "d<s>", 0, "7 11 21 0");     /* no special token */
	check(m.t, "d<0x0A>", 0, "7 11 25 26"); /* nor a byte */
	check(m.t, "d<s>a</s>", TOKENIZER_SPECIAL, "7 11 1 16 2");
	assert_int_equal(tokenizer_bos(m.t), 1);
	assert_int_equal(tokenizer_eos(m.t), 2);
	assert_true(tokenizer_add_bos(m.t) && tokenizer_is_eog(m.t, 2));
	v.no_prefix = true;
	_cleanup_(unmake) struct made bare = make(&v);

	check(bare.t, "ab c", 0, "12 7 10");
	check(bare.t, "<s>a", TOKENIZER_SPECIAL, "1 8");
}

static void check_piece(const struct tokenizer *t, int32_t id, bool special, const char *want)
{
	size_t len;
	const char *s = tokenizer_piece(t, id, special, &len);

	assert_int_equal(len, strlen(want));
	assert_memory_equal(s, want, len);
}

static void test_spm_pieces(void **state)
{
	struct vocabulary v = sentencepieces();

	(void)state;
	add_scored(&v,
		   "\xe2\x96\x81\xe2\x96\x81"
		   "a\xe2\x96\x81",
		   -1);                      /* 12 */
	add_token(&v, "<0xG0>", 6);          /* 13: no byte */
	add_token(&v, "\xe2\x96\x81<x>", 4); /* 14 */
	add_token(&v, "\n\n", 4);            /* 15 */
	v.n_scores = v.n;
	_cleanup_(unmake) struct made m = make(&v);

	check_piece(m.t, 3, false, "\n");
	check_piece(m.t, 4, true, "\xe4");
	check_piece(m.t, 7, false, " ");
	check_piece(m.t, 12, false, "  a ");
	check_piece(m.t, 13, false, "");
	check_piece(m.t, 14, false, "\xe2\x96\x81<x>");
	check_piece(m.t, 1, false, "");
	check_piece(m.t, 1, true, "<s>");
	check(m.t, "a\n\nb", 0, "7 8 15 7 9");
	/* a token with a space within: words are not merged one by one */
	check(m.t, " a b", 0, "7 7 8 7 9");
	check(m.t, "\xe2\x96\x81<x>a", TOKENIZER_SPECIAL, "14 7 8");
}

/* Tokens of bytes that a file has as normal ones, or without types, count by their texts. */
static void test_spm_bytes_by_text(void **state)
{
	struct vocabulary v = sentencepieces();

	(void)state;
	for (size_t i = 3; i < 7; i++)
		v.types[i] = 1;
	add_scored(&v, "<0xG0>", -1); /* 12: no byte */
	_cleanup_(unmake) struct made normal = make(&v);

	check(normal.t, "d\n\xe4\xb8\xad", 0, "7 11 3 4 5 6");
	check_piece(normal.t, 3, false, "\n");
	check_piece(normal.t, 5, false, "\xb8");
	check_piece(normal.t, 12, false, "<0xG0>");
	v.n_types = 0;
	_cleanup_(unmake) struct made untyped = make(&v);

	check(untyped.t, "d\n\xe4\xb8\xad", 0, "7 11 3 4 5 6");
	check_piece(untyped.t, 3, false, "\n");
}

/* Phi-3's special tokens take the white space with them that follows. */
static void test_spm_strip(void **state)
{
	struct vocabulary v = sentencepieces();

	(void)state;
	add_token(&v, "<|end|>", 3); /* 12 */
	v.n_scores = v.n;
	_cleanup_(unmake) struct made plain = make(&v);

	check(plain.t, "<|end|>\n a", TOKENIZER_SPECIAL, "12 7 3 7 8");
	v.name = "My Phi-3 mini";
	_cleanup_(unmake) struct made m = make(&v);

	check(m.t, "<|end|>\n a<|end|> \t\n", TOKENIZER_SPECIAL, "12 7 8 12");
	check(m.t, "<s>\n a", TOKENIZER_SPECIAL, "1 7 3 7 8");
}

/*
 * The same text in one piece and in words, and long: a vocabulary with a token that has a space
 * within gives the same ids where that token does not occur.
 */
static void test_spm_long(void **state)
{
	struct vocabulary v = sentencepieces();
	_cleanup_(buf_done) struct buf text = { 0 };
	_cleanup_(tokens_done) struct tokens want = { 0 }, got = { 0 };
	atomic_bool abort = true;
	uint32_t seed = 1;

	(void)state;
	add_scored(&v, "ab", -1);
	add_scored(&v, "aba", -1);
	add_scored(&v, "ba", -1);
	add_scored(&v, "bab", -2);
	add_scored(&v,
		   "\xe2\x96\x81"
		   "a",
		   -1);
	add_scored(&v, "\xe2\x96\x81\xe2\x96\x81", -3);
	add_scored(&v, "cc", -1);
	add_scored(&v, "cccc", -2);
	_cleanup_(unmake) struct made words = make(&v);

	add_scored(&v,
		   "d\xe2\x96\x81"
		   "d",
		   5);
	_cleanup_(unmake) struct made whole = make(&v);

	while (text.len < 500000) {
		char c;

		seed = seed * 1664525 + 1013904223;
		c = " abc\n"[(seed >> 16) % 11 % 5];
		assert_int_equal(buf_append(&text, &c, 1), 0);
	}
	for (size_t i = 0; i < 100000; i++)
		assert_int_equal(buf_append(&text, "c", 1), 0);
	want = encode(words.t, text.data, text.len, 0);
	got = encode(whole.t, text.data, text.len, 0);
	assert_int_equal(got.n, want.n);
	assert_memory_equal(got.ids, want.ids, want.n * sizeof(*want.ids));
	got.n = 1;
	assert_int_equal(tokenizer_encode(words.t, text.data, text.len, 0, &abort, &got), -ECANCELED);
	assert_int_equal(tokenizer_encode(whole.t, text.data, text.len, 0, &abort, &got), -ECANCELED);
	assert_int_equal(got.n, 1);
}

static void check_refused(struct gguf_build *b, int err, const char *says)
{
	_cleanup_(unmake) struct made m = { 0 };
	_cleanup_(freep) char *error = NULL;

	assert_int_equal(try_make(b, &m, &error), err);
	assert_null(m.t);
	assert_non_null(error);
	if (!strstr(error, says))
		fail_msg("'%s' does not say '%s'", error, says);
	for (const char *p = error; *p; p++)
		assert_true(*p >= ' ' && *p <= '~');
}

static void check_refused_vocabulary(const struct vocabulary *v, int err, const char *says)
{
	struct gguf_build b = gguf_build_new();

	build_keys(&b, v);
	check_refused(&b, err, says);
}

static void test_hostile_vocabularies(void **state)
{
	struct vocabulary good = letters("qwen35"), v;

	(void)state;
	v = good;
	v.model = "t5";
	check_refused_vocabulary(&v, -EOPNOTSUPP, "'t5' is not supported; those that are: gpt2, llama");
	v = good;
	v.pre = "tekken\n";
	check_refused_vocabulary(&v, -EOPNOTSUPP,
				 "'tekken?' is not supported; those that are: qwen35, qwen2, ");
	v = good;
	v.n = v.n_types = 0;
	check_refused_vocabulary(&v, -EBADMSG, "has 0 elements");
	v = good;
	v.n_types--;
	check_refused_vocabulary(&v, -EBADMSG, "has 8 elements for 9 tokens");
	v = good;
	v.eos = 9;
	check_refused_vocabulary(&v, -EBADMSG, "eos_token_id is 9, but there are 9 tokens");
	v = good;
	add_token(&v, "c", 3);
	check_refused_vocabulary(&v, -EBADMSG, "tokens 2 and 9 are the same text");
}

static void test_hostile_scores(void **state)
{
	struct vocabulary v = sentencepieces();

	(void)state;
	v.n_scores--;
	check_refused_vocabulary(&v, -EBADMSG, "scores has 11 elements for 12 tokens");
	v.n_scores++;
	v.scores[11] = NAN;
	check_refused_vocabulary(&v, -EBADMSG, "the score of token 11 is no finite number");
	v.n_scores = 0; /* all the same then */
	add_token(&v, "ab", 1);
	_cleanup_(unmake) struct made m = make(&v);

	check(m.t, "ab", 0, "7 12");
}

static void test_hostile_arrays(void **state)
{
	struct vocabulary v = letters("qwen35");
	struct gguf_build b = gguf_build_new();

	(void)state;
	check_refused(&b, -EBADMSG, "tokenizer.ggml.model is missing");
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	check_refused(&b, -EBADMSG, "tokenizer.ggml.pre is missing");
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen2");
	check_refused(&b, -EBADMSG, "tokenizer.ggml.tokens is missing");
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen2");
	gguf_build_i32s(&b, "tokenizer.ggml.tokens", v.types, v.n);
	check_refused(&b, -EBADMSG, "tokenizer.ggml.tokens is missing or not an array of strings");
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen2");
	gguf_build_strs(&b, "tokenizer.ggml.tokens", v.tokens, v.n);
	check_refused(&b, -EBADMSG, "tokenizer.ggml.merges is missing");
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen2");
	gguf_build_strs(&b, "tokenizer.ggml.tokens", v.tokens, v.n);
	gguf_build_f32s(&b, "tokenizer.ggml.merges", (float[]){ 1, 2 }, 2);
	check_refused(&b, -EBADMSG, "tokenizer.ggml.merges is missing or not an array of strings");
	gguf_build_str(&b, "tokenizer.ggml.model", "gpt2");
	gguf_build_str(&b, "tokenizer.ggml.pre", "qwen2");
	gguf_build_strs(&b, "tokenizer.ggml.tokens", v.tokens, v.n);
	gguf_build_strs(&b, "tokenizer.ggml.token_type", v.tokens, v.n);
	check_refused(&b, -EBADMSG, "token_type is not an array of integers");
}

/* A key that is there with a value of another kind is not taken for an absent one. */
static void test_keys_of_another_kind(void **state)
{
	static const char *const keys[] = { "tokenizer.ggml.token_type", "tokenizer.ggml.scores",
					    "tokenizer.ggml.add_space_prefix",
					    "tokenizer.ggml.add_bos_token" };
	struct vocabulary v = sentencepieces();

	(void)state;
	v.n_types = v.n_scores = 0;
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		struct gguf_build b = gguf_build_new();

		build_keys(&b, &v);
		gguf_build_u32(&b, keys[i], 1);
		check_refused(&b, -EBADMSG, keys[i]);
	}
}

/* Odd, but not contradictory: loads, and what makes no sense has no effect. */
static void test_odd_vocabulary(void **state)
{
	struct vocabulary v = letters("qwen35");
	_cleanup_(freep) char *huge = malloc(1 << 20);
	size_t len;

	(void)state;
	assert_non_null(huge);
	memset(huge, 'a', (1 << 20) - 1);
	huge[(1 << 20) - 1] = 0;
	add_token(&v, "", 1);
	add_token(&v, "", 3); /* empty texts are no duplicates, and never match */
	add_token(&v, huge, 1);
	add_token(&v, "\xff\xc4", 1);
	add_token(&v, "\xe4\xb8\xad", 1);
	add_token(&v, "zzz", INT32_MIN);
	add_merge(&v, huge, NULL);
	v.eos = 0;

	_cleanup_(unmake) struct made m = make(&v);

	check(m.t, "abc", TOKENIZER_SPECIAL, "0 1 2");
	tokenizer_piece(m.t, 11, false, &len);
	assert_int_equal(len, (1 << 20) - 1);
	assert_memory_equal(tokenizer_piece(m.t, 13, false, &len), "\xe4\xb8\xad", 3);
	v.n_types = 0; /* without types all are normal */
	_cleanup_(unmake) struct made untyped = make(&v);

	check(untyped.t, "abc", TOKENIZER_SPECIAL, "0 1 2");
}

/* Words that were seen in the text are not merged again; others that look alike are. */
static void test_many_words(void **state)
{
	_cleanup_(unload) struct loaded l = load(BUNDLED);
	_cleanup_(buf_done) struct buf text = { 0 };
	_cleanup_(tokens_done) struct tokens want = { 0 }, got = { 0 };

	(void)state;
	for (unsigned i = 0; i < 3 * 26 * 26 * 26; i++) {
		char word[] = { ' ', (char)('a' + i % 26), (char)('a' + i / 26 % 26),
				(char)('a' + i / 26 / 26 % 26) };

		assert_int_equal(tokenizer_encode(l.t, word, sizeof(word), 0, NULL, &want), 0);
		assert_int_equal(buf_append(&text, word, sizeof(word)), 0);
	}
	got = encode(l.t, text.data, text.len, 0);
	assert_int_equal(got.n, want.n);
	assert_memory_equal(got.ids, want.ids, want.n * sizeof(*want.ids));
}

struct delayed_abort {
	atomic_bool flag;
	useconds_t us;
};

static void *abort_later(void *data)
{
	struct delayed_abort *a = data;

	usleep(a->us);
	atomic_store(&a->flag, true);
	return NULL;
}

/* An encoding that is given up in the middle, when it had put ids out, leaves none behind. */
static void test_abort_midway(void **state)
{
	_cleanup_(unload) struct loaded l = load(BUNDLED);
	_cleanup_(tokens_done) struct tokens out = { 0 };
	_cleanup_(freep) char *digits = malloc(64 << 20);
	struct delayed_abort a = { .us = 2000 };
	pthread_t thread;
	size_t alloc;

	(void)state;
	assert_non_null(digits);
	memset(digits, '7', 64 << 20); /* seconds of work */
	assert_int_equal(tokens_append(&out, (int32_t[]){ 7 }, 1), 0);
	for (alloc = out.alloc; out.alloc == alloc; a.us *= 2) {
		a.flag = false;
		assert_int_equal(pthread_create(&thread, NULL, abort_later, &a), 0);
		assert_int_equal(tokenizer_encode(l.t, digits, 64 << 20, 0, &a.flag, &out), -ECANCELED);
		pthread_join(thread, NULL);
		assert_int_equal(out.n, 1);
	}
	assert_int_equal(out.ids[0], 7);
}

/* Where pretok_next() cuts s. */
static void check_pieces(const char *pre, const char *s, size_t len, const size_t *ends, size_t n_ends)
{
	_cleanup_(pretok_freep) struct pretok *p = NULL;
	_cleanup_(pretok_done) struct pretok_text t = { 0 };
	const char *piece;
	size_t n, at = 0;

	assert_int_equal(pretok_new(pre, strlen(pre), &p, NULL), 0);
	assert_int_equal(pretok_begin(&t, p, s, len, NULL), 0);
	for (size_t i = 0; i < n_ends; i++) {
		assert_int_equal(pretok_next(&t, &piece, &n), 1);
		assert_ptr_equal(piece, s + at);
		at += n;
		assert_int_equal(at, ends[i]);
	}
	assert_int_equal(pretok_next(&t, &piece, &n), 0);
}

static size_t count_pieces(const char *pre, const char *s, size_t len)
{
	_cleanup_(pretok_freep) struct pretok *p = NULL;
	_cleanup_(pretok_done) struct pretok_text t = { 0 };
	const char *piece;
	size_t n, count = 0, bytes = 0;
	int r;

	assert_int_equal(pretok_new(pre, strlen(pre), &p, NULL), 0);
	assert_int_equal(pretok_begin(&t, p, s, len, NULL), 0);
	while ((r = pretok_next(&t, &piece, &n)) > 0) {
		count++;
		bytes += n;
	}
	assert_int_equal(r, 0);
	assert_true(bytes >= len); /* more where it was repaired */
	return count;
}

/*
 * The class of a character, seen in the number of pieces. Those that PCRE2 does not know, or knows
 * in another way than llama.cpp, are among them.
 */
static void test_classes(void **state)
{
	static const struct {
		const char *c;
		size_t n_gpt2, n_qwen35; /* pieces of "a" c "a" */
	} cases[] = {
		{ "\xc3\xa9", 1, 1 },         /* letter */
		{ "\xcc\x81", 3, 1 },         /* mark */
		{ "\xe2\x85\xa3", 3, 3 },     /* number */
		{ "\xe2\x80\xa0", 3, 2 },     /* other: it goes before a word in qwen35 */
		{ "\xe1\xa0\x8e", 3, 2 },     /* U+180E, white space to PCRE2 */
		{ "\xed\xa0\x80", 3, 2 },     /* surrogate */
		{ "\xe0\xb3\xb3", 3, 1 },     /* U+0CF3, mark */
		{ "\xf0\x91\xbd\x99", 3, 3 }, /* U+11F59, number */
		{ "\xf0\x91\xbd\x9a", 3, 2 }, /* U+11F5A, unassigned */
		{ "\xf0\xae\xb9\x9d", 1, 1 }, /* U+2EE5D, letter */
		{ "\xf0\xae\xb9\x9e", 3, 2 }, /* U+2EE5E, unassigned */
		{ "\xf0\xb2\x8e\xaf", 1, 1 }, /* U+323AF, letter */
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		char s[8];
		size_t len = (size_t)snprintf(s, sizeof(s), "a%sa", cases[i].c);

		assert_int_equal(count_pieces("gpt-2", s, len), cases[i].n_gpt2);
		assert_int_equal(count_pieces("qwen35", s, len), cases[i].n_qwen35);
	}
	assert_int_equal(count_pieces("gpt-2", "1\xf0\x91\xbd\x99", 5), 1);
	assert_int_equal(count_pieces("gpt-2", "!\xe1\xa0\x8e!", 5), 1);
}

/*
 * From 1024 characters on a run of white space is cut by hand: the same way as the patterns cut
 * it.
 */
static void test_space_runs(void **state)
{
	static const char *const newline_kinds[] = { "qwen35", "qwen2", "llama-bpe" };
	char s[2200];

	(void)state;
	for (size_t n = 1000; n < 1050; n++) {
		memset(s, ' ', sizeof(s));
		s[n] = 'x';
		check_pieces("gpt-2", s, n, (size_t[]){ n }, 1);
		check_pieces("gpt-2", s, n + 1, (size_t[]){ n - 1, n + 1 }, 2);
		for (size_t k = 0; k < ARRAY_SIZE(newline_kinds); k++) {
			check_pieces(newline_kinds[k], s, n, (size_t[]){ n }, 1);
			check_pieces(newline_kinds[k], s, n + 1, (size_t[]){ n - 1, n + 1 }, 2);
		}
		s[n - 1] = '\t';
		check_pieces("gpt-2", s, n + 1, (size_t[]){ n - 1, n, n + 1 }, 3);
		check_pieces("qwen2", s, n + 1, (size_t[]){ n - 1, n + 1 }, 2);
		s[400] = '\n';
		check_pieces("gpt-2", s, n + 1, (size_t[]){ n - 1, n, n + 1 }, 3);
		for (size_t k = 0; k < ARRAY_SIZE(newline_kinds); k++) {
			check_pieces(newline_kinds[k], s, n + 1, (size_t[]){ 401, n - 1, n + 1 }, 3);
			check_pieces(newline_kinds[k], s, n, (size_t[]){ 401, n }, 2);
		}
		s[n - 1] = '\r';
		check_pieces("qwen35", s, n + 1, (size_t[]){ n, n + 1 }, 2);
		s[0] = '!';
		check_pieces("qwen35", s, n + 1, (size_t[]){ 1, n, n + 1 }, 3);
	}
}

/*
 * Long pieces are merged through another queue than short ones. A letter without a token ends
 * what merges and vanishes, so a long piece of words with such a letter between gives what the
 * words give one by one.
 */
static void test_long_pieces(void **state)
{
	static const char unit[] = "abcd";
	struct vocabulary v = letters("gpt-2");
	_cleanup_(buf_done) struct buf text = { 0 };
	_cleanup_(tokens_done) struct tokens want = { 0 }, got = { 0 };
	uint32_t seed = 1;

	(void)state;
	/* Ranks are not in the order of making, so that both halves of the queue are used. */
	add_merge(&v, "ab ab", "abab");
	add_merge(&v, "aa a", "aaa");
	add_merge(&v, "a b", "ab");
	add_merge(&v, "abab c", "ababc");
	add_merge(&v, "a a", "aa");
	add_merge(&v, "b ab", "bab");
	add_merge(&v, "c d", "cd");
	add_merge(&v, "bab cd", "babcd");
	add_merge(&v, "d aaa", "daaa");
	add_merge(&v, "b b", "bb");

	_cleanup_(unmake) struct made m = make(&v);

	while (text.len < 300000) {
		char word[64];
		size_t n = 1 + seed % 60;

		for (size_t i = 0; i < n; i++) {
			seed = seed * 1664525 + 1013904223;
			word[i] = unit[seed >> 16 & (i % 7 ? 1 : 3)];
		}
		word[n] = 'z';
		assert_int_equal(tokenizer_encode(m.t, word, n, 0, NULL, &want), 0);
		assert_int_equal(buf_append(&text, word, n + 1), 0);
		seed = seed * 1664525 + 1013904223;
	}
	got = encode(m.t, text.data, text.len, 0);
	assert_int_equal(got.n, want.n);
	assert_memory_equal(got.ids, want.ids, want.n * sizeof(*want.ids));
}

/*
 * A megabyte of one kind each: no limit of the pattern is reached, nothing is lost. Quadratic
 * time would end the test.
 */
static void test_long_texts(void **state)
{
	static const char *const units[] = {
		" ",        "\n",
		"\r\n",     "\t \n",
		"a",        "7",
		"-",        "\xf0\x9f\x98\x80",
		"\xcc\x81", "\xe4\xb8\xad",
		"\xff",     "' ",
		"\xc2\xa0",
	};
	_cleanup_(unload) struct loaded l = load(BUNDLED);

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(units); i++) {
		_cleanup_(buf_done) struct buf text = { 0 };

		while (text.len < 1000000)
			assert_int_equal(buf_append(&text, units[i], strlen(units[i])), 0);

		_cleanup_(tokens_done) struct tokens ids = encode(l.t, text.data, text.len, 0);
		_cleanup_(buf_done) struct buf back = decode(l.t, &ids);

		if (units[i][0] == '\xff') {
			assert_int_equal(back.len, 3 * text.len);
			assert_memory_equal(back.data + back.len - 3, "\xef\xbf\xbd", 3);
		} else {
			assert_int_equal(back.len, text.len);
			assert_memory_equal(back.data, text.data, text.len);
		}
	}
}

/* The same for each rule: no limit of a pattern is reached by runs or by what alternates. */
static void test_long_splits(void **state)
{
	static const char *const names[] = { "gpt-2",        "qwen2",          "llama-bpe",
					     "starcoder",    "tekken",         "gpt-4o",
					     "deepseek-llm", "deepseek-coder", "deepseek-v3" };
	static const char *const starts[] = { "", "\xc3\xa9", "~", "\x01", " ", "\xe4\xb8\xad" };
	static const char *const units[] = { " ",
					     "\n",
					     "A",
					     "a",
					     "A\xc3\xa9",
					     "7",
					     "!",
					     "\x01",
					     "~ ",
					     "\xe3\x80\x80",
					     "\xe4\xb8\xad ",
					     "\xcc\x81" };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(names) * ARRAY_SIZE(starts) * ARRAY_SIZE(units); i++) {
		const char *unit = units[i % ARRAY_SIZE(units)];
		const char *start = starts[i / ARRAY_SIZE(units) % ARRAY_SIZE(starts)];
		const char *name = names[i / ARRAY_SIZE(units) / ARRAY_SIZE(starts)];
		_cleanup_(buf_done) struct buf text = { 0 };

		assert_int_equal(buf_append(&text, start, strlen(start)), 0);
		while (text.len < 60000)
			assert_int_equal(buf_append(&text, unit, strlen(unit)), 0);
		assert_int_equal(buf_append(&text, "x", 1), 0);
		assert_true(count_pieces(name, text.data, text.len) >= 1);
	}
}

#define FFFD "\xef\xbf\xbd"

static const struct {
	const char *in, *out;
	bool valid;
} utf8_cases[] = {
	{ "", "", true },
	{ "abc", "abc", true },
	{ "\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80", "\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80", true },
	{ "\xf4\x8f\xbf\xbf\xee\x80\x80\xed\x9f\xbf\xe0\xa0\x80\xf0\x90\x80\x80\xc2\x80",
	  "\xf4\x8f\xbf\xbf\xee\x80\x80\xed\x9f\xbf\xe0\xa0\x80\xf0\x90\x80\x80\xc2\x80", true },
	{ "\x80", FFFD, false },
	{ "\xff"
	  "a",
	  FFFD "a", false },
	{ "\xc0\x80", FFFD FFFD, false },
	{ "\xc3", FFFD, false },
	{ "\xc3(", FFFD "(", false },
	{ "\xe4\xb8", FFFD, false }, /* one for the maximal part */
	{ "\xe4\xb8"
	  "a",
	  FFFD "a", false },
	{ "\xe4\xb8\xe4\xb8\xad", FFFD "\xe4\xb8\xad", false },
	{ "\xf0\x9f\x98", FFFD, false },
	{ "\xed\xa0\x80", FFFD FFFD FFFD, false }, /* surrogate */
	{ "\xe0\x80\xaf", FFFD FFFD FFFD, false },
	{ "\xf0\x80\x80\xaf", FFFD FFFD FFFD FFFD, false },
	{ "\xf4\x91\x92\x93\xff"
	  "A\x80\xbf"
	  "B",
	  FFFD FFFD FFFD FFFD FFFD "A" FFFD FFFD "B", false },
	{ "\xf5\x80", FFFD FFFD, false },
	{ "\xe1\x80\xe2\xf0\x91\x92\xf1\xbf"
	  "A",
	  FFFD FFFD FFFD FFFD "A", false },
};

static void test_utf8_stream(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(utf8_cases); i++) {
		const char *in = utf8_cases[i].in;
		size_t len = strlen(in);

		for (size_t cut = 0; cut <= len; cut++) {
			_cleanup_(buf_done) struct buf out = { 0 };
			struct utf8_stream s = { 0 };

			assert_int_equal(utf8_push(&s, in, cut, &out), 0);
			assert_true(out.len == 0 || utf8_valid(out.data, out.len));
			assert_int_equal(utf8_push(&s, in + cut, len - cut, &out), 0);
			assert_int_equal(utf8_flush(&s, &out), 0);
			assert_int_equal(utf8_flush(&s, &out), 0);
			assert_string_equal(out.data ? out.data : "", utf8_cases[i].out);
		}
		assert_int_equal(utf8_valid(in, len), utf8_cases[i].valid);
	}
}

/* A replacement does not wait for more bytes than are needed to know. */
static void test_utf8_at_once(void **state)
{
	_cleanup_(buf_done) struct buf out = { 0 };
	struct utf8_stream s = { 0 };

	(void)state;
	assert_int_equal(utf8_push(&s, "\xed", 1, &out), 0);
	assert_int_equal(out.len, 0);
	assert_int_equal(utf8_push(&s, "\xa0", 1, &out), 0);
	assert_string_equal(out.data, FFFD FFFD);
	assert_int_equal(utf8_push(&s, "\xf0\x9f", 2, &out), 0);
	assert_int_equal(out.len, 6);
	assert_int_equal(utf8_push(&s, "\x98", 1, &out), 0);
	assert_int_equal(out.len, 6);
	assert_int_equal(utf8_push(&s, "\x80", 1, &out), 0);
	assert_string_equal(out.data, FFFD FFFD "\xf0\x9f\x98\x80");
	/* The wire has no NUL: an answer that held one could not be sent. */
	assert_false(utf8_valid("a\0b", 3));
	buf_consume(&out, out.len);
	assert_int_equal(utf8_push(&s, "a\0b", 3, &out), 0);
	assert_string_equal(out.data, "a" FFFD "b");
}

int main(void)
{
	static struct shared_case cases[] = {
		{ "qwen35", "qwen35" },
		{ "qwen2", "qwen2" },
		{ "gpt-2", "gpt-2" },
		{ "llama-bpe", "llama-bpe" },
		{ "starcoder", "starcoder" },
		{ "deepseek-llm", "deepseek-llm" },
		{ "deepseek-coder", "deepseek-coder" },
		{ "llama-spm", "llama-spm" },
		{ "phi-3", "phi-3" },
		{ "tekken", "qwen2" },
		{ "gpt-4o", "llama-bpe" },
		{ "deepseek-v3", "qwen2" },
	};
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_lines_bundled),
		{ "test_lines_qwen35", test_lines_shared, NULL, NULL, &cases[0] },
		{ "test_lines_qwen2", test_lines_shared, NULL, NULL, &cases[1] },
		{ "test_lines_gpt2", test_lines_shared, NULL, NULL, &cases[2] },
		{ "test_lines_llama_bpe", test_lines_shared, NULL, NULL, &cases[3] },
		{ "test_lines_starcoder", test_lines_shared, NULL, NULL, &cases[4] },
		{ "test_lines_deepseek_llm", test_lines_shared, NULL, NULL, &cases[5] },
		{ "test_lines_deepseek_coder", test_lines_shared, NULL, NULL, &cases[6] },
		{ "test_lines_llama_spm", test_lines_shared, NULL, NULL, &cases[7] },
		{ "test_lines_phi_3", test_lines_shared, NULL, NULL, &cases[8] },
		{ "test_lines_tekken", test_lines_changed, NULL, NULL, &cases[9] },
		{ "test_lines_gpt_4o", test_lines_changed, NULL, NULL, &cases[10] },
		{ "test_lines_deepseek_v3", test_lines_changed, NULL, NULL, &cases[11] },
		cmocka_unit_test(test_special_bundled),
		cmocka_unit_test(test_round_trip),
		cmocka_unit_test(test_encode_appends),
		cmocka_unit_test(test_merges),
		cmocka_unit_test(test_special_order),
		cmocka_unit_test(test_whole_pieces),
		cmocka_unit_test(test_end_of_generation),
		cmocka_unit_test(test_end_of_message),
		cmocka_unit_test(test_user_defined_text),
		cmocka_unit_test(test_spm_merges),
		cmocka_unit_test(test_spm_pieces),
		cmocka_unit_test(test_spm_bytes_by_text),
		cmocka_unit_test(test_spm_strip),
		cmocka_unit_test(test_spm_long),
		cmocka_unit_test(test_hostile_vocabularies),
		cmocka_unit_test(test_hostile_scores),
		cmocka_unit_test(test_hostile_arrays),
		cmocka_unit_test(test_keys_of_another_kind),
		cmocka_unit_test(test_odd_vocabulary),
		cmocka_unit_test(test_many_words),
		cmocka_unit_test(test_abort_midway),
		cmocka_unit_test(test_classes),
		cmocka_unit_test(test_space_runs),
		cmocka_unit_test(test_long_pieces),
		cmocka_unit_test(test_long_texts),
		cmocka_unit_test(test_long_splits),
		cmocka_unit_test(test_utf8_stream),
		cmocka_unit_test(test_utf8_at_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
