/* SPDX-License-Identifier: MIT */
/*
 * admission.h: should a block that was missed stay, or be the next one's place? Pure, like evict.h.
 *
 * Keeping only what is hotter than what it displaces wins on routing without memory (a random model: 2 to 5 points of hits) and loses on
 * recorded routing, which repeats itself at once (2 to 8 points). So both ways run beside each other on the routing as it comes, as
 * shadows that hold no memory, and the better one of late is used. Owned by residency.c, engine thread.
 */
#pragma once

#include "daemon/residency/evict.h"

struct admission;

int admission_new(enum evict_policy policy, uint32_t n_blocks, struct admission **ret); /* -ENOMEM */
struct admission *admission_free(struct admission *a); /* accepts NULL, returns NULL */
/* A decode step begins; capacity: blocks that the tier holds about now. */
void admission_step(struct admission *a, uint32_t capacity);
void admission_touch(struct admission *a, uint32_t block); /* wanted in this step */
bool admission_is_selective(const struct admission *a);    /* keep only what is hotter */
