/* SPDX-License-Identifier: MIT */
/*
 * kv.h: keys and values of attention, in fixed-size pages from one arena, with a page table per sequence.
 *
 * The arena owns the memory (one anonymous mapping, touched page by page, given back when a page is free); a page is shared
 * by reference count, so a clone costs no memory until it writes. Engine thread only. Invariants: a page is written only
 * while its count is 1; the sum of references in all tables equals the sum of counts (tested as a property).
 * A page holds KV_PAGE_TOK positions of all attention layers: [layer][K then V][head][position][dim], f16 or f32.
 */
#pragma once

#include "daemon/base.h"
#include "daemon/model/model.h"

#define KV_PAGE_TOK 32

struct kv_arena;

/*
 * Where the memory of sequences lies: of the machine, or of a card. What is allocated reads as zeros; addresses are for the backend that
 * computes with them. free and the copies do nothing when the card is gone. One provider for all memory of an arena and of the
 * recurrent states beside it.
 */
struct kv_memory {
	void *userdata;
	/* NULL: there is no more. state: for recurrent state, all of which is used soon; else for the arena, one, whose pages are used by and by. */
	void *(*alloc)(void *userdata, size_t bytes, bool state);
	void (*free)(void *userdata, void *p, size_t bytes);
	void (*copy)(void *userdata, void *to, const void *from, size_t bytes);
	void (*zero)(void *userdata, void *p, size_t bytes); /* and gives back what can be given back */
};
extern const struct kv_memory kv_memory_host;

struct kv_table {
	uint32_t *pages;
	size_t n_pages, alloc;
};

/* bytes_max is rounded down to whole pages; -E2BIG when it holds not even one. f16 selects the element type. */
int kv_arena_new(const struct kv_layout *l, bool f16, size_t bytes_max, struct kv_arena **ret);
/* The same in other memory; the struct is copied. */
int kv_arena_new_in(const struct kv_memory *memory, const struct kv_layout *l, bool f16,
		    size_t bytes_max, struct kv_arena **ret);
const struct kv_memory *kv_arena_memory(const struct kv_arena *a);
struct kv_arena *kv_arena_free(struct kv_arena *a);
size_t kv_arena_page_bytes(const struct kv_arena *a);
size_t kv_arena_n_pages(const struct kv_arena *a);
size_t kv_arena_n_free(const struct kv_arena *a);
bool kv_arena_f16(const struct kv_arena *a);

/* Makes positions [from, to) writable: allocates pages, and copies a shared page before its first write. -ENOSPC when the
 * arena is full (the table is unchanged then), -ENOMEM. */
int kv_table_reserve(struct kv_arena *a, struct kv_table *t, size_t from, size_t to);
void kv_table_truncate(struct kv_arena *a, struct kv_table *t, size_t n_tok); /* keeps positions [0, n_tok) */
int kv_table_clone(struct kv_arena *a, const struct kv_table *from, struct kv_table *ret); /* shares every page */
void kv_table_done(struct kv_arena *a, struct kv_table *t);
unsigned kv_page_refs(const struct kv_arena *a, uint32_t page);

/* Base of [KV_PAGE_TOK][dim] of one page, attention layer and head. */
void *kv_k(const struct kv_arena *a, uint32_t page, uint32_t layer, uint32_t head);
void *kv_v(const struct kv_arena *a, uint32_t page, uint32_t layer, uint32_t head);
