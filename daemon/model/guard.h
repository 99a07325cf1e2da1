/* SPDX-License-Identifier: MIT */
/*
 * guard.h: survives SIGBUS from a mapped file that was truncated, or whose disk failed under it.
 *
 * The handler is process-wide: when a fault lies in a guarded mapping, zero pages take the place of the file from that page on (never
 * before it), the mapping counts as broken, and the thread goes on; what it computes is worthless, so whoever used the
 * mapping asks guard_broken() before believing a result. Any other SIGBUS ends the process as it would have. Any thread. At most
 * GUARD_MAX mappings (parts of models, an old one while a new one loads).
 * Not for threads that block SIGBUS (the kernel then ends the process), and not for system calls, which return -EFAULT instead.
 * What lies beyond a cut in the last page that is left reads as zeros without any fault: see gguf_check_unchanged().
 */
#pragma once

#include "daemon/base.h"

#define GUARD_MAX 1024

struct guard;

/* Installs the handler if it is not there. -ENOSPC: too many. p: page-aligned, as mmap gave it. */
int guard_add(const void *p, size_t bytes, struct guard **ret);
struct guard *guard_remove(struct guard *g); /* when nobody reads there any more, before munmap; accepts NULL, returns NULL */
bool guard_broken(const struct guard *g);
