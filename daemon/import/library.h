/* SPDX-License-Identifier: MIT */
/*
 * library.h: the models directory: which models lie in it, which of them is the default, and how
 * they leave.
 *
 * A library is what was there when it was opened; one thread. Reading needs no rights but those of
 * the directory. Refuses to know whether a model is any good. Invariant: names given from outside
 * are compared with what is there and never used as paths.
 */
#pragma once

#include "daemon/base.h"

#include <jansson.h>

#define CATALOG_DIRECTORY    "/var/lib/residentd/models"
#define CATALOG_DEFAULT_LINK "default.gguf"

struct library_entry {
	char *file; /* the first part's */
	char *stem; /* without .gguf and -00001-of-00002 */
	unsigned n_parts;
	uint64_t bytes;   /* of the parts that are there */
	uint64_t mtime_s; /* of the first part */
	bool is_default;
};

struct library {
	char *path;
	int fd;
	struct library_entry *entries; /* by name */
	size_t n;
};

/* -ENOENT...: *ret_error says which directory. */
int library_open(const char *path, struct library **ret, char **ret_error);
struct library *library_close(struct library *c); /* accepts NULL, returns NULL */
DEFINE_CLEANUP(struct library *, library_close)

/*
 * By file, with or without .gguf; by name without the hash, or by the hash, where only one model
 * has it. -ENOENT, -ENOTUNIQ (the text lists them).
 */
int library_find(const struct library *c, const char *name, const struct library_entry **ret,
		 char **ret_error);
/* The model of this content (12 digits of its hash, all bytes), or NULL. */
const struct library_entry *library_find_content(const struct library *c, const char *hash12,
						 uint64_t bytes);
/*
 * What was recorded at import; for a file that came otherwise, what it says of itself. NULL:
 * neither can be read.
 */
json_t *library_info(const struct library *c, const struct library_entry *e);
/* Name of one file of a model; no 0 to n-1. NULL: no memory. */
char *library_part_name(const char *stem, unsigned no, unsigned n_parts);

/*
 * Points default.gguf at a file of the directory, atomically. Something else of that name is left
 * alone: -EEXIST.
 */
int library_check_default(int fd, const char *path, char **ret_error); /* the same, beforehand */
int library_set_default(int fd, const char *path, const char *file, char **ret_error);
/* Whether default.gguf leads to a file; whether it is the link to this one. */
bool library_has_default(int fd);
bool library_is_default(int fd, const char *file);
/* -EBUSY: it is the default, and force is not set; with it, the link goes too. */
int library_remove(const struct library *c, const struct library_entry *e, bool force, char **ret_error);
