/* SPDX-License-Identifier: MIT */
/*
 * The engine's way to the blocks, in every form of the host tier: random steps under a budget that moves, with the bytes of every block
 * that is handed out; heat, recording, broken files; and that the logits of the bundled model are the same bits whatever the form.
 */
#include "tests/test.h"

#include "daemon/engine/graph.h"
#include "daemon/residency/heat.h"
#include "daemon/residency/memory.h"
#include "daemon/residency/residency.h"
#include "tests/unit/expert-file.h"

#include <pthread.h>

#define TOY         "tests/models/tiny-qwen35moe-stories-q8_0.gguf"
#define N_USED      2
#define N_LAYERS    6 /* with experts */
#define EXPERTS_MAX 12
#define KV_MIN      ((uint64_t)1 << 20)
#define PLENTY      ((uint64_t)1 << 40) /* of the budget: all that there is */
#define HUGE        ((uint64_t)2 << 20)

static const uint32_t expert_layers[N_LAYERS] = { 0, 1, 2, 4, 5, 6 };
static const enum residency_tier tiers[] = { RESIDENCY_UNMANAGED, RESIDENCY_MAPPED, RESIDENCY_ARENA };

static struct expert_file file;

/* A residency over the file, and what the test expects of it. */
struct fixture {
	struct model model;
	struct residency_shared shared;
	struct residency *r;
	uint64_t wanted, misses;
	uint16_t *heat; /* of the session */
	uint64_t *want_heat;
};

/* A mapping without locks and advice, and nothing of the file in memory. */
static void make_cold(void)
{
	file_reopen(&file);
	if (!file_drop(&file) && file.has_page_cache)
		fail_msg("%s stays in the page cache", file.path);
}

static struct residency_config config_of(enum residency_tier tier)
{
	return (struct residency_config){
		.tier = tier == RESIDENCY_UNMANAGED ? RESIDENCY_AUTO : tier,
		.policy = EVICT_CLOCK_LFU,
		.budget_bytes = PLENTY,
		.reserve_bytes = 1 << 20,
	};
}

static int try_open(struct fixture *f, const struct residency_config *c, char **ret_error)
{
	_cleanup_(freep) char *reason = NULL;
	int r;

	*f = (struct fixture){ .model = { .catalog = file.c, .n_expert_used = N_USED, .path = file.path } };
	r = residency_new(&f->model, c, 1000, KV_MIN, &f->shared, NULL, &f->r, &reason, ret_error);
	if (r < 0)
		return r;
	assert_non_null(reason);
	f->heat = calloc(file.c->n_blocks, sizeof(*f->heat));
	f->want_heat = calloc(file.c->n_blocks, sizeof(*f->want_heat));
	assert_true(f->heat && f->want_heat);
	return 0;
}

static void open_with(struct fixture *f, const struct residency_config *c)
{
	_cleanup_(freep) char *error = NULL;

	if (try_open(f, c, &error) < 0)
		fail_msg("%s", error ? error : "no error text");
	assert_null(error);
}

static void open_tier(struct fixture *f, enum residency_tier tier)
{
	struct residency_config c = config_of(tier);

	open_with(f, &c);
}

static void done(struct fixture *f)
{
	assert_null(residency_free(f->r));
	free(f->heat);
	free(f->want_heat);
}

static struct residency_stats stats_of(const struct fixture *f)
{
	struct residency_stats s;

	residency_get_stats(f->r, &s);
	return s;
}

/* What the budget leaves for blocks. */
static uint64_t limit_of(const struct residency_stats *s)
{
	uint64_t other = s->trunk_bytes + s->fixed_bytes + s->kv_bytes;

	return s->budget_bytes > other ? s->budget_bytes - other : 0;
}

/* The loop's word: room for so many bytes of blocks. */
static void allow_blocks(struct fixture *f, uint64_t bytes)
{
	struct residency_stats s = stats_of(f);

	atomic_store(&f->shared.target_bytes, s.trunk_bytes + s.fixed_bytes + s.kv_bytes + bytes);
}

static void settle(struct fixture *f)
{
	while (residency_pump(f->r, true))
		;
}

static bool is_here(const struct fixture *f, uint32_t layer, uint32_t expert)
{
	uint16_t heat[EXPERTS_MAX];
	char place[EXPERTS_MAX];
	uint32_t i = 0;

	while (expert_layers[i] != layer)
		i++;
	residency_get_blocks(f->r, i, heat, place);
	return place[expert] == 'h';
}

/* What a wave says is what the file holds. */
static void check_block(uint32_t layer, const struct residency_block *w)
{
	const struct catalog_layer *l = &file.c->layers[layer];

	assert_true(w->expert < l->n_expert);
	for (unsigned i = 0; i < CATALOG_MATRICES; i++) {
		if (!l->matrix[i]) {
			assert_null(w->matrix[i]);
			continue;
		}
		assert_memory_equal(w->matrix[i],
				    file.copy + l->matrix[i]->offset + w->expert * l->expert_bytes[i],
				    l->expert_bytes[i]);
	}
}

static void begin_layer(struct fixture *f, uint32_t layer, const uint32_t *experts,
			const uint32_t *n_tok, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		uint32_t weight = 1;

		while (n_tok[i] >> weight > 0)
			weight++;
		f->want_heat[file.c->layers[layer].first_block + experts[i]] += weight * EVICT_HEAT_ONE;
	}
	residency_layer_begin(f->r, layer, experts, n_tok, n);
	f->wanted += n;
}

/* Takes all waves: each expert once, and in place until the next call. */
static void take_layer(struct fixture *f, uint32_t layer, const uint32_t *experts, size_t n)
{
	struct residency_block wave[EXPERTS_MAX];
	bool given[EXPERTS_MAX] = {};
	size_t n_given = 0;
	ssize_t k = 0;

	for (;;) {
		for (ssize_t i = 0; i < k; i++)
			check_block(layer, &wave[i]);
		k = residency_layer_next(f->r, wave, 1 + file_rnd(&file, EXPERTS_MAX), &(bool){ false });
		if (k == 0)
			break;
		assert_true(k > 0);
		for (ssize_t i = 0; i < k; i++) {
			assert_false(given[wave[i].expert]);
			given[wave[i].expert] = true;
			check_block(layer, &wave[i]);
		}
		n_given += (size_t)k;
	}
	assert_int_equal(n_given, n);
	for (size_t i = 0; i < n; i++)
		assert_true(given[experts[i]]);
}

static void use(struct fixture *f, uint32_t layer, const uint32_t *experts, size_t n)
{
	uint32_t n_tok[EXPERTS_MAX];

	for (size_t i = 0; i < n; i++)
		n_tok[i] = 1;
	begin_layer(f, layer, experts, n_tok, n);
	take_layer(f, layer, experts, n);
}

static void use_one(struct fixture *f, uint32_t layer, uint32_t expert)
{
	residency_step_begin(f->r, 1, f->heat);
	use(f, layer, &expert, 1);
	residency_step_end(f->r);
}

static size_t choose(uint32_t layer, size_t n_rows, uint32_t *experts, uint32_t *n_tok)
{
	uint32_t n_expert = file.c->layers[layer].n_expert;
	size_t want = MIN(n_rows * N_USED, (size_t)n_expert), n = 0;

	for (uint32_t e = 0; e < n_expert; e++)
		if (file_rnd(&file, n_expert - e) < want - n) {
			experts[n] = e;
			n_tok[n++] = 1 + (uint32_t)file_rnd(&file, n_rows);
		}
	return n;
}

static void random_target(struct fixture *f)
{
	uint64_t floor = atomic_load(&f->shared.floor_bytes), room = file.c->block_bytes + (4 << 20);

	if (file_rnd(&file, 8) == 0)
		atomic_store(&f->shared.target_bytes,
			     file_rnd(&file, 2) ? floor + file_rnd(&file, room) : PLENTY);
}

static void random_step(struct fixture *f)
{
	static const size_t rows[] = { 1, 1, 7, 64 };
	uint32_t experts[EXPERTS_MAX], n_tok[EXPERTS_MAX];
	size_t n_rows = rows[file_rnd(&file, ARRAY_SIZE(rows))];

	random_target(f);
	residency_step_begin(f->r, n_rows, f->heat);
	for (size_t i = 0; i < N_LAYERS; i++) {
		size_t n = choose(expert_layers[i], n_rows, experts, n_tok);

		random_target(f);
		begin_layer(f, expert_layers[i], experts, n_tok, n);
		random_target(f);
		if (i + 1 < N_LAYERS && residency_wants_guess(f->r)) {
			uint32_t guess[EXPERTS_MAX], tok[EXPERTS_MAX];
			size_t n_guess = choose(expert_layers[i + 1], 1, guess, tok);

			residency_guess(f->r, expert_layers[i + 1], guess, n_guess);
		}
		take_layer(f, expert_layers[i], experts, n);
	}
	residency_step_end(f->r);
}

/* Places, counts and bytes agree; what is not in the middle of a layer is within the budget. */
static void check_state(struct fixture *f)
{
	struct residency_stats s;
	uint64_t hits = 0, misses = 0;
	uint32_t n_host = 0;

	settle(f);
	assert_int_equal(residency_charge(f->r, stats_of(f).kv_bytes), 0);
	settle(f);
	s = stats_of(f);
	for (uint32_t i = 0; i < N_LAYERS; i++) {
		struct residency_layer_info l;
		uint16_t heat[EXPERTS_MAX];
		char place[EXPERTS_MAX];
		uint32_t n = 0;

		residency_get_layer(f->r, i, &l);
		assert_int_equal(l.layer, expert_layers[i]);
		assert_int_equal(l.n_experts, file.c->layers[l.layer].n_expert);
		residency_get_blocks(f->r, i, heat, place);
		for (uint32_t e = 0; e < l.n_experts; e++)
			n += place[e] == 'h';
		assert_int_equal(l.n_host, n);
		n_host += n;
		hits += l.hits;
		misses += l.misses;
	}
	assert_int_equal(s.n_host, n_host);
	assert_int_equal(s.hits, hits);
	assert_int_equal(s.misses, misses);
	if (s.tier == RESIDENCY_UNMANAGED)
		return;
	assert_int_equal(hits + misses, f->wanted);
	assert_int_equal(s.io.read_errors, 0);
	assert_int_equal(s.io.left_pages, 0);
	if (s.place_bytes > limit_of(&s))
		fail_msg("%s: %lu bytes of blocks, allowed are %lu", residency_tier_to_string(s.tier),
			 (unsigned long)s.place_bytes, (unsigned long)limit_of(&s));
}

static void check_heat(const struct fixture *f)
{
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		assert_int_equal(f->heat[b], MIN(f->want_heat[b], (uint64_t)UINT16_MAX));
}

static void test_random_steps(void **state)
{
	(void)state;
	for (size_t t = 0; t < ARRAY_SIZE(tiers); t++) {
		for (int policy = EVICT_LRU; policy <= EVICT_S3_FIFO; policy++) {
			struct residency_config c = config_of(tiers[t]);
			struct fixture f;

			make_cold();
			c.policy = (enum evict_policy)policy;
			open_with(&f, &c);
			assert_int_equal(stats_of(&f).tier, tiers[t]);
			assert_int_equal(residency_n_layers(f.r), N_LAYERS);
			for (unsigned i = 0; i < 24; i++) {
				random_step(&f);
				check_state(&f);
			}
			if (residency_managed(f.r)) {
				struct residency_stats s = stats_of(&f);

				check_heat(&f);
				assert_true(s.hits > 0 && s.misses > 0 && s.io.blocks_evicted > 0);
				/* Nothing was read ahead: each miss was one read. */
				if (tiers[t] == RESIDENCY_ARENA || file.has_page_cache)
					assert_int_equal(s.io.blocks_read, s.misses);
			}
			done(&f);
		}
	}
}

static void test_reading_ahead(void **state)
{
	(void)state;
	for (size_t t = 1; t < ARRAY_SIZE(tiers); t++) {
		struct residency_config c = config_of(tiers[t]);
		struct residency_stats s;
		struct fixture f;

		c.prefetch = 1;
		open_with(&f, &c);
		for (unsigned i = 0; i < 30; i++) {
			allow_blocks(&f, 12 << 20);
			random_step(&f);
			check_state(&f);
		}
		s = stats_of(&f);
		assert_true(s.prefetching);
		assert_true(s.prefetch_used > 0 && s.prefetch_wasted > 0);
		check_heat(&f);
		done(&f);
	}
}

static void *move_target(void *arg)
{
	struct fixture *f = arg;
	uint64_t floor = atomic_load(&f->shared.floor_bytes);

	for (unsigned i = 0; i < 400 && atomic_load(&f->shared.target_bytes) != PLENTY; i++) {
		uint64_t expected = atomic_load(&f->shared.target_bytes);

		if (expected != PLENTY)
			(void)atomic_compare_exchange_strong(&f->shared.target_bytes, &expected,
							     floor + (uint64_t)(i % 7) * (3 << 20));
		nanosleep(&(struct timespec){ .tv_nsec = 300000 }, NULL);
	}
	return NULL;
}

/* Memory pressure does not wait for a layer to end. */
static void test_target_from_another_thread(void **state)
{
	(void)state;
	for (size_t t = 1; t < ARRAY_SIZE(tiers); t++) {
		struct fixture f;
		pthread_t thread;

		open_tier(&f, tiers[t]);
		assert_int_equal(pthread_create(&thread, NULL, move_target, &f), 0);
		for (unsigned i = 0; i < 25; i++) {
			uint32_t experts[EXPERTS_MAX], n_tok[EXPERTS_MAX];

			residency_step_begin(f.r, 64, NULL);
			for (size_t k = 0; k < N_LAYERS; k++) {
				size_t n = choose(expert_layers[k], 64, experts, n_tok);

				begin_layer(&f, expert_layers[k], experts, n_tok, n);
				take_layer(&f, expert_layers[k], experts, n);
			}
			residency_step_end(f.r);
		}
		atomic_store(&f.shared.target_bytes, PLENTY);
		assert_int_equal(pthread_join(thread, NULL), 0);
		check_state(&f);
		done(&f);
	}
}

/* Below the floor and above what was configured the loop is not obeyed. */
static void test_bounds_of_the_target(void **state)
{
	struct residency_config c = config_of(RESIDENCY_ARENA);
	struct fixture f;
	uint64_t floor;

	(void)state;
	open_with(&f, &c);
	floor = atomic_load(&f.shared.floor_bytes);
	done(&f);
	c.budget_bytes = floor + (64 << 20);
	open_with(&f, &c);
	assert_int_equal(stats_of(&f).budget_at_load_bytes, c.budget_bytes);
	assert_int_equal(atomic_load(&f.shared.budget_bytes), c.budget_bytes);
	assert_true(atomic_load(&f.shared.managed));
	floor = stats_of(&f).floor_bytes;
	atomic_store(&f.shared.target_bytes, 1);
	assert_false(residency_pump(f.r, false));
	assert_int_equal(stats_of(&f).budget_bytes, floor);
	assert_int_equal(atomic_load(&f.shared.budget_bytes), floor);
	atomic_store(&f.shared.target_bytes, PLENTY);
	assert_false(residency_pump(f.r, false));
	assert_int_equal(stats_of(&f).budget_bytes, c.budget_bytes);
	done(&f);
}

/* All of a layer's experts but the last `except`. */
static void use_layer(struct residency *r, uint32_t layer, uint32_t n_expert, uint32_t except)
{
	struct residency_block wave[32];
	uint32_t experts[32], n_tok[32];
	ssize_t k;

	for (uint32_t e = 0; e < n_expert; e++) {
		experts[e] = e;
		n_tok[e] = 1;
	}
	residency_step_begin(r, 1, NULL);
	residency_layer_begin(r, layer, experts, n_tok, n_expert - except);
	while ((k = residency_layer_next(r, wave, 32, &(bool){ false })) > 0)
		;
	assert_int_equal(k, 0);
	residency_step_end(r);
}

/*
 * Memory goes back in pieces larger than a block. When the budget fell by less than a piece, all blocks but one went for the next one
 * that came in, because none of them alone gave any memory back.
 */
static void test_less_room_flushes_nothing(void **state)
{
	struct residency_config c = config_of(RESIDENCY_ARENA);
	struct residency_shared shared = {};
	_cleanup_(freep) char *reason = NULL;
	struct residency_stats s;
	struct residency *r;
	struct model *m;
	uint32_t n, piece;

	(void)state;
	assert_int_equal(model_load(TOY, &m, NULL), 0);
	piece = (uint32_t)(HUGE / m->catalog->block_bytes_max) + 1;
	n = m->catalog->layers[0].n_expert;
	assert_true(n == 32 && m->catalog->n_layers == 8 && m->catalog->n_blocks > 2 * piece);
	assert_int_equal(residency_new(m, &c, 0, 0, &shared, NULL, &r, &reason, NULL), 0);
	for (uint32_t i = 0; i < 8; i++)
		use_layer(r, i, n, i == 7);
	residency_get_stats(r, &s);
	assert_int_equal(s.n_host, m->catalog->n_blocks - 1);
	atomic_store(&shared.target_bytes,
		     s.trunk_bytes + s.fixed_bytes + s.kv_bytes + s.place_bytes - 1);
	use_layer(r, 7, n, 0);
	residency_get_stats(r, &s);
	assert_true(s.place_bytes <= limit_of(&s));
	if (s.n_host + piece + 2 < m->catalog->n_blocks)
		fail_msg("%u of %u blocks are left", s.n_host, m->catalog->n_blocks);
	residency_free(r);
	model_unref(m);
}

static void test_charge(void **state)
{
	(void)state;
	for (size_t t = 1; t < ARRAY_SIZE(tiers); t++) {
		struct residency_config c = config_of(tiers[t]);
		struct residency_stats s;
		struct fixture f;
		uint64_t room, floor;

		open_with(&f, &c);
		floor = stats_of(&f).floor_bytes;
		done(&f);
		c.budget_bytes = floor + file.c->block_bytes + (12 << 20);
		open_with(&f, &c);
		for (unsigned i = 0; i < 10; i++)
			random_step(&f);
		atomic_store(&f.shared.target_bytes, PLENTY);
		for (unsigned i = 0; i < 10; i++)
			use_one(&f, 5, i % 8);
		check_state(&f);
		room = residency_kv_room(f.r);
		s = stats_of(&f);
		assert_true(room >= KV_MIN);
		assert_true(s.n_host > 8);
		assert_int_equal(residency_charge(f.r, room + 1), -ENOSPC);
		assert_int_equal(stats_of(&f).kv_bytes, 0);
		assert_int_equal(stats_of(&f).n_host, s.n_host);
		/* All that may be: what is left for blocks is what the floor has. */
		assert_int_equal(residency_charge(f.r, room), 0);
		check_state(&f);
		s = stats_of(&f);
		assert_int_equal(s.kv_bytes, room);
		assert_int_equal(limit_of(&s), 2 * N_USED * file.c->block_bytes_max);
		/* What is held already stays allowed when the budget falls. */
		atomic_store(&f.shared.target_bytes, 1);
		(void)residency_pump(f.r, false);
		assert_int_equal(residency_charge(f.r, room), 0);
		assert_int_equal(residency_charge(f.r, room - 1), 0);
		assert_int_equal(residency_charge(f.r, room), -ENOSPC);
		assert_int_equal(residency_charge(f.r, 0), 0);
		random_step(&f);
		done(&f);
	}
}

static void test_release(void **state)
{
	(void)state;
	for (size_t t = 0; t < ARRAY_SIZE(tiers); t++) {
		struct residency_stats s;
		struct fixture f;

		open_tier(&f, tiers[t]);
		for (unsigned i = 0; i < 5; i++)
			random_step(&f);
		residency_release(f.r);
		settle(&f);
		s = stats_of(&f);
		assert_int_equal(s.n_host, tiers[t] == RESIDENCY_UNMANAGED ? file.c->n_blocks : 0);
		if (tiers[t] != RESIDENCY_UNMANAGED)
			assert_int_equal(s.place_bytes, 0);
		/* The heat stayed, and brings them back. */
		atomic_store(&f.shared.target_bytes, PLENTY);
		(void)residency_pump(f.r, false);
		residency_warm(f.r, NULL);
		settle(&f);
		assert_true(stats_of(&f).n_host > 20);
		random_step(&f);
		done(&f);
	}
}

static void make_state_dir(char dir[static 300])
{
	snprintf(dir, 300, "%s/state", file.dir);
	assert_int_equal(mkdir(dir, 0700), 0);
}

static void remove_state_dir(const char *dir)
{
	_cleanup_(freep) char *path = heat_path(dir, file.c->identity);

	(void)unlink(path);
	assert_int_equal(rmdir(dir), 0);
}

/* What was hot comes back first, without anybody asking. */
static void test_warm_start(void **state)
{
	char dir[300];

	(void)state;
	make_state_dir(dir);
	for (size_t t = 1; t < ARRAY_SIZE(tiers); t++) {
		struct residency_config c = config_of(tiers[t]);
		struct residency_stats s;
		struct fixture f;
		uint64_t floor;

		make_cold();
		c.state_dir = dir;
		open_with(&f, &c);
		floor = stats_of(&f).floor_bytes;
		for (unsigned i = 0; i < 20; i++) {
			use_one(&f, 5, 3);
			use_one(&f, 5, 6);
			if (i == 0)
				use_one(&f, 5, 1);
		}
		done(&f);
		make_cold();
		/* Room for about four of them; the process may have grown. */
		c.budget_bytes = floor + (2 << 20);
		open_with(&f, &c);
		assert_true(residency_pump(f.r, false));
		settle(&f);
		s = stats_of(&f);
		assert_true(is_here(&f, 5, 3) && is_here(&f, 5, 6));
		if (tiers[t] == RESIDENCY_ARENA || file.has_page_cache)
			assert_int_equal(s.io.blocks_read, s.n_host);
		assert_int_equal(s.misses, 0);
		use_one(&f, 5, 6);
		assert_int_equal(stats_of(&f).hits, 1);
		done(&f);
	}
	remove_state_dir(dir);
}

/* A conversation's heat brings its experts in, behind what this layer asks for. */
static void test_warm_from_session(void **state)
{
	struct fixture f;

	(void)state;
	open_tier(&f, RESIDENCY_ARENA);
	f.heat[file.c->layers[4].first_block + 7] = 400;
	residency_warm(f.r, f.heat);
	settle(&f);
	assert_int_equal(stats_of(&f).n_host, 1);
	assert_true(is_here(&f, 4, 7));
	done(&f);
}

static void test_heat_cannot_be_saved(void **state)
{
	struct residency_config c = config_of(RESIDENCY_ARENA);
	struct fixture f;
	char dir[400];

	(void)state;
	snprintf(dir, sizeof(dir), "%s/there/is/none", file.dir);
	c.state_dir = dir;
	open_with(&f, &c);
	assert_int_equal(residency_save_heat(f.r), 0); /* nothing to save */
	use_one(&f, 0, 1);
	assert_int_equal(residency_save_heat(f.r), -ENOENT);
	assert_int_equal(stats_of(&f).heat_error, -ENOENT);
	use_one(&f, 0, 1);
	assert_int_equal(stats_of(&f).hits, 1);
	done(&f);
}

static void test_heat_is_saved_again(void **state)
{
	struct residency_config c = config_of(RESIDENCY_ARENA);
	_cleanup_(freep) char *path = NULL;
	_cleanup_(freep) uint16_t *heat = calloc(file.c->n_blocks, sizeof(*heat));
	struct fixture f;
	char dir[300];

	(void)state;
	snprintf(dir, sizeof(dir), "%s/state", file.dir);
	c.state_dir = dir;
	open_with(&f, &c);
	use_one(&f, 0, 1);
	assert_true(residency_save_heat(f.r) < 0);
	make_state_dir(dir);
	use_one(&f, 2, 8);
	assert_int_equal(residency_save_heat(f.r), 0);
	assert_int_equal(stats_of(&f).heat_error, 0);
	path = heat_path(dir, file.c->identity);
	assert_int_equal(heat_load(path, file.c->identity, file.c->n_blocks, heat), 0);
	for (uint32_t b = 0; b < file.c->n_blocks; b++)
		assert_true((heat[b] > 0) == (b == file.c->layers[0].first_block + 1 ||
					      b == file.c->layers[2].first_block + 8));
	done(&f);
	remove_state_dir(dir);
}

static uint64_t available_bytes(void)
{
	_cleanup_(memory_closep) struct memory *m = NULL;
	struct memory_state s;

	assert_int_equal(memory_open("", &m), 0);
	assert_int_equal(memory_read(m, &s), 0);
	return s.available;
}

/* As open_tier(), with other work that needs so much. */
static void open_beside(struct fixture *f, uint64_t fixed_bytes, const char *state_dir)
{
	struct residency_config c = config_of(RESIDENCY_UNMANAGED);
	_cleanup_(freep) char *reason = NULL, *error = NULL;

	c.state_dir = state_dir;
	*f = (struct fixture){ .model = { .catalog = file.c, .n_expert_used = N_USED, .path = file.path } };
	if (residency_new(&f->model, &c, fixed_bytes, KV_MIN, &f->shared, NULL, &f->r, &reason,
			  &error) < 0)
		fail_msg("%s", error);
	f->heat = calloc(file.c->n_blocks, sizeof(*f->heat));
	f->want_heat = calloc(file.c->n_blocks, sizeof(*f->want_heat));
	assert_true(f->heat && f->want_heat);
	assert_int_equal(stats_of(f).tier, RESIDENCY_UNMANAGED);
	assert_false(residency_managed(f->r));
	assert_false(atomic_load(&f->shared.managed));
}

/* A budget that held everything is not enough any more: the page cache that is there becomes the host tier. */
static void test_become_mapped(void **state)
{
	const uint32_t experts[] = { 2, 4 }, n_tok[] = { 1, 1 };
	_cleanup_(freep) char *path = NULL;
	struct residency_block wave[2];
	struct residency_stats s;
	struct fixture f;
	char dir[300];

	(void)state;
	make_cold();
	make_state_dir(dir);
	open_beside(&f, available_bytes() / 6, dir);
	use_one(&f, 5, 2);
	allow_blocks(&f, file.c->block_bytes + KV_MIN);
	use_one(&f, 5, 2);
	assert_false(residency_managed(f.r));
	/* Not in the middle of a layer, whose addresses are given out. */
	residency_step_begin(f.r, 1, f.heat);
	residency_layer_begin(f.r, 5, experts, n_tok, 2);
	allow_blocks(&f, 12 << 20);
	(void)residency_pump(f.r, false);
	assert_false(residency_managed(f.r));
	assert_int_equal(residency_layer_next(f.r, wave, 2, &(bool){ false }), 2);
	assert_int_equal(residency_layer_next(f.r, wave, 2, &(bool){ false }), 0);
	residency_step_end(f.r);
	f.wanted = 0;
	memset(f.want_heat, 0, file.c->n_blocks * sizeof(*f.want_heat));
	use_one(&f, 5, 2);
	s = stats_of(&f);
	assert_int_equal(s.tier, RESIDENCY_MAPPED);
	assert_true(atomic_load(&f.shared.managed));
	assert_true(s.budget_bytes < s.budget_at_load_bytes);
	for (unsigned i = 0; i < 10; i++) {
		check_state(&f);
		random_step(&f);
	}
	check_heat(&f);
	done(&f);
	/* From then on there is heat, and it is kept. */
	path = heat_path(dir, file.c->identity);
	assert_int_equal(access(path, F_OK), 0);
	remove_state_dir(dir);
}

/* A toy is left alone however short memory is. */
static void test_toy_is_not_managed(void **state)
{
	struct fixture f;

	(void)state;
	open_beside(&f, 0, NULL);
	atomic_store(&f.shared.target_bytes, 1);
	random_step(&f);
	assert_int_equal(stats_of(&f).tier, RESIDENCY_UNMANAGED);
	assert_false(atomic_load(&f.shared.managed));
	done(&f);
}

static void test_record(void **state)
{
	const uint32_t *counts, *experts;
	uint32_t n_layers;
	struct fixture f;

	(void)state;
	for (size_t t = 0; t < ARRAY_SIZE(tiers); t++) {
		open_tier(&f, tiers[t]);
		assert_false(residency_recorded(f.r, &n_layers, &counts, &experts));
		use_one(&f, 0, 1);
		assert_false(residency_recorded(f.r, &n_layers, &counts, &experts));
		residency_record(f.r, true);
		residency_step_begin(f.r, 1, NULL);
		for (uint32_t i = 0; i < N_LAYERS; i++)
			use(&f, expert_layers[i], (const uint32_t[]){ i, i + 1 - (i == 5) },
			    i == 5 ? 1 : 2);
		residency_step_end(f.r);
		assert_true(residency_recorded(f.r, &n_layers, &counts, &experts));
		assert_int_equal(n_layers, N_LAYERS);
		for (uint32_t i = 0; i < N_LAYERS; i++) {
			assert_int_equal(counts[i], i == 5 ? 1 : 2);
			assert_int_equal(experts[2 * i], i);
			if (i < 5)
				assert_int_equal(experts[2 * i + 1], i + 1);
		}
		/* A prompt is not recorded. */
		residency_step_begin(f.r, 64, NULL);
		use(&f, 0, (const uint32_t[]){ 3 }, 1);
		residency_step_end(f.r);
		assert_false(residency_recorded(f.r, &n_layers, &counts, &experts));
		done(&f);
	}
}

/* The rest of a layer is given up, what was on its way arrives for nobody, and the next step goes on. */
static void test_file_cut_short(void **state)
{
	struct stat st;

	(void)state;
	assert_int_equal(fstat(file.fd, &st), 0);
	for (size_t t = 1; t < ARRAY_SIZE(tiers); t++) {
		const uint32_t experts[] = { 0, 1, 2, 3, 4, 5 }, n_tok[] = { 1, 1, 1, 1, 1, 1 };
		struct residency_block wave[6];
		struct fixture f;
		ssize_t k;

		make_cold();
		open_tier(&f, tiers[t]);
		use_one(&f, 6, 0);
		/* In the middle of the last layer's gate: what lies behind is gone. */
		assert_int_equal(
			ftruncate(file.fd, (off_t)file.c->layers[6].matrix[0]->offset + 20000), 0);
		for (unsigned i = 0; i < 3; i++) {
			residency_step_begin(f.r, 1, NULL);
			residency_layer_begin(f.r, 6, experts, n_tok, 6);
			while ((k = residency_layer_next(f.r, wave, 6, &(bool){ false })) > 0)
				;
			assert_true(k == -ENODATA || k == -EIO);
			residency_step_end(f.r);
		}
		settle(&f);
		assert_true(stats_of(&f).io.read_errors > 0);
		/* The others are as they were. */
		use_one(&f, 0, 2);
		residency_release(f.r);
		assert_int_equal(stats_of(&f).n_host, 0);
		assert_int_equal(pwrite(file.fd, file.copy, file.bytes, 0), file.bytes);
		assert_int_equal(fsync(file.fd), 0);
		use_one(&f, 6, 5);
		done(&f);
	}
	file_reopen(&file);
}

/* A step that ends in the middle of a layer: the next one finds nothing pinned or kept. */
static void test_step_given_up(void **state)
{
	(void)state;
	for (size_t t = 0; t < ARRAY_SIZE(tiers); t++) {
		const uint32_t experts[] = { 1, 3, 5 }, n_tok[] = { 1, 2, 1 };
		struct residency_block wave[3];
		struct fixture f;

		open_tier(&f, tiers[t]);
		for (unsigned i = 0; i < 3; i++) {
			residency_step_begin(f.r, 4, NULL);
			residency_layer_begin(f.r, 5, experts, n_tok, 3);
			if (i > 0)
				assert_true(residency_layer_next(f.r, wave, 1, &(bool){ false }) == 1);
			if (i == 2)
				residency_step_end(f.r);
		}
		residency_step_begin(f.r, 1, NULL);
		use(&f, 5, experts, 3);
		residency_step_end(f.r);
		residency_release(f.r);
		if (tiers[t] != RESIDENCY_UNMANAGED)
			assert_int_equal(stats_of(&f).n_host, 0);
		/* And one that is given up for good. */
		residency_step_begin(f.r, 4, NULL);
		residency_layer_begin(f.r, 5, experts, n_tok, 3);
		done(&f);
	}
}

static void test_refusals(void **state)
{
	struct residency_config c = config_of(RESIDENCY_MAPPED);
	atomic_bool stop = true;
	_cleanup_(freep) char *reason = NULL, *error = NULL;
	unsigned long least = 0, has = 0;
	struct fixture f;
	const char *at;

	(void)state;
	c.budget_bytes = 1000000;
	assert_int_equal(try_open(&f, &c, &error), -ENOSPC);
	assert_null(f.r);
	at = strstr(error, "at least ");
	assert_true(at && sscanf(at, "at least %lu MB", &least) == 1);
	assert_true(least * 1000000 > file.c->trunk_bytes);
	at = strstr(error, "budget is ");
	assert_true(at && sscanf(at, "budget is %lu MB", &has) == 1);
	assert_int_equal(has, 1);
	/* The number is enough, but for what the process has grown by meanwhile. */
	c.budget_bytes = least * 1000000 + (1 << 20);
	open_with(&f, &c);
	random_step(&f);
	done(&f);
	c.budget_bytes = PLENTY;
	f = (struct fixture){ .model = { .catalog = file.c, .n_expert_used = N_USED, .path = file.path } };
	assert_int_equal(residency_new(&f.model, &c, 0, 0, &f.shared, &stop, &f.r, &reason, NULL),
			 -ECANCELED);
	assert_null(f.r);
	assert_null(residency_free(NULL));
}

/* One place in memory a byte: nothing of a block is in the page cache beside the arena. */
static void test_arena_leaves_no_copy(void **state)
{
	struct fixture f;

	(void)state;
	if (!file.has_page_cache)
		skip_because("no file system with a page cache of its own");
	open_tier(&f, RESIDENCY_ARENA);
	for (unsigned i = 0; i < 10; i++)
		random_step(&f);
	settle(&f);
	for (uint32_t b = 0; b < file.c->n_blocks; b++) {
		struct catalog_block block;

		catalog_block(file.c, b, &block);
		for (uint32_t i = 0; i < block.n_ranges; i++) {
			uint64_t from = ALIGN_UP(block.range[i].offset, (uint64_t)FILE_PAGE);
			uint64_t to = (block.range[i].offset + block.range[i].bytes) / FILE_PAGE *
				      FILE_PAGE;

			if (to > from)
				assert_int_equal(file_cached(&file, from, to - from), 0);
		}
	}
	done(&f);
}

/* The same bits. */

struct rig {
	struct model *m;
	struct backend *b;
	struct kv_arena *a;
	float *logits;
};

#define N_TOK 150

static const struct {
	const char *name;
	enum residency_tier tier;
	uint64_t block_bytes; /* 0: all */
	int prefetch;
} forms[] = {
	{ "unmanaged", RESIDENCY_UNMANAGED, 0, 0 },
	{ "mapped", RESIDENCY_MAPPED, 0, 0 },
	{ "arena", RESIDENCY_ARENA, 0, 0 },
	{ "a third, mapped", RESIDENCY_MAPPED, 2200000, 0 },
	{ "a third, arena", RESIDENCY_ARENA, 2200000, 0 },
	{ "a third, arena, reading ahead", RESIDENCY_ARENA, 2200000, 1 },
	{ "the least, mapped", RESIDENCY_MAPPED, 1, 1 },
	{ "the least, arena", RESIDENCY_ARENA, 1, 1 },
};

/* logits of N_TOK tokens, in batches of `rows`; r: NULL: none. */
static void eval(struct rig *rig, struct residency *r, size_t rows, float *logits)
{
	struct state *s;

	assert_int_equal(state_new(&s), 0);
	rig->b->ops->set_residency(rig->b, r);
	for (size_t at = 0; at < N_TOK; at += rows) {
		int32_t ids[64];
		struct graph_seq q = { .state = s,
				       .tokens = ids,
				       .n_tok = MIN(rows, (size_t)N_TOK - at),
				       .want = GRAPH_WANT_ALL };

		for (size_t i = 0; i < q.n_tok; i++)
			ids[i] = (int32_t)((at + i) * 37 % 2000);
		if (r)
			residency_step_begin(r, q.n_tok, NULL);
		assert_int_equal(graph_forward(rig->m, rig->b, rig->a, &q, 1, NULL,
					       logits + at * rig->m->n_vocab),
				 0);
		if (r)
			residency_step_end(r);
	}
	rig->b->ops->set_residency(rig->b, NULL);
	state_free(s, rig->a);
}

static void check_form(struct rig *rig, size_t form, size_t rows, const float *want, float *got)
{
	struct residency_config c = config_of(forms[form].tier);
	struct residency_shared shared = {};
	struct residency_stats s;
	struct residency *r;
	char *reason = NULL, *error = NULL;

	c.prefetch = forms[form].prefetch;
	if (residency_new(rig->m, &c, 0, 0, &shared, NULL, &r, &reason, &error) < 0)
		fail_msg("%s", error);
	free(reason);
	residency_get_stats(r, &s);
	assert_int_equal(s.tier, forms[form].tier);
	if (forms[form].block_bytes > 0)
		atomic_store(&shared.target_bytes,
			     s.trunk_bytes + s.fixed_bytes + forms[form].block_bytes);
	/* Twice: cold, and with what stayed. */
	for (unsigned i = 0; i < 2; i++) {
		memset(got, 0xff, N_TOK * rig->m->n_vocab * sizeof(float));
		eval(rig, r, rows, got);
		if (memcmp(got, want, N_TOK * rig->m->n_vocab * sizeof(float)) != 0)
			fail_msg("%s, batches of %zu: other logits", forms[form].name, rows);
	}
	residency_get_stats(r, &s);
	if (forms[form].block_bytes > 0)
		assert_true(s.misses > 100 && s.io.blocks_evicted > 100);
	residency_free(r);
}

/* Pages of a file that another process has mapped too do not go. */
static void copy_toy(char path[static 300])
{
	_cleanup_(closep) int from = open(TOY, O_RDONLY | O_CLOEXEC), to = -1;
	char chunk[65536];
	ssize_t n;

	snprintf(path, 300, "%s/toy.gguf", file.dir);
	to = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	assert_true(from >= 0 && to >= 0);
	while ((n = read(from, chunk, sizeof(chunk))) > 0)
		assert_int_equal(write(to, chunk, (size_t)n), n);
	assert_int_equal(n, 0);
	assert_int_equal(fsync(to), 0);
}

static void test_same_logits(void **state)
{
	static const size_t rows[] = { 1, 7, 64 };
	struct rig rig = {};
	float *want, *got;
	char path[300];

	(void)state;
	copy_toy(path);
	assert_int_equal(model_load(path, &rig.m, NULL), 0);
	assert_int_equal(kv_arena_new(&rig.m->kv, false, (size_t)1 << 24, &rig.a), 0);
	assert_int_equal(backend_cpu_new(2, graph_scratch_bytes(rig.m, 64), NULL, &rig.b), 0);
	want = malloc(N_TOK * rig.m->n_vocab * sizeof(float));
	got = malloc(N_TOK * rig.m->n_vocab * sizeof(float));
	assert_true(want && got);
	for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
		eval(&rig, NULL, rows[i], want);
		for (size_t form = 0; form < ARRAY_SIZE(forms); form++)
			check_form(&rig, form, rows[i], want, got);
	}
	free(want);
	free(got);
	rig.b->ops->free(rig.b);
	kv_arena_free(rig.a);
	model_unref(rig.m);
	assert_int_equal(unlink(path), 0);
}

static int setup(void **state)
{
	(void)state;
	file_open(&file, NULL);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	file_close(&file);
	return 0;
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_random_steps),
		cmocka_unit_test(test_reading_ahead),
		cmocka_unit_test(test_target_from_another_thread),
		cmocka_unit_test(test_bounds_of_the_target),
		cmocka_unit_test(test_less_room_flushes_nothing),
		cmocka_unit_test(test_charge),
		cmocka_unit_test(test_release),
		cmocka_unit_test(test_warm_start),
		cmocka_unit_test(test_warm_from_session),
		cmocka_unit_test(test_heat_cannot_be_saved),
		cmocka_unit_test(test_heat_is_saved_again),
		cmocka_unit_test(test_become_mapped),
		cmocka_unit_test(test_toy_is_not_managed),
		cmocka_unit_test(test_record),
		cmocka_unit_test(test_file_cut_short),
		cmocka_unit_test(test_step_given_up),
		cmocka_unit_test(test_refusals),
		cmocka_unit_test(test_arena_leaves_no_copy),
		cmocka_unit_test(test_same_logits),
	};

	return cmocka_run_group_tests_name("residency", tests, setup, teardown);
}
