/* SPDX-License-Identifier: MIT */
/*
 * bench-tokenizer.c: speed of tokenizer_encode() on one core: load time, MB/s on prose, and seconds
 * for long texts of one kind, which cost quadratic time in a careless tokenizer. Times are of the
 * processor, not of the clock, so that other load counts little. bench-tokenizer [VOCABULARY.gguf
 * [MEGABYTES]]
 *
 * The prose is the licence texts that Debian installs, or a paragraph of this file where there are
 * none, repeated.
 */
#include "daemon/model/tokenizer.h"

#include <sys/resource.h>

static const char paragraph[] =
	"The daemon keeps one model in memory and lends it to everyone on the machine. When a program asks, its text is cut "
	"into tokens; the tokens pass through forty layers, and out of the last one comes a guess at the next word. Nothing of "
	"this is new, but on a small computer the question \"what must be in memory right now?\" decides how long you'll wait: "
	"2 seconds, or 200.\n\n";

static int load_prose(struct buf *b, size_t bytes)
{
	static const char *const names[] = { "Apache-2.0", "Artistic", "GFDL-1.3", "GPL-2",
					     "GPL-3",      "LGPL-2.1", "MPL-2.0" };
	char path[128];
	size_t n;

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		_cleanup_(fclosep) FILE *f = NULL;
		char chunk[4096];

		snprintf(path, sizeof(path), "/usr/share/common-licenses/%s", names[i]);
		f = fopen(path, "re");
		while (f && (n = fread(chunk, 1, sizeof(chunk), f)) > 0) {
			if (buf_append(b, chunk, n) < 0)
				return -ENOMEM;
		}
	}

	if (b->len == 0 && buf_append(b, paragraph, sizeof(paragraph) - 1) < 0)
		return -ENOMEM;

	for (n = b->len; b->len < bytes;) {
		if (buf_reserve(b, n) < 0 || buf_append(b, b->data, n) < 0)
			return -ENOMEM;
	}

	return 0;
}

static double cpu_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int run(const struct tokenizer *t, const char *what, const char *text, size_t len)
{
	_cleanup_(tokens_done) struct tokens out = { 0 };
	struct rusage usage;
	double start = cpu_seconds(), s;
	int r = tokenizer_encode(t, text, len, 0, NULL, &out);

	if (r < 0) {
		fprintf(stderr, "%s: %s\n", what, strerror(-r));
		return r;
	}

	s = cpu_seconds() - start;
	getrusage(RUSAGE_SELF, &usage);
	printf("%-16s %6.1f MB %10zu tokens %8.3f s %8.1f MB/s   peak %ld MB\n", what,
	       (double)len / 1e6, out.n, s, (double)len / 1e6 / s, usage.ru_maxrss / 1024);
	fflush(stdout);
	return 0;
}

static int run_long(const struct tokenizer *t, size_t bytes)
{
	static const struct {
		const char *what, *unit;
		size_t len;
	} kinds[] = {
		{ "spaces", " ", 1 },
		{ "newlines", "\n", 1 },
		{ "tabs+newlines", "\t\r\n ", 4 },
		{ "one letter", "a", 1 },
		{ "letters", "qwErtyUiop", 10 },
		{ "digits", "7", 1 },
		{ "punctuation", "-", 1 },
		{ "emoji", "\xf0\x9f\x98\x80", 4 },
		{ "combining", "\xcc\x81", 2 },
		{ "CJK", "\xe4\xb8\xad\xe6\x96\x87", 6 },
		{ "invalid", "\xff", 1 },
		{ "NUL", "\0", 1 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
		_cleanup_(freep) char *text = malloc(bytes + 16);
		size_t n = 0;

		if (!text)
			return -ENOMEM;

		for (; n < bytes; n += kinds[i].len)
			memcpy(text + n, kinds[i].unit, kinds[i].len);

		if (run(t, kinds[i].what, text, n) < 0)
			return -EIO;
	}

	return 0;
}

static const char *default_vocabulary(char *path, size_t size)
{
	const char *shared = getenv("RESIDENTD_SHARED");

	snprintf(path, size, "%s/vocab/ggml-vocab-qwen35.gguf", shared ? shared : "../shared");
	return access(path, R_OK) == 0 ? path : "tests/models/tiny-qwen35moe-stories-q8_0.gguf";
}

int main(int argc, char **argv)
{
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(tokenizer_freep) struct tokenizer *t = NULL;
	_cleanup_(buf_done) struct buf prose = { 0 };
	_cleanup_(freep) char *error = NULL;
	size_t bytes = (argc > 2 ? strtoul(argv[2], NULL, 10) : 4) * 1000000;
	char path[4096];
	const char *vocabulary = argc > 1 ? argv[1] : default_vocabulary(path, sizeof(path));
	double start;

	if (gguf_open(vocabulary, &g, &error) < 0) {
		fprintf(stderr, "%s\n", error);
		return EXIT_FAILURE;
	}

	start = cpu_seconds();
	if (tokenizer_new(g, &t, &error) < 0) {
		fprintf(stderr, "%s: %s\n", vocabulary, error);
		return EXIT_FAILURE;
	}

	printf("%s: %u tokens, loaded in %.3f s\n", vocabulary, tokenizer_n_vocab(t),
	       cpu_seconds() - start);
	if (load_prose(&prose, MIN(bytes, (size_t)20000000)) < 0 ||
	    run(t, "prose", prose.data, prose.len) < 0)
		return EXIT_FAILURE;

	return run_long(t, bytes) < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
