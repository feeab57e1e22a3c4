"""The operations of a decoder and of its head compiled for the CPU, each with its own gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.kernels.calls import DTYPES, LANES, WIDEST_HEAD, Numbers, available, by_torch, call, same_bits
from covey.models.flex import FlexOps
from covey.models.linear import FusedLinear
from covey.models.logprobs import CACHED_LOGITS, FEWEST_ROWS, TokenScores, exclude
from covey.models.ops import Activation, Attention, Heads, Norm, Ops, Rotation, Sequences, TorchOps
from covey.types import SamplingMask


class CompiledOps:
    """The C operations, in float32 or bfloat16 on the CPU."""

    compiled = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.products: Numbers = dtype
        """What products multiply; sums are float32 always."""

    @property
    def bit_exact(self) -> bool:
        """Where our own products make the log-probs."""
        torchs = by_torch("decode", self.products) or by_torch("forward", self.products)
        return same_bits(self.dtype) and same_bits(self.products) and not torchs

    def embed(self, module: nn.Module, tokens: Tensor) -> Tensor:
        """Rows of the table; their gradients are added in place."""
        return _apply(_Embed, tokens, module.weight) if type(module) is nn.Embedding else module(tokens)

    def linear(self, layer: FusedLinear, x: Tensor) -> Tensor:
        """One product, from a packed weight where no gradient is wanted."""
        if not layer.is_product:
            return TorchOps().linear(layer, x)
        if torch.is_grad_enabled():
            return _LinearFunction.apply(x, layer, *layer.parameters)
        return layer.product(x)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """One pass over the row."""
        return _apply(_AddNorm, x, delta, norm.weight, norm.variance_epsilon)

    def split_heads(self, qkv: Tensor, heads: Heads, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over the row."""
        weights = (n.weight if n else None for n in (heads.query_norm, heads.key_norm))
        return _apply(_SplitHeads, qkv, *weights, heads, rotation)

    def attention(self, sequences: Sequences, window: int | None = None) -> Attention:
        """No padding; a vector of queries at a time."""
        return lambda q, k, v, heads: _apply(_Attend, q, k, v, sequences, heads, window or UNLIMITED)

    def gate_mul(self, both: Tensor, gate: Activation) -> Tensor:
        """One pass over the row."""
        return _apply(_GateMul, both, gate.linear, gate.cubic)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """One pass over the row."""
        return _apply(_SoftCap, x, cap)


class AutogradContext:
    """Autograd's context: what a function keeps of its forward pass for the backward pass.

    A plain instance takes its place where no gradient is wanted.
    """

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    layer: FusedLinear
    tokens: Tensor
    weight: Tensor
    eps: float
    added: bool
    sizes: tuple[int, ...]
    rotation: Rotation
    sequences: Sequences
    scale: float
    cap: float
    cubic: float
    inverse: float
    mask: SamplingMask | None
    known: int | None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Nothing is kept."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Nothing is differentiated."""


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Any:
    """Run a function; where no gradient is wanted, without autograd's overhead, which slows decoding."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(AutogradContext(), *arguments)


def add_gradient(parameter: Tensor, add: Callable[[Tensor], None]) -> Tensor | None:
    """Let ``add`` sum into the gradient in place; where that is not float32, return what autograd has to add.

    A gradient that goes through autograd would be in memory twice.
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


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, layer: FusedLinear, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer.product_once(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        columns = list(zip(ctx.layer.modules, grad.split(ctx.layer.sizes, dim=1), strict=True))
        into_x = ctx.layer.product_back(grad) if ctx.needs_input_grad[0] else None
        into = [add_gradient(m.weight, partial(ctx.layer.add_gradient, part, x)) for m, part in columns]
        into += [
            part.float().sum(0) if m.bias.requires_grad else None for m, part in columns if m.bias is not None
        ]
        for of, (_, part) in zip(ctx.layer.low_rank, columns, strict=True):
            into += of.gradients(part, x, ctx.layer.numbers(x)) if of else ()
        return into_x, None, *into


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.tokens, ctx.weight = tokens, weight
        return weight.index_select(0, tokens)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()

        def add(into: Tensor) -> None:
            call("embed_back", ctx.tokens, grad, into, *grad.shape, dtype=grad.dtype)

        return None, add_gradient(ctx.weight, add)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        call("add_norm", x, delta, weight, eps, total, normed, *x.shape, dtype=x.dtype)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.added = eps, delta is not None
        return total, normed

    @staticmethod
    def backward(ctx: AutogradContext, into_total: Tensor, into_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        dx, dw = torch.empty_like(total), torch.zeros(len(weight))
        arguments = (total, weight, ctx.eps, into_total.contiguous(), into_normed.contiguous(), dx, dw)
        call("add_norm_back", *arguments, *total.shape, dtype=total.dtype)
        return dx, dx if ctx.added else None, dw.to(weight.dtype), None


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        qkv: Tensor,
        qw: Tensor | None,
        kw: Tensor | None,
        heads: Heads,
        rotation: Rotation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, (h, k, e) = len(qkv), heads[:3]
        q, key, value = (qkv.new_empty(tokens, n, e) for n in (h, k, k))
        eps = heads.query_norm.variance_epsilon if heads.query_norm else 0.0
        call("split_heads", qkv, qw, kw, eps, *rotation, q, key, value, tokens, h, k, e, dtype=qkv.dtype)
        ctx.save_for_backward(qkv, qw, kw)
        ctx.sizes, ctx.eps, ctx.rotation = (tokens, h, k, e), eps, rotation
        return q, key, value

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, qw, kw = ctx.saved_tensors
        dqkv, dqw, dkw = torch.empty_like(qkv), torch.zeros(ctx.sizes[3]), torch.zeros(ctx.sizes[3])
        inputs = (qkv, qw, kw, ctx.eps, *ctx.rotation)
        parts = (g.contiguous() for g in grads)
        call("split_heads_back", *inputs, *parts, dqkv, dqw, dkw, *ctx.sizes, dtype=qkv.dtype)
        if not ctx.needs_input_grad[1]:
            return dqkv, None, None, None, None
        return dqkv, dqw.to(qw.dtype), dkw.to(kw.dtype), None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, heads: Heads, window: int
    ) -> Tensor:
        tokens, h, e = q.shape
        out, levels = torch.empty_like(q), torch.empty(tokens, h)
        spans, sizes = sequences.spans, (h, k.shape[1], e, sequences.longest, window)
        scale, cap = heads.factor, heads.cap or UNCAPPED
        call("attend", q, k, v, spans, len(spans), scale, cap, out, levels, *sizes, dtype=q.dtype)
        ctx.save_for_backward(q, k, v, out, levels)
        ctx.sequences, ctx.sizes, ctx.scale, ctx.cap = sequences, sizes, scale, cap
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, levels = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros(k.shape), torch.zeros(v.shape)
        groups = ctx.sequences.groups
        inputs = (q, k, v, out, levels, grad.contiguous(), ctx.sequences.spans, groups, len(groups) - 1)
        call("attend_back", *inputs, ctx.scale, ctx.cap, dq, dk, dv, *ctx.sizes, dtype=q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _GateMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, both: Tensor, linear: float, cubic: float) -> Tensor:
        out = both.new_empty(len(both), both.shape[1] // 2)
        call("gate_mul", both, linear, cubic, out, *out.shape, dtype=both.dtype)
        ctx.save_for_backward(both)
        ctx.scale, ctx.cubic = linear, cubic
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        into = torch.empty_like(both)
        inputs = (both, ctx.scale, ctx.cubic, grad.contiguous())
        call("gate_mul_back", *inputs, into, *grad.shape, dtype=both.dtype)
        return into, None, None


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, cap: float) -> Tensor:
        out = torch.empty_like(x)
        call("soft_cap", x, cap, out, *x.shape, dtype=x.dtype)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * (1 - (out / ctx.cap).square()), None


def score_compiled(
    hidden: Tensor,
    layer: FusedLinear,
    targets: Tensor,
    temperature: float,
    mask: SamplingMask | None = None,
    cap: float | None = None,
    known: int | None = None,
) -> TokenScores:
    """``score_tokens`` with the compiled operations: logits are recomputed in the backward pass.

    ``cap`` is that of the logits.
    """
    arguments = (hidden, layer, targets, 1.0 / temperature, layer.modules[0].weight, mask, cap or UNCAPPED)
    logprobs, entropy, collision = _ScoreFunction.apply(*arguments, known)
    return TokenScores(logprobs, entropy, collision, torch.zeros_like(entropy))


class _ScoreFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        layer: FusedLinear,
        targets: Tensor,
        inverse: float,
        weight: Tensor,
        mask: SamplingMask | None,
        cap: float,
        known: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, collision = (torch.empty(len(hidden)) for _ in range(3))
        buffer = hidden.new_empty(_chunk(len(hidden), len(weight)), len(weight))
        for x, rows in _chunks(hidden, buffer):
            logits = exclude(_logits(layer, x, buffer, cap), mask, rows.start, known)
            parts = (targets[rows], inverse, logprobs[rows], entropy[rows], collision[rows])
            call("score_rows", logits, *parts, *logits.shape, dtype=logits.dtype)
        ctx.save_for_backward(hidden, targets, entropy, buffer)
        ctx.layer, ctx.inverse, ctx.weight, ctx.mask, ctx.cap = layer, inverse, weight, mask, cap
        ctx.known = known
        ctx.mark_non_differentiable(collision)
        return logprobs, entropy, collision

    @staticmethod
    def backward(
        ctx: AutogradContext, dlogprob: Tensor, dentropy: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, entropy, buffer = ctx.saved_tensors
        weight, inverse_cap = ctx.weight, 1 / ctx.cap if ctx.cap else 0.0
        dhidden = torch.empty_like(hidden)
        dlogprob = dlogprob.contiguous()
        dentropy = dentropy.contiguous() if dentropy is not None and bool(dentropy.any()) else None

        def add(into: Tensor | None) -> None:
            for x, rows in _chunks(hidden, buffer):
                logits = exclude(_logits(ctx.layer, x, buffer, ctx.cap), ctx.mask, rows.start, ctx.known)
                grads = (dlogprob[rows], None if dentropy is None else dentropy[rows], entropy[rows])
                parts = (targets[rows], ctx.inverse, inverse_cap, *grads)
                call("score_rows_back", logits, *parts, *logits.shape, dtype=logits.dtype)
                dhidden[rows] = ctx.layer.product_back(logits)
                if into is not None:
                    ctx.layer.add_gradient(logits, x, into)

        if not weight.requires_grad:
            add(None)
        return dhidden, None, None, None, add_gradient(weight, add), None, None, None


def _logits(layer: FusedLinear, x: Tensor, buffer: Tensor, cap: float) -> Tensor:
    """Of rows of hidden states, in the beginning of ``buffer``."""
    logits = layer.product_once(x, buffer[: len(x)])
    if cap:
        call("soft_cap", logits, cap, logits, *logits.shape, dtype=logits.dtype)
    return logits


def _chunk(rows: int, vocabulary: int) -> int:
    """Rows whose logits are alive at once."""
    return min(rows, max(FEWEST_ROWS, CACHED_LOGITS // vocabulary))


def _chunks(hidden: Tensor, buffer: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Chunks of ``hidden`` whose logits fit into ``buffer``, and their rows."""
    for start in range(0, len(hidden), max(len(buffer), 1)):
        rows = slice(start, start + len(buffer))
        yield hidden[rows], rows


UNLIMITED = 1 << 40
"""A window that hides nothing."""
UNCAPPED = 0.0
"""A cap that is none, as the operations read it."""


def pick_ops(weight: Tensor, unfit: str) -> Ops:
    """The compiled operations where they exist for these weights, else torch's, on a GPU with FlexAttention.

    ``unfit`` says why a model is not for the compiled ones (`why_unfit`).
    """
    if not unfit and available(weight.dtype, weight.device):
        return CompiledOps(weight.dtype)
    return FlexOps() if weight.device.type == "cuda" else TorchOps()


def why_unfit(weight: Tensor, heads: Heads, widths: Mapping[str, int], norm: Tensor, turned: int) -> str:
    """What of a model the compiled operations cannot compute; empty: nothing.

    ``widths`` are the sizes besides a head's that vectors run over, by their names in a config. Norms have
    the weights' dtype, like ``norm``, and rotation turns all of a head, ``turned`` features, in halves.
    """
    odd = [f"{name} {width}" for name, width in widths.items() if width % LANES]
    if weight.dtype not in DTYPES:
        return f"weights of {str(weight.dtype).removeprefix('torch.')}"
    if norm.dtype != weight.dtype:
        return "norms of another dtype than its weights"
    if heads.interleaved:
        return "a rotation of neighbours"
    if turned != heads.width:
        return f"a rotation of {turned} of {heads.width} features"
    if odd or heads.width % (2 * LANES) or heads.width > WIDEST_HEAD:
        return f"{odd[0]}, no multiple of {LANES}" if odd else f"heads of {heads.width} features"
    many = heads.queries // heads.keys
    return f"{many} query heads for each key head" if many > LANES else ""
