/* SPDX-License-Identifier: MIT */
/*
 * ini.c: reads lines with sections, comments and continuations, and collects drop-ins. See ini.h.
 *
 * Owns nothing but what it is handed. Refuses to know which sections, keys and values there are.
 * Invariant: a callback sees a line only when it is UTF-8 without NUL, and an assignment only inside a
 * section that was accepted.
 */
#include "daemon/ini.h"

#include "daemon/file.h"
#include "daemon/model/tokenizer.h" /* utf8_valid() */

#include <dirent.h>
#include <stdarg.h>

#define WARNINGS_BYTES_MAX (64 * 1024)

void ini_warn(const struct ini_reader *r, const char *format, ...)
{
	char *text = NULL;
	va_list ap;

	if (!r->warnings || r->warnings->len > WARNINGS_BYTES_MAX)
		return;
	va_start(ap, format);
	if (vasprintf(&text, format, ap) < 0)
		text = NULL;
	va_end(ap);
	if (!text)
		return;
	if (r->line)
		buf_printf(r->warnings, "%s:%u: %s, ignoring\n", r->path, r->line, text);
	else
		buf_printf(r->warnings, "%s: %s, ignoring\n", r->path, text);
	if (r->warnings->len > WARNINGS_BYTES_MAX)
		buf_printf(r->warnings, "%s: too many problems, not showing more\n", r->path);
	free(text);
}

static bool is_blank(char ch)
{
	return ch == ' ' || ch == '\t' || ch == '\r';
}

static int take_section(struct ini_reader *r, char *line, size_t len)
{
	int e;

	r->state = INI_SKIPPING;
	if (line[len - 1] != ']') {
		ini_warn(r, "a section without ']'");
		return 0;
	}
	line[len - 1] = 0;
	e = r->section(r, line + 1);
	if (e > 0)
		r->state = INI_IN_SECTION;
	return MIN(e, 0);
}

static int take_assignment(struct ini_reader *r, char *line)
{
	char *value = strchr(line, '='), *end = value;

	if (!value) {
		ini_warn(r, "expected Key=value");
		return 0;
	}
	*value++ = 0;
	while (is_blank(*value))
		value++;
	while (end > line && is_blank(end[-1]))
		*--end = 0;
	if (r->state == INI_IN_SECTION)
		return r->assignment(r, line, value);
	if (r->state == INI_NO_SECTION)
		ini_warn(r, "%s= before any section", line);
	return 0;
}

static int take_line(struct ini_reader *r, char *line, size_t len)
{
	while (len > 0 && is_blank(line[len - 1]))
		len--;
	while (len > 0 && is_blank(*line)) {
		line++;
		len--;
	}
	line[len] = 0;
	if (len == 0)
		return 0;
	if (memchr(line, 0, len)) {
		ini_warn(r, "a line with a NUL byte");
		return 0;
	}
	if (!utf8_valid(line, len)) {
		ini_warn(r, "a line that is not UTF-8");
		return 0;
	}
	return *line == '[' ? take_section(r, line, len) : take_assignment(r, line);
}

static bool is_comment(const char *line, size_t len)
{
	size_t i = 0;

	while (i < len && is_blank(line[i]))
		i++;
	return i < len && (line[i] == '#' || line[i] == ';');
}

static int take_joined(struct ini_reader *r, char *line, size_t len, bool too_long)
{
	if (!too_long)
		return take_line(r, line, len);
	ini_warn(r, "a line longer than %d bytes", INI_LINE_BYTES_MAX);
	return 0;
}

/* A line that ends in a backslash goes on in the next; comments may stand between the two. */
static int take_lines(struct ini_reader *r, const char *data, size_t len)
{
	char joined[INI_LINE_BYTES_MAX + 1];
	const char *end = data + len, *next;
	size_t n_joined = 0;
	unsigned line = 1;
	bool more = false, too_long = false;
	int e = 0;

	for (; data < end && e == 0; data = next, line++) {
		const char *newline = memchr(data, '\n', (size_t)(end - data));
		size_t n = (size_t)((newline ? newline : end) - data);

		next = newline ? newline + 1 : end;
		if (is_comment(data, n))
			continue;
		if (!more) {
			r->line = line;
			n_joined = 0;
			too_long = false;
		}
		more = n > 0 && data[n - 1] == '\\';
		too_long = too_long || n > INI_LINE_BYTES_MAX - n_joined;
		if (!too_long) {
			memcpy(joined + n_joined, data, n);
			n_joined += n;
			if (more)
				joined[n_joined - 1] = ' ';
		}
		if (!more)
			e = take_joined(r, joined, n_joined, too_long);
	}
	if (more && e == 0) /* the file ends in a backslash */
		e = take_joined(r, joined, n_joined, too_long);
	return e;
}

int ini_read(struct ini_reader *r, const char *path)
{
	_cleanup_(buf_done) struct buf b = {};
	int e;

	r->path = path;
	r->line = 0;
	r->state = INI_NO_SECTION;
	e = file_read(path, INI_FILE_BYTES_MAX, &b);
	if (e < 0)
		return e;
	return take_lines(r, b.data, b.len);
}

/* The file may be as it should: it is we who cannot read it, or not now. */
static bool cannot_look(int e)
{
	return e == -EMFILE || e == -ENFILE || e == -EIO || e == -EACCES || e == -EPERM;
}

int ini_read_layer(struct ini_reader *r, const char *path)
{
	int e = ini_read(r, path);

	if (e == 0 || e == -ENOENT || e == -ENOMEM || r->line)
		return e;
	ini_warn(r, "%s", strerror(-e));
	return r->strict && cannot_look(e) ? e : 0;
}

void ini_dropins_done(struct ini_dropins *d)
{
	for (size_t i = 0; i < d->n; i++) {
		free(d->items[i].name);
		free(d->items[i].path);
	}
	free(d->items);
	*d = (struct ini_dropins){};
}

/* Unless a directory of higher priority has the name already. */
static int add_file(struct ini_dropins *d, const char *dir, const char *name)
{
	struct ini_dropin *items, new = {};

	for (size_t i = 0; i < d->n; i++)
		if (streq(d->items[i].name, name))
			return 0;
	items = reallocarray(d->items, d->n + 1, sizeof(*items));
	if (!items)
		return -ENOMEM;
	d->items = items;
	new.name = strdup(name);
	if (!new.name)
		return -ENOMEM;
	if (asprintf(&new.path, "%s/%s", dir, name) < 0) {
		free(new.name);
		return -ENOMEM;
	}
	d->items[d->n++] = new;
	return 0;
}

static int compare_names(const void *a, const void *b)
{
	return strcmp(((const struct ini_dropin *)a)->name, ((const struct ini_dropin *)b)->name);
}

int ini_dropins_add(struct ini_dropins *d, const char *dir, struct buf *warnings)
{
	DIR *stream = opendir(dir);
	struct dirent *entry;
	int r = 0;

	if (!stream && errno != ENOENT) {
		r = -errno;
		ini_warn(&(struct ini_reader){ .path = dir, .warnings = warnings }, "%s", strerror(-r));
		return d->strict && cannot_look(r) ? r : 0;
	}
	if (!stream)
		return 0;
	while (r == 0 && (entry = readdir(stream))) {
		size_t n = strlen(entry->d_name);

		if (entry->d_name[0] != '.' && n > 5 && streq(entry->d_name + n - 5, ".conf"))
			r = add_file(d, dir, entry->d_name);
	}
	closedir(stream);
	if (d->n > 0) /* qsort() wants no NULL */
		qsort(d->items, d->n, sizeof(*d->items), compare_names);
	return r;
}

int ini_dropins_add_layers(struct ini_dropins *d, const char *root, const char *name, struct buf *warnings)
{
	static const char *const dirs[] = { "/etc", "/run", "/usr/lib" }; /* highest first */

	for (size_t i = 0; i < ARRAY_SIZE(dirs); i++) {
		_cleanup_(freep) char *dir = NULL;
		int r;

		if (asprintf(&dir, "%s%s/residentd/%s", root, dirs[i], name) < 0) {
			dir = NULL;
			return -ENOMEM;
		}
		r = ini_dropins_add(d, dir, warnings);
		if (r < 0)
			return r;
	}
	return 0;
}
