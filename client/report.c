/* SPDX-License-Identifier: MIT */
/*
 * report.c: failures in words and numbers. See report.h.
 */
#include "client/report.h"

enum exit_code exit_code_of(int code)
{
	switch (-code) {
	case 0: return EXIT_OK;
	case RESIDENT_E_NO_MODEL:
	case RESIDENT_E_LOADING:
	case RESIDENT_E_MODEL_BROKEN:
	case RESIDENT_E_STOPPING: return EXIT_UNAVAILABLE;
	case RESIDENT_E_SESSION_BUSY:
	case RESIDENT_E_TOO_MANY_SESSIONS:
	case RESIDENT_E_QUEUE_FULL:
	case RESIDENT_E_QUOTA_EXCEEDED:
	case RESIDENT_E_NO_MEMORY: return EXIT_BUSY;
	case RESIDENT_E_CONTEXT_FULL: return EXIT_CONTEXT;
	case RESIDENT_E_INVALID_REQUEST: /* an option out of range, as a rule */
	case EILSEQ: return EXIT_USAGE;
	default: return EXIT_ERROR;
	}
}

enum exit_code report_no_service(struct terminal *err, const char *program, int code)
{
	terminal_printf(err, "%s: cannot reach residentd at %s: %s\n", program,
			resident_socket_path(), resident_strerror(code));
	if (code == -EACCES || code == -EPERM)
		terminal_printf(err, "%s: you may not use this socket\n", program);
	else
		terminal_printf(err,
				"%s: start it with `systemctl start residentd.socket`, or set RESIDENTD_SOCKET "
				"to the socket of a private one\n",
				program);
	return EXIT_NO_SERVICE;
}

enum exit_code report_error(struct terminal *err, const char *program, const struct resident_error *e)
{
	if (e->retry_after_ms > 0)
		terminal_printf(err, "%s: %s (try again in %.3g s)\n", program, e->message,
				e->retry_after_ms / 1e3);
	else
		terminal_printf(err, "%s: %s\n", program, e->message);
	return exit_code_of(e->code);
}

enum exit_code report_output(struct terminal *err, const char *program, const struct terminal *out,
			     enum exit_code e)
{
	if (e != EXIT_OK || out->error == 0)
		return e;
	if (out->error == -EPIPE)
		return EXIT_PIPE;
	terminal_printf(err, "%s: cannot write the output: %s\n", program,
			resident_strerror(out->error));
	return EXIT_ERROR;
}
