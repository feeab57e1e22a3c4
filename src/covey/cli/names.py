"""Explanations of names that are not settings: metrics, functions, presets, rewards, findings and checks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping

from covey.audit.checks.check import check_texts
from covey.config.algorithm import rows_of
from covey.insight.metric_table import metric_rows
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axes import AXES
from covey.objective.axis_function import AxisFunction
from covey_verify.contract import PROVIDED

Entry = dict[str, object]
"""The fields of a setting, as in ``covey.cli.settings``."""
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")


def entries_of(name: str) -> list[Entry]:
    """Return all entries for a name, or for all metrics of a family such as `kl/`."""
    kinds = (
        _metric_entries,
        _function_entries,
        _preset_entries,
        _reward_entries,
        _finding_entries,
        _check_entries,
    )
    return [entry for entries_of_kind in kinds for entry in entries_of_kind(name)]


def all_names() -> list[str]:
    """Return all names for which ``entries_of`` has an entry."""
    from covey.insight.findings.table import RULES
    from covey.rewards.loading import BUILT_IN

    metrics = (row.name for row in metric_rows())
    functions = (function.__name__ for functions in AXES.values() for function in functions)
    return [*metrics, *functions, *PRESETS, *BUILT_IN, *(rule.name for rule in RULES), *check_texts()]


def _metric_entries(name: str) -> Iterator[Entry]:
    for row in metric_rows():
        if row.pattern.fullmatch(name) or name == row.name or _in_family(name, row.name):
            yield name_entry(row.name, "metric", row.meaning, range=f"healthy: {row.healthy}")


def _in_family(name: str, metric: str) -> bool:
    return name.endswith("/") and metric.startswith(name)


def _function_entries(name: str) -> Iterator[Entry]:
    for axis, functions in AXES.items():
        for function in functions:
            if function.__name__ == name:
                users = [n for n, preset in PRESETS.items() if function in _functions_of(preset)]
                uses = f"used by {', '.join(users)}" if users else ""
                where = f"algorithm.{axis}"
                yield name_entry(name, where, _doc(function), range=uses, source=_sources(function, users))


def _functions_of(preset: Algorithm) -> set[Callable[..., object]]:
    values = [*vars(preset).values(), *preset.policy_weights, preset.kl and preset.kl.estimator]
    return {value.function for value in values if isinstance(value, AxisFunction)}


def _sources(function: Callable[..., object], users: list[str]) -> str:
    """Return the papers that a function cites; if it cites none, those of the presets that use it."""
    cited = dict.fromkeys(ARXIV.findall(inspect.getdoc(function) or ""))
    if cited:
        return ", ".join(f"arXiv {number}" for number in cited)
    return "; ".join(dict.fromkeys(PRESETS[user].paper for user in users[:3])) or "covey"


def _preset_entries(name: str) -> Iterator[Entry]:
    if name in PRESETS:
        axes = ("advantage", "whiten", "ratio", "surrogate", "reduce", "filter")
        functions = {axis: getattr(PRESETS[name], axis) for axis in axes}
        parts = ", ".join(f"{axis} {part.name}" for axis, part in functions.items() if part is not None)
        yield name_entry(name, "algorithm", f"{parts}.", source=PRESETS[name].paper)


def _reward_entries(name: str) -> Iterator[Entry]:
    from covey.rewards.loading import BUILT_IN

    if name in BUILT_IN:
        # Arguments that the run provides, such as the sandbox, are not settings.
        rows = [row for row in rows_of(BUILT_IN[name], name) if row.key.rpartition(".")[2] not in PROVIDED]
        facts = (f"{row.default!r}, {row.values}" if row.values else repr(row.default) for row in rows)
        listed = (f"{row.key.rpartition('.')[2]} ({fact})" for row, fact in zip(rows, facts, strict=True))
        settings = f" Settings with their defaults: {'; '.join(listed)}." if rows else ""
        yield name_entry(name, "rewards", _doc(BUILT_IN[name]) + settings)


def _finding_entries(name: str) -> Iterator[Entry]:
    from covey.insight.findings.table import RULES

    for rule in RULES:
        if rule.name == name:
            silences = f"; silences {', '.join(rule.silences)}" if rule.silences else ""
            yield name_entry(
                name, "finding", f"{rule.condition} Why: {rule.reason}", range=rule.severity + silences
            )


def _check_entries(name: str) -> Iterator[Entry]:
    if name not in check_texts():
        return
    from covey.audit.table import CHECKS  # it imports torch

    (check,) = (check for check in CHECKS if check.name == name)
    lines = {framework: getattr(check.words, framework) for framework in ("trl", "verl", "openrlhf")}
    remedies = [check.words.any, *(f"with {framework}: {line}" for framework, line in lines.items() if line)]
    convention = f" Convention: {check.words.convention}." if check.words.convention else ""
    needs = f"needs {', '.join(check.words.needs)}"
    effect = f"{check.condition}{convention} Remedy: {'; '.join(remedies)}"
    yield name_entry(name, "audit", effect, range=f"{check.words.severity}; {needs}")


def _doc(function: Callable[..., object]) -> str:
    """Return a docstring as one paragraph, without its examples."""
    return " ".join((inspect.getdoc(function) or "").partition(">>>")[0].split()).replace("``", "`")


def name_entry(name: str, kind: str, effect: str, **facts: object) -> Entry:
    """Return an entry for a name that is not a setting; it has the same fields as a setting's."""
    blank: Mapping[str, object] = {"default": "", "range": "", "usual": "", "trl": "", "source": ""}
    return {"setting": name, "of": kind, "effect": effect, **blank, **facts}
