/* SPDX-License-Identifier: MIT */
/*
 * delta_chunk.cu: the gated delta rule for the many rows of a prompt: a chunk of them at once.
 *
 * Owns no state: a sequence's lies at its span, in the form that deltanet.cu's recurrence has it, so
 * either goes on where the other stopped. Launched as args.h says. Refuses to know the batch: a
 * chunk's results are made of the state before it and of its rows alone, so cuts between chunks
 * make no difference to the bit; other cuts change the order of sums. Invariant: no row reads what
 * later rows left.
 *
 * With G_t the sum of the chunk's first decays, up to row t's, and S0 the state before the chunk,
 *
 *   d_i = beta_i (v_i - exp(G_i) S0^T k_i) - sum over j < i of beta_i exp(G_i - G_j) <k_i, k_j> d_j,
 *   o_i = exp(G_i) S0^T q_i + sum over j <= i of exp(G_i - G_j) <q_i, k_j> d_j,
 *   S   = exp(G_T) S0 + sum over j of exp(G_T - G_j) k_j (x) d_j.
 *
 * All but the triangular system of the d are products of small matrices. A block has COLUMNS of one
 * head's state in shared memory and makes the products among keys and queries for itself, a third of
 * its work: to share them would take a launch more, and memory between the two.
 */
#include "kernels/cuda/device.cuh"

#define CHUNK   CUDA_DELTA_CHUNK
#define COLUMNS CUDA_DELTA_COLUMNS
#define PIECE   CUDA_WARP   /* dimensions of keys or queries that are in shared memory at a time */
#define PITCH   (PIECE + 4) /* float4s of eight rows that follow each other lie in different banks */
#define HALF    (CUDA_THREADS / 2)
#define GROUPS  8               /* of columns, in a half's products: 16 groups of rows by these */
#define APART   (HALF / GROUPS) /* rows of a thread's tile */
#define LOADS   (CHUNK / CUDA_ROWS) /* rows that a warp brings */

struct chunk_shared {
	/*
	 * Of keys and of queries; then what is made of them: <k_i, k_j> at [j][i], <q_i, k_j> at
	 * [i][j]; then both of keys.
	 */
	float piece[2][CHUNK][PITCH];
	float d[CHUNK][COLUMNS]; /* the values at first */
	float g[CHUNK], g_rest[CHUNK], since_start[CHUNK], to_end[CHUNK], beta[CHUNK];
	/* As many rows as the shared memory has, at least k_dim rounded up to two pieces. */
	float state[CUDA_HEAD_MAX][COLUMNS];
};

static_assert(sizeof(struct chunk_shared) == CUDA_DELTA_CHUNK_SHARED(CUDA_HEAD_MAX), "args.h");
static_assert(CHUNK == 2 * APART && CHUNK == CUDA_WARP && COLUMNS == CUDA_WARP && PIECE == CHUNK,
	      "who has which element");

struct chunk_job {
	const struct cuda_delta_rule *a;
	const float *q, *k, *v, *g, *beta; /* of the span's first row; v from the block's first column on */
	float *state, *out;                /* from there on, too */
	uint32_t n_tok, n_columns;
};

/* On its way from memory: the lane's element of rows (number of the warp) + i * CUDA_ROWS. */
struct chunk_loads {
	float piece[2][LOADS], v[LOADS], g, beta;
};

DEVICE void load4(float x[4], const float *from)
{
	float4 v = *(const float4 *)from;

	x[0] = v.x;
	x[1] = v.y;
	x[2] = v.z;
	x[3] = v.w;
}

DEVICE void store4(float *to, const float x[4])
{
	*(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
}

/* Of rows [t0, t0 + n) what lies at `from` in the first one: `width` elements, of all others zeros. */
DEVICE void fetch(float x[LOADS], const float *from, uint64_t stride, uint32_t t0, uint32_t n,
		  uint32_t width)
{
	uint32_t lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;

	UNROLL
	for (uint32_t i = 0; i < LOADS; i++) {
		uint32_t t = warp + i * CUDA_ROWS;

		x[i] = t < n && lane < width ? from[(t0 + t) * stride + lane] : 0;
	}
}

DEVICE uint32_t left(uint32_t whole, uint32_t from)
{
	return whole > from ? whole - from : 0;
}

DEVICE uint32_t rows_from(const struct chunk_job *j, uint32_t t0)
{
	return min(left(j->n_tok, t0), (uint32_t)CHUNK);
}

DEVICE void fetch_keys_queries(const struct chunk_job *j, struct chunk_loads *l, uint32_t t0,
			       uint32_t dim)
{
	uint32_t n = rows_from(j, t0), width = left(j->a->k_dim, dim);

	fetch(l->piece[0], j->k + dim, j->a->n_ch, t0, n, width);
	fetch(l->piece[1], j->q + dim, j->a->n_ch, t0, n, width);
}

DEVICE void fetch_keys(const struct chunk_job *j, struct chunk_loads *l, uint32_t t0, uint32_t dim)
{
	uint32_t n = rows_from(j, t0);

	fetch(l->piece[0], j->k + dim, j->a->n_ch, t0, n, left(j->a->k_dim, dim));
	fetch(l->piece[1], j->k + dim + PIECE, j->a->n_ch, t0, n, left(j->a->k_dim, dim + PIECE));
}

/* What a chunk begins with. Rows that are not there have no effect: nothing decays, nothing is added. */
DEVICE void fetch_chunk(const struct chunk_job *j, struct chunk_loads *l, uint32_t t0)
{
	uint32_t n = rows_from(j, t0), lane = threadIdx.x % CUDA_WARP;
	uint64_t at = (uint64_t)(t0 + lane) * j->a->n_head_v;

	fetch_keys_queries(j, l, t0, 0);
	fetch(l->v, j->v, j->a->n_ch, t0, n, j->n_columns);
	l->g = lane < n ? j->g[at] : 0;
	l->beta = lane < n ? j->beta[at] : 0;
}

/* Each row by its `scale`, if there is one. */
DEVICE void put_pieces(struct chunk_shared *s, const struct chunk_loads *l, const float *scale)
{
	uint32_t lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;

	UNROLL
	for (uint32_t i = 0; i < LOADS; i++) {
		uint32_t t = warp + i * CUDA_ROWS;
		float by = scale ? scale[t] : 1.0f;

		s->piece[0][t][lane] = l->piece[0][i] * by;
		s->piece[1][t][lane] = l->piece[1][i] * by;
	}
}

/*
 * The sums of the decays, a lane a row, as pairs of floats of which the second is what the first
 * rounded away: a decay may be large and those after it small, and it is differences that count.
 */
DEVICE void sum_decays(struct chunk_shared *s, float g)
{
	uint32_t lane = threadIdx.x % CUDA_WARP;
	/* exp(-1e4) is 0 as well, and differences of infinities are not. */
	float sum = g < -1e4f ? -1e4f : g, rest = 0, all, all_rest;

	UNROLL
	for (uint32_t step = 1; step < CUDA_WARP; step *= 2) {
		float before = __shfl_sync(0xffffffff, sum, (int)((lane - step) % CUDA_WARP));
		float before_rest = __shfl_sync(0xffffffff, rest, (int)((lane - step) % CUDA_WARP));

		if (lane >= step) {
			float both = sum + before, part = both - sum;

			rest += before_rest + ((sum - (both - part)) + (before - part));
			sum = both;
		}
	}
	all = __shfl_sync(0xffffffff, sum, CHUNK - 1);
	all_rest = __shfl_sync(0xffffffff, rest, CHUNK - 1);
	s->g[lane] = sum;
	s->g_rest[lane] = rest;
	s->since_start[lane] = expf(sum + rest);
	s->to_end[lane] = expf((all - sum) + (all_rest - rest));
}

DEVICE void begin_chunk(struct chunk_shared *s, const struct chunk_loads *l)
{
	uint32_t lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;

	UNROLL
	for (uint32_t i = 0; i < LOADS; i++)
		s->d[warp + i * CUDA_ROWS][lane] = l->v[i];
	if (warp == 0) {
		s->beta[lane] = l->beta;
		sum_decays(s, l->g);
	}
}

/*
 * sum += of the piece: keys' rows r and r + APART, then queries' rows r and r + APART, by the state's
 * columns 4 * c + m or by the keys' rows c + GROUPS * m. `by_keys` is a constant wherever this is
 * called.
 */
DEVICE void add_products(float sum[4][4], const struct chunk_shared *s, uint32_t dim, bool by_keys)
{
	uint32_t r = threadIdx.x % HALF / GROUPS, c = threadIdx.x % GROUPS;

	for (uint32_t e = 0; e < PIECE; e += 4) {
		float a[4][4], b[4][4];

		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			load4(a[i], &s->piece[i / 2][r + i % 2 * APART][e]);
			load4(b[i], by_keys ? &s->piece[0][c + GROUPS * i][e]
					    : &s->state[dim + e + i][4 * c]);
		}
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			UNROLL
			for (uint32_t m = 0; m < 4; m++) {
				/* Above the diagonal. */
				if (by_keys && i % 2 == 0 && GROUPS * m >= APART)
					continue;
				UNROLL
				for (uint32_t x = 0; x < 4; x++)
					sum[i][m] = fmaf(a[i][x], by_keys ? b[m][x] : b[x][m],
							 sum[i][m]);
			}
		}
	}
}

/* Over all pieces; those that the update begins with are on their way afterwards. */
DEVICE void multiply(const struct chunk_job *j, struct chunk_shared *s, struct chunk_loads *l,
		     uint32_t t0, float sum[4][4])
{
	for (uint32_t dim = 0; dim < j->a->k_dim; dim += PIECE) {
		put_pieces(s, l, NULL);
		__syncthreads();
		if (dim + PIECE < j->a->k_dim)
			fetch_keys_queries(j, l, t0, dim + PIECE);
		else
			fetch_keys(j, l, t0, 0);
		if (threadIdx.x < HALF)
			add_products(sum, s, dim, false);
		else
			add_products(sum, s, dim, true);
		__syncthreads();
	}
}

/* By the state: the right side of the system to d; in place, what the outputs begin with. */
DEVICE void put_right_side(struct chunk_shared *s, float sum[4][4])
{
	uint32_t r = threadIdx.x / GROUPS, c = threadIdx.x % GROUPS;

	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		uint32_t t = r + i * APART;
		float v[4];

		load4(v, &s->d[t][4 * c]);
		UNROLL
		for (uint32_t m = 0; m < 4; m++) {
			v[m] = s->beta[t] * fmaf(-s->since_start[t], sum[i][m], v[m]);
			sum[2 + i][m] *= s->since_start[t];
		}
		store4(&s->d[t][4 * c], v);
	}
}

/*
 * By the keys: both triangles, with the decay between the two rows. What lies above them is of no
 * use to anybody.
 */
DEVICE void put_triangles(struct chunk_shared *s, float sum[4][4])
{
	uint32_t r = threadIdx.x % HALF / GROUPS, c = threadIdx.x % GROUPS;

	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		UNROLL
		for (uint32_t m = 0; m < 4; m++) {
			uint32_t t = r + i * APART, u = c + GROUPS * m;
			float decay;

			if (u > t)
				continue;
			decay = expf((s->g[t] - s->g[u]) + (s->g_rest[t] - s->g_rest[u]));
			s->piece[0][u][t] = s->beta[t] * decay * sum[i][m];
			s->piece[1][t][u] = decay * sum[2 + i][m];
		}
	}
}

/* One warp, a lane a column: row by row out of what is left of each, as soon as it is known. */
DEVICE void solve(struct chunk_shared *s)
{
	uint32_t lane = threadIdx.x % CUDA_WARP;
	float d[CHUNK];

	UNROLL
	for (uint32_t t = 0; t < CHUNK; t++)
		d[t] = s->d[t][lane];
	UNROLL
	for (uint32_t u = 0; u + 1 < CHUNK; u++) {
		UNROLL
		for (uint32_t t = (u + 1) / 4 * 4; t < CHUNK; t += 4) {
			float by[4];

			load4(by, &s->piece[0][u][t]);
			UNROLL
			for (uint32_t m = 0; m < 4; m++)
				if (t + m > u)
					d[t + m] = fmaf(-by[m], d[u], d[t + m]);
		}
	}
	UNROLL
	for (uint32_t t = 0; t < CHUNK; t++)
		s->d[t][lane] = d[t];
}

/* o: rows r and r + APART of the output as far as the state before the chunk makes them. */
DEVICE void put_outputs(const struct chunk_job *j, const struct chunk_shared *s, uint32_t t0,
			float o[2][4])
{
	uint32_t r = threadIdx.x / GROUPS, c = threadIdx.x % GROUPS, n = rows_from(j, t0);
	uint64_t n_out = (uint64_t)j->a->n_head_v * j->a->v_dim;

	for (uint32_t u = 0; u < CHUNK; u += 4) {
		float d[4][4], by[4];

		UNROLL
		for (uint32_t x = 0; x < 4; x++)
			load4(d[x], &s->d[u + x][4 * c]);
		UNROLL
		for (uint32_t i = 0; i < 2; i++) {
			if (u >= (i + 1) * APART)
				continue;
			load4(by, &s->piece[1][r + i * APART][u]);
			UNROLL
			for (uint32_t x = 0; x < 4; x++) {
				if (u + x > r + i * APART)
					continue;
				UNROLL
				for (uint32_t m = 0; m < 4; m++)
					o[i][m] = fmaf(by[x], d[x][m], o[i][m]);
			}
		}
	}
	UNROLL
	for (uint32_t i = 0; i < 2; i++) {
		UNROLL
		for (uint32_t m = 0; m < 4; m++)
			if (r + i * APART < n && 4 * c + m < j->n_columns)
				j->out[(t0 + r + i * APART) * n_out + 4 * c + m] = o[i][m];
	}
}

/* Two pieces of the state's rows: a thread has four rows of two columns. */
DEVICE void update_rows(struct chunk_shared *s, uint32_t dim)
{
	uint32_t r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 2;
	float sum[4][2] = { { 0 } }, decay = s->since_start[CHUNK - 1];

	for (uint32_t t = 0; t < CHUNK; t++) {
		float2 d = *(const float2 *)&s->d[t][c];
		float k[4];

		load4(k, &s->piece[r / PIECE][t][r % PIECE]);
		UNROLL
		for (uint32_t i = 0; i < 4; i++) {
			sum[i][0] = fmaf(k[i], d.x, sum[i][0]);
			sum[i][1] = fmaf(k[i], d.y, sum[i][1]);
		}
	}
	UNROLL
	for (uint32_t i = 0; i < 4; i++) {
		float2 *to = (float2 *)&s->state[dim + r + i][c];

		*to = make_float2(fmaf(to->x, decay, sum[i][0]), fmaf(to->y, decay, sum[i][1]));
	}
}

/* What the next chunk begins with is on its way afterwards. */
DEVICE void update(const struct chunk_job *j, struct chunk_shared *s, struct chunk_loads *l, uint32_t t0)
{
	for (uint32_t dim = 0; dim < j->a->k_dim; dim += 2 * PIECE) {
		put_pieces(s, l, s->to_end);
		__syncthreads();
		if (dim + 2 * PIECE < j->a->k_dim)
			fetch_keys(j, l, t0, dim + 2 * PIECE);
		else
			fetch_chunk(j, l, t0 + CHUNK);
		update_rows(s, dim);
		__syncthreads();
	}
}

DEVICE void run_chunk(const struct chunk_job *j, struct chunk_shared *s, struct chunk_loads *l,
		      uint32_t t0)
{
	float sum[4][4] = { { 0 } };

	begin_chunk(s, l);
	multiply(j, s, l, t0, sum);
	if (threadIdx.x < HALF)
		put_right_side(s, sum);
	else
		put_triangles(s, sum);
	__syncthreads();
	if (threadIdx.x < CUDA_WARP)
		solve(s);
	__syncthreads();
	if (threadIdx.x < HALF)
		put_outputs(j, s, t0, &sum[2]);
	__syncthreads();
	update(j, s, l, t0);
}

KERNEL(cuda_delta_chunk, struct cuda_delta_rule, a)
{
	DYNAMIC_SHARED(struct chunk_shared, s);
	const struct cuda_span *span = &a.spans[blockIdx.y];
	uint32_t head = blockIdx.x, first = blockIdx.z * COLUMNS, n_k = a.n_head_k * a.k_dim;
	uint32_t lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
	uint32_t n_rows = (a.k_dim + 2 * PIECE - 1) / (2 * PIECE) * (2 * PIECE);
	struct chunk_loads loads;
	struct chunk_job j;

	j.a = &a;
	j.q = a.mixed + (uint64_t)span->row * a.n_ch + head % a.n_head_k * a.k_dim;
	j.k = j.q + n_k;
	j.v = a.mixed + (uint64_t)span->row * a.n_ch + 2 * n_k + head * a.v_dim + first;
	j.g = a.g + (uint64_t)span->row * a.n_head_v + head;
	j.beta = a.beta + (uint64_t)span->row * a.n_head_v + head;
	j.state = span->recurrent + a.state_offset + (uint64_t)head * a.k_dim * a.v_dim + first;
	j.out = a.out + ((uint64_t)span->row * a.n_head_v + head) * a.v_dim + first;
	j.n_tok = span->n_tok;
	j.n_columns = left(a.v_dim, first);

	fetch_chunk(&j, &loads, 0);
	for (uint32_t d = warp; d < n_rows; d += CUDA_ROWS)
		s->state[d][lane] =
			d < a.k_dim && lane < j.n_columns ? j.state[(uint64_t)d * a.v_dim + lane] : 0;
	for (uint32_t t0 = 0; t0 < j.n_tok; t0 += CHUNK)
		run_chunk(&j, s, &loads, t0);
	for (uint32_t d = warp; d < a.k_dim; d += CUDA_ROWS)
		if (lane < j.n_columns)
			j.state[(uint64_t)d * a.v_dim + lane] = s->state[d][lane];
}
