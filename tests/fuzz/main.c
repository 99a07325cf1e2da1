/* SPDX-License-Identifier: MIT */
/*
 * tests/fuzz/main.c: runs one fuzz target over the files given as arguments, directories walked: the plain program that
 * `make check` uses where libFuzzer is not. Files go in by name order, each in a heap copy of its exact size, so that a
 * sanitizer sees the first byte read too far. Fails when there was no input at all.
 */
#include "daemon/base.h"

#include <fts.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define INPUT_BYTES_MAX (64 << 20)

static int run_file(const char *path, const char *access_path)
{
	_cleanup_(fclosep) FILE *f = NULL;
	_cleanup_(freep) uint8_t *data = NULL;
	long size;

	f = fopen(access_path, "re");
	if (!f || fseek(f, 0, SEEK_END) < 0 || (size = ftell(f)) < 0) {
		fprintf(stderr, "%s: %m\n", path);
		return -errno;
	}
	if (size > INPUT_BYTES_MAX) {
		fprintf(stderr, "%s: %ld bytes, too large for an input\n", path, size);
		return -EFBIG;
	}
	rewind(f);
	data = malloc(size ? (size_t)size : 1);
	if (!data)
		return -ENOMEM;
	if (fread(data, 1, (size_t)size, f) != (size_t)size) {
		fprintf(stderr, "%s: cannot be read whole\n", path);
		return -EIO;
	}
	LLVMFuzzerTestOneInput(data, (size_t)size);
	return 0;
}

static int compare_names(const FTSENT **a, const FTSENT **b)
{
	return strcmp((*a)->fts_name, (*b)->fts_name);
}

int main(int argc, char *argv[])
{
	size_t n_inputs = 0, n_bad = 0;
	FTSENT *entry;
	FTS *walk;

	if (argc < 2) {
		fprintf(stderr, "usage: %s FILE-OR-DIRECTORY...\n", argv[0]);
		return EXIT_FAILURE;
	}
	walk = fts_open(argv + 1, FTS_PHYSICAL | FTS_NOCHDIR, compare_names);
	if (!walk) {
		fprintf(stderr, "%s: %m\n", argv[1]);
		return EXIT_FAILURE;
	}
	while ((entry = fts_read(walk))) {
		if (entry->fts_info == FTS_F) {
			n_inputs++;
			if (run_file(entry->fts_path, entry->fts_accpath) < 0)
				n_bad++;
		} else if (entry->fts_info == FTS_DNR || entry->fts_info == FTS_ERR ||
			   entry->fts_info == FTS_NS) {
			fprintf(stderr, "%s: %s\n", entry->fts_path, strerror(entry->fts_errno));
			n_bad++;
		}
	}
	fts_close(walk);
	if (n_bad || !n_inputs) {
		printf("not ok - inputs: %zu ran, %zu could not\n", n_inputs, n_bad);
		return EXIT_FAILURE;
	}
	printf("ok - %zu inputs\n", n_inputs);
	return EXIT_SUCCESS;
}
