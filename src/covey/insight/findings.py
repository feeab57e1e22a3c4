"""Findings: what goes wrong in a run, in words, with the evidence and a config line that mends it.

Pure: the records of `metrics.jsonl` and `evals.jsonl` and the settings in, findings out. A finding is made
once in a run; what has been said is in `findings.jsonl`, which a resume cuts back with the other logs, so
that a resumed run says what an uninterrupted one says. The rules themselves are in `insight/rules.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from statistics import median
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from covey.config.given import plain
from covey.config.load import Loaded
from covey.estimates import Evaluation, gains
from covey.insight.evidence import Records, errors_needed, known_values, noise
from covey.insight.verdict import change
from covey.objective.bound import Bound
from covey.tasks import TASKS
from covey.types import Group

Severity = Literal["note", "warning", "severe"]
WINDOW, WIDEST = 5, 20
"""Steps that a rule averages over: a fifth of the run, at least and at most so many."""
STREAM = "findings.jsonl"


@dataclass(frozen=True)
class Finding:
    """One thing that goes wrong."""

    id: str
    step: int
    severity: Severity
    sentence: str
    """With the numbers."""
    remedy: str = ""
    """A line for the config; empty where it has all of them already."""
    advice: str = ""
    """What no config line can do."""
    evidence: Mapping[str, int | float] = field(default_factory=dict)
    """`step`, and where one can be pointed at, `group`, `completion` and `token`; metrics by name."""

    def __str__(self) -> str:
        remedies = " or ".join(r for r in (self.remedy, self.advice) if r)
        return f"{self.sentence}. Try: {remedies}" if remedies else self.sentence

    def record(self) -> dict[str, Any]:
        """As a line of `findings.jsonl`."""
        return {**vars(self), "evidence": dict(self.evidence)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Finding | None:
        """What ``record`` gave, unknown fields left out; None of a record that is damaged."""
        known = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        try:
            return READ_FINDING.validate_python(known)
        except ValidationError:
            return None


READ_FINDING = TypeAdapter(Finding)


class Unknown:
    """What a setting is where nothing is known of the config."""


UNKNOWN = Unknown()
SettingOf = Callable[[str], Any]
"""A setting's name -> its value in the run, or UNKNOWN."""


def unknown(_: str) -> Unknown:
    """Where nothing is known of the config."""
    return UNKNOWN


def settings_of(loaded: Loaded) -> SettingOf:
    """The resolved settings of a run: those of the algorithm by axis, a function as its name."""
    return partial(_setting, loaded)


def _setting(loaded: Loaded, name: str) -> Any:
    if name == "rewards":
        task = TASKS.get(loaded.config.data.task or "")
        return plain(loaded.config.rewards or (task.rewards if task else ()), loaded.folder)
    if name == "stages":  # the methods of those before this one, as their folders say
        folder = loaded.config.output
        return [p.name.partition("-")[2] for p in folder.parent.glob("[0-9]*-*") if p != folder]
    section, *path = name.split(".")
    value: Any = loaded.algorithm if section == "algorithm" else getattr(loaded.config, section, UNKNOWN)
    for part in path:
        inside = value.all_settings.get(part, UNKNOWN) if isinstance(value, Bound) else UNKNOWN
        value = None if value is None else getattr(value, part, inside)
    return value.name if isinstance(value, Bound) else value


class Seen:
    """A run so far: means of metrics early and now; NaN where there are none, so that no rule holds."""

    def __init__(
        self,
        metrics: Records,
        evals: Sequence[Evaluation] = (),
        setting: SettingOf = unknown,
        patient: bool = True,
        steps: int | None = None,
    ) -> None:
        """``patient``: rules wait for as many steps as they need to be sure.

        ``steps``: how many there were, where ``metrics`` are only the first and the last WIDEST of them.
        """
        self.steps = len(metrics) if steps is None else steps
        width = max(1, min(WIDEST, max(WINDOW, self.steps // 5)))
        self.first, self.last = metrics[:width], metrics[-width:]
        self.beginning = metrics[:WIDEST]
        """Every step there is, while there are no more than so many."""
        both = max(0, len(self.beginning) + len(self.last) - self.steps)
        self.apart: tuple[Records, Records] = (self.beginning, self.last[both:])
        """The steps that are known, each once."""
        self.evals, self.setting, self.patient = evals, setting, patient
        self.read: dict[str, float] = {}
        """Late means that were asked for since this was last emptied: the evidence of a rule."""

    def early(self, name: str) -> float:
        """Mean over the first steps."""
        return mean_of(self.first, name)

    def late(self, name: str) -> float:
        """Mean over the last steps."""
        value = self.read[name] = mean_of(self.last, name)
        return value

    def least(self, name: str) -> float:
        """Mean over the last steps less what chance may have added; NaN of less than three that have it."""
        enough = len(known_values(self.last, name)) > 2
        return self.late(name) - self._doubt(name, len(self.last)) if enough else math.nan

    def usual(self, name: str) -> float:
        """Median over the last steps, of what one step alone may throw far out."""
        value = self.read[name] = median(known_values(self.last, name) or [math.nan])
        return value

    def rise(self, name: str) -> float:
        """Late minus early."""
        return self.late(name) - self.early(name)

    def after(self, steps: int) -> bool:
        """Whether the run has gone on for long enough to judge it."""
        return self.steps >= steps or not self.patient

    def falling(self, name: str) -> bool:
        """Whether a bad value is getting better by itself: a tenth lower than in the first steps."""
        return self.late(name) < 0.9 * self.early(name)

    def rose(self, name: str, by: float) -> bool:
        """Whether it is higher than at first by so much, and by more than chance does in all looks so far."""
        return self.rise(name) > max(by, self._change_doubt(name))

    def fell(self, name: str, by: float) -> bool:
        """Whether it is lower than at first by so much, and by more than chance does in all looks so far."""
        return self.rise(name) < -max(by, self._change_doubt(name))

    def outlook(self, name: str) -> tuple[float, float]:
        """Between what it may have changed by when the run ends, if it goes on as it did.

        As wide as chance allows after so many steps and completions: where a few steps of few groups say
        nothing yet of a run of hundreds, it is wide.
        """
        planned = self.setting("train.steps")
        steps = max(self.steps, planned) if isinstance(planned, int) else self.steps
        ahead = steps / max(1, self.steps - len(self.last))
        rise, doubt = self.rise(name), self._change_doubt(name)
        return ahead * (rise - doubt), ahead * (rise + doubt)

    def whole(self, name: str) -> tuple[float, float]:
        """Mean over all steps that are known, and what chance may have added or taken."""
        steps = [r for window in self.apart for r in window]
        return mean_of(steps, name), self._doubt(name, len(known_values(steps, name)))

    def _change_doubt(self, name: str) -> float:
        return self._doubt(name, len(self.first), len(self.last))

    def _doubt(self, name: str, *windows: int) -> float:
        found = noise(self.apart, name)
        looks = 1 + self.steps / WINDOW
        return found.error(*windows) * errors_needed(found.freedom, looks) if found.variance else 0.0

    def names(self, prefix: str, suffix: str = "") -> dict[str, float]:
        """What comes between in the names of metrics -> their late means."""
        pattern = re.compile(f"{re.escape(prefix)}(.+){re.escape(suffix)}")
        matches = (pattern.fullmatch(name) for name in self._logged)
        return {match[1]: self.late(match[0]) for match in matches if match}

    @cached_property
    def _logged(self) -> Iterable[str]:
        """The metrics of the last steps, each once: a run has a hundred, and many rules ask for some."""
        return dict.fromkeys(chain.from_iterable(self.last))

    @property
    def accuracy_gain(self) -> float:
        """Of sampled accuracy: on held-out problems where they were measured twice, else in training."""
        if len(self.evals) > 1:
            return gains(self.evals[0], self.evals[-1])["sampled"].value
        return self.rise("accuracy")

    @property
    def _verdicts(self) -> list[str]:
        """The mean of the function that says what is correct, or of all that may be it."""
        own = [name for name in self.names("reward/", "/mean") if "/" not in name]
        judge = self.evals[-1].verdict if self.evals else ""
        return [f"reward/{name}/mean" for name in ([judge] if judge in own else own)]

    @property
    def grades(self) -> bool:
        """Whether the function that says what is correct gives other values than 0 and 1."""
        means = self._verdicts
        return bool(means) and not any(self.same(mean, "accuracy") for mean in means)

    @property
    def lost(self) -> str:
        """The metric that says that less is right than at first; empty where none does beyond chance.

        Accuracy, where held-out problems do not say otherwise; or the mean of a verdict that grades.
        """
        if self.fell("accuracy", 0.02) and not self.held_out_holds:
            return "accuracy"
        means = self._verdicts
        graded = len(means) == 1 and self.grades and self.fell(means[0], 0.02)
        return means[0] if graded else ""

    @property
    def graded_higher(self) -> bool:
        """Whether that function grades, and clearly more is given than at first.

        It may give more without ever crossing .5, and so may others beside it: accuracy says nothing then.
        """
        means = self._verdicts
        if not self.grades or (len(means) == 1 and self.fell(means[0], 0.0)):
            return False
        rises = self.rise("reward/mean") > 0.3 * self.early("reward/std")
        if len(self.evals) < 2:
            return rises
        held_out = gains(self.evals[0], self.evals[-1])["reward"]
        return held_out.low > 0 or (rises and held_out.value > 0)

    @property
    def bought(self) -> bool:
        """Whether a reward beside the verdict is clearly higher than at first."""
        others = [f"reward/{n}/mean" for n in self.names("reward/", "/mean") if "/" not in n]
        return len(others) > 1 and any(self.rose(m, 0.1) for m in others if not self.same(m, "accuracy"))

    @property
    def paid_for_worse(self) -> bool:
        """Whether held-out problems earn clearly more than at first, though fewer are solved."""
        return self.got_worse and gains(self.evals[0], self.evals[-1])["reward"].low > 0

    @property
    def held_out_holds(self) -> bool:
        """Whether held-out problems were measured since the start, and no fewer of them are solved."""
        return len(self.evals) > 1 and gains(self.evals[0], self.evals[-1])["sampled"].value >= 0

    @property
    def got_worse(self) -> bool:
        """Whether fewer held-out problems are solved, beyond what chance does in all evaluations so far; of
        several, where the last two say so.
        """
        looks = len(self.evals) - 1
        judged = [
            change(self.evals[0], later, errors_needed(math.inf, looks)) for later in self.evals[1:][-2:]
        ]
        return bool(judged) and all(word == "got worse" for word in judged)

    def same(self, name: str, other: str) -> bool:
        """Whether two metrics are one, at first and now, but for what could not be scored."""
        return all(abs(mean(name) - mean(other)) < 0.02 for mean in (self.early, self.late))


def mean_of(records: Records, name: str) -> float:
    """The mean of a metric over the steps that have it; NaN where none has."""
    values = known_values(records, name)
    return sum(values) / len(values) if values else math.nan


Holds = Callable[[Seen], str | None]
"""What was seen -> the sentence with the numbers, or None."""
Mend = Callable[[Seen], str | None]
"""The config line that mends what was seen; None where the config has it already."""
Key = Callable[[Group, int], float]
"""How clearly a completion of a group shows it; 0 or less: not at all."""


@dataclass(frozen=True)
class FindingRule:
    """A cause of trouble: how it is known, what it explains, what mends it."""

    id: str
    severity: Severity
    threshold: str
    """In words, for people."""
    reason: str
    """Why this threshold."""
    holds: Holds
    lines: tuple[Mend, ...]
    """The first that the config lacks is the remedy."""
    advice: str = ""
    explains: tuple[str, ...] = ()
    """Rules that say nothing more where this one has spoken: what they see follows from it."""
    shows: Key | None = None
    """Points at the completion that shows it best."""
    token: Callable[[Group, int], int] | None = None


def collector(rules: list[FindingRule]) -> Callable[..., Callable[[Holds], Holds]]:
    """A decorator that makes rules of functions: threshold and reason are in their docstrings."""

    def rule(
        name: str,
        *lines: Mend,
        severity: Severity = "warning",
        advice: str = "",
        explains: tuple[str, ...] = (),
        shows: Key | None = None,
        token: Callable[[Group, int], int] | None = None,
    ) -> Callable[[Holds], Holds]:
        def register(holds: Holds) -> Holds:
            threshold, _, reason = " ".join((holds.__doc__ or "").split()).partition(" Because ")
            rules.append(
                FindingRule(name, severity, threshold, reason, holds, lines, advice, explains, shows, token)
            )
            return holds

        return register

    return rule


def find(
    rules: Sequence[FindingRule], seen: Seen, said: Iterable[str], step: int, groups: Sequence[Group] = ()
) -> list[Finding]:
    """What is to be said after a step that has not been said before; causes come before what they explain."""
    known, by_id = set(said), {r.id: r for r in rules}
    quiet = {e for name in known if name in by_id for e in by_id[name].explains}
    found = []
    for rule in rules:
        if rule.id in known or rule.id in quiet:
            continue
        seen.read.clear()
        sentence = rule.holds(seen)
        if sentence is not None:
            found.append(_finding(rule, sentence, seen, step, groups))
            quiet |= set(rule.explains)
    return found


def _finding(rule: FindingRule, sentence: str, seen: Seen, step: int, groups: Sequence[Group]) -> Finding:
    shown = {name: round(value, 6) for name, value in seen.read.items() if math.isfinite(value)}
    evidence = {"step": step, **_place(rule, groups), **shown}
    lines = (line(seen) for line in rule.lines)
    remedy = next((line for line in lines if line), "")
    return Finding(rule.id, step, rule.severity, sentence, remedy, rule.advice, evidence)


def _place(rule: FindingRule, groups: Sequence[Group]) -> dict[str, int]:
    """Group and completion that show it best, and the token."""
    if rule.shows is None:
        return {}
    places = [(rule.shows(g, i), -n, -i) for n, g in enumerate(groups) for i in range(len(g.completions))]
    best, n, i = max(places, default=(0.0, 0, 0))
    if not best > 0:
        return {}
    token = {"token": rule.token(groups[-n], -i)} if rule.token else {}
    return {"group": -n, "completion": -i, **token}


MOST_LOOKS = 400
"""Steps after which a recorded run is looked at: each, or in a long run these many, evenly spaced."""


def _looks(steps: int) -> list[int]:
    every = -(-steps // MOST_LOOKS) or 1
    return sorted({*range(every, steps + 1, every), *([steps] if steps else [])})


def findings_over(
    rules: Sequence[FindingRule], metrics: Records, evals: Records, setting: SettingOf
) -> list[Finding]:
    """What a run would have said step by step, from its records."""
    found: list[Finding] = []
    taken = [(int(r["step"]), Evaluation.from_record(r)) for r in evals]
    for n in _looks(len(metrics)):
        last = n == len(metrics)
        step = int(metrics[n - 1]["step"])
        known = [e for at, e in taken if at <= step or last]
        # As a run that watches itself has it: no rule looks at the steps between the first and the last.
        shown = [*metrics[: min(n, WIDEST)], *metrics[max(WIDEST, n - WIDEST) : n]]
        found += find(rules, Seen(shown, known, setting, steps=n), [f.id for f in found], step)
    return found


def yaml_line(key: str, value: object) -> str:
    """A setting as a line of a config.

    >>> yaml_line("rollout.max_tokens", 640)
    'rollout.max_tokens: 640'
    """
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return f"{key}: {text.partition(chr(10) + '...')[0].strip()}"


def table(rules: Sequence[FindingRule]) -> Iterator[str]:
    """The rules as lines of a Markdown table, for docs/findings.md."""
    yield "| finding | said when | why there | explains |"
    yield "|---|---|---|---|"
    for r in rules:
        yield f"| `{r.id}` ({r.severity}) | {r.threshold} | {r.reason} | {', '.join(r.explains)} |"
