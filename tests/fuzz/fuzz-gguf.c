/* SPDX-License-Identifier: MIT */
/*
 * fuzz-gguf.c: any bytes as a GGUF file. What opens is used as a model would use it: the first and
 * last byte of every tensor and every element of the arrays are read, with a sanitizer watching.
 * What does not open must say why in one printable line.
 */
#include "daemon/model/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink; /* so that no read is optimised away */

static void read_array(const struct gguf *g, const char *key)
{
	const struct gguf_array *a = gguf_get_array(g, key);
	size_t n = a ? gguf_array_n(a) : 0, len;
	const char *s;
	int64_t v;
	float f;

	for (size_t i = 0; i < n; i++) {
		if (gguf_array_i64(a, i, &v) == 0)
			sink += (uint64_t)v;
		if (gguf_array_f32(a, i, &f) == 0)
			sink += f > 0;
		if (gguf_array_str(a, i, &s, &len) == 0 && len > 0)
			sink += (uint64_t)s[0] + (uint64_t)s[len - 1];
	}
	if (a && (gguf_array_i64(a, n, &v) == 0 || gguf_array_f32(a, n, &f) == 0 ||
		  gguf_array_str(a, n, &s, &len) == 0))
		abort();
}

static void read_keys(const struct gguf *g)
{
	static const char *const keys[] = {
		"u32", "i8", "f32", "yes", "name", "words", "types", "scores", "flags", "nested", "general.alignment"
	};
	const char *s;
	uint64_t u;
	size_t len;
	float f;
	bool b;

	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		read_array(g, keys[i]);
		if (gguf_get_u64(g, keys[i], &u) == 0)
			sink += u;
		if (gguf_get_f32(g, keys[i], &f) == 0)
			sink += f > 0;
		if (gguf_get_bool(g, keys[i], &b) == 0)
			sink += b;
		if (gguf_get_str(g, keys[i], &s, &len) == 0 && len > 0)
			sink += (uint64_t)s[0] + (uint64_t)s[len - 1];
	}
}

static void read_tensors(const struct gguf *g)
{
	const struct gguf_part *p = gguf_part(g, 0);

	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		const uint8_t *w = t->data;

		if (gguf_tensor(g, t->name) != t || !quant_info(t->type) || t->bytes == 0 ||
		    t->offset > p->bytes || t->bytes > p->bytes - t->offset)
			abort();
		sink += (uint64_t)w[0] + w[t->bytes - 1];
	}
}

static void check_text(const char *error)
{
	if (!error || !startswith(error, "image: "))
		abort();
	for (const char *c = error; *c; c++)
		if (*c < 0x20 || *c > 0x7e)
			abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(freep) char *error = NULL;
	_cleanup_(freep) void *copy = NULL;

	if (posix_memalign(&copy, 64, MAX(size, (size_t)1)) != 0)
		return 0;
	if (size > 0)
		memcpy(copy, data, size);
	if (gguf_open_memory(copy, size, "image", &g, &error) < 0) {
		check_text(error);
		return 0;
	}
	read_keys(g);
	read_tensors(g);
	return 0;
}
