/* membw [MiB] [threads] [reps] [chunk KiB]: streaming read bandwidth with wide loads.
 * With a chunk size, each thread reads whole chunks in random order instead of one run. */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
static size_t bytes, chunk;
static int nt, reps;
static char *buf;
static pthread_barrier_t bar;
static volatile uint64_t sink;
static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + 1e-9 * t.tv_nsec;
}
static __m512i rd(const char *p, size_t n)
{
	__m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
	for (size_t i = 0; i < n; i += 256) {
		a = _mm512_add_epi64(a, _mm512_load_si512(p + i));
		b = _mm512_add_epi64(b, _mm512_load_si512(p + i + 64));
		c = _mm512_add_epi64(c, _mm512_load_si512(p + i + 128));
		d = _mm512_add_epi64(d, _mm512_load_si512(p + i + 192));
		_mm_prefetch(p + i + 2048, _MM_HINT_T0);
		_mm_prefetch(p + i + 2112, _MM_HINT_T0);
		_mm_prefetch(p + i + 2176, _MM_HINT_T0);
		_mm_prefetch(p + i + 2240, _MM_HINT_T0);
	}
	return _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d));
}
static void *run(void *arg)
{
	int id = (int)(intptr_t)arg;
	size_t per = bytes / nt;
	char *p = buf + per * id;
	memset(p, id + 1, per);
	__m512i s = _mm512_setzero_si512();
	uint64_t r = 88172645463325252ull + id;
	for (int k = 0; k < reps; k++) {
		pthread_barrier_wait(&bar);
		pthread_barrier_wait(&bar);
		if (!chunk)
			s = _mm512_add_epi64(s, rd(p, per));
		else
			for (size_t i = 0; i < per / chunk; i++) {
				r ^= r << 13;
				r ^= r >> 7;
				r ^= r << 17;
				s = _mm512_add_epi64(s, rd(p + r % (per / chunk) * chunk, chunk));
			}
		pthread_barrier_wait(&bar);
	}
	sink += _mm512_reduce_add_epi64(s);
	return 0;
}
int main(int c, char **v)
{
	bytes = (size_t)(c > 1 ? atoi(v[1]) : 2048) << 20;
	nt = c > 2 ? atoi(v[2]) : 2;
	reps = c > 3 ? atoi(v[3]) : 10;
	chunk = (size_t)(c > 4 ? atoi(v[4]) : 0) << 10;
	buf = mmap(0, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	buf = (char *)(((uintptr_t)buf + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
	madvise(buf, bytes, MADV_HUGEPAGE);
	pthread_barrier_init(&bar, 0, nt + 1);
	pthread_t t[64];
	for (int i = 0; i < nt; i++)
		pthread_create(&t[i], 0, run, (void *)(intptr_t)i);
	double best = 0, worst = 1e99;
	for (int k = 0; k < reps; k++) {
		pthread_barrier_wait(&bar);
		double a = now();
		pthread_barrier_wait(&bar);
		pthread_barrier_wait(&bar);
		double g = bytes / (now() - a) / 1e9;
		if (g > best)
			best = g;
		if (g < worst)
			worst = g;
	}
	for (int i = 0; i < nt; i++)
		pthread_join(t[i], 0);
	printf("read %d thread(s), %zu MiB, chunk %zu KiB: best %.2f GB/s, worst %.2f GB/s\n", nt,
	       bytes >> 20, chunk >> 10, best, worst);
	return 0;
}
