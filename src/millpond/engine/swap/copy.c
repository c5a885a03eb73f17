/* Many equal pieces of memory in one call: no interpreter between them, and no interpreter lock.
 *
 * Pieces are written past the cache where the CPU can: what is copied is read layers later, if not a step
 * later, and would only drive out what the forward beside it works on. The first lines of the next piece are
 * fetched ahead, for no hardware guesses where it lies.
 */

#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LINE 64
#define LINES_AHEAD 8

static void copy_piece(uint8_t *to, const uint8_t *from, int64_t num_bytes)
{
    int64_t at = 0;
#ifdef __AVX2__
    if ((uintptr_t)to % sizeof(__m256i) == 0)
        for (; at + LINE <= num_bytes; at += LINE) {
            __m256i low = _mm256_loadu_si256((const __m256i *)(from + at));
            __m256i high = _mm256_loadu_si256((const __m256i *)(from + at) + 1);
            _mm256_stream_si256((__m256i *)(to + at), low);
            _mm256_stream_si256((__m256i *)(to + at) + 1, high);
        }
#endif
    memcpy(to + at, from + at, (size_t)(num_bytes - at));
}

static void fetch_ahead(const uint8_t *from, int64_t num_bytes)
{
    for (int64_t line = 0; line < LINES_AHEAD && line * LINE < num_bytes; line++)
        __builtin_prefetch(from + line * LINE, 0, 0);
}

void mp_copy_pieces(const uint64_t *from, const uint64_t *to, int64_t count, int64_t num_bytes)
{
    for (int64_t i = 0; i < count; i++) {
        if (i + 1 < count)
            fetch_ahead((const uint8_t *)(uintptr_t)from[i + 1], num_bytes);
        copy_piece((uint8_t *)(uintptr_t)to[i], (const uint8_t *)(uintptr_t)from[i], num_bytes);
    }
#ifdef __AVX2__
    _mm_sfence();
#endif
}
