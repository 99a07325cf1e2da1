/* SPDX-License-Identifier: MIT */
/*
 * residentctl.c: what the service is doing, and which models it has. Aligned text for people,
 * --json for programs.
 *
 * Owns argv and the layout of what is printed. Asks the service through libresident; only `model
 * add` touches files (install.c). Everything that is printed may come from a model file or the
 * service, so it goes through terminal.c.
 */
#include "client/install.h"
#include "client/report.h"

#include <getopt.h>
#include <jansson.h>

#define PROGRAM "residentctl"

struct ctl {
	struct terminal out, err;
	struct resident *r;
	bool json, replace, make_default, special;
};

static const char usage_text[] =
	"usage: residentctl [--json] COMMAND\n"
	"\n"
	"  status                    the service, its model, its work\n"
	"  availability              can it answer? exit status 0: yes, 4: no model\n"
	"  usage                     what you have used since the service started\n"
	"  model list                models of the service\n"
	"  model add FILE            copy a GGUF file to the service's models; the first becomes the default\n"
	"      --default             make it the default\n"
	"      --replace             also over one of the same name\n"
	"  tokenize TEXT             the tokens of a text; --special: control tokens too\n"
	"  interface                 the description of the service's socket interface\n"
	"\n"
	"  --json, -h, --help, -V, --version\n";

/* ---- helpers ---- */

static enum exit_code usage_error(struct ctl *c, const char *what)
{
	terminal_printf(&c->err, PROGRAM ": %s\n" PROGRAM ": see `residentctl --help`\n", what);
	return EXIT_USAGE;
}

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
	return *ret ? EXIT_OK : usage_error(c, "out of memory");
}

static void line(struct ctl *c, const char *label, const char *value)
{
	terminal_printf(&c->out, "%10s  %s\n", label, value);
}

/* 21.2 GB */
static const char *bytes_text(uint64_t bytes, char text[32])
{
	static const char *const units[] = { "B", "kB", "MB", "GB", "TB", "PB", "EB" };
	double x = (double)bytes;
	size_t i = 0;

	for (; x >= 999.5 && i + 1 < ARRAY_SIZE(units); i++)
		x /= 1000;
	snprintf(text, 32, i == 0 ? "%.0f %s" : "%.3g %s", x, units[i]);
	return text;
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

static const char *span_text(uint64_t s, char text[32])
{
	if (s >= 86400)
		snprintf(text, 32, "%llu d %llu h", (unsigned long long)(s / 86400),
			 (unsigned long long)(s % 86400 / 3600));
	else if (s >= 3600)
		snprintf(text, 32, "%llu h %llu min", (unsigned long long)(s / 3600),
			 (unsigned long long)(s % 3600 / 60));
	else if (s >= 60)
		snprintf(text, 32, "%llu min %llu s", (unsigned long long)(s / 60),
			 (unsigned long long)(s % 60));
	else
		snprintf(text, 32, "%llu s", (unsigned long long)s);
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

	terminal_printf(&c->out, "%10s  %s: %s, %s parameters, %s\n", "model", m->name, m->architecture,
			count_text(m->parameters, parameters), bytes_text(m->weight_bytes, bytes));
	terminal_printf(&c->out, "%10s  %u tokens (trained on %u)%s%s\n", "context", m->context_max,
			m->context_trained, m->chat ? "" : ", no chat template",
			m->thinking ? ", thinks" : "");
}

static void print_memory(struct ctl *c, const struct resident_status *s)
{
	char total[32], file[32], anon[32], used[32], max[32];

	terminal_printf(&c->out,
			"%10s  %s resident: %s of files, %s of its own; conversations %s of %s\n",
			"memory", bytes_text(s->rss_bytes, total),
			bytes_text(s->rss_file_bytes, file), bytes_text(s->rss_anon_bytes, anon),
			bytes_text(s->kv_bytes_used, used), bytes_text(s->kv_bytes_max, max));
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
	terminal_printf(&c->out, "%10s  %llu requests, %llu tokens read, %llu tokens written\n",
			"total", (unsigned long long)s->requests_total,
			(unsigned long long)s->prompt_tokens_total,
			(unsigned long long)s->generated_tokens_total);
	terminal_printf(&c->out, "%10s  residentd %s, process %u, for %s; %s, %u threads\n", "service",
			s->version, s->pid, span_text(s->uptime_s, text), s->backend, s->threads);
	return EXIT_OK;
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

static uint64_t number(json_t *o, const char *key)
{
	json_int_t n = json_integer_value(json_object_get(o, key));

	return n > 0 ? (uint64_t)n : 0;
}

static enum exit_code do_usage(struct ctl *c)
{
	json_auto_t *o = NULL;
	enum exit_code e = call(c, "GetUsage", NULL, &o);

	if (e != EXIT_OK || !o)
		return e;
	terminal_printf(&c->out, "%10s  %llu\n%10s  %llu tokens, %llu of them from the cache\n",
			"requests", (unsigned long long)number(o, "requests"), "prompts",
			(unsigned long long)number(o, "prompt_tokens"),
			(unsigned long long)number(o, "cached_tokens"));
	terminal_printf(&c->out, "%10s  %llu tokens, and %llu of thought\n%10s  %.3f s\n",
			"answers", (unsigned long long)number(o, "answer_tokens"),
			(unsigned long long)number(o, "thought_tokens"), "engine",
			(double)number(o, "engine_us") / 1e6);
	return e;
}

/* ---- models ---- */

static const char *string(json_t *o, const char *key)
{
	const char *s = json_string_value(json_object_get(o, key));

	return s ? s : "?";
}

static enum exit_code do_model_list(struct ctl *c)
{
	json_auto_t *o = NULL;
	enum exit_code e = call(c, "ListModels", NULL, &o);
	char parameters[32], bytes[32];
	json_t *m;
	size_t i;

	if (e != EXIT_OK || !o)
		return e;
	json_array_foreach(json_object_get(o, "models"), i, m)
		terminal_printf(&c->out, "%s  %s, %s parameters, %s, context %llu\n",
				string(m, "name"), string(m, "architecture"),
				count_text(number(m, "parameters"), parameters),
				bytes_text(number(m, "weight_bytes"), bytes),
				(unsigned long long)number(m, "context_max"));
	if (i == 0)
		terminal_printf(&c->out, "no model; `residentctl model add FILE` installs one\n");
	return e;
}

static enum exit_code do_model_add(struct ctl *c, const char *path)
{
	struct install i = { .replace = c->replace, .make_default = c->make_default };
	_cleanup_(freep) char *error = NULL, *name = NULL;
	char bytes[32];
	int r = install_model(path, &i, &c->err, &error);

	name = i.name;
	if (r < 0) {
		terminal_printf(&c->err, PROGRAM ": %s\n", error ? error : resident_strerror(r));
		if (r == -EACCES || r == -EPERM)
			terminal_printf(&c->err,
					PROGRAM ": only an administrator may write to %s (sudo?)\n",
					install_directory());
		return EXIT_ERROR;
	}
	if (c->json) {
		json_auto_t *o = json_pack("{s:s, s:s, s:I, s:b}", "directory", install_directory(),
					   "name", name, "bytes", (json_int_t)i.bytes, "default",
					   i.is_default);
		_cleanup_(freep) char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;

		terminal_printf(&c->out, "%s\n", text ? text : "{}");
		return EXIT_OK;
	}
	terminal_printf(&c->out, "%s (%s) is now in %s\n", name, bytes_text(i.bytes, bytes),
			install_directory());
	if (i.is_default)
		terminal_printf(&c->out,
				"It is the default model. To load it: systemctl reload residentd\n");
	else
		terminal_printf(&c->out, "Another model is the default; --default changes that.\n");
	return EXIT_OK;
}

static enum exit_code do_model(struct ctl *c, int argc, char **argv)
{
	enum exit_code e;

	if (argc == 2 && streq(argv[0], "add"))
		return do_model_add(c, argv[1]);
	if (argc != 1 || !streq(argv[0], "list"))
		return usage_error(c, "model list, or model add FILE");
	e = connect_service(c);
	return e == EXIT_OK ? do_model_list(c) : e;
}

/* ---- others ---- */

static enum exit_code do_tokenize(struct ctl *c, const char *text)
{
	json_t *parameters = json_pack("{s:s, s:b}", "text", text, "special", c->special);
	json_auto_t *o = NULL;
	json_t *piece;
	enum exit_code e;
	size_t i;

	if (!parameters)
		return usage_error(c, "the text is not valid UTF-8");
	e = call(c, "Tokenize", parameters, &o);
	if (e != EXIT_OK || !o)
		return e;
	json_array_foreach(json_object_get(o, "pieces"), i, piece) {
		json_t *token = json_array_get(json_object_get(o, "tokens"), i);
		/* As JSON, so that a space or a newline can be seen. */
		_cleanup_(freep) char *quoted = json_dumps(piece, JSON_ENCODE_ANY);

		terminal_printf(&c->out, "%10lld  %s\n", (long long)json_integer_value(token),
				quoted ? quoted : "?");
	}
	return e;
}

static enum exit_code do_interface(struct ctl *c)
{
	json_auto_t *o = NULL;
	enum exit_code e = call(c, "org.varlink.service.GetInterfaceDescription",
				json_pack("{s:s}", "interface", "org.residentd.Inference"), &o);

	if (e == EXIT_OK && o)
		terminal_printf(&c->out, "%s", string(o, "description"));
	return e;
}

/* ---- argv ---- */

static enum exit_code dispatch(struct ctl *c, int argc, char **argv)
{
	enum exit_code e;

	if (argc == 0)
		return usage_error(c, "a command is missing");
	if (streq(argv[0], "model"))
		return do_model(c, argc - 1, argv + 1);
	if (argc != (streq(argv[0], "tokenize") ? 2 : 1))
		return usage_error(c, "unknown command, or not its number of arguments");
	e = connect_service(c);
	if (e != EXIT_OK)
		return e;
	if (streq(argv[0], "status"))
		return do_status(c);
	if (streq(argv[0], "availability"))
		return do_availability(c);
	if (streq(argv[0], "usage"))
		return do_usage(c);
	if (streq(argv[0], "tokenize"))
		return do_tokenize(c, argv[1]);
	if (streq(argv[0], "interface"))
		return do_interface(c);
	return usage_error(c, "unknown command");
}

int main(int argc, char **argv)
{
	enum { OPT_JSON = 256, OPT_DEFAULT, OPT_REPLACE, OPT_SPECIAL };
	static const struct option options[] = {
		{ "json", no_argument, NULL, OPT_JSON },
		{ "default", no_argument, NULL, OPT_DEFAULT },
		{ "replace", no_argument, NULL, OPT_REPLACE },
		{ "special", no_argument, NULL, OPT_SPECIAL },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{},
	};
	struct ctl c = {};
	enum exit_code e;
	int option;

	terminal_init(&c.out, STDOUT_FILENO, false);
	terminal_init(&c.err, STDERR_FILENO, false);
	while ((option = getopt_long(argc, argv, "hV", options, NULL)) >= 0) {
		switch (option) {
		case OPT_JSON: c.json = true; break;
		case OPT_DEFAULT: c.make_default = true; break;
		case OPT_REPLACE: c.replace = true; break;
		case OPT_SPECIAL: c.special = true; break;
		case 'h': fputs(usage_text, stdout); return EXIT_OK;
		case 'V': puts(PROGRAM " " RESIDENTD_VERSION); return EXIT_OK;
		default: return EXIT_USAGE;
		}
	}
	e = dispatch(&c, argc - optind, argv + optind);
	resident_close(c.r);
	return (int)e;
}
