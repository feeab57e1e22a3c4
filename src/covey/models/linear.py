"""Linear layers of a model: fused products of layers with the same input, LoRA, and the value head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covey.models.internals import version_of
from covey.models.kernels.calls import (
    LANES,
    MIXED_PRODUCTS,
    PANEL,
    Numbers,
    by_torch,
    call,
    forward_kind,
    packed_size,
)

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


class ValueHead(nn.Linear):
    """The value V = w h + b of hidden states, in float32; it begins as 0 everywhere."""

    def __init__(self, width: int, device: torch.device) -> None:
        # nn.Linear draws initial weights, which are replaced; no random state must change.
        with torch.random.fork_rng(devices=[]):
            super().__init__(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.pull = 1.0
        """Factor on the gradient that passes into the hidden states."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute values from hidden states. (M, D) -> (M,) float32."""
        # The value of hidden, with its gradient scaled: the second term is 0 but has slope pull.
        scaled = hidden.detach()
        if self.pull:
            scaled = scaled + self.pull * (hidden - scaled)
        # Copied, because FSDP warns of an output that is a view.
        return F.linear(scaled.float(), self.weight, self.bias)[:, 0].clone()


class LowRank:
    """The update that LoRA adds to a layer's weight: W + s B A, B (out, r), A (r, in) (2106.09685)."""

    def __init__(self, layer: LoraLayer) -> None:
        self.layer = layer

    @property
    def parameters(self) -> list[Tensor]:
        """A and B."""
        return [factor["default"].weight for factor in (self.layer.lora_A, self.layer.lora_B)]

    @property
    def enabled(self) -> bool:
        """Whether the update is added; it is not while the model is its own reference."""
        return not self.layer.disable_adapters

    @property
    def a(self) -> Tensor:
        """A, without autograd: (r, in)."""
        return self.parameters[0].detach()

    @property
    def scaled_b(self) -> Tensor:
        """s B, without autograd: (out, r)."""
        return self.parameters[1].detach() * self.scale

    @property
    def scale(self) -> float:
        """The factor s: alpha / r, or alpha / sqrt(r)."""
        return float(self.layer.scaling["default"])

    def merge(self, weight: Tensor, out: Tensor) -> None:
        """Write W + s B A to ``out``, (out, in), so that sampling and training multiply by one matrix."""
        transposed_b = self.scaled_b.t().contiguous()
        outputs, inputs = weight.shape
        sizes = (outputs, len(transposed_b), inputs)
        call("merge", weight, transposed_b, self.a, out, *sizes, dtype=torch.float32)

    def b_gradient(self, x_by_rank: Tensor, grad: Tensor, numbers: Numbers) -> Tensor:
        """The gradient s dY^T (X A^T) of B, from X A^T (T, r) and dY (T, out): (out, r)."""
        # Summed as (r, out), since the operation needs whole vectors in a row, and r may be small.
        transposed = torch.zeros(x_by_rank.shape[1], grad.shape[1])
        outer_sum(x_by_rank * self.scale, grad, transposed, numbers)
        return transposed.t()


class ActiveAdapter(NamedTuple):
    """An adapter that is on, with its places in the joined products of all adapters of a fused layer."""

    adapter: LowRank
    outputs: slice
    ranks: slice


PLAIN_LORA = "peft.tuners.lora.layer"
"""Module of peft's class for W + s B A; relatives such as AdaLoRA have modules of their own."""


def _low_rank(module: nn.Module) -> LowRank | None:
    """The update of a LoRA layer, if our products can do it; None otherwise.

    The weight's outputs have to fill whole vectors. Relatives of LoRA compute something else: with `use_dora`
    a variant, with `lora_bias` a bias as well.
    """
    if not (type(module).__module__ == PLAIN_LORA and type(module.base_layer) is nn.Linear):
        return None
    layer = cast("LoraLayer", module)
    fills_vectors = len(module.base_layer.weight) % LANES == 0
    return (
        LowRank(layer)
        if fills_vectors and not layer.lora_variant and not any(layer.lora_bias.values())
        else None
    )


def adapts_linears(model: nn.Module) -> bool:
    """Whether all adapters of a model are within its linear layers, whose modules we call.

    Others, of experts' weights, embeddings or norms, act only where the Hugging Face modules compute.
    """
    modules = list(model.modules())
    adapted = [type(module.base_layer) for module in modules if hasattr(module, "base_layer")]
    replaced = any(hasattr(module, "original_module") for module in modules)
    return not replaced and all(kind is nn.Linear for kind in adapted)


class FusedLinear:
    """Linear layers with the same input, computed as one product with concatenated outputs.

    Weights are read from ``modules`` at each call, since sharding replaces them.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        self.modules = modules
        self.low_rank = [_low_rank(m) for m in modules]
        """The LoRA update of each module's weight, or None."""
        self.rounds = False
        """Whether inputs and weights are rounded to bfloat16 where they are multiplied."""
        self.plain = all(type(m) is nn.Linear for m in modules)
        self.is_product = all(
            adapter or type(m) is nn.Linear for m, adapter in zip(modules, self.low_rank, strict=True)
        )
        """Whether it is a plain product plus bias, LoRA included; otherwise its modules compute."""
        self.fleeting = False
        """Whether no packed copy is kept: its weights are gathered for each call, or are a reference's."""
        self._state: tuple[int, ...] = ()
        self._held: list[Tensor] = []
        self._forward: PackedWeight | None = None
        self._down: PackedWeight | None = None
        """A of the adapters that are not merged, packed."""
        self._bias: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The weights, then the biases, then A and B of each adapter."""
        of_layers = [m.weight for m in self.modules] + [m.bias for m in self.modules if m.bias is not None]
        return of_layers + [p for adapter in self.low_rank if adapter for p in adapter.parameters]

    @property
    def sizes(self) -> list[int]:
        """Number of outputs of each layer."""
        return [len(m.weight) for m in self.modules]

    def numbers(self, x: Tensor) -> Numbers:
        """The numbers that its product multiplies for this input."""
        return MIXED_PRODUCTS if self.rounds else x.dtype

    @property
    def packed(self) -> Tensor | None:
        """The packed copy of the weights that sampling reads, if there is one."""
        return self._forward and self._forward.panels

    def drop_packed(self) -> None:
        """Free the packed copy, if there is one."""
        self._forward = None

    def product(self, x: Tensor) -> Tensor:
        """Compute x W^T + b from a packed copy that is kept, or by torch. (T, in) -> (T, out)."""
        if self.fleeting:
            return self.product_once(x)
        numbers = self.numbers(x)
        if by_torch(forward_kind(len(x)), numbers):
            return self._by_torch(x)
        self._refresh()
        if self._forward is None or self._forward.numbers != numbers:
            self._forward = PackedWeight.pack(self._joined_weight(x.dtype), numbers)
            columns = self._column_adapters()
            self._down = PackedWeight.pack(self._factors(columns, x.dtype)[0]) if columns else None
            self._bias = self._joined_bias()
        wide = x if self._down is None else torch.cat((x, self._down.product(x, None)), 1)
        return self._forward.product(wide, self._bias)

    def product_once(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the same bits without a kept copy, for training: with many rows packing costs little."""
        # The next optimizer step changes the weights, so a packed copy would be of no use.
        self.drop_packed()
        numbers = self.numbers(x)
        if by_torch(forward_kind(len(x)), numbers):
            return self._by_torch(x) if out is None else out.copy_(self._by_torch(x))
        weight = self._joined_weight(x.dtype)
        wide = self._widened(x)
        out = x.new_empty(len(x), len(weight)) if out is None else out
        call("product_once", wide, weight, 0, self._joined_bias(), out, len(x), *weight.shape, dtype=numbers)
        return out

    def _widened(self, x: Tensor) -> Tensor:
        """The inputs, with those that adapters make of them: [X | X A^T]; X if all adapters are merged."""
        columns = self._column_adapters()
        return torch.cat((x, multiply(x, self._factors(columns, x.dtype)[0], x.dtype)), 1) if columns else x

    def _by_torch(self, x: Tensor) -> Tensor:
        weight = self._joined_weight(x.dtype)
        x = self._widened(x)
        bias = self._joined_bias()
        # Our products read whole panels of a bias, so it is padded; torch wants its own length.
        return F.linear(x, weight, None if bias is None else bias[: len(weight)].to(x.dtype))

    def product_back(self, grad: Tensor) -> Tensor:
        """The gradient of the input through the layers' own weights, grad W. (T, out) -> (T, in)."""
        weight = self._joined_weight(grad.dtype, merged=False)
        numbers = self.numbers(grad)
        if by_torch("inputs", numbers):
            return grad @ weight
        return multiply(grad.contiguous(), weight, numbers, transposed=True)

    def add_gradient(self, grad: Tensor, x: Tensor, out: Tensor) -> None:
        """Add grad^T x to the gradient of one module's weight, in float32. (T, out), (T, in) -> (out, in)."""
        numbers = self.numbers(x)
        if by_torch("weights", numbers):
            out.add_(grad.t() @ x)
        else:
            outer_sum(grad, x, out, numbers)

    def adapters_back(self, grad: Tensor, x: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients through the adapters: of the input, or None, and of A and B of each adapter.

        With dY = ``grad`` (T, out) and X = ``x`` (T, in), dA = (dY s B)^T X, dB = s dY^T (X A^T), and
        dX = (dY s B) A. A product is as slow with few columns as with many, so all adapters share each one.
        """
        active = self._active_adapters()
        gradients = dict[LowRank, list[Tensor]]()
        through_adapters = None
        if active:
            numbers = self.numbers(x)
            a, b = self._factors(active, x.dtype)
            grad_by_rank = multiply(grad, b, numbers, transposed=True)
            x_by_rank = multiply(x, a, numbers)
            da = torch.zeros(a.shape)
            outer_sum(grad_by_rank, x, da, numbers)
            for adapter, outputs, ranks in active:
                db = adapter.b_gradient(x_by_rank[:, ranks], grad[:, outputs], numbers)
                gradients[adapter] = [da[ranks], db]
            through_adapters = multiply(grad_by_rank, a, numbers, transposed=True)
        adapters = [adapter for adapter in self.low_rank if adapter]
        return through_adapters, [g for adapter in adapters for g in gradients.get(adapter, [None, None])]

    def _factors(self, active: Sequence[ActiveAdapter], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A of all these adapters, (ranks, in), and s B, (outputs, ranks)."""
        a = torch.cat([adapter.a for adapter, _, _ in active]).to(dtype)
        # Each adapter's B stands in the rows of its layer's outputs and the columns of its own ranks.
        b = torch.zeros(sum(self.sizes), len(a), dtype=dtype)
        for adapter, outputs, ranks in active:
            b[outputs, ranks] = adapter.scaled_b.to(dtype)
        return a, b

    def _column_adapters(self) -> list[ActiveAdapter]:
        """The adapters that are not merged, as a sum with bfloat16 weights would lose small updates."""
        return [] if self.modules[0].weight.dtype == torch.float32 else self._active_adapters()

    def _active_adapters(self) -> list[ActiveAdapter]:
        active = list[ActiveAdapter]()
        ranks = 0
        for adapter, outputs in zip(self.low_rank, _spans(self.sizes), strict=True):
            if adapter and adapter.enabled:
                rank = len(adapter.a)
                active.append(ActiveAdapter(adapter, outputs, slice(ranks, ranks + rank)))
                ranks += rank
        return active

    def _refresh(self) -> None:
        """Drop the packed weight if a parameter was written to or replaced, or an adapter switched."""
        weights = self._own_parameters() if self.plain else self.parameters
        state = tuple(n for p in weights for n in (p.data_ptr(), version_of(p)))
        state += tuple(adapter.enabled for adapter in self.low_rank if adapter)
        if state != self._state:
            self._state = state
            self._forward = None
            self._bias = None
            self._held = [p.detach() for p in self.parameters]  # so that no other tensor gets their addresses

    def _own_parameters(self) -> Iterator[Tensor]:
        # This runs at every product, and attributes of modules are slow.
        tables = (m._parameters for m in self.modules)  # noqa: SLF001 - parameters() walks all submodules
        return (p for table in tables for p in table.values() if p is not None)

    def _joined_weight(self, dtype: torch.dtype, merged: bool = True) -> Tensor:
        """The weights of all layers, (sum of outputs, in), with what adapters add to them if ``merged``.

        That of bfloat16 weights are further columns, [W | s B], whose inputs are ``_widened``.
        """
        columns = self._column_adapters() if merged else []
        adapters = [a if merged and not columns and a and a.enabled else None for a in self.low_rank]
        weights = [module.weight.detach().to(dtype) for module in self.modules]
        if columns:
            return torch.cat((torch.cat(weights), self._factors(columns, dtype)[1]), 1)
        if len(weights) == 1 and adapters == [None]:
            # A single weight without adapters needs no copy.
            return weights[0]
        joined = torch.empty(sum(self.sizes), weights[0].shape[1], dtype=dtype)
        for weight, adapter, out in zip(weights, adapters, joined.split(self.sizes), strict=True):
            if adapter:
                adapter.merge(weight, out)
            else:
                out.copy_(weight)
        return joined

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
    """A weight (N, K) packed into the panels that the compiled product reads."""

    panels: Tensor
    outputs: int
    inputs: int
    numbers: Numbers

    @classmethod
    def pack(cls, weight: Tensor, numbers: Numbers | None = None) -> PackedWeight:
        """Pack a weight (N, K)."""
        (n, k) = weight.shape
        numbers = numbers or weight.dtype
        panels = torch.empty(packed_size(n, k, numbers), dtype=torch.uint8)
        call("pack_weight", weight, panels, n, k, dtype=numbers)
        return cls(panels, n, k, numbers)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + bias. A row's result does not depend on the other rows."""
        out = x.new_empty(len(x), self.outputs)
        call("product", x, self.panels, bias, out, len(x), self.outputs, self.inputs, dtype=self.numbers)
        return out


def multiply(x: Tensor, weight: Tensor, numbers: Numbers, transposed: bool = False) -> Tensor:
    """Compute x W^T, or with ``transposed`` x W. A row's result does not depend on the other rows."""
    outputs, inputs = weight.t().shape if transposed else weight.shape
    out = x.new_empty(len(x), outputs)
    call("product_once", x, weight, int(transposed), None, out, len(x), outputs, inputs, dtype=numbers)
    return out


def outer_sum(a: Tensor, b: Tensor, out: Tensor, numbers: Numbers | None = None) -> None:
    """Add a^T b to ``out`` in float32. (M, N), (M, K) -> (N, K), K a multiple of 16.

    Both may be some columns of a wider matrix: they are passed by address and row stride, not copied.
    """
    sizes = (*a.shape, b.shape[1])
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    strided = (a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0))
    call("outer_sum", *strided, out, *sizes, dtype=numbers or a.dtype)


def _spans(sizes: Sequence[int]) -> list[slice]:
    """Return the slices of parts of these sizes that lie one after another."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
