/* SPDX-License-Identifier: MIT */
/*
 * tiles.c: see tiles.h.
 *
 * The file is text, so that it can be looked at; a copy of the state directory on another machine,
 * or another kernel table, is noticed by its second and third line and measured over.
 */
#include "daemon/tiles.h"

#include "daemon/file.h"
#include "kernels/cpu/tune.h"

#define MAGIC         "residentd-tiles 1"
#define FILE_MAX      1024
#define PROCESSOR_MAX 128

/* The processor's name for itself; the machine's where it has none. */
static void name_processor(char name[PROCESSOR_MAX])
{
	_cleanup_(fclosep) FILE *f = fopen("/proc/cpuinfo", "re");
	char line[256];

	snprintf(name, PROCESSOR_MAX, "unknown");
	while (f && fgets(line, sizeof(line), f)) {
		char *value = strchr(line, ':');

		if (!value ||
		    (strncmp(line, "model name", 10) != 0 && strncmp(line, "CPU part", 8) != 0))
			continue;
		value[strcspn(value, "\n")] = 0;
		snprintf(name, PROCESSOR_MAX, "%s", value + (value[1] == ' ' ? 2 : 1));
		return;
	}
}

static bool in_range(const struct cpu_tiles *t)
{
	return t->reg_cols >= 2 && t->reg_cols <= 4 && t->l1_rows >= 4 && t->l1_rows <= 64 &&
	       t->l2_cols >= 16 && t->l2_cols <= 512 && t->l2_cols % 16 == 0;
}

bool tiles_parse(const char *text, size_t len, const char *processor, const char *kernels,
		 struct cpu_tiles *ret)
{
	char copy[FILE_MAX + 1], head[FILE_MAX];
	struct cpu_tiles t;
	int at = 0, n;

	if (len > FILE_MAX || memchr(text, 0, len))
		return false;
	memcpy(copy, text, len);
	copy[len] = 0;
	n = snprintf(head, sizeof(head), "%s\n%s\n%s\n", MAGIC, processor, kernels);
	if (n < 0 || (size_t)n >= sizeof(head) || strncmp(copy, head, (size_t)n) != 0)
		return false;
	if (sscanf(copy + n, "%4u %4u %4u\n%n", &t.reg_cols, &t.l1_rows, &t.l2_cols, &at) != 3 ||
	    (size_t)n + (size_t)at != len || !in_range(&t))
		return false;
	*ret = t;
	return true;
}

int tiles_get(const char *state_dir, const struct cpu_kernels *k, struct cpu_tiles *ret)
{
	_cleanup_(buf_done) struct buf text = { 0 };
	_cleanup_(freep) char *path = NULL;
	char processor[PROCESSOR_MAX], out[FILE_MAX];
	int r, n;

	*ret = k->tiles;
	if (!state_dir)
		return 0;
	if (asprintf(&path, "%s/tiles", state_dir) < 0) {
		path = NULL;
		return -ENOMEM;
	}
	name_processor(processor);
	r = file_read(path, FILE_MAX, &text);
	if (r == 0 && tiles_parse(text.data, text.len, processor, k->name, ret))
		return 0;
	r = tune_tiles(k, NULL, NULL, ret);
	if (r < 0)
		return r;
	n = snprintf(out, sizeof(out), "%s\n%s\n%s\n%u %u %u\n", MAGIC, processor, k->name,
		     ret->reg_cols, ret->l1_rows, ret->l2_cols);
	r = file_replace(path, out, (size_t)n, 0644);
	return r < 0 ? r : 1;
}
