/* SPDX-License-Identifier: MIT */
/*
 * service.c: what state the service is in, and the mail that changes it: models loaded, sessions cloned, requests that moved on. Loop thread.
 *
 * Refuses to know the socket and the methods. Invariant: while state is AVAILABLE, model is the one that the engine has.
 */
#include "daemon/bus.h"
#include "daemon/conn.h"
#include "daemon/gpu.h"
#include "daemon/inspect.h"
#include "daemon/lease.h"
#include "daemon/messages.h"
#include "daemon/methods.h"
#include "daemon/pressure.h"
#include "daemon/request.h"
#include "daemon/session.h"
#include "daemon/sleep.h"
#include "daemon/tiles.h"
#include "kernels/cpu/topology.h"

#include <inttypes.h>
#include <sched.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>

#define DRAIN_US    4000000 /* running answers may end by themselves this long... */
#define DEADLINE_US 4700000 /* ...and the process ends within 5 s whatever happens */

static const char *const broken_text =
	"the model's file was changed or became unreadable while it was in use; it is loaded again when it has changed, or by a reload";

static void on_model_broken(struct daemon *d);
static void watch_broken(struct daemon *d);
static void start_load(struct daemon *d);
static struct model_id identify(const char *path);
static void set_unavailable(struct daemon *d, enum error_code code, const char *reason);

static const char *const no_model_text =
	"no model: add one with `residentctl model add FILE.gguf` and reload the service, or start "
	"`residentd --model FILE.gguf`; `make demo` runs the bundled toy model";

const char *service_state_to_string(enum service_state s)
{
	switch (s) {
	case SERVICE_LOADING: return "loading";
	case SERVICE_AVAILABLE: return "available";
	case SERVICE_UNAVAILABLE: return "unavailable";
	case SERVICE_STOPPING: return "stopping";
	}
	return "unavailable";
}

enum error_code service_check(const struct daemon *d, const char **ret_text)
{
	*ret_text = NULL;
	switch (d->state) {
	case SERVICE_LOADING: return ERROR_LOADING;
	case SERVICE_AVAILABLE: return ERROR_NONE;
	case SERVICE_UNAVAILABLE: *ret_text = d->reason; return d->reason_code;
	case SERVICE_STOPPING: return ERROR_STOPPING;
	}
	return ERROR_INTERNAL;
}

enum error_code service_check_client(const struct conn *c, const char **ret_text)
{
	enum error_code code;

	*ret_text = "policy does not allow it";
	if (!c->limits.allow)
		return ERROR_NOT_AUTHORIZED;
	code = service_check(c->daemon, ret_text);
	if (code == ERROR_NONE && !policy_model_allowed(&c->limits, c->daemon->model->name)) {
		*ret_text = "policy does not allow this model";
		return ERROR_NOT_AUTHORIZED;
	}
	return code;
}

uint64_t rate_per_second_milli(const struct rate *r)
{
	uint64_t now = now_us() / 1000000, tok = 0, busy_us = 0;

	for (size_t i = 0; i < RATE_BUCKETS; i++) {
		if (now - r->second[i] >= RATE_BUCKETS)
			continue;
		tok += r->tok[i];
		busy_us += r->busy_us[i];
	}
	return busy_us > 0 ? tok * 1000000000 / busy_us : 0;
}

struct uid_usage *usage_of(struct daemon *d, uid_t uid)
{
	struct uid_usage *p;

	for (size_t i = 0; i < d->n_usage; i++)
		if (d->usage[i].uid == uid)
			return &d->usage[i];
	p = reallocarray(d->usage, d->n_usage + 1, sizeof(*p));
	if (!p)
		return NULL;
	d->usage = p;
	d->usage[d->n_usage] = (struct uid_usage){ .uid = uid };
	return &d->usage[d->n_usage++];
}

/* A file that was overwritten in place is whole again some time later: as soon as it looks different it is loaded anew. */
static int on_broken_timer(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;
	_cleanup_(freep) char *path = models_path(d);
	struct model_id id = path ? identify(path) : (struct model_id){};

	(void)source;
	(void)usec;
	d->broken_timer = sd_event_source_disable_unref(d->broken_timer);
	if (!d->stats.model_broken || d->loading || d->state == SERVICE_STOPPING)
		return 0;
	if (memcmp(&id, &d->loading_id, sizeof(id)) != 0 && id.size > 0) {
		log_info("the model's file has changed: loading it anew");
		start_load(d);
	} else {
		watch_broken(d);
	}
	return 0;
}

static void watch_broken(struct daemon *d)
{
	d->broken_wait_us = CLAMP(2 * d->broken_wait_us, UINT64_C(1000000), UINT64_C(60000000));
	if (!d->broken_timer)
		(void)sd_event_add_time_relative(d->event, &d->broken_timer, CLOCK_MONOTONIC,
						 d->broken_wait_us, 100000, on_broken_timer, d);
}

static void on_model_broken(struct daemon *d)
{
	static const char *const fields[] = { MESSAGE_ID_MODEL_FAILED, NULL };

	log_fields(LOG_ERR, fields, "model %s: %s", d->model->name, broken_text);
	set_unavailable(d, ERROR_MODEL_BROKEN, broken_text);
	d->broken_wait_us = 0;
	watch_broken(d);
}

void service_set_stats(struct daemon *d, const struct engine_stats *stats)
{
	bool evicted = stats->n_evicted != d->stats.n_evicted;

	if (d->stats.tier == RESIDENCY_UNMANAGED && stats->tier == RESIDENCY_MAPPED && !d->loading) {
		free(d->tier_reason);
		d->tier_reason = strdup("all of the model fitted when it was loaded, but not any more");
	}
	if (stats->card.state != d->stats.card.state)
		d->card_since_us = now_us();
	d->stats = *stats;
	if (evicted)
		bus_evicted(d, stats->kv_bytes_used);
	if (stats->heat_error < 0 && stats->heat_error != d->heat_error)
		log_warning("cannot save which experts are used most: %s; they are remembered until the service ends",
			    strerror(-stats->heat_error));
	d->heat_error = stats->heat_error;
	if (stats->budget_note && stats->budget_note != d->budget_note)
		log_info("the model's budget goes down: %s", stats->budget_note);
	d->budget_note = stats->budget_note;
	gpu_follow(d);
	if (d->model && d->state == SERVICE_AVAILABLE) {
		/* Experts may have become managed meanwhile. */
		inspect_follow_model(d, d->model);
		pressure_model_changed(d);
		if (stats->model_broken)
			on_model_broken(d);
	}
}

void service_set_state(struct daemon *d, enum service_state state)
{
	d->state = state;
	bus_state_changed(d);
	if (state == SERVICE_AVAILABLE)
		(void)sd_notifyf(0, "STATUS=available: %s", d->model->name);
	else
		(void)sd_notifyf(0, "STATUS=%s%s%s", service_state_to_string(state),
				 d->reason ? ": " : "", d->reason ? d->reason : "");
	if (state != SERVICE_LOADING)
		conn_resume_all(d);
}

static void set_unavailable(struct daemon *d, enum error_code code, const char *reason)
{
	free(d->reason);
	d->reason = strdup(reason);
	d->reason_code = code;
	/* It travels as JSON; a path may be any bytes. */
	if (d->reason && !utf8_valid(d->reason, strlen(d->reason)))
		for (char *p = d->reason; *p; p++)
			if (*p & 0x80)
				*p = '?';
	service_set_state(d, SERVICE_UNAVAILABLE);
}

/* Starting is over, with a model or without: clients get answers from now on. */
static void notify_ready(struct daemon *d)
{
	static const char *const fields[] = { MESSAGE_ID_STARTED, NULL };

	(void)sd_notify(0, "READY=1");
	if (!d->ready_sent)
		log_fields(LOG_INFO, fields, "ready");
	d->ready_sent = true;
}

/* Compute threads: never more than processors that this process may use; auto: one for each physical core of a node. */
static uint32_t count_threads(uint32_t wanted)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set) < 0)
		return wanted > 0 ? wanted : 1;
	if (wanted == 0)
		wanted = topology_cores("/sys/devices/system", &set);
	return CLAMP(wanted, 1u, MIN((uint32_t)CPU_COUNT(&set), 256u));
}

static void engine_config(const struct daemon *d, struct engine_config *ret)
{
	const struct config *c = &d->config;
	uint64_t vram = d->options.has_vram ? d->options.vram_bytes : c->vram_budget_bytes;
	uint32_t threads = d->options.threads > 0 ? d->options.threads : c->threads;

	*ret = (struct engine_config){
		.threads = count_threads(threads),
		.tiles = d->tiles,
		.context = d->options.context > 0 ? d->options.context : c->context,
		.batch_tok = c->batch_tok,
		.card = {
			.off = vram == CONFIG_VRAM_OFF,
			.budget_bytes = vram == CONFIG_VRAM_OFF ? 0 : vram,
			.reserve_bytes = c->vram_reserve_bytes,
		},
		.kv_bytes_max = c->kv_bytes_max,
		.kv_f16 = c->kv_type == CONFIG_KV_AUTO ? -1 : c->kv_type == CONFIG_KV_F16,
		.residency = {
			.tier = c->host_tier,
			.policy = c->evict_policy,
			.budget_bytes = c->host_budget_bytes,
			.reserve_bytes = c->memory_reserve_bytes,
			.prefetch = c->prefetch,
			.queue_depth = c->disk_queue_depth,
			.state_dir = d->state_dir,
		},
	};
}

static struct model_id identify(const char *path)
{
	struct stat st;

	if (stat(path, &st) < 0)
		return (struct model_id){};
	return (struct model_id){ (uint64_t)st.st_dev, (uint64_t)st.st_ino, (uint64_t)st.st_size,
				  (uint64_t)st.st_mtim.tv_sec * 1000000000 +
					  (uint64_t)st.st_mtim.tv_nsec };
}

/* path: NULL unloads. Taken. */
int service_post_load(struct daemon *d, char *path)
{
	struct engine_load *load = calloc(1, sizeof(*load));

	if (!load) {
		free(path);
		return -ENOMEM;
	}
	d->loading_id = path ? identify(path) : (struct model_id){};
	load->path = path;
	engine_config(d, &load->config);
	load->mail.kind = ENGINE_LOAD;
	d->loading = load;
	service_set_state(d, SERVICE_LOADING);
	engine_post(d->engine, &load->mail);
	return 0;
}

static void start_load(struct daemon *d)
{
	_cleanup_(freep) char *path = models_path(d);

	if (path && !d->options.model && !d->config.model_path && access(path, F_OK) < 0 &&
	    errno == ENOENT) {
		if (!d->model) {
			log_warning("%s", no_model_text);
			set_unavailable(d, ERROR_NO_MODEL, no_model_text);
		}
		notify_ready(d);
		return;
	}
	if (path && service_post_load(d, TAKE_PTR(path)) == 0)
		return;
	log_error("no memory to load a model%s", d->model ? "; the previous one stays" : "");
	if (!d->model)
		set_unavailable(d, ERROR_NO_MEMORY, "no memory to load the model");
	notify_ready(d);
}

static void on_loaded_nothing(struct daemon *d)
{
	struct model *old = d->model;

	session_close_all(d);
	d->model = NULL;
	inspect_follow_model(d, old);
	model_unref(old);
	d->model_id = (struct model_id){};
	log_notice("the model was unloaded");
}

/* Who may not read it is as important as what: nobody thinks of the service's own user first. */
static void add_user(struct engine_load *load)
{
	char *text;

	if (load->err != -EACCES || !load->error ||
	    asprintf(&text, "%s (the service runs as uid %u)", load->error, getuid()) < 0)
		return;
	free(load->error);
	load->error = text;
}

static void on_loaded(struct daemon *d, struct engine_load *load)
{
	char model[300];
	const char *fields[] = { MESSAGE_ID_MODEL_LOADED, model, NULL };

	d->loading = NULL;
	if (load->err == 0) {
		d->unloaded = !load->model;
		if (d->unloaded || d->loading_path) {
			free(d->chosen_path);
			d->chosen_path = TAKE_PTR(d->loading_path);
		}
	}
	free(d->loading_path);
	d->loading_path = NULL;
	add_user(load);
	service_set_stats(d, &load->stats);
	if (load->err == 0 && !load->model) {
		on_loaded_nothing(d);
	} else if (load->err == 0) {
		struct model *old = d->model;

		d->engine_config = load->config;
		session_close_all(d);
		d->model = TAKE_PTR(load->model);
		free(d->tier_reason);
		d->tier_reason = TAKE_PTR(load->tier_reason);
		inspect_follow_model(d, old); /* frees the old feed before its catalog */
		model_unref(old);
		d->model_id = d->loading_id;
		models_store_fd(d);
		free(d->reason);
		d->reason = NULL;
		snprintf(model, sizeof(model), "MODEL=%s", d->model->name);
		log_fields(LOG_NOTICE, fields,
			   "model %s: %s, %" PRIu64 " parameters, %" PRIu64
			   " bytes, context %u, %u threads (%s)",
			   d->model->name, d->model->arch->name, d->model->n_params,
			   d->model->weight_bytes, d->stats.context, d->stats.threads,
			   d->stats.backend);
		if (d->tier_reason)
			log_info("experts: %s: %s", residency_tier_to_string(d->stats.tier),
				 d->tier_reason);
		gpu_loaded(d);
		if (!d->model->template)
			log_warning("model %s: %s; raw completion works", d->model->name,
				    d->model->template_error ? d->model->template_error
							     : "no chat template");
	} else {
		fields[0] = MESSAGE_ID_MODEL_FAILED;
		snprintf(model, sizeof(model), "MODEL=%s", load->path ? load->path : "");
		log_fields(LOG_ERR, fields, "cannot load the model: %s%s",
			   load->error ? load->error : strerror(-load->err),
			   d->model ? "; the previous one stays" : "");
	}
	if (d->state != SERVICE_STOPPING) {
		bus_model_changed(d);
		if (d->model && d->stats.model_broken)
			set_unavailable(d, ERROR_MODEL_BROKEN, broken_text);
		else if (d->model)
			service_set_state(d, SERVICE_AVAILABLE);
		else if (load->err == 0)
			set_unavailable(
				d, ERROR_NO_MODEL,
				"the model was unloaded: load one with `residentctl model load NAME`");
		else
			set_unavailable(d, load->err == -ENOENT ? ERROR_NO_MODEL : ERROR_MODEL_BROKEN,
					load->error ? load->error : strerror(-load->err));
		notify_ready(d);
		service_touch(d);
	}
	if (d->stats.model_broken)
		watch_broken(d);
	gpu_follow(d);
	pressure_model_changed(d);
	pressure_used(d);
	free(load->path);
	free(load->error);
	free(load->tier_reason);
	free(load);
	if (d->reload_again) {
		d->reload_again = false;
		service_reload(d);
	}
	service_check_stop(d);
}

void service_clone(struct daemon *d, struct conn *c, struct session *s, bool keep)
{
	struct engine_clone *clone = calloc(1, sizeof(*clone));
	struct session *to;
	int r = clone ? session_open(d, c, keep, &to) : -ENOMEM;

	if (r < 0) {
		free(clone);
		conn_error(c, error_from_errno(r), NULL, 0);
		return;
	}
	s->busy = to->busy = true;
	to->context_used = s->context_used;
	clone->from = s->engine;
	clone->to = to->engine;
	clone->kv_bytes_max = c->limits.kv_bytes_max;
	clone->mail.kind = ENGINE_CLONE;
	c->clone = clone;
	engine_post(d->engine, &clone->mail);
}

static void on_cloned(struct daemon *d, struct engine_clone *clone)
{
	struct session *from = NULL, *to = NULL;
	struct conn *c = d->conns;

	while (c && c->clone != clone)
		c = c->next;
	for (struct session *s = d->sessions; s; s = s->next) {
		if (s->engine == clone->from)
			from = s;
		if (s->engine == clone->to)
			to = s;
	}
	service_set_stats(d, &clone->stats);
	if (c) {
		c->clone = NULL;
		if (clone->err < 0 || !to)
			conn_error(c, error_from_errno(clone->err), NULL, 0);
		else
			conn_reply(c, session_json(c, to), false);
	}
	if (to && (clone->err < 0 || !c))
		to->doomed = true;
	if (from)
		session_release(d, from);
	if (to)
		session_release(d, to);
	free(clone);
}

static void take_mail(struct daemon *d, struct mail *m)
{
	switch (m->kind) {
	case EVENT_LOADED: on_loaded(d, (struct engine_load *)m); break;
	case EVENT_CLONED: on_cloned(d, (struct engine_clone *)m); break;
	case EVENT_INSPECTED: inspect_done(d, (struct engine_inspect *)m); break;
	case EVENT_TRACE: inspect_traced(d, (struct engine_trace *)m); break;
	case EVENT_CARD: gpu_card_event(d, (struct engine_card_event *)m); break;
	case EVENT_SUSPENDED:
		sleep_suspended(d);
		free(m);
		break;
	case EVENT_PROGRESS: request_progress((struct engine_event *)m); break;
	case EVENT_DONE: request_done((struct request *)m); break;
	case EVENT_PREPARED:
		request_prepared((struct request *)((char *)m - offsetof(struct request, job)));
		break;
	}
}

static int on_mail(sd_event_source *source, int fd, uint32_t events, void *arg)
{
	struct daemon *d = arg;
	struct mail *next;

	(void)source;
	(void)fd;
	(void)events;
	for (struct mail *m = mailbox_take_all(&d->mail, false); m; m = next) {
		next = m->next;
		take_mail(d, m);
	}
	return 0;
}

static void get_tiles(struct daemon *d)
{
	const struct cpu_kernels *k = cpu_kernels_choose(NULL);
	int r = tiles_get(d->config.tune_kernels ? d->state_dir : NULL, k, &d->tiles);

	if (r < 0)
		log_warning("the tiles of matrix products cannot be kept and will be measured again: %s",
			    strerror(-r));
	else if (r > 0)
		log_info("measured tiles of %u columns, %u rows, %u columns for the %s kernels",
			 d->tiles.reg_cols, d->tiles.l1_rows, d->tiles.l2_cols, k->name);
}

int service_start(struct daemon *d)
{
	int r = mailbox_init(&d->mail, true);

	if (r < 0)
		return r;
	d->state_dir = getenv("STATE_DIRECTORY");
	d->runtime_dir = getenv("RUNTIME_DIRECTORY");
	r = service_read_policy(d);
	if (r >= 0)
		r = service_open_quota(d);
	if (r < 0)
		return r;
	get_tiles(d);
	bus_start(d);
	r = workers_new(2, &d->mail, &d->workers);
	if (r >= 0)
		r = engine_new(&d->mail, &d->engine);
	if (r >= 0)
		r = sd_event_add_io(d->event, &d->mail_source, d->mail.event_fd, EPOLLIN, on_mail, d);
	if (r < 0)
		return r;
	pressure_start(d);
	start_load(d);
	return 0;
}

static bool same_engine(const struct engine_config *a, const struct engine_config *b)
{
	const struct residency_config *r = &a->residency, *q = &b->residency;

	return a->threads == b->threads && a->context == b->context && a->batch_tok == b->batch_tok &&
	       a->kv_bytes_max == b->kv_bytes_max && a->kv_f16 == b->kv_f16 &&
	       a->card.off == b->card.off && a->card.budget_bytes == b->card.budget_bytes &&
	       a->card.reserve_bytes == b->card.reserve_bytes && r->tier == q->tier &&
	       r->policy == q->policy && r->budget_bytes == q->budget_bytes &&
	       r->reserve_bytes == q->reserve_bytes && r->prefetch == q->prefetch &&
	       r->queue_depth == q->queue_depth;
}

void service_reload(struct daemon *d)
{
	struct engine_config wanted;
	_cleanup_(freep) char *path = NULL;
	struct model_id id;
	int r;

	if (d->state == SERVICE_STOPPING)
		return;
	if (d->loading) {
		d->reload_again = true;
		return;
	}
	(void)sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64, now_us());
	r = service_read_config(d);
	if (r < 0)
		log_error("cannot read the configuration: %s, keeping the one in force", strerror(-r));
	(void)service_read_policy(d);
	engine_config(d, &wanted);
	path = models_path(d);
	id = path ? identify(path) : d->model_id;
	log_info("configuration reloaded");
	/* Against what the engine has, not what was asked before: a load that failed is tried again. */
	if (d->unloaded) {
		notify_ready(d);
		service_touch(d);
		return;
	}
	if (d->model && memcmp(&id, &d->model_id, sizeof(id)) == 0 &&
	    same_engine(&wanted, &d->engine_config) && !d->stats.model_broken) {
		notify_ready(d);
		service_touch(d);
		return;
	}
	start_load(d);
}

void service_done(struct daemon *d)
{
	d->state = SERVICE_STOPPING;
	d->engine_quit = true;
	while (d->conns)
		conn_free(d->conns);
	d->workers = workers_free(d->workers);
	if (d->engine) {
		on_mail(NULL, -1, 0, d);
		engine_join(d->engine);
		on_mail(NULL, -1, 0, d);
		session_close_all(d);
		inspect_stop(d);
		pressure_stop(d);
		d->engine = engine_free(d->engine);
	}
	pressure_stop(d);
	gpu_stop(d);
	sleep_stop(d);
	sd_event_source_disable_unref(d->broken_timer);
	free(d->tier_reason);
	lease_free_all(d);
	bus_stop(d);
	if (d->mail.tail)
		mailbox_done(&d->mail);
	sd_event_source_disable_unref(d->mail_source);
	sd_event_source_disable_unref(d->session_timer);
	sd_event_source_disable_unref(d->stop_timer);
	sd_event_source_disable_unref(d->stop_deadline);
	sd_event_source_disable_unref(d->quota_timer);
	sd_event_source_disable_unref(d->idle_timer);
	d->quota = quota_close(d->quota);
	d->policy = policy_free(d->policy);
	uses_done(&d->uses);
	model_unref(d->model);
	free(d->reason);
	free(d->chosen_path);
	free(d->loading_path);
	free(d->usage);
	config_done(&d->config);
}
