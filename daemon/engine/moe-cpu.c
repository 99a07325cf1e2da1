/* SPDX-License-Identifier: MIT */
/*
 * moe-cpu.c: routing and experts on the CPU: chooses, asks residency for what was chosen, computes
 * the blocks that are in memory wave by wave, adds up.
 *
 * Owns the member moe of struct backend_cpu and its job, which lies in the arena from begin to end.
 * Called through the backend's table, and by another backend for the blocks that it leaves to the
 * CPU (backend_cpu_moe_*() in backend.h); engine thread only. Refuses to know where blocks come
 * from and, from begin to end, who chose. Invariant: a place is computed from its own row and its
 * expert's weights alone and added in the order of the choice, so how blocks are spread over waves
 * changes no bit of the result.
 */
#include "daemon/engine/moe-cpu.h"

#include "daemon/engine/backend-cpu.h"
#include "daemon/residency/residency.h"

#include <assert.h>

size_t backend_moe_temp_floats(size_t n_embd, size_t n_ff, size_t n_expert, size_t n_used)
{
	/*
	 * input in two forms, scores twice; chosen, weight, place, token; gathered, gate_up, hidden,
	 * result. Converted rows are no wider than floats.
	 */
	return 2 * n_embd + 2 * n_expert + n_used * (4 + n_embd + 2 * n_ff + n_ff + n_embd);
}

/* Routing. */

struct choose_job {
	const struct backend_cpu *c;
	const struct route *r;
	enum backend_gating gating;
	const float *router;
	float *scores, *rest; /* [t][n_expert]: what is chosen by, and what choosing leaves of it */
};

/* Not-a-number is nobody's choice, but n_used different experts are chosen all the same. */
static void probabilities(const struct cpu_kernels *k, float *scores, size_t n)
{
	k->softmax(scores, n);
	for (size_t e = 0; e < n; e++)
		if (!(scores[e] >= 0))
			scores[e] = 0;
}

static void scale_to_one(float *weight, size_t n)
{
	float sum = 0;

	for (size_t i = 0; i < n; i++)
		sum += weight[i];
	for (size_t i = 0; i < n; i++)
		weight[i] /= sum;
}

static void choose_piece(void *arg, size_t t, unsigned thread)
{
	const struct choose_job *j = arg;
	const struct cpu_kernels *k = j->c->k;
	size_t n = j->r->n_expert, n_used = j->r->n_used;
	float *scores = j->scores + t * n, *rest = j->rest + t * n, *weight = j->r->weight + t * n_used;
	uint32_t *chosen = j->r->chosen + t * n_used;

	(void)thread;
	memcpy(scores, j->router + t * n, n * sizeof(float));
	if (j->gating == BACKEND_GATING_SOFTMAX)
		probabilities(k, scores, n);
	memcpy(rest, scores, n * sizeof(float));
	k->top_k(rest, n, n_used, chosen);
	for (size_t i = 0; i < n_used; i++)
		weight[i] = scores[chosen[i]];

	switch (j->gating) {
	case BACKEND_GATING_SOFTMAX: scale_to_one(weight, n_used); break;
	case BACKEND_GATING_CHOSEN: k->softmax(weight, n_used); break;
	}
}

/* Chooses; *r lies in the arena from where it was on, until c->used is moved beyond it. */
static int choose(struct backend_cpu *c, const struct backend_moe *p, const float *router_logits,
		  size_t n_tok, struct route *r)
{
	struct choose_job j = { .c = c, .r = r, .gating = p->gating, .router = router_logits };
	void *mem = cpu_take(c, 1, route_bytes(n_tok, p->n_used, p->n_expert));
	size_t top = c->top;

	j.scores = cpu_take(c, n_tok * p->n_expert, sizeof(float));
	j.rest = cpu_take(c, n_tok * p->n_expert, sizeof(float));
	if (!mem || !j.scores || !j.rest)
		return -ENOMEM;
	route_init(r, mem, n_tok, p->n_used, p->n_expert);
	cpu_run(c, n_tok, choose_piece, &j);
	c->top = top;
	return route_sort(r);
}

static void drop_route(struct backend_cpu *c)
{
	if (!c->moe.routed)
		return;
	c->used = c->moe.mark;
	c->moe.routed = NULL;
	cpu_drop(c);
}

int moe_cpu_route(struct backend *b, const struct backend_moe *p, const float *router_logits, size_t n_tok)
{
	struct backend_cpu *c = cpu_of(b);
	int r;

	drop_route(c); /* of a layer that failed */
	cpu_drop(c);
	r = choose(c, p, router_logits, n_tok, &c->moe.route);
	if (r < 0) {
		cpu_drop(c);
		return r;
	}
	c->moe.routed = p;
	c->moe.mark = c->used;
	c->used = c->top; /* stays until moe() */
	if (c->moe.residency)
		residency_layer_begin(c->moe.residency, p->layer, c->moe.route.active,
				      c->moe.route.n_rows, c->moe.route.n_active);
	return 0;
}

bool moe_cpu_wants_guess(struct backend *b)
{
	struct backend_cpu *c = cpu_of(b);

	return c->moe.residency && residency_wants_guess(c->moe.residency);
}

int moe_cpu_guess(struct backend *b, const struct backend_moe *p, const float *router_logits, size_t n_tok)
{
	struct backend_cpu *c = cpu_of(b);
	struct route route;
	int r;

	cpu_drop(c);
	r = choose(c, p, router_logits, n_tok, &route);
	if (r == 0)
		residency_guess(c->moe.residency, p->layer, route.active, route.n_active);
	cpu_drop(c);
	return r;
}

void moe_cpu_set_residency(struct backend *b, struct residency *r)
{
	cpu_of(b)->moe.residency = r;
}

/* Experts. */

/* Rows as a weight multiplies them. */
struct rows {
	const char *act;
	size_t stride;
};

/* One weight of every expert. */
struct matrix {
	const struct gguf_tensor *w;
	unsigned index; /* of residency_block.matrix */
	struct rows from;
	float *y;
	size_t y_stride, w_stride, rows, row_pieces;
};

struct moe_job {
	struct backend_cpu *c;
	const struct backend_moe *p;
	const struct route *r;
	size_t n_embd, n_ff, hidden_stride;
	struct rows in[2]; /* of each token, as gate and as up multiply them: often the same */
	char *gathered;    /* of each place, as the one at hand does */
	float *gate_up;    /* [place][2 * n_ff]: gate, then up; the product replaces gate */
	char *hidden;      /* the product in the form that down multiplies */
	const struct residency_block *blocks; /* at hand */
	size_t n_blocks;
	struct rows from; /* what is gathered */
	/* of what is done place by place, and how many blocks make a piece of it */
	void (*do_place)(const struct moe_job *j, uint32_t expert, size_t place);
	size_t piece_blocks;
	const struct matrix *matrices; /* that one loop multiplies: one or two */
	size_t block_pieces;           /* of a block's products */
	float *result;
};

/* What multiplies the rows of x first; the second is the first where the form is fused. */
static const struct gguf_tensor *input_weight(const struct backend_moe *p, unsigned i)
{
	return p->gate_up ? p->gate_up : i == 0 ? p->gate : p->up;
}

static enum quant_type input_type(const struct backend_moe *p, unsigned i)
{
	return cpu_act_type((enum quant_type)input_weight(p, i)->type);
}

static size_t input_stride(const struct backend_moe *p, unsigned i)
{
	return cpu_act_bytes(input_weight(p, i)->type, input_weight(p, i)->ne[0]);
}

/* Files exist whose gate and up have types of different activation forms. */
static bool second_form(const struct backend_moe *p)
{
	return input_type(p, 1) != input_type(p, 0) && input_type(p, 1) != QUANT_F32;
}

static size_t gathered_stride(const struct backend_moe *p)
{
	return MAX(input_stride(p, 0), input_stride(p, 1));
}

/* As cpu_take() will count it. */
static bool count(size_t n, size_t size, size_t *total)
{
	size_t bytes;

	return mul_ok(n, size, &bytes) && add_ok(bytes, CPU_LINE_BYTES - 1, &bytes) &&
	       add_ok(*total, bytes & ~(CPU_LINE_BYTES - 1), total);
}

size_t backend_cpu_moe_bytes(const struct backend_moe *p, size_t n_tok)
{
	size_t n_slots, total = 0;
	bool ok = mul_ok(n_tok, p->n_used, &n_slots) && count(1, sizeof(struct moe_job), &total) &&
		  count(n_slots, gathered_stride(p), &total) &&
		  count(n_slots, 2 * p->down->ne[0] * sizeof(float), &total) &&
		  count(n_slots, cpu_act_bytes(p->down->type, p->down->ne[0]), &total);

	if (ok && input_type(p, 0) != QUANT_F32)
		ok = count(n_tok, input_stride(p, 0), &total);
	if (ok && second_form(p))
		ok = count(n_tok, input_stride(p, 1), &total);
	return ok ? total : SIZE_MAX;
}

/* x as gate and up want it. */
static int convert_input(struct moe_job *j, const float *x)
{
	const struct gguf_tensor *gate = input_weight(j->p, 0), *up = input_weight(j->p, 1);
	char *act;

	j->in[0].stride = input_stride(j->p, 0);
	j->in[0].act = cpu_activations(j->c, gate->type, x, j->r->n_tok, gate->ne[0]);
	if (!j->in[0].act)
		return -ENOMEM;
	j->in[1] = j->in[0];
	if (input_type(j->p, 1) == input_type(j->p, 0))
		return 0;
	j->in[1] = (struct rows){ (const char *)x, input_stride(j->p, 1) };
	if (!second_form(j->p))
		return 0;
	j->in[1].act = act = cpu_take(j->c, j->r->n_tok, j->in[1].stride);
	if (!act)
		return -ENOMEM;
	cpu_convert(j->c, input_type(j->p, 1), x, j->r->n_tok, up->ne[0], act);
	return 0;
}

/* What is kept of x may be used. Also when it fails, end() follows. */
static int begin(struct backend_cpu *c, const struct backend_moe *p, const struct route *r,
		 const float *x)
{
	struct moe_job j = { .c = c,
			     .p = p,
			     .r = r,
			     .n_embd = p->down->ne[1],
			     .n_ff = p->down->ne[0],
			     .hidden_stride = cpu_act_bytes(p->down->type, p->down->ne[0]) };
	size_t n_slots = r->n_tok * r->n_used;
	struct moe_job *job;
	int err;

	assert(!c->moe.job && r->n_used == p->n_used && r->n_expert == p->n_expert);
	/* First: when the kept form is another one, all above it goes. */
	err = convert_input(&j, x);
	if (err < 0)
		return err;
	j.gathered = cpu_take(c, n_slots, gathered_stride(p));
	j.gate_up = cpu_take(c, n_slots, 2 * j.n_ff * sizeof(float));
	j.hidden = cpu_take(c, n_slots, j.hidden_stride);
	job = cpu_take(c, 1, sizeof(*job));
	if (!j.gathered || !j.gate_up || !j.hidden || !job)
		return -ENOMEM;
	*job = j;
	c->moe.job = job;
	return 0;
}

static void end(struct backend_cpu *c)
{
	c->moe.job = NULL;
	cpu_drop(c);
}

int backend_cpu_moe_begin(struct backend *b, const struct backend_moe *p, const struct route *r,
			  const float *x)
{
	struct backend_cpu *c = cpu_of(b);
	int err;

	cpu_drop(c); /* x may have been written where nobody here saw it */
	err = begin(c, p, r, x);
	if (err < 0)
		end(c);
	return err;
}

void backend_cpu_moe_end(struct backend *b)
{
	end(cpu_of(b));
}

static void blocks_piece(void *arg, size_t i, unsigned thread)
{
	const struct moe_job *j = arg;
	size_t end = MIN((i + 1) * j->piece_blocks, j->n_blocks);

	(void)thread;
	for (size_t b = i * j->piece_blocks; b < end; b++) {
		uint32_t e = j->blocks[b].expert;

		for (size_t place = j->r->first[e]; place < j->r->first[e + 1]; place++)
			j->do_place(j, e, place);
	}
}

/* Of the blocks at hand. */
static void each_place(struct moe_job *j,
		       void (*fn)(const struct moe_job *j, uint32_t expert, size_t place))
{
	j->do_place = fn;
	cpu_run(j->c, n_pieces(j->n_blocks, j->piece_blocks), blocks_piece, j);
}

static void gather_place(const struct moe_job *j, uint32_t expert, size_t place)
{
	(void)expert;
	memcpy(j->gathered + place * j->from.stride,
	       j->from.act + j->r->token[place] * j->from.stride, j->from.stride);
}

/* The input of every place of the blocks at hand. A single token's row is that of every place. */
static struct rows gather(struct moe_job *j, struct rows in)
{
	if (j->r->n_tok == 1)
		return (struct rows){ in.act, 0 };
	j->from = in;
	each_place(j, gather_place);
	return (struct rows){ j->gathered, in.stride };
}

static void expert_piece(void *arg, size_t i, unsigned thread)
{
	const struct moe_job *j = arg;
	const struct residency_block *b = &j->blocks[i / j->block_pieces];
	const struct matrix *m = j->matrices;
	size_t piece = i % j->block_pieces, end = j->r->first[b->expert + 1];
	size_t cols = j->c->tiles.l2_cols, r0;

	(void)thread;
	if (piece >= m->row_pieces)
		piece -= m++->row_pieces;
	r0 = piece * m->rows;
	for (size_t place = j->r->first[b->expert]; place < end; place += cols)
		j->c->k->matmul[m->w->type](m->w->ne[0],
					    (const char *)b->matrix[m->index] + r0 * m->w_stride,
					    m->w_stride, MIN(m->rows, m->w->ne[1] - r0),
					    m->from.act + place * m->from.stride, m->from.stride,
					    MIN(cols, end - place), m->y + place * m->y_stride + r0,
					    m->y_stride, &j->c->tiles);
}

/* One or two weights of every block at hand over the places of its expert. */
static void run_experts(struct moe_job *j, struct matrix *m, size_t n)
{
	size_t bytes = 0, n_cols = j->r->n_tok * j->r->n_used / j->r->n_active;

	for (size_t i = 0; i < n; i++) {
		m[i].w_stride = quant_row_bytes(m[i].w->type, m[i].w->ne[0]);
		bytes += m[i].w->ne[1] * m[i].w_stride;
	}
	j->matrices = m;
	j->block_pieces = 0;
	for (size_t i = 0; i < n; i++) {
		m[i].rows = cpu_matmul_rows(j->c, m[i].w_stride, j->n_blocks * bytes, n_cols);
		m[i].row_pieces = n_pieces(m[i].w->ne[1], m[i].rows);
		j->block_pieces += m[i].row_pieces;
	}
	cpu_run(j->c, j->n_blocks * j->block_pieces, expert_piece, j);
}

static void multiply_input(struct moe_job *j)
{
	struct matrix m[] = {
		{ .w = input_weight(j->p, 0), .index = 0, .y = j->gate_up, .y_stride = 2 * j->n_ff },
		{ .w = j->p->up, .index = 1, .y = j->gate_up + j->n_ff, .y_stride = 2 * j->n_ff },
	};

	m[0].from = m[1].from = gather(j, j->in[0]);
	if (j->p->gate_up || j->in[1].act == j->in[0].act) {
		run_experts(j, m, j->p->gate_up ? 1 : 2);
		return;
	}
	/* There is room for one form of the input at a time. */
	run_experts(j, m, 1);
	m[1].from = gather(j, j->in[1]);
	run_experts(j, m + 1, 1);
}

static void add_bias(const struct moe_job *j, const struct gguf_tensor *bias, uint32_t expert,
		     float *y, size_t n)
{
	if (bias)
		j->c->k->add_scaled(y, (const float *)bias->data + expert * n, 1.0f, n);
}

/* From the products with gate and up to what down multiplies. */
static void hide_place(const struct moe_job *j, uint32_t expert, size_t place)
{
	const struct cpu_kernels *k = j->c->k;
	enum quant_type type = cpu_act_type((enum quant_type)j->p->down->type);
	float *gate = j->gate_up + place * 2 * j->n_ff, *up = gate + j->n_ff;
	char *hidden = j->hidden + place * j->hidden_stride;

	add_bias(j, j->p->gate_bias, expert, gate, j->n_ff);
	add_bias(j, j->p->up_bias, expert, up, j->n_ff);
	(j->p->unit == BACKEND_UNIT_OAI ? k->swiglu_oai : k->silu_mul)(
		gate, up, type == QUANT_F32 ? (float *)hidden : gate, j->n_ff);
	if (type != QUANT_F32)
		k->quantize[type](gate, hidden, j->n_ff);
}

static void bias_place(const struct moe_job *j, uint32_t expert, size_t place)
{
	add_bias(j, j->p->down_bias, expert, j->result + place * j->n_embd, j->n_embd);
}

void backend_cpu_moe_run(struct backend *b, const struct residency_block *blocks, size_t n, float *result)
{
	struct moe_job *j = cpu_of(b)->moe.job;
	struct matrix down;

	assert(j);
	if (n == 0)
		return;
	j->blocks = blocks;
	j->n_blocks = n;
	j->piece_blocks = cpu_piece_rows(MAX(j->n_embd, 2 * j->n_ff) * j->r->n_tok * j->r->n_used /
					 j->r->n_active);
	j->result = result;
	multiply_input(j);
	each_place(j, hide_place);
	down = (struct matrix){ .w = j->p->down,
				.index = 2,
				.from = { j->hidden, j->hidden_stride },
				.y = result,
				.y_stride = j->n_embd };
	run_experts(j, &down, 1);
	if (j->p->down_bias)
		each_place(j, bias_place);
}

/* All of a layer. */

/* Without residency: every expert at once, in the mapping. */
static size_t whole_wave(const struct backend_moe *p, const struct route *r, struct residency_block *wave)
{
	const struct gguf_tensor *const w[CATALOG_MATRICES] = {
		[0] = input_weight(p, 0),
		[1] = p->gate_up ? NULL : p->up,
		[2] = p->down,
	};

	for (size_t i = 0; i < r->n_active; i++) {
		wave[i] = (struct residency_block){ .expert = r->active[i] };
		for (unsigned k = 0; k < CATALOG_MATRICES; k++)
			if (w[k])
				wave[i].matrix[k] = (const char *)w[k]->data +
						    r->active[i] * w[k]->ne[1] *
							    quant_row_bytes(w[k]->type, w[k]->ne[0]);
	}
	return r->n_active;
}

static int run_waves(struct backend_cpu *c, struct residency_block *wave, float *result)
{
	const struct backend_moe *p = c->moe.routed;
	bool on_card; /* there is none */
	ssize_t n;

	if (!c->moe.residency) {
		backend_cpu_moe_run(&c->base, wave, whole_wave(p, &c->moe.route, wave), result);
		return 0;
	}
	while ((n = residency_layer_next(c->moe.residency, wave, p->n_expert, &on_card)) > 0)
		backend_cpu_moe_run(&c->base, wave, (size_t)n, result);
	return (int)n;
}

struct sum_job {
	const struct backend_cpu *c;
	const struct route *r;
	float *result; /* [place][n_embd] */
	float *out;
	size_t n_embd;
};

static void sum_piece(void *arg, size_t t, unsigned thread)
{
	const struct sum_job *j = arg;

	(void)thread;
	for (size_t k = 0; k < j->r->n_used; k++) {
		size_t slot = t * j->r->n_used + k;

		j->c->k->add_scaled(j->out + t * j->n_embd, j->result + j->r->place[slot] * j->n_embd,
				    j->r->weight[slot], j->n_embd);
	}
}

/* From begin to end. */
static int compute(struct backend_cpu *c, const struct backend_moe *p, const float *x, float *out)
{
	const struct route *route = &c->moe.route;
	struct sum_job sum = { .c = c, .r = route, .out = out, .n_embd = p->down->ne[1] };
	struct residency_block *wave;
	int r = begin(c, p, route, x);

	if (r < 0)
		return r;
	sum.result = cpu_take(c, route->n_tok * route->n_used, sum.n_embd * sizeof(float));
	wave = cpu_take(c, p->n_expert, sizeof(*wave));
	if (!sum.result || !wave)
		return -ENOMEM;
	r = run_waves(c, wave, sum.result);
	if (r == 0)
		cpu_run(c, route->n_tok, sum_piece, &sum);
	return r;
}

int moe_cpu_compute(struct backend *b, const struct backend_moe *p, const float *x, size_t n_tok,
		    float *out)
{
	struct backend_cpu *c = cpu_of(b);
	int r;

	assert(c->moe.routed == p && c->moe.route.n_tok == n_tok);
	r = compute(c, p, x, out);
	end(c);
	drop_route(c);
	return r;
}
