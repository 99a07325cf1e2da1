/* SPDX-License-Identifier: MIT */
/*
 * test-client.c: libresident against a service that is a list of lines, played by a thread on the
 * other end of a socket.
 */
#include "tests/test.h"

#include "client/resident.h"
#include "daemon/base.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

/*
 * One line of the play: "<TEXT": the next frame from the client is TEXT; "?TEXT": it contains TEXT;
 * ">TEXT": send TEXT and a NUL; "~TEXT": the same byte by byte; "|TEXT|TEXT|": several in one
 * piece; "=TEXT": send TEXT as it is; ".": wait 100 ms; "!": close. At the end of the list the
 * socket stays open until the client closes it.
 */
struct play {
	int fd;
	const char *const *lines;
	char *problem; /* what the client did wrong, malloc'd */
	pthread_t thread;
};

static void send_all(int fd, const char *data, size_t len, size_t step)
{
	for (size_t i = 0; i < len; i += step)
		if (send(fd, data + i, MIN(step, len - i), MSG_NOSIGNAL) < 0)
			return;
}

/* Several frames in one piece, each ended by |. */
static void send_frames(int fd, const char *text)
{
	_cleanup_(freep) char *copy = strdup(text);
	size_t len = strlen(text);

	for (size_t i = 0; i < len; i++)
		if (copy[i] == '|')
			copy[i] = 0;
	send_all(fd, copy, len, SIZE_MAX / 2);
}

/* The next frame, or NULL at the end. */
static char *read_frame(int fd, struct buf *in)
{
	char *frame, *nul;

	while (!in->data || !(nul = memchr(in->data, 0, in->len))) {
		ssize_t n = buf_reserve(in, 65536) < 0 ? -1 : recv(fd, in->data + in->len, 65536, 0);

		if (n <= 0)
			return NULL;
		in->len += (size_t)n;
	}
	frame = strdup(in->data);
	buf_consume(in, (size_t)(nul - in->data) + 1);
	return frame;
}

static bool expect_frame(struct play *p, const char *line, struct buf *in)
{
	_cleanup_(freep) char *frame = read_frame(p->fd, in);
	bool ok = frame && (line[0] == '<' ? streq(frame, line + 1) : strstr(frame, line + 1) != NULL);

	if (!ok && asprintf(&p->problem, "expected %s, got %.2000s", line, frame ? frame : "nothing") < 0)
		p->problem = NULL;
	return ok;
}

static void *play(void *userdata)
{
	struct play *p = userdata;
	struct buf in = {};
	char byte;

	for (const char *const *l = p->lines; *l; l++) {
		const char *text = *l + 1;

		switch (**l) {
		case '<':
		case '?':
			if (!expect_frame(p, *l, &in))
				goto end;
			break;
		case '>': send_all(p->fd, text, strlen(text) + 1, SIZE_MAX / 2); break;
		case '~': send_all(p->fd, text, strlen(text) + 1, 1); break;
		case '=': send_all(p->fd, text, strlen(text), SIZE_MAX / 2); break;
		case '|': send_frames(p->fd, text); break;
		case '.': usleep(100000); break;
		case '!': goto end;
		}
	}
	while (recv(p->fd, &byte, 1, 0) > 0)
		;
end:
	buf_done(&in);
	close(p->fd);
	return NULL;
}

static struct resident *begin(struct play *p, const char *const *lines)
{
	struct resident *r = NULL;
	int fds[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	*p = (struct play){ .fd = fds[1], .lines = lines };
	assert_int_equal(pthread_create(&p->thread, NULL, play, p), 0);
	assert_int_equal(resident_connect_fd(fds[0], &r), 0);
	return r;
}

static void end(struct play *p, struct resident *r)
{
	assert_null(resident_close(r));
	pthread_join(p->thread, NULL);
	if (p->problem)
		fail_msg("%s", p->problem);
}

#define PLAY(...) ((const char *const[]){ __VA_ARGS__, NULL })
#define METHOD    "org.residentd.Inference."
#define CHAT_HI                                                                                         \
	"<{\"method\":\"" METHOD "Chat\",\"parameters\":{\"messages\":[{\"role\":\"user\",\"content\":" \
	"\"hi\"}]},\"more\":true}"
#define USAGE                                                                                          \
	"\"usage\":{\"prompt_tokens\":7,\"cached_tokens\":2,\"answer_tokens\":3,\"thought_tokens\":1," \
	"\"queue_us\":10,\"prefill_us\":20,\"decode_us\":30}"
#define DONE ">{\"parameters\":{\"stop_reason\":\"eos\"," USAGE ",\"context_used\":10}}"
#define MODEL                                                                                          \
	"{\"name\":\"Tiny\",\"architecture\":\"qwen35moe\",\"parameters\":35000000000,"                \
	"\"weight_bytes\":21160000000,\"context_max\":32768,\"context_trained\":262144,\"chat\":true," \
	"\"thinking\":false}"

#define LONG_ID "0123456789012345678901234567890123456789012345678901234567890123" /* 64 bytes */

static const struct resident_message hi = { .role = "user", .content = "hi" };

/* Writes down what happened, one word an event. */
struct diary {
	struct buf text;
	int answer; /* what the callback returns */
	struct resident_usage usage;
	int error;
};

static int note(struct resident *r, const struct resident_event *e, void *userdata)
{
	struct diary *d = userdata;
	const struct resident_availability *v;

	/* Bug guard: a call from a callback would reenter the parser. */
	assert_int_equal(resident_get_availability(r, &v), -EBUSY);
	assert_int_equal(resident_process(r), -EBUSY);
	switch (e->type) {
	case RESIDENT_EVENT_QUEUED:
		buf_printf(&d->text, "queued:%llu ", (unsigned long long)e->position);
		break;
	case RESIDENT_EVENT_PREFILL:
		buf_printf(&d->text, "prefill:%llu/%llu ", (unsigned long long)e->done,
			   (unsigned long long)e->total);
		break;
	case RESIDENT_EVENT_THOUGHT:
		buf_printf(&d->text, "thought:%.*s ", (int)e->text_len, e->text);
		break;
	case RESIDENT_EVENT_ANSWER:
		buf_printf(&d->text, "answer:%.*s ", (int)e->text_len, e->text);
		break;
	case RESIDENT_EVENT_DONE:
		buf_printf(&d->text, "done:%s:%llu:%s", e->stop_reason,
			   (unsigned long long)e->context_used, e->request);
		d->usage = *e->usage;
		break;
	case RESIDENT_EVENT_FAILED:
		buf_printf(&d->text, "failed:%s", e->error->message);
		d->error = e->error->code;
		break;
	}
	return d->answer;
}

#define assert_diary(d, expected)                              \
	do {                                                   \
		assert_string_equal((d)->text.data, expected); \
		buf_done(&(d)->text);                          \
	} while (0)

/* ---- calls ---- */

static void availability(void **state)
{
	struct play p;
	struct resident *r =
		begin(&p, PLAY("<{\"method\":\"" METHOD "GetAvailability\",\"parameters\":{}}",
			       ">{\"parameters\":{\"state\":\"available\",\"model\":" MODEL
			       ",\"sessions\":2,\"queued\":1,\"of_later\":[1]}}",
			       "?GetAvailability",
			       "~{\"parameters\":{\"state\":\"unavailable\",\"reason\":\"no model\",\"model\":null,"
			       "\"sessions\":0,\"queued\":0,\"retry_after_ms\":500}}"));
	const struct resident_availability *v;

	(void)state;
	assert_int_equal(resident_get_availability(r, &v), 0);
	assert_string_equal(v->state, "available");
	assert_null(v->reason);
	assert_string_equal(v->model->name, "Tiny");
	assert_true(v->model->parameters == 35000000000 && v->model->weight_bytes == 21160000000);
	assert_int_equal(v->model->context_trained, 262144);
	assert_true(v->model->chat && !v->model->thinking);
	assert_int_equal(v->sessions, 2);
	assert_int_equal(v->queued, 1);

	assert_int_equal(resident_get_availability(r, &v), 0);
	assert_string_equal(v->reason, "no model");
	assert_null(v->model);
	assert_int_equal(v->retry_after_ms, 500);
	end(&p, r);
}

#define STATUS                                                                                     \
	"\"version\":\"1\",\"state\":\"available\",\"pid\":42,\"uptime_s\":9,\"backend\":\"cpu\"," \
	"\"threads\":8,\"sessions\":1,\"sessions_own\":1,\"queued\":0,\"running\":1,"              \
	"\"requests_total\":5,\"prompt_tokens_total\":6,\"generated_tokens_total\":7,"             \
	"\"prefill_tokens_per_second\":12.5,\"decode_tokens_per_second\":3,\"rss_bytes\":1,"       \
	"\"rss_anon_bytes\":2,\"rss_file_bytes\":3,\"kv_bytes_used\":4"

#define GPU                                                                                          \
	"{\"state\":\"degraded\",\"state_s\":9,\"why\":\"lost\",\"name\":\"card\",\"code\":\"ptx\"," \
	"\"driver\":\"12.2\",\"capability\":\"8.6\",\"emulator\":true,\"total_bytes\":10,\"lost\":11}"

static void status(void **state)
{
	struct play p;
	struct resident *r =
		begin(&p, PLAY("?GetStatus", ">{\"parameters\":{" STATUS ",\"kv_bytes_max\":5}}",
			       "?GetStatus",
			       ">{\"parameters\":{" STATUS ",\"kv_bytes_max\":5,\"gpu\":" GPU "}}",
			       "?GetStatus", ">{\"parameters\":{" STATUS "}}"));
	const struct resident_status *s;

	(void)state;
	assert_int_equal(resident_get_status(r, &s), 0);
	assert_string_equal(s->backend, "cpu");
	assert_int_equal(s->pid, 42);
	assert_true(s->prefill_tokens_per_second > 12.4 && s->prefill_tokens_per_second < 12.6);
	assert_true(s->decode_tokens_per_second > 2.9 && s->kv_bytes_max == 5);
	assert_null(s->gpu);
	assert_int_equal(resident_get_status(r, &s), 0);
	assert_string_equal(s->gpu->state, "degraded");
	assert_string_equal(s->gpu->why, "lost");
	assert_string_equal(s->gpu->name, "card");
	assert_string_equal(s->gpu->code, "ptx");
	assert_string_equal(s->gpu->driver, "12.2");
	assert_string_equal(s->gpu->capability, "8.6");
	assert_true(s->gpu->emulator);
	assert_int_equal(s->gpu->state_s, 9);
	assert_int_equal(s->gpu->total_bytes, 10);
	assert_int_equal(s->gpu->lost, 11);
	/* A field that was promised is missing. */
	assert_int_equal(resident_get_status(r, &s), -EPROTO);
	assert_non_null(strstr(resident_last_error(r)->message, "kv_bytes_max"));
	assert_int_equal(resident_get_status(r, &s), -EPROTO);
	end(&p, r);
}

static void sessions(void **state)
{
	struct play p;
	struct resident *r = begin(
		&p,
		PLAY("<{\"method\":\"" METHOD
		     "OpenSession\",\"parameters\":{\"session\":\"a1\",\"keep\":true}}",
		     ">{\"error\":\"" METHOD
		     "NoSuchSession\",\"parameters\":{\"number\":7,\"message\":\"gone\"}}",
		     "<{\"method\":\"" METHOD "OpenSession\",\"parameters\":{}}",
		     ">{\"parameters\":{\"session\":\"b2\",\"context_used\":0,\"context_max\":4096,"
		     "\"resumed\":false}}",
		     "<{\"method\":\"" METHOD "CloneSession\",\"parameters\":{\"session\":\"b2\"}}",
		     ">{\"parameters\":{\"session\":\"c3\",\"context_used\":9,\"context_max\":4096}}",
		     "<{\"method\":\"" METHOD "CloseSession\",\"parameters\":{\"session\":\"c3\"}}",
		     ">{}", "?OpenSession",
		     ">{\"parameters\":{\"session\":\"" LONG_ID "\","
		     "\"context_used\":0,\"context_max\":4096}}"));
	struct resident_session s = { .size = sizeof(s) }, wrong = {};

	(void)state;
	assert_int_equal(resident_open_session(r, true, "a1", &s), -RESIDENT_E_NO_SUCH_SESSION);
	assert_string_equal(resident_last_error(r)->message, "gone");
	assert_int_equal(s.id[0], 0);
	assert_int_equal(resident_open_session(r, true, NULL, &wrong), -EINVAL);
	assert_int_equal(resident_open_session(r, false, NULL, &s), 0);
	assert_string_equal(s.id, "b2");
	assert_int_equal(s.context_max, 4096);
	assert_int_equal(resident_clone_session(r, s.id, false, &s), 0);
	assert_string_equal(s.id, "c3");
	assert_int_equal(s.context_used, 9);
	assert_int_equal(resident_close_session(r, s.id), 0);
	assert_int_equal(resident_open_session(r, false, NULL, &s), -EPROTO); /* an id of 64 bytes */
	assert_string_equal(s.id, "c3");
	end(&p, r);
}

static void errors(void **state)
{
	struct play p;
	struct resident *r = begin(
		&p,
		PLAY("?GetUsage",
		     ">{\"error\":\"" METHOD "QueueFull\",\"parameters\":{\"number\":10,\"message\":\"later\","
		     "\"retry_after_ms\":1500}}",
		     "?GetUsage",
		     ">{\"error\":\"" METHOD "Loading\",\"parameters\":{\"message\":3}}", "?GetUsage",
		     ">{\"error\":\"" METHOD
		     "OfLater\",\"parameters\":{\"number\":77,\"message\":\"new\"}}",
		     "?GetUsage",
		     ">{\"error\":\"org.varlink.service.InvalidParameter\",\"parameters\":{\"parameter\":"
		     "\"options.top_k\",\"message\":\"is out of range\"}}",
		     "?GetUsage", ">{\"error\":\"org.varlink.service.MethodNotFound\"}",
		     "?GetUsage", ">{\"error\":\"io.example.What\"}"));
	char *reply = NULL;

	(void)state;
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -RESIDENT_E_QUEUE_FULL);
	assert_int_equal(resident_last_error(r)->retry_after_ms, 1500);
	assert_string_equal(resident_last_error(r)->message, "later");
	assert_int_equal(resident_last_error(r)->code, -RESIDENT_E_QUEUE_FULL);
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -RESIDENT_E_LOADING);
	assert_int_equal(resident_last_error(r)->retry_after_ms, 0);
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -10077);
	assert_string_equal(resident_last_error(r)->message, "new");
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -RESIDENT_E_INVALID_REQUEST);
	assert_string_equal(resident_last_error(r)->message,
			    "the service refuses the parameter 'options.top_k': is out of range");
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -RESIDENT_E_NOT_SUPPORTED);
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -RESIDENT_E_INTERNAL);
	assert_null(reply);
	end(&p, r);
	assert_string_equal(resident_strerror(-ENOENT), "No such file or directory");
	assert_non_null(strstr(resident_strerror(-RESIDENT_E_NO_MODEL), "model"));
	assert_non_null(resident_strerror(-10077));
	assert_non_null(resident_strerror(-INT32_MAX));
}

static void any_call(void **state)
{
	struct play p;
	struct resident *r = begin(
		&p, PLAY("<{\"method\":\"org.varlink.service.GetInfo\",\"parameters\":{\"a\":[1]}}",
			 ">{\"parameters\":{\"x\":\"y\"}}", "?Tokenize",
			 ">{\"parameters\":{\"tokens\":[5,0,9],\"pieces\":[\"a\",\"b\",\"c\"]}}",
			 "?Tokenize", ">{\"parameters\":{\"tokens\":[5,-1]}}"));
	const int32_t *tokens;
	char *reply = NULL;
	size_t n;

	(void)state;
	assert_int_equal(resident_call(r, "GetUsage", "[]", &reply), -EINVAL);
	assert_int_equal(resident_call(r, "GetUsage", "{", &reply), -EINVAL);
	assert_int_equal(resident_call(r, "org.varlink.service.GetInfo", "{\"a\": [1]}", &reply), 0);
	assert_string_equal(reply, "{\"x\":\"y\"}");
	free(reply);
	assert_int_equal(resident_tokenize(r, "\xff", false, &tokens, &n), -EILSEQ);
	assert_int_equal(resident_tokenize(r, "abc", false, &tokens, &n), 0);
	assert_int_equal(n, 3);
	assert_int_equal(tokens[2], 9);
	assert_int_equal(resident_tokenize(r, "abc", true, &tokens, &n), -EPROTO);
	end(&p, r);
}

/* Bug guard: a NULL text was a crash, and a malformed name made the service close the connection. */
static void arguments_refused(void **state)
{
	static const char *const names[] = { "a..b", "Get Usage",      ".",   "",
					     "-",    "org.residentd.", "a.B", "GetUsage\n" };
	struct resident_session s = { .size = sizeof(s) };
	struct play p;
	struct resident *r = begin(&p, PLAY("<{\"method\":\"" METHOD "GetUsage\",\"parameters\":{}}",
					    ">{\"parameters\":{}}"));
	const int32_t *tokens;
	char deep[400] = "", *reply = NULL;
	size_t n;

	(void)state;
	assert_int_equal(resident_tokenize(r, NULL, false, &tokens, &n), -EINVAL);
	assert_int_equal(resident_complete(r, NULL, NULL, false, NULL, NULL, NULL), -EINVAL);
	assert_int_equal(resident_send(r, NULL, &hi, 1, NULL, NULL, NULL), -EINVAL);
	assert_int_equal(resident_chat(r, NULL, 1, NULL, NULL, NULL), -EINVAL);
	assert_int_equal(resident_cancel_request(r, NULL), -EINVAL);
	assert_int_equal(resident_close_session(r, NULL), -EINVAL);
	assert_int_equal(resident_clone_session(r, NULL, false, &s), -EINVAL);
	assert_int_equal(resident_call(r, NULL, NULL, &reply), -EINVAL);
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (resident_call(r, names[i], NULL, &reply) != -EINVAL)
			fail_msg("'%s' is accepted", names[i]);
	assert_int_equal(resident_call(r, "Get\xff", NULL, &reply), -EILSEQ);
	/* As deep as a message may be, and in one more. */
	strcpy(deep, "{\"a\":");
	memset(deep + 5, '[', 63);
	memset(deep + 5 + 63, ']', 63);
	strcpy(deep + 5 + 126, "}");
	assert_int_equal(resident_call(r, "GetUsage", deep, &reply), -EINVAL);
	/* Nothing of it was sent. */
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), 0);
	free(reply);
	end(&p, r);
}

/* ---- requests ---- */

static void events(void **state)
{
	struct play p;
	struct diary d = {};
	struct resident *r = begin(
		&p,
		PLAY(CHAT_HI,
		     ">{\"parameters\":{\"request\":\"r1\",\"progress\":{\"stage\":\"queued\","
		     "\"position\":2}},\"continues\":true}",
		     ">{\"parameters\":{\"progress\":{\"stage\":\"prefill\",\"done\":5,\"total\":7}},"
		     "\"continues\":true}",
		     ">{\"parameters\":{\"progress\":{\"stage\":\"of later\"}},\"continues\":true}",
		     "~{\"parameters\":{\"text\":\"hm\",\"channel\":\"thought\"},\"continues\":true}",
		     ">{\"parameters\":{\"text\":\"\\u00fc\",\"channel\":\"answer\"},\"continues\":true}",
		     ">{\"parameters\":{\"text\":\"x\",\"channel\":\"of later\"},\"continues\":true}",
		     ">{\"parameters\":{\"text\":\"!\"},\"continues\":true}", DONE));

	(void)state;
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	assert_int_equal(resident_wait(r, -1), 0); /* none runs */
	assert_diary(&d, "queued:2 prefill:5/7 thought:hm answer:\xc3\xbc answer:! done:eos:10:r1");
	assert_true(d.usage.prompt_tokens == 7 && d.usage.cached_tokens == 2 &&
		    d.usage.answer_tokens == 3 && d.usage.thought_tokens == 1 &&
		    d.usage.queue_us == 10 && d.usage.decode_us == 30);
	end(&p, r);
}

/* A service may put everything into one frame. */
static void one_frame(void **state)
{
	struct play p;
	struct diary d = {};
	struct resident *r =
		begin(&p, PLAY("?Send", ">{\"parameters\":{\"request\":\"r1\",\"text\":\"yes\",\"thought\":\"hm\","
					"\"stop_reason\":\"length\"}}"));

	(void)state;
	assert_int_equal(resident_send(r, "s1", &hi, 1, NULL, note, &d), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	assert_diary(&d, "thought:hm answer:yes done:length:0:r1");
	end(&p, r);
}

static void options(void **state)
{
	static const char *const stop[] = { "\n\n", "END", NULL };
	static const struct resident_logit_bias bias[] = { { 7, -1.5 } };
	struct resident_options o = {
		.size = sizeof(o),
		.set = RESIDENT_TEMPERATURE | RESIDENT_MAX_THINKING_TOKENS | RESIDENT_SEED | RESIDENT_MIN_P,
		.min_p = 0.5,
		.seed = 42,
		.stop = stop,
		.logit_bias = bias,
		.n_logit_bias = 1,
		.want = "code",
	};
	struct resident_options old; /* of a program that was built before there was `want` */
	struct play p;
	struct resident *r = begin(
		&p,
		PLAY("<{\"method\":\"" METHOD "Complete\",\"parameters\":{\"prompt\":\"a\",\"session\":\"s\","
		     "\"special\":true,\"options\":{\"max_thinking_tokens\":0,\"temperature\":0.0,"
		     "\"min_p\":0.5,\"seed\":42,\"stop\":[\"\\n\\n\",\"END\"],\"logit_bias\":{\"7\":-1.5},"
		     "\"want\":\"code\"}},\"more\":true}",
		     DONE,
		     "<{\"method\":\"" METHOD "Complete\",\"parameters\":{\"prompt\":\"a\",\"options\":"
		     "{\"seed\":42}},\"more\":true}",
		     DONE));

	(void)state;
	assert_int_equal(resident_complete(r, "s", "a", true, &o, NULL, NULL), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	memset(&old, 0xff, sizeof(old));
	memset(&old, 0, offsetof(struct resident_options, want));
	old.size = offsetof(struct resident_options, want);
	old.set = RESIDENT_SEED;
	old.seed = 42;
	assert_int_equal(resident_complete(r, NULL, "a", false, &old, NULL, NULL), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	end(&p, r);
}

static void options_refused(void **state)
{
	struct {
		struct resident_options o;
		uint64_t newer;
	} grown = { .o.size = sizeof(grown), .newer = 1 };
	struct resident_options o = { .size = sizeof(o), .top_k = 3 };
	struct resident_message bad = hi;
	struct play p;
	struct resident *r = begin(&p, PLAY(CHAT_HI, DONE));

	(void)state;
	assert_int_equal(resident_chat(r, &hi, 1, &o, NULL, NULL), -EINVAL); /* its bit is missing */
	o = (struct resident_options){ .size = sizeof(o), .set = UINT64_C(1) << 40 };
	assert_int_equal(resident_chat(r, &hi, 1, &o, NULL, NULL), -E2BIG);
	o = (struct resident_options){ .size = sizeof(o),
				       .set = RESIDENT_TOP_P,
				       .top_p = __builtin_nan("") };
	assert_int_equal(resident_chat(r, &hi, 1, &o, NULL, NULL), -EINVAL);
	o = (struct resident_options){};
	assert_int_equal(resident_chat(r, &hi, 1, &o, NULL, NULL), -EINVAL);
	assert_int_equal(resident_chat(r, &hi, 1, &grown.o, NULL, NULL), -E2BIG);
	bad.content = "\xc3";
	assert_int_equal(resident_chat(r, &bad, 1, NULL, NULL, NULL), -EILSEQ);
	o = (struct resident_options){ .size = sizeof(o), .want = "\xff" };
	assert_int_equal(resident_chat(r, &hi, 1, &o, NULL, NULL), -EILSEQ);
	bad.content = NULL;
	assert_int_equal(resident_chat(r, &bad, 1, NULL, NULL, NULL), -EINVAL);
	bad = hi;
	bad.reserved[4] = "";
	assert_int_equal(resident_chat(r, &bad, 1, NULL, NULL, NULL), -E2BIG);
	/* None of this has harmed the connection, and nothing of it was sent. */
	grown.newer = 0;
	grown.o.size = sizeof(grown);
	assert_int_equal(resident_chat(r, &hi, 1, NULL, NULL, NULL), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	end(&p, r);
}

static int check_logprobs(struct resident *r, const struct resident_event *e, void *userdata)
{
	(void)r;
	if (e->type != RESIDENT_EVENT_ANSWER)
		return 0;
	assert_int_equal(e->n_logprobs, 2);
	assert_string_equal(e->logprobs[1].text, "b");
	assert_int_equal(e->logprobs[0].n_top, 2);
	assert_int_equal(e->logprobs[0].top[1].token, 3);
	assert_true(e->logprobs[0].top[1].logprob < -2.4);
	assert_int_equal(e->logprobs[1].n_top, 0);
	*(int *)userdata += 1;
	return 0;
}

static void logprobs(void **state)
{
	int seen = 0;
	struct play p;
	struct resident *r = begin(
		&p, PLAY(CHAT_HI,
			 ">{\"parameters\":{\"text\":\"ab\",\"logprobs\":[{\"token\":1,\"text\":\"a\",\"logprob\":-0.5,"
			 "\"top\":[{\"token\":1,\"text\":\"a\",\"logprob\":-0.5},{\"token\":3,\"text\":\"c\","
			 "\"logprob\":-2.5}]},{\"token\":2,\"text\":\"b\",\"logprob\":0,\"top\":[]}]},"
			 "\"continues\":true}",
			 DONE));

	(void)state;
	assert_int_equal(resident_chat(r, &hi, 1, NULL, check_logprobs, &seen), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	assert_int_equal(seen, 1);
	end(&p, r);
}

#define CANCEL    "<{\"method\":\"" METHOD "Cancel\",\"parameters\":{}}"
#define CANCELLED ">{\"parameters\":{\"stop_reason\":\"cancelled\"," USAGE ",\"context_used\":3}}"

static void cancel_from_callback(void **state)
{
	struct diary d = { .answer = 1 };
	struct play p;
	struct resident *r =
		begin(&p, PLAY(CHAT_HI, ">{\"parameters\":{\"text\":\"a\"},\"continues\":true}",
			       CANCEL, ">{\"parameters\":{\"text\":\"b\"},\"continues\":true}",
			       CANCELLED, ">{\"parameters\":{\"cancelled\":true}}", CHAT_HI, DONE));

	(void)state;
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	assert_diary(&d, "answer:a answer:b done:cancelled:3:");
	/* The reply to Cancel, which is still to come, is not taken for the next one. */
	d.answer = 0;
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	assert_diary(&d, "done:eos:10:");
	end(&p, r);
}

/* The request was over before the Cancel came. */
static void cancel_too_late(void **state)
{
	struct diary d = {};
	struct play p;
	struct resident *r =
		begin(&p, PLAY(CHAT_HI, CANCEL, DONE, ">{\"parameters\":{\"cancelled\":false}}",
			       "?GetUsage", ">{\"parameters\":{\"requests\":1}}"));
	char *reply;

	(void)state;
	assert_int_equal(resident_cancel(r), 0); /* nothing runs */
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), 0);
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -EBUSY);
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), -EBUSY);
	assert_int_equal(resident_cancel(r), 0);
	assert_int_equal(resident_cancel(r), 0); /* asked already */
	assert_int_equal(resident_wait(r, -1), 0);
	assert_diary(&d, "done:eos:10:");
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), 0);
	assert_string_equal(reply, "{\"requests\":1}");
	free(reply);
	end(&p, r);
}

static void cancel_by_name(void **state)
{
	struct play p;
	struct resident *r = begin(&p, PLAY("<{\"method\":\"" METHOD
					    "Cancel\",\"parameters\":{\"request\":\"r9\"}}",
					    ">{\"parameters\":{\"cancelled\":true}}", "?Cancel",
					    ">{\"parameters\":{\"cancelled\":false}}"));

	(void)state;
	assert_int_equal(resident_cancel_request(r, "r9"), 1);
	assert_int_equal(resident_cancel_request(r, "r9"), 0);
	end(&p, r);
}

static void request_fails(void **state)
{
	struct diary d = {};
	struct play p;
	struct resident *r =
		begin(&p, PLAY(CHAT_HI, ">{\"parameters\":{\"text\":\"a\"},\"continues\":true}",
			       ">{\"error\":\"" METHOD
			       "ContextFull\",\"parameters\":{\"number\":11,\"message\":\"full\"}}",
			       CHAT_HI, DONE));

	(void)state;
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), 0);
	assert_int_equal(resident_wait(r, -1), -RESIDENT_E_CONTEXT_FULL);
	assert_int_equal(resident_wait(r, -1), 0); /* told once */
	assert_int_equal(d.error, -RESIDENT_E_CONTEXT_FULL);
	assert_diary(&d, "answer:a failed:full");
	assert_int_equal(resident_chat(r, &hi, 1, NULL, NULL, NULL), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	end(&p, r);
}

static void service_dies(void **state)
{
	struct diary d = {};
	struct play p;
	struct resident *r =
		begin(&p, PLAY(CHAT_HI, ">{\"parameters\":{\"text\":\"a\"},\"continues\":true}",
			       "={\"parameters\":{\"text\":\"b", "!"));

	(void)state;
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), 0);
	assert_int_equal(resident_wait(r, -1), -ECONNRESET);
	assert_diary(&d, "answer:a failed:the service closed the connection");
	assert_int_equal(resident_wait(r, -1), -ECONNRESET);
	assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), -ECONNRESET);
	end(&p, r);
}

/* An event loop, a prompt larger than the socket's buffers, and a service that is slow to read
 * it. */
static void event_loop(void **state)
{
	size_t len = 3 << 20;
	_cleanup_(freep) char *text = malloc(len + 1);
	struct resident_message m = { .role = "user", .content = text };
	struct diary d = {};
	bool waited_to_write = false;
	struct play p;
	struct resident *r;
	int n;

	(void)state;
	memset(text, 'x', len);
	text[len] = 0;
	r = begin(&p, PLAY(".", "?xxx\"}]},\"more\":true}", ".", DONE));
	assert_int_equal(resident_chat(r, &m, 1, NULL, note, &d), 0);
	while ((n = resident_process(r)) == 1) {
		struct pollfd f = { .fd = resident_fd(r), .events = (short)resident_events(r) };

		waited_to_write = waited_to_write || (f.events & POLLOUT);
		assert_int_equal(poll(&f, 1, 5000), 1);
	}
	assert_int_equal(n, 0);
	assert_true(waited_to_write);
	assert_int_equal(resident_events(r), POLLIN);
	assert_diary(&d, "done:eos:10:");
	end(&p, r);
}

/* The service refuses a prompt before it has read all of it: its words count, not EPIPE, and there
 * is no SIGPIPE. */
static void refused_while_writing(void **state)
{
	size_t len = 3 << 20;
	_cleanup_(freep) char *text = malloc(len + 1);
	struct resident_message m = { .role = "user", .content = text };
	struct diary d = {};
	struct play p;
	struct resident *r;

	(void)state;
	memset(text, 'x', len);
	text[len] = 0;
	r = begin(&p, PLAY(">{\"error\":\"" METHOD
			   "TooLarge\",\"parameters\":{\"number\":6,\"message\":\"too big\"}}",
			   "!"));
	pthread_join(p.thread, NULL);
	assert_int_equal(resident_chat(r, &m, 1, NULL, note, &d), 0);
	assert_int_equal(resident_wait(r, -1), -RESIDENT_E_TOO_LARGE);
	assert_diary(&d, "failed:too big");
	assert_string_equal(resident_last_error(r)->message,
			    "too big"); /* not that the socket was closed behind it */
	assert_int_equal(resident_chat(r, &hi, 1, NULL, NULL, NULL), 0);
	assert_int_equal(resident_wait(r, -1), -ECONNRESET);
	assert_null(resident_close(r));
}

/* ---- time and signals ---- */

static void timeouts(void **state)
{
	struct play p;
	struct resident *r = begin(&p, PLAY(CHAT_HI, ".", ".", DONE, "?GetUsage", "."));
	char *reply;

	(void)state;
	assert_int_equal(resident_chat(r, &hi, 1, NULL, NULL, NULL), 0);
	assert_int_equal(resident_wait(r, 0), -ETIMEDOUT);
	assert_int_equal(resident_wait(r, 20), -ETIMEDOUT);
	assert_int_equal(resident_wait(r, -1), 0);
	resident_set_timeout(r, 20);
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -ETIMEDOUT);
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -ETIMEDOUT);
	end(&p, r);
}

static void on_alarm(int sig)
{
	(void)sig;
}

static void interrupted(void **state)
{
	struct sigaction sa = { .sa_handler = on_alarm };
	struct play p;
	struct resident *r;
	sigset_t alarm_set;

	(void)state;
	assert_int_equal(sigaction(SIGALRM, &sa, NULL), 0);
	sigemptyset(&alarm_set);
	sigaddset(&alarm_set, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &alarm_set, NULL); /* not to the service's thread */
	r = begin(&p, PLAY(CHAT_HI, CANCEL, CANCELLED, ">{\"parameters\":{\"cancelled\":true}}"));
	pthread_sigmask(SIG_UNBLOCK, &alarm_set, NULL);
	assert_int_equal(resident_chat(r, &hi, 1, NULL, NULL, NULL), 0);
	ualarm(50000, 0);
	assert_int_equal(resident_wait(r, -1), -EINTR);
	assert_int_equal(resident_cancel(r), 0);
	assert_int_equal(resident_wait(r, -1), 0);
	end(&p, r);
}

/* ---- a hostile service ---- */

static void hostile_replies(void **state)
{
	static const char *const replies[] = {
		">",
		">[]",
		">{",
		">nonsense",
		">{\"parameters\":[]}",
		">{\"parameters\":{},\"continues\":1}",
		">{\"error\":3}",
		">{\"parameters\":{},\"parameters\":{}}",
		">{\"parameters\":{\"text\":\"\xff\"}}",
		">{\"parameters\":{\"stop_reason\":\"eos\\u0000\"}}",
		">{\"parameters\":{}}",
		">{\"parameters\":{\"stop_reason\":7}}",
		">{\"parameters\":{\"text\":{}},\"continues\":true}",
		">{\"parameters\":{\"request\":\"" LONG_ID "\"},\"continues\":true}",
		">{\"parameters\":{\"progress\":{}},\"continues\":true}",
		">{\"parameters\":{\"progress\":{\"stage\":\"queued\",\"position\":-1}},\"continues\":true}",
		">{\"parameters\":{\"progress\":{\"stage\":\"prefill\",\"done\":1.5}},\"continues\":true}",
		">{\"parameters\":{\"logprobs\":[1]},\"continues\":true}",
		">{\"parameters\":{\"logprobs\":[{\"token\":99999999999,\"text\":\"\",\"logprob\":0}]},\"continues\":true}",
		">{\"parameters\":{\"logprobs\":[{\"token\":1,\"text\":\"\",\"logprob\":0,\"top\":[[]]}]},\"continues\":true}",
		">{\"parameters\":{\"stop_reason\":\"eos\",\"usage\":{\"prompt_tokens\":1}}}",
		">{\"parameters\":{\"stop_reason\":\"eos\",\"context_used\":-1}}",
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(replies); i++) {
		struct diary d = {};
		struct play p;
		struct resident *r = begin(&p, PLAY(CHAT_HI, replies[i]));

		assert_int_equal(resident_chat(r, &hi, 1, NULL, note, &d), 0);
		if (resident_wait(r, 5000) != -EPROTO)
			fail_msg("accepted: %s", replies[i]);
		assert_int_equal(d.error, -EPROTO);
		assert_int_equal(resident_process(r), -EPROTO);
		buf_done(&d.text);
		end(&p, r);
	}
}

static void unasked_replies(void **state)
{
	struct play p;
	struct resident *r = begin(&p, PLAY(">{}"));
	char *reply;

	(void)state;
	while (resident_process(r) == 0)
		usleep(1000);
	assert_int_equal(resident_process(r), -EPROTO);
	end(&p, r);

	r = begin(&p, PLAY("?GetUsage", ">{\"parameters\":{},\"continues\":true}"));
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -EPROTO);
	end(&p, r);

	/* A second reply to the same call, in one piece with the first: not the reply to the
	 * next. */
	r = begin(&p, PLAY("?GetUsage", "|{}|{}|"));
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), 0);
	free(reply);
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -EPROTO);
	end(&p, r);
}

/* A frame without an end is refused at 16 MiB, not stored until memory runs out. */
static void endless_frame(void **state)
{
	size_t len = 17 << 20;
	_cleanup_(freep) char *line = malloc(len + 1);
	struct play p;
	struct resident *r;
	char *reply;

	(void)state;
	memset(line, ' ', len);
	line[0] = '=';
	line[len] = 0;
	r = begin(&p, PLAY("?GetUsage", line));
	assert_int_equal(resident_call(r, "GetUsage", NULL, &reply), -EPROTO);
	assert_non_null(strstr(resident_last_error(r)->message, "16777216"));
	end(&p, r);
}

/* ---- connecting ---- */

static void connecting(void **state)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	char directory[] = "/tmp/test-client.XXXXXX", long_path[200];
	struct resident *r = NULL;
	int fd, peer;

	(void)state;
	assert_non_null(mkdtemp(directory));
	snprintf(a.sun_path, sizeof(a.sun_path), "%s/socket", directory);
	memset(long_path, 'x', sizeof(long_path) - 1);
	long_path[sizeof(long_path) - 1] = 0;
	assert_int_equal(resident_connect(long_path, &r), -ENAMETOOLONG);
	assert_int_equal(resident_connect(a.sun_path, &r), -ENOENT);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	assert_int_equal(resident_connect(a.sun_path, &r), -ECONNREFUSED);
	assert_null(r);
	assert_int_equal(listen(fd, 1), 0);

	setenv("RESIDENTD_SOCKET", a.sun_path, 1);
	assert_string_equal(resident_socket_path(), a.sun_path);
	assert_int_equal(resident_connect(NULL, &r), 0);
	assert_int_equal(resident_last_error(r)->code, 0);
	peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
	assert_true(peer >= 0);
	assert_int_equal(resident_process(r), 0);
	close(peer);
	assert_int_equal(resident_process(r), -ECONNRESET);
	assert_null(resident_close(r));
	assert_null(resident_close(NULL));
	setenv("RESIDENTD_SOCKET", "", 1);
	assert_string_equal(resident_socket_path(), RESIDENT_SOCKET);
	close(fd);
	unlink(a.sun_path);
	rmdir(directory);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(availability),    cmocka_unit_test(status),
		cmocka_unit_test(sessions),        cmocka_unit_test(errors),
		cmocka_unit_test(any_call),        cmocka_unit_test(arguments_refused),
		cmocka_unit_test(events),          cmocka_unit_test(one_frame),
		cmocka_unit_test(options),         cmocka_unit_test(options_refused),
		cmocka_unit_test(logprobs),        cmocka_unit_test(cancel_from_callback),
		cmocka_unit_test(cancel_too_late), cmocka_unit_test(cancel_by_name),
		cmocka_unit_test(request_fails),   cmocka_unit_test(service_dies),
		cmocka_unit_test(event_loop),      cmocka_unit_test(refused_while_writing),
		cmocka_unit_test(timeouts),        cmocka_unit_test(interrupted),
		cmocka_unit_test(hostile_replies), cmocka_unit_test(unasked_replies),
		cmocka_unit_test(endless_frame),   cmocka_unit_test(connecting),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
