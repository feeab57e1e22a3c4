"""Weights of a model split over the processes of a run by FSDP2; a layer's are gathered while it computes.

Every process holds its part of the weights (in float32, whatever they compute in), and so of the gradient and
of the optimizer's state. FSDP's hooks run when a module is called. Layers have hooks of their own; the other
weights (embeddings, last norm, heads) are gathered by a module around all of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from covey.models.forward import Decoder
from covey.models.linear import FusedLinear
from covey.system.processes import world_size
from covey_verify.errors import ConfigError

T = TypeVar("T")


class Gathering(Protocol):
    """A function that does some work while the weights it needs are gathered."""

    def __call__(self, work: Callable[[], T]) -> T:
        """Do the work and return its result."""


def unsplit(work: Callable[[], T]) -> T:
    """Do the work at once, as no weights are split."""
    return work()


class Gatherer(nn.Module):
    """A module that does some work while the weights of ``parts`` outside of the layers are gathered."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, work: Callable[[], T]) -> T:
        """Do the work; through its result's tensors FSDP's backward hooks reach this module."""
        return work()


class Splittable(Protocol):
    """A model whose weights can be split: a policy, or a network for values."""

    model: PreTrainedModel
    decoder: Decoder | None
    with_weights: Gathering

    def heads(self) -> list[nn.Module]:
        """The modules that give values; they stay in float32 and have hooks of their own."""


def split_weights(policy: Splittable) -> None:
    """Keep only this process's part of the weights; all processes have to call it together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    model = policy.model
    decoder = policy.decoder
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"launch.processes: more than one process needs torch 2.13, but this is {torch.__version__}"
        )
    # The modules that are called: ours run through the decoder's layers, others through transformers' blocks.
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    layers: list[nn.Module] = [*decoder.layers] if decoder is not None else [*blocks]
    # The optimizer's copy is float32; FSDP casts to the dtype of computation when it gathers.
    compute_dtype = model.dtype
    for parameter in model.parameters():
        if parameter.requires_grad or compute_dtype == parameter.dtype:
            parameter.data = parameter.data.float()
    param_dtype = None if compute_dtype == torch.float32 else compute_dtype
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (world_size(),))
    heads = policy.heads()
    gatherer = Gatherer([*layers, *_outside(model, layers), *heads])
    for module in (*layers, *heads, gatherer):
        dtype = None if module in heads else param_dtype  # a head for values stays in float32
        precision = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision)
        # Each process's loss is its part of the step's loss, so gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_reduce_scatter_unused_params(True)
    # Gathered weights are freed after use, so no product may keep a packed copy of them.
    for owner in (policy, *layers):
        for linear in vars(owner).values():
            if isinstance(linear, FusedLinear):
                linear.fleeting = True
    policy.with_weights = gatherer


def free_gathered(policy: Splittable) -> None:
    """Free gathered weights, so that parameters are this process's parts; nothing happens if none are split.

    FSDP keeps the outermost weights after a forward pass, for a backward pass that may never come.
    """
    if not isinstance(policy.with_weights, Gatherer):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in policy.with_weights.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _outside(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules with weights that no layer has; FSDP wraps a module's weights once, innermost first."""
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    return [m for m in model.modules() if any(id(p) not in in_layers for p in m.parameters(recurse=False))]


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be split. All processes have to call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_into(target: Tensor, values: Tensor) -> None:
    """Copy values into a tensor that may be split; the values are whole, or split in the same way."""
    if isinstance(target, DTensor) and not isinstance(values, DTensor):
        values = distribute_tensor(values.to(target.device), target.device_mesh, target.placements)
    target.copy_(values)


def full_weights(model: nn.Module) -> Mapping[str, Tensor]:
    """A model's whole weights by name. All processes have to call it together."""
    return {name: full_tensor(value.detach()) for name, value in model.state_dict().items()}
