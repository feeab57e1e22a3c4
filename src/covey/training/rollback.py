"""Rollback: after a finding, a run returns to an earlier state and continues with the finding's config line.

Decisions depend only on the logs, not on which checkpoints exist. A killed run therefore rolls back to the
same step as an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec

from covey.config.load import ResolvedConfig, resolved_yaml, with_settings
from covey.errors import GuardStop
from covey.insight.findings.finding import Finding
from covey.insight.findings.remedies import verdict_in
from covey.insight.findings.settings import UNKNOWN, settings_of
from covey.insight.findings.view import WIDEST, WINDOW, width_of
from covey.insight.result import Result
from covey.insight.trials import Change, TrialResult, compare_trial, describe_trial, late_half
from covey.runs.archive import archive_of, archive_steps
from covey.runs.atomic import sync
from covey.runs.best import best_evaluation
from covey.runs.compatibility import changed_settings, effect_of_change
from covey.runs.estimates import Evaluation, gains
from covey.runs.folder import RunFolder, read_numbers, read_stream
from covey.runs.journal import Journal
from covey.runs.rollbacks import Rollback, read_rollbacks, rollbacks_in_force, write_rollbacks
from covey.runs.trust import write_own
from covey.system.processes import on_rank_zero
from covey_verify.errors import ConfigError, DataError, RewardError

P = ParamSpec("P")


class RollbackDue(Exception):
    """The run rolls back, as the last line of its `rollbacks.jsonl` says."""


class Proposal(NamedTuple):
    """The rollback that a finding asks for, or the reason why it is refused; neither, if it asks for none."""

    rollback: Rollback | None = None
    refused: str = ""


def severe(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that roll a run back at once."""
    return [finding for finding in findings if finding.severity == "severe"]


def warnings_due(findings: Sequence[Finding], step: int) -> list[Finding]:
    """Return the warnings that are due at a step: those of WINDOW steps before.

    A warning may be a symptom, whose cause is found a little later.
    """
    return [f for f in findings if f.severity == "warning" and f.step + WINDOW == step]


def begin_rollback(
    resolved: ResolvedConfig, journal: Journal, findings: Sequence[Finding], steps: int
) -> bool:
    """Log and announce a rollback if one is due after ``steps`` steps. Return whether one is.

    One is due if the last change harms, or else for the first finding with a line to try, severe ones first.
    """
    run = resolved.config.output
    rollbacks = read_rollbacks(run)
    rollback = _undo_harm(run, rollbacks, steps)
    if rollback is None:
        rollback = _first_proposal(resolved, journal, findings, steps, rollbacks)
    if rollback is None:
        return False
    write_rollbacks(run, [*rollbacks, rollback])
    where = f"step {rollback.back_to}" if rollback.back_to else "the first model"
    what = f"without that: {rollback.sentence}" if rollback.undoes_last else f"with {rollback.line}"
    archive = archive_of(run, len(rollbacks) + 1)
    journal.say(f"rolling back to {where} {what}; the steps since are in {archive}")
    return True


def _first_proposal(
    resolved: ResolvedConfig,
    journal: Journal,
    findings: Sequence[Finding],
    steps: int,
    rollbacks: Sequence[Rollback],
) -> Rollback | None:
    """Return the rollback of the first finding that has one; say why those before it have none."""
    for finding in sorted(findings, key=lambda f: f.severity != "severe"):
        rollback, refused = proposal_after(resolved, finding, steps, rollbacks)
        if refused:
            journal.say(f"{finding.id}: no remedy tried: {refused}", "yellow")
        if rollback is not None:
            return rollback
    return None


def _undo_harm(run: Path, rollbacks: Sequence[Rollback], steps: int) -> Rollback | None:
    """Return the rollback that undoes the last change, if that harms by the step of its finding."""
    if not rollbacks or rollbacks[-1].undoes_last or steps != rollbacks[-1].step:
        return None
    last = rollbacks[-1]
    # If the change redefines "correct", accuracies are not comparable; only a missing signal shows harm.
    metrics_since = read_numbers(run, "metrics.jsonl")[last.back_to :]
    if all(m["groups/dead"] == 1 and m["groups/dead_correct"] < 0.5 for m in metrics_since):
        return _undo(last, steps, f"with {last.line} no group has different rewards")
    trial = _compare_change(run, rollbacks, len(rollbacks))
    if trial.effect != "harms":
        return None
    return _undo(last, steps, f"{last.line} harms, {describe_trial(trial)}")


def _undo(last: Rollback, steps: int, why: str) -> Rollback:
    """Return the rollback that drops the config line of the last one."""
    return Rollback(steps, last.finding, why, "", None, last.back_to)


def proposal_after(
    resolved: ResolvedConfig, finding: Finding, steps: int, earlier: Sequence[Rollback]
) -> Proposal:
    """Return what a finding after ``steps`` steps asks for.

    A note asks for nothing, and neither does a finding without a config line that changes what is computed.
    """
    change = Change(finding.remedy, finding.id)
    if finding.severity == "note" or not finding.remedy or effect_of_change(change.key) == "safe":
        return Proposal()
    lines = [rollback.line for rollback in earlier if not rollback.undoes_last]
    if len(lines) >= resolved.config.guards.max_rollbacks:
        return Proposal(refused=f"guards.max_rollbacks {len(lines)} is reached")
    if change.line in lines:
        return Proposal(refused=f"{change.line} was tried already")
    try:
        changed = with_settings(resolved, (change.option,))
    except ConfigError as error:
        return Proposal(refused=f"{change.line} does not fit its config: {error}")
    back_to = last_good_step(resolved, changed, steps)
    most = max(WIDEST, resolved.config.train.steps // 10)
    if finding.severity != "severe" and steps - back_to > most:
        return Proposal(
            refused=f"the last good checkpoint is more than {most} steps back, too far for a warning"
        )
    was = _value(resolved, change.key)
    return Proposal(Rollback(steps, finding.id, finding.sentence, change.line, was, back_to))


def last_good_step(resolved: ResolvedConfig, changed: ResolvedConfig, steps: int) -> int:
    """Return the step of the best evaluation, if all that is known of it is good; else 0, the first model.

    It has to be better than the first model beyond chance, and older than the steps in which a finding after
    ``steps`` steps shows. The change has to be possible in the middle of a run, and must not alter what is
    called correct.
    """
    run = resolved.config.output
    evals = read_stream(run, "evals.jsonl")
    best = best_evaluation(evals)
    if best is None or best.step > steps - width_of(steps):
        return 0
    better = gains(Evaluation.from_record(evals[0]), best.evaluation)["sampled"].low > 0
    is_refused = any(difference.effect == "refused" for difference in changed_settings(changed))
    verdicts = [verdict_in(settings_of(config)("rewards")) for config in (resolved, changed)]
    return best.step if better and not is_refused and verdicts[0] == verdicts[1] else 0


def run_with_rollbacks(
    run_stage: Callable[Concatenate[ResolvedConfig, P], Result],
    stage: ResolvedConfig,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """Run a stage, again after each rollback. ``stage`` is without any rollback's line."""
    while True:
        # Always starts from the stage's own config, because the last rollback may have dropped a line.
        changed = with_rollbacks(stage)
        complete_rollback(changed)
        try:
            return run_stage(changed, *args, **kwargs)
        except RollbackDue:  # the log says what to change
            continue
        except (ConfigError, DataError, RewardError, GuardStop) as error:
            if not on_rank_zero(partial(_undo_fatal_change, stage.config.output, str(error))):
                raise


def _undo_fatal_change(run: Path, why: str) -> bool:
    """Log a rollback of the last change if the run failed before the step of its finding; tell whether."""
    rollbacks = read_rollbacks(run)
    steps = len(read_stream(run, "metrics.jsonl"))
    # A run that could not even begin still has the logs of the run before it.
    if not rollbacks or rollbacks[-1].undoes_last or steps > rollbacks[-1].step:
        return False
    last = rollbacks[-1]
    ended = f"with {last.line} the run ended: {why.splitlines()[0].partition('. ')[0].rstrip(':')}"
    write_rollbacks(run, [*rollbacks, _undo(last, steps, ended)])
    return True


def with_rollbacks(stage: ResolvedConfig) -> ResolvedConfig:
    """Return a stage's config with the lines of its rollbacks, except where the user changed the setting."""
    run = stage.config.output
    for rollback in rollbacks_in_force(on_rank_zero(lambda: read_rollbacks(run))):
        change = Change(rollback.line, rollback.finding)
        if _value(stage, change.key) == rollback.was:
            stage = with_settings(stage, (change.option,))
    return stage


def complete_rollback(changed: ResolvedConfig) -> None:
    """Archive the steps before the last rollback and write the config ``changed``, unless that is done."""
    rollbacks = on_rank_zero(lambda: read_rollbacks(changed.config.output))
    if rollbacks:
        on_rank_zero(lambda: _archive_and_change(changed, rollbacks))


def _archive_and_change(changed: ResolvedConfig, rollbacks: Sequence[Rollback]) -> None:
    run = changed.config.output
    target = archive_of(run, len(rollbacks))
    if target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    folder = RunFolder(run)
    try:
        archive_steps(folder, part, rollbacks[-1].back_to)
        write_own(run, "config.yaml", resolved_yaml(changed))
        # From here on the run's own files are those after the rollback.
        part.rename(target)
        sync(target.parent)
    finally:
        folder.close()


def tell_outcomes(journal: Journal) -> None:
    """Compare each rollback's steps with the same ones after it, log whether it helped, and print that."""
    run = journal.folder.path
    rollbacks = read_rollbacks(run)
    completed = [
        rollback if rollback.undoes_last else replace(rollback, outcome=_outcome(run, rollbacks, number))
        for number, rollback in enumerate(rollbacks, start=1)
    ]
    if completed:
        write_rollbacks(run, completed)
    for rollback in completed:
        journal.say(f"step {rollback.step}: {rollback}")


def _compare_change(run: Path, rollbacks: Sequence[Rollback], number: int) -> TrialResult:
    """Compare the steps up to a finding with and without its change, the ``number``-th counted from 1."""
    rollback = rollbacks[number - 1]
    following = archive_of(run, number + 1)
    after = following if following.exists() else run
    change = Change(rollback.line, rollback.finding)
    return compare_trial(change, archive_of(run, number), after, rollback.back_to, rollback.step)


def _outcome(run: Path, rollbacks: Sequence[Rollback], number: int) -> str:
    if number < len(rollbacks) and rollbacks[number].undoes_last:
        return "This was undone"
    rollback = rollbacks[number - 1]
    trial = _compare_change(run, rollbacks, number)
    later_findings = [a.finding for a in rollbacks[number:] if not a.undoes_last]
    repeated = rollback.finding in (*trial.findings, *later_findings)
    description = describe_trial(trial)
    effect = "No clear change" if trial.effect == "no clear change" else f"That {trial.effect}"
    first = late_half(rollback.back_to, rollback.step) + 1
    steps = f"steps {first} to {rollback.step}" if first < rollback.step else f"step {rollback.step}"
    comparison = "Accuracy cannot be compared"
    if description:
        comparison = f"{effect}: {description}, {steps} with the change against the same without it"
    recurrence = "occurred again" if repeated else "did not occur again"
    return f"{comparison}. The finding {rollback.finding} {recurrence}"


def _value(resolved: ResolvedConfig, key: str) -> object:
    """Return the value of a setting as JSON has it."""
    value = settings_of(resolved)(key)
    return None if value is UNKNOWN else json.loads(json.dumps(value, default=str))
