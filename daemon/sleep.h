/* SPDX-License-Identifier: MIT */
/*
 * sleep.h: before the machine sleeps what is on the GPU is given up, after it the GPU is taken up again. Loop thread.
 *
 * The contents of a card do not outlive a sleep, and a context that is in use then may keep a driver from sleeping at all. systemd-logind
 * says on the system bus when, and waits a few seconds for whoever holds a delay lock. Without it the card is found to be lost afterwards.
 */
#pragma once

#include "daemon/daemon.h"

#include <systemd/sd-bus.h>

void sleep_bus_up(struct daemon *d, sd_bus *bus); /* logind can be asked from now on */
void sleep_bus_down(struct daemon *d);  /* not any more; before the connection is closed */
void sleep_follow(struct daemon *d);    /* a GPU came or went */
void sleep_suspended(struct daemon *d); /* EVENT_SUSPENDED */
void sleep_stop(struct daemon *d);
