"""Copies of KV rows from the host's shared memory into the engine's: four methods, chosen by measurement."""
