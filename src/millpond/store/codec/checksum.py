"""Checksum of our own bytes: XXH3 with 64 bits."""

from __future__ import annotations

import xxhash

checksum = xxhash.xxh3_64_intdigest
