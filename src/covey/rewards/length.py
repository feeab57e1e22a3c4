"""Rewards that shape length and repetition. Lengths are in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from covey.rewards.answers import exact_answer, math_answer
from covey.types import ConfigError

VERDICTS = {"math_answer": math_answer, "exact_answer": exact_answer}


def soft_overlong(completion_ids: Sequence[Sequence[int]], *, limit: int, buffer: int) -> list[float]:
    """0 up to ``limit - buffer`` tokens, falling linearly to -1 at ``limit``, -1 beyond.

    DAPO, arXiv 2503.14476, equation 13.

    >>> soft_overlong([[0] * 6, [0] * 9, [0] * 12], limit=10, buffer=2)
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= limit:
        raise ConfigError(f"soft_overlong: buffer {buffer} must be at least 1 and at most limit {limit}")
    return [max(-1.0, min(0.0, (limit - buffer - len(ids)) / buffer)) for ids in completion_ids]


def cosine_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[Any],
    *,
    limit: int,
    right_short: float = 1.0,
    right_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceeded: float | None = None,
    verdict: Literal["math_answer", "exact_answer"] = "math_answer",
) -> list[float | None]:
    """long + (short - long)(1 + cos(pi t / limit)) / 2: brevity pays when right, effort when wrong.

    ``exceeded`` replaces the reward of a completion that reaches ``limit``; None where the verdict is.
    Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373 (2, 1, -10, 0, exceeded -10).

    >>> ids = [[0] * 0, [0] * 50, [0] * 50, [0] * 100]
    >>> cosine_length(["<answer>5</answer>"] * 4, ids, ["5", "5", "6", "5"], limit=100,
    ...               verdict="exact_answer")
    [1.0, 0.75, -0.75, 0.5]
    """
    if limit < 1:
        raise ConfigError(f"cosine_length: limit {limit} must be at least 1 token")
    if min(right_short, right_long) <= max(wrong_short, wrong_long):
        raise ConfigError(
            f"cosine_length: the least for a right answer, {min(right_short, right_long):g}, must be more "
            f"than the most for a wrong one, {max(wrong_short, wrong_long):g}, or being wrong would pay"
        )
    if verdict not in VERDICTS:
        raise ConfigError(f"cosine_length: verdict {verdict!r} is none of {', '.join(VERDICTS)}")
    rewards: list[float | None] = []
    for text, ids, gold in zip(completions, completion_ids, answer, strict=True):
        right = VERDICTS[verdict](text, gold)
        short, long = (right_short, right_long) if right else (wrong_short, wrong_long)
        part = min(len(ids) / limit, 1.0)
        value = long + (short - long) * (1 + math.cos(math.pi * part)) / 2
        value = exceeded if exceeded is not None and len(ids) >= limit else value
        rewards.append(None if right is None else value)
    return rewards


def repetition_penalty(
    completion_ids: Sequence[Sequence[int]], *, ngram: int = 3, most: float = 1.0
) -> list[float]:
    """-most (1 - different n-grams / all n-grams): 0 without repetition, towards -``most`` with only that.

    After arXiv 2502.03373, appendix C.2, as a share of the completion.

    >>> repetition_penalty([[1, 2, 3, 4], [5, 5, 5, 5, 5], [5]], ngram=2)
    [0.0, -0.75, 0.0]
    """
    if ngram < 1 or most <= 0:
        raise ConfigError(f"repetition_penalty: ngram {ngram} must be at least 1 and most {most:g} above 0")
    rewards = []
    for ids in completion_ids:
        grams = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
        rewards.append(-most * (1 - len(set(grams)) / len(grams)) if len(set(grams)) < len(grams) else 0.0)
    return rewards
