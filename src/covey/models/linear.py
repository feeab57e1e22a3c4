"""Linear layers that read the same input as one product, and the compiled products themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covey.kernels.calls import MIXED_PRODUCTS, PANEL, Numbers, by_torch, call, forward_kind, packed_size


class ValueHead(nn.Linear):
    """V = w h + b of hidden states, in float32; 0 everywhere before it has learned."""

    def __init__(self, width: int, device: torch.device, pull: float = 1.0) -> None:
        with torch.random.fork_rng(devices=[]):  # what nn.Linear draws is not used
            super().__init__(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.pull = pull
        """How much of the gradient goes on into the hidden states."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(M, D) -> (M,) float32."""
        read = hidden.detach()
        if self.pull:
            read = read + self.pull * (hidden - read)
        return F.linear(read.float(), self.weight, self.bias)[:, 0].clone()  # FSDP warns of a view


class FusedLinear:
    """Linear layers that read the same input, as one product whose outputs are concatenated.

    Weights are read from ``modules`` at each call; those may be LoRA's layers, which are not ``plain``.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        self.modules = modules
        self.rounds = False
        """Whether inputs and weights are rounded to bfloat16 where they are multiplied."""
        self.plain = all(type(m) is nn.Linear for m in modules)
        self.fleeting = False
        """Whether its weights come and go, and no copy of them may be kept."""
        self._state: tuple[int, ...] = ()
        self._held: list[Tensor] = []
        self._forward: PackedWeight | None = None
        self._bias: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The weights, then the biases."""
        return [m.weight for m in self.modules] + [m.bias for m in self.modules if m.bias is not None]

    @property
    def sizes(self) -> list[int]:
        """Outputs of each layer."""
        return [len(m.weight) for m in self.modules]

    def _numbers(self, x: Tensor) -> Numbers:
        return MIXED_PRODUCTS if self.rounds else x.dtype

    @property
    def packed(self) -> Tensor | None:
        """The copy of the weights that sampling reads, while there is one."""
        return self._forward and self._forward.panels

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b from a packed copy that is kept, or by torch. (T, in) -> (T, out)."""
        if self.fleeting:
            return self.product_once(x)
        numbers = self._numbers(x)
        if by_torch(forward_kind(len(x)), numbers):
            return self._by_torch(x)
        self._refresh()
        if self._forward is None or self._forward.numbers != numbers:
            self._forward = PackedWeight.of(self._joined_weight(x.dtype), numbers)
            self._bias = self._joined_bias()
        return self._forward.product(x, self._bias)

    def product_once(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The same bits without a copy, for training: its many rows hide the packing."""
        self._forward, numbers = None, self._numbers(x)
        if by_torch(forward_kind(len(x)), numbers):
            return self._by_torch(x) if out is None else out.copy_(self._by_torch(x))
        weight = self._joined_weight(x.dtype)
        out = x.new_empty(len(x), len(weight)) if out is None else out
        call("product_once", x, weight, 0, self._joined_bias(), out, len(x), *weight.shape, dtype=numbers)
        return out

    def _by_torch(self, x: Tensor) -> Tensor:
        weight, bias = self._joined_weight(x.dtype), self._joined_bias()
        return F.linear(x, weight, None if bias is None else bias[: len(weight)].to(x.dtype))

    def product_back(self, grad: Tensor) -> Tensor:
        """grad W. (T, out) -> (T, in)."""
        weight, numbers = self._joined_weight(grad.dtype), self._numbers(grad)
        if by_torch("inputs", numbers):
            return grad @ weight
        grad, into = grad.contiguous(), grad.new_empty(len(grad), weight.shape[1])
        call("product_once", grad, weight, 1, None, into, len(grad), *weight.t().shape, dtype=numbers)
        return into

    def add_gradient(self, grad: Tensor, x: Tensor, out: Tensor) -> None:
        """Of a part of the weights: out += grad^T x, in float32. (T, out), (T, in) -> (out, in)."""
        numbers = self._numbers(x)
        if by_torch("weights", numbers):
            out.add_(grad.t() @ x)
        else:
            outer_sum(grad, x, out, numbers)

    def _refresh(self) -> None:
        """Forget the packed weight when a parameter was written to or replaced by another."""
        # torch has no public way to ask whether a tensor was written to; attributes of modules are slow.
        held = (p for m in self.modules for p in m._parameters.values() if p is not None)  # noqa: SLF001
        state = tuple(n for p in held for n in (p.data_ptr(), p._version))  # noqa: SLF001
        if state != self._state:
            self._state, self._forward, self._bias = state, None, None
            self._held = [p.detach() for p in self.parameters]  # so that no other tensor gets their addresses

    def _joined_weight(self, dtype: torch.dtype) -> Tensor:
        weights = [m.weight.detach().to(dtype) for m in self.modules]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _joined_bias(self) -> Tensor | None:
        if all(m.bias is None for m in self.modules):
            return None
        parts = [
            torch.zeros(n) if m.bias is None else m.bias
            for m, n in zip(self.modules, self.sizes, strict=True)
        ]
        joined = torch.cat([p.detach().float() for p in parts])
        return F.pad(joined, (0, PANEL))


class PackedWeight(NamedTuple):
    """A weight (N, K) in the layout of the compiled product."""

    panels: Tensor
    outputs: int
    inputs: int
    numbers: Numbers

    @classmethod
    def of(cls, weight: Tensor, numbers: Numbers | None = None) -> PackedWeight:
        """Pack a weight (N, K)."""
        (n, k), numbers = weight.shape, numbers or weight.dtype
        panels = torch.empty(packed_size(n, k, numbers), dtype=torch.uint8)
        call("pack_weight", weight, panels, n, k, dtype=numbers)
        return cls(panels, n, k, numbers)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias. A row's result does not depend on the other rows."""
        out = x.new_empty(len(x), self.outputs)
        call("product", x, self.panels, bias, out, len(x), self.outputs, self.inputs, dtype=self.numbers)
        return out


def outer_sum(a: Tensor, b: Tensor, out: Tensor, numbers: Numbers | None = None) -> None:
    """out += a^T b, in float32. (M, N), (M, K) -> (N, K); a may be columns of more, K a multiple of 16."""
    sizes = (*a.shape, b.shape[1])
    a = a if a.stride(1) == 1 else a.contiguous()
    call("outer_sum", a.data_ptr(), a.stride(0), b, b.stride(0), out, *sizes, dtype=numbers or a.dtype)
