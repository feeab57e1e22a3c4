"""The attack list, each attack on each backend that works here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from attacks import ATTACKS, LIMITS, SLOW, Attack, Bait, assault, laid_out

from covey_verify.sandbox.process import ProcessSandbox

SHORT = replace(LIMITS, wall=0.8, cpu=1)
HARMLESS = {
    "reads a private file",
    "reads the password file",
    "connects to the host",
    "connects to an abstract socket",
    "sends a datagram",
    "makes a symbolic link",
    "starts a shell",
    "starts a subprocess",
}
"""May be let loose where nothing holds them."""


@pytest.fixture
def bait() -> Iterator[Bait]:
    with laid_out() as laid:
        yield laid


def test_the_list_is_long_and_has_no_name_twice() -> None:
    names = [a.name for a in ATTACKS]
    assert len(names) == len(set(names)) >= 80
    assert set(names) >= SLOW | HARMLESS


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.name not in SLOW], ids=lambda a: a.name)
def test_an_attack_gets_nothing(sandbox: ProcessSandbox, attack: Attack, bait: Bait) -> None:
    assert assault(sandbox, attack, bait)["problems"] == []


ENDLESS = [
    pytest.param(
        a, id=a.name, marks=() if a.name in ("sleeps", "swallows every exception") else pytest.mark.slow
    )
    for a in ATTACKS
    if a.name in SLOW
]


@pytest.mark.parametrize("attack", ENDLESS)
def test_what_would_never_end_is_ended(sandbox: ProcessSandbox, attack: Attack, bait: Bait) -> None:
    found = assault(sandbox, attack, bait, SHORT)
    assert found["problems"] == []
    assert found["end"] in ("timeout", "crashed") or attack.name == "hangs at exit"  # it exits at once


@pytest.fixture(scope="module")
def unsafe() -> Iterator[ProcessSandbox]:
    sandbox = ProcessSandbox("unsafe_local")
    sandbox.server.start()
    yield sandbox
    sandbox.server.close()


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.name in HARMLESS], ids=lambda a: a.name)
def test_where_nothing_holds_the_attacks_succeed(unsafe: ProcessSandbox, attack: Attack, bait: Bait) -> None:
    assert assault(unsafe, attack, bait)["problems"]
