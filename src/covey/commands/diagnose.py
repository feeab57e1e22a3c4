"""`covey diagnose`: continue a run from one of its checkpoints under several changes, and compare.

Each trial is a run in a folder of its own beside the run, which stays as it is. The same command again
continues: a trial that has ended is not repeated.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from covey.commands.scoring import named_rewards
from covey.config.load import resolved_yaml
from covey.config.start import Start
from covey.errors import EXIT_FILE, CheckpointError, GuardStop, Stopped
from covey.insight.findings.finding import Finding
from covey.insight.findings.settings import settings_of
from covey.insight.findings.view import WINDOW
from covey.insight.findings.watch import explain_run
from covey.insight.rescore import rescore
from covey.insight.trials import (
    UNCHANGED,
    Change,
    TrialResult,
    changes_worth_trying,
    findings_since,
    trials_of,
)
from covey.runs.archive import ARCHIVE
from covey.runs.atomic import discard, link, make_folder
from covey.runs.compatibility import effect_of_change
from covey.runs.estimates import gain
from covey.runs.folder import CURVE, LOCK, RESULT, checkpoints, read_numbers, step_of
from covey.runs.owner import OWNER
from covey.runs.reader import last_stage, load_recorded, resumable
from covey.runs.rollbacks import ROLLBACKS
from covey.runs.trust import write_own
from covey.system.console import RunConsole
from covey.system.signals import StopSignal
from covey.system.text import duration
from covey.training.observer import Observer, ObserverRequest
from covey.training.options import RunOptions
from covey.training.pipeline import run_in_folder
from covey_verify.errors import ConfigError, CoveyError

STEPS = 10
"""Smallest number of steps of a trial, unless the user says otherwise."""
MAX_NAME_LENGTH = 80
"""Characters of a folder's name before it is shortened."""
LINKED = ("rollouts", "checkpoints")
"""Folders of a run whose files nobody changes in place."""
NOT_COPIED = (
    *(*LINKED, "final", RESULT, EXIT_FILE, CURVE, LOCK, OWNER, "sync", "report.html", "export"),
    *(ROLLBACKS, ARCHIVE),
)
"""Entries of a run's folder that are linked, or that say how it ended."""
QUIETLY = (
    *("--train.save_every=1000000000", "--train.stop_at=null", "--eval.every=0", "--train.final=last"),
    "--guards.on_finding=report",
)
"""A trial is measured at its end only, and nobody continues it."""


@dataclass(frozen=True)
class Plan:
    """The trials of a run: where they begin, how long they are and what they change."""

    stage: Path
    home: Path
    """Folder of the trials."""
    begun: int
    """Number of steps done where the trials begin; 0: the run's first model."""
    steps: int
    """Number of steps of each trial."""
    changes: Sequence[Change]
    trust: bool = False

    def folder(self, change: Change | None) -> Path:
        """Return the folder of a change's trial; None is the unchanged one."""
        if change is None:
            return self.home / UNCHANGED
        name = change.line.replace(": ", "=")
        plain = re.sub(r"[^\w.+=-]+", "_", name)[:MAX_NAME_LENGTH]
        # A name that lost characters gets a hash, so that two changes never share a folder.
        digest = "" if plain == name else f",{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return self.home / f"{plain}{digest}"


class Until(Observer):
    """Ends a run after a number of steps; `train.steps`, on which the learning rate depends, stays."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_ends(self, step: int, _metrics: Mapping[str, float]) -> ObserverRequest:
        """Wish for the end once there are enough steps."""
        return ObserverRequest(stop=step >= self.step)


class ProgressOnly(RunConsole):
    """Shows how far a trial is, without the remarks that every trial would repeat."""

    def __init__(self, until: int, quiet: bool) -> None:
        super().__init__(quiet)
        self.until = until

    def begin(self, title: str, steps: int, first: int = 0, *_: object, **__: object) -> None:
        """Start to show a trial, which ends before ``steps``."""
        super().begin(title, min(steps, self.until), first)

    def say(self, text: str, style: str = "") -> None:
        """Print lines of progress, which begin with the title, and nothing else."""
        if self.title and text.startswith(self.title):
            super().say(text, style)


def plan_trials(
    run: Path, settings: Sequence[str] = (), start: int | None = None, steps: int = 0, trust: bool = False
) -> Plan:
    """Return the trials of a run. ``settings``: changes as `key=value`, instead of covey's proposals.

    Without ``start`` they begin at the last checkpoint before the first severe finding (or, without one, the
    first warning), else with the run's first model. Without ``steps`` they reach the step of that finding.
    Raises ConfigError for a run that is not of reinforcement, or has no such checkpoint.
    """
    stage = last_stage(run)
    resolved = load_recorded(stage, trust=trust)
    if resolved.config.method != "rl":
        raise ConfigError(
            f"{stage}: `covey diagnose` needs a run of method rl, and this one has {resolved.config.method}"
        )
    findings = explain_run(run).findings
    trouble = _first_trouble(findings)
    last = resolved.config.train.steps
    # A trial needs steps to do: none is left after the last one.
    starts = sorted(step_of(path) for path in checkpoints(stage) if step_of(path) < last)
    if start not in (None, 0, *starts):
        existing = f"checkpoints after {', '.join(map(str, starts))} steps" if starts else "no checkpoint"
        raise ConfigError(f"--start {start}: {stage} has {existing}; 0 is its beginning")
    before = [step for step in starts if trouble is not None and step < trouble]
    first = start if start is not None else max(before, default=0)
    reach = 0 if trouble is None else trouble - first
    if settings:
        changes = [_own_change(text) for text in settings]
    else:
        changes = changes_worth_trying(stage, findings, settings_of(resolved), resolved.config.seed)
    home = run.with_name(f"{run.resolve().name}-diagnosis") / f"step_{first}"
    length = min(steps or max(STEPS, reach), last - first)
    possible = _possible(stage, changes, first, trust, strict=bool(settings))
    return Plan(stage, home, first, length, possible, trust)


def _first_trouble(findings: Sequence[Finding]) -> int | None:
    """Return the step of the first severe finding, else of the first warning."""
    for severity in ("severe", "warning"):
        steps = [f.step for f in findings if f.severity == severity]
        if steps:
            return min(steps)
    return None


def _own_change(text: str) -> Change:
    key, equals, value = text.removeprefix("--").partition("=")
    if not (key and equals and value):
        raise ConfigError(f"--change {text!r}: write a setting and its value, such as train.lr=1e-6")
    return Change(f"{key.replace('-', '_')}: {value}", "yours")


def _possible(stage: Path, changes: Sequence[Change], first: int, trust: bool, strict: bool) -> list[Change]:
    """Return the changes that the config accepts, and that a run can take after ``first`` steps.

    If ``strict``, raises ConfigError for the first that is neither.
    """
    accepted = []
    for change in changes:
        try:
            if first and effect_of_change(change.key) == "refused":
                raise ConfigError(f"{change.key} cannot change in the middle of a run: try it with --start 0")
            load_recorded(stage, (*QUIETLY, change.option), trust=trust)
        except ConfigError:
            if strict:
                raise
        else:
            accepted.append(change)
    return accepted


def outlook(plan: Plan) -> str:
    """Return what the trials will take, from the run's own times."""
    times = [t["elapsed"] for t in read_numbers(plan.stage, "timings.jsonl") if "elapsed" in t]
    trials = len(plan.changes) + 1
    took = f", about {duration(trials * plan.steps * times[-1] / len(times))}" if times else ""
    where = f"after {plan.begun} steps" if plan.begun else "with the run's first model"
    steps = "1 step" if plan.steps == 1 else f"{plan.steps} steps"
    return f"{trials} trials of {steps} that begin {where}{took}, in {plan.home}"


def diagnose(plan: Plan, console: RunConsole, stop: StopSignal) -> tuple[list[TrialResult], tuple[str, ...]]:
    """Make the missing trials. Return the result of each, and the findings of the unchanged trial.

    Raises Stopped, with everything kept, and any error of the unchanged trial except a guard's.
    """
    everything: list[Change | None] = [None, *plan.changes]
    for number, change in enumerate(everything, start=1):
        console.say(f"trial {number} of {len(everything)}: {UNCHANGED if change is None else change.line}")
        try:
            stop.check()
            _try(plan, change, console, stop)
        except Stopped as stopped:
            raise Stopped(
                f"{stopped}. {number - 1} of {len(everything)} trials are complete; repeat the command to "
                "continue"
            ) from None
        except GuardStop as error:
            console.say(f"a guard ended it: {str(error).partition('. ')[0]}")  # which is a result
        except CoveyError as error:
            if change is None:
                raise
            console.say(f"it failed: {error}", "red")
    unchanged = plan.folder(None)
    folders = {change: plan.folder(change) for change in plan.changes}
    return trials_of(folders, unchanged, plan.begun, plan.steps), findings_since(unchanged, plan.begun)


def answers_of_others(plan: Plan) -> str:
    """Return what the unchanged trial's completions earn for other rows' answers and for their own, in words.

    If that is as much, answers may not belong to their prompts. Empty if no reward depends on the answer, or
    nothing can be scored again.
    """
    try:
        rewards = named_rewards([str(plan.stage)], plan.trust)
        groups = rescore(plan.folder(None), rewards, WINDOW, permuted=True, trust=plan.trust)
    except CoveyError:
        return ""
    with_own = np.array([np.nanmean(group.old) for group in groups])
    with_others = np.array([np.nanmean(group.new) for group in groups])
    if (with_own == with_others).all():
        return ""
    change = gain(with_own, with_others, float(np.ptp([with_own, with_others])), is_fraction=False)
    belong = "answers belong" if change.high < 0 else "no answer is correct yet, or answers do not belong"
    paid_others = f"{np.nanmean(with_others):.2g} with the answers of other rows"
    paid_own = f"{np.nanmean(with_own):.2g} with their own"
    return f"completions earn {paid_others}, {paid_own} ({change}): {belong} to their prompts"


def _try(plan: Plan, change: Change | None, console: RunConsole, stop: StopSignal) -> None:
    """Make one trial, unless it has ended; then only its logs stay."""
    folder = plan.folder(change)
    until = plan.begun + plan.steps
    complete = (folder / RESULT).exists() and len(read_numbers(folder, "metrics.jsonl")) >= until
    if complete or not resumable(folder):
        return
    if (folder / RESULT).exists():  # of fewer steps, and without a checkpoint to continue from
        discard(folder)
    if not folder.exists():
        _fork(plan, folder)
    settings = (*QUIETLY, *([change.option] if change is not None else ()))
    # It knows the run that it records, and computes as that run did: the same kernels and rounding.
    resolved = load_recorded(plan.stage, settings, {"output": folder}, plan.trust)
    start = Start(plan.stage / "config.yaml", settings, {"output": str(folder)}, resolved.folder)
    options = RunOptions(changes=True, start=start.record(), home=folder, observer=Until(until))
    try:
        run_in_folder(resolved, ProgressOnly(until, console.console.quiet), stop, options)
    except GuardStop:  # the same steps would lead to the same end; after any other error a trial continues
        _remove_weights(folder)
        raise
    _remove_weights(folder)


def _remove_weights(folder: Path) -> None:
    """Remove the files that are as large as the model and that nobody will read."""
    for name in ("final", "checkpoints"):
        with suppress(OSError):
            discard(folder / name)


def _fork(plan: Plan, folder: Path) -> None:
    """Copy the run's folder as of ``plan.begun`` steps: the checkpoint says which log lines belong to it.

    Checkpoint and completions, which may be large, are linked.
    """
    make_folder(plan.home)
    if not plan.begun:
        return
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    checkpoint = next((p for p in checkpoints(plan.stage) if step_of(p) == plan.begun), None)
    if checkpoint is None:
        raise CheckpointError(f"{plan.stage}: the checkpoint after {plan.begun} steps is gone")
    shutil.copytree(plan.stage, temporary, ignore=lambda where, names: _left_out(plan.stage, where, names))
    for folder_of_run in (plan.stage / "rollouts", checkpoint):
        target = temporary / folder_of_run.relative_to(plan.stage)
        shutil.copytree(folder_of_run, target, copy_function=link)
    # With the paths of a pipeline's stage written out: from here they would lead elsewhere.
    unchanged = load_recorded(plan.stage, QUIETLY, {"output": folder}, plan.trust)
    write_own(temporary, "config.yaml", resolved_yaml(unchanged))
    temporary.rename(folder)


def _left_out(stage: Path, where: str, names: Sequence[str]) -> set[str]:
    return set(names) & set(NOT_COPIED) if Path(where) == stage else set()
