/* SPDX-License-Identifier: MIT */
/*
 * conn.c: clients' connections. See conn.h. Loop thread.
 *
 * A connection is freed only from its own two event handlers (io, later) or at shutdown, never from inside an answer; answering only
 * appends to `out` and arms `later`. Invariants: at most one call is current; replies leave in the order of the calls.
 */
#include "daemon/conn.h"

#include "daemon/inspect.h"
#include "daemon/methods.h"
#include "daemon/request.h"

#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <systemd/sd-login.h>

#define READ_CHUNK      65536
#define READ_PER_WAKEUP (4 * READ_CHUNK) /* then others get their turn */
#define WAITING_MAX     64               /* pipelined calls; more stay in the socket */
#define OUT_LOW         65536 /* the next call begins when less than this waits to be read */
#define OUT_STREAM_MAX \
	(1U << 20) /* a stream's reader that is this far behind is gone: about 10 000 tokens */

static void call_free(struct conn_call *call)
{
	if (!call)
		return;
	varlink_call_done(&call->call);
	json_decref(call->reply);
	free(call->data);
	free(call);
}

void conn_free(struct conn *c)
{
	struct daemon *d = c->daemon;

	if (c->request)
		request_cancel(c->request, true);
	session_close_of(d, c);
	inspect_hang_up(c);
	call_free(c->current);
	for (struct conn_call *call = c->waiting, *next; call; call = next) {
		next = call->next;
		call_free(call);
	}
	sd_event_source_disable_unref(c->io);
	sd_event_source_disable_unref(c->later);
	closep(&c->fd);
	buf_done(&c->in);
	buf_done(&c->out);
	*(c->prev ? &c->prev->next : &d->conns) = c->next;
	if (c->next)
		c->next->prev = c->prev;
	d->n_conns--;
	free(c->gids);
	free(c->unit);
	free(c);
	service_touch(d);
	service_check_stop(d);
}

static void answer_later(struct conn *c)
{
	(void)sd_event_source_set_enabled(c->later, SD_EVENT_ONESHOT);
}

void conn_defer(struct conn *c)
{
	c->deferred = true;
}

void conn_resume_all(struct daemon *d)
{
	for (struct conn *c = d->conns; c; c = c->next) {
		if (!c->deferred)
			continue;
		c->deferred = false;
		if (c->current && !c->closing)
			methods_dispatch(c);
	}
}

static void break_off(struct conn *c)
{
	c->closing = true;
	c->out.len = 0;
	answer_later(c);
}

/* After bytes were appended to out (r: how that went). */
static void appended(struct conn *c, int r, bool continues)
{
	if (r < 0 || (continues && c->out.len > OUT_STREAM_MAX)) {
		log_info("pid %d (uid %u): %s, closing the connection", c->pid, c->uid,
			 r < 0 ? "no memory for its answer" : "does not read its answer");
		break_off(c);
	}
	if (!continues) {
		call_free(c->current);
		c->current = NULL;
	}
	answer_later(c);
}

static bool wants_reply(const struct conn *c)
{
	return !c->closing && !(c->current && c->current->call.oneway);
}

void conn_reply(struct conn *c, json_t *params, bool continues)
{
	int r = 0;

	if (!params) {
		conn_error(c, ERROR_NO_MEMORY, NULL, 0);
		return;
	}
	if (wants_reply(c))
		r = varlink_put_reply(&c->out, params, continues);
	json_decref(params);
	appended(c, r, continues);
}

void conn_reply_bytes(struct conn *c, struct buf *reply)
{
	int r = wants_reply(c) ? buf_append(&c->out, reply->data, reply->len) : 0;

	buf_done(reply);
	appended(c, r, false);
}

static void put_error(struct conn *c, const char *error, json_t *params)
{
	int r = 0;

	if (wants_reply(c))
		r = params ? varlink_put_error(&c->out, error, params) : -ENOMEM;
	json_decref(params);
	appended(c, r, false);
}

void conn_error(struct conn *c, enum error_code code, const char *text, uint32_t retry_after_ms)
{
	const struct error_entry *e = error_by_code(code);
	json_t *params =
		json_pack("{si ss*}", "number", (int)e->code, "message", text ? text : e->text);

	if (retry_after_ms == 0)
		retry_after_ms = e->retry_after_ms;
	if (params && retry_after_ms > 0)
		(void)json_object_set_new(params, "retry_after_ms", json_integer(retry_after_ms));
	put_error(c, e->varlink, params);
}

void conn_invalid(struct conn *c, const char *parameter, const char *why)
{
	put_error(c, "org.varlink.service.InvalidParameter",
		  json_pack("{ss* ss*}", "parameter", parameter, "message", why));
}

void conn_standard_error(struct conn *c, const char *error, const char *key, const char *value)
{
	put_error(c, error, json_pack("{ss*}", key, value));
}

/* What cannot be answered in turn: says why and closes. */
static void refuse_and_close(struct conn *c, enum error_code code, const char *text)
{
	if (c->request)
		request_cancel(c->request, true);
	call_free(c->current);
	c->current = NULL;
	conn_error(c, code, text, 0);
	c->closing = true;
	/* The peer's writes fail from here on. What it sent already is thrown away: while it lies in the socket, a peer that waits to send more
	 * would not wake up to see that. */
	(void)shutdown(c->fd, SHUT_RD);
	for (char thrown[4096]; recv(c->fd, thrown, sizeof(thrown), MSG_DONTWAIT) > 0;)
		;
}

/* false: refused. */
static bool parse_call(struct conn *c, struct conn_call *call)
{
	_cleanup_(freep) char *error = NULL;
	int r = varlink_call_parse(call->data, call->len, &call->call, &error);

	if (r < 0)
		refuse_and_close(c, r == -ENOMEM ? ERROR_NO_MEMORY : ERROR_INVALID_REQUEST, error);
	return r >= 0;
}

static void run_waiting(struct conn *c)
{
	while (!c->current && c->waiting && !c->closing && c->out.len < OUT_LOW) {
		struct conn_call *call = c->current = c->waiting;

		c->waiting = call->next;
		if (!c->waiting)
			c->waiting_tail = &c->waiting;
		c->n_waiting--;
		c->waiting_len -= call->len;
		if (call->reply)
			conn_reply(c, TAKE_PTR(call->reply), false);
		else if (parse_call(c, call))
			methods_dispatch(c);
	}
}

/* A Cancel does not wait for what it cancels; anything else in a small message does. */
static void answer_ahead(struct conn *c, struct conn_call *waiting)
{
	struct varlink_call call;

	if (waiting->len > 1024 || varlink_call_parse(waiting->data, waiting->len, &call, NULL) < 0)
		return;
	waiting->reply = methods_ahead(c, &call);
	waiting->call.oneway = call.oneway;
	varlink_call_done(&call);
}

static void take_call(struct conn *c, const char *data, size_t len)
{
	struct conn_call *call = calloc(1, sizeof(*call));

	if (call)
		call->data = malloc(len + 1);
	if (!call || !call->data) {
		free(call);
		refuse_and_close(c, ERROR_NO_MEMORY, NULL);
		return;
	}
	memcpy(call->data, data, len);
	call->len = len;
	if (c->current || c->waiting)
		answer_ahead(c, call);
	*c->waiting_tail = call;
	c->waiting_tail = &call->next;
	c->n_waiting++;
	c->waiting_len += len;
}

static void take_frames(struct conn *c)
{
	size_t len, max = c->daemon->config.message_bytes_max;

	while (!c->closing && c->n_waiting < WAITING_MAX) {
		int r = varlink_frame(c->in.data, c->in.len, max, &c->scanned, &len);

		if (r == 0)
			return;
		if (r < 0) {
			char text[80];

			snprintf(text, sizeof(text), "a message is longer than %zu bytes", max);
			refuse_and_close(c, ERROR_TOO_LARGE, text);
			return;
		}
		take_call(c, c->in.data, len);
		buf_consume(&c->in, len + 1);
		c->scanned = 0;
		run_waiting(c);
	}
}

/*
 * What this user's connections make the service hold: half-sent messages, calls that wait or run, answers not read. It may be four messages'
 * worth, however many connections he has.
 */
static size_t held_len(const struct conn *c)
{
	return c->in.len + c->waiting_len + c->out.len + (c->current ? c->current->len : 0);
}

static bool over_share(const struct conn *c)
{
	size_t sum = 0;

	if (held_len(c) <= READ_CHUNK)
		return false;
	for (const struct conn *other = c->daemon->conns; other; other = other->next)
		if (other->uid == c->uid)
			sum += held_len(other);
	return sum > 4 * c->daemon->config.message_bytes_max + READ_CHUNK;
}

static bool may_read(const struct conn *c)
{
	return !c->half_closed && !c->closing && c->n_waiting < WAITING_MAX;
}

/* false: the connection is broken. */
static bool read_some(struct conn *c)
{
	for (size_t total = 0; may_read(c) && total < READ_PER_WAKEUP;) {
		ssize_t n;

		if (buf_reserve(&c->in, READ_CHUNK) < 0) {
			refuse_and_close(c, ERROR_NO_MEMORY, NULL);
			return true;
		}
		n = recv(c->fd, c->in.data + c->in.len, READ_CHUNK, MSG_DONTWAIT);
		if (n < 0)
			return errno == EAGAIN || errno == EINTR;
		if (n == 0) {
			c->half_closed = true;
			return true;
		}
		c->in.len += (size_t)n;
		total += (size_t)n;
		take_frames(c);
		if (!c->closing && over_share(c))
			refuse_and_close(c, ERROR_QUEUE_FULL, "this user has too much unsent or unread");
	}
	return true;
}

static bool write_some(struct conn *c)
{
	size_t done = 0;

	while (done < c->out.len) {
		ssize_t n = send(c->fd, c->out.data + done, c->out.len - done,
				 MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			if (errno != EAGAIN)
				return false;
			break;
		}
		done += (size_t)n;
	}
	buf_consume(&c->out, done);
	/* A large answer's buffer is not kept for the small ones after it. */
	if (c->out.len == 0 && c->out.alloc > OUT_STREAM_MAX)
		buf_done(&c->out);
	if (c->in.len == 0 && c->in.alloc > OUT_STREAM_MAX)
		buf_done(&c->in);
	return true;
}

/* Everything that can be done now; frees the connection when it is over. */
static void pump(struct conn *c)
{
	uint32_t mask = 0;

	take_frames(c);
	run_waiting(c);
	if (!write_some(c)) {
		conn_free(c);
		return;
	}
	run_waiting(c);
	if (c->out.len == 0 && (c->closing || (c->half_closed && !c->current && !c->waiting))) {
		conn_free(c);
		return;
	}
	if (may_read(c))
		mask |= EPOLLIN;
	if (c->out.len > 0)
		mask |= EPOLLOUT;
	(void)sd_event_source_set_io_events(c->io, mask);
	service_check_stop(c->daemon);
}

static int on_io(sd_event_source *source, int fd, uint32_t events, void *arg)
{
	struct conn *c = arg;

	(void)source;
	(void)fd;
	if ((events & EPOLLIN) && !read_some(c)) {
		conn_free(c);
		return 0;
	}
	if (events & (EPOLLHUP | EPOLLERR)) {
		/* What it asked before it left is done as far as no answer is needed (CloseSession, oneway). */
		run_waiting(c);
		conn_free(c);
		return 0;
	}
	pump(c);
	return 0;
}

static int on_later(sd_event_source *source, void *arg)
{
	(void)source;
	pump(arg);
	return 0;
}

static size_t count_of(const struct daemon *d, uid_t uid)
{
	size_t n = 0;

	for (const struct conn *c = d->conns; c; c = c->next)
		n += c->uid == uid;
	return n;
}

static void refuse_connection(int fd)
{
	const struct error_entry *e = error_by_code(ERROR_QUEUE_FULL);
	json_t *params = json_pack("{si ss si}", "number", (int)e->code, "message",
				   "too many connections", "retry_after_ms", (int)e->retry_after_ms);
	struct buf out = {};

	if (params && varlink_put_error(&out, e->varlink, params) == 0)
		(void)send(fd, out.data, out.len, MSG_DONTWAIT | MSG_NOSIGNAL);
	json_decref(params);
	buf_done(&out);
}

static void ask_policy(struct conn *c)
{
	const struct policy_who who = {
		.uid = c->uid,
		.gids = c->gids,
		.n_gids = c->n_gids,
		.unit = c->unit,
	};

	policy_effective(c->daemon->policy, &who, &c->limits);
}

void conn_policy_changed(struct daemon *d)
{
	for (struct conn *c = d->conns; c; c = c->next)
		ask_policy(c);
	conn_resume_all(d); /* what waited for another policy */
}

/* fd is taken on success. gids and unit are the caller's to fill in afterwards. */
static int conn_add(struct daemon *d, int fd, uid_t uid, pid_t pid, struct conn **ret)
{
	struct conn *c;
	int r;

	/* One user's idle connections leave room for the others'. */
	if (d->n_conns >= d->config.connections_max || count_of(d, uid) > d->config.connections_max / 2)
		return -EUSERS;
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	c->daemon = d;
	c->fd = -1;
	c->uid = uid;
	c->pid = pid;
	c->waiting_tail = &c->waiting;
	r = sd_event_add_io(d->event, &c->io, fd, EPOLLIN, on_io, c);
	if (r >= 0)
		r = sd_event_add_defer(d->event, &c->later, on_later, c);
	if (r >= 0)
		r = sd_event_source_set_enabled(c->later, SD_EVENT_OFF);
	if (r < 0) {
		sd_event_source_disable_unref(c->io);
		sd_event_source_disable_unref(c->later);
		free(c);
		return r;
	}
	c->fd = fd;
	c->next = d->conns;
	if (c->next)
		c->next->prev = c;
	d->conns = c;
	d->n_conns++;
	service_touch(d);
	*ret = c;
	return 0;
}

/* The groups that the peer had when it connected, its primary one first; without memory only the others' rules apply. */
static void read_groups(struct conn *c, gid_t primary)
{
	socklen_t len = 64 * sizeof(gid_t);

	for (int i = 0; i < 2; i++) {
		gid_t *gids = realloc(c->gids, len + sizeof(gid_t));

		if (!gids)
			return;
		c->gids = gids;
		c->gids[0] = primary;
		c->n_gids = 1;
		if (getsockopt(c->fd, SOL_SOCKET, SO_PEERGROUPS, c->gids + 1, &len) == 0) {
			c->n_gids += len / sizeof(gid_t);
			return;
		}
		if (errno != ERANGE) /* else len is what is needed */
			return;
	}
}

static int conn_new(struct daemon *d, int fd)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);
	struct conn *c;
	int r;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return -errno;
	r = conn_add(d, fd, cred.uid, cred.pid, &c);
	if (r == -EUSERS)
		refuse_connection(fd);
	if (r < 0)
		return r;
	read_groups(c, cred.gid);
	/* System units only: a user gives his own any name he likes, and would claim what policy grants another. */
	if (sd_peer_get_unit(fd, &c->unit) < 0)
		c->unit = NULL;
	ask_policy(c);
	return 0;
}

int conn_adopt(struct daemon *d, int fd, uid_t uid, pid_t pid, struct conn **ret)
{
	const struct passwd *pw;
	struct conn *c;
	struct stat st;
	char proc[32];
	int r, n = 256;

	r = conn_add(d, fd, uid, pid, &c);
	if (r < 0)
		return r;
	pw = getpwuid(uid);
	c->gids = calloc((size_t)n, sizeof(gid_t));
	if (pw && c->gids && getgrouplist(pw->pw_name, pw->pw_gid, c->gids, &n) >= 0)
		c->n_gids = (size_t)n;
	/* The bus knows the process that connected; by now its number may be somebody else's. */
	snprintf(proc, sizeof(proc), "/proc/%d", pid);
	if (pid <= 0 || stat(proc, &st) < 0 || st.st_uid != uid || sd_pid_get_unit(pid, &c->unit) < 0)
		c->unit = NULL;
	ask_policy(c);
	*ret = c;
	return 0;
}

static int on_accept_resume(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;

	(void)source;
	(void)usec;
	if (d->listen_source)
		(void)sd_event_source_set_enabled(d->listen_source, SD_EVENT_ON);
	if (d->oomd_source)
		(void)sd_event_source_set_enabled(d->oomd_source, SD_EVENT_ON);
	return 0;
}

/* -1: nobody is there, or there is no room for him: he stays in the backlog of `source`, which would wake us at once again, and rests for a
 * second. */
static int accept_from(struct daemon *d, sd_event_source *source, int listen_fd)
{
	int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd >= 0 || (errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS))
		return fd;
	log_warning("cannot accept a connection: %s, trying again in a second", strerror(errno));
	(void)sd_event_source_set_enabled(source, SD_EVENT_OFF);
	d->accept_pause = sd_event_source_disable_unref(d->accept_pause);
	if (sd_event_add_time_relative(d->event, &d->accept_pause, CLOCK_MONOTONIC, 1000000, 0,
				       on_accept_resume, d) < 0)
		(void)sd_event_source_set_enabled(source, SD_EVENT_ON);
	return -1;
}

static int on_accept(sd_event_source *source, int listen_fd, uint32_t events, void *arg)
{
	struct daemon *d = arg;
	int fd;

	(void)events;
	for (int i = 0; i < 64 && (fd = accept_from(d, source, listen_fd)) >= 0; i++)
		if (conn_new(d, fd) < 0)
			close(fd);
	return 0;
}

/* Whoever may connect could have all experts dropped: only who is going to kill. */
static bool is_oomd(int fd)
{
	const struct passwd *pw = getpwnam("systemd-oom");
	struct ucred cred;
	socklen_t len = sizeof(cred);

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 &&
	       (cred.uid == 0 || cred.uid == geteuid() || (pw && cred.uid == pw->pw_uid));
}

static int on_accept_oomd(sd_event_source *source, int listen_fd, uint32_t events, void *arg)
{
	struct daemon *d = arg;
	int fd = accept_from(d, source, listen_fd);
	struct conn *c;

	(void)events;
	if (fd < 0)
		return 0;
	if (!is_oomd(fd) || conn_add(d, fd, 0, 0, &c) < 0)
		close(fd);
	else
		c->oomd = true;
	return 0;
}

int conn_start_listening(struct daemon *d)
{
	int r = sd_event_add_io(d->event, &d->listen_source, d->listen_fd, EPOLLIN, on_accept, d);

	if (r >= 0 && d->oomd_fd >= 0)
		r = sd_event_add_io(d->event, &d->oomd_source, d->oomd_fd, EPOLLIN, on_accept_oomd, d);
	return r;
}
