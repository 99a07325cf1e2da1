/* SPDX-License-Identifier: MIT */
/*
 * What the tracer sends, honest or not; the ways to do without it; and, where the kernel lets us load it, the real one: its account
 * against mincore and cachestat while pages come and go.
 */
#include "tests/test.h"

#include "daemon/residency/feed-maps.h"
#include "daemon/residency/feed.h"
#include "tests/unit/gguf-build.h"

#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/magic.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#define PAGE         4096U
#define NOBODY       65534U
#define ROUNDS       24
#define STEPS        30
#define NO_OVERLAYFS 77
#define LAYERS       2
#define EXPERTS      16
#define GROUP_LIMIT  (28 << 20)

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* ---- a model of some 40 MiB ---- */

struct fixture {
	char dir[80], model[100], socket[100];
	bool on_disk;
	int fd;
	struct gguf *g;
	struct catalog *c;
	pid_t helper;
	uint64_t seed;
};

static uint64_t rnd(struct fixture *x, uint64_t n)
{
	x->seed ^= x->seed << 13;
	x->seed ^= x->seed >> 7;
	x->seed ^= x->seed << 17;
	return (x->seed >> 11) % n;
}

static void add_tensor(struct gguf_build *b, const char *name, uint64_t ne0, uint64_t ne1, uint64_t ne2)
{
	const uint64_t ne[] = { ne0, ne1, ne2 };
	size_t bytes = ne0 * ne1 * ne2 * sizeof(float);
	_cleanup_(freep) void *data = calloc(1, bytes);

	assert_non_null(data);
	gguf_build_tensor(b, name, QUANT_F32, 3, ne, data, bytes);
}

static void make_model(const char *path)
{
	struct gguf_build b = gguf_build_new();
	char name[64];

	add_tensor(&b, "token_embd.weight", 250, 1111, 1);
	for (int l = 0; l < LAYERS; l++)
		for (unsigned m = 0; m < 3; m++) {
			static const char *const names[] = { "gate", "up", "down" };

			snprintf(name, sizeof(name), "blk.%d.ffn_%s_exps.weight", l, names[m]);
			add_tensor(&b, name, 250, 437 - 3 * m, EXPERTS); /* 437 KB, of no page */
		}
	add_tensor(&b, "output.weight", 250, 33, 1);
	gguf_build_write(&b, path);
}

static void open_model(struct fixture *x, const char *path)
{
	assert_int_equal(gguf_open(path, &x->g, NULL), 0);
	assert_int_equal(catalog_new(x->g, 0, &x->c, NULL), 0);
	x->fd = gguf_part(x->g, 0)->fd;
}

static void close_model(struct fixture *x)
{
	x->c = catalog_free(x->c);
	x->g = gguf_close(x->g);
}

static int setup(void **state)
{
	static struct fixture x;
	const char *tmp = getenv("TMPDIR");
	const char *const places[] = { tmp ? tmp : P_tmpdir, "build", "." };
	struct statfs fs;
	int fd;

	x = (struct fixture){ .seed = 0x9e3779b97f4a7c15 };
	for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
		x.on_disk = statfs(places[i], &fs) == 0 && fs.f_type != TMPFS_MAGIC &&
			    fs.f_type != RAMFS_MAGIC && fs.f_type != OVERLAYFS_SUPER_MAGIC;
		snprintf(x.dir, sizeof(x.dir), "%s/test-feed-XXXXXX",
			 x.on_disk ? places[i] : places[0]);
		if (x.on_disk)
			break;
	}
	if (!mkdtemp(x.dir) || chmod(x.dir, 0755) < 0)
		return -1;
	snprintf(x.model, sizeof(x.model), "%s/model.gguf", x.dir);
	snprintf(x.socket, sizeof(x.socket), "%s/bpf.sock", x.dir);
	make_model(x.model);
	fd = open(x.model, O_RDWR | O_CLOEXEC); /* dirty pages cannot be dropped */
	if (fd < 0 || fsync(fd) < 0 || fchmod(fd, 0644) < 0)
		return -1;
	close(fd);
	open_model(&x, x.model);
	*state = &x;
	return 0;
}

static void stop_helper(struct fixture *x)
{
	if (x->helper > 0) {
		kill(x->helper, SIGKILL);
		waitpid(x->helper, NULL, 0);
	}
	x->helper = 0;
}

static int teardown(void **state)
{
	struct fixture *x = *state;

	stop_helper(x);
	close_model(x);
	unlink(x->model);
	unlink(x->socket);
	return rmdir(x->dir);
}

/* ---- the page cache, as the kernel tells ---- */

static uint64_t n_pages(const struct fixture *x)
{
	return (gguf_part(x->g, 0)->bytes + PAGE - 1) / PAGE;
}

static unsigned char *look(const struct fixture *x)
{
	const struct gguf_part *p = gguf_part(x->g, 0);
	unsigned char *seen = malloc(n_pages(x));

	assert_non_null(seen);
	assert_int_equal(mincore((void *)(uintptr_t)p->data, p->bytes, seen), 0);
	return seen;
}

static uint64_t count(const unsigned char *seen, uint64_t first, uint64_t end)
{
	uint64_t n = 0;

	for (uint64_t i = first; i < end; i++)
		n += seen[i] & 1;
	return n;
}

/* -ENOSYS, -EPERM, or pages. */
static int64_t cachestat_of(int fd)
{
	const uint64_t range[2] = { 0, 0 };
	uint64_t cs[5];

	return syscall(451, fd, range, cs, 0) < 0 ? -errno : (int64_t)cs[0];
}

static bool dropped(const struct fixture *x)
{
	const struct gguf_part *p = gguf_part(x->g, 0);

	for (unsigned i = 0; i < 200; i++) {
		_cleanup_(freep) unsigned char *seen = NULL;

		(void)madvise((void *)(uintptr_t)p->data, p->bytes, MADV_DONTNEED);
		(void)posix_fadvise(x->fd, 0, 0, POSIX_FADV_DONTNEED);
		seen = look(x);
		if (count(seen, 0, n_pages(x)) == 0)
			return true;
		usleep(5000);
	}
	return false;
}

static void drop(const struct fixture *x)
{
	assert_true(dropped(x));
}

/* All of it, and none of it still being read: that is in the cache, but not for mincore. */
static void populate(const struct fixture *x)
{
	const struct gguf_part *p = gguf_part(x->g, 0);

	assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes, MADV_POPULATE_READ), 0);
}

static void need_page_cache(const struct fixture *x)
{
	if (!x->on_disk)
		skip_because("no file system of a disk: pages of others cannot be dropped");
}

/* Whole pages of the block, by the feed and by mincore. */
static uint64_t whole_pages_seen(const struct fixture *x, const unsigned char *seen, uint32_t block,
				 uint64_t *ret_all)
{
	struct catalog_block b;
	uint64_t n = 0, all = 0;

	catalog_block(x->c, block, &b);
	for (uint32_t i = 0; i < b.n_ranges; i++) {
		uint64_t first = (b.range[i].offset + PAGE - 1) / PAGE;
		uint64_t end = (b.range[i].offset + b.range[i].bytes) / PAGE;

		n += count(seen, first, end);
		all += end - first;
	}
	*ret_all = all;
	return n;
}

/* Pages whose first byte is the block's. */
static uint64_t own_pages_seen(const struct fixture *x, const unsigned char *seen, uint32_t block)
{
	struct catalog_block b;
	uint64_t n = 0;

	catalog_block(x->c, block, &b);
	for (uint32_t i = 0; i < b.n_ranges; i++)
		n += count(seen, (b.range[i].offset + PAGE - 1) / PAGE,
			   (b.range[i].offset + b.range[i].bytes + PAGE - 1) / PAGE);
	return n;
}

static unsigned wrong_blocks(const struct fixture *x, const struct feed *f)
{
	_cleanup_(freep) unsigned char *seen = look(x);
	unsigned wrong = 0;

	for (uint32_t b = 0; b < x->c->n_blocks; b++) {
		uint32_t resident = 0, all = 0;
		uint64_t expected, expected_all;

		expected = whole_pages_seen(x, seen, b, &expected_all);
		wrong += feed_block_pages(f, b, &resident, &all) != 0 || resident != expected ||
			 all != expected_all;
	}
	return wrong;
}

static void expect_blocks(const struct fixture *x, const struct feed *f)
{
	unsigned wrong = 1;

	for (unsigned i = 0; i < 100 && wrong > 0; i++) {
		if (i > 0)
			usleep(10000);
		wrong = wrong_blocks(x, f);
	}
	assert_int_equal(wrong, 0);
}

/* ---- what the tracer sends ---- */

#define RING 4096U

struct crafted {
	uint64_t consumer, producer;
	_Alignas(8) unsigned char data[2 * RING];
	struct feed_ring ring;
};

static void craft(struct crafted *c)
{
	*c = (struct crafted){};
	c->ring = (struct feed_ring){ &c->consumer, &c->producer, c->data, RING };
}

/* Both mappings of the data show the same. */
static void put_u32(struct crafted *c, uint64_t at, uint32_t v)
{
	memcpy(c->data + at % RING, &v, sizeof(v));
	memcpy(c->data + RING + at % RING, &v, sizeof(v));
}

static void put(struct crafted *c, uint32_t head, uint32_t value)
{
	uint32_t len = head & ~(BPF_RINGBUF_BUSY_BIT | BPF_RINGBUF_DISCARD_BIT);

	put_u32(c, c->producer, head);
	for (uint32_t i = 0; i < len; i += 4)
		put_u32(c, c->producer + 8 + i, value);
	c->producer += ALIGN_UP(len + 8U, 8U);
}

static void test_ring(void **unused)
{
	static struct crafted c;
	uint32_t out[4] = {};

	(void)unused;
	craft(&c);
	assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
	/* Around the end many times, with records that are not ours between. */
	for (uint32_t i = 1; i < 2000; i++) {
		put(&c, i % 3 ? 12 : 16 | BPF_RINGBUF_DISCARD_BIT, 0);
		put(&c, 16, i);
		assert_true(feed_ring_take(&c.ring, out, sizeof(out)));
		assert_int_equal(out[0], i);
		assert_int_equal(out[3], i);
		assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
		assert_int_equal(c.consumer, c.producer);
	}
	/* One that is still being written holds back those after it. */
	put(&c, 16 | BPF_RINGBUF_BUSY_BIT, 1);
	put(&c, 16, 2);
	assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
	put_u32(&c, c.consumer, 16);
	assert_true(feed_ring_take(&c.ring, out, sizeof(out)));
	assert_true(feed_ring_take(&c.ring, out, sizeof(out)));
	assert_int_equal(out[0], 2);
}

/* Whatever it claims: nothing comes of it, and the reader gets out of it. */
static void test_ring_hostile(void **unused)
{
	static struct crafted c;
	uint32_t out[4];

	(void)unused;
	craft(&c);
	put_u32(&c, 0, 0x3fffffff);
	c.producer = 24;
	assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
	assert_int_equal(c.consumer, 24);

	craft(&c); /* more than fits */
	c.producer = RING + 8;
	assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
	assert_int_equal(c.consumer, c.producer);

	craft(&c); /* backwards */
	c.consumer = 64;
	c.producer = 8;
	assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
	assert_int_equal(c.consumer, 8);

	craft(&c); /* a producer between two places */
	c.consumer = c.producer = 4;
	put_u32(&c, 4, 16);
	c.producer = 28;
	assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
	assert_int_equal(c.consumer, 28);

	craft(&c); /* ends beyond the producer */
	put(&c, 16, 7);
	c.producer = 16;
	assert_false(feed_ring_take(&c.ring, out, sizeof(out)));
	assert_int_equal(c.consumer, 16);
}

static void test_shapes(void **unused)
{
	const struct feed_shape s = { 2, 8, 640 };
	static const char *const wrong[] = {
		"",
		"map_type:\t2\nkey_size:\t4\nvalue_size:\t8\n",
		"map_type:\t1\nvalue_size:\t8\nmax_entries:\t640\n",
		"map_type:\t2\nvalue_size:\t4\nmax_entries:\t640\n",
		"map_type:\t2\nvalue_size:\t8\nmax_entries:\t641\n",
		"map_type:\t2\nvalue_size:\t8\nmax_entries:\t640x\n",
		"map_type:\t\nvalue_size:\t8\nmax_entries:\t640\n",
		"xmap_type:\t2\nvalue_size:\t8\nmax_entries:\t640\n",
		"map_type:\t2 value_size:\t8 max_entries:\t640\n",
	};

	(void)unused;
	assert_true(feed_shape_matches("pos:\t0\nflags:\t02\nmap_type:\t2\nkey_size:\t4\nvalue_size:\t8\n"
				       "max_entries:\t640\nmap_flags:\t0x400\n",
				       &s));
	for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
		assert_false(feed_shape_matches(wrong[i], &s));
}

static struct residency_reply reply_of(int32_t error, const char *text)
{
	struct residency_reply r = {
		.header = { RESIDENCY_MAGIC, RESIDENCY_VERSION, RESIDENCY_ATTACH },
		.error = error,
	};

	snprintf(r.text, sizeof(r.text), "%s", text);
	return r;
}

static void test_reply(void **unused)
{
	struct residency_reply r = reply_of(-EPERM, "no\n\x1b[31m \xff");

	(void)unused;
	assert_int_equal(feed_check_reply(&r, sizeof(r)), 0);
	assert_string_equal(r.text, "no??[31m ?");
	memset(r.text, 'x', sizeof(r.text));
	assert_int_equal(feed_check_reply(&r, sizeof(r)), 0);
	assert_int_equal(strlen(r.text), sizeof(r.text) - 1);
	assert_int_equal(feed_check_reply(&r, sizeof(r) - 1), -EBADMSG);
	assert_int_equal(feed_check_reply(&r, SIZE_MAX), -EBADMSG);
	r.header.magic++;
	assert_int_equal(feed_check_reply(&r, sizeof(r)), -EBADMSG);
	r = reply_of(1, "");
	assert_int_equal(feed_check_reply(&r, sizeof(r)), -EBADMSG);
	r = reply_of(0, "");
	r.header.version++;
	assert_int_equal(feed_check_reply(&r, sizeof(r)), -EPROTONOSUPPORT);
}

/* ---- without the tracer ---- */

static void expect_no_account(struct feed *f)
{
	uint64_t h[FEED_HISTOGRAM], differ = 1;
	struct feed_fault fault;
	struct feed_block b;

	assert_int_equal(feed_block_counters(f, 0, &b), -ENODATA);
	assert_int_equal(feed_trunk_counters(f, &b), -ENODATA);
	assert_int_equal(feed_histogram(f, h), -ENODATA);
	assert_int_equal(feed_take_faults(f, &fault, 1), 0);
	assert_int_equal(feed_measure_latency(f, true), -ENODATA);
	assert_int_equal(feed_check(f, &differ), -ENODATA);
}

static void test_fallback(void **state)
{
	struct fixture *x = *state;
	const struct gguf_part *p = gguf_part(x->g, 0);
	uint32_t resident, all;
	struct feed *f;

	need_page_cache(x);
	drop(x);
	assert_int_equal(feed_new(NULL, x->socket, x->c, NULL, NULL, &f), 0);
	assert_int_equal(feed_source(f), cachestat_of(x->fd) >= 0 ? FEED_CACHESTAT : FEED_MINCORE);
	assert_non_null(feed_reason(f));
	assert_non_null(strstr(feed_reason(f), x->socket));
	expect_no_account(f);
	expect_blocks(x, f);
	assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes / 2, MADV_WILLNEED), 0);
	assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes / 2, MADV_POPULATE_READ), 0);
	expect_blocks(x, f);
	assert_int_equal(feed_block_pages(f, x->c->n_blocks, &resident, &all), -EINVAL);
	feed_free(f);
	assert_null(feed_free(NULL));
}

/* In a process of its own, for what cannot be undone. */
static int status_in_child(void (*function)(struct fixture *x), struct fixture *x)
{
	pid_t pid;
	int status;

	fflush(NULL);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		x->helper = 0; /* the parent's */
		function(x);
		fflush(NULL);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void in_child(void (*function)(struct fixture *x), struct fixture *x)
{
	assert_int_equal(status_in_child(function, x), 0);
}

#define CHECK(condition)                                                                        \
	do {                                                                                    \
		if (!(condition)) {                                                             \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
			_exit(1);                                                               \
		}                                                                               \
	} while (0)

static void become_nobody(void)
{
	CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
}

static void ask_as_a_stranger(struct fixture *x)
{
	uint32_t resident, all;
	struct feed *f;

	become_nobody();
	CHECK(feed_new(NULL, x->socket, x->c, NULL, NULL, &f) == 0);
	CHECK(feed_source(f) == FEED_NONE);
	CHECK(feed_block_pages(f, 0, &resident, &all) == -ENODATA);
	feed_free(f);
}

static void test_somebody_elses_file(void **state)
{
	if (geteuid() != 0)
		skip_because("not root: cannot become another user");
	in_child(ask_as_a_stranger, *state);
}

/* ---- tracers that are none ---- */

enum fake { FAKE_CLOSES, FAKE_GARBAGE, FAKE_NO_MAPS, FAKE_FILES, FAKE_TOO_MANY, FAKE_REFUSES };

static int memfd_of(size_t bytes)
{
	int fd = (int)syscall(SYS_memfd_create, "map_type:\t2", 0);

	CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
	return fd;
}

static void send_fake(int fd, const struct residency_reply *r, unsigned n_fds)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(16 * sizeof(int))];
	} control = {};
	struct iovec iov = { (void *)r, sizeof(*r) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (n_fds > 0) {
		struct cmsghdr *c = &control.header;

		m.msg_control = control.bytes;
		m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		for (unsigned i = 0; i < n_fds; i++)
			((int *)CMSG_DATA(c))[i] = memfd_of(1 << 20);
	}
	CHECK(sendmsg(fd, &m, MSG_NOSIGNAL) == sizeof(*r));
}

static int listen_at(const char *path)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", path);
	unlink(path);
	assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0 && listen(fd, 4) == 0);
	return fd;
}

static void be_fake(int listener, enum fake fake)
{
	static char request[1 << 20];
	struct residency_reply r = reply_of(0, "");
	int fd = accept(listener, NULL, NULL);

	CHECK(fd >= 0 && recv(fd, request, sizeof(request), 0) > 0);
	switch (fake) {
	case FAKE_CLOSES: close(fd); return;
	case FAKE_GARBAGE: CHECK(send(fd, "hello", 5, 0) == 5); break;
	case FAKE_NO_MAPS: send_fake(fd, &r, 0); break;
	case FAKE_FILES: send_fake(fd, &r, RESIDENCY_MAPS); break;
	case FAKE_TOO_MANY: send_fake(fd, &r, 16); break;
	case FAKE_REFUSES:
		r = reply_of(-EPERM, "CAP_BPF is needed");
		send_fake(fd, &r, 0);
		break;
	}
	(void)recv(fd, request, sizeof(request), 0); /* until the feed has closed it */
}

static unsigned open_descriptors(void)
{
	unsigned n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void test_fakes(void **state)
{
	static const char *const reasons[] = {
		[FAKE_CLOSES] = "went away",        [FAKE_GARBAGE] = "not understood",
		[FAKE_NO_MAPS] = "no maps",         [FAKE_FILES] = "no maps",
		[FAKE_TOO_MANY] = "not understood", [FAKE_REFUSES] = "CAP_BPF is needed",
	};
	struct fixture *x = *state;

	for (unsigned i = 0; i < ARRAY_SIZE(reasons); i++) {
		int listener = listen_at(x->socket), status;
		unsigned before = open_descriptors();
		struct feed *f;
		pid_t pid;

		fflush(NULL);
		pid = fork();
		if (pid == 0) {
			be_fake(listener, i);
			_exit(0);
		}
		assert_int_equal(feed_new(NULL, x->socket, x->c, NULL, NULL, &f), 0);
		assert_int_not_equal(feed_source(f), FEED_BPF);
		assert_non_null(strstr(feed_reason(f), reasons[i]));
		expect_no_account(f);
		feed_free(f);
		assert_int_equal(open_descriptors(), before);
		close(listener);
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_int_equal(status, 0);
		unlink(x->socket);
	}
}

/* ---- the real one ---- */

static bool helper_answers(const struct fixture *x)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	_cleanup_(closep) int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", x->socket);
	return fd >= 0 && connect(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0;
}

static void start_helper(struct fixture *x)
{
	const char *path = getenv("RESIDENTD_BPF"), *out = getenv("O");
	char built[300], socket_option[320];

	if (geteuid() != 0)
		skip_because("not root: the tracer needs CAP_BPF and CAP_PERFMON");
	if (!path) {
		snprintf(built, sizeof(built), "%s/residentd-bpf", out ? out : "build");
		path = built;
	}
	if (access(path, X_OK) < 0)
		skip_because("%s is not there", path);
	if (access("/sys/kernel/btf/vmlinux", R_OK) < 0)
		skip_because("this kernel has no BTF");
	unlink(x->socket);
	snprintf(socket_option, sizeof(socket_option), "--socket=%s", x->socket);
	fflush(NULL);
	x->helper = fork();
	if (x->helper == 0) {
		execl(path, path, socket_option, "--allow-uid=12345",
		      getenv("RESIDENTD_BPF_VERBOSE") ? "-v" : NULL, NULL);
		_exit(127);
	}
	for (unsigned i = 0; i < 500 && !helper_answers(x); i++)
		usleep(10000);
}

/* feed_new, and skips where the kernel lets nobody. */
static struct feed *attach(struct fixture *x)
{
	struct feed *f;

	assert_int_equal(feed_new(NULL, x->socket, x->c, NULL, NULL, &f), 0);
	if (feed_source(f) != FEED_BPF && feed_reason(f) && strstr(feed_reason(f), "CAP_BPF")) {
		feed_free(f);
		skip_because("the kernel lets root load no BPF here");
	}
	if (feed_source(f) != FEED_BPF)
		print_error("the tracer did not attach: %s\n", feed_reason(f));
	assert_int_equal(feed_source(f), FEED_BPF);
	return f;
}

static void join_group(void)
{
	static const char *const groups[][2] = { { "/sys/fs/cgroup/memory", "memory.limit_in_bytes" },
						 { "/sys/fs/cgroup", "memory.max" } };
	char path[300], text[32];

	for (size_t i = 0; i < ARRAY_SIZE(groups); i++) {
		int fd;

		snprintf(path, sizeof(path), "%s/test-feed", groups[i][0]);
		(void)mkdir(path, 0755);
		snprintf(path, sizeof(path), "%s/test-feed/%s", groups[i][0], groups[i][1]);
		fd = open(path, O_WRONLY | O_CLOEXEC);
		if (fd < 0)
			continue;
		snprintf(text, sizeof(text), "%d", GROUP_LIMIT);
		CHECK(write(fd, text, strlen(text)) > 0);
		close(fd);
		snprintf(path, sizeof(path), "%s/test-feed/cgroup.procs", groups[i][0]);
		fd = open(path, O_WRONLY | O_CLOEXEC);
		CHECK(fd >= 0 && write(fd, "0", 1) == 1);
		close(fd);
		printf("# under %s/test-feed, %d MiB\n", groups[i][0], GROUP_LIMIT >> 20);
		return;
	}
	printf("# no memory control group here: without a limit\n");
}

static void leave_groups(void)
{
	(void)rmdir("/sys/fs/cgroup/memory/test-feed");
	(void)rmdir("/sys/fs/cgroup/test-feed");
}

static void touch(const volatile char *p, uint64_t bytes)
{
	for (uint64_t i = 0; i < bytes; i += PAGE)
		(void)p[i];
}

static void do_something(struct fixture *x)
{
	static char buffer[4 << 20];
	const struct gguf_part *part = gguf_part(x->g, 0);
	uint64_t page = rnd(x, n_pages(x) - 1), n = MIN(1 + rnd(x, 1024), n_pages(x) - 1 - page),
		 bytes = n * PAGE;
	char *p = (char *)(uintptr_t)part->data + page * PAGE;
	off_t at = (off_t)(page * PAGE);

	switch (rnd(x, 9)) {
	case 0: touch(p, bytes / 8 + 1); break;
	case 1: (void)madvise(p, bytes, MADV_WILLNEED); break;
	case 2: (void)madvise(p, bytes, MADV_POPULATE_READ); break;
	case 3: CHECK(pread(x->fd, buffer, bytes, at) > 0); break;
	case 4: (void)posix_fadvise(x->fd, at, (off_t)bytes, POSIX_FADV_WILLNEED); break;
	case 5: (void)madvise(p, bytes, MADV_PAGEOUT); break;
	case 6: (void)posix_fadvise(x->fd, at, (off_t)bytes * 4, POSIX_FADV_DONTNEED); break;
	case 7:
		(void)madvise((char *)(uintptr_t)part->data, part->bytes,
			      rnd(x, 2) ? MADV_RANDOM : MADV_NORMAL);
		break;
	default:
		(void)madvise(p, bytes, MADV_COLD);
		(void)madvise(p, bytes, MADV_DONTNEED);
		(void)posix_fadvise(x->fd, at, (off_t)bytes, POSIX_FADV_DONTNEED);
		break;
	}
}

struct sums {
	uint64_t bitmap, mincore, wrong_blocks, adds, deletes, refaults, faults;
};

/* Bitmap, counters and mincore, block by block. */
static struct sums take_sums(const struct fixture *x, struct feed *f)
{
	_cleanup_(freep) unsigned char *seen = look(x);
	struct sums s = { .mincore = count(seen, 0, n_pages(x)) };

	for (uint32_t b = 0; b <= x->c->n_blocks; b++) {
		struct feed_block n;

		CHECK((b < x->c->n_blocks ? feed_block_counters(f, b, &n)
					  : feed_trunk_counters(f, &n)) == 0);
		s.adds += n.adds;
		s.deletes += n.deletes;
		s.refaults += n.refaults;
		s.faults += n.faults;
		if (b < x->c->n_blocks) {
			uint32_t resident, all;
			uint64_t whole;

			CHECK(feed_block_pages(f, b, &resident, &all) == 0);
			s.wrong_blocks += resident != whole_pages_seen(x, seen, b, &whole) ||
					  n.adds - n.deletes != own_pages_seen(x, seen, b);
		}
	}
	s.bitmap = s.adds - s.deletes;
	return s;
}

static void print_sums(unsigned round, const struct sums *s, int64_t cached, uint64_t differ)
{
	printf("# round %2u: bitmap %llu, mincore %llu, cachestat %lld, differing pages %llu, blocks wrong %llu, adds %llu, "
	       "deletes %llu, refaults %llu, faults %llu\n",
	       round, (unsigned long long)s->bitmap, (unsigned long long)s->mincore,
	       (long long)cached, (unsigned long long)differ, (unsigned long long)s->wrong_blocks,
	       (unsigned long long)s->adds, (unsigned long long)s->deletes,
	       (unsigned long long)s->refaults, (unsigned long long)s->faults);
}

static void run_property(struct fixture *x)
{
	uint64_t before; /* that was there at the attachment, and is not counted: what the feed itself tried */
	struct sums s;
	struct feed *f;

	join_group();
	CHECK(dropped(x) && feed_new(NULL, x->socket, x->c, NULL, NULL, &f) == 0);
	CHECK(feed_source(f) == FEED_BPF);
	s = take_sums(x, f);
	before = s.mincore - s.bitmap;
	CHECK(before <= 64);
	for (unsigned round = 0; round < ROUNDS; round++) {
		uint64_t differ = 1;
		int64_t cached = 0;
		bool same = false;

		for (unsigned i = 0; i < STEPS; i++)
			do_something(x);
		/* a page may be in the cache and still being read, which for mincore is not there */
		for (unsigned i = 0; i < 100 && !same; i++) {
			if (i > 0)
				usleep(10000);
			cached = cachestat_of(x->fd);
			s = take_sums(x, f);
			s.bitmap += before;
			same = feed_check(f, &differ) == 0 && differ == 0 && s.wrong_blocks == 0 &&
			       s.bitmap == s.mincore && (cached < 0 || (uint64_t)cached == s.mincore);
		}
		if (!same || round % 6 == 5)
			print_sums(round, &s, cached, differ);
		CHECK(same);
	}
	if (feed_reason(f))
		printf("# the tracer says: %s\n", feed_reason(f));
	feed_free(f);
}

static void test_bitmap_is_mincore_is_cachestat(void **state)
{
	struct fixture *x = *state;

	need_page_cache(x);
	start_helper(x);
	feed_free(attach(x));
	drop(x); /* what is mapped here, the child cannot drop */
	in_child(run_property, x);
	leave_groups();
	stop_helper(x);
}

/* What was there before the attachment is looked up, and leaves the account as what comes after it does. */
static void test_seeded(void **state)
{
	struct fixture *x = *state;
	struct feed_block before, after;
	uint64_t differ = 1;
	struct feed *f;

	need_page_cache(x);
	drop(x);
	populate(x);
	start_helper(x);
	f = attach(x);
	expect_blocks(x, f);
	assert_int_equal(feed_check(f, &differ), 0);
	assert_int_equal(differ, 0);
	assert_int_equal(feed_block_counters(f, 3, &before), 0);
	drop(x);
	expect_blocks(x, f);
	assert_int_equal(feed_block_counters(f, 3, &after), 0);
	assert_true(after.deletes > before.deletes);
	assert_int_equal(after.refaults, 0);
	populate(x);
	assert_int_equal(feed_block_counters(f, 3, &after), 0);
	assert_int_equal(after.refaults, after.adds);
	expect_blocks(x, f);
	feed_free(f);
	stop_helper(x);
}

static void test_latency(void **state)
{
	struct fixture *x = *state;
	const struct gguf_part *p = gguf_part(x->g, 0);
	uint64_t h[FEED_HISTOGRAM], sum = 0;
	struct feed_fault e[64];
	struct catalog_block b;
	size_t n, n_mine = 0;
	struct feed *f;

	need_page_cache(x);
	start_helper(x);
	f = attach(x);
	if (feed_measure_latency(f, true) == -EOPNOTSUPP)
		skip_because("latency cannot be measured here: %s", feed_reason(f));
	if (feed_reason(f) && strstr(feed_reason(f), "latency"))
		fail_msg("%s", feed_reason(f));
	drop(x);
	while (feed_take_faults(f, e, ARRAY_SIZE(e)) > 0)
		;
	catalog_block(x->c, 5, &b);
	assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes, MADV_RANDOM), 0);
	touch((const char *)b.range[0].data, 20 * PAGE);
	assert_int_equal(feed_histogram(f, h), 0);
	for (unsigned i = 0; i < FEED_HISTOGRAM; i++)
		sum += h[i];
	assert_in_range(sum, 20, 200);
	while ((n = feed_take_faults(f, e, ARRAY_SIZE(e))) > 0)
		for (size_t i = 0; i < n; i++) {
			assert_true(e[i].latency_ns > 500 && e[i].time_ns / 1000 <= now_us());
			n_mine += e[i].block == 5 && e[i].tid == (uint32_t)getpid();
		}
	assert_int_equal(n_mine, 20);
	/* Off: none of it is counted any more, on again: from zero. */
	assert_int_equal(feed_measure_latency(f, false), 0);
	drop(x);
	touch((const char *)b.range[0].data, 20 * PAGE);
	assert_int_equal(feed_measure_latency(f, true), 0);
	assert_int_equal(feed_histogram(f, h), 0);
	assert_true(h[0] + h[12] + h[13] + h[14] + h[15] + h[16] + h[17] < 20);
	feed_free(f);
	stop_helper(x);
	assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes, MADV_NORMAL), 0);
}

/* Without latency the faults are those of pages that were not there, where the kernel has the event (6.12). */
static void test_faults(void **state)
{
	struct fixture *x = *state;
	const struct gguf_part *p = gguf_part(x->g, 0);
	struct feed_block counters;
	struct catalog_block b;
	struct feed_fault e;
	size_t n_mine = 0;
	struct feed *f;

	need_page_cache(x);
	start_helper(x);
	drop(x);
	f = attach(x);
	if (feed_reason(f) && strstr(feed_reason(f), "mm_filemap_fault"))
		skip_because("%s", feed_reason(f));
	catalog_block(x->c, 7, &b);
	assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes, MADV_RANDOM), 0);
	for (unsigned twice = 0; twice < 2; twice++) { /* the second time they are there, and only not mapped */
		assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes, MADV_DONTNEED), 0);
		touch((const char *)b.range[1].data + PAGE, 16 * PAGE);
	}
	while (feed_take_faults(f, &e, 1) > 0) {
		assert_int_equal(e.latency_ns, 0);
		n_mine += e.block == 7 && e.tid == (uint32_t)getpid();
	}
	assert_int_equal(n_mine, 16);
	assert_int_equal(feed_block_counters(f, 7, &counters), 0);
	assert_true(counters.faults >= 16);
	feed_free(f);
	stop_helper(x);
	assert_int_equal(madvise((void *)(uintptr_t)p->data, p->bytes, MADV_NORMAL), 0);
}

static void count_call(void *arg)
{
	++*(unsigned *)arg;
}

static void run_until(sd_event *event, const struct feed *f, bool bpf)
{
	uint64_t end = now_us() + 30000000;

	while ((feed_source(f) == FEED_BPF) != bpf && now_us() < end)
		assert_true(sd_event_run(event, 100000) >= 0);
	assert_int_equal(feed_source(f) == FEED_BPF, bpf);
}

static void test_helper_killed(void **state)
{
	struct fixture *x = *state;
	uint64_t differ = 1;
	unsigned changes = 0;
	sd_event *event;
	struct feed *f;

	need_page_cache(x);
	start_helper(x);
	feed_free(attach(x));
	assert_int_equal(sd_event_new(&event), 0);
	assert_int_equal(feed_new(event, x->socket, x->c, count_call, &changes, &f), 0);
	run_until(event, f, true);
	assert_int_equal(changes, 1);
	expect_blocks(x, f);
	stop_helper(x);
	run_until(event, f, false);
	assert_int_equal(changes, 2);
	assert_non_null(feed_reason(f));
	expect_blocks(x, f);                 /* by the other means, at once */
	for (unsigned i = 0; i < STEPS; i++) /* what it does not see is looked up when it is back */
		do_something(x);
	start_helper(x);
	run_until(event, f, true);
	assert_int_equal(changes, 3);
	for (unsigned i = 0; i < 50 && differ > 0; i++) {
		assert_int_equal(feed_check(f, &differ), 0);
		usleep(10000);
	}
	assert_int_equal(differ, 0);
	expect_blocks(x, f);
	feed_free(f);
	sd_event_unref(event);
	stop_helper(x);
}

static void ask_as_the_allowed(struct fixture *x)
{
	struct feed *f;

	CHECK(setresuid(12345, 12345, 12345) == 0);
	CHECK(feed_new(NULL, x->socket, x->c, NULL, NULL, &f) == 0);
	CHECK(feed_source(f) == FEED_BPF);
	/* Not the owner: what is there from before cannot be known, and is not guessed. */
	CHECK(strstr(feed_reason(f), "another user's"));
	feed_free(f);
}

static void ask_as_somebody(struct fixture *x)
{
	struct feed *f;

	CHECK(setresuid(4711, 4711, 4711) == 0);
	CHECK(feed_new(NULL, x->socket, x->c, NULL, NULL, &f) == 0);
	CHECK(feed_source(f) == FEED_NONE);
	CHECK(strstr(feed_reason(f), "this user may not"));
	feed_free(f);
}

static void test_who_may(void **state)
{
	struct fixture *x = *state;

	need_page_cache(x);
	start_helper(x);
	feed_free(attach(x));
	assert_int_equal(chmod(x->socket, 0666), 0);
	in_child(ask_as_the_allowed, x);
	in_child(ask_as_somebody, x);
	stop_helper(x);
}

static void run_on_overlay(struct fixture *x)
{
	char at[320], options[1000], up[320], model[360];
	uint64_t differ = 1;
	struct fixture y = *x;
	struct feed *f;

	CHECK(unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
	snprintf(up, sizeof(up), "%s/up", x->dir);
	snprintf(at, sizeof(at), "%s/merged", x->dir);
	CHECK(mkdir(up, 0755) == 0 && mount("tmpfs", up, "tmpfs", 0, NULL) == 0);
	snprintf(options, sizeof(options), "%s/upper", up);
	CHECK(mkdir(options, 0755) == 0);
	snprintf(options, sizeof(options), "%s/work", up);
	CHECK(mkdir(options, 0755) == 0 && mkdir(at, 0755) == 0);
	snprintf(options, sizeof(options), "lowerdir=%s,upperdir=%s/upper,workdir=%s/work", x->dir,
		 up, up);
	if (mount("overlay", at, "overlay", 0, options) < 0) {
		perror("# overlayfs");
		_exit(NO_OVERLAYFS);
	}
	snprintf(model, sizeof(model), "%s/model.gguf", at);
	open_model(&y, model);
	CHECK(feed_new(NULL, x->socket, y.c, NULL, NULL, &f) == 0);
	CHECK(feed_source(f) == FEED_BPF);
	CHECK(!feed_reason(f) || !strstr(feed_reason(f), "could not be found out"));
	for (unsigned round = 0; round < 5; round++) {
		struct feed_block n;

		for (unsigned i = 0; i < STEPS; i++)
			do_something(&y);
		differ = 1;
		for (unsigned i = 0; i < 100 && differ > 0; i++) {
			usleep(10000);
			CHECK(feed_check(f, &differ) == 0);
		}
		CHECK(differ == 0);
		CHECK(feed_block_counters(f, 0, &n) == 0);
	}
	printf("# overlayfs: cachestat of the file says %lld, the feed without the tracer would use %s\n",
	       (long long)cachestat_of(y.fd), cachestat_of(y.fd) > 0 ? "cachestat" : "mincore");
	feed_free(f);
	close_model(&y);
}

static void test_overlayfs(void **state)
{
	struct fixture *x = *state;
	char path[320];
	int status;

	need_page_cache(x);
	start_helper(x);
	feed_free(attach(x));
	drop(x);
	status = status_in_child(run_on_overlay, x);
	snprintf(path, sizeof(path), "%s/merged", x->dir);
	(void)rmdir(path);
	snprintf(path, sizeof(path), "%s/up", x->dir);
	(void)rmdir(path);
	stop_helper(x);
	if (status == NO_OVERLAYFS)
		skip_because("overlayfs cannot be mounted here");
	assert_int_equal(status, 0);
}

/* Against a service that runs (tests/sys/boot/feed), as the user that it is for. */
static void test_service(void **state)
{
	const char *path = getenv("RESIDENTD_BPF_SOCKET");
	struct fixture *x = *state;
	uint64_t differ = 1;
	struct feed *f;

	if (!path)
		skip_because("no RESIDENTD_BPF_SOCKET to ask");
	need_page_cache(x);
	assert_int_equal(feed_new(NULL, path, x->c, NULL, NULL, &f), 0);
	if (feed_source(f) != FEED_BPF)
		fail_msg("%s", feed_reason(f));
	for (unsigned round = 0; round < 3; round++) {
		for (unsigned i = 0; i < STEPS; i++)
			do_something(x);
		for (unsigned i = 0;
		     i < 100 && (differ = 1, feed_check(f, &differ) < 0 || differ > 0); i++)
			usleep(10000);
		assert_int_equal(differ, 0);
	}
	expect_blocks(x, f);
	assert_int_equal(feed_measure_latency(f, true), 0);
	if (feed_reason(f))
		printf("# the tracer says: %s\n", feed_reason(f));
	assert_null(feed_reason(f) ? strstr(feed_reason(f), "latency") : NULL);
	feed_free(f);
}

static int end(void **state)
{
	stop_helper(*state);
	unlink(((struct fixture *)*state)->socket);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_ring),
		cmocka_unit_test(test_ring_hostile),
		cmocka_unit_test(test_shapes),
		cmocka_unit_test(test_reply),
		cmocka_unit_test(test_fallback),
		cmocka_unit_test(test_somebody_elses_file),
		cmocka_unit_test(test_fakes),
		cmocka_unit_test_teardown(test_bitmap_is_mincore_is_cachestat, end),
		cmocka_unit_test_teardown(test_seeded, end),
		cmocka_unit_test_teardown(test_latency, end),
		cmocka_unit_test_teardown(test_faults, end),
		cmocka_unit_test_teardown(test_helper_killed, end),
		cmocka_unit_test_teardown(test_who_may, end),
		cmocka_unit_test_teardown(test_overlayfs, end),
		cmocka_unit_test(test_service),
	};

	return cmocka_run_group_tests_name("feed", tests, setup, teardown);
}
