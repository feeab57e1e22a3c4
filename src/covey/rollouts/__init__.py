"""Rollouts: problems -> scored groups. `loop` chooses, samples and finishes; the other files are its parts."""
