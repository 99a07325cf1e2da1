/* SPDX-License-Identifier: MIT */
/*
 * varlink.h: the wire: NUL-terminated JSON objects, checked before they are believed.
 *
 * Pure: no sockets, no sessions, any thread. Frames are cut from a byte buffer and refused by length before they are parsed; nesting and the number
 * of values are bounded by a scan of the bytes before jansson allocates anything (it needs 46 bytes of memory for one of `[],`).
 * struct args reads a parameters object field by field and refuses what is missing, of another type, out of range or unknown.
 * Used by the daemon's loop thread and by libresident.
 */
#pragma once

#include "daemon/base.h"

#include <jansson.h>

#define VARLINK_NESTING_MAX 64
#define VARLINK_VALUES_MAX  200000 /* values (and so allocations) in one message */

/* Looks for a whole frame at the start of data. 1: ret_len bytes before its NUL; 0: not complete yet; -EMSGSIZE: longer than max (whether
 * or not its end has arrived). *scanned: bytes known to hold no NUL, 0 at the start of a frame: kept by the caller while data grows. */
int varlink_frame(const char *data, size_t len, size_t max, size_t *scanned, size_t *ret_len);
/* Bytes to an object. -EBADMSG with a text naming the reason (JSON syntax and position, nesting, too many values, invalid UTF-8, a NUL in a
 * string, no object), never quoting the message; -ENOMEM. Duplicate keys are refused. */
int varlink_parse(const char *data, size_t len, json_t **ret, char **ret_error);

/* A method call as parsed. Strings point into msg. */
struct varlink_call {
	json_t *msg;           /* owned */
	const char *method;    /* "org.residentd.Inference.Send" */
	const char *interface; /* NUL-terminated copy, owned */
	const char *member;    /* points into method, after the last dot */
	json_t *parameters;    /* borrowed; an empty object when absent */
	bool more, oneway, upgrade;
};
int varlink_call_parse(const char *data, size_t len, struct varlink_call *ret, char **ret_error);
void varlink_call_done(struct varlink_call *c);

/* Message to bytes with the final NUL, appended to out. parameters may be NULL; references are not taken. -ENOMEM. */
int varlink_put_reply(struct buf *out, json_t *parameters, bool continues);
int varlink_put_error(struct buf *out, const char *error, json_t *parameters);
int varlink_put_call(struct buf *out, const char *method, json_t *parameters, bool more, bool oneway);

/*
 * Typed reading of an object. Each call marks the field as known; the first problem is remembered (field name and reason) and later calls
 * do nothing, so a method reads all fields and checks once with args_end(). Absent optional fields (or null) leave *ret alone and
 * return false; true when the field was there and valid.
 */
struct args {
	json_t *obj;
	const char *bad; /* name of the first offending field; NULL: none so far */
	const char *why; /* static text */
	const char *seen[48];
	size_t n_seen;
};
void args_begin(struct args *a, json_t *obj);
bool args_str(struct args *a, const char *key, bool required, size_t max_len, const char **ret,
	      size_t *ret_len);
bool args_bool(struct args *a, const char *key, bool *ret);
bool args_i64(struct args *a, const char *key, bool required, int64_t min, int64_t max,
	      int64_t *ret); /* 1.0 is no integer */
bool args_f64(struct args *a, const char *key, double min, double max, double *ret); /* integers too; finite */
bool args_array(struct args *a, const char *key, bool required, size_t max_items, json_t **ret); /* borrowed */
bool args_object(struct args *a, const char *key, bool required, json_t **ret); /* borrowed */
/* Marks a problem that the caller found. */
void args_refuse(struct args *a, const char *key, const char *why);
/* 0, or -EINVAL when a field was bad or unknown: then bad and why are set. */
int args_end(struct args *a);
