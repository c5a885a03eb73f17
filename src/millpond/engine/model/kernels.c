/* Row-wise operations of V4.1 for one CPU thread: native twins of the torch code in this folder.
 *
 * Streams are bf16 (uint16_t here), sums are fp32. Every result depends on its own row's numbers only, and adds
 * them in one fixed order, so these kernels serve both numeric modes. Dense products are not here: they are those of
 * ../kernels.c. Compiled at first use for the CPU at hand (native.py).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 8
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))
#define PANEL 64     /* rows that pass through fused operations together: scratch stays in the second cache */
#define KEY_BLOCK 32 /* keys whose values stay in the first cache while all heads use them */

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(32)));
typedef float vf_u __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint16_t vh_u __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint16_t vh __attribute__((vector_size(16)));
typedef uint8_t vb_u __attribute__((vector_size(8), aligned(1), may_alias));
typedef uint8_t vb __attribute__((vector_size(8)));

INLINE vf load(const float *p) { return *(const vf_u *)p; }
INLINE void store(float *p, vf x) { *(vf_u *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

/* gcc 12 takes several instructions for each of these where one does */
#ifdef __AVX2__
INLINE vu widen_halves(const uint16_t *p) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vu widen_bytes(const uint8_t *p) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE void narrow_halves(uint16_t *p, vu x) { /* numbers below 2^16 */
    __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(pairs));
}
#else
INLINE vu widen_halves(const uint16_t *p) { return __builtin_convertvector(*(const vh_u *)p, vu); }
INLINE vu widen_bytes(const uint8_t *p) { return __builtin_convertvector(*(const vb_u *)p, vu); }
INLINE void narrow_halves(uint16_t *p, vu x) { *(vh_u *)p = __builtin_convertvector(x, vh); }
#endif

INLINE vf widen(const bf16 *p) { return (vf)(widen_halves(p) << 16); }
INLINE vf round_bf16(vf x) { /* to nearest, ties to even */
    vu u = (vu)x;
    return (vf)((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}
INLINE void narrow(bf16 *p, vf x) { narrow_halves(p, (vu)round_bf16(x) >> 16); }

INLINE float widen_one(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
INLINE bf16 narrow_one(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE float sum_lanes(vf x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
INLINE float max_lanes(vf x) {
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* e^x with x limited to [-87, 88], relative error below 2e-7; exactly 1 at 0. Cephes' reduction and polynomial. */
INLINE vf exp_v(vf x) {
    x = smaller(larger(x, splat(-87.0f)), splat(88.0f));
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

/* The dense product of ../kernels.c for the dtype of its weight. */
typedef void (*Linear)(const float *x, long ldx, const void *w, const float *bias, long m, long k, long n, float *out,
                       long ldo, int mode);

/* ---- number formats ------------------------------------------------------------------------------------ */

enum { FP8 = 0, FP4_MAIN = 1, FP4_INDEX = 2 };

/* Exponent byte of the smallest power of two >= amax / limit, the quotient taken as a product. */
INLINE uint32_t exponent_of(float amax, float inverse_limit) {
    float quotient = amax * inverse_limit;
    uint32_t u;
    memcpy(&u, &quotient, 4);
    return (u >> 23) + ((u & 0x7fffff) != 0);
}
INLINE float power_of(uint32_t exponent) {
    uint32_t u = exponent ? exponent << 23 : 1u << 22; /* exponent 0 is the subnormal 2^-127 */
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Nearest E4M3 number, ties to even, of numbers up to 448. */
INLINE vf nearest_e4m3(vf x) {
    vf a = magnitude(x);
    a = smaller(a, splat(448.0f));
    vu u = (vu)a;
    vf normal = (vf)((u + 0x7ffffu + ((u >> 20) & 1u)) & 0xfff00000u);
    vf small = (a + 24576.0f) - 24576.0f; /* 1.5 x 2^14: rounds to multiples of 2^-9 */
    vf r = choose(a < 0.015625f, small, normal);
    return (vf)((vu)r | ((vu)x & 0x80000000u));
}
/* Its byte. */
INLINE vu bytes_e4m3(vf x) {
    vf a = magnitude(x);
    vu normal = ((vu)a >> 20) - 960u; /* bias 7 instead of 127 */
    vu small = (vu)__builtin_convertvector(a * 512.0f, vi);
    vi is_small = a < 0.015625f;
    return (normal & ~(vu)is_small) | (small & (vu)is_small) | (((vu)x >> 24) & 0x80u);
}
INLINE vf values_e4m3(const uint8_t *p) {
    vu b = widen_bytes(p), m = b & 0x7fu;
    vf normal = (vf)((m + 960u) << 20);
    vf small = __builtin_convertvector((vi)m, vf) * 0.001953125f;
    vf v = choose((vi)m < 8, small, normal);
    v = choose(m == 0x7fu, splat(NAN), v);
    return (vf)((vu)v | ((b & 0x80u) << 24));
}

/* Values of the eight E2M1 codes in four bytes. */
INLINE vf values_e2m1(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    vu code = ((vu){0} + word) >> (vu){0, 4, 8, 12, 16, 20, 24, 28};
    vf size = __builtin_shuffle((vf){0, .5f, 1, 1.5f, 2, 3, 4, 6}, (vi)code & 7);
    return (vf)((vu)size | ((code & 8u) << 28));
}

/* Nearest E2M1 codes, ties to even. */
INLINE vu codes_e2m1(vf x) {
    vf a = magnitude(x);
    vi n = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (vu)-n | (((vu)x >> 28) & 8u);
}

INLINE float largest(const bf16 *x, long n) {
    vf m = {0};
    for (long c = 0; c < n; c += LANES) m = larger(magnitude(widen(x + c)), m);
    return max_lanes(m);
}

/* Round rows to E4M3 per 32 channels, to fp32. */
void mp_round_fp8(const bf16 *x, long rows, long width, float *out) {
    for (long at = 0; at < rows * width; at += 32) {
        float amax = largest(x + at, 32);
        uint32_t e = exponent_of(amax > 1e-4f ? amax : 1e-4f, 1.0f / 448);
        vf scale = splat(power_of(e)), inverse = splat(power_of(254 - e));
        UNROLL for (int c = 0; c < 32; c += LANES)
            store(out + at + c, nearest_e4m3(widen(x + at + c) * inverse) * scale);
    }
}

/* Rows [rows][k] rounded to FP8, times a weight [n][k], rounded to bf16; -1 without memory. */
int mp_quantised_linear(Linear linear, const bf16 *x, const void *w, long rows, long k, long n, bf16 *out) {
    long panel = rows < PANEL ? rows : PANEL;
    float *in = malloc((size_t)(panel * (k + n) + LANES) * sizeof(float)), *sums = in + panel * k;
    if (!in) return -1;
    for (long i = 0; i < rows; i += panel) {
        long count = rows - i < panel ? rows - i : panel;
        mp_round_fp8(x + i * k, count, k, in);
        linear(in, k, w, 0, count, k, n, sums, n, 0);
        for (long c = 0; c < count * n; c++) out[i * n + c] = narrow_one(sums[c]);
    }
    free(in);
    return 0;
}

static void encode_fp8(const bf16 *x, long width, uint8_t *out) {
    for (long g = 0; g < width / 32; g++, x += 32) {
        float amax = largest(x, 32);
        uint32_t e = exponent_of(amax > 1e-4f ? amax : 1e-4f, 1.0f / 448);
        vf inverse = splat(power_of(254 - e));
        for (int c = 0; c < 32; c += LANES)
            *(vb_u *)(out + g * 32 + c) = __builtin_convertvector(bytes_e4m3(nearest_e4m3(widen(x + c) * inverse)), vb);
        out[width + g] = (uint8_t)e;
    }
}

static void encode_fp4(int format, const bf16 *x, long width, uint8_t *out) {
    long group = format == FP4_MAIN ? 16 : 32;
    float least = format == FP4_MAIN ? 6.0f / 512 : 6 * 0x1p-126f;
    for (long g = 0; g < width / group; g++, x += group) {
        float amax = largest(x, group);
        amax = amax > least ? amax : least;
        vf scale;
        if (format == FP4_MAIN) {
            scale = nearest_e4m3(splat(amax / 6.0f));
            out[width / 2 + g] = (uint8_t)bytes_e4m3(scale)[0];
        } else {
            uint32_t e = exponent_of(amax, 1.0f / 6);
            scale = splat(power_of(e));
            out[width / 2 + g] = (uint8_t)e;
        }
        for (long c = 0; c < group; c += LANES) {
            vu code = codes_e2m1(widen(x + c) / scale);
            uint8_t *to = out + (g * group + c) / 2;
            UNROLL for (int i = 0; i < LANES / 2; i++) to[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
        }
    }
}

/* Pack rows [rows][width]; out [rows][row_bytes]: data, then scales. */
void mp_encode_rows(int format, const bf16 *x, long rows, long width, long row_bytes, uint8_t *out) {
    for (long i = 0; i < rows; i++, x += width, out += row_bytes) {
        if (format == FP8)
            encode_fp8(x, width, out);
        else
            encode_fp4(format, x, width, out);
    }
}

static void decode_row(int format, const uint8_t *data, long width, float *out) {
    if (format == FP8) {
        for (long c = 0; c < width; c += LANES) {
            vf v = values_e4m3(data + c) * power_of(data[width + c / 32]);
            store(out + c, v);
        }
        return;
    }
    long group = format == FP4_MAIN ? 16 : 32, groups = width / group;
    const uint8_t *scales = data + width / 2;
    for (long g = 0; g < groups; g += LANES) {
        long count = groups - g < LANES ? groups - g : LANES;
        float scale[LANES] = {0};
        if (format == FP4_MAIN) { /* eight scales cost as much as one */
            uint8_t bytes[LANES] = {0};
            for (long i = 0; i < count; i++) bytes[i] = scales[g + i];
            store(scale, values_e4m3(bytes));
        } else
            for (long i = 0; i < count; i++) scale[i] = power_of(scales[g + i]);
        for (long i = 0; i < count; i++, out += group, data += group / 2)
            for (long c = 0; c < group; c += LANES) store(out + c, values_e2m1(data + c / 2) * scale[i]);
    }
}

/* Unpack rows at base + first[i / per] * first_bytes + second * second_bytes, where second is that of row i, or
   i % per without a list. */
void mp_decode_rows(int format, const uint8_t *base, long first_bytes, long second_bytes, const int64_t *first,
                    const int64_t *second, long per, long rows, long width, float *out) {
    for (long i = 0; i < rows; i++, out += width) {
        const uint8_t *row = base + first[i / per] * first_bytes + (second ? second[i] : i % per) * second_bytes;
        decode_row(format, row, width, out);
    }
}

/* ---- norms and rotations -------------------------------------------------------------------------------- */

void mp_rms_norm(const bf16 *x, long stride, const float *weight, float eps, long rows, long width, bf16 *out) {
    for (long i = 0; i < rows; i++, x += stride, out += width) {
        vf s = {0};
        for (long c = 0; c < width; c += LANES) s += widen(x + c) * widen(x + c);
        float r = 1.0f / sqrtf(sum_lanes(s) / (float)width + eps);
        for (long c = 0; c < width; c += LANES) narrow(out + c, widen(x + c) * r * load(weight + c));
    }
}

/* Rotate the last 2 * pairs channels of x [rows][heads][width] by the row's angles; sign -1 rotates back. */
void mp_rotate(const bf16 *x, const float *cos, const float *sin, float sign, long rows, long heads, long width,
               long pairs, bf16 *out) {
    for (long i = 0; i < rows; i++, cos += pairs, sin += pairs)
        for (long h = 0; h < heads; h++, x += width, out += width) {
            long plain = width - 2 * pairs;
            memcpy(out, x, (size_t)plain * sizeof(bf16));
            for (long k = 0; k < pairs; k++) {
                float a = widen_one(x[plain + 2 * k]), b = widen_one(x[plain + 2 * k + 1]), s = sign * sin[k];
                out[plain + 2 * k] = narrow_one(a * cos[k] - b * s);
                out[plain + 2 * k + 1] = narrow_one(a * s + b * cos[k]);
            }
        }
}

/* ---- hyper-connections ----------------------------------------------------------------------------------- */

#define MAX_COPIES 8

/* Widen stream rows [rows][width] and take 1 / rms of each. */
void mp_widen_rms(const bf16 *x, float eps, long rows, long width, float *out, float *scale) {
    for (long i = 0; i < rows; i++, x += width, out += width) {
        vf s = {0};
        for (long c = 0; c < width; c += LANES) {
            vf v = widen(x + c);
            s += v * v;
            store(out + c, v);
        }
        scale[i] = 1.0f / sqrtf(sum_lanes(s) / (float)width + eps);
    }
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_v(splat(-x))[0]); }

/* Raw numbers [rows][n * (n + 2)], each row times its scale -> pre, post [rows][n], comb [rows][n][n]. Eight rows go
   side by side; each keeps to its lane. */
void mp_split_mix(const float *raw, const float *scale, const float *base, const float *factor, long rows, long n,
                  long iters, float eps, float *pre, float *post, float *comb) {
    long m = n * (n + 2);
    for (long i = 0; i < rows; i += LANES) {
        long lanes = rows - i < LANES ? rows - i : LANES;
        vf v[MAX_COPIES * (MAX_COPIES + 2)], c[MAX_COPIES][MAX_COPIES];
        for (long k = 0; k < m; k++) {
            float f = factor[k < n ? 0 : k < 2 * n ? 1 : 2];
            v[k] = (vf){0};
            for (long l = 0; l < lanes; l++) v[k][l] = raw[(i + l) * m + k] * scale[i + l];
            v[k] = v[k] * f + base[k];
        }
        for (long k = 0; k < 2 * n; k++) v[k] = 1.0f / (1.0f + exp_v(-v[k]));
        for (long a = 0; a < n; a++) {
            vf top = v[2 * n + a * n], sum = {0};
            for (long b = 1; b < n; b++) top = larger(v[2 * n + a * n + b], top);
            for (long b = 0; b < n; b++) sum += c[a][b] = exp_v(v[2 * n + a * n + b] - top);
            for (long b = 0; b < n; b++) c[a][b] = c[a][b] / sum + eps;
        }
        for (long t = 0; t < iters; t++) {
            for (long a = 0; a < n && t; a++) {
                vf sum = {0};
                for (long b = 0; b < n; b++) sum += c[a][b];
                sum += eps;
                for (long b = 0; b < n; b++) c[a][b] /= sum;
            }
            for (long b = 0; b < n; b++) {
                vf sum = {0};
                for (long a = 0; a < n; a++) sum += c[a][b];
                sum += eps;
                for (long a = 0; a < n; a++) c[a][b] /= sum;
            }
        }
        for (long l = 0; l < lanes; l++)
            for (long a = 0; a < n; a++) {
                pre[(i + l) * n + a] = v[a][l] + eps;
                post[(i + l) * n + a] = 2 * v[n + a][l];
                for (long b = 0; b < n; b++) comb[((i + l) * n + a) * n + b] = c[a][b][l];
            }
    }
}

/* mp_widen_rms, the product with fn [n * (n + 2)][n * width] and mp_split_mix in one; -1 without memory. */
int mp_compute_mix(Linear linear, const bf16 *stream, const void *fn, const float *base, const float *factor, long rows,
                   long n, long width, long iters, float norm_eps, float eps, float *pre, float *post, float *comb) {
    long panel = rows < PANEL / 4 ? rows : PANEL / 4, k = n * width, m = n * (n + 2);
    float *flat = malloc((size_t)(panel * (k + m + 1)) * sizeof(float)), *raw = flat + panel * k, *scale = raw + panel * m;
    if (!flat) return -1;
    for (long i = 0; i < rows; i += panel) {
        long count = rows - i < panel ? rows - i : panel;
        mp_widen_rms(stream + i * k, norm_eps, count, k, flat, scale);
        linear(flat, k, fn, 0, count, k, m, raw, m, 0);
        mp_split_mix(raw, scale, base, factor, count, n, iters, eps, pre + i * n, post + i * n, comb + i * n * n);
    }
    free(flat);
    return 0;
}

/* Weighted sum of the n copies of each row. */
void mp_collapse(const bf16 *stream, const float *pre, long rows, long n, long width, bf16 *out) {
    for (long i = 0; i < rows; i++, stream += n * width, pre += n, out += width)
        for (long c = 0; c < width; c += LANES) {
            vf s = {0};
            for (long a = 0; a < n; a++) s += widen(stream + a * width + c) * pre[a];
            narrow(out + c, s);
        }
}

/* New copy b = post[b] * x + sum over a of comb[a][b] * old copy a. */
void mp_expand(const bf16 *stream, const bf16 *x, const float *post, const float *comb, long rows, long n,
               long width, bf16 *out) {
    for (long i = 0; i < rows; i++, stream += n * width, x += width, post += n, comb += n * n, out += n * width)
        for (long c = 0; c < width; c += LANES) {
            vf old[MAX_COPIES], own = widen(x + c);
            for (long a = 0; a < n; a++) old[a] = widen(stream + a * width + c);
            for (long b = 0; b < n; b++) {
                vf s = {0};
                for (long a = 0; a < n; a++) s += old[a] * comb[a * n + b];
                narrow(out + b * width + c, s + own * post[b]);
            }
        }
}

/* ---- experts and Engram ---------------------------------------------------------------------------------- */

#define MAX_EXPERTS 1024

/* The k experts with the largest score + bias of each row, best first, of equal ones the lower; their scores, which
   add up to `scale` if there are several. Rows marked in is_image, if given, have a bias of their own. */
void mp_choose_experts(const float *scores, const float *bias, const float *bias_image, const uint8_t *is_image,
                       long rows, long experts, long k, float scale, int64_t *chosen, float *weights) {
    for (long i = 0; i < rows; i++, scores += experts, chosen += k, weights += k) {
        const float *own = is_image && is_image[i] ? bias_image : bias;
        float left[MAX_EXPERTS], total = 0;
        for (long e = 0; e < experts; e++) left[e] = scores[e] + own[e];
        for (long j = 0; j < k; j++) {
            long best = 0;
            for (long e = 1; e < experts; e++) best = left[e] > left[best] ? e : best;
            left[best] = -INFINITY;
            chosen[j] = best;
            weights[j] = scores[best];
            total += scores[best];
        }
        for (long j = 0; j < k; j++) weights[j] = (k > 1 ? weights[j] / (total + 1e-20f) : weights[j]) * scale;
    }
}

/* Sort the choices [rows][k] by expert, rows ascending in each. loads [experts]: choices of each expert; sources and
   sorted [rows * k]: row and weight of each sorted choice; places [rows][k]: where a row's choices went, ascending. */
void mp_group_by_expert(const int64_t *chosen, const float *weights, long rows, long k, long experts, int64_t *loads,
                        int64_t *sources, float *sorted, int64_t *places) {
    int64_t next[MAX_EXPERTS], at = 0;
    memset(loads, 0, (size_t)experts * sizeof *loads);
    for (long c = 0; c < rows * k; c++) loads[chosen[c]]++;
    for (long e = 0; e < experts; at += loads[e++]) next[e] = at;
    for (long i = 0; i < rows; i++, places += k)
        for (long j = 0; j < k; j++) {
            int64_t to = next[chosen[i * k + j]]++;
            sources[to] = i;
            sorted[to] = weights[i * k + j];
            long before = j;
            for (; before > 0 && places[before - 1] > to; before--) places[before] = places[before - 1];
            places[before] = to;
        }
}

/* Clamped SwiGLU of gate_up [rows][2 * width], rounded to bf16 before and after, times the row's weight if there is
   one. */
void mp_activate(const float *gate_up, const float *weight, float limit, long rows, long width, bf16 *out) {
    for (long i = 0; i < rows; i++, gate_up += 2 * width, out += width)
        for (long c = 0; c < width; c += LANES) {
            vf g = smaller(round_bf16(load(gate_up + c)), splat(limit));
            vf u = larger(smaller(round_bf16(load(gate_up + width + c)), splat(limit)), splat(-limit));
            vf a = g / (1.0f + exp_v(-g)) * u;
            narrow(out + c, weight ? a * weight[i] : a);
        }
}

/* Sum the k shares of each row, in order, each rounded to bf16, then the shared expert's. */
void mp_sum_shares(const float *shares, const int64_t *places, const bf16 *shared, long rows, long k, long width,
                   bf16 *out) {
    for (long i = 0; i < rows; i++, places += k, shared += width, out += width)
        for (long c = 0; c < width; c += LANES) {
            vf s = {0};
            for (long e = 0; e < k; e++) s += round_bf16(load(shares + places[e] * width + c));
            narrow(out + c, s + widen(shared + c));
        }
}

/* Add the gated value to each of n copies. kv [rows][(n + 1) * width]: n keys, then the value. */
void mp_add_engram(const bf16 *stream, const bf16 *kv, const float *weight, const uint8_t *is_text, float eps,
                   long rows, long n, long width, bf16 *out, float *gates) {
    for (long i = 0; i < rows; i++, kv += (n + 1) * width)
        for (long a = 0; a < n; a++, stream += width, out += width) {
            const bf16 *key = kv + a * width, *value = kv + n * width;
            vf dot = {0}, xx = {0}, kk = {0};
            for (long c = 0; c < width; c += LANES) {
                vf x = widen(stream + c), k = widen(key + c);
                dot += x * load(weight + a * width + c) * k;
                xx += x * x;
                kk += k * k;
            }
            float d = sum_lanes(dot) / sqrtf(sum_lanes(xx) / (float)width + eps);
            d = d / sqrtf(sum_lanes(kk) / (float)width + eps) / sqrtf((float)width);
            float size = sqrtf(fabsf(d) > 1e-6f ? fabsf(d) : 1e-6f);
            float gate = is_text && !is_text[i] ? 0.0f : sigmoid(d > 0 ? size : d < 0 ? -size : 0.0f);
            gates[i * n + a] = gate;
            for (long c = 0; c < width; c += LANES) narrow(out + c, widen(stream + c) + widen(value + c) * gate);
        }
}

/* ---- attention over chosen rows -------------------------------------------------------------------------- */

/* Lane h of the result: the sum of the lanes of acc[h]. */
INLINE vf sums_of(const vf *acc) {
    vf t[LANES], u[LANES];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = __builtin_shuffle(acc[i], acc[i + 1], (vi){0, 8, 2, 10, 4, 12, 6, 14});
        t[i + 1] = __builtin_shuffle(acc[i], acc[i + 1], (vi){1, 9, 3, 11, 5, 13, 7, 15});
        t[i] += t[i + 1];
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        u[i] = __builtin_shuffle(t[i], t[i + 2], (vi){0, 1, 8, 9, 4, 5, 12, 13});
        u[i + 1] = __builtin_shuffle(t[i], t[i + 2], (vi){2, 3, 10, 11, 6, 7, 14, 15});
        u[i] += u[i + 1];
    }
    return __builtin_shuffle(u[0], u[4], (vi){0, 1, 2, 3, 8, 9, 10, 11}) +
           __builtin_shuffle(u[0], u[4], (vi){4, 5, 6, 7, 12, 13, 14, 15});
}

/* Products of eight queries [8][dim] with one key. */
INLINE vf dot_heads(const float *q, const float *key, long dim) {
    vf acc[LANES];
    UNROLL for (int h = 0; h < LANES; h++) acc[h] = (vf){0};
    for (long c = 0; c < dim; c += LANES) {
        vf k = load(key + c);
        UNROLL for (int h = 0; h < LANES; h++) acc[h] += load(q + h * dim + c) * k;
    }
    return sums_of(acc);
}

/* out[h][16 channels] += sum over keys of w[key][h] * value, for four heads. */
INLINE void mix_tile(const vf *w, long h, const float *const *values, long n, long c, float *out, long dim) {
    vf acc[4][2];
    UNROLL for (int i = 0; i < 4; i++) {
        acc[i][0] = load(out + (h + i) * dim + c);
        acc[i][1] = load(out + (h + i) * dim + c + LANES);
    }
    for (long k = 0; k < n; k++) {
        vf a = load(values[k] + c), b = load(values[k] + c + LANES);
        UNROLL for (int i = 0; i < 4; i++) {
            vf s = splat(((const float *)&w[k])[h + i]);
            acc[i][0] += s * a;
            acc[i][1] += s * b;
        }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        store(out + (h + i) * dim + c, acc[i][0]);
        store(out + (h + i) * dim + c + LANES, acc[i][1]);
    }
}

/* Up to eight heads of one query over n rows. */
static void attend_heads(const bf16 *query, const float *sink, long heads, const float *const *rows, long n, long dim,
                         float *q, float *out, vf *w, bf16 *to) {
    float scale = 1.0f / sqrtf((float)dim);
    vf logit = {0};
    memset(q, 0, (size_t)(LANES * dim) * sizeof(float));
    memset(out, 0, (size_t)(LANES * dim) * sizeof(float));
    for (long h = 0; h < heads; h++) {
        logit[h] = sink[h];
        for (long c = 0; c < dim; c += LANES) store(q + h * dim + c, widen(query + h * dim + c));
    }
    vf top = splat(-1e30f), total = {0};
    for (long k = 0; k < n; k++) {
        w[k] = dot_heads(q, rows[k], dim) * scale;
        top = larger(w[k], top);
    }
    for (long k = 0; k < n; k++) {
        w[k] = exp_v(w[k] - top);
        total += w[k];
    }
    total += exp_v(logit - top);
    for (long k = 0; k < n; k += KEY_BLOCK) {
        long count = n - k < KEY_BLOCK ? n - k : KEY_BLOCK;
        for (long c = 0; c < dim; c += 2 * LANES)
            for (long h = 0; h < heads; h += 4) mix_tile(w + k, h, rows + k, count, c, out, dim);
    }
    for (long h = 0; h < heads; h++)
        for (long c = 0; c < dim; c += LANES) narrow(to + h * dim + c, load(out + h * dim + c) / total[h]);
}

typedef struct {
    const float *rows;    /* [n][dim] */
    const int64_t *index; /* [queries][width]: -1 for none */
    int64_t width;
} Part;

/* Bytes of scratch that mp_attend needs; aligned as malloc does. */
static void *scratch_of(long dim, long width, float **q, float **out, vf **w, const float ***rows) {
    size_t vectors = (size_t)width * sizeof(vf), heads = (size_t)(LANES * dim) * sizeof(float);
    char *all = aligned_alloc(32, vectors + 2 * heads + ((size_t)width * sizeof(float *) + 31) / 32 * 32);
    if (!all) return 0;
    *w = (vf *)all;
    *q = (float *)(all + vectors);
    *out = (float *)(all + vectors + heads);
    *rows = (const float **)(all + vectors + 2 * heads);
    return all;
}

/* Softmax attention of query [queries][heads][dim] over the rows of all parts; -1 without memory. */
int mp_attend(const bf16 *query, const Part *parts, long num_parts, const float *sink, long queries, long heads,
              long dim, bf16 *out) {
    long width = 1;
    for (long p = 0; p < num_parts; p++) width += parts[p].width;
    float *q, *sum;
    vf *w;
    const float **rows;
    void *scratch = scratch_of(dim, width, &q, &sum, &w, &rows);
    if (!scratch) return -1;
    for (long i = 0; i < queries; i++) {
        long n = 0;
        for (long p = 0; p < num_parts; p++)
            for (long k = 0; k < parts[p].width; k++) {
                int64_t at = parts[p].index[i * parts[p].width + k];
                if (at >= 0) rows[n++] = parts[p].rows + at * dim;
            }
        for (long h = 0; h < heads; h += LANES) {
            long at = (i * heads + h) * dim, count = heads - h < LANES ? heads - h : LANES;
            attend_heads(query + at, sink + h, count, rows, n, dim, q, sum, w, out + at);
        }
    }
    free(scratch);
    return 0;
}

/* ---- choosing entries ------------------------------------------------------------------------------------ */

/* Scores of the entries each row may see: sum over heads of relu(q . key) * weight, every step rounded to bf16; -inf
   up to `stride` behind them. query [rows][heads][dim], fp32. Row i's keys begin at keys[first[i]]. */
int mp_score_entries(const float *query, const bf16 *weight, const float *keys, const int64_t *first,
                     const int64_t *visible, long rows, long heads, long dim, long stride, bf16 *out) {
    long groups = (heads + LANES - 1) / LANES;
    float *q = aligned_alloc(32, (size_t)(groups * LANES * dim) * sizeof(float));
    vf *w = aligned_alloc(32, (size_t)groups * sizeof(vf));
    if (!q || !w) {
        free(q);
        free(w);
        return -1;
    }
    memset(q, 0, (size_t)(groups * LANES * dim) * sizeof(float));
    memset(w, 0, (size_t)groups * sizeof(vf));
    for (long i = 0; i < rows; i++, query += heads * dim, weight += heads, out += stride) {
        const float *key = keys + first[i] * dim;
        memcpy(q, query, (size_t)(heads * dim) * sizeof(float));
        for (long h = 0; h < heads; h++) ((float *)w)[h] = widen_one(weight[h]);
        long seen = visible[i] < stride ? visible[i] : stride;
        for (long k = 0; k < seen; k++, key += dim) {
            vf s = {0};
            for (long g = 0; g < groups; g++) {
                vf p = larger(round_bf16(dot_heads(q + g * LANES * dim, key, dim)), (vf){0});
                s += round_bf16(p * w[g]);
            }
            out[k] = narrow_one(sum_lanes(s));
        }
        for (long k = seen; k < stride; k++) out[k] = 0xff80;
    }
    free(q);
    free(w);
    return 0;
}

/* Scores in their order as unsigned numbers; both zeros are one. */
INLINE uint32_t rank_of(bf16 x) { return x == 0x8000 ? 0x8000u : x & 0x8000 ? 0xffffu & ~(uint32_t)x : x | 0x8000u; }
#define RANK_LEAST 0x7fu /* of -inf */

/* Rank that the count-th largest of n scores has, and how many of that rank are taken. */
static uint32_t cut_of(const bf16 *scores, long n, long count, long *num_of_cut) {
    uint32_t many[256] = {0}, few[256] = {0};
    for (long k = 0; k < n; k++) many[rank_of(scores[k]) >> 8]++;
    long left = count, high = 255, low = 255;
    while (many[high] < left) left -= many[high--];
    for (long k = 0; k < n; k++) {
        uint32_t r = rank_of(scores[k]);
        if (r >> 8 == (uint32_t)high) few[r & 255]++;
    }
    while (few[low] < left) left -= few[low--];
    *num_of_cut = left;
    return (uint32_t)(high << 8 | low);
}

/* Places of the largest `count` of n scores of each row, ascending; of equal ones the lower place; -1 behind them
   and for -inf. */
void mp_choose_largest(const bf16 *scores, long rows, long n, long count, int64_t *out) {
    for (long i = 0; i < rows; i++, scores += n, out += count) {
        long num = 0, ties = n;
        uint32_t cut = 0;
        if (n > count) cut = cut_of(scores, n, count, &ties);
        for (long k = 0; k < n && num < count; k++) {
            uint32_t r = rank_of(scores[k]);
            if (r <= RANK_LEAST || r < cut || (r == cut && ties-- <= 0)) continue;
            out[num++] = k;
        }
        while (num < count) out[num++] = -1;
    }
}
