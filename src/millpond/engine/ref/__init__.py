"""Plain twins of the operations in `engine.model`: one token and head at a time, as specified."""
