/* SPDX-License-Identifier: MIT */
/*
 * fuzz-wire.c: bytes as a client sends them: frames, calls, and parameters read as those of Chat.
 *
 * Beyond not crashing: a frame found piecewise is the frame found at once, and what was understood
 * means the same after it was written and read again.
 */
#include "daemon/varlink.h"

#include <assert.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FRAME_MAX 4096

static void read_options(json_t *obj)
{
	const char *s = NULL;
	int64_t i = 0;
	double d = 0;
	json_t *j = NULL;
	struct args a;

	args_begin(&a, obj);
	if (args_i64(&a, "max_tokens", false, 1, 1 << 24, &i))
		assert(i >= 1 && i <= 1 << 24);
	args_i64(&a, "seed", false, INT64_MIN, INT64_MAX, &i);
	if (args_f64(&a, "temperature", 0, 100, &d))
		assert(d >= 0 && d <= 100);
	if (args_array(&a, "stop", false, 16, &j))
		assert(json_is_array(j) && json_array_size(j) <= 16);
	if (args_object(&a, "logit_bias", false, &j))
		assert(json_is_object(j));
	args_str(&a, "session", false, 64, &s, NULL);
	assert(args_end(&a) == (a.bad ? -EINVAL : 0));
	assert(!a.bad == !a.why);
}

static void read_message(json_t *obj)
{
	const char *role = NULL, *content = NULL;
	size_t len = 0;
	struct args a;

	args_begin(&a, obj);
	if (args_str(&a, "role", true, 16, &role, &len))
		assert(len <= 16 && strlen(role) == len);
	if (args_str(&a, "content", true, 1 << 20, &content, &len))
		assert(strlen(content) == len); /* no NUL came through */
	args_str(&a, "reasoning", false, 1 << 20, &content, &len);
	args_end(&a);
}

static void read_parameters(json_t *parameters)
{
	json_t *messages = NULL, *options = NULL, *m;
	bool keep = false;
	struct args a;
	size_t i;

	args_begin(&a, parameters);
	args_bool(&a, "keep", &keep);
	if (args_array(&a, "messages", true, 1000, &messages))
		json_array_foreach(messages, i, m)
			read_message(m);
	if (args_object(&a, "options", false, &options))
		read_options(options);
	args_end(&a);
}

static void read_call(const char *frame, size_t len)
{
	_cleanup_(freep) char *error = NULL;
	_cleanup_(buf_done) struct buf out = {};
	struct varlink_call c, again;
	size_t scanned = 0, again_len;

	if (varlink_call_parse(frame, len, &c, &error) < 0) {
		assert(error);
		return;
	}
	read_parameters(c.parameters);
	assert(varlink_put_call(&out, c.method, c.parameters, c.more, c.oneway) == 0);
	assert(varlink_frame(out.data, out.len, SIZE_MAX, &scanned, &again_len) == 1);
	assert(again_len == out.len - 1);
	assert(varlink_call_parse(out.data, again_len, &again, NULL) == 0);
	assert(json_equal(c.parameters, again.parameters));
	assert(streq(c.method, again.method) && streq(c.interface, again.interface));
	assert(c.more == again.more && c.oneway == again.oneway);
	varlink_call_done(&again);
	varlink_call_done(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *p = (const char *)data, *end = p + size;
	size_t len, piece_len, scanned, n;
	int r, piece_r;

	/* what follows the last NUL is read as a frame too: seeds then need none */
	while (p < end) {
		size_t left = (size_t)(end - p);

		scanned = 0;
		r = varlink_frame(p, left, FRAME_MAX, &scanned, &len);
		scanned = 0;
		for (n = 0, piece_r = 0; piece_r == 0 && n < left;) {
			n = MIN(n + 1 + left / 7, left);
			piece_r = varlink_frame(p, n, FRAME_MAX, &scanned, &piece_len);
		}
		assert(r == piece_r);
		if (r == 1)
			assert(len == piece_len);
		else if (r == 0)
			len = left;
		else
			return 0;
		read_call(p, len);
		p += MIN(len + 1, left);
	}
	return 0;
}
