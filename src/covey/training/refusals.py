"""Refusals: the check of all stages of a pipeline before anything is done in any of their folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from covey.config.load import ResolvedConfig
from covey.config.methods import EXAMPLE_METHODS, METHODS
from covey.errors import CheckpointError
from covey.insight.result import Result, read_result
from covey.runs.compatibility import changed_settings, refuse_other_config
from covey.runs.folder import RESULT, STREAMS, checkpoints, ended_otherwise, latest_checkpoint, step_of
from covey.runs.inputs import refuse_other_inputs
from covey.runs.reader import recorded_settings, stages_in
from covey.system.console import RunConsole
from covey.system.integrity import damage
from covey.system.processes import on_rank_zero
from covey.tasks.source import EXAMPLES_FILE
from covey.training.options import RunOptions
from covey.training.rollback import complete_rollback, with_rollbacks
from covey.training.stage_folders import folder_name
from covey_verify.errors import ConfigError


def check_resume(
    home: Path, stages: Sequence[ResolvedConfig], console: RunConsole, options: RunOptions
) -> list[Result | None]:
    """Return the result of each stage, None for one that has something left to do.

    Raises ConfigError or CheckpointError if a folder holds a run that cannot, or should not, continue as one
    of these stages. This is said before the first stage begins, since a stage may take days.
    """
    refuse_file(home)
    refuse_other_stages(home, stages)
    # An earlier process may have rolled back after a finding, and continued with another setting.
    currents = [with_rollbacks(stage) for stage in stages]
    for current in currents:
        complete_rollback(current)
        refuse_other_config(current, changes=options.changes)
    results = [on_rank_zero(partial(finished_result, current, console)) for current in currents]
    for number, (current, result) in enumerate(zip(currents, results, strict=True), start=1):
        last = number == len(stages)
        # The result of the last stage is returned, and has to be that of the inputs given.
        if not options.changes and (options.same_inputs or (result is not None and last)):
            refuse_other_inputs(current, ended=result is not None)
        if result is not None:
            refuse_late_changes(current)
        else:
            refuse_stale_stages(current, currents[number:])
    return results


def refuse_file(home: Path) -> None:
    """Raise ConfigError if a folder for a run cannot exist, because its path or one above it is a file."""
    # Path.exists would raise for a name that is too long, and not see a broken link.
    present = next(path for path in (home, *home.absolute().parents) if os.path.lexists(path))
    if not present.is_dir():
        raise ConfigError(f"output: {present} is not a folder; choose another --output")


def refuse_other_stages(home: Path, stages: Sequence[ResolvedConfig]) -> None:
    """Raise ConfigError if a folder holds runs that do not belong to these stages.

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


def finished_result(stage: ResolvedConfig, console: RunConsole) -> Result | None:
    """Return the result of a stage that is complete and whose model exists.

    None if something is left to do: to begin, to continue, to train more steps than before, or to write a
    lost model again. Raises CheckpointError if that is impossible.
    """
    output = stage.config.output
    if not (output / RESULT).exists():
        return None
    result = read_result(output)
    # The result records bytes and hashes of the logs; a log that differs was damaged or continued.
    for name in (*STREAMS, EXAMPLES_FILE):
        complaint = ended_otherwise(output, name)
        if complaint:
            raise CheckpointError(f"{complaint}. Restore the file, or start a new run")
    final = output / (EXAMPLES_FILE if stage.config.method in EXAMPLE_METHODS else "final")
    needs_steps = _needs_steps(stage, result)
    if not needs_steps and final.exists():
        problem = damage(final, ("config.json",)) if final.is_dir() else None
        if problem:
            raise CheckpointError(f"{problem}. Restore the file, or remove {final} to write it again")
        return replace(result, folder=output)
    what = f"the config now asks for {stage.config.train.steps}" if needs_steps else f"it lacks {final}"
    checkpoint, _ = latest_checkpoint(output)
    if checkpoint is None:
        raise CheckpointError(
            f"{output} ended after {result.steps} steps and {what}, but no checkpoint is left to continue "
            "from. Start a new run from its model, or restore the checkpoint"
        )
    console.say(f"{output} ended after {result.steps} steps and {what}; continuing from {checkpoint.name}")
    return None


def _needs_steps(stage: ResolvedConfig, result: Result) -> bool:
    """Whether the config now asks a stage that has ended for more steps."""
    train = stage.config.train
    # The method `filter` selects rows, without steps.
    if METHODS[stage.config.method].loop is None or result.steps >= train.steps:
        return False
    recorded = (recorded_settings(stage.config.output) or {}).get("train", {})
    # A run that ended early had reached ``stop_at``: only another ``stop_at`` gives it more to do.
    stopped_early = train.stop_at is not None and result.steps < recorded.get("steps", 0)
    return not (stopped_early and train.stop_at == recorded["stop_at"])


def refuse_late_changes(stage: ResolvedConfig) -> None:
    """Raise ConfigError if settings were changed that a completed stage can no longer follow."""
    late = [d for d in changed_settings(stage) if d.effect != "safe" or d.name == "train.final"]
    if late:
        raise ConfigError(
            f"{stage.config.output} has ended, so no step is left for these changes: "
            f"{'; '.join(map(str, late))}. Set more steps too (--train.steps), or choose another "
            "--output; `covey eval` measures its model"
        )


def refuse_stale_stages(stage: ResolvedConfig, later: Sequence[ResolvedConfig]) -> None:
    """Raise CheckpointError if a stage has steps left although a later one began from its result."""
    output = stage.config.output
    if not later or _steps_made(output) >= stage.config.train.steps:
        return  # if a lost model is written again, it is the same model
    stale = {output.resolve()}
    for after in later:
        # A stage reads the result directly, or by way of a stage between them.
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
    # No result is left if a stop came while a lost model was being written again.
    saved = checkpoints(output)
    return step_of(saved[-1]) if saved else 0


def _read_by(stage: ResolvedConfig) -> Iterator[Path]:
    """Yield the folders that a stage's config reads a model, examples or a reward's model from."""
    config = stage.config
    rewards = (value for spec in config.rewards if isinstance(spec, Mapping) for value in spec.values())
    models = [config.model, *(value.get("model") for value in rewards if isinstance(value, Mapping))]
    yield from (Path(model).parent for model in models if isinstance(model, str))
    yield from config.data.examples
