"""The discrete-event shell around the same state machines that `millpond.serve` drives."""
