/* SPDX-License-Identifier: MIT */
/*
 * control.c: the bus half of libresident, on libdbus. See resident-control.h for the contract and
 * policy/org.residentd1.xml for the interface.
 *
 * Owns one private connection and whatever was handed out last; a connection belongs to one thread
 * at a time. Refuses to know what a setting or a state means. Neither the service nor other peers
 * are trusted: a reply's signature is checked before it is read, and a signal counts only when it
 * comes from the present owner of the service's name, since anybody can send one to this connection.
 * Invariant: whatever arrives is taken off libdbus' queue by the next call, and leaves at most one
 * event behind, so a program that never processes events does not grow.
 */
#include "client/resident-control.h"

#include "daemon/base.h"
#include "daemon/errors.h"

#include <dbus/dbus.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#define NAME               "org.residentd1"
#define ROOT               "/org/residentd1"
#define MANAGER            "org.residentd1.Manager"
#define ERROR_PREFIX       "org.residentd1.Error."
#define TIMEOUT_MS_DEFAULT 30000
#define MESSAGE_BYTES_MAX  (16 << 20) /* of one message: bounds every string in it */
#define E_BASE             10000      /* enum resident_error_code is this + enum error_code */

#define MATCH_STATE                                                                             \
	"type='signal',sender='" NAME "',path='" ROOT "',interface='" MANAGER "',member='State" \
	"Changed'"
#define MATCH_OWNER                                                                         \
	"type='signal',sender='" DBUS_SERVICE_DBUS "',interface='" DBUS_INTERFACE_DBUS "'," \
	"member='NameOwnerChanged',arg0='" NAME "'"

struct resident_control {
	DBusConnection *bus;
	int epoll_fd; /* handed out: ready when the bus or wake_fd is */
	int wake_fd;  /* eventfd: an event waits, but the socket has nothing more to read */
	uint32_t timeout_ms;
	bool interactive, in_callback;

	resident_control_event_fn fn;
	void *userdata;
	char *owner; /* unique name of the service while watched; NULL: not on the bus */
	bool changed;
	char *state, *reason; /* the event that waits: state NULL: the service is gone */

	struct resident_error error;
	char *error_text; /* error.message, when it is ours to free */

	/* Handed out until the next call; strings point into reply. */
	DBusMessage *reply;
	void *list;
	struct resident_control_availability availability;
	struct resident_control_status status;
};

static void unrefp(DBusMessage **m)
{
	if (*m)
		dbus_message_unref(*m);
}

/* ---- errors ---- */

/* Remembers and returns code. Takes message (malloc'd; NULL when memory was short). */
static int set_error(struct resident_control *c, int code, uint32_t retry_after_ms, char *message)
{
	free(c->error_text);
	c->error_text = message;
	c->error = (struct resident_error){
		.code = code,
		.message = message ? message : resident_strerror(code),
		.retry_after_ms = retry_after_ms,
	};
	return code;
}

_printf_(3, 4) static int error_here(struct resident_control *c, int code, const char *format, ...)
{
	char *s = NULL;
	va_list ap;

	va_start(ap, format);
	if (vasprintf(&s, format, ap) < 0)
		s = NULL;
	va_end(ap);
	return set_error(c, code, 0, s);
}

static int no_memory(struct resident_control *c)
{
	return set_error(c, -ENOMEM, 0, NULL);
}

static int bad_reply(struct resident_control *c, const char *what)
{
	return error_here(c, -EPROTO, "the service does not speak the interface: %s", what);
}

_public_ const struct resident_error *resident_control_last_error(const struct resident_control *c)
{
	return &c->error;
}

/* An error of the bus or of libdbus itself to -errno. */
static int bus_errno(const char *name)
{
	static const struct {
		const char *name;
		int err;
	} table[] = {
		{ DBUS_ERROR_NO_MEMORY, ENOMEM },
		{ DBUS_ERROR_SERVICE_UNKNOWN, ECONNREFUSED },
		{ DBUS_ERROR_NAME_HAS_NO_OWNER, ECONNREFUSED },
		{ DBUS_ERROR_NO_SERVER, ECONNREFUSED },
		{ DBUS_ERROR_FILE_NOT_FOUND, ENOENT },
		{ DBUS_ERROR_BAD_ADDRESS, EINVAL },
		{ DBUS_ERROR_INVALID_ARGS, EINVAL },
		{ DBUS_ERROR_ACCESS_DENIED, EACCES },
		{ DBUS_ERROR_AUTH_FAILED, EACCES },
		{ DBUS_ERROR_INTERACTIVE_AUTHORIZATION_REQUIRED, EACCES },
		{ DBUS_ERROR_TIMEOUT, ETIMEDOUT },
		{ DBUS_ERROR_TIMED_OUT, ETIMEDOUT },
		{ DBUS_ERROR_NO_REPLY, ETIMEDOUT },
		{ DBUS_ERROR_DISCONNECTED, ECONNRESET },
		{ DBUS_ERROR_LIMITS_EXCEEDED, ENOBUFS },
		{ DBUS_ERROR_UNKNOWN_METHOD, EOPNOTSUPP },
		{ DBUS_ERROR_UNKNOWN_INTERFACE, EOPNOTSUPP },
		{ DBUS_ERROR_UNKNOWN_OBJECT, EOPNOTSUPP },
		{ DBUS_ERROR_UNKNOWN_PROPERTY, EOPNOTSUPP },
		{ DBUS_ERROR_NOT_SUPPORTED, EOPNOTSUPP },
	};

	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		if (streq(table[i].name, name))
			return -table[i].err;
	/* What the bus and systemd say when the service could not be started. */
	if (startswith(name, "org.freedesktop.DBus.Error.Spawn.") ||
	    startswith(name, "org.freedesktop.systemd1."))
		return -ECONNREFUSED;
	return -EREMOTEIO;
}

/* A number at *p, which is moved behind it. */
static bool take_number(const char **p, uint64_t max, uint64_t *ret)
{
	const char *s = *p;
	uint64_t n = 0;

	for (; *s >= '0' && *s <= '9' && n <= max; s++)
		n = n * 10 + (uint64_t)(*s - '0');
	if (s == *p || n > max)
		return false;
	*p = s;
	*ret = n;
	return true;
}

static bool take_text(const char **p, const char *text)
{
	if (!startswith(*p, text))
		return false;
	*p += strlen(text);
	return true;
}

/* Splits "TEXT (error N, retry after M ms)"; returns the length of TEXT. Without such a tail it is
 * all text. */
static size_t split_message(const char *message, uint64_t *ret_number, uint64_t *ret_retry_ms)
{
	const char *tail = NULL, *p;
	uint64_t number, retry = 0;

	for (p = message; (p = strstr(p, " (error ")); p++)
		tail = p;
	p = tail;
	if (!p || !take_text(&p, " (error ") || !take_number(&p, E_BASE - 1, &number))
		return strlen(message);
	if (take_text(&p, ", retry after ") &&
	    (!take_number(&p, UINT32_MAX, &retry) || !take_text(&p, " ms")))
		return strlen(message);
	if (!streq(p, ")"))
		return strlen(message);
	*ret_number = number;
	*ret_retry_ms = retry;
	return (size_t)(tail - message);
}

static int service_error(struct resident_control *c, const char *name, const char *message)
{
	uint64_t number = ERROR_INTERNAL, retry_ms = 0;
	size_t len = split_message(message, &number, &retry_ms);

	for (int i = ERROR_NONE + 1; i < ERROR_CODE_MAX; i++) {
		const struct error_entry *e = error_by_code((enum error_code)i);

		if (streq(e->dbus, name)) {
			number = (uint64_t)e->code;
			if (len == 0)
				message = e->text, len = strlen(message);
			break;
		}
	}
	if (number == 0)
		number = ERROR_INTERNAL;
	if (len == 0)
		message = name, len = strlen(message);
	return set_error(c, -(E_BASE + (int)number), (uint32_t)retry_ms, strndup(message, len));
}

static int reply_error(struct resident_control *c, DBusMessage *reply)
{
	const char *name = dbus_message_get_error_name(reply), *message = "";
	int r;

	/* Errors need not have a text; one of another type is worth less than the error itself. */
	if (!dbus_message_get_args(reply, NULL, DBUS_TYPE_STRING, &message, DBUS_TYPE_INVALID))
		message = "";
	if (startswith(name, ERROR_PREFIX))
		return service_error(c, name, message);
	r = bus_errno(name);
	if (!dbus_message_get_sender(reply) && !dbus_connection_get_is_connected(c->bus))
		return error_here(c, -ECONNRESET, "the connection to the bus has ended");
	/* The bus says so for a service that died; without a sender it was this side's patience. */
	if (streq(name, DBUS_ERROR_NO_REPLY) && dbus_message_get_sender(reply))
		r = -ECONNRESET;
	if (r == -EREMOTEIO || !*message)
		return error_here(c, r, "%s%s%s", name, *message ? ": " : "", message);
	return error_here(c, r, "%s", message);
}

/* ---- signals ---- */

/* Keeps what is to be told, in place of what was not told yet. */
static void set_event(struct resident_control *c, const char *state, const char *reason)
{
	char *s = state ? strdup(state) : NULL, *r = reason && *reason ? strdup(reason) : NULL;

	if (state && !s) { /* short of memory: an older event is a wrong one */
		free(r);
		c->changed = false;
		return;
	}
	free(c->state);
	free(c->reason);
	c->state = s;
	c->reason = r;
	c->changed = true;
}

static void on_owner_changed(struct resident_control *c, DBusMessage *m)
{
	const char *name, *before, *now;

	if (!dbus_message_get_args(m, NULL, DBUS_TYPE_STRING, &name, DBUS_TYPE_STRING, &before,
				   DBUS_TYPE_STRING, &now, DBUS_TYPE_INVALID) ||
	    !streq(name, NAME))
		return;
	free(c->owner);
	c->owner = *now ? strdup(now) : NULL;
	if (!*now)
		set_event(c, NULL, NULL);
}

static DBusHandlerResult on_message(DBusConnection *bus, DBusMessage *m, void *userdata)
{
	struct resident_control *c = userdata;
	const char *sender = dbus_message_get_sender(m), *state, *reason;

	(void)bus;
	if (!c->fn || !sender)
		return DBUS_HANDLER_RESULT_HANDLED;
	if (streq(sender, DBUS_SERVICE_DBUS) &&
	    dbus_message_is_signal(m, DBUS_INTERFACE_DBUS, "NameOwnerChanged"))
		on_owner_changed(c, m);
	else if (c->owner && streq(sender, c->owner) &&
		 dbus_message_is_signal(m, MANAGER, "StateChanged") &&
		 dbus_message_get_args(m, NULL, DBUS_TYPE_STRING, &state, DBUS_TYPE_STRING, &reason,
				       DBUS_TYPE_INVALID))
		set_event(c, state, reason);
	return DBUS_HANDLER_RESULT_HANDLED; /* also calls: nobody has any here */
}

/* Takes all that has arrived off the queue. */
static void drain(struct resident_control *c)
{
	while (dbus_connection_dispatch(c->bus) == DBUS_DISPATCH_DATA_REMAINS)
		;
	if (c->changed)
		eventfd_write(c->wake_fd, 1);
}

/* ---- calls ---- */

static void forget_reply(struct resident_control *c)
{
	if (c->reply)
		dbus_message_unref(c->reply);
	c->reply = NULL;
	free(c->list);
	c->list = NULL;
}

/* At the beginning of every public function that talks to the bus: what was handed out goes. */
static int begin(struct resident_control *c)
{
	if (c->in_callback)
		return error_here(c, -EBUSY, "not from the callback");
	forget_reply(c);
	if (!dbus_connection_get_is_connected(c->bus))
		return error_here(c, -ENOTCONN, "the connection to the bus has ended");
	return 0;
}

static int check_text(struct resident_control *c, const char *what, const char *text)
{
	/* libdbus takes no other text: it would complain on standard error, or abort. */
	if (!text)
		return error_here(c, -EINVAL, "%s is missing", what);
	if (!dbus_validate_utf8(text, NULL))
		return error_here(c, -EILSEQ, "%s is not valid UTF-8", what);
	return 0;
}

/* Sends m (NULL: memory was short) and waits. The reply, of this signature, stays in c->reply. */
static int call(struct resident_control *c, DBusMessage *m, const char *signature)
{
	_cleanup_(unrefp) DBusMessage *reply = NULL;
	DBusPendingCall *pending = NULL;
	int timeout = c->timeout_ms == 0 ? DBUS_TIMEOUT_INFINITE
					 : (int)MIN(c->timeout_ms, (uint32_t)DBUS_TIMEOUT_INFINITE);

	if (!m)
		return no_memory(c);
	drain(c);
	dbus_message_set_allow_interactive_authorization(m, c->interactive);
	if (!dbus_connection_send_with_reply(c->bus, m, &pending, timeout))
		return no_memory(c);
	if (!pending)
		return error_here(c, -ENOTCONN, "the connection to the bus has ended");
	dbus_pending_call_block(pending);
	reply = dbus_pending_call_steal_reply(pending);
	dbus_pending_call_unref(pending);
	drain(c);
	if (!reply)
		return error_here(c, -ECONNRESET, "the connection to the bus has ended");
	if (dbus_message_get_type(reply) == DBUS_MESSAGE_TYPE_ERROR)
		return reply_error(c, reply);
	if (!dbus_message_has_signature(reply, signature))
		return error_here(c, -EPROTO,
				  "the service does not speak the interface: '%s' in place of '%s'",
				  dbus_message_get_signature(reply), signature);
	forget_reply(c);
	c->reply = TAKE_PTR(reply);
	return 0;
}

static DBusMessage *manager_method(const char *method)
{
	return dbus_message_new_method_call(NAME, ROOT, MANAGER, method);
}

static DBusMessage *bus_method(const char *method, const char *argument)
{
	DBusMessage *m = dbus_message_new_method_call(DBUS_SERVICE_DBUS, DBUS_PATH_DBUS,
						      DBUS_INTERFACE_DBUS, method);

	if (m && !dbus_message_append_args(m, DBUS_TYPE_STRING, &argument, DBUS_TYPE_INVALID)) {
		dbus_message_unref(m);
		m = NULL;
	}
	return m;
}

/* Appends a{sv}: one entry, or with key NULL none. */
static bool put_options(DBusMessage *m, const char *key, int type, const void *value)
{
	const char signature[] = { (char)type, 0 };
	DBusMessageIter args, dict, entry, variant;

	dbus_message_iter_init_append(m, &args);
	if (!dbus_message_iter_open_container(&args, DBUS_TYPE_ARRAY, "{sv}", &dict))
		return false;
	if (key && (!dbus_message_iter_open_container(&dict, DBUS_TYPE_DICT_ENTRY, NULL, &entry) ||
		    !dbus_message_iter_append_basic(&entry, DBUS_TYPE_STRING, &key) ||
		    !dbus_message_iter_open_container(&entry, DBUS_TYPE_VARIANT, signature, &variant) ||
		    !dbus_message_iter_append_basic(&variant, type, value) ||
		    !dbus_message_iter_close_container(&entry, &variant) ||
		    !dbus_message_iter_close_container(&dict, &entry)))
		return false;
	return dbus_message_iter_close_container(&args, &dict);
}

static bool put_flag(DBusMessage *m, const char *key, bool flag)
{
	dbus_bool_t value = flag;

	return put_options(m, flag ? key : NULL, DBUS_TYPE_BOOLEAN, &value);
}

/* ---- replies ---- */

struct field {
	const char *key;
	int type;
	void *value; /* const char *, dbus_uint32_t or dbus_uint64_t; left as it is without the key */
};

/* Reads the a{sv} of c->reply. Keys that nobody asks for are of a later service. */
static int read_fields(struct resident_control *c, const struct field *fields, size_t n)
{
	DBusMessageIter args, dict, entry, variant;
	const char *key;

	dbus_message_iter_init(c->reply, &args);
	dbus_message_iter_recurse(&args, &dict);
	for (; dbus_message_iter_get_arg_type(&dict) != DBUS_TYPE_INVALID;
	     dbus_message_iter_next(&dict)) {
		dbus_message_iter_recurse(&dict, &entry);
		dbus_message_iter_get_basic(&entry, &key);
		dbus_message_iter_next(&entry);
		dbus_message_iter_recurse(&entry, &variant);
		for (size_t i = 0; i < n; i++) {
			if (!streq(fields[i].key, key))
				continue;
			if (dbus_message_iter_get_arg_type(&variant) != fields[i].type)
				return bad_reply(c, fields[i].key);
			dbus_message_iter_get_basic(&variant, fields[i].value);
		}
	}
	return 0;
}

/* The bus passes on no message whose descriptors are missing, but this one need not be the bus. */
static int take_fd(struct resident_control *c, DBusMessageIter *args, int *ret_fd)
{
	int fd = -1;

	dbus_message_iter_get_basic(args, &fd);
	if (fd < 0)
		return bad_reply(c, "the descriptor is missing");
	*ret_fd = fd;
	return 0;
}

/* Begins to read the array of c->reply: its elements are zeroed memory of size bytes each, and
 * belong to c. */
static int begin_list(struct resident_control *c, size_t size, DBusMessageIter *ret_elements,
		      size_t *ret_n)
{
	DBusMessageIter args;
	size_t n = 0;

	dbus_message_iter_init(c->reply, &args);
	dbus_message_iter_recurse(&args, ret_elements);
	for (DBusMessageIter i = *ret_elements;
	     dbus_message_iter_get_arg_type(&i) != DBUS_TYPE_INVALID; dbus_message_iter_next(&i))
		n++;
	c->list = calloc(MAX(n, (size_t)1), size);
	if (!c->list)
		return no_memory(c);
	*ret_n = n;
	return 0;
}

/* The next basic value of a structure. */
static void take(DBusMessageIter *i, void *value)
{
	dbus_message_iter_get_basic(i, value);
	dbus_message_iter_next(i);
}

/* ---- connection ---- */

_public_ struct resident_control *resident_control_close(struct resident_control *c)
{
	if (!c)
		return NULL;
	if (c->bus) {
		dbus_connection_remove_filter(c->bus, on_message, c);
		dbus_connection_close(c->bus);
		dbus_connection_unref(c->bus);
	}
	closep(&c->epoll_fd);
	closep(&c->wake_fd);
	forget_reply(c);
	free(c->owner);
	free(c->state);
	free(c->reason);
	free(c->error_text);
	free(c);
	return NULL;
}
DEFINE_CLEANUP(struct resident_control *, resident_control_close)

static int open_bus(struct resident_control *c, const char *address)
{
	_cleanup_(dbus_error_free) DBusError e = DBUS_ERROR_INIT;

	/* Not every version of libdbus leaves SIGPIPE alone, but all write with MSG_NOSIGNAL here. */
	dbus_connection_set_change_sigpipe(FALSE);
	c->bus = address ? dbus_connection_open_private(address, &e)
			 : dbus_bus_get_private(DBUS_BUS_SYSTEM, &e);
	if (!c->bus)
		return bus_errno(e.name);
	dbus_connection_set_exit_on_disconnect(c->bus, FALSE);
	dbus_connection_set_max_message_size(c->bus, MESSAGE_BYTES_MAX);
	if (address && !dbus_bus_register(c->bus, &e))
		return bus_errno(e.name);
	return dbus_connection_add_filter(c->bus, on_message, c, NULL) ? 0 : -ENOMEM;
}

static int open_fds(struct resident_control *c)
{
	struct epoll_event event = { .events = EPOLLIN };
	int fd;

	if (!dbus_connection_get_unix_fd(c->bus, &fd))
		return -ENOTCONN;
	c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (c->wake_fd < 0 || c->epoll_fd < 0 || epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ||
	    epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, c->wake_fd, &event) < 0)
		return -errno;
	return 0;
}

_public_ int resident_control_connect(const char *address, struct resident_control **ret)
{
	_cleanup_(resident_control_closep) struct resident_control *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return -ENOMEM;
	c->epoll_fd = c->wake_fd = -1;
	c->timeout_ms = TIMEOUT_MS_DEFAULT;
	c->error.message = "";
	r = open_bus(c, address);
	if (r == 0)
		r = open_fds(c);
	if (r < 0)
		return r;
	*ret = TAKE_PTR(c);
	return 0;
}

_public_ void resident_control_set_timeout(struct resident_control *c, uint32_t timeout_ms)
{
	c->timeout_ms = timeout_ms;
}

_public_ void resident_control_set_interactive(struct resident_control *c, bool interactive)
{
	c->interactive = interactive;
}

/* ---- the service ---- */

_public_ int resident_control_get_availability(struct resident_control *c,
					       const struct resident_control_availability **ret)
{
	struct resident_control_availability v = {};
	const struct field fields[] = {
		{ "state", DBUS_TYPE_STRING, &v.state },
		{ "reason", DBUS_TYPE_STRING, &v.reason },
		{ "model", DBUS_TYPE_STRING, &v.model },
		{ "retry_after_ms", DBUS_TYPE_UINT32, &v.retry_after_ms },
		{ "queued", DBUS_TYPE_UINT32, &v.queued },
		{ "sessions", DBUS_TYPE_UINT32, &v.sessions },
	};
	_cleanup_(unrefp) DBusMessage *m = manager_method("GetAvailability");
	int r = begin(c);

	if (r == 0)
		r = call(c, m, "a{sv}");
	if (r == 0)
		r = read_fields(c, fields, ARRAY_SIZE(fields));
	if (r == 0 && !v.state)
		r = bad_reply(c, "there is no state");
	if (r < 0)
		return r;
	c->availability = v;
	*ret = &c->availability;
	return 0;
}

_public_ int resident_control_get_status(struct resident_control *c,
					 const struct resident_control_status **ret)
{
	struct resident_control_status s = {};
	const struct field fields[] = {
		{ "Version", DBUS_TYPE_STRING, &s.version },
		{ "State", DBUS_TYPE_STRING, &s.state },
		{ "Reason", DBUS_TYPE_STRING, &s.reason },
		{ "Model", DBUS_TYPE_OBJECT_PATH, &s.model },
		{ "Holds", DBUS_TYPE_UINT32, &s.holds },
		{ "Sessions", DBUS_TYPE_UINT32, &s.sessions },
		{ "RequestsTotal", DBUS_TYPE_UINT64, &s.requests_total },
	};
	_cleanup_(unrefp) DBusMessage *m =
		dbus_message_new_method_call(NAME, ROOT, DBUS_INTERFACE_PROPERTIES, "GetAll");
	const char *interface = MANAGER;
	int r = begin(c);

	if (r < 0)
		return r;
	if (!m || !dbus_message_append_args(m, DBUS_TYPE_STRING, &interface, DBUS_TYPE_INVALID))
		return no_memory(c);
	r = call(c, m, "a{sv}");
	if (r == 0)
		r = read_fields(c, fields, ARRAY_SIZE(fields));
	if (r == 0 && (!s.version || !s.state))
		r = bad_reply(c, "there is no version or no state");
	if (r < 0)
		return r;
	if (s.reason && !*s.reason)
		s.reason = NULL;
	if (s.model && streq(s.model, "/"))
		s.model = NULL;
	c->status = s;
	*ret = &c->status;
	return 0;
}

_public_ int resident_control_open_session(struct resident_control *c, bool keep,
					   const char **ret_path, int *ret_fd)
{
	_cleanup_(unrefp) DBusMessage *m = manager_method("OpenSession");
	DBusMessageIter args;
	const char *path;
	int r = begin(c);

	if (r < 0)
		return r;
	if (!m || !put_flag(m, "keep", keep))
		return no_memory(c);
	r = call(c, m, "oh");
	if (r < 0)
		return r;
	dbus_message_iter_init(c->reply, &args);
	take(&args, &path);
	r = take_fd(c, &args, ret_fd);
	if (r < 0)
		return r;
	*ret_path = path;
	return 0;
}

static int put_names(struct resident_control *c, DBusMessage *m, const char *who, const char *why)
{
	int r = check_text(c, "who", who);

	if (r == 0)
		r = check_text(c, "why", why);
	if (r < 0)
		return r;
	if (!m || !dbus_message_append_args(m, DBUS_TYPE_STRING, &who, DBUS_TYPE_STRING, &why,
					    DBUS_TYPE_INVALID))
		return no_memory(c);
	return 0;
}

static int call_for_fd(struct resident_control *c, DBusMessage *m, int *ret_fd)
{
	DBusMessageIter args;
	int r = call(c, m, "h");

	if (r < 0)
		return r;
	dbus_message_iter_init(c->reply, &args);
	return take_fd(c, &args, ret_fd);
}

_public_ int resident_control_hold(struct resident_control *c, const char *who, const char *why,
				   int *ret_fd)
{
	_cleanup_(unrefp) DBusMessage *m = manager_method("Hold");
	int r = begin(c);

	if (r == 0)
		r = put_names(c, m, who, why);
	return r < 0 ? r : call_for_fd(c, m, ret_fd);
}

_public_ int resident_control_yield_gpu(struct resident_control *c, const char *who,
					const char *why, uint64_t bytes, int *ret_fd)
{
	_cleanup_(unrefp) DBusMessage *m = manager_method("YieldGpu");
	dbus_uint64_t value = bytes;
	int r = begin(c);

	if (r == 0)
		r = put_names(c, m, who, why);
	if (r < 0)
		return r;
	if (!put_options(m, bytes > 0 ? "bytes" : NULL, DBUS_TYPE_UINT64, &value))
		return no_memory(c);
	return call_for_fd(c, m, ret_fd);
}

_public_ int resident_control_list_sessions(struct resident_control *c,
					    const struct resident_control_session **ret, size_t *ret_n)
{
	_cleanup_(unrefp) DBusMessage *m = manager_method("ListSessions");
	struct resident_control_session *list;
	DBusMessageIter elements, fields;
	dbus_bool_t busy;
	size_t n;
	int r = begin(c);

	if (r == 0)
		r = call(c, m, "a(ouxb)");
	if (r == 0)
		r = begin_list(c, sizeof(*list), &elements, &n);
	if (r < 0)
		return r;
	list = c->list;
	for (size_t i = 0; i < n; i++, dbus_message_iter_next(&elements)) {
		dbus_message_iter_recurse(&elements, &fields);
		take(&fields, &list[i].path);
		take(&fields, &list[i].uid);
		take(&fields, &list[i].tokens_used);
		take(&fields, &busy);
		list[i].busy = busy;
	}
	*ret = list;
	*ret_n = n;
	return 0;
}

_public_ int resident_control_list_holds(struct resident_control *c,
					 const struct resident_control_lease **ret, size_t *ret_n)
{
	_cleanup_(unrefp) DBusMessage *m = manager_method("ListHolds");
	struct resident_control_lease *list;
	DBusMessageIter elements, fields;
	size_t n;
	int r = begin(c);

	if (r == 0)
		r = call(c, m, "a(sussut)");
	if (r == 0)
		r = begin_list(c, sizeof(*list), &elements, &n);
	if (r < 0)
		return r;
	list = c->list;
	for (size_t i = 0; i < n; i++, dbus_message_iter_next(&elements)) {
		dbus_message_iter_recurse(&elements, &fields);
		take(&fields, &list[i].kind);
		take(&fields, &list[i].uid);
		take(&fields, &list[i].who);
		take(&fields, &list[i].why);
		take(&fields, &list[i].pid);
		take(&fields, &list[i].since_us);
	}
	*ret = list;
	*ret_n = n;
	return 0;
}

/* ---- administration ---- */

/* A method of the manager whose first argument is a text. */
static int method_of(struct resident_control *c, const char *method, const char *what,
		     const char *text, DBusMessage **ret)
{
	_cleanup_(unrefp) DBusMessage *m = NULL;
	int r = begin(c);

	if (r == 0)
		r = check_text(c, what, text);
	if (r < 0)
		return r;
	m = manager_method(method);
	if (!m || !dbus_message_append_args(m, DBUS_TYPE_STRING, &text, DBUS_TYPE_INVALID))
		return no_memory(c);
	*ret = TAKE_PTR(m);
	return 0;
}

_public_ int resident_control_get_user_limits(struct resident_control *c, const char *user,
					      const struct resident_control_limit **ret, size_t *ret_n)
{
	_cleanup_(unrefp) DBusMessage *m = NULL;
	struct resident_control_limit *list;
	DBusMessageIter elements, entry, pair;
	size_t n;
	int r = method_of(c, "GetUserLimits", "the user", user, &m);

	if (r == 0)
		r = call(c, m, "a{s(ss)}");
	if (r == 0)
		r = begin_list(c, sizeof(*list), &elements, &n);
	if (r < 0)
		return r;
	list = c->list;
	for (size_t i = 0; i < n; i++, dbus_message_iter_next(&elements)) {
		dbus_message_iter_recurse(&elements, &entry);
		take(&entry, &list[i].key);
		dbus_message_iter_recurse(&entry, &pair);
		take(&pair, &list[i].value);
		take(&pair, &list[i].source);
	}
	*ret = list;
	*ret_n = n;
	return 0;
}

static bool put_limits(DBusMessage *m, const struct resident_control_limit *limits, size_t n)
{
	DBusMessageIter args, dict, entry;

	dbus_message_iter_init_append(m, &args);
	if (!dbus_message_iter_open_container(&args, DBUS_TYPE_ARRAY, "{ss}", &dict))
		return false;
	for (size_t i = 0; i < n; i++)
		if (!dbus_message_iter_open_container(&dict, DBUS_TYPE_DICT_ENTRY, NULL, &entry) ||
		    !dbus_message_iter_append_basic(&entry, DBUS_TYPE_STRING, &limits[i].key) ||
		    !dbus_message_iter_append_basic(&entry, DBUS_TYPE_STRING, &limits[i].value) ||
		    !dbus_message_iter_close_container(&dict, &entry))
			return false;
	return dbus_message_iter_close_container(&args, &dict);
}

_public_ int resident_control_set_user_limits(struct resident_control *c, const char *user,
					      const struct resident_control_limit *limits, size_t n,
					      bool runtime)
{
	_cleanup_(unrefp) DBusMessage *m = NULL;
	int r = method_of(c, "SetUserLimits", "the user", user, &m);

	for (size_t i = 0; r == 0 && i < n; i++) {
		r = check_text(c, "a key", limits[i].key);
		if (r == 0)
			r = check_text(c, "a value", limits[i].value);
	}
	if (r < 0)
		return r;
	if (!put_limits(m, limits, n) || !put_flag(m, "runtime", runtime))
		return no_memory(c);
	return call(c, m, "");
}

_public_ int resident_control_load_model(struct resident_control *c, const char *name, bool make_default)
{
	_cleanup_(unrefp) DBusMessage *m = NULL;
	int r = method_of(c, "LoadModel", "the name", name, &m);

	if (r < 0)
		return r;
	if (!put_flag(m, "default", make_default))
		return no_memory(c);
	return call(c, m, "");
}

_public_ int resident_control_unload_model(struct resident_control *c)
{
	_cleanup_(unrefp) DBusMessage *m = manager_method("UnloadModel");
	int r = begin(c);

	return r < 0 ? r : call(c, m, "");
}

_public_ int resident_control_reload(struct resident_control *c)
{
	_cleanup_(unrefp) DBusMessage *m = manager_method("Reload");
	int r = begin(c);

	return r < 0 ? r : call(c, m, "");
}

/* ---- changes of state ---- */

static int call_bus(struct resident_control *c, const char *method, const char *argument,
		    const char *signature)
{
	_cleanup_(unrefp) DBusMessage *m = bus_method(method, argument);

	return call(c, m, signature);
}

/* Who is the service? Asked for after the match on changes of it, so that none is missed. */
static int find_owner(struct resident_control *c)
{
	const char *owner;
	int r = call_bus(c, "GetNameOwner", NAME, "s");

	free(c->owner);
	c->owner = NULL;
	if (r == -ECONNREFUSED) /* not on the bus: as good an answer */
		return 0;
	if (r < 0)
		return r;
	dbus_message_get_args(c->reply, NULL, DBUS_TYPE_STRING, &owner, DBUS_TYPE_INVALID);
	c->owner = strdup(owner);
	return c->owner ? 0 : no_memory(c);
}

static void unwatch(struct resident_control *c)
{
	c->fn = NULL;
	free(c->owner);
	free(c->state);
	free(c->reason);
	c->owner = c->state = c->reason = NULL;
	c->changed = false;
	/* Not answered: what still comes is dropped. */
	dbus_bus_remove_match(c->bus, MATCH_STATE, NULL);
	dbus_bus_remove_match(c->bus, MATCH_OWNER, NULL);
	dbus_connection_flush(c->bus);
}

_public_ int resident_control_watch(struct resident_control *c, resident_control_event_fn fn,
				    void *userdata)
{
	int r = begin(c);

	if (r < 0)
		return r;
	if (c->fn)
		unwatch(c);
	if (!fn)
		return 0;
	c->fn = fn;
	c->userdata = userdata;
	r = call_bus(c, "AddMatch", MATCH_OWNER, "");
	if (r == 0)
		r = call_bus(c, "AddMatch", MATCH_STATE, "");
	if (r == 0)
		r = find_owner(c);
	if (r < 0)
		unwatch(c);
	return r;
}

_public_ int resident_control_fd(const struct resident_control *c)
{
	return c->epoll_fd;
}

_public_ int resident_control_process(struct resident_control *c)
{
	_cleanup_(freep) char *state = NULL, *reason = NULL;
	eventfd_t n;
	int r;

	if (c->in_callback)
		return error_here(c, -EBUSY, "not from the callback");
	if (dbus_connection_get_is_connected(c->bus))
		dbus_connection_read_write(c->bus, 0);
	drain(c);
	eventfd_read(c->wake_fd, &n);
	if (c->changed) {
		c->changed = false;
		state = TAKE_PTR(c->state);
		reason = TAKE_PTR(c->reason);
		c->in_callback = true;
		c->fn(c, &(struct resident_control_event){ .state = state, .reason = reason },
		      c->userdata);
		c->in_callback = false;
		return 1;
	}
	r = dbus_connection_get_is_connected(c->bus) ? 0 : -ENOTCONN;
	return r < 0 ? error_here(c, r, "the connection to the bus has ended") : 0;
}
