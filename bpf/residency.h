/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * residency.h: what the tracer's three parts share: the BPF programs (residency.bpf.c), the helper that loads them (residentd-bpf.c)
 * and the daemon (daemon/residency/feed.c).
 *
 * First the maps, then the wire between helper and daemon: a Unix socket of packets, one message each, in the machine's own byte
 * order. The daemon asks, the helper answers each message once. Attached is what a connection asked for, as long as it stays open.
 * Layouts only. Invariant: pages of the model are numbered through, part after part, the first page of each part a
 * multiple of RESIDENCY_ALIGN, so that no word of a bitmap is of two parts.
 */
#pragma once

#ifdef __bpf__
#include "bpf/kernel-types.h"
#else
#include <stdint.h>
#endif

#define RESIDENCY_SOCKET "/run/residentd/bpf.sock"

#define RESIDENCY_PARTS   64
#define RESIDENCY_EXTENTS 4096 /* a power of two */
#define RESIDENCY_BLOCKS  (1u << 20)
#define RESIDENCY_PAGES   (1ull << 28) /* 1 TiB of 4 KiB pages: 32 MiB a bitmap */
#define RESIDENCY_ALIGN   64
#define RESIDENCY_BUCKETS 40          /* of the histogram: i counts [2^i, 2^(i+1)) ns */
#define RESIDENCY_RING    (64u << 10) /* bytes: 1600 faults */

/* ---- maps ---- */

/*
 * The descriptors of the answer to RESIDENCY_ATTACH, in this order. PRESENT counts where TOUCHED is set: the page was added or deleted since the
 * attachment (or RESIDENCY_RESET). A page that was not is where it was then, which the daemon finds out itself, without a race.
 */
enum residency_map {
	RESIDENCY_PRESENT,   /* array of u64: a bit a page: in the page cache */
	RESIDENCY_TOUCHED,   /* likewise */
	RESIDENCY_COUNTERS,  /* array of struct residency_counters: blocks, then the trunk */
	RESIDENCY_HISTOGRAM, /* array of u64: major faults of the peer by latency */
	RESIDENCY_FAULTS,    /* ring buffer of struct residency_fault */
	RESIDENCY_MAPS,
};

/* In pages; a page is of the block that its first byte is of. */
struct residency_counters {
	uint64_t faults, adds, deletes, refaults;
};

/* A fault of a thread of the peer. */
struct residency_fault {
	uint64_t time_ns;    /* CLOCK_MONOTONIC */
	uint64_t latency_ns; /* 0: not measured: page counts, and it may have been in memory already */
	uint64_t where;      /* page of the model, or (latency measured) the address */
	uint32_t tid;
	uint32_t zero;
};

/* ---- between the helper and its programs ---- */

struct residency_inode {
	uint64_t ino;
	uint32_t dev;
	uint32_t zero;
};

struct residency_file {
	uint64_t first, pages;
};

struct residency_range { /* blocks one after the other; sorted by start */
	uint64_t start, stride;
	uint32_t n, first_block;
};

/* Fixed at load. */
struct residency_config {
	uint64_t ns_dev, ns_ino; /* the pid namespace that the numbers below are of */
	uint32_t peer_tgid, own_tgid;
	uint32_t n_blocks;
	uint32_t search; /* the largest power of two that is no more than there are ranges */
	uint32_t page_shift;
	uint32_t folios; /* the page cache's events tell a struct folio, not a struct page */
	uint32_t one_file;
	uint32_t zero;
	struct residency_file file; /* the one */
};

struct residency_state {
	uint64_t filter; /* bit i: there is a file with ino % 64 == i */
	/* one_file: the kernel's address of its pages, once seen; it stays, because the file is kept open. 0: not seen yet. */
	uint64_t mapping;
	uint64_t latency;
	/* A probing read of the helper's: of this page of a file, and whose page it turned out to be. */
	uint64_t probe_index;
	uint64_t probe_ino;
	uint32_t probe_dev;
	uint32_t probe_seen;
};

/* ---- the wire ---- */

#define RESIDENCY_MAGIC   0x52425046u
#define RESIDENCY_VERSION 1
#define RESIDENCY_TEXT    256

enum residency_message {
	RESIDENCY_ATTACH = 1, /* first and once; with a readable descriptor for each part */
	RESIDENCY_LATENCY,    /* measure the latency of major faults, or do not */
	RESIDENCY_RESET,      /* TOUCHED becomes zero */
};

struct residency_header {
	uint32_t magic;
	uint16_t version;
	uint16_t type; /* enum residency_message; in an answer: of what it answers */
};

/* A matrix of experts. */
struct residency_extent {
	uint32_t part;
	uint32_t first_block;
	uint32_t n;
	uint32_t zero;
	uint64_t offset, stride; /* bytes; offset: in the part */
};

struct residency_attach {
	struct residency_header header;
	uint32_t page_bytes;
	uint32_t n_parts, n_blocks, n_extents;
	struct residency_extent extents[]; /* sorted by part and offset, disjoint */
};

struct residency_latency {
	struct residency_header header;
	uint32_t on;
	uint32_t zero;
};

/* Bits of `attached`. */
enum residency_program {
	RESIDENCY_ON_ADD,
	RESIDENCY_ON_DELETE,
	RESIDENCY_ON_FAULT,
	RESIDENCY_ON_BEGIN,  /* of any page fault: the clock starts */
	RESIDENCY_ON_END,    /* of a major one: the machine's count of them goes up */
	RESIDENCY_ON_RETURN, /* instead: the kernel's function returns */
	RESIDENCY_PROBE,     /* the helper's alone */
	RESIDENCY_PROGRAMS,
};

struct residency_reply {
	struct residency_header header;
	int32_t error;             /* 0 or -errno */
	uint32_t attached;         /* RESIDENCY_ON_BEGIN, _END and _RETURN: could be */
	char text[RESIDENCY_TEXT]; /* NUL-terminated: why not, or what is missing; "": nothing */
};
