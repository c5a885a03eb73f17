"""Metadata of the pool: which extents exist and where, leases, pins, tenants' quotas, the pool map."""
