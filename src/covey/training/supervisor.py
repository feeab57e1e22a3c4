"""The supervisor of a run: it judges each step by findings and guards, and may stop or roll back the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from covey.config.load import ResolvedConfig
from covey.errors import GuardStop
from covey.insight.findings.finding import STREAM, Finding
from covey.insight.findings.settings import settings_of
from covey.insight.findings.table import gravest, no_signal
from covey.insight.findings.watch import Watch
from covey.objective.controllers import Coefficients, next_coefficients
from covey.runs.checkpoint import RunState
from covey.runs.journal import Journal
from covey.system.processes import is_rank_zero, on_rank_zero
from covey.training.guards import KLAlarm, Stop, apply_guards, kl_alarm
from covey.training.rollback import RollbackDue, begin_rollback, severe, warnings_due
from covey.types import Group


class Supervisor:
    """Judges a run by its measurements. What it remembers is in the run's logs and in its ``RunState``."""

    def __init__(self, resolved: ResolvedConfig, journal: Journal) -> None:
        self.resolved = resolved
        self.journal = journal
        self.watch = Watch(journal.folder, settings_of(resolved))

    def judge_step(
        self,
        state: RunState,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        has_signal: bool,
    ) -> RunState:
        """Report findings, apply the guards, and return ``state`` with their memory and new coefficients.

        ``has_signal``: whether the step had an advantage that is not 0. Raises RollbackDue or GuardStop.
        """
        findings = self.report_findings(step, metrics, groups)
        self.roll_back_for([*severe(findings), *self._lasting_warnings(step)], state.step)
        memory, actions = apply_guards(
            step,
            metrics,
            has_signal,
            memory=state.guards,
            limits=self.resolved.config.guards,
            why_none=self.why_no_signal,
            cause=self._gravest_finding,
        )
        for action in actions:
            if isinstance(action, Stop):
                self.roll_back_for(self.findings(), state.step)
                raise GuardStop(action.why)
            self.journal.say(action.text, "yellow")
            self.journal.log_event(step, action.event, **action.details)
        coefficients = self._next_coefficients(state.coefficients, step, metrics)
        # Part of the checkpoint, so that a resumed run judges and weighs as this one would.
        return replace(state, guards=memory, coefficients=coefficients)

    def report_findings(
        self, step: int, metrics: Mapping[str, float] | None = None, groups: Sequence[Group] = ()
    ) -> list[Finding]:
        """Print new findings, each once in a run, and return them; the first process has all."""
        findings = self.watch.record_findings(step, metrics, groups) if is_rank_zero() else []
        for finding in findings:
            self.journal.say(f"step {step}: {finding}", "yellow")
        return findings

    def findings(self) -> list[Finding]:
        """Return the findings so far, in the order in which they were printed."""
        findings = (Finding.from_record(record) for record in self.journal.folder.read(STREAM))
        return [finding for finding in findings if finding is not None]

    def roll_back_for(self, findings: Sequence[Finding], steps: int) -> None:
        """Raise RollbackDue if findings roll this run back, and one of these has a line to try.

        ``steps``: the number of steps done.
        """
        if self._rolls_back and on_rank_zero(
            lambda: begin_rollback(self.resolved, self.journal, findings, steps)
        ):
            raise RollbackDue

    def why_no_signal(self, steps: int | None = None) -> str:
        """Return why no group of the last ``steps`` steps, or of all, had a nonzero advantage."""
        metrics = self.journal.folder.read("metrics.jsonl")
        latest = metrics if steps is None else metrics[-steps:]
        return no_signal(latest, settings_of(self.resolved), self.findings())

    @property
    def _rolls_back(self) -> bool:
        return self.resolved.config.guards.on_finding == "rollback"

    def _lasting_warnings(self, step: int) -> list[Finding]:
        """Return the warnings that are now due; a symptom that has gone by itself needs no remedy."""
        if not (self._rolls_back and is_rank_zero()):
            return []
        return [warning for warning in warnings_due(self.findings(), step) if self.watch.holds(warning)]

    def _next_coefficients(
        self, coefficients: Coefficients, step: int, metrics: Mapping[str, float]
    ) -> Coefficients:
        """Return the loss coefficients of the next step, by their controllers and by the KL guard."""
        config = self.resolved.config
        guard_raises_kl = config.guards.kl_action == "raise_coef"
        kl = metrics.get("kl/completion_k1", math.nan)
        completions = int(metrics["groups/count"]) * config.rollout.group_size
        # None: the guard leaves the coefficient alone.
        too_far = kl_alarm(kl, config.guards) == KLAlarm.ACT if guard_raises_kl else None
        updated = next_coefficients(coefficients, self.resolved.algorithm, metrics, completions, too_far)
        if guard_raises_kl and updated.kl != coefficients.kl:
            self.journal.log_event(step, "KL coefficient moved", coef=updated.kl, kl=kl)
        return updated

    def _gravest_finding(self) -> str:
        finding = gravest(self.findings())
        return f"Reported after step {finding.step}: {finding}" if finding else ""
