"""How many (row, cached entry) pairs a range of positions makes, in closed form."""

from __future__ import annotations


def num_pairs(num_tokens: int, ratio: int, cap: int | None = None) -> int:
    """Sum of min(t // ratio, cap) over t = 1 ... num_tokens.

    The query at position p may see (p + 1) // ratio entries and picks at most `cap`, so the pairs of
    positions [begin, end) are num_pairs(end) - num_pairs(begin).

    Args:
        num_tokens: Tokens of the sequence; below 1 there are no pairs.
        ratio: Tokens per entry, >= 1.
        cap: Most entries of one query; None for no limit.

    Source:
        The pair counts of DeepInfer's FLOPs estimator.
    """
    if num_tokens < 1:
        return 0
    if cap is not None and num_tokens >= ratio * cap:
        first_full = ratio * cap  # the first t with cap entries
        return num_pairs(first_full - 1, ratio) + cap * (num_tokens - first_full + 1)
    entries, rest = divmod(num_tokens, ratio)
    return ratio * entries * (entries - 1) // 2 + entries * (rest + 1)


def num_candidate_pairs(num_tokens: int, num_blocks: int, block_size: int) -> int:
    """Sum over t = 1 ... num_tokens of the entries in the `num_blocks` best blocks among t entries.

    Blocks are full but for the newest, which is always among the best.

    Args:
        num_tokens: Entries of the sequence (ratio 1: its tokens); below 1 there are no pairs.
        num_blocks: Candidate blocks of one query, >= 1.
        block_size: Entries of a full block, >= 1.
    """
    limit = num_blocks * block_size
    if num_tokens <= limit:
        return num_pairs(num_tokens, 1)
    blocks, rest = divmod(num_tokens - limit, block_size)
    in_newest = blocks * num_pairs(block_size, 1) + num_pairs(rest, 1)
    return num_pairs(limit, 1) + (num_tokens - limit) * (num_blocks - 1) * block_size + in_newest
