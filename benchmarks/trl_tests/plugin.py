"""pytest plugin: TRL's test files run with covey's trainers in place of TRL's, or with TRL's own.

`TRL_TESTS_WITH` is covey or trl. Under covey the name `trl` means covey.trl, and TRL's private modules are
empty: whatever a test imports from them fails where it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

KINDS = ("grpo", "rloo", "sft", "dpo", "reward", "kto")
STEPS = 3
"""Steps of a GRPO or RLOO test that sets none; TRL's default is 51 with these rows."""


def _unavailable(name: str) -> Any:
    """Return a class that says what is missing once a test uses it."""

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} is private to TRL")

    return type(name, (), {"__init__": refuse, "__new__": refuse})


class _BaseConfig:
    """Stands where TRL's own fixture changes configs for the CPU, which covey's do not need."""

    def __post_init__(self) -> None:
        """Do nothing."""


class _Private(ModuleType):
    """A module of TRL that covey has no counterpart of."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_") and name.endswith("_available"):
            package = name.removeprefix("is_").removesuffix("_available")
            return lambda *_, **__: importlib.util.find_spec(package) is not None
        return _unavailable(name)


def _covey_as_trl() -> None:
    import covey.trl

    sys.modules["trl"] = covey.trl
    for name in (
        *("import_utils", "trainer", "trainer.base_config", "trainer.utils", "chat_template_utils"),
        *(f"trainer.{kind}_trainer" for kind in KINDS),
    ):
        sys.modules[f"trl.{name}"] = _Private(f"trl.{name}")
    vars(sys.modules["trl.trainer.base_config"])["_BaseConfig"] = _BaseConfig


def _complete_trl() -> None:
    """Add the questions for packages that this checkout's tests ask and the installed TRL does not know."""
    from trl import import_utils

    for name in ("joblib", "harbor", "openreward", "math_verify", "mergekit", "vllm", "jmespath"):
        asked = f"is_{name}_available"
        if not hasattr(import_utils, asked):
            setattr(import_utils, asked, lambda name=name: importlib.util.find_spec(name) is not None)
    for kind in KINDS:
        module = importlib.import_module(f"trl.trainer.{kind}_trainer")
        vars(module).setdefault("__getattr__", _missing)


def _missing(name: str) -> Any:
    """Return a stand-in for a private name that the tests import and the installed TRL does not have."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _unavailable(name)


def _limit_steps() -> None:
    """End tests that sample after a few steps, as each of these takes a while on a CPU."""
    import trl

    for config in (trl.GRPOConfig, trl.RLOOConfig):
        own = config.__post_init__

        def limited(self: Any, own: Any = own) -> None:
            if self.max_steps == -1:
                self.max_steps = STEPS
            own(self)

        config.__post_init__ = limited


if os.environ.get("TRL_TESTS_WITH") == "covey":
    _covey_as_trl()
else:
    _complete_trl()
_limit_steps()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of images, of accelerators and of a TRL that is not installed."""
    items[:] = [item for item in items if "Slow" not in item.nodeid and "VLM" not in item.nodeid]


_LINES: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each test's result with the last line of its error."""
    if report.when != "call" and report.outcome == "passed":
        return
    if report.when == "teardown":
        return
    reason = ""
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash is not None else str(report.longrepr)
        reason = " ".join(reason.split())[:300]
    elif report.outcome == "skipped":
        reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)[:120]
    _LINES.append(f"{report.outcome}\t{report.nodeid.rpartition('/')[2]}\t{reason}")


def pytest_sessionfinish() -> None:
    """Write the results where the runner reads them."""
    path = os.environ.get("TRL_TESTS_RESULTS")
    if path:
        Path(path).write_text("\n".join(_LINES) + "\n", "utf-8")
    print(dict(Counter(line.partition("\t")[0] for line in _LINES)))
