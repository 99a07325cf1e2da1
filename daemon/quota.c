/* SPDX-License-Identifier: MIT */
/*
 * quota.c: counts the tokens of each uid on the local day, in memory and in one small file. See quota.h.
 *
 * Owns the counters and the file. Loop thread. Refuses to know what anybody is allowed and what a token
 * costs; never logs. The file is text: "residentd-quota 1 2026-11-30", then a line "UID TOKENS" for each
 * user, uids ascending; what does not look exactly so is not believed.
 * Invariant: a counter never decreases within a day, and a day, once it has begun, does not begin again
 * when the clock is set back over midnight or an hour is repeated there.
 */
#include "daemon/quota.h"

#include "daemon/file.h"

#include <inttypes.h>
#include <stdarg.h>

#define VERSION  1
#define MAGIC    "residentd-quota "
#define ROWS_MAX 65536
#define OTHERS \
	((uid_t)-1) /* who found no row, for lack of memory or of rows; nobody has this uid */
#define LINE_BYTES_MAX   64
#define FILE_BYTES_MAX   ((ROWS_MAX + 1) * LINE_BYTES_MAX)
#define SECONDS_OF_A_DAY 86400

struct row {
	uid_t uid;
	uint64_t tokens;
};

struct quota {
	char *path;       /* NULL: memory only */
	int64_t day;      /* that is counted: days since 1970-01-01 on the local calendar */
	struct row *rows; /* by uid; the last one is always OTHERS */
	size_t n, alloc;
	bool changed; /* since the file was read or written */
};

_printf_(2, 3) static void warn(struct buf *warning, const char *format, ...)
{
	_cleanup_(freep) char *text = NULL;
	va_list ap;

	if (!warning)
		return;
	va_start(ap, format);
	if (vasprintf(&text, format, ap) < 0)
		text = NULL;
	va_end(ap);
	if (text)
		buf_printf(warning, "%s\n", text);
}

/* The local calendar day. Follows a change of the time zone. */
static int64_t day_of(time_t now)
{
	struct tm tm;

	tzset();
	if (!localtime_r(&now, &tm))
		return now / SECONDS_OF_A_DAY;
	tm.tm_hour = 12;
	return timegm(&tm) / SECONDS_OF_A_DAY;
}

static void start_day(struct quota *q, int64_t day)
{
	q->day = day;
	q->n = 1;
	q->rows[0] = (struct row){ .uid = OTHERS };
}

/*
 * A day back is a clock that was set back a little, another time zone, or a midnight that comes twice: the day that was
 * begun goes on. Further back the clock was wrong before, and waiting for that day would lock people out.
 */
static void roll(struct quota *q, time_t now)
{
	int64_t day = day_of(now);

	if (day == q->day || day == q->day - 1)
		return;
	start_day(q, day);
	q->changed = true;
}

/* Where the uid's row is or would be. */
static size_t find(const struct quota *q, uid_t uid)
{
	size_t low = 0, high = q->n - 1;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (q->rows[middle].uid < uid)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static int reserve_row(struct quota *q)
{
	size_t alloc = MAX(2 * q->alloc, (size_t)16);
	struct row *rows;

	if (q->n < q->alloc)
		return 0;
	if (q->n >= ROWS_MAX)
		return -ENOSPC;
	rows = reallocarray(q->rows, alloc, sizeof(*rows));
	if (!rows)
		return -ENOMEM;
	q->rows = rows;
	q->alloc = alloc;
	return 0;
}

/* The uid's row, made when there is none; that of the others when it cannot be made: never uncounted. */
static struct row *get_row(struct quota *q, uid_t uid)
{
	size_t i = find(q, uid);

	if (q->rows[i].uid == uid)
		return &q->rows[i];
	if (reserve_row(q) < 0)
		return &q->rows[q->n - 1];
	memmove(q->rows + i + 1, q->rows + i, (q->n - i) * sizeof(*q->rows));
	q->n++;
	q->rows[i] = (struct row){ .uid = uid };
	return &q->rows[i];
}

/* What does not print as it was read is not believed. */
static bool parse_row(const char *line, struct row *ret)
{
	char again[LINE_BYTES_MAX], *rest;
	unsigned long long uid = strtoull(line, &rest, 10), tokens = strtoull(rest, NULL, 10);

	if (uid > UINT32_MAX)
		return false;
	snprintf(again, sizeof(again), "%llu %llu", uid, tokens);
	*ret = (struct row){ .uid = (uid_t)uid, .tokens = tokens };
	return streq(again, line);
}

static void print_header(char line[static LINE_BYTES_MAX], int64_t day)
{
	time_t noon = day * SECONDS_OF_A_DAY + SECONDS_OF_A_DAY / 2;
	struct tm tm = {};

	gmtime_r(&noon, &tm);
	snprintf(line, LINE_BYTES_MAX, MAGIC "%d %04d-%02d-%02d", VERSION, tm.tm_year + 1900,
		 tm.tm_mon + 1, tm.tm_mday);
}

static bool parse_header(const char *line, int64_t *ret_day)
{
	struct tm tm = { .tm_hour = 12 };
	char again[LINE_BYTES_MAX];

	if (sscanf(line, MAGIC "%*d %4d-%2d-%2d", &tm.tm_year, &tm.tm_mon, &tm.tm_mday) != 3)
		return false;
	tm.tm_year -= 1900;
	tm.tm_mon--;
	*ret_day = timegm(&tm) / SECONDS_OF_A_DAY;
	print_header(again, *ret_day);
	return streq(again, line);
}

/* The line at *text, which is moved behind it; false when there is no whole one of a sensible length. */
static bool take_line(const char **text, char line[static LINE_BYTES_MAX])
{
	size_t n = strcspn(*text, "\n");

	if (!(*text)[n] || n >= LINE_BYTES_MAX)
		return false;
	memcpy(line, *text, n);
	line[n] = 0;
	*text += n + 1;
	return true;
}

static bool is_newer(const char *text)
{
	const char *version = text + strlen(MAGIC);

	return startswith(text, MAGIC) && *version >= '0' && *version <= '9' &&
	       strtoull(version, NULL, 10) > VERSION;
}

/* -EPROTONOSUPPORT: of a newer version; -EBADMSG: broken, then some of it has been taken. */
static int parse(struct quota *q, const struct buf *b)
{
	const char *text = b->data;
	char line[LINE_BYTES_MAX];
	int64_t day, last_uid = -1;
	struct row row;

	if (b->len == 0 || strlen(text) != b->len)
		return -EBADMSG;
	if (is_newer(text))
		return -EPROTONOSUPPORT;
	if (!take_line(&text, line) || !parse_header(line, &day))
		return -EBADMSG;
	start_day(q, day);
	while (*text) {
		if (!take_line(&text, line) || !parse_row(line, &row) || row.uid <= last_uid ||
		    (q->n >= ROWS_MAX && row.uid != OTHERS))
			return -EBADMSG;
		get_row(q, row.uid)->tokens = row.tokens;
		last_uid = row.uid;
	}
	return 0;
}

/* So that the newer version, when it comes back, can be given its file; ours starts afresh. */
static void set_aside(struct quota *q, struct buf *warning)
{
	_cleanup_(freep) char *aside = NULL;
	int r = 0;

	if (asprintf(&aside, "%s.unknown", q->path) < 0) {
		aside = NULL;
		r = -ENOMEM;
	} else if (rename(q->path, aside) < 0) {
		r = -errno;
	}
	if (r == 0) {
		warn(warning, "%s: from a newer version, kept as %s, counting from zero", q->path,
		     aside);
		return;
	}
	warn(warning, "%s: from a newer version and cannot be renamed: %s, counting in memory only",
	     q->path, strerror(-r));
	free(q->path);
	q->path = NULL;
}

static void load(struct quota *q, time_t now, struct buf *warning)
{
	_cleanup_(buf_done) struct buf b = {};
	int r;

	r = file_read(q->path, FILE_BYTES_MAX, &b);
	if (r == -ENOENT)
		return;
	if (r == 0)
		r = parse(q, &b);
	if (r == 0) {
		roll(q, now);
		return;
	}
	start_day(q, day_of(now));
	if (r == -EPROTONOSUPPORT)
		set_aside(q, warning);
	else
		warn(warning, "%s: %s, counting from zero", q->path,
		     r == -EBADMSG ? "not a list of used tokens" : strerror(-r));
}

int quota_open(const char *path, time_t now, struct quota **ret, struct buf *warning)
{
	struct quota *q = calloc(1, sizeof(*q));

	if (!q)
		return -ENOMEM;
	if (path)
		q->path = strdup(path);
	if ((path && !q->path) || reserve_row(q) < 0) {
		free(q->path);
		free(q);
		return -ENOMEM;
	}
	start_day(q, day_of(now));
	if (path)
		load(q, now, warning);
	*ret = q;
	return 0;
}

struct quota *quota_close(struct quota *q)
{
	if (!q)
		return NULL;
	quota_save(q);
	free(q->path);
	free(q->rows);
	free(q);
	return NULL;
}

void quota_add(struct quota *q, uid_t uid, uint64_t tokens, time_t now)
{
	struct row *row;

	roll(q, now);
	if (tokens == 0)
		return;
	row = get_row(q, uid);
	if (__builtin_add_overflow(row->tokens, tokens, &row->tokens))
		row->tokens = UINT64_MAX;
	q->changed = true;
}

uint64_t quota_used(struct quota *q, uid_t uid, time_t now)
{
	size_t i;

	roll(q, now);
	i = find(q, uid);
	return q->rows[q->rows[i].uid == uid ? i : q->n - 1].tokens;
}

/* Asks the calendar for each quarter of an hour, since 00:00, or the whole next day, may be missing or come twice. */
uint64_t quota_seconds_left(time_t now)
{
	const time_t step = 900; /* every zone in use is a multiple of it from UTC */
	const int64_t day = day_of(now);
	time_t next = now - now % step + step;

	while (day_of(next) <= day)
		next += step;
	return (uint64_t)(next - now);
}

int quota_save(struct quota *q)
{
	_cleanup_(buf_done) struct buf b = {};
	char header[LINE_BYTES_MAX];
	int r;

	if (!q->path || !q->changed)
		return 0;
	print_header(header, q->day);
	r = buf_printf(&b, "%s\n", header);
	for (size_t i = 0; i < q->n && r == 0; i++)
		if (q->rows[i].tokens > 0)
			r = buf_printf(&b, "%" PRIu32 " %" PRIu64 "\n", q->rows[i].uid,
				       q->rows[i].tokens);
	if (r == 0)
		r = file_replace(q->path, b.data, b.len, 0600);
	if (r == 0)
		q->changed = false;
	return r;
}
