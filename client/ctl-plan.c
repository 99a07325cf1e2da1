/* SPDX-License-Identifier: MIT */
/*
 * ctl-plan.c: `residentctl plan`: what a model would do on a machine, this one or another.
 *
 * Main thread; asks no service. Owns where each price is from (given, measured here, assumed) and how a plan is told; the plan itself is
 * plan.c's. Only the directory of a model file is read, but for a sample of its blocks when the disk is measured. Invariants: every
 * number that is printed says in the same output where it is from; what is printed says that it is a prediction.
 */
#include "client/ctl-model-show.h"
#include "daemon/config.h"
#include "daemon/import/library.h"
#include "daemon/residency/disk.h"
#include "daemon/residency/memory.h"
#include "daemon/residency/plan.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

/* Of graphics cards with 8 GB, 256 bits wide; and of PCIe 3.0 x16, from pinned memory. */
#define VRAM_BPS 400e9
#define PCIE_BPS 12.6e9
#define CONTEXT  32768

#define MEASURE_BYTES  ((size_t)256 << 20)
#define MEASURE_ROUNDS 5  /* the best one counts: others use the memory too */
#define MEASURE_BLOCKS 48 /* 50 to 100 MB */
#define THREADS_MAX    64

enum origin { ASSUMED, MEASURED, GIVEN };

struct price {
	double value;
	enum origin origin;
};

struct planning {
	const char *name;    /* of the model, as the user has it */
	const char *routing; /* a file, or NULL: made up */
	struct gguf *gguf;
	struct catalog *catalog;
	struct plan_shape shape;
	struct trace trace;
	struct plan_machine machine;
	struct price vram, ram, vram_bw, pcie, mem, disk, flops;
	struct plan plan;
};

static const char *const origins[] = { "assumed", "measured", "given" };

static void planning_done(struct planning *p)
{
	plan_shape_done(&p->shape);
	trace_done(&p->trace);
	p->catalog = catalog_free(p->catalog);
	p->gguf = gguf_close(p->gguf);
}

static enum exit_code failed(struct ctl *c, int r, const char *error)
{
	terminal_printf(&c->err, PROGRAM ": %s\n", error ? error : strerror(-r));
	return EXIT_ERROR;
}

/* ---- options ---- */

/* 12.6G/s: powers of 1000, as rates are said everywhere; "/s" may be left out. */
static bool parse_rate(const char *text, double *ret)
{
	static const char suffixes[] = "kMGTP";
	const char *suffix;
	double value;
	char *end;

	/* No signs, and no other ways to write a number. */
	if (text[strspn(text, "0123456789.kMGTP/s")])
		return false;
	value = strtod(text, &end);
	suffix = *end ? strchr(suffixes, *end) : NULL;
	if (suffix) {
		value *= pow(1000, (double)(suffix - suffixes + 1));
		end++;
	}
	if ((*end && !streq(end, "/s")) || !(value >= 1 && value < 1e18))
		return false;
	*ret = value;
	return true;
}

static bool take_rate(const char *text, struct price *p)
{
	if (!text)
		return true;
	p->origin = GIVEN;
	return parse_rate(text, &p->value);
}

static bool take_bytes(const char *text, uint64_t *bytes, struct price *p)
{
	if (!text)
		return true;
	p->origin = GIVEN;
	return parse_bytes(text, bytes) == 0 && *bytes < (uint64_t)1 << 60;
}

/* NULL: all is well. */
static const char *parse_options(const struct ctl *c, struct planning *p)
{
	uint64_t context = 0;

	if (!c->shape && !c->arguments[0])
		return "plan needs a MODEL, or --shape";
	if (c->shape && c->arguments[0])
		return "plan takes a MODEL or --shape, not both";
	if (c->shape && !c->disk)
		return "the disk that a --shape would lie on cannot be measured: give --disk";
	if (!take_bytes(c->vram, &p->machine.vram_bytes, &p->vram))
		return "--vram is not a size like 8G";
	if (!take_bytes(c->ram, &p->machine.ram_bytes, &p->ram))
		return "--ram is not a size like 11.5G";
	if (!take_rate(c->vram_bw, &p->vram_bw))
		return "--vram-bw is not a rate like 448G/s";
	if (!take_rate(c->pcie, &p->pcie))
		return "--pcie is not a rate like 12.6G/s";
	if (!take_rate(c->mem, &p->mem))
		return "--mem is not a rate like 40G/s";
	if (!take_rate(c->disk, &p->disk))
		return "--disk is not a rate like 3G/s";
	if (!take_rate(c->flops, &p->flops))
		return "--flops is not a rate like 5T/s";
	if (c->context_text && parse_u64(c->context_text, 1, INT32_MAX, &context) < 0)
		return "--context is not a number of tokens";
	p->machine.context = (uint32_t)context;
	return NULL;
}

/* ---- the model ---- */

static int find_model(const char *name, char **ret_path, char **ret_error)
{
	_cleanup_(library_closep) struct library *models = NULL;
	const char *directory = getenv("RESIDENTD_MODELS");
	const struct library_entry *entry;
	int r;

	if (ctl_model_is_path(name)) {
		*ret_path = strdup(name);
		return *ret_path ? 0 : -ENOMEM;
	}
	r = library_open(directory && *directory ? directory : CATALOG_DIRECTORY, &models, ret_error);
	if (r == 0)
		r = library_find(models, name, &entry, ret_error);
	if (r < 0)
		return r;
	if (asprintf(ret_path, "%s/%s", models->path, entry->file) < 0) {
		*ret_path = NULL;
		return -ENOMEM;
	}
	return 0;
}

static uint32_t family_key(const struct gguf *g, const char *key)
{
	const char *arch;
	uint32_t value = 0;
	char full[128];
	size_t len;

	if (gguf_get_str(g, "general.architecture", &arch, &len) < 0 || len > 64)
		return 0;
	snprintf(full, sizeof(full), "%.*s.%s", (int)len, arch, key);
	gguf_get_u32(g, full, &value);
	return value;
}

static int read_model(struct planning *p, char **ret_error)
{
	_cleanup_(freep) char *path = NULL;
	uint32_t n_layers, n_more;
	int r = find_model(p->name, &path, ret_error);

	if (r == 0)
		r = gguf_open(path, &p->gguf, ret_error);
	if (r < 0)
		return r;
	/* Layers that predict further tokens stand behind the others and do not run. */
	n_layers = family_key(p->gguf, "block_count");
	n_more = family_key(p->gguf, "nextn_predict_layers");
	r = catalog_new(p->gguf, n_more < n_layers ? n_layers - n_more : n_layers, &p->catalog,
			ret_error);
	if (r == 0)
		r = plan_shape_of_catalog(p->catalog, &p->shape, ret_error);
	return r;
}

static int get_shape(const struct ctl *c, struct planning *p, char **ret_error)
{
	int r;

	if (!c->shape) {
		p->name = c->arguments[0];
		return read_model(p, ret_error);
	}
	p->name = c->shape;
	r = plan_shape_builtin(c->shape, &p->shape);
	return r == -ENOENT ? fail(ret_error, r, "no shape \"%s\" is built in, only: %s", c->shape,
				   plan_shape_list())
			    : r;
}

static int get_trace(const struct ctl *c, struct planning *p, char **ret_error)
{
	_cleanup_(fclosep) FILE *f = NULL;

	p->routing = c->trace_file;
	if (!c->trace_file)
		return plan_make_trace(&p->shape, PLAN_TRACE_STEPS, &p->trace, ret_error);
	f = fopen(c->trace_file, "re");
	if (!f)
		return fail(ret_error, -errno, "%s: %s", c->trace_file, strerror(errno));
	return trace_read(f, c->trace_file, 0, &p->trace, ret_error);
}

/* ---- measuring ---- */

struct reading {
	pthread_t thread;
	const uint64_t *at;
	size_t n; /* a multiple of 4 */
	uint64_t sum;
};

static void *read_memory(void *data)
{
	struct reading *r = data;
	uint64_t sum[4] = {};

	for (size_t i = 0; i < r->n; i += 4)
		for (size_t k = 0; k < 4; k++)
			sum[k] += r->at[i + k];
	r->sum = sum[0] + sum[1] + sum[2] + sum[3];
	return NULL;
}

/* All processors that we may use, each a part. Microseconds; 0: no thread. */
static uint64_t read_once(const uint64_t *memory, size_t n_threads, uint64_t *sum)
{
	struct reading r[THREADS_MAX];
	size_t each = MEASURE_BYTES / sizeof(*memory) / n_threads / 4 * 4, n = 0;
	uint64_t begun = now_us();

	for (; n < n_threads; n++) {
		r[n] = (struct reading){ .at = memory + n * each, .n = each };
		if (pthread_create(&r[n].thread, NULL, read_memory, &r[n]) != 0)
			break;
	}
	for (size_t i = 0; i < n; i++) {
		pthread_join(r[i].thread, NULL);
		*sum += r[i].sum;
	}
	return n == n_threads ? MAX(now_us() - begun, UINT64_C(1)) : 0;
}

/* Bytes/s; 0: could not be measured. */
static double measure_memory(void)
{
	uint64_t *memory = mmap(NULL, MEASURE_BYTES, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t best = 0, sum = 0;
	size_t n_threads = 1;
	cpu_set_t set;

	if (memory == MAP_FAILED)
		return 0;
	(void)madvise(memory, MEASURE_BYTES, MADV_HUGEPAGE);
	memset(memory, 1, MEASURE_BYTES);
	if (sched_getaffinity(0, sizeof(set), &set) == 0)
		n_threads = CLAMP((size_t)CPU_COUNT(&set), (size_t)1, (size_t)THREADS_MAX);
	for (int i = 0; i < MEASURE_ROUNDS; i++) {
		uint64_t us = read_once(memory, n_threads, &sum);

		if (us > 0 && (best == 0 || us < best))
			best = us;
	}
	(void)munmap(memory, MEASURE_BYTES);
	/* The sum is looked at, so that it is computed. */
	return best > 0 && sum > 0 ? (double)MEASURE_BYTES * 1e6 / (double)best : 0;
}

/* What the engine would do: whole blocks, past the page cache. *bytes: of the file, read. */
static int read_block(struct disk *d, const struct catalog *c, uint32_t n, void *to, uint64_t *bytes)
{
	uint64_t mask = disk_alignment(d) - 1, at = 0;
	struct disk_job job = { .kind = DISK_READ, .block = n, .urgent = true };
	struct catalog_block b;

	catalog_block(c, n, &b);
	for (uint32_t i = 0; i < b.n_ranges; i++) {
		uint64_t begin = b.range[i].offset & ~mask;
		uint64_t end = (b.range[i].offset + b.range[i].bytes + mask) & ~mask;

		job.piece[job.n_pieces++] = (struct disk_piece){ .part = b.range[i].part,
								 .offset = begin,
								 .bytes = end - begin,
								 .to = (char *)to + at };
		at += end - begin;
	}
	disk_submit(d, &job);
	while (!disk_take(d, true))
		;
	*bytes += job.bytes;
	return job.err;
}

static double measure_disk(const struct planning *p)
{
	const struct disk_config config = {};
	const struct catalog *c = p->catalog;
	uint64_t room = c->block_bytes_max + CATALOG_MATRICES * UINT64_C(8192), begun, bytes = 0;
	uint32_t n = MIN(c->n_blocks, (uint32_t)MEASURE_BLOCKS);
	struct disk *d;
	void *to;
	int r = 0;

	if (disk_new(p->gguf, &config, &d) < 0)
		return 0;
	to = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	begun = now_us();
	for (uint32_t i = 0; to != MAP_FAILED && i < n && r == 0; i++)
		r = read_block(d, c, (uint32_t)((uint64_t)c->n_blocks * i / n), to, &bytes);
	disk_free(d);
	if (to == MAP_FAILED || r < 0)
		return 0;
	(void)munmap(to, room);
	return (double)bytes * 1e6 / (double)MAX(now_us() - begun, UINT64_C(1));
}

static int get_ram(struct planning *p, char **ret_error)
{
	_cleanup_(memory_closep) struct memory *m = NULL;
	struct memory_state s;
	int r;

	if (p->ram.origin == GIVEN)
		return 0;
	r = memory_open("", &m);
	if (r == 0)
		r = memory_read(m, &s);
	if (r < 0)
		return fail(ret_error, r, "cannot see how much memory there is: give --ram");
	p->ram.origin = MEASURED;
	p->machine.ram_bytes = memory_budget(&s, 0, memory_default_reserve(s.machine_total));
	return 0;
}

static void assume(struct price *p, double value)
{
	if (p->origin != GIVEN)
		p->value = value;
}

static int get_prices(struct planning *p, char **ret_error)
{
	struct plan_machine *m = &p->machine;
	int r = get_ram(p, ret_error);

	if (r < 0)
		return r;
	assume(&p->vram_bw, VRAM_BPS);
	assume(&p->pcie, PCIE_BPS);
	if (p->mem.origin != GIVEN)
		p->mem = (struct price){ measure_memory(), MEASURED };
	if (p->disk.origin != GIVEN)
		p->disk = (struct price){ measure_disk(p), MEASURED };
	if (!(p->mem.value >= 1))
		return fail(ret_error, -EIO, "memory cannot be measured here: give --mem");
	if (!(p->disk.value >= 1))
		return fail(ret_error, -EIO, "%s cannot be read past the page cache: give --disk",
			    p->name);
	m->vram_bps = p->vram_bw.value;
	m->pcie_bps = p->pcie.value;
	m->mem_bps = p->mem.value;
	m->disk_bps = p->disk.value;
	m->flops = p->flops.origin == GIVEN ? p->flops.value : 0;
	if (m->context == 0)
		m->context = p->shape.context_trained > 0
				     ? MIN(p->shape.context_trained, (uint32_t)CONTEXT)
				     : CONTEXT;
	return 0;
}

/* ---- as text ---- */

static void say_bytes(struct ctl *c, const char *before, uint64_t bytes, const char *after)
{
	char text[32];

	if (bytes > 0)
		terminal_printf(&c->out, "%s%s%s", before, ctl_bytes_text(bytes, text), after);
}

static void say_rate(struct ctl *c, const char *what, const struct price *p, const char *end)
{
	char text[32];

	terminal_printf(&c->out, "%s %s/s %s%s", what, ctl_bytes_text((uint64_t)p->value, text),
			origins[p->origin], end);
}

static void print_prices(struct ctl *c, const struct planning *p)
{
	terminal_printf(&c->out, "%10s  of %s, for a conversation of %u tokens; nothing was run\n",
			"prediction", p->name, p->machine.context);
	terminal_printf(&c->out, "%10s  ", "prices");
	say_rate(c, "memory", &p->mem, ", ");
	say_rate(c, "disk", &p->disk, p->plan.gpu ? ", " : "\n");
	if (p->plan.gpu) {
		say_rate(c, "VRAM", &p->vram_bw, ", ");
		say_rate(c, "bus", &p->pcie, "\n");
	}
	terminal_printf(&c->out, "%10s  prompts %.3g T operations/s %s\n", "",
			(p->machine.flops > 0 ? p->machine.flops
					      : plan_default_flops(p->plan.trunk_in_vram)) /
				1e12,
			origins[p->flops.origin]);
}

/* What is where the trunk is. */
static void say_work(struct ctl *c, const struct planning *p)
{
	say_bytes(c, "", p->shape.trunk_bytes, " trunk, ");
	say_bytes(c, "", p->shape.scratch_bytes, " scratch, ");
	say_bytes(c, "", p->plan.conversation_bytes, " conversation, ");
}

static void print_tiers(struct ctl *c, const struct planning *p)
{
	const struct plan *plan = &p->plan;
	char text[32];

	if (plan->gpu) {
		terminal_printf(&c->out, "%10s  %s %s: ", "VRAM",
				ctl_bytes_text(p->machine.vram_bytes, text), origins[p->vram.origin]);
		say_bytes(c, "", PLAN_VRAM_RESERVE + PLAN_VRAM_DRIVER, " driver and others, ");
		if (plan->trunk_in_vram)
			say_work(c, p);
		terminal_printf(&c->out, "%s blocks\n", ctl_bytes_text(plan->vram_block_bytes, text));
	} else {
		terminal_printf(&c->out, "%10s  %s\n", "VRAM",
				p->machine.vram_bytes > 0 ? "too little to be of use"
							  : "none; --vram says how much a card has");
	}
	terminal_printf(&c->out, "%10s  %s %s: ", "RAM", ctl_bytes_text(p->machine.ram_bytes, text),
			origins[p->ram.origin]);
	if (!plan->trunk_in_vram)
		say_work(c, p);
	say_bytes(c, "", p->shape.table_bytes, " embeddings, ");
	say_bytes(c, "", plan->gpu ? PLAN_STAGING : 0, " staging, ");
	terminal_printf(&c->out, "%s blocks\n", ctl_bytes_text(plan->ram_block_bytes, text));
	terminal_printf(&c->out, "%10s  %s of %s blocks are only there\n", "disk",
			plan->disk_block_bytes > 0 ? ctl_bytes_text(plan->disk_block_bytes, text) : "none",
			ctl_bytes_text(p->shape.block_bytes, (char[32]){}));
	if (!p->shape.kv_known)
		terminal_printf(&c->out, "%10s  what a token of it takes is not known\n", "context");
	else if (plan->context_max == UINT64_MAX)
		terminal_printf(&c->out, "%10s  takes no memory\n", "context");
	else
		terminal_printf(&c->out, "%10s  up to %llu tokens%s\n", "context",
				(unsigned long long)plan->context_max,
				plan->context_max == p->shape.context_trained ? ", as trained" : "");
}

static double tokens_per_second(double us, double n)
{
	return n * 1e6 / us;
}

static void print_speed(struct ctl *c, const struct planning *p)
{
	const struct plan *plan = &p->plan;
	char text[32];

	terminal_printf(&c->out,
			"%10s  VRAM %.1f %%, RAM %.1f %%, disk %.2f %% of the wanted blocks; %s, %zu steps\n",
			"hits", 100 * plan->vram_hits, 100 * plan->ram_hits, 100 * plan->misses,
			p->routing ? p->routing : "made-up routing", plan->n_steps);
	terminal_printf(&c->out, "%10s  %.2f tokens/s, %.2f at the end of the conversation\n",
			"decode", tokens_per_second(plan->token_us, 1),
			tokens_per_second(plan->token_us + plan->context_us, 1));
	terminal_printf(&c->out,
			"%10s  %.1f ms: %.1f trunk, %.1f overhead, %.1f experts, waiting %.1f for the disk, %.1f for the bus\n",
			"a token", plan->token_us / 1e3, plan->trunk_us / 1e3, plan->layers_us / 1e3,
			plan->experts_us / 1e3, plan->disk_wait_us / 1e3, plan->bus_wait_us / 1e3);
	terminal_printf(&c->out, "%10s  reads %s from the disk", "",
			ctl_bytes_text((uint64_t)plan->disk_token_bytes, text));
	if (plan->gpu) {
		terminal_printf(&c->out, ", copies %s to the card for one use",
				ctl_bytes_text((uint64_t)plan->copied_token_bytes, text));
		terminal_printf(&c->out, ", moves %s there",
				ctl_bytes_text((uint64_t)plan->moved_token_bytes, text));
	}
	terminal_printf(&c->out, "\n%10s  %.1f tokens/s cold, %.1f when the tiers are full\n",
			"prefill", tokens_per_second(plan->cold_prefill_us, PLAN_CHUNK_TOK),
			tokens_per_second(plan->warm_prefill_us, PLAN_CHUNK_TOK));
}

/* ---- as an object ---- */

static json_t *number(uint64_t n)
{
	return json_integer((json_int_t)MIN(n, (uint64_t)INT64_MAX));
}

static json_t *price_object(const struct price *p, double value)
{
	return json_pack("{s:f, s:s}", "value", value, "origin", origins[p->origin]);
}

static json_t *machine_object(const struct planning *p)
{
	const struct plan_machine *m = &p->machine;
	double flops = m->flops > 0 ? m->flops : plan_default_flops(p->plan.trunk_in_vram);

	return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I}", "vram_bytes",
			 price_object(&p->vram, (double)m->vram_bytes), "ram_bytes",
			 price_object(&p->ram, (double)m->ram_bytes), "vram_bytes_per_second",
			 price_object(&p->vram_bw, m->vram_bps), "bus_bytes_per_second",
			 price_object(&p->pcie, m->pcie_bps), "memory_bytes_per_second",
			 price_object(&p->mem, m->mem_bps), "disk_bytes_per_second",
			 price_object(&p->disk, m->disk_bps), "operations_per_second",
			 price_object(&p->flops, flops), "context", (json_int_t)m->context);
}

static json_t *tiers_object(const struct planning *p)
{
	const struct plan *plan = &p->plan;

	return json_pack(
		"{s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "trunk",
		plan->trunk_in_vram ? "vram" : "ram", "trunk_bytes", number(p->shape.trunk_bytes),
		"scratch_bytes", number(p->shape.scratch_bytes), "conversation_bytes",
		number(plan->conversation_bytes), "embedding_bytes", number(p->shape.table_bytes),
		"vram_block_bytes", number(plan->vram_block_bytes), "ram_block_bytes",
		number(plan->ram_block_bytes), "disk_block_bytes", number(plan->disk_block_bytes),
		"ram_floor_bytes", number(plan->floor_bytes), "context_max",
		p->shape.kv_known && plan->context_max < UINT64_MAX ? number(plan->context_max)
								    : json_null());
}

static json_t *decode_object(const struct plan *p)
{
	return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}",
			 "tokens_per_second", tokens_per_second(p->token_us, 1),
			 "tokens_per_second_full", tokens_per_second(p->token_us + p->context_us, 1),
			 "token_us", p->token_us, "trunk_us", p->trunk_us, "overhead_us",
			 p->layers_us, "experts_us", p->experts_us, "disk_wait_us", p->disk_wait_us,
			 "bus_wait_us", p->bus_wait_us, "disk_bytes", p->disk_token_bytes,
			 "copied_bytes", p->copied_token_bytes, "moved_bytes", p->moved_token_bytes);
}

static enum exit_code print_json(struct ctl *c, const struct planning *p)
{
	const struct plan *plan = &p->plan;

	return ctl_print_json(
		c, json_pack("{s:b, s:s, s:o, s:o, s:{s:s?, s:I, s:f, s:f, s:f}, s:o, s:{s:f, s:f}}",
			     "prediction", true, "model", p->name, "machine", machine_object(p),
			     "tiers", tiers_object(p), "routing", "file", p->routing, "steps",
			     (json_int_t)plan->n_steps, "vram_hits", plan->vram_hits, "ram_hits",
			     plan->ram_hits, "disk", plan->misses, "decode", decode_object(plan),
			     "prefill", "cold_tokens_per_second",
			     tokens_per_second(plan->cold_prefill_us, PLAN_CHUNK_TOK),
			     "warm_tokens_per_second",
			     tokens_per_second(plan->warm_prefill_us, PLAN_CHUNK_TOK)));
}

enum exit_code ctl_plan(struct ctl *c)
{
	_cleanup_(planning_done) struct planning p = {};
	_cleanup_(freep) char *error = NULL;
	const char *wrong = parse_options(c, &p);
	int r;

	if (wrong)
		return ctl_usage_error(c, wrong);
	r = get_shape(c, &p, &error);
	if (r == 0)
		r = get_trace(c, &p, &error);
	if (r == 0)
		r = get_prices(&p, &error);
	if (r == 0)
		r = plan_predict(&p.shape, &p.machine, &p.trace, &p.plan, &error);
	if (r < 0)
		return failed(c, r, error);
	if (c->json)
		return print_json(c, &p);
	print_prices(c, &p);
	print_tiers(c, &p);
	print_speed(c, &p);
	return EXIT_OK;
}
