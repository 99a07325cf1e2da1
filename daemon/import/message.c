/* SPDX-License-Identifier: MIT */
/*
 * message.c: see message.h. Sockets at the top, JSON below; no state.
 *
 * Invariant: a descriptor that came with a message is in the caller's struct or closed.
 */
#include "daemon/import/message.h"

#include "daemon/errors.h"
#include "daemon/varlink.h"

#include <sys/socket.h>

void message_files_done(struct message_files *f)
{
	for (size_t i = 0; i < f->n; i++)
		closep(&f->fd[i]);
	f->n = 0;
}

/* ---- the socket ---- */

int message_send(int sock, json_t *o, const struct message_files *files, int flags)
{
	_cleanup_(freep) char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(files->fd))] = {};
	struct iovec iov = { .iov_base = text };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	struct cmsghdr *c;
	ssize_t n;

	if (!text)
		return -ENOMEM;
	iov.iov_len = strlen(text);
	if (iov.iov_len > MESSAGE_BYTES_MAX)
		return -EMSGSIZE;
	if (files && files->n > 0) {
		m.msg_control = control;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * files->n);
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * files->n);
		memcpy(CMSG_DATA(c), files->fd, sizeof(int) * files->n);
	}
	do
		n = sendmsg(sock, &m, flags | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	return n < 0 ? -errno : 0;
}

/* Takes all of them: what a message brought is open in this process, wanted or not. */
static void take_files(struct msghdr *m, struct message_files *f)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		n = MIN(n, IMPORT_PARTS_MAX - f->n);
		memcpy(f->fd + f->n, CMSG_DATA(c), n * sizeof(int));
		f->n += n;
	}
}

int message_recv(int sock, json_t **ret, struct message_files *files, char **ret_error)
{
	_cleanup_(message_files_done) struct message_files got = {};
	_cleanup_(freep) char *text = malloc(MESSAGE_BYTES_MAX);
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(got.fd))];
	struct iovec iov = { .iov_base = text, .iov_len = MESSAGE_BYTES_MAX };
	struct msghdr m = { .msg_iov = &iov,
			    .msg_iovlen = 1,
			    .msg_control = control,
			    .msg_controllen = sizeof(control) };
	ssize_t n;
	int r;

	if (!text)
		return -ENOMEM;
	n = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
	if (n < 0)
		return -errno;
	take_files(&m, &got);
	if (n == 0)
		return -EPIPE;
	if (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
		return fail(ret_error, -EBADMSG, "the message is too long");
	if (got.n > 0 && !files)
		return fail(ret_error, -EBADMSG, "descriptors came that nobody asked for");
	r = varlink_parse(text, (size_t)n, ret, ret_error);
	if (r < 0)
		return r;
	if (files)
		*files = got;
	got.n = files ? 0 : got.n;
	return 0;
}

/* ---- requests ---- */

static const char *const commands[MESSAGE_COMMAND_MAX] = {
	[MESSAGE_ADD] = "add",
	[MESSAGE_REMOVE] = "remove",
	[MESSAGE_DEFAULT] = "default",
};

static int put(json_t *o, const char *key, json_t *value)
{
	return json_object_set_new(o, key, value);
}

json_t *message_pack_request(const struct message_request *q)
{
	json_t *o = json_pack("{s:s}", "command", commands[q->command]), *files = NULL;
	int r = o ? 0 : -1;

	if (r == 0 && q->name)
		r = put(o, "name", json_string(q->name));
	if (r == 0 && q->make_default)
		r = put(o, "default", json_true());
	if (r == 0 && q->force)
		r = put(o, "force", json_true());
	if (r == 0 && q->n_files > 0) {
		files = json_array();
		r = put(o, "files", files);
	}
	for (size_t i = 0; i < q->n_files && r == 0; i++)
		r = json_array_append_new(files, json_string(q->files[i]));
	if (r < 0) {
		json_decref(o);
		return NULL;
	}
	return o;
}

static int read_files(struct args *a, struct message_request *q)
{
	json_t *list = NULL, *s;
	size_t i;

	if (!args_array(a, "files", q->command == MESSAGE_ADD, IMPORT_PARTS_MAX, &list))
		return 0;
	json_array_foreach(list, i, s) {
		if (!json_is_string(s)) {
			args_refuse(a, "files", "must hold strings");
			return -EINVAL;
		}
		q->files[q->n_files++] = json_string_value(s);
	}
	return 0;
}

int message_read_request(json_t *o, struct message_request *ret, char **ret_error)
{
	struct message_request q = { .command = MESSAGE_COMMAND_MAX };
	const char *command = "";
	struct args a;
	size_t len;

	args_begin(&a, o);
	args_str(&a, "command", true, 32, &command, &len);
	for (size_t i = 0; i < MESSAGE_COMMAND_MAX; i++)
		if (streq(commands[i], command))
			q.command = (enum message_command)i;
	if (q.command == MESSAGE_COMMAND_MAX)
		args_refuse(&a, "command", "is not known");
	args_str(&a, "name", q.command != MESSAGE_ADD, 255, &q.name, &len);
	args_bool(&a, "default", &q.make_default);
	args_bool(&a, "force", &q.force);
	read_files(&a, &q);
	if (args_end(&a) < 0)
		return fail(ret_error, -EINVAL, "the request's field '%s' %s", a.bad, a.why);
	*ret = q;
	return 0;
}

/* ---- events ---- */

static const char *const events[IMPORT_EVENT_MAX] = {
	[IMPORT_CHECK] = "check", [IMPORT_SPACE] = "space", [IMPORT_COPY] = "copy",
	[IMPORT_HASH] = "hash",   [IMPORT_SYNC] = "sync",   [IMPORT_WARNING] = "warning",
};

json_t *message_pack_event(const struct import_event *e)
{
	const char *kind = events[e->kind];

	switch (e->kind) {
	case IMPORT_SPACE:
		return json_pack("{s:s, s:I, s:I}", "event", kind, "needed", (json_int_t)e->needed,
				 "available", (json_int_t)e->available);
	case IMPORT_COPY:
	case IMPORT_HASH:
		return json_pack("{s:s, s:I, s:I}", "event", kind, "done", (json_int_t)e->done,
				 "total", (json_int_t)e->total);
	case IMPORT_WARNING: return json_pack("{s:s, s:s}", "event", kind, "text", e->text);
	case IMPORT_CHECK:
	case IMPORT_SYNC:
	case IMPORT_EVENT_MAX: break;
	}
	return json_pack("{s:s}", "event", kind);
}

static uint64_t number(json_t *o, const char *key)
{
	json_int_t n = json_integer_value(json_object_get(o, key));

	return n > 0 ? (uint64_t)n : 0;
}

int message_read_event(json_t *o, struct import_event *ret)
{
	const char *kind = json_string_value(json_object_get(o, "event"));
	struct import_event e = { .kind = IMPORT_EVENT_MAX };

	if (!json_object_get(o, "event"))
		return 0;
	for (size_t i = 0; kind && i < IMPORT_EVENT_MAX; i++)
		if (streq(events[i], kind))
			e.kind = (enum import_event_kind)i;
	e.text = json_string_value(json_object_get(o, "text"));
	if (e.kind == IMPORT_EVENT_MAX || (e.kind == IMPORT_WARNING && !e.text))
		return -EINVAL;
	e.done = number(o, "done");
	e.total = number(o, "total");
	e.needed = number(o, "needed");
	e.available = number(o, "available");
	*ret = e;
	return 1;
}

/* ---- replies ---- */

json_t *message_pack_result(const struct import_result *r)
{
	return json_pack("{s:s, s:s, s:I, s:b, s:b}", "file", r->file, "sha256", r->sha256, "bytes",
			 (json_int_t)r->bytes, "default", r->is_default, "existed", r->existed);
}

json_t *message_pack_error(int err, const char *text)
{
	const struct error_entry *e = error_by_code(error_from_errno(err));

	return json_pack("{s:s, s:i, s:s}", "error", e->varlink, "errno", err < 0 ? -err : err,
			 "message", text ? text : strerror(err < 0 ? -err : err));
}

int message_read_reply(json_t *o, struct import_result *ret, char **ret_error)
{
	struct import_result r = {};
	const char *text = json_string_value(json_object_get(o, "message"));
	const char *file = json_string_value(json_object_get(o, "file"));
	const char *sha256 = json_string_value(json_object_get(o, "sha256"));
	uint64_t err = number(o, "errno");

	if (json_object_get(o, "error"))
		return fail(ret_error, err > 0 && err < 4096 ? -(int)err : -EREMOTEIO, "%s",
			    text ? text : "it failed and does not say why");
	if (!file)
		return fail(ret_error, -EINVAL, "the answer cannot be understood");
	r.file = strdup(file);
	if (!r.file)
		return fail(ret_error, -ENOMEM, "no memory");
	snprintf(r.sha256, sizeof(r.sha256), "%s", sha256 ? sha256 : "");
	r.bytes = number(o, "bytes");
	r.is_default = json_is_true(json_object_get(o, "default"));
	r.existed = json_is_true(json_object_get(o, "existed"));
	*ret = r;
	return 0;
}
