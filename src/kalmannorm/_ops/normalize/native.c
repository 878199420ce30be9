/* The op on CPUs: observe, combine with the prior, normalize; and its gradients.

   x is (N, C, L) or, for channels_last, (N, L, C). A group has `size` examples; the last one may have fewer. Threads
   divide groups and channels among them. The sum of a channel never depends on the number of threads. */

#include <math.h>
#include "../native.h"

#define WIDEST 64 /* channels that one thread handles together in channels_last */

enum { WEIGHT, BIAS, PRIOR_MEAN, PRIOR_VAR, GAIN, ROWS };
enum { MEAN, VAR, OBSERVED_MEAN, OBSERVED_VAR, MOMENTS };
enum { ALL, BY_OUTPUT, BY_INPUT }; /* which values of the gradient pass the ReLU: all, or where y > 0 */

typedef struct {
    long examples, channels, positions, size, last, relu;
    double eps;
    long strides[ROWS][2]; /* of γ, β, prior and gain: from group to group, and from channel to channel */
} Shape;

typedef struct {
    const REAL *x, *residual, *rows[ROWS];
    REAL *y, *moments;
} Forward;

typedef struct {
    const REAL *grad, *x, *y, *moments, *rows[ROWS], *grad_moments[MOMENTS];
    REAL *dx, *d_residual, *d_rows;
    const REAL *centre, *rho, *averages; /* of a settled norm: m and ρ (C), and averages of Σ g and Σ g z (C, 3) */
    REAL *collected;                     /* of a settled norm: these sums now, and 1 (C, 3), or nothing */
} Backward;

typedef struct { REAL centre, scale, shift; } Line; /* scale (x - centre) + shift */
typedef struct { REAL grad, slope, centre, constant; } Slope; /* grad g + slope (x - centre) + constant */

SPECIAL long groups_of(const Shape *s) { return (s->examples + s->size - 1) / s->size; }
SPECIAL long examples_of(const Shape *s, long group) { return least(s->size, s->examples - group * s->size); }

SPECIAL double row(const Shape *s, const REAL *const rows[ROWS], int which, long group, long channel, double missing) {
    const REAL *at = rows[which];
    return at ? at[group * s->strides[which][0] + channel * s->strides[which][1]] : missing;
}

/* The observation of one channel -> the posterior, both written to `moments`. */
SPECIAL void combine(const Shape *s, const REAL *const rows[ROWS], REAL *moments, long group, long channel, double mean,
                     double var) {
    long step = groups_of(s) * s->channels, at = group * s->channels + channel;
    moments[OBSERVED_MEAN * step + at] = mean;
    moments[OBSERVED_VAR * step + at] = var;
    if (rows[GAIN]) {
        double q = row(s, rows, GAIN, group, channel, 1), p = 1 - q;
        double prior_mean = row(s, rows, PRIOR_MEAN, group, channel, 0);
        double prior_var = row(s, rows, PRIOR_VAR, group, channel, 1), surprise = mean - prior_mean;
        var = p * prior_var + q * var + q * p * surprise * surprise;
        mean = p * prior_mean + q * mean;
    }
    moments[MEAN * step + at] = mean;
    moments[VAR * step + at] = var;
}

SPECIAL Line line_of(const Shape *s, const REAL *const rows[ROWS], const REAL *moments, long group, long channel) {
    long step = groups_of(s) * s->channels, at = group * s->channels + channel;
    double rho = 1 / sqrt(moments[VAR * step + at] + s->eps);
    Line line = {moments[MEAN * step + at], row(s, rows, WEIGHT, group, channel, 1) * rho,
                 row(s, rows, BIAS, group, channel, 0)};
    return line;
}

/* Gradients with respect to the posterior -> those of prior and gain, written to `d_rows`, and how dx follows from g
   and x. `scale` is that of g. */
SPECIAL Slope share_out(const Shape *s, const Backward *b, long group, long channel, double scale, double by_mean,
                        double by_var) {
    long step = groups_of(s) * s->channels, at = group * s->channels + channel;
    double observed = b->moments[OBSERVED_MEAN * step + at], count = (double)examples_of(s, group) * s->positions;
    if (b->grad_moments[MEAN]) by_mean += b->grad_moments[MEAN][at];
    if (b->grad_moments[VAR]) by_var += b->grad_moments[VAR][at];
    if (b->rows[GAIN]) { /* see `update_backward` in _filter.py */
        double q = row(s, b->rows, GAIN, group, channel, 1), p = 1 - q;
        double surprise = observed - row(s, b->rows, PRIOR_MEAN, group, channel, 0), lever = q * by_var * surprise;
        double wider = b->moments[OBSERVED_VAR * step + at] - row(s, b->rows, PRIOR_VAR, group, channel, 1);
        b->d_rows[PRIOR_MEAN * step + at] = p * (by_mean - 2 * lever);
        b->d_rows[PRIOR_VAR * step + at] = p * by_var;
        b->d_rows[GAIN * step + at] = (by_mean + (p - q) * by_var * surprise) * surprise + by_var * wider;
        by_mean = q * by_mean + 2 * p * lever;
        by_var = q * by_var;
    }
    if (b->grad_moments[OBSERVED_MEAN]) by_mean += b->grad_moments[OBSERVED_MEAN][at];
    if (b->grad_moments[OBSERVED_VAR]) by_var += b->grad_moments[OBSERVED_VAR][at];
    Slope slope = {scale, 2 * by_var / count, observed, by_mean / count};
    return slope;
}

/* Σ g and Σ g (x - mean) of one channel -> the gradients of γ and β, written to `d_rows`. */
SPECIAL void add_up(const Shape *s, const Backward *b, long group, long channel, double rho, double sum,
                    double product) {
    long step = groups_of(s) * s->channels, at = group * s->channels + channel;
    b->d_rows[WEIGHT * step + at] = rho * product;
    b->d_rows[BIAS * step + at] = sum;
}

/* The gradients of one channel from its sums. */
SPECIAL Slope differentiate(const Shape *s, const Backward *b, long group, long channel, double sum, double product) {
    long step = groups_of(s) * s->channels, at = group * s->channels + channel;
    double rho = 1 / sqrt(b->moments[VAR * step + at] + s->eps);
    double scale = row(s, b->rows, WEIGHT, group, channel, 1) * rho;
    add_up(s, b, group, channel, rho, sum, product);
    return share_out(s, b, group, channel, scale, -scale * sum, -0.5 * scale * rho * rho * product);
}

/* The gradients of one channel of a settled norm. They need no sums of this backward: see aten_settled.py. */
SPECIAL Slope expected(const Shape *s, const Backward *b, long group, long channel) {
    double rho = b->rho[channel], scale = row(s, b->rows, WEIGHT, group, channel, 1) * rho;
    double share = (double)examples_of(s, group) / s->examples;
    double sum = share * b->averages[3 * channel], product = share * b->averages[3 * channel + 1];
    return share_out(s, b, group, channel, scale, -scale * sum, -0.5 * scale * rho * product);
}

SPECIAL Line settled_line(const Shape *s, const Backward *b, long group, long channel) {
    Line line = {b->centre[channel], row(s, b->rows, WEIGHT, group, channel, 1) * b->rho[channel],
                 row(s, b->rows, BIAS, group, channel, 0)};
    return line;
}

SPECIAL REAL passed(int mask, REAL grad, REAL x, REAL y, Line line) {
    if (mask == BY_OUTPUT) return y <= 0 ? 0 : grad;
    if (mask == BY_INPUT) return (x - line.centre) * line.scale + line.shift <= 0 ? 0 : grad;
    return grad;
}

/* One channel in one example, in memory one after the other. */

ONCE double total(const REAL *x, long n) {
    double sum = 0;
    for (long start = 0; start < n; start += CHUNK) {
        const REAL *at = x + start;
        long stop = least(CHUNK, n - start);
        REAL part = 0;
#pragma omp simd reduction(+ : part)
        for (long i = 0; i < stop; i++) part += at[i];
        sum += part;
    }
    return sum;
}

ONCE void centred(const REAL *x, long n, REAL middle, double sums[2]) {
    for (long start = 0; start < n; start += CHUNK) {
        const REAL *at = x + start;
        long stop = least(CHUNK, n - start);
        REAL first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
        for (long i = 0; i < stop; i++) {
            REAL away = at[i] - middle;
            first += away;
            second += away * away;
        }
        sums[0] += first;
        sums[1] += second;
    }
}

ONCE void write_line(const REAL *restrict x, const REAL *restrict residual, REAL *restrict y, long n, Line line, int relu) {
    if (!residual && !relu) {
#pragma omp simd
        for (long i = 0; i < n; i++) y[i] = (x[i] - line.centre) * line.scale + line.shift;
        return;
    }
    for (long i = 0; i < n; i++) {
        REAL value = (x[i] - line.centre) * line.scale + line.shift;
        if (residual) value += residual[i];
        y[i] = relu && value < 0 ? 0 : value;
    }
}

SPECIAL void products_of(int mask, const REAL *restrict grad, const REAL *restrict x, const REAL *restrict y,
                         REAL *restrict d_residual, long n, Line line, double sums[2]) {
    for (long start = 0; start < n; start += CHUNK) {
        long stop = start + least(CHUNK, n - start);
        REAL sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
        for (long i = start; i < stop; i++) {
            REAL g = passed(mask, grad[i], x[i], mask == BY_OUTPUT ? y[i] : 0, line);
            sum += g;
            product += g * (x[i] - line.centre);
        }
        if (d_residual)
            for (long i = start; i < stop; i++)
                d_residual[i] = passed(mask, grad[i], x[i], mask == BY_OUTPUT ? y[i] : 0, line);
        sums[0] += sum;
        sums[1] += product;
    }
}

SPECIAL void write_slope(int mask, const REAL *restrict grad, const REAL *restrict x, const REAL *restrict y,
                         REAL *restrict dx, long n, Line line, Slope slope) {
#pragma omp simd
    for (long i = 0; i < n; i++) {
        REAL g = passed(mask, grad[i], x[i], mask == BY_OUTPUT ? y[i] : 0, line);
        dx[i] = slope.grad * g + (slope.slope * (x[i] - slope.centre) + slope.constant);
    }
}

/* Both at once, for a slope that is known before the sums. */
SPECIAL void settle_line(int mask, const REAL *restrict grad, const REAL *restrict x, const REAL *restrict y,
                         REAL *restrict dx, REAL *restrict d_residual, long n, Line line, Slope slope, double sums[2]) {
    for (long start = 0; start < n; start += CHUNK) {
        long stop = start + least(CHUNK, n - start);
        REAL sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
        for (long i = start; i < stop; i++) {
            REAL g = passed(mask, grad[i], x[i], mask == BY_OUTPUT ? y[i] : 0, line);
            sum += g;
            product += g * (x[i] - line.centre);
            dx[i] = slope.grad * g + (slope.slope * (x[i] - slope.centre) + slope.constant);
        }
        if (d_residual)
            for (long i = start; i < stop; i++)
                d_residual[i] = passed(mask, grad[i], x[i], mask == BY_OUTPUT ? y[i] : 0, line);
        sums[0] += sum;
        sums[1] += product;
    }
}

/* One channel of one group, not channels_last. */

SPECIAL long plane(const Shape *s, long example, long channel) {
    return (example * s->channels + channel) * s->positions;
}

static void observe_planes(const Shape *s, const REAL *x, long group, long channel, double *mean, double *var) {
    long first = group * s->size, last = first + examples_of(s, group);
    double count = (double)(last - first) * s->positions, sum = 0, sums[2] = {0, 0};
    for (long e = first; e < last; e++) sum += total(x + plane(s, e, channel), s->positions);
    REAL middle = sum / count;
    for (long e = first; e < last; e++) centred(x + plane(s, e, channel), s->positions, middle, sums);
    double missed = sums[0] / count, spread = sums[1] / count - missed * missed;
    *mean = middle + missed;
    *var = spread < 0 ? 0 : spread;
}

static void write_planes(const Shape *s, const Forward *f, long group, long channel) {
    long first = group * s->size, last = first + examples_of(s, group);
    Line line = line_of(s, f->rows, f->moments, group, channel);
    for (long e = first; e < last; e++) {
        long at = plane(s, e, channel);
        write_line(f->x + at, f->residual ? f->residual + at : 0, f->y + at, s->positions, line, s->relu);
    }
}

SPECIAL void backward_planes(int mask, const Shape *s, const Backward *b, long group, long channel) {
    long first = group * s->size, last = first + examples_of(s, group);
    Line line = line_of(s, b->rows, b->moments, group, channel);
    double sums[2] = {0, 0};
    for (long e = first; e < last; e++) {
        long at = plane(s, e, channel);
        products_of(mask, b->grad + at, b->x + at, mask == BY_OUTPUT ? b->y + at : 0, b->d_residual ? b->d_residual + at : 0, s->positions,
                    line, sums);
    }
    Slope slope = differentiate(s, b, group, channel, sums[0], sums[1]);
    for (long e = first; e < last; e++) {
        long at = plane(s, e, channel);
        write_slope(mask, b->grad + at, b->x + at, mask == BY_OUTPUT ? b->y + at : 0, b->dx + at, s->positions, line, slope);
    }
}

SPECIAL void settle_planes(int mask, const Shape *s, const Backward *b, long group, long channel) {
    long first = group * s->size, last = first + examples_of(s, group);
    Line line = settled_line(s, b, group, channel);
    Slope slope = expected(s, b, group, channel);
    double sums[2] = {0, 0};
    for (long e = first; e < last; e++) {
        long at = plane(s, e, channel);
        settle_line(mask, b->grad + at, b->x + at, mask == BY_OUTPUT ? b->y + at : 0, b->dx + at,
                    b->d_residual ? b->d_residual + at : 0, s->positions, line, slope, sums);
    }
    add_up(s, b, group, channel, b->rho[channel], sums[0], sums[1]);
}

/* Some neighbouring channels of one group, channels_last. */

#define EVERY for (long j = 0; j < width; j++)
#define STEP 64 /* rows whose sum is a REAL */

SPECIAL void observe_block(const Shape *s, const REAL *x, long rows, long width, double *mean, double *var) {
    double sums[WIDEST] = {0}, squares[WIDEST] = {0}, count = rows;
    REAL middle[WIDEST];
    for (long start = 0; start < rows; start += STEP) {
        REAL part[WIDEST] = {0};
        long stop = least(start + STEP, rows);
        for (long r = start; r < stop; r++) EVERY part[j] += x[r * s->channels + j];
        EVERY sums[j] += part[j];
    }
    EVERY middle[j] = sums[j] / count;
    EVERY sums[j] = 0;
    for (long start = 0; start < rows; start += STEP) {
        REAL first[WIDEST] = {0}, second[WIDEST] = {0};
        long stop = least(start + STEP, rows);
        for (long r = start; r < stop; r++) EVERY {
            REAL away = x[r * s->channels + j] - middle[j];
            first[j] += away;
            second[j] += away * away;
        }
        EVERY sums[j] += first[j];
        EVERY squares[j] += second[j];
    }
    EVERY {
        double missed = sums[j] / count, spread = squares[j] / count - missed * missed;
        mean[j] = middle[j] + missed;
        var[j] = spread < 0 ? 0 : spread;
    }
}

SPECIAL void write_block(const Shape *s, const Forward *f, long group, long from, long width) {
    long rows = examples_of(s, group) * s->positions, start = group * s->size * s->positions;
    REAL centre[WIDEST], scale[WIDEST], shift[WIDEST];
    EVERY {
        Line line = line_of(s, f->rows, f->moments, group, from + j);
        centre[j] = line.centre, scale[j] = line.scale, shift[j] = line.shift;
    }
    for (long r = start; r < start + rows; r++) {
        const REAL *restrict x = f->x + r * s->channels + from;
        const REAL *restrict residual = f->residual ? f->residual + r * s->channels + from : 0;
        REAL *restrict y = f->y + r * s->channels + from;
        if (!residual && !s->relu) {
            EVERY y[j] = (x[j] - centre[j]) * scale[j] + shift[j];
        } else if (!residual) {
            EVERY {
                REAL value = (x[j] - centre[j]) * scale[j] + shift[j];
                y[j] = value < 0 ? 0 : value;
            }
        } else {
            EVERY {
                REAL value = (x[j] - centre[j]) * scale[j] + shift[j] + residual[j];
                y[j] = s->relu && value < 0 ? 0 : value;
            }
        }
    }
}

SPECIAL void backward_block(int mask, const Shape *s, const Backward *b, long group, long from, long width) {
    long rows = examples_of(s, group) * s->positions, begin = group * s->size * s->positions;
    Line line[WIDEST];
    REAL centre[WIDEST], grad_scale[WIDEST], slope[WIDEST], observed[WIDEST], constant[WIDEST];
    double sums[WIDEST] = {0}, products[WIDEST] = {0};
    EVERY line[j] = line_of(s, b->rows, b->moments, group, from + j);
    EVERY centre[j] = line[j].centre;
    for (long start = begin; start < begin + rows; start += STEP) {
        REAL sum[WIDEST] = {0}, product[WIDEST] = {0};
        long stop = least(start + STEP, begin + rows);
        for (long r = start; r < stop; r++) {
            long at = r * s->channels + from;
            const REAL *restrict grad = b->grad + at, *restrict x = b->x + at, *restrict y = mask == BY_OUTPUT ? b->y + at : 0;
            REAL *restrict residual = b->d_residual ? b->d_residual + at : 0;
            EVERY {
                REAL g = passed(mask, grad[j], x[j], mask == BY_OUTPUT ? y[j] : 0, line[j]);
                sum[j] += g;
                product[j] += g * (x[j] - centre[j]);
            }
            if (residual) EVERY residual[j] = passed(mask, grad[j], x[j], mask == BY_OUTPUT ? y[j] : 0, line[j]);
        }
        EVERY sums[j] += sum[j];
        EVERY products[j] += product[j];
    }
    EVERY {
        Slope of = differentiate(s, b, group, from + j, sums[j], products[j]);
        grad_scale[j] = of.grad, slope[j] = of.slope, observed[j] = of.centre, constant[j] = of.constant;
    }
    for (long r = begin; r < begin + rows; r++) {
        long at = r * s->channels + from;
        const REAL *restrict grad = b->grad + at, *restrict x = b->x + at, *restrict y = mask == BY_OUTPUT ? b->y + at : 0;
        REAL *restrict dx = b->dx + at;
        EVERY {
            REAL g = passed(mask, grad[j], x[j], mask == BY_OUTPUT ? y[j] : 0, line[j]);
            dx[j] = grad_scale[j] * g + (slope[j] * (x[j] - observed[j]) + constant[j]);
        }
    }
}

SPECIAL void settle_block(int mask, const Shape *s, const Backward *b, long group, long from, long width) {
    long rows = examples_of(s, group) * s->positions, begin = group * s->size * s->positions;
    Line line[WIDEST];
    REAL centre[WIDEST], grad_scale[WIDEST], slope[WIDEST], observed[WIDEST], constant[WIDEST];
    double sums[WIDEST] = {0}, products[WIDEST] = {0};
    EVERY {
        Slope of = expected(s, b, group, from + j);
        line[j] = settled_line(s, b, group, from + j);
        centre[j] = line[j].centre;
        grad_scale[j] = of.grad, slope[j] = of.slope, observed[j] = of.centre, constant[j] = of.constant;
    }
    for (long start = begin; start < begin + rows; start += STEP) {
        REAL sum[WIDEST] = {0}, product[WIDEST] = {0};
        long stop = least(start + STEP, begin + rows);
        for (long r = start; r < stop; r++) {
            long at = r * s->channels + from;
            const REAL *restrict grad = b->grad + at, *restrict x = b->x + at;
            const REAL *restrict y = mask == BY_OUTPUT ? b->y + at : 0;
            REAL *restrict dx = b->dx + at, *restrict residual = b->d_residual ? b->d_residual + at : 0;
            EVERY {
                REAL g = passed(mask, grad[j], x[j], mask == BY_OUTPUT ? y[j] : 0, line[j]);
                sum[j] += g;
                product[j] += g * (x[j] - centre[j]);
                dx[j] = grad_scale[j] * g + (slope[j] * (x[j] - observed[j]) + constant[j]);
            }
            if (residual) EVERY residual[j] = passed(mask, grad[j], x[j], mask == BY_OUTPUT ? y[j] : 0, line[j]);
        }
        EVERY sums[j] += sum[j];
        EVERY products[j] += product[j];
    }
    EVERY add_up(s, b, group, from + j, b->rho[from + j], sums[j], products[j]);
}

/* How the work is divided among threads: one unit is a group and a block of channels. */

SPECIAL long width_of(const Shape *s, long threads) {
    long width = s->last ? WIDEST : 1;
    while (width > 16 && groups_of(s) * ((s->channels + width - 1) / width) < 2 * threads) width /= 2;
    return width;
}

#define EACH_UNIT                                                                                     \
    long width = width_of(s, threads), blocks = (s->channels + width - 1) / width;                    \
    _Pragma("omp parallel for num_threads(threads) schedule(static)")                                 \
    for (long unit = 0; unit < groups_of(s) * blocks; unit++)

#define UNIT                                                                                          \
    long group = unit / blocks, from = unit % blocks * width, some = least(width, s->channels - from); \
    (void)some;

static void observe_unit(const Shape *s, const REAL *x, const REAL *const rows[ROWS], REAL *moments, long group,
                         long from, long width) {
    double mean[WIDEST], var[WIDEST];
    if (!s->last) {
        observe_planes(s, x, group, from, mean, var);
        width = 1;
    } else {
        const REAL *at = x + group * s->size * s->positions * s->channels + from;
        long count = examples_of(s, group) * s->positions;
        observe_block(s, at, count, width, mean, var);
    }
    EVERY combine(s, rows, moments, group, from + j, mean[j], var[j]);
}

static void write_unit(const Shape *s, const Forward *f, long group, long from, long width) {
    if (!s->last) write_planes(s, f, group, from);
    else write_block(s, f, group, from, width);
}

SPECIAL void backward_unit(int mask, const Shape *s, const Backward *b, long group, long from, long width) {
    if (!s->last) backward_planes(mask, s, b, group, from);
    else backward_block(mask, s, b, group, from, width);
}

SPECIAL void settle_unit(int mask, const Shape *s, const Backward *b, long group, long from, long width) {
    if (!s->last) settle_planes(mask, s, b, group, from);
    else settle_block(mask, s, b, group, from, width);
}

/* What Python calls. */

void observe(const Shape *s, const REAL *x, REAL *moments, long threads) {
    const REAL *rows[ROWS] = {0};
    EACH_UNIT {
        UNIT
        observe_unit(s, x, rows, moments, group, from, some);
    }
}

/* Without y it only observes and filters. */
void forward(const Shape *s, const Forward *f, long threads) {
    EACH_UNIT {
        UNIT
        observe_unit(s, f->x, f->rows, f->moments, group, from, some);
        if (f->y) write_unit(s, f, group, from, some);
    }
}

/* y from known moments. */
void again(const Shape *s, const Forward *f, long threads) {
    EACH_UNIT {
        UNIT
        write_unit(s, f, group, from, some);
    }
}

void backward(const Shape *s, const Backward *b, long threads) {
    EACH_UNIT {
        UNIT
        if (b->y) backward_unit(BY_OUTPUT, s, b, group, from, some);
        else if (s->relu) backward_unit(BY_INPUT, s, b, group, from, some);
        else backward_unit(ALL, s, b, group, from, some);
    }
}

void settle_backward(const Shape *s, const Backward *b, long threads) {
    EACH_UNIT {
        UNIT
        if (b->y) settle_unit(BY_OUTPUT, s, b, group, from, some);
        else if (s->relu) settle_unit(BY_INPUT, s, b, group, from, some);
        else settle_unit(ALL, s, b, group, from, some);
    }
    long step = groups_of(s) * s->channels;
    for (long c = 0; b->collected && c < s->channels; c++) {
        double sum = 0, product = 0;
        for (long at = c; at < step; at += s->channels)
            sum += b->d_rows[BIAS * step + at], product += b->d_rows[WEIGHT * step + at];
        b->collected[3 * c] = sum, b->collected[3 * c + 1] = product, b->collected[3 * c + 2] = 1;
    }
}
