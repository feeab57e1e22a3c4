/* The compiled operations against plain sums, as a program: it also runs under an emulator. Exit 0: all right.
 * Compiled with -DBFLOAT16, with -DMIXED (products alone) and with neither, beside the library's files compiled the
 * same way. */
#include <stdio.h>
#include "rows.c"

long NAME(packed_size)(long, long);
void NAME(pack_weight)(const real *, void *, long, long);
void NAME(product)(const real *, const void *, const float *, real *, long, long, long);
void NAME(product_once)(const real *, const real *, long, const float *, real *, long, long, long);
void NAME(outer_sum)(const real *, long, const real *, long, float *, long, long, long);
void NAME(attend)(const real *, const real *, const real *, const int64_t *, long, float, float, real *, float *, long,
                  long, long, long, long);
void NAME(attend_back)(const real *, const real *, const real *, const real *, const float *, const real *,
                       const int64_t *, const int64_t *, long, float, float, real *, float *, float *, long, long, long,
                       long, long);
void NAME(decode_attend)(const real *, const real *, const real *, float, float, const real *, const real *, const int64_t *,
                         const int64_t *, const int64_t *, const float *, const float *, float *, float *, float,
                         float, real *, long, long, long, long, long, long, long);
void NAME(soft_cap)(const real *, float, real *, long, long);
void team_size(long);
int permit_tiles(void) __attribute__((weak)); /* where there are some */

static uint32_t state = 1;
static float noise(void) { return ((state = state * 1664525 + 1013904223) >> 8) / 8388608.0f - 1; }
static real *random_reals(long n) {
    real *x = aligned_alloc(64, (n * sizeof(real) + 64 + 63) / 64 * 64);
    for (long i = 0; i < n; i++) {
        vec v = splat(noise());
        real line[LANES];
        store(line, v);
        x[i] = line[0];
    }
    return x;
}
static int wrong = 0;
static void expect(int right, const char *what, long a, long b, long c) {
    if (!right) printf("%s is wrong for %ld, %ld, %ld\n", what, a, b, c), wrong = 1;
}
/* A number as products take it. */
static double factor(const real *x) {
#ifdef MIXED
    return widened(rounded(splat(*x))[0] >> 16);
#else
    return get(x);
#endif
}
static int near(double found, double wanted, double size) {
    return fabs(found - wanted) <= size * (sizeof(real) == 4 ? 1e-5 : 8e-3); /* false for NaN */
}

static void products(long M, long N, long K) {
    real *x = random_reals(M * K), *w = random_reals(N * K), *c = random_reals(M * N), *again = random_reals(M * N);
    float *bias = calloc(N + 64, sizeof(float));
    for (long n = 0; n < N; n++) bias[n] = noise();
    void *panels = aligned_alloc(64, (NAME(packed_size)(N, K) + 63) / 64 * 64);
    NAME(pack_weight)(w, panels, N, K);
    NAME(product)(x, panels, bias, c, M, N, K);
    int right = 1;
    for (long m = 0; m < M; m++)
        for (long n = 0; n < N; n++) {
            double sum = bias[n];
            for (long k = 0; k < K; k++) sum += factor(x + m * K + k) * factor(w + n * K + k);
            right &= near(get(c + m * N + n), sum, 1 + fabs(sum));
        }
    expect(right, "product", M, N, K);
    real *turned = random_reals(N * K);
    for (long n = 0; n < N; n++)
        for (long k = 0; k < K; k++) turned[k * N + n] = w[n * K + k];
    for (int way = 0; way < 2; way++) {
        NAME(product_once)(x, way ? turned : w, way, bias, again, M, N, K);
        expect(!memcmp(c, again, M * N * sizeof(real)), way ? "product_once, turned" : "product_once", M, N, K);
    }
    for (long m = 0; m < M; m += 1 + M / 5) NAME(product)(x + m * K, panels, bias, again + m * N, 1, N, K);
    expect(!memcmp(c, again, M * N * sizeof(real)), "a row alone", M, N, K);
    struct noted noted = {(operation *)NAME(product), {(long)x, (long)panels, (long)bias, (long)again, 0, N, K}, .rows_at = 4};
    noted.strides[0] = K * sizeof(real), noted.strides[3] = N * sizeof(real);
    memset(again, 0, M * N * sizeof(real));
    run_again(&noted, 1, M);
    expect(!memcmp(c, again, M * N * sizeof(real)), "run_again", M, N, K);
    free(x), free(w), free(c), free(again), free(bias), free(panels), free(turned);
}

static void gradients(long M, long N, long K, long more) {
    long gs = N + more;
    real *g = random_reals(M * gs), *x = random_reals(M * K);
    float *w = malloc(N * K * sizeof(float));
    for (long i = 0; i < N * K; i++) w[i] = i % 7;
    NAME(outer_sum)(g, gs, x, K, w, M, N, K);
    int right = 1;
    for (long n = 0; n < N; n++)
        for (long k = 0; k < K; k++) {
            double sum = (n * K + k) % 7;
            for (long m = 0; m < M; m++) sum += factor(g + m * gs + n) * factor(x + m * K + k);
            right &= fabs(sum - w[n * K + k]) < 1e-4 * (1 + sqrt(M)); /* sums are in float */
        }
    expect(right, more ? "outer_sum, some columns" : "outer_sum", M, N, K);
    free(g), free(x), free(w);
}

#ifndef MIXED
static double limited(double score, double cap) { return cap ? cap * tanh(score / cap) : score; }

/* In place and not, with numbers that fill no vector, near 0 and far beyond the cap; NaN stays. */
static void caps(long M, long V) {
    real *x = random_reals(M * V), *out = random_reals(M * V);
    int right = 1;
    for (long i = 0; i < M * V; i++) {
        real line[LANES];
        store(line, splat(i == 3 ? NAN : get(x + i) * powf(10, i % 9 - 5)));
        x[i] = line[0];
    }
    NAME(soft_cap)(x, 2, out, M, V);
    for (long i = 0; i < M * V; i++) {
        double wanted = limited(get(x + i), 2);
        right &= i == 3 ? isnan(get(out + i)) : fabs(get(out + i) - wanted) <= fabs(wanted) * (sizeof(real) == 4 ? 5e-7 : 4e-3);
    }
    NAME(soft_cap)(x, 2, x, M, V);
    expect(right && !memcmp(x, out, M * V * sizeof(real)), "soft_cap", M, V, 0);
    free(x), free(out);
}

/* The last of T tokens, decoded after a prompt of P, has the bits that it has among all. */
static void attention(long P, long T, float cap) {
    enum { H = 4, K = 2, E = 32, ROOM = 128 };
    real *q = random_reals(T * H * E), *k = random_reals(T * K * E), *v = random_reals(T * K * E);
    real *all = random_reals(T * H * E), *one = random_reals(H * E);
    float level[1024], *store_[4];
    int64_t spans[] = {0, 0, 0, T}, page = 0, before = P, drawn = T - 1 - P;
    NAME(attend)(q, k, v, spans, 1, 0.25f, cap, all, level, H, K, E, T, 1L << 40);
    for (int i = 0; i < 4; i++) store_[i] = calloc(K * E * ROOM, sizeof(float));
    for (long t = 0; t < T - 1; t++) {
        float **into = store_ + (t < P ? 0 : 2);
        long at = t < P ? t : t - P;
        for (long h = 0; h < K; h++)
            for (long e = 0; e < E; e++) {
                into[0][h * E * ROOM + (at / 16 * E + e) * 16 + at % 16] = get(k + (t * K + h) * E + e);
                into[1][(h * ROOM + at) * E + e] = get(v + (t * K + h) * E + e);
            }
    }
    real *qkv = random_reals((H + 2 * K) * E), *cosine = random_reals(T * E), *sine = random_reals(T * E);
    real unit[LANES], zero[LANES];
    store(unit, splat(1)), store(zero, splat(0));
    for (long i = 0; i < T * E; i++) cosine[i] = unit[0], sine[i] = zero[0];
    memcpy(qkv, q + (T - 1) * H * E, H * E * sizeof(real));
    memcpy(qkv + H * E, k + (T - 1) * K * E, K * E * sizeof(real));
    memcpy(qkv + (H + K) * E, v + (T - 1) * K * E, K * E * sizeof(real));
    struct noted noted = {(operation *)NAME(decode_attend), .rows_at = 13, .factors = {0, 0, 0.25f, cap}};
    void *memory[] = {qkv, NULL, NULL, cosine, sine, &page, &before, &drawn, store_[0], store_[1], store_[2], store_[3], one};
    long sizes[] = {0, H, K, E, ROOM, ROOM, 1L << 40};
    memcpy(noted.values, memory, sizeof(memory)), memcpy(noted.values + 13, sizes, sizeof(sizes));
    run_again(&noted, 1, 1);
    expect(!memcmp(one, all + (T - 1) * H * E, H * E * sizeof(real)), "decode_attend", P, T, 0);
    double total[E] = {0}, sum = 0;
    for (long t = 0; t < T; t++) {
        double score = 0;
        for (long e = 0; e < E; e++)
            score += 0.25 * get(q + (T - 1) * H * E + e) * get(k + t * K * E + e);
        score = exp(limited(score, cap));
        sum += score;
        for (long e = 0; e < E; e++) total[e] += score * get(v + t * K * E + e);
    }
    int right = 1;
    for (long e = 0; e < E; e++) right &= near(get(one + e), total[e] / sum, 1);
    expect(right, "attend", P, T, 0);
}

/* A prompt of P tokens, which lie behind those that follow it, T in all: the gradient against sums over pairs. */
static void attention_gradient(long P, long T, long window, float cap) {
    enum { H = 2, E = 16 };
    real *in[5]; /* q, k, v, the gradient of out, out */
    for (int i = 0; i < 5; i++) in[i] = random_reals(T * H * E);
    real *dq = random_reals(T * H * E);
    float *dk = calloc(T * E, sizeof(float)), *dv = calloc(T * E, sizeof(float)), level[1024];
    double *sums = calloc(3 * T * H * E, sizeof(double)), *sk = sums + T * H * E, *sv = sk + T * E;
    int64_t own = T - P, spans[] = {0, 0, own, P, own, P, 0, own}, groups[] = {0, 2};
    NAME(attend)(in[0], in[1], in[2], spans, 2, 0.25f, cap, in[4], level, H, 1, E, T, window);
    NAME(attend_back)(in[0], in[1], in[2], in[4], level, in[3], spans, groups, 1, 0.25f, cap, dq, dk, dv, H, 1, E, T, window);
    for (long pair = 0; pair < T * H * T; pair++) {
        long query = pair / T / H, key = pair % T, i = (query + own) % T * H + pair / T % H, j = (key + own) % T;
        if (key > query || key + window <= query) continue;
        double score = 0, slope = 0;
        for (long e = 0; e < E; e++) {
            score += 0.25 * get(in[0] + i * E + e) * get(in[1] + j * E + e);
            slope += (double)get(in[3] + i * E + e) * (get(in[2] + j * E + e) - get(in[4] + i * E + e));
        }
        double weight = exp(limited(score, cap) - level[i]);
        slope *= 0.25 * weight * (cap ? 1 - pow(tanh(score / cap), 2) : 1);
        for (long e = 0; e < E; e++) {
            sums[i * E + e] += slope * get(in[1] + j * E + e);
            sk[j * E + e] += slope * get(in[0] + i * E + e);
            sv[j * E + e] += weight * get(in[3] + i * E + e);
        }
    }
    int right = 1;
    for (long i = 0; i < T * H * E; i++) right &= near(get(dq + i), sums[i], 1);
    for (long i = 0; i < T * E; i++) right &= near(dk[i], sk[i], 1 + fabs(sk[i])) & near(dv[i], sv[i], 1 + fabs(sv[i]));
    expect(right, "attend_back", P, T, window);
    for (int i = 0; i < 5; i++) free(in[i]);
    free(dq), free(dk), free(dv), free(sums);
}

#endif

int main(void) {
    team_size(3);
    if (permit_tiles) permit_tiles();
    long rows[] = {1, 2, 5, 16, 17, 33, 97, 300}, outputs[] = {1, 16, 40, 130}, inner[] = {16, 48, 256};
    for (int m = 0; m < 8; m++)
        for (int n = 0; n < 4; n++)
            for (int k = 0; k < 3; k++) products(rows[m], outputs[n], inner[k]);
    long tokens[] = {1, 3, 31, 64, 257, 300}, columns[] = {16, 48, 304};
    for (int m = 0; m < 6; m++)
        for (int k = 0; k < 3; k++)
            for (int n = 0; n < 4; n++)
                for (int t = 0; t < 2; t++) gradients(tokens[m], (long[]){1, 20, 97, 130}[n], columns[k], t);
#ifndef MIXED
    caps(3, 37), caps(5, 64);
    for (long t = 2; t < 128; t += 9) attention(t / 2, t, 0), attention(1, t, 0), attention(t / 3 + 1, t, 0.5f);
    for (long t = 2; t < 260; t += 17) {
        attention_gradient(t / 3 + 1, t, t, 0), attention_gradient(t / 2, t, t / 3 + 1, 0);
        attention_gradient(t / 3 + 1, t, t / 2 + 1, 0.5f);
    }
#endif
    return wrong;
}
