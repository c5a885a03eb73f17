/* Decoder layers for one CPU thread: the native twin of ops.py.
 *
 * Every output element is one chain of multiply-adds whose order depends on the element alone: not on how many
 * rows are computed together, nor on where in the batch a row stands, nor on where chunks of a prompt begin. So
 * these kernels serve both numeric modes. Activations are fp32; weights and KV are bf16, or fp32 with
 * -DMP_FP32. Compiled at first use for the CPU at hand (native.py).
 *
 * KV of one (block, row): keys [kv head][head dim][128 tokens], then values [kv head][128 tokens][head dim].
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#define TILE_M 6 /* rows x weight rows kept in registers: 24 of 32 */
#define TILE_N 4
#else
#define LANES 8
#define TILE_M 4 /* 12 of 16 */
#define TILE_N 3
#endif
#define MAX_TILE_M 6
#define MAX_TILE_N 8
#define UNROLL _Pragma("GCC unroll 8")
/* One load feeds several multiply-adds; folded into each of them it would be loaded as often. */
#ifdef __AVX2__
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v) (void)0
#endif
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 128 /* tokens per KV block */
#define PANEL 128 /* rows that pass through a layer together: scratch stays in cache */
#define WEIGHT_BLOCK_BYTES (128 << 10) /* weight rows reused from L2 over all rows of a panel */
#define ATT_TOKENS 16 /* query tokens per attention tile */
#define MAX_TILE_ROWS 256 /* ATT_TOKENS x query heads per KV head, at most */
#define MAX_HEAD_DIM 256
#define ATT_SCRATCH (MAX_TILE_ROWS * (3 * MAX_HEAD_DIM + BLOCK))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef float vf_u __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh_u __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

#ifdef MP_FP32
typedef float store_t;
INLINE vf load_w(const store_t *p) { return *(const vf_u *)p; }
INLINE store_t narrow(float x) { return x; }
#else
typedef uint16_t store_t;
INLINE vf load_w(const store_t *p) {
#if defined(__AVX512F__) /* gcc 12 widens vectors in four instructions where one does */
    return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#elif defined(__AVX2__)
    return (vf)((vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
#else
    return (vf)(__builtin_convertvector(*(const vh_u *)p, vu) << 16);
#endif
}
INLINE store_t narrow(float x) { /* to nearest, ties to even */
    uint32_t u;
    memcpy(&u, &x, 4);
    return (store_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
#endif
INLINE vf load_f(const float *p) { return *(const vf_u *)p; }
INLINE void store_f(float *p, vf x) { *(vf_u *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }

/* a * b + c, fused if the CPU can. Left to itself, the compiler fuses some chains and not others: tiles of one shape
   would give other bits than those of another. */
INLINE vf fma_v(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

INLINE float sum_lanes(vf x) {
    typedef float v4 __attribute__((vector_size(16)));
    v4 q[LANES / 4];
    memcpy(q, &x, sizeof x);
#if LANES == 16
    q[0] += q[2];
    q[1] += q[3];
#endif
    q[0] += q[1];
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}

INLINE float max_lanes(vf x) {
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* e^x with x limited to [-87, 88], relative error below 2e-7; exactly 1 at 0. Cephes' reduction and polynomial. */
INLINE vf exp_v(vf x) {
    x = choose(x < -87.0f, splat(-87.0f), x);
    x = choose(x > 88.0f, splat(88.0f), x);
    vf t = x * 1.44269504f;
    vf f = (t + 12582912.0f) - 12582912.0f; /* 1.5 x 2^23: rounds to an integer */
    vi n = __builtin_convertvector(f, vi);
    vf r = (x - f * 0.693359375f) + f * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (vf)((n + 127) << 23);
}

/* ---- linear: out[m][n] = sum over k of x[m][k] w[n][k] -------------------------------------------------- */

enum { SET = 0, ADD = 1 };

INLINE void dot_tile(const int m, const int n, const float *x, long ldx, const store_t *w, long k, float *out,
                     long ldo, const float *bias, int mode) {
    vf acc[MAX_TILE_M][MAX_TILE_N];
    UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < n; j++) acc[i][j] = (vf){0};
    for (long c = 0; c < k; c += LANES) {
        vf b[MAX_TILE_N];
        UNROLL for (int j = 0; j < n; j++) b[j] = load_w(w + j * k + c);
        /* The rows of a tile are short streams that the CPU does not foresee: fetch the next tile's. */
        UNROLL for (int byte = 0; byte < n * LANES * (int)sizeof(store_t); byte += 64)
            __builtin_prefetch((const char *)(w + n * k + c * n) + byte);
        UNROLL for (int i = 0; i < m; i++) {
            vf a = load_f(x + i * ldx + c);
            IN_REGISTER(a);
            UNROLL for (int j = 0; j < n; j++) acc[i][j] = fma_v(a, b[j], acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < n; j++) {
        float y = sum_lanes(acc[i][j]);
        if (bias) y += bias[j];
        if (mode == ADD) y += out[i * ldo + j];
        out[i * ldo + j] = y;
    }
}

#define DOT_ROWS(M, N)                                                                                        \
    static void dot_rows_##M(const float *x, long ldx, const store_t *w, long k, long n, float *out, long ldo, \
                             const float *bias, int mode) {                                                   \
        long j = 0;                                                                                           \
        for (; j + N <= n; j += N)                                                                            \
            dot_tile(M, N, x, ldx, w + j * k, k, out + j, ldo, bias ? bias + j : 0, mode);                    \
        for (; j < n; j++) dot_tile(M, 1, x, ldx, w + j * k, k, out + j, ldo, bias ? bias + j : 0, mode);     \
    }
DOT_ROWS(1, 8)
DOT_ROWS(2, 4)
DOT_ROWS(3, 4)
DOT_ROWS(4, TILE_N)
#if TILE_M == 6
DOT_ROWS(5, 4)
DOT_ROWS(6, 4)
#endif

void mp_linear(const float *x, long ldx, const store_t *w, const float *bias, long m, long k, long n, float *out,
               long ldo, int mode) {
    long step = WEIGHT_BLOCK_BYTES / (k * (long)sizeof(store_t)) / 12 * 12;
    if (step < 12) step = 12;
    for (long j = 0; j < n; j += step) {
        long cols = n - j < step ? n - j : step;
        const store_t *wj = w + j * k;
        const float *bj = bias ? bias + j : 0;
        for (long i = 0; i < m;) {
            const float *xi = x + i * ldx;
            float *o = out + i * ldo + j;
            long left = m - i;
            /* 5 = 3 + 2 and the like would be as good: the bits of a row do not depend on the split */
            switch (left < TILE_M ? left : TILE_M) {
            case 1: dot_rows_1(xi, ldx, wj, k, cols, o, ldo, bj, mode); i += 1; break;
            case 2: dot_rows_2(xi, ldx, wj, k, cols, o, ldo, bj, mode); i += 2; break;
            case 3: dot_rows_3(xi, ldx, wj, k, cols, o, ldo, bj, mode); i += 3; break;
            case 4: dot_rows_4(xi, ldx, wj, k, cols, o, ldo, bj, mode); i += 4; break;
#if TILE_M == 6
            case 5: dot_rows_5(xi, ldx, wj, k, cols, o, ldo, bj, mode); i += 5; break;
            default: dot_rows_6(xi, ldx, wj, k, cols, o, ldo, bj, mode); i += 6; break;
#endif
            }
        }
    }
}

/* Rows sorted by expert, loads[e] of them for expert e, each by its expert's weight w[e][n][k]. */
void mp_linear_experts(const float *x, const store_t *w, const int64_t *loads, long experts, long k, long n, float *out) {
    for (long e = 0; e < experts; e++, w += n * k) {
        mp_linear(x, k, w, 0, loads[e], k, n, out, n, SET);
        x += loads[e] * k;
        out += loads[e] * n;
    }
}

#ifndef MP_FP32
/* ---- the same with E2M1 weights, widened in registers ---------------------------------------------------- */

#define GROUP 32 /* columns that share a scale */
#define GROUP_VECTORS (GROUP / LANES)

/* Sixteen bytes of codes -> 32 weights. The table of a scale holds the low bytes of the 16 scaled values as bf16, then
   the high ones. Byte 8u + 2d + p has columns 16u + 8p + d (low nibble) and 16u + 8p + d + 4. */
INLINE void load_fp4(const uint8_t *codes, const uint8_t *table, vf *w) {
#ifdef __AVX2__
    __m256i pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes));
    pairs = _mm256_srlv_epi32(pairs, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    pairs = _mm256_and_si256(pairs, _mm256_set1_epi8(15));
    __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table + 1));
    low = _mm256_shuffle_epi8(low, pairs);
    high = _mm256_shuffle_epi8(high, pairs);
    __m256i ends = _mm256_set1_epi32((int)0xffff0000), eights[4];
    UNROLL for (int u = 0; u < 2; u++) {
        __m256i halves = u ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
        eights[2 * u] = _mm256_slli_epi32(halves, 16);
        eights[2 * u + 1] = _mm256_and_si256(halves, ends);
    }
#if LANES == 16
    UNROLL for (int u = 0; u < 2; u++)
        w[u] = (vf)_mm512_inserti64x4(_mm512_castsi256_si512(eights[2 * u]), eights[2 * u + 1], 1);
#else
    UNROLL for (int u = 0; u < 4; u++) w[u] = (vf)eights[u];
#endif
#else
    for (int c = 0; c < GROUP; c++) {
        int code = codes[c / 16 * 8 + c % 4 * 2 + c / 8 % 2] >> c / 4 % 2 * 4 & 15;
        uint32_t u = (uint32_t)table[code] << 16 | (uint32_t)table[16 + code] << 24;
        memcpy((char *)w + 4 * c, &u, 4);
    }
#endif
}

typedef struct {
    const uint8_t *codes;        /* [n][k / 2] */
    const uint8_t *exponents;    /* [n][k / 32] */
    const uint8_t (*tables)[32]; /* [exponent] */
} Fp4;

INLINE void dot_tile_fp4(const int m, const int n, const float *x, const Fp4 *w, long row, long k, float *out, long ldo) {
    const uint8_t *codes = w->codes + row * (k / 2), *exponents = w->exponents + row * (k / GROUP);
    vf acc[MAX_TILE_M][MAX_TILE_N];
    UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < n; j++) acc[i][j] = (vf){0};
    for (long g = 0; g < k / GROUP; g++) {
        UNROLL for (int j = 0; j < n; j++) {
            vf b[GROUP_VECTORS];
            load_fp4(codes + j * (k / 2) + g * (GROUP / 2), w->tables[exponents[j * (k / GROUP) + g]], b);
            UNROLL for (int v = 0; v < GROUP_VECTORS; v++) UNROLL for (int i = 0; i < m; i++)
                acc[i][j] = fma_v(load_f(x + i * k + g * GROUP + v * LANES), b[v], acc[i][j]);
        }
    }
    UNROLL for (int i = 0; i < m; i++) UNROLL for (int j = 0; j < n; j++) out[i * ldo + j] = sum_lanes(acc[i][j]);
}

#define DOT_ROWS_FP4(M, N)                                                                                        \
    static void dot_rows_fp4_##M(const float *x, const Fp4 *w, long row, long end, long k, float *out, long ldo) { \
        for (; row + N <= end; row += N) dot_tile_fp4(M, N, x, w, row, k, out + row, ldo);                        \
        for (; row < end; row++) dot_tile_fp4(M, 1, x, w, row, k, out + row, ldo);                                \
    }
DOT_ROWS_FP4(1, 8)
DOT_ROWS_FP4(2, 4)
DOT_ROWS_FP4(3, 3)
DOT_ROWS_FP4(4, 2)

/* Rows [m][k] by a weight [n][k]. */
static void linear_fp4(const float *x, const Fp4 *w, long m, long k, long n, float *out) {
    long step = 2 * WEIGHT_BLOCK_BYTES / k;
    for (long row = 0; row < n; row += step) {
        long end = n - row < step ? n : row + step;
        long i = 0;
        for (; i + 4 <= m; i += 4) dot_rows_fp4_4(x + i * k, w, row, end, k, out + i * n, n);
        switch (m - i) {
        case 1: dot_rows_fp4_1(x + i * k, w, row, end, k, out + i * n, n); break;
        case 2: dot_rows_fp4_2(x + i * k, w, row, end, k, out + i * n, n); break;
        case 3: dot_rows_fp4_3(x + i * k, w, row, end, k, out + i * n, n); break;
        default: break;
        }
    }
}

/* Like mp_linear_experts, bit for bit, with weights kept as FP4: codes [e][n][k / 2] in the order of load_fp4,
   exponents [e][n][k / 32]. */
void mp_linear_experts_fp4(const float *x, const uint8_t *codes, const uint8_t *exponents, const uint8_t (*tables)[32],
                           const int64_t *loads, long experts, long k, long n, float *out) {
    for (long e = 0; e < experts; e++) {
        Fp4 w = {codes + e * n * (k / 2), exponents + e * n * (k / GROUP), tables};
        linear_fp4(x, &w, loads[e], k, n, out);
        x += loads[e] * k;
        out += loads[e] * n;
    }
}
#endif

/* ---- row-wise ops -------------------------------------------------------------------------------------- */

void mp_rms_norm(const float *x, const float *weight, float eps, long m, long k, float *out) {
    for (long i = 0; i < m; i++, x += k, out += k) {
        vf s = {0};
        for (long c = 0; c < k; c += LANES) s += load_f(x + c) * load_f(x + c);
        vf r = splat(1.0f / sqrtf(sum_lanes(s) / (float)k + eps));
        for (long c = 0; c < k; c += LANES) store_f(out + c, load_f(x + c) * r * load_f(weight + c));
    }
}

void mp_silu_mul(const float *gate_up, long m, long k, float *out) {
    for (long i = 0; i < m; i++, gate_up += 2 * k, out += k)
        for (long c = 0; c < k; c += LANES) {
            vf g = load_f(gate_up + c);
            store_f(out + c, g / (1.0f + exp_v(-g)) * load_f(gate_up + k + c));
        }
}

/* ---- paged KV ------------------------------------------------------------------------------------------ */

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim, table_stride;
    char *kv;              /* block memory */
    int64_t row_bytes;
    const float *cos, *sin; /* [position][head_dim / 2] */
} Kv;

typedef struct {
    int64_t num_rows;
    const int32_t *position; /* [row] */
    const int32_t *sequence; /* [row] index of its block table; rows of a sequence are adjacent and ascending */
    const int32_t *tables;   /* [sequence][table_stride] row 0 of each block, counted in rows of all memory */
} Rows;

INLINE store_t *row_of(const Kv *kv, const Rows *rows, long r, long block, long layer) {
    long first = rows->tables[(long)rows->sequence[r] * kv->table_stride + block];
    return (store_t *)(kv->kv + (first + layer) * kv->row_bytes);
}

INLINE void rotate(float *head, const float *cos, const float *sin, long half) {
    for (long d = 0; d < half; d++) {
        float a = head[d], b = head[d + half];
        head[d] = a * cos[d] - b * sin[d];
        head[d + half] = b * cos[d] + a * sin[d];
    }
}

/* Rotate queries and keys in place; write keys and values of rows [begin, end). qkv starts at row `begin`. */
void mp_rope_store(const Kv *kv, const Rows *rows, long layer, long begin, long end, float *qkv) {
    long hd = kv->head_dim, half = hd / 2, nq = kv->num_heads, nkv = kv->num_kv_heads;
    for (long r = begin; r < end; r++, qkv += (nq + 2 * nkv) * hd) {
        long p = rows->position[r], at = p % BLOCK;
        for (long h = 0; h < nq + nkv; h++) rotate(qkv + h * hd, kv->cos + p * half, kv->sin + p * half, half);
        store_t *keys = row_of(kv, rows, r, p / BLOCK, layer), *values = keys + nkv * hd * BLOCK;
        const float *k = qkv + nq * hd, *v = k + nkv * hd;
        for (long i = 0; i < nkv * hd; i++) keys[i * BLOCK + at] = narrow(k[i]);
        for (long h = 0; h < nkv; h++)
            for (long d = 0; d < hd; d++) values[(h * BLOCK + at) * hd + d] = narrow(v[h * hd + d]);
    }
}

/* out[i][c] = sum over k of a[i][k] b[k][c] for m rows and two vectors of columns. Meanwhile fetches as many bytes
   from `ahead` as it reads from b. */
INLINE void outer_tile(const int m, const float *a, long lda, const store_t *b, long ldb, long k, float *out,
                       long ldo, const store_t *ahead) {
    vf acc[MAX_TILE_M][2];
    UNROLL for (int i = 0; i < m; i++) acc[i][0] = acc[i][1] = (vf){0};
    for (long c = 0; c < k; c++, b += ldb) {
        vf b0 = load_w(b), b1 = load_w(b + LANES);
        __builtin_prefetch(ahead + c * 2 * LANES);
        UNROLL for (int i = 0; i < m; i++) {
            vf s = splat(a[i * lda + c]);
            acc[i][0] = fma_v(s, b0, acc[i][0]);
            acc[i][1] = fma_v(s, b1, acc[i][1]);
        }
    }
    UNROLL for (int i = 0; i < m; i++) {
        store_f(out + i * ldo, acc[i][0]);
        store_f(out + i * ldo + LANES, acc[i][1]);
    }
}

static void outer(const float *a, long lda, const store_t *b, long ldb, long m, long k, long n, float *out,
                  long ldo, const store_t *ahead) {
    for (long i = 0; i < m;) {
        const float *ai = a + i * lda;
        float *o = out + i * ldo;
        long rows = m - i < 6 ? m - i : 6;
        for (long c = 0; c < n; c += 2 * LANES) switch (rows) {
            case 1: outer_tile(1, ai, lda, b + c, ldb, k, o + c, ldo, ahead + c * k); break;
            case 2: outer_tile(2, ai, lda, b + c, ldb, k, o + c, ldo, ahead + c * k); break;
            case 3: outer_tile(3, ai, lda, b + c, ldb, k, o + c, ldo, ahead + c * k); break;
            case 4: outer_tile(4, ai, lda, b + c, ldb, k, o + c, ldo, ahead + c * k); break;
            case 5: outer_tile(5, ai, lda, b + c, ldb, k, o + c, ldo, ahead + c * k); break;
            default: outer_tile(6, ai, lda, b + c, ldb, k, o + c, ldo, ahead + c * k);
            }
        i += rows;
    }
}

/* Scores of one query row over one block -> weights; returns the factor for what was summed before. */
INLINE float soften(float *s, long num_valid, long num_cols, float *max, float *sum) {
    for (long c = num_valid; c < num_cols; c++) s[c] = -INFINITY;
    vf top = load_f(s);
    for (long c = LANES; c < num_cols; c += LANES) {
        vf x = load_f(s + c);
        top = choose(x > top, x, top);
    }
    float m = max_lanes(top);
    m = m > *max ? m : *max;
    vf total = {0};
    for (long c = 0; c < num_cols; c += LANES) {
        vf x = load_f(s + c), e = exp_v(x - m);
        e = choose(x == -INFINITY, (vf){0}, e);
        store_f(s + c, e);
        total += e;
    }
    float keep = *max == -INFINITY ? 0.0f : exp_v(splat(*max - m))[0];
    *max = m;
    *sum = *sum * keep + sum_lanes(total);
    return keep;
}

/* Causal attention of `count` adjacent rows of one sequence, from row `r`, one KV head. */
static void attend(const Kv *kv, const Rows *rows, long layer, long r, long count, long head, const float *qkv,
                   float *out, float *work) {
    float *q = work, *o = q + MAX_TILE_ROWS * MAX_HEAD_DIM, *part = o + MAX_TILE_ROWS * MAX_HEAD_DIM;
    float *s = part + MAX_TILE_ROWS * MAX_HEAD_DIM;
    float max[MAX_TILE_ROWS], sum[MAX_TILE_ROWS];
    long hd = kv->head_dim, nkv = kv->num_kv_heads, group = kv->num_heads / nkv, m = count * group;
    long stride = (kv->num_heads + 2 * nkv) * hd, first = rows->position[r], last = first + count - 1;
    float scale = 1.0f / sqrtf((float)hd);
    for (long i = 0; i < m; i++) {
        const float *from = qkv + i / group * stride + (head * group + i % group) * hd;
        for (long d = 0; d < hd; d++) q[i * hd + d] = from[d] * scale;
        max[i] = -INFINITY;
        sum[i] = 0;
    }
    memset(o, 0, (size_t)(m * hd) * sizeof(float));
    for (long block = 0; block <= last / BLOCK; block++) {
        const store_t *keys = row_of(kv, rows, r, block, layer) + head * hd * BLOCK;
        const store_t *values = keys + nkv * hd * BLOCK;
        long used = last + 1 - block * BLOCK;
        used = used < BLOCK ? used : BLOCK;
        long cols = (used + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        outer(q, hd, keys, BLOCK, m, hd, cols, s, BLOCK, values);
        float keep[MAX_TILE_ROWS];
        for (long i = 0; i < m; i++) {
            long valid = first + i / group + 1 - block * BLOCK;
            if (valid > 0)
                keep[i] = soften(s + i * BLOCK, valid < used ? valid : used, cols, &max[i], &sum[i]);
            else { /* this block begins after the row's own token */
                keep[i] = 1.0f;
                memset(s + i * BLOCK, 0, (size_t)cols * sizeof(float));
            }
        }
        const store_t *next = block < last / BLOCK ? row_of(kv, rows, r, block + 1, layer) + head * hd * BLOCK
                              : head + 1 < nkv     ? row_of(kv, rows, r, 0, layer) + (head + 1) * hd * BLOCK
                                                   : values;
        outer(s, BLOCK, values, hd, m, used, hd, part, hd, next);
        for (long i = 0; i < m; i++)
            for (long d = 0; d < hd; d += LANES) {
                float *oi = o + i * hd + d;
                store_f(oi, load_f(oi) * keep[i] + load_f(part + i * hd + d));
            }
    }
    for (long i = 0; i < m; i++) {
        float *to = out + i / group * kv->num_heads * hd + (head * group + i % group) * hd;
        for (long d = 0; d < hd; d++) to[d] = o[i * hd + d] / sum[i];
    }
}

/* Attention of rows [begin, end) over their sequences' KV, own token included. qkv and out start at `begin`. */
void mp_attention(const Kv *kv, const Rows *rows, long layer, long begin, long end, const float *qkv, float *out,
                  float *work) {
    long stride = (kv->num_heads + 2 * kv->num_kv_heads) * kv->head_dim, width = kv->num_heads * kv->head_dim;
    for (long r = begin; r < end;) {
        long count = 1;
        while (count < ATT_TOKENS && r + count < end && rows->sequence[r + count] == rows->sequence[r]) count++;
        for (long head = 0; head < kv->num_kv_heads; head++)
            attend(kv, rows, layer, r, count, head, qkv + (r - begin) * stride, out + (r - begin) * width,
                   work);
        r += count;
    }
}

/* ---- whole layers -------------------------------------------------------------------------------------- */

typedef struct {
    const float *attention_norm, *mlp_norm;
    const store_t *qkv, *output, *gate_up, *down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
} Layer;

typedef struct {
    int64_t hidden, intermediate;
    float eps;
} Shape;

/* Scratch floats needed by mp_layers; its first part is what mp_attention needs alone. */
long mp_scratch(const Shape *shape, const Kv *kv) {
    long width = (kv->num_heads + 2 * kv->num_kv_heads) * kv->head_dim;
    return ATT_SCRATCH + PANEL * (shape->hidden + width + kv->num_heads * kv->head_dim + 3 * shape->intermediate);
}

/* Run layers [begin, end) over hidden states x [num_rows][hidden], in place. */
void mp_layers(const Shape *shape, const Kv *kv, const Rows *rows, const Layer *layers, long begin, long end, float *x,
               float *scratch) {
    long hidden = shape->hidden, inter = shape->intermediate, width = kv->num_heads * kv->head_dim;
    long qkv_width = width + 2 * kv->num_kv_heads * kv->head_dim;
    float *work = scratch, *normed = scratch + ATT_SCRATCH, *qkv = normed + PANEL * hidden, *mixed = qkv + PANEL * qkv_width;
    float *gate_up = mixed + PANEL * width, *active = gate_up + 2 * PANEL * inter;
    for (long l = begin; l < end; l++) {
        const Layer *w = layers + l;
        for (long r = 0; r < rows->num_rows; r += PANEL) {
            long m = rows->num_rows - r < PANEL ? rows->num_rows - r : PANEL;
            float *xr = x + r * hidden;
            mp_rms_norm(xr, w->attention_norm, shape->eps, m, hidden, normed);
            mp_linear(normed, hidden, w->qkv, w->qkv_bias, m, hidden, qkv_width, qkv, qkv_width, SET);
            mp_rope_store(kv, rows, l, r, r + m, qkv);
            mp_attention(kv, rows, l, r, r + m, qkv, mixed, work);
            mp_linear(mixed, width, w->output, w->output_bias, m, width, hidden, xr, hidden, ADD);
            mp_rms_norm(xr, w->mlp_norm, shape->eps, m, hidden, normed);
            mp_linear(normed, hidden, w->gate_up, w->gate_up_bias, m, hidden, 2 * inter, gate_up, 2 * inter, SET);
            mp_silu_mul(gate_up, m, inter, active);
            mp_linear(active, inter, w->down, w->down_bias, m, inter, hidden, xr, hidden, ADD);
        }
    }
}
