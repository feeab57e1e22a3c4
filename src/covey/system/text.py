"""Text for people and JSON: without control characters, with finite numbers, percentages, durations."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

_SHELL_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
Say: TypeAlias = Callable[[str], object]
"""A function that gets a message for people."""
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
)
"""Characters that move the cursor, ring, colour or reverse text, or that nobody can see.

Tab and newline are not here, nor the joiners U+200C and U+200D within text of a script or an emoji that needs
them. The pages have their own list (dom.js).
"""


def escape_controls(text: str) -> str:
    r"""Return text with its control characters as escapes, so that no model output acts on the terminal.

    >>> print(escape_controls("\x1b[2Jgone\u202e 4\u200b2"))
    \x1b[2Jgone\u202e 4\u200b2
    """
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def with_finite_numbers(value: object, digits: int | None = None) -> object:
    """Return a value that JSON can hold: None for numbers that are not finite.

    With ``digits``, numbers have so many significant ones.

    >>> with_finite_numbers({"mean": math.nan, "rows": [1, 0.5]})
    {'mean': None, 'rows': [1, 0.5]}
    """
    if hasattr(value, "tolist"):  # numpy's, which is not loaded here
        return with_finite_numbers(value.tolist(), digits)
    if isinstance(value, Mapping):
        return {k: with_finite_numbers(v, digits) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [with_finite_numbers(v, digits) for v in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")


def json_line(value: object) -> str:
    """Return a value as one line of JSON in which no character acts on a terminal."""
    text = json.dumps(with_finite_numbers(value), ensure_ascii=False, allow_nan=False, default=str)
    # json.dumps gives the \uXXXX form in quotes; the quotes are removed.
    return CONTROLS.sub(lambda match: json.dumps(match[0])[1:-1], text)


def percent(fraction: float, form: str = ".0f") -> str:
    """Return a fraction as a percentage, for people.

    ``form`` has further digits: `g` for a setting, which is printed as it was written.

    >>> percent(0.05), percent(0.975, "g")
    ('5 %', '97.5 %')
    """
    return f"{format(100 * fraction, form)} %"


def duration(seconds: float) -> str:
    """Return seconds as text for people.

    >>> duration(7), duration(95), duration(7300)
    ('7 s', '1 min 35 s', '2 h 1 min')
    """
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min"


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many elements two sequences have in common at their beginning.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(first, second, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def shell_word(text: str) -> str:
    r"""Quote text for a shell: nothing in it is expanded, and line breaks become escapes.

    >>> print(shell_word("it's $2"), shell_word("two\nlines"))
    'it'"'"'s $2' $'two\nlines'
    """
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(_escape_character(c) for c in text) + "'"


def _escape_character(character: str) -> str:
    if character in _SHELL_ESCAPES:
        return _SHELL_ESCAPES[character]
    if character.isprintable() and character != "!":  # an interactive shell expands ! even here
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "replace"))
