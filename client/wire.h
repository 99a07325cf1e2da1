/* SPDX-License-Identifier: MIT */
/*
 * wire.h: the structures of resident.h to JSON and back.
 *
 * Pure; the half of libresident that knows what the fields are called and of what type they are,
 * and nothing of sockets. What is read comes from the service and is not trusted: a field that is
 * missing or of another type is refused in the caller's struct args. Fields that nobody asks for
 * are left alone, since a later service may send more. Strings handed out point into the JSON.
 */
#pragma once

#include "client/resident.h"
#include "daemon/varlink.h"

#define FRAME_MAX (16u << 20) /* bytes of one reply: bounds every string in it */

/* obj[key] = value, which is taken. 0 or -ENOMEM, also when obj or value is NULL. */
int wire_put(json_t *obj, const char *key, json_t *value);
/* -EINVAL: text is NULL; -EILSEQ: it is no UTF-8. */
int wire_put_text(json_t *obj, const char *key, const char *text);
int wire_put_messages(json_t *parameters, const struct resident_message *messages,
		      size_t n_messages); /* -EILSEQ, -EINVAL, -E2BIG */
int wire_put_options(json_t *parameters,
		     const struct resident_options *options); /* the same; options may be NULL */

void wire_read_usage(struct args *a, struct resident_usage *ret);
/* model, gpu: where ret->model and ret->gpu are stored, when there are any. */
void wire_read_availability(struct args *a, struct resident_availability *ret,
			    struct resident_model *model);
void wire_read_status(struct args *a, struct resident_status *ret, struct resident_model *model,
		      struct resident_gpu *gpu);
/* All of a frame's logprobs in one malloc'd block: the tokens, and behind them their alternatives.
 * -ENOMEM. */
int wire_read_logprobs(struct args *a, json_t *list, struct resident_logprob **ret, size_t *ret_n);
