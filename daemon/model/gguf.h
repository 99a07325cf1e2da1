/* SPDX-License-Identifier: MIT */
/*
 * gguf.h: reads GGUF v2/v3 files, one or split, over a read-only mapping.
 *
 * Owns the mappings and the parsed directory; everything it returns lives until gguf_close(). Immutable after opening,
 * so any thread may read. Refuses to know what a key means. Invariant: nothing is returned that was not checked against
 * the file's size; a file is hostile until gguf_open() has returned 0.
 */
#pragma once

#include "daemon/base.h"
#include "kernels/cpu/quant.h"

struct gguf;
struct gguf_array;

#define GGUF_MAX_DIMS 4

struct gguf_tensor {
	const char *name; /* NUL-terminated, without NULs inside */
	uint32_t type;    /* enum quant_type or another known type (quant_info() is never NULL) */
	uint32_t n_dims;
	uint64_t ne[GGUF_MAX_DIMS]; /* ne[0] is the row length; unused dims are 1 */
	uint64_t bytes;             /* of the whole tensor, rows without padding */
	uint32_t part;              /* which file of a split model */
	uint64_t offset;            /* from the start of that file */
	const void *data; /* in the mapping; at least 8-byte aligned, 32 unless the file says otherwise */
};

/* One file of the model. fd stays open, owned by struct gguf. */
struct gguf_part {
	const char *path;
	int fd;
	uint64_t bytes;
	const void *data;
};

/*
 * Opens path; when its name is -00001-of-0000N.gguf and the file says split.count > 1, the siblings too (any other part of
 * a split is refused, with the name of the first part). On error returns -errno (-EBADMSG: not a valid GGUF; -ENOENT,
 * -EACCES...: the file; -EIO: it became unreadable meanwhile) and sets *ret_error to one malloc'd line that names the file, the key or tensor, and the reason;
 * bytes from the file appear in it printable only.
 */
int gguf_open(const char *path, struct gguf **ret, char **ret_error);
/* The same over caller's memory (kept by the caller until close; 32-byte aligned): for fuzzing and tests. Single part. */
int gguf_open_memory(const void *data, size_t bytes, const char *label, struct gguf **ret,
		     char **ret_error);
struct gguf *gguf_close(struct gguf *g); /* accepts NULL, returns NULL */
DEFINE_CLEANUP(struct gguf *, gguf_close)

/*
 * The file was truncated or its disk failed under the mapping: zeros were read in its place (see guard.h), so nothing that
 * was computed since is worth anything. Any thread, one atomic load per part.
 */
bool gguf_broken(const struct gguf *g);
/* -ESTALE: a part has another size or modification time than when it was opened; -errno: cannot be asked. One fstat() per part. */
int gguf_check_unchanged(const struct gguf *g);

size_t gguf_n_parts(const struct gguf *g);
const struct gguf_part *gguf_part(const struct gguf *g, size_t i);
size_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i); /* file order, part by part */
const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name); /* NULL when absent; O(log n) */

/* Metadata of the first part. 0, -ENOENT (absent), -EINVAL (another type, negative or out of range). ret_ untouched on error. */
bool gguf_has(const struct gguf *g, const char *key);                   /* of whatever type */
int gguf_get_u64(const struct gguf *g, const char *key, uint64_t *ret); /* any integer type >= 0 */
int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *ret);
int gguf_get_f32(const struct gguf *g, const char *key, float *ret); /* f32 or f64, finite */
int gguf_get_bool(const struct gguf *g, const char *key, bool *ret);
int gguf_get_str(const struct gguf *g, const char *key, const char **ret,
		 size_t *ret_len); /* not NUL-terminated */
/* An array; NULL when absent or no array. Element accessors check type and bound: 0, -EINVAL, -ERANGE. */
const struct gguf_array *gguf_get_array(const struct gguf *g, const char *key);
size_t gguf_array_n(const struct gguf_array *a);
bool gguf_array_is_str(const struct gguf_array *a);
int gguf_array_str(const struct gguf_array *a, size_t i, const char **ret, size_t *ret_len); /* O(1) */
int gguf_array_i64(const struct gguf_array *a, size_t i, int64_t *ret); /* integer and bool elements */
int gguf_array_u32(const struct gguf_array *a, size_t i, uint32_t *ret); /* integer elements >= 0 */
int gguf_array_f32(const struct gguf_array *a, size_t i, float *ret);
