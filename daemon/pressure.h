/* SPDX-License-Identifier: MIT */
/*
 * pressure.h: when memory runs short on the machine, idle conversations give back what they hold (their tokens stay). Loop thread.
 *
 * The descriptor is the one that systemd names ($MEMORY_PRESSURE_WATCH, 254 and later); on older ones, and without systemd, the kernel's
 * /proc/pressure/memory. Without either the service works as before, and says so at debug.
 */
#pragma once

#include "daemon/daemon.h"

void pressure_start(struct daemon *d);
void pressure_stop(struct daemon *d);

/* What is to be written to a watched file: base64 as in $MEMORY_PRESSURE_WRITE. Returns the length, or -EINVAL; ret has room for max. */
ssize_t pressure_decode(const char *base64, unsigned char *ret, size_t max);
