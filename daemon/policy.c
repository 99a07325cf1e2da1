/* SPDX-License-Identifier: MIT */
/*
 * policy.c: reads policy.d, says what applies to a client, and stores what was set for a user. See policy.h.
 *
 * Owns the table of keys, the sections of all files in their order and their settings. Loop thread: users and
 * groups are looked up in the system's databases while a file is read, never later. Refuses to know what a
 * limit is for, who is connected and what he uses; never logs.
 * Invariant: a setting in memory is inside its bounds; settings of one section stand together.
 */
#include "daemon/policy.h"

#include "daemon/config.h"
#include "daemon/file.h"
#include "daemon/ini.h"
#include "daemon/model/tokenizer.h" /* utf8_valid() */

#include <fnmatch.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <strings.h>
#include <sys/stat.h>

#define STORE_FILE "90-set.conf"

/* In the order in which they apply. */
enum scope { SCOPE_DEFAULT, SCOPE_GROUP, SCOPE_USER, SCOPE_UNIT, SCOPE_MAX };

static const char *const scope_names[] = { "Default", "Group", "User", "Unit" };

enum key_kind { KEY_BOOL, KEY_NUMBER, KEY_COUNT, KEY_BYTES, KEY_CLASS, KEY_GLOBS };

struct key {
	const char *name;
	enum key_kind kind;
	uint64_t min, max;
	uint64_t initial;
	bool may_be_infinite; /* "infinity" is UINT64_MAX */
};

/* clang-format off */
static const struct key keys[POLICY_KEY_MAX] = {
	[POLICY_ALLOW]               = { "Allow",             KEY_BOOL,   0, 1, 1, false },
	[POLICY_WEIGHT]              = { "Weight",            KEY_NUMBER, 1, 10000, 100, false },
	[POLICY_SESSIONS]            = { "Sessions",          KEY_NUMBER, 0, 65536, 32, false },
	[POLICY_QUEUE_MAX]           = { "QueueMax",          KEY_NUMBER, 1, 65536, 32, false },
	[POLICY_TOKENS_PER_DAY]      = { "TokensPerDay",      KEY_COUNT,  0, INT64_MAX, UINT64_MAX, true },
	[POLICY_KV_BYTES_MAX]        = { "KvBytesMax",        KEY_BYTES,  1, INT64_MAX, UINT64_MAX, true },
	[POLICY_CONTEXT_MAX]         = { "ContextMax",        KEY_NUMBER, 16, 1 << 24, UINT64_MAX, true },
	[POLICY_CLASS]               = { "Class",             KEY_CLASS,  0, 0, POLICY_NORMAL, false },
	[POLICY_PAUSE_IDLE]          = { "PauseIdle",         KEY_BOOL,   0, 1, 0, false },
	[POLICY_MAX_THINKING_TOKENS] = { "MaxThinkingTokens", KEY_NUMBER, 0, 1 << 24, UINT64_MAX, true },
	[POLICY_MODELS]              = { "Models",            KEY_GLOBS,  0, 0, 0, false },
};
/* clang-format on */

static const char *const class_names[] = {
	[POLICY_IDLE] = "idle",
	[POLICY_NORMAL] = "normal",
	[POLICY_INTERACTIVE] = "interactive",
};

struct setting {
	enum policy_key key;
	uint64_t number;
	char *models; /* POLICY_MODELS; NULL: all */
	char *source;
};

struct section {
	enum scope scope;
	id_t id;      /* group and user */
	char *unit;   /* glob */
	size_t first; /* of settings[] */
	size_t n;
};

struct policy {
	struct section *sections;
	size_t n_sections, sections_alloc;
	struct setting *settings;
	size_t n_settings, settings_alloc;
};

struct policy *policy_free(struct policy *p)
{
	if (!p)
		return NULL;
	for (size_t i = 0; i < p->n_sections; i++)
		free(p->sections[i].unit);
	for (size_t i = 0; i < p->n_settings; i++) {
		free(p->settings[i].models);
		free(p->settings[i].source);
	}
	free(p->sections);
	free(p->settings);
	free(p);
	return NULL;
}

/* Room for one more item; *alloc items of the given size are at *items. */
static int make_room(void *items, size_t size, size_t n, size_t *alloc)
{
	void **array = items, *p;
	size_t more = MAX(2 * *alloc, (size_t)16);

	if (n < *alloc)
		return 0;
	p = reallocarray(*array, more, size);
	if (!p)
		return -ENOMEM;
	*array = p;
	*alloc = more;
	return 0;
}

static bool is_blank(char ch)
{
	return ch == ' ' || ch == '\t';
}

static int parse_bool(const char *s, uint64_t *ret)
{
	static const char *const words[2][3] = { { "no", "false", "0" }, { "yes", "true", "1" } };

	/* in either case: an Allow=No that is ignored would let somebody in */
	for (size_t i = 0; i < ARRAY_SIZE(words); i++) {
		for (size_t j = 0; j < ARRAY_SIZE(words[i]); j++) {
			if (strcasecmp(s, words[i][j]) == 0) {
				*ret = i;
				return 0;
			}
		}
	}
	return -EINVAL;
}

static int parse_class(const char *s, uint64_t *ret)
{
	for (size_t i = 0; i < ARRAY_SIZE(class_names); i++) {
		if (streq(s, class_names[i])) {
			*ret = i;
			return 0;
		}
	}
	return -EINVAL;
}

/* 200000, 200k, 5M, 1G: powers of 1000. */
static int parse_count(const char *s, uint64_t *ret)
{
	static const struct {
		char suffix;
		uint64_t unit;
	} units[] = { { 'k', 1000 }, { 'K', 1000 }, { 'M', 1000000 }, { 'G', 1000000000 } };
	char digits[24];
	size_t n = strlen(s);
	uint64_t v, unit = 1;
	int r;

	for (size_t i = 0; n > 0 && i < ARRAY_SIZE(units) && unit == 1; i++)
		if (s[n - 1] == units[i].suffix)
			unit = units[i].unit;
	if (unit != 1)
		n--;
	if (n >= sizeof(digits))
		return -ERANGE;
	memcpy(digits, s, n);
	digits[n] = 0;
	r = parse_u64(digits, 0, UINT64_MAX, &v);
	if (r < 0)
		return r;
	if (__builtin_mul_overflow(v, unit, &v))
		return -ERANGE;
	*ret = v;
	return 0;
}

/* Text that stands on one line of a file and comes back from there the same. */
static int check_line(const char *s)
{
	size_t n = strlen(s);

	if (n > INI_LINE_BYTES_MAX - 64 || !utf8_valid(s, n)) /* 64: room for the key */
		return -EINVAL;
	for (; *s; s++)
		if ((unsigned char)*s < ' ' && *s != '\t')
			return -EINVAL;
	return 0;
}

static int parse_value(const struct key *k, const char *value, uint64_t *ret)
{
	uint64_t v = 0;
	int r = -EINVAL;

	if (!*value || (k->may_be_infinite && streq(value, "infinity"))) {
		*ret = *value ? UINT64_MAX : k->initial;
		return 0;
	}
	switch (k->kind) {
	case KEY_BOOL: r = parse_bool(value, &v); break;
	case KEY_NUMBER: r = parse_u64(value, 0, UINT64_MAX, &v); break;
	case KEY_COUNT: r = parse_count(value, &v); break;
	case KEY_BYTES: r = parse_bytes(value, &v); break;
	case KEY_CLASS: return parse_class(value, ret);
	case KEY_GLOBS: return check_line(value);
	}
	if (r < 0)
		return r;
	if (v < k->min || v > k->max)
		return -ERANGE;
	*ret = v;
	return 0;
}

/* What a value of the key may be, for people. */
static char *describe(const struct key *k)
{
	const char *or_infinity = k->may_be_infinite ? " or infinity" : "";
	char *s = NULL;
	int n = -1;

	switch (k->kind) {
	case KEY_BOOL: n = asprintf(&s, "yes or no"); break;
	case KEY_NUMBER:
		n = asprintf(&s, "a number from %" PRIu64 " to %" PRIu64 "%s", k->min, k->max,
			     or_infinity);
		break;
	case KEY_COUNT: n = asprintf(&s, "a number (5000, 200k, 5M, 1G)%s", or_infinity); break;
	case KEY_BYTES: n = asprintf(&s, "a size (64K, 4M, 1.5G)%s", or_infinity); break;
	case KEY_CLASS: n = asprintf(&s, "idle, normal or interactive"); break;
	case KEY_GLOBS: n = asprintf(&s, "patterns of model names, on one line"); break;
	}
	return n < 0 ? NULL : s;
}

int policy_key_from_string(const char *s)
{
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		if (streq(keys[i].name, s))
			return (int)i;
	return -EINVAL;
}

const char *policy_key_to_string(enum policy_key k)
{
	return keys[k].name;
}

int policy_check_value(enum policy_key k, const char *value, char **ret_error)
{
	_cleanup_(freep) char *expected = NULL;
	uint64_t v;

	if (parse_value(&keys[k], value, &v) == 0)
		return 0;
	expected = describe(&keys[k]);
	return fail(ret_error, -EINVAL, "%s=: expected %s", keys[k].name, expected ?: "another value");
}

/* The uid or gid: digits, or a name that the system knows. -EINVAL; -ENOENT. */
static int resolve(enum scope scope, const char *name, id_t *ret)
{
	const struct passwd *pw = NULL;
	const struct group *gr = NULL;
	uint64_t v;
	int r;

	r = parse_u64(name, 0, UINT32_MAX - 1, &v); /* the last one means none */
	if (r == 0) {
		*ret = (id_t)v;
		return 0;
	}
	if (r == -ERANGE)
		return -EINVAL;
	errno = 0;
	if (scope == SCOPE_GROUP)
		gr = getgrnam(name);
	else
		pw = getpwnam(name);
	/* Not found is one thing, not able to look another: the section may forbid something. */
	if (!gr && !pw)
		return errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EIO
			       ? -errno
			       : -ENOENT;
	*ret = gr ? gr->gr_gid : pw->pw_uid;
	return 0;
}

/* What follows the first word of a section's name. */
static const char *section_argument(const char *name)
{
	name += strcspn(name, " \t");
	return name + strspn(name, " \t");
}

/* SCOPE_MAX: none has this name. */
static enum scope section_scope(const char *name)
{
	size_t n = strcspn(name, " \t");
	enum scope scope;

	for (scope = SCOPE_DEFAULT; scope < SCOPE_MAX; scope++)
		if (strlen(scope_names[scope]) == n && memcmp(scope_names[scope], name, n) == 0)
			break;
	if (scope == SCOPE_DEFAULT && *section_argument(name))
		return SCOPE_MAX;
	return scope;
}

static int take_section(struct ini_reader *ini, const char *name)
{
	struct policy *p = ini->userdata;
	const char *argument = section_argument(name);
	struct section s = { .scope = section_scope(name), .first = p->n_settings };
	int r;

	if (s.scope == SCOPE_MAX) {
		ini_warn(ini, "unknown section [%s]", name);
		return 0;
	}
	if (s.scope != SCOPE_DEFAULT && !*argument) {
		ini_warn(ini, "[%s] without a name", name);
		return 0;
	}
	if (s.scope == SCOPE_GROUP || s.scope == SCOPE_USER) {
		r = resolve(s.scope, argument, &s.id);
		if (r < 0) {
			ini_warn(ini, "[%s]: no such %s", name,
				 s.scope == SCOPE_USER ? "user" : "group");
			return 0;
		}
	}
	r = make_room(&p->sections, sizeof(s), p->n_sections, &p->sections_alloc);
	if (r < 0)
		return r;
	if (s.scope == SCOPE_UNIT) {
		s.unit = strdup(argument);
		if (!s.unit)
			return -ENOMEM;
	}
	p->sections[p->n_sections++] = s;
	return 1;
}

static int add_setting(struct policy *p, const struct ini_reader *ini, struct setting s, const char *value)
{
	_cleanup_(freep) char *models = NULL, *source = NULL;
	int r;

	r = make_room(&p->settings, sizeof(s), p->n_settings, &p->settings_alloc);
	if (r < 0)
		return r;
	if (s.key == POLICY_MODELS && *value) {
		models = strdup(value);
		if (!models)
			return -ENOMEM;
	}
	if (asprintf(&source, "%s:%u", ini->path, ini->line) < 0) {
		source = NULL;
		return -ENOMEM;
	}
	s.models = TAKE_PTR(models);
	s.source = TAKE_PTR(source);
	p->settings[p->n_settings++] = s;
	p->sections[p->n_sections - 1].n++;
	return 0;
}

static int take_assignment(struct ini_reader *ini, const char *key, const char *value)
{
	_cleanup_(freep) char *expected = NULL;
	struct setting s = {};
	int k = policy_key_from_string(key);

	if (k < 0) {
		ini_warn(ini, "unknown key %s=", key);
		return 0;
	}
	s.key = (enum policy_key)k;
	if (parse_value(&keys[k], value, &s.number) == 0)
		return add_setting(ini->userdata, ini, s, value);
	expected = describe(&keys[k]);
	ini_warn(ini, "%s=%s: expected %s", key, value, expected ?: "another value");
	return 0;
}

/* Both sorted by name; of one name the state's first. */
static int read_files(struct ini_reader *ini, const struct ini_dropins *layers,
		      const struct ini_dropins *state)
{
	size_t i = 0, j = 0;

	while (i < layers->n || j < state->n) {
		bool take_state =
			i == layers->n ||
			(j < state->n && strcmp(state->items[j].name, layers->items[i].name) <= 0);
		int r = ini_read_layer(ini, take_state ? state->items[j++].path
						       : layers->items[i++].path);

		if (r < 0 && r != -ENOENT)
			return r;
	}
	return 0;
}

int policy_read(const char *root, const char *state_dir, struct policy **ret, struct buf *warnings)
{
	_cleanup_(policy_freep) struct policy *p = calloc(1, sizeof(*p));
	_cleanup_(ini_dropins_done) struct ini_dropins layers = { .strict = true },
						       state = { .strict = true };
	_cleanup_(freep) char *dir = NULL;
	struct ini_reader ini = {
		.section = take_section,
		.assignment = take_assignment,
		.userdata = p,
		.warnings = warnings,
		.strict = true,
	};
	int r;

	if (!p)
		return -ENOMEM;
	r = ini_dropins_add_layers(&layers, root, "policy.d", warnings);
	if (r < 0)
		return r;
	if (state_dir) {
		if (asprintf(&dir, "%s/policy.d", state_dir) < 0) {
			dir = NULL;
			return -ENOMEM;
		}
		r = ini_dropins_add(&state, dir, warnings);
		if (r < 0)
			return r;
	}
	r = read_files(&ini, &layers, &state);
	if (r < 0)
		return r;
	*ret = TAKE_PTR(p);
	return 0;
}

static void set_number(struct policy_limits *l, enum policy_key k, uint64_t v)
{
	switch (k) {
	case POLICY_ALLOW: l->allow = v; break;
	case POLICY_WEIGHT: l->weight = (uint32_t)v; break;
	case POLICY_SESSIONS: l->sessions = (uint32_t)v; break;
	case POLICY_QUEUE_MAX: l->queue_max = (uint32_t)v; break;
	case POLICY_TOKENS_PER_DAY: l->tokens_per_day = v; break;
	case POLICY_KV_BYTES_MAX: l->kv_bytes_max = v; break;
	case POLICY_CONTEXT_MAX: l->context_max = (uint32_t)MIN(v, (uint64_t)UINT32_MAX); break;
	case POLICY_CLASS: l->class = (enum policy_class)v; break;
	case POLICY_PAUSE_IDLE: l->pause_idle = v; break;
	case POLICY_MAX_THINKING_TOKENS:
		l->max_thinking_tokens = v == UINT64_MAX ? -1 : (int64_t)v;
		break;
	case POLICY_MODELS:
	case POLICY_KEY_MAX: break;
	}
}

/* UINT64_MAX: infinity. */
static uint64_t get_number(const struct policy_limits *l, enum policy_key k)
{
	switch (k) {
	case POLICY_ALLOW: return l->allow;
	case POLICY_WEIGHT: return l->weight;
	case POLICY_SESSIONS: return l->sessions;
	case POLICY_QUEUE_MAX: return l->queue_max;
	case POLICY_TOKENS_PER_DAY: return l->tokens_per_day;
	case POLICY_KV_BYTES_MAX: return l->kv_bytes_max;
	case POLICY_CONTEXT_MAX: return l->context_max == UINT32_MAX ? UINT64_MAX : l->context_max;
	case POLICY_CLASS: return l->class;
	case POLICY_PAUSE_IDLE: return l->pause_idle;
	case POLICY_MAX_THINKING_TOKENS:
		return l->max_thinking_tokens < 0 ? UINT64_MAX : (uint64_t)l->max_thinking_tokens;
	case POLICY_MODELS:
	case POLICY_KEY_MAX: break;
	}
	return 0;
}

static bool applies(const struct section *s, const struct policy_who *who)
{
	switch (s->scope) {
	case SCOPE_DEFAULT: return true;
	case SCOPE_USER: return s->id == who->uid;
	case SCOPE_UNIT: return who->unit && fnmatch(s->unit, who->unit, 0) == 0;
	case SCOPE_GROUP:
		for (size_t i = 0; i < who->n_gids; i++)
			if (who->gids[i] == s->id)
				return true;
		return false;
	case SCOPE_MAX: break;
	}
	return false;
}

static void apply(const struct policy *p, const struct section *s, struct policy_limits *l)
{
	for (size_t i = s->first; i < s->first + s->n; i++) {
		const struct setting *setting = &p->settings[i];

		set_number(l, setting->key, setting->number);
		if (setting->key == POLICY_MODELS)
			l->models = setting->models;
		l->source[setting->key] = setting->source;
	}
}

void policy_effective(const struct policy *p, const struct policy_who *who, struct policy_limits *ret)
{
	*ret = (struct policy_limits){};
	for (size_t i = 0; i < POLICY_KEY_MAX; i++) {
		set_number(ret, (enum policy_key)i, keys[i].initial);
		ret->source[i] = "default";
	}
	if (!p)
		return;
	for (enum scope scope = SCOPE_DEFAULT; scope < SCOPE_MAX; scope++)
		for (size_t i = 0; i < p->n_sections; i++)
			if (p->sections[i].scope == scope && applies(&p->sections[i], who))
				apply(p, &p->sections[i], ret);
}

bool policy_model_allowed(const struct policy_limits *l, const char *model)
{
	const char *s = l->models;
	char glob[INI_LINE_BYTES_MAX + 1];

	if (!s)
		return true;
	for (;;) {
		size_t n;

		s += strspn(s, " \t");
		n = strcspn(s, " \t");
		if (n == 0)
			return false;
		if (n < sizeof(glob)) { /* as long as a line at most */
			memcpy(glob, s, n);
			glob[n] = 0;
			if (fnmatch(glob, model, 0) == 0)
				return true;
		}
		s += n;
	}
}

/* The largest unit without a rest. */
static void print_scaled(struct buf *out, uint64_t v, uint64_t base, const char *suffixes)
{
	char suffix[2] = "";

	for (; *suffixes && v > 0 && v % base == 0; suffixes++) {
		v /= base;
		suffix[0] = *suffixes;
	}
	buf_printf(out, "%" PRIu64 "%s", v, suffix);
}

void policy_value_to_string(const struct policy_limits *l, enum policy_key k, struct buf *out)
{
	uint64_t v = get_number(l, k);

	if (keys[k].may_be_infinite && v == UINT64_MAX) {
		buf_printf(out, "infinity");
		return;
	}
	switch (keys[k].kind) {
	case KEY_BOOL: buf_printf(out, "%s", v ? "yes" : "no"); break;
	case KEY_NUMBER: buf_printf(out, "%" PRIu64, v); break;
	case KEY_COUNT: print_scaled(out, v, 1000, "kMG"); break;
	case KEY_BYTES: print_scaled(out, v, 1024, "KMGT"); break;
	case KEY_CLASS: buf_printf(out, "%s", class_names[l->class]); break;
	case KEY_GLOBS: buf_printf(out, "%s", l->models ?: ""); break;
	}
}

/* A line of the stored file. */
struct entry {
	char *section, *key, *value;
	bool mine; /* in a section of the user whose settings change */
};

struct store {
	struct entry *entries;
	size_t n, alloc;
	/* the user */
	const char *user;
	id_t uid;
	bool has_uid;
	/* the section that is being read */
	char *section;
	bool mine;
};

static void entry_done(struct entry *e)
{
	free(e->section);
	free(e->key);
	free(e->value);
}

static void store_done(struct store *st)
{
	for (size_t i = 0; i < st->n; i++)
		entry_done(&st->entries[i]);
	free(st->entries);
	free(st->section);
}

static int store_insert(struct store *st, size_t at, const char *section, const char *key,
			const char *value, bool mine)
{
	struct entry e = { .mine = mine };
	int r;

	r = make_room(&st->entries, sizeof(e), st->n, &st->alloc);
	if (r < 0)
		return r;
	e.section = strdup(section);
	e.key = strdup(key);
	e.value = strdup(value);
	if (!e.section || !e.key || !e.value) {
		entry_done(&e);
		return -ENOMEM;
	}
	memmove(st->entries + at + 1, st->entries + at, (st->n - at) * sizeof(e));
	st->entries[at] = e;
	st->n++;
	return 0;
}

static int store_section(struct ini_reader *ini, const char *name)
{
	struct store *st = ini->userdata;
	const char *argument = section_argument(name);
	id_t uid;

	free(st->section);
	st->section = strdup(name);
	if (!st->section)
		return -ENOMEM;
	/* the user may be there by name and by number */
	st->mine = section_scope(name) == SCOPE_USER &&
		   (streq(argument, st->user) ||
		    (st->has_uid && resolve(SCOPE_USER, argument, &uid) == 0 && uid == st->uid));
	return 1;
}

static int store_assignment(struct ini_reader *ini, const char *key, const char *value)
{
	struct store *st = ini->userdata;

	return store_insert(st, st->n, st->section, key, value, st->mine);
}

static int store_set(struct store *st, const struct policy_pair *pair)
{
	const char *key = keys[pair->key].name;
	_cleanup_(freep) char *section = NULL;
	size_t kept = 0, at = 0;

	for (size_t i = 0; i < st->n; i++) {
		if (st->entries[i].mine && streq(st->entries[i].key, key)) {
			entry_done(&st->entries[i]);
			continue;
		}
		st->entries[kept++] = st->entries[i];
		if (st->entries[kept - 1].mine)
			at = kept;
	}
	st->n = kept;
	if (!*pair->value)
		return 0;
	if (at > 0)
		return store_insert(st, at, st->entries[at - 1].section, key, pair->value, true);
	if (asprintf(&section, "%s %s", scope_names[SCOPE_USER], st->user) < 0) {
		section = NULL;
		return -ENOMEM;
	}
	return store_insert(st, st->n, section, key, pair->value, true);
}

static int store_print(const struct store *st, struct buf *out)
{
	int r;

	r = buf_printf(out, "# Written by `residentctl policy set`, which keeps no comments.\n");
	for (size_t i = 0; i < st->n && r == 0; i++) {
		const struct entry *e = &st->entries[i];
		size_t n = strlen(e->value);
		/* a blank, which does not count, keeps the line from going on in the next */
		const char *end = n > 0 && e->value[n - 1] == '\\' ? " \n" : "\n";

		if (i == 0 || !streq(e->section, e[-1].section))
			r = buf_printf(out, "\n[%s]\n", e->section);
		if (r == 0)
			r = buf_printf(out, "%s=%s%s", e->key, e->value, end);
	}
	if (r == 0 && out->len > INI_FILE_BYTES_MAX)
		r = -EFBIG; /* could not be read again */
	return r;
}

static int store_write(const struct store *st, const char *dir, const char *path)
{
	_cleanup_(buf_done) struct buf text = {};
	int r;

	r = store_print(st, &text);
	if (r < 0)
		return r;
	if (mkdir(dir, 0755) < 0 && errno != EEXIST)
		return -errno;
	return file_replace(path, text.data, text.len, 0644);
}

/* A user that is gone can lose settings but get none. */
static int check_request(struct store *st, const struct policy_pair *pairs, size_t n, char **ret_error)
{
	bool adds = false;
	int r;

	for (size_t i = 0; i < n; i++) {
		r = policy_check_value(pairs[i].key, pairs[i].value, ret_error);
		if (r < 0)
			return r;
		adds = adds || *pairs[i].value;
	}
	if (!*st->user || is_blank(*st->user) || check_line(st->user) < 0)
		return fail(ret_error, -EINVAL, "not the name of a user");
	r = resolve(SCOPE_USER, st->user, &st->uid);
	st->has_uid = r == 0;
	if (r < 0 && adds)
		return fail(ret_error, r, "no such user: %s", st->user);
	return 0;
}

int policy_store_user(const char *dir, const char *user, const struct policy_pair *pairs, size_t n,
		      char **ret_error)
{
	_cleanup_(store_done) struct store st = { .user = user };
	_cleanup_(freep) char *policy_dir = NULL, *path = NULL;
	struct ini_reader ini = {
		.section = store_section,
		.assignment = store_assignment,
		.userdata = &st,
	};
	int r;

	r = check_request(&st, pairs, n, ret_error);
	if (r < 0)
		return r;
	if (asprintf(&policy_dir, "%s/policy.d", dir) < 0) {
		policy_dir = NULL;
		return -ENOMEM;
	}
	if (asprintf(&path, "%s/" STORE_FILE, policy_dir) < 0) {
		path = NULL;
		return -ENOMEM;
	}
	r = ini_read(&ini, path);
	for (size_t i = 0; i < n && (r == 0 || r == -ENOENT); i++)
		r = store_set(&st, &pairs[i]);
	if (r < 0 && r != -ENOENT)
		return fail(ret_error, r, "%s: %s", path, strerror(-r));
	r = store_write(&st, policy_dir, path);
	if (r < 0)
		return fail(ret_error, r, "%s: %s", path, strerror(-r));
	return 0;
}
