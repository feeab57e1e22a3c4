"""The optimizer: AdamW, in float32 or with 8-bit moments, with clipping and float32 master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from covey.config.schema import Train
from covey.models.internals import give_master
from covey.models.live_memory import alive_bytes
from covey.models.sharded import copy_into, full_tensor, local_part
from covey.system.processes import world_size
from covey_verify.errors import ConfigError


def optimizer_class(train: Train) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of a config's optimizer. Raises ConfigError if it cannot be used here."""
    if train.optimizer == "adamw":
        return partial(torch.optim.AdamW, fused=True)
    if world_size() > 1:
        raise ConfigError(f"train.optimizer: {train.optimizer} works in one process only; use adamw")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            f"train.optimizer: {train.optimizer} needs bitsandbytes: pip install 'covey[adam8bit]'"
        ) from None
    optimizer: Callable[..., torch.optim.Optimizer] = AdamW8bit
    return optimizer


def _adam_groups(parts: Sequence[tuple[Sequence[Tensor], float]], train: Train) -> list[dict[str, object]]:
    """Return AdamW's groups: the matrices of each part, which decay, and its norms and biases."""
    groups = list[dict[str, object]]()
    for part, relative_lr in parts:
        matrices = [w for w in part if w.ndim >= 2]
        norms_and_biases = [w for w in part if w.ndim < 2]
        for weights, decay in ((matrices, train.weight_decay), (norms_and_biases, 0.0)):
            if weights:
                groups.append({"params": weights, "weight_decay": decay, "relative_lr": relative_lr})
    return groups


class Optimizer:
    """Applies accumulated gradients. bfloat16 weights have a float32 master copy, because updates of
    1e-6 vanish in their rounding.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        train: Train,
        head: Sequence[nn.Parameter] = (),
        relative_lr: float = 1,
    ) -> None:
        """``head``: parameters that are clipped separately and learn at ``relative_lr`` times the rate."""
        self.parameters = [*parameters, *head]
        self.train = train
        # A float32 parameter is its own master.
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        for master, parameter in self._copies():
            give_master(parameter, master)
        body_count = len(parameters)
        self.groups = [
            (part, p)
            for part, p in ((self.masters[:body_count], 1.0), (self.masters[body_count:], relative_lr))
            if part
        ]
        groups = _adam_groups(self.groups, train)
        self.adam = optimizer_class(train)(groups, lr=train.lr, betas=train.betas)
        self.gradient_bytes = 0
        """Most bytes of the gradient at a step so far."""
        self.moved = False
        """Whether the last step was applied to more than a head. Weights without a gradient stay; a gradient
        of 0 still moves them by AdamW's momentum.
        """

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch, in float32; the compiled operations have added most."""
        for master, parameter in self._copies():
            if parameter.grad is not None:
                # Micro-batches add up in float32; in bfloat16 small terms would be lost.
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for tensor in (*self.masters, *self.parameters):
            tensor.grad = None

    def step(self, lr: float) -> float:
        """Update once at this learning rate; return the gradient's norm before clipping.

        That of a head counts only where it learns alone. A gradient that is not finite is not applied; the
        caller has to ``clear`` it.
        """
        self.gradient_bytes = max(self.gradient_bytes, alive_bytes(m.grad for m in self.masters))
        clip = self.train.grad_clip
        # Body and head are clipped separately: one's large gradient does not shrink the other's.
        norms = [float(full_tensor(torch.nn.utils.clip_grad_norm_(part, clip))) for part, _ in self.groups]
        self.moved = False
        if not math.isfinite(sum(norms)):
            return math.nan
        self._let_wait(norms)
        self.moved = any(master.grad is not None for master in self.groups[0][0])
        for group in self.adam.param_groups:
            group["lr"] = lr * group["relative_lr"]
        self.adam.step()
        self.adam.zero_grad()
        with torch.no_grad():
            for master, parameter in self._copies():
                parameter.copy_(master)
        for parameter in self.parameters:  # the fused update does not count itself as a change
            torch.autograd.graph.increment_version(local_part(parameter))
        return norms[0] if self.moved else norms[-1]

    def _let_wait(self, norms: Sequence[float]) -> None:
        """Drop gradients of 0 of weights that have never learned: AdamW would decay them and count steps.

        A policy that waits for its critic has no gradient in one process; split over processes it has 0.
        """
        for (part, _), norm in zip(self.groups, norms, strict=True):
            for master in part if norm == 0 else ():
                if not self.adam.state.get(master):
                    master.grad = None

    def _copies(self) -> list[tuple[Tensor, nn.Parameter]]:
        pairs = zip(self.masters, self.parameters, strict=True)
        return [(m, p) for m, p in pairs if m is not p]

    def memory_bytes(self) -> int:
        """Return the bytes of the moments and of the float32 copies of low-precision weights."""
        moments = (v for state in self.adam.state.values() for v in state.values() if isinstance(v, Tensor))
        return alive_bytes((*moments, *(master for master, _ in self._copies())))

    def state(self) -> dict[str, Tensor]:
        """Return everything that an exact continuation needs, as named tensors."""
        tensors: dict[str, Tensor] = {}
        for i, master in enumerate(self.masters):
            for key, value in self.adam.state.get(master, {}).items():
                # bitsandbytes counts steps in ints, and one table of codes serves all parameters.
                is_table = key.startswith("qmap")
                tensors[f"{key}.{i}"] = value.clone() if is_table else torch.as_tensor(value)
            # Split masters are saved in any case: ``Learner.state`` counts on it.
            if master is not self.parameters[i] or isinstance(master, DTensor):
                tensors[f"master.{i}"] = master
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore ``state``."""
        for name, value in tensors.items():
            key, _, index = name.rpartition(".")
            master = self.masters[int(index)]
            # A name is key.index; index counts the masters.
            if key == "master":
                copy_into(master, value)
            # The moments of a split weight are split alike: this process takes its part of the whole tensor.
            elif isinstance(master, DTensor) and value.shape == master.shape:
                copy_into(self.adam.state[master].setdefault(key, torch.zeros_like(master)), value)
            else:
                is_count = value.dtype == torch.int64
                self.adam.state[master][key] = int(value) if is_count else value.to(master.device)
        for master, parameter in self._copies():
            parameter.copy_(master)
