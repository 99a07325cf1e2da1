/* SPDX-License-Identifier: MIT */
/*
 * feed.c: follows the model's pages through the tracer's maps, or asks the kernel page by page. See feed.h.
 *
 * Owns the connection to residentd-bpf and the mappings of what it sent. The loop thread alone connects, seeds, checks and loses; other
 * threads read under `lock`, which is written only while the mappings are exchanged. Refuses to know BPF: the maps
 * are arrays and a ring of bytes here. Invariants: a map is used only as large as the kernel says it is, whatever the tracer claims; a page's
 * bit counts from the tracer where the page was touched since the attachment, else from `seed`, which was looked up after it: so
 * there is no gap between the two, and nobody writes to what somebody else counts in.
 */
#include "daemon/residency/feed.h"

#include "daemon/residency/feed-maps.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#define RETRY_MIN_US 1000000
#define RETRY_MAX_US 32000000
#define REFUSED_US \
	300000000 /* a kernel that cannot, or a helper that may not: this changes seldom */
#define ANSWER_US      30000000
#define ANSWER_SYNC_MS 5000
#define CHECK_US       300000000
#define SLICE_PAGES    16384 /* 64 MiB: a millisecond of the loop */
#define LOOKS \
	5 /* at a slice that differs: a page that is still being read is in the cache, but not for mincore */
#define LOOK_US 1000

#ifndef SYS_cachestat
#define SYS_cachestat 451 /* 6.5 */
#endif

struct cachestat_range {
	uint64_t offset, bytes;
};

struct cachestat {
	uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

enum feed_state {
	STATE_AWAY,    /* not connected */
	STATE_ASKED,   /* to attach, or to forget what it touched */
	STATE_SEEDING, /* attached; looking up what was there before */
	STATE_LIVE,
};

struct scan {
	size_t part;
	uint64_t page; /* of the part */
	uint64_t differ;
};

struct feed {
	sd_event *event; /* NULL: everything happens inside the calls */
	const struct catalog *catalog;
	char *path;
	void (*on_change)(void *arg);
	void *arg;
	enum feed_source fallback;
	bool may_look; /* mincore tells us the truth */

	size_t page_bytes, n_parts;
	uint64_t first[RESIDENCY_PARTS]; /* page, in the numbering of residency.h */
	uint64_t n_words;
	struct residency_extent *extents;
	size_t n_extents;

	enum feed_state state;
	int fd;
	sd_event_source *io, *timer;
	uint64_t retry_us;
	bool latency; /* wanted */
	bool checking;
	uint32_t attached;
	struct scan scan;
	char *reason, *text; /* text: of the tracer's answer */

	pthread_rwlock_t lock;
	bool live;
	bool seeded;
	struct feed_maps maps;
	uint64_t *seed; /* n_words */
};

/* ---- the model in pages ---- */

static uint64_t pages_of(const struct feed *f, size_t part)
{
	return (gguf_part(f->catalog->gguf, part)->bytes + f->page_bytes - 1) / f->page_bytes;
}

static int by_place(const void *a, const void *b)
{
	const struct residency_extent *x = a, *y = b;

	if (x->part != y->part)
		return x->part < y->part ? -1 : 1;
	return (x->offset > y->offset) - (x->offset < y->offset);
}

static void add_extents(struct feed *f, const struct catalog_layer *l)
{
	for (unsigned m = 0; l->first_block != CATALOG_NONE && m < CATALOG_MATRICES; m++)
		if (l->matrix[m])
			f->extents[f->n_extents++] = (struct residency_extent){
				.part = l->matrix[m]->part,
				.first_block = l->first_block,
				.n = l->n_expert,
				.offset = l->matrix[m]->offset,
				.stride = l->expert_bytes[m],
			};
}

static int measure(struct feed *f)
{
	const struct catalog *c = f->catalog;
	uint64_t next = 0;
	size_t n;

	f->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
	f->n_parts = gguf_n_parts(c->gguf);
	for (size_t i = 0; i < f->n_parts && i < RESIDENCY_PARTS; i++) {
		f->first[i] = next;
		next = ALIGN_UP(next + pages_of(f, i), (uint64_t)RESIDENCY_ALIGN);
	}
	f->n_words = next / 64;
	if (!mul_ok(c->n_layers, CATALOG_MATRICES, &n))
		return -ENOMEM;
	f->extents = calloc(n + 1, sizeof(*f->extents));
	f->seed = calloc(f->n_words + 1, sizeof(*f->seed));
	if (!f->extents || !f->seed)
		return -ENOMEM;
	for (uint32_t i = 0; i < c->n_layers; i++)
		add_extents(f, &c->layers[i]);
	qsort(f->extents, f->n_extents, sizeof(*f->extents), by_place);
	return 0;
}

/* CATALOG_NONE: trunk. */
static uint32_t block_at(const struct feed *f, size_t part, uint64_t offset)
{
	size_t lo = 0, hi = f->n_extents;
	const struct residency_extent *e;

	while (lo < hi) { /* how many extents start at or before the place */
		size_t mid = lo + (hi - lo) / 2;

		e = &f->extents[mid];
		if (e->part < part || (e->part == part && e->offset <= offset))
			lo = mid + 1;
		else
			hi = mid;
	}
	if (lo == 0)
		return CATALOG_NONE;
	e = &f->extents[lo - 1];
	if (e->part != part || e->stride == 0 || (offset - e->offset) / e->stride >= e->n)
		return CATALOG_NONE;
	return e->first_block + (uint32_t)((offset - e->offset) / e->stride);
}

/* The whole pages of a range: *ret_first of its part, returns how many. */
static uint64_t whole_pages(const struct feed *f, const struct catalog_range *r, uint64_t *ret_first)
{
	uint64_t first = (r->offset + f->page_bytes - 1) / f->page_bytes;
	uint64_t end = (r->offset + r->bytes) / f->page_bytes;

	*ret_first = first;
	return end > first ? end - first : 0;
}

/* Where the tracer's account is to be believed, it; else what was looked up. BPF writes PRESENT first, so it is read last. */
static uint64_t word_at(const struct feed *f, uint64_t word, uint64_t *ret_unknown)
{
	const uint64_t *present = f->maps.map[RESIDENCY_PRESENT],
		       *touched = f->maps.map[RESIDENCY_TOUCHED];
	uint64_t t = __atomic_load_n(&touched[word], __ATOMIC_ACQUIRE);
	uint64_t p = __atomic_load_n(&present[word], __ATOMIC_RELAXED);

	*ret_unknown = f->seeded ? 0 : ~t;
	return (p & t) | (f->seed[word] & ~t);
}

/* ---- without the tracer ---- */

static int count_by_cachestat(int fd, uint64_t offset, uint64_t bytes, uint64_t *ret)
{
	struct cachestat_range range = { offset, bytes };
	struct cachestat cs = {};

	if (syscall(SYS_cachestat, fd, &range, &cs, 0) < 0)
		return -errno;
	*ret = cs.cached;
	return 0;
}

static int count_by_mincore(const struct feed *f, size_t part, uint64_t page, uint64_t n, uint64_t *ret)
{
	const char *data = gguf_part(f->catalog->gguf, part)->data;
	unsigned char seen[4096];
	uint64_t count = 0;

	while (n > 0) {
		uint64_t piece = MIN(n, (uint64_t)sizeof(seen));

		if (mincore((void *)(data + page * f->page_bytes), piece * f->page_bytes, seen) < 0)
			return -errno;
		for (uint64_t i = 0; i < piece; i++)
			count += seen[i] & 1;
		page += piece;
		n -= piece;
	}
	*ret = count;
	return 0;
}

/* The kernel's own condition: to others mincore says that everything is there, and cachestat nothing. */
static bool may_look(int fd)
{
	char path[48];
	struct stat st;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return (fstat(fd, &st) == 0 && st.st_uid == geteuid()) || access(path, W_OK) == 0;
}

/* A page that was just read must be seen: on overlayfs it is another file's. */
static bool cachestat_sees(int fd, size_t page_bytes)
{
	uint64_t cached;
	char byte;

	for (unsigned i = 0; i < 3; i++) {
		if (pread(fd, &byte, 1, 0) != 1 || count_by_cachestat(fd, 0, page_bytes, &cached) < 0)
			return false;
		if (cached > 0)
			return true;
	}
	return false;
}

static void find_fallback(struct feed *f)
{
	const struct gguf *g = f->catalog->gguf;
	bool cachestat = true;

	f->may_look = true;
	for (size_t i = 0; i < f->n_parts; i++) {
		const struct gguf_part *p = gguf_part(g, i);

		cachestat = cachestat && p->fd >= 0 && cachestat_sees(p->fd, f->page_bytes);
		f->may_look = f->may_look && p->fd >= 0 && p->data && may_look(p->fd);
	}
	f->fallback = cachestat ? FEED_CACHESTAT : f->may_look ? FEED_MINCORE : FEED_NONE;
}

/* ---- seeding and checking ---- */

static uint64_t *seed_of(struct feed *f, size_t part, uint64_t page)
{
	return &f->seed[(f->first[part] + page) / 64];
}

static int look(const struct feed *f, const struct scan *s, uint64_t n, uint64_t *ret_words)
{
	const char *data = gguf_part(f->catalog->gguf, s->part)->data;
	unsigned char seen[SLICE_PAGES];

	if (mincore((void *)(data + s->page * f->page_bytes), n * f->page_bytes, seen) < 0)
		return -errno;
	memset(ret_words, 0, ALIGN_UP(n, (uint64_t)64) / 8);
	for (uint64_t i = 0; i < n; i++)
		ret_words[i / 64] |= (uint64_t)(seen[i] & 1) << (i % 64);
	return 0;
}

/* Pages of the slice that stand otherwise in the account than in memory, before the look and after. */
static int compare(const struct feed *f, const struct scan *s, uint64_t n, uint64_t *ret_differ)
{
	uint64_t first = (f->first[s->part] + s->page) / 64, n_words = (n + 63) / 64, differ, unknown;
	uint64_t before[SLICE_PAGES / 64], seen[SLICE_PAGES / 64];
	int r;

	for (unsigned i = 0; i < LOOKS; i++) {
		if (i > 0)
			usleep(LOOK_US);
		for (uint64_t w = 0; w < n_words; w++)
			before[w] = word_at(f, first + w, &unknown);
		r = look(f, s, n, seen);
		if (r < 0)
			return r;
		differ = 0;
		for (uint64_t w = 0; w < n_words; w++) {
			uint64_t after = word_at(f, first + w, &unknown);
			uint64_t stable = ~(before[w] ^ after) & ~unknown;

			differ += (uint64_t)__builtin_popcountll((after ^ seen[w]) & stable);
		}
		if (differ == 0)
			break;
	}
	*ret_differ = differ;
	return 0;
}

/* One slice. 1: that was the last; 0; -errno. */
static int scan_step(struct feed *f, bool fill)
{
	struct scan *s = &f->scan;
	uint64_t n = MIN(pages_of(f, s->part) - s->page, (uint64_t)SLICE_PAGES), differ = 0;
	int r;

	r = fill ? look(f, s, n, seed_of(f, s->part, s->page)) : compare(f, s, n, &differ);
	if (r < 0)
		return r;
	s->differ += differ;
	s->page += n;
	if (s->page < pages_of(f, s->part))
		return 0;
	s->page = 0;
	s->part++;
	return s->part == f->n_parts;
}

/* ---- the connection ---- */

_printf_(2, 3) static void set_reason(struct feed *f, const char *format, ...)
{
	char *s = NULL;
	va_list ap;

	va_start(ap, format);
	if (vasprintf(&s, format, ap) < 0)
		s = NULL;
	va_end(ap);
	free(f->reason);
	f->reason = s;
}

static void arm(struct feed *f, uint64_t us)
{
	if (!f->timer)
		return;
	/* fails for want of memory only: what was armed before still comes */
	(void)sd_event_source_set_time_relative(f->timer, us);
	(void)sd_event_source_set_enabled(f->timer, SD_EVENT_ONESHOT);
}

/* Says so when the source changed. */
static void set_live(struct feed *f, bool live)
{
	bool changed = f->live != live;

	pthread_rwlock_wrlock(&f->lock);
	f->live = live;
	if (f->state == STATE_AWAY)
		feed_maps_unmap(&f->maps);
	pthread_rwlock_unlock(&f->lock);
	if (changed && f->event && f->on_change)
		f->on_change(f->arg);
}

static void lose(struct feed *f, uint64_t retry_us)
{
	f->io = sd_event_source_disable_unref(f->io);
	if (f->fd >= 0)
		close(f->fd);
	f->fd = -1;
	f->state = STATE_AWAY;
	f->checking = false;
	set_live(f, false);
	arm(f, retry_us);
}

/* Comes again soon at first, and ever more seldom. */
static void lose_for_a_while(struct feed *f)
{
	uint64_t us = f->retry_us;

	f->retry_us = MIN(2 * us, (uint64_t)RETRY_MAX_US);
	lose(f, us);
}

static int send_message(const struct feed *f, const void *head, size_t head_len, const void *tail,
			size_t tail_len, bool parts)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(RESIDENCY_PARTS * sizeof(int))];
	} control = {};
	struct iovec iov[] = { { (void *)head, head_len }, { (void *)tail, tail_len } };
	struct msghdr m = { .msg_iov = iov, .msg_iovlen = tail_len > 0 ? 2 : 1 };

	if (parts) {
		struct cmsghdr *c = &control.header;
		int fds[RESIDENCY_PARTS];

		for (size_t i = 0; i < f->n_parts; i++)
			fds[i] = gguf_part(f->catalog->gguf, i)->fd;
		m.msg_control = control.bytes;
		m.msg_controllen = CMSG_SPACE(f->n_parts * sizeof(int));
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(f->n_parts * sizeof(int));
		memcpy(CMSG_DATA(c), fds, f->n_parts * sizeof(int));
	}
	return sendmsg(f->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int ask_attach(struct feed *f)
{
	struct residency_attach a = {
		.header = { RESIDENCY_MAGIC, RESIDENCY_VERSION, RESIDENCY_ATTACH },
		.page_bytes = (uint32_t)f->page_bytes,
		.n_parts = (uint32_t)f->n_parts,
		.n_blocks = f->catalog->n_blocks,
		.n_extents = (uint32_t)f->n_extents,
	};

	f->state = STATE_ASKED;
	return send_message(f, &a, sizeof(a), f->extents, f->n_extents * sizeof(*f->extents), true);
}

static int ask_latency(struct feed *f)
{
	struct residency_latency l = {
		.header = { RESIDENCY_MAGIC, RESIDENCY_VERSION, RESIDENCY_LATENCY },
		.on = f->latency,
	};

	return send_message(f, &l, sizeof(l), NULL, 0, false);
}

/* The tracer forgets what was touched, and everything is looked up again. */
static int ask_reset(struct feed *f)
{
	struct residency_header h = { RESIDENCY_MAGIC, RESIDENCY_VERSION, RESIDENCY_RESET };

	f->state = STATE_ASKED;
	f->checking = false;
	set_live(f, false);
	return send_message(f, &h, sizeof(h), NULL, 0, false);
}

static void go_live(struct feed *f, bool seeded)
{
	f->state = STATE_LIVE;
	f->seeded = seeded;
	f->retry_us = RETRY_MIN_US;
	if (!seeded)
		set_reason(f, "%s%swhat is in memory already is not known: the model's file is another user's",
			   f->text ? f->text : "", f->text ? "; " : "");
	else if (f->text)
		set_reason(f, "%s", f->text);
	else {
		free(f->reason);
		f->reason = NULL;
	}
	set_live(f, true);
	arm(f, CHECK_US);
}

static void begin_seeding(struct feed *f)
{
	f->state = STATE_SEEDING;
	f->scan = (struct scan){};
	memset(f->seed, 0, f->n_words * sizeof(*f->seed));
	if (!f->may_look)
		go_live(f, false);
	else
		arm(f, 0);
}

static void seed_slice(struct feed *f)
{
	int r = scan_step(f, true);

	if (r == 0)
		arm(f, 0);
	else
		go_live(f, r > 0);
}

/* Now and then: an account that is wrong (there is no known way to that) does not stay so. */
static void check_slice(struct feed *f)
{
	int r;

	if (!f->may_look)
		return;
	if (!f->checking)
		f->scan = (struct scan){};
	f->checking = true;
	r = scan_step(f, false);
	if (r >= 0 && f->scan.differ > 0) {
		if (ask_reset(f) < 0)
			lose_for_a_while(f);
		return;
	}
	f->checking = r == 0;
	arm(f, f->checking ? 0 : CHECK_US);
}

static void on_attached(struct feed *f, const struct residency_reply *reply, const int *fds, size_t n_fds)
{
	struct feed_maps maps;
	int r;

	free(f->text);
	f->text = reply->text[0] ? strdup(reply->text) : NULL;
	if (reply->error < 0) {
		set_reason(f, "the tracer: %s", reply->text[0] ? reply->text : strerror(-reply->error));
		return lose(f, REFUSED_US);
	}
	r = feed_maps_map(fds, n_fds, f->n_words, f->catalog->n_blocks, &maps);
	if (r < 0) {
		set_reason(f, "the tracer sent what are no maps of this model: %s", strerror(-r));
		return lose(f, REFUSED_US);
	}
	pthread_rwlock_wrlock(&f->lock);
	f->maps = maps;
	pthread_rwlock_unlock(&f->lock);
	f->attached = reply->attached;
	if (f->latency && ask_latency(f) < 0)
		return lose_for_a_while(f);
	begin_seeding(f);
}

static void on_reply(struct feed *f, struct residency_reply *reply, size_t len, const int *fds,
		     size_t n_fds)
{
	int r = feed_check_reply(reply, len);

	if (r < 0) {
		set_reason(f, "the tracer answers what is not understood: %s", strerror(-r));
		lose(f, REFUSED_US);
	} else if (f->state == STATE_ASKED && !f->maps.map[RESIDENCY_PRESENT]) {
		on_attached(f, reply, fds, n_fds);
	} else if (reply->header.type == RESIDENCY_LATENCY) {
		if (reply->error < 0)
			set_reason(f, "the tracer: %s", reply->text);
	} else if (f->state == STATE_ASKED && reply->header.type == RESIDENCY_RESET &&
		   reply->error == 0) {
		begin_seeding(f);
	} else {
		set_reason(f, "the tracer ended: %s", reply->text[0] ? reply->text : strerror(EPROTO));
		lose_for_a_while(f);
	}
}

/* One message, if there is one. */
static void receive(struct feed *f)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(RESIDENCY_MAPS * sizeof(int))];
	} control;
	struct residency_reply reply;
	struct iovec iov = { &reply, sizeof(reply) };
	struct msghdr m = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	int fds[RESIDENCY_MAPS + 1]; /* a control message may hold one more than it was made for: alignment */
	size_t n_fds = 0;
	ssize_t n;

	n = recvmsg(f->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	for (struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL; c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && n_fds == 0) {
			n_fds = MIN((c->cmsg_len - CMSG_LEN(0)) / sizeof(int), ARRAY_SIZE(fds));
			memcpy(fds, CMSG_DATA(c), n_fds * sizeof(int));
		}
	if (n <= 0) {
		set_reason(f, "the tracer went away: %s", n < 0 ? strerror(errno) : "connection closed");
		lose_for_a_while(f);
	} else {
		on_reply(f, &reply, m.msg_flags & (MSG_TRUNC | MSG_CTRUNC) ? SIZE_MAX : (size_t)n,
			 fds, n_fds);
	}
	for (size_t i = 0; i < n_fds; i++)
		close(fds[i]);
}

static int on_io(sd_event_source *source, int fd, uint32_t events, void *arg)
{
	(void)source;
	(void)fd;
	(void)events;
	receive(arg);
	return 0;
}

static int open_connection(const char *path, int *ret)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	_cleanup_(closep) int fd = -1;

	if (strlen(path) >= sizeof(sa.sun_path))
		return -ENAMETOOLONG;
	memcpy(sa.sun_path, path, strlen(path));
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
		return -errno;
	*ret = TAKE_FD(fd);
	return 0;
}

static void try_tracer(struct feed *f)
{
	int r;

	if (f->n_parts > RESIDENCY_PARTS || f->n_extents > RESIDENCY_EXTENTS ||
	    f->catalog->n_blocks > RESIDENCY_BLOCKS || f->n_words > RESIDENCY_PAGES / 64) {
		set_reason(f, "the model is larger than what the tracer follows");
		return;
	}
	r = open_connection(f->path, &f->fd);
	if (r < 0) {
		set_reason(f, "no tracer at %s: %s%s", f->path, strerror(-r),
			   f->fallback == FEED_NONE
				   ? "; the file is another user's, whose pages the kernel does not tell"
				   : "");
		return lose_for_a_while(f);
	}
	r = ask_attach(f);
	if (r >= 0 && f->event)
		r = sd_event_add_io(f->event, &f->io, f->fd, EPOLLIN, on_io, f);
	if (r < 0) {
		set_reason(f, "the tracer at %s takes no question: %s", f->path, strerror(-r));
		return lose_for_a_while(f);
	}
	set_reason(f, "the tracer has not answered yet");
	arm(f, ANSWER_US);
}

static int on_timer(sd_event_source *source, uint64_t us, void *arg)
{
	struct feed *f = arg;

	(void)source;
	(void)us;
	switch (f->state) {
	case STATE_AWAY: try_tracer(f); break;
	case STATE_ASKED:
		set_reason(f, "the tracer does not answer");
		lose_for_a_while(f);
		break;
	case STATE_SEEDING: seed_slice(f); break;
	case STATE_LIVE: check_slice(f); break;
	}
	return 0;
}

/* Without a loop: until the answer is there, and all is looked up. */
static void wait_for(struct feed *f, enum feed_state while_in)
{
	struct pollfd p = { .fd = f->fd, .events = POLLIN };

	if (f->state == while_in && f->fd >= 0 && poll(&p, 1, ANSWER_SYNC_MS) <= 0) {
		set_reason(f, "the tracer does not answer");
		lose_for_a_while(f);
	}
	if (f->fd >= 0)
		receive(f);
	while (f->state == STATE_SEEDING)
		seed_slice(f);
}

/* ---- what feed.h promises ---- */

int feed_new(sd_event *event, const char *socket_path, const struct catalog *c,
	     void (*on_change)(void *arg), void *arg, struct feed **ret)
{
	struct feed *f = calloc(1, sizeof(*f));
	int r;

	if (!f)
		return -ENOMEM;
	if (!socket_path)
		socket_path = getenv("RESIDENTD_BPF_SOCKET");
	if (!socket_path)
		socket_path = RESIDENCY_SOCKET;
	*f = (struct feed){
		.event = sd_event_ref(event),
		.catalog = c,
		.path = strdup(socket_path),
		.on_change = on_change,
		.arg = arg,
		.fd = -1,
		.retry_us = RETRY_MIN_US,
	};
	pthread_rwlock_init(&f->lock, NULL);
	r = f->path ? measure(f) : -ENOMEM;
	if (r >= 0 && event)
		r = sd_event_add_time_relative(event, &f->timer, CLOCK_MONOTONIC, 0, 1, on_timer, f);
	if (r < 0) {
		feed_free(f);
		return r;
	}
	find_fallback(f);
	try_tracer(f);
	if (!event && f->state == STATE_ASKED)
		wait_for(f, STATE_ASKED);
	*ret = f;
	return 0;
}

struct feed *feed_free(struct feed *f)
{
	if (!f)
		return NULL;
	sd_event_source_disable_unref(f->io);
	sd_event_source_disable_unref(f->timer);
	sd_event_unref(f->event);
	if (f->fd >= 0)
		close(f->fd);
	feed_maps_unmap(&f->maps);
	pthread_rwlock_destroy(&f->lock);
	free(f->extents);
	free(f->seed);
	free(f->reason);
	free(f->text);
	free(f->path);
	free(f);
	return NULL;
}

/* The lock is no part of what a reader must not change. */
static bool read_begin(const struct feed *f)
{
	pthread_rwlock_rdlock((pthread_rwlock_t *)&f->lock);
	return f->live;
}

static void read_end(const struct feed *f)
{
	pthread_rwlock_unlock((pthread_rwlock_t *)&f->lock);
}

enum feed_source feed_source(const struct feed *f)
{
	enum feed_source s = read_begin(f) ? FEED_BPF : f->fallback;

	read_end(f);
	return s;
}

const char *feed_source_to_string(enum feed_source s)
{
	switch (s) {
	case FEED_BPF: return "bpf";
	case FEED_CACHESTAT: return "cachestat";
	case FEED_MINCORE: return "mincore";
	case FEED_NONE: return "none";
	}
	return "?";
}

const char *feed_reason(const struct feed *f)
{
	return f->reason;
}

static int count_bits(const struct feed *f, uint64_t page, uint64_t n, uint64_t *ret)
{
	uint64_t count = 0, unknown;

	while (n > 0) {
		uint64_t first = page % 64, len = MIN(64 - first, n);
		uint64_t mask = ~0ull >> (64 - len) << first, word = word_at(f, page / 64, &unknown);

		if (unknown & mask)
			return -ENODATA;
		count += (uint64_t)__builtin_popcountll(word & mask);
		page += len;
		n -= len;
	}
	*ret = count;
	return 0;
}

static int count_pages(const struct feed *f, bool live, uint32_t part, uint64_t page, uint64_t n,
		       uint64_t *ret)
{
	if (live)
		return count_bits(f, f->first[part] + page, n, ret);
	switch (f->fallback) {
	case FEED_CACHESTAT:
		return count_by_cachestat(gguf_part(f->catalog->gguf, part)->fd,
					  page * f->page_bytes, n * f->page_bytes, ret);
	case FEED_MINCORE: return count_by_mincore(f, part, page, n, ret);
	case FEED_NONE:
	case FEED_BPF: break;
	}
	return -ENODATA;
}

int feed_block_pages(const struct feed *f, uint32_t block, uint32_t *ret_resident, uint32_t *ret_all)
{
	uint64_t resident = 0, all = 0, first, count;
	struct catalog_block b;
	bool live;
	int r = 0;

	if (block >= f->catalog->n_blocks)
		return -EINVAL;
	catalog_block(f->catalog, block, &b);
	live = read_begin(f);
	if (!live)
		read_end(f); /* system calls: nothing that is locked */
	for (uint32_t i = 0; i < b.n_ranges && r >= 0; i++) {
		uint64_t n = whole_pages(f, &b.range[i], &first);

		if (n == 0) /* to cachestat, 0 bytes is all of the file */
			continue;
		r = count_pages(f, live, b.range[i].part, first, n, &count);
		if (r >= 0) {
			resident += count;
			all += n;
		}
	}
	if (live)
		read_end(f);
	if (r < 0)
		return r;
	*ret_resident = (uint32_t)resident;
	*ret_all = (uint32_t)all;
	return 0;
}

static int get_counters(const struct feed *f, uint32_t at, struct feed_block *ret)
{
	int r = -ENODATA;

	if (read_begin(f)) {
		const struct residency_counters *c = f->maps.map[RESIDENCY_COUNTERS];

		c += at;
		*ret = (struct feed_block){
			.faults = __atomic_load_n(&c->faults, __ATOMIC_RELAXED),
			.adds = __atomic_load_n(&c->adds, __ATOMIC_RELAXED),
			.deletes = __atomic_load_n(&c->deletes, __ATOMIC_RELAXED),
			.refaults = __atomic_load_n(&c->refaults, __ATOMIC_RELAXED),
		};
		r = 0;
	}
	read_end(f);
	return r;
}

int feed_block_counters(const struct feed *f, uint32_t block, struct feed_block *ret)
{
	return block < f->catalog->n_blocks ? get_counters(f, block, ret) : -EINVAL;
}

int feed_trunk_counters(const struct feed *f, struct feed_block *ret)
{
	return get_counters(f, f->catalog->n_blocks, ret);
}

int feed_histogram(const struct feed *f, uint64_t ret_count[FEED_HISTOGRAM])
{
	static_assert(FEED_HISTOGRAM == RESIDENCY_BUCKETS, "the tracer's buckets are the feed's");
	int r = -ENODATA;

	if (read_begin(f)) {
		const uint64_t *h = f->maps.map[RESIDENCY_HISTOGRAM];

		for (unsigned i = 0; i < FEED_HISTOGRAM; i++)
			ret_count[i] = __atomic_load_n(&h[i], __ATOMIC_RELAXED);
		r = 0;
	}
	read_end(f);
	return r;
}

/* What the tracer answers comes later; a tracer that comes later is asked then. */
int feed_measure_latency(struct feed *f, bool on)
{
	const uint32_t begin = 1u << RESIDENCY_ON_BEGIN;
	const uint32_t end = 1u << RESIDENCY_ON_END | 1u << RESIDENCY_ON_RETURN;

	f->latency = on;
	if (f->state != STATE_LIVE && f->state != STATE_SEEDING)
		return -ENODATA;
	if (on && (!(f->attached & begin) || !(f->attached & end)))
		return -EOPNOTSUPP;
	if (ask_latency(f) < 0) {
		lose_for_a_while(f);
		return -ENODATA;
	}
	if (!f->event)
		wait_for(f, STATE_LIVE);
	return f->state == STATE_AWAY ? -ENODATA : 0;
}

/* False: not of the model, or no fault to speak of: the page was there, and only not mapped. */
static bool translate(const struct feed *f, const struct residency_fault *e, struct feed_fault *ret)
{
	uint64_t offset = 0, unknown;
	size_t part = 0;

	for (; part < f->n_parts; part++) {
		uint64_t bytes = gguf_part(f->catalog->gguf, part)->bytes, from;

		from = e->latency_ns > 0 ? (uint64_t)(uintptr_t)gguf_part(f->catalog->gguf, part)->data
					 : f->first[part] * f->page_bytes;
		offset = (e->latency_ns > 0 ? e->where : e->where * f->page_bytes) - from;
		if (offset < bytes)
			break;
	}
	if (part == f->n_parts)
		return false;
	if (e->latency_ns == 0) {
		const uint64_t *touched = f->maps.map[RESIDENCY_TOUCHED];
		uint64_t bit = 1ull << (e->where % 64);

		if (!(touched[e->where / 64] & bit) && (word_at(f, e->where / 64, &unknown) & bit))
			return false;
	}
	*ret = (struct feed_fault){
		.time_ns = e->time_ns,
		.latency_ns = e->latency_ns,
		.block = block_at(f, part, offset),
		.tid = e->tid,
	};
	return true;
}

size_t feed_take_faults(struct feed *f, struct feed_fault *ret, size_t max)
{
	struct residency_fault e;
	size_t n = 0;

	while (f->live && n < max && feed_ring_take(&f->maps.ring, &e, sizeof(e)))
		n += translate(f, &e, &ret[n]);
	return n;
}

int feed_check(struct feed *f, uint64_t *ret_differ)
{
	int r = 0;

	if (!f->event && f->state == STATE_LIVE) {
		struct pollfd p = { .fd = f->fd, .events = POLLIN };

		if (poll(&p, 1, 0) > 0)
			receive(f);
	}
	if (f->state != STATE_LIVE || !f->may_look)
		return -ENODATA;
	f->scan = (struct scan){};
	while (r == 0)
		r = scan_step(f, false);
	if (f->checking) /* begins anew */
		f->checking = false;
	if (r < 0)
		return r;
	*ret_differ = f->scan.differ;
	return 0;
}
