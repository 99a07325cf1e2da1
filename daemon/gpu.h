/* SPDX-License-Identifier: MIT */
/*
 * gpu.h: living with others of the GPU, as far as it is the loop thread's: when the card is looked at, what leases want left free, what is
 * said about it. Loop thread.
 *
 * The engine decides what leaves the card and what comes back. Nothing wakes the machine while there is no card.
 */
#pragma once

#include "daemon/daemon.h"

void gpu_stop(struct daemon *d);
void gpu_follow(struct daemon *d); /* struct daemon's stats were taken over, or a model is available again */
void gpu_loaded(struct daemon *d); /* a model was: says what computes it */
void gpu_card_event(struct daemon *d, struct engine_card_event *e); /* frees e */
void gpu_leases_changed(struct daemon *d);
bool gpu_in_use(const struct daemon *d); /* or waited for */

/* What all of them together want left free, beyond the reserve; UINT64_MAX: all that can be. Pure. */
uint64_t gpu_yield_bytes(const struct lease *leases);
/* One line about the card; NULL: there is nothing to say. loaded: with the model that computes from now on; else the state was `before`.
 * malloc'd. Pure. */
char *gpu_describe(const struct engine_card *card, bool loaded, enum engine_card_state before);
