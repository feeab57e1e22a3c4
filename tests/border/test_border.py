"""The border of tokens and text in made-up worlds: a minute of them; `make fuzz` tries an hour."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.border.claims import tried

WORLDS, AT_ONCE = 240, 30


@pytest.mark.parametrize("first", range(0, WORLDS, AT_ONCE))
def test_what_is_trained_is_what_sampling_would_write_and_rewards_read(first: int, tmp_path: Path) -> None:
    became = Counter(
        f"{claim}: {what}"
        for seed in range(first, first + AT_ONCE)
        for claim, what in tried(seed, tmp_path).items()
    )
    # A world in which nothing is trained, or nothing kept, would prove nothing.
    assert became["claim_trained: chat"] > AT_ONCE / 4
    assert became["claim_kept: kept"] > AT_ONCE / 2
