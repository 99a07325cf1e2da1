/* SPDX-License-Identifier: MIT */
/*
 * quant.c: the table behind quant.h: every tensor element type of current GGUF, by number.
 *
 * Owns that table and nothing else; callable from any thread. Refuses to know what the bytes of a
 * block mean: the kernels do. Invariant: an entry without a name is no type, and no entry with a
 * name has a block of zero elements or zero bytes, so that callers may divide by either.
 */
#include "kernels/cpu/quant.h"

/* Numbers 4, 5, 31-33 and 36-38 were types once and have been removed from the format: no entry. */
static const struct quant_info types[] = {
	[QUANT_F32] = { "F32", 1, 4 },
	[QUANT_F16] = { "F16", 1, 2 },
	[QUANT_Q4_0] = { "Q4_0", QK_0, sizeof(struct block_q4_0) },
	[QUANT_Q4_1] = { "Q4_1", QK_0, sizeof(struct block_q4_1) },
	[QUANT_Q5_0] = { "Q5_0", QK_0, sizeof(struct block_q5_0) },
	[QUANT_Q5_1] = { "Q5_1", QK_0, sizeof(struct block_q5_1) },
	[QUANT_Q8_0] = { "Q8_0", QK_0, sizeof(struct block_q8_0) },
	[9] = { "Q8_1", 32, 36 },
	[QUANT_Q2_K] = { "Q2_K", QK_K, sizeof(struct block_q2_k) },
	[QUANT_Q3_K] = { "Q3_K", QK_K, sizeof(struct block_q3_k) },
	[QUANT_Q4_K] = { "Q4_K", QK_K, sizeof(struct block_q4_k) },
	[QUANT_Q5_K] = { "Q5_K", QK_K, sizeof(struct block_q5_k) },
	[QUANT_Q6_K] = { "Q6_K", QK_K, sizeof(struct block_q6_k) },
	[QUANT_Q8_K] = { "Q8_K", QK_K, sizeof(struct block_q8_k) },
	[QUANT_IQ2_XXS] = { "IQ2_XXS", QK_K, sizeof(struct block_iq2_xxs) },
	[QUANT_IQ2_XS] = { "IQ2_XS", QK_K, sizeof(struct block_iq2_xs) },
	[QUANT_IQ3_XXS] = { "IQ3_XXS", QK_K, sizeof(struct block_iq3_xxs) },
	[19] = { "IQ1_S", 256, 50 },
	[QUANT_IQ4_NL] = { "IQ4_NL", QK_0, sizeof(struct block_iq4_nl) },
	[21] = { "IQ3_S", 256, 110 },
	[22] = { "IQ2_S", 256, 82 },
	[QUANT_IQ4_XS] = { "IQ4_XS", QK_K, sizeof(struct block_iq4_xs) },
	[24] = { "I8", 1, 1 },
	[25] = { "I16", 1, 2 },
	[26] = { "I32", 1, 4 },
	[27] = { "I64", 1, 8 },
	[28] = { "F64", 1, 8 },
	[29] = { "IQ1_M", 256, 56 },
	[QUANT_BF16] = { "BF16", 1, 2 },
	[34] = { "TQ1_0", 256, 54 },
	[35] = { "TQ2_0", 256, 66 },
	[QUANT_MXFP4] = { "MXFP4", QK_0, sizeof(struct block_mxfp4) },
	[40] = { "NVFP4", 64, 36 },
	[41] = { "Q1_0", 128, 18 },
	[42] = { "Q2_0", 64, 18 },
};

_Static_assert(sizeof(types) / sizeof(types[0]) <= QUANT_TYPE_MAX, "QUANT_TYPE_MAX");

const struct quant_info *quant_info(uint32_t type)
{
	if (type >= sizeof(types) / sizeof(types[0]) || !types[type].name)
		return NULL;
	return &types[type];
}

bool quant_has_kernel(uint32_t type)
{
	/*
	 * Over a bare number, not an enum quant_type: most numbers of a file are outside the enum.
	 */
	switch (type) {
	case QUANT_F32:
	case QUANT_F16:
	case QUANT_BF16:
	case QUANT_Q8_0:
	case QUANT_Q4_0:
	case QUANT_Q4_1:
	case QUANT_Q5_0:
	case QUANT_Q5_1:
	case QUANT_MXFP4:
	case QUANT_IQ4_NL:
	case QUANT_Q2_K:
	case QUANT_Q3_K:
	case QUANT_Q4_K:
	case QUANT_Q5_K:
	case QUANT_Q6_K:
	case QUANT_IQ2_XXS:
	case QUANT_IQ2_XS:
	case QUANT_IQ3_XXS:
	case QUANT_IQ4_XS: return true;
	default: return false;
	}
}

size_t quant_row_bytes(uint32_t type, size_t n)
{
	const struct quant_info *info = quant_info(type);
	size_t bytes;

	if (!info || n % info->block_elems != 0)
		return 0;
	if (__builtin_mul_overflow(n / info->block_elems, info->block_bytes, &bytes))
		return 0;
	return bytes;
}
