"""What passes between a checker and untrusted code: length-prefixed JSON of plain values.

Values keep their type: 9 is not 9.0, (1, 2) not [1, 2]. What is no plain value arrives as the name
of its type and equals nothing. The trusted side compares the encoded form and builds no object
from it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct(">I")
BIG = 1 << 53
"""Integers beyond are sent as hexadecimal text: parsing decimal is quadratic."""
DEPTH = 99
FRAME_DEPTH = DEPTH + 10
"""Of a frame: an encoded value and the message around it. Deeper ones make recursion fail."""


class Attributes:
    """What the attributes of an object were, by their names.

    >>> found = Attributes(total=3)
    >>> found.total, found == Attributes(total=3), hasattr(found, "reward")
    (3, True, False)
    """

    def __init__(self, /, **values: object) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"there is no {name!r}; there are {', '.join(vars(self)) or 'no attributes'}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attributes) and vars(self) == vars(other)

    # Values may be changed; mypy has no word for a class without a hash.
    __hash__ = None  # type: ignore[assignment]


TAGGED: dict[type, tuple[str, Callable[[Any], object]]] = {
    int: ("i", hex),
    float: ("f", repr),
    bytes: ("b", bytes.hex),
    complex: ("c", lambda value: [value.real, value.imag]),
    tuple: ("t", list),
    set: ("s", list),
    frozenset: ("z", list),
    dict: ("d", lambda value: [[k, v] for k, v in value.items()]),
    Attributes: ("n", vars),
}
"""What JSON cannot write: its tag, and the plain value it is written as."""
DECODERS: dict[str, Callable[[Any], object]] = {
    "i": lambda text: int(text, 16),
    "f": float,
    "b": bytes.fromhex,
    "c": lambda parts: complex(*parts),
    "t": tuple,
    "s": set,
    "z": frozenset,
    "d": dict,
    "n": lambda values: Attributes(**values),
}


class BadFrame(ValueError):
    """What came over the wire is no frame of plain values."""


def frame(message: object) -> bytes:
    """A message as bytes."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes], limit: int) -> Any:
    """The next message; ``read`` returns up to n bytes, none at the end. Raises EOFError, BadFrame."""
    (size,) = HEADER.unpack(_exactly(read, HEADER.size))
    if size > limit:
        raise BadFrame(f"{size} bytes, at most {limit} are allowed")
    return parse_json(_exactly(read, size))


def parse_json(body: bytes) -> Any:
    """JSON of an untrusted side, no deeper than ``encode_value`` makes it. Raises BadFrame."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from None
    if body.count(b"[") + body.count(b"{") > FRAME_DEPTH and deeper(found, FRAME_DEPTH):
        raise BadFrame(f"nested more than {FRAME_DEPTH} levels deep")
    return found


def deeper(value: object, levels: int) -> bool:
    """Whether lists and mappings are nested deeper than so many levels. Does not recurse."""
    layer = [value]
    for _ in range(levels + 1):
        containers = [v for v in layer if isinstance(v, list | dict)]
        layer = [v for c in containers for v in (c if isinstance(c, list) else c.values())]
        if not containers:
            return False
    return True


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    parts = []
    while size > 0:
        part = read(min(size, 1 << 16))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode_value(value: Any, depth: int = DEPTH) -> object:
    """A value as JSON that keeps its type. Raises ValueError if it is nested too deeply.

    >>> encode_value({1: (2, float("nan"))})
    {'d': [[1, {'t': [2, {'f': 'nan'}]}]]}
    """
    kind = type(value)
    if depth == 0:
        raise ValueError(f"nested more than {DEPTH} levels deep")
    if value is None or kind in (bool, str) or (kind is int and -BIG < value < BIG):
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is list:
        return [encode_value(v, depth - 1) for v in value]
    if kind in TAGGED:
        tag, parts = TAGGED[kind]
        return {tag: encode_value(parts(value), depth - 1)}
    for base in (bool, int, float, str, bytes, tuple, list, dict, set, frozenset):
        if isinstance(value, base):
            plain: Any = base
            return encode_value(plain(value), depth - 1)
    if hasattr(value, "tolist"):  # numpy
        return encode_value(value.tolist(), depth - 1)
    return {"o": kind.__name__}


def decode_value(data: object) -> Any:
    """The value that ``encode_value`` was given; an object of an unknown type becomes ``object()``.

    Only for children: sets and dicts built from hostile keys can be made slow.
    """
    if isinstance(data, list):
        return [decode_value(v) for v in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    return object() if tag == "o" else DECODERS[tag](decode_value(content))


def numbers_agree(expected: float, got: float, tolerance: float) -> bool:
    """Whether two numbers are equal up to a relative tolerance, which is an absolute one at 0 only.

    >>> numbers_agree(6.6e-34, 0.0, 1e-9), numbers_agree(0.0, 1e-17, 1e-9)
    (False, True)
    """
    return math.isclose(expected, got, rel_tol=tolerance, abs_tol=0.0 if expected else tolerance)


def same(expected: Any, got: Any, tolerance: float = 0.0) -> bool:
    """Whether two encoded values are equal, types included; floats up to a relative tolerance.

    An expected list may be met by a tuple, since JSON cannot write one.

    >>> [same(encode_value(a), encode_value(b)) for a, b in (([1, 2], (1, 2)), (9, 9.0), (1, True))]
    [True, False, False]
    """
    if isinstance(expected, list) and isinstance(got, dict) and list(got) == ["t"]:
        got = got["t"]
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list):
        pairs = zip(expected, got, strict=False)
        return len(expected) == len(got) and all(same(a, b, tolerance) for a, b in pairs)
    if isinstance(expected, float) and numbers_agree(expected, got, tolerance):
        return True
    if not isinstance(expected, dict):
        return bool(expected == got)
    ((tag, content),) = expected.items()
    known = list(got) == [tag] and tag != "o" and (tag, content) != ("f", "nan")
    theirs = got[tag] if known else None
    if tag in "szd" and isinstance(theirs, list):
        content, theirs = sorted(content, key=json.dumps), sorted(theirs, key=json.dumps)
    return known and same(content, theirs, tolerance)
