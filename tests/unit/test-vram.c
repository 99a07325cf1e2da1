/* SPDX-License-Identifier: MIT */
/*
 * The VRAM tier on the emulated card: a random life of blocks against a model of it, with what is in the card's memory and what
 * kernels read of it; the order of copies, kernels and evictions when one of them is slow; chunks that are given back; failures.
 * Only the emulator is slow or fails when it is told to, so a card is never used here.
 */
#include "tests/test.h"

#include "daemon/residency/vram.h"
#include "kernels/cuda/driver.h"
#include "tests/emu/library.h"
#include "tests/unit/expert-file.h"

#include <malloc.h>

#define CHUNK   (UINT64_C(512) << 10)
#define STAGING (UINT64_C(96) << 10) /* smaller than a block */
#define BIG     5U                   /* a layer with blocks of more than a chunk */
#define N_READS 8U

static struct expert_file file;

/* A card and a tier in it, and what the test thinks of them. */
struct fixture {
	struct cuda_driver *gpu;
	struct cuda_stream *compute;
	struct cuda_function *copy;
	struct vram *v;
	enum vram_state *want; /* [n_blocks] */
	bool *confirmed;       /* [n_blocks]; of those HERE */
	uint64_t limit;
	/* What kernels on `compute` were told to read, and where they put it. */
	struct read {
		uint32_t block;
		unsigned matrix;
		void *to; /* in the card */
	} reads[N_READS];
	unsigned n_reads;
	/* The table as kernels found it, and who was HERE then. */
	struct cuda_expert *seen; /* in the card; [n_blocks] */
	bool *were_here;          /* [n_blocks] */
	bool looked;
};

static void environment(const char *name, const char *value)
{
	if (value)
		setenv(name, value, 1);
	else
		unsetenv(name);
}

static bool open_card(struct fixture *f, const char *failures, const char *delays, const char *memory)
{
	*f = (struct fixture){};
	environment("RESIDENTD_EMU_FAIL", failures);
	environment("RESIDENTD_EMU_DELAY_US", delays);
	environment("RESIDENTD_EMU_MEMORY", memory);
	return cuda_open(emu_library(), 0, NULL, 0, &f->gpu, NULL) == 0;
}

/* From now on; counted from now on. The environment is read when a card is opened, any one. */
static void inject(struct fixture *f, const char *failures, const char *delays)
{
	struct fixture other;

	assert_true(open_card(&other, failures, delays, NULL));
	cuda_close(other.gpu);
	assert_int_equal(cuda_attach(f->gpu), 0);
}

#define CARD_OR_SKIP(f, ...)                                       \
	do {                                                       \
		if (!emu_library())                                \
			skip_because("there is no emulated card"); \
		assert_true(open_card(f, __VA_ARGS__));            \
	} while (0)

static void assert_done(struct fixture *f, int r)
{
	if (r < 0)
		fail_msg("%s (%s)", cuda_error(f->gpu), strerror(-r));
}

/* A copy that the test itself makes: an injected failure that hits it says nothing. */
#define SURELY(f, copy)                                   \
	do {                                              \
		int r_ = (copy);                          \
                                                          \
		assert_done(f, r_ == -EIO ? (copy) : r_); \
	} while (0)

static void open_tier(struct fixture *f)
{
	void *p;

	assert_done(f, cuda_stream_new(f->gpu, &f->compute));
	assert_done(f, cuda_function(f->gpu, "cuda_copy_block", &f->copy));
	assert_done(f, vram_new(f->gpu, f->compute, file.c, CHUNK, STAGING, &f->v));
	f->want = calloc(file.c->n_blocks, sizeof(*f->want));
	f->confirmed = calloc(file.c->n_blocks, sizeof(*f->confirmed));
	f->were_here = calloc(file.c->n_blocks, sizeof(*f->were_here));
	assert_true(f->want && f->confirmed && f->were_here);
	for (unsigned i = 0; i < N_READS; i++)
		assert_done(f, cuda_alloc(f->gpu, file.c->block_bytes_max, &f->reads[i].to));
	assert_done(f, cuda_alloc(f->gpu, file.c->n_blocks * sizeof(*f->seen), &p));
	f->seen = p;
}

static void set_limit(struct fixture *f, uint64_t limit)
{
	assert_done(f, vram_set_limit(f->v, limit, NULL));
	f->limit = limit;
}

/* With everything that it took of the card. */
static void close_all(struct fixture *f)
{
	vram_free(f->v);
	free(f->want);
	free(f->confirmed);
	free(f->were_here);
	cuda_close(f->gpu);
}

/* ---- what is in the model ---- */

static const struct catalog_layer *layer_of(uint32_t block)
{
	return &file.c->layers[catalog_layer_of(file.c, block)];
}

/* Of the block's matrices; NULL where there is none. */
static void find_matrices(uint32_t block, const void *ret[CATALOG_MATRICES])
{
	const struct catalog_layer *l = layer_of(block);
	struct catalog_block b;
	uint32_t range = 0;

	catalog_block(file.c, block, &b);
	for (unsigned i = 0; i < CATALOG_MATRICES; i++)
		ret[i] = l->matrix[i] ? file.copy + b.range[range++].offset : NULL;
}

/* The tier is given a copy of the block that is overwritten at once. */
static int fetch(struct fixture *f, uint32_t block)
{
	const struct catalog_layer *l = layer_of(block);
	_cleanup_(freep) uint8_t *copy = malloc(l->block_bytes);
	const void *from[CATALOG_MATRICES], *matrix[CATALOG_MATRICES];
	uint64_t at = 0;
	int r;

	assert_non_null(copy);
	find_matrices(block, from);
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		matrix[i] = from[i] ? copy + at : NULL;
		if (from[i])
			memcpy(copy + at, from[i], l->expert_bytes[i]);
		at += from[i] ? l->expert_bytes[i] : 0;
	}
	r = vram_fetch(f->v, block, matrix);
	memset(copy, 0x55, l->block_bytes);
	if (r == 0)
		f->want[block] = VRAM_COMING;
	return r;
}

static int evict(struct fixture *f, uint32_t block)
{
	int r = vram_evict(f->v, block);

	if (r == 0)
		f->want[block] = VRAM_ABSENT;
	return r;
}

static int expect(struct fixture *f, uint32_t block)
{
	int r = vram_expect(f->v, block);

	if (r == 0) {
		f->want[block] = VRAM_HERE;
		f->confirmed[block] = false;
	}
	return r;
}

static int take(struct fixture *f, bool wait)
{
	uint32_t block = CATALOG_NONE;
	int r = vram_take(f->v, wait, &block);

	if (r > 0) {
		assert_true(block < file.c->n_blocks && f->want[block] != VRAM_ABSENT);
		assert_true(f->want[block] == VRAM_COMING || !f->confirmed[block]);
		f->want[block] = VRAM_HERE;
		f->confirmed[block] = true;
		return r;
	}
	assert_int_equal(block, CATALOG_NONE);
	for (uint32_t b = 0; r == 0 && wait && b < file.c->n_blocks; b++)
		assert_true(f->want[b] == VRAM_ABSENT || (f->want[b] == VRAM_HERE && f->confirmed[b]));
	return r;
}

static void take_all(struct fixture *f)
{
	int r;

	do
		r = take(f, true);
	while (r > 0);
	assert_done(f, r);
}

static void bring(struct fixture *f, uint32_t block)
{
	assert_done(f, fetch(f, block));
	take_all(f);
	assert_int_equal(vram_state(f->v, block), VRAM_HERE);
}

/* ---- what is in the card ---- */

static void check_counts(const struct fixture *f)
{
	unsigned n[3] = {};

	for (uint32_t b = 0; b < file.c->n_blocks; b++) {
		assert_int_equal(vram_state(f->v, b), f->want[b]);
		assert_int_equal(vram_confirmed(f->v, b), f->want[b] == VRAM_HERE && f->confirmed[b]);
		n[f->want[b]]++;
	}
	assert_int_equal(vram_n_here(f->v), n[VRAM_HERE]);
	assert_int_equal(vram_n_coming(f->v), n[VRAM_COMING]);
	assert_true(vram_bytes(f->v) <= f->limit);
}

/* As kernels launched now would find it. */
static struct cuda_expert entry_of(struct fixture *f, uint32_t block)
{
	uint32_t layer = catalog_layer_of(file.c, block);
	struct cuda_expert e;

	SURELY(f, cuda_download(f->gpu, &e,
				vram_table(f->v, layer) + (block - layer_of(block)->first_block),
				sizeof(e), f->compute));
	assert_done(f, cuda_stream_synchronize(f->gpu, f->compute));
	return e;
}

static void check_block(struct fixture *f, uint32_t block)
{
	const struct catalog_layer *l = layer_of(block);
	struct cuda_expert e = entry_of(f, block);
	const void *const at[] = { e.gate, e.up, e.down };
	const void *want[CATALOG_MATRICES];

	if (f->want[block] != VRAM_HERE) {
		assert_true(!e.gate && !e.up && !e.down);
		return;
	}
	find_matrices(block, want);
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		_cleanup_(freep) uint8_t *got = malloc(l->block_bytes);

		if (!l->matrix[i]) {
			assert_ptr_equal(at[1], (const char *)at[0] + l->expert_bytes[0] / 2);
			continue;
		}
		assert_true((uintptr_t)at[i] % 256 == 0);
		SURELY(f, cuda_download(f->gpu, got, at[i], l->expert_bytes[i], NULL));
		assert_memory_equal(got, want[i], l->expert_bytes[i]);
	}
}

static void check_blocks(struct fixture *f)
{
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		check_block(f, b);
}

/* A kernel that reads one matrix, some time. */
static void start_read_at(struct fixture *f, uint32_t block, unsigned matrix,
			  const struct cuda_expert *e)
{
	const void *const at[] = { e->gate, e->up, e->down };
	struct read *r = &f->reads[f->n_reads++];
	struct cuda_copy_block a = { .bytes = layer_of(block)->expert_bytes[matrix] / 4 * 4,
				     .n_copies = 1 };

	assert_true(f->n_reads <= N_READS && layer_of(block)->matrix[matrix]);
	r->block = block;
	r->matrix = matrix;
	a.from[0] = at[matrix];
	a.to[0] = r->to;
	assert_done(f, cuda_launch(f->gpu, f->copy, (struct cuda_grid){ .x = 1, .y = 1 },
				   f->compute, &a, sizeof(a)));
}

static void start_read(struct fixture *f, uint32_t block, unsigned matrix)
{
	struct cuda_expert e = entry_of(f, block);

	start_read_at(f, block, matrix, &e);
}

/* And what stands for one that looks at the whole table. */
static void start_look(struct fixture *f)
{
	for (uint32_t l = 0; l < file.c->n_layers; l++) {
		const struct catalog_layer *layer = &file.c->layers[l];

		if (layer->first_block == CATALOG_NONE) {
			assert_null(vram_table(f->v, l));
			continue;
		}
		SURELY(f, cuda_copy(f->gpu, f->seen + layer->first_block, vram_table(f->v, l),
				    layer->n_expert * sizeof(*f->seen), f->compute));
	}
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		f->were_here[b] = f->want[b] == VRAM_HERE;
	f->looked = true;
}

static void check_reads(struct fixture *f)
{
	_cleanup_(freep) uint8_t *got = malloc(file.c->block_bytes_max);
	_cleanup_(freep) struct cuda_expert *seen = calloc(file.c->n_blocks, sizeof(*seen));

	assert_true(got && seen);
	assert_done(f, cuda_stream_synchronize(f->gpu, f->compute));
	for (unsigned i = 0; i < f->n_reads; i++) {
		const struct read *r = &f->reads[i];
		uint64_t bytes = layer_of(r->block)->expert_bytes[r->matrix] / 4 * 4;
		const void *want[CATALOG_MATRICES];

		find_matrices(r->block, want);
		SURELY(f, cuda_download(f->gpu, got, r->to, bytes, NULL));
		assert_memory_equal(got, want[r->matrix], bytes);
	}
	f->n_reads = 0;
	if (!f->looked)
		return;
	SURELY(f, cuda_download(f->gpu, seen, f->seen, file.c->n_blocks * sizeof(*seen), NULL));
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		assert_int_equal(seen[b].gate != NULL, f->were_here[b]);
	f->looked = false;
}

/* ---- a random life ---- */

/* An injected failure: nothing may have changed. */
static bool failed(const struct fixture *f, int r, unsigned *n_failed)
{
	if (r >= 0)
		return false;
	if (r != -EIO)
		fail_msg("%s (%s)", cuda_error(f->gpu), strerror(-r));
	assert_non_null(strstr(cuda_error(f->gpu), "cuMemcpy"));
	(*n_failed)++;
	return true;
}

static void act_limit(struct fixture *f, unsigned *n_failed)
{
	_cleanup_(freep) uint8_t *gone = malloc(file.c->n_blocks / 8 + 1);
	uint64_t limit = file_rnd(&file, 12 << 20), before = vram_bytes(f->v);
	struct vram_counters old, now;
	uint32_t n_gone = 0;
	int r;

	assert_non_null(gone);
	memset(gone, 0xff, file.c->n_blocks / 8 + 1);
	vram_get_counters(f->v, &old);
	r = vram_set_limit(f->v, limit, gone);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		if (gone[b / 8] >> b % 8 & 1) {
			assert_int_not_equal(f->want[b], VRAM_ABSENT);
			f->want[b] = VRAM_ABSENT;
			n_gone++;
		}
	vram_get_counters(f->v, &now);
	assert_int_equal(now.blocks_evicted, old.blocks_evicted + n_gone);
	/* What could not be given back may be above the limit. */
	f->limit = failed(f, r, n_failed) ? MAX(limit, before) : limit;
	assert_int_equal(now.chunks_given_back > old.chunks_given_back, vram_bytes(f->v) < before);
}

/* For one launch, which stands behind the copy, and before what the slot gets next. */
static void act_once(struct fixture *f, uint32_t block, unsigned *n_failed)
{
	if (f->want[block] != VRAM_ABSENT || !vram_has_room(f->v, block))
		return;
	if (failed(f, fetch(f, block), n_failed) || failed(f, expect(f, block), n_failed))
		return;
	if (!f->looked)
		start_look(f);
	if (f->n_reads < N_READS && file_rnd(&file, 2))
		start_read(f, block, 2);
	failed(f, evict(f, block), n_failed);
}

static void act(struct fixture *f, unsigned *n_failed)
{
	uint32_t block = (uint32_t)file_rnd(&file, file.c->n_blocks);
	bool room = vram_has_room(f->v, block);
	int r;

	switch (file_rnd(&file, 12)) {
	case 0:
	case 1:
	case 2:
	case 3:
		if (f->want[block] != VRAM_ABSENT)
			break;
		r = fetch(f, block);
		if (!room)
			assert_int_equal(r, -ENOSPC);
		else
			failed(f, r, n_failed);
		break;
	case 4:
	case 5:
		if (f->want[block] == VRAM_HERE)
			failed(f, evict(f, block), n_failed);
		break;
	case 6:
	case 7: failed(f, take(f, file_rnd(&file, 2)), n_failed); break;
	case 8:
		if (file_rnd(&file, 2) && !f->looked)
			start_look(f);
		else if (f->want[block] == VRAM_HERE && f->n_reads < N_READS)
			start_read(f, block, file_rnd(&file, 2) ? 0 : 2);
		break;
	case 9:
		if (file_rnd(&file, 6) == 0)
			act_limit(f, n_failed);
		break;
	case 10: act_once(f, block, n_failed); break;
	case 11:
		/* Those on their way are few. */
		for (uint32_t i = 0; i < file.c->n_blocks; i++, block = (block + 1) % file.c->n_blocks)
			if (f->want[block] == VRAM_COMING) {
				failed(f, expect(f, block), n_failed);
				break;
			}
		break;
	}
}

static void live(struct fixture *f, unsigned n_acts, unsigned *n_failed)
{
	struct vram_counters n;

	set_limit(f, 8 << 20);
	for (unsigned i = 0; i < n_acts; i++) {
		act(f, n_failed);
		check_counts(f);
		if (i % 25 == 0)
			check_reads(f);
		if (i % 100 == 0)
			check_blocks(f);
	}
	check_reads(f);
	check_blocks(f);
	vram_get_counters(f->v, &n);
	assert_true(n.blocks_copied > n_acts / 20 && n.blocks_evicted > n_acts / 40);
	assert_true(n.blocks_moved > 0 && n.chunks_given_back > 0);
	assert_true(n.bytes_copied >= n.blocks_copied && n.copy_us > 0);
}

static void test_life(void **unused)
{
	static const char *const delays[] = {
		NULL,
		"copy:150,launch:1000",
		"launch:4000",
		"copy:400,event:100",
	};
	struct fixture f;

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(delays); i++) {
		unsigned n_failed = 0;

		CARD_OR_SKIP(&f, NULL, delays[i], NULL);
		open_tier(&f);
		live(&f, 1200, &n_failed);
		assert_int_equal(n_failed, 0);
		close_all(&f);
	}
}

/* Copies fail one after the other: of blocks, of the table's entries, and inside the card. */
static void test_life_with_failures(void **unused)
{
	static const unsigned first[] = { 20, 33, 57 };
	struct fixture f;

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(first); i++) {
		unsigned n_failed = 0, at = first[i];
		char failures[256] = "";

		for (unsigned n = 0; n < 16; n++, at += at / 4)
			snprintf(failures + strlen(failures), sizeof(failures) - strlen(failures),
				 "%scopy:%u", n ? "," : "", at);
		CARD_OR_SKIP(&f, failures, "copy:100,launch:500", NULL);
		open_tier(&f);
		live(&f, 1200, &n_failed);
		assert_true(n_failed > 0);
		close_all(&f);
	}
}

/* ---- order ---- */

static uint32_t block_of(uint32_t layer, uint32_t expert)
{
	return file.c->layers[layer].first_block + expert;
}

/* Room for n blocks of that layer. */
static uint64_t bytes_for(struct fixture *f, uint32_t layer, uint64_t n)
{
	uint64_t slot = vram_class_bytes(f->v, vram_class(f->v, block_of(layer, 0)));
	uint64_t per_chunk = MAX(CHUNK / slot, UINT64_C(1));

	return (n + per_chunk - 1) / per_chunk * ((per_chunk * slot + CHUNK - 1) / CHUNK * CHUNK);
}

/* A kernel that is slow reads its block to the end, although the block is evicted and its slot filled anew. */
static void test_kernel_before_eviction(void **unused)
{
	uint32_t a = block_of(BIG, 0), b = block_of(BIG, 1);
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, "launch:60000", NULL);
	open_tier(&f);
	set_limit(&f, bytes_for(&f, BIG, 1));
	bring(&f, a);
	assert_done(&f, evict(&f, a));
	bring(&f, a);
	assert_false(vram_has_room(f.v, b));
	assert_int_equal(fetch(&f, b), -ENOSPC);
	start_read(&f, a, 2);
	assert_done(&f, evict(&f, a));
	assert_true(vram_has_room(f.v, b));
	bring(&f, b);
	start_read(&f, b, 0);
	check_reads(&f);
	check_blocks(&f);
	check_counts(&f);

	/* Nor is the memory given back under it. */
	start_read(&f, b, 1);
	start_look(&f);
	set_limit(&f, 0);
	f.want[b] = VRAM_ABSENT;
	check_reads(&f);
	check_counts(&f);
	check_blocks(&f);
	close_all(&f);
}

/* The same with more slots than there are marks: old ones stand for each other. */
static void test_many_evictions(void **unused)
{
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, "launch:20000", NULL);
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	for (unsigned round = 0; round < 4; round++) {
		for (uint32_t b = 0; b < file.c->n_blocks; b++)
			assert_done(&f, fetch(&f, b));
		take_all(&f);
		start_read(&f, round, 0);
		start_read(&f, round + 30, 0);
		for (uint32_t b = 0; b < file.c->n_blocks; b++)
			assert_done(&f, evict(&f, b));
	}
	check_reads(&f);
	check_counts(&f);
	close_all(&f);
}

/* A kernel holds up more changes of the table than there is room for on their way: none is lost. */
static void test_many_entries(void **unused)
{
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, "launch:200000", NULL);
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	bring(&f, 0);
	start_read(&f, 0, 0);
	for (uint32_t b = 1; b < file.c->n_blocks; b++)
		if (catalog_layer_of(file.c, b) != BIG)
			bring(&f, b);
	for (uint32_t b = 15; b < file.c->n_blocks; b++)
		if (vram_state(f.v, b) == VRAM_HERE)
			assert_done(&f, evict(&f, b));
	start_look(&f);
	check_reads(&f);
	check_counts(&f);
	check_blocks(&f);
	close_all(&f);
}

/* A copy goes on while the caller does, and so does what it computes. */
static void test_copies_overlap(void **unused)
{
	uint32_t b = block_of(0, 3);
	struct vram_counters n;
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, "copy:150000", NULL);
	open_tier(&f);
	set_limit(&f, 1 << 20);
	assert_done(&f, fetch(&f, b));
	assert_int_equal(vram_state(f.v, b), VRAM_COMING);
	assert_int_equal(take(&f, false), 0);
	assert_done(&f, cuda_stream_synchronize(f.gpu, f.compute));
	assert_int_equal(take(&f, false), 0);
	assert_int_equal(take(&f, true), 1);
	vram_get_counters(f.v, &n);
	assert_int_equal(n.blocks_copied, 1);
	assert_int_equal(n.bytes_copied, layer_of(b)->block_bytes);
	/* Three parts, each held back between half of that and all. */
	assert_true(n.copy_us >= 75000);
	close_all(&f);
}

/* All blocks of layer 6, which are small and fill their only chunk, and where each lies. */
static void fill_small(struct fixture *f, struct cuda_expert at[6])
{
	set_limit(f, UINT64_MAX);
	for (uint32_t e = 0; e < 6; e++) {
		bring(f, block_of(6, e));
		at[e] = entry_of(f, block_of(6, e));
	}
}

/* What is launched behind the expectation reads the block whole, although nobody waited for its copy. */
static void test_expect(void **unused)
{
	uint32_t a = block_of(6, 0), b = block_of(6, 1);
	struct cuda_expert at[6];
	struct vram_counters n;
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, NULL, NULL);
	open_tier(&f);
	fill_small(&f, at);
	assert_done(&f, evict(&f, a));
	assert_done(&f, evict(&f, b));
	inject(&f, NULL, "copy:60000");
	/* The slot that was left first comes first. */
	assert_done(&f, fetch(&f, b));
	assert_done(&f, expect(&f, b));
	start_read_at(&f, b, 0, &at[0]);
	start_read_at(&f, b, 1, &at[0]);
	start_read_at(&f, b, 2, &at[0]);
	start_look(&f);
	assert_done(&f, fetch(&f, a));
	check_counts(&f);
	assert_int_equal(take(&f, false), 0);
	check_reads(&f);
	check_counts(&f);
	assert_int_equal(take(&f, true), 1);
	assert_true(vram_confirmed(f.v, b));
	assert_int_equal(vram_state(f.v, a), VRAM_COMING);
	assert_int_equal(take(&f, true), 1);
	assert_int_equal(take(&f, true), 0);
	check_counts(&f);
	vram_get_counters(f.v, &n);
	assert_int_equal(n.blocks_copied, 8);
	inject(&f, NULL, NULL);
	check_blocks(&f);
	close_all(&f);
}

/* Each comes for one launch, all into the same slot: none waits on the host, and none disturbs the one before it. */
static void test_expect_for_one_launch(void **unused)
{
	uint32_t a = block_of(6, 0), b = block_of(6, 1);
	struct cuda_expert at[6];
	struct vram_counters n;
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, NULL, NULL);
	open_tier(&f);
	fill_small(&f, at);
	assert_done(&f, evict(&f, a));
	inject(&f, NULL, "copy:100000,launch:40000");
	assert_done(&f, fetch(&f, a));
	assert_done(&f, expect(&f, a));
	start_read_at(&f, a, 0, &at[0]);
	assert_done(&f, evict(&f, a));
	check_counts(&f);
	/* It is not returned, nor waited for. */
	assert_int_equal(take(&f, true), 0);
	vram_get_counters(f.v, &n);
	assert_int_equal(n.blocks_copied, 6);
	assert_done(&f, evict(&f, b));
	assert_done(&f, fetch(&f, b));
	assert_done(&f, expect(&f, b));
	start_read_at(&f, b, 0, &at[0]);
	start_read_at(&f, b, 2, &at[0]);
	assert_done(&f, evict(&f, b));
	assert_int_equal(take(&f, true), 0);
	/* And again, where b was. */
	assert_done(&f, fetch(&f, a));
	assert_done(&f, expect(&f, a));
	start_read_at(&f, a, 0, &at[1]);
	check_counts(&f);
	assert_int_equal(take(&f, false), 0);
	assert_int_equal(take(&f, true), 1);
	assert_true(vram_confirmed(f.v, a));
	check_reads(&f);
	check_counts(&f);
	vram_get_counters(f.v, &n);
	assert_int_equal(n.blocks_copied, 9);
	assert_int_equal(n.blocks_evicted, 4);
	inject(&f, NULL, NULL);
	check_blocks(&f);
	close_all(&f);
}

/* Copies whose blocks have left go from what is remembered without anybody taking them. */
static void test_abandoned(void **unused)
{
	uint32_t a = block_of(6, 0);
	struct vram_counters n;
	size_t before = 0;
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, NULL, NULL);
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	for (unsigned i = 0; i < 2000; i++) {
		assert_done(&f, fetch(&f, a));
		assert_done(&f, expect(&f, a));
		assert_done(&f, evict(&f, a));
		if (i % 8 == 0)
			assert_done(&f, cuda_stream_synchronize(f.gpu, f.compute));
		if (i == 100)
			before = mallinfo2().uordblks;
	}
	/* (Under a sanitizer both numbers are 0.) */
	assert_true(mallinfo2().uordblks <= before + 16384);
	assert_done(&f, cuda_stream_synchronize(f.gpu, f.compute));
	assert_int_equal(take(&f, false), 0);
	vram_get_counters(f.v, &n);
	assert_int_equal(n.blocks_copied, 2000);
	close_all(&f);
}

/* ---- chunks ---- */

static void test_classes(void **unused)
{
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, NULL, NULL);
	open_tier(&f);
	assert_int_equal(vram_bytes(f.v), 0);
	for (uint32_t b = 0; b < file.c->n_blocks; b++) {
		uint64_t bytes = layer_of(b)->block_bytes;
		uint64_t slot = vram_class_bytes(f.v, vram_class(f.v, b));

		assert_true(slot >= bytes && slot % 256 == 0);
		assert_true(slot <= (bytes + 3 * 256) * 10 / 9 + 256);
		assert_false(vram_has_room(f.v, b));
	}
	assert_int_equal(vram_class(f.v, block_of(0, 0)), vram_class(f.v, block_of(1, 11)));
	assert_int_not_equal(vram_class(f.v, block_of(0, 0)), vram_class(f.v, block_of(BIG, 0)));
	assert_true(vram_n_classes(f.v) >= 4);

	/* All of them: no more memory than their slots need, in whole chunks. */
	set_limit(&f, UINT64_MAX);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		bring(&f, b);
	check_counts(&f);
	check_blocks(&f);
	assert_true(vram_bytes(f.v) <= bytes_for(&f, 0, 24) + bytes_for(&f, 2, 9) + bytes_for(&f, 4, 10) +
					       bytes_for(&f, BIG, 8) + bytes_for(&f, 6, 6));
	close_all(&f);
}

static uint32_t count_bits(const uint8_t *bits)
{
	uint32_t n = 0;

	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		n += bits[b / 8] >> b % 8 & 1;
	return n;
}

/* 24 equal blocks, 3 in a chunk. */
static void test_shrink(void **unused)
{
	_cleanup_(freep) uint8_t *gone = calloc(file.c->n_blocks, 1);
	struct vram_counters n;
	struct fixture f;
	uint64_t full;

	(void)unused;
	assert_non_null(gone);
	CARD_OR_SKIP(&f, NULL, "launch:2000", NULL);
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	for (uint32_t b = 0; b < 24; b++)
		bring(&f, b);
	full = vram_bytes(f.v);
	assert_int_equal(full, 8 * CHUNK);

	/* Free slots in three chunks are worth one: what is in it moves, and nobody has to go. */
	for (uint32_t b = 0; b < 9; b += 4)
		assert_done(&f, evict(&f, b));
	start_read(&f, 1, 0);
	start_read(&f, 2, 0);
	start_look(&f);
	f.limit = full - CHUNK;
	assert_done(&f, vram_set_limit(f.v, f.limit, gone));
	assert_int_equal(count_bits(gone), 0);
	assert_int_equal(vram_bytes(f.v), full - CHUNK);
	vram_get_counters(f.v, &n);
	assert_int_equal(n.blocks_moved, 2);
	assert_int_equal(n.chunks_given_back, 1);
	assert_int_equal(n.blocks_evicted, 3);
	check_reads(&f);
	check_counts(&f);
	check_blocks(&f);

	/* One that is on its way counts like the others. Two free slots, and two chunks too many: four go. */
	assert_false(vram_has_room(f.v, 0));
	for (uint32_t b = 12; b < 15; b++)
		assert_done(&f, evict(&f, b));
	assert_done(&f, fetch(&f, 13));
	f.limit -= 2 * CHUNK - 1;
	assert_done(&f, vram_set_limit(f.v, f.limit, gone));
	assert_int_equal(count_bits(gone), 4);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		if (gone[b / 8] >> b % 8 & 1) {
			assert_int_not_equal(f.want[b], VRAM_ABSENT);
			f.want[b] = VRAM_ABSENT;
		}
	check_counts(&f);
	take_all(&f);
	check_counts(&f);
	check_blocks(&f);

	/* And back: nobody to be told. */
	assert_done(&f, vram_set_limit(f.v, 0, NULL));
	assert_int_equal(vram_bytes(f.v), 0);
	assert_int_equal(vram_n_here(f.v), 0);
	set_limit(&f, CHUNK);
	memset(f.want, 0, file.c->n_blocks * sizeof(*f.want));
	bring(&f, 3);
	check_blocks(&f);
	close_all(&f);
}

/* A class that is small loses nothing as long as there is room in another. */
static void test_shrink_where_nobody_goes(void **unused)
{
	_cleanup_(freep) uint8_t *gone = calloc(file.c->n_blocks, 1);
	struct fixture f;

	(void)unused;
	assert_non_null(gone);
	CARD_OR_SKIP(&f, NULL, NULL, NULL);
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	for (uint32_t b = 0; b < 9; b++)
		bring(&f, b);
	bring(&f, block_of(6, 2));
	for (uint32_t b = 0; b < 9; b += 3)
		assert_done(&f, evict(&f, b));
	f.limit = vram_bytes(f.v) - 1;
	assert_done(&f, vram_set_limit(f.v, f.limit, gone));
	assert_int_equal(count_bits(gone), 0);
	check_counts(&f);
	check_blocks(&f);
	close_all(&f);
}

/* Three chunks of three slots, two blocks in each. */
static void fill_chunks(struct fixture *f)
{
	set_limit(f, 3 * CHUNK);
	for (uint32_t b = 0; b < 9; b++)
		bring(f, b);
	for (uint32_t b = 0; b < 9; b += 3)
		assert_done(f, evict(f, b));
}

/*
 * What is moved is still being copied, expected or not, and so is (of a copy that failed in its middle) what lies where it
 * is moved to.
 */
static void shrink_under_copies(bool expected)
{
	static const uint32_t leaving[] = { 3, 0, 4, 5 };
	_cleanup_(freep) uint8_t *gone = calloc(file.c->n_blocks, 1);
	struct vram_counters n;
	struct fixture f;

	assert_non_null(gone);
	CARD_OR_SKIP(&f, NULL, NULL, NULL);
	open_tier(&f);
	set_limit(&f, 2 * CHUNK);
	for (uint32_t b = 0; b < 6; b++)
		bring(&f, b);
	for (size_t i = 0; i < ARRAY_SIZE(leaving); i++)
		assert_done(&f, evict(&f, leaving[i]));
	/* Into the slot of 3, and into that of 0: the oldest first. A block is copied in 3 or 4 parts. */
	inject(&f, "copy:6", "copy:10000");
	assert_done(&f, fetch(&f, 9));
	assert_int_equal(fetch(&f, 11), -EIO);
	if (expected)
		assert_done(&f, expect(&f, 9));
	assert_int_equal(vram_n_coming(f.v), !expected);
	check_counts(&f);
	f.limit = CHUNK;
	assert_done(&f, vram_set_limit(f.v, f.limit, gone));
	assert_int_equal(count_bits(gone), 0);
	vram_get_counters(f.v, &n);
	assert_int_equal(n.blocks_moved, 1);
	check_counts(&f);
	assert_int_equal(take(&f, true), 1);
	assert_int_equal(take(&f, true), 0);
	check_counts(&f);
	inject(&f, NULL, NULL);
	check_blocks(&f);

	/* Or it has to go, and is not taken any more. */
	assert_done(&f, evict(&f, 9));
	inject(&f, NULL, "copy:10000");
	assert_done(&f, fetch(&f, 9));
	if (expected)
		assert_done(&f, expect(&f, 9));
	f.limit = 0;
	assert_done(&f, vram_set_limit(f.v, 0, gone));
	assert_int_equal(count_bits(gone), 3);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		f.want[b] = VRAM_ABSENT;
	check_counts(&f);
	assert_int_equal(take(&f, true), 0);
	inject(&f, NULL, NULL);
	check_blocks(&f);
	close_all(&f);
}

static void test_shrink_under_copies(void **unused)
{
	(void)unused;
	shrink_under_copies(false);
	shrink_under_copies(true);
}

/* A chunk cannot be emptied to the end: what there is goes on, and its free slots are free. */
static void test_shrink_fails(void **unused)
{
	static const char *const failures[] = { "copy:1", "copy:2", "copy:3", "copy:4" };
	struct fixture f;

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(failures); i++) {
		CARD_OR_SKIP(&f, NULL, NULL, NULL);
		open_tier(&f);
		fill_chunks(&f);
		start_read(&f, 1, 0);
		start_read(&f, 2, 0);
		/* Two moves, each with an entry of the table. */
		inject(&f, failures[i], "copy:3000");
		assert_int_equal(vram_set_limit(f.v, 2 * CHUNK, NULL), -EIO);
		assert_int_equal(vram_bytes(f.v), 3 * CHUNK);
		check_counts(&f);
		for (uint32_t b = 0; b < 9; b += 3) {
			assert_true(vram_has_room(f.v, b));
			assert_done(&f, fetch(&f, b));
		}
		assert_false(vram_has_room(f.v, 9));
		take_all(&f);
		inject(&f, NULL, NULL);
		check_reads(&f);
		check_counts(&f);
		check_blocks(&f);
		set_limit(&f, 3 * CHUNK);
		assert_done(&f, evict(&f, 4));
		assert_done(&f, evict(&f, 8));
		assert_done(&f, evict(&f, 1));
		set_limit(&f, 2 * CHUNK);
		check_counts(&f);
		check_blocks(&f);
		close_all(&f);
	}
}

/* ---- failures ---- */

/* Nothing has changed where expecting, confirming or leaving failed, and the next try is as good as the first. */
static void test_expect_fails(void **unused)
{
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, NULL, NULL);
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	for (uint32_t b = 0; b < 2; b++) {
		assert_done(&f, fetch(&f, b));
		inject(&f, "copy:1", NULL);
		assert_int_equal(b == 0 ? expect(&f, b) : take(&f, true), -EIO);
		assert_int_equal(vram_n_coming(f.v), 1);
		check_counts(&f);
		start_look(&f);
		check_reads(&f);
		assert_done(&f, expect(&f, b));
		inject(&f, NULL, NULL);
		inject(&f, "copy:1", NULL);
		assert_int_equal(evict(&f, b), -EIO);
		inject(&f, NULL, NULL);
		check_counts(&f);
		check_blocks(&f);
		assert_int_equal(take(&f, true), 1);
		check_counts(&f);
	}
	close_all(&f);
}

static void test_card_is_full(void **unused)
{
	struct fixture f;
	uint32_t b;
	int r = 0;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, NULL, "36M");
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	for (b = 0; b < file.c->n_blocks && r == 0; b++) {
		r = fetch(&f, b);
		if (r == 0)
			take_all(&f);
	}
	assert_int_equal(r, -ENOMEM);
	assert_true(b > 24);
	assert_int_equal(f.want[--b], VRAM_ABSENT);
	/* The limit is what there is, until another one is set. */
	f.limit = vram_bytes(f.v);
	assert_false(vram_has_room(f.v, b));
	assert_int_equal(fetch(&f, b), -ENOSPC);
	check_counts(&f);
	set_limit(&f, f.limit - 4 * CHUNK);
	for (uint32_t i = 0; i < file.c->n_blocks; i++)
		f.want[i] = vram_state(f.v, i);
	set_limit(&f, UINT64_MAX);
	for (b = 0; b < 24; b++)
		if (f.want[b] == VRAM_ABSENT)
			bring(&f, b);
	check_counts(&f);
	check_blocks(&f);
	close_all(&f);
}

/* A bit of everything; the first error, which then stays. */
static int short_life(struct fixture *f, uint8_t *gone)
{
	int r;

	r = vram_set_limit(f->v, 6 * CHUNK, NULL);
	for (uint32_t b = 0; b < 12 && r == 0; b++) {
		r = fetch(f, b);
		if (r == 0 && b % 3 == 0)
			r = expect(f, b);
		if (r == 0 && b % 6 == 0)
			r = evict(f, b);
		if (r == 0 && b % 3 == 2)
			r = take(f, true) < 0 ? -ENODEV : 0;
	}
	while (r == 0 && vram_n_coming(f->v) > 2)
		r = take(f, true) < 0 ? -ENODEV : 0;
	for (uint32_t b = 0; b < 12 && r == 0; b += 5)
		if (f->want[b] == VRAM_HERE)
			r = evict(f, b);
	if (r == 0)
		r = vram_set_limit(f->v, 2 * CHUNK, gone);
	if (r == 0)
		r = cuda_stream_synchronize(f->gpu, f->compute);
	return r;
}

static void check_lost(struct fixture *f, uint8_t *gone)
{
	_cleanup_(freep) uint8_t *bytes = malloc(file.c->block_bytes_max);
	void *const matrix[CATALOG_MATRICES] = { bytes, bytes, bytes };
	uint32_t block = CATALOG_NONE;

	/* The one that finds it may be any call: what waits for the card does. */
	assert_int_equal(vram_set_limit(f->v, 0, gone), -ENODEV);
	for (uint32_t b = 0; b < 12; b++)
		switch (vram_state(f->v, b)) {
		case VRAM_ABSENT:
			assert_int_equal(fetch(f, b), -ENODEV);
			assert_int_equal(vram_state(f->v, b), VRAM_ABSENT);
			break;
		case VRAM_COMING:
			assert_int_equal(expect(f, b), -ENODEV);
			assert_int_equal(vram_state(f->v, b), VRAM_COMING);
			break;
		case VRAM_HERE:
			assert_int_equal(vram_evict(f->v, b), -ENODEV);
			assert_int_equal(vram_download(f->v, b, matrix), -ENODEV);
			break;
		}
	assert_int_equal(vram_take(f->v, false, &block), -ENODEV);
	assert_int_equal(vram_take(f->v, true, &block), -ENODEV);
	assert_int_equal(block, CATALOG_NONE);
	assert_non_null(strstr(cuda_error(f->gpu), "lost"));
}

/* Loses the card at the nth call, or (fault) at the nth piece of work. False: life was over before. */
static bool lose_at(const char *what, unsigned n)
{
	_cleanup_(freep) uint8_t *gone = calloc(file.c->n_blocks, 1);
	char failure[64];
	struct fixture f;
	int r = 0;

	assert_non_null(gone);
	snprintf(failure, sizeof(failure), "%s:%u", what, n);
	if (!open_card(&f, failure, NULL, NULL))
		return true;
	f.want = calloc(file.c->n_blocks, sizeof(*f.want));
	f.confirmed = calloc(file.c->n_blocks, sizeof(*f.confirmed));
	assert_true(f.want && f.confirmed);
	if ((r = cuda_stream_new(f.gpu, &f.compute)) == 0 &&
	    (r = vram_new(f.gpu, f.compute, file.c, CHUNK, STAGING, &f.v)) == 0 &&
	    (r = short_life(&f, gone)) < 0)
		check_lost(&f, gone);
	assert_true(r == 0 || r == -ENODEV);
	close_all(&f);
	return r < 0;
}

static void test_lost(void **unused)
{
	unsigned n = 1;

	(void)unused;
	if (!emu_library())
		skip_because("there is no emulated card");
	while (lose_at("lost", n))
		n++;
	assert_true(n > 200);
	for (n = 1; lose_at("fault", n);)
		n++;
	assert_true(n > 100);
}

/* vram_new() with every kind of memory short. */
static void test_no_memory(void **unused)
{
	static const char *const failures[] = { "alloc:1", "host:1", "host:2" };
	struct fixture f;

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(failures); i++) {
		uint64_t before, after, total;

		CARD_OR_SKIP(&f, failures[i], NULL, NULL);
		assert_done(&f, cuda_stream_new(f.gpu, &f.compute));
		assert_done(&f, cuda_memory_info(f.gpu, &before, &total));
		assert_int_equal(vram_new(f.gpu, f.compute, file.c, CHUNK, STAGING, &f.v), -ENOMEM);
		assert_null(f.v);
		assert_done(&f, cuda_memory_info(f.gpu, &after, &total));
		assert_int_equal(after, before);
		close_all(&f);
	}
}

static void test_cycles(void **unused)
{
	size_t host_before = 0;
	struct fixture f;
	uint64_t before, after, total;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, "copy:20", NULL);
	f.want = calloc(file.c->n_blocks, sizeof(*f.want));
	f.confirmed = calloc(file.c->n_blocks, sizeof(*f.confirmed));
	assert_true(f.want && f.confirmed);
	assert_done(&f, cuda_stream_new(f.gpu, &f.compute));
	assert_done(&f, cuda_memory_info(f.gpu, &before, &total));
	for (unsigned i = 0; i < 50; i++) {
		assert_done(&f, vram_new(f.gpu, f.compute, file.c, CHUNK, STAGING, &f.v));
		set_limit(&f, 4 << 20);
		for (uint32_t b = i % 20; b < i % 20 + 5; b++)
			assert_done(&f, fetch(&f, b));
		assert_done(&f, expect(&f, i % 20 + 4));
		while (vram_n_coming(f.v) > i % 4)
			assert_int_equal(take(&f, true), 1);
		assert_done(&f, vram_set_limit(f.v, CHUNK, NULL));
		assert_done(&f, cuda_memory_info(f.gpu, &after, &total));
		assert_true(before - after >= vram_bytes(f.v));
		f.v = vram_free(f.v);
		assert_done(&f, cuda_memory_info(f.gpu, &after, &total));
		assert_int_equal(after, before);
		memset(f.want, 0, file.c->n_blocks * sizeof(*f.want));
		if (i == 0)
			host_before = mallinfo2().uordblks;
	}
	/* Page-locked memory and events are the host's here. (Under a sanitizer both numbers are 0.) */
	assert_true(mallinfo2().uordblks <= host_before + 4096);
	close_all(&f);
}

static void test_download(void **unused)
{
	uint32_t blocks[] = { block_of(0, 2), block_of(2, 4), block_of(BIG, 7), block_of(6, 5) };
	struct fixture f;

	(void)unused;
	CARD_OR_SKIP(&f, NULL, "launch:5000,copy:500", NULL);
	open_tier(&f);
	set_limit(&f, UINT64_MAX);
	for (size_t i = 0; i < ARRAY_SIZE(blocks); i++) {
		const struct catalog_layer *l = layer_of(blocks[i]);
		void *got[CATALOG_MATRICES] = {};
		const void *want[CATALOG_MATRICES];

		bring(&f, blocks[i]);
		start_read(&f, blocks[i], 2);
		assert_done(&f, evict(&f, blocks[i]));
		assert_done(&f, fetch(&f, blocks[i]));
		assert_done(&f, expect(&f, blocks[i]));
		if (i % 2)
			take_all(&f);
		find_matrices(blocks[i], want);
		for (unsigned m = 0; m < CATALOG_MATRICES; m++)
			if (want[m])
				assert_non_null(got[m] = malloc(l->expert_bytes[m]));
		assert_done(&f, vram_download(f.v, blocks[i], got));
		assert_int_equal(vram_state(f.v, blocks[i]), VRAM_HERE);
		for (unsigned m = 0; m < CATALOG_MATRICES; m++) {
			if (want[m])
				assert_memory_equal(got[m], want[m], l->expert_bytes[m]);
			free(got[m]);
		}
	}
	check_reads(&f);
	assert_int_equal(vram_free(NULL), NULL);
	close_all(&f);
}

static int open_file(void **unused)
{
	(void)unused;
	file_open(&file, NULL);
	return 0;
}

static int close_file(void **unused)
{
	(void)unused;
	file_close(&file);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_classes),
		cmocka_unit_test(test_life),
		cmocka_unit_test(test_life_with_failures),
		cmocka_unit_test(test_kernel_before_eviction),
		cmocka_unit_test(test_many_evictions),
		cmocka_unit_test(test_many_entries),
		cmocka_unit_test(test_copies_overlap),
		cmocka_unit_test(test_expect),
		cmocka_unit_test(test_expect_for_one_launch),
		cmocka_unit_test(test_abandoned),
		cmocka_unit_test(test_expect_fails),
		cmocka_unit_test(test_shrink),
		cmocka_unit_test(test_shrink_where_nobody_goes),
		cmocka_unit_test(test_shrink_under_copies),
		cmocka_unit_test(test_shrink_fails),
		cmocka_unit_test(test_card_is_full),
		cmocka_unit_test(test_lost),
		cmocka_unit_test(test_no_memory),
		cmocka_unit_test(test_cycles),
		cmocka_unit_test(test_download),
	};

	return cmocka_run_group_tests(tests, open_file, close_file);
}
