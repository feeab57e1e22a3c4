/* The fused operations between the matrix products of a decoder, forward and backward.
 *
 * Exactness: the decoding and the training form of attention do the same additions in the same order
 * for every (query, key) pair, whatever shares a vector with it, so sampler and trainer agree bit for
 * bit. Reductions over tokens run over fixed blocks, so the number of threads changes nothing.
 *
 * Shapes: T tokens, D model width, H query heads, K key/value heads, R = H / K, E head width.
 * Lengths are multiples of 16 where vectors run over them (D, E, F). */
#include "vector.h"

#define BLOCK 256 /* tokens whose weight gradients are summed before they are added up */

/* Add each token's gradient (T, D) to its row of the table's, float (V, D). */
void NAME(embed_back)(const int64_t *tokens, const real *grad, float *into, long T, long D) {
    TEAM(T * D)
    EACH(column, D / LANES, 1) /* by columns: the rows are summed in one order */
        for (long t = 0, d = column * LANES; t < T; t++) *(vec *)(into + tokens[t] * D + d) += load(grad + t * D + d);
}

/* x = x + delta (delta may be NULL), h = w * x / sqrt(mean(x^2) + eps). All (T, D). */
void NAME(add_norm)(const real *x, const real *delta, const real *w, float eps, real *sum, real *h,
                    long T, long D) {
    TEAM(4 * T * D)
    EACH(t, T, ROWS_OF(T)) {
        const real *xt = x + t * D;
        vec squares = splat(0);
        for (long d = 0; d < D; d += LANES) {
            vec v = load(xt + d);
            if (delta) v += load(delta + t * D + d);
            store(sum + t * D + d, v);
            v = load(sum + t * D + d);
            squares += v * v;
        }
        float scale = 1.0f / sqrtf(sum_of(squares) / D + eps);
        for (long d = 0; d < D; d += LANES) store(h + t * D + d, load(sum + t * D + d) * scale * load(w + d));
    }
}

/* Gradient of add_norm: dx = dsum + J^T dh; dw (D) float. `sum` is the forward's output. */
void NAME(add_norm_back)(const real *sum, const real *w, float eps, const real *dsum, const real *dh,
                         real *dx, float *dw, long T, long D) {
    long blocks = (T + BLOCK - 1) / BLOCK;
    float *partial = calloc(blocks * D, sizeof(float));
    TEAM(8 * T * D)
    EACH(b, blocks, 1) {
        float *own = partial + b * D;
        long end = (b + 1) * BLOCK < T ? (b + 1) * BLOCK : T;
        for (long t = b * BLOCK; t < end; t++) {
            const real *xt = sum + t * D, *gt = dh + t * D;
            vec squares = splat(0), dots = splat(0);
            for (long d = 0; d < D; d += LANES) {
                vec v = load(xt + d);
                squares += v * v;
                dots += v * load(w + d) * load(gt + d);
            }
            float scale = 1.0f / sqrtf(sum_of(squares) / D + eps);
            float pull = sum_of(dots) * scale * scale * scale / D;
            for (long d = 0; d < D; d += LANES) {
                vec v = load(xt + d), g = load(gt + d);
                vec into = g * load(w + d) * scale - v * pull;
                if (dsum) into += load(dsum + t * D + d);
                store(dx + t * D + d, into);
                *(vec *)(own + d) += g * v * scale;
            }
        }
    }
    for (long b = 0; b < blocks; b++)
        for (long d = 0; d < D; d += LANES) *(vec *)(dw + d) += *(vec *)(partial + b * D + d);
    free(partial);
}

/* out = gate * sigmoid(linear gate + cubic gate^3) * up for rows [gate | up], (T, 2F) -> (T, F): SiLU is (1, 0),
 * GELU by tanh is sqrt(8 / pi) (1, .044715). */
void NAME(gate_mul)(const real *both, float linear, float cubic, real *out, long T, long F) {
    TEAM(32 * T * F)
    EACH(t, T, ROWS_OF(T))
        for (long f = 0; f < F; f += LANES) {
            vec gate = load(both + t * 2 * F + f), up = load(both + t * 2 * F + F + f);
            vec z = gate * (gate * gate * cubic + linear);
            store(out + t * F + f, gate / (exp_of(-z) + 1.0f) * up);
        }
}

void NAME(gate_mul_back)(const real *both, float linear, float cubic, const real *dout, real *dboth, long T, long F) {
    TEAM(48 * T * F)
    EACH(t, T, ROWS_OF(T))
        for (long f = 0; f < F; f += LANES) {
            vec gate = load(both + t * 2 * F + f), up = load(both + t * 2 * F + F + f), square = gate * gate;
            vec g = load(dout + t * F + f), s = 1.0f / (exp_of(-gate * (square * cubic + linear)) + 1.0f);
            vec slope = square * (3 * cubic) + linear;
            store(dboth + t * 2 * F + f, g * up * s * (gate * slope * (1.0f - s) + 1.0f));
            store(dboth + t * 2 * F + F + f, g * gate * s);
        }
}

/* --- queries and keys: optional RMS norm per head, then rotary embedding ------------------------- */

/* One head: out = rotate(w * x * scale). cos and sin are rows of (E), halves paired. */
static float NAME(turn)(const real *x, const real *w, float eps, const real *cos, const real *sin,
                        real *out, long E) {
    float scale = 1.0f;
    if (w) {
        vec squares = splat(0);
        for (long e = 0; e < E; e += LANES) {
            vec v = load(x + e);
            squares += v * v;
        }
        scale = 1.0f / sqrtf(sum_of(squares) / E + eps);
    }
    for (long e = 0; e < E / 2; e += LANES) {
        vec a = load(x + e) * scale, b = load(x + E / 2 + e) * scale;
        if (w) a *= load(w + e), b *= load(w + E / 2 + e);
        vec c = load(cos + e), s = load(sin + e);
        store(out + e, a * c - b * s);
        store(out + E / 2 + e, b * c + a * s);
    }
    return scale;
}

/* qkv (T, (H + 2K) E) -> q (T, H, E), k (T, K, E), v (T, K, E); tables (positions, E). */
void NAME(split_heads)(const real *qkv, const real *qw, const real *kw, float eps, const real *cos,
                       const real *sin, const int64_t *position, real *q, real *k, real *v, long T, long H,
                       long K, long E) {
    TEAM(8 * T * (H + 2 * K) * E)
    EACH(t, T, ROWS_OF(T)) {
        const real *row = qkv + t * (H + 2 * K) * E, *c = cos + position[t] * E, *s = sin + position[t] * E;
        for (long h = 0; h < H; h++) NAME(turn)(row + h * E, qw, eps, c, s, q + (t * H + h) * E, E);
        for (long h = 0; h < K; h++) NAME(turn)(row + (H + h) * E, kw, eps, c, s, k + (t * K + h) * E, E);
        memcpy(v + t * K * E, row + (H + K) * E, K * E * sizeof(real));
    }
}

/* Gradient of one head's norm and rotation; adds to dw. */
static void NAME(turn_back)(const real *x, const real *w, float eps, const real *cos, const real *sin,
                            const real *dout, real *dx, float *dw, long E) {
    float turned[1024];
    for (long e = 0; e < E / 2; e += LANES) {
        vec a = load(dout + e), b = load(dout + E / 2 + e), c = load(cos + e), s = load(sin + e);
        *(vec *)(turned + e) = a * c + b * s;
        *(vec *)(turned + E / 2 + e) = b * c - a * s;
    }
    float scale = 1.0f, pull = 0.0f;
    if (w) {
        vec squares = splat(0), dots = splat(0);
        for (long e = 0; e < E; e += LANES) {
            vec v = load(x + e);
            squares += v * v;
            dots += v * load(w + e) * *(vec *)(turned + e);
        }
        scale = 1.0f / sqrtf(sum_of(squares) / E + eps);
        pull = sum_of(dots) * scale * scale * scale / E;
    }
    for (long e = 0; e < E; e += LANES) {
        vec g = *(vec *)(turned + e), v = load(x + e);
        if (w) {
            *(vec *)(dw + e) += g * v * scale;
            g = g * load(w + e) * scale - v * pull;
        }
        store(dx + e, g);
    }
}

/* Gradient of split_heads: dq, dk, dv -> dqkv; dqw, dkw (E) float or NULL. */
void NAME(split_heads_back)(const real *qkv, const real *qw, const real *kw, float eps, const real *cos,
                            const real *sin, const int64_t *position, const real *dq, const real *dk,
                            const real *dv, real *dqkv, float *dqw, float *dkw, long T, long H, long K,
                            long E) {
    long blocks = (T + BLOCK - 1) / BLOCK;
    float *partial = calloc(blocks * 2 * E, sizeof(float));
    TEAM(16 * T * (H + 2 * K) * E)
    EACH(b, blocks, 1) {
        float *own = partial + b * 2 * E;
        long end = (b + 1) * BLOCK < T ? (b + 1) * BLOCK : T;
        for (long t = b * BLOCK; t < end; t++) {
            const real *row = qkv + t * (H + 2 * K) * E;
            const real *c = cos + position[t] * E, *s = sin + position[t] * E;
            real *into = dqkv + t * (H + 2 * K) * E;
            for (long h = 0; h < H; h++)
                NAME(turn_back)(row + h * E, qw, eps, c, s, dq + (t * H + h) * E, into + h * E, own, E);
            for (long h = 0; h < K; h++)
                NAME(turn_back)(row + (H + h) * E, kw, eps, c, s, dk + (t * K + h) * E, into + (H + h) * E,
                                own + E, E);
            memcpy(into + (H + K) * E, dv + t * K * E, K * E * sizeof(real));
        }
    }
    for (long b = 0; b < blocks && qw; b++)
        for (long e = 0; e < E; e += LANES) {
            *(vec *)(dqw + e) += *(vec *)(partial + b * 2 * E + e);
            *(vec *)(dkw + e) += *(vec *)(partial + b * 2 * E + E + e);
        }
    free(partial);
}

/* --- attention over packed sequences ------------------------------------------------------------- */

#define QUERIES 48 /* that pass over the keys together: a multiple of ROWS and of every LANES */
#define KEYS 96    /* that they pass at a time, so that what belongs to them stays in the cache: a multiple of ROWS */

/* A sequence: its prompt's tokens (none for a prompt itself) and its own, as ranges of flat tokens. */
typedef struct {
    int64_t prefix, prefix_length, start, length;
} span;

static inline long key_at(const span *s, long j) {
    return j < s->prefix_length ? s->prefix + j : s->start + j - s->prefix_length;
}

/* Up to QUERIES neighbours of one sequence and head: `before` keys come before the first one's own. */
typedef struct {
    long present, before, window, E;
} queries;

/* Queries `first` and up of a span. */
static inline queries queries_of(const span *s, long first, long window, long E) {
    long left = s->length - first;
    return (queries){left < QUERIES ? left : QUERIES, s->prefix_length + first, window, E};
}

/* Floats whose lines of the cache hold whole vectors: n is a multiple of 16. */
static inline float *scratch(long n) { return aligned_alloc(64, n * sizeof(float)); }

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long most(long a, long b) { return a > b ? a : b; }

/* A head's keys or values of a span as floats side by side, (n, E). */
static void NAME(gather)(const real *from, const span *s, long n, long K, long head, float *out, long E) {
    for (long j = 0; j < n; j++) {
        const real *row = from + (key_at(s, j) * K + head) * E;
        for (long e = 0; e < E; e += LANES) *(vec *)(out + j * E + e) = load(row + e);
    }
}

/* Rows of (E) at `stride` reals, times a factor, side by side as floats; zeros for what is missing in a vector. */
static void NAME(rows_of)(const real *from, long stride, long present, float factor, float *out, long E) {
    for (long i = 0; i < present; i++)
        for (long e = 0; e < E; e += LANES) *(vec *)(out + i * E + e) = load(from + i * stride + e) * factor;
    long whole = (present + LANES - 1) / LANES * LANES;
    memset(out + present * E, 0, (whole - present) * E * sizeof(float));
}

/* The same as columns, (E, QUERIES). */
static void turned(const float *rows, long present, float *out, long E) {
    for (long i = 0; i < present; i += LANES)
        for (long e = 0; e < E; e++) {
            vec line;
            for (int lane = 0; lane < LANES; lane++) line[lane] = rows[(i + lane) * E + e];
            *(vec *)(out + e * QUERIES + i) = line;
        }
}

/* c[i][u] = sum_t a[i * across + t * along] b[t][u], in the order of t, for ROWS rows and `vectors` of columns; with
 * `more` added to what `rows` of c hold. */
static inline __attribute__((always_inline)) void sum_tile(const float *a, const long across, const long along, const float *b,
                                                           const long bs, float *c, const long cs, long steps, long rows,
                                                           const int more, const int vectors) {
    vec acc[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int u = 0; u < vectors; u++) acc[i][u] = more && i < rows ? *(vec *)(c + i * cs + u * LANES) : splat(0);
    for (long t = 0; t < steps; t++)
        for (int i = 0; i < ROWS; i++)
            for (int u = 0; u < vectors; u++)
                acc[i][u] = acc[i][u] + *(const vec *)(b + t * bs + u * LANES) * a[i * across + t * along];
    for (int i = 0; i < ROWS; i++)
        for (int u = 0; u < vectors; u++)
            if (!more || i < rows) *(vec *)(c + i * cs + u * LANES) = acc[i][u];
}

static inline __attribute__((always_inline)) void sum_tiles(const float *a, const long across, const long along, const float *b,
                                                            const long bs, float *c, const long cs, long steps, long rows,
                                                            const int more, long vectors) {
    switch (vectors) { /* constants, so that every case keeps its sums in registers */
    default: sum_tile(a, across, along, b, bs, c, cs, steps, rows, more, VECTORS); break;
#if VECTORS > 2
    case 3: sum_tile(a, across, along, b, bs, c, cs, steps, rows, more, 3); break;
    case 2: sum_tile(a, across, along, b, bs, c, cs, steps, rows, more, 2); break;
#endif
    case 1: sum_tile(a, across, along, b, bs, c, cs, steps, rows, more, 1); break;
    }
}

/* scores[j][i] = q_i . k_j for keys j to end, those of queries after a key and some before it; qt (E, QUERIES). */
static void score(const queries *q, const float *qt, const float *k, long j, long end, float *scores) {
    for (long u = 0; u < q->present; u += VECTORS * LANES)
        for (long i = j, last = least(end, q->before + u + VECTORS * LANES); i < last; i += ROWS) {
            long from = most(u, (i - q->before) / LANES * LANES); /* queries from here on are not hidden */
            long vectors = least(VECTORS, (q->present - u + LANES - 1) / LANES) - (from - u) / LANES;
            if (vectors > 0)
                sum_tiles(k + i * q->E, q->E, 1, qt + from, QUERIES, scores + (i - j) * QUERIES + from, QUERIES, q->E, 0, 0,
                          vectors);
        }
}

/* A vector of scores from query i on with key j: none where a query comes before it, or `window` keys or more after. */
static inline vec seen(const queries *q, long i, long j, vec scores) {
    static const int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    long late = j - q->before - i, over = least(late + q->window, LANES);
    if (late <= 0 && over == LANES) return scores;
    ivec lane = *(const ivec *)numbers;
    return pick((lane >= (int32_t)late) & (lane < (int32_t)over), scores, splat(-INFINITY));
}

/* How many of the keys j to end some query of a vector from query i on may see. */
static inline long reach(const queries *q, long i, long j, long end) {
    return most(0, least(end, q->before + i + LANES) - j);
}

/* No weights behind those `reach` keys, as far as rows of neighbours go on. */
static inline void clear(float *p, long keys, long n) {
    for (n = least(n, keys + ROWS - 1); keys < n; keys++) *(vec *)(p + keys * QUERIES) = splat(0);
}

/* Hides what queries do not see; the largest scores so far. */
static void hide(const queries *q, float *scores, long j, long end, vec *top) {
    for (long i = 0; i < q->present; i += LANES) {
        vec highest = top[i / LANES];
        for (long key = 0, keys = reach(q, i, j, end); key < keys; key++) {
            vec *at = (vec *)(scores + key * QUERIES + i);
            *at = seen(q, i, j + key, *at);
            highest = larger(*at, highest);
        }
        top[i / LANES] = highest;
    }
}

/* Scores become weights, which are added to their totals in the order of the keys. */
static void weigh(const queries *q, float *scores, long j, long end, const vec *top, vec *total) {
    for (long i = 0; i < q->present; i += LANES) {
        vec highest = top[i / LANES], sum = total[i / LANES];
        long keys = reach(q, i, j, end);
        for (long key = 0; key < keys; key++) {
            vec *at = (vec *)(scores + key * QUERIES + i);
            *at = exp_below(*at - highest);
            sum += *at;
        }
        clear(scores + i, keys, end - j);
        total[i / LANES] = sum;
    }
}

/* Scores become weights, and the gradients of weights those of scores. */
static void weigh_back(const queries *q, float *scores, float *grads, long j, long end, const float *level, const float *dots) {
    for (long i = 0; i < q->present; i += LANES) {
        vec high = *(const vec *)(level + i), dot = *(const vec *)(dots + i);
        long keys = reach(q, i, j, end);
        for (long key = 0; key < keys; key++) {
            vec *weight = (vec *)(scores + key * QUERIES + i), *grad = (vec *)(grads + key * QUERIES + i);
            *weight = exp_below(seen(q, i, j + key, *weight) - high);
            *grad = *weight * (*grad - dot);
        }
        clear(scores + i, keys, end - j), clear(grads + i, keys, end - j);
    }
}

/* into[i] += sum_j p[j][i] v_j over keys j to end, in their order; rows of (E). */
static void mix(const queries *q, const float *p, const float *v, long j, long end, float *into) {
    for (long e = 0; e < q->E; e += VECTORS * LANES)
        for (long i = 0; i < q->present; i += ROWS) {
            long steps = least(end, q->before + i + ROWS) - j;
            if (steps > 0)
                sum_tiles(p + i, 1, QUERIES, v + j * q->E + e, q->E, into + i * q->E + e, q->E, steps, ROWS, 1,
                          (q->E - e) / LANES);
        }
}

/* out (T, H, E), lse (T, H): softmax attention of every span within [prefix | own], causal. */
void NAME(attend)(const real *q, const real *k, const real *v, const span *spans, long S, float scale,
                  real *out, float *lse, long H, long K, long E, long longest, long window) {
    long R = H / K;
    TEAM(S * H * longest * E * 16)
    {
        float *scores = scratch((longest + ROWS) * QUERIES);
        float *keys = scratch((longest + ROWS) * E), *values = scratch(longest * E);
        float *rows = scratch(2 * QUERIES * E), *qt = rows + QUERIES * E;
        EACH(task, S * H, 1) {
            const span *s = spans + task / H;
            long h = task % H, head = h / R;
            NAME(gather)(k, s, s->prefix_length + s->length, K, head, keys, E);
            NAME(gather)(v, s, s->prefix_length + s->length, K, head, values, E);
            for (long first = 0; first < s->length; first += QUERIES) {
                queries own = queries_of(s, first, window, E);
                long n = own.before + own.present, begin = most(0, own.before - window + 1);
                vec top[QUERIES / LANES], total[QUERIES / LANES];
                NAME(rows_of)(q + ((s->start + first) * H + h) * E, H * E, own.present, scale, rows, E);
                turned(rows, own.present, qt, E);
                for (long i = 0; i < own.present; i += LANES) top[i / LANES] = splat(-INFINITY), total[i / LANES] = splat(0);
                for (long j = begin; j < n; j += KEYS) {
                    score(&own, qt, keys, j, least(j + KEYS, n), scores + j * QUERIES);
                    hide(&own, scores + j * QUERIES, j, least(j + KEYS, n), top);
                }
                memset(rows, 0, QUERIES * E * sizeof(float));
                for (long j = begin; j < n; j += KEYS) {
                    weigh(&own, scores + j * QUERIES, j, least(j + KEYS, n), top, total);
                    mix(&own, scores + j * QUERIES, values, j, least(j + KEYS, n), rows);
                }
                for (long i = 0; i < own.present; i++) {
                    long at = (s->start + first + i) * H + h;
                    float sum = total[i / LANES][i % LANES], inverse = 1.0f / sum;
                    for (long e = 0; e < E; e += LANES) store(out + at * E + e, *(vec *)(rows + i * E + e) * inverse);
                    lse[at] = top[i / LANES][i % LANES] + logf(sum);
                }
            }
        }
        free(scores), free(keys), free(values), free(rows);
    }
}

/* into[j] += sum_i p[j][i] rows[i] for keys j to end: gradients of keys or values, `stride` apart. */
static void spread(const queries *q, const float *p, const float *rows, long j, long end, float *into, long stride) {
    for (long e = 0; e < q->E; e += VECTORS * LANES)
        for (long i = j; i < end; i += ROWS) {
            long from = most(0, i - q->before); /* queries before are before these keys */
            if (from < q->present)
                sum_tiles(p + (i - j) * QUERIES + from, QUERIES, 1, rows + from * q->E + e, q->E, into + (i - j) * stride + e,
                          stride, q->present - from, end - i, 1, (q->E - e) / LANES);
        }
}

/* Gradient of attend. Spans of a group stand together; groups[g] .. groups[g + 1] are its spans, and one
 * thread takes a group's key head, because its spans share the prompt's keys. dk and dv are float. */
void NAME(attend_back)(const real *q, const real *k, const real *v, const real *out, const float *lse,
                       const real *dout, const span *spans, const int64_t *groups, long G, float scale,
                       real *dq, float *dk, float *dv, long H, long K, long E, long longest, long window) {
    long R = H / K;
    TEAM(G * K * R * longest * longest * E)
    {
        float *keys = scratch((longest + ROWS) * E), *values = scratch((longest + ROWS) * E);
        float *p = scratch(2 * KEYS * QUERIES), *ds = p + KEYS * QUERIES;
        float *rows = scratch(5 * QUERIES * E), *grads = rows + QUERIES * E, *qt = grads + QUERIES * E;
        float *gt = qt + QUERIES * E, *dqs = gt + QUERIES * E, dots[QUERIES], level[QUERIES];
        EACH(task, G * K, 1)
            for (long number = groups[task / K]; number < groups[task / K + 1]; number++)
                for (long h = (task % K) * R; h < (task % K + 1) * R; h++) {
                    const span *s = spans + number;
                    long head = task % K, all = s->prefix_length + s->length;
                    if (h == head * R) {
                        NAME(gather)(k, s, all, K, head, keys, E);
                        NAME(gather)(v, s, all, K, head, values, E);
                    }
                    for (long first = 0; first < s->length; first += QUERIES) {
                        queries own = queries_of(s, first, window, E);
                        long n = own.before + own.present, at = (s->start + first) * H + h;
                        NAME(rows_of)(q + at * E, H * E, own.present, scale, rows, E);
                        NAME(rows_of)(dout + at * E, H * E, own.present, 1.0f, grads, E);
                        turned(rows, own.present, qt, E), turned(grads, own.present, gt, E);
                        memset(dots, 0, sizeof dots), memset(level, 0, sizeof level);
                        memset(dqs, 0, QUERIES * E * sizeof(float));
                        for (long i = 0; i < own.present; i++) {
                            vec dot = splat(0);
                            for (long e = 0; e < E; e += LANES)
                                dot += *(vec *)(grads + i * E + e) * load(out + (at + i * H) * E + e);
                            dots[i] = sum_of(dot), level[i] = lse[at + i * H];
                        }
                        for (long j = most(0, own.before - window + 1), end; j < n; j = end) {
                            end = least(j + KEYS, j < s->prefix_length ? s->prefix_length : n); /* one run of tokens */
                            score(&own, qt, keys, j, end, p);
                            score(&own, gt, values, j, end, ds);
                            weigh_back(&own, p, ds, j, end, level, dots);
                            mix(&own, ds, keys, j, end, dqs);
                            long key = (key_at(s, j) * K + head) * E;
                            spread(&own, ds, rows, j, end, dk + key, K * E);
                            spread(&own, p, grads, j, end, dv + key, K * E);
                        }
                        for (long i = 0; i < own.present; i++)
                            for (long e = 0; e < E; e += LANES)
                                store(dq + (at + i * H) * E + e, *(vec *)(dqs + i * E + e) * scale);
                    }
                }
        free(keys), free(values), free(p), free(rows);
    }
}

/* --- decoding: one new token for every running completion ----------------------------------------- */

/* scores[r][j] = q_r . k_j over a vector of keys times `wide`, stored as columns, kt (E, ld); sums run over e
 * in order. */
static inline __attribute__((always_inline)) void score_block(const float *q, const float *kt, long ld, float *scores,
                                                              long stride, long R, long E, const int wide) {
    for (long r = 0; r < R; r += 2) {
        long other = r + 1 < R ? r + 1 : r;
        vec a[4] = {0}, b[4] = {0};
        for (long e = 0; e < E; e++)
            for (int u = 0; u < wide; u++) {
                vec k = *(const vec *)(kt + e * ld + u * LANES);
                a[u] = a[u] + k * q[r * E + e];
                b[u] = b[u] + k * q[other * E + e];
            }
        for (int u = 0; u < wide; u++) {
            *(vec *)(scores + r * stride + u * LANES) = a[u];
            *(vec *)(scores + other * stride + u * LANES) = b[u];
        }
    }
}

/* The same over n keys; no more of them are read than there are, but for the last vector. */
static void score_columns(const float *q, const float *kt, long ld, long n, float *scores, long stride, long R, long E) {
    long j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) score_block(q, kt + j, ld, scores + j, stride, R, E, 4);
    for (; j + LANES < n; j += 2 * LANES) score_block(q, kt + j, ld, scores + j, stride, R, E, 2);
    if (j < n) score_block(q, kt + j, ld, scores + j, stride, R, E, 1);
}

/* Vectors first to first + wide of acc[r] and acc[other] += sum_j p[j] v_j, in the order of the keys. */
static inline __attribute__((always_inline)) void mix_block(const float *p, const float *q, const float *v, long n, float *acc,
                                                            float *other, long E, const int wide) {
    vec a[4], b[4];
    for (int u = 0; u < wide; u++) a[u] = *(vec *)(acc + u * LANES), b[u] = *(vec *)(other + u * LANES);
    for (long j = 0; j < n; j++)
        for (int u = 0; u < wide; u++) {
            vec x = *(const vec *)(v + j * E + u * LANES);
            a[u] = a[u] + x * p[j];
            b[u] = b[u] + x * q[j];
        }
    for (int u = 0; u < wide; u++) *(vec *)(acc + u * LANES) = a[u], *(vec *)(other + u * LANES) = b[u];
}

/* acc[r] += sum_j p[r][j] v_j and total[r] += sum_j p[r][j], in the order of the keys. v (n, E). */
static void mix_rows(const float *p, long stride, const float *v, long n, float *acc, float *total, long R, long E) {
    for (long r = 0; r < R; r += 2) { /* two queries read the same values */
        long other = r + 1 < R ? r + 1 : r, e = 0;
        const float *first = p + r * stride, *second = p + other * stride;
        for (; e + 4 * LANES <= E; e += 4 * LANES) mix_block(first, second, v + e, n, acc + r * E + e, acc + other * E + e, E, 4);
        for (; e < E; e += LANES) mix_block(first, second, v + e, n, acc + r * E + e, acc + other * E + e, E, 1);
        float one = total[r], two = total[other];
        for (long j = 0; j < n; j++) one += first[j], two += second[j];
        total[r] = one, total[other] = two;
    }
}

/* The larger of `top` and n scores. */
static float largest(const float *scores, long n, float top) {
    long j = 0;
    vec m = splat(top);
    for (; j + LANES <= n; j += LANES) m = larger(*(const vec *)(scores + j), m);
    top = max_of(m);
    for (; j < n; j++) top = scores[j] > top ? scores[j] : top;
    return top;
}

/* For each of B slots: norm and rotate the new query and key, append key and value to the slot's cache at
 * `drawn`, attend over [prompt | own]. qkv (B, (H + 2K) E) -> out (B, H, E). Caches, in float: prompt keys
 * (prompts, K, E, P), values (prompts, K, P, E); own keys (slots, K, E, S), values (slots, K, S, E). */
void NAME(decode_attend)(const real *qkv, const real *qw, const real *kw, float eps, const real *cos,
                         const real *sin, const int64_t *prompt, const int64_t *prompt_length,
                         const int64_t *drawn, const float *prompt_keys, const float *prompt_values,
                         float *own_keys, float *own_values, float scale, real *out, long B, long H, long K,
                         long E, long P, long S, long window) {
    long R = H / K, stride = P + S;
    TEAM(B * H * (P + S) * E * 2)
    {
        float *scores = malloc(R * stride * sizeof(float));
        float q[16 * 1024], acc[16 * 1024], total[64];
        real turned[1024];
        EACH(task, B * K, ROWS_OF(B * K)) {
            long b = task / K, head = task % K, before = prompt_length[b], at = drawn[b], n = at + 1;
            const real *row = qkv + b * (H + 2 * K) * E;
            const real *c = cos + (before + at) * E, *s = sin + (before + at) * E;
            float *keys = own_keys + (b * K + head) * E * S, *values = own_values + (b * K + head) * S * E;
            if (task + 1 < B * K) /* the next keys, which the processor cannot foresee */
                for (long e = 0; e < E; e++) __builtin_prefetch(keys + (E + e) * S);
            NAME(turn)(row + (H + head) * E, kw, eps, c, s, turned, E);
            for (long e = 0; e < E; e++) keys[e * S + at] = get(turned + e);
            for (long e = 0; e < E; e++) values[at * E + e] = get(row + (H + K + head) * E + e);
            for (long r = 0; r < R; r++) {
                NAME(turn)(row + (head * R + r) * E, qw, eps, c, s, turned, E);
                for (long e = 0; e < E; e++) q[r * E + e] = get(turned + e) * scale;
            }
            const float *shared = prompt_keys + (prompt[b] * K + head) * E * P;
            score_columns(q, shared, P, before, scores, stride, R, E);
            score_columns(q, keys, S, n, scores + P, stride, R, E);
            for (long r = 0; r < R; r++) {
                float *own = scores + r * stride, top = -INFINITY;
                for (long j = 0; j <= before + at - window; j++) own[j < before ? j : P + j - before] = -INFINITY;
                top = largest(own + P, n, largest(own, before, top));
                for (long j = 0; j < before; j += LANES)
                    *(vec *)(own + j) = exp_of(*(vec *)(own + j) - top);
                for (long j = 0; j < n; j += LANES)
                    *(vec *)(own + P + j) = exp_of(*(vec *)(own + P + j) - top);
                total[r] = 0;
            }
            memset(acc, 0, R * E * sizeof(float));
            mix_rows(scores, stride, prompt_values + (prompt[b] * K + head) * P * E, before, acc, total, R, E);
            mix_rows(scores + P, stride, values, n, acc, total, R, E);
            for (long r = 0; r < R; r++) {
                float inverse = 1.0f / total[r];
                for (long e = 0; e < E; e += LANES)
                    store(out + (b * H + head * R + r) * E + e, *(vec *)(acc + r * E + e) * inverse);
            }
        }
        free(scores);
    }
}

/* --- rows of logits -------------------------------------------------------------------------------- */

#define CHUNK 512 /* logits whose exponentials are summed before they are added up */

/* max and sum of e^((x - max) / T) of a row; `parts` (V / CHUNK) gets the running totals. */
static float NAME(row_total)(const real *x, long V, float inverse, float *top, float *parts) {
    vec m = splat(-INFINITY);
    long whole = V - V % LANES;
    for (long i = 0; i < whole; i += LANES) m = larger(load(x + i), m);
    float highest = max_of(m);
    for (long i = whole; i < V; i++) highest = get(x + i) > highest ? get(x + i) : highest;
    float total = 0;
    for (long c = 0; c < V; c += CHUNK) {
        vec sum = splat(0);
        long end = c + CHUNK < V ? c + CHUNK : V, i = c;
        for (; i + LANES <= end; i += LANES) sum += exp_of((load(x + i) - highest) * inverse);
        float rest = sum_of(sum);
        for (; i < end; i++) rest += exp_of(splat((get(x + i) - highest) * inverse))[0];
        total += rest;
        if (parts) parts[c / CHUNK] = total;
    }
    *top = highest;
    return total;
}

/* Draw a token per row by inverse CDF from softmax(logits / T); greedy where inverse_temperature is 0. */
void NAME(draw)(const real *logits, const float *uniform, float inverse_temperature, int64_t *token,
                float *logprob, long B, long V) {
    float inverse = inverse_temperature > 0 ? inverse_temperature : 1.0f;
    TEAM(32 * B * V)
    {
        float *parts = malloc((V / CHUNK + 1) * sizeof(float));
        EACH(b, B, ROWS_OF(B)) {
            const real *x = logits + b * V;
            float top, total = NAME(row_total)(x, V, inverse, &top, parts);
            long chosen = 0;
            if (inverse_temperature > 0) {
                float goal = uniform[b] * total, sum = 0;
                long c = 0, last = (V - 1) / CHUNK;
                while (c < last && parts[c] <= goal) c++;
                sum = c ? parts[c - 1] : 0;
                long end = (c + 1) * CHUNK < V ? (c + 1) * CHUNK : V;
                chosen = -1;
                for (long i = c * CHUNK; i < end; i++) {
                    float e = exp_of(splat((get(x + i) - top) * inverse))[0];
                    sum += e;
                    if (e > 0) chosen = i; /* never a token without probability, however sums round */
                    if (sum > goal && e > 0) break;
                }
                for (long i = c * CHUNK; chosen < 0 && i >= 0; i--) /* the chunk was empty: the last before it */
                    if (exp_of(splat((get(x + i) - top) * inverse))[0] > 0) chosen = i;
                if (chosen < 0) chosen = 0; /* logits that are no numbers */
            } else
                while (get(x + chosen) != top && chosen < V - 1) chosen++;
            token[b] = chosen;
            logprob[b] = (get(x + chosen) - top) * inverse - logf(total);
        }
        free(parts);
    }
}

/* Log-prob, entropy and sum of squared probabilities of given tokens under softmax(logits / T). */
void NAME(score_rows)(const real *logits, const int64_t *target, float inverse, float *logprob, float *entropy,
                      float *collision, long M, long V) {
    TEAM(64 * M * V)
    EACH(t, M, ROWS_OF(M)) {
        const real *x = logits + t * V;
        float top, total = NAME(row_total)(x, V, inverse, &top, NULL);
        vec first = splat(0), second = splat(0);
        long i = 0;
        float tail_first = 0, tail_second = 0;
        for (; i + LANES <= V; i += LANES) {
            vec z = (load(x + i) - top) * inverse, e = exp_of(z);
            first += e * z;
            second += e * e;
        }
        for (; i < V; i++) {
            float z = (get(x + i) - top) * inverse, e = exp_of(splat(z))[0];
            tail_first += e * z;
            tail_second += e * e;
        }
        logprob[t] = (get(x + target[t]) - top) * inverse - logf(total);
        entropy[t] = logf(total) - (sum_of(first) + tail_first) / total;
        collision[t] = (sum_of(second) + tail_second) / (total * total);
    }
}

/* In place: logits become d loss / d logits, given the gradients of log-prob and entropy (may be NULL). */
void NAME(score_rows_back)(real *logits, const int64_t *target, float inverse, const float *dlogprob,
                           const float *dentropy, const float *entropy, long M, long V) {
    TEAM(64 * M * V)
    EACH(t, M, ROWS_OF(M)) {
        real *x = logits + t * V;
        float top, total = NAME(row_total)(x, V, inverse, &top, NULL), level = logf(total);
        float g = dlogprob[t] * inverse, pull = dentropy ? dentropy[t] * inverse : 0;
        float high = dentropy ? entropy[t] : 0, at_target = get(x + target[t]);
        long i = 0;
        for (; i + LANES <= V; i += LANES) {
            vec z = (load(x + i) - top) * inverse, p = exp_of(z) * (1.0f / total);
            store(x + i, -p * (pull * (z - level + high) + g));
        }
        for (; i < V; i++) {
            float z = (get(x + i) - top) * inverse, p = exp_of(splat(z))[0] / total;
            real line[LANES];
            store(line, splat(-p * (g + pull * (z - level + high))));
            x[i] = line[0];
        }
        float z = (at_target - top) * inverse, p = exp_of(splat(z))[0] / total;
        real line[LANES];
        store(line, splat(g - p * (g + pull * (z - level + high))));
        x[target[t]] = line[0];
    }
}
