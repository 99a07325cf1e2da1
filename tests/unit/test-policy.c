/* SPDX-License-Identifier: MIT */
/* test-policy.c: values, who gets what from where, files and their layers, what is stored, and the shipped example. */
#include "tests/test.h"

#include "daemon/policy.h"

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>

#define ETC   "r/etc/residentd/policy.d/"
#define RUN   "r/run/residentd/policy.d/"
#define LIB   "r/usr/lib/residentd/policy.d/"
#define STATE "state/policy.d/"

static char root[256];

static int make_root(void **state)
{
	const char *tmp = getenv("TMPDIR");

	(void)state;
	snprintf(root, sizeof(root), "%s/residentd-test-policy-XXXXXX", tmp ? tmp : P_tmpdir);
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

/* Every test starts with an empty directory. */
static int start_empty(void **state)
{
	return remove_root(state) == 0 && mkdir(root, 0700) == 0 ? 0 : -1;
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

static void make_directories_of(const char *name)
{
	char path[512];

	snprintf(path, sizeof(path), "%s", at(name));
	for (char *slash = path + strlen(root) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
		*slash = 0;
		mkdir(path, 0755);
	}
}

static void write_bytes(const char *name, const void *data, size_t len)
{
	FILE *f;

	make_directories_of(name);
	f = fopen(at(name), "we");
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
	char text[8192];
	FILE *f = fopen(at(name), "re");
	size_t n;

	assert_non_null(f);
	n = fread(text, 1, sizeof(text) - 1, f);
	text[n] = 0;
	fclose(f);
	assert_string_equal(text, expected);
}

/* Warnings without the directory, good until the next call. */
static const char *without_root(const struct buf *b)
{
	static char text[256 * 1024];
	size_t n = 0;

	for (const char *p = b->data; p && *p;)
		if (startswith(p, root))
			p += strlen(root) + 1;
		else
			text[n++] = *p++;
	text[n] = 0;
	return text;
}

static struct policy *read_policy(const char *expected_warnings)
{
	_cleanup_(buf_done) struct buf w = {};
	struct policy *p = NULL;

	assert_int_equal(policy_read(at("r"), at("state"), &p, &w), 0);
	assert_non_null(p);
	assert_string_equal(without_root(&w), expected_warnings);
	return p;
}

/* One file of one text: r/etc/residentd/policy.d/f.conf. */
static struct policy *policy_of(const char *text, const char *expected_warnings)
{
	write_file(ETC "f.conf", text);
	return read_policy(expected_warnings);
}

static struct policy_limits limits_of(const struct policy *p, uid_t uid, gid_t gid, const char *unit)
{
	struct policy_limits l;

	policy_effective(
		p, &(struct policy_who){ .uid = uid, .gids = &gid, .n_gids = 1, .unit = unit }, &l);
	return l;
}

/* "Weight=300 f.conf:2": the value and where it comes from, without directories; good until the next call. */
static const char *shown(const struct policy_limits *l, enum policy_key k)
{
	static char text[8192];
	_cleanup_(buf_done) struct buf value = {};
	const char *slash = strrchr(l->source[k], '/');

	policy_value_to_string(l, k, &value);
	snprintf(text, sizeof(text), "%s=%s %s", policy_key_to_string(k),
		 value.data ? value.data : "", slash ? slash + 1 : l->source[k]);
	return text;
}

static void assert_defaults(const struct policy_limits *l)
{
	assert_true(l->allow);
	assert_int_equal(l->weight, 100);
	assert_int_equal(l->sessions, 32);
	assert_int_equal(l->queue_max, 32);
	assert_true(l->tokens_per_day == UINT64_MAX);
	assert_true(l->kv_bytes_max == UINT64_MAX);
	assert_true(l->context_max == UINT32_MAX);
	assert_int_equal(l->class, POLICY_NORMAL);
	assert_true(l->max_thinking_tokens == -1);
	assert_null(l->models);
}

static void nothing_set(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	l = limits_of(NULL, 1, 1, NULL);
	assert_defaults(&l);
	p = read_policy(""); /* there is not even a directory */
	l = limits_of(p, 1, 1, "x.service");
	assert_defaults(&l);
	for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++)
		assert_string_equal(l.source[k], "default");
	assert_true(policy_model_allowed(&l, "anything"));
	policy_free(p);
	assert_int_equal(policy_read(at("r"), NULL, &p, NULL), 0);
	assert_null(policy_free(NULL));
}

static void names_of_keys(void **state)
{
	(void)state;
	for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++)
		assert_int_equal(policy_key_from_string(policy_key_to_string(k)), k);
	assert_int_equal(policy_key_from_string("KvBytesMax"), POLICY_KV_BYTES_MAX);
	assert_int_equal(policy_key_from_string("weight"), -EINVAL);
	assert_int_equal(policy_key_from_string("Weight "), -EINVAL);
	assert_int_equal(policy_key_from_string(""), -EINVAL);
}

static void every_key_is_read(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	p = policy_of("[Default]\nAllow=no\nWeight=1\nSessions=0\nQueueMax=65536\nTokensPerDay=200k\n"
		      "KvBytesMax=1.5G\nContextMax=16\nClass=idle\nPauseIdle=yes\nMaxThinkingTokens=0\nModels=a* b\n",
		      "");
	l = limits_of(p, 1, 1, NULL);
	assert_false(l.allow);
	assert_int_equal(l.weight, 1);
	assert_int_equal(l.sessions, 0);
	assert_int_equal(l.queue_max, 65536);
	assert_int_equal(l.tokens_per_day, 200000);
	assert_int_equal(l.kv_bytes_max, 1610612736);
	assert_int_equal(l.context_max, 16);
	assert_int_equal(l.class, POLICY_IDLE);
	assert_true(l.pause_idle);
	assert_int_equal(l.max_thinking_tokens, 0);
	assert_string_equal(l.models, "a* b");
	for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++) {
		char expected[16];

		snprintf(expected, sizeof(expected), "/f.conf:%d", (int)k + 2);
		assert_non_null(strstr(l.source[k], expected));
		assert_true(startswith(l.source[k], root)); /* the whole path */
	}
}

/* What a value is read as, and printed as. */
static void good_values(void **state)
{
	/* clang-format off */
	static const struct {
		enum policy_key key;
		const char *value, *printed;
	} cases[] = {
		{ POLICY_ALLOW, "yes", "yes" }, { POLICY_ALLOW, "true", "yes" }, { POLICY_ALLOW, "1", "yes" },
		{ POLICY_ALLOW, "no", "no" }, { POLICY_ALLOW, "false", "no" }, { POLICY_ALLOW, "0", "no" },
		{ POLICY_ALLOW, "No", "no" }, { POLICY_ALLOW, "FALSE", "no" }, { POLICY_ALLOW, "", "yes" },
		{ POLICY_WEIGHT, "1", "1" }, { POLICY_WEIGHT, "10000", "10000" }, { POLICY_WEIGHT, "", "100" },
		{ POLICY_SESSIONS, "0", "0" }, { POLICY_SESSIONS, "65536", "65536" }, { POLICY_SESSIONS, "", "32" },
		{ POLICY_QUEUE_MAX, "1", "1" }, { POLICY_QUEUE_MAX, "65536", "65536" }, { POLICY_QUEUE_MAX, "", "32" },
		{ POLICY_TOKENS_PER_DAY, "0", "0" }, { POLICY_TOKENS_PER_DAY, "999", "999" },
		{ POLICY_TOKENS_PER_DAY, "1000", "1k" }, { POLICY_TOKENS_PER_DAY, "1k", "1k" }, { POLICY_TOKENS_PER_DAY, "1K", "1k" },
		{ POLICY_TOKENS_PER_DAY, "1024", "1024" }, { POLICY_TOKENS_PER_DAY, "2000k", "2M" },
		{ POLICY_TOKENS_PER_DAY, "5M", "5M" }, { POLICY_TOKENS_PER_DAY, "1G", "1G" }, { POLICY_TOKENS_PER_DAY, "5000G", "5000G" },
		{ POLICY_TOKENS_PER_DAY, "9223372036854775807", "9223372036854775807" },
		{ POLICY_TOKENS_PER_DAY, "9223372036G", "9223372036G" },
		{ POLICY_TOKENS_PER_DAY, "infinity", "infinity" }, { POLICY_TOKENS_PER_DAY, "", "infinity" },
		{ POLICY_KV_BYTES_MAX, "1", "1" }, { POLICY_KV_BYTES_MAX, "1000", "1000" }, { POLICY_KV_BYTES_MAX, "1024", "1K" },
		{ POLICY_KV_BYTES_MAX, "4M", "4M" }, { POLICY_KV_BYTES_MAX, "1.5G", "1536M" }, { POLICY_KV_BYTES_MAX, "2T", "2T" },
		{ POLICY_KV_BYTES_MAX, "2048T", "2048T" }, { POLICY_KV_BYTES_MAX, "9223372036854775807", "9223372036854775807" },
		{ POLICY_KV_BYTES_MAX, "infinity", "infinity" }, { POLICY_KV_BYTES_MAX, "", "infinity" },
		{ POLICY_CONTEXT_MAX, "16", "16" }, { POLICY_CONTEXT_MAX, "16777216", "16777216" },
		{ POLICY_CONTEXT_MAX, "infinity", "infinity" }, { POLICY_CONTEXT_MAX, "", "infinity" },
		{ POLICY_CLASS, "idle", "idle" }, { POLICY_CLASS, "normal", "normal" },
		{ POLICY_CLASS, "interactive", "interactive" }, { POLICY_CLASS, "", "normal" },
		{ POLICY_PAUSE_IDLE, "yes", "yes" }, { POLICY_PAUSE_IDLE, "no", "no" }, { POLICY_PAUSE_IDLE, "", "no" },
		{ POLICY_MAX_THINKING_TOKENS, "0", "0" }, { POLICY_MAX_THINKING_TOKENS, "16777216", "16777216" },
		{ POLICY_MAX_THINKING_TOKENS, "infinity", "infinity" }, { POLICY_MAX_THINKING_TOKENS, "", "infinity" },
		{ POLICY_MODELS, "a", "a" }, { POLICY_MODELS, "qwen*  [a-c]?.gguf\tx", "qwen*  [a-c]?.gguf\tx" },
		{ POLICY_MODELS, "\xc3\xa9", "\xc3\xa9" }, { POLICY_MODELS, "a=b # c ; d", "a=b # c ; d" }, { POLICY_MODELS, "", "" },
	};
	/* clang-format on */

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		_cleanup_(policy_freep) struct policy *p = NULL;
		const char *name = policy_key_to_string(cases[i].key);
		struct policy_limits l;
		char text[256], expected[256];

		/* over another value, so that an empty one shows too */
		snprintf(text, sizeof(text),
			 "[Default]\nAllow=no\nWeight=7\nSessions=7\nQueueMax=7\nTokensPerDay=7\n"
			 "KvBytesMax=7\nContextMax=77\nClass=idle\nPauseIdle=yes\nMaxThinkingTokens=7\nModels=7\n%s=%s\n",
			 name, cases[i].value);
		snprintf(expected, sizeof(expected), "%s=%s f.conf:13", name, cases[i].printed);
		p = policy_of(text, "");
		l = limits_of(p, 1, 1, NULL);
		assert_string_equal(shown(&l, cases[i].key), expected);
		assert_int_equal(policy_check_value(cases[i].key, cases[i].value, NULL), 0);
		assert_int_equal(policy_check_value(cases[i].key, cases[i].printed, NULL), 0);
	}
}

/* A warning that says what fits; the old value and its source stay. Models= takes whatever a line can hold. */
static void bad_values_change_nothing(void **state)
{
	/* clang-format off */
	static const struct {
		enum policy_key key;
		const char *kept, *expected, *values[14];
	} cases[] = {
		{ POLICY_ALLOW, "no", "yes or no",
		  { "2", "-1", "maybe", "y", "n", "on", "off", "yes no", "00", "\"no\"", "infinity", "none" } },
		{ POLICY_WEIGHT, "7", "a number from 1 to 10000",
		  { "-1", "0", "10001", "4294967297", "99999999999999999999", "1.5", "1k", "+7", "0x7", "7 8", "auto", "infinity" } },
		{ POLICY_SESSIONS, "7", "a number from 0 to 65536",
		  { "-1", "65537", "4294967296", "99999999999999999999", "1.5", "1k", "auto", "infinity" } },
		{ POLICY_QUEUE_MAX, "7", "a number from 1 to 65536",
		  { "-1", "0", "65537", "4294967297", "99999999999999999999", "1.5", "1k", "auto", "infinity" } },
		{ POLICY_TOKENS_PER_DAY, "7", "a number (5000, 200k, 5M, 1G) or infinity",
		  { "-1", "-1k", "9223372036854775808", "9223372037G", "18446744073709552k", "99999999999999999999", "1.5k", "k", "1kk",
		    "1T", "1 k", "Infinity", "000000000000000000000000001", "1kB" } },
		{ POLICY_KV_BYTES_MAX, "7", "a size (64K, 4M, 1.5G) or infinity",
		  { "-1", "0", "0K", "9223372036854775808", "8388608T", "99999999999999999999", "1.5", "1k", "1KB", "1Q", "auto", "INFINITY" } },
		{ POLICY_CONTEXT_MAX, "77", "a number from 16 to 16777216 or infinity",
		  { "-1", "0", "15", "16777217", "4294967295", "4294967312", "18446744073709551615", "99999999999999999999", "8K", "auto" } },
		{ POLICY_CLASS, "idle", "idle, normal or interactive",
		  { "Idle", "0", "batch", "idle normal", "infinity" } },
		{ POLICY_PAUSE_IDLE, "yes", "yes or no", { "2", "on", "idle", "infinity" } },
		{ POLICY_MAX_THINKING_TOKENS, "7", "a number from 0 to 16777216 or infinity",
		  { "-1", "16777217", "18446744073709551615", "99999999999999999999", "1k", "off", "auto" } },
		{ POLICY_MODELS, "7", "patterns of model names, on one line", { "a\x01", "a\x1b[2J", "a\rb" } },
	};
	/* clang-format on */

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		for (const char *const *value = cases[i].values;
		     value < cases[i].values + ARRAY_SIZE(cases[i].values) && *value; value++) {
			_cleanup_(policy_freep) struct policy *p = NULL;
			_cleanup_(freep) char *error = NULL;
			const char *name = policy_key_to_string(cases[i].key);
			char text[256], expected[256];
			struct policy_limits l;

			snprintf(text, sizeof(text), "[Default]\n%s=%s\n%s=%s\n", name,
				 cases[i].kept, name, *value);
			snprintf(expected, sizeof(expected),
				 ETC "f.conf:3: %s=%s: expected %s, ignoring\n", name, *value,
				 cases[i].expected);
			p = policy_of(text, expected);
			l = limits_of(p, 1, 1, NULL);
			snprintf(expected, sizeof(expected), "%s=%s f.conf:2", name, cases[i].kept);
			assert_string_equal(shown(&l, cases[i].key), expected);

			snprintf(expected, sizeof(expected), "%s=: expected %s", name,
				 cases[i].expected);
			assert_int_equal(policy_check_value(cases[i].key, *value, &error), -EINVAL);
			assert_string_equal(error, expected);
			assert_int_equal(policy_check_value(cases[i].key, *value, NULL), -EINVAL);
		}
	}
}

/* What no line of a file can hold, but a message can. */
static void values_that_are_no_line(void **state)
{
	_cleanup_(freep) char *text = malloc(5000);

	(void)state;
	assert_non_null(text);
	assert_int_equal(policy_check_value(POLICY_MODELS, "a\n[User root]\nAllow=no", NULL), -EINVAL);
	assert_int_equal(policy_check_value(POLICY_WEIGHT, "1\n", NULL), -EINVAL);
	assert_int_equal(policy_check_value(POLICY_ALLOW, "yes\nWeight=1", NULL), -EINVAL);
	assert_int_equal(policy_check_value(POLICY_MODELS, "\xff", NULL), -EINVAL);
	assert_int_equal(policy_check_value(POLICY_MODELS, "\xed\xa0\x80", NULL), -EINVAL);
	memset(text, 'a', 5000);
	text[4032] = 0;
	assert_int_equal(policy_check_value(POLICY_MODELS, text, NULL), 0);
	text[4032] = 'a';
	text[4033] = 0;
	assert_int_equal(policy_check_value(POLICY_MODELS, text, NULL), -EINVAL);
}

/* [Default] < [Group] < [User] < [Unit], wherever they stand. */
static void scopes_in_their_order(void **state)
{
	static const char text[] = "[Unit backup*.service]\nWeight=4\n"
				   "[User 1000]\nWeight=3\nSessions=3\n"
				   "[Group 500]\nWeight=2\nSessions=2\nQueueMax=2\n"
				   "[Default]\nWeight=1\nSessions=1\nQueueMax=1\nContextMax=100\n";
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	p = policy_of(text, "");
	l = limits_of(p, 1000, 500, "backup-home.service");
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=4 f.conf:2");
	assert_string_equal(shown(&l, POLICY_SESSIONS), "Sessions=3 f.conf:5");
	assert_string_equal(shown(&l, POLICY_QUEUE_MAX), "QueueMax=2 f.conf:9");
	assert_string_equal(shown(&l, POLICY_CONTEXT_MAX), "ContextMax=100 f.conf:14");
	assert_string_equal(shown(&l, POLICY_CLASS), "Class=normal default");
	l = limits_of(p, 1000, 500, NULL);
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=3 f.conf:4");
	l = limits_of(p, 1001, 500, "backup.timer");
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=2 f.conf:7");
	l = limits_of(p, 1001, 501, "backup-home.service.x");
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=1 f.conf:11");
	assert_string_equal(shown(&l, POLICY_SESSIONS), "Sessions=1 f.conf:12");
	l = limits_of(p, 500, 1000, "");
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=1 f.conf:11");
}

/* Of sections of one kind the later one wins, value by value; an empty value is the default, and that is a setting too. */
static void later_settings_win(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	const gid_t gids[] = { 30, 10, 20 };
	struct policy_limits l;

	(void)state;
	p = policy_of("[Group 10]\nWeight=10\nSessions=10\n"
		      "[Group 20]\nWeight=20\n"
		      "[Group 10]\nQueueMax=10\nQueueMax=11\n"
		      "[User 5]\nWeight=5\n[User 5]\nWeight=\nSessions=\nModels=\n"
		      "[Default]\nModels=a\n[Group 40]\nWeight=40\n"
		      "[Unit *]\nClass=idle\n[Unit a.service]\nClass=interactive\n[Unit a*]\nContextMax=20\n",
		      "");
	policy_effective(p, &(struct policy_who){ .uid = 6, .gids = gids, .n_gids = 3 }, &l);
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=20 f.conf:5");
	assert_string_equal(shown(&l, POLICY_SESSIONS), "Sessions=10 f.conf:3");
	assert_string_equal(shown(&l, POLICY_QUEUE_MAX), "QueueMax=11 f.conf:8");
	assert_string_equal(shown(&l, POLICY_MODELS), "Models=a f.conf:16");
	policy_effective(
		p, &(struct policy_who){ .uid = 5, .gids = gids, .n_gids = 3, .unit = "a.service" }, &l);
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=100 f.conf:12");
	assert_string_equal(shown(&l, POLICY_SESSIONS), "Sessions=32 f.conf:13");
	assert_string_equal(shown(&l, POLICY_MODELS), "Models= f.conf:14");
	assert_null(l.models);
	assert_string_equal(shown(&l, POLICY_CLASS), "Class=interactive f.conf:22");
	assert_string_equal(shown(&l, POLICY_CONTEXT_MAX), "ContextMax=20 f.conf:24");
	policy_effective(p, &(struct policy_who){ .uid = 6 }, &l); /* without any group */
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=100 default");
}

static void users_and_groups_by_name(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	p = policy_of("[User root]\nWeight=2\n[Group root]\nSessions=3\n[User   0]\nQueueMax=4\n"
		      "[Group\t4294967294]\nContextMax=50\n",
		      "");
	l = limits_of(p, 0, 7, NULL);
	assert_int_equal(l.weight, 2);
	assert_int_equal(l.sessions, 32);
	assert_int_equal(l.queue_max, 4);
	l = limits_of(p, 7, 0, NULL);
	assert_int_equal(l.weight, 100);
	assert_int_equal(l.sessions, 3);
	l = limits_of(p, 7, 4294967294, NULL);
	assert_int_equal(l.context_max, 50);
}

/* One warning for the section, none for its lines, and nobody gets what stands there. */
static void sections_for_nobody(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	p = policy_of(
		"Weight=1\n[User no-such-user-here]\nWeight=1\nNope=1\n[Group no such group]\nWeight=1\n"
		"[User]\nWeight=1\n[Group ]\nWeight=1\n[Unit]\nWeight=1\n[Default x]\nWeight=1\n"
		"[default]\nWeight=1\n[Users root]\nWeight=1\n[User root\nWeight=1\n[]\nWeight=1\n"
		"[User 4294967295]\nWeight=1\n[User 99999999999999999999]\nWeight=1\n[User -1]\nWeight=1\n"
		"[User root ]\nWeight=1\n[ Default]\nWeight=1\n[Default]\nNope=1\nweight=1\njust words\n"
		"Sessions=5\n",
		ETC "f.conf:1: Weight= before any section, ignoring\n" ETC
		    "f.conf:2: [User no-such-user-here]: no such user, ignoring\n" ETC
		    "f.conf:5: [Group no such group]: no such group, ignoring\n" ETC
		    "f.conf:7: [User] without a name, ignoring\n" ETC
		    "f.conf:9: [Group ] without a name, ignoring\n" ETC
		    "f.conf:11: [Unit] without a name, ignoring\n" ETC
		    "f.conf:13: unknown section [Default x], ignoring\n" ETC
		    "f.conf:15: unknown section [default], ignoring\n" ETC
		    "f.conf:17: unknown section [Users root], ignoring\n" ETC
		    "f.conf:19: a section without ']', ignoring\n" ETC
		    "f.conf:21: unknown section [], ignoring\n" ETC
		    "f.conf:23: [User 4294967295]: no such user, ignoring\n" ETC
		    "f.conf:25: [User 99999999999999999999]: no such user, ignoring\n" ETC
		    "f.conf:27: [User -1]: no such user, ignoring\n" ETC
		    "f.conf:29: [User root ]: no such user, ignoring\n" ETC
		    "f.conf:31: unknown section [ Default], ignoring\n" ETC
		    "f.conf:34: unknown key Nope=, ignoring\n" ETC
		    "f.conf:35: unknown key weight=, ignoring\n" ETC
		    "f.conf:36: expected Key=value, ignoring\n");
	l = limits_of(p, UINT32_MAX, UINT32_MAX, "x.service");
	assert_int_equal(l.sessions, 5);
	l.sessions = 32;
	assert_defaults(&l);
	l = limits_of(p, 0, 0, "x.service");
	assert_int_equal(l.weight, 100);
}

static void units_are_patterns(void **state)
{
	static const struct {
		const char *glob, *unit;
		bool matches;
	} cases[] = {
		{ "cron.service", "cron.service", true },
		{ "cron.service", "xcron.service", false },
		{ "cron.service", "cronxservice", false },
		{ "*", "", true },
		{ "*", "user@1000.service", true },
		{ "backup-[0-9].service", "backup-7.service", true },
		{ "backup-[0-9].service", "backup-x.service", false },
		{ "backup-[0-9]", "backup-7", true }, /* the last bracket is the section's */
		{ "a?.service", "ab.service", true },
		{ "a?.service", "a.service", false },
		{ "a b*.service", "a bc.service", true },
		{ "[", "[", true },
		{ "*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b",
		  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.service", false },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		_cleanup_(policy_freep) struct policy *p = NULL;
		struct policy_limits l;
		char text[128];

		snprintf(text, sizeof(text), "[Unit %s]\nWeight=5\n", cases[i].glob);
		p = policy_of(text, "");
		l = limits_of(p, 1, 1, cases[i].unit);
		if ((l.weight == 5) != cases[i].matches)
			fail_msg("%s %s", cases[i].glob, cases[i].unit);
		l = limits_of(p, 1, 1, NULL);
		assert_int_equal(l.weight, 100);
	}
}

static void models_are_patterns(void **state)
{
	struct policy_limits l = { .models = "qwen3*\t  tiny-?  exact.gguf" };

	(void)state;
	assert_true(policy_model_allowed(&l, "qwen3"));
	assert_true(policy_model_allowed(&l, "qwen3.5-moe"));
	assert_true(policy_model_allowed(&l, "tiny-1"));
	assert_true(policy_model_allowed(&l, "exact.gguf"));
	assert_false(policy_model_allowed(&l, "tiny-10"));
	assert_false(policy_model_allowed(&l, "exactxgguf"));
	assert_false(policy_model_allowed(&l, "my-qwen3"));
	assert_false(policy_model_allowed(&l, "Qwen3"));
	assert_false(policy_model_allowed(&l, ""));
	l.models = "[";
	assert_false(policy_model_allowed(&l, "x"));
	l.models = "*";
	assert_true(policy_model_allowed(&l, ""));
	l.models = NULL;
	assert_true(policy_model_allowed(&l, "x"));
}

static void files_in_name_order(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	write_file(LIB "50-b.conf", "[Default]\nWeight=50\nSessions=50\n");
	write_file(RUN "40-a.conf", "[Default]\nWeight=40\nQueueMax=40\n");
	write_file(ETC "10-z.conf", "[Default]\nWeight=10\nContextMax=10000\n[User 1]\nSessions=10\n");
	write_file(ETC ".60-hidden.conf", "[Default]\nWeight=60\n");
	write_file(ETC "70-saved.conf~", "[Default]\nWeight=70\n");
	write_file(ETC "README", "no policy\n");
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=50 50-b.conf:2");
	assert_string_equal(shown(&l, POLICY_QUEUE_MAX), "QueueMax=40 40-a.conf:3");
	assert_string_equal(shown(&l, POLICY_CONTEXT_MAX), "ContextMax=10000 10-z.conf:3");
	/* a user's setting wins over a default of a later file */
	assert_string_equal(shown(&l, POLICY_SESSIONS), "Sessions=10 10-z.conf:5");
}

static void directories_hide_each_other(void **state)
{
	struct policy_limits l;
	struct policy *p;

	(void)state;
	write_file(LIB "50.conf", "[Default]\nWeight=1\nSessions=1\n");
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_int_equal(l.weight, 1);
	policy_free(p);
	write_file(RUN "50.conf", "[Default]\nWeight=2\n");
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_int_equal(l.weight, 2);
	assert_int_equal(l.sessions, 32);
	policy_free(p);
	write_file(ETC "50.conf", "[Default]\nQueueMax=3\n");
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_int_equal(l.weight, 100);
	assert_int_equal(l.queue_max, 3);
	policy_free(p);

	/* masked: none of that name is read */
	unlink(at(ETC "50.conf"));
	assert_int_equal(symlink("/dev/null", at(ETC "50.conf")), 0);
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_defaults(&l);
	policy_free(p);
	unlink(at(ETC "50.conf"));
	unlink(at(RUN "50.conf"));
	assert_int_equal(symlink("/dev/null", at(RUN "50.conf")), 0);
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_defaults(&l);
	policy_free(p);
}

/* What was set lastingly and what was set for this boot have one name, hide nothing, and the latter wins. */
static void stored_files_do_not_hide_each_other(void **state)
{
	struct policy_limits l;
	struct policy *p;

	(void)state;
	write_file(LIB "50.conf", "[User 1]\nWeight=50\n");
	write_file(LIB "95.conf", "[User 1]\nContextMax=95\n");
	write_file(STATE "90-set.conf",
		   "[User 1]\nWeight=90\nSessions=90\nContextMax=90\n[User 2]\nWeight=91\n");
	write_file(RUN "90-set.conf", "[User 1]\nWeight=92\nQueueMax=92\n");
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_int_equal(l.weight, 92);
	assert_int_equal(l.queue_max, 92);
	assert_int_equal(l.sessions, 90);
	assert_int_equal(l.context_max, 95);
	l = limits_of(p, 2, 1, NULL);
	assert_int_equal(l.weight, 91);
	policy_free(p);
	assert_int_equal(policy_read(at("r"), NULL, &p, NULL), 0);
	l = limits_of(p, 2, 1, NULL);
	assert_defaults(&l);
	policy_free(p);
	write_file(STATE "50.conf", "[User 1]\nWeight=51\nSessions=51\n"); /* before the other 50.conf */
	unlink(at(STATE "90-set.conf"));
	unlink(at(RUN "90-set.conf"));
	p = read_policy("");
	l = limits_of(p, 1, 1, NULL);
	assert_int_equal(l.weight, 50);
	assert_int_equal(l.sessions, 51);
	policy_free(p);
}

static void files_with_problems(void **state)
{
	static const char hostile[] = "[Default]\nSessions=6\nQue\0ueMax=6\nModels=\xff\n";
	const size_t max = 1024 * 1024;
	_cleanup_(freep) char *huge = malloc(max + 1);
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	assert_non_null(huge);
	memset(huge, '\n', max + 1);
	memcpy(huge, "[Default]\nWeight=5\n", 19);
	write_bytes(ETC "10.conf", huge, max + 1);
	write_bytes(ETC "15.conf", hostile, sizeof(hostile) - 1);
	write_file(ETC "20.conf/x", "");
	write_file(ETC "30.conf", "[Default]\nQueueMax=7\n");
	assert_int_equal(symlink("nowhere", at(ETC "60.conf")), 0);
	assert_int_equal(symlink("/dev/zero", at(ETC "65.conf")), 0);
	assert_int_equal(mkfifo(at(ETC "70.conf"), 0600), 0);
	write_file("r/run/residentd/policy.d", "not a directory");
	write_file("state/policy.d", "not a directory either");
	p = read_policy("r/run/residentd/policy.d: Not a directory, ignoring\n"
			"state/policy.d: Not a directory, ignoring\n" ETC
			"10.conf: File too large, ignoring\n" ETC
			"15.conf:3: a line with a NUL byte, ignoring\n" ETC
			"15.conf:4: a line that is not UTF-8, ignoring\n" ETC
			"20.conf: Is a directory, ignoring\n" ETC
			"65.conf: File too large, ignoring\n");
	l = limits_of(p, 1, 1, NULL);
	assert_int_equal(l.weight, 100);
	assert_int_equal(l.sessions, 6);
	assert_int_equal(l.queue_max, 7);
}

/* As large as a file may be: every line counts, and half a million bad ones are not half a million warnings. */
static void files_that_are_just_not_too_large(void **state)
{
	const size_t max = 1024 * 1024;
	_cleanup_(policy_freep) struct policy *p = NULL, *bad = NULL;
	_cleanup_(buf_done) struct buf text = {}, w = {};
	struct policy_limits l;
	unsigned uid = 0;

	(void)state;
	for (; text.len < max - 64; uid++)
		buf_printf(&text, "[User %u]\nWeight=%u\n", uid, uid % 10000 + 1);
	p = policy_of(text.data, "");
	for (unsigned i = 0; i < uid; i += 997) {
		l = limits_of(p, i, 1, NULL);
		assert_int_equal(l.weight, i % 10000 + 1);
	}
	l = limits_of(p, uid, 1, NULL);
	assert_int_equal(l.weight, 100);

	memset(text.data, 'x', text.len);
	for (size_t i = 1; i < text.len; i += 2)
		text.data[i] = '\n';
	write_bytes(ETC "f.conf", text.data, text.len);
	assert_int_equal(policy_read(at("r"), NULL, &bad, &w), 0);
	assert_true(w.len < 70000);
	assert_non_null(strstr(w.data, "f.conf: too many problems, not showing more\n"));
}

static void lines_go_on_after_a_backslash(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;

	(void)state;
	p = policy_of("[Default]\r\n# a comment\nModels=a* \\\n# another\n  b\nWeight\\\n=\\\n 5\n", "");
	l = limits_of(p, 1, 1, NULL);
	assert_true(policy_model_allowed(&l, "ax"));
	assert_true(policy_model_allowed(&l, "b"));
	assert_false(policy_model_allowed(&l, "c"));
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=5 f.conf:6");
}

#define HEAD "# Written by `residentctl policy set`, which keeps no comments.\n"

static void store(const char *user, const struct policy_pair *pairs, size_t n)
{
	_cleanup_(freep) char *error = NULL;

	if (policy_store_user(at("state"), user, pairs, n, &error) < 0)
		fail_msg("%s", error ? error : "without a text");
	assert_null(error);
}

#define STORE(user, ...)                                         \
	store(user, (const struct policy_pair[]){ __VA_ARGS__ }, \
	      sizeof((const struct policy_pair[]){ __VA_ARGS__ }) / sizeof(struct policy_pair))

static void settings_are_stored(void **state)
{
	_cleanup_(policy_freep) struct policy *p = NULL;
	struct policy_limits l;
	struct stat st;

	(void)state;
	assert_int_equal(mkdir(at("state"), 0700), 0);
	STORE("root", { POLICY_WEIGHT, "300" }, { POLICY_MODELS, "a* b" });
	assert_file(STATE "90-set.conf", HEAD "\n[User root]\nWeight=300\nModels=a* b\n");
	assert_int_equal(stat(at(STATE "90-set.conf"), &st), 0);
	assert_int_equal(st.st_mode & 07777, 0644);
	STORE("1000", { POLICY_CLASS, "idle" });
	STORE("root", { POLICY_SESSIONS, "3" }, { POLICY_WEIGHT, "200" });
	assert_file(STATE "90-set.conf", HEAD
		    "\n[User root]\nModels=a* b\nSessions=3\nWeight=200\n\n[User 1000]\nClass=idle\n");
	STORE("root", { POLICY_MODELS, "" }, { POLICY_SESSIONS, "" }, { POLICY_SESSIONS, "5" });
	STORE("1000", { POLICY_CLASS, "" }, { POLICY_WEIGHT, "" });
	assert_file(STATE "90-set.conf", HEAD "\n[User root]\nWeight=200\nSessions=5\n");
	assert_int_equal(access(at(STATE ".90-set.conf.new"), F_OK), -1);
	p = read_policy("");
	l = limits_of(p, 0, 1, NULL);
	assert_string_equal(shown(&l, POLICY_WEIGHT), "Weight=200 90-set.conf:4");
	assert_string_equal(shown(&l, POLICY_SESSIONS), "Sessions=5 90-set.conf:5");
}

/* By name and by number it is one user: the last setting counts, whichever was used. */
static void users_are_stored_once(void **state)
{
	(void)state;
	assert_int_equal(mkdir(at("state"), 0700), 0);
	STORE("0", { POLICY_WEIGHT, "5" });
	STORE("root", { POLICY_WEIGHT, "7" });
	assert_file(STATE "90-set.conf", HEAD "\n[User root]\nWeight=7\n");
	STORE("0", { POLICY_SESSIONS, "1" });
	assert_file(STATE "90-set.conf", HEAD "\n[User root]\nWeight=7\nSessions=1\n");
	write_file(STATE "90-set.conf",
		   "[User root]\nWeight=1\n[User 0]\nWeight=2\n[User 1]\nWeight=3\n");
	STORE("0", { POLICY_WEIGHT, "4" });
	assert_file(STATE "90-set.conf", HEAD "\n[User 1]\nWeight=3\n\n[User 0]\nWeight=4\n");
}

/* Whatever an administrator wrote there by hand is kept, in its order, comments excepted. */
static void what_others_wrote_is_kept(void **state)
{
	(void)state;
	write_file(STATE "90-set.conf",
		   "# by hand\nWeight=1\n[Group 5]\nWeight = 1\n[Group 6]\nWeight=2\n[Group 5]\nWeight=3\n"
		   "[Unit a*]\nClass=idle\n[Nope]\nX=y=z\n[User gone]\nAllow=no\n[Unit b\nClass=idle\n"
		   "[User 7]\nModels=a\\ \nModels=b \\\n c\n[User 7]\nModels=d\\");
	STORE("8", { POLICY_WEIGHT, "9" });
	assert_file(STATE "90-set.conf",
		    HEAD "\n[Group 5]\nWeight=1\n\n[Group 6]\nWeight=2\n\n[Group 5]\nWeight=3\n"
			 "\n[Unit a*]\nClass=idle\n\n[Nope]\nX=y=z\n\n[User gone]\nAllow=no\n"
			 "\n[User 7]\nModels=a\\ \nModels=b   c\nModels=d\n\n[User 8]\nWeight=9\n");
	STORE("8", { POLICY_WEIGHT, "" }); /* and is the same when it is read and written again */
	assert_file(STATE "90-set.conf",
		    HEAD "\n[Group 5]\nWeight=1\n\n[Group 6]\nWeight=2\n\n[Group 5]\nWeight=3\n"
			 "\n[Unit a*]\nClass=idle\n\n[Nope]\nX=y=z\n\n[User gone]\nAllow=no\n"
			 "\n[User 7]\nModels=a\\ \nModels=b   c\nModels=d\n");
	STORE("gone", { POLICY_ALLOW, "" }); /* who is gone can lose what he had */
	STORE("7", { POLICY_MODELS, "x\\" });
	STORE("7", { POLICY_WEIGHT, "1" });
	assert_file(STATE "90-set.conf", HEAD
		    "\n[Group 5]\nWeight=1\n\n[Group 6]\nWeight=2\n\n[Group 5]\nWeight=3\n"
		    "\n[Unit a*]\nClass=idle\n\n[Nope]\nX=y=z\n\n[User 7]\nModels=x\\ \nWeight=1\n");
}

static void assert_not_stored(const char *user, enum policy_key key, const char *value, int error,
			      const char *expected)
{
	_cleanup_(freep) char *text = NULL;
	const struct policy_pair pairs[] = { { POLICY_SESSIONS, "1" }, { key, value } };

	assert_int_equal(policy_store_user(at("state"), user, pairs, 2, &text), error);
	assert_string_equal(text, expected);
	assert_int_equal(policy_store_user(at("state"), user, pairs, 2, NULL), error);
}

static void bad_settings_are_not_stored(void **state)
{
	_cleanup_(buf_done) struct buf text = {}, expected = {};
	char name[4100];

	(void)state;
	write_file(STATE "90-set.conf", "as it was");
	assert_not_stored("root", POLICY_WEIGHT, "0", -EINVAL,
			  "Weight=: expected a number from 1 to 10000");
	assert_not_stored("root", POLICY_MODELS, "a\n[Default]\nAllow=no", -EINVAL,
			  "Models=: expected patterns of model names, on one line");
	assert_not_stored("no-such-user-here", POLICY_WEIGHT, "1", -ENOENT,
			  "no such user: no-such-user-here");
	assert_not_stored("4294967295", POLICY_WEIGHT, "1", -EINVAL, "no such user: 4294967295");
	assert_not_stored("", POLICY_WEIGHT, "1", -EINVAL, "not the name of a user");
	assert_not_stored(" root", POLICY_WEIGHT, "1", -EINVAL, "not the name of a user");
	assert_not_stored("root]\n[Default", POLICY_WEIGHT, "1", -EINVAL, "not the name of a user");
	assert_not_stored("\xff", POLICY_WEIGHT, "1", -EINVAL, "not the name of a user");
	memset(name, '0', sizeof(name) - 1);
	name[sizeof(name) - 1] = 0;
	assert_not_stored(name, POLICY_WEIGHT, "1", -EINVAL, "not the name of a user");
	assert_file(STATE "90-set.conf", "as it was");

	/* one that cannot be read is not overwritten either */
	while (text.len <= 1024 * 1024)
		buf_printf(&text, "# %01000d\n", 0);
	write_bytes(STATE "90-set.conf", text.data, text.len);
	buf_printf(&expected, "%s/" STATE "90-set.conf: File too large", root);
	assert_not_stored("root", POLICY_WEIGHT, "1", -EFBIG, expected.data);
	/* nor does one grow that could not be read then */
	text.len = 0;
	while (text.len < 1024 * 1024 - 40)
		buf_printf(&text, "[User %zu]\nWeight=1\n", text.len);
	write_bytes(STATE "90-set.conf", text.data, text.len);
	assert_not_stored("root", POLICY_WEIGHT, "1", -EFBIG, expected.data);
}

static void unwritable_directories(void **state)
{
	_cleanup_(buf_done) struct buf expected = {};

	(void)state;
	buf_printf(&expected, "%s/" STATE "90-set.conf: No such file or directory", root);
	assert_not_stored("root", POLICY_WEIGHT, "1", -ENOENT, expected.data);
	write_file("state/policy.d", "");
	buf_consume(&expected, expected.len);
	buf_printf(&expected, "%s/" STATE "90-set.conf: Not a directory", root);
	assert_not_stored("root", POLICY_WEIGHT, "1", -ENOTDIR, expected.data);
}

/* policy/policy.d/10-example.conf: as it is it sets nothing; uncommented, every key to its default. */
static void shipped_example_shows_the_defaults(void **state)
{
	_cleanup_(fclosep) FILE *f = fopen("policy/policy.d/10-example.conf", "re");
	_cleanup_(buf_done) struct buf as_is = {}, uncommented = {};
	struct policy_limits l;
	struct policy *p;
	char line[512], name[64];

	(void)state;
	assert_non_null(f);
	while (fgets(line, sizeof(line), f)) {
		assert_true(strlen(line) <= 121);
		buf_printf(&as_is, "%s", line);
		if (sscanf(line, "#%63[A-Za-z]=", name) == 1 && line[1 + strlen(name)] == '=')
			buf_printf(&uncommented, "%s", line + 1);
		else
			buf_printf(&uncommented, "%s", line);
	}
	p = policy_of(as_is.data, "");
	l = limits_of(p, 1, 1, "x.service");
	for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++)
		assert_string_equal(l.source[k], "default");
	policy_free(p);
	p = policy_of(uncommented.data, "");
	l = limits_of(p, 1, 1, "x.service");
	assert_defaults(&l);
	for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++)
		assert_non_null(strstr(l.source[k], "f.conf:"));
	policy_free(p);
}

#define POLICY_TEST(f) cmocka_unit_test_setup(f, start_empty)

int main(void)
{
	static const struct CMUnitTest tests[] = {
		POLICY_TEST(nothing_set),
		POLICY_TEST(names_of_keys),
		POLICY_TEST(every_key_is_read),
		POLICY_TEST(good_values),
		POLICY_TEST(bad_values_change_nothing),
		POLICY_TEST(values_that_are_no_line),
		POLICY_TEST(scopes_in_their_order),
		POLICY_TEST(later_settings_win),
		POLICY_TEST(users_and_groups_by_name),
		POLICY_TEST(sections_for_nobody),
		POLICY_TEST(units_are_patterns),
		POLICY_TEST(models_are_patterns),
		POLICY_TEST(files_in_name_order),
		POLICY_TEST(directories_hide_each_other),
		POLICY_TEST(stored_files_do_not_hide_each_other),
		POLICY_TEST(files_with_problems),
		POLICY_TEST(files_that_are_just_not_too_large),
		POLICY_TEST(lines_go_on_after_a_backslash),
		POLICY_TEST(settings_are_stored),
		POLICY_TEST(users_are_stored_once),
		POLICY_TEST(what_others_wrote_is_kept),
		POLICY_TEST(bad_settings_are_not_stored),
		POLICY_TEST(unwritable_directories),
		POLICY_TEST(shipped_example_shows_the_defaults),
	};

	return cmocka_run_group_tests_name("policy", tests, make_root, remove_root);
}
