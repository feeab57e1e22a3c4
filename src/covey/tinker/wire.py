"""The messages that Tinker's SDK sends and reads as protobuf, field by field.

Requests of `forward_backward`, its results and the results of `asample` are protobuf; all else is JSON.
Fields have the numbers of the SDK's schema, version 0.38.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from covey.types import Completion
from covey_verify.errors import DataError

PROTOBUF = "application/x-protobuf"
MAX_VALUES = 1 << 24
"""Most values of an array, with the zeros of a sparse one."""
DTYPES: Mapping[int, type[np.generic]] = {1: np.float32, 2: np.int64, 3: np.int32}
FLOAT32 = 1
STOP_REASONS = {"stop": 0, "length": 1}
Value: TypeAlias = int | float | bytes
Fields: TypeAlias = Mapping[int, list[Value]]


class Datum(NamedTuple):
    """One sequence of a training request."""

    tokens: np.ndarray
    """(N,) int64: what the model reads."""
    inputs: Mapping[str, np.ndarray]
    """Arrays by name that the loss reads, (N,) or (N, K)."""


@dataclass(frozen=True)
class ForwardBackward:
    """A request for a forward pass, and unless ``forward_only`` for its gradient."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool


def read_forward_backward(message: bytes) -> tuple[str, int, Fields]:
    """The model and place in its order of a request, and the fields that ``read_data`` takes.

    Raises DataError if it is no such message.
    """
    message_fields = read_fields(message)
    return _text(message_fields, 1), int(_last(message_fields, 2, 0)), message_fields


def read_data(message: Fields) -> ForwardBackward:
    """Read the rest of a request. Raises DataError."""
    entries = (read_fields(_bytes(x)) for x in message.get(5, []))
    config: dict[str, float | str] = {_text(e, 1): float(_last(e, 2, 0.0)) for e in entries}
    for entry in (read_fields(_bytes(x)) for x in message.get(7, [])):
        value = read_fields(_bytes(_last(entry, 2, b"")))
        config[_text(entry, 1)] = _text(value, 2) if 2 in value else float(_last(value, 1, 0.0))
    data = [_datum(read_fields(_bytes(x)), i) for i, x in enumerate(message.get(3, []))]
    seq_id = int(_last(message, 2, 0))
    return ForwardBackward(
        _text(message, 1), seq_id, data, _text(message, 4), config, bool(_last(message, 6, 0))
    )


def _datum(datum: Fields, number: int) -> Datum:
    tokens = []
    for chunk in (read_fields(_bytes(x)) for x in datum.get(1, [])):
        if 1 not in chunk:
            raise DataError(f"datum {number}: a local Tinker reads tokens only, no images and no audio")
        tokens.append(_array(_bytes(_last(read_fields(_bytes(chunk[1][-1])), 1, b"")), np.int32))
    inputs = {}
    for entry in (read_fields(_bytes(x)) for x in datum.get(2, [])):
        name = _text(entry, 1)
        inputs[name] = _tensor(read_fields(_bytes(_last(entry, 2, b""))), f"datum {number}: {name}")
    return Datum(np.concatenate([np.zeros(0, np.int64), *tokens]).astype(np.int64), inputs)


def _tensor(tensor: Fields, where: str) -> np.ndarray:
    """An array of any shape; a sparse one (CSR) with zeros where it has no value."""
    dtype = DTYPES.get(int(_last(tensor, 3, 0)))
    if dtype is None:
        raise DataError(f"{where}: its type is none of float32, int64 and int32")
    shape = _read_integers(tensor, 4)
    if math.prod(shape) > MAX_VALUES:
        raise DataError(f"{where}: a shape of {shape}, which is more than {MAX_VALUES} values")
    try:
        return _read_array(tensor, dtype, shape)
    except (ValueError, IndexError):
        raise DataError(f"{where}: its values do not fill the shape {shape}") from None


def _read_array(tensor: Fields, dtype: type[np.generic], shape: list[int]) -> np.ndarray:
    if 2 not in tensor:
        return _array(_bytes(_last(tensor, 1, b"")), dtype).reshape(shape or (-1,))
    sparse = read_fields(_bytes(tensor[2][-1]))
    values = _array(_bytes(_last(sparse, 1, b"")), dtype)
    ends, columns = (_array(_bytes(_last(sparse, n, b"")), np.int64) for n in (2, 3))
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(len(ends) - 1), np.diff(ends)), columns] = values
    return dense


def write_forward_backward(outputs: Sequence[Mapping[str, np.ndarray]], loss: float) -> bytes:
    """Write the float32 arrays of each datum, and the sum of its losses. Arrays of a name may differ in rows.

    One record holds data whose arrays have the same width.
    """
    message = written_field(1, b"ArrayRecord")
    start = 0
    widths = [{name: array.shape[1:] for name, array in output.items()} for output in outputs]
    for end in range(1, len(outputs) + 1):
        if end < len(outputs) and widths[end] == widths[start]:
            continue
        part = outputs[start:end]
        record = written_field(3, len(part))
        for name in part[0]:
            arrays = [output[name].astype(np.float32) for output in part]
            offsets = np.cumsum([0, *(a.nbytes for a in arrays)]).astype(np.int64)
            tensor = written_field(1, b"".join(a.tobytes() for a in arrays)) + written_field(
                2, offsets.tobytes()
            )
            tensor += written_field(3, FLOAT32) + b"".join(written_field(4, n) for n in arrays[0].shape[1:])
            record += written_field(2, written_field(1, name.encode()) + written_field(2, tensor))
        message += written_field(2, record)
        start = end
    return message + written_field(3, written_field(1, b"loss:sum") + written_field(2, loss))


def write_samples(completions: Sequence[Completion], prompt_logprobs: np.ndarray | None) -> bytes:
    """Write completions, and the log-prob of each token of the prompt if there are any: NaN for the first."""
    message = b""
    for completion in completions:
        sequence = written_field(1, STOP_REASONS[completion.finish]) + written_field(
            2, completion.tokens.astype(np.int32).tobytes()
        )
        message += written_field(
            1, sequence + written_field(3, completion.logprobs.astype(np.float32).tobytes())
        )
    if prompt_logprobs is not None:
        message += written_field(2, prompt_logprobs.astype(np.float32).tobytes())
    return message


def read_fields(message: bytes) -> Fields:
    """The fields of a message by number, in order. Raises DataError.

    >>> read_fields(bytes([8, 150, 1, 18, 2, 104, 105]))
    {1: [150], 2: [b'hi']}
    """
    by_number: dict[int, list[Value]] = {}
    position = 0
    try:
        while position < len(message):
            tag, position = _varint(message, position)
            value: Value
            if tag & 7 == 0:
                value, position = _varint(message, position)
            elif tag & 7 == 2:
                size, position = _varint(message, position)
                value = message[position : position + size]
                if len(value) < size:
                    raise IndexError
                position += size
            else:
                kind = {1: "<d", 5: "<f"}[tag & 7]
                value = struct.unpack_from(kind, message, position)[0]
                position += struct.calcsize(kind)
            by_number.setdefault(tag >> 3, []).append(value)
    except (IndexError, KeyError, struct.error):
        raise DataError("the body is no protobuf message") from None
    return by_number


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
    raise IndexError


def written_field(number: int, value: Value) -> bytes:
    """Return a field of a message as protobuf writes it."""
    if isinstance(value, float):
        return _number(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


def _number(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _last(message: Fields, number: int, default: Value) -> Value:
    return message.get(number, [default])[-1]


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise DataError("the body is no message of Tinker's: a number where fields should be")
    return value


def _text(message: Fields, number: int) -> str:
    return _bytes(_last(message, number, b"")).decode(errors="replace")


def _array(values: bytes, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(values, dtype).copy()


def _read_integers(message: Fields, number: int) -> list[int]:
    """Integers that may be packed into one field."""
    numbers = list[int]()
    for value in message.get(number, []):
        position = 0
        while isinstance(value, bytes) and position < len(value):
            size, position = _varint(value, position)
            numbers.append(size)
        if isinstance(value, int):
            numbers.append(value)
    return numbers
