"""Write cases.json: inputs, and what covey.objective makes of them in float64.

    python conformance/make.py

A row with numbers worked out by hand is refused if covey computes others.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.algorithm import build_algorithm, describe
from covey.objective.algorithms import Algorithm
from covey.objective.axes import AXES
from covey.objective.axis_function import data_names
from covey.objective.preference import PREFERENCES
from covey.objective.value import value_loss

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from inputs import INPUTS  # noqa: E402
from rows import FORMULAS, PAPERS, ROWS, Row  # noqa: E402

VERSION = 1
TOLERANCE = {True: 1e-9, False: 1e-7}
"""Of a framework's own conventions, and of the rest, where 1e-8 in a divisor is no difference."""
EXACT = 1e-9
DIGITS = 13
UNUSED = ("critic", "filter", "target", "horizon", "refresh_every", "refresh_mix")
LOSS_ONLY = ("ratio", "surrogate", "reduce")
RUN_ONLY = ("advantage", "whiten")
ABOUT = {
    "advantage": ("advantage", "kl"),
    "whiten": ("advantage", "whiten"),
    "ratio": ("ratio", "surrogate"),
    "surrogate": ("surrogate", "select_tokens"),
    "reduce": ("reduce",),
    "kl": ("kl",),
    "correction": ("correction",),
    "weight": ("select_tokens", "token_weights"),
}
"""Kind of a case -> the axes that it is about."""
GRADIENTS = {
    "formula": "the formula's",
    "straight_through": "k2's",
    "ratio": "that of rho times it",
    "score": "that of pi / sg(pi) times it",
}
SHAPES = r"\s*\([NGK](?:, ?[TGK])?,?\)(?: ?(?:->|,) ?\([NGK](?:, ?[TGK])?,?\))*"
FUNCTIONS = {f.__name__: f for own in AXES.values() for f in own} | dict(PREFERENCES)


def adapter(path: Path) -> Any:
    """Load an adapter by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OURS = adapter(HERE / "adapters/covey_own.py")


def cases() -> dict[str, Any]:
    """Return the whole file: version, inputs by name, and the cases with what is due."""
    made = [case_of(row) for row in ROWS]
    assert len({case["id"] for case in made}) == len(made)
    return {"version": VERSION, "inputs": rounded(dict(INPUTS)), "cases": made}


def case_of(row: Row) -> dict[str, Any]:
    """Return a row's case. Raises AssertionError if covey's numbers are not those worked out by hand."""
    case = {
        "id": row.id,
        "shows": row.shows,
        **about(row),
        "tolerance": TOLERANCE[bool(row.framework)],
        "inputs": row.inputs,
    }
    given = {**case, "inputs": rounded(dict(INPUTS[row.inputs]))}
    due: dict[str, Any] = {}
    if "advantages" in row.due:
        due["advantages"] = OURS.advantages(given)
        given["inputs"].setdefault("advantages", due["advantages"].tolist())
    if "loss" in row.due:
        due |= OURS.loss(given)
    if case["asks"].get("nll"):
        del due["tokens"]  # its likelihood is no term of the reduction
    expected = rounded({name: np.asarray(value).tolist() for name, value in due.items()})
    if row.hand:
        case["by_hand"] = {"says": row.says, **rounded(spread(row, expected))}
        check(row, case["by_hand"], expected)
    return {**case, "expected": expected}


def about(row: Row) -> dict[str, Any]:
    """Return paper, formula and the settings asked for, written out."""
    if "preference" in row.asks or "value_loss" in row.asks:
        (kind, settings), *_ = row.asks.items()
        function = value_loss if kind == "value_loss" else FUNCTIONS[settings["name"]]
        words = {"paper": source(row.id), "formula": formula_in(function), "asks": dict(row.asks)}
        if kind == "preference":
            words["needs"] = list(data_names(function))
            words["trained"] = ["log_ratio"] if "log_ratio" in words["needs"] else ["chosen", "rejected"]
        return words
    start = {} if row.preset else {"name": "grpo", "kl": None}
    algorithm = build_algorithm({**start, **row.asks})
    axes = described(algorithm)
    for unused in LOSS_ONLY if "loss" not in row.due else RUN_ONLY if "advantages" not in row.due else ():
        axes.pop(unused, None)
    named = {name: getattr(row, name) for name in ("framework", "preset") if getattr(row, name)}
    paper = algorithm.paper if row.preset else source(row.id)
    return {**named, "paper": paper, "formula": formula_of(row, axes), "asks": axes}


def source(name: str) -> str:
    """Return the paper of the longest beginning of the id."""
    return PAPERS[max((start for start in PAPERS if name.startswith(start)), key=len)]


def described(algorithm: Algorithm) -> dict[str, Any]:
    """Return the axes of an algorithm that a case is about; what is null or empty is left out."""
    every = describe(algorithm).items()
    axes: dict[str, Any] = {axis: value for axis, value in every if value and axis not in UNUSED}
    if "kl" in axes:
        axes["kl"] = {name: value for name, value in axes["kl"].items() if name not in UNUSED}
    return {**axes} if axes.get("old") != "trainer" else {a: v for a, v in axes.items() if a != "old"}


def formula_of(row: Row, axes: dict[str, Any]) -> str:
    """Return the formulas of the functions that a case is about: of one axis, or of a whole algorithm."""
    if row.id in FORMULAS:
        return FORMULAS[row.id]
    kind = row.id.partition("/")[0]
    shown = ABOUT.get(kind, tuple(axes))
    found = []
    for axis in (a for a in shown if a in axes):
        for one in axes[axis] if isinstance(axes[axis], list) else [axes[axis]]:
            name = one.get("estimator", one).get("name") if isinstance(one, dict) else None
            if name in FUNCTIONS:
                found.append(f"{axis}: {formula_in(FUNCTIONS[name])}")
    if "kl" in shown and axes.get("kl", {}).get("place") == "loss":
        found.append(f"its gradient: {GRADIENTS[axes['kl']['gradient']]}")
    return "; ".join(found)


def formula_in(function: Any) -> str:
    """Return the first sentence of a function's documentation, without shapes."""
    first = re.split(r"\.(?: |$)", " ".join((inspect.getdoc(function) or "").split()))[0]
    return re.sub(SHAPES, "", first).replace("`", "")


def spread(row: Row, expected: dict[str, Any]) -> dict[str, Any]:
    """Return numbers by hand in the shape of what is due: one per completion goes to each of its tokens."""
    mask = np.array(INPUTS[row.inputs].get("mask", [[1]]), dtype=float)
    found = {}
    for name, value in row.hand.items():
        due = np.array(expected[name])
        found[name] = value
        if due.ndim == 2 and not np.ndim(value[0]):
            found[name] = (np.array(value, dtype=float)[:, None] * mask).tolist()
        elif due.ndim == 2:
            found[name] = [list(own) + [0.0] * (due.shape[1] - len(own)) for own in value]
    return found


def check(row: Row, hand: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in row.hand:
        far = np.abs(np.array(hand[name], dtype=float) - np.array(expected[name])).max()
        assert far < EXACT, f"{row.id}: {name} by hand is {hand[name]}, covey's {expected[name]}"


def rounded(value: Any) -> Any:
    """Return numbers with 13 digits, so that the last bits of a machine's exp do not show."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return 0.0 if abs(value) < 1e-15 else float(f"{value:.{DIGITS}g}")
    return value


def written(value: Any) -> str:
    """Return the JSON, a row of numbers a line."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    return (
        re.sub(
            r"\[[^\[\]{}\"]*\]",
            lambda m: " ".join(m.group().split()).replace("[ ", "[").replace(" ]", "]"),
            text,
        )
        + "\n"
    )


if __name__ == "__main__":
    (HERE / "cases.json").write_text(written(cases()), encoding="utf-8")
    print(f"{len(ROWS)} cases, {sum(bool(row.hand) for row in ROWS)} with numbers by hand")
