/* SPDX-License-Identifier: MIT */
/*
 * ctl-policy.c: the commands of residentctl about configuration and policy.
 *
 * Owns the words for them. Reads the files with the service's own parsers, so what is said here is
 * what the service will do. Refuses to write files: the service does, when polkit agrees. Invariant:
 * what was read from files in place of the service is called so, since a running one may not have
 * read them yet.
 */
#include "client/ctl.h"
#include "daemon/config.h"
#include "daemon/policy.h"
#include "daemon/uses.h"

#include <grp.h>
#include <pwd.h>

#define STATE_DIRECTORY "/var/lib/residentd"
#define GROUPS_MAX      65536 /* as many as Linux knows for a process */

static enum exit_code failed(struct ctl *c, int r)
{
	terminal_printf(&c->err, PROGRAM ": %s\n", resident_strerror(r));
	return EXIT_ERROR;
}

/* The prefix of --root, without the slashes that every path begins with. */
static char *root_prefix(const struct ctl *c)
{
	size_t len = c->root ? strlen(c->root) : 0;

	while (len > 0 && c->root[len - 1] == '/')
		len--;
	return strndup(c->root ? c->root : "", len);
}

static int read_policy(const char *root, struct policy **ret, struct buf *warnings)
{
	_cleanup_(freep) char *state = NULL;

	if (asprintf(&state, "%s" STATE_DIRECTORY, root) < 0) {
		state = NULL;
		return -ENOMEM;
	}
	return policy_read(root, state, ret, warnings);
}

/* ---- show ---- */

static enum exit_code print_limits(struct ctl *c, const char *user, bool from_service,
				   const struct resident_control_limit *limits, size_t n)
{
	json_t *o = NULL;

	if (c->json) {
		o = json_object();
		for (size_t i = 0; i < n; i++)
			json_object_set_new(o, limits[i].key,
					    json_pack("{s:s, s:s}", "value", limits[i].value,
						      "source", limits[i].source));
		return ctl_print_json(c, json_pack("{s:s, s:s, s:o}", "user", user, "from",
						   from_service ? "service" : "files", "limits", o));
	}
	for (size_t i = 0; i < n; i++)
		terminal_printf(&c->out, "%17s  %-12s  %s\n", limits[i].key,
				*limits[i].value ? limits[i].value : "-", limits[i].source);
	return EXIT_OK;
}

/* The groups of a user, in the array that is returned. */
static int find_groups(const char *name, gid_t gid, gid_t **ret, size_t *ret_n)
{
	_cleanup_(freep) gid_t *gids = NULL;
	int n = 64;

	for (;;) {
		int room = n;
		gid_t *more = reallocarray(gids, (size_t)n, sizeof(*gids));

		if (!more)
			return -ENOMEM;
		gids = more;
		if (getgrouplist(name, gid, gids, &n) >= 0)
			break;
		if (n <= room || n > GROUPS_MAX)
			return -E2BIG;
	}
	*ret = TAKE_PTR(gids);
	*ret_n = (size_t)n;
	return 0;
}

/* user: a name or a number; NULL: who runs this program. */
static const struct passwd *find_user(const char *user)
{
	const struct passwd *p;
	uint64_t uid;

	if (!user)
		return getpwuid(getuid());
	p = getpwnam(user);
	if (!p && parse_u64(user, 0, UINT32_MAX - 1, &uid) == 0)
		p = getpwuid((uid_t)uid);
	return p;
}

static enum exit_code show_from_files(struct ctl *c, const char *user)
{
	struct resident_control_limit limits[POLICY_KEY_MAX];
	_cleanup_(policy_freep) struct policy *policy = NULL;
	_cleanup_(freep) char *root = root_prefix(c);
	_cleanup_(buf_done) struct buf warnings = {};
	struct buf values[POLICY_KEY_MAX] = {};
	_cleanup_(freep) gid_t *gids = NULL;
	const struct passwd *p = find_user(user);
	_cleanup_(freep) char *name = NULL;
	struct policy_limits effective;
	struct policy_who who = {};
	enum exit_code e;
	int r;

	if (!p)
		return ctl_usage_error(c, "there is no such user");
	/* Reading the policy looks up other users, in the same static memory. */
	who.uid = p->pw_uid;
	name = strdup(p->pw_name);
	r = root && name ? find_groups(name, p->pw_gid, &gids, &who.n_gids) : -ENOMEM;
	if (r == 0)
		r = read_policy(root, &policy, &warnings);
	if (r < 0)
		return failed(c, r);
	if (warnings.len > 0)
		terminal_write(&c->err, warnings.data, warnings.len);
	who.gids = gids;
	policy_effective(policy, &who, &effective);
	for (int k = 0; k < POLICY_KEY_MAX; k++) {
		policy_value_to_string(&effective, (enum policy_key)k, &values[k]);
		limits[k].key = policy_key_to_string((enum policy_key)k);
		limits[k].value = values[k].data ? values[k].data : "";
		limits[k].source = effective.source[k];
	}
	e = print_limits(c, name, false, limits, POLICY_KEY_MAX);
	for (int k = 0; k < POLICY_KEY_MAX; k++)
		buf_done(&values[k]);
	return e;
}

enum exit_code ctl_policy_show(struct ctl *c)
{
	const struct resident_control_limit *limits;
	const char *user = c->arguments[0];
	char own[64];
	size_t n;
	int r;

	if (c->root)
		return show_from_files(c, user);
	r = resident_control_connect(NULL, &c->bus);
	if (r == 0) {
		const char *name = user ? user : ctl_user_text(getuid(), own);

		r = resident_control_get_user_limits(c->bus, name, &limits, &n);
		if (r == 0)
			return print_limits(c, name, true, limits, n);
		if (r != -ECONNREFUSED)
			return ctl_bus_failed(c);
	}
	terminal_printf(&c->err, PROGRAM ": residentd cannot be asked (%s): this is from the files\n",
			c->bus ? resident_control_last_error(c->bus)->message : resident_strerror(r));
	return show_from_files(c, user);
}

/* ---- set ---- */

enum exit_code ctl_policy_set(struct ctl *c)
{
	_cleanup_(freep) struct resident_control_limit *limits = NULL;
	char **settings = c->arguments + 1;
	enum exit_code e;
	size_t n = 0;

	while (settings[n])
		n++;
	limits = calloc(n, sizeof(*limits));
	if (!limits)
		return failed(c, -ENOMEM);
	for (size_t i = 0; i < n; i++) {
		char *equals = strchr(settings[i], '=');

		if (!equals || equals == settings[i])
			return ctl_usage_error(c, "settings are KEY=VALUE; KEY= removes one");
		*equals = 0;
		limits[i].key = settings[i];
		limits[i].value = equals + 1;
	}
	e = ctl_bus_connect(c);
	if (e != EXIT_OK)
		return e;
	if (resident_control_set_user_limits(c->bus, c->arguments[0], limits, n, c->runtime) < 0)
		return ctl_bus_failed(c);
	return EXIT_OK;
}

/* ---- check ---- */

/* Every line of warnings is one. */
static enum exit_code report_warnings(struct ctl *c, struct buf *warnings)
{
	enum exit_code e = warnings->len > 0 ? EXIT_ERROR : EXIT_OK;
	char *line, *rest = warnings->data;
	json_t *array;

	if (!c->json) {
		if (warnings->len > 0)
			terminal_write(&c->err, warnings->data, warnings->len);
		return e;
	}
	array = json_array();
	while (rest && (line = strsep(&rest, "\n")))
		if (*line)
			json_array_append_new(array, json_string(line));
	return ctl_print_json(c, json_pack("{s:o}", "warnings", array)) == EXIT_OK ? e : EXIT_ERROR;
}

static enum exit_code check(struct ctl *c, bool with_config)
{
	_cleanup_(policy_freep) struct policy *policy = NULL;
	_cleanup_(freep) char *root = root_prefix(c);
	_cleanup_(buf_done) struct buf warnings = {};
	struct uses uses = {};
	struct config config;
	int r = root ? 0 : -ENOMEM;

	if (r == 0 && with_config) {
		config_defaults(&config);
		r = config_read_layers(&config, root, &warnings);
		config_done(&config);
	}
	if (r == 0 && with_config)
		r = uses_read(root, &uses, &warnings);
	uses_done(&uses);
	if (r == 0)
		r = read_policy(root, &policy, &warnings);
	return r < 0 ? failed(c, r) : report_warnings(c, &warnings);
}

enum exit_code ctl_policy_check(struct ctl *c)
{
	return check(c, false);
}

enum exit_code ctl_policy_check_config(struct ctl *c)
{
	return check(c, true);
}
