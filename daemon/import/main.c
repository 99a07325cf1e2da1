/* SPDX-License-Identifier: MIT */
/*
 * residentd-import: does one thing to the models directory for whoever is at the other end of its
 * standard input, and ends.
 *
 * Started by systemd for each connection (residentd-import.socket), as the service's user and with
 * no way to the files of users: a model comes as a descriptor, never as a path. Anybody may
 * connect; root and the members of the group residentd may ask for something. Says on standard
 * error what was done for whom; the rest it says to the client.
 */
#include "daemon/import/library.h"
#include "daemon/import/message.h"
#include "daemon/import/staging.h"

#include <fcntl.h>
#include <getopt.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>

#define PROGRAM          "residentd-import"
#define GROUP            "residentd"
#define REQUEST_WAIT_MS  5000
#define REFUSED_WAIT_MS  200
#define PROGRESS_EACH_US 100000
#define LOG_NOTICE_      "<5>" /* as sd-daemon(3) */
#define LOG_WARNING_     "<4>"

static volatile sig_atomic_t ended;

struct service {
	int sock;
	const char *directory;
	uid_t uid; /* of the client */
	uint64_t progress_us;
};

static void end(int sig)
{
	(void)sig;
	ended = 1;
}

/* ---- who asks ---- */

static int in_group(int sock, gid_t primary, gid_t wanted)
{
	_cleanup_(freep) gid_t *groups = NULL;
	socklen_t len = 0;

	if (primary == wanted)
		return 1;
	if (getsockopt(sock, SOL_SOCKET, SO_PEERGROUPS, NULL, &len) == 0)
		return 0;
	if (errno != ERANGE)
		return -errno;
	groups = malloc(len);
	if (!groups)
		return -ENOMEM;
	if (getsockopt(sock, SOL_SOCKET, SO_PEERGROUPS, groups, &len) < 0)
		return -errno;
	for (size_t i = 0; i < len / sizeof(*groups); i++)
		if (groups[i] == wanted)
			return 1;
	return 0;
}

/*
 * private: not the system's; its own user may ask too. In the system's that user is the service,
 * which reads models and must not be able to change them, whatever it was talked into.
 */
static int authorize(struct service *s, bool private, char **ret_error)
{
	struct ucred peer;
	socklen_t len = sizeof(peer);
	const struct group *g;
	int r = 0;

	if (getsockopt(s->sock, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0)
		return fail(ret_error, -EACCES, "cannot know who asks: %m");
	s->uid = peer.uid;
	if (peer.uid == 0 || (private && peer.uid == geteuid()))
		return 0;
	g = peer.uid == geteuid() ? NULL : getgrnam(GROUP);
	if (g)
		r = in_group(s->sock, peer.gid, g->gr_gid);
	if (r > 0)
		return 0;
	return fail(ret_error, -EACCES,
		    "only root and members of the group " GROUP " may change models; try it with sudo");
}

/* ---- talking to the client ---- */

static bool gone(void *userdata)
{
	const struct service *s = userdata;
	struct pollfd p = { .fd = s->sock };

	return ended || poll(&p, 1, 0) > 0;
}

/* A client that does not read misses progress; what it must not miss is waited for. */
static void send_event(void *userdata, const struct import_event *e)
{
	struct service *s = userdata;
	bool progress = e->kind == IMPORT_COPY || e->kind == IMPORT_HASH;
	json_auto_t *o = NULL;

	if (progress && e->done < e->total && now_us() - s->progress_us < PROGRESS_EACH_US)
		return;
	if (progress)
		s->progress_us = now_us();
	o = message_pack_event(e);
	(void)message_send(s->sock, o, NULL, progress ? MSG_DONTWAIT : 0);
}

static int receive(struct service *s, int wait_ms, json_t **ret, struct message_files *files,
		   char **ret_error)
{
	struct pollfd p = { .fd = s->sock, .events = POLLIN };
	int n = poll(&p, 1, wait_ms);

	if (n < 0)
		return -errno;
	if (n == 0)
		return fail(ret_error, -ETIMEDOUT, "no request came");
	return message_recv(s->sock, ret, files, ret_error);
}

/* ---- what is asked for ---- */

static int add(struct service *s, const struct message_request *q,
	       const struct message_files *files, struct import_result *ret, char **ret_error)
{
	struct import_part parts[IMPORT_PARTS_MAX];
	struct import_job j = { .directory = s->directory,
				.parts = parts,
				.n_parts = q->n_files,
				.name = q->name,
				.make_default = q->make_default,
				.event = send_event,
				.cancelled = gone,
				.userdata = s };

	if (q->n_files != files->n)
		return fail(ret_error, -EINVAL, "%zu files are named and %zu were passed",
			    q->n_files, files->n);
	for (size_t i = 0; i < files->n; i++)
		parts[i] = (struct import_part){ .fd = files->fd[i], .name = q->files[i] };
	return import_add(&j, ret, ret_error);
}

static int perform(struct service *s, const struct message_request *q,
		   const struct message_files *files, struct import_result *ret, char **ret_error)
{
	switch (q->command) {
	case MESSAGE_ADD: return add(s, q, files, ret, ret_error);
	case MESSAGE_REMOVE: return import_remove(s->directory, q->name, q->force, ret, ret_error);
	case MESSAGE_DEFAULT: return import_set_default(s->directory, q->name, ret, ret_error);
	case MESSAGE_COMMAND_MAX: break;
	}
	return -EINVAL;
}

static const char *word(const struct message_request *q, const struct import_result *r)
{
	switch (q->command) {
	case MESSAGE_ADD: return r->existed ? "has already" : "added";
	case MESSAGE_REMOVE: return "removed";
	case MESSAGE_DEFAULT:
	case MESSAGE_COMMAND_MAX: break;
	}
	return "made the default:";
}

static int serve(struct service *s, bool private, struct import_result *ret, char **ret_error)
{
	_cleanup_(message_files_done) struct message_files files = {};
	json_auto_t *o = NULL;
	struct message_request q;
	int denied = authorize(s, private, ret_error), r;

	/*
	 * Read also when it is denied: the kernel would tell the client of what was left unread,
	 * and not our answer.
	 */
	r = receive(s, denied < 0 ? REFUSED_WAIT_MS : REQUEST_WAIT_MS, &o, &files,
		    denied < 0 ? NULL : ret_error);
	if (denied < 0)
		return denied;
	if (r == 0)
		r = message_read_request(o, &q, ret_error);
	if (r == 0)
		r = perform(s, &q, &files, ret, ret_error);
	if (r == 0)
		fprintf(stderr, LOG_NOTICE_ PROGRAM ": uid %u: %s %s\n", (unsigned)s->uid,
			word(&q, ret), ret->file);
	return r;
}

/* ---- argv ---- */

static int sweep(const char *directory)
{
	_cleanup_(closep) int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd >= 0)
		staging_sweep(fd);
	return EXIT_SUCCESS;
}

static int run(struct service *s, bool private)
{
	struct sigaction on_end = { .sa_handler = end }, ignore = { .sa_handler = SIG_IGN };
	struct timeval wait = { .tv_sec = REQUEST_WAIT_MS / 1000 };
	_cleanup_(freep) char *error = NULL;
	struct import_result result = {};
	json_auto_t *o = NULL;
	int r;

	sigaction(SIGTERM, &on_end, NULL);
	sigaction(SIGINT, &on_end, NULL);
	sigaction(SIGPIPE, &ignore, NULL);
	(void)setsockopt(s->sock, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
	r = serve(s, private, &result, &error);
	if (r < 0 && r != -EPIPE)
		fprintf(stderr, LOG_WARNING_ PROGRAM ": uid %u: %s\n", (unsigned)s->uid,
			error ? error : strerror(-r));
	o = r < 0 ? message_pack_error(r, error) : message_pack_result(&result);
	(void)message_send(s->sock, o, NULL, 0);
	import_result_done(&result);
	/* A refusal is an answer, not a failure of this program. */
	return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
	enum { OPT_PRIVATE = 256, OPT_SWEEP };
	static const struct option options[] = {
		{ "private", no_argument, NULL, OPT_PRIVATE },
		{ "sweep", no_argument, NULL, OPT_SWEEP },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{},
	};
	const char *directory = getenv("RESIDENTD_MODELS");
	struct service s = { .sock = STDIN_FILENO, .directory = CATALOG_DIRECTORY };
	bool private = false;
	struct stat st;
	int option;

	if (directory && *directory)
		s.directory = directory;
	while ((option = getopt_long(argc, argv, "hV", options, NULL)) >= 0) {
		switch (option) {
		case OPT_PRIVATE:
			private
			= true;
			break;
		case OPT_SWEEP: return sweep(s.directory);
		case 'h':
			puts("usage: " PROGRAM " [--private | --sweep]\n"
			     "Serves one request on standard input, a socket; started by residentd-import.socket.\n"
			     "  --private  its own user may ask, too\n"
			     "  --sweep    remove what interrupted imports have left, and end");
			return EXIT_SUCCESS;
		case 'V': puts(PROGRAM " " RESIDENTD_VERSION); return EXIT_SUCCESS;
		default: return 2;
		}
	}
	if (fstat(s.sock, &st) < 0 || !S_ISSOCK(st.st_mode)) {
		fprintf(stderr, PROGRAM ": standard input is no socket\n");
		return EXIT_FAILURE;
	}
	umask(022);
	return run(&s, private);
}
