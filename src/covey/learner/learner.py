"""The learner: a network (a policy, a critic, a reward model), its optimizer and its reference.

``forward_backward`` adds the gradient of a batch under any objective; ``step`` applies it. Several learners
may live in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from covey.config.schema import Train
from covey.errors import GuardStop, OutOfRoom, RestartRequired, out_of_memory
from covey.learner.batching import Batch, MicroBatch, micro_batches
from covey.learner.optimizer import Optimizer
from covey.models.forward import Decoder
from covey.models.internals import all_finite
from covey.models.kernels.calls import threads_lent
from covey.models.live_memory import Activations, alive_bytes
from covey.models.logprobs import Head, TokenOutputs
from covey.models.packing import Packed
from covey.models.reference import Reference
from covey.models.sharded import copy_into, local_part
from covey.objective.axis_function import differentiating
from covey.system.processes import all_reduce_sum, gather, interleave, is_joint, rank, run_on_all, world_size

WEIGHT = "weight/"
"""Prefix of the names of weights among the names of the optimizer's state."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Requirements:
    """The demands of an objective on the pass over its batch."""

    temperature: float = 1.0
    """The temperature of the distribution whose log-probs are trained."""
    max_tokens: int = 1
    """The limit on a completion's length that some reductions divide by."""
    skips_idle: bool = False
    """Whether completions without an advantage have no gradient and need not be computed."""
    whole_groups: bool = False
    """Whether the loss needs all completions of a group, which may not be split then."""
    reference: bool = False
    """Whether the reference's whole distribution is needed, for the exact KL."""
    user_functions: Sequence[str] = ()
    """Names of the user's functions in the loss, for the error if it has no gradient."""


class Objective(Protocol[T_co]):
    """The loss of a batch: a scalar to differentiate, and its statistics."""

    @property
    def requires(self) -> Requirements:
        """Demands on the pass over the batch."""

    def __call__(self, micro: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, T_co]:
        """Return a micro-batch's part of the loss, a scalar, and its statistics."""


class Trainable(Protocol):
    """A model under training: a policy, or a network for values."""

    model: PreTrainedModel
    decoder: Decoder | None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters of ``model``."""

    def unsaved_weights(self) -> dict[str, Tensor]:
        """Weights by name that the model folder of a checkpoint does not have."""

    def split(self) -> None:
        """Keep only this process' part of the weights; all processes do this at once."""

    def update_unsharded(self) -> None:
        """Update the copies that need all of the weights; all processes do this at once."""

    def token_outputs(
        self, packed: Packed, temperature: float, reference: tuple[Tensor, Head] | None = None
    ) -> TokenOutputs:
        """Return log-prob, entropy, ... of every predicted token, (M,) each."""


M = TypeVar("M", bound=Trainable)


class LearnerMonitor:
    """Gets told of a learner's work, by calls of its methods. The base class ignores them."""

    def micro_batch_begins(self) -> None:
        """Called before each micro-batch; it may raise to stop."""

    def micro_batch_halved(self, tokens: int) -> None:
        """Called with the new micro-batch size after memory ran out."""

    def out_of_memory(self, tokens: int) -> None:
        """Called with the size for a new start, if one of several processes cannot continue."""


class Learner(Generic[M]):
    """The weights under training and their optimizer.

    Each of several processes has a part of the weights and of the micro-batches; arguments and results are
    the same on all of them.
    """

    def __init__(
        self,
        network: M,
        train: Train,
        reference: Reference | None = None,
        *,
        head: nn.Module | None = None,
        relative_lr: float = 1.0,
        monitor: LearnerMonitor | None = None,
    ) -> None:
        """``head`` learns at ``relative_lr`` times the rate."""
        if world_size() > 1:
            network.split()
            if reference is not None:
                reference.split()
        self.network = network
        self.reference = reference
        self.train = train
        self.optimizer = Optimizer(
            network.parameters, train, list(head.parameters()) if head else (), relative_lr
        )
        self.version = 0
        """Optimizer steps that moved the weights."""
        self.micro_tokens = train.tokens_per_micro_batch
        """Tokens in the model at once; halved when memory runs out."""
        self.monitor = monitor or LearnerMonitor()
        self.activations = Activations()

    @torch.no_grad()
    def token_outputs(self, batch: Batch, temperature: float, model: Trainable | None = None) -> TokenOutputs:
        """Return log-probs, entropies, ... of a batch's tokens, (N, L) each on the CPU, 0 on the padding.

        ``model``: another one than the learner's, such as a reference.
        """
        return self._until_it_fits(lambda: self._token_outputs(batch, temperature, model or self.network))

    def _token_outputs(self, batch: Batch, temperature: float, network: Trainable) -> TokenOutputs:
        # (fields, N, L); each process fills its own rows, and the sum over processes is the whole.
        rows = torch.zeros(len(TokenOutputs._fields), *batch.mask.shape)
        for micro in micro_batches(batch, self.micro_tokens, 1, rank=rank(), processes=world_size()):
            # An error of one process is raised on all of them here; otherwise they would wait for it.
            run_on_all(self.monitor.micro_batch_begins)
            # No row is left out here, so a micro-batch is a run of consecutive rows.
            longest = micro.packed.place.shape[1]
            span = slice(micro.numbers[0], micro.numbers[-1] + 1)
            outputs = network.token_outputs(micro.packed.to(network.device), temperature)
            for target, values in zip(rows, outputs, strict=True):
                if values is not None and not micro.repeated:
                    target[span, :longest] = micro.packed.unpack(values.cpu())
        return TokenOutputs(*all_reduce_sum(rows))

    def forward_backward(self, batch: Batch, objective: Objective[T]) -> list[T]:
        """Add the gradient of an optimizer step's batch; return the statistics of its micro-batches.

        If memory runs out, the gradient is begun again with micro-batches of half the size: the
        totals of the step travel with every piece, so the result stays the same. Raises OutOfRoom.
        """
        return self._of_all_processes(lambda: self._forward_backward(batch, objective))

    def _forward_backward(self, batch: Batch, objective: Objective[T]) -> Iterator[T | None]:
        for loss, statistics in self._losses(batch, objective):
            # A repeated micro-batch takes part in the collective operations and adds nothing.
            counted = loss if statistics is not None else loss * 0.0
            with differentiating(objective.requires.user_functions):
                counted.backward()
            self.optimizer.accumulate()
            yield statistics

    @torch.no_grad()
    def measure(self, batch: Batch, objective: Objective[T]) -> list[T]:
        """Return the statistics of a batch's micro-batches, without a gradient."""
        return self._of_all_processes(lambda: (stats for _, stats in self._losses(batch, objective)))

    def _of_all_processes(self, work: Callable[[], Iterator[T | None]]) -> list[T]:
        """Return the results of all processes' micro-batches, in the order of the batch."""
        # Listed inside, so that running out of memory in any micro-batch repeats all of them.
        statistics = self._until_it_fits(lambda: list(work()))
        return [result for result in interleave(gather(statistics)) if result is not None]

    def _losses(self, batch: Batch, objective: Objective[T]) -> Iterator[tuple[Tensor, T | None]]:
        """Yield losses and statistics of this process' micro-batches; no statistics of uncounted ones."""
        requires = objective.requires
        for piece in micro_batches(
            batch,
            self.micro_tokens,
            requires.max_tokens,
            computed=batch.has_gradient(requires.skips_idle),
            whole_groups=requires.whole_groups,
            rank=rank(),
            processes=world_size(),
        ):
            run_on_all(self.monitor.micro_batch_begins)
            micro = replace(piece, packed=piece.packed.to(self.network.device))
            reference = self.reference if requires.reference else None
            compared = reference.hidden_and_head(micro.packed) if reference is not None else None
            with self.activations.count_forward(self.network.device, self.network.model.parameters()):
                outputs = self.network.token_outputs(micro.packed, requires.temperature, compared)
                loss, statistics = objective(micro, outputs)
            yield loss, None if piece.repeated else statistics

    def step(self, lr: float) -> float:
        """Apply the accumulated gradient; return its norm before clipping.

        If that is not finite nothing is applied, and the gradient can be inspected until ``clear``.
        """
        with self._threads_lent():
            norm = self.optimizer.step(lr)
        if math.isfinite(norm):
            # A bool: an update of the head alone does not move the policy.
            self.version += self.optimizer.moved
            self._update_unsharded()
        return norm

    def clear(self) -> None:
        """Forget the accumulated gradient."""
        self.optimizer.clear()

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of the parameters whose accumulated gradient is not finite."""
        trained = (n for n, p in self.network.model.named_parameters() if p.requires_grad)
        # Policy and optimizer list their parameters in the same order; a head comes last.
        masters = zip((*trained, *self.network.unsaved_weights()), self.optimizer.masters, strict=False)
        nonfinite = [n for n, m in masters if m.grad is not None and not all_finite(local_part(m.grad))]
        return list(dict.fromkeys(name for names in gather(nonfinite) for name in names))

    def check_finite(self, what: str) -> None:
        """Raise GuardStop if a weight is not finite, so that it is never written."""
        run_on_all(lambda: self._check_finite(what))

    def _check_finite(self, what: str) -> None:
        for name, parameter in (
            *self.network.model.named_parameters(),
            *self.network.unsaved_weights().items(),
        ):
            if not all_finite(local_part(parameter)):
                raise GuardStop(
                    f"{what}: {name} is not finite, so nothing was written. Resume from the last checkpoint "
                    "with a lower train.lr or train.grad_clip"
                )

    def memory_bytes(self) -> dict[str, int]:
        """Return measured bytes by component; for gradients and activations the most so far."""
        weights = (*self.network.model.parameters(), *self.network.unsaved_weights().values())
        return {
            "weights": alive_bytes(weights),
            "gradient": self.optimizer.gradient_bytes,
            "optimizer": self.optimizer.memory_bytes(),
            "activations": self.activations.peak,
        }

    def state(self) -> dict[str, Tensor]:
        """Return what an exact continuation needs besides the model's folder, as named tensors."""
        # With sharded weights the optimizer's state has them already.
        unsaved = self.network.unsaved_weights().items() if world_size() == 1 else ()
        weights = {f"{WEIGHT}{name}": w.detach() for name, w in unsaved}
        return {**self.optimizer.state(), **weights}

    def split_as(self, name: str) -> Tensor:
        """Return the parameter whose sharding a tensor of ``state`` has, if their shapes are equal."""
        if name.startswith(WEIGHT):
            return self.network.unsaved_weights()[name.removeprefix(WEIGHT)]
        return self.optimizer.masters[int(name.rpartition(".")[2])]

    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Restore ``state``; the policy restores its own weights."""
        self.optimizer.load({name: value for name, value in state.items() if not name.startswith(WEIGHT)})
        with torch.no_grad():
            for name, weight in self.network.unsaved_weights().items():
                saved = state.get(f"{WEIGHT}{name}")
                if saved is not None:
                    copy_into(weight, saved)
        self.version = version
        self._update_unsharded()

    def _update_unsharded(self) -> None:
        if world_size() > 1:
            self.network.update_unsharded()

    def _until_it_fits(self, work: Callable[[], T]) -> T:
        while True:
            try:
                with self._threads_lent():
                    return work()
            # Torch has no exception of its own for memory on the CPU, so the message decides.
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                if not is_joint(error):  # the others are in the middle of it and wait for this process
                    raise self._begin_again() from None
            # Outside the handler, where the traceback no longer holds the tensors.
            self.clear()
            self._halve()

    def _begin_again(self) -> RestartRequired:
        half = max(1, self.micro_tokens // 2)
        self.monitor.out_of_memory(half)
        return RestartRequired(
            "out of memory in the middle of a micro-batch, for which other processes wait. From the last "
            f"checkpoint the run continues with micro-batches of {half} tokens"
        )

    def _threads_lent(self) -> AbstractContextManager[None]:
        return threads_lent(self.network.decoder is not None and self.network.decoder.all_compiled)

    def _halve(self) -> None:
        if self.micro_tokens <= 1:
            raise OutOfRoom(
                "out of memory even with one completion at a time. Lower rollout.max_tokens, take a smaller "
                "model, or train adapters (lora)"
            )
        self.micro_tokens //= 2
        torch.cuda.empty_cache()
        self.monitor.micro_batch_halved(self.micro_tokens)
