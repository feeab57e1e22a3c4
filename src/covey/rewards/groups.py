"""The way from scores to a group: gates, the weighted sum, step rewards, label noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from covey.rewards.contract import MAX_REWARD, Reward
from covey.rng import key, uniforms
from covey.types import Completion, Component, Credit, Group, Problem
from covey_verify.errors import RewardError
from covey_verify.types import Score, StepRewards


def assemble(
    problem: Problem,
    prompt: np.ndarray,
    completions: Sequence[Completion],
    rewards: Sequence[Reward],
    scores: Mapping[str, Sequence[Score]],
) -> Group:
    """Return the group of some scores: gates applied, components, their weighted sum, step rewards.

    If a score that would count could not be computed, the reward is unknown (NaN): the sum of the others
    would compare the completion with siblings that were paid for more.
    """
    samples = range(len(completions))
    weights = {reward.name: reward.weight for reward in rewards}
    verdict = next((reward.name for reward in rewards if reward.verdict), "")
    components = {
        reward.name: _component(reward, scores, samples, reward.name == verdict) for reward in rewards
    }
    values = {name: component.values for name, component in components.items()}
    # NaN has two meanings: a value of None alone does not apply and is left out of the sum, a lost score
    # makes the whole sum unknown.
    unknown = [any(_is_unknown(reward, scores, sample) for reward in rewards) for sample in samples]
    totals = np.where(unknown, np.nan, combine(values, weights))
    scored = totals[~np.isnan(totals)]
    if not (np.abs(scored) <= MAX_REWARD).all():
        raise RewardError(
            f"rewards {', '.join(weights)} on problem {problem.id}: a value times its weight, or their sum, "
            f"is above {MAX_REWARD:g}, whose square no float32 holds; pay less"
        )
    return Group(problem, prompt, tuple(completions), totals, components)


def _component(
    reward: Reward, scores: Mapping[str, Sequence[Score]], samples: Sequence[int], verdict: bool
) -> Component:
    """Return one reward's part of a group: its values are 0 behind a closed gate, NaN where it gave none."""
    by_sample = tuple(scores[reward.name])
    # 1 where the gate is open, 0 where it is closed.
    factors = [_is_paid(reward, scores, sample) for sample in samples]
    pairs = list(zip(by_sample, factors, strict=True))
    values = np.array([np.nan if score.value is None else score.value * factor for score, factor in pairs])
    steps: tuple[StepRewards, ...] = ()
    if any(score.steps is not None for score in by_sample):
        steps = tuple(_steps(score, factor) for score, factor in pairs)
    return Component(values, reward.weight, by_sample, steps, verdict)


def _is_paid(reward: Reward, scores: Mapping[str, Sequence[Score]], sample: int) -> bool:
    """Return whether a reward counts for a completion: it has no gate, or the gate is open."""
    return reward.gate is None or reward.gate.is_open(scores[reward.gate.reward][sample])


def _is_unknown(reward: Reward, scores: Mapping[str, Sequence[Score]], sample: int) -> bool:
    """Return whether an infra_error hides the amount that a reward adds to the sum."""
    if reward.weight == 0:
        return False
    # Without the gate's score it is unknown whether this reward would count.
    if reward.gate is not None and scores[reward.gate.reward][sample].status == "infra_error":
        return True
    failed = scores[reward.name][sample].status == "infra_error"
    return failed and _is_paid(reward, scores, sample)


def _steps(score: Score, factor: float) -> StepRewards:
    """Return the step rewards of a completion, summed if steps end together; none if it was not judged."""
    ends: dict[int, list[float]] = {}
    judged_steps = () if score.value is None else score.steps or ()
    # A Score's steps are (begin, end, value) with an exclusive end; a StepRewards wants the last token.
    for _, end, value in judged_steps:
        ends.setdefault(end - 1, []).append(factor * value)
    return StepRewards([math.fsum(ends[end]) for end in sorted(ends)], sorted(ends))


def with_credit(group: Group, credit: Credit) -> Group:
    """Return the group as an algorithm trains on it.

    If steps are credited, the value of a function that gives steps is their sum.
    """
    components = group.components
    if not sums_steps(group, credit):
        return replace(group, credit=credit)
    weights = {name: component.weight for name, component in components.items()}
    sums = combine({name: _sums_of_steps(component) for name, component in components.items()}, weights)
    return replace(group, credit=credit, rewards=np.where(group.scorable, sums, np.nan))


def sums_steps(group: Group, credit: Credit) -> bool:
    """Whether the reward of a completion is the sum of its steps' under an algorithm's credit."""
    return credit in ("step", "token") and any(c.steps for c in group.components.values())


def _sums_of_steps(component: Component) -> np.ndarray:
    """Return the sum of each completion's steps, (G,); its value if there are none, NaN if that is NaN."""
    if not component.steps:
        return component.values
    sums = np.array([steps.total for steps in component.steps])
    return np.where(np.isnan(component.values), component.values, sums)


def combine(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Return the weighted sum of the rewards that apply, NaN if none does. name -> (G,) to (G,) float64.

    The sum is rounded once, so the order of the rewards changes no bit.
    """
    # A reward of weight 0 only measures: if no other applies, the completion has no reward rather than 0.
    paying = [name for name in components if weights[name] != 0] or list(components)
    with np.errstate(over="ignore"):
        values = np.stack([weights[name] * components[name] for name in paying])
    return np.array([_total(column[~np.isnan(column)].tolist()) for column in values.T])


def _total(values: Sequence[float]) -> float:
    """Return the exactly rounded sum, infinity if no float holds it, NaN if there are no values."""
    try:
        return math.fsum(values) if values else math.nan
    except (OverflowError, ValueError):
        return math.inf


def with_label_noise(group: Group, rewards: Sequence[Reward], noise: float, streams: Sequence[int]) -> Group:
    """Return the group as a judge would score it who errs on a fraction ``noise`` of the labels.

    A flipped score v in 0..1 becomes 1 - v, others stay; a flipped step's v becomes -v. Each score and each
    step has a draw of its own, keyed by the completion's stream (G,) and the reward's name.
    """
    scores = dict[str, list[Score]]()
    for name, component in group.components.items():
        keys = [key(stream, "noise", name) for stream in streams]
        pairs = zip(component.scores, keys, strict=True)
        scores[name] = [_flip_score(score, noise_key, noise) for score, noise_key in pairs]
    return assemble(group.problem, group.prompt, group.completions, rewards, scores)


def _flip_score(score: Score, stream: int, noise: float) -> Score:
    if score.value is None:
        return score
    steps = score.steps or ()
    # The first draw is the score's, the others are the steps'.
    flip_value, *flips = (uniforms(stream, 1 + len(steps)) < noise).tolist()
    flip_value &= 0 <= score.value <= 1
    flipped_steps = tuple(
        (begin, end, -value if flip else value)
        for (begin, end, value), flip in zip(steps, flips, strict=True)
    )
    return replace(
        score,
        value=1 - score.value if flip_value else score.value,
        steps=flipped_steps if score.steps else score.steps,
        metrics={**score.metrics, "flipped": float(np.mean([flip_value, *flips]))},
    )
