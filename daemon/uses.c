/* SPDX-License-Identifier: MIT */
/*
 * uses.c: which models serve which use. See uses.h. Pure; loop thread.
 */
#include "daemon/uses.h"

#include "daemon/ini.h"

#include <fnmatch.h>

static const char *const names[USE_MAX] = { "chat", "code", "small", "best" };

struct reading {
	struct uses *uses;
	enum use use; /* of the section */
};

int use_from_string(const char *s)
{
	for (int i = 0; i < USE_MAX; i++)
		if (streq(names[i], s))
			return i;
	return -EINVAL;
}

static int on_section(struct ini_reader *r, const char *name)
{
	struct reading *reading = r->userdata;
	int use = use_from_string(name);

	if (use < 0) {
		ini_warn(r, "[%s]: expected [chat], [code], [small] or [best]", name);
		return 0;
	}
	reading->use = (enum use)use;
	return 1;
}

static int on_assignment(struct ini_reader *r, const char *key, const char *value)
{
	struct reading *reading = r->userdata;
	char **to = &reading->uses->models[reading->use];
	char *copy = NULL;

	if (!streq(key, "Models")) {
		ini_warn(r, "%s=: expected Models=", key);
		return 0;
	}
	if (value[0] && !(copy = strdup(value)))
		return -ENOMEM;
	free(*to);
	*to = copy;
	return 0;
}

int uses_read(const char *root, struct uses *ret, struct buf *warnings)
{
	struct uses uses = {};
	struct reading reading = { .uses = &uses };
	struct ini_dropins dropins = {};
	int r = ini_dropins_add_layers(&dropins, root, "models.d", warnings);

	for (size_t i = 0; i < dropins.n && r >= 0; i++) {
		struct ini_reader reader = {
			.section = on_section,
			.assignment = on_assignment,
			.userdata = &reading,
			.warnings = warnings,
		};

		r = ini_read_layer(&reader, dropins.items[i].path);
		if (r == -ENOENT)
			r = 0;
	}
	ini_dropins_done(&dropins);
	if (r < 0) {
		uses_done(&uses);
		return r;
	}
	*ret = uses;
	return 0;
}

void uses_done(struct uses *u)
{
	for (size_t i = 0; i < USE_MAX; i++)
		free(u->models[i]);
	*u = (struct uses){};
}

bool uses_match(const struct uses *u, enum use use, const char *model)
{
	_cleanup_(freep) char *globs = NULL;
	char *save = NULL;

	if (!u->models[use])
		return true;
	globs = strdup(u->models[use]);
	for (char *g = globs ? strtok_r(globs, " \t", &save) : NULL; g; g = strtok_r(NULL, " \t", &save))
		if (fnmatch(g, model, 0) == 0)
			return true;
	return false;
}
