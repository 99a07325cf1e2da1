/* SPDX-License-Identifier: MIT */
/*
 * staging.h: a hidden directory inside the models directory, in which things are made before they
 * get their names.
 *
 * One owner, one thread. Invariant: a staging directory is locked (flock) while its process lives,
 * so that what is found unlocked is left of one that was killed and may be removed by anybody. It
 * is 0700: nobody else can take that lock.
 */
#pragma once

#include "daemon/base.h"

struct staging {
	int models; /* borrowed: the models directory */
	int fd;
	char *path; /* of the staging directory */
};

/* Sweeps first. models and path name the same directory. -errno with *ret_error set. */
int staging_new(int models, const char *path, struct staging **ret, char **ret_error);
/* Removes the directory with all that is in it. */
struct staging *staging_free(struct staging *s); /* accepts NULL, returns NULL */
DEFINE_CLEANUP(struct staging *, staging_free)
/* Removes what killed processes have left. */
void staging_sweep(int models);
