/* SPDX-License-Identifier: MIT */
/*
 * The parts of an import that need no socket: names, records, the directory, staging, messages. The
 * whole of it, as a program, is in tests/sys/test-import.py.
 */
#include "tests/test.h"

#include "daemon/errors.h"
#include "daemon/import/describe.h"
#include "daemon/import/library.h"
#include "daemon/import/message.h"
#include "daemon/import/staging.h"
#include "tests/unit/gguf-build.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>

#define MODEL "tests/models/tiny-qwen35moe-stories-q8_0.gguf"

/* ---- names ---- */

static void test_clean_name(void **state)
{
	static const struct {
		const char *from, *to;
	} cases[] = {
		{ "Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B" },
		{ "Tiny Qwen35MoE stories", "Tiny-Qwen35MoE-stories" },
		{ "a  /  b", "a-b" },
		{ "../../etc/passwd", "etc-passwd" },
		{ "..", "" },
		{ "--default", "default" },
		{ ".-.x.-.", "x" },
		{ "a\nb\033[1m", "a-b-1m" },
		{ "caf\303\251 au lait", "caf-au-lait" },
		{ "", "" },
		{ "a_b+c.d", "a_b+c.d" },
	};
	char name[DESCRIBE_NAME_MAX + 1], many[300];

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		describe_clean_name(cases[i].from, strlen(cases[i].from), name);
		assert_string_equal(name, cases[i].to);
	}
	memset(many, 'x', sizeof(many));
	describe_clean_name(many, sizeof(many), name);
	assert_int_equal(strlen(name), DESCRIBE_NAME_MAX);
	for (size_t i = 0; i < sizeof(many); i++) /* gaps at every place, also at the last one */
		many[i] = i % 2 == 0 ? 'x' : ' ';
	for (size_t n = 190; n < 210; n++) {
		describe_clean_name(many, n, name);
		assert_true(strlen(name) <= DESCRIBE_NAME_MAX && name[strlen(name) - 1] == 'x');
	}
	describe_clean_name("a\0b", 3, name);
	assert_string_equal(name, "a-b");
}

static void test_split_name(void **state)
{
	static const char *const not_split[] = {
		"",
		"a.gguf",
		"-00001-of-00002.gguf",
		"a-0001-of-00002.gguf",
		"a-00001-of-00002.ggux",
		"a-0000x-of-00002.gguf",
		"a-00001-of- 0002.gguf",
		"a_00001-of-00002.gguf",
	};
	unsigned no = 7, count = 7;
	size_t len = 7;

	(void)state;
	assert_true(describe_split_name("m-1-00002-of-00013.gguf", &len, &no, &count));
	assert_int_equal(len, 3);
	assert_int_equal(no, 2);
	assert_int_equal(count, 13);
	for (size_t i = 0; i < ARRAY_SIZE(not_split); i++)
		assert_false(describe_split_name(not_split[i], &len, &no, &count));
	assert_int_equal(len, 3);
}

/* 64 numbers of F32, 64 of Q8_0 times `rows`. */
static struct gguf *build(struct gguf_build *b, size_t rows, void **ret_data)
{
	static const char zero[64 * 68];
	const uint64_t one[] = { 64 }, two[] = { 64, rows };
	struct gguf *g = NULL;
	char *error = NULL;
	size_t bytes;

	gguf_build_tensor(b, "norm", QUANT_F32, 1, one, zero, 64 * 4);
	if (rows > 0)
		gguf_build_tensor(b, "w", QUANT_Q8_0, 2, two, zero, rows * 68);
	*ret_data = gguf_build_done(b, &bytes);
	if (gguf_open_memory(*ret_data, bytes, "test", &g, &error) < 0)
		fail_msg("%s", error);
	return g;
}

static void test_name(void **state)
{
	static const struct {
		const char *title, *wanted, *file;
		size_t rows;
		const char *name;
	} cases[] = {
		{ "Some Model", NULL, "x.gguf", 64, "Some-Model-Q8_0" },
		{ "Some Model", NULL, "x.gguf", 0, "Some-Model-F32" },
		{ "Some Model q8_0", NULL, "x.gguf", 64, "Some-Model-q8_0" },
		{ "Some Model", "mine", "x.gguf", 64, "mine" },
		{ "Some Model", "//", "x.gguf", 64, "Some-Model-Q8_0" },
		{ NULL, NULL, "My-Q8_0.gguf", 64, "My-Q8_0" },
		{ NULL, NULL, "big-00001-of-00009.gguf", 64, "big-Q8_0" },
		{ "..", NULL, "\303\251", 64, "model-Q8_0" },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct gguf_build b = gguf_build_new();
		_cleanup_(gguf_closep) struct gguf *g = NULL;
		_cleanup_(freep) void *data = NULL;
		char name[DESCRIBE_NAME_MAX + 1];

		if (cases[i].title)
			gguf_build_str(&b, "general.name", cases[i].title);
		g = build(&b, cases[i].rows, &data);
		describe_name(g, cases[i].wanted, cases[i].file, name);
		assert_string_equal(name, cases[i].name);
	}
}

static void assert_text(json_t *o, const char *key, const char *text)
{
	const char *s = json_string_value(json_object_get(o, key));

	if (!text)
		assert_null(s);
	else if (!s)
		fail_msg("no %s", key);
	else
		assert_string_equal(s, text);
}

static void test_record(void **state)
{
	struct gguf_build b = gguf_build_new();
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(freep) void *data = NULL;
	json_auto_t *o = NULL;
	char *large = malloc(2000);

	(void)state;
	assert_non_null(large);
	memset(large, 'x', 1999);
	large[1999] = 0;
	gguf_build_str(&b, "general.architecture", "fam");
	gguf_build_str(&b, "general.name", "T");
	gguf_build_str(&b, "general.license", "apache-2.0");
	gguf_build_str(&b, "general.license.name", "Apache");
	gguf_build_str(&b, "general.url", "later");
	gguf_build_str(&b, "general.source.url", "first");
	gguf_build_str(&b, "general.author", "\xff\xfe");
	gguf_build_str(&b, "general.description", large);
	gguf_build_u32(&b, "general.version", 3); /* no text */
	gguf_build_u32(&b, "fam.context_length", 4096);
	free(large);
	g = build(&b, 4, &data);
	o = describe_model(g);
	assert_non_null(o);
	assert_text(o, "title", "T");
	assert_text(o, "license", "apache-2.0");
	assert_text(o, "license_name", "Apache");
	assert_text(o, "source", "first");
	assert_text(o, "author", NULL);
	assert_text(o, "description", NULL);
	assert_text(o, "version", NULL);
	assert_text(o, "quantization", "Q8_0");
	assert_int_equal(json_integer_value(json_object_get(o, "parameters")), 64 + 64 * 4);
	assert_int_equal(json_integer_value(json_object_get(o, "weight_bytes")), 64 * 4 + 68 * 4);
	assert_int_equal(json_integer_value(json_object_get(o, "context_trained")), 4096);
}

/* ---- the directory ---- */

static char *make_directory(void)
{
	char template[] = "/tmp/rd-import-XXXXXX";

	if (!mkdtemp(template))
		fail_msg("mkdtemp: %m");
	return strdup(template);
}

static void remove_directory(const char *path)
{
	_cleanup_(freep) char *command = NULL;

	assert_true(asprintf(&command, "rm -r %s", path) > 0);
	assert_int_equal(system(command), 0);
}

static void put_file(int dir, const char *name, size_t bytes)
{
	_cleanup_(closep) int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
}

static const char *find(const struct library *c, const char *name, int expect)
{
	const struct library_entry *e = NULL;
	_cleanup_(freep) char *error = NULL;

	assert_int_equal(library_find(c, name, &e, &error), expect);
	assert_int_equal(error == NULL, expect == 0);
	return e ? e->file : NULL;
}

static void test_catalog(void **state)
{
	_cleanup_(freep) char *path = make_directory();
	_cleanup_(closep) int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	_cleanup_(library_closep) struct library *c = NULL;
	_cleanup_(freep) char *error = NULL;

	(void)state;
	put_file(dir, "a-0123456789ab.gguf", 10);
	put_file(dir, "a-0123456789ab.json", 1);
	put_file(dir, "b-aaaaaaaaaaaa.gguf", 20);
	put_file(dir, "b-bbbbbbbbbbbb.gguf", 30);
	put_file(dir, "s-cccccccccccc-00001-of-00002.gguf", 1);
	put_file(dir, "s-cccccccccccc-00002-of-00002.gguf", 2);
	put_file(dir, "by-hand.gguf", 5);
	put_file(dir, ".hidden.gguf", 5);
	put_file(dir, "readme.txt", 5);
	assert_int_equal(mkdirat(dir, "folder.gguf", 0755), 0);
	assert_int_equal(symlinkat("/etc/passwd", dir, "link.gguf"), 0);
	assert_false(library_has_default(dir));
	assert_int_equal(symlinkat("nothing.gguf", dir, "default.gguf"), 0);
	assert_false(library_has_default(dir));
	assert_int_equal(library_set_default(dir, path, "a-0123456789ab.gguf", &error), 0);
	assert_true(library_has_default(dir));

	assert_int_equal(library_open(path, &c, &error), 0);
	assert_int_equal(c->n, 5);
	assert_string_equal(find(c, "a", 0), "a-0123456789ab.gguf");
	assert_string_equal(find(c, "0123456789ab", 0), "a-0123456789ab.gguf");
	assert_string_equal(find(c, "a-0123456789ab", 0), "a-0123456789ab.gguf");
	assert_string_equal(find(c, "by-hand", 0), "by-hand.gguf");
	assert_string_equal(find(c, "s", 0), "s-cccccccccccc-00001-of-00002.gguf");
	find(c, "b", -ENOTUNIQ);
	find(c, "by", -ENOENT);
	find(c, "default", -ENOENT);
	find(c, "link.gguf", -ENOENT);
	find(c, "../a", -ENOENT);
	find(c, "", -ENOENT);
	for (size_t i = 0; i < c->n; i++) {
		assert_int_equal(c->entries[i].is_default, i == 0);
		assert_int_equal(c->entries[i].n_parts, i == 4 ? 2 : 1);
	}
	assert_int_equal(c->entries[4].bytes, 3);
	assert_ptr_equal(library_find_content(c, "bbbbbbbbbbbb", 30), &c->entries[2]);
	assert_null(library_find_content(c, "bbbbbbbbbbbb", 31));
	assert_ptr_equal(library_find_content(c, "cccccccccccc", 3), &c->entries[4]);
	assert_null(library_info(c, &c->entries[1])); /* no record, no model */

	assert_int_equal(library_remove(c, &c->entries[4], false, &error), 0);
	assert_int_equal(faccessat(dir, "s-cccccccccccc-00002-of-00002.gguf", F_OK, 0), -1);
	assert_int_equal(library_remove(c, &c->entries[0], false, NULL), -EBUSY);
	assert_int_equal(library_remove(c, &c->entries[0], true, &error), 0);
	assert_int_equal(faccessat(dir, "default.gguf", F_OK, AT_SYMLINK_NOFOLLOW), -1);
	assert_int_equal(faccessat(dir, "a-0123456789ab.json", F_OK, 0), -1);
	assert_int_equal(library_remove(c, &c->entries[0], true, NULL), -ENOENT);

	put_file(dir, "default.gguf", 3);
	assert_int_equal(library_set_default(dir, path, "by-hand.gguf", NULL), -EEXIST);
	assert_int_equal(faccessat(dir, "default.gguf", F_OK, 0), 0);
	remove_directory(path);
	library_close(TAKE_PTR(c));
	assert_int_equal(library_open(path, &c, &error), -ENOENT);
	assert_non_null(strstr(error, path));
}

static void test_staging(void **state)
{
	_cleanup_(freep) char *path = make_directory();
	_cleanup_(closep) int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	_cleanup_(staging_freep) struct staging *a = NULL, *b = NULL;
	struct stat st;

	(void)state;
	assert_int_equal(mkdirat(dir, ".import-dead", 0700), 0);
	put_file(dir, ".import-dead/left", 100);
	put_file(dir, ".import-file", 1); /* not ours: no directory */
	assert_int_equal(staging_new(dir, path, &a, NULL), 0);
	assert_int_equal(faccessat(dir, ".import-dead", F_OK, 0), -1);
	put_file(a->fd, "mine", 1);
	assert_int_equal(fstat(a->fd, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0700);
	assert_int_equal(staging_new(dir, path, &b, NULL), 0);
	assert_int_equal(faccessat(a->fd, "mine", F_OK, 0), 0);
	staging_free(TAKE_PTR(a));
	staging_free(TAKE_PTR(b));
	assert_int_equal(fstat(dir, &st), 0);
	assert_int_equal(unlinkat(dir, ".import-file", 0), 0);
	assert_int_equal(rmdir(path), 0); /* and so nothing was left */
	assert_int_equal(staging_new(dir, path, &a, NULL), -ENOENT);
}

/* A cancelled import, seen from inside: at every place where it asks. */
struct countdown {
	int left;
	unsigned events;
};

static bool count_down(void *userdata)
{
	struct countdown *c = userdata;

	return c->left-- <= 0;
}

static void count_event(void *userdata, const struct import_event *e)
{
	struct countdown *c = userdata;

	c->events |= 1u << e->kind;
}

static void test_import(void **state)
{
	_cleanup_(freep) char *path = make_directory();
	_cleanup_(closep) int fd = open(MODEL, O_RDONLY | O_CLOEXEC);
	struct import_part part = { .fd = fd, .name = "m.gguf" };
	struct countdown left = {};
	struct import_job j = { .directory = path,
				.parts = &part,
				.n_parts = 1,
				.event = count_event,
				.cancelled = count_down,
				.userdata = &left };
	struct import_result result = { .bytes = 7 };
	_cleanup_(freep) char *error = NULL, *other = NULL;

	(void)state;
	assert_true(fd >= 0);
	assert_int_equal(lseek(fd, 1000, SEEK_SET), 1000);
	assert_int_equal(import_add(&j, &result, &error), -ECANCELED);
	assert_string_equal(error, "cancelled");
	assert_int_equal(result.bytes, 7);
	assert_int_equal(rmdir(path), 0); /* nothing in it */

	left = (struct countdown){ .left = 1000 };
	assert_int_equal(import_add(&j, &result, NULL), 0); /* makes the directory again */
	assert_true(result.is_default && !result.existed);
	assert_true(left.events & 1u << IMPORT_SPACE);
	assert_false(left.events & 1u << IMPORT_WARNING);
	assert_memory_equal(strrchr(result.file, '-') + 1, result.sha256, 12);
	import_result_done(&result);
	assert_int_equal(lseek(fd, 0, SEEK_CUR), 1000);

	/* A name that is no text; and a default that is not ours to replace. */
	remove_directory(path);
	part.name = "\xff.gguf";
	assert_int_equal(import_add(&j, &result, NULL), 0);
	import_result_done(&result);
	assert_true(asprintf(&other, "%s/default.gguf", path) > 0);
	assert_int_equal(unlink(other), 0);
	assert_int_equal(mkdir(other, 0755), 0);
	j.make_default = true;
	assert_int_equal(import_add(&j, &result, NULL), -EEXIST);

	j.n_parts = 0;
	assert_int_equal(import_add(&j, &result, NULL), -E2BIG);
	remove_directory(path);
}

/* ---- messages ---- */

static void test_requests(void **state)
{
	struct message_request q = { .command = MESSAGE_ADD,
				     .name = "n",
				     .files = { "a", "b" },
				     .n_files = 2,
				     .make_default = true },
			       got;
	json_auto_t *o = message_pack_request(&q), *bad = NULL;
	_cleanup_(freep) char *error = NULL;

	(void)state;
	assert_int_equal(message_read_request(o, &got, NULL), 0);
	assert_int_equal(got.command, MESSAGE_ADD);
	assert_string_equal(got.name, "n");
	assert_int_equal(got.n_files, 2);
	assert_string_equal(got.files[1], "b");
	assert_true(got.make_default && !got.force);
	bad = json_pack("{s:s, s:s, s:s}", "command", "remove", "name", "x", "path", "/");
	assert_int_equal(message_read_request(bad, &got, &error), -EINVAL);
	assert_non_null(strstr(error, "path"));
	q.files[0] = "\xff";
	assert_null(message_pack_request(&q));
}

static void test_events(void **state)
{
	(void)state;
	for (enum import_event_kind k = 0; k < IMPORT_EVENT_MAX; k++) {
		const struct import_event e = {
			.kind = k, .done = 1, .total = 2, .needed = 3, .available = 4, .text = "t"
		};
		json_auto_t *o = message_pack_event(&e);
		struct import_event got;

		assert_int_equal(message_read_event(o, &got), 1);
		assert_int_equal(got.kind, k);
		if (k == IMPORT_COPY || k == IMPORT_HASH)
			assert_true(got.done == 1 && got.total == 2);
		if (k == IMPORT_SPACE)
			assert_true(got.needed == 3 && got.available == 4);
		if (k == IMPORT_WARNING)
			assert_string_equal(got.text, "t");
	}
}

static void test_replies(void **state)
{
	struct import_result r = { .file = strdup("f"), .sha256 = "ab", .bytes = 5, .existed = true },
			     got = {};
	json_auto_t *o = message_pack_result(&r), *e = message_pack_error(-EACCES, "no"),
		    *empty = json_object();
	_cleanup_(freep) char *error = NULL, *nothing = NULL;

	(void)state;
	assert_int_equal(message_read_reply(o, &got, NULL), 0);
	assert_string_equal(got.file, "f");
	assert_true(got.existed && !got.is_default && got.bytes == 5);
	import_result_done(&got);
	import_result_done(&r);
	assert_string_equal(json_string_value(json_object_get(e, "error")),
			    error_by_code(ERROR_NOT_AUTHORIZED)->varlink);
	assert_int_equal(message_read_reply(e, &got, &error), -EACCES);
	assert_string_equal(error, "no");
	assert_int_equal(message_read_reply(empty, &got, &nothing), -EINVAL);
	assert_null(got.file);
}

static size_t open_descriptors(void)
{
	size_t n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void test_descriptors(void **state)
{
	size_t before = open_descriptors();
	struct message_files files = { .fd = { STDIN_FILENO, STDERR_FILENO }, .n = 2 }, got = {};
	json_auto_t *o = json_pack("{s:i}", "a", 1), *back = NULL, *none = NULL;
	int pair[2];

	(void)state;
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(message_send(pair[0], o, &files, 0), 0);
	assert_int_equal(message_recv(pair[1], &back, &got, NULL), 0);
	assert_int_equal(got.n, 2);
	assert_int_equal(fcntl(got.fd[1], F_GETFD), FD_CLOEXEC);
	assert_true(json_equal(o, back));
	message_files_done(&got);
	/* Not asked for, and in a message that is no JSON. */
	assert_int_equal(message_send(pair[0], o, &files, 0), 0);
	assert_int_equal(message_recv(pair[1], &none, NULL, NULL), -EBADMSG);
	assert_int_equal(send(pair[0], "{", 1, 0), 1);
	assert_int_equal(message_recv(pair[1], &none, &got, NULL), -EBADMSG);
	close(pair[0]);
	assert_int_equal(message_recv(pair[1], &none, &got, NULL), -EPIPE);
	close(pair[1]);
	assert_null(none);
	assert_int_equal(open_descriptors(), before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_clean_name),  cmocka_unit_test(test_split_name),
		cmocka_unit_test(test_name),        cmocka_unit_test(test_record),
		cmocka_unit_test(test_catalog),     cmocka_unit_test(test_staging),
		cmocka_unit_test(test_import),      cmocka_unit_test(test_requests),
		cmocka_unit_test(test_events),      cmocka_unit_test(test_replies),
		cmocka_unit_test(test_descriptors),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
