"""Rollouts: problems -> scored groups. `loop` chooses, draws and judges; the other files are its parts."""
