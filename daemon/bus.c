/* SPDX-License-Identifier: MIT */
/*
 * bus.c: the connection to the system bus, who is known on it, and what is told to whom. See bus.h,
 * bus-internal.h. Loop thread.
 *
 * Refuses to know what methods do. Waits for nobody but the bus daemon, when it asks that who a
 * sender is (one short call for each new one, bounded by CALL_TIMEOUT_US).
 *
 * Privacy: that a session or a user exists is told only to his own uid, to root, and to a program
 * that asked for all of them (ListSessions) when polkit allows inspect-users. sd-bus asks our
 * enumerators and find functions anew for each message, so introspection and GetManagedObjects
 * differ by who asks; signals about sessions are not broadcast but sent to the programs that have
 * asked for sessions before (struct bus_peer).
 * Invariant: `up` is set exactly while the name is ours; nothing is sent otherwise.
 */
#include "daemon/bus-internal.h"

#include "daemon/polkit.h"
#include "daemon/sleep.h"

#include <stdarg.h>

#define RETRY_MIN_US    (5 * UINT64_C(1000000))
#define RETRY_MAX_US    (60 * UINT64_C(1000000))
#define CALL_TIMEOUT_US (5 * UINT64_C(1000000))
/* Each peer costs a match rule, of which a bus gives one connection 512. */
#define PEERS_MAX       256
#define PEERS_PER_UID   32

int bus_fail(sd_bus_error *error, enum error_code code, const char *text, uint32_t retry_after_ms)
{
	const struct error_entry *e = error_by_code(code);

	if (retry_after_ms == 0)
		retry_after_ms = e->retry_after_ms;
	if (!text)
		text = e->text;
	if (retry_after_ms == 0)
		return sd_bus_error_setf(error, e->dbus, "%s (error %d)", text, (int)e->code);
	return sd_bus_error_setf(error, e->dbus, "%s (error %d, retry after %u ms)", text,
				 (int)e->code, retry_after_ms);
}

char *bus_model_path(const struct model *m)
{
	char *path;

	return sd_bus_path_encode(BUS_MODEL, m->name, &path) < 0 ? NULL : path;
}

void bus_session_path(const struct session *s, char ret[BUS_SESSION_PATH_SIZE])
{
	snprintf(ret, BUS_SESSION_PATH_SIZE, BUS_SESSION "/%s", s->id);
}

int bus_sender(struct bus *b, sd_bus_message *m, uid_t *ret_uid, pid_t *ret_pid)
{
	_cleanup_(sd_bus_creds_unrefp) sd_bus_creds *creds = NULL;
	const char *name = sd_bus_message_get_sender(m);
	pid_t pid = 0;
	uid_t uid;
	int r;

	if (!name || strlen(name) >= sizeof(b->sender))
		return -ENXIO;
	if (!streq(name, b->sender)) {
		r = sd_bus_query_sender_creds(m, SD_BUS_CREDS_EUID | SD_BUS_CREDS_PID, &creds);
		if (r >= 0)
			r = sd_bus_creds_get_euid(creds, &uid);
		if (r < 0)
			return r;
		(void)sd_bus_creds_get_pid(creds, &pid);
		strcpy(b->sender, name);
		b->sender_uid = uid;
		b->sender_pid = pid;
	}
	*ret_uid = b->sender_uid;
	if (ret_pid)
		*ret_pid = b->sender_pid;
	return 0;
}

static void peer_free(struct bus_peer *p)
{
	struct bus *b = p->bus;

	*(p->prev ? &p->prev->next : &b->peers) = p->next;
	if (p->next)
		p->next->prev = p->prev;
	sd_bus_track_unref(p->track);
	free(p->name);
	free(p);
}

/* Takes one of the peer's out of the list; NULL: it has none. */
static struct bus_owned *take_owned(struct bus *b, const struct bus_peer *p)
{
	for (struct bus_owned **link = &b->owned; *link; link = &(*link)->next) {
		struct bus_owned *o = *link;

		if (o->peer == p) {
			*link = o->next;
			return o;
		}
	}
	return NULL;
}

/* Also when the bus itself went away, but then a session that an open descriptor keeps has its
 * owner still. */
static void peer_left(struct bus_peer *p)
{
	struct bus *b = p->bus;
	bool bus_is_there = sd_bus_is_open(b->bus) > 0;
	struct bus_owned *o;

	while ((o = take_owned(b, p))) {
		struct session *s = session_find(b->daemon, p->uid, o->id);

		free(o);
		if (s && (s->keep || bus_is_there))
			session_close(b->daemon, s);
	}
	peer_free(p);
}

static int on_peer_left(sd_bus_track *track, void *arg)
{
	(void)track;
	peer_left(arg);
	return 0;
}

static struct bus_peer *find_peer(const struct bus *b, const char *name)
{
	for (struct bus_peer *p = b->peers; p; p = p->next)
		if (streq(p->name, name))
			return p;
	return NULL;
}

static bool too_many_peers(const struct bus *b, uid_t uid)
{
	size_t all = 0, own = 0;

	for (const struct bus_peer *p = b->peers; p; p = p->next) {
		all++;
		own += p->uid == uid;
	}
	return all >= PEERS_MAX || own >= PEERS_PER_UID;
}

int bus_peer(struct bus *b, sd_bus_message *m, struct bus_peer **ret)
{
	struct bus_peer *p;
	uid_t uid;
	int r = bus_sender(b, m, &uid, NULL);

	if (r < 0)
		return r;
	p = find_peer(b, sd_bus_message_get_sender(m));
	if (p) {
		*ret = p;
		return 0;
	}
	if (too_many_peers(b, uid))
		return -EUSERS;
	p = calloc(1, sizeof(*p));
	if (!p)
		return -ENOMEM;
	p->bus = b;
	p->uid = uid;
	p->name = strdup(sd_bus_message_get_sender(m));
	r = p->name ? sd_bus_track_new(b->bus, &p->track, on_peer_left, p) : -ENOMEM;
	if (r >= 0)
		r = sd_bus_track_add_name(p->track, p->name);
	if (r < 0) {
		sd_bus_track_unref(p->track);
		free(p->name);
		free(p);
		return r;
	}
	p->next = b->peers;
	if (p->next)
		p->next->prev = p;
	b->peers = p;
	*ret = p;
	return 0;
}

bool bus_sees(struct bus *b, uid_t uid)
{
	sd_bus_message *m = sd_bus_get_current_message(b->bus);
	const struct bus_peer *p;
	uid_t sender;

	if (!m || bus_sender(b, m, &sender, NULL) < 0)
		return false;
	if (sender == uid || sender == 0)
		return true;
	p = find_peer(b, sd_bus_message_get_sender(m));
	return p && p->inspects_until_us > now_us();
}

int bus_own(struct bus *b, struct bus_peer *p, const struct session *s)
{
	struct bus_owned *o = calloc(1, sizeof(*o));

	if (!o)
		return -ENOMEM;
	memcpy(o->id, s->id, sizeof(o->id));
	o->peer = p;
	o->next = b->owned;
	b->owned = o;
	return 0;
}

/* The bus to send on; NULL: there is nobody to tell. */
static struct bus *up(const struct daemon *d)
{
	return d->bus && d->bus->up ? d->bus : NULL;
}

void bus_state_changed(struct daemon *d)
{
	struct bus *b = up(d);

	if (!b)
		return;
	(void)sd_bus_emit_properties_changed(b->bus, BUS_ROOT, BUS_NAME ".Manager", "State",
					     "Reason", NULL);
	(void)sd_bus_emit_signal(b->bus, BUS_ROOT, BUS_NAME ".Manager", "StateChanged", "ss",
				 service_state_to_string(d->state),
				 d->state == SERVICE_UNAVAILABLE && d->reason ? d->reason : "");
}

void bus_model_changed(struct daemon *d)
{
	struct bus *b = up(d);
	char *path;

	if (!b)
		return;
	path = d->model ? bus_model_path(d->model) : NULL;
	if (b->model_path)
		(void)sd_bus_emit_interfaces_removed(b->bus, b->model_path, BUS_NAME ".Model", NULL);
	if (path)
		(void)sd_bus_emit_interfaces_added(b->bus, path, BUS_NAME ".Model", NULL);
	free(b->model_path);
	b->model_path = path;
	(void)sd_bus_emit_properties_changed(b->bus, BUS_ROOT, BUS_NAME ".Manager", "Model", NULL);
}

void bus_leases_changed(struct daemon *d)
{
	struct bus *b = up(d);

	if (b)
		(void)sd_bus_emit_properties_changed(b->bus, BUS_ROOT, BUS_NAME ".Manager", "Holds",
						     NULL);
}

void bus_evicted(struct daemon *d, uint64_t bytes_used)
{
	struct bus *b = up(d);

	if (b)
		(void)sd_bus_emit_signal(b->bus, BUS_ROOT, BUS_NAME ".Manager", "Evicted", "t",
					 bytes_used);
}

void bus_pressure(struct daemon *d, const char *level)
{
	struct bus *b = up(d);

	if (b)
		(void)sd_bus_emit_signal(b->bus, BUS_ROOT, BUS_NAME ".Manager", "Pressure", "s", level);
}

/* A signal from the root object to everybody who knows of this uid's sessions; types and the rest
 * as for sd_bus_message_append(). */
static void tell_peers(struct bus *b, uid_t uid, const char *interface, const char *member,
		       const char *types, ...)
{
	for (const struct bus_peer *p = b->peers; p; p = p->next) {
		_cleanup_(sd_bus_message_unrefp) sd_bus_message *m = NULL;
		va_list ap;
		int r;

		if (p->uid != uid && p->uid != 0 && p->inspects_until_us <= now_us())
			continue;
		r = sd_bus_message_new_signal(b->bus, &m, BUS_ROOT, interface, member);
		if (r >= 0)
			r = sd_bus_message_set_destination(m, p->name);
		va_start(ap, types);
		if (r >= 0)
			r = sd_bus_message_appendv(m, types, ap);
		va_end(ap);
		if (r >= 0)
			(void)sd_bus_send(b->bus, m, NULL);
	}
}

/* There is no hook for a first request: a new user's object shows when something else of his does. */
static void tell_users(struct bus *b)
{
	const struct daemon *d = b->daemon;

	for (; b->n_users < d->n_usage; b->n_users++) {
		const struct uid_usage *u = &d->usage[b->n_users];
		char path[sizeof(BUS_USER "/4294967295")];

		snprintf(path, sizeof(path), BUS_USER "/%u", u->uid);
		tell_peers(b, u->uid, "org.freedesktop.DBus.ObjectManager", "InterfacesAdded",
			   "oa{sa{sv}}", path, 1, BUS_NAME ".User", 1, "Uid", "u", u->uid);
	}
}

void bus_session_added(struct daemon *d, const struct session *s)
{
	struct bus *b = up(d);
	char path[BUS_SESSION_PATH_SIZE];

	if (!b)
		return;
	bus_session_path(s, path);
	tell_peers(b, s->uid, "org.freedesktop.DBus.ObjectManager", "InterfacesAdded", "oa{sa{sv}}",
		   path, 1, BUS_NAME ".Session", 4, "User", "u", s->uid, "Keep", "b", (int)s->keep,
		   "Busy", "b", (int)s->busy, "ContextUsed", "u",
		   (uint32_t)MIN(s->context_used, (size_t)UINT32_MAX));
	tell_peers(b, s->uid, BUS_NAME ".Manager", "SessionNew", "ou", path, s->uid);
	tell_users(b);
}

void bus_session_removed(struct daemon *d, const struct session *s)
{
	char path[BUS_SESSION_PATH_SIZE];
	struct bus *b = d->bus;

	if (!b)
		return;
	for (struct bus_owned **link = &b->owned, *o; (o = *link); link = &o->next)
		if (streq(o->id, s->id)) {
			*link = o->next;
			free(o);
			break;
		}
	if (!b->up)
		return;
	bus_session_path(s, path);
	tell_peers(b, s->uid, BUS_NAME ".Manager", "SessionRemoved", "ou", path, s->uid);
	tell_peers(b, s->uid, "org.freedesktop.DBus.ObjectManager", "InterfacesRemoved", "oas",
		   path, 1, BUS_NAME ".Session");
	tell_users(b);
}

/* Everything that hangs on the connection. */
static void disconnect(struct bus *b)
{
	b->up = false;
	polkit_drop_all();
	sleep_bus_down(b->daemon);
	/* Not flushed: a bus that does not read must not hold us up. */
	sd_bus_close(b->bus);
	while (b->peers)
		peer_left(b->peers);
	b->bus = sd_bus_unref(b->bus);
	b->sender[0] = 0;
	free(b->model_path);
	b->model_path = NULL;
	b->n_users = 0;
}

static void connect_to_bus(struct bus *b);

static int on_retry(sd_event_source *source, uint64_t usec, void *arg)
{
	struct bus *b = arg;

	(void)source;
	(void)usec;
	b->retry = sd_event_source_disable_unref(b->retry);
	disconnect(b);
	connect_to_bus(b);
	return 0;
}

/* What is left of the connection stays until the timer: this may run inside one of its callbacks. */
static void lost(struct bus *b, const char *why)
{
	b->up = false;
	sleep_bus_down(b->daemon);
	if (b->retry)
		return;
	if (!b->told)
		log_warning("no control over D-Bus: %s, trying again every 5 to 60 s", why);
	b->told = true;
	if (sd_event_add_time_relative(b->daemon->event, &b->retry, CLOCK_MONOTONIC, b->retry_us,
				       1000000, on_retry, b) < 0)
		log_warning("cannot set a timer: the bus is not looked for again");
	b->retry_us = MIN(b->retry_us * 2, RETRY_MAX_US);
}

static int on_disconnected(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	(void)m;
	(void)error;
	lost(arg, "the connection to the system bus was lost");
	return 0;
}

static int on_name(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	struct bus *b = arg;
	uint32_t owner = 0;

	(void)error;
	if (sd_bus_message_is_method_error(m, NULL)) {
		char why[256];

		snprintf(why, sizeof(why), "the bus refuses the name " BUS_NAME " (%s)",
			 sd_bus_message_get_error(m)->message);
		lost(b, why);
		return 0;
	}
	/* 1: we own it, 4: we did already */
	if (sd_bus_message_read(m, "u", &owner) < 0 || (owner != 1 && owner != 4)) {
		lost(b, "another program has the name " BUS_NAME);
		return 0;
	}
	b->up = true;
	b->retry_us = RETRY_MIN_US;
	if (b->told)
		log_notice("control over D-Bus is back");
	b->told = false;
	b->n_users = b->daemon->n_usage;
	b->model_path = b->daemon->model ? bus_model_path(b->daemon->model) : NULL;
	sleep_bus_up(b->daemon, b->bus);
	return 0;
}

/* Nothing of this waits: what is to be sent is queued until the bus has let us in. */
static int try_to_connect(struct bus *b)
{
	int r = sd_bus_open_system_with_description(&b->bus, "residentd");

	if (r < 0)
		return r;
	(void)sd_bus_set_method_call_timeout(b->bus, CALL_TIMEOUT_US);
	r = sd_bus_match_signal(b->bus, NULL, NULL, "/org/freedesktop/DBus/Local",
				"org.freedesktop.DBus.Local", "Disconnected", on_disconnected, b);
	if (r >= 0)
		r = sd_bus_add_object_vtable(b->bus, NULL, BUS_ROOT, BUS_NAME ".Manager",
					     bus_manager_vtable, b);
	if (r >= 0)
		r = sd_bus_add_object_manager(b->bus, NULL, BUS_ROOT);
	if (r >= 0)
		r = bus_objects_add(b);
	if (r >= 0)
		r = sd_bus_request_name_async(b->bus, NULL, BUS_NAME, 0, on_name, b);
	if (r >= 0)
		r = sd_bus_attach_event(b->bus, b->daemon->event, SD_EVENT_PRIORITY_NORMAL);
	return r;
}

static void connect_to_bus(struct bus *b)
{
	char why[128];
	int r = try_to_connect(b);

	if (r >= 0)
		return;
	snprintf(why, sizeof(why), "cannot reach the system bus (%s)", strerror(-r));
	lost(b, why);
}

void bus_start(struct daemon *d)
{
	struct bus *b = calloc(1, sizeof(*b));

	if (!b) {
		log_warning("no control over D-Bus: no memory");
		return;
	}
	b->daemon = d;
	b->retry_us = RETRY_MIN_US;
	d->bus = b;
	connect_to_bus(b);
}

void bus_stop(struct daemon *d)
{
	struct bus *b = d->bus;

	if (!b)
		return;
	/* Without the name nothing new comes; what had come is answered. */
	if (b->bus && sd_bus_is_ready(b->bus) > 0) {
		(void)sd_bus_release_name(b->bus, "org.residentd1");
		while (sd_bus_process(b->bus, NULL) > 0)
			;
	}
	disconnect(b);
	sd_event_source_disable_unref(b->retry);
	free(b);
	d->bus = NULL;
}
