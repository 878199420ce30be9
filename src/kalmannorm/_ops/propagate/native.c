/* Moments through a convolution or a linear layer, and their gradients: the equations of moments/linear.py for one row
   of moments, dense weights and a kernel of T taps.

   The weight is (K, C, T) in memory, or (K, T, C) for channels_last. A kind is a kind of output position: near a border
   some taps are outside of the image. `inside` (kinds, T) says which taps are inside, `of_kinds` how frequent the kinds
   are, and `of_taps` how often each tap is inside. */

#include <math.h>
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

/* A whole bundle: see bundle.py and aten.py. Entries are (2, E): means, then variances. An operand is the entries from
   `a0` on, or the entries a[0], a[1], … if there is such a list. */

enum { ADD, SUBTRACT, PRODUCT, AFFINE, RELU, LAYER };
#define FLOOR 1e-20 /* as in moments/closed.py */
#define MARGIN 1e-6 /* as in _filter.py */
#define NOTHING (-1)
#define PARALLEL (1 << 14)

typedef struct {
    long kind, count, start, a0, b0, size; /* `size`: of the operand of a layer */
    const long *a, *b;
    double numbers[3];
    Layer layer;
    long weight, bias, away;
} Step;

typedef struct { long bias, weight, size; } Belief;
typedef struct { long mean, var, size; } Given;
typedef struct { long weight, bias, logit, logits, channels; } Norm;
typedef struct { long place, row, first, stop; } Alone;

typedef struct {
    long entries, beliefs, givens, steps, norms, alones, channels;
    const Belief *belief;
    const Given *given;
    const Step *step;
    const Norm *norm;
    const Alone *alone;
    const long *priors, *affine;
} Bundle;

SPECIAL long at(const long *list, long first, long i) { return list ? list[i] : first + i; }

typedef struct { double value, var, share, below, density; int varies; } Rectified;

/* max(x, 0) for x ~ N(mean, var), and what its gradient needs: see `relu` in moments/closed.py. */
SPECIAL Rectified rectified(double mean, double given_var) {
    int varies = given_var >= FLOOR, above = mean >= 0;
    double var = given_var < FLOOR ? FLOOR : given_var, deviation = sqrt(var), gap = fabs(mean);
    double distance = gap / deviation, density = exp(-0.5 * distance * distance) * 0.3989422804014327;
    double tail = 0.5 * erfc(distance * 0.7071067811865476), spread = deviation * density;
    double first = spread - gap * tail, second = (var + gap * gap) * tail - gap * spread;
    double result = (above ? var - second - 2 * gap * first : second) - first * first;
    Rectified r = {(mean < 0 ? 0 : mean) + first, result < 0 ? 0 : result, above ? 1 - tail : tail,
                   above ? tail : 1 - tail, varies ? density / deviation : 0, varies};
    return r;
}

static void elementwise(const Step *s, REAL *mean, REAL *var) {
    for (long i = 0; i < s->count; i++) {
        long out = s->start + i, a = at(s->a, s->a0, i), b = s->kind <= PRODUCT ? at(s->b, s->b0, i) : 0;
        double ma = mean[a], va = var[a], mb = mean[b], vb = var[b];
        if (s->kind == ADD) mean[out] = ma + mb, var[out] = va + vb;
        else if (s->kind == SUBTRACT) mean[out] = ma - mb, var[out] = va + vb;
        else if (s->kind == PRODUCT) mean[out] = ma * mb, var[out] = va * vb + va * mb * mb + vb * ma * ma;
        else if (s->kind == AFFINE) mean[out] = ma * s->numbers[0] + s->numbers[1], var[out] = va * s->numbers[2];
        else {
            Rectified r = rectified(ma, va);
            mean[out] = r.value, var[out] = r.var;
        }
    }
}

static void elementwise_backward(const Step *s, const REAL *mean, const REAL *var, REAL *d_mean, REAL *d_var) {
    for (long i = 0; i < s->count; i++) {
        long out = s->start + i, a = at(s->a, s->a0, i), b = s->kind <= PRODUCT ? at(s->b, s->b0, i) : 0;
        double gm = d_mean[out], gv = d_var[out];
        if (s->kind == ADD || s->kind == SUBTRACT) {
            d_mean[a] += gm, d_var[a] += gv;
            d_mean[b] += s->kind == ADD ? gm : -gm, d_var[b] += gv;
        } else if (s->kind == PRODUCT) {
            double ma = mean[a], va = var[a], mb = mean[b], vb = var[b];
            d_mean[a] += gm * mb + 2 * gv * vb * ma, d_var[a] += gv * (vb + mb * mb);
            d_mean[b] += gm * ma + 2 * gv * va * mb, d_var[b] += gv * (va + ma * ma);
        } else if (s->kind == AFFINE) {
            d_mean[a] += gm * s->numbers[0], d_var[a] += gv * s->numbers[2];
        } else {
            Rectified r = rectified(mean[a], var[a]);
            d_mean[a] += gm * r.share + gv * 2 * r.value * r.below;
            d_var[a] += (r.varies ? gv * r.share : 0) + r.density * (0.5 * gm - gv * r.value);
        }
    }
}

SPECIAL long threads_of(const Step *s, long threads) {
    return s->layer.outputs * s->layer.channels * s->layer.taps >= PARALLEL ? threads : 1;
}

/* Room for the operands of a layer, if they are not adjacent, and for their gradients. */
static REAL *operands(const Bundle *b) {
    long largest = 1;
    for (long i = 0; i < b->steps; i++)
        if (b->step[i].kind == LAYER && b->step[i].size > largest) largest = b->step[i].size;
    return malloc(4 * largest * sizeof(REAL));
}

SPECIAL const REAL *gathered(const Step *s, const REAL *entries, REAL *room) {
    if (!s->a) return entries + s->a0;
    for (long i = 0; i < s->size; i++) room[i] = entries[s->a[i]];
    return room;
}

SPECIAL double gain_slope(double logit) {
    double share = 1 / (1 + exp(-logit));
    return (1 - 2 * MARGIN) * share * (1 - share);
}

/* Entries, deviations `away` of all layers, and the rows of all norms but their gains. Returns 0, or 1 without memory. */
int bundle_forward(const Bundle *b, const REAL *const *tensors, REAL *entries, REAL *away, REAL *rows, long threads) {
    REAL *mean = entries, *var = entries + b->entries, *room = operands(b);
    long leaf = 0, column = 0, failed = !room;
    for (long n = 0; n < b->beliefs; n++) {
        const Belief *of = b->belief + n;
        for (long i = 0; i < of->size; i++, leaf++) {
            double weight = of->weight == NOTHING ? 1 : tensors[of->weight][i];
            mean[leaf] = of->bias == NOTHING ? 0 : tensors[of->bias][i];
            var[leaf] = weight * weight;
        }
    }
    for (long n = 0; n < b->givens; n++)
        for (long i = 0; i < b->given[n].size; i++, leaf++)
            mean[leaf] = tensors[b->given[n].mean][i], var[leaf] = tensors[b->given[n].var][i];
    for (long n = 0; n < b->steps && !failed; n++) {
        const Step *s = b->step + n;
        if (s->kind != LAYER) {
            elementwise(s, mean, var);
            continue;
        }
        const REAL *means = gathered(s, mean, room), *vars = gathered(s, var, room + s->size);
        failed = layer_forward(&s->layer, tensors[s->weight], means, vars, mean + s->start, var + s->start,
                               s->away == NOTHING ? 0 : away + s->away, threads_of(s, threads));
        if (s->bias != NOTHING)
            for (long i = 0; i < s->count; i++) mean[s->start + i] += tensors[s->bias][i];
    }
    for (long n = 0; n < b->norms; n++) {
        const Norm *of = b->norm + n;
        for (long i = 0; i < of->channels; i++, column++) {
            rows[column] = of->weight == NOTHING ? 1 : tensors[of->weight][i];
            rows[b->channels + column] = of->bias == NOTHING ? 0 : tensors[of->bias][i];
            rows[2 * b->channels + column] = mean[b->priors[column]];
            rows[3 * b->channels + column] = var[b->priors[column]];
        }
    }
    free(room);
    return failed;
}

/* Gradients of all tensors that have a place in `d_tensors`. `grads` (2, E) holds those of other results, and is
   changed. `grad_rows` (5, channels) may be NULL. */
int bundle_backward(const Bundle *b, const REAL *const *tensors, const REAL *entries, const REAL *away,
                    const REAL *grad_rows, REAL *grads, REAL *const *d_tensors, long threads) {
    const REAL *mean = entries, *var = entries + b->entries;
    REAL *d_mean = grads, *d_var = grads + b->entries, *room = operands(b);
    long leaf = 0, column = 0, believed = 0, failed = !room;
    if (grad_rows)
        for (long i = 0; i < b->channels; i++) {
            d_mean[b->priors[i]] += grad_rows[2 * b->channels + i];
            d_var[b->priors[i]] += grad_rows[3 * b->channels + i];
        }
    for (long n = b->steps - 1; n >= 0 && !failed; n--) {
        const Step *s = b->step + n;
        if (s->kind != LAYER) {
            elementwise_backward(s, mean, var, d_mean, d_var);
            continue;
        }
        const REAL *means = gathered(s, mean, room), *vars = gathered(s, var, room + s->size);
        REAL *to_mean = room + 2 * s->size, *to_var = room + 3 * s->size;
        failed = layer_backward(&s->layer, tensors[s->weight], means, vars, d_mean + s->start, d_var + s->start,
                                s->away == NOTHING ? 0 : away + s->away, to_mean, to_var, d_tensors[s->weight],
                                threads_of(s, threads));
        for (long i = 0; i < s->size; i++) {
            long a = at(s->a, s->a0, i);
            d_mean[a] += to_mean[i], d_var[a] += to_var[i];
        }
        if (s->bias != NOTHING && d_tensors[s->bias])
            for (long i = 0; i < s->count; i++) d_tensors[s->bias][i] = d_mean[s->start + i];
    }
    for (long n = 0; n < b->beliefs; n++) believed += b->belief[n].size;
    for (long n = 0; n < b->beliefs; n++) {
        const Belief *of = b->belief + n;
        for (long i = 0; i < of->size; i++, leaf++) {
            long by_bias = b->affine[leaf], by_weight = b->affine[believed + leaf];
            if (of->bias != NOTHING && d_tensors[of->bias])
                d_tensors[of->bias][i] = d_mean[leaf] + (grad_rows && by_bias >= 0 ? grad_rows[by_bias] : 0);
            if (of->weight != NOTHING && d_tensors[of->weight])
                d_tensors[of->weight][i] = 2 * d_var[leaf] * tensors[of->weight][i] +
                                           (grad_rows && by_weight >= 0 ? grad_rows[by_weight] : 0);
        }
    }
    for (long n = 0; n < b->givens; n++)
        for (long i = 0; i < b->given[n].size; i++, leaf++) {
            if (d_tensors[b->given[n].mean]) d_tensors[b->given[n].mean][i] = d_mean[leaf];
            if (d_tensors[b->given[n].var]) d_tensors[b->given[n].var][i] = d_var[leaf];
        }
    for (long n = 0; n < b->norms && grad_rows; n++) {
        const Norm *of = b->norm + n;
        const REAL *by_gain = grad_rows + 4 * b->channels + column;
        column += of->channels;
        if (of->logit == NOTHING || !d_tensors[of->logit]) continue;
        for (long k = 0; k < of->logits; k++) {
            double sum = 0;
            if (of->logits == 1)
                for (long i = 0; i < of->channels; i++) sum += by_gain[i];
            else
                sum = by_gain[k];
            d_tensors[of->logit][k] = gain_slope(tensors[of->logit][k]) * sum;
        }
    }
    for (long n = 0; n < b->alones && grad_rows; n++) {
        const Alone *of = b->alone + n;
        for (long i = of->first; i < of->stop && d_tensors[of->place]; i++)
            d_tensors[of->place][i - of->first] = grad_rows[of->row * b->channels + i];
    }
    free(room);
    return failed;
}
