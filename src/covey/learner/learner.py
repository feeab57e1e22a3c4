"""The learner: a policy, its optimizer and its reference, and the two verbs of training.

``forward_backward`` adds the gradient of a batch under any objective; ``step`` applies it. Several learners
may live in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.batching import Batch, MicroBatch, micro_batches
from covey.config.schema import Train
from covey.errors import GuardStop, OutOfRoom, out_of_memory
from covey.learner.optimizer import Optimizer
from covey.models.alive import Activations, alive_bytes
from covey.models.logprobs import Head, TokenScores
from covey.models.packing import Packed
from covey.models.reference import Reference

WEIGHT = "weight/"
"""How names of weights begin among those of the optimizer's state."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Objective(Protocol[T_co]):
    """What a batch is trained on: the scalar to differentiate, and what is worth knowing about it."""

    @property
    def temperature(self) -> float:
        """Of the distribution whose log-probs are trained."""

    @property
    def max_tokens(self) -> int:
        """The limit on a completion's length that some reductions divide by."""

    @property
    def skips_idle(self) -> bool:
        """Whether completions without an advantage have no gradient and need not be computed."""

    @property
    def whole_groups(self) -> bool:
        """Whether the loss is one of all completions of a group, which may not be split then."""

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's whole distribution is needed, for the exact KL."""

    def __call__(self, micro: MicroBatch, scores: TokenScores) -> tuple[Tensor, T_co]:
        """A micro-batch's share of the loss, a scalar, and its statistics."""


class Trainable(Protocol):
    """A model under training: a policy, or a network for values."""

    model: PreTrainedModel

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained ones of ``model``."""

    def unsaved(self) -> dict[str, Tensor]:
        """Weights by name that the model folder of a checkpoint does not have."""

    def score(
        self, packed: Packed, temperature: float, reference: tuple[Tensor, Head] | None = None
    ) -> TokenScores:
        """What it says of every predicted token, (M,)."""


M = TypeVar("M", bound=Trainable)


def _nothing() -> None:
    pass


class Learner(Generic[M]):
    """The weights under training and what moves them."""

    def __init__(
        self,
        policy: M,
        train: Train,
        reference: Reference | None = None,
        *,
        head: nn.Module | None = None,
        pace: float = 1.0,
        before_micro_batch: Callable[[], None] = _nothing,
        when_halved: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``head`` learns at ``pace`` times the rate; ``when_halved`` is told the tokens of a micro-batch
        after memory ran out.
        """
        self.policy, self.reference, self.train = policy, reference, train
        self.optimizer = Optimizer(policy.parameters, train, list(head.parameters()) if head else (), pace)
        self.version = 0
        """Optimizer steps that moved the weights."""
        self.micro_tokens = train.tokens_per_micro_batch
        """Tokens in the model at once; halved when memory runs out."""
        self.before_micro_batch, self.when_halved = before_micro_batch, when_halved
        self.activations = Activations()

    @torch.no_grad()
    def score(self, batch: Batch, temperature: float, of: Trainable | None = None) -> TokenScores:
        """Log-probs, entropies, ... of a batch's tokens, (N, L) each on the CPU, zero on the padding.

        ``of``: under another policy, a reference say.
        """
        return self._until_it_fits(lambda: self._score(batch, temperature, of or self.policy))

    def _score(self, batch: Batch, temperature: float, policy: Trainable) -> TokenScores:
        rows = TokenScores(*(torch.zeros(batch.mask.shape) for _ in TokenScores._fields))
        start = 0
        for micro in micro_batches(batch, self.micro_tokens, 1):
            self.before_micro_batch()
            count, longest = micro.packed.place.shape
            scores = policy.score(micro.packed.to(policy.device), temperature)
            for into, values in zip(rows, scores, strict=True):
                if into is not None and values is not None:
                    into[start : start + count, :longest] = micro.packed.unpack(values.cpu())
            start += count
        return rows

    def forward_backward(self, batch: Batch, objective: Objective[T]) -> list[T]:
        """Add the gradient of an optimizer step's batch; the statistics of its micro-batches.

        Where memory runs out the gradient is begun again with micro-batches of half the size: the
        totals of the step travel with every piece, so the result stays the same. Raises OutOfRoom.
        """
        return self._until_it_fits(lambda: list(self._forward_backward(batch, objective)))

    def _forward_backward(self, batch: Batch, objective: Objective[T]) -> Iterator[T]:
        for loss, seen in self._losses(batch, objective):
            loss.backward()
            self.optimizer.accumulate()
            yield seen

    @torch.no_grad()
    def measure(self, batch: Batch, objective: Objective[T]) -> list[T]:
        """The statistics of a batch's micro-batches, without a gradient."""
        return self._until_it_fits(lambda: [seen for _, seen in self._losses(batch, objective)])

    def _losses(self, batch: Batch, objective: Objective[T]) -> Iterator[tuple[Tensor, T]]:
        trained = batch.select(torch.nonzero(batch.mask.any(-1))[:, 0].tolist())
        skips, whole = objective.skips_idle, objective.whole_groups
        for piece in micro_batches(trained, self.micro_tokens, objective.max_tokens, skips, whole):
            self.before_micro_batch()
            micro = replace(piece, packed=piece.packed.to(self.policy.device))
            needed = self.reference if objective.needs_reference else None
            other = needed.outputs(micro.packed) if needed is not None else None
            with self.activations.counted(self.policy.device, self.policy.model.parameters()):
                seen = objective(micro, self.policy.score(micro.packed, objective.temperature, other))
            yield seen

    def step(self, lr: float) -> float:
        """Apply the accumulated gradient; its norm before clipping.

        If that is not finite nothing is applied, and the gradient stays for a look until ``clear``.
        """
        norm = self.optimizer.step(lr)
        if math.isfinite(norm):
            self.version += norm > 0
        return norm

    def clear(self) -> None:
        """Forget the accumulated gradient."""
        self.optimizer.clear()

    def struck(self) -> list[str]:
        """Names of the parameters whose accumulated gradient is not finite."""
        names = (n for n, p in self.policy.model.named_parameters() if p.requires_grad)
        masters = zip((*names, *self.policy.unsaved()), self.optimizer.masters, strict=False)
        return [n for n, m in masters if m.grad is not None and not m.grad.isfinite().all()]

    def check_finite(self, what: str) -> None:
        """Raise GuardStop rather than let weights be written that are not finite."""
        for name, parameter in (*self.policy.model.named_parameters(), *self.policy.unsaved().items()):
            if not bool(parameter.isfinite().all()):
                raise GuardStop(
                    f"{what}: {name} is not finite, so nothing was written. Resume from the last checkpoint "
                    "with a lower train.lr or train.grad_clip"
                )

    def alive(self) -> dict[str, int]:
        """Bytes by what they are for, as measured: of gradients and activations the most so far."""
        weights = (*self.policy.model.parameters(), *self.policy.unsaved().values())
        return {
            "weights": alive_bytes(weights),
            "gradient": self.optimizer.gradient_bytes,
            "optimizer": self.optimizer.alive(),
            "activations": self.activations.most,
        }

    def state(self) -> dict[str, Tensor]:
        """What an exact continuation needs in addition to the model's folder, as named tensors."""
        weights = {f"{WEIGHT}{name}": w.detach() for name, w in self.policy.unsaved().items()}
        return {**self.optimizer.state(), **weights}

    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Restore ``state``; the weights are the policy's own business."""
        self.optimizer.load({name: value for name, value in state.items() if not name.startswith(WEIGHT)})
        with torch.no_grad():
            for name, weight in self.policy.unsaved().items():
                weight.copy_(state[f"{WEIGHT}{name}"])
        self.version = version

    def _until_it_fits(self, work: Callable[[], T]) -> T:
        while True:
            try:
                return work()
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
            # Outside the handler, where the traceback no longer holds the tensors.
            self.clear()
            self._halve()

    def _halve(self) -> None:
        if self.micro_tokens <= 1:
            raise OutOfRoom(
                "out of memory even with one completion at a time. Lower rollout.max_tokens, take a smaller "
                "model, or train adapters (lora)"
            )
        self.micro_tokens //= 2
        torch.cuda.empty_cache()
        self.when_halved(self.micro_tokens)
