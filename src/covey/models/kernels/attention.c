/* Attention over packed sequences, forward and backward.
 *
 * For every (query, key) pair the additions are those of decoding (`decode_attend` in ops.c), in the same order, so
 * sampler and trainer agree bit for bit: scores over features, totals and values over keys from the first to the last.
 * Hence two passes over the keys, one for the largest score, and no sum that is scaled anew. The gradient adds in an
 * order that does not depend on the number of threads.
 *
 * Shapes as in ops.c. All products are one: ROWS x VECTORS sums in registers. */
#include "vector.h"

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

/* Caps the scores of keys j to end with the queries that are not before them. */
static void limit(const queries *q, float *scores, long j, long end, float cap) {
    for (long key = j; key < end; key++) {
        long from = most(0, (key - q->before) / LANES * LANES);
        cap_scores(scores + (key - j) * QUERIES + from, q->present - from, cap);
    }
}

/* A vector of scores from query i on with key j: none where a query comes before it, or `window` keys or more after. */
static inline vec seen(const queries *q, long i, long j, vec scores) {
    long late = j - q->before - i, over = least(late + q->window, LANES);
    if (late <= 0 && over == LANES) return scores;
    ivec lane = lanes();
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
static void weigh_back(const queries *q, float *scores, float *grads, long j, long end, const float *level, const float *dots,
                       float inverse_cap) {
    for (long i = 0; i < q->present; i += LANES) {
        vec high = *(const vec *)(level + i), dot = *(const vec *)(dots + i);
        long keys = reach(q, i, j, end);
        for (long key = 0; key < keys; key++) {
            vec *weight = (vec *)(scores + key * QUERIES + i), *grad = (vec *)(grads + key * QUERIES + i);
            vec slope = cap_slope(*weight, inverse_cap);
            *weight = exp_below(seen(q, i, j + key, *weight) - high);
            *grad = *weight * (*grad - dot) * slope;
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

/* out (T, H, E), lse (T, H): softmax attention of every span within [prefix | own], causal. Scores are scaled, and then
 * capped, if `cap` is not 0. */
void NAME(attend)(const real *q, const real *k, const real *v, const span *spans, long S, float scale, float cap,
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
                    if (cap) limit(&own, scores + j * QUERIES, j, least(j + KEYS, n), cap);
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
                       float cap, real *dq, float *dk, float *dv, long H, long K, long E, long longest, long window) {
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
                            if (cap) limit(&own, p, j, end, cap);
                            score(&own, gt, values, j, end, ds);
                            weigh_back(&own, p, ds, j, end, level, dots, cap ? 1.0f / cap : 0);
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
