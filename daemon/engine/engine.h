/* SPDX-License-Identifier: MIT */
/*
 * engine.h: the engine thread: it owns model, backend, KV arena and what sessions remember, and runs requests step by step.
 *
 * Several users' requests are at work in turns, one batch at a time (sched.h). The loop thread hands over mail (requests, sessions to free or clone, a model to load) and gets mail back; nothing else is shared
 * but two flags in each request that the loop may raise at any time. A request belongs to the engine from engine_post() until it
 * comes back as EVENT_DONE; every request comes back exactly once. Refuses to know sockets, users and JSON.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/engine/reply.h"
#include "daemon/errors.h"
#include "daemon/model/model.h"
#include "daemon/model/sample.h"
#include "daemon/residency/residency.h"
#include "daemon/sched.h"
#include "daemon/worker.h"
#include "kernels/cpu/cpu.h"

struct engine;
struct engine_session;
struct run;

enum engine_mail {
	ENGINE_LOAD,    /* struct engine_load; waits until no request is left */
	ENGINE_REQUEST, /* struct engine_request */
	ENGINE_FREE,    /* struct engine_session: gone for good */
	ENGINE_CLONE,   /* struct engine_clone */
	ENGINE_WAKE,    /* static: look at the flags */
	ENGINE_SHRINK,  /* static: idle sessions forget their states */
	ENGINE_RELEASE, /* static: idle for long: experts leave the memory */
	ENGINE_INSPECT, /* struct engine_inspect */
	ENGINE_FEED,    /* struct engine_feed */
	ENGINE_LOOK,    /* static: how much of the card is free; is a lost one back? */
	ENGINE_SUSPEND, /* static: the machine goes to sleep, the card's contents are lost */
	ENGINE_RESUME,  /* static: it woke up */
	ENGINE_QUIT,    /* static: end what runs, return everything, stop */
};

enum engine_event_kind {
	EVENT_LOADED = 100, /* struct engine_load */
	EVENT_CLONED,       /* struct engine_clone */
	EVENT_PROGRESS,     /* struct engine_event */
	EVENT_DONE,         /* struct engine_request */
	EVENT_INSPECTED,    /* struct engine_inspect */
	EVENT_TRACE,        /* struct engine_trace */
	EVENT_CARD,         /* struct engine_card_event: it is used from now on, or no more */
	EVENT_SUSPENDED,    /* struct mail, malloc'd: nothing is in the card's memory any more */
};

/* The GPU and what of its memory is ours. */
struct engine_card_config {
	bool off;
	uint64_t budget_bytes;  /* of all that we take of it; 0: what is free, less the reserve */
	uint64_t reserve_bytes; /* what others can take at any instant */
};

struct engine_config {
	uint32_t threads, context, batch_tok;
	struct cpu_tiles tiles;
	struct engine_card_config card;
	uint64_t kv_bytes_max; /* 0: auto */
	int kv_f16;            /* -1: as the weights ask */
	struct residency_config residency;
};

/* batch_tok 0: so many, or the second where experts have to be read: each is read once a batch. */
#define ENGINE_BATCH_TOK         128
#define ENGINE_BATCH_TOK_MANAGED 512

/* The GPU as far as there is one. */
struct engine_card {
	enum engine_card_state {
		ENGINE_CARD_NONE,   /* none, or not to be used: why says it */
		ENGINE_CARD_ACTIVE, /* trunk, KV and the hottest experts are on it */
		ENGINE_CARD_DEGRADED, /* the CPU computes what the card should: lost, asleep, too full; it is tried again */
	} state;
	char name[96];       /* printable ASCII; "" when none was ever seen */
	char why[256];       /* not ACTIVE: one line for people */
	char code[32];       /* what the kernels come from: "binary", "ptx", "emulator"... */
	int driver;          /* 1000 * major + 10 * minor of CUDA */
	unsigned capability; /* 75 is 7.5 */
	bool emulator;       /* not a GPU at all: for tests */
	uint64_t total_bytes;
	uint64_t n_lost; /* times that it was given up, since the start */
};

/* What the loop may publish; a copy travels with every EVENT_DONE, EVENT_LOADED and EVENT_CLONED. */
struct engine_stats {
	uint64_t kv_bytes_used, kv_bytes_max; /* KV pages and recurrent states of all sessions */
	uint64_t n_evicted; /* sessions that were made to forget their state, since the start */
	uint32_t context, threads;
	const char *backend; /* static */
	bool model_broken; /* the file was changed or cannot be read any more: requests fail until it is loaded anew */
	int heat_error; /* -errno: the heat could not be saved */
	const char *budget_note; /* static; why the engine itself lowered the budget last; NULL: it has not */
	enum residency_tier tier;
	struct engine_card card;
};

/* The card is used from now on, or no more. */
struct engine_card_event {
	struct mail mail;
	struct engine_stats stats;
};

/* Where the blocks are: asked by the loop, filled by the engine between two steps. */
struct engine_inspect {
	struct mail mail;
	bool want_blocks;
	bool settle; /* first what the loop said about memory is done */
	/* result */
	bool loaded;
	struct residency_stats stats;
	uint64_t compute_major_faults;
	uint32_t n_layers;
	struct residency_layer_info *layers; /* malloc'd */
	uint16_t *heat; /* of all layers' experts one after the other, when asked for; malloc'd */
	char *place;
};
void engine_inspect_free(struct engine_inspect *i);

/* The feed of the loaded model. Freed by the engine. */
struct engine_feed {
	struct mail mail;
	const struct feed *feed;
	const struct model *model; /* whose */
};

/* Routing of one decoded token, a line of a trace file. */
struct engine_trace {
	struct mail mail;
	struct buf line;
};
void engine_trace_free(struct engine_trace *t);

struct engine_load {
	struct mail mail;
	char *path; /* owned; NULL: unload, and load nothing */
	struct engine_config config;
	/* result */
	struct model *model; /* a reference for the loop; NULL: failed, the engine keeps what it had */
	char *error;
	char *tier_reason; /* why the experts lie where they do */
	int err;
	struct engine_stats stats;
};

struct engine_clone {
	struct mail mail;
	struct engine_session *from, *to;
	uint64_t kv_bytes_max; /* of the user; UINT64_MAX: the service's */
	int err;
	struct engine_stats stats;
};

struct engine_usage {
	uint64_t prompt_tok, cached_tok, answer_tok, thought_tok;
	uint64_t queue_us, prefill_us, decode_us;
};

struct engine_request {
	struct mail mail;
	struct sched_entry sched;
	/* What to do: filled by the loop and the preparing worker. */
	struct engine_session *session; /* NULL: a conversation of this one request */
	struct model *model;            /* reference: whose vocabulary the prompt is in */
	bool chat, special;
	struct tokens prompt;
	size_t answer_start; /* as struct template_prompt */
	bool thinking_open;
	int64_t max_tok, max_thinking_tok;
	uint32_t context_max;  /* of the user; 0: the service's */
	uint64_t kv_bytes_max; /* of the user; UINT64_MAX: the service's */
	struct sample_params sample;
	const char *const *stop;
	size_t n_stop;
	uint64_t accepted_us; /* now_us() of arrival */
	/* Raised by the loop at any time. */
	atomic_bool cancel; /* stop at the next step; the session stays usable at once */
	atomic_bool gone; /* nobody will hear the answer: stop within a layer, at the price of the session's state */
	struct run *run;         /* the engine's */
	uint64_t reserved_bytes; /* the engine's: what it may come to need */
	/* The outcome. */
	enum error_code error;
	char *error_text; /* NULL: the code's own */
	enum reply_stop stop_reason;
	struct engine_usage usage;
	size_t context_used;
	struct engine_stats stats;
};

/* A step's outcome: prefill progress (total > 0) or a token. */
struct engine_event {
	struct mail mail;
	struct engine_request *req;
	uint64_t prefill_done, prefill_total;
	struct buf text[2]; /* by enum reply_channel */
	bool has_logprob;
	struct logprob chosen, top[SAMPLE_LOGPROBS_MAX];
	size_t n_top;
	uint32_t n_prefill_tok, n_decode_tok; /* computed in this step */
	uint64_t busy_us;
};
void engine_event_free(struct engine_event *e);

int engine_new(struct mailbox *to_loop, struct engine **ret);
void engine_post(struct engine *e, struct mail *m);
void engine_wake(struct engine *e);
void engine_shrink(struct engine *e);  /* memory is short */
void engine_release(struct engine *e); /* idle for long */
/* To be called each second while a card is used or waited for (stats.card.state is not NONE). */
void engine_look(struct engine *e);
/* Before the machine sleeps: EVENT_SUSPENDED comes when the card's context is gone. After: the card is taken up again. */
void engine_suspend(struct engine *e);
void engine_resume(struct engine *e);
/* What may be set and seen without mail. Lives as long as the engine. */
struct residency_shared *engine_shared(struct engine *e);
void engine_record(struct engine *e, bool record); /* EVENT_TRACE for each decoded token */
/* A model that has not begun to load comes back with -ECANCELED from here on. */
void engine_refuse_loads(struct engine *e);
/* Asks the thread to end: running and waiting requests come back with ERROR_STOPPING. engine_join() waits for it (its last mail may be
 * taken then), engine_free() joins too and frees what sessions are left. */
void engine_quit(struct engine *e);
void engine_join(struct engine *e);
struct engine *engine_free(struct engine *e);

/* An empty memory, made by the loop, used and freed by the engine only. NULL: out of memory. engine_session_free() hands it over;
 * no request may be using it. */
struct engine_session *engine_session_new(uint32_t user);
void engine_session_free(struct engine *e, struct engine_session *s);
