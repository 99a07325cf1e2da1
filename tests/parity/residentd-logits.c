/* SPDX-License-Identifier: MIT */
/*
 * residentd-logits: evaluates given token ids and writes the logits of every position: float32,
 * n_vocab a position.
 *
 * A test program over the archive of the daemon, for run-parity.py and for bisecting by hand. It is
 * the engine's graph without sessions, sampling and sockets. The first --prefill ids run in batches
 * of --batch, the rest one by one.
 */
#include "daemon/engine/graph.h"
#include "daemon/model/model.h"

#include <getopt.h>
#include <math.h>

struct options {
	const char *model, *ids, *out, *kv;
	size_t prefill, batch;
	unsigned threads;
};

static int usage(void)
{
	fprintf(stderr,
		"usage: residentd-logits -m MODEL -i IDS -o OUT [--prefill N] [--batch N] [--kv f16|f32] [--threads N]\n"
		"IDS holds one token id a line. KV is f32 for F32 weights, else f16, unless --kv says otherwise.\n");
	return 2;
}

static int read_ids(const char *path, struct tokens *ret)
{
	_cleanup_(fclosep) FILE *f = fopen(path, "re");
	long id;

	if (!f)
		return -errno;
	while (fscanf(f, "%ld", &id) == 1) {
		int32_t id32 = (int32_t)id;
		int r = tokens_append(ret, &id32, 1);

		if (r < 0)
			return r;
	}
	return feof(f) && ret->n > 0 ? 0 : -EINVAL;
}

static int evaluate(const struct options *o, struct model *m, struct backend *b, struct kv_arena *a,
		    struct state *s, const struct tokens *ids, FILE *out)
{
	_cleanup_(freep) float *logits = NULL;
	uint64_t start = now_us(), mid = start;
	size_t bytes, prefill = MIN(o->prefill, ids->n);

	if (!mul_ok(o->batch, m->n_vocab * sizeof(float), &bytes))
		return -ENOMEM;
	logits = malloc(bytes);
	if (!logits)
		return -ENOMEM;
	for (size_t at = 0; at < ids->n;) {
		struct graph_seq q = { .state = s, .tokens = ids->ids + at, .want = GRAPH_WANT_ALL };
		int r;

		q.n_tok = at < prefill ? MIN(o->batch, prefill - at) : 1;
		r = graph_forward(m, b, a, &q, 1, NULL, logits);
		if (r < 0)
			return r;
		at += q.n_tok;
		if (at == prefill)
			mid = now_us();
		if (out && fwrite(logits, m->n_vocab * sizeof(float), q.n_tok, out) != q.n_tok)
			return -EIO;
	}
	fprintf(stderr, "%s: prefill %zu at %.2f tok/s, decode %zu at %.2f tok/s\n",
		backend_cpu_isa(b), prefill, (double)prefill / fmax((double)(mid - start), 1) * 1e6,
		ids->n - prefill, (double)(ids->n - prefill) / fmax((double)(now_us() - mid), 1) * 1e6);
	return 0;
}

static int run(const struct options *o, char **ret_error)
{
	_cleanup_(model_unrefp) struct model *m = NULL;
	_cleanup_(fclosep) FILE *out = NULL;
	struct tokens ids = {};
	struct kv_arena *a = NULL;
	struct backend *b = NULL;
	struct state *s = NULL;
	int r;

	r = model_load(o->model, &m, ret_error);
	if (r < 0)
		return r;
	r = read_ids(o->ids, &ids);
	if (r < 0) {
		tokens_done(&ids);
		return fail(ret_error, r, "%s: %s", o->ids, strerror(-r));
	}
	r = kv_arena_new(&m->kv, o->kv ? streq(o->kv, "f16") : !m->weights_f32,
			 (ids.n / KV_PAGE_TOK + 2) *
				 ((size_t)m->kv.n_layer * m->kv.n_head *
					  (m->kv.k_dim + m->kv.v_dim) * KV_PAGE_TOK * sizeof(float) +
				  65536),
			 &a);
	if (r == 0)
		r = backend_cpu_new(o->threads, graph_scratch_bytes(m, o->batch), NULL, &b);
	if (r == 0)
		r = state_new(&s);
	out = fopen(o->out, "we");
	if (r == 0 && !out)
		r = fail(ret_error, -errno, "%s: %s", o->out, strerror(errno));
	if (r == 0)
		r = evaluate(o, m, b, a, s, &ids, out);
	state_free(s, a);
	if (b)
		b->ops->free(b);
	kv_arena_free(a);
	tokens_done(&ids);
	return r;
}

int main(int argc, char **argv)
{
	static const struct option longs[] = {
		{ "prefill", required_argument, NULL, 'p' },
		{ "batch", required_argument, NULL, 'b' },
		{ "kv", required_argument, NULL, 'k' },
		{ "threads", required_argument, NULL, 't' },
		{},
	};
	struct options o = { .prefill = SIZE_MAX, .batch = 512, .threads = 2 };
	_cleanup_(freep) char *error = NULL;
	int c, r;

	while ((c = getopt_long(argc, argv, "m:i:o:", longs, NULL)) >= 0) {
		switch (c) {
		case 'm': o.model = optarg; break;
		case 'i': o.ids = optarg; break;
		case 'o': o.out = optarg; break;
		case 'p': o.prefill = strtoul(optarg, NULL, 10); break;
		case 'b': o.batch = strtoul(optarg, NULL, 10); break;
		case 'k': o.kv = optarg; break;
		case 't': o.threads = (unsigned)strtoul(optarg, NULL, 10); break;
		default: return usage();
		}
	}
	if (!o.model || !o.ids || !o.out || optind != argc || o.batch == 0 || o.threads == 0 ||
	    (o.kv && !streq(o.kv, "f16") && !streq(o.kv, "f32")))
		return usage();
	r = run(&o, &error);
	if (r < 0)
		fprintf(stderr, "residentd-logits: %s\n", error ? error : strerror(-r));
	return r < 0;
}
