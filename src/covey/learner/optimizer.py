"""AdamW, in float32 or with 8-bit moments, with clipping and float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from covey.config.schema import Train
from covey.models.alive import alive_bytes
from covey.models.sharded import own, take, whole
from covey_verify.errors import ConfigError


def build_optimizer(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """The optimizer a config asks for. Raises ConfigError where its library is missing."""
    settings: dict[str, Any] = {"lr": train.lr, "betas": train.betas, "weight_decay": train.weight_decay}
    if train.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=True, **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            f"train.optimizer: {train.optimizer} needs bitsandbytes: pip install 'covey[adam8bit]'"
        ) from None
    return AdamW8bit(groups, **settings)


class Optimizer:
    """Applies accumulated gradients. bfloat16 weights are accompanied by a float32 copy, because
    steps of 1e-6 vanish in their rounding.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        train: Train,
        head: Sequence[nn.Parameter] = (),
        pace: float = 1,
    ) -> None:
        """``head``: parameters clipped on their own, at ``pace`` times the learning rate."""
        self.parameters = [*parameters, *head]
        self.train = train
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        body = len(parameters)
        self.groups = [
            (part, p) for part, p in ((self.masters[:body], 1.0), (self.masters[body:], pace)) if part
        ]
        if train.optimizer != "adamw" and any(isinstance(m, DTensor) for m in self.masters):
            raise ConfigError(f"train.optimizer: {train.optimizer} works in one process; take adamw")
        self.adam = build_optimizer([{"params": part} for part, _ in self.groups], train)
        self.gradient_bytes = 0
        """Of the gradient when a step was taken."""
        self.moved = False
        """Whether the last step was applied to more than a head: not to weights without a gradient, while one
        of 0 lets AdamW's memory of others move them.
        """

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch, in float32."""
        for master, parameter in self._copies():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for tensor in (*self.masters, *self.parameters):
            tensor.grad = None

    def step(self, lr: float) -> float:
        """One update at this learning rate; returns the gradient's norm before clipping, the head's apart.

        A gradient that is not finite is not applied; ``clear`` it.
        """
        self.gradient_bytes = max(self.gradient_bytes, alive_bytes(m.grad for m in self.masters))
        clip = self.train.grad_clip
        norms = [float(whole(torch.nn.utils.clip_grad_norm_(part, clip))) for part, _ in self.groups]
        self.moved = False
        if not math.isfinite(sum(norms)):
            return math.nan
        self._let_wait(norms)
        self.moved = any(master.grad is not None for master in self.groups[0][0])
        for group, (_, pace) in zip(self.adam.param_groups, self.groups, strict=True):
            group["lr"] = lr * pace
        self.adam.step()
        self.adam.zero_grad()
        with torch.no_grad():
            for master, parameter in self._copies():
                parameter.copy_(master)
        for parameter in self.parameters:  # the fused update does not count itself as a change
            torch.autograd.graph.increment_version(own(parameter))
        return norms[0]

    def _let_wait(self, norms: Sequence[float]) -> None:
        """Drop gradients of 0 of what has never learned: AdamW would let it decay and count the steps.

        A policy that waits for its critic has no gradient in one process; where weights are split it has 0.
        """
        for (part, _), norm in zip(self.groups, norms, strict=True):
            for master in part if norm == 0 else ():
                if not self.adam.state.get(master):
                    master.grad = None

    def _copies(self) -> list[tuple[Tensor, nn.Parameter]]:
        pairs = zip(self.masters, self.parameters, strict=True)
        return [(m, p) for m, p in pairs if m is not p]

    def alive(self) -> int:
        """Bytes of the moments, and of the float32 copies of weights in less."""
        moments = (v for state in self.adam.state.values() for v in state.values() if isinstance(v, Tensor))
        return alive_bytes((*moments, *(master for master, _ in self._copies())))

    def state(self) -> dict[str, Tensor]:
        """Everything an exact continuation needs, as named tensors."""
        named: dict[str, Tensor] = {}
        for i, master in enumerate(self.masters):
            for key, value in self.adam.state.get(master, {}).items():
                # bitsandbytes counts steps in ints, and one table of codes serves all parameters.
                table = key.startswith("qmap")
                named[f"{key}.{i}"] = value.clone() if table else torch.as_tensor(value)
            if master is not self.parameters[i] or isinstance(master, DTensor):
                named[f"master.{i}"] = master
        return named

    @torch.no_grad()
    def load(self, named: Mapping[str, Tensor]) -> None:
        """Restore ``state``."""
        for name, value in named.items():
            key, _, index = name.rpartition(".")
            master = self.masters[int(index)]
            if key == "master":
                take(master, value)
            elif isinstance(master, DTensor) and value.shape == master.shape:
                take(self.adam.state[master].setdefault(key, torch.zeros_like(master)), value)
            else:
                counts = value.dtype == torch.int64
                self.adam.state[master][key] = int(value) if counts else value.to(master.device)
        for master, parameter in self._copies():
            parameter.copy_(master)
