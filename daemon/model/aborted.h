/* SPDX-License-Identifier: MIT */
/*
 * aborted.h: whether the caller of a long computation wants it no more.
 *
 * Owns nothing. For the parts of the tokenizer, on any thread; whoever gives up says -ECANCELED.
 * Refuses to know how often to ask. Invariant: relaxed is enough, since nothing is handed over with
 * the flag: seen late, it costs time only.
 */
#pragma once

#include "daemon/base.h"

/* abort: NULL where nobody may give up. */
static inline bool aborted(const atomic_bool *abort)
{
	return abort && atomic_load_explicit(abort, memory_order_relaxed);
}
