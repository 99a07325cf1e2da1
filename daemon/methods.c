/* SPDX-License-Identifier: MIT */
/*
 * methods.c: what each method of the interface does. See methods.h. Loop thread.
 *
 * One function a method, one table. Each reads its parameters through struct args, so that a bad or unknown field is refused by name.
 */
#include "daemon/methods.h"

#include "daemon/inspect.h"
#include "daemon/request.h"

#include <inttypes.h>

#ifndef RESIDENTD_VERSION
#define RESIDENTD_VERSION "unknown"
#endif

struct method {
	const char *name;
	void (*run)(struct conn *c, struct args *a);
};

/* true when the parameters were fine; else answered. */
static bool checked(struct conn *c, struct args *a)
{
	if (args_end(a) == 0)
		return true;
	conn_invalid(c, a->bad, a->why);
	return false;
}

static json_t *model_json(const struct daemon *d)
{
	const struct model *m = d->model;

	return json_pack("{ss ss sI sI sI sI sb sb}", "name", m->name, "architecture",
			 m->arch->name, "parameters", (json_int_t)m->n_params, "weight_bytes",
			 (json_int_t)m->weight_bytes, "context_max", (json_int_t)d->stats.context,
			 "context_trained", (json_int_t)m->n_ctx_train, "chat", m->template != NULL,
			 "thinking", m->template && template_think_end_id(m->template) >= 0);
}

static void add_state(const struct daemon *d, json_t *obj)
{
	(void)json_object_set_new(obj, "state", json_string(service_state_to_string(d->state)));
	if (d->state == SERVICE_UNAVAILABLE && d->reason)
		(void)json_object_set_new(obj, "reason", json_string(d->reason));
	if (d->model)
		(void)json_object_set_new(obj, "model", model_json(d));
}

/* Requests that wait; one at a time runs. */
static size_t count_waiting(const struct daemon *d, size_t *ret_running)
{
	size_t n = 0;

	for (const struct request *r = d->requests; r; r = r->next)
		n += r->kind != REQUEST_TOKENIZE;
	*ret_running = n > 0;
	return n - *ret_running;
}

static void get_availability(struct conn *c, struct args *a)
{
	struct daemon *d = c->daemon;
	size_t running;
	json_t *obj;

	if (!checked(c, a))
		return;
	obj = json_pack("{sI sI}", "sessions", (json_int_t)d->n_sessions, "queued",
			(json_int_t)count_waiting(d, &running));
	if (obj)
		add_state(d, obj);
	if (obj && d->state == SERVICE_LOADING)
		(void)json_object_set_new(obj, "retry_after_ms",
					  json_integer(error_by_code(ERROR_LOADING)->retry_after_ms));
	conn_reply(c, obj, false);
}

/* VmRSS and its parts, in bytes. */
static void read_rss(uint64_t rss[3])
{
	static const char *const keys[3] = { "VmRSS: %llu", "RssAnon: %llu", "RssFile: %llu" };
	_cleanup_(fclosep) FILE *f = fopen("/proc/self/status", "re");
	unsigned long long kib;
	char line[128];

	while (f && fgets(line, sizeof(line), f))
		for (size_t i = 0; i < 3; i++)
			if (sscanf(line, keys[i], &kib) == 1)
				rss[i] = (uint64_t)kib * 1024;
}

static void get_status(struct conn *c, struct args *a)
{
	struct daemon *d = c->daemon;
	uint64_t rss[3] = {};
	size_t running, waiting;
	json_t *obj;

	if (!checked(c, a))
		return;
	read_rss(rss);
	waiting = count_waiting(d, &running);
	obj = json_pack("{ss si sI ss si sI sI sI sI sI sI sI sf sf sI sI sI sI sI}", "version",
			RESIDENTD_VERSION, "pid", (int)getpid(), "uptime_s",
			(json_int_t)((now_us() - d->started_us) / 1000000), "backend",
			d->stats.backend ? d->stats.backend : "none", "threads",
			(int)d->stats.threads, "sessions", (json_int_t)d->n_sessions, "sessions_own",
			(json_int_t)session_count(d, c->uid), "queued", (json_int_t)waiting, "running",
			(json_int_t)running, "requests_total", (json_int_t)d->n_requests_total,
			"prompt_tokens_total", (json_int_t)d->n_prompt_tok, "generated_tokens_total",
			(json_int_t)d->n_generated_tok, "prefill_tokens_per_second",
			(double)rate_per_second_milli(&d->prefill_rate) / 1000,
			"decode_tokens_per_second",
			(double)rate_per_second_milli(&d->decode_rate) / 1000, "rss_bytes",
			(json_int_t)rss[0], "rss_anon_bytes", (json_int_t)rss[1], "rss_file_bytes",
			(json_int_t)rss[2], "kv_bytes_used", (json_int_t)d->stats.kv_bytes_used,
			"kv_bytes_max", (json_int_t)d->stats.kv_bytes_max);
	if (obj)
		add_state(d, obj);
	if (obj && d->model && d->tier_reason) {
		(void)json_object_set_new(obj, "experts",
					  json_sprintf("%s: %s", residency_tier_to_string(d->stats.tier),
						       d->tier_reason));
		(void)json_object_set_new(obj, "budget_bytes",
					  json_integer((json_int_t)atomic_load(
						  &engine_shared(d->engine)->budget_bytes)));
	}
	(void)json_object_set_new(obj, "gpu", inspect_gpu(d));
	conn_reply(c, obj, false);
}

static bool available(struct conn *c)
{
	const char *text;
	enum error_code code = service_check_client(c, &text);

	if (code == ERROR_NONE)
		return true;
	/* A model is there in a moment: who started the service by asking shall not be told to ask again. */
	if (code == ERROR_LOADING)
		conn_defer(c);
	else
		conn_error(c, code, text, 0);
	return false;
}

json_t *session_json(const struct conn *c, const struct session *s)
{
	/* What this user may fill of it. */
	uint32_t context = MIN(c->daemon->stats.context, c->limits.context_max);

	return json_pack("{ss sI sI}", "session", s->id, "context_used",
			 (json_int_t)s->context_used, "context_max", (json_int_t)context);
}

/* The caller's session, or NULL after an error was sent. */
static struct session *own_session(struct conn *c, const char *id)
{
	struct session *s = session_find(c->daemon, c->uid, id);

	if (!s)
		conn_error(c, ERROR_NO_SUCH_SESSION, NULL, 0);
	return s;
}

static void open_session(struct conn *c, struct args *a)
{
	struct daemon *d = c->daemon;
	const char *id = NULL;
	struct session *s;
	json_t *obj;
	bool keep = false;
	size_t len;
	int r;

	(void)args_bool(a, "keep", &keep);
	(void)args_str(a, "session", false, 256, &id, &len);
	if (!checked(c, a) || !available(c))
		return;
	if (id) {
		s = own_session(c, id);
		if (!s)
			return;
		s->used_us = now_us();
	} else {
		r = session_open(d, c, keep, &s);
		if (r < 0) {
			conn_error(c, error_from_errno(r), NULL, 0);
			return;
		}
	}
	obj = session_json(c, s);
	if (obj)
		(void)json_object_set_new(obj, "resumed", json_boolean(id != NULL));
	conn_reply(c, obj, false);
}

static void close_session(struct conn *c, struct args *a)
{
	const char *id = NULL;
	struct session *s;
	size_t len;

	(void)args_str(a, "session", true, 256, &id, &len);
	if (!checked(c, a))
		return;
	s = own_session(c, id);
	if (!s)
		return;
	/* Closing ends what runs on it, wherever that was asked. */
	for (struct request *r = c->daemon->requests; r; r = r->next)
		if (r->session == s)
			request_cancel(r, false);
	session_close(c->daemon, s);
	conn_reply(c, json_object(), false);
}

/* The engine answers with EVENT_CLONED, in order behind everything before. */
static void clone_session(struct conn *c, struct args *a)
{
	struct daemon *d = c->daemon;
	const char *id = NULL;
	struct session *s;
	bool keep = false;
	size_t len;

	(void)args_str(a, "session", true, 256, &id, &len);
	(void)args_bool(a, "keep", &keep);
	if (!checked(c, a) || !available(c))
		return;
	s = own_session(c, id);
	if (!s)
		return;
	if (s->busy) {
		conn_error(c, ERROR_SESSION_BUSY, NULL, 0);
		return;
	}
	service_clone(d, c, s, keep);
}

static void send_(struct conn *c, struct args *a)
{
	(void)a;
	request_start(c, REQUEST_SEND);
}

static void chat(struct conn *c, struct args *a)
{
	(void)a;
	request_start(c, REQUEST_CHAT);
}

static void complete(struct conn *c, struct args *a)
{
	(void)a;
	request_start(c, REQUEST_COMPLETE);
}

static void tokenize(struct conn *c, struct args *a)
{
	(void)a;
	request_start(c, REQUEST_TOKENIZE);
}

/* Cancels by name, or what runs or waits on this connection before the call. */
static bool cancel_request(struct conn *c, const char *id)
{
	struct request *r = c->request && c->request->kind != REQUEST_TOKENIZE ? c->request : NULL;
	uint64_t n;

	if (id)
		r = parse_u64(id, 0, UINT64_MAX, &n) == 0 ? request_find(c->daemon, c->uid, n) : NULL;
	if (!r)
		return false;
	request_cancel(r, false);
	return true;
}

static void cancel(struct conn *c, struct args *a)
{
	const char *id = NULL;
	size_t len;

	(void)args_str(a, "request", false, 32, &id, &len);
	if (checked(c, a))
		conn_reply(c, json_pack("{sb}", "cancelled", cancel_request(c, id)), false);
}

static void list_models(struct conn *c, struct args *a)
{
	json_t *models;

	if (!checked(c, a))
		return;
	models = json_array();
	if (c->daemon->model)
		(void)json_array_append_new(models, model_json(c->daemon));
	conn_reply(c, json_pack("{so}", "models", models), false);
}

static void get_usage(struct conn *c, struct args *a)
{
	static const struct uid_usage none;
	const struct uid_usage *u;

	if (!checked(c, a))
		return;
	u = usage_of(c->daemon, c->uid);
	if (!u)
		u = &none;
	conn_reply(c,
		   json_pack("{sI sI sI sI sI sI}", "requests", (json_int_t)u->requests,
			     "prompt_tokens", (json_int_t)u->sum.prompt_tok, "cached_tokens",
			     (json_int_t)u->sum.cached_tok, "answer_tokens",
			     (json_int_t)u->sum.answer_tok, "thought_tokens",
			     (json_int_t)u->sum.thought_tok, "engine_us", (json_int_t)u->engine_us),
		   false);
}

static void get_residency(struct conn *c, struct args *a)
{
	bool blocks = false;

	(void)args_bool(a, "blocks", &blocks);
	if (checked(c, a))
		inspect_residency(c, blocks);
}

static void trace_routing(struct conn *c, struct args *a)
{
	int64_t tokens = -1;

	(void)args_i64(a, "tokens", false, 1, INT64_MAX, &tokens);
	if (checked(c, a))
		inspect_trace(c, tokens);
}

static void notify(struct conn *c, struct args *a)
{
	const char *group = NULL;
	size_t len;

	(void)args_str(a, "cgroup", true, 4096, &group, &len);
	if (checked(c, a))
		inspect_last_resort(c);
}

static void get_info(struct conn *c, struct args *a)
{
	if (checked(c, a))
		conn_reply(c,
			   json_pack("{ss ss ss ss s[ss]}", "vendor", "residentd", "product",
				     "residentd", "version", RESIDENTD_VERSION, "url", "",
				     "interfaces", "org.varlink.service", "org.residentd.Inference"),
			   false);
}

static void get_interface_description(struct conn *c, struct args *a)
{
	const char *name = NULL, *text = NULL;
	size_t len;

	(void)args_str(a, "interface", true, 256, &name, &len);
	if (!checked(c, a))
		return;
	if (streq(name, "org.residentd.Inference"))
		text = interface_inference;
	else if (streq(name, "org.varlink.service"))
		text = interface_service;
	if (text)
		conn_reply(c, json_pack("{ss}", "description", text), false);
	else
		conn_standard_error(c, "org.varlink.service.InterfaceNotFound", "interface", name);
}

static const struct method inference_methods[] = {
	{ "GetAvailability", get_availability },
	{ "GetStatus", get_status },
	{ "OpenSession", open_session },
	{ "Send", send_ },
	{ "Chat", chat },
	{ "Complete", complete },
	{ "Cancel", cancel },
	{ "Tokenize", tokenize },
	{ "CloneSession", clone_session },
	{ "CloseSession", close_session },
	{ "ListModels", list_models },
	{ "GetUsage", get_usage },
	{ "GetResidency", get_residency },
	{ "TraceRouting", trace_routing },
	{ NULL, NULL },
};

/* systemd-oomd's interface: oomd.conf(5), PREKILL EVENT. */
static const struct method oomd_methods[] = { { "Notify", notify }, { NULL, NULL } };

static const struct method service_methods[] = {
	{ "GetInfo", get_info },
	{ "GetInterfaceDescription", get_interface_description },
	{ NULL, NULL },
};

void methods_dispatch(struct conn *c)
{
	const struct varlink_call *call = &c->current->call;
	const struct method *m;
	struct args a;

	if (c->oomd && streq(call->interface, "io.systemd.oom.Prekill")) {
		m = oomd_methods;
	} else if (!c->oomd && streq(call->interface, "org.residentd.Inference")) {
		m = inference_methods;
	} else if (streq(call->interface, "org.varlink.service")) {
		m = service_methods;
	} else {
		conn_standard_error(c, "org.varlink.service.InterfaceNotFound", "interface",
				    call->interface);
		return;
	}
	while (m->name && !streq(m->name, call->member))
		m++;
	if (!m->name) {
		conn_standard_error(c, "org.varlink.service.MethodNotFound", "method", call->method);
		return;
	}
	args_begin(&a, call->parameters);
	m->run(c, &a);
}

json_t *methods_ahead(struct conn *c, const struct varlink_call *call)
{
	const char *id = NULL;
	struct args a;
	size_t len;

	if (!streq(call->method, "org.residentd.Inference.Cancel"))
		return NULL;
	args_begin(&a, call->parameters);
	(void)args_str(&a, "request", false, 32, &id, &len);
	/* A bad one waits for its turn and is refused then. */
	if (args_end(&a) < 0)
		return NULL;
	return json_pack("{sb}", "cancelled", cancel_request(c, id));
}
