"""Which sandbox a run uses: the strongest that withstands its own probe, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from covey.errors import SandboxUnavailable
from covey.sandbox import portable
from covey.sandbox.base import SandboxBackend
from covey.sandbox.probe import holes
from covey.sandbox.process import NOT_BLOCKED, VISIBLE, ProcessSandbox

MAKERS: Mapping[str, Callable[[str], SandboxBackend]] = {
    "bwrap": lambda _: ProcessSandbox("bwrap"),
    "landlock": lambda _: ProcessSandbox("landlock"),
    "wasm": lambda _: portable.Wasm(),
    "remote": portable.Remote,
}
"""Strongest first."""


@dataclass(frozen=True)
class Chosen:
    """A sandbox that held, and why stronger ones were not used."""

    sandbox: SandboxBackend
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, object]:
        """For the run's record."""
        sandbox = self.sandbox
        found: dict[str, object] = {
            "backend": sandbox.name,
            "layers": sandbox.layers,
            "passed_over": dict(self.passed_over),
        }
        if sandbox.name == "landlock":
            found["visible"] = VISIBLE
        return found | ({"not_blocked": NOT_BLOCKED} if sandbox.name == "unsafe_local" else {})


def remade(name: str, url: str) -> SandboxBackend:
    """A sandbox that has been chosen, in another process."""
    return MAKERS[name](url) if name in MAKERS else ProcessSandbox(name)


@cache
def choose(backend: str = "auto", url: str | None = None, unsafe_local: bool = False) -> Chosen:
    """The sandbox asked for, or the first that holds. Raises SandboxUnavailable naming each hole.

    ``unsafe_local`` runs model code as this user, when nothing better works.
    """
    wanted = list(MAKERS) if backend == "auto" else [backend]
    if backend == "auto" and url is None:
        wanted.remove("remote")
    failures: dict[str, str] = {}
    for name in wanted:
        try:
            sandbox = MAKERS[name](url or "")
            found = holes(sandbox)
        except SandboxUnavailable as error:
            failures[name] = str(error)
            continue
        if not found or (name == "remote" and not found[0].startswith("does not run")):
            return Chosen(sandbox, failures)
        failures[name] = "; ".join(found)
    if unsafe_local:
        return Chosen(ProcessSandbox("unsafe_local"), failures)
    tried = "".join(f"\n  {name}: {why}" for name, why in failures.items())
    raise SandboxUnavailable(
        f"no sandbox for model-written code withstands its probe:{tried}\nInstall bubblewrap, use a "
        "Linux kernel with Landlock (5.13), pip install 'covey[wasm]', or set sandbox.url to a "
        f"SandboxFusion service. sandbox.unsafe_local: true runs it with your rights: not blocked are "
        f"{NOT_BLOCKED}"
    )
