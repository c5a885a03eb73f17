"""Load generator: the client side of `millpond bench serve`, for any server with the same API."""
