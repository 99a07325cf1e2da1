/* SPDX-License-Identifier: MIT */
/*
 * host.c: states and classes of the blocks in RAM, and the jobs that bring them. See host.h.
 *
 * Owns the disk, the table of blocks and every job that is not in flight. Engine thread only.
 * Refuses to know how a form keeps its bytes (host-mapped.c, host-arena.c), which block matters,
 * and how much memory there is. Invariant: state, n_here and n_coming change here alone.
 */
#include "daemon/residency/host-internal.h"

#include <assert.h>
#include <sys/mman.h>

#define MERGE_PERCENT 2U /* sizes that differ by less are one class */

static const struct host_ops *const forms[] = {
	[HOST_MAPPED] = &host_mapped_ops,
	[HOST_ARENA] = &host_arena_ops,
};

struct disk_job *host_job_new(uint32_t block, bool urgent)
{
	struct disk_job *job = calloc(1, sizeof(*job));

	if (job) {
		job->block = block;
		job->urgent = urgent;
	}
	return job;
}

void host_piece_around(const struct catalog_range *r, uint64_t alignment, struct disk_piece *ret)
{
	uint64_t from = r->offset / alignment * alignment;
	uint64_t to = ALIGN_UP(r->offset + r->bytes, alignment);

	*ret = (struct disk_piece){
		.part = r->part,
		.offset = from,
		.bytes = to - from,
		.data = r->data ? (const char *)r->data - (r->offset - from) : NULL,
	};
}

void host_piece_within(const struct catalog_range *r, struct disk_piece *ret)
{
	uint64_t from = ALIGN_UP(r->offset, (uint64_t)HOST_PAGE);
	uint64_t to = (r->offset + r->bytes) / HOST_PAGE * HOST_PAGE;

	*ret = (struct disk_piece){
		.part = r->part,
		.offset = from,
		.bytes = to > from ? to - from : 0,
		.data = r->data ? (const char *)r->data + (from - r->offset) : NULL,
	};
}

/* Matrix i of all experts of a layer. */
static struct catalog_range layer_range(const struct catalog_layer *l, unsigned i)
{
	return (struct catalog_range){
		.part = l->matrix[i]->part,
		.offset = l->matrix[i]->offset,
		.bytes = l->n_expert * l->expert_bytes[i],
		.data = l->matrix[i]->data,
	};
}

bool host_layer_pieces(const struct host *h, uint32_t layer, struct disk_job *job)
{
	const struct catalog_layer *l = &h->catalog->layers[layer];

	job->n_pieces = 0;
	if (l->first_block == CATALOG_NONE)
		return false;
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		struct catalog_range r;

		if (!l->matrix[i])
			continue;
		r = layer_range(l, i);
		host_piece_within(&r, &job->piece[job->n_pieces]);
		if (job->piece[job->n_pieces].bytes > 0)
			job->n_pieces++;
	}
	job->kind = DISK_EVICT;
	job->block = l->first_block;
	return job->n_pieces > 0;
}

int host_drop_all(struct host *h)
{
	struct disk_job *job;
	int r = 0;

	for (uint32_t l = 0; l < h->catalog->n_layers && r == 0; l++) {
		job = host_job_new(CATALOG_NONE, false);
		if (!job)
			r = -ENOMEM;
		else if (host_layer_pieces(h, l, job))
			disk_submit(h->disk, job);
		else
			free(job);
	}
	while ((job = disk_take(h->disk, true)))
		free(job);
	return r;
}

/* Where one block is evicted, reading ahead would bring it back, and so would a huge page. */
static int advise_random(const struct host *h)
{
	for (uint32_t l = 0; l < h->catalog->n_layers; l++) {
		const struct catalog_layer *layer = &h->catalog->layers[l];

		for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
			struct catalog_range r;
			struct disk_piece p;

			if (layer->first_block == CATALOG_NONE || !layer->matrix[i])
				continue;
			r = layer_range(layer, i);
			host_piece_around(&r, HOST_PAGE, &p);
			if (madvise((void *)(uintptr_t)p.data, p.bytes, MADV_RANDOM) < 0)
				return -errno;
			/* -EINVAL: a kernel without huge pages. */
			(void)madvise((void *)(uintptr_t)p.data, p.bytes, MADV_NOHUGEPAGE);
		}
	}
	return 0;
}

static int cmp_descending(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x < y) - (x > y);
}

/* sizes: descending. False: there would be too many classes. */
static bool split_classes(struct host *h, const uint64_t *sizes, uint32_t n, unsigned percent)
{
	h->n_classes = 0;
	for (uint32_t i = 0; i < n; i++) {
		uint64_t last = h->n_classes > 0 ? h->classes[h->n_classes - 1].bytes : 0;

		if (h->n_classes > 0 && last - sizes[i] < last / 100 * percent)
			continue;
		if (h->n_classes == HOST_CLASSES_MAX)
			return false;
		h->classes[h->n_classes++].bytes = sizes[i];
	}
	return true;
}

static int make_classes(struct host *h)
{
	uint32_t n = h->catalog->n_blocks;
	_cleanup_(freep) uint64_t *sorted = calloc(n, sizeof(*sorted));
	struct catalog_block b;

	if (!sorted)
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++) {
		catalog_block(h->catalog, i, &b);
		sorted[i] = h->ops->cost(&b);
	}
	qsort(sorted, n, sizeof(*sorted), cmp_descending);
	for (unsigned percent = MERGE_PERCENT; !split_classes(h, sorted, n, percent);)
		percent *= 2; /* above 100 everything is one class */
	for (uint32_t i = 0; i < n; i++) {
		uint8_t k = (uint8_t)(h->n_classes - 1);
		uint64_t cost;

		catalog_block(h->catalog, i, &b);
		cost = h->ops->cost(&b);
		while (h->classes[k].bytes < cost)
			k--;
		h->blocks[i].class = k;
		h->classes[k].n_blocks++;
	}
	return 0;
}

static int start(struct host *h, enum host_form form, const struct disk_config *disk, char **ret_error)
{
	int r;

	if (h->catalog->n_blocks == 0)
		return fail(ret_error, -EINVAL, "the model has no experts");
	h->ops = forms[form];
	h->blocks = calloc(h->catalog->n_blocks, sizeof(*h->blocks));
	r = h->blocks ? make_classes(h) : -ENOMEM;
	if (r < 0)
		return fail(ret_error, r, "no memory for %u blocks", h->catalog->n_blocks);
	r = disk_new(h->catalog->gguf, disk, &h->disk);
	if (r < 0)
		return fail(ret_error, r, "cannot read the model's blocks: %s", strerror(-r));
	r = advise_random(h);
	if (r < 0)
		return fail(ret_error, r, "cannot turn off reading ahead: %s", strerror(-r));
	return h->ops->start(h, ret_error);
}

int host_new(enum host_form form, const struct catalog *c, const struct disk_config *disk,
	     struct host **ret, char **ret_error)
{
	struct host *h = calloc(1, sizeof(*h));
	int r;

	if (!h)
		return fail(ret_error, -ENOMEM, "no memory");
	h->catalog = c;
	h->arrived_end = &h->arrived;
	r = start(h, form, disk, ret_error);
	if (r < 0) {
		host_free(h);
		return r;
	}
	*ret = h;
	return 0;
}

struct host *host_free(struct host *h)
{
	struct disk_job *job;

	if (!h)
		return NULL;
	while (h->disk && (job = disk_take(h->disk, true)))
		if (job->kind == DISK_EVICT)
			free(job);
	disk_free(h->disk);
	if (h->ops)
		h->ops->stop(h);
	for (uint32_t i = 0; h->blocks && i < h->catalog->n_blocks; i++)
		free(h->blocks[i].job);
	free(h->blocks);
	free(h);
	return NULL;
}

const char *host_method(const struct host *h)
{
	return h->ops == &host_mapped_ops ? "page cache" : disk_method(h->disk);
}

uint32_t host_n_classes(const struct host *h)
{
	return h->n_classes;
}

uint8_t host_class(const struct host *h, uint32_t block)
{
	assert(block < h->catalog->n_blocks);
	return h->blocks[block].class;
}

uint64_t host_class_bytes(const struct host *h, uint8_t class)
{
	assert(class < h->n_classes);
	return h->classes[class].bytes;
}

enum host_state host_state(const struct host *h, uint32_t block)
{
	assert(block < h->catalog->n_blocks);
	return (enum host_state)h->blocks[block].state;
}

uint64_t host_bytes(const struct host *h)
{
	return h->bytes;
}

uint64_t host_leaving_bytes(const struct host *h)
{
	return h->leaving_bytes;
}

uint32_t host_n_here(const struct host *h)
{
	return h->n_here;
}

unsigned host_n_coming(const struct host *h)
{
	return h->n_coming;
}

bool host_has_room(const struct host *h, uint32_t block, uint64_t limit_bytes)
{
	assert(block < h->catalog->n_blocks);
	/* What is leaving is before any fetch in the disk's queue. */
	return h->bytes - h->leaving_bytes + h->ops->growth(h, block) <= limit_bytes;
}

int host_fetch(struct host *h, uint32_t block, bool urgent)
{
	struct host_block *b = &h->blocks[block];

	assert(block < h->catalog->n_blocks && b->state == HOST_ABSENT && !b->job);
	b->job = host_job_new(block, urgent);
	if (!b->job)
		return -ENOMEM;
	h->ops->fetch(h, block, b->job);
	b->state = HOST_COMING;
	h->n_coming++;
	disk_submit(h->disk, b->job);
	return 0;
}

bool host_can_adopt(const struct host *h)
{
	return h->ops->adopt != NULL;
}

int host_adopt(struct host *h, uint32_t block, void *ret_matrix[CATALOG_MATRICES])
{
	struct host_block *b = &h->blocks[block];

	assert(block < h->catalog->n_blocks && b->state == HOST_ABSENT && !b->job);
	if (!host_can_adopt(h))
		return -EOPNOTSUPP;
	b->job = host_job_new(block, false);
	if (!b->job)
		return -ENOMEM;
	h->ops->adopt(h, block);
	b->state = HOST_HERE;
	h->n_here++;
	for (unsigned i = 0; i < CATALOG_MATRICES; i++)
		ret_matrix[i] = (void *)(uintptr_t)host_matrix(h, block, i);
	return 0;
}

void host_hurry(struct host *h, uint32_t block)
{
	assert(block < h->catalog->n_blocks);
	/* An arrived job is not the disk's any more. */
	if (h->blocks[block].state == HOST_COMING && !h->blocks[block].job->urgent)
		disk_hurry(h->disk, h->blocks[block].job);
}

/* Takes one job from the disk; false: there is none. */
static bool reap(struct host *h, bool wait)
{
	struct disk_job *job = disk_take(h->disk, wait);

	if (!job)
		return false;
	if (job->kind == DISK_EVICT) {
		h->ops->left(h, job);
		return true;
	}
	job->next = NULL;
	*h->arrived_end = job;
	h->arrived_end = &job->next;
	return true;
}

static struct disk_job *take_arrived(struct host *h)
{
	struct disk_job *job = h->arrived;

	if (job)
		h->arrived = job->next;
	if (!h->arrived)
		h->arrived_end = &h->arrived;
	return job;
}

/* Reads overlap: time in which several were on their way counts once. They end about in the order in which they are taken. */
static void count_time(struct host *h, const struct disk_job *job)
{
	uint64_t begin = MAX(job->begun_us, h->busy_until_us), end = job->begun_us + job->us;

	if (end > begin)
		h->counters.read_us += end - begin;
	h->busy_until_us = MAX(h->busy_until_us, end);
}

int host_take(struct host *h, bool wait, uint32_t *ret_block, int *ret_err)
{
	struct disk_job *job;
	struct host_block *b;

	while (!(job = take_arrived(h)))
		if (!reap(h, wait && h->n_coming > 0))
			return 0;
	b = &h->blocks[job->block];
	assert(b->job == job && b->state == HOST_COMING);
	h->n_coming--;
	h->counters.bytes_read += job->bytes;
	count_time(h, job);
	*ret_block = job->block;
	*ret_err = job->err;
	if (job->err < 0) {
		h->counters.read_errors++;
		b->state = HOST_ABSENT;
		h->ops->give_up(h, job->block);
		return 1;
	}
	h->counters.blocks_read++;
	b->state = HOST_HERE;
	h->n_here++;
	return 1;
}

void host_settle(struct host *h)
{
	while (h->leaving_bytes > 0 && reap(h, true))
		;
}

void host_evict(struct host *h, uint32_t block)
{
	struct host_block *b = &h->blocks[block];

	assert(block < h->catalog->n_blocks && b->state == HOST_HERE && b->pins == 0);
	b->state = HOST_ABSENT;
	h->n_here--;
	h->counters.blocks_evicted++;
	h->ops->give_up(h, block);
}

uint64_t host_trim(struct host *h)
{
	return h->ops->trim(h);
}

void host_pin(struct host *h, uint32_t block)
{
	assert(block < h->catalog->n_blocks && h->blocks[block].state == HOST_HERE);
	h->blocks[block].pins++;
}

void host_unpin(struct host *h, uint32_t block)
{
	assert(block < h->catalog->n_blocks && h->blocks[block].pins > 0);
	h->blocks[block].pins--;
}

const void *host_matrix(const struct host *h, uint32_t block, unsigned i)
{
	const struct catalog_layer *l;
	struct catalog_block b;
	uint32_t range = 0;

	assert(block < h->catalog->n_blocks && i < CATALOG_MATRICES);
	assert(h->blocks[block].state == HOST_HERE);
	catalog_block(h->catalog, block, &b);
	l = &h->catalog->layers[b.layer];
	if (!l->matrix[i])
		return NULL;
	for (unsigned k = 0; k < i; k++)
		range += l->matrix[k] != NULL;
	return h->ops->address(h, block, &b, range);
}

void host_get_counters(const struct host *h, struct host_counters *ret)
{
	*ret = h->counters;
}
