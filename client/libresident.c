/* SPDX-License-Identifier: MIT */
/*
 * libresident.c: the client library: one Varlink connection to residentd. See resident.h for the
 * contract.
 *
 * Owns the socket, the two byte buffers and whatever was handed out last; a connection belongs to
 * one thread at a time. Refuses to know what a model is or where text is shown. The service is not
 * trusted: a frame is bounded before it is stored, every field is checked for its type before it is
 * used, and a breach ends the connection with -EPROTO. Invariant: replies come in the order of the
 * calls. So whatever arrives belongs first to the Cancels of requests that are over (skip_before),
 * then to the one call or request that is under way (state), then to its own Cancel (skip_after).
 */
#include "client/resident.h"

#include "client/utf8.h"
#include "client/wire.h"
#include "daemon/base.h"
#include "daemon/errors.h"
#include "daemon/varlink.h"

#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#define INTERFACE          "org.residentd.Inference."
#define READ_CHUNK         (64u << 10)
#define READS_MAX          16 /* in one resident_process(), so that it returns to the caller's loop */
#define TIMEOUT_MS_DEFAULT 30000
#define REQUEST_ID_MAX     63
#define E_BASE             10000 /* enum resident_error_code is this + enum error_code */

_Static_assert(RESIDENT_E_NO_MODEL == E_BASE + ERROR_NO_MODEL, "codes are the numbers of the wire");
_Static_assert(RESIDENT_E_INTERNAL == E_BASE + ERROR_INTERNAL, "codes are the numbers of the wire");
_Static_assert(RESIDENT_E_NO_SUCH_MODEL == E_BASE + ERROR_CODE_MAX - 1, "every error has a public code");

enum state {
	STATE_IDLE,
	STATE_CALL,    /* one reply, stored in reply */
	STATE_REQUEST, /* frames until one without `continues` */
};

struct resident {
	int fd;
	int broken;      /* why the connection is of no use any more: -errno */
	bool write_gone; /* the peer reads no more; what it said before is still worth reading */
	bool in_callback;
	uint32_t timeout_ms;

	enum state state;
	unsigned int skip_before, skip_after; /* replies to Cancel; see the head */
	int call_result;

	resident_event_fn fn;
	void *userdata;
	char request[REQUEST_ID_MAX + 1];
	bool finished; /* result is still to be returned by resident_process() */
	int result;

	struct buf in, out;
	size_t in_scanned;

	struct resident_error error;
	char *error_text; /* error.message, when it is ours to free */

	/* Handed out until the next call; strings point into reply. */
	json_t *reply;
	struct resident_model model;
	struct resident_availability availability;
	struct resident_status status;
	struct resident_gpu gpu;
	int32_t *tokens;
};

/* ---- errors ---- */

/* Remembers and returns code. Takes message (malloc'd; NULL when memory was short). */
static int set_error(struct resident *r, int code, uint32_t retry_after_ms, char *message)
{
	free(r->error_text);
	r->error_text = message;
	r->error = (struct resident_error){
		.code = code,
		.message = message ? message : resident_strerror(code),
		.retry_after_ms = retry_after_ms,
	};
	return code;
}

_printf_(3, 4) static int error_here(struct resident *r, int code, const char *format, ...)
{
	char *s = NULL;
	va_list ap;

	va_start(ap, format);
	if (vasprintf(&s, format, ap) < 0)
		s = NULL;
	va_end(ap);
	return set_error(r, code, 0, s);
}

_public_ const struct resident_error *resident_last_error(const struct resident *r)
{
	return &r->error;
}

_public_ const char *resident_strerror(int code)
{
	const char *s;

	if (code > -E_BASE) {
		s = strerrordesc_np(code < 0 ? -code : code);
		return s ? s : "unknown error";
	}
	if (code <= -(E_BASE + (int)ERROR_CODE_MAX))
		return "an error of the service that this library does not know";
	return error_by_code((enum error_code)(-code - E_BASE))->text;
}

/* An error frame to a code and a text. */
static int service_error(struct resident *r, const char *name, json_t *parameters)
{
	const struct error_entry *e = error_by_varlink(name);
	const char *message = NULL, *parameter = NULL;
	int64_t number = ERROR_INTERNAL, retry = 0;
	struct args a;
	char *text = NULL;
	int n;

	/* A field that is not as it should be is worth less than the error itself. */
	args_begin(&a, parameters);
	args_i64(&a, "number", false, 1, E_BASE - 1, &number);
	args_begin(&a, parameters);
	args_str(&a, "message", false, FRAME_MAX, &message, NULL);
	args_begin(&a, parameters);
	args_str(&a, "parameter", false, FRAME_MAX, &parameter, NULL);
	args_begin(&a, parameters);
	args_i64(&a, "retry_after_ms", false, 0, UINT32_MAX, &retry);

	if (e)
		number = e->code;
	else if (streq(name, "org.varlink.service.InvalidParameter"))
		number = ERROR_INVALID_REQUEST;
	else if (startswith(name, "org.varlink.service."))
		number = ERROR_NOT_SUPPORTED;
	if (parameter)
		n = asprintf(&text, "the service refuses the parameter '%s'%s%s", parameter,
			     message ? ": " : "", message ? message : "");
	else
		n = asprintf(&text, "%s", message ? message : e ? e->text : name);
	return set_error(r, -(E_BASE + (int)number), (uint32_t)retry, n < 0 ? NULL : text);
}

/* ---- events ---- */

static int put_cancel(struct resident *r)
{
	int n;

	if (r->skip_after > 0 || r->state != STATE_REQUEST)
		return 0;
	n = varlink_put_call(&r->out, INTERFACE "Cancel", NULL, false, false);
	if (n < 0)
		return error_here(r, n, "out of memory");
	r->skip_after = 1;
	return 0;
}

static void emit(struct resident *r, struct resident_event *e)
{
	int n;

	if (!r->fn)
		return;
	e->request = r->request;
	r->in_callback = true;
	n = r->fn(r, e, r->userdata);
	r->in_callback = false;
	if (n != 0)
		put_cancel(r);
}

/* The request is over: its last event, and what resident_process() will return. */
static void finish(struct resident *r, int result, struct resident_event *last)
{
	r->state = STATE_IDLE;
	r->skip_before += r->skip_after;
	r->skip_after = 0;
	r->result = result;
	r->finished = true;
	emit(r, last);
}

static void finish_failed(struct resident *r)
{
	struct resident_error e = r->error;

	finish(r, e.code, &(struct resident_event){ .type = RESIDENT_EVENT_FAILED, .error = &e });
}

/* After this the connection can only be closed. The error is set already; returns its code. */
static int break_off(struct resident *r)
{
	int code = r->error.code;

	r->broken = code;
	if (r->state == STATE_REQUEST)
		finish_failed(r);
	r->state = STATE_IDLE;
	return code;
}

static int protocol_error(struct resident *r, const struct args *a)
{
	return error_here(r, -EPROTO, "the service does not speak the protocol: '%s' %s", a->bad,
			  a->why);
}

/* ---- replies ---- */

static void read_progress(struct resident *r, struct args *outer, json_t *progress)
{
	int64_t position = 0, done = 0, total = 0;
	struct resident_event e = {};
	const char *stage = "";
	struct args a;

	args_begin(&a, progress);
	args_str(&a, "stage", true, FRAME_MAX, &stage, NULL);
	args_i64(&a, "position", false, 0, INT64_MAX, &position);
	args_i64(&a, "done", false, 0, INT64_MAX, &done);
	args_i64(&a, "total", false, 0, INT64_MAX, &total);
	if (a.bad) {
		args_refuse(outer, a.bad, a.why);
		return;
	}
	e.position = (uint64_t)position;
	e.done = (uint64_t)done;
	e.total = (uint64_t)total;
	if (streq(stage, "queued"))
		e.type = RESIDENT_EVENT_QUEUED;
	else if (streq(stage, "prefill"))
		e.type = RESIDENT_EVENT_PREFILL;
	else
		return; /* of a later service */
	emit(r, &e);
}

/* What a frame of a request says about text. channel is NULL when it is the answer; others than
 * answer and thought are skipped. */
static void emit_text(struct resident *r, const char *channel, const char *text, size_t len,
		      const struct resident_logprob *logprobs, size_t n_logprobs)
{
	struct resident_event e = {
		.type = RESIDENT_EVENT_ANSWER,
		.text = text,
		.text_len = len,
		.logprobs = logprobs,
		.n_logprobs = n_logprobs,
	};

	if (channel && streq(channel, "thought"))
		e.type = RESIDENT_EVENT_THOUGHT;
	else if (channel && !streq(channel, "answer"))
		return;
	emit(r, &e);
}

static int finish_done(struct resident *r, struct args *a)
{
	struct resident_usage usage = {};
	struct resident_event e = { .type = RESIDENT_EVENT_DONE, .usage = &usage };
	json_t *object = NULL;
	int64_t context_used = 0;
	struct args u;

	args_str(a, "stop_reason", true, FRAME_MAX, &e.stop_reason, NULL);
	args_i64(a, "context_used", false, 0, INT64_MAX, &context_used);
	args_str(a, "notice", false, FRAME_MAX, &e.notice, NULL);
	if (args_object(a, "usage", false, &object)) {
		args_begin(&u, object);
		wire_read_usage(&u, &usage);
		if (u.bad)
			args_refuse(a, u.bad, u.why);
	}
	if (a->bad)
		return protocol_error(r, a);
	e.context_used = (uint64_t)context_used;
	finish(r, 0, &e);
	return 0;
}

static int on_request_reply(struct resident *r, json_t *parameters, bool continues)
{
	_cleanup_(freep) struct resident_logprob *logprobs = NULL;
	const char *request = NULL, *channel = NULL, *text = NULL, *thought = NULL;
	size_t text_len = 0, thought_len = 0, n_logprobs = 0;
	json_t *progress = NULL, *list = NULL;
	struct args a;
	int n;

	args_begin(&a, parameters);
	args_str(&a, "request", false, REQUEST_ID_MAX, &request, NULL);
	args_str(&a, "channel", false, FRAME_MAX, &channel, NULL);
	args_str(&a, "text", false, FRAME_MAX, &text, &text_len);
	args_str(&a, "thought", false, FRAME_MAX, &thought, &thought_len);
	args_object(&a, "progress", false, &progress);
	args_array(&a, "logprobs", false, SIZE_MAX, &list);
	if (list && !a.bad) {
		n = wire_read_logprobs(&a, list, &logprobs, &n_logprobs);
		if (n < 0)
			return error_here(r, n, "out of memory");
	}
	if (a.bad)
		return protocol_error(r, &a);
	if (request)
		snprintf(r->request, sizeof(r->request), "%s", request);
	if (progress)
		read_progress(r, &a, progress);
	if (thought_len > 0)
		emit_text(r, "thought", thought, thought_len, NULL, 0);
	if (text_len > 0 || n_logprobs > 0)
		emit_text(r, channel, text ? text : "", text_len, logprobs, n_logprobs);
	if (!continues)
		return finish_done(r, &a);
	return a.bad ? protocol_error(r, &a) : 0;
}

static int on_reply(struct resident *r, const char *error, json_t *parameters, bool continues)
{
	if (r->skip_before > 0 && !continues) {
		r->skip_before--;
		return 0;
	}
	if (r->state == STATE_IDLE || r->skip_before > 0 || (r->state == STATE_CALL && continues))
		return error_here(
			r, -EPROTO,
			"the service does not speak the protocol: a reply that nothing asked for");
	if (r->state == STATE_REQUEST && !error)
		return on_request_reply(r, parameters, continues);
	if (r->state == STATE_REQUEST) {
		service_error(r, error, parameters);
		finish_failed(r);
		return 0;
	}
	r->state = STATE_IDLE;
	r->call_result = error ? service_error(r, error, parameters) : 0;
	if (!error)
		r->reply = json_incref(parameters);
	return 0;
}

static int on_frame(struct resident *r, const char *data, size_t len)
{
	json_auto_t *msg = NULL, *none = NULL;
	_cleanup_(freep) char *why = NULL;
	json_t *parameters = NULL;
	const char *error = NULL;
	bool continues = false;
	struct args a;
	int n;

	n = varlink_parse(data, len, &msg, &why);
	if (n < 0)
		return error_here(r, n == -EBADMSG ? -EPROTO : n,
				  "the service does not speak the protocol: %s",
				  why ? why : "bad JSON");
	args_begin(&a, msg);
	args_str(&a, "error", false, FRAME_MAX, &error, NULL);
	args_bool(&a, "continues", &continues);
	args_object(&a, "parameters", false, &parameters);
	if (a.bad)
		return protocol_error(r, &a);
	if (!parameters) {
		none = json_object();
		if (!none)
			return error_here(r, -ENOMEM, "out of memory");
		parameters = none;
	}
	return on_reply(r, error, parameters, continues);
}

/* ---- bytes ---- */

static int flush_out(struct resident *r)
{
	while (r->out.len > 0 && !r->write_gone) {
		ssize_t n = send(r->fd, r->out.data, r->out.len, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n >= 0) {
			buf_consume(&r->out, (size_t)n);
		} else if (errno == EAGAIN) {
			return 0;
		} else if (errno == EPIPE || errno == ECONNRESET) {
			/* The service may have said why before it closed ("too large"): recv()
			 * finds out. */
			r->write_gone = true;
		} else if (errno != EINTR) {
			return error_here(r, -errno, "cannot write to the service: %m");
		}
	}
	if (r->write_gone || r->out.len == 0)
		buf_done(&r->out); /* a prompt may be megabytes, and private */
	return 0;
}

/* 1: there are new bytes; 0: none now. */
static int fill_in(struct resident *r)
{
	ssize_t n = buf_reserve(&r->in, READ_CHUNK);

	if (n < 0)
		return error_here(r, (int)n, "out of memory");
	n = recv(r->fd, r->in.data + r->in.len, READ_CHUNK, MSG_DONTWAIT);
	if (n > 0) {
		r->in.len += (size_t)n;
		return 1;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n < 0 && errno != ECONNRESET)
		return error_here(r, -errno, "cannot read from the service: %m");
	return error_here(r, -ECONNRESET, "the service closed the connection");
}

/* Handles the frames that are here, up to the end of a call or request: what comes behind it is not
 * to take the place of its result, and stays for the next time. */
static int take_frames(struct resident *r)
{
	bool idle = r->state == STATE_IDLE;
	size_t off = 0, len;
	int n = 0;

	while (off < r->in.len && (idle || r->state != STATE_IDLE)) {
		n = varlink_frame(r->in.data + off, r->in.len - off, FRAME_MAX, &r->in_scanned, &len);
		if (n <= 0)
			break;
		n = on_frame(r, r->in.data + off, len);
		off += len + 1;
		if (n < 0)
			break;
	}
	buf_consume(&r->in, off);
	if (r->in.len == 0 && r->in.alloc > 2 * READ_CHUNK)
		buf_done(&r->in);
	if (n == -EMSGSIZE)
		n = error_here(r, -EPROTO,
			       "the service does not speak the protocol: a frame over %u bytes",
			       FRAME_MAX);
	return n;
}

/* Moves what can be moved without waiting. 0, or why the connection is broken. */
static int step(struct resident *r)
{
	bool idle = r->state == STATE_IDLE;
	int n = r->broken;

	if (n < 0)
		return n;
	n = flush_out(r);
	if (n >= 0)
		n = take_frames(r);
	for (int i = 0; n >= 0 && i < READS_MAX && (idle || r->state != STATE_IDLE); i++) {
		n = fill_in(r);
		if (n == 0)
			break;
		if (n > 0)
			n = take_frames(r);
	}
	if (n >= 0)
		n = flush_out(r); /* a callback may have cancelled */
	return n < 0 ? break_off(r) : 0;
}

/* Waits for the socket. 0: look again; -ETIMEDOUT; -EINTR. deadline_us UINT64_MAX: for ever. */
static int wait_io(struct resident *r, uint64_t deadline_us)
{
	struct pollfd p = { .fd = r->fd, .events = (short)resident_events(r) };
	uint64_t now = now_us();
	int n, ms = -1;

	if (deadline_us != UINT64_MAX)
		ms = now >= deadline_us
			     ? 0
			     : (int)MIN((deadline_us - now + 999) / 1000, (uint64_t)INT_MAX);
	n = poll(&p, 1, ms);
	if (n > 0)
		return 0;
	return n == 0 ? -ETIMEDOUT : -errno;
}

/* ---- connection ---- */

_public_ const char *resident_socket_path(void)
{
	const char *path = secure_getenv("RESIDENTD_SOCKET");

	return path && *path ? path : RESIDENT_SOCKET;
}

_public_ int resident_connect_fd(int fd, struct resident **ret)
{
	struct resident *r = calloc(1, sizeof(*r));

	if (!r) {
		close(fd);
		return -ENOMEM;
	}
	r->fd = fd;
	r->timeout_ms = TIMEOUT_MS_DEFAULT;
	r->error.message = "";
	*ret = r;
	return 0;
}

_public_ int resident_connect(const char *path, struct resident **ret)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	/* connect() waits for room in the service's backlog, for as long as a write may wait. */
	struct timeval patience = { .tv_sec = TIMEOUT_MS_DEFAULT / 1000 };
	_cleanup_(closep) int fd = -1;

	if (!path)
		path = resident_socket_path();
	if (strlen(path) >= sizeof(addr.sun_path))
		return -ENAMETOOLONG;
	memcpy(addr.sun_path, path, strlen(path) + 1);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) < 0 ||
	    connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		return -errno;
	return resident_connect_fd(TAKE_FD(fd), ret);
}

_public_ struct resident *resident_close(struct resident *r)
{
	if (!r)
		return NULL;
	close(r->fd);
	buf_done(&r->in);
	buf_done(&r->out);
	json_decref(r->reply);
	free(r->tokens);
	free(r->error_text);
	free(r);
	return NULL;
}

_public_ void resident_set_timeout(struct resident *r, uint32_t timeout_ms)
{
	r->timeout_ms = timeout_ms;
}

_public_ int resident_fd(const struct resident *r)
{
	return r->fd;
}

_public_ int resident_events(const struct resident *r)
{
	return POLLIN | (r->out.len > 0 ? POLLOUT : 0);
}

_public_ int resident_process(struct resident *r)
{
	int n;

	if (r->in_callback)
		return -EBUSY;
	n = step(r);
	if (r->finished) {
		r->finished = false;
		return r->result;
	}
	return n < 0 ? n : r->state == STATE_REQUEST;
}

_public_ int resident_wait(struct resident *r, int timeout_ms)
{
	uint64_t deadline = timeout_ms < 0 ? UINT64_MAX : now_us() + (uint64_t)timeout_ms * 1000;
	int n;

	for (;;) {
		n = resident_process(r);
		if (n != 1)
			return n;
		n = wait_io(r, deadline);
		if (n < 0)
			return n;
	}
}

/* ---- calls ---- */

/* May a call be made now? What the last one handed out is dropped. */
static int begin(struct resident *r)
{
	if (r->in_callback)
		return -EBUSY; /* the error that the callback was given stays as it is */
	if (r->state != STATE_IDLE)
		return error_here(r, -EBUSY, "a request runs on this connection");
	if (r->broken < 0)
		return r->broken;
	if (take_frames(r) < 0) /* not to be taken for the reply to what comes now */
		return break_off(r);
	json_decref(r->reply);
	r->reply = NULL;
	return 0;
}

/* One call and its reply, in r->reply. parameters may be NULL and stay the caller's. */
static int call(struct resident *r, const char *method, json_t *parameters)
{
	uint64_t deadline = r->timeout_ms == 0 ? UINT64_MAX : now_us() + (uint64_t)r->timeout_ms * 1000;
	int n;

	n = varlink_put_call(&r->out, method, parameters, false, false);
	if (n < 0)
		return error_here(r, n, "out of memory");
	r->state = STATE_CALL;
	for (;;) {
		n = step(r);
		if (n < 0)
			return n;
		if (r->state != STATE_CALL)
			return r->call_result;
		n = wait_io(r, deadline);
		if (n == -EINTR)
			continue;
		if (n == -ETIMEDOUT)
			error_here(r, n, "the service did not answer within %u ms", r->timeout_ms);
		else if (n < 0)
			error_here(r, n, "cannot wait for the service: %s", resident_strerror(n));
		if (n < 0)
			return break_off(r);
	}
}

/* Arguments that could not be put into a message: the error for it. */
static int bad_arguments(struct resident *r, int code)
{
	switch (code) {
	case -EILSEQ: return error_here(r, code, "a text is not valid UTF-8");
	case -E2BIG:
		return error_here(r, code, "an option that this version of libresident does not know");
	case -EINVAL:
		return error_here(r, code,
				  "an argument is missing, or an option is set without its bit");
	default: return error_here(r, code, "%s", resident_strerror(code));
	}
}

static int check(struct resident *r, const struct args *a)
{
	if (!a->bad)
		return 0;
	protocol_error(r, a);
	return break_off(r);
}

_public_ int resident_get_availability(struct resident *r, const struct resident_availability **ret)
{
	struct args a;
	int n = begin(r);

	if (n == 0)
		n = call(r, INTERFACE "GetAvailability", NULL);
	if (n < 0)
		return n;
	args_begin(&a, r->reply);
	wire_read_availability(&a, &r->availability, &r->model);
	n = check(r, &a);
	if (n == 0)
		*ret = &r->availability;
	return n;
}

_public_ int resident_get_status(struct resident *r, const struct resident_status **ret)
{
	struct args a;
	int n = begin(r);

	if (n == 0)
		n = call(r, INTERFACE "GetStatus", NULL);
	if (n < 0)
		return n;
	args_begin(&a, r->reply);
	wire_read_status(&a, &r->status, &r->model, &r->gpu);
	n = check(r, &a);
	if (n == 0)
		*ret = &r->status;
	return n;
}

static int read_tokens(struct resident *r, struct args *a, size_t *ret_n)
{
	json_t *list = NULL;
	size_t n;

	args_array(a, "tokens", true, SIZE_MAX, &list);
	n = json_array_size(list);
	free(r->tokens);
	r->tokens = calloc(MAX(n, (size_t)1), sizeof(*r->tokens)); /* bounded by VARLINK_VALUES_MAX */
	if (!r->tokens)
		return error_here(r, -ENOMEM, "out of memory");
	for (size_t i = 0; i < n; i++) {
		json_t *v = json_array_get(list, i);

		if (!json_is_integer(v) || json_integer_value(v) < 0 ||
		    json_integer_value(v) > INT32_MAX) {
			args_refuse(a, "tokens", "has an item that is not a token");
			break;
		}
		r->tokens[i] = (int32_t)json_integer_value(v);
	}
	*ret_n = n;
	return check(r, a);
}

_public_ int resident_tokenize(struct resident *r, const char *text, bool special,
			       const int32_t **ret, size_t *ret_n)
{
	json_auto_t *p = NULL;
	size_t n_tokens = 0;
	struct args a;
	int n = begin(r);

	if (n < 0)
		return n;
	p = json_object();
	n = wire_put_text(p, "text", text);
	if (n == 0 && special)
		n = wire_put(p, "special", json_true());
	if (n < 0)
		return bad_arguments(r, n);
	n = call(r, INTERFACE "Tokenize", p);
	if (n < 0)
		return n;
	args_begin(&a, r->reply);
	n = read_tokens(r, &a, &n_tokens);
	if (n < 0)
		return n;
	*ret = r->tokens;
	*ret_n = n_tokens;
	return 0;
}

/* What the service would not take for a call, it does not answer but closes the connection: so this
 * asks the same function first. */
static int check_call(struct resident *r, const char *method, json_t *parameters)
{
	_cleanup_(buf_done) struct buf frame = {};
	_cleanup_(freep) char *why = NULL;
	struct varlink_call c = {};
	int n;

	if (!utf8_decodable(method, strlen(method)))
		return bad_arguments(r, -EILSEQ);
	n = varlink_put_call(&frame, method, parameters, false, false);
	if (n == 0)
		n = varlink_call_parse(frame.data, frame.len - 1, &c, &why);
	varlink_call_done(&c);
	return n < 0 ? error_here(r, n == -EBADMSG ? -EINVAL : n, "%s", why ? why : "out of memory")
		     : 0;
}

_public_ int resident_call(struct resident *r, const char *method, const char *parameters,
			   char **ret_reply)
{
	_cleanup_(freep) char *full = NULL, *why = NULL;
	json_auto_t *p = NULL;
	char *reply;
	int n = begin(r);

	if (n < 0)
		return n;
	if (!method)
		return bad_arguments(r, -EINVAL);
	if (parameters) {
		n = varlink_parse(parameters, strlen(parameters), &p, &why);
		if (n < 0)
			return error_here(r, n == -EBADMSG ? -EINVAL : n, "parameters: %s",
					  why ? why : "bad JSON");
	}
	if (asprintf(&full, "%s%s", strchr(method, '.') ? "" : INTERFACE, method) < 0) {
		full = NULL;
		return error_here(r, -ENOMEM, "out of memory");
	}
	n = check_call(r, full, p);
	if (n == 0)
		n = call(r, full, p);
	if (n < 0)
		return n;
	reply = json_dumps(r->reply, JSON_COMPACT);
	if (!reply)
		return error_here(r, -ENOMEM, "out of memory");
	*ret_reply = reply;
	return 0;
}

/* ---- sessions ---- */

/* Calls a method that answers with a session. */
static int call_session(struct resident *r, const char *method, json_t *p, struct resident_session *ret)
{
	struct resident_session s = { .size = ret->size };
	int64_t used = 0, max = 0;
	const char *id = NULL;
	struct args a;
	int n;

	n = call(r, method, p);
	if (n < 0)
		return n;
	args_begin(&a, r->reply);
	args_str(&a, "session", true, sizeof(s.id) - 1, &id, NULL);
	args_i64(&a, "context_used", true, 0, INT64_MAX, &used);
	args_i64(&a, "context_max", true, 0, INT64_MAX, &max);
	args_bool(&a, "resumed", &s.resumed);
	n = check(r, &a);
	if (n < 0)
		return n;
	snprintf(s.id, sizeof(s.id), "%s", id);
	s.context_used = (uint64_t)used;
	s.context_max = (uint64_t)max;
	memcpy(ret, &s, MIN(sizeof(s), ret->size));
	return 0;
}

static int session_parameters(const char *id, bool required, bool keep, json_t **ret)
{
	json_auto_t *p = json_object();
	int n = p ? 0 : -ENOMEM;

	if (n == 0 && (id || required))
		n = wire_put_text(p, "session", id);
	if (n == 0 && keep)
		n = wire_put(p, "keep", json_true());
	if (n == 0)
		*ret = TAKE_PTR(p);
	return n;
}

static int open_session(struct resident *r, const char *method, const char *id, bool required,
			bool keep, struct resident_session *ret)
{
	json_auto_t *p = NULL;
	int n = begin(r);

	if (n < 0)
		return n;
	if (ret->size < sizeof(*ret)) /* the size of the first version */
		return bad_arguments(r, -EINVAL);
	n = session_parameters(id, required, keep, &p);
	if (n < 0)
		return bad_arguments(r, n);
	return call_session(r, method, p, ret);
}

_public_ int resident_open_session(struct resident *r, bool keep, const char *resume,
				   struct resident_session *ret)
{
	return open_session(r, INTERFACE "OpenSession", resume, false, keep, ret);
}

_public_ int resident_clone_session(struct resident *r, const char *id, bool keep,
				    struct resident_session *ret)
{
	return open_session(r, INTERFACE "CloneSession", id, true, keep, ret);
}

_public_ int resident_close_session(struct resident *r, const char *id)
{
	json_auto_t *p = NULL;
	int n = begin(r);

	if (n < 0)
		return n;
	n = session_parameters(id, true, false, &p);
	if (n < 0)
		return bad_arguments(r, n);
	return call(r, INTERFACE "CloseSession", p);
}

/* ---- requests ---- */

/* n: whether the parameters could be made. Nothing waits here: the bytes go as far as the socket
 * takes them, the rest and any failure of the connection are resident_process()'s. */
static int start(struct resident *r, const char *method, json_t *parameters, int n,
		 resident_event_fn fn, void *userdata)
{
	if (n < 0)
		return bad_arguments(r, n);
	n = varlink_put_call(&r->out, method, parameters, true, false);
	if (n < 0)
		return error_here(r, n, "out of memory");
	r->state = STATE_REQUEST;
	r->fn = fn;
	r->userdata = userdata;
	r->request[0] = 0;
	r->finished = false;
	n = flush_out(r);
	if (n < 0) {
		r->state = STATE_IDLE; /* an error here, so no event later */
		return break_off(r);
	}
	return 0;
}

_public_ int resident_send(struct resident *r, const char *session,
			   const struct resident_message *messages, size_t n_messages,
			   const struct resident_options *options, resident_event_fn fn, void *userdata)
{
	json_auto_t *p = NULL;
	int n = begin(r);

	if (n < 0)
		return n;
	p = json_object();
	n = wire_put_text(p, "session", session);
	if (n == 0)
		n = wire_put_messages(p, messages, n_messages);
	if (n == 0)
		n = wire_put_options(p, options);
	return start(r, INTERFACE "Send", p, n, fn, userdata);
}

_public_ int resident_chat(struct resident *r, const struct resident_message *messages,
			   size_t n_messages, const struct resident_options *options,
			   resident_event_fn fn, void *userdata)
{
	json_auto_t *p = NULL;
	int n = begin(r);

	if (n < 0)
		return n;
	p = json_object();
	n = wire_put_messages(p, messages, n_messages);
	if (n == 0)
		n = wire_put_options(p, options);
	return start(r, INTERFACE "Chat", p, n, fn, userdata);
}

_public_ int resident_complete(struct resident *r, const char *session, const char *prompt,
			       bool special, const struct resident_options *options,
			       resident_event_fn fn, void *userdata)
{
	json_auto_t *p = NULL;
	int n = begin(r);

	if (n < 0)
		return n;
	p = json_object();
	n = wire_put_text(p, "prompt", prompt);
	if (n == 0 && session)
		n = wire_put_text(p, "session", session);
	if (n == 0 && special)
		n = wire_put(p, "special", json_true());
	if (n == 0)
		n = wire_put_options(p, options);
	return start(r, INTERFACE "Complete", p, n, fn, userdata);
}

_public_ int resident_cancel(struct resident *r)
{
	int n = put_cancel(r);

	/* A failure to write, and the last event that comes of it, is resident_process()'s to
	 * find. */
	if (n == 0 && !r->in_callback)
		flush_out(r);
	return n;
}

_public_ int resident_cancel_request(struct resident *r, const char *request)
{
	json_auto_t *p = NULL;
	bool cancelled = false;
	struct args a;
	int n = begin(r);

	if (n < 0)
		return n;
	p = json_object();
	n = wire_put_text(p, "request", request);
	if (n < 0)
		return bad_arguments(r, n);
	n = call(r, INTERFACE "Cancel", p);
	if (n < 0)
		return n;
	args_begin(&a, r->reply);
	args_bool(&a, "cancelled", &cancelled);
	n = check(r, &a);
	return n < 0 ? n : cancelled;
}
