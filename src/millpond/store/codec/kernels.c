/* Coding and checksums of one piece of a stripe in one pass, and the copies between blocks and shards.
 *
 * A piece is a range of bytes that all shards have in common. It passes through the first-level cache in
 * slices: while a slice of all shards is there, ISA-L makes its linear combination and every checksum takes
 * it in. Two passes would read memory twice. The checksum is XXH3 with 64 bits, seed 0 and the default
 * secret, after its published description, for lengths that are multiples of 64 and at least 256.
 * Twins: checksum.py, cells.py.
 */
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define STRIPE 64
#define STRIPES_PER_BLOCK 16 /* (secret bytes - 64) / 8 */
#define SLICE 1024           /* of each shard: twelve of them fit the first-level cache */
#define MAX_SHARDS 255

_Static_assert(SLICE % (STRIPE * STRIPES_PER_BLOCK) == 0, "sum_update begins at a block");

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

typedef uint64_t lanes __attribute__((vector_size(32)));
typedef uint64_t lanes_u __attribute__((vector_size(32), aligned(1), may_alias));

typedef struct {
    lanes low, high; /* eight lanes of 64 bits */
} sum_state;

static inline lanes load(const uint8_t *p) { return *(const lanes_u *)p; }

static uint64_t read64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

/* Low half of each lane of a times low half of b. */
static inline lanes multiply_low(lanes a, lanes b) {
#ifdef __AVX2__ /* gcc would multiply whole lanes, at three times the cost */
    return (lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

static inline lanes swap_pairs(lanes a) {
#ifdef __AVX2__
    return (lanes)_mm256_shuffle_epi32((__m256i)a, 0x4E);
#else
    return __builtin_shuffle(a, (lanes){1, 0, 3, 2});
#endif
}

static inline lanes add(lanes acc, lanes data, lanes secret) {
    lanes key = data ^ secret;
    return acc + swap_pairs(data) + multiply_low(key, key >> 32);
}

static inline lanes scramble(lanes acc, lanes secret) {
    const lanes prime = {PRIME32_1, PRIME32_1, PRIME32_1, PRIME32_1};
    lanes key = acc ^ (acc >> 47) ^ secret;
    return multiply_low(key, prime) + (multiply_low(key >> 32, prime) << 32);
}

/* Take in `count` stripes from a multiple of 16 on, all of them before the input's last stripe. */
static void sum_update(sum_state *state, const uint8_t *p, long count) {
    lanes low = state->low, high = state->high;
    while (count > 0) {
        long run = count < STRIPES_PER_BLOCK ? count : STRIPES_PER_BLOCK;
        for (long i = 0; i < run; i++, p += STRIPE) {
            low = add(low, load(p), load(SECRET + 8 * i));
            high = add(high, load(p + 32), load(SECRET + 8 * i + 32));
        }
        if (run == STRIPES_PER_BLOCK) {
            low = scramble(low, load(SECRET + 128));
            high = scramble(high, load(SECRET + 160));
        }
        count -= run;
    }
    state->low = low;
    state->high = high;
}

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t sum_finish(const sum_state *state, const uint8_t *last, long num_bytes) {
    uint64_t acc[8];
    *(lanes_u *)acc = add(state->low, load(last), load(SECRET + 121));
    *(lanes_u *)(acc + 4) = add(state->high, load(last + 32), load(SECRET + 153));
    uint64_t sum = (uint64_t)num_bytes * PRIME64_1;
    for (int i = 0; i < 4; i++)
        sum += fold(acc[2 * i] ^ read64(SECRET + 11 + 16 * i), acc[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9ull;
    return sum ^ (sum >> 32);
}

/* ISA-L's ec_encode_data, or its xor_gen if tables is null. */
typedef void (*encode_fn)(int, int, int, uint8_t *, uint8_t **, uint8_t **);
typedef int (*xor_fn)(int, int, void **);

static void code_span(void *combine, uint8_t *tables, uint8_t **coded, int num_sources, int num_outputs,
                      uint8_t **summed, int num_sums, long begin, long end, uint64_t *sums, long sums_stride) {
    const sum_state start = {{PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3},
                             {PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1}};
    sum_state states[MAX_SHARDS];
    uint8_t *at[MAX_SHARDS];
    for (int s = 0; s < num_sums; s++)
        states[s] = start;
    for (long slice = begin; slice < end; slice += SLICE) {
        long size = end - slice < SLICE ? end - slice : SLICE;
        if (num_outputs) {
            for (int s = 0; s < num_sources + num_outputs; s++)
                at[s] = coded[s] + slice;
            if (tables)
                ((encode_fn)combine)((int)size, num_sources, num_outputs, tables, at, at + num_sources);
            else
                ((xor_fn)combine)(num_sources + 1, (int)size, (void **)at);
        }
        long count = size / STRIPE - (slice + size == end); /* the last stripe is taken in by sum_finish */
        for (int s = 0; s < num_sums; s++)
            sum_update(&states[s], summed[s] + slice, count);
    }
    for (int s = 0; s < num_sums; s++)
        sums[s * sums_stride] = sum_finish(&states[s], summed[s] + end - STRIPE, end - begin);
}

/* For every span [begin, end) combine the sources into the outputs, which follow them in `coded`, and then take
 * the checksums of `summed`: sums[shard][span]. Without outputs only the checksums. */
void mp_code_spans(void *combine, uint8_t *tables, uint8_t **coded, int num_sources, int num_outputs,
                   uint8_t **summed, int num_sums, const int64_t *spans, long num_spans, uint64_t *sums) {
    for (long i = 0; i < num_spans; i++)
        code_span(combine, tables, coded, num_sources, num_outputs, summed, num_sums, (long)spans[2 * i],
                  (long)spans[2 * i + 1], sums + i, num_spans);
}

/* Copy a column. The C library would use string instructions from 2 KiB on, which are slow to start. */
static void copy_column(uint8_t *to, const uint8_t *from, long size, int past_cache) {
    long done = 0;
#ifdef __AVX2__
    if (past_cache && (uintptr_t)to % 32 == 0) {
        for (; done + 64 <= size; done += 64) {
            _mm256_stream_si256((__m256i *)(to + done), (__m256i)load(from + done));
            _mm256_stream_si256((__m256i *)(to + done + 32), (__m256i)load(from + done + 32));
        }
    }
#endif
    for (; done + 64 <= size; done += 64) {
        lanes low = load(from + done), high = load(from + done + 32);
        *(lanes_u *)(to + done) = low;
        *(lanes_u *)(to + done + 32) = high;
    }
    memcpy(to + done, from + done, (size_t)(size - done));
}

/* Copy cells of `cell_bytes` between blocks and their columns: column c of block b is at
 * columns + c * stride + b * column_bytes. To the columns, which are coded next, padding is zeroed; to the
 * blocks, which nobody reads soon, the copy goes past the cache. */
void mp_copy_cells(uint8_t *columns, long stride, long column_bytes, long num_columns, uint8_t **cells,
                   long cell_bytes, long num_blocks, int to_columns) {
    for (long b = 0; b < num_blocks; b++) {
        for (long c = 0; c < num_columns; c++) {
            uint8_t *column = columns + c * stride + b * column_bytes, *cell = cells[b] + c * column_bytes;
            long rest = cell_bytes - c * column_bytes;
            long size = rest < 0 ? 0 : rest < column_bytes ? rest : column_bytes;
            if (to_columns) {
                copy_column(column, cell, size, 0);
                memset(column + size, 0, (size_t)(column_bytes - size));
            } else {
                copy_column(cell, column, size, 1);
            }
        }
    }
#ifdef __AVX2__
    _mm_sfence();
#endif
}
