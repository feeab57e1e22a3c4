"""A stage that has ended: its result if nothing is left to do, and the settings that come too late for it."""

from __future__ import annotations

from dataclasses import replace

from covey.config.load import ResolvedConfig
from covey.config.methods import MAKES_EXAMPLES, METHODS
from covey.errors import CheckpointError
from covey.insight.result import Result, read_result
from covey.runs.compatibility import changed_settings
from covey.runs.folder import RESULT, STREAMS, ended_otherwise, latest_checkpoint
from covey.runs.reader import recorded_settings
from covey.system.console import RunConsole
from covey.system.integrity import damage
from covey.tasks.source import EXAMPLES
from covey_verify.errors import ConfigError


def finished_result(stage: ResolvedConfig, console: RunConsole) -> Result | None:
    """Return the result of a stage that is complete and whose model exists.

    None if something is left to do: to begin, to continue, to train more steps than before, or to write a
    lost model again. Raises CheckpointError if that is impossible.
    """
    output = stage.config.output
    train = stage.config.train
    if not (output / RESULT).exists():
        return None
    result = read_result(output)
    # The result records bytes and hashes of the logs; a log that differs was damaged or continued.
    for name in (*STREAMS, EXAMPLES):
        if complaint := ended_otherwise(output, name):
            raise CheckpointError(f"{complaint}. Restore the file, or start a new run")
    final = output / (EXAMPLES if stage.config.method in MAKES_EXAMPLES else "final")
    recorded = (recorded_settings(output) or {}).get("train", {})
    # A run that ended before its steps had reached ``stop_at``: only another ``stop_at`` gives it more to do.
    recorded_steps = recorded.get("steps")
    stopped_early = train.stop_at is not None and recorded_steps is not None and result.steps < recorded_steps
    same_goal = stopped_early and train.stop_at == recorded["stop_at"]
    steps = train.steps if METHODS[stage.config.method].loop else 0  # `filter` selects rows, without steps
    needs_steps = result.steps < steps and not same_goal
    if not needs_steps and final.is_file():
        return replace(result, folder=output)
    if not needs_steps and final.is_dir():
        if problem := damage(final, ("config.json",)):
            raise CheckpointError(f"{problem}. Restore the file, or remove {final} to write it again")
        return replace(result, folder=output)
    what = f"the config now asks for {train.steps}" if needs_steps else f"it lacks {final}"
    checkpoint, _ = latest_checkpoint(output)
    if checkpoint is None:
        raise CheckpointError(
            f"{output} ended after {result.steps} steps and {what}, but no checkpoint is left to continue "
            "from. Start a new run from its model, or restore the checkpoint"
        )
    console.say(f"{output} ended after {result.steps} steps and {what}; continuing from {checkpoint.name}")
    return None


def refuse_late_changes(stage: ResolvedConfig) -> None:
    """Raise ConfigError if settings were changed that a completed stage can no longer follow."""
    late = [d for d in changed_settings(stage) if d.effect != "safe" or d.name == "train.final"]
    if late:
        raise ConfigError(
            f"{stage.config.output} has ended, so no step is left for {'; '.join(map(str, late))}. Set more "
            "steps too (--train.steps), or choose another --output; `covey eval` measures its model"
        )
