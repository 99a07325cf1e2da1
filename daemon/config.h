/* SPDX-License-Identifier: MIT */
/*
 * config.h: residentd.conf. Parses into plain values; a bad value keeps the default and yields one warning with file and line.
 *
 * Pure: never logs, the caller prints the warnings. Loop thread. Every default stands in config_defaults() and, commented, in
 * policy/residentd.conf (a test compares the two).
 */
#pragma once

#include "daemon/base.h"
#include "daemon/residency/evict.h"
#include "daemon/residency/residency.h"

#define CONFIG_VRAM_OFF UINT64_MAX

struct config {
	/* [Model] */
	char *model_path; /* Path=; NULL: the default model of the models directory, if any */
	uint32_t context; /* Context= tokens per session; 0: the model's own, at most 32768 */
	/* [Engine] */
	uint32_t threads;   /* Threads=; 0 (auto): physical cores the process may use */
	int tune_kernels;   /* TuneKernels=: 0 or 1 */
	uint32_t batch_tok; /* BatchTokens= of one prefill step, 1..4096; 0: auto, see engine.h */
	uint64_t kv_bytes_max; /* KvBytesMax=, suffixes K M G; 0: auto */
	enum config_kv {
		CONFIG_KV_AUTO,
		CONFIG_KV_F16,
		CONFIG_KV_F32
	} kv_type; /* KvType=auto|f16|f32 */
	/* [Memory] */
	enum residency_tier host_tier;  /* HostTier=auto|mapped|arena */
	uint64_t host_budget_bytes;     /* HostBudget=; 0: auto */
	uint64_t memory_reserve_bytes;  /* MemoryReserve=; 0: auto */
	uint64_t vram_budget_bytes;     /* VramBudget=; 0: auto; CONFIG_VRAM_OFF: the CPU alone */
	uint64_t vram_reserve_bytes;    /* VramReserve=, default 512M */
	uint64_t host_idle_us;          /* HostIdleSec=, default 10min; infinity: never */
	enum evict_policy evict_policy; /* EvictionPolicy= */
	int prefetch;                   /* Prefetch=auto|off|on: -1, 0, 1 */
	uint32_t disk_queue_depth;      /* DiskQueueDepth=; 0: auto */
	/* [Service] */
	uint32_t queue_max;         /* QueueMax= requests waiting or running, default 64 */
	uint32_t sessions_max;      /* SessionsMax= in all, default 256 */
	uint32_t sessions_per_user; /* SessionsPerUser=, default 32 */
	uint32_t connections_max;   /* ConnectionsMax=, default 512 */
	uint64_t idle_exit_us; /* IdleExitSec= without clients, sessions and holds under socket activation, default 15min; infinity: never */
	uint64_t keep_us; /* KeepSec= of a kept session without use, default 1h; time spans like systemd (s, min, h, d) */
	uint64_t message_bytes_max; /* MessageMax= of one request, default 4M, 64K..64M */
	uint32_t max_tokens; /* MaxTokens= of an answer when the client names none, default 2048 */
	int64_t max_thinking_tokens; /* MaxThinkingTokens= default for thinking, default 4096; 0: off; infinity: -1 */
	/* [Log] */
	int log_level; /* Level= error|warning|notice|info|debug */
};

void config_defaults(struct config *c);
void config_done(struct config *c);
/* Reads one file over c. 0, or -errno when it cannot be read (-ENOENT...). Each bad line appends "FILE:LINE: …, ignoring\n" to
 * warnings (may be NULL) and changes nothing. Lines: [Section], Key=value, # or ; comments, trailing \ continues. */
int config_read(struct config *c, const char *path, struct buf *warnings);
/* The layers as systemd has them: /usr/lib, /etc, /run residentd.conf (first of /etc, /run, /usr/lib wins) and residentd.conf.d drop-ins of
 * all three, by name. root is "" in production, a prefix in tests. */
int config_read_layers(struct config *c, const char *root, struct buf *warnings);

/* Pure value parsers, also for options: 0, -EINVAL, -ERANGE. */
int parse_u64(const char *s, uint64_t min, uint64_t max, uint64_t *ret);
int parse_bytes(const char *s, uint64_t *ret); /* 4096, 64K, 1.5G (powers of 1024) */
int parse_vram(const char *s, uint64_t *ret); /* VramBudget=: auto (0), off (CONFIG_VRAM_OFF), a size */
int parse_span_us(const char *s, uint64_t *ret); /* 90, 90s, 5min, 1h 30min, 1d, infinity (UINT64_MAX) */
