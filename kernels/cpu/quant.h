/* SPDX-License-Identifier: MIT */
/*
 * quant.h: the tensor element types of GGUF and the layout of their blocks.
 *
 * The one place that knows type numbers, names, block sizes and block structs; used by the GGUF reader, by every kernel
 * (CPU and CUDA) and by tests. Refuses to know how anything is computed. Numbers are those of the file format (ggml).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum quant_type {
	QUANT_F32 = 0,
	QUANT_F16 = 1,
	QUANT_Q4_0 = 2,
	QUANT_Q4_1 = 3,
	QUANT_Q5_0 = 6,
	QUANT_Q5_1 = 7,
	QUANT_Q8_0 = 8,
	QUANT_Q2_K = 10,
	QUANT_Q3_K = 11,
	QUANT_Q4_K = 12,
	QUANT_Q5_K = 13,
	QUANT_Q6_K = 14,
	QUANT_Q8_K = 15, /* activations only: never in a file that we accept */
	QUANT_IQ2_XXS = 16,
	QUANT_IQ2_XS = 17,
	QUANT_IQ3_XXS = 18,
	QUANT_IQ4_NL = 20,
	QUANT_IQ4_XS = 23,
	QUANT_BF16 = 30,
	QUANT_MXFP4 = 39,
	QUANT_TYPE_MAX = 64, /* bound of tables indexed by type */
};

/* One known type: name as llama.cpp prints it ("Q4_K"), elements and bytes of one block. */
struct quant_info {
	const char *name;
	uint32_t block_elems, block_bytes;
};

/* NULL when the number is not a type of current GGUF (removed numbers too). */
const struct quant_info *quant_info(uint32_t type);
/* true when kernels/cpu computes with weights of this type. */
bool quant_has_kernel(uint32_t type);
/* Bytes of a row of n elements; 0 when the type is unknown, n is no multiple of the block, or the size overflows. */
size_t quant_row_bytes(uint32_t type, size_t n);

#define QK_0 32  /* elements of a Q4_0, Q8_0, MXFP4 block */
#define QK_K 256 /* elements of a K-quant super-block */

struct block_q4_0 {
	uint16_t d; /* f16 scale */
	uint8_t qs[QK_0 / 2];
};

struct block_q4_1 {
	uint16_t d, m; /* f16 scale and minimum */
	uint8_t qs[QK_0 / 2];
};

struct block_q5_0 {
	uint16_t d;
	uint8_t qh[QK_0 / 8]; /* fifth bits, little-endian */
	uint8_t qs[QK_0 / 2];
};

struct block_q5_1 {
	uint16_t d, m;
	uint8_t qh[QK_0 / 8];
	uint8_t qs[QK_0 / 2];
};

struct block_q8_0 {
	uint16_t d;
	int8_t qs[QK_0];
};

struct block_mxfp4 {
	uint8_t e; /* E8M0 exponent */
	uint8_t qs[QK_0 / 2];
};

/* Values of a table of 16 (kernels/cpu/codebook.h). */
struct block_iq4_nl {
	uint16_t d;
	uint8_t qs[QK_0 / 2];
};

struct block_q2_k {
	uint8_t scales[QK_K / 16]; /* of 16 elements: scale below, min above */
	uint8_t qs[QK_K / 4];
	uint16_t d, dmin;
};

struct block_q3_k {
	uint8_t hmask[QK_K / 8], qs[QK_K / 4];
	uint8_t scales[12]; /* 16 of 6 bits */
	uint16_t d;
};

struct block_q4_k {
	uint16_t d, dmin;
	uint8_t scales[12]; /* 8 scales and 8 mins of 6 bits */
	uint8_t qs[QK_K / 2];
};

struct block_q5_k {
	uint16_t d, dmin;
	uint8_t scales[12];
	uint8_t qh[QK_K / 8];
	uint8_t qs[QK_K / 2];
};

struct block_q6_k {
	uint8_t ql[QK_K / 2], qh[QK_K / 4];
	int8_t scales[QK_K / 16];
	uint16_t d;
};

/* Groups of 8 or 4 elements by index into a codebook (kernels/cpu/codebook.h), with signs and scales. */
struct block_iq2_xxs {
	uint16_t d;
	uint16_t qs[QK_K / 8];
};

struct block_iq2_xs {
	uint16_t d;
	uint16_t qs[QK_K / 8];
	uint8_t scales[QK_K / 32];
};

struct block_iq3_xxs {
	uint16_t d;
	uint8_t qs[3 * QK_K / 8];
};

struct block_iq4_xs {
	uint16_t d;
	uint16_t scales_h;
	uint8_t scales_l[QK_K / 64];
	uint8_t qs[QK_K / 2];
};

/* Activations that multiply K-quants: 8 bits, one float scale per 256, and sums of 16 for the mins. */
struct block_q8_k {
	float d;
	int8_t qs[QK_K];
	int16_t bsums[QK_K / 16];
};

_Static_assert(sizeof(struct block_q4_0) == 18, "q4_0");
_Static_assert(sizeof(struct block_q4_1) == 20, "q4_1");
_Static_assert(sizeof(struct block_q5_0) == 22, "q5_0");
_Static_assert(sizeof(struct block_q5_1) == 24, "q5_1");
_Static_assert(sizeof(struct block_q8_0) == 34, "q8_0");
_Static_assert(sizeof(struct block_iq4_nl) == 18, "iq4_nl");
_Static_assert(sizeof(struct block_q2_k) == 84, "q2_k");
_Static_assert(sizeof(struct block_q3_k) == 110, "q3_k");
_Static_assert(sizeof(struct block_iq2_xxs) == 66, "iq2_xxs");
_Static_assert(sizeof(struct block_iq2_xs) == 74, "iq2_xs");
_Static_assert(sizeof(struct block_iq3_xxs) == 98, "iq3_xxs");
_Static_assert(sizeof(struct block_iq4_xs) == 136, "iq4_xs");
_Static_assert(sizeof(struct block_mxfp4) == 17, "mxfp4");
_Static_assert(sizeof(struct block_q4_k) == 144, "q4_k");
_Static_assert(sizeof(struct block_q5_k) == 176, "q5_k");
_Static_assert(sizeof(struct block_q6_k) == 210, "q6_k");
_Static_assert(sizeof(struct block_q8_k) == 292, "q8_k");
