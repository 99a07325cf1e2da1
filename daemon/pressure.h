/* SPDX-License-Identifier: MIT */
/*
 * pressure.h: how much memory the model may have: looks at what is free, and tells the engine. Loop thread.
 *
 * Three things move it. While experts are managed, a timer reads what is available (some microseconds): the budget steps down at once and
 * grows back slowly. The kernel's or systemd's notice of pressure ($MEMORY_PRESSURE_WATCH, 254 and later; else /proc/pressure/memory)
 * makes idle conversations give back what they hold (their tokens stay) and takes a step off the budget. systemd-oomd's notice before it
 * kills takes everything that can be taken. Without any of them the service works as before, and says so at debug.
 */
#pragma once

#include "daemon/daemon.h"

void pressure_start(struct daemon *d);
void pressure_stop(struct daemon *d);
void pressure_model_changed(struct daemon *d); /* a model was loaded or unloaded, or its experts became managed */
void pressure_used(struct daemon *d);        /* a request began or ended: when is it idle? */
void pressure_last_resort(struct daemon *d); /* somebody is about to be killed */
double pressure_some_avg10(void); /* percent, of the machine; 0 where the kernel does not say */
/*
 * The budget for the next while. want: what memory_budget() finds now. Down at once; up by grow_bytes at most, and only when `calm`. Pure.
 */
uint64_t pressure_next_budget(uint64_t now, uint64_t want, uint64_t floor, uint64_t configured,
			      uint64_t grow_bytes, bool calm);

/* What is to be written to a watched file: base64 as in $MEMORY_PRESSURE_WRITE. Returns the length, or -EINVAL; ret has room for max. */
ssize_t pressure_decode(const char *base64, unsigned char *ret, size_t max);
