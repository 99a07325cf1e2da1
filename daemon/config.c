/* SPDX-License-Identifier: MIT */
/*
 * config.c: reads residentd.conf and its drop-ins into struct config. See config.h; lines are ini.c's.
 *
 * Owns the table of keys: name, field, bounds. Loop thread; the value parsers from any. Refuses to
 * know what a value is for, whether a model exists or how many processors there are; never logs.
 * Invariant: a field changes only to a value inside its bounds.
 */
#include "daemon/config.h"

#include "daemon/ini.h"

#include <inttypes.h>
#include <syslog.h>

enum key_kind {
	KEY_PATH,
	KEY_NUMBER, /* uint32_t */
	KEY_BYTES,
	KEY_VRAM, /* uint64_t: auto, off or bytes */
	KEY_SPAN,
	KEY_TOKENS, /* int64_t, or infinity: -1 */
	KEY_WORD,   /* int or an enum of its size */
};

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

static const struct word tier_words[] = {
	{ "auto", RESIDENCY_AUTO },
	{ "mapped", RESIDENCY_MAPPED },
	{ "arena", RESIDENCY_ARENA },
	{},
};

static const struct word policy_words[] = {
	{ "clock-lfu", EVICT_CLOCK_LFU },
	{ "lfu", EVICT_LFU },
	{ "lru", EVICT_LRU },
	{ "s3-fifo", EVICT_S3_FIFO },
	{},
};

static const struct word bool_words[] = { { "yes", 1 }, { "no", 0 }, {} };

static const struct word prefetch_words[] = { { "auto", -1 }, { "off", 0 }, { "on", 1 }, {} };

struct key {
	const char *section, *name;
	enum key_kind kind;
	size_t offset;
	uint64_t min, max;
	bool may_auto; /* "auto" and 0 are 0, whatever min says */
	const struct word *words;
};

#define FIELD(f) offsetof(struct config, f)

/* clang-format off */
static const struct key keys[] = {
	{ "Model",   "Path",              KEY_PATH,    FIELD(model_path),          0, 0, false, NULL },
	{ "Model",   "Context",           KEY_NUMBER,  FIELD(context),             16, 1 << 24, true, NULL },
	{ "Engine",  "Threads",           KEY_NUMBER,  FIELD(threads),             1, 256, true, NULL },
	{ "Engine",  "TuneKernels",       KEY_WORD,    FIELD(tune_kernels),        0, 0, false, bool_words },
	{ "Engine",  "BatchTokens",       KEY_NUMBER,  FIELD(batch_tok),           1, 4096, true, NULL },
	{ "Engine",  "KvBytesMax",        KEY_BYTES,   FIELD(kv_bytes_max),        1, INT64_MAX, true, NULL },
	{ "Engine",  "KvType",            KEY_WORD,    FIELD(kv_type),             0, 0, false, kv_words },
	{ "Memory",  "HostTier",          KEY_WORD,    FIELD(host_tier),           0, 0, false, tier_words },
	{ "Memory",  "HostBudget",        KEY_BYTES,   FIELD(host_budget_bytes),   1, INT64_MAX, true, NULL },
	{ "Memory",  "MemoryReserve",     KEY_BYTES,   FIELD(memory_reserve_bytes), 1, INT64_MAX, true, NULL },
	{ "Memory",  "VramBudget",        KEY_VRAM,    FIELD(vram_budget_bytes),   1, INT64_MAX, false, NULL },
	{ "Memory",  "VramReserve",       KEY_BYTES,   FIELD(vram_reserve_bytes),  0, INT64_MAX, false, NULL },
	{ "Memory",  "HostIdleSec",       KEY_SPAN,    FIELD(host_idle_us),        1000000, INT64_MAX, false, NULL },
	{ "Memory",  "EvictionPolicy",    KEY_WORD,    FIELD(evict_policy),        0, 0, false, policy_words },
	{ "Memory",  "Prefetch",          KEY_WORD,    FIELD(prefetch),            0, 0, false, prefetch_words },
	{ "Memory",  "DiskQueueDepth",    KEY_NUMBER,  FIELD(disk_queue_depth),    1, 256, true, NULL },
	{ "Service", "QueueMax",          KEY_NUMBER,  FIELD(queue_max),           1, 65536, false, NULL },
	{ "Service", "SessionsMax",       KEY_NUMBER,  FIELD(sessions_max),        1, 65536, false, NULL },
	{ "Service", "SessionsPerUser",   KEY_NUMBER,  FIELD(sessions_per_user),   1, 65536, false, NULL },
	{ "Service", "ConnectionsMax",    KEY_NUMBER,  FIELD(connections_max),     1, 65536, false, NULL },
	{ "Service", "KeepSec",           KEY_SPAN,    FIELD(keep_us),             0, INT64_MAX, false, NULL },
	{ "Service", "IdleExitSec",       KEY_SPAN,    FIELD(idle_exit_us),        1000000, INT64_MAX, false, NULL },
	{ "Service", "MessageMax",        KEY_BYTES,   FIELD(message_bytes_max),   64 << 10, 64 << 20, false, NULL },
	{ "Service", "MaxTokens",         KEY_NUMBER,  FIELD(max_tokens),          1, 1 << 24, false, NULL },
	{ "Service", "MaxThinkingTokens", KEY_TOKENS,  FIELD(max_thinking_tokens), 0, 1 << 24, false, NULL },
	{ "Log",     "Level",             KEY_WORD,    FIELD(log_level),           0, 0, false, level_words },
};
/* clang-format on */

void config_defaults(struct config *c)
{
	*c = (struct config){
		.tune_kernels = 1,
		.kv_type = CONFIG_KV_AUTO,
		.host_tier = RESIDENCY_AUTO,
		.vram_reserve_bytes = 512 << 20,
		.host_idle_us = 600 * UINT64_C(1000000),
		.evict_policy = EVICT_LFU,
		.prefetch = -1,
		.queue_max = 64,
		.sessions_max = 256,
		.sessions_per_user = 32,
		.connections_max = 512,
		.keep_us = 3600 * UINT64_C(1000000),
		.idle_exit_us = 900 * UINT64_C(1000000),
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

int parse_vram(const char *s, uint64_t *ret)
{
	uint64_t v = 0;
	int r = 0;

	if (streq(s, "off")) {
		v = CONFIG_VRAM_OFF;
	} else if (!streq(s, "auto")) {
		r = parse_bytes(s, &v);
		/* A plain 0 could be meant as either of them. */
		if (r == 0 && (v < 1 || v > INT64_MAX))
			r = -ERANGE;
	}
	if (r == 0)
		*ret = v;
	return r;
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
		[KEY_NUMBER] = sizeof(uint32_t), [KEY_BYTES] = sizeof(uint64_t),
		[KEY_VRAM] = sizeof(uint64_t),   [KEY_SPAN] = sizeof(uint64_t),
		[KEY_TOKENS] = sizeof(int64_t),  [KEY_WORD] = sizeof(int),
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
	case KEY_VRAM: r = parse_vram(value, field); break;
	case KEY_TOKENS:
		if (streq(value, "infinity"))
			v = UINT64_MAX;
		else
			r = parse_number(k, value, &v);
		if (r == 0)
			*(int64_t *)field = (int64_t)v;
		break;
	case KEY_WORD:
		r = parse_word(k->words, value, &word);
		if (r == 0)
			*(int *)field = word;
		break;
	}
	return r;
}

/* "expected auto, f16 or f32" */
static void warn_word(const struct ini_reader *r, const struct key *k, const char *value)
{
	char expected[128] = "";
	size_t len = 0;

	for (const struct word *w = k->words; w->name; w++)
		len += (size_t)snprintf(expected + len, sizeof(expected) - len, "%s%s",
					w == k->words ? ""
					: w[1].name   ? ", "
						      : " or ",
					w->name);
	ini_warn(r, "%s=%s: expected %s", k->name, value, expected);
}

static void warn_value(const struct ini_reader *r, const struct key *k, const char *value)
{
	const char *or_auto = k->may_auto ? "auto or " : "";

	switch (k->kind) {
	case KEY_PATH: ini_warn(r, "%s=%s: expected an absolute path", k->name, value); break;
	case KEY_NUMBER:
		ini_warn(r, "%s=%s: expected %sa number from %" PRIu64 " to %" PRIu64, k->name,
			 value, or_auto, k->min, k->max);
		break;
	case KEY_BYTES:
		ini_warn(r, "%s=%s: expected %sa size (64K, 4M, 1.5G) from %" PRIu64 " to %" PRIu64 " bytes",
			 k->name, value, or_auto, k->min, k->max);
		break;
	case KEY_VRAM:
		ini_warn(r, "%s=%s: expected auto, off or a size (64K, 4M, 1.5G) from 1 to %" PRIu64 " bytes",
			 k->name, value, k->max);
		break;
	case KEY_SPAN:
		ini_warn(r, "%s=%s: expected a time span (90s, 1h 30min, infinity)", k->name, value);
		break;
	case KEY_TOKENS:
		ini_warn(r, "%s=%s: expected infinity or a number from %" PRIu64 " to %" PRIu64,
			 k->name, value, k->min, k->max);
		break;
	case KEY_WORD: warn_word(r, k, value); break;
	}
}

/* What reads the files. */
struct reader {
	struct config *c;
	const char *section; /* of keys[] */
};

static int take_section(struct ini_reader *ini, const char *name)
{
	struct reader *r = ini->userdata;

	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		if (streq(keys[i].section, name)) {
			r->section = keys[i].section;
			return 1;
		}
	}
	ini_warn(ini, "unknown section [%s]", name);
	return 0;
}

static int take_assignment(struct ini_reader *ini, const char *key, const char *value)
{
	const struct reader *r = ini->userdata;
	int e;

	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		if (!streq(keys[i].section, r->section) || !streq(keys[i].name, key))
			continue;
		e = set(r->c, &keys[i], value);
		if (e == -ENOMEM)
			return e;
		if (e < 0)
			warn_value(ini, &keys[i], value);
		return 0;
	}
	ini_warn(ini, "unknown key %s= in [%s]", key, r->section);
	return 0;
}

static struct ini_reader make_reader(struct reader *r, struct buf *warnings)
{
	return (struct ini_reader){
		.section = take_section,
		.assignment = take_assignment,
		.userdata = r,
		.warnings = warnings,
	};
}

int config_read(struct config *c, const char *path, struct buf *warnings)
{
	struct reader reader = { .c = c };
	struct ini_reader ini = make_reader(&reader, warnings);

	return ini_read(&ini, path);
}

/* The first of them that exists. */
static int read_main_file(struct ini_reader *ini, const char *root)
{
	static const char *const dirs[] = { "/etc", "/run", "/usr/lib" };
	int r = -ENOENT;

	for (size_t i = 0; i < ARRAY_SIZE(dirs) && r == -ENOENT; i++) {
		_cleanup_(freep) char *path = NULL;

		if (asprintf(&path, "%s%s/residentd/residentd.conf", root, dirs[i]) < 0) {
			path = NULL;
			return -ENOMEM;
		}
		r = ini_read_layer(ini, path);
	}
	return r;
}

int config_read_layers(struct config *c, const char *root, struct buf *warnings)
{
	struct reader reader = { .c = c };
	struct ini_reader ini = make_reader(&reader, warnings);
	_cleanup_(ini_dropins_done) struct ini_dropins dropins = {};
	int r;

	r = read_main_file(&ini, root);
	if (r < 0 && r != -ENOENT)
		return r;
	r = ini_dropins_add_layers(&dropins, root, "residentd.conf.d", warnings);
	if (r < 0)
		return r;
	for (size_t i = 0; i < dropins.n; i++) {
		r = ini_read_layer(&ini, dropins.items[i].path);
		if (r < 0 && r != -ENOENT)
			return r;
	}
	return 0;
}
