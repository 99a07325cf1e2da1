/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * kernel-types.h: of the kernel's types as much as the tracer reads, written by hand, so that the build needs neither a kernel with
 * BTF nor bpftool.
 *
 * For residency.bpf.c alone. Only names and types of fields matter: where a field lies is found at load, in the running kernel's
 * BTF (CO-RE). A suffix ___x is no part of the name: it tells apart what a struct has been over time.
 */
#pragma once

typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL       ((void *)0)
#define UINT32_MAX (~(uint32_t)0)
#define UINT64_MAX (~(uint64_t)0)

/* What libbpf's own headers take for granted. */
typedef uint8_t __u8;
typedef uint16_t __u16;
typedef uint32_t __u32;
typedef uint64_t __u64;
typedef int32_t __s32;
typedef int64_t __s64;
typedef uint16_t __be16;
typedef uint32_t __be32;
typedef uint32_t __wsum;

/* From the kernel's user-space interface: these numbers never change. */
enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};

enum {
	BPF_F_NO_PREALLOC = 1,
	BPF_F_MMAPABLE = 1 << 10,
	BPF_RB_NO_WAKEUP = 1,
	BPF_LOCAL_STORAGE_GET_F_CREATE = 1,
};

/* Inside the kernel, and the same in all of them so far. */
enum vm_fault_reason {
	VM_FAULT_MAJOR = 0x4,
	VM_FAULT_RETRY = 0x400,
};

struct bpf_pidns_info {
	uint32_t pid, tgid;
};

/* What a perf_event program is given: user_pt_regs of the architecture, then these two. */
#if defined(__TARGET_ARCH_x86)
#define PT_REGS_WORDS 21
#elif defined(__TARGET_ARCH_arm64)
#define PT_REGS_WORDS 34
#else
#error "how large is bpf_user_pt_regs_t here?"
#endif
struct bpf_perf_event_data {
	uint64_t regs[PT_REGS_WORDS];
	uint64_t sample_period;
	uint64_t addr;
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct super_block {
	uint32_t s_dev; /* major << 20 | minor */
};

struct inode {
	struct super_block *i_sb;
	unsigned long i_ino;
};

struct address_space {
	struct inode *host;
};

/* The argument of the page cache's events until 5.16; what a folio begins with. */
struct page {
	unsigned long flags;
	struct address_space *mapping;
	unsigned long index;
};

/* In the second page of a compound one, until 6.0. */
struct page___order {
	unsigned char compound_order;
};

struct folio {
	unsigned long flags; /* until 6.17 */
	struct address_space *mapping;
	unsigned long index;
	unsigned long _flags_1; /* the lowest byte is the order, from 6.6 on */
};

struct folio___order {
	unsigned char _folio_order; /* 6.1 to 6.5 */
};

struct memdesc_flags___struct {
	unsigned long f;
};

struct folio___struct {
	struct memdesc_flags___struct flags; /* from 6.18 on */
};

#pragma clang attribute pop

enum pageflags {
	PG_head = 1, /* the number is the running kernel's */
};
