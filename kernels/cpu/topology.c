/* SPDX-License-Identifier: MIT */
/*
 * topology.c: see topology.h.
 *
 * Every allowed CPU gets a rank among its core's and a node; those with the lowest rank of the
 * fullest node come first. Files are the kernel's, but a container may show none of them or half:
 * what is missing or odd makes a CPU a core of its own on node 0.
 */
#include "kernels/cpu/topology.h"

#include "daemon/base.h"

#include <stdio.h>

#define NODES_MAX 64

struct cpu {
	unsigned id, rank, node; /* rank: how many allowed CPUs of its core come before it */
};

/* The next number or range of a list as in "0-3,8"; false: there is none. */
static bool next_range(FILE *f, unsigned *first, unsigned *last)
{
	int n = fscanf(f, "%u-%u", first, last);

	if (n < 1)
		return false;
	if (n == 1)
		*last = *first;
	(void)!fscanf(f, ",");
	return *first <= *last;
}

static unsigned rank_of(const char *sys, const cpu_set_t *allowed, unsigned cpu)
{
	_cleanup_(fclosep) FILE *f = NULL;
	unsigned first, last, rank = 0;
	char path[512];

	snprintf(path, sizeof(path), "%s/cpu/cpu%u/topology/thread_siblings_list", sys, cpu);
	f = fopen(path, "re");
	while (f && next_range(f, &first, &last))
		for (unsigned i = first; i <= last && i < cpu; i++)
			rank += i < CPU_SETSIZE && CPU_ISSET(i, allowed);
	return rank;
}

/* The node of every CPU. */
static void read_nodes(const char *sys, unsigned node_of[CPU_SETSIZE])
{
	memset(node_of, 0, CPU_SETSIZE * sizeof(*node_of));
	for (unsigned node = 0; node < NODES_MAX; node++) {
		_cleanup_(fclosep) FILE *f = NULL;
		unsigned first, last;
		char path[512];

		snprintf(path, sizeof(path), "%s/node/node%u/cpulist", sys, node);
		f = fopen(path, "re");
		while (f && next_range(f, &first, &last))
			for (unsigned i = first; i <= last && i < CPU_SETSIZE; i++)
				node_of[i] = node;
	}
}

/* All allowed CPUs; *ret_node: the one with most cores. Returns how many there are. */
static unsigned read_cpus(const char *sys, const cpu_set_t *allowed, struct cpu cpus[CPU_SETSIZE],
			  unsigned *ret_node, unsigned *ret_cores)
{
	unsigned node_of[CPU_SETSIZE], cores[NODES_MAX] = { 0 }, n = 0, best = 0;

	read_nodes(sys, node_of);
	for (unsigned i = 0; i < CPU_SETSIZE; i++) {
		if (!CPU_ISSET(i, allowed))
			continue;
		cpus[n] = (struct cpu){ i, rank_of(sys, allowed, i), node_of[i] };
		cores[node_of[i]] += cpus[n++].rank == 0;
	}
	for (unsigned i = 1; i < NODES_MAX; i++)
		best = cores[i] > cores[best] ? i : best;
	*ret_node = best;
	*ret_cores = cores[best];
	return n;
}

unsigned topology_cores(const char *sys, const cpu_set_t *allowed)
{
	struct cpu cpus[CPU_SETSIZE];
	unsigned node, cores;

	(void)read_cpus(sys, allowed, cpus, &node, &cores);
	return MAX(cores, 1u);
}

unsigned topology_choose(const char *sys, const cpu_set_t *allowed, unsigned n, cpu_set_t *ret)
{
	struct cpu cpus[CPU_SETSIZE];
	unsigned node, cores, n_cpus = read_cpus(sys, allowed, cpus, &node, &cores), taken = 0;

	CPU_ZERO(ret);
	for (unsigned rank = 0; rank < n_cpus && taken < MIN(n, n_cpus); rank++)
		for (unsigned pass = 0; pass < 2; pass++)
			for (unsigned i = 0; i < n_cpus && taken < n; i++) {
				if (cpus[i].rank != rank || (cpus[i].node == node) != (pass == 0))
					continue;
				CPU_SET(cpus[i].id, ret);
				taken++;
			}
	return taken;
}
