/* SPDX-License-Identifier: MIT */
/*
 * inject.h: what the environment asks of the emulated card: its size, who else uses it, how slow it is, when it fails.
 *
 * Owns the counters; called with the emulator's lock held. A text that means nothing ends the process: a test whose failure
 * is never injected would pass.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum emu_event {
	EMU_CALL, /* "lost": any call of the driver that needs a context; the context is lost from then on */
	EMU_OPEN,   /* "open": a context */
	EMU_ALLOC,  /* "alloc": device memory */
	EMU_HOST,   /* "host": page-locked memory */
	EMU_COPY,   /* "copy": a copy, and nothing else */
	EMU_LAUNCH, /* "launch": a kernel, or a graph of them */
	EMU_IMAGE,  /* "image": a module: no code for this card */
	EMU_STEP, /* "fault": a piece of work as it is run, long after the call; the context is lost */
	EMU_FILL,  /* never fails */
	EMU_OTHER, /* never fails: events */
	EMU_EVENT_MAX,
};

/* The environment as it is now; counters begin again if RESIDENTD_EMU_FAIL is not what it was. */
void inject_read(void);
/* Counts one more; does it fail? */
bool inject_fails(enum emu_event what);
/* Microseconds that a piece of work is held back: between half of what is asked and all of it. */
uint64_t inject_delay_us(enum emu_event what);
/* Below `limit`, evenly enough. */
unsigned inject_random(unsigned limit);
/* Bytes of the card's memory, and those that other programs hold now. */
size_t inject_memory(void);
size_t inject_others(void);
