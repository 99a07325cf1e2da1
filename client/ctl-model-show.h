/* SPDX-License-Identifier: MIT */
/*
 * ctl-model-show.h: `residentctl model show`: what a model file says of itself, and what it asks of
 * a machine: its trunk, its blocks, what a token reads, how much memory that takes. Main thread.
 * Any GGUF, also of a family that the engine does not know.
 */
#pragma once

#include "client/ctl.h"

/* A path, where the name of a model may stand too. */
bool ctl_model_is_path(const char *name);
/*
 * path: the file, of a split model the first. known: what is on record of it, taken; NULL: nothing,
 * the file speaks for itself. What is on record is printed even when the file cannot be read.
 */
enum exit_code ctl_model_show(struct ctl *c, const char *path, json_t *known);
