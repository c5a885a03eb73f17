"""`parse_located`: reads where a chain lies out of bytes that somebody brought along.

A hint that came a long way: through the request and a rank. Whatever is wrong with it makes it no hint; what
it names falsely, the read finds out (`extent_get.check_identity`).
"""

from __future__ import annotations

import msgspec

from millpond.core.hashing import DIGEST_BYTES
from millpond.core.units import MIB
from millpond.store.chain import BlockChain, Hit, hit_of
from millpond.store.net.messages import Location, Matched

MAX_BYTES = 1 * MIB
_decoder = msgspec.msgpack.Decoder(Matched)


def parse_located(chain: BlockChain, located: bytes, window: int) -> Hit:
    """Read a hint.

    Args:
        chain: What it is about.
        located: Packed `Matched`, or anything else.
        window: Blocks of a full extent.

    Returns:
        The hit, of no blocks if the hint is none.
    """
    nothing = Hit(chain, 0, ())
    if not 0 < len(located) <= MAX_BYTES:
        return nothing
    try:
        matched = _decoder.decode(located)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return nothing
    if len(matched.extents) != len(matched.begins) or matched.num_blocks < 0:
        return nothing
    if any(begin < 0 for begin in matched.begins):
        return nothing
    if not all(_is_plausible(location, window) for location in matched.extents):
        return nothing
    return hit_of(chain, matched)


def _is_plausible(location: Location, window: int) -> bool:
    return (
        len(location.digest) == DIGEST_BYTES
        and 1 <= location.num_blocks <= window
        and min(location.epoch, location.group, location.nonce, location.missing) >= 0
        and not location.dram_host
    )
