"""Pure decisions: frozen views in, choices out. No clock, no I/O."""
