/* SPDX-License-Identifier: MIT */
/*
 * split.h: which way each block of a layer goes that is in host memory and not on the card: over the bus, to be computed there, or to the CPU;
 * so that both are done at about the same time.
 *
 * Pure, any thread: no clock, no input or output; the same calls give the same answers. Owned by residency-card.c. Refuses to know which
 * blocks these are, and whether there is a slot for them. Invariant: a price that was measured once is above 0 and finite from then on.
 */
#pragma once

#include "daemon/base.h"

/* After so many blocks in a row that went the same way one goes the other, or its price would never be measured (again). The first while there
 * is none for a copy; the second is rare enough not to be felt, and ends a mistake that would else last for ever. */
#define SPLIT_PROBE_UNKNOWN 64U
#define SPLIT_PROBE_KNOWN   4096U

/* What a price was measured as the last two times. */
struct split_history {
	double last[2];
	unsigned n; /* measurements; counted up to 3 */
};

/* Microseconds; 0: not known yet. Zero-initialised knows nothing. */
struct split_prices {
	double copy_us_per_byte;    /* host to card */
	double copy_us_each;        /* more, whatever the size: set by the caller, or neglected */
	double cpu_us_per_byte;     /* of a block that one row uses */
	double cpu_us_per_byte_row; /* more for every further row */
	double gpu_us_per_byte; /* of a block that is on the card: set by the caller, or neglected */
	struct split_history of_copy, of_cpu, of_cpu_row;
};

enum split_path { SPLIT_CPU, SPLIT_COPY };

/* Zero-initialised once, and then kept from layer to layer. */
struct split {
	double copy_us, cpu_us; /* when each path would be done */
	double bus_us;          /* and the copies alone */
	enum split_path last;
	unsigned n_last; /* in a row */
};

void split_begin(struct split *s); /* a layer: both paths are idle */
/* The next block, of so many bytes, that so many rows use: goes where it would be done first, to the CPU when that is the same. */
enum split_path split_next(struct split *s, const struct split_prices *p, uint64_t bytes,
			   uint32_t n_rows);

/*
 * What some copies, or a wave on the CPU, took. Nothing is learned from no bytes or no time. Prices follow slowly, and a measurement that is
 * out of line is not believed before another is like it. A wave whose blocks had one row each, or little more, says what that costs; one with
 * more rows, what further rows cost, and the more rows the more it counts.
 */
void split_measure_copy(struct split_prices *p, uint64_t bytes, uint64_t us);
void split_measure_cpu(struct split_prices *p, uint64_t bytes, double n_rows_mean, uint64_t us);
