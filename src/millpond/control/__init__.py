"""State machines without I/O: `advance(now, event)` and `next_plan(now)`."""
