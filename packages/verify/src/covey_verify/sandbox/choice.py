"""The choice of a run's sandbox: the strongest that withstands its own probe, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from covey_verify.errors import SandboxUnavailable
from covey_verify.sandbox import portable
from covey_verify.sandbox.base import SandboxBackend
from covey_verify.sandbox.importable import PACKAGES
from covey_verify.sandbox.probe import holes
from covey_verify.sandbox.process import NOT_BLOCKED, VISIBLE, ProcessSandbox

MAKERS: Mapping[str, Callable[[str, Sequence[str]], SandboxBackend]] = {
    "bwrap": lambda _, packages: ProcessSandbox("bwrap", packages),
    "landlock": lambda _, packages: ProcessSandbox("landlock", packages),
    "wasm": lambda *_: portable.Wasm(),
    "remote": lambda url, _: portable.Remote(url),
}
"""Backend name -> its maker (URL, packages), strongest first."""


@dataclass(frozen=True)
class SandboxChoice:
    """A sandbox that passed its probe, and the reasons against stronger sandboxes."""

    sandbox: SandboxBackend
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Backend that was tried before -> why it is not used."""

    @property
    def sealed(self) -> bool:
        """Whether installed packages and the verifiers are hidden from a program."""
        return self.sandbox.name in ("bwrap", "landlock", "wasm")

    def record(self) -> dict[str, object]:
        """Return the fields of the run's record."""
        sandbox = self.sandbox
        record: dict[str, object] = {
            "backend": sandbox.name,
            "layers": sandbox.layers,
            "packages": list(getattr(sandbox, "packages", ())),
            "rejected": dict(self.rejected),
        }
        if sandbox.name == "landlock":
            record["visible"] = VISIBLE
        if sandbox.name == "unsafe_local":
            record["not_blocked"] = NOT_BLOCKED
        return record


def remade(name: str, url: str, packages: Sequence[str]) -> SandboxBackend:
    """Make a sandbox that another process has chosen, without a probe."""
    return MAKERS[name](url, packages) if name in MAKERS else ProcessSandbox(name, packages)


@cache
def choose(
    backend: str = "auto",
    url: str | None = None,
    unsafe_local: bool = False,
    packages: tuple[str, ...] = PACKAGES,
) -> SandboxChoice:
    """Return the requested sandbox, or the first that passes its probe.

    ``unsafe_local`` runs model code with the rights of this user if nothing better works. Raises
    SandboxUnavailable, which names every hole.
    """
    # In the order of MAKERS, so the first that passes is the strongest.
    names = list(MAKERS) if backend == "auto" else [backend]
    if backend == "auto" and url is None:
        names.remove("remote")
    failures: dict[str, str] = {}
    for name in names:
        try:
            sandbox = MAKERS[name](url or "", packages)
            gaps = holes(sandbox)
        except SandboxUnavailable as error:
            failures[name] = str(error)
            continue
        # A remote service isolates by its own rules, so its probe only has to run.
        if not gaps or (name == "remote" and not gaps[0].startswith("does not run")):
            return SandboxChoice(sandbox, failures)
        failures[name] = "; ".join(gaps)
    if unsafe_local:
        return SandboxChoice(ProcessSandbox("unsafe_local", packages), failures)
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in failures.items())
    raise SandboxUnavailable(
        f"no sandbox for model-written code withstands its probe:{reasons}\nInstall bubblewrap, use a "
        "Linux kernel with Landlock (5.13), pip install 'covey-verify[wasm]', or set sandbox.url to a "
        f"SandboxFusion service. sandbox.unsafe_local: true runs it with your rights: not blocked are "
        f"{NOT_BLOCKED}"
    )
