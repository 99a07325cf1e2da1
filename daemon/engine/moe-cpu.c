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
	 * input in two forms, probs; chosen, weight, place, token; gathered, gate_up, hidden,
	 * result. Converted rows are no wider than floats.
	 */
	return 2 * n_embd + n_expert + n_used * (4 + n_embd + 2 * n_ff + n_ff + n_embd);
}

/* Routing. */

struct choose_job {
	const struct backend_cpu *c;
	const struct route *r;
	const float *router;
	float *probs; /* [t][n_expert] */
};

static void choose_piece(void *arg, size_t t, unsigned thread)
{
	const struct choose_job *j = arg;
	const struct route *r = j->r;
	size_t n = r->n_expert;
	float *probs = j->probs + t * n, sum = 0;

	(void)thread;
	memcpy(probs, j->router + t * n, n * sizeof(float));
	j->c->k->softmax(probs, n);
	/* Not-a-number is nobody's choice, but n_used different experts are chosen all the same. */
	for (size_t e = 0; e < n; e++)
		if (!(probs[e] >= 0))
			probs[e] = 0;
	for (size_t k = 0; k < r->n_used; k++) {
		size_t best = 0, slot = t * r->n_used + k;

		/* Strictly greater: of equals the lower index wins. */
		for (size_t e = 1; e < n; e++)
			if (probs[e] > probs[best])
				best = e;
		r->chosen[slot] = (uint32_t)best;
		r->weight[slot] = probs[best];
		sum += probs[best];
		probs[best] = -1.0f;
	}
	for (size_t k = 0; k < r->n_used; k++)
		r->weight[t * r->n_used + k] /= sum;
}

/* Chooses; *r lies in the arena from where it was on, until c->used is moved beyond it. */
static int choose(struct backend_cpu *c, const struct backend_moe *p, const float *router_logits,
		  size_t n_tok, struct route *r)
{
	struct choose_job j = { .c = c, .r = r, .router = router_logits };
	void *mem = cpu_take(c, 1, route_bytes(n_tok, p->n_used, p->n_expert));
	size_t top = c->top;

	j.probs = cpu_take(c, n_tok * p->n_expert, sizeof(float));
	if (!mem || !j.probs)
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
	/* one of the three weights at a time */
	const struct gguf_tensor *w;
	unsigned matrix; /* which */
	struct rows from;
	float *y;
	size_t y_stride, w_stride, w_rows, rows, row_pieces;
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

/* A piece is an expert: all its places. */
static void gather_piece(void *arg, size_t i, unsigned thread)
{
	const struct moe_job *j = arg;
	uint32_t e = j->blocks[i].expert;

	(void)thread;
	for (size_t place = j->r->first[e]; place < j->r->first[e + 1]; place++)
		memcpy(j->gathered + place * j->from.stride,
		       j->from.act + j->r->token[place] * j->from.stride, j->from.stride);
}

/* The input of every place of the blocks at hand. A single token's row is that of every place. */
static struct rows gather(struct moe_job *j, struct rows in)
{
	if (j->r->n_tok == 1)
		return (struct rows){ in.act, 0 };
	j->from = in;
	cpu_run(j->c, j->n_blocks, gather_piece, j);
	return (struct rows){ j->gathered, in.stride };
}

static void expert_piece(void *arg, size_t i, unsigned thread)
{
	const struct moe_job *j = arg;
	const struct residency_block *b = &j->blocks[i / j->row_pieces];
	size_t r0 = i % j->row_pieces * j->rows, place = j->r->first[b->expert];

	(void)thread;
	j->c->k->matmul[j->w->type](j->w->ne[0], (const char *)b->matrix[j->matrix] + r0 * j->w_stride,
				    j->w_stride, MIN(j->rows, j->w_rows - r0),
				    j->from.act + place * j->from.stride, j->from.stride,
				    j->r->first[b->expert + 1] - place,
				    j->y + place * j->y_stride + r0, j->y_stride, &j->c->tiles);
}

/* One weight of every block at hand over the places of its expert. */
static void run_experts(struct moe_job *j, const struct gguf_tensor *w, unsigned matrix,
			struct rows from, float *y, size_t y_stride)
{
	j->w = w;
	j->matrix = matrix;
	j->from = from;
	j->y = y;
	j->y_stride = y_stride;
	j->w_stride = quant_row_bytes(w->type, w->ne[0]);
	j->w_rows = w->ne[1];
	j->rows = cpu_matmul_rows(j->w_stride);
	j->row_pieces = n_pieces(j->w_rows, j->rows);
	cpu_run(j->c, j->n_blocks * j->row_pieces, expert_piece, j);
}

static void hidden_piece(void *arg, size_t i, unsigned thread)
{
	const struct moe_job *j = arg;
	enum quant_type type = cpu_act_type((enum quant_type)j->p->down->type);
	uint32_t e = j->blocks[i].expert;

	(void)thread;
	for (size_t place = j->r->first[e]; place < j->r->first[e + 1]; place++) {
		float *gate = j->gate_up + place * 2 * j->n_ff;
		char *hidden = j->hidden + place * j->hidden_stride;

		j->c->k->silu_mul(gate, gate + j->n_ff, type == QUANT_F32 ? (float *)hidden : gate,
				  j->n_ff);
		if (type != QUANT_F32)
			j->c->k->quantize[type](gate, hidden, j->n_ff);
	}
}

void backend_cpu_moe_run(struct backend *b, const struct residency_block *blocks, size_t n, float *result)
{
	struct moe_job *j = cpu_of(b)->moe.job;
	struct rows in;

	assert(j);
	j->blocks = blocks;
	j->n_blocks = n;
	in = gather(j, j->in[0]);
	run_experts(j, input_weight(j->p, 0), 0, in, j->gate_up, 2 * j->n_ff);
	if (!j->p->gate_up) {
		if (j->in[1].act != j->in[0].act)
			in = gather(j, j->in[1]);
		run_experts(j, j->p->up, 1, in, j->gate_up + j->n_ff, 2 * j->n_ff);
	}
	cpu_run(j->c, n, hidden_piece, j);
	run_experts(j, j->p->down, 2, (struct rows){ j->hidden, j->hidden_stride }, result, j->n_embd);
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
