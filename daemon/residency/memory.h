/* SPDX-License-Identifier: MIT */
/*
 * memory.h: how much memory there is for us: the machine's, and what control groups leave.
 *
 * Owns the open files of /proc and of the control groups (v1 and v2; the group of the process and all above it), so that reading again is
 * a few preads. One thread at a time. Refuses to know what the memory is for. `root` in front of all paths is for tests.
 */
#pragma once

#include "daemon/base.h"

struct memory;

struct memory_state {
	uint64_t total;     /* MemTotal, or the tightest control group's limit if that is less */
	uint64_t available; /* what could be taken now without swapping: MemAvailable, or less: the tightest group's limit, less its usage, plus
			       its page cache that can be reclaimed */
	uint64_t machine_total;     /* MemTotal alone */
	uint64_t machine_available; /* MemAvailable alone */
	uint64_t group_limit; /* memory.max / memory.high / memory.limit_in_bytes: the lowest; UINT64_MAX: none */
	uint64_t group_available; /* as above, of the groups alone; UINT64_MAX: no limit */
};

/* root: "" or a directory that holds proc/ and sys/. -ENOMEM, -errno when not even meminfo can be read. */
int memory_open(const char *root, struct memory **ret);
struct memory *memory_close(struct memory *m); /* accepts NULL, returns NULL */
DEFINE_CLEANUP(struct memory *, memory_close)
int memory_read(struct memory *m, struct memory_state *ret);
uint64_t memory_anonymous(const struct memory *m); /* of this process: what nobody can take from it; 0: not known */

/* MemoryReserve=auto: the larger of 1 GiB and 10 % of the machine's memory. */
uint64_t memory_default_reserve(uint64_t machine_total);
/* What stays free below a control group's limit that is all ours: 4 %, at least 48 MiB: what one step of reaction (see pressure.c) lets others take. */
uint64_t memory_group_slack(uint64_t group_limit);
/*
 * The most that the model may take in all: what is available now, plus what we hold that cannot be reclaimed, less the reserve (machine) and
 * the slack (group), whichever leaves less; 0 when nothing. own_bytes: anonymous and locked memory that is ours already.
 */
uint64_t memory_budget(const struct memory_state *s, uint64_t own_bytes, uint64_t reserve_bytes);
