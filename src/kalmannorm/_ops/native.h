/* What all C kernels share. They are compiled once for float and once for double: -DREAL=float or -DREAL=double. */
#ifndef KALMANNORM_NATIVE_H
#define KALMANNORM_NATIVE_H

#define CHUNK 512
/* Sums run over chunks in REAL, and over the chunks in double. A float sum of 512 values in vector lanes is exact to
   about 1e-7. */
#define SPECIAL static inline __attribute__((always_inline))
/* A function that the compiler copies into its callers, with their constants. */
#define ONCE static __attribute__((noinline))
/* A function that exists once, so that all its callers get the same bits. */

SPECIAL long least(long a, long b) { return a < b ? a : b; }

#endif
