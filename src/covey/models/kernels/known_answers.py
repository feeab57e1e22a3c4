"""Known answers of the kernels, worked out by hand, to detect a compiler or processor that miscomputes.

Numbers are integers or halves, so that they are exact in bfloat16 too. Uniform attention, equal logits and a
rotation by a right angle leave only simple sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

T = 3
"""Tokens."""
H = 2
"""Query heads."""
K = 1
"""Key/value heads."""
E = 32
"""Head width, and model width."""
V = 64
"""Vocabulary."""
KernelCall = Callable[..., None]
"""Runs an operation by name, as ``calls.call`` does."""
KnownAnswer = tuple[str, Tensor, Tensor | float]
"""An operation, its result, and the expected result."""


def first_incorrect(
    call: KernelCall, packed_size: Callable[..., int], numbers: torch.dtype | str
) -> str | None:
    """The first operation whose answer is not the known one; None if all are correct."""
    checks = [_products(call, packed_size, numbers), _outer_sums(call, numbers), _adapters(call, numbers)]
    if isinstance(numbers, torch.dtype):  # "mixed" are products alone
        parts = (
            *(_embedding, _norms, _gates, _heads, _heads_back, _attention, _attention_back),
            *(_decoding, _logits, _token_outputs),
        )
        checks += [operations(call, numbers) for operations in parts]
    for name, result, expected in chain.from_iterable(checks):
        if not _close(result, expected):
            return name
    return None


def _close(result: Tensor, expected: Tensor | float) -> bool:
    reference = torch.as_tensor(expected).float()
    return bool(torch.allclose(result.float(), reference.expand_as(result), rtol=1e-2, atol=1e-3))


def _nan_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    # NaN, so that a value that an operation forgets to write is found.
    return torch.full(shape, torch.nan, dtype=dtype)


def _full(value: float, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape or (T, E), value, dtype=dtype)


def _embedding(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    # Gradients of 2 for tokens 1, 1, 0: row 1 of the table gets two of them.
    into = torch.zeros(2, E)
    call("embed_back", torch.tensor([1, 1, 0]), _full(2, dtype=dtype), into, T, E, dtype=dtype)
    yield "embed_back", into, torch.tensor([[2.0], [4.0]])


def _norms(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    # 3 + 1 = 4; a constant row has its own size as root mean square, so its norm is the weight, 1.5 + 0.5.
    ones, threes, fours = (_full(value, dtype=dtype) for value in (1, 3, 4))
    weight = _full(1.5, E, dtype=dtype)
    total = _nan_tensor(T, E, dtype=dtype)
    normed = _nan_tensor(T, E, dtype=dtype)
    call("add_norm", threes, ones, weight, 0.5, 0.0, total, normed, T, E, dtype=dtype)
    yield "add_norm", torch.stack((total, normed)), torch.tensor([4.0, 2.0])[:, None, None]
    dx = _nan_tensor(T, E, dtype=dtype)
    dw = torch.zeros(E)
    call("add_norm_back", fours, weight, 0.5, 0.0, threes, ones, dx, dw, T, E, dtype=dtype)
    yield "add_norm_back", torch.cat((dx.float(), dw[None])), 3.0  # along its row a norm has no slope


def _gates(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    # Gates are 0, where silu has slope 1/2, or 64, where it is the identity to all digits.
    gate_up = _full(0, T, 2 * E, dtype=dtype)
    out = _nan_tensor(T, E, dtype=dtype)
    slopes_of_inputs = _nan_tensor(T, 2 * E, dtype=dtype)
    gate_up[1, :E] = 64
    gate_up[:, E:] = 0.5
    call("gate_mul", gate_up, 1.0, 0.0, out, T, E, dtype=dtype)
    yield "gate_mul", out, torch.tensor([[0.0], [32.0], [0.0]])
    call("gate_mul_back", gate_up, 1.0, 0.0, _full(2, dtype=dtype), slopes_of_inputs, T, E, dtype=dtype)
    slopes = torch.tensor([[0.5, 0.0], [1.0, 128.0], [0.5, 0.0]])
    yield "gate_mul_back", slopes_of_inputs, slopes.repeat_interleave(E, 1)


def _numbered_qkv(dtype: torch.dtype) -> Tensor:
    """Queries, keys and values 1, 2, ..., 64, 1, ... for every token: (T, (H + 2 K) E)."""
    row = torch.arange((H + 2 * K) * E) % 64 + 1
    return row.expand(T, -1).to(dtype).contiguous()


def _quarter_turn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The cos, sin and positions of a rotation by a right angle: (left, right) becomes (-right, left)."""
    return torch.zeros(T, E, dtype=dtype), torch.ones(T, E, dtype=dtype), torch.arange(T)


def _halves(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The left and right halves of a token's queries and keys, (H + K, E / 2), and its values, (K, E)."""
    turning, values = qkv[0].view(-1, E).float().split([H + K, K])
    left, right = turning.chunk(2, 1)
    return left, right, values


def _heads(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    qkv = _numbered_qkv(dtype)
    parts = [_nan_tensor(T, n, E, dtype=dtype) for n in (H, K, K)]
    rotation = _quarter_turn(dtype)
    call("split_heads", qkv, None, None, 0.0, 0.0, *rotation, *parts, T, H, K, E, dtype=dtype)
    # Queries and keys make the quarter turn, and values stay as they are.
    left, right, values = _halves(qkv)
    turned = torch.cat((-right, left), 1)
    yield "split_heads", torch.cat(parts, 1), torch.cat((turned, values))


def _heads_back(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    qkv = _numbered_qkv(dtype)
    dqkv = _nan_tensor(T, (H + 2 * K) * E, dtype=dtype)
    norm_gradients = (torch.zeros(E), torch.zeros(E))
    grads = [part.contiguous() for part in qkv.view(T, -1, E).split([H, K, K], 1)]
    inputs = (qkv, None, None, 0.0, 0.0, *_quarter_turn(dtype), *grads)
    call("split_heads_back", *inputs, dqkv, *norm_gradients, T, H, K, E, dtype=dtype)
    # Backwards the quarter turn is undone: (left, right) becomes (right, -left).
    left, right, values = _halves(qkv)
    turned_back = torch.cat((right, -left), 1)
    yield "split_heads_back", dqkv.view(T, -1, E), torch.cat((turned_back, values))


def _uniform_attention(call: KernelCall, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Attend with queries and keys of 0; return queries, keys, values, outputs, levels and spans.

    All weights are equal, so the output of token t is the mean of the values 0, 2, ..., 2t: t.
    """
    zeros = torch.zeros(T, H, E, dtype=dtype)
    even_numbers = 2 * torch.arange(T, dtype=dtype)[:, None, None]
    keys = zeros[:, :K].contiguous()
    values = even_numbers.expand(T, K, E).contiguous()
    spans = torch.tensor([[0, 0, 0, T]])
    out = _nan_tensor(T, H, E, dtype=dtype)
    levels = _nan_tensor(T, H)
    call("attend", zeros, keys, values, spans, 1, 1.0, 1.0, out, levels, H, K, E, T, T, dtype=dtype)
    return zeros, keys, values, out, levels, spans


def _attention(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    *_, out, levels, _ = _uniform_attention(call, dtype)
    yield "attend", out, torch.arange(T)[:, None, None]
    yield "attend", levels, torch.arange(1, T + 1).log()[:, None]


def _attention_back(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    *forward, spans = _uniform_attention(call, dtype)
    dq = _nan_tensor(T, H, E, dtype=dtype)
    dk = torch.zeros(T, K, E)
    dv = torch.zeros(T, K, E)
    gradient = torch.ones(T, H, E, dtype=dtype)
    groups = torch.tensor([0, 1])
    inputs = (*forward, gradient, spans, groups, 1, 1.0, 1.0)
    call("attend_back", *inputs, dq, dk, dv, H, K, E, T, T, dtype=dtype)
    # The values' gradient: token t gives 1 / (t + 1) to each token up to it, in each of the H heads.
    yield "attend_back", dq, 0.0
    yield "attend_back", dv, H * torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])[:, None, None]


def _decoding(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    # One token in the cache, of value 2, and the new one, of value 4: the result is their mean, 3.
    positions = 16
    slot = torch.zeros(1, dtype=torch.int64)
    length = torch.ones(1, dtype=torch.int64)
    qkv = torch.zeros(1, (H + 2 * K) * E, dtype=dtype)
    qkv[:, -E:] = 4
    stores = [torch.zeros(1, K, 1, E, positions), torch.zeros(1, K, positions, E)]
    stores[1][:, :, 0] = 2
    inserted = [torch.zeros(1, K, 1, E, positions), torch.zeros(1, K, positions, E)]
    rotation = (torch.ones(2, E, dtype=dtype), torch.zeros(2, E, dtype=dtype))
    attended = _nan_tensor(1, H * E, dtype=dtype)
    state = (qkv, None, None, 0.0, 0.0, *rotation, slot, length, slot, *stores, *inserted)
    call("decode_attend", *state, 1.0, 1.0, attended, 1, H, K, E, positions, positions, 2, dtype=dtype)
    yield "decode_attend", attended, 3.0
    yield "decode_attend", inserted[1][0, 0, 0], 4.0


def _logits(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    # Equal logits: each of V tokens has probability 1 / V, and u draws token floor(u V).
    logits = torch.zeros(2, V, dtype=dtype)
    tokens = torch.full((2,), -1)
    logprobs = _nan_tensor(2)
    call("draw", logits, torch.tensor([0.01, 0.51]), 1.0, tokens, logprobs, 2, V, dtype=dtype)
    yield "draw", tokens, torch.tensor([0, 32])
    yield "draw", logprobs, -math.log(V)
    highs = torch.full((2, V), 8 * math.log(2), dtype=dtype)
    capped = _nan_tensor(2, V, dtype=dtype)
    call("soft_cap", highs, 8.0, capped, 2, V, dtype=dtype)
    yield "soft_cap", capped, 8 * 0.6  # tanh(ln 2) = (2 - 1/2) / (2 + 1/2)


def _token_outputs(call: KernelCall, dtype: torch.dtype) -> Iterator[KnownAnswer]:
    # Equal logits again.
    logits = torch.zeros(2, V, dtype=dtype)
    targets = torch.tensor([5, 50])
    outputs = [_nan_tensor(2) for _ in range(3)]
    call("token_outputs", logits, targets, 1.0, *outputs, 2, V, dtype=dtype)
    yield "token_outputs", torch.stack(outputs), torch.tensor([-math.log(V), math.log(V), 1 / V])[:, None]
    # The gradient of the target's log-prob: 1 at the target, less the probability 1 / V everywhere.
    slopes = logits.clone()
    call("token_outputs_back", slopes, targets, 1.0, 1.0, torch.ones(2), None, outputs[1], 2, V, dtype=dtype)
    yield "token_outputs_back", slopes, torch.eye(V)[targets] - 1 / V


def _products(
    call: KernelCall, packed_size: Callable[..., int], numbers: torch.dtype | str
) -> Iterator[KnownAnswer]:
    dtype = numbers if isinstance(numbers, torch.dtype) else torch.float32
    x = torch.ones(T, E, dtype=dtype)
    weight = (torch.arange(V) % 4).to(dtype)[:, None].repeat(1, E)
    # Row v of the weight is v % 4 throughout and x is 1, so each output is E times that.
    expected = E * (torch.arange(V) % 4)
    out = _nan_tensor(T, V, dtype=dtype)
    call("product_once", x, weight, 0, None, out, T, V, E, dtype=numbers)
    yield "product_once", out, expected
    call("product_once", x, weight.t().contiguous(), 1, None, out.fill_(torch.nan), T, V, E, dtype=numbers)
    yield "product_once", out, expected
    # Bytes of 255 are NaN, so a panel that is not written is found.
    panels = torch.full((packed_size(V, E, numbers),), 255, dtype=torch.uint8)
    out = _nan_tensor(T, V, dtype=dtype)
    call("pack_weight", weight, panels, V, E, dtype=numbers)
    call("product", x, panels, None, out, T, V, E, dtype=numbers)
    yield "product", out, expected


def _outer_sums(call: KernelCall, numbers: torch.dtype | str) -> Iterator[KnownAnswer]:
    # Row v of the columns is v % 4 throughout and x is 1, so each sum over T tokens is T times that.
    dtype = numbers if isinstance(numbers, torch.dtype) else torch.float32
    x = torch.ones(T, E, dtype=dtype)
    residues = torch.arange(V) % 4
    columns = residues.to(dtype).repeat(T, 1).contiguous()
    into = torch.zeros(V, E)
    call("outer_sum", columns.data_ptr(), V, x, E, into, T, V, E, dtype=numbers)
    yield "outer_sum", into, T * residues[:, None].float()


def _adapters(call: KernelCall, numbers: torch.dtype | str) -> Iterator[KnownAnswer]:
    # B is 2 in its only column and A counts 0, 1, 2, 3, so a weight of 1 becomes 1 + 2 (k % 4) in column k.
    dtype = numbers if isinstance(numbers, torch.dtype) else torch.float32
    weight = _full(1, V, E, dtype=dtype)
    b = torch.full((1, V), 2.0)
    a = (torch.arange(E) % 4).float()[None]
    merged = _nan_tensor(V, E, dtype=dtype)
    call("merge", weight, b, a, merged, V, 1, E, dtype=numbers)
    yield "merge", merged, 1 + 2 * a
