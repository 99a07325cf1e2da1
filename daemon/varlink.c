/* SPDX-License-Identifier: MIT */
/*
 * varlink.c: cuts, checks, reads and writes the JSON messages of the socket. See varlink.h.
 *
 * Owns nothing between calls; any thread. Refuses to know what a method means, and never repeats
 * what a peer sent in an error text, because such a text may end up in a log: it names positions.
 * Invariant: jansson sees no byte that scan() has not counted, so the memory of a parse is bounded
 * by VARLINK_VALUES_MAX and the length of the message.
 */
#include "daemon/varlink.h"

#include <assert.h>
#include <math.h>

#define METHOD_LEN_MAX 255

int varlink_frame(const char *data, size_t len, size_t max, size_t *scanned, size_t *ret_len)
{
	size_t from = MIN(*scanned, len), end = MIN(len, max);
	const char *nul;

	if (end < len)
		end++; /* the NUL behind a frame of just max bytes */
	nul = end > from ? memchr(data + from, 0, end - from) : NULL;
	if (nul) {
		*scanned = 0;
		*ret_len = (size_t)(nul - data);
		return 1;
	}
	if (len > max)
		return -EMSGSIZE;
	*scanned = len;
	return 0;
}

/* The index of the quote that ends the string whose text starts at i, or len. */
static size_t string_end(const char *data, size_t len, size_t i)
{
	for (; i < len && data[i] != '"'; i++)
		if (data[i] == '\\')
			i++;
	return MIN(i, len);
}

/* Counts what jansson would allocate for. It need not reject all bad JSON, jansson does. */
static int scan(const char *data, size_t len, char **ret_error)
{
	size_t values = 0, depth = 0;
	bool in_word = false; /* in a number, true, false or null */

	for (size_t i = 0; i < len; i++) {
		bool word = false;

		switch (data[i]) {
		case '"':
			values++;
			i = string_end(data, len, i + 1);
			if (i == len)
				return fail(ret_error, -EBADMSG, "a string has no end");
			break;
		case '[':
		case '{':
			values++;
			if (++depth > VARLINK_NESTING_MAX)
				return fail(ret_error, -EBADMSG, "nested deeper than %d at byte %zu",
					    VARLINK_NESTING_MAX, i);
			break;
		case ']':
		case '}':
			if (depth == 0)
				return fail(ret_error, -EBADMSG, "unmatched bracket at byte %zu", i);
			depth--;
			break;
		case ',':
		case ':':
		case ' ':
		case '\t':
		case '\r':
		case '\n': break;
		default:
			word = true;
			if (!in_word)
				values++;
		}
		in_word = word;
		if (values > VARLINK_VALUES_MAX)
			return fail(ret_error, -EBADMSG, "more than %d values", VARLINK_VALUES_MAX);
	}
	if (depth > 0)
		return fail(ret_error, -EBADMSG, "unmatched bracket at the end");
	return 0;
}

/* jansson's own text quotes the message. */
static const char *json_error_name(enum json_error_code code)
{
	switch (code) {
	case json_error_premature_end_of_input: return "ends too early";
	case json_error_end_of_input_expected: return "goes on after its end";
	case json_error_invalid_utf8: return "invalid UTF-8";
	case json_error_null_byte_in_key:
	case json_error_null_character: return "a NUL in a string";
	case json_error_duplicate_key: return "the same key twice";
	case json_error_numeric_overflow: return "number out of range";
	case json_error_stack_overflow: return "nested too deep";
	default: /* an enum of jansson, which may grow */ return "invalid JSON";
	}
}

int varlink_parse(const char *data, size_t len, json_t **ret, char **ret_error)
{
	json_auto_t *msg = NULL;
	json_error_t e;
	int r;

	r = scan(data, len, ret_error);
	if (r < 0)
		return r;
	msg = json_loadb(data, len, JSON_REJECT_DUPLICATES, &e);
	if (!msg) {
		if (e.text[0] == 0 || json_error_code(&e) == json_error_out_of_memory)
			return fail(ret_error, -ENOMEM, "out of memory");
		return fail(ret_error, -EBADMSG, "%s at byte %d",
			    json_error_name(json_error_code(&e)), e.position);
	}
	if (!json_is_object(msg))
		return fail(ret_error, -EBADMSG, "not an object");
	*ret = TAKE_PTR(msg);
	return 0;
}

static bool is_alpha(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_alnum(char c)
{
	return is_alpha(c) || (c >= '0' && c <= '9');
}

/*
 * An interface is two or more parts of letters, digits and inner hyphens, starting with a letter.
 * Varlink wants a capital at the start of a member; that is left to the lookup, so that
 * "…Inference.send" is answered with MethodNotFound.
 */
static bool method_valid(const char *name, const char *member)
{
	size_t dots = 0;

	if (!is_alpha(name[0]) || !is_alpha(member[0]))
		return false;
	for (const char *p = name; p < member; p++) {
		if (*p == '.') {
			if (!is_alnum(p[-1]) || !is_alnum(p[1]))
				return false;
			dots++;
		} else if (!is_alnum(*p) && *p != '-') {
			return false;
		}
	}
	for (const char *p = member; *p; p++)
		if (!is_alnum(*p))
			return false;
	return dots > 1;
}

static int call_flag(const json_t *msg, const char *key, bool *flag, char **ret_error)
{
	const json_t *v = json_object_get(msg, key);

	if (v && !json_is_boolean(v))
		return fail(ret_error, -EBADMSG, "'%s' is not a boolean", key);
	*flag = json_is_true(v);
	return 0;
}

static int call_read(struct varlink_call *c, char **ret_error)
{
	const json_t *method = json_object_get(c->msg, "method");
	json_t *parameters = json_object_get(c->msg, "parameters");
	const char *dot;
	int r;

	c->method = json_string_value(method);
	if (!c->method)
		return fail(ret_error, -EBADMSG, "'method' is missing or not a string");
	dot = strrchr(c->method, '.');
	if (!dot || json_string_length(method) > METHOD_LEN_MAX || !method_valid(c->method, dot + 1))
		return fail(ret_error, -EBADMSG, "'method' is not a method's name");
	c->member = dot + 1;
	c->interface = strndup(c->method, (size_t)(dot - c->method));
	if (!c->interface)
		return fail(ret_error, -ENOMEM, "out of memory");

	if (!parameters || json_is_null(parameters)) {
		parameters = json_object();
		if (json_object_set_new(c->msg, "parameters", parameters) < 0)
			return fail(ret_error, -ENOMEM, "out of memory");
	}
	if (!json_is_object(parameters))
		return fail(ret_error, -EBADMSG, "'parameters' is not an object");
	c->parameters = parameters;

	r = call_flag(c->msg, "more", &c->more, ret_error);
	if (r == 0)
		r = call_flag(c->msg, "oneway", &c->oneway, ret_error);
	if (r == 0)
		r = call_flag(c->msg, "upgrade", &c->upgrade, ret_error);
	if (r == 0 && c->more && c->oneway)
		r = fail(ret_error, -EBADMSG, "'more' and 'oneway' exclude each other");
	return r;
}

/* Other keys of the envelope are ignored: they are the protocol's to add, unlike those of parameters,
 * which are ours and change what is asked for. */
int varlink_call_parse(const char *data, size_t len, struct varlink_call *ret, char **ret_error)
{
	struct varlink_call c = {};
	int r;

	r = varlink_parse(data, len, &c.msg, ret_error);
	if (r == 0)
		r = call_read(&c, ret_error);
	if (r < 0) {
		varlink_call_done(&c);
		return r;
	}
	*ret = c;
	return 0;
}

void varlink_call_done(struct varlink_call *c)
{
	free((char *)c->interface);
	json_decref(c->msg);
	*c = (struct varlink_call){};
}

static int dump_chunk(const char *data, size_t len, void *out)
{
	return buf_append(out, data, len);
}

/* Takes msg, which may be NULL. jansson does not say why it fails; what its checked constructors
 * built fails for memory only. */
static int put(struct buf *out, json_t *msg)
{
	size_t before = out->len;
	int r = msg ? json_dump_callback(msg, dump_chunk, out, JSON_COMPACT) : -1;

	json_decref(msg);
	if (r == 0)
		r = buf_append(out, "", 1);
	if (r == 0)
		return 0;
	out->len = before;
	if (out->data)
		out->data[before] = 0;
	return -ENOMEM;
}

/* A new reference; what json_pack() gets as "o". */
static json_t *parameters_ref(json_t *parameters)
{
	return parameters ? json_incref(parameters) : json_object();
}

int varlink_put_reply(struct buf *out, json_t *parameters, bool continues)
{
	json_t *p = parameters_ref(parameters);

	return put(out, continues ? json_pack("{s:o, s:b}", "parameters", p, "continues", 1)
				  : json_pack("{s:o}", "parameters", p));
}

int varlink_put_error(struct buf *out, const char *error, json_t *parameters)
{
	return put(out,
		   json_pack("{s:s, s:o}", "error", error, "parameters", parameters_ref(parameters)));
}

int varlink_put_call(struct buf *out, const char *method, json_t *parameters, bool more, bool oneway)
{
	json_t *msg =
		json_pack("{s:s, s:o}", "method", method, "parameters", parameters_ref(parameters));

	if ((more && json_object_set_new(msg, "more", json_true()) < 0) ||
	    (oneway && json_object_set_new(msg, "oneway", json_true()) < 0)) {
		json_decref(msg);
		msg = NULL;
	}
	return put(out, msg);
}

void args_begin(struct args *a, json_t *obj)
{
	*a = (struct args){ .obj = obj };
}

void args_refuse(struct args *a, const char *key, const char *why)
{
	if (a->bad)
		return;
	a->bad = key;
	a->why = why;
}

/* The value of a field, now known; NULL when absent, or when an earlier field was bad. */
static json_t *args_get(struct args *a, const char *key, bool required)
{
	json_t *v;

	if (a->bad)
		return NULL;
	assert(a->n_seen < ARRAY_SIZE(a->seen));
	a->seen[a->n_seen++] = key;
	v = json_object_get(a->obj, key);
	if (v && !json_is_null(v))
		return v;
	if (required)
		args_refuse(a, key, "is missing");
	return NULL;
}

bool args_str(struct args *a, const char *key, bool required, size_t max_len, const char **ret,
	      size_t *ret_len)
{
	const json_t *v = args_get(a, key, required);

	if (!v)
		return false;
	if (!json_is_string(v)) {
		args_refuse(a, key, "is not a string");
		return false;
	}
	if (json_string_length(v) > max_len) {
		args_refuse(a, key, "is too long");
		return false;
	}
	*ret = json_string_value(v);
	if (ret_len)
		*ret_len = json_string_length(v);
	return true;
}

bool args_bool(struct args *a, const char *key, bool *ret)
{
	const json_t *v = args_get(a, key, false);

	if (!v)
		return false;
	if (!json_is_boolean(v)) {
		args_refuse(a, key, "is not a boolean");
		return false;
	}
	*ret = json_is_true(v);
	return true;
}

bool args_i64(struct args *a, const char *key, bool required, int64_t min, int64_t max, int64_t *ret)
{
	const json_t *v = args_get(a, key, required);
	json_int_t i;

	if (!v)
		return false;
	if (!json_is_integer(v)) {
		args_refuse(a, key, "is not an integer");
		return false;
	}
	i = json_integer_value(v);
	if (i < min || i > max) {
		args_refuse(a, key, "is out of range");
		return false;
	}
	*ret = i;
	return true;
}

bool args_f64(struct args *a, const char *key, double min, double max, double *ret)
{
	const json_t *v = args_get(a, key, false);
	double d;

	if (!v)
		return false;
	if (!json_is_number(v)) {
		args_refuse(a, key, "is not a number");
		return false;
	}
	d = json_number_value(v);
	if (!isfinite(d) || d < min || d > max) {
		args_refuse(a, key, "is out of range");
		return false;
	}
	*ret = d;
	return true;
}

bool args_array(struct args *a, const char *key, bool required, size_t max_items, json_t **ret)
{
	json_t *v = args_get(a, key, required);

	if (!v)
		return false;
	if (!json_is_array(v)) {
		args_refuse(a, key, "is not an array");
		return false;
	}
	if (json_array_size(v) > max_items) {
		args_refuse(a, key, "has too many items");
		return false;
	}
	*ret = v;
	return true;
}

bool args_object(struct args *a, const char *key, bool required, json_t **ret)
{
	json_t *v = args_get(a, key, required);

	if (!v)
		return false;
	if (!json_is_object(v)) {
		args_refuse(a, key, "is not an object");
		return false;
	}
	*ret = v;
	return true;
}

static bool args_known(const struct args *a, const char *key)
{
	for (size_t i = 0; i < a->n_seen; i++)
		if (streq(a->seen[i], key))
			return true;
	return false;
}

int args_end(struct args *a)
{
	const char *key;
	json_t *v;

	if (!a->bad) {
		json_object_foreach(a->obj, key, v) {
			if (!args_known(a, key)) {
				args_refuse(a, key, "is unknown");
				break;
			}
		}
	}
	return a->bad ? -EINVAL : 0;
}
