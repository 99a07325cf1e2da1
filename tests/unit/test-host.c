/* SPDX-License-Identifier: MIT */
/*
 * The host tier in both forms: random life of blocks against a model of it, with the bytes of every
 * block that is HERE; exactness of evictions and of loading the trunk, seen in the page cache;
 * errors.
 */
#include "tests/test.h"

#include "daemon/residency/host.h"
#include "tests/unit/expert-file.h"

#include <sys/resource.h>
#include <sys/wait.h>

#define HUGE ((uint64_t)2 << 20)

static struct expert_file file;

static struct host *host_of(enum host_form form, bool no_uring)
{
	struct disk_config c = { .no_uring = no_uring };
	_cleanup_(freep) char *error = NULL;
	struct host *h;

	if (host_new(form, file.c, &c, &h, &error) < 0)
		fail_msg("%s", error ? error : "no error text");
	assert_null(error);
	return h;
}

/* Whole pages of the range: those that it shares with nobody. */
static uint64_t whole_pages(const struct catalog_range *r, uint64_t *ret_cached)
{
	uint64_t from = ALIGN_UP(r->offset, (uint64_t)FILE_PAGE);
	uint64_t to = (r->offset + r->bytes) / FILE_PAGE * FILE_PAGE;

	if (to <= from)
		return 0;
	*ret_cached += file_cached(&file, from, to - from);
	return (to - from) / FILE_PAGE;
}

static uint64_t block_pages(uint32_t block, uint64_t *ret_cached)
{
	struct catalog_block b;
	uint64_t n = 0;

	*ret_cached = 0;
	catalog_block(file.c, block, &b);
	for (uint32_t i = 0; i < b.n_ranges; i++)
		n += whole_pages(&b.range[i], ret_cached);
	return n;
}

static void check_bytes(const struct host *h, uint32_t block)
{
	const struct catalog_layer *l;
	struct catalog_block b;
	uint32_t range = 0;

	catalog_block(file.c, block, &b);
	l = &file.c->layers[b.layer];
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		const uint8_t *p = host_matrix(h, block, i);

		if (!l->matrix[i]) {
			assert_null(p);
			continue;
		}
		assert_int_equal((uintptr_t)p % FILE_PAGE, b.range[range].offset % FILE_PAGE);
		assert_memory_equal(p, file.copy + b.range[range].offset, b.range[range].bytes);
		range++;
	}
	assert_int_equal(range, b.n_ranges);
}

/* Waits for all fetches; none may fail. */
static void arrive_all(struct host *h)
{
	uint32_t block;
	int err;

	while (host_take(h, true, &block, &err) > 0) {
		assert_int_equal(err, 0);
		assert_int_equal(host_state(h, block), HOST_HERE);
	}
	assert_int_equal(host_n_coming(h), 0);
	host_settle(h);
	assert_int_equal(host_leaving_bytes(h), 0);
}

static void fetch_now(struct host *h, uint32_t block)
{
	assert_int_equal(host_fetch(h, block, true), 0);
	arrive_all(h);
	assert_int_equal(host_state(h, block), HOST_HERE);
}

/* As a copy that lay elsewhere comes back. */
static void adopt(struct host *h, uint32_t block)
{
	const struct catalog_layer *l = &file.c->layers[catalog_layer_of(file.c, block)];
	void *matrix[CATALOG_MATRICES];
	struct catalog_block b;
	uint32_t range = 0;

	assert_int_equal(host_adopt(h, block, matrix), 0);
	assert_int_equal(host_state(h, block), HOST_HERE);
	catalog_block(file.c, block, &b);
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		if (!l->matrix[i]) {
			assert_null(matrix[i]);
			continue;
		}
		memcpy(matrix[i], file.copy + b.range[range].offset, b.range[range].bytes);
		range++;
	}
}

static void check_page_cache(const struct host *h, enum host_form form)
{
	if (!file.has_page_cache)
		return;
	for (uint32_t b = 0; b < file.c->n_blocks; b++) {
		uint64_t cached, all = block_pages(b, &cached);
		bool want = form == HOST_MAPPED && host_state(h, b) == HOST_HERE;

		assert_int_equal(cached, want ? all : 0);
	}
}

static void come(struct host *h, uint32_t block)
{
	if (host_can_adopt(h) && file_rnd(&file, 3) == 0)
		adopt(h, block);
	else
		assert_int_equal(host_fetch(h, block, file_rnd(&file, 2)), 0);
}

/* One random act. pins: how often the test pinned each block. */
static void act(struct host *h, uint64_t limit, uint32_t *pins)
{
	uint32_t block = (uint32_t)file_rnd(&file, file.c->n_blocks), other;
	enum host_state state = host_state(h, block);
	int err;

	switch (file_rnd(&file, 8)) {
	case 0:
	case 1:
	case 2:
		if (state == HOST_ABSENT && host_has_room(h, block, limit))
			come(h, block);
		else if (state == HOST_COMING)
			host_hurry(h, block);
		break;
	case 3:
	case 4:
		if (state == HOST_HERE && pins[block] == 0)
			host_evict(h, block);
		break;
	case 5:
		if (state == HOST_HERE && file_rnd(&file, 2)) {
			host_pin(h, block);
			pins[block]++;
		} else if (pins[block] > 0) {
			host_unpin(h, block);
			pins[block]--;
		}
		break;
	case 6:
		if (host_take(h, file_rnd(&file, 2), &other, &err) > 0)
			assert_int_equal(err, 0);
		break;
	case 7:
		if (file_rnd(&file, 20) == 0) {
			uint64_t before = host_bytes(h), back = host_trim(h);

			assert_int_equal(host_bytes(h), before - back);
		}
		break;
	}
}

static void live(enum host_form form, bool no_uring)
{
	_cleanup_(freep) uint32_t *pins = calloc(file.c->n_blocks, sizeof(*pins));
	_cleanup_(freep) const void **pinned_at = calloc(file.c->n_blocks, sizeof(*pinned_at));
	uint64_t limit = 12 << 20;
	struct host *h;

	assert_non_null(pins);
	assert_non_null(pinned_at);
	file_reopen(&file);
	h = host_of(form, no_uring);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		if (host_state(h, b) == HOST_HERE)
			host_evict(h, b);
	host_settle(h);
	assert_int_equal(host_bytes(h), 0);
	for (unsigned i = 0; i < 6000; i++) {
		act(h, limit, pins);
		assert_true(host_bytes(h) - host_leaving_bytes(h) <= limit);
		for (uint32_t b = 0; b < file.c->n_blocks; b++) {
			const void *at = pins[b] > 0 ? host_matrix(h, b, 0) : NULL;

			if (at && pinned_at[b])
				assert_ptr_equal(at, pinned_at[b]);
			pinned_at[b] = at;
		}
		if (i % 500 == 0) {
			uint32_t n = 0;

			arrive_all(h);
			for (uint32_t b = 0; b < file.c->n_blocks; b++)
				if (host_state(h, b) == HOST_HERE) {
					check_bytes(h, b);
					n++;
				}
			assert_int_equal(host_n_here(h), n);
			assert_true(host_bytes(h) <= limit);
			check_page_cache(h, form);
		}
	}
	host_free(h);
}

static void test_life_mapped(void **unused)
{
	(void)unused;
	live(HOST_MAPPED, false);
}

static void test_life_arena(void **unused)
{
	(void)unused;
	live(HOST_ARENA, false);
}

static void test_life_arena_threads(void **unused)
{
	(void)unused;
	live(HOST_ARENA, true);
}

/* Counts, costs and classes add up in an arena. */
static void test_arena_account(void **unused)
{
	struct host *h;
	struct host_counters n;
	uint64_t sum[16] = {}, all = 0, read = 0;

	(void)unused;
	file_reopen(&file);
	h = host_of(HOST_ARENA, false);
	assert_true(host_n_classes(h) >= 4 && host_n_classes(h) <= 16);
	for (uint32_t b = 0; b < file.c->n_blocks; b++) {
		uint64_t bytes = catalog_block_bytes(file.c, b);
		uint64_t cost = host_class_bytes(h, host_class(h, b));

		assert_true(cost >= bytes);
		assert_int_equal(cost % FILE_PAGE, 0);
		/*
		 * Two pages a matrix, and what merging adds: more in small blocks, where a page is
		 * much.
		 */
		assert_true(cost <= (bytes + 6 * FILE_PAGE) / 100 * (bytes < HUGE ? 110 : 102));
		sum[host_class(h, b)] += cost;
		read += bytes;
		assert_true(host_has_room(h, b, host_bytes(h) + cost + HUGE));
		fetch_now(h, b);
	}
	for (uint32_t k = 0; k < host_n_classes(h); k++)
		all += ALIGN_UP(sum[k], HUGE);
	assert_int_equal(host_bytes(h), all);
	assert_int_equal(host_n_here(h), file.c->n_blocks);
	host_get_counters(h, &n);
	assert_int_equal(n.blocks_read, file.c->n_blocks);
	assert_true(n.bytes_read >= read &&
		    n.bytes_read <= read + 3 * 2 * FILE_PAGE * (uint64_t)file.c->n_blocks);
	assert_int_equal(n.read_errors, 0);
	assert_int_equal(host_trim(h), 0);
	host_free(h);
}

/* Memory behind the arena: what /proc says of this process. */
static uint64_t anonymous_bytes(void)
{
	_cleanup_(fclosep) FILE *f = fopen("/proc/self/smaps_rollup", "re");
	unsigned long kb = 0;
	char line[256];

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "Anonymous: %lu kB", &kb) == 1)
			break;
	return (uint64_t)kb * 1024;
}

static void test_arena_trim(void **unused)
{
	uint32_t first, n, b;
	struct host_counters k;
	uint64_t full, cost, back, before;
	const void *pinned;
	struct host *h;

	(void)unused;
	file_reopen(&file);
	h = host_of(HOST_ARENA, false);
	/* Of the large ones, where the few pages of difference do not make two classes. */
	first = file.c->layers[5].first_block;
	n = file.c->layers[5].n_expert;
	cost = host_class_bytes(h, host_class(h, first));
	for (b = first; b < first + n; b++) {
		assert_int_equal(host_class(h, b), host_class(h, first));
		fetch_now(h, b);
	}
	full = host_bytes(h);
	assert_int_equal(full, ALIGN_UP(n * cost, HUGE));
	before = anonymous_bytes();

	/* Holes at the front are closed from the end; a hole is taken before new memory. */
	for (b = first; b < first + n / 2; b++)
		host_evict(h, b);
	assert_int_equal(host_bytes(h), full);
	assert_true(host_has_room(h, first, full));
	assert_false(host_has_room(h, first, full - 1));
	back = host_trim(h);
	assert_int_equal(back, full - ALIGN_UP(n / 2 * cost, HUGE));
	assert_true(back > 0);
	assert_int_equal(host_bytes(h), full - back);
	host_get_counters(h, &k);
	assert_int_equal(k.moved_bytes, n / 2 * cost);
	for (b = first + n / 2; b < first + n; b++)
		check_bytes(h, b);
	if (before > 0)
		assert_true(anonymous_bytes() + back / 2 < before);
	assert_int_equal(host_trim(h), 0);

	/* A pinned block at the end keeps everything before it. */
	for (b = first; b < first + n / 2; b++)
		fetch_now(h, b);
	assert_int_equal(host_bytes(h), full);
	host_pin(h, first + n / 2 - 1);
	pinned = host_matrix(h, first + n / 2 - 1, 0);
	for (b = first + n / 2; b < first + n; b++)
		host_evict(h, b);
	assert_int_equal(host_trim(h), 0);
	assert_ptr_equal(host_matrix(h, first + n / 2 - 1, 0), pinned);
	host_unpin(h, first + n / 2 - 1);
	assert_int_equal(host_trim(h), back);
	for (b = first; b < first + n / 2; b++) {
		check_bytes(h, b);
		host_evict(h, b);
	}
	(void)host_trim(h);
	assert_int_equal(host_bytes(h), 0);
	host_free(h);
}

/* Contents that came from elsewhere are a block like any other, until it is read again. */
static void test_adopt(void **unused)
{
	uint32_t first = file.c->layers[5].first_block, n = file.c->layers[5].n_expert;
	uint32_t fused = file.c->layers[2].first_block;
	void *matrix[CATALOG_MATRICES];
	struct host_counters k;
	uint64_t cost, full;
	struct host *h;

	(void)unused;
	file_reopen(&file);
	h = host_of(HOST_ARENA, false);
	assert_true(host_can_adopt(h));
	cost = host_class_bytes(h, host_class(h, first));
	for (uint32_t b = first; b < first + n; b++)
		adopt(h, b);
	full = host_bytes(h);
	assert_int_equal(full, ALIGN_UP(n * cost, HUGE));
	assert_int_equal(host_n_here(h), n);
	assert_int_equal(host_n_coming(h), 0);
	for (uint32_t b = first; b < first + n; b++)
		check_bytes(h, b);
	host_get_counters(h, &k);
	assert_int_equal(k.blocks_read, 0);
	assert_int_equal(k.bytes_read, 0);

	/* They move like others, and a hole is taken before new memory. */
	for (uint32_t b = first; b < first + n / 2; b++)
		host_evict(h, b);
	assert_true(host_trim(h) > 0);
	host_get_counters(h, &k);
	assert_int_equal(k.moved_bytes, n / 2 * cost);
	for (uint32_t b = first + n / 2; b < first + n; b++)
		check_bytes(h, b);
	host_evict(h, first + n - 1);
	full = host_bytes(h);
	adopt(h, first);
	assert_int_equal(host_bytes(h), full);
	check_bytes(h, first);

	/* What was written is what is handed out, and the file's bytes after it was read. */
	assert_int_equal(host_adopt(h, fused, matrix), 0);
	assert_null(matrix[1]);
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		assert_ptr_equal(host_matrix(h, fused, i), matrix[i]);
		if (matrix[i])
			memset(matrix[i], 0x5a, file.c->layers[2].expert_bytes[i]);
	}
	assert_int_equal(*(const uint8_t *)host_matrix(h, fused, 2), 0x5a);
	host_evict(h, fused);
	fetch_now(h, fused);
	check_bytes(h, fused);
	for (uint32_t b = first; b < first + n; b++) {
		if (host_state(h, b) == HOST_HERE)
			host_evict(h, b);
		fetch_now(h, b);
		check_bytes(h, b);
	}
	check_page_cache(h, HOST_ARENA);
	host_free(h);
}

static void test_adopt_mapped(void **unused)
{
	void *matrix[CATALOG_MATRICES] = { NULL, matrix, NULL };
	struct host *h;
	uint64_t bytes;

	(void)unused;
	file_reopen(&file);
	h = host_of(HOST_MAPPED, false);
	if (host_state(h, 0) == HOST_HERE)
		host_evict(h, 0);
	host_settle(h);
	bytes = host_bytes(h);
	assert_false(host_can_adopt(h));
	assert_int_equal(host_adopt(h, 0, matrix), -EOPNOTSUPP);
	assert_ptr_equal(matrix[1], matrix);
	assert_int_equal(host_state(h, 0), HOST_ABSENT);
	assert_int_equal(host_bytes(h), bytes);
	fetch_now(h, 0);
	check_bytes(h, 0);
	host_free(h);
}

/*
 * What the page cache has is taken as it is by one form, and dropped by the other; half a block is
 * dropped by both.
 */
static void test_start_with_page_cache(void **unused)
{
	static uint8_t area[1 << 20];
	uint32_t half = 3;
	struct catalog_block b;
	struct host *h;

	(void)unused;
	if (!file.has_page_cache)
		skip_because("%s is not on a disk", file.dir);
	file_reopen(&file);
	assert_true(file_drop(&file));
	for (uint64_t at = 0; at < file.bytes; at += sizeof(area))
		assert_true(pread(file.fd, area, sizeof(area), (off_t)at) > 0);
	catalog_block(file.c, half, &b);
	(void)posix_fadvise(file.fd, (off_t)b.range[1].offset, 20000, POSIX_FADV_DONTNEED);
	h = host_of(HOST_MAPPED, false);
	for (uint32_t i = 0; i < file.c->n_blocks; i++) {
		uint64_t cached, all = block_pages(i, &cached);

		if (host_state(h, i) == HOST_HERE)
			assert_int_equal(cached, all);
		else
			assert_int_equal(cached, 0);
	}
	/* The file system may have dropped more than was asked for, or nothing. */
	assert_true(host_n_here(h) + 8 >= file.c->n_blocks);
	host_free(h);

	for (uint64_t at = 0; at < file.bytes; at += sizeof(area))
		assert_true(pread(file.fd, area, sizeof(area), (off_t)at) > 0);
	h = host_of(HOST_ARENA, false);
	assert_int_equal(host_n_here(h), 0);
	assert_int_equal(host_bytes(h), 0);
	check_page_cache(h, HOST_ARENA);
	host_free(h);
}

/* No block that is HERE costs its user a read. */
static void test_no_major_faults(void **unused)
{
	struct rusage before, after;
	struct host *h;
	uint64_t sum = 0;

	(void)unused;
	if (!file.has_page_cache)
		skip_because("%s is not on a disk", file.dir);
	file_reopen(&file);
	assert_true(file_drop(&file));
	h = host_of(HOST_MAPPED, false);
	assert_int_equal(host_n_here(h), 0);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		assert_int_equal(host_fetch(h, b, b % 2), 0);
	arrive_all(h);
	assert_int_equal(getrusage(RUSAGE_THREAD, &before), 0);
	for (uint32_t b = 0; b < file.c->n_blocks; b++) {
		const uint8_t *p = host_matrix(h, b, 0);
		struct catalog_block ranges;

		catalog_block(file.c, b, &ranges);
		for (uint64_t i = 0; i < ranges.range[0].bytes; i += 512)
			sum += p[i];
	}
	assert_int_equal(getrusage(RUSAGE_THREAD, &after), 0);
	assert_true(sum > 0);
	assert_int_equal(after.ru_majflt, before.ru_majflt);
	host_free(h);
}

/* Whoever touches a block that is not HERE brings that page alone. */
static void test_touch_brings_one_page(void **unused)
{
	struct catalog_block b;
	struct host *h;
	uint64_t sum = 0;

	(void)unused;
	if (!file.has_page_cache)
		skip_because("%s is not on a disk", file.dir);
	for (enum host_form form = HOST_MAPPED; form <= HOST_ARENA; form++) {
		file_reopen(&file);
		assert_true(file_drop(&file));
		h = host_of(form, false);
		catalog_block(file.c, 6, &b);
		sum += ((const volatile uint8_t *)b.range[0].data)[b.range[0].bytes / 2];
		assert_int_equal(file_cached(&file, 0, file.bytes), 1);
		host_free(h);
	}
	assert_true(sum < 512);
}

/*
 * Evicted and wanted again at once: the fetch comes after the eviction, and the block is counted
 * once.
 */
static void test_evict_then_fetch(void **unused)
{
	struct host *h;

	(void)unused;
	file_reopen(&file);
	h = host_of(HOST_MAPPED, false);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		if (host_state(h, b) == HOST_HERE)
			host_evict(h, b);
	for (unsigned i = 0; i < 50; i++) {
		uint32_t b = (uint32_t)file_rnd(&file, file.c->n_blocks);
		uint64_t cost = host_class_bytes(h, host_class(h, b)), cached, all;

		fetch_now(h, b);
		assert_int_equal(host_bytes(h), cost);
		host_evict(h, b);
		assert_int_equal(host_bytes(h), cost);
		assert_int_equal(host_leaving_bytes(h), cost);
		assert_true(host_has_room(h, b, cost));
		assert_false(host_has_room(h, b, cost - 1));
		fetch_now(h, b);
		assert_int_equal(host_bytes(h), cost);
		all = block_pages(b, &cached);
		if (file.has_page_cache)
			assert_int_equal(cached, all);
		check_bytes(h, b);
		host_evict(h, b);
		host_settle(h);
		assert_int_equal(host_bytes(h), 0);
	}
	host_free(h);
}

/*
 * The file ends before the last layer: its blocks fail, others do not, and nothing of them is
 * counted.
 */
static void test_truncated(void **unused)
{
	uint32_t last = file.c->n_blocks - 1, block;
	uint64_t cut = file.bytes - 60000;

	(void)unused;
	for (enum host_form form = HOST_MAPPED; form <= HOST_ARENA; form++) {
		struct host_counters n;
		struct host *h;
		int err = 1;

		file_reopen(&file);
		h = host_of(form, false);
		for (uint32_t b = 0; b < file.c->n_blocks; b++)
			if (host_state(h, b) == HOST_HERE)
				host_evict(h, b);
		assert_int_equal(ftruncate(file.fd, (off_t)cut), 0);
		assert_int_equal(host_fetch(h, last, true), 0);
		assert_int_equal(host_take(h, true, &block, &err), 1);
		assert_int_equal(block, last);
		assert_int_equal(err, -ENODATA);
		assert_int_equal(host_state(h, last), HOST_ABSENT);
		host_settle(h);
		(void)host_trim(h);
		assert_int_equal(host_bytes(h), 0);
		fetch_now(h, 0);
		check_bytes(h, 0);
		host_get_counters(h, &n);
		assert_int_equal(n.read_errors, 1);
		assert_int_equal(n.blocks_read, 1);
		assert_int_equal(pwrite(file.fd, file.copy + cut, file.bytes - cut, (off_t)cut),
				 file.bytes - cut);
		assert_int_equal(fsync(file.fd), 0);
		fetch_now(h, last);
		check_bytes(h, last);
		host_free(h);
	}
}

/* The trunk comes whole, with huge pages too, and brings no page of a block along. */
static void test_trunk(void **unused)
{
	const atomic_bool stop = true;
	uint64_t locked = 0;

	(void)unused;
	if (!file.has_page_cache)
		skip_because("%s is not on a disk", file.dir);
	for (unsigned huge = 0; huge < 2; huge++) {
		struct host *h;

		file_reopen(&file);
		assert_true(file_drop(&file));
		h = host_of(huge ? HOST_ARENA : HOST_MAPPED, false);
		assert_int_equal(host_load_trunk(file.c, huge, &stop, &locked), -ECANCELED);
		assert_int_equal(host_load_trunk(file.c, huge, NULL, &locked), 0);
		for (size_t i = 0; i < file.c->n_trunk; i++) {
			uint64_t cached = 0, all = whole_pages(&file.c->trunk[i], &cached);

			assert_int_equal(cached, all);
		}
		check_page_cache(h, HOST_ARENA);
		host_free(h);
	}
}

/* 0: as much as the limit allows was locked, and that was said. */
static int lock_with_limit(void)
{
	const struct rlimit limit = { 300000, 300000 };
	uint64_t locked = 1;

	if (setrlimit(RLIMIT_MEMLOCK, &limit) < 0)
		return 1;
	/* Root has no limit. */
	if (geteuid() == 0 && setresuid(65534, 65534, 65534) < 0)
		return 2;
	if (host_load_trunk(file.c, false, NULL, &locked) < 0)
		return 3;
	if (locked == 300000 / FILE_PAGE * FILE_PAGE)
		return 0;
	return locked > limit.rlim_cur ? 77 : 4;
}

static void test_trunk_locked(void **unused)
{
	pid_t pid;
	int status;

	(void)unused;
	file_reopen(&file);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0)
		_exit(lock_with_limit());
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		skip_because("nothing is really locked (sanitizers see to that)");
	assert_int_equal(status, 0);
}

static void test_all(void **unused)
{
	const atomic_bool stop = true;
	struct host *h;

	(void)unused;
	file_reopen(&file);
	assert_int_equal(host_load_all(file.c, &stop), -ECANCELED);
	assert_int_equal(host_load_all(file.c, NULL), 0);
	if (file.has_page_cache)
		assert_int_equal(file_cached(&file, 0, file.bytes), (file.bytes + 4095) / 4096);
	assert_memory_equal(gguf_part(file.g, 0)->data, file.copy, file.bytes);
	/*
	 * It does not fit after all: everything that was loaded in large folios can be evicted
	 * exactly.
	 */
	h = host_of(HOST_MAPPED, false);
	for (uint32_t b = 0; b < file.c->n_blocks; b += 2)
		if (host_state(h, b) == HOST_HERE)
			host_evict(h, b);
	host_settle(h);
	check_page_cache(h, HOST_MAPPED);
	host_free(h);
}

static void test_no_experts(void **unused)
{
	struct catalog empty = { .gguf = file.g };
	struct disk_config c = {};
	char *error = NULL;
	struct host *h = NULL;

	(void)unused;
	assert_int_equal(host_new(HOST_ARENA, &empty, &c, &h, &error), -EINVAL);
	assert_non_null(error);
	assert_null(h);
	assert_null(host_free(NULL));
	free(error);
}

/* Freed with fetches on their way and evictions too. */
static void test_free_in_flight(void **unused)
{
	(void)unused;
	for (enum host_form form = HOST_MAPPED; form <= HOST_ARENA; form++) {
		struct host *h;

		file_reopen(&file);
		h = host_of(form, false);
		for (uint32_t b = 0; b < file.c->n_blocks; b++)
			if (host_state(h, b) == HOST_HERE)
				host_evict(h, b);
		for (uint32_t b = 0; b < file.c->n_blocks; b++)
			assert_int_equal(host_fetch(h, b, false), 0);
		assert_null(host_free(h));
	}
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
		cmocka_unit_test(test_life_mapped),
		cmocka_unit_test(test_life_arena),
		cmocka_unit_test(test_life_arena_threads),
		cmocka_unit_test(test_arena_account),
		cmocka_unit_test(test_arena_trim),
		cmocka_unit_test(test_adopt),
		cmocka_unit_test(test_adopt_mapped),
		cmocka_unit_test(test_start_with_page_cache),
		cmocka_unit_test(test_no_major_faults),
		cmocka_unit_test(test_touch_brings_one_page),
		cmocka_unit_test(test_evict_then_fetch),
		cmocka_unit_test(test_truncated),
		cmocka_unit_test(test_trunk),
		cmocka_unit_test(test_all),
		cmocka_unit_test(test_no_experts),
		cmocka_unit_test(test_free_in_flight),
		cmocka_unit_test(test_trunk_locked),
	};

	return cmocka_run_group_tests(tests, setup, teardown);
}
