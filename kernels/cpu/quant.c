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
	[3] = { "Q4_1", 32, 20 },
	[6] = { "Q5_0", 32, 22 },
	[7] = { "Q5_1", 32, 24 },
	[QUANT_Q8_0] = { "Q8_0", QK_0, sizeof(struct block_q8_0) },
	[9] = { "Q8_1", 32, 36 },
	[10] = { "Q2_K", 256, 84 },
	[11] = { "Q3_K", 256, 110 },
	[QUANT_Q4_K] = { "Q4_K", QK_K, sizeof(struct block_q4_k) },
	[QUANT_Q5_K] = { "Q5_K", QK_K, sizeof(struct block_q5_k) },
	[QUANT_Q6_K] = { "Q6_K", QK_K, sizeof(struct block_q6_k) },
	[QUANT_Q8_K] = { "Q8_K", QK_K, sizeof(struct block_q8_k) },
	[16] = { "IQ2_XXS", 256, 66 },
	[17] = { "IQ2_XS", 256, 74 },
	[18] = { "IQ3_XXS", 256, 98 },
	[19] = { "IQ1_S", 256, 50 },
	[20] = { "IQ4_NL", 32, 18 },
	[21] = { "IQ3_S", 256, 110 },
	[22] = { "IQ2_S", 256, 82 },
	[23] = { "IQ4_XS", 256, 136 },
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
	case QUANT_Q4_0:
	case QUANT_Q8_0:
	case QUANT_Q4_K:
	case QUANT_Q5_K:
	case QUANT_Q6_K:
	case QUANT_MXFP4: return true;
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
