/* SPDX-License-Identifier: MIT */
/*
 * ctl-bus.c: the commands of residentctl that go over the system bus: leases, sessions, models,
 * reload.
 *
 * Owns the lease while it is held, and the command that runs meanwhile. Refuses to know who may do
 * what: the service asks polkit. Invariant: the lease's descriptor never reaches the command, so it
 * ends with this process, and the command with it.
 */
#include "client/ctl.h"
#include "daemon/config.h" /* parse_bytes() */

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define TIMEOUT_MS 300000 /* a person may be asked for a password */

enum exit_code ctl_bus_connect(struct ctl *c)
{
	int r = resident_control_connect(NULL, &c->bus);

	if (r < 0) {
		terminal_printf(&c->err, PROGRAM ": cannot reach the system bus: %s\n",
				resident_strerror(r));
		return EXIT_NO_SERVICE;
	}
	resident_control_set_timeout(c->bus, TIMEOUT_MS);
	resident_control_set_interactive(c->bus, true);
	return EXIT_OK;
}

enum exit_code ctl_bus_failed(struct ctl *c)
{
	const struct resident_error *e = resident_control_last_error(c->bus);

	switch (e->code) {
	case -ECONNREFUSED:
	case -ECONNRESET:
	case -ENOTCONN:
		terminal_printf(&c->err, PROGRAM ": cannot reach residentd on the system bus: %s\n",
				e->message);
		return EXIT_NO_SERVICE;
	}
	return report_error(&c->err, PROGRAM, e);
}

/* ---- leases ---- */

/* In the child: becomes the command. Its signals are as they were for this program. */
static _Noreturn void become(char **argv, pid_t parent, const struct sigaction *interrupt,
			     const struct sigaction *quit)
{
	int r;

	sigaction(SIGINT, interrupt, NULL);
	sigaction(SIGQUIT, quit, NULL);
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	if (getppid() != parent) /* gone before the line above */
		_exit(EXIT_ERROR);
	execvp(argv[0], argv);
	r = errno;
	fprintf(stderr, PROGRAM ": %s: %s\n", argv[0], strerror(r));
	_exit(r == ENOENT ? 127 : 126);
}

/* Waits until the process ends; says so when the lease ends before. */
static int wait_for(struct ctl *c, pid_t pid, int lease)
{
	_cleanup_(closep) int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	struct pollfd fds[] = { { .fd = pidfd, .events = POLLIN }, { .fd = lease, .events = POLLIN } };
	int status;

	while (pidfd >= 0 && fds[0].revents == 0) {
		if (poll(fds, ARRAY_SIZE(fds), -1) < 0 && errno != EINTR)
			break;
		if (fds[1].revents != 0) {
			terminal_printf(&c->err, PROGRAM ": residentd has ended, and the lease with it; "
							 "the command goes on\n");
			fds[1].fd = -1;
			fds[1].revents = 0;
		}
	}
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return EXIT_ERROR;
	return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static enum exit_code run_command(struct ctl *c, char **argv, int lease)
{
	struct sigaction ignore = { .sa_handler = SIG_IGN }, interrupt, quit;
	pid_t parent = getpid(), pid;

	/* Ctrl-C is for the command; this program then ends with it. */
	sigaction(SIGINT, &ignore, &interrupt);
	sigaction(SIGQUIT, &ignore, &quit);
	pid = fork();
	if (pid == 0)
		become(argv, parent, &interrupt, &quit);
	if (pid < 0) {
		terminal_printf(&c->err, PROGRAM ": %s: %m\n", argv[0]);
		return EXIT_ERROR;
	}
	return (enum exit_code)wait_for(c, pid, lease);
}

static enum exit_code keep_lease(struct ctl *c, int lease)
{
	struct pollfd fd = { .fd = lease, .events = POLLIN };

	c->bus = resident_control_close(c->bus); /* a lease does not need it */
	if (c->arguments[0])
		return run_command(c, c->arguments, lease);
	if (c->err.tty)
		terminal_printf(&c->err, PROGRAM ": held until Ctrl-C\n");
	while (poll(&fd, 1, -1) < 0)
		if (errno != EINTR)
			return EXIT_ERROR;
	terminal_printf(&c->err, PROGRAM ": residentd has ended, and the lease with it\n");
	return EXIT_NO_SERVICE;
}

enum exit_code ctl_bus_hold(struct ctl *c)
{
	_cleanup_(closep) int lease = -1;
	const char *why = c->why ? c->why : c->arguments[0] ? c->arguments[0] : "";
	enum exit_code e = ctl_bus_connect(c);

	if (e != EXIT_OK)
		return e;
	if (resident_control_hold(c->bus, c->who ? c->who : PROGRAM, why, &lease) < 0)
		return ctl_bus_failed(c);
	return keep_lease(c, lease);
}

enum exit_code ctl_bus_yield_gpu(struct ctl *c)
{
	_cleanup_(closep) int lease = -1;
	const char *why = c->why ? c->why : c->arguments[0] ? c->arguments[0] : "";
	uint64_t bytes = 0;
	enum exit_code e;

	if (c->bytes && parse_bytes(c->bytes, &bytes) < 0)
		return ctl_usage_error(c, "--bytes is a size: 4G, 512M");
	e = ctl_bus_connect(c);
	if (e != EXIT_OK)
		return e;
	if (resident_control_yield_gpu(c->bus, c->who ? c->who : PROGRAM, why, bytes, &lease) < 0)
		return ctl_bus_failed(c);
	return keep_lease(c, lease);
}

static uint64_t seconds_since(uint64_t since_us)
{
	uint64_t since_s = since_us / 1000000, now = (uint64_t)time(NULL);

	return now > since_s ? now - since_s : 0;
}

enum exit_code ctl_bus_holds(struct ctl *c)
{
	const struct resident_control_lease *list;
	json_t *array = NULL;
	char user[64], span[32];
	enum exit_code e = ctl_bus_connect(c);
	size_t n;

	if (e != EXIT_OK)
		return e;
	if (resident_control_list_holds(c->bus, &list, &n) < 0)
		return ctl_bus_failed(c);
	if (c->json)
		array = json_array();
	for (size_t i = 0; i < n; i++) {
		const struct resident_control_lease *l = &list[i];

		if (c->json)
			json_array_append_new(
				array,
				json_pack("{s:s, s:I, s:s, s:s, s:I, s:I}", "kind", l->kind, "uid",
					  (json_int_t)l->uid, "who", l->who, "why", l->why, "pid",
					  (json_int_t)l->pid, "since_us", (json_int_t)l->since_us));
		else
			terminal_printf(&c->out, "%-9s  %s, process %u, for %s: %s%s%s\n", l->kind,
					ctl_user_text(l->uid, user), l->pid,
					ctl_span_text(seconds_since(l->since_us), span), l->who,
					*l->why ? ", " : "", l->why);
	}
	if (c->json)
		return ctl_print_json(c, json_pack("{s:o}", "holds", array));
	if (n == 0)
		terminal_printf(&c->out, "nothing is held\n");
	return EXIT_OK;
}

/* ---- sessions, models, reload ---- */

enum exit_code ctl_bus_sessions(struct ctl *c)
{
	const struct resident_control_session *list;
	json_t *array = NULL;
	enum exit_code e = ctl_bus_connect(c);
	char user[64];
	size_t n;

	if (e != EXIT_OK)
		return e;
	if (resident_control_list_sessions(c->bus, &list, &n) < 0)
		return ctl_bus_failed(c);
	if (c->json)
		array = json_array();
	for (size_t i = 0; i < n; i++) {
		const struct resident_control_session *s = &list[i];

		if (c->json)
			json_array_append_new(array,
					      json_pack("{s:s, s:I, s:I, s:b}", "path", s->path,
							"uid", (json_int_t)s->uid, "tokens_used",
							(json_int_t)s->tokens_used, "busy", s->busy));
		else
			terminal_printf(&c->out, "%s  %s, %lld tokens%s\n", s->path,
					ctl_user_text(s->uid, user), (long long)s->tokens_used,
					s->busy ? ", answering" : "");
	}
	if (c->json)
		return ctl_print_json(c, json_pack("{s:o}", "sessions", array));
	if (n == 0)
		terminal_printf(&c->out, "no session is open\n");
	return EXIT_OK;
}

enum exit_code ctl_bus_reload(struct ctl *c)
{
	enum exit_code e = ctl_bus_connect(c);

	if (e != EXIT_OK)
		return e;
	return resident_control_reload(c->bus) < 0 ? ctl_bus_failed(c) : EXIT_OK;
}

enum exit_code ctl_bus_model_load(struct ctl *c)
{
	enum exit_code e = ctl_bus_connect(c);

	if (e != EXIT_OK)
		return e;
	resident_control_set_timeout(c->bus, 0); /* running requests end first, then 20 GB are read */
	return resident_control_load_model(c->bus, c->arguments[0], c->make_default) < 0
		       ? ctl_bus_failed(c)
		       : EXIT_OK;
}

enum exit_code ctl_bus_model_unload(struct ctl *c)
{
	enum exit_code e = ctl_bus_connect(c);

	if (e != EXIT_OK)
		return e;
	resident_control_set_timeout(c->bus, 0);
	return resident_control_unload_model(c->bus) < 0 ? ctl_bus_failed(c) : EXIT_OK;
}
