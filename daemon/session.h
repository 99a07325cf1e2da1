/* SPDX-License-Identifier: MIT */
/*
 * session.h: conversations, by id and owner. The engine's half (tokens, memory) hangs behind an opaque pointer.
 *
 * Loop thread. A session belongs to the uid that opened it, and no other uid learns that it exists. Without keep it ends with its
 * connection; with keep by CloseSession, or when it was not used for KeepSec. One request at a time.
 */
#pragma once

#include "daemon/daemon.h"

#define SESSION_ID_LEN 32 /* hex digits of 128 random bits */

struct session {
	struct session *prev, *next;
	char id[SESSION_ID_LEN + 1];
	uid_t uid;
	bool keep;
	struct conn *owner; /* NULL when kept */
	struct engine_session *engine;
	bool busy;           /* a request or a clone runs on it */
	bool doomed;         /* closed while busy: ends when that does */
	size_t context_used; /* tokens */
	uint64_t used_us;
};

/* For the connection's user; -EUSERS: too many (of this user, or in all); -ENOMEM. */
int session_open(struct daemon *d, struct conn *owner, bool keep, struct session **ret);
/* NULL when there is none of this id that belongs to uid. */
struct session *session_find(struct daemon *d, uid_t uid, const char *id);
void session_close(struct daemon *d, struct session *s); /* at once, or when what runs on it has ended */
void session_release(struct daemon *d, struct session *s);         /* no longer busy */
void session_close_of(struct daemon *d, const struct conn *owner); /* the connection is gone */
void session_close_all(struct daemon *d);
size_t session_count(const struct daemon *d, uid_t uid);
