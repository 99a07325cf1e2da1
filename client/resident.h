/* SPDX-License-Identifier: MIT */
/*
 * resident.h: talk to residentd, the machine's shared language model.
 *
 * A connection (struct resident) belongs to one thread at a time; different connections may be used
 * from different threads. The library has no other state, starts no threads, installs no signal
 * handlers, never raises SIGPIPE, and writes nothing to standard error.
 *
 * Functions that return int return 0 (or what they say), or a negative code: -errno for what
 * happened here (-ECONNREFUSED, -ENOMEM, -EBUSY...), -RESIDENT_E_... for what the service said.
 * resident_last_error() has the text. After -EBUSY, -EINVAL, -EILSEQ, -E2BIG and -RESIDENT_E_...
 * the connection is as good as before, but for -RESIDENT_E_TOO_LARGE, after which the service closes
 * it; also after -ETIMEDOUT and -EINTR of resident_wait(). After anything else it can only be
 * closed.
 *
 * Text is UTF-8, NUL-terminated. Times are microseconds (_us) or milliseconds (_ms), sizes bytes.
 *
 * struct resident_session and struct resident_options begin with their size (set it to sizeof), so
 * that they can grow; zero in any other field means "the default". struct resident_message, of which
 * there are arrays, has room reserved instead, and struct resident_logit_bias stays as it is.
 * Structures that the library hands out only ever grow at their end, and stay valid until the next
 * call on the connection (events: until the callback returns).
 */
#ifndef RESIDENT_H
#define RESIDENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RESIDENT_SOCKET "/run/residentd/resident.sock"

/* What the service can answer: 10000 + the number of the error on the wire (a later service may
 * know more of them). */
enum resident_error_code {
	RESIDENT_E_NO_MODEL = 10001,        /* no model is installed; the message says what to do */
	RESIDENT_E_LOADING = 10002,         /* the model is being loaded: retry */
	RESIDENT_E_MODEL_BROKEN = 10003,    /* the model file cannot be used */
	RESIDENT_E_NOT_SUPPORTED = 10004,   /* this model or this service cannot do it */
	RESIDENT_E_INVALID_REQUEST = 10005, /* the message names the parameter */
	RESIDENT_E_TOO_LARGE = 10006,       /* over the service's message size; it then closes */
	RESIDENT_E_NO_SUCH_SESSION = 10007, /* never there, ended, or another user's */
	RESIDENT_E_SESSION_BUSY = 10008,    /* a request runs in this session */
	RESIDENT_E_TOO_MANY_SESSIONS = 10009, /* of this user, or in all */
	RESIDENT_E_QUEUE_FULL = 10010,        /* retry later */
	RESIDENT_E_CONTEXT_FULL = 10011,      /* the conversation does not fit into the context */
	RESIDENT_E_NO_MEMORY = 10012,         /* the service is short of memory: retry later */
	RESIDENT_E_NOT_AUTHORIZED = 10013,
	RESIDENT_E_CANCELLED = 10014,
	RESIDENT_E_STOPPING = 10015,       /* the service shuts down */
	RESIDENT_E_INTERNAL = 10016,       /* a defect of the service */
	RESIDENT_E_QUOTA_EXCEEDED = 10017, /* today's tokens are used up: retry tomorrow */
	RESIDENT_E_NO_SUCH_MODEL = 10018,
};

struct resident_error {
	int code;            /* as returned: negative; 0: no call has failed yet */
	const char *message; /* one line for people, never NULL; control characters are possible */
	uint32_t retry_after_ms; /* when a retry may help; 0: no hint */
};

struct resident; /* one connection */

/* ---- connection ---- */

/* Connects to path; NULL: to $RESIDENTD_SOCKET (not in set-uid programs), or else RESIDENT_SOCKET.
 * 0, or -errno of connect(2); -ENAMETOOLONG. */
int resident_connect(const char *path, struct resident **ret);
/* The same over a connected stream socket, which belongs to the library from here on, also when
 * this fails. */
int resident_connect_fd(int fd, struct resident **ret);
/* The path that resident_connect(NULL) uses. */
const char *resident_socket_path(void);
/* Closes; a request that still runs is cancelled by the service. Accepts NULL; returns NULL. Never
 * from a callback. */
struct resident *resident_close(struct resident *r);

/* How long a call may wait for its answer; default 30 s, 0: for ever. Does not concern the requests
 * below, which may take hours. A call that timed out returns -ETIMEDOUT and leaves the connection
 * unusable. */
void resident_set_timeout(struct resident *r, uint32_t timeout_ms);

/* The last failure on this connection; never NULL. */
const struct resident_error *resident_last_error(const struct resident *r);
/* A general text for any code that a function returned. Static. */
const char *resident_strerror(int code);

/* ---- the service ---- */

struct resident_model {
	const char *name, *architecture;
	uint64_t parameters, weight_bytes;
	uint32_t context_max, context_trained; /* tokens */
	bool chat;                             /* false: only resident_complete() */
	bool thinking;                         /* can think before it answers */
};

struct resident_availability {
	const char *state;                  /* "available", "loading", "unavailable", "stopping" */
	const char *reason;                 /* why it is not available, and what to do; or NULL */
	const struct resident_model *model; /* NULL: none */
	uint32_t sessions, queued;
	uint32_t retry_after_ms;
};

/* What the service knows of a GPU; strings are NULL where it knows nothing. */
struct resident_gpu {
	const char *state; /* "none", "active", "degraded": the CPU computes in its place */
	const char *why;   /* it is not active; one line for people */
	const char *name, *driver, *capability; /* driver, capability: of CUDA, "12.2", "8.6" */
	const char *code;                       /* of its kernels: "binary", "ptx", "emulator" */
	bool emulator;                          /* no GPU at all: its speed means nothing */
	uint64_t total_bytes, lost;             /* lost: times that it was given up */
	uint64_t state_s;                       /* how long it has been in its state */
};

struct resident_status {
	const char *version, *state, *reason /* or NULL */;
	const struct resident_model *model; /* NULL: none */
	const char *backend;
	uint32_t pid, threads, sessions, sessions_own, queued, running;
	uint64_t uptime_s, requests_total, prompt_tokens_total, generated_tokens_total;
	double prefill_tokens_per_second, decode_tokens_per_second; /* of the last minute; 0: idle */
	uint64_t rss_bytes, rss_anon_bytes, rss_file_bytes, kv_bytes_used, kv_bytes_max;
	const char *experts;            /* where the model's experts lie, and why; NULL: no model */
	uint64_t budget_bytes;          /* memory that the model may take now */
	const struct resident_gpu *gpu; /* NULL: the service does not say */
};

int resident_get_availability(struct resident *r, const struct resident_availability **ret);
int resident_get_status(struct resident *r, const struct resident_status **ret);

/* The tokens of a text; special: "<|im_end|>" and the like are control tokens, not text. */
int resident_tokenize(struct resident *r, const char *text, bool special, const int32_t **ret,
		      size_t *ret_n);

/* Any other method of the service: parameters and reply are JSON objects as text (parameters may be
 * NULL; *ret_reply is malloc'd). A method without a dot is one of org.residentd.Inference. -EINVAL:
 * parameters are no JSON object, or method is no method's name; then nothing is sent, since the
 * service would close the connection. */
int resident_call(struct resident *r, const char *method, const char *parameters, char **ret_reply);

/* ---- sessions: the service keeps the conversation, only new messages are sent ---- */

struct resident_session {
	size_t size;
	char id[64];
	uint64_t context_used, context_max; /* tokens */
	bool resumed;
};

/* Opens a session. keep: it outlives the connection (it ends by resident_close_session() or when
 * unused for long). resume: the id of a kept session of the same user to take up, or NULL.
 * -RESIDENT_E_NO_SUCH_SESSION: the service has forgotten it. */
int resident_open_session(struct resident *r, bool keep, const char *resume,
			  struct resident_session *ret);
/* A second session with the same history. */
int resident_clone_session(struct resident *r, const char *id, bool keep, struct resident_session *ret);
int resident_close_session(struct resident *r, const char *id);

/* ---- requests ---- */

struct resident_message {
	const char *role; /* "system", "user" or "assistant" */
	const char *content;
	const char *reasoning;   /* the thought of an assistant's earlier turn, or NULL */
	const void *reserved[5]; /* NULL */
};

struct resident_logit_bias {
	int32_t token;
	double bias; /* added to the logit */
};

/* Which of the numbers in struct resident_options are set. */
#define RESIDENT_MAX_TOKENS          (UINT64_C(1) << 0)
#define RESIDENT_MAX_THINKING_TOKENS (UINT64_C(1) << 1)
#define RESIDENT_TEMPERATURE         (UINT64_C(1) << 2)
#define RESIDENT_TOP_K               (UINT64_C(1) << 3)
#define RESIDENT_TOP_P               (UINT64_C(1) << 4)
#define RESIDENT_MIN_P               (UINT64_C(1) << 5)
#define RESIDENT_TYPICAL_P           (UINT64_C(1) << 6)
#define RESIDENT_REPEAT_PENALTY      (UINT64_C(1) << 7)
#define RESIDENT_PRESENCE_PENALTY    (UINT64_C(1) << 8)
#define RESIDENT_FREQUENCY_PENALTY   (UINT64_C(1) << 9)
#define RESIDENT_PENALTY_LAST_TOKENS (UINT64_C(1) << 10)
#define RESIDENT_SEED                (UINT64_C(1) << 11)
#define RESIDENT_TOP_LOGPROBS        (UINT64_C(1) << 12)

/*
 * How to answer. A number counts when its bit is in `set` (0 is a value of its own for most of
 * them: temperature 0 is greedy, max_thinking_tokens 0 switches thinking off); a number that is not
 * 0 and lacks its bit is -EINVAL. Ranges are checked by the service.
 */
struct resident_options {
	size_t size;
	uint64_t set;
	int64_t max_tokens; /* of the visible answer; in a chat up to 64 more let it end its sentence */
	int64_t max_thinking_tokens; /* of the thought */
	double temperature;
	int64_t top_k;
	double top_p, min_p, typical_p;
	double repeat_penalty, presence_penalty, frequency_penalty;
	int64_t penalty_last_tokens; /* how far back the penalties look */
	int64_t seed;
	int64_t top_logprobs;    /* 0 to 20 alternatives of each token, in the events */
	const char *const *stop; /* NULL-terminated list of strings that end the answer, or NULL */
	const struct resident_logit_bias *logit_bias;
	size_t n_logit_bias;
	/* "chat", "code", "small" or "best", or NULL: -RESIDENT_E_NO_SUCH_MODEL when the administrator
	 * says that the loaded model is not for that. */
	const char *want;
};

struct resident_usage {
	uint64_t prompt_tokens, cached_tokens; /* cached: of the prompt, without work */
	uint64_t answer_tokens, thought_tokens;
	uint64_t queue_us, prefill_us, decode_us;
};

struct resident_logprob {
	int32_t token;
	double logprob;
	const char *text;
	const struct resident_logprob *top; /* the best alternatives; NULL in these themselves */
	size_t n_top;
};

enum resident_event_type {
	RESIDENT_EVENT_QUEUED = 1,  /* position: requests before this one */
	RESIDENT_EVENT_PREFILL = 2, /* done of total tokens of the prompt */
	RESIDENT_EVENT_THOUGHT = 3, /* text */
	RESIDENT_EVENT_ANSWER = 4,  /* text, whole characters */
	RESIDENT_EVENT_DONE = 5,    /* last: stop_reason, usage, context_used */
	RESIDENT_EVENT_FAILED = 6,  /* last, in place of DONE: error */
};

/* Ignore event types that you do not know. */
struct resident_event {
	enum resident_event_type type;
	const char *request; /* for resident_cancel_request(); "" before the service has named it */
	const char *text;
	size_t text_len;
	uint64_t position, done, total;
	const struct resident_logprob *logprobs; /* of the tokens in text, when asked for */
	size_t n_logprobs;
	const char *stop_reason; /* "eos", "stop", "length", "context", "cancelled"; more may come */
	const struct resident_usage *usage;
	uint64_t context_used; /* tokens in the session */
	const struct resident_error *error;
	const char *notice; /* with DONE: something about the service that its user should know, or NULL */
};

/* Called from resident_process() and resident_wait() only. Return 0; anything else cancels the
 * request (its last event still comes). In a callback no function may be called on the connection
 * but resident_cancel() and resident_last_error(); others are -EBUSY. */
typedef int (*resident_event_fn)(struct resident *r, const struct resident_event *event, void *userdata);

/*
 * Each of these starts a request and returns at once; resident_wait() or resident_process() then
 * brings the events, exactly one DONE or FAILED at the end. fn may be NULL. One request at a time
 * on a connection: -EBUSY while one runs. Nothing of the arguments is used after the return but fn
 * and userdata. -EILSEQ: a text is not UTF-8; -EINVAL: a text is NULL, or see struct
 * resident_options; -E2BIG: options of a newer version of the library.
 *
 * The answer is the model's text, with one addition that is the service's: a code block (```) that is
 * open where the answer ends, also at a stop string, is closed. Not by resident_complete().
 */
/* Adds messages to a session and answers. */
int resident_send(struct resident *r, const char *session, const struct resident_message *messages,
		  size_t n, const struct resident_options *options, resident_event_fn fn,
		  void *userdata);
/* A whole conversation, without a session. */
int resident_chat(struct resident *r, const struct resident_message *messages, size_t n,
		  const struct resident_options *options, resident_event_fn fn, void *userdata);
/* Raw completion without the chat template, in a session or (NULL) without. special: see
 * resident_tokenize(); also shown in the text. */
int resident_complete(struct resident *r, const char *session, const char *prompt, bool special,
		      const struct resident_options *options, resident_event_fn fn, void *userdata);

/* Waits for the request to end, at most timeout_ms (negative: for ever). 0: done (or none was
 * running); the code of its failure; -ETIMEDOUT, or -EINTR when a signal handler ran while this
 * slept: the request goes on and the connection is good, call again. A handler that runs just before
 * it sleeps wakes nobody: who must not miss a signal polls resident_fd() beside a pipe that the
 * handler writes to. */
int resident_wait(struct resident *r, int timeout_ms);

/* For an event loop: poll resident_fd() for resident_events() (POLLIN, POLLOUT; they change with
 * every call on the connection), then call resident_process(), which never blocks. 1: a request
 * runs; 0: none does; the code of its failure, once. */
int resident_fd(const struct resident *r);
int resident_events(const struct resident *r);
int resident_process(struct resident *r);

/* Asks for the running request to end; never blocks. The last event (stop_reason "cancelled" as a
 * rule) still comes. 0 also when nothing runs. Same thread as everything else on the connection,
 * and not from a signal handler: see resident_wait(). */
int resident_cancel(struct resident *r);
/* The same for a request of the same user on another connection, hence for other threads. 1:
 * cancelled; 0: there was none. */
int resident_cancel_request(struct resident *r, const char *request);

#ifdef __cplusplus
}
#endif

#endif
