/* SPDX-License-Identifier: MIT */
/*
 * transcript.c: turns in memory and on disk. See transcript.h.
 */
#include "client/transcript.h"

#include <fcntl.h>
#include <jansson.h>
#include <pwd.h>
#include <sys/stat.h>

#define FILE_BYTES_MAX (256u << 20)
#define FILE_NAME      "last.json"

void transcript_cut(struct transcript *t, size_t n)
{
	while (t->n > n) {
		t->n--;
		free(t->turns[t->n].role);
		free(t->turns[t->n].content);
	}
}

void transcript_done(struct transcript *t)
{
	transcript_cut(t, 0);
	free(t->turns);
	*t = (struct transcript){};
}

int transcript_add(struct transcript *t, const char *role, const char *content)
{
	struct turn turn, *p;
	size_t alloc, bytes;

	if (t->n == t->alloc) {
		alloc = t->alloc ? t->alloc * 2 : 16;
		if (!mul_ok(alloc, sizeof(*p), &bytes))
			return -ENOMEM;
		p = realloc(t->turns, bytes);
		if (!p)
			return -ENOMEM;
		t->turns = p;
		t->alloc = alloc;
	}
	turn.role = strdup(role);
	turn.content = strdup(content);
	if (!turn.role || !turn.content) {
		free(turn.role);
		free(turn.content);
		return -ENOMEM;
	}
	t->turns[t->n++] = turn;
	return 0;
}

/* ---- the directory ---- */

/* mkdir -p; what is created is the user's alone. */
static int make_directories(char *path)
{
	for (char *p = path + 1;; p++) {
		char c = *p;

		if (c != '/' && c != 0)
			continue;
		*p = 0;
		if (mkdir(path, 0700) < 0 && errno != EEXIST && errno != EROFS)
			return -errno;
		*p = c;
		if (c == 0)
			return 0;
	}
}

static const char *home_directory(void)
{
	const char *home = getenv("HOME");
	const struct passwd *pw;

	if (home && home[0] == '/')
		return home;
	pw = getpwuid(getuid());
	return pw && pw->pw_dir[0] == '/' ? pw->pw_dir : NULL;
}

int transcript_directory(char **ret)
{
	const char *state = getenv("XDG_STATE_HOME"), *home = home_directory();
	_cleanup_(freep) char *path = NULL;
	int r;

	if (state && state[0] == '/') /* others are to be ignored, says the specification */
		r = asprintf(&path, "%s/resident", state);
	else if (home)
		r = asprintf(&path, "%s/.local/state/resident", home);
	else
		return -ENOENT;
	if (r < 0) {
		path = NULL;
		return -ENOMEM;
	}
	r = make_directories(path);
	if (r == 0)
		*ret = TAKE_PTR(path);
	return r;
}

static int open_directory(int *ret)
{
	_cleanup_(freep) char *path = NULL;
	int fd, r;

	r = transcript_directory(&path);
	if (r < 0)
		return r;
	fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	*ret = fd;
	return 0;
}

/* ---- the file ---- */

static int open_file(int dir, const char *name, int flags, const char *mode, FILE **ret)
{
	int fd = openat(dir, name, flags | O_CLOEXEC | O_NOFOLLOW, 0600);
	FILE *f;
	int r;

	if (fd < 0)
		return -errno;
	f = fdopen(fd, mode);
	if (!f) {
		r = -errno;
		close(fd);
		return r;
	}
	*ret = f;
	return 0;
}

static int read_u64(json_t *root, const char *key, uint64_t *ret)
{
	json_t *v = json_object_get(root, key);

	if (!json_is_integer(v) || json_integer_value(v) < 0)
		return -EBADMSG;
	*ret = (uint64_t)json_integer_value(v);
	return 0;
}

static int read_turns(struct transcript *t, json_t *root)
{
	json_t *turns = json_object_get(root, "turns"), *item;
	const char *session = json_string_value(json_object_get(root, "session"));
	size_t i;
	int r;

	if (!json_is_array(turns))
		return -EBADMSG;
	json_array_foreach(turns, i, item) {
		const char *role = json_string_value(json_object_get(item, "role"));
		const char *content = json_string_value(json_object_get(item, "content"));

		if (!role || !content)
			return -EBADMSG;
		r = transcript_add(t, role, content);
		if (r < 0)
			return r;
	}
	if (session && strlen(session) < sizeof(t->session))
		snprintf(t->session, sizeof(t->session), "%s", session);
	return read_u64(root, "context_used", &t->context_used);
}

int transcript_load(struct transcript *t)
{
	_cleanup_(closep) int dir = -1;
	_cleanup_(fclosep) FILE *f = NULL;
	struct transcript loaded = {};
	json_auto_t *root = NULL;
	struct stat st;
	int r;

	r = open_directory(&dir);
	if (r < 0)
		return r;
	r = open_file(dir, FILE_NAME, O_RDONLY | O_NONBLOCK, "r", &f);
	if (r < 0)
		return r;
	if (fstat(fileno(f), &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode) || st.st_size > FILE_BYTES_MAX)
		return -EBADMSG;
	root = json_loadf(f, JSON_REJECT_DUPLICATES, NULL);
	if (!root)
		return -EBADMSG;
	r = read_turns(&loaded, root);
	if (r < 0) {
		transcript_done(&loaded);
		return r;
	}
	transcript_done(t);
	*t = loaded;
	return 0;
}

static json_t *to_json(const struct transcript *t)
{
	json_t *turns = json_array();

	for (size_t i = 0; i < t->n; i++)
		if (json_array_append_new(turns, json_pack("{s:s, s:s}", "role", t->turns[i].role,
							   "content", t->turns[i].content)) < 0) {
			json_decref(turns);
			return NULL;
		}
	return json_pack("{s:s, s:I, s:o}", "session", t->session, "context_used",
			 (json_int_t)t->context_used, "turns", turns);
}

/* The whole file under a name of its own, on disk before it takes the place of the old one. */
static int write_file(int dir, json_t *root)
{
	_cleanup_(fclosep) FILE *f = NULL;
	char name[64];
	int r;

	snprintf(name, sizeof(name), "." FILE_NAME ".%ld", (long)getpid());
	unlinkat(dir, name, 0); /* of a process of the same number that died */
	r = open_file(dir, name, O_WRONLY | O_CREAT | O_EXCL, "w", &f);
	if (r < 0)
		return r;
	errno = EIO; /* json_dumpf() leaves it to stdio, which need not set it */
	if (json_dumpf(root, f, JSON_COMPACT) < 0 || fflush(f) != 0 || fsync(fileno(f)) < 0 ||
	    renameat(dir, name, dir, FILE_NAME) < 0) {
		r = -errno;
		unlinkat(dir, name, 0);
	}
	return r;
}

int transcript_save(const struct transcript *t)
{
	_cleanup_(closep) int dir = -1;
	json_auto_t *root = to_json(t);
	int r;

	if (!root)
		return -ENOMEM;
	r = open_directory(&dir);
	return r < 0 ? r : write_file(dir, root);
}

int transcript_forget(void)
{
	_cleanup_(closep) int dir = -1;
	int r;

	r = open_directory(&dir);
	if (r < 0)
		return r;
	return unlinkat(dir, FILE_NAME, 0) < 0 && errno != ENOENT ? -errno : 0;
}
