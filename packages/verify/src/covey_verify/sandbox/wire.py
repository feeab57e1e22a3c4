"""The wire format between a checker and untrusted code: length-prefixed JSON of plain values.

Values keep their type: 9 is not 9.0, (1, 2) is not [1, 2]. A value that is not plain arrives as the name of
its type and equals nothing. The trusted side compares the encoded form and builds no object from it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from itertools import chain
from typing import Any

HEADER = struct.Struct(">I")
BIG = 1 << 53
"""Integers from this size on are sent as hexadecimal text, since parsing decimals is quadratic."""
DEPTH = 99
FRAME_DEPTH = DEPTH + 10
"""Depth of a frame: an encoded value and its message. A deeper frame would exceed the recursion limit."""


class Attributes:
    """A copy of an object's attributes, by their names.

    >>> state = Attributes(total=3)
    >>> state.total, state == Attributes(total=3), hasattr(state, "reward")
    (3, True, False)
    """

    def __init__(self, /, **values: object) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"there is no {name!r}; there are {', '.join(vars(self)) or 'no attributes'}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attributes) and vars(self) == vars(other)

    # The values are mutable, so there is no hash; mypy cannot express that.
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
"""Types that JSON cannot write: type -> (tag, function to a plain value)."""
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
    """Raised if the received bytes are not a frame of plain values."""


def frame(message: object) -> bytes:
    """Return a message as bytes: a 4-byte big-endian length and JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes], limit: int) -> Any:
    """Return the next message. Raises EOFError or BadFrame.

    ``read`` takes n and returns up to n bytes, b"" at the end.
    """
    (size,) = HEADER.unpack(_exactly(read, HEADER.size))
    if size > limit:
        raise BadFrame(f"{size} bytes, at most {limit} are allowed")
    return parse_json(_exactly(read, size))


def parse_json(body: bytes) -> Any:
    """Parse JSON of an untrusted side, no deeper than ``encode_value`` makes it. Raises BadFrame."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not JSON: {error}") from None
    # The cheap count of brackets is an upper bound of the depth; only a large one needs the walk.
    if body.count(b"[") + body.count(b"{") > FRAME_DEPTH and deeper(value, FRAME_DEPTH):
        raise BadFrame(f"nested more than {FRAME_DEPTH} levels deep")
    return value


def deeper(value: object, levels: int) -> bool:
    """Return whether lists and mappings are nested deeper than ``levels``, without recursion."""
    layer = [value]
    for _ in range(levels + 1):
        containers = [v for v in layer if isinstance(v, list | dict)]
        if not containers:
            return False
        contents = (c if isinstance(c, list) else c.values() for c in containers)
        layer = list(chain.from_iterable(contents))
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
    """Return a value as JSON that keeps its type. Raises ValueError if it is nested too deeply.

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
    # A subclass (an Enum's int, a namedtuple, a Counter) counts as its plain base type.
    for base in (bool, int, float, str, bytes, tuple, list, dict, set, frozenset):
        if isinstance(value, base):
            plain: Any = base
            return encode_value(plain(value), depth - 1)
    if hasattr(value, "tolist"):  # numpy
        return encode_value(value.tolist(), depth - 1)
    return {"o": kind.__name__}


def decode_value(data: object) -> Any:
    """Return the value that ``encode_value`` was given; an unknown type becomes ``object()``.

    For children only: hostile keys can make building sets and dicts slow.
    """
    if isinstance(data, list):
        return [decode_value(v) for v in data]
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    return object() if tag == "o" else DECODERS[tag](decode_value(content))


def numbers_agree(expected: float, got: float, tolerance: float) -> bool:
    """Return whether two numbers are equal up to a relative tolerance, which is absolute if 0 is expected.

    >>> numbers_agree(6.6e-34, 0.0, 1e-9), numbers_agree(0.0, 1e-17, 1e-9)
    (False, True)
    """
    return math.isclose(expected, got, rel_tol=tolerance, abs_tol=0.0 if expected else tolerance)


def same(expected: Any, got: Any, tolerance: float = 0.0) -> bool:
    """Return whether two encoded values are equal, including types; floats up to a relative tolerance.

    A tuple may equal an expected list, since data sets in JSON cannot write tuples.

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
    # An object ("o") equals nothing, and neither does NaN.
    comparable = list(got) == [tag] and tag != "o" and (tag, content) != ("f", "nan")
    theirs = got[tag] if comparable else None
    # Sets and dicts have no order, so their encoded parts are sorted.
    if tag in "szd" and isinstance(theirs, list):
        content = sorted(content, key=json.dumps)
        theirs = sorted(theirs, key=json.dumps)
    return comparable and same(content, theirs, tolerance)
