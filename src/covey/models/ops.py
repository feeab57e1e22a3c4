"""The operations a decoder is made of, twice: in torch for any device, compiled for the CPU.

Both sets have the same methods; a model picks one when it is loaded (`pick_ops`). The compiled ones
carry their own gradients. Shapes: T tokens, D width, F feed-forward width, H query heads, K key/value
heads, E head width, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covey.kernels.calls import LANES, PANEL, WIDEST_HEAD, available, call, packed_size


class Norm(NamedTuple):
    """An RMS norm."""

    weight: Tensor
    eps: float


class Heads(NamedTuple):
    """How a projected row is cut: H query, K key and K value heads of width E, queries and keys normed."""

    queries: int
    keys: int
    width: int
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class Rotation(NamedTuple):
    """Rotary tables (positions, E), halves paired, and the position of every token (T,) int64."""

    cos: Tensor
    sin: Tensor
    positions: Tensor


class Linear:
    """Linear layers that read the same input, as one product; their outputs stand side by side."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules: tuple[Any, ...] = modules
        self.plain = all(type(m) is nn.Linear for m in modules)
        self._state: tuple[int, ...] = ()
        self._forward: Packed | None = None
        self._bias: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The weights, then the biases."""
        return [m.weight for m in self.modules] + [m.bias for m in self.modules if m.bias is not None]

    @property
    def sizes(self) -> list[int]:
        """Outputs of each layer."""
        return [len(m.weight) for m in self.modules]

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b with the compiled product. (T, in) -> (T, out)."""
        self._refresh()
        if self._forward is None:
            weights = [m.weight.detach() for m in self.modules]
            self._forward = Packed.of(weights[0] if len(weights) == 1 else torch.cat(weights))
            self._bias = self._joined_bias()
        return self._forward.product(x, self._bias)

    def product_back(self, grad: Tensor) -> Tensor:
        """grad W with the compiled sum. (T, out) -> (T, in)."""
        into = torch.zeros(len(grad), self.modules[0].weight.shape[1])
        for module, columns in zip(self.modules, grad.split(self.sizes, dim=1), strict=True):
            outer_sum(columns.t(), module.weight.detach(), into)
        return into.to(grad.dtype)

    def _refresh(self) -> None:
        """Forget packed weights when a weight has changed."""
        # torch offers no public way to ask whether a tensor was written to.
        state = tuple(n for p in self.parameters for n in (p.data_ptr(), p._version))  # noqa: SLF001
        if state != self._state:
            self._state, self._forward, self._bias = state, None, None

    def _joined_bias(self) -> Tensor | None:
        if all(m.bias is None for m in self.modules):
            return None
        parts = [
            torch.zeros(n) if m.bias is None else m.bias
            for m, n in zip(self.modules, self.sizes, strict=True)
        ]
        joined = torch.cat([p.detach().float() for p in parts])
        return F.pad(joined, (0, PANEL))


class Packed(NamedTuple):
    """A weight (N, K) in the layout of the compiled product."""

    panels: Tensor
    outputs: int
    inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        """Pack a weight (N, K)."""
        n, k = weight.shape
        panels = torch.empty(packed_size(n, k, weight.dtype), dtype=torch.uint8)
        call("pack_weight", weight, panels, n, k, dtype=weight.dtype)
        return cls(panels, n, k, weight.dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias. A row's result does not depend on the rows beside it."""
        out = x.new_empty(len(x), self.outputs)
        call("product", x, self.panels, bias, out, len(x), self.outputs, self.inputs, dtype=self.dtype)
        return out


class Ops(Protocol):
    """What a decoder needs."""

    exact: bool
    """Whether a token's result is the same bits alone, in a batch, decoding and training."""

    def embed(self, module: Any, tokens: Tensor) -> Tensor:
        """(T,) int64 -> (T, D)."""
        ...

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + delta, and that normed: weight * s / sqrt(mean(s^2) + eps). (T, D) each."""
        ...

    def split_heads(self, qkv: Tensor, heads: Heads, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """(T, (H + 2K) E) -> q (T, H, E), k (T, K, E), v (T, K, E), normed and rotated."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Causal attention of every sequence within [its prompt | itself]. -> (T, H, E)."""
        ...

    def silu_mul(self, both: Tensor) -> Tensor:
        """silu(gate) * up of rows [gate | up]. (T, 2F) -> (T, F)."""
        ...


class Sequences(NamedTuple):
    """Which flat tokens belong together."""

    spans: Tensor
    """(S, 4) int64: start and length of the prompt, start and length of the own tokens."""
    groups: Tensor
    """(groups + 1,) int64: where each prompt's spans begin: the prompt itself, then its completions."""
    longest: int
    """Most keys that a query sees."""


class TorchOps:
    """Plain torch, on any device and in any dtype."""

    exact = False

    def embed(self, module: Any, tokens: Tensor) -> Tensor:
        """Through the module itself."""
        return module(tokens)

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        """Through the modules themselves, LoRA layers included."""
        parts = [m(x) for m in layer.modules]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The mean in float32."""
        total = x if delta is None else x + delta
        return total, rms_norm(total, norm)

    def split_heads(self, qkv: Tensor, heads: Heads, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Views of one row, then norm and rotation."""
        q, k, v = qkv.unflatten(-1, (-1, heads.width)).split([heads.queries, heads.keys, heads.keys], dim=1)
        q = q if heads.query_norm is None else rms_norm(q, heads.query_norm)
        k = k if heads.key_norm is None else rms_norm(k, heads.key_norm)
        cos, sin = (table[rotation.positions][:, None] for table in (rotation.cos, rotation.sin))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """Padded blocks of similar length through scaled_dot_product_attention."""
        out = torch.zeros_like(q)
        for rows in padded_rows(sequences.spans):
            mixed = grouped_attention(q[rows.queries], k[rows.keys], v[rows.keys], rows.mask)
            out = out.index_put((rows.queries[rows.real],), mixed[rows.real])
        return out

    def silu_mul(self, both: Tensor) -> Tensor:
        """As the Hugging Face modules compute it."""
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the mean in float32. (..., D) -> (..., D)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return norm.weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding. (T, heads, E), (T, 1, E) -> (T, heads, E)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention with shared key/value heads.

    q (R, Q, H, E), k and v (R, N, K, E), mask (R, 1, Q, N) bool -> (R, Q, H, E).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] > k.shape[1])
    return mixed.transpose(1, 2)


SIMILAR = 0.75
"""Sequences attend in one block while the shortest has this share of the longest's length."""


class Rows(NamedTuple):
    """Sequences of similar length that attend together, as indices into the flat tokens."""

    queries: Tensor
    """(R, Q) int64; padding points at token 0."""
    keys: Tensor
    """(R, N) int64: the prompt's tokens, then the own ones."""
    mask: Tensor
    """(R, 1, Q, N) bool: who sees whom. Padding queries see everything, so that no row is empty."""
    real: Tensor
    """(R, Q) bool: false on padding, whose result is dropped."""


def padded_rows(spans: Tensor) -> list[Rows]:
    """Blocks of similar length, prompts apart from completions. (S, 4) -> rows that cover all spans."""
    lengths = spans.tolist()
    order = sorted(
        (i for i, s in enumerate(lengths) if s[3]), key=lambda i: (lengths[i][1] > 0, -lengths[i][3])
    )
    blocks: list[list[int]] = []
    for i in order:
        first = lengths[blocks[-1][0]] if blocks else None
        alike = first is not None and (first[1] > 0) == (lengths[i][1] > 0)
        if first is not None and alike and lengths[i][3] >= SIMILAR * first[3]:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return [_rows(spans[torch.tensor(block, device=spans.device)]) for block in blocks]


def _rows(spans: Tensor) -> Rows:
    prefix, prefix_length, start, length = (column[:, None] for column in spans.T)
    own = torch.arange(int(length.max()), device=spans.device)
    shared = torch.arange(int(prefix_length.max()), device=spans.device)
    real, seen = own < length, shared < prefix_length
    queries = torch.where(real, start + own, 0)
    keys = torch.cat((torch.where(seen, prefix + shared, 0), queries), dim=1)
    causal = (own[:, None] >= own) & real[:, None]
    before = seen[:, None].expand(-1, len(own), -1)
    mask = torch.cat((before, causal), dim=2) | ~real[:, :, None]
    return Rows(queries, keys, mask[:, None], real)


class CompiledOps:
    """The C operations, float32 or bfloat16 on the CPU."""

    exact = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def embed(self, module: Any, tokens: Tensor) -> Tensor:
        """Rows of the table; their gradients are added in place."""
        return _apply(_Embed, tokens, module.weight) if type(module) is nn.Embedding else module(tokens)

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        """One product with a packed weight."""
        if not layer.plain:
            return TorchOps().linear(layer, x)
        if torch.is_grad_enabled():
            return _LinearFunction.apply(x, layer, *layer.parameters)
        return layer.product(x)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """One pass over the row."""
        return _apply(_AddNorm, x, delta, norm.weight, norm.eps)

    def split_heads(self, qkv: Tensor, heads: Heads, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over the row."""
        weights = (n.weight if n else None for n in (heads.query_norm, heads.key_norm))
        return _apply(_SplitHeads, qkv, *weights, heads, rotation)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        """No padding; sixteen queries at a time."""
        return _apply(_Attend, q, k, v, sequences)

    def silu_mul(self, both: Tensor) -> Tensor:
        """One pass over the row."""
        return _apply(_SiluMul, both)


class _NoContext:
    """Stands in for autograd's context where no gradient is wanted."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Nothing will be needed."""


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Run a function; outside of autograd without its overhead, which decoding would feel."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        columns = list(zip(ctx.layer.modules, grad.split(ctx.layer.sizes, dim=1), strict=True))
        into_x = ctx.layer.product_back(grad) if ctx.needs_input_grad[0] else None
        into = [add_gradient(m.weight, partial(outer_sum, part, x)) for m, part in columns]
        into += [part.sum(0) if m.bias.requires_grad else None for m, part in columns if m.bias is not None]
        return into_x, None, *into


def outer_sum(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a^T b, in float32. (M, N), (M, K) -> (N, K); a with any strides, K a multiple of 16."""
    sizes = (*a.shape, b.shape[1])
    call("outer_sum", a.data_ptr(), *a.stride(), b, b.stride(0), out, *sizes, dtype=a.dtype)


def add_gradient(parameter: Tensor, add: Callable[[Tensor], None]) -> Tensor | None:
    """Let ``add`` sum into the gradient in place; where that is not float32, return what autograd has to add.

    A gradient on its way through autograd would stand in memory a second time.
    """
    if not parameter.requires_grad:
        return None
    if parameter.dtype != torch.float32:
        passing = torch.zeros(parameter.shape)
        add(passing)
        return passing.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    add(parameter.grad)
    return None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.tokens, ctx.weight = tokens, weight
        return weight[tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()

        def add(into: Tensor) -> None:
            call("embed_back", ctx.tokens, grad, into, *grad.shape, dtype=grad.dtype)

        return None, add_gradient(ctx.weight, add)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        call("add_norm", x, delta, weight, eps, total, normed, *x.shape, dtype=x.dtype)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.added = eps, delta is not None
        return total, normed

    @staticmethod
    def backward(ctx: Any, into_total: Tensor, into_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        dx, dw = torch.empty_like(total), torch.zeros(len(weight))
        arguments = (total, weight, ctx.eps, into_total.contiguous(), into_normed.contiguous(), dx, dw)
        call("add_norm_back", *arguments, *total.shape, dtype=total.dtype)
        return dx, dx if ctx.added else None, dw.to(weight.dtype), None


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, qw: Tensor | None, kw: Tensor | None, heads: Heads, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, (h, k, e) = len(qkv), heads[:3]
        q, key, value = (qkv.new_empty(tokens, n, e) for n in (h, k, k))
        eps = heads.query_norm.eps if heads.query_norm else 0.0
        call("split_heads", qkv, qw, kw, eps, *rotation, q, key, value, tokens, h, k, e, dtype=qkv.dtype)
        ctx.save_for_backward(qkv, qw, kw)
        ctx.sizes, ctx.eps, ctx.rotation = (tokens, h, k, e), eps, rotation
        return q, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, qw, kw = ctx.saved_tensors
        dqkv, dqw, dkw = torch.empty_like(qkv), torch.zeros(ctx.sizes[3]), torch.zeros(ctx.sizes[3])
        inputs = (qkv, qw, kw, ctx.eps, *ctx.rotation, *(g.contiguous() for g in grads))
        call("split_heads_back", *inputs, dqkv, dqw, dkw, *ctx.sizes, dtype=qkv.dtype)
        if qw is None:
            return dqkv, None, None, None, None
        return dqkv, dqw.to(qw.dtype), dkw.to(kw.dtype), None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        tokens, h, e = q.shape
        out, levels = torch.empty_like(q), torch.empty(tokens, h)
        spans, scale = sequences.spans, e**-0.5
        sizes = (h, k.shape[1], e, sequences.longest)
        call("attend", q, k, v, spans, len(spans), scale, out, levels, *sizes, dtype=q.dtype)
        ctx.save_for_backward(q, k, v, out, levels)
        ctx.sequences, ctx.sizes, ctx.scale = sequences, sizes, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, levels = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros(k.shape), torch.zeros(v.shape)
        groups = ctx.sequences.groups
        inputs = (q, k, v, out, levels, grad.contiguous(), ctx.sequences.spans, groups, len(groups) - 1)
        call("attend_back", *inputs, ctx.scale, dq, dk, dv, *ctx.sizes, dtype=q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        out = both.new_empty(len(both), both.shape[1] // 2)
        call("silu_mul", both, out, *out.shape, dtype=both.dtype)
        ctx.save_for_backward(both)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        into = torch.empty_like(both)
        call("silu_mul_back", both, grad.contiguous(), into, *grad.shape, dtype=both.dtype)
        return into


def pick_ops(weight: Tensor, heads: Heads, widths: Sequence[int]) -> Ops:
    """The compiled operations where they exist for this model, else torch's.

    ``widths`` are all sizes that vectors run over: they must be multiples of 16.
    """
    fits = all(w % LANES == 0 for w in (*widths, heads.width // 2)) and heads.width <= WIDEST_HEAD
    if fits and heads.queries // heads.keys <= LANES and available(weight.dtype, weight.device):
        return CompiledOps(weight.dtype)
    return TorchOps()
