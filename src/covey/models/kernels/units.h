/* What products multiply: units, of one number of the inner dimension or, where the processor multiplies pairs of
 * bfloat16, of two. MIXED are products of floats that are rounded to bfloat16 on the way; their sums are floats. */
#ifndef UNITS_H
#define UNITS_H
#include "vector.h"

#if (defined(BFLOAT16) || defined(MIXED)) && defined(__AVX512BF16__)
#define DOT 2 /* numbers of a unit */
#if defined(__AMX_BF16__)
#define TILES 16 /* rows of a tile; units along one */
#endif
#else
#define DOT 1
#endif

static inline uint16_t half_of(float x) {
    union { float f; uint32_t u; } bits = {x};
    return (bits.u + 0x7fff + (bits.u >> 16 & 1)) >> 16;
}

#if DOT == 2
#include <immintrin.h>
typedef uint32_t unit;
typedef ivec units;
#ifdef MIXED
static inline uint16_t half_at(const real *x) { return half_of(*x); }
static inline uvec halves_at(const real *x) { return rounded(load(x)) >> 16; }
static inline units line_of(const real *x) { return (units)_mm512_cvtne2ps_pbh((__m512)load(x + LANES), (__m512)load(x)); }
#else
static inline uint16_t half_at(const real *x) { return *x; }
static inline uvec halves_at(const real *x) { return __builtin_convertvector(*(const hvec *)x, uvec); }
static inline units line_of(const real *x) { return *(const units *)x; }
#endif
static inline unit last(const real *x) { return half_at(x); }
static inline unit join(const real *first, const real *second) { return half_at(first) | (uint32_t)half_at(second) << 16; }
static inline units join_vec(const real *first, const real *second) {
    return (units)(halves_at(first) | halves_at(second) << 16);
}
#ifndef TILES
static inline vec multiply_add(vec acc, units a, unit b) {
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
}
#endif
#else
typedef float unit;
typedef vec units;
#ifdef MIXED
static inline unit join(const real *first, const real *second) { return widened(half_of(*first)); }
static inline units line_of(const real *x) { return (vec)(rounded(load(x)) & 0xffff0000); }
#else
static inline unit join(const real *first, const real *second) { return get(first); }
static inline units line_of(const real *x) { return load(x); }
#endif
static inline unit last(const real *x) { return 0; }
static inline units join_vec(const real *first, const real *second) { return line_of(first); }
static inline vec multiply_add(vec acc, units a, unit b) { return acc + a * b; }
#endif

/* A square of units, LANES vectors, transposed: rows change places with columns by ones, twos, fours, ... */
static inline void turn(units *rows) {
#ifdef __clang__
    unit *at = (unit *)rows;
    for (long i = 0; i < LANES; i++)
        for (long j = 0; j < i; j++) {
            unit other = at[i * LANES + j];
            at[i * LANES + j] = at[j * LANES + i], at[j * LANES + i] = other;
        }
#else
    const ivec lane = lanes();
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        ivec right = (lane & step) != 0, upper = lane + (right & (LANES - step)), lower = lane + step + (right & (LANES - step));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                units a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, upper), rows[i + step] = __builtin_shuffle(a, b, lower);
            }
    }
#endif
}
#endif
