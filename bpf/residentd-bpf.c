/* SPDX-License-Identifier: MIT */
/*
 * residentd-bpf: loads the tracer for a model's files, hands the maps to residentd, and keeps it attached as long as the connection is
 * open.
 *
 * The one program that holds capabilities: CAP_BPF and CAP_PERFMON, nothing else. Started by its socket, and by hand as root (it drops the
 * rest itself) or as anybody who has the two. One thread. A peer is checked by its uid, and everything that it sends;
 * what is traced are files that it had open. Refuses to know what the account is for. Invariant: each connection has a BPF object of
 * its own, and what was attached for it ends with it, also when this process is killed.
 */
#include "bpf/residency.h"
#include "daemon/base.h"

#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>
#include <fcntl.h>
#include <getopt.h>
#include <grp.h>
#include <inttypes.h>
#include <linux/btf.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <linux/perf_event.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/vfs.h>

#define PROGRAM         "residentd-bpf"
#define CONNECTIONS     4
#define ALLOWED         8
#define IDLE_MS         60000
#define REFUSED_WAIT_MS 200
#define PROBES          8 /* the second half of them after dropping what is there */
#define PROBE_DROP      (1 << 20)
#define MESSAGE_BYTES \
	(sizeof(struct residency_attach) + RESIDENCY_EXTENTS * sizeof(struct residency_extent))
#define FIRST_FD     3     /* of those that systemd passes */
#define LOG_NOTICE_  "<5>" /* as sd-daemon(3) */
#define LOG_WARNING_ "<4>"

extern const unsigned char residency_object[], residency_object_end[];

__asm__(".section .rodata\n"
	".balign 8\n"
	".global residency_object, residency_object_end\n"
	"residency_object:\n"
	".incbin \"" RESIDENCY_OBJECT "\"\n"
	"residency_object_end:\n"
	".byte 0\n"
	".previous\n");

static const struct {
	const char *name;
	const char *event; /* without which there is no such program; NULL: none */
} programs[RESIDENCY_PROGRAMS] = {
	[RESIDENCY_ON_ADD] = { "page_added", "mm_filemap_add_to_page_cache" },
	[RESIDENCY_ON_DELETE] = { "page_deleted", "mm_filemap_delete_from_page_cache" },
	[RESIDENCY_ON_FAULT] = { "page_faulted", "mm_filemap_fault" },
	[RESIDENCY_ON_BEGIN] = { "fault_begins", "page_fault_user" },
	[RESIDENCY_ON_END] = { "fault_counted", NULL },
	[RESIDENCY_ON_RETURN] = { "fault_returned", NULL },
	[RESIDENCY_PROBE] = { "page_probed", "mm_filemap_add_to_page_cache" },
};

#define LATENCY_ENDS     (1u << RESIDENCY_ON_END | 1u << RESIDENCY_ON_RETURN)
#define LATENCY_PROGRAMS (1u << RESIDENCY_ON_BEGIN | LATENCY_ENDS)

static const char *const map_names[RESIDENCY_MAPS] = {
	[RESIDENCY_PRESENT] = "present",   [RESIDENCY_TOUCHED] = "touched",
	[RESIDENCY_COUNTERS] = "counters", [RESIDENCY_HISTOGRAM] = "histogram",
	[RESIDENCY_FAULTS] = "faults",
};

/* A connection and what was attached for it. */
struct tracer {
	int fd;
	pid_t pid;
	bool asked; /* RESIDENCY_ATTACH came */
	struct bpf_object *object;
	struct bpf_link *links[RESIDENCY_PROGRAMS];
	struct bpf_link **ends; /* RESIDENCY_ON_END, by processor */
	int n_ends;
	volatile struct residency_state *state;
	uint64_t n_words;
	/* Of a model of one file: kept open, so that the kernel's address of its pages stays what it is. -1: several. */
	int only_fd;
	struct residency_file only;
	struct buf text; /* what is missing */
};

static struct {
	uid_t allowed[ALLOWED];
	size_t n_allowed;
	uint64_t ns_dev, ns_ino; /* our pid namespace */
	bool verbose;
	struct tracer tracers[CONNECTIONS];
} helper;

/* ---- loading ---- */

_printf_(2, 3) static void add_text(struct tracer *t, const char *format, ...)
{
	_cleanup_(freep) char *s = NULL;
	va_list ap;

	va_start(ap, format);
	if (vasprintf(&s, format, ap) < 0)
		s = NULL;
	va_end(ap);
	(void)buf_printf(&t->text, "%s%s", t->text.len > 0 ? "; " : "", s ? s : "out of memory");
}

static struct bpf_program *program(const struct tracer *t, enum residency_program p)
{
	return bpf_object__find_program_by_name(t->object, programs[p].name);
}

static int map_fd(const struct tracer *t, const char *name)
{
	return bpf_map__fd(bpf_object__find_map_by_name(t->object, name));
}

/* Do the page cache's events tell a struct folio (5.17 and later)? */
static bool tells_folios(const struct btf *btf, int event)
{
	const struct btf_type *type =
		btf__type_by_id(btf, (__u32)event); /* typedef of a pointer to a function */

	for (int i = 0; i < 2 && type; i++)
		type = btf__type_by_id(btf, type->type);
	if (!type || !btf_is_func_proto(type) || btf_vlen(type) < 2)
		return true;
	type = btf__type_by_id(btf, btf_params(type)[1].type);
	if (type && btf_is_ptr(type))
		type = btf__type_by_id(btf, type->type);
	return !type || !streq(btf__name_by_offset(btf, type->name_off), "page");
}

/* Major faults on this processor. A descriptor, -errno. */
static int open_fault_count(int cpu)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_SW_PAGE_FAULTS_MAJ,
		.sample_period = 1,
		.sample_type = PERF_SAMPLE_ADDR,
	};
	int fd = (int)syscall(SYS_perf_event_open, &attr, -1, cpu, -1, PERF_FLAG_FD_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

static bool may_count_faults(void)
{
	_cleanup_(closep) int fd = open_fault_count(0);

	return fd >= 0 || fd == -ENODEV;
}

/* Switches programs off whose event the running kernel has not. The others' bits. */
static int choose_programs(struct tracer *t, uint32_t without, struct residency_config *config,
			   uint32_t *ret_chosen)
{
	struct btf *btf = btf__load_vmlinux_btf();
	uint32_t chosen = 0;

	if (!btf) {
		int err = errno;

		add_text(t, err == ENOENT ? "this kernel has no BTF (/sys/kernel/btf/vmlinux)"
					  : "the kernel's BTF cannot be read: %m");
		return -EOPNOTSUPP;
	}
	for (unsigned i = 0; i < RESIDENCY_PROGRAMS; i++) {
		char name[64];
		int id = 0;

		if (programs[i].event) {
			snprintf(name, sizeof(name), "btf_trace_%s", programs[i].event);
			id = btf__find_by_name_kind(btf, name, BTF_KIND_TYPEDEF);
		}
		if (i == RESIDENCY_ON_ADD && id > 0)
			config->folios = tells_folios(btf, id);
		if (id < 0 && !(without >> i & 1))
			add_text(t, "no event %s in this kernel", programs[i].event);
		if (id >= 0 && !(without >> i & 1))
			chosen |= 1u << i;
	}
	btf__free(btf);
	if (!(chosen >> RESIDENCY_ON_BEGIN & 1))
		chosen &= ~LATENCY_PROGRAMS;
	chosen &= ~(1u << (may_count_faults() ? RESIDENCY_ON_RETURN : RESIDENCY_ON_END));
	for (unsigned i = 0; i < RESIDENCY_PROGRAMS; i++)
		bpf_program__set_autoload(program(t, i), chosen >> i & 1);
	*ret_chosen = chosen;
	return 0;
}

static int size_map(const struct tracer *t, const char *name, uint64_t entries)
{
	return bpf_map__set_max_entries(bpf_object__find_map_by_name(t->object, name),
					entries > 0 ? (__u32)entries : 1);
}

static int load(struct tracer *t, const struct residency_attach *a, uint32_t without, uint32_t *ret_chosen)
{
	LIBBPF_OPTS(bpf_object_open_opts, opts, .object_name = "residency");
	struct residency_config config = {
		.ns_dev = helper.ns_dev,
		.ns_ino = helper.ns_ino,
		.peer_tgid = (uint32_t)t->pid,
		.own_tgid = (uint32_t)getpid(),
		.n_blocks = a->n_blocks,
		.search = a->n_extents > 0 ? 1u << (31 - __builtin_clz(a->n_extents)) : 0,
		.page_shift = (uint32_t)__builtin_ctz(a->page_bytes),
		.one_file = t->only_fd >= 0,
		.file = t->only,
	};
	struct bpf_map *rodata;
	int r;

	t->object = bpf_object__open_mem(residency_object,
					 (size_t)(residency_object_end - residency_object), &opts);
	if (!t->object) {
		r = -errno;
		add_text(t, "the tracer's object is damaged: %m");
		return r;
	}
	r = choose_programs(t, without, &config, ret_chosen);
	if (r < 0)
		return r;
	if (!(*ret_chosen >> RESIDENCY_ON_ADD & 1) || !(*ret_chosen >> RESIDENCY_ON_DELETE & 1))
		return -EOPNOTSUPP;
	rodata = bpf_object__find_map_by_name(t->object, ".rodata.config");
	if (bpf_map__set_initial_value(rodata, &config, sizeof(config)) < 0 ||
	    size_map(t, "ranges", a->n_extents) < 0 || size_map(t, "present", t->n_words) < 0 ||
	    size_map(t, "touched", t->n_words) < 0 || size_map(t, "deleted", t->n_words) < 0 ||
	    size_map(t, "counters", (uint64_t)a->n_blocks + 1) < 0) {
		add_text(t, "the tracer's object is damaged");
		return -EINVAL;
	}
	return bpf_object__load(t->object);
}

/* Latency is an extra: a kernel that refuses its programs still gets the rest. */
static int load_what_goes(struct tracer *t, const struct residency_attach *a, uint32_t *ret_chosen)
{
	int r = load(t, a, 0, ret_chosen), again;

	if (r >= 0 || r == -EOPNOTSUPP || r == -EPERM || r == -ENOMEM)
		goto end;
	bpf_object__close(t->object);
	t->object = NULL;
	buf_done(&t->text);
	again = load(t, a, LATENCY_PROGRAMS, ret_chosen);
	if (again >= 0)
		add_text(t, "latency cannot be measured: %s", strerror(-r));
	r = again;
end:
	if (r == -EPERM)
		add_text(t, "the kernel lets us load nothing: CAP_BPF and CAP_PERFMON are needed");
	else if (r < 0 && t->text.len == 0)
		add_text(t, "the kernel refuses the tracer: %s", strerror(-r));
	return r;
}

static int attach(struct tracer *t, enum residency_program p)
{
	t->links[p] = bpf_program__attach(program(t, p));
	if (t->links[p])
		return 0;
	return errno ? -errno : -EIO;
}

static void detach(struct tracer *t, enum residency_program p)
{
	if (t->links[p])
		bpf_link__destroy(t->links[p]);
	t->links[p] = NULL;
}

/* ---- which files ---- */

static uint64_t pages_of(uint64_t bytes, uint64_t page_bytes)
{
	return bytes / page_bytes + (bytes % page_bytes != 0);
}

/* Brings a page in and learns from the event whose page it is: btrfs and overlayfs tell stat something else. -ENODATA: everything
 * that was tried was there, and stayed. */
static int probe(struct tracer *t, int fd, uint64_t pages, uint64_t page_bytes,
		 struct residency_inode *ret)
{
	char byte;

	for (unsigned i = 0; i < PROBES; i++) {
		uint64_t page = pages * i / PROBES;
		off_t at = (off_t)(page * page_bytes);

		t->state->probe_index = page;
		t->state->probe_seen = 0;
		atomic_thread_fence(memory_order_seq_cst);
		if (i >= PROBES / 2)
			(void)posix_fadvise(fd, at, PROBE_DROP, POSIX_FADV_DONTNEED);
		if (pread(fd, &byte, 1, at) < 0)
			return -errno;
		atomic_thread_fence(memory_order_seq_cst);
		if (!t->state->probe_seen)
			continue;
		*ret = (struct residency_inode){ .ino = t->state->probe_ino, .dev = t->state->probe_dev };
		return 0;
	}
	return -ENODATA;
}

static bool stat_tells_truth(int fd)
{
	struct statfs fs;

	return fstatfs(fd, &fs) == 0 && (fs.f_type == EXT4_SUPER_MAGIC || fs.f_type == XFS_SUPER_MAGIC ||
					 fs.f_type == F2FS_SUPER_MAGIC || fs.f_type == TMPFS_MAGIC);
}

static int identify(struct tracer *t, uint32_t part, int fd, uint64_t page_bytes, bool probing,
		    struct residency_inode *ret)
{
	struct stat st;
	int r;

	if (fstat(fd, &st) < 0)
		return -errno;
	*ret = (struct residency_inode){
		.ino = st.st_ino,
		.dev = major(st.st_dev) << 20 | minor(st.st_dev), /* as the kernel has it inside */
	};
	if (stat_tells_truth(fd))
		return 0;
	r = probing ? probe(t, fd, pages_of((uint64_t)st.st_size, page_bytes), page_bytes, ret)
		    : -ENODATA;
	if (r < 0)
		add_text(t, "which file on its file system part %" PRIu32 " really is could not be found out",
			 part);
	return 0;
}

static int set_files(struct tracer *t, const struct residency_attach *a, const int *fds,
		     const struct residency_file *files)
{
	bool probing = attach(t, RESIDENCY_PROBE) >= 0;
	struct residency_inode id;
	uint64_t filter = 0;
	int r = 0;

	for (uint32_t i = 0; i < a->n_parts && r >= 0; i++) {
		r = identify(t, i, fds[i], a->page_bytes, probing, &id);
		if (r >= 0)
			r = bpf_map_update_elem(map_fd(t, "files"), &id, &files[i], BPF_ANY);
		filter |= 1ull << (id.ino & 63);
	}
	detach(t, RESIDENCY_PROBE);
	t->state->filter = filter;
	return r;
}

static int set_ranges(const struct tracer *t, const struct residency_attach *a,
		      const struct residency_file *files)
{
	int fd = map_fd(t, "ranges"), r = 0;

	for (uint32_t i = 0; i < a->n_extents && r >= 0; i++) {
		const struct residency_extent *e = &a->extents[i];
		struct residency_range range = {
			.start = files[e->part].first * a->page_bytes + e->offset,
			.stride = e->stride,
			.n = e->n,
			.first_block = e->first_block,
		};

		r = bpf_map_update_elem(fd, &i, &range, BPF_ANY);
	}
	return r;
}

static void unmap_state(struct tracer *t)
{
	if (t->state)
		munmap((void *)t->state, sizeof(*t->state));
	t->state = NULL;
}

static int map_state(struct tracer *t)
{
	void *p = mmap(NULL, sizeof(*t->state), PROT_READ | PROT_WRITE, MAP_SHARED,
		       map_fd(t, ".data.state"), 0);

	if (p == MAP_FAILED)
		return -errno;
	t->state = p;
	return 0;
}

/* ---- latency ---- */

static void latency_off(struct tracer *t)
{
	if (t->state)
		t->state->latency = 0;
	detach(t, RESIDENCY_ON_BEGIN);
	detach(t, RESIDENCY_ON_RETURN);
	for (int i = 0; t->ends && i < t->n_ends; i++)
		if (t->ends[i])
			bpf_link__destroy(t->ends[i]);
	free(t->ends);
	t->ends = NULL;
	t->n_ends = 0;
}

/* One event a processor, whoever runs there: the events of threads do not follow into threads made later, with a program. */
static int attach_ends(struct tracer *t)
{
	t->n_ends = libbpf_num_possible_cpus();
	if (t->n_ends < 0)
		return t->n_ends;
	t->ends = calloc((size_t)t->n_ends, sizeof(*t->ends));
	if (!t->ends)
		return -ENOMEM;
	for (int i = 0; i < t->n_ends; i++) {
		int fd = open_fault_count(i);

		if (fd == -ENODEV) /* a processor that is off */
			continue;
		if (fd < 0)
			return fd;
		t->ends[i] = bpf_program__attach_perf_event(program(t, RESIDENCY_ON_END), fd); /* takes fd */
		if (!t->ends[i]) {
			int err = errno;

			close(fd);
			return err ? -err : -EIO;
		}
	}
	return 0;
}

static int zero_map(const struct tracer *t, const char *name, uint64_t words)
{
	size_t bytes = words * sizeof(uint64_t);
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, map_fd(t, name), 0);

	if (p == MAP_FAILED)
		return -errno;
	memset(p, 0, bytes);
	munmap(p, bytes);
	return 0;
}

static int latency_on(struct tracer *t)
{
	int r;

	if (t->state->latency)
		return 0;
	if (!bpf_program__autoload(program(t, RESIDENCY_ON_BEGIN)))
		return -EOPNOTSUPP;
	r = zero_map(t, map_names[RESIDENCY_HISTOGRAM], RESIDENCY_BUCKETS);
	if (r >= 0)
		r = attach(t, RESIDENCY_ON_BEGIN);
	if (r >= 0)
		r = bpf_program__autoload(program(t, RESIDENCY_ON_END))
			    ? attach_ends(t)
			    : attach(t, RESIDENCY_ON_RETURN);
	if (r >= 0)
		t->state->latency = 1;
	else
		latency_off(t);
	return r;
}

/* ---- what a peer sends ---- */

/* Where the parts lie in the numbering of pages. */
static const char *check_parts(const struct residency_attach *a, const int *fds,
			       struct residency_file *files, uint64_t *bytes, uint64_t *ret_words)
{
	uint64_t next = 0;

	for (uint32_t i = 0; i < a->n_parts; i++) {
		int flags = fcntl(fds[i], F_GETFL);
		struct stat st;

		if (flags < 0 || (flags & O_PATH) || (flags & O_ACCMODE) == O_WRONLY ||
		    fstat(fds[i], &st) < 0 || !S_ISREG(st.st_mode) || st.st_size <= 0)
			return "a descriptor is of no readable file";
		bytes[i] = (uint64_t)st.st_size;
		files[i].first = next;
		files[i].pages = pages_of(bytes[i], a->page_bytes);
		if (files[i].pages > RESIDENCY_PAGES - next)
			return "the files are too large";
		next = ALIGN_UP(next + files[i].pages, (uint64_t)RESIDENCY_ALIGN);
	}
	*ret_words = next / 64;
	return NULL;
}

static const char *check_extents(const struct residency_attach *a, const uint64_t *bytes)
{
	uint64_t end = 0, length;
	uint32_t part = 0;

	for (uint32_t i = 0; i < a->n_extents; i++) {
		const struct residency_extent *e = &a->extents[i];

		if (e->part >= a->n_parts || e->part < part)
			return "extents are not in order";
		if (e->part > part)
			end = 0;
		part = e->part;
		if (e->n == 0 || e->n > a->n_blocks || e->first_block > a->n_blocks - e->n)
			return "an extent has blocks that are none";
		if (e->stride == 0 || e->offset < end ||
		    __builtin_mul_overflow(e->stride, e->n, &length) || length > bytes[part] ||
		    e->offset > bytes[part] - length)
			return "an extent lies outside of its file, or over another";
		end = e->offset + length;
	}
	return NULL;
}

/* NULL: as it should be. The descriptors are checked later. */
static const char *check_attach(const void *message, size_t len, size_t n_fds)
{
	const struct residency_attach *a = message;

	if (len < sizeof(*a))
		return "too short";
	if (a->n_parts == 0 || a->n_parts > RESIDENCY_PARTS || n_fds != a->n_parts)
		return "not a descriptor for each part";
	if (a->page_bytes != (uint32_t)sysconf(_SC_PAGESIZE))
		return "pages of another size";
	if (a->n_blocks > RESIDENCY_BLOCKS || a->n_extents > RESIDENCY_EXTENTS ||
	    len != sizeof(*a) + a->n_extents * sizeof(a->extents[0]))
		return "wrong counts";
	return NULL;
}

static int do_attach(struct tracer *t, const struct residency_attach *a, const int *fds,
		     uint32_t *ret_attached)
{
	struct residency_file files[RESIDENCY_PARTS];
	uint64_t bytes[RESIDENCY_PARTS];
	uint32_t chosen = 0;
	const char *wrong;
	int r;

	wrong = check_parts(a, fds, files, bytes, &t->n_words);
	if (!wrong)
		wrong = check_extents(a, bytes);
	if (wrong) {
		add_text(t, "%s", wrong);
		return -EINVAL;
	}
	t->only = files[0];
	if (a->n_parts == 1)
		t->only_fd = fcntl(fds[0], F_DUPFD_CLOEXEC, 3);
	r = load_what_goes(t, a, &chosen);
	if (r < 0)
		return r;
	r = map_state(t);
	if (r >= 0)
		r = set_ranges(t, a, files);
	if (r >= 0)
		r = set_files(t, a, fds, files);
	if (r >= 0)
		r = attach(t, RESIDENCY_ON_ADD);
	if (r >= 0)
		r = attach(t, RESIDENCY_ON_DELETE);
	if (r < 0) {
		add_text(t, "the tracer cannot be attached: %s", strerror(-r));
		return r;
	}
	if (chosen >> RESIDENCY_ON_FAULT & 1) {
		r = attach(t, RESIDENCY_ON_FAULT);
		if (r < 0) {
			add_text(t, "%s cannot be attached: %s", programs[RESIDENCY_ON_FAULT].event,
				 strerror(-r));
			chosen &= ~(1u << RESIDENCY_ON_FAULT);
		}
	}
	*ret_attached = chosen & ~(1u << RESIDENCY_PROBE);
	return 0;
}

/* ---- connections ---- */

static void tracer_close(struct tracer *t)
{
	latency_off(t);
	for (unsigned i = 0; i < RESIDENCY_PROGRAMS; i++)
		detach(t, i);
	unmap_state(t);
	if (t->object)
		bpf_object__close(t->object);
	buf_done(&t->text);
	closep(&t->only_fd);
	close(t->fd);
	*t = (struct tracer){ .fd = -1, .only_fd = -1 };
}

/* A peer that does not take its answer is no peer. */
static int send_reply(struct tracer *t, uint16_t type, int error, uint32_t attached)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(RESIDENCY_MAPS * sizeof(int))];
	} control = {};
	struct residency_reply reply = {
		.header = { RESIDENCY_MAGIC, RESIDENCY_VERSION, type },
		.error = error,
		.attached = attached,
	};
	struct iovec iov = { &reply, sizeof(reply) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (t->text.len > 0)
		snprintf(reply.text, sizeof(reply.text), "%s", t->text.data);
	if (type == RESIDENCY_ATTACH && error == 0) {
		struct cmsghdr *c = &control.header;
		int fds[RESIDENCY_MAPS];

		for (unsigned i = 0; i < RESIDENCY_MAPS; i++)
			fds[i] = map_fd(t, map_names[i]);
		m.msg_control = control.bytes;
		m.msg_controllen = sizeof(control.bytes);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(fds));
		memcpy(CMSG_DATA(c), fds, sizeof(fds));
	}
	return sendmsg(t->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof(reply) ? 0 : -EPIPE;
}

static int refuse(struct tracer *t, uint16_t type, const char *why)
{
	buf_done(&t->text);
	add_text(t, "%s", why);
	(void)send_reply(t, type, -EBADMSG, 0);
	return -EBADMSG;
}

/* < 0: the connection ends. */
static int handle(struct tracer *t, const void *message, size_t len, const int *fds, size_t n_fds)
{
	const struct residency_header *h = message;
	uint32_t attached = 0;
	const char *wrong;
	int r;

	if (len < sizeof(*h) || h->magic != RESIDENCY_MAGIC)
		return refuse(t, 0, "not a message to the tracer");
	if (h->version != RESIDENCY_VERSION)
		return refuse(t, h->type, "another version of the tracer");
	if (!t->asked) {
		wrong = h->type == RESIDENCY_ATTACH ? check_attach(message, len, n_fds)
						    : "nothing is attached";
		if (wrong)
			return refuse(t, h->type, wrong);
		t->asked = true;
		r = do_attach(t, message, fds, &attached);
		if (send_reply(t, h->type, r, attached) < 0)
			return -EPIPE;
		fprintf(stderr, "%s" PROGRAM ": process %d: %s%s%s\n",
			r < 0 ? LOG_WARNING_ : LOG_NOTICE_, (int)t->pid,
			r < 0 ? "not attached" : "attached", t->text.len > 0 ? ": " : "",
			t->text.len > 0 ? t->text.data : "");
		buf_done(&t->text);
		return r;
	}
	if (n_fds > 0)
		return refuse(t, h->type, "descriptors for nothing");
	if (h->type == RESIDENCY_LATENCY && len == sizeof(struct residency_latency)) {
		r = 0;
		if (((const struct residency_latency *)message)->on)
			r = latency_on(t);
		else
			latency_off(t);
		if (r < 0)
			add_text(t, "latency cannot be measured: %s", strerror(-r));
	} else if (h->type == RESIDENCY_RESET && len == sizeof(*h)) {
		r = zero_map(t, map_names[RESIDENCY_TOUCHED], t->n_words);
	} else {
		return refuse(t, h->type, "an unknown message");
	}
	r = send_reply(t, h->type, r, 0);
	buf_done(&t->text);
	return r;
}

static int receive(struct tracer *t)
{
	static _Alignas(8) char message[MESSAGE_BYTES];
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(RESIDENCY_PARTS * sizeof(int))];
	} control;
	struct iovec iov = { message, sizeof(message) };
	struct msghdr m = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = control.bytes,
		.msg_controllen = sizeof(control.bytes),
	};
	int fds[RESIDENCY_PARTS];
	size_t n_fds = 0;
	ssize_t n;
	int r;

	n = recvmsg(t->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			memcpy(fds, CMSG_DATA(c), n_fds * sizeof(int));
			break;
		}
	if (n == 0)
		r = -ECONNRESET;
	else if (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
		r = refuse(t, 0, "too long");
	else
		r = handle(t, message, (size_t)n, fds, n_fds);
	for (size_t i = 0; i < n_fds; i++)
		close(fds[i]);
	return r;
}

static bool may(uid_t uid)
{
	if (uid == 0 || uid == geteuid())
		return true;
	for (size_t i = 0; i < helper.n_allowed; i++)
		if (helper.allowed[i] == uid)
			return true;
	return false;
}

/* Its question is waited for and thrown away: an answer to a peer that is still asking would be lost. */
static void turn_away(int fd, const char *why)
{
	struct tracer t = { .fd = fd, .only_fd = -1 };
	struct pollfd p = { .fd = fd, .events = POLLIN };

	(void)poll(&p, 1, REFUSED_WAIT_MS);
	(void)recv(fd, NULL, 0, MSG_DONTWAIT | MSG_TRUNC);
	(void)refuse(&t, 0, why);
	tracer_close(&t);
}

static void accept_one(int listener)
{
	struct ucred peer = {};
	socklen_t len = sizeof(peer);
	struct tracer *t = NULL;
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd < 0)
		return;
	for (size_t i = 0; i < CONNECTIONS && !t; i++)
		if (helper.tracers[i].fd < 0)
			t = &helper.tracers[i];
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0 || !may(peer.uid)) {
		fprintf(stderr, LOG_WARNING_ PROGRAM ": refused a connection of uid %u\n",
			(unsigned)peer.uid);
		turn_away(fd, "this user may not use the tracer");
	} else if (!t) {
		turn_away(fd, "too many connections to the tracer");
	} else {
		*t = (struct tracer){ .fd = fd, .pid = peer.pid, .only_fd = -1 };
	}
}

/* Ends when it was started by systemd, which starts it again, and nobody was there for a while. */
static int serve(int listener, bool may_end)
{
	for (;;) {
		struct pollfd polls[1 + CONNECTIONS] = { { .fd = listener, .events = POLLIN } };
		bool busy = false;
		int n;

		for (size_t i = 0; i < CONNECTIONS; i++) {
			polls[1 + i] = (struct pollfd){ .fd = helper.tracers[i].fd, .events = POLLIN };
			busy = busy || helper.tracers[i].fd >= 0;
		}
		n = poll(polls, ARRAY_SIZE(polls), busy || !may_end ? -1 : IDLE_MS);
		if (n < 0 && errno != EINTR)
			return -errno;
		if (n == 0)
			return 0;
		for (size_t i = 0; i < CONNECTIONS && n > 0; i++)
			if (polls[1 + i].revents && receive(&helper.tracers[i]) < 0)
				tracer_close(&helper.tracers[i]);
		if (n > 0 && polls[0].revents)
			accept_one(listener);
	}
}

/* ---- start ---- */

static int allow_user(const char *name, bool must_exist)
{
	const struct passwd *pw = getpwnam(name);

	if (!pw)
		return must_exist ? -ENOENT : 0;
	if (helper.n_allowed == ALLOWED)
		return -E2BIG;
	helper.allowed[helper.n_allowed++] = pw->pw_uid;
	return 0;
}

static int allow_uid(const char *text)
{
	unsigned long uid;
	char *end;

	errno = 0;
	uid = strtoul(text, &end, 10);
	if (errno || *end || end == text || *text == '-' || uid >= (uid_t)-1)
		return -EINVAL;
	if (helper.n_allowed == ALLOWED)
		return -E2BIG;
	helper.allowed[helper.n_allowed++] = (uid_t)uid;
	return 0;
}

/* From systemd, or our own at path. */
static int open_listener(const char *path, bool *ret_passed)
{
	const char *pid = getenv("LISTEN_PID"), *n = getenv("LISTEN_FDS");
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	struct stat st;
	int fd;

	if (!path && pid && n && atoi(pid) == (int)getpid() && streq(n, "1")) {
		(void)fcntl(FIRST_FD, F_SETFD, FD_CLOEXEC);
		*ret_passed = true;
		return FIRST_FD;
	}
	if (!path)
		path = RESIDENCY_SOCKET;
	if (strlen(path) >= sizeof(sa.sun_path))
		return -ENAMETOOLONG;
	memcpy(sa.sun_path, path, strlen(path));
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (lstat(path, &st) == 0 && S_ISSOCK(st.st_mode)) /* of an earlier run */
		(void)unlink(path);
	if (bind(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0 || chmod(path, 0660) < 0 ||
	    listen(fd, CONNECTIONS) < 0) {
		int r = -errno;

		close(fd);
		return r;
	}
	if (helper.n_allowed > 0 && geteuid() == 0 && chown(path, helper.allowed[0], (gid_t)-1) < 0)
		fprintf(stderr, LOG_WARNING_ PROGRAM ": %s: %m\n", path);
	*ret_passed = false;
	return fd;
}

static int drop_root(uint64_t keep)
{
	const uid_t nobody = 65534;

	for (unsigned cap = 0; cap < 64; cap++)
		if (!(keep >> cap & 1))
			(void)prctl(PR_CAPBSET_DROP, cap, 0, 0, 0); /* past the last one, or not allowed to */
	if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0 || setgroups(0, NULL) < 0 ||
	    setresgid(nobody, nobody, nobody) < 0 || setresuid(nobody, nobody, nobody) < 0)
		return -errno;
	return 0;
}

/* Whatever we were started with: only CAP_BPF and CAP_PERFMON of it are left, and not the user root. As a service there is nothing to drop,
 * and no system call to do it with. */
static int drop_privileges(void)
{
	const uint64_t keep = 1ull << CAP_BPF | 1ull << CAP_PERFMON;
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];
	uint64_t permitted;

	if (geteuid() == 0) {
		int r = drop_root(keep);

		if (r < 0)
			return r;
	}
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || syscall(SYS_capget, &header, data) < 0)
		return -errno;
	permitted = data[0].permitted | (uint64_t)data[1].permitted << 32;
	if (permitted & ~keep || (data[0].effective | (uint64_t)data[1].effective << 32) != permitted) {
		permitted &= keep;
		data[0] = (struct __user_cap_data_struct){ (uint32_t)permitted, (uint32_t)permitted, 0 };
		data[1] = (struct __user_cap_data_struct){ (uint32_t)(permitted >> 32),
							   (uint32_t)(permitted >> 32), 0 };
		if (syscall(SYS_capset, &header, data) < 0)
			return -errno;
	}
	return 0;
}

static int print(enum libbpf_print_level level, const char *format, va_list ap)
{
	(void)level;
	return helper.verbose ? vfprintf(stderr, format, ap) : 0;
}

static const char usage[] =
	"usage: " PROGRAM " [options]\n"
	"Traces the page cache of the shared language model's files for residentd.\n"
	"\n"
	"      --socket=PATH      listen there, instead of what systemd passes or " RESIDENCY_SOCKET "\n"
	"      --allow-user=NAME  this user may connect, beside root and our own (default: residentd)\n"
	"      --allow-uid=UID    likewise\n"
	"  -v, --verbose          what libbpf says, on standard error\n"
	"  -h, --help\n"
	"  -V, --version\n";

static int parse(int argc, char *argv[], const char **ret_socket)
{
	static const struct option options[] = {
		{ "socket", required_argument, NULL, 's' },
		{ "allow-user", required_argument, NULL, 'a' },
		{ "allow-uid", required_argument, NULL, 'u' },
		{ "verbose", no_argument, NULL, 'v' },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{},
	};
	bool allowed = false;
	int c, r = 0;

	while ((c = getopt_long(argc, argv, "vhV", options, NULL)) >= 0) {
		if (c == 's') {
			*ret_socket = optarg;
		} else if (c == 'a' || c == 'u') {
			allowed = true;
			r = c == 'a' ? allow_user(optarg, true) : allow_uid(optarg);
		} else if (c == 'v') {
			helper.verbose = true;
		} else if (c == 'h' || c == 'V') {
			fputs(c == 'h' ? usage : PROGRAM " " RESIDENTD_VERSION "\n", stdout);
			exit(EXIT_SUCCESS);
		} else {
			return -EINVAL;
		}
		if (r < 0) {
			fprintf(stderr, PROGRAM ": %s: %s\n", optarg, strerror(-r));
			return r;
		}
	}
	if (optind < argc) {
		fprintf(stderr, PROGRAM ": no arguments are taken\n");
		return -EINVAL;
	}
	return allowed ? 0 : allow_user("residentd", false);
}

int main(int argc, char *argv[])
{
	const char *path = NULL;
	bool passed = false;
	struct stat st;
	int fd, r;

	if (parse(argc, argv, &path) < 0)
		return 2;
	for (size_t i = 0; i < CONNECTIONS; i++)
		helper.tracers[i] = (struct tracer){ .fd = -1, .only_fd = -1 };
	libbpf_set_print(print);
	signal(SIGPIPE, SIG_IGN);
	if (stat("/proc/self/ns/pid", &st) < 0) { /* not readable any more after dropping root */
		fprintf(stderr, PROGRAM ": /proc/self/ns/pid: %m\n");
		return EXIT_FAILURE;
	}
	helper.ns_dev = st.st_dev;
	helper.ns_ino = st.st_ino;
	fd = open_listener(path, &passed);
	if (fd < 0) {
		fprintf(stderr, PROGRAM ": %s: %s\n", path ? path : RESIDENCY_SOCKET, strerror(-fd));
		return EXIT_FAILURE;
	}
	r = drop_privileges();
	if (r < 0) {
		fprintf(stderr, PROGRAM ": privileges cannot be dropped: %s\n", strerror(-r));
		return EXIT_FAILURE;
	}
	r = serve(fd, passed);
	if (r < 0)
		fprintf(stderr, PROGRAM ": %s\n", strerror(-r));
	return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
