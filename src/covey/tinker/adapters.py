"""LoRA adapters on one base model, each with its own AdamW.

The weights of an adapter are kept apart from the model. To compute, they are copied into a policy of the same
shape (`Base.mount`); all these policies share the base weights. So sampling from a snapshot of one adapter
never disturbs the training of another.
"""

from __future__ import annotations

import copy
import math
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from covey.errors import CheckpointError
from covey.models.hashes import weights_hash
from covey.models.policy import Policy
from covey.models.readback import check_written
from covey.sampling.local import LocalSampler
from covey.tinker.bodies import AdamParams
from covey_verify.errors import ConfigError, DataError

ALPHA = 32
"""LoRA's alpha: an adapter adds alpha / rank times B A to a layer's weights. Tinker has this value."""
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"


class AdapterShape(NamedTuple):
    """The layers that an adapter changes, and the rank of its updates."""

    rank: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = True

    def __str__(self) -> str:
        parts = {"attention": self.attention, "mlp": self.mlp, "unembed": self.unembed}
        return f"rank {self.rank} on {', '.join(name for name, on in parts.items() if on)}"


@dataclass(frozen=True)
class AdapterWeights:
    """The weights of an adapter at one time. Without a shape there is no adapter, only the base model."""

    shape: AdapterShape | None = None
    tensors: tuple[Tensor, ...] = ()
    state: object = field(default_factory=object)
    """An object that identifies these values; each change of them makes another."""


class Adapter:
    """The trained weights of a training client, with their gradient so far and AdamW's state."""

    def __init__(self, shape: AdapterShape, tensors: tuple[Tensor, ...]) -> None:
        self.shape = shape
        self.parameters = [nn.Parameter(t) for t in tensors]
        self.adam = torch.optim.AdamW(self.parameters)
        self.state = object()

    @property
    def weights(self) -> AdapterWeights:
        """The current weights, not copied."""
        return AdapterWeights(self.shape, tuple(p.detach() for p in self.parameters), self.state)

    def snapshot(self) -> AdapterWeights:
        """Return a copy of the current weights."""
        return AdapterWeights(self.shape, tuple(p.detach().clone() for p in self.parameters), self.state)

    def step(self, params: AdamParams) -> float:
        """Make a step of torch's AdamW; return the gradient's norm before clipping.

        Raises DataError for a gradient that is not finite, which is dropped without a step.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not math.isfinite(norm):
            self.adam.zero_grad()
            raise DataError(
                f"optim_step: the gradient's norm is {norm}; it was dropped, and the weights are unchanged"
            )
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, params.grad_clip_norm, torch.tensor(norm))
        (group,) = self.adam.param_groups
        group |= {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
        }
        self.adam.step()
        self.adam.zero_grad()
        self.state = object()
        return norm

    @torch.no_grad()
    def load(self, weights: tuple[Tensor, ...], moments: Mapping[str, Tensor]) -> None:
        """Load weights and AdamW's moments; without moments AdamW starts anew. The gradient is dropped."""
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight)
        self.adam = torch.optim.AdamW(self.parameters)
        self.adam.zero_grad()
        for name, value in moments.items():
            key, _, index = name.rpartition(".")
            parameter = self.parameters[int(index)]
            self.adam.state[parameter][key] = value if key == "step" else value.to(parameter.device)
        self.state = object()

    def moments(self) -> dict[str, Tensor]:
        """Return AdamW's state as named tensors."""
        states = enumerate(self.adam.state.get(p, {}) for p in self.parameters)
        return {f"{key}.{i}": value for i, state in states for key, value in state.items()}


class Base:
    """The base model, and a policy for each shape of adapter that shares its weights."""

    def __init__(
        self, policy: Policy, name: str, source: str, tokens: int = 4096, running: int = 256
    ) -> None:
        """``tokens``: the size of a micro-batch in training. ``running``: completions sampled at once."""
        policy.draw_from_all()  # clients expect log-probs over all ids, also those that no text has
        self.policy = policy
        self.name = name
        self.source = source
        """The folder or hub id that the tokenizer loads from."""
        self.plain = AdapterWeights()
        """The weights of no adapter."""
        self.tokens = tokens
        self.running = running
        self._samplers: dict[AdapterShape | None, LocalSampler] = {}
        self._mounted: dict[AdapterShape | None, object] = {}
        head = policy.model.get_output_embeddings()
        # Name of each linear layer -> the field of AdapterShape that selects it.
        self._linears = {
            n: "unembed" if m is head else "attention" if "attn" in n or "attention" in n else "mlp"
            for n, m in policy.model.named_modules()
            if type(m) is nn.Linear and m.weight.requires_grad
        }
        policy.model.requires_grad_(False)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the base weights. An adapter fits only the weights that it was trained on."""
        return weights_hash(dict(self.policy.model.named_parameters()))

    def mount(self, weights: AdapterWeights) -> LocalSampler:
        """Return a sampler that computes with these weights until others of their shape are mounted."""
        shape = weights.shape
        sampler = self._sampler_for(shape)
        if self._mounted.get(shape) is not weights.state:
            self._mounted.pop(shape, None)  # nothing is mounted if a copy fails halfway
            with torch.no_grad():
                for parameter, tensor in zip(sampler.policy.parameters, weights.tensors, strict=True):
                    parameter.copy_(tensor)
            self._mounted[shape] = weights.state
        return sampler

    def new_adapter(self, shape: AdapterShape, seed: int | None) -> Adapter:
        """Return a new adapter, with A drawn at random and B = 0. Raises ConfigError or DataError."""
        # Drawn on the CPU, so that a seed gives the same adapter on every device.
        generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
        tensors = []
        for name, like in self._named_weights(shape).items():
            tensor = torch.zeros(like.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
            tensors.append(tensor.to(like.device))
        return Adapter(shape, tuple(tensors))

    def save(
        self, folder: Path, weights: AdapterWeights, moments: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write an adapter in peft's format, and AdamW's state if it is given."""
        assert weights.shape is not None, "the base model is not saved"
        adapter = self._sampler_for(weights.shape).policy.adapter
        assert adapter is not None, "a policy of a shape has an adapter"
        # peft writes its settings; the tensors are written here, so that they can be read back and compared.
        adapter.peft_config["default"].save_pretrained(str(folder))
        named = dict(zip(map(_saved_name, self._named_weights(weights.shape)), weights.tensors, strict=True))
        for name, tensors in ((ADAPTER, named), (OPTIMIZER, moments)):
            if tensors is not None:
                save_file(dict(tensors), folder / name)
                check_written(folder / name, tensors)

    def load(self, folder: Path, shape: AdapterShape) -> tuple[Tensor, ...]:
        """Read the weights that ``save`` wrote. Raises CheckpointError if they have another shape."""
        saved = load_file(folder / ADAPTER)
        expected = {_saved_name(name): like for name, like in self._named_weights(shape).items()}
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in expected.items()}:
            raise CheckpointError(f"{folder} holds an adapter of another model than {self.name}")
        return tuple(saved[name].to(like.device) for name, like in expected.items())

    def _named_weights(self, shape: AdapterShape) -> dict[str, nn.Parameter]:
        """Return name -> trained weights of a shape, in the order of an adapter's tensors."""
        return {n: p for n, p in self._sampler_for(shape).policy.model.named_parameters() if p.requires_grad}

    def _sampler_for(self, shape: AdapterShape | None) -> LocalSampler:
        if shape not in self._samplers:
            policy = self.policy if shape is None else self._with_adapter(shape)
            self._samplers[shape] = LocalSampler(policy, self.running)
        return self._samplers[shape]

    def _with_adapter(self, shape: AdapterShape) -> Policy:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise ConfigError("adapters need peft: pip install 'covey[lora]'") from None
        parts = [part for part in ("attention", "mlp", "unembed") if getattr(shape, part)]
        if not parts:
            raise DataError("lora_config: train at least one of train_attn, train_mlp and train_unembed")
        missing = [part for part in parts if part not in self._linears.values()]
        if missing:
            kind = self.policy.model.config.model_type
            raise DataError(f"lora_config: {kind} has no linear layers in {' and '.join(missing)} to adapt")
        names = [n for n, part in self._linears.items() if part in parts]
        # With the parameters in its memo, deepcopy copies the modules and shares the weights.
        shared = {id(p): p for p in self.policy.model.parameters()}
        model = copy.deepcopy(self.policy.model, shared)
        layers = LoraConfig(r=shape.rank, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that has been renamed
            # The update of the output layer is a weight of its own, even if the layer shares the embedding.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
            adapter = get_peft_model(model, layers)
        adapter.peft_config["default"].base_model_name_or_path = self.source
        return self.policy.with_model(adapter.get_base_model(), adapter, self.policy.rounds)


def _saved_name(name: str) -> str:
    return "base_model.model." + name.replace(".default.", ".")
