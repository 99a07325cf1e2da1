/* SPDX-License-Identifier: MIT */
/*
 * describe.h: what a model file says of itself, for people and for file names.
 *
 * Pure, any thread. Refuses to know directories and whether the service can use the model. Texts
 * are the file author's: valid UTF-8 and bounded, but not fit for a terminal as they are; names are
 * fit for a file system.
 */
#pragma once

#include "daemon/model/gguf.h"

#include <jansson.h>

#define DESCRIBE_NAME_MAX 100 /* bytes of a cleaned name */

/*
 * title, architecture, license, source and whatever else is known of author, origin and size; only
 * "parameters", "weight_bytes" and "quantization" are always there. NULL: out of memory.
 */
json_t *describe_model(const struct gguf *g);
/*
 * Letters, digits and `._+-` stay, anything else becomes one `-`; no dot or dash begins or ends the
 * name. Empty when nothing is left.
 */
void describe_clean_name(const char *s, size_t len, char ret[DESCRIBE_NAME_MAX + 1]);
/*
 * What to call the file: `wanted` (may be NULL) alone; else the model's title with its
 * quantisation, unless that is in it already; else the same of `file`, the name it came with. Never
 * empty.
 */
void describe_name(const struct gguf *g, const char *wanted, const char *file,
		   char ret[DESCRIBE_NAME_MAX + 1]);
/*
 * "NAME-00002-of-00003.gguf": true, with the bytes of NAME, 2, and 3. Any other name: false.
 */
bool describe_split_name(const char *file, size_t *ret_len, unsigned *ret_no, unsigned *ret_count);
