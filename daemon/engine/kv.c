/* SPDX-License-Identifier: MIT */
/*
 * kv.c: the page arena of keys and values, and the page tables over it. See kv.h.
 *
 * Owns the mapping, the counts and the list of free pages. Engine thread only. Refuses to know what
 * a position means: it hands out memory. Invariant: refs[p] is the number of table entries that
 * name p; p is on the free list exactly when that is 0; a reservation that fails has touched
 * neither the table nor the arena. A page comes out of the free list reading as zeros, so nothing
 * of one session is ever seen by another.
 */
#include "daemon/engine/kv.h"

#include <assert.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

struct kv_arena {
	struct kv_memory memory;
	char *mem;
	size_t page_bytes, n_pages, n_free;
	uint32_t *free_list; /* the next page to hand out is free_list[n_free - 1] */
	uint32_t *refs;
	struct kv_layout layout;
	size_t k_bytes, v_bytes, layer_bytes; /* one head's keys, one head's values, all of a layer */
	bool f16;
};

static bool layout_sizes(struct kv_arena *a)
{
	const struct kv_layout *l = &a->layout;
	size_t elem = a->f16 ? sizeof(uint16_t) : sizeof(float);
	size_t head, os_page = (size_t)sysconf(_SC_PAGESIZE);

	if (!mul_ok(l->k_dim, KV_PAGE_TOK * elem, &a->k_bytes) ||
	    !mul_ok(l->v_dim, KV_PAGE_TOK * elem, &a->v_bytes) ||
	    !add_ok(a->k_bytes, a->v_bytes, &head) || !mul_ok(head, l->n_head, &a->layer_bytes) ||
	    !mul_ok(a->layer_bytes, l->n_layer, &a->page_bytes) || a->page_bytes > SIZE_MAX / 2)
		return false;
	/* Whole OS pages, so that a free page can be given back. */
	a->page_bytes = ALIGN_UP(MAX(a->page_bytes, (size_t)1), os_page);
	return true;
}

/*
 * Anonymous memory: zero until it is touched, and given back page by page. State is made now: read before it is written, every page of it
 * would be mapped twice, with a stop of the other threads in between. Not of huge pages: where memory is full of the model, they have to
 * be made first.
 */
static void *host_alloc(void *userdata, size_t bytes, bool state)
{
	void *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	(void)userdata;
	if (mem == MAP_FAILED)
		return NULL;
	/* A kernel that cannot leaves it to be touched. */
	if (state)
		(void)madvise(mem, bytes, MADV_POPULATE_WRITE);
	return mem;
}

static void host_free(void *userdata, void *p, size_t bytes)
{
	(void)userdata;
	munmap(p, bytes);
}

static void host_copy(void *userdata, void *to, const void *from, size_t bytes)
{
	(void)userdata;
	memcpy(to, from, bytes);
}

static void host_zero(void *userdata, void *p, size_t bytes)
{
	(void)userdata;
	/* Locked memory refuses to be given back; it must be wiped all the same. */
	if (madvise(p, bytes, MADV_DONTNEED) < 0)
		memset(p, 0, bytes);
}

const struct kv_memory kv_memory_host = {
	.alloc = host_alloc,
	.free = host_free,
	.copy = host_copy,
	.zero = host_zero,
};

int kv_arena_new(const struct kv_layout *l, bool f16, size_t bytes_max, struct kv_arena **ret)
{
	return kv_arena_new_in(&kv_memory_host, l, f16, bytes_max, ret);
}

const struct kv_memory *kv_arena_memory(const struct kv_arena *a)
{
	return &a->memory;
}

int kv_arena_new_in(const struct kv_memory *memory, const struct kv_layout *l, bool f16,
		    size_t bytes_max, struct kv_arena **ret)
{
	struct kv_arena *a = calloc(1, sizeof(*a));

	if (!a)
		return -ENOMEM;
	a->memory = *memory;
	a->layout = *l;
	a->f16 = f16;
	if (!layout_sizes(a) || bytes_max < a->page_bytes) {
		kv_arena_free(a);
		return -E2BIG;
	}
	a->n_pages = MIN(bytes_max / a->page_bytes, (size_t)UINT32_MAX);
	a->free_list = malloc(a->n_pages * sizeof(*a->free_list));
	a->refs = calloc(a->n_pages, sizeof(*a->refs));
	a->mem = memory->alloc(memory->userdata, a->n_pages * a->page_bytes, false);
	if (!a->free_list || !a->refs || !a->mem) {
		kv_arena_free(a);
		return -ENOMEM;
	}
	for (size_t i = 0; i < a->n_pages; i++)
		a->free_list[i] = (uint32_t)(a->n_pages - 1 - i);
	a->n_free = a->n_pages;
	*ret = a;
	return 0;
}

struct kv_arena *kv_arena_free(struct kv_arena *a)
{
	if (!a)
		return NULL;
	if (a->mem)
		a->memory.free(a->memory.userdata, a->mem, a->n_pages * a->page_bytes);
	free(a->free_list);
	free(a->refs);
	free(a);
	return NULL;
}

size_t kv_arena_page_bytes(const struct kv_arena *a)
{
	return a->page_bytes;
}

size_t kv_arena_n_pages(const struct kv_arena *a)
{
	return a->n_pages;
}

size_t kv_arena_n_free(const struct kv_arena *a)
{
	return a->n_free;
}

bool kv_arena_f16(const struct kv_arena *a)
{
	return a->f16;
}

unsigned kv_page_refs(const struct kv_arena *a, uint32_t page)
{
	assert(page < a->n_pages);
	return a->refs[page];
}

static char *page_mem(const struct kv_arena *a, uint32_t page)
{
	assert(page < a->n_pages);
	return a->mem + page * a->page_bytes;
}

void *kv_k(const struct kv_arena *a, uint32_t page, uint32_t layer, uint32_t head)
{
	assert(layer < a->layout.n_layer && head < a->layout.n_head);
	return page_mem(a, page) + layer * a->layer_bytes + head * a->k_bytes;
}

void *kv_v(const struct kv_arena *a, uint32_t page, uint32_t layer, uint32_t head)
{
	assert(layer < a->layout.n_layer && head < a->layout.n_head);
	return page_mem(a, page) + layer * a->layer_bytes + a->layout.n_head * a->k_bytes +
	       head * a->v_bytes;
}

static uint32_t page_take(struct kv_arena *a)
{
	uint32_t page;

	assert(a->n_free > 0);
	page = a->free_list[--a->n_free];
	assert(a->refs[page] == 0);
	a->refs[page] = 1;
	return page;
}

static void page_put(struct kv_arena *a, uint32_t page)
{
	char *mem = page_mem(a, page);

	assert(a->refs[page] > 0);
	if (--a->refs[page] > 0)
		return;
	a->memory.zero(a->memory.userdata, mem, a->page_bytes);
	a->free_list[a->n_free++] = page;
}

/* Room for n entries; the entries in use do not change. */
static int table_grow(struct kv_table *t, size_t n)
{
	size_t alloc, bytes;
	uint32_t *p;

	if (n <= t->alloc)
		return 0;
	if (!add_ok(n, n / 2, &alloc) || !mul_ok(alloc, sizeof(*p), &bytes))
		return -ENOMEM;
	p = realloc(t->pages, bytes);
	if (!p)
		return -ENOMEM;
	t->pages = p;
	t->alloc = alloc;
	return 0;
}

int kv_table_reserve(struct kv_arena *a, struct kv_table *t, size_t from, size_t to)
{
	size_t first = from / KV_PAGE_TOK, end, need = 0;
	int r;

	assert(from <= to && from <= t->n_pages * KV_PAGE_TOK);
	if (from == to)
		return 0;
	end = (to - 1) / KV_PAGE_TOK + 1;
	for (size_t i = first; i < MIN(end, t->n_pages); i++)
		if (a->refs[t->pages[i]] > 1)
			need++;
	if (end > t->n_pages)
		need += end - t->n_pages;
	if (need > a->n_free)
		return -ENOSPC;
	r = table_grow(t, end);
	if (r < 0)
		return r;
	for (size_t i = first; i < end; i++) {
		uint32_t old, page;

		if (i >= t->n_pages) {
			t->pages[t->n_pages++] = page_take(a);
			continue;
		}
		old = t->pages[i];
		if (a->refs[old] == 1)
			continue;
		page = page_take(a);
		a->memory.copy(a->memory.userdata, page_mem(a, page), page_mem(a, old), a->page_bytes);
		page_put(a, old);
		t->pages[i] = page;
	}
	return 0;
}

void kv_table_truncate(struct kv_arena *a, struct kv_table *t, size_t n_tok)
{
	size_t keep = n_tok / KV_PAGE_TOK + (n_tok % KV_PAGE_TOK > 0);

	while (t->n_pages > keep)
		page_put(a, t->pages[--t->n_pages]);
}

int kv_table_clone(struct kv_arena *a, const struct kv_table *from, struct kv_table *ret)
{
	struct kv_table t = {};
	int r = table_grow(&t, from->n_pages);

	if (r < 0)
		return r;
	for (size_t i = 0; i < from->n_pages; i++) {
		a->refs[from->pages[i]]++;
		t.pages[i] = from->pages[i];
	}
	t.n_pages = from->n_pages;
	*ret = t;
	return 0;
}

void kv_table_done(struct kv_arena *a, struct kv_table *t)
{
	kv_table_truncate(a, t, 0);
	free(t->pages);
	*t = (struct kv_table){};
}
