"""Command line: composition roots."""
