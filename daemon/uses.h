/* SPDX-License-Identifier: MIT */
/*
 * uses.h: use cases instead of model names. A client asks for chat, code, small or best; models.d/NAME.conf says which models serve that.
 *
 * Pure: never logs. Loop thread. Files hold [chat], [code], [small] and [best] sections with one key, Models=, blank-separated globs of model
 * names; layers and drop-ins as for policy (ini.h). A use that no file names is served by any model.
 */
#pragma once

#include "daemon/base.h"

enum use { USE_CHAT, USE_CODE, USE_SMALL, USE_BEST, USE_MAX };

struct uses {
	char *models[USE_MAX]; /* NULL: any */
};

/* Missing directories are no error. -ENOMEM. */
int uses_read(const char *root, struct uses *ret, struct buf *warnings);
void uses_done(struct uses *u);
int use_from_string(const char *s); /* -EINVAL */
/* Does this model serve that use? */
bool uses_match(const struct uses *u, enum use use, const char *model);
