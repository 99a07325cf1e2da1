/* SPDX-License-Identifier: MIT */
/*
 * report.h: a failure of libresident to a line for people and an exit code for scripts. Used by
 * resident and residentctl, at the end of their work. Refuses to know what was asked for.
 */
#pragma once

#include "client/resident.h"
#include "client/terminal.h"

enum exit_code {
	EXIT_OK = 0,
	EXIT_ERROR = 1, /* the service answered with an error that is none of the below, or died; or
			 * the output cannot be written */
	EXIT_USAGE = 2, /* options, arguments, input */
	EXIT_NO_SERVICE = 3,  /* residentd cannot be reached */
	EXIT_UNAVAILABLE = 4, /* it runs, but without a model (none, loading, broken, stopping) */
	EXIT_BUSY = 5,        /* try again later */
	EXIT_CONTEXT = 6,     /* the conversation does not fit */
	EXIT_INTERRUPTED = 130,
	EXIT_PIPE = 141, /* nobody reads standard output any more */
};

/* What became of a call: negative code from libresident, or 0. */
enum exit_code exit_code_of(int code);
/* Says why residentd cannot be reached and what to do about it. Returns EXIT_NO_SERVICE. */
enum exit_code report_no_service(struct terminal *err, const char *program, int code);
/* Prints the last error of the connection. Returns its exit code. */
enum exit_code report_error(struct terminal *err, const char *program, const struct resident_error *e);
/* What a program ends with that would end with e: something else when not all of its output could be
 * written, which is said. */
enum exit_code report_output(struct terminal *err, const char *program, const struct terminal *out,
			     enum exit_code e);
