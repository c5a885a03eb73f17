"""Choosing the best compressed entries, and the blocks of candidates, with a fixed order of ties."""

from __future__ import annotations

import torch
from torch.nn import functional

from millpond.engine.model.native import kernels_for


def _ordered_keys(scores: torch.Tensor) -> torch.Tensor:
    """Int64 keys that sort like the scores; of equal scores the lower place is the larger key."""
    bits = scores.float().view(torch.int32).to(torch.int64)
    bits = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    places = torch.arange(scores.shape[-1], device=scores.device)
    return (bits << 32) - places


def choose_largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` largest scores of each row, ascending; -1 pads what is -inf or not there.

    Args:
        scores: [rows, n].
        count: Width of the result.
    """
    kernels = kernels_for(scores, 0)  # any number of them
    if kernels is not None:
        return kernels.choose_largest(scores, count)
    num_chosen = min(count, scores.shape[-1])
    chosen = _ordered_keys(scores).topk(num_chosen, dim=-1, sorted=False).indices
    absent = scores.shape[-1]
    chosen = chosen.masked_fill(scores.gather(-1, chosen) == -torch.inf, absent).sort(-1).values
    chosen = chosen.masked_fill(chosen == absent, -1)
    return functional.pad(chosen, (0, count - num_chosen), value=-1)


def choose_candidates(
    scores: torch.Tensor, visible: torch.Tensor, num_blocks: int, block_size: int
) -> torch.Tensor:
    """Mark the entries of the best blocks.

    A block scores as its best entry; the block of the newest visible entry is always kept.

    Args:
        scores: [rows, entries]; -inf where an entry is not visible.
        visible: [rows]: visible entries.
        num_blocks: Blocks to keep.
        block_size: Entries per block.

    Returns:
        [rows, entries], bool.
    """
    count = scores.shape[-1]
    padded = functional.pad(scores, (0, -count % block_size), value=-torch.inf)
    blocks = padded.unflatten(-1, (-1, block_size)).amax(-1)
    newest = (visible - 1).clamp_min(0)[:, None] // block_size
    pinned = blocks.gather(-1, newest).masked_fill_(visible[:, None] > 0, torch.inf)
    blocks = blocks.scatter(-1, newest, pinned)
    kept = choose_largest(blocks, min(num_blocks, blocks.shape[-1]))
    mask = torch.zeros(len(blocks), blocks.shape[-1] + 1, dtype=torch.bool, device=scores.device)
    mask.scatter_(-1, torch.where(kept < 0, blocks.shape[-1], kept), True)
    return mask[:, :-1].repeat_interleave(block_size, dim=-1)[:, :count]
