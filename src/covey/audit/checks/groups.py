"""Groups of completions with their rewards, and checks of which completions are compared with each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import mode
from typing import NamedTuple

import torch
from torch import Tensor

from covey.audit.checks.check import Fault
from covey.audit.checks.preferences import learns_from_data
from covey.audit.record import AuditRecord, Rollout, Sample
from covey.objective.data import rows_of_groups
from covey.system.text import percent

MIN_GROUPS = 8
"""Fewest groups, or steps, of which "nine tenths" is said."""
MIN_SAMPLED_GROUPS = 4
"""Fewest sampled groups among which copies are counted."""
MIN_COPIES = 2
"""Fewest surplus copies in a group that is larger than the others."""


def weights_of(record: AuditRecord, names: Sequence[str]) -> list[float]:
    """Return the weight of each reward function."""
    weights = record.setting("reward_weights")
    if isinstance(weights, dict):
        return [float(weights.get(name, 1.0)) for name in names]
    if isinstance(weights, list) and len(weights) == len(names):
        return [float(weight) for weight in weights]
    return [1.0] * len(names)


class RewardTotals(NamedTuple):
    """The rewards of N completions by K functions, float64; NaN for a completion without any score."""

    rewards: Tensor
    """(N,): the weighted sums."""
    components: Tensor
    """(K, N): NaN where a function gave none."""
    weights: Tensor
    """(K,)."""


def totals(record: AuditRecord, samples: Sequence[Sample]) -> RewardTotals:
    """Return the rewards of completions, function by function and summed."""
    names = list(dict.fromkeys(name for s in samples for name in s.rewards))
    components = torch.full((len(names), len(samples)), math.nan, dtype=torch.float64)
    for k, name in enumerate(names):
        components[k] = tensor_of([s.rewards.get(name) for s in samples])
    weights = tensor_of(weights_of(record, names))
    recorded = tensor_of([s.reward for s in samples])
    if not recorded.isnan().all():
        # If rewards are recorded, the trainer left out a completion without one, whatever its scores say.
        return RewardTotals(recorded, components, weights)
    sums = (components.nan_to_num(0.0) * weights[:, None]).sum(0)
    return RewardTotals(sums.where(~components.isnan().all(0), math.nan), components, weights)


def tensor_of(values: Sequence[float | None]) -> Tensor:
    """Return the values as (N,) float64, with NaN for None."""
    return torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float64)


def groups_of(samples: Sequence[Sample]) -> list[int]:
    """Return the number of each completion's group: the recorded one, or else one number per prompt."""
    prompts = [s.prompt_text for s in samples]
    numbers = {prompt: n for n, prompt in enumerate(dict.fromkeys(prompts))}
    return [numbers[p] if s.group is None else s.group for s, p in zip(samples, prompts, strict=True)]


class ScoredGroup(NamedTuple):
    """A group of at least two completions with their rewards, which are NaN where unknown."""

    rollout: Rollout
    number: int
    places: list[int]
    """Indices of its completions in the rollout."""
    samples: list[Sample]
    rewards: list[float]


def scored_groups(record: AuditRecord) -> Iterator[ScoredGroup]:
    """Yield the groups of all rollouts that have at least two completions."""
    for rollout in record.rollouts:
        rewards = totals(record, rollout.completions).rewards.tolist()
        for number, rows in rows_of_groups(torch.tensor(groups_of(rollout.completions))):
            if len(rows) > 1:
                places = rows.tolist()
                samples = [rollout.completions[n] for n in places]
                yield ScoredGroup(rollout, number, places, samples, [rewards[n] for n in places])


# --- checks -----------------------------------------------------------------------------------------


def group_mixes_prompts(record: AuditRecord) -> Fault | None:
    """A group, whose completions the trainer compares with each other, has more than one prompt."""
    for rollout in record.rollouts:
        prompts: dict[int, str] = {}
        for index, sample in enumerate(rollout.completions):
            if sample.group is None:
                continue
            if prompts.setdefault(sample.group, sample.prompt_text) != sample.prompt_text:
                sentence = "a group has completions of several prompts, which are compared with each other"
                return Fault(sentence, rollout.step, {"group": sample.group, "completion": index})
    return None


def groups_have_one_completion(record: AuditRecord) -> Fault | None:
    """Every group of a rollout has one completion, although its prompts occur at least twice on average.
    Runs whose settings ask for one completion per prompt are not judged.
    """
    if record.number("num_generations", 0.0) == 1:
        return None
    for rollout in record.rollouts:
        numbers = [s.group for s in rollout.completions]
        prompts = {s.prompt_text for s in rollout.completions}
        if None not in numbers and len(set(numbers)) == len(numbers) >= 2 * len(prompts):
            sentence = f"{len(numbers)} completions of {len(prompts)} prompts are groups of one"
            evidence = {"group": numbers[0] or 0, "completion": 0}
            return Fault(f"{sentence}, compared with nothing", rollout.step, evidence)
    return None


def copies_fill_a_group(record: AuditRecord) -> Fault | None:
    """A group has more completions than the settings ask for, or than most groups have. All surplus
    completions, at least two, are copies of its others, and they are trained.
    """
    trained = {
        (use.row.rollout, use.row.completion)
        for use in record.uses
        if use.row.advantage and any(use.row.mask or ())
    }
    for rollout in record.rollouts:
        numbers = groups_of(rollout.completions)
        sizes = Counter(numbers)
        usual = int(record.number("num_generations", mode(sizes.values()) if sizes else 0))
        copies = _trained_copies(rollout, numbers, trained)
        for number, size in sizes.items():
            surplus = size - usual
            places = copies.get(number, [])
            if MIN_COPIES <= surplus <= len(places):
                sentence = f"a group has {size} completions where others have {usual}: {surplus} are copies"
                evidence = {"group": number, "completion": places[-1]}
                return Fault(f"{sentence} and are trained a second time", rollout.step, evidence)
    return None


def _trained_copies(
    rollout: Rollout, numbers: Sequence[int], trained: set[tuple[int, int]]
) -> dict[int, list[int]]:
    """Return group -> places of its trained completions that repeat the ids of an earlier one."""
    copies: dict[int, list[int]] = {}
    earlier = set[tuple[int, tuple[int, ...]]]()
    for index, (sample, number) in enumerate(zip(rollout.completions, numbers, strict=True)):
        key = (number, tuple(sample.ids or ()))
        if key in earlier and sample.ids and (rollout.number, index) in trained:
            copies.setdefault(number, []).append(index)
        earlier.add(key)
    return copies


def siblings_are_copies(record: AuditRecord) -> Fault | None:
    """In more than three quarters of at least 4 groups, all completions are the same, or each occurs equally
    often, at least twice. Tokens are compared, or texts where tokens are unknown.
    """
    sampled = [group for group in scored_groups(record) if drawn(group.samples[0])]
    copies = [(group, set(Counter(map(drawn, group.samples)).values())) for group in sampled]
    copies = [(group, counts) for group, counts in copies if len(counts) == 1 and min(counts) > 1]
    if len(sampled) < MIN_SAMPLED_GROUPS or len(copies) <= 0.75 * len(sampled):
        return None
    group, counts = copies[0]
    sentence = f"in {len(copies)} of {len(sampled)} groups"
    if all(len(group.samples) in counts for group, counts in copies):
        sentence += " all completions are the same text"
    else:
        sentence += f" each completion occurs {min(counts)} times: engines or ranks draw with the same seed"
    return Fault(sentence, group.rollout.step, {"group": group.number})


def drawn(sample: Sample) -> str:
    """Return the sampled tokens, or else the text; '' if neither is known."""
    return str(sample.ids) if sample.ids else sample.text or ""


def draws_are_repeated(record: AuditRecord) -> Fault | None:
    """More than half of at least 4 groups whose prompt was sampled in an earlier rollout repeat the
    completions of that rollout's group, in its order, at least two of them different. Runs whose `algorithm`
    learns from pairs of its data, as dpo, are not judged.
    """
    if learns_from_data(record):
        return None
    earlier: dict[str, list[list[str]]] = {}
    again: list[tuple[ScoredGroup, bool]] = []
    for group in scored_groups(record):
        texts = [drawn(sample) for sample in group.samples]
        if len(set(texts)) < 2:
            continue
        before = earlier.setdefault(group.samples[0].prompt_text, [])
        again += [(group, texts in before)] if before else []
        before.append(texts)
    repeated = [group for group, same in again if same]
    if len(again) < MIN_SAMPLED_GROUPS or len(repeated) <= 0.5 * len(again):
        return None
    sentence = (
        f"{len(repeated)} of {len(again)} groups repeat an earlier rollout's completions of their prompt"
    )
    return Fault(
        f"{sentence}, in its order: sampling begins with the same random numbers again",
        repeated[0].rollout.step,
        {"group": repeated[0].number},
    )


def groups_are_dead(record: AuditRecord) -> Fault | None:
    """In more than nine in ten of at least 8 groups, all completions got the same reward. Or TRL's metric
    says so of every step, at least 8.
    """
    logged = [update.metrics.get("frac_reward_zero_std") for update in record.updates]
    shares = [share for share in logged if share is not None]
    if not record.rollouts and len(shares) >= MIN_GROUPS and min(shares) > 0.9:
        return Fault(f"in every step {percent(min(shares))} of the groups or more have equal rewards")
    groups = list(scored_groups(record))
    dead = [group for group in groups if len(set(group.rewards)) == 1]
    if len(groups) < MIN_GROUPS or len(dead) <= 0.9 * len(groups):
        return None
    sentence = f"in {len(dead)} of {len(groups)} groups all rewards are equal"
    if len(dead) == len(groups) and len({group.rewards[0] for group in groups}) > 1:
        sentence += " and differ between groups: they do not depend on the completion"
    return Fault(sentence, dead[0].rollout.step, {"group": dead[0].number})


CHECKS = {
    "group_mixed": group_mixes_prompts,
    "group_of_one": groups_have_one_completion,
    "group_padded": copies_fill_a_group,
    "copies": siblings_are_copies,
    "draws_repeat": draws_are_repeated,
    "dead_groups": groups_are_dead,
}
