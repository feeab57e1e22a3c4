"""The backends that work on this machine."""

from __future__ import annotations

import pytest

from covey.errors import SandboxUnavailable
from covey.sandbox.choice import choose
from covey.sandbox.process import ProcessSandbox


@pytest.fixture(params=["bwrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> ProcessSandbox:
    try:
        chosen = choose(request.param).sandbox
    except SandboxUnavailable as error:
        pytest.skip(str(error).splitlines()[1].strip())
    assert isinstance(chosen, ProcessSandbox)
    return chosen
