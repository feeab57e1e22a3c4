/* The fused operations between the matrix products of a decoder, forward and backward.
 *
 * Exactness: attention while decoding does the additions of training (attention.c) in the same order
 * for every (query, key) pair, whatever shares a vector with it. Reductions over tokens run over fixed
 * blocks, so the number of threads changes nothing.
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

/* x = x + delta (delta may be NULL), h = (w + shift) * x / sqrt(mean(x^2) + eps). All (T, D). */
void NAME(add_norm)(const real *x, const real *delta, const real *w, float shift, float eps, real *sum, real *h,
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
        for (long d = 0; d < D; d += LANES) store(h + t * D + d, load(sum + t * D + d) * scale * (load(w + d) + shift));
    }
}

/* Gradient of add_norm: dx = dsum + J^T dh; dw (D) float. `sum` is the forward's output. */
void NAME(add_norm_back)(const real *sum, const real *w, float shift, float eps, const real *dsum, const real *dh,
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
                dots += v * (load(w + d) + shift) * load(gt + d);
            }
            float scale = 1.0f / sqrtf(sum_of(squares) / D + eps);
            float pull = sum_of(dots) * scale * scale * scale / D;
            for (long d = 0; d < D; d += LANES) {
                vec v = load(xt + d), g = load(gt + d);
                vec into = g * (load(w + d) + shift) * scale - v * pull;
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

/* One head: out = rotate((w + shift) * x * scale). cos and sin are rows of (E), halves paired. */
static float NAME(turn)(const real *x, const real *w, float shift, float eps, const real *cos, const real *sin,
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
        if (w) a *= load(w + e) + shift, b *= load(w + E / 2 + e) + shift;
        vec c = load(cos + e), s = load(sin + e);
        store(out + e, a * c - b * s);
        store(out + E / 2 + e, b * c + a * s);
    }
    return scale;
}

/* qkv (T, (H + 2K) E) -> q (T, H, E), k (T, K, E), v (T, K, E); tables (positions, E). */
void NAME(split_heads)(const real *qkv, const real *qw, const real *kw, float shift, float eps, const real *cos,
                       const real *sin, const int64_t *position, real *q, real *k, real *v, long T, long H,
                       long K, long E) {
    TEAM(8 * T * (H + 2 * K) * E)
    EACH(t, T, ROWS_OF(T)) {
        const real *row = qkv + t * (H + 2 * K) * E, *c = cos + position[t] * E, *s = sin + position[t] * E;
        for (long h = 0; h < H; h++) NAME(turn)(row + h * E, qw, shift, eps, c, s, q + (t * H + h) * E, E);
        for (long h = 0; h < K; h++) NAME(turn)(row + (H + h) * E, kw, shift, eps, c, s, k + (t * K + h) * E, E);
        memcpy(v + t * K * E, row + (H + K) * E, K * E * sizeof(real));
    }
}

/* Gradient of one head's norm and rotation; adds to dw. */
static void NAME(turn_back)(const real *x, const real *w, float shift, float eps, const real *cos, const real *sin,
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
            dots += v * (load(w + e) + shift) * *(vec *)(turned + e);
        }
        scale = 1.0f / sqrtf(sum_of(squares) / E + eps);
        pull = sum_of(dots) * scale * scale * scale / E;
    }
    for (long e = 0; e < E; e += LANES) {
        vec g = *(vec *)(turned + e), v = load(x + e);
        if (w) {
            *(vec *)(dw + e) += g * v * scale;
            g = g * (load(w + e) + shift) * scale - v * pull;
        }
        store(dx + e, g);
    }
}

/* Gradient of split_heads: dq, dk, dv -> dqkv; dqw, dkw (E) float or NULL. */
void NAME(split_heads_back)(const real *qkv, const real *qw, const real *kw, float shift, float eps, const real *cos,
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
                NAME(turn_back)(row + h * E, qw, shift, eps, c, s, dq + (t * H + h) * E, into + h * E, own, E);
            for (long h = 0; h < K; h++)
                NAME(turn_back)(row + (H + h) * E, kw, shift, eps, c, s, dk + (t * K + h) * E, into + (H + h) * E,
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

/* --- decoding: one new token for every running completion ----------------------------------------- */

#define NEIGHBOURS 16 /* keys side by side, (n / 16, E, 16): what is read lies in one piece, and no more of it than there is */

static inline long key_column(long j, long E) { return j / NEIGHBOURS * NEIGHBOURS * E + j % NEIGHBOURS; }

/* scores[r][j] = q_r . k_j over a vector of keys times `wide`; sums run over e in order. */
static inline __attribute__((always_inline)) void score_block(const float *q, const float *keys, float *scores,
                                                              long stride, long R, long E, const int wide) {
    for (long r = 0; r < R; r += 2) {
        long other = r + 1 < R ? r + 1 : r;
        vec a[4] = {0}, b[4] = {0};
        for (long e = 0; e < E; e++)
            for (int u = 0; u < wide; u++) {
                vec k = *(const vec *)(keys + key_column(u * LANES, E) + e * NEIGHBOURS);
                a[u] = a[u] + k * q[r * E + e];
                b[u] = b[u] + k * q[other * E + e];
            }
        for (int u = 0; u < wide; u++) {
            *(vec *)(scores + r * stride + u * LANES) = a[u];
            *(vec *)(scores + other * stride + u * LANES) = b[u];
        }
    }
}

/* The same over n keys; no more of them are read than there are, but for the last vectors. */
static void score_columns(const float *q, const float *keys, long n, float *scores, long stride, long R, long E) {
    long j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES) score_block(q, keys + key_column(j, E), scores + j, stride, R, E, 4);
    for (; j + LANES < n; j += 2 * LANES) score_block(q, keys + key_column(j, E), scores + j, stride, R, E, 2);
    if (j < n) score_block(q, keys + key_column(j, E), scores + j, stride, R, E, 1);
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
 * (prompts, K, P / 16, E, 16), values (prompts, K, P, E); own keys (slots, K, S / 16, E, 16), values (slots, K, S, E). */
void NAME(decode_attend)(const real *qkv, const real *qw, const real *kw, float shift, float eps, const real *cos,
                         const real *sin, const int64_t *prompt, const int64_t *prompt_length,
                         const int64_t *drawn, const float *prompt_keys, const float *prompt_values,
                         float *own_keys, float *own_values, float scale, float cap, real *out, long B, long H,
                         long K, long E, long P, long S, long window) {
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
            NAME(turn)(row + (H + head) * E, kw, shift, eps, c, s, turned, E);
            for (long e = 0; e < E; e++) keys[key_column(at, E) + e * NEIGHBOURS] = get(turned + e);
            for (long e = 0; e < E; e++) values[at * E + e] = get(row + (H + K + head) * E + e);
            for (long r = 0; r < R; r++) {
                NAME(turn)(row + (head * R + r) * E, qw, shift, eps, c, s, turned, E);
                for (long e = 0; e < E; e++) q[r * E + e] = get(turned + e) * scale;
            }
            const float *shared = prompt_keys + (prompt[b] * K + head) * E * P;
            score_columns(q, shared, before, scores, stride, R, E);
            score_columns(q, keys, n, scores + P, stride, R, E);
            for (long r = 0; r < R; r++) {
                float *own = scores + r * stride, top = -INFINITY;
                if (cap) cap_scores(own, before, cap), cap_scores(own + P, n, cap);
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

/* out = cap tanh(x / cap), (M, V); out may be x. */
void NAME(soft_cap)(const real *x, float cap, real *out, long M, long V) {
    TEAM(32 * M * V)
    EACH(t, M, ROWS_OF(M)) {
        long i = t * V, end = i + V;
        for (; i + LANES <= end; i += LANES) store(out + i, capped(load(x + i), cap));
        for (; i < end; i++) {
            real line[LANES];
            store(line, capped(splat(get(x + i)), cap));
            out[i] = line[0];
        }
    }
}

/* Draw a token per row by inverse CDF from softmax(logits / T); greedy where inverse_temperature is 0, and in
 * rows whose uniform is below 0. */
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
            if (inverse_temperature > 0 && uniform[b] >= 0) {
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
void NAME(token_outputs)(const real *logits, const int64_t *target, float inverse, float *logprob, float *entropy,
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

/* In place: logits become d loss / d logits, given the gradients of log-prob and entropy (may be NULL). With 1 / cap,
 * which is 0 without one, they are capped logits, and it is the gradient of what was capped. */
void NAME(token_outputs_back)(real *logits, const int64_t *target, float inverse, float inverse_cap,
                              const float *dlogprob, const float *dentropy, const float *entropy, long M, long V) {
    TEAM(64 * M * V)
    EACH(t, M, ROWS_OF(M)) {
        real *x = logits + t * V;
        float top, total = NAME(row_total)(x, V, inverse, &top, NULL), level = logf(total);
        float g = dlogprob[t] * inverse, pull = dentropy ? dentropy[t] * inverse : 0;
        float high = dentropy ? entropy[t] : 0, at_target = get(x + target[t]);
        long i = 0;
        for (; i + LANES <= V; i += LANES) {
            vec y = load(x + i), z = (y - top) * inverse, p = exp_of(z) * (1.0f / total);
            vec into = -p * (pull * (z - level + high) + g);
            if (inverse_cap) into *= cap_slope(y, inverse_cap);
            store(x + i, into);
        }
        for (; i < V; i++) {
            float z = (get(x + i) - top) * inverse, p = exp_of(splat(z))[0] / total;
            real line[LANES];
            store(line, -p * (g + pull * (z - level + high)) * cap_slope(splat(get(x + i)), inverse_cap));
            x[i] = line[0];
        }
        float z = (at_target - top) * inverse, p = exp_of(splat(z))[0] / total;
        real line[LANES];
        store(line, (g - p * (g + pull * (z - level + high))) * cap_slope(splat(at_target), inverse_cap));
        x[target[t]] = line[0];
    }
}
