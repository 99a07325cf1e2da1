/* SPDX-License-Identifier: MIT */
/*
 * errors.h: the one table of errors: errno <-> D-Bus name <-> varlink name <-> number on the wire.
 *
 * Static data; any thread. Every error that a client can see is a row here; numbers never change meaning.
 */
#pragma once

#include "daemon/base.h"

enum error_code {
	ERROR_NONE = 0,
	ERROR_NO_MODEL = 1,
	ERROR_LOADING = 2,
	ERROR_MODEL_BROKEN = 3,
	ERROR_NOT_SUPPORTED = 4,
	ERROR_INVALID_REQUEST = 5,
	ERROR_TOO_LARGE = 6,
	ERROR_NO_SUCH_SESSION = 7,
	ERROR_SESSION_BUSY = 8,
	ERROR_TOO_MANY_SESSIONS = 9,
	ERROR_QUEUE_FULL = 10,
	ERROR_CONTEXT_FULL = 11,
	ERROR_NO_MEMORY = 12,
	ERROR_NOT_AUTHORIZED = 13,
	ERROR_CANCELLED = 14,
	ERROR_STOPPING = 15,
	ERROR_INTERNAL = 16,
	ERROR_QUOTA_EXCEEDED = 17,
	ERROR_NO_SUCH_MODEL = 18,
	ERROR_CODE_MAX,
};

struct error_entry {
	enum error_code code;
	int err;                 /* errno it stands for, positive */
	const char *varlink;     /* "org.residentd.Inference.NoModel" */
	const char *dbus;        /* "org.residentd1.Error.NoModel" */
	const char *text;        /* default message */
	uint32_t retry_after_ms; /* default hint; 0: retrying does not help */
};

const struct error_entry *error_by_code(enum error_code code); /* never NULL; unknown -> ERROR_INTERNAL */
const struct error_entry *error_by_varlink(const char *name); /* NULL: not ours */
enum error_code error_from_errno(int err);                    /* accepts -errno or errno */
