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
#endif

enum quant_type cpu_act_type(enum quant_type weight)
{
	if (weight == QUANT_Q8_0 || weight == QUANT_Q4_0 || weight == QUANT_MXFP4)
		return QUANT_Q8_0;
	if (weight == QUANT_Q4_K || weight == QUANT_Q5_K || weight == QUANT_Q6_K)
		return QUANT_Q8_K;
	return weight;
}

/* The solved update of every token, and two matrices of inner products (tokens by tokens). */
size_t cpu_delta_scratch(size_t k_dim, size_t v_dim)
{
	(void)k_dim;

	return CPU_DELTA_CHUNK * v_dim + 2 * CPU_DELTA_CHUNK * CPU_DELTA_CHUNK;
}

/* A row of tiles' maxima and sums, and the weights of a tile of 64 positions, for every query; rounded up to lines. */
size_t cpu_attention_scratch(size_t n_rows, size_t n_q, size_t v_dim)
{
	return n_rows * n_q * (v_dim + 64 + 16);
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

const struct cpu_kernels *cpu_kernels_choose(const char **ret_note)
{
	const struct cpu_kernels *best = &cpu_kernels_ref;
	const char *wanted = getenv("RESIDENTD_CPU"), *note = NULL;

#if defined(__x86_64__)
	if (have_avx2())
		best = &cpu_kernels_avx2;
#endif
	if (wanted && streq(wanted, cpu_kernels_ref.name))
		best = &cpu_kernels_ref;
	else if (wanted && streq(wanted, "avx2") && !streq(best->name, wanted))
		note = "RESIDENTD_CPU=avx2: this CPU lacks AVX2, FMA or F16C, ignoring";
	else if (wanted && !streq(wanted, "avx2"))
		note = "RESIDENTD_CPU: unknown kernel table, ignoring (known: ref, avx2)";

	if (ret_note)
		*ret_note = note;
	return best;
}
