"""Engine processes: the leader of a group (rank 0) and its other ranks."""
