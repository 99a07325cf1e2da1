/* SPDX-License-Identifier: MIT */
/*
 * sample.c: the next token from logits. See sample.h.
 *
 * Owns the random generator (xoshiro256**, seeded by splitmix64) and a ring of recent tokens with
 * their counts. Engine thread only, one sampler per request. Refuses to know what a token means.
 * Invariant: every choice is made in a fixed order (higher logit first, then lower id) with sums
 * in double, so it does not depend on the machine. A logit that is not finite is never chosen.
 */
#include "daemon/model/sample.h"

#include <float.h>
#include <math.h>

struct candidate {
	float logit;
	int32_t token;
	double weight; /* exp(logit - highest logit); while sorting for typical sampling, the distance */
};

struct sampler {
	struct sample_params params;
	uint32_t n_vocab;
	uint64_t rng[4];

	int32_t *window; /* ring of the last penalty_last_tok tokens, oldest at head */
	uint32_t n_window, head;
	uint16_t *count; /* [n_vocab] of each token in the window; NULL: no penalties */

	struct candidate *candidates; /* room for top_k, or for n_vocab without top-k */
	size_t n_candidates, n_room;

	struct touched {
		int32_t token;
		float logit; /* before bias and penalties */
	} * touched;
	size_t n_touched;
};

/* SAMPLE_WINDOW_MAX is below it, so a count and the mark fit 16 bits. */
#define COUNT_MARK 0x8000

void sample_params_default(struct sample_params *p)
{
	*p = (struct sample_params){
		.temperature = 0.7f,
		.top_k = 40,
		.top_p = 0.95f,
		.min_p = 0.05f,
		.typical_p = 1,
		.repeat_penalty = 1,
		.penalty_last_tok = 64,
	};
}

int sample_params_check(const struct sample_params *p, uint32_t n_vocab, char **ret_error)
{
	const struct {
		const char *name;
		float value, low, high;
		bool open; /* low itself is out of range */
	} ranges[] = {
		{ "temperature", p->temperature, 0, 100, false },
		{ "top_p", p->top_p, 0, 1, true },
		{ "min_p", p->min_p, 0, 1, false },
		{ "typical_p", p->typical_p, 0, 1, true },
		{ "repeat_penalty", p->repeat_penalty, 0, 10, true },
		{ "presence_penalty", p->presence_penalty, -2, 2, false },
		{ "frequency_penalty", p->frequency_penalty, -2, 2, false },
	};

	for (size_t i = 0; i < ARRAY_SIZE(ranges); i++)
		if (!(ranges[i].value >= ranges[i].low && ranges[i].value <= ranges[i].high) ||
		    (ranges[i].open && ranges[i].value == ranges[i].low))
			return fail(ret_error, -ERANGE, "%s must be a number %s %g and at most %g",
				    ranges[i].name, ranges[i].open ? "above" : "from",
				    (double)ranges[i].low, (double)ranges[i].high);
	if (p->penalty_last_tok > SAMPLE_WINDOW_MAX)
		return fail(ret_error, -ERANGE, "penalty_last_tokens must be at most %d",
			    SAMPLE_WINDOW_MAX);
	if (p->top_logprobs > SAMPLE_LOGPROBS_MAX)
		return fail(ret_error, -ERANGE, "top_logprobs must be at most %d", SAMPLE_LOGPROBS_MAX);
	if (p->n_bias > n_vocab)
		return fail(ret_error, -ERANGE, "logit_bias has more entries than the vocabulary");
	for (size_t i = 0; i < p->n_bias; i++) {
		if (p->bias[i].token < 0 || (uint32_t)p->bias[i].token >= n_vocab)
			return fail(ret_error, -ERANGE,
				    "logit_bias: token %d is not in the vocabulary of %u",
				    p->bias[i].token, n_vocab);
		if (!(fabsf(p->bias[i].bias) <= 1000))
			return fail(ret_error, -ERANGE,
				    "logit_bias of token %d must be from -1000 to 1000",
				    p->bias[i].token);
	}
	return 0;
}

static uint64_t splitmix64(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
	return z ^ (z >> 31);
}

static uint64_t rotate_left(uint64_t x, int n)
{
	return (x << n) | (x >> (64 - n));
}

/* xoshiro256** of Blackman and Vigna. */
static uint64_t random_next(uint64_t s[4])
{
	uint64_t result = rotate_left(s[1] * 5, 7) * 9, t = s[1] << 17;

	s[2] ^= s[0];
	s[3] ^= s[1];
	s[1] ^= s[2];
	s[0] ^= s[3];
	s[2] ^= t;
	s[3] = rotate_left(s[3], 45);
	return result;
}

/* In [0, 1), all 53 bits of a double's precision. */
static double random_unit(uint64_t s[4])
{
	return (double)(random_next(s) >> 11) * 0x1p-53;
}

static bool penalises(const struct sample_params *p)
{
	return p->penalty_last_tok > 0 &&
	       (p->repeat_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0);
}

int sampler_new(const struct sample_params *p, uint32_t n_vocab, struct sampler **ret)
{
	_cleanup_(sampler_freep) struct sampler *s = NULL;
	uint64_t seed = p->seed;
	size_t n_touched;

	if (n_vocab == 0 || n_vocab > INT32_MAX || sample_params_check(p, n_vocab, NULL) < 0)
		return -EINVAL;
	s = calloc(1, sizeof(*s));
	if (!s)
		return -ENOMEM;
	s->params = *p;
	s->n_vocab = n_vocab;
	for (int i = 0; i < 4; i++)
		s->rng[i] = splitmix64(&seed);
	n_touched = p->n_bias;
	if (penalises(p)) {
		s->window = calloc(p->penalty_last_tok, sizeof(*s->window));
		s->count = calloc(n_vocab, sizeof(*s->count));
		if (!s->window || !s->count)
			return -ENOMEM;
		n_touched += p->penalty_last_tok;
	}
	if (n_touched > 0) {
		s->touched = calloc(n_touched, sizeof(*s->touched));
		if (!s->touched)
			return -ENOMEM;
	}
	if (p->temperature > 0) {
		s->n_room = p->top_k > 0 ? MIN(p->top_k, n_vocab) : n_vocab;
		s->candidates = calloc(s->n_room, sizeof(*s->candidates));
		if (!s->candidates)
			return -ENOMEM;
	}
	*ret = TAKE_PTR(s);
	return 0;
}

struct sampler *sampler_free(struct sampler *s)
{
	if (!s)
		return NULL;
	free(s->window);
	free(s->count);
	free(s->candidates);
	free(s->touched);
	free(s);
	return NULL;
}

void sampler_accept(struct sampler *s, int32_t token)
{
	if (!s->count || token < 0 || (uint32_t)token >= s->n_vocab)
		return;
	if (s->n_window == s->params.penalty_last_tok)
		s->count[s->window[s->head]]--;
	else
		s->n_window++;
	s->window[s->head] = token;
	s->head = (s->head + 1) % s->params.penalty_last_tok;
	s->count[token]++;
}

/* Changes a logit, remembering what it was for the log-probability of the chosen token. */
static void touch(struct sampler *s, float *logits, int32_t token, double value)
{
	s->touched[s->n_touched++] = (struct touched){ token, logits[token] };
	/* Finite as long as the model's own is: -inf means "never" and comes from the model
	 * only. */
	logits[token] = isfinite(logits[token])
				? (float)CLAMP(value, -(double)FLT_MAX, (double)FLT_MAX)
				: -INFINITY;
}

static void apply_bias(struct sampler *s, float *logits)
{
	for (size_t i = 0; i < s->params.n_bias; i++) {
		const struct logit_bias *b = &s->params.bias[i];

		touch(s, logits, b->token, (double)logits[b->token] + (double)b->bias);
	}
}

static void apply_penalties(struct sampler *s, float *logits)
{
	const struct sample_params *p = &s->params;

	for (uint32_t i = 0; i < s->n_window; i++) {
		int32_t token = s->window[i];
		double logit = (double)logits[token];

		if (s->count[token] & COUNT_MARK)
			continue;
		logit = logit > 0 ? logit / (double)p->repeat_penalty
				  : logit * (double)p->repeat_penalty;
		logit -= (double)p->presence_penalty + (double)p->frequency_penalty * s->count[token];
		touch(s, logits, token, logit);
		s->count[token] |= COUNT_MARK;
	}
	for (uint32_t i = 0; i < s->n_window; i++)
		s->count[s->window[i]] &= (uint16_t)~COUNT_MARK;
}

/* Before in the order of the candidates: higher logit, then lower id. */
static bool better(const struct candidate *a, const struct candidate *b)
{
	return a->logit != b->logit ? a->logit > b->logit : a->token < b->token;
}

static bool worse(const struct candidate *a, const struct candidate *b)
{
	return better(b, a);
}

/* Nearer to the entropy (the weight is the distance here), then in the order of the candidates. */
static bool more_typical(const struct candidate *a, const struct candidate *b)
{
	return a->weight != b->weight ? a->weight < b->weight : better(a, b);
}

typedef bool order_func(const struct candidate *a, const struct candidate *b);

/* heap[0] is the first by order. */
static void heap_sift(struct candidate *heap, size_t n, size_t i, order_func *before)
{
	struct candidate moved = heap[i];

	for (;;) {
		size_t child = 2 * i + 1;

		if (child >= n)
			break;
		if (child + 1 < n && before(&heap[child + 1], &heap[child]))
			child++;
		if (!before(&heap[child], &moved))
			break;
		heap[i] = heap[child];
		i = child;
	}
	heap[i] = moved;
}

static void heap_build(struct candidate *heap, size_t n, order_func *before)
{
	for (size_t i = n / 2; i-- > 0;)
		heap_sift(heap, n, i, before);
}

/* Moves the first of the heap behind its shrunken end. */
static struct candidate *heap_pop(struct candidate *heap, size_t *n, order_func *before)
{
	struct candidate first = heap[0];

	heap[0] = heap[--*n];
	heap[*n] = first;
	heap_sift(heap, *n, 0, before);
	return &heap[*n];
}

static void reverse(struct candidate *c, size_t n)
{
	for (size_t i = 0; i < n / 2; i++) {
		struct candidate t = c[i];

		c[i] = c[n - 1 - i];
		c[n - 1 - i] = t;
	}
}

/* The n best finite logits of all, best first, by a heap that has its worst on top. */
static size_t select_best(const float *logits, uint32_t n_vocab, struct candidate *best, size_t n)
{
	size_t have = 0, left;

	for (uint32_t i = 0; i < n_vocab; i++) {
		struct candidate c = { .logit = logits[i], .token = (int32_t)i };

		if (!isfinite(c.logit) || (have == n && !better(&c, &best[0])))
			continue;
		if (have < n) {
			best[have++] = c;
			if (have == n)
				heap_build(best, n, worse);
		} else {
			best[0] = c;
			heap_sift(best, n, 0, worse);
		}
	}
	if (have < n)
		heap_build(best, have, worse);
	for (left = have; left > 1;)
		heap_pop(best, &left, worse);
	return have;
}

static size_t select_all(const float *logits, uint32_t n_vocab, struct candidate *all)
{
	size_t n = 0;

	for (uint32_t i = 0; i < n_vocab; i++)
		if (isfinite(logits[i]))
			all[n++] = (struct candidate){ .logit = logits[i], .token = (int32_t)i };
	return n;
}

static double highest_logit(const struct sampler *s)
{
	double highest = -INFINITY;

	for (size_t i = 0; i < s->n_candidates; i++)
		highest = MAX(highest, (double)s->candidates[i].logit);
	return highest;
}

/* Sets weights relative to the best candidate's and returns their sum. temperature 1 leaves the
 * model's own distribution. */
static double weigh(struct sampler *s, double temperature)
{
	double highest = highest_logit(s), sum = 0;

	for (size_t i = 0; i < s->n_candidates; i++) {
		struct candidate *c = &s->candidates[i];

		c->weight = exp(((double)c->logit - highest) / temperature);
		sum += c->weight;
	}
	return sum;
}

/* Locally typical sampling (Meister et al.): keeps the fewest candidates that have typical_p of the
 * mass, those first whose surprise (-log p) is nearest to the entropy, which is its mean. */
static void filter_typical(struct sampler *s)
{
	double sum = weigh(s, 1), total = highest_logit(s) + log(sum), entropy = 0, mass = 0;
	size_t left = s->n_candidates, kept = 0;

	for (size_t i = 0; i < s->n_candidates; i++) {
		const struct candidate *c = &s->candidates[i];

		if (c->weight > 0)
			entropy += c->weight / sum * (total - (double)c->logit);
	}
	for (size_t i = 0; i < s->n_candidates; i++) {
		struct candidate *c = &s->candidates[i];

		c->weight = fabs(total - (double)c->logit - entropy);
	}
	heap_build(s->candidates, left, more_typical);
	while (left > 0 && mass < (double)s->params.typical_p) {
		const struct candidate *c = heap_pop(s->candidates, &left, more_typical);

		mass += exp((double)c->logit - total);
		kept++;
	}
	memmove(s->candidates, s->candidates + left, kept * sizeof(*s->candidates));
	s->n_candidates = kept;
}

/*
 * Keeps the fewest best candidates that have top_p of the mass, and of these the ones with at
 * least min_p of the best one's probability; best first. What is dropped before sorting cannot be
 * among them: it is below min_p, or so small that all such candidates together are less than the
 * 1 - top_p that may go. So the heap stays small for a big vocabulary.
 */
static void filter_top_min(struct sampler *s)
{
	double sum = weigh(s, 1), mass = 0;
	double least = MAX((1 - (double)s->params.top_p) * sum / (double)s->n_candidates,
			   (double)s->params.min_p);
	size_t n = 0, left, kept = 0;

	for (size_t i = 0; i < s->n_candidates; i++)
		if (s->candidates[i].weight >= least)
			s->candidates[n++] = s->candidates[i];
	left = n;
	heap_build(s->candidates, left, better);
	while (left > 0 && (s->params.top_p >= 1 || mass < (double)s->params.top_p * sum)) {
		mass += heap_pop(s->candidates, &left, better)->weight;
		kept++;
	}
	memmove(s->candidates, s->candidates + left, kept * sizeof(*s->candidates));
	s->n_candidates = kept;
	reverse(s->candidates, kept);
}

/* Leaves in s->candidates what the filters let through: each sees what the one before it left. */
static void filter(struct sampler *s, const float *logits)
{
	const struct sample_params *p = &s->params;

	if (s->n_room < s->n_vocab)
		s->n_candidates = select_best(logits, s->n_vocab, s->candidates, s->n_room);
	else
		s->n_candidates = select_all(logits, s->n_vocab, s->candidates);
	if (p->typical_p < 1)
		filter_typical(s);
	if (p->top_p < 1 || p->min_p > 0)
		filter_top_min(s);
}

static int32_t draw(struct sampler *s)
{
	double target = random_unit(s->rng) * weigh(s, (double)s->params.temperature), mass = 0;
	size_t chosen = 0;

	for (size_t i = 0; i < s->n_candidates; i++) {
		if (s->candidates[i].weight <= 0)
			continue;
		chosen = i;
		mass += s->candidates[i].weight;
		if (mass > target)
			break;
	}
	return s->candidates[chosen].token;
}

/* Log of the sum of exp over all finite logits. */
static double log_sum(const float *logits, uint32_t n)
{
	double highest = -INFINITY, sum = 0;

	for (uint32_t i = 0; i < n; i++)
		if (isfinite(logits[i]))
			highest = MAX(highest, (double)logits[i]);
	for (uint32_t i = 0; i < n; i++)
		if (isfinite(logits[i]))
			sum += exp((double)logits[i] - highest);
	return highest + log(sum);
}

static float raw_logit(const struct sampler *s, const float *logits, int32_t token)
{
	for (size_t i = 0; i < s->n_touched; i++)
		if (s->touched[i].token == token)
			return s->touched[i].logit;
	return logits[token];
}

static bool best_token(const float *logits, uint32_t n, int32_t *ret)
{
	bool found = false;
	uint32_t best = 0;

	for (uint32_t i = 0; i < n; i++)
		if (isfinite(logits[i]) && (!found || logits[i] > logits[best])) {
			best = i;
			found = true;
		}
	if (found)
		*ret = (int32_t)best;
	return found;
}

int sampler_pick(struct sampler *s, float *logits, int32_t *ret_token, struct logprob *ret_chosen,
		 struct logprob *ret_top, size_t *ret_n_top)
{
	struct candidate top[SAMPLE_LOGPROBS_MAX];
	size_t n_top = MIN(s->params.top_logprobs, s->n_vocab);
	double total = 0;
	int32_t token;

	if (!best_token(logits, s->n_vocab, &token))
		return -EDOM;
	if (n_top > 0)
		n_top = select_best(logits, s->n_vocab, top, n_top);
	if (n_top > 0 || ret_chosen)
		total = log_sum(logits, s->n_vocab);

	s->n_touched = 0;
	apply_bias(s, logits);
	apply_penalties(s, logits);
	if (s->params.temperature > 0) {
		filter(s, logits);
		token = draw(s);
	} else {
		best_token(logits, s->n_vocab, &token);
	}

	if (ret_chosen)
		*ret_chosen = (struct logprob){ token,
						(float)((double)raw_logit(s, logits, token) - total) };
	for (size_t i = 0; i < n_top; i++)
		ret_top[i] = (struct logprob){ top[i].token, (float)((double)top[i].logit - total) };
	if (ret_n_top)
		*ret_n_top = n_top;
	*ret_token = token;
	return 0;
}
