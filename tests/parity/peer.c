/* peer: run a GGUF through the llama.cpp shared library and report logits and speed.
 *
 * The declarations below are our own, written for the interface of llama.cpp v0.5.0
 * (the build inside the npm package @node-llama-cpp/linux-x64 3.22.1). The two
 * parameter structs are passed by value, so their layout must match the library:
 * check_abi() compares known default values and stops if they differ.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

typedef int32_t tok;
struct tensor; /* opaque */
typedef bool (*eval_cb)(struct tensor *t, bool ask, void *ud);

struct model_params {
	void *devices;
	const void *buft_overrides;
	int32_t n_gpu_layers;
	int split_mode, load_mode, lazy_mode;
	int32_t main_gpu;
	const float *tensor_split;
	void *progress, *progress_ud;
	const void *kv_overrides;
	bool vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp;
};
struct ctx_params {
	uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq;
	int32_t n_threads, n_threads_batch;
	int ctx_type, rope_scaling, pooling, attention, flash_attn;
	float rope_base, rope_scale, yarn_ext, yarn_attn, yarn_fast, yarn_slow;
	uint32_t yarn_orig;
	float defrag;
	eval_cb cb_eval;
	void *cb_ud;
	int type_k, type_v;
	void *abort_cb, *abort_ud;
	bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
	void *samplers;
	size_t n_samplers;
	void *ctx_other;
};
struct batch {
	int32_t n;
	tok *token;
	float *embd;
	int32_t *pos;
	int32_t *n_seq;
	int32_t **seq;
	int8_t *out;
};

extern void llama_backend_init(void);
extern const char *llama_version(void);
extern const char *llama_print_system_info(void);
extern void llama_log_set(void (*cb)(int, const char *, void *), void *);
extern struct model_params llama_model_default_params(void);
extern struct ctx_params llama_context_default_params(void);
extern void *llama_model_load_from_file(const char *, struct model_params);
extern void *llama_init_from_model(void *, struct ctx_params);
extern void llama_free(void *);
extern void llama_model_free(void *);
extern const void *llama_model_get_vocab(const void *);
extern int32_t llama_vocab_n_tokens(const void *);
extern int32_t llama_model_desc(const void *, char *, size_t);
extern uint64_t llama_model_size(const void *);
extern uint64_t llama_model_n_params(const void *);
extern int32_t llama_model_n_layer(const void *);
extern int32_t llama_model_meta_val_str(const void *, const char *, char *, size_t);
extern int32_t llama_tokenize(const void *, const char *, int32_t, tok *, int32_t, bool, bool);
extern int32_t llama_token_to_piece(const void *, tok, char *, int32_t, int32_t, bool);
extern struct batch llama_batch_init(int32_t, int32_t, int32_t);
extern void llama_batch_free(struct batch);
extern int32_t llama_decode(void *, struct batch);
extern void llama_synchronize(void *);
extern float *llama_get_logits_ith(void *, int32_t);
extern void *llama_get_memory(const void *);
extern void llama_memory_clear(void *, bool);
extern void ggml_backend_load_all_from_path(const char *);
extern const char *ggml_get_name(const struct tensor *);
extern int64_t ggml_nelements(const struct tensor *);
extern int64_t ggml_nrows(const struct tensor *);
extern size_t ggml_nbytes(const struct tensor *);
extern void ggml_backend_tensor_get(const struct tensor *, void *, size_t, size_t);

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + 1e-9 * t.tv_nsec;
}
static void die(const char *m)
{
	fprintf(stderr, "peer: %s\n", m);
	exit(1);
}
static int verbose;
static void on_log(int lv, const char *s, void *u)
{
	(void)u;
	if (verbose || lv == 4)
		fputs(s, stderr);
}

static void check_abi(struct model_params m, struct ctx_params c)
{
	if (m.n_gpu_layers != -1 || m.split_mode != 1 || m.load_mode != -1 || m.lazy_mode != 1 ||
	    m.main_gpu || m.vocab_only || !m.use_extra_bufts || m.no_host || m.no_alloc)
		die("model parameters of this library have another layout: not the version peer.c was written for");
	if (c.n_ctx != 512 || c.n_batch != 2048 || c.n_ubatch != 512 || c.n_seq_max != 1 ||
	    c.flash_attn != -1 || c.yarn_ext != -1.0f || c.defrag != -1.0f || c.type_k != 1 ||
	    c.type_v != 1 || c.embeddings || !c.offload_kqv || !c.no_perf || !c.swa_full || c.kv_unified)
		die("context parameters of this library have another layout: not the version peer.c was written for");
}

/* --hist: count which experts the router picks (tensor ffn_moe_argsort-<layer>) */
static struct {
	int n_expert, n_used, n_layer;
	uint64_t *cnt;
	FILE *trace;
	int on;
} H;
static bool on_eval(struct tensor *t, bool ask, void *ud)
{
	(void)ud;
	const char *n = ggml_get_name(t);
	if (strncmp(n, "ffn_moe_argsort-", 16))
		return ask ? false : true;
	if (ask)
		return true;
	int il = atoi(n + 16);
	int64_t rows = ggml_nrows(t), ne0 = ggml_nelements(t) / rows;
	if (!H.on || ne0 != H.n_expert || il >= H.n_layer)
		return true;
	int32_t *b = malloc(ggml_nbytes(t));
	ggml_backend_tensor_get(t, b, 0, ggml_nbytes(t));
	for (int64_t r = 0; r < rows; r++) {
		if (H.trace)
			fprintf(H.trace, "%d", il);
		for (int k = 0; k < H.n_used; k++) {
			int e = b[r * ne0 + k];
			H.cnt[(size_t)il * H.n_expert + e]++;
			if (H.trace)
				fprintf(H.trace, " %d", e);
		}
		if (H.trace)
			fputc('\n', H.trace);
	}
	free(b);
	return true;
}
static int cmp_desc(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? 1 : x > y ? -1 : 0;
}
static void print_hist(void)
{
	double s8 = 0, s25 = 0, s50 = 0, unused = 0;
	int nl = 0;
	for (int il = 0; il < H.n_layer; il++) {
		uint64_t *c = H.cnt + (size_t)il * H.n_expert, tot = 0, acc = 0, a8 = 0, a25 = 0,
			 a50 = 0;
		int z = 0;
		for (int e = 0; e < H.n_expert; e++) {
			tot += c[e];
			z += !c[e];
		}
		if (!tot)
			continue;
		qsort(c, H.n_expert, sizeof *c, cmp_desc);
		for (int e = 0; e < H.n_expert; e++) {
			acc += c[e];
			if (e == H.n_used - 1)
				a8 = acc;
			if (e == H.n_expert / 4 - 1)
				a25 = acc;
			if (e == H.n_expert / 2 - 1)
				a50 = acc;
		}
		printf("hist layer %d: top-%d experts %.1f%%, top quarter %.1f%%, top half %.1f%%, hottest %.2f%%, never %d of %d\n",
		       il, H.n_used, 100.0 * a8 / tot, 100.0 * a25 / tot, 100.0 * a50 / tot,
		       100.0 * c[0] / tot, z, H.n_expert);
		s8 += 1.0 * a8 / tot;
		s25 += 1.0 * a25 / tot;
		s50 += 1.0 * a50 / tot;
		unused += 1.0 * z / H.n_expert;
		nl++;
	}
	if (nl)
		printf("hist mean: top-%d %.1f%%, quarter %.1f%%, half %.1f%%, never used %.1f%%\n",
		       H.n_used, 100 * s8 / nl, 100 * s25 / nl, 100 * s50 / nl, 100 * unused / nl);
}

/* CPU time used by everything else on the machine: tells whether a timing is worth anything */
static double others(void)
{
	unsigned long long u, n, s, i, w, q, f, st = 0;
	struct rusage r;
	FILE *fp = fopen("/proc/stat", "r");
	if (!fp)
		return 0;
	int k = fscanf(fp, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &u, &n, &s, &i, &w, &q,
		       &f, &st);
	fclose(fp);
	getrusage(RUSAGE_SELF, &r);
	return k < 8 ? 0
		     : (double)(u + n + s + q + f + st) / sysconf(_SC_CLK_TCK) -
			       (r.ru_utime.tv_sec + r.ru_stime.tv_sec +
				1e-6 * (r.ru_utime.tv_usec + r.ru_stime.tv_usec));
}

static double mine(void)
{
	struct rusage r;
	getrusage(RUSAGE_SELF, &r);
	return r.ru_utime.tv_sec + r.ru_stime.tv_sec + 1e-6 * (r.ru_utime.tv_usec + r.ru_stime.tv_usec);
}
static long majflt(void)
{
	struct rusage r;
	getrusage(RUSAGE_SELF, &r);
	return r.ru_majflt;
}

static uint64_t rs;
static uint32_t rnd(void)
{
	rs ^= rs << 13;
	rs ^= rs >> 7;
	rs ^= rs << 17;
	return rs >> 32;
}

struct stat_ {
	int n, bad;
	double mean, sd;
	float max;
	tok arg;
};
static struct stat_ lstat(const float *l, int n)
{
	struct stat_ s = { .n = n, .max = -INFINITY, .arg = -1 };
	double a = 0, b = 0;
	for (int i = 0; i < n; i++) {
		if (!isfinite(l[i])) {
			s.bad++;
			continue;
		}
		a += l[i];
		b += (double)l[i] * l[i];
		if (l[i] > s.max) {
			s.max = l[i];
			s.arg = i;
		}
	}
	s.mean = a / n;
	s.sd = sqrt(fmax(0, b / n - s.mean * s.mean));
	return s;
}
static void usage_mem(const char *what)
{
	struct rusage r;
	getrusage(RUSAGE_SELF, &r);
	long rss = 0, anon = 0, file = 0;
	char l[256];
	FILE *f = fopen("/proc/self/status", "r");
	while (f && fgets(l, sizeof l, f)) {
		sscanf(l, "VmRSS: %ld", &rss);
		sscanf(l, "RssAnon: %ld", &anon);
		sscanf(l, "RssFile: %ld", &file);
	}
	if (f)
		fclose(f);
	printf("%s: rss %.0f MiB (anon %.0f, file %.0f), peak %.0f MiB, major faults %ld, minor %ld, block in %ld, cpu %.2f+%.2f s\n",
	       what, rss / 1024.0, anon / 1024.0, file / 1024.0, r.ru_maxrss / 1024.0, r.ru_majflt,
	       r.ru_minflt, r.ru_inblock, r.ru_utime.tv_sec + 1e-6 * r.ru_utime.tv_usec,
	       r.ru_stime.tv_sec + 1e-6 * r.ru_stime.tv_usec);
}

static const char *HELP =
	"peer -m FILE [what to prefill] [options]\n"
	"  -p TEXT | -f FILE | -t 1,2,3 | -r N    text, text file, token ids, or N random ids (default -r 128)\n"
	"  -n N            decode N tokens after the prefill (default 0), greedy\n"
	"  --forced        feed random ids while decoding instead of the greedy choice\n"
	"  --threads N (2) --ctx N (prefill+decode) --batch N (2048) --ubatch N (512)\n"
	"  --load MODE     auto | none | mmap | mlock | dio        (auto)\n"
	"  --no-repack     keep the weights in the file's layout (with mmap: no anonymous copy)\n"
	"  --fa 0|1        flash attention off/on (auto)\n"
	"  --kv f16|q8_0|f32  type of the KV cache\n"
	"  --logits FILE   float32 logits of the last prefill position; --logits-all: of every position,\n"
	"                  then of every decoded position\n"
	"  --ids FILE      write the token ids (prefill, then decoded), one a line\n"
	"  --hist          count the experts chosen while decoding and prefilling; --trace FILE: each choice\n"
	"  --reps N        repeat prefill+decode N times on the loaded model (1)   --seed N (1)\n"
	"  --quiet-text    do not print the decoded text     -v  llama.cpp's own log\n";

int main(int argc, char **argv)
{
	const char *mf = 0, *text = 0, *tfile = 0, *ids = 0, *lf = 0, *idf = 0, *tr = 0,
		   *load = "auto", *kv = "f16";
	const char *bdir = getenv("PEER_BACKENDS");
	int nrand = 128, n = 0, forced = 0, th = 2, ctxn = 0, nb = 2048, nu = 512, rep = 1,
	    repack = 1, fa = -1, all = 0, hist = 0, quiet = 0;
	uint64_t seed = 1;
	for (int i = 1; i < argc; i++) {
		char *a = argv[i];
#define V() (i + 1 < argc ? argv[++i] : (die("missing value"), ""))
		if (!strcmp(a, "-m"))
			mf = V();
		else if (!strcmp(a, "-p"))
			text = V();
		else if (!strcmp(a, "-f"))
			tfile = V();
		else if (!strcmp(a, "-t"))
			ids = V();
		else if (!strcmp(a, "-r"))
			nrand = atoi(V());
		else if (!strcmp(a, "-n"))
			n = atoi(V());
		else if (!strcmp(a, "--forced"))
			forced = 1;
		else if (!strcmp(a, "--threads"))
			th = atoi(V());
		else if (!strcmp(a, "--ctx"))
			ctxn = atoi(V());
		else if (!strcmp(a, "--batch"))
			nb = atoi(V());
		else if (!strcmp(a, "--ubatch"))
			nu = atoi(V());
		else if (!strcmp(a, "--load"))
			load = V();
		else if (!strcmp(a, "--no-repack"))
			repack = 0;
		else if (!strcmp(a, "--fa"))
			fa = atoi(V());
		else if (!strcmp(a, "--kv"))
			kv = V();
		else if (!strcmp(a, "--logits"))
			lf = V();
		else if (!strcmp(a, "--logits-all"))
			all = 1;
		else if (!strcmp(a, "--ids"))
			idf = V();
		else if (!strcmp(a, "--hist"))
			hist = 1;
		else if (!strcmp(a, "--trace")) {
			tr = V();
			hist = 1;
		} else if (!strcmp(a, "--reps"))
			rep = atoi(V());
		else if (!strcmp(a, "--seed"))
			seed = strtoull(V(), 0, 10);
		else if (!strcmp(a, "--quiet-text"))
			quiet = 1;
		else if (!strcmp(a, "-v"))
			verbose = 1;
		else {
			fputs(HELP, stderr);
			return 2;
		}
	}
	if (!mf) {
		fputs(HELP, stderr);
		return 2;
	}
	setvbuf(stdout, 0, _IOLBF, 0);
	llama_log_set(on_log, 0);
	char self[4096];
	ssize_t k = readlink("/proc/self/exe", self, sizeof self - 1);
	if (k > 0 && !bdir) {
		self[k] = 0;
		char *s = strrchr(self, '/');
		strcpy(s, "/lib");
		bdir = self;
	}
	if (bdir && access(bdir, R_OK) == 0)
		ggml_backend_load_all_from_path(bdir);
	llama_backend_init();
	struct model_params mp = llama_model_default_params();
	struct ctx_params cp = llama_context_default_params();
	check_abi(mp, cp);
	mp.n_gpu_layers = 0;
	mp.use_extra_bufts = repack;
	mp.load_mode = !strcmp(load, "none")    ? 0
		       : !strcmp(load, "mmap")  ? 1
		       : !strcmp(load, "mlock") ? 3
		       : !strcmp(load, "dio")   ? 4
						: -1;
	double t0 = now();
	void *m = llama_model_load_from_file(mf, mp);
	if (!m)
		die("cannot load the model");
	const void *v = llama_model_get_vocab(m);
	int nv = llama_vocab_n_tokens(v);
	char desc[256];
	llama_model_desc(m, desc, sizeof desc);
	printf("llama.cpp %s | %s\nmodel: %s, %.3f GB, %.3f B params, %d layers, vocab %d, loaded in %.2f s\n",
	       llama_version(), llama_print_system_info(), desc, llama_model_size(m) / 1e9,
	       llama_model_n_params(m) / 1e9, llama_model_n_layer(m), nv, now() - t0);

	tok *T = 0;
	int np = 0;
	if (tfile) {
		FILE *f = fopen(tfile, "rb");
		if (!f)
			die("cannot read the text file");
		char *b = malloc(1 << 24);
		size_t got = fread(b, 1, (1 << 24) - 1, f);
		b[got] = 0;
		fclose(f);
		text = b;
	}
	if (text) {
		int len = strlen(text);
		T = malloc(sizeof *T * (len + 16));
		np = llama_tokenize(v, text, len, T, len + 16, true, true);
		if (np <= 0)
			die("the text gives no tokens");
	} else if (ids) {
		T = malloc(sizeof *T * (strlen(ids) + 1));
		for (char *s = (char *)ids; *s;) {
			T[np++] = strtol(s, &s, 10);
			while (*s == ',' || *s == ' ')
				s++;
		}
	} else {
		T = malloc(sizeof *T * nrand);
		np = nrand;
		rs = seed * 0x9E3779B97F4A7C15ull + 1;
		for (int i = 0; i < np; i++)
			T[i] = rnd() % nv;
	}
	cp.n_ctx = ctxn ? ctxn : np + n + 8;
	cp.n_batch = nb;
	cp.n_ubatch = nu < nb ? nu : nb;
	cp.n_threads = cp.n_threads_batch = th;
	cp.flash_attn = fa;
	cp.type_k = cp.type_v = !strcmp(kv, "f32") ? 0 : !strcmp(kv, "q8_0") ? 8 : 1;
	if (all)
		cp.n_outputs_max_per_seq = cp.n_outputs_max = nb;
	if (hist) {
		char b[64], key[128], arch[64] = "";
		llama_model_meta_val_str(m, "general.architecture", arch, sizeof arch);
		snprintf(key, sizeof key, "%s.expert_count", arch);
		if (llama_model_meta_val_str(m, key, b, sizeof b) > 0)
			H.n_expert = atoi(b);
		snprintf(key, sizeof key, "%s.expert_used_count", arch);
		if (llama_model_meta_val_str(m, key, b, sizeof b) > 0)
			H.n_used = atoi(b);
		H.n_layer = llama_model_n_layer(m);
		H.cnt = calloc((size_t)H.n_layer * (H.n_expert + 1), sizeof *H.cnt);
		H.on = H.n_expert > 0;
		if (tr)
			H.trace = fopen(tr, "w");
		cp.cb_eval = on_eval;
	}
	void *c = llama_init_from_model(m, cp);
	if (!c)
		die("cannot make the context");
	usage_mem("after load");
	struct batch B = llama_batch_init(nb > np ? nb : np, 0, 1);
	FILE *lo = lf ? fopen(lf, "wb") : 0;
	FILE *io = idf ? fopen(idf, "w") : 0;
	double bp = 0, bd = 0;
	for (int q = 0; q < rep; q++) {
		llama_memory_clear(llama_get_memory(c), true);
		int last = q == rep - 1, pos = 0;
		float *L = 0;
		double t = now(), tw = 0, oc = others(), mc = mine();
		while (pos < np) {
			int w = np - pos < nb ? np - pos : nb;
			B.n = w;
			for (int i = 0; i < w; i++) {
				B.token[i] = T[pos + i];
				B.pos[i] = pos + i;
				B.n_seq[i] = 1;
				B.seq[i][0] = 0;
				B.out[i] = all || pos + i == np - 1;
			}
			if (llama_decode(c, B))
				die("prefill failed");
			llama_synchronize(c);
			if (all && lo && last) {
				double x = now();
				for (int i = 0; i < w; i++)
					fwrite(llama_get_logits_ith(c, i), sizeof(float), nv, lo);
				tw += now() - x;
			}
			pos += w;
		}
		L = llama_get_logits_ith(c, -1);
		double dt = now() - t - tw, op = 100 * (others() - oc) / (now() - t), pc = mine() - mc;
		if (np / dt > bp)
			bp = np / dt;
		struct stat_ s = lstat(L, nv);
		if (lo && last && !all)
			fwrite(L, sizeof(float), nv, lo);
		if (io && last)
			for (int i = 0; i < np; i++)
				fprintf(io, "%d\n", T[i]);
		printf("prefill: %d tokens, %.3f s, %.2f tok/s | logits: mean %.4f sd %.4f max %.4f at %d, not finite %d | own cpu %.2f s, other load %.0f%%\n",
		       np, dt, np / dt, s.mean, s.sd, s.max, s.arg, s.bad, pc, op);
		tok cur = s.arg;
		int bad = 0;
		uint64_t keep = rs;
		rs = (seed + 77) * 0x9E3779B97F4A7C15ull;
		tok *D = malloc(sizeof *D * (n + 1));
		tw = 0;
		t = now();
		oc = others();
		mc = mine();
		long mf0 = majflt();
		double worst = 0;
		for (int i = 0; i < n; i++) {
			if (forced)
				cur = rnd() % nv;
			D[i] = cur;
			B.n = 1;
			B.token[0] = cur;
			B.pos[0] = np + i;
			B.n_seq[0] = 1;
			B.seq[0][0] = 0;
			B.out[0] = 1;
			double x = now();
			if (llama_decode(c, B))
				die("decode failed");
			L = llama_get_logits_ith(c, -1);
			double y = now();
			if (y - x > worst)
				worst = y - x;
			s = lstat(L, nv);
			bad += s.bad;
			cur = s.arg;
			if (all && lo && last)
				fwrite(L, sizeof(float), nv, lo);
			tw += now() - y;
		}
		if (n) {
			double dd = now() - t - tw, od = 100 * (others() - oc) / (now() - t),
			       dc = mine() - mc;
			if (n / dd > bd)
				bd = n / dd;
			int uniq = 0;
			for (int i = 0; i < n; i++) {
				int u = 1;
				for (int j = 0; j < i; j++)
					if (D[j] == D[i]) {
						u = 0;
						break;
					}
				uniq += u;
			}
			printf("decode: %d tokens (%s, %d distinct), %.3f s, %.3f tok/s, slowest token %.1f ms, not finite %d | own cpu %.2f s, major faults %ld, other load %.0f%%\n",
			       n, forced ? "forced" : "greedy", uniq, dd, n / dd, worst * 1e3, bad,
			       dc, majflt() - mf0, od);
			if (last && io)
				for (int i = 0; i < n; i++)
					fprintf(io, "%d\n", D[i]);
			if (last && !quiet) {
				printf("text: ");
				for (int i = 0; i < n; i++) {
					char b[512];
					int z = llama_token_to_piece(v, D[i], b, sizeof b, 0, true);
					if (z > 0)
						fwrite(b, 1, z, stdout);
				}
				printf("\n");
			}
		}
		rs = keep;
		free(D);
		usage_mem("after run");
	}
	printf("best: prefill %.2f tok/s, decode %.3f tok/s\n", bp, bd);
	if (H.on)
		print_hist();
	if (lo)
		fclose(lo);
	if (io)
		fclose(io);
	if (H.trace)
		fclose(H.trace);
	llama_batch_free(B);
	llama_free(c);
	llama_model_free(m);
	return 0;
}
