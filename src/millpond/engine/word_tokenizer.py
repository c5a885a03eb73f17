"""Vocabulary of the synthetic model: bytes, three control tokens, and words that spell their own id."""

from __future__ import annotations

BOS_ID = 256
EOS_ID = 257
START_ID = 258
FIRST_WORD = 259
