/* SPDX-License-Identifier: MIT */
/*
 * Blocks and trunk of small models built byte by byte, of a split one, and of the model in
 * tests/models; what hostile expert tensors are refused for.
 */
#include "tests/test.h"

#include "daemon/residency/catalog.h"
#include "tests/unit/gguf-build.h"

#define TOY "tests/models/tiny-qwen35moe-stories-q8_0.gguf"

struct made {
	void *data;
	struct gguf *g;
	struct catalog *c;
};

/* A tensor of F32, unless its type is said; zeros. */
static void add_typed(struct gguf_build *b, const char *name, uint32_t type, uint64_t ne0,
		      uint64_t ne1, uint64_t ne2)
{
	const uint64_t ne[] = { ne0, ne1, ne2 };
	size_t bytes = quant_row_bytes(type, ne0) * ne1 * ne2;
	_cleanup_(freep) void *zeros = calloc(1, bytes);

	assert_non_null(zeros);
	gguf_build_tensor(b, name, type, 3, ne, zeros, bytes);
}

static void add(struct gguf_build *b, const char *name, uint64_t ne0, uint64_t ne1, uint64_t ne2)
{
	add_typed(b, name, QUANT_F32, ne0, ne1, ne2);
}

static void made_done(struct made *m)
{
	catalog_free(m->c);
	gguf_close(m->g);
	free(m->data);
}

static struct made make(struct gguf_build *b, uint32_t n_layers)
{
	_cleanup_(freep) char *error = NULL;
	struct made m = {};
	size_t bytes;

	m.data = gguf_build_done(b, &bytes);
	if (gguf_open_memory(m.data, bytes, "image", &m.g, &error) < 0 ||
	    catalog_new(m.g, n_layers, &m.c, &error) < 0)
		fail_msg("%s", error ? error : "no error text");
	assert_null(error);
	return m;
}

static void refuse_layers(struct gguf_build *b, uint32_t n_layers, const char *want)
{
	struct catalog *const untouched = (struct catalog *)&untouched;
	struct catalog *c = untouched;
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(freep) char *error = NULL;
	_cleanup_(freep) void *data = NULL;
	size_t bytes;

	data = gguf_build_done(b, &bytes);
	assert_int_equal(gguf_open_memory(data, bytes, "image", &g, NULL), 0);
	assert_int_equal(catalog_new(g, n_layers, &c, &error), -EBADMSG);
	assert_ptr_equal(c, untouched);
	assert_string_equal(error, want);
	assert_int_equal(catalog_new(g, n_layers, &c, NULL), -EBADMSG);
}

static void refuse(struct gguf_build *b, const char *want)
{
	refuse_layers(b, 0, want);
}

/* Offset in the data section, whose start is where the first tensor lies. */
static uint64_t in_data(const struct made *m, uint64_t offset)
{
	return offset - gguf_tensor_at(m->g, 0)->offset;
}

/*
 * Property of every catalog: blocks, trunk and what is unused cover every tensor's bytes once, and
 * the data is where the range says.
 */
static void check_cover(const struct gguf *g, const struct catalog *c)
{
	uint64_t blocks = 0, trunk = 0, tensors = 0, padding = 0;

	for (uint32_t i = 0; i < c->n_blocks; i++) {
		struct catalog_block b;
		uint64_t sum = 0;

		catalog_block(c, i, &b);
		assert_int_equal(catalog_layer_of(c, i), b.layer);
		assert_int_equal(catalog_block_bytes(c, i), b.bytes);
		assert_int_equal(c->layers[b.layer].first_block + b.expert, i);
		for (uint32_t k = 0; k < b.n_ranges; k++) {
			const struct gguf_part *p = gguf_part(g, b.range[k].part);

			sum += b.range[k].bytes;
			assert_true(b.range[k].offset + b.range[k].bytes <= p->bytes);
			assert_ptr_equal(b.range[k].data, (const char *)p->data + b.range[k].offset);
		}
		assert_int_equal(sum, b.bytes);
		assert_true(sum <= c->block_bytes_max);
		blocks += sum;
	}
	assert_int_equal(blocks, c->block_bytes);
	for (size_t i = 0; i < c->n_trunk; i++) {
		const struct catalog_range *r = &c->trunk[i];

		assert_ptr_equal(r->data, (const char *)gguf_part(g, r->part)->data + r->offset);
		if (i > 0 && r->part == r[-1].part)
			assert_true(r->offset > r[-1].offset + r[-1].bytes);
		trunk += r->bytes;
	}
	assert_int_equal(trunk, c->trunk_bytes);
	for (size_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);

		tensors += t->bytes;
		padding += -t->bytes % 32;
	}
	assert_true(blocks + trunk + c->unused_bytes >= tensors);
	assert_true(blocks + trunk + c->unused_bytes <= tensors + padding);
}

/* ---- what there is ---- */

static void test_blocks(void **unused)
{
	struct gguf_build b = gguf_build_new();
	struct catalog_block k;
	struct made m;

	(void)unused;
	add(&b, "token_embd.weight", 8, 2, 1);             /* 0: 64 */
	add(&b, "blk.0.attn_norm.weight", 3, 1, 1);        /* 64: 12, padded to 96 */
	add(&b, "blk.0.ffn_up.weight", 8, 1, 1);           /* 96: 32 */
	add(&b, "blk.1.ffn_gate_exps.weight", 4, 2, 3);    /* 128: 3 of 32 */
	add(&b, "blk.1.ffn_gate_inp.weight", 8, 1, 1);     /* 224: 32 */
	add(&b, "blk.1.ffn_up_exps.weight", 4, 2, 3);      /* 256: 3 of 32 */
	add(&b, "blk.1.ffn_down_exps.weight", 2, 5, 3);    /* 352: 3 of 40, padded to 480 */
	add(&b, "blk.3.ffn_gate_up_exps.weight", 8, 4, 2); /* 480: 2 of 128 */
	add(&b, "blk.3.ffn_down_exps.weight", 4, 4, 2);    /* 736: 2 of 64 */
	add(&b, "output.weight", 8, 1, 1);                 /* 864: 32 */
	m = make(&b, 0);
	assert_ptr_equal(m.c->gguf, m.g);
	assert_int_equal(m.c->n_layers, 4);
	assert_int_equal(m.c->n_blocks, 5);
	assert_int_equal(m.c->n_expert_layers, 2);
	assert_int_equal(m.c->expert_layers[0], 1);
	assert_int_equal(m.c->expert_layers[1], 3);
	assert_true(m.c->layers[0].first_block == CATALOG_NONE);
	assert_int_equal(m.c->layers[1].first_block, 0);
	assert_true(m.c->layers[2].first_block == CATALOG_NONE);
	assert_int_equal(m.c->layers[3].first_block, 3);
	assert_int_equal(m.c->layers[1].n_expert, 3);
	assert_int_equal(m.c->layers[1].block_bytes, 104);
	assert_int_equal(m.c->layers[3].block_bytes, 192);
	assert_int_equal(m.c->layers[3].expert_bytes[0], 128);
	assert_int_equal(m.c->layers[3].expert_bytes[2], 64);
	assert_null(m.c->layers[3].matrix[1]);
	assert_ptr_equal(m.c->layers[1].matrix[2], gguf_tensor(m.g, "blk.1.ffn_down_exps.weight"));
	assert_int_equal(m.c->block_bytes, 3 * 104 + 2 * 192);
	assert_int_equal(m.c->block_bytes_max, 192);
	assert_int_equal(m.c->unused_bytes, 0);

	catalog_block(m.c, 2, &k);
	assert_int_equal(k.layer, 1);
	assert_int_equal(k.expert, 2);
	assert_int_equal(k.n_ranges, 3);
	assert_int_equal(in_data(&m, k.range[0].offset), 128 + 64);
	assert_int_equal(in_data(&m, k.range[1].offset), 256 + 64);
	assert_int_equal(in_data(&m, k.range[2].offset), 352 + 80);
	assert_int_equal(k.range[2].bytes, 40);
	catalog_block(m.c, 4, &k);
	assert_int_equal(k.layer, 3);
	assert_int_equal(k.expert, 1);
	assert_int_equal(k.n_ranges, 2);
	assert_int_equal(in_data(&m, k.range[0].offset), 480 + 128);
	assert_int_equal(in_data(&m, k.range[1].offset), 736 + 64);

	assert_int_equal(m.c->n_trunk, 3);
	assert_int_equal(in_data(&m, m.c->trunk[0].offset), 0);
	assert_int_equal(m.c->trunk[0].bytes, 128);
	assert_int_equal(in_data(&m, m.c->trunk[1].offset), 224);
	assert_int_equal(m.c->trunk[1].bytes, 32);
	assert_int_equal(in_data(&m, m.c->trunk[2].offset), 864);
	assert_int_equal(m.c->trunk_bytes, 128 + 32 + 32);
	check_cover(m.g, m.c);
	made_done(&m);
	assert_null(catalog_free(NULL));
}

/* Layers that do not run are nobody's: neither trunk nor blocks, whatever their tensors say. */
static void test_unused_layers(void **unused)
{
	struct gguf_build b = gguf_build_new();
	struct made m;

	(void)unused;
	add(&b, "blk.0.ffn_gate_exps.weight", 4, 2, 3);
	add(&b, "blk.0.ffn_down_exps.weight", 4, 2, 3);
	add(&b, "blk.1.ffn_gate_exps.weight", 4, 2, 7);
	add(&b, "blk.1.nextn.eh_proj.weight", 4, 2, 1);
	add(&b, "blk.99999999999999999999.x", 8, 1, 1);
	add(&b, "output.weight", 8, 1, 1);
	m = make(&b, 1);
	assert_int_equal(m.c->n_layers, 1);
	assert_int_equal(m.c->n_blocks, 3);
	assert_int_equal(m.c->unused_bytes, 7 * 32 + 32 + 32);
	assert_int_equal(m.c->n_trunk, 1);
	assert_int_equal(m.c->trunk_bytes, 32);
	check_cover(m.g, m.c);
	made_done(&m);

	/* More layers than there are tensors of. */
	add(&b, "blk.0.x", 8, 1, 1);
	m = make(&b, 3);
	assert_int_equal(m.c->n_layers, 3);
	assert_true(m.c->layers[2].first_block == CATALOG_NONE);
	made_done(&m);
}

static void test_no_experts(void **unused)
{
	struct gguf_build b = gguf_build_new();
	struct made m = make(&b, 0);

	(void)unused;
	assert_int_equal(m.c->n_layers, 0);
	assert_int_equal(m.c->n_blocks, 0);
	assert_int_equal(m.c->n_trunk, 0);
	made_done(&m);

	add(&b, "blk.0.ffn_gate.weight", 4, 2, 1);
	add(&b, "blk.1.ffn_gate.weight", 4, 2, 1);
	m = make(&b, 0);
	assert_int_equal(m.c->n_layers, 2);
	assert_int_equal(m.c->n_blocks, 0);
	assert_int_equal(m.c->n_trunk, 1);
	assert_int_equal(m.c->trunk_bytes, 64);
	made_done(&m);
}

/* Experts with an up matrix alone, as of a feed-forward without a gate. */
static void test_no_gate(void **unused)
{
	struct gguf_build b = gguf_build_new();
	struct catalog_block k;
	struct made m;

	(void)unused;
	add(&b, "blk.0.ffn_up_exps.weight", 8, 1, 2);
	add(&b, "blk.0.ffn_down_exps.weight", 8, 2, 2);
	m = make(&b, 0);
	catalog_block(m.c, 1, &k);
	assert_int_equal(k.n_ranges, 2);
	assert_int_equal(k.range[0].bytes, 32);
	assert_int_equal(k.range[1].bytes, 64);
	check_cover(m.g, m.c);
	made_done(&m);
}

/* Q4_K_M gives some layers a finer down matrix: blocks of two sizes. */
static void test_mixed_types(void **unused)
{
	struct gguf_build b = gguf_build_new();
	struct made m;

	(void)unused;
	for (unsigned i = 0; i < 2; i++) {
		char name[64];

		snprintf(name, sizeof(name), "blk.%u.ffn_gate_exps.weight", i);
		add_typed(&b, name, QUANT_Q4_K, 256, 2, 4);
		snprintf(name, sizeof(name), "blk.%u.ffn_up_exps.weight", i);
		add_typed(&b, name, QUANT_Q4_K, 256, 2, 4);
		snprintf(name, sizeof(name), "blk.%u.ffn_down_exps.weight", i);
		add_typed(&b, name, i == 0 ? QUANT_Q6_K : QUANT_Q4_K, 256, 2, 4);
	}
	m = make(&b, 0);
	assert_int_equal(catalog_block_bytes(m.c, 3), 2 * 144 + 2 * 144 + 2 * 210);
	assert_int_equal(catalog_block_bytes(m.c, 4), 6 * 144);
	assert_int_equal(m.c->block_bytes_max, 996);
	assert_int_equal(m.c->block_bytes, 4 * 996 + 4 * 864);
	check_cover(m.g, m.c);
	made_done(&m);
}

/* What only looks like experts or layers is trunk. */
static void test_other_names(void **unused)
{
	static const char *const names[] = { "blk.",
					     "blk..ffn_gate_exps.weight",
					     "blk.0",
					     "blk.00.ffn_gate_exps.weight",
					     "blk.01.ffn_gate_exps.weight",
					     "blk.-1.ffn_gate_exps.weight",
					     "blk.1x.ffn_gate_exps.weight",
					     "blk.99999999999999999999",
					     "blk.0.ffn_gate_exps.bias",
					     "blk.0.ffn_gate_exps.weight2",
					     "blk.0.ffn_gate_exps",
					     "blk.0.ffn_gate_chexps.weight",
					     "xblk.0.ffn_gate_exps.weight",
					     "b",
					     "ffn_gate_exps.weight" };
	struct gguf_build b = gguf_build_new();
	struct made m;

	(void)unused;
	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		add(&b, names[i], 8, 1, 2);
	m = make(&b, 0);
	assert_int_equal(m.c->n_blocks, 0);
	assert_int_equal(m.c->n_layers, 1);
	assert_int_equal(m.c->n_trunk, 1);
	assert_int_equal(m.c->trunk_bytes, 64 * ARRAY_SIZE(names));
	made_done(&m);
}

/* Directories need not be in the order of the data, and holes larger than any alignment are no padding. */
static void test_order_and_holes(void **unused)
{
	const uint64_t ne[] = { 8 };
	struct gguf_build b = gguf_build_new();
	struct made m;

	(void)unused;
	gguf_build_info(&b, "d", QUANT_F32, 1, ne, 65536 + 128);
	gguf_build_info(&b, "c", QUANT_F32, 1, ne, 128 + 32 - 32);
	gguf_build_info(&b, "a", QUANT_F32, 1, ne, 0);
	gguf_build_info(&b, "e", QUANT_F32, 1, ne, 2 * 65536 + 128 + 64);
	for (size_t i = 0; i < 2 * 65536 + 128 + 96; i++)
		gguf_put(&b.data, "", 1);
	m = make(&b, 0);
	/* Between c's end at 160 and d is less than 64 KiB, between d and e it is 64 KiB. */
	assert_int_equal(m.c->n_trunk, 2);
	assert_int_equal(m.c->trunk[0].offset, gguf_tensor(m.g, "a")->offset);
	assert_int_equal(m.c->trunk[0].bytes, 65536 + 128 + 32);
	assert_int_equal(m.c->trunk[1].offset, gguf_tensor(m.g, "e")->offset);
	assert_int_equal(m.c->trunk[1].bytes, 32);
	made_done(&m);
}

/* ---- what is refused ---- */

static void test_refusals(void **unused)
{
	struct gguf_build b = gguf_build_new();
	const uint64_t four[] = { 8, 1, 2, 2 };

	(void)unused;
	add(&b, "blk.0.ffn_gate_exps.weight", 8, 1, 2);
	add(&b, "blk.0.ffn_up_exps.weight", 8, 1, 2);
	refuse(&b, "image: tensor \"blk.0.ffn_gate_exps.weight\": the layer has no ffn_down_exps.weight");
	add(&b, "blk.0.ffn_down_exps.weight", 8, 1, 2);
	refuse(&b, "image: tensor \"blk.0.ffn_down_exps.weight\": the layer has neither gate nor up");
	add(&b, "blk.0.ffn_gate_exps.weight", 8, 1, 2);
	add(&b, "blk.0.ffn_down_exps.weight", 8, 1, 3);
	refuse(&b, "image: tensor \"blk.0.ffn_down_exps.weight\": has 3 experts, another tensor of the "
		   "layer has 2");
	add(&b, "blk.0.ffn_gate_exps.weight", 8, 1, 2);
	add(&b, "blk.0.ffn_gate_up_exps.weight", 8, 1, 2);
	refuse(&b, "image: tensor \"blk.0.ffn_gate_up_exps.weight\": the layer has "
		   "\"blk.0.ffn_gate_exps.weight\" too");
	add(&b, "blk.0.ffn_gate_up_exps.weight", 8, 1, 2);
	add(&b, "blk.0.ffn_up_exps.weight", 8, 1, 2);
	add(&b, "blk.0.ffn_down_exps.weight", 8, 1, 2);
	refuse(&b, "image: tensor \"blk.0.ffn_up_exps.weight\": the layer has "
		   "\"blk.0.ffn_gate_up_exps.weight\" too");
	gguf_build_tensor(&b, "blk.0.ffn_gate_exps.weight", QUANT_F32, 4, four, (char[128]){}, 128);
	refuse(&b, "image: tensor \"blk.0.ffn_gate_exps.weight\": has 4 dimensions");
}

static void test_absurd_counts(void **unused)
{
	struct gguf_build b = gguf_build_new();

	(void)unused;
	add(&b, "blk.65535.x", 8, 1, 1);
	add(&b, "blk.65536.x", 8, 1, 1);
	refuse(&b, "image: tensor \"blk.65536.x\": its layer is above 65535");
	add(&b, "blk.4294967296.x", 8, 1, 1);
	refuse(&b, "image: tensor \"blk.4294967296.x\": its layer is above 65535");
	add(&b, "x", 8, 1, 1);
	refuse_layers(&b, 65537, "image: 65537 layers, more than 65536");
	add(&b, "blk.0.ffn_gate_exps.weight", 1, 1, 1048577);
	refuse(&b, "image: tensor \"blk.0.ffn_gate_exps.weight\": 1048577 experts, more than 1048576");
	for (unsigned i = 0; i < 2; i++) {
		char name[64];

		snprintf(name, sizeof(name), "blk.%u.ffn_gate_exps.weight", i);
		add(&b, name, 1, 1, i == 0 ? 1048576 : 1);
		snprintf(name, sizeof(name), "blk.%u.ffn_down_exps.weight", i);
		add(&b, name, 1, 1, i == 0 ? 1048576 : 1);
	}
	refuse(&b, "image: tensor \"blk.1.ffn_gate_exps.weight\": with its 1 experts the model has more "
		   "than 1048576");
}

/* ---- identity ---- */

static uint64_t identity_of(const char *name, uint32_t type, uint64_t ne1, uint64_t hole, size_t more)
{
	const uint64_t ne[] = { 32, ne1 };
	struct gguf_build b = gguf_build_new();
	struct made m;
	uint64_t id;

	gguf_build_info(&b, name, type, 2, ne, hole);
	for (size_t i = 0; i < 1024 + more; i++)
		gguf_put(&b.data, "", 1);
	m = make(&b, 0);
	id = m.c->identity;
	made_done(&m);
	return id;
}

static void test_identity(void **unused)
{
	const uint64_t id = identity_of("a", QUANT_F32, 2, 0, 0);

	(void)unused;
	assert_int_equal(id, identity_of("a", QUANT_F32, 2, 0, 0));
	assert_int_not_equal(id, identity_of("b", QUANT_F32, 2, 0, 0));
	assert_int_not_equal(id, identity_of("a", QUANT_Q8_0, 2, 0, 0));
	assert_int_not_equal(id, identity_of("a", QUANT_F32, 3, 0, 0));
	assert_int_not_equal(id, identity_of("a", QUANT_F32, 2, 32, 0));
	assert_int_not_equal(id, identity_of("a", QUANT_F32, 2, 0, 1));
}

/* ---- files ---- */

static void test_toy(void **unused)
{
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(catalog_freep) struct catalog *c = NULL;
	struct catalog_block b;

	(void)unused;
	assert_int_equal(gguf_open(TOY, &g, NULL), 0);
	assert_int_equal(catalog_new(g, 8, &c, NULL), 0);
	assert_int_equal(c->n_layers, 8);
	assert_int_equal(c->n_blocks, 256);
	assert_int_equal(c->block_bytes_max, 26112);
	assert_int_equal(c->block_bytes, 6684672);
	assert_int_equal(c->trunk_bytes, 1639424);
	assert_int_equal(c->unused_bytes, 0);
	/* It is in the names of heat files: another one is a cold start for everybody. */
	assert_int_equal(c->identity, 0x38b00124de267827);
	/* 149 tensors, 24 of them experts' in 8 groups of neighbours. */
	assert_int_equal(c->n_trunk, 9);
	assert_int_equal(c->trunk[0].offset, 70912);
	assert_int_equal(c->trunk[0].bytes, 370944);
	catalog_block(c, 3 * 32 + 5, &b);
	assert_int_equal(b.layer, 3);
	assert_int_equal(b.expert, 5);
	assert_int_equal(b.range[0].offset, 3370496 + 5 * 8704);
	assert_int_equal(b.range[1].offset, 3649024 + 5 * 8704);
	assert_int_equal(b.range[2].offset, 3927552 + 5 * 8704);
	assert_int_equal(b.range[2].bytes, 8704);
	check_cover(g, c);
}

static void write_part(const char *dir, uint32_t no, struct gguf_build *b)
{
	const uint32_t count = 2, n_tensors = 5;
	char path[512];

	gguf_build_raw(b, "split.no", GGUF_U16, &no, 2);
	gguf_build_raw(b, "split.count", GGUF_U16, &count, 2);
	gguf_build_raw(b, "split.tensors.count", GGUF_I32, &n_tensors, 4);
	snprintf(path, sizeof(path), "%s/m-%05u-of-00002.gguf", dir, (unsigned)no + 1);
	gguf_build_write(b, path);
}

/* The matrices of a block in two files; the trunk ends with one and begins again in the other. */
static void test_split(void **unused)
{
	char dir[256], path[512];
	struct gguf_build b = gguf_build_new();
	_cleanup_(gguf_closep) struct gguf *g = NULL;
	_cleanup_(catalog_freep) struct catalog *c = NULL;
	struct catalog_block k;

	(void)unused;
	snprintf(dir, sizeof(dir), "%s/test-catalog-XXXXXX", getenv("TMPDIR") ?: P_tmpdir);
	assert_non_null(mkdtemp(dir));
	add(&b, "blk.0.ffn_gate_exps.weight", 8, 1, 2);
	add(&b, "token_embd.weight", 8, 1, 1);
	write_part(dir, 0, &b);
	add(&b, "output.weight", 8, 1, 1);
	add(&b, "blk.0.ffn_up_exps.weight", 8, 1, 2);
	add(&b, "blk.0.ffn_down_exps.weight", 8, 2, 2);
	write_part(dir, 1, &b);
	snprintf(path, sizeof(path), "%s/m-00001-of-00002.gguf", dir);
	assert_int_equal(gguf_open(path, &g, NULL), 0);
	remove(path);
	snprintf(path, sizeof(path), "%s/m-00002-of-00002.gguf", dir);
	remove(path);
	rmdir(dir);

	assert_int_equal(catalog_new(g, 0, &c, NULL), 0);
	assert_int_equal(c->n_blocks, 2);
	catalog_block(c, 1, &k);
	assert_int_equal(k.range[0].part, 0);
	assert_int_equal(k.range[0].offset, gguf_tensor(g, "blk.0.ffn_gate_exps.weight")->offset + 32);
	assert_int_equal(k.range[1].part, 1);
	assert_int_equal(k.range[2].part, 1);
	assert_int_equal(k.range[2].offset, gguf_tensor(g, "blk.0.ffn_down_exps.weight")->offset + 64);
	assert_int_equal(c->n_trunk, 2);
	assert_int_equal(c->trunk[0].part, 0);
	assert_int_equal(c->trunk[1].part, 1);
	assert_int_equal(c->trunk_bytes, 64);
	check_cover(g, c);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_blocks),
		cmocka_unit_test(test_unused_layers),
		cmocka_unit_test(test_no_experts),
		cmocka_unit_test(test_no_gate),
		cmocka_unit_test(test_mixed_types),
		cmocka_unit_test(test_other_names),
		cmocka_unit_test(test_order_and_holes),
		cmocka_unit_test(test_refusals),
		cmocka_unit_test(test_absurd_counts),
		cmocka_unit_test(test_identity),
		cmocka_unit_test(test_toy),
		cmocka_unit_test(test_split),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
