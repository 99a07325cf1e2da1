/* SPDX-License-Identifier: MIT */
/*
 * prefetch.h: whether guessing the next layer's experts pays. Pure: fed with what happened, no clock of its own.
 *
 * Owned by residency.c. A guess costs a router product a layer and, when wrong, a read that delays a right one; so it is used only where
 * the disk is the bottleneck (steps wait for it a tenth of the time), guesses prove right nineteen times in twenty in rare trial
 * steps without reads, and then steps with reads ahead measure faster than steps without.
 */
#pragma once

#include "daemon/base.h"

enum prefetch_phase { PREFETCH_OFF, PREFETCH_TRIAL_OFF, PREFETCH_TRIAL_ON, PREFETCH_ON };

struct prefetch {
	int mode; /* -1: as measured, 0: never, 1: always */
	enum prefetch_phase phase;
	uint32_t n;              /* steps in this phase */
	uint64_t us, stall_us;   /* summed over them */
	uint64_t right, guessed; /* missing blocks that were guessed, and of them wanted; aged */
	uint64_t off_us;         /* a step of PREFETCH_TRIAL_OFF, mean */
};

void prefetch_init(struct prefetch *p, int mode);
/* For the step that begins: make guesses? read them ahead? (guesses without reads only count.) */
bool prefetch_guess(const struct prefetch *p);
bool prefetch_read(const struct prefetch *p);
/* n missing blocks had been guessed for a layer, `right` of them were wanted. */
void prefetch_judge(struct prefetch *p, uint32_t guessed, uint32_t right);
/* A decode step took us, of them stall_us waiting for the disk. True: reading ahead was switched on or off. */
bool prefetch_step(struct prefetch *p, uint64_t us, uint64_t stall_us);
