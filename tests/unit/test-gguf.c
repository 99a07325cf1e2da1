/* SPDX-License-Identifier: MIT */
/*
 * test-gguf.c: the GGUF reader and the table of tensor types.
 *
 * Files are built in memory byte by byte (gguf-build.h). Each published attack on GGUF readers that
 * we know of has a test that cites it; every refusal must be one printable line that names the file
 * and the object.
 */
#include "tests/test.h"

#include "daemon/model/gguf.h"
#include "tests/unit/gguf-build.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>

static const uint64_t ne_4x2[] = { 4, 2 };
static const float eight[] = { 1, 2, 3, 4, 5, 6, 7, 8 };

struct image {
	void *data;
	struct gguf *g;
};

static void image_done(struct image *m)
{
	gguf_close(m->g);
	free(m->data);
}

static struct image must_open(struct gguf_build *b)
{
	_cleanup_(freep) char *error = NULL;
	struct image m = {};
	size_t bytes;

	m.data = gguf_build_done(b, &bytes);
	if (gguf_open_memory(m.data, bytes, "image", &m.g, &error) != 0)
		fail_msg("%s", error ? error : "no error text");
	assert_non_null(m.g);
	assert_null(error);
	return m;
}

static void check_text(const char *error, const char *want)
{
	assert_non_null(error);
	for (const char *c = error; *c; c++)
		assert_true(isprint((unsigned char)*c));
	if (!strstr(error, want))
		fail_msg("error is \"%s\", should contain \"%s\"", error, want);
}

/* The image must be refused as malformed, with want in the text after the label. */
static void refuse_image(const void *data, size_t bytes, const char *want)
{
	struct gguf *const untouched = (struct gguf *)&untouched;
	struct gguf *g = untouched;
	_cleanup_(freep) char *error = NULL;
	int r = gguf_open_memory(data, bytes, "image", &g, &error);

	if (r == 0)
		fail_msg("opened, should say \"%s\"", want);
	assert_int_equal(r, -EBADMSG);
	assert_ptr_equal(g, untouched);
	check_text(error, want);
	assert_true(startswith(error, "image: "));
	/* A caller that wants no text. */
	assert_int_equal(gguf_open_memory(data, bytes, "image", &g, NULL), -EBADMSG);
}

static void refuse(struct gguf_build *b, const char *want)
{
	size_t bytes;
	_cleanup_(freep) void *data = gguf_build_done(b, &bytes);

	refuse_image(data, bytes, want);
}

static void refuse_path(const char *path, int err, const char *want)
{
	_cleanup_(freep) char *error = NULL;
	struct gguf *g = NULL;

	assert_int_equal(gguf_open(path, &g, &error), err);
	assert_null(g);
	check_text(error, want);
}

/* A small file with every kind of key and two tensors. */
static struct gguf_build sample(void)
{
	static const char *const words[] = { "a", "", "ccc" };
	static const int32_t types[] = { 1, -3, 6 };
	static const float scores[] = { 0.5F, -1, 0 };
	static const uint64_t ne_32x1x3[] = { 32, 1, 3 };
	static const char blocks[3 * 34];
	struct gguf_build b = gguf_build_new();

	gguf_build_raw(&b, "u8", GGUF_U8, "\xff", 1);
	gguf_build_raw(&b, "i8", GGUF_I8, "\xff", 1);
	gguf_build_raw(&b, "u16", GGUF_U16, "\x34\x12", 2);
	gguf_build_raw(&b, "i16", GGUF_I16, "\x34\x12", 2);
	gguf_build_u32(&b, "u32", 0xfffffffe);
	gguf_build_raw(&b, "i32", GGUF_I32, "\xfe\xff\xff\xff", 4);
	gguf_build_f32(&b, "f32", 1.5F);
	gguf_build_bool(&b, "yes", true);
	gguf_build_bool(&b, "no", false);
	gguf_build_str(&b, "general.architecture", "test");
	gguf_build_str(&b, "empty", "");
	gguf_build_raw(&b, "u64", GGUF_U64, "\x00\x00\x00\x00\x01\x00\x00\x00", 8);
	gguf_build_raw(&b, "i64", GGUF_I64, "\x05\x00\x00\x00\x00\x00\x00\x00", 8);
	gguf_build_raw(&b, "f64", GGUF_F64, "\x00\x00\x00\x00\x00\x00\xe0\xbf", 8);
	gguf_build_strs(&b, "words", words, 3);
	gguf_build_i32s(&b, "types", types, 3);
	gguf_build_f32s(&b, "scores", scores, 3);
	gguf_build_array(&b, "flags", GGUF_BOOL, 2);
	gguf_put(&b.kv, "\x01\x00", 2);
	gguf_build_array(&b, "none", GGUF_U8, 0);
	gguf_build_array(&b, "nested", GGUF_ARRAY, 2);
	for (int i = 0; i < 2; i++) {
		gguf_put_u32(&b.kv, GGUF_STR);
		gguf_put_u64(&b.kv, 1);
		gguf_put_str(&b.kv, "deep");
	}
	gguf_build_tensor(&b, "w", QUANT_F32, 2, ne_4x2, eight, sizeof(eight));
	gguf_build_tensor(&b, "q", QUANT_Q8_0, 3, ne_32x1x3, blocks, sizeof(blocks));
	return b;
}

static void test_quant_types(void **state)
{
	static const struct {
		uint32_t type;
		const char *name;
		uint32_t elems, bytes;
		bool kernel;
	} known[] = {
		{ 0, "F32", 1, 4, true },         { 1, "F16", 1, 2, true },
		{ 2, "Q4_0", 32, 18, true },      { 3, "Q4_1", 32, 20, true },
		{ 6, "Q5_0", 32, 22, true },      { 7, "Q5_1", 32, 24, true },
		{ 8, "Q8_0", 32, 34, true },      { 9, "Q8_1", 32, 36, false },
		{ 10, "Q2_K", 256, 84, true },    { 11, "Q3_K", 256, 110, true },
		{ 12, "Q4_K", 256, 144, true },   { 13, "Q5_K", 256, 176, true },
		{ 14, "Q6_K", 256, 210, true },   { 15, "Q8_K", 256, 292, false },
		{ 16, "IQ2_XXS", 256, 66, true }, { 17, "IQ2_XS", 256, 74, true },
		{ 18, "IQ3_XXS", 256, 98, true }, { 19, "IQ1_S", 256, 50, false },
		{ 20, "IQ4_NL", 32, 18, true },   { 21, "IQ3_S", 256, 110, false },
		{ 22, "IQ2_S", 256, 82, false },  { 23, "IQ4_XS", 256, 136, true },
		{ 24, "I8", 1, 1, false },        { 25, "I16", 1, 2, false },
		{ 26, "I32", 1, 4, false },       { 27, "I64", 1, 8, false },
		{ 28, "F64", 1, 8, false },       { 29, "IQ1_M", 256, 56, false },
		{ 30, "BF16", 1, 2, true },       { 34, "TQ1_0", 256, 54, false },
		{ 35, "TQ2_0", 256, 66, false },  { 39, "MXFP4", 32, 17, true },
		{ 40, "NVFP4", 64, 36, false },   { 41, "Q1_0", 128, 18, false },
		{ 42, "Q2_0", 64, 18, false },
	};
	size_t n = 0;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(known); i++) {
		const struct quant_info *info = quant_info(known[i].type);

		assert_non_null(info);
		assert_string_equal(info->name, known[i].name);
		assert_int_equal(info->block_elems, known[i].elems);
		assert_int_equal(info->block_bytes, known[i].bytes);
		assert_int_equal(quant_has_kernel(known[i].type), known[i].kernel);
	}
	for (uint32_t type = 0; type < 256; type++)
		n += quant_info(type) != NULL;
	assert_int_equal(n, ARRAY_SIZE(known));
	assert_null(quant_info(UINT32_MAX));
	assert_false(quant_has_kernel(4));
	assert_false(quant_has_kernel(UINT32_MAX));
}

static void test_quant_row_bytes(void **state)
{
	(void)state;
	assert_int_equal(quant_row_bytes(QUANT_F32, 3), 12);
	assert_int_equal(quant_row_bytes(QUANT_Q4_K, 512), 288);
	assert_int_equal(quant_row_bytes(QUANT_Q4_K, 0), 0);
	assert_int_equal(quant_row_bytes(QUANT_Q4_K, 255), 0);
	assert_int_equal(quant_row_bytes(4, 32), 0);
	assert_int_equal(quant_row_bytes(QUANT_F32, SIZE_MAX / 4), SIZE_MAX / 4 * 4);
	assert_int_equal(quant_row_bytes(QUANT_F32, SIZE_MAX / 4 + 1), 0);
	/* (2^64 - 32) / 32 * 34 wraps */
	assert_int_equal(quant_row_bytes(QUANT_Q8_0, SIZE_MAX - 31), 0);
}

static void test_scalars(void **state)
{
	struct gguf_build b = sample();
	struct image m = must_open(&b);
	uint64_t u64 = 77;
	uint32_t u32 = 77;
	float f = 77;
	bool yes = false;
	const char *s = "untouched";
	size_t len = 77;

	(void)state;
	assert_int_equal(gguf_get_u64(m.g, "u8", &u64), 0);
	assert_int_equal(u64, 255);
	assert_int_equal(gguf_get_u64(m.g, "u16", &u64), 0);
	assert_int_equal(u64, 0x1234);
	assert_int_equal(gguf_get_u64(m.g, "i16", &u64), 0);
	assert_int_equal(u64, 0x1234);
	assert_int_equal(gguf_get_u32(m.g, "u32", &u32), 0);
	assert_int_equal(u32, 0xfffffffe);
	assert_int_equal(gguf_get_u64(m.g, "u64", &u64), 0);
	assert_int_equal(u64, (uint64_t)1 << 32);
	assert_int_equal(gguf_get_u32(m.g, "i64", &u32), 0);
	assert_int_equal(u32, 5);
	assert_int_equal(gguf_get_f32(m.g, "f32", &f), 0);
	assert_true(f == 1.5F);
	assert_int_equal(gguf_get_f32(m.g, "f64", &f), 0);
	assert_true(f == -0.5F);
	assert_int_equal(gguf_get_bool(m.g, "yes", &yes), 0);
	assert_true(yes);
	assert_int_equal(gguf_get_bool(m.g, "no", &yes), 0);
	assert_false(yes);
	assert_int_equal(gguf_get_str(m.g, "general.architecture", &s, &len), 0);
	assert_int_equal(len, 4);
	assert_memory_equal(s, "test", 4);
	assert_int_equal(gguf_get_str(m.g, "empty", &s, &len), 0);
	assert_int_equal(len, 0);
	image_done(&m);
}

static void test_scalar_refusals(void **state)
{
	struct gguf_build b = sample();
	float nan_f = NAN;
	struct image m;
	uint64_t u64 = 77;
	uint32_t u32 = 77;
	float f = 77;
	bool yes = true;
	const char *s = "untouched";
	size_t len = 77;

	(void)state;
	gguf_build_raw(&b, "nan", GGUF_F32, &nan_f, sizeof(nan_f));
	gguf_build_raw(&b, "large", GGUF_F64, "\0\0\0\0\0\0\xe0\x7f", 8); /* 2^1023 */
	m = must_open(&b);
	assert_int_equal(gguf_get_u64(m.g, "absent", &u64), -ENOENT);
	assert_int_equal(gguf_get_u32(m.g, "absent", &u32), -ENOENT);
	assert_int_equal(gguf_get_f32(m.g, "absent", &f), -ENOENT);
	assert_int_equal(gguf_get_bool(m.g, "absent", &yes), -ENOENT);
	assert_int_equal(gguf_get_str(m.g, "absent", &s, &len), -ENOENT);
	assert_int_equal(gguf_get_u64(m.g, "", &u64), -ENOENT);
	assert_int_equal(gguf_get_u64(m.g, "i8", &u64), -EINVAL);
	assert_int_equal(gguf_get_u64(m.g, "i32", &u64), -EINVAL);
	assert_int_equal(gguf_get_u64(m.g, "yes", &u64), -EINVAL);
	assert_int_equal(gguf_get_u64(m.g, "f32", &u64), -EINVAL);
	assert_int_equal(gguf_get_u64(m.g, "words", &u64), -EINVAL);
	assert_int_equal(gguf_get_u32(m.g, "u64", &u32), -EINVAL);
	assert_int_equal(gguf_get_f32(m.g, "u32", &f), -EINVAL);
	assert_int_equal(gguf_get_f32(m.g, "nan", &f), -EINVAL);
	assert_int_equal(gguf_get_f32(m.g, "large", &f), -EINVAL);
	assert_int_equal(gguf_get_bool(m.g, "u8", &yes), -EINVAL);
	assert_int_equal(gguf_get_str(m.g, "words", &s, &len), -EINVAL);
	assert_int_equal(u64, 77);
	assert_int_equal(u32, 77);
	assert_true(f == 77);
	assert_true(yes);
	assert_string_equal(s, "untouched");
	assert_int_equal(len, 77);
	image_done(&m);
}

static void test_arrays(void **state)
{
	struct gguf_build b = sample();
	struct image m = must_open(&b);
	const struct gguf_array *a;
	const char *s;
	size_t len;
	int64_t v;
	float f;

	(void)state;
	a = gguf_get_array(m.g, "words");
	assert_non_null(a);
	assert_true(gguf_array_is_str(a));
	assert_int_equal(gguf_array_n(a), 3);
	assert_int_equal(gguf_array_str(a, 0, &s, &len), 0);
	assert_int_equal(len, 1);
	assert_memory_equal(s, "a", 1);
	assert_int_equal(gguf_array_str(a, 1, &s, &len), 0);
	assert_int_equal(len, 0);
	assert_int_equal(gguf_array_str(a, 2, &s, &len), 0);
	assert_int_equal(len, 3);
	assert_memory_equal(s, "ccc", 3);

	a = gguf_get_array(m.g, "types");
	assert_int_equal(gguf_array_i64(a, 1, &v), 0);
	assert_int_equal(v, -3);
	a = gguf_get_array(m.g, "flags");
	assert_int_equal(gguf_array_i64(a, 0, &v), 0);
	assert_int_equal(v, 1);
	a = gguf_get_array(m.g, "scores");
	assert_int_equal(gguf_array_f32(a, 1, &f), 0);
	assert_true(f == -1);

	a = gguf_get_array(m.g, "none");
	assert_int_equal(gguf_array_n(a), 0);
	assert_null(gguf_get_array(m.g, "absent"));
	assert_null(gguf_get_array(m.g, "u32"));
	image_done(&m);
}

/*
 * llama.cpp PR 26690 (element type not checked): an array of integers where strings are expected.
 */
static void test_array_refusals(void **state)
{
	struct gguf_build b = sample();
	float inf = INFINITY;
	const struct gguf_array *a;
	struct image m;
	const char *s = "untouched";
	size_t len = 77;
	int64_t v = 77;
	float f = 77;

	(void)state;
	gguf_build_f32s(&b, "inf", &inf, 1);
	gguf_build_array(&b, "u64s", GGUF_U64, 1);
	gguf_put_u64(&b.kv, UINT64_MAX);
	m = must_open(&b);
	a = gguf_get_array(m.g, "types");
	assert_false(gguf_array_is_str(a));
	assert_int_equal(gguf_array_str(a, 0, &s, &len), -EINVAL);
	assert_int_equal(gguf_array_f32(a, 0, &f), -EINVAL);
	assert_int_equal(gguf_array_i64(a, 3, &v), -ERANGE);
	assert_int_equal(gguf_array_i64(a, SIZE_MAX, &v), -ERANGE);
	a = gguf_get_array(m.g, "words");
	assert_int_equal(gguf_array_i64(a, 0, &v), -EINVAL);
	assert_int_equal(gguf_array_str(a, 3, &s, &len), -ERANGE);
	a = gguf_get_array(m.g, "scores");
	assert_int_equal(gguf_array_i64(a, 0, &v), -EINVAL);
	assert_int_equal(gguf_array_f32(a, 3, &f), -ERANGE);
	a = gguf_get_array(m.g, "inf");
	assert_int_equal(gguf_array_f32(a, 0, &f), -EINVAL);
	a = gguf_get_array(m.g, "u64s");
	assert_int_equal(gguf_array_i64(a, 0, &v), -EINVAL);
	a = gguf_get_array(m.g, "nested");
	assert_int_equal(gguf_array_n(a), 2);
	assert_false(gguf_array_is_str(a));
	assert_int_equal(gguf_array_str(a, 0, &s, &len), -EINVAL);
	assert_int_equal(gguf_array_i64(a, 0, &v), -EINVAL);
	assert_int_equal(gguf_array_f32(a, 0, &f), -EINVAL);
	assert_string_equal(s, "untouched");
	assert_int_equal(len, 77);
	assert_int_equal(v, 77);
	assert_true(f == 77);
	image_done(&m);
}

static void test_tensors(void **state)
{
	struct gguf_build b = sample();
	struct image m = must_open(&b);
	const struct gguf_tensor *w = gguf_tensor(m.g, "w"), *q = gguf_tensor(m.g, "q");

	(void)state;
	assert_int_equal(gguf_n_tensors(m.g), 2);
	assert_ptr_equal(gguf_tensor_at(m.g, 0), w);
	assert_ptr_equal(gguf_tensor_at(m.g, 1), q);
	assert_null(gguf_tensor_at(m.g, 2));
	assert_null(gguf_tensor(m.g, "v"));
	assert_null(gguf_tensor(m.g, ""));

	assert_string_equal(w->name, "w");
	assert_int_equal(w->type, QUANT_F32);
	assert_int_equal(w->n_dims, 2);
	assert_int_equal(w->ne[0], 4);
	assert_int_equal(w->ne[1], 2);
	assert_int_equal(w->ne[2], 1);
	assert_int_equal(w->ne[3], 1);
	assert_int_equal(w->bytes, 32);
	assert_int_equal(w->part, 0);
	assert_int_equal(w->offset % 32, 0);
	assert_ptr_equal(w->data, (const char *)m.data + w->offset);
	assert_memory_equal(w->data, eight, sizeof(eight));
	assert_int_equal(q->bytes, 3 * 34);
	assert_int_equal(q->offset, w->offset + 32);

	assert_int_equal(gguf_n_parts(m.g), 1);
	assert_ptr_equal(gguf_part(m.g, 0)->data, m.data);
	assert_string_equal(gguf_part(m.g, 0)->path, "image");
	assert_int_equal(gguf_part(m.g, 0)->fd, -1);
	assert_null(gguf_part(m.g, 1));
	image_done(&m);
}

static void test_version_2(void **state)
{
	struct gguf_build b = sample();
	struct image m;

	(void)state;
	b.version = 2;
	m = must_open(&b);
	assert_non_null(gguf_tensor(m.g, "w"));
	image_done(&m);
}

static void test_no_keys_no_tensors(void **state)
{
	struct gguf_build b = gguf_build_new();
	struct image m = must_open(&b);

	(void)state;
	assert_int_equal(gguf_n_tensors(m.g), 0);
	assert_null(gguf_tensor(m.g, "w"));
	assert_null(gguf_tensor_at(m.g, 0));
	assert_null(gguf_get_array(m.g, "words"));
	image_done(&m);
}

static void test_alignments(void **state)
{
	static const uint32_t good[] = { 8, 32, 4096, 65536 };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
		struct gguf_build b = gguf_build_new();
		struct image m;

		gguf_build_alignment(&b, good[i]);
		gguf_build_tensor(&b, "w", QUANT_F32, 2, ne_4x2, eight, sizeof(eight));
		gguf_build_tensor(&b, "v", QUANT_F32, 2, ne_4x2, eight, sizeof(eight));
		m = must_open(&b);
		assert_int_equal(gguf_tensor(m.g, "v")->offset % good[i], 0);
		assert_memory_equal(gguf_tensor(m.g, "v")->data, eight, sizeof(eight));
		image_done(&m);
	}
}

/* Names and offsets in no order: lookups sort, file order is kept. */
static void test_many_names(void **state)
{
	struct gguf_build b = gguf_build_new();
	const size_t n = 20000;
	struct image m;
	char name[32];
	uint32_t v;

	(void)state;
	for (size_t i = 0; i < n; i++) {
		uint64_t one = 1, slot = i * 7919 % n; /* 7919 and n have no common factor */

		snprintf(name, sizeof(name), "k%zu", slot);
		gguf_build_u32(&b, name, (uint32_t)slot);
		gguf_build_info(&b, name, QUANT_F32, 1, &one, slot * 32);
	}
	for (size_t i = 0; i < n * 32; i += 64)
		gguf_put(&b.data, (char[64]){}, 64);
	m = must_open(&b);
	for (size_t i = 0; i < n; i++) {
		snprintf(name, sizeof(name), "k%zu", i);
		assert_int_equal(gguf_get_u32(m.g, name, &v), 0);
		assert_int_equal(v, i);
		assert_string_equal(gguf_tensor(m.g, name)->name, name);
	}
	assert_string_equal(gguf_tensor_at(m.g, 0)->name, "k0");
	assert_string_equal(gguf_tensor_at(m.g, 1)->name, "k7919");
	image_done(&m);
}

/* The size of the first target's vocabulary: 248320 tokens and as many merges. */
static void test_large_vocabulary(void **state)
{
	static const char *const keys[] = { "tokenizer.ggml.tokens", "tokenizer.ggml.merges" };
	struct gguf_build b = gguf_build_new();
	const size_t n = 248320;
	struct image m;
	uint64_t start;
	const char *s;
	char word[32];
	size_t len;

	(void)state;
	for (size_t k = 0; k < ARRAY_SIZE(keys); k++) {
		gguf_build_array(&b, keys[k], GGUF_STR, n);
		for (size_t i = 0; i < n; i++) {
			snprintf(word, sizeof(word), "%zu-%zu", k, i);
			gguf_put_str(&b.kv, word);
		}
	}
	start = now_us();
	m = must_open(&b);
	printf("# 2 x %zu strings: built and opened in %.1f ms\n", n, (double)(now_us() - start) / 1000);
	for (size_t i = 0; i < n; i++) {
		snprintf(word, sizeof(word), "1-%zu", i);
		assert_int_equal(gguf_array_str(gguf_get_array(m.g, keys[1]), i, &s, &len), 0);
		assert_int_equal(len, strlen(word));
		assert_memory_equal(s, word, len);
	}
	image_done(&m);
}

static void test_no_gguf(void **state)
{
	struct gguf_build b = sample();
	size_t bytes;
	_cleanup_(freep) char *data = gguf_build_done(&b, &bytes);

	(void)state;
	refuse_image(data, 0, "is empty");
	refuse_image(data, 3, "4 bytes do not fit in the 3 bytes left of the file");
	refuse_image(data, 7, "4 bytes do not fit in the 3 bytes left of the file");
	data[0] = 'X';
	refuse_image(data, bytes, "is no GGUF file");
}

static void test_versions(void **state)
{
	static const uint32_t versions[] = { 0, 1, 4, UINT32_MAX };
	struct gguf_build b;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(versions); i++) {
		b = sample();
		b.version = versions[i];
		refuse(&b, "only 2 and 3 are supported");
	}
	b = sample();
	b.version = 0x03000000;
	refuse(&b, "big-endian");
	b = sample();
	b.version = 0x02000000;
	refuse(&b, "big-endian");
}

/* CVE-2024-23605: n_kv times the size of an entry wraps. */
static void test_n_kv_wrap(void **state)
{
	static const uint64_t counts[] = { UINT64_MAX, (uint64_t)1 << 63, ((uint64_t)1 << 60) + 1,
					   65537 };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(counts); i++) {
		struct gguf_build b = sample();

		b.n_kv = counts[i];
		refuse(&b, "keys, more than 65536");
	}
}

static void test_n_kv_beyond_file(void **state)
{
	struct gguf_build b = sample();

	(void)state;
	b.n_kv = 60000;
	refuse(&b, "60000 keys do not fit");
	b = sample();
	b.n_kv++; /* reads the first tensor as a key, and half of its dimensions as a tensor's name */
	refuse(&b, "tensor number 0: ");
}

/*
 * llama.cpp#15711 and CVE-2025-53630: n_tensors times the overhead of a tensor wraps or is
 * allocated unseen.
 */
static void test_n_tensors_wrap(void **state)
{
	static const uint64_t counts[] = { UINT64_MAX, (uint64_t)1 << 63, (uint64_t)1 << 40, 1048577 };
	struct gguf_build b;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(counts); i++) {
		b = sample();
		b.n_tensors = counts[i];
		refuse(&b, "tensors, more than 1048576");
	}
	b = sample();
	b.n_tensors = 100000;
	refuse(&b, "100000 tensors do not fit");
	b = sample();
	b.n_tensors++;
	refuse(&b, "tensor number 2");
}

/*
 * Any prefix of a valid file is refused: nothing is read beyond the end (a sanitizer sees it: each
 * is a copy).
 */
static void test_truncated(void **state)
{
	struct gguf_build b = sample();
	size_t bytes;
	_cleanup_(freep) char *data = gguf_build_done(&b, &bytes);

	(void)state;
	for (size_t n = 0; n < bytes; n++) {
		void *copy = NULL;

		assert_int_equal(posix_memalign(&copy, 64, n ? n : 1), 0);
		memcpy(copy, data, n);
		refuse_image(copy, n, "image: ");
		free(copy);
	}
}

/* Every byte set to values that matter: opened or refused with a text, never more. */
static void test_corrupted(void **state)
{
	static const unsigned char values[] = { 0, 1, 0x7f, 0x80, 0xff };
	struct gguf_build b = sample();
	size_t bytes, opened = 0, refused = 0;
	_cleanup_(freep) unsigned char *data = gguf_build_done(&b, &bytes);

	(void)state;
	for (size_t i = 0; i < bytes * ARRAY_SIZE(values); i++) {
		_cleanup_(freep) char *error = NULL;
		_cleanup_(gguf_closep) struct gguf *g = NULL;
		unsigned char old = data[i / ARRAY_SIZE(values)];
		int r;

		data[i / ARRAY_SIZE(values)] = values[i % ARRAY_SIZE(values)];
		r = gguf_open_memory(data, bytes, "image", &g, &error);
		if (r == 0) {
			opened++;
		} else {
			refused++;
			assert_int_equal(r, -EBADMSG);
			check_text(error, "image: ");
		}
		data[i / ARRAY_SIZE(values)] = old;
	}
	assert_true(opened > 0);
	assert_true(refused > 0);
}

/*
 * CVE-2025-66959, llama.cpp PR 19856: the length of a string. 2^63 is negative when signed,
 * UINT64_MAX wraps.
 */
static void test_string_lengths(void **state)
{
	static const uint64_t lengths[] = { UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63,
					    (uint64_t)1 << 32, 65 };
	struct gguf_build b;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(lengths); i++) {
		b = gguf_build_new();
		gguf_build_key(&b, "long", GGUF_STR);
		gguf_put_u64(&b.kv, lengths[i]);
		gguf_put(&b.kv, (char[64]){}, 64);
		refuse(&b, "key \"long\": ");

		b = gguf_build_new();
		b.n_kv = 1;
		gguf_put_u64(&b.kv, lengths[i]);
		gguf_put(&b.kv, (char[64]){}, 64);
		refuse(&b, "key number 0: ");

		b = gguf_build_new();
		b.n_tensors = 1;
		gguf_put_u64(&b.tensors, lengths[i]);
		gguf_put(&b.tensors, (char[64]){}, 64);
		refuse(&b, "tensor number 0: ");
	}
}

/*
 * CVE-2025-66959 and PR 19856 again: the length of an array, which wraps with the element's size.
 */
static void test_array_lengths(void **state)
{
	static const uint32_t types[] = { GGUF_U8,  GGUF_BOOL, GGUF_U16,  GGUF_F32,
					  GGUF_F64, GGUF_STR,  GGUF_ARRAY };
	static const uint64_t lengths[] = { UINT64_MAX, (uint64_t)1 << 63, ((uint64_t)1 << 61) + 1,
					    ((uint64_t)1 << 62) + 1, 65 };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(types); i++)
		for (size_t j = 0; j < ARRAY_SIZE(lengths); j++) {
			struct gguf_build b = gguf_build_new();

			gguf_build_array(&b, "long", types[i], lengths[j]);
			gguf_put(&b.kv, (char[64]){}, 64);
			refuse(&b, "key \"long\": ");
		}
}

static void test_array_string_beyond_file(void **state)
{
	struct gguf_build b = gguf_build_new();

	(void)state;
	gguf_build_array(&b, "words", GGUF_STR, 2);
	gguf_put_str(&b.kv, "good");
	gguf_put_u64(&b.kv, 3);
	gguf_put(&b.kv, "no", 2);
	refuse(&b, "key \"words\": 3 bytes of a string do not fit in the 2 bytes left of the file");
}

static void test_value_types(void **state)
{
	static const uint32_t types[] = { 13, 14, 255, 0x80000000, UINT32_MAX };
	struct gguf_build b;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
		b = gguf_build_new();
		gguf_build_raw(&b, "odd", types[i], (char[16]){}, 16);
		refuse(&b, "key \"odd\": type ");
		b = gguf_build_new();
		gguf_build_array(&b, "odd", types[i], 1);
		gguf_put(&b.kv, (char[16]){}, 16);
		refuse(&b, "key \"odd\": element type ");
	}
	b = gguf_build_new();
	gguf_build_array(&b, "odd", 13, 0);
	refuse(&b, "key \"odd\": element type 13 is unknown");
}

/* A bomb of arrays in arrays: a recursive reader without bound leaves its stack. */
static void test_nested_arrays(void **state)
{
	struct gguf_build b = gguf_build_new();
	struct image m;

	(void)state;
	gguf_build_array(&b, "bomb", GGUF_ARRAY, 1);
	for (int i = 0; i < 100000; i++) {
		gguf_put_u32(&b.kv, GGUF_ARRAY);
		gguf_put_u64(&b.kv, 1);
	}
	refuse(&b, "key \"bomb\": arrays are nested more than 4 deep");

	b = gguf_build_new();
	gguf_build_array(&b, "deep", GGUF_ARRAY, 1);
	for (int i = 0; i < 2; i++) {
		gguf_put_u32(&b.kv, GGUF_ARRAY);
		gguf_put_u64(&b.kv, 1);
	}
	gguf_put_u32(&b.kv, GGUF_U8);
	gguf_put_u64(&b.kv, 0);
	m = must_open(&b);
	image_done(&m);

	b = gguf_build_new();
	gguf_build_array(&b, "inner", GGUF_ARRAY, 1);
	gguf_put_u32(&b.kv, GGUF_U64);
	gguf_put_u64(&b.kv, ((uint64_t)1 << 61) + 1);
	refuse(&b, "key \"inner\": ");
}

static void test_bools(void **state)
{
	struct gguf_build b = gguf_build_new();

	(void)state;
	gguf_build_raw(&b, "maybe", GGUF_BOOL, "\x02", 1);
	refuse(&b, "key \"maybe\": the value is neither true nor false");
	b = gguf_build_new();
	gguf_build_array(&b, "maybe", GGUF_BOOL, 3);
	gguf_put(&b.kv, "\x01\x00\xff", 3);
	refuse(&b, "key \"maybe\": element 2 is neither true nor false");
}

static void test_duplicate_keys(void **state)
{
	struct gguf_build b = sample();

	(void)state;
	gguf_build_u32(&b, "u32", 1);
	refuse(&b, "key \"u32\": is there twice");
	b = sample();
	gguf_build_str(&b, "words", "another type");
	refuse(&b, "key \"words\": is there twice");
}

static void test_key_names(void **state)
{
	struct gguf_build b = gguf_build_new();
	_cleanup_(freep) char *name = calloc(1, 65537);
	struct image m;
	uint32_t v;

	(void)state;
	gguf_build_u32(&b, "", 1);
	gguf_build_u32(&b, "x", 1);
	refuse(&b, "key number 0: its name has 0 bytes");
	memset(name, 'k', 65536);
	gguf_build_u32(&b, name, 1);
	refuse(&b, "key number 0: its name has 65536 bytes");
	name[65535] = 0;
	gguf_build_u32(&b, name, 9);
	m = must_open(&b);
	assert_int_equal(gguf_get_u32(m.g, name, &v), 0);
	image_done(&m);
	gguf_put_u64(&b.kv, 3);
	gguf_put(&b.kv, "a\0b", 3);
	gguf_put_u32(&b.kv, GGUF_U8);
	gguf_put(&b.kv, "", 1);
	b.n_kv = 1;
	refuse(&b, "key \"a\\x00b\": its name has a NUL");
}

/*
 * Bytes of the file reach a log and a terminal: escapes and line ends are shown as such, long names
 * are cut.
 */
static void test_error_text_is_printable(void **state)
{
	struct gguf_build b = gguf_build_new();
	char name[200];

	(void)state;
	gguf_build_raw(&b, "a\n\x1b[31m\xc3\xa9\x7f", 99, "", 1);
	refuse(&b, "image: key \"a\\x0a\\x1b[31m\\xc3\\xa9\\x7f\": type 99 is unknown");
	memset(name, 'x', sizeof(name) - 1);
	name[sizeof(name) - 1] = 0;
	gguf_build_raw(&b, name, 99, "", 1);
	refuse(&b, "xxx...\": type 99 is unknown");
	refuse_path("no\nsuch\x1b/file", -ENOENT, "no\\x0asuch\\x1b/file: cannot open");
}

/*
 * oss-security 2026-q2 and PR 24997 (alignment without upper bound), CVE-2025-66960 (alignment 0:
 * divide by zero).
 */
static void test_alignment_values(void **state)
{
	static const uint32_t wrong[] = { 0, 1, 4, 3, 33, 48, 131072, 0x80000000, UINT32_MAX };
	struct gguf_build b;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
		b = sample();
		gguf_build_u32(&b, "general.alignment", wrong[i]);
		refuse(&b, "key \"general.alignment\": ");
	}
	b = sample();
	gguf_build_raw(&b, "general.alignment", GGUF_U64, "\x20\0\0\0\1\0\0\0", 8);
	refuse(&b, "key \"general.alignment\": 4294967328 is no power of two");
	b = sample();
	gguf_build_str(&b, "general.alignment", "32");
	refuse(&b, "key \"general.alignment\": is no unsigned integer");
	b = gguf_build_new(); /* also where nothing is aligned */
	gguf_build_u32(&b, "general.alignment", 0);
	refuse(&b, "key \"general.alignment\": 0 is no power of two");
}

static void refuse_info(uint32_t type, uint32_t n_dims, const uint64_t *ne, uint64_t offset,
			const char *want)
{
	struct gguf_build b = gguf_build_new();

	gguf_build_info(&b, "w", type, n_dims, ne, offset);
	gguf_put(&b.data, (char[512]){}, 512);
	refuse(&b, want);
}

/*
 * CVE-2024-21802, CVE-2025-53630, CVE-2026-27940 (product of dimensions), CVE-2026-33298 (the same
 * of quantised types).
 */
static void test_dims_overflow(void **state)
{
	static const struct {
		uint32_t type;
		uint64_t ne[4];
	} wrap[] = {
		{ QUANT_F32, { (uint64_t)1 << 62, 1, 1, 1 } },       /* * 4 is 0 */
		{ QUANT_F32, { ((uint64_t)1 << 62) + 2, 1, 1, 1 } }, /* * 4 is 8 */
		{ QUANT_F32, { UINT64_MAX, 1, 1, 1 } },
		{ QUANT_F32, { (uint64_t)1 << 32, (uint64_t)1 << 32, 1, 1 } },
		{ QUANT_F32, { 1, (uint64_t)1 << 32, (uint64_t)1 << 32, 1 } },
		{ QUANT_F32, { 1, (uint64_t)1 << 22, (uint64_t)1 << 22, (uint64_t)1 << 22 } },
		{ QUANT_F32, { 2, ((uint64_t)1 << 61) + 1, 1, 1 } },
		{ 24 /* I8 */, { (uint64_t)1 << 63, 2, 1, 1 } },
		{ QUANT_Q8_0, { UINT64_MAX - 31, 1, 1, 1 } },
		{ QUANT_Q4_K, { 256, ((uint64_t)1 << 60) + 1, 1, 16 } },
		{ QUANT_Q4_K, { (uint64_t)1 << 63, 256, 1, 1 } },
		{ QUANT_Q8_K, { UINT64_MAX - 255, 1, 1, 1 } },
		{ QUANT_MXFP4, { (uint64_t)1 << 40, (uint64_t)1 << 30, 1, 1 } },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(wrap); i++)
		refuse_info(wrap[i].type, 4, wrap[i].ne, 0, "tensor \"w\": its dimensions overflow");
}

static void test_dims(void **state)
{
	static const uint64_t ne[] = { 4, 0, 1, 1, 1, 1 };

	(void)state;
	refuse_info(QUANT_F32, 0, ne, 0, "tensor \"w\": has 0 dimensions");
	refuse_info(QUANT_F32, 5, ne, 0, "tensor \"w\": has 5 dimensions");
	refuse_info(QUANT_F32, 2, ne, 0, "tensor \"w\": dimension 1 is zero");
	refuse_info(QUANT_F32, 1, ne + 1, 0, "tensor \"w\": dimension 0 is zero");
}

static void test_dims_count_wraps(void **state)
{
	struct gguf_build b = gguf_build_new();

	(void)state;
	b.n_tensors = 1;
	gguf_put_str(&b.tensors, "w");
	gguf_put_u32(&b.tensors, UINT32_MAX);
	gguf_put(&b.tensors, (char[64]){}, 64);
	refuse(&b, "tensor \"w\": has 4294967295 dimensions");
}

static void test_rows_of_blocks(void **state)
{
	static const uint64_t ne_33[] = { 33 }, ne_255[] = { 255 }, ne_32x8[] = { 32, 8 };

	(void)state;
	refuse_info(QUANT_Q8_0, 1, ne_33, 0, "33 elements is no multiple of Q8_0's block of 32");
	refuse_info(QUANT_Q4_K, 1, ne_255, 0, "is no multiple of Q4_K's block of 256");
	/* 256 elements, but no whole block in a row */
	refuse_info(QUANT_Q4_K, 2, ne_32x8, 0, "is no multiple of Q4_K's block of 256");
}

/*
 * CVE-2025-66960: removed types have a block of zero elements in the table; dividing by it ends the
 * process.
 */
static void test_tensor_types(void **state)
{
	static const uint32_t unknown[] = { 4,  5,  31, 32, 33,         36,        37,
					    38, 43, 63, 64, 0x80000000, UINT32_MAX };
	static const uint64_t ne[] = { 256 };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(unknown); i++)
		refuse_info(unknown[i], 1, ne, 0, "tensor \"w\": type ");
}

/*
 * CVE-2026-7482: a tensor beyond the end of the file was read into an artefact; PR 26318: padding
 * wraps.
 */
static void test_tensor_beyond_file(void **state)
{
	static const uint64_t ne_128[] = { 128 }, ne_129[] = { 129 }, ne_1[] = { 1 };
	static const uint64_t offsets[] = { 512, 1024, (uint64_t)1 << 63, UINT64_MAX - 31,
					    UINT64_MAX - 127 };
	struct gguf_build b = gguf_build_new();
	struct image m;

	(void)state;
	refuse_info(QUANT_F32, 1, ne_129, 0,
		    "tensor \"w\": its 516 bytes at offset 0 of the data end beyond");
	refuse_info(QUANT_F32, 1, ne_128, 32, "end beyond the");
	for (size_t i = 0; i < ARRAY_SIZE(offsets); i++)
		refuse_info(QUANT_F32, 1, ne_1, offsets[i], "tensor \"w\": its 4 bytes at offset");
	gguf_build_info(&b, "w", QUANT_F32, 1, ne_128, 0);
	gguf_put(&b.data, (char[512]){}, 512);
	m = must_open(&b);
	image_done(&m);
	/* The data section would start beyond the end. */
	gguf_build_info(&b, "w", QUANT_F32, 1, ne_1, 0);
	refuse(&b, "tensor \"w\": its 4 bytes");
}

static void test_tensor_misaligned(void **state)
{
	static const uint64_t ne[] = { 1 };

	(void)state;
	refuse_info(QUANT_F32, 1, ne, 4, "tensor \"w\": its offset 4 is no multiple of 32");
	refuse_info(QUANT_F32, 1, ne, UINT64_MAX, "is no multiple of 32");
}

static void test_tensors_overlap(void **state)
{
	static const uint64_t ne_16[] = { 16 }, ne_1[] = { 1 };
	struct gguf_build b = gguf_build_new();

	(void)state;
	gguf_build_info(&b, "later", QUANT_F32, 1, ne_1, 32);
	gguf_build_info(&b, "first", QUANT_F32, 1, ne_16, 0);
	gguf_put(&b.data, (char[512]){}, 512);
	refuse(&b, "tensor \"later\": its bytes at 160 overlap another tensor's 64 at 128");
	gguf_build_info(&b, "a", QUANT_F32, 1, ne_1, 64);
	gguf_build_info(&b, "b", QUANT_F32, 1, ne_1, 64);
	gguf_put(&b.data, (char[512]){}, 512);
	refuse(&b, "overlap");
}

static void test_tensor_names(void **state)
{
	static const uint64_t ne[] = { 1 };
	struct gguf_build b = gguf_build_new();
	char name[66] = "";
	struct image m;

	(void)state;
	gguf_build_info(&b, "", QUANT_F32, 1, ne, 0);
	gguf_put(&b.tensors, (char[32]){}, 32);
	refuse(&b, "tensor number 0: its name has 0 bytes");
	memset(name, 'n', 65);
	gguf_build_info(&b, name, QUANT_F32, 1, ne, 0);
	refuse(&b, "tensor number 0: its name has 65 bytes, not 1 to 64");
	name[64] = 0;
	gguf_build_tensor(&b, name, QUANT_F32, 1, ne, eight, 4);
	m = must_open(&b);
	assert_string_equal(gguf_tensor(m.g, name)->name, name);
	image_done(&m);
	b.n_tensors = 1;
	gguf_put_u64(&b.tensors, 3);
	gguf_put(&b.tensors, "a\0b", 3);
	gguf_put(&b.tensors, (char[32]){}, 32);
	refuse(&b, "tensor \"a\\x00b\": its name has a NUL");
	gguf_build_tensor(&b, "same", QUANT_F32, 1, ne, eight, 4);
	gguf_build_tensor(&b, "same", QUANT_F32, 1, ne, eight, 4);
	refuse(&b, "tensor \"same\": is there twice");
}

struct folder {
	char path[256];
	char file[512]; /* of in_folder() */
};

static int folder_setup(void **state)
{
	struct folder *d = calloc(1, sizeof(*d));

	if (!d)
		return -1;
	snprintf(d->path, sizeof(d->path), "%s/test-gguf-XXXXXX", getenv("TMPDIR") ?: P_tmpdir);
	*state = d;
	return mkdtemp(d->path) ? 0 : -1;
}

static const char *in_folder(struct folder *d, const char *name)
{
	snprintf(d->file, sizeof(d->file), "%s/%s", d->path, name);
	return d->file;
}

static int folder_teardown(void **state)
{
	struct folder *d = *state;
	DIR *dir = opendir(d->path);

	for (struct dirent *e; dir && (e = readdir(dir));)
		if (e->d_name[0] != '.')
			remove(in_folder(d, e->d_name));
	if (dir)
		closedir(dir);
	rmdir(d->path);
	free(d);
	return 0;
}

static void test_file(void **state)
{
	struct folder *d = *state;
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	struct gguf_build b = sample();
	const struct gguf_tensor *w;
	const struct gguf_part *p;
	char again[32];

	gguf_build_write(&b, in_folder(d, "m.gguf"));
	assert_int_equal(gguf_open(d->file, &g, NULL), 0);
	p = gguf_part(g, 0);
	w = gguf_tensor(g, "w");
	assert_string_equal(p->path, d->file);
	assert_true(fcntl(p->fd, F_GETFD) & FD_CLOEXEC);
	assert_int_equal(fcntl(p->fd, F_GETFL) & O_ACCMODE, O_RDONLY);
	assert_memory_equal(w->data, eight, sizeof(eight));
	assert_int_equal(pread(p->fd, again, sizeof(again), (off_t)w->offset), sizeof(again));
	assert_memory_equal(again, eight, sizeof(again));
}

/* A model's place may hold anything; opening must not wait, and not read what is no file. */
static void test_no_files(void **state)
{
	struct folder *d = *state;

	refuse_path(in_folder(d, "absent.gguf"), -ENOENT, "absent.gguf: cannot open: No such file");
	refuse_path(d->path, -EISDIR, "is a directory");
	assert_int_equal(mkfifo(in_folder(d, "fifo"), 0600), 0);
	alarm(20);
	refuse_path(d->file, -EINVAL, "fifo: is no regular file");
	alarm(0);
	refuse_path("/dev/null", -EINVAL, "is no regular file");
	assert_int_equal(close(open(in_folder(d, "empty"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)), 0);
	refuse_path(d->file, -EBADMSG, "empty: is empty");
}

/*
 * A sparse file is cheap, so that its size alone must not allow much: 1 TiB of zeros behind a
 * count.
 */
static void test_sparse_file(void **state)
{
	struct folder *d = *state;
	struct gguf_build b = gguf_build_new();

	gguf_build_array(&b, "bomb", GGUF_STR, (uint64_t)1 << 36);
	gguf_build_write(&b, in_folder(d, "sparse.gguf"));
	if (truncate(d->file, (off_t)1 << 40) < 0)
		skip_because("no file of 1 TiB can be made here: %m");
	refuse_path(d->file, -EBADMSG,
		    "68719476736 strings do not fit in a directory of at most 256 MiB");
}

/*
 * The bound of a directory cuts a tensor's record after its dimensions; the file goes on. Once, its
 * type and offset were then taken for zero, and it opened.
 */
static void test_directory_cut(void **state)
{
	const off_t cut = (off_t)256 << 20, record = 8 + 40 + 4 + 8;
	struct folder *d = *state;
	struct gguf_build b = gguf_build_new();
	const uint64_t head = 24 + 8 + 4 + 4 + 4 + 8, one = 1;
	_cleanup_(closep) int fd = -1;
	struct buf info;

	gguf_build_array(&b, "bomb", GGUF_U8, (uint64_t)(cut - record) - 2 - head);
	gguf_build_info(&b, "forty-bytes-----------------------------", QUANT_F32, 1, &one, 0);
	info = b.tensors;
	b.tensors = (struct buf){};
	gguf_build_write(&b, in_folder(d, "cut.gguf"));
	fd = open(d->file, O_WRONLY | O_CLOEXEC);
	assert_int_equal(pwrite(fd, info.data, info.len, cut - record - 2), info.len);
	buf_done(&info);
	if (ftruncate(fd, cut + 4096) < 0)
		skip_because("no sparse file can be made here: %m");
	refuse_path(d->file, -EBADMSG, "---\": 4 bytes do not fit in a directory of at most 256 MiB");
}

/* So that a test can cut a file between two steps of gguf_open(): after it has asked for the size. */
static const char *cut_at_fstat;

int fstat(int fd, struct stat *st)
{
	int r = fstatat(fd, "", st, AT_EMPTY_PATH);

	if (cut_at_fstat && truncate(cut_at_fstat, 100) < 0)
		return -1;
	return r;
}

/* A key of 64 KiB before a tensor; the file may be cut anywhere in the key. */
static void write_long(struct folder *d)
{
	static const uint8_t zeros[65536];
	struct gguf_build b = gguf_build_new();

	gguf_build_array(&b, "long", GGUF_BOOL, sizeof(zeros));
	gguf_put(&b.kv, zeros, sizeof(zeros));
	gguf_build_tensor(&b, "w", QUANT_F32, 2, ne_4x2, eight, 32);
	gguf_build_write(&b, in_folder(d, "m.gguf"));
}

static void test_cut_while_parsed(void **state)
{
	struct folder *d = *state;

	write_long(d);
	cut_at_fstat = d->file;
	refuse_path(d->file, -EIO,
		    "m.gguf: cannot be read: it was truncated meanwhile, or its disk failed");
	cut_at_fstat = NULL;
	/* What is left of it is merely no good. */
	refuse_path(d->file, -EBADMSG, "do not fit in the");
}

static void test_cut_later(void **state)
{
	struct folder *d = *state;
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	const volatile uint8_t *w;

	write_long(d);
	assert_int_equal(gguf_open(d->file, &g, NULL), 0);
	w = gguf_tensor(g, "w")->data;
	assert_int_equal(w[3], 0x3f); /* of 1.0 */
	assert_false(gguf_broken(g));
	assert_int_equal(gguf_check_unchanged(g), 0);
	assert_int_equal(truncate(d->file, 100), 0);
	assert_int_equal(gguf_check_unchanged(g), -ESTALE);
	assert_false(gguf_broken(g));
	assert_int_equal(w[3], 0);
	assert_true(gguf_broken(g));
	assert_int_equal(((const char *)gguf_part(g, 0)->data)[0], 'G');
}

static void test_changed(void **state)
{
	struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, {} };
	struct folder *d = *state;
	struct gguf *g = NULL;
	struct image m;
	struct gguf_build b = sample();
	struct stat st;

	write_long(d);
	assert_int_equal(gguf_open(d->file, &g, NULL), 0);
	/* Not: another mode or name, nor a new file in its place. */
	assert_int_equal(chmod(d->file, 0400), 0);
	assert_int_equal(gguf_check_unchanged(g), 0);
	assert_int_equal(remove(d->file), 0);
	write_long(d);
	assert_int_equal(gguf_check_unchanged(g), 0);
	gguf_close(g);

	assert_int_equal(gguf_open(d->file, &g, NULL), 0);
	assert_int_equal(stat(d->file, &st), 0);
	times[1] = st.st_mtim;
	times[1].tv_nsec = (times[1].tv_nsec + 1) % 1000000000;
	assert_int_equal(utimensat(AT_FDCWD, d->file, times, 0), 0);
	assert_int_equal(gguf_check_unchanged(g), -ESTALE);
	times[1] = st.st_mtim;
	assert_int_equal(utimensat(AT_FDCWD, d->file, times, 0), 0);
	assert_int_equal(gguf_check_unchanged(g), 0);
	assert_int_equal(truncate(d->file, st.st_size + 1), 0);
	assert_int_equal(utimensat(AT_FDCWD, d->file, times, 0), 0);
	assert_int_equal(gguf_check_unchanged(g), -ESTALE);
	gguf_close(g);

	m = must_open(&b);
	assert_false(gguf_broken(m.g));
	assert_int_equal(gguf_check_unchanged(m.g), 0);
	image_done(&m);
}

static struct gguf_build part_of(uint32_t no, uint32_t count, uint32_t n_tensors)
{
	struct gguf_build b = gguf_build_new();

	gguf_build_raw(&b, "split.no", GGUF_U16, &no, 2);
	gguf_build_raw(&b, "split.count", GGUF_U16, &count, 2);
	gguf_build_raw(&b, "split.tensors.count", GGUF_I32, &n_tensors, 4);
	return b;
}

/* Three parts: two tensors, none, one. */
static void write_split(struct folder *d)
{
	struct gguf_build b = part_of(0, 3, 3);

	gguf_build_str(&b, "general.architecture", "test");
	gguf_build_tensor(&b, "b", QUANT_F32, 2, ne_4x2, eight, 32);
	gguf_build_tensor(&b, "a", QUANT_F32, 2, ne_4x2, eight, 32);
	gguf_build_write(&b, in_folder(d, "m-00001-of-00003.gguf"));
	b = part_of(1, 3, 3);
	gguf_build_write(&b, in_folder(d, "m-00002-of-00003.gguf"));
	b = part_of(2, 3, 3);
	gguf_build_alignment(&b, 64);
	gguf_build_tensor(&b, "c", QUANT_F32, 1, (uint64_t[]){ 2 }, &eight[4], 8);
	gguf_build_write(&b, in_folder(d, "m-00003-of-00003.gguf"));
}

/* The split with one part replaced must be refused with want. */
static void refuse_split(struct folder *d, struct gguf_build b, const char *part, const char *want)
{
	gguf_build_write(&b, in_folder(d, part));
	refuse_path(in_folder(d, "m-00001-of-00003.gguf"), -EBADMSG, want);
	write_split(d);
}

static void test_split(void **state)
{
	struct folder *d = *state;
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	const struct gguf_tensor *c;
	const char *s;
	size_t len;

	write_split(d);
	assert_int_equal(gguf_open(in_folder(d, "m-00001-of-00003.gguf"), &g, NULL), 0);
	assert_int_equal(gguf_n_parts(g), 3);
	assert_int_equal(gguf_n_tensors(g), 3);
	assert_string_equal(gguf_tensor_at(g, 0)->name, "b");
	assert_string_equal(gguf_tensor_at(g, 1)->name, "a");
	c = gguf_tensor(g, "c");
	assert_ptr_equal(gguf_tensor_at(g, 2), c);
	assert_int_equal(c->part, 2);
	assert_ptr_equal(c->data, (const char *)gguf_part(g, 2)->data + c->offset);
	assert_memory_equal(c->data, &eight[4], 8);
	assert_int_equal(gguf_tensor(g, "a")->part, 0);
	assert_string_equal(strrchr(gguf_part(g, 2)->path, '/'), "/m-00003-of-00003.gguf");
	assert_int_equal(gguf_get_str(g, "general.architecture", &s, &len), 0);
}

static void test_split_names(void **state)
{
	struct folder *d = *state;
	char other[512];

	write_split(d);
	refuse_path(in_folder(d, "m-00002-of-00003.gguf"), -EBADMSG,
		    "is not the first part of its split; open m-00001-of-00003.gguf");
	remove(in_folder(d, "m-00003-of-00003.gguf"));
	refuse_path(in_folder(d, "m-00001-of-00003.gguf"), -ENOENT,
		    "m-00003-of-00003.gguf: cannot open");
	snprintf(other, sizeof(other), "%s/renamed.gguf", d->path);
	assert_int_equal(rename(in_folder(d, "m-00001-of-00003.gguf"), other), 0);
	refuse_path(other, -EBADMSG, "its name does not end in -00001-of-00003.gguf");
	snprintf(other, sizeof(other), "%s/m-00001-of-00002.gguf", d->path);
	assert_int_equal(rename(in_folder(d, "renamed.gguf"), other), 0);
	refuse_path(other, -EBADMSG, "its name does not end in -00001-of-00003.gguf");
}

static void test_split_disagrees(void **state)
{
	struct folder *d = *state;
	struct gguf_build b;

	write_split(d);
	refuse_split(d, part_of(2, 3, 3), "m-00002-of-00003.gguf",
		     "m-00002-of-00003.gguf: key \"split.no\": is 2, but should be 1");
	refuse_split(d, part_of(1, 4, 3), "m-00002-of-00003.gguf",
		     "m-00002-of-00003.gguf: key \"split.count\": is 4, but should be 3");
	refuse_split(d, part_of(1, 3, 4), "m-00002-of-00003.gguf",
		     "m-00002-of-00003.gguf: key \"split.tensors.count\": is 4, but should be 3");
	refuse_split(d, gguf_build_new(), "m-00002-of-00003.gguf",
		     "m-00002-of-00003.gguf: key \"split.no\": is missing");
	refuse_split(d, part_of(2, 3, 3), "m-00003-of-00003.gguf",
		     "m-00001-of-00003.gguf: key \"split.tensors.count\": is 3, but should be 2");
	refuse_split(d, part_of(7, 3, 3), "m-00001-of-00003.gguf", "is part 7 (from 0) of only 3");
	refuse_split(d, part_of(0, 513, 3), "m-00001-of-00003.gguf", "513 parts, more than 512");

	b = part_of(0, 3, 3);
	b.kv.data[8 + 8] = GGUF_I8; /* split.no's type: now its value's high byte begins the next key */
	refuse_split(d, b, "m-00001-of-00003.gguf", "key number 1");

	b = gguf_build_new();
	gguf_build_str(&b, "split.no", "1");
	refuse_split(d, b, "m-00002-of-00003.gguf", "key \"split.no\": is no unsigned integer");

	b = gguf_build_new();
	gguf_build_str(&b, "split.count", "3");
	refuse_split(d, b, "m-00001-of-00003.gguf", "key \"split.count\": is no unsigned integer");

	b = gguf_build_new();
	gguf_build_u32(&b, "split.count", 3);
	refuse_split(d, b, "m-00001-of-00003.gguf",
		     "m-00002-of-00003.gguf: key \"split.tensors.count\": is 3, but should be");

	b = part_of(1, 3, 3);
	gguf_build_tensor(&b, "a", QUANT_F32, 2, ne_4x2, eight, 32);
	refuse_split(d, b, "m-00002-of-00003.gguf",
		     "key \"split.tensors.count\": is 3, but should be 4");

	b = part_of(2, 3, 3);
	gguf_build_tensor(&b, "a", QUANT_F32, 2, ne_4x2, eight, 32);
	refuse_split(d, b, "m-00003-of-00003.gguf",
		     "m-00003-of-00003.gguf: tensor \"a\": is there twice");

	b = part_of(1, 3, 3);
	b.version = 9;
	refuse_split(d, b, "m-00002-of-00003.gguf", "m-00002-of-00003.gguf: has GGUF version 9");
}

/*
 * The bound on directories is for all parts together: 200 MiB (sparse) in each of two are too much.
 */
static void test_split_sparse(void **state)
{
	struct folder *d = *state;
	const size_t bytes = (size_t)200 << 20;

	for (uint32_t no = 0; no < 2; no++) {
		struct gguf_build b = part_of(no, 2, 0);

		gguf_build_array(&b, "bomb", GGUF_U8, bytes);
		gguf_build_write(&b, in_folder(d, no ? "m-00002-of-00002.gguf"
						     : "m-00001-of-00002.gguf"));
		if (truncate(d->file, (off_t)bytes + 4096) < 0)
			skip_because("no sparse file can be made here: %m");
	}
	refuse_path(in_folder(d, "m-00001-of-00002.gguf"), -EBADMSG,
		    "m-00002-of-00002.gguf: key \"bomb\": 209715200 bytes of an array do not fit in a "
		    "directory of at most 256 MiB");
}

static void test_split_alone(void **state)
{
	struct folder *d = *state;
	struct gguf_build b;
	struct image m;

	for (uint32_t count = 0; count < 2; count++) {
		_cleanup_(gguf_closep) struct gguf *g = NULL;

		b = part_of(0, count, 0);
		gguf_build_write(&b, in_folder(d, "merged.gguf"));
		assert_int_equal(gguf_open(d->file, &g, NULL), 0);
		assert_int_equal(gguf_n_parts(g), 1);
	}
	b = part_of(0, 1, 0);
	m = must_open(&b);
	image_done(&m);
	b = part_of(0, 2, 0);
	refuse(&b, "key \"split.count\": is 2, but should be 1");
}

static bool open_real(const char *path)
{
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(freep) char *error = NULL;
	const struct gguf_array *tokens;
	uint64_t bytes = 0, start = now_us();
	int r = gguf_open(path, &g, &error);
	uint64_t took = now_us() - start;
	const char *s;
	size_t len;

	if (r == -ENOENT)
		return false;
	if (r < 0)
		fail_msg("%s", error);
	assert_int_equal(gguf_get_str(g, "general.architecture", &s, &len), 0);
	tokens = gguf_get_array(g, "tokenizer.ggml.tokens");
	assert_non_null(tokens);
	assert_true(gguf_array_is_str(tokens));
	assert_int_equal(gguf_array_str(tokens, gguf_array_n(tokens) - 1, &s, &len), 0);
	assert_true(len > 0 && len < 1024);
	for (size_t i = 0; i < gguf_n_tensors(g); i++)
		bytes += gguf_tensor_at(g, i)->bytes;
	assert_true(bytes <= gguf_part(g, 0)->bytes);
	printf("# %s: %zu tokens, %zu tensors, opened in %.1f ms\n", strrchr(path, '/') + 1,
	       gguf_array_n(tokens), gguf_n_tensors(g), (double)took / 1000);
	return true;
}

static size_t open_folder(const char *shared, const char *name)
{
	_cleanup_(freep) char *path = NULL;
	struct dirent **files;
	size_t opened = 0;
	int n;

	if (asprintf(&path, "%s/%s", shared, name) < 0)
		abort();
	n = scandir(path, &files, NULL, alphasort);
	for (int i = 0; i < n; i++) {
		_cleanup_(freep) char *file = NULL;
		size_t len = strlen(files[i]->d_name);

		if (asprintf(&file, "%s/%s", path, files[i]->d_name) < 0)
			abort();
		if (len > 5 && streq(files[i]->d_name + len - 5, ".gguf"))
			opened += open_real(file);
		free(files[i]);
	}
	if (n >= 0)
		free(files);
	return opened;
}

static void test_shared_files(void **state)
{
	const char *shared = getenv("RESIDENTD_SHARED") ?: "../shared";
	size_t opened = open_folder(shared, "models");

	(void)state;
	opened += open_folder(shared, "vocab");
	if (opened == 0)
		skip_because("no GGUF files in %s", shared);
}

static void test_tiny_model(void **state)
{
	static const char path[] = "tests/models/tiny-qwen35moe-stories-q8_0.gguf";
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	const struct gguf_tensor *t;
	uint32_t v;

	(void)state;
	if (access(path, R_OK) < 0)
		skip_because("%s: %m (run from the repository root)", path);
	assert_int_equal(gguf_open(path, &g, NULL), 0);
	assert_int_equal(gguf_get_u32(g, "qwen35moe.expert_count", &v), 0);
	assert_int_equal(v, 32);
	t = gguf_tensor(g, "blk.0.ffn_down_exps.weight");
	assert_non_null(t);
	assert_int_equal(t->type, QUANT_Q8_0);
	assert_int_equal(t->n_dims, 3);
	assert_int_equal(t->ne[0], 64);
	assert_int_equal(t->ne[1], 128);
	assert_int_equal(t->ne[2], 32);
	assert_int_equal(t->bytes, 64 / 32 * 34 * 128 * 32);
}

#define in_a_folder(f) cmocka_unit_test_setup_teardown(f, folder_setup, folder_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_quant_types),
		cmocka_unit_test(test_quant_row_bytes),
		cmocka_unit_test(test_scalars),
		cmocka_unit_test(test_scalar_refusals),
		cmocka_unit_test(test_arrays),
		cmocka_unit_test(test_array_refusals),
		cmocka_unit_test(test_tensors),
		cmocka_unit_test(test_version_2),
		cmocka_unit_test(test_no_keys_no_tensors),
		cmocka_unit_test(test_alignments),
		cmocka_unit_test(test_many_names),
		cmocka_unit_test(test_large_vocabulary),
		cmocka_unit_test(test_no_gguf),
		cmocka_unit_test(test_versions),
		cmocka_unit_test(test_n_kv_wrap),
		cmocka_unit_test(test_n_kv_beyond_file),
		cmocka_unit_test(test_n_tensors_wrap),
		cmocka_unit_test(test_truncated),
		cmocka_unit_test(test_corrupted),
		cmocka_unit_test(test_string_lengths),
		cmocka_unit_test(test_array_lengths),
		cmocka_unit_test(test_array_string_beyond_file),
		cmocka_unit_test(test_value_types),
		cmocka_unit_test(test_nested_arrays),
		cmocka_unit_test(test_bools),
		cmocka_unit_test(test_duplicate_keys),
		cmocka_unit_test(test_key_names),
		cmocka_unit_test(test_error_text_is_printable),
		cmocka_unit_test(test_alignment_values),
		cmocka_unit_test(test_dims_overflow),
		cmocka_unit_test(test_dims),
		cmocka_unit_test(test_dims_count_wraps),
		cmocka_unit_test(test_rows_of_blocks),
		cmocka_unit_test(test_tensor_types),
		cmocka_unit_test(test_tensor_beyond_file),
		cmocka_unit_test(test_tensor_misaligned),
		cmocka_unit_test(test_tensors_overlap),
		cmocka_unit_test(test_tensor_names),
		in_a_folder(test_file),
		in_a_folder(test_no_files),
		in_a_folder(test_sparse_file),
		in_a_folder(test_directory_cut),
		in_a_folder(test_cut_while_parsed),
		in_a_folder(test_cut_later),
		in_a_folder(test_changed),
		in_a_folder(test_split),
		in_a_folder(test_split_names),
		in_a_folder(test_split_disagrees),
		in_a_folder(test_split_sparse),
		in_a_folder(test_split_alone),
		cmocka_unit_test(test_shared_files),
		cmocka_unit_test(test_tiny_model),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
