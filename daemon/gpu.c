/* SPDX-License-Identifier: MIT */
/*
 * gpu.c: living with others of the GPU, the loop thread's part. See gpu.h. Loop thread.
 *
 * Owns struct daemon's gpu_*. Knows when to look and how much is to be left, not what is on the card. Invariant: the timer runs exactly while
 * there is a card that is used or waited for.
 */
#include "daemon/gpu.h"

#include "daemon/lease.h"
#include "daemon/sleep.h"

/* How soon others get memory that they take from the reserve is this, and what giving back takes. */
#define LOOK_US 1000000

bool gpu_in_use(const struct daemon *d)
{
	return d->stats.card.state != ENGINE_CARD_NONE;
}

static int on_look(sd_event_source *source, uint64_t usec, void *arg)
{
	struct daemon *d = arg;

	(void)usec;
	engine_look(d->engine);
	(void)sd_event_source_set_time_relative(source, LOOK_US);
	(void)sd_event_source_set_enabled(source, SD_EVENT_ONESHOT);
	return 0;
}

static void watch(struct daemon *d)
{
	if (!gpu_in_use(d))
		d->gpu_timer = sd_event_source_disable_unref(d->gpu_timer);
	else if (!d->gpu_timer && sd_event_add_time_relative(d->event, &d->gpu_timer, CLOCK_MONOTONIC,
							     LOOK_US, 10000, on_look, d) < 0)
		log_warning("no memory for a timer: others get no graphics memory that the model has");
}

/* What the kernels come from, for people. */
static const char *describe_code(const struct engine_card *card)
{
	if (streq(card->code, "binary"))
		return "machine code";
	if (streq(card->code, "ptx"))
		return "code compiled by the driver (PTX)";
	return card->code[0] ? card->code : "machine code";
}

static void print_card(struct buf *out, const struct engine_card *card)
{
	buf_printf(out, "%s%s", card->name, card->emulator ? " (an emulator for tests)" : "");
}

static void print_unused(struct buf *out, const struct engine_card *card, bool was_used)
{
	if (!was_used && card->name[0]) {
		print_card(out, card);
		buf_printf(out, ", ");
	}
	buf_printf(out, "not used%s%s%s; the CPU computes%s", was_used ? " any more" : "",
		   card->why[0] ? ": " : "", card->why,
		   card->state == ENGINE_CARD_DEGRADED ? ", it is tried again" : "");
}

char *gpu_describe(const struct engine_card *card, bool loaded, enum engine_card_state before)
{
	struct buf out = {};

	if (!loaded && card->state == before)
		return NULL;
	/* Nothing is known of one: nobody will miss it. */
	if (loaded && card->state == ENGINE_CARD_NONE && !card->why[0])
		return NULL;
	buf_printf(&out, "GPU: ");
	switch (card->state) {
	case ENGINE_CARD_NONE:
	case ENGINE_CARD_DEGRADED:
		print_unused(&out, card, !loaded && before == ENGINE_CARD_ACTIVE);
		break;
	case ENGINE_CARD_ACTIVE:
		if (!loaded && before == ENGINE_CARD_DEGRADED) {
			buf_printf(&out, "used again");
			break;
		}
		print_card(&out, card);
		/* An emulator's says nothing more. */
		if (!card->emulator)
			buf_printf(&out, ", %s", describe_code(card));
		break;
	}
	return out.data;
}

static void tell(struct daemon *d, bool loaded)
{
	const struct engine_card *card = &d->stats.card;
	_cleanup_(freep) char *line = gpu_describe(card, loaded, d->gpu_told);

	d->gpu_told = card->state;
	if (line && !loaded && card->state != ENGINE_CARD_ACTIVE)
		log_notice("%s", line);
	else if (line)
		log_info("%s", line);
}

void gpu_follow(struct daemon *d)
{
	watch(d);
	sleep_follow(d);
	/* Until a load has ended it is not known whose card this is. */
	if (d->model && d->state == SERVICE_AVAILABLE)
		tell(d, false);
}

void gpu_loaded(struct daemon *d)
{
	tell(d, true);
}

void gpu_card_event(struct daemon *d, struct engine_card_event *e)
{
	service_set_stats(d, &e->stats);
	free(e);
}

uint64_t gpu_yield_bytes(const struct lease *leases)
{
	uint64_t sum = 0;

	for (const struct lease *l = leases; l; l = l->next) {
		if (l->kind != LEASE_YIELD_GPU)
			continue;
		if (l->bytes == 0 || __builtin_add_overflow(sum, l->bytes, &sum))
			return UINT64_MAX;
	}
	return sum;
}

void gpu_leases_changed(struct daemon *d)
{
	uint64_t bytes = gpu_yield_bytes(d->leases);

	/* At the end calls that had come are still answered. */
	if (!d->engine || atomic_exchange(&engine_shared(d->engine)->yield_bytes, bytes) == bytes)
		return;
	if (gpu_in_use(d))
		engine_look(d->engine);
}

void gpu_stop(struct daemon *d)
{
	d->gpu_timer = sd_event_source_disable_unref(d->gpu_timer);
}
