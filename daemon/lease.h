/* SPDX-License-Identifier: MIT */
/*
 * lease.h: things held while a descriptor stays open: keep the model warm (hold), leave the GPU to others (yield-gpu).
 *
 * Loop thread. A lease is one end of a socket pair; it ends when the last copy of the other end closes, however that happens.
 *
 * yield-gpu leases add up, beyond what is always left to others (VramReserve=); one that names no bytes wants all. The engine is told at once,
 * and experts leave the card between two steps, coldest first, within a second or so; answers go on. Trunk and KV stay where they are, so that
 * "all" is every expert slot, and more may be asked for than can be had. What a lease freed is taken again some time after its end, slowly.
 */
#pragma once

#include "daemon/daemon.h"

enum lease_kind { LEASE_HOLD, LEASE_YIELD_GPU };

struct lease {
	struct lease *prev, *next;
	struct daemon *daemon;
	enum lease_kind kind;
	uid_t uid;
	pid_t pid;
	char *who, *why;   /* at most 256 bytes each; printable, the caller sees to it */
	uint64_t since_us; /* CLOCK_REALTIME */
	uint64_t bytes;    /* yield-gpu: asked for; 0: all */
	int fd;            /* our end */
	sd_event_source *source;
};

/* *ret_fd is the caller's end (CLOEXEC), to be passed on and closed. -EUSERS: more than 64 of this uid; -errno. */
int lease_new(struct daemon *d, enum lease_kind kind, uid_t uid, pid_t pid, const char *who,
	      const char *why, uint64_t bytes, int *ret_fd);
void lease_free_all(struct daemon *d);
const char *lease_kind_to_string(enum lease_kind k);
