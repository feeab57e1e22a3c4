"""`covey algorithms`: print the table of all presets axis by axis, or one algorithm in full."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

import yaml
from rich.console import Console
from rich.table import Table

from covey.config.algorithm import build_algorithm, describe
from covey.config.contradictions import notes_on
from covey.objective.algorithms import PRESETS, Algorithm
from covey.objective.axis_function import AnyAxisFunction

COLUMNS = ("advantage", "whiten", "ratio", "surrogate", "kl", "reduce", "extra")


def print_presets(as_json: bool) -> int:
    """Print a table with a row for each preset."""
    if as_json:
        print(json.dumps({name: describe(a) for name, a in PRESETS.items()}))
        return 0
    table = Table("algorithm", *COLUMNS, box=None, padding=(0, 1), header_style="bold")
    for name, algorithm in PRESETS.items():
        table.add_row(name, *_row(algorithm))
    console = Console(width=max(Console().width, 150), highlight=False)
    console.print(table)
    console.print(
        "\ncovey algorithms NAME shows one: formulas, paper, settings, and the YAML that overrides it"
    )
    return 0


def _row(algorithm: Algorithm) -> Iterator[str]:
    yield _format_function(algorithm.advantage)
    yield _format_function(algorithm.whiten)
    yield _format_function(algorithm.ratio)
    yield _format_function(algorithm.surrogate)
    kl = algorithm.kl
    yield f"{kl.estimator.name} {kl.coef:g} {kl.place}" if kl else "-"
    yield _format_function(algorithm.reduce)
    extra = [*algorithm.correction, algorithm.select_tokens, *algorithm.token_weights, algorithm.filter]
    yield " ".join(_format_function(c) for c in extra if c) or "-"


def _format_function(part: AnyAxisFunction | None) -> str:
    if part is None:
        return "-"
    values = [f"{v:g}" if isinstance(v, float) else str(v) for v in part.settings.values()]
    return " ".join([part.name, "/".join(values)]).strip()


def print_algorithm(name: str, as_json: bool, dialect: str | None = None) -> int:
    """Print an algorithm's paper, the function of each axis, and its YAML."""
    algorithm = build_algorithm({"name": name, "dialect": dialect})
    if as_json:
        print(json.dumps(describe(algorithm)))
        return 0
    console = Console(highlight=False)
    console.print(f"[bold]{name}[/bold]  {algorithm.paper}\n")
    for axis, part in _functions_by_axis(algorithm):
        console.print(f"[bold]{axis}[/bold]: {part.name}")
        console.print(f"    {' '.join((inspect.getdoc(part.function) or '').split())}\n", markup=False)
    for note in notes_on(algorithm, updates=1):
        console.print(f"{note}\n", markup=False)
    console.print("[bold]as YAML[/bold], every axis and setting of it can be overridden:\n")
    # Empty axes are left out, unless the preset has a value that the dialect removed.
    usual = describe(PRESETS[name])
    axes = {
        axis: value
        for axis, value in describe(algorithm).items()
        if value not in (None, [], 0.0) or usual[axis] != value
    }
    spelled = yaml.safe_dump({"algorithm": {"name": name, **axes}}, sort_keys=False)
    console.print(spelled, markup=False)
    return 0


def _functions_by_axis(algorithm: Algorithm) -> Iterator[tuple[str, AnyAxisFunction]]:
    for axis in (
        "advantage",
        "whiten",
        "ratio",
        "surrogate",
        "reduce",
        "select_tokens",
        "filter",
    ):
        part = getattr(algorithm, axis)
        if part is not None:
            yield axis, part
    for axis in ("correction", "token_weights"):
        yield from ((axis, part) for part in getattr(algorithm, axis))
    if algorithm.kl is not None:
        yield "kl estimator", algorithm.kl.estimator
