"""Continuing under other settings, or on another machine: what differs, and whether exactness survives."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

from covey.config.algorithm import algorithm_rows
from covey.config.load import Loaded, flatten, resolved
from covey.config.methods import COLLECTS
from covey.config.rows import said_of
from covey.errors import START
from covey.kernels.build import processor, tested_kernels
from covey.kernels.calls import available, products
from covey.models.load import pick_device
from covey.objective.setting import Resume
from covey.runs.folder import IN_CHECKPOINT, STREAMS
from covey.runs.inventory import changes
from covey.runs.reader import read_environment, recorded_settings
from covey.system.machine import available_threads
from covey.system.processes import on_this_machine, size
from covey.tasks.source import EXAMPLES
from covey.types import VERSION
from covey_verify.errors import ConfigError

BREAKS: Resume = "breaks exactness"
"""What a change of a setting does to a resumed run where its row says nothing else."""
PACKAGES = (
    "numpy", "tokenizers", "safetensors", "jinja2", "peft", "bitsandbytes", "math-verify", "jsonschema",
    "z3-solver", "reasoning-gym", "py3langid",
)  # fmt: skip
"""Libraries besides torch and transformers whose version may change what a run does."""
ENVIRONMENT = (
    "covey",
    "python",
    "torch",
    "transformers",
    "machine",
    "device",
    "kernels",
    "library",
    "products",
    "rounds_products",
    "threads",
    "processes",
    *PACKAGES,
    "data",
    "reference",
    "tokenizer",
)
"""What the bits of a run depend on besides its config. Threads count where torch's own kernels are used."""


@dataclass(frozen=True)
class Difference:
    """One setting or fact that is not what it was."""

    name: str
    before: object
    now: object
    verdict: Resume

    def __str__(self) -> str:
        return f"{self.name} is {self.before} there, {self.now} here ({self.verdict})"


@dataclass(frozen=True)
class Unrecorded(Difference):
    """A setting that the record of the run does not have: of another version of covey, or damaged."""

    def __str__(self) -> str:
        return f"config.yaml has no {self.name}, which is {self.now} here ({self.verdict})"


@dataclass(frozen=True)
class Changed(Difference):
    """A file the run reads that is not what it was."""

    def __str__(self) -> str:
        return f"{self.name} {self.now} since the run began ({self.verdict})"


def verdict(key: str, schedule: str = "") -> Resume:
    """What a change of a setting does to a run that continues; ``schedule`` of the learning rate.

    >>> verdict("train.keep"), verdict("train.lr"), verdict("data.task")
    ('safe', 'breaks exactness', 'refused')
    >>> verdict("train.steps", "constant"), verdict("train.steps", "cosine")
    ('safe', 'breaks exactness')
    """
    if key == "train.steps" and schedule == "constant":
        return "safe"  # nothing else asks how many steps there will be
    if key.startswith("algorithm."):
        own = [row.setting.resume for row in algorithm_rows() if row.key == key]
        return own[0] or BREAKS if own else BREAKS
    return said_of(key, "resume") or BREAKS


def changed_settings(loaded: Loaded) -> list[Difference]:
    """Settings that are not those the output folder's run was started with."""
    recorded = recorded_settings(loaded.config.output)
    if recorded is None:
        return []
    before, now = (dict(flatten(c)) for c in (recorded, resolved(loaded)))
    keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    kept = "train.schedule" not in keys
    schedule = loaded.config.train.schedule if kept else ""
    kinds = {k: Difference if k in before else Unrecorded for k in keys}
    return [kinds[k](k, before.get(k), now.get(k), verdict(k, schedule)) for k in keys]


def refuse_foreign(folder: Path) -> None:
    """Raise ConfigError if a run would overwrite files of its folder that no run has left there."""
    records = [folder / name for name in (".lock", "config.yaml", "env.json", START)]
    if any(p.exists() for p in (*records, *folder.glob(f"checkpoints/*/{IN_CHECKPOINT}"))):
        return
    theirs = [name for name in (*STREAMS, EXAMPLES, "final", "curve.svg") if (folder / name).exists()]
    if theirs:
        raise ConfigError(
            f"{folder} has {', '.join(theirs)} and no record of a run (no config.yaml): a run there would "
            "overwrite what may be somebody else's. Choose another --output"
        )


def refuse_other_config(loaded: Loaded, changes: bool) -> None:
    """Raise ConfigError if the output folder's run cannot, or without ``changes`` should not, continue."""
    refuse_foreign(loaded.config.output)
    found = changed_settings(loaded)
    refused = [d for d in found if d.verdict == "refused"]
    harmful = [d for d in found if d.verdict != "safe"]
    if refused or (harmful and not changes):
        remedy = (
            "Choose another --output, or remove that folder to start afresh"
            if refused
            else "Choose another --output, or continue with these changes by `covey resume "
            f"{loaded.config.output} ...`"
        )
        raise ConfigError(
            f"{loaded.config.output} holds a run with other settings: "
            f"{'; '.join(map(str, harmful))}. {remedy}"
        )


def environment(loaded: Loaded) -> dict[str, object]:
    """What the numbers of a run depend on besides its config."""
    config = loaded.config
    device = pick_device(config.device)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return {
        "folder": str(loaded.folder),
        "covey": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "machine": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": "compiled" if available(dtype, device) else "torch",
        "library": _library(),
        "products": {name: list(kinds) for name, kinds in products().items()},
        "threads": config.threads or available_threads(processes=on_this_machine()),
        "processes": size(),
        **{name: _version(name) for name in PACKAGES},
    }


def _library() -> str | None:
    found = tested_kernels()
    return None if found is None else f"{found.instructions}, {found.origin}, sha256 {found.digest}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def changed_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Facts about machine, versions and files that are not what they were."""
    ours = before.get("kernels") == now.get("kernels") == "compiled"
    same_for_any = ours and not any(now.get("products", {}).values())
    facts: list[Difference] = []
    before = {"processes": 1, **before}
    for name in ENVIRONMENT:
        old, new = before.get(name), now.get(name)
        if old != new and name in ("data", "reference", "tokenizer"):
            facts.append(Changed(name, old, "changed", "breaks exactness"))
        elif old != new:
            safe = name == "threads" and same_for_any
            facts.append(Difference(name, old, new, "safe" if safe else "breaks exactness"))
    files = changes(before.get("files", {}), now["files"])
    return [*facts, *(Changed(n, "", what, "breaks exactness") for n, what in files.items())]


def found_differences(loaded: Loaded, begun: bool, now: Mapping[str, Any]) -> list[Difference]:
    """What is not as it was in the process that left this run; a record that is missing is one of them."""
    output = loaded.config.output
    before = read_environment(output)
    differences = changed_settings(loaded)
    if before is not None:
        differences += changed_environment(before, now)
    collects = loaded.config.method in COLLECTS
    if begun and collects and any(d.name in ("data", "tokenizer") for d in differences):
        raise ConfigError(
            f"{output}: the data have changed since its first completions were sampled, and its examples "
            "would join those with rows of today. Put the data back, or choose another --output"
        )
    if begun:
        records = ((output / "env.json", before), (output / "config.yaml", recorded_settings(output)))
        lost = [str(path) for path, found in records if found is None]
        differences += [Changed(path, "", "is gone", "breaks exactness") for path in lost]
    return differences
