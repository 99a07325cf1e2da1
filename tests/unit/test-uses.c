/* SPDX-License-Identifier: MIT */
/* test-uses.c: models.d from a temporary root: layers, bad lines, and what serves what. */
#include "tests/test.h"

#include "daemon/uses.h"

#include <sys/stat.h>

static char root[] = "/tmp/test-uses-XXXXXX";

static void put(const char *path, const char *text)
{
	char full[512], *slash;
	FILE *f;

	snprintf(full, sizeof(full), "%s/%s", root, path);
	for (slash = full + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
		*slash = 0;
		(void)mkdir(full, 0755);
		*slash = '/';
	}
	f = fopen(full, "we");
	assert_non_null(f);
	fputs(text, f);
	fclose(f);
}

static void test_names(void **state)
{
	(void)state;
	assert_int_equal(use_from_string("chat"), USE_CHAT);
	assert_int_equal(use_from_string("best"), USE_BEST);
	assert_int_equal(use_from_string("Chat"), -EINVAL);
	assert_int_equal(use_from_string(""), -EINVAL);
}

static void test_nothing_there(void **state)
{
	struct uses u;

	(void)state;
	assert_int_equal(uses_read("/nowhere/at/all", &u, NULL), 0);
	assert_true(uses_match(&u, USE_CODE, "anything"));
	uses_done(&u);
}

static void test_layers(void **state)
{
	struct uses u;
	struct buf warnings = {};

	(void)state;
	assert_non_null(mkdtemp(root));
	put("usr/lib/residentd/models.d/10-a.conf",
	    "[code]\nModels=Qwen*Coder* Deep?eek\n[chat]\nModels=Llama*\n");
	put("etc/residentd/models.d/20-b.conf",
	    "[chat]\nModels=\n[sing]\nModels=x\n[small]\nModel=y\n[best]\nModels=Big\n");
	assert_int_equal(uses_read(root, &u, &warnings), 0);
	assert_true(uses_match(&u, USE_CODE, "Qwen3 Coder 30B"));
	assert_true(uses_match(&u, USE_CODE, "DeepSeek"));
	assert_false(uses_match(&u, USE_CODE, "Llama"));
	/* An empty value takes back what a lower layer said. */
	assert_true(uses_match(&u, USE_CHAT, "anything"));
	assert_true(uses_match(&u, USE_SMALL, "anything"));
	assert_true(uses_match(&u, USE_BEST, "Big"));
	assert_false(uses_match(&u, USE_BEST, "Bigger"));
	assert_non_null(strstr(warnings.data, "20-b.conf:3: [sing]"));
	assert_non_null(strstr(warnings.data, "20-b.conf:6: Model="));
	buf_done(&warnings);
	uses_done(&u);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_names),
		cmocka_unit_test(test_nothing_there),
		cmocka_unit_test(test_layers),
	};

	return cmocka_run_group_tests_name("uses", tests, NULL, NULL);
}
