/* SPDX-License-Identifier: MIT */
/*
 * topology.h: which CPUs a pool of compute threads should run on, from what the kernel says of cores and NUMA nodes.
 *
 * Owns nothing, any thread. Hyperthreads of a core share what arithmetic needs, and another node's memory is far: so physical cores come
 * first, and one node where it is enough. Refuses to know threads and models.
 */
#pragma once

#include <sched.h>

/* Physical cores, of the node that has most of them, that are among `allowed`: at least 1. sys: "/sys/devices/system", another folder in tests. */
unsigned topology_cores(const char *sys, const cpu_set_t *allowed);
/*
 * The CPUs for n threads, of those allowed: one CPU of each physical core of one node, of other nodes' cores if those are too few, then the
 * cores' other CPUs; all that are allowed when n is more. What the kernel does not say is taken for a core of its own on one node. Returns their number.
 */
unsigned topology_choose(const char *sys, const cpu_set_t *allowed, unsigned n, cpu_set_t *ret);
