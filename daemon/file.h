/* SPDX-License-Identifier: MIT */
/*
 * file.h: small files as a whole: read with a bound, replaced atomically.
 *
 * No state, never logs. Loop thread, since both may wait for the disk.
 */
#pragma once

#include "daemon/base.h"

#include <sys/types.h>

/* Appends the file to b. -EFBIG beyond bytes_max, or -errno; then b may have part of it. Never waits for a FIFO's writer. */
int file_read(const char *path, size_t bytes_max, struct buf *b);
/* Who opens path finds the old content or the new one, also after a crash. -errno: the old one is still there. One writer. */
int file_replace(const char *path, const void *data, size_t len, mode_t mode);
