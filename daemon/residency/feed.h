/* SPDX-License-Identifier: MIT */
/*
 * feed.h: what the tracer (residentd-bpf) tells about the model's pages, and what takes its place when there is no tracer.
 *
 * The loop thread owns the connection (connect, re-attach, end). The numbers are plain memory, mapped read-only from the tracer's maps:
 * any thread may read them through the functions below, without a system call. A feed is of one model: made at load, freed at
 * unload, after the engine has let go of it. Refuses to know policy. Invariants: bits are only believed while the feed is live and
 * was seeded; the daemon needs no bpf() and no capability. The tracer is not trusted with sizes: what it sends is checked.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/residency/catalog.h"

#include <systemd/sd-event.h>

#define FEED_HISTOGRAM 40 /* bucket i: [2^i, 2^(i+1)) ns */

struct feed;

enum feed_source { FEED_BPF, FEED_CACHESTAT, FEED_MINCORE, FEED_NONE };

struct feed_block {
	uint64_t faults, adds, deletes, refaults; /* pages; refault: added again after it was deleted */
};

struct feed_fault {                   /* by a thread of this process */
	uint64_t time_ns, latency_ns; /* latency 0: not measured */
	uint32_t block;               /* CATALOG_NONE: trunk */
	uint32_t tid;
};

/* socket_path: of the tracer; NULL: $RESIDENTD_BPF_SOCKET, else where its unit has it. Tries at once and, while the tracer is away, again every few seconds on `event` (NULL: only once).
 * on_change (may be NULL) is called on the loop thread when the source changes. Never fails for want of a tracer. -ENOMEM, -errno. */
int feed_new(sd_event *event, const char *socket_path, const struct catalog *c,
	     void (*on_change)(void *arg), void *arg, struct feed **ret);
struct feed *feed_free(struct feed *f); /* accepts NULL, returns NULL */

enum feed_source feed_source(const struct feed *f);
const char *feed_source_to_string(enum feed_source s); /* "bpf", "cachestat", "mincore", "none" */
/* Why it is not bpf, or what the tracer could not attach; static or owned by the feed, loop thread. NULL: nothing to say. */
const char *feed_reason(const struct feed *f);

/* Whole pages of the block in the page cache (edge pages that it shares with a neighbour are not counted), and of how many. BPF: from the
 * bitmap, no system call. Else by cachestat or mincore: one call a range. -ENODATA: not known (FEED_NONE). Any thread. */
int feed_block_pages(const struct feed *f, uint32_t block, uint32_t *ret_resident, uint32_t *ret_all);
/* FEED_BPF only, else -ENODATA. Any thread. */
int feed_block_counters(const struct feed *f, uint32_t block, struct feed_block *ret);
int feed_trunk_counters(const struct feed *f, struct feed_block *ret);
/* Major faults of this process by latency, since latency measuring was switched on. */
int feed_histogram(const struct feed *f, uint64_t ret_count[FEED_HISTOGRAM]);
/* Costs a little at every page fault of the machine: on only while somebody looks, or the policy needs prices. Loop thread. */
int feed_measure_latency(struct feed *f, bool on);
/* Faults taken by our own threads since the last call; at most max, returns how many. One reader: the loop thread. */
size_t feed_take_faults(struct feed *f, struct feed_fault *ret, size_t max);
/* Compares the bitmap with mincore/cachestat over the whole model; pages that differ. Loop thread; slow (tens of ms per GiB). */
int feed_check(struct feed *f, uint64_t *ret_differ);
