/* SPDX-License-Identifier: MIT */
/*
 * memory.c: reads /proc/meminfo and the memory control groups above this process. See memory.h.
 *
 * The groups are those at the time of opening, from the innermost outwards as far as the mount shows
 * them; a file that is not there, a group that is gone and a number that is none mean: no limit.
 * Refuses to know swap: page cache is what can be had without it. Invariant: between open and
 * close nothing is allocated and no path is looked up.
 *
 * Page cache of a group counts as available whole, also what is mapped (total_mapped_file): clean
 * pages go without swap whoever maps them, and the trunk of our own model is among them, which
 * the budget is to cover. What mlock() holds is in neither list of the kernel, as it should be.
 */
#include "daemon/residency/memory.h"

#include <fcntl.h>
#include <inttypes.h>

/* Deeper than any manager nests; of a deeper tree the innermost are looked at. */
#define GROUPS_MAX 32
#define NO_LIMIT   UINT64_MAX
/* v1 says "none" as the largest multiple of a page; nobody has as much as this. */
#define LIMIT_MAX  ((uint64_t)1 << 62)
/* memory.stat has 2 kB on a small machine, more on one with many nodes. */
#define TEXT_MAX   16384

#define MIB ((uint64_t)1 << 20)

struct group {
	bool v1;
	int limit, high; /* high: v2 only */
	int usage, stat;
};

struct memory {
	int meminfo, statm;
	struct group groups[GROUPS_MAX];
	size_t n_groups;
};

/* Where a hierarchy is mounted. */
struct mount {
	char *root, *point;
};

static void mount_done(struct mount *m)
{
	free(m->root);
	free(m->point);
	*m = (struct mount){};
}

/* ---- reading ---- */

/* The whole file as text. -errno. */
static int read_text(int fd, char text[TEXT_MAX])
{
	size_t len = 0;

	if (fd < 0)
		return -ENOENT;
	while (len < TEXT_MAX - 1) {
		ssize_t n = pread(fd, text + len, TEXT_MAX - 1 - len, (off_t)len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		len += (size_t)n;
	}
	text[len] = 0;
	return 0;
}

/* Digits, and white space after them. */
static bool parse_number(const char *s, uint64_t *ret)
{
	uint64_t v = 0;

	if (*s < '0' || *s > '9')
		return false;
	for (; *s >= '0' && *s <= '9'; s++)
		if (__builtin_mul_overflow(v, 10, &v) ||
		    __builtin_add_overflow(v, (uint64_t)(*s - '0'), &v))
			return false;
	if (*s != 0 && *s != ' ' && *s != '\n')
		return false;
	*ret = v;
	return true;
}

/* The number after a key at the beginning of a line. *ret is left alone when there is none. */
static bool find_number(const char *text, const char *key, uint64_t *ret)
{
	size_t len = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, key, len) == 0 && line[len] == ' ')
			return parse_number(line + len + strspn(line + len, " "), ret);
	}
	return false;
}

static bool find_kib(const char *text, const char *key, uint64_t *ret)
{
	uint64_t kib;
	size_t bytes;

	if (!find_number(text, key, &kib) || !mul_ok(kib, 1024, &bytes))
		return false;
	*ret = bytes;
	return true;
}

static uint64_t read_limit(int fd)
{
	char text[TEXT_MAX];
	uint64_t v;

	if (read_text(fd, text) < 0 || !parse_number(text, &v) || v >= LIMIT_MAX)
		return NO_LIMIT;
	return v;
}

/* Page cache of the group and all below it, and the tightest limit that the kernel applies to it. */
static void read_stat(const struct group *g, uint64_t *ret_cache, uint64_t *ret_limit)
{
	uint64_t active = 0, inactive = 0, limit = NO_LIMIT;
	char text[TEXT_MAX];

	if (read_text(g->stat, text) == 0) {
		find_number(text, g->v1 ? "total_active_file" : "active_file", &active);
		find_number(text, g->v1 ? "total_inactive_file" : "inactive_file", &inactive);
		/* v1 alone tells of groups above the mount, which a container does not see. */
		if (g->v1)
			find_number(text, "hierarchical_memory_limit", &limit);
	}
	*ret_cache = active + inactive;
	*ret_limit = limit < LIMIT_MAX ? limit : NO_LIMIT;
}

static void read_group(const struct group *g, struct memory_state *s)
{
	uint64_t limit = MIN(read_limit(g->limit), read_limit(g->high)), above, cache, usage;
	char text[TEXT_MAX];

	read_stat(g, &cache, &above);
	limit = MIN(limit, above);
	if (limit == NO_LIMIT || read_text(g->usage, text) < 0 || !parse_number(text, &usage))
		return;
	/* The statistics lag behind. */
	usage -= MIN(usage, cache);
	s->group_limit = MIN(s->group_limit, limit);
	s->group_available = MIN(s->group_available, limit - MIN(limit, usage));
}

int memory_read(struct memory *m, struct memory_state *ret)
{
	struct memory_state s = { .group_limit = NO_LIMIT, .group_available = NO_LIMIT };
	char text[TEXT_MAX];
	int r = read_text(m->meminfo, text);

	if (r < 0)
		return r;
	if (!find_kib(text, "MemTotal:", &s.machine_total) ||
	    !find_kib(text, "MemAvailable:", &s.machine_available))
		return -EBADMSG;
	for (size_t i = 0; i < m->n_groups; i++)
		read_group(&m->groups[i], &s);
	s.total = MIN(s.machine_total, s.group_limit);
	s.available = MIN(s.machine_available, s.group_available);
	*ret = s;
	return 0;
}

/* ---- finding the groups ---- */

static int open_in(const char *root, const char *directory, const char *name)
{
	_cleanup_(freep) char *path = NULL;
	int fd;

	if (asprintf(&path, "%s%s/%s", root, directory, name) < 0) {
		path = NULL;
		return -ENOMEM;
	}
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
	return fd < 0 ? -errno : fd;
}

static FILE *fopen_in(const char *root, const char *name)
{
	int fd = open_in(root, "/proc/self", name);
	FILE *f = fd >= 0 ? fdopen(fd, "r") : NULL;

	if (fd >= 0 && !f)
		close(fd);
	return f;
}

static void close_group(struct group *g)
{
	closep(&g->limit);
	closep(&g->high);
	closep(&g->usage);
	closep(&g->stat);
}

static void add_group(struct memory *m, const char *root, const char *directory, bool v1)
{
	struct group g = { .v1 = v1, .high = -1 };

	if (m->n_groups == GROUPS_MAX)
		return;
	g.limit = open_in(root, directory, v1 ? "memory.limit_in_bytes" : "memory.max");
	g.usage = open_in(root, directory, v1 ? "memory.usage_in_bytes" : "memory.current");
	g.stat = open_in(root, directory, "memory.stat");
	if (!v1)
		g.high = open_in(root, directory, "memory.high");
	/* The root of v2 has no limit, a group without the controller none of it. */
	if (g.limit < 0 || g.usage < 0) {
		close_group(&g);
		return;
	}
	m->groups[m->n_groups++] = g;
}

/* In a list with commas. */
static bool has_word(const char *list, const char *word)
{
	size_t len = strlen(word);

	for (const char *s = list; s; s = strchr(s, ',')) {
		s += *s == ',';
		if (strncmp(s, word, len) == 0 && (s[len] == ',' || s[len] == 0))
			return true;
	}
	return false;
}

/* The group of this process, malloc'd: v1 of the memory controller or v2. NULL: none. */
static char *own_group(const char *root, bool v1)
{
	_cleanup_(fclosep) FILE *f = fopen_in(root, "cgroup");
	_cleanup_(freep) char *line = NULL;
	size_t alloc = 0;

	while (f && getline(&line, &alloc, f) > 0) {
		char *controllers = strchr(line, ':'), *path;

		path = controllers ? strchr(controllers + 1, ':') : NULL;
		if (!path || path[1] != '/')
			continue;
		*path++ = 0;
		path[strcspn(path, "\n")] = 0;
		if (v1 ? has_word(controllers + 1, "memory")
		       : startswith(line, "0:") && !controllers[1])
			return strdup(path);
	}
	return NULL;
}

/* \040 and the like, in place. */
static void unescape(char *s)
{
	char *to = s;

	for (; *s; s++) {
		if (s[0] == '\\' && strspn(s + 1, "01234567") >= 3) {
			*to++ = (char)((s[1] - '0') << 6 | (s[2] - '0') << 3 | (s[3] - '0'));
			s += 3;
		} else {
			*to++ = *s;
		}
	}
	*to = 0;
}

/* What path is below directory; NULL when it is not. */
static const char *below(const char *path, const char *directory)
{
	size_t len = streq(directory, "/") ? 0 : strlen(directory);

	if (strncmp(path, directory, len) != 0 || (path[len] != '/' && path[len] != 0))
		return NULL;
	return path + len;
}

/* ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [OPTIONAL...] - TYPE SOURCE OPTIONS; of the right kind. */
static bool parse_mount(char *line, bool v1, struct mount *ret)
{
	char *field[6], *save = NULL, *s, *type, *options;

	for (size_t i = 0; i < ARRAY_SIZE(field); i++) {
		field[i] = strtok_r(i == 0 ? line : NULL, " \n", &save);
		if (!field[i])
			return false;
	}
	do
		s = strtok_r(NULL, " \n", &save);
	while (s && !streq(s, "-"));
	type = strtok_r(NULL, " \n", &save);
	strtok_r(NULL, " \n", &save); /* the source */
	options = strtok_r(NULL, " \n", &save);
	if (!type || !options)
		return false;
	if (v1 ? !streq(type, "cgroup") || !has_word(options, "memory") : !streq(type, "cgroup2"))
		return false;
	unescape(field[3]);
	unescape(field[4]);
	*ret = (struct mount){ .root = strdup(field[3]), .point = strdup(field[4]) };
	if (ret->root && ret->point)
		return true;
	mount_done(ret);
	return false;
}

/* The mount that shows the group; else the first of the kind, which shows something above it. */
static bool find_mount(const char *root, bool v1, const char *group, struct mount *ret)
{
	_cleanup_(fclosep) FILE *f = fopen_in(root, "mountinfo");
	_cleanup_(freep) char *line = NULL;
	struct mount first = {}, m;
	size_t alloc = 0;

	while (f && getline(&line, &alloc, f) > 0) {
		if (!parse_mount(line, v1, &m))
			continue;
		if (below(group, m.root)) {
			mount_done(&first);
			*ret = m;
			return true;
		}
		if (!first.root)
			first = m;
		else
			mount_done(&m);
	}
	*ret = first;
	return first.root;
}

static void add_groups(struct memory *m, const char *root, bool v1)
{
	_cleanup_(freep) char *group = own_group(root, v1), *path = NULL;
	_cleanup_(mount_done) struct mount mount = {};
	const char *rest;
	size_t point;

	if (!group || !find_mount(root, v1, group, &mount))
		return;
	rest = below(group, mount.root);
	/* A group outside of our namespace is written with "..". */
	if (!rest || strstr(rest, "/.."))
		rest = "";
	if (asprintf(&path, "%s%s", mount.point, rest) < 0) {
		path = NULL;
		return;
	}
	point = strlen(mount.point);
	for (;;) {
		size_t len = strlen(path);

		while (len > point && path[len - 1] == '/')
			path[--len] = 0;
		add_group(m, root, path, v1);
		if (len <= point)
			return;
		while (len > point && path[len - 1] != '/')
			path[--len] = 0;
	}
}

int memory_open(const char *root, struct memory **ret)
{
	_cleanup_(memory_closep) struct memory *m = calloc(1, sizeof(*m));
	struct memory_state s;
	int r;

	if (!m)
		return -ENOMEM;
	m->meminfo = open_in(root, "/proc", "meminfo");
	m->statm = open_in(root, "/proc", "self/statm");
	if (m->meminfo < 0)
		return m->meminfo;
	add_groups(m, root, true);
	add_groups(m, root, false);
	r = memory_read(m, &s);
	if (r < 0)
		return r;
	*ret = TAKE_PTR(m);
	return 0;
}

struct memory *memory_close(struct memory *m)
{
	if (!m)
		return NULL;
	closep(&m->meminfo);
	closep(&m->statm);
	for (size_t i = 0; i < m->n_groups; i++)
		close_group(&m->groups[i]);
	free(m);
	return NULL;
}

uint64_t memory_anonymous(const struct memory *m)
{
	unsigned long long size, resident, shared;
	char text[TEXT_MAX];

	if (m->statm < 0 || read_text(m->statm, text) < 0 ||
	    sscanf(text, "%llu %llu %llu", &size, &resident, &shared) != 3 || shared > resident)
		return 0;
	return (resident - shared) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- what follows from it ---- */

uint64_t memory_default_reserve(uint64_t machine_total)
{
	return MAX(1024 * MIB, machine_total / 10);
}

uint64_t memory_group_slack(uint64_t group_limit)
{
	return MAX(48 * MIB, group_limit / 25);
}

/* available + own - keep, between 0 and UINT64_MAX. */
static uint64_t left_of(uint64_t available, uint64_t own, uint64_t keep)
{
	uint64_t all;

	if (__builtin_add_overflow(available, own, &all))
		all = UINT64_MAX;
	return all - MIN(all, keep);
}

uint64_t memory_budget(const struct memory_state *s, uint64_t own_bytes, uint64_t reserve_bytes)
{
	uint64_t machine = left_of(s->machine_available, own_bytes, reserve_bytes), group;

	if (s->group_limit == NO_LIMIT)
		return machine;
	group = left_of(s->group_available, own_bytes, memory_group_slack(s->group_limit));
	return MIN(machine, group);
}
