/* SPDX-License-Identifier: MIT */
/*
 * transcript.h: the last conversation as text: its turns, and the file from which `resident -c`
 * takes it up.
 *
 * Main thread. The file is $XDG_STATE_HOME/resident/last.json (~/.local/state/resident/last.json),
 * mode 0600 in a directory of mode 0700, and replaced as a whole. The service keeps tokens for a
 * while, this keeps the text until it is replaced. Invariant: a turn is either whole (question and
 * answer) or not there.
 */
#pragma once

#include "daemon/base.h"

struct turn {
	char *role, *content; /* owned */
};

struct transcript {
	struct turn *turns;
	size_t n, alloc;
	char session[64]; /* a kept session of the service that holds just these turns; "": none */
	uint64_t context_used; /* its tokens after the last of them: another number, other turns */
};

int transcript_add(struct transcript *t, const char *role, const char *content); /* -ENOMEM */
/* Drops the turns from n on. */
void transcript_cut(struct transcript *t, size_t n);
void transcript_done(struct transcript *t);

/* The directory, created when needed; *ret is malloc'd. -ENOENT: there is no home; -errno. */
int transcript_directory(char **ret);
/* -ENOENT: there is none; -EBADMSG: not a transcript; -errno. On success t has what the file
 * has. */
int transcript_load(struct transcript *t);
int transcript_save(const struct transcript *t);
int transcript_forget(void); /* removes the file; 0 also when there is none */
