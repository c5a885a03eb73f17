"""One strict TOML configuration."""
