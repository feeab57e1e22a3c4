/* Matrix products with weights packed once per update.
 *
 * A product's element is one sum over the inner dimension in its order, whatever rows are computed beside
 * it and however many threads there are: a token's result is the same bits alone, in a batch, in decoding
 * and in training.
 *
 * A packed weight (N, K) is panels of PANEL outputs: [N / PANEL][K / DOT][PANEL] units, rounded up, zeros
 * behind N and K. A unit is a float, or a pair of bfloat16 where the processor multiplies pairs. */
#include "vector.h"

#define ROWS 6    /* tokens in registers */
#define VECTORS 4 /* vectors of outputs beside them: 24 accumulators */
#define PANEL (VECTORS * LANES)
#define TASK 96 /* tokens that a thread takes at once */

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#include <immintrin.h>
#define DOT 2
typedef uint32_t unit;
typedef i16 units;
static inline v16 multiply_add(v16 acc, units a, unit b) {
    return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
}
static inline unit at(const real *x) { return *(const uint32_t __attribute__((aligned(2), may_alias)) *)x; }
static inline unit last(const real *x) { return *x; }
static inline unit join(const real *first, const real *second) { return *first | (uint32_t)*second << 16; }
static inline units join16(const real *first, const real *second) {
    u16 a = __builtin_convertvector(*(const h16 *)first, u16), b = __builtin_convertvector(*(const h16 *)second, u16);
    return (units)(a | b << 16);
}
#else
#define DOT 1
typedef float unit;
typedef v16 units;
static inline v16 multiply_add(v16 acc, units a, unit b) { return acc + a * b; }
static inline unit at(const real *x) { return get(x); }
static inline unit last(const real *x) { return 0; }
static inline unit join(const real *first, const real *second) { return get(first); }
static inline units join16(const real *first, const real *second) { return load(first); }
#endif

#define UNITS(K) (((K) + DOT - 1) / DOT)

/* Bytes of a packed weight. */
long NAME(packed_size)(long N, long K) { return (N + PANEL - 1) / PANEL * PANEL * UNITS(K) * sizeof(unit); }

/* Panel p of a weight (N, K). */
static inline void pack_panel(const real *w, unit *panel, long p, long N, long K) {
    for (long k = 0; k < UNITS(K); k++)
        for (long i = 0; i < PANEL; i++) {
            const real *x = w + (p * PANEL + i) * K + k * DOT;
            panel[k * PANEL + i] = p * PANEL + i >= N ? 0 : (k + 1) * DOT > K ? last(x) : join(x, x + 1);
        }
}

/* Pack a weight (N, K). */
void NAME(pack_weight)(const real *w, unit *panels, long N, long K) {
#pragma omp parallel for schedule(static)
    for (long p = 0; p < (N + PANEL - 1) / PANEL; p++) pack_panel(w, panels + p * UNITS(K) * PANEL, p, N, K);
}

static inline __attribute__((always_inline)) void product_tile(const real *x, long K, const unit *panel, const float *bias,
                                                               real *c, long N, long columns, const int rows) {
    v16 acc[ROWS][VECTORS];
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
        for (int j = 0; j < VECTORS; j++) {
            long left = columns - j * LANES;
            if (left <= 0) break;
            v16 sum = acc[i][j];
            if (bias) sum += *(const v16 *)(bias + j * LANES);
            if (left >= LANES)
                store(c + i * N + j * LANES, sum);
            else {
                real line[LANES];
                store(line, sum);
                memcpy(c + i * N + j * LANES, line, left * sizeof(real));
            }
        }
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

/* C (M, N) = X (M, K) W^T + bias; the bias (or NULL) has room for whole panels. */
void NAME(product)(const real *x, const unit *panels, const float *bias, real *c, long M, long N, long K) {
    long across = (N + PANEL - 1) / PANEL, down = (M + TASK - 1) / TASK;
#pragma omp parallel for schedule(dynamic)
    for (long task = 0; task < across * down; task++) {
        long p = task % across, m = task / across * TASK, end = m + TASK < M ? m + TASK : M;
        product_rows(x, panels + p * UNITS(K) * PANEL, bias, c, p, m, end, N, K);
    }
}

/* The same, and the same bits, from a weight (N, K) that is packed a panel at a time: for many rows, where a
 * packed copy would only stand in memory. */
void NAME(product_once)(const real *x, const real *w, const float *bias, real *c, long M, long N, long K) {
#pragma omp parallel for schedule(dynamic)
    for (long p = 0; p < (N + PANEL - 1) / PANEL; p++) {
        unit *panel = aligned_alloc(64, UNITS(K) * PANEL * sizeof(unit));
        pack_panel(w, panel, p, N, K);
        product_rows(x, panel, bias, c, p, 0, M, N, K);
        free(panel);
    }
}

/* --- sums over tokens or outputs, for the backward pass ----------------------------------------------- */

#define STEP 256 /* tokens summed before the accumulators are written */
#define STRIP 96 /* rows of dW that a thread takes at once */

/* One panel of columns: g [steps][ROWS] and x [steps][vectors of 16] units; adds to `rows` rows of w. */
static inline __attribute__((always_inline)) void gradient_tile(const unit *g, const unit *x, float *w, long ws,
                                                                long steps, long rows, const int vectors) {
    v16 acc[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) acc[i][j] = splat(0);
    for (long t = 0; t < steps; t++) {
        units b[VECTORS];
        for (int j = 0; j < vectors; j++) b[j] = *(const units *)(x + (t * vectors + j) * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < vectors; j++) acc[i][j] = multiply_add(acc[i][j], b[j], g[t * ROWS + i]);
    }
    for (long i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) *(v16 *)(w + i * ws + j * LANES) += acc[i][j];
}

/* gp [width / ROWS][STEP / DOT][ROWS] from (tokens, width) elements of G, along the side that lies together. */
static inline void copy_strip(const real *g, long gm, long gn, unit *gp, long tokens, long width) {
    static const real nothing = 0;
    long steps = (tokens + DOT - 1) / DOT, blocks = (width + ROWS - 1) / ROWS, along = gm < gn;
    for (long outer = 0; outer < (along ? blocks : steps); outer++)
        for (long inner = 0; inner < (along ? steps : blocks); inner++) {
            long i = (along ? outer : inner) * ROWS, s = along ? inner : outer;
            const real *own = g + s * DOT * gm + i * gn;
            int paired = s * DOT + 1 < tokens;
            unit *into = gp + (i / ROWS * (STEP / DOT) + s) * ROWS;
            for (int r = 0; r < ROWS; r++)
                into[r] = i + r < width ? join(own + r * gn, paired ? own + r * gn + gm : &nothing) : 0;
        }
}

/* W (N, K) += G^T X. Element (m, n) of G lies at g[m * gm + n * gn], X (M, K) has row stride xs, W is float;
 * K is a multiple of 16. With G = dY and X the input it is a weight's gradient; with G = dY^T and X the weight
 * it is the input's. Both are copied in pieces, so that the inner loop reads what lies side by side in the cache. */
void NAME(outer_sum)(const real *g, long gm, long gn, const real *x, long xs, float *w, long M, long N, long K) {
    static const real nothing[PANEL] = {0};
#pragma omp parallel for schedule(dynamic)
    for (long n = 0; n < N; n += STRIP) {
        unit gp[STRIP * STEP / DOT], xp[PANEL * STEP / DOT];
        long width = N - n < STRIP ? N - n : STRIP;
        for (long t = 0; t < M; t += STEP) {
            long tokens = M - t < STEP ? M - t : STEP, steps = (tokens + DOT - 1) / DOT;
            copy_strip(g + t * gm + n * gn, gm, gn, gp, tokens, width);
            for (long k = 0; k < K; k += PANEL) {
                long vectors = (K - k) / LANES < VECTORS ? (K - k) / LANES : VECTORS;
                for (long s = 0; s < tokens; s += DOT)
                    for (long j = 0; j < vectors; j++) {
                        const real *own = x + (t + s) * xs + k + j * LANES;
                        *(units *)(xp + (s / DOT * vectors + j) * LANES) =
                            join16(own, s + 1 < tokens ? own + xs : nothing);
                    }
                for (long i = 0; i < width; i += ROWS) {
                    const unit *own = gp + i * (STEP / DOT);
                    float *into = w + (n + i) * K + k;
                    long rows = width - i < ROWS ? width - i : ROWS;
                    switch (vectors) {
                    case 4: gradient_tile(own, xp, into, K, steps, rows, 4); break;
                    case 3: gradient_tile(own, xp, into, K, steps, rows, 3); break;
                    case 2: gradient_tile(own, xp, into, K, steps, rows, 2); break;
                    case 1: gradient_tile(own, xp, into, K, steps, rows, 1); break;
                    }
                }
            }
        }
    }
}
