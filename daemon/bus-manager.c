/* SPDX-License-Identifier: MIT */
/*
 * bus-manager.c: the methods and properties of org.residentd1.Manager. See bus-internal.h. Loop thread.
 *
 * A method is a row of `methods`: how its arguments are read, which polkit action it needs, and what
 * it then does. Arguments are checked before polkit is asked, so that nobody types a password for a
 * call that fails anyway, and read again from the same message when the answer is there: nothing of
 * a call is stored meanwhile but the message.
 * Invariant: `run` is reached only by who may.
 */
#include "daemon/bus-internal.h"

#include "daemon/inspect.h"
#include "daemon/lease.h"
#include "daemon/model/tokenizer.h"
#include "daemon/polkit.h"
#include "daemon/request.h"

#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define NAME_MAX_BYTES 256 /* of a user, a model, who and why */

/* What was asked; strings belong to the message. */
struct order {
	const char *who, *why, *user, *model;
	uint64_t bytes;
	int keep, runtime, make_default;
	struct policy_pair pairs[POLICY_KEY_MAX];
	size_t n_pairs;
};

enum may {
	MAY_EVERYBODY,
	MAY_ALLOWED, /* by polkit, who may ask the user */
	MAY_OWN,     /* everybody of himself; of others as MAY_ALLOWED */
	MAY_SEE,     /* everybody; by polkit, without asking the user, more of it */
};

struct method {
	const char *name;
	int (*read)(sd_bus_message *m, struct order *o, sd_bus_error *error);
	enum may may;
	const char *action;
	/* Replies, or returns a negative errno; error may say it better. allowed: what polkit said. */
	int (*run)(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
		   sd_bus_error *error);
};

_printf_(2, 3) static int invalid(sd_bus_error *error, const char *format, ...)
{
	va_list ap;
	int r;

	va_start(ap, format);
	r = sd_bus_error_setfv(error, SD_BUS_ERROR_INVALID_ARGS, format, ap);
	va_end(ap);
	return r;
}

/* Much of it is shown to others, on terminals, which obey control characters. */
static bool text_ok(const char *s, size_t min, size_t max)
{
	size_t len = strlen(s);

	if (len < min || len > max || !utf8_valid(s, len))
		return false;
	for (const unsigned char *p = (const unsigned char *)s; *p; p++)
		if (*p < 0x20 || *p == 0x7f || (p[0] == 0xc2 && p[1] < 0xa0))
			return false;
	return true;
}

static int check_text(const char *what, const char *s, size_t min, sd_bus_error *error)
{
	if (text_ok(s, min, NAME_MAX_BYTES))
		return 0;
	return invalid(error, "%s: %zu to %d bytes without control characters are expected", what,
		       min, NAME_MAX_BYTES);
}

/* ---- a{sv} ---- */

struct option {
	const char *key;
	char type; /* SD_BUS_TYPE_BOOLEAN: int, SD_BUS_TYPE_UINT64 */
	void *value;
};

static int read_option(sd_bus_message *m, const struct option *options, size_t n, sd_bus_error *error)
{
	const char *key;
	int r = sd_bus_message_read(m, "s", &key);

	if (r < 0)
		return r;
	for (size_t i = 0; i < n; i++) {
		const char signature[2] = { options[i].type, 0 };

		if (!streq(key, options[i].key))
			continue;
		r = sd_bus_message_read(m, "v", signature, options[i].value);
		if (r == -ENXIO)
			return invalid(error, "option %s: a value of type %s is expected", key,
				       signature);
		return r;
	}
	return invalid(error, "unknown option%s%s", text_ok(key, 1, 64) ? " " : "",
		       text_ok(key, 1, 64) ? key : "");
}

static int read_options(sd_bus_message *m, const struct option *options, size_t n, sd_bus_error *error)
{
	int r = sd_bus_message_enter_container(m, 'a', "{sv}");

	while (r >= 0 && (r = sd_bus_message_enter_container(m, 'e', "sv")) > 0) {
		r = read_option(m, options, n, error);
		if (r >= 0)
			r = sd_bus_message_exit_container(m);
	}
	return r < 0 ? r : sd_bus_message_exit_container(m);
}

/* ---- reading arguments ---- */

static int read_nothing(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	(void)m;
	(void)o;
	(void)error;
	return 0;
}

static int read_open_session(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	const struct option options[] = { { "keep", SD_BUS_TYPE_BOOLEAN, &o->keep } };

	return read_options(m, options, ARRAY_SIZE(options), error);
}

static int read_hold(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	int r = sd_bus_message_read(m, "ss", &o->who, &o->why);

	if (r >= 0)
		r = check_text("who", o->who, 1, error);
	if (r >= 0)
		r = check_text("why", o->why, 0, error);
	return r;
}

static int read_yield_gpu(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	const struct option options[] = { { "bytes", SD_BUS_TYPE_UINT64, &o->bytes } };
	int r = read_hold(m, o, error);

	return r < 0 ? r : read_options(m, options, ARRAY_SIZE(options), error);
}

static int read_user(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	int r = sd_bus_message_read(m, "s", &o->user);

	return r < 0 ? r : check_text("user", o->user, 1, error);
}

static int read_limit(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	_cleanup_(freep) char *why = NULL;
	const char *key, *value;
	int k, r = sd_bus_message_read(m, "ss", &key, &value);

	if (r < 0)
		return r;
	k = policy_key_from_string(key);
	if (k < 0)
		return invalid(error, "unknown limit%s%s", text_ok(key, 1, 64) ? " " : "",
			       text_ok(key, 1, 64) ? key : "");
	for (size_t i = 0; i < o->n_pairs; i++)
		if (o->pairs[i].key == (enum policy_key)k)
			return invalid(error, "limit %s is given twice", key);
	if (!text_ok(value, 0, 4096))
		return invalid(error,
			       "limit %s: at most 4096 bytes without control characters are expected",
			       key);
	if (*value && policy_check_value((enum policy_key)k, value, &why) < 0)
		return invalid(error, "limit %s: %s", key, why ? why : "not a valid value");
	o->pairs[o->n_pairs++] = (struct policy_pair){ (enum policy_key)k, value };
	return 0;
}

static int read_set_user_limits(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	const struct option options[] = { { "runtime", SD_BUS_TYPE_BOOLEAN, &o->runtime } };
	int r = read_user(m, o, error);

	if (r >= 0)
		r = sd_bus_message_enter_container(m, 'a', "{ss}");
	while (r >= 0 && (r = sd_bus_message_enter_container(m, 'e', "ss")) > 0) {
		r = read_limit(m, o, error);
		if (r >= 0)
			r = sd_bus_message_exit_container(m);
	}
	if (r >= 0)
		r = sd_bus_message_exit_container(m);
	if (r < 0)
		return r;
	if (o->n_pairs == 0)
		return invalid(error, "no limit is given");
	return read_options(m, options, ARRAY_SIZE(options), error);
}

static int read_load_model(sd_bus_message *m, struct order *o, sd_bus_error *error)
{
	const struct option options[] = { { "default", SD_BUS_TYPE_BOOLEAN, &o->make_default } };
	int r = sd_bus_message_read(m, "s", &o->model);

	if (r >= 0)
		r = check_text("name", o->model, 1, error);
	if (r >= 0 && (strchr(o->model, '/') || *o->model == '.'))
		r = invalid(error, "name: a model of the models directory is expected, not a path");
	return r < 0 ? r : read_options(m, options, ARRAY_SIZE(options), error);
}

/* ---- what methods do ---- */

static size_t count_waiting(const struct daemon *d)
{
	size_t n = 0;

	for (const struct request *r = d->requests; r; r = r->next)
		n += r->kind != REQUEST_TOKENIZE;
	return n > 0 ? n - 1 : 0;
}

static const char *reason_of(const struct daemon *d)
{
	return d->state == SERVICE_UNAVAILABLE && d->reason ? d->reason : NULL;
}

static int get_availability(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
			    sd_bus_error *error)
{
	_cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
	const struct daemon *d = b->daemon;
	int r = sd_bus_message_new_method_return(m, &reply);

	(void)o;
	(void)allowed;
	(void)error;
	if (r >= 0)
		r = sd_bus_message_open_container(reply, 'a', "{sv}");
	if (r >= 0)
		r = sd_bus_message_append(reply, "{sv}{sv}{sv}", "state", "s",
					  service_state_to_string(d->state), "queued", "u",
					  (uint32_t)count_waiting(d), "sessions", "u",
					  (uint32_t)d->n_sessions);
	if (r >= 0 && reason_of(d))
		r = sd_bus_message_append(reply, "{sv}", "reason", "s", reason_of(d));
	if (r >= 0 && d->model)
		r = sd_bus_message_append(reply, "{sv}", "model", "s", d->model->name);
	if (r >= 0 && d->state == SERVICE_LOADING)
		r = sd_bus_message_append(reply, "{sv}", "retry_after_ms", "u",
					  error_by_code(ERROR_LOADING)->retry_after_ms);
	if (r >= 0)
		r = sd_bus_message_close_container(reply);
	return r < 0 ? r : sd_bus_send(b->bus, reply, NULL);
}

/* The connection that is the session's other end, as a client of uid; *ret_fd: his end. */
static int connect_client(struct daemon *d, uid_t uid, pid_t pid, struct conn **ret, int *ret_fd)
{
	_cleanup_(closep) int ours = -1, theirs = -1;
	int pair[2], r;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	ours = pair[0];
	theirs = pair[1];
	if (fcntl(ours, F_SETFL, O_RDWR | O_NONBLOCK) < 0)
		return -errno;
	r = conn_adopt(d, ours, uid, pid, ret);
	if (r < 0)
		return r;
	(void)TAKE_FD(ours);
	*ret_fd = TAKE_FD(theirs);
	return 0;
}

static int open_session(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
			sd_bus_error *error)
{
	_cleanup_(closep) int fd = -1; /* closed on failure: the connection sees that, and ends by itself */
	struct daemon *d = b->daemon;
	char path[BUS_SESSION_PATH_SIZE];
	struct bus_peer *peer;
	struct session *s;
	enum error_code code;
	const char *text;
	struct conn *c;
	pid_t pid;
	uid_t uid;
	int r;

	(void)allowed;
	r = bus_sender(b, m, &uid, &pid);
	if (r >= 0)
		r = bus_peer(b, m, &peer);
	if (r >= 0)
		r = connect_client(d, uid, pid, &c, &fd);
	if (r < 0)
		return r;
	code = service_check_client(c, &text);
	if (code != ERROR_NONE)
		return bus_fail(error, code, text, 0);
	r = session_open(d, c, o->keep, &s);
	if (r < 0)
		return r;
	r = bus_own(b, peer, s);
	if (r < 0) {
		session_close(d, s);
		return r;
	}
	bus_session_path(s, path);
	return sd_bus_reply_method_return(m, "oh", path, fd);
}

static int new_lease(struct bus *b, sd_bus_message *m, enum lease_kind kind, const struct order *o,
		     sd_bus_error *error)
{
	_cleanup_(closep) int fd = -1;
	pid_t pid;
	uid_t uid;
	int r = bus_sender(b, m, &uid, &pid);

	if (r >= 0)
		r = lease_new(b->daemon, kind, uid, pid, o->who, o->why, o->bytes, &fd);
	if (r == -EUSERS)
		return bus_fail(error, ERROR_TOO_MANY_SESSIONS, "this user holds too much already", 0);
	return r < 0 ? r : sd_bus_reply_method_return(m, "h", fd);
}

static int hold(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed, sd_bus_error *error)
{
	(void)allowed;
	return new_lease(b, m, LEASE_HOLD, o, error);
}

static int yield_gpu(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
		     sd_bus_error *error)
{
	(void)allowed;
	return new_lease(b, m, LEASE_YIELD_GPU, o, error);
}

static int list_sessions(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
			 sd_bus_error *error)
{
	_cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
	struct bus_peer *peer;
	uid_t uid;
	int r = bus_sender(b, m, &uid, NULL);

	(void)o;
	(void)error;
	if (r < 0)
		return r;
	/* From now on it is told of changes; too many such programs: then this one is not. */
	if (bus_peer(b, m, &peer) >= 0)
		peer->inspects_until_us = allowed ? now_us() + INSPECT_US : 0;
	r = sd_bus_message_new_method_return(m, &reply);
	if (r >= 0)
		r = sd_bus_message_open_container(reply, 'a', "(ouxb)");
	for (const struct session *s = b->daemon->sessions; s && r >= 0; s = s->next) {
		char path[BUS_SESSION_PATH_SIZE];

		if (s->doomed || (!allowed && s->uid != uid))
			continue;
		bus_session_path(s, path);
		r = sd_bus_message_append(reply, "(ouxb)", path, s->uid, (int64_t)s->context_used,
					  (int)s->busy);
	}
	if (r >= 0)
		r = sd_bus_message_close_container(reply);
	return r < 0 ? r : sd_bus_send(b->bus, reply, NULL);
}

static int list_holds(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
		      sd_bus_error *error)
{
	_cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
	int r = sd_bus_message_new_method_return(m, &reply);

	(void)o;
	(void)allowed;
	(void)error;
	if (r >= 0)
		r = sd_bus_message_open_container(reply, 'a', "(sussut)");
	for (const struct lease *l = b->daemon->leases; l && r >= 0; l = l->next)
		r = sd_bus_message_append(reply, "(sussut)", lease_kind_to_string(l->kind), l->uid,
					  l->who, l->why, (uint32_t)l->pid, l->since_us);
	if (r >= 0)
		r = sd_bus_message_close_container(reply);
	return r < 0 ? r : sd_bus_send(b->bus, reply, NULL);
}

/* A name or a number. The record points into buffer. */
static int find_user(const char *name, struct passwd *ret, char *buffer, size_t size, sd_bus_error *error)
{
	struct passwd *found = NULL;
	unsigned long n;
	char *end;

	if (getpwnam_r(name, ret, buffer, size, &found) == 0 && found)
		return 0;
	errno = 0;
	n = strtoul(name, &end, 10);
	if (*name >= '0' && *name <= '9' && !*end && errno == 0 && n < UINT32_MAX &&
	    getpwuid_r((uid_t)n, ret, buffer, size, &found) == 0 && found)
		return 0;
	return invalid(error, "user: there is no such user");
}

static int set_user_limits(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
			   sd_bus_error *error)
{
	struct daemon *d = b->daemon;
	const char *dir = o->runtime ? d->runtime_dir : d->state_dir;
	_cleanup_(freep) char *why = NULL;
	char buffer[16384];
	struct passwd user;
	int r = find_user(o->user, &user, buffer, sizeof(buffer), error);

	(void)allowed;
	if (r < 0)
		return r;
	if (!dir)
		return bus_fail(error, ERROR_NOT_SUPPORTED,
				"the service has no directory for it (it was not started by systemd)",
				0);
	r = policy_store_user(dir, user.pw_name, o->pairs, o->n_pairs, &why);
	if (r < 0)
		return bus_fail(error, ERROR_INTERNAL, why ? why : strerror(-r), 0);
	r = service_read_policy(d);
	if (r < 0)
		return r;
	log_info("policy of user %s changed over D-Bus", user.pw_name);
	return sd_bus_reply_method_return(m, "");
}

static int append_limits(sd_bus_message *reply, const struct policy_limits *l)
{
	int r = sd_bus_message_open_container(reply, 'a', "{s(ss)}");

	for (int k = 0; k < POLICY_KEY_MAX && r >= 0; k++) {
		struct buf value = {};

		policy_value_to_string(l, (enum policy_key)k, &value);
		r = sd_bus_message_append(reply, "{s(ss)}", policy_key_to_string((enum policy_key)k),
					  value.data ? value.data : "",
					  l->source[k] ? l->source[k] : "default");
		buf_done(&value);
	}
	return r < 0 ? r : sd_bus_message_close_container(reply);
}

static int get_user_limits(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
			   sd_bus_error *error)
{
	_cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
	struct policy_limits limits;
	struct policy_who who = {};
	char buffer[16384];
	struct passwd user;
	gid_t gids[256];
	int n = ARRAY_SIZE(gids), r = find_user(o->user, &user, buffer, sizeof(buffer), error);

	(void)allowed;
	if (r < 0)
		return r;
	/* -1: he is in more groups than fit; what fits was written. */
	if (getgrouplist(user.pw_name, user.pw_gid, gids, &n) < 0)
		n = ARRAY_SIZE(gids);
	who.uid = user.pw_uid;
	who.gids = gids;
	who.n_gids = (size_t)n;
	policy_effective(b->daemon->policy, &who, &limits);
	r = sd_bus_message_new_method_return(m, &reply);
	if (r >= 0)
		r = append_limits(reply, &limits);
	return r < 0 ? r : sd_bus_send(b->bus, reply, NULL);
}

static int load_failed(int r, const char *text, sd_bus_error *error)
{
	switch (r) {
	case -EBUSY: return bus_fail(error, ERROR_LOADING, text, 0);
	case -ENOENT: return bus_fail(error, ERROR_NO_SUCH_MODEL, text, 0);
	default: return bus_fail(error, error_from_errno(r), text, 0);
	}
}

static int load_model(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
		      sd_bus_error *error)
{
	_cleanup_(freep) char *why = NULL;
	int r = service_load_model(b->daemon, o->model, o->make_default, &why);

	(void)allowed;
	return r < 0 ? load_failed(r, why, error) : sd_bus_reply_method_return(m, "");
}

static int unload_model(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
			sd_bus_error *error)
{
	int r = service_unload_model(b->daemon);

	(void)o;
	(void)allowed;
	return r < 0 ? load_failed(r, NULL, error) : sd_bus_reply_method_return(m, "");
}

static int reload(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed,
		  sd_bus_error *error)
{
	(void)o;
	(void)allowed;
	(void)error;
	service_reload(b->daemon);
	return sd_bus_reply_method_return(m, "");
}

static void print_dump(const struct daemon *d, FILE *f)
{
	fprintf(f, "version: " RESIDENTD_VERSION "\nstate: %s\n", service_state_to_string(d->state));
	if (reason_of(d))
		fprintf(f, "reason: %s\n", reason_of(d));
	fprintf(f, "uptime: %" PRIu64 " s\n", (now_us() - d->started_us) / 1000000);
	if (d->model)
		fprintf(f, "model: %s, %s, %" PRIu64 " parameters, %" PRIu64 " bytes\n", d->model->name,
			d->model->arch->name, d->model->n_params, d->model->weight_bytes);
	fprintf(f, "engine: %s, %u threads, context %u\n",
		d->stats.backend ? d->stats.backend : "none", d->stats.threads, d->stats.context);
	fprintf(f, "gpu: %s%s%s%s%s\n", inspect_gpu_state(d->stats.card.state),
		d->stats.card.name[0] ? ", " : "", d->stats.card.name,
		d->stats.card.why[0] ? ": " : "", d->stats.card.why);
	fprintf(f, "conversations: %" PRIu64 " of %" PRIu64 " bytes, %" PRIu64 " evicted\n",
		d->stats.kv_bytes_used, d->stats.kv_bytes_max, d->stats.n_evicted);
	fprintf(f, "connections: %zu\nsessions: %zu\nrequests: %zu now, %" PRIu64 " in all\n",
		d->n_conns, d->n_sessions, d->n_requests, d->n_requests_total);
	for (const struct session *s = d->sessions; s; s = s->next)
		fprintf(f, "session %s: uid %u, %zu tokens%s%s\n", s->id, s->uid, s->context_used,
			s->keep ? ", kept" : "", s->busy ? ", busy" : "");
	for (const struct request *r = d->requests; r; r = r->next)
		fprintf(f, "request %" PRIu64 ": uid %u, at token %zu\n", r->id, r->uid, r->position);
	for (size_t i = 0; i < d->n_usage; i++)
		fprintf(f, "user %u: %" PRIu64 " requests, %" PRIu64 " us of the engine\n",
			d->usage[i].uid, d->usage[i].requests, d->usage[i].engine_us);
	for (const struct lease *l = d->leases; l; l = l->next)
		fprintf(f, "lease %s: uid %u, pid %d, %s: %s\n", lease_kind_to_string(l->kind),
			l->uid, (int)l->pid, l->who, l->why);
}

static int dump(struct bus *b, sd_bus_message *m, const struct order *o, bool allowed, sd_bus_error *error)
{
	_cleanup_(fclosep) FILE *f = NULL;
	int fd = memfd_create("residentd-dump", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	(void)o;
	(void)allowed;
	(void)error;
	if (fd < 0)
		return -errno;
	f = fdopen(fd, "w");
	if (!f) {
		close(fd);
		return -ENOMEM;
	}
	print_dump(b->daemon, f);
	if (fflush(f) != 0 || fseek(f, 0, SEEK_SET) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
		return -errno;
	return sd_bus_reply_method_return(m, "h", fd);
}

/* ---- from a call to its answer ---- */

/* clang-format off */
static const struct method methods[] = {
	{"GetAvailability",      read_nothing,         MAY_EVERYBODY, NULL,                            get_availability},
	{"OpenSession",          read_open_session,    MAY_ALLOWED,   "org.residentd1.use",            open_session},
	{"Hold",                 read_hold,            MAY_ALLOWED,   "org.residentd1.hold",           hold},
	{"YieldGpu",             read_yield_gpu,       MAY_ALLOWED,   "org.residentd1.yield-gpu",      yield_gpu},
	{"ListSessions",         read_nothing,         MAY_SEE,       "org.residentd1.inspect-users",  list_sessions},
	{"ListHolds",            read_nothing,         MAY_EVERYBODY, NULL,                            list_holds},
	{"SetUserLimits",        read_set_user_limits, MAY_ALLOWED,   "org.residentd1.set-policy",     set_user_limits},
	{"GetUserLimits",        read_user,            MAY_OWN,       "org.residentd1.inspect-users",  get_user_limits},
	{"LoadModel",            read_load_model,      MAY_ALLOWED,   "org.residentd1.load-model",     load_model},
	{"UnloadModel",          read_nothing,         MAY_ALLOWED,   "org.residentd1.load-model",     unload_model},
	{"Reload",               read_nothing,         MAY_ALLOWED,   "org.residentd1.set-policy",     reload},
	{"DumpByFileDescriptor", read_nothing,         MAY_ALLOWED,   "org.residentd1.inspect-users",  dump},
};
/* clang-format on */

static const struct method *find_method(sd_bus_message *m)
{
	const char *name = sd_bus_message_get_member(m);

	for (size_t i = 0; i < ARRAY_SIZE(methods); i++)
		if (streq(methods[i].name, name))
			return &methods[i];
	return NULL;
}

/* Errors of sd-bus and of the modules become rows of the table; those that have a name keep it. */
static int complete(int r, sd_bus_error *error)
{
	if (r < 0 && !sd_bus_error_is_set(error))
		return bus_fail(error, error_from_errno(r), NULL, 0);
	return r;
}

static int read_order(sd_bus_message *m, const struct method *method, struct order *o, sd_bus_error *error)
{
	int r = method->read(m, o, error);

	if (r < 0 && !sd_bus_error_is_set(error))
		return invalid(error, "the arguments cannot be read");
	return r;
}

static int read_and_run(struct bus *b, sd_bus_message *m, const struct method *method, bool allowed,
			sd_bus_error *error)
{
	struct order o = {};
	int r = read_order(m, method, &o, error);

	return r < 0 ? r : complete(method->run(b, m, &o, allowed, error), error);
}

static int not_allowed(const struct method *method, int r, sd_bus_error *error)
{
	char text[128];

	if (r < 0)
		snprintf(text, sizeof(text), "cannot ask polkit about %s: %s", method->action,
			 strerror(-r));
	else
		snprintf(text, sizeof(text), "polkit does not permit %s", method->action);
	return bus_fail(error, r == -ENOBUFS ? ERROR_QUEUE_FULL : ERROR_NOT_AUTHORIZED, text, 0);
}

static void on_answer(sd_bus_message *m, int r, void *arg)
{
	_cleanup_(sd_bus_error_free) sd_bus_error error = {};
	const struct method *method = find_method(m);
	struct bus *b = arg;

	if (r <= 0 && method->may != MAY_SEE) {
		(void)not_allowed(method, r, &error);
		r = -EACCES;
	} else {
		bool allowed = r > 0;

		r = sd_bus_message_rewind(m, true);
		r = r < 0 ? complete(r, &error) : read_and_run(b, m, method, allowed, &error);
	}
	if (r < 0)
		(void)sd_bus_reply_method_error(m, &error);
}

/* 1: the user in question is the sender; negative: there is none of this name. */
static int is_own(struct bus *b, sd_bus_message *m, const struct order *o, sd_bus_error *error)
{
	char buffer[16384];
	struct passwd user;
	uid_t uid;
	int r = find_user(o->user, &user, buffer, sizeof(buffer), error);

	return r < 0 ? r : bus_sender(b, m, &uid, NULL) >= 0 && user.pw_uid == uid;
}

static int on_method(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	const struct method *method = find_method(m);
	struct bus *b = arg;
	struct order o = {};
	int r;

	if (!method) /* the vtable and the table differ */
		return bus_fail(error, ERROR_INTERNAL, NULL, 0);
	r = read_order(m, method, &o, error);
	if (r >= 0 && method->may == MAY_OWN)
		r = is_own(b, m, &o, error);
	if (r < 0)
		return r;
	if (method->may == MAY_EVERYBODY || (method->may == MAY_OWN && r > 0)) {
		r = complete(method->run(b, m, &o, true, error), error);
		return r < 0 ? r : 1;
	}
	r = polkit_check(m, method->action, method->may != MAY_SEE, on_answer, b);
	return r < 0 ? not_allowed(method, r, error) : 1;
}

/* ---- properties ---- */

static int get_state(sd_bus *bus, const char *path, const char *interface, const char *property,
		     sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	const struct bus *b = arg;

	(void)bus;
	(void)path;
	(void)interface;
	(void)error;
	if (streq(property, "State"))
		return sd_bus_message_append(reply, "s", service_state_to_string(b->daemon->state));
	return sd_bus_message_append(reply, "s", reason_of(b->daemon) ? reason_of(b->daemon) : "");
}

static int get_version(sd_bus *bus, const char *path, const char *interface, const char *property,
		       sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	(void)bus;
	(void)path;
	(void)interface;
	(void)property;
	(void)arg;
	(void)error;
	return sd_bus_message_append(reply, "s", RESIDENTD_VERSION);
}

static int get_model(sd_bus *bus, const char *path, const char *interface, const char *property,
		     sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	const struct bus *b = arg;
	_cleanup_(freep) char *model = b->daemon->model ? bus_model_path(b->daemon->model) : NULL;

	(void)bus;
	(void)path;
	(void)interface;
	(void)property;
	(void)error;
	return sd_bus_message_append(reply, "o", model ? model : "/");
}

static int get_count(sd_bus *bus, const char *path, const char *interface, const char *property,
		     sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	const struct bus *b = arg;
	const struct daemon *d = b->daemon;

	(void)bus;
	(void)path;
	(void)interface;
	(void)error;
	if (streq(property, "RequestsTotal"))
		return sd_bus_message_append(reply, "t", d->n_requests_total);
	return sd_bus_message_append(
		reply, "u", (uint32_t)(streq(property, "Holds") ? d->n_leases : d->n_sessions));
}

/* Every member is for everybody as far as sd-bus is concerned: policy/org.residentd1.conf and polkit
 * decide. */
#define OPEN SD_BUS_VTABLE_UNPRIVILEGED

/* clang-format off */
const sd_bus_vtable bus_manager_vtable[] = {
	SD_BUS_VTABLE_START(0),
	SD_BUS_METHOD_WITH_ARGS("GetAvailability", SD_BUS_NO_ARGS, SD_BUS_RESULT("a{sv}", availability), on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("OpenSession", SD_BUS_ARGS("a{sv}", options), SD_BUS_RESULT("o", session, "h", connection), on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("Hold", SD_BUS_ARGS("s", who, "s", why), SD_BUS_RESULT("h", lease), on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("YieldGpu", SD_BUS_ARGS("s", who, "s", why, "a{sv}", options), SD_BUS_RESULT("h", lease), on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("ListSessions", SD_BUS_NO_ARGS, SD_BUS_RESULT("a(ouxb)", sessions), on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("ListHolds", SD_BUS_NO_ARGS, SD_BUS_RESULT("a(sussut)", holds), on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("SetUserLimits", SD_BUS_ARGS("s", user, "a{ss}", limits, "a{sv}", options), SD_BUS_NO_RESULT, on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("GetUserLimits", SD_BUS_ARGS("s", user), SD_BUS_RESULT("a{s(ss)}", limits), on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("LoadModel", SD_BUS_ARGS("s", name, "a{sv}", options), SD_BUS_NO_RESULT, on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("UnloadModel", SD_BUS_NO_ARGS, SD_BUS_NO_RESULT, on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("Reload", SD_BUS_NO_ARGS, SD_BUS_NO_RESULT, on_method, OPEN),
	SD_BUS_METHOD_WITH_ARGS("DumpByFileDescriptor", SD_BUS_NO_ARGS, SD_BUS_RESULT("h", dump), on_method, OPEN),
	SD_BUS_PROPERTY("Version", "s", get_version, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("State", "s", get_state, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
	SD_BUS_PROPERTY("Reason", "s", get_state, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
	SD_BUS_PROPERTY("Model", "o", get_model, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
	SD_BUS_PROPERTY("Holds", "u", get_count, 0, SD_BUS_VTABLE_PROPERTY_EMITS_CHANGE),
	SD_BUS_PROPERTY("Sessions", "u", get_count, 0, 0),
	SD_BUS_PROPERTY("RequestsTotal", "t", get_count, 0, 0),
	SD_BUS_SIGNAL_WITH_ARGS("StateChanged", SD_BUS_ARGS("s", state, "s", reason), 0),
	SD_BUS_SIGNAL_WITH_ARGS("SessionNew", SD_BUS_ARGS("o", session, "u", uid), 0),
	SD_BUS_SIGNAL_WITH_ARGS("SessionRemoved", SD_BUS_ARGS("o", session, "u", uid), 0),
	SD_BUS_SIGNAL_WITH_ARGS("Evicted", SD_BUS_ARGS("t", bytes), 0),
	SD_BUS_SIGNAL_WITH_ARGS("Pressure", SD_BUS_ARGS("s", level), 0),
	SD_BUS_VTABLE_END
};
/* clang-format on */
