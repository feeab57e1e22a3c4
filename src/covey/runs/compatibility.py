"""Comparison of a run with its record before it continues: differences, and whether it stays bit-exact."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from covey.config.algorithm import algorithm_rows
from covey.config.load import ResolvedConfig, resolved_values
from covey.config.methods import EXAMPLE_SAMPLERS
from covey.config.python_objects import OBJECT, PART_OF_STREAM
from covey.config.rows import fact_of, flatten
from covey.errors import START_FILE
from covey.models.kernels.build import processor, tested_kernels
from covey.models.kernels.calls import available, products
from covey.objective.setting import Resume
from covey.runs.atomic import write_file
from covey.runs.folder import CURVE, IN_CHECKPOINT, STREAMS
from covey.runs.owner import OWNER
from covey.runs.reader import read_environment, recorded_settings
from covey.system.device import pick_device
from covey.system.integrity import changes, sealed
from covey.system.machine import available_threads
from covey.system.processes import on_this_machine, world_size
from covey.tasks.source import EXAMPLES_FILE
from covey.types import VERSION
from covey_verify.errors import ConfigError

BREAKS_EXACTNESS: Resume = "breaks exactness"
"""The effect on a resumed run of changing a setting, unless the setting's row says otherwise."""
PACKAGES = (
    "numpy", "tokenizers", "safetensors", "jinja2", "peft", "bitsandbytes", "sympy", "mpmath", "math-verify",
    "jsonschema", "z3-solver", "reasoning-gym", "py3langid",
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
"""Facts besides the config that a run's bits depend on. Threads matter only with torch's own kernels."""


@dataclass(frozen=True)
class Difference:
    """A setting, fact or file that differs from the record."""

    name: str
    words: str
    """The difference in a sentence, with the name."""
    effect: Resume = BREAKS_EXACTNESS

    def __str__(self) -> str:
        return f"{self.words} ({self.effect})"


def _since_then(name: str, what: str) -> Difference:
    """Return the difference of a file, or of data, that has changed since the run began."""
    return Difference(name, f"{name} {what} since the run began")


def effect_of_change(key: str, schedule: str = "") -> Resume:
    """Return the effect of changing a setting on a run that continues, given the lr ``schedule``.

    >>> effect_of_change("train.keep"), effect_of_change("train.lr"), effect_of_change("data.task")
    ('safe', 'breaks exactness', 'refused')
    >>> effect_of_change("train.steps", "constant"), effect_of_change("train.steps", "cosine")
    ('safe', 'breaks exactness')
    """
    if key == "train.steps" and schedule == "constant":
        return "safe"  # nothing else asks how many steps there will be
    if key.startswith("algorithm."):
        # Settings of the algorithm have rows of their own. A name without a row belongs to a user's function,
        # of which nothing is known.
        effects = [row.setting.resume for row in algorithm_rows() if row.key == key]
        return effects[0] or BREAKS_EXACTNESS if effects else BREAKS_EXACTNESS
    return fact_of(key, "resume") or BREAKS_EXACTNESS


def changed_settings(resolved: ResolvedConfig) -> list[Difference]:
    """Return the settings that differ from those that the run in the output folder started with."""
    recorded = recorded_settings(resolved.config.output)
    if recorded is None:
        return []
    before, current = (dict(flatten(c)) for c in (recorded, resolved_values(resolved)))
    keys = [k for k in {**before, **current} if before.get(k) != current.get(k)]
    # If the schedule itself changed, no rule for one schedule applies, and train.steps counts as breaking.
    same_schedule = not any(k.startswith("train.schedule") for k in keys)
    schedule = str(resolved.config.train.schedule) if same_schedule else ""
    differences = []
    for k in keys:
        words = f"{k} is {before.get(k)} there, {current.get(k)} here"
        if k not in before:  # another version of covey wrote the record, or it is damaged
            words = f"config.yaml has no {k}, which is {current.get(k)} here"
        effect = effect_of_change(k, schedule)
        if f"{OBJECT}{PART_OF_STREAM}" in (before.get(k), current.get(k)):
            # More steps take more rows, so the iterator may now end.
            effect = BREAKS_EXACTNESS
        differences.append(Difference(k, words, effect))
    return differences


def refuse_foreign(folder: Path) -> None:
    """Raise ConfigError if a run would overwrite files of its folder that no run has left there."""
    records = [folder / name for name in (OWNER, "config.yaml", "env.json", START_FILE)]
    if any(p.exists() for p in (*records, *folder.glob(f"checkpoints/*/{IN_CHECKPOINT}"))):
        return
    foreign = [name for name in (*STREAMS, EXAMPLES_FILE, "final", CURVE) if (folder / name).exists()]
    if foreign:
        raise ConfigError(
            f"{folder} has {', '.join(foreign)} but no record of a run (no config.yaml): a run there could "
            "overwrite other files. Choose another --output"
        )


def refuse_other_config(resolved: ResolvedConfig, changes: bool) -> None:
    """Raise ConfigError if the output folder's run cannot, or without ``changes`` should not, continue."""
    refuse_foreign(resolved.config.output)
    differences = changed_settings(resolved)
    refused = [d for d in differences if d.effect == "refused"]
    harmful = [d for d in differences if d.effect != "safe"]
    if refused or (harmful and not changes):
        remedy = f"continue with these changes by `covey resume {resolved.config.output} ...`"
        if refused:
            remedy = "remove that folder to start afresh"
        raise ConfigError(
            f"{resolved.config.output} holds a run with other settings: "
            f"{'; '.join(map(str, harmful))}. Choose another --output, or {remedy}"
        )


def environment(resolved: ResolvedConfig) -> dict[str, object]:
    """Return the facts besides the config that a run's numbers depend on."""
    config = resolved.config
    device = pick_device(config.device)
    # A GPU runs none of our compiled operations, so none is built for it.
    on_cpu = device.type == "cpu"
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    return {
        "folder": str(resolved.folder),
        "covey": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "platform": platform.platform(),
        "machine": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": "compiled" if available(dtype, device) else "torch",
        "library": operations_library() if on_cpu else None,
        "products": {name: list(kinds) for name, kinds in products().items()} if on_cpu else {},
        "threads": config.threads or available_threads(processes=on_this_machine()),
        "processes": world_size(),
        **{name: _version(name) for name in PACKAGES},
    }


def update_environment(output: Path, **facts: object) -> None:
    """Add facts to the record of a run's environment, if it has one, or replace them."""
    record = read_environment(output)
    if record is not None:
        write_file(output / "env.json", sealed({**record, **facts}))


def operations_library() -> str | None:
    """Return what names the compiled operations in use; None if torch computes all."""
    library = tested_kernels()
    return None if library is None else f"{library.instructions}, {library.origin}, sha256 {library.digest}"


@cache
def _version(package: str) -> str | None:
    """Return the version of an installed package; looking for all of them takes 0.1 s."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def changed_environment(before: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Return the facts about machine, versions and files that differ from the record."""
    # covey's kernels sum in an order that does not depend on the number of threads. Library products do not
    # guarantee that, so the number of threads is safe only if no product uses them.
    own_kernels = before.get("kernels") == current.get("kernels") == "compiled"
    same_for_any = own_kernels and not any(current.get("products", {}).values())
    facts: list[Difference] = []
    for name in ENVIRONMENT:
        old = before.get(name)
        new = current.get(name)
        if old != new and name in ("data", "reference", "tokenizer"):
            facts.append(_since_then(name, "changed"))
        elif old != new:
            safe = name == "threads" and same_for_any
            facts.append(
                Difference(name, f"{name} is {old} there, {new} here", "safe" if safe else BREAKS_EXACTNESS)
            )
    files = changes(before.get("files", {}), current["files"])
    return [*facts, *(_since_then(name, what) for name, what in files.items())]


def differences_to_record(
    resolved: ResolvedConfig, has_begun: bool, current: Mapping[str, object]
) -> list[Difference]:
    """Return the differences from the last process of this run; a missing record counts as one."""
    output = resolved.config.output
    before = read_environment(output)
    differences = changed_settings(resolved)
    if before is not None:
        differences += changed_environment(before, current)
    collects = resolved.config.method in EXAMPLE_SAMPLERS
    if has_begun and collects and any(d.name in ("data", "tokenizer") for d in differences):
        raise ConfigError(
            f"{output}: the data have changed since its first completions were sampled, so its examples "
            "would mix old and new rows. Restore the data, or choose another --output"
        )
    if has_begun:
        records = ((output / "env.json", before), (output / "config.yaml", recorded_settings(output)))
        missing = [str(path) for path, record in records if record is None]
        differences += [_since_then(path, "is gone") for path in missing]
    return differences
