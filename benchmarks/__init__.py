"""What each part must show, measured (levels.toml)."""
