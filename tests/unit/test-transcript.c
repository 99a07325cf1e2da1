/* SPDX-License-Identifier: MIT */
/*
 * test-transcript.c: the saved conversation: what is written is read back, only the user can read
 * it, and what is no transcript is refused.
 */
#include "tests/test.h"

#include "client/transcript.c"

static char home[] = "/tmp/test-transcript.XXXXXX";

static void in_home(const char *name, char path[200])
{
	snprintf(path, 200, "%s%s", home, name);
}

static int set_up(void **state)
{
	(void)state;
	if (!mkdtemp(home))
		return -1;
	setenv("HOME", home, 1);
	return unsetenv("XDG_STATE_HOME");
}

static int tear_down(void **state)
{
	static const char *const names[] = {
		"/.local/state/resident", "/.local/state", "/.local", "/x/resident", "/x", ""
	};
	char path[200];

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		in_home(names[i], path);
		if (rmdir(path) < 0)
			return -1; /* something was left behind */
	}
	return 0;
}

static unsigned int mode_of(const char *name)
{
	struct stat st;
	char path[200];

	in_home(name, path);
	assert_int_equal(stat(path, &st), 0);
	return st.st_mode & 07777;
}

static void round_trip(void **state)
{
	struct transcript t = {}, u = {};

	(void)state;
	umask(0);
	assert_int_equal(transcript_load(&u), -ENOENT);
	assert_int_equal(transcript_add(&t, "user", "a \"b\"\n\xc3\xbc\033"), 0);
	for (int i = 0; i < 40; i++)
		assert_int_equal(transcript_add(&t, "assistant", ""), 0);
	snprintf(t.session, sizeof(t.session), "s1");
	t.context_used = 77;
	assert_int_equal(transcript_save(&t), 0);
	assert_int_equal(transcript_save(&t), 0); /* over the old one */
	assert_int_equal(mode_of("/.local/state/resident"), 0700);
	assert_int_equal(mode_of("/.local/state/resident/last.json"), 0600);

	assert_int_equal(transcript_load(&u), 0);
	assert_int_equal(transcript_load(&u), 0); /* replaces what was there */
	assert_int_equal(u.n, 41);
	assert_string_equal(u.turns[0].content, t.turns[0].content);
	assert_string_equal(u.turns[40].role, "assistant");
	assert_string_equal(u.session, "s1");
	assert_int_equal(u.context_used, 77);
	transcript_cut(&u, 1);
	assert_int_equal(u.n, 1);
	transcript_done(&t);
	transcript_done(&u);

	assert_int_equal(transcript_forget(), 0);
	assert_int_equal(transcript_forget(), 0);
	assert_int_equal(transcript_load(&u), -ENOENT);
}

static void refused(void **state)
{
	static const char *const texts[] = {
		"",
		"[]",
		"{",
		"{}",
		"{\"turns\":{},\"session\":\"\",\"context_used\":0}",
		"{\"turns\":[1],\"session\":\"\",\"context_used\":0}",
		"{\"turns\":[{\"role\":\"user\"}],\"session\":\"\",\"context_used\":0}",
		"{\"turns\":[],\"session\":\"\",\"context_used\":-1}",
		"{\"turns\":[],\"session\":\"\"}",
	};
	struct transcript t = {};
	char path[200];

	(void)state;
	assert_int_equal(transcript_save(&t), 0);
	in_home("/.local/state/resident/last.json", path);
	assert_int_equal(transcript_add(&t, "user", "kept"), 0);
	for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
		FILE *f = fopen(path, "w");

		assert_non_null(f);
		fputs(texts[i], f);
		fclose(f);
		assert_int_equal(transcript_load(&t), -EBADMSG);
		assert_string_equal(t.turns[0].content, "kept"); /* untouched */
	}
	unlink(path);
	assert_int_equal(symlink("/dev/zero", path), 0); /* not followed */
	assert_int_equal(transcript_load(&t), -ELOOP);
	unlink(path);
	assert_int_equal(mkdir(path, 0700), 0);
	assert_int_equal(transcript_load(&t), -EBADMSG);
	assert_int_equal(transcript_save(&t), -EISDIR);
	rmdir(path);
	transcript_done(&t);
}

static void directories(void **state)
{
	_cleanup_(freep) char *path = NULL;
	char expected[200], state_home[200];

	(void)state;
	in_home("/x", state_home);
	in_home("/x/resident", expected);
	setenv("XDG_STATE_HOME", state_home, 1);
	assert_int_equal(transcript_directory(&path), 0);
	assert_string_equal(path, expected);
	setenv("XDG_STATE_HOME", "relative", 1); /* to be ignored */
	free(TAKE_PTR(path));
	in_home("/.local/state/resident", expected);
	assert_int_equal(transcript_directory(&path), 0);
	assert_string_equal(path, expected);
	unsetenv("XDG_STATE_HOME");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(round_trip),
		cmocka_unit_test(refused),
		cmocka_unit_test(directories),
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
