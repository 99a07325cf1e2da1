/* SPDX-License-Identifier: MIT */
/* test-log.c: what reaches standard error, read back through a pipe that stands in its place. */
#include "tests/test.h"

#include "daemon/log.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

static int saved_stderr, reader;

static int begin(void **state)
{
	int fds[2];

	(void)state;
	if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) < 0)
		return -1;
	saved_stderr = dup(STDERR_FILENO);
	dup2(fds[1], STDERR_FILENO);
	close(fds[1]);
	reader = fds[0];
	unsetenv("JOURNAL_STREAM");
	log_open("prog", LOG_INFO);
	return 0;
}

static int end(void **state)
{
	(void)state;
	dup2(saved_stderr, STDERR_FILENO);
	close(saved_stderr);
	close(reader);
	return 0;
}

/* What was written since the last call. */
static const char *output(void)
{
	static char text[65536];
	ssize_t n = read(reader, text, sizeof(text) - 1);

	text[n > 0 ? n : 0] = 0;
	return text;
}

static void writes_one_line(void **state)
{
	(void)state;
	log_info("%s %d", "loaded", 7);
	assert_string_equal(output(), "prog: loaded 7\n");
	log_line(LOG_ERR, "%s", "");
	assert_string_equal(output(), "prog: \n");
	log_fields(LOG_NOTICE, (const char *const[]){ "MODEL=x", NULL }, "n");
	assert_string_equal(output(), "prog: n\n");
}

static void levels_are_obeyed(void **state)
{
	(void)state;
	log_debug("no");
	assert_string_equal(output(), "");
	log_set_level(LOG_DEBUG);
	log_debug("yes");
	assert_string_equal(output(), "prog: yes\n");
	log_set_level(LOG_ERR);
	log_warning("no");
	log_fields(LOG_WARNING, NULL, "no");
	assert_string_equal(output(), "");
	log_error("yes");
	assert_string_equal(output(), "prog: yes\n");
}

/* No second line can be forged and no terminal be driven by the name of a tensor. */
static void control_characters_are_escaped(void **state)
{
	(void)state;
	log_info("a\nprog: b\r\t\x1b[31m\x7f");
	assert_string_equal(output(), "prog: a\\x0aprog: b\\x0d\\x09\\x1b[31m\\x7f\n");
	log_info("\xc2\x9b"
		 "2J \xc2\x80\xc2\x9f \xc2\xa0 \xc3\xa9 \xc2");
	assert_string_equal(output(), "prog: \\x9b2J \\x80\\x9f \xc2\xa0 \xc3\xa9 \xc2\n");
}

static void long_messages_are_cut(void **state)
{
	const char *text;

	(void)state;
	log_info("%0*d", 100000, 0);
	text = output();
	assert_int_equal(strlen(text), strlen("prog: ") + 2047 + 1);
	assert_int_equal(text[strlen(text) - 1], '\n');
	log_info("%s", (char[3000]){ [0 ... 2998] = '\n' });
	assert_int_equal(strlen(output()), strlen("prog: ") + 4 * 2047 + 1);
}

static void errno_is_kept(void **state)
{
	(void)state;
	errno = EXDEV;
	log_error("x");
	assert_int_equal(errno, EXDEV);
	close(STDERR_FILENO);
	errno = EXDEV;
	log_error("lost");
	assert_int_equal(errno, EXDEV);
}

/* Lines go to the journal only when standard error is the very stream that systemd made. */
static void journal_stream_is_compared(void **state)
{
	char value[64];
	struct stat st;

	(void)state;
	assert_int_equal(fstat(STDERR_FILENO, &st), 0);
	snprintf(value, sizeof(value), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino + 1);
	setenv("JOURNAL_STREAM", value, 1);
	log_open("prog", LOG_INFO);
	log_info("here");
	assert_string_equal(output(), "prog: here\n");

	setenv("JOURNAL_STREAM", "no numbers", 1);
	log_open("prog", LOG_INFO);
	log_info("here");
	assert_string_equal(output(), "prog: here\n");

	snprintf(value, sizeof(value), "%ju:%ju", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino);
	setenv("JOURNAL_STREAM", value, 1);
	log_open("residentd-test", LOG_INFO);
	log_fields(LOG_DEBUG + 1, NULL, "filtered");
	log_fields(LOG_INFO, (const char *const[]){ "RESIDENTD_TEST=1", NULL }, "a test of residentd");
	assert_string_equal(output(), ""); /* in the journal, where there is one */
}

static void *hundred_lines(void *arg)
{
	for (int i = 0; i < 100; i++)
		log_info("%s", (const char *)arg);
	return NULL;
}

static void threads_do_not_mix_lines(void **state)
{
	static const char a[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
			  b[] = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
	unsigned n_a = 0, n_b = 0;
	pthread_t threads[2];
	const char *text;

	(void)state;
	assert_int_equal(pthread_create(&threads[0], NULL, hundred_lines, (void *)a), 0);
	assert_int_equal(pthread_create(&threads[1], NULL, hundred_lines, (void *)b), 0);
	pthread_join(threads[0], NULL);
	pthread_join(threads[1], NULL);
	text = output();
	assert_int_equal(strlen(text), 200 * (6 + 32 + 1));
	for (; *text; text += 6 + 32 + 1) {
		assert_memory_equal(text, "prog: ", 6);
		assert_int_equal(text[6 + 32], '\n');
		if (memcmp(text + 6, a, 32) == 0)
			n_a++;
		else if (memcmp(text + 6, b, 32) == 0)
			n_b++;
	}
	assert_int_equal(n_a, 100);
	assert_int_equal(n_b, 100);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(writes_one_line, begin, end),
		cmocka_unit_test_setup_teardown(levels_are_obeyed, begin, end),
		cmocka_unit_test_setup_teardown(control_characters_are_escaped, begin, end),
		cmocka_unit_test_setup_teardown(long_messages_are_cut, begin, end),
		cmocka_unit_test_setup_teardown(errno_is_kept, begin, end),
		cmocka_unit_test_setup_teardown(journal_stream_is_compared, begin, end),
		cmocka_unit_test_setup_teardown(threads_do_not_mix_lines, begin, end),
	};

	return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
