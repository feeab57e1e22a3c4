"""The work of verifiers that is done in a killable subprocess, because untrusted text could make it hang.

This module has few imports, because the fork server preloads it.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from covey_verify.sandbox.wire import decode_value, deeper, encode_value

# Characters, and nested levels, of a JSON value.
MAX_JSON = 100_000
MAX_DEPTH = 60
MOMENT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)")
# Formats that jsonschema checks only with further packages.
FORMATS = {
    "time": re.compile(r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"),
    "uri": re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+"),
    "hostname": re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*"),
    "email": re.compile(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)*"),
}
STANDARD = """
    date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri
    iri-reference uuid uri-template json-pointer relative-json-pointer regex
"""
STANDARD_FORMATS = frozenset(STANDARD.split())
"""Formats that the standard defines; any other name is only a note for readers."""
BLANKS = " \t\r\n"
"""The white space of JSON."""


def find_match(pattern: str, how: str, text: str) -> str | None:
    """Return the text that a pattern matches, at most 500 characters, or None."""
    match = getattr(re, how)(pattern, text)
    return match[0][:500] if match else None


def python_accepts(code: str) -> bool:
    """Return whether Python's compiler accepts a program with at least one statement."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(code, "candidate.py", "exec", dont_inherit=True)
            return bool(ast.parse(code).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False


def strict_json(text: str) -> object:
    """Parse strict JSON: no NaN, no repeated key, no lone surrogate, no deep nesting, no text around it.

    Every number fits into a float: `1e999` would be infinite. Raises ValueError.

    >>> strict_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    value, end = strict_json_at(text, after_blanks(text, 0))
    if text[end:].strip(BLANKS):
        raise ValueError(f"no JSON behind {end} characters: {text[end : end + 20]!r}")
    return value


def strict_json_at(text: str, start: int) -> tuple[object, int]:
    """Return the strict JSON value that begins at an index of a text, and where it ends. Raises ValueError.

    >>> strict_json_at('<call>{"a": "</call>"}</call>', 6)
    ({'a': '</call>'}, 22)
    """
    try:
        value, end = DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested without end") from None
    if end - start > MAX_JSON:
        raise ValueError(f"longer than {MAX_JSON} characters")
    if deeper(value, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value, end


def after_blanks(text: str, start: int) -> int:
    """Return the index of the first character from ``start`` on that is not white space.

    >>> after_blanks("a  b", 1)
    3
    """
    index = start
    while index < len(text) and text[index] in BLANKS:
        index += 1
    return index


def finite(value: object) -> bool:
    """Return whether all numbers in a JSON value fit into a float."""
    try:
        strict_json(json.dumps(value))
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _number(kind: type[int | float], text: str) -> int | float:
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:20]}... is too large")
    return kind(text)


DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_constant=_refuse,
    parse_int=partial(_number, int),
    parse_float=partial(_number, float),
)


def conforms(documents: Sequence[tuple[object, object]]) -> str | None:
    """Return the fault of the first document that does not conform to its schema; texts are parsed first."""
    for document, schema in documents:
        try:
            value = strict_json(document) if isinstance(document, str) else document
        except ValueError as error:
            return f"not JSON: {error}"
        if schema is not None:
            import jsonschema

            kind = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
            validator = kind(schema, format_checker=format_checker())
            complaint = jsonschema.exceptions.best_match(validator.iter_errors(value))
            if complaint is not None:
                return f"{complaint.json_path}: {complaint.message[:200]}"
    return None


def format_checker() -> Any:
    """Return jsonschema's checker of `format`, extended by FORMATS and `date-time`."""
    import jsonschema

    checker = jsonschema.FormatChecker()
    for name, pattern in FORMATS.items():
        checker.checks(name)(lambda text, p=pattern: not isinstance(text, str) or bool(p.fullmatch(text)))
    checker.checks("date-time", raises=ValueError)(_is_moment)
    return checker


def unchecked_formats(schema: object) -> set[str]:
    """Return the standard formats that a schema asks for and that are not checked here."""
    if isinstance(schema, list):
        return set().union(*map(unchecked_formats, schema))
    if not isinstance(schema, dict):
        return set()
    unchecked: set[str] = set().union(*map(unchecked_formats, schema.values()))
    name = schema.get("format")
    if isinstance(name, str) and name in STANDARD_FORMATS - format_checker().checkers.keys():
        unchecked.add(name)
    return unchecked


def _is_moment(text: object) -> bool:
    if isinstance(text, str):
        if MOMENT.fullmatch(text) is None:
            return False
        datetime.fromisoformat(text.upper())
    return True


def gym_items(name: str, seed: int, size: int) -> list[object]:
    """Return problems of reasoning-gym. Some depend on Python's hash seed, which this process has fixed."""
    import reasoning_gym

    tasks = reasoning_gym.create_dataset(name, seed=seed, size=size)
    return [encode_value(tasks[index]) for index in range(size)]


def gym_score(name: str, item: object, answer: str) -> float:
    """Return reasoning-gym's score of an answer.

    Call it only in a sandbox: some scorers execute the answer.
    """
    import reasoning_gym

    return float(reasoning_gym.create_dataset(name, seed=0, size=1).score_answer(answer, decode_value(item)))
