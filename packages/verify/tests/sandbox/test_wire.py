"""Values that cross the border keep their type, and hostile bytes are refused."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_verify.sandbox.wire import BadFrame, decode_value, encode_value, frame, read_frame, same

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner) | st.sets(HASHABLE)
    ),
    max_leaves=20,
)


def reader(data: bytes):
    left = bytearray(data)

    def read(n: int) -> bytes:
        part = bytes(left[:n])
        del left[:n]
        return part

    return read


@given(VALUES)
def test_values_come_back_as_they_were(value) -> None:
    sent = read_frame(reader(frame(encode_value(value))), 1 << 20)
    assert same(encode_value(value), sent)
    back = decode_value(sent)
    assert back == value and type(back) is type(value)


@given(st.binary(max_size=60))
def test_hostile_bytes_are_an_error_of_a_known_kind(data: bytes) -> None:
    with contextlib.suppress(EOFError, BadFrame):
        read_frame(reader(data), 1000)


@given(VALUES, VALUES)
def test_values_that_are_same_on_the_wire_are_equal_in_python(a, b) -> None:
    if same(encode_value(a), encode_value(b)):
        assert list(a) == list(b) if isinstance(a, list | tuple) else a == b


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (9, 9.0),
        (1, True),
        ("1", 1),
        ({1}, [1]),
        ([1], [1, 1]),
        ({1: 2}, {1: 3}),
        (math.nan, math.nan),
        (0, -1),
    ],
)
def test_nothing_equals_another_type_or_nan(expected, got) -> None:
    assert not same(encode_value(expected), encode_value(got))


def test_objects_arrive_as_names_and_equal_nothing() -> None:
    class Equal:
        def __eq__(self, other):
            return True

        __hash__ = None

    class Liar(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert encode_value(Equal()) == {"o": "Equal"}
    assert not same(encode_value(Equal()), encode_value(Equal()))
    assert not same(encode_value(4), encode_value(Liar(5)))


def test_what_is_nested_too_deeply_is_refused() -> None:
    nest: list = []
    for _ in range(200):
        nest = [nest]
    with pytest.raises(ValueError, match="nested"):
        encode_value(nest)
    with pytest.raises(BadFrame):
        read_frame(reader(len(b"[" * 100_000).to_bytes(4, "big") + b"[" * 100_000), 1 << 20)


@pytest.mark.parametrize("levels", [110, 500, 973, 980, 2_000])
def test_a_frame_deeper_than_any_value_is_refused(levels: int) -> None:
    """Just below the limit of recursion such a value was read, and comparing it raised."""
    body = b'{"value":{"s":[' + b"[" * levels + b"]" * levels + b"]}}"
    with pytest.raises(BadFrame):
        read_frame(reader(len(body).to_bytes(4, "big") + body), 1 << 20)


def test_the_deepest_value_that_can_be_encoded_crosses() -> None:
    nest: dict = {}
    for _ in range(31):
        nest = {1: nest}
    sent = read_frame(reader(frame({"value": encode_value(nest)})), 1 << 20)
    assert same(encode_value(nest), sent["value"])
    wide = [[n] for n in range(1000)]
    assert read_frame(reader(frame(encode_value(wide))), 1 << 20) == wide
