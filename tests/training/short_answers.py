"""Sampling settings for answers of one letter or digit."""

from __future__ import annotations

SHORT = {
    "group_size": 4, "prompts_per_step": 2, "max_tokens": 12,
    "stop": [*"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"],
}  # fmt: skip
"""A model that has learned nothing ends what it writes too."""
