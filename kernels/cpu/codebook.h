/* SPDX-License-Identifier: MIT */
/*
 * codebook.h: what the indices in a block of an IQ type stand for: groups of magnitudes, patterns of
 * signs, and the sixteen values of IQ4_NL and IQ4_XS.
 *
 * Owns constants only. For kernels and their tests, from any thread. An entry holds one element a
 * byte, the first lowest, so that a load has them in order.
 */
#pragma once

#include <stdint.h>

extern const uint64_t codebook_iq2_xxs[256]; /* 8 magnitudes */
extern const uint64_t codebook_iq2_xs[512];
extern const uint32_t codebook_iq3_xxs[256]; /* 4 magnitudes */
extern const uint64_t codebook_signs[128];   /* 8 of 1 or -1 */
extern const int8_t codebook_iq4[16];
