/* SPDX-License-Identifier: MIT */
/*
 * install.c: `residentctl model`. See install.h.
 *
 * Changes go to the system's import service, which gets a model as an open file; for a directory of
 * one's own (RESIDENTD_MODELS), and where there is no such service, the same code (daemon/import)
 * runs right here. What is there everybody may read, so list and show look for themselves, and ask
 * residentd only what it has loaded. Invariant: what this process may not open, nobody opens for
 * it.
 */
#include "client/install.h"

#include "client/ctl-model-show.h"
#include "client/utf8.h"
#include "daemon/import/describe.h"
#include "daemon/import/library.h"
#include "daemon/import/message.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static volatile sig_atomic_t interrupted;

static const char *environment(const char *name)
{
	const char *s = getenv(name);

	return s && *s ? s : NULL;
}

static const char *directory(void)
{
	const char *path = environment("RESIDENTD_MODELS");

	return path ? path : CATALOG_DIRECTORY;
}

static enum exit_code failed(struct ctl *c, int r, const char *error)
{
	terminal_progress_erase(&c->err);
	if (interrupted)
		error = "interrupted; nothing was left behind";
	terminal_printf(&c->err, PROGRAM ": %s\n", error ? error : strerror(-r));
	if ((r == -EACCES || r == -EPERM || r == -EROFS) && !(error && strstr(error, "sudo")))
		terminal_printf(&c->err, PROGRAM ": only an administrator may change %s (sudo?)\n",
				directory());
	return EXIT_ERROR;
}

/* ---- the import service ---- */

/* A descriptor; -ENOENT: there is none, do it here. */
static int connect_import(char **ret_error)
{
	const char *given = environment("RESIDENTD_IMPORT"), *path = given ? given : MESSAGE_SOCKET;
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	_cleanup_(closep) int fd = -1;

	if (!given && environment("RESIDENTD_MODELS"))
		return -ENOENT;
	if (strlen(path) >= sizeof(a.sun_path))
		return fail(ret_error, -ENAMETOOLONG, "%s: %s", path, strerror(ENAMETOOLONG));
	memcpy(a.sun_path, path, strlen(path));
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return fail(ret_error, -errno, "cannot make a socket: %m");
	if (connect(fd, (const struct sockaddr *)&a, sizeof(a)) == 0)
		return TAKE_FD(fd);
	if (!given && (errno == ENOENT || errno == ECONNREFUSED))
		return -ENOENT;
	return fail(ret_error, -ECONNREFUSED, "%s: %m", path);
}

static void show_event(void *userdata, const struct import_event *e)
{
	struct ctl *c = userdata;
	char line[128], a[32], b[32];

	switch (e->kind) {
	case IMPORT_CHECK: terminal_progress(&c->err, "checking the file"); break;
	case IMPORT_SPACE:
		if (c->err.tty && e->needed == 0)
			terminal_printf(&c->err, "needs no space: the file system shares the blocks\n");
		else if (c->err.tty)
			terminal_printf(&c->err, "needs %s, %s are available\n",
					ctl_bytes_text(e->needed, a), ctl_bytes_text(e->available, b));
		break;
	case IMPORT_COPY:
	case IMPORT_HASH:
		snprintf(line, sizeof(line), "%s: %s of %s",
			 e->kind == IMPORT_COPY ? "copying" : "reading", ctl_bytes_text(e->done, a),
			 ctl_bytes_text(e->total, b));
		terminal_progress(&c->err, line);
		break;
	case IMPORT_SYNC: terminal_progress(&c->err, "waiting for the disk"); break;
	case IMPORT_WARNING: terminal_printf(&c->err, PROGRAM ": warning: %s\n", e->text); break;
	case IMPORT_EVENT_MAX: break;
	}
}

/* Sends the request, shows what happens, reads the reply. */
static int ask(struct ctl *c, int sock, const struct message_request *q,
	       const struct message_files *files, struct import_result *ret, char **ret_error)
{
	json_auto_t *request = message_pack_request(q);
	int r;

	if (!request)
		return fail(ret_error, -EILSEQ, "a name is not valid UTF-8: rename the file");
	r = message_send(sock, request, files, 0);
	/* Turned away before it was read; there may be an answer that says why. */
	if (r < 0 && r != -EPIPE)
		return fail(ret_error, r, "cannot ask the import service: %s", strerror(-r));
	for (;;) {
		json_auto_t *o = NULL;
		struct import_event e;

		r = message_recv(sock, &o, NULL, ret_error);
		if (r == -EINTR)
			continue;
		if (r == -EPIPE || r == -ECONNRESET)
			return fail(ret_error, r,
				    "the import service ended without an answer: too many at once, or "
				    "its log says why");
		if (r == 0)
			r = message_read_event(o, &e);
		if (r == 0)
			return message_read_reply(o, ret, ret_error);
		if (r < 0)
			return r;
		show_event(c, &e);
	}
}

/* ---- or here ---- */

static void interrupt(int sig)
{
	(void)sig;
	interrupted = 1;
}

static bool was_interrupted(void *userdata)
{
	(void)userdata;
	return interrupted;
}

static int add_here(struct ctl *c, const struct message_request *q,
		    const struct message_files *files, struct import_result *ret, char **ret_error)
{
	struct sigaction on = { .sa_handler = interrupt };
	struct import_part parts[IMPORT_PARTS_MAX];
	struct import_job j = { .directory = directory(),
				.parts = parts,
				.n_parts = files->n,
				.name = q->name,
				.make_default = q->make_default,
				.event = show_event,
				.cancelled = was_interrupted,
				.userdata = c };

	for (size_t k = 0; k < files->n; k++)
		parts[k] = (struct import_part){ .fd = files->fd[k], .name = q->files[k] };
	/* So that a half-made copy is removed. */
	sigaction(SIGINT, &on, NULL);
	sigaction(SIGTERM, &on, NULL);
	sigaction(SIGHUP, &on, NULL);
	return import_add(&j, ret, ret_error);
}

static int change(struct ctl *c, const struct message_request *q, const struct message_files *files,
		  struct import_result *ret, char **ret_error)
{
	_cleanup_(closep) int sock = connect_import(ret_error);

	if (sock >= 0)
		return ask(c, sock, q, files, ret, ret_error);
	if (sock != -ENOENT)
		return sock;
	switch (q->command) {
	case MESSAGE_ADD: return add_here(c, q, files, ret, ret_error);
	case MESSAGE_REMOVE: return import_remove(directory(), q->name, q->force, ret, ret_error);
	case MESSAGE_DEFAULT: return import_set_default(directory(), q->name, ret, ret_error);
	case MESSAGE_COMMAND_MAX: break;
	}
	return -EINVAL;
}

/* ---- add ---- */

static int open_part(const char *path, struct message_files *files, char **ret_error)
{
	/* O_NONBLOCK: a FIFO is refused, not waited for. */
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	struct stat st;

	if (fd < 0)
		return fail(ret_error, -errno, "%s: %m", path);
	files->fd[files->n++] = fd;
	if (fstat(fd, &st) < 0)
		return fail(ret_error, -errno, "%s: %m", path);
	return S_ISREG(st.st_mode) ? 0 : fail(ret_error, -EINVAL, "%s is not a regular file", path);
}

/* All parts of the model that path is the first part of. names: malloc'd, as the files. */
static int open_parts(const char *path, struct message_files *files, char **names, char **ret_error)
{
	const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
	unsigned no = 1, count = 1;
	size_t len;
	int r = 0;

	if (!describe_split_name(base, &len, &no, &count) || count == 0)
		count = 1;
	if (count > 1 && no != 1)
		return fail(ret_error, -EINVAL,
			    "%s is part %u of a split model; add %.*s-00001-of-%05u.gguf", path, no,
			    (int)len, base, count);
	if (count > IMPORT_PARTS_MAX)
		return fail(ret_error, -E2BIG, "%s: a model has at most %d parts here: merge them first",
			    path, IMPORT_PARTS_MAX);
	for (unsigned k = 0; k < count && r == 0; k++) {
		_cleanup_(freep) char *part = NULL;
		int n = count == 1 ? asprintf(&part, "%s", path)
				   : asprintf(&part, "%.*s%.*s-%05u-of-%05u.gguf",
					      (int)(base - path), path, (int)len, base, k + 1, count);

		names[k] = n < 0 ? NULL : strdup(part + (base - path));
		if (!names[k]) {
			part = n < 0 ? NULL : part;
			return fail(ret_error, -ENOMEM, "no memory");
		}
		r = open_part(part, files, ret_error);
	}
	return r;
}

static void print_added(struct ctl *c, const struct import_result *r)
{
	char bytes[32];

	if (r->existed)
		terminal_printf(&c->out, "%s is there already, with the same content: kept\n", r->file);
	else
		terminal_printf(&c->out, "%s (%s) is now in %s\n", r->file,
				ctl_bytes_text(r->bytes, bytes), directory());
	if (r->is_default)
		terminal_printf(&c->out,
				"It is the default model. To load it: systemctl reload residentd\n");
	else
		terminal_printf(&c->out, "Another model is the default; --default changes that.\n");
}

enum exit_code install_add(struct ctl *c)
{
	_cleanup_(message_files_done) struct message_files files = {};
	struct message_request q = { .command = MESSAGE_ADD,
				     .name = c->name,
				     .make_default = c->make_default };
	char *names[IMPORT_PARTS_MAX] = {};
	_cleanup_(freep) char *error = NULL;
	struct import_result result = {};
	enum exit_code e = EXIT_OK;
	int r = open_parts(c->arguments[0], &files, names, &error);

	if (r == 0) {
		q.n_files = files.n;
		memcpy(q.files, names, files.n * sizeof(*names));
		r = change(c, &q, &files, &result, &error);
	}
	for (size_t k = 0; k < ARRAY_SIZE(names); k++)
		free(names[k]);
	if (r < 0)
		return failed(c, r, error);
	terminal_progress_erase(&c->err);
	if (c->json)
		e = ctl_print_json(c, message_pack_result(&result));
	else
		print_added(c, &result);
	import_result_done(&result);
	return e;
}

/* ---- list and show ---- */

static void check_model(struct args *outer, json_t *model)
{
	const char *text;
	int64_t number;
	struct args a;

	args_begin(&a, model);
	args_str(&a, "name", true, SIZE_MAX, &text, NULL);
	args_str(&a, "architecture", true, SIZE_MAX, &text, NULL);
	args_i64(&a, "parameters", true, 0, INT64_MAX, &number);
	args_i64(&a, "weight_bytes", true, 0, INT64_MAX, &number);
	if (a.bad)
		args_refuse(outer, a.bad, a.why);
}

/* What the service has loaded: the checked reply to ListModels; NULL when it cannot be asked. */
static enum exit_code loaded_models(struct ctl *c, json_t **ret)
{
	_cleanup_(freep) char *reply = NULL;
	struct resident *r = NULL;
	json_auto_t *o = NULL;
	json_t *list = NULL, *m;
	struct args a;
	size_t k;

	if (resident_connect(NULL, &r) < 0)
		return EXIT_OK;
	if (resident_call(r, "ListModels", NULL, &reply) == 0)
		o = json_loads(reply, 0, NULL);
	resident_close(r);
	if (!o)
		return EXIT_OK;
	args_begin(&a, o);
	args_array(&a, "models", true, SIZE_MAX, &list);
	json_array_foreach(list, k, m)
		check_model(&a, m);
	if (a.bad)
		return ctl_bad_reply(c, &a);
	*ret = TAKE_PTR(o);
	return EXIT_OK;
}

static bool same_number(json_t *a, json_t *b, const char *key)
{
	return json_integer_value(json_object_get(a, key)) ==
	       json_integer_value(json_object_get(b, key));
}

/* The service tells what it has loaded by the model's own name and size. */
static bool is_loaded(json_t *loaded, const struct library_entry *e, json_t *info)
{
	const char *title = json_string_value(json_object_get(info, "title"));
	json_t *m;
	size_t k;

	json_array_foreach(json_object_get(loaded, "models"), k, m) {
		const char *name = json_string_value(json_object_get(m, "name"));

		if (name && streq(name, title ? title : e->file) &&
		    same_number(m, info, "weight_bytes") && same_number(m, info, "parameters"))
			return true;
	}
	return false;
}

/* NULL when the name, which somebody else may have given, is not UTF-8. */
static json_t *entry_object(const struct library *models, const struct library_entry *e, json_t *loaded)
{
	json_auto_t *info = library_info(models, e);
	json_auto_t *own = json_pack("{s:s, s:s, s:I, s:i, s:b, s:b}", "file", e->file, "name",
				     e->stem, "bytes", (json_int_t)e->bytes, "parts", (int)e->n_parts,
				     "default", e->is_default, "loaded", is_loaded(loaded, e, info));
	json_auto_t *o = json_object();

	if (!own || (info && json_object_update(o, info) < 0) || json_object_update(o, own) < 0)
		return NULL;
	return TAKE_PTR(o);
}

static const char *string(json_t *o, const char *key, const char *otherwise)
{
	const char *s = json_string_value(json_object_get(o, key));

	return s ? s : otherwise;
}

static uint64_t number(json_t *o, const char *key)
{
	json_int_t n = json_integer_value(json_object_get(o, key));

	return n > 0 ? (uint64_t)n : 0;
}

static void print_entry(struct ctl *c, const struct library_entry *e, json_t *o)
{
	bool loaded = json_is_true(json_object_get(o, "loaded"));
	char bytes[32];

	terminal_printf(&c->out, "%s  %s, licence %s%s%s\n", e->stem,
			ctl_bytes_text(e->bytes, bytes), string(o, "license", "not stated"),
			e->is_default ? ", default" : "", loaded ? ", loaded" : "");
}

/*
 * A service may run on a model that lies elsewhere: the bundled one, or one from its command line.
 */
static enum exit_code list_of_service(struct ctl *c, bool readable)
{
	json_auto_t *loaded = NULL;
	enum exit_code e = loaded_models(c, &loaded);
	json_t *m;
	size_t k;
	char bytes[32];

	if (e != EXIT_OK)
		return e;
	if (!loaded && !readable)
		return report_no_service(&c->err, PROGRAM, -ENOENT);
	if (c->json)
		return ctl_print_json(c, loaded ? json_incref(loaded) : json_pack("{s:[]}", "models"));
	json_array_foreach(json_object_get(loaded, "models"), k, m)
		terminal_printf(&c->out, "%s  %s, %s, loaded from elsewhere\n",
				string(m, "name", "?"), string(m, "architecture", "?"),
				ctl_bytes_text(number(m, "weight_bytes"), bytes));
	if (!loaded || k == 0)
		terminal_printf(&c->out, "no model; `residentctl model add FILE` installs one\n");
	return EXIT_OK;
}

enum exit_code install_list(struct ctl *c)
{
	_cleanup_(library_closep) struct library *models = NULL;
	json_auto_t *loaded = NULL, *list = NULL;
	int r = library_open(directory(), &models, NULL);
	enum exit_code e;

	if (r < 0 || models->n == 0)
		return list_of_service(c, r == 0);
	e = loaded_models(c, &loaded);
	if (e != EXIT_OK)
		return e;
	list = json_array();
	for (size_t k = 0; k < models->n; k++) {
		json_t *o = entry_object(models, &models->entries[k], loaded);

		if (!c->json)
			print_entry(c, &models->entries[k], o);
		if (json_array_append_new(list, o) < 0 && c->json)
			return ctl_print_json(c, NULL);
	}
	if (!c->json)
		return EXIT_OK;
	return ctl_print_json(c, json_pack("{s:s, s:O}", "directory", directory(), "models", list));
}

enum exit_code install_show(struct ctl *c)
{
	_cleanup_(library_closep) struct library *models = NULL;
	_cleanup_(freep) char *error = NULL, *path = NULL;
	json_auto_t *loaded = NULL;
	const struct library_entry *entry;
	enum exit_code e;
	json_t *o;
	int r;

	if (ctl_model_is_path(c->arguments[0]))
		return ctl_model_show(c, c->arguments[0], NULL);
	r = library_open(directory(), &models, &error);
	if (r == 0)
		r = library_find(models, c->arguments[0], &entry, &error);
	if (r < 0)
		return failed(c, r, error);
	e = loaded_models(c, &loaded);
	if (e != EXIT_OK)
		return e;
	o = entry_object(models, entry, loaded);
	if (!o || asprintf(&path, "%s/%s", models->path, entry->file) < 0) {
		path = NULL;
		json_decref(o);
		return ctl_print_json(c, NULL);
	}
	return ctl_model_show(c, path, o);
}

/* ---- remove and default ---- */

/* Only this side can ask the service; the other refuses the default by itself. */
static enum exit_code check_not_loaded(struct ctl *c, const char *name)
{
	_cleanup_(library_closep) struct library *models = NULL;
	json_auto_t *loaded = NULL, *info = NULL;
	_cleanup_(freep) char *error = NULL;
	const struct library_entry *entry;
	enum exit_code e;
	int r;

	if (library_open(directory(), &models, NULL) < 0 || library_find(models, name, &entry, NULL) < 0)
		return EXIT_OK; /* who removes it says why not */
	e = loaded_models(c, &loaded);
	if (e != EXIT_OK)
		return e;
	info = library_info(models, entry);
	if (!is_loaded(loaded, entry, info))
		return EXIT_OK;
	r = fail(&error, -EBUSY, "%s is loaded; --force removes it anyway", name);
	return failed(c, r, error);
}

static enum exit_code do_change(struct ctl *c, enum message_command command)
{
	const char *name = c->arguments[0];
	struct message_request q = { .command = command, .name = name, .force = c->force };
	_cleanup_(freep) char *error = NULL;
	struct import_result result = {};
	enum exit_code e = EXIT_OK;
	int r;

	if (c->json && !utf8_decodable(name, strlen(name))) /* not after it was done */
		return ctl_usage_error(c, "the name is not valid UTF-8");
	if (command == MESSAGE_REMOVE && !c->force)
		e = check_not_loaded(c, name);
	if (e != EXIT_OK)
		return e;
	r = change(c, &q, NULL, &result, &error);
	if (r < 0)
		return failed(c, r, error);
	if (c->json)
		e = ctl_print_json(c, message_pack_result(&result));
	else if (command == MESSAGE_REMOVE)
		terminal_printf(&c->out, "%s is removed%s\n", result.file,
				result.is_default ? ", and there is no default model now" : "");
	else
		terminal_printf(&c->out,
				"%s is the default model now. To load it: systemctl reload residentd\n",
				result.file);
	import_result_done(&result);
	return e;
}

enum exit_code install_remove(struct ctl *c)
{
	return do_change(c, MESSAGE_REMOVE);
}

enum exit_code install_default(struct ctl *c)
{
	return do_change(c, MESSAGE_DEFAULT);
}
