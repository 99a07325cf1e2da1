/* SPDX-License-Identifier: MIT */
/*
 * vram.c: slots in the card's memory, and the stream that fills them. See vram.h.
 *
 * Owns chunks, the table of experts, the copy stream, its events and two pieces of page-locked memory. Engine thread
 * only. Two streams touch a slot: `copy` writes it; `compute` reads it, and moves blocks between slots. `compute` waits for
 * the end of a copy before it hears of the block; the other way round a free slot remembers a mark in `compute`, behind which
 * nobody reads it. The table is written on `compute` alone: a kernel finds it as it was when the kernel was launched.
 * Invariants: slots[i].block == b exactly when b is not ABSENT and b.slot == i; the free slots of chunks that are there
 * are in their class's list, the one that was left first in front; what a copy that failed has begun to write into one of
 * them ends before the next copy begins, and before anything is moved (vram_set_limit()).
 */
#include "daemon/residency/vram.h"

#include <assert.h>

#define CLASSES_MAX   16U
#define MERGE_PERCENT 10U /* sizes that differ by less are one class */
#define SLOT_NONE     UINT32_MAX
/* What kernels may count on, and the card's own unit of a transfer. */
#define MATRIX_ALIGN  UINT64_C(256)
/* Memory of the card comes in pages of this size: what is counted as taken is a multiple. */
#define CARD_PAGE     ((uint64_t)2 << 20)
/* A slot whose mark is older than the last so many waits for the oldest of these. */
#define MARKS         32U
/* Entries of the table on their way, in one half. */
#define ENTRIES       32U

struct vram_block {
	struct vram_job *job; /* its copy, until that is taken */
	uint32_t slot;
	uint8_t class;
	uint8_t state; /* enum vram_state */
};

struct vram_slot {
	uint32_t block; /* CATALOG_NONE: free */
	uint32_t next;  /* free: the one that was left after it */
	uint64_t left; /* free: mark behind which nobody reads it; 0: there is nothing to wait for */
};

struct vram_chunk {
	void *memory; /* NULL: not there */
	uint64_t bytes;
	uint32_t n_slots, n_used;
};

struct vram_class {
	uint64_t bytes; /* of a slot */
	uint32_t n_blocks;
	/* Slot i is the (i % per_chunk)th of chunk i / per_chunk. Enough of both for all blocks. */
	uint32_t per_chunk, n_chunks;
	struct vram_chunk *chunks;
	struct vram_slot *slots;
	uint32_t n_slots, n_used; /* of chunks that are there */
	uint32_t free_first, free_last;
};

/* A copy to the card, until its end was seen. */
struct vram_job {
	struct vram_job *next;
	struct cuda_event *start, *end;
	uint32_t block;
	bool abandoned; /* the block has left before that */
};

/* Page-locked memory out of which a stream copies: filled a half at a time, and a half only when all of it was read. */
struct vram_staging {
	struct cuda_stream *stream;
	char *memory;
	uint64_t half_bytes, used; /* used: of the present half */
	unsigned half;
	struct cuda_event *read[2]; /* of each half */
};

struct vram {
	struct cuda_driver *driver;
	struct cuda_stream *compute, *copy;
	const struct catalog *catalog;
	uint64_t chunk_bytes, limit, bytes;
	struct vram_block *blocks;
	struct vram_class classes[CLASSES_MAX]; /* largest first */
	uint32_t n_classes, n_here, n_coming;
	uint32_t n_unconfirmed;    /* of those HERE */
	struct cuda_expert *table; /* in the card, [n_blocks] */
	struct vram_staging staging, entries;
	struct cuda_event *marks[MARKS];
	uint64_t n_marks;
	struct vram_job *jobs, **jobs_end; /* in the order of the copy stream */
	struct vram_job *idle;
	struct vram_counters counters;
	bool lost;
};

/* Passes the result of a call of the driver on. */
static int check(struct vram *v, int r)
{
	if (r == -ENODEV)
		v->lost = true;
	return r;
}

static const struct catalog_layer *layer_of(const struct vram *v, uint32_t block)
{
	return &v->catalog->layers[catalog_layer_of(v->catalog, block)];
}

static struct vram_class *class_of(struct vram *v, uint32_t block)
{
	return &v->classes[v->blocks[block].class];
}

/* Where in its slot each matrix begins, and what all take together. */
static uint64_t layout(const struct catalog_layer *l, uint64_t ret_at[CATALOG_MATRICES])
{
	uint64_t end = 0;

	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		ret_at[i] = end;
		if (l->matrix[i])
			end += ALIGN_UP(l->expert_bytes[i], MATRIX_ALIGN);
	}
	return end;
}

/* ---- slots ---- */

static char *slot_memory(const struct vram_class *k, uint32_t slot)
{
	return (char *)k->chunks[slot / k->per_chunk].memory + slot % k->per_chunk * k->bytes;
}

/* To the end of the list. */
static void list_slot(struct vram_class *k, uint32_t slot, uint64_t left)
{
	k->slots[slot] = (struct vram_slot){ .block = CATALOG_NONE, .next = SLOT_NONE, .left = left };
	if (k->free_first == SLOT_NONE)
		k->free_first = slot;
	else
		k->slots[k->free_last].next = slot;
	k->free_last = slot;
}

/* Nothing is put into free slots of that chunk any more. */
static void unlist_chunk(struct vram_class *k, uint32_t chunk)
{
	uint32_t slot = k->free_first, next;

	k->free_first = SLOT_NONE;
	for (; slot != SLOT_NONE; slot = next) {
		next = k->slots[slot].next;
		if (slot / k->per_chunk != chunk)
			list_slot(k, slot, k->slots[slot].left);
	}
}

/* The first of the list is the block's. */
static void occupy(struct vram *v, uint32_t block)
{
	struct vram_class *k = class_of(v, block);
	uint32_t slot = k->free_first;

	k->free_first = k->slots[slot].next;
	k->slots[slot].block = block;
	k->chunks[slot / k->per_chunk].n_used++;
	k->n_used++;
	v->blocks[block].slot = slot;
}

/* The slot is nobody's, and not in the list either. */
static void vacate(struct vram_class *k, uint32_t slot)
{
	k->slots[slot].block = CATALOG_NONE;
	k->chunks[slot / k->per_chunk].n_used--;
	k->n_used--;
}

static uint32_t next_chunk_slots(const struct vram_class *k)
{
	return MIN(k->per_chunk, k->n_blocks - k->n_slots);
}

static uint64_t next_chunk_bytes(const struct vram *v, const struct vram_class *k)
{
	uint64_t grain = MIN(v->chunk_bytes, CARD_PAGE);

	return (next_chunk_slots(k) * k->bytes + grain - 1) / grain * grain;
}

static bool may_grow(const struct vram *v, const struct vram_class *k)
{
	return v->bytes <= v->limit && next_chunk_bytes(v, k) <= v->limit - v->bytes;
}

static int grow(struct vram *v, struct vram_class *k)
{
	uint64_t bytes = next_chunk_bytes(v, k);
	uint32_t i = 0, n = next_chunk_slots(k);
	void *memory;
	int r;

	if (!may_grow(v, k))
		return -ENOSPC;
	r = check(v, cuda_alloc(v->driver, bytes, &memory));
	if (r == -ENOMEM)
		v->limit = v->bytes;
	if (r < 0)
		return r;
	while (k->chunks[i].memory)
		i++;
	assert(i < k->n_chunks && n > 0);
	k->chunks[i] = (struct vram_chunk){ .memory = memory, .bytes = bytes, .n_slots = n };
	for (uint32_t s = 0; s < n; s++)
		list_slot(k, i * k->per_chunk + s, 0);
	k->n_slots += n;
	v->bytes += bytes;
	return 0;
}

/* ---- streams ---- */

/* Room in the present half, of the size that was wanted or less. May wait for the other half. */
static int stage(struct vram *v, struct vram_staging *s, uint64_t wanted, char **ret, uint64_t *ret_bytes)
{
	int r;

	if (s->used == s->half_bytes) {
		r = check(v, cuda_event_record(v->driver, s->read[s->half], s->stream));
		if (r < 0)
			return r;
		r = check(v, cuda_event_synchronize(v->driver, s->read[!s->half]));
		if (r < 0)
			return r;
		s->half = !s->half;
		s->used = 0;
	}
	*ret_bytes = MIN(wanted, s->half_bytes - s->used);
	*ret = s->memory + s->half * s->half_bytes + s->used;
	s->used += *ret_bytes;
	return 0;
}

/* A mark behind all that `compute` was given until now. */
static int mark(struct vram *v, uint64_t *ret)
{
	uint64_t n = v->n_marks + 1;
	int r;

	r = check(v, cuda_event_record(v->driver, v->marks[n % MARKS], v->compute));
	if (r == 0)
		*ret = v->n_marks = n;
	return r;
}

static int wait_for_mark(struct vram *v, uint64_t n)
{
	uint64_t oldest = v->n_marks < MARKS ? 1 : v->n_marks - MARKS + 1;

	if (n == 0)
		return 0;
	n = MAX(n, oldest);
	return check(v, cuda_stream_wait(v->driver, v->copy, v->marks[n % MARKS]));
}

/* What kernels launched from now on find in the table. */
static int set_entry(struct vram *v, uint32_t block, const struct cuda_expert *e)
{
	uint64_t bytes;
	char *memory;
	int r;

	/* A half is a whole number of entries: it is never given in parts. */
	r = stage(v, &v->entries, sizeof(*e), &memory, &bytes);
	if (r < 0)
		return r;
	memcpy(memory, e, sizeof(*e));
	return check(v, cuda_upload(v->driver, &v->table[block], memory, sizeof(*e), v->compute));
}

static struct cuda_expert entry_of(struct vram *v, uint32_t block, uint32_t slot)
{
	const struct catalog_layer *l = layer_of(v, block);
	const char *memory = slot_memory(class_of(v, block), slot);
	uint64_t at[CATALOG_MATRICES];

	layout(l, at);
	return (struct cuda_expert){
		.gate = memory + at[0],
		.up = memory + (l->matrix[1] ? at[1] : l->expert_bytes[0] / 2),
		.down = memory + at[2],
	};
}

/* ---- copies to the card ---- */

static void job_idle(struct vram *v, struct vram_job *job)
{
	job->next = v->idle;
	v->idle = job;
}

/* The first has ended. */
static void count_first(struct vram *v, uint64_t us)
{
	struct vram_job *job = v->jobs;

	v->jobs = job->next;
	if (!v->jobs)
		v->jobs_end = &v->jobs;
	v->counters.blocks_copied++;
	v->counters.bytes_copied += catalog_block_bytes(v->catalog, job->block);
	v->counters.copy_us += us;
	job_idle(v, job);
}

/* Has the first ended? -EAGAIN: not yet. */
static int first_ended(struct vram *v, bool wait, uint64_t *ret_us)
{
	const struct vram_job *job = v->jobs;
	int r;

	r = wait ? cuda_event_synchronize(v->driver, job->end) : cuda_event_query(v->driver, job->end);
	if (r < 0)
		return check(v, r);
	return check(v, cuda_event_elapsed(v->driver, job->start, job->end, ret_us));
}

static int job_new(struct vram *v, uint32_t block, struct vram_job **ret)
{
	struct vram_job *job;
	uint64_t us;
	int r;

	while (v->jobs && v->jobs->abandoned && first_ended(v, false, &us) == 0)
		count_first(v, us);
	job = v->idle;
	if (job) {
		v->idle = job->next;
	} else {
		job = calloc(1, sizeof(*job));
		if (!job)
			return -ENOMEM;
		r = check(v, cuda_event_new(v->driver, true, &job->start));
		if (r == 0)
			r = check(v, cuda_event_new(v->driver, true, &job->end));
		if (r < 0) {
			cuda_event_free(v->driver, job->start);
			free(job);
			return r;
		}
	}
	job->block = block;
	job->abandoned = false;
	*ret = job;
	return 0;
}

static void free_jobs(struct vram *v, struct vram_job *job)
{
	while (job) {
		struct vram_job *next = job->next;

		cuda_event_free(v->driver, job->start);
		cuda_event_free(v->driver, job->end);
		free(job);
		job = next;
	}
}

/* Bytes [from, from + bytes) of the block as it will lie in the slot. */
static void gather(const struct catalog_layer *l, const void *const matrix[CATALOG_MATRICES],
		   uint64_t from, uint64_t bytes, char *to)
{
	uint64_t at[CATALOG_MATRICES];

	layout(l, at);
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		uint64_t first = MAX(at[i], from);
		uint64_t end = MIN(at[i] + l->expert_bytes[i], from + bytes);

		if (l->matrix[i] && first < end)
			memcpy(to + (first - from), (const char *)matrix[i] + (first - at[i]),
			       end - first);
	}
}

static int send_block(struct vram *v, const struct vram_job *job, uint32_t slot,
		      const void *const matrix[CATALOG_MATRICES])
{
	const struct catalog_layer *l = layer_of(v, job->block);
	const struct vram_class *k = class_of(v, job->block);
	uint64_t at[CATALOG_MATRICES], all = layout(l, at), bytes;
	char *memory;
	int r;

	r = wait_for_mark(v, k->slots[slot].left);
	if (r == 0)
		r = check(v, cuda_event_record(v->driver, job->start, v->copy));
	for (uint64_t done = 0; r == 0 && done < all; done += bytes) {
		r = stage(v, &v->staging, all - done, &memory, &bytes);
		if (r < 0)
			break;
		gather(l, matrix, done, bytes, memory);
		r = check(v, cuda_upload(v->driver, slot_memory(k, slot) + done, memory, bytes, v->copy));
	}
	return r < 0 ? r : check(v, cuda_event_record(v->driver, job->end, v->copy));
}

int vram_fetch(struct vram *v, uint32_t block, const void *const matrix[CATALOG_MATRICES])
{
	struct vram_class *k;
	struct vram_job *job;
	int r;

	assert(block < v->catalog->n_blocks && v->blocks[block].state == VRAM_ABSENT);
	if (v->lost)
		return -ENODEV;
	k = class_of(v, block);
	r = k->n_used == k->n_slots ? grow(v, k) : 0;
	if (r < 0)
		return r;
	r = job_new(v, block, &job);
	if (r < 0)
		return r;
	r = send_block(v, job, k->free_first, matrix);
	if (r < 0) {
		job_idle(v, job);
		return r;
	}
	occupy(v, block);
	v->blocks[block].state = VRAM_COMING;
	v->blocks[block].job = job;
	v->n_coming++;
	job->next = NULL;
	*v->jobs_end = job;
	v->jobs_end = &job->next;
	return 0;
}

int vram_expect(struct vram *v, uint32_t block)
{
	struct vram_block *b = &v->blocks[block];
	struct cuda_expert e;
	int r;

	assert(block < v->catalog->n_blocks && b->state == VRAM_COMING);
	if (v->lost)
		return -ENODEV;
	e = entry_of(v, block, b->slot);
	r = check(v, cuda_stream_wait(v->driver, v->compute, b->job->end));
	if (r == 0)
		r = set_entry(v, block, &e);
	if (r < 0)
		return r;
	b->state = VRAM_HERE;
	v->n_coming--;
	v->n_here++;
	v->n_unconfirmed++;
	return 0;
}

int vram_take(struct vram *v, bool wait, uint32_t *ret_block)
{
	if (v->lost)
		return -ENODEV;
	while (v->jobs) {
		uint32_t block = v->jobs->block;
		bool abandoned = v->jobs->abandoned;
		uint64_t us = 0;
		int r;

		/* Nobody waits for what was abandoned, but it may be in front. */
		r = first_ended(v, wait && v->n_coming + v->n_unconfirmed > 0, &us);
		if (r == -EAGAIN)
			return 0;
		if (r == 0 && !abandoned && v->blocks[block].state == VRAM_COMING)
			r = vram_expect(v, block);
		if (r < 0)
			return r;
		count_first(v, us);
		if (abandoned)
			continue;
		v->blocks[block].job = NULL;
		v->n_unconfirmed--;
		*ret_block = block;
		return 1;
	}
	return 0;
}

/* ---- leaving ---- */

static void leave(struct vram *v, uint32_t block)
{
	struct vram_block *b = &v->blocks[block];

	if (b->job)
		b->job->abandoned = true;
	if (b->state == VRAM_COMING) {
		v->n_coming--;
	} else {
		v->n_here--;
		v->n_unconfirmed -= b->job != NULL;
	}
	b->job = NULL;
	vacate(class_of(v, block), b->slot);
	b->state = VRAM_ABSENT;
	v->counters.blocks_evicted++;
}

int vram_evict(struct vram *v, uint32_t block)
{
	uint64_t left = 0;
	int r;

	assert(block < v->catalog->n_blocks && v->blocks[block].state == VRAM_HERE);
	if (v->lost)
		return -ENODEV;
	/* Behind the copy too, for which `compute` waits. The mark first: after the table has changed nothing may fail. */
	r = mark(v, &left);
	if (r == 0)
		r = set_entry(v, block, &(struct cuda_expert){});
	if (r < 0)
		return r;
	leave(v, block);
	list_slot(class_of(v, block), v->blocks[block].slot, left);
	return 0;
}

/* The slot is not listed: its chunk is on its way out. */
static int let_go(struct vram *v, uint32_t block, uint8_t *gone)
{
	int r = 0;

	if (v->blocks[block].state == VRAM_HERE)
		r = set_entry(v, block, &(struct cuda_expert){});
	if (r < 0)
		return r;
	leave(v, block);
	if (gone)
		gone[block / 8] |= (uint8_t)(1U << block % 8);
	return 0;
}

/* Into the first slot of the list, which is in another chunk. The old one is not listed: kernels may still read it. */
static int move_block(struct vram *v, uint32_t block)
{
	struct vram_class *k = class_of(v, block);
	uint32_t from = v->blocks[block].slot, to = k->free_first;
	struct cuda_expert e = entry_of(v, block, to);
	uint64_t at[CATALOG_MATRICES];
	int r;

	r = check(v, cuda_copy(v->driver, slot_memory(k, to), slot_memory(k, from),
			       layout(layer_of(v, block), at), v->compute));
	if (r == 0 && v->blocks[block].state == VRAM_HERE)
		r = set_entry(v, block, &e);
	if (r < 0)
		return r;
	vacate(k, from);
	occupy(v, block);
	v->counters.blocks_moved++;
	return 0;
}

/* As far as there are free slots elsewhere; the others go. */
static int empty_chunk(struct vram *v, struct vram_class *k, uint32_t chunk, uint8_t *gone)
{
	const struct vram_slot *slot = k->slots + chunk * k->per_chunk;
	int r;

	for (uint32_t i = 0; i < k->chunks[chunk].n_slots; i++) {
		uint32_t block = slot[i].block;

		if (block == CATALOG_NONE)
			continue;
		r = k->free_first != SLOT_NONE ? move_block(v, block) : let_go(v, block, gone);
		if (r < 0)
			return r;
	}
	return 0;
}

/* Nothing is being copied to the card. */
static int close_chunk(struct vram *v, struct vram_class *k, uint32_t chunk, uint8_t *gone)
{
	struct vram_chunk *c = &k->chunks[chunk];
	int r, waited;

	unlist_chunk(k, chunk);
	r = empty_chunk(v, k, chunk, gone);
	/* Kernels that read the chunk end, moves out of it too, and one that failed and wrote into a slot of the list. */
	waited = check(v, cuda_stream_synchronize(v->driver, v->compute));
	if (r == 0)
		r = waited;
	if (r < 0) {
		for (uint32_t i = 0; i < c->n_slots; i++)
			if (k->slots[chunk * k->per_chunk + i].block == CATALOG_NONE)
				list_slot(k, chunk * k->per_chunk + i, 0);
		return r;
	}
	cuda_free(v->driver, c->memory);
	k->n_slots -= c->n_slots;
	v->bytes -= c->bytes;
	*c = (struct vram_chunk){};
	v->counters.chunks_given_back++;
	return 0;
}

/* The one to close: with the fewest blocks that find no place elsewhere, of these with the fewest to be moved. */
static struct vram_class *pick_chunk(struct vram *v, uint32_t *ret_chunk)
{
	uint32_t least_gone = UINT32_MAX, least_used = UINT32_MAX;
	struct vram_class *picked = NULL;

	for (struct vram_class *k = v->classes; k < v->classes + v->n_classes; k++)
		for (uint32_t i = 0; i < k->n_chunks; i++) {
			const struct vram_chunk *c = &k->chunks[i];
			uint32_t room = k->n_slots - k->n_used - (c->n_slots - c->n_used);
			uint32_t gone = c->n_used > room ? c->n_used - room : 0;

			if (!c->memory || gone > least_gone ||
			    (gone == least_gone && c->n_used >= least_used))
				continue;
			least_gone = gone;
			least_used = c->n_used;
			picked = k;
			*ret_chunk = i;
		}
	return picked;
}

int vram_set_limit(struct vram *v, uint64_t limit_bytes, uint8_t *gone)
{
	uint32_t chunk = 0;
	int r;

	if (gone)
		memset(gone, 0, (v->catalog->n_blocks + 7) / 8);
	v->limit = limit_bytes;
	if (v->lost)
		return -ENODEV;
	if (v->bytes <= v->limit)
		return 0;
	/* What is COMING can be moved then, or dropped. */
	r = check(v, cuda_stream_synchronize(v->driver, v->copy));
	while (r == 0 && v->bytes > v->limit) {
		struct vram_class *k = pick_chunk(v, &chunk);

		r = close_chunk(v, k, chunk, gone);
	}
	return r;
}

int vram_download(struct vram *v, uint32_t block, void *const matrix[CATALOG_MATRICES])
{
	const struct catalog_layer *l;
	const char *memory;
	uint64_t at[CATALOG_MATRICES];
	int r = 0, waited;

	assert(block < v->catalog->n_blocks && v->blocks[block].state == VRAM_HERE);
	if (v->lost)
		return -ENODEV;
	l = layer_of(v, block);
	memory = slot_memory(class_of(v, block), v->blocks[block].slot);
	layout(l, at);
	/* Behind its copy, but not behind what is being computed: that reads the block too. */
	for (unsigned i = 0; i < CATALOG_MATRICES && r == 0; i++)
		if (l->matrix[i])
			r = check(v, cuda_download(v->driver, matrix[i], memory + at[i],
						   l->expert_bytes[i], v->copy));
	waited = check(v, cuda_stream_synchronize(v->driver, v->copy));
	return r < 0 ? r : waited;
}

/* ---- beginning and end ---- */

static int cmp_layers_descending(const void *a, const void *b, void *catalog)
{
	const struct catalog *c = catalog;
	uint64_t at[CATALOG_MATRICES];
	uint64_t x = layout(&c->layers[*(const uint32_t *)a], at);
	uint64_t y = layout(&c->layers[*(const uint32_t *)b], at);

	return (x < y) - (x > y);
}

/* The last class that there can be takes all smaller blocks. */
static int make_classes(struct vram *v)
{
	const struct catalog *c = v->catalog;
	_cleanup_(freep) uint32_t *order = calloc(c->n_expert_layers, sizeof(*order));
	uint64_t at[CATALOG_MATRICES];

	if (!order)
		return -ENOMEM;
	memcpy(order, c->expert_layers, c->n_expert_layers * sizeof(*order));
	qsort_r(order, c->n_expert_layers, sizeof(*order), cmp_layers_descending, (void *)(uintptr_t)c);
	for (uint32_t i = 0; i < c->n_expert_layers; i++) {
		const struct catalog_layer *l = &c->layers[order[i]];
		uint64_t bytes = layout(l, at);
		uint64_t last = v->n_classes > 0 ? v->classes[v->n_classes - 1].bytes : 0;

		if (v->n_classes == 0 ||
		    (last - bytes > last / 100 * MERGE_PERCENT && v->n_classes < CLASSES_MAX))
			v->classes[v->n_classes++].bytes = bytes;
		v->classes[v->n_classes - 1].n_blocks += l->n_expert;
		for (uint32_t e = 0; e < l->n_expert; e++)
			v->blocks[l->first_block + e].class = (uint8_t)(v->n_classes - 1);
	}
	return 0;
}

static int make_places(const struct vram *v, struct vram_class *k)
{
	uint64_t n = MAX(v->chunk_bytes / k->bytes, UINT64_C(1));

	k->free_first = SLOT_NONE;
	k->per_chunk = (uint32_t)MIN(n, (uint64_t)k->n_blocks);
	k->n_chunks = (k->n_blocks + k->per_chunk - 1) / k->per_chunk;
	k->chunks = calloc(k->n_chunks, sizeof(*k->chunks));
	k->slots = calloc(k->n_chunks, k->per_chunk * sizeof(*k->slots));
	if (!k->chunks || !k->slots)
		return -ENOMEM;
	for (uint32_t i = 0; i < k->n_chunks * k->per_chunk; i++)
		k->slots[i].block = CATALOG_NONE;
	return 0;
}

static int start_staging(struct vram *v, struct vram_staging *s, struct cuda_stream *stream,
			 uint64_t half_bytes)
{
	void *memory;
	int r;

	s->stream = stream;
	s->half_bytes = half_bytes;
	r = cuda_host_alloc(v->driver, 2 * half_bytes, &memory);
	if (r < 0)
		return r;
	s->memory = memory;
	for (unsigned i = 0; i < 2 && r == 0; i++)
		r = cuda_event_new(v->driver, false, &s->read[i]);
	return r;
}

static void stop_staging(struct vram *v, struct vram_staging *s)
{
	for (unsigned i = 0; i < 2; i++)
		cuda_event_free(v->driver, s->read[i]);
	cuda_host_free(v->driver, s->memory);
}

static int start_table(struct vram *v)
{
	size_t bytes = v->catalog->n_blocks * sizeof(struct cuda_expert);
	void *memory;
	int r;

	r = cuda_alloc(v->driver, bytes, &memory);
	if (r < 0)
		return r;
	v->table = memory;
	return cuda_fill(v->driver, memory, 0, bytes, NULL);
}

static int start(struct vram *v, uint64_t staging_bytes)
{
	const struct catalog *c = v->catalog;
	uint64_t half = (staging_bytes ? staging_bytes : VRAM_STAGING_BYTES) / 2;
	int r;

	for (uint32_t i = 0; i < c->n_expert_layers; i++)
		if (!c->layers[c->expert_layers[i]].matrix[0])
			return -EINVAL;
	v->blocks = calloc(c->n_blocks, sizeof(*v->blocks));
	if (!v->blocks)
		return -ENOMEM;
	r = make_classes(v);
	for (uint32_t i = 0; i < v->n_classes && r == 0; i++)
		r = make_places(v, &v->classes[i]);
	if (r < 0)
		return r;
	half = MAX(half / MATRIX_ALIGN, UINT64_C(1)) * MATRIX_ALIGN;
	if ((r = start_table(v)) < 0 || (r = cuda_stream_new(v->driver, &v->copy)) < 0 ||
	    (r = start_staging(v, &v->staging, v->copy, half)) < 0 ||
	    (r = start_staging(v, &v->entries, v->compute, ENTRIES * sizeof(struct cuda_expert))) < 0)
		return r;
	for (uint32_t i = 0; i < MARKS && r == 0; i++)
		r = cuda_event_new(v->driver, false, &v->marks[i]);
	return r;
}

int vram_new(struct cuda_driver *d, struct cuda_stream *compute, const struct catalog *c,
	     uint64_t chunk_bytes, uint64_t staging_bytes, struct vram **ret)
{
	struct vram *v;
	int r;

	if (c->n_blocks == 0)
		return -EINVAL;
	v = calloc(1, sizeof(*v));
	if (!v)
		return -ENOMEM;
	v->driver = d;
	v->compute = compute;
	v->catalog = c;
	v->chunk_bytes = chunk_bytes ? chunk_bytes : VRAM_CHUNK_BYTES;
	v->jobs_end = &v->jobs;
	r = start(v, staging_bytes);
	if (r < 0) {
		vram_free(v);
		return r;
	}
	*ret = v;
	return 0;
}

struct vram *vram_free(struct vram *v)
{
	if (!v)
		return NULL;
	/* Of a lost device nothing can be had: what it refuses to free goes with the context. */
	if (v->copy)
		(void)cuda_stream_synchronize(v->driver, v->copy);
	if (v->table)
		(void)cuda_stream_synchronize(v->driver, v->compute);
	free_jobs(v, v->jobs);
	free_jobs(v, v->idle);
	for (uint32_t i = 0; i < MARKS; i++)
		cuda_event_free(v->driver, v->marks[i]);
	stop_staging(v, &v->staging);
	stop_staging(v, &v->entries);
	cuda_stream_free(v->driver, v->copy);
	cuda_free(v->driver, v->table);
	for (struct vram_class *k = v->classes; k < v->classes + v->n_classes; k++) {
		for (uint32_t i = 0; k->chunks && i < k->n_chunks; i++)
			cuda_free(v->driver, k->chunks[i].memory);
		free(k->chunks);
		free(k->slots);
	}
	free(v->blocks);
	free(v);
	return NULL;
}

/* ---- what is where ---- */

uint32_t vram_n_classes(const struct vram *v)
{
	return v->n_classes;
}

uint8_t vram_class(const struct vram *v, uint32_t block)
{
	assert(block < v->catalog->n_blocks);
	return v->blocks[block].class;
}

uint64_t vram_class_bytes(const struct vram *v, uint8_t class)
{
	assert(class < v->n_classes);
	return v->classes[class].bytes;
}

uint32_t vram_n_blocks(const struct vram *v, uint8_t class)
{
	return v->classes[class].n_blocks;
}

uint32_t vram_n_slots(const struct vram *v, uint8_t class)
{
	return v->classes[class].n_slots;
}

uint32_t vram_n_used(const struct vram *v, uint8_t class)
{
	return v->classes[class].n_used;
}

uint32_t vram_n_room(const struct vram *v, uint8_t class)
{
	const struct vram_class *k = &v->classes[class];
	uint64_t chunk = next_chunk_bytes(v, k), left = v->limit - MIN(v->limit, v->bytes);
	uint32_t room = k->n_slots - k->n_used;

	if (chunk > 0 && left >= chunk)
		room += (uint32_t)MIN(left / chunk * next_chunk_slots(k),
				      (uint64_t)(k->n_blocks - k->n_slots));
	return room;
}

uint64_t vram_chunk_bytes(const struct vram *v)
{
	return v->chunk_bytes;
}

uint64_t vram_bytes(const struct vram *v)
{
	return v->bytes;
}

uint32_t vram_n_here(const struct vram *v)
{
	return v->n_here;
}

unsigned vram_n_coming(const struct vram *v)
{
	return v->n_coming;
}

enum vram_state vram_state(const struct vram *v, uint32_t block)
{
	assert(block < v->catalog->n_blocks);
	return (enum vram_state)v->blocks[block].state;
}

bool vram_confirmed(const struct vram *v, uint32_t block)
{
	assert(block < v->catalog->n_blocks);
	return v->blocks[block].state == VRAM_HERE && !v->blocks[block].job;
}

bool vram_has_room(const struct vram *v, uint32_t block)
{
	const struct vram_class *k = &v->classes[vram_class(v, block)];

	return k->n_used < k->n_slots || may_grow(v, k);
}

const struct cuda_expert *vram_table(const struct vram *v, uint32_t layer)
{
	const struct catalog_layer *l = &v->catalog->layers[layer];

	assert(layer < v->catalog->n_layers);
	return l->first_block == CATALOG_NONE ? NULL : v->table + l->first_block;
}

void vram_get_counters(const struct vram *v, struct vram_counters *ret)
{
	*ret = v->counters;
}
