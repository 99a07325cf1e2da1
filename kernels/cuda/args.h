/* SPDX-License-Identifier: MIT */
/*
 * args.h: what the CUDA kernels are called and what they are given: plain C, included by the daemon and by the .cu files.
 *
 * Every kernel takes one struct by value and has C linkage. Shapes are those of kernels/cpu/cpu.h and daemon/engine/backend.h; the scalar
 * reference there is the truth. Activations take the same forms as on the CPU (cpu_act_type()), with the same rounding, so that a
 * product of quantised weights differs from the CPU's only by the order of float sums.
 * Pointers are device memory. "grid" says which launch a kernel expects: x, y, z; threads are CUDA_THREADS unless said.
 */
#pragma once

#ifdef __cplusplus
#include <cstddef>
#include <cstdint>
#else
#include <stddef.h>
#include <stdint.h>
#endif

#define CUDA_THREADS   256
#define CUDA_WARP      32
/* Rows of weights that one block of a decode product computes: a warp for each. */
#define CUDA_ROWS      (CUDA_THREADS / CUDA_WARP)
/* Columns (tokens) that a decode product takes at most at once; more go through the tiled one. */
#define CUDA_COLS      8
/* The tiled product: rows and columns of a block's tile. */
#define CUDA_TILE_ROWS 64
#define CUDA_TILE_COLS 64
/* Heads' dimensions that the attention and delta kernels take at most. */
#define CUDA_HEAD_MAX  256
/* Copies of one launch of cuda_copy_block at most. */
#define CUDA_COPY_MAX  64

/* cuda_quantize_q8_k, _q8_0, cuda_round_f16, _bf16: x [n_rows][width] floats -> act rows of act_stride bytes. grid: ceil(width / 256), n_rows;
 * threads 256 (a thread an element). */
struct cuda_quantize {
	const float *x;
	void *act;
	uint32_t n_rows, width;
	uint64_t act_stride;
};

/*
 * cuda_matmul_TYPE: y[c * y_stride + r] = <w row r, act column c>, n_cols <= CUDA_COLS. grid: ceil(n_rows / CUDA_ROWS).
 * cuda_matmul_tiled_TYPE: any n_cols. grid: ceil(n_rows / CUDA_TILE_ROWS), ceil(n_cols / CUDA_TILE_COLS).
 * TYPE: q4_k q5_k q6_k q8_0 q4_0 mxfp4 f16 bf16 f32. act is in cpu_act_type(TYPE).
 */
struct cuda_matmul {
	const void *w, *act;
	float *y;
	uint64_t w_stride, act_stride, y_stride; /* bytes, bytes, floats */
	uint32_t n, n_rows, n_cols;
};

/* Where one expert's weights are now, in the device's table. NULL gate: not on the device: the CPU computes it. */
struct cuda_expert {
	const void *gate, *up, *down; /* fused gate and up: up is gate + n_ff rows */
};

/*
 * Experts of a layer. A slot is one (token, choice) pair: slot t * n_used + k; expert[slot] is its number in `experts`, weight[slot] its share.
 * cuda_moe_up_TYPE (the type of gate and up): hidden[slot][n_ff] = silu(gate x[t]) * (up x[t]) for every slot whose expert is on the
 * device. grid: ceil(n_ff / CUDA_ROWS), n_tok * n_used. One launch.
 * cuda_moe_down_TYPE (the type of down): out[t] += sum over k in order of weight * (down hidden), where hidden is first brought to the
 * form that down multiplies, in shared memory; for a slot whose expert is not on the device, weight * other[slot] instead.
 * grid: ceil(n_embd / CUDA_ROWS), n_tok. One launch. Dynamic shared memory: hidden_rows * hidden_act_bytes.
 */
struct cuda_moe {
	const struct cuda_expert *experts; /* of this layer, [n_expert] */
	const uint32_t *expert;            /* [n_tok * n_used] */
	const float *weight;               /* the same */
	const void *act;    /* x in the form that gate and up multiply, rows of act_stride bytes */
	float *hidden;      /* [n_tok * n_used][n_ff] */
	const float *other; /* [n_tok * n_used][n_embd], or NULL: all are on the device */
	float *out;         /* [n_tok][n_embd] */
	uint64_t act_stride, up_stride, down_stride; /* bytes: a row of act, of gate and up, of down */
	uint32_t n_tok, n_used, n_embd, n_ff;
	uint32_t hidden_act_bytes; /* of one row in the form that down multiplies */
	uint32_t hidden_rows; /* how many of them fit in the shared memory: n_used, or fewer and slower; 0 means 1 */
};

/*
 * The experts of a layer over many tokens. Places are the (token, choice) pairs sorted by expert; rows of act, y and result are by place.
 * A tile: n places of one expert, from `first`; 1 <= n <= CUDA_TILE_COLS.
 */
struct cuda_moe_tile {
	uint32_t expert, first, n;
};

/* cuda_moe_tiled_TYPE: y[place][r] = <row r of a matrix of the tile's expert, act row of the place>, as cuda_matmul_tiled_TYPE computes it. Nothing
 * is written for the places of an expert that is not on the device. grid: ceil(n_rows / CUDA_TILE_ROWS), n_tiles (or 65535, if that is less: tiles
 * go round). */
struct cuda_moe_tiled {
	const struct cuda_expert *experts; /* of this layer, [n_expert] */
	const struct cuda_moe_tile *tiles; /* [n_tiles] */
	const void *act;                   /* in cpu_act_type(TYPE) */
	float *y;
	uint64_t w_stride, act_stride, y_stride; /* bytes, bytes, floats */
	uint32_t n, n_rows, n_tiles;
	uint32_t matrix; /* 0 gate, 1 up, 2 down */
};

/* cuda_gather_rows: to[i][0..bytes) = from[index[i]][0..bytes). All addresses, strides and bytes are multiples of 2, and faster as multiples of 4.
 * grid: ceil(bytes / (4 * CUDA_THREADS)), n_rows (or 65535, if that is less: rows go round). */
struct cuda_gather_rows {
	const void *from;
	const uint32_t *index; /* [n_rows] */
	void *to;
	uint64_t from_stride, to_stride; /* bytes */
	uint32_t n_rows, bytes;
};

/* cuda_moe_sum: out[t] += sum over k in order of weight[t * n_used + k] * result[place[t * n_used + k]]. grid: ceil(n_embd / CUDA_THREADS), n_tok
 * (or 65535, if that is less: tokens go round). */
struct cuda_moe_sum {
	const float *result;   /* [place][n_embd] */
	const uint32_t *place; /* [n_tok * n_used] */
	const float *weight;   /* the same */
	float *out;            /* [n_tok][n_embd] */
	uint32_t n_tok, n_used, n_embd;
};

/* cuda_rms_norm: y[r] = rms_norm(x[r]) * w (w NULL: ones). y may be x. grid: n_rows. */
struct cuda_norm {
	const float *x, *w;
	float *y;
	uint32_t n_rows, width;
	float eps;
};

/* cuda_add: y += a. cuda_silu_mul: y = silu(a) * b. cuda_sigmoid_mul: y *= sigmoid(a). y may be a or b. grid: ceil(n / CUDA_THREADS). */
struct cuda_flat {
	const float *a, *b;
	float *y;
	uint64_t n;
};

/* cuda_copy_rows: y[r][0..width) = x[r * x_stride ..]. grid: ceil(width / CUDA_THREADS), n_rows (or 65535, if that is less: rows go round). */
struct cuda_copy_rows {
	const float *x;
	float *y;
	uint64_t x_stride;
	uint32_t n_rows, width;
};

/* cuda_scalar_gate: x[t] *= sigmoid(<w, in[t]>). grid: n_tok. */
struct cuda_scalar_gate {
	const float *w, *in;
	float *x;
	uint32_t n_tok, width, x_width;
};

/* A sequence's rows: [row, row + n_tok), positions from pos. In device memory. */
struct cuda_span {
	uint32_t row, n_tok, pos, n_pages;
	const uint32_t *pages; /* of its page table */
	float *recurrent;      /* of the layer at hand */
};

/* cuda_rope: NeoX, in place on the first n_rot of each head; angle = (float)pos * freq[i], its sine and cosine computed from the double. grid: n_head,
 * n_rows; threads: any (n_rot / 2 have work). positions[row]. */
struct cuda_rope {
	float *x;
	const uint32_t *positions;
	const float *freq; /* n_rot / 2 */
	uint64_t stride;   /* floats a row */
	uint32_t n_head, dim, n_rot, n_rows;
};

/* Keys and values lie in pages as daemon/engine/kv.h says: page p of layer l begins at base + p * page_bytes + l * layer_bytes; keys of head h at
 * h * k_bytes, values behind all keys at n_head_kv * k_bytes + h * v_bytes; [page_tok][dim] of f16 or f32. page_tok: a multiple of 32. */
struct cuda_attention {
	void *base;
	const struct cuda_span *spans;
	const uint32_t *span_of_row; /* [n_rows] */
	const float *q, *k, *v;      /* [row][head][dim] */
	float *out;                  /* [row][head][v_dim] */
	uint64_t page_bytes, layer_offset, k_bytes, v_bytes;
	uint32_t page_tok, n_head, n_head_kv, k_dim, v_dim, n_rows;
	uint32_t f16;
	float scale;
	float *partial; /* NULL: cuda_attention_rows writes out itself; else of n_split splits, [row][head][split][v_dim + 2] */
	uint32_t n_split; /* 1 where partial is NULL */
};
/* cuda_kv_store: writes k and v of every row into its page. grid: n_head_kv, n_rows.
 * cuda_attention_rows: out = causal softmax(scale q.k) v by pages, online softmax, the heads that share keys and values in one block, which reads
 * them once for every 8. grid: n_head_kv, n_rows, n_split. k_dim, v_dim <= CUDA_HEAD_MAX.
 * cuda_attention_join: after it, where partial is not NULL: the splits of each head to out. grid: n_head, n_rows. Long sequences of few rows leave
 * most of a card idle without splits. */

/* cuda_conv_silu: as cpu conv_silu of every span; state (kernel-1) * n_ch floats at span->recurrent + state_offset.
 * grid: ceil(n_ch / CUDA_THREADS), n_spans. */
struct cuda_conv {
	const float *x, *w;
	float *y;
	const struct cuda_span *spans;
	uint64_t state_offset; /* floats */
	uint32_t n_ch, kernel, n_spans;
};

/* cuda_delta_gates: per row: l2 norm of the q and k heads in place in mixed [row][n_ch], q scaled by 1/sqrt(k_dim); g = softplus(alpha + dt) * a,
 * beta = sigmoid(beta_raw). grid: n_rows. */
struct cuda_delta_gates {
	float *mixed;
	const float *alpha, *beta_raw, *a, *dt;
	float *g, *beta; /* [row][n_head_v] */
	uint32_t n_rows, n_ch, n_head_k, n_head_v, k_dim;
	float l2_eps;
};

/* cuda_delta_rule: the gated delta rule over the rows of each span, one after the other (recurrent form), state [n_head_v][k_dim][v_dim] at
 * span->recurrent + state_offset. v head j takes k head j % n_head_k. grid: n_head_v, n_spans, any z (ceil(v_dim * 4 / threads), for k_dim > 128 twice
 * that, uses the card best); threads v_dim rounded up to a warp (<= 256). k_dim <= CUDA_HEAD_MAX. */
struct cuda_delta_rule {
	const float *mixed, *g, *beta;
	float *out; /* [row][n_head_v][v_dim] */
	const struct cuda_span *spans;
	uint64_t state_offset; /* floats */
	uint32_t n_ch, n_head_k, n_head_v, k_dim, v_dim, n_spans;
};
/* cuda_delta_chunk: the same for spans of many rows, CUDA_DELTA_CHUNK of them at once; either kernel goes on where the other stopped. Sums are
 * made in another order, so results differ from those of cuda_delta_rule, and with where rows are cut, by a few roundings; to the bit they are the
 * same where cuts are at multiples of CUDA_DELTA_CHUNK rows of the span. A chunk takes as long with one row in it as with all. grid: n_head_v,
 * n_spans, ceil(v_dim / CUDA_DELTA_COLUMNS). Dynamic shared memory: CUDA_DELTA_CHUNK_SHARED(k_dim). k_dim <= CUDA_HEAD_MAX. */
#define CUDA_DELTA_CHUNK               32
#define CUDA_DELTA_COLUMNS             32
#define CUDA_DELTA_CHUNK_SHARED(k_dim) (13952 + ((k_dim) + 63) / 64 * 8192)
/* Rows of a span from which on it is worth it. Counted, not measured: a row takes about as many instructions as in cuda_delta_rule, but in twice the
 * warps and without a chain from row to row, which is what a card with multiprocessors to spare waits for; a last chunk that is not full must not matter. */
#define CUDA_DELTA_CHUNK_MIN           256

/* cuda_route: softmax over n_expert, the n_used largest (of equals the lower number first), renormalised. grid: n_tok. */
struct cuda_route {
	const float *logits;
	uint32_t *expert; /* [n_tok * n_used] */
	float *weight;
	uint32_t n_tok, n_expert, n_used;
};

/* cuda_argmax: of each row of x; of equals the lower. grid: n_rows. */
struct cuda_argmax {
	const float *x;
	uint32_t *index;
	uint32_t n_rows, width;
};

/* cuda_copy_block: to[i][0..bytes) = from[i][..] for n_copies pairs inside the card, none of which overlap; addresses and bytes are multiples of 4.
 * grid: any (ceil(bytes / (CUDA_THREADS * 16)) at most is of use), n_copies. */
struct cuda_copy_block {
	const void *from[CUDA_COPY_MAX];
	void *to[CUDA_COPY_MAX];
	uint64_t bytes; /* of each */
	uint32_t n_copies;
};
