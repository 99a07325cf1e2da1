/* SPDX-License-Identifier: MIT */
/*
 * ctl.c: the helpers behind ctl.h that belong to no command.
 */
#include "client/ctl.h"

#include <pwd.h>

enum exit_code ctl_usage_error(struct ctl *c, const char *what)
{
	terminal_printf(&c->err, PROGRAM ": %s\n" PROGRAM ": see `residentctl --help`\n", what);
	return EXIT_USAGE;
}

enum exit_code ctl_bad_reply(struct ctl *c, const struct args *a)
{
	terminal_printf(&c->err, PROGRAM ": the service does not speak the protocol: '%s' %s\n",
			a->bad, a->why);
	return EXIT_ERROR;
}

enum exit_code ctl_print_json(struct ctl *c, json_t *o)
{
	_cleanup_(freep) char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;

	json_decref(o);
	if (!text) {
		terminal_printf(&c->err, PROGRAM
				": this cannot be said in JSON: a name is not valid UTF-8, or "
				"memory is short\n");
		return EXIT_ERROR;
	}
	terminal_printf(&c->out, "%s\n", text);
	return EXIT_OK;
}

const char *ctl_user_text(uint32_t uid, char text[64])
{
	const struct passwd *p = getpwuid((uid_t)uid);

	if (p)
		snprintf(text, 64, "%s", p->pw_name);
	else
		snprintf(text, 64, "%u", uid);
	return text;
}

const char *ctl_bytes_text(uint64_t bytes, char text[32])
{
	static const char *const units[] = { "B", "kB", "MB", "GB", "TB", "PB", "EB" };
	double x = (double)bytes;
	size_t i = 0;

	for (; x >= 999.5 && i + 1 < ARRAY_SIZE(units); i++)
		x /= 1000;
	snprintf(text, 32, i == 0 ? "%.0f %s" : "%.3g %s", x, units[i]);
	return text;
}

const char *ctl_span_text(uint64_t s, char text[32])
{
	if (s >= 86400)
		snprintf(text, 32, "%llu d %llu h", (unsigned long long)(s / 86400),
			 (unsigned long long)(s % 86400 / 3600));
	else if (s >= 3600)
		snprintf(text, 32, "%llu h %llu min", (unsigned long long)(s / 3600),
			 (unsigned long long)(s % 3600 / 60));
	else if (s >= 60)
		snprintf(text, 32, "%llu min %llu s", (unsigned long long)(s / 60),
			 (unsigned long long)(s % 60));
	else
		snprintf(text, 32, "%llu s", (unsigned long long)s);
	return text;
}
