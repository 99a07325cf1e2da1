/* SPDX-License-Identifier: MIT */
/*
 * sleep.c: what happens before and after the machine sleeps. See sleep.h. Loop thread.
 *
 * Owns logind's delay lock, and what the engine was told. Refuses to know what a suspended engine does. Who may send PrepareForSleep is the
 * bus' business: from others than logind it would have to be addressed to us, which policy/org.residentd1.conf denies to all but root.
 * Invariants: the lock is held only while there is a card to lose, and never longer than the engine needs to give it up; the engine is told
 * the next thing only when it has done the last, so that suspend, resume, suspend in a row end as suspended.
 */
#include "daemon/sleep.h"

#include "daemon/gpu.h"

#include <fcntl.h>

#define LOGIN_NAME    "org.freedesktop.login1"
#define LOGIN_PATH    "/org/freedesktop/login1"
#define LOGIN_MANAGER "org.freedesktop.login1.Manager"

struct sleep {
	struct daemon *daemon;
	sd_bus *bus; /* not a reference; NULL: none now */
	sd_bus_slot *match, *owner_match, *call;
	int lock_fd;   /* logind's: the machine does not sleep before it is closed; -1: not held */
	bool refused;  /* told once; asked again after the next sleep */
	bool sleeping; /* about to, or just not awake again */
	bool told;     /* the engine is suspended, or will be */
	bool suspending; /* EVENT_SUSPENDED is on its way */
};

static void update(struct sleep *s);

static void let_go(struct sleep *s)
{
	closep(&s->lock_fd);
	s->lock_fd = -1;
}

/* What hangs on the connection. */
static void disconnect(struct sleep *s)
{
	s->match = sd_bus_slot_unref(s->match);
	s->owner_match = sd_bus_slot_unref(s->owner_match);
	s->call = sd_bus_slot_unref(s->call);
	s->bus = NULL;
	/* Nobody will say any more that it is time. */
	let_go(s);
}

static int on_lock(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	struct sleep *s = arg;
	int fd;

	(void)error;
	s->call = sd_bus_slot_unref(s->call);
	if (sd_bus_message_is_method_error(m, NULL)) {
		s->refused = true;
		log_debug("the machine will not wait for us before it sleeps: %s",
			  sd_bus_message_get_error(m)->message);
		return 0;
	}
	/* The descriptor is the message's. */
	if (sd_bus_message_read(m, "h", &fd) >= 0)
		s->lock_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	s->refused = s->lock_fd < 0;
	update(s);
	return 0;
}

static void ask_for_lock(struct sleep *s)
{
	if (sd_bus_call_method_async(s->bus, &s->call, LOGIN_NAME, LOGIN_PATH, LOGIN_MANAGER,
				     "Inhibit", on_lock, s, "ssss", "sleep", "residentd",
				     "What is in graphics memory is given up first", "delay") < 0)
		s->refused = true;
}

/* Does whatever follows from what is known now. */
static void update(struct sleep *s)
{
	struct daemon *d = s->daemon;

	if (s->suspending)
		return;
	if (s->sleeping && !s->told && gpu_in_use(d)) {
		s->told = s->suspending = true;
		engine_suspend(d->engine);
		return;
	}
	if (!s->sleeping && s->told) {
		s->told = false;
		engine_resume(d->engine);
	}
	if (s->sleeping || !gpu_in_use(d))
		let_go(s);
	else if (s->bus && s->lock_fd < 0 && !s->call && !s->refused)
		ask_for_lock(s);
}

static void set_sleeping(struct sleep *s, bool sleeping)
{
	s->sleeping = sleeping;
	s->refused = false;
	update(s);
}

static int on_sleep(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	struct sleep *s = arg;
	int begins;

	(void)error;
	if (sd_bus_message_read(m, "b", &begins) < 0)
		return 0;
	log_debug("the machine %s", begins ? "is about to sleep" : "has woken up");
	set_sleeping(s, begins);
	return 0;
}

/* Who comes anew has not said that it sleeps, and who went will not say that it woke up. */
static int on_owner(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	(void)m;
	(void)error;
	set_sleeping(arg, false);
	return 0;
}

static int on_match(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	(void)arg;
	(void)error;
	/* With a handler of one's own a failure does not close the connection. */
	if (sd_bus_message_is_method_error(m, NULL))
		log_debug("not told when the machine sleeps: %s", sd_bus_message_get_error(m)->message);
	return 0;
}

void sleep_bus_up(struct daemon *d, sd_bus *bus)
{
	struct sleep *s = d->sleep;
	int r;

	/* At the end calls that had come are still answered, and the name may come with them. */
	if (!d->engine)
		return;
	if (!s) {
		s = calloc(1, sizeof(*s));
		if (!s) {
			log_debug("not told when the machine sleeps: no memory");
			return;
		}
		s->daemon = d;
		s->lock_fd = -1;
		d->sleep = s;
	}
	disconnect(s);
	s->bus = bus;
	r = sd_bus_match_signal_async(bus, &s->match, LOGIN_NAME, LOGIN_PATH, LOGIN_MANAGER,
				      "PrepareForSleep", on_sleep, on_match, s);
	if (r >= 0)
		r = sd_bus_add_match_async(
			bus, &s->owner_match,
			"type='signal',sender='org.freedesktop.DBus',path='/org/freedesktop/DBus',"
			"interface='org.freedesktop.DBus',member='NameOwnerChanged',arg0='" LOGIN_NAME
			"'",
			on_owner, on_match, s);
	if (r < 0)
		log_debug("not told when the machine sleeps: %s", strerror(-r));
	update(s);
}

void sleep_bus_down(struct daemon *d)
{
	struct sleep *s = d->sleep;

	if (!s)
		return;
	disconnect(s);
	set_sleeping(s, false);
}

void sleep_follow(struct daemon *d)
{
	if (d->sleep)
		update(d->sleep);
}

void sleep_suspended(struct daemon *d)
{
	if (!d->sleep)
		return;
	d->sleep->suspending = false;
	update(d->sleep);
}

void sleep_stop(struct daemon *d)
{
	struct sleep *s = d->sleep;

	if (!s)
		return;
	disconnect(s);
	free(s);
	d->sleep = NULL;
}
