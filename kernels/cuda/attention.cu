/* SPDX-License-Identifier: MIT */
/*
 * attention.cu: keys and values into their pages, and causal attention over them.
 *
 * Owns no state. Launched as args.h says. Refuses to know how pages are given out: it follows the
 * tables it is given. Invariants: no position behind a row's own is read, since pages begin as
 * whatever memory held; sums are made in one order (of positions within a thread, then of threads),
 * so that a row's result depends on nothing but the number of splits.
 *
 * A block has the query heads that share a key/value head, and goes through the positions in tiles.
 * Scores: a lane is a position, a warp is a part of the dimensions, and each takes all heads at
 * once, so that a key is read from shared memory once for all of them. Softmax: a warp is a head.
 * Sums of values: a thread is a dimension (and a part of the tile where dimensions are few), again
 * for all heads: a value is used by one thread only, and does not go through shared memory.
 */
#include "kernels/cuda/device.cuh"

#define TILE   CUDA_WARP /* positions; all of them in one page */
#define TILE_4 (TILE / 4)
#define PANEL  128 /* dimensions of the keys that are in shared memory at a time */
/* Query heads at a time: as many as leave registers for two blocks on a multiprocessor. */
#define GROUP  CUDA_ROWS

struct attend_shared {
	float4 q[GROUP][CUDA_HEAD_MAX / 4];
	float4 p[GROUP][TILE_4]; /* exp(score - max so far) */
	float fade[GROUP];       /* what sums so far are to be multiplied with */
	union {
		float k[TILE][PANEL + 1];           /* + 1: the lanes' rows in different banks */
		float part[CUDA_ROWS][GROUP][TILE]; /* of scores: each warp's dimensions */
		float out[GROUP][CUDA_THREADS];
	};
};

/* What is done at once: positions [from, to) of one key/value head for some of its query heads. */
struct attend {
	const struct cuda_attention *a;
	const uint32_t *pages;
	uint64_t first; /* row * n_head + head of the first of them */
	uint32_t n_heads, head_kv, from, to;
};

/* The page and layer that a position lies in. */
DEVICE char *page_of(const struct cuda_attention *a, const uint32_t *pages, uint32_t pos)
{
	return (char *)a->base + pages[pos / a->page_tok] * a->page_bytes + a->layer_offset;
}

DEVICE char *keys_of(const struct cuda_attention *a, char *page, uint32_t head)
{
	return page + head * a->k_bytes;
}

DEVICE char *values_of(const struct cuda_attention *a, char *page, uint32_t head)
{
	return page + a->n_head_kv * a->k_bytes + head * a->v_bytes;
}

DEVICE float load(const char *p, uint32_t i, bool f16)
{
	return f16 ? f16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

DEVICE void store(char *p, uint32_t i, float x, bool f16)
{
	if (f16)
		((uint16_t *)p)[i] = f32_to_f16(x);
	else
		((float *)p)[i] = x;
}

KERNEL(cuda_kv_store, struct cuda_attention, a)
{
	uint32_t head = blockIdx.x, row = blockIdx.y;
	const struct cuda_span *s = &a.spans[a.span_of_row[row]];
	uint32_t pos = s->pos + (row - s->row), tok = pos % a.page_tok;
	uint64_t at = (uint64_t)row * a.n_head_kv + head;
	char *page = page_of(&a, s->pages, pos);

	for (uint32_t i = threadIdx.x; i < a.k_dim; i += blockDim.x)
		store(keys_of(&a, page, head), tok * a.k_dim + i, a.k[at * a.k_dim + i], a.f16);
	for (uint32_t i = threadIdx.x; i < a.v_dim; i += blockDim.x)
		store(values_of(&a, page, head), tok * a.v_dim + i, a.v[at * a.v_dim + i], a.f16);
}

/* Queries, zeros behind k_dim and behind the heads that there are. */
DEVICE void load_queries(const struct attend *j, struct attend_shared *s, uint32_t n_heads)
{
	uint32_t k_dim = j->a->k_dim, padded = (k_dim + 3) / 4 * 4;
	const float *q = j->a->q + j->first * k_dim;

	for (uint32_t h = 0; h < n_heads; h++)
		for (uint32_t d = threadIdx.x; d < padded; d += CUDA_THREADS)
			((float *)s->q[h])[d] = h < j->n_heads && d < k_dim ? q[h * k_dim + d] : 0;
}

/* Dimensions [d0, d0 + PANEL) of the first n keys at k; a warp reads a position. */
DEVICE void load_keys(struct attend_shared *s, const char *k, uint32_t n, uint32_t k_dim,
		      uint32_t d0, bool f16)
{
	uint32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;

	UNROLL
	for (uint32_t i = 0; i < TILE / CUDA_ROWS; i++) {
		uint32_t t = i * CUDA_ROWS + warp;

		UNROLL
		for (uint32_t c = lane; c < PANEL; c += CUDA_WARP)
			s->k[t][c] = t < n && d0 + c < k_dim ? load(k, t * k_dim + d0 + c, f16) : 0;
	}
}

/* The lane's key times all queries, the warp's part of the dimensions. */
DEVICE void score_keys(const struct attend_shared *s, uint32_t d0, uint32_t width,
		       float score[GROUP], uint32_t n_heads)
{
	uint32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;

	for (uint32_t d = 4 * warp; d < width; d += 4 * CUDA_ROWS) {
		const float *k = &s->k[lane][d];
		float k0 = k[0], k1 = k[1], k2 = k[2], k3 = k[3];

		UNROLL
		for (uint32_t h = 0; h < n_heads; h++) {
			float4 q = s->q[h][(d0 + d) / 4];

			score[h] = fmaf(q.x, k0, score[h]);
			score[h] = fmaf(q.y, k1, score[h]);
			score[h] = fmaf(q.z, k2, score[h]);
			score[h] = fmaf(q.w, k3, score[h]);
		}
	}
}

/* Parts of the scores of n keys in their page. */
DEVICE void score_tile(const struct attend *j, struct attend_shared *s, const char *k, uint32_t n,
		       uint32_t n_heads, bool f16)
{
	uint32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, k_dim = j->a->k_dim;
	float score[GROUP] = { 0 };

	for (uint32_t d0 = 0; d0 < k_dim; d0 += PANEL) {
		__syncthreads();
		load_keys(s, k, n, k_dim, d0, f16);
		__syncthreads();
		score_keys(s, d0, min(k_dim - d0, (uint32_t)PANEL), score, n_heads);
	}
	__syncthreads();
	UNROLL
	for (uint32_t h = 0; h < n_heads; h++)
		s->part[warp][h][lane] = score[h];
}

/*
 * One tile's softmax of the warp's head, the lane's score being the sum of the warps' parts. A score
 * of -infinity is one that is not there, also when all are: then max stays -infinity, and the
 * difference of the two would be not-a-number.
 */
DEVICE void soften(struct attend_shared *s, float scale, bool there, float *max, float *sum)
{
	uint32_t h = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
	float score = 0, new_max, fade, p;

	UNROLL
	for (int w = 0; w < CUDA_ROWS; w++)
		score += s->part[w][h][lane];
	score = there ? score * scale : -INFINITY;
	new_max = fmaxf(*max, warp_max(score));
	fade = *max == new_max ? 1.0f : expf(*max - new_max);
	p = score == -INFINITY ? 0 : expf(score - new_max);
	*max = new_max;
	*sum = *sum * fade + warp_sum(p);
	((float *)s->p[h])[lane] = p;
	if (lane == 0)
		s->fade[h] = fade;
}

/* A thread's dimension, and the quads of positions that it adds up: part, part + n_parts, ... */
struct place {
	uint32_t dim, part, n_parts, n_dims; /* n_dims: v_dim in whole warps */
	bool used;
};

DEVICE struct place place_of(uint32_t v_dim)
{
	struct place at;

	at.n_dims = (v_dim + CUDA_WARP - 1) / CUDA_WARP * CUDA_WARP;
	at.n_parts = CUDA_THREADS / at.n_dims;
	at.dim = threadIdx.x % at.n_dims;
	at.part = threadIdx.x / at.n_dims;
	at.used = at.part < at.n_parts && at.dim < v_dim;
	return at;
}

/* The thread's dimension of n values in their page, into the sums of all heads. */
DEVICE void add_values(const struct attend_shared *s, const struct place *at, const char *v,
		       uint32_t n, uint32_t v_dim, float out[GROUP], uint32_t n_heads, bool f16)
{
	UNROLL
	for (uint32_t h = 0; h < n_heads; h++)
		out[h] *= s->fade[h];
	for (uint32_t quad = at->part; at->used && quad * 4 < n; quad += at->n_parts) {
		uint32_t i = quad * 4 * v_dim + at->dim, left = n - quad * 4;
		float v0 = load(v, i, f16);
		float v1 = left > 1 ? load(v, i + v_dim, f16) : 0;
		float v2 = left > 2 ? load(v, i + 2 * v_dim, f16) : 0;
		float v3 = left > 3 ? load(v, i + 3 * v_dim, f16) : 0;

		UNROLL
		for (uint32_t h = 0; h < n_heads; h++) {
			float4 p = s->p[h][quad];

			out[h] = fmaf(p.x, v0, out[h]);
			out[h] = fmaf(p.y, v1, out[h]);
			out[h] = fmaf(p.z, v2, out[h]);
			out[h] = fmaf(p.w, v3, out[h]);
		}
	}
}

/* What a split leaves of a head (row * n_head + head): largest score, sum of p, sums of values. */
DEVICE float *partial_of(const struct cuda_attention *a, uint64_t head, uint32_t split)
{
	return a->partial + (head * a->n_split + split) * (a->v_dim + 2);
}

/* The threads' sums of each head put together: to out, or for the join of the splits. */
DEVICE void put_out(const struct attend *j, const struct attend_shared *s, const struct place *at)
{
	const struct cuda_attention *a = j->a;

	for (uint32_t i = threadIdx.x; i < j->n_heads * a->v_dim; i += CUDA_THREADS) {
		uint32_t h = i / a->v_dim, d = i % a->v_dim;
		float sum = 0;

		for (uint32_t part = 0; part < at->n_parts; part++)
			sum += s->out[h][part * at->n_dims + d];
		if (a->partial)
			partial_of(a, j->first + h, blockIdx.z)[2 + d] = sum;
		else
			a->out[(j->first + h) * a->v_dim + d] = sum / s->fade[h];
	}
}

/* Of the warp's head. */
DEVICE void put_max_and_sum(const struct attend *j, struct attend_shared *s, float max, float sum)
{
	uint32_t h = threadIdx.x / CUDA_WARP;
	float *partial;

	if (threadIdx.x % CUDA_WARP != 0 || h >= j->n_heads)
		return;
	s->fade[h] = sum;
	if (!j->a->partial)
		return;
	partial = partial_of(j->a, j->first + h, blockIdx.z);
	partial[0] = max;
	partial[1] = sum;
}

/*
 * For up to n_heads heads. n_heads and f16 are constants wherever this is called, and it is always
 * inlined: how many heads are added up at once has to be known when registers are given out.
 */
DEVICE void attend(const struct attend *j, struct attend_shared *s, uint32_t n_heads, bool f16)
{
	const struct cuda_attention *a = j->a;
	const struct place at = place_of(a->v_dim);
	float max = -INFINITY, sum = 0, out[GROUP] = { 0 };

	load_queries(j, s, n_heads);
	for (uint32_t pos = j->from; pos < j->to; pos += TILE) {
		char *page = page_of(a, j->pages, pos);
		uint32_t n = min(j->to - pos, (uint32_t)TILE);

		score_tile(j, s, keys_of(a, page, j->head_kv), n, n_heads, f16);
		__syncthreads();
		if (threadIdx.x / CUDA_WARP < n_heads)
			soften(s, a->scale, threadIdx.x % CUDA_WARP < n, &max, &sum);
		__syncthreads();
		add_values(s, &at, values_of(a, page, j->head_kv), n, a->v_dim, out, n_heads, f16);
	}
	__syncthreads();
	put_max_and_sum(j, s, max, sum);
	UNROLL
	for (uint32_t h = 0; h < n_heads; h++)
		s->out[h][threadIdx.x] = out[h];
	__syncthreads();
	put_out(j, s, &at);
}

DEVICE void attend_type(const struct attend *j, struct attend_shared *s, bool f16)
{
	if (j->n_heads <= 2)
		attend(j, s, 2, f16);
	else if (j->n_heads <= 4)
		attend(j, s, 4, f16);
	else
		attend(j, s, GROUP, f16);
}

/* Positions of a split: whole tiles, as many in each but the last ones. */
KERNEL(cuda_attention_rows, struct cuda_attention, a)
{
	SHARED(struct attend_shared, shared, 1);
	const struct cuda_span *s = &a.spans[a.span_of_row[blockIdx.y]];
	uint32_t n_kv = s->pos + (blockIdx.y - s->row) + 1, group = a.n_head / a.n_head_kv;
	uint32_t tiles = (n_kv + TILE - 1) / TILE, per = (tiles + gridDim.z - 1) / gridDim.z * TILE;
	struct attend j;

	j.a = &a;
	j.pages = s->pages;
	j.head_kv = blockIdx.x;
	j.from = min(per * blockIdx.z, n_kv);
	j.to = min(j.from + per, n_kv);
	for (uint32_t first = 0; first < group; first += GROUP) {
		j.n_heads = min(group - first, (uint32_t)GROUP);
		j.first = (uint64_t)blockIdx.y * a.n_head + blockIdx.x * group + first;
		if (a.f16)
			attend_type(&j, shared, true);
		else
			attend_type(&j, shared, false);
	}
}

/* The splits of one head of one row, in order. */
KERNEL(cuda_attention_join, struct cuda_attention, a)
{
	uint64_t head = (uint64_t)blockIdx.y * a.n_head + blockIdx.x;
	float max = -INFINITY;

	for (uint32_t i = 0; i < a.n_split; i++)
		max = fmaxf(max, *partial_of(&a, head, i));
	for (uint32_t d = threadIdx.x; d < a.v_dim; d += blockDim.x) {
		float sum = 0, out = 0;

		for (uint32_t i = 0; i < a.n_split; i++) {
			const float *p = partial_of(&a, head, i);
			float fade = p[0] == max ? 1.0f : expf(p[0] - max);

			sum = fmaf(p[1], fade, sum);
			out = fmaf(p[2 + d], fade, out);
		}
		a.out[head * a.v_dim + d] = out / sum;
	}
}
