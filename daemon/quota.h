/* SPDX-License-Identifier: MIT */
/*
 * quota.h: tokens a uid has used today, kept over restarts.
 *
 * Loop thread. Counts prompt tokens that were not served from cache plus generated ones; a day ends at local midnight. The file is versioned and
 * checked; one that cannot be read starts at zero with one warning, one that cannot be written leaves counting in memory and says so once.
 */
#pragma once

#include "daemon/base.h"

#include <sys/types.h>

struct quota;

/* path: the file; NULL: memory only. now: seconds since the epoch (for tests). A problem is a line in warning (may be NULL). A file
 * of a newer version is kept as PATH.unknown. -ENOMEM. */
int quota_open(const char *path, time_t now, struct quota **ret, struct buf *warning);
struct quota *quota_close(struct quota *q); /* saves */
/* Never fails: who finds no room of his own is counted with the others who did not. */
void quota_add(struct quota *q, uid_t uid, uint64_t tokens, time_t now);
uint64_t quota_used(struct quota *q, uid_t uid, time_t now);
uint64_t quota_seconds_left(time_t now); /* until local midnight, at least 1 */
/* Writes when something changed since the last time; called from a timer every 30 s at most. -errno, again each time: who calls says it once. */
int quota_save(struct quota *q);
