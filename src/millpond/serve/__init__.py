"""The I/O shell: processes, sockets, HTTP around the state machines of `millpond.control`."""
