/* LANES floats at a time, in the vector extensions that gcc and clang share: as many as one register of the
 * machine holds (AVX-512, AVX2, NEON or SSE), because compilers keep wider vectors in memory. `real` is what
 * lies in memory, float or bfloat16; all arithmetic is in float. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Sums that products keep in registers at once: so many rows, and vectors beside each other. */
#define ROWS 6
#if defined(__AVX512F__) || defined(__aarch64__)
#define VECTORS 4 /* 24 of 32 */
#else
#define VECTORS 2 /* 12 of 16 */
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* A block, or loop, that up to team(work) threads run; within it EACH takes the next `chunk` of `count` numbers that
 * none of them has taken; threads that help begin at the end, where they find in their caches what they left there. */
int team(long work);
int team_most(void);
#define PRAGMA(text) _Pragma(#text)
#define SHARED_BY(threads) long taken[3] = {0}; PRAGMA(omp parallel num_threads(threads))
#define TEAM(work) SHARED_BY(team(work))
#define EACH(i, count, chunk)                                                                                    \
    for (long i##_first, i##_end = (count), i##_chunk = (chunk);                                                 \
         (i##_first = i##_chunk * next_part(taken, (i##_end + i##_chunk - 1) / i##_chunk)) >= 0;)                \
        for (long i = i##_first; i < i##_end && i < i##_first + i##_chunk; i++)
#define ROWS_OF(count) ((count) / 32 + 1) /* a chunk of short parts: few enough to take, even for a few threads */

int helping(void);
/* The number of a part that nobody has, -1 if none is left. `taken`: how many are, in all, from the beginning, from the end. */
static inline long next_part(long *taken, long parts) {
    if (__atomic_fetch_add(taken, 1, __ATOMIC_RELAXED) >= parts) return -1;
    int end = helping();
    long n = __atomic_fetch_add(taken + 1 + end, 1, __ATOMIC_RELAXED);
    return end ? parts - 1 - n : n;
}

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }

static inline ivec lanes(void) {
    static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const ivec *)numbers;
}
static inline vec splat(float x) { return (vec){0} + x; }
static inline vec pick(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
static inline vec larger(vec a, vec b) { return pick(a > b, a, b); }

static inline float sum_of(vec x) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += x[i];
    return s;
}

static inline float max_of(vec x) {
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* e^x for x up to 88, to about 1 ulp, by Cody-Waite reduction and a polynomial; exactly 0 below -87 and for NaN. */
static inline vec exp_below(vec x) {
    ivec alive = x > splat(-87.0f);
    vec bounded = (vec)(alive & (ivec)x);
    vec shifted = bounded * 1.44269504f + 12582912.0f; /* rounds to an integer in the low bits */
    vec n = shifted - 12582912.0f;
    vec r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = (ivec)shifted << 23;
    return (vec)(alive & ((ivec)p + exponent));
}

/* e^x for any x. */
static inline vec exp_of(vec x) { return exp_below(pick(x > splat(88.0f), splat(88.0f), x)); }

/* tanh x, to about 2 ulp: by a series near 0, where the other form loses digits (Cephes); NaN stays. */
static inline vec tanh_of(vec x) {
    vec s = x * x, p = s * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    return pick(s >= splat(0.390625f), 1.0f - 2.0f / (exp_of(x + x) + 1.0f), x * s * p + x);
}
static inline vec capped(vec x, float cap) { return tanh_of(x * (1.0f / cap)) * cap; }

/* n scores, which are whole vectors in memory, capped. Never inlined: a compiler fuses sums alike for all who call it. */
static __attribute__((noinline, unused)) void cap_scores(float *scores, long n, float cap) {
    for (long i = 0; i < n; i += LANES) *(vec *)(scores + i) = capped(*(vec *)(scores + i), cap);
}

/* The slope of a cap where y came out: 1 - (y / cap)^2; 1 for no cap (0 = 1 / cap), 0 for what was excluded after it. */
static inline vec cap_slope(vec y, float inverse_cap) {
    vec u = larger(y * inverse_cap, splat(-1.0f));
    return 1.0f - u * u;
}

/* To bfloat16, which is the upper half of a float: to nearest, ties to even. What it leaves in the lower half is noise. */
static inline uvec rounded(vec x) {
    uvec bits = (uvec)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
}
static inline float widened(uint16_t x) {
    union { uint32_t u; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}

#ifdef BFLOAT16
typedef uint16_t real;
static inline vec load(const real *p) {
    return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16);
}
static inline void store(real *p, vec x) { *(hvec *)p = __builtin_convertvector(rounded(x) >> 16, hvec); }
static inline float get(const real *p) { return widened(*p); }
#define NAME(f) f##_bf16
#else
typedef float real;
static inline vec load(const real *p) { return *(const vec *)p; }
static inline void store(real *p, vec x) { *(vec *)p = x; }
static inline float get(const real *p) { return *p; }
#ifdef MIXED
#define NAME(f) f##_mixed
#else
#define NAME(f) f##_f32
#endif
#endif
