/* SPDX-License-Identifier: MIT */
/*
 * daemon.h: the map. struct daemon holds every subsystem in the order of its start; everything here belongs to the loop thread.
 *
 * main.c      options, sockets, signals, start and stop
 * service.c   the model's state machine (loading, available, ...), mail from the engine and the workers
 * models.c    which model file is meant
 * settings.c  configuration, policy and quota: reading them anew
 * stop.c      the end: drained, or idle
 * session.c   conversations by id and owner
 * request.c   one request: parameters, preparation on a worker, progress and outcome
 * conn.c      one client: bytes in, calls in order, frames out
 * methods.c   what each method of the interface does
 * uses.c      which models serve chat, code, small, best
 * pressure.c  how much memory the model may have, by what others need
 * gpu.c       how much of the GPU others want; sleep.c lets go of it before the machine sleeps
 * inspect.c   where the model's memory is: GetResidency, routing traces, the tracer's feed
 * policy.c    who may ask for how much; quota.c what he has used today
 * bus.c       control on D-Bus; polkit.c who may; lease.c what is held by a descriptor
 *
 * The engine thread (engine/) and the workers are reached by mail only.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/config.h"
#include "daemon/engine/engine.h"
#include "daemon/errors.h"
#include "daemon/log.h"
#include "daemon/policy.h"
#include "daemon/quota.h"
#include "daemon/uses.h"
#include "daemon/worker.h"

#include <systemd/sd-event.h>

struct bus;
struct conn;
struct feed;
struct lease;
struct memory;
struct request;
struct session;
struct sleep;

enum service_state { SERVICE_LOADING, SERVICE_AVAILABLE, SERVICE_UNAVAILABLE, SERVICE_STOPPING };

/* What a uid has used since the start. */
struct uid_usage {
	uid_t uid;
	uint64_t requests, engine_us;
	uint64_t quota_told; /* the midnight (seconds) of the day for which it was logged that his tokens are used up */
	uint64_t sessions_told; /* when it was logged last that he has too many, us */
	struct engine_usage sum;
};

/* Work of the last minute, a bucket a second. */
#define RATE_BUCKETS 60
struct rate {
	uint64_t second[RATE_BUCKETS], tok[RATE_BUCKETS], busy_us[RATE_BUCKETS];
};

/* What the command line fixed; it wins over every configuration file, also after a reload. */
struct options {
	const char *model, *socket, *config;
	uint32_t threads, context; /* 0: not given */
	bool has_vram;
	uint64_t vram_bytes; /* as config.vram_budget_bytes */
};

struct daemon {
	struct options options;
	struct config config;
	sd_event *event;
	uint64_t started_us;

	int listen_fd;
	int stored_model_fd; /* of an earlier run, from systemd's store; -1: none. Used when the file has lost its name */
	char *socket_path; /* NULL: handed over by systemd; else ours to remove */
	dev_t socket_dev;
	ino_t socket_ino;
	sd_event_source *listen_source, *accept_pause;

	struct mailbox mail; /* from engine and workers */
	struct workers *workers;
	struct engine *engine;

	enum service_state state;
	char *reason; /* of UNAVAILABLE: why, and what to do */
	enum error_code reason_code;
	struct model *model; /* what requests are prepared with; NULL unless loaded once */
	struct model_id {    /* which file that is */
		uint64_t dev, ino, size, mtime_ns;
	} model_id, loading_id;
	struct engine_config engine_config; /* what the engine has */
	struct engine_load *loading;        /* with the engine */
	char *chosen_path;  /* by LoadModel, until the service ends; NULL: the configured one */
	char *loading_path; /* becomes chosen_path when it has been loaded */
	bool unloaded;      /* by UnloadModel: a reload does not undo it */
	bool reload_again;  /* SIGHUP came meanwhile */
	struct engine_stats stats;
	uint64_t card_since_us; /* stats.card has been in its state; 0: since the start */
	bool ready_sent;

	struct session *sessions;
	size_t n_sessions;
	sd_event_source *session_timer;

	struct request *requests, *last_request; /* in order of arrival, until they are done */
	size_t n_requests;
	uint64_t next_request;
	uint64_t n_requests_total, n_prompt_tok, n_generated_tok;
	struct rate prefill_rate, decode_rate;
	struct uid_usage *usage;
	size_t n_usage;

	struct conn *conns;
	size_t n_conns;

	const char *state_dir, *runtime_dir; /* of systemd, or NULL */
	struct cpu_tiles tiles;              /* of this machine's products */
	struct policy *policy;
	struct uses uses;
	struct quota *quota;
	sd_event_source *quota_timer, *idle_timer, *pressure_source;
	uint64_t pressure_us; /* when it was reacted to last */

	struct memory *memory; /* NULL: cannot be seen */
	sd_event_source *budget_timer, *host_idle_timer;
	uint64_t memory_available, budget_looked_us, budget_told_us, budget_logged_us;
	uint64_t budget_steps_down, budget_steps_up;
	bool pressure_own; /* the notice is of our own control group, not of the machine */
	uint64_t pressure_logged_us;
	bool budget_fell; /* it moved down last */
	bool budget_low;  /* it was told that the budget went down */

	sd_event_source *latency_timer;
	uint64_t budget_last;    /* what was set last: the engine may have gone below */
	struct feed *feed;       /* of the loaded model, while its experts are managed */
	char *tier_reason;       /* why they lie where they do; NULL: none loaded */
	const char *budget_note; /* told last, see engine.h */
	int heat_error;          /* told last */
	size_t n_tracing;        /* connections that record routing */
	int oomd_fd;             /* systemd-oomd asks here before it kills; -1: not set up */
	sd_event_source *oomd_source, *broken_timer;
	uint64_t broken_wait_us;
	bool quota_failed; /* told once */
	struct lease *leases;
	size_t n_leases;
	sd_event_source *gpu_timer;      /* while there is a card to look at */
	enum engine_card_state gpu_told; /* logged last */
	struct sleep *sleep;             /* NULL: logind was never in reach */
	struct bus *bus;

	sd_event_source *mail_source, *stop_timer, *stop_deadline;
	bool engine_quit; /* the engine was told to end */
};

/* service.c */
void service_set_state(struct daemon *d, enum service_state state);
int service_post_load(struct daemon *d, char *path); /* path: taken; NULL unloads. -ENOMEM */
int service_start(struct daemon *d);                 /* mailbox, workers, engine, first load */
int service_read_config(struct daemon *d);           /* -errno: the one in force stays */
void service_reload(struct daemon *d); /* SIGHUP: configuration, and the model if it changed */
void service_stop(struct daemon *d); /* SIGTERM: drain, then end the event loop; a second call ends at once */
void service_check_stop(struct daemon *d); /* called when something ended: is the draining over? */
void service_done(struct daemon *d);
/* Another model of the models directory, by name; requests that run are finished first. -ENOENT: there is none of this name; -EBUSY: one
 * is being loaded. make_default: it is the default from now on. */
int service_load_model(struct daemon *d, const char *name, bool make_default, char **ret_error);
int service_unload_model(struct daemon *d); /* -EBUSY */
void models_store_fd(struct daemon *d); /* hands the open model to systemd's store, for the next run */
const char *models_notice(const struct daemon *d); /* what comes with every answer of this model; NULL: nothing */
char *models_path(const struct daemon *d); /* the file to load now; malloc'd, NULL: out of memory */
int service_open_quota(struct daemon *d);
int service_read_policy(struct daemon *d); /* -errno: the one in force stays */
void service_set_stats(struct daemon *d, const struct engine_stats *stats);
void service_save_quota(struct daemon *d); /* soon: many changes are one write */
/* Something that keeps the service from idling came or went. */
void service_touch(struct daemon *d);
const char *service_state_to_string(enum service_state s);
/* ERROR_NONE when requests can be taken; else why not, with a text that says what to do. */
enum error_code service_check(const struct daemon *d, const char **ret_text);
/* Clones s for c's current call, and answers it when the engine has. */
void service_clone(struct daemon *d, struct conn *c, struct session *s, bool keep);
/* The same, and whether policy lets this client use the model. */
enum error_code service_check_client(const struct conn *c, const char **ret_text);
uint64_t rate_per_second_milli(const struct rate *r);
struct uid_usage *usage_of(struct daemon *d, uid_t uid); /* NULL: out of memory */
