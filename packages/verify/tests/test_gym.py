"""reasoning-gym's tasks with its scorers in the sandbox, where the extra is installed."""

from __future__ import annotations

import pytest

from covey_verify.gym import harmless


@pytest.mark.parametrize(
    ("answer", "data"),
    [
        ("3*(x+1)", True),
        ("[[1, 2], [3]]", True),
        ("(5 + 3) * 2 - x", True),
        ("__import__('os')", False),
        ("().__class__", False),
        ("exit()", False),
        ("x(y:=1)", False),
        ("open('f')", False),
    ],
)
def test_only_data_reaches_the_scorers_that_execute(answer: str, data: bool) -> None:
    assert harmless(answer, "x") is data
