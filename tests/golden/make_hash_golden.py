"""Writes hash.json: five block hash chains of interfaces A.1, straight from its text.

Deliberately shares nothing with `millpond`: standard library only, no loops over anything but blocks.
Run `python tests/golden/make_hash_golden.py > tests/golden/hash.json`.
"""

from __future__ import annotations

import hashlib
import json
import struct


def lp(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def chain(root: bytes, ids: list[int], extras: list[list]) -> list[str]:
    """`extras`: [kind, position in the sequence, value as hex], already sorted by position, then kind."""
    digests = []
    parent = root
    for begin in range(0, len(ids) - 127, 128):
        message = parent + struct.pack("<128i", *ids[begin : begin + 128])
        for kind, position, value in extras:
            if begin <= position < begin + 128:
                message += (
                    struct.pack("<B", kind) + struct.pack("<I", position - begin) + lp(bytes.fromhex(value))
                )
        parent = hashlib.sha256(message).digest()
        digests.append(parent.hex())
    return digests


def case(
    name: str, model: bytes, layout: bytes, tenant: bytes, cache: bytes, ids: list[int], extras: list
) -> dict:
    root = hashlib.sha256(b"millpond-kv-1" + lp(model) + lp(layout) + lp(tenant) + lp(cache)).digest()
    return {
        "name": name,
        "model_fingerprint": model.hex(),
        "layout_fingerprint": layout.hex(),
        "tenant_salt": tenant.hex(),
        "cache_salt": cache.hex(),
        "token_ids": ids,
        "extras": extras,
        "root": root.hex(),
        "digests": chain(root, ids, extras),
    }


MODEL = hashlib.sha256(b"a model").digest()
LAYOUT = hashlib.sha256(b"a layout").digest()

CASES = [
    case("no salt, one block and a rest", MODEL, LAYOUT, b"", b"", list(range(130)), []),
    case("two salts", MODEL, LAYOUT, b"tenant-a", b"session", [(7 * i * i) % 49152 for i in range(384)], []),
    case(
        "salt moved from one field to the other",
        MODEL,
        LAYOUT,
        b"tenant-asess",
        b"ion",
        [(7 * i * i) % 49152 for i in range(384)],
        [],
    ),
    case("large ids, empty fingerprints", b"", b"", b"\x00", b"", [2**31 - 1 - i for i in range(256)], []),
    case(
        "image, adapter and lineage keys",
        MODEL,
        LAYOUT,
        b"tenant-b",
        b"",
        [3 * i for i in range(400)],
        [[2, 0, "6c6f7261"], [1, 5, "00ff" * 16], [3, 5, ""], [1, 130, "ab"], [1, 390, "cd"]],
    ),
]

if __name__ == "__main__":
    print("[\n" + ",\n".join(map(json.dumps, CASES)) + "\n]")
