/* SPDX-License-Identifier: MIT */
/*
 * residentctl.c: what the service is doing, which models it has, and what applies to whom. Aligned
 * text for people, --json for programs.
 *
 * Owns argv and the table of commands, and the commands that ask over the socket; the others are
 * behind ctl.h. Only `model` writes files (install.c). Everything that is printed may come from
 * a model file or the service, so it goes through terminal.c.
 */
#include "client/ctl-residency-view.h"
#include "client/ctl.h"
#include "client/install.h"

#include <getopt.h>
#include <limits.h>

static const char usage_text[] =
	"usage: residentctl [--json] COMMAND\n"
	"\n"
	"  status                    the service, its model, its work\n"
	"  availability              can it answer? exit status 0: yes, 4: no model\n"
	"  usage                     what you have used since the service started\n"
	"  residency                 where the model's experts are, layer by layer; what it costs\n"
	"      --svg FILE            draw every expert (root may, or the service's user)\n"
	"  top                       the same and more, every second; --interval SECONDS, --once\n"
	"  trace record              write which experts each token uses; --output FILE, --tokens N\n"
	"  bench                     measure speed at growing context; --context N, --tokens N, --repeat N\n"
	"      --csv FILE, --svg FILE  every measurement; a picture of them\n"
	"  simulate --trace FILE     replay such a file against eviction policies and Belady's bound\n"
	"      --experts E, --fraction F[,F...], --policy P, --skip STEPS\n"
	"  plan NAME|FILE            predict speed and memory of a model, here or on a machine with\n"
	"      --vram 8G, --ram 11.5G, --mem 40G/s, --disk 3G/s, --pcie 12.6G/s, --vram-bw 448G/s, --flops 5T/s\n"
	"      --context N, --trace FILE; --shape NAME: a model that is not at hand\n"
	"  sessions                  your open sessions; an administrator sees all\n"
	"  holds                     who keeps the model loaded, or the GPU free\n"
	"  hold [-- COMMAND...]      keep the model loaded while COMMAND runs, or until Ctrl-C\n"
	"  yield-gpu [-- COMMAND...] ask for GPU memory in the same way; --bytes N: not all of it\n"
	"      --who WHO, --why WHY  what `holds` shows\n"
	"  model list                the models there are: size, licence, which is the default, which is loaded\n"
	"  model add FILE            check a GGUF file and copy it to the service's models; the first is the default\n"
	"      --default             make it the default\n"
	"      --name NAME           call it so\n"
	"  model show NAME|FILE      what a model says of itself, its blocks, and the memory that it needs\n"
	"  model default NAME        the model to begin with from now on\n"
	"  model remove NAME         delete it; --force: also the default or loaded one\n"
	"  model load NAME           answer with another model; --default: from now on\n"
	"  model unload              give the model's memory back\n"
	"  policy show [USER]        what applies to a user, and where it was set\n"
	"  policy set USER KEY=VALUE...   change it; --runtime: until the next boot\n"
	"  policy check              look for mistakes in policy.d\n"
	"  config check              the same, and in residentd.conf and models.d\n"
	"      --root DIR            the files below DIR, and no service (show, check)\n"
	"  reload                    have the service read configuration and policy again\n"
	"  tokenize TEXT             the tokens of a text; --special: control tokens too\n"
	"  interface                 the description of the service's socket interface\n"
	"\n"
	"  --json, -h, --help, -V, --version\n";

/* ---- helpers ---- */

static enum exit_code connect_service(struct ctl *c)
{
	int n = resident_connect(NULL, &c->r);

	return n < 0 ? report_no_service(&c->err, PROGRAM, n) : EXIT_OK;
}

static enum exit_code failed(struct ctl *c)
{
	return report_error(&c->err, PROGRAM, resident_last_error(c->r));
}

/* Calls a method; parameters are taken and may be NULL. With --json the reply is printed as it came
 * and *ret stays NULL. */
static enum exit_code call(struct ctl *c, const char *method, json_t *parameters, json_t **ret)
{
	_cleanup_(freep) char *text = parameters ? json_dumps(parameters, JSON_COMPACT) : NULL,
			      *reply = NULL;

	json_decref(parameters);
	if (resident_call(c->r, method, text, &reply) < 0)
		return failed(c);
	if (c->json) {
		terminal_printf(&c->out, "%s\n", reply);
		return EXIT_OK;
	}
	*ret = json_loads(reply, 0, NULL);
	return *ret ? EXIT_OK : ctl_usage_error(c, "out of memory");
}

static void line(struct ctl *c, const char *label, const char *value)
{
	terminal_printf(&c->out, "%10s  %s\n", label, value);
}

/* 35.1 billion */
static const char *count_text(uint64_t n, char text[32])
{
	if (n >= 1000000000)
		snprintf(text, 32, "%.3g billion", (double)n / 1e9);
	else if (n >= 1000000)
		snprintf(text, 32, "%.3g million", (double)n / 1e6);
	else
		snprintf(text, 32, "%llu", (unsigned long long)n);
	return text;
}

/* What to do when there is no model and the service has not said it. */
static const char *reason_text(const char *reason)
{
	return reason ? reason : "no reason given; `residentctl model add FILE` installs a model";
}

/* ---- status, availability, usage ---- */

static void print_model(struct ctl *c, const struct resident_model *m)
{
	char parameters[32], bytes[32];

	terminal_printf(&c->out, "%10s  %s: %s, %s parameters, %s\n", "model", m->name,
			m->architecture, count_text(m->parameters, parameters),
			ctl_bytes_text(m->weight_bytes, bytes));
	terminal_printf(&c->out, "%10s  %u tokens (trained on %u)%s%s\n", "context", m->context_max,
			m->context_trained, m->chat ? "" : ", no chat template",
			m->thinking ? ", thinks" : "");
}

static void print_memory(struct ctl *c, const struct resident_status *s)
{
	char total[32], file[32], anon[32], used[32], max[32];

	terminal_printf(
		&c->out, "%10s  %s resident: %s of files, %s of its own; conversations %s of %s\n",
		"memory", ctl_bytes_text(s->rss_bytes, total),
		ctl_bytes_text(s->rss_file_bytes, file), ctl_bytes_text(s->rss_anon_bytes, anon),
		ctl_bytes_text(s->kv_bytes_used, used), ctl_bytes_text(s->kv_bytes_max, max));
}

/* What the service has of the GPU; 0: it cannot be told. */
static uint64_t ask_vram(struct ctl *c)
{
	_cleanup_(residency_view_done) struct residency_view v = {};
	_cleanup_(freep) char *text = NULL;
	json_auto_t *reply = NULL;
	struct args a;

	if (resident_call(c->r, "GetResidency", NULL, &text) < 0)
		return 0;
	reply = json_loads(text, 0, NULL);
	if (!reply || residency_view_read(&a, reply, &v) < 0)
		return 0;
	return v.vram.fixed_bytes + v.vram.slot_bytes;
}

/* The last line: what of it is ours takes another call, which ends what the one before handed out. */
static enum exit_code print_gpu(struct ctl *c, const struct resident_status *s)
{
	bool ask = s->gpu && streq(s->gpu->state, "active") && streq(s->state, "available");
	_cleanup_(buf_done) struct buf text = {};
	uint64_t used;
	char bytes[32];

	if (!s->gpu)
		return EXIT_OK;
	if (ctl_gpu_text(&text, s->gpu) < 0)
		return ctl_usage_error(c, "out of memory");
	used = ask ? ask_vram(c) : 0;
	terminal_printf(&c->out, "%10s  %s", "GPU", text.data);
	if (used > 0)
		terminal_printf(&c->out, ", %s of it ours", ctl_bytes_text(used, bytes));
	terminal_printf(&c->out, "\n");
	return EXIT_OK;
}

static enum exit_code do_status(struct ctl *c)
{
	const struct resident_status *s;
	json_t *none = NULL;
	char text[32];

	if (c->json)
		return call(c, "GetStatus", NULL, &none);
	if (resident_get_status(c->r, &s) < 0)
		return failed(c);
	line(c, "state", s->state);
	if (s->reason || !s->model)
		line(c, "", reason_text(s->reason));
	if (s->model)
		print_model(c, s->model);
	terminal_printf(&c->out, "%10s  %u running, %u waiting; %u sessions, %u of them yours\n",
			"work", s->running, s->queued, s->sessions, s->sessions_own);
	terminal_printf(&c->out,
			"%10s  %.1f tokens/s reading, %.1f tokens/s answering, in the last minute\n",
			"speed", s->prefill_tokens_per_second, s->decode_tokens_per_second);
	print_memory(c, s);
	if (s->experts) {
		terminal_printf(&c->out, "%10s  %s\n%10s  %s in all; more: residentctl residency\n",
				"experts", s->experts, "budget", ctl_bytes_text(s->budget_bytes, text));
	}
	terminal_printf(&c->out, "%10s  %llu requests, %llu tokens read, %llu tokens written\n",
			"total", (unsigned long long)s->requests_total,
			(unsigned long long)s->prompt_tokens_total,
			(unsigned long long)s->generated_tokens_total);
	terminal_printf(&c->out, "%10s  residentd %s, process %u, for %s; %s, %u threads\n", "service",
			s->version, s->pid, ctl_span_text(s->uptime_s, text), s->backend, s->threads);
	return print_gpu(c, s);
}

static enum exit_code do_availability(struct ctl *c)
{
	const struct resident_availability *v;
	json_t *none = NULL;

	if (c->json)
		return call(c, "GetAvailability", NULL, &none);
	if (resident_get_availability(c->r, &v) < 0)
		return failed(c);
	if (streq(v->state, "available")) {
		terminal_printf(&c->out, "available: %s\n", v->model ? v->model->name : "");
		return EXIT_OK;
	}
	terminal_printf(&c->out, "%s: %s\n", v->state, reason_text(v->reason));
	return EXIT_UNAVAILABLE;
}

static enum exit_code do_usage(struct ctl *c)
{
	static const char *const keys[] = { "requests",      "prompt_tokens",  "cached_tokens",
					    "answer_tokens", "thought_tokens", "engine_us" };
	long long n[ARRAY_SIZE(keys)] = {};
	json_auto_t *o = NULL;
	enum exit_code e = call(c, "GetUsage", NULL, &o);
	struct args a;

	if (e != EXIT_OK || !o)
		return e;
	args_begin(&a, o);
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		int64_t value = 0;

		args_i64(&a, keys[i], true, 0, INT64_MAX, &value);
		n[i] = value;
	}
	if (a.bad)
		return ctl_bad_reply(c, &a);
	terminal_printf(&c->out, "%10s  %lld\n%10s  %lld tokens, %lld of them from the cache\n",
			"requests", n[0], "prompts", n[1], n[2]);
	terminal_printf(&c->out, "%10s  %lld tokens, and %lld of thought\n%10s  %.3f s\n",
			"answers", n[3], n[4], "engine", (double)n[5] / 1e6);
	return e;
}

/* ---- others ---- */

static void read_tokens(struct args *a, json_t **ret_tokens, json_t **ret_pieces)
{
	json_t *tokens = NULL, *pieces = NULL;

	args_array(a, "tokens", true, SIZE_MAX, &tokens);
	args_array(a, "pieces", true, SIZE_MAX, &pieces);
	if (json_array_size(tokens) != json_array_size(pieces))
		args_refuse(a, "pieces", "are not as many as the tokens");
	for (size_t i = 0; i < json_array_size(tokens); i++) {
		if (!json_is_integer(json_array_get(tokens, i)))
			args_refuse(a, "tokens", "has an item that is not a token");
		if (!json_is_string(json_array_get(pieces, i)))
			args_refuse(a, "pieces", "has an item that is not a string");
	}
	*ret_tokens = tokens;
	*ret_pieces = pieces;
}

static enum exit_code do_tokenize(struct ctl *c)
{
	json_t *parameters = json_pack("{s:s, s:b}", "text", c->arguments[0], "special", c->special);
	json_t *tokens, *pieces, *piece;
	json_auto_t *o = NULL;
	enum exit_code e;
	struct args a;
	size_t i;

	if (!parameters)
		return ctl_usage_error(c, "the text is not valid UTF-8");
	e = call(c, "Tokenize", parameters, &o);
	if (e != EXIT_OK || !o)
		return e;
	args_begin(&a, o);
	read_tokens(&a, &tokens, &pieces);
	if (a.bad)
		return ctl_bad_reply(c, &a);
	json_array_foreach(pieces, i, piece) {
		/* As JSON, so that a space or a newline can be seen. */
		_cleanup_(freep) char *quoted = json_dumps(piece, JSON_ENCODE_ANY);

		terminal_printf(&c->out, "%10lld  %s\n",
				(long long)json_integer_value(json_array_get(tokens, i)),
				quoted ? quoted : "?");
	}
	return e;
}

static enum exit_code do_interface(struct ctl *c)
{
	const char *description = NULL;
	json_auto_t *o = NULL;
	enum exit_code e = call(c, "org.varlink.service.GetInterfaceDescription",
				json_pack("{s:s}", "interface", "org.residentd.Inference"), &o);
	struct args a;

	if (e != EXIT_OK || !o)
		return e;
	args_begin(&a, o);
	if (!args_str(&a, "description", true, SIZE_MAX, &description, NULL))
		return ctl_bad_reply(c, &a);
	terminal_printf(&c->out, "%s", description);
	return e;
}

/* ---- argv ---- */

enum { ANY = INT_MAX }; /* arguments */

static const struct command {
	const char *name, *second; /* "model", "add" */
	int min, max;              /* arguments behind the name */
	bool socket;               /* is asked over the socket */
	enum exit_code (*run)(struct ctl *c);
} commands[] = {
	{ "status", NULL, 0, 0, true, do_status },
	{ "availability", NULL, 0, 0, true, do_availability },
	{ "usage", NULL, 0, 0, true, do_usage },
	{ "tokenize", NULL, 1, 1, true, do_tokenize },
	{ "interface", NULL, 0, 0, true, do_interface },
	{ "residency", NULL, 0, 0, true, ctl_residency },
	{ "top", NULL, 0, 0, true, ctl_top },
	{ "trace", "record", 0, 0, true, ctl_trace_record },
	{ "bench", NULL, 0, 0, true, ctl_bench },
	{ "simulate", NULL, 0, 0, false, ctl_simulate },
	{ "plan", NULL, 0, 1, false, ctl_plan },
	{ "sessions", NULL, 0, 0, false, ctl_bus_sessions },
	{ "holds", NULL, 0, 0, false, ctl_bus_holds },
	{ "hold", NULL, 0, ANY, false, ctl_bus_hold },
	{ "yield-gpu", NULL, 0, ANY, false, ctl_bus_yield_gpu },
	{ "reload", NULL, 0, 0, false, ctl_bus_reload },
	{ "model", "list", 0, 0, false, install_list },
	{ "model", "add", 1, 1, false, install_add },
	{ "model", "show", 1, 1, false, install_show },
	{ "model", "remove", 1, 1, false, install_remove },
	{ "model", "default", 1, 1, false, install_default },
	{ "model", "load", 1, 1, false, ctl_bus_model_load },
	{ "model", "unload", 0, 0, false, ctl_bus_model_unload },
	{ "policy", "show", 0, 1, false, ctl_policy_show },
	{ "policy", "set", 2, ANY, false, ctl_policy_set },
	{ "policy", "check", 0, 0, false, ctl_policy_check },
	{ "config", "check", 0, 0, false, ctl_policy_check_config },
};

static enum exit_code dispatch(struct ctl *c, int argc, char **argv)
{
	if (argc == 0)
		return ctl_usage_error(c, "a command is missing");
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
		const struct command *command = &commands[i];
		int words = command->second ? 2 : 1;
		enum exit_code e;

		if (argc < words || !streq(argv[0], command->name) ||
		    (command->second && !streq(argv[1], command->second)))
			continue;
		if (argc - words < command->min || argc - words > command->max)
			return ctl_usage_error(c, "not this command's number of arguments");
		c->arguments = argv + words;
		e = command->socket ? connect_service(c) : EXIT_OK;
		return e == EXIT_OK ? command->run(c) : e;
	}
	return ctl_usage_error(c, "unknown command");
}

int main(int argc, char **argv)
{
	enum {
		OPT_JSON = 256,
		OPT_DEFAULT,
		OPT_FORCE,
		OPT_NAME,
		OPT_SPECIAL,
		OPT_RUNTIME,
		OPT_WHO,
		OPT_WHY,
		OPT_BYTES,
		OPT_ROOT,
		OPT_SVG,
		OPT_OUTPUT,
		OPT_TOKENS,
		OPT_INTERVAL,
		OPT_ONCE,
		OPT_TRACE,
		OPT_EXPERTS,
		OPT_FRACTION,
		OPT_POLICY,
		OPT_SKIP,
		OPT_SHAPE,
		OPT_VRAM,
		OPT_RAM,
		OPT_VRAM_BW,
		OPT_PCIE,
		OPT_MEM,
		OPT_DISK,
		OPT_FLOPS,
		OPT_CONTEXT,
		OPT_CSV,
		OPT_REPEAT
	};
	static const struct option options[] = {
		{ "json", no_argument, NULL, OPT_JSON },
		{ "default", no_argument, NULL, OPT_DEFAULT },
		{ "force", no_argument, NULL, OPT_FORCE },
		{ "name", required_argument, NULL, OPT_NAME },
		{ "special", no_argument, NULL, OPT_SPECIAL },
		{ "runtime", no_argument, NULL, OPT_RUNTIME },
		{ "who", required_argument, NULL, OPT_WHO },
		{ "why", required_argument, NULL, OPT_WHY },
		{ "bytes", required_argument, NULL, OPT_BYTES },
		{ "root", required_argument, NULL, OPT_ROOT },
		{ "svg", required_argument, NULL, OPT_SVG },
		{ "output", required_argument, NULL, OPT_OUTPUT },
		{ "tokens", required_argument, NULL, OPT_TOKENS },
		{ "interval", required_argument, NULL, OPT_INTERVAL },
		{ "once", no_argument, NULL, OPT_ONCE },
		{ "trace", required_argument, NULL, OPT_TRACE },
		{ "experts", required_argument, NULL, OPT_EXPERTS },
		{ "fraction", required_argument, NULL, OPT_FRACTION },
		{ "policy", required_argument, NULL, OPT_POLICY },
		{ "skip", required_argument, NULL, OPT_SKIP },
		{ "shape", required_argument, NULL, OPT_SHAPE },
		{ "vram", required_argument, NULL, OPT_VRAM },
		{ "ram", required_argument, NULL, OPT_RAM },
		{ "vram-bw", required_argument, NULL, OPT_VRAM_BW },
		{ "pcie", required_argument, NULL, OPT_PCIE },
		{ "mem", required_argument, NULL, OPT_MEM },
		{ "disk", required_argument, NULL, OPT_DISK },
		{ "flops", required_argument, NULL, OPT_FLOPS },
		{ "context", required_argument, NULL, OPT_CONTEXT },
		{ "csv", required_argument, NULL, OPT_CSV },
		{ "repeat", required_argument, NULL, OPT_REPEAT },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{},
	};
	struct ctl c = {};
	enum exit_code e;
	int option;

	if (terminal_fill_standard() < 0)
		return EXIT_ERROR;
	terminal_init(&c.out, STDOUT_FILENO, false);
	terminal_init(&c.err, STDERR_FILENO, false);
	while ((option = getopt_long(argc, argv, "hV", options, NULL)) >= 0) {
		switch (option) {
		case OPT_JSON: c.json = true; break;
		case OPT_DEFAULT: c.make_default = true; break;
		case OPT_FORCE: c.force = true; break;
		case OPT_NAME: c.name = optarg; break;
		case OPT_SPECIAL: c.special = true; break;
		case OPT_RUNTIME: c.runtime = true; break;
		case OPT_WHO: c.who = optarg; break;
		case OPT_WHY: c.why = optarg; break;
		case OPT_BYTES: c.bytes = optarg; break;
		case OPT_ROOT: c.root = optarg; break;
		case OPT_SVG: c.svg = optarg; break;
		case OPT_OUTPUT: c.output = optarg; break;
		case OPT_TOKENS: c.tokens = optarg; break;
		case OPT_INTERVAL: c.interval = optarg; break;
		case OPT_ONCE: c.once = true; break;
		case OPT_TRACE: c.trace_file = optarg; break;
		case OPT_EXPERTS: c.experts = optarg; break;
		case OPT_FRACTION: c.fractions = optarg; break;
		case OPT_POLICY: c.policy = optarg; break;
		case OPT_SKIP: c.skip = optarg; break;
		case OPT_SHAPE: c.shape = optarg; break;
		case OPT_VRAM: c.vram = optarg; break;
		case OPT_RAM: c.ram = optarg; break;
		case OPT_VRAM_BW: c.vram_bw = optarg; break;
		case OPT_PCIE: c.pcie = optarg; break;
		case OPT_MEM: c.mem = optarg; break;
		case OPT_DISK: c.disk = optarg; break;
		case OPT_FLOPS: c.flops = optarg; break;
		case OPT_CONTEXT: c.context_text = optarg; break;
		case OPT_CSV: c.csv = optarg; break;
		case OPT_REPEAT: c.repeat = optarg; break;
		case 'h':
			terminal_write(&c.out, usage_text, strlen(usage_text));
			return (int)report_output(&c.err, PROGRAM, &c.out, EXIT_OK);
		case 'V':
			terminal_printf(&c.out, PROGRAM " %s\n", RESIDENTD_VERSION);
			return (int)report_output(&c.err, PROGRAM, &c.out, EXIT_OK);
		default: return EXIT_USAGE;
		}
	}
	e = dispatch(&c, argc - optind, argv + optind);
	e = report_output(&c.err, PROGRAM, &c.out, e);
	resident_close(c.r);
	resident_control_close(c.bus);
	return (int)e;
}
