/* SPDX-License-Identifier: MIT */
/* repl.h: the conversation at a prompt, with line editing. Main thread; ends with the program. */
#pragma once

#include "client/chat.h"

/* Talks until Ctrl-D or /quit. c is set up, its transcript continued or empty; system (may be NULL)
 * begins new conversations. */
enum exit_code repl_run(struct chat *c, const char *system);
