/* SPDX-License-Identifier: MIT */
/*
 * bus.h: control on the system bus (policy/org.residentd1.xml). Loop thread.
 *
 * The service works without a bus, and says so once; a bus that goes away is looked for again. Authorisation is asked of polkit without
 * blocking (polkit.h). Everything that changes the service goes through service.h-like functions of daemon.h; this module owns only
 * vtables, object paths and who watches what.
 */
#pragma once

#include "daemon/daemon.h"

/* Connects to $DBUS_SYSTEM_BUS_ADDRESS or the system bus, takes the name, attaches to the event loop. Never fails the service. */
void bus_start(struct daemon *d);
void bus_stop(struct daemon *d);
/* To be told: */
void bus_state_changed(struct daemon *d);
void bus_model_changed(struct daemon *d);
void bus_session_added(struct daemon *d, const struct session *s);
void bus_session_removed(struct daemon *d, const struct session *s);
void bus_leases_changed(struct daemon *d);
void bus_evicted(struct daemon *d, uint64_t bytes_used);
void bus_pressure(struct daemon *d, const char *level); /* "none", "some", "full" */
