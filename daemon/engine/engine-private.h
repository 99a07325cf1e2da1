/* SPDX-License-Identifier: MIT */
/*
 * engine-private.h: what engine.c (the thread, memory, sessions) and run.c (one request's steps) share. Engine thread only, but for the
 * inbox and the wake flag.
 */
#pragma once

#include "daemon/engine/engine.h"
#include "daemon/engine/graph.h"
#include "daemon/engine/state.h"

#include <inttypes.h>

struct engine_session {
	struct mail mail; /* as ENGINE_FREE */
	struct engine_session *prev, *next;
	bool linked;
	uint32_t user;
	bool running;         /* a request is at work on it: its state stays */
	bool open_turn;       /* the last answer's end-of-turn tokens are not in tokens yet */
	struct tokens tokens; /* the conversation, without dropped thoughts */
	struct state *state;  /* NULL: forgotten or never evaluated */
	size_t n_valid;       /* how many of tokens the state has evaluated in this order */
	uint64_t last_used;   /* engine->clock */
	uint16_t *heat; /* of the model's blocks, as this conversation used them; NULL: none yet */
};

struct engine {
	struct mailbox inbox, *out;
	pthread_t thread;
	struct mail wake, shrink, release, look, suspend, resume, quit_mail;
	atomic_bool wake_posted, shrink_posted, release_posted, look_posted, suspend_posted,
		resume_posted;
	atomic_bool no_loads, record;
	bool quit_posted, joined; /* loop thread */
	bool quit;
	struct engine_load *load; /* waits for the last request */
	struct sched sched;
	struct engine_session *sessions; /* every one that holds anything */
	uint64_t clock;                  /* counts uses */
	struct model *model;             /* NULL: none loaded */
	struct backend *backend;         /* what computes: cpu or gpu */
	struct backend *cpu, *gpu;       /* gpu: NULL while card is */
	struct residency *residency;
	struct memory *memory;   /* NULL: cannot be seen */
	uint64_t faults_at_load; /* major faults of engine and compute threads by then */
	uint64_t base_bytes;     /* anonymous memory of the process before any model */
	struct residency_shared shared;
	bool model_broken;
	uint64_t n_traced;      /* tokens whose routing was recorded */
	uint64_t heat_saved_us; /* when */
	struct kv_arena *arena; /* the backend's: one of the two */
	struct kv_arena *cpu_arena, *card_arena;
	bool kv_f16;
	float *logits;         /* n_vocab */
	uint64_t kv_bytes_max; /* of the arena in use, with recurrent states */
	uint64_t cpu_kv_bytes_max, kv_least_bytes;
	uint32_t context, threads, batch_tok;
	uint32_t cpu_batch_tok, scratch_batch_tok; /* scratch: what a batch may have at most */
	uint32_t max_runs; /* sequences at work at a time: the card has room for so many states */
	/* The card: engine-card.c. */
	struct card *card; /* NULL: none, or not now */
	struct engine_card_config card_config;
	struct engine_card card_state;
	uint64_t retry_us, retry_delay_us;
	unsigned card_tries; /* in a row that failed */
	bool asleep;
	uint64_t n_evicted; /* sessions that were made to forget */
};

/* One step of a request: begins it if it has not begun, returns it when it is done. Others may be at work in between. */
void run_step(struct engine *e, struct engine_request *req);

void run_cancel(struct engine *e, struct engine_request *req); /* ends one that has begun, and returns it */
void engine_return(struct engine *e, struct engine_request *req);
int engine_session_begin(struct engine *e, struct engine_session *s); /* links, marks as used, makes a state */
void engine_session_drop(struct engine *e, struct engine_session *s);
/* Room for n_new_tok more positions of s, within kv_bytes_max in all and user_bytes_max of its user; idle ones forget their state for it.
 * -ENOSPC. */
int engine_charge(struct engine *e, const struct engine_session *s, size_t n_new_tok,
		  uint64_t user_bytes_max);
bool engine_make_room(struct engine *e, const struct engine_session *keep); /* false: nobody left to forget */
uint64_t engine_kv_bytes(const struct engine *e);
uint64_t engine_host_bytes(const struct engine *e); /* what sessions take of the host's memory */
void engine_forget_all(struct engine *e); /* all sessions' states, also of requests at work: run.c evaluates their tokens again */

/* engine-card.c. start: after a model was loaded; stop: before it goes. lost: after -ENODEV; false: there was no card. */
void engine_card_start(struct engine *e);
void engine_card_stop(struct engine *e);
bool engine_card_lost(struct engine *e);
void engine_card_look(struct engine *e);
void engine_card_suspend(struct engine *e);
void engine_card_resume(struct engine *e);
void engine_stats_fill(const struct engine *e, struct engine_stats *ret);
