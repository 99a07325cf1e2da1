/* SPDX-License-Identifier: MIT */
/*
 * conn.h: one client's connection: bytes in, calls answered one after the other in order, frames out.
 *
 * Loop thread. Identity (uid, pid) comes from the kernel at accept. What is buffered for a peer is bounded in both directions: a frame
 * over the cap is refused by length, and a reader that lets a stream pile up is cut off. Refuses to know what methods mean.
 */
#pragma once

#include "daemon/daemon.h"
#include "daemon/varlink.h"

/* A call stays bytes until its turn: parsed, it may be fifty times as large. */
struct conn_call {
	struct conn_call *next;
	char *data;
	size_t len;
	struct varlink_call call;
	json_t *reply; /* answered ahead of its turn (Cancel) */
};

struct conn {
	struct conn *prev, *next;
	struct daemon *daemon;
	int fd;
	uid_t uid;
	pid_t pid;
	gid_t *gids;
	size_t n_gids;
	char *unit; /* system unit the peer runs in; NULL: none */
	struct policy_limits limits;
	sd_event_source *io, *later;
	struct buf in, out;
	size_t scanned;            /* of in, see varlink_frame() */
	struct conn_call *current; /* being answered */
	struct conn_call *waiting, **waiting_tail;
	size_t n_waiting, waiting_len;
	struct request *request;        /* of the current call */
	struct engine_clone *clone;     /* of the current call */
	struct engine_inspect *inspect; /* of the current call */
	int64_t tracing; /* tokens still to record for the current call; 0: it does not, -1: until it hangs up */
	bool oomd;        /* systemd-oomd: has one method of its own, and no others */
	bool deferred;    /* the current call waits: for a model, or for another policy */
	bool half_closed; /* the peer will send no more */
	bool closing;     /* close when out is empty */
};

int conn_start_listening(struct daemon *d);
/* A connected socket becomes a client of this identity (D-Bus OpenSession: the kernel would name ourselves). fd is taken on success. */
int conn_adopt(struct daemon *d, int fd, uid_t uid, pid_t pid, struct conn **ret);
/* The current call is begun again when the model has been loaded, or not. */
void conn_defer(struct conn *c);
void conn_resume_all(struct daemon *d);
void conn_policy_changed(struct daemon *d); /* asks the policy again for every connection */
void conn_free(struct conn *c);             /* cancels what runs on it */

/* Answers the current call; params is stolen and may be NULL (out of memory: an error is sent instead). continues: more frames follow. */
void conn_reply(struct conn *c, json_t *params, bool continues);
/* The same with a reply that a worker has put into bytes already (emptied). */
void conn_reply_bytes(struct conn *c, struct buf *reply);
void conn_error(struct conn *c, enum error_code code, const char *text, uint32_t retry_after_ms);
/* org.varlink.service.InvalidParameter with our message beside the field's name. */
void conn_invalid(struct conn *c, const char *parameter, const char *why);
void conn_standard_error(struct conn *c, const char *error, const char *key, const char *value);
