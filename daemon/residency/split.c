/* SPDX-License-Identifier: MIT */
/*
 * split.c: list scheduling over two paths, and the prices for it. See split.h.
 *
 * Pure. The paths: the CPU, block after block; and the bus with the card behind it, which computes a block while the next is
 * copied. Invariant: what is not known is taken to cost nothing on the CPU, so that it goes there and becomes known.
 */
#include "daemon/residency/split.h"

/* Of a measurement, in the price: about the last eight count. */
#define WEIGHT     0.125
/* A measurement counts as at most so many times more or less than the price. */
#define JUMP_MAX   4.0
/* Below it a wave is one of single rows. */
#define FEW_ROWS   1.5
/* With so many further rows a measurement counts half: with few, what is left for them is mostly the first row's noise. */
#define HALF_ROWS  8.0
/* Further rows cost at least this part of all, however fast a wave was: nothing could not become more again. */
#define LEAST_PART (1 / 64.0)

/* ---- paths ---- */

void split_begin(struct split *s)
{
	s->copy_us = s->cpu_us = s->bus_us = 0;
}

static enum split_path pick(const struct split *s, const struct split_prices *p, double cpu_us,
			    double copy_us)
{
	bool known = p->copy_us_per_byte > 0;

	if (s->n_last >= (known ? SPLIT_PROBE_KNOWN : SPLIT_PROBE_UNKNOWN))
		return s->last == SPLIT_CPU ? SPLIT_COPY : SPLIT_CPU;
	return known && copy_us < cpu_us ? SPLIT_COPY : SPLIT_CPU;
}

enum split_path split_next(struct split *s, const struct split_prices *p, uint64_t bytes, uint32_t n_rows)
{
	double n = (double)bytes, more = n_rows > 1 ? n_rows - 1 : 0;
	double cpu_us = s->cpu_us + n * (p->cpu_us_per_byte + more * p->cpu_us_per_byte_row);
	double bus_us = s->bus_us + p->copy_us_each + n * p->copy_us_per_byte;
	double copy_us = MAX(s->copy_us, bus_us) + n * p->gpu_us_per_byte;
	enum split_path path = pick(s, p, cpu_us, copy_us);

	if (path == SPLIT_CPU) {
		s->cpu_us = cpu_us;
	} else {
		s->bus_us = bus_us;
		s->copy_us = copy_us;
	}
	s->n_last = path == s->last ? s->n_last + 1 : 1;
	s->last = path;
	return path;
}

/* ---- prices ---- */

static double median(double a, double b, double c)
{
	return MAX(MIN(a, b), MIN(MAX(a, b), c));
}

static void follow(double *price, struct split_history *h, double measured)
{
	double middle;

	switch (h->n) {
	case 0: *price = measured; break;
	case 1: *price = MIN(*price, measured); break; /* what disturbs makes slower */
	case 2: *price = median(h->last[0], h->last[1], measured); break;
	default:
		middle = median(h->last[0], h->last[1], measured);
		middle = CLAMP(middle, *price / JUMP_MAX, *price * JUMP_MAX);
		*price += WEIGHT * (middle - *price);
		break;
	}
	h->n = MIN(h->n + 1, 3U);
	h->last[0] = h->last[1];
	h->last[1] = measured;
}

void split_measure_copy(struct split_prices *p, uint64_t bytes, uint64_t us)
{
	double spent = (double)us;

	if (bytes == 0 || us == 0)
		return;
	/* Not all of it, or no bytes would cost anything. */
	spent = MAX(spent - p->copy_us_each, spent / 2);
	follow(&p->copy_us_per_byte, &p->of_copy, spent / (double)bytes);
}

void split_measure_cpu(struct split_prices *p, uint64_t bytes, double n_rows_mean, uint64_t us)
{
	double per_byte, per_row, more = n_rows_mean - 1;

	if (bytes == 0 || us == 0)
		return;
	per_byte = (double)us / (double)bytes;
	if (!(n_rows_mean >= FEW_ROWS)) {
		follow(&p->cpu_us_per_byte, &p->of_cpu, per_byte);
		return;
	}
	per_row = MAX(per_byte - p->cpu_us_per_byte, per_byte * LEAST_PART) / more;
	if (p->of_cpu_row.n > 0)
		per_row = p->cpu_us_per_byte_row +
			  more / (more + HALF_ROWS) * (per_row - p->cpu_us_per_byte_row);
	follow(&p->cpu_us_per_byte_row, &p->of_cpu_row, per_row);
}
