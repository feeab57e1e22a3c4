"""Rollouts: problems -> scored groups. `loop` is the iterator, the other files are its parts."""
