/* SPDX-License-Identifier: MIT */
/*
 * ctl.h: what the commands of residentctl share: options, streams, and the two ways to the service.
 *
 * Main thread. residentctl.c owns argv and what goes over the socket, ctl-bus.c what goes over the
 * system bus, ctl-policy.c configuration and policy, also without a service. Invariant: a command
 * prints its result on out, as one JSON object when `json`, and everything else on err.
 */
#pragma once

#include "client/report.h"
#include "client/resident-control.h"
#include "daemon/varlink.h"

#include <jansson.h>

#define PROGRAM "residentctl"

struct ctl {
	struct terminal out, err;
	struct resident *r;           /* the socket, when the command asked for it */
	struct resident_control *bus; /* the same */

	char **arguments; /* behind the command's name; NULL-terminated, as many as it takes */
	/* options */
	bool json, force, make_default, special, runtime;
	const char *name, *who, *why, *root, *bytes;  /* NULL: not given */
	const char *svg, *output, *tokens, *interval; /* residency, trace record, top */
	const char *trace_file, *experts, *fractions, *policy, *skip; /* simulate; plan: the first */
	const char *shape, *vram, *ram, *vram_bw, *pcie, *mem, *disk, *flops, *context_text; /* plan */
	bool once;                /* top */
	const char *csv, *repeat; /* bench, and of the above svg, tokens, context_text */
};

enum exit_code ctl_usage_error(struct ctl *c, const char *what);
/* A field of a reply over the socket is not what the interface promises. Returns EXIT_ERROR. */
enum exit_code ctl_bad_reply(struct ctl *c, const struct args *a);
/* Prints o, which is taken; NULL: jansson could not make it. */
enum exit_code ctl_print_json(struct ctl *c, json_t *o);
/* Writes all of it to that file, which it replaces; to standard output for "-" and NULL. Says what went wrong. */
enum exit_code ctl_write_file(struct ctl *c, const char *path, const struct buf *data);
/* A user's name, or else the number. */
const char *ctl_user_text(uint32_t uid, char text[64]);
/* 21.2 GB */
const char *ctl_bytes_text(uint64_t bytes, char text[32]);
/* What a GPU does for the service, as one line that ends in its size, if it is used. -ENOMEM. */
int ctl_gpu_text(struct buf *out, const struct resident_gpu *gpu);
/* 5 min 3 s */
const char *ctl_span_text(uint64_t s, char text[32]);
/* ctl-svg.c: appends a text without control characters and what XML takes for its own, or forbids. -ENOMEM. */
int ctl_svg_put_text(struct buf *out, const char *text);

/* ctl-bus.c */
enum exit_code ctl_bus_connect(struct ctl *c);
enum exit_code ctl_bus_failed(struct ctl *c);
enum exit_code ctl_bus_hold(struct ctl *c);
enum exit_code ctl_bus_yield_gpu(struct ctl *c);
enum exit_code ctl_bus_holds(struct ctl *c);
enum exit_code ctl_bus_sessions(struct ctl *c);
enum exit_code ctl_bus_reload(struct ctl *c);
enum exit_code ctl_bus_model_load(struct ctl *c);
enum exit_code ctl_bus_model_unload(struct ctl *c);

/* ctl-policy.c */
enum exit_code ctl_policy_show(struct ctl *c);
enum exit_code ctl_policy_set(struct ctl *c);
enum exit_code ctl_policy_check(struct ctl *c);
enum exit_code ctl_policy_check_config(struct ctl *c);

/* ctl-residency.c, ctl-top.c: where the model's memory is. */
enum exit_code ctl_residency(struct ctl *c);
enum exit_code ctl_trace_record(struct ctl *c);
enum exit_code ctl_top(struct ctl *c);

/* ctl-bench.c: how fast the service is. */
enum exit_code ctl_bench(struct ctl *c);

/* ctl-simulate.c, ctl-plan.c: without a service. */
enum exit_code ctl_simulate(struct ctl *c);
enum exit_code ctl_plan(struct ctl *c);
