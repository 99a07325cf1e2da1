/* SPDX-License-Identifier: MIT */
/*
 * ini.h: [Section] and Key=value lines as systemd has them, and drop-in directories; for config.c and policy.c.
 *
 * Pure: never logs; a problem is one line "FILE:LINE: …, ignoring\n" in warnings. Loop thread. A file is read whole before its first
 * line counts; it has at most INI_FILE_BYTES_MAX bytes, a line, continued ones joined, at most INI_LINE_BYTES_MAX.
 */
#pragma once

#include "daemon/base.h"

#define INI_FILE_BYTES_MAX (1024 * 1024)
#define INI_LINE_BYTES_MAX 4096

enum ini_state {
	INI_NO_SECTION, /* the file has not come to one */
	INI_SKIPPING,   /* one that nobody knows: its lines were warned about with it */
	INI_IN_SECTION,
};

/* Both get UTF-8 without NUL, of at most INI_LINE_BYTES_MAX bytes, and may warn. A negative return ends the reading. */
struct ini_reader {
	/* name: what stands between the brackets. 1: its lines count; 0: they do not, and a warning says why. */
	int (*section)(struct ini_reader *r, const char *name);
	/* Without blanks around; value may be empty. 0. */
	int (*assignment)(struct ini_reader *r, const char *key, const char *value);
	void *userdata;
	struct buf *warnings; /* may be NULL */
	bool strict; /* ini_read_layer(): not permitted, no descriptors left and I/O errors are errors: the file may forbid something */
	/* where it is; set by ini_read() */
	const char *path;
	unsigned line; /* the first of continued ones; 0: none */
	enum ini_state state;
};

/* -errno when the file cannot be read, else what a callback returned. */
int ini_read(struct ini_reader *r, const char *path);
/* The same, but a file that is there and cannot be read is a warning. 0, -ENOENT, or what a callback returned. */
int ini_read_layer(struct ini_reader *r, const char *path);
/* Appends "PATH:LINE: …, ignoring\n". Without memory a warning is lost, and beyond 64 KiB all are. */
_printf_(2, 3) void ini_warn(const struct ini_reader *r, const char *format, ...);

struct ini_dropin {
	char *name, *path;
};

/* Zero-initialised is empty. */
struct ini_dropins {
	struct ini_dropin *items;
	size_t n;
	bool strict; /* the same for a directory */
};

/* Adds the *.conf of a directory, but none whose name is there already, and sorts by name. A directory that is not there is empty; one
 * that cannot be read a warning. A link to /dev/null is a file like others, an empty one: that is how it masks. -ENOMEM. */
int ini_dropins_add(struct ini_dropins *d, const char *dir, struct buf *warnings);
/* ini_dropins_add() of ROOT/etc, ROOT/run and ROOT/usr/lib residentd/NAME: of one name that of /etc, else of /run. */
int ini_dropins_add_layers(struct ini_dropins *d, const char *root, const char *name,
			   struct buf *warnings);
void ini_dropins_done(struct ini_dropins *d);
