/* SPDX-License-Identifier: MIT */
/*
 * ctl-residency.c: `residentctl residency` as text, JSON or a picture, and `residentctl trace record`.
 *
 * Main thread. Owns the file that is written and, for a recording, the connection: libresident has
 * no stream of frames but a request's, so the frames are read here from its socket, on which nothing
 * else is under way. Refuses to know what is routed where and why. Invariants: what is not one line is
 * refused, so a recording is lines as they came; no file is left behind, and none loses what it held,
 * when there was nothing to record.
 */
#include "client/ctl-residency-view.h"

#include "client/ctl.h"
#include "daemon/errors.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#define INTERFACE  "org.residentd.Inference."
#define FRAME_MAX  (4u << 20)
#define READ_CHUNK (64u << 10)
#define E_BASE     10000 /* enum resident_error_code is this and the number of the wire */

/* ---- residency ---- */

/* What the service said no to, and who may ask. */
static enum exit_code not_allowed(struct ctl *c, const char *what)
{
	terminal_printf(&c->err,
			PROGRAM ": %s says something about what is asked and answered, so not everybody may "
				"see it: ask as root or the service's user\n",
			what);
	return EXIT_ERROR;
}

static void label(struct ctl *c, const char *name)
{
	terminal_printf(&c->out, "%10s  ", name);
}

static void print_what(struct ctl *c, const struct residency_view *v)
{
	label(c, "model");
	terminal_printf(&c->out, "%s\n", v->model ? v->model : "none");
	label(c, "tier");
	terminal_printf(&c->out, "%s%s%s\n", v->tier, *v->tier_reason ? ": " : "", v->tier_reason);
	if (!v->model)
		return;
	if (v->method) {
		label(c, "blocks");
		terminal_printf(&c->out, "read by %s\n", v->method);
	}
	label(c, "feed");
	terminal_printf(&c->out, "%s%s%s\n", v->feed, v->feed_reason ? ": " : "",
			v->feed_reason ? v->feed_reason : "");
	if (residency_view_managed(v)) {
		label(c, "policy");
		terminal_printf(&c->out, "%s\n", v->policy);
	}
}

static void print_budget(struct ctl *c, const struct residency_view *v)
{
	char a[32], b[32], d[32], e[32], f[32];

	label(c, "memory");
	if (residency_view_managed(v))
		terminal_printf(&c->out, "blocks %s of %s in memory; ",
				ctl_bytes_text(v->budget.blocks, a),
				ctl_bytes_text(v->budget.blocks_all, b));
	terminal_printf(&c->out, "budget %s: trunk %s, fixed %s, conversations %s, blocks %s\n",
			ctl_bytes_text(v->budget.max, a), ctl_bytes_text(v->budget.trunk, b),
			ctl_bytes_text(v->budget.fixed, d), ctl_bytes_text(v->budget.kv, e),
			ctl_bytes_text(v->budget.blocks, f));
	label(c, "");
	terminal_printf(&c->out, "%s at load; at least %s; %s left to others; %s of the trunk locked\n",
			ctl_bytes_text(v->budget.configured, a), ctl_bytes_text(v->budget.floor, b),
			ctl_bytes_text(v->budget.reserve, d),
			ctl_bytes_text(v->budget.trunk_locked, e));
}

static void print_vram(struct ctl *c, const struct residency_view *v)
{
	char a[32], b[32], d[32], e[32], f[32];

	label(c, "VRAM");
	terminal_printf(
		&c->out, "%llu blocks, %s, in slots of %s; budget %s: fixed %s, of that trunk %s\n",
		(unsigned long long)v->vram.n_blocks, ctl_bytes_text(v->vram.block_bytes, a),
		ctl_bytes_text(v->vram.slot_bytes, b), ctl_bytes_text(v->vram.budget_bytes, d),
		ctl_bytes_text(v->vram.fixed_bytes, e), ctl_bytes_text(v->vram.trunk_bytes, f));
	label(c, "");
	terminal_printf(&c->out, "%s left to others, %s free; %s of blocks are in memory too\n",
			ctl_bytes_text(v->vram.reserve_bytes, a), ctl_bytes_text(v->vram.free_bytes, b),
			ctl_bytes_text(v->vram.overlap_bytes, d));
	label(c, "moves");
	terminal_printf(&c->out,
			"%llu blocks promoted, %llu demoted (%llu copied back), %llu copied for one use",
			(unsigned long long)v->vram.promoted, (unsigned long long)v->vram.demoted,
			(unsigned long long)v->vram.copied_back, (unsigned long long)v->vram.staged);
	terminal_printf(&c->out, "; %s copied", ctl_bytes_text(v->vram.bytes_copied, a));
	if (v->vram.copy_us > 0)
		terminal_printf(&c->out, ", %s/s",
				ctl_bytes_text((uint64_t)((double)v->vram.bytes_copied * 1e6 /
							  (double)v->vram.copy_us),
					       a));
	terminal_printf(&c->out, "; %llu chunks given back\n",
			(unsigned long long)v->vram.chunks_given_back);
	label(c, "experts");
	terminal_printf(&c->out,
			"%llu times found in VRAM, %llu times computed by the CPU; %llu steps as one graph\n",
			(unsigned long long)v->vram.hits, (unsigned long long)v->vram.on_cpu,
			(unsigned long long)v->vram.graph_steps);
}

static void print_reads(struct ctl *c, const struct residency_view *v)
{
	double amplification = residency_view_amplification(v);
	char bytes[32], rate[32];

	label(c, "disk");
	terminal_printf(&c->out, "%llu blocks, %s", (unsigned long long)v->counters.blocks_read,
			ctl_bytes_text(v->counters.bytes_read, bytes));
	if (v->counters.read_us > 0)
		terminal_printf(&c->out, ", %s/s",
				ctl_bytes_text((uint64_t)((double)v->counters.bytes_read * 1e6 /
							  (double)v->counters.read_us),
					       rate));
	if (amplification >= 0)
		terminal_printf(&c->out, "; read amplification %.3f", amplification);
	terminal_printf(&c->out, "; %llu errors\n", (unsigned long long)v->counters.read_errors);
}

static void print_counters(struct ctl *c, const struct residency_view *v)
{
	uint64_t tokens = v->counters.decode_tokens;

	label(c, "hits");
	terminal_printf(&c->out, "%.1f %%: ",
			residency_view_percent(residency_view_hits(v), v->counters.misses));
	if (v->has_vram)
		terminal_printf(&c->out, "%llu in VRAM (%.1f %%), %llu in memory, %llu misses\n",
				(unsigned long long)v->vram_hits, residency_view_vram_percent(v),
				(unsigned long long)v->counters.hits,
				(unsigned long long)v->counters.misses);
	else
		terminal_printf(&c->out, "%llu hits, %llu misses\n",
				(unsigned long long)residency_view_hits(v),
				(unsigned long long)v->counters.misses);
	label(c, "stalls");
	if (tokens > 0)
		terminal_printf(&c->out, "%.1f us a token, of %llu tokens\n",
				(double)v->counters.stall_us / (double)tokens,
				(unsigned long long)tokens);
	else
		terminal_printf(&c->out, "no token has been written\n");
	print_reads(c, v);
	label(c, "prefetch");
	terminal_printf(&c->out, "%s: %llu blocks used, %llu wasted\n",
			v->counters.prefetching ? "on" : "off",
			(unsigned long long)v->counters.prefetch_used,
			(unsigned long long)v->counters.prefetch_wasted);
	label(c, "faults");
	terminal_printf(&c->out,
			"%llu major faults of compute threads; the kernel took %llu blocks; %llu times a "
			"block was twice in memory; %llu pages left behind%s\n",
			(unsigned long long)v->counters.compute_major_faults,
			(unsigned long long)v->counters.kernel_took,
			(unsigned long long)v->counters.doubled,
			(unsigned long long)v->counters.left_pages,
			streq(v->feed, "none") ? " (as far as can be seen: nobody tells)" : "");
}

static void print_pressure(struct ctl *c, const struct residency_view *v)
{
	char bytes[32];

	label(c, "pressure");
	terminal_printf(&c->out,
			"%.1f %% of the last 10 s; %s available; budget lowered %llu times, raised %llu "
			"times\n",
			v->pressure.some_avg10, ctl_bytes_text(v->pressure.available, bytes),
			(unsigned long long)v->pressure.steps_down,
			(unsigned long long)v->pressure.steps_up);
}

static void print_layer(struct ctl *c, const struct residency_view *v,
			const struct residency_view_layer *l)
{
	uint32_t there = MIN(l->n_host + l->n_vram, l->n_experts);
	char bytes[32];

	terminal_printf(&c->out, "%5u  %7u  %9s", l->layer, l->n_experts,
			ctl_bytes_text(l->block_bytes, bytes));
	if (v->has_vram)
		terminal_printf(&c->out, "  %6u", l->n_vram);
	terminal_printf(&c->out, "  %6u %5.1f %%  %6u", l->n_host,
			residency_view_percent(l->n_host, l->n_experts - l->n_host),
			l->n_experts - there);
	if (v->has_vram)
		terminal_printf(&c->out, "  %12llu", (unsigned long long)l->vram_hits);
	terminal_printf(&c->out, "  %12llu  %12llu  %5.1f\n", (unsigned long long)l->hits,
			(unsigned long long)l->misses,
			residency_view_percent(l->hits + l->vram_hits, l->misses));
}

static void print_layers(struct ctl *c, const struct residency_view *v)
{
	terminal_printf(&c->out, "\n%5s  %7s  %9s%s  %14s  %6s%s  %12s  %12s  %5s\n", "layer",
			"experts", "block", v->has_vram ? "    VRAM" : "", "in memory", "disk",
			v->has_vram ? "       in VRAM" : "", v->has_vram ? "in memory" : "hits",
			"misses", "hit %");
	for (size_t i = 0; i < v->n_layers; i++)
		print_layer(c, v, &v->layers[i]);
}

static void print_view(struct ctl *c, const struct residency_view *v)
{
	print_what(c, v);
	if (!v->model || streq(v->tier, "none"))
		return;
	print_budget(c, v);
	if (v->has_vram)
		print_vram(c, v);
	if (residency_view_managed(v))
		print_counters(c, v);
	print_pressure(c, v);
	if (residency_view_managed(v))
		print_layers(c, v);
	else
		terminal_printf(&c->out, "\nAll of the model has room, so the kernel keeps it in memory and "
					 "nothing is counted by layer.\n");
}

static enum exit_code draw_picture(struct ctl *c, const struct residency_view *v)
{
	_cleanup_(buf_done) struct buf svg = {};
	int r = ctl_svg_heat_map(&svg, v);

	if (r == -ENODATA) {
		terminal_printf(&c->err, PROGRAM ": there are no blocks to draw: tier %s%s%s\n",
				v->tier, *v->tier_reason ? ": " : "", v->tier_reason);
		return EXIT_ERROR;
	}
	if (r < 0)
		return ctl_usage_error(c, "out of memory");
	return ctl_write_file(c, c->svg, &svg);
}

enum exit_code ctl_residency(struct ctl *c)
{
	_cleanup_(residency_view_done) struct residency_view v = {};
	_cleanup_(freep) char *text = NULL;
	json_auto_t *reply = NULL;
	struct args a;
	int r;

	if (c->svg && c->json)
		return ctl_usage_error(c, "either --svg or --json");
	r = resident_call(c->r, "GetResidency", c->svg ? "{\"blocks\":true}" : NULL, &text);
	if (r == -RESIDENT_E_NOT_AUTHORIZED && c->svg)
		return not_allowed(c, "which experts are hot");
	if (r < 0)
		return report_error(&c->err, PROGRAM, resident_last_error(c->r));
	if (c->json) {
		terminal_printf(&c->out, "%s\n", text);
		return EXIT_OK;
	}
	reply = json_loads(text, 0, NULL);
	r = reply ? residency_view_read(&a, reply, &v) : -ENOMEM;
	if (r == -EBADMSG)
		return ctl_bad_reply(c, &a);
	if (r < 0)
		return ctl_usage_error(c, "out of memory");
	if (c->svg)
		return draw_picture(c, &v);
	print_view(c, &v);
	return EXIT_OK;
}

/* ---- trace record ---- */

/* Readable once a signal has come. A handler, so that a write to a reader that does not read is
 * interrupted, too. */
static int interrupt_fd = -1;

static void on_interrupt(int signo)
{
	int e = errno;

	(void)signo;
	eventfd_write(interrupt_fd, 1);
	errno = e;
}

struct recording {
	struct ctl *c;
	struct terminal file, *to; /* to: the file, or standard output */
	const char *path;          /* NULL: standard output */
	int fd;                    /* of the file, owned */
	bool created;              /* it was not there before */
	bool old; /* it holds what --force gives up, until there is something else */
	uint64_t lines, lines_max, written; /* written: of the lines */
	struct buf in, out;                 /* out: lines of one read */
	size_t scanned;
};

static bool parse_count(const char *text, uint64_t *ret)
{
	char *end;
	long long n;

	errno = 0;
	n = strtoll(text, &end, 10);
	if (errno != 0 || end == text || *end || n < 1)
		return false;
	*ret = (uint64_t)n;
	return true;
}

/* An error frame, as libresident reports those of calls. */
static enum exit_code refused(struct recording *r, const char *name, json_t *msg)
{
	const struct error_entry *e = error_by_varlink(name);
	const char *message =
		json_string_value(json_object_get(json_object_get(msg, "parameters"), "message"));
	struct resident_error error = {
		.code = -(E_BASE + (int)(e ? e->code : ERROR_NOT_SUPPORTED)),
		.message = message ? message
			   : e     ? e->text
				   : name,
	};

	if (error.code == -RESIDENT_E_NOT_AUTHORIZED)
		return not_allowed(r->c, "which experts a text uses");
	return report_error(&r->c->err, PROGRAM, &error);
}

/* A frame's line to r->out. *ret_last: no frame follows. */
static enum exit_code take_frame(struct recording *r, const char *data, size_t len, bool *ret_last)
{
	_cleanup_(freep) char *why = NULL;
	json_auto_t *msg = NULL;
	const char *line = NULL, *name;
	struct args a;

	if (varlink_parse(data, len, &msg, &why) < 0) {
		terminal_printf(&r->c->err, PROGRAM ": the service does not speak the protocol: %s\n",
				why ? why : "out of memory");
		return EXIT_ERROR;
	}
	name = json_string_value(json_object_get(msg, "error"));
	if (name)
		return refused(r, name, msg);
	args_begin(&a, json_object_get(msg, "parameters"));
	if (args_str(&a, "line", false, FRAME_MAX, &line, &len)) {
		len -= len > 0 && line[len - 1] == '\n';
		if (len == 0 || memchr(line, '\n', len))
			args_refuse(&a, "line", "is not one line");
	}
	if (a.bad)
		return ctl_bad_reply(r->c, &a);
	if (line) {
		if (buf_append(&r->out, line, len) < 0 || buf_append(&r->out, "\n", 1) < 0)
			return ctl_usage_error(r->c, "out of memory");
		r->lines++;
	}
	*ret_last = !json_is_true(json_object_get(msg, "continues")) || r->lines == r->lines_max;
	return EXIT_OK;
}

/* All frames that have arrived whole. */
static enum exit_code take_frames(struct recording *r, bool *ret_last)
{
	enum exit_code e = EXIT_OK;
	size_t len, used = 0;
	int n = 0;

	while (e == EXIT_OK && !*ret_last) {
		n = varlink_frame(r->in.data + used, r->in.len - used, FRAME_MAX, &r->scanned, &len);
		if (n <= 0)
			break;
		e = take_frame(r, r->in.data + used, len, ret_last);
		used += len + 1;
		r->scanned = 0;
	}
	buf_consume(&r->in, used);
	if (n >= 0)
		return e;
	terminal_printf(&r->c->err, PROGRAM ": the service sends a frame that is too long\n");
	return EXIT_ERROR;
}

/* What take_frames() left in r->out goes to the file. */
static enum exit_code write_lines(struct recording *r)
{
	char text[64];
	int n = 0;

	if (r->out.len == 0)
		return EXIT_OK;
	if (r->old && ftruncate(r->fd, 0) < 0 && errno != EINVAL) /* EINVAL: a pipe, a device */
		n = -errno;
	r->old = false;
	if (n == 0)
		n = terminal_write(r->to, r->out.data, r->out.len);
	r->out.len = 0;
	if (n == -EINTR)
		return EXIT_OK;
	if (n < 0 && r->path)
		terminal_printf(&r->c->err, PROGRAM ": %s: %s\n", r->path, resident_strerror(n));
	if (n < 0) /* of standard output: report_output() finds the words */
		return r->path ? EXIT_ERROR : EXIT_OK;
	r->written = r->lines;
	if (r->path) {
		snprintf(text, sizeof(text), "lines recorded: %llu; Ctrl-C ends",
			 (unsigned long long)r->lines);
		terminal_progress(&r->c->err, text);
	}
	return EXIT_OK;
}

static enum exit_code read_frames(struct recording *r, bool *ret_last)
{
	enum exit_code e, written;
	ssize_t n;

	if (buf_reserve(&r->in, READ_CHUNK) < 0)
		return ctl_usage_error(r->c, "out of memory");
	n = recv(resident_fd(r->c->r), r->in.data + r->in.len, READ_CHUNK, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return EXIT_OK;
	if (n <= 0) {
		terminal_progress_erase(&r->c->err);
		terminal_printf(&r->c->err, PROGRAM ": the service has ended the connection%s%s\n",
				n < 0 ? ": " : "", n < 0 ? strerror(errno) : "");
		return EXIT_NO_SERVICE;
	}
	r->in.len += (size_t)n;
	e = take_frames(r, ret_last);
	written = write_lines(r);
	return e == EXIT_OK ? written : e;
}

/* Until the last frame, a signal, or an error. */
static enum exit_code record(struct recording *r)
{
	struct pollfd fds[] = { { .fd = resident_fd(r->c->r), .events = POLLIN },
				{ .fd = interrupt_fd, .events = POLLIN } };
	enum exit_code e = EXIT_OK;
	bool last = false;

	while (e == EXIT_OK && !last && r->to->error == 0) {
		if (poll(fds, ARRAY_SIZE(fds), -1) < 0) {
			if (errno == EINTR)
				continue;
			terminal_printf(&r->c->err, PROGRAM ": poll: %m\n");
			return EXIT_ERROR;
		}
		if (fds[1].revents)
			break;
		e = read_frames(r, &last);
	}
	return e;
}

static enum exit_code send_call(struct recording *r)
{
	json_auto_t *p = json_object();
	struct buf call = {};
	int n = 0;

	if (!p ||
	    (r->lines_max != UINT64_MAX &&
	     json_object_set_new(p, "tokens", json_integer((json_int_t)r->lines_max)) < 0) ||
	    varlink_put_call(&call, INTERFACE "TraceRouting", p, true, false) < 0) {
		buf_done(&call);
		return ctl_usage_error(r->c, "out of memory");
	}
	/* The first that is sent, and short: it goes as a whole or not at all. */
	if (send(resident_fd(r->c->r), call.data, call.len, MSG_NOSIGNAL) < 0)
		n = -errno;
	buf_done(&call);
	return n < 0 ? report_no_service(&r->c->err, PROGRAM, n) : EXIT_OK;
}

static enum exit_code open_output(struct recording *r)
{
	/* Routing says something about the text, so it is the caller's alone. */
	r->fd = open(r->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	r->created = r->fd >= 0;
	if (r->fd < 0 && errno == EEXIST && r->c->force) {
		r->fd = open(r->path, O_WRONLY | O_CLOEXEC);
		r->old = true;
	}
	if (r->fd < 0) {
		terminal_printf(&r->c->err, PROGRAM ": %s: %m%s\n", r->path,
				errno == EEXIST ? "; --force overwrites it" : "");
		return EXIT_ERROR;
	}
	terminal_init(&r->file, r->fd, true);
	r->to = &r->file;
	return EXIT_OK;
}

/* Says what there is, and leaves no empty file. */
static enum exit_code end_recording(struct recording *r, enum exit_code e)
{
	if (r->fd >= 0 && close(r->fd) < 0 && e == EXIT_OK) {
		terminal_printf(&r->c->err, PROGRAM ": %s: %m\n", r->path);
		e = EXIT_ERROR;
	}
	if (r->created && r->written == 0)
		unlink(r->path);
	terminal_progress_erase(&r->c->err);
	if (e == EXIT_OK || r->written > 0)
		terminal_printf(&r->c->err, PROGRAM ": lines recorded: %llu\n",
				(unsigned long long)r->written);
	buf_done(&r->in);
	buf_done(&r->out);
	return e;
}

enum exit_code ctl_trace_record(struct ctl *c)
{
	struct recording r = { .c = c, .to = &c->out, .fd = -1, .lines_max = UINT64_MAX };
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
	struct sigaction on = { .sa_handler = on_interrupt }, before[ARRAY_SIZE(signals)];
	enum exit_code e = EXIT_OK;

	if (c->tokens && !parse_count(c->tokens, &r.lines_max))
		return ctl_usage_error(c, "--tokens is a number from 1");
	if (c->output && !streq(c->output, "-"))
		r.path = c->output;
	interrupt_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (interrupt_fd < 0) {
		terminal_printf(&c->err, PROGRAM ": eventfd: %m\n");
		return EXIT_ERROR;
	}
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		sigaction(signals[i], &on, &before[i]);
	if (r.path)
		e = open_output(&r);
	if (e == EXIT_OK)
		e = send_call(&r);
	if (e == EXIT_OK)
		e = record(&r);
	e = end_recording(&r, e);
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		sigaction(signals[i], &before[i], NULL);
	close(TAKE_FD(interrupt_fd));
	return e;
}
