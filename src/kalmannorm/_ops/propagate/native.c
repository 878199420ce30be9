/* Moments through a convolution or a linear layer, and their gradients: the equations of moments/linear.py for one row
   of moments, dense weights and a kernel of T taps.

   The weight is (K, C, T) in memory, or (K, T, C) for channels_last. A kind is a kind of output position: near a border
   some taps are outside of the image. `inside` (kinds, T) says which taps are inside, `of_kinds` how frequent the kinds
   are, and `of_taps` how often each tap is inside. */

#include <stdlib.h>
#include "../native.h"

#define LANES 16
#define STEP 64 /* outputs whose sum is a REAL */

typedef struct {
    long outputs, channels, taps, last, kinds;
    const REAL *inside, *of_kinds, *of_taps;
} Layer;

/* means[i] and vars[i]: the mean and the share of the variance that belong to the weight at i. */
static void spread(const Layer *l, const REAL *mean, const REAL *var, REAL *means, REAL *vars) {
    for (long c = 0; c < l->channels; c++)
        for (long t = 0; t < l->taps; t++) {
            long i = l->last ? t * l->channels + c : c * l->taps + t;
            means[i] = mean[c];
            vars[i] = var[c] * l->of_taps[t];
        }
}

/* Of one output: Σ w means for every tap, and Σ w² vars. `lanes` has room for LANES values per tap. */
static double sums_of(const Layer *l, const REAL *restrict weight, const REAL *restrict means,
                      const REAL *restrict vars, REAL *restrict lanes, double *taps) {
    long size = l->channels * l->taps, block = l->last ? l->channels : LANES * l->taps;
    double var = 0;
    for (long t = 0; t < l->taps; t++) taps[t] = 0;
    if (!l->last)
        for (long j = 0; j < least(block, size); j++) lanes[j] = 0;
    for (long start = 0; start < size; start += block) {
        const REAL *w = weight + start, *m = means + start, *v = vars + start;
        long stop = least(block, size - start);
        for (long from = 0; from < stop; from += CHUNK) {
            long to = least(from + CHUNK, stop);
            REAL part = 0;
            if (l->last) {
                REAL sum = 0;
#pragma omp simd reduction(+ : part, sum)
                for (long j = from; j < to; j++) {
                    sum += w[j] * m[j];
                    part += w[j] * w[j] * v[j];
                }
                taps[start / block] += sum;
            } else {
#pragma omp simd reduction(+ : part)
                for (long j = from; j < to; j++) {
                    lanes[j] += w[j] * m[j];
                    part += w[j] * w[j] * v[j];
                }
            }
            var += part;
        }
    }
    if (!l->last)
        for (long j = 0; j < least(block, size); j += l->taps)
            for (long t = 0; t < l->taps; t++) taps[t] += lanes[j + t];
    return var;
}

/* Returns 0, or 1 if there is no memory. `away` (outputs, kinds) is written if there are several kinds. */
int layer_forward(const Layer *l, const REAL *weight, const REAL *mean, const REAL *var,
                  REAL *out_mean, REAL *out_var, REAL *away, long threads) {
    long size = l->channels * l->taps, room = LANES * l->taps;
    REAL *both = malloc((2 * size + threads * room) * sizeof(REAL));
    double *all = malloc(threads * (l->taps + l->kinds) * sizeof(double));
    if (!both || !all) {
        free(both), free(all);
        return 1;
    }
    spread(l, mean, var, both, both + size);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long part = 0; part < threads; part++) {
        double *taps = all + part * (l->taps + l->kinds), *means = taps + l->taps;
        REAL *lanes = both + 2 * size + part * room;
        for (long k = l->outputs * part / threads; k < l->outputs * (part + 1) / threads; k++) {
            double spread_k = sums_of(l, weight + k * size, both, both + size, lanes, taps), middle = 0;
            if (l->kinds == 1) {
                for (long t = 0; t < l->taps; t++) middle += taps[t] * l->of_taps[t];
            } else {
                for (long q = 0; q < l->kinds; q++) {
                    means[q] = 0;
                    for (long t = 0; t < l->taps; t++) means[q] += taps[t] * l->inside[q * l->taps + t];
                    middle += means[q] * l->of_kinds[q];
                }
                for (long q = 0; q < l->kinds; q++) {
                    double from = means[q] - middle;
                    away[k * l->kinds + q] = from;
                    spread_k += from * from * l->of_kinds[q];
                }
            }
            out_mean[k] = middle;
            out_var[k] = spread_k;
        }
    }
    free(both), free(all);
    return 0;
}

/* The gradient with respect to the sum of one tap, for one output. */
SPECIAL double tap_gradient(const Layer *l, double by_mean, double by_var, const REAL *away, long tap) {
    if (l->kinds == 1) return by_mean * l->of_taps[tap];
    double sum = 0;
    for (long q = 0; q < l->kinds; q++)
        sum += (by_mean + 2 * by_var * away[q]) * l->of_kinds[q] * l->inside[q * l->taps + tap];
    return sum;
}

/* The gradients of one output with respect to `n` of its weights. pattern[i]: the gradient of the tap of weight i. */
SPECIAL void backward_row(int wanted, long n, const REAL *restrict weight, const REAL *restrict pattern,
                          const REAL *restrict means, const REAL *restrict vars, REAL by_var, REAL *restrict d_weight,
                          REAL *restrict sums, REAL *restrict squares) {
#pragma omp simd
    for (long i = 0; i < n; i++) {
        REAL w = weight[i];
        sums[i] += pattern[i] * w;
        squares[i] += by_var * (w * w);
        if (wanted) d_weight[i] = pattern[i] * means[i] + 2 * by_var * vars[i] * w;
    }
}

/* Writes `d_mean`, `d_var` and, unless it is NULL, `d_weight`. Returns 0, or 1 if there is no memory. */
int layer_backward(const Layer *l, const REAL *weight, const REAL *mean, const REAL *var, const REAL *by_mean,
                   const REAL *by_var, const REAL *away, REAL *d_mean, REAL *d_var, REAL *d_weight, long threads) {
    /* Weights are handled in blocks. All blocks have the same taps, or a block has one tap. */
    long size = l->channels * l->taps, block = l->last ? l->channels : least(LANES * l->taps, size);
    REAL *memory = malloc((4 * size + l->outputs * l->taps + threads * block) * sizeof(REAL));
    double *all = calloc(2 * size, sizeof(double));
    if (!memory || !all) {
        free(memory), free(all);
        return 1;
    }
    REAL *means = memory, *vars = means + size, *sums = vars + size, *squares = sums + size;
    REAL *taps = squares + size, *patterns = taps + l->outputs * l->taps;
    spread(l, mean, var, means, vars);
    for (long k = 0; k < l->outputs; k++)
        for (long t = 0; t < l->taps; t++)
            taps[k * l->taps + t] = tap_gradient(l, by_mean[k], by_var[k], away ? away + k * l->kinds : 0, t);
    long blocks = (size + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long part = 0; part < threads; part++) {
        /* Threads divide the columns of the weight, so that sums over outputs do not depend on their number. */
        REAL *pattern = patterns + part * block;
        long from = blocks * part / threads, to = blocks * (part + 1) / threads;
        for (long start = 0; start < l->outputs; start += STEP) {
            for (long i = from * block; i < least(to * block, size); i++) sums[i] = squares[i] = 0;
            for (long k = start; k < least(start + STEP, l->outputs); k++) {
                const REAL *row = weight + k * size, *tap = taps + k * l->taps;
                if (!l->last)
                    for (long j = 0; j < block; j++) pattern[j] = j < l->taps ? tap[j] : pattern[j - l->taps];
                for (long i = from * block; i < least(to * block, size); i += block) {
                    long n = least(block, size - i);
                    if (l->last)
                        for (long j = 0; j < n; j++) pattern[j] = tap[i / block];
                    if (d_weight)
                        backward_row(1, n, row + i, pattern, means + i, vars + i, by_var[k], d_weight + k * size + i,
                                     sums + i, squares + i);
                    else
                        backward_row(0, n, row + i, pattern, means + i, vars + i, by_var[k], 0, sums + i, squares + i);
                }
            }
            for (long i = from * block; i < least(to * block, size); i++)
                all[i] += sums[i], all[size + i] += squares[i];
        }
    }
    for (long c = 0; c < l->channels; c++) {
        double first = 0, second = 0;
        for (long t = 0; t < l->taps; t++) {
            long i = l->last ? t * l->channels + c : c * l->taps + t;
            first += all[i];
            second += all[size + i] * l->of_taps[t];
        }
        d_mean[c] = first;
        d_var[c] = second;
    }
    free(memory), free(all);
    return 0;
}
