"""A run that heals itself: after a finding it goes back and continues with the finding's config line.

Decisions depend only on the logs, not on which checkpoints exist. A killed run therefore goes back to the
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
from covey.runs.atomic import sync
from covey.runs.attempts import Attempt, attempts_in_force, read_attempts, write_attempts
from covey.runs.best import best_of
from covey.runs.compatibility import changed_settings, effect_of_change
from covey.runs.estimates import Evaluation, gains
from covey.runs.folder import RunFolder, read_numbers, read_stream
from covey.runs.healing import archive_of, archive_steps
from covey.runs.journal import Journal
from covey.runs.trust import write_own
from covey.system.processes import on_rank_zero
from covey_verify.errors import ConfigError, DataError, RewardError

P = ParamSpec("P")


class GoBack(Exception):
    """The run goes back, as the last line of its `healing.jsonl` says."""


class Proposal(NamedTuple):
    """An attempt that a finding asks for, or the reason why it is refused; neither, if it asks for none."""

    attempt: Attempt | None = None
    refused: str = ""


def severe(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that send a run back at once."""
    return [finding for finding in findings if finding.severity == "severe"]


def warnings_due(findings: Sequence[Finding], step: int) -> list[Finding]:
    """Return the warnings whose turn it is at a step: those of WINDOW steps before.

    A warning may be a symptom, whose cause is found a little later.
    """
    return [f for f in findings if f.severity == "warning" and f.step + WINDOW == step]


def begin_attempt(loaded: ResolvedConfig, journal: Journal, findings: Sequence[Finding], steps: int) -> bool:
    """Log and announce an attempt if one is due after ``steps`` steps. Return whether the run goes back.

    One is due if the last change harms, or else for the first finding with a line to try, severe ones first.
    """
    run = loaded.config.output
    attempts = read_attempts(run)
    attempt = _against_harm(run, attempts, steps)
    if attempt is None:
        attempt = _first_proposal(loaded, journal, findings, steps, attempts)
    if attempt is None:
        return False
    write_attempts(run, [*attempts, attempt])
    where = f"step {attempt.back_to}" if attempt.back_to else "the first model"
    what = f"without that: {attempt.sentence}" if attempt.takes_back else f"with {attempt.line}"
    archive = archive_of(run, len(attempts) + 1)
    journal.say(f"going back to {where} {what}; the steps since are in {archive}")
    return True


def _first_proposal(
    loaded: ResolvedConfig,
    journal: Journal,
    findings: Sequence[Finding],
    steps: int,
    attempts: Sequence[Attempt],
) -> Attempt | None:
    """Return the attempt of the first finding that has one; say why those before it have none."""
    for finding in sorted(findings, key=lambda f: f.severity != "severe"):
        attempt, refused = proposal_after(loaded, finding, steps, attempts)
        if refused:
            journal.say(f"{finding.id}: no remedy tried: {refused}", "yellow")
        if attempt is not None:
            return attempt
    return None


def _against_harm(run: Path, attempts: Sequence[Attempt], steps: int) -> Attempt | None:
    """Return the attempt that takes the last change back, if it harms by the step of its finding."""
    if not attempts or attempts[-1].takes_back or steps != attempts[-1].step:
        return None
    last = attempts[-1]
    # If the change redefines "correct", accuracies are not comparable; only a missing signal tells of harm.
    since = read_numbers(run, "metrics.jsonl")[last.back_to :]
    silent = [m["groups/dead"] == 1 and m["groups/dead_correct"] < 0.5 for m in since]
    if all(silent):
        return _without(last, steps, f"with {last.line} no group has different rewards")
    trial = _compared(run, attempts, len(attempts))
    if trial.effect != "harms":
        return None
    return _without(last, steps, f"{last.line} harms, {describe_trial(trial)}")


def _without(last: Attempt, steps: int, why: str) -> Attempt:
    """Return the attempt that takes the last one's line back."""
    return Attempt(steps, last.finding, why, "", None, last.back_to)


def proposal_after(
    loaded: ResolvedConfig, finding: Finding, steps: int, before: Sequence[Attempt]
) -> Proposal:
    """Return what a finding after ``steps`` steps asks for.

    A note asks for nothing, and neither does a finding without a config line that changes what is computed.
    """
    change = Change(finding.remedy, finding.id)
    if finding.severity == "note" or not finding.remedy or effect_of_change(change.key) == "safe":
        return Proposal()
    lines = [attempt.line for attempt in before if not attempt.takes_back]
    if len(lines) >= loaded.config.guards.heal_tries:
        return Proposal(refused=f"all {len(lines)} tries are used (guards.heal_tries)")
    if change.line in lines:
        return Proposal(refused=f"{change.line} was tried already")
    try:
        changed = with_settings(loaded, (change.option,))
    except ConfigError as error:
        return Proposal(refused=f"{change.line} does not fit its config: {error}")
    back_to = last_good_step(loaded, changed, steps)
    most = max(WIDEST, loaded.config.train.steps // 10)
    if finding.severity != "severe" and steps - back_to > most:
        return Proposal(
            refused=f"the last good checkpoint is more than {most} steps back, too far for a warning"
        )
    was = _value(loaded, change.key)
    return Proposal(Attempt(steps, finding.id, finding.sentence, change.line, was, back_to))


def last_good_step(loaded: ResolvedConfig, changed: ResolvedConfig, steps: int) -> int:
    """Return the step of the best evaluation, if all that is known of it is good; else 0, the first model.

    It has to be better than the first model beyond chance, and older than the steps in which a finding after
    ``steps`` steps shows. The change has to be one that a run can take on its way, and must not move what is
    called correct.
    """
    run = loaded.config.output
    evals = read_stream(run, "evals.jsonl")
    best = best_of(evals)
    if best is None or best.step > steps - width_of(steps):
        return 0
    better = gains(Evaluation.from_record(evals[0]), best.evaluation)["sampled"].low > 0
    refused = any(difference.effect == "refused" for difference in changed_settings(changed))
    verdicts = [verdict_in(settings_of(config)("rewards")) for config in (loaded, changed)]
    return best.step if better and not refused and verdicts[0] == verdicts[1] else 0


def run_with_healing(
    run_stage: Callable[Concatenate[ResolvedConfig, P], Result],
    stage: ResolvedConfig,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """Run a stage, again after each finding that sends it back. ``stage`` is without any attempt's line."""
    while True:
        # From the stage's own config each time: the last attempt may have taken a line back.
        changed = with_attempts(stage)
        complete_going_back(changed)
        try:
            return run_stage(changed, *args, **kwargs)
        except GoBack:  # what to change is in the log
            continue
        except (ConfigError, DataError, RewardError, GuardStop) as error:
            if not on_rank_zero(partial(_died_of_change, stage.config.output, str(error))):
                raise


def _died_of_change(run: Path, why: str) -> bool:
    """Log that the last change is taken back, if with it the run did not get beyond its finding's step."""
    attempts = read_attempts(run)
    steps = len(read_stream(run, "metrics.jsonl"))
    # A run that could not even begin still has the logs of the run before it.
    if not attempts or attempts[-1].takes_back or steps > attempts[-1].step:
        return False
    last = attempts[-1]
    ended = f"with {last.line} the run ended: {why.splitlines()[0].partition('. ')[0].rstrip(':')}"
    write_attempts(run, [*attempts, _without(last, steps, ended)])
    return True


def with_attempts(stage: ResolvedConfig) -> ResolvedConfig:
    """Return a stage's config with the lines of its attempts, but for settings that the user has changed."""
    run = stage.config.output
    for attempt in attempts_in_force(on_rank_zero(lambda: read_attempts(run))):
        change = Change(attempt.line, attempt.finding)
        if _value(stage, change.key) == attempt.was:
            stage = with_settings(stage, (change.option,))
    return stage


def complete_going_back(changed: ResolvedConfig) -> None:
    """Archive the steps since the last attempt and write the config ``changed``, unless that is done."""
    attempts = on_rank_zero(lambda: read_attempts(changed.config.output))
    if attempts:
        on_rank_zero(lambda: _go_back(changed, attempts))


def _go_back(changed: ResolvedConfig, attempts: Sequence[Attempt]) -> None:
    run = changed.config.output
    target = archive_of(run, len(attempts))
    if target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    folder = RunFolder(run)
    try:
        archive_steps(folder, part, attempts[-1].back_to)
        write_own(run, "config.yaml", resolved_yaml(changed))
        part.rename(target)  # from here on the run's own files are those of the new attempt
        sync(target.parent)
    finally:
        folder.close()


def tell_outcomes(journal: Journal) -> None:
    """Compare each attempt's steps with the same ones after it, log whether it helped, and print that."""
    run = journal.folder.path
    attempts = read_attempts(run)
    judged = [
        attempt if attempt.takes_back else replace(attempt, outcome=_outcome(run, attempts, number))
        for number, attempt in enumerate(attempts, start=1)
    ]
    if judged:
        write_attempts(run, judged)
    for attempt in judged:
        journal.say(f"step {attempt.step}: {attempt}")


def _compared(run: Path, attempts: Sequence[Attempt], number: int) -> TrialResult:
    """Return what the ``number``-th change did, counted from 1, in the steps up to its finding."""
    attempt = attempts[number - 1]
    following = archive_of(run, number + 1)
    after = following if following.exists() else run
    change = Change(attempt.line, attempt.finding)
    return compare_trial(change, archive_of(run, number), after, attempt.back_to, attempt.step)


def _outcome(run: Path, attempts: Sequence[Attempt], number: int) -> str:
    if number < len(attempts) and attempts[number].takes_back:
        return "This was taken back"
    attempt = attempts[number - 1]
    trial = _compared(run, attempts, number)
    later = [a.finding for a in attempts[number:] if not a.takes_back]
    again = attempt.finding in (*trial.findings, *later)
    description = describe_trial(trial)
    effect = "No clear change" if trial.effect == "no clear change" else f"That {trial.effect}"
    first = late_half(attempt.back_to, attempt.step) + 1  # people count steps from 1
    steps = f"steps {first} to {attempt.step}" if first < attempt.step else f"step {attempt.step}"
    helped = "Accuracy cannot be compared"
    if description:
        helped = f"{effect}: {description}, {steps} with the change against the same without it"
    return f"{helped}. The finding {attempt.finding} {'occurred again' if again else 'did not occur again'}"


def _value(loaded: ResolvedConfig, key: str) -> object:
    """Return the value of a setting as JSON has it."""
    value = settings_of(loaded)(key)
    return None if value is UNKNOWN else json.loads(json.dumps(value, default=str))
