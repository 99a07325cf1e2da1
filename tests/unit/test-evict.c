/* SPDX-License-Identifier: MIT */
/*
 * test-evict.c: every policy by hand, all of them against models that are slow and obvious, heat and its extremes, and recorded
 * routing. Random numbers are seeded, so that a failure comes again.
 */
#include "tests/test.h"

#include "daemon/residency/evict.h"
#include "daemon/residency/trace.h"

#include <math.h>

static const enum evict_policy policies[] = { EVICT_LRU, EVICT_LFU, EVICT_CLOCK_LFU, EVICT_S3_FIFO };

static uint32_t seed;

/* The upper half of a 32-bit congruential generator's state. */
static uint32_t random_below(uint32_t n)
{
	seed = seed * 1664525 + 1013904223;
	return (seed >> 16) % n;
}

static struct evict *new_evict(enum evict_policy policy, uint32_t n_blocks, const uint8_t *class_of)
{
	struct evict *e = NULL;

	assert_int_equal(evict_new(policy, n_blocks, class_of, &e), 0);
	return e;
}

/* Touches each block of the string ('a' is 0), one a step, and brings it in when there is room. */
static void use(struct evict *e, const char *blocks, uint32_t capacity)
{
	for (; *blocks; blocks++) {
		uint32_t b = (uint32_t)(*blocks - 'a');

		evict_step(e);
		evict_touch(e, b, 1);
		if (evict_is_resident(e, b))
			continue;
		if (evict_n_resident(e) == capacity)
			evict_remove(e, evict_victim(e, EVICT_ANY_CLASS, NULL));
		evict_insert(e, b);
	}
}

/* The victims in the order in which they go, as a string. */
static const char *victims(struct evict *e, const uint8_t *keep)
{
	static char text[32];
	size_t n = 0;
	uint32_t b;

	while ((b = evict_victim(e, EVICT_ANY_CLASS, keep)) != EVICT_NONE) {
		assert_true(n + 1 < sizeof(text));
		text[n++] = (char)('a' + b);
		evict_remove(e, b);
	}
	text[n] = 0;
	return text;
}

static void test_names(void **state)
{
	enum evict_policy p;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
		assert_int_equal(evict_policy_from_string(evict_policy_to_string(policies[i]), &p), 0);
		assert_int_equal(p, policies[i]);
	}
	assert_string_equal(evict_policy_to_string(EVICT_CLOCK_LFU), "clock-lfu");
	assert_int_equal(evict_policy_from_string("LRU", &p), -EINVAL);
	assert_int_equal(evict_policy_from_string("", &p), -EINVAL);
}

static void test_no_blocks(void **state)
{
	struct evict *e = NULL;

	(void)state;
	assert_int_equal(evict_new(EVICT_LRU, 0, NULL, &e), -EINVAL);
	assert_null(e);
	assert_null(evict_free(NULL));
}

static void test_lru(void **state)
{
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_LRU, 8, NULL);

	(void)state;
	use(e, "abcdab", 4);
	assert_string_equal(victims(e, NULL), "cdab");
	assert_int_equal(evict_n_resident(e), 0);
}

static void test_lfu(void **state)
{
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_LFU, 8, NULL);

	(void)state;
	/* a: 4 uses, b: 2, c: 3, then d three times, so that the others are not recent any more. */
	use(e, "aaaabbcccddd", 4);
	/* b and a are no longer recent; c was used three steps ago, d just now. */
	assert_string_equal(victims(e, NULL), "bcad");
}

static void test_lfu_spares_what_is_new(void **state)
{
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_LFU, 8, NULL);

	(void)state;
	use(e, "aaaabbbbccccd", 4);
	/* d has one use, the others four each; but it came in just now, and c was used the step before. */
	assert_string_equal(victims(e, NULL), "abdc");
	use(e, "aaaabbbbccccd", 4);
	for (int i = 0; i < 3; i++)
		evict_step(e);
	assert_int_equal(evict_victim(e, EVICT_ANY_CLASS, NULL), 'd' - 'a');
}

static void test_clock(void **state)
{
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_CLOCK_LFU, 8, NULL);

	(void)state;
	/* a has one use after the first, b and c none, d two. */
	use(e, "abcdadd", 4);
	assert_int_equal(evict_victim(e, EVICT_ANY_CLASS, NULL), 'b' - 'a');
	/* The hand rests: a has given its use already, and is last in the next round. */
	assert_int_equal(evict_victim(e, EVICT_ANY_CLASS, NULL), 'b' - 'a');
	assert_string_equal(victims(e, NULL), "bcad");
}

static void test_s3(void **state)
{
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_S3_FIFO, 16, NULL);

	(void)state;
	/* Ten on trial; a was used again and goes over, b is given up and becomes a ghost. */
	use(e, "abcdefghija", 10);
	use(e, "k", 10);
	assert_false(evict_is_resident(e, 'b' - 'a'));
	assert_true(evict_is_resident(e, 'a' - 'a'));
	/* The ghost comes back, straight into the main queue, and c goes for it; a and b are the last. */
	use(e, "b", 10);
	assert_string_equal(victims(e, NULL), "defghijkab");
}

/* ---- properties of all policies ---- */

enum { N = 40, N_CLASSES = 3 };

/* What is known of a cache from the outside. */
struct model {
	uint8_t class_of[N], keep[N];
	bool resident[N];
	uint64_t last[N]; /* use or insertion */
	uint32_t step[N];
	uint64_t now;
	uint32_t steps;
};

static bool may_go(const struct model *m, uint32_t b, uint32_t class)
{
	return m->resident[b] && !m->keep[b] && (class == EVICT_ANY_CLASS || class == m->class_of[b]);
}

static void check_victim(const struct model *m, const struct evict *e, enum evict_policy policy,
			 uint32_t class, uint32_t victim)
{
	bool any = false;

	for (uint32_t b = 0; b < N; b++)
		any |= may_go(m, b, class);
	assert_int_equal(victim != EVICT_NONE, any);
	if (!any)
		return;
	assert_true(victim < N);
	assert_true(may_go(m, victim, class));
	for (uint32_t b = 0; b < N; b++) {
		bool recent = m->steps - m->step[b] <= 2,
		     victim_recent = m->steps - m->step[victim] <= 2;

		if (!may_go(m, b, class))
			continue;
		if (policy == EVICT_LRU)
			assert_true(m->last[victim] <= m->last[b]);
		if (policy == EVICT_LFU && recent == victim_recent)
			assert_true(evict_heat(e, victim) <= evict_heat(e, b));
		if (policy == EVICT_LFU)
			assert_true(victim_recent <= recent);
	}
}

static void random_call(struct model *m, struct evict *e[2], enum evict_policy policy)
{
	uint32_t b = random_below(N), class = random_below(N_CLASSES + 2), v[2];

	switch (random_below(8)) {
	case 0:
		m->steps++;
		for (int i = 0; i < 2; i++)
			evict_step(e[i]);
		break;
	case 1:
	case 2:
	case 3:
		/* Some blocks far more often than others. */
		b = random_below(b + 1);
		m->last[b] = ++m->now;
		m->step[b] = m->steps;
		for (int i = 0; i < 2; i++)
			evict_touch(e[i], b, 1 + (m->now & 3));
		break;
	case 4:
	case 5:
		if (!m->resident[b]) {
			m->last[b] = ++m->now;
			m->step[b] = m->steps;
		}
		m->resident[b] = true;
		for (int i = 0; i < 2; i++)
			evict_insert(e[i], b);
		break;
	case 6: m->keep[b] = (uint8_t)random_below(2); break;
	default:
		class = class > N_CLASSES ? EVICT_ANY_CLASS : class; /* N_CLASSES: one that nobody is of */
		for (int i = 0; i < 2; i++)
			v[i] = evict_victim(e[i], class, m->keep);
		assert_int_equal(v[0], v[1]);
		check_victim(m, e[0], policy, class, v[0]);
		/* What goes need not be the victim: the kernel takes what it likes. */
		b = random_below(4) == 0 || v[0] == EVICT_NONE ? b : v[0];
		m->resident[b] = false;
		for (int i = 0; i < 2; i++)
			evict_remove(e[i], b);
	}
}

static void check_properties(enum evict_policy policy)
{
	struct model m = {};
	struct evict *e[2];

	for (uint32_t b = 0; b < N; b++)
		m.class_of[b] = (uint8_t)random_below(N_CLASSES);
	for (int i = 0; i < 2; i++)
		e[i] = new_evict(policy, N, m.class_of);
	for (int i = 0; i < 30000; i++) {
		uint32_t n = 0;

		random_call(&m, e, policy);
		for (uint32_t b = 0; b < N; b++) {
			assert_int_equal(evict_is_resident(e[0], b), m.resident[b]);
			assert_int_equal(evict_heat(e[0], b), evict_heat(e[1], b));
			n += m.resident[b];
		}
		assert_int_equal(evict_n_resident(e[0]), n);
	}
	for (int i = 0; i < 2; i++)
		evict_free(e[i]);
}

static void test_properties(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
		seed = 7;
		check_properties(policies[i]);
	}
}

static void test_all_kept(void **state)
{
	static const uint8_t all[4] = { 1, 1, 1, 1 }, only_a[4] = { 1, 0, 0, 0 };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
		_cleanup_(evict_freep) struct evict *e = new_evict(policies[i], 4, NULL);

		assert_int_equal(evict_victim(e, EVICT_ANY_CLASS, NULL), EVICT_NONE);
		use(e, "abcdabcdabcd", 4);
		assert_int_equal(evict_victim(e, EVICT_ANY_CLASS, all), EVICT_NONE);
		assert_int_equal(strlen(victims(e, only_a)), 3);
		assert_true(evict_is_resident(e, 0));
	}
}

/* Once more in, once more out: no harm. */
static void test_twice(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
		_cleanup_(evict_freep) struct evict *e = new_evict(policies[i], 4, NULL);

		evict_insert(e, 2);
		evict_insert(e, 2);
		assert_int_equal(evict_n_resident(e), 1);
		evict_remove(e, 2);
		evict_remove(e, 2);
		evict_remove(e, 3);
		assert_int_equal(evict_n_resident(e), 0);
		assert_int_equal(evict_victim(e, EVICT_ANY_CLASS, NULL), EVICT_NONE);
	}
}

/* ---- replays ---- */

static size_t replay(enum evict_policy policy, const struct trace *t, uint32_t capacity, size_t from)
{
	_cleanup_(evict_freep) struct evict *e = new_evict(policy, t->n_layers * t->n_experts, NULL);
	size_t hits = 0;

	for (size_t s = 0; s < t->n_steps; s++) {
		evict_step(e);
		for (size_t i = t->first[s]; i < t->first[s + 1]; i++) {
			uint32_t b = t->wanted[i];

			evict_touch(e, b, 1);
			if (evict_is_resident(e, b)) {
				hits += i >= from;
				continue;
			}
			if (evict_n_resident(e) == capacity)
				evict_remove(e, evict_victim(e, EVICT_ANY_CLASS, NULL));
			evict_insert(e, b);
		}
	}
	return hits;
}

static size_t belady(const struct trace *t, uint32_t capacity, size_t from)
{
	size_t hits;

	assert_int_equal(evict_belady(t->wanted, t->n_wanted, t->n_layers * t->n_experts, capacity,
				      from, &hits),
			 0);
	return hits;
}

/* One layer; as many blocks a step, any of them more than once, the lower numbers more often. */
static void make_trace(struct trace *t, uint32_t n_experts, size_t n_steps, size_t n_a_step)
{
	*t = (struct trace){ .n_layers = 1, .n_experts = n_experts, .n_steps = n_steps };
	t->n_wanted = n_steps * n_a_step;
	t->wanted = malloc(t->n_wanted * sizeof(*t->wanted));
	t->first = malloc((n_steps + 1) * sizeof(*t->first));
	assert_non_null(t->wanted);
	assert_non_null(t->first);
	for (size_t i = 0; i < t->n_wanted; i++)
		t->wanted[i] = random_below(random_below(n_experts) + 1);
	for (size_t s = 0; s <= n_steps; s++)
		t->first[s] = s * n_a_step;
}

static void test_belady_bounds_all(void **state)
{
	(void)state;
	seed = 11;
	for (int round = 0; round < 60; round++) {
		_cleanup_(trace_done) struct trace t;
		uint32_t capacity = 1 + random_below(30);
		size_t bound;

		make_trace(&t, 2 + random_below(60), 1 + random_below(200), 1 + random_below(8));
		bound = belady(&t, capacity, 0);
		for (size_t i = 0; i < ARRAY_SIZE(policies); i++)
			assert_true(replay(policies[i], &t, capacity, 0) <= bound);
	}
}

/* The most hits of trace[i..n) from a cache that holds the blocks of the mask, by trying every victim. */
static size_t best_hits(const uint32_t *trace, size_t n, unsigned cached, int capacity)
{
	size_t best = 0;

	if (n == 0)
		return 0;
	if (cached & 1u << trace[0])
		return 1 + best_hits(trace + 1, n - 1, cached, capacity);
	if (__builtin_popcount(cached) < capacity)
		return best_hits(trace + 1, n - 1, cached | 1u << trace[0], capacity);
	for (unsigned b = 0; b < 8; b++)
		if (cached & 1u << b)
			best = MAX(best, best_hits(trace + 1, n - 1,
						   (cached & ~(1u << b)) | 1u << trace[0], capacity));
	return best;
}

static void test_belady_is_best(void **state)
{
	(void)state;
	seed = 13;
	for (int round = 0; round < 40; round++) {
		_cleanup_(trace_done) struct trace t;
		uint32_t capacity = 1 + random_below(3);

		make_trace(&t, 6, 14, 1);
		assert_int_equal(belady(&t, capacity, 0),
				 best_hits(t.wanted, t.n_wanted, 0, (int)capacity));
	}
}

static void test_belady_edges(void **state)
{
	static const uint32_t trace[] = { 0, 1, 0, 1, 2, 0 };
	size_t hits;

	(void)state;
	assert_int_equal(evict_belady(trace, 6, 3, 0, 0, &hits), 0);
	assert_int_equal(hits, 0);
	assert_int_equal(evict_belady(trace, 6, 3, 1, 0, &hits), 0);
	assert_int_equal(hits, 0);
	assert_int_equal(evict_belady(trace, 6, 3, 2, 0, &hits), 0);
	assert_int_equal(hits, 3);
	assert_int_equal(evict_belady(trace, 6, 3, 100, 0, &hits), 0);
	assert_int_equal(hits, 3);
	assert_int_equal(evict_belady(trace, 6, 3, 2, 3, &hits), 0);
	assert_int_equal(hits, 2);
	assert_int_equal(evict_belady(NULL, 0, 3, 2, 0, &hits), 0);
	assert_int_equal(hits, 0);
}

/* LRU and Belady were counted by another program, in another language. */
static void test_known_hits(void **state)
{
	_cleanup_(trace_done) struct trace t;

	(void)state;
	seed = 17;
	make_trace(&t, 200, 500, 4);
	assert_int_equal(replay(EVICT_LRU, &t, 50, 400), 726);
	assert_int_equal(belady(&t, 50, 400), 1179);
	assert_int_equal(replay(EVICT_LFU, &t, 50, 400), 904);
	assert_int_equal(replay(EVICT_CLOCK_LFU, &t, 50, 400), 777);
	assert_int_equal(replay(EVICT_S3_FIFO, &t, 50, 400), 846);
}

/* Routing of random weights: independent draws, skewed, so that the past is worth nothing but its frequencies. */
static void make_routing(struct trace *t)
{
	enum { LAYERS = 8, EXPERTS = 256, TOP = 8, STEPS = 800 };
	double weight[EXPERTS];
	size_t n = 0;

	*t = (struct trace){ .n_layers = LAYERS, .n_experts = EXPERTS, .n_steps = STEPS };
	t->wanted = malloc((size_t)LAYERS * TOP * STEPS * sizeof(*t->wanted));
	t->first = malloc((STEPS + 1) * sizeof(*t->first));
	assert_non_null(t->wanted);
	assert_non_null(t->first);
	for (uint32_t s = 0; s < STEPS; s++) {
		t->first[s] = n;
		for (uint32_t l = 0; l < LAYERS; l++) {
			double total = 0;

			for (uint32_t x = 0; x < EXPERTS; x++)
				total += weight[x] = pow(1 + (x * 37 + l * 91) % EXPERTS, -1.1);
			for (int k = 0; k < TOP; k++) {
				double at = total * (random_below(65536) + 0.5) / 65536;
				uint32_t x = 0;

				while (x + 1 < EXPERTS && (at -= weight[x]) >= 0)
					x++;
				while (weight[x] == 0)
					x = (x + 1) % EXPERTS;
				total -= weight[x];
				weight[x] = 0;
				t->wanted[n++] = l * EXPERTS + x;
			}
		}
	}
	t->first[STEPS] = t->n_wanted = n;
}

static double share(size_t hits, const struct trace *t, size_t from)
{
	return 100 * (double)hits / (double)(t->n_wanted - from);
}

static void test_independent_routing(void **state)
{
	_cleanup_(trace_done) struct trace t;
	double lru, lfu, bound;
	size_t from;

	(void)state;
	seed = 19;
	make_routing(&t);
	from = t.first[300];
	lru = share(replay(EVICT_LRU, &t, 635, from), &t, from);
	lfu = share(replay(EVICT_LFU, &t, 635, from), &t, from);
	bound = share(belady(&t, 635, from), &t, from);
	print_message("# 31 %% resident: LRU %.1f, LFU %.1f, Belady %.1f\n", lru, lfu, bound);
	assert_true(lfu >= bound - 8);
	assert_true(lfu >= lru + 5);
}

static void test_recorded(void **state)
{
	const char *shared = getenv("RESIDENTD_SHARED");
	_cleanup_(freep) char *path = NULL, *error = NULL;
	_cleanup_(trace_done) struct trace t = {};
	_cleanup_(fclosep) FILE *f = NULL;
	uint32_t capacity;
	size_t from;

	(void)state;
	assert_true(asprintf(&path, "%s/traces/trace_kimi_300.jsonl", shared ? shared : "../shared") > 0);
	f = fopen(path, "re");
	if (!f)
		skip_because("%s is not there", path);
	assert_int_equal(trace_read(f, path, 0, &t, &error), 0);
	assert_int_equal(t.n_layers * t.n_experts, 26 * 256);
	from = t.first[100];
	capacity = (uint32_t)lround(0.269 * 26 * 256);
	/* As published for this trace. */
	assert_true(fabs(share(replay(EVICT_LRU, &t, capacity, from), &t, from) - 75.4) < 0.5);
	assert_true(fabs(share(belady(&t, capacity, from), &t, from) - 88.5) < 0.5);
	/* What the other policies are for. */
	assert_true(share(replay(EVICT_LFU, &t, capacity, from), &t, from) > 76);
	assert_true(share(replay(EVICT_CLOCK_LFU, &t, capacity, from), &t, from) > 75.4);
	assert_true(share(replay(EVICT_S3_FIFO, &t, capacity, from), &t, from) > 75.4);
}

/* A chunk of a prompt wants everything at once; what answers have used again and again stays. */
static void test_prompt_does_not_flush(void **state)
{
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_LFU, 100, NULL);
	uint32_t left = 0;

	(void)state;
	for (int s = 0; s < 100; s++)
		use(e, "abcdefghijklmnopqrst", 30);
	evict_step(e);
	for (uint32_t b = 0; b < 100; b++) {
		evict_touch(e, b, 16);
		if (evict_is_resident(e, b))
			continue;
		if (evict_n_resident(e) == 30)
			evict_remove(e, evict_victim(e, EVICT_ANY_CLASS, NULL));
		evict_insert(e, b);
	}
	for (uint32_t b = 0; b < 20; b++)
		left += evict_is_resident(e, b);
	assert_int_equal(left, 20);
}

/* ---- heat ---- */

static void test_heat_ages(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
		_cleanup_(evict_freep) struct evict *e = new_evict(policies[i], 3, NULL);
		uint16_t first;

		for (int s = 0; s < 1000; s++) {
			evict_step(e);
			evict_touch(e, 1, 1);
		}
		first = evict_heat(e, 1);
		for (int s = 0; s < 355; s++)
			evict_step(e);
		/* Half of it, whether it is resident or not. */
		assert_in_range(evict_heat(e, 1), first / 2 - 20, first / 2 + 20);
		assert_int_equal(evict_heat(e, 0), 0);
		evict_touch(e, 2, 1);
		assert_true(evict_heat(e, 2) > 0);
		assert_true(evict_heat(e, 2) < evict_heat(e, 1));
		/* Long after that only a trace is left, and at last nothing; numbers do not wrap. */
		for (int s = 0; s < 4000; s++)
			evict_step(e);
		assert_int_equal(evict_heat(e, 2), 1);
		for (int s = 0; s < 200000; s++)
			evict_step(e);
		assert_int_equal(evict_heat(e, 1), 0);
	}
}

static void test_heat_saturates(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
		_cleanup_(evict_freep) struct evict *e = new_evict(policies[i], 4, NULL);

		evict_insert(e, 0);
		evict_insert(e, 1);
		evict_touch(e, 3, 0);
		assert_int_equal(evict_heat(e, 3), 0);
		for (int s = 0; s < 30000; s++) {
			evict_step(e);
			for (int k = 0; k < 40; k++)
				evict_touch(e, 0, UINT32_MAX);
		}
		assert_int_equal(evict_heat(e, 0), EVICT_HEAT_MAX);
		assert_int_equal(evict_heat(e, 1), 0);
		assert_int_equal(evict_victim(e, EVICT_ANY_CLASS, NULL), 1);
		/* It comes down again. */
		for (int s = 0; s < 4000; s++)
			evict_step(e);
		assert_in_range(evict_heat(e, 0), 1, EVICT_HEAT_MAX - 1);
	}
}

static void test_heat_is_merged(void **state)
{
	static const uint16_t given[4] = { 100, 5, 0, EVICT_HEAT_MAX };
	uint16_t before[4], after[4], again[4];

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(policies); i++) {
		_cleanup_(evict_freep) struct evict *e = new_evict(policies[i], 4, NULL);

		for (int s = 0; s < 30; s++) {
			evict_step(e);
			evict_touch(e, 1, 1);
			evict_touch(e, 2, 1);
		}
		evict_get_heat(e, before);
		assert_int_equal(before[0], 0);
		assert_true(before[1] > 5);
		evict_set_heat(e, given);
		evict_get_heat(e, after);
		assert_int_equal(after[0], 100);
		assert_int_equal(after[1], before[1]);
		assert_int_equal(after[2], before[2]);
		assert_int_equal(after[3], EVICT_HEAT_MAX);
		/* What was taken out changes nothing when it is put back, however often. */
		for (int k = 0; k < 10; k++)
			evict_set_heat(e, after);
		evict_get_heat(e, again);
		assert_memory_equal(after, again, sizeof(after));
	}
}

static void test_heat_ranks(void **state)
{
	static const uint16_t given[4] = { 9, 3, 7, 8 };
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_LFU, 4, NULL);

	(void)state;
	for (uint32_t b = 0; b < 4; b++)
		evict_insert(e, b);
	for (int s = 0; s < 3; s++)
		evict_step(e);
	evict_set_heat(e, given);
	assert_string_equal(victims(e, NULL), "bcda");
}

static int compare_heat(const void *a, const void *b)
{
	const uint32_t *x = a, *y = b;

	return x[1] != y[1] ? (x[1] < y[1] ? 1 : -1) : x[0] < y[0] ? -1 : 1;
}

static void test_hottest_absent(void **state)
{
	uint32_t sorted[N][2], got[N];

	(void)state;
	seed = 23;
	for (int round = 0; round < 50; round++) {
		_cleanup_(evict_freep) struct evict *e = new_evict(policies[round % 4], N, NULL);
		uint16_t heat[N];
		size_t n = 0, max = random_below(N + 1), r;

		for (uint32_t b = 0; b < N; b++) {
			heat[b] = (uint16_t)random_below(12);
			if (random_below(3) == 0) {
				evict_insert(e, b);
			} else if (heat[b] > 0) {
				sorted[n][0] = b;
				sorted[n++][1] = heat[b];
			}
		}
		evict_set_heat(e, heat);
		qsort(sorted, n, sizeof(sorted[0]), compare_heat);
		r = evict_hottest_absent(e, got, max);
		assert_int_equal(r, MIN(n, max));
		for (size_t i = 0; i < r; i++)
			assert_int_equal(got[i], sorted[i][0]);
	}
}

/* ---- admission ---- */

static void test_pays(void **state)
{
	/* 64 uses, 16 uses, none */
	static const uint16_t given[3] = { 64 * 32, 16 * 32, 0 };
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_LFU, 3, NULL);
	struct evict_price dear = { .move_us = 1000, .saved_us = 20 },
			   cheap = { .move_us = 1000, .saved_us = 21 }, gift = { 0, 1 },
			   worse = { .move_us = 1, .saved_us = -1 };

	(void)state;
	evict_set_heat(e, given);
	/* 64 * 20 and 21 against 1000; (64 - 16) * 20 and 21 against 1000 */
	assert_true(evict_pays(e, 0, EVICT_NONE, &dear));
	assert_false(evict_pays(e, 0, 1, &dear));
	assert_true(evict_pays(e, 0, 1, &cheap));
	assert_false(evict_pays(e, 1, EVICT_NONE, &cheap));
	/* Nothing is gained by swapping a hotter block for a colder one, or where the tier is not faster. */
	assert_false(evict_pays(e, 1, 0, &gift));
	assert_true(evict_pays(e, 1, 2, &gift));
	assert_false(evict_pays(e, 2, EVICT_NONE, &gift));
	assert_false(evict_pays(e, 0, EVICT_NONE, &worse));
}

/* A tier that turns over fast keeps nothing for long enough. */
static void test_pays_less_when_busy(void **state)
{
	static const uint16_t given[3] = { 64 * 32, 0, 0 };
	static const uint8_t class_of[3] = { 0, 0, 1 };
	_cleanup_(evict_freep) struct evict *e = new_evict(EVICT_LRU, 3, class_of);
	struct evict_price price = { .move_us = 1000, .saved_us = 20 };

	(void)state;
	evict_set_heat(e, given);
	evict_insert(e, 1);
	assert_true(evict_pays(e, 0, EVICT_NONE, &price));
	/* Elsewhere. */
	for (int i = 0; i < 10; i++) {
		evict_insert(e, 2);
		evict_remove(e, 2);
	}
	assert_true(evict_pays(e, 0, EVICT_NONE, &price));
	for (int i = 0; i < 10; i++) {
		evict_remove(e, 1);
		evict_insert(e, 1);
	}
	assert_false(evict_pays(e, 0, EVICT_NONE, &price));
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_names),
		cmocka_unit_test(test_no_blocks),
		cmocka_unit_test(test_lru),
		cmocka_unit_test(test_lfu),
		cmocka_unit_test(test_lfu_spares_what_is_new),
		cmocka_unit_test(test_clock),
		cmocka_unit_test(test_s3),
		cmocka_unit_test(test_properties),
		cmocka_unit_test(test_all_kept),
		cmocka_unit_test(test_twice),
		cmocka_unit_test(test_belady_bounds_all),
		cmocka_unit_test(test_belady_is_best),
		cmocka_unit_test(test_belady_edges),
		cmocka_unit_test(test_known_hits),
		cmocka_unit_test(test_independent_routing),
		cmocka_unit_test(test_recorded),
		cmocka_unit_test(test_prompt_does_not_flush),
		cmocka_unit_test(test_heat_ages),
		cmocka_unit_test(test_heat_saturates),
		cmocka_unit_test(test_heat_is_merged),
		cmocka_unit_test(test_heat_ranks),
		cmocka_unit_test(test_hottest_absent),
		cmocka_unit_test(test_pays),
		cmocka_unit_test(test_pays_less_when_busy),
	};

	return cmocka_run_group_tests_name("evict", tests, NULL, NULL);
}
