/* SPDX-License-Identifier: MIT */
/*
 * base.h: the few macros and inline helpers that every part of residentd uses, the client library included.
 *
 * Owns no state, calls nothing but libc, may be used from any thread. The only place for macro tricks.
 * Invariant: every size that comes from outside (file, socket, option) goes through mul_ok()/add_ok() before it is
 * used as a length.
 */
#pragma once

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
/* The counter keeps nested uses from shadowing each other. */
#define PASTE_(a, b)  a##b
#define PASTE(a, b)   PASTE_(a, b)
#define PICK_(n, op, a, b)                                                  \
	({                                                                  \
		__typeof__(a) PASTE(a_, n) = (a);                           \
		__typeof__(b) PASTE(b_, n) = (b);                           \
		PASTE(a_, n) op PASTE(b_, n) ? PASTE(a_, n) : PASTE(b_, n); \
	})
#define MIN(a, b)        PICK_(__COUNTER__, <, a, b)
#define MAX(a, b)        PICK_(__COUNTER__, >, a, b)
#define CLAMP(x, lo, hi) MIN(MAX((x), (lo)), (hi))
#define ALIGN_UP(x, a)   (((x) + ((a)-1)) & ~((__typeof__(x))(a)-1)) /* a: a power of two */
#define _cleanup_(f)     __attribute__((cleanup(f)))
#define _printf_(a, b)   __attribute__((format(printf, a, b)))
#define _public_         __attribute__((visibility("default")))

#define TAKE_PTR(p)                        \
	({                                 \
		__typeof__(p) *pp_ = &(p); \
		__typeof__(p) p_ = *pp_;   \
		*pp_ = NULL;               \
		p_;                        \
	})
#define TAKE_FD(fd)                \
	({                         \
		int *pfd_ = &(fd); \
		int fd_ = *pfd_;   \
		*pfd_ = -1;        \
		fd_;               \
	})

/* DEFINE_CLEANUP(struct gguf *, gguf_close) defines gguf_closep() for _cleanup_(gguf_closep). */
#define DEFINE_CLEANUP(type, func)          \
	static inline void func##p(type *p) \
	{                                   \
		if (*p)                     \
			*p = func(*p);      \
	}

static inline void freep(void *p)
{
	free(*(void **)p);
}

static inline void closep(int *fd)
{
	if (*fd >= 0)
		close(*fd);
}

static inline void fclosep(FILE **f)
{
	if (*f)
		fclose(*f);
}

static inline bool mul_ok(size_t a, size_t b, size_t *ret)
{
	return !__builtin_mul_overflow(a, b, ret);
}

static inline bool add_ok(size_t a, size_t b, size_t *ret)
{
	return !__builtin_add_overflow(a, b, ret);
}

static inline bool streq(const char *a, const char *b)
{
	return strcmp(a, b) == 0;
}

static inline bool startswith(const char *s, const char *prefix)
{
	return strncmp(s, prefix, strlen(prefix)) == 0;
}

static inline uint64_t now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* Writes a formatted error text to *ret_error (malloc'd, may be NULL when memory is short; ret_error may be NULL) and
 * returns err unchanged, so that a check reads `return fail(ret_error, -EINVAL, "…")`. */
_printf_(3, 4) int fail(char **ret_error, int err, const char *format, ...);

/* A growable byte string. Zero-initialised is empty; data is NUL-terminated whenever it is not NULL. */
struct buf {
	char *data;
	size_t len, alloc;
};

int buf_reserve(struct buf *b, size_t extra); /* -ENOMEM */
int buf_append(struct buf *b, const void *data, size_t len);
_printf_(2, 3) int buf_printf(struct buf *b, const char *format, ...);
void buf_consume(struct buf *b, size_t n); /* drops the first n bytes */
void buf_done(struct buf *b);              /* frees; b is empty and usable again */

/* A growable list of token ids. */
struct tokens {
	int32_t *ids;
	size_t n, alloc;
};

int tokens_append(struct tokens *t, const int32_t *ids, size_t n); /* -ENOMEM */
void tokens_done(struct tokens *t);
