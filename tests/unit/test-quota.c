/* SPDX-License-Identifier: MIT */
/* test-quota.c: counting, midnights of many kinds, and files good, hostile, newer and unwritable. */
#include "tests/test.h"

#include "daemon/quota.h"

#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <sys/stat.h>

/* Rules, not names, so that no time zone database is needed. The names are of places that had these rules. */
#define ROME "CET-1CEST,M3.5.0,M10.5.0/3"
#define ASUNCION \
	"<-04>4<-03>,M10.1.0/0,M3.4.0/0" /* 00:00 to 01:00 is missing in October, 23:00 comes twice in March */
#define HAVANA \
	"CST5CDT,M3.2.0/0,M11.1.0/1" /* 00:00 to 01:00 is missing in March, comes twice in November */
#define ST_JOHNS \
	"NST3:30NDT,M4.1.0/0:01,M10.5.0/0:01" /* 23:01 to 00:01 comes twice in October: the date goes back */
#define KATHMANDU "<+0545>-5:45"

static char root[256];

static int make_root(void **state)
{
	const char *tmp = getenv("TMPDIR");

	(void)state;
	snprintf(root, sizeof(root), "%s/residentd-test-quota-XXXXXX", tmp ? tmp : P_tmpdir);
	return mkdtemp(root) ? 0 : -1;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static int remove_root(void **state)
{
	(void)state;
	return nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* root/name; good until the fourth call after. */
static const char *at(const char *name)
{
	static char paths[4][512];
	static unsigned i;

	i = (i + 1) % 4;
	snprintf(paths[i], sizeof(paths[i]), "%s/%s", root, name);
	return paths[i];
}

static void write_bytes(const char *name, const void *data, size_t len)
{
	FILE *f = fopen(at(name), "we");

	assert_non_null(f);
	assert_int_equal(fwrite(data, 1, len, f), len);
	assert_int_equal(fclose(f), 0);
}

static void write_file(const char *name, const char *text)
{
	write_bytes(name, text, strlen(text));
}

static void assert_file(const char *name, const char *expected)
{
	char text[4096];
	FILE *f = fopen(at(name), "re");
	size_t n;

	assert_non_null(f);
	n = fread(text, 1, sizeof(text) - 1, f);
	text[n] = 0;
	fclose(f);
	assert_string_equal(text, expected);
}

static void set_zone(const char *zone)
{
	assert_int_equal(setenv("TZ", zone, 1), 0);
	tzset();
}

static time_t utc(int year, int month, int day, int hour, int minute, int second)
{
	struct tm tm = { .tm_year = year - 1900,
			 .tm_mon = month - 1,
			 .tm_mday = day,
			 .tm_hour = hour,
			 .tm_min = minute,
			 .tm_sec = second };

	return timegm(&tm);
}

static struct quota *open_file(const char *name, time_t now, const char *expected_warning)
{
	_cleanup_(buf_done) struct buf w = {};
	struct quota *q = NULL;

	assert_int_equal(quota_open(name ? at(name) : NULL, now, &q, &w), 0);
	assert_non_null(q);
	if (!expected_warning)
		assert_int_equal(w.len, 0);
	else
		assert_string_equal(w.data ? w.data + strlen(root) + 1 : "", expected_warning);
	return q;
}

static void users_are_counted_apart(void **state)
{
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	q = open_file(NULL, now, NULL);
	assert_int_equal(quota_used(q, 1000, now), 0);
	quota_add(q, 1000, 5, now);
	quota_add(q, 3, 70, now);
	quota_add(q, 500, 900, now);
	quota_add(q, 1000, 6, now);
	quota_add(q, UINT32_MAX - 1, 1, now);
	quota_add(q, 0, 2, now);
	quota_add(q, 7, 0, now);
	assert_int_equal(quota_used(q, 1000, now), 11);
	assert_int_equal(quota_used(q, 3, now), 70);
	assert_int_equal(quota_used(q, 500, now), 900);
	assert_int_equal(quota_used(q, UINT32_MAX - 1, now), 1);
	assert_int_equal(quota_used(q, 0, now), 2);
	assert_int_equal(quota_used(q, 7, now), 0);
	assert_int_equal(quota_used(q, 999, now), 0);
	assert_int_equal(quota_used(q, UINT32_MAX, now), 0);
	assert_int_equal(quota_save(q), 0); /* nowhere */
	assert_null(quota_close(q));
	assert_null(quota_close(NULL));
}

static void sums_do_not_wrap(void **state)
{
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	q = open_file("wrap", now, NULL);
	quota_add(q, 1, UINT64_MAX - 1, now);
	assert_true(quota_used(q, 1, now) == UINT64_MAX - 1);
	quota_add(q, 1, 5, now);
	assert_true(quota_used(q, 1, now) == UINT64_MAX);
	quota_add(q, 1, UINT64_MAX, now);
	assert_true(quota_used(q, 1, now) == UINT64_MAX);
	quota_close(q);
	q = open_file("wrap", now, NULL);
	assert_true(quota_used(q, 1, now) == UINT64_MAX);
	quota_close(q);
}

static void file_survives_a_restart(void **state)
{
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	struct stat before, after;
	struct quota *q;

	(void)state;
	set_zone(ROME);
	q = open_file("kept", now, NULL);
	assert_int_equal(quota_save(q), 0);
	assert_int_equal(stat(at("kept"), &before), -1); /* nothing to say, nothing written */
	quota_add(q, 1000, 1234567, now);
	quota_add(q, 0, 9, now);
	quota_add(q, 4000000000, 1, now);
	assert_int_equal(quota_save(q), 0);
	assert_file("kept", "residentd-quota 1 2026-11-30\n0 9\n1000 1234567\n4000000000 1\n");
	assert_int_equal(stat(at("kept"), &before), 0);
	assert_int_equal(before.st_mode & 07777, 0600);
	assert_int_equal(quota_save(q), 0);
	assert_int_equal(quota_used(q, 1000, now), 1234567);
	assert_int_equal(quota_save(q), 0);
	assert_int_equal(stat(at("kept"), &after), 0);
	assert_int_equal(before.st_ino, after.st_ino); /* and nothing changed, nothing written */
	quota_add(q, 1000, 3, now);
	quota_close(q);
	assert_file("kept", "residentd-quota 1 2026-11-30\n0 9\n1000 1234570\n4000000000 1\n");
	assert_int_equal(stat(at(".kept.new"), &after), -1);

	/* later on that day, here 22:59:59 UTC; midnight; and a day long gone */
	q = open_file("kept", utc(2026, 11, 30, 22, 59, 59), NULL);
	assert_int_equal(quota_used(q, 1000, utc(2026, 11, 30, 22, 59, 59)), 1234570);
	assert_int_equal(quota_used(q, 1000, utc(2026, 11, 30, 23, 0, 0)), 0);
	quota_close(q);
	assert_file("kept", "residentd-quota 1 2026-12-01\n");
	write_file("kept", "residentd-quota 1 2025-12-01\n1000 5\n");
	q = open_file("kept", now, NULL);
	assert_int_equal(quota_used(q, 1000, now), 0);
	quota_close(q);
}

static void clock_that_goes_back(void **state)
{
	const time_t now = utc(2026, 11, 30, 0, 10, 0);
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	q = open_file("back", now, NULL);
	quota_add(q, 1, 10, now);
	assert_int_equal(quota_used(q, 1, now - 1200), 10); /* over midnight: the day has begun */
	quota_add(q, 1, 1, now - 1200);
	assert_int_equal(quota_used(q, 1, now), 11);
	quota_close(q);
	assert_file("back", "residentd-quota 1 2026-11-30\n1 11\n");
	q = open_file("back", now - 1200, NULL); /* and so with a restart between */
	assert_int_equal(quota_used(q, 1, now - 1200), 11);
	/* the clock had been wrong by more: nobody waits until then */
	assert_int_equal(quota_used(q, 1, now - 2 * 86400), 0);
	quota_add(q, 1, 4, now - 2 * 86400);
	assert_int_equal(quota_used(q, 1, now), 0);
	quota_close(q);
	write_file("back", "residentd-quota 1 2099-01-01\n1 11\n");
	q = open_file("back", now, NULL);
	assert_int_equal(quota_used(q, 1, now), 0);
	quota_close(q);
}

static void days_end_at_local_midnight(void **state)
{
	static const struct {
		const char *zone;
		int year, month, day, hour, minute, second; /* UTC */
		uint64_t left;
	} cases[] = {
		{ "UTC0", 2026, 11, 30, 0, 0, 0, 86400 },
		{ "UTC0", 2026, 11, 30, 23, 59, 59, 1 },
		{ "UTC0", 1970, 1, 1, 0, 0, 0, 86400 },
		{ "UTC0", 2028, 2, 28, 12, 0, 0, 43200 },
		{ ROME, 2026, 11, 30, 12, 0, 0, 39600 },
		{ ROME, 2026, 11, 30, 22, 59, 59, 1 },
		{ ROME, 2026, 11, 30, 23, 0, 0, 86400 },
		{ ROME, 2026, 12, 31, 22, 30, 0, 1800 },
		{ ROME, 2026, 7, 1, 21, 0, 0, 3600 },
		/* 29 March 2026 has 23 hours: from 23:00 UTC to 22:00 */
		{ ROME, 2026, 3, 28, 22, 59, 59, 1 },
		{ ROME, 2026, 3, 28, 23, 0, 0, 23 * 3600 },
		{ ROME, 2026, 3, 29, 0, 59, 59, 21 * 3600 + 1 },
		{ ROME, 2026, 3, 29, 1, 0, 0, 21 * 3600 },
		{ ROME, 2026, 3, 29, 21, 59, 59, 1 },
		/* 25 October 2026 has 25: from 22:00 UTC to 23:00 */
		{ ROME, 2026, 10, 24, 21, 59, 59, 1 },
		{ ROME, 2026, 10, 24, 22, 0, 0, 25 * 3600 },
		{ ROME, 2026, 10, 25, 0, 30, 0, 22 * 3600 + 1800 },
		{ ROME, 2026, 10, 25, 1, 30, 0, 21 * 3600 + 1800 },
		{ ROME, 2026, 10, 25, 22, 59, 59, 1 },
		{ "Europe/Rome", 2026, 3, 29, 0, 0, 0, 22 * 3600 },
		{ "Europe/Rome", 2026, 10, 25, 0, 0, 0, 23 * 3600 },
		/* the day of 4 October 2026 starts at 01:00, which is 04:00 UTC */
		{ ASUNCION, 2026, 10, 4, 3, 30, 0, 1800 },
		{ ASUNCION, 2026, 10, 4, 3, 59, 59, 1 },
		{ ASUNCION, 2026, 10, 4, 4, 0, 0, 23 * 3600 },
		/* 21 March 2026 has 25 hours, the last twice: from 03:00 UTC to 04:00 */
		{ ASUNCION, 2026, 3, 22, 2, 30, 0, 5400 },
		{ ASUNCION, 2026, 3, 22, 3, 30, 0, 1800 },
		/* 1 November 2026: the first of the two midnights */
		{ HAVANA, 2026, 11, 1, 3, 30, 0, 1800 },
		{ HAVANA, 2026, 11, 1, 4, 30, 0, 24 * 3600 + 1800 },
		{ HAVANA, 2026, 3, 8, 4, 30, 0, 1800 },
		{ KATHMANDU, 2026, 11, 30, 18, 0, 0, 900 },
		{ KATHMANDU, 2026, 11, 30, 18, 15, 0, 86400 },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		time_t t = utc(cases[i].year, cases[i].month, cases[i].day, cases[i].hour,
			       cases[i].minute, cases[i].second);
		uint64_t left;

		if (strchr(cases[i].zone, '/') && access("/usr/share/zoneinfo/Europe/Rome", R_OK) < 0)
			continue; /* the rule is tested just as well */
		set_zone(cases[i].zone);
		left = quota_seconds_left(t);
		if (left != cases[i].left)
			fail_msg("case %zu, %s: %" PRIu64 " seconds, not %" PRIu64, i,
				 cases[i].zone, left, cases[i].left);
	}
	set_zone("UTC0");
	assert_true(quota_seconds_left(INT64_MAX / 4) >= 1); /* a year that no calendar has */
}

static void a_day_that_a_zone_left_out(void **state)
{
	const time_t now = utc(2011, 12, 30, 9, 30,
			       0); /* 29 December 23:30; half an hour later it was the 31st */
	struct quota *q;

	(void)state;
	if (access("/usr/share/zoneinfo/Pacific/Apia", R_OK) < 0)
		skip_because("no time zone database");
	set_zone("Pacific/Apia");
	assert_int_equal(quota_seconds_left(now), 1800);
	q = open_file(NULL, now, NULL);
	quota_add(q, 1, 5, now);
	assert_int_equal(quota_used(q, 1, now + 1799), 5);
	assert_int_equal(quota_used(q, 1, now + 1800), 0);
	quota_close(q);
}

static void local_date(time_t t, char date[static 11])
{
	struct tm tm;

	assert_non_null(localtime_r(&t, &tm));
	assert_int_equal(strftime(date, 11, "%Y-%m-%d", &tm), 10);
}

/* The end of the day is the first second with a later date, at every hour of a year, in every zone. */
static void seconds_left_end_the_day(void **state)
{
	static const char *const zones[] = { "UTC0", ROME, ASUNCION, HAVANA, ST_JOHNS, KATHMANDU };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(zones); i++) {
		set_zone(zones[i]);
		for (time_t t = utc(2026, 1, 1, 0, 7, 0); t < utc(2027, 1, 1, 0, 0, 0); t += 3541) {
			char today[11], before[11], after[11];
			time_t end = t + (time_t)quota_seconds_left(t);

			local_date(t, today);
			local_date(end - 1, before);
			local_date(end, after);
			if (end <= t || end > t + 26 * 3600 || strcmp(before, today) > 0 ||
			    strcmp(after, today) <= 0)
				fail_msg("%s, %" PRId64 ": %s, ends between %s and %s", zones[i],
					 (int64_t)t, today, before, after);
		}
	}
}

static uint32_t next_random(uint32_t *seed)
{
	*seed = *seed * 1664525 + 1013904223;
	return *seed >> 8;
}

/*
 * A year in which the clock sometimes goes back and the service sometimes restarts: a sum is what was added since the
 * date was first seen, so it never decreases within a day and is zero after midnight.
 */
static void property_sums_of_a_day(const char *zone)
{
	uint64_t model[8] = {};
	uint32_t seed = 42;
	char begun[11], date[11];
	time_t now = utc(2026, 1, 1, 12, 0, 0);
	unsigned n_days = 0, n_back = 0;
	struct quota *q;

	set_zone(zone);
	unlink(at("property"));
	q = open_file("property", now, NULL);
	local_date(now, begun);
	while (now < utc(2027, 1, 1, 12, 0, 0)) {
		uint32_t what = next_random(&seed) % 16, uid = next_random(&seed) % 8;
		uint64_t tokens = next_random(&seed) % 1000;

		now += (time_t)(next_random(&seed) % 5000);
		if (what == 0)
			now -= (time_t)(next_random(&seed) % 7200);
		local_date(now, date);
		if (strcmp(date, begun) > 0) {
			memset(model, 0, sizeof(model));
			memcpy(begun, date, sizeof(begun));
			n_days++;
		}
		n_back += strcmp(date, begun) < 0;
		if (what == 1 && n_days % 16 == 0) { /* each costs a wait for the disk */
			quota_close(q);
			q = open_file("property", now, NULL);
		} else if (what < 12) {
			quota_add(q, 1000 + uid, tokens, now);
			model[uid] += tokens;
		}
		for (uint32_t i = 0; i < ARRAY_SIZE(model); i++)
			if (quota_used(q, 1000 + i, now) != model[i])
				fail_msg("%s, %s, uid %u", zone, date, 1000 + i);
	}
	quota_close(q);
	assert_int_equal(n_days, 365);
	assert_true(n_back > 3);
}

static void property_in_many_zones(void **state)
{
	(void)state;
	property_sums_of_a_day("UTC0");
	property_sums_of_a_day(ROME);
	property_sums_of_a_day(ASUNCION);
	property_sums_of_a_day(HAVANA);
	property_sums_of_a_day(ST_JOHNS);
}

/* The date goes back a day for 59 minutes: what was used in the minute before is not given twice. */
static void a_midnight_that_comes_twice(void **state)
{
	const time_t first =
		utc(2026, 10, 25, 2, 30, 0); /* 00:00 of the 25th; at 00:01 it is 23:01 of the 24th */
	struct quota *q;

	(void)state;
	set_zone(ST_JOHNS);
	q = open_file(NULL, first - 1, NULL);
	quota_add(q, 1, 100, first - 1);
	assert_int_equal(quota_used(q, 1, first - 1), 100);
	assert_int_equal(quota_used(q, 1, first), 0);
	quota_add(q, 1, 7, first + 59);
	assert_int_equal(quota_used(q, 1, first + 60), 7);
	assert_int_equal(quota_used(q, 1, first + 3599), 7);
	assert_int_equal(quota_used(q, 1, first + 3600), 7);
	quota_close(q);
}

static void hostile_files_count_from_zero(void **state)
{
	static const char *const broken[] = {
		"",
		"\n",
		"1000 5\n",
		"residentd-quota",
		"residentd-quota \n",
		"residentd-quota 1 2026-11-30",
		"residentd-quota 1 2026-11-30 \n",
		" residentd-quota 1 2026-11-30\n",
		"residentd-quota 01 2026-11-30\n",
		"residentd-quota +1 2026-11-30\n",
		"residentd-quota -1 2026-11-30\n",
		"residentd-quota 0 2026-11-30\n",
		"residentd-quota  1 2026-11-30\n",
		"residentd-quota 1  2026-11-30\n",
		"residentd-quota 1 2026-11-31\n",
		"residentd-quota 1 2026-13-01\n",
		"residentd-quota 1 2026-00-10\n",
		"residentd-quota 1 2026-1-01\n",
		"residentd-quota 1 26-11-30\n",
		"residentd-quota 1 2026-11-30x\n",
		"residentd-quota 1 2026-11-3x\n",
		"residentd-quota 1 -026-11-30\n",
		"residentd-quota 1 20266-11-30\n",
		"residentd-quota 1 2026/11/30\n",
		"Residentd-quota 1 2026-11-30\n",
		"residentd-quota 1 2026-11-30\r\n",
		"residentd-quota 1 2026-11-30\n1000 5",
		"residentd-quota 1 2026-11-30\n1000 5\n\n",
		"residentd-quota 1 2026-11-30\n1000 5\r\n",
		"residentd-quota 1 2026-11-30\n1000 5 \n",
		"residentd-quota 1 2026-11-30\n1000 5 6\n",
		"residentd-quota 1 2026-11-30\n1000  5\n",
		"residentd-quota 1 2026-11-30\n1000\t5\n",
		"residentd-quota 1 2026-11-30\n 1000 5\n",
		"residentd-quota 1 2026-11-30\n1000\n",
		"residentd-quota 1 2026-11-30\n1000 \n",
		"residentd-quota 1 2026-11-30\n1000 05\n",
		"residentd-quota 1 2026-11-30\n01000 5\n",
		"residentd-quota 1 2026-11-30\n1000 -5\n",
		"residentd-quota 1 2026-11-30\n-1 5\n",
		"residentd-quota 1 2026-11-30\n+1 5\n",
		"residentd-quota 1 2026-11-30\n1000 0x5\n",
		"residentd-quota 1 2026-11-30\n1000 5.0\n",
		"residentd-quota 1 2026-11-30\n1000 1e3\n",
		"residentd-quota 1 2026-11-30\nroot 5\n",
		"residentd-quota 1 2026-11-30\n4294967296 5\n",
		"residentd-quota 1 2026-11-30\n18446744073709551616 5\n",
		"residentd-quota 1 2026-11-30\n1000 18446744073709551616\n",
		"residentd-quota 1 2026-11-30\n1000 99999999999999999999999999\n",
		"residentd-quota 1 2026-11-30\n1000 5\n1000 6\n",
		"residentd-quota 1 2026-11-30\n1000 5\n999 6\n",
		"residentd-quota 1 2026-11-30\n1000 5\n# a comment\n",
		"residentd-quota 1 2026-11-30\n1000 5555555555555555555555555555555555555555555555555555555555555\n",
	};
	static const char nul[] = "residentd-quota 1 2026-11-30\n1000 5\n\0\n";
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	for (size_t i = 0; i <= ARRAY_SIZE(broken); i++) {
		if (i < ARRAY_SIZE(broken))
			write_file("bad", broken[i]);
		else
			write_bytes("bad", nul, sizeof(nul) - 1);
		q = open_file("bad", now, "bad: not a list of used tokens, counting from zero\n");
		for (uid_t uid = 998; uid <= 1000; uid++)
			if (quota_used(q, uid, now) != 0)
				fail_msg("%zu: %s", i, broken[i]);
		quota_add(q, 1000, 1, now);
		quota_close(q);
	}
	assert_file("bad", "residentd-quota 1 2026-11-30\n1000 1\n"); /* it is a good one now */
	assert_int_equal(quota_open(at("bad"), now, &q, NULL), 0);
	assert_int_equal(quota_used(q, 1000, now), 1);
	quota_close(q);
	write_file("bad", "");
	assert_int_equal(quota_open(at("bad"), now, &q, NULL), 0);
	quota_close(q);
}

static void huge_files_are_refused(void **state)
{
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	_cleanup_(buf_done) struct buf text = {};
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	buf_printf(&text, "residentd-quota 1 2026-11-30\n");
	for (unsigned uid = 0; uid < 65536; uid++) /* one more than there are rows */
		buf_printf(&text, "%u 1\n", uid);
	write_bytes("huge", text.data, text.len);
	q = open_file("huge", now, "huge: not a list of used tokens, counting from zero\n");
	assert_int_equal(quota_used(q, 0, now), 0);
	quota_close(q);
	while (text.len <= 65537 * 64)
		buf_printf(&text, "%u 1\n", 70000);
	write_bytes("huge", text.data, text.len);
	q = open_file("huge", now, "huge: File too large, counting from zero\n");
	quota_close(q);
	assert_int_equal(symlink("/dev/zero", at("zero")), 0);
	q = open_file("zero", now, "zero: File too large, counting from zero\n");
	quota_close(q);
}

/* More uids than rows: the late ones share one sum, and none is uncounted, also after a restart. */
static void memory_is_bounded(void **state)
{
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	unlink(at("many"));
	q = open_file("many", now, NULL);
	for (uid_t uid = 0; uid < 70000; uid++)
		quota_add(q, uid, 2, now);
	for (unsigned again = 0; again < 2; again++) {
		assert_int_equal(quota_used(q, 0, now), 2);
		assert_int_equal(quota_used(q, 65534, now), 2);
		assert_int_equal(quota_used(q, 65535, now), 2 * (70000 - 65535));
		assert_int_equal(quota_used(q, 69999, now), 2 * (70000 - 65535));
		assert_int_equal(quota_save(q), 0);
		if (again == 0) {
			quota_close(q);
			q = open_file("many", now, NULL);
		}
	}
	assert_int_equal(quota_used(q, 69999, now + 86400), 0);
	quota_close(q);
}

static void newer_files_are_kept(void **state)
{
	static const char newer[] = "residentd-quota 2 what only a later version knows\n\x01\x02";
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	_cleanup_(buf_done) struct buf w = {}, expected = {};
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	write_file("new", newer);
	buf_printf(&expected,
		   "%s/new: from a newer version, kept as %s/new.unknown, counting from zero\n",
		   root, root);
	assert_int_equal(quota_open(at("new"), now, &q, &w), 0);
	assert_string_equal(w.data, expected.data);
	assert_file("new.unknown", newer);
	quota_add(q, 1, 5, now);
	quota_close(q);
	assert_file("new", "residentd-quota 1 2026-11-30\n1 5\n");
	assert_file("new.unknown", newer);

	/* it cannot be put aside: then it stays, and counting goes on without a file */
	unlink(at("new.unknown"));
	assert_int_equal(mkdir(at("new.unknown"), 0700), 0);
	write_file("new", "residentd-quota 99999999999999999999999 2026-11-30\n");
	q = open_file("new", now,
		      "new: from a newer version and cannot be renamed: Is a directory, counting in "
		      "memory only\n");
	quota_add(q, 1, 5, now);
	assert_int_equal(quota_used(q, 1, now), 5);
	assert_int_equal(quota_save(q), 0);
	quota_close(q);
	assert_file("new", "residentd-quota 99999999999999999999999 2026-11-30\n");
}

static void unwritable_files_leave_counting(void **state)
{
	const time_t now = utc(2026, 11, 30, 12, 0, 0);
	struct quota *q;

	(void)state;
	set_zone("UTC0");
	q = open_file("later/quota", now, NULL);
	assert_int_equal(quota_save(q), 0);
	quota_add(q, 1, 5, now);
	assert_int_equal(quota_save(q), -ENOENT);
	assert_int_equal(quota_save(q), -ENOENT);
	quota_add(q, 1, 5, now);
	assert_int_equal(quota_used(q, 1, now), 10);
	assert_int_equal(mkdir(at("later"), 0700), 0); /* and is written when it can be */
	assert_int_equal(quota_save(q), 0);
	assert_file("later/quota", "residentd-quota 1 2026-11-30\n1 10\n");
	quota_close(q);

	assert_int_equal(mkdir(at("directory"), 0700), 0);
	q = open_file("directory", now, "directory: Is a directory, counting from zero\n");
	quota_add(q, 1, 5, now);
	assert_true(quota_save(q) < 0);
	assert_int_equal(access(at(".directory.new"), F_OK), -1);
	assert_int_equal(quota_used(q, 1, now), 5);
	quota_close(q);

	/* what a crash left half written does not matter, nor where somebody made it point to */
	write_file("victim", "safe");
	assert_int_equal(symlink(at("victim"), at(".q.new")), 0);
	q = open_file("q", now, NULL);
	quota_add(q, 1, 5, now);
	assert_int_equal(quota_save(q), 0);
	assert_file("victim", "safe");
	assert_file("q", "residentd-quota 1 2026-11-30\n1 5\n");
	quota_close(q);
	write_file(".q.new", "residentd-quota 1 20");
	q = open_file("q", now, NULL);
	assert_int_equal(quota_used(q, 1, now), 5);
	quota_add(q, 1, 1, now);
	quota_close(q);
	assert_file("q", "residentd-quota 1 2026-11-30\n1 6\n");
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(users_are_counted_apart),
		cmocka_unit_test(sums_do_not_wrap),
		cmocka_unit_test(file_survives_a_restart),
		cmocka_unit_test(clock_that_goes_back),
		cmocka_unit_test(days_end_at_local_midnight),
		cmocka_unit_test(a_day_that_a_zone_left_out),
		cmocka_unit_test(seconds_left_end_the_day),
		cmocka_unit_test(property_in_many_zones),
		cmocka_unit_test(a_midnight_that_comes_twice),
		cmocka_unit_test(hostile_files_count_from_zero),
		cmocka_unit_test(huge_files_are_refused),
		cmocka_unit_test(memory_is_bounded),
		cmocka_unit_test(newer_files_are_kept),
		cmocka_unit_test(unwritable_files_leave_counting),
	};

	return cmocka_run_group_tests_name("quota", tests, make_root, remove_root);
}
