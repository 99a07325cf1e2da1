/* SPDX-License-Identifier: MIT */
/*
 * test-residency-view.c: what becomes of a reply to GetResidency: numbers, text, a picture and the rows of
 * `residentctl top`; and a recording of routing, from a service that is a list of lines.
 */
#include "tests/test.h"

#include "client/ctl-residency-view.h"
#include "client/ctl-top.h"
#include "client/ctl.h"

#include <fcntl.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

/* Every number is another one, so that none is taken for its neighbour. */
#define HEAD_BEGIN                                                                                   \
	"{\"model\":\"m\",\"tier\":\"arena\",\"tier_reason\":\"too large\",\"method\":\"io_uring\"," \
	"\"policy\":\"clock-lfu\",\"feed\":\"cachestat\",\"feed_reason\":\"no tracer\","             \
	"\"budget\":{\"max\":2400000000,\"configured\":2500000000,\"floor\":800000000,"              \
	"\"reserve\":1100000000,\"trunk\":700000000,\"trunk_locked\":600000000,\"fixed\":300000000," \
	"\"kv\":200000000,\"blocks\":1200000000,\"blocks_all\":3900000000},"                         \
	"\"counters\":{\"hits\":800,\"misses\":200,\"prefetch_used\":3,\"prefetch_wasted\":4,"       \
	"\"bypassed\":5,\"evicted\":6,\"steps\":7,\"decode_tokens\":8,\"stall_us\":96,"              \
	"\"bytes_read\":4400,\"blocks_read\":11,\"read_us\":1100,\"read_errors\":13,"                \
	"\"left_pages\":14,\"compute_major_faults\":15,\"kernel_took\":16,\"doubled\":17,"           \
	"\"prefetching\":true},"
#define VRAM                                                                                           \
	"\"vram\":{\"budget_bytes\":6200000000,\"fixed_bytes\":1900000000,\"trunk_bytes\":1500000000," \
	"\"slot_bytes\":3200000000,\"block_bytes\":3100000000,\"reserve_bytes\":540000000,"            \
	"\"free_bytes\":900000000,\"overlap_bytes\":25,\"n_blocks\":26,\"hits\":27,\"promoted\":28,"   \
	"\"demoted\":29,\"copied_back\":30,\"staged\":31,\"on_cpu\":32,\"bytes_copied\":33000,"        \
	"\"copy_us\":3000,\"chunks_given_back\":35,\"graph_steps\":36},"
#define HEAD_END                                                                                \
	"\"pressure\":{\"some_avg10\":2.5,\"available\":5100000000,"                            \
	"\"steps_down\":18,\"steps_up\":19},\"fault_histogram\":[0,0,5,1,0,2],"                 \
	"\"decode_tokens_per_second\":12.5,\"prefill_tokens_per_second\":210.0,\"running\":20," \
	"\"queued\":21,\"layers\":["
#define HEAD HEAD_BEGIN VRAM HEAD_END
#define LAYER_0                                                                                    \
	"{\"layer\":3,\"experts\":4,\"block_bytes\":400,\"host\":1,\"vram\":1,\"vram_hits\":2900," \
	"\"hits\":30,\"misses\":10"
#define LAYER_1                                                                                   \
	"{\"layer\":4,\"experts\":2,\"block_bytes\":400,\"host\":1,\"vram\":0,\"vram_hits\":100," \
	"\"hits\":0,\"misses\":1"
#define REPLY HEAD LAYER_0 "}," LAYER_1 "}]}"
/* Without a GPU. */
#define REPLY_HOST                                                                                      \
	HEAD_BEGIN HEAD_END                                                                             \
		"{\"layer\":3,\"experts\":4,\"block_bytes\":400,\"host\":2,\"vram\":0,\"vram_hits\":0," \
		"\"hits\":30,\"misses\":10}]}"
#define REPLY_BLOCKS                                                          \
	HEAD LAYER_0 ",\"heat\":[0,1,255,65535],\"place\":\"-chv\"}," LAYER_1 \
		     ",\"heat\":[7,7],\"place\":\"h-\"}]}"
#define REPLY_NONE                                                                                  \
	"{\"model\":null,\"tier\":\"none\",\"tier_reason\":\"no model is loaded\",\"policy\":\"\"," \
	"\"feed\":\"none\",\"budget\":{\"max\":0,\"configured\":0,\"floor\":0,\"reserve\":0,"       \
	"\"trunk\":0,\"trunk_locked\":0,\"fixed\":0,\"kv\":0,\"blocks\":0,\"blocks_all\":0},"       \
	"\"counters\":{\"hits\":0,\"misses\":0,\"prefetch_used\":0,\"prefetch_wasted\":0,"          \
	"\"bypassed\":0,\"evicted\":0,\"steps\":0,\"decode_tokens\":0,\"stall_us\":0,"              \
	"\"bytes_read\":0,\"blocks_read\":0,\"read_us\":0,\"read_errors\":0,\"left_pages\":0,"      \
	"\"compute_major_faults\":0,\"kernel_took\":0,\"doubled\":0,\"prefetching\":false},"        \
	"\"pressure\":{\"some_avg10\":0,\"available\":0,\"steps_down\":0,\"steps_up\":0},"          \
	"\"fault_histogram\":[],\"decode_tokens_per_second\":0,\"prefill_tokens_per_second\":0,"    \
	"\"running\":0,\"queued\":0,\"layers\":[]}"

static json_t *parse(const char *text)
{
	json_t *o = json_loads(text, 0, NULL);

	assert_non_null(o);
	return o;
}

static void read_reply(const char *text, struct residency_view *ret)
{
	json_auto_t *o = parse(text);
	struct args a;

	assert_int_equal(residency_view_read(&a, o, ret), 0);
}

static void assert_refused(json_t *o, const char *key)
{
	struct residency_view v = {};
	struct args a;

	assert_int_equal(residency_view_read(&a, o, &v), -EBADMSG);
	assert_string_equal(a.bad, key);
	assert_non_null(a.why);
	assert_null(v.reply);
}

/* ---- reading ---- */

static void read_all(void **state)
{
	struct residency_view v;

	(void)state;
	read_reply(REPLY_BLOCKS, &v);
	assert_string_equal(v.model, "m");
	assert_string_equal(v.tier, "arena");
	assert_string_equal(v.tier_reason, "too large");
	assert_string_equal(v.method, "io_uring");
	assert_string_equal(v.policy, "clock-lfu");
	assert_string_equal(v.feed, "cachestat");
	assert_string_equal(v.feed_reason, "no tracer");
	assert_int_equal(v.budget.max, 2400000000);
	assert_int_equal(v.budget.configured, 2500000000);
	assert_int_equal(v.budget.floor, 800000000);
	assert_int_equal(v.budget.reserve, 1100000000);
	assert_int_equal(v.budget.trunk, 700000000);
	assert_int_equal(v.budget.trunk_locked, 600000000);
	assert_int_equal(v.budget.fixed, 300000000);
	assert_int_equal(v.budget.kv, 200000000);
	assert_int_equal(v.budget.blocks, 1200000000);
	assert_int_equal(v.budget.blocks_all, 3900000000);
	assert_int_equal(v.counters.hits, 800);
	assert_int_equal(v.counters.misses, 200);
	assert_int_equal(v.counters.prefetch_used, 3);
	assert_int_equal(v.counters.prefetch_wasted, 4);
	assert_int_equal(v.counters.bypassed, 5);
	assert_int_equal(v.counters.evicted, 6);
	assert_int_equal(v.counters.steps, 7);
	assert_int_equal(v.counters.decode_tokens, 8);
	assert_int_equal(v.counters.stall_us, 96);
	assert_int_equal(v.counters.bytes_read, 4400);
	assert_int_equal(v.counters.blocks_read, 11);
	assert_int_equal(v.counters.read_us, 1100);
	assert_int_equal(v.counters.read_errors, 13);
	assert_int_equal(v.counters.left_pages, 14);
	assert_int_equal(v.counters.compute_major_faults, 15);
	assert_int_equal(v.counters.kernel_took, 16);
	assert_int_equal(v.counters.doubled, 17);
	assert_true(v.counters.prefetching);
	assert_true(v.has_vram);
	assert_int_equal(v.vram.budget_bytes, 6200000000);
	assert_int_equal(v.vram.fixed_bytes, 1900000000);
	assert_int_equal(v.vram.trunk_bytes, 1500000000);
	assert_int_equal(v.vram.slot_bytes, 3200000000);
	assert_int_equal(v.vram.block_bytes, 3100000000);
	assert_int_equal(v.vram.reserve_bytes, 540000000);
	assert_int_equal(v.vram.free_bytes, 900000000);
	assert_int_equal(v.vram.overlap_bytes, 25);
	assert_int_equal(v.vram.n_blocks, 26);
	assert_int_equal(v.vram.hits, 27);
	assert_int_equal(v.vram.promoted, 28);
	assert_int_equal(v.vram.demoted, 29);
	assert_int_equal(v.vram.copied_back, 30);
	assert_int_equal(v.vram.staged, 31);
	assert_int_equal(v.vram.on_cpu, 32);
	assert_int_equal(v.vram.bytes_copied, 33000);
	assert_int_equal(v.vram.copy_us, 3000);
	assert_int_equal(v.vram.chunks_given_back, 35);
	assert_int_equal(v.vram.graph_steps, 36);
	assert_int_equal(v.vram_hits, 3000);
	assert_true(v.pressure.some_avg10 > 2.49 && v.pressure.some_avg10 < 2.51);
	assert_int_equal(v.pressure.available, 5100000000);
	assert_int_equal(v.pressure.steps_down, 18);
	assert_int_equal(v.pressure.steps_up, 19);
	assert_int_equal(v.n_histogram, 6);
	assert_int_equal(v.histogram[2], 5);
	assert_true(v.decode_tokens_per_second > 12.4 && v.decode_tokens_per_second < 12.6);
	assert_true(v.prefill_tokens_per_second > 209 && v.prefill_tokens_per_second < 211);
	assert_int_equal(v.running, 20);
	assert_int_equal(v.queued, 21);
	assert_int_equal(v.n_layers, 2);
	assert_int_equal(v.layers[0].layer, 3);
	assert_int_equal(v.layers[0].n_experts, 4);
	assert_int_equal(v.layers[0].block_bytes, 400);
	assert_int_equal(v.layers[0].n_host, 1);
	assert_int_equal(v.layers[0].n_vram, 1);
	assert_int_equal(v.layers[0].vram_hits, 2900);
	assert_int_equal(v.layers[0].hits, 30);
	assert_int_equal(v.layers[0].misses, 10);
	assert_int_equal(v.layers[0].heat[3], 65535);
	assert_string_equal(v.layers[1].place, "h-");
	residency_view_done(&v);
}

static void read_without_blocks(void **state)
{
	struct residency_view v;

	(void)state;
	read_reply(REPLY, &v);
	assert_true(residency_view_managed(&v));
	assert_null(v.layers[0].heat);
	assert_null(v.layers[0].place);
	residency_view_done(&v);
	read_reply(REPLY_NONE, &v);
	assert_false(residency_view_managed(&v));
	assert_null(v.model);
	assert_null(v.feed_reason);
	assert_int_equal(v.n_layers, 0);
	assert_false(v.has_vram);
	residency_view_done(&v);
	read_reply(REPLY_HOST, &v);
	assert_false(v.has_vram);
	assert_int_equal(v.vram_hits, 0);
	assert_int_equal(residency_view_hits(&v), 800);
	residency_view_done(&v);
}

/* Sums that no service ever had do not wrap. */
static void read_huge_hits(void **state)
{
	json_auto_t *o = parse(REPLY);
	json_t *layers = json_object_get(o, "layers");
	struct residency_view v;
	struct args a;

	(void)state;
	for (size_t i = 0; i < 2; i++)
		json_object_set_new(json_array_get(layers, i), "vram_hits", json_integer(INT64_MAX));
	assert_int_equal(residency_view_read(&a, o, &v), 0);
	assert_int_equal(v.vram_hits, INT64_MAX);
	assert_true(residency_view_vram_percent(&v) > 99.9 && residency_view_vram_percent(&v) <= 100);
	residency_view_done(&v);
}

/* What a later service adds is nothing to stumble over. */
static void read_unknown_fields(void **state)
{
	json_auto_t *o = parse(REPLY);
	struct residency_view v;
	struct args a;

	(void)state;
	json_object_set_new(o, "news", json_integer(1));
	json_object_set_new(json_object_get(o, "counters"), "news", json_string("x"));
	assert_int_equal(residency_view_read(&a, o, &v), 0);
	residency_view_done(&v);
}

/* Each field of an object is taken away, and then of another type. */
static void refuse_fields(const char *path, size_t index)
{
	static const char *const optional[] = { "model",
						"method",
						"feed_reason",
						"heat",
						"place",
						"prefetching",
						"some_avg10",
						"decode_tokens_per_second",
						"prefill_tokens_per_second" };
	json_auto_t *whole = parse(REPLY_BLOCKS);
	json_t *list = json_object_get(whole, path), *in = path ? list : whole, *v;
	const char *key;

	if (json_is_array(in))
		in = json_array_get(list, index);
	json_object_foreach(in, key, v) {
		json_auto_t *o = json_deep_copy(whole);
		json_t *at = path ? json_object_get(o, path) : o;
		bool may_lack = !path && streq(key, "vram");

		if (json_is_array(at))
			at = json_array_get(at, index);
		for (size_t i = 0; i < ARRAY_SIZE(optional); i++)
			may_lack = may_lack || streq(key, optional[i]);
		json_object_set_new(at, key, json_pack("[[]]"));
		if (json_is_array(v) && !streq(key, "layers") && !streq(key, "heat") &&
		    !streq(key, "fault_histogram"))
			fail_msg("%s is not covered", key);
		assert_refused(o, key);
		json_object_del(at, key);
		if (!may_lack)
			assert_refused(o, key);
	}
}

static void refuse_every_field(void **state)
{
	(void)state;
	refuse_fields(NULL, 0);
	refuse_fields("budget", 0);
	refuse_fields("counters", 0);
	refuse_fields("vram", 0);
	refuse_fields("pressure", 0);
	refuse_fields("layers", 0);
	refuse_fields("layers", 1);
}

static void refuse_values(void **state)
{
	static const struct {
		const char *text, *key;
	} cases[] = {
		{ HEAD "1]}", "layers" },
		{ HEAD "{\"layer\":4097,\"experts\":1,\"block_bytes\":1,\"host\":0,\"vram\":0,\"vram_hits\":0,"
		       "\"hits\":0,\"misses\":0}]}",
		  "layer" },
		{ HEAD "{\"layer\":0,\"experts\":65537,\"block_bytes\":1,\"host\":0,\"vram\":0,\"vram_hits\":0,"
		       "\"hits\":0,\"misses\":0}]}",
		  "experts" },
		{ HEAD "{\"layer\":0,\"experts\":4,\"block_bytes\":-1,\"host\":0,\"vram\":0,\"vram_hits\":0,"
		       "\"hits\":0,\"misses\":0}]}",
		  "block_bytes" },
		{ HEAD "{\"layer\":0,\"experts\":4,\"block_bytes\":1,\"host\":5,\"vram\":0,\"vram_hits\":0,"
		       "\"hits\":0,\"misses\":0}]}",
		  "host" },
		{ HEAD "{\"layer\":0,\"experts\":4,\"block_bytes\":1,\"host\":0,\"vram\":5,\"vram_hits\":0,"
		       "\"hits\":0,\"misses\":0}]}",
		  "vram" },
		{ HEAD LAYER_0 ",\"heat\":[1,2,3]}]}", "heat" },
		{ HEAD LAYER_0 ",\"heat\":[1,2,3,65536]}]}", "heat" },
		{ HEAD LAYER_0 ",\"heat\":[1,2,3,-1]}]}", "heat" },
		{ HEAD LAYER_0 ",\"heat\":[1,2,3,4.0]}]}", "heat" },
		{ HEAD LAYER_0 ",\"place\":\"hh\"}]}", "place" },
		{ HEAD LAYER_0 ",\"place\":\"hhhhh\"}]}", "place" },
		{ HEAD LAYER_0 ",\"place\":\"hhxh\"}]}", "place" },
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		json_auto_t *o = parse(cases[i].text);

		assert_refused(o, cases[i].key);
	}
}

static void refuse_long_histogram(void **state)
{
	json_auto_t *o = parse(REPLY);
	json_t *list = json_object_get(o, "fault_histogram");

	(void)state;
	while (json_array_size(list) <= RESIDENCY_VIEW_BUCKETS_MAX)
		json_array_append_new(list, json_integer(1));
	assert_refused(o, "fault_histogram");
	json_array_clear(list);
	json_array_append_new(list, json_integer(-1));
	assert_refused(o, "fault_histogram");
}

static void amplification(void **state)
{
	struct residency_view v;

	(void)state;
	read_reply(REPLY, &v);
	/* 11 blocks of 400 bytes each, 4400 read */
	assert_true(residency_view_amplification(&v) > 0.999 && residency_view_amplification(&v) < 1.001);
	/* unlike sizes: every block read was a miss (10 of 400, 1 of 800) */
	v.layers[1].block_bytes = 800;
	v.counters.bytes_read = 9600;
	assert_true(residency_view_amplification(&v) > 1.999 && residency_view_amplification(&v) < 2.001);
	/* unlike sizes, and something was read ahead: nobody knows of which layer */
	v.counters.blocks_read = 12;
	assert_true(residency_view_amplification(&v) < 0);
	v.layers[1].block_bytes = 400;
	v.counters.blocks_read = 0;
	assert_true(residency_view_amplification(&v) < 0);
	residency_view_done(&v);
}

/* ---- the picture ---- */

/* Tags are closed in order, every & is an entity, and there is no control character: returns how many
 * elements there are. Enough of XML for what we write. */
static size_t assert_well_formed(const char *s)
{
	char stack[16][16] = {};
	size_t depth = 0, n = 0;

	assert_true(startswith(s, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"));
	for (s = strchr(s, '\n'); *s; s++) {
		char name[16] = {};
		bool closed = s[1] == '/';
		const char *end;

		assert_true((unsigned char)*s >= 0x20 || *s == '\n');
		if (*s == '&')
			assert_true(s[1] == '#' && strspn(s + 2, "0123456789") > 0 &&
				    s[2 + strspn(s + 2, "0123456789")] == ';');
		assert_true(*s != '>');
		if (*s != '<')
			continue;
		end = strchr(s, '>');
		assert_non_null(end);
		memcpy(name, s + 1 + closed, MIN(strcspn(s + 1 + closed, " />"), sizeof(name) - 1));
		if (closed) {
			assert_true(depth > 0);
			assert_string_equal(stack[--depth], name);
		} else {
			n++;
			if (end[-1] != '/') {
				assert_true(depth < ARRAY_SIZE(stack));
				memcpy(stack[depth++], name, sizeof(name));
			}
		}
		s = end;
	}
	assert_int_equal(depth, 0);
	return n;
}

static void assert_has(const char *text, const char *part)
{
	if (!strstr(text, part))
		fail_msg("\"%s\" is not in:\n%s", part, text);
}

static void draw_heat_map(void **state)
{
	struct residency_view v;
	struct buf svg = {};

	(void)state;
	read_reply(REPLY_BLOCKS, &v);
	assert_int_equal(ctl_svg_heat_map(&svg, &v), 0);
	assert_true(assert_well_formed(svg.data) > 6);
	/* shades: nothing, and the hottest; place by hue */
	assert_has(svg.data, "fill=\"#ececec\"><title>layer 3, expert 0: disk, heat 0</title>");
	assert_has(svg.data, "<title>layer 3, expert 1: on its way, heat 1</title>");
	assert_has(svg.data, "<title>layer 3, expert 2: memory, heat 255</title>");
	assert_has(svg.data, "fill=\"#b44a00\"><title>layer 3, expert 3: VRAM, heat 65535</title>");
	assert_has(svg.data, "<title>layer 4, expert 1: disk, heat 7</title>");
	assert_has(svg.data, "memory: 2 blocks, 800 B");
	assert_has(svg.data, "disk: 2 blocks, 800 B");
	assert_has(svg.data, "95.0 % hits, 75.0 % in VRAM; ");
	assert_has(svg.data, "VRAM: 1 blocks, 400 B");
	assert_null(strstr(svg.data, "script"));
	buf_done(&svg);
	residency_view_done(&v);
}

static void draw_hostile_name(void **state)
{
	struct residency_view v;
	struct buf svg = {};

	(void)state;
	read_reply(REPLY_BLOCKS, &v);
	v.model = "</title><script>\"&\x1b[2J\xe2\x80\xae\xef\xbf\xbf";
	v.tier = "<a>";
	v.policy = "]]>&amp;";
	assert_int_equal(ctl_svg_heat_map(&svg, &v), 0);
	assert_well_formed(svg.data);
	assert_null(strstr(svg.data, "<script"));
	assert_has(svg.data, "&#60;/title&#62;&#60;script&#62;&#34;&#38;\\x1b[2J\\u202e?");
	buf_done(&svg);
	residency_view_done(&v);
}

static void draw_nothing(void **state)
{
	struct residency_view v;
	struct buf svg = {};

	(void)state;
	read_reply(REPLY, &v);
	assert_int_equal(ctl_svg_heat_map(&svg, &v), -ENODATA);
	residency_view_done(&v);
	read_reply(REPLY_NONE, &v);
	assert_int_equal(ctl_svg_heat_map(&svg, &v), -ENODATA);
	assert_int_equal(svg.len, 0);
	residency_view_done(&v);
}

/* ---- the rows of top ---- */

static void draw_rows(struct top_screen *s, unsigned int rows, unsigned int columns,
		      const struct top_look *now, const struct top_look *before, const char *alert,
		      struct buf *out)
{
	assert_int_equal(top_screen_init(s, rows, columns), 0);
	top_draw(s, now, before, alert);
	out->len = 0;
	for (unsigned int i = 0; i < s->rows; i++) {
		assert_int_equal(top_screen_line(s, i, out), 0);
		assert_int_equal(buf_append(out, "\n", 1), 0);
	}
	top_screen_done(s);
}

static void top_full(void **state)
{
	struct top_look now = { .at_us = 3000000, .sessions = 3, .sessions_own = 2 }, before = {};
	struct top_screen s;
	struct buf out = {};

	(void)state;
	read_reply(REPLY, &now.view);
	read_reply(REPLY, &before.view);
	before.at_us = 1000000;
	before.view.counters.hits = 770;
	before.view.counters.misses = 190;
	before.view.vram_hits = 2940;
	before.view.counters.decode_tokens = 2;
	before.view.counters.stall_us = 0;
	before.view.counters.bytes_read = 400;
	draw_rows(&s, 24, 80, &now, &before, NULL, &out);
	assert_string_equal(
		out.data,
		"m\n"
		"tier      arena: too large\n"
		"\n"
		"speed     12.5 tokens/s answering (3.0 now), 210 reading\n"
		"work      20 running, 21 waiting, 3 sessions (2 yours)\n"
		"memory    [#########++++===|||||||||||||||] 2.4 GB of 2.4 GB\n"
		"          # trunk 700 MB  + fixed 300 MB  = sessions 200 MB  | blocks 1.2 GB\n"
		"blocks    [||||||||||                     ] 31 %: 1.2 GB of 3.9 GB\n"
		"VRAM      [########++|||||||||||||||      ] 5.1 GB of 6.2 GB, 900 MB free\n"
		"hits      [#######################||||||  ] 95.0 % (90.0 now, 10 misses)\n"
		"in VRAM   [#######################        ] 75.0 % of what was wanted (60.0 now)\n"
		"stalls    12 us a token (0 % of the time now), 13 read errors\n"
		"disk      4.4 kB read (2 kB/s now), prefetch on: 3 used, 4 wasted\n"
		"pressure  [|                              ] 2.5 %, 5.1 GB free, 18 down 19 up\n"
		"faults    15 of compute threads, 16 blocks taken by the kernel\n"
		"policy    clock-lfu, blocks read by io_uring\n"
		"feed      cachestat: no tracer\n"
		"\n"
		"major faults by latency, from\n"
		"0.004 us  [|||||||||||||||||||||||||||||||] 5\n"
		"0.008 us  [||||||                         ] 1\n"
		"0.016 us  [                               ] 0\n"
		"0.032 us  [||||||||||||                   ] 2\n"
		"\n");
	buf_done(&out);
	residency_view_done(&now.view);
	residency_view_done(&before.view);
}

/* The important rows of a low screen, and nothing of a time in which the model was another. */
static void top_small(void **state)
{
	struct top_look now = { .at_us = 2000000 }, before = { .at_us = 1000000 };
	struct top_screen s;
	struct buf out = {};

	(void)state;
	read_reply(REPLY, &now.view);
	read_reply(REPLY, &before.view);
	before.view.counters.hits = 801;
	draw_rows(&s, 4, 24, &now, &before, NULL, &out);
	assert_string_equal(out.data, "m\n"
				      "speed     12.5 tokens/s\n"
				      "memory    [##+=||||] 2.4\n"
				      "hits      [######||] 95.\n");
	draw_rows(&s, 1, 10, &now, &before, NULL, &out);
	assert_string_equal(out.data, "m\n");
	buf_done(&out);
	residency_view_done(&now.view);
	residency_view_done(&before.view);
}

/* Whatever the size is, nothing is written beside the grid (a sanitizer looks on), nor more than one column a cell. */
static void top_any_size(void **state)
{
	struct top_look now = { .at_us = 1 };
	struct top_screen s;
	struct buf out = {};

	(void)state;
	read_reply(REPLY, &now.view);
	for (size_t i = 0; i < RESIDENCY_VIEW_BUCKETS_MAX; i++)
		now.view.histogram[i] = INT64_MAX;
	now.view.n_histogram = RESIDENCY_VIEW_BUCKETS_MAX;
	for (unsigned int rows = 0; rows < 90; rows += 3)
		for (unsigned int columns = 0; columns < 130; columns += 7)
			draw_rows(&s, rows, columns, &now, NULL, rows % 2 ? "alert" : NULL, &out);
	draw_rows(&s, UINT32_MAX, 1, &now, NULL, NULL, &out);
	buf_done(&out);
	residency_view_done(&now.view);
}

static void top_hostile_text(void **state)
{
	struct top_look now = {};
	struct top_screen s;
	struct buf out = {};

	(void)state;
	setlocale(LC_CTYPE, "C.UTF-8");
	read_reply(REPLY, &now.view);
	/* an escape sequence, C1, a bidi control, a combining mark, a wide character, bytes that are no
	 * UTF-8, and two characters that may be shown */
	now.view.model = "\x1b[2J\xc2\x9b\xe2\x80\xae\xcc\x88\xe9\xa6\x99\xff\xc3\xbc\xe2\x82\xac";
	now.view.tier_reason = "a\nb";
	draw_rows(&s, 24, 80, &now, NULL, NULL, &out);
	assert_true(startswith(out.data, MB_CUR_MAX > 1 ? "?[2J?????\xc3\xbc\xe2\x82\xac\n"
							: "?[2J???????\n"));
	assert_has(out.data, "arena: a?b\n");
	draw_rows(&s, 3, 80, &now, NULL, "\x1b]0;x\a", &out);
	assert_true(startswith(out.data, "?]0;x?\n"));
	setlocale(LC_CTYPE, "C");
	buf_done(&out);
	residency_view_done(&now.view);
}

static void top_without_model(void **state)
{
	struct top_look now = {};
	struct top_screen s;
	struct buf out = {};

	(void)state;
	draw_rows(&s, 3, 40, &now, NULL, "service away", &out);
	assert_string_equal(out.data, "service away\n\n\n");
	read_reply(REPLY_NONE, &now.view);
	draw_rows(&s, 12, 60, &now, NULL, NULL, &out);
	assert_string_equal(out.data, "no model\n"
				      "tier      none: no model is loaded\n"
				      "speed     0.0 tokens/s answering, 0 reading\n"
				      "work      0 running, 0 waiting, 0 sessions (0 yours)\n"
				      "pressure  [           ] 0.0 %, 0 B free, 0 down 0 up\n"
				      "\n\n\n\n\n\n\n");
	buf_done(&out);
	residency_view_done(&now.view);
}

/* ---- commands, against a service that is a list of lines ---- */

/* Answers the first call with frames, each sent in two pieces. `hold`: stays until the client closes. */
struct service {
	int fd;
	const char *const *frames;
	bool hold;
	char *call; /* what was asked, malloc'd */
	pthread_t thread;
};

static void *serve(void *userdata)
{
	struct service *s = userdata;
	char byte, call[4096];
	size_t n = 0;

	while (n < sizeof(call) && recv(s->fd, call + n, 1, 0) == 1 && call[n] != 0)
		n++;
	s->call = strndup(call, n);
	for (const char *const *f = s->frames; *f; f++) {
		size_t len = strlen(*f) + 1, half = len / 2;

		send(s->fd, *f, half, MSG_NOSIGNAL);
		usleep(1000);
		send(s->fd, *f + half, len - half, MSG_NOSIGNAL);
	}
	while (s->hold && recv(s->fd, &byte, 1, 0) > 0)
		;
	shutdown(s->fd, SHUT_RDWR);
	return NULL;
}

struct run {
	struct ctl c;
	struct service s;
	char out[8192], err[1024];
	enum exit_code e;
};

static void take(int fd, char *text, size_t size)
{
	ssize_t n = pread(fd, text, size - 1, 0);

	text[MAX(n, 0)] = 0;
	close(fd);
}

static void run(struct run *r, enum exit_code (*command)(struct ctl *c), const char *const *frames)
{
	int fds[2], out = memfd_create("out", MFD_CLOEXEC), err = memfd_create("err", MFD_CLOEXEC);

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	r->s.fd = fds[1];
	r->s.frames = frames;
	assert_int_equal(pthread_create(&r->s.thread, NULL, serve, &r->s), 0);
	assert_int_equal(resident_connect_fd(fds[0], &r->c.r), 0);
	terminal_init(&r->c.out, out, false);
	terminal_init(&r->c.err, err, false);
	r->e = command(&r->c);
	r->c.r = resident_close(r->c.r);
	pthread_join(r->s.thread, NULL);
	close(fds[1]);
	take(out, r->out, sizeof(r->out));
	take(err, r->err, sizeof(r->err));
	free(r->s.call);
}

#define NOT_AUTHORIZED                                                          \
	"{\"error\":\"org.residentd.Inference.NotAuthorized\",\"parameters\":{" \
	"\"number\":13,\"message\":\"no\"}}"

static void command_residency(void **state)
{
	const char *const frames[] = { "{\"parameters\":" REPLY "}", NULL };
	struct run r = {};

	(void)state;
	run(&r, ctl_residency, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_string_equal(
		r.out,
		"     model  m\n"
		"      tier  arena: too large\n"
		"    blocks  read by io_uring\n"
		"      feed  cachestat: no tracer\n"
		"    policy  clock-lfu\n"
		"    memory  blocks 1.2 GB of 3.9 GB in memory; budget 2.4 GB: trunk 700 MB, fixed 300 MB, "
		"conversations 200 MB, blocks 1.2 GB\n"
		"            2.5 GB at load; at least 800 MB; 1.1 GB left to others; 600 MB of the trunk "
		"locked\n"
		"      VRAM  26 blocks, 3.1 GB, in slots of 3.2 GB; budget 6.2 GB: fixed 1.9 GB, of that trunk "
		"1.5 GB\n"
		"            540 MB left to others, 900 MB free; 25 B of blocks are in memory too\n"
		"     moves  28 blocks promoted, 29 demoted (30 copied back), 31 copied for one use; 33 kB "
		"copied, 11 MB/s; 35 chunks given back\n"
		"   experts  27 times found in VRAM, 32 times computed by the CPU; 36 steps as one graph\n"
		"      hits  95.0 %: 3000 in VRAM (75.0 %), 800 in memory, 200 misses\n"
		"    stalls  12.0 us a token, of 8 tokens\n"
		"      disk  11 blocks, 4.4 kB, 4 MB/s; read amplification 1.000; 13 errors\n"
		"  prefetch  on: 3 blocks used, 4 wasted\n"
		"    faults  15 major faults of compute threads; the kernel took 16 blocks; 17 times a block "
		"was twice in memory; 14 pages left behind\n"
		"  pressure  2.5 % of the last 10 s; 5.1 GB available; budget lowered 18 times, raised 19 "
		"times\n"
		"\n"
		"layer  experts      block    VRAM       in memory    disk       in VRAM     in memory        "
		"misses  hit %\n"
		"    3        4      400 B       1       1  25.0 %       2          2900            30            "
		"10   99.7\n"
		"    4        2      400 B       0       1  50.0 %       1           100             0             "
		"1   99.0\n");
	assert_string_equal(r.err, "");
}

static void command_residency_without_gpu(void **state)
{
	const char *const frames[] = { "{\"parameters\":" REPLY_HOST "}", NULL };
	struct run r = {};

	(void)state;
	run(&r, ctl_residency, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_null(strstr(r.out, "VRAM"));
	assert_has(r.out, "      hits  80.0 %: 800 hits, 200 misses\n");
	assert_has(r.out,
		   "layer  experts      block       in memory    disk          hits        misses  hit %\n"
		   "    3        4      400 B       2  50.0 %       2            30            10   75.0\n");
}

/* ---- the GPU, as `residentctl status` has it ---- */

static void assert_gpu(const struct resident_gpu *gpu, const char *expected)
{
	struct buf text = {};

	assert_int_equal(ctl_gpu_text(&text, gpu), 0);
	assert_string_equal(text.data, expected);
	buf_done(&text);
}

static void gpu_text(void **state)
{
	struct resident_gpu g = { .state = "none" };

	(void)state;
	assert_gpu(&g, "not used");
	g.why = "";
	assert_gpu(&g, "not used");
	g.why = "cannot load libcuda.so.1: no such file";
	assert_gpu(&g, "none: cannot load libcuda.so.1: no such file");
	g = (struct resident_gpu){ .state = "active",
				   .name = "NVIDIA GeForce RTX 3070",
				   .capability = "8.6",
				   .driver = "12.2",
				   .code = "binary",
				   .total_bytes = 8000000000,
				   .state_s = 182 };
	assert_gpu(&g, "NVIDIA GeForce RTX 3070 (8.6, CUDA 12.2, machine code), 8 GB");
	g.code = "ptx";
	g.lost = 2;
	assert_gpu(&g, "NVIDIA GeForce RTX 3070 (8.6, CUDA 12.2, PTX, compiled by the driver), lost 2 times, 8 GB");
	g.state = "degraded";
	g.why = "cuMemcpy: the device is lost";
	g.code = "binary";
	assert_gpu(&g, "degraded for 3 min 2 s: cuMemcpy: the device is lost; the CPU computes until it is back: "
		       "NVIDIA GeForce RTX 3070 (8.6, CUDA 12.2, machine code), lost 2 times, 8 GB");
	g.state = "none";
	g.why = "no kernel for a type of this model";
	assert_gpu(&g, "none: NVIDIA GeForce RTX 3070 is not used: no kernel for a type of this model");
	/* What is no card is never taken for one. */
	g = (struct resident_gpu){ .state = "active",
				   .name = "Emulator",
				   .capability = "7.5",
				   .driver = "12.2",
				   .code = "emulator",
				   .emulator = true,
				   .total_bytes = 64000000 };
	assert_gpu(&g, "Emulator (an emulator: for tests, its speed means nothing), 64 MB");
	/* Nothing but what every service tells. */
	g = (struct resident_gpu){ .state = "later" };
	assert_gpu(&g, "later for 0 s: no reason given; the CPU computes until it is back: "
		       "GPU (?, CUDA ?, unknown code), 0 B");
}

static void command_residency_without_model(void **state)
{
	const char *const frames[] = { "{\"parameters\":" REPLY_NONE "}", NULL };
	struct run r = {};

	(void)state;
	run(&r, ctl_residency, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_string_equal(r.out, "     model  none\n      tier  none: no model is loaded\n");
}

static void command_residency_json(void **state)
{
	const char *const frames[] = { "{\"parameters\":{\"later\":[1]}}", NULL };
	struct run r = { .c.json = true };

	(void)state;
	run(&r, ctl_residency, frames);
	assert_string_equal(r.out, "{\"later\":[1]}\n");
	r = (struct run){};
	run(&r, ctl_residency, frames);
	assert_int_equal(r.e, EXIT_ERROR);
	assert_string_equal(r.out, "");
	assert_string_equal(
		r.err, "residentctl: the service does not speak the protocol: 'tier' is missing\n");
}

static void command_svg(void **state)
{
	const char *const frames[] = { "{\"parameters\":" REPLY_BLOCKS "}", NULL };
	const char *const no[] = { NOT_AUTHORIZED, NULL };
	struct run r = { .c.svg = "-" };

	(void)state;
	run(&r, ctl_residency, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_well_formed(r.out);
	r = (struct run){ .c.svg = "-" };
	run(&r, ctl_residency, no);
	assert_int_equal(r.e, EXIT_ERROR);
	assert_string_equal(r.out, "");
	assert_has(r.err, "ask as root or the service's user\n");
}

#define LINE_0 "{\\\"tok\\\": 0, \\\"layers\\\": [[1, 2], [0, 3]]}"
#define LINE_1 "{\\\"tok\\\": 1, \\\"layers\\\": [[0, 1], [2, 3]]}"
#define LINES                                          \
	"{\"tok\": 0, \"layers\": [[1, 2], [0, 3]]}\n" \
	"{\"tok\": 1, \"layers\": [[0, 1], [2, 3]]}\n"
#define FRAME(line) "{\"parameters\":{\"line\":\"" line "\"},\"continues\":true}"

static void record_to_output(void **state)
{
	/* The frame without a line, and the newline at its end, are the service's choice. */
	const char *const frames[] = { FRAME(LINE_0), "{\"parameters\":{},\"continues\":true}",
				       FRAME(LINE_1 "\\n"), "{\"parameters\":{}}", NULL };
	struct run r = { .s.hold = true };

	(void)state;
	run(&r, ctl_trace_record, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_string_equal(r.out, LINES);
	assert_string_equal(r.err, "residentctl: lines recorded: 2\n");
}

/* The count is the client's to keep, too. */
static void record_count(void **state)
{
	const char *const frames[] = { FRAME(LINE_0), FRAME(LINE_1), FRAME(LINE_1), FRAME(LINE_1), NULL };
	static const char *const bad[] = { "0", "-1", "x", "1x", "", "99999999999999999999" };
	struct run r = { .s.hold = true, .c.tokens = "2" };

	(void)state;
	run(&r, ctl_trace_record, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_string_equal(r.out, LINES);
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		r = (struct run){ .c.tokens = bad[i] };
		run(&r, ctl_trace_record, frames);
		assert_int_equal(r.e, EXIT_USAGE);
	}
}

static void assert_file(const char *path, const char *expected)
{
	char text[4096];
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	assert_true(fd >= 0);
	take(fd, text, sizeof(text));
	assert_string_equal(text, expected);
}

static void record_to_file(void **state)
{
	const char *const frames[] = { FRAME(LINE_0), FRAME(LINE_1), "{\"parameters\":{}}", NULL };
	const char *const no[] = { NOT_AUTHORIZED, NULL };
	char path[] = "/tmp/test-residency-view-XXXXXX";
	struct stat st;
	struct run r = { .c.output = path };
	int fd = mkstemp(path);

	(void)state;
	assert_int_equal(write(fd, "precious\n", 9), 9);
	close(fd);
	run(&r, ctl_trace_record, frames);
	assert_int_equal(r.e, EXIT_ERROR);
	assert_has(r.err, "File exists; --force overwrites it\n");
	assert_file(path, "precious\n");

	/* Nothing to put there: what was there stays. */
	r = (struct run){ .c.output = path, .c.force = true };
	run(&r, ctl_trace_record, no);
	assert_int_equal(r.e, EXIT_ERROR);
	assert_has(r.err, "ask as root or the service's user\n");
	assert_file(path, "precious\n");

	r = (struct run){ .c.output = path, .c.force = true };
	run(&r, ctl_trace_record, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_string_equal(r.out, "");
	assert_file(path, LINES);

	unlink(path);
	r = (struct run){ .c.output = path };
	run(&r, ctl_trace_record, no);
	assert_int_equal(access(path, F_OK), -1);
	r = (struct run){ .c.output = path };
	run(&r, ctl_trace_record, frames);
	assert_int_equal(r.e, EXIT_OK);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
	unlink(path);
}

static void record_cut_short(void **state)
{
	const char *const frames[] = { FRAME(LINE_0), FRAME(LINE_1), NULL };
	struct run r = {};

	(void)state;
	run(&r, ctl_trace_record, frames);
	assert_int_equal(r.e, EXIT_NO_SERVICE);
	assert_string_equal(r.out, LINES);
	assert_has(r.err, "the service has ended the connection");
	assert_has(r.err, "lines recorded: 2\n");
}

static void record_bad_frames(void **state)
{
	static const char *const bad[] = { "{\"parameters\":{\"line\":1},\"continues\":true}",
					   FRAME("a\\nb"),
					   FRAME(""),
					   FRAME("\\n"),
					   "[]",
					   "{",
					   "nonsense" };

	(void)state;
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		const char *const frames[] = { FRAME(LINE_0), FRAME(LINE_1), bad[i], NULL };
		struct run r = { .s.hold = true };

		run(&r, ctl_trace_record, frames);
		assert_int_equal(r.e, EXIT_ERROR);
		assert_string_equal(r.out, LINES);
		assert_has(r.err, "the service does not speak the protocol");
	}
}

static void *interrupt(void *path)
{
	struct stat st = {};

	while (stat(path, &st) < 0 || st.st_size == 0)
		usleep(1000);
	kill(getpid(), SIGINT);
	return NULL;
}

static void record_until_interrupted(void **state)
{
	const char *const frames[] = { FRAME(LINE_0), NULL };
	char path[] = "/tmp/test-residency-view-XXXXXX";
	struct run r = { .s.hold = true, .c.output = path };
	pthread_t thread;

	(void)state;
	close(mkstemp(path));
	unlink(path);
	assert_int_equal(pthread_create(&thread, NULL, interrupt, path), 0);
	run(&r, ctl_trace_record, frames);
	pthread_join(thread, NULL);
	assert_int_equal(r.e, EXIT_OK);
	assert_string_equal(r.err, "residentctl: lines recorded: 1\n");
	assert_file(path, "{\"tok\": 0, \"layers\": [[1, 2], [0, 3]]}\n");
	unlink(path);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(read_all),
		cmocka_unit_test(read_without_blocks),
		cmocka_unit_test(read_huge_hits),
		cmocka_unit_test(read_unknown_fields),
		cmocka_unit_test(refuse_every_field),
		cmocka_unit_test(refuse_values),
		cmocka_unit_test(refuse_long_histogram),
		cmocka_unit_test(amplification),
		cmocka_unit_test(draw_heat_map),
		cmocka_unit_test(draw_hostile_name),
		cmocka_unit_test(draw_nothing),
		cmocka_unit_test(top_full),
		cmocka_unit_test(top_small),
		cmocka_unit_test(top_any_size),
		cmocka_unit_test(top_hostile_text),
		cmocka_unit_test(top_without_model),
		cmocka_unit_test(command_residency),
		cmocka_unit_test(command_residency_without_gpu),
		cmocka_unit_test(gpu_text),
		cmocka_unit_test(command_residency_without_model),
		cmocka_unit_test(command_residency_json),
		cmocka_unit_test(command_svg),
		cmocka_unit_test(record_to_output),
		cmocka_unit_test(record_count),
		cmocka_unit_test(record_to_file),
		cmocka_unit_test(record_cut_short),
		cmocka_unit_test(record_bad_frames),
		cmocka_unit_test(record_until_interrupted),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
