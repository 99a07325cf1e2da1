/* SPDX-License-Identifier: MIT */
/*
 * residency.c: which blocks of the model are in memory, and the engine's way to them. See residency.h.
 *
 * Owns host tier, eviction state, heat and budget of one loaded model. Engine thread only, but for the numbers in struct residency_shared.
 * Decides; host.c does, evict.c ranks, prefetch.c judges guesses, choose.c picks the form. Refuses to know sessions beyond one array of
 * heat, and arithmetic. Invariants: keep[b] is set while b is wanted by the layer at hand or on its way, and such a block is never a
 * victim; evict.c's resident blocks are exactly those HERE; trunk + fixed + KV + blocks stay within the budget, and the budget
 * never goes below the floor.
 */
#include "daemon/residency/residency-private.h"

#include "daemon/residency/heat.h"

#include <assert.h>
#include <fcntl.h>
/* While reads are missing, a wave has at most so many blocks: the disk gets its next work after some 3 ms of arithmetic. */
#define WAVE_BLOCKS   16
/* Missing blocks of a layer that have a place, on their way or not computed yet: enough for the disk to be busy while a wave is computed;
 * more would only push out what stays. */
#define DEPTH_BLOCKS  32
/* For one block at most so many go: when places of another size cannot be closed up just now (the last ones are on their way or in use),
 * more would go for nothing. The block waits for the next wave. */
#define VICTIMS_MAX   8
/* Reads behind everything else (warming). */
#define WARM_BLOCKS   4
/* From here on a batch is a prompt's chunk: one use by a chunk says less than one by a token that was just written. */
#define PREFILL_ROWS  16
/* How often the page cache is asked about a block where asking is a system call. */
#define RECHECK_STEPS 64
/* Steps between looks at what the kernel took, and how much counts as a sign: to read 8 MiB again is some 1 % of so many steps. */
#define REFAULT_STEPS 64
#define REFAULT_BYTES (UINT64_C(8) << 20)
/* Blocks looked at for a second copy in the page cache, a step. */
#define SCAN_BLOCKS   32

bool residency_managed(const struct residency *r)
{
	return r->host;
}

/* Room in memory. */

uint64_t residency_block_limit(const struct residency *r)
{
	uint64_t other = r->catalog->trunk_bytes - r->trunk_away + r->fixed + r->kv;

	if (r->card)
		other += r->card->config.host_bytes;
	return r->budget > other ? r->budget - other : 0;
}

void residency_drop(struct residency *r, uint32_t block)
{
	host_evict(r->host, block);
	evict_remove(r->evict, block);
	r->transient[block] = 0;
	if (r->ahead[block]) {
		r->ahead[block] = 0;
		r->stats.prefetch_wasted++;
	}
}

/* The oldest block that is still not worth its place, of this class or of any; EVICT_NONE. */
static uint32_t take_transient(struct residency *r, uint32_t class)
{
	size_t n = r->n_transients;

	for (size_t i = 0; i < n; i++) {
		uint32_t block = r->transients[r->first_transient];

		r->first_transient = (r->first_transient + 1) % r->catalog->n_blocks;
		r->n_transients--;
		if (!r->transient[block] || !evict_is_resident(r->evict, block))
			continue;
		if (!r->keep[block] && (class == EVICT_ANY_CLASS || host_class(r->host, block) == class))
			return block;
		/* Back to the end. */
		r->transients[(r->first_transient + r->n_transients++) % r->catalog->n_blocks] = block;
	}
	return EVICT_NONE;
}

static void put_transient(struct residency *r, uint32_t block)
{
	if (r->transient[block] || r->n_transients == r->catalog->n_blocks)
		return;
	r->transient[block] = 1;
	r->transients[(r->first_transient + r->n_transients++) % r->catalog->n_blocks] = block;
}

/*
 * Which block gives its place to one of `class`. One of the same class is taken when the coldest of all is not much colder: otherwise
 * places of two sizes are exchanged, which costs a copy.
 */
static uint32_t pick_victim(struct residency *r, uint32_t class)
{
	uint32_t own = take_transient(r, class), any;

	if (own != EVICT_NONE || class == EVICT_ANY_CLASS)
		return own != EVICT_NONE ? own : evict_victim(r->evict, class, r->keep);
	own = evict_victim(r->evict, class, r->keep);
	if (host_n_classes(r->host) == 1)
		return own;
	any = take_transient(r, EVICT_ANY_CLASS);
	if (any == EVICT_NONE)
		any = evict_victim(r->evict, EVICT_ANY_CLASS, r->keep);
	if (own == EVICT_NONE || any == EVICT_NONE)
		return own == EVICT_NONE ? any : own;
	if (evict_heat(r->evict, own) / 2 > evict_heat(r->evict, any))
		return any;
	if (r->transient[any]) { /* its turn comes */
		r->transient[any] = 0;
		put_transient(r, any);
	}
	return own;
}

/* What counts against the limit. */
uint64_t residency_taken(const struct residency *r)
{
	return host_bytes(r->host) - host_leaving_bytes(r->host);
}

bool residency_make_room(struct residency *r, uint32_t block)
{
	uint64_t limit = residency_block_limit(r);
	uint8_t class = host_class(r->host, block);

	for (unsigned n = 0; !host_has_room(r->host, block, limit); n++) {
		uint32_t victim = n < VICTIMS_MAX ? pick_victim(r, class) : EVICT_NONE;

		if (victim == EVICT_NONE)
			return false;
		residency_drop(r, victim);
		if (host_has_room(r->host, block, limit))
			break;
		/* Above the limit a free place takes no more memory used than unused; else all would go for one block when none can be
		 * given back just now. */
		(void)host_trim(r->host);
		if (host_has_room(r->host, block, residency_taken(r)))
			break;
	}
	return true;
}

void residency_publish(struct residency *r)
{
	atomic_store(&r->shared->budget_bytes, r->budget);
	atomic_store(&r->shared->configured_bytes, r->configured);
	atomic_store(&r->shared->at_load_bytes, r->at_load);
	atomic_store(&r->shared->floor_bytes, r->floor);
	atomic_store(&r->shared->locked_bytes, r->trunk_locked);
	atomic_store(&r->shared->managed, r->host != NULL);
}

/* Down to the limit, coldest first, at least one; false: there is none. */
static bool shrink(struct residency *r, uint64_t limit)
{
	uint64_t bytes = residency_taken(r);
	bool dropped = false;

	while (bytes > limit) {
		uint32_t victim = pick_victim(r, EVICT_ANY_CLASS);
		uint64_t cost;

		if (victim == EVICT_NONE)
			break;
		cost = host_class_bytes(r->host, host_class(r->host, victim));
		residency_drop(r, victim);
		bytes -= MIN(bytes, cost);
		dropped = true;
	}
	(void)host_trim(r->host);
	return dropped;
}

/* What is pinned or wanted now stays; the next call gets it. */
void residency_enforce(struct residency *r)
{
	uint64_t limit = residency_block_limit(r);

	/* Memory goes back in larger pieces than blocks: again for the rest of a piece, but not while a block in use or on its way is what
	 * holds it. */
	while (residency_taken(r) > limit && shrink(r, limit) && r->n_wanted == 0 &&
	       host_n_coming(r->host) == 0)
		;
}

/* The loop's word. */
static void obey(struct residency *r)
{
	uint64_t target = atomic_load_explicit(&r->shared->target_bytes, memory_order_relaxed);
	uint64_t needed = r->catalog->trunk_bytes + r->catalog->block_bytes + r->fixed + r->kv;

	if (target == 0)
		return;
	target = MAX(MIN(target, r->configured), r->floor);
	if (!r->host && (r->small || r->catalog->n_blocks == 0 || target >= needed ||
			 residency_become_mapped(r) < 0))
		return;
	if (target == r->budget)
		return;
	r->budget = target;
	residency_publish(r);
	residency_enforce(r);
}

uint64_t residency_kv_room(const struct residency *r)
{
	uint64_t other = r->catalog->trunk_bytes + r->fixed +
			 2 * (uint64_t)r->model->n_expert_used * r->catalog->block_bytes_max;

	return r->budget > other ? r->budget - other : 0;
}

int residency_charge(struct residency *r, uint64_t kv_bytes)
{
	if (r->host && kv_bytes > r->kv && kv_bytes > residency_kv_room(r))
		return -ENOSPC;
	r->kv = kv_bytes;
	if (r->host)
		residency_enforce(r);
	return 0;
}

/* What came in. */

static bool is_lost(struct residency *r, uint32_t block)
{
	uint32_t step = (uint32_t)r->stats.steps, resident, all;

	if (r->tier != RESIDENCY_MAPPED || !r->feed)
		return false;
	if (feed_source(r->feed) != FEED_BPF && step - r->checked[block] < RECHECK_STEPS)
		return false;
	r->checked[block] = step;
	return feed_block_pages(r->feed, block, &resident, &all) == 0 && resident < all;
}

static void arrive(struct residency *r, uint32_t block, int err)
{
	uint32_t i = r->index_of[block];
	struct wanted *w = i > 0 ? &r->wanted[i - 1] : NULL;

	if (w && w->state == WANT_COMING) {
		r->n_coming--;
		w->state = WANT_READY;
		if (err < 0) {
			w->state = WANT_DONE;
			r->error = r->error < 0 ? r->error : err;
		}
	} else if (!w) {
		r->keep[block] = 0;
	}
	if (err < 0) {
		r->stats.prefetch_wasted += r->ahead[block];
		r->ahead[block] = 0;
		return;
	}
	r->checked[block] = (uint32_t)r->stats.steps;
	evict_insert(r->evict, block);
	if (w)
		host_pin(r->host, block);
	else if (r->card)
		residency_card_offer(r, block);
}

static void take_arrivals(struct residency *r)
{
	uint32_t block;
	int err;

	while (host_take(r->host, false, &block, &err) > 0)
		arrive(r, block, err);
}

static bool wait_arrival(struct residency *r)
{
	uint64_t begun = now_us();
	uint32_t block;
	int err, n = host_take(r->host, true, &block, &err);

	r->step_stall += now_us() - begun;
	if (n > 0)
		arrive(r, block, err);
	return n > 0;
}

int residency_request(struct residency *r, uint32_t block, bool urgent)
{
	int err = host_fetch(r->host, block, urgent);

	if (err == 0)
		r->keep[block] = 1;
	return err;
}

/* Reads for as many missing blocks as have places. force: at least one, whatever the budget says: else nothing would ever move. */
static void request_missing(struct residency *r, bool force)
{
	for (size_t i = 0; i < r->n_wanted && r->n_pending > 0 && r->n_held < DEPTH_BLOCKS; i++) {
		struct wanted *w = &r->wanted[i];

		if (w->state != WANT_PENDING)
			continue;
		if (!residency_make_room(r, w->block) && !(force && r->n_coming == 0))
			return;
		if (residency_request(r, w->block, true) < 0) {
			if (r->n_coming == 0)
				r->error = -ENOMEM;
			return;
		}
		w->state = WANT_COMING;
		r->n_pending--;
		r->n_coming++;
		r->n_held++;
	}
}

/* A layer. */

void residency_count_use(struct residency *r, uint32_t block, uint32_t n_tok)
{
	evict_touch(r->evict, block, n_tok);
	if (r->card)
		evict_touch(r->card->evict, block, n_tok);
	if (r->decode)
		admission_touch(r->admission, block);
	if (r->session_heat) {
		/* As evict.c weighs it, but for the ageing: that comes with the next turn. */
		uint32_t weight = 32 - (uint32_t)__builtin_clz(MAX(n_tok, 1u));
		uint32_t heat = r->session_heat[block] + weight * EVICT_HEAT_ONE;

		r->session_heat[block] = (uint16_t)MIN(heat, (uint32_t)UINT16_MAX);
	}
}

static void judge_guess(struct residency *r, const struct catalog_layer *l,
			const struct wanted *wanted, size_t n)
{
	uint32_t guessed = 0, right = 0;

	for (uint32_t i = 0; i < l->n_expert; i++)
		guessed += r->guessed[l->first_block + i];
	if (guessed == 0)
		return;
	for (size_t i = 0; i < n; i++)
		right += r->guessed[wanted[i].block];
	memset(r->guessed + l->first_block, 0, l->n_expert);
	prefetch_judge(&r->prefetch, guessed, right);
}

static void want(struct residency *r, struct wanted *w)
{
	uint32_t o = r->ordinal[r->layer];

	if (residency_card_has(r, w->block)) {
		w->state = WANT_READY;
		w->on_card = true;
		r->of_layer[o].vram_hits++;
		r->card->stats.hits++;
		return;
	}
	if (host_state(r->host, w->block) == HOST_HERE && is_lost(r, w->block)) {
		r->stats.kernel_took++;
		residency_drop(r, w->block);
	}
	switch (host_state(r->host, w->block)) {
	case HOST_HERE:
		host_pin(r->host, w->block);
		w->state = WANT_READY;
		r->transient[w->block] = 0;
		break;
	case HOST_COMING:
		host_hurry(r->host, w->block);
		w->state = WANT_COMING;
		w->missed = true;
		r->n_coming++;
		r->n_held++;
		break;
	case HOST_ABSENT:
		w->state = WANT_PENDING;
		w->missed = true;
		r->n_pending++;
		break;
	}
	r->of_layer[o].hits += !w->missed;
	r->of_layer[o].misses += w->missed;
	r->stats.hits += !w->missed;
	r->stats.misses += w->missed;
	if (r->ahead[w->block]) {
		r->ahead[w->block] = 0;
		r->stats.prefetch_used++;
	}
}

void residency_note_choice(struct residency *r, uint32_t layer, const uint32_t *experts, size_t n)
{
	if (!r->record || !r->decode)
		return;
	memcpy(r->record_experts + r->n_record, experts, n * sizeof(*experts));
	r->record_counts[r->ordinal[layer]] = (uint32_t)n;
	r->n_record += n;
	r->recorded = true;
}

void residency_layer_begin(struct residency *r, uint32_t layer, const uint32_t *experts,
			   const uint32_t *n_tok, size_t n)
{
	const struct catalog_layer *l = &r->catalog->layers[layer];

	assert(l->first_block != CATALOG_NONE && n <= l->n_expert && r->n_left == 0);
	r->layer = layer;
	r->n_wanted = r->n_left = n;
	r->n_pending = r->n_coming = r->n_held = 0;
	r->error = 0;
	residency_note_choice(r, layer, experts, n);
	for (size_t i = 0; i < n; i++)
		r->wanted[i] = (struct wanted){ .block = l->first_block + experts[i],
						.expert = experts[i],
						.n_tok = n_tok[i] };
	if (!r->host)
		return;
	if (r->card)
		residency_card_layer(r, r->n_rows);
	obey(r);
	take_arrivals(r);
	for (size_t i = 0; i < n; i++) {
		uint32_t block = r->wanted[i].block;

		/* All at once kept, before the first miss looks for a victim. */
		r->keep[block] = 1;
		r->index_of[block] = (uint32_t)i + 1;
		residency_count_use(r, block, n_tok[i]);
	}
	for (size_t i = 0; i < n; i++)
		want(r, &r->wanted[i]);
	judge_guess(r, l, r->wanted, n);
	request_missing(r, false);
}

/* Is a block that was just used worth more than what would have to go for the next one? If not it is the next one's place. A long prompt
 * uses nearly every block: it is always asked then, or it would leave nothing of what was hot. */
static void admit(struct residency *r, const struct wanted *w)
{
	const struct evict_price price = { .move_us = 0, .saved_us = 1 };
	uint32_t victim;

	if ((r->decode && !admission_is_selective(r->admission)) ||
	    host_has_room(r->host, w->block, residency_block_limit(r)))
		return;
	victim = evict_victim(r->evict, host_class(r->host, w->block), r->keep);
	if (victim == EVICT_NONE || victim == w->block || evict_pays(r->evict, w->block, victim, &price))
		return;
	put_transient(r, w->block);
	r->stats.bypassed++;
}

static void release_wave(struct residency *r)
{
	if (r->card)
		residency_card_wave_done(r);
	for (size_t i = 0; i < r->n_wanted; i++) {
		struct wanted *w = &r->wanted[i];

		if (w->state != WANT_GIVEN)
			continue;
		w->state = WANT_DONE;
		if (!w->on_card)
			host_unpin(r->host, w->block);
		/* What the card computes in one launch, which may be still to come, stays for the layer. */
		if (!w->on_card || !r->card->once)
			r->keep[w->block] = 0;
		r->index_of[w->block] = 0;
		if (w->missed) {
			r->n_held--;
			if (!w->on_card)
				admit(r, w);
		}
	}
}

/* The layer is over, well or not: what is still coming arrives for nobody. */
void residency_end_layer(struct residency *r)
{
	for (size_t i = 0; i < r->n_wanted; i++) {
		struct wanted *w = &r->wanted[i];

		if (!r->host)
			continue;
		r->index_of[w->block] = 0;
		if ((w->state == WANT_READY || w->state == WANT_GIVEN) && !w->on_card)
			host_unpin(r->host, w->block);
		if (w->state != WANT_COMING)
			r->keep[w->block] = 0;
	}
	r->n_wanted = r->n_left = r->n_pending = r->n_coming = r->n_held = 0;
}

static void fill(const struct residency *r, uint32_t expert, uint32_t block, struct residency_block *ret)
{
	const struct catalog_layer *l = &r->catalog->layers[r->layer];

	ret->expert = expert;
	for (unsigned i = 0; i < CATALOG_MATRICES; i++)
		ret->matrix[i] =
			!l->matrix[i] ? NULL
			: r->host     ? host_matrix(r->host, block, i)
				  : (const char *)l->matrix[i]->data + expert * l->expert_bytes[i];
}

/* What is in host memory by now goes over to the card, or is the CPU's. */
static void decide(struct residency *r)
{
	for (size_t i = 0; i < r->n_wanted; i++) {
		struct wanted *w = &r->wanted[i];
		enum card_way way;

		if (w->state != WANT_READY || w->on_card || w->decided)
			continue;
		way = residency_card_fetch(r, w);
		w->on_card = way == CARD_YES;
		w->decided = way == CARD_NO;
		if (w->on_card)
			host_unpin(r->host, w->block);
	}
	if (r->card->error < 0)
		r->error = r->card->error;
}

static bool is_ready(const struct residency *r, const struct wanted *w, bool on_card)
{
	if (!r->host)
		return w->state != WANT_GIVEN;
	return w->state == WANT_READY && w->on_card == on_card && (!r->card || on_card || w->decided);
}

static size_t give(struct residency *r, bool on_card, struct residency_block *ret, size_t max)
{
	size_t n = 0;

	if (!on_card && (r->n_pending > 0 || r->n_coming > 0 || (r->card && !r->card->once)))
		max = MIN(max, (size_t)WAVE_BLOCKS);
	for (size_t i = 0; i < r->n_wanted && n < max; i++) {
		struct wanted *w = &r->wanted[i];

		if (!is_ready(r, w, on_card))
			continue;
		w->state = WANT_GIVEN;
		if (on_card)
			ret[n++] = (struct residency_block){ .expert = w->expert };
		else
			fill(r, w->expert, w->block, &ret[n++]);
		if (!on_card && r->card)
			residency_card_given(r, w);
	}
	r->n_left -= n;
	return n;
}

/* The next wave of what is ready. The card's first, it works while the CPU does; in large batches by turns, so that the CPU does not wait
 * for room to copy. */
static size_t give_ready(struct residency *r, struct residency_block *ret, size_t max, bool *ret_on_card)
{
	struct residency_card *c = r->card;
	size_t n = 0;

	*ret_on_card = false;
	if (!c)
		return give(r, false, ret, max);
	decide(r);
	if (r->error < 0)
		return 0;
	for (unsigned i = 0; i < 2 && n == 0; i++) {
		bool card = (i == 0) != (c->cpus_turn && !c->once);

		n = give(r, card, ret, max);
		*ret_on_card = card && n > 0;
	}
	c->cpus_turn = *ret_on_card;
	return n;
}

ssize_t residency_layer_next(struct residency *r, struct residency_block *ret, size_t max,
			     bool *ret_on_card)
{
	size_t n;

	if (!r->host) {
		*ret_on_card = false;
		n = give(r, false, ret, max);
		if (n == 0)
			residency_end_layer(r);
		return (ssize_t)n;
	}
	release_wave(r);
	take_arrivals(r);
	request_missing(r, false);
	while (r->error == 0 && r->n_left > 0) {
		n = give_ready(r, ret, max, ret_on_card);
		if (n > 0)
			return (ssize_t)n;
		request_missing(r, true);
		if (r->error == 0 && !wait_arrival(r))
			r->error = -EIO; /* nothing is on its way although something is wanted */
		take_arrivals(r);
	}
	residency_end_layer(r);
	return r->error;
}

bool residency_wants_guess(const struct residency *r)
{
	return r->host && r->decode && prefetch_guess(&r->prefetch);
}

void residency_guess(struct residency *r, uint32_t layer, const uint32_t *experts, size_t n)
{
	const struct catalog_layer *l = &r->catalog->layers[layer];

	for (size_t i = 0; i < n; i++) {
		uint32_t block = l->first_block + experts[i];

		if (host_state(r->host, block) != HOST_ABSENT || residency_card_has(r, block))
			continue;
		r->guessed[block] = 1;
		if (!prefetch_read(&r->prefetch))
			continue;
		/* Nothing that is wanted now waits for a guess: only room that is free or cold. */
		if (residency_make_room(r, block) && residency_request(r, block, false) == 0)
			r->ahead[block] = 1;
	}
}

/* In the background. */

void residency_warm(struct residency *r, const uint16_t *heat)
{
	uint64_t limit = residency_block_limit(r);
	size_t max;

	if (!r->host)
		return;
	if (heat)
		evict_set_heat(r->evict, heat);
	if (heat && r->card)
		evict_set_heat(r->card->evict, heat);
	if (r->card)
		limit += r->card->limit;
	max = MIN((size_t)(limit / MAX(r->catalog->block_bytes / r->catalog->n_blocks, UINT64_C(1))),
		  (size_t)r->catalog->n_blocks);
	r->n_warm = evict_hottest_absent(r->evict, r->warm, max);
	for (size_t i = 0; i < r->n_warm / 2; i++) {
		uint32_t block = r->warm[i];

		r->warm[i] = r->warm[r->n_warm - 1 - i];
		r->warm[r->n_warm - 1 - i] = block;
	}
}

/* Only into free room, or for a block that is colder. */
static bool warm_one(struct residency *r)
{
	uint32_t block = r->warm[r->n_warm - 1], victim;

	r->n_warm--;
	if (host_state(r->host, block) != HOST_ABSENT || residency_card_has(r, block) ||
	    evict_heat(r->evict, block) == 0)
		return true;
	if (!host_has_room(r->host, block, residency_block_limit(r))) {
		victim = evict_victim(r->evict, host_class(r->host, block), r->keep);
		if (victim == EVICT_NONE || evict_heat(r->evict, victim) >= evict_heat(r->evict, block))
			return false;
		residency_drop(r, victim);
		if (!host_has_room(r->host, block, residency_block_limit(r)))
			return false;
	}
	return residency_request(r, block, false) == 0;
}

static void warm_some(struct residency *r)
{
	while (r->n_warm > 0 && host_n_coming(r->host) < WARM_BLOCKS)
		if (!warm_one(r))
			r->n_warm = 0; /* no room for the rest either */
}

/* Steps. */

void residency_step_begin(struct residency *r, size_t n_rows, uint16_t *session_heat)
{
	residency_end_layer(r); /* of a step that failed half-way */
	r->decode = n_rows < PREFILL_ROWS;
	r->one_row = n_rows == 1;
	r->n_rows = n_rows;
	r->session_heat = session_heat;
	r->recorded = false;
	r->n_record = 0;
	if (r->record)
		memset(r->record_counts, 0, r->n_layers * sizeof(*r->record_counts));
	r->step_begun = now_us();
	r->step_stall = 0;
	r->stats.steps++;
	if (n_rows == 1)
		r->stats.decode_tok++;
	obey(r);
	if (!r->host)
		return;
	evict_step(r->evict);
	if (r->card)
		residency_card_step(r);
	if (r->decode)
		admission_step(r->admission, host_n_here(r->host));
}

/* A copy of a block in the page cache, beside the one in the arena: somebody read the file, or something leaks. */
static void scan_for_copies(struct residency *r)
{
	uint32_t n = feed_source(r->feed) == FEED_BPF
			     ? MIN(r->catalog->n_blocks, (uint32_t)SCAN_BLOCKS)
			     : 1;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t block = r->scan, resident, all;
		struct catalog_block b;

		r->scan = (r->scan + 1) % r->catalog->n_blocks;
		if (host_state(r->host, block) != HOST_HERE ||
		    feed_block_pages(r->feed, block, &resident, &all) < 0 || resident == 0)
			continue;
		r->stats.doubled++;
		catalog_block(r->catalog, block, &b);
		for (uint32_t k = 0; k < b.n_ranges; k++)
			(void)posix_fadvise(gguf_part(r->catalog->gguf, b.range[k].part)->fd,
					    (off_t)b.range[k].offset, (off_t)b.range[k].bytes,
					    POSIX_FADV_DONTNEED);
	}
}

/*
 * Trunk pages that come back again and again, and blocks that the kernel takes from under us, say that the budget is larger than what it
 * leaves. A step down, of which the loop takes notice: it lets the budget grow again, slowly.
 */
static void watch_kernel(struct residency *r)
{
	uint64_t refaults = 0, taken = r->stats.kernel_took - r->taken_seen, bytes;
	struct feed_block c;

	if (r->stats.steps % REFAULT_STEPS > 0)
		return;
	if (feed_trunk_counters(r->feed, &c) == 0) {
		refaults = c.refaults - MIN(c.refaults, r->refaults_seen);
		r->refaults_seen = r->stats.trunk_refaults = c.refaults;
	}
	r->taken_seen = r->stats.kernel_took;
	bytes = refaults * (uint64_t)sysconf(_SC_PAGESIZE) + taken * r->catalog->block_bytes_max;
	if (bytes < REFAULT_BYTES || r->budget <= r->floor)
		return;
	r->budget = MAX(r->floor, r->budget - MIN(r->budget, 2 * bytes));
	atomic_store(&r->shared->target_bytes, r->budget);
	r->budget_note = taken > 0 ? "the kernel took experts that were to stay"
				   : "the kernel took pages of the trunk, and they were read again";
	residency_publish(r);
	residency_enforce(r);
}

void residency_step_end(struct residency *r)
{
	uint64_t us = now_us() - r->step_begun;

	if (r->one_row)
		r->stats.stall_us += r->step_stall;
	r->session_heat = NULL;
	if (!r->host)
		return;
	if (r->decode)
		(void)prefetch_step(&r->prefetch, us, r->step_stall);
	memset(r->guessed, 0, r->catalog->n_blocks);
	take_arrivals(r);
	if (r->card)
		(void)residency_card_settle(r, false, false);
	warm_some(r);
	if (r->feed) {
		if (r->tier == RESIDENCY_ARENA)
			scan_for_copies(r);
		watch_kernel(r);
	}
}

bool residency_pump(struct residency *r, bool wait)
{
	bool more = false;
	uint32_t block;
	int err;

	obey(r);
	if (!r->host)
		return false;
	take_arrivals(r);
	if (r->card)
		more = residency_card_settle(r, true, wait && host_n_coming(r->host) == 0);
	warm_some(r);
	if (wait && host_take(r->host, true, &block, &err) > 0)
		arrive(r, block, err);
	return more || r->n_warm > 0 || host_n_coming(r->host) > 0;
}

void residency_settle(struct residency *r)
{
	obey(r);
	if (r->host)
		host_settle(r->host);
}

void residency_release(struct residency *r)
{
	uint32_t block;

	if (!r->host)
		return;
	r->n_warm = 0;
	while (residency_pump(r, true))
		;
	if (r->card)
		residency_card_release(r);
	while ((block = evict_victim(r->evict, EVICT_ANY_CLASS, r->keep)) != EVICT_NONE)
		residency_drop(r, block);
	(void)host_trim(r->host);
}

int residency_save_heat(struct residency *r)
{
	_cleanup_(freep) uint16_t *heat = NULL;

	if (!r->heat_file || r->stats.steps == r->heat_saved_steps || !r->evict)
		return 0;
	heat = malloc(r->catalog->n_blocks * sizeof(*heat));
	if (!heat)
		return -ENOMEM;
	evict_get_heat(r->evict, heat);
	r->heat_error = heat_save(r->heat_file, r->catalog->identity, r->catalog->n_blocks, heat);
	r->heat_saved_steps = r->stats.steps;
	return r->heat_error;
}

void residency_set_feed(struct residency *r, const struct feed *f)
{
	struct feed_block c;

	r->feed = f;
	r->refaults_seen = f && feed_trunk_counters(f, &c) == 0 ? c.refaults : 0;
}
