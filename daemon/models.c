/* SPDX-License-Identifier: MIT */
/*
 * models.c: which model file is meant: the command line's, the configuration's, the default of the models directory, or one by name. Loop
 * thread. Refuses to know what is in a file. Invariant: a name that comes from a client never leaves the models directory.
 */
#include "daemon/daemon.h"

#include <dirent.h>
#include <fcntl.h>
#include <systemd/sd-daemon.h>

#define MODELS_DIRECTORY "/var/lib/residentd/models"

static const char *models_directory(void)
{
	const char *dir = getenv("RESIDENTD_MODELS");

	return dir ? dir : MODELS_DIRECTORY;
}

/* The model that comes with residentd; NULL: none was installed with it. */
static const char *toy_model(void)
{
	const char *path = getenv("RESIDENTD_TOY_MODEL");

#ifdef RESIDENTD_TOY_MODEL
	if (!path && !getenv("RESIDENTD_MODELS"))
		path = RESIDENTD_TOY_MODEL;
#endif
	return path;
}

const char *models_notice(const struct daemon *d)
{
	return d->model && toy_model() && streq(d->model->path, toy_model())
		       ? "this is the toy model that comes with residentd: it knows a few hundred questions; "
			 "`sudo residentctl model add FILE.gguf --default` and a reload bring a real one"
		       : NULL;
}

/* Which file to load: the option, the configuration, or the default of the models directory. malloc'd. */
static char *wanted_path(const struct daemon *d)
{
	_cleanup_(freep) char *path = NULL;
	char *real;

	if (d->chosen_path)
		return strdup(d->chosen_path);
	if (d->options.model)
		return strdup(d->options.model);
	if (d->config.model_path)
		return strdup(d->config.model_path);
	if (asprintf(&path, "%s/default.gguf", models_directory()) < 0) {
		path = NULL;
		return NULL;
	}
	/* So that the first request after an installation is answered; the answer comes with models_notice(). */
	if (toy_model() && access(path, F_OK) < 0 && errno == ENOENT && access(toy_model(), R_OK) == 0)
		return strdup(toy_model());
	/* A link to the first part of a split model: its name is how the others are found. */
	real = realpath(path, NULL);
	return real ? real : TAKE_PTR(path);
}

char *models_path(const struct daemon *d)
{
	char *path = wanted_path(d), *stored;

	/* Removed or renamed while an earlier run had it open: a restart goes on with it. */
	if (path && d->stored_model_fd >= 0 && access(path, F_OK) < 0 && errno == ENOENT &&
	    asprintf(&stored, "/proc/self/fd/%d", d->stored_model_fd) >= 0) {
		free(path);
		return stored;
	}
	return path;
}

void models_store_fd(struct daemon *d)
{
	const struct gguf *g = d->model->gguf;
	int fd = gguf_part(g, 0)->fd;

	/* The parts of a split model are found by name: one descriptor would not do. */
	(void)sd_notify(0, "FDSTOREREMOVE=1\nFDNAME=model");
	if (gguf_n_parts(g) == 1)
		(void)sd_pid_notify_with_fds(0, 0, "FDSTORE=1\nFDNAME=model\nFDPOLL=0", &fd, 1);
}

/* A name of the models directory, with or without .gguf; never a path. */
static bool valid_name(const char *name)
{
	return name[0] && name[0] != '.' && !strchr(name, '/') && strlen(name) <= 200;
}

static int make_default(const char *dir, const char *file)
{
	_cleanup_(freep) char *link = NULL, *temporary = NULL;

	if (asprintf(&link, "%s/default.gguf", dir) < 0)
		link = NULL;
	if (asprintf(&temporary, "%s/.default.%d", dir, getpid()) < 0)
		temporary = NULL;
	if (!link || !temporary)
		return -ENOMEM;
	(void)unlink(temporary);
	if (symlink(file, temporary) < 0)
		return -errno;
	if (rename(temporary, link) < 0) {
		int r = -errno;

		(void)unlink(temporary);
		return r;
	}
	return 0;
}

/* "NAME-0123456789ab.gguf": as the import names what is called NAME. */
static bool is_import_of(const char *file, const char *name)
{
	size_t len = strlen(name);

	return strncmp(file, name, len) == 0 && file[len] == '-' &&
	       strspn(file + len + 1, "0123456789abcdef") == 12 && streq(file + len + 13, ".gguf");
}

/* The file of this name: as it is, with .gguf, or the only one that was imported under it. malloc'd. */
static int find_file(const char *dir, const char *name, char **ret_file, char **ret_error)
{
	const char *const suffixes[] = { "", ".gguf" };
	_cleanup_(freep) char *found = NULL;
	struct dirent *entry;
	DIR *d = opendir(dir);
	int fd;

	if (!d && errno == ENOENT)
		return fail(ret_error, -ENOENT, "%s: there is no such model", name);
	if (!d)
		return fail(ret_error, -errno, "the models directory: %s", strerror(errno));
	fd = dirfd(d);
	for (size_t i = 0; i < ARRAY_SIZE(suffixes) && !found; i++) {
		if (asprintf(&found, "%s%s", name, suffixes[i]) < 0)
			found = NULL;
		else if (faccessat(fd, found, F_OK, 0) < 0 || !strstr(found, ".gguf")) {
			free(found);
			found = NULL;
		}
	}
	while (!found && (entry = readdir(d))) {
		if (!is_import_of(entry->d_name, name))
			continue;
		found = strdup(entry->d_name);
		while ((entry = readdir(d)))
			if (is_import_of(entry->d_name, name)) {
				closedir(d);
				return fail(ret_error, -EINVAL,
					    "%s has several versions: say which, e.g. %s", name,
					    found ? found : entry->d_name);
			}
		break;
	}
	closedir(d);
	if (!found)
		return fail(ret_error, -ENOENT, "%s: there is no such model", name);
	*ret_file = TAKE_PTR(found);
	return 0;
}

int service_load_model(struct daemon *d, const char *name, bool as_default, char **ret_error)
{
	_cleanup_(freep) char *path = NULL, *file = NULL;
	const char *dir = models_directory();
	int r;

	if (d->state == SERVICE_STOPPING)
		return fail(ret_error, -ESHUTDOWN, "the service is stopping");
	if (d->loading)
		return fail(ret_error, -EBUSY, "a model is being loaded");
	if (!valid_name(name))
		return fail(ret_error, -EINVAL,
			    "a model has a name of the models directory, not a path");
	r = find_file(dir, name, &file, ret_error);
	if (r < 0)
		return r;
	if (asprintf(&path, "%s/%s", dir, file) < 0) {
		path = NULL;
		return fail(ret_error, -ENOMEM, "no memory");
	}
	if (access(path, R_OK) < 0)
		return fail(ret_error, -errno, "%s: %s", file, strerror(errno));
	if (as_default) {
		r = make_default(dir, file);
		if (r < 0)
			return fail(ret_error, r,
				    "cannot make %s the default here (%s): use `residentctl model default`",
				    file, strerror(-r));
	}
	free(d->loading_path);
	d->loading_path = strdup(path);
	r = service_post_load(d, TAKE_PTR(path));
	if (r < 0) {
		free(d->loading_path);
		d->loading_path = NULL;
		return fail(ret_error, r, "no memory");
	}
	return 0;
}

int service_unload_model(struct daemon *d)
{
	if (d->state == SERVICE_STOPPING)
		return -ESHUTDOWN;
	return d->loading ? -EBUSY : service_post_load(d, NULL);
}
