/* SPDX-License-Identifier: MIT */
/*
 * fuzz-client.c: a hostile service. The first byte chooses what the client asks for, the rest is
 * all that the service ever says. Whatever it is, the client gets one last event or one code, and
 * every string and list that it is handed can be read to its end.
 */
#include "client/resident.h"
#include "daemon/base.h"

#include <assert.h>
#include <sys/socket.h>

#define REPLY_MAX (64u << 10) /* fits into the socket's buffer, so that it is all there at once */

static size_t total; /* keeps the reads below from being optimised away */

struct seen {
	unsigned int last; /* DONE or FAILED */
	bool cancel;
};

static void read_logprobs(const struct resident_logprob *lp, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		total += strlen(lp[i].text) + (size_t)lp[i].token;
		read_logprobs(lp[i].top, lp[i].n_top);
	}
}

static int on_event(struct resident *r, const struct resident_event *e, void *userdata)
{
	struct seen *s = userdata;

	(void)r;
	assert(s->last == 0);
	total += strlen(e->request);
	if (e->text)
		assert(strlen(e->text) == e->text_len);
	read_logprobs(e->logprobs, e->n_logprobs);
	if (e->type == RESIDENT_EVENT_DONE)
		total += strlen(e->stop_reason) + e->usage->decode_us;
	if (e->type == RESIDENT_EVENT_FAILED)
		total += strlen(e->error->message);
	s->last += e->type == RESIDENT_EVENT_DONE || e->type == RESIDENT_EVENT_FAILED;
	return s->cancel;
}

static void ask(struct resident *r, bool cancel)
{
	const struct resident_message m = { .role = "user", .content = "hi" };
	struct seen s = { .cancel = cancel };
	int n;

	if (resident_chat(r, &m, 1, NULL, on_event, &s) < 0)
		return;
	n = resident_wait(r, 10000);
	assert(n <= 0 && n != -ETIMEDOUT && n != -EBUSY);
	assert(s.last == 1);
}

static void read_model(const struct resident_model *m)
{
	if (m)
		total += strlen(m->name) + strlen(m->architecture) + m->context_max;
}

static void read_gpu(const struct resident_gpu *g)
{
	const char *const texts[] = { g ? g->why : NULL, g ? g->name : NULL, g ? g->driver : NULL,
				      g ? g->capability : NULL, g ? g->code : NULL };

	if (g)
		total += strlen(g->state) + g->total_bytes;
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
		total += texts[i] ? strlen(texts[i]) : 0;
}

static void call(struct resident *r, unsigned int which)
{
	struct resident_session session = { .size = sizeof(session) };
	const struct resident_availability *v;
	const struct resident_status *s;
	const int32_t *tokens;
	char *reply;
	size_t n;

	switch (which) {
	case 0:
		if (resident_get_availability(r, &v) == 0) {
			total += strlen(v->state) + (v->reason ? strlen(v->reason) : 0);
			read_model(v->model);
		}
		break;
	case 1:
		if (resident_get_status(r, &s) == 0) {
			total += strlen(s->version) + strlen(s->backend) + s->kv_bytes_max;
			read_model(s->model);
			read_gpu(s->gpu);
		}
		break;
	case 2:
		if (resident_open_session(r, true, "s", &session) == 0)
			total += strlen(session.id);
		break;
	case 3:
		if (resident_tokenize(r, "text", true, &tokens, &n) == 0 && n > 0)
			total += (size_t)tokens[n - 1];
		break;
	case 4:
		if (resident_call(r, "GetUsage", NULL, &reply) == 0) {
			total += strlen(reply);
			free(reply);
		}
		break;
	default: total += (size_t)resident_cancel_request(r, "1");
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct resident *r;
	int fds[2];

	if (size == 0 || size > REPLY_MAX)
		return 0;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
		abort();
	if (send(fds[1], data + 1, size - 1, MSG_NOSIGNAL) != (ssize_t)size - 1)
		abort();
	shutdown(fds[1], SHUT_WR);
	if (resident_connect_fd(fds[0], &r) < 0)
		abort();
	/* Two in a row: what the first one leaves behind must not confuse the second. */
	for (int i = 0; i < 2; i++) {
		if (data[0] % 8 < 2)
			ask(r, data[0] % 8 == 1);
		else
			call(r, data[0] % 8 - 2u);
		total += strlen(resident_last_error(r)->message);
	}
	resident_close(r);
	close(fds[1]);
	return 0;
}
