/* SPDX-License-Identifier: MIT */
/*
 * inject.c: reads RESIDENTD_EMU_MEMORY, _OTHERS, _DELAY_US and _FAIL. README.md has their syntax, inject.h the contract.
 */
#include "tests/emu/inject.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FAILURES   16
#define DEFAULT_MEMORY ((size_t)1 << 30)

struct failure {
	enum emu_event what;
	unsigned long at;
	bool onwards; /* and every one after it */
};

static const char *const fail_names[EMU_EVENT_MAX] = {
	[EMU_CALL] = "lost", [EMU_OPEN] = "open",     [EMU_ALLOC] = "alloc", [EMU_HOST] = "host",
	[EMU_COPY] = "copy", [EMU_LAUNCH] = "launch", [EMU_IMAGE] = "image", [EMU_STEP] = "fault",
};
static const char *const delay_names[EMU_EVENT_MAX] = {
	[EMU_COPY] = "copy",
	[EMU_LAUNCH] = "launch",
	[EMU_FILL] = "fill",
	[EMU_OTHER] = "event",
};

static struct failure failures[MAX_FAILURES];
static size_t n_failures;
static unsigned long counts[EMU_EVENT_MAX];
static char fail_text[256];
static uint64_t delays[EMU_EVENT_MAX];
static size_t memory = DEFAULT_MEMORY;
static unsigned seed = 1;

static void __attribute__((noreturn)) reject(const char *variable, const char *text)
{
	fprintf(stderr, "emulator: %s=%s means nothing\n", variable, text);
	abort();
}

/* "NAME:": its place in `names`, and *text is behind it. */
static enum emu_event parse_name(const char *const names[EMU_EVENT_MAX], const char **text)
{
	size_t len = strcspn(*text, ":");

	for (unsigned i = 0; i < EMU_EVENT_MAX; i++)
		if (names[i] && strlen(names[i]) == len && (*text)[len] == ':' &&
		    strncmp(names[i], *text, len) == 0) {
			*text += len + 1;
			return (enum emu_event)i;
		}
	return EMU_EVENT_MAX;
}

static unsigned long parse_number(const char *variable, const char *all, const char **text)
{
	unsigned long n;
	char *end;

	if (!isdigit((unsigned char)**text))
		reject(variable, all);
	n = strtoul(*text, &end, 10);
	*text = end;
	return n;
}

static void read_failures(const char *all)
{
	const char *p = all;

	if (strlen(all) >= sizeof(fail_text))
		reject("RESIDENTD_EMU_FAIL", all);
	if (strcmp(all, fail_text) == 0)
		return;
	strcpy(fail_text, all);
	memset(counts, 0, sizeof(counts));
	n_failures = 0;
	while (*p) {
		struct failure f = { .what = parse_name(fail_names, &p) };

		if (f.what == EMU_EVENT_MAX || n_failures == MAX_FAILURES)
			reject("RESIDENTD_EMU_FAIL", all);
		f.at = parse_number("RESIDENTD_EMU_FAIL", all, &p);
		f.onwards = *p == '+';
		p += f.onwards;
		if (*p && *p++ != ',')
			reject("RESIDENTD_EMU_FAIL", all);
		failures[n_failures++] = f;
	}
}

/* One number for all kinds, or NAME:NUMBER of some. */
static void read_delays(const char *all)
{
	const char *p = all;

	memset(delays, 0, sizeof(delays));
	if (isdigit((unsigned char)*p)) {
		uint64_t us = parse_number("RESIDENTD_EMU_DELAY_US", all, &p);

		for (unsigned i = 0; i < EMU_EVENT_MAX; i++)
			delays[i] = us;
	}
	while (*p) {
		enum emu_event what = parse_name(delay_names, &p);

		if (what == EMU_EVENT_MAX)
			reject("RESIDENTD_EMU_DELAY_US", all);
		delays[what] = parse_number("RESIDENTD_EMU_DELAY_US", all, &p);
		if (*p && *p++ != ',')
			reject("RESIDENTD_EMU_DELAY_US", all);
	}
}

static void read_memory(const char *all)
{
	const char *p = all, *suffix, *suffixes = "KMG";
	unsigned long n;

	memory = DEFAULT_MEMORY;
	if (!*p)
		return;
	n = parse_number("RESIDENTD_EMU_MEMORY", all, &p);
	suffix = *p ? strchr(suffixes, *p) : NULL;
	if ((*p && !suffix) || (suffix && p[1]))
		reject("RESIDENTD_EMU_MEMORY", all);
	memory = suffix ? (size_t)n << 10 * (suffix - suffixes + 1) : n;
}

static const char *variable(const char *name)
{
	const char *text = getenv(name);

	return text ? text : "";
}

void inject_read(void)
{
	read_failures(variable("RESIDENTD_EMU_FAIL"));
	read_delays(variable("RESIDENTD_EMU_DELAY_US"));
	read_memory(variable("RESIDENTD_EMU_MEMORY"));
}

bool inject_fails(enum emu_event what)
{
	unsigned long n = ++counts[what];

	for (size_t i = 0; i < n_failures; i++)
		if (failures[i].what == what &&
		    (failures[i].at == n || (failures[i].onwards && n > failures[i].at)))
			return true;
	return false;
}

uint64_t inject_delay_us(enum emu_event what)
{
	uint64_t half = delays[what] / 2;

	return half ? half + inject_random((unsigned)half + 1) : delays[what];
}

unsigned inject_random(unsigned limit)
{
	return (unsigned)rand_r(&seed) % limit;
}

size_t inject_memory(void)
{
	return memory;
}

/* Read anew each time: what another process allocates is not announced either. */
size_t inject_others(void)
{
	const char *path = variable("RESIDENTD_EMU_OTHERS");
	size_t bytes = 0;
	FILE *f;

	f = *path ? fopen(path, "re") : NULL;
	if (!f)
		return 0;
	if (fscanf(f, "%zu", &bytes) != 1)
		bytes = 0;
	fclose(f);
	return bytes;
}
