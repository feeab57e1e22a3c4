"""The reader of a run by its folder, without its lock: its config, its records and its newest model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from covey.config.algorithm import own_code
from covey.config.load import ResolvedConfig, load_config, replace_in_texts
from covey.config.schema import Config
from covey.config.section import Section
from covey.config.sources import MAX_BYTES, parse_yaml
from covey.errors import EXIT_FILE, CheckpointError, GuardStop
from covey.runs.folder import RESULT, latest_checkpoint
from covey.runs.trust import is_own, refuse_others_code
from covey.system.integrity import read_sealed, unsealed_text
from covey.system.opening import RECORD_BYTES, load_json, read_below
from covey.system.text import Say
from covey_verify.errors import ConfigError, CoveyError

T = TypeVar("T")
EARLIER_STAGE = re.compile(r"^\.\./(?=\d+-[a-z_]+(/final)?$)")
"""Prefix of a path in a stage's record that names the output of an earlier stage."""


class RunModel(NamedTuple):
    """The newest model of a run: its final one, or its newest checkpoint."""

    folder: Path

    @classmethod
    def of(cls, stage: Path) -> RunModel | None:
        """Return the model of a stage; None if it has none yet."""
        final = stage / "final"
        folder = final if final.is_dir() else latest_checkpoint(stage)[0]
        return cls(folder.resolve()) if folder is not None else None

    @property
    def is_final(self) -> bool:
        """Whether the run has ended with it."""
        return self.folder.name == "final"

    @property
    def is_whole(self) -> bool:
        """Whether it is a model by itself: a checkpoint of adapters alone is not."""
        return self.is_final or (self.folder / "config.json").is_file()

    def put_into(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """Return a run's config with this model in place of its own."""
        # Adapters are put on the base model, which the config keeps.
        if not self.is_whole:
            return replace(resolved, checkpoint=self.folder)
        config = resolved.config.model_copy(update={"model": str(self.folder)})
        return replace(resolved, config=config, checkpoint=None)


def load_run(
    folder: Path,
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    trust: bool = False,
    names_only: bool = True,
) -> ResolvedConfig:
    """Return the config of a run, or of a pipeline's last stage, with the model it ended with.

    Until it has ended, that is the newest checkpoint. Overrides and values win, also for `model`. With
    ``names_only`` the functions of its algorithm stay names. Raises ConfigError if there is no run or no
    model yet, and, without ``trust``, if somebody else's run names code.
    """
    stage = last_stage(folder)
    values = values or {}
    newest = RunModel.of(stage)
    model_of_run = {"model": str(newest.folder)} if newest is not None and newest.is_whole else {}
    settings = (stage, overrides, {**model_of_run, **values})
    resolved = load_for_reading(*settings) if names_only else load_recorded(*settings, trust)
    refuse_others_code(resolved, stage, trust or is_own(stage), algorithm=False)
    # Another model was named, so the run's own is not read.
    if "model" in values or resolved.origins.get("model", "").startswith("--"):
        return resolved
    if newest is None:
        raise ConfigError(
            f"{stage}: there is no model yet, neither final/ nor a complete checkpoint; let it train longer"
        )
    if not newest.is_final:
        resolved.notes.append(f"{stage} has not ended: this is {newest.folder.name}")
    return newest.put_into(resolved)


def retry_with_newest(resolved: ResolvedConfig, work: Callable[[ResolvedConfig], T], say: Say) -> T:
    """Return the result of ``work`` on a run's model.

    A run that is training removes older checkpoints. If the one in use disappears before it is read, the work
    starts again with the newest.
    """
    while True:
        try:
            return work(resolved)
        except (CoveyError, OSError):
            removed = _removed_checkpoint(resolved)
            newest = RunModel.of(resolved.recorded_run) if resolved.recorded_run is not None else None
            if removed is None or newest is None:
                raise
        say(f"note: the running run has removed {removed}: this is {newest.folder.name}")
        resolved = newest.put_into(resolved)


def _removed_checkpoint(resolved: ResolvedConfig) -> str | None:
    """Return the name of the checkpoint whose weights were to be read, if it no longer exists."""
    weights = resolved.checkpoint or resolved.config.model
    if resolved.recorded_run is None or not isinstance(weights, str | Path):
        return None
    folder = Path(weights)
    of_run = folder.parent == (resolved.recorded_run / "checkpoints").resolve()
    return folder.name if of_run and not folder.is_dir() else None


def with_own_model(resolved: ResolvedConfig, stage: Path) -> ResolvedConfig:
    """Return a run's config with its newest model, if that is a complete one."""
    newest = RunModel.of(stage)
    return newest.put_into(resolved) if newest is not None and newest.is_whole else resolved


def load_recorded(
    folder: Path,
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    trust: bool = False,
) -> ResolvedConfig:
    """Return the config a run was started with, to compute with: the code that it names may be imported.

    Raises ConfigError if there is no run, and, without ``trust``, if somebody else's run names code.
    """
    # Read by names first, so that nothing is imported before the check of whose run it is.
    by_names = load_for_reading(folder, overrides, values)
    refuse_others_code(by_names, folder, trust or is_own(folder))
    if not own_code(by_names.algorithm):
        return by_names
    return _load_recorded(folder, overrides, values, names_only=False)


def load_for_reading(
    folder: Path, overrides: Sequence[str] = (), values: Mapping[str, object] | None = None
) -> ResolvedConfig:
    """Return the config a run was started with, for reading only. Raises ConfigError if there is no run.

    Functions of the algorithm stay names, and nothing that the config names is imported or opened.
    """
    return _load_recorded(folder, overrides, values, names_only=True)


def load_settings(folder: Path) -> ResolvedConfig:
    """Return the config a run was started with, for its numbers and names alone. Raises ConfigError.

    Objects that were given from Python are texts in it.
    """
    return _load_recorded(folder, (), None, names_only=True, settings_only=True)


def _load_recorded(
    folder: Path,
    overrides: Sequence[str],
    values: Mapping[str, object] | None,
    names_only: bool,
    settings_only: bool = False,
) -> ResolvedConfig:
    recorded = recorded_settings(folder)
    if recorded is None:
        raise ConfigError(f"{folder}: this folder has no run (no config.yaml)")
    origin = _origin(folder)
    base = origin if origin.is_dir() else Path.cwd()
    resolved = load_config(folder / "config.yaml", overrides, values, base, names_only, settings_only)
    config = resolved.config
    if folder.name.partition("-")[0].isdecimal():  # a pipeline's stage: from wherever the pipeline lies now
        config = _of_stage(config, folder)
    # The config's own notes were told when the run began.
    moved = f"{origin}, where {folder} was started, is gone: relative paths are from {base}"
    notes = [moved] if base != origin else []
    return replace(resolved, config=config, notes=notes, recorded_run=folder)


def _of_stage(config: Config, folder: Path) -> Config:
    """Return a stage's config with full paths to the outputs of earlier stages."""
    plain = {
        "model": config.model,
        "rewards": config.rewards,
        "examples": list(map(str, config.data.examples)),
    }
    absolute = {
        name: replace_in_texts(value, EARLIER_STAGE, f"{folder.resolve().parent}/")
        for name, value in plain.items()
    }
    data = config.data.model_copy(update={"examples": tuple(map(Path, absolute.pop("examples")))})
    return config.model_copy(update={**absolute, "data": data})


def last_stage(folder: Path) -> Path:
    """Return the folder itself if it holds a run, else the last stage that a pipeline has begun."""
    if (folder / "config.yaml").exists():
        return folder
    stages = stages_in(folder)
    if not stages:
        configs = (p for where in ("*/config.yaml", "*/*-*/config.yaml") for p in folder.glob(where))
        below = sorted({p.relative_to(folder).parts[0] for p in configs})
        runs = f". Runs are below it: {', '.join(below[:8])}{', ...' if below[8:] else ''}" if below else ""
        raise ConfigError(f"{folder}: this folder has no run (no config.yaml, nor stages with one){runs}")
    return stages[-1]


def stages_in(folder: Path) -> list[Path]:
    """Return the folders of a pipeline's stages that have begun, in their order."""
    folders = (p.parent for p in folder.glob("*-*/config.yaml") if not p.parent.is_symlink())
    return sorted((p for p in folders if p.name.partition("-")[0].isdecimal()), key=stage_number)


def stage_method(stage: Path) -> str:
    """Return the method of a pipeline's stage, from the name of its folder."""
    return stage.name.partition("-")[2]


def stage_number(stage: Path) -> int:
    """Return the number of a stage in its pipeline, from the name of its folder."""
    return int(stage.name.partition("-")[0])


def _origin(stage: Path) -> Path:
    """Return the folder from which relative paths of the config were given."""
    recorded = read_environment(stage)
    return Path(recorded["folder"]) if recorded else Path.cwd()


def recorded_settings(output: Path) -> dict[str, Any] | None:
    """Return the settings with which the run in a folder began; None without a run.

    Raises CheckpointError if they are damaged.
    """
    path = output / "config.yaml"
    if not path.exists():
        return None
    try:
        recorded = recorded_yaml(output)
    except (ConfigError, CheckpointError) as error:
        recorded = {}
        why = str(error)
    else:
        lacking = sorted(set(Config.model_fields) - {"stages"} - set(recorded)) or _missing_settings(recorded)
        why = f"{path}: it lacks {', '.join(lacking)}" if lacking else ""
    if why:
        raise CheckpointError(
            f"{why}. The record of the run's settings is damaged, or of another version of covey: restore "
            "the file, or remove it to continue without a comparison"
        )
    return recorded


def recorded_method(stage: Path) -> str:
    """Return the method of a recorded run; empty if its settings cannot be read."""
    try:
        return str((recorded_settings(stage) or {}).get("method", ""))
    except CheckpointError:
        return ""


def recorded_yaml(folder: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml. Raises ConfigError, or CheckpointError for damage."""
    path = folder / "config.yaml"
    try:
        text = unsealed_text(read_below(folder, path.name, MAX_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; restore the file") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return parse_yaml(text, path)[0]


def _missing_settings(recorded: Mapping[str, Any]) -> list[str]:
    """Return the missing settings of those sections that every record has; empty if it is complete."""
    # Sections with a default are always written out whole; others, as lora, may be None.
    always = [s for s, field in Config.model_fields.items() if isinstance(field.default, Section)]
    settings = ((s, name) for s in always for name in type(Config.model_fields[s].default).model_fields)
    return sorted(
        f"{s}.{name}"
        for s, name in settings
        if not isinstance(recorded[s], Mapping) or name not in recorded[s]
    )


def read_environment(output: Path) -> dict[str, Any] | None:
    """Return the environment that an earlier process of a run recorded; None if there is none.

    Raises CheckpointError if it is damaged.
    """
    path = output / "env.json"
    if not path.exists():
        return None
    return read_sealed(
        path, dict[str, Any], "Put the file back, or remove it to continue without a comparison"
    )


def read_conclusion(stage: Path) -> str:
    """Return the sentence of a run's conclusion; empty if it has not ended or had no held-out problems."""
    return str((conclusion_record(stage) or {}).get("sentence", ""))


def conclusion_record(stage: Path) -> dict[str, Any] | None:
    """Return a run's conclusion; None if it has not ended or had no held-out problems."""
    conclusion = _end(stage).get("conclusion")
    return dict(conclusion) if isinstance(conclusion, Mapping) else None


def read_ending(stage: Path) -> str:
    """Return why a run ended early and how to continue it; empty if it did not end early.

    A record that cannot be read is reported in the same place.
    """
    # A pipeline records the end of its process in its own folder, above the stages.
    homes = (stage, stage.parent) if stage.name.partition("-")[0].isdecimal() else (stage,)
    home = next((folder for folder in homes if (folder / EXIT_FILE).is_file()), None)
    if home is None or (stage / RESULT).exists():
        return ""
    try:
        record = load_json(read_below(home, EXIT_FILE, RECORD_BYTES))
        if record["exit_code"] == GuardStop.code:  # the same steps would lead to the same end
            return f"stopped by a guard: {record['error']}"
        return f"{record['error']}. Continue with: {record['resume_command']}"
    except (ValueError, KeyError, TypeError):
        return f"{home / EXIT_FILE} is damaged: why the run ended cannot be read"
    except CheckpointError as error:
        return str(error)


def read_remark(stage: Path) -> str:
    """Return the note in a run folder that another program wrote; usually empty."""
    return str(_end(stage).get("remark", ""))


def resumable(stage: Path) -> bool:
    """Whether a run may continue as it is. After a guard stopped it, it needs another setting first."""
    return not read_ending(stage).startswith("stopped by a guard")


def seconds_of(stage: Path, timings: Sequence[Mapping[str, object]]) -> float:
    """Return the seconds a run took: in total if it has ended, else until the last of its ``timings``."""
    elapsed = timings[-1].get("elapsed", 0.0) if timings else 0.0
    return float(_end(stage).get("seconds", elapsed))


def _end(stage: Path) -> dict[str, Any]:
    path = stage / RESULT
    return read_sealed(path, dict[str, Any], "Put it back, or remove it") if path.exists() else {}
