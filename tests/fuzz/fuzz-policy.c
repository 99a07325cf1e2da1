/* SPDX-License-Identifier: MIT */
/*
 * fuzz-policy.c: bytes as a file of policy.d, and as a value of every key.
 *
 * Whatever the file says, every limit stays inside its bounds and names its line, each warning is UTF-8 on a line of its
 * own, and a value that is printed is one that could be read. What is stored for a user beside such a file comes back.
 */
#include "daemon/policy.h"

#include "daemon/model/tokenizer.h" /* utf8_valid() */

#include <assert.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define LAYER "/etc/residentd/policy.d"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char root[128];
static int file = -1;

static void remove_tree(void)
{
	static const char *const names[] = {
		LAYER "/50-fuzz.conf", LAYER, "/etc/residentd", "/etc", "/policy.d/90-set.conf",
		"/policy.d",           "",
	};

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		_cleanup_(freep) char *path = NULL;

		if (asprintf(&path, "%s%s", root, names[i]) >= 0)
			remove(path);
	}
}

static void make_path(char path[static 256], const char *name)
{
	int n = snprintf(path, 256, "%s%s", root, name);

	assert(n > 0 && n < 256);
}

/* The drop-in is a link to memory, which costs no disk. */
static void make_tree(void)
{
	static const char *const names[] = { "/etc", "/etc/residentd", LAYER, "/policy.d" };
	char path[256], target[64];

	snprintf(root, sizeof(root), "%s/residentd-fuzz-policy-XXXXXX", P_tmpdir);
	assert(mkdtemp(root));
	atexit(remove_tree);
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		make_path(path, names[i]);
		assert(mkdir(path, 0700) == 0);
	}
	file = memfd_create("policy", MFD_CLOEXEC);
	assert(file >= 0);
	snprintf(target, sizeof(target), "/proc/self/fd/%d", file);
	make_path(path, LAYER "/50-fuzz.conf");
	assert(symlink(target, path) == 0);
}

static void check_limits(const struct policy_limits *l)
{
	assert(l->weight >= 1 && l->weight <= 10000);
	assert(l->sessions <= 65536);
	assert(l->queue_max >= 1 && l->queue_max <= 65536);
	assert(l->tokens_per_day <= INT64_MAX || l->tokens_per_day == UINT64_MAX);
	assert((l->kv_bytes_max >= 1 && l->kv_bytes_max <= INT64_MAX) || l->kv_bytes_max == UINT64_MAX);
	assert((l->context_max >= 16 && l->context_max <= 1 << 24) || l->context_max == UINT32_MAX);
	assert(l->class == POLICY_IDLE || l->class == POLICY_NORMAL || l->class == POLICY_INTERACTIVE);
	assert(l->max_thinking_tokens >= -1 && l->max_thinking_tokens <= 1 << 24);
	assert(!l->models || *l->models);
	for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++) {
		_cleanup_(buf_done) struct buf value = {};

		assert(streq(l->source[k], "default") || strstr(l->source[k], ".conf:"));
		policy_value_to_string(l, k, &value);
		assert(policy_check_value(k, value.data ? value.data : "", NULL) == 0);
	}
	policy_model_allowed(l, "qwen3.5-35b-a3b");
	assert(l->models || policy_model_allowed(l, ""));
}

static void check_warnings(const struct buf *w)
{
	const char *line = w->data, *newline;

	if (w->len == 0)
		return;
	assert(utf8_valid(w->data, w->len));
	assert(strlen(w->data) == w->len);
	for (; *line; line = newline + 1) {
		assert(startswith(line, root));
		newline = strchr(line, '\n');
		assert(newline);
	}
}

static void read_as_file(const uint8_t *data, size_t size)
{
	static const gid_t gids[] = { 0, 100 };
	static const struct policy_who who[] = {
		{ .uid = 0, .gids = gids, .n_gids = 2, .unit = "backup-home.service" },
		{ .uid = 1000, .gids = gids + 1, .n_gids = 1 },
	};
	_cleanup_(buf_done) struct buf warnings = {};
	struct policy *p = NULL;

	assert(ftruncate(file, 0) == 0);
	assert(pwrite(file, data, size, 0) == (ssize_t)size);
	assert(policy_read(root, root, &p, &warnings) == 0);
	check_warnings(&warnings);
	for (size_t i = 0; i < ARRAY_SIZE(who); i++) {
		struct policy_limits l;

		policy_effective(p, &who[i], &l);
		check_limits(&l);
	}
	policy_free(p);
}

/* Stores one setting where the input stood before; all the rest of the file must mean what it meant. */
static void store_beside(const uint8_t *data, size_t size)
{
	static const struct policy_pair pair = { POLICY_MODELS, "x\\" };
	struct policy *before = NULL, *after = NULL;
	struct policy_limits l, m;
	char path[256];
	int fd;

	make_path(path, "/policy.d/90-set.conf");
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	assert(fd >= 0);
	assert(write(fd, data, size) == (ssize_t)size);
	close(fd);
	assert(policy_read("/nonexistent", root, &before, NULL) == 0);
	assert(policy_store_user(root, "4000000000", &pair, 1, NULL) == 0);
	assert(policy_read("/nonexistent", root, &after, NULL) == 0);
	for (uid_t uid = 0; uid < 2; uid++) {
		static const gid_t gid = 0;
		const struct policy_who who = {
			.uid = uid, .gids = &gid, .n_gids = uid, .unit = "backup-home.service"
		};

		policy_effective(before, &who, &l);
		policy_effective(after, &who, &m);
		for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++) {
			_cleanup_(buf_done) struct buf a = {}, b = {};

			policy_value_to_string(&l, k, &a);
			policy_value_to_string(&m, k, &b);
			assert(a.len == b.len && (a.len == 0 || streq(a.data, b.data)));
		}
	}
	policy_effective(after, &(struct policy_who){ .uid = 4000000000 }, &m);
	assert(streq(m.models, "x\\"));
	policy_free(before);
	policy_free(after);
	assert(unlink(path) == 0);
}

static void read_as_value(const uint8_t *data, size_t size)
{
	_cleanup_(freep) char *text = malloc(size + 1);

	assert(text);
	memcpy(text, data, size);
	text[size] = 0;
	for (enum policy_key k = 0; k < POLICY_KEY_MAX; k++) {
		_cleanup_(freep) char *error = NULL;
		int r = policy_check_value(k, text, &error);

		assert(r == 0 ? !error && !strchr(text, '\n') : r == -EINVAL && error);
	}
	policy_key_from_string(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (file < 0)
		make_tree();
	if (size > 1 << 16)
		return 0;
	read_as_file(data, size);
	read_as_value(data, size);
	if (size < 1024)
		store_beside(data, size);
	return 0;
}
