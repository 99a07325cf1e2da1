/* SPDX-License-Identifier: MIT */
/*
 * heat.h: heat of a model's blocks in a file of the state directory, so that a restart begins warm.
 *
 * Pure but for the one file. Any thread; the engine thread in practice, at load, at unload and now and then. Format: magic, version,
 * identity, count, n_blocks little-endian 16-bit numbers, and a checksum over all before it. Hostile until checked: a file that
 * is not exactly that is refused. Invariant: the file is replaced whole (temporary name, fsync, rename) or not at all.
 */
#pragma once

#include "daemon/base.h"

/* "<directory>/heat-<identity as 16 hex digits>"; malloc'd, NULL: out of memory. */
char *heat_path(const char *directory, uint64_t identity);
/* -ENOENT; -EBADMSG: damaged, or of another model or version; -errno. heat: n_blocks numbers, untouched on error. */
int heat_load(const char *path, uint64_t identity, uint32_t n_blocks, uint16_t *heat);
int heat_save(const char *path, uint64_t identity, uint32_t n_blocks, const uint16_t *heat);
