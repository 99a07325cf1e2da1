/* SPDX-License-Identifier: MIT */
/*
 * prefetch.c: when to read ahead. See prefetch.h.
 *
 * Owns nothing but the struct. Engine thread. Invariant: with mode 0 or 1 nothing is measured; with -1 reading ahead is on only after
 * a trial that was faster than the one without beside it.
 */
#include "daemon/residency/prefetch.h"

/* Steps of a window: long enough that a few misses more or less do not decide. */
#define WINDOW_STEPS  64
/* Every so many steps one with guesses that are only counted: a router product a layer is about 1 % of a step. */
#define SAMPLE_EVERY  32
/* How long a verdict stands before it is tried again, in steps. */
#define VERDICT_STEPS 2048
/* Below this share of waiting there is nothing to win. */
#define STALL_PERCENT 10
/*
 * A wrong guess is a read for nothing, which takes the disk from a right one, wears it, and pushes something out. At most a twentieth of what
 * is read may be that, and guesses are of nearly all that is missing. (A random model's guesses are right three times in five: reading
 * them ahead won nothing in tokens, and 8 % more was read.)
 */
#define RIGHT_PERCENT 95
/* Guesses before the share of right ones is believed. */
#define GUESSED_MIN   64
/* What a trial has to win; less is noise. */
#define GAIN_PERCENT  3

void prefetch_init(struct prefetch *p, int mode)
{
	*p = (struct prefetch){ .mode = mode, .phase = mode > 0 ? PREFETCH_ON : PREFETCH_OFF };
}

bool prefetch_read(const struct prefetch *p)
{
	return p->phase == PREFETCH_ON || p->phase == PREFETCH_TRIAL_ON;
}

bool prefetch_guess(const struct prefetch *p)
{
	return prefetch_read(p) || (p->mode < 0 && p->n % SAMPLE_EVERY == SAMPLE_EVERY - 1);
}

void prefetch_judge(struct prefetch *p, uint32_t guessed, uint32_t right)
{
	p->guessed += guessed;
	p->right += right;
	if (p->guessed >= 16 * GUESSED_MIN) { /* old guesses count less and less */
		p->guessed /= 2;
		p->right /= 2;
	}
}

static void enter(struct prefetch *p, enum prefetch_phase phase)
{
	p->phase = phase;
	p->n = 0;
	p->us = p->stall_us = 0;
}

static bool right_enough(const struct prefetch *p)
{
	return p->right * 100 >= p->guessed * RIGHT_PERCENT;
}

static bool worth_a_trial(const struct prefetch *p)
{
	return p->stall_us * 100 > p->us * STALL_PERCENT && p->guessed >= GUESSED_MIN &&
	       right_enough(p);
}

bool prefetch_step(struct prefetch *p, uint64_t us, uint64_t stall_us)
{
	bool was = prefetch_read(p);

	p->n++;
	p->us += us;
	p->stall_us += stall_us;
	if (p->mode >= 0)
		return false;
	switch (p->phase) {
	case PREFETCH_OFF:
		if (p->n % WINDOW_STEPS > 0)
			break;
		if (worth_a_trial(p))
			enter(p, PREFETCH_TRIAL_OFF);
		p->us = p->stall_us = 0;
		break;
	case PREFETCH_TRIAL_OFF:
		if (p->n < WINDOW_STEPS)
			break;
		p->off_us = p->us / p->n;
		enter(p, PREFETCH_TRIAL_ON);
		break;
	case PREFETCH_TRIAL_ON:
		if (p->n < WINDOW_STEPS)
			break;
		if (p->us / p->n * 100 < p->off_us * (100 - GAIN_PERCENT)) {
			enter(p, PREFETCH_ON);
		} else {
			enter(p, PREFETCH_OFF);
			p->guessed = p->right = 0; /* not again before new guesses have proved good */
		}
		break;
	case PREFETCH_ON:
		if (p->n % WINDOW_STEPS == 0 && !right_enough(p))
			enter(p, PREFETCH_OFF);
		else if (p->n >= VERDICT_STEPS)
			enter(p, PREFETCH_TRIAL_OFF);
		break;
	}
	return prefetch_read(p) != was;
}
