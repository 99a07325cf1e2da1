/* SPDX-License-Identifier: MIT */
/*
 * lease.c: things held while a descriptor stays open. See lease.h. Loop thread.
 *
 * Owns daemon.leases. The holder has one end of a socket pair, wherever he passes it on to; the
 * kernel's hang-up on ours is the only thing that ends a lease before the service does. Refuses to
 * know who may hold, and what a lease does: whoever cares counts.
 * Invariant: every lease in the list has an event source that frees it.
 */
#include "daemon/lease.h"

#include "daemon/bus.h"
#include "daemon/gpu.h"
#include "daemon/pressure.h"

#include <sys/socket.h>

#define LEASES_PER_UID 64
#define TEXT_MAX       256 /* bytes of who and why */

const char *lease_kind_to_string(enum lease_kind k)
{
	switch (k) {
	case LEASE_HOLD: return "hold";
	case LEASE_YIELD_GPU: return "yield-gpu";
	}
	return "hold";
}

static struct lease *lease_free(struct lease *l)
{
	if (!l)
		return NULL;
	sd_event_source_disable_unref(l->source);
	closep(&l->fd);
	free(l->who);
	free(l->why);
	free(l);
	return NULL;
}
DEFINE_CLEANUP(struct lease *, lease_free)

static void unlink_lease(struct lease *l)
{
	struct daemon *d = l->daemon;

	*(l->prev ? &l->prev->next : &d->leases) = l->next;
	if (l->next)
		l->next->prev = l->prev;
	d->n_leases--;
}

static int on_hang_up(sd_event_source *source, int fd, uint32_t events, void *arg)
{
	struct lease *l = arg;
	struct daemon *d = l->daemon;

	(void)source;
	(void)fd;
	(void)events;
	unlink_lease(l);
	lease_free(l);
	service_touch(d);
	pressure_used(d); /* what it held may go, some time from now */
	gpu_leases_changed(d);
	bus_leases_changed(d);
	return 0;
}

int lease_new(struct daemon *d, enum lease_kind kind, uid_t uid, pid_t pid, const char *who,
	      const char *why, uint64_t bytes, int *ret_fd)
{
	_cleanup_(lease_freep) struct lease *l = NULL;
	_cleanup_(closep) int theirs = -1;
	struct timespec now;
	int pair[2], r;
	size_t n = 0;

	if (strlen(who) > TEXT_MAX || strlen(why) > TEXT_MAX)
		return -EINVAL;
	for (const struct lease *other = d->leases; other; other = other->next)
		n += other->uid == uid;
	if (n >= LEASES_PER_UID)
		return -EUSERS;
	l = calloc(1, sizeof(*l));
	if (!l)
		return -ENOMEM;
	l->fd = -1;
	l->who = strdup(who);
	l->why = strdup(why);
	if (!l->who || !l->why)
		return -ENOMEM;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	l->fd = pair[0];
	theirs = pair[1];
	/* Nothing is said on it: the holder's writes fail instead of filling a buffer. */
	if (shutdown(l->fd, SHUT_RD) < 0)
		return -errno;
	r = sd_event_add_io(d->event, &l->source, l->fd, 0, on_hang_up, l);
	if (r < 0)
		return r;
	clock_gettime(CLOCK_REALTIME, &now);
	l->daemon = d;
	l->kind = kind;
	l->uid = uid;
	l->pid = pid;
	l->bytes = bytes;
	l->since_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
	l->next = d->leases;
	if (l->next)
		l->next->prev = l;
	d->leases = TAKE_PTR(l);
	d->n_leases++;
	*ret_fd = TAKE_FD(theirs);
	service_touch(d);
	gpu_leases_changed(d);
	bus_leases_changed(d);
	return 0;
}

void lease_free_all(struct daemon *d)
{
	while (d->leases) {
		struct lease *l = d->leases;

		unlink_lease(l);
		lease_free(l);
	}
}
