/* Tiles of AMX: eight registers of 16 rows of 64 bytes, used as 0-3 sums of float, 4 and 5 rows of bfloat16,
 * 6 and 7 pairs of the other factor. tile_dot(c, a, b): c += a b. */
#ifndef TILES_H
#define TILES_H
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Linux gives a process the registers when it asks. 0 if it did. */
int permit_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

/* Shapes for blocks of `rows` rows, 1 to 32. */
static inline void tiles_begin(long rows) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {1};
    long upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = i >= 6 ? 16 : i == 2 || i == 3 || i == 5 ? lower : upper;
    }
    _tile_loadconfig(&shapes);
}

/* Expressions, where gcc has statements. */
#define tiles_end() _tile_release()
#define tile_zero(c) ({ _tile_zero(c); })
#define tile_load(t, from, stride) ({ _tile_loadd(t, from, stride); })
#define tile_store(t, to, stride) ({ _tile_stored(t, to, stride); })
#define tile_dot(c, a, b) ({ _tile_dpbf16ps(c, a, b); })
#endif
