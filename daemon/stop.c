/* SPDX-License-Identifier: MIT */
/*
 * stop.c: the end of the service: drained on SIGTERM, or by itself when nobody needs it and systemd keeps the socket. Loop thread.
 *
 * Invariant: from the first signal on the process ends within 5 s, and every request is answered or told before.
 */
#include "daemon/conn.h"
#include "daemon/messages.h"
#include "daemon/polkit.h"
#include "daemon/request.h"

#include <systemd/sd-daemon.h>

#define DRAIN_US    4000000 /* running answers may end by themselves this long... */
#define DEADLINE_US 4700000 /* ...and the process ends within 5 s whatever happens */

/* Nothing that a stop would cost anybody: no client, no conversation kept, nothing held. */
static bool is_idle(const struct daemon *d)
{
	return polkit_n_pending() == 0 && d->n_conns == 0 && d->n_sessions == 0 &&
	       d->n_requests == 0 && d->n_leases == 0 && !d->loading;
}

static int on_idle(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;

	(void)source;
	(void)usec;
	if (!is_idle(d)) {
		service_touch(d); /* looks again later; what ends meanwhile does so too */
		return 0;
	}
	log_info("idle, ending; the next request starts the service again");
	service_stop(d);
	return 0;
}

void service_touch(struct daemon *d)
{
	uint64_t span = d->config.idle_exit_us;

	/* Only where somebody else keeps the socket: systemd. */
	if (d->socket_path || span == 0 || span == UINT64_MAX || !d->event || d->state == SERVICE_STOPPING)
		return;
	d->idle_timer = sd_event_source_disable_unref(d->idle_timer);
	/* A question to polkit that is under way has no other end that would be noticed here. */
	if (is_idle(d) || polkit_n_pending() > 0)
		(void)sd_event_add_time_relative(d->event, &d->idle_timer, CLOCK_MONOTONIC, span,
						 1000000, on_idle, d);
}

static int on_deadline(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;

	(void)source;
	(void)usec;
	return sd_event_exit(d->event, 0);
}

static int on_drained(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;

	(void)source;
	(void)usec;
	for (struct request *r = d->requests; r; r = r->next)
		atomic_store(&r->engine.gone, true);
	d->engine_quit = true;
	engine_quit(d->engine);
	service_check_stop(d);
	return 0;
}

void service_stop(struct daemon *d)
{
	static const char *const fields[] = { MESSAGE_ID_STOPPING, NULL };

	if (d->state == SERVICE_STOPPING) {
		(void)on_drained(NULL, 0, d);
		return;
	}
	(void)sd_notify(0, "STOPPING=1");
	engine_refuse_loads(d->engine);
	service_set_state(d, SERVICE_STOPPING);
	log_fields(LOG_INFO, fields, "stopping: %zu requests to finish", d->n_requests);
	d->listen_source = sd_event_source_disable_unref(d->listen_source);
	(void)sd_event_add_time_relative(d->event, &d->stop_timer, CLOCK_MONOTONIC, DRAIN_US, 1000,
					 on_drained, d);
	if (sd_event_add_time_relative(d->event, &d->stop_deadline, CLOCK_MONOTONIC, DEADLINE_US,
				       1000, on_deadline, d) < 0)
		(void)sd_event_exit(d->event, 0);
	service_check_stop(d);
}

void service_check_stop(struct daemon *d)
{
	if (d->state != SERVICE_STOPPING || d->n_requests > 0 || d->loading)
		return;
	/* Last answers leave first; a reader who does not come for them meets the deadline, or a second signal. */
	for (const struct conn *c = d->conns; c && !d->engine_quit; c = c->next)
		if (c->out.len > 0)
			return;
	(void)sd_event_exit(d->event, 0);
}
