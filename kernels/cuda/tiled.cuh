/* SPDX-License-Identifier: MIT */
/*
 * tiled.cuh: one tile of a product of matrices, by one block. For matmul.cu, whose columns lie side
 * by side, and moe_tiled.cu, where each expert has some.
 *
 * Owns no kernel and no memory but the block's. Refuses to know where a tile's columns come from:
 * TYPE_tiled() is given a product that has no others, 1 to CUDA_TILE_COLS of them; the rows are
 * blockIdx.x's. A block may call it again. Integers are summed exactly and brought to the scale of
 * their blocks as the CPU does it. Invariant: a column's result is the same bits whatever other
 * columns are in its tile.
 */
#pragma once

#include "kernels/cuda/quant.cuh"

/*
 * Tiles: a block computes 64 rows by 64 columns, a warp 16 by 32 of them, as 4 pieces of the tensor
 * cores' 16 by 8 side by side: the weights' fragment is read once for four products. Each step
 * takes a slice of the sums' length into shared memory, weights unpacked there. Rows and columns
 * beyond the matrix repeat its last ones: nobody stores what comes of them.
 *
 * narrow, a constant: pieces beyond the columns are neither loaded nor computed, which is worth its
 * branches where tiles are seldom full. Elsewhere they would keep one piece's work from filling the
 * waits of another's.
 */
#define STEP       256 /* weights of a row that are in a slice */
#define SHARES     (STEP / SHARE)
/*
 * Words of a row of a slice, of which 4 are not used: with them the 8 rows of a fragment lie in
 * different banks.
 */
#define STEP_PITCH (STEP / 4 + 4)
#define PIECES     4

/*
 * What of its warp's tile a lane holds (the layout is that of the tensor cores): of a piece's four
 * values, 0 and 1 are in row `row`, 2 and 3 in row + 8; 0 and 2 in column `col`, 1 and 3 in the
 * next; pieces are 8 columns apart. Of fragments it holds words word and word + 4 of row `row`, row
 * + 8 and column `line`.
 */
struct place {
	uint32_t row, col, line, word;
};

DEVICE struct place tile_place(void)
{
	struct place p;

	p.word = LANE % 4;
	p.row = WARP % 4 * 16 + LANE / 4;
	p.line = WARP / 4 * 32 + LANE / 4;
	p.col = WARP / 4 * 32 + p.word * 2;
	return p;
}

/* The fragment of 16 rows and 8 words of the slice, from the word s. */
DEVICE void fragment_a(uint32_t a[4], const uint32_t *w, uint32_t pitch, struct place p, uint32_t s)
{
	const uint32_t *row = w + p.row * pitch + s + p.word;

	a[0] = row[0];
	a[1] = row[8 * pitch];
	a[2] = row[4];
	a[3] = row[8 * pitch + 4];
}

DEVICE void fragment_b(uint32_t b[2], const uint32_t *x, uint32_t pitch, struct place p, int piece,
		       uint32_t s)
{
	const uint32_t *col = x + (p.line + (uint32_t)piece * 8) * pitch + s + p.word;

	b[0] = col[0];
	b[1] = col[4];
}

/* Columns that are loaded: whole pieces. */
DEVICE uint32_t tile_cols(const struct cuda_matmul *a, bool narrow)
{
	return narrow ? (a->n_cols + 7) / 8 * 8 : CUDA_TILE_COLS;
}

/* How many of them are of this warp's part of the tile. */
DEVICE int tile_pieces(uint32_t cols)
{
	uint32_t first = WARP / 4 * 32;

	if (cols == CUDA_TILE_COLS)
		return PIECES;
	return cols > first ? min((int)(cols - first) / 8, PIECES) : 0;
}

DEVICE void tile_store(const struct cuda_matmul *a, const float acc[PIECES][4])
{
	struct place p = tile_place();

	UNROLL
	for (int piece = 0; piece < PIECES; piece++) {
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			uint32_t r = blockIdx.x * CUDA_TILE_ROWS + p.row + i / 2 * 8;
			uint32_t c = p.col + (uint32_t)piece * 8 + i % 2;

			if (r < a->n_rows && c < a->n_cols)
				a->y[c * a->y_stride + r] = acc[piece][i];
		}
	}
}

DEVICE uint32_t tile_row(const struct cuda_matmul *a, uint32_t row)
{
	return min(blockIdx.x * CUDA_TILE_ROWS + row, a->n_rows - 1);
}

DEVICE uint32_t tile_col(const struct cuda_matmul *a, uint32_t col)
{
	return min(col, a->n_cols - 1);
}

/* An unpacked share to its place in a row of the slice. */
DEVICE void put_share(uint32_t *row, const struct share *s)
{
	UNROLL
	for (int run = 0; run < 2; run++)
		*(uint4 *)(row + s->at[run] / 4) =
			make_uint4((uint32_t)s->q[4 * run], (uint32_t)s->q[4 * run + 1],
				   (uint32_t)s->q[4 * run + 2], (uint32_t)s->q[4 * run + 3]);
}

/*
 * K-quants: a slice is one block. Activations stay as they are, in blocks of 73 words: an odd
 * number, so that few of their words meet in a bank. Scales are of 16 weights, of which Q4_K and
 * Q5_K have two alike.
 */
#define X_WORDS  ((uint32_t)(sizeof(struct block_q8_k) / sizeof(uint32_t)))
#define X_VALUES (offsetof(struct block_q8_k, qs) / sizeof(uint32_t))
#define X_SUMS   (offsetof(struct block_q8_k, bsums) / sizeof(uint32_t))

struct slice_k {
	alignas(16) uint32_t w[CUDA_TILE_ROWS * STEP_PITCH];
	uint32_t x[CUDA_TILE_COLS * X_WORDS];
	float d[CUDA_TILE_ROWS], dmin[CUDA_TILE_ROWS];
	int8_t scale[CUDA_TILE_ROWS][QK_K / 16], min[CUDA_TILE_ROWS][QK_K / 32];
};

DEVICE void put_share_k(struct slice_k *t, uint32_t row, const struct share *s)
{
	put_share(t->w + row * STEP_PITCH, s);
	UNROLL
	for (int run = 0; run < 2; run++) {
		t->scale[row][s->at[run] / 16] = (int8_t)s->scale[run];
		t->min[row][s->at[run] / 32] = (int8_t)s->min[run];
	}
	t->d[row] = s->d; /* the same for all shares of a block */
	t->dmin[row] = s->dmin;
}

DEVICE void put_columns_k(struct slice_k *t, const struct cuda_matmul *a, uint32_t cols, uint32_t k)
{
	for (uint32_t i = threadIdx.x; i < cols * X_WORDS; i += CUDA_THREADS) {
		uint32_t c = tile_col(a, i / X_WORDS);
		const uint8_t *block = row_at(a->act, c, a->act_stride) + q8_k_bytes(k);

		t->x[i] = ((const uint32_t *)block)[i % X_WORDS];
	}
}

/* d_w d_x sum(scale isum) - dmin d_x sum(min bsum), both sums over the block exact integers. */
DEVICE void finish_k(const struct slice_k *t, struct place p, int pieces,
		     const int scaled[PIECES][4], const int mins[PIECES][4], float acc[PIECES][4])
{
	UNROLL
	for (int piece = 0; piece < PIECES; piece++) {
		if (piece >= pieces)
			break;
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			uint32_t r = p.row + i / 2 * 8, c = p.col + (uint32_t)piece * 8 + i % 2;

			acc[piece][i] += __uint_as_float(t->x[c * X_WORDS]) *
					 (t->d[r] * (float)scaled[piece][i] -
					  t->dmin[r] * (float)mins[piece][i]);
		}
	}
}

/*
 * has_mins: Q4_K and Q5_K. Q6_K has none, but two scales for the 32 weights that a product of the
 * tensor cores sums: the halves are computed apart, each with zeros in the other's place.
 */
DEVICE void multiply_k(const struct slice_k *t, bool has_mins, uint32_t cols, float acc[PIECES][4])
{
	struct place p = tile_place();
	int pieces = tile_pieces(cols);
	int scaled[PIECES][4] = {}, mins[PIECES][4] = {};

	for (uint32_t s = 0; s < QK_K / 32; s++) {
		uint32_t w[4];

		fragment_a(w, t->w, STEP_PITCH, p, s * 8);
		UNROLL
		for (int piece = 0; piece < PIECES; piece++) {
			uint32_t x[2], first[4] = { w[0], w[1], 0, 0 },
				       second[4] = { 0, 0, w[2], w[3] };
			int d[4] = {}, e[4] = {};

			if (piece >= pieces)
				break;
			fragment_b(x, t->x + X_VALUES, X_WORDS, p, piece, s * 8);
			if (has_mins) {
				mma_s8_m16n8k32(d, w, x);
			} else {
				mma_s8_m16n8k32(d, first, x);
				mma_s8_m16n8k32(e, second, x);
			}
			UNROLL
			for (uint32_t i = 0; i < 4; i++) {
				uint32_t r = p.row + i / 2 * 8;
				uint32_t c = p.col + (uint32_t)piece * 8 + i % 2;
				uint32_t sums = t->x[c * X_WORDS + X_SUMS + s];

				scaled[piece][i] += t->scale[r][2 * s] * d[i];
				if (has_mins)
					mins[piece][i] += t->min[r][s] *
							  ((int16_t)sums + (int16_t)(sums >> 16));
				else
					scaled[piece][i] += t->scale[r][2 * s + 1] * e[i];
			}
		}
	}
	finish_k(t, p, pieces, scaled, mins, acc);
}

#define DEFINE_TILED_K(type, has_mins)                                                                   \
	DEVICE void type##_tiled(const struct cuda_matmul *a, bool narrow)                               \
	{                                                                                                \
		SHARED(struct slice_k, t, 1);                                                            \
		uint32_t cols = tile_cols(a, narrow);                                                    \
		float acc[PIECES][4] = {};                                                               \
                                                                                                         \
		for (uint32_t k = 0; k < a->n; k += STEP) {                                              \
			__syncthreads();                                                                 \
			for (uint32_t i = threadIdx.x; i < CUDA_TILE_ROWS * SHARES; i += CUDA_THREADS) { \
				uint32_t r = tile_row(a, i / SHARES);                                    \
				struct share s;                                                          \
                                                                                                         \
				type##_read(row_at(a->w, r, a->w_stride) + type##_bytes(k),              \
					    i % SHARES, &s);                                             \
				put_share_k(t, i / SHARES, &s);                                          \
			}                                                                                \
			put_columns_k(t, a, cols, k);                                                    \
			__syncthreads();                                                                 \
			multiply_k(t, has_mins, cols, acc);                                              \
		}                                                                                        \
		tile_store(a, acc);                                                                      \
	}

DEFINE_TILED_K(q4_k, true)
DEFINE_TILED_K(q5_k, true)
DEFINE_TILED_K(q6_k, false)

/* Blocks of 32: a slice is eight of them; those beyond the row are zeros. */
struct slice_0 {
	alignas(16) uint32_t w[CUDA_TILE_ROWS * STEP_PITCH];
	alignas(16) uint32_t x[CUDA_TILE_COLS * STEP_PITCH];
	float wd[CUDA_TILE_ROWS][SHARES + 1], xd[CUDA_TILE_COLS][SHARES + 1];
};

DEVICE void multiply_0(const struct slice_0 *t, uint32_t cols, float acc[PIECES][4])
{
	struct place p = tile_place();
	int pieces = tile_pieces(cols);

	for (uint32_t s = 0; s < SHARES; s++) {
		uint32_t w[4];

		fragment_a(w, t->w, STEP_PITCH, p, s * 8);
		UNROLL
		for (int piece = 0; piece < PIECES; piece++) {
			uint32_t x[2];
			int d[4] = {};

			if (piece >= pieces)
				break;
			fragment_b(x, t->x, STEP_PITCH, p, piece, s * 8);
			mma_s8_m16n8k32(d, w, x);
			UNROLL
			for (uint32_t i = 0; i < 4; i++)
				acc[piece][i] += t->wd[p.row + i / 2 * 8][s] *
						 t->xd[p.col + (uint32_t)piece * 8 + i % 2][s] *
						 (float)d[i];
		}
	}
}

DEVICE void put_share_0(uint32_t *slice, float d[][SHARES + 1], uint32_t line, uint32_t j,
			struct share *s)
{
	s->at[0] = j * QK_0;
	s->at[1] = j * QK_0 + QK_0 / 2;
	put_share(slice + line * STEP_PITCH, s);
	d[line][j] = s->d;
}

#define DEFINE_TILED_0(type)                                                                             \
	DEVICE void type##_tiled(const struct cuda_matmul *a, bool narrow)                               \
	{                                                                                                \
		SHARED(struct slice_0, t, 1);                                                            \
		uint32_t cols = tile_cols(a, narrow);                                                    \
		float acc[PIECES][4] = {};                                                               \
                                                                                                         \
		for (uint32_t k = 0; k < a->n; k += STEP) {                                              \
			__syncthreads();                                                                 \
			for (uint32_t i = threadIdx.x; i < CUDA_TILE_ROWS * SHARES; i += CUDA_THREADS) { \
				uint32_t line = i / SHARES, j = i % SHARES, block = k / QK_0 + j;        \
				struct share w = {}, x = {};                                             \
                                                                                                         \
				if (block < a->n / QK_0)                                                 \
					type##_read(row_at(a->w, tile_row(a, line), a->w_stride),        \
						    block, &w);                                          \
				put_share_0(t->w, t->wd, line, j, &w);                                   \
				if (line >= cols)                                                        \
					continue;                                                        \
				if (block < a->n / QK_0)                                                 \
					q8_0_read(row_at(a->act, tile_col(a, line), a->act_stride),      \
						  block, &x);                                            \
				put_share_0(t->x, t->xd, line, j, &x);                                   \
			}                                                                                \
			__syncthreads();                                                                 \
			multiply_0(t, cols, acc);                                                        \
		}                                                                                        \
		tile_store(a, acc);                                                                      \
	}

DEFINE_TILED_0(q8_0)
DEFINE_TILED_0(q4_0)
DEFINE_TILED_0(mxfp4)

/*
 * D += A B of f16 pairs, in the layout of mma_bf16_m16n8k16(). Turing has the 16x8x8 piece.
 * Elsewhere, which is the emulator, each lane asks the others for its two rows and two columns.
 */
DEVICE void mma_f16_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
		     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
		     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif defined(__CUDA_ARCH__)
	UNROLL
	for (int i = 0; i < 2; i++)
		asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
			     "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
			     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
			     : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#else
	for (int k = 0; k < 8; k++) {
		int row = (int)(LANE / 4 * 4) + k % 4, col = (int)(LANE % 4 * 8) + k % 4;
		uint32_t w[2], x[2];

		for (int i = 0; i < 2; i++) {
			w[i] = __shfl_sync(0xffffffff, a[k / 4 * 2 + i], row);
			x[i] = __shfl_sync(0xffffffff, b[k / 4], col + 4 * i);
		}
		for (int i = 0; i < 4; i++)
			d[i] += f16_to_f32((uint16_t)w[i / 2]) * f16_to_f32((uint16_t)x[i % 2]) +
				f16_to_f32((uint16_t)(w[i / 2] >> 16)) *
					f16_to_f32((uint16_t)(x[i % 2] >> 16));
	}
#endif
}

/*
 * Halves: slices of 64. Each is summed by itself and then added: the tensor cores round their sums
 * towards zero, which adds up over a long row.
 */
#define HALF_STEP   64
#define HALF_GROUPS (HALF_STEP / HALF_GROUP)
#define HALF_PITCH  (HALF_STEP / 2 + 4)

struct slice_half {
	alignas(16) uint32_t w[CUDA_TILE_ROWS * HALF_PITCH];
	alignas(16) uint32_t x[CUDA_TILE_COLS * HALF_PITCH];
};

DEVICE void put_halves(struct slice_half *t, const struct cuda_matmul *a, uint32_t cols, uint32_t k)
{
	for (uint32_t i = threadIdx.x; i < CUDA_TILE_ROWS * HALF_GROUPS; i += CUDA_THREADS) {
		uint32_t line = i / HALF_GROUPS, j = i % HALF_GROUPS;
		uint32_t at = line * HALF_PITCH + j * (HALF_GROUP / 2);

		*(uint4 *)(t->w + at) = load_halves(row_at(a->w, tile_row(a, line), a->w_stride),
						    k + j * HALF_GROUP, a->n);
		if (line < cols)
			*(uint4 *)(t->x + at) =
				load_halves(row_at(a->act, tile_col(a, line), a->act_stride),
					    k + j * HALF_GROUP, a->n);
	}
}

#define DEFINE_TILED_HALF(type)                                                       \
	DEVICE void type##_tiled(const struct cuda_matmul *a, bool narrow)            \
	{                                                                             \
		SHARED(struct slice_half, t, 1);                                      \
		struct place p = tile_place();                                        \
		uint32_t cols = tile_cols(a, narrow);                                 \
		int pieces = tile_pieces(cols);                                       \
		float acc[PIECES][4] = {};                                            \
                                                                                      \
		for (uint32_t k = 0; k < a->n; k += HALF_STEP) {                      \
			float d[PIECES][4] = {};                                      \
                                                                                      \
			__syncthreads();                                              \
			put_halves(t, a, cols, k);                                    \
			__syncthreads();                                              \
			for (uint32_t s = 0; s < HALF_STEP / 2; s += 8) {             \
				uint32_t w[4], x[2];                                  \
                                                                                      \
				fragment_a(w, t->w, HALF_PITCH, p, s);                \
				UNROLL                                                \
				for (int piece = 0; piece < PIECES; piece++) {        \
					if (piece >= pieces)                          \
						break;                                \
					fragment_b(x, t->x, HALF_PITCH, p, piece, s); \
					mma_##type##_m16n8k16(d[piece], w, x);        \
				}                                                     \
			}                                                             \
			UNROLL                                                        \
			for (int i = 0; i < PIECES * 4; i++)                          \
				acc[i / 4][i % 4] += d[i / 4][i % 4];                 \
		}                                                                     \
		tile_store(a, acc);                                                   \
	}

DEFINE_TILED_HALF(f16)
DEFINE_TILED_HALF(bf16)

/*
 * Floats: no tensor cores, which would round them. A thread computes 4 by 4 values, 16 apart in
 * either direction, so that neighbours read neighbouring words. Slices lie with the row's length
 * outermost and are summed by themselves, as above.
 */
#define FLOAT_STEP 32
#define APART      16

struct slice_f32 {
	float w[FLOAT_STEP][CUDA_TILE_ROWS], x[FLOAT_STEP][CUDA_TILE_COLS];
};

/*
 * A thread a group of 8: neighbours are in neighbouring lines, so that their stores do not meet in
 * a bank.
 */
DEVICE void put_floats(struct slice_f32 *t, const struct cuda_matmul *a, uint32_t k)
{
	uint32_t line = threadIdx.x % CUDA_TILE_ROWS;
	uint32_t at = threadIdx.x / CUDA_TILE_ROWS * HALF_GROUP;
	float w[HALF_GROUP], x[HALF_GROUP];

	f32_read(row_at(a->w, tile_row(a, line), a->w_stride), k + at, a->n, w);
	f32_read(row_at(a->act, tile_col(a, line), a->act_stride), k + at, a->n, x);
	UNROLL
	for (uint32_t e = 0; e < HALF_GROUP; e++) {
		t->w[at + e][line] = w[e];
		t->x[at + e][line] = x[e];
	}
}

/* A thread has a column of each 16: those are left out together. */
DEVICE void multiply_floats(const struct slice_f32 *t, uint32_t cols, float acc[4][4])
{
	uint32_t row = threadIdx.x % APART, col = threadIdx.x / APART;
	float d[4][4] = {};

	for (uint32_t k = 0; k < FLOAT_STEP; k++) {
		UNROLL
		for (uint32_t c = 0; c < 4; c++) {
			if (c * APART >= cols)
				break;
			UNROLL
			for (uint32_t r = 0; r < 4; r++)
				d[r][c] += t->w[k][row + r * APART] * t->x[k][col + c * APART];
		}
	}
	UNROLL
	for (int i = 0; i < 16; i++)
		acc[i / 4][i % 4] += d[i / 4][i % 4];
}

DEVICE void f32_tiled(const struct cuda_matmul *a, bool narrow)
{
	SHARED(struct slice_f32, t, 1);
	uint32_t cols = tile_cols(a, narrow);
	float acc[4][4] = {};

	for (uint32_t k = 0; k < a->n; k += FLOAT_STEP) {
		__syncthreads();
		put_floats(t, a, k);
		__syncthreads();
		multiply_floats(t, cols, acc);
	}
	for (uint32_t i = 0; i < 16; i++) {
		uint32_t r = blockIdx.x * CUDA_TILE_ROWS + threadIdx.x % APART + i / 4 * APART;
		uint32_t c = threadIdx.x / APART + i % 4 * APART;

		if (r < a->n_rows && c < a->n_cols)
			a->y[c * a->y_stride + r] = acc[i / 4][i % 4];
	}
}
