/* SPDX-License-Identifier: MIT */
/*
 * session.c: the registry of conversations. See session.h. Loop thread; knows nothing of tokens.
 *
 * Invariant: a busy session is never freed; session_close() only dooms it.
 */
#include "daemon/session.h"

#include "daemon/bus.h"
#include "daemon/conn.h"
#include "daemon/messages.h"

#include <sys/random.h>

static int make_id(char id[SESSION_ID_LEN + 1])
{
	unsigned char raw[SESSION_ID_LEN / 2];

	if (getrandom(raw, sizeof(raw), 0) != (ssize_t)sizeof(raw))
		return -EIO;
	for (size_t i = 0; i < sizeof(raw); i++)
		snprintf(id + 2 * i, 3, "%02x", raw[i]);
	return 0;
}

size_t session_count(const struct daemon *d, uid_t uid)
{
	size_t n = 0;

	for (const struct session *s = d->sessions; s; s = s->next)
		n += s->uid == uid;
	return n;
}

static void arm_timer(struct daemon *d);

static int on_timer(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;
	uint64_t now = now_us();
	struct session *next;

	(void)source;
	(void)usec;
	for (struct session *s = d->sessions; s; s = next) {
		next = s->next;
		if (s->keep && !s->busy && now - s->used_us >= d->config.keep_us)
			session_close(d, s);
	}
	arm_timer(d);
	return 0;
}

/* One timer, at the earliest end of a kept session; none while there are none. */
static void arm_timer(struct daemon *d)
{
	uint64_t first = UINT64_MAX, now = now_us();

	for (const struct session *s = d->sessions; s; s = s->next)
		if (s->keep && !s->busy)
			first = MIN(first, s->used_us);
	if (first == UINT64_MAX || d->config.keep_us == UINT64_MAX || !d->event) {
		if (d->session_timer)
			(void)sd_event_source_set_enabled(d->session_timer, SD_EVENT_OFF);
		return;
	}
	first = MAX(now, first + d->config.keep_us) + 1000;
	if (!d->session_timer) {
		if (sd_event_add_time(d->event, &d->session_timer, CLOCK_MONOTONIC, first, 1000000,
				      on_timer, d) < 0)
			log_warning("cannot set a timer: kept sessions stay until they are closed");
		return;
	}
	(void)sd_event_source_set_time(d->session_timer, first);
	(void)sd_event_source_set_enabled(d->session_timer, SD_EVENT_ONESHOT);
}

/* At most once a minute and user. */
static void tell_limit(struct daemon *d, uid_t uid)
{
	struct uid_usage *u = usage_of(d, uid);
	char field[32];
	const char *const fields[] = { MESSAGE_ID_SESSION_LIMIT, field, NULL };

	if (!u || (u->sessions_told > 0 && now_us() - u->sessions_told < 60000000))
		return;
	u->sessions_told = now_us();
	snprintf(field, sizeof(field), "UID=%u", uid);
	log_fields(LOG_NOTICE, fields,
		   "uid %u may open no more sessions (%zu are open, %zu of them his)", uid,
		   d->n_sessions, session_count(d, uid));
}

int session_open(struct daemon *d, struct conn *owner, bool keep, struct session **ret)
{
	uint32_t max = MIN(d->config.sessions_per_user, owner->limits.sessions);
	uid_t uid = owner->uid;
	struct session *s;
	int r;

	if (d->n_sessions >= d->config.sessions_max || session_count(d, uid) >= max) {
		tell_limit(d, uid);
		return -EUSERS;
	}
	s = calloc(1, sizeof(*s));
	if (!s)
		return -ENOMEM;
	r = make_id(s->id);
	if (r == 0 && !(s->engine = engine_session_new(uid)))
		r = -ENOMEM;
	if (r < 0) {
		free(s);
		return r;
	}
	s->uid = uid;
	s->keep = keep;
	s->owner = keep ? NULL : owner;
	s->used_us = now_us();
	s->next = d->sessions;
	if (s->next)
		s->next->prev = s;
	d->sessions = s;
	d->n_sessions++;
	arm_timer(d);
	service_touch(d);
	bus_session_added(d, s);
	*ret = s;
	return 0;
}

struct session *session_find(struct daemon *d, uid_t uid, const char *id)
{
	for (struct session *s = d->sessions; s; s = s->next)
		if (s->uid == uid && !s->doomed && streq(s->id, id))
			return s;
	return NULL;
}

void session_close(struct daemon *d, struct session *s)
{
	if (s->busy) {
		s->doomed = true;
		s->owner = NULL;
		return;
	}
	*(s->prev ? &s->prev->next : &d->sessions) = s->next;
	if (s->next)
		s->next->prev = s->prev;
	d->n_sessions--;
	service_touch(d);
	bus_session_removed(d, s);
	engine_session_free(d->engine, s->engine);
	free(s);
}

void session_release(struct daemon *d, struct session *s)
{
	s->busy = false;
	s->used_us = now_us();
	if (s->doomed)
		session_close(d, s);
	arm_timer(d);
}

void session_close_of(struct daemon *d, const struct conn *owner)
{
	struct session *next;

	for (struct session *s = d->sessions; s; s = next) {
		next = s->next;
		if (s->owner == owner)
			session_close(d, s);
	}
}

void session_close_all(struct daemon *d)
{
	struct session *next;

	for (struct session *s = d->sessions; s; s = next) {
		next = s->next;
		session_close(d, s);
	}
}
