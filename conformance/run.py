"""Compare a trainer's functions with the cases: advantages, losses and gradients.

    python conformance/run.py conformance/adapters/covey_own.py

An adapter is a Python file with ``advantages(case)`` and ``loss(case)``, see README.md. Prints a table; exit
code 1 if something differs that the adapter's EXPECTED does not list, 2 if the comparison cannot be made.
Needs the standard library, numpy and whatever the adapter imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
CASES = Path(__file__).with_name("cases.json")


class Unusable(Exception):
    """The comparison cannot be made."""


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Return the cases with their inputs put in. Raises Unusable."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["version"] != VERSION:
            raise Unusable(f"{path}: version {table['version']} is not {VERSION}, which this runner reads")
        return [{**case, "inputs": dict(table["inputs"][case["inputs"]])} for case in table["cases"]]
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path} is not JSON: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise Unusable(f"{path} is no table of cases: {type(error).__name__} {error}") from error


def read_adapter(path: Path) -> Any:
    """Import an adapter's file. Raises Unusable."""
    spec = importlib.util.spec_from_file_location(f"adapter_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Unusable(f"{path} is no Python file")
    adapter = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(adapter)
    except (Exception, SystemExit) as error:
        raise Unusable(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    lacking = [name for name in ("advantages", "loss") if not callable(getattr(adapter, name, None))]
    if lacking:
        raise Unusable(f"{path} has no function {' and no function '.join(lacking)}; see README.md")
    if not isinstance(getattr(adapter, "EXPECTED", {}), dict):
        raise Unusable(f"{path}: EXPECTED is no dict of id -> reason")
    return adapter


def found(adapter: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return what the trainer makes of a case; its loss is given the advantages that are due."""
    due = case["expected"]
    result: dict[str, Any] = {}
    if "advantages" in due:
        with suppress(NotImplementedError):
            result["advantages"] = adapter.advantages(case)
    if "loss" in due:
        given = {"advantages": due["advantages"]} if "advantages" in due else {}
        with suppress(NotImplementedError):
            result |= adapter.loss({**case, "inputs": {**case["inputs"], **given}}) or {}
    return {name: value for name, value in result.items() if value is not None and name in due}


def distance(value: Any, due: Any, case: dict[str, Any]) -> float | str:
    """Return the largest difference relative to the largest number that is due, or what is wrong in words."""
    array, wanted = np.asarray(value, dtype=float), np.asarray(due, dtype=float)
    if array.shape != wanted.shape:
        return f"has the shape {array.shape} where {wanted.shape} is due"
    mask = np.asarray(case["inputs"].get("mask", 1))
    if wanted.ndim == 2 and mask.shape == wanted.shape:
        array = np.where(mask, array, 0.0)
    if not np.isfinite(array).all():
        return "is not finite"
    return float(np.abs(array - wanted).max() / (np.abs(wanted).max() or 1.0))


def verdict(adapter: Any, case: dict[str, Any]) -> str:
    """Return "ok", "not offered", or what differs."""
    try:
        result = found(adapter, case)
        far = {name: distance(value, case["expected"][name], case) for name, value in result.items()}
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error)[:120]}".rstrip(": ")
    wrong = [
        f"{name} {value}" if isinstance(value, str) else f"{name} by {value:.1e}"
        for name, value in far.items()
        if isinstance(value, str) or value > case["tolerance"]
    ]
    return "differs: " + ", ".join(wrong) if wrong else "ok" if far else "not offered"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if something differs that is not expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--only", default="", help="beginning of the ids to compare")
    parser.add_argument("--differences", action="store_true", help="leave out what is equal or not offered")
    given = parser.parse_args(arguments)
    try:
        cases = [case for case in read_cases(given.cases) if case["id"].startswith(given.only)]
        if not cases:
            raise Unusable(f"{given.cases} has no case whose id begins with {given.only!r}")
        adapter = read_adapter(given.adapter)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    expected = getattr(adapter, "EXPECTED", {})
    count: Counter[str] = Counter()
    lines = ["| case | verdict | why |", "|---|---|---|"]
    for case in cases:
        says = verdict(adapter, case)
        differs = says not in ("ok", "not offered")
        why = expected.get(case["id"], "NOT EXPECTED" if differs else "")
        kind = ("expected" if case["id"] in expected else "not expected") if differs else says
        count[kind] += 1
        if differs or not given.differences:
            lines.append(f"| {case['id']} | {says} | {why if differs else ''} |")
        if not differs and case["id"] in expected:
            print(f"{case['id']} is listed in EXPECTED and is {says}", file=sys.stderr)
    print("\n".join(lines))
    print(
        f"\n{len(cases)} cases: {count['ok']} ok, {count['expected']} differ as listed, "
        f"{count['not expected']} differ, {count['not offered']} not offered"
    )
    return 1 if count["not expected"] else 0


if __name__ == "__main__":
    sys.exit(main())
