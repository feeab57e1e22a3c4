/* The instructions of models/kernels/tiles.h in plain C, for processors that have none: -include this. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#undef __AVX512F__ /* which sets how long vectors are: a compiler makes shorter ones of them */
#define __AVX512F__ 1
#undef __AVX512BF16__
#define __AVX512BF16__ 1
#define __AMX_BF16__ 1

static _Thread_local struct { uint8_t bytes[16][64]; } tiles[8];

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) memset(tiles, 0xff, sizeof tiles) /* NaN: what was not loaded is noticed */
#define _tile_release() memset(tiles, 0xff, sizeof tiles)
#define _tile_zero(t) memset(tiles[t].bytes, 0, sizeof tiles[t].bytes)
#define _tile_loadd(t, from, stride) \
    for (long r = 0; r < 16; r++) memcpy(tiles[t].bytes[r], (const char *)(from) + r * (stride), 64)
#define _tile_stored(t, to, stride) \
    for (long r = 0; r < 16; r++) memcpy((char *)(to) + r * (stride), tiles[t].bytes[r], 64)

static inline float widened_bits(uint16_t x) {
    union { uint32_t u; float f; } wide = {(uint32_t)x << 16};
    return wide.f;
}
/* For each element the even and the odd products are summed apart, then added to it. */
static inline void _tile_dpbf16ps(int c, int a, int b) {
    for (long m = 0; m < 16; m++)
        for (long n = 0; n < 16; n++) {
            float even = 0, odd = 0, sum;
            uint16_t left[2], right[2];
            for (long k = 0; k < 16; k++) {
                memcpy(left, tiles[a].bytes[m] + 4 * k, 4);
                memcpy(right, tiles[b].bytes[k] + 4 * n, 4);
                even = fmaf(widened_bits(left[0]), widened_bits(right[0]), even);
                odd = fmaf(widened_bits(left[1]), widened_bits(right[1]), odd);
            }
            memcpy(&sum, tiles[c].bytes[m] + 4 * n, 4);
            sum += even + odd;
            memcpy(tiles[c].bytes[m] + 4 * n, &sum, 4);
        }
}

/* Two vectors of floats, the second one's numbers first, as one of bfloat16. */
typedef float emulated_floats __attribute__((vector_size(64)));
typedef uint16_t emulated_halves __attribute__((vector_size(64)));
static inline emulated_halves emulated_round(emulated_floats later, emulated_floats earlier) {
    emulated_halves out;
    for (int i = 0; i < 32; i++) {
        union { float f; uint32_t u; } bits = {i < 16 ? earlier[i] : later[i - 16]};
        out[i] = (bits.u + 0x7fff + (bits.u >> 16 & 1)) >> 16;
    }
    return out;
}
#define _mm512_cvtne2ps_pbh(later, earlier) emulated_round((emulated_floats)(later), (emulated_floats)(earlier))
