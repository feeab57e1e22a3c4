/* Matrix products with weights packed once per update.
 *
 * A product's element is one sum over the inner dimension in its order, whatever rows are computed beside
 * it and however many threads there are: a token's result is the same bits alone, in a batch, in decoding
 * and in training.
 *
 * A packed weight (N, K) is panels of PANEL outputs: [N / PANEL][K / DOT][PANEL] units, rounded up, zeros
 * behind N and K. A unit is a float, or a pair of bfloat16 where the processor multiplies pairs. */
#include "vector.h"

#if defined(BFLOAT16) && defined(__AMX_BF16__)
#include "tiles.h"
#define TILES 16 /* rows of a tile; units along one */
#undef ROWS
#define ROWS 1 /* rows of a copy that lie side by side: none, tiles are read with a stride */
#define TALL (2 * TILES)
#define PANEL (2 * TILES)
#else
#define TALL ROWS
#define PANEL (VECTORS * LANES)
#endif
#define TASK 96             /* tokens that a thread takes at once, */
#define PANELS (64 / PANEL) /* with so many panels */
#define ONCE 1024           /* tokens for which a thread packs them */

#if defined(TILES) || defined(BFLOAT16) && defined(__AVX512BF16__)
#define DOT 2
typedef uint32_t unit;
typedef ivec units;
static inline unit at(const real *x) { return *(const uint32_t __attribute__((aligned(2), may_alias)) *)x; }
static inline unit last(const real *x) { return *x; }
static inline unit join(const real *first, const real *second) { return *first | (uint32_t)*second << 16; }
static inline units join_vec(const real *first, const real *second) {
    uvec a = __builtin_convertvector(*(const hvec *)first, uvec), b = __builtin_convertvector(*(const hvec *)second, uvec);
    return (units)(a | b << 16);
}
#else
#define DOT 1
typedef float unit;
typedef vec units;
static inline vec multiply_add(vec acc, units a, unit b) { return acc + a * b; }
static inline unit at(const real *x) { return get(x); }
static inline unit last(const real *x) { return 0; }
static inline unit join(const real *first, const real *second) { return get(first); }
static inline units join_vec(const real *first, const real *second) { return load(first); }
#endif

#ifdef TILES
#define UNITS(K) (((K) + 2 * TILES - 1) / (2 * TILES) * TILES)
#else
#define UNITS(K) (((K) + DOT - 1) / DOT)
#if DOT == 2
#include <immintrin.h>
static inline vec multiply_add(vec acc, units a, unit b) {
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
}
#endif
#endif

/* Bytes of a packed weight. */
long NAME(packed_size)(long N, long K) { return (N + PANEL - 1) / PANEL * PANEL * UNITS(K) * sizeof(unit); }

/* Panel p of a weight (N, K) whose element (n, k) lies at w[n * wn + k * wk]. */
static inline __attribute__((always_inline)) void pack_strided(const real *w, const long wn, const long wk, unit *panel,
                                                               long p, long N, long K) {
    for (long k = 0; k < UNITS(K); k++)
        for (long i = 0; i < PANEL; i++) {
            const real *x = w + (p * PANEL + i) * wn + k * DOT * wk;
            panel[k * PANEL + i] = p * PANEL + i >= N || k * DOT >= K ? 0 : (k + 1) * DOT > K ? last(x) : join(x, x + wk);
        }
}

/* The same for a weight whose rows or, `turned`, whose columns lie side by side. */
static inline void pack_panel(const real *w, int turned, unit *panel, long p, long N, long K) {
    if (turned)
        pack_strided(w, 1, N, panel, p, N, K);
    else
        pack_strided(w, K, 1, panel, p, N, K);
}

/* Pack a weight (N, K). */
void NAME(pack_weight)(const real *w, unit *panels, long N, long K) {
    TEAM(2 * N * K)
    EACH(p, (N + PANEL - 1) / PANEL, 1) pack_panel(w, 0, panels + p * UNITS(K) * PANEL, p, N, K);
}

/* A vector of sums, `at` outputs into a panel that has `columns` of them. */
static inline void write_sums(vec sum, const float *bias, real *c, long at, long columns) {
    if (at >= columns) return;
    if (bias) sum += *(const vec *)(bias + at);
    if (columns - at >= LANES)
        store(c + at, sum);
    else {
        real line[LANES];
        store(line, sum);
        memcpy(c + at, line, (columns - at) * sizeof(real));
    }
}

#ifdef TILES
/* Rows m to end of C, one panel of its columns: 32 rows x 32 outputs are four tiles of sums. */
static inline void product_rows(const real *x, const unit *panel, const float *bias, real *c, long p, long m, long end,
                                long N, long K) {
    float sums[TALL * PANEL];
    real rest[TALL * 2 * TILES];
    for (; m < end; m += TALL) {
        long rows = end - m < TALL ? end - m : TALL, step = 2 * TILES;
        tiles_begin(rows);
        tile_zero(0), tile_zero(1);
        if (rows > TILES) tile_zero(2), tile_zero(3);
        for (long k = 0; k < K; k += step) {
            const real *a = x + m * K + k;
            long stride = K;
            if (k + step > K) { /* what lies behind a row is another's */
                memset(rest, 0, sizeof rest);
                for (long i = 0; i < rows; i++) memcpy(rest + i * step, a + i * K, (K - k) * sizeof(real));
                a = rest, stride = step;
            }
            tile_load(4, a, stride * sizeof(real));
            tile_load(6, panel + k / 2 * PANEL, PANEL * sizeof(unit));
            tile_load(7, panel + k / 2 * PANEL + TILES, PANEL * sizeof(unit));
            tile_dot(0, 4, 6), tile_dot(1, 4, 7);
            if (rows > TILES) {
                tile_load(5, a + TILES * stride, stride * sizeof(real));
                tile_dot(2, 5, 6), tile_dot(3, 5, 7);
            }
        }
        tile_store(0, sums, PANEL * sizeof(float)), tile_store(1, sums + TILES, PANEL * sizeof(float));
        if (rows > TILES) {
            tile_store(2, sums + TILES * PANEL, PANEL * sizeof(float));
            tile_store(3, sums + TILES * PANEL + TILES, PANEL * sizeof(float));
        }
        for (long i = 0; i < rows; i++)
            for (long j = 0; j < PANEL; j += LANES)
                write_sums(*(vec *)(sums + i * PANEL + j), bias ? bias + p * PANEL : NULL, c + (m + i) * N + p * PANEL, j,
                      N - p * PANEL);
    }
    tiles_end();
}
#else
static inline __attribute__((always_inline)) void product_tile(const real *x, long K, const unit *panel, const float *bias,
                                                               real *c, long N, long columns, const int rows) {
    vec acc[ROWS][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) acc[i][j] = splat(0);
    for (long k = 0; k < UNITS(K); k++) {
        units b[VECTORS];
        for (int j = 0; j < VECTORS; j++) b[j] = *(const units *)(panel + k * PANEL + j * LANES);
        for (int i = 0; i < rows; i++) {
            unit a = DOT == 1 || k < K / DOT ? at(x + i * K + k * DOT) : last(x + i * K + k * DOT);
            for (int j = 0; j < VECTORS; j++) acc[i][j] = multiply_add(acc[i][j], b[j], a);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) write_sums(acc[i][j], bias, c + i * N, j * LANES, columns);
}

/* Rows m to end of C, one panel of its columns. */
static inline void product_rows(const real *x, const unit *panel, const float *bias, real *c, long p, long m, long end,
                                long N, long K) {
    const float *own = bias ? bias + p * PANEL : NULL;
    long columns = N - p * PANEL;
    real *into = c + p * PANEL;
    for (; m + ROWS <= end; m += ROWS) product_tile(x + m * K, K, panel, own, into + m * N, N, columns, ROWS);
    switch (end - m) { /* constants, so that every case keeps its sums in registers */
    case 5: product_tile(x + m * K, K, panel, own, into + m * N, N, columns, 5); break;
    case 4: product_tile(x + m * K, K, panel, own, into + m * N, N, columns, 4); break;
    case 3: product_tile(x + m * K, K, panel, own, into + m * N, N, columns, 3); break;
    case 2: product_tile(x + m * K, K, panel, own, into + m * N, N, columns, 2); break;
    case 1: product_tile(x + m * K, K, panel, own, into + m * N, N, columns, 1); break;
    }
}
#endif

/* Rows m to end of C, `count` panels of its columns from p on: what a thread reads stays in its cache. */
static inline void product_panels(const real *x, const unit *panels, const float *bias, real *c, long p, long count,
                                  long m, long end, long N, long K) {
    for (; m < end; m += TASK)
        for (long i = 0; i < count; i++)
            product_rows(x, panels + i * UNITS(K) * PANEL, bias, c, p + i, m, m + TASK < end ? m + TASK : end, N, K);
}

static inline long panels_from(long p, long N) {
    long left = (N + PANEL - 1) / PANEL - p;
    return left < PANELS ? left : PANELS;
}

/* C (M, N) = X (M, K) W^T + bias; the bias (or NULL) has room for whole panels. */
void NAME(product)(const real *x, const unit *panels, const float *bias, real *c, long M, long N, long K) {
    long across = (N + PANELS * PANEL - 1) / (PANELS * PANEL), down = (M + TASK - 1) / TASK;
    TEAM(M * N * K)
    EACH(task, across * down, 1) {
        long p = task % across * PANELS, m = task / across * TASK, end = m + TASK < M ? m + TASK : M;
        product_panels(x, panels + p * UNITS(K) * PANEL, bias, c, p, panels_from(p, N), m, end, N, K);
    }
}

/* The same, and the same bits, from a weight (N, K), or its transpose (K, N), that is packed a few panels at a time:
 * for many rows, where a packed copy would only stand in memory. */
void NAME(product_once)(const real *x, const real *w, long turned, const float *bias, real *c, long M, long N, long K) {
    long across = (N + PANELS * PANEL - 1) / (PANELS * PANEL), down = (M + ONCE - 1) / ONCE;
    TEAM(M * N * K)
    EACH(task, across * down, 1) {
        long p = task % across * PANELS, m = task / across * ONCE, end = m + ONCE < M ? m + ONCE : M;
        unit *panels = aligned_alloc(64, PANELS * UNITS(K) * PANEL * sizeof(unit));
        long count = panels_from(p, N);
        for (long i = 0; i < count; i++) pack_panel(w, turned, panels + i * UNITS(K) * PANEL, p + i, N, K);
        product_panels(x, panels, bias, c, p, count, m, end, N, K);
        free(panels);
    }
}

/* --- sums over tokens: gradients of weights ------------------------------------------------------------ */

#define STEP 128   /* tokens summed before the accumulators are written */
#define STRIP 384  /* rows of dW that a thread takes at once at most, */
#define ACROSS 128 /* with so many columns: their copies fill half of a second-level cache */

#ifdef TILES
/* One panel of columns: g [rows][STEP / 2] and x [steps][PANEL or 16] units; adds to at most TALL rows of w. */
static inline void gradient_rows(const unit *g, const unit *x, float *w, long ws, long steps, long rows, long vectors) {
    int wide = vectors * LANES > TILES, high = rows > TILES;
    long across = wide ? PANEL : TILES, next = TILES * ws;
    tiles_begin(rows < TALL ? rows : TALL);
    tile_load(0, w, ws * sizeof(float));
    if (wide) tile_load(1, w + TILES, ws * sizeof(float));
    if (high) tile_load(2, w + next, ws * sizeof(float));
    if (wide && high) tile_load(3, w + next + TILES, ws * sizeof(float));
    for (long s = 0; s < steps; s += TILES) {
        tile_load(4, g + s, STEP / 2 * sizeof(unit));
        tile_load(6, x + s * across, across * sizeof(unit));
        if (high) tile_load(5, g + TILES * (STEP / 2) + s, STEP / 2 * sizeof(unit));
        if (wide) tile_load(7, x + s * across + TILES, across * sizeof(unit));
        tile_dot(0, 4, 6);
        if (wide) tile_dot(1, 4, 7);
        if (high) tile_dot(2, 5, 6);
        if (wide && high) tile_dot(3, 5, 7);
    }
    tile_store(0, w, ws * sizeof(float));
    if (wide) tile_store(1, w + TILES, ws * sizeof(float));
    if (high) tile_store(2, w + next, ws * sizeof(float));
    if (wide && high) tile_store(3, w + next + TILES, ws * sizeof(float));
    tiles_end();
}
#else
/* One panel of columns: g [steps][ROWS] and x [steps][vectors of 16] units; adds to `rows` rows of w. */
static inline __attribute__((always_inline)) void gradient_tile(const unit *g, const unit *x, float *w, long ws,
                                                                long steps, long rows, const int vectors) {
    vec acc[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) acc[i][j] = splat(0);
    for (long t = 0; t < steps; t++) {
        units b[VECTORS];
        for (int j = 0; j < vectors; j++) b[j] = *(const units *)(x + (t * vectors + j) * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < vectors; j++) acc[i][j] = multiply_add(acc[i][j], b[j], g[t * ROWS + i]);
    }
    for (int i = 0; i < ROWS && i < rows; i++)
        for (int j = 0; j < vectors; j++) *(vec *)(w + i * ws + j * LANES) += acc[i][j];
}

static inline void gradient_rows(const unit *g, const unit *x, float *w, long ws, long steps, long rows, long vectors) {
    switch (vectors) { /* constants, so that every case keeps its sums in registers */
    default: gradient_tile(g, x, w, ws, steps, rows, VECTORS); break;
#if VECTORS > 2
    case 3: gradient_tile(g, x, w, ws, steps, rows, 3); break;
    case 2: gradient_tile(g, x, w, ws, steps, rows, 2); break;
#endif
    case 1: gradient_tile(g, x, w, ws, steps, rows, 1); break;
    }
}
#endif

/* gp [width / ROWS][STEP / DOT][ROWS] from (tokens, width) elements of G. */
static inline void copy_strip(const real *g, long gs, unit *gp, long tokens, long width) {
    for (long s = 0; s < UNITS(tokens); s++) {
        const real *own = g + s * DOT * gs;
        long present = tokens - s * DOT;
        __builtin_prefetch(own + 16 * gs); /* its rows are on pages of their own */
        for (long i = 0; i < width; i += ROWS) {
            unit *into = gp + (i / ROWS * (STEP / DOT) + s) * ROWS;
            if (present >= DOT && i + ROWS <= width)
                for (int r = 0; r < ROWS; r++) into[r] = join(own + i + r, own + i + r + gs);
            else
                for (int r = 0; r < ROWS; r++)
                    into[r] = i + r >= width || present < 1 ? 0
                              : present < DOT               ? last(own + i + r)
                                                            : join(own + i + r, own + i + r + gs);
        }
    }
}

/* xp [columns / PANEL][steps][PANEL] from (tokens, columns) elements of X. */
static inline void copy_columns(const real *x, long xs, unit *xp, long tokens, long columns) {
    static const real nothing[LANES] = {0};
    long steps = UNITS(tokens);
    for (long s = 0; s < steps; s++)
        for (long k = 0; k < columns; k += LANES) {
            const real *own = s * DOT < tokens ? x + s * DOT * xs + k : nothing;
            long panel = k - k % PANEL, width = columns - panel < PANEL ? columns - panel : PANEL;
            *(units *)(xp + panel * steps + s * width + k % PANEL) = join_vec(own, s * DOT + 1 < tokens ? own + xs : nothing);
        }
}

/* W (N, K) += G^T X, the gradient of a weight. G (M, N) and X (M, K) have row strides gs and xs, W is float; K is a
 * multiple of 16. Both are copied in pieces, so that the inner loop reads what lies side by side in the cache. */
void NAME(outer_sum)(const real *g, long gs, const real *x, long xs, float *w, long M, long N, long K) {
    long helpers = team(M * N * K), strips = ((N + STRIP - 1) / STRIP + helpers - 1) / helpers * helpers;
    long strip = ((N + strips - 1) / strips + ROWS - 1) / ROWS * ROWS;
    TEAM(M * N * K)
    EACH(part, (N + strip - 1) / strip, 1) {
        long n = part * strip;
        unit gp[STRIP * STEP / DOT], *xp = aligned_alloc(64, ACROSS * STEP / DOT * sizeof(unit));
        long width = N - n < strip ? N - n : strip;
        for (long t = 0; t < M; t += STEP) {
            long tokens = M - t < STEP ? M - t : STEP, steps = UNITS(tokens);
            copy_strip(g + t * gs + n, gs, gp, tokens, width);
            for (long first = 0; first < K; first += ACROSS) {
                long columns = K - first < ACROSS ? K - first : ACROSS;
                copy_columns(x + t * xs + first, xs, xp, tokens, columns);
                for (long k = 0; k < columns; k += PANEL)
                    for (long i = 0; i < width; i += TALL)
                        gradient_rows(gp + i * (STEP / DOT), xp + k * steps, w + (n + i) * K + first + k, K, steps,
                                      width - i, (columns - k) / LANES);
            }
        }
        free(xp);
    }
}
