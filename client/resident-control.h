/* SPDX-License-Identifier: MIT */
/*
 * resident-control.h: the other half of libresident: control of residentd over the system bus.
 *
 * Nothing here needs a connection of resident.h, or the reverse; questions and answers go over that
 * one only. The same rules hold: a struct resident_control belongs to one thread at a time and does
 * not survive fork(); functions return 0, or -errno for what happened here, or -RESIDENT_E_... for
 * what the service said, and resident_control_last_error() has the text. Text is UTF-8. Structures
 * and strings that are handed out stay valid until the next call on the same connection; descriptors
 * that are handed out are the caller's, and close-on-exec.
 *
 * Codes of this half, beside those of the service:
 *   -ECONNREFUSED   the service is not on the bus and could not be started
 *   -ECONNRESET     the service or the bus ended during the call (*)
 *   -ENOTCONN       the bus has ended before (*)
 *   -ETIMEDOUT      no reply in time; what was asked for may still happen
 *   -EACCES         the configuration of the bus does not allow it
 *   -EINVAL         an argument, refused here or by the service
 *   -EILSEQ         an argument is not UTF-8
 *   -EOPNOTSUPP     this service does not know it
 *   -EPROTO         the reply is not what the interface promises
 *   -EREMOTEIO      an error that this library does not know; the text has its name
 *   -EBUSY          called from the callback
 * (*) When the bus has ended, resident_control_process() returns -ENOTCONN, and the connection can
 * only be closed. After anything else it is as good as before.
 */
#ifndef RESIDENT_CONTROL_H
#define RESIDENT_CONTROL_H

#include "resident.h"

#ifdef __cplusplus
extern "C" {
#endif

struct resident_control; /* one connection to the bus */

/* Connects to the bus at address (as D-Bus writes it, "unix:path=..."); NULL: the system bus
 * ($DBUS_SYSTEM_BUS_ADDRESS, not in set-uid programs). Does not start the service. -ENOENT,
 * -ECONNREFUSED: there is no bus; -EACCES: it does not let this user in. */
int resident_control_connect(const char *address, struct resident_control **ret);
/* What was handed out as a descriptor stays open. Accepts NULL; returns NULL. Never from the
 * callback. */
struct resident_control *resident_control_close(struct resident_control *c);
/* How long a call may wait; default 30 s, 0: for ever. Loading a model and a person who is asked for
 * a password can take longer. */
void resident_control_set_timeout(struct resident_control *c, uint32_t timeout_ms);
/* May the user be asked for a password? Default: no. */
void resident_control_set_interactive(struct resident_control *c, bool interactive);
/* The last failure on this connection; never NULL. */
const struct resident_error *resident_control_last_error(const struct resident_control *c);

/* ---- the service ---- */

struct resident_control_availability {
	const char *state;  /* "available", "loading", "unavailable", "stopping" */
	const char *reason; /* why it is not available, and what to do; or NULL */
	const char *model;  /* name; NULL: none */
	uint32_t sessions, queued;
	uint32_t retry_after_ms;
};

struct resident_control_status {
	const char *version, *state, *reason /* or NULL */;
	const char *model; /* object path; NULL: none */
	uint32_t holds, sessions;
	uint64_t requests_total;
};

int resident_control_get_availability(struct resident_control *c,
				      const struct resident_control_availability **ret);
int resident_control_get_status(struct resident_control *c, const struct resident_control_status **ret);

/* *ret_fd is a connected socket for resident_connect_fd(). The session ends when it is closed, and
 * when c is; with keep only when c is. *ret_path: its object. */
int resident_control_open_session(struct resident_control *c, bool keep, const char **ret_path,
				  int *ret_fd);

/*
 * Leases: they end when the last copy of *ret_fd is closed, not with c. who and why are shown to
 * administrators, at most 256 bytes each. The descriptor becomes readable when the service has
 * ended, and the lease with it.
 */
/* Keeps the model loaded and the service running. */
int resident_control_hold(struct resident_control *c, const char *who, const char *why, int *ret_fd);
/* Asks for bytes of GPU memory (0: all of it) to be left to others. */
int resident_control_yield_gpu(struct resident_control *c, const char *who, const char *why,
			       uint64_t bytes, int *ret_fd);

/* These two are as the interface has them, and grow no more. */
struct resident_control_session {
	const char *path; /* object */
	uint32_t uid;
	int64_t tokens_used;
	bool busy;
};

struct resident_control_lease {
	const char *kind; /* "hold", "yield-gpu" */
	uint32_t uid;
	const char *who, *why;
	uint32_t pid;
	uint64_t since_us; /* CLOCK_REALTIME */
};

/* The caller's sessions; those of all users for who may see them. */
int resident_control_list_sessions(struct resident_control *c,
				   const struct resident_control_session **ret, size_t *ret_n);
int resident_control_list_holds(struct resident_control *c,
				const struct resident_control_lease **ret, size_t *ret_n);

/* ---- administration ---- */

struct resident_control_limit {
	const char *key, *value; /* as in policy.d; an empty value removes the setting */
	const char *source;      /* "FILE:LINE" or "default"; not looked at when set */
};

/* What applies to a user (name or number), in the order of the service. */
int resident_control_get_user_limits(struct resident_control *c, const char *user,
				     const struct resident_control_limit **ret, size_t *ret_n);
/* runtime: until the next boot. All of them are set, or none. */
int resident_control_set_user_limits(struct resident_control *c, const char *user,
				     const struct resident_control_limit *limits, size_t n,
				     bool runtime);
/* name: of the models directory, not a path. make_default: also after a restart. */
int resident_control_load_model(struct resident_control *c, const char *name, bool make_default);
int resident_control_unload_model(struct resident_control *c);
/* Reads configuration and policy again. */
int resident_control_reload(struct resident_control *c);

/* ---- changes of state ---- */

struct resident_control_event {
	const char *state;  /* NULL: the service has left the bus; it returns when somebody asks */
	const char *reason; /* or NULL */
};

/* Called from resident_control_process() only; no other function may be called on c from it but
 * resident_control_last_error(). What event points to is valid until it returns. */
typedef void (*resident_control_event_fn)(struct resident_control *c,
					  const struct resident_control_event *event, void *userdata);

/* Asks to be told of changes; fn NULL: no more. It does not tell the present state, and does not
 * start the service. */
int resident_control_watch(struct resident_control *c, resident_control_event_fn fn, void *userdata);
/* For an event loop: poll this descriptor for POLLIN, then call resident_control_process(). It stays
 * the same, and is also ready for what arrived during another call. */
int resident_control_fd(const struct resident_control *c);
/* Never blocks. Several changes since the last call are reported as one, the latest. 1: fn was
 * called; 0: nothing to tell; -ENOTCONN: the bus has ended. */
int resident_control_process(struct resident_control *c);

#ifdef __cplusplus
}
#endif

#endif
