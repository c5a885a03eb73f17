"""Replay of sessions: agents whose next turn is sent when the turn before has ended."""
