"""Tinker's messages in protobuf, read and written field by field.

Requests and results of `forward_backward` and results of `asample` are protobuf; everything else is JSON.
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
"""Largest number of values of an array, including the zeros of a sparse one."""
DTYPES: Mapping[int, type[np.generic]] = {1: np.float32, 2: np.int64, 3: np.int32}
"""The protocol's number of a type -> the type."""
FLOAT32 = 1
STOP_REASONS = {"stop": 0, "length": 1}
Value: TypeAlias = int | float | bytes
Fields: TypeAlias = Mapping[int, list[Value]]
"""Number of a field -> its values; a field may be repeated."""


class Datum(NamedTuple):
    """One sequence of a training request."""

    tokens: np.ndarray
    """(N,) int64, read by the model."""
    inputs: Mapping[str, np.ndarray]
    """Name -> array for the loss, (N,) or (N, K)."""


@dataclass(frozen=True)
class ForwardBackward:
    """A request for a loss and, unless ``forward_only``, its gradient."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    forward_only: bool


def read_forward_backward(message: bytes) -> tuple[str, int, Fields]:
    """Return a request's client, its place in the client's order, and the fields for ``read_data``.

    Raises DataError if the body is no such message.
    """
    message_fields = read_fields(message)
    return _read_text(message_fields, 1), int(_last_value(message_fields, 2, 0)), message_fields


def read_data(message: Fields) -> ForwardBackward:
    """Read the data of a request. Raises DataError."""
    entries = (read_fields(_as_bytes(x)) for x in message.get(5, []))
    config: dict[str, float | str] = {_read_text(e, 1): float(_last_value(e, 2, 0.0)) for e in entries}
    for entry in (read_fields(_as_bytes(x)) for x in message.get(7, [])):
        value = read_fields(_as_bytes(_last_value(entry, 2, b"")))
        config[_read_text(entry, 1)] = (
            _read_text(value, 2) if 2 in value else float(_last_value(value, 1, 0.0))
        )
    data = [_read_datum(read_fields(_as_bytes(x)), i) for i, x in enumerate(message.get(3, []))]
    seq_id = int(_last_value(message, 2, 0))
    return ForwardBackward(
        _read_text(message, 1), seq_id, data, _read_text(message, 4), config, bool(_last_value(message, 6, 0))
    )


def _read_datum(datum: Fields, number: int) -> Datum:
    tokens = []
    for chunk in (read_fields(_as_bytes(x)) for x in datum.get(1, [])):
        if 1 not in chunk:
            raise DataError(f"datum {number}: a local Tinker reads tokens only, no images and no audio")
        tokens.append(
            _read_numbers(_as_bytes(_last_value(read_fields(_as_bytes(chunk[1][-1])), 1, b"")), np.int32)
        )
    inputs = {}
    for entry in (read_fields(_as_bytes(x)) for x in datum.get(2, [])):
        name = _read_text(entry, 1)
        inputs[name] = _read_tensor(
            read_fields(_as_bytes(_last_value(entry, 2, b""))), f"datum {number}: {name}"
        )
    return Datum(np.concatenate([np.zeros(0, np.int64), *tokens]).astype(np.int64), inputs)


def _read_tensor(tensor: Fields, where: str) -> np.ndarray:
    """Return a tensor as a dense array; the wire may have it in CSR."""
    dtype = DTYPES.get(int(_last_value(tensor, 3, 0)))
    if dtype is None:
        raise DataError(f"{where}: its type is none of float32, int64 and int32")
    shape = _read_integers(tensor, 4)
    if math.prod(shape) > MAX_VALUES:
        raise DataError(f"{where}: the shape {shape} has more than {MAX_VALUES} values")
    try:
        return _read_array(tensor, dtype, shape)
    except (ValueError, IndexError):
        raise DataError(f"{where}: its values do not fill the shape {shape}") from None


def _read_array(tensor: Fields, dtype: type[np.generic], shape: list[int]) -> np.ndarray:
    if 2 not in tensor:
        return _read_numbers(_as_bytes(_last_value(tensor, 1, b"")), dtype).reshape(shape or (-1,))
    # CSR: the values in order, the bounds of the rows among them, and the column of each value.
    sparse = read_fields(_as_bytes(tensor[2][-1]))
    values = _read_numbers(_as_bytes(_last_value(sparse, 1, b"")), dtype)
    ends, columns = (_read_numbers(_as_bytes(_last_value(sparse, n, b"")), np.int64) for n in (2, 3))
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(len(ends) - 1), np.diff(ends)), columns] = values
    return dense


def write_forward_backward(outputs: Sequence[Mapping[str, np.ndarray]], loss: float) -> bytes:
    """Return the message with the float32 arrays of each datum and the sum of the losses.

    Successive data whose arrays have the same width share a record; their numbers of rows may differ.
    """
    message = encode_field(1, b"ArrayRecord")
    start = 0
    widths = [{name: array.shape[1:] for name, array in output.items()} for output in outputs]
    for end in range(1, len(outputs) + 1):
        # A record ends where the next datum has arrays of another width.
        if end < len(outputs) and widths[end] == widths[start]:
            continue
        part = outputs[start:end]
        record = encode_field(3, len(part))
        for name in part[0]:
            arrays = [output[name].astype(np.float32) for output in part]
            offsets = np.cumsum([0, *(a.nbytes for a in arrays)]).astype(np.int64)
            tensor = encode_field(1, b"".join(a.tobytes() for a in arrays)) + encode_field(
                2, offsets.tobytes()
            )
            tensor += encode_field(3, FLOAT32) + b"".join(encode_field(4, n) for n in arrays[0].shape[1:])
            record += encode_field(2, encode_field(1, name.encode()) + encode_field(2, tensor))
        message += encode_field(2, record)
        start = end
    return message + encode_field(3, encode_field(1, b"loss:sum") + encode_field(2, loss))


def write_samples(completions: Sequence[Completion], prompt_logprobs: np.ndarray | None) -> bytes:
    """Return the message with completions and, if given, the log-probs of the prompt's tokens."""
    message = b""
    for completion in completions:
        sequence = encode_field(1, STOP_REASONS[completion.finish]) + encode_field(
            2, completion.tokens.astype(np.int32).tobytes()
        )
        message += encode_field(
            1, sequence + encode_field(3, completion.logprobs.astype(np.float32).tobytes())
        )
    if prompt_logprobs is not None:
        message += encode_field(2, prompt_logprobs.astype(np.float32).tobytes())
    return message


def read_fields(message: bytes) -> Fields:
    """Return the fields of a message. Raises DataError.

    >>> read_fields(bytes([8, 150, 1, 18, 2, 104, 105]))
    {1: [150], 2: [b'hi']}
    """
    by_number: dict[int, list[Value]] = {}
    position = 0
    try:
        while position < len(message):
            tag, position = _read_varint(message, position)
            value: Value
            # The low three bits are the type: 0 a varint, 2 bytes with their length, 1 and 5 fixed numbers.
            if tag & 7 == 0:
                value, position = _read_varint(message, position)
            elif tag & 7 == 2:
                size, position = _read_varint(message, position)
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


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:  # ten bytes hold 64 bits; more are no varint
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
    raise IndexError


def encode_field(number: int, value: Value) -> bytes:
    """Return a field of a message, with its tag."""
    if isinstance(value, float):
        return _encode_varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _encode_varint(number << 3) + _encode_varint(value)
    return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _last_value(message: Fields, number: int, default: Value) -> Value:
    return message.get(number, [default])[-1]


def _as_bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise DataError("the body is no message of Tinker's: it has a number in place of a submessage")
    return value


def _read_text(message: Fields, number: int) -> str:
    return _as_bytes(_last_value(message, number, b"")).decode(errors="replace")


def _read_numbers(values: bytes, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(values, dtype).copy()


def _read_integers(message: Fields, number: int) -> list[int]:
    """Return the integers of a repeated field, which may be packed into bytes."""
    numbers = list[int]()
    for value in message.get(number, []):
        position = 0
        while isinstance(value, bytes) and position < len(value):
            size, position = _read_varint(value, position)
            numbers.append(size)
        if isinstance(value, int):
            numbers.append(value)
    return numbers
