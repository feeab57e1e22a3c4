"""What many tests share: each sandbox that works on this machine, and verifiers without patience."""

from __future__ import annotations

import pytest

from covey_verify import contract
from covey_verify.errors import SandboxUnavailable
from covey_verify.mathematics import answers
from covey_verify.sandbox.choice import choose
from covey_verify.sandbox.confine import Limits
from covey_verify.sandbox.process import ProcessSandbox


@pytest.fixture(params=["bwrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> ProcessSandbox:
    """Each backend that works on this machine."""
    try:
        chosen = choose(request.param).sandbox
    except SandboxUnavailable as error:
        pytest.skip(str(error).splitlines()[1].strip())
    assert isinstance(chosen, ProcessSandbox)
    return chosen


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Verifiers in children get a second."""
    limits = Limits(wall=2.0, cpu=1, memory=1 << 30)
    monkeypatch.setattr(answers, "SYMBOLIC_LIMITS", limits)
    monkeypatch.setattr(contract, "LIMITS", limits)
    return limits
