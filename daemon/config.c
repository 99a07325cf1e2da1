/* SPDX-License-Identifier: MIT */
/*
 * config.c: reads residentd.conf and its drop-ins into struct config. See config.h.
 *
 * Owns the table of keys: name, field, bounds. Loop thread; the value parsers from any. Refuses to
 * know what a value is for, whether a model exists or how many processors there are; never logs.
 * Invariant: a field changes only to a value inside its bounds; a file is read whole before its
 * first line counts.
 */
#include "daemon/config.h"

#include "daemon/model/tokenizer.h" /* utf8_valid() */

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <syslog.h>

#define FILE_BYTES_MAX     (1024 * 1024)
#define LINE_BYTES_MAX     4096
#define WARNINGS_BYTES_MAX (64 * 1024)

enum key_kind {
	KEY_PATH,
	KEY_NUMBER, /* uint32_t */
	KEY_BYTES,
	KEY_SPAN,
	KEY_TOKENS, /* int64_t, or infinity: -1 */
	KEY_KV_TYPE,
	KEY_LEVEL,
};

struct key {
	const char *section, *name;
	enum key_kind kind;
	size_t offset;
	uint64_t min, max;
	bool may_auto; /* "auto" and 0 are 0, whatever min says */
};

#define FIELD(f) offsetof(struct config, f)

/* clang-format off */
static const struct key keys[] = {
	{ "Model",   "Path",              KEY_PATH,    FIELD(model_path),          0, 0, false },
	{ "Model",   "Context",           KEY_NUMBER,  FIELD(context),             16, 1 << 24, true },
	{ "Engine",  "Threads",           KEY_NUMBER,  FIELD(threads),             1, 256, true },
	{ "Engine",  "BatchTokens",       KEY_NUMBER,  FIELD(batch_tok),           1, 4096, false },
	{ "Engine",  "KvBytesMax",        KEY_BYTES,   FIELD(kv_bytes_max),        1, INT64_MAX, true },
	{ "Engine",  "KvType",            KEY_KV_TYPE, FIELD(kv_type),             0, 0, false },
	{ "Service", "QueueMax",          KEY_NUMBER,  FIELD(queue_max),           1, 65536, false },
	{ "Service", "SessionsMax",       KEY_NUMBER,  FIELD(sessions_max),        1, 65536, false },
	{ "Service", "SessionsPerUser",   KEY_NUMBER,  FIELD(sessions_per_user),   1, 65536, false },
	{ "Service", "ConnectionsMax",    KEY_NUMBER,  FIELD(connections_max),     1, 65536, false },
	{ "Service", "KeepSec",           KEY_SPAN,    FIELD(keep_us),             0, INT64_MAX, false },
	{ "Service", "MessageMax",        KEY_BYTES,   FIELD(message_bytes_max),   64 << 10, 64 << 20, false },
	{ "Service", "MaxTokens",         KEY_NUMBER,  FIELD(max_tokens),          1, 1 << 24, false },
	{ "Service", "MaxThinkingTokens", KEY_TOKENS,  FIELD(max_thinking_tokens), 0, 1 << 24, false },
	{ "Log",     "Level",             KEY_LEVEL,   FIELD(log_level),           0, 0, false },
};
/* clang-format on */

struct word {
	const char *name;
	int value;
};

static const struct word kv_words[] = {
	{ "auto", CONFIG_KV_AUTO },
	{ "f16", CONFIG_KV_F16 },
	{ "f32", CONFIG_KV_F32 },
	{},
};

static const struct word level_words[] = {
	{ "error", LOG_ERR }, { "warning", LOG_WARNING }, { "notice", LOG_NOTICE },
	{ "info", LOG_INFO }, { "debug", LOG_DEBUG },     {},
};

void config_defaults(struct config *c)
{
	*c = (struct config){
		.batch_tok = 128,
		.kv_type = CONFIG_KV_AUTO,
		.queue_max = 64,
		.sessions_max = 256,
		.sessions_per_user = 32,
		.connections_max = 512,
		.keep_us = 3600 * UINT64_C(1000000),
		.message_bytes_max = 4 << 20,
		.max_tokens = 2048,
		.max_thinking_tokens = 4096,
		.log_level = LOG_INFO,
	};
}

void config_done(struct config *c)
{
	free(c->model_path);
	c->model_path = NULL;
}

static bool is_digit(char ch)
{
	return ch >= '0' && ch <= '9';
}

static bool is_blank(char ch)
{
	return ch == ' ' || ch == '\t' || ch == '\r';
}

/* The digits at *s, which is moved behind them. -EINVAL: none; -ERANGE: too many. */
static int take_digits(const char **s, uint64_t *ret)
{
	const char *p = *s;
	uint64_t v = 0;

	if (!is_digit(*p))
		return -EINVAL;
	for (; is_digit(*p); p++)
		if (__builtin_mul_overflow(v, 10, &v) ||
		    __builtin_add_overflow(v, (uint64_t)(*p - '0'), &v))
			return -ERANGE;
	*s = p;
	*ret = v;
	return 0;
}

int parse_u64(const char *s, uint64_t min, uint64_t max, uint64_t *ret)
{
	uint64_t v;
	int r;

	r = take_digits(&s, &v);
	if (r < 0)
		return r;
	if (*s)
		return -EINVAL;
	if (v < min || v > max)
		return -ERANGE;
	*ret = v;
	return 0;
}

int parse_bytes(const char *s, uint64_t *ret)
{
	static const char suffixes[] = "KMGT";
	uint64_t v, fraction = 0, scale = 1, unit = 1;
	const char *suffix;
	int r;

	r = take_digits(&s, &v);
	if (r < 0)
		return r;
	if (*s == '.') {
		/* six digits: fraction * unit then fits 64 bits for T too */
		for (s++; is_digit(*s); s++) {
			if (scale == 1000000)
				return -EINVAL;
			fraction = fraction * 10 + (uint64_t)(*s - '0');
			scale *= 10;
		}
		if (scale == 1 || !*s)
			return -EINVAL;
	}
	if (*s) {
		suffix = strchr(suffixes, *s);
		if (!suffix || s[1])
			return -EINVAL;
		unit = UINT64_C(1024) << (10 * (suffix - suffixes));
	}
	if (__builtin_mul_overflow(v, unit, &v) ||
	    __builtin_add_overflow(v, fraction * unit / scale, &v))
		return -ERANGE;
	*ret = v;
	return 0;
}

/* The unit at *s, which is moved behind it; seconds when there is none. 0: not a unit. */
static uint64_t take_unit_us(const char **s)
{
	static const struct {
		const char *name;
		uint64_t us;
	} units[] = {
		{ "us", 1 },           { "ms", 1000 },       { "s", 1000000 },
		{ "sec", 1000000 },    { "m", 60000000 },    { "min", 60000000 },
		{ "h", 3600000000 },   { "hr", 3600000000 }, { "d", 86400000000 },
		{ "w", 604800000000 },
	};
	size_t n = strcspn(*s, " \t0123456789");

	if (n == 0)
		return 1000000;
	for (size_t i = 0; i < ARRAY_SIZE(units); i++) {
		if (strlen(units[i].name) == n && memcmp(units[i].name, *s, n) == 0) {
			*s += n;
			return units[i].us;
		}
	}
	return 0;
}

int parse_span_us(const char *s, uint64_t *ret)
{
	uint64_t sum = 0, v, unit;
	int r;

	s += strspn(s, " \t");
	if (startswith(s, "infinity") && s[8 + strspn(s + 8, " \t")] == 0) {
		*ret = UINT64_MAX;
		return 0;
	}
	do {
		r = take_digits(&s, &v);
		if (r < 0)
			return r;
		s += strspn(s, " \t");
		unit = take_unit_us(&s);
		if (unit == 0)
			return -EINVAL;
		if (__builtin_mul_overflow(v, unit, &v) || __builtin_add_overflow(sum, v, &sum) ||
		    sum == UINT64_MAX)
			return -ERANGE;
		s += strspn(s, " \t");
	} while (*s);
	*ret = sum;
	return 0;
}

static int parse_word(const struct word *words, const char *s, int *ret)
{
	for (; words->name; words++) {
		if (streq(words->name, s)) {
			*ret = words->value;
			return 0;
		}
	}
	return -EINVAL;
}

static int set_path(char **path, const char *value)
{
	char *copy = NULL;

	if (value[0]) {
		if (value[0] != '/')
			return -EINVAL;
		copy = strdup(value);
		if (!copy)
			return -ENOMEM;
	}
	free(*path);
	*path = copy;
	return 0;
}

/* The number of a key whose field is one. */
static int parse_number(const struct key *k, const char *value, uint64_t *ret)
{
	uint64_t v;
	int r;

	if (k->may_auto && streq(value, "auto")) {
		*ret = 0;
		return 0;
	}
	if (k->kind == KEY_BYTES)
		r = parse_bytes(value, &v);
	else if (k->kind == KEY_SPAN)
		r = parse_span_us(value, &v);
	else
		r = parse_u64(value, 0, UINT64_MAX, &v);
	if (r < 0)
		return r;
	if ((v < k->min || v > k->max) && !(k->may_auto && v == 0) &&
	    !(k->kind == KEY_SPAN && v == UINT64_MAX)) /* infinity; else it can be added to a time */
		return -ERANGE;
	*ret = v;
	return 0;
}

/* As in unit files, an empty value is the default again. */
static void reset(struct config *c, const struct key *k)
{
	static const size_t sizes[] = {
		[KEY_NUMBER] = sizeof(uint32_t),        [KEY_BYTES] = sizeof(uint64_t),
		[KEY_SPAN] = sizeof(uint64_t),          [KEY_TOKENS] = sizeof(int64_t),
		[KEY_KV_TYPE] = sizeof(enum config_kv), [KEY_LEVEL] = sizeof(int),
	};
	struct config d;

	config_defaults(&d);
	memcpy((char *)c + k->offset, (char *)&d + k->offset, sizes[k->kind]);
}

static int set(struct config *c, const struct key *k, const char *value)
{
	void *field = (char *)c + k->offset;
	uint64_t v = 0;
	int word = 0, r = 0;

	if (k->kind == KEY_PATH)
		return set_path(field, value);
	if (!value[0]) {
		reset(c, k);
		return 0;
	}
	switch (k->kind) {
	case KEY_PATH: break;
	case KEY_NUMBER:
		r = parse_number(k, value, &v);
		if (r == 0)
			*(uint32_t *)field = (uint32_t)v;
		break;
	case KEY_BYTES:
	case KEY_SPAN:
		r = parse_number(k, value, &v);
		if (r == 0)
			*(uint64_t *)field = v;
		break;
	case KEY_TOKENS:
		if (streq(value, "infinity"))
			v = UINT64_MAX;
		else
			r = parse_number(k, value, &v);
		if (r == 0)
			*(int64_t *)field = (int64_t)v;
		break;
	case KEY_KV_TYPE:
		r = parse_word(kv_words, value, &word);
		if (r == 0)
			*(enum config_kv *)field = (enum config_kv)word;
		break;
	case KEY_LEVEL:
		r = parse_word(level_words, value, &word);
		if (r == 0)
			*(int *)field = word;
		break;
	}
	return r;
}

/* What reads one file. */
struct reader {
	struct config *c;
	const char *path;
	struct buf *warnings; /* may be NULL */
	const char *section;  /* of keys[]; NULL: none yet, or unknown */
	bool in_unknown;
	unsigned line;
};

/* Without memory a warning is lost; that is all. */
_printf_(2, 3) static void warn(const struct reader *r, const char *format, ...)
{
	char *text = NULL;
	va_list ap;

	if (!r->warnings || r->warnings->len > WARNINGS_BYTES_MAX)
		return;
	va_start(ap, format);
	if (vasprintf(&text, format, ap) < 0)
		text = NULL;
	va_end(ap);
	if (!text)
		return;
	if (r->line)
		buf_printf(r->warnings, "%s:%u: %s, ignoring\n", r->path, r->line, text);
	else
		buf_printf(r->warnings, "%s: %s, ignoring\n", r->path, text);
	if (r->warnings->len > WARNINGS_BYTES_MAX)
		buf_printf(r->warnings, "%s: too many problems, not showing more\n", r->path);
	free(text);
}

static void warn_value(const struct reader *r, const struct key *k, const char *value)
{
	const char *or_auto = k->may_auto ? "auto or " : "";

	switch (k->kind) {
	case KEY_PATH: warn(r, "%s=%s: expected an absolute path", k->name, value); break;
	case KEY_NUMBER:
		warn(r, "%s=%s: expected %sa number from %" PRIu64 " to %" PRIu64, k->name, value,
		     or_auto, k->min, k->max);
		break;
	case KEY_BYTES:
		warn(r, "%s=%s: expected %sa size (64K, 4M, 1.5G) from %" PRIu64 " to %" PRIu64 " bytes",
		     k->name, value, or_auto, k->min, k->max);
		break;
	case KEY_SPAN:
		warn(r, "%s=%s: expected a time span (90s, 1h 30min, infinity)", k->name, value);
		break;
	case KEY_TOKENS:
		warn(r, "%s=%s: expected infinity or a number from %" PRIu64 " to %" PRIu64,
		     k->name, value, k->min, k->max);
		break;
	case KEY_KV_TYPE: warn(r, "%s=%s: expected auto, f16 or f32", k->name, value); break;
	case KEY_LEVEL:
		warn(r, "%s=%s: expected error, warning, notice, info or debug", k->name, value);
		break;
	}
}

static void take_section(struct reader *r, char *line, size_t len)
{
	r->section = NULL;
	r->in_unknown = true;
	if (line[len - 1] != ']') {
		warn(r, "a section without ']'");
		return;
	}
	line[len - 1] = 0;
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		if (streq(keys[i].section, line + 1)) {
			r->section = keys[i].section;
			r->in_unknown = false;
			return;
		}
	}
	warn(r, "unknown section [%s]", line + 1);
}

static int take_assignment(struct reader *r, char *line)
{
	char *value = strchr(line, '='), *end = value;
	int e;

	if (!value) {
		warn(r, "expected Key=value");
		return 0;
	}
	*value++ = 0;
	while (is_blank(*value))
		value++;
	while (end > line && is_blank(end[-1]))
		*--end = 0;
	if (!r->section) {
		if (!r->in_unknown) /* else the section has been warned about */
			warn(r, "%s= before any section", line);
		return 0;
	}
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		if (!streq(keys[i].section, r->section) || !streq(keys[i].name, line))
			continue;
		e = set(r->c, &keys[i], value);
		if (e == -ENOMEM)
			return e;
		if (e < 0)
			warn_value(r, &keys[i], value);
		return 0;
	}
	warn(r, "unknown key %s= in [%s]", line, r->section);
	return 0;
}

static int take_line(struct reader *r, char *line, size_t len)
{
	while (len > 0 && is_blank(line[len - 1]))
		len--;
	while (len > 0 && is_blank(*line)) {
		line++;
		len--;
	}
	line[len] = 0;
	if (len == 0)
		return 0;
	if (memchr(line, 0, len)) {
		warn(r, "a line with a NUL byte");
		return 0;
	}
	if (!utf8_valid(line, len)) {
		warn(r, "a line that is not UTF-8");
		return 0;
	}
	if (*line == '[') {
		take_section(r, line, len);
		return 0;
	}
	return take_assignment(r, line);
}

static bool is_comment(const char *line, size_t len)
{
	size_t i = 0;

	while (i < len && is_blank(line[i]))
		i++;
	return i < len && (line[i] == '#' || line[i] == ';');
}

static int take_joined(struct reader *r, char *line, size_t len, bool too_long)
{
	if (!too_long)
		return take_line(r, line, len);
	warn(r, "a line longer than %d bytes", LINE_BYTES_MAX);
	return 0;
}

/* A line that ends in a backslash goes on in the next; comments may stand between the two. */
static int take_lines(struct reader *r, const char *data, size_t len)
{
	char joined[LINE_BYTES_MAX + 1];
	const char *end = data + len, *next;
	size_t n_joined = 0;
	unsigned line = 1;
	bool more = false, too_long = false;
	int e = 0;

	for (; data < end && e == 0; data = next, line++) {
		const char *newline = memchr(data, '\n', (size_t)(end - data));
		size_t n = (size_t)((newline ? newline : end) - data);

		next = newline ? newline + 1 : end;
		if (is_comment(data, n))
			continue;
		if (!more) {
			r->line = line;
			n_joined = 0;
			too_long = false;
		}
		more = n > 0 && data[n - 1] == '\\';
		too_long = too_long || n > LINE_BYTES_MAX - n_joined;
		if (!too_long) {
			memcpy(joined + n_joined, data, n);
			n_joined += n;
			if (more)
				joined[n_joined - 1] = ' ';
		}
		if (!more)
			e = take_joined(r, joined, n_joined, too_long);
	}
	if (more && e == 0) /* the file ends in a backslash */
		e = take_joined(r, joined, n_joined, too_long);
	return e;
}

/* O_NONBLOCK: a FIFO must not hang the daemon. /dev/null, which masks a file, reads as empty. */
static int read_file(const char *path, struct buf *b)
{
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	ssize_t n;
	int r;

	if (fd < 0)
		return -errno;
	do {
		r = buf_reserve(b, 16384);
		if (r < 0)
			return r;
		n = read(fd, b->data + b->len, 16384);
		if (n < 0)
			return -errno;
		b->len += (size_t)n;
		if (b->len > FILE_BYTES_MAX)
			return -EFBIG;
	} while (n > 0);
	return 0;
}

int config_read(struct config *c, const char *path, struct buf *warnings)
{
	struct reader reader = { .c = c, .path = path, .warnings = warnings };
	_cleanup_(buf_done) struct buf b = {};
	int r;

	r = read_file(path, &b);
	if (r < 0)
		return r;
	return take_lines(&reader, b.data, b.len);
}

/* config_read(), but a file that is there and cannot be read is a warning. -ENOENT, -ENOMEM. */
static int read_layer(struct config *c, const char *path, struct buf *warnings)
{
	int r = config_read(c, path, warnings);

	if (r == 0 || r == -ENOENT || r == -ENOMEM)
		return r;
	warn(&(struct reader){ .path = path, .warnings = warnings }, "%s", strerror(-r));
	return 0;
}

struct dropin {
	char *name, *path;
};

struct dropins {
	struct dropin *items;
	size_t n;
};

static void dropins_done(struct dropins *d)
{
	for (size_t i = 0; i < d->n; i++) {
		free(d->items[i].name);
		free(d->items[i].path);
	}
	free(d->items);
	*d = (struct dropins){};
}

/* Unless a directory of higher priority has the name already. */
static int dropins_add(struct dropins *d, const char *dir, const char *name)
{
	struct dropin *items, new = {};

	for (size_t i = 0; i < d->n; i++)
		if (streq(d->items[i].name, name))
			return 0;
	items = reallocarray(d->items, d->n + 1, sizeof(*items));
	if (!items)
		return -ENOMEM;
	d->items = items;
	new.name = strdup(name);
	if (!new.name)
		return -ENOMEM;
	if (asprintf(&new.path, "%s/%s", dir, name) < 0) {
		free(new.name);
		return -ENOMEM;
	}
	d->items[d->n++] = new;
	return 0;
}

static int dropin_compare(const void *a, const void *b)
{
	return strcmp(((const struct dropin *)a)->name, ((const struct dropin *)b)->name);
}

static int dropins_collect(struct dropins *d, const char *dir, struct buf *warnings)
{
	DIR *stream = opendir(dir);
	struct dirent *entry;
	int r = 0;

	if (!stream) {
		if (errno != ENOENT)
			warn(&(struct reader){ .path = dir, .warnings = warnings }, "%s",
			     strerror(errno));
		return 0;
	}
	while (r == 0 && (entry = readdir(stream))) {
		size_t n = strlen(entry->d_name);

		if (entry->d_name[0] != '.' && n > 5 && streq(entry->d_name + n - 5, ".conf"))
			r = dropins_add(d, dir, entry->d_name);
	}
	closedir(stream);
	return r;
}

int config_read_layers(struct config *c, const char *root, struct buf *warnings)
{
	static const char *const dirs[] = { "/etc", "/run", "/usr/lib" }; /* highest first */
	_cleanup_(dropins_done) struct dropins dropins = {};
	bool found = false;
	int r;

	for (size_t i = 0; i < ARRAY_SIZE(dirs); i++) {
		_cleanup_(freep) char *path = NULL, *dropin_dir = NULL;

		if (asprintf(&path, "%s%s/residentd/residentd.conf", root, dirs[i]) < 0) {
			path = NULL;
			return -ENOMEM;
		}
		if (asprintf(&dropin_dir, "%s.d", path) < 0) {
			dropin_dir = NULL;
			return -ENOMEM;
		}
		if (!found) {
			r = read_layer(c, path, warnings);
			if (r == -ENOMEM)
				return r;
			found = r == 0;
		}
		r = dropins_collect(&dropins, dropin_dir, warnings);
		if (r < 0)
			return r;
	}
	if (dropins.n > 0) /* qsort() wants no NULL */
		qsort(dropins.items, dropins.n, sizeof(*dropins.items), dropin_compare);
	for (size_t i = 0; i < dropins.n; i++) {
		if (read_layer(c, dropins.items[i].path, warnings) == -ENOMEM)
			return -ENOMEM;
	}
	return 0;
}
