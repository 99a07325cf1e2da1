/* SPDX-License-Identifier: MIT */
/*
 * pressure.c: how much memory the model may have. See pressure.h. Loop thread.
 *
 * Knows how much, not what: the engine decides which experts and which conversations give way. Owns struct daemon's memory_*. Invariants:
 * nothing wakes the machine while no experts are managed; the budget never goes above the configured one, nor below the floor.
 */
#include "daemon/pressure.h"

#include "daemon/bus.h"
#include "daemon/inspect.h"
#include "daemon/residency/memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>

/* 100 ms of stall in 2 s: systemd's own default rate (PRESSURE.md), in the only window that is open to everybody (a multiple of 2 s). */
#define TRIGGER      "some 200000 2000000"
#define INTERVAL_US  2000000
/* How often the memory is looked at: something that takes 256 MB/s gets 26 MB between two looks, half of the smallest slack that is kept
 * (memory_group_slack()). With nothing at work it is somebody else's turn to be fast. */
#define LOOK_BUSY_US 100000
#define LOOK_IDLE_US 500000
/* What comes back a second, as a part of the configured budget, and how long after the last step down. */
#define GROW_PART    20
#define CALM_US      3000000
/* What one notice of pressure takes off the budget, as a part of it. */
#define STEP_PART    20
/* What is free changes a little all the time: less than this part of the budget is no reason to move it down. */
#define NOISE_PART   256
/* Less than this part of the memory available is little. */
#define SCARCE_PART  8
/* Steps are many; the journal gets one line for those that come within this time. */
#define LOG_US       10000000

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

double pressure_some_avg10(void)
{
	_cleanup_(fclosep) FILE *f = fopen("/proc/pressure/memory", "re");
	double avg = 0;

	return f && fscanf(f, "some avg10=%lf", &avg) == 1 ? avg : 0;
}

uint64_t pressure_next_budget(uint64_t now, uint64_t want, uint64_t floor, uint64_t configured,
			      uint64_t grow_bytes, bool calm)
{
	uint64_t next = now;

	if (want < now)
		next = want;
	else if (calm)
		next = MIN(want, now + MIN(grow_bytes, UINT64_MAX - now));
	return MAX(MIN(next, configured), floor);
}

static void tell_budget(struct daemon *d, uint64_t from, uint64_t to)
{
	uint64_t at_load = atomic_load(&engine_shared(d->engine)->at_load_bytes);
	bool down = to < from;

	/* One way up or down may take many looks. */
	if (down != d->budget_fell || d->budget_steps_down + d->budget_steps_up == 0)
		*(down ? &d->budget_steps_down : &d->budget_steps_up) += 1;
	d->budget_fell = down;
	if (!atomic_load(&engine_shared(d->engine)->managed))
		return; /* all is in the page cache: the kernel's business so far */
	/* What comes and goes all the time is not worth a line. */
	if (down && to < at_load - at_load / GROW_PART && !d->budget_low) {
		d->budget_low = true;
		bus_pressure(d, "some");
	}
	if (down && d->budget_low && now_us() - d->budget_logged_us > LOG_US) {
		d->budget_logged_us = now_us();
		log_info("memory is short (%" PRIu64 " MB available): the model's budget goes from %" PRIu64
			 " MB to %" PRIu64 " MB, the coldest experts first",
			 d->memory_available / 1000000, from / 1000000, to / 1000000);
	}
	if (down)
		d->budget_told_us = now_us();
}

static void set_budget(struct daemon *d, uint64_t to)
{
	struct residency_shared *s = engine_shared(d->engine);
	uint64_t from = atomic_load(&s->target_bytes);

	if (from == 0)
		from = atomic_load(&s->budget_bytes);
	if (to == from)
		return;
	atomic_store(&s->target_bytes, to);
	d->budget_last = to;
	tell_budget(d, from, to);
	if (d->budget_low && to >= atomic_load(&s->at_load_bytes)) {
		d->budget_low = false;
		bus_pressure(d, "none");
		log_info("memory is free again: the model's budget is %" PRIu64 " MB as before",
			 to / 1000000);
	}
	/* One that works looks by itself. */
	if (d->n_requests == 0)
		engine_wake(d->engine);
}

/* Looks once. Returns whether the machine has little left: if not, a notice of its pressure is about some group far from here. */
static bool look(struct daemon *d, uint64_t since_us)
{
	struct residency_shared *s = engine_shared(d->engine);
	uint64_t configured = atomic_load(&s->configured_bytes), now = atomic_load(&s->target_bytes);
	uint64_t reserve = d->config.memory_reserve_bytes, grow = configured / GROW_PART, want;
	struct memory_state state;

	if (!d->memory || memory_read(d->memory, &state) < 0)
		return true;
	d->memory_available = state.available;
	if (reserve == 0)
		reserve = memory_default_reserve(state.machine_total);
	if (now == 0)
		now = atomic_load(&s->budget_bytes);
	else if (now < d->budget_last)
		d->budget_told_us = now_us(); /* the engine took a step of its own: not up again at once */
	d->budget_last = now;
	want = memory_budget(&state, memory_anonymous(d->memory) + atomic_load(&s->locked_bytes),
			     reserve);
	if (want < now && now - want < now / NOISE_PART)
		want = now;
	set_budget(d, pressure_next_budget(now, want, atomic_load(&s->floor_bytes), configured,
					   grow * MIN(since_us, (uint64_t)LOOK_IDLE_US) / 1000000,
					   now_us() - d->budget_told_us > CALM_US));
	return state.machine_available < MAX(2 * reserve, state.machine_total / SCARCE_PART);
}

static bool is_managed(struct daemon *d)
{
	return d->model && atomic_load(&engine_shared(d->engine)->managed);
}

static int on_look(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;
	uint64_t now = now_us(), interval = d->n_requests > 0 ? LOOK_BUSY_US : LOOK_IDLE_US;

	(void)usec;
	(void)look(d, now - d->budget_looked_us);
	d->budget_looked_us = now;
	/* When it had no request, the engine has told nobody that it manages experts now. */
	inspect_follow_model(d, d->model);
	if (!is_managed(d)) {
		d->budget_timer = sd_event_source_disable_unref(d->budget_timer);
		return 0;
	}
	(void)sd_event_source_set_time_relative(source, interval);
	(void)sd_event_source_set_enabled(source, SD_EVENT_ONESHOT);
	return 0;
}

/* The kernel has spoken: less than what is measured to be there. */
static void step_down(struct daemon *d)
{
	struct residency_shared *s = engine_shared(d->engine);
	uint64_t now = atomic_load(&s->target_bytes);

	if (now == 0)
		now = atomic_load(&s->budget_bytes);
	if (now > 0)
		set_budget(d, MAX(now - now / STEP_PART, atomic_load(&s->floor_bytes)));
}

void pressure_last_resort(struct daemon *d)
{
	struct residency_shared *s = engine_shared(d->engine);

	log_notice("somebody is about to be killed for want of memory: all that can be given is");
	bus_pressure(d, "full");
	engine_shrink(d->engine);
	if (atomic_load(&s->floor_bytes) > 0)
		set_budget(d, atomic_load(&s->floor_bytes));
}

static void look_soon(struct daemon *d)
{
	if (d->budget_timer || !d->memory)
		return;
	d->budget_looked_us = now_us();
	if (sd_event_add_time_relative(d->event, &d->budget_timer, CLOCK_MONOTONIC, LOOK_BUSY_US,
				       10000, on_look, d) < 0)
		log_warning("no memory for a timer: the model's budget will not move");
}

void pressure_model_changed(struct daemon *d)
{
	if (is_managed(d))
		look_soon(d);
	else
		d->budget_timer = sd_event_source_disable_unref(d->budget_timer);
}

static int on_host_idle(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;

	(void)source;
	(void)usec;
	d->host_idle_timer = sd_event_source_disable_unref(d->host_idle_timer);
	if (d->n_requests > 0 || d->n_leases > 0 || !atomic_load(&engine_shared(d->engine)->managed))
		return 0;
	log_debug("idle: the experts leave the memory");
	engine_release(d->engine);
	return 0;
}

void pressure_used(struct daemon *d)
{
	d->host_idle_timer = sd_event_source_disable_unref(d->host_idle_timer);
	if (d->n_requests == 0 && d->config.host_idle_us != UINT64_MAX && d->state == SERVICE_AVAILABLE)
		(void)sd_event_add_time_relative(d->event, &d->host_idle_timer, CLOCK_MONOTONIC,
						 d->config.host_idle_us, 1000000, on_host_idle, d);
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
	if (look(d, 0) || d->pressure_own) {
		if (d->pressure_us - d->pressure_logged_us > LOG_US)
			log_info("memory is short: idle conversations give theirs back");
		d->pressure_logged_us = d->pressure_us;
		engine_shrink(d->engine);
		if (is_managed(d))
			step_down(d);
	}
	/* The engine may begin to manage experts now: one look, and more if it has. */
	look_soon(d);
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
	int fd, r = memory_open("", &d->memory);

	if (r < 0)
		log_warning("cannot see how much memory is free: %s; the model's budget will not move",
			    strerror(-r));
	/* What systemd names is of our own control group. */
	d->pressure_own = getenv("MEMORY_PRESSURE_WATCH") != NULL;
	fd = open_watch(&events);
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
	d->budget_timer = sd_event_source_disable_unref(d->budget_timer);
	d->host_idle_timer = sd_event_source_disable_unref(d->host_idle_timer);
	d->memory = memory_close(d->memory);
}
