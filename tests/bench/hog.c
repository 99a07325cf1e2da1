/* SPDX-License-Identifier: MIT */
/*
 * hog BYTES RATE SECONDS: takes BYTES of anonymous memory at RATE bytes a second and holds it for
 * SECONDS: somebody else who needs memory.
 *
 * Says "taken" on standard output when it has all of it. Every page is written, so that what it has
 * is real; it lets go by ending, also when it is told to (SIGTERM). Used by tests/bench/residency.py
 * and tests/sys/test-pressure.py inside a memory control group.
 */
#include "daemon/config.h"

#include <sys/mman.h>
#include <time.h>

#define STEPS_PER_SECOND 100

static void sleep_until(uint64_t us)
{
	const struct timespec t = { .tv_sec = (time_t)(us / 1000000),
				    .tv_nsec = (long)(us % 1000000) * 1000 };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
		;
}

/* One byte of each page is enough for the page to be taken; huge pages would make the rate a lie. */
static void take(char *p, size_t bytes, uint64_t rate)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), done = 0;
	uint64_t begun = now_us();

	for (uint64_t step = 1; done < bytes; step++) {
		size_t until = (size_t)MIN((uint64_t)bytes, rate * step / STEPS_PER_SECOND);

		for (; done < until; done += page)
			p[done] = 1;
		sleep_until(begun + step * 1000000 / STEPS_PER_SECOND);
	}
}

int main(int argc, char **argv)
{
	uint64_t bytes, rate, seconds;
	char *p;

	if (argc != 4 || parse_u64(argv[1], 1, UINT64_C(1) << 46, &bytes) < 0 ||
	    parse_u64(argv[2], STEPS_PER_SECOND, UINT64_C(1) << 46, &rate) < 0 ||
	    parse_u64(argv[3], 0, 86400, &seconds) < 0) {
		fprintf(stderr, "usage: hog BYTES BYTES-PER-SECOND SECONDS\n");
		return 2;
	}
	p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED || (madvise(p, bytes, MADV_NOHUGEPAGE) < 0 && errno != EINVAL)) {
		fprintf(stderr, "hog: %s\n", strerror(errno));
		return 1;
	}
	take(p, bytes, rate);
	puts("taken");
	(void)fflush(stdout);
	sleep_until(now_us() + seconds * 1000000);
	return 0;
}
