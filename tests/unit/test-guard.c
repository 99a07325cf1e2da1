/* SPDX-License-Identifier: MIT */
/*
 * Mapped files that shrink: what reads beyond the cut gives, who notices, and who still dies. Files
 * are real ones in the temporary directory where it can hold nameless ones; deaths happen in children.
 */
#include "tests/test.h"

#include "daemon/model/guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define N_PAGES 64

static size_t page;

/* A mapped file; every byte of page i is i + 1. */
struct map {
	int fd;
	size_t bytes;
	volatile const uint8_t *p;
	struct guard *guard;
};

static int temporary(void)
{
	const char *dir = getenv("TMPDIR");
	int fd = open(dir ? dir : "/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

	if (fd < 0) /* not every file system can */
		fd = memfd_create("test-guard", MFD_CLOEXEC);
	assert_true(fd >= 0);
	return fd;
}

static struct map map_new(size_t n_pages, bool guarded)
{
	struct map m = { .fd = temporary(), .bytes = n_pages * page };
	uint8_t *fill = malloc(m.bytes);
	void *p;

	assert_non_null(fill);
	for (size_t i = 0; i < m.bytes; i++)
		fill[i] = (uint8_t)(i / page + 1);
	assert_int_equal(pwrite(m.fd, fill, m.bytes, 0), (ssize_t)m.bytes);
	free(fill);
	p = mmap(NULL, m.bytes, PROT_READ, MAP_SHARED, m.fd, 0);
	assert_ptr_not_equal(p, MAP_FAILED);
	m.p = p;
	if (guarded)
		assert_int_equal(guard_add(p, m.bytes, &m.guard), 0);
	return m;
}

static void map_done(struct map *m)
{
	m->guard = guard_remove(m->guard);
	assert_null(m->guard);
	munmap((void *)(uintptr_t)m->p, m->bytes);
	close(m->fd);
}

static void cut(const struct map *m, size_t bytes)
{
	assert_int_equal(ftruncate(m->fd, (off_t)bytes), 0);
}

static void test_whole(void **unused)
{
	struct map m = map_new(N_PAGES, true);

	(void)unused;
	for (size_t i = 0; i < N_PAGES; i++)
		assert_int_equal(m.p[i * page], i + 1);
	assert_false(guard_broken(m.guard));
	map_done(&m);
	assert_null(guard_remove(NULL));
}

static void test_truncated(void **unused)
{
	struct map m = map_new(N_PAGES, true);

	(void)unused;
	cut(&m, 10 * page + 100);
	/* Pages before the cut, and the one that holds it, are no faults. */
	assert_int_equal(m.p[9 * page], 10);
	assert_int_equal(m.p[10 * page + 99], 11);
	assert_int_equal(m.p[10 * page + 100], 0);
	assert_false(guard_broken(m.guard));

	errno = E2BIG;
	assert_int_equal(m.p[20 * page + 7], 0);
	assert_int_equal(errno, E2BIG);
	assert_true(guard_broken(m.guard));
	assert_int_equal(m.p[N_PAGES * page - 1], 0);
	for (size_t i = 0; i < 10; i++)
		assert_int_equal(m.p[i * page], i + 1);

	/* Zeros stay zeros from the page of the first fault on; before it the file is still there. */
	cut(&m, N_PAGES * page);
	assert_int_equal(pwrite(m.fd, "x", 1, (off_t)(15 * page)), 1);
	assert_int_equal(pwrite(m.fd, "x", 1, (off_t)(20 * page)), 1);
	assert_int_equal(m.p[15 * page], 'x');
	assert_int_equal(m.p[20 * page], 0);

	/* A second cut before the zeros. */
	cut(&m, 0);
	assert_int_equal(m.p[3 * page], 0);
	assert_int_equal(m.p[0], 0);
	assert_true(guard_broken(m.guard));
	map_done(&m);
}

/* The neighbours in the address space keep what they have, and do not count as broken. */
static void test_neighbours(void **unused)
{
	struct map m[3];
	uint8_t *room = mmap(NULL, 6 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)unused;
	assert_ptr_not_equal(room, MAP_FAILED);
	for (size_t i = 0; i < 3; i++) {
		m[i] = map_new(2, false);
		munmap((void *)(uintptr_t)m[i].p, m[i].bytes);
		m[i].p = mmap(room + 2 * i * page, m[i].bytes, PROT_READ, MAP_SHARED | MAP_FIXED,
			      m[i].fd, 0);
		assert_ptr_equal(m[i].p, room + 2 * i * page);
		/* Not whole pages: the rest of the last one belongs to it. */
		assert_int_equal(guard_add(room + 2 * i * page, m[i].bytes - 10, &m[i].guard), 0);
	}
	cut(&m[1], 0);
	assert_int_equal(m[1].p[2 * page - 1], 0);
	assert_int_equal(m[1].p[0], 0);
	assert_true(guard_broken(m[1].guard));
	for (size_t i = 0; i < 3; i += 2) {
		assert_false(guard_broken(m[i].guard));
		assert_int_equal(m[i].p[0], 1);
		assert_int_equal(m[i].p[2 * page - 1], 2);
	}
	for (size_t i = 0; i < 3; i++)
		map_done(&m[i]);
}

static void test_huge_pages(void **unused)
{
	size_t n = ((size_t)6 << 20) / page;
	struct map m = map_new(n, true);

	(void)unused;
	/* Advice: a file system without large folios may refuse. */
	madvise((void *)(uintptr_t)m.p, m.bytes, MADV_HUGEPAGE);
	for (size_t i = 0; i < n; i++)
		assert_int_equal(m.p[i * page], (uint8_t)(i + 1));
	cut(&m, ((size_t)3 << 20) + page);
	assert_int_equal(m.p[((size_t)3 << 20) + page], 0);
	assert_int_equal(m.p[m.bytes - 1], 0);
	assert_int_equal(m.p[(size_t)3 << 20], (uint8_t)(((size_t)3 << 20) / page + 1));
	assert_true(guard_broken(m.guard));
	map_done(&m);
}

#define N_MAPS 300

static void test_many(void **unused)
{
	struct map *m = calloc(N_MAPS, sizeof(*m));

	(void)unused;
	assert_non_null(m);
	for (size_t i = 0; i < N_MAPS; i++)
		m[i] = map_new(2, true);
	for (size_t i = 0; i < N_MAPS; i += 3)
		cut(&m[i], page);
	for (size_t i = 0; i < N_MAPS; i++) {
		assert_int_equal(m[i].p[page], i % 3 == 0 ? 0 : 2);
		assert_int_equal(m[i].p[0], 1);
		assert_int_equal(guard_broken(m[i].guard), i % 3 == 0);
	}
	for (size_t i = 0; i < N_MAPS; i++)
		map_done(&m[i]);
	free(m);
}

static void test_table_full(void **unused)
{
	struct guard *all[GUARD_MAX], *one = NULL;
	struct map m = map_new(1, false);

	(void)unused;
	for (size_t i = 0; i < GUARD_MAX; i++)
		assert_int_equal(guard_add((const void *)(uintptr_t)m.p, m.bytes, &all[i]), 0);
	assert_int_equal(guard_add((const void *)(uintptr_t)m.p, m.bytes, &one), -ENOSPC);
	assert_null(one);
	guard_remove(all[500]);
	assert_int_equal(guard_add((const void *)(uintptr_t)m.p, m.bytes, &one), 0);
	assert_ptr_equal(one, all[500]);
	for (size_t i = 0; i < GUARD_MAX; i++)
		guard_remove(all[i]);
	map_done(&m);
}

/* A slot that is used again does not remember. */
static void test_forgets(void **unused)
{
	struct map m = map_new(2, true), n;

	(void)unused;
	cut(&m, 0);
	assert_int_equal(m.p[page], 0);
	assert_true(guard_broken(m.guard));
	map_done(&m);
	n = map_new(2, true);
	assert_false(guard_broken(n.guard));
	map_done(&n);
}

struct reader {
	pthread_barrier_t *start;
	const struct map *map;
	size_t first;
	uint64_t sum;
	bool saw_broken;
};

static void *read_backwards(void *userdata)
{
	struct reader *r = userdata;

	pthread_barrier_wait(r->start);
	for (size_t i = N_PAGES; i-- > r->first;) {
		r->sum += r->map->p[i * page];
		if (i == N_PAGES - 1)
			r->saw_broken = guard_broken(r->map->guard);
	}
	return NULL;
}

static void test_threads(void **unused)
{
	(void)unused;
	for (int round = 0; round < 50; round++) {
		struct map m = map_new(N_PAGES, true);
		pthread_barrier_t start;
		pthread_t threads[4];
		struct reader r[4];

		cut(&m, 8 * page);
		pthread_barrier_init(&start, NULL, 4);
		for (size_t i = 0; i < 4; i++) {
			r[i] = (struct reader){ .start = &start, .map = &m, .first = i };
			assert_int_equal(pthread_create(&threads[i], NULL, read_backwards, &r[i]), 0);
		}
		for (size_t i = 0; i < 4; i++) {
			pthread_join(threads[i], NULL);
			/* Pages 0 to 7 hold 1 to 8. */
			assert_int_equal(r[i].sum, 36 - i * (i + 1) / 2);
			assert_true(r[i].saw_broken);
		}
		pthread_barrier_destroy(&start);
		map_done(&m);
	}
}

/* ---- who still dies ---- */

/* The signal that what() ends a child with; 0: it lives. */
static int death_of(void (*what)(void))
{
	const struct rlimit no_core = {};
	pid_t child = fork();
	int status;

	assert_true(child >= 0);
	if (child == 0) {
		setrlimit(RLIMIT_CORE, &no_core);
		/* Not the test runner's handler, nor a sanitizer's. */
		signal(SIGBUS, SIG_DFL);
		what();
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	if (WIFEXITED(status))
		assert_int_equal(WEXITSTATUS(status), 0);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void fault_guarded(void)
{
	struct map m = map_new(2, true);

	cut(&m, 0);
	if (m.p[page] != 0 || !guard_broken(m.guard))
		_exit(1);
}

static void fault_elsewhere(void)
{
	struct map m = map_new(2, true), other = map_new(2, false);

	cut(&other, 0);
	if (m.p[0] == 1)
		(void)other.p[page];
}

static void fault_removed(void)
{
	struct map m = map_new(2, true);

	cut(&m, 0);
	m.guard = guard_remove(m.guard);
	(void)m.p[page];
}

static void sent_by_kill(void)
{
	struct map m = map_new(2, true);

	(void)m;
	kill(getpid(), SIGBUS);
}

static void fault_blocked(void)
{
	struct map m = map_new(2, true);
	sigset_t bus;

	cut(&m, 0);
	sigemptyset(&bus);
	sigaddset(&bus, SIGBUS);
	sigprocmask(SIG_BLOCK, &bus, NULL);
	(void)m.p[page];
}

static void test_deaths(void **unused)
{
	(void)unused;
	assert_int_equal(death_of(fault_guarded), 0);
	assert_int_equal(death_of(fault_elsewhere), SIGBUS);
	assert_int_equal(death_of(fault_removed), SIGBUS);
	assert_int_equal(death_of(sent_by_kill), SIGBUS);
	assert_int_equal(death_of(fault_blocked), SIGBUS);
}

static sigjmp_buf jump;

static void others_handler(int sig)
{
	siglongjmp(jump, sig);
}

/* Whoever had the signal before gets what is not ours; whoever takes it later loses it again. */
static void test_previous_handler(void **unused)
{
	struct map m = map_new(2, false), other = map_new(2, false);
	struct sigaction sa = { .sa_handler = others_handler }, kept;

	(void)unused;
	cut(&m, 0);
	cut(&other, 0);
	sigaction(SIGBUS, &sa, &kept);
	assert_int_equal(guard_add((const void *)(uintptr_t)m.p, m.bytes, &m.guard), 0);
	if (sigsetjmp(jump, 1) == 0) {
		(void)other.p[0];
		fail_msg("a fault elsewhere went unnoticed");
	}
	/* It was given back. */
	sigaction(SIGBUS, NULL, &sa);
	assert_ptr_equal(sa.sa_handler, others_handler);
	guard_remove(m.guard);
	assert_int_equal(guard_add((const void *)(uintptr_t)m.p, m.bytes, &m.guard), 0);
	assert_int_equal(m.p[0], 0);
	assert_true(guard_broken(m.guard));
	map_done(&m);
	map_done(&other);
	sigaction(SIGBUS, &kept, NULL);
}

/* System calls are no threads: they fail. */
static void test_system_calls(void **unused)
{
	struct map m = map_new(2, true);
	int fd = temporary();

	(void)unused;
	cut(&m, 0);
	assert_int_equal(write(fd, (const void *)(uintptr_t)m.p, 10), -1);
	assert_int_equal(errno, EFAULT);
	assert_false(guard_broken(m.guard));
	close(fd);
	map_done(&m);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_whole),        cmocka_unit_test(test_truncated),
		cmocka_unit_test(test_neighbours),   cmocka_unit_test(test_huge_pages),
		cmocka_unit_test(test_many),         cmocka_unit_test(test_table_full),
		cmocka_unit_test(test_forgets),      cmocka_unit_test(test_threads),
		cmocka_unit_test(test_deaths),       cmocka_unit_test(test_previous_handler),
		cmocka_unit_test(test_system_calls),
	};

	page = (size_t)sysconf(_SC_PAGESIZE);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
