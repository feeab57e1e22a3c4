"""Signs of trouble in a step's groups: metrics for the findings. They need no model.

Each is computed from completions, rewards and advantages. docs/metrics.md says what each
metric means, docs/findings.md how the findings use it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from covey.types import Group

MIN_COPIED_FRACTION = 0.75
"""A group has collapsed if at least this fraction of its completions is one text."""
MAX_NEAR_TIE = 0.05
"""Rewards of a group nearly tie if they differ by at most this fraction of the step's range of rewards."""


def group_signs(groups: Sequence[Group]) -> dict[str, float]:
    """Measure why groups are dead, and how little separates the rewards of the others."""
    rewards = np.concatenate([g.rewards for g in groups])
    scored = rewards[~np.isnan(rewards)]
    span = float(np.ptp(scored)) if len(scored) else 0.0
    live = [g for g in groups if not g.dead]
    # Dead although scored and not all correct: one text over and over, or different texts that tie.
    tied = [g for g in groups if g.dead and g.scorable.any() and not g.correct.all()]
    collapsed = [g for g in tied if _is_collapsed(g)]
    ended = [len(c.tokens) for g in groups for c in g.completions if c.finish == "stop"]
    signs = {
        "groups/collapsed": len(collapsed) / len(groups),
        "groups/cliff": (len(tied) - len(collapsed)) / len(groups),
        "groups/near_ties": _fraction(np.ptp(g.rewards[g.scorable]) <= MAX_NEAR_TIE * span for g in live),
        "groups/one_against_all": _fraction(lone(g) is not None for g in live),
        "reward/inconsistent": _disagreement(groups, _by_completion),
        # Truncated after an answer could be extracted: the text continued beyond it.
        "length/truncated_done": _fraction(chain.from_iterable(map(_truncated_with_answer, groups))),
    }
    if ended:
        signs["length/ended_q90"] = float(np.quantile(ended, 0.9))
    if any(component.steps for component in groups[0].components.values()):
        signs["steps/inconsistent"] = _disagreement(groups, _by_step)
    return signs


def _truncated_with_answer(group: Group) -> Iterator[bool]:
    """Yield for each truncated completion whether a reward extracted an answer from it."""
    for i, completion in enumerate(group.completions):
        if completion.finish == "length":
            scores = [component.scores[i] for component in group.components.values()]
            yield any(score.extracted is not None for score in scores)


def gradient_signs(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """Measure where the gradient goes: to which groups, and to prefixes that siblings share.

    ``advantages`` has (T,) for each completion of the groups, in their order.
    """
    one_by_one = iter(advantages)
    by_group = [[next(one_by_one) for _ in group.completions] for group in groups]
    # (groups,) size of each group in the gradient, and what it would be without dividing by the std.
    sizes = np.array([sum(float(np.abs(a).mean()) for a in of_group if len(a)) for of_group in by_group])
    spreads = np.array([np.abs(rewards - rewards.mean()).sum() for rewards in map(_scored_rewards, groups)])
    blamed = shared = 0.0
    for group, of_group in zip(groups, by_group, strict=True):
        for i, length in shared_prefixes(group, of_group).items():
            blamed += float(np.abs(of_group[i]).sum())
            shared += float(np.abs(of_group[i][:length]).sum())
    signs = {}
    if sizes.sum() > 0 and spreads.sum() > 0:
        signs["gradient_share/overweight"] = _distance(sizes, spreads)
    if blamed:
        signs["gradient_share/shared_prefix"] = shared / blamed
    return signs


def lone(group: Group) -> int | None:
    """Return the completion whose reward differs from all the others, which tie; None if there is none."""
    rewards = group.rewards
    # Two values, one of them once. In a group of two both occur once; the first is taken.
    counts = Counter(rewards[group.scorable].tolist())
    single = [r for r, n in counts.items() if n == 1]
    if len(counts) != 2 or not single:
        return None
    return int(np.flatnonzero(rewards == single[0])[0])


def shared_prefixes(group: Group, advantages: Sequence[np.ndarray]) -> dict[int, int]:
    """Return how many first tokens each completion of negative advantage shares with a positive one."""
    sums = [float(a.sum()) for a in advantages]
    praised = [c.tokens for c, s in zip(group.completions, sums, strict=True) if s > 0]
    if not praised:
        return {}
    width = max(map(len, praised))
    # (praised, width) tokens; -1, no token's id, after a shorter one's end.
    rows = np.full((len(praised), width), -1, np.int64)
    for row, tokens in zip(rows, praised, strict=True):
        row[: len(tokens)] = tokens
    counts = {}
    for i, (completion, total) in enumerate(zip(group.completions, sums, strict=True)):
        if total < 0:
            tokens = completion.tokens[:width]
            # Each row is true up to its first difference, so any(0) is the longest common prefix.
            same = np.logical_and.accumulate(rows[:, : len(tokens)] == tokens, axis=1)
            counts[i] = int(same.any(0).sum())
    return counts


def mixes_scripts(text: str) -> bool:
    """Whether a text has Latin words and another script. Tags and special tokens are no words.

    >>> mixes_scripts("答案 is 5"), mixes_scripts("<think>答案</think><|im_end|>")
    (True, False)
    """
    text = re.sub(r"<[^<>\s]{1,40}>", "", text)
    latin = bool(re.search(r"[a-zA-Z]{2}", text))
    # Cyrillic, Hebrew and Arabic, Japanese kana, Chinese characters, Korean.
    other = bool(re.search(r"[\u0400-\u04ff\u0590-\u06ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]", text))
    return latin and other


def repeated_windows(text: str) -> float:
    """Fraction of four-word windows that occurred before."""
    words = text.split()
    windows = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0


def known_mean(values: np.ndarray) -> float:
    """Return the mean of the known values; NaN, which is never recorded, if there are none."""
    numbers = values[~np.isnan(values)] if len(values) else values
    return float(numbers.mean()) if len(numbers) else math.nan


def _scored_rewards(group: Group) -> np.ndarray:
    """Return the rewards of a group's scored completions; one 0 if there are none."""
    return group.rewards[group.scorable] if group.scorable.any() else np.zeros(1)


def _is_collapsed(group: Group) -> bool:
    texts = Counter(c.text for c in group.completions)
    return len(group.completions) > 1 and max(texts.values()) >= MIN_COPIED_FRACTION * len(group.completions)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the total variation distance of two distributions, which need not be normalised."""
    return float(np.abs(a / a.sum() - b / b.sum()).sum() / 2)


Keyed = Callable[[Group], Iterable[tuple[bytes, float]]]


def _by_completion(group: Group) -> Iterable[tuple[bytes, float]]:
    """Yield the tokens of each completion with its reward."""
    pairs = zip(group.completions, group.rewards.tolist(), strict=True)
    return ((c.tokens.tobytes(), reward) for c, reward in pairs if not math.isnan(reward))


def _by_step(group: Group) -> Iterable[tuple[bytes, float]]:
    """Yield the tokens up to the end of each reasoning step with its reward, for each function."""
    for name, component in group.components.items():
        # A function that scores whole completions has no steps at all.
        for completion, steps in zip(group.completions, component.steps, strict=False):
            for end, value in zip(steps.ends, steps.values, strict=True):
                yield name.encode() + b"\0" + completion.tokens[: end + 1].tobytes(), value


def _disagreement(groups: Sequence[Group], keyed: Keyed) -> float:
    """Return the fraction of texts repeated within a group that did not always get the same reward."""
    repeated = other = 0
    for group in groups:
        paid: Mapping[bytes, list[float]] = defaultdict(list)
        for key, value in keyed(group):
            paid[key].append(value)
        twins = [values for values in paid.values() if len(values) > 1]
        repeated += sum(map(len, twins))
        other += sum(len(v) for v in twins if min(v) < max(v))
    return other / repeated if repeated else 0.0


def _fraction(holds: Iterable[object]) -> float:
    """Return the fraction of true values; 0 if there are no values."""
    truths = [bool(h) for h in holds]
    return sum(truths) / len(truths) if truths else 0.0
