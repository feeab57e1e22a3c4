/* Matrix products with weights packed once per update.
 *
 * A product's element is one sum over the inner dimension in its order, whatever rows are computed beside
 * it and however many threads there are: a token's result is the same bits alone, in a batch, in decoding
 * and in training.
 *
 * A packed weight (N, K) is panels of PANEL outputs: [N / PANEL][K / DOT][PANEL] units, rounded up, zeros
 * behind N and K. */
#include "units.h"

#ifdef TILES
#undef ROWS
#define ROWS TILES
#define TALL (2 * TILES) /* rows that are computed together */
#define PANEL (2 * TILES)
#define UNITS(K) (((K) + 2 * TILES - 1) / (2 * TILES) * TILES)
#define TASK 64    /* tokens that a thread takes at once, */
#define ACROSS 128 /* with so many outputs */
#define QUICKER 16 /* multiplications in the time of one without tiles */
#include "tiles.h"
#else
#define TALL ROWS
#define PANEL (VECTORS * LANES)
#define UNITS(K) (((K) + DOT - 1) / DOT)
#define TASK 96
#define ACROSS 64
#define QUICKER 1
static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}
#endif
#define PANELS (ACROSS / PANEL) /* that a thread takes at once */
#define ONCE 1024               /* tokens for which a thread packs them */

/* Bytes of a packed weight. */
long NAME(packed_size)(long N, long K) { return (N + PANEL - 1) / PANEL * PANEL * UNITS(K) * sizeof(unit); }

/* Units k to end of panel p of a weight (N, K) whose element (n, k) lies at w[n * wn + k * wk]. */
static inline __attribute__((always_inline)) void pack_strided(const real *w, const long wn, const long wk, unit *panel,
                                                               long p, long k, long end, long N, long K) {
    for (; k < end; k++)
        for (long i = 0; i < PANEL; i++) {
            const real *x = w + (p * PANEL + i) * wn + k * DOT * wk;
            panel[k * PANEL + i] = p * PANEL + i >= N || k * DOT >= K ? 0 : (k + 1) * DOT > K ? last(x) : join(x, x + wk);
        }
}

/* Panel p of a weight whose rows or, `turned`, whose columns lie side by side. */
static inline void pack_panel(const real *w, int turned, unit *panel, long p, long N, long K) {
    long k = 0;
    for (; (p + 1) * PANEL <= N && (k + LANES) * DOT <= K; k += LANES)
        for (long i = 0; i < PANEL; i += LANES) {
            units square[LANES];
            for (long j = 0; j < LANES; j++) {
                const real *across = w + (k + j) * DOT * N + p * PANEL + i;
                square[j] = turned ? join_vec(across, across + N) : line_of(w + (p * PANEL + i + j) * K + k * DOT);
            }
            if (!turned) turn(square);
            for (long j = 0; j < LANES; j++) *(units *)(panel + (k + j) * PANEL + i) = square[j];
        }
    if (turned)
        pack_strided(w, 1, N, panel, p, k, UNITS(K), N, K);
    else
        pack_strided(w, K, 1, panel, p, k, UNITS(K), N, K);
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

/* --- the rows that a weight is multiplied with -------------------------------------------------------- */

/* An operand is prepared once for all panels: in tiles, rounded, or widened; or it is X as it is. */
#if defined(TILES)
typedef unit operand; /* tiles, [M / 16][K / 32][16][16] units */
#define ROOM(M, K) (((M) + TILES - 1) / TILES * TILES * UNITS(K))
static inline void prepare(const real *x, operand *into, long m, long M, long K) {
    for (long k = 0; k < UNITS(K); k += TILES, into += SQUARE)
        for (long i = 0; i < TILES; i++) {
            const real *row = x + (m + i) * K + k * DOT;
            real rest[DOT * TILES] = {0};
            if (m + i < M && (k + TILES) * DOT > K) row = memcpy(rest, row, (K - k * DOT) * sizeof(real));
            *(units *)(into + i * TILES) = m + i < M ? line_of(row) : (units){0};
        }
}
#elif defined(MIXED) && DOT == 2
typedef uint16_t operand;
#elif defined(MIXED) || defined(BFLOAT16) && DOT == 1
typedef float operand;
#else
typedef real operand; /* nothing to prepare */
#define READY
#endif

#if !defined(TILES) && !defined(READY)
#define ROOM(M, K) ((M) * (K))
static inline void prepare(const real *x, operand *into, long m, long M, long K) {
    for (long i = m * K; i < least(m + ROWS, M) * K; i++, into++)
        *into = DOT == 2 ? last(x + i) : join(x + i, NULL);
}
#endif

#ifndef READY
static const operand *prepared(const real *x, long M, long K) {
    operand *all = aligned_alloc(64, (ROOM(M, K) * sizeof(operand) + 63) / 64 * 64);
    TEAM(M * K / 4)
    EACH(block, (M + ROWS - 1) / ROWS, ROWS_OF(M / ROWS)) prepare(x, all + ROOM(block * ROWS, K), block * ROWS, M, K);
    return all;
}
static inline void release(const operand *x) { free((void *)x); }
#else
#define ROOM(M, K) ((M) * (K))
static inline const operand *prepared(const real *x, long M, long K) { return x; }
static inline void release(const operand *x) {}
#endif

#ifdef TILES
/* Rows m to end of C, one panel of its columns: 32 rows x 32 outputs are four tiles of sums. */
static inline void product_rows(const operand *x, const unit *panel, const float *bias, real *c, long p, long m, long end,
                                long N, long K) {
    float sums[TALL * PANEL];
    long columns = N - p * PANEL;
    for (; m < end; m += TALL) {
        long rows = least(end - m, TALL);
        real *into = c + m * N + p * PANEL;
        tiles_zero();
        tiles_multiply(x + m * UNITS(K), panel, UNITS(K) / TILES, rows > TILES);
        if (sizeof(real) == sizeof(float) && rows == TALL && columns >= PANEL && !bias) {
            tiles_store((float *)into, N);
            continue;
        }
        tiles_store(sums, PANEL);
        for (long i = 0; i < rows; i++)
            for (long j = 0; j < PANEL; j += LANES)
                write_sums(*(vec *)(sums + i * PANEL + j), bias ? bias + p * PANEL : NULL, into + i * N, j, columns);
    }
}
#else
#if DOT == 2
static inline unit at(const operand *x) { return *(const uint32_t __attribute__((aligned(2), may_alias)) *)x; }
static inline unit behind(const operand *x) { return *x; } /* what pairs with nothing */
#else
static inline unit at(const operand *x) { return *x; }
static inline unit behind(const operand *x) { return 0; }
#endif

/* Adds one unit of the inner dimension; without a choice in it, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply_unit(const operand *x, long K, const unit *panel,
                                                                vec acc[ROWS][VECTORS], const int rows, const int whole) {
    units b[VECTORS];
    for (int j = 0; j < VECTORS; j++) b[j] = *(const units *)(panel + j * LANES);
    for (int i = 0; i < rows; i++) {
        unit a = whole ? at(x + i * K) : behind(x + i * K);
        for (int j = 0; j < VECTORS; j++) acc[i][j] = multiply_add(acc[i][j], b[j], a);
    }
}

static inline __attribute__((always_inline)) void product_tile(const operand *x, long K, const unit *panel, const float *bias,
                                                               real *c, long N, long columns, const int rows) {
    vec acc[ROWS][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) acc[i][j] = splat(0);
    long k = 0;
    for (; k < K / DOT; k++) multiply_unit(x + k * DOT, K, panel + k * PANEL, acc, rows, 1);
    for (; k < UNITS(K); k++) multiply_unit(x + k * DOT, K, panel + k * PANEL, acc, rows, 0);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < VECTORS; j++) write_sums(acc[i][j], bias, c + i * N, j * LANES, columns);
}

/* Rows m to end of C, one panel of its columns. */
static inline void product_rows(const operand *x, const unit *panel, const float *bias, real *c, long p, long m, long end,
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
static inline void product_panels(const operand *x, const unit *panels, const float *bias, real *c, long p, long count,
                                  long m, long end, long N, long K) {
    tiles_begin();
    for (; m < end; m += TASK)
        for (long i = 0; i < count; i++)
            product_rows(x, panels + i * UNITS(K) * PANEL, bias, c, p + i, m, least(m + TASK, end), N, K);
    tiles_end();
}

/* C = X W^T + bias, from a packed weight, or from `w`, of which a task packs its panels. A task has rows that only its
 * thread reads and writes or, where these are too few to pack panels for, some panels. */
static void multiply(const real *x, const unit *packed, const real *w, long turned, const float *bias, real *c, long M, long N,
                     long K) {
    if (M < 1) return;
    long threads = team(M * N * K / QUICKER), share = (M + threads - 1) / threads, some = packed ? TASK : ONCE;
    int few = share < (packed ? TASK : ONCE / 2);
    long height = few ? some : least((share + TASK - 1) / TASK * TASK, ONCE), down = (M + height - 1) / height;
    long all = (N + PANEL - 1) / PANEL, wide = few ? PANELS : all, across = (all + wide - 1) / wide;
    const operand *shared = few ? prepared(x, M, K) : NULL;
    SHARED_BY(threads)
    EACH(task, across * down, 1) {
        long from = task / across * height, end = least(from + height, M), first = task % across * wide;
        unit *scratch = packed ? NULL : aligned_alloc(64, PANELS * UNITS(K) * PANEL * sizeof(unit));
        for (long m = from; m < end; m += some) {
            long rows = least(some, end - m);
            const operand *own = few ? shared + ROOM(m, K) : prepared(x + m * K, rows, K);
            for (long p = first; p < least(first + wide, all); p += PANELS) {
                long count = least(all - p, PANELS);
                for (long i = 0; scratch && i < count; i++) pack_panel(w, turned, scratch + i * UNITS(K) * PANEL, p + i, N, K);
                const unit *panels = packed ? packed + p * UNITS(K) * PANEL : scratch;
                product_panels(own, panels, bias, c + m * N, p, count, 0, rows, N, K);
            }
            if (!few) release(own);
        }
        free(scratch);
    }
    if (few) release(shared);
}

/* C (M, N) = X (M, K) W^T + bias; the bias (or NULL) has room for whole panels. */
void NAME(product)(const real *x, const unit *panels, const float *bias, real *c, long M, long N, long K) {
    multiply(x, panels, NULL, 0, bias, c, M, N, K);
}

/* The same, and the same bits, from a weight (N, K), or its transpose (K, N), that is packed a few panels at a time:
 * for many rows, where a packed copy would only stand in memory. */
void NAME(product_once)(const real *x, const real *w, long turned, const float *bias, real *c, long M, long N, long K) {
    multiply(x, NULL, w, turned, bias, c, M, N, K);
}

/* OUT (N, K) = W + B A, what low-rank adapters make of a weight; B comes transposed, (R, N), A is (R, K), and K is a
 * multiple of 16. Four rows at once, so that A is read a quarter as often. */
void NAME(merge)(const real *w, const float *b, const float *a, real *out, long N, long R, long K) {
    TEAM(N * R * K)
    EACH(block, (N + 3) / 4, ROWS_OF(N / 4)) {
        long n = least(block * 4, most(N - 4, 0)), rows = least(N, 4); /* the last block overlaps the one before it */
        for (long k = 0; k < K; k += LANES) {
            vec sums[4] = {0};
            for (long r = 0; r < R; r++) {
                vec line = *(const vec *)(a + r * K + k);
                for (long i = 0; i < 4; i++) sums[i] += line * b[r * N + n + least(i, rows - 1)];
            }
            for (long i = 0; i < rows; i++) store(out + (n + i) * K + k, load(w + (n + i) * K + k) + sums[i]);
        }
    }
}

/* --- sums over tokens: gradients of weights ------------------------------------------------------------ */

#ifdef TILES
#define STEP 256  /* tokens summed before the accumulators are written */
#define STRIP 768 /* rows of dW that a thread takes at once at most, */
#else
#define STEP 128
#define STRIP 384
#endif
#define COLUMNS 128 /* with so many columns: their copies fill half of a second-level cache */

#ifdef TILES
/* One panel of columns: g [rows / 16][steps / 16][16][16] and x [steps][PANEL] units; adds to at most TALL rows of w. */
static inline void gradient_rows(const unit *g, const unit *x, float *w, long ws, long steps, long rows, long vectors) {
    float edge[TALL * PANEL]; /* where w ends within the tiles; its own part is summed in the same order */
    int whole = rows >= TALL && vectors * LANES >= PANEL;
    long bytes = least(vectors * LANES, PANEL) * sizeof(float);
    for (long i = 0; !whole && i < least(rows, TALL); i++) memcpy(edge + i * PANEL, w + i * ws, bytes);
    float *sums = whole ? w : edge;
    tiles_load(sums, whole ? ws : PANEL);
    tiles_multiply(g, x, steps / TILES, rows > TILES);
    tiles_store(sums, whole ? ws : PANEL);
    for (long i = 0; !whole && i < least(rows, TALL); i++) memcpy(w + i * ws, edge + i * PANEL, bytes);
}

/* gp as above from (tokens, width) elements of G. */
static inline void copy_strip(const real *g, long gs, unit *gp, long tokens, long width) {
    for (long i = 0; i < width; i += TILES)
        for (long s = 0; s < UNITS(tokens); s += TILES, gp += SQUARE)
            if ((s + TILES) * DOT <= tokens && i + TILES <= width) {
                for (long j = 0; j < TILES; j++)
                    ((units *)gp)[j] = join_vec(g + (s + j) * DOT * gs + i, g + ((s + j) * DOT + 1) * gs + i);
                turn((units *)gp);
            } else
                for (long r = 0; r < TILES; r++)
                    for (long j = 0; j < TILES; j++) {
                        const real *own = g + (s + j) * DOT * gs + i + r;
                        long present = i + r < width ? tokens - (s + j) * DOT : 0;
                        gp[r * TILES + j] = present < 1 ? 0 : present < DOT ? last(own) : join(own, own + gs);
                    }
}
#define WIDE(columns, panel) PANEL /* columns of a panel's copy: whole tiles */
#define STRIP_AT(i, steps) ((i) * (steps))
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
#define WIDE(columns, panel) least((columns) - (panel), PANEL)
#define STRIP_AT(i, steps) ((i) * (STEP / DOT))
#endif

/* xp [columns / PANEL][steps][PANEL] from (tokens, columns) elements of X. */
static inline void copy_columns(const real *x, long xs, unit *xp, long tokens, long columns) {
    static const real nothing[LANES] = {0};
    long steps = UNITS(tokens);
    for (long s = 0; s < steps; s++)
        for (long panel = 0; panel < columns; panel += PANEL) {
            long width = WIDE(columns, panel);
            for (long k = 0; k < width; k += LANES) {
                const real *own = s * DOT < tokens && panel + k < columns ? x + s * DOT * xs + panel + k : nothing;
                *(units *)(xp + panel * steps + s * width + k) =
                    join_vec(own, own != nothing && s * DOT + 1 < tokens ? own + xs : nothing);
            }
        }
}

/* W (N, K) += G^T X, the gradient of a weight. G (M, N) and X (M, K) have row strides gs and xs, W is float; K is a
 * multiple of 16. Both are copied in pieces, so that the inner loop reads what lies side by side in the cache. */
void NAME(outer_sum)(const real *g, long gs, const real *x, long xs, float *w, long M, long N, long K) {
    long helpers = team(M * N * K / QUICKER), strips = ((N + STRIP - 1) / STRIP + helpers - 1) / helpers * helpers;
    long strip = ((N + strips - 1) / strips + ROWS - 1) / ROWS * ROWS;
    TEAM(M * N * K / QUICKER)
    EACH(part, (N + strip - 1) / strip, 1) {
        long n = part * strip;
        unit *gp = aligned_alloc(64, STRIP * STEP / DOT * sizeof(unit)), *xp = aligned_alloc(64, COLUMNS * STEP / DOT * sizeof(unit));
        long width = N - n < strip ? N - n : strip;
        tiles_begin();
        for (long t = 0; t < M; t += STEP) {
            long tokens = M - t < STEP ? M - t : STEP, steps = UNITS(tokens);
            copy_strip(g + t * gs + n, gs, gp, tokens, width);
            for (long first = 0; first < K; first += COLUMNS) {
                long columns = least(K - first, COLUMNS);
                copy_columns(x + t * xs + first, xs, xp, tokens, columns);
                for (long k = 0; k < columns; k += PANEL)
                    for (long i = 0; i < width; i += TALL)
                        gradient_rows(gp + STRIP_AT(i, steps), xp + k * steps, w + (n + i) * K + first + k, K, steps,
                                      width - i, (columns - k) / LANES);
            }
        }
        tiles_end();
        free(gp), free(xp);
    }
}
