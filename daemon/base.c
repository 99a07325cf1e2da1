/* SPDX-License-Identifier: MIT */
/*
 * base.c: growable strings and token lists, and error texts. See base.h. No state; any thread.
 */
#include "daemon/base.h"

#include <stdarg.h>

int fail(char **ret_error, int err, const char *format, ...)
{
	va_list ap;
	char *s = NULL;

	if (!ret_error)
		return err;
	va_start(ap, format);
	if (vasprintf(&s, format, ap) < 0)
		s = NULL;
	va_end(ap);
	*ret_error = s;
	return err;
}

int buf_reserve(struct buf *b, size_t extra)
{
	size_t need, alloc;
	char *p;

	if (!add_ok(b->len, extra, &need) || !add_ok(need, 1, &need))
		return -ENOMEM;
	if (need <= b->alloc)
		return 0;
	if (!mul_ok(need, 2, &alloc))
		alloc = need;
	alloc = MAX(alloc, (size_t)64);
	p = realloc(b->data, alloc);
	if (!p)
		return -ENOMEM;
	b->data = p;
	b->alloc = alloc;
	b->data[b->len] = 0;
	return 0;
}

int buf_append(struct buf *b, const void *data, size_t len)
{
	int r = buf_reserve(b, len);

	if (r < 0)
		return r;
	if (len > 0)
		memcpy(b->data + b->len, data, len);
	b->len += len;
	b->data[b->len] = 0;
	return 0;
}

int buf_printf(struct buf *b, const char *format, ...)
{
	va_list ap;
	int n, r;

	va_start(ap, format);
	n = vsnprintf(NULL, 0, format, ap);
	va_end(ap);
	if (n < 0)
		return -EINVAL;
	r = buf_reserve(b, (size_t)n);
	if (r < 0)
		return r;
	va_start(ap, format);
	vsnprintf(b->data + b->len, (size_t)n + 1, format, ap);
	va_end(ap);
	b->len += (size_t)n;
	return 0;
}

void buf_consume(struct buf *b, size_t n)
{
	if (n >= b->len) {
		b->len = 0;
	} else {
		memmove(b->data, b->data + n, b->len - n);
		b->len -= n;
	}
	if (b->data)
		b->data[b->len] = 0;
}

void buf_done(struct buf *b)
{
	free(b->data);
	*b = (struct buf){};
}

int tokens_append(struct tokens *t, const int32_t *ids, size_t n)
{
	size_t need, alloc, bytes;
	int32_t *p;

	if (!add_ok(t->n, n, &need))
		return -ENOMEM;
	if (need > t->alloc) {
		alloc = MAX(need + need / 2, (size_t)64);
		if (!mul_ok(alloc, sizeof(*p), &bytes))
			return -ENOMEM;
		p = realloc(t->ids, bytes);
		if (!p)
			return -ENOMEM;
		t->ids = p;
		t->alloc = alloc;
	}
	if (n > 0)
		memcpy(t->ids + t->n, ids, n * sizeof(*ids));
	t->n = need;
	return 0;
}

void tokens_done(struct tokens *t)
{
	free(t->ids);
	*t = (struct tokens){};
}
