"""A second trainer that shares nothing with the first, and the replay of a recorded run through it.

``formulas`` and ``shadow`` are written for reading, import nothing of covey and work in float64, one
completion at a time: no padding, no packing, no micro-batches. ``replay`` reads a run folder, lets the
shadow repeat its steps and compares.
"""
