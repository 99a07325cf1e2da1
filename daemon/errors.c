/* SPDX-License-Identifier: MIT */
/*
 * errors.c: the table behind errors.h, and which errno of the modules becomes which of its rows.
 *
 * Constant data; any thread. Refuses to know who failed at what: callers that know better than an
 * errno name the code.
 * Invariant: every row has an errno, a number and names of its own, so that each identifies it.
 */
#include "daemon/errors.h"

#define ROW(code_, err_, name, retry, text_)                    \
	[code_] = { .code = code_,                              \
		    .err = err_,                                \
		    .varlink = "org.residentd.Inference." name, \
		    .dbus = "org.residentd1.Error." name,       \
		    .text = text_,                              \
		    .retry_after_ms = retry }

/* clang-format off */
static const struct error_entry entries[ERROR_CODE_MAX] = {
	ROW(ERROR_NO_MODEL,          ENOMEDIUM,  "NoModel",            0, "no model is installed"),
	ROW(ERROR_LOADING,           EAGAIN,     "Loading",         1000, "the model is being loaded"),
	ROW(ERROR_MODEL_BROKEN,      EBADMSG,    "ModelBroken",        0, "the model cannot be used"),
	ROW(ERROR_NOT_SUPPORTED,     EOPNOTSUPP, "NotSupported",       0, "the model or the service cannot do this"),
	ROW(ERROR_INVALID_REQUEST,   EINVAL,     "InvalidRequest",     0, "the request is not valid"),
	ROW(ERROR_TOO_LARGE,         EMSGSIZE,   "TooLarge",           0, "the request is too large"),
	ROW(ERROR_NO_SUCH_SESSION,   ENXIO,      "NoSuchSession",      0, "there is no such session"),
	ROW(ERROR_SESSION_BUSY,      EBUSY,      "SessionBusy",      500, "the session is answering another request"),
	ROW(ERROR_TOO_MANY_SESSIONS, EUSERS,     "TooManySessions", 5000, "too many sessions are open"),
	ROW(ERROR_QUEUE_FULL,        ENOBUFS,    "QueueFull",       1000, "too many requests are waiting"),
	ROW(ERROR_CONTEXT_FULL,      EXFULL,     "ContextFull",        0, "the conversation fills the context"),
	ROW(ERROR_NO_MEMORY,         ENOMEM,     "NoMemory",        1000, "not enough memory"),
	ROW(ERROR_NOT_AUTHORIZED,    EACCES,     "NotAuthorized",      0, "not permitted"),
	ROW(ERROR_CANCELLED,         ECANCELED,  "Cancelled",          0, "the request was cancelled"),
	ROW(ERROR_STOPPING,          ESHUTDOWN,  "Stopping",        2000, "the service is stopping"),
	ROW(ERROR_INTERNAL,          EREMOTEIO,  "Internal",           0, "the service failed; its log says why"),
	ROW(ERROR_QUOTA_EXCEEDED,    EDQUOT,     "QuotaExceeded",      0, "today's tokens are used up"),
	ROW(ERROR_NO_SUCH_MODEL,     ENOENT,     "NoSuchModel",        0, "there is no such model"),
};

static const struct {
	int err;
	enum error_code code;
} aliases[] = {
	{EPERM,  ERROR_NOT_AUTHORIZED},
	{ENOSYS, ERROR_NOT_SUPPORTED},
	{ERANGE, ERROR_INVALID_REQUEST},
	{E2BIG,  ERROR_TOO_LARGE},
	{EFBIG,  ERROR_TOO_LARGE},
	{ENOSPC, ERROR_NO_MEMORY}, /* the KV arena: room that others hold, so trying again helps */
};
/* clang-format on */

const struct error_entry *error_by_code(enum error_code code)
{
	if (code <= ERROR_NONE || code >= ERROR_CODE_MAX)
		code = ERROR_INTERNAL;
	return &entries[code];
}

const struct error_entry *error_by_varlink(const char *name)
{
	for (size_t i = ERROR_NONE + 1; i < ERROR_CODE_MAX; i++)
		if (streq(entries[i].varlink, name))
			return &entries[i];
	return NULL;
}

enum error_code error_from_errno(int err)
{
	if (err == 0)
		return ERROR_NONE;
	if (err < 0 && err > -4096) /* the range of errnos; also keeps the negation defined */
		err = -err;
	for (size_t i = ERROR_NONE + 1; i < ERROR_CODE_MAX; i++)
		if (entries[i].err == err)
			return entries[i].code;
	for (size_t i = 0; i < ARRAY_SIZE(aliases); i++)
		if (aliases[i].err == err)
			return aliases[i].code;
	return ERROR_INTERNAL;
}
