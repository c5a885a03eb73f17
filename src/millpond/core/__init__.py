"""Words of the system. Standard library only; no clock, no I/O, no randomness."""
