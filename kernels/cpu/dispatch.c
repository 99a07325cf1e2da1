/* SPDX-License-Identifier: MIT */
/*
 * dispatch.c: which table of kernels this machine runs, and the two facts that hold for every
 * table.
 *
 * Owns nothing. Called by the CPU backend when it starts, and by tests; any thread. Never logs:
 * what is odd about the environment is returned as a note. Invariant: a table is returned only when
 * the CPU has every instruction in it.
 */
#include "kernels/cpu/cpu.h"

#include "daemon/base.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

enum quant_type cpu_act_type(enum quant_type weight)
{
	const struct quant_info *info = quant_info(weight);

	if (!info || info->block_elems < QK_0)
		return weight;
	return info->block_elems == QK_K ? QUANT_Q8_K : QUANT_Q8_0;
}

/* The keys and queries of a piece of the chunk, side by side: 16 tokens at most. */
size_t cpu_delta_scratch(size_t k_dim, size_t v_dim)
{
	(void)v_dim;

	return 2 * 16 * k_dim;
}

/*
 * Largest scores and sums, two vectors of up to 16 floats for every eight queries or less. The sum of
 * values needs none: it is made where the result goes.
 */
size_t cpu_attention_scratch(size_t n_rows, size_t n_q, size_t v_dim)
{
	(void)v_dim;

	return (n_rows * n_q + 7) / 8 * 2 * 16;
}

#if defined(__x86_64__)
static bool have_avx2(void)
{
	unsigned eax, ebx, ecx, edx;

	/*
	 * F16C by hand: clang 14 does not know its name. The builtins also check that the OS saves
	 * the registers.
	 */
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
	       __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

#if defined(__x86_64__)
static bool have_avx512(void)
{
	return have_avx2() && __builtin_cpu_supports("avx512f") &&
	       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
	       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(__aarch64__)
static bool have_dotprod(void)
{
	return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}
#endif

static bool always(void)
{
	return true;
}

/* Worst first; a machine that has one has those before it. */
static const struct {
	const struct cpu_kernels *table;
	bool (*have)(void);
} tables[] = {
	{ &cpu_kernels_ref, always },
#if defined(__x86_64__)
	{ &cpu_kernels_avx2, have_avx2 },
	{ &cpu_kernels_avx512, have_avx512 },
#elif defined(__aarch64__)
	{ &cpu_kernels_neon, always }, /* the architecture has it */
	{ &cpu_kernels_dotprod, have_dotprod },
#endif
};

const struct cpu_kernels *cpu_kernels_at(size_t i)
{
	return i < ARRAY_SIZE(tables) && tables[i].have() ? tables[i].table : NULL;
}

const struct cpu_kernels *cpu_kernels_choose(const char **ret_note)
{
	const char *wanted = getenv("RESIDENTD_CPU"), *note = NULL;
	const struct cpu_kernels *best = &cpu_kernels_ref;
	bool found = !wanted, known = !wanted;

	for (size_t i = 0; i < ARRAY_SIZE(tables); i++)
		known = known || streq(tables[i].table->name, wanted);
	for (size_t i = 0; cpu_kernels_at(i) && !(found && wanted); i++) {
		best = cpu_kernels_at(i);
		found = found || streq(best->name, wanted);
	}
	if (!known)
		note = "RESIDENTD_CPU: unknown kernel table, ignoring (known: ref, avx2, avx512, neon, dotprod)";
	else if (!found)
		note = "RESIDENTD_CPU: this CPU lacks instructions that the kernel table needs, ignoring";

	if (ret_note)
		*ret_note = note;
	return best;
}
