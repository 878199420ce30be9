/* Moments through a convolution or a linear layer, and their gradients: the equations of moments/linear.py for one row
   of moments, dense weights and a kernel of T taps.

   The weight is (K, C, T) in memory, or (K, T, C) for channels_last. A kind is a kind of output position: near a border
   some taps are outside of the image. `inside` (kinds, T) says which taps are inside, `of_kinds` how frequent the kinds
   are, and `of_taps` how often each tap is inside. */

#include <math.h>
#include <stdlib.h>
#include "../native.h"

#define LANES 16 /* channels whose taps are handled together */
#define STEP 64  /* outputs whose sum is a REAL */
#define ROWS 4   /* outputs that are handled together */
#define BLOCKS 4 /* blocks of vectors whose sum is a REAL */

/* A vector of the processor. */
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define WIDTH (BYTES / sizeof(REAL))
typedef REAL Vector __attribute__((vector_size(BYTES)));
typedef REAL Unaligned __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

SPECIAL Vector load(const REAL *from) { return *(const Unaligned *)from; }

/* Memory for one thread. No other thread has a part of its cache lines: both would wait for each other. */
static void *apart(long bytes) { return aligned_alloc(128, (bytes + 255) / 128 * 128); }

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

/* Of one output in channels_last, or with one tap: Σ w means for every tap, and Σ w² vars. */
static double sums_of_planes(const Layer *l, const REAL *restrict weight, const REAL *restrict means,
                             const REAL *restrict vars, double *taps) {
    double var = 0;
    for (long t = 0; t < l->taps; t++) {
        taps[t] = 0;
        for (long from = t * l->channels; from < (t + 1) * l->channels; from += CHUNK) {
            long to = least(from + CHUNK, (t + 1) * l->channels);
            REAL part = 0, sum = 0;
#pragma omp simd reduction(+ : part, sum)
            for (long j = from; j < to; j++) {
                sum += weight[j] * means[j];
                part += weight[j] * weight[j] * vars[j];
            }
            taps[t] += sum;
            var += part;
        }
    }
    return var;
}

/* The same for weights whose taps are adjacent. The taps of WIDTH channels fill as many vectors as there are taps, and
   each vector has a sum, which stays in a register if the compiler knows how many there are. `sums` has room for all.
   A lane of such a sum has one REAL for every WIDTH-th channel. */
SPECIAL double sums_of_blocks(const Layer *l, long count, const REAL *restrict weight, const REAL *restrict means,
                              const REAL *restrict vars, Vector *restrict sums, double *taps) {
    long size = l->channels * count, block = WIDTH * count, start = 0;
    double var = 0;
    for (long u = 0; u < count; u++) sums[u] = (Vector){0};
    while (start + block <= size) {
        long stop = start + BLOCKS * block;
        Vector parts[3] = {{0}, {0}, {0}};
        for (; start < stop && start + block <= size; start += block) {
#pragma GCC unroll 9
            for (long u = 0; u < count; u++) {
                Vector w = load(weight + start + u * WIDTH);
                sums[u] += w * load(means + start + u * WIDTH);
                parts[u % 3] += w * w * load(vars + start + u * WIDTH);
            }
        }
        Vector part = parts[0] + parts[1] + parts[2];
        for (long j = 0; j < (long)WIDTH; j++) var += part[j];
    }
    for (long t = 0; t < count; t++) taps[t] = 0;
    for (long u = 0, t = 0; u < count; u++)
        for (long j = 0; j < (long)WIDTH; j++, t = t + 1 == count ? 0 : t + 1) taps[t] += sums[u][j];
    for (; start < size; start += count)
        for (long t = 0; t < count; t++) {
            double w = weight[start + t];
            taps[t] += w * means[start + t];
            var += w * w * vars[start + t];
        }
    return var;
}

/* With 9 taps, the most frequent number. */
ONCE double sums_of_nine(const Layer *l, const REAL *weight, const REAL *means, const REAL *vars, double *taps) {
    Vector sums[9];
    return sums_of_blocks(l, 9, weight, means, vars, sums, taps);
}

/* Returns 0, or 1 if there is no memory. `away` (outputs, kinds) is written if there are several kinds. */
int layer_forward(const Layer *l, const REAL *weight, const REAL *mean, const REAL *var,
                  REAL *out_mean, REAL *out_var, REAL *away, long threads) {
    long size = l->channels * l->taps, failed = 0;
    REAL *means = malloc(2 * size * sizeof(REAL)), *vars = means + size;
    if (!means) return 1;
    spread(l, mean, var, means, vars);
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed)
    for (long part = 0; part < threads; part++) {
        Vector *sums = apart(l->taps * sizeof(Vector));
        double *taps = apart((l->taps + l->kinds) * sizeof(double)), *at_kinds = taps + l->taps;
        failed |= !sums || !taps;
        for (long k = l->outputs * part / threads; k < l->outputs * (part + 1) / threads && !failed; k++) {
            const REAL *row = weight + k * size;
            double middle = 0, total = l->last        ? sums_of_planes(l, row, means, vars, taps)
                                       : l->taps == 9 ? sums_of_nine(l, row, means, vars, taps)
                                                      : sums_of_blocks(l, l->taps, row, means, vars, sums, taps);
            if (l->kinds == 1) {
                for (long t = 0; t < l->taps; t++) middle += taps[t] * l->of_taps[t];
            } else {
                for (long q = 0; q < l->kinds; q++) {
                    at_kinds[q] = 0;
                    for (long t = 0; t < l->taps; t++) at_kinds[q] += taps[t] * l->inside[q * l->taps + t];
                    middle += at_kinds[q] * l->of_kinds[q];
                }
                for (long q = 0; q < l->kinds; q++) {
                    double from = at_kinds[q] - middle;
                    away[k * l->kinds + q] = from;
                    total += from * from * l->of_kinds[q];
                }
            }
            out_mean[k] = middle;
            out_var[k] = total;
        }
        free(sums), free(taps);
    }
    free(means);
    return failed;
}

/* The gradient with respect to the sum of one tap, for one output. */
SPECIAL double tap_gradient(const Layer *l, double by_mean, double by_var, const REAL *away, long tap) {
    if (l->kinds == 1) return by_mean * l->of_taps[tap];
    double sum = 0;
    for (long q = 0; q < l->kinds; q++)
        sum += (by_mean + 2 * by_var * away[q]) * l->of_kinds[q] * l->inside[q * l->taps + tap];
    return sum;
}

/* The gradients of outputs with respect to `n` of the weights of each. The rows of weights are `size` apart. For weight
   i of row r the gradient of its tap is patterns[r * period + i], or patterns[r] in channels_last. */
SPECIAL void backward_rows(int rows, int last, int wanted, long n, long size, const REAL *restrict weight, long period,
                           const REAL *restrict patterns, const REAL *restrict by_var, const REAL *restrict means,
                           const REAL *restrict vars, REAL *restrict d_weight, REAL *restrict sums,
                           REAL *restrict squares) {
#pragma omp simd
    for (long i = 0; i < n; i++) {
        REAL sum = 0, square = 0, mean = means[i], var = 2 * vars[i];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            REAL w = weight[r * size + i], tap = patterns[last ? r : r * period + i], by = by_var[r] * w;
            sum += tap * w;
            square += by * w;
            if (wanted) d_weight[r * size + i] = tap * mean + by * var;
        }
        sums[i] += sum;
        squares[i] += square;
    }
}

/* One thread's part of the gradients: the columns from `first` to `stop` of all outputs. `taps` (outputs, taps) are
   gradients of taps. `sums` and `squares` are of these columns, and `room` is for ROWS patterns. */
SPECIAL void backward_columns(int last, int wanted, const Layer *l, long first, long stop, const REAL *weight,
                              const REAL *taps, const REAL *by_var, const REAL *means, const REAL *vars,
                              REAL *d_weight, REAL *sums, REAL *squares, REAL *room, double *all) {
    long size = l->channels * l->taps, period = LANES * l->taps, width = stop - first;
    for (long start = 0; start < l->outputs; start += STEP) {
        long end = least(start + STEP, l->outputs);
        for (long i = 0; i < width; i++) sums[i] = squares[i] = 0;
        for (long k = start; k < end;) {
            int rows = end - k < ROWS ? 1 : ROWS;
            for (int r = 0; r < rows && !last; r++)
                for (long j = 0; j < period; j += l->taps)
                    for (long t = 0; t < l->taps; t++) room[r * period + j + t] = taps[(k + r) * l->taps + t];
            for (long i = first; i < stop;) {
                long n = least(last ? (i / l->channels + 1) * l->channels - i : period, stop - i);
                if (last)
                    for (int r = 0; r < rows; r++) room[r] = taps[(k + r) * l->taps + i / l->channels];
                const REAL *w = weight + k * size + i;
                REAL *d = wanted ? d_weight + k * size + i : 0;
                if (rows == ROWS)
                    backward_rows(ROWS, last, wanted, n, size, w, period, room, by_var + k, means + i, vars + i, d,
                                  sums + i - first, squares + i - first);
                else
                    backward_rows(1, last, wanted, n, size, w, period, room, by_var + k, means + i, vars + i, d,
                                  sums + i - first, squares + i - first);
                i += n;
            }
            k += rows;
        }
        for (long i = 0; i < width; i++) all[first + i] += sums[i], all[size + first + i] += squares[i];
    }
}

/* Writes `d_mean`, `d_var` and, unless it is NULL, `d_weight`. Returns 0, or 1 if there is no memory. */
int layer_backward(const Layer *l, const REAL *weight, const REAL *mean, const REAL *var, const REAL *by_mean,
                   const REAL *by_var, const REAL *away, REAL *d_mean, REAL *d_var, REAL *d_weight, long threads) {
    long size = l->channels * l->taps, block = LANES * l->taps, blocks = (size + block - 1) / block, failed = 0;
    REAL *means = malloc((2 * size + l->outputs * l->taps) * sizeof(REAL)), *vars = means + size, *taps = vars + size;
    double *all = calloc(2 * size, sizeof(double));
    if (!means || !all) {
        free(means), free(all);
        return 1;
    }
    spread(l, mean, var, means, vars);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long k = 0; k < l->outputs; k++)
        for (long t = 0; t < l->taps; t++)
            taps[k * l->taps + t] = tap_gradient(l, by_mean[k], by_var[k], away ? away + k * l->kinds : 0, t);
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : failed)
    for (long part = 0; part < threads; part++) {
        /* Threads divide the columns of the weight, so that sums over outputs do not depend on their number. */
        long first = least(blocks * part / threads * block, size), width = 0;
        long stop = least(blocks * (part + 1) / threads * block, size);
        width = stop - first;
        REAL *sums = apart((2 * width + ROWS * block) * sizeof(REAL)), *squares = sums + width, *room = squares + width;
        if (!sums) {
            failed = 1;
            continue;
        }
        if (l->last && d_weight)
            backward_columns(1, 1, l, first, stop, weight, taps, by_var, means, vars, d_weight, sums, squares, room, all);
        else if (l->last)
            backward_columns(1, 0, l, first, stop, weight, taps, by_var, means, vars, 0, sums, squares, room, all);
        else if (d_weight)
            backward_columns(0, 1, l, first, stop, weight, taps, by_var, means, vars, d_weight, sums, squares, room, all);
        else
            backward_columns(0, 0, l, first, stop, weight, taps, by_var, means, vars, 0, sums, squares, room, all);
        free(sums);
    }
    for (long c = 0; c < l->channels && !failed; c++) {
        double first = 0, second = 0;
        for (long t = 0; t < l->taps; t++) {
            long i = l->last ? t * l->channels + c : c * l->taps + t;
            first += all[i];
            second += all[size + i] * l->of_taps[t];
        }
        d_mean[c] = first;
        d_var[c] = second;
    }
    free(means), free(all);
    return failed;
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
