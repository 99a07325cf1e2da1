/* SPDX-License-Identifier: MIT */
/*
 * cpu.h: what the CPU kernels offer: one table of functions per instruction set, chosen once at start.
 *
 * Owns nothing at run time but the choice. Every entry is a plain function of its arguments: no threads, no
 * allocation, no globals; the caller (backend-cpu.c) splits rows, columns and heads over the pool. ref.c is the truth
 * (scalar, written to be read); every other table must agree with it within the bounds that tests/unit/test-kernels*.c
 * state. Shapes: matrices are row-major; "stride" is in bytes for quantised data, in elements for float data.
 */
#pragma once

#include "kernels/cpu/quant.h"

/* Weights of `type` multiply activations converted to this form first: F32 as is; F16 and BF16 rounded to the same
 * type; blocks of 32 -> Q8_0 blocks; super-blocks of 256 -> Q8_K blocks. Same rounding as llama.cpp's CPU backend, so that
 * quantised models agree with it to float noise (facts of the peer: otherwise its own 8-bit activations dominate); only
 * Q4_1 and Q5_1 differ, whose sums of activations are exact here and rounded to half precision there. */
enum quant_type cpu_act_type(enum quant_type weight);

/*
 * How a product is cut, found by measuring once (tune.c). Any value of the ranges gives the same bits: only shapes decide how a
 * number is computed.
 */
struct cpu_tiles {
	unsigned reg_cols; /* 4, 3 or 2: columns that share what is unpacked of a weight in registers */
	unsigned l1_rows; /* 4 to 64: rows of weights that stay in the first cache while columns pass */
	unsigned l2_cols; /* 16 to 512, a multiple of 16: columns whose activations stay in the second cache while rows pass; the backend's pieces */
};

/* The queries of n_rows consecutive positions for the heads that share one key/value head. */
struct cpu_attention {
	const float *q;              /* row i, head h: [i * q_stride + h * k_dim] */
	float *out;                  /* row i, head h: [i * out_stride + h * v_dim]; not q */
	size_t q_stride, out_stride; /* floats */
	size_t n_rows, n_q;          /* n_q: query heads of this key/value head */
	const void *const *k_pages, *const *v_pages; /* [page_tok][dim] each, f16 if kv_f16, else f32 */
	size_t page_tok, k_dim, v_dim;
	size_t pos;    /* of row 0. Row i sees positions [max(0, pos + i + 1 - window), pos + i] */
	size_t window; /* 0: all before it */
	bool kv_f16;
	float scale;
	const float *sinks; /* n_q logits that take part in the softmax and have no value; NULL: none */
	float *scratch; /* cpu_attention_scratch(n_rows, n_q, v_dim) floats, of the calling thread */
};
#define CPU_ATTENTION_ROWS 16 /* n_rows at most */

/* One chunk (n_tok <= CPU_DELTA_CHUNK) of the gated delta rule for one value head. */
#define CPU_DELTA_CHUNK 64

struct cpu_kernels {
	const char *name;       /* "ref", "avx2", "avx512", "neon", "dotprod" */
	struct cpu_tiles tiles; /* a good choice where nothing is measured */

	/* y[i] = value of element i of a row of n elements. Indexed by weight type; NULL where there is no kernel. */
	void (*dequant[QUANT_TYPE_MAX])(const void *row, float *y, size_t n);
	/* Converts n floats to the activation form, indexed by *activation* type (F32, F16, BF16, Q8_0, Q8_K). */
	void (*quantize[QUANT_TYPE_MAX])(const float *x, void *act, size_t n);
	/*
	 * y[c * y_stride + r] = <weight row r, activation column c>, 0 <= r < n_rows, 0 <= c < n_cols.
	 * n: row length in elements (a multiple of the block); w_stride, act_stride in bytes; y_stride in floats.
	 * Indexed by weight type; act is in cpu_act_type(type). How the y of column c is computed depends on n and on how many columns its group
	 * of sixteen has (c rounded down to sixteen, up to n_cols), not on rows and tiles. tiles: NULL for the table's own.
	 */
	void (*matmul[QUANT_TYPE_MAX])(size_t n, const void *w, size_t w_stride, size_t n_rows,
				       const void *act, size_t act_stride, size_t n_cols, float *y,
				       size_t y_stride, const struct cpu_tiles *tiles);

	/* y = x * rsqrt(mean(x^2) + eps) * w; w may be NULL (all ones); y may be x. */
	void (*rms_norm)(const float *x, const float *w, float eps, float *y, size_t n);
	/* y = x / max(sqrt(sum x^2), eps), as ggml does it; y may be x. */
	void (*l2_norm)(const float *x, float eps, float *y, size_t n);
	/* x[i] = x[i] + y[i] * scale */
	void (*add_scaled)(float *x, const float *y, float scale, size_t n);
	/* y[i] = silu(gate[i]) * up[i]; y may be gate or up. */
	void (*silu_mul)(const float *gate, const float *up, float *y, size_t n);
	/* The gated unit of gpt-oss: g = min(gate, 7), u = clamp(up, -7, 7), y = g * sigmoid(1.702 g) * (u + 1); y may be gate or up. */
	void (*swiglu_oai)(const float *gate, const float *up, float *y, size_t n);
	/* x[i] *= sigmoid(gate[i]) */
	void (*sigmoid_mul)(float *x, const float *gate, size_t n);
	/* In place softmax over n values. */
	void (*softmax)(float *x, size_t n);
	/* NeoX rope in place on the first n_rot (even) of head_dim values: pair (i, i + n_rot/2), angle
	 * pos * freq[i], cos/sin given: cs[2*i] = cos, cs[2*i+1] = sin for i < n_rot/2. */
	void (*rope_neox)(float *x, const float *cs, size_t n_rot);
	/* The same for pairs (2 i, 2 i + 1), as llama's converted weights want it. */
	void (*rope_norm)(float *x, const float *cs, size_t n_rot);
	/* The k <= n indices of the largest x, largest first, of equals the lower index first. Not-a-number is below everything. x is destroyed. */
	void (*top_k)(float *x, size_t n, size_t k, uint32_t *index);
	/* Causal attention in flash form: online softmax, every key and value read once for all heads and rows that share it. */
	void (*attention)(const struct cpu_attention *a);
	/* f32 -> f16 (round to nearest even) and back. */
	void (*f32_to_f16)(const float *x, uint16_t *y, size_t n);
	void (*f16_to_f32)(const uint16_t *x, float *y, size_t n);
	/*
	 * Causal depthwise conv (kernel 4 and others) + SiLU over n_tok tokens of channels [c0, c1):
	 * state holds the last kernel-1 inputs, oldest first: state[k * n_ch + c], and is updated. w[c * kernel + k], newest
	 * tap last. x and y: [n_tok][n_ch]. y must not be x.
	 */
	void (*conv_silu)(const float *x, const float *w, float *state, size_t n_tok, size_t n_ch,
			  size_t kernel, size_t c0, size_t c1, float *y);
	/*
	 * Gated delta rule, one token, one value head (recurrent form). S is [k_dim][v_dim] row-major and is updated:
	 * S *= exp(g); d = (v - S^T k) * beta; S += k (x) d; o = S^T q. q comes scaled by 1/sqrt(k_dim), q and k are
	 * l2-normalised. Source: facts/models.md 5a (torch_recurrent_gated_delta_rule).
	 */
	void (*delta_step)(float *S, const float *q, const float *k, const float *v, float g,
			   float beta, size_t k_dim, size_t v_dim, float *o);
	/*
	 * The same for n_tok <= CPU_DELTA_CHUNK tokens at once (chunked form: cumulative decay, unit lower triangular
	 * solve, then one update of S). q, k, v, o: token t at [t * stride] (strides in floats); g, beta: [n_tok * gb_stride].
	 * scratch: at least cpu_delta_scratch(k_dim, v_dim) floats. o must not alias q, k or v.
	 */
	void (*delta_chunk)(float *S, const float *q, size_t q_stride, const float *k,
			    size_t k_stride, const float *v, size_t v_stride, const float *g,
			    const float *beta, size_t gb_stride, size_t n_tok, size_t k_dim,
			    size_t v_dim, float *o, size_t o_stride, float *scratch);
};

size_t cpu_delta_scratch(size_t k_dim, size_t v_dim);
size_t cpu_attention_scratch(size_t n_rows, size_t n_q, size_t v_dim);

extern const struct cpu_kernels cpu_kernels_ref;
#if defined(__x86_64__)
extern const struct cpu_kernels cpu_kernels_avx2, cpu_kernels_avx512;
#elif defined(__aarch64__)
extern const struct cpu_kernels cpu_kernels_neon, cpu_kernels_dotprod;
#endif

/* Every table that this CPU runs, the reference first, the best last; NULL beyond. */
const struct cpu_kernels *cpu_kernels_at(size_t i);
/* The best table this CPU runs; the environment RESIDENTD_CPU ("ref", "avx2", "avx512", "neon", "dotprod") overrides it (unknown or
 * unsupported names are ignored, and *ret_note, if not NULL, then says so: a static string). Decided anew at each call. */
const struct cpu_kernels *cpu_kernels_choose(const char **ret_note);

/* Scalar conversions for tables and tests. */
float f16_to_float(uint16_t h);
uint16_t float_to_f16(float f);
float bf16_to_float(uint16_t h);
uint16_t float_to_bf16(float f);
