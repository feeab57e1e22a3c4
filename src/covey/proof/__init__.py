"""A second trainer that shares no code with the first, and the replay of recorded runs in it.

``formulas``, ``losses``, ``shadow`` and ``shadow_given`` (imitation, preferences) are written for reading.
They import nothing else of covey and work in float64, one completion or example at a time: no padding, no
packing, no micro-batches. ``replay`` and ``replay_given`` read a run folder, let the shadow repeat its steps
and compare.
"""
