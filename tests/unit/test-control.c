/* SPDX-License-Identifier: MIT */
/*
 * test-control.c: the bus half of libresident against a dbus-daemon of its own and a service that is
 * one function per test, played by a thread.
 */
#include "tests/test.h"

#include "client/resident-control.h"
#include "daemon/base.h"

#include <dbus/dbus.h>
#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define NAME    "org.residentd1"
#define ROOT    "/org/residentd1"
#define MANAGER "org.residentd1.Manager"

static const char bus_config[] =
	"<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\" "
	"\"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n"
	"<busconfig><type>custom</type><listen>unix:path=%s/bus</listen><auth>EXTERNAL</auth>"
	"<policy context=\"default\"><allow send_destination=\"*\"/><allow receive_sender=\"*\"/>"
	"<allow own=\"*\"/></policy></busconfig>\n";

/* ---- a bus ---- */

struct bus {
	char dir[32], path[40], address[64];
	pid_t pid; /* 0: there is none */
};

static struct bus shared;

static bool bus_is_up(const struct bus *b)
{
	struct resident_control *c = NULL;

	for (int i = 0; i < 500; i++, usleep(10000))
		if (resident_control_connect(b->address, &c) == 0) {
			resident_control_close(c);
			return true;
		}
	return false;
}

static void bus_start(struct bus *b)
{
	char config[80];
	FILE *f;

	strcpy(b->dir, "/tmp/rd-bus-XXXXXX");
	assert_non_null(mkdtemp(b->dir));
	snprintf(config, sizeof(config), "--config-file=%s/conf", b->dir);
	snprintf(b->path, sizeof(b->path), "%s/bus", b->dir);
	snprintf(b->address, sizeof(b->address), "unix:path=%s", b->path);
	f = fopen(strchr(config, '/'), "we");
	assert_non_null(f);
	fprintf(f, bus_config, b->dir);
	fclose(f);
	b->pid = fork();
	if (b->pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		execlp("dbus-daemon", "dbus-daemon", config, "--nofork", (char *)NULL);
		_exit(127);
	}
	assert_true(b->pid > 0);
	if (waitpid(b->pid, NULL, WNOHANG) != 0 || !bus_is_up(b))
		b->pid = 0;
}

static void bus_stop(struct bus *b)
{
	char config[80];

	if (b->pid > 0) {
		kill(b->pid, SIGKILL);
		waitpid(b->pid, NULL, 0);
	}
	b->pid = 0;
	snprintf(config, sizeof(config), "%s/conf", b->dir);
	unlink(config);
	unlink(b->path);
	rmdir(b->dir);
}

static bool have_dbus_daemon(void)
{
	return system("command -v dbus-daemon >/dev/null 2>&1") == 0;
}

static int set_up(void **state)
{
	(void)state;
	if (have_dbus_daemon()) {
		bus_start(&shared);
		assert_true(shared.pid > 0);
	}
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	if (shared.pid > 0)
		bus_stop(&shared);
	return 0;
}

/* ---- a service ---- */

/* Returns the reply to call, or NULL: none. */
typedef DBusMessage *(*answer_fn)(DBusMessage *call);

struct service {
	DBusConnection *bus;
	_Atomic(answer_fn) answer;
	_Atomic(DBusMessage *) last; /* the last call, whose reply the test has seen */
	atomic_bool stop;
	pthread_t thread;
};

static DBusConnection *connect_bus(const struct bus *b)
{
	DBusConnection *c = dbus_connection_open_private(b->address, NULL);

	assert_non_null(c);
	dbus_connection_set_exit_on_disconnect(c, FALSE);
	assert_true(dbus_bus_register(c, NULL));
	return c;
}

static void disconnect(DBusConnection *c)
{
	dbus_connection_close(c);
	dbus_connection_unref(c);
}

static DBusHandlerResult on_message(DBusConnection *bus, DBusMessage *m, void *userdata)
{
	struct service *s = userdata;
	DBusMessage *reply, *before;

	if (dbus_message_get_type(m) != DBUS_MESSAGE_TYPE_METHOD_CALL)
		return DBUS_HANDLER_RESULT_HANDLED;
	before = atomic_exchange(&s->last, dbus_message_ref(m));
	if (before)
		dbus_message_unref(before);
	reply = atomic_load(&s->answer)(m);
	if (reply) {
		dbus_connection_send(bus, reply, NULL);
		dbus_message_unref(reply);
	}
	return DBUS_HANDLER_RESULT_HANDLED;
}

static void *serve(void *userdata)
{
	struct service *s = userdata;

	while (!atomic_load(&s->stop) && dbus_connection_read_write_dispatch(s->bus, 10))
		;
	return NULL;
}

static void service_start(struct service *s, answer_fn answer)
{
	*s = (struct service){ .bus = connect_bus(&shared) };
	atomic_store(&s->answer, answer);
	assert_true(dbus_connection_add_filter(s->bus, on_message, s, NULL));
	assert_int_equal(dbus_bus_request_name(s->bus, NAME, DBUS_NAME_FLAG_DO_NOT_QUEUE, NULL),
			 DBUS_REQUEST_NAME_REPLY_PRIMARY_OWNER);
	assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0);
}

static void service_stop(struct service *s)
{
	DBusMessage *last = atomic_load(&s->last);

	atomic_store(&s->stop, true);
	pthread_join(s->thread, NULL);
	disconnect(s->bus);
	if (last)
		dbus_message_unref(last);
}

/* The service's state has changed. */
static void service_signal(DBusConnection *bus, const char *destination, const char *state,
			   const char *reason)
{
	DBusMessage *m = dbus_message_new_signal(ROOT, MANAGER, "StateChanged");

	assert_true(dbus_message_append_args(m, DBUS_TYPE_STRING, &state, DBUS_TYPE_STRING, &reason,
					     DBUS_TYPE_INVALID));
	if (destination)
		dbus_message_set_destination(m, destination);
	dbus_connection_send(bus, m, NULL);
	dbus_connection_flush(bus);
	dbus_message_unref(m);
}

/* A service and a connection to it. */
struct play {
	struct service s;
	struct resident_control *c;
};

static void begin(struct play *p, answer_fn answer)
{
	if (shared.pid == 0)
		skip_because("dbus-daemon is not installed");
	service_start(&p->s, answer);
	assert_int_equal(resident_control_connect(shared.address, &p->c), 0);
	resident_control_set_timeout(p->c, 20000);
}

static void end(struct play *p)
{
	assert_null(resident_control_close(p->c));
	service_stop(&p->s);
}

static const char *message(struct play *p)
{
	return resident_control_last_error(p->c)->message;
}

/* ---- replies ---- */

static DBusMessage *answer_nothing(DBusMessage *call)
{
	return dbus_message_new_method_return(call);
}

static DBusMessage *answer_never(DBusMessage *call)
{
	(void)call;
	return NULL;
}

static DBusMessage *answer_text(DBusMessage *call)
{
	DBusMessage *m = dbus_message_new_method_return(call);
	const char *text = "a{sv}";

	assert_true(dbus_message_append_args(m, DBUS_TYPE_STRING, &text, DBUS_TYPE_INVALID));
	return m;
}

static void put_entry(DBusMessageIter *dict, const char *key, int type, const void *value)
{
	const char signature[] = { (char)type, 0 };
	DBusMessageIter entry, variant;

	dbus_message_iter_open_container(dict, DBUS_TYPE_DICT_ENTRY, NULL, &entry);
	dbus_message_iter_append_basic(&entry, DBUS_TYPE_STRING, &key);
	dbus_message_iter_open_container(&entry, DBUS_TYPE_VARIANT, signature, &variant);
	dbus_message_iter_append_basic(&variant, type, value);
	dbus_message_iter_close_container(&entry, &variant);
	dbus_message_iter_close_container(dict, &entry);
}

static void put_string(DBusMessageIter *dict, const char *key, const char *value)
{
	put_entry(dict, key, DBUS_TYPE_STRING, &value);
}

static void put_u32(DBusMessageIter *dict, const char *key, dbus_uint32_t value)
{
	put_entry(dict, key, DBUS_TYPE_UINT32, &value);
}

static DBusMessage *begin_array(DBusMessage *call, const char *element, DBusMessageIter *args,
				DBusMessageIter *array)
{
	DBusMessage *m = dbus_message_new_method_return(call);

	dbus_message_iter_init_append(m, args);
	dbus_message_iter_open_container(args, DBUS_TYPE_ARRAY, element, array);
	return m;
}

/* ---- what the client sent ---- */

static const char *sent_member(struct play *p)
{
	return dbus_message_get_member(atomic_load(&p->s.last));
}

static const char *sent_signature(struct play *p)
{
	return dbus_message_get_signature(atomic_load(&p->s.last));
}

/* The n-th argument, a string. */
static const char *sent_string(struct play *p, int n)
{
	DBusMessageIter i;
	const char *s = NULL;

	assert_true(dbus_message_iter_init(atomic_load(&p->s.last), &i));
	while (n-- > 0)
		dbus_message_iter_next(&i);
	assert_int_equal(dbus_message_iter_get_arg_type(&i), DBUS_TYPE_STRING);
	dbus_message_iter_get_basic(&i, &s);
	return s;
}

/* Copies the value of the one entry of the last argument, an a{sv}; false: it is empty. */
static bool sent_option(struct play *p, const char *key, int type, void *ret)
{
	DBusMessageIter i, dict, entry, variant;
	const char *name;

	assert_true(dbus_message_iter_init(atomic_load(&p->s.last), &i));
	while (dbus_message_iter_has_next(&i))
		dbus_message_iter_next(&i);
	dbus_message_iter_recurse(&i, &dict);
	if (dbus_message_iter_get_arg_type(&dict) == DBUS_TYPE_INVALID)
		return false;
	dbus_message_iter_recurse(&dict, &entry);
	dbus_message_iter_get_basic(&entry, &name);
	assert_string_equal(name, key);
	dbus_message_iter_next(&entry);
	dbus_message_iter_recurse(&entry, &variant);
	assert_int_equal(dbus_message_iter_get_arg_type(&variant), type);
	dbus_message_iter_get_basic(&variant, ret);
	assert_false(dbus_message_iter_next(&dict));
	return true;
}

static size_t count_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	size_t n = 0;

	assert_non_null(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* ---- connection ---- */

static void test_connect_fails(void **state)
{
	struct resident_control *c = NULL;

	(void)state;
	assert_int_equal(resident_control_connect("unix:path=/nonexistent/bus", &c), -ENOENT);
	assert_int_equal(resident_control_connect("no address", &c), -EINVAL);
	assert_int_equal(resident_control_connect("", &c), -EINVAL);
	assert_null(c);
	assert_null(resident_control_close(NULL));
}

static void test_system_bus_is_the_environment_s(void **state)
{
	struct resident_control *c = NULL;

	(void)state;
	if (shared.pid == 0)
		skip_because("dbus-daemon is not installed");
	setenv("DBUS_SYSTEM_BUS_ADDRESS", shared.address, 1);
	assert_int_equal(resident_control_connect(NULL, &c), 0);
	assert_int_equal(resident_control_reload(c), -ECONNREFUSED); /* nobody has the name */
	resident_control_close(c);
	unsetenv("DBUS_SYSTEM_BUS_ADDRESS");
}

/* main() has set the default; some versions of libdbus would ignore it with a program's first connection. */
static void test_sigpipe_is_left_alone(void **state)
{
	struct resident_control *c;
	struct sigaction now;

	(void)state;
	if (shared.pid == 0)
		skip_because("dbus-daemon is not installed");
	assert_int_equal(resident_control_connect(shared.address, &c), 0);
	assert_int_equal(sigaction(SIGPIPE, NULL, &now), 0);
	assert_ptr_equal(now.sa_handler, SIG_DFL);
	resident_control_close(c);
}

static void test_no_descriptor_is_left(void **state)
{
	struct resident_control *c;
	size_t n;

	(void)state;
	if (shared.pid == 0)
		skip_because("dbus-daemon is not installed");
	n = count_fds();
	for (int i = 0; i < 20; i++) {
		assert_int_equal(resident_control_connect(shared.address, &c), 0);
		resident_control_close(c);
	}
	assert_int_equal(count_fds(), n);
}

/* ---- availability and status ---- */

static DBusMessage *answer_availability(DBusMessage *call)
{
	DBusMessageIter args, dict;
	DBusMessage *m = begin_array(call, "{sv}", &args, &dict);

	put_string(&dict, "state", "loading");
	put_string(&dict, "reason", "reads 21 GB");
	put_string(&dict, "mood", "of a later service");
	put_string(&dict, "model", "Tiny");
	put_u32(&dict, "retry_after_ms", 1500);
	put_u32(&dict, "queued", 2);
	put_u32(&dict, "sessions", 3);
	dbus_message_iter_close_container(&args, &dict);
	return m;
}

static void test_availability(void **state)
{
	const struct resident_control_availability *v = NULL;
	struct play p;

	(void)state;
	begin(&p, answer_availability);
	assert_int_equal(resident_control_get_availability(p.c, &v), 0);
	assert_string_equal(sent_member(&p), "GetAvailability");
	assert_string_equal(sent_signature(&p), "");
	assert_string_equal(v->state, "loading");
	assert_string_equal(v->reason, "reads 21 GB");
	assert_string_equal(v->model, "Tiny");
	assert_int_equal(v->retry_after_ms, 1500);
	assert_int_equal(v->queued, 2);
	assert_int_equal(v->sessions, 3);
	end(&p);
}

static DBusMessage *answer_state_only(DBusMessage *call)
{
	DBusMessageIter args, dict;
	DBusMessage *m = begin_array(call, "{sv}", &args, &dict);

	put_string(&dict, "state", "available");
	dbus_message_iter_close_container(&args, &dict);
	return m;
}

static void test_absent_keys_are_defaults(void **state)
{
	const struct resident_control_availability *v = NULL;
	struct play p;

	(void)state;
	begin(&p, answer_state_only);
	assert_int_equal(resident_control_get_availability(p.c, &v), 0);
	assert_null(v->reason);
	assert_null(v->model);
	assert_int_equal(v->sessions + v->queued + v->retry_after_ms, 0);
	end(&p);
}

static DBusMessage *answer_no_entries(DBusMessage *call)
{
	DBusMessageIter args, dict;
	DBusMessage *m = begin_array(call, "{sv}", &args, &dict);

	dbus_message_iter_close_container(&args, &dict);
	return m;
}

static DBusMessage *answer_wrong_types(DBusMessage *call)
{
	DBusMessageIter args, dict;
	DBusMessage *m = begin_array(call, "{sv}", &args, &dict);

	put_string(&dict, "state", "available");
	put_string(&dict, "State", "available");
	put_string(&dict, "sessions", "many");
	put_string(&dict, "Sessions", "many");
	dbus_message_iter_close_container(&args, &dict);
	return m;
}

static void test_wrong_replies_are_refused(void **state)
{
	const struct resident_control_availability *v = NULL;
	const struct resident_control_status *s = NULL;
	const struct resident_control_session *sessions = NULL;
	const struct resident_control_lease *leases = NULL;
	const struct resident_control_limit *limits = NULL;
	static const answer_fn answers[] = { answer_text, answer_nothing, answer_no_entries,
					     answer_wrong_types };
	const char *path = NULL;
	struct play p;
	int fd = -7;
	size_t n = 7;

	(void)state;
	begin(&p, answer_text);
	for (size_t i = 0; i < ARRAY_SIZE(answers); i++) {
		atomic_store(&p.s.answer, answers[i]);
		assert_int_equal(resident_control_get_availability(p.c, &v), -EPROTO);
		assert_int_equal(resident_control_get_status(p.c, &s), -EPROTO);
		assert_int_equal(resident_control_list_sessions(p.c, &sessions, &n), -EPROTO);
		assert_int_equal(resident_control_list_holds(p.c, &leases, &n), -EPROTO);
		assert_int_equal(resident_control_get_user_limits(p.c, "x", &limits, &n), -EPROTO);
		assert_int_equal(resident_control_open_session(p.c, false, &path, &fd), -EPROTO);
		assert_int_equal(resident_control_hold(p.c, "a", "b", &fd), -EPROTO);
		assert_int_equal(resident_control_yield_gpu(p.c, "a", "b", 0, &fd), -EPROTO);
		assert_int_equal(resident_control_reload(p.c),
				 answers[i] == answer_nothing ? 0 : -EPROTO);
	}
	assert_non_null(strstr(message(&p), "interface"));
	assert_true(!v && !s && !sessions && !leases && !limits && !path && fd == -7 && n == 7);
	/* The connection is as good as before. */
	atomic_store(&p.s.answer, answer_availability);
	assert_int_equal(resident_control_get_availability(p.c, &v), 0);
	end(&p);
}

static DBusMessage *answer_status(DBusMessage *call)
{
	DBusMessageIter args, dict;
	DBusMessage *m = begin_array(call, "{sv}", &args, &dict);
	const char *path = "/";
	dbus_uint64_t total = UINT64_C(1) << 40;

	put_string(&dict, "Version", "0.1.0");
	put_string(&dict, "State", "unavailable");
	put_string(&dict, "Reason", "");
	put_entry(&dict, "Model", DBUS_TYPE_OBJECT_PATH, &path);
	put_u32(&dict, "Holds", 1);
	put_u32(&dict, "Sessions", 2);
	put_entry(&dict, "RequestsTotal", DBUS_TYPE_UINT64, &total);
	dbus_message_iter_close_container(&args, &dict);
	return m;
}

static void test_status(void **state)
{
	const struct resident_control_status *s = NULL;
	struct play p;

	(void)state;
	begin(&p, answer_status);
	assert_int_equal(resident_control_get_status(p.c, &s), 0);
	assert_string_equal(sent_member(&p), "GetAll");
	assert_string_equal(sent_string(&p, 0), MANAGER);
	assert_string_equal(s->version, "0.1.0");
	assert_string_equal(s->state, "unavailable");
	assert_null(s->reason);
	assert_null(s->model);
	assert_int_equal(s->holds, 1);
	assert_int_equal(s->sessions, 2);
	assert_true(s->requests_total == UINT64_C(1) << 40);
	end(&p);
}

/* ---- descriptors ---- */

static atomic_int other_end = -1; /* the service's, of the last lease */

static DBusMessage *answer_lease(DBusMessage *call)
{
	DBusMessage *m = dbus_message_new_method_return(call);
	int fds[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	assert_true(dbus_message_append_args(m, DBUS_TYPE_UNIX_FD, &fds[0], DBUS_TYPE_INVALID));
	close(fds[0]);
	atomic_store(&other_end, fds[1]);
	return m;
}

/* When it is readable here, nobody has the other end any more. */
static bool ended(int fd, int timeout_ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, timeout_ms) == 1;
}

static void test_hold(void **state)
{
	struct play p;
	int fd = -1;

	(void)state;
	begin(&p, answer_lease);
	assert_int_equal(resident_control_hold(p.c, "make", "a long build", &fd), 0);
	assert_string_equal(sent_member(&p), "Hold");
	assert_string_equal(sent_signature(&p), "ss");
	assert_string_equal(sent_string(&p, 0), "make");
	assert_string_equal(sent_string(&p, 1), "a long build");
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	/* The lease is the descriptor, not the connection, and the library has no copy of it. */
	p.c = resident_control_close(p.c);
	assert_false(ended(other_end, 20));
	close(fd);
	assert_true(ended(other_end, 5000));
	close(other_end);
	end(&p);
}

static void test_lease_tells_of_the_service_s_end(void **state)
{
	struct play p;
	int fd = -1;

	(void)state;
	begin(&p, answer_lease);
	assert_int_equal(resident_control_hold(p.c, "w", "", &fd), 0);
	assert_false(ended(fd, 20));
	close(other_end);
	assert_true(ended(fd, 5000));
	close(fd);
	end(&p);
}

static void test_yield_gpu(void **state)
{
	dbus_uint64_t bytes = 0;
	struct play p;
	int fd = -1;

	(void)state;
	begin(&p, answer_lease);
	assert_int_equal(resident_control_yield_gpu(p.c, "game", "fps", UINT64_C(6) << 30, &fd), 0);
	assert_string_equal(sent_member(&p), "YieldGpu");
	assert_string_equal(sent_signature(&p), "ssa{sv}");
	assert_string_equal(sent_string(&p, 1), "fps");
	assert_true(sent_option(&p, "bytes", DBUS_TYPE_UINT64, &bytes));
	assert_true(bytes == UINT64_C(6) << 30);
	close(fd);
	close(other_end);
	assert_int_equal(resident_control_yield_gpu(p.c, "game", "", 0, &fd), 0);
	assert_false(sent_option(&p, "bytes", DBUS_TYPE_UINT64, &bytes));
	close(fd);
	close(other_end);
	end(&p);
}

/* A reply of signature "h" without the descriptor: a number, sent as what it is not. */
static DBusMessage *answer_without_fd(DBusMessage *call)
{
	DBusMessage *m = dbus_message_new_method_return(call), *forged;
	static dbus_uint32_t serial = 1000;
	dbus_uint32_t zero = 0;
	char *bytes = NULL, *signature;
	int len = 0;

	assert_true(dbus_message_append_args(m, DBUS_TYPE_UINT32, &zero, DBUS_TYPE_INVALID));
	dbus_message_set_serial(m, serial++);
	assert_true(dbus_message_marshal(m, &bytes, &len));
	signature = memmem(bytes, (size_t)len, "\x01g\0\x01u", 5);
	assert_non_null(signature);
	signature[4] = 'h';
	forged = dbus_message_demarshal(bytes, len, NULL);
	assert_non_null(forged);
	dbus_free(bytes);
	dbus_message_unref(m);
	return forged;
}

static void test_missing_descriptor(void **state)
{
	struct play p;
	int fd = -7;

	(void)state;
	begin(&p, answer_without_fd);
	/* Here libdbus or the bus may object first; what counts is that it is an error, and no descriptor. */
	assert_true(resident_control_hold(p.c, "w", "y", &fd) < 0);
	assert_int_equal(fd, -7);
	end(&p);
}

static DBusMessage *answer_two_fds(DBusMessage *call)
{
	DBusMessage *m = dbus_message_new_method_return(call);
	int fd = STDERR_FILENO;

	assert_true(dbus_message_append_args(m, DBUS_TYPE_UNIX_FD, &fd, DBUS_TYPE_UNIX_FD, &fd,
					     DBUS_TYPE_INVALID));
	return m;
}

static void test_unexpected_descriptors_are_closed(void **state)
{
	const struct resident_control_availability *v;
	struct play p;
	size_t n;
	int fd = -7;

	(void)state;
	begin(&p, answer_two_fds);
	n = count_fds();
	for (int i = 0; i < 10; i++) {
		assert_int_equal(resident_control_hold(p.c, "w", "y", &fd), -EPROTO);
		assert_int_equal(resident_control_reload(p.c), -EPROTO);
		assert_int_equal(resident_control_get_availability(p.c, &v), -EPROTO);
	}
	/* Messages may still be held by the service's side for a moment: its thread frees them. */
	for (int i = 0; i < 200 && count_fds() != n; i++)
		usleep(10000);
	assert_int_equal(count_fds(), n);
	end(&p);
}

static DBusMessage *answer_session(DBusMessage *call)
{
	DBusMessage *m = dbus_message_new_method_return(call);
	const char *path = "/org/residentd1/session/s1";
	int fd = STDERR_FILENO;

	assert_true(dbus_message_append_args(m, DBUS_TYPE_OBJECT_PATH, &path, DBUS_TYPE_UNIX_FD,
					     &fd, DBUS_TYPE_INVALID));
	return m;
}

static void test_open_session(void **state)
{
	const char *path = NULL;
	dbus_bool_t keep = FALSE;
	struct play p;
	int fd = -1;

	(void)state;
	begin(&p, answer_session);
	assert_int_equal(resident_control_open_session(p.c, true, &path, &fd), 0);
	assert_string_equal(path, "/org/residentd1/session/s1");
	assert_true(fd > STDERR_FILENO);
	assert_true(sent_option(&p, "keep", DBUS_TYPE_BOOLEAN, &keep) && keep);
	close(fd);
	assert_int_equal(resident_control_open_session(p.c, false, &path, &fd), 0);
	assert_false(sent_option(&p, "keep", DBUS_TYPE_BOOLEAN, &keep));
	close(fd);
	end(&p);
}

/* ---- lists ---- */

static void put_session(DBusMessageIter *array, const char *path, dbus_uint32_t uid,
			dbus_int64_t used, dbus_bool_t busy)
{
	DBusMessageIter s;

	dbus_message_iter_open_container(array, DBUS_TYPE_STRUCT, NULL, &s);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_OBJECT_PATH, &path);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_UINT32, &uid);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_INT64, &used);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_BOOLEAN, &busy);
	dbus_message_iter_close_container(array, &s);
}

static DBusMessage *answer_sessions(DBusMessage *call)
{
	DBusMessageIter args, array;
	DBusMessage *m = begin_array(call, "(ouxb)", &args, &array);

	put_session(&array, "/org/residentd1/session/a", 1000, 4096, TRUE);
	put_session(&array, "/org/residentd1/session/b", UINT32_MAX, -1, FALSE);
	dbus_message_iter_close_container(&args, &array);
	return m;
}

static void test_list_sessions(void **state)
{
	const struct resident_control_session *list = NULL;
	struct play p;
	size_t n = 0;

	(void)state;
	begin(&p, answer_sessions);
	assert_int_equal(resident_control_list_sessions(p.c, &list, &n), 0);
	assert_int_equal(n, 2);
	assert_string_equal(list[0].path, "/org/residentd1/session/a");
	assert_int_equal(list[0].uid, 1000);
	assert_int_equal(list[0].tokens_used, 4096);
	assert_true(list[0].busy);
	assert_string_equal(list[1].path, "/org/residentd1/session/b");
	assert_true(list[1].uid == UINT32_MAX);
	assert_int_equal(list[1].tokens_used, -1);
	assert_false(list[1].busy);
	end(&p);
}

static DBusMessage *answer_no_holds(DBusMessage *call)
{
	DBusMessageIter args, array;
	DBusMessage *m = begin_array(call, "(sussut)", &args, &array);

	dbus_message_iter_close_container(&args, &array);
	return m;
}

static DBusMessage *answer_holds(DBusMessage *call)
{
	const char *kind = "yield-gpu", *who = "game", *why = "";
	dbus_uint32_t uid = 1000, pid = 4711;
	dbus_uint64_t since = 1700000000000000;
	DBusMessageIter args, array, s;
	DBusMessage *m = begin_array(call, "(sussut)", &args, &array);

	dbus_message_iter_open_container(&array, DBUS_TYPE_STRUCT, NULL, &s);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_STRING, &kind);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_UINT32, &uid);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_STRING, &who);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_STRING, &why);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_UINT32, &pid);
	dbus_message_iter_append_basic(&s, DBUS_TYPE_UINT64, &since);
	dbus_message_iter_close_container(&array, &s);
	dbus_message_iter_close_container(&args, &array);
	return m;
}

static void test_list_holds(void **state)
{
	const struct resident_control_lease *list = NULL;
	struct play p;
	size_t n = 7;

	(void)state;
	begin(&p, answer_no_holds);
	assert_int_equal(resident_control_list_holds(p.c, &list, &n), 0);
	assert_int_equal(n, 0);
	atomic_store(&p.s.answer, answer_holds);
	assert_int_equal(resident_control_list_holds(p.c, &list, &n), 0);
	assert_int_equal(n, 1);
	assert_string_equal(list[0].kind, "yield-gpu");
	assert_int_equal(list[0].uid, 1000);
	assert_string_equal(list[0].who, "game");
	assert_string_equal(list[0].why, "");
	assert_int_equal(list[0].pid, 4711);
	assert_true(list[0].since_us == UINT64_C(1700000000000000));
	end(&p);
}

/* ---- administration ---- */

static DBusMessage *answer_limits(DBusMessage *call)
{
	const char *key = "Weight", *value = "300", *source = "/etc/residentd/policy.d/a.conf:7";
	DBusMessageIter args, array, entry, pair;
	DBusMessage *m = begin_array(call, "{s(ss)}", &args, &array);

	dbus_message_iter_open_container(&array, DBUS_TYPE_DICT_ENTRY, NULL, &entry);
	dbus_message_iter_append_basic(&entry, DBUS_TYPE_STRING, &key);
	dbus_message_iter_open_container(&entry, DBUS_TYPE_STRUCT, NULL, &pair);
	dbus_message_iter_append_basic(&pair, DBUS_TYPE_STRING, &value);
	dbus_message_iter_append_basic(&pair, DBUS_TYPE_STRING, &source);
	dbus_message_iter_close_container(&entry, &pair);
	dbus_message_iter_close_container(&array, &entry);
	dbus_message_iter_close_container(&args, &array);
	return m;
}

static void test_get_user_limits(void **state)
{
	const struct resident_control_limit *list = NULL;
	struct play p;
	size_t n = 0;

	(void)state;
	begin(&p, answer_limits);
	assert_int_equal(resident_control_get_user_limits(p.c, "alice", &list, &n), 0);
	assert_string_equal(sent_string(&p, 0), "alice");
	assert_int_equal(n, 1);
	assert_string_equal(list[0].key, "Weight");
	assert_string_equal(list[0].value, "300");
	assert_string_equal(list[0].source, "/etc/residentd/policy.d/a.conf:7");
	end(&p);
}

static void test_set_user_limits(void **state)
{
	static const struct resident_control_limit limits[] = {
		{ "Weight", "300", NULL },
		{ "TokensPerDay", "", NULL },
	};
	DBusMessageIter i, dict, entry;
	const char *key, *value;
	dbus_bool_t runtime = FALSE;
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_set_user_limits(p.c, "alice", limits, 2, true), 0);
	assert_string_equal(sent_member(&p), "SetUserLimits");
	assert_string_equal(sent_signature(&p), "sa{ss}a{sv}");
	assert_string_equal(sent_string(&p, 0), "alice");
	assert_true(sent_option(&p, "runtime", DBUS_TYPE_BOOLEAN, &runtime) && runtime);
	dbus_message_iter_init(atomic_load(&p.s.last), &i);
	dbus_message_iter_next(&i);
	dbus_message_iter_recurse(&i, &dict);
	for (size_t k = 0; k < ARRAY_SIZE(limits); k++, dbus_message_iter_next(&dict)) {
		dbus_message_iter_recurse(&dict, &entry);
		dbus_message_iter_get_basic(&entry, &key);
		dbus_message_iter_next(&entry);
		dbus_message_iter_get_basic(&entry, &value);
		assert_string_equal(key, limits[k].key);
		assert_string_equal(value, limits[k].value);
	}
	assert_int_equal(dbus_message_iter_get_arg_type(&dict), DBUS_TYPE_INVALID);
	end(&p);
}

static void test_models_and_reload(void **state)
{
	dbus_bool_t make_default = FALSE;
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_load_model(p.c, "Tiny", true), 0);
	assert_string_equal(sent_member(&p), "LoadModel");
	assert_string_equal(sent_string(&p, 0), "Tiny");
	assert_true(sent_option(&p, "default", DBUS_TYPE_BOOLEAN, &make_default) && make_default);
	assert_int_equal(resident_control_load_model(p.c, "Tiny", false), 0);
	assert_false(sent_option(&p, "default", DBUS_TYPE_BOOLEAN, &make_default));
	assert_int_equal(resident_control_unload_model(p.c), 0);
	assert_string_equal(sent_member(&p), "UnloadModel");
	assert_int_equal(resident_control_reload(p.c), 0);
	assert_string_equal(sent_member(&p), "Reload");
	end(&p);
}

static void test_bad_arguments_are_not_sent(void **state)
{
	static const struct resident_control_limit bad = { "Weight", "\xff", NULL },
						   none = { "Weight", NULL, NULL };
	struct play p;
	int fd = -7;

	(void)state;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_hold(p.c, "\xff", "y", &fd), -EILSEQ);
	assert_int_equal(resident_control_hold(p.c, "w", "\xed\xa0\x80", &fd), -EILSEQ);
	assert_int_equal(resident_control_hold(p.c, NULL, "y", &fd), -EINVAL);
	assert_int_equal(resident_control_load_model(p.c, "\xc3", false), -EILSEQ);
	assert_int_equal(resident_control_set_user_limits(p.c, "alice", &bad, 1, false), -EILSEQ);
	assert_int_equal(resident_control_set_user_limits(p.c, "alice", &none, 1, false), -EINVAL);
	assert_int_equal(resident_control_set_user_limits(p.c, NULL, NULL, 0, false), -EINVAL);
	assert_null(atomic_load(&p.s.last));
	end(&p);
}

/* ---- interactive authorisation ---- */

static void test_interactive(void **state)
{
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_reload(p.c), 0);
	assert_false(dbus_message_get_allow_interactive_authorization(atomic_load(&p.s.last)));
	resident_control_set_interactive(p.c, true);
	assert_int_equal(resident_control_reload(p.c), 0);
	assert_true(dbus_message_get_allow_interactive_authorization(atomic_load(&p.s.last)));
	end(&p);
}

/* ---- errors ---- */

#define ERROR_ "org.residentd1.Error."
#define DBUS_  "org.freedesktop.DBus.Error."

static const struct error_case {
	const char *name, *sent; /* NULL: no text */
	int code;
	const char *message; /* NULL: not compared */
	uint32_t retry_after_ms;
} errors[] = {
	{ ERROR_ "QuotaExceeded", "used up (error 17, retry after 60000 ms)",
	  -RESIDENT_E_QUOTA_EXCEEDED, "used up", 60000 },
	{ ERROR_ "NoModel", "none (error 1, retry after 0 ms)", -RESIDENT_E_NO_MODEL, "none", 0 },
	{ ERROR_ "NotAuthorized", "no (error 13)", -RESIDENT_E_NOT_AUTHORIZED, "no", 0 },
	{ ERROR_ "NotAuthorized", NULL, -RESIDENT_E_NOT_AUTHORIZED, "not permitted", 0 },
	/* The name decides where it is known, the number where it is not. */
	{ ERROR_ "NoModel", "none (error 3, retry after 5 ms)", -RESIDENT_E_NO_MODEL, "none", 5 },
	{ ERROR_ "OfALaterService", "new (error 99, retry after 1 ms)", -10099, "new", 1 },
	{ ERROR_ "OfALaterService", NULL, -RESIDENT_E_INTERNAL, ERROR_ "OfALaterService", 0 },
	{ ERROR_ "OfALaterService", "zero (error 0)", -RESIDENT_E_INTERNAL, "zero", 0 },
	/* What is no tail is text. */
	{ ERROR_ "Loading", "x (error 10000)", -RESIDENT_E_LOADING, "x (error 10000)", 0 },
	{ ERROR_ "Loading", "x (error 2, retry after 4294967296 ms)", -RESIDENT_E_LOADING, NULL, 0 },
	{ ERROR_ "Loading", "x (error 2, retry after -1 ms)", -RESIDENT_E_LOADING, NULL, 0 },
	{ ERROR_ "Loading", "x (error 99999999999999999999)", -RESIDENT_E_LOADING, NULL, 0 },
	{ ERROR_ "Loading", "x (error 2) more", -RESIDENT_E_LOADING, "x (error 2) more", 0 },
	{ ERROR_ "Loading", "x (error 2", -RESIDENT_E_LOADING, "x (error 2", 0 },
	{ ERROR_ "Loading", "x (error ", -RESIDENT_E_LOADING, "x (error ", 0 },
	{ ERROR_ "Loading", "x (error 5) (error 2, retry after 7 ms)", -RESIDENT_E_LOADING,
	  "x (error 5)", 7 },
	{ ERROR_ "Loading", " (error 2, retry after 7 ms)", -RESIDENT_E_LOADING,
	  "the model is being loaded", 7 },
	{ DBUS_ "InvalidArgs", "unknown key 'x'", -EINVAL, "unknown key 'x'", 0 },
	{ DBUS_ "AccessDenied", "", -EACCES, DBUS_ "AccessDenied", 0 },
	{ DBUS_ "InteractiveAuthorizationRequired", "ask", -EACCES, "ask", 0 },
	{ DBUS_ "UnknownMethod", "old", -EOPNOTSUPP, "old", 0 },
	{ DBUS_ "NoMemory", "m", -ENOMEM, "m", 0 },
	{ DBUS_ "Spawn.ServiceNotFound", "s", -ECONNREFUSED, "s", 0 },
	{ "org.freedesktop.systemd1.UnitMasked", "s", -ECONNREFUSED, "s", 0 },
	{ DBUS_ "NoReply", "left", -ECONNRESET, "left", 0 },
	{ "com.example.Odd", "text", -EREMOTEIO, "com.example.Odd: text", 0 },
	{ "com.example.Odd", NULL, -EREMOTEIO, "com.example.Odd", 0 },
};

static _Atomic(const struct error_case *) next_error;

static DBusMessage *answer_error(DBusMessage *call)
{
	const struct error_case *e = atomic_load(&next_error);

	return dbus_message_new_error(call, e->name, e->sent);
}

static void test_errors(void **state)
{
	const struct resident_error *last;
	struct play p;

	(void)state;
	begin(&p, answer_error);
	for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
		atomic_store(&next_error, &errors[i]);
		assert_int_equal(resident_control_reload(p.c), errors[i].code);
		last = resident_control_last_error(p.c);
		assert_int_equal(last->code, errors[i].code);
		assert_int_equal(last->retry_after_ms, errors[i].retry_after_ms);
		assert_string_equal(last->message,
				    errors[i].message ? errors[i].message : errors[i].sent);
	}
	end(&p);
}

static DBusMessage *answer_error_with_a_number(DBusMessage *call)
{
	DBusMessage *m = dbus_message_new_error(call, ERROR_ "NoModel", NULL);
	dbus_uint32_t number = 1;

	assert_true(dbus_message_append_args(m, DBUS_TYPE_UINT32, &number, DBUS_TYPE_INVALID));
	return m;
}

static void test_error_without_a_text(void **state)
{
	struct play p;

	(void)state;
	begin(&p, answer_error_with_a_number);
	assert_int_equal(resident_control_reload(p.c), -RESIDENT_E_NO_MODEL);
	assert_string_equal(message(&p), "no model is installed");
	end(&p);
}

/* ---- time and size ---- */

static void test_no_reply(void **state)
{
	struct play p;

	(void)state;
	begin(&p, answer_never);
	resident_control_set_timeout(p.c, 50);
	assert_int_equal(resident_control_reload(p.c), -ETIMEDOUT);
	assert_int_equal(resident_control_reload(p.c), -ETIMEDOUT);
	resident_control_set_timeout(p.c, 20000);
	atomic_store(&p.s.answer, answer_nothing);
	assert_int_equal(resident_control_reload(p.c), 0);
	end(&p);
}

static DBusMessage *answer_late(DBusMessage *call)
{
	usleep(150000);
	return answer_text(call);
}

/* The reply to the first call comes during the second, and is not taken for its own. */
static void test_late_reply(void **state)
{
	struct play p;

	(void)state;
	begin(&p, answer_late);
	resident_control_set_timeout(p.c, 30);
	assert_int_equal(resident_control_unload_model(p.c), -ETIMEDOUT);
	atomic_store(&p.s.answer, answer_nothing);
	resident_control_set_timeout(p.c, 20000);
	assert_int_equal(resident_control_reload(p.c), 0);
	end(&p);
}

static DBusMessage *answer_and_leave(DBusMessage *call)
{
	(void)call;
	return NULL;
}

static void *stop_soon(void *userdata)
{
	struct play *p = userdata;

	while (!atomic_load(&p->s.last))
		usleep(1000);
	service_stop(&p->s);
	return NULL;
}

static void test_service_dies(void **state)
{
	pthread_t thread;
	struct play p;

	(void)state;
	begin(&p, answer_and_leave);
	assert_int_equal(pthread_create(&thread, NULL, stop_soon, &p), 0);
	assert_int_equal(resident_control_reload(p.c), -ECONNRESET);
	pthread_join(thread, NULL);
	assert_int_equal(resident_control_reload(p.c), -ECONNREFUSED);
	assert_int_equal(resident_control_process(p.c), 0);
	service_start(&p.s, answer_nothing);
	assert_int_equal(resident_control_reload(p.c), 0);
	end(&p);
}

static atomic_size_t huge;

static DBusMessage *answer_huge(DBusMessage *call)
{
	size_t len = atomic_load(&huge);
	char *text = malloc(len + 1);
	DBusMessage *m;

	memset(text, 'x', len);
	text[len] = 0;
	m = dbus_message_new_error(call, ERROR_ "Internal", text);
	free(text);
	return m;
}

static void test_huge_texts(void **state)
{
	struct play p;

	(void)state;
	begin(&p, answer_huge);
	atomic_store(&huge, 1 << 20);
	assert_int_equal(resident_control_reload(p.c), -RESIDENT_E_INTERNAL);
	assert_int_equal(strlen(message(&p)), 1 << 20);
	/* Over the bound of a message: what sends that is not listened to any more. */
	atomic_store(&huge, 17 << 20);
	assert_int_equal(resident_control_reload(p.c), -ECONNRESET);
	assert_int_equal(resident_control_reload(p.c), -ENOTCONN);
	assert_int_equal(resident_control_process(p.c), -ENOTCONN);
	end(&p);
}

/* ---- changes of state ---- */

struct diary {
	int calls, nested;
	bool gone;
	char state[32], reason[32];
};

static void on_event(struct resident_control *c, const struct resident_control_event *e, void *userdata)
{
	struct diary *d = userdata;

	d->calls++;
	d->gone = !e->state;
	snprintf(d->state, sizeof(d->state), "%s", e->state ? e->state : "");
	snprintf(d->reason, sizeof(d->reason), "%s", e->reason ? e->reason : "(none)");
	d->nested = resident_control_reload(c);
	if (resident_control_process(c) != -EBUSY || resident_control_watch(c, NULL, NULL) != -EBUSY)
		d->nested = 0;
}

/* Polls as a program would until the callback has run once more. */
static void wait_event(struct play *p, struct diary *d)
{
	struct pollfd fd = { .fd = resident_control_fd(p->c), .events = POLLIN };
	int before = d->calls;

	for (int i = 0; i < 100 && d->calls == before; i++) {
		assert_true(poll(&fd, 1, 5000) > 0);
		assert_true(resident_control_process(p->c) >= 0);
	}
	assert_int_equal(d->calls, before + 1);
}

static void test_watch(void **state)
{
	struct diary d = {};
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_process(p.c), 0);
	assert_int_equal(resident_control_watch(p.c, on_event, &d), 0);
	service_signal(p.s.bus, NULL, "loading", "reads");
	wait_event(&p, &d);
	assert_string_equal(d.state, "loading");
	assert_string_equal(d.reason, "reads");
	assert_int_equal(d.nested, -EBUSY);
	service_signal(p.s.bus, NULL, "available", "");
	wait_event(&p, &d);
	assert_string_equal(d.reason, "(none)");
	assert_int_equal(resident_control_process(p.c), 0);
	end(&p);
}

/* Signals that come while a call waits make the descriptor ready, and are one event. */
static void test_events_during_a_call(void **state)
{
	struct pollfd fd = { .events = POLLIN };
	struct diary d = {};
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	fd.fd = resident_control_fd(p.c);
	assert_int_equal(resident_control_watch(p.c, on_event, &d), 0);
	service_signal(p.s.bus, NULL, "loading", "");
	service_signal(p.s.bus, NULL, "available", "");
	assert_int_equal(resident_control_reload(p.c), 0);
	assert_int_equal(d.calls, 0);
	assert_int_equal(poll(&fd, 1, 0), 1);
	assert_int_equal(resident_control_process(p.c), 1);
	assert_int_equal(d.calls, 1);
	assert_string_equal(d.state, "available");
	assert_int_equal(poll(&fd, 1, 0), 0);
	end(&p);
}

static void test_forged_signals_do_not_count(void **state)
{
	const char *self;
	DBusConnection *other;
	struct diary d = {};
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_watch(p.c, on_event, &d), 0);
	assert_int_equal(resident_control_reload(p.c), 0);
	self = dbus_message_get_sender(atomic_load(&p.s.last));
	other = connect_bus(&shared);
	service_signal(other, NULL, "stopping", "forged");
	service_signal(other, self, "stopping", "forged");
	/* The bus has handled both when it answers. */
	assert_true(dbus_bus_name_has_owner(other, NAME, NULL));
	assert_int_equal(resident_control_reload(p.c), 0);
	assert_int_equal(resident_control_process(p.c), 0);
	service_signal(p.s.bus, NULL, "available", "");
	wait_event(&p, &d);
	assert_string_equal(d.state, "available");
	assert_int_equal(d.calls, 1);
	disconnect(other);
	end(&p);
}

static void test_service_leaves_and_returns(void **state)
{
	struct diary d = {};
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_watch(p.c, on_event, &d), 0);
	service_stop(&p.s);
	wait_event(&p, &d);
	assert_true(d.gone);
	service_start(&p.s, answer_nothing);
	service_signal(p.s.bus, NULL, "available", "");
	wait_event(&p, &d);
	assert_false(d.gone);
	assert_string_equal(d.state, "available");
	end(&p);
}

static void test_watch_before_the_service(void **state)
{
	struct diary d = {};
	struct play p;

	(void)state;
	begin(&p, answer_nothing);
	service_stop(&p.s);
	assert_int_equal(resident_control_watch(p.c, on_event, &d), 0);
	service_start(&p.s, answer_nothing);
	service_signal(p.s.bus, NULL, "loading", "");
	wait_event(&p, &d);
	assert_string_equal(d.state, "loading");
	/* No more. */
	assert_int_equal(resident_control_watch(p.c, NULL, NULL), 0);
	service_signal(p.s.bus, NULL, "available", "");
	assert_int_equal(resident_control_reload(p.c), 0);
	assert_int_equal(resident_control_process(p.c), 0);
	/* And again. */
	assert_int_equal(resident_control_watch(p.c, on_event, &d), 0);
	service_signal(p.s.bus, NULL, "stopping", "");
	wait_event(&p, &d);
	assert_string_equal(d.state, "stopping");
	end(&p);
}

/* Anybody can send signals to anybody: those that are not processed take no memory for long. */
static void test_flood(void **state)
{
	char reason[4096];
	const char *self;
	struct diary d = {};
	struct play p;
	size_t before;

	(void)state;
	memset(reason, 'x', sizeof(reason) - 1);
	reason[sizeof(reason) - 1] = 0;
	begin(&p, answer_nothing);
	assert_int_equal(resident_control_watch(p.c, on_event, &d), 0);
	assert_int_equal(resident_control_reload(p.c), 0);
	self = dbus_message_get_sender(atomic_load(&p.s.last));
	before = mallinfo2().uordblks;
	for (int i = 0; i < 20; i++) {
		for (int k = 0; k < 50; k++)
			service_signal(p.s.bus, self, "available", reason);
		assert_int_equal(resident_control_reload(p.c), 0);
		self = dbus_message_get_sender(atomic_load(&p.s.last));
	}
	assert_true(mallinfo2().uordblks < before + (1 << 20)); /* 4 MB were sent */
	assert_int_equal(resident_control_process(p.c), 1);
	assert_int_equal(resident_control_process(p.c), 0);
	assert_int_equal(d.calls, 1);
	end(&p);
}

static void test_bus_ends(void **state)
{
	const struct resident_control_availability *v;
	struct pollfd fd = { .events = POLLIN };
	struct resident_control *c = NULL;
	struct diary d = {};
	struct bus b;

	(void)state;
	if (shared.pid == 0)
		skip_because("dbus-daemon is not installed");
	bus_start(&b);
	assert_int_equal(resident_control_connect(b.address, &c), 0);
	assert_int_equal(resident_control_watch(c, on_event, &d), 0);
	bus_stop(&b);
	fd.fd = resident_control_fd(c);
	assert_int_equal(poll(&fd, 1, 5000), 1);
	assert_int_equal(resident_control_process(c), -ENOTCONN);
	assert_int_equal(resident_control_get_availability(c, &v), -ENOTCONN);
	assert_int_equal(resident_control_watch(c, NULL, NULL), -ENOTCONN);
	assert_int_equal(d.calls, 0);
	resident_control_close(c);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_connect_fails),
		cmocka_unit_test(test_system_bus_is_the_environment_s),
		cmocka_unit_test(test_sigpipe_is_left_alone),
		cmocka_unit_test(test_no_descriptor_is_left),
		cmocka_unit_test(test_availability),
		cmocka_unit_test(test_absent_keys_are_defaults),
		cmocka_unit_test(test_wrong_replies_are_refused),
		cmocka_unit_test(test_status),
		cmocka_unit_test(test_hold),
		cmocka_unit_test(test_lease_tells_of_the_service_s_end),
		cmocka_unit_test(test_yield_gpu),
		cmocka_unit_test(test_missing_descriptor),
		cmocka_unit_test(test_unexpected_descriptors_are_closed),
		cmocka_unit_test(test_open_session),
		cmocka_unit_test(test_list_sessions),
		cmocka_unit_test(test_list_holds),
		cmocka_unit_test(test_get_user_limits),
		cmocka_unit_test(test_set_user_limits),
		cmocka_unit_test(test_models_and_reload),
		cmocka_unit_test(test_bad_arguments_are_not_sent),
		cmocka_unit_test(test_interactive),
		cmocka_unit_test(test_errors),
		cmocka_unit_test(test_error_without_a_text),
		cmocka_unit_test(test_no_reply),
		cmocka_unit_test(test_late_reply),
		cmocka_unit_test(test_service_dies),
		cmocka_unit_test(test_huge_texts),
		cmocka_unit_test(test_watch),
		cmocka_unit_test(test_events_during_a_call),
		cmocka_unit_test(test_forged_signals_do_not_count),
		cmocka_unit_test(test_service_leaves_and_returns),
		cmocka_unit_test(test_watch_before_the_service),
		cmocka_unit_test(test_flood),
		cmocka_unit_test(test_bus_ends),
	};

	signal(SIGPIPE, SIG_DFL);
	return cmocka_run_group_tests_name("control", tests, set_up, tear_down);
}
