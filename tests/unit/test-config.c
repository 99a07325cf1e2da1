/* SPDX-License-Identifier: MIT */
/* test-config.c: values, lines, layers, and the shipped file against the defaults. */
#include "tests/test.h"

#include "daemon/config.h"

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <syslog.h>

static char root[256];

static int make_root(void **state)
{
	const char *tmp = getenv("TMPDIR");

	(void)state;
	snprintf(root, sizeof(root), "%s/residentd-test-config-XXXXXX", tmp ? tmp : P_tmpdir);
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

/* root/name; good until the next call. */
static const char *at(const char *name)
{
	static char path[512];

	snprintf(path, sizeof(path), "%s/%s", root, name);
	return path;
}

static void write_bytes(const char *name, const void *data, size_t len)
{
	char path[512];
	FILE *f;

	snprintf(path, sizeof(path), "%s", at(name));
	for (char *slash = path + strlen(root) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
		*slash = 0;
		mkdir(path, 0755);
	}
	f = fopen(path, "we");
	assert_non_null(f);
	assert_int_equal(fwrite(data, 1, len, f), len);
	assert_int_equal(fclose(f), 0);
}

static void write_file(const char *name, const char *text)
{
	write_bytes(name, text, strlen(text));
}

/* Reads bytes as a file "f" over c; the warnings, without the directory, good until the next call. */
static const char *read_bytes(struct config *c, const void *data, size_t len)
{
	static char text[256 * 1024];
	_cleanup_(buf_done) struct buf warnings = {};
	const char *p, *path;
	size_t n = 0;

	write_bytes("f", data, len);
	path = at("f");
	assert_int_equal(config_read(c, path, &warnings), 0);
	for (p = warnings.data; p && *p;)
		if (startswith(p, root))
			p += strlen(root) + 1;
		else
			text[n++] = *p++;
	text[n] = 0;
	return text;
}

static const char *read_text(struct config *c, const char *text)
{
	return read_bytes(c, text, strlen(text));
}

static void assert_defaults(const struct config *c)
{
	struct config d;

	config_defaults(&d);
	assert_null(c->model_path);
	assert_int_equal(c->context, d.context);
	assert_int_equal(c->threads, d.threads);
	assert_int_equal(c->batch_tok, d.batch_tok);
	assert_int_equal(c->kv_bytes_max, d.kv_bytes_max);
	assert_int_equal(c->kv_type, d.kv_type);
	assert_int_equal(c->host_tier, d.host_tier);
	assert_int_equal(c->host_budget_bytes, d.host_budget_bytes);
	assert_int_equal(c->memory_reserve_bytes, d.memory_reserve_bytes);
	assert_int_equal(c->vram_budget_bytes, d.vram_budget_bytes);
	assert_int_equal(c->vram_reserve_bytes, d.vram_reserve_bytes);
	assert_int_equal(c->host_idle_us, d.host_idle_us);
	assert_int_equal(c->evict_policy, d.evict_policy);
	assert_int_equal(c->prefetch, d.prefetch);
	assert_int_equal(c->tune_kernels, d.tune_kernels);
	assert_int_equal(c->disk_queue_depth, d.disk_queue_depth);
	assert_int_equal(c->queue_max, d.queue_max);
	assert_int_equal(c->sessions_max, d.sessions_max);
	assert_int_equal(c->sessions_per_user, d.sessions_per_user);
	assert_int_equal(c->connections_max, d.connections_max);
	assert_int_equal(c->keep_us, d.keep_us);
	assert_int_equal(c->idle_exit_us, d.idle_exit_us);
	assert_int_equal(c->message_bytes_max, d.message_bytes_max);
	assert_int_equal(c->max_tokens, d.max_tokens);
	assert_int_equal(c->max_thinking_tokens, d.max_thinking_tokens);
	assert_int_equal(c->log_level, d.log_level);
}

/* No field has its default. */
static void spoil(struct config *c)
{
	*c = (struct config){ .model_path = strdup("/m"),
			      .context = 99,
			      .threads = 99,
			      .batch_tok = 99,
			      .kv_bytes_max = 99,
			      .kv_type = CONFIG_KV_F32,
			      .host_tier = RESIDENCY_ARENA,
			      .host_budget_bytes = 99,
			      .memory_reserve_bytes = 99,
			      .vram_budget_bytes = 99,
			      .vram_reserve_bytes = 99,
			      .host_idle_us = 99,
			      .evict_policy = EVICT_LRU,
			      .prefetch = 1,
			      .tune_kernels = 7,
			      .disk_queue_depth = 99,
			      .queue_max = 99,
			      .sessions_max = 99,
			      .sessions_per_user = 99,
			      .connections_max = 99,
			      .keep_us = 99,
			      .idle_exit_us = 99,
			      .message_bytes_max = 99,
			      .max_tokens = 99,
			      .max_thinking_tokens = 99,
			      .log_level = LOG_DEBUG };
}

static void numbers(void **state)
{
	uint64_t v = 7;

	(void)state;
	assert_int_equal(parse_u64("0", 0, 0, &v), 0);
	assert_int_equal(v, 0);
	assert_int_equal(parse_u64("18446744073709551615", 0, UINT64_MAX, &v), 0);
	assert_int_equal(v, UINT64_MAX);
	assert_int_equal(parse_u64("0010", 10, 10, &v), 0);
	assert_int_equal(v, 10);
	assert_int_equal(parse_u64("18446744073709551616", 0, UINT64_MAX, &v), -ERANGE);
	assert_int_equal(parse_u64("99999999999999999999999999", 0, UINT64_MAX, &v), -ERANGE);
	assert_int_equal(parse_u64("9", 10, 20, &v), -ERANGE);
	assert_int_equal(parse_u64("21", 10, 20, &v), -ERANGE);
	for (const char *const *s = (const char *const[]){ "", " ", "-1", "+1", " 1", "1 ", "1.0", "0x10",
							   "1e3", "ten", "1K", "\xef\xbc\x91", NULL };
	     *s; s++)
		assert_int_equal(parse_u64(*s, 0, UINT64_MAX, &v), -EINVAL);
	assert_int_equal(v, 10);
}

static void sizes(void **state)
{
	static const struct {
		const char *text;
		uint64_t bytes;
	} good[] = {
		{ "0", 0 },
		{ "4096", 4096 },
		{ "64K", 65536 },
		{ "4M", 4194304 },
		{ "1.5G", 1610612736 },
		{ "0.000001T", 1099511 },
		{ "1.999999T", 2199022156040 },
		{ "1.0K", 1024 },
		{ "16777215T", UINT64_C(16777215) << 40 },
		{ "18446744073709551615", UINT64_MAX },
	};
	static const char *const bad[] = { "",           "K",   "-1",   "-1K",   "+1K",
					   "1k",         "1KB", "1 K",  "1KK",   "1.5",
					   "1.K",        ".5K", "1.",   "1..5K", "1.5.5K",
					   "1.1234567K", "1P",  "auto", "1K ",   "1e3" };
	static const char *const huge[] = { "16777216T", "18446744073709551616",
					    "18446744073709551615K", "99999999999999999999999T" };
	uint64_t v = 7;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
		assert_int_equal(parse_bytes(good[i].text, &v), 0);
		assert_int_equal(v, good[i].bytes);
	}
	v = 7;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		if (parse_bytes(bad[i], &v) != -EINVAL)
			fail_msg("\"%s\"", bad[i]);
	for (size_t i = 0; i < ARRAY_SIZE(huge); i++)
		if (parse_bytes(huge[i], &v) != -ERANGE)
			fail_msg("\"%s\"", huge[i]);
	assert_int_equal(v, 7);
}

static void vram_budgets(void **state)
{
	static const char *const bad[] = { "",   "Auto",     "OFF", "on",  "none",
					   "-1", "infinity", "8 G", "1.5", "autooff" };
	static const char *const out_of_range[] = { "0", "0G", "9223372036854775808", "8388608T",
						    "16777216T" };
	uint64_t v = 7;

	(void)state;
	assert_int_equal(parse_vram("auto", &v), 0);
	assert_int_equal(v, 0);
	assert_int_equal(parse_vram("off", &v), 0);
	assert_true(v == CONFIG_VRAM_OFF);
	assert_int_equal(parse_vram("9223372036854775807", &v), 0);
	assert_int_equal(v, INT64_MAX);
	assert_int_equal(parse_vram("64M", &v), 0);
	assert_int_equal(v, 64 << 20);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		if (parse_vram(bad[i], &v) != -EINVAL)
			fail_msg("\"%s\"", bad[i]);
	for (size_t i = 0; i < ARRAY_SIZE(out_of_range); i++)
		if (parse_vram(out_of_range[i], &v) != -ERANGE)
			fail_msg("\"%s\"", out_of_range[i]);
	assert_int_equal(v, 64 << 20);
}

static void spans(void **state)
{
	static const struct {
		const char *text;
		uint64_t us;
	} good[] = {
		{ "0", 0 },
		{ "90", 90000000 },
		{ "90s", 90000000 },
		{ "90 sec", 90000000 },
		{ "5min", 300000000 },
		{ "5m", 300000000 },
		{ "1h 30min", 5400000000 },
		{ "1h30min", 5400000000 },
		{ "  1h\t30 min ", 5400000000 },
		{ "2hr", 7200000000 },
		{ "1d", 86400000000 },
		{ "2w", 1209600000000 },
		{ "3ms 4us", 3004 },
		{ "1min 5", 65000000 },
		{ "infinity", UINT64_MAX },
		{ " infinity ", UINT64_MAX },
		{ "18446744073709551614us", UINT64_MAX - 1 },
	};
	static const char *const bad[] = { "",         " ",           "s",         "-1",
					   "-1s",      "+1s",         "1.5h",      "1y",
					   "1 h x",    "h1",          "1hh",       "1,5h",
					   "Infinity", "infinity 1s", "infinityx", "1s -1s" };
	static const char *const huge[] = {
		"18446744073709551615us",     "18446744073709551616us",
		"18446744073709551615",       "30500569w",
		"18446744073709551614us 1us", "18446744073709551614us 2us"
	};
	uint64_t v = 7;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
		if (parse_span_us(good[i].text, &v) < 0)
			fail_msg("\"%s\"", good[i].text);
		assert_int_equal(v, good[i].us);
	}
	v = 7;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
		if (parse_span_us(bad[i], &v) != -EINVAL)
			fail_msg("\"%s\"", bad[i]);
	for (size_t i = 0; i < ARRAY_SIZE(huge); i++)
		if (parse_span_us(huge[i], &v) != -ERANGE)
			fail_msg("\"%s\"", huge[i]);
	assert_int_equal(v, 7);
}

static void every_key_is_read(void **state)
{
	struct config c;

	(void)state;
	config_defaults(&c);
	assert_string_equal(
		read_text(&c, "# a comment\n; another\n\n"
			      "[Model]\nPath = /m/a b.gguf \nContext=8192\n"
			      "[Engine]\nThreads=6\nBatchTokens=4096\nKvBytesMax=1.5G\nKvType=f16\n"
			      "[Memory]\nHostTier=mapped\nHostBudget=8G\nMemoryReserve=512M\nVramBudget=6G\nVramReserve=0\nHostIdleSec=30s\n"
			      "EvictionPolicy=s3-fifo\nPrefetch=off\nDiskQueueDepth=4\n"
			      "[Service]\r\nQueueMax=1\r\n\tSessionsMax\t=\t65536\t\nSessionsPerUser=3\n"
			      "ConnectionsMax=4\nKeepSec=1d 2h\nIdleExitSec=1s\nMessageMax=64K\nMaxTokens=5\n"
			      "MaxThinkingTokens=0\n  [Log]  \nLevel=debug"),
		"");
	assert_string_equal(c.model_path, "/m/a b.gguf");
	assert_int_equal(c.context, 8192);
	assert_int_equal(c.threads, 6);
	assert_int_equal(c.batch_tok, 4096);
	assert_int_equal(c.kv_bytes_max, 1610612736);
	assert_int_equal(c.kv_type, CONFIG_KV_F16);
	assert_int_equal(c.host_tier, RESIDENCY_MAPPED);
	assert_int_equal(c.host_budget_bytes, UINT64_C(8) << 30);
	assert_int_equal(c.memory_reserve_bytes, 512 << 20);
	assert_int_equal(c.vram_budget_bytes, UINT64_C(6) << 30);
	assert_int_equal(c.vram_reserve_bytes, 0);
	assert_int_equal(c.host_idle_us, 30000000);
	assert_int_equal(c.evict_policy, EVICT_S3_FIFO);
	assert_int_equal(c.prefetch, 0);
	assert_int_equal(c.disk_queue_depth, 4);
	assert_int_equal(c.queue_max, 1);
	assert_int_equal(c.sessions_max, 65536);
	assert_int_equal(c.sessions_per_user, 3);
	assert_int_equal(c.connections_max, 4);
	assert_int_equal(c.keep_us, 93600000000);
	assert_int_equal(c.idle_exit_us, 1000000);
	assert_int_equal(c.message_bytes_max, 65536);
	assert_int_equal(c.max_tokens, 5);
	assert_int_equal(c.max_thinking_tokens, 0);
	assert_int_equal(c.log_level, LOG_DEBUG);
	config_done(&c);
	assert_null(c.model_path);
	config_done(&c);
}

static void words_for_values(void **state)
{
	struct config c;

	(void)state;
	spoil(&c);
	assert_string_equal(read_text(&c, "[Model]\nContext=auto\n[Engine]\nThreads=auto\nKvBytesMax=auto\n"
					  "KvType=auto\n[Memory]\nVramBudget=off\n[Service]\nMaxThinkingTokens=infinity\nKeepSec=infinity\n"
					  "[Log]\nLevel=error\n"),
			    "");
	assert_int_equal(c.context, 0);
	assert_int_equal(c.threads, 0);
	assert_int_equal(c.kv_bytes_max, 0);
	assert_int_equal(c.kv_type, CONFIG_KV_AUTO);
	assert_true(c.vram_budget_bytes == CONFIG_VRAM_OFF);
	assert_true(c.max_thinking_tokens == -1);
	assert_true(c.keep_us == UINT64_MAX);
	assert_int_equal(c.log_level, LOG_ERR);
	c.context = c.threads = 99;
	c.kv_bytes_max = 99;
	assert_string_equal(read_text(&c, "[Model]\nContext=0\n[Engine]\nThreads=0\nKvBytesMax=0\n"),
			    "");
	assert_int_equal(c.context + c.threads + c.kv_bytes_max, 0);
	config_done(&c);
}

static void empty_value_is_the_default(void **state)
{
	struct config c;

	(void)state;
	spoil(&c);
	assert_string_equal(
		read_text(&c, "[Model]\nPath=\nContext=\n[Engine]\nThreads=\nTuneKernels=\nBatchTokens=\nKvBytesMax= \n"
			      "KvType=\n[Memory]\nHostTier=\nHostBudget=\nMemoryReserve=\nVramBudget=\nVramReserve=\nHostIdleSec=\nEvictionPolicy=\nPrefetch=\n"
			      "DiskQueueDepth=\n[Service]\nQueueMax=\nSessionsMax=\nSessionsPerUser=\n"
			      "ConnectionsMax=\nKeepSec=\nIdleExitSec=\nMessageMax=\nMaxTokens=\nMaxThinkingTokens=\n"
			      "[Log]\nLevel=\n"),
		"");
	assert_defaults(&c);
}

/* Negative, huge, fractional and senseless values for every key: a warning, the old value stays. */
static void bad_values_change_nothing(void **state)
{
	/* clang-format off */
	static const struct {
		const char *section, *key, *values[12];
	} cases[] = {
		{ "Model", "Path", { "m.gguf", "./m", "~/m", "\"/m\"" } },
		{ "Model", "Context", { "-1", "15", "16777217", "4294967296", "99999999999999999999", "1.5", "8K", "all", "Auto" } },
		{ "Engine", "Threads", { "-1", "257", "4294967296", "99999999999999999999", "2.0", "0x4", "infinity" } },
		{ "Engine", "BatchTokens", { "-1", "4097", "4294967424", "99999999999999999999", "1K", "infinity" } },
		{ "Engine", "KvBytesMax", { "-1", "-1G", "9223372036854775808", "8388608T", "16777216T", "1.5", "1Q", "infinity" } },
		{ "Engine", "TuneKernels", { "maybe", "2", "auto", "-1" } },
		{ "Engine", "KvType", { "f64", "F16", "16", "f16 f32" } },
		{ "Memory", "HostTier", { "vram", "unmanaged", "Arena", "1" } },
		{ "Memory", "HostBudget", { "-1", "9223372036854775808", "16777216T", "1.5", "1Q", "infinity" } },
		{ "Memory", "MemoryReserve", { "-1G", "10%", "99999999999999999999" } },
		{ "Memory", "VramBudget", { "-1", "0", "9223372036854775808", "16777216T", "1.5", "none", "Off", "infinity" } },
		{ "Memory", "VramReserve", { "-1", "auto", "off", "10%", "9223372036854775808" } },
		{ "Memory", "HostIdleSec", { "-1", "0", "999ms", "never" } },
		{ "Memory", "EvictionPolicy", { "belady", "LRU", "clock" } },
		{ "Memory", "Prefetch", { "yes", "1", "2" } },
		{ "Memory", "DiskQueueDepth", { "-1", "257", "4294967297", "8K" } },
		{ "Service", "QueueMax", { "-1", "0", "65537", "4294967360", "99999999999999999999", "auto" } },
		{ "Service", "SessionsMax", { "-1", "0", "65537", "4294967360", "99999999999999999999", "auto" } },
		{ "Service", "SessionsPerUser", { "-1", "0", "65537", "4294967360", "99999999999999999999", "infinity" } },
		{ "Service", "ConnectionsMax", { "-1", "0", "65537", "4294967360", "99999999999999999999", "1 000" } },
		{ "Service", "KeepSec", { "-1", "1.5h", "1 year", "9223372036854775808us", "99999999999999999999", "auto" } },
		{ "Service", "IdleExitSec", { "-1", "0", "999ms", "1.5h", "9223372036854775808us", "auto" } },
		{ "Service", "MessageMax", { "-1", "0", "65535", "63K", "67108865", "65M", "16777216T", "auto", "infinity" } },
		{ "Service", "MaxTokens", { "-1", "0", "16777217", "4294967297", "99999999999999999999", "infinity" } },
		{ "Service", "MaxThinkingTokens", { "-1", "16777217", "18446744073709551615", "99999999999999999999", "off" } },
		{ "Log", "Level", { "err", "7", "Info", "-1", "debug info" } },
	};
	/* clang-format on */
	char text[256], expected[128];

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		for (const char *const *value = cases[i].values; *value; value++) {
			const char *warnings;
			struct config c;

			config_defaults(&c);
			snprintf(text, sizeof(text), "[%s]\n\n%s=%s\n", cases[i].section,
				 cases[i].key, *value);
			snprintf(expected, sizeof(expected), "f:3: %s=%s: expected ", cases[i].key,
				 *value);
			warnings = read_text(&c, text);
			if (!startswith(warnings, expected) || !strstr(warnings, ", ignoring\n"))
				fail_msg("%s: %s", text, warnings);
			assert_defaults(&c);
		}
	}
}

static void warnings_say_what_fits(void **state)
{
	struct config c;

	(void)state;
	config_defaults(&c);
	assert_string_equal(
		read_text(&c, "[Engine]\nThreads=x\nBatchTokens=x\nKvBytesMax=x\nKvType=x\n"
			      "[Service]\nKeepSec=x\nMessageMax=x\nMaxThinkingTokens=x\n[Memory]\nVramBudget=x\nVramReserve=x\n"),
		"f:2: Threads=x: expected auto or a number from 1 to 256, ignoring\n"
		"f:3: BatchTokens=x: expected auto or a number from 1 to 4096, ignoring\n"
		"f:4: KvBytesMax=x: expected auto or a size (64K, 4M, 1.5G) from 1 to 9223372036854775807 "
		"bytes, ignoring\n"
		"f:5: KvType=x: expected auto, f16 or f32, ignoring\n"
		"f:7: KeepSec=x: expected a time span (90s, 1h 30min, infinity), ignoring\n"
		"f:8: MessageMax=x: expected a size (64K, 4M, 1.5G) from 65536 to 67108864 bytes, ignoring\n"
		"f:9: MaxThinkingTokens=x: expected infinity or a number from 0 to 16777216, ignoring\n"
		"f:11: VramBudget=x: expected auto, off or a size (64K, 4M, 1.5G) from 1 to 9223372036854775807 "
		"bytes, ignoring\n"
		"f:12: VramReserve=x: expected a size (64K, 4M, 1.5G) from 0 to 9223372036854775807 bytes, "
		"ignoring\n");
	assert_defaults(&c);
}

static void unknown_names_are_warned_about(void **state)
{
	struct config c;

	(void)state;
	config_defaults(&c);
	assert_string_equal(
		read_text(&c, "QueueMax=1\n[Servce]\nQueueMax=1\nQueueMax=2\n[Service]\nQueueMx=1\nLevel=debug\n"
			      "queuemax=1\n=1\njust words\n[Log\nLevel=debug\n[]\n[ Log ]\n[\n]\n[Service]\n"
			      "SessionsMax=9\n"),
		"f:1: QueueMax= before any section, ignoring\n"
		"f:2: unknown section [Servce], ignoring\n"
		"f:6: unknown key QueueMx= in [Service], ignoring\n"
		"f:7: unknown key Level= in [Service], ignoring\n"
		"f:8: unknown key queuemax= in [Service], ignoring\n"
		"f:9: unknown key = in [Service], ignoring\n"
		"f:10: expected Key=value, ignoring\n"
		"f:11: a section without ']', ignoring\n"
		"f:13: unknown section [], ignoring\n"
		"f:14: unknown section [ Log ], ignoring\n"
		"f:15: a section without ']', ignoring\n"
		"f:16: expected Key=value, ignoring\n");
	assert_int_equal(c.sessions_max, 9);
	c.sessions_max = 256;
	assert_defaults(&c);
}

static void lines_go_on_after_a_backslash(void **state)
{
	struct config c;

	(void)state;
	config_defaults(&c);
	assert_string_equal(read_text(&c, "[Service]\n# no \\\nKeepSec=1h \\\n# between\n  ; too\n  30min\n"
					  "QueueMax \\\n = \\\n x\nMaxTokens=7 \\"),
			    "f:7: QueueMax=x: expected a number from 1 to 65536, ignoring\n");
	assert_int_equal(c.keep_us, 5400000000);
	assert_int_equal(c.max_tokens, 7);
	assert_string_equal(read_text(&c, "[Service]\nMaxTokens=8 \\\n\nQueueMax=5\n"), "");
	assert_int_equal(c.max_tokens, 8);
	assert_int_equal(c.queue_max, 5);
	assert_string_equal(read_text(&c, "\\"), "");
	assert_string_equal(read_text(&c, "\\\n\\\n\\"), "");
	assert_string_equal(read_text(&c, "[Service]\nMaxTokens=9 \\\n# the end"), "");
	assert_int_equal(c.max_tokens, 9);
}

static void hostile_bytes(void **state)
{
	static const char nul[] =
		"[Service]\nQueueMax=1\0\0\nMax\0Tokens=1\n\0\n# \0\n\0\0\\\nSessionsMax=9\n";
	static const char not_utf8[] =
		"[Service]\nQueueMax=1\xff\n[Lo\xc3g]\n\xed\xa0\x80=1\n\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80=1\n"
		"# \xff\nSessionsMax=9\n";
	struct config c;

	(void)state;
	config_defaults(&c);
	assert_string_equal(read_bytes(&c, nul, sizeof(nul) - 1),
			    "f:2: a line with a NUL byte, ignoring\n"
			    "f:3: a line with a NUL byte, ignoring\n"
			    "f:4: a line with a NUL byte, ignoring\n"
			    "f:6: a line with a NUL byte, ignoring\n");
	assert_defaults(&c);
	assert_string_equal(read_text(&c, not_utf8), "f:2: a line that is not UTF-8, ignoring\n"
						     "f:3: a line that is not UTF-8, ignoring\n"
						     "f:4: a line that is not UTF-8, ignoring\n"
						     "f:5: a line that is not UTF-8, ignoring\n");
	assert_int_equal(c.sessions_max, 9);
	assert_string_equal(read_text(&c, "[Model]\nPath=/m/\xc3\xa9.gguf\n"), "");
	assert_string_equal(c.model_path, "/m/\xc3\xa9.gguf");
	config_done(&c);
}

/* The last of them counts in whole: 4096 bytes are read, 4097 are not, joined ones neither. */
static void long_lines_are_skipped(void **state)
{
	_cleanup_(buf_done) struct buf text = {};
	struct config c;

	(void)state;
	config_defaults(&c);
	buf_printf(&text, "[Service]\nMaxTokens=%0*d\n", 4086, 5);
	assert_string_equal(read_text(&c, text.data), "");
	assert_int_equal(c.max_tokens, 5);
	buf_consume(&text, text.len);
	buf_printf(&text, "[Service]\nMaxTokens=%0*d\nQueueMax=\\\n%0*d\\\n%0*d\nSessionsMax=9",
		   4087, 6, 2048, 3, 2048, 3);
	assert_string_equal(read_text(&c, text.data),
			    "f:2: a line longer than 4096 bytes, ignoring\n"
			    "f:3: a line longer than 4096 bytes, ignoring\n");
	assert_int_equal(c.max_tokens, 5);
	assert_int_equal(c.queue_max, 64);
	assert_int_equal(c.sessions_max, 9);
}

static void large_files_are_refused(void **state)
{
	const size_t max = 1024 * 1024;
	_cleanup_(freep) char *text = malloc(max + 1);
	_cleanup_(buf_done) struct buf warnings = {};
	const char *read;
	struct config c;

	(void)state;
	assert_non_null(text);
	config_defaults(&c);
	memset(text, '\n', max + 1);
	memcpy(text, "[Log]\nLevel=debug\n", 18);
	write_bytes("f", text, max + 1);
	assert_int_equal(config_read(&c, at("f"), &warnings), -EFBIG);
	assert_int_equal(warnings.len, 0);
	assert_defaults(&c);
	assert_string_equal(read_bytes(&c, text, max), "");
	assert_int_equal(c.log_level, LOG_DEBUG);
	/* half a million bad lines do not become half a million warnings */
	for (size_t i = 0; i < max; i += 2)
		memcpy(text + i, "x\n", 2);
	read = read_bytes(&c, text, max);
	assert_true(strlen(read) < 70000);
	assert_non_null(strstr(read, "f: too many problems, not showing more\n"));
	assert_int_equal(config_read(&c, at("f"), NULL), 0);
}

static void files_that_cannot_be_read(void **state)
{
	struct config c;

	(void)state;
	config_defaults(&c);
	assert_int_equal(config_read(&c, at("absent"), NULL), -ENOENT);
	assert_int_equal(config_read(&c, root, NULL), -EISDIR);
	assert_int_equal(config_read(&c, "/dev/null", NULL), 0);
	assert_int_equal(config_read(&c, "/dev/zero", NULL), -EFBIG);
	assert_int_equal(mkfifo(at("fifo"), 0600), 0);
	assert_int_equal(config_read(&c, at("fifo"), NULL), 0); /* and does not wait for a writer */
	assert_defaults(&c);
}

static void layers_override(void **state)
{
	_cleanup_(buf_done) struct buf w = {};
	struct config c;

	(void)state;
	config_defaults(&c);
	assert_int_equal(config_read_layers(&c, at("none"), &w), 0);
	assert_defaults(&c);

	/* only the highest of the main files is read: QueueMax of the lowest does not show */
	write_file("r/usr/lib/residentd/residentd.conf", "[Service]\nQueueMax=1\nMaxTokens=1\n");
	assert_int_equal(config_read_layers(&c, at("r"), &w), 0);
	assert_int_equal(c.queue_max, 1);
	config_defaults(&c);
	write_file("r/run/residentd/residentd.conf", "[Service]\nMaxTokens=2\n");
	assert_int_equal(config_read_layers(&c, at("r"), &w), 0);
	assert_int_equal(c.queue_max, 64);
	assert_int_equal(c.max_tokens, 2);
	write_file("r/etc/residentd/residentd.conf",
		   "[Service]\nMaxTokens=3\nSessionsMax=3\nSessionsPerUser=3\n");
	assert_int_equal(config_read_layers(&c, at("r"), &w), 0);
	assert_int_equal(c.max_tokens, 3);

	/* drop-ins by name, wherever they are; of one name the highest */
	write_file("r/usr/lib/residentd/residentd.conf.d/50-b.conf",
		   "[Service]\nMaxTokens=50\nSessionsMax=50\n");
	write_file("r/run/residentd/residentd.conf.d/40-a.conf",
		   "[Service]\nMaxTokens=40\nSessionsPerUser=40\n");
	write_file("r/etc/residentd/residentd.conf.d/10-z.conf",
		   "[Service]\nMaxTokens=10\nConnectionsMax=10\n");
	config_defaults(&c);
	assert_int_equal(config_read_layers(&c, at("r"), &w), 0);
	assert_int_equal(c.max_tokens, 50);
	assert_int_equal(c.sessions_max, 50);
	assert_int_equal(c.sessions_per_user, 40);
	assert_int_equal(c.connections_max, 10);
	write_file("r/run/residentd/residentd.conf.d/50-b.conf", "[Service]\nMaxTokens=51\n");
	config_defaults(&c);
	assert_int_equal(config_read_layers(&c, at("r"), &w), 0);
	assert_int_equal(c.max_tokens, 51);
	assert_int_equal(c.sessions_max, 3);

	/* masked: neither of the two others of that name */
	assert_int_equal(symlink("/dev/null", at("r/etc/residentd/residentd.conf.d/50-b.conf")), 0);
	config_defaults(&c);
	assert_int_equal(config_read_layers(&c, at("r"), &w), 0);
	assert_int_equal(c.max_tokens, 40);
	assert_int_equal(w.len, 0);
}

static void layers_with_problems(void **state)
{
	_cleanup_(buf_done) struct buf w = {};
	char expected[1024];
	struct config c;
	int n = 0;

	(void)state;
	config_defaults(&c);
	write_file("p/etc/residentd/residentd.conf.d/10.conf", "[Service]\nMaxTokens=10\nNope=1\n");
	write_file("p/etc/residentd/residentd.conf.d/20.conf/x", "");
	write_file("p/etc/residentd/residentd.conf.d/30.conf", "[Service]\nQueueMax=30\n");
	write_file("p/etc/residentd/residentd.conf.d/.hidden.conf", "[Service]\nSessionsMax=31\n");
	write_file("p/etc/residentd/residentd.conf.d/40.conf~", "[Service]\nQueueMax=40\n");
	write_file("p/etc/residentd/residentd.conf.d/50.txt", "[Service]\nQueueMax=50\n");
	assert_int_equal(symlink("nowhere", at("p/etc/residentd/residentd.conf.d/60.conf")), 0);
	write_file("p/run/residentd/residentd.conf/x", "");
	write_file("p/usr/lib/residentd/residentd.conf", "[Service]\nConnectionsMax=9\n");
	write_file("p/usr/lib/residentd/residentd.conf.d", "not a directory");
	assert_int_equal(config_read_layers(&c, at("p"), &w), 0);
	assert_int_equal(c.max_tokens, 10);
	assert_int_equal(c.queue_max, 30);
	assert_int_equal(c.sessions_max, 256);
	assert_int_equal(c.connections_max, 512); /* hidden by the one of /run, readable or not */
	n += snprintf(expected, sizeof(expected),
		      "%s/p/run/residentd/residentd.conf: Is a directory, ignoring\n", root);
	n += snprintf(expected + n, sizeof(expected) - (size_t)n,
		      "%s/p/usr/lib/residentd/residentd.conf.d: Not a directory, ignoring\n", root);
	n += snprintf(expected + n, sizeof(expected) - (size_t)n,
		      "%s/p/etc/residentd/residentd.conf.d/10.conf:3: unknown key Nope= in [Service], ignoring\n",
		      root);
	snprintf(expected + n, sizeof(expected) - (size_t)n,
		 "%s/p/etc/residentd/residentd.conf.d/20.conf: Is a directory, ignoring\n", root);
	assert_string_equal(w.data, expected);
}

/* policy/residentd.conf with each "#Key=value" uncommented turns all fields into their defaults. */
static void shipped_file_shows_the_defaults(void **state)
{
	_cleanup_(fclosep) FILE *f = fopen("policy/residentd.conf", "re");
	_cleanup_(buf_done) struct buf text = {};
	unsigned n_keys = 0, n_empty = 0;
	char line[512], name[64];
	struct config c;

	(void)state;
	assert_non_null(f);
	while (fgets(line, sizeof(line), f)) {
		assert_true(strlen(line) <= 121);
		if (line[0] != '#' && line[0] != '[' && line[0] != '\n')
			fail_msg("an uncommented line: %s", line);
		if (sscanf(line, "#%63[A-Za-z]=", name) == 1 && line[1 + strlen(name)] == '=') {
			n_keys++;
			n_empty += line[2 + strlen(name)] == '\n';
			buf_printf(&text, "%s", line + 1);
		} else {
			buf_printf(&text, "%s", line);
		}
	}
	assert_int_equal(n_keys, 26);
	assert_int_equal(n_empty, 1); /* Path= */
	spoil(&c);
	assert_string_equal(read_text(&c, text.data), "");
	assert_defaults(&c);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(numbers),
		cmocka_unit_test(sizes),
		cmocka_unit_test(vram_budgets),
		cmocka_unit_test(spans),
		cmocka_unit_test(every_key_is_read),
		cmocka_unit_test(words_for_values),
		cmocka_unit_test(empty_value_is_the_default),
		cmocka_unit_test(bad_values_change_nothing),
		cmocka_unit_test(warnings_say_what_fits),
		cmocka_unit_test(unknown_names_are_warned_about),
		cmocka_unit_test(lines_go_on_after_a_backslash),
		cmocka_unit_test(hostile_bytes),
		cmocka_unit_test(long_lines_are_skipped),
		cmocka_unit_test(large_files_are_refused),
		cmocka_unit_test(files_that_cannot_be_read),
		cmocka_unit_test(layers_override),
		cmocka_unit_test(layers_with_problems),
		cmocka_unit_test(shipped_file_shows_the_defaults),
	};

	return cmocka_run_group_tests_name("config", tests, make_root, remove_root);
}
