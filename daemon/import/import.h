/* SPDX-License-Identifier: MIT */
/*
 * import.h: brings a model into the models directory: checked, copied, hashed, recorded.
 *
 * Used by residentd-import, which got the files as descriptors, and by residentctl for a directory
 * of its own. One import at a time in a process; several processes may import into one directory.
 * Never logs: it tells the caller what it does. Invariant: under its final name stands a whole,
 * checked file or none, whatever ends the process; and the content that was checked is the content
 * that stands there, because it is the copy that is checked.
 */
#pragma once

#include "daemon/base.h"

#define IMPORT_PARTS_MAX 253 /* descriptors in one message (SCM_MAX_FD) */

struct import_part {
	int fd; /* a regular file, open for reading; borrowed, its position does not matter */
	const char *name; /* as the user knows it, without directories */
};

enum import_event_kind {
	IMPORT_CHECK,   /* of the file as it lies there */
	IMPORT_SPACE,   /* needed, available: said before anything is written */
	IMPORT_COPY,    /* done, total */
	IMPORT_HASH,    /* the same, when the blocks are shared with the original and only read */
	IMPORT_SYNC,    /* waiting for the disk */
	IMPORT_WARNING, /* text */
	IMPORT_EVENT_MAX,
};

struct import_event {
	enum import_event_kind kind;
	uint64_t done, total;
	uint64_t needed, available;
	const char *text;
};

struct import_job {
	const char *directory;           /* made when it is not there */
	const struct import_part *parts; /* in order */
	size_t n_parts;
	const char *name;  /* NULL: the model's own */
	bool make_default; /* the first model becomes the default in any case */
	void (*event)(void *userdata, const struct import_event *e);
	bool (*cancelled)(void *userdata); /* asked often; true ends the import with -ECANCELED */
	void *userdata;
};

struct import_result {
	char *file;      /* in the directory: the first part */
	char sha256[65]; /* of all parts, one after the other */
	uint64_t bytes;
	bool is_default, existed;
};
void import_result_done(struct import_result *r);

/*
 * Refuses what the service could not load (errors as model_load()), -ENOSPC what does not fit with
 * something left over. On error *ret is untouched, *ret_error names the file and the reason, and
 * nothing is left behind; but a model stays that only could not be made the default.
 */
int import_add(const struct import_job *j, struct import_result *ret, char **ret_error);

/*
 * By a name as library_find() takes it; ret->is_default: it was, or is now. Errors as
 * library_remove() and library_set_default().
 */
int import_remove(const char *directory, const char *name, bool force, struct import_result *ret,
		  char **ret_error);
int import_set_default(const char *directory, const char *name, struct import_result *ret,
		       char **ret_error);
