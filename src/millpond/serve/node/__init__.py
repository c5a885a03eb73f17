"""The node daemon: one process per host that owns arena, loads, DRAM level and snapshots; and its client."""
