"""The frozen copy of the policy that a KL is measured to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from covey.models.logprobs import Head
from covey.models.packing import Packed
from covey.models.policy import Policy, weights_hash


class Reference:
    """The policy as it was at the start: a frozen copy, or the model with its adapter off."""

    def __init__(self, policy: Policy, moves: bool = False) -> None:
        # A reference that will move needs weights of its own, also where adapters are trained.
        self._adapter = None if moves else policy.adapter
        self._policy = policy
        if self._adapter is None:
            frozen = copy.deepcopy(policy.model).requires_grad_(False)
            self._policy = Policy(frozen, policy.tokenizer, precision=policy.precision)

    @property
    def has_weights(self) -> bool:
        """Whether it has weights in memory besides the policy's."""
        return self._adapter is None

    @torch.no_grad()
    def refresh(self, policy: Policy, mix: float) -> None:
        """Move towards the policy: all the way with ``mix`` 1."""
        for weight, new in zip(self._policy.model.parameters(), policy.model.parameters(), strict=True):
            weight.lerp_(new, mix)

    def state(self) -> dict[str, Tensor]:
        """Its weights by name, for a checkpoint; empty while it shares the policy's."""
        return {} if self._adapter is not None else dict(self._policy.model.named_parameters())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore ``state``."""
        for name, weight in self.state().items():
            weight.copy_(state[name])

    def fingerprint(self) -> str:
        """A hash of its weights, so that a record can say to which model the KL was measured."""
        weights = self._policy.model.state_dict()
        return weights_hash({k: v for k, v in weights.items() if self._adapter is None or "lora_" not in k})

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """The reference as a policy, without gradient, inside the block."""
        off = self._adapter.disable_adapter() if self._adapter is not None else nullcontext()
        with torch.no_grad(), off:
            yield self._policy

    def outputs(self, packed: Packed) -> tuple[Tensor, Head]:
        """Its hidden states and head, for the exact KL."""
        with self.active() as policy:
            return policy.hidden(packed), policy.head
