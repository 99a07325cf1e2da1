/* SPDX-License-Identifier: MIT */
/*
 * log.h: one line to the journal (structured) or to standard error (when it is not the journal).
 *
 * Any thread. Only the daemon layer logs; engine, model and other pure modules return errors. Never text of a prompt or an
 * answer, nor anything else a client sent verbatim.
 */
#pragma once

#include "daemon/base.h"

#include <syslog.h>

void log_open(const char *program, int max_level); /* LOG_ERR..LOG_DEBUG; looks at $JOURNAL_STREAM */
void log_set_level(int max_level);
_printf_(2, 3) void log_line(int level, const char *format, ...);
/* Structured: fields is a NULL-terminated list of "KEY=value" strings, sent to the journal only. */
_printf_(3, 4) void log_fields(int level, const char *const *fields, const char *format, ...);
#define log_error(...)   log_line(LOG_ERR, __VA_ARGS__)
#define log_warning(...) log_line(LOG_WARNING, __VA_ARGS__)
#define log_notice(...)  log_line(LOG_NOTICE, __VA_ARGS__)
#define log_info(...)    log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...)   log_line(LOG_DEBUG, __VA_ARGS__)
