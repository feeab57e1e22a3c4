"""Shared by the tests of rewards."""

from __future__ import annotations

import pytest

from covey_verify import contract
from covey_verify.mathematics import answers
from covey_verify.sandbox.confine import Limits


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Verifiers in children get a second."""
    limits = Limits(wall=2.0, cpu=1, memory=1 << 30)
    monkeypatch.setattr(answers, "SYMBOLIC_LIMITS", limits)
    monkeypatch.setattr(contract, "LIMITS", limits)
    return limits
