"""A run by its folder: the config it was started with, and the model it has arrived at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from covey.config.load import Loaded, load
from covey.insight.explain import Remark, Setting, explain, settings_of, unknown
from covey.store.commit import damage
from covey.store.folder import read_stream
from covey.types import ConfigError


def load_run(folder: Path, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None) -> Loaded:
    """The config of a run, or of a pipeline's last stage, with the model it ended with.

    While it has not ended, that is the newest checkpoint. Overrides and values win, also for `model`. Raises
    ConfigError where there is no run, or no model yet.
    """
    stage = last_stage(folder)
    loaded = load_recorded(stage, overrides, values)
    if "model" in (values or {}) or loaded.origins.get("model", "").startswith("--"):
        return loaded
    if (final := stage / "final").is_dir():
        return replace(loaded, config=loaded.config.model_copy(update={"model": str(final.resolve())}))
    checkpoints = sorted((stage / "checkpoints").glob("step_*"), reverse=True)
    newest = next((c for c in checkpoints if damage(c) is None), None)
    if newest is None:
        raise ConfigError(f"{stage}: no model yet: neither final/ nor a whole checkpoint; let it train on")
    loaded.notes.append(f"{stage} has not ended: this is {newest.name}")
    return replace(loaded, checkpoint=newest)


def load_recorded(
    folder: Path, overrides: Sequence[str] = (), values: Mapping[str, Any] | None = None
) -> Loaded:
    """The config a run was started with. Raises ConfigError where there is no run."""
    if not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder}: no run in this folder (it has no config.yaml)")
    origin = _origin(folder)
    here = origin if origin.is_dir() else Path.cwd()
    loaded = load(folder / "config.yaml", overrides, values, here)
    if here != origin:
        loaded.notes.append(f"{origin}, where {folder} was started, is gone: relative paths are from {here}")
    return loaded


def explain_run(folder: Path) -> tuple[Path, list[Remark]]:
    """The last stage of a run, and what stands out in its metrics."""
    stage = last_stage(folder)
    setting: Setting = unknown
    unread: list[Remark] = []
    try:
        setting = settings_of(load_recorded(stage))
    except ConfigError as error:
        unread = [Remark(f"the config cannot be read, so advice may name what is set already: {error}", "")]
    metrics, evals = (read_stream(stage, f"{name}.jsonl") for name in ("metrics", "evals"))
    return stage, [*explain(metrics, evals, setting), *unread]


def last_stage(folder: Path) -> Path:
    """The folder itself if a run is in it, else that of the last stage a pipeline has begun."""
    if (folder / "config.yaml").exists():
        return folder
    stages = [p.parent for p in folder.glob("*-*/config.yaml") if p.parent.name.partition("-")[0].isdecimal()]
    if not stages:
        raise ConfigError(f"{folder}: no run in this folder (it has no config.yaml, nor have stages in it)")
    return max(stages, key=lambda p: int(p.name.partition("-")[0]))


def _origin(stage: Path) -> Path:
    """The folder relative paths of the config were meant from."""
    try:
        return Path(json.loads((stage / "env.json").read_text())["folder"])
    except (OSError, ValueError, KeyError):
        return Path.cwd()
