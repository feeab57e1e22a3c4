"""The reference model: the frozen copy of the policy to which a KL is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from covey.models.hashes import weights_hash
from covey.models.logprobs import Head
from covey.models.packing import Packed
from covey.models.policy import Policy
from covey.models.sharded import copy_into, free_gathered, full_weights, local_part, split_weights


class Reference:
    """The policy as it was at the start: a frozen copy, or the same model with its adapter off."""

    def __init__(self, policy: Policy, moves: bool = False, replacement: Policy | None = None) -> None:
        """``replacement``: the reference, if it is not the policy as it is now."""
        self.moves = moves
        """Whether its weights change, so that a checkpoint has to have them."""
        # A reference that will move needs weights of its own, also where adapters are trained.
        self._adapter = None if moves or replacement is not None else policy.adapter
        self._policy = replacement or policy
        if self._adapter is None:
            self._policy = replacement or policy.deep_copy()
            self._policy.model.requires_grad_(False)
            self._policy.stop_packing()

    @property
    def has_weights(self) -> bool:
        """Whether it has weights in memory of its own, besides the policy's."""
        return self._adapter is None

    @torch.no_grad()
    def refresh(self, policy: Policy, mix: float) -> None:
        """Move the weights towards the policy's by the fraction ``mix``; 1 copies them."""
        free_gathered(self._policy)
        free_gathered(policy)
        # Both are split alike, so each process moves its own part.
        for weight, target in zip(self._policy.model.parameters(), policy.model.parameters(), strict=True):
            local_part(weight).lerp_(local_part(target), mix)

    def split(self) -> None:
        """Keep only this process's part of the reference's own weights."""
        if self.has_weights:
            split_weights(self._policy)

    def state(self) -> dict[str, Tensor]:
        """The weights by name, for a checkpoint; empty if they are the policy's."""
        return {} if self._adapter is not None else dict(self._policy.model.named_parameters())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the weights from ``state``."""
        for name, weight in self.state().items():
            copy_into(weight, state[name])

    def fingerprint(self) -> str:
        """A hash of the weights, by which a record names the model to which the KL was measured."""
        # With its adapter off the reference is the base model, whatever the adapter has learned.
        weights = full_weights(self._policy.model)
        return weights_hash({k: v for k, v in weights.items() if self._adapter is None or "lora_" not in k})

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """Give the reference as a policy without gradient inside the block."""
        adapter_off = self._adapter.disable_adapter() if self._adapter is not None else nullcontext()
        trained = self._policy.parameters
        with torch.no_grad(), adapter_off:
            # peft clears requires_grad of an adapter that is off. FSDP reads it in its first forward pass,
            # which may be this one, and would keep that answer for the whole run.
            for parameter in trained:
                parameter.requires_grad_(True)
            yield self._policy

    def hidden_and_head(self, packed: Packed) -> tuple[Tensor, Head]:
        """The hidden states and head of the reference, for the exact KL."""
        with self.active() as policy:
            return policy.with_weights(lambda: policy.hidden_states(packed)), policy.head
