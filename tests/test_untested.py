"""A run says at its end what could not be tested here, and how to get it."""

from __future__ import annotations

from tests.untested import lines


def test_what_was_not_tested_is_said_once_with_its_remedy() -> None:
    reasons = [
        "Skipped: bwrap: bubblewrap is not installed (the program is called bwrap)",
        "Skipped: bwrap: bubblewrap is not installed (the program is called bwrap)",
        "Skipped: could not import 'z3': No module named 'z3'",
        "Skipped: bitsandbytes is not installed",
        "Skipped: something else",
    ]
    assert lines(reasons, [["slow", "parametrize"], ["gpu"], ["slow"], ["fast"]]) == [
        "2 skipped: sandbox tests need bubblewrap: apt-get install bubblewrap",
        "1 skipped: tests need the module z3",
        "1 skipped: tests need the module bitsandbytes",
        "1 skipped: something else",
        "2 left out: they take minutes: make test-all",
        "1 left out: they need a CUDA device: pytest -m gpu",
    ]
    assert lines([], []) == []
