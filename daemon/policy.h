/* SPDX-License-Identifier: MIT */
/*
 * policy.h: who may ask for how much. the files of policy.d with [Default], [User x], [Group y] and [Unit z*.service] sections.
 *
 * Pure: parses, resolves, prints; never logs. Loop thread. A section sets single values; what applies to somebody is [Default], then every
 * matching [Group], then [User], then every matching [Unit], each in the order of the files; the last one that sets a value wins, and it is
 * remembered which file and line that was. A bad value costs one warning and changes nothing.
 */
#pragma once

#include "daemon/base.h"

#include <sys/types.h>

enum policy_class { POLICY_IDLE, POLICY_NORMAL, POLICY_INTERACTIVE };

enum policy_key {
	POLICY_ALLOW,
	POLICY_WEIGHT,
	POLICY_SESSIONS,
	POLICY_QUEUE_MAX,
	POLICY_TOKENS_PER_DAY,
	POLICY_KV_BYTES_MAX,
	POLICY_CONTEXT_MAX,
	POLICY_CLASS,
	POLICY_PAUSE_IDLE,
	POLICY_MAX_THINKING_TOKENS,
	POLICY_MODELS,
	POLICY_KEY_MAX,
};

/* What applies to one client. */
struct policy_limits {
	bool allow; /* Allow=, default yes */
	uint32_t weight; /* Weight= 1..10000, default 100: share of the engine's time among users that want it */
	uint32_t sessions;  /* Sessions= open at once, default 32 */
	uint32_t queue_max; /* QueueMax= requests waiting or running, default 32 */
	uint64_t tokens_per_day; /* TokensPerDay=, suffixes k M G of 1000; UINT64_MAX: infinity (default) */
	uint64_t kv_bytes_max; /* KvBytesMax= of all his sessions; UINT64_MAX: infinity (default) */
	uint32_t context_max;  /* ContextMax= tokens in a session; UINT32_MAX: infinity (default) */
	enum policy_class class; /* Class=idle|normal|interactive, default normal */
	bool pause_idle; /* PauseIdle= requests of class idle wait until it is no, default no */
	int64_t max_thinking_tokens; /* MaxThinkingTokens=; -1: infinity (default) */
	const char *models; /* Models= blank-separated globs of model names; NULL: all. Owned by the policy */
	const char *source[POLICY_KEY_MAX]; /* "FILE:LINE", or "default". Owned by the policy */
};

struct policy_who {
	uid_t uid;
	const gid_t *gids;
	size_t n_gids;
	const char *unit; /* system unit, NULL: none */
};

struct policy;

/* Directories policy.d of root/etc/residentd, root/run/residentd and root/usr/lib/residentd, merged by base name (etc beats run beats lib, as
 * for residentd.conf), in name order. The policy.d of state_dir (may be NULL) hides and is hidden by nothing: a file there is read just before
 * those of its name, so that a 90-set.conf set for this boot in /run wins over the lasting one without taking its settings away.
 * Users and groups are resolved to ids here; unknown names are warned about. Missing directories are no error. -ENOMEM. */
int policy_read(const char *root, const char *state_dir, struct policy **ret, struct buf *warnings);
struct policy *policy_free(struct policy *p);
DEFINE_CLEANUP(struct policy *, policy_free)
/* p NULL: the defaults. What ret points to is the policy's. */
void policy_effective(const struct policy *p, const struct policy_who *who, struct policy_limits *ret);
bool policy_model_allowed(const struct policy_limits *l, const char *model);

/* "Weight" <-> POLICY_WEIGHT; value as it would stand in a file, an empty one is the default again. -EINVAL with a text saying what is
 * expected. */
int policy_key_from_string(const char *s);
const char *policy_key_to_string(enum policy_key k);
int policy_check_value(enum policy_key k, const char *value, char **ret_error);
void policy_value_to_string(const struct policy_limits *l, enum policy_key k, struct buf *out);

/*
 * Writes settings of one user to DIR/policy.d/90-set.conf, atomically (temporary file, fsync, rename), keeping the others' there. pairs: keys and
 * values; an empty value removes the setting. DIR is the state directory (persistent) or the runtime one. user: a name or a uid.
 * -EINVAL: a bad value or name; -ENOENT: no such user (removing is possible still); -errno: cannot be read or written. Then nothing changed.
 */
struct policy_pair {
	enum policy_key key;
	const char *value;
};
int policy_store_user(const char *dir, const char *user, const struct policy_pair *pairs, size_t n,
		      char **ret_error);
