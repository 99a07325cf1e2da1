/* SPDX-License-Identifier: MIT */
/*
 * ctl-simulate.c: `residentctl simulate`: what each eviction policy would have made of recorded
 * routing.
 *
 * Main thread; asks no service. Owns the replay; the policies are the daemon's own (evict.c). One
 * cache over the blocks of all layers, all of one size, empty at first; what is wanted and not
 * there comes in. Steps in order, in a step layer by layer, in a layer by expert. Refuses to know
 * time: it counts hits.
 * Invariant: the capacity is the fraction of all blocks, rounded, at least one.
 */
#include "client/ctl.h"
#include "daemon/config.h"
#include "daemon/residency/evict.h"
#include "daemon/residency/trace.h"

#include <math.h>

#define FRACTIONS_MAX 16
#define POLICIES      (EVICT_S3_FIFO + 1)
#define EXPERTS_MAX   65536
#define BLOCKS_MAX    (1 << 20) /* a hundred times what models have; the tables stay below 64 MiB */

struct simulation {
	const char *file;
	struct trace trace;
	uint32_t n_blocks;
	size_t skip, from; /* steps; wanted blocks */
	bool policy[POLICIES];
	size_t n_fractions;
	double fraction[FRACTIONS_MAX];
	uint32_t capacity[FRACTIONS_MAX];
	size_t hits[POLICIES + 1][FRACTIONS_MAX]; /* the last: Belady's bound */
};

static const char *row_name(unsigned row)
{
	return row < POLICIES ? evict_policy_to_string((enum evict_policy)row) : "belady";
}

static bool row_shown(const struct simulation *s, unsigned row)
{
	return row == POLICIES || s->policy[row];
}

static enum exit_code failed(struct ctl *c, const char *what)
{
	terminal_printf(&c->err, PROGRAM ": %s\n", what);
	return EXIT_ERROR;
}

/* ---- options ---- */

static bool parse_fractions(const char *text, struct simulation *s)
{
	const char *p = text;
	char *end;

	do {
		double x = strtod(p, &end);

		if (end == p || !(x > 0 && x <= 1) || s->n_fractions == FRACTIONS_MAX)
			return false;
		s->fraction[s->n_fractions++] = x;
		p = end + 1;
	} while (*end == ',');
	return *end == 0;
}

static bool parse_policy(const char *text, struct simulation *s)
{
	enum evict_policy p;

	if (streq(text, "all")) {
		for (unsigned i = 0; i < POLICIES; i++)
			s->policy[i] = true;
		return true;
	}
	if (evict_policy_from_string(text, &p) < 0)
		return false;
	s->policy[p] = true;
	return true;
}

static enum exit_code parse_options(const struct ctl *c, struct simulation *s,
				    uint32_t *ret_experts, const char **ret_error)
{
	uint64_t experts = 0, skip = 0;

	if (!c->trace_file)
		*ret_error = "simulate needs --trace FILE";
	else if (c->experts && parse_u64(c->experts, 1, EXPERTS_MAX, &experts) < 0)
		*ret_error = "--experts is not a number from 1 to 65536";
	else if (c->skip && parse_u64(c->skip, 0, INT64_MAX, &skip) < 0)
		*ret_error = "--skip is not a number of steps";
	else if (!parse_fractions(c->fractions ? c->fractions : "0.1,0.25,0.5,0.75", s))
		*ret_error = "--fraction is not a list of at most 16 numbers above 0 and up to 1";
	else if (!parse_policy(c->policy ? c->policy : "all", s))
		*ret_error = "--policy is none of lru, lfu, clock-lfu, s3-fifo, all";
	else
		*ret_error = NULL;
	s->file = c->trace_file;
	s->skip = skip;
	*ret_experts = (uint32_t)experts;
	return *ret_error ? EXIT_USAGE : EXIT_OK;
}

/* ---- replay ---- */

static enum exit_code read_trace(struct ctl *c, struct simulation *s, uint32_t n_experts)
{
	_cleanup_(fclosep) FILE *f = fopen(s->file, "re");
	_cleanup_(freep) char *error = NULL;

	if (!f) {
		terminal_printf(&c->err, PROGRAM ": %s: %s\n", s->file, strerror(errno));
		return EXIT_ERROR;
	}
	if (trace_read(f, s->file, n_experts, &s->trace, &error) < 0)
		return failed(c, error ? error : "out of memory");
	if (s->skip >= s->trace.n_steps) {
		terminal_printf(&c->err, PROGRAM ": --skip %zu: %s has %zu steps\n", s->skip,
				s->file, s->trace.n_steps);
		return EXIT_USAGE;
	}
	s->n_blocks = s->trace.n_layers * s->trace.n_experts;
	if (s->n_blocks > BLOCKS_MAX) {
		terminal_printf(&c->err,
				PROGRAM ": %s: %u layers of %u experts are more than %d blocks\n",
				s->file, s->trace.n_layers, s->trace.n_experts, BLOCKS_MAX);
		return EXIT_ERROR;
	}
	s->from = s->trace.first[s->skip];
	if (s->from == s->trace.n_wanted) {
		terminal_printf(&c->err, PROGRAM ": %s: no expert is wanted from step %zu on\n",
				s->file, s->skip);
		return EXIT_ERROR;
	}
	for (size_t i = 0; i < s->n_fractions; i++)
		s->capacity[i] = (uint32_t)MAX(lround(s->fraction[i] * s->n_blocks), 1L);
	return EXIT_OK;
}

static int replay(const struct simulation *s, enum evict_policy policy, uint32_t capacity,
		  size_t *ret_hits)
{
	_cleanup_(evict_freep) struct evict *e = NULL;
	size_t hits = 0;
	int r = evict_new(policy, s->n_blocks, NULL, &e);

	if (r < 0)
		return r;
	for (size_t step = 0; step < s->trace.n_steps; step++) {
		evict_step(e);
		for (size_t i = s->trace.first[step]; i < s->trace.first[step + 1]; i++) {
			uint32_t b = s->trace.wanted[i];

			evict_touch(e, b, 1);
			if (evict_is_resident(e, b)) {
				hits += i >= s->from;
				continue;
			}
			if (evict_n_resident(e) == capacity)
				evict_remove(e, evict_victim(e, EVICT_ANY_CLASS, NULL));
			evict_insert(e, b);
		}
	}
	*ret_hits = hits;
	return 0;
}

static int run(struct simulation *s)
{
	const struct trace *t = &s->trace;
	int r = 0;

	for (size_t f = 0; f < s->n_fractions && r >= 0; f++) {
		for (unsigned p = 0; p < POLICIES && r >= 0; p++)
			if (s->policy[p])
				r = replay(s, (enum evict_policy)p, s->capacity[f], &s->hits[p][f]);
		if (r >= 0)
			r = evict_belady(t->wanted, t->n_wanted, s->n_blocks, s->capacity[f],
					 s->from, &s->hits[POLICIES][f]);
	}
	return r;
}

/* ---- what came out ---- */

static double percent(const struct simulation *s, unsigned row, size_t f)
{
	return 100 * (double)s->hits[row][f] / (double)(s->trace.n_wanted - s->from);
}

static enum exit_code print_table(struct ctl *c, const struct simulation *s)
{
	const struct trace *t = &s->trace;

	terminal_printf(&c->out,
			"%s: %zu steps, %u layers of %u experts; hits in %% of %zu wanted from "
			"step %zu on\n\n%-10s",
			s->file, t->n_steps, t->n_layers, t->n_experts, t->n_wanted - s->from,
			s->skip, "resident");
	for (size_t f = 0; f < s->n_fractions; f++)
		terminal_printf(&c->out, "  %6.4g %%", 100 * s->fraction[f]);
	terminal_printf(&c->out, "\n%-10s", "blocks");
	for (size_t f = 0; f < s->n_fractions; f++)
		terminal_printf(&c->out, "  %8u", s->capacity[f]);
	terminal_printf(&c->out, "\n");
	for (unsigned row = 0; row <= POLICIES; row++) {
		if (!row_shown(s, row))
			continue;
		terminal_printf(&c->out, "%-10s", row_name(row));
		for (size_t f = 0; f < s->n_fractions; f++)
			terminal_printf(&c->out, "  %8.2f", percent(s, row, f));
		terminal_printf(&c->out, "\n");
	}
	return EXIT_OK;
}

static enum exit_code print_json(struct ctl *c, const struct simulation *s)
{
	const struct trace *t = &s->trace;
	json_auto_t *results = json_array();

	for (unsigned row = 0; row <= POLICIES; row++)
		for (size_t f = 0; f < s->n_fractions && row_shown(s, row); f++)
			json_array_append_new(results,
					      json_pack("{s:s, s:f, s:I, s:I, s:f}", "policy",
							row_name(row), "fraction", s->fraction[f],
							"blocks", (json_int_t)s->capacity[f],
							"hits", (json_int_t)s->hits[row][f],
							"hit_percent", percent(s, row, f)));
	return ctl_print_json(
		c, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:O}", "trace", s->file, "steps",
			     (json_int_t)t->n_steps, "layers", (json_int_t)t->n_layers, "experts",
			     (json_int_t)t->n_experts, "skip", (json_int_t)s->skip, "wanted",
			     (json_int_t)(t->n_wanted - s->from), "results", results));
}

enum exit_code ctl_simulate(struct ctl *c)
{
	struct simulation s = {};
	const char *error;
	uint32_t n_experts;
	enum exit_code e = parse_options(c, &s, &n_experts, &error);

	if (e != EXIT_OK)
		return ctl_usage_error(c, error);
	e = read_trace(c, &s, n_experts);
	if (e == EXIT_OK && run(&s) < 0)
		e = failed(c, "out of memory");
	if (e == EXIT_OK)
		e = c->json ? print_json(c, &s) : print_table(c, &s);
	trace_done(&s.trace);
	return e;
}
