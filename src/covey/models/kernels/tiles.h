/* Tiles of AMX: eight registers of 16 rows of 64 bytes. 0 to 3 are sums of float, 4 and 5 rows of one factor in pairs of
 * bfloat16, 6 and 7 columns of the other. What is multiplied is padded with zeros, so that all tiles are whole. */
#ifndef TILES_H
#define TILES_H

#define SQUARE (TILES * TILES) /* units of a tile */

static inline void tiles_begin(void) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = TILES;
    _tile_loadconfig(&shapes);
}
/* Macros, because gcc wants the numbers of tiles as they are. */
#define tiles_end() _tile_release()
#define TILE_STEP(high)                                                                    \
    _tile_loadd(4, a + s * SQUARE, 64);                                                    \
    _tile_loadd(6, b + s * TILES * PANEL, PANEL * sizeof(unit));                           \
    _tile_loadd(7, b + s * TILES * PANEL + TILES, PANEL * sizeof(unit));                   \
    _tile_dpbf16ps(0, 4, 6);                                                               \
    _tile_dpbf16ps(1, 4, 7);                                                               \
    if (high) {                                                                            \
        _tile_loadd(5, a + (steps + s) * SQUARE, 64);                                      \
        _tile_dpbf16ps(2, 5, 6);                                                           \
        _tile_dpbf16ps(3, 5, 7);                                                           \
    }

/* Sums += a b over `steps` tiles: a of 16 or, if high, 32 rows, [2][steps][16][16] units, b [steps][16][PANEL]. */
static inline void tiles_multiply(const unit *a, const unit *b, long steps, int high) {
    if (high)
        for (long s = 0; s < steps; s++) { TILE_STEP(1) }
    else
        for (long s = 0; s < steps; s++) { TILE_STEP(0) }
}
static inline void tiles_zero(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
static inline void tiles_load(const float *c, long stride) {
    stride *= sizeof(float);
    const char *lower = (const char *)c + TILES * stride;
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + TILES, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + 64, stride);
}
static inline void tiles_store(float *c, long stride) {
    stride *= sizeof(float);
    char *lower = (char *)c + TILES * stride;
    _tile_stored(0, c, stride);
    _tile_stored(1, c + TILES, stride);
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + 64, stride);
}
#endif
