/* SPDX-License-Identifier: MIT */
/*
 * fuzz-config.c: bytes as a configuration file, and as the text of a number, a size and a time span.
 *
 * Whatever the file says, every field stays inside its bounds, and each warning is UTF-8 on a line
 * of its own.
 */
#include "daemon/config.h"

#include "daemon/model/tokenizer.h" /* utf8_valid() */

#include <assert.h>
#include <sys/mman.h>
#include <syslog.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_bounds(const struct config *c)
{
	assert(!c->model_path || c->model_path[0] == '/');
	assert(c->context == 0 || (c->context >= 16 && c->context <= 1 << 24));
	assert(c->threads <= 1024);
	assert(c->batch_tok <= 4096);
	assert(c->host_tier == RESIDENCY_AUTO || c->host_tier == RESIDENCY_MAPPED ||
	       c->host_tier == RESIDENCY_ARENA);
	assert(c->host_budget_bytes <= INT64_MAX && c->memory_reserve_bytes <= INT64_MAX);
	assert(c->vram_budget_bytes <= INT64_MAX || c->vram_budget_bytes == CONFIG_VRAM_OFF);
	assert(c->vram_reserve_bytes <= INT64_MAX);
	assert(c->host_idle_us >= 1000000);
	assert(c->evict_policy <= EVICT_S3_FIFO);
	assert(c->prefetch >= -1 && c->prefetch <= 1);
	assert(c->disk_queue_depth <= 256);
	assert(c->kv_bytes_max <= INT64_MAX);
	assert(c->kv_type == CONFIG_KV_AUTO || c->kv_type == CONFIG_KV_F16 ||
	       c->kv_type == CONFIG_KV_F32);
	assert(c->queue_max >= 1 && c->queue_max <= 65536);
	assert(c->sessions_max >= 1 && c->sessions_max <= 65536);
	assert(c->sessions_per_user >= 1 && c->sessions_per_user <= 65536);
	assert(c->connections_max >= 1 && c->connections_max <= 65536);
	assert(c->keep_us <= INT64_MAX || c->keep_us == UINT64_MAX);
	assert(c->message_bytes_max >= 64 << 10 && c->message_bytes_max <= 64 << 20);
	assert(c->max_tokens >= 1 && c->max_tokens <= 1 << 24);
	assert(c->max_thinking_tokens >= -1 && c->max_thinking_tokens <= 1 << 24);
	assert(c->log_level >= LOG_ERR && c->log_level <= LOG_DEBUG);
}

static void check_warnings(const struct buf *w)
{
	const char *line = w->data, *newline;

	if (w->len == 0)
		return;
	assert(utf8_valid(w->data, w->len));
	assert(strlen(w->data) == w->len);
	for (; *line; line = newline + 1) {
		assert(startswith(line, "/proc/self/fd/"));
		newline = strchr(line, '\n');
		assert(newline);
	}
}

static void read_as_file(const uint8_t *data, size_t size)
{
	_cleanup_(closep) int fd = memfd_create("config", MFD_CLOEXEC);
	_cleanup_(buf_done) struct buf warnings = {};
	struct config c;
	char path[64];
	int r;

	assert(fd >= 0);
	assert(write(fd, data, size) == (ssize_t)size);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	config_defaults(&c);
	r = config_read(&c, path, &warnings);
	assert(r == (size > 1024 * 1024 ? -EFBIG : 0));
	check_bounds(&c);
	check_warnings(&warnings);
	config_done(&c);
}

static void read_as_values(const uint8_t *data, size_t size)
{
	_cleanup_(freep) char *text = malloc(size + 1);
	uint64_t v = 7;
	int r;

	assert(text);
	memcpy(text, data, size);
	text[size] = 0;
	r = parse_u64(text, 10, 1000, &v);
	assert(r == 0 ? v >= 10 && v <= 1000 : v == 7 && (r == -EINVAL || r == -ERANGE));
	v = 7;
	r = parse_bytes(text, &v);
	assert(r == 0 || (v == 7 && (r == -EINVAL || r == -ERANGE)));
	v = 7;
	r = parse_vram(text, &v);
	assert(r == 0 ? v <= INT64_MAX || v == CONFIG_VRAM_OFF
		      : v == 7 && (r == -EINVAL || r == -ERANGE));
	v = 7;
	r = parse_span_us(text, &v);
	assert(r == 0 || (v == 7 && (r == -EINVAL || r == -ERANGE)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	read_as_file(data, size);
	read_as_values(data, size);
	return 0;
}
