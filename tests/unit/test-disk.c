/* SPDX-License-Identifier: MIT */
/*
 * Reads and page-cache work on a real file, by both ways of reading: bytes, order, errors, and what
 * is in the page cache after. Looks into disk-internal.h to put a broken descriptor in place of the
 * file's, and to have jobs wait until the test is ready.
 */
#include "tests/test.h"

#include "daemon/residency/disk-internal.h"
#include "tests/unit/expert-file.h"

#include <sys/wait.h>

#define AREA ((size_t)4 << 20)

static struct expert_file file;

enum way { WAY_URING, WAY_THREADS };

static struct disk *disk_of(enum way way, unsigned depth)
{
	struct disk_config c = { .no_uring = way == WAY_THREADS, .queue_depth = depth };
	struct disk *d;

	assert_int_equal(disk_new(file.g, &c, &d), 0);
	return d;
}

static bool has_ring(enum way way)
{
	struct disk *d = disk_of(way, 0);
	bool yes = startswith(disk_method(d), "io_uring");

	disk_free(d);
	return yes;
}

static uint8_t *area_new(void)
{
	void *p = NULL;

	assert_int_equal(posix_memalign(&p, 4096, AREA), 0);
	return p;
}

static struct disk_job read_job(uint32_t block, uint64_t offset, uint64_t bytes, void *to)
{
	return (struct disk_job){
		.kind = DISK_READ,
		.block = block,
		.n_pieces = 1,
		.piece = { { .offset = offset, .bytes = bytes, .to = to } },
	};
}

static struct disk_job page_job(enum disk_kind kind, uint32_t block, uint64_t offset, uint64_t bytes)
{
	return (struct disk_job){
		.kind = kind,
		.block = block,
		.n_pieces = 1,
		.piece = { { .offset = offset,
			     .bytes = bytes,
			     .data = (const char *)gguf_part(file.g, 0)->data + offset } },
	};
}

/* Submits one job alone and waits for it. */
static void do_job(struct disk *d, struct disk_job *job)
{
	disk_submit(d, job);
	assert_int_equal(disk_in_flight(d), 1);
	assert_ptr_equal(disk_take(d, true), job);
	assert_int_equal(disk_in_flight(d), 0);
	assert_null(disk_take(d, true));
	assert_null(disk_take(d, false));
}

static void read_at_random(enum way way)
{
	struct disk *d = disk_of(way, 5);
	uint64_t a = disk_alignment(d);
	struct disk_job jobs[40] = {};
	uint8_t *area = area_new();
	size_t at = 0;

	assert_true(a >= 512 && a <= 4096 && (a & (a - 1)) == 0);
	for (size_t i = 0; i < ARRAY_SIZE(jobs); i++) {
		struct disk_job *job = &jobs[i];

		job->kind = DISK_READ;
		job->block = (uint32_t)i;
		job->urgent = i % 3 == 0;
		job->n_pieces = 1 + (uint32_t)file_rnd(&file, CATALOG_MATRICES);
		for (uint32_t k = 0; k < job->n_pieces; k++) {
			job->piece[k].bytes = a * (1 + file_rnd(&file, 30000 / a));
			job->piece[k].offset = file_rnd(&file, (file.bytes - 32768) / a) * a;
			job->piece[k].to = area + at;
			at += job->piece[k].bytes;
			assert_true(at <= AREA);
		}
		disk_submit(d, job);
	}
	for (size_t left = ARRAY_SIZE(jobs); left > 0; left--) {
		struct disk_job *job = disk_take(d, true);
		uint64_t bytes = 0;

		assert_non_null(job);
		assert_int_equal(job->err, 0);
		assert_int_equal(disk_in_flight(d), left - 1);
		for (uint32_t k = 0; k < job->n_pieces; k++) {
			assert_memory_equal(job->piece[k].to, file.copy + job->piece[k].offset,
					    job->piece[k].bytes);
			bytes += job->piece[k].bytes;
		}
		assert_int_equal(job->bytes, bytes);
		job->block = UINT32_MAX; /* else it might come twice */
	}
	for (size_t i = 0; i < ARRAY_SIZE(jobs); i++)
		assert_int_equal(jobs[i].block, UINT32_MAX);
	disk_free(d);
	free(area);
}

static void test_read_uring(void **unused)
{
	(void)unused;
	if (!has_ring(WAY_URING))
		skip_because("no io_uring here, or no O_DIRECT");
	read_at_random(WAY_URING);
}

static void test_read_threads(void **unused)
{
	(void)unused;
	read_at_random(WAY_THREADS);
}

/* As on a file system that refuses O_DIRECT. */
static void make_buffered(struct disk *d)
{
	_cleanup_(closep) int fd = open(file.path, O_RDONLY | O_CLOEXEC);

	assert_true(fd >= 0 && dup2(fd, d->parts[0].fd) >= 0);
	assert_int_equal(posix_fadvise(d->parts[0].fd, 0, 0, POSIX_FADV_RANDOM), 0);
	d->direct = false;
	assert_string_equal(disk_method(d), "pread buffered");
}

/* Direct reads leave no page cache, and neither do buffered ones. */
static void read_leaves_nothing(enum way way, bool buffered)
{
	uint8_t *area = area_new();
	struct disk_job job;
	struct disk *d;

	file_reopen(&file);
	d = disk_of(way, 0);
	if (buffered)
		make_buffered(d);
	job = read_job(0, 3 * disk_alignment(d), 2560000 / 4096 * 4096, area);
	assert_true(file_drop(&file));
	do_job(d, &job);
	assert_int_equal(job.err, 0);
	assert_memory_equal(area, file.copy + job.piece[0].offset, job.piece[0].bytes);
	assert_int_equal(file_cached(&file, 0, file.bytes), 0);
	disk_free(d);
	free(area);
}

static void test_no_page_cache(void **unused)
{
	(void)unused;
	if (!file.has_page_cache)
		skip_because("%s is not on a disk", file.dir);
	read_leaves_nothing(WAY_URING, false);
	read_leaves_nothing(WAY_THREADS, false);
	read_leaves_nothing(WAY_THREADS, true);
}

static void test_end_of_file(void **unused)
{
	uint8_t *area = area_new();

	(void)unused;
	assert_true(file.bytes % 512 != 0);
	for (enum way way = WAY_URING; way <= WAY_THREADS; way++) {
		struct disk *d = disk_of(way, 0);
		uint64_t a = disk_alignment(d), end = ALIGN_UP(file.bytes, a);
		struct disk_job job = read_job(0, end - 3 * a, 3 * a, area);

		memset(area, 0x5a, 3 * a);
		do_job(d, &job);
		assert_int_equal(job.err, 0);
		assert_int_equal(job.bytes, file.bytes - (end - 3 * a));
		assert_memory_equal(area, file.copy + end - 3 * a, job.bytes);
		disk_free(d);
	}
	free(area);
}

/* The file is made shorter behind our back, in the middle of a sector, and long again. */
static void test_truncated(void **unused)
{
	uint64_t cut = file.bytes - 100000;
	uint8_t *area = area_new();

	(void)unused;
	assert_true(cut % 512 != 0);
	for (enum way way = WAY_URING; way <= WAY_THREADS; way++) {
		struct disk *d = disk_of(way, 0);
		struct disk_job across = read_job(0, cut / 4096 * 4096 - 8192, 65536, area);
		struct disk_job beyond = read_job(0, cut / 4096 * 4096 + 8192, 4096, area);
		struct disk_job before = read_job(0, cut / 4096 * 4096 - 8192, 4096, area);
		struct disk_job pages = page_job(DISK_POPULATE, 0, cut / 4096 * 4096 - 8192, 65536);

		assert_int_equal(ftruncate(file.fd, (off_t)cut), 0);
		do_job(d, &across);
		assert_int_equal(across.err, -ENODATA);
		do_job(d, &beyond);
		assert_int_equal(beyond.err, -ENODATA);
		do_job(d, &before);
		assert_int_equal(before.err, 0);
		assert_memory_equal(area, file.copy + before.piece[0].offset, 4096);
		do_job(d, &pages);
		assert_int_equal(pages.err, -ENODATA);
		assert_int_equal(pwrite(file.fd, file.copy + cut, file.bytes - cut, (off_t)cut),
				 file.bytes - cut);
		assert_int_equal(fsync(file.fd), 0);
		do_job(d, &across);
		assert_int_equal(across.err, 0);
		do_job(d, &pages);
		assert_int_equal(pages.err, 0);
		disk_free(d);
	}
	free(area);
	file_reopen(&file);
}

/* Page zero of our own memory: every read of it is an error, EIO. */
static void test_read_error(void **unused)
{
	uint8_t *area = area_new();

	(void)unused;
	for (enum way way = WAY_URING; way <= WAY_THREADS; way++) {
		struct disk *d = disk_of(way, 1);
		_cleanup_(closep) int mem = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
		_cleanup_(closep) int good = dup(d->parts[0].fd);
		struct disk_job bad = read_job(1, 0, 4096, area), same = read_job(1, 4096, 4096, area);

		assert_true(mem >= 0 && good >= 0);
		assert_true(dup2(mem, d->parts[0].fd) >= 0);
		do_job(d, &bad);
		assert_int_equal(bad.err, -EIO);
		assert_int_equal(bad.bytes, 0);
		assert_true(dup2(good, d->parts[0].fd) >= 0);
		do_job(d, &same);
		assert_int_equal(same.err, 0);
		assert_memory_equal(area, file.copy + 4096, 4096);
		disk_free(d);
	}
	free(area);
}

static void test_progress(void **unused)
{
	struct disk *d = disk_of(WAY_THREADS, 0);
	struct disk_piece p = { .bytes = 65536 };
	struct disk_progress g = {};

	(void)unused;
	d->alignment = 512;
	assert_int_equal(disk_progress_step(d, &p, 4096, &g), 0);
	assert_int_equal(g.done, 4096);
	/* A part of a sector is read again, and is no step on. */
	assert_int_equal(disk_progress_step(d, &p, 700, &g), 0);
	assert_int_equal(g.done, 4608);
	assert_int_equal(disk_progress_step(d, &p, 100, &g), 0);
	assert_int_equal(disk_progress_step(d, &p, -EAGAIN, &g), 0);
	assert_int_equal(g.done, 4608);
	/* What gets on may fail three times again. */
	assert_int_equal(disk_progress_step(d, &p, 512, &g), 0);
	assert_int_equal(disk_progress_step(d, &p, -EIO, &g), 0);
	assert_int_equal(disk_progress_step(d, &p, 0, &g), 0);
	assert_int_equal(disk_progress_step(d, &p, -EIO, &g), -EIO);
	assert_int_equal(disk_progress_step(d, &p, 65536 - 5120, &g), 1);
	assert_int_equal(g.done, 65536);
	/* The end of the file. */
	p = (struct disk_piece){ .offset = file.bytes / 4096 * 4096, .bytes = 4096 };
	g = (struct disk_progress){};
	assert_int_equal(disk_piece_bytes(d, &p), file.bytes % 4096);
	assert_int_equal(disk_progress_step(d, &p, (ssize_t)(file.bytes % 4096), &g), 1);
	assert_int_equal(g.done, file.bytes % 4096);
	p.offset += 4096;
	assert_int_equal(disk_piece_bytes(d, &p), 0);
	disk_free(d);
}

/* One piece in flight, and nothing ends before it is looked at: the order is ours to see. */
static void test_urgent_uring(void **unused)
{
	uint8_t *area = area_new();
	struct disk_job jobs[5];
	const unsigned want[] = { 0, 4, 3, 1, 2 };
	struct disk *d;

	(void)unused;
	if (!has_ring(WAY_URING))
		skip_because("no io_uring here, or no O_DIRECT");
	d = disk_of(WAY_URING, 1);
	for (unsigned i = 0; i < 5; i++) {
		jobs[i] = read_job(i, i * 8192, 4096, area + i * 4096);
		jobs[i].urgent = i == 4;
		disk_submit(d, &jobs[i]);
	}
	disk_hurry(d, &jobs[3]);
	for (unsigned i = 0; i < 5; i++)
		assert_ptr_equal(disk_take(d, true), &jobs[want[i]]);
	disk_free(d);
	free(area);
}

static void test_urgent_threads(void **unused)
{
	struct disk *d = disk_of(WAY_THREADS, 1);
	uint8_t *area = area_new();
	struct disk_job jobs[6];
	/* 1 is asked for before the reads behind it, and waited for after them. */
	const unsigned want[] = { 4, 3, 0, 2, 5, 1 };

	(void)unused;
	disk_threads_stop(d);
	for (unsigned i = 0; i < 6; i++) {
		jobs[i] = read_job(i, i * 8192, 4096, area + i * 4096);
		if (i == 1 || i == 3)
			jobs[i] = page_job(DISK_POPULATE, i, i * 8192, 4096);
		jobs[i].urgent = i == 4;
		disk_submit(d, &jobs[i]);
	}
	assert_null(disk_take(d, false));
	disk_hurry(d, &jobs[3]);
	d->stop = false;
	assert_int_equal(disk_threads_start(d, 1), 0);
	for (unsigned i = 0; i < 6; i++)
		assert_ptr_equal(disk_take(d, true), &jobs[want[i]]);
	disk_free(d);
	free(area);
}

/* More threads than jobs, and still those of one block come one after the other. */
static void test_order_of_a_block(void **unused)
{
	const uint64_t offset = 40960, bytes = 409600;
	struct disk_config c = { .n_threads = 8 };
	struct disk_job jobs[2][16];
	struct disk *d;

	(void)unused;
	assert_int_equal(disk_new(file.g, &c, &d), 0);
	for (unsigned i = 0; i < 16; i++) {
		enum disk_kind kind = i % 2 ? DISK_POPULATE : DISK_EVICT;

		/* Both blocks are in one chain; only within a block is there an order. */
		jobs[0][i] = page_job(kind, 7, offset, bytes);
		jobs[1][i] = page_job(kind, 7 + DISK_BUCKETS, offset + bytes, bytes);
		jobs[0][i].urgent = i % 3 == 0;
		disk_submit(d, &jobs[0][i]);
		disk_submit(d, &jobs[1][i]);
	}
	for (unsigned next[2] = {}, i = 0; i < 32; i++) {
		struct disk_job *job = disk_take(d, true);
		unsigned k = job->block == 7 ? 0 : 1;

		assert_ptr_equal(job, &jobs[k][next[k]++]);
		assert_int_equal(job->err, 0);
	}
	if (file.has_page_cache)
		assert_int_equal(file_cached(&file, offset, 2 * bytes), 2 * bytes / 4096);
	disk_free(d);
}

/* A read must wait for a thread that works on the same block, and is not lost by that. */
static void test_order_of_both_ways(void **unused)
{
	struct disk *d = disk_of(WAY_URING, 0);
	uint8_t *area = area_new();
	struct disk_job first = page_job(DISK_EVICT, 3, 0, 65536), then = read_job(3, 0, 65536, area);

	(void)unused;
	disk_submit(d, &first);
	disk_submit(d, &then);
	assert_ptr_equal(disk_take(d, true), &first);
	assert_ptr_equal(disk_take(d, true), &then);
	assert_memory_equal(area, file.copy, 65536);
	disk_free(d);
	free(area);
}

/* In as large folios as there are, and mapped nowhere. */
static void fill_page_cache(void)
{
	(void)madvise(file.map, file.bytes, MADV_HUGEPAGE);
	assert_memory_equal(file.map, file.copy, file.bytes);
	assert_int_equal(madvise(file.map, file.bytes, MADV_DONTNEED), 0);
	(void)madvise(file.map, file.bytes, MADV_NOHUGEPAGE);
	assert_int_equal(file_cached(&file, 0, file.bytes), (file.bytes + 4095) / 4096);
}

/*
 * What came in by reading on, in folios that reach beyond the range, is dropped exactly; with
 * nobody having it mapped, too.
 */
static void test_exact_eviction(void **unused)
{
	const uint64_t offset = (uint64_t)1003 * 4096, bytes = (uint64_t)499 * 4096;
	struct disk_job job;
	struct disk *d;

	(void)unused;
	if (!file.has_page_cache)
		skip_because("%s is not on a disk", file.dir);
	for (unsigned mapped = 0; mapped < 2; mapped++) {
		file_reopen(&file);
		d = disk_of(WAY_THREADS, 0);
		assert_true(file_drop(&file));
		if (d->parts[0].sight == PAGES_BLIND) {
			disk_free(d);
			skip_because("neither cachestat nor mincore tells");
		}
		fill_page_cache();
		job = page_job(DISK_POPULATE, 0, offset, bytes);
		if (mapped)
			do_job(d, &job);
		job = page_job(DISK_EVICT, 0, offset, bytes);
		do_job(d, &job);
		assert_int_equal(job.err, 0);
		assert_int_equal(job.left_pages, 0);
		assert_int_equal(file_cached(&file, offset, bytes), 0);
		assert_int_equal(file_cached(&file, 0, offset), offset / 4096);
		assert_int_equal(file_cached(&file, offset + bytes, file.bytes - offset - bytes),
				 (file.bytes + 4095) / 4096 - (offset + bytes) / 4096);
		disk_free(d);
	}
}

/* A second process that has it mapped keeps the pages, and that is told. */
static void test_left_pages(void **unused)
{
	const uint64_t offset = 81920, bytes = 409600;
	struct disk_job job = page_job(DISK_EVICT, 0, offset, bytes);
	struct disk *d;
	int to[2], from[2];
	char c = 0;
	pid_t pid;

	(void)unused;
	if (!file.has_page_cache)
		skip_because("%s is not on a disk", file.dir);
	d = disk_of(WAY_THREADS, 0);
	if (d->parts[0].sight == PAGES_BLIND) {
		disk_free(d);
		skip_because("neither cachestat nor mincore tells");
	}
	assert_int_equal(pipe(to), 0);
	assert_int_equal(pipe(from), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		for (uint64_t at = 0; at < bytes; at += 4096)
			c ^= *(volatile char *)(file.map + offset + at);
		if (write(from[1], &c, 1) != 1)
			_exit(1);
		close(to[1]);
		_exit(read(to[0], &c, 1) == 0 ? 0 : 1);
	}
	assert_int_equal(read(from[0], &c, 1), 1);
	do_job(d, &job);
	close(to[1]);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	close(to[0]);
	close(from[0]);
	close(from[1]);
	assert_int_equal(job.left_pages, bytes / 4096);
	assert_true(d->held); /* and the next one is not waited for as long */
	do_job(d, &job);
	assert_int_equal(job.left_pages, 0);
	assert_false(d->held);
	disk_free(d);
}

static void test_tmpfs(void **unused)
{
	struct expert_file on_disk = file;
	struct statfs s;

	(void)unused;
	if (statfs("/dev/shm", &s) < 0 || s.f_type != TMPFS_MAGIC || access("/dev/shm", W_OK) < 0)
		skip_because("no tmpfs at /dev/shm");
	file_open(&file, "/dev/shm");
	read_at_random(WAY_URING);
	file_close(&file);
	file = on_disk;
}

/* Freed with jobs in flight: they end first. */
static void test_free_waits(void **unused)
{
	uint8_t *area = area_new();

	(void)unused;
	for (enum way way = WAY_URING; way <= WAY_THREADS; way++) {
		struct disk *d = disk_of(way, 2);
		struct disk_job jobs[8];

		for (unsigned i = 0; i < 8; i++) {
			jobs[i] = read_job(i % 3, i * 65536, 65536, area + i * 65536);
			disk_submit(d, &jobs[i]);
		}
		assert_null(disk_free(d));
		assert_memory_equal(area, file.copy, 8 * 65536);
		memset(area, 0, 8 * 65536);
	}
	assert_null(disk_free(NULL));
	free(area);
}

static void test_no_file(void **unused)
{
	static const uint64_t ne[] = { 8 };
	static const float zeros[8];
	struct gguf_build b = gguf_build_new();
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(freep) void *p = NULL;
	struct disk_config c = {};
	struct disk *d = NULL;
	size_t bytes;

	(void)unused;
	gguf_build_tensor(&b, "output.weight", QUANT_F32, 1, ne, zeros, sizeof(zeros));
	p = gguf_build_done(&b, &bytes);
	assert_int_equal(gguf_open_memory(p, bytes, "image", &g, NULL), 0);
	assert_int_equal(disk_new(g, &c, &d), -EBADF);
	assert_null(d);
}

static int setup(void **unused)
{
	(void)unused;
	file_open(&file, NULL);
	return 0;
}

static int teardown(void **unused)
{
	(void)unused;
	file_close(&file);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_read_uring),         cmocka_unit_test(test_read_threads),
		cmocka_unit_test(test_no_page_cache),      cmocka_unit_test(test_end_of_file),
		cmocka_unit_test(test_truncated),          cmocka_unit_test(test_read_error),
		cmocka_unit_test(test_progress),           cmocka_unit_test(test_urgent_uring),
		cmocka_unit_test(test_urgent_threads),     cmocka_unit_test(test_order_of_a_block),
		cmocka_unit_test(test_order_of_both_ways), cmocka_unit_test(test_exact_eviction),
		cmocka_unit_test(test_left_pages),         cmocka_unit_test(test_tmpfs),
		cmocka_unit_test(test_free_waits),         cmocka_unit_test(test_no_file),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
