"""Wire of the pool: frames, the servers' threads, the client's sockets."""
