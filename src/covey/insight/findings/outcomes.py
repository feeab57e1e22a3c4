"""Names of rules that several rules silence."""

NO_SIGNAL = ("too_hard", "too_easy", "tied", "dead_weight", "zero_advantage")
STILL = ("flat", "no_motion", "held_out_flat")
OUTCOMES = (*NO_SIGNAL, *STILL, "worse", "entropy_collapse", "duplicates", "kl_growth", "length_bias")
"""The findings in which any bad reward may end."""
