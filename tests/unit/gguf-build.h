/* SPDX-License-Identifier: MIT */
/*
 * gguf-build.h: makes GGUF images in memory, for every test that needs a model file, well-formed or
 * not.
 *
 * Keys and tensors are appended to two byte strings and counted; gguf_build_done() puts the header
 * before them and the data behind. Nothing is checked: a hostile file is made by appending raw
 * bytes (gguf_put_*) or by changing n_kv, n_tensors, version and alignment, which are written as
 * they then stand. Memory that runs out ends the test.
 */
#pragma once

#include "daemon/base.h"
#include "kernels/cpu/quant.h"

/* Value types of the format. */
enum gguf_build_type {
	GGUF_U8,
	GGUF_I8,
	GGUF_U16,
	GGUF_I16,
	GGUF_U32,
	GGUF_I32,
	GGUF_F32,
	GGUF_BOOL,
	GGUF_STR,
	GGUF_ARRAY,
	GGUF_U64,
	GGUF_I64,
	GGUF_F64,
};

struct gguf_build {
	struct buf kv, tensors, data;
	uint64_t n_kv, n_tensors;
	uint32_t version;
	uint32_t alignment; /* of the data; written as a key by gguf_build_alignment() only */
};

static inline struct gguf_build gguf_build_new(void)
{
	return (struct gguf_build){ .version = 3, .alignment = 32 };
}

static inline void gguf_put(struct buf *b, const void *data, size_t len)
{
	if (buf_append(b, data, len) < 0)
		abort();
}

static inline void gguf_put_u32(struct buf *b, uint32_t v)
{
	gguf_put(b, &v, sizeof(v));
}

static inline void gguf_put_u64(struct buf *b, uint64_t v)
{
	gguf_put(b, &v, sizeof(v));
}

static inline void gguf_put_str(struct buf *b, const char *s)
{
	gguf_put_u64(b, strlen(s));
	gguf_put(b, s, strlen(s));
}

/* A key and its type; the caller appends the value to b->kv. */
static inline void gguf_build_key(struct gguf_build *b, const char *key, uint32_t type)
{
	gguf_put_str(&b->kv, key);
	gguf_put_u32(&b->kv, type);
	b->n_kv++;
}

/* A key, its type, and the bytes of its value as they lie in the file. */
static inline void gguf_build_raw(struct gguf_build *b, const char *key, uint32_t type,
				  const void *value, size_t bytes)
{
	gguf_build_key(b, key, type);
	gguf_put(&b->kv, value, bytes);
}

static inline void gguf_build_u32(struct gguf_build *b, const char *key, uint32_t v)
{
	gguf_build_raw(b, key, GGUF_U32, &v, sizeof(v));
}

static inline void gguf_build_f32(struct gguf_build *b, const char *key, float v)
{
	gguf_build_raw(b, key, GGUF_F32, &v, sizeof(v));
}

static inline void gguf_build_bool(struct gguf_build *b, const char *key, bool v)
{
	gguf_build_raw(b, key, GGUF_BOOL, &v, 1);
}

static inline void gguf_build_str(struct gguf_build *b, const char *key, const char *s)
{
	gguf_build_key(b, key, GGUF_STR);
	gguf_put_str(&b->kv, s);
}

/* An array's key, element type and count; the caller appends the elements to b->kv. */
static inline void gguf_build_array(struct gguf_build *b, const char *key, uint32_t type, uint64_t n)
{
	gguf_build_key(b, key, GGUF_ARRAY);
	gguf_put_u32(&b->kv, type);
	gguf_put_u64(&b->kv, n);
}

static inline void gguf_build_strs(struct gguf_build *b, const char *key, const char *const *s, size_t n)
{
	gguf_build_array(b, key, GGUF_STR, n);
	for (size_t i = 0; i < n; i++)
		gguf_put_str(&b->kv, s[i]);
}

static inline void gguf_build_i32s(struct gguf_build *b, const char *key, const int32_t *v, size_t n)
{
	gguf_build_array(b, key, GGUF_I32, n);
	gguf_put(&b->kv, v, n * sizeof(*v));
}

static inline void gguf_build_f32s(struct gguf_build *b, const char *key, const float *v, size_t n)
{
	gguf_build_array(b, key, GGUF_F32, n);
	gguf_put(&b->kv, v, n * sizeof(*v));
}

/* Sets the alignment of what follows and writes its key. */
static inline void gguf_build_alignment(struct gguf_build *b, uint32_t alignment)
{
	b->alignment = alignment;
	gguf_build_u32(b, "general.alignment", alignment);
}

/* A tensor's record alone, as given. */
static inline void gguf_build_info(struct gguf_build *b, const char *name, uint32_t type,
				   uint32_t n_dims, const uint64_t *ne, uint64_t offset)
{
	gguf_put_str(&b->tensors, name);
	gguf_put_u32(&b->tensors, n_dims);
	gguf_put(&b->tensors, ne, n_dims * sizeof(*ne));
	gguf_put_u32(&b->tensors, type);
	gguf_put_u64(&b->tensors, offset);
	b->n_tensors++;
}

/* A tensor with its bytes, at the next aligned offset. */
static inline void gguf_build_tensor(struct gguf_build *b, const char *name, uint32_t type,
				     uint32_t n_dims, const uint64_t *ne, const void *data, size_t bytes)
{
	static const char zero[64];

	while (b->data.len % b->alignment != 0)
		gguf_put(&b->data, zero, MIN(sizeof(zero), b->alignment - b->data.len % b->alignment));
	gguf_build_info(b, name, type, n_dims, ne, b->data.len);
	gguf_put(&b->data, data, bytes);
}

/*
 * The image, which the caller frees: 64-byte aligned and exactly as large as said, so that a
 * sanitizer sees the first byte that is read too far. b is empty afterwards.
 */
static inline void *gguf_build_done(struct gguf_build *b, size_t *ret_bytes)
{
	struct buf head = {};
	size_t at, bytes;
	void *p = NULL;

	gguf_put(&head, "GGUF", 4);
	gguf_put_u32(&head, b->version);
	gguf_put_u64(&head, b->n_tensors);
	gguf_put_u64(&head, b->n_kv);
	at = head.len + b->kv.len + b->tensors.len;
	bytes = b->data.len ? ALIGN_UP(at, (size_t)b->alignment) + b->data.len : at;
	if (posix_memalign(&p, 64, bytes) != 0)
		abort();
	memset(p, 0, bytes);
	memcpy(p, head.data, head.len);
	if (b->kv.len > 0)
		memcpy((char *)p + head.len, b->kv.data, b->kv.len);
	if (b->tensors.len > 0)
		memcpy((char *)p + head.len + b->kv.len, b->tensors.data, b->tensors.len);
	if (b->data.len > 0)
		memcpy((char *)p + bytes - b->data.len, b->data.data, b->data.len);
	buf_done(&head);
	buf_done(&b->kv);
	buf_done(&b->tensors);
	buf_done(&b->data);
	*b = gguf_build_new();
	*ret_bytes = bytes;
	return p;
}

/* The image as a file. b is empty afterwards. */
static inline void gguf_build_write(struct gguf_build *b, const char *path)
{
	size_t bytes;
	_cleanup_(freep) void *p = gguf_build_done(b, &bytes);
	_cleanup_(fclosep) FILE *f = fopen(path, "we");

	if (!f || fwrite(p, 1, bytes, f) != bytes || fflush(f) != 0)
		abort();
}
