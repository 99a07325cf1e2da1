/* SPDX-License-Identifier: MIT */
/*
 * methods.h: what each method of the interface does. Loop thread.
 */
#pragma once

#include "daemon/conn.h"

/* Answers c->current, or starts what will answer it later. */
void methods_dispatch(struct conn *c);
/* A call that arrived behind others and must not wait for them (Cancel): its reply, to be sent in its turn; NULL: it waits. */
json_t *methods_ahead(struct conn *c, const struct varlink_call *call);

/* What OpenSession and CloneSession return. */
json_t *session_json(const struct conn *c, const struct session *s);

/* interface.c: the text of policy/org.residentd.varlink and of org.varlink.service. */
extern const char interface_inference[], interface_service[];
