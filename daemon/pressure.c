/* SPDX-License-Identifier: MIT */
/*
 * pressure.c: reacts to memory pressure. See pressure.h. Loop thread.
 *
 * Knows when, not what: the engine forgets the states of idle sessions. Invariant: at most one reaction in two seconds, which is how often
 * the kernel speaks to an unprivileged process.
 */
#include "daemon/pressure.h"

#include <fcntl.h>
#include <sys/stat.h>

/* 100 ms of stall in 2 s: systemd's own default rate (PRESSURE.md), in the only window that is open to everybody (a multiple of 2 s). */
#define TRIGGER     "some 200000 2000000"
#define INTERVAL_US 2000000

ssize_t pressure_decode(const char *base64, unsigned char *ret, size_t max)
{
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	uint32_t bits = 0;
	size_t n = 0, n_bits = 0;

	for (; *base64 && *base64 != '='; base64++) {
		const char *at = strchr(digits, *base64);

		if (!at)
			return -EINVAL;
		bits = bits << 6 | (uint32_t)(at - digits);
		n_bits += 6;
		if (n_bits < 8)
			continue;
		n_bits -= 8;
		if (n == max)
			return -EINVAL;
		ret[n++] = (unsigned char)(bits >> n_bits);
	}
	return (ssize_t)n;
}

static int on_pressure(sd_event_source *source, int fd, uint32_t events, void *arg)
{
	struct daemon *d = arg;
	char thrown[64];

	(void)source;
	if (events & (EPOLLHUP | EPOLLERR)) {
		d->pressure_source = sd_event_source_disable_unref(d->pressure_source);
		return 0;
	}
	if (events & EPOLLIN)
		(void)!read(fd, thrown, sizeof(thrown));
	if (now_us() - d->pressure_us < INTERVAL_US)
		return 0;
	d->pressure_us = now_us();
	log_info("memory is short: idle conversations give theirs back");
	engine_shrink(d->engine);
	return 0;
}

/* A descriptor that becomes ready under pressure, and by which event. -errno. */
static int open_watch(uint32_t *ret_events)
{
	const char *path = getenv("MEMORY_PRESSURE_WATCH"), *text = getenv("MEMORY_PRESSURE_WRITE");
	unsigned char trigger[256] = TRIGGER;
	ssize_t len = sizeof(TRIGGER); /* the kernel wants the NUL */
	_cleanup_(closep) int fd = -1;
	struct stat st;

	if (path && streq(path, "/dev/null")) /* switched off by the administrator */
		return -ENODEV;
	if (path && text)
		len = pressure_decode(text, trigger, sizeof(trigger));
	if (len < 0)
		return (int)len;
	fd = open(path ? path : "/proc/pressure/memory", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0)
		return -errno;
	*ret_events = S_ISFIFO(st.st_mode) ? EPOLLIN : EPOLLPRI;
	if (S_ISREG(st.st_mode) && write(fd, trigger, (size_t)len) != len)
		return -errno;
	return TAKE_FD(fd);
}

void pressure_start(struct daemon *d)
{
	uint32_t events;
	int fd = open_watch(&events), r;

	if (fd < 0) {
		log_debug("no notice of memory pressure: %s", strerror(-fd));
		return;
	}
	r = sd_event_add_io(d->event, &d->pressure_source, fd, events, on_pressure, d);
	if (r < 0) {
		close(fd);
		log_debug("no notice of memory pressure: %s", strerror(-r));
		return;
	}
	(void)sd_event_source_set_io_fd_own(d->pressure_source, true);
}

void pressure_stop(struct daemon *d)
{
	d->pressure_source = sd_event_source_disable_unref(d->pressure_source);
}
