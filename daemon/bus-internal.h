/* SPDX-License-Identifier: MIT */
/*
 * bus-internal.h: what the files of the bus share and nobody else includes. Loop thread.
 *
 * bus.c          the connection, who is on the other side, what is told to whom
 * bus-manager.c  the methods and properties of org.residentd1.Manager
 * bus-objects.c  Model, Session, User and LogControl1
 */
#pragma once

#include "daemon/bus.h"
#include "daemon/session.h"

#include <systemd/sd-bus.h>

#ifndef RESIDENTD_VERSION
#define RESIDENTD_VERSION "unknown"
#endif

#define BUS_NAME              "org.residentd1"
#define BUS_ROOT              "/org/residentd1"
#define BUS_MODEL             BUS_ROOT "/model"
#define BUS_SESSION           BUS_ROOT "/session"
#define BUS_USER              BUS_ROOT "/user"
/* Of an object path, its NUL included. */
#define BUS_SESSION_PATH_SIZE (sizeof(BUS_SESSION "/") + SESSION_ID_LEN)

/* As long as polkit itself keeps an administrator's word (auth_admin_keep). */
#define INSPECT_US (300 * UINT64_C(1000000))

/* A program on the bus that we remember until it leaves: it opened sessions, or watches them. */
struct bus_peer {
	struct bus_peer *prev, *next;
	struct bus *bus;
	char *name; /* unique */
	uid_t uid;
	sd_bus_track *track;
	uint64_t inspects_until_us; /* polkit lets it see all users' sessions; asked again after a while */
};

/* A session that ends when its peer leaves. */
struct bus_owned {
	struct bus_owned *next;
	struct bus_peer *peer;
	char id[SESSION_ID_LEN + 1];
};

struct bus {
	struct daemon *daemon;
	sd_bus *bus; /* NULL: none now */
	bool up;     /* connected, and the name is ours */
	bool told;   /* that it is not: once, until it is again */
	uint64_t retry_us;
	sd_event_source *retry;
	struct bus_peer *peers;
	struct bus_owned *owned;
	char *model_path; /* of the object that others know; NULL: none */
	size_t n_users;   /* of daemon.usage, told to others */
	/* The last sender asked for: a unique name is never given twice, so this holds. */
	char sender[64];
	uid_t sender_uid;
	pid_t sender_pid; /* 0: not known */
};

/* uid and pid of a message's sender, as the bus daemon has them from the kernel. ret_pid may be NULL. */
int bus_sender(struct bus *b, sd_bus_message *m, uid_t *ret_uid, pid_t *ret_pid);
/* Remembers the sender of m. -EUSERS: too many are remembered, in all or of this uid. */
int bus_peer(struct bus *b, sd_bus_message *m, struct bus_peer **ret);
/* Do the sessions and users of uid exist for whoever sent the message that is being handled? */
bool bus_sees(struct bus *b, uid_t uid);
/* The session, which must be the peer's, ends with it. */
int bus_own(struct bus *b, struct bus_peer *p, const struct session *s);

/* Fills error from the table of errors.h, text NULL: the table's; returns a negative errno for sd-bus. */
int bus_fail(sd_bus_error *error, enum error_code code, const char *text, uint32_t retry_after_ms);

char *bus_model_path(const struct model *m); /* malloc'd */
void bus_session_path(const struct session *s, char ret[BUS_SESSION_PATH_SIZE]);

/* bus-manager.c, bus-objects.c */
extern const sd_bus_vtable bus_manager_vtable[];
int bus_objects_add(struct bus *b);
