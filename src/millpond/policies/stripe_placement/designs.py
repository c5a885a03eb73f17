"""Which points make a group: exact block designs, developed base blocks, and a builder for everything else.

A table of groups is good if every point has equally many shards, plays every role (shard 0, shard 1, ...)
equally often and meets every other point in equally many groups; then no node is busier than another, and the
loss of one is rebuilt from all others alike.

`develop` takes base blocks in an abelian group and adds every element to them, which gives the first two
properties for nothing. Base blocks whose differences are all equally frequent give the third too: a block
design. `difference_families` holds searched ones for Z_v; the rest of this file are known constructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from millpond.policies.stripe_placement.difference_families import BASE_BLOCKS

Groups = tuple[tuple[int, ...], ...]
"""Group -> the point of each shard, in shard order."""

TABLE_WIDTH = 12
"""Shards per group of all designs here: 10+2."""

_MAX_PASSES = 100


def develop(base_blocks: Sequence[Sequence[int]], moduli: Sequence[int]) -> Groups:
    """Add every element of Z_m1 x Z_m2 x ... to every base block.

    Args:
        base_blocks: Points, numbered in mixed radix by `moduli`, the last one fastest.
        moduli: Orders of the cyclic factors.

    Returns:
        Groups, base block after base block, in the order of the added element.
    """
    elements = list(product(*(range(m) for m in moduli)))
    index = {element: i for i, element in enumerate(elements)}
    return tuple(
        tuple(
            index[tuple((a + b) % m for a, b, m in zip(elements[point], shift, moduli, strict=True))]
            for point in block
        )
        for block in base_blocks
        for shift in elements
    )


def known_design(num_points: int) -> Groups | None:
    """Table for groups of 12 of so many equal points without racks, or None if there is none here.

    Exact designs for 12, 13, 15, 16, 17, 19, 23, 24, 25, 45 and 133 points; near ones, whose pair counts
    differ by one or two, for every other number up to 150.
    """
    exact = {
        15: _complements_of_lines,
        16: _affine_plane,
        24: _hadamard,
        25: _paley,
        45: _mcfarland,
    }.get(num_points)
    if exact is not None:
        return exact()
    if num_points in _CYCLIC:
        return develop(_CYCLIC[num_points], (num_points,))
    found = BASE_BLOCKS.get(num_points)
    return develop(found, (num_points,)) if found else None


def transversal_design(per_rack: int) -> Groups | None:
    """Exact table for 12 racks of a prime number >= 11 of nodes each, or None for other numbers.

    Point p is in rack p mod 12. Every group has one shard in each rack, and nodes of different racks meet in
    exactly one group.
    """
    if per_rack < TABLE_WIDTH - 1 or any(per_rack % d == 0 for d in range(2, per_rack)):
        return None
    groups: list[tuple[int, ...]] = []
    for slope in range(per_rack):
        for start in range(per_rack):
            # Lines of the affine plane; the last rack holds the slopes when the field has only 11 elements.
            line = [(start + slope * rack) % per_rack for rack in range(TABLE_WIDTH - 1)]
            last = slope if per_rack == TABLE_WIDTH - 1 else (start + slope * (TABLE_WIDTH - 1)) % per_rack
            groups.append(tuple(TABLE_WIDTH * node + rack for rack, node in enumerate([*line, last])))
    return balance_roles(groups, TABLE_WIDTH * per_rack)


_CYCLIC = {
    12: [range(12)],
    13: [range(12)],
    # 0 and the quadratic non-residues.
    23: [(0, 5, 7, 10, 11, 14, 15, 17, 19, 20, 21, 22)],
    # Singer: a line of the projective plane of order 11.
    133: [(0, 1, 3, 17, 21, 58, 65, 73, 100, 105, 111, 124)],
    17: [
        (0, 1, 2, 4, 6, 7, 8, 10, 11, 12, 13, 14),
        (0, 1, 2, 4, 5, 6, 8, 11, 13, 14, 15, 16),
        (1, 2, 3, 4, 5, 6, 7, 10, 11, 13, 14, 15),
        (1, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 16),
    ],
    19: [
        (0, 1, 2, 3, 4, 6, 9, 12, 13, 14, 16, 17),
        (0, 1, 3, 7, 8, 9, 10, 12, 13, 14, 15, 18),
        (0, 2, 5, 6, 7, 8, 9, 10, 11, 14, 15, 17),
    ],
}


def _complements_of_lines() -> Groups:
    """15 points: what the 35 lines {a, b, a + b} of the projective space of dimension 3 over GF(2) leave."""
    lines = [(a, b, a ^ b) for a in range(1, 16) for b in range(a + 1, 16) if a ^ b > b]
    rest = [[point - 1 for point in range(1, 16) if point not in line] for line in lines]
    return balance_roles(rest, 15)


def _affine_plane() -> Groups:
    """16 points of GF(4)^2: what the lines leave, each of the 20 four times so that roles balance."""
    times = ((0, 0, 0, 0), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))
    through_origin = [[4 * x + times[slope][x] for x in range(4)] for slope in range(4)] + [list(range(4))]
    blocks = [[point for point in range(16) if point not in line] for line in through_origin]
    return develop(blocks, (2, 2, 2, 2))


def _hadamard() -> Groups:
    """24 points: residues mod 23 with infinity, their translates, and the complements; a 3-design."""
    residues = {x * x % 23 for x in range(1, 23)}
    groups: list[list[int]] = []
    for shift in range(23):
        block = {(x + shift) % 23 for x in residues} | {23}
        groups.extend([sorted(block), sorted(set(range(24)) - block)])
    return balance_roles(groups, 24)


def _paley() -> Groups:
    """25 points of GF(25) = GF(5)[x] / (x^2 - 2): non-zero squares and non-squares, translated."""
    squares = sorted(
        {5 * (2 * a * b % 5) + (a * a + 2 * b * b) % 5 for a, b in product(range(5), repeat=2)} - {0}
    )
    others = [point for point in range(1, 25) if point not in squares]
    return develop([squares, others], (5, 5))


def _mcfarland() -> Groups:
    """45 points of Z3 x Z3 x Z5: the four lines of Z3^2 through 0, one at each of four elements of Z5."""
    directions = ((0, 1), (1, 0), (1, 1), (1, 2))
    block = [
        15 * (t * a % 3) + 5 * (t * b % 3) + tag for tag, (a, b) in enumerate(directions) for t in range(3)
    ]
    return develop([block], (3, 3, 5))


def balance_roles(groups: Sequence[Sequence[int]], num_points: int) -> Groups:
    """Order each group so that every point plays every role about equally often.

    Two members of a group swap their roles wherever that makes the counts more equal, until nothing does.
    """
    if not groups:
        return ()
    width = len(groups[0])
    ordered = [[*group[number % width :], *group[: number % width]] for number, group in enumerate(groups)]
    played = [[0] * width for _ in range(num_points)]
    for group in ordered:
        for role, point in enumerate(group):
            played[point][role] += 1
    for _ in range(_MAX_PASSES):
        if not sum(_swap_roles(group, played) for group in ordered):
            break
    return tuple(tuple(group) for group in ordered)


def _swap_roles(group: list[int], played: list[list[int]]) -> int:
    """Do every swap in one group that lowers the sum of squares; return how many."""
    num_swaps = 0
    for a, b in combinations(range(len(group)), 2):
        p, q = played[group[a]], played[group[b]]
        # Of the sum of squares, half: p gives up role a and takes b, q the other way round.
        change = (p[b] - p[a] + 1) + (q[a] - q[b] + 1)
        if change < 0:
            p[a], p[b], q[a], q[b] = p[a] - 1, p[b] + 1, q[a] + 1, q[b] - 1
            group[a], group[b] = group[b], group[a]
            num_swaps += 1
    return num_swaps
