"""Batching of scored groups for training: Groups -> Batch -> minibatches -> MicroBatch.

A Batch holds N completions padded to L tokens, on the CPU; a MicroBatch holds some of them packed
without padding for the model, together with their (N, L) inputs. Any batch can be split anywhere: the
totals of the optimizer step travel along, so nothing needs to be divisible by anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from covey.models.logprobs import TokenOutputs
from covey.models.packing import Packed, pack
from covey.objective.axis_function import AxisFunction, values_of
from covey.objective.data import LossInputs, SelectionData
from covey.objective.reductions import Totals
from covey.sampling.prompts import EncodedProblem, GivenAnswer
from covey.types import Completion, Group, SamplingMask

T = TypeVar("T")


class OldDistribution(NamedTuple):
    """The policy's distribution at each token before the updates, (N, L) each."""

    entropy: Tensor
    collision: Tensor
    """Probability that two draws agree, sum_v pi(v)^2."""


class ValueTargets(NamedTuple):
    """The data that a critic learns from, (N, L) each."""

    values: Tensor
    """The critic's value of the text before each token, before the updates."""
    targets: Tensor
    returns: Tensor
    """The discounted return from each token on, which the values are compared with in the metrics."""


@dataclass(frozen=True)
class Batch:
    """N completions, right-padded to L tokens."""

    prompts: tuple[np.ndarray, ...]
    """(N,) arrays of token ids; completions of a group hold the same object."""
    tokens: tuple[np.ndarray, ...]
    """(N,) arrays of token ids."""
    group: Tensor
    """(N,) int64: the group of each completion."""
    rewards: Tensor
    """(N,) float64, NaN where unscored."""
    correct: Tensor
    """(N,) bool: the verdict."""
    mask: Tensor
    """(N, L) bool: the trained tokens."""
    sampler_logprobs: Tensor
    """(N, L) float32."""
    advantages: Tensor
    """(N, L) float32."""
    origin: Tensor
    """(N,) int64: each completion's place in the rollout batch."""
    sampling_masks: tuple[SamplingMask, ...] | None = None
    """(N,): the tokens that could be drawn at each place; None if all could."""
    old_logprobs: Tensor | None = None
    """(N, L): log-probs at the start of the updates; None while the ratio is 1 by construction."""
    old_distribution: OldDistribution | None = None
    ref_logprobs: Tensor | None = None
    """(N, L): log-probs under the reference, if the algorithm has a KL to it."""
    value_targets: ValueTargets | None = None
    selected: Tensor | None = None
    """(N, L) bool: the tokens of an optimizer step that ``algorithm.select_tokens`` singles out."""

    def __len__(self) -> int:
        return len(self.tokens)

    def has_gradient(self, skips_idle: bool) -> Tensor:
        """Return which completions have a gradient: (N,) bool.

        One without a trained token has none; with ``skips_idle`` nor has one without an advantage at these.
        """
        tokens = self.mask & self.advantages.bool() if skips_idle else self.mask
        return tokens.any(-1)

    def select(self, rows: Sequence[int]) -> Batch:
        """Return the batch of some rows, in that order, padded to their longest completion."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        longest = max((len(self.tokens[i]) for i in rows), default=0)

        def objects(values: Sequence[T]) -> tuple[T, ...]:
            return tuple(values[i] for i in rows)

        def by_token(values: Tensor) -> Tensor:
            return values[index, :longest]

        def by_token_if(values: Tensor | None) -> Tensor | None:
            return None if values is None else by_token(values)

        masks = self.sampling_masks
        old = self.old_distribution
        targets = self.value_targets
        return Batch(
            prompts=objects(self.prompts),
            tokens=objects(self.tokens),
            group=self.group[index],
            rewards=self.rewards[index],
            correct=self.correct[index],
            mask=by_token(self.mask),
            sampler_logprobs=by_token(self.sampler_logprobs),
            advantages=by_token(self.advantages),
            origin=self.origin[index],
            sampling_masks=None if masks is None else objects(masks),
            old_logprobs=by_token_if(self.old_logprobs),
            old_distribution=None if old is None else OldDistribution(*map(by_token, old)),
            ref_logprobs=by_token_if(self.ref_logprobs),
            value_targets=None if targets is None else ValueTargets(*map(by_token, targets)),
            selected=by_token_if(self.selected),
        )

    @property
    def group_tokens(self) -> Tensor:
        """(N,): trained tokens of each completion's group, counted within this batch."""
        lengths = self.mask.sum(-1)
        # Group numbers may have holes after ``select``, so the size is the largest one + 1.
        total = lengths.new_zeros(max(self.group.tolist(), default=-1) + 1)
        return total.index_add(0, self.group, lengths)[self.group]

    def totals(self, max_tokens: int) -> Totals:
        """Return the counts of an optimizer step on this batch."""
        trained = self.mask.any(-1)
        return Totals(
            tokens=int(self.mask.sum()),
            completions=int(trained.sum()),
            prompts=len(self.group[trained].unique()),
            max_tokens=max_tokens,
            rows=len(self),
            correct_tokens=int((self.mask & self.correct[:, None]).sum()),
        )


def by_completion(batch: Batch, values: Tensor) -> list[np.ndarray]:
    """Split (N, L) values of a batch into the values of each completion's tokens, (T,) each."""
    return [row[: len(tokens)].numpy() for row, tokens in zip(values, batch.tokens, strict=True)]


def collate(groups: Sequence[Group], mask_truncated: bool = False) -> Batch:
    """Collate groups into a Batch, without advantages. ``mask_truncated``: train no truncated completion."""
    owners = [g for g, group in enumerate(groups) for _ in group.completions]
    completions = [c for group in groups for c in group.completions]
    rewards = torch.tensor([r for g in groups for r in g.rewards.tolist()], dtype=torch.float64)
    trained = ~rewards.isnan()
    if mask_truncated:
        trained &= torch.tensor([c.finish != "length" for c in completions], dtype=torch.bool)
    # Unscored completions are not trained, nor are tokens that no sampler drew (tool output).
    mask = _pad([c.drawn_mask for c in completions], torch.bool) & trained[:, None]
    masks = tuple(c.sampling_mask for c in completions if c.sampling_mask is not None)
    assert len(masks) in (0, len(completions)), "one sampler drew them all"
    return Batch(
        prompts=tuple(groups[g].prompt for g in owners),
        tokens=tuple(c.tokens for c in completions),
        group=torch.tensor(owners, dtype=torch.int64),
        rewards=rewards,
        correct=torch.tensor([c for g in groups for c in g.correct.tolist()], dtype=torch.bool),
        mask=mask,
        sampler_logprobs=_pad([c.logprobs for c in completions], torch.float32),
        advantages=torch.zeros(mask.shape),
        origin=torch.arange(len(completions)),
        sampling_masks=masks or None,
    )


def _pad(rows: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Return rows of values, (L,) each, as (N, L) values with 0 after a row's end."""
    padded = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=dtype)
    for target, values in zip(padded, rows, strict=True):
        target[: len(values)] = torch.from_numpy(values)
    return padded


def with_signal(batch: Batch) -> Batch:
    """Return the batch, with alternating advantages if its rewards all tie, so that there is a gradient."""
    if batch.advantages.any():
        return batch
    signs = 1.0 - 2.0 * (torch.arange(len(batch)) % 2)
    return replace(batch, advantages=signs[:, None] * batch.mask)


def select_tokens(
    batch: Batch, choose: AxisFunction[SelectionData, Tensor], noise: Tensor | None = None
) -> Batch:
    """Return an optimizer step's batch with the tokens that ``algorithm.select_tokens`` singles out.

    ``noise`` belongs to the whole rollout batch, uniform in [0, 1), if the function asks for it.
    """
    old = batch.old_distribution
    data = SelectionData(
        advantages=batch.advantages,
        mask=batch.mask,
        rewards=batch.rewards,
        group=batch.group,
        sampler_logprobs=batch.sampler_logprobs,
        old_logprobs=batch.old_logprobs,
        old_entropy=None if old is None else old.entropy,
        old_collision=None if old is None else old.collision,
        noise=None if noise is None else noise[batch.origin, : batch.mask.shape[1]],
    )
    return replace(batch, selected=values_of("select_tokens", choose, data, batch.mask.shape))


@dataclass(frozen=True)
class MicroBatch:
    """Completions that go through the model together, with all inputs of the loss but the log-probs."""

    rows: Batch
    packed: Packed
    totals: Totals
    group_tokens: Tensor
    """(N,): trained tokens of each completion's group in the whole optimizer step."""
    numbers: Sequence[int] = ()
    """Numbers of its rows in the batch that it is part of, ascending."""
    repeated: bool = False
    """Whether it only repeats another one, so that all processes compute equally many micro-batches."""

    def loss_inputs(self, outputs: TokenOutputs) -> LossInputs:
        """Return the (N, L) inputs of the loss, on the device of ``outputs``."""
        device = outputs.logprobs.device
        unpack = self.packed.unpack

        def move(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows.to(device)

        logprobs = unpack(outputs.logprobs)
        old = move(self.rows.old_logprobs)
        return LossInputs(
            logprobs=logprobs,
            entropy=unpack(outputs.entropy),
            full_kl=unpack(outputs.full_kl),
            mask=self.rows.mask.to(device),
            advantages=self.rows.advantages.to(device),
            totals=self.totals,
            group_tokens=self.group_tokens.to(device),
            # Without old log-probs the ratio is exp(x - sg(x)): exactly 1, with its gradient.
            old_logprobs=logprobs.detach() if old is None else old,
            sampler_logprobs=self.rows.sampler_logprobs.to(device),
            ref_logprobs=move(self.rows.ref_logprobs),
            selected=move(self.rows.selected),
            correct=self.rows.correct.to(device),
            group=self.rows.group.to(device),
        )


def minibatches(batch: Batch, count: int, order: np.ndarray) -> list[Batch]:
    """Split whole groups into ``count`` batches of nearly equal size, in the given group order.

    If there are fewer groups, fewer batches are returned.
    """
    rows = {g: torch.nonzero(batch.group == g)[:, 0].tolist() for g in order.tolist()}
    parts = [p for p in np.array_split(order, count) if len(p)]
    rows_of_parts = [[i for g in part.tolist() for i in rows[g]] for part in parts]
    return [batch.select(part_rows) for part_rows in rows_of_parts]


def micro_batches(
    batch: Batch,
    token_budget: int,
    max_tokens: int,
    *,
    computed: Tensor | None = None,
    whole_groups: bool = False,
    rank: int = 0,
    processes: int = 1,
) -> Iterator[MicroBatch]:
    """Split an optimizer step's batch into packed pieces of about ``token_budget`` tokens.

    Completions of a group stay together while they fit, so that their prompt is computed once; a
    single completion longer than the budget forms a piece of its own. ``computed`` (N,) bool: the completions
    that are in pieces; None: all. The totals count the others too.
    ``whole_groups`` never splits a group, for losses over all of its completions. With several ``processes``
    the pieces are of about equal size, and each process gets every ``processes``-th of them.
    """
    totals = batch.totals(max_tokens)
    group_tokens = batch.group_tokens
    rows = range(len(batch)) if computed is None else torch.nonzero(computed)[:, 0].tolist()
    # Rows that may not be separated: a group, or else each row by itself.
    rows_of_unit: dict[int, list[int]] = {}
    for i in rows:
        unit = int(batch.group[i]) if whole_groups else i
        rows_of_unit.setdefault(unit, []).append(i)
    units = list(rows_of_unit.values())
    pieces = _pieces(batch, units, token_budget)
    # Rounded up: every process runs ``rounds`` micro-batches.
    rounds = -(-len(pieces) // processes)
    if processes > 1 and pieces:
        # From the even budget upwards, until the pieces fill no more than the rounds.
        budget = sum(_cost(batch, piece) for piece in pieces) // (rounds * processes)
        even_pieces = _pieces(batch, units, budget)
        while len(even_pieces) > rounds * processes:
            budget += budget // 16 + 1
            even_pieces = _pieces(batch, units, budget)
        pieces = even_pieces
    for number in range(rank, rounds * processes, processes):
        # Collective operations need all processes: one without a piece repeats the first, uncounted.
        repeated = number >= len(pieces)
        yield _micro(batch, pieces[0 if repeated else number], totals, group_tokens, repeated)


def _pieces(batch: Batch, units: Sequence[list[int]], token_budget: int) -> list[list[int]]:
    """Pack ``units``, whose rows stay together, into pieces of ``token_budget`` tokens if they fit."""
    pieces: list[list[int]] = []
    cost = 0
    for unit in units:
        prompt = batch.prompts[unit[0]]
        # The same object: the piece ends with a completion of this prompt, which is packed once.
        shared = bool(pieces) and prompt is batch.prompts[pieces[-1][-1]]
        unit_cost = _cost(batch, unit)
        further_cost = unit_cost - len(prompt) if shared else unit_cost
        if pieces and cost + further_cost <= token_budget:
            pieces[-1] += unit
            cost += further_cost
        else:
            pieces.append(list(unit))
            cost = unit_cost
    return pieces


def _cost(batch: Batch, rows: Sequence[int]) -> int:
    """Count the tokens that go through the model for some rows; consecutive rows share their prompt."""
    prompts = [batch.prompts[i] for i in rows]
    # Prompts that differ from the one before, by identity.
    new_prompts = (
        prompt for prompt, previous in zip(prompts, [None, *prompts], strict=False) if prompt is not previous
    )
    completion_tokens = sum(len(batch.tokens[i]) for i in rows)
    return completion_tokens + sum(map(len, new_prompts))


def _micro(batch: Batch, rows: list[int], totals: Totals, group_tokens: Tensor, repeated: bool) -> MicroBatch:
    part = batch.select(rows)
    prompts: list[np.ndarray] = []
    completions: list[list[np.ndarray]] = []
    for prompt, tokens in zip(part.prompts, part.tokens, strict=True):
        # Consecutive completions of one prompt are packed behind a single copy of it.
        if not prompts or prompt is not prompts[-1]:
            prompts.append(prompt)
            completions.append([])
        completions[-1].append(tokens)
    mask = None if part.sampling_masks is None else SamplingMask.join(part.sampling_masks)
    return MicroBatch(part, pack(prompts, completions, mask), totals, group_tokens[rows], rows, repeated)


def given_batch(examples: Sequence[EncodedProblem]) -> Batch:
    """Return given answers as completions: one group per example, with the labels as rewards.

    Advantages are 1 where a token is trained, or the value given for the token.
    """
    groups = []
    for example in examples:
        completions = tuple(map(_as_completion, example.answers))
        groups.append(Group(example.problem, example.tokens, completions, np.array(example.labels)))
    batch = collate(groups)
    targets = batch.mask.float()
    for row, answer in zip(targets, (a for e in examples for a in e.answers), strict=True):
        if answer.judgements is not None:
            row[: len(answer.judgements)] = torch.from_numpy(answer.judgements)
    return replace(batch, advantages=targets)


def _as_completion(answer: GivenAnswer) -> Completion:
    """Return a given answer as a completion; its log-probs are 0, as no sampler drew it."""
    zeros = np.zeros(len(answer.tokens), np.float32)
    return Completion(answer.tokens, zeros, "", "stop", drawn_mask=answer.trained)
