"""JSON of a user's files, with errors that name the place in the user's words."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from covey_verify.errors import DataError


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text. Raises DataError, which begins with ``where``.

    Unlike `json.loads` it refuses an object that has a key twice, and a number too large for a float.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            repeated = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
            raise DataError(f"{where}: {repeated!r} appears twice in one object; remove one of them")
        return result

    def finite(digits: str) -> float:
        if math.isinf(float(digits)):
            raise DataError(f"{where}: the number {digits[:40]} is too large; write it as a text, in quotes")
        return float(digits)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=finite)
    except UnicodeDecodeError:
        raise
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON {_place(error)}") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None
    except ValueError:  # Python refuses to read so many digits as an integer
        raise DataError(f"{where}: a number has thousands of digits; write it as a text, in quotes") from None


def _place(error: json.JSONDecodeError) -> str:
    """Return the place of a mistake in a text, and what it is; a text of one line needs no number of it."""
    text = error.doc.rstrip()
    several_lines = "\n" in text
    if error.pos >= len(text):
        hint = "" if several_lines else "; write each object on one line"
        return f"at its end: something is missing{hint}"
    position = (
        f"at line {error.lineno}, column {error.colno}" if several_lines else f"at column {error.colno}"
    )
    hint = "; write each object on a line of its own" if error.msg == "Extra data" else ""
    return f"{position}: {error.msg}{hint}"
