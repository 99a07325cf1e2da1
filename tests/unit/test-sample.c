/* SPDX-License-Identifier: MIT */
/*
 * test-sample.c: filters on literal distributions, penalties, log-probabilities, hostile logits,
 * and sequences that must be the same on every machine.
 *
 * Includes the source to see which candidates a filter leaves. Distributions are given as
 * probabilities; their logs are the logits, so that softmax gives the probabilities back.
 */
#include "tests/test.h"

#include "daemon/model/sample.c"

static struct sample_params plain(void)
{
	return (struct sample_params){
		.temperature = 1,
		.top_p = 1,
		.typical_p = 1,
		.repeat_penalty = 1,
		.penalty_last_tok = 64,
		.seed = 1,
	};
}

static struct sampler *sampler(const struct sample_params *p, uint32_t n_vocab)
{
	struct sampler *s = NULL;

	assert_int_equal(sampler_new(p, n_vocab, &s), 0);
	assert_non_null(s);
	return s;
}

static void fill_logits(float *logits, const double *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		logits[i] = (float)log(p[i]);
}

/* The survivors of the filters on distribution p, as a bit set. */
static uint64_t survivors(const struct sample_params *params, const double *p, size_t n)
{
	_cleanup_(sampler_freep) struct sampler *s = sampler(params, (uint32_t)n);
	float logits[64];
	uint64_t set = 0;

	fill_logits(logits, p, n);
	filter(s, logits);
	assert_true(s->n_candidates > 0);
	for (size_t i = 0; i < s->n_candidates; i++) {
		assert_false(set & ((uint64_t)1 << s->candidates[i].token));
		set |= (uint64_t)1 << s->candidates[i].token;
	}
	return set;
}

#define SET(...) set_of((const int[]){ __VA_ARGS__, -1 })
static uint64_t set_of(const int *ids)
{
	uint64_t set = 0;

	for (; *ids >= 0; ids++)
		set |= (uint64_t)1 << *ids;
	return set;
}

static int32_t pick(struct sampler *s, const float *logits, size_t n)
{
	float copy[64];
	int32_t token = -1;

	memcpy(copy, logits, n * sizeof(*copy));
	assert_int_equal(sampler_pick(s, copy, &token, NULL, NULL, NULL), 0);
	return token;
}

static void test_greedy(void **state)
{
	struct sample_params p = plain();
	static const float logits[] = { 1, 5, -2, 5, 4 };

	(void)state;
	p.temperature = 0;
	p.top_k = 1;
	p.min_p = 1;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 5);

		assert_int_equal(pick(s, logits, 5), 1); /* the lower id of two equal ones */
		assert_int_equal(pick(s, logits + 2, 3), 1);
	}
}

/* Not in the order of probability, so that a filter that keeps positions would be seen. */
static const double dist[] = { 0.05, 0.4, 0.1, 0.25, 0.2 };

static void test_top_k(void **state)
{
	struct sample_params p = plain();
	static const double ties[] = { 0.1, 0.2, 0.2, 0.2, 0.2, 0.1 };

	(void)state;
	assert_int_equal(survivors(&p, dist, 5), SET(0, 1, 2, 3, 4));
	p.top_k = 1;
	assert_int_equal(survivors(&p, dist, 5), SET(1));
	p.top_k = 3;
	assert_int_equal(survivors(&p, dist, 5), SET(1, 3, 4));
	assert_int_equal(survivors(&p, ties, 6), SET(1, 2, 3));
	p.top_k = 1000;
	assert_int_equal(survivors(&p, dist, 5), SET(0, 1, 2, 3, 4));
}

static void test_top_p(void **state)
{
	struct sample_params p = plain();
	double flat[40];

	(void)state;
	p.top_p = 0.3f;
	assert_int_equal(survivors(&p, dist, 5), SET(1));
	p.top_p = 0.5f; /* 0.4 is not enough */
	assert_int_equal(survivors(&p, dist, 5), SET(1, 3));
	p.top_p = 0.84f;
	assert_int_equal(survivors(&p, dist, 5), SET(1, 3, 4));
	p.top_p = 0.86f;
	assert_int_equal(survivors(&p, dist, 5), SET(1, 2, 3, 4));
	p.top_p = 1e-30f;
	assert_int_equal(survivors(&p, dist, 5), SET(1));
	/* of what top-k left: 0.4 / 0.65 is enough for 0.6 */
	p.top_p = 0.6f;
	p.top_k = 2;
	assert_int_equal(survivors(&p, dist, 5), SET(1));
	p.top_k = 3;
	assert_int_equal(survivors(&p, dist, 5), SET(1, 3));

	/* equal candidates: the lower ids */
	for (size_t i = 0; i < ARRAY_SIZE(flat); i++)
		flat[i] = 1.0 / 40;
	p.top_k = 0;
	p.top_p = 0.24f;
	assert_int_equal(survivors(&p, flat, 40), 0x3ff);
}

static void test_min_p(void **state)
{
	struct sample_params p = plain();

	(void)state;
	p.min_p = 0.2f; /* of 0.4: 0.08 */
	assert_int_equal(survivors(&p, dist, 5), SET(1, 2, 3, 4));
	p.min_p = 0.45f;
	assert_int_equal(survivors(&p, dist, 5), SET(1, 3, 4));
	p.min_p = 1;
	assert_int_equal(survivors(&p, dist, 5), SET(1));
	p.min_p = 1e-30f; /* lets the smallest through although sums are rounded */
	{
		static const double tiny[] = { 1e-25, 1, 1e-24 };

		assert_int_equal(survivors(&p, tiny, 3), SET(0, 1, 2));
	}
	/* together with top-p the stricter one decides */
	p.min_p = 0.45f;
	p.top_p = 0.5f;
	assert_int_equal(survivors(&p, dist, 5), SET(1, 3));
	p.min_p = 0.9f;
	assert_int_equal(survivors(&p, dist, 5), SET(1));
}

static void test_typical(void **state)
{
	struct sample_params p = plain();
	/* entropy 1.4048 nats; surprise: 2.996 0.916 2.303 1.386 1.609; distance: 1.59 0.49 0.90
	 * 0.02 0.20 */
	(void)state;
	p.typical_p = 0.2f;
	assert_int_equal(survivors(&p, dist, 5), SET(3));
	p.typical_p = 0.4f;
	assert_int_equal(survivors(&p, dist, 5), SET(3, 4));
	p.typical_p = 0.8f;
	assert_int_equal(survivors(&p, dist, 5), SET(3, 4, 1));
	p.typical_p = 0.9f;
	assert_int_equal(survivors(&p, dist, 5), SET(3, 4, 1, 2));
	/* top-p then works on what is left: of 0.25 and 0.2 the first has 0.556 */
	p.typical_p = 0.4f;
	p.top_p = 0.5f;
	assert_int_equal(survivors(&p, dist, 5), SET(3));
	p.top_p = 0.6f;
	assert_int_equal(survivors(&p, dist, 5), SET(3, 4));
	/* and typical on what top-k left: of 0.4, 0.25 the entropy is 0.666, surprise 0.485 and
	 * 0.956 */
	p.top_p = 1;
	p.top_k = 2;
	p.typical_p = 0.5f;
	assert_int_equal(survivors(&p, dist, 5), SET(1));
}

static void draw_many(const struct sample_params *p, const double *dist_p, size_t n, size_t draws,
		      double *ret)
{
	_cleanup_(sampler_freep) struct sampler *s = sampler(p, (uint32_t)n);
	float logits[64];

	fill_logits(logits, dist_p, n);
	for (size_t i = 0; i < n; i++)
		ret[i] = 0;
	for (size_t i = 0; i < draws; i++)
		ret[pick(s, logits, n)] += 1.0 / (double)draws;
}

/* A fixed seed, so a bound that holds once holds always: 0.005 is more than three standard
 * deviations of 100,000 draws. */
static void test_distribution(void **state)
{
	struct sample_params p = plain();
	double got[5], sum = 0;

	(void)state;
	draw_many(&p, dist, 5, 100000, got);
	for (size_t i = 0; i < 5; i++)
		assert_true(fabs(got[i] - dist[i]) < 0.005);

	p.temperature = 2; /* square roots, normalised */
	for (size_t i = 0; i < 5; i++)
		sum += sqrt(dist[i]);
	draw_many(&p, dist, 5, 100000, got);
	for (size_t i = 0; i < 5; i++)
		assert_true(fabs(got[i] - sqrt(dist[i]) / sum) < 0.005);

	p.temperature = 1;
	p.top_k = 2;
	draw_many(&p, dist, 5, 100000, got);
	assert_true(fabs(got[1] - 0.4 / 0.65) < 0.005);
	assert_true(got[0] == 0 && got[2] == 0 && got[4] == 0);

	p.temperature = 1e-30f; /* as good as greedy */
	p.top_k = 0;
	draw_many(&p, dist, 5, 100, got);
	assert_true(got[1] > 0.99);
}

/* The generator's own numbers and what comes of them: a change here breaks "the same seed, the
 * same text" for every user. */
static void test_sequence(void **state)
{
	static const int32_t expected[2][24] = {
		{ 3, 2, 3, 1, 3, 1, 1, 1, 4, 3, 4, 4, 4, 3, 3, 4, 1, 2, 0, 1, 2, 2, 3, 1 },
		{ 2, 4, 4, 1, 4, 2, 1, 1, 3, 4, 1, 3, 1, 1, 0, 0, 2, 3, 3, 2, 3, 1, 1, 3 },
	};
	static const uint64_t seeds[] = { 1, 0xfeedfacecafebeef };
	float logits[5];

	(void)state;
	fill_logits(logits, dist, 5);
	for (size_t i = 0; i < 2; i++) {
		struct sample_params p = plain();

		p.seed = seeds[i];
		for (int again = 0; again < 2; again++) {
			_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 5);

			for (size_t j = 0; j < 24; j++)
				assert_int_equal(pick(s, logits, 5), expected[i][j]);
		}
	}
}

/* First outputs of splitmix64 from 0 and of xoshiro256** from the state 1, 2, 3, 4, as their
 * authors' code gives them. */
static void test_generator(void **state)
{
	uint64_t seed = 0, s[4] = { 1, 2, 3, 4 };

	(void)state;
	assert_true(splitmix64(&seed) == 0xe220a8397b1dcdaf);
	assert_true(splitmix64(&seed) == 0x6e789e6aa1b965f4);
	assert_true(random_next(s) == 11520);
	assert_true(random_next(s) == 0);
	assert_true(random_next(s) == 1509978240);
	assert_true(random_next(s) == 1215971899390074240);
}

/* The filters are the same for a big vocabulary as for a sorted prefix of it. */
static void test_big_vocabulary(void **state)
{
	enum { N = 100000 };
	float *logits = malloc(N * sizeof(*logits));
	struct sample_params p = plain();
	uint64_t rng = 7;
	size_t kept;

	(void)state;
	assert_non_null(logits);
	for (size_t i = 0; i < N; i++)
		logits[i] = (float)(splitmix64(&rng) >> 40) / 0x1p24f * 12;
	p.top_p = 0.9f;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, N);
		double sum = 0, mass = 0;

		for (size_t i = 0; i < N; i++)
			sum += exp((double)logits[i] - 12);
		filter(s, logits);
		kept = s->n_candidates;
		for (size_t i = 0; i < kept; i++) {
			assert_true(i == 0 || better(&s->candidates[i - 1], &s->candidates[i]));
			assert_true(mass < 0.9 * sum);
			mass += exp((double)s->candidates[i].logit - 12);
		}
		assert_true(mass >= 0.9 * sum * (1 - 1e-7));
		assert_true(kept > 1000 && kept < N / 2);
	}
	p.top_p = 1;
	p.top_k = (uint32_t)kept;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, N);
		float last;

		filter(s, logits);
		assert_int_equal(s->n_candidates, kept);
		last = s->candidates[kept - 1].logit;
		kept = 0;
		for (size_t i = 0; i < N; i++)
			kept += logits[i] > last;
		assert_true(kept < s->n_candidates);
	}
	free(logits);
}

static void test_bias(void **state)
{
	static const struct logit_bias bias[] = { { 2, 100 }, { 1, -100 }, { 2, 1 } };
	struct sample_params p = plain();
	float logits[] = { 1, 3, 0, 2 };
	struct logprob chosen;
	int32_t token;

	(void)state;
	p.temperature = 0;
	p.bias = bias;
	p.n_bias = 1;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 4);

		assert_int_equal(pick(s, logits, 4), 2);
	}
	p.bias = bias + 1;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 4);

		assert_int_equal(pick(s, logits, 4), 3);
	}
	p.bias = bias;
	p.n_bias = 3;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 4);

		/* the log-probability is the model's: softmax of 1 3 0 2 at 0, before any bias */
		assert_int_equal(sampler_pick(s, logits, &token, &chosen, NULL, NULL), 0);
		assert_int_equal(token, 2);
		assert_int_equal(chosen.token, 2);
		assert_true(fabsf(chosen.logprob - -3.4401897f) < 1e-5f);
		assert_true(logits[2] == 101);
	}
}

static void test_penalties(void **state)
{
	struct sample_params p = plain();
	float logits[4];

	(void)state;
	p.repeat_penalty = 2;
	p.presence_penalty = 0.5f;
	p.frequency_penalty = 0.25f;
	p.penalty_last_tok = 3;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 4);
		int32_t token;

		for (int round = 0; round < 2; round++) {
			const float start[] = { 4, -4, 4, 0 };

			memcpy(logits, start, sizeof(logits));
			sampler_accept(s, 3);
			sampler_accept(s, 0);
			sampler_accept(s, 1);
			sampler_accept(s, 1); /* the window is now 0 1 1 */
			assert_int_equal(sampler_pick(s, logits, &token, NULL, NULL, NULL), 0);
			assert_true(logits[0] == 4 / 2.f - 0.5f - 0.25f);
			assert_true(logits[1] == -4 * 2.f - 0.5f - 0.5f);
			assert_true(logits[2] == 4);
			assert_true(logits[3] == 0); /* has left the window */
		}
		sampler_accept(s, -1);
		sampler_accept(s, 4); /* not tokens: no effect */
		memcpy(logits, (const float[]){ 4, -4, 4, 0 }, sizeof(logits));
		assert_int_equal(sampler_pick(s, logits, &token, NULL, NULL, NULL), 0);
		assert_true(logits[0] == 1.25f && logits[3] == 0);
	}
	p.penalty_last_tok = 0;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 4);

		sampler_accept(s, 0);
		memcpy(logits, (const float[]){ 4, -4, 4, 0 }, sizeof(logits));
		assert_int_equal(sampler_pick(s, logits, &(int32_t){ 0 }, NULL, NULL, NULL), 0);
		assert_true(logits[0] == 4 && logits[1] == -4);
	}
}

static void test_logprobs(void **state)
{
	struct sample_params p = plain();
	struct logprob chosen, top[SAMPLE_LOGPROBS_MAX];
	float logits[5];
	int32_t token;
	size_t n_top = 99;

	(void)state;
	p.temperature = 0;
	p.top_logprobs = 3;
	p.repeat_penalty = 1.5f;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 5);

		fill_logits(logits, dist, 5);
		sampler_accept(s, 1); /* becomes 0.4 ** 1.5 = 0.253: still chosen */
		assert_int_equal(sampler_pick(s, logits, &token, &chosen, top, &n_top), 0);
		assert_int_equal(token, 1);
		assert_true(fabs((double)chosen.logprob - log(0.4)) < 1e-6);
		assert_int_equal(n_top, 3);
		assert_int_equal(top[0].token, 1);
		assert_int_equal(top[1].token, 3);
		assert_int_equal(top[2].token, 4);
		assert_true(fabs((double)top[0].logprob - log(0.4)) < 1e-6);
		assert_true(fabs((double)top[1].logprob - log(0.25)) < 1e-6);
		assert_true(fabs((double)top[2].logprob - log(0.2)) < 1e-6);
	}
	p.top_logprobs = 20; /* more than there are, and two that can never come */
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 5);

		fill_logits(logits, dist, 5);
		logits[0] = -INFINITY;
		logits[3] = NAN;
		assert_int_equal(sampler_pick(s, logits, &token, NULL, top, &n_top), 0);
		assert_int_equal(n_top, 3);
		assert_int_equal(top[2].token, 2);
		assert_true(fabs((double)top[2].logprob - log(0.1 / 0.7)) < 1e-6);
	}
}

static void test_extreme(void **state)
{
	struct sample_params p = plain();
	int32_t token = 77;

	(void)state;
	p.top_p = 0.9f;
	p.min_p = 0.01f;
	p.typical_p = 0.9f;
	for (int greedy = 0; greedy < 2; greedy++) {
		_cleanup_(sampler_freep) struct sampler *s = NULL;
		float huge[] = { -1e30f, 1e30f, 3e38f, -3e38f };
		float some[] = { NAN, -INFINITY, 1, INFINITY };
		float none[] = { NAN, -INFINITY, INFINITY, NAN };
		float equal[] = { 7, 7, 7, 7 };

		p.temperature = greedy ? 0 : 1;
		s = sampler(&p, 4);
		assert_int_equal(pick(s, huge, 4), 2);
		assert_int_equal(pick(s, some, 4), 2);
		assert_in_range(pick(s, equal, 4), 0, greedy ? 0 : 3);
		assert_int_equal(sampler_pick(s, none, &token, NULL, NULL, NULL), -EDOM);
		assert_int_equal(token, 77);
	}
	p.temperature = 1;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 1);
		float one[] = { -5 };

		assert_int_equal(pick(s, one, 1), 0);
	}
	/* penalties and bias never make a finite logit infinite, so a token is always found */
	p.repeat_penalty = 10;
	p.temperature = 0;
	{
		_cleanup_(sampler_freep) struct sampler *s = sampler(&p, 2);
		float low[] = { -3e38f, -3e38f };

		sampler_accept(s, 0);
		sampler_accept(s, 1);
		assert_int_equal(pick(s, low, 2), 0);
	}
}

static void test_check(void **state)
{
	static const struct logit_bias bias[] = { { 9, 1 }, { 10, 1 }, { -1, 1 }, { 0, NAN }, { 0, 2000 } };
	struct sample_params p;
	static const struct {
		const char *name;
		size_t offset;
		float bad[3];
	} floats[] = {
		{ "temperature", offsetof(struct sample_params, temperature), { -0.1f, 101, NAN } },
		{ "top_p", offsetof(struct sample_params, top_p), { 0, 1.1f, NAN } },
		{ "min_p", offsetof(struct sample_params, min_p), { -0.1f, 1.1f, INFINITY } },
		{ "typical_p", offsetof(struct sample_params, typical_p), { 0, 1.5f, NAN } },
		{ "repeat_penalty", offsetof(struct sample_params, repeat_penalty), { 0, -1, 11 } },
		{ "presence_penalty", offsetof(struct sample_params, presence_penalty), { -2.5f, 3, NAN } },
		{ "frequency_penalty",
		  offsetof(struct sample_params, frequency_penalty),
		  { -2.5f, -INFINITY, NAN } },
	};

	(void)state;
	sample_params_default(&p);
	assert_int_equal(sample_params_check(&p, 10, NULL), 0);
	for (size_t i = 0; i < ARRAY_SIZE(floats); i++)
		for (size_t j = 0; j < 3; j++) {
			_cleanup_(freep) char *error = NULL;

			sample_params_default(&p);
			memcpy((char *)&p + floats[i].offset, &floats[i].bad[j], sizeof(float));
			assert_int_equal(sample_params_check(&p, 10, &error), -ERANGE);
			assert_true(startswith(error, floats[i].name));
		}
	for (size_t i = 0; i < ARRAY_SIZE(bias); i++) {
		_cleanup_(freep) char *error = NULL;

		sample_params_default(&p);
		p.bias = &bias[i];
		p.n_bias = 1;
		assert_int_equal(sample_params_check(&p, 10, &error), i == 0 ? 0 : -ERANGE);
		assert_true(i == 0 || startswith(error, "logit_bias"));
	}
	sample_params_default(&p);
	p.penalty_last_tok = SAMPLE_WINDOW_MAX + 1;
	assert_int_equal(sample_params_check(&p, 10, NULL), -ERANGE);
	sample_params_default(&p);
	p.top_logprobs = SAMPLE_LOGPROBS_MAX + 1;
	assert_int_equal(sample_params_check(&p, 10, NULL), -ERANGE);
	sample_params_default(&p);
	p.n_bias = 11;
	assert_int_equal(sample_params_check(&p, 10, NULL), -ERANGE);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_greedy),         cmocka_unit_test(test_top_k),
		cmocka_unit_test(test_top_p),          cmocka_unit_test(test_min_p),
		cmocka_unit_test(test_typical),        cmocka_unit_test(test_distribution),
		cmocka_unit_test(test_sequence),       cmocka_unit_test(test_generator),
		cmocka_unit_test(test_big_vocabulary), cmocka_unit_test(test_bias),
		cmocka_unit_test(test_penalties),      cmocka_unit_test(test_logprobs),
		cmocka_unit_test(test_extreme),        cmocka_unit_test(test_check),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
