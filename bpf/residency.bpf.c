/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * residency.bpf.c: keeps account of the model's pages while the kernel adds them to the page cache and takes them out again.
 *
 * Runs in the kernel, on whatever thread causes an event; loaded by residentd-bpf once per model, one object for kernels 5.15 to 6.18
 * and later. The events are the whole machine's: a page of another file must cost next to nothing. Refuses to know the
 * policy and the layout of the file beyond pages and blocks. Invariants: adding and deleting the same page cannot overlap (both under the
 * folio's lock), so PRESENT is written first and TOUCHED after it; whoever sees TOUCHED may believe PRESENT.
 */
#include "bpf/residency.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Blocks that one folio is booked on one by one; the last takes the rest. A huge page over blocks of 300 KB has 8. */
#define PIECES    16
/* 8 MiB of 4 KiB pages: more than the kernel's largest folio of a file. */
#define ORDER_MAX 11

char license_text[] SEC("license") = "Dual MIT/GPL";

const volatile struct residency_config config SEC(".rodata.config") = {};
volatile struct residency_state state SEC(".data.state") = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, RESIDENCY_PARTS);
	__type(key, struct residency_inode);
	__type(value, struct residency_file);
} files SEC(".maps");

/* The sizes of these are the model's, set before loading. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, uint32_t);
	__type(value, struct residency_range);
} ranges SEC(".maps");

struct bitmap {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, uint32_t);
	__type(value, uint64_t);
};
struct bitmap present SEC(".maps");
struct bitmap touched SEC(".maps");
struct bitmap deleted SEC(".maps"); /* at any time: what is added again is a refault */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, uint32_t);
	__type(value, struct residency_counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, RESIDENCY_BUCKETS);
	__type(key, uint32_t);
	__type(value, uint64_t);
} histogram SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RESIDENCY_RING);
} faults SEC(".maps");

/* When the thread's last fault began, and where. */
struct begun {
	uint64_t time_ns, page;
	uint64_t major; /* seen by fault_returned() */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct begun);
} begun SEC(".maps");

/* ---- who and where ---- */

/* Is the running thread of this process, as its pid namespace numbers it? */
static __always_inline bool runs(uint32_t tgid, uint32_t *ret_tid)
{
	struct bpf_pidns_info info = {};

	if (bpf_get_ns_current_pid_tgid(config.ns_dev, config.ns_ino, &info, sizeof(info)))
		return false;
	*ret_tid = info.pid;
	return info.tgid == tgid;
}

/* A model of one file is known by one comparison after its first event, and so is what is not of it: in the mapped form each
 * token's misses are thousands of events. */
static __always_inline bool file_of(const struct address_space *mapping, struct residency_file *ret)
{
	uint64_t known = state.mapping;
	const struct residency_file *file;
	struct residency_inode id = {};
	const struct inode *inode;

	if (known) {
		*ret = config.file;
		return known == (uint64_t)mapping;
	}
	inode = BPF_CORE_READ(mapping, host);
	id.ino = BPF_CORE_READ(inode, i_ino);
	if (!(state.filter >> (id.ino & 63) & 1))
		return false;
	id.dev = BPF_CORE_READ(inode, i_sb, s_dev);
	file = bpf_map_lookup_elem(&files, &id);
	if (!file)
		return false;
	*ret = *file;
	if (config.one_file)
		state.mapping = (uint64_t)mapping;
	return true;
}

/* The argument of an event of the page cache. */
struct cached {
	const struct address_space *mapping;
	uint64_t index;
	uint32_t order;
};

static __always_inline uint32_t order_of(const void *folio)
{
	const struct folio___struct *f = folio;
	unsigned long flags;
	uint32_t order;

	if (bpf_core_field_exists(f->flags.f))
		flags = f->flags.f;
	else if (config.folios)
		flags = ((const struct folio *)folio)->flags;
	else
		flags = ((const struct page *)folio)->flags;
	if (!(flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1))
		return 0;
	if (bpf_core_field_exists(((struct folio___order *)NULL)->_folio_order)) {
		order = BPF_CORE_READ((const struct folio___order *)folio, _folio_order);
	} else if (bpf_core_field_exists(((struct page___order *)NULL)->compound_order)) {
		const struct page___order *second = folio + bpf_core_type_size(struct page);

		order = BPF_CORE_READ(second, compound_order);
	} else {
		order = BPF_CORE_READ((const struct folio *)folio, _flags_1) & 0xff;
	}
	return order < ORDER_MAX ? order : ORDER_MAX;
}

static __always_inline const struct address_space *mapping_of(const void *folio)
{
	/* The argument of the event itself: the verifier knows what it is, and a plain load does. */
	return config.folios ? ((const struct folio *)folio)->mapping
			     : ((const struct page *)folio)->mapping;
}

static __always_inline uint64_t index_of(const void *folio)
{
	return config.folios ? ((const struct folio *)folio)->index
			     : ((const struct page *)folio)->index;
}

/* ---- account ----
 * Global functions: the verifier looks at each once, by itself, and not again in every turn of the loop that calls it.
 */

/* The block of a page (n_blocks: trunk) in the upper half; how many pages from this one on are of it in the lower. */
__noinline uint64_t block_at(uint64_t page)
{
	uint64_t at = page << config.page_shift, end = UINT64_MAX, n;
	uint32_t block = config.n_blocks, above = 0;
	const struct residency_range *r;

	/* above: how many ranges start at or before `at` */
	for (uint32_t step = config.search; step > 0; step >>= 1) {
		uint32_t k = above + step - 1;

		r = bpf_map_lookup_elem(&ranges, &k);
		if (!r)
			continue;
		if (r->start <= at)
			above = k + 1;
		else
			end = r->start; /* each is nearer than the one before */
	}
	if (above > 0) {
		uint32_t k = above - 1;

		r = bpf_map_lookup_elem(&ranges, &k);
		if (r && r->stride && (n = (at - r->start) / r->stride) < r->n) {
			block = r->first_block + (uint32_t)n;
			end = r->start + (n + 1) * r->stride;
		}
	}
	n = (end - at + (1ull << config.page_shift) - 1) >> config.page_shift;
	if (end == UINT64_MAX || n > UINT32_MAX)
		n = UINT32_MAX;
	return (uint64_t)block << 32 | n;
}

/* Sets or clears the bits of n pages, at most 2^ORDER_MAX; returns how many were deleted before. */
__noinline uint32_t mark(uint64_t page, uint32_t n, uint32_t added)
{
	uint32_t refaults = 0;

	for (uint32_t i = 0; i <= (1u << ORDER_MAX) / 64 && n > 0; i++) {
		uint32_t word = (uint32_t)(page / 64), first = page % 64, len = 64 - first;
		uint64_t *p, *t, *d, mask;

		if (len > n)
			len = n;
		mask = ~0ull >> ((64 - len) & 63) << first;
		p = bpf_map_lookup_elem(&present, &word);
		t = bpf_map_lookup_elem(&touched, &word);
		d = bpf_map_lookup_elem(&deleted, &word);
		if (!p || !t || !d)
			break;
		if (added) {
			refaults += (uint32_t)__builtin_popcountll(*d & mask);
			__sync_fetch_and_or(p, mask);
		} else {
			if ((*d & mask) != mask)
				__sync_fetch_and_or(d, mask);
			__sync_fetch_and_and(p, ~mask);
		}
		/* Bits of these two are only ever set (RESET aside, after which the daemon looks anew). */
		if ((*t & mask) != mask)
			__sync_fetch_and_or(t, mask);
		page += len;
		n -= len;
	}
	return refaults;
}

__noinline int book(uint32_t block, uint64_t page, uint32_t n, uint32_t added)
{
	uint32_t refaults = mark(page, n, added);
	struct residency_counters *c = bpf_map_lookup_elem(&counters, &block);

	if (!c)
		return 0;
	if (added) {
		__sync_fetch_and_add(&c->adds, n);
		if (refaults)
			__sync_fetch_and_add(&c->refaults, refaults);
	} else {
		__sync_fetch_and_add(&c->deletes, n);
	}
	return 0;
}

static __always_inline int account(const void *folio, bool added)
{
	struct residency_file file;
	uint64_t index, page;
	uint32_t n;

	if (!file_of(mapping_of(folio), &file))
		return 0;
	index = index_of(folio);
	if (index >= file.pages)
		return 0;
	n = 1u << (order_of(folio) & 15);
	if (n > file.pages - index)
		n = (uint32_t)(file.pages - index);
	page = file.first + index;
	for (uint32_t i = 0; i < PIECES && n > 0; i++) {
		uint64_t at = block_at(page);
		uint32_t piece = (uint32_t)at;

		if (piece > n || i == PIECES - 1)
			piece = n;
		book((uint32_t)(at >> 32), page, piece, added);
		page += piece;
		n -= piece;
	}
	return 0;
}

SEC("tp_btf/mm_filemap_add_to_page_cache")
int page_added(uint64_t *ctx)
{
	return account((const void *)ctx[0], true);
}

SEC("tp_btf/mm_filemap_delete_from_page_cache")
int page_deleted(uint64_t *ctx)
{
	return account((const void *)ctx[0], false);
}

/* Attached for the time of a probing read only: to what file does the page that it brought in belong? */
SEC("tp_btf/mm_filemap_add_to_page_cache")
int page_probed(uint64_t *ctx)
{
	const void *folio = (const void *)ctx[0];
	const struct inode *inode;
	uint32_t tid;

	if (!runs(config.own_tgid, &tid))
		return 0;
	if (state.probe_index - index_of(folio) >= 1ull << order_of(folio))
		return 0;
	inode = BPF_CORE_READ(mapping_of(folio), host);
	state.probe_ino = BPF_CORE_READ(inode, i_ino);
	state.probe_dev = BPF_CORE_READ(inode, i_sb, s_dev);
	state.probe_seen = 1;
	return 0;
}

/* ---- faults ---- */

static __always_inline void tell(uint64_t now, uint64_t latency, uint64_t where, uint32_t tid)
{
	struct residency_fault *f = bpf_ringbuf_reserve(&faults, sizeof(*f), 0);

	if (!f)
		return;
	f->time_ns = now;
	f->latency_ns = latency;
	f->where = where;
	f->tid = tid;
	f->zero = 0;
	bpf_ringbuf_submit(f, BPF_RB_NO_WAKEUP);
}

static __always_inline bool is_set(const uint64_t *word, uint64_t page)
{
	return word && (*word >> (page & 63) & 1);
}

/* From 6.12 on. A page that is there, but not mapped, ends up here too. */
SEC("tp_btf/mm_filemap_fault")
int page_faulted(uint64_t *ctx)
{
	struct residency_counters *c;
	struct residency_file file;
	uint32_t block, word, tid;
	uint64_t page;

	if (!file_of((const struct address_space *)ctx[0], &file) || ctx[1] >= file.pages)
		return 0;
	page = file.first + ctx[1];
	block = (uint32_t)(block_at(page) >> 32);
	c = bpf_map_lookup_elem(&counters, &block);
	if (c)
		__sync_fetch_and_add(&c->faults, 1);
	if (state.latency || !runs(config.peer_tgid, &tid))
		return 0;
	word = (uint32_t)(page / 64);
	if (!is_set(bpf_map_lookup_elem(&touched, &word), page) ||
	    !is_set(bpf_map_lookup_elem(&present, &word), page))
		tell(bpf_ktime_get_ns(), 0, page, tid);
	return 0;
}

SEC("tp_btf/page_fault_user")
int fault_begins(uint64_t *ctx)
{
	struct begun *b;
	uint32_t tid;

	if (!runs(config.peer_tgid, &tid))
		return 0;
	b = bpf_task_storage_get(&begun, bpf_get_current_task_btf(), 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!b)
		return 0;
	b->page = ctx[0] >> config.page_shift;
	b->major = 0;
	b->time_ns = bpf_ktime_get_ns();
	return 0;
}

/* What began for the running thread at this address. A fault inside a system call has no beginning of its own: the page
 * tells it from the thread's last one. */
static __always_inline struct begun *begun_at(uint64_t address)
{
	struct begun *b = bpf_task_storage_get(&begun, bpf_get_current_task_btf(), 0, 0);

	return b && b->time_ns && b->page == address >> config.page_shift ? b : NULL;
}

static __always_inline void end_of(struct begun *b, uint64_t address)
{
	uint64_t now = bpf_ktime_get_ns(), latency = now - b->time_ns, *n;
	uint32_t bucket = 0, tid;

	b->time_ns = 0;
	if (!runs(config.peer_tgid, &tid))
		return;
	for (uint64_t l = latency; l > 1 && bucket < RESIDENCY_BUCKETS - 1; l >>= 1)
		bucket++;
	n = bpf_map_lookup_elem(&histogram, &bucket);
	if (n)
		__sync_fetch_and_add(n, 1);
	tell(now, latency ? latency : 1, address, tid);
}

/* On the software event of major faults. */
SEC("perf_event")
int fault_counted(struct bpf_perf_event_data *ctx)
{
	struct begun *b = begun_at(ctx->addr);

	if (b)
		end_of(b, ctx->addr);
	return 0;
}

/* Instead, where that event takes more than CAP_PERFMON (Debian's perf_event_paranoid=3). Comes again after each wait for a page. */
SEC("fexit/handle_mm_fault")
int fault_returned(uint64_t *ctx)
{
	uint64_t address = ctx[1], result = ctx[4];
	struct begun *b = begun_at(address);

	if (!b)
		return 0;
	b->major |= result & VM_FAULT_MAJOR;
	if (!(result & VM_FAULT_RETRY) && b->major)
		end_of(b, address);
	return 0;
}
