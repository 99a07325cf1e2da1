/* SPDX-License-Identifier: MIT */
/*
 * polkit.h: may the sender of this bus message do this? One asynchronous CheckAuthorization call to
 * polkit (subject: the sender's unique bus name). Without polkit on the bus: uid 0 and members of
 * group residentd may, for `use` everybody. Loop thread; never blocks.
 */
#pragma once

#include "daemon/base.h"

#include <systemd/sd-bus.h>

/* Called once, unless the message's sender left meanwhile: r 1 allowed, 0 denied, negative errno. */
typedef void (*polkit_done_fn)(sd_bus_message *m, int r, void *arg);

/* action: "org.residentd1.hold". interactive: the message's own flag ALLOW_INTERACTIVE_AUTHORIZATION
 * is honoured when true. Keeps a reference of m until done. -ENOBUFS: too many questions of this uid;
 * -errno when nothing could be asked (done is not called then). */
/* How many questions are under way. */
size_t polkit_n_pending(void);
int polkit_check(sd_bus_message *m, const char *action, bool interactive, polkit_done_fn done,
		 void *arg);
/* The connection is given up: no `done` any more. */
void polkit_drop_all(void);
