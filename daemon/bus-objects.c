/* SPDX-License-Identifier: MIT */
/*
 * bus-objects.c: the objects below the Manager (model, sessions, users) and
 * org.freedesktop.LogControl1. See bus-internal.h. Loop thread.
 *
 * Owns nothing: an object is looked up by its path for each message, and for whoever sent it
 * (bus_sees()). An object that the sender may not see does not exist for him, in no listing and
 * under no path that he guesses.
 */
#include "daemon/bus-internal.h"

#define LOG_PATH "/org/freedesktop/LogControl1"

static const char *const levels[] = {
	[LOG_EMERG] = "emerg", [LOG_ALERT] = "alert",     [LOG_CRIT] = "crit",
	[LOG_ERR] = "err",     [LOG_WARNING] = "warning", [LOG_NOTICE] = "notice",
	[LOG_INFO] = "info",   [LOG_DEBUG] = "debug",
};

static struct session *session_at(struct bus *b, const char *path)
{
	const char *id = startswith(path, BUS_SESSION "/") ? path + strlen(BUS_SESSION "/") : "";

	for (struct session *s = b->daemon->sessions; s; s = s->next)
		if (!s->doomed && streq(s->id, id))
			return bus_sees(b, s->uid) ? s : NULL;
	return NULL;
}

static const struct uid_usage *user_at(struct bus *b, const char *path)
{
	const char *number = startswith(path, BUS_USER "/") ? path + strlen(BUS_USER "/") : "";

	for (size_t i = 0; i < b->daemon->n_usage; i++) {
		const struct uid_usage *u = &b->daemon->usage[i];
		char text[16];

		snprintf(text, sizeof(text), "%u", u->uid);
		if (streq(text, number))
			return bus_sees(b, u->uid) ? u : NULL;
	}
	return NULL;
}

static bool model_at(struct bus *b, const char *path)
{
	_cleanup_(freep) char *own = b->daemon->model ? bus_model_path(b->daemon->model) : NULL;

	return own && streq(path, own);
}

/* All of them give the bus to the getters, which look the object up again. */
static int find_session(sd_bus *bus, const char *path, const char *interface, void *arg, void **ret,
			sd_bus_error *error)
{
	(void)bus;
	(void)interface;
	(void)error;
	*ret = arg;
	return session_at(arg, path) != NULL;
}

static int find_user(sd_bus *bus, const char *path, const char *interface, void *arg, void **ret,
		     sd_bus_error *error)
{
	(void)bus;
	(void)interface;
	(void)error;
	*ret = arg;
	return user_at(arg, path) != NULL;
}

static int find_model(sd_bus *bus, const char *path, const char *interface, void *arg, void **ret,
		      sd_bus_error *error)
{
	(void)bus;
	(void)interface;
	(void)error;
	*ret = arg;
	return model_at(arg, path);
}

/* ---- lists, ended by NULL, that sd-bus frees ---- */

static char **list_free(char **list)
{
	for (char **p = list; *p; p++)
		free(*p);
	free(list);
	return NULL;
}
DEFINE_CLEANUP(char **, list_free)

static int list_sessions(sd_bus *bus, const char *prefix, void *arg, char ***ret, sd_bus_error *error)
{
	struct bus *b = arg;
	_cleanup_(list_freep) char **list = calloc(b->daemon->n_sessions + 1, sizeof(*list));
	sd_bus_message *m = sd_bus_get_current_message(bus);
	const char *member = m ? sd_bus_message_get_member(m) : NULL;
	struct bus_peer *peer;
	size_t n = 0;

	(void)prefix;
	(void)error;
	if (!list)
		return -ENOMEM;
	/* Whoever takes the whole picture wants to be told of changes; one program too many is not. */
	if (member && streq(member, "GetManagedObjects"))
		(void)bus_peer(b, m, &peer);
	for (const struct session *s = b->daemon->sessions; s; s = s->next) {
		char path[BUS_SESSION_PATH_SIZE];

		if (s->doomed || !bus_sees(b, s->uid))
			continue;
		bus_session_path(s, path);
		list[n] = strdup(path);
		if (!list[n++])
			return -ENOMEM;
	}
	*ret = TAKE_PTR(list);
	return 0;
}

static int list_users(sd_bus *bus, const char *prefix, void *arg, char ***ret, sd_bus_error *error)
{
	struct bus *b = arg;
	_cleanup_(list_freep) char **list = calloc(b->daemon->n_usage + 1, sizeof(*list));
	size_t n = 0;

	(void)bus;
	(void)prefix;
	(void)error;
	if (!list)
		return -ENOMEM;
	for (size_t i = 0; i < b->daemon->n_usage; i++) {
		uid_t uid = b->daemon->usage[i].uid;

		if (!bus_sees(b, uid))
			continue;
		if (asprintf(&list[n], BUS_USER "/%u", uid) < 0) {
			list[n] = NULL;
			return -ENOMEM;
		}
		n++;
	}
	*ret = TAKE_PTR(list);
	return 0;
}

static int list_models(sd_bus *bus, const char *prefix, void *arg, char ***ret, sd_bus_error *error)
{
	struct bus *b = arg;
	_cleanup_(list_freep) char **list = calloc(2, sizeof(*list));

	(void)bus;
	(void)prefix;
	(void)error;
	if (list && b->daemon->model)
		list[0] = bus_model_path(b->daemon->model);
	if (!list || (b->daemon->model && !list[0]))
		return -ENOMEM;
	*ret = TAKE_PTR(list);
	return 0;
}

/* ---- org.residentd1.Model ---- */

static int get_model(sd_bus *bus, const char *path, const char *interface, const char *property,
		     sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	const struct bus *b = arg;
	const struct model *m = b->daemon->model;

	(void)bus;
	(void)path;
	(void)interface;
	(void)error;
	if (!m)
		return -ENOENT;
	if (streq(property, "Name"))
		return sd_bus_message_append(reply, "s", m->name);
	if (streq(property, "Architecture"))
		return sd_bus_message_append(reply, "s", m->arch->name);
	if (streq(property, "Parameters"))
		return sd_bus_message_append(reply, "t", m->n_params);
	if (streq(property, "WeightBytes"))
		return sd_bus_message_append(reply, "t", m->weight_bytes);
	return sd_bus_message_append(reply, "u", b->daemon->stats.context);
}

static const sd_bus_vtable model_vtable[] = {
	SD_BUS_VTABLE_START(0),
	SD_BUS_PROPERTY("Name", "s", get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("Architecture", "s", get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("Parameters", "t", get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("WeightBytes", "t", get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("ContextMax", "u", get_model, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_VTABLE_END,
};

/* ---- org.residentd1.Session ---- */

static int close_session(sd_bus_message *m, void *arg, sd_bus_error *error)
{
	struct bus *b = arg;
	struct session *s = session_at(b, sd_bus_message_get_path(m));
	uid_t uid;
	int r;

	if (!s || bus_sender(b, m, &uid, NULL) < 0)
		return bus_fail(error, ERROR_NO_SUCH_SESSION, NULL, 0);
	/* Who may look may not touch. */
	if (uid != s->uid && uid != 0)
		return bus_fail(error, ERROR_NOT_AUTHORIZED, "it is another user's session", 0);
	session_close(b->daemon, s);
	r = sd_bus_reply_method_return(m, "");
	return r < 0 ? r : 1;
}

static int get_session(sd_bus *bus, const char *path, const char *interface, const char *property,
		       sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	const struct session *s = session_at(arg, path);

	(void)bus;
	(void)interface;
	if (!s)
		return bus_fail(error, ERROR_NO_SUCH_SESSION, NULL, 0);
	if (streq(property, "User"))
		return sd_bus_message_append(reply, "u", s->uid);
	if (streq(property, "Keep"))
		return sd_bus_message_append(reply, "b", (int)s->keep);
	if (streq(property, "Busy"))
		return sd_bus_message_append(reply, "b", (int)s->busy);
	return sd_bus_message_append(reply, "u", (uint32_t)MIN(s->context_used, (size_t)UINT32_MAX));
}

static const sd_bus_vtable session_vtable[] = {
	SD_BUS_VTABLE_START(0),
	SD_BUS_METHOD("Close", NULL, NULL, close_session, SD_BUS_VTABLE_UNPRIVILEGED),
	SD_BUS_PROPERTY("User", "u", get_session, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("Keep", "b", get_session, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("Busy", "b", get_session, 0, 0),
	SD_BUS_PROPERTY("ContextUsed", "u", get_session, 0, 0),
	SD_BUS_VTABLE_END,
};

/* ---- org.residentd1.User ---- */

static int get_user(sd_bus *bus, const char *path, const char *interface, const char *property,
		    sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	struct bus *b = arg;
	const struct uid_usage *u = user_at(b, path);
	uint64_t value;

	(void)bus;
	(void)interface;
	if (!u)
		return sd_bus_error_set(error, SD_BUS_ERROR_UNKNOWN_OBJECT, NULL);
	if (streq(property, "Uid"))
		return sd_bus_message_append(reply, "u", u->uid);
	if (streq(property, "Requests"))
		value = u->requests;
	else if (streq(property, "PromptTokens"))
		value = u->sum.prompt_tok;
	else if (streq(property, "GeneratedTokens"))
		value = u->sum.answer_tok + u->sum.thought_tok;
	else if (streq(property, "EngineUSec"))
		value = u->engine_us;
	else
		value = b->daemon->quota ? quota_used(b->daemon->quota, u->uid, time(NULL)) : 0;
	return sd_bus_message_append(reply, "t", value);
}

static const sd_bus_vtable user_vtable[] = {
	SD_BUS_VTABLE_START(0),
	SD_BUS_PROPERTY("Uid", "u", get_user, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("Requests", "t", get_user, 0, 0),
	SD_BUS_PROPERTY("PromptTokens", "t", get_user, 0, 0),
	SD_BUS_PROPERTY("GeneratedTokens", "t", get_user, 0, 0),
	SD_BUS_PROPERTY("TokensToday", "t", get_user, 0, 0),
	SD_BUS_PROPERTY("EngineUSec", "t", get_user, 0, 0),
	SD_BUS_VTABLE_END,
};

/* ---- org.freedesktop.LogControl1 ---- */

static int get_log(sd_bus *bus, const char *path, const char *interface, const char *property,
		   sd_bus_message *reply, void *arg, sd_bus_error *error)
{
	const struct bus *b = arg;
	const char *value;

	(void)bus;
	(void)path;
	(void)interface;
	(void)error;
	if (streq(property, "LogLevel"))
		value = levels[b->daemon->config.log_level & 7];
	else if (streq(property, "LogTarget"))
		value = getenv("JOURNAL_STREAM") ? "journal" : "console";
	else
		value = "residentd";
	return sd_bus_message_append(reply, "s", value);
}

/* Until the configuration is read again. */
static int set_log_level(sd_bus *bus, const char *path, const char *interface, const char *property,
			 sd_bus_message *m, void *arg, sd_bus_error *error)
{
	struct bus *b = arg;
	const char *value;
	uid_t uid;
	int r;

	(void)path;
	(void)interface;
	(void)property;
	if (bus_sender(b, sd_bus_get_current_message(bus), &uid, NULL) < 0 || uid != 0)
		return bus_fail(error, ERROR_NOT_AUTHORIZED, "only root sets the log level", 0);
	r = sd_bus_message_read(m, "s", &value);
	if (r < 0)
		return r;
	for (int i = LOG_EMERG; i <= LOG_DEBUG; i++) {
		if (!streq(value, levels[i]))
			continue;
		b->daemon->config.log_level = i;
		log_set_level(i);
		return 0;
	}
	return sd_bus_error_set(error, SD_BUS_ERROR_INVALID_ARGS,
				"one of emerg, alert, crit, err, warning, notice, info, debug is expected");
}

static const sd_bus_vtable log_vtable[] = {
	SD_BUS_VTABLE_START(0),
	/* The setter says who may. */
	SD_BUS_WRITABLE_PROPERTY("LogLevel", "s", get_log, set_log_level, 0, SD_BUS_VTABLE_UNPRIVILEGED),
	SD_BUS_PROPERTY("LogTarget", "s", get_log, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_PROPERTY("SyslogIdentifier", "s", get_log, 0, SD_BUS_VTABLE_PROPERTY_CONST),
	SD_BUS_VTABLE_END,
};

int bus_objects_add(struct bus *b)
{
	int r = sd_bus_add_fallback_vtable(b->bus, NULL, BUS_MODEL, BUS_NAME ".Model", model_vtable,
					   find_model, b);

	if (r >= 0)
		r = sd_bus_add_node_enumerator(b->bus, NULL, BUS_MODEL, list_models, b);
	if (r >= 0)
		r = sd_bus_add_fallback_vtable(b->bus, NULL, BUS_SESSION, BUS_NAME ".Session",
					       session_vtable, find_session, b);
	if (r >= 0)
		r = sd_bus_add_node_enumerator(b->bus, NULL, BUS_SESSION, list_sessions, b);
	if (r >= 0)
		r = sd_bus_add_fallback_vtable(b->bus, NULL, BUS_USER, BUS_NAME ".User",
					       user_vtable, find_user, b);
	if (r >= 0)
		r = sd_bus_add_node_enumerator(b->bus, NULL, BUS_USER, list_users, b);
	if (r >= 0)
		r = sd_bus_add_object_vtable(b->bus, NULL, LOG_PATH, "org.freedesktop.LogControl1",
					     log_vtable, b);
	return r;
}
