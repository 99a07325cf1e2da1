/* SPDX-License-Identifier: MIT */
/*
 * compare-logits N_VOCAB A B: how far two files of float32 logits are apart, one line a position:
 * mean square of the differences, largest difference, KL divergence of softmax(B) from softmax(A),
 * 1 if the best token is the same.
 *
 * For run-parity.py, which draws the conclusions; in Python the sums over the vocabulary would take
 * minutes.
 */
#include "daemon/base.h"

#include <math.h>

static double log_sum_exp(const float *x, size_t n, size_t *ret_best)
{
	size_t best = 0;
	double sum = 0;

	for (size_t i = 1; i < n; i++)
		if (x[i] > x[best])
			best = i;
	for (size_t i = 0; i < n; i++)
		sum += exp((double)x[i] - (double)x[best]);
	*ret_best = best;
	return (double)x[best] + log(sum);
}

static bool print_position(const float *a, const float *b, size_t n)
{
	size_t best_a, best_b;
	double lse_a = log_sum_exp(a, n, &best_a), lse_b = log_sum_exp(b, n, &best_b);
	double square = 0, max = 0, kl = 0;

	for (size_t i = 0; i < n; i++) {
		double d = (double)a[i] - (double)b[i], log_p = (double)a[i] - lse_a;

		if (!isfinite(d))
			return false;
		square += d * d;
		max = fmax(max, fabs(d));
		kl += exp(log_p) * (log_p - ((double)b[i] - lse_b));
	}
	printf("%.9g %.9g %.9g %d\n", square / (double)n, max, kl, best_a == best_b);
	return true;
}

int main(int argc, char **argv)
{
	_cleanup_(freep) float *a = NULL, *b = NULL;
	_cleanup_(fclosep) FILE *fa = NULL, *fb = NULL;
	bool good = true;
	size_t n;

	if (argc != 4 || (n = strtoul(argv[1], NULL, 10)) == 0 || n > 1 << 24) {
		fprintf(stderr, "usage: compare-logits N_VOCAB A B\n");
		return 2;
	}
	a = malloc(n * sizeof(*a));
	b = malloc(n * sizeof(*b));
	fa = fopen(argv[2], "re");
	fb = fopen(argv[3], "re");
	if (!a || !b || !fa || !fb) {
		fprintf(stderr, "compare-logits: %s, %s: %s\n", argv[2], argv[3], strerror(errno));
		return 1;
	}
	while (good && fread(a, sizeof(*a), n, fa) == n && fread(b, sizeof(*b), n, fb) == n)
		good = print_position(a, b, n);
	if (!good || !feof(fa) || fgetc(fb) != EOF) {
		fprintf(stderr, "compare-logits: %s, %s: not the same number of finite logits\n",
			argv[2], argv[3]);
		return 1;
	}
	return 0;
}
