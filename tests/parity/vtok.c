/* vtok: token ids of each line of standard input by llama.cpp's tokenizer, from a GGUF with a vocabulary.
 * vtok [-s] FILE < lines      -s: special tokens are parsed. In the lines, \n \t \r \\ and \xNN are escapes.
 * Own minimal declarations for llama.cpp v0.5.0 (see peer.c); checks a few defaults and stops if they differ. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
extern void llama_backend_init(void);
extern void llama_log_set(void (*cb)(int, const char *, void *), void *);
extern struct model_params llama_model_default_params(void);
extern void *llama_model_load_from_file(const char *, struct model_params);
extern const void *llama_model_get_vocab(const void *);
extern int32_t llama_tokenize(const void *, const char *, int32_t, int32_t *, int32_t, bool, bool);

static void quiet(int l, const char *s, void *u)
{
	(void)l;
	(void)s;
	(void)u;
}

static size_t unescape(char *s)
{
	char *o = s, *b = s;
	for (; *s; s++) {
		if (*s != '\\') {
			*o++ = *s;
			continue;
		}
		s++;
		if (*s == 'n')
			*o++ = '\n';
		else if (*s == 't')
			*o++ = '\t';
		else if (*s == 'r')
			*o++ = '\r';
		else if (*s == 'x' && s[1] && s[2]) {
			char h[3] = { s[1], s[2], 0 };
			*o++ = (char)strtol(h, NULL, 16);
			s += 2;
		} else if (*s)
			*o++ = *s;
		else
			break;
	}
	*o = 0;
	return (size_t)(o - b);
}

int main(int argc, char **argv)
{
	bool special = argc == 3 && !strcmp(argv[1], "-s");
	if (argc != 2 + special) {
		fprintf(stderr, "usage: vtok [-s] FILE < lines\n");
		return 2;
	}
	llama_log_set(quiet, NULL);
	llama_backend_init();
	struct model_params p = llama_model_default_params();
	if (p.n_gpu_layers != -1 || p.split_mode != 1 || p.load_mode != -1 || p.vocab_only ||
	    !p.use_extra_bufts) {
		fprintf(stderr, "vtok: the library has another parameter layout\n");
		return 1;
	}
	p.vocab_only = true;
	void *m = llama_model_load_from_file(argv[1 + special], p);
	if (!m) {
		fprintf(stderr, "vtok: cannot load %s\n", argv[1 + special]);
		return 1;
	}
	const void *v = llama_model_get_vocab(m);
	char *line = NULL;
	size_t cap = 0;
	ssize_t n;
	while ((n = getline(&line, &cap, stdin)) >= 0) {
		if (n && line[n - 1] == '\n')
			line[--n] = 0;
		int32_t len = (int32_t)unescape(line), max = len * 4 + 16;
		int32_t *t = malloc((size_t)max * sizeof *t);
		int32_t k = llama_tokenize(v, line, len, t, max, false, special);
		for (int32_t i = 0; i < k; i++)
			printf("%s%d", i ? " " : "", t[i]);
		putchar('\n');
		free(t);
	}
	return 0;
}
