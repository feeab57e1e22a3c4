"""A second trainer that shares nothing with the first, and the replay of a recorded run through it.

``formulas``, ``losses``, ``shadow`` and ``shadow_given`` (imitation, preferences) are written for reading,
import nothing of covey and work in float64, one completion or example at a time: no padding, no packing, no
micro-batches. ``replay`` and ``replay_given`` read a run folder, let the shadow repeat its steps and compare.
"""
