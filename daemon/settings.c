/* SPDX-License-Identifier: MIT */
/*
 * settings.c: the settings in force: configuration, policy, and what users have used today; reading them anew, writing the last. Loop thread.
 *
 * The parsers (config.c, policy.c, quota.c) are pure; this is where their warnings reach the log, once. Invariant: what cannot be read leaves
 * what was in force.
 */
#include "daemon/conn.h"
#include "daemon/messages.h"

/* Prefix of /etc, /run and /usr/lib: for tests and for a residentd beside the system's. */
static const char *root(void)
{
	const char *s = getenv("RESIDENTD_ROOT");

	return s ? s : "";
}

static void log_lines(struct buf *warnings)
{
	char *save = NULL;

	for (char *line = warnings->data ? strtok_r(warnings->data, "\n", &save) : NULL; line;
	     line = strtok_r(NULL, "\n", &save))
		log_warning("%s", line);
	buf_done(warnings);
}

int service_read_policy(struct daemon *d)
{
	static const char *const fields[] = { MESSAGE_ID_POLICY_RELOADED, NULL };
	struct policy *p = NULL;
	struct buf warnings = {};
	struct uses uses = {};
	int r = policy_read(root(), d->state_dir, &p, &warnings);

	if (r >= 0)
		r = uses_read(root(), &uses, &warnings);

	log_lines(&warnings);
	if (r < 0) {
		policy_free(p);
		uses_done(&uses);
		log_error("cannot read the policy: %s%s", strerror(-r),
			  d->policy ? ", keeping the one in force" : "");
		return r;
	}
	if (d->policy)
		log_fields(LOG_INFO, fields, "policy read anew");
	policy_free(d->policy);
	d->policy = p;
	uses_done(&d->uses);
	d->uses = uses;
	conn_policy_changed(d);
	return 0;
}

int service_open_quota(struct daemon *d)
{
	_cleanup_(freep) char *path = NULL;
	struct buf warnings = {};
	int r;

	if (d->state_dir && asprintf(&path, "%s/quota", d->state_dir) < 0)
		return -ENOMEM;
	r = quota_open(path, time(NULL), &d->quota, &warnings);
	log_lines(&warnings);
	return r;
}

static int on_quota(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;
	int r = quota_save(d->quota);

	(void)source;
	(void)usec;
	if (r < 0 && !d->quota_failed)
		log_warning("cannot save what users have used today: %s; counting in memory",
			    strerror(-r));
	d->quota_failed = r < 0;
	d->quota_timer = sd_event_source_disable_unref(d->quota_timer);
	return 0;
}

void service_save_quota(struct daemon *d)
{
	if (!d->quota_timer && d->event)
		(void)sd_event_add_time_relative(d->event, &d->quota_timer, CLOCK_MONOTONIC,
						 10000000, 1000000, on_quota, d);
}

/* Reads the configuration anew into *ret; warnings go to the log. */
static int read_config(const struct daemon *d, struct config *ret)
{
	struct buf warnings = {};
	int r;

	config_defaults(ret);
	r = d->options.config ? config_read(ret, d->options.config, &warnings)
			      : config_read_layers(ret, root(), &warnings);
	log_lines(&warnings);
	return r;
}

int service_read_config(struct daemon *d)
{
	struct config c;
	int r = read_config(d, &c);

	if (r < 0) {
		config_done(&c);
		return r;
	}
	config_done(&d->config);
	d->config = c;
	log_set_level(c.log_level);
	return 0;
}
