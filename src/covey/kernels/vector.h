/* Sixteen floats at a time, in the vector extensions that gcc and clang share: they become AVX-512,
 * AVX2 or NEON as the machine has them. `real` is what lies in memory, float or bfloat16; all
 * arithmetic is in float. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

static inline v16 splat(float x) { return (v16){0} + x; }
static inline v16 pick(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }
static inline v16 larger(v16 a, v16 b) { return pick(a > b, a, b); }

static inline float sum_of(v16 x) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += x[i];
    return s;
}

static inline float max_of(v16 x) {
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* e^x to about 1 ulp by Cody-Waite reduction and a polynomial; exactly 0 below -87. */
static inline v16 exp16(v16 x) {
    i16 alive = x > splat(-87.0f);
    v16 bounded = pick(alive, pick(x < splat(88.0f), x, splat(88.0f)), splat(0));
    v16 shifted = bounded * 1.44269504f + 12582912.0f; /* rounds to an integer in the low bits */
    v16 n = shifted - 12582912.0f;
    v16 r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
    v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i16 exponent = (i16)shifted << 23;
    return pick(alive, (v16)((i16)p + exponent), splat(0));
}

#ifdef BFLOAT16
typedef uint16_t real;
static inline v16 load(const real *p) {
    return (v16)(__builtin_convertvector(*(const h16 *)p, u16) << 16);
}
static inline void store(real *p, v16 x) {
    u16 bits = (u16)x; /* to nearest, ties to even */
    *(h16 *)p = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, h16);
}
static inline float get(const real *p) {
    union { uint32_t u; float f; } x = {(uint32_t)*p << 16};
    return x.f;
}
#define NAME(f) f##_bf16
#else
typedef float real;
static inline v16 load(const real *p) { return *(const v16 *)p; }
static inline void store(real *p, v16 x) { *(v16 *)p = x; }
static inline float get(const real *p) { return *p; }
#define NAME(f) f##_f32
#endif
