/* SPDX-License-Identifier: MIT */
/* test-errors.c: the table of errors agrees with itself and with policy/org.residentd.varlink. */
#include "tests/test.h"

#include "daemon/errors.h"

static void numbers_never_change(void **state)
{
	static const char *const names[] = {
		"",
		"NoModel",
		"Loading",
		"ModelBroken",
		"NotSupported",
		"InvalidRequest",
		"TooLarge",
		"NoSuchSession",
		"SessionBusy",
		"TooManySessions",
		"QueueFull",
		"ContextFull",
		"NoMemory",
		"NotAuthorized",
		"Cancelled",
		"Stopping",
		"Internal",
		"QuotaExceeded",
		"NoSuchModel",
	};
	char varlink[64], dbus[64];

	(void)state;
	assert_int_equal(ARRAY_SIZE(names), ERROR_CODE_MAX);
	for (int i = 1; i < ERROR_CODE_MAX; i++) {
		const struct error_entry *e = error_by_code((enum error_code)i);

		snprintf(varlink, sizeof(varlink), "org.residentd.Inference.%s", names[i]);
		snprintf(dbus, sizeof(dbus), "org.residentd1.Error.%s", names[i]);
		assert_int_equal(e->code, i);
		assert_string_equal(e->varlink, varlink);
		assert_string_equal(e->dbus, dbus);
		assert_true(e->text[0]);
		assert_true(e->err > 0);
		assert_ptr_equal(error_by_varlink(varlink), e);
		assert_int_equal(error_from_errno(e->err), i);
		assert_int_equal(error_from_errno(-e->err), i);
		for (int j = 1; j < i; j++)
			assert_int_not_equal(error_by_code((enum error_code)j)->err, e->err);
	}
}

static void unknown_is_internal(void **state)
{
	(void)state;
	assert_int_equal(error_by_code(ERROR_NONE)->code, ERROR_INTERNAL);
	assert_int_equal(error_by_code(ERROR_CODE_MAX)->code, ERROR_INTERNAL);
	assert_int_equal(error_by_code((enum error_code)(-1))->code, ERROR_INTERNAL);
	assert_int_equal(error_by_code((enum error_code)INT32_MAX)->code, ERROR_INTERNAL);
	assert_null(error_by_varlink(""));
	assert_null(error_by_varlink("NoModel"));
	assert_null(error_by_varlink("org.residentd.Inference.NoModelX"));
	assert_null(error_by_varlink("org.varlink.service.InvalidParameter"));
	assert_int_equal(error_from_errno(0), ERROR_NONE);
	assert_int_equal(error_from_errno(-EPIPE), ERROR_INTERNAL);
	assert_int_equal(error_from_errno(INT32_MIN), ERROR_INTERNAL);
	assert_int_equal(error_from_errno(INT32_MAX), ERROR_INTERNAL);
}

static void what_modules_return(void **state)
{
	(void)state;
	assert_int_equal(error_from_errno(-ENOSPC), ERROR_NO_MEMORY); /* kv.h, graph.h */
	assert_int_equal(error_from_errno(-ENOMEM), ERROR_NO_MEMORY);
	assert_int_equal(error_from_errno(-ECANCELED), ERROR_CANCELLED);
	assert_int_equal(error_from_errno(-EINVAL), ERROR_INVALID_REQUEST);
	assert_int_equal(error_from_errno(-ERANGE), ERROR_INVALID_REQUEST);
	assert_int_equal(error_from_errno(-EMSGSIZE), ERROR_TOO_LARGE);
	assert_int_equal(error_from_errno(-EBADMSG), ERROR_MODEL_BROKEN);
	assert_int_equal(error_from_errno(-EOPNOTSUPP), ERROR_NOT_SUPPORTED);
	assert_int_equal(error_from_errno(-EPERM), ERROR_NOT_AUTHORIZED);
}

/* Retrying what cannot change by itself would only make load. */
static void hints_only_where_waiting_helps(void **state)
{
	static const enum error_code helps[] = { ERROR_LOADING,           ERROR_SESSION_BUSY,
						 ERROR_TOO_MANY_SESSIONS, ERROR_QUEUE_FULL,
						 ERROR_NO_MEMORY,         ERROR_STOPPING };
	size_t n = 0;

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(helps); i++)
		assert_true(error_by_code(helps[i])->retry_after_ms > 0);
	for (int i = 1; i < ERROR_CODE_MAX; i++)
		n += error_by_code((enum error_code)i)->retry_after_ms > 0 ? 1 : 0;
	assert_int_equal(n, ARRAY_SIZE(helps));
}

static void names_are_those_of_the_interface(void **state)
{
	_cleanup_(fclosep) FILE *f = fopen("policy/org.residentd.varlink", "re");
	char line[512], name[64], full[128];
	unsigned n = 0;

	(void)state;
	assert_non_null(f);
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "error %63[A-Za-z] (number: int, message: string,", name) != 1)
			continue;
		snprintf(full, sizeof(full), "org.residentd.Inference.%s", name);
		assert_non_null(error_by_varlink(full));
		n++;
	}
	assert_int_equal(n, ERROR_CODE_MAX - 1);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(numbers_never_change),
		cmocka_unit_test(unknown_is_internal),
		cmocka_unit_test(what_modules_return),
		cmocka_unit_test(hints_only_where_waiting_helps),
		cmocka_unit_test(names_are_those_of_the_interface),
	};

	return cmocka_run_group_tests_name("errors", tests, NULL, NULL);
}
