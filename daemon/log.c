/* SPDX-License-Identifier: MIT */
/*
 * log.c: writes log lines to the journal's native socket, or to standard error. See log.h.
 *
 * Owns the program's name, the level and where lines go. log_open() is called once, before threads
 * start; everything else is for any thread. Refuses to fail: a line that cannot be written is lost,
 * and errno is kept for the caller.
 * Invariant: a call makes one line, sent by one system call, whatever bytes the message has.
 */
#define SD_JOURNAL_SUPPRESS_LOCATION /* it would name this file, always */
#include "daemon/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <systemd/sd-journal.h>

#define MESSAGE_MAX 2048 /* bytes; the rest of a message is cut */
#define FIELDS_MAX  16

static struct {
	char program[64];
	bool journal;
	atomic_int max_level;
} logger = { .program = "residentd", .max_level = LOG_INFO };

/* $JOURNAL_STREAM has the device and inode of what systemd made; stderr may be another file since. */
static bool stderr_is_journal(void)
{
	const char *stream = getenv("JOURNAL_STREAM");
	unsigned long long dev, ino;
	struct stat st;
	char end;

	if (!stream || sscanf(stream, "%llu:%llu%c", &dev, &ino, &end) != 2)
		return false;
	return fstat(STDERR_FILENO, &st) == 0 && st.st_dev == dev && st.st_ino == ino;
}

void log_open(const char *program, int max_level)
{
	snprintf(logger.program, sizeof(logger.program), "%s", program);
	logger.journal = stderr_is_journal();
	log_set_level(max_level);
}

void log_set_level(int max_level)
{
	logger.max_level = max_level;
}

/* Control characters become \xNN, those from U+0080 to U+009F too: terminals obey them. out holds 4
 * bytes for each of in. */
static void escape(char *out, const char *in)
{
	static const char hex[] = "0123456789abcdef";

	for (const unsigned char *p = (const unsigned char *)in; *p; p++) {
		if (p[0] == 0xc2 && p[1] >= 0x80 && p[1] <= 0x9f) {
			p++;
		} else if (*p >= 0x20 && *p != 0x7f) {
			*out++ = (char)*p;
			continue;
		}
		*out++ = '\\';
		*out++ = 'x';
		*out++ = hex[*p >> 4];
		*out++ = hex[*p & 15];
	}
	*out = 0;
}

static bool send_to_journal(int level, const char *const *fields, const char *message)
{
	char text[sizeof("MESSAGE=") + MESSAGE_MAX * 4], priority[sizeof("PRIORITY=7")];
	char identifier[sizeof("SYSLOG_IDENTIFIER=") + sizeof(logger.program)];
	struct iovec iov[3 + FIELDS_MAX];
	int n = 3;

	snprintf(text, sizeof(text), "MESSAGE=%s", message);
	snprintf(priority, sizeof(priority), "PRIORITY=%d", level & 7);
	snprintf(identifier, sizeof(identifier), "SYSLOG_IDENTIFIER=%s", logger.program);
	iov[0] = (struct iovec){ text, strlen(text) };
	iov[1] = (struct iovec){ priority, strlen(priority) };
	iov[2] = (struct iovec){ identifier, strlen(identifier) };
	for (; fields && *fields && n < 3 + FIELDS_MAX; fields++)
		iov[n++] = (struct iovec){ (char *)*fields, strlen(*fields) };
	return sd_journal_sendv(iov, n) >= 0;
}

static void emit(int level, const char *const *fields, const char *format, va_list ap)
{
	char raw[MESSAGE_MAX], message[MESSAGE_MAX * 4],
		line[sizeof(logger.program) + 4 + sizeof(message)];
	int saved = errno, n;

	vsnprintf(raw, sizeof(raw), format, ap);
	escape(message, raw);
	if (!logger.journal || !send_to_journal(level, fields, message)) {
		n = snprintf(line, sizeof(line), "%s: %s\n", logger.program, message);
		if (n > 0)
			(void)!write(STDERR_FILENO, line, (size_t)n);
	}
	errno = saved;
}

void log_line(int level, const char *format, ...)
{
	va_list ap;

	if (level > logger.max_level)
		return;
	va_start(ap, format);
	emit(level, NULL, format, ap);
	va_end(ap);
}

void log_fields(int level, const char *const *fields, const char *format, ...)
{
	va_list ap;

	if (level > logger.max_level)
		return;
	va_start(ap, format);
	emit(level, fields, format, ap);
	va_end(ap);
}
