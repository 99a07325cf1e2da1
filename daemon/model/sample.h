/* SPDX-License-Identifier: MIT */
/*
 * sample.h: the next token from logits.
 *
 * Owns a random state and the window of recent tokens for penalties; one sampler per request, used by the engine thread
 * only. Pure: same parameters, same seed, same logits give the same token on any machine (the generator is our own).
 * Order of operations: logit bias, penalties, then greedy if temperature is 0; else temperature-free filters top-k,
 * typical, top-p, min-p, and last the temperature.
 */
#pragma once

#include "daemon/base.h"

struct sampler;

struct logit_bias {
	int32_t token;
	float bias;
};

struct sample_params {
	float temperature; /* 0: greedy */
	uint32_t top_k;    /* 0: off */
	float top_p;       /* 1: off */
	float min_p;       /* 0: off */
	float typical_p;   /* 1: off */
	float repeat_penalty; /* 1: off; divides positive and multiplies negative logits of recent tokens */
	float presence_penalty, frequency_penalty; /* 0: off */
	uint32_t penalty_last_tok; /* window, at most SAMPLE_WINDOW_MAX; 0: no penalties */
	uint64_t seed;
	const struct logit_bias *bias; /* not owned: kept by the request */
	size_t n_bias;
	uint32_t top_logprobs; /* how many alternatives to report, at most SAMPLE_LOGPROBS_MAX */
};

#define SAMPLE_WINDOW_MAX   8192
#define SAMPLE_LOGPROBS_MAX 20

struct logprob {
	int32_t token;
	float logprob; /* natural log, of the distribution before penalties, filters and temperature */
};

void sample_params_default(struct sample_params *p); /* temperature 0.7, top_k 40, top_p 0.95, min_p 0.05, window 64 */
/* -ERANGE with an error text naming the field when a value is out of range or not finite. */
int sample_params_check(const struct sample_params *p, uint32_t n_vocab, char **ret_error);

int sampler_new(const struct sample_params *p, uint32_t n_vocab, struct sampler **ret);
struct sampler *sampler_free(struct sampler *s);
DEFINE_CLEANUP(struct sampler *, sampler_free)
void sampler_accept(struct sampler *s, int32_t token); /* remembers a token (prompt or generated) for penalties */
/* Picks from logits[n_vocab] (changed in place). ret_top: room for top_logprobs entries, best first; ret_chosen may be NULL:
 * the chosen token's own log-probability. -EDOM when no logit is finite. Does not call sampler_accept(). */
int sampler_pick(struct sampler *s, float *logits, int32_t *ret_token, struct logprob *ret_chosen,
		 struct logprob *ret_top, size_t *ret_n_top);
