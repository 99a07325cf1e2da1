/* SPDX-License-Identifier: MIT */
/*
 * expert-file.h: a small model file with experts, on a disk, for tests of what reads it.
 *
 * Seven layers: two usual ones, one with gate and up in one matrix, one without experts, one of
 * another type and size, one of experts larger than 2 MiB in all, and a last one that ends the file
 * in the middle of a page. Matrices begin at multiples of 32 that are no multiples of a sector. The
 * bytes are random, so that nothing is mistaken for anything else.
 */
#pragma once

#include "daemon/residency/catalog.h"
#include "tests/unit/gguf-build.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#define FILE_PAGE 4096U

struct expert_file {
	char dir[256], path[300];
	bool has_page_cache; /* of a disk's file: tmpfs cannot be dropped */
	int fd;
	uint64_t bytes;
	uint8_t *copy; /* what is in the file */
	uint8_t *map;  /* a mapping of its own, never touched: to see the page cache by */
	struct gguf *g;
	struct catalog *c;
	uint64_t seed;
};

static inline uint64_t file_rnd(struct expert_file *f, uint64_t n)
{
	f->seed ^= f->seed << 13;
	f->seed ^= f->seed >> 7;
	f->seed ^= f->seed << 17;
	return (f->seed >> 11) % n;
}

static inline void file_tensor(struct expert_file *f, struct gguf_build *b, const char *name,
			       uint32_t type, uint64_t ne0, uint64_t ne1, uint64_t ne2)
{
	const uint64_t ne[] = { ne0, ne1, ne2 };
	size_t bytes = quant_row_bytes(type, ne0) * ne1 * ne2;
	_cleanup_(freep) uint8_t *p = malloc(bytes);

	if (!p)
		abort();
	for (size_t i = 0; i < bytes; i++)
		p[i] = (uint8_t)file_rnd(f, 256);
	gguf_build_tensor(b, name, type, 3, ne, p, bytes);
}

static inline void file_layer(struct expert_file *f, struct gguf_build *b, unsigned layer,
			      uint32_t type, uint64_t rows, uint64_t n_expert)
{
	char name[64];

	snprintf(name, sizeof(name), "blk.%u.attn_norm.weight", layer);
	file_tensor(f, b, name, QUANT_F32, 8 + 16 * layer, 3, 1);
	for (unsigned i = 0; i < 3; i++) {
		static const char *const names[] = { "gate", "up", "down" };

		snprintf(name, sizeof(name), "blk.%u.ffn_%s_exps.weight", layer, names[i]);
		file_tensor(f, b, name, type, 256, i < 2 ? rows : rows + 7, n_expert);
	}
}

static inline void file_build(struct expert_file *f, struct gguf_build *b)
{
	/*
	 * Here and at the output at least one huge page of the file is within, and blocks lie
	 * before and behind the latter.
	 */
	file_tensor(f, b, "token_embd.weight", QUANT_F32, 1024, 1700, 1);
	file_layer(f, b, 0, QUANT_Q4_K, 333, 12);
	file_layer(f, b, 1, QUANT_Q4_K, 333, 12);
	file_tensor(f, b, "blk.2.ffn_gate_up_exps.weight", QUANT_Q8_0, 96, 1001, 9);
	file_tensor(f, b, "blk.2.ffn_down_exps.weight", QUANT_Q8_0, 32, 777, 9);
	file_tensor(f, b, "blk.3.ffn_gate.weight", QUANT_F32, 64, 999, 1);
	file_layer(f, b, 4, QUANT_Q6_K, 311, 10);
	file_layer(f, b, 5, QUANT_Q8_0, 2801, 8);
	file_tensor(f, b, "output.weight", QUANT_F32, 1024, 1400, 1);
	file_layer(f, b, 6, QUANT_Q4_K, 65, 6);
}

static inline void file_make_dir(struct expert_file *f)
{
	const char *tmp = getenv("TMPDIR");
	const char *const places[] = { tmp ? tmp : P_tmpdir, "build", "." };

	for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
		struct statfs s;

		f->has_page_cache = statfs(places[i], &s) == 0 && s.f_type != TMPFS_MAGIC &&
				    s.f_type != RAMFS_MAGIC && s.f_type != OVERLAYFS_SUPER_MAGIC;
		snprintf(f->dir, sizeof(f->dir), "%s/test-experts-XXXXXX",
			 f->has_page_cache ? places[i] : places[0]);
		if ((f->has_page_cache || i + 1 == ARRAY_SIZE(places)) && mkdtemp(f->dir))
			return;
	}
	abort();
}

/* What of [offset, offset + bytes) is in the page cache, in pages; both are whole pages. */
static inline uint64_t file_cached(const struct expert_file *f, uint64_t offset, uint64_t bytes)
{
	size_t n_pages = (bytes + FILE_PAGE - 1) / FILE_PAGE;
	_cleanup_(freep) unsigned char *vec = malloc(n_pages + 1);
	uint64_t n = 0;

	if (!vec || mincore(f->map + offset, bytes, vec) < 0)
		abort();
	for (size_t i = 0; i < n_pages; i++)
		n += vec[i] & 1;
	return n;
}

/* Nothing of the file in the page cache. False: some of it stays. */
static inline bool file_drop(const struct expert_file *f)
{
	const struct gguf_part *part = gguf_part(f->g, 0);
	static char scratch[1 << 20];

	/* What is being read ahead is not counted yet, and cannot be dropped: waits for it. */
	for (uint64_t at = 0; at < f->bytes; at += sizeof(scratch))
		if (pread(f->fd, scratch, sizeof(scratch), (off_t)at) <= 0)
			abort();
	(void)madvise((void *)(uintptr_t)part->data, part->bytes, MADV_DONTNEED);
	for (unsigned i = 0; i < 200; i++) {
		(void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
		if (file_cached(f, 0, f->bytes) == 0)
			return true;
		nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
	}
	return false;
}

/* A mapping of the model's own again, so that no advice is left on it. */
static inline void file_reopen(struct expert_file *f)
{
	catalog_free(f->c);
	gguf_close(f->g);
	f->c = NULL;
	f->g = NULL;
	if (gguf_open(f->path, &f->g, NULL) < 0 || catalog_new(f->g, 0, &f->c, NULL) < 0)
		abort();
}

/* where: a directory that exists; NULL: on a disk, if there is one. */
static inline void file_open(struct expert_file *f, const char *where)
{
	struct gguf_build b = gguf_build_new();
	void *map;

	*f = (struct expert_file){ .seed = 0x243f6a8885a308d3 };
	if (where) {
		snprintf(f->dir, sizeof(f->dir), "%s/test-experts-XXXXXX", where);
		if (!mkdtemp(f->dir))
			abort();
	} else {
		file_make_dir(f);
	}
	snprintf(f->path, sizeof(f->path), "%s/model.gguf", f->dir);
	file_build(f, &b);
	f->copy = gguf_build_done(&b, &f->bytes);
	f->fd = open(f->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (f->fd < 0 || write(f->fd, f->copy, f->bytes) != (ssize_t)f->bytes || fsync(f->fd) < 0)
		abort();
	map = mmap(NULL, f->bytes, PROT_READ, MAP_SHARED, f->fd, 0);
	if (map == MAP_FAILED)
		abort();
	f->map = map;
	file_reopen(f);
}

static inline void file_close(struct expert_file *f)
{
	catalog_free(f->c);
	gguf_close(f->g);
	munmap(f->map, f->bytes);
	close(f->fd);
	unlink(f->path);
	rmdir(f->dir);
	free(f->copy);
}
