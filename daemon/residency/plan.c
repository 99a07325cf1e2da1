/* SPDX-License-Identifier: MIT */
/*
 * plan.c: where bytes would lie, how often they would be found there, and what that takes. See plan.h.
 *
 * Pure, any thread. Three steps: tiers are sized from the shape; routing is replayed through the engine's own rankings, one for VRAM, one
 * for RAM; every layer of every counted token is priced by how many of its blocks were where. Refuses to know how routing and prices came
 * about. Invariant: in the replay a block is resident in at most one of the two rankings, and what is resident in each stays within
 * its bytes.
 */
#include "daemon/residency/plan.h"

#include <assert.h>
#include <inttypes.h>

/* Products of quantised weights on a card of the class that has 8 GB, and on a processor of 8 cores: a tenth to a fifth of the best that
 * they can. Not measured. */
#define GPU_FLOPS  5e12
#define CPU_FLOPS  4e11
#define BLOCKS_MAX ((size_t)1 << 22) /* hundreds of times what models have */

double plan_default_flops(bool gpu)
{
	return gpu ? GPU_FLOPS : CPU_FLOPS;
}

/* ---- tiers ---- */

/* More than any machine has, and a few of them can be added up. */
#define ENDLESS ((uint64_t)1 << 60)

static uint64_t less(uint64_t a, uint64_t b)
{
	return a > b ? a - b : 0;
}

static uint64_t times(uint64_t a, uint64_t b)
{
	uint64_t product;

	return __builtin_mul_overflow(a, b, &product) ? ENDLESS : MIN(product, ENDLESS);
}

/* What lies beside keys and values, wherever that is. */
static uint64_t work_bytes(const struct plan_shape *s)
{
	return s->trunk_bytes + s->scratch_bytes + 2 * s->recurrent_bytes;
}

/* The fewest blocks that work in RAM: a layer's compute while the next layer's come in. */
static uint64_t least_blocks(const struct plan_shape *s)
{
	return MIN(times(2 * (uint64_t)s->n_used, s->block_bytes_max), s->block_bytes);
}

/* Keys and values may take `bytes` altogether. */
static uint64_t context_of(const struct plan_shape *s, uint64_t bytes)
{
	uint64_t n = s->kv_token_bytes > 0 ? bytes / s->kv_token_bytes : UINT64_MAX;

	return s->context_trained > 0 ? MIN(n, (uint64_t)s->context_trained) : n;
}

static int size_tiers(const struct plan_shape *s, const struct plan_machine *m, struct plan *p,
		      char **ret_error)
{
	uint64_t kv = times(s->kv_token_bytes, m->context), work = work_bytes(s);
	uint64_t slots = MIN(times(s->n_used, s->block_bytes_max), s->block_bytes);
	uint64_t vram = less(m->vram_bytes, PLAN_VRAM_RESERVE + PLAN_VRAM_DRIVER), fixed;

	/* The experts of one layer, at least, or the card is of no use. */
	p->gpu = vram >= slots;
	vram = p->gpu ? vram : 0;
	fixed = s->table_bytes + (p->gpu ? PLAN_STAGING : 0);
	p->conversation_bytes = kv + 2 * s->recurrent_bytes;
	p->trunk_in_vram = p->gpu && vram >= work + kv + slots;
	if (p->trunk_in_vram) {
		p->context_max = context_of(s, vram - work - slots);
		vram -= work + kv;
	} else {
		p->context_max = context_of(s, less(m->ram_bytes, fixed + work + least_blocks(s)));
		fixed += work + kv;
	}
	p->ram_fixed_bytes = fixed;
	p->floor_bytes = fixed + least_blocks(s);
	if (m->ram_bytes < p->floor_bytes)
		return fail(ret_error, -ENOSPC,
			    "cannot run: it needs at least %" PRIu64 " MB of RAM (%s %" PRIu64
			    ", the experts of a layer twice), and is to have %" PRIu64 " MB",
			    p->floor_bytes / 1000000 + 1,
			    p->trunk_in_vram ? "embeddings and staging" : "trunk, work and a conversation",
			    fixed / 1000000, m->ram_bytes / 1000000);
	p->vram_block_bytes = MIN(vram, s->block_bytes);
	p->ram_block_bytes = MIN(m->ram_bytes - fixed, s->block_bytes - p->vram_block_bytes);
	p->disk_block_bytes = s->block_bytes - p->vram_block_bytes - p->ram_block_bytes;
	return 0;
}

/* ---- prices ---- */

/* What every token takes, whatever it wants. The state is read and written. */
static void price_trunk(const struct plan_shape *s, const struct plan_machine *m, struct plan *p)
{
	double bps = (p->trunk_in_vram ? m->vram_bps : m->mem_bps) * PLAN_EFFICIENCY;
	double bytes = (double)s->trunk_token_bytes + 2 * (double)s->recurrent_bytes;

	p->trunk_us = bytes * 1e6 / bps;
	p->layers_us = s->n_all_layers * (p->trunk_in_vram ? PLAN_GPU_LAYER_US : PLAN_CPU_LAYER_US);
	p->context_us = (double)s->kv_token_bytes * m->context * 1e6 / bps;
}

/* A worker has n_here pieces, and n_coming more arrive one after the other, the first late_us later than it would: the time until all
 * are done. The worst of the moments from which on it never waits again; they lie on a line, so that its ends are enough. */
static double pipeline_us(uint32_t n_here, uint32_t n_coming, double work_us, double arrival_us,
			  double late_us)
{
	double all = (n_here + n_coming) * work_us;

	if (n_coming == 0)
		return all;
	return MAX(all, late_us + MAX(arrival_us + n_coming * work_us, n_coming * arrival_us + work_us));
}

double plan_layer_us(const struct plan_machine *m, const struct plan *p, uint64_t block_bytes,
		     uint32_t n_vram, uint32_t n_ram, uint32_t n_disk, double bus_us,
		     uint32_t *ret_copied)
{
	double us = (double)block_bytes * 1e6, best = 0;
	double cpu = us / (m->mem_bps * PLAN_EFFICIENCY), gpu = us / (m->vram_bps * PLAN_EFFICIENCY);
	double copy = us / m->pcie_bps, read = us / m->disk_bps;
	uint32_t copied = 0;

	for (uint32_t k = 0; k <= (p->gpu ? n_ram : 0); k++) {
		/* Some of it is computed elsewhere than the trunk. */
		bool split = p->trunk_in_vram ? n_ram - k + n_disk > 0 : n_vram + k > 0;
		double t = MAX(pipeline_us(n_ram - k, n_disk, cpu, read, 0),
			       pipeline_us(n_vram, k, gpu, copy, bus_us)) +
			   (split ? PLAN_GPU_SPLIT_US : 0);

		if (k == 0 || t < best) {
			best = t;
			copied = k;
		}
	}
	*ret_copied = copied;
	return best;
}

/* ---- replay ---- */

struct replay {
	const struct plan_shape *s;
	const struct plan_machine *m;
	const struct trace *t;
	struct plan *p;
	struct evict *vram, *ram;
	uint64_t vram_bytes, ram_bytes; /* taken */
	uint8_t *keep;                  /* blocks of the layer at hand */
	uint32_t *order;                /* of all blocks: how the tiers are filled */
	double trunk_us;                /* of a layer */
	double bus_us;                  /* until the bus has done what it was given */
	bool counted;
	/* sums over counted steps */
	uint64_t n_vram, n_ram, n_disk;
	double moved, copied, read, us, no_bus_us, no_disk_us;
};

static uint64_t bytes_of(const struct replay *r, uint32_t block)
{
	return r->s->layers[block / r->s->n_expert_max].block_bytes;
}

static void leave(struct replay *r, struct evict *tier, uint32_t block)
{
	evict_remove(tier, block);
	*(tier == r->vram ? &r->vram_bytes : &r->ram_bytes) -= bytes_of(r, block);
}

static void enter(struct replay *r, struct evict *tier, uint32_t block)
{
	evict_insert(tier, block);
	*(tier == r->vram ? &r->vram_bytes : &r->ram_bytes) += bytes_of(r, block);
}

/* Colder blocks give way: they are on the disk as well. False: there is no room for it at all. */
static bool enter_ram(struct replay *r, uint32_t block)
{
	while (r->ram_bytes + bytes_of(r, block) > r->p->ram_block_bytes) {
		uint32_t victim = evict_victim(r->ram, EVICT_ANY_CLASS, r->keep);

		if (victim == EVICT_NONE)
			return false;
		leave(r, r->ram, victim);
	}
	enter(r, r->ram, block);
	return true;
}

static struct evict_price price_of(const struct replay *r, uint32_t block)
{
	double us = (double)bytes_of(r, block) * 1e6, move = us / r->m->pcie_bps;
	double vram = us / (r->m->vram_bps * PLAN_EFFICIENCY);
	double ram = MIN(us / (r->m->mem_bps * PLAN_EFFICIENCY), move + vram);

	return (struct evict_price){ .move_us = move, .saved_us = ram - vram };
}

/* A block that was just used out of RAM moves into VRAM if that pays, and what gives way to it comes back into RAM: the bus takes both
 * directions at once. No more is moved while the bus is behind. */
static bool promote(struct replay *r, uint32_t block)
{
	const struct evict_price price = price_of(r, block);
	uint64_t bytes = bytes_of(r, block), max = r->p->vram_block_bytes;
	uint32_t victim = EVICT_NONE;

	if (bytes > max || r->bus_us > PLAN_BUS_BEHIND_US)
		return false;
	if (r->vram_bytes + bytes > max) {
		victim = evict_victim(r->vram, EVICT_ANY_CLASS, r->keep);
		if (victim == EVICT_NONE)
			return false;
	}
	if (!evict_pays(r->vram, block, victim, &price))
		return false;
	leave(r, r->ram, block);
	/* A larger one may take the places of two. */
	while (r->vram_bytes + bytes > max && victim != EVICT_NONE) {
		leave(r, r->vram, victim);
		(void)enter_ram(r, victim);
		victim = evict_victim(r->vram, EVICT_ANY_CLASS, r->keep);
	}
	if (r->vram_bytes + bytes > max) {
		(void)enter_ram(r, block);
		return false;
	}
	enter(r, r->vram, block);
	return true;
}

/* What is missing comes into RAM; what was used out of RAM goes to VRAM if that pays. `copied` of those in RAM went there for this use, and
 * need not go again. */
static void move_blocks(struct replay *r, const uint32_t *blocks, size_t n, uint32_t copied)
{
	double bytes = (double)bytes_of(r, blocks[0]), copy_us = bytes * 1e6 / r->m->pcie_bps;
	uint32_t n_ram = 0;

	r->bus_us += copied * copy_us;
	for (size_t i = 0; i < n; i++) {
		bool missing = !evict_is_resident(r->ram, blocks[i]), again;

		if (evict_is_resident(r->vram, blocks[i]) || (missing && !enter_ram(r, blocks[i])))
			continue;
		again = missing || n_ram++ >= copied;
		if (!promote(r, blocks[i]))
			continue;
		r->bus_us += again ? copy_us : 0;
		r->moved += r->counted ? bytes : 0;
	}
}

/* The wanted blocks of one layer: times and counts, before anything moves. */
static void replay_layer(struct replay *r, uint32_t layer, const uint32_t *blocks, size_t n)
{
	uint32_t n_vram = 0, n_ram = 0, n_disk, copied, none;
	uint64_t bytes = r->s->layers[layer].block_bytes;
	double us, no_bus, no_disk;

	r->bus_us = MAX(r->bus_us - r->trunk_us, 0.0);
	for (size_t i = 0; i < n; i++) {
		r->keep[blocks[i]] = 1;
		evict_touch(r->vram, blocks[i], 1);
		evict_touch(r->ram, blocks[i], 1);
		n_vram += evict_is_resident(r->vram, blocks[i]);
		n_ram += evict_is_resident(r->ram, blocks[i]);
	}
	n_disk = (uint32_t)n - n_vram - n_ram;
	us = plan_layer_us(r->m, r->p, bytes, n_vram, n_ram, n_disk, r->bus_us, &copied);
	no_bus = plan_layer_us(r->m, r->p, bytes, n_vram, n_ram, n_disk, 0, &none);
	no_disk = plan_layer_us(r->m, r->p, bytes, n_vram, n_ram + n_disk, 0, 0, &none);
	if (n > 0)
		move_blocks(r, blocks, n, copied);
	r->bus_us = MAX(r->bus_us - us, 0.0);
	for (size_t i = 0; i < n; i++)
		r->keep[blocks[i]] = 0;
	if (!r->counted)
		return;
	r->n_vram += n_vram;
	r->n_ram += n_ram;
	r->n_disk += n_disk;
	r->us += us;
	r->no_bus_us += no_bus;
	r->no_disk_us += no_disk;
	r->copied += (double)copied * (double)bytes;
	r->read += (double)n_disk * (double)bytes;
}

/* Layers of the model in order; those of the routing in turn, from its first again and again. */
static void replay_step(struct replay *r, size_t step, uint32_t *blocks, bool touch_only)
{
	const struct trace *t = r->t;
	size_t at = 0;

	evict_step(r->vram);
	evict_step(r->ram);
	for (uint32_t l = 0; l < r->s->n_layers; l++) {
		uint32_t layer = l % t->n_layers;
		size_t n = 0;

		if (layer == 0)
			at = t->first[step];
		for (; at < t->first[step + 1] && t->wanted[at] / t->n_experts == layer; at++)
			blocks[n++] = l * r->s->n_expert_max + t->wanted[at] % t->n_experts;
		if (!touch_only)
			replay_layer(r, l, blocks, n);
		for (size_t i = 0; touch_only && i < n; i++) {
			evict_touch(r->vram, blocks[i], 1);
			evict_touch(r->ram, blocks[i], 1);
		}
	}
}

/* The hottest first; then the others, from all layers alike, as many as have room. */
static void fill_tiers(struct replay *r)
{
	const struct plan_shape *s = r->s;
	size_t n = evict_hottest_absent(r->ram, r->order, (size_t)s->n_layers * s->n_expert_max);

	for (uint32_t e = 0; e < s->n_expert_max; e++)
		for (uint32_t l = 0; l < s->n_layers; l++)
			if (e < s->layers[l].n_expert && evict_heat(r->ram, l * s->n_expert_max + e) == 0)
				r->order[n++] = l * s->n_expert_max + e;
	for (size_t i = 0; i < n; i++) {
		uint64_t bytes = bytes_of(r, r->order[i]);

		if (r->vram_bytes + bytes <= r->p->vram_block_bytes)
			enter(r, r->vram, r->order[i]);
		else if (r->ram_bytes + bytes <= r->p->ram_block_bytes)
			enter(r, r->ram, r->order[i]);
	}
}

static void take_sums(const struct replay *r, struct plan *p)
{
	double wanted = (double)(r->n_vram + r->n_ram + r->n_disk), n = (double)p->n_steps;

	p->vram_hits = (double)r->n_vram / wanted;
	p->ram_hits = (double)r->n_ram / wanted;
	p->misses = (double)r->n_disk / wanted;
	p->moved_token_bytes = r->moved / n;
	p->copied_token_bytes = r->copied / n;
	p->disk_token_bytes = r->read / n;
	p->experts_us = r->no_disk_us / n;
	p->disk_wait_us = (r->no_bus_us - r->no_disk_us) / n;
	p->bus_wait_us = (r->us - r->no_bus_us) / n;
	p->token_us = p->trunk_us + p->layers_us + r->us / n;
}

/* The last third. */
static size_t first_counted(const struct trace *t)
{
	return t->n_steps - MAX(t->n_steps / 3, (size_t)1);
}

/* A third of the routing says what is hot, as the heat file does when the service starts; a third settles; a third is counted. */
static int replay(struct replay *r)
{
	uint32_t n_blocks = r->s->n_layers * r->s->n_expert_max;
	_cleanup_(freep) uint32_t *blocks = calloc(r->t->n_experts, sizeof(*blocks));
	size_t n = r->t->n_steps;

	r->keep = calloc(n_blocks, 1);
	r->order = calloc(n_blocks, sizeof(*r->order));
	if (!blocks || !r->keep || !r->order ||
	    evict_new(PLAN_VRAM_POLICY, n_blocks, NULL, &r->vram) < 0 ||
	    evict_new(PLAN_HOST_POLICY, n_blocks, NULL, &r->ram) < 0)
		return -ENOMEM;
	for (size_t step = 0; step < n / 3; step++)
		replay_step(r, step, blocks, true);
	fill_tiers(r);
	for (size_t step = n / 3; step < n; step++) {
		r->counted = step >= first_counted(r->t);
		replay_step(r, step, blocks, false);
	}
	r->p->n_steps = n - first_counted(r->t);
	return 0;
}

static void replay_done(struct replay *r)
{
	r->vram = evict_free(r->vram);
	r->ram = evict_free(r->ram);
	free(r->keep);
	free(r->order);
}

static int check_trace(const struct plan_shape *s, const struct trace *t, char **ret_error)
{
	if (t->first[t->n_steps] == t->first[first_counted(t)])
		return fail(ret_error, -EINVAL, "the last third of the routing wants no experts");
	for (size_t i = 0; i < t->n_wanted; i++) {
		uint32_t layer = t->wanted[i] / t->n_experts, expert = t->wanted[i] % t->n_experts;

		for (uint32_t l = layer; l < s->n_layers; l += t->n_layers)
			if (expert >= s->layers[l].n_expert)
				return fail(ret_error, -EINVAL,
					    "the routing wants expert %" PRIu32 " of layer %" PRIu32
					    ", which has %" PRIu32 ": it is of another model",
					    expert, l, s->layers[l].n_expert);
	}
	return 0;
}

/* ---- prompts ---- */

/* Arithmetic, bus or memory, and disk go on beside each other, layer by layer, and the slowest sets the pace. */
static double prefill_us(const struct plan_shape *s, const struct plan_machine *m,
			 const struct plan *p, uint64_t vram_blocks, uint64_t disk_blocks)
{
	double flops = m->flops > 0 ? m->flops : plan_default_flops(p->trunk_in_vram);
	double products = s->token_flops * PLAN_CHUNK_TOK / flops;
	double read = (double)disk_blocks / m->disk_bps;
	double others = (double)(s->block_bytes - vram_blocks), way;

	if (p->trunk_in_vram)
		way = others / m->pcie_bps;
	else
		way = (others + (double)s->trunk_bytes) / (m->mem_bps * PLAN_EFFICIENCY);
	return MAX(products, MAX(read, way)) * 1e6;
}

int plan_predict(const struct plan_shape *s, const struct plan_machine *m, const struct trace *t,
		 struct plan *ret, char **ret_error)
{
	struct plan p = {};
	_cleanup_(replay_done) struct replay r = { .s = s, .m = m, .t = t, .p = &p };
	size_t n_blocks = (size_t)s->n_layers * s->n_expert_max;
	int err;

	assert(m->vram_bps > 0 && m->pcie_bps > 0 && m->mem_bps > 0 && m->disk_bps > 0);
	if (n_blocks > BLOCKS_MAX)
		return fail(ret_error, -EINVAL, "%zu blocks are more than %zu", n_blocks, BLOCKS_MAX);
	err = size_tiers(s, m, &p, ret_error);
	if (err == 0)
		err = check_trace(s, t, ret_error);
	if (err < 0)
		return err;
	price_trunk(s, m, &p);
	r.trunk_us = (p.trunk_us + p.layers_us) / s->n_all_layers;
	if (replay(&r) < 0)
		return fail(ret_error, -ENOMEM, "no memory to follow %zu blocks", n_blocks);
	take_sums(&r, &p);
	p.cold_prefill_us = prefill_us(s, m, &p, 0, s->block_bytes);
	p.warm_prefill_us = prefill_us(s, m, &p, p.vram_block_bytes, p.disk_block_bytes);
	*ret = p;
	return 0;
}
