/* SPDX-License-Identifier: MIT */
/*
 * main.c: options, the listening socket, signals, the event loop; start and end of the process. See daemon.h for the map.
 *
 * Invariant: the socket file exists only while this process answers on it; one handed over by systemd is left alone.
 */
#include "daemon/conn.h"

#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>

#ifndef RESIDENTD_VERSION
#define RESIDENTD_VERSION "unknown"
#endif
#define DEFAULT_SOCKET "/run/residentd/resident.sock"

static void usage(FILE *f)
{
	fputs("residentd [OPTIONS]\n"
	      "The machine's shared language model, as a service on a Unix socket.\n"
	      "\n"
	      "  --model FILE     GGUF model (default: Path= in residentd.conf, else the models directory's default.gguf)\n"
	      "  --socket PATH    where to listen (default: " DEFAULT_SOCKET
	      "; ignored under socket activation)\n"
	      "  --config FILE    configuration instead of /etc/residentd/residentd.conf and its drop-ins\n"
	      "  --threads N      compute threads (default: the physical cores)\n"
	      "  --context N      tokens a session can hold (default: the model's, at most 32768)\n"
	      "  --vram SIZE      GPU memory to use in all, auto (default: VramBudget=, else what is free) or off\n"
	      "  --version, --help\n"
	      "\n"
	      "Signals: TERM, INT end it (running answers get up to 5 s), HUP reloads. See residentd(8).\n",
	      f);
}

static int bad_option(const char *option, const char *value, const char *why)
{
	fprintf(stderr, "residentd: --%s %s: %s\n", option, value, why);
	return -EINVAL;
}

/* 0: go on; 1: done (help, version); -EINVAL: told. */
static int parse_options(int argc, char **argv, struct options *o)
{
	enum {
		OPT_MODEL = 256,
		OPT_SOCKET,
		OPT_CONFIG,
		OPT_THREADS,
		OPT_CONTEXT,
		OPT_VRAM,
		OPT_VERSION,
		OPT_HELP
	};
	static const struct option options[] = {
		{ "model", required_argument, NULL, OPT_MODEL },
		{ "socket", required_argument, NULL, OPT_SOCKET },
		{ "config", required_argument, NULL, OPT_CONFIG },
		{ "threads", required_argument, NULL, OPT_THREADS },
		{ "context", required_argument, NULL, OPT_CONTEXT },
		{ "vram", required_argument, NULL, OPT_VRAM },
		{ "version", no_argument, NULL, OPT_VERSION },
		{ "help", no_argument, NULL, OPT_HELP },
		{ NULL, 0, NULL, 0 },
	};
	uint64_t n;
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
		switch (c) {
		case OPT_MODEL: o->model = optarg; break;
		case OPT_SOCKET: o->socket = optarg; break;
		case OPT_CONFIG: o->config = optarg; break;
		case OPT_THREADS:
			if (parse_u64(optarg, 1, 256, &n) < 0)
				return bad_option("threads", optarg, "a number from 1 to 256");
			o->threads = (uint32_t)n;
			break;
		case OPT_CONTEXT:
			if (parse_u64(optarg, 16, 1U << 24, &n) < 0)
				return bad_option("context", optarg, "a number from 16 to 16777216");
			o->context = (uint32_t)n;
			break;
		case OPT_VRAM:
			if (parse_vram(optarg, &o->vram_bytes) < 0)
				return bad_option("vram", optarg, "a size (512M, 6G), auto or off");
			o->has_vram = true;
			break;
		case OPT_VERSION: puts("residentd " RESIDENTD_VERSION); return 1;
		case OPT_HELP: usage(stdout); return 1;
		default: fputs("Try `residentd --help`.\n", stderr); return -EINVAL;
		}
	}
	if (optind < argc) {
		fprintf(stderr, "residentd: %s: no arguments are expected\n", argv[optind]);
		return -EINVAL;
	}
	return 0;
}

/* A socket file left by a dead process is removed, a living one's is not. */
static int clear_socket(const struct sockaddr_un *addr)
{
	_cleanup_(closep) int fd = -1;
	struct stat st;

	if (lstat(addr->sun_path, &st) < 0)
		return errno == ENOENT ? 0 : -errno;
	if (!S_ISSOCK(st.st_mode))
		return -EEXIST;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) == 0 || errno == EAGAIN)
		return -EADDRINUSE;
	if (errno != ECONNREFUSED)
		return -errno;
	return unlink(addr->sun_path) < 0 ? -errno : 0;
}

static int make_socket(struct daemon *d, const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	_cleanup_(closep) int fd = -1;
	struct stat st;
	int r;

	if (strlen(path) >= sizeof(addr.sun_path)) {
		log_error("%s: the path is too long for a socket (%zu bytes at most)", path,
			  sizeof(addr.sun_path) - 1);
		return -ENAMETOOLONG;
	}
	strcpy(addr.sun_path, path);
	r = clear_socket(&addr);
	if (r < 0) {
		log_error("%s: %s", path,
			  r == -EADDRINUSE ? "another residentd answers on this socket"
			  : r == -EEXIST   ? "exists and is no socket"
					   : strerror(-r));
		return r;
	}
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || bind(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		r = -errno;
		log_error("cannot listen on %s: %s", path, strerror(-r));
		return r;
	}
	d->socket_path = strdup(path);
	/* Everybody may connect; policy decides who may ask. */
	if (!d->socket_path || chmod(path, 0666) < 0 || listen(fd, SOMAXCONN) < 0 ||
	    lstat(path, &st) < 0) {
		r = d->socket_path ? -errno : -ENOMEM;
		log_error("cannot listen on %s: %s", path, strerror(-r));
		return r;
	}
	d->socket_dev = st.st_dev;
	d->socket_ino = st.st_ino;
	d->listen_fd = TAKE_FD(fd);
	return 0;
}

/* Only our own: another residentd may have taken the place of a socket that somebody removed. */
static void remove_socket(const struct daemon *d)
{
	struct stat st;

	if (d->socket_path && lstat(d->socket_path, &st) == 0 && st.st_dev == d->socket_dev &&
	    st.st_ino == d->socket_ino)
		(void)unlink(d->socket_path);
}

/* What systemd hands over: the listening socket, and from its store the model that an earlier run had open. */
static int take_fds(struct daemon *d, char **names, int n)
{
	for (int i = 0; i < n; i++) {
		int fd = SD_LISTEN_FDS_START + i;

		if (streq(names[i], "model")) {
			closep(&d->stored_model_fd);
			d->stored_model_fd = fd;
		} else if (streq(names[i], "oomd")) {
			if (d->oomd_fd >= 0 || sd_is_socket_unix(fd, SOCK_STREAM, 1, NULL, 0) <= 0) {
				log_error("socket activation: one listening Unix stream socket named oomd is expected");
				return -EINVAL;
			}
			d->oomd_fd = fd;
		} else if (d->listen_fd < 0 && sd_is_socket_unix(fd, SOCK_STREAM, 1, NULL, 0) > 0) {
			d->listen_fd = fd;
		} else {
			log_error("socket activation: one listening Unix stream socket is expected");
			return -EINVAL;
		}
	}
	return 0;
}

/* Accepting goes on until there is nobody left: it must not wait then. */
static int dont_wait(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -errno : 0;
}

static int take_socket(struct daemon *d)
{
	char **names = NULL;
	int n = sd_listen_fds_with_names(1, &names), r;

	if (n < 0)
		return n;
	r = take_fds(d, names, n);
	for (int i = 0; i < n; i++)
		free(names[i]);
	free(names);
	if (r < 0)
		return r;
	if (d->listen_fd < 0)
		return make_socket(d, d->options.socket ? d->options.socket : DEFAULT_SOCKET);
	r = dont_wait(d->listen_fd);
	return r == 0 && d->oomd_fd >= 0 ? dont_wait(d->oomd_fd) : r;
}

static int on_signal(sd_event_source *source, const struct signalfd_siginfo *si, void *arg)
{
	(void)source;
	if (si->ssi_signo == SIGHUP)
		service_reload(arg);
	else
		service_stop(arg);
	return 0;
}

static int add_signals(struct daemon *d)
{
	static const int signals[] = { SIGTERM, SIGINT, SIGHUP };
	int r = 0;

	for (size_t i = 0; i < ARRAY_SIZE(signals) && r >= 0; i++)
		r = sd_event_add_signal(d->event, NULL, signals[i], on_signal, d);
	return r;
}

static void block_signals(void)
{
	sigset_t set;

	/* Before any thread exists: all of them inherit it, only the event loop reads signals. */
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	(void)sigprocmask(SIG_BLOCK, &set, NULL);
	(void)signal(SIGPIPE, SIG_IGN);
}

static int run(struct daemon *d)
{
	int r;

	config_defaults(&d->config);
	r = service_read_config(d);
	if (r < 0) {
		log_error("cannot read %s: %s",
			  d->options.config ? d->options.config : "the configuration", strerror(-r));
		return r;
	}
	block_signals();
	r = sd_event_new(&d->event);
	if (r >= 0)
		r = add_signals(d);
	if (r >= 0)
		r = sd_event_set_watchdog(d->event, true);
	if (r < 0) {
		log_error("cannot start the event loop: %s", strerror(-r));
		return r;
	}
	r = take_socket(d);
	if (r < 0)
		return r;
	r = service_start(d);
	if (r >= 0)
		r = conn_start_listening(d);
	if (r >= 0)
		r = sd_event_loop(d->event);
	if (r < 0)
		log_error("the service failed: %s", strerror(-r));
	return r;
}

int main(int argc, char **argv)
{
	struct daemon d = { .listen_fd = -1, .stored_model_fd = -1, .oomd_fd = -1, .started_us = now_us() };
	int r = parse_options(argc, argv, &d.options);

	if (r != 0)
		return r < 0 ? 2 : 0;
	/* A step on a GPU can be recorded only when every kernel is there: not the first time that it is used. Before threads. */
	(void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
	/* Hash seeds before threads: jansson makes them on first use. */
	json_object_seed(0);
	log_open("residentd", LOG_INFO);
	r = run(&d);
	remove_socket(&d);
	sd_event_source_disable_unref(d.listen_source);
	sd_event_source_disable_unref(d.accept_pause);
	sd_event_source_disable_unref(d.oomd_source);
	service_done(&d);
	sd_event_unref(d.event);
	closep(&d.listen_fd);
	closep(&d.stored_model_fd);
	closep(&d.oomd_fd);
	free(d.socket_path);
	return r < 0 ? 1 : 0;
}
