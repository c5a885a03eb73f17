"""Processes that the gateway benchmark runs beside the gateway."""
