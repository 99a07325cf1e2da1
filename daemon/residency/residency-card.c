/* SPDX-License-Identifier: MIT */
/*
 * residency-card.c: which blocks are worth a slot of the card, and which way those go that are not there. See residency.h.
 *
 * Owns the ranking of the blocks in slots and what is on its way there. Engine thread only. vram.c does, evict.c ranks, split.c weighs copying
 * against computing on the CPU. Refuses to know the file. A block that stays on the card leaves the host's memory once its copy is confirmed;
 * one that was copied for one use leaves the card instead, and stays where it was. Invariants: evict holds exactly the blocks with stays[]
 * that are in slots; a block that is wanted by the layer at hand (keep[]) gives its slot to nobody.
 */
#include "daemon/residency/residency-private.h"

#include <assert.h>

/* Slots of a class that stay free for blocks that come for one use: with them the next are copied while the last are computed. */
#define RING_SLOTS    8U
/* Of all slots, not more than one in so many. */
#define RING_SHARE    8U
/* Blocks promoted in one step: their copies take turns with what the step itself needs. */
#define PROMOTE_MAX   4U
/* While there is room nothing has to be given up for it. */
#define PROMOTE_FREE  16U
/* Without measured prices: a copy at some 10 GB/s, and the CPU's memory at some 20. */
#define GUESS_COPY_US 1e-4
#define GUESS_CPU_US  5e-5
/* Looks (a second each) after giving slots back until some are taken again. */
#define CALM_LOOKS    5U

bool residency_card_has(const struct residency *r, uint32_t block)
{
	return r->card && vram_state(r->card->vram, block) == VRAM_HERE;
}

/* The first that fails ends the use of the card. */
static int check(struct residency *r, int err)
{
	if (err < 0 && r->card->error == 0)
		r->card->error = err == -ENOMEM ? -ENOMEM : -ENODEV;
	return err;
}

/* ---- leaving ---- */

/* The place in host memory that a block from the card may have; false: it is not worth one. */
static bool host_place(struct residency *r, uint32_t block)
{
	uint64_t limit = residency_block_limit(r);
	uint32_t victim;

	if (host_has_room(r->host, block, limit))
		return true;
	victim = evict_victim(r->evict, host_class(r->host, block), r->keep);
	if (victim == EVICT_NONE || evict_heat(r->evict, victim) >= evict_heat(r->evict, block))
		return false;
	residency_drop(r, victim);
	return host_has_room(r->host, block, limit);
}

/* Into host memory, where it can be had cheaper than by reading it again. */
static void copy_back(struct residency *r, uint32_t block)
{
	struct residency_card *c = r->card;
	void *matrix[CATALOG_MATRICES];

	if (host_state(r->host, block) != HOST_ABSENT || evict_heat(r->evict, block) == 0 ||
	    !host_place(r, block))
		return;
	if (!host_can_adopt(r->host)) { /* the page cache: from the file, behind everything else */
		(void)residency_request(r, block, false);
		return;
	}
	if (host_adopt(r->host, block, matrix) < 0)
		return;
	if (check(r, vram_download(c->vram, block, matrix)) < 0) {
		host_evict(r->host, block);
		return;
	}
	evict_insert(r->evict, block);
	c->stats.copied_back++;
}

static void forget(struct residency_card *c, uint32_t block)
{
	if (evict_is_resident(c->evict, block))
		evict_remove(c->evict, block);
	c->stays[block] = 0;
}

static int demote(struct residency *r, uint32_t block, bool keep_copy)
{
	struct residency_card *c = r->card;
	int err;

	if (keep_copy)
		copy_back(r, block);
	err = c->error < 0 ? c->error : check(r, vram_evict(c->vram, block));
	if (err < 0)
		return err;
	forget(c, block);
	c->stats.demoted++;
	return 0;
}

static void drop_staged(struct residency *r)
{
	struct residency_card *c = r->card;

	for (size_t i = 0; i < c->n_staged && c->error == 0; i++)
		(void)check(r, vram_evict(c->vram, c->staged[i]));
	c->n_staged = 0;
}

/* ---- coming ---- */

static bool has_slot(const struct residency_card *c, uint32_t block, bool to_stay)
{
	uint8_t class = vram_class(c->vram, block);
	uint32_t room = vram_n_room(c->vram, class), all = vram_n_used(c->vram, class) + room;
	uint32_t ring = MIN(RING_SLOTS, all / RING_SHARE);

	/* Where every block of the class has a slot none needs to be kept free. */
	if (to_stay && all < vram_n_blocks(c->vram, class))
		return room > ring;
	return room > 0;
}

static int fetch(struct residency *r, uint32_t block, bool to_stay)
{
	struct residency_card *c = r->card;
	const void *matrix[CATALOG_MATRICES];
	int err;

	for (unsigned i = 0; i < CATALOG_MATRICES; i++)
		matrix[i] = host_matrix(r->host, block, i);
	err = vram_fetch(c->vram, block, matrix);
	if (err == -ENOMEM) { /* others were faster: what there is is the limit, until it was calm for a while */
		c->limit = vram_bytes(c->vram);
		c->calm = 0;
	}
	if (err == -ENOSPC || err == -ENOMEM)
		return -ENOSPC;
	if (check(r, err) < 0)
		return err;
	c->stays[block] = to_stay;
	if (!to_stay)
		return 0;
	evict_insert(c->evict, block);
	c->stats.promoted++;
	return 0;
}

static struct evict_price price_of(const struct residency *r, uint32_t block)
{
	const struct split_prices *p = &r->card->prices;
	double bytes = (double)catalog_block_bytes(r->catalog, block);
	double copy = p->copy_us_per_byte > 0 ? p->copy_us_per_byte : GUESS_COPY_US;
	double cpu = p->cpu_us_per_byte > 0 ? p->cpu_us_per_byte : GUESS_CPU_US;

	/* There and, for the one that leaves, back. */
	return (struct evict_price){ .move_us = 2 * bytes * copy,
				     .saved_us = bytes * MAX(cpu - p->gpu_us_per_byte, 0.0) };
}

/* Is it worth the place of the coldest? Then that place is free. */
static bool pays(struct residency *r, uint32_t block)
{
	struct residency_card *c = r->card;
	struct evict_price price = price_of(r, block);
	uint32_t victim = evict_victim(c->evict, vram_class(c->vram, block), r->keep);

	return victim != EVICT_NONE && vram_confirmed(c->vram, victim) &&
	       evict_pays(c->evict, block, victim, &price) && demote(r, victim, true) == 0 &&
	       has_slot(c, block, true);
}

enum card_way residency_card_fetch(struct residency *r, const struct wanted *w)
{
	struct residency_card *c = r->card;
	bool stay;

	if (c->error < 0 || c->closed || vram_state(c->vram, w->block) != VRAM_ABSENT)
		return CARD_NO;
	/* Where there is room it is better there in any case. */
	stay = has_slot(c, w->block, true);
	if (!stay && !has_slot(c, w->block, false))
		return !c->once && c->n_staged > 0 ? CARD_LATER : CARD_NO;
	if (!stay && split_next(&c->split, &c->prices, catalog_block_bytes(r->catalog, w->block),
				w->n_tok) == SPLIT_CPU)
		return CARD_NO;
	if (!stay)
		stay = pays(r, w->block);
	if (c->error < 0 || fetch(r, w->block, stay) < 0 || check(r, vram_expect(c->vram, w->block)) < 0)
		return CARD_NO;
	if (!stay) {
		c->staged[c->n_staged++] = w->block;
		c->stats.staged++;
	}
	return CARD_YES;
}

/* Copies that have ended (wait: all): what they cost, and whose host copies may go. */
static void take_arrivals(struct residency *r, bool wait)
{
	struct residency_card *c = r->card;
	struct vram_counters now;
	uint32_t block;
	int n = 0;

	while (c->error == 0 && (n = vram_take(c->vram, wait, &block)) > 0)
		if (c->stays[block] && c->n_confirmed < r->catalog->n_blocks)
			c->confirmed[c->n_confirmed++] = block;
	(void)check(r, MIN(n, 0));
	vram_get_counters(c->vram, &now);
	if (now.bytes_copied > c->bytes_seen)
		split_measure_copy(&c->prices, now.bytes_copied - c->bytes_seen,
				   now.copy_us - c->us_seen);
	c->bytes_seen = now.bytes_copied;
	c->us_seen = now.copy_us;
}

static void drop_host_copies(struct residency *r)
{
	struct residency_card *c = r->card;
	size_t n = 0;

	for (size_t i = 0; i < c->n_confirmed; i++) {
		uint32_t block = c->confirmed[i];

		if (!c->stays[block] || !residency_card_has(r, block))
			continue; /* it has left again */
		if (r->keep[block] || host_state(r->host, block) == HOST_COMING)
			c->confirmed[n++] = block;
		else if (host_state(r->host, block) == HOST_HERE)
			residency_drop(r, block);
	}
	c->n_confirmed = n;
}

void residency_card_offer(struct residency *r, uint32_t block)
{
	struct residency_card *c = r->card;

	if (c->queued[block] || vram_state(c->vram, block) != VRAM_ABSENT)
		return;
	c->queued[block] = 1;
	c->candidates[c->n_candidates++] = block;
}

static uint32_t take_hottest(struct residency *r)
{
	struct residency_card *c = r->card;
	size_t best = 0;
	uint32_t block;

	for (size_t i = 1; i < c->n_candidates; i++)
		if (evict_heat(c->evict, c->candidates[i]) > evict_heat(c->evict, c->candidates[best]))
			best = i;
	block = c->candidates[best];
	c->candidates[best] = c->candidates[--c->n_candidates];
	c->queued[block] = 0;
	return block;
}

static void promote(struct residency *r)
{
	struct residency_card *c = r->card;
	uint32_t refused = 0; /* classes of which the hottest was not worth a place: no other is */

	for (unsigned n = 0; c->n_candidates > 0 && c->error == 0;) {
		uint32_t block = take_hottest(r);
		bool room;

		if (host_state(r->host, block) != HOST_HERE || vram_state(c->vram, block) != VRAM_ABSENT)
			continue;
		room = has_slot(c, block, true);
		if (n >= (room ? PROMOTE_FREE : PROMOTE_MAX)) {
			residency_card_offer(r, block);
			break;
		}
		if (!room && (refused >> vram_class(c->vram, block) & 1 || !pays(r, block))) {
			refused |= UINT32_C(1) << vram_class(c->vram, block);
			continue;
		}
		n += fetch(r, block, true) == 0;
	}
}

bool residency_card_settle(struct residency *r, bool background, bool wait)
{
	struct residency_card *c = r->card;

	drop_staged(r);
	take_arrivals(r, wait);
	drop_host_copies(r);
	promote(r);
	/* What was used this time only is offered again when it is used again. */
	if (!background || c->error < 0)
		while (c->n_candidates > 0)
			c->queued[c->candidates[--c->n_candidates]] = 0;
	return c->n_candidates > 0 || (c->error == 0 && vram_n_coming(c->vram) > 0);
}

/* ---- layers ---- */

void residency_card_step(struct residency *r)
{
	evict_step(r->card->evict);
}

void residency_card_layer(struct residency *r, size_t n_rows)
{
	struct residency_card *c = r->card;

	drop_staged(r);
	split_begin(&c->split);
	c->once = n_rows <= RESIDENCY_ONCE_ROWS;
	c->closed = c->cpus_turn = false;
	c->wave_blocks = 0;
}

void residency_card_given(struct residency *r, const struct wanted *w)
{
	struct residency_card *c = r->card;

	if (c->wave_blocks == 0) {
		c->wave_begun = now_us();
		c->wave_bytes = c->wave_rows = 0;
	}
	c->wave_blocks++;
	c->wave_bytes += catalog_block_bytes(r->catalog, w->block);
	c->wave_rows += w->n_tok;
	c->closed = c->once;
	c->stats.on_cpu++;
	residency_card_offer(r, w->block);
}

void residency_card_wave_done(struct residency *r)
{
	struct residency_card *c = r->card;

	/* Those that were copied since are in no wave yet. */
	if (!c->once && c->cpus_turn)
		drop_staged(r);
	if (c->wave_blocks == 0)
		return;
	split_measure_cpu(&c->prices, c->wave_bytes, (double)c->wave_rows / (double)c->wave_blocks,
			  now_us() - c->wave_begun);
	c->wave_blocks = 0;
}

/* ---- how much of the card ---- */

static int set_limit(struct residency *r, uint64_t limit)
{
	struct residency_card *c = r->card;
	uint32_t n = r->catalog->n_blocks;
	int err;

	err = check(r, vram_set_limit(c->vram, limit, c->gone));
	for (uint32_t block = 0; block < n; block++)
		if (c->gone[block / 8] & 1U << block % 8) {
			forget(c, block);
			c->stats.demoted++;
		}
	c->limit = limit;
	return err;
}

/* Coldest first, until what is left finds place in fewer chunks. */
static int shrink(struct residency *r, uint64_t limit)
{
	struct residency_card *c = r->card;
	uint64_t over = vram_bytes(c->vram) - MIN(vram_bytes(c->vram), limit), freed = 0;

	drop_staged(r);
	take_arrivals(r, true);
	for (uint8_t class = 0; class < vram_n_classes(c->vram); class ++)
		freed += (vram_n_slots(c->vram, class) - vram_n_used(c->vram, class)) *
			 vram_class_bytes(c->vram, class);
	while (c->error == 0 && freed < over) {
		uint32_t victim = evict_victim(c->evict, EVICT_ANY_CLASS, r->keep);

		if (victim == EVICT_NONE)
			break;
		/* Somebody waits: it is read again when it is wanted. */
		freed += vram_class_bytes(c->vram, vram_class(c->vram, victim));
		(void)demote(r, victim, false);
	}
	return c->error < 0 ? c->error : set_limit(r, limit);
}

static uint64_t wanted_slots(const struct residency *r)
{
	const struct residency_card *c = r->card;
	uint64_t slots = vram_bytes(c->vram), leave, want;

	if (!add_ok(c->config.reserve_bytes, c->yielded, &leave))
		return 0;
	want = c->free_bytes < leave ? slots - MIN(slots, leave - c->free_bytes)
				     : slots + (c->free_bytes - leave);
	return MIN(want, c->config.slots_bytes);
}

/* There is more room: for what is in host memory, and what is hot and nowhere. */
static void refill(struct residency *r)
{
	for (uint32_t i = 0; i < r->catalog->n_blocks; i++)
		if (host_state(r->host, i) == HOST_HERE && evict_heat(r->evict, i) > 0)
			residency_card_offer(r, i);
	residency_warm(r, NULL);
}

int residency_look_at_card(struct residency *r, uint64_t free_bytes)
{
	struct residency_card *c = r->card;
	uint64_t want;
	int err;

	c->free_bytes = free_bytes;
	c->yielded = atomic_load(&r->shared->yield_bytes);
	want = wanted_slots(r);
	if (want < vram_bytes(c->vram)) {
		c->calm = 0;
		return shrink(r, want);
	}
	if (want < c->limit)
		return set_limit(r, want);
	/* Then a chunk a look. */
	if (++c->calm < CALM_LOOKS || want < c->limit + vram_chunk_bytes(c->vram))
		return c->error;
	err = set_limit(r, c->limit + vram_chunk_bytes(c->vram));
	if (err == 0)
		refill(r);
	return err;
}

void residency_card_release(struct residency *r)
{
	/* Nobody else asked for it: what is used again comes back at once. */
	if (shrink(r, 0) == 0)
		(void)set_limit(r, wanted_slots(r));
}

bool residency_on_card(const struct residency *r)
{
	const struct residency_card *c = r->card;

	return c && c->error == 0 && vram_n_coming(c->vram) == 0 &&
	       vram_n_here(c->vram) == r->catalog->n_blocks && c->n_staged == 0;
}

void residency_note_layer(struct residency *r, uint32_t layer, const uint32_t *experts,
			  const uint32_t *n_tok, size_t n)
{
	const struct catalog_layer *l = &r->catalog->layers[layer];

	residency_note_choice(r, layer, experts, n);
	for (size_t i = 0; i < n; i++)
		residency_count_use(r, l->first_block + experts[i], n_tok[i]);
	r->of_layer[r->ordinal[layer]].vram_hits += n;
	r->card->stats.hits += n;
}

void residency_note_graph(struct residency *r)
{
	r->card->stats.graph_steps++;
}

void residency_card_get_stats(const struct residency *r, struct residency_vram *ret)
{
	const struct residency_card *c = r->card;
	struct vram_counters counters;

	vram_get_counters(c->vram, &counters);
	*ret = c->stats;
	ret->present = true;
	ret->fixed_bytes = c->config.fixed_bytes;
	ret->budget_bytes = c->config.fixed_bytes + c->limit;
	ret->trunk_bytes = c->config.trunk_bytes;
	ret->slot_bytes = vram_bytes(c->vram);
	ret->reserve_bytes = c->config.reserve_bytes;
	ret->free_bytes = c->free_bytes;
	ret->n_blocks = vram_n_here(c->vram);
	ret->bytes_copied = counters.bytes_copied;
	ret->copy_us = counters.copy_us;
	ret->chunks_given_back = counters.chunks_given_back;
	for (uint32_t i = 0; i < r->catalog->n_blocks; i++) {
		if (vram_state(c->vram, i) != VRAM_HERE)
			continue;
		ret->block_bytes += catalog_block_bytes(r->catalog, i);
		if (c->stays[i] && vram_confirmed(c->vram, i) && host_state(r->host, i) == HOST_HERE)
			ret->overlap_bytes += catalog_block_bytes(r->catalog, i);
	}
}

/* ---- beginning and end ---- */

struct residency_card *residency_card_free(struct residency_card *c)
{
	if (!c)
		return NULL;
	evict_free(c->evict);
	free(c->stays);
	free(c->queued);
	free(c->gone);
	free(c->staged);
	free(c->confirmed);
	free(c->candidates);
	free(c);
	return NULL;
}

static int card_new(const struct residency *r, struct vram *v,
		    const struct residency_card_config *config, struct residency_card **ret)
{
	uint32_t n = r->catalog->n_blocks;
	struct residency_card *c = calloc(1, sizeof(*c));
	_cleanup_(freep) uint8_t *class_of = malloc(n);
	int err = -ENOMEM;

	if (!c || !class_of) {
		free(c);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < n; i++)
		class_of[i] = vram_class(v, i);
	c->vram = v;
	c->config = *config;
	c->stays = calloc(n, 1);
	c->queued = calloc(n, 1);
	c->gone = calloc(n / 8 + 1, 1);
	c->staged = calloc(n, sizeof(*c->staged));
	c->confirmed = calloc(n, sizeof(*c->confirmed));
	c->candidates = calloc(n, sizeof(*c->candidates));
	if (c->stays && c->queued && c->gone && c->staged && c->confirmed && c->candidates)
		err = evict_new(r->config.policy, n, class_of, &c->evict);
	if (err < 0) {
		residency_card_free(c);
		return err;
	}
	*ret = c;
	return 0;
}

/* The heat of both rankings is one thing. */
static int copy_heat(const struct residency *r, struct evict *from, struct evict *to)
{
	_cleanup_(freep) uint16_t *heat = malloc(r->catalog->n_blocks * sizeof(*heat));

	if (!heat)
		return -ENOMEM;
	evict_get_heat(from, heat);
	evict_set_heat(to, heat);
	return 0;
}

static int give_card_up(struct residency *r)
{
	uint64_t locked = 0;
	int err = 0;

	if (!r->card)
		return 0;
	residency_end_layer(r);
	r->card = residency_card_free(r->card);
	if (r->trunk_away > 0)
		err = host_load_trunk(r->catalog, true, NULL, &locked);
	r->trunk_away = 0;
	r->trunk_locked = locked;
	residency_enforce(r);
	residency_publish(r);
	residency_warm(r, NULL);
	return err;
}

int residency_set_card(struct residency *r, struct vram *v, const struct residency_card_config *config)
{
	struct residency_card *c;
	int err;

	if (!v)
		return give_card_up(r);
	assert(!r->card);
	/* A block is in one place: somebody has to see to that. */
	if (!r->host && (err = residency_become_mapped(r)) < 0)
		return err;
	err = card_new(r, v, config, &c);
	if (err < 0)
		return err;
	err = copy_heat(r, r->evict, c->evict);
	if (err == 0)
		err = vram_set_limit(v, config->slots_bytes, NULL);
	if (err < 0) {
		residency_card_free(c);
		return err;
	}
	c->limit = config->slots_bytes;
	r->card = c;
	host_drop_trunk(r->catalog, r->model->embd);
	r->trunk_locked = 0;
	r->trunk_away =
		MIN(config->trunk_bytes,
		    r->catalog->trunk_bytes - MIN(r->catalog->trunk_bytes, r->model->embd->bytes));
	for (uint32_t i = 0; i < r->catalog->n_blocks; i++)
		if (host_state(r->host, i) == HOST_HERE)
			residency_card_offer(r, i);
	residency_publish(r);
	residency_warm(r, NULL);
	return 0;
}
