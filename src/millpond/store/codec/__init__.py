"""Erasure code and checksums."""
