"""The folders of a pipeline's stages: each result follows from those before it, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from covey.config.load import ResolvedConfig
from covey.errors import CheckpointError
from covey.insight.result import read_result
from covey.runs.folder import RESULT, checkpoints, step_of
from covey.runs.reader import stages_in
from covey_verify.errors import ConfigError


def folder_name(number: int, stage: ResolvedConfig) -> str:
    """Return the name of a stage's folder, such as 1-sft; ``number`` counts from 1."""
    return f"{number}-{stage.config.method}"


def refuse_other_stages(home: Path, stages: Sequence[ResolvedConfig]) -> None:
    """Raise ConfigError if a folder holds runs that are no part of these stages.

    Every command that is given the folder would count them as part of the run, or take them for it.
    """
    expected = {folder_name(number, stage) for number, stage in enumerate(stages, start=1)}
    single = len(stages) == 1
    others = [s.name for s in stages_in(home) if single or s.name not in expected]
    if others:
        what = "has no stages" if single else f"has {', '.join(sorted(expected))}"
        raise ConfigError(
            f"{home} holds {', '.join(others)} of another config; this one {what}. Remove them, or choose "
            "another --output"
        )
    if not single and (home / "config.yaml").exists():
        raise ConfigError(
            f"{home} holds a run of one stage, and commands that are given {home} would take it for the last "
            "of these stages. Choose another --output, or remove that folder to start afresh"
        )


def refuse_stale_stages(stage: ResolvedConfig, later: Sequence[ResolvedConfig]) -> None:
    """Raise CheckpointError if a stage has a step to make though a later one began from its result."""
    output = stage.config.output
    if not later or _steps_made(output) >= stage.config.train.steps:
        return  # at most a lost model is written again, and it is the same
    stale = {output.resolve()}
    for after in later:
        # Directly, or by way of a stage between them.
        if stale.isdisjoint(_read_by(after)):
            continue
        folder = after.config.output
        if (folder / "config.yaml").exists():
            raise CheckpointError(
                f"{folder} began from the result of {output}, and would not follow from one of more or other "
                f"steps. Remove {folder} and the stages after it, or choose another --output"
            )
        stale.add(folder.resolve())


def _steps_made(output: Path) -> int:
    if (output / RESULT).exists():
        return read_result(output).steps
    saved = checkpoints(output)  # a stop while a lost model was written again leaves no result
    return step_of(saved[-1]) if saved else 0


def _read_by(stage: ResolvedConfig) -> Iterator[Path]:
    """Yield the folders that a stage's config reads a model, examples or a reward's model from."""
    config = stage.config
    rewards = (value for spec in config.rewards if isinstance(spec, Mapping) for value in spec.values())
    models = [config.model, *(value.get("model") for value in rewards if isinstance(value, Mapping))]
    yield from (Path(model).parent for model in models if isinstance(model, str))
    yield from config.data.examples
