/* Many equal pieces of memory in one call: no interpreter between them, and no interpreter lock. */

#include <stdint.h>
#include <string.h>

void mp_copy_pieces(const uint64_t *from, const uint64_t *to, int64_t count, int64_t num_bytes)
{
    for (int64_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], (size_t)num_bytes);
}
