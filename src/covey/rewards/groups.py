"""From scores to a group: gates, the weighted sum, step rewards, label noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from covey.rewards.contract import LARGEST_REWARD, Reward
from covey.rng import key, uniforms
from covey.types import Completion, Credit, Group, Problem
from covey_verify.errors import RewardError
from covey_verify.types import Score, StepRewards

ANSWERED = ("ok", "ambiguous")


def assemble(
    problem: Problem,
    prompt: np.ndarray,
    completions: Sequence[Completion],
    rewards: Sequence[Reward],
    scores: Mapping[str, Sequence[Score]],
) -> Group:
    """Scores -> a group: gates applied, components, their weighted sum, step rewards.

    Where a score that would count could not be made, the reward is unknown, NaN: the rest of the sum would
    compare the completion with siblings that were paid for more.
    """
    weights = {r.name: r.weight for r in rewards}
    counts = {r.name: [_gate_open(r.gated_by, scores, i) for i in range(len(completions))] for r in rewards}
    components = {
        name: np.array(
            [np.nan if s.value is None else s.value * c for s, c in zip(own, counts[name], strict=True)]
        )
        for name, own in scores.items()
    }
    steps = {
        name: tuple(_steps(s, c) for s, c in zip(own, counts[name], strict=True))
        for name, own in scores.items()
        if any(s.steps is not None for s in own)
    }
    unknown = [any(_lost(r, scores, i) for r in rewards) for i in range(len(completions))]
    totals = np.where(unknown, np.nan, combine(components, weights))
    scored = ~(np.isnan(np.stack(list(components.values()))).all(0) | unknown)
    if not (np.abs(totals[scored]) <= LARGEST_REWARD).all():
        raise RewardError(
            f"rewards {', '.join(weights)} on problem {problem.id}: a value times its weight, or their sum, "
            f"is above {LARGEST_REWARD:g}, whose square no float32 holds; pay less"
        )
    return Group(
        problem,
        prompt,
        tuple(completions),
        totals,
        components,
        weights,
        steps,
        scores={name: tuple(own) for name, own in scores.items()},
        verdict=next((r.name for r in rewards if r.verdict), ""),
    )


def _gate_open(gate: str | None, scores: Mapping[str, Sequence[Score]], sample: int) -> bool:
    """Whether the gating reward found an answer, a correct one or an incorrect one."""
    if gate is None:
        return True
    name, _, verdict = gate.partition(":")
    score = scores[name][sample]
    if score.value is None:
        return False
    return (score.value > 0.5) == (verdict == "correct") if verdict else score.status in ANSWERED


def _lost(reward: Reward, scores: Mapping[str, Sequence[Score]], sample: int) -> bool:
    """Whether the machinery failed on what a reward adds to the sum."""
    if reward.weight == 0:
        return False
    gate = (reward.gated_by or "").partition(":")[0]
    if gate and scores[gate][sample].status == "infra_error":
        return True
    failed = scores[reward.name][sample].status == "infra_error"
    return failed and _gate_open(reward.gated_by, scores, sample)


def _steps(score: Score, factor: float) -> StepRewards:
    """A function's step rewards of a completion, summed where steps end together; none where not judged."""
    ends: dict[int, list[float]] = {}
    for _, end, value in (score.steps or ()) if score.value is not None else ():
        ends.setdefault(end - 1, []).append(factor * value)
    return StepRewards([math.fsum(ends[end]) for end in sorted(ends)], sorted(ends))


def credited(group: Group, credit: Credit) -> Group:
    """The group as an algorithm trains on it: by step, a function that gives steps is worth their sum."""
    sums = {name: np.array([s.total for s in own]) for name, own in group.steps.items()}
    values = {n: np.where(np.isnan(v), v, sums.get(n, v)) for n, v in group.components.items()}
    counts = credit in ("step", "token") and bool(sums)
    if not counts:
        return replace(group, credit=credit)
    totals = np.where(group.scorable, combine(values, group.weights), np.nan)
    return replace(group, credit=credit, rewards=totals)


def combine(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Weighted sum of what applies; NaN where nothing does. name -> (G,) to (G,) float64.

    Rounded once, so that the order of the rewards changes no bit.
    """
    with np.errstate(over="ignore"):
        values = np.stack([weights[name] * value for name, value in components.items()])
    return np.array([_total(column[~np.isnan(column)].tolist()) for column in values.T])


def _total(values: Sequence[float]) -> float:
    """Infinite where the sum is beyond what a number can hold."""
    try:
        return math.fsum(values) if values else math.nan
    except (OverflowError, ValueError):
        return math.inf


def with_label_noise(group: Group, rewards: Sequence[Reward], noise: float, streams: Sequence[int]) -> Group:
    """The group as a judge sees it that is wrong about a fraction ``noise`` of everything it says.

    A score v in 0..1 becomes 1 - v, others stay; a step's v becomes -v. Each verdict and each step has a
    draw of its own, keyed by the completion's stream (G,) and the reward's name.
    """
    scores = {
        name: [_flipped(s, key(t, "noise", name), noise) for s, t in zip(own, streams, strict=True)]
        for name, own in group.scores.items()
    }
    return assemble(group.problem, group.prompt, group.completions, rewards, scores)


def _flipped(score: Score, stream: int, noise: float) -> Score:
    if score.value is None:
        return score
    steps = score.steps or ()
    verdict, *flips = (uniforms(stream, 1 + len(steps)) < noise).tolist()
    verdict &= 0 <= score.value <= 1
    signs = [-1 if flip else 1 for flip in flips]
    return replace(
        score,
        value=1 - score.value if verdict else score.value,
        steps=score.steps and tuple((a, b, sign * v) for (a, b, v), sign in zip(steps, signs, strict=True)),
        metrics={**score.metrics, "flipped": float(np.mean([verdict, *flips]))},
    )
