/* SPDX-License-Identifier: MIT */
/* test-varlink.c: frames, hostile JSON, method calls, messages out, and typed reading of parameters. */
#include "tests/test.h"

#include "daemon/varlink.h"

#include <malloc.h>
#include <math.h>

#define METHOD "\"method\":\"org.residentd.Inference.Send\""

static void frame_grows_byte_by_byte(void **state)
{
	static const char data[] = "{\"a\":1}\0{}"; /* and the NUL of the literal */
	size_t scanned = 0, len = 99;

	(void)state;
	for (size_t n = 0; n <= 7; n++) {
		assert_int_equal(varlink_frame(data, n, 100, &scanned, &len), 0);
		assert_int_equal(scanned, n);
		assert_int_equal(len, 99);
	}
	assert_int_equal(varlink_frame(data, 8, 100, &scanned, &len), 1);
	assert_int_equal(len, 7);
	assert_int_equal(scanned, 0);
	assert_int_equal(varlink_frame(data + 8, sizeof(data) - 8, 100, &scanned, &len), 1);
	assert_int_equal(len, 2);
	assert_int_equal(varlink_frame(NULL, 0, 100, &scanned, &len), 0);
}

static void frame_of_no_bytes(void **state)
{
	size_t scanned = 0, len = 99;

	(void)state;
	assert_int_equal(varlink_frame("", 1, 100, &scanned, &len), 1);
	assert_int_equal(len, 0);
}

static void frame_at_the_limit(void **state)
{
	static const char data[] = "12345678\0";
	size_t scanned = 0, len = 99;

	(void)state;
	assert_int_equal(varlink_frame(data, 8, 8, &scanned, &len), 0);
	assert_int_equal(varlink_frame(data, 9, 8, &scanned, &len), 1);
	assert_int_equal(len, 8);
	len = 99;
	assert_int_equal(varlink_frame(data, 8, 7, &scanned, &len), -EMSGSIZE);
	assert_int_equal(varlink_frame(data, 9, 7, &scanned, &len), -EMSGSIZE);
	assert_int_equal(len, 99);
}

/* The hint is believed: a frame of 4 MiB in pieces of 4 KiB is looked through once, not 1000 times. */
static void frame_looks_at_each_byte_once(void **state)
{
	static const char data[] = "ab\0cdef\0";
	size_t scanned = 3, len = 99;

	(void)state;
	assert_int_equal(varlink_frame(data, 7, 100, &scanned, &len), 0);
	assert_int_equal(scanned, 7);
	assert_int_equal(varlink_frame(data, 8, 100, &scanned, &len), 1);
	assert_int_equal(len, 7);
	/* a hint from a longer buffer does no harm */
	scanned = 1000;
	assert_int_equal(varlink_frame(data, 2, 100, &scanned, &len), 0);
	assert_int_equal(scanned, 2);
}

static int parse_bytes_of(const char *data, size_t len, char **ret_error)
{
	/* a copy of just that size: a byte read too far is seen by the sanitizer */
	_cleanup_(freep) char *copy = malloc(len ? len : 1);
	json_auto_t *msg = NULL;
	int r;

	assert_non_null(copy);
	memcpy(copy, data, len);
	r = varlink_parse(copy, len, &msg, ret_error);
	assert_true(r == 0 ? json_is_object(msg) : !msg);
	return r;
}

static void assert_refused(const char *data, size_t len, const char *reason)
{
	_cleanup_(freep) char *error = NULL;

	assert_int_equal(parse_bytes_of(data, len, &error), -EBADMSG);
	assert_non_null(error);
	if (!strstr(error, reason))
		fail_msg("\"%s\" does not say \"%s\"", error, reason);
}

static void assert_parses(const char *text)
{
	_cleanup_(freep) char *error = NULL;

	if (parse_bytes_of(text, strlen(text), &error) < 0)
		fail_msg("%s: %s", text, error);
}

#define REFUSED(literal, reason) assert_refused(literal, sizeof(literal) - 1, reason)

static void parses_objects(void **state)
{
	(void)state;
	assert_parses("{}");
	assert_parses(" \t\r\n{ } ");
	assert_parses("{\"a\":[1,-2,3.5e3,-0,true,false,null,\"\\\"\\\\\\u00e9\\ud83d\\ude00\"]}");
	assert_parses("{\"a\":\"[[[[{{{{\\\"]]]]\"}");
	assert_parses("{\"a\":9223372036854775807,\"b\":-9223372036854775808,\"c\":1e-400}");
	assert_parses("{\"a\":\"\xf4\x8f\xbf\xbf\",\"\":1}");
}

static void refuses_what_is_no_object(void **state)
{
	(void)state;
	REFUSED("", "ends too early");
	REFUSED("   ", "ends too early");
	REFUSED("null", "invalid JSON");
	REFUSED("true", "invalid JSON");
	REFUSED("1", "invalid JSON");
	REFUSED("\"x\"", "invalid JSON");
	REFUSED("[]", "not an object");
	REFUSED("[{}]", "not an object");
}

static void refuses_bad_syntax(void **state)
{
	(void)state;
	REFUSED("{", "unmatched bracket at the end");
	REFUSED("}", "unmatched bracket at byte 0");
	REFUSED("{}}", "unmatched bracket at byte 2");
	REFUSED("{]", "invalid JSON");
	REFUSED("{} {}", "goes on after its end");
	REFUSED("{}x", "goes on after its end");
	REFUSED("{\"a\"}", "invalid JSON");
	REFUSED("{\"a\":}", "invalid JSON");
	REFUSED("{\"a\":1,}", "invalid JSON");
	REFUSED("{a:1}", "invalid JSON");
	REFUSED("{'a':1}", "invalid JSON");
	REFUSED("{1:1}", "invalid JSON");
	REFUSED("{\"a\":01}", "invalid JSON");
	REFUSED("{\"a\":+1}", "invalid JSON");
	REFUSED("{\"a\":.5}", "invalid JSON");
	REFUSED("{\"a\":NaN}", "invalid JSON");
	REFUSED("{\"a\":tru}", "invalid JSON");
	REFUSED("{\"a\":1 /* c */}", "invalid JSON");
	REFUSED("{\"a\":\"x", "no end");
	REFUSED("{\"a\":\"x\\\"}", "no end");
	REFUSED("{\"a\":\"x\\", "no end");
	REFUSED("{\"a\":\"\\x\"}", "invalid JSON");
	REFUSED("{\"a\":\"\\u12\"}", "invalid JSON");
	REFUSED("{\"a\":\"\n\"}", "invalid JSON");
	REFUSED("{\"a\":1}\0", "goes on after its end");
	REFUSED("\0{}", "at byte 1");
}

static void refuses_bad_strings(void **state)
{
	(void)state;
	REFUSED("{\"a\":\"\\u0000\"}", "NUL");
	REFUSED("{\"a\\u0000\":1}", "NUL");
	REFUSED("{\"a\":\"\0\"}", "invalid JSON");
	REFUSED("{\"a\":\"\xff\"}", "invalid UTF-8");
	REFUSED("{\"a\":\"\xc3\"}", "invalid UTF-8");
	REFUSED("{\"a\":\"\xc0\x80\"}", "invalid UTF-8");
	REFUSED("{\"a\":\"\xed\xa0\x80\"}", "invalid UTF-8");
	REFUSED("{\"a\":\"\xf4\x90\x80\x80\"}", "invalid UTF-8");
	REFUSED("{\"\xff\":1}", "invalid UTF-8");
	REFUSED("\xff", "invalid UTF-8");
	REFUSED("{\"a\":\"\\ud800\"}", "invalid JSON");
	REFUSED("{\"a\":\"\\udc00\"}", "invalid JSON");
	REFUSED("{\"a\":\"\\ud800\\u0041\"}", "invalid JSON");
	REFUSED("{\"a\":\"\\ud800x\"}", "invalid JSON");
}

static void refuses_duplicate_keys(void **state)
{
	(void)state;
	REFUSED("{\"a\":1,\"a\":1}", "the same key twice");
	REFUSED("{\"a\":1,\"\\u0061\":2}", "the same key twice");
	REFUSED("{\"x\":[{\"a\":1,\"b\":2,\"a\":3}]}", "the same key twice");
}

static void refuses_numbers_out_of_range(void **state)
{
	(void)state;
	REFUSED("{\"a\":1e400}", "number out of range");
	REFUSED("{\"a\":-1e400}", "number out of range");
	REFUSED("{\"a\":9223372036854775808}", "number out of range");
	REFUSED("{\"a\":-9223372036854775809}", "number out of range");
	REFUSED("{\"a\":999999999999999999999999999999999999999999}", "number out of range");
}

/* An error text may be logged, and what clients send must not be. */
static void errors_do_not_quote(void **state)
{
	static const char *const texts[] = { "{\"a\":\"secret\" secret}",
					     "{\"secret\":1,\"secret\":2}",
					     "[\"secret\"]",
					     "{\"method\":\"secret\"}",
					     "{\"method\":\"a.b.C\",\"more\":\"secret\"}",
					     "secret" };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
		_cleanup_(freep) char *error = NULL;
		struct varlink_call c;

		assert_int_equal(varlink_call_parse(texts[i], strlen(texts[i]), &c, &error), -EBADMSG);
		assert_null(strstr(error, "secret"));
	}
	/* who does not ask for the text gets none */
	assert_int_equal(varlink_parse("x", 1, &(json_t *){ NULL }, NULL), -EBADMSG);
}

static void nesting_is_bounded(void **state)
{
	char text[300];

	(void)state;
	for (int depth = 63; depth <= 66; depth++) {
		int n = snprintf(text, sizeof(text), "{\"a\":%.*s%.*s}", depth - 1,
				 "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
				 depth - 1,
				 "]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]");

		assert_int_equal(n, 6 + 2 * (depth - 1));
		if (depth <= VARLINK_NESTING_MAX)
			assert_parses(text);
		else
			assert_refused(text, (size_t)n, "nested deeper than 64");
	}
}

static size_t heap_bytes(void)
{
	struct mallinfo2 m = mallinfo2();

	return m.uordblks + m.hblkhd;
}

/* 16 MiB of a repeated piece: refused after 200000 values, before anything is allocated for them. */
static void values_are_bounded(void **state)
{
	static const struct {
		const char *piece, *reason;
	} cases[] = {
		{ "[],", "more than 200000 values" },       { "{},", "more than 200000 values" },
		{ "1,", "more than 200000 values" },        { "\"\",", "more than 200000 values" },
		{ "{\"\":0},", "more than 200000 values" }, { "[[", "nested deeper" },
		{ "\"", "more than 200000 values" },
	};
	const size_t len = 16 << 20;
	_cleanup_(freep) char *text = malloc(len);

	(void)state;
	assert_non_null(text);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		_cleanup_(freep) char *error = NULL;
		json_t *msg = NULL;
		size_t n = strlen(cases[i].piece), before;
		uint64_t begin;

		memcpy(text, "{\"a\":[", 6);
		for (size_t at = 6; at < len; at++)
			text[at] = cases[i].piece[(at - 6) % n];
		before = heap_bytes();
		begin = now_us();
		assert_int_equal(varlink_parse(text, len, &msg, &error), -EBADMSG);
		assert_true(now_us() - begin < 500000); /* takes 1 ms; the rest is for a loaded machine */
		assert_true(heap_bytes() - before < 4096);
		assert_non_null(strstr(error, cases[i].reason));
	}
}

/* Just within the bound, the costliest value for its length. */
static void values_at_the_limit(void **state)
{
	_cleanup_(buf_done) struct buf text = {};
	_cleanup_(freep) char *error = NULL;
	json_t *msg = NULL;
	size_t before;

	(void)state;
	assert_int_equal(buf_printf(&text, "{\"a\":["), 0);
	for (int i = 3; i < VARLINK_VALUES_MAX; i++)
		assert_int_equal(buf_append(&text, "{},", 3), 0);
	assert_int_equal(buf_append(&text, "{}]}", 4), 0);
	before = heap_bytes();
	assert_refused(text.data, text.len, "more than 200000");
	memset(strstr(text.data, "{},"), ' ', 3);
	assert_int_equal(varlink_parse(text.data, text.len, &msg, &error), 0);
	assert_int_equal(json_array_size(json_object_get(msg, "a")), VARLINK_VALUES_MAX - 3);
	assert_true(heap_bytes() - before < 128 << 20);
	json_decref(msg);
}

static int call(const char *text, struct varlink_call *ret)
{
	_cleanup_(freep) char *error = NULL;
	int r = varlink_call_parse(text, strlen(text), ret, &error);

	assert_true(r < 0 ? !!error : !error);
	return r;
}

static void call_is_read(void **state)
{
	struct varlink_call c;

	(void)state;
	assert_int_equal(call("{" METHOD ",\"parameters\":{\"session\":\"s1\"},\"more\":true}", &c), 0);
	assert_string_equal(c.method, "org.residentd.Inference.Send");
	assert_string_equal(c.interface, "org.residentd.Inference");
	assert_string_equal(c.member, "Send");
	assert_string_equal(json_string_value(json_object_get(c.parameters, "session")), "s1");
	assert_true(c.more);
	assert_false(c.oneway);
	assert_false(c.upgrade);
	varlink_call_done(&c);
	assert_null(c.msg);
	varlink_call_done(&c);
}

static void call_without_parameters(void **state)
{
	static const char *const texts[] = { "{" METHOD "}", "{" METHOD ",\"parameters\":null}",
					     "{" METHOD
					     ",\"parameters\":{},\"more\":false,\"oneway\":false}" };
	struct varlink_call c;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
		assert_int_equal(call(texts[i], &c), 0);
		assert_true(json_is_object(c.parameters));
		assert_int_equal(json_object_size(c.parameters), 0);
		assert_false(c.more || c.oneway || c.upgrade);
		varlink_call_done(&c);
	}
}

static void call_flags(void **state)
{
	static const char *const bad[] = {
		"{" METHOD ",\"more\":1}",
		"{" METHOD ",\"more\":\"true\"}",
		"{" METHOD ",\"more\":null}",
		"{" METHOD ",\"oneway\":0}",
		"{" METHOD ",\"oneway\":[]}",
		"{" METHOD ",\"upgrade\":{}}",
		"{" METHOD ",\"more\":true,\"oneway\":true}",
	};
	struct varlink_call c;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_int_equal(call(bad[i], &c), -EBADMSG);
	assert_int_equal(call("{" METHOD ",\"oneway\":true,\"upgrade\":true,\"other\":[1]}", &c), 0);
	assert_true(c.oneway && c.upgrade && !c.more);
	varlink_call_done(&c);
}

static void call_with_bad_envelope(void **state)
{
	static const char *const bad[] = {
		"{}",
		"{\"method\":null}",
		"{\"method\":1}",
		"{\"method\":[\"a.b.C\"]}",
		"{\"parameters\":{}}",
		"{" METHOD ",\"parameters\":[]}",
		"{" METHOD ",\"parameters\":\"x\"}",
		"{" METHOD ",\"parameters\":0}",
		"[" METHOD "]",
	};
	struct varlink_call c = { .member = "untouched" };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		assert_int_equal(call(bad[i], &c), -EBADMSG);
	assert_string_equal(c.member, "untouched");
}

static void call_method_names(void **state)
{
	static const struct {
		const char *name;
		bool valid;
	} cases[] = {
		{ "a.b.C", true },       { "org.varlink.service.GetInfo", true },
		{ "a-b.c--d.E1", true }, { "org.residentd.Inference.send", true },
		{ "a.1b.C", true },      { "", false },
		{ ".", false },          { "..", false },
		{ "Send", false },       { "a.Send", false },
		{ ".a.b.C", false },     { "a.b.C.", false },
		{ "a..b.C", false },     { "1a.b.C", false },
		{ "-a.b.C", false },     { "a-.b.C", false },
		{ "a.-b.C", false },     { "a.b-.C", false },
		{ "a.b.1C", false },     { "a.b.C-D", false },
		{ "a.b.C_D", false },    { "a.b c.D", false },
		{ "a.b.C ", false },     { "a.b.\xc3\x89", false },
		{ "a/b.c.D", false },    { "a.b.C\\n", false },
	};
	char text[512];
	struct varlink_call c;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		snprintf(text, sizeof(text), "{\"method\":\"%s\"}", cases[i].name);
		if (call(text, &c) != (cases[i].valid ? 0 : -EBADMSG))
			fail_msg("%s", text);
		if (cases[i].valid)
			varlink_call_done(&c);
	}
	for (int n = 255; n <= 256; n++) {
		snprintf(text, sizeof(text), "{\"method\":\"a.b.C%0*d\"}", n - 5, 0);
		assert_int_equal(call(text, &c), n == 255 ? 0 : -EBADMSG);
		if (n == 255)
			varlink_call_done(&c);
	}
}

static void assert_bytes(const struct buf *b, const char *expected, size_t len)
{
	assert_int_equal(b->len, len);
	assert_memory_equal(b->data, expected, len);
}

static void messages_are_compact_and_end_in_nul(void **state)
{
	static const char expected[] =
		"{\"parameters\":{\"text\":\"\xc3\xa9\\n\\u0001\"},\"continues\":true}\0"
		"{\"parameters\":{}}\0"
		"{\"error\":\"a.b.E\",\"parameters\":{\"number\":7}}\0"
		"{\"error\":\"a.b.E\",\"parameters\":{}}\0"
		"{\"method\":\"a.b.C\",\"parameters\":{},\"more\":true}\0"
		"{\"method\":\"a.b.C\",\"parameters\":{},\"oneway\":true}\0"
		"{\"method\":\"a.b.C\",\"parameters\":{\"number\":7}}";
	_cleanup_(buf_done) struct buf b = {};
	json_auto_t *text = json_pack("{s:s}", "text", "\xc3\xa9\n\x01"),
		    *number = json_pack("{s:i}", "number", 7);

	(void)state;
	assert_int_equal(varlink_put_reply(&b, text, true), 0);
	assert_int_equal(varlink_put_reply(&b, NULL, false), 0);
	assert_int_equal(varlink_put_error(&b, "a.b.E", number), 0);
	assert_int_equal(varlink_put_error(&b, "a.b.E", NULL), 0);
	assert_int_equal(varlink_put_call(&b, "a.b.C", NULL, true, false), 0);
	assert_int_equal(varlink_put_call(&b, "a.b.C", NULL, false, true), 0);
	assert_int_equal(varlink_put_call(&b, "a.b.C", number, false, false), 0);
	assert_bytes(&b, expected, sizeof(expected));
	assert_int_equal(text->refcount, 1);
	assert_int_equal(number->refcount, 1);
}

static void a_failed_message_leaves_nothing(void **state)
{
	_cleanup_(buf_done) struct buf b = {};
	json_auto_t *bad = json_pack("{s:s, s:o}", "a", "before", "b", json_string_nocheck("\xff"));

	(void)state;
	assert_int_equal(varlink_put_reply(&b, bad, false), -ENOMEM);
	assert_int_equal(b.len, 0);
	assert_int_equal(buf_append(&b, "x", 2), 0);
	assert_int_equal(varlink_put_reply(&b, bad, true), -ENOMEM);
	assert_int_equal(varlink_put_call(&b, "\xff", NULL, true, false), -ENOMEM);
	assert_int_equal(varlink_put_error(&b, "\xff", bad), -ENOMEM);
	assert_bytes(&b, "x", 2);
	assert_int_equal(bad->refcount, 1);
}

static void a_call_survives_the_way(void **state)
{
	_cleanup_(buf_done) struct buf b = {};
	json_auto_t *in = json_pack("{s:s, s:I, s:f}", "s", "\"\\/\x7f\xf0\x9f\x98\x80", "i",
				    (json_int_t)INT64_MIN, "f", 0.1);
	size_t scanned = 0, len = 0;
	struct varlink_call c;

	(void)state;
	assert_int_equal(varlink_put_call(&b, "a.b.C", in, true, false), 0);
	assert_int_equal(varlink_frame(b.data, b.len, 1000, &scanned, &len), 1);
	assert_int_equal(len, b.len - 1);
	assert_int_equal(varlink_call_parse(b.data, len, &c, NULL), 0);
	assert_true(json_equal(in, c.parameters));
	assert_true(c.more);
	varlink_call_done(&c);
}

static json_t *load(const char *text)
{
	json_t *v = json_loads(text, JSON_DECODE_ANY, NULL);

	assert_non_null(v);
	return v;
}

static void args_of_each_kind(void **state)
{
	json_auto_t *obj =
		load("{\"s\":\"abc\",\"b\":true,\"i\":-5,\"f\":0.5,\"n\":2,\"a\":[1,2],\"o\":{}}");
	json_t *a = NULL, *o = NULL;
	const char *s = NULL;
	double f = 0, n = 0;
	size_t len = 0;
	int64_t i = 0;
	bool b = false;
	struct args args;

	(void)state;
	args_begin(&args, obj);
	assert_true(args_str(&args, "s", true, 3, &s, &len));
	assert_true(args_bool(&args, "b", &b));
	assert_true(args_i64(&args, "i", true, -5, 5, &i));
	assert_true(args_f64(&args, "f", 0.5, 0.5, &f));
	assert_true(args_f64(&args, "n", 0, 2, &n));
	assert_true(args_array(&args, "a", true, 2, &a));
	assert_true(args_object(&args, "o", true, &o));
	assert_int_equal(args_end(&args), 0);
	assert_null(args.bad);
	assert_string_equal(s, "abc");
	assert_int_equal(len, 3);
	assert_true(b);
	assert_int_equal(i, -5);
	assert_true(f == 0.5 && n == 2);
	assert_int_equal(json_array_size(a), 2);
	assert_ptr_equal(o, json_object_get(obj, "o"));
}

static void args_absent_or_null(void **state)
{
	json_auto_t *obj = load("{\"s\":null,\"b\":null,\"i\":null,\"f\":null,\"a\":null,\"o\":null}");
	json_t *j = obj;
	const char *s = "kept";
	double f = 7;
	int64_t i = 7;
	bool b = true;
	struct args args;

	(void)state;
	for (int absent = 0; absent < 2; absent++) {
		if (absent)
			json_object_clear(obj);
		args_begin(&args, obj);
		assert_false(args_str(&args, "s", false, 3, &s, NULL));
		assert_false(args_bool(&args, "b", &b));
		assert_false(args_i64(&args, "i", false, 0, 1, &i));
		assert_false(args_f64(&args, "f", 0, 1, &f));
		assert_false(args_array(&args, "a", false, 1, &j));
		assert_false(args_object(&args, "o", false, &j));
		assert_int_equal(args_end(&args), 0);
	}
	assert_string_equal(s, "kept");
	assert_true(b && i == 7 && f == 7 && j == obj);
}

static void args_missing(void **state)
{
	json_auto_t *obj = load("{\"n\":null}");
	json_t *j;
	const char *s;
	int64_t i;
	struct args args;

	(void)state;
#define MISSING(call, key)                                   \
	do {                                                 \
		args_begin(&args, obj);                      \
		assert_false(call);                          \
		assert_int_equal(args_end(&args), -EINVAL);  \
		assert_string_equal(args.bad, key);          \
		assert_string_equal(args.why, "is missing"); \
	} while (0)
	MISSING(args_str(&args, "s", true, 3, &s, NULL), "s");
	MISSING(args_str(&args, "n", true, 3, &s, NULL), "n");
	MISSING(args_i64(&args, "n", true, 0, 1, &i), "n");
	MISSING(args_array(&args, "x", true, 1, &j), "x");
	MISSING(args_object(&args, "x", true, &j), "x");
#undef MISSING
}

/* Each of these values against each kind of field; a letter of `fits` names those that take it. */
static void args_of_wrong_type_or_range(void **state)
{
	static const struct {
		const char *value, *fits;
	} cases[] = {
		{ "\"\"", "s" },
		{ "\"abc\"", "s" },
		{ "\"abcd\"", "" },
		{ "\"\xc3\xa9\xc3\xa9\"", "" },
		{ "true", "b" },
		{ "false", "b" },
		{ "0", "if" },
		{ "-0", "if" },
		{ "10", "if" },
		{ "11", "" },
		{ "-1", "" },
		{ "9223372036854775807", "" },
		{ "-9223372036854775808", "" },
		{ "1.0", "f" },
		{ "1e1", "f" },
		{ "0.5", "f" },
		{ "10.000001", "" },
		{ "-1e-300", "" },
		{ "1e308", "" },
		{ "-1e308", "" },
		{ "[]", "a" },
		{ "[1,2]", "a" },
		{ "[1,2,3]", "" },
		{ "{}", "o" },
		{ "{\"x\":1}", "o" },
		{ "\"1\"", "s" },
	};

	(void)state;
	for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
		json_auto_t *value = load(cases[n].value), *obj = json_pack("{s:O}", "k", value);

		for (const char *kind = "sbifao"; *kind; kind++) {
			const char *s = NULL;
			bool b = false, got = false;
			json_t *j = NULL;
			int64_t i = 0;
			double f = 0;
			struct args a;

			args_begin(&a, obj);
			switch (*kind) {
			case 's': got = args_str(&a, "k", true, 3, &s, NULL); break;
			case 'b': got = args_bool(&a, "k", &b); break;
			case 'i': got = args_i64(&a, "k", true, 0, 10, &i); break;
			case 'f': got = args_f64(&a, "k", 0, 10, &f); break;
			case 'a': got = args_array(&a, "k", true, 2, &j); break;
			case 'o': got = args_object(&a, "k", true, &j); break;
			}
			if (got != !!strchr(cases[n].fits, *kind))
				fail_msg("%s as '%c'", cases[n].value, *kind);
			assert_int_equal(args_end(&a), got ? 0 : -EINVAL);
			if (!got)
				assert_string_equal(a.bad, "k");
		}
	}
}

static void args_at_the_ends_of_i64(void **state)
{
	json_auto_t *obj = load("{\"a\":9223372036854775807,\"b\":-9223372036854775808}");
	int64_t a = 0, b = 0;
	struct args args;

	(void)state;
	args_begin(&args, obj);
	assert_true(args_i64(&args, "a", true, INT64_MIN, INT64_MAX, &a));
	assert_true(args_i64(&args, "b", true, INT64_MIN, INT64_MAX, &b));
	assert_true(a == INT64_MAX && b == INT64_MIN);
	assert_int_equal(args_end(&args), 0);
}

static void args_not_finite(void **state)
{
	json_auto_t *obj = load("{\"a\":1.5}");
	double d = 7;
	struct args args;

	(void)state;
	/* neither JSON text nor jansson gives an infinity or NaN */
	assert_int_equal(json_real_set(json_object_get(obj, "a"), 1e308 * 10), -1);
	args_begin(&args, obj);
	assert_true(args_f64(&args, "a", -INFINITY, INFINITY, &d));
	assert_true(d == 1.5);
}

static void args_first_problem_stays(void **state)
{
	json_auto_t *obj = load("{\"a\":1,\"b\":2,\"zz\":3}");
	const char *s = NULL;
	int64_t i = 7;
	struct args args;

	(void)state;
	args_begin(&args, obj);
	assert_false(args_str(&args, "a", true, 10, &s, NULL));
	assert_false(args_i64(&args, "b", true, 0, 10, &i));
	args_refuse(&args, "b", "is odd");
	assert_int_equal(args_end(&args), -EINVAL);
	assert_string_equal(args.bad, "a");
	assert_string_equal(args.why, "is not a string");
	assert_int_equal(i, 7);
}

static void args_unknown(void **state)
{
	json_auto_t *obj = load("{\"max_tokens\":1,\"max_token\":2}");
	int64_t i = 0;
	struct args args;

	(void)state;
	args_begin(&args, obj);
	assert_true(args_i64(&args, "max_tokens", false, 0, 10, &i));
	assert_int_equal(args_end(&args), -EINVAL);
	assert_string_equal(args.bad, "max_token");
	assert_string_equal(args.why, "is unknown");
}

static void args_refused_by_the_caller(void **state)
{
	json_auto_t *obj = load("{}");
	struct args args;

	(void)state;
	args_begin(&args, obj);
	args_refuse(&args, "seed", "is odd");
	assert_int_equal(args_end(&args), -EINVAL);
	assert_string_equal(args.bad, "seed");
	assert_string_equal(args.why, "is odd");
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(frame_grows_byte_by_byte),
		cmocka_unit_test(frame_of_no_bytes),
		cmocka_unit_test(frame_at_the_limit),
		cmocka_unit_test(frame_looks_at_each_byte_once),
		cmocka_unit_test(parses_objects),
		cmocka_unit_test(refuses_what_is_no_object),
		cmocka_unit_test(refuses_bad_syntax),
		cmocka_unit_test(refuses_bad_strings),
		cmocka_unit_test(refuses_duplicate_keys),
		cmocka_unit_test(refuses_numbers_out_of_range),
		cmocka_unit_test(errors_do_not_quote),
		cmocka_unit_test(nesting_is_bounded),
		cmocka_unit_test(values_are_bounded),
		cmocka_unit_test(values_at_the_limit),
		cmocka_unit_test(call_is_read),
		cmocka_unit_test(call_without_parameters),
		cmocka_unit_test(call_flags),
		cmocka_unit_test(call_with_bad_envelope),
		cmocka_unit_test(call_method_names),
		cmocka_unit_test(messages_are_compact_and_end_in_nul),
		cmocka_unit_test(a_failed_message_leaves_nothing),
		cmocka_unit_test(a_call_survives_the_way),
		cmocka_unit_test(args_of_each_kind),
		cmocka_unit_test(args_absent_or_null),
		cmocka_unit_test(args_missing),
		cmocka_unit_test(args_of_wrong_type_or_range),
		cmocka_unit_test(args_at_the_ends_of_i64),
		cmocka_unit_test(args_not_finite),
		cmocka_unit_test(args_first_problem_stays),
		cmocka_unit_test(args_unknown),
		cmocka_unit_test(args_refused_by_the_caller),
	};

	return cmocka_run_group_tests_name("varlink", tests, NULL, NULL);
}
