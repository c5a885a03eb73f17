"""Hosts and networks of a cluster on one machine, with links as slow as wanted (interfaces A.8)."""
