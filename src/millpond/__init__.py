"""Millpond: an open inference service around DeepSeek-style models."""

__version__ = "0.1.0"
