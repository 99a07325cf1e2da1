/* SPDX-License-Identifier: MIT */
/* install.h: places a model file where residentd looks for it. One call at a time; residentctl
 * only. */
#pragma once

#include "client/terminal.h"

struct install {
	bool replace;      /* a model of the same name */
	bool make_default; /* point default.gguf at it even when it points at another */

	/* results */
	char *name;     /* in the directory; malloc'd */
	uint64_t bytes; /* all parts */
	bool is_default;
};

/* $RESIDENTD_MODELS, or the system's. */
const char *install_directory(void);
/*
 * Checks that path is a GGUF file (or the first part of a split one), copies it (and its parts)
 * into the directory, each under a temporary name until it is whole and on disk, and makes it the
 * default when there is none. Progress goes to err. 0; -errno with *ret_error set (malloc'd; may be
 * NULL).
 */
int install_model(const char *path, struct install *i, struct terminal *err, char **ret_error);
