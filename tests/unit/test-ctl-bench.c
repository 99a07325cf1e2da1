/* SPDX-License-Identifier: MIT */
/*
 * test-ctl-bench.c: what `residentctl bench` asks for and what it makes of measurements: contexts, text, speeds, table, CSV,
 * JSON and the picture.
 */
#include "tests/test.h"

#include "client/ctl-bench.h"

static void contexts(void **state)
{
	uint64_t c[BENCH_POINTS_MAX];

	(void)state;
	assert_int_equal(bench_contexts(100, c), 1);
	assert_int_equal(c[0], 100);
	assert_int_equal(bench_contexts(512, c), 1);
	assert_int_equal(c[0], 512);
	assert_int_equal(bench_contexts(3000, c), 4);
	assert_int_equal(c[0], 512);
	assert_int_equal(c[2], 2048);
	assert_int_equal(c[3], 3000);
	/* However long a conversation may be, there is room for its last point. */
	assert_int_equal(bench_contexts(UINT64_MAX, c), BENCH_POINTS_MAX);
	assert_int_equal(c[BENCH_POINTS_MAX - 2], UINT64_C(512) << (BENCH_POINTS_MAX - 2));
	assert_true(c[BENCH_POINTS_MAX - 1] == UINT64_MAX);
}

static uint64_t cost_of(const char *text, const uint32_t cost[static BENCH_WORDS])
{
	uint64_t sum = 0;

	while (*text) {
		size_t len = 1 + strcspn(text + 1, " "), i = 0;

		for (; i < BENCH_WORDS; i++)
			if (strlen(bench_word(i)) == len && strncmp(bench_word(i), text, len) == 0)
				break;
		assert_true(i < BENCH_WORDS);
		sum += cost[i];
		text += len;
	}
	return sum;
}

static void text_has_its_tokens(void **state)
{
	uint32_t cost[BENCH_WORDS];
	uint64_t seed = 1;

	(void)state;
	for (size_t i = 0; i < BENCH_WORDS; i++)
		cost[i] = 1 + (uint32_t)(i % 4);
	for (uint64_t n = 1; n < 300; n += 13) {
		_cleanup_(buf_done) struct buf b = {};

		assert_int_equal(bench_text(&b, n, cost, &seed), 0);
		assert_int_equal(cost_of(b.data, cost), n);
	}
}

/* Words that never fit, and one that the vocabulary has joined with its neighbour, end it all the same. */
static void text_of_odd_words(void **state)
{
	_cleanup_(buf_done) struct buf b = {};
	uint32_t cost[BENCH_WORDS];
	uint64_t seed = 1;

	(void)state;
	for (size_t i = 0; i < BENCH_WORDS; i++)
		cost[i] = 3;
	assert_int_equal(bench_text(&b, 2, cost, &seed), 0);
	assert_int_equal(b.len, 0);
	assert_int_equal(bench_text(&b, 8, cost, &seed), 0);
	assert_int_equal(cost_of(b.data, cost), 6);
	memset(cost, 0, sizeof(cost));
	assert_int_equal(bench_text(&b, 5, cost, &seed), 0);
}

static struct bench *sample(void)
{
	struct bench *b = calloc(1, sizeof(*b));

	assert_non_null(b);
	b->model = "m <1> & \"x\"\x1b";
	b->backend = "avx2";
	b->threads = 2;
	b->n_points = 3;
	b->points[0] = (struct bench_point){
		.context = 512,
		.n_runs = 3,
		.runs = { { 512, 500, 1000000, 64, 63, 1000000, 100, false },
			  { 513, 500, 2000000, 64, 63, 3000000, 200, false },
			  { 514, 500, 500000, 64, 63, 2000000, 300, false } },
	};
	/* Others had a request; the answer ended at once. */
	b->points[1] = (struct bench_point){
		.context = 1024,
		.n_runs = 1,
		.runs = { { 1024, 448, 2000000, 1, 0, 5, 7000000, true } },
	};
	b->points[2].context = 2048; /* was not reached */
	return b;
}

static void speeds(void **state)
{
	_cleanup_(freep) struct bench *b = sample();
	struct bench_speed s;

	(void)state;
	assert_true(bench_prompt_speed(&b->points[0], &s));
	assert_float_equal(s.min, 250, 1e-9);
	assert_float_equal(s.median, 500, 1e-9);
	assert_float_equal(s.max, 1000, 1e-9);
	assert_true(bench_answer_speed(&b->points[0], &s));
	assert_float_equal(s.median, 31.5, 1e-9);
	b->points[0].n_runs = 2;
	assert_true(bench_prompt_speed(&b->points[0], &s));
	assert_float_equal(s.median, 375, 1e-9);
	assert_false(bench_answer_speed(&b->points[1], &s));
	assert_false(bench_prompt_speed(&b->points[2], &s));
}

static void table(void **state)
{
	_cleanup_(freep) struct bench *b = sample();
	_cleanup_(buf_done) struct buf out = {}, one = {};

	(void)state;
	b->model = "m";
	assert_int_equal(bench_put_table(&out, b), 0);
	assert_string_equal(
		out.data,
		"m; avx2, 2 threads\n\n"
		" context                        prompt                        answer   tokens/s: median (least to most)\n"
		"     512       500.0 (250.0 to 1000.0)           31.5 (21.0 to 63.0)\n"
		"    1024        224.0 (224.0 to 224.0)                             - *\n"
		"\n* others had requests meanwhile, with which this one shared the machine\n");
	b->points[0].n_runs = 1;
	b->points[1].runs[0].others = false;
	assert_int_equal(bench_put_table(&one, b), 0);
	assert_string_equal(one.data, "m; avx2, 2 threads\n\n"
				      " context      prompt      answer   tokens/s\n"
				      "     512       500.0        63.0\n"
				      "    1024       224.0           -\n");
}

static void csv(void **state)
{
	_cleanup_(freep) struct bench *b = sample();
	_cleanup_(buf_done) struct buf out = {};

	(void)state;
	b->points[0].n_runs = 1;
	assert_int_equal(bench_put_csv(&out, b), 0);
	assert_string_equal(out.data,
			    "point,run,context,prompt_tokens,prompt_us,prompt_tokens_per_second,"
			    "answer_tokens,answer_us,answer_tokens_per_second,queue_us,others\n"
			    "512,1,512,500,1000000,500.000,64,1000000,63.000,100,0\n"
			    "1024,1,1024,448,2000000,224.000,1,5,,7000000,1\n");
}

static void json(void **state)
{
	_cleanup_(freep) struct bench *b = sample();
	json_auto_t *o = bench_json(b);
	json_t *points = json_object_get(o, "points");

	(void)state;
	assert_int_equal(json_array_size(points), 2);
	assert_int_equal(json_array_size(json_object_get(json_array_get(points, 0), "runs")), 3);
	assert_true(json_is_null(
		json_object_get(json_array_get(json_object_get(json_array_get(points, 1), "runs"), 0),
				"answer_tokens_per_second")));
	b->model = "\xff";
	assert_null(bench_json(b));
}

static size_t count(const char *text, const char *what)
{
	size_t n = 0;

	for (const char *p = strstr(text, what); p; p = strstr(p + 1, what))
		n++;
	return n;
}

static void picture(void **state)
{
	_cleanup_(freep) struct bench *b = sample();
	_cleanup_(buf_done) struct buf out = {};

	(void)state;
	assert_int_equal(bench_put_svg(&out, b), 0);
	assert_int_equal(count(out.data, "<svg "), 1);
	assert_int_equal(count(out.data, "</svg>\n"), 1);
	assert_int_equal(count(out.data, "m &#60;1&#62; &#38; &#34;x&#34;"), 2);
	assert_null(strchr(out.data, '\x1b'));
	/* Two points of the prompt, one of the answer: a point without a number is not drawn. */
	assert_int_equal(count(out.data, "<circle "), 3);
	assert_int_equal(count(out.data, "<polyline "), 2);
	assert_int_equal(count(out.data, "fill=\"#ffffff\"><title>"), 1);
	assert_non_null(strstr(out.data, "medians of 3 runs"));
	assert_non_null(strstr(out.data, "others had requests meanwhile"));
	assert_null(strstr(out.data, "nan"));
	assert_null(strstr(out.data, "inf"));
}

/* One point has no span, and one without a number no scale; nothing is divided by them. */
static void picture_of_little(void **state)
{
	_cleanup_(freep) struct bench *b = sample();
	_cleanup_(buf_done) struct buf one = {}, none = {};

	(void)state;
	b->n_points = 1;
	assert_int_equal(bench_put_svg(&one, b), 0);
	assert_null(strstr(one.data, "nan"));
	b->points[0].n_runs = 0;
	assert_int_equal(bench_put_svg(&none, b), 0);
	assert_null(strstr(none.data, "nan"));
	assert_null(strstr(none.data, "inf"));
	assert_int_equal(count(none.data, "<circle "), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(contexts),
		cmocka_unit_test(text_has_its_tokens),
		cmocka_unit_test(text_of_odd_words),
		cmocka_unit_test(speeds),
		cmocka_unit_test(table),
		cmocka_unit_test(csv),
		cmocka_unit_test(json),
		cmocka_unit_test(picture),
		cmocka_unit_test(picture_of_little),
	};

	return cmocka_run_group_tests_name("ctl-bench", tests, NULL, NULL);
}
