"""The public HTTP API: validation, tenants, token log, streams."""
