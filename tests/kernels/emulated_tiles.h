/* The tiles of kernels/tiles.h in plain C, for processors that have none: -include this, and that is skipped. */
#define TILES_H
#define __AMX_BF16__ 1
#include <math.h>
#include <stdint.h>
#include <string.h>

static _Thread_local struct { uint8_t bytes[16][64]; long rows; } tiles[8];

static void tiles_begin(long rows) {
    memset(tiles, 0xff, sizeof tiles); /* NaN: what was not loaded is noticed */
    for (int i = 0; i < 8; i++)
        tiles[i].rows = i >= 6 ? 16 : i == 2 || i == 3 || i == 5 ? (rows > 16 ? rows - 16 : 1) : rows < 16 ? rows : 16;
}
static void tiles_end(void) {}
static void tile_zero(int t) { memset(tiles[t].bytes, 0, sizeof tiles[t].bytes); }
static void tile_load(int t, const void *from, long stride) {
    memset(tiles[t].bytes, 0, sizeof tiles[t].bytes);
    for (long r = 0; r < tiles[t].rows; r++) memcpy(tiles[t].bytes[r], (const char *)from + r * stride, 64);
}
static void tile_store(int t, void *to, long stride) {
    for (long r = 0; r < tiles[t].rows; r++) memcpy((char *)to + r * stride, tiles[t].bytes[r], 64);
}
static float widened(uint16_t x) {
    union { uint32_t u; float f; } wide = {(uint32_t)x << 16};
    return wide.f;
}
/* For each element the even and the odd products are summed apart, then added to it. */
static void tile_dot(int c, int a, int b) {
    for (long m = 0; m < tiles[c].rows; m++)
        for (long n = 0; n < 16; n++) {
            float even = 0, odd = 0, sum;
            uint16_t left[2], right[2];
            for (long k = 0; k < 16; k++) {
                memcpy(left, tiles[a].bytes[m] + 4 * k, 4);
                memcpy(right, tiles[b].bytes[k] + 4 * n, 4);
                even = fmaf(widened(left[0]), widened(right[0]), even);
                odd = fmaf(widened(left[1]), widened(right[1]), odd);
            }
            memcpy(&sum, tiles[c].bytes[m] + 4 * n, 4);
            sum += even + odd;
            memcpy(tiles[c].bytes[m] + 4 * n, &sum, 4);
        }
}
