"""The compiled CPU operations of a decoder and its head as autograd functions, each with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.models.internals import master_of
from covey.models.kernels.calls import (
    Numbers,
    by_torch,
    call,
    same_bits,
)
from covey.models.linear import FusedLinear
from covey.models.logprobs import TokenOutputs, exclude, rows_at_once
from covey.models.ops import Activation, Attention, Heads, Norm, Rotation, Sequences, TorchOps
from covey.types import SamplingMask

UNLIMITED = 1 << 40
"""A window that hides nothing."""
UNCAPPED = 0.0
"""The value by which the operations know that there is no cap."""


class CompiledOps:
    """The C operations, in float32 or bfloat16 on the CPU."""

    compiled = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.products: Numbers = dtype
        """The numbers that products multiply; sums are always float32."""

    @property
    def bit_exact(self) -> bool:
        """Whether log-probs come from our own products, which give the same bits in sampling and training."""
        kinds = ("decode", "forward")
        if any(by_torch(kind, self.products) for kind in kinds):
            return False
        return same_bits(self.dtype) and same_bits(self.products)

    def embed(self, module: nn.Module, tokens: Tensor) -> Tensor:
        """Look up rows of the table; their gradients are added in place."""
        if not (type(module) is nn.Embedding or type(module).__name__.endswith("TextScaledWordEmbedding")):
            return module(tokens)
        rows = _apply(_Embed, tokens, module.weight)
        scale = getattr(module, "embed_scale", None)  # Gemma scales its embeddings
        return rows if scale is None else rows * scale.to(rows.dtype)

    def linear(self, layer: FusedLinear, x: Tensor) -> Tensor:
        """Multiply by the layers' joined weight, packed if no gradient is wanted."""
        if not layer.is_product:
            return TorchOps().linear(layer, x)
        if torch.is_grad_enabled():
            return _LinearFunction.apply(x, layer, *layer.parameters)
        return layer.product(x)

    def logits(self, head: FusedLinear, hidden: Tensor) -> Tensor:
        """Multiply by the output layer's weight."""
        return self.linear(head, hidden)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Add and norm in one pass over each row."""
        return _apply(_AddNorm, x, delta, norm.weight, norm.constants)

    def split_heads(self, qkv: Tensor, heads: Heads, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Split, norm and rotate in one pass over each row."""
        weights = (n.weight if n else None for n in (heads.query_norm, heads.key_norm))
        return _apply(_SplitHeads, qkv, *weights, heads, rotation)

    def attention(self, sequences: Sequences, window: int | None = None) -> Attention:
        """Attend without padding, a vector of queries at a time."""
        return lambda q, k, v, heads: _apply(_Attend, q, k, v, sequences, heads, window or UNLIMITED)

    def gate_mul(self, gate_up: Tensor, gate: Activation) -> Tensor:
        """Activate and multiply in one pass over each row."""
        return _apply(_GateMul, gate_up, gate.linear, gate.cubic)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Cap in one pass over each row."""
        return _apply(_SoftCap, x, cap)


class AutogradContext:
    """The values that a function keeps of its forward pass for the backward pass.

    It describes autograd's own context to the type checker. Where no gradient is wanted an instance replaces
    that, and keeps nothing.
    """

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    layer: FusedLinear
    tokens: Tensor
    weight: Tensor
    constants: tuple[float, float]
    added: bool
    sizes: tuple[int, ...]
    rotation: Rotation
    sequences: Sequences
    scale: float
    cap: float
    cubic: float
    inverse: float
    mask: SamplingMask | None
    drawable_ids: int | None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark nothing."""


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Any:
    """Run a function; without autograd, whose overhead slows decoding, if no gradient is wanted."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(AutogradContext(), *arguments)


def add_gradient(parameter: Tensor, add: Callable[[Tensor], None]) -> Tensor | None:
    """Let ``add`` sum into a float32 gradient in place: the parameter's, or that of its master copy.

    A gradient that autograd adds, as it does without a master, is in memory twice. ``add`` sums in float32.
    """
    if not parameter.requires_grad:
        return None
    master = master_of(parameter)
    if master is None:
        gradient = torch.zeros(parameter.shape)
        add(gradient)
        return gradient.to(parameter.dtype)
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    add(master.grad)
    return None


class _LinearFunction(torch.autograd.Function):
    # The parameters are arguments only so that autograd calls the backward pass for them.
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, layer: FusedLinear, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer.product_once(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # The joined product's gradient, (T, sum of outputs), split into each module's columns.
        columns = list(zip(ctx.layer.modules, grad.split(ctx.layer.sizes, dim=1), strict=True))
        dx = ctx.layer.product_back(grad) if ctx.needs_input_grad[0] else None
        # In the order of ``FusedLinear.parameters``: weights, biases, then A and B of each adapter.
        gradients = [add_gradient(m.weight, partial(ctx.layer.add_gradient, part, x)) for m, part in columns]
        for module, part in columns:
            if module.bias is not None:
                gradients.append(part.float().sum(0) if module.bias.requires_grad else None)
        if any(ctx.layer.low_rank):
            through_adapters, of_adapters = ctx.layer.adapters_back(grad, x)
            gradients += of_adapters
            if dx is not None and through_adapters is not None:
                dx += through_adapters
        return dx, None, *gradients


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.tokens = tokens
        ctx.weight = weight
        return weight.index_select(0, tokens)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()

        def add(total: Tensor) -> None:
            call("embed_back", ctx.tokens, grad, total, *grad.shape, dtype=grad.dtype)

        return None, add_gradient(ctx.weight, add)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, delta: Tensor | None, weight: Tensor, constants: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(x)
        normed = torch.empty_like(x)
        call("add_norm", x, delta, weight, *constants, total, normed, *x.shape, dtype=x.dtype)
        ctx.save_for_backward(total, weight)
        ctx.constants = constants
        ctx.added = delta is not None
        return total, normed

    @staticmethod
    def backward(ctx: AutogradContext, dtotal: Tensor, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        # The operations overwrite dx and add to dw, which is float32 whatever the weights are.
        dx = torch.empty_like(total)
        dw = torch.zeros(len(weight))
        arguments = (total, weight, *ctx.constants, dtotal.contiguous(), dnormed.contiguous(), dx, dw)
        call("add_norm_back", *arguments, *total.shape, dtype=total.dtype)
        # total = x + delta: both get the same gradient, here the same tensor.
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
        tokens = len(qkv)
        h, k, e = heads[:3]  # query heads, key heads, head width
        q, key, value = (qkv.new_empty(tokens, n, e) for n in (h, k, k))
        inputs = (qkv, qw, kw, *heads.norm_constants, *rotation)
        call("split_heads", *inputs, q, key, value, tokens, h, k, e, dtype=qkv.dtype)
        ctx.save_for_backward(qkv, qw, kw)
        ctx.sizes = (tokens, h, k, e)
        ctx.constants = heads.norm_constants
        ctx.rotation = rotation
        return q, key, value

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, qw, kw = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        dqw = torch.zeros(ctx.sizes[3])
        dkw = torch.zeros(ctx.sizes[3])
        inputs = (qkv, qw, kw, *ctx.constants, *ctx.rotation)
        parts = (g.contiguous() for g in grads)
        call("split_heads_back", *inputs, *parts, dqkv, dqw, dkw, *ctx.sizes, dtype=qkv.dtype)
        # One gradient an argument of forward: qkv, both norms' weights, heads and rotation.
        if not ctx.needs_input_grad[1]:  # there are no norms, or frozen ones
            return dqkv, None, None, None, None
        return dqkv, dqw.to(qw.dtype), dkw.to(kw.dtype), None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, heads: Heads, window: int
    ) -> Tensor:
        tokens, h, e = q.shape
        # levels (T, H): log-sum-exp of each query's scores, so that the backward pass can redo the softmax.
        out = torch.empty_like(q)
        levels = torch.empty(tokens, h)
        spans = sequences.spans
        sizes = (h, k.shape[1], e, sequences.longest, window)
        scale = heads.factor
        cap = heads.cap or UNCAPPED
        call("attend", q, k, v, spans, len(spans), scale, cap, out, levels, *sizes, dtype=q.dtype)
        ctx.save_for_backward(q, k, v, out, levels)
        ctx.sequences = sequences
        ctx.sizes = sizes
        ctx.scale = scale
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, levels = ctx.saved_tensors
        # The completions of a group all add to the keys of their prompt, so dk and dv are float32 sums.
        dq = torch.empty_like(q)
        dk = torch.zeros(k.shape)
        dv = torch.zeros(v.shape)
        groups = ctx.sequences.groups
        inputs = (q, k, v, out, levels, grad.contiguous(), ctx.sequences.spans, groups, len(groups) - 1)
        call("attend_back", *inputs, ctx.scale, ctx.cap, dq, dk, dv, *ctx.sizes, dtype=q.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _GateMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, gate_up: Tensor, linear: float, cubic: float) -> Tensor:
        width = gate_up.shape[1] // 2  # rows are [gate | up], (T, 2F)
        out = gate_up.new_empty(len(gate_up), width)
        call("gate_mul", gate_up, linear, cubic, out, *out.shape, dtype=gate_up.dtype)
        ctx.save_for_backward(gate_up)
        ctx.scale = linear
        ctx.cubic = cubic
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        dgate_up = torch.empty_like(gate_up)
        inputs = (gate_up, ctx.scale, ctx.cubic, grad.contiguous())
        call("gate_mul_back", *inputs, dgate_up, *grad.shape, dtype=gate_up.dtype)
        return dgate_up, None, None


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
        return grad * (1 - (out / ctx.cap).square()), None  # 1 - tanh^2, from the result


def compiled_token_outputs(
    hidden: Tensor,
    layer: FusedLinear,
    targets: Tensor,
    temperature: float,
    mask: SamplingMask | None,
    cap: float | None,
    drawable_ids: int | None,
) -> TokenOutputs:
    """Return what ``token_outputs`` returns, by compiled operations; the backward pass recomputes logits.

    ``cap`` bounds the logits.
    """
    # The weight is an argument so that autograd runs the backward pass if it alone is trained.
    arguments = (hidden, layer, targets, 1.0 / temperature, layer.modules[0].weight, mask, cap or UNCAPPED)
    logprobs, entropy, collision = _TokenOutputsFunction.apply(*arguments, drawable_ids)
    return TokenOutputs(logprobs, entropy, collision, torch.zeros_like(entropy))


class _TokenOutputsFunction(torch.autograd.Function):
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
        drawable_ids: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, collision = (torch.empty(len(hidden)) for _ in range(3))
        # The only memory for logits, (chunk, V): every chunk overwrites it, in the backward pass too.
        buffer = hidden.new_empty(rows_at_once(len(hidden), len(weight)), len(weight))
        for x, rows in _chunks(hidden, buffer):
            logits = exclude(_logits(layer, x, buffer, cap), mask, rows.start, drawable_ids)
            parts = (targets[rows], inverse, logprobs[rows], entropy[rows], collision[rows])
            call("token_outputs", logits, *parts, *logits.shape, dtype=logits.dtype)
        ctx.save_for_backward(hidden, targets, entropy, buffer)
        ctx.layer = layer
        ctx.inverse = inverse
        ctx.weight = weight
        ctx.mask = mask
        ctx.cap = cap
        ctx.drawable_ids = drawable_ids
        ctx.mark_non_differentiable(collision)
        return logprobs, entropy, collision

    @staticmethod
    def backward(
        ctx: AutogradContext, dlogprob: Tensor, dentropy: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, entropy, buffer = ctx.saved_tensors
        weight = ctx.weight
        inverse_cap = 1 / ctx.cap if ctx.cap else 0.0
        dhidden = torch.empty_like(hidden)
        dlogprob = dlogprob.contiguous()
        # Gradients of an unused output come as zeros; None saves the operation its second term.
        dentropy = dentropy.contiguous() if dentropy is not None and bool(dentropy.any()) else None

        # One pass over the chunks fills dhidden and, where the head is trained, sums its gradient.
        def add(total: Tensor | None) -> None:
            for x, rows in _chunks(hidden, buffer):
                raw = _logits(ctx.layer, x, buffer, ctx.cap)
                logits = exclude(raw, ctx.mask, rows.start, ctx.drawable_ids)
                grads = (dlogprob[rows], None if dentropy is None else dentropy[rows], entropy[rows])
                parts = (targets[rows], ctx.inverse, inverse_cap, *grads)
                # In place: the logits of the chunk become their gradients.
                call("token_outputs_back", logits, *parts, *logits.shape, dtype=logits.dtype)
                dhidden[rows] = ctx.layer.product_back(logits)
                if total is not None:
                    ctx.layer.add_gradient(logits, x, total)

        if not weight.requires_grad:  # `add_gradient` ignores frozen weights
            add(None)
        return dhidden, None, None, None, add_gradient(weight, add), None, None, None


def _logits(layer: FusedLinear, x: Tensor, buffer: Tensor, cap: float) -> Tensor:
    """Logits of rows of hidden states, written to the beginning of ``buffer``."""
    logits = layer.product_once(x, buffer[: len(x)])
    if cap:
        call("soft_cap", logits, cap, logits, *logits.shape, dtype=logits.dtype)
    return logits


def _chunks(hidden: Tensor, buffer: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Chunks of ``hidden`` whose logits fit into ``buffer``, and their rows."""
    for start in range(0, len(hidden), max(len(buffer), 1)):
        rows = slice(start, start + len(buffer))
        yield hidden[rows], rows
