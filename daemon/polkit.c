/* SPDX-License-Identifier: MIT */
/*
 * polkit.c: asks polkit, or does without it. See polkit.h. Loop thread.
 *
 * Owns the list of questions under way; each keeps its message, and through it the connection,
 * until it is answered or dropped. Refuses to know what is done with an answer. polkit is asked by
 * messages only (no library, no thread), so that a slow administrator at a password prompt, or a
 * polkitd that hangs, costs one entry of this list and nothing else.
 * Invariant: a check is in the list exactly as long as it lives, and `done` runs at most once,
 * right before its end.
 */
#include "daemon/polkit.h"

#include <grp.h>
#include <inttypes.h>

#define ADMIN_GROUP            "residentd"
#define CHECKS_PER_UID         8 /* each may pin 16 descriptors that came with its message */
#define TIMEOUT_US             (20 * UINT64_C(1000000))
#define INTERACTIVE_TIMEOUT_US (300 * UINT64_C(1000000)) /* somebody looks for a password */

struct check {
	struct check *prev, *next;
	sd_bus_message *message;
	sd_bus_slot *slot; /* of the question that is under way */
	sd_bus_track *track;
	uid_t uid;
	bool use; /* what everybody may where nobody set rules */
	bool interactive;
	uint64_t id; /* for polkit, to cancel by */
	polkit_done_fn done;
	void *arg;
};

static struct check *checks;

static struct check *check_free(struct check *c)
{
	if (!c)
		return NULL;
	sd_bus_slot_unref(c->slot);
	sd_bus_track_unref(c->track);
	sd_bus_message_unref(c->message);
	free(c);
	return NULL;
}
DEFINE_CLEANUP(struct check *, check_free)

static void drop(struct check *c)
{
	*(c->prev ? &c->prev->next : &checks) = c->next;
	if (c->next)
		c->next->prev = c->prev;
	check_free(c);
}

static void finish(struct check *c, int r)
{
	c->done(c->message, r, c->arg);
	drop(c);
}

size_t polkit_n_pending(void)
{
	size_t n = 0;

	for (const struct check *c = checks; c; c = c->next)
		n++;
	return n;
}

void polkit_drop_all(void)
{
	while (checks)
		drop(checks);
}

/* The dialog on somebody's screen goes away with the program that caused it. */
static void cancel_dialog(const struct check *c)
{
	char id[24];

	if (!c->interactive)
		return;
	snprintf(id, sizeof(id), "%" PRIu64, c->id);
	(void)sd_bus_call_method_async(sd_bus_message_get_bus(c->message), NULL,
				       "org.freedesktop.PolicyKit1",
				       "/org/freedesktop/PolicyKit1/Authority",
				       "org.freedesktop.PolicyKit1.Authority",
				       "CancelCheckAuthorization", NULL, NULL, "s", id);
}

static int on_sender_gone(sd_bus_track *track, void *arg)
{
	(void)track;
	cancel_dialog(arg);
	drop(arg);
	return 0;
}

static bool in_admin_group(const uint32_t *gids, size_t n)
{
	struct group group, *found = NULL;
	char buffer[16384];

	if (getgrnam_r(ADMIN_GROUP, &group, buffer, sizeof(buffer), &found) != 0 || !found)
		return false;
	for (size_t i = 0; i < n; i++)
		if (gids[i] == found->gr_gid)
			return true;
	return false;
}

/* a{sv} of GetConnectionCredentials: is UnixGroupIDs (au) there, with the administrators' group in it?
 * The process' groups as the bus daemon got them from the kernel; /proc may be hidden from us. */
static int read_groups(sd_bus_message *reply)
{
	int r = sd_bus_message_enter_container(reply, 'a', "{sv}");

	while (r >= 0 && (r = sd_bus_message_enter_container(reply, 'e', "sv")) > 0) {
		const char *key, *type;
		const void *gids;
		size_t size;

		r = sd_bus_message_read(reply, "s", &key);
		if (r < 0)
			return r;
		if (streq(key, "UnixGroupIDs") &&
		    sd_bus_message_peek_type(reply, NULL, &type) > 0 && streq(type, "au")) {
			r = sd_bus_message_enter_container(reply, 'v', "au");
			if (r >= 0)
				r = sd_bus_message_read_array(reply, 'u', &gids, &size);
			return r < 0 ? r : in_admin_group(gids, size / sizeof(uint32_t));
		}
		r = sd_bus_message_skip(reply, "v");
		if (r >= 0)
			r = sd_bus_message_exit_container(reply);
	}
	return r;
}

static int on_credentials(sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	(void)error;
	finish(arg, sd_bus_message_is_method_error(reply, NULL) ? -sd_bus_message_get_errno(reply)
								: read_groups(reply));
	return 1;
}

/* Nobody made rules: root and the service's group may everything, the others may use it. */
static void decide_alone(struct check *c)
{
	int r;

	if (c->use || c->uid == 0) {
		finish(c, 1);
		return;
	}
	c->slot = sd_bus_slot_unref(c->slot);
	r = sd_bus_call_method_async(sd_bus_message_get_bus(c->message), &c->slot,
				     "org.freedesktop.DBus", "/org/freedesktop/DBus",
				     "org.freedesktop.DBus", "GetConnectionCredentials",
				     on_credentials, c, "s", sd_bus_message_get_sender(c->message));
	if (r < 0)
		finish(c, r);
}

/* There is no polkit, as opposed to one that fails: that one may be about to say no. */
static bool absent(const sd_bus_error *e)
{
	return sd_bus_error_has_names(e, SD_BUS_ERROR_SERVICE_UNKNOWN, SD_BUS_ERROR_NAME_HAS_NO_OWNER,
				      "org.freedesktop.DBus.Error.Spawn.ServiceNotFound",
				      "org.freedesktop.systemd1.NoSuchUnit",
				      "org.freedesktop.systemd1.UnitMasked",
				      "org.freedesktop.systemd1.LoadFailed");
}

static int on_answer(sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	struct check *c = arg;
	int allowed, challenge, r;

	(void)error;
	if (sd_bus_message_is_method_error(reply, NULL)) {
		if (absent(sd_bus_message_get_error(reply)))
			decide_alone(c);
		else
			finish(c, -sd_bus_message_get_errno(reply));
		return 1;
	}
	r = sd_bus_message_enter_container(reply, 'r', "bba{ss}");
	if (r >= 0)
		r = sd_bus_message_read(reply, "bb", &allowed, &challenge);
	finish(c, r < 0 ? r : allowed > 0);
	return 1;
}

static int ask(struct check *c, const char *action)
{
	static uint64_t last_id;
	_cleanup_(sd_bus_message_unrefp) sd_bus_message *q = NULL;
	sd_bus *bus = sd_bus_message_get_bus(c->message);
	char id[24] = "";
	int r;

	if (c->interactive) {
		c->id = ++last_id;
		snprintf(id, sizeof(id), "%" PRIu64, c->id);
	}
	r = sd_bus_message_new_method_call(bus, &q, "org.freedesktop.PolicyKit1",
					   "/org/freedesktop/PolicyKit1/Authority",
					   "org.freedesktop.PolicyKit1.Authority",
					   "CheckAuthorization");
	if (r >= 0)
		r = sd_bus_message_append(q, "(sa{sv})sa{ss}us", "system-bus-name", 1, "name", "s",
					  sd_bus_message_get_sender(c->message), action, 0,
					  (uint32_t)c->interactive, id);
	if (r >= 0)
		r = sd_bus_call_async(bus, &c->slot, q, on_answer, c,
				      c->interactive ? INTERACTIVE_TIMEOUT_US : TIMEOUT_US);
	return r;
}

static size_t count_checks(uid_t uid)
{
	size_t n = 0;

	for (const struct check *c = checks; c; c = c->next)
		n += c->uid == uid;
	return n;
}

int polkit_check(sd_bus_message *m, const char *action, bool interactive, polkit_done_fn done, void *arg)
{
	_cleanup_(sd_bus_creds_unrefp) sd_bus_creds *creds = NULL;
	_cleanup_(check_freep) struct check *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return -ENOMEM;
	r = sd_bus_query_sender_creds(m, SD_BUS_CREDS_EUID, &creds);
	if (r >= 0)
		r = sd_bus_creds_get_euid(creds, &c->uid);
	if (r < 0)
		return r;
	if (count_checks(c->uid) >= CHECKS_PER_UID)
		return -ENOBUFS;
	c->message = sd_bus_message_ref(m);
	c->use = streq(action, "org.residentd1.use");
	c->interactive = interactive && sd_bus_message_get_allow_interactive_authorization(m) > 0;
	c->done = done;
	c->arg = arg;
	r = sd_bus_track_new(sd_bus_message_get_bus(m), &c->track, on_sender_gone, c);
	if (r >= 0)
		r = sd_bus_track_add_sender(c->track, m);
	if (r >= 0)
		r = ask(c, action);
	if (r < 0)
		return r;
	c->next = checks;
	if (checks)
		checks->prev = c;
	checks = TAKE_PTR(c);
	return 0;
}
