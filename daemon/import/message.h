/* SPDX-License-Identifier: MIT */
/*
 * message.h: what residentctl and residentd-import say to each other.
 *
 * One request, with the files as descriptors; then events, and one reply. Each is a JSON object in
 * a message of its own (SOCK_SEQPACKET). Both sides use these functions; what they read is checked,
 * wherever it comes from.
 *
 * {"command":"add", "files":["m.gguf"], "name":"m", "default":true}  + a descriptor for each file
 * {"command":"remove", "name":"m", "force":true}
 * {"command":"default", "name":"m"}
 *
 * {"event":"space", "needed":1, "available":2}
 * {"event":"copy", "done":1, "total":2}
 * {"event":"warning", "text":""}
 *
 * {"file":"m-0123456789ab.gguf", "sha256":"", "bytes":1, "default":true, "existed":false}
 * {"error":"org.residentd.Inference.NotAuthorized", "errno":13, "message":""}
 */
#pragma once

#include "daemon/import/import.h"

#include <jansson.h>

#define MESSAGE_SOCKET    "/run/residentd/import.sock"
#define MESSAGE_BYTES_MAX ((size_t)64 << 10) /* 253 names of 200 bytes */

struct message_files {
	int fd[IMPORT_PARTS_MAX];
	size_t n;
};
void message_files_done(struct message_files *f); /* closes them */

/* files may be NULL. flags of send(2). -EMSGSIZE, -errno; no signal. */
int message_send(int sock, json_t *o, const struct message_files *files, int flags);
/*
 * One message. files may be NULL: descriptors are then refused. -EBADMSG with the reason, -EPIPE:
 * the other side is gone; -errno.
 */
int message_recv(int sock, json_t **ret, struct message_files *files, char **ret_error);

enum message_command {
	MESSAGE_ADD,
	MESSAGE_REMOVE,
	MESSAGE_DEFAULT,
	MESSAGE_COMMAND_MAX,
};

struct message_request {
	enum message_command command;
	const char *name; /* may be NULL for MESSAGE_ADD; as files, it points into the JSON */
	const char *files[IMPORT_PARTS_MAX];
	size_t n_files;
	bool make_default, force;
};

/* NULL: no memory, or names that are not UTF-8. */
json_t *message_pack_request(const struct message_request *q);
int message_read_request(json_t *o, struct message_request *ret, char **ret_error); /* -EINVAL */

json_t *message_pack_event(const struct import_event *e);
/* 1: an event; 0: o is the reply; -EINVAL: neither. */
int message_read_event(json_t *o, struct import_event *ret);

json_t *message_pack_result(const struct import_result *r);
json_t *message_pack_error(int err, const char *text);
/* 0: ret is filled (file is a copy); -errno as the other side has it, with its text; -EINVAL. */
int message_read_reply(json_t *o, struct import_result *ret, char **ret_error);
