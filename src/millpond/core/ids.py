"""Identifiers. Each is its own type so that two of them cannot be confused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
"""One sequence to generate. A client call with n > 1 makes n of them: `<call id>-<choice>`."""
GatewayId = NewType("GatewayId", str)
GroupId = NewType("GroupId", str)
"""Name of a DP group from the config, for example `p0`."""
HostId = NewType("HostId", str)
DpRank = NewType("DpRank", int)
BlockId = NewType("BlockId", int)
"""Index of a block in one rank's block memory. 0 is the null block and is never handed out."""
SlotId = NewType("SlotId", int)
"""Index of a state slot in one rank's memory. Starts at 0."""
BlockHash = NewType("BlockHash", bytes)
"""First 16 bytes of the chained digest of one block (interfaces A.1)."""

NULL_BLOCK = BlockId(0)


@dataclass(frozen=True, slots=True, order=True)
class RankRef:
    """One DP rank of one group, cluster-wide."""

    group: GroupId
    rank: DpRank
