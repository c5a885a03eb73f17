"""The pooled, erasure-coded KV store."""
