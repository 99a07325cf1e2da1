/* SPDX-License-Identifier: MIT */
/*
 * ctl.c: the helpers behind ctl.h that belong to no command.
 */
#include "client/ctl.h"

#include <fcntl.h>
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

enum exit_code ctl_write_file(struct ctl *c, const char *path, const struct buf *data)
{
	_cleanup_(closep) int fd = -1;
	struct terminal file;

	if (!path || streq(path, "-")) {
		terminal_write(&c->out, data->data, data->len);
		return EXIT_OK;
	}
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd < 0) {
		terminal_printf(&c->err, PROGRAM ": %s: %m\n", path);
		return EXIT_ERROR;
	}
	terminal_init(&file, fd, true);
	terminal_write(&file, data->data, data->len);
	if (close(TAKE_FD(fd)) < 0 && file.error == 0)
		file.error = -errno;
	if (file.error == 0)
		return EXIT_OK;
	terminal_printf(&c->err, PROGRAM ": %s: %s\n", path, strerror(-file.error));
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

/* "NAME (8.6, CUDA 12.2, machine code)" */
static int put_gpu(struct buf *out, const struct resident_gpu *gpu)
{
	const char *code = gpu->code ? gpu->code : "unknown code";

	if (gpu->emulator)
		return buf_printf(out, "%s (an emulator: for tests, its speed means nothing)",
				  gpu->name ? gpu->name : "GPU");
	if (streq(code, "binary"))
		code = "machine code";
	else if (streq(code, "ptx"))
		code = "PTX, compiled by the driver";
	return buf_printf(out, "%s (%s, CUDA %s, %s)", gpu->name ? gpu->name : "GPU",
			  gpu->capability ? gpu->capability : "?", gpu->driver ? gpu->driver : "?",
			  code);
}

int ctl_gpu_text(struct buf *out, const struct resident_gpu *gpu)
{
	const char *why = gpu->why && *gpu->why ? gpu->why : "no reason given";
	char text[32];
	int r = 0;

	if (streq(gpu->state, "none") && gpu->name)
		return buf_printf(out, "none: %s is not used: %s", gpu->name, why);
	if (streq(gpu->state, "none"))
		return gpu->why && *gpu->why ? buf_printf(out, "none: %s", why)
					     : buf_printf(out, "not used");
	if (!streq(gpu->state, "active"))
		r = buf_printf(out, "%s for %s: %s; the CPU computes until it is back: ", gpu->state,
			       ctl_span_text(gpu->state_s, text), why);
	if (r == 0)
		r = put_gpu(out, gpu);
	if (r == 0 && gpu->lost > 0)
		r = buf_printf(out, ", lost %llu times", (unsigned long long)gpu->lost);
	if (r == 0)
		r = buf_printf(out, ", %s", ctl_bytes_text(gpu->total_bytes, text));
	return r;
}
